// A ceiling of memory: reads one buffer once, writes another once, computes nothing.
//
//   guard = xor of all 4-byte words that a thread reads
//   word[i] = a value that depends on i and `seed`, never all zero
//
// Every block reads a share and writes a share. With READERS_FIRST, thread blocks 0 to readers - 1
// read and the others write. The host divides: a division takes as long as a tenth of a small pass,
// as 64-bit indices would. The guard is written only if it equals a given word, so that the reads
// cannot be dropped.
//
// Threads: THREADS, PACKETS 16-byte packets each in flight; a block loops over its share. The
// packets of a thread lie a block apart or, with PLANES, a plane of that many packets.
// Grid: one thread block for each reader and writer.
// Bound: 1 byte of memory traffic for each byte of both buffers.
//
// With PAST_L1, loads leave nothing in L1. With STORES_KEPT, written lines stay in L2 as long as
// other lines.
// WRITES_FIRST: a block writes before it reads, so that its writes wait for no read.
#ifdef PAST_L1
#define STREAM_LOAD "ld.global.nc.L1::no_allocate"
#endif
#ifdef STORES_KEPT
#define STREAM_STORE "st.global"
#endif
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

__device__ __forceinline__ unsigned int words(const Packet<16>& packet) {
  return packet.word[0] ^ packet.word[1] ^ packet.word[2] ^ packet.word[3];
}

// Writes share `number` of the packets of the target buffer.
__device__ __forceinline__ void write_share(void* target, unsigned int packets, unsigned int share,
                                            unsigned int number, unsigned int seed) {
  const unsigned int begin = number * share, end = min(begin + share, packets);
#pragma unroll 4
  for (unsigned int at = begin + threadIdx.x; at < end; at += THREADS) {
    const unsigned int value = (at ^ seed) * 0x9e3779b9u | 1u;
    Packet<16> packet;
#pragma unroll
    for (int word = 0; word < 4; ++word) packet.word[word] = value + word;
    store_stream<16>(static_cast<Packet<16>*>(target) + at, packet);
  }
}

// Reads share `number` of the packets, or of the first plane with the packets behind it. Returns
// the xor of the words that were read.
__device__ __forceinline__ unsigned int read_share(const void* source, unsigned int packets,
                                                   unsigned int plane, unsigned int share,
                                                   unsigned int number) {
#ifdef PLANES
  const unsigned int begin = number * share, end = min(begin + share, plane), behind = packets;
  const unsigned int apart = plane, round = THREADS;
#else
  const unsigned int begin = number * share, end = min(begin + share, packets), behind = end;
  const unsigned int apart = THREADS, round = THREADS * PACKETS;
#endif
  const Packet<16>* from = static_cast<const Packet<16>*>(source);
  unsigned int sum = 0, first = begin + threadIdx.x;
  for (; first < end && first + (PACKETS - 1) * apart < behind; first += round) {
    Packet<16> packet[PACKETS];
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) packet[i] = load_stream<16>(from + first + i * apart);
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) sum ^= words(packet[i]);
  }
  for (; first < end; first += round) {
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) {
      const unsigned int at = first + i * apart;
      if (at < behind) sum ^= words(load_stream<16>(from + at));
    }
  }
  return sum;
}

extern "C" __global__ void measure_traffic(const void* __restrict__ source,
                                           unsigned int read_packets, unsigned int plane,
                                           unsigned int share_read, unsigned int readers,
                                           void* __restrict__ target, unsigned int written_packets,
                                           unsigned int share_written, unsigned int seed,
                                           unsigned int improbable, unsigned int* guard) {
  const unsigned int block = blockIdx.x;
#ifdef READERS_FIRST
  if (block >= readers) {
    write_share(target, written_packets, share_written, block - readers, seed);
    return;
  }
#endif
#ifdef WRITES_FIRST
  write_share(target, written_packets, share_written, block, seed);
#endif
  const unsigned int sum = seed ^ read_share(source, read_packets, plane, share_read, block);
  if (sum == improbable) *guard = sum;
#if !defined(READERS_FIRST) && !defined(WRITES_FIRST)
  write_share(target, written_packets, share_written, block, sum);
#endif
}
