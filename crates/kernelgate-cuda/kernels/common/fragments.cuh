// Computes, for each lane of a warp, the shared-memory addresses from which the lane loads mma
// fragments of swizzled tiles with ldmatrix. This file has no GEMMs, copies or
// barriers.
#pragma once
#include "common/memory.cuh"

// A lane's base address is swizzled_chunk_offset(row, chunk) for the first 16x16 block; the tile
// begins at a multiple of the row length. From a lane's base address, moving by 2n chunks along the
// row is `^ (n * 32)`, and moving by 16 rows is `+ 16 * row bytes`, because row % 8 stays the same.

// A lane's base address for ldmatrix on an operand stored as [rows][k], whose 16x16 blocks are A
// fragments (with .trans: on an operand [k][columns], B fragments).
template <int kRowBytes>
__device__ __forceinline__ u32 ldmatrix_lane_address_rows_by_k(u32 row, u32 lane) {
  return swizzled_chunk_offset<kRowBytes>(row + (lane & 15u), lane >> 4);
}

// A lane's base address for ldmatrix on an operand stored as [columns][k], whose 16x16 blocks are
// two B fragments each (with .trans: on an operand [k][rows], A fragments).
template <int kRowBytes>
__device__ __forceinline__ u32 ldmatrix_lane_address_columns_by_k(u32 row, u32 lane) {
  return swizzled_chunk_offset<kRowBytes>(row + (lane & 7u) + ((lane >> 4) << 3), (lane >> 3) & 1u);
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
