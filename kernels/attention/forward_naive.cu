// Attention forward in three kernels, one for each component: scores in device memory, one thread
// for each output element.
//
//   scores:   S[b,h,i,j] = q[i] . k[j] / sqrt(d), -inf where j > i if causal      fp32, [b,h,s,s]
//   softmax:  P = exp(S - max_j S) / sum_j exp(S - max_j S)                       16-bit, [b,h,s,s]
//             lse = max + ln(sum)
//   values:   out[i] = sum_j P[i,j] v[j]
//
// Threads: the scores kernel has a block of 16x16 threads for each tile of S. The softmax kernel
// has a thread block for each row of scores, and passes over the row three times. The values kernel
// has blocks of d x (256/d) threads, one thread for each output element. Shared memory: only eight
// floats in the softmax kernel. Bound: in theory fp32 FMA, 2 b h s^2 d FLOPs each for scores and
// values; in practice the loads, because only the caches reuse data. The least device memory
// traffic is 4 b h s^2 bytes written by scores, read by softmax, half as many written by softmax
// and read by values. forward_naive is the first rung of the forward ladder.
#include "attention/shape.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int kScoreTile = TILE;  // rows and columns of a tile of scores
constexpr int kThreads = THREADS;
constexpr int kValueRows = kThreads / kHeadDim;  // output rows of a block of the values kernel
static_assert(kScoreTile * kScoreTile == kThreads, "a thread computes one score of a tile");
static_assert(kThreads % kHeadDim == 0, "a block has whole rows of values");

// Each thread block computes one 16x16 tile of scores; blockIdx.z is the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_naive_scores(const u16* __restrict__ q, const u16* __restrict__ k,
                                   float* __restrict__ scores, int seqlen) {
  const int key = blockIdx.x * kScoreTile + threadIdx.x % kScoreTile;
  const int query = blockIdx.y * kScoreTile + threadIdx.x / kScoreTile;
  if (key >= seqlen || query >= seqlen) return;
  const i64 head = blockIdx.z;
  const u32* q_row = reinterpret_cast<const u32*>(q + (head * seqlen + query) * kHeadDim);
  const u32* k_row = reinterpret_cast<const u32*>(k + (head * seqlen + key) * kHeadDim);
  float sum = 0.f;
  for (int c = 0; c < kHeadDim / 2; ++c) {
    const u32 x = q_row[c], y = k_row[c];
    sum = fma_f32(Element::low(x), Element::low(y), sum);
    sum = fma_f32(Element::high(x), Element::high(y), sum);
  }
  scores[(head * seqlen + query) * seqlen + key] =
      kCausal && key > query ? negative_infinity() : sum * kScale;
}

// Each thread block computes the softmax of one row of scores; lse may be null.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_naive_softmax(const float* __restrict__ scores,
                                    u16* __restrict__ probabilities, float* __restrict__ lse,
                                    int seqlen) {
  __shared__ float scratch[kThreads / 32];
  const float* row = scores + static_cast<i64>(blockIdx.x) * seqlen;
  u16* to = probabilities + static_cast<i64>(blockIdx.x) * seqlen;
  float best = negative_infinity();
  for (int j = threadIdx.x; j < seqlen; j += kThreads) best = max_f32(best, row[j]);
  best = block_max<kThreads>(best, scratch);
  float sum = 0.f;
  for (int j = threadIdx.x; j < seqlen; j += kThreads) sum += exp2_approx((row[j] - best) * kLog2E);
  sum = block_sum<kThreads>(sum, scratch);
  const float inverse = 1.f / sum;
  for (int j = threadIdx.x; j < seqlen; j += kThreads)
    to[j] = Element::from_f32(exp2_approx((row[j] - best) * kLog2E) * inverse);
  if (lse != nullptr && threadIdx.x == 0) lse[blockIdx.x] = best + log2_approx(sum) * kLn2;
}

// Each thread block computes the attention output of kValueRows queries; blockIdx.y is the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_naive_values(const u16* __restrict__ probabilities, const u16* __restrict__ v,
                                   u16* __restrict__ out, int seqlen) {
  const int column = threadIdx.x % kHeadDim;
  const int query = blockIdx.x * kValueRows + threadIdx.x / kHeadDim;
  if (query >= seqlen) return;
  const i64 head = blockIdx.y;
  const u16* p = probabilities + (head * seqlen + query) * seqlen;
  const u16* v_column = v + head * seqlen * kHeadDim + column;
  const int keys = kCausal ? query + 1 : seqlen;
  float sum = 0.f;
  for (int j = 0; j < keys; ++j)
    sum = fma_f32(Element::to_f32(p[j]), Element::to_f32(v_column[static_cast<i64>(j) * kHeadDim]),
                  sum);
  out[(head * seqlen + query) * kHeadDim + column] = Element::from_f32(sum);
}
