// Wrappers of the PTX warpgroup MMA (wgmma) of 128 threads with operands in shared memory: one
// function for each instruction.
//
// wgmma operands lie in rows of 128 bytes whose 16-byte chunks are XOR-swizzled by row % 8: x [64
// rows][64 of k], and w [k][64 columns], with 1024 bytes between 8-row groups. One k-step of 16
// advances the address of x by 32 bytes and the address of w by 2048 bytes.
#pragma once
#include "common/types.cuh"

// Makes the wgmma matrix descriptor of an operand in 128-byte swizzled layout at a shared-memory
// address.
__device__ __forceinline__ u64 wgmma_operand_descriptor(u32 shared) {
  constexpr u64 kGroupStride = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<u64>((shared & 0x3ffff) >> 4) | (u64{1} << 16) | (kGroupStride << 32) |
         (kSwizzle128 << 62);
}

// The wgmma descriptor of an operand `bytes` further in shared memory: one addition, while
// `operand` takes a chain of instructions.
__device__ __forceinline__ u64 advance_operand_descriptor(u64 operand, u32 bytes) {
  return (operand & 0xffffffff00000000) | (static_cast<u32>(operand) + (bytes >> 4));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// These macros list a thread's accumulators d[first], d[first + 1], … as in-out operands of inline
// assembly.
#define ACCUMULATORS_8(d, first)                                                                \
  "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3]),                    \
      "+f"(d[first + 4]), "+f"(d[first + 5]), "+f"(d[first + 6]), "+f"(d[first + 7])
#define ACCUMULATORS_16(d, first) ACCUMULATORS_8(d, first), ACCUMULATORS_8(d, first + 8)
#define ACCUMULATORS_32(d, first) ACCUMULATORS_16(d, first), ACCUMULATORS_16(d, first + 16)

// d[64][32] += x[64][16] w[16][32] by one wgmma instruction. In a thread, d[4 j + 2 h + i] is the
// element at row (warp % 4) 16 + lane / 4 + 8 h and column 8 j + lane % 4 * 2 + i.
__device__ __forceinline__ void wgmma(float (&d)[16], u64 x, u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 1;"
      : ACCUMULATORS_16(d, 0)
      : "l"(x), "l"(w));
}

// d[64][64] += x[64][16] w[16][64] by one wgmma instruction, with x and w in shared memory.
__device__ __forceinline__ void wgmma(float (&d)[32], u64 x, u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 1;"
      : ACCUMULATORS_32(d, 0)
      : "l"(x), "l"(w));
}

// d[64][n] += x[64][16] w[n][16]^T by one wgmma instruction; n is twice the length of d. Each of
// the n columns of d is a row of w, stored like a row of x. One k-step advances both addresses by
// 32 bytes.
__device__ __forceinline__ void wgmma_w_transposed(float (&d)[24], u64 x, u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23}, %24, %25, 1, 1, 1, 0, 0;"
      : ACCUMULATORS_16(d, 0), ACCUMULATORS_8(d, 16)
      : "l"(x), "l"(w));
}
__device__ __forceinline__ void wgmma_w_transposed(float (&d)[32], u64 x, u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
      : ACCUMULATORS_32(d, 0)
      : "l"(x), "l"(w));
}
__device__ __forceinline__ void wgmma_w_transposed(float (&d)[36], u64 x, u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35}, %36, %37, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35])
      : "l"(x), "l"(w));
}
__device__ __forceinline__ void wgmma_w_transposed(float (&d)[40], u64 x, u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
      "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}, %40, %41, 1, "
      "1, 1, 0, 0;"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_8(d, 32)
      : "l"(x), "l"(w));
}

// d[64][32] += x[64][16] w[32][16]^T with x in registers. Registers 0 and 2 of a lane hold row lane
// / 4 of the warp's 16 rows, and registers 1 and 3 row lane / 4 + 8. Registers 0 and 1 hold the k
// values lane % 4 * 2 and the next one, and registers 2 and 3 those 8 further.
__device__ __forceinline__ void wgmma_w_transposed(float (&d)[16], const u32 (&x)[4], u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19},"
      " %20, 1, 1, 1, 0;"
      : ACCUMULATORS_16(d, 0)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w));
}
