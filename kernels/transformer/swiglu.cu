// The SwiGLU activation and its gradient.
//
//   h = silu(gate) up,  silu(z) = z s(z),  s(z) = 1 / (1 + e^-z)
//   dup = dh silu(gate),  dgate = dh up s(gate) (1 + gate (1 - s(gate)))
//
// Layout: gate_up [tokens, 2, ff], the gate first; h [tokens, ff]; ff is a multiple of a packet.
// Threads: each handles PACKETS packets of 16 bytes of h, one block size apart, and issues all its
// loads before its first store. Thread blocks go from the last token to the first: L2 still holds
// the last results of the previous GEMM, and the next GEMM begins with the results that this kernel
// wrote last. Shared memory: none. Bound: memory; for each element of h, the forward moves 3
// elements and the backward 5.
#define STREAM_STORE "st.global"
#include "common/cluster.cuh"
#include "common/element.cuh"
#include "common/math.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS, kPackets = PACKETS;
constexpr int kPacket = 16 / kElementBytes;  // elements of a packet

using Values = float[kPacket];

__device__ __forceinline__ float sigmoid(float z) {
  return reciprocal_approx(1.f + exp2_approx(-kLog2E * z));
}

// Returns the index of packet `i` of this thread among all packets of h.
__device__ __forceinline__ i64 packet_index(int i) {
  const u32 block = gridDim.x - 1 - blockIdx.x;
  return static_cast<i64>(block) * (kThreads * kPackets) + i * kThreads + threadIdx.x;
}

// Returns the offset in elements of the gate that belongs to packet `at` of h.
__device__ __forceinline__ i64 gate_offset(i64 at, int ff) {
  return at * kPacket + quotient(at, ff / kPacket) * ff;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_swiglu(const Element* gate_up, Element* h, i64 tokens, int ff) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 packets = tokens * (ff / kPacket);
  ElementPacket<kPacket> gates[kPackets], ups[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const i64 at = packet_index(i);
    if (at >= packets) break;
    const Element* from = gate_up + gate_offset(at, ff);
    gates[i] = load_read_only_packet<16>(from);
    ups[i] = load_read_only_packet<16>(from + ff);
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const i64 at = packet_index(i);
    if (at >= packets) break;
    Values gate, up;
    unpack_elements_to_floats<kPacket>(gates[i], gate);
    unpack_elements_to_floats<kPacket>(ups[i], up);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) up[j] *= gate[j] * sigmoid(gate[j]);
    store_packet_evict_first<16>(h + at * kPacket, pack_floats_to_elements<kPacket>(up));
  }
}

// The output grad_gate_up may overwrite gate_up.
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_swiglu_backward(const Element* gate_up, const Element* grad_h,
                                Element* grad_gate_up, i64 tokens, int ff) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 packets = tokens * (ff / kPacket);
  ElementPacket<kPacket> gates[kPackets], ups[kPackets], slopes[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const i64 at = packet_index(i);
    if (at >= packets) break;
    const Element* from = gate_up + gate_offset(at, ff);
    gates[i] = load_coherent_packet<16>(from);
    ups[i] = load_coherent_packet<16>(from + ff);
    slopes[i] = load_read_only_packet<16>(grad_h + at * kPacket);
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const i64 at = packet_index(i);
    if (at >= packets) break;
    Values gate, up, slope;
    unpack_elements_to_floats<kPacket>(gates[i], gate);
    unpack_elements_to_floats<kPacket>(ups[i], up);
    unpack_elements_to_floats<kPacket>(slopes[i], slope);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) {
      const float s = sigmoid(gate[j]), silu = gate[j] * s;
      gate[j] = slope[j] * up[j] * (s + silu * (1.f - s));
      up[j] = slope[j] * silu;
    }
    Element* to = grad_gate_up + gate_offset(at, ff);
    store_packet_evict_first<16>(to, pack_floats_to_elements<kPacket>(gate));
    store_packet_evict_first<16>(to + ff, pack_floats_to_elements<kPacket>(up));
  }
}
