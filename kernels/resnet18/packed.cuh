// Packed spike maps with two bits for each spike. A packed map has sixteen rows, all time steps of
// some images, in the layout of the tensor cores' fragments. Thread blocks exchange packed maps
// through device memory as words with tags. The computation of the spikes by neurons is
// deliberately not part of packed.cuh.
//
// A 32-bit word of a packed map has the spikes of two adjacent channels in eight rows; these rows
// are called an octet. In each 16-bit half of the word, bit 2r says whether the channel has a spike
// in row r, and bit 2r + 1 is the spike's sign. Shifted to the top of a half, these two bits are a
// bf16 of twice the spike, because the bf16 number 2 has a single bit set. The 64 channels of a
// pixel take 256 bytes: four lanes share the rows of a fragment, and each of them finds its words
// of 16 channels in 16 bytes.
#pragma once
#include "common/memory.cuh"
#include "common/types.cuh"

constexpr int kRows = 16, kOctet = 8;  // rows of a packed map, rows of one of its words
constexpr int kChannels = 64, kGroupBytes = kChannels * kRows / 4;  // of a pixel
constexpr u32 kTopBits = 0xc000c000u;

// Returns the offset in bytes from a pixel's first word to the word of a pair of channels in an
// octet of rows.
__device__ __forceinline__ u32 word_offset(int pair, int octet) {
  const u32 group = pair / 32, step = pair / 8 % 4, half = pair / 4 % 2, lane = pair % 4;
  // Lanes 2 and 3 process their steps in a different order, so that four lanes together read from
  // all banks.
  return group * kGroupBytes + lane * 64 + ((step ^ lane / 2) << 4) + half * 8 + octet * 4;
}

// Packs two doubled bf16 spikes into the bits of one row, 0 to 7, of a word in which these bits are
// zero; the inverse function unpacks them.
__device__ __forceinline__ u32 packed_pair(u32 doubled, int row) {
  return (doubled & kTopBits) >> (2 * (kOctet - 1 - row));
}
// Doubles two bf16 spikes: a doubled spike consists only of its top two bits, while the bf16 number
// 1 has several bits set.
__device__ __forceinline__ u32 doubled(u32 spikes) {
  return (spikes & 0x00800080u) << 7 | (spikes & 0x80008000u);
}
__device__ __forceinline__ u32 spike_pair_in_top_bits(u32 word, int row) {
  return word << (2 * (kOctet - 1 - row)) & kTopBits;
}

// Offset of a lane's words of the first 16 channels from the start of a pixel's channel group; `^
// (n * 16)` advances by n times 16 channels.
__device__ __forceinline__ u32 lane_words(u32 lane) { return lane % 4 * 64 + lane % 4 / 2 * 16; }

// Factor by which a multiplication shifts the rows of a lane's fragments to the top of a word.
// Multiplications run on a different pipe than the logic instructions around them.
__device__ __forceinline__ u32 lane_factor(u32 lane) { return 1u << 2 * (kOctet - 1 - lane / 4); }

// Loads an A fragment of 16 rows by 16 channels of doubled spikes from a packed map; `bits` is
// kTopBits, or 0 for a fragment of zeros.
__device__ __forceinline__ void load_spike_fragment(u32 (&a)[4], u32 words, u32 factor, u32 bits) {
  const uint4 packed = load_shared_b128(words);
  a[0] = packed.x * factor & bits;
  a[1] = packed.y * factor & bits;
  a[2] = packed.z * factor & bits;
  a[3] = packed.w * factor & bits;
}

// Sums the spikes of a word's two channels over the rows r whose bits 2r are set in `rows`.
__device__ __forceinline__ float2 spike_sums(u32 word, u32 rows) {
  const u32 first = word & rows, second = word >> 16 & rows;
  const int minus_first = __popc(first & word >> 1), minus_second = __popc(second & word >> 17);
  return make_float2(static_cast<float>(__popc(first) - 2 * minus_first),
                     static_cast<float>(__popc(second) - 2 * minus_second));
}

// Sends a word to other thread blocks through device memory, as 64 bits with a tag that differs in
// every round. A thread block that sees the expected tag has the word, without a memory fence.
__device__ __forceinline__ void send_word(u64* to, u32 word, u32 tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to),
               "l"(static_cast<u64>(tag) << 32 | word)
               : "memory");
}

// Receives two tagged words from device memory; returns false if they have not both arrived yet.
__device__ __forceinline__ bool receive_tagged_words(const u64* from, u32 (&words)[2], u32 tag) {
  u64 first, second;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from)
               : "memory");
  words[0] = static_cast<u32>(first);
  words[1] = static_cast<u32>(second);
  return first >> 32 == tag && second >> 32 == tag;
}
