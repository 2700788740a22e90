// Scalar arithmetic instructions without a C++ operator: one wrapper function for each PTX
// instruction.
#pragma once

// 2^x with a relative error of 2^-22; x = -inf gives +0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) with an absolute error of 2^-22 for x near 1; x = 0 gives -inf.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, relative error 2^-23.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sqrt(x) with a relative error of 2^-23; subnormal x give 0.
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float max_f32(float a, float b) {
  float y;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float fma_f32(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

// Returns 1.0 if a >= b, else 0.0 (also if a or b is NaN).
__device__ __forceinline__ float one_if_ge(float a, float b) {
  float result;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Returns 1.0 if a < b, else 0.0 (also if a or b is NaN).
__device__ __forceinline__ float one_if_lt(float a, float b) {
  float result;
  asm("set.lt.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Returns a·b + c, rounded once (FMA) and then clamped to [0, 1].
__device__ __forceinline__ float fma_saturated(float a, float b, float c) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

// Packs bytes 0 and 1 of `low` into the lower half of a word, and bytes 0 and 1 of `high` into the
// upper half.
__device__ __forceinline__ unsigned int join_low_halves(unsigned int low, unsigned int high) {
  unsigned int result;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(result) : "r"(low), "r"(high));
  return result;
}

// Returns `base` with its lowest byte replaced by byte number `index` (0 to 3) of `word`.
__device__ __forceinline__ unsigned int replace_lowest_byte(unsigned int word, int index,
                                                            unsigned int base) {
  unsigned int result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(base), "r"(0x7650 + index));
  return result;
}

__device__ __forceinline__ float bits_to_f32(unsigned int bits) {
  return __int_as_float(static_cast<int>(bits));
}

__device__ __forceinline__ float negative_infinity() { return bits_to_f32(0xff800000u); }

// Converts four floats to e4m3 and packs them into a word, `a` in bits 0-7, rounded to nearest even
// and saturated at 448. From sm_89 on.
__device__ __forceinline__ unsigned int pack_e4m3(float a, float b, float c, float d) {
  unsigned int x;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
