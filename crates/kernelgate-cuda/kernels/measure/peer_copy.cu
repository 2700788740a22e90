// Copies a buffer of this GPU to the memory of another GPU, to measure the link's bandwidth.
//
//   to[i] = from[i] for packets i of 16 bytes
//
// Threads: a grid-stride loop over 16-byte packets, kPacketsAtOnce packets per thread and
// iteration. The buffer `to` lies in the memory of the other GPU. Bound: the bandwidth of the link
// between the GPUs.
#include "common/types.cuh"

constexpr int kThreads = 512;
constexpr int kPacketsAtOnce = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    measure_peer_copy(const uint4* __restrict__ from, uint4* __restrict__ to, i64 packets) {
  const i64 packet_stride = static_cast<i64>(gridDim.x) * kThreads;
  const i64 first_packet = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  for (i64 i = first_packet; i < packets; i += kPacketsAtOnce * packet_stride) {
    uint4 packet[kPacketsAtOnce];
#pragma unroll
    for (int k = 0; k < kPacketsAtOnce; ++k)
      if (i + k * packet_stride < packets) packet[k] = from[i + k * packet_stride];
#pragma unroll
    for (int k = 0; k < kPacketsAtOnce; ++k)
      if (i + k * packet_stride < packets) to[i + k * packet_stride] = packet[k];
  }
}
