// Layout of an activation between two GEMMs: panels of 64 columns, so that a GEMM loads its part of
// the activation with few contiguous copies.
#pragma once
#include "common/types.cuh"

// Returns the offset of element k of a row in the layout [rows / 64][depth / 64 panels][64
// rows][64], with 16-byte chunks XOR-swizzled by row.
__device__ __forceinline__ i64 panel_element_offset(i64 row, int k, int depth) {
  const i64 panel = row / 64 * ((depth + 63) / 64) + k / 64;
  return panel * 4096 + row % 64 * 64 + (((k % 64 / 8) ^ static_cast<int>(row & 7)) * 8) + k % 8;
}
