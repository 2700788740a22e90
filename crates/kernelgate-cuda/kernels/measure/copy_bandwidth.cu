// Measures the highest copy bandwidth of device memory: target = source.
//
// Threads: each copies PACKETS 16-byte packets, blockDim.x packets apart, and loads all of them
// before it stores the first.
// Grid: ceil(packets / (blockDim.x · PACKETS)).
// Bound: memory bandwidth, with 2 bytes of traffic (read and written) for each byte of a buffer.
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

extern "C" __global__ void measure_copy_bandwidth(void* __restrict__ target,
                                                  const void* __restrict__ source,
                                                  long long packets) {
  const long long first_packet = static_cast<long long>(blockIdx.x) * blockDim.x * PACKETS +
      threadIdx.x;
  Packet<16> packet[PACKETS];
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long packet_index = first_packet + static_cast<long long>(i) * blockDim.x;
    if (packet_index < packets) packet[i] =
        load_read_only_packet<16>(static_cast<const char*>(source) + packet_index * 16);
  }
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long packet_index = first_packet + static_cast<long long>(i) * blockDim.x;
    if (packet_index < packets)
      store_packet_evict_first<16>(static_cast<char*>(target) + packet_index * 16, packet[i]);
  }
}
