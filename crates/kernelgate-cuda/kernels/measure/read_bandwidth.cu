// The read ceiling: reads every byte of a buffer once and writes nothing.
//
//   guard = xor of all 4-byte words of a thread
//
// The guard is written only if it equals a given word, so that the reads cannot be dropped.
//
// Threads: PACKETS 16-byte packets each, a block apart, all loaded before the first use.
// Grid: ceil(packets / (blockDim.x · PACKETS)).
// Bound: 1 byte of memory traffic for each byte of the buffer.
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

extern "C" __global__ void measure_read_bandwidth(const void* __restrict__ source,
                                                  long long packets, unsigned int improbable,
                                                  unsigned int* guard) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x * PACKETS + threadIdx.x;
  const char* bytes = static_cast<const char*>(source);
  Packet<16> packet[PACKETS];
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long at = first + static_cast<long long>(i) * blockDim.x;
#pragma unroll
    for (int word = 0; word < 4; ++word) packet[i].word[word] = 0;
    if (at < packets) packet[i] = load_stream<16>(bytes + at * 16);
  }
  unsigned int sum = 0;
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
#pragma unroll
    for (int word = 0; word < 4; ++word) sum ^= packet[i].word[word];
  }
  if (sum == improbable) *guard = sum;
}
