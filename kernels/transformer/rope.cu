// Rotary position embedding (RoPE) of queries and keys, with interleaved pairs.
//
//   (a, b) -> (a cos - b sin, a sin + b cos), pair p of a head at position t: angle t theta^(-2p/D)
//
// With direction 1 the kernel rotates forward, with -1 back, which is the gradient. Layout: qkv is
// [tokens, 3, heads, head_dim]; the kernel reads only q and k of it. A token's row of the output
// `rotated` begins with q and k; rows are `stride` elements apart, and `rotated` may overwrite qkv.
// Token t of the batch has position t % context in its sequence. The RoPE table, fp32 [context,
// head_dim / 2, 2], holds the cosine and the sine of each position and pair. Threads: one for each
// packet of 16 bytes of q and k; head_dim is even, and heads x head_dim is a multiple of a packet.
// Shared memory: none. Bound: memory; for every 6 elements of a token's qkv the kernel moves 4, and
// the table stays in cache.
#define STREAM_STORE "st.global"
#include "common/cluster.cuh"
#include "common/element.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS;
constexpr int kPacket = 16 / kElementBytes, kPairs = kPacket / 2;

extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_rope(const Element* qkv, const float* table, Element* rotated, i64 tokens,
                     int context, int heads, int head_dim, int stride, float direction) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int d = heads * head_dim, token_packets = 2 * d / kPacket;
  const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= tokens * token_packets) return;
  const i64 token = quotient(at, token_packets);
  const int column = static_cast<int>(at - token * token_packets) * kPacket;
  const int position = static_cast<int>(token - quotient(token, context) * context);
  const ElementPacket<kPacket> packet = load_coherent_packet<16>(qkv + token * 3 * d + column);
  const float* angles = table + static_cast<i64>(position) * head_dim;
  float cosines[kPairs], sines[kPairs];
  int element = column % head_dim;
  if (head_dim % kPacket == 0) {
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      const Packet<16> two = load_read_only_packet<16>(angles + element + 2 * i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        cosines[i + j] = __uint_as_float(two.word[2 * j]);
        sines[i + j] = __uint_as_float(two.word[2 * j + 1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Packet<8> one = load_read_only_packet<8>(angles + element);
      cosines[i] = __uint_as_float(one.word[0]);
      sines[i] = __uint_as_float(one.word[1]);
      element = element + 2 == head_dim ? 0 : element + 2;
    }
  }
  float values[kPacket];
  unpack_elements_to_floats<kPacket>(packet, values);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float a = values[2 * i], b = values[2 * i + 1], sine = direction * sines[i];
    values[2 * i] = a * cosines[i] - b * sine;
    values[2 * i + 1] = a * sine + b * cosines[i];
  }
  store_packet_evict_first<16>(rotated + token * stride + column,
                               pack_floats_to_elements<kPacket>(values));
}
