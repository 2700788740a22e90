// GEMMs of one warpgroup through wgmma, in which the warpgroup computes 64 rows. Each GEMM function
// starts one group of wgmmas, which are still running when the function returns.
//
// Tiles in shared memory consist of columns of 64 elements, stored one column after the other. The
// 128-byte rows of a 64-element column are swizzled as in common/wgmma/tile.cuh.
#pragma once
#include "attention/shape.cuh"
#include "common/memory.cuh"
#include "common/wgmma/tile.cuh"

constexpr int kGroupRows = 64;     // of a warpgroup
constexpr int kColumnBytes = 128;  // of a row of 64 elements

#define PTX_TYPE_Bf16 "bf16"
#define PTX_TYPE_F16 "f16"
#define PTX_TYPE_OF(type) PTX_TYPE_##type
#define PTX_TYPE(type) PTX_TYPE_OF(type)

// Starts the wgmma d[64][n] = a[64][16] b[n][16]^T, or += where kAccumulate is 1; n is twice the
// length of array d. Each warp of the warpgroup computes 16 of the 64 rows. Accumulator element d[4
// j + 2 h + i] is in row lane / 4 + 8 h and column 8 j + lane % 4 * 2 + i. With kByColumn, the
// shared tiles of a and b are stored as [16][64] and [16][n].
template <int kAccumulate, int kByColumn>
__device__ __forceinline__ void wgmma_16(float (&d)[16], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." PTX_TYPE(DTYPE) "." PTX_TYPE(DTYPE)
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, %18, 1, 1, %19, %19;"
      : ACCUMULATORS_16(d, 0)
      : "l"(a), "l"(b), "n"(kAccumulate), "n"(kByColumn));
}
template <int kAccumulate, int kByColumn>
__device__ __forceinline__ void wgmma_16(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX_TYPE(DTYPE) "." PTX_TYPE(DTYPE)
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, %34, 1, 1, %35, %35;"
      : ACCUMULATORS_32(d, 0)
      : "l"(a), "l"(b), "n"(kAccumulate), "n"(kByColumn));
}
template <int kAccumulate, int kByColumn>
__device__ __forceinline__ void wgmma_16(float (&d)[40], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." PTX_TYPE(DTYPE) "." PTX_TYPE(DTYPE)
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}, %40, %41, %42, 1, 1, "
      "%43, %43;"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_8(d, 32)
      : "l"(a), "l"(b), "n"(kAccumulate), "n"(kByColumn));
}
template <int kAccumulate, int kByColumn>
__device__ __forceinline__ void wgmma_16(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX_TYPE(DTYPE) "." PTX_TYPE(DTYPE)
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, %66, "
      "1, 1, %67, %67;"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
      : "l"(a), "l"(b), "n"(kAccumulate), "n"(kByColumn));
}

// Variant of the wgmma function above whose operand a is in registers. Words a[0] and a[1] hold two
// adjacent elements along k, from lane % 4 * 2 on, of row lane / 4 and of row lane / 4 + 8. Words
// a[2] and a[3] of the register operand hold the same rows as a[0] and a[1], 8 elements further
// along k. Register operand a thus has the register positions of accumulator d.
template <int kAccumulate, int kByColumn>
__device__ __forceinline__ void wgmma_16(float (&d)[32], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX_TYPE(DTYPE) "." PTX_TYPE(DTYPE)
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31}, {%32, %33, %34, %35}, %36, %37, 1, 1, %38;"
      : ACCUMULATORS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate), "n"(kByColumn));
}
template <int kAccumulate, int kByColumn>
__device__ __forceinline__ void wgmma_16(float (&d)[64], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX_TYPE(DTYPE) "." PTX_TYPE(DTYPE)
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64, %65, %66, "
      "%67}, %68, %69, 1, 1, %70;"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate), "n"(kByColumn));
}

// Prevents the compiler from reading an accumulator before the wait for its wgmma group.
template <int kCount>
__device__ __forceinline__ void pin_accumulator(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Rounds an accumulator to 16 bits, two elements a word, in the positions of a register operand.
template <int kCount>
__device__ __forceinline__ void round_accumulator_to_operand(u32 (&a)[kCount],
                                                             const float (&d)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] = Element::pack(d[2 * i], d[2 * i + 1]);
}

// Writes a warpgroup's 64 rows of rounded operand words to a shared tile of kRows rows, from its
// row `first` on.
template <int kRows, int kWords>
__device__ __forceinline__ void store_operand_rows_to_tile(u32 tile, const u32 (&a)[kWords],
                                                           int first) {
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const u32 row = first + warp * 16 + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kWords / 4; ++pair) {
    const u32 x[4] = {a[4 * pair], a[4 * pair + 1], a[4 * pair + 2], a[4 * pair + 3]};
    stmatrix_x4(tile + pair / 4 * kRows * kColumnBytes +
                    swizzled_chunk_offset<kColumnBytes>(row, pair % 4 * 2 + lane / 16),
                x);
  }
}

