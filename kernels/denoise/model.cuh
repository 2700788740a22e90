// The expert that a denoise kernel is compiled for: -DMODEL=Pi05|Tiny. The names and numbers are the workload's.
#pragma once
#include "common/element16.cuh"
#include "common/math.cuh"
#include "common/types.cuh"

#ifndef MODEL
#error "compile with -DMODEL=Pi05 or -DMODEL=Tiny"
#endif

struct Pi05 {
  static constexpr int kWidth = 1024, kMlp = 4096, kHeads = 8, kHeadDim = 256;
};
struct Tiny {
  static constexpr int kWidth = 64, kMlp = 128, kHeads = 2, kHeadDim = 16;
};

constexpr int kWidth = MODEL::kWidth, kMlp = MODEL::kMlp, kHeads = MODEL::kHeads, kHeadDim = MODEL::kHeadDim;
constexpr int kQueryWidth = kHeads * kHeadDim;
constexpr int kHalfHead = kHeadDim / 2;
constexpr int kAction = 32;
constexpr float kNormEpsilon = 1e-6f;

// Sums of squares that are kept for each row of the residual stream: one for 64 columns.
constexpr int kSquares = kWidth / 64;

static_assert(kWidth % 64 == 0 && kMlp % 64 == 0 && kHeadDim % 16 == 0, "rows are whole tiles of 64 columns, heads whole pairs of 8");

// 1 / rms of a row, from the sums of squares of its parts.
__device__ __forceinline__ float inverse_rms(const float* squares) {
  float sum = 0.f;
  if constexpr (kSquares % 4 == 0) {
    const float4* quads = reinterpret_cast<const float4*>(squares);
#pragma unroll
    for (int i = 0; i < kSquares / 4; ++i) {
      const float4 quad = quads[i];
      sum += (quad.x + quad.y) + (quad.z + quad.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSquares; ++i) sum += squares[i];
  }
  return rsqrtf(sum / kWidth + kNormEpsilon);
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as x sigmoid(2 u)
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * reciprocal_approx(1.f + exp2_approx(-1.5957691216057308f * kLog2E * (x + 0.044715f * x * x * x)));
}
