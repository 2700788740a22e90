// Measures the highest bandwidth of device memory for a mix of reads and writes: reads one buffer
// once, writes another once, and computes nothing.
//
//   guard = xor of all 4-byte words that a thread reads
//   word[i] = a value that depends on i and `seed`, never all zero
//
// Each thread block reads a share of one buffer and writes a share of the other. With the macro
// READERS_FIRST, thread blocks 0 to readers - 1 only read and the other blocks only write. The host
// computes the sizes of the shares, because a division or 64-bit indices in this kernel would take
// a tenth of the time of a small pass. The guard is written only if it equals the word
// `improbable`, so that the compiler cannot remove the loads.
//
// Threads: each block has THREADS threads, each with PACKETS 16-byte packets in flight; a block
// loops over its share. The packets of a thread lie THREADS packets apart or, with the macro
// PLANES, `plane` packets apart. Grid: one thread block for each share that is read or written.
// Bound: memory bandwidth, with 1 byte of traffic for each byte of both buffers.
//
// With the macro PAST_L1, loads allocate no lines in L1. With the macro STORES_KEPT, stores have
// the default cache policy, so written lines stay in L2 as long as other lines. With the macro
// WRITES_FIRST, a block writes before it reads, so that its stores wait for no load.
#ifdef PAST_L1
#define STREAM_LOAD "ld.global.nc.L1::no_allocate"
#endif
#ifdef STORES_KEPT
#define STREAM_STORE "st.global"
#endif
#include "common/streaming.cuh"

static_assert(PACKETS >= 1 && PACKETS <= 32, "PACKETS are held in registers: 1 to 32");

__device__ __forceinline__ unsigned int xor_of_packet_words(const Packet<16>& packet) {
  return packet.word[0] ^ packet.word[1] ^ packet.word[2] ^ packet.word[3];
}

// Writes share number `number` of the target buffer; a share has `share` packets.
__device__ __forceinline__ void write_buffer_share(void* target, unsigned int packets,
                                                   unsigned int share, unsigned int number,
                                                   unsigned int seed) {
  const unsigned int first_in_share = number * share;
  const unsigned int end_of_share = min(first_in_share + share, packets);
#pragma unroll 4
  for (unsigned int packet_index = first_in_share + threadIdx.x; packet_index < end_of_share;
       packet_index += THREADS) {
    const unsigned int word_value = (packet_index ^ seed) * 0x9e3779b9u | 1u;
    Packet<16> packet;
#pragma unroll
    for (int word = 0; word < 4; ++word) packet.word[word] = word_value + word;
    store_packet_evict_first<16>(static_cast<Packet<16>*>(target) + packet_index, packet);
  }
}

// Reads share number `number` of the source buffer, or with PLANES that share of each plane.
// Returns the xor of the words that the thread read.
__device__ __forceinline__ unsigned int read_buffer_share(const void* source, unsigned int packets,
                                                          unsigned int plane, unsigned int share,
                                                          unsigned int number) {
#ifdef PLANES
  const unsigned int first_in_share = number * share;
  const unsigned int end_of_share = min(first_in_share + share, plane), end_of_reads = packets;
  const unsigned int packet_distance = plane, packets_per_round = THREADS;
#else
  const unsigned int first_in_share = number * share;
  const unsigned int end_of_share = min(first_in_share + share, packets), end_of_reads =
      end_of_share;
  const unsigned int packet_distance = THREADS, packets_per_round = THREADS * PACKETS;
#endif
  const Packet<16>* source_packets = static_cast<const Packet<16>*>(source);
  unsigned int xor_of_words = 0, first = first_in_share + threadIdx.x;
  for (; first < end_of_share && first + (PACKETS - 1) * packet_distance < end_of_reads;
       first += packets_per_round) {
    Packet<16> packet[PACKETS];
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) packet[i] = load_read_only_packet<16>(source_packets + first +
         i * packet_distance);
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) xor_of_words ^= xor_of_packet_words(packet[i]);
  }
  for (; first < end_of_share; first += packets_per_round) {
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) {
      const unsigned int packet_index = first + i * packet_distance;
      if (packet_index < end_of_reads)
          xor_of_words ^= xor_of_packet_words(load_read_only_packet<16>(source_packets +
              packet_index));
    }
  }
  return xor_of_words;
}

extern "C" __global__ void measure_traffic(const void* __restrict__ source,
                                           unsigned int read_packets, unsigned int plane,
                                           unsigned int share_read, unsigned int readers,
                                           void* __restrict__ target, unsigned int written_packets,
                                           unsigned int share_written, unsigned int seed,
                                           unsigned int improbable, unsigned int* guard) {
  const unsigned int block_index = blockIdx.x;
#ifdef READERS_FIRST
  if (block_index >= readers) {
    write_buffer_share(target, written_packets, share_written, block_index - readers, seed);
    return;
  }
#endif
#ifdef WRITES_FIRST
  write_buffer_share(target, written_packets, share_written, block_index, seed);
#endif
  const unsigned int xor_of_words =
      seed ^ read_buffer_share(source, read_packets, plane, share_read, block_index);
  if (xor_of_words == improbable) *guard = xor_of_words;
#if !defined(READERS_FIRST) && !defined(WRITES_FIRST)
  write_buffer_share(target, written_packets, share_written, block_index, xor_of_words);
#endif
}
