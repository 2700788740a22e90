// Attention backward in four kernels, one thread for each result, with P and dS in device memory as
// fp32 [b,h,s,s].
//
//   delta:    delta[i] = sum_c dout[i,c] out[i,c]
//   scores:   P[i,j] = exp(q[i] . k[j] / sqrt(d) - lse[i])      (0 where j > i if causal)
//             dS[i,j] = P[i,j] (dout[i] . v[j] - delta[i])
//   dq:       dq[i] = sum_j dS[i,j] k[j] / sqrt(d)
//   dkv:      dk[j] = sum_i dS[i,j] q[i] / sqrt(d);   dv[j] = sum_i P[i,j] dout[i]
//
// The scores kernel recomputes P from the lse of the forward pass. Threads: the delta kernel has a
// warp for each row, the scores kernel a block of 16x16 threads for each 16x16 tile. The dq and dkv
// kernels have blocks of d x (256/d) threads, one thread for each element of dq, or of dk and dv.
// The four kernels of the naive backward use no shared memory. Bound: in theory fp32 FMA with 10 b
// h s^2 d FLOPs; in practice the loads of q, k, v and dout. The naive backward writes at least 8 b
// h s^2 bytes and reads at least 12 b h s^2 bytes of device memory.
#include "attention/shape.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int kScoreTile = TILE;  // rows and columns of a tile of scores
constexpr int kThreads = THREADS;
constexpr int kGradientRowsPerBlock = kThreads / kHeadDim;
static_assert(kScoreTile * kScoreTile == kThreads, "a thread computes one score of a tile");
static_assert(kThreads % kHeadDim == 0, "a block has whole rows of a gradient");

// Each warp computes delta, the inner product of dout and out, of one query row.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_naive_delta(const u16* __restrict__ out, const u16* __restrict__ dout,
                                   float* __restrict__ delta, int seqlen, int batch_heads) {
  const i64 row = static_cast<i64>(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (row >= static_cast<i64>(seqlen) * batch_heads) return;
  float sum = 0.f;
  for (int c = threadIdx.x % kWarpSize; c < kHeadDim; c += kWarpSize)
    sum = fma_f32(Element::to_f32(out[row * kHeadDim + c]),
                  Element::to_f32(dout[row * kHeadDim + c]), sum);
  sum = sum_across_lane_group<32>(sum);
  if (threadIdx.x % kWarpSize == 0) delta[row] = sum;
}

// Each thread block computes one 16x16 tile of P and dS; blockIdx.z is the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_naive_scores(const u16* __restrict__ q, const u16* __restrict__ k,
                                    const u16* __restrict__ v, const u16* __restrict__ dout,
                                    const float* __restrict__ lse, const float* __restrict__ delta,
                                    float* __restrict__ p, float* __restrict__ ds, int seqlen) {
  const int key = blockIdx.x * kScoreTile + threadIdx.x % kScoreTile;
  const int query = blockIdx.y * kScoreTile + threadIdx.x / kScoreTile;
  if (key >= seqlen || query >= seqlen) return;
  const i64 head = blockIdx.z, query_row = head * seqlen + query, key_row = head * seqlen + key;
  const u32* q_row = reinterpret_cast<const u32*>(q + query_row * kHeadDim);
  const u32* k_row = reinterpret_cast<const u32*>(k + key_row * kHeadDim);
  const u32* v_row = reinterpret_cast<const u32*>(v + key_row * kHeadDim);
  const u32* dout_row = reinterpret_cast<const u32*>(dout + query_row * kHeadDim);
  float score = 0.f, dp = 0.f;
  for (int c = 0; c < kHeadDim / 2; ++c) {
    const u32 a = q_row[c], b = k_row[c], g = dout_row[c], w = v_row[c];
    score = fma_f32(Element::low(a), Element::low(b), score);
    score = fma_f32(Element::high(a), Element::high(b), score);
    dp = fma_f32(Element::low(g), Element::low(w), dp);
    dp = fma_f32(Element::high(g), Element::high(w), dp);
  }
  const float probability =
      kCausal && key > query ? 0.f : exp2_approx(score * kScaleLog2 - lse[query_row] * kLog2E);
  p[query_row * seqlen + key] = probability;
  ds[query_row * seqlen + key] = probability * (dp - delta[query_row]);
}

// Each thread block computes dq for kGradientRowsPerBlock queries; blockIdx.y is the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_naive_dq(const float* __restrict__ ds, const u16* __restrict__ k,
                                u16* __restrict__ dq, int seqlen) {
  const int column = threadIdx.x % kHeadDim;
  const int query = blockIdx.x * kGradientRowsPerBlock + threadIdx.x / kHeadDim;
  if (query >= seqlen) return;
  const i64 head = blockIdx.y, row = head * seqlen + query;
  const u16* keys_at_column = k + head * seqlen * kHeadDim + column;
  const int keys = kCausal ? query + 1 : seqlen;
  float sum = 0.f;
  for (int j = 0; j < keys; ++j)
    sum = fma_f32(ds[row * seqlen + j],
                  Element::to_f32(keys_at_column[static_cast<i64>(j) * kHeadDim]),
                  sum);
  dq[row * kHeadDim + column] = Element::from_f32(sum * kScale);
}

// Each thread block computes dk and dv for kGradientRowsPerBlock keys; blockIdx.y is the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_naive_dkv(const float* __restrict__ p, const float* __restrict__ ds,
                                 const u16* __restrict__ q, const u16* __restrict__ dout,
                                 u16* __restrict__ dk, u16* __restrict__ dv, int seqlen) {
  const int column = threadIdx.x % kHeadDim;
  const int key = blockIdx.x * kGradientRowsPerBlock + threadIdx.x / kHeadDim;
  if (key >= seqlen) return;
  const i64 head = blockIdx.y, first_row = head * seqlen;
  float dk_sum = 0.f, dv_sum = 0.f;
  for (int i = kCausal ? key : 0; i < seqlen; ++i) {
    const i64 row = first_row + i;
    dk_sum = fma_f32(ds[row * seqlen + key], Element::to_f32(q[row * kHeadDim + column]), dk_sum);
    dv_sum = fma_f32(p[row * seqlen + key], Element::to_f32(dout[row * kHeadDim + column]), dv_sum);
  }
  dk[(first_row + key) * kHeadDim + column] = Element::from_f32(dk_sum * kScale);
  dv[(first_row + key) * kHeadDim + column] = Element::from_f32(dv_sum);
}
