// fp32 instructions that C++ has no word for: one wrapper an instruction.
#pragma once
#include "common/math.cuh"

/// 1.0 where a >= b, else 0.0 (0.0 for NaN).
__device__ __forceinline__ float one_if_ge(float a, float b) {
  float result;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// 1.0 where a < b, else 0.0 (0.0 for NaN).
__device__ __forceinline__ float one_if_lt(float a, float b) {
  float result;
  asm("set.lt.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// a·b + c rounded once, then clamped to [0, 1].
__device__ __forceinline__ float fma_saturated(float a, float b, float c) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

/// Bytes 0 and 1 of `low` below bytes 0 and 1 of `high`.
__device__ __forceinline__ unsigned int join_low_halves(unsigned int low, unsigned int high) {
  unsigned int result;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(result) : "r"(low), "r"(high));
  return result;
}

/// `base` with its lowest byte replaced by byte `index` (0 to 3) of `word`.
__device__ __forceinline__ unsigned int byte_over(unsigned int word, int index, unsigned int base) {
  unsigned int result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(base), "r"(0x7650 + index));
  return result;
}
