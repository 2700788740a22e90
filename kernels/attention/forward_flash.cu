// Attention forward in one kernel on the CUDA cores, with an online softmax: scores never leave the
// chip.
//
//   for each block of 64 keys:  S = q k^T;  m' = max(m, max_j S);  P = exp((S - m') / sqrt(d))
//                               l = l exp((m - m') / sqrt(d)) + sum_j P
//                               o = o exp((m - m') / sqrt(d)) + P v;  m = m'
//   out = o / l,  lse = m / sqrt(d) + ln(l)
//
// Threads: a block of 16x16 threads computes 64 queries. In a block of 16x16 threads, thread (x, y)
// owns queries 4y..4y+3, the scores of keys 4x..4x+3, and output columns 4x + 64c..+3. The sixteen
// threads that own a query row are half a warp, so shuffles compute the row's maximum and sum.
// Shared memory, fp32: q transposed [d][68]; k transposed [d][68], overwritten by v [64][d]; P
// transposed [64][68]. A thread block uses 85 KiB of shared memory at d = 128, so that two thread
// blocks run on an SM. Bound: fp32 FMA, 4 b h s^2 d FLOPs (half with a causal mask). The inner loop
// of both GEMMs needs two 16-byte loads from shared memory for 16 FMAs. Against forward_tiled: one
// launch, and no scores in device memory; instead 8 b h s d bytes and repeated reads of k and v.
#include "attention/shape.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int kTile = TILE;        // queries of a block, keys of a step
constexpr int kPitch = kTile + 4;  // floats of a row in shared memory
constexpr int kThreads = THREADS;
constexpr int kOutputBlocksOf64 = kHeadDim / 64;
constexpr int kVPitch = kHeadDim;
constexpr int kQFloats = kHeadDim * kPitch;
constexpr int kPFloats = kTile * kPitch;
constexpr int kSharedBytes = (2 * kQFloats + kPFloats) * 4;
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");
static_assert(kTile * kTile == 16 * kThreads, "a thread computes 4x4 scores of a tile");
static_assert(kTile * kVPitch <= kQFloats, "v must fit where k was");
static_assert(kSharedBytes <= 227 * 1024,
              "the tiles must fit the 227 KiB of shared memory a block can have");

// Copies 64 rows of a [rows, d] matrix to shared memory as fp32, transposed to [d][kPitch]; rows
// past the end become zero.
__device__ __forceinline__ void load_rows_transposed_as_fp32(float* to, const u16* from, int row0,
                                                             int rows) {
  const int row = threadIdx.x % kTile;
  for (int chunk = threadIdx.x / kTile; chunk < kHeadDim / 8; chunk += kThreads / kTile) {
    uint4 x = make_uint4(0u, 0u, 0u, 0u);
    if (row0 + row < rows)
      x = *reinterpret_cast<const uint4*>(from + static_cast<i64>(row0 + row) * kHeadDim +
                                          chunk * 8);
    const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[(chunk * 8 + 2 * i) * kPitch + row] = Element::low(w[i]);
      to[(chunk * 8 + 2 * i + 1) * kPitch + row] = Element::high(w[i]);
    }
  }
}

__device__ __forceinline__ void load_rows_as_fp32(float* to, const u16* from, int row0, int rows) {
  for (int at = threadIdx.x; at < kTile * kHeadDim / 8; at += kThreads) {
    const int row = at / (kHeadDim / 8), chunk = at % (kHeadDim / 8);
    uint4 x = make_uint4(0u, 0u, 0u, 0u);
    if (row0 + row < rows)
      x = *reinterpret_cast<const uint4*>(from + static_cast<i64>(row0 + row) * kHeadDim +
                                          chunk * 8);
    float4* p = reinterpret_cast<float4*>(to + row * kVPitch + chunk * 8);
    p[0] =
        make_float4(Element::low(x.x), Element::high(x.x), Element::low(x.y), Element::high(x.y));
    p[1] =
        make_float4(Element::low(x.z), Element::high(x.z), Element::low(x.w), Element::high(x.w));
  }
}

