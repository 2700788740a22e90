// Wrappers of the PTX instructions for shared memory, asynchronous copies (cp.async) and named
// barriers: one function for each instruction. Addresses of shared memory are 32-bit byte offsets.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes asynchronously from device memory to shared memory, bypassing L1.
__device__ __forceinline__ void cp_async_16_bytes(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
}

// Copies 16 bytes asynchronously from device to shared memory; if `valid` is false, reads nothing
// and writes 16 zero bytes.
__device__ __forceinline__ void cp_async_16_bytes_or_zeros(u32 shared, const void* global,
                                                           bool valid) {
  const u32 bytes_to_read = valid ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes_to_read)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` groups of this thread's asynchronous copies (cp.async), the newest
// ones, are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements from shared memory into mma fragments; lane l passes
// the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Loads four 8x8 matrices of 16-bit elements as ldmatrix_x4 does, and transposes each matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements in registers; lane l holds two elements of row l / 4,
// at columns l % 4 * 2 and l % 4 * 2 + 1.
__device__ __forceinline__ u32 movmatrix_trans(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void store_shared_b32(u32 shared, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

__device__ __forceinline__ uint4 load_shared_b128(u32 shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a swizzled tile with rows of kRowBytes: the
// chunk number is XORed with row % 8, so that ldmatrix has no bank conflicts.
template <int kRowBytes>
__device__ __forceinline__ u32 swizzled_chunk_offset(u32 row, u32 chunk) {
  static_assert(kRowBytes % 128 == 0, "a swizzled row holds a multiple of eight 16-byte chunks");
  return row * kRowBytes + ((chunk ^ (row & 7u)) << 4);
}

// Stores four 8x8 matrices of 16-bit elements from registers to shared memory; lane l passes the
// address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  // Without stmatrix (before sm_90), lane l stores two elements of row l / 4 of each matrix, at
  // columns l % 4 * 2 and l % 4 * 2 + 1.
  const u32 lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 row_address = __shfl_sync(kFullWarp, shared, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row_address + lane % 4 * 4), "r"(r[i]) : "memory");
  }
#endif
}

// Stores four 8x8 matrices of 16-bit elements as stmatrix_x4 does, and transposes each matrix;
// needs sm_90.
__device__ __forceinline__ void stmatrix_x4_trans(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_b128(u32 shared, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ u32 load_shared_b32(u32 shared) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

// Loads a word of shared memory that other threads of the block may change.
__device__ __forceinline__ u32 load_shared_volatile(u32 shared) {
  u32 x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_volatile(u32 shared, u32 x) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

__device__ __forceinline__ float2 load_shared_f32x2(u32 shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ float4 load_shared_f32x4(u32 shared) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// Adds two floats to device memory by atomic reductions in the L2 cache, without waiting for them.
// The order in which the additions of different blocks happen is undefined.
__device__ __forceinline__ void reduce_add_f32x2(float* global, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1,%2};" ::"l"(global), "f"(a), "f"(b)
               : "memory");
#else
  const float addends[2] = {a, b};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global + i), "f"(addends[i])
                 : "memory");
#endif
}

// Adds four floats to device memory by atomic reductions in the L2 cache, without waiting for them.
// The order in which the four-float additions of different blocks happen is undefined.
__device__ __forceinline__ void reduce_add_f32x4(float* global, float a, float b, float c,
                                                 float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(global), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  reduce_add_f32x2(global, a, b);
  reduce_add_f32x2(global + 2, c, d);
#endif
}

// Named barrier `id` (1-15) among `threads` threads of the block: named_barrier_arrive does not
// wait, named_barrier_sync waits for all.
__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Waits at named barrier `id` as named_barrier_sync does, and returns whether `x` is true for any
// of the threads.
__device__ __forceinline__ bool named_barrier_any(u32 id, u32 threads, bool x) {
  u32 any;
  asm volatile(
      "{\n.reg .pred x, any;\nsetp.ne.u32 x, %3, 0;\nbar.red.or.pred any, %1, %2, x;\n"
      "selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(x))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void store_shared_f32x2(u32 shared, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}

// Loads from the L2 cache and bypasses L1, because L1 may hold the value from before another
// block's write.
__device__ __forceinline__ u32 load_bypassing_l1(const u32* p) {
  u32 x;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float load_bypassing_l1(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_bypassing_l1(const float4* p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ void load_bypassing_l1(u32 (&x)[4], const uint4* p) {
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(p)
               : "memory");
}

// Loads a word of device memory with acquire semantics: if the load returns a value that
// store_release wrote, all writes before that store are visible to this thread.
__device__ __forceinline__ u32 load_acquire_gpu_scope(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(u32* p, u32 x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
