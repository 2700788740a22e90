// Layout of the weight matrices [k][columns] in the persistent denoise kernel and the kernels
// before it: an array of units [layers][k / 64][columns / 8]. A unit holds 64 rows (along k) and 8
// columns of a weight matrix, as bf16 or as codes of fp8 or int4.
#pragma once
#include "common/element16.cuh"
#include "common/types.cuh"

#ifndef WEIGHT_BITS
#error "compile with the macros of the kernel's row: WEIGHT_BITS is 16, 8 or 4"
#endif

constexpr bool kCoded = WEIGHT_BITS < 16, kInt4 = WEIGHT_BITS == 4;  // fp8 or int4 weights

// Sizes of a unit of 8 columns and 64 of k: bytes in the bf16 layout for tensor cores, bytes in
// device memory, and elements of a pointer to units. In device memory a coded unit has its codes as
// [k / 16][8 columns][16], then for each column a bf16 factor by which its codes are multiplied.
constexpr u32 kUnitBytes = 8 * 64 * 2, kCodeBytes = 8 * WEIGHT_BITS * 8,
              kStoredBytes = kCoded ? kCodeBytes + 8 * 2 : kUnitBytes;
constexpr int kStoredU16s = kStoredBytes / 2;

__device__ __forceinline__ u32 multiply_bf16x2(u32 x, u32 y) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  return d;
}
// Returns a word whose two 16-bit halves both equal half number `half` of `word`.
__device__ __forceinline__ u32 repeat_half_of_word(u32 word, u32 half) {
  return __byte_perm(word, 0, half == 0 ? 0x1010 : 0x3232);
}
// Decodes four e4m3 codes, including subnormal codes, to bf16; the results are 2^-120 times the
// codes' values. The codes in a word are those of k + 2, k, k + 3, k + 1, so that no bytes change
// places; `factor` holds the column's factor twice.
__device__ __forceinline__ uint2 decode_e4m3_to_bf16(u32 codes, u32 factor) {
  return make_uint2(
      multiply_bf16x2((codes >> 4 & 0x07f007f0) | (codes & 0x80008000), factor),
      multiply_bf16x2((codes << 4 & 0x07f007f0) | (codes << 8 & 0x80008000), factor));
}

// Decodes eight integers from -8 to 7, each stored as four bits plus 8, to bf16 times the scale
// `factor`. The lower half of the word of codes has the integers of even k, the upper half those of
// odd k. Each four-bit number becomes the low bits of a bf16 between 128 and 143; subtracting 136
// and multiplying by the scale `factor` are exact.
__device__ __forceinline__ uint4 decode_int4(u32 codes, u32 factor) {
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("sub.rn.bf16x2 %0, %1, %2;"
        : "=r"(w[i])
        : "r"((codes >> (4 * i) & 0x000f000f) | 0x43004300), "r"(0x43084308));
    w[i] = multiply_bf16x2(w[i], factor);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}
