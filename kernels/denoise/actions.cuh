// Matrix-vector products between one row of 32 actions and the residual stream: action_in and
// action_out. Norms, the bias of action_out and barriers are deliberately not part of
// denoise/actions.cuh.
#pragma once
#include "denoise/model.cuh"

// Computes four columns, from `column` on, of y = x [32] action_in + bias, for one row x of
// actions.
__device__ __forceinline__ void project_actions_to_four_columns(const float* x,
                                                                const u16* action_in,
                                                                    const float* bias,
                                           int column, float (&y)[4]) {
  const float4 b = *reinterpret_cast<const float4*>(bias + column);
  y[0] = b.x, y[1] = b.y, y[2] = b.z, y[3] = b.w;
#pragma unroll
  for (int k = 0; k < kActionColumns; ++k) {
    const uint2 w = *reinterpret_cast<const uint2*>(action_in + k * kWidth + column);
    y[0] += x[k] * Bf16::low(w.x);
    y[1] += x[k] * Bf16::high(w.x);
    y[2] += x[k] * Bf16::low(w.y);
    y[3] += x[k] * Bf16::high(w.y);
  }
}

// Computes this thread's partial sums of eight columns of y [width] action_out, from column
// threadIdx.x % 4 * 8 on. Four adjacent threads read the four packets of each row of the weight
// action_out.
template <int kThreads>
__device__ __forceinline__ void partial_projection_to_actions(const float* y, const u16* action_out,
                                            float (&sums)[8]) {
  static_assert(kWidth % (kThreads / 4) == 0, "whole passes");
#pragma unroll
  for (int pass = 0; pass < kWidth / (kThreads / 4); ++pass) {
    const int i = pass * (kThreads / 4) + threadIdx.x / 4;
    const uint4 w =
        *reinterpret_cast<const uint4*>(action_out + i * kActionColumns + threadIdx.x % 4 * 8);
    const u32 pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[2 * j] += y[i] * Bf16::low(pairs[j]);
      sums[2 * j + 1] += y[i] * Bf16::high(pairs[j]);
    }
  }
}
