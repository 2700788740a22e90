// Measures how many clock cycles each stage of a kernel takes in each thread block, if the kernel
// is compiled with the macro STAGES. If an implementation names stages of its kernel, `kernelgate
// profile` compiles the kernel a second time with clocks and reports the times of the stages.
// Without the macro STAGES, all functions of this file do nothing.
//
//   stages_begin();
//   ... stage_ends(kWait); ... stage_ends(kCompute);   as often as they come, in any order
//   stages_finish();
//
// Each cycle between stages_begin and stages_finish counts for the stage that ends next. Thread 0
// of each block must call all stage functions; calls by other threads have no effect. The cycle
// sums stay in shared memory until the kernel ends, because a store to device memory at each stage
// would delay the fences after it. A thread block that never calls `stages_finish` adds no cycles
// to the result.
#pragma once
#include "common/types.cuh"

#ifdef STAGES
#include "common/device_clock.cuh"

extern "C" {
// Array [blocks][stages] with the clock cycles of all launches since the host last set the array to
// zero.
__device__ u64 kernelgate_stages[STAGE_BLOCKS * STAGES];
}

// In shared memory: the cycle sum of each stage, and the cycle count at which the last stage ended.
__device__ __forceinline__ u64* stage_sums() {
  __shared__ u64 sums[STAGES + 1];
  return sums;
}
__device__ __forceinline__ void stages_begin() {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < STAGES; ++i) stage_sums()[i] = 0;
  stage_sums()[STAGES] = sm_cycles();
}
__device__ __forceinline__ void stage_ends(int stage) {
  if (threadIdx.x != 0) return;
  const u64 cycles_now = sm_cycles();
  stage_sums()[stage] += cycles_now - stage_sums()[STAGES];
  stage_sums()[STAGES] = cycles_now;
}
__device__ __forceinline__ void stages_finish() {
  if (threadIdx.x != 0) return;
  const u32 linear_block_index = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (linear_block_index >= STAGE_BLOCKS) return;
  for (int i = 0; i < STAGES; ++i) kernelgate_stages[linear_block_index * STAGES +
       i] += stage_sums()[i];
}
#else
__device__ __forceinline__ void stages_begin() {}
__device__ __forceinline__ void stage_ends(int) {}
__device__ __forceinline__ void stages_finish() {}
#endif
