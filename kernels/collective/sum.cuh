// Adds the elements of two 32-bit words: one f32, or two bf16 that are each rounded once.
#pragma once
#include "common/element.cuh"
#include "common/types.cuh"

__device__ __forceinline__ u32 add_packed_elements(u32 a, u32 b) {
#if defined(ELEMENT_F32)
  return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
#else
  return pack_floats_to_element_pair(element_to_float<false>(a) + element_to_float<false>(b),
                                     element_to_float<true>(a) + element_to_float<true>(b));
#endif
}
