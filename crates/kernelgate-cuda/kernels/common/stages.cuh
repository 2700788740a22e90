// Times of the stages of a kernel, block by block, in a build with clocks (STAGES). If the row of a
// kernel names stages, `kernelgate profile` builds it a second time with clocks and reports them.
// Without STAGES these functions do nothing.
//
//   stages_begin();
//   ... stage_ends(kWait); ... stage_ends(kCompute);   as often as they come, in any order
//   stages_finish();
//
// Each cycle from the begin to the finish belongs to the stage that ends next. Thread 0 of a block
// must call all stage functions; calls by other threads have no effect. The sums lie in shared
// memory until the kernel ends, because a store to device memory for each would delay the fences
// behind it. A block that never calls `stages_finish` is not counted.
#pragma once
#include "common/types.cuh"

#ifdef STAGES
#include "common/device_clock.cuh"

extern "C" {
// Array [blocks][stages]: cycles of all launches since it was set to zero.
__device__ u64 kernelgate_stages[STAGE_BLOCKS * STAGES];
}

// Sums of the stages, and the time of the last end.
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
  const u64 now = sm_cycles();
  stage_sums()[stage] += now - stage_sums()[STAGES];
  stage_sums()[STAGES] = now;
}
__device__ __forceinline__ void stages_finish() {
  if (threadIdx.x != 0) return;
  const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (block >= STAGE_BLOCKS) return;
  for (int i = 0; i < STAGES; ++i) kernelgate_stages[block * STAGES + i] += stage_sums()[i];
}
#else
__device__ __forceinline__ void stages_begin() {}
__device__ __forceinline__ void stage_ends(int) {}
__device__ __forceinline__ void stages_finish() {}
#endif
