// A ceiling of memory: reads one buffer once, writes another once, computes nothing.
//
//   guard = xor of all 4-byte words that a thread reads
//   word[i] = a value that depends on i and `seed`, never all zero
//
// Blocks 0 to readers read a share each, blocks first_writer to first_writer + writers write one; a
// block may do both. The host divides: a division takes as long as a tenth of a small pass. The guard
// is written only if it equals a given word, so that the reads cannot be dropped.
//
// Threads: PACKETS 16-byte packets each in flight; a block loops over its share. The packets of a
// thread lie a block apart or, if `plane` is not 0, a plane of that many packets.
// Grid: all readers and writers.
// Bound: 1 byte moved a byte of either buffer.
//
// PAST_L1: loads leave nothing in L1. STORES_KEPT: written lines leave L2 no sooner than others.
// WRITES_FIRST: a block writes before it reads, so that its writes wait for no read.
#ifdef PAST_L1
#define STREAM_LOAD "ld.global.nc.L1::no_allocate"
#endif
#ifdef STORES_KEPT
#define STREAM_STORE "st.global"
#endif
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

// Packets [begin, end) of a block, which is the one with this number among `blocks` blocks that have
// `share` of `packets` each; empty for a block that is not among them.
__device__ __forceinline__ void range(long long packets, int share, int number, int blocks,
                                      long long& begin, long long& end) {
  const bool among = number >= 0 && number < blocks;
  begin = static_cast<long long>(number) * share;
  end = among ? min(begin + share, packets) : begin;
}

__device__ __forceinline__ unsigned int words(const Packet<16>& packet) {
  return packet.word[0] ^ packet.word[1] ^ packet.word[2] ^ packet.word[3];
}

__device__ __forceinline__ void write_packets(char* target, long long begin, long long end,
                                              unsigned int seed) {
#pragma unroll 4
  for (long long at = begin + threadIdx.x; at < end; at += blockDim.x) {
    const unsigned int value = (static_cast<unsigned int>(at) ^ seed) * 0x9e3779b9u | 1u;
    Packet<16> packet;
#pragma unroll
    for (int word = 0; word < 4; ++word) packet.word[word] = value + word;
    store_stream<16>(target + at * 16, packet);
  }
}

extern "C" __global__ void measure_traffic(const void* __restrict__ source, long long read_packets,
                                           long long plane, int read_share, int readers,
                                           void* __restrict__ target, long long written_packets,
                                           int write_share, int first_writer, int writers,
                                           unsigned int seed, unsigned int improbable,
                                           unsigned int* guard) {
  const int block = static_cast<int>(blockIdx.x);
  char* to = static_cast<char*>(target);
  long long begin, end;
#ifdef WRITES_FIRST
  range(written_packets, write_share, block - first_writer, writers, begin, end);
  write_packets(to, begin, end, seed);
#endif
  range(plane ? plane : read_packets, read_share, block, readers, begin, end);
  const long long apart = plane ? plane : blockDim.x;
  const long long round = plane ? blockDim.x : static_cast<long long>(blockDim.x) * PACKETS;
  const long long behind = plane ? read_packets : end;
  const char* from = static_cast<const char*>(source);
  unsigned int sum = seed;
  long long first = begin + threadIdx.x;
  for (; first < end && first + (PACKETS - 1) * apart < behind; first += round) {
    Packet<16> packet[PACKETS];
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) packet[i] = load_stream<16>(from + (first + i * apart) * 16);
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) sum ^= words(packet[i]);
  }
  for (; first < end; first += round) {
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) {
      const long long at = first + i * apart;
      if (at < behind) sum ^= words(load_stream<16>(from + at * 16));
    }
  }
  if (sum == improbable) *guard = sum;
#ifndef WRITES_FIRST
  range(written_packets, write_share, block - first_writer, writers, begin, end);
  write_packets(to, begin, end, sum);
#endif
}
