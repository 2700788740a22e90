// Counterparts of the GEMMs in warpgroup/gemm.cuh for e4m3 operands: scores of 96 keys, and values
// of a head of 128 elements. A row of 128 e4m3 elements fills the single 128-byte column of a
// shared tile.
//
// wgmma requires that 8-bit operands are contiguous along k, the summed axis. For the scores,
// queries and keys are contiguous along the head dimension; for p v, the values are stored
// transposed, one row for each element of the head. A block of transposed values is a sequence of
// columns of 32 keys, whose rows of 32 bytes are swizzled. The accumulator of the scores holds its
// keys in a different order than the register operand p of p v needs. With q = lane % 4, a lane
// holds the keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of each 16 keys, but the operand needs four
// adjacent keys. The values are therefore stored in the accumulator's order of keys, so that no
// element of p moves between lanes.
#pragma once
#include "attention/warpgroup/gemm.cuh"

constexpr int kValueKeys = 32;  // keys per column of values and per wgmma instruction

// Starts the e4m3 wgmma d[64][96] = a[64][32] b[96][32]^T, or += where kAccumulate is 1.
template <int kAccumulate>
__device__ __forceinline__ void wgmma_32(float (&d)[48], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,"
      "%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,"
      "%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, %50, 1, 1;"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_16(d, 32)
      : "l"(a), "l"(b), "n"(kAccumulate));
}

// Starts the e4m3 wgmma d[64][128] += a[64][32] b[128][32]^T with a in registers. Each operand word
// of a lane has four adjacent elements along k, from lane % 4 * 4 on. Operand word a[1] is 8 rows
// further than a[0]; a[2] and a[3] are 16 elements further along k.
__device__ __forceinline__ void wgmma_32(float (&d)[64], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,"
      "%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
      "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
      "%57,%58,%59,%60,%61,%62,%63}, {%64, %65, %66, %67}, %68, 1, 1, 1;"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Returns the wgmma descriptor of an operand in rows of 32 bytes; in the last four of each eight
// rows the two 16-byte chunks are swapped.
__device__ __forceinline__ u64 operand_32(u32 shared) {
  constexpr u64 kGroupStride = 8 * kValueKeys >> 4, kSwizzle32 = 3;
  return static_cast<u64>((shared & 0x3ffff) >> 4) | (u64{1} << 16) | (kGroupStride << 32) |
         (kSwizzle32 << 62);
}

struct AttentionGemmsE4m3 {
  static constexpr int kElementBytes = 1;
  static constexpr int kKeysPerWeightWord = 8;  // keys per word of a lane's softmax weights

  template <int kCount>
  static __device__ __forceinline__ void scores(float (&s)[kCount], u32 q, u32 k) {
    const u64 first = wgmma_operand_descriptor(q), second = wgmma_operand_descriptor(k);
    wgmma_fence();
    wgmma_32<0>(s, first, second);
#pragma unroll
    for (int step = 1; step < kHeadDim / 32; ++step)
      wgmma_32<1>(s, first + step * (32 >> 4), second + step * (32 >> 4));
    wgmma_commit();
  }

  template <int kCount, int kWords>
  static __device__ __forceinline__ void values(float (&o)[kCount], const u32 (&p)[kWords], u32 v) {
    const u64 second = operand_32(v);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWords / 4; ++step)
      wgmma_32(o, p + 4 * step, second + step * (kValueKeys * kHeadDim >> 4));
    wgmma_commit();
  }

  // Each operand word holds two adjacent keys of a group of eight keys and two of the next group.
  template <int kWords>
  static __device__ __forceinline__ void round(u32 (&p)[kWords], const float (&s)[4 * kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float* x = s + i / 2 * 8 + i % 2 * 2;
      p[i] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
  }
};
