// Dimensions of the action expert for which a denoise kernel is compiled; the Rust declaration of
// the kernel defines them as macros.
#pragma once
#include "common/element16.cuh"
#include "common/math.cuh"
#include "common/types.cuh"

#ifndef WIDTH
#error "compile with the macros of the kernel's row: WIDTH, MLP, HEADS, HEAD_DIM, ACTION"
#endif

constexpr int kWidth = WIDTH, kMlp = MLP, kHeads = HEADS, kHeadDim = HEAD_DIM;
constexpr int kQueryWidth = kHeads * kHeadDim;
constexpr int kHalfHead = kHeadDim / 2;
constexpr int kActionColumns = ACTION;
constexpr float kNormEpsilon = 1e-6f;

// Number of partial sums of squares stored for each row of the residual stream h: one for every 64
// columns.
constexpr int kSquareSumsPerRow = kWidth / 64;

static_assert(kWidth % 64 == 0 && kMlp % 64 == 0 && kHeadDim % 16 == 0,
              "rows are whole tiles of 64 columns, heads whole pairs of 8");

// Returns 1 / rms of a row of h, from the row's partial sums of squares.
__device__ __forceinline__ float inverse_rms_of_h_row(const float* squares) {
  float sum = 0.f;
  if constexpr (kSquareSumsPerRow % 4 == 0) {
    const float4* quads = reinterpret_cast<const float4*>(squares);
#pragma unroll
    for (int i = 0; i < kSquareSumsPerRow / 4; ++i) {
      const float4 quad = quads[i];
      sum += (quad.x + quad.y) + (quad.z + quad.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSquareSumsPerRow; ++i) sum += squares[i];
  }
  return rsqrtf(sum / kWidth + kNormEpsilon);
}

// Computes GELU by tanh, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as x sigmoid(2 u).
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * reciprocal_approx(
                 1.f + exp2_approx(-1.5957691216057308f * kLog2E * (x + 0.044715f * x * x * x)));
}
