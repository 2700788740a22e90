// Fixed-width integer types, warp constants and small helper functions of the kernels. No kernel
// source under kernels/ includes a header of the CUDA toolkit.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8,
              "the integer widths the kernels assume");

constexpr u32 kWarpSize = 32;
constexpr u32 kFullWarp = 0xffffffffu;

template <typename T>
__device__ __forceinline__ T min_of(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
__device__ __forceinline__ T max_of(T a, T b) {
  return a > b ? a : b;
}
// A type alias for one of two types, chosen by a compile-time condition.
template <bool kFirst, typename First, typename Second>
struct ChooseType {
  using Type = First;
};
template <typename First, typename Second>
struct ChooseType<false, First, Second> {
  using Type = Second;
};
constexpr __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Quotient i / d of an index, computed in 32 bits if i fits, because a 64-bit division takes about
// a hundred instructions.
__device__ __forceinline__ i64 quotient(i64 i, int d) {
  return i >> 32 == 0 ? static_cast<u32>(i) / static_cast<u32>(d) : i / d;
}
