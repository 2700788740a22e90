// Cross entropy of the logits, and its gradient, which may overwrite the logits.
//
//   loss[t] = log(sum_w e^logits[t,w]) - logits[t,target[t]]
//   dlogits[t,w] = (softmax(logits[t])[w] - [w = target[t]]) scale
//
// Layout: logits and gradients are [tokens, stride] in the element type. Only the first
// `vocabulary` columns of the logits count; the kernel writes the padding after them as 0. The
// targets are whole numbers stored as fp32. A target that is not a whole number of the vocabulary
// makes the token's loss and gradients NaN. Threads: each thread block computes the loss of one
// token. The thread block reads the token's row of logits once, PACKETS packets of 16 bytes a
// thread, and keeps the row in registers. Thread blocks go from the last token to the first, as in
// swiglu.cu, because L2 holds the last results of the previous GEMM. Shared memory: only for
// reductions over a thread block. Bound: memory; each logit is read and its gradient written, or
// without the gradient only read. mean_loss uses a thread block for each sequence. In mean_loss,
// thread i adds the losses of tokens i, i + THREADS and so on, so that every run gives the same
// bits.
#define STREAM_STORE "st.global"
#include "common/cluster.cuh"
#include "common/element.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS, kPackets = PACKETS;
constexpr int kPacket = 16 / kElementBytes;  // elements of a packet

using Values = float[kPacket];

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

// Sets the logits of a packet that lie beyond the vocabulary to -inf; the packet begins at column
// `column`.
__device__ __forceinline__ void mask_padding_columns(ElementPacket<kPacket>& packet, int column,
                                                     int vocabulary) {
  Values values;
  unpack_elements_to_floats<kPacket>(packet, values);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    if (column + j >= vocabulary) values[j] = negative_infinity();
  }
  packet = pack_floats_to_elements<kPacket>(values);
}

template <bool kGradient>
__device__ __forceinline__ void cross_entropy_of_token(const Element* logits, const float* targets,
                                              float* losses, Element* gradients, int vocabulary,
                                              int stride, float scale) {
  __shared__ float scratch[kThreads / 32];
  wait_for_previous_kernels();
  allow_next_kernel();
  const u32 token = gridDim.x - 1 - blockIdx.x;
  const i64 row = static_cast<i64>(token) * stride;
  const int first = threadIdx.x * kPacket;
  ElementPacket<kPacket> packets[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int column = first + i * (kThreads * kPacket);
    if (column < stride) packets[i] = load_coherent_packet<16>(logits + row + column);
  }
  const float target = targets[token];
  const bool valid = target >= 0.f && target < static_cast<float>(vocabulary) &&
                     target == static_cast<float>(static_cast<int>(target));
  const int target_column = valid ? static_cast<int>(target) : -1;
  Packet<kElementBytes> hit_packet;
  if (valid && threadIdx.x == 0) hit_packet = load_coherent_packet<kElementBytes>(logits + row +
      target_column);

  u32 largest = kNegativeInfinityWord;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int column = first + i * (kThreads * kPacket);
    if (column >= stride) break;
    if (column + kPacket > vocabulary) mask_padding_columns(packets[i], column, vocabulary);
#pragma unroll
    for (int word = 0; word < 4; ++word)
      largest = max_of_element_pairs(largest, packets[i].word[word]);
  }
  const float low = element_to_float<false>(largest), high = element_to_float<true>(largest);
  const float top = block_max<kThreads>(max_f32(low, high), scratch);
  const float shift = -top * kLog2E;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int column = first + i * (kThreads * kPacket);
    if (column >= stride) break;
    Values values;
    unpack_elements_to_floats<kPacket>(packets[i], values);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) sum += exp2_approx(fma_f32(values[j], kLog2E, shift));
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) {
    float hit_logit[1] = {not_a_number()};
    if (valid) unpack_elements_to_floats<1>(hit_packet, hit_logit);
    losses[token] = logf(sum) + top - hit_logit[0];
  }

  const float factor = valid ? scale / sum : not_a_number();
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int column = first + i * (kThreads * kPacket);
    if (column >= stride) break;
    if (!kGradient && column + kPacket <= vocabulary) continue;
    Values values;
    unpack_elements_to_floats<kPacket>(packets[i], values);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) {
      if (kGradient) values[j] = exp2_approx(fma_f32(values[j], kLog2E, shift)) * factor;
    }
    if (kGradient && target_column >= column && target_column < column + kPacket) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) {
        if (column + j == target_column) values[j] -= scale;
      }
    }
    if (column + kPacket > vocabulary) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) {
        if (column + j >= vocabulary) values[j] = 0.f;
      }
    }
    store_packet_evict_first<16>(gradients + row + column,
                                 pack_floats_to_elements<kPacket>(values));
  }
}

// The losses are fp32 [tokens]; stride, the elements between rows of logits, is a multiple of a
// packet.
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_loss(const Element* logits, const float* targets, float* losses,
                     Element* gradients, int vocabulary, int stride, float scale) {
  cross_entropy_of_token<true>(logits, targets, losses, gradients, vocabulary, stride, scale);
}

// Computes only the losses: the logits stay as they are, except for the padding, which becomes 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_loss_forward(Element* logits, const float* targets, float* losses, int vocabulary,
                             int stride) {
  cross_entropy_of_token<false>(logits, targets, losses, logits, vocabulary, stride, 0.f);
}

// Averages the losses, fp32 [sequences, context], of each sequence to means, fp32 [sequences].
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_mean_loss(const float* losses, float* means, int context) {
  __shared__ float scratch[kThreads / 32];
  wait_for_previous_kernels();
  allow_next_kernel();
  const float* from = losses + static_cast<i64>(blockIdx.x) * context;
  float sum = 0.f;
  for (int i = threadIdx.x; i < context; i += kThreads) sum += from[i];
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) means[blockIdx.x] = sum / static_cast<float>(context);
}
