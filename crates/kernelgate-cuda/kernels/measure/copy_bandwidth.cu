// Measures the copy ceiling of device memory: target = source.
//
// Threads: PACKETS 16-byte packets each, a block apart, all loaded before the first is stored.
// Grid: ceil(packets / (blockDim.x · PACKETS)).
// Bound: 2 bytes of memory traffic for each byte of a buffer.
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

extern "C" __global__ void measure_copy_bandwidth(void* __restrict__ target,
                                                  const void* __restrict__ source,
                                                  long long packets) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x * PACKETS + threadIdx.x;
  Packet<16> packet[PACKETS];
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long at = first + static_cast<long long>(i) * blockDim.x;
    if (at < packets) packet[i] = load_stream<16>(static_cast<const char*>(source) + at * 16);
  }
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long at = first + static_cast<long long>(i) * blockDim.x;
    if (at < packets) store_stream<16>(static_cast<char*>(target) + at * 16, packet[i]);
  }
}
