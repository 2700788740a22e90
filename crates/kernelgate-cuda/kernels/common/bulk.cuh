// Bulk asynchronous copies, counted by a barrier in shared memory: one wrapper an instruction.
// Shared addresses are 32-bit byte offsets; a barrier is eight bytes.
#pragma once
#include "common/types.cuh"

// A barrier whose phase completes when `count` threads have arrived and all announced bytes have
// been copied.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the cluster and to copies; a cluster barrier must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives and announces bytes.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives.
__device__ __forceinline__ void barrier_arrive_one(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until a barrier has turned over for the first time (parity 0) or the second (1).
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
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

// Starts a copy of `bytes` (a multiple of 16, from and to multiples of 16) to shared memory.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Sends two floats to a block of the cluster; its barrier counts 8 bytes.
__device__ __forceinline__ void send_f32x2(u32 cluster_to, float x, float y, u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          cluster_to),
      "f"(x), "f"(y), "r"(cluster_barrier)
      : "memory");
}

// Functions that send 4, 8 and 16 bytes to another thread block of the cluster.
__device__ __forceinline__ void send_b32(u32 cluster_to, u32 x, u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(cluster_to),
      "r"(x), "r"(cluster_barrier)
      : "memory");
}
__device__ __forceinline__ void send_b64(u32 cluster_to, u32 x, u32 y, u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          cluster_to),
      "r"(x), "r"(y), "r"(cluster_barrier)
      : "memory");
}
__device__ __forceinline__ void send_b128(u32 cluster_to, u32 x, u32 y, u32 z, u32 w,
                                          u32 cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_to),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(cluster_barrier)
      : "memory");
}

// Asks L2 to read `bytes` bytes (a multiple of 16) from device memory; nothing signals their
// arrival.
__device__ __forceinline__ void prefetch_bulk(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Makes this thread's earlier stores to shared memory visible to copies and tensor cores.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes device memory that this thread has seen visible to the asynchronous copies that it starts
// afterwards.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
