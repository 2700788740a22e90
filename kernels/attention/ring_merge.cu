// Combines the partial outputs of a GPU's queries, one over the keys of each GPU, to the attention
// output.
//
//   top = max over p of lse_p,  w_p = exp(lse_p - top)
//   out = sum over p of w_p o_p / sum over p of w_p          (of each row)
//
// In the first half of a head's rows only the first `first` partial outputs count: under a causal
// mask the keys of the other GPUs are hidden from these rows. For the second half of a head's rows
// all partial outputs count.
//
// Threads: one thread for eight elements of an output row; the thread loads all partial outputs
// before it uses the first. Bound: device memory; the kernel reads kPartialOutputs outputs with
// their log-sum-exps and writes one output.
#include "attention/shape.cuh"

constexpr int kThreads = THREADS;
constexpr int kPartialOutputs = GPUS;
constexpr int kWords = 4;  // of two elements, in a packet
constexpr int kRowPackets = kHeadDim / (2 * kWords);
static_assert(kPartialOutputs >= 2, "one part is the output itself");

// The partial outputs have the layout [kPartialOutputs][rows][d] with lse [kPartialOutputs][rows];
// a head has `length` query rows.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_ring_merge(const uint4* __restrict__ parts, const float* __restrict__ lse,
                         uint4* __restrict__ out, int rows, int length, int first) {
  const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const int row = static_cast<int>(at / kRowPackets);
  if (row >= rows) return;
  const int count = row % length < length / 2 ? first : kPartialOutputs;
  uint4 packet[kPartialOutputs];
  float weight[kPartialOutputs];
#pragma unroll
  for (int p = 0; p < kPartialOutputs; ++p) {
    packet[p] = make_uint4(0, 0, 0, 0);
    weight[p] = negative_infinity();
    if (p < count) {
      packet[p] = parts[static_cast<i64>(p) * rows * kRowPackets + at];
      weight[p] = lse[static_cast<i64>(p) * rows + row];
    }
  }
  float top = weight[0], sum = 0.f;
#pragma unroll
  for (int p = 1; p < kPartialOutputs; ++p) top = max_f32(top, weight[p]);
  float merged[2 * kWords] = {};
#pragma unroll
  for (int p = 0; p < kPartialOutputs; ++p) {
    const float w = exp2_approx((weight[p] - top) * kLog2E);
    const u32 words[kWords] = {packet[p].x, packet[p].y, packet[p].z, packet[p].w};
    sum += w;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      merged[2 * i] = fma_f32(w, Element::low(words[i]), merged[2 * i]);
      merged[2 * i + 1] = fma_f32(w, Element::high(words[i]), merged[2 * i + 1]);
    }
  }
  const float scale = reciprocal_approx(sum);
  u32 words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    words[i] = Element::pack(merged[2 * i] * scale, merged[2 * i + 1] * scale);
  out[at] = make_uint4(words[0], words[1], words[2], words[3]);
}
