// Sums and maxima over a power-of-two group of neighbouring lanes of a warp, or over a thread
// block. Each reduction returns its result to every lane that takes part.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

template <int kLanes>
__device__ __forceinline__ float sum_across_lane_group(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) x += __shfl_xor_sync(kFullWarp, x, mask);
  return x;
}

template <int kLanes>
__device__ __forceinline__ float max_across_lane_group(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) x = max_f32(x, __shfl_xor_sync(kFullWarp, x, mask));
  return x;
}

// The sum over a block of kThreads threads; `scratch` is shared memory for kThreads / 32 floats,
// which the caller may reuse right after the call.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block reduction needs whole warps");
  x = sum_across_lane_group<32>(x);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += scratch[i];
  __syncthreads();
  return total;
}

template <int kThreads>
__device__ __forceinline__ float block_max(float x, float* scratch) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block reduction needs whole warps");
  x = max_across_lane_group<32>(x);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  float best = scratch[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) best = max_f32(best, scratch[i]);
  __syncthreads();
  return best;
}
