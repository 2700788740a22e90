// Measures the highest read bandwidth of device memory: reads every byte of a buffer once and
// writes nothing.
//
//   guard = xor of all 4-byte words of a thread
//
// The guard is written only if it equals the word `improbable`, so that the compiler cannot remove
// the loads.
//
// Threads: each reads PACKETS 16-byte packets, blockDim.x packets apart, and loads all of them
// before it uses the first.
// Grid: ceil(packets / (blockDim.x · PACKETS)).
// Bound: memory bandwidth, with 1 byte of traffic for each byte of the buffer.
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

extern "C" __global__ void measure_read_bandwidth(const void* __restrict__ source,
                                                  long long packets, unsigned int improbable,
                                                  unsigned int* guard) {
  const long long first_packet = static_cast<long long>(blockIdx.x) * blockDim.x * PACKETS +
      threadIdx.x;
  const char* source_bytes = static_cast<const char*>(source);
  Packet<16> packet[PACKETS];
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long packet_index = first_packet + static_cast<long long>(i) * blockDim.x;
#pragma unroll
    for (int word = 0; word < 4; ++word) packet[i].word[word] = 0;
    if (packet_index < packets) packet[i] = load_read_only_packet<16>(source_bytes +
        packet_index * 16);
  }
  unsigned int xor_of_words = 0;
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
#pragma unroll
    for (int word = 0; word < 4; ++word) xor_of_words ^= packet[i].word[word];
  }
  if (xor_of_words == improbable) *guard = xor_of_words;
}
