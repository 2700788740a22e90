// Softmax of rows of fp32 scores, whose result is 16-bit: a warp loads each row once, by 16-byte
// accesses, and keeps the row in registers.
//
//   p[j] = exp(x[j] - max_j x) / sum_j exp(x[j] - max_j x), 16-bit
//
// Threads: a warp computes a row. A lane has four adjacent keys of every 128: it loads 16 bytes of
// scores and stores 8 bytes of probabilities. A lane loads all of its up to MAX_KEYS / 32 scores
// before it uses the first. The vectorised softmax kernel uses neither shared memory nor a barrier
// of the thread block. Bound: device memory, 4 bytes read and 2 bytes written for each score. A
// score takes about 15 instructions; the time of its loads and stores would suffice for three times
// as many. Against the softmax of forward_naive: one pass over the row instead of three, a warp for
// each row instead of a thread block, 16-byte loads. The number of keys of a row must be a multiple
// of four and at most MAX_KEYS.
#include "common/element16.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

#ifndef DTYPE
#error "compile with -DDTYPE=Bf16 or -DDTYPE=F16"
#endif

using Element = DTYPE;
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kPacket = PACKET;                                               // keys of an access
constexpr int kPackets = MAX_KEYS / (static_cast<int>(kWarpSize) * kPacket);  // accesses of a lane
static_assert(kPacket == 4, "a packet is one 16-byte load and one 8-byte store");
static_assert(MAX_KEYS % (static_cast<int>(kWarpSize) * kPacket) == 0,
              "a row of MAX_KEYS is whole accesses of a warp");
static_assert(kThreads % static_cast<int>(kWarpSize) == 0, "a block is whole warps");

// Each thread block computes the softmax of kWarps rows. Scores and probabilities have the layout
// [rows][keys] and are 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_softmax_vectorized(const float* __restrict__ scores, u16* __restrict__ probabilities,
                                 i64 rows, int keys) {
  const i64 row = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= rows) return;  // the whole warp
  const int lane = threadIdx.x % kWarpSize, packets = keys / kPacket;
  const float4* from = reinterpret_cast<const float4*>(scores + row * keys);
  uint2* to = reinterpret_cast<uint2*>(probabilities + row * keys);

  float4 x[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int at = i * kWarpSize + lane;
    const float minus_infinity = negative_infinity();  // the exponential of which is 0
    x[i] = at < packets ? from[at] :
        make_float4(minus_infinity, minus_infinity, minus_infinity, minus_infinity);
  }
  float best = negative_infinity();
#pragma unroll
  for (int i = 0; i < kPackets; ++i)
    best = max_f32(best, max_f32(max_f32(x[i].x, x[i].y), max_f32(x[i].z, x[i].w)));
  best = max_across_lane_group<32>(best);

  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    x[i].x = exp2_approx((x[i].x - best) * kLog2E);
    x[i].y = exp2_approx((x[i].y - best) * kLog2E);
    x[i].z = exp2_approx((x[i].z - best) * kLog2E);
    x[i].w = exp2_approx((x[i].w - best) * kLog2E);
    sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
  }
  const float inverse = 1.f / sum_across_lane_group<32>(sum);

#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int at = i * kWarpSize + lane;
    if (at < packets)
      to[at] = make_uint2(Element::pack(x[i].x * inverse, x[i].y * inverse),
                          Element::pack(x[i].z * inverse, x[i].w * inverse));
  }
}
