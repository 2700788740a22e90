// GEMMs of one warp over swizzled shared-memory tiles of 16-bit elements. The including file
// defines the type `Element` as Bf16 or F16 before. This file has neither copies nor barriers.
#pragma once
#include "common/element16.cuh"
#include "common/fragments.cuh"
#include "common/memory.cuh"

// acc[rows x columns] += A B[columns][k]^T for one k-step of 16; the A fragments lie in registers,
// the 16-byte chunks of B in shared memory.
template <int kRowBytes, int kM, int kN>
__device__ __forceinline__ void multiply_step_abt(float (&acc)[kM][kN][4], const u32 (&a)[kM][4],
                                                  u32 b_lane) {
  static_assert(kN % 2 == 0, "B fragments are loaded in pairs of eight columns");
#pragma unroll
  for (int np = 0; np < kN / 2; ++np) {
    u32 b[4];
    ldmatrix_x4(b, b_lane + np * 16 * kRowBytes);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      Element::mma(acc[i][2 * np], a[i], b[0], b[1]);
      Element::mma(acc[i][2 * np + 1], a[i], b[2], b[3]);
    }
  }
}

// acc[rows x columns] += A[rows][k] B[columns][k]^T, with A and B in shared memory in rows of
// kRowBytes bytes.
template <int kSteps, int kRowBytes, int kM, int kN>
__device__ __forceinline__ void multiply_abt(float (&acc)[kM][kN][4], u32 a_lane, u32 b_lane) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 a[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) ldmatrix_x4(a[i], (a_lane ^ (step * 32)) + i * 16 * kRowBytes);
    multiply_step_abt<kRowBytes>(acc, a, b_lane ^ (step * 32));
  }
}

// acc[rows x columns] += A B[k][columns] for one k-step of 16; the A fragments lie in registers,
// the 16 rows of B in shared memory.
template <int kM, int kN>
__device__ __forceinline__ void multiply_step_ab(float (&acc)[kM][kN][4], const u32 (&a)[kM][4],
                                                 u32 b_lane) {
#pragma unroll
  for (int np = 0; np < kN / 2; ++np) {
    u32 b[4];
    ldmatrix_x4_trans(b, b_lane ^ (np * 32));
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      Element::mma(acc[i][2 * np], a[i], b[0], b[1]);
      Element::mma(acc[i][2 * np + 1], a[i], b[2], b[3]);
    }
  }
}

// acc[rows x columns] += A[k][rows]^T B[k][columns], with A and B in shared memory.
template <int kSteps, int kARowBytes, int kBRowBytes, int kM, int kN>
__device__ __forceinline__ void multiply_atb(float (&acc)[kM][kN][4], u32 a_lane, u32 b_lane) {
#pragma unroll
  for (int ks = 0; ks < kSteps; ++ks) {
    u32 a[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i)
      ldmatrix_x4_trans(a[i], (a_lane ^ (i * 32)) + ks * 16 * kARowBytes);
    multiply_step_ab<kM, kN>(acc, a, b_lane + ks * 16 * kBRowBytes);
  }
}
