// Replaces the L2 cache's contents: reads and rewrites a buffer of at least twice the cache's size.
//
//   word[i] += 1 for every 4-byte word
//
// Threads: a grid-stride loop of 16-byte packets, any grid. Plain loads and stores, so that lines
// are allocated like any kernel's.
// Bound: 2 bytes moved a byte of buffer.
#include "common/streaming.cuh"

extern "C" __global__ void measure_flush_l2(void* buffer, long long packets) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  char* bytes = static_cast<char*>(buffer);
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < packets;
       i += stride) {
    Packet<16> packet = load_coherent<16>(bytes + i * 16);
#pragma unroll
    for (int word = 0; word < Packet<16>::kWords; ++word) packet.word[word] += 1;
    store_coherent<16>(bytes + i * 16, packet);
  }
}
