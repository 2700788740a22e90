// Stages of shared memory that copies fill and warps empty alternately: fill n goes to stage n %
// kCount. Each stage of the ring has two barriers: full and empty.
#pragma once
#include "common/bulk.cuh"

template <int kCount, int kBytes, int kReaders>
struct Ring {
  static constexpr int kStages = kCount, kStageBytes = kBytes, kBarrierBytes = 16 * kCount;
  u32 data, barriers;

  __device__ __forceinline__ u32 stage(u32 n) const { return data + n % kCount * kBytes; }
  __device__ __forceinline__ u32 full(u32 n) const { return barriers + n % kCount * 8; }
  __device__ __forceinline__ u32 empty(u32 n) const { return full(n) + kCount * 8; }

  __device__ __forceinline__ void init() const {
    for (u32 n = 0; n < kCount; ++n) {
      barrier_init(full(n), 1);
      barrier_init(empty(n), kReaders);
    }
  }
  // The copying thread calls this function before it fills stage n with `bytes` bytes.
  __device__ __forceinline__ void begin_fill(u32 n, u32 bytes) const {
    barrier_wait(empty(n), n / kCount % 2 ^ 1);
    barrier_expect(full(n), bytes);
  }
  // The computing threads call these functions of the ring: `wait` returns when fill n has arrived,
  // `release` frees its buffer.
  __device__ __forceinline__ void wait(u32 n) const { barrier_wait(full(n), n / kCount % 2); }
  __device__ __forceinline__ void release(u32 n) const { barrier_arrive_one(empty(n)); }
  __device__ __forceinline__ void release_by_warp(u32 n) const {
    if (threadIdx.x % kWarpSize == 0) release(n);
  }
};
