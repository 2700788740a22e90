// Measures how many clock cycles each stage of a kernel takes in each thread block, if the kernel
// is compiled with the macro STAGES. If an implementation names stages of its kernel, `kernelgate
// profile` compiles the kernel a second time with clocks and reports the times of the stages.
// Without the macro STAGES, all functions of this file do nothing.
//
//   begin_stage_clocks();
//   ... end_timed_stage(kWait); ... end_timed_stage(kCompute);   as often as needed, in any order
//   store_stage_clocks();
//
// Each cycle between begin_stage_clocks and store_stage_clocks counts for the stage that ends next.
// Thread 0 of each block must call all stage functions; calls by other threads have no effect. The
// cycle sums stay in shared memory until the kernel ends, because a store to device memory at each
// stage would delay the fences after it. A thread block that never calls `store_stage_clocks` adds
// no cycles to the result.
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
__device__ __forceinline__ u64* stage_cycle_sums() {
  __shared__ u64 sums[STAGES + 1];
  return sums;
}
__device__ __forceinline__ void begin_stage_clocks() {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < STAGES; ++i) stage_cycle_sums()[i] = 0;
  stage_cycle_sums()[STAGES] = sm_cycles();
}
__device__ __forceinline__ void end_timed_stage(int stage) {
  if (threadIdx.x != 0) return;
  const u64 cycles_now = sm_cycles();
  stage_cycle_sums()[stage] += cycles_now - stage_cycle_sums()[STAGES];
  stage_cycle_sums()[STAGES] = cycles_now;
}
__device__ __forceinline__ void store_stage_clocks() {
  if (threadIdx.x != 0) return;
  const u32 linear_block_index = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (linear_block_index >= STAGE_BLOCKS) return;
  for (int i = 0; i < STAGES; ++i)
    kernelgate_stages[linear_block_index * STAGES + i] += stage_cycle_sums()[i];
}
#else
__device__ __forceinline__ void begin_stage_clocks() {}
__device__ __forceinline__ void end_timed_stage(int) {}
__device__ __forceinline__ void store_stage_clocks() {}
#endif
