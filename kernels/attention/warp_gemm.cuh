// GEMMs of a single warp through mma.sync, and the copies of their tiles to shared memory. This
// header warp_gemm.cuh contains neither barriers nor softmax.
#pragma once
#include "attention/shape.cuh"
#include "common/memory.cuh"
#include "common/warp_gemm.cuh"

// Starts the copies of kRows rows of a [rows, d] tile to shared memory: pass p of this thread
// copies row + p * kRowsPerPass. `global` and `shared` already point at the thread's row and chunk;
// consecutive rows of `global` are `stride` elements apart. With kGuard, tile rows at or past
// `rows_left` become zero in shared memory.
template <int kRows, int kRowsPerPass, bool kGuard>
__device__ __forceinline__ void copy_rows_to_shared_async(u32 shared, const u16* global,
                                                          Stride stride,
                                          int rows_left) {
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0,
                "a copy is a whole number of passes, each a multiple of the swizzle period");
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const u32 to = shared + pass * kRowsPerPass * kHeadDim * 2;
    const u16* from = global + pass * kRowsPerPass * stride;
    if (kGuard) {
      cp_async_16_bytes_or_zeros(to, from, pass * kRowsPerPass < rows_left);
    } else {
      cp_async_16_bytes(to, from);
    }
  }
}