// Each thread block computes one tile of 64 queries of one head; adjacent thread blocks have
// adjacent tiles. lse may be null.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    attention_forward_flash(const u16* __restrict__ q, const u16* __restrict__ k,
                            const u16* __restrict__ v, u16* __restrict__ out,
                            float* __restrict__ lse, int seqlen) {
  extern __shared__ __align__(16) float shared[];
  float* q_tile = shared;
  float* kv_tile = q_tile + kQFloats;
  float* p_tile = kv_tile + kQFloats;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const int query_tiles_of_head = (seqlen + kTile - 1) / kTile;
  const int tile = kCausal ?
      query_tiles_of_head - 1 - static_cast<int>(blockIdx.x % query_tiles_of_head)
                           : static_cast<int>(blockIdx.x % query_tiles_of_head);
  const i64 head = blockIdx.x / query_tiles_of_head;
  const int first_query_of_tile = tile * kTile;
  q += head * seqlen * kHeadDim;
  k += head * seqlen * kHeadDim;
  v += head * seqlen * kHeadDim;

  load_rows_transposed_as_fp32(q_tile, q, first_query_of_tile, seqlen);
  float o[4][kOutputBlocksOf64][4] = {};
  float top[4], sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    top[i] = negative_infinity();
    sum[i] = 0.f;
  }
  const int keys = kCausal ? min_of(seqlen, first_query_of_tile + kTile) : seqlen;
  for (int key0 = 0; key0 < keys; key0 += kTile) {
    __syncthreads();
    load_rows_transposed_as_fp32(kv_tile, k, key0, seqlen);
    __syncthreads();
    float s[4][4] = {};
#pragma unroll 8
    for (int c = 0; c < kHeadDim; ++c) {
      const float4 a = *reinterpret_cast<const float4*>(q_tile + c * kPitch + y * 4);
      const float4 b = *reinterpret_cast<const float4*>(kv_tile + c * kPitch + x * 4);
      const float four_of_operand_a[4] = {a.x, a.y, a.z, a.w},
          four_of_operand_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          s[i][j] = fma_f32(four_of_operand_a[i], four_of_operand_b[j], s[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = first_query_of_tile + y * 4 + i;
      float best = negative_infinity();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = key0 + x * 4 + j;
        if (key >= seqlen || (kCausal && key > query)) s[i][j] = negative_infinity();
        best = max_f32(best, s[i][j]);
      }
      // Every query row sees a key of the first key block, so the new maximum is finite.
      const float m = max_f32(top[i], max_across_lane_group<16>(best));
      const float scale = exp2_approx((top[i] - m) * kScaleLog2);
      top[i] = m;
      float row_sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = exp2_approx((s[i][j] - m) * kScaleLog2);
        row_sum += s[i][j];
      }
      sum[i] = sum[i] * scale + row_sum;
#pragma unroll
      for (int c = 0; c < kOutputBlocksOf64; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][c][j] *= scale;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float4*>(p_tile + (x * 4 + j) * kPitch + y * 4) =
          make_float4(s[0][j], s[1][j], s[2][j], s[3][j]);
    __syncthreads();
    load_rows_as_fp32(kv_tile, v, key0, seqlen);
    __syncthreads();
#pragma unroll 4
    for (int j = 0; j < kTile; ++j) {
      const float4 a = *reinterpret_cast<const float4*>(p_tile + j * kPitch + y * 4);
      const float four_of_operand_a[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int c = 0; c < kOutputBlocksOf64; ++c) {
        const float4 b = *reinterpret_cast<const float4*>(kv_tile + j * kVPitch + c * 64 + x * 4);
        const float four_of_operand_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            o[i][c][e] = fma_f32(four_of_operand_a[i], four_of_operand_b[e], o[i][c][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int query = first_query_of_tile + y * 4 + i;
    const float total = sum_across_lane_group<16>(sum[i]);
    const float inverse = 1.f / total;
    if (query >= seqlen) continue;
#pragma unroll
    for (int c = 0; c < kOutputBlocksOf64; ++c) {
      u32* to = reinterpret_cast<u32*>(out + (head * seqlen + query) * kHeadDim + c * 64 + x * 4);
      to[0] = Element::pack(o[i][c][0] * inverse, o[i][c][1] * inverse);
      to[1] = Element::pack(o[i][c][2] * inverse, o[i][c][3] * inverse);
    }
    if (lse != nullptr && x == 0)
      lse[head * seqlen + query] = top[i] * kScale + log2_approx(total) * kLn2;
  }
}
