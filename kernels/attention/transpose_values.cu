// Transposes the fp8 values [heads][keys][d] of attention for the kernel
// attention_forward_flash_wgmma. The transposed values consist of blocks of kKeys keys
// [heads][blocks]; each block is [kKeys / 32][d][32 keys] in rows of 32 bytes. The 32-byte rows of
// the result are swizzled, and their keys have the order described in warpgroup/gemm_e4m3.cuh. In
// the last block of a head, keys after the last one are zero.
//
// Threads: a thread block transposes the values of 32 keys through shared memory; each thread reads
// and writes 16 bytes. Bound: device memory; the values are read once and written once.
#include "attention/shape.cuh"

constexpr int kThreads = THREADS, kKeys = TILE_KEYS;
constexpr int kColumnKeys = 32, kPiece = 16;  // keys, bytes that a thread moves
constexpr int kStride = kHeadDim + kPiece;    // of a key's bytes in shared memory

static_assert(kKeys % kColumnKeys == 0, "a block is whole columns");
static_assert(kThreads == kColumnKeys * kHeadDim / kPiece, "a piece a thread");

// Each thread block transposes the values of 32 keys of one head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_transpose_values(const u8* __restrict__ values, u8* __restrict__ transposed,
                               int keys) {
  __shared__ __align__(16) u8 column[kColumnKeys * kStride];
  const int key_columns_of_head = ceil_div(keys, kKeys) * (kKeys / kColumnKeys);
  const i64 head = blockIdx.x / key_columns_of_head;
  const int first = blockIdx.x % key_columns_of_head * kColumnKeys, thread = threadIdx.x;
  {
    const int key = thread / (kHeadDim / kPiece), piece = thread % (kHeadDim / kPiece);
    uint4 x{0, 0, 0, 0};
    if (first + key < keys)
      x = reinterpret_cast<const uint4*>(values + (head * keys + first + key) * kHeadDim)[piece];
    *reinterpret_cast<uint4*>(column + key * kStride + piece * kPiece) = x;
  }
  __syncthreads();
  // Each thread writes sixteen keys of a row of the result: each word has two adjacent keys and the
  // two keys that are eight further.
  const int row = thread % kHeadDim, half = thread / kHeadDim;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u8* x = column + (half * kPiece + 2 * i) * kStride + row;
    words[i] = x[0] | x[kStride] << 8 | x[8 * kStride] << 16 | u32{x[9 * kStride]} << 24;
  }
  u8* to = transposed + static_cast<i64>(blockIdx.x) * kColumnKeys * kHeadDim;
  const int swizzled_half = half ^ (row / 4 % 2);
  *reinterpret_cast<uint4*>(to + row * kColumnKeys + swizzled_half * kPiece) =
      uint4{words[0], words[1], words[2], words[3]};
}
