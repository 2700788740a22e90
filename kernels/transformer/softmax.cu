// Causal softmax of attention scores that lie in memory, and its gradient.
//
//   p[i,j] = e^(scale s[i,j]) / sum_{k <= i} e^(scale s[i,k]) for j <= i, else 0
//   ds[i,j] = scale p[i,j] (dp[i,j] - sum_{k <= i} p[i,k] dp[i,k]) for j <= i, else 0
//
// Layout: scores, probabilities and their gradients [heads, context, context], heads counted over
// the batch. SCORES_F32: scores and dp are fp32; else they are elements, as p and ds are. Outputs may
// lie where the inputs do, if their type is the same.
// Threads: a warp a row, QUADS groups of four keys a lane, kept in registers. Keys behind the
// diagonal are not read.
// Shared memory: none.
// Bound: memory, half of the keys read and all written.
// A context that is not a multiple of 4 has rows that no group is aligned to: their keys are moved
// one by one.
#define STREAM_STORE "st.global"
#include "common/cluster.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "transformer/quads.cuh"

constexpr int kThreads = THREADS, kQuads = QUADS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);

#ifdef SCORES_F32
using Score = float;
#else
using Score = Element;
#endif

// Keys `column` to `column` + 3 of a row, of which the first `kept` are read; others are `filling`.
template <typename T>
__device__ __forceinline__ void load_keys(const T* row, int column, int kept, bool aligned,
                                          float filling, Quad& values) {
  if (aligned) {
    if constexpr (sizeof(T) == 4) {
      load_f32_quad(reinterpret_cast<const float*>(row) + column, values);
    } else {
      load_quad(reinterpret_cast<const Element*>(row) + column, values);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j >= kept) {
      values[j] = filling;
    } else if (!aligned) {
      if constexpr (sizeof(T) == 4) {
        values[j] = reinterpret_cast<const float*>(row)[column + j];
      } else {
        values[j] = load_element(reinterpret_cast<const Element*>(row) + column + j);
      }
    }
  }
}

__device__ __forceinline__ void store_keys(Element* row, int column, int context, bool aligned,
                                           const Quad& values) {
  if (aligned) return store_quad(row + column, values);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j < context) store_element(row + column + j, values[j]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_causal_softmax(const Score* scores, Element* probabilities, i64 rows, int context,
                               float scale) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 row = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= rows) return;  // the whole warp
  const int kept = static_cast<int>(row - quotient(row, context) * context) + 1;
  const int first = threadIdx.x % kWarpSize * 4;
  const bool aligned = context % 4 == 0;
  const Score* from = scores + row * context;
  Quad values[kQuads];
  float top = negative_infinity();
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kWarpSize * 4);
    if (column < kept) load_keys(from, column, kept, aligned, negative_infinity(), values[i]);
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (first + i * static_cast<int>(kWarpSize * 4) >= kept) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) top = max_f32(top, values[i][j]);
  }
  top = lanes_max<32>(top);
  const float factor = scale * kLog2E;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const bool read = first + i * static_cast<int>(kWarpSize * 4) < kept;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[i][j] = read ? exp2_approx((values[i][j] - top) * factor) : 0.f;
      sum += values[i][j];
    }
  }
  const float inverse = 1.f / lanes_sum<32>(sum);
  Element* to = probabilities + row * context;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kWarpSize * 4);
    if (column >= context) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i][j] *= inverse;
    store_keys(to, column, context, aligned, values[i]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_causal_softmax_backward(const Element* probabilities,
                                        const Score* grad_probabilities, Element* grad_scores,
                                        i64 rows, int context, float scale) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 row = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= rows) return;  // the whole warp
  const int kept = static_cast<int>(row - quotient(row, context) * context) + 1;
  const int first = threadIdx.x % kWarpSize * 4;
  const bool aligned = context % 4 == 0;
  Quad p[kQuads], slopes[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kWarpSize * 4);
    if (column >= kept) break;
    load_keys(probabilities + row * context, column, kept, aligned, 0.f, p[i]);
    load_keys(grad_probabilities + row * context, column, kept, aligned, 0.f, slopes[i]);
  }
  float mean = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (first + i * static_cast<int>(kWarpSize * 4) >= kept) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) mean += p[i][j] * slopes[i][j];
  }
  mean = lanes_sum<32>(mean);
  Element* to = grad_scores + row * context;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kWarpSize * 4);
    if (column >= context) break;
    Quad values = {};
    if (column < kept) {
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] = scale * p[i][j] * (slopes[i][j] - mean);
    }
    store_keys(to, column, context, aligned, values);
  }
}
