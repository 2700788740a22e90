// Synchronises thread blocks of several GPUs by flags in device memory that all these GPUs can
// access.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void store_release_sys(u32* p, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_acquire_system_scope(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Waits until the thread block with this block index has called this function in launch `epoch` on
// every GPU. `flags` has the flag array of each GPU, with two entries for each block and GPU;
// `which` (0 or 1) selects the entry of this wait.
template <int kGpus>
__device__ __forceinline__ void wait_for_peers(u32* const* flags, int rank, int which, u32 epoch) {
  __syncthreads();
  if (threadIdx.x < kGpus) {
    const i64 first_flag = (static_cast<i64>(blockIdx.x) * 2 + which) * kGpus;
    const int peer_rank = static_cast<int>(threadIdx.x);
    store_release_sys(flags[peer_rank] + first_flag + rank, epoch);
    while (static_cast<int>(load_acquire_system_scope(flags[rank] + first_flag +
        peer_rank) - epoch) < 0) {
    }
  }
  __syncthreads();
}
