// Wrappers of the PTX instructions for bulk asynchronous copies and the mbarriers in shared memory
// that count their bytes: one function for each instruction. Addresses of shared memory are 32-bit
// byte offsets; an mbarrier takes eight bytes.
#pragma once
#include "common/types.cuh"

// Initialises an mbarrier, whose phase completes when `count` threads have arrived and all
// announced bytes have been copied.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised mbarriers visible to the other blocks of the cluster and to asynchronous
// copies; a cluster barrier must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the mbarrier and announces bytes that asynchronous copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the mbarrier, as one of the expected threads.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the current phase of the mbarrier has completed: parity 0 for its first, third, …
// phase, parity 1 for its second, fourth, … phase.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Starts a bulk copy of `bytes` from device memory to shared memory; addresses and `bytes` are
// multiples of 16, and the mbarrier counts the bytes.
__device__ __forceinline__ void bulk_copy_to_shared(u32 to, const void* from, u32 bytes,
                                                    u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores two floats asynchronously into the shared memory of another block of the cluster, whose
// mbarrier counts the 8 bytes.
__device__ __forceinline__ void st_async_f32x2(u32 cluster_to, float x, float y,
                                               u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          cluster_to),
      "f"(x), "f"(y), "r"(cluster_barrier)
      : "memory");
}

// The functions st_async_b32, st_async_b64 and st_async_b128 store 4, 8 or 16 bytes asynchronously
// into the shared memory of another block of the cluster, whose mbarrier counts the bytes.
__device__ __forceinline__ void st_async_b32(u32 cluster_to, u32 x, u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(cluster_to),
      "r"(x), "r"(cluster_barrier)
      : "memory");
}
__device__ __forceinline__ void st_async_b64(u32 cluster_to, u32 x, u32 y, u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          cluster_to),
      "r"(x), "r"(y), "r"(cluster_barrier)
      : "memory");
}
__device__ __forceinline__ void st_async_b128(u32 cluster_to, u32 x, u32 y, u32 z, u32 w,
                                              u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_to),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(cluster_barrier)
      : "memory");
}

// Asks the L2 cache to read `bytes` bytes (a multiple of 16) from device memory; nothing signals
// when the bytes are in L2.
__device__ __forceinline__ void bulk_prefetch_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Makes this thread's earlier stores to shared memory visible to asynchronous copies and to wgmma
// (the asynchronous proxy).
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes device memory that this thread can see visible to the asynchronous copies that the thread
// starts afterwards (fence of the asynchronous proxy).
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