// Loads a warpgroup's 64 rows of a shared tile into registers, as a wgmma operand with d elements a
// row.
template <int kRows>
__device__ __forceinline__ void load_operand(u32 (&a)[kHeadDim / 4], u32 tile, int first) {
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const u32 row = first + warp * 16 + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kHeadDim / 16; ++pair) {
    u32 x[4];
    ldmatrix_x4(x, tile + pair / 4 * kRows * kColumnBytes +
                       swizzled_chunk_offset<kColumnBytes>(row, pair % 4 * 2 + lane / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * pair + i] = x[i];
  }
}

// Starts the GEMM d = a b^T over the d elements of a head, from shared tiles of kARows and kBRows
// rows. The warpgroup computes 64 of a's rows; the number of result columns is twice the length of
// array d.
template <int kARows, int kBRows, int kCount>
__device__ __forceinline__ void multiply_abt(float (&d)[kCount], u32 a, u32 b) {
  static_assert(kCount * 2 == kBRows, "a column of d for each row of b");
  const u64 first = wgmma_operand_descriptor(a), second = wgmma_operand_descriptor(b);
  wgmma_fence();
  wgmma_16<0, 0>(d, first, second);
#pragma unroll
  for (int step = 1; step < kHeadDim / 16; ++step) {
    const int column = step / 4, within = step % 4 * (32 >> 4);
    wgmma_16<1, 0>(d, first + column * (kARows * kColumnBytes >> 4) + within,
                   second + column * (kBRows * kColumnBytes >> 4) + within);
  }
  wgmma_commit();
}

// Starts the GEMM d = a b^T with the warpgroup's 64 rows of a in registers.
template <int kBRows, int kCount>
__device__ __forceinline__ void multiply_abt(float (&d)[kCount], const u32 (&a)[kHeadDim / 4],
                                             u32 b) {
  static_assert(kCount * 2 == kBRows, "a column of d for each row of b");
  const u64 second = wgmma_operand_descriptor(b);
  wgmma_fence();
  wgmma_16<0, 0>(d, a, second);
#pragma unroll
  for (int step = 1; step < kHeadDim / 16; ++step)
    wgmma_16<1, 0>(
        d, a + 4 * step,
        second + step / 4 * (kBRows * kColumnBytes >> 4) + step % 4 * (32 >> 4));
  wgmma_commit();
}

// Starts the GEMM d += a b with 64 rows of a in registers; b is a shared tile with one row for each
// column of a.
template <int kCount, int kWords>
__device__ __forceinline__ void gemm_ab_from_registers(float (&d)[kCount], const u32 (&a)[kWords],
                                                       u32 b) {
  constexpr int kRows = kWords * 4;  // rows of tile b
  // In tile b, the operands of the next 64 result columns begin one 64-element column further.
  constexpr u64 kLeadingOffsetBits = (u64{1} << 16) ^ (u64{kRows * kColumnBytes >> 4} << 16);
  const u64 second = wgmma_operand_descriptor(b) ^ kLeadingOffsetBits;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step)
    wgmma_16<1, 1>(d, a + 4 * step, second + step * (16 * kColumnBytes >> 4));
  wgmma_commit();
}

// Starts the GEMM d = a^T b over kRows rows of shared tiles, where a has 64 columns and b has the
// columns of d.
template <int kRows, int kCount>
__device__ __forceinline__ void multiply_atb(float (&d)[kCount], u32 a, u32 b) {
  // From result column 64 on, the columns of b are in the tile's next 64-element column.
  constexpr u64 kLeadingOffsetBits =
      2 * kCount > 64 ? (u64{1} << 16) ^ (u64{kRows * kColumnBytes >> 4} << 16) : 0;
  const u64 first = wgmma_operand_descriptor(a),
            second = wgmma_operand_descriptor(b) ^ kLeadingOffsetBits;
  wgmma_fence();
  wgmma_16<0, 1>(d, first, second);
#pragma unroll
  for (int step = 1; step < kRows / 16; ++step)
    wgmma_16<1, 1>(d, first + step * (16 * kColumnBytes >> 4),
                   second + step * (16 * kColumnBytes >> 4));
  wgmma_commit();
}

// The two GEMMs of attention forward, q k^T and p v, for 16-bit elements.
struct AttentionGemms16Bit {
  static constexpr int kElementBytes = 2;
  static constexpr int kKeysPerWeightWord = 4;  // keys per word of a lane's softmax weights

  template <int kCount>
  static __device__ __forceinline__ void scores(float (&s)[kCount], u32 q, u32 k) {
    multiply_abt<kGroupRows, 2 * kCount>(s, q, k);
  }
  template <int kCount, int kWords>
  static __device__ __forceinline__ void values(float (&o)[kCount], const u32 (&p)[kWords], u32 v) {
    gemm_ab_from_registers(o, p, v);
  }
  template <int kWords>
  static __device__ __forceinline__ void round(u32 (&p)[kWords], const float (&s)[2 * kWords]) {
    round_accumulator_to_operand(p, s);
  }
};
