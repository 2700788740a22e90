// Causal softmax of attention scores in memory, and its gradient.
//
//   p[i,j] = e^(scale s[i,j]) / sum_{k <= i} e^(scale s[i,k]) for j <= i, else 0
//   ds[i,j] = scale p[i,j] (dp[i,j] - sum_{k <= i} p[i,k] dp[i,k]) for j <= i, else 0
//
// Layout: scores, probabilities and their gradients are [heads, context, context]; heads are
// counted over the batch. With SCORES_F32 scores and dp are fp32; otherwise they have the element
// type, as p and ds always have. Outputs may overwrite the inputs if their type is the same.
// Threads: a warp computes a row, with QUADS groups of four keys in registers of each lane. Keys
// after the diagonal are not read.
// Shared memory: none.
// Bound: memory; half of the keys are read and all are written. If the context is not a multiple of
// 4, rows are not aligned to groups of four keys: their keys are moved one by one.
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

// Packets of four keys that a lane holds, in their memory format. The packets are unpacked after
// all loads have been issued.
template <typename T>
using KeyPackets = Packet<4 * sizeof(T)>[kQuads];

__device__ __forceinline__ int key_column(int i) {
  return (i * static_cast<int>(kWarpSize) + static_cast<int>(threadIdx.x % kWarpSize)) * 4;
}

// Loads the packets that hold any of the first `kept` keys of a row.
template <typename T>
__device__ __forceinline__ void load_keys(const T* row, int kept, bool aligned,
                                          KeyPackets<T>& packets) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (key_column(i) < kept) packets[i] = load_coherent<4 * sizeof(T)>(row + key_column(i));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    packets[i] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key_column(i) + j >= kept) continue;
      const u32 bits = load_coherent<sizeof(T)>(row + key_column(i) + j).word[0];
      if constexpr (sizeof(T) == 4) {
        packets[i].word[j] = bits;
      } else {
        packets[i].word[j / 2] |= bits << (j % 2 * 16);
      }
    }
  }
}

// Makes the compiler treat the packed words as changed, so that it unpacks them again. Without the
// packed form, the unpacked values of a row would occupy registers that other warps need.
template <typename T>
__device__ __forceinline__ void rematerialize(KeyPackets<T>& packets) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int word = 0; word < packets[i].kWords; ++word) asm("" : "+r"(packets[i].word[word]));
  }
}

// Unpacks a packet; keys from `kept` on get the value `filling`.
template <typename T>
__device__ __forceinline__ void unpack_keys(const Packet<4 * sizeof(T)>& packet, int column,
                                            int kept, float filling, Quad& values) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = __uint_as_float(packet.word[j]);
  } else {
    unpack<4>(packet, values);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j >= kept) values[j] = filling;
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
  const bool aligned = context % 4 == 0;
  KeyPackets<Score> packets;
  load_keys(scores + row * context, kept, aligned, packets);
  Quad values[kQuads];
  float top = negative_infinity();
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    unpack_keys<Score>(packets[i], key_column(i), kept, negative_infinity(), values[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) top = max_f32(top, values[i][j]);
  }
  top = lanes_max<32>(top);
  const float factor = scale * kLog2E;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[i][j] = exp2_approx((values[i][j] - top) * factor);
      sum += values[i][j];
    }
  }
  const float inverse = 1.f / lanes_sum<32>(sum);
  Element* to = probabilities + row * context;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (key_column(i) >= context) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i][j] *= inverse;
    store_keys(to, key_column(i), context, aligned, values[i]);
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
  const bool aligned = context % 4 == 0;
  KeyPackets<Element> own;
  KeyPackets<Score> gradients;
  load_keys(probabilities + row * context, kept, aligned, own);
  load_keys(grad_probabilities + row * context, kept, aligned, gradients);
  float mean = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    Quad p, slope;
    unpack_keys<Element>(own[i], key_column(i), kept, 0.f, p);
    unpack_keys<Score>(gradients[i], key_column(i), kept, 0.f, slope);
#pragma unroll
    for (int j = 0; j < 4; ++j) mean += p[j] * slope[j];
  }
  mean = lanes_sum<32>(mean);
  rematerialize<Element>(own);
  rematerialize<Score>(gradients);
  Element* to = grad_scores + row * context;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (key_column(i) >= context) break;
    Quad p, slope;
    unpack_keys<Element>(own[i], key_column(i), kept, 0.f, p);
    unpack_keys<Score>(gradients[i], key_column(i), kept, 0.f, slope);
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] *= scale * (slope[j] - mean);
    store_keys(to, key_column(i), context, aligned, p);
  }
}
