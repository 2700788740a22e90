// Addresses from which the lanes of a warp read mma fragments in swizzled shared-memory tiles.
// Deliberately absent: GEMMs, copies, barriers.
#pragma once
#include "common/memory.cuh"

// Addresses: a lane's base address is swizzled(row, chunk) for the first tile; its tile base is a
// multiple of the row length. Moving 2n chunks along the row is then `^ (n * 32)`, and moving 16
// rows is `+ 16 * row bytes`, because row % 8 does not change.

// Lane base for an operand stored [rows][k] whose 16x16 block is an A fragment (or, transposed, the
// [k][columns] B fragment).
template <int kRowBytes>
__device__ __forceinline__ u32 lane_by_row(u32 row, u32 lane) {
  return swizzled<kRowBytes>(row + (lane & 15u), lane >> 4);
}

// Lane base for an operand stored [columns][k] whose 16x16 block is two B fragments (or,
// transposed, the [k][rows] A fragment).
template <int kRowBytes>
__device__ __forceinline__ u32 lane_by_column(u32 row, u32 lane) {
  return swizzled<kRowBytes>(row + (lane & 7u) + ((lane >> 4) << 3), (lane >> 3) & 1u);
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.f;
}
