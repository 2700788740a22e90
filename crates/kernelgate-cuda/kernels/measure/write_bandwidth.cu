// The write ceiling: writes every byte of a buffer once and reads nothing.
//
//   word[i] = a value that depends on i and `seed`, never all zero
//
// Threads: PACKETS 16-byte packets each, a block apart.
// Grid: ceil(packets / (blockDim.x · PACKETS)).
// Bound: 1 byte moved a byte of buffer.
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS must be 1 to 32");

extern "C" __global__ void measure_write_bandwidth(void* __restrict__ target, long long packets,
                                                   unsigned int seed) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x * PACKETS + threadIdx.x;
  char* bytes = static_cast<char*>(target);
#pragma unroll
  for (int i = 0; i < PACKETS; ++i) {
    const long long at = first + static_cast<long long>(i) * blockDim.x;
    const unsigned int value = (static_cast<unsigned int>(at) ^ seed) * 0x9e3779b9u | 1u;
    Packet<16> packet;
#pragma unroll
    for (int word = 0; word < 4; ++word) packet.word[word] = value + word;
    if (at < packets) store_stream<16>(bytes + at * 16, packet);
  }
}
