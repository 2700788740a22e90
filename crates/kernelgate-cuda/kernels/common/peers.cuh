// Waits of GPUs for each other over memory that all of them can access.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void store_release_sys(u32* p, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_acquire_sys(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Waits until this thread block has called the function on every GPU in launch `epoch`. `flags` has
// the flags of every GPU, two for each block and GPU; `which` is 0 or 1.
template <int kGpus>
__device__ __forceinline__ void wait_for_peers(u32* const* flags, int rank, int which, u32 epoch) {
  __syncthreads();
  if (threadIdx.x < kGpus) {
    const i64 place = (static_cast<i64>(blockIdx.x) * 2 + which) * kGpus;
    const int peer = static_cast<int>(threadIdx.x);
    store_release_sys(flags[peer] + place + rank, epoch);
    while (static_cast<int>(load_acquire_sys(flags[rank] + place + peer) - epoch) < 0) {
    }
  }
  __syncthreads();
}
