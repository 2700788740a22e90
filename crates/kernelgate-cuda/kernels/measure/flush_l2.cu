// Replaces the contents of the L2 cache by reading a buffer of at least twice the cache's size.
//
//   sum += word[i] for every 4-byte word; the sum is thrown away
//
// Threads: a grid-stride loop of 16-byte packets, any grid. The loads have the default cache
// policy, so that lines are allocated in L2 as by any kernel. Dirty L2 lines are written back while
// this kernel runs, and the lines it loads are clean, so a cold launch after it causes no
// write-backs of earlier data.
// Bound: memory bandwidth, with one byte read for each byte of the buffer.
#include "common/streaming.cuh"

extern "C" __global__ void measure_flush_l2(void* buffer, long long packets) {
  const long long packet_stride = static_cast<long long>(gridDim.x) * blockDim.x;
  char* bytes = static_cast<char*>(buffer);
  unsigned int discarded_sum = 0;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < packets;
       i += packet_stride) {
    const Packet<16> packet = load_coherent_packet<16>(bytes + i * 16);
#pragma unroll
    for (int word = 0; word < Packet<16>::kWords; ++word) discarded_sum += packet.word[word];
  }
  // The condition of the store to the buffer is never true. The compiler does not know that the
  // condition is false, so it keeps the loads.
  if (packets < 0) *reinterpret_cast<unsigned int*>(bytes) = discarded_sum;
}
