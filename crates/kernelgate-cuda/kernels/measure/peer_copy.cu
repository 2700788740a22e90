// Copies to the memory of another GPU.
//
//   to[i] = from[i] for packets i of 16 bytes
//
// Threads: stride over the packets, kAtOnce each at a time. The buffer `to` lies on the other GPU.
// Bound: the link between the GPUs.
#include "common/types.cuh"

constexpr int kThreads = 512;
constexpr int kAtOnce = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    measure_peer_copy(const uint4* __restrict__ from, uint4* __restrict__ to, i64 packets) {
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  const i64 first = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  for (i64 i = first; i < packets; i += kAtOnce * stride) {
    uint4 packet[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (i + k * stride < packets) packet[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (i + k * stride < packets) to[i + k * stride] = packet[k];
  }
}
