// Element, the type of activations and gradients in memory, is chosen by one of the macros
// ELEMENT_F32, ELEMENT_F16 and ELEMENT_BF16. Arithmetic is always in fp32; only the functions of
// this file convert between fp32 and the element type in memory.
#pragma once

#include "common/streaming.cuh"

#if defined(ELEMENT_F32) + defined(ELEMENT_F16) + defined(ELEMENT_BF16) != 1
#error "define exactly one of ELEMENT_F32, ELEMENT_F16, ELEMENT_BF16"
#endif

#if defined(ELEMENT_F32)
typedef float Element;
#else
typedef unsigned short Element;  // the bits of an f16 or bf16
#endif

constexpr int kElementBytes = sizeof(Element);

/// A packet of `kCount` consecutive tensor elements, which one instruction loads or stores.
template <int kCount>
using ElementPacket = Packet<kCount * kElementBytes>;

/// Converts the element in the low half (`kHigh` false) or high half of `word` to fp32; if the
/// element type is f32, the whole word is the element.
template <bool kHigh>
__device__ __forceinline__ float element_to_float(unsigned int word) {
#if defined(ELEMENT_F32)
  return __uint_as_float(word);
#elif defined(ELEMENT_F16)
  float value;
  if constexpr (kHigh) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}"
        : "=f"(value)
        : "r"(word));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
        : "=f"(value)
        : "r"(word));
  }
  return value;
#else
  return __uint_as_float(kHigh ? word & 0xffff0000u : word << 16);
#endif
}

/// Rounds two fp32 values to the 16-bit element type (to nearest even) and packs them into a word,
/// `low` in the low half.
__device__ __forceinline__ unsigned int pack_floats_to_element_pair(float low, float high) {
  unsigned int word = 0;
#if defined(ELEMENT_F16)
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#elif defined(ELEMENT_BF16)
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

/// A word whose elements are all -inf: both 16-bit halves, or the single f32.
#if defined(ELEMENT_F32)
constexpr unsigned int kNegativeInfinityWord = 0xff800000u;
#elif defined(ELEMENT_F16)
constexpr unsigned int kNegativeInfinityWord = 0xfc00fc00u;
#else
constexpr unsigned int kNegativeInfinityWord = 0xff80ff80u;
#endif

/// The larger of the elements of `a` and `b`, separately for each 16-bit half of the words; a NaN
/// counts as smaller.
__device__ __forceinline__ unsigned int max_of_element_pairs(unsigned int a, unsigned int b) {
#if defined(ELEMENT_F32)
  float value;
  asm("max.ftz.f32 %0, %1, %2;"
      : "=f"(value)
      : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
  return __float_as_uint(value);
#else
  unsigned int larger;
#if defined(ELEMENT_F16)
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
#else
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
#endif
  return larger;
#endif
}

template <int kCount>
__device__ __forceinline__ void unpack_elements_to_floats(const ElementPacket<kCount>& packet,
                                                          float (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kElementBytes == 4) {
      value[i] = element_to_float<false>(packet.word[i]);
    } else {
      value[i] = i % 2 == 0 ? element_to_float<false>(packet.word[i / 2])
                            : element_to_float<true>(packet.word[i / 2]);
    }
  }
}

template <int kCount>
__device__ __forceinline__ ElementPacket<kCount> pack_floats_to_elements(
    const float (&value)[kCount]) {
  ElementPacket<kCount> packet;
  if constexpr (kElementBytes == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) packet.word[i] = __float_as_uint(value[i]);
  } else if constexpr (kCount == 1) {
    packet.word[0] = pack_floats_to_element_pair(value[0], 0.0f);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      packet.word[i / 2] = pack_floats_to_element_pair(value[i], value[i + 1]);
  }
  return packet;
}

__device__ __forceinline__ float load_element_as_float(const Element* address) {
  float value[1];
  unpack_elements_to_floats<1>(load_read_only_packet<kElementBytes>(address), value);
  return value[0];
}

__device__ __forceinline__ void store_element(Element* address, float value) {
  const float values[1] = {value};
  store_packet_evict_first<kElementBytes>(address, pack_floats_to_elements<1>(values));
}
