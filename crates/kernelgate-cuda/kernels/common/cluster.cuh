// Wrappers of the PTX instructions for thread-block clusters and programmatic dependent launches:
// one function for each instruction. Addresses of shared memory are 32-bit byte offsets.
#pragma once
#include "common/types.cuh"

// Rank of the calling thread block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Maps the shared-memory address `shared` of this block to the address of the same variable in
// block `rank` of the cluster.
__device__ __forceinline__ u32 cluster_address(u32 shared, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Arrive and wait are the two halves of a barrier of all threads of the cluster: after waiting, a
// thread sees what all threads wrote before they arrived.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives at the cluster barrier without making this thread's writes visible: the other threads
// learn only that this thread has arrived.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float2 load_cluster_f32x2(u32 address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ float4 load_cluster_f32x4(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// Waits until the kernels launched before this one have finished and their writes are visible;
// returns at once unless the launch was a programmatic dependent one, which needs sm_90.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel of a programmatic dependent launch to start its blocks as soon as every
// block of this kernel has called this function.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
