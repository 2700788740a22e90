// A ring of kCount buffers in shared memory, which asynchronous copies fill and computing warps
// empty: fill number n goes to buffer n % kCount. Each buffer of the ring has two mbarriers, full
// and empty.
#pragma once
#include "common/bulk.cuh"

template <int kCount, int kBytes, int kReaders>
struct SharedMemoryCopyRing {
  static constexpr int kStages = kCount, kStageBytes = kBytes, kBarrierBytes = 16 * kCount;
  u32 data, barriers;

  __device__ __forceinline__ u32 stage(u32 n) const { return data + n % kCount * kBytes; }
  __device__ __forceinline__ u32 full(u32 n) const { return barriers + n % kCount * 8; }
  __device__ __forceinline__ u32 empty(u32 n) const { return full(n) + kCount * 8; }

  __device__ __forceinline__ void init() const {
    for (u32 n = 0; n < kCount; ++n) {
      mbarrier_init(full(n), 1);
      mbarrier_init(empty(n), kReaders);
    }
  }
  // The copying thread calls begin_fill before fill number n: it waits until the buffer is empty
  // and announces `bytes` bytes to the full barrier.
  __device__ __forceinline__ void begin_fill(u32 n, u32 bytes) const {
    mbarrier_wait(empty(n), n / kCount % 2 ^ 1);
    mbarrier_arrive_expect_bytes(full(n), bytes);
  }
  // The computing threads call `wait` and `release` of the ring, where `wait` returns when the
  // bytes of fill number n have arrived, and `release` marks its buffer as empty.
  __device__ __forceinline__ void wait(u32 n) const { mbarrier_wait(full(n), n / kCount % 2); }
  __device__ __forceinline__ void release(u32 n) const { mbarrier_arrive(empty(n)); }
  __device__ __forceinline__ void release_by_warp(u32 n) const {
    if (threadIdx.x % kWarpSize == 0) release(n);
  }
};
