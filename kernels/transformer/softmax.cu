// Causal softmax of attention scores in memory, and its gradient.
//
//   p[i,j] = e^(scale s[i,j]) / sum_{k <= i} e^(scale s[i,k]) for j <= i, else 0
//   ds[i,j] = scale p[i,j] (dp[i,j] - sum_{k <= i} p[i,k] dp[i,k]) for j <= i, else 0
//
// Layout: scores, probabilities and their gradients are [heads, context, context]; heads are
// counted over the batch. In a build with SCORES_F32 the scores and dp are fp32; otherwise they
// have the element type, which p and ds always have. Outputs may overwrite inputs that have the
// same type. Threads: a warp computes a row of scores, with QUADS groups of four keys in the
// registers of each lane. The keys after the diagonal of the causal mask are not read. Shared
// memory: none. Bound: memory; half of the keys' scores are read, and all probabilities are
// written. If the context is not a multiple of 4, rows are not aligned to groups of four keys, and
// the keys are moved one by one.
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

// The packets of four keys that a lane holds of a row, in their memory format. The packets are
// unpacked only after the lane has issued all its loads.
template <typename T>
using KeyPackets = Packet<4 * sizeof(T)>[kQuads];

__device__ __forceinline__ int first_key_of_packet(int i) {
  return (i * static_cast<int>(kWarpSize) + static_cast<int>(threadIdx.x % kWarpSize)) * 4;
}

// Loads the packets that contain any of the first `visible_keys` keys of a row.
template <typename T>
__device__ __forceinline__ void load_keys(const T* row, int visible_keys, bool rows_are_aligned,
                                          KeyPackets<T>& packets) {
  if (rows_are_aligned) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (first_key_of_packet(i) < visible_keys)
        packets[i] = load_coherent_packet<4 * sizeof(T)>(row + first_key_of_packet(i));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    packets[i] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (first_key_of_packet(i) + j >= visible_keys) continue;
      const u32 bits = load_coherent_packet<sizeof(T)>(row + first_key_of_packet(i) + j).word[0];
      if constexpr (sizeof(T) == 4) {
        packets[i].word[j] = bits;
      } else {
        packets[i].word[j / 2] |= bits << (j % 2 * 16);
      }
    }
  }
}

// Makes the compiler treat the packed words as changed, so that it unpacks them again. Without the
// packed form, the unpacked values of a row would stay in registers, which other warps need.
template <typename T>
__device__ __forceinline__ void rematerialize(KeyPackets<T>& packets) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int word = 0; word < packets[i].kWords; ++word) asm("" : "+r"(packets[i].word[word]));
  }
}

// Unpacks a packet of four keys; keys from index `visible_keys` on get the value `filling`.
template <typename T>
__device__ __forceinline__ void unpack_four_keys(const Packet<4 * sizeof(T)>& packet, int column,
                                            int visible_keys, float filling, Quad& values) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = __uint_as_float(packet.word[j]);
  } else {
    unpack_elements_to_floats<4>(packet, values);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j >= visible_keys) values[j] = filling;
  }
}

__device__ __forceinline__ void store_keys(Element* row, int column, int context,
                                           bool rows_are_aligned,
                                           const Quad& values) {
  if (rows_are_aligned) return store_element_quad(row + column, values);
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
  const int visible_keys = static_cast<int>(row - quotient(row, context) * context) + 1;
  const bool rows_are_aligned = context % 4 == 0;
  KeyPackets<Score> packets;
  load_keys(scores + row * context, visible_keys, rows_are_aligned, packets);
  Quad values[kQuads];
  float top = negative_infinity();
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    unpack_four_keys<Score>(packets[i], first_key_of_packet(i), visible_keys, negative_infinity(),
                            values[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) top = max_f32(top, values[i][j]);
  }
  top = max_across_lane_group<32>(top);
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
  const float inverse = 1.f / sum_across_lane_group<32>(sum);
  Element* to = probabilities + row * context;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (first_key_of_packet(i) >= context) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i][j] *= inverse;
    store_keys(to, first_key_of_packet(i), context, rows_are_aligned, values[i]);
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
  const int visible_keys = static_cast<int>(row - quotient(row, context) * context) + 1;
  const bool rows_are_aligned = context % 4 == 0;
  KeyPackets<Element> own;
  KeyPackets<Score> gradients;
  load_keys(probabilities + row * context, visible_keys, rows_are_aligned, own);
  load_keys(grad_probabilities + row * context, visible_keys, rows_are_aligned, gradients);
  float mean = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    Quad p, slope;
    unpack_four_keys<Element>(own[i], first_key_of_packet(i), visible_keys, 0.f, p);
    unpack_four_keys<Score>(gradients[i], first_key_of_packet(i), visible_keys, 0.f, slope);
#pragma unroll
    for (int j = 0; j < 4; ++j) mean += p[j] * slope[j];
  }
  mean = sum_across_lane_group<32>(mean);
  rematerialize<Element>(own);
  rematerialize<Score>(gradients);
  Element* to = grad_scores + row * context;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (first_key_of_packet(i) >= context) break;
    Quad p, slope;
    unpack_four_keys<Element>(own[i], first_key_of_packet(i), visible_keys, 0.f, p);
    unpack_four_keys<Score>(gradients[i], first_key_of_packet(i), visible_keys, 0.f, slope);
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] *= scale * (slope[j] - mean);
    store_keys(to, first_key_of_packet(i), context, rows_are_aligned, p);
  }
}
