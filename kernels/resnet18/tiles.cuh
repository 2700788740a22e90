// Tiles of implicit GEMMs over frames [T, B, side, side, channels] in bf16: their rows are one pixel
// of some images, all time steps of each, so a tap is in the padding for a whole tile or for none of
// it, and is then skipped. Deliberately absent: what is done with the sums.
//
// Threads: 4 warps, 2 x 2 over a tile of 64 x 64 sums.
// Shared memory: a ring of stages of two operands, 64 x 64 each, filled by asynchronous copies.
#pragma once
#include "common/element16.cuh"
using Element = Bf16;
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "common/warp_gemm.cuh"

constexpr int kThreads = THREADS, kTile = TILE, kStages = STAGES;
static_assert(kThreads == 128 && kTile == 64, "a thread copies a chunk of every 16th row");
constexpr int kRowBytes = 2 * kTile, kTileBytes = kTile * kRowBytes, kStageBytes = 2 * kTileBytes;
constexpr int kRowsApart = kThreads / 8, kCopies = kTile / kRowsApart;  // a row is eight chunks
constexpr int kPitch = kTile + 8;  // of sums: those that a half-warp stores are in different banks
static_assert(kStages >= 3 && kTile * kPitch * 4 <= kStages * kStageBytes,
              "copies are ahead of their use, and the sums fit where the stages were");

using Sums = float[2][4][4];  // a warp's 32 x 32

extern __shared__ __align__(1024) char shared[];

// The rows of a tile: all steps of the images from `image0` on, and what this thread copies of them.
struct Rows {
  int image0, images, steps;

  __device__ __forceinline__ Rows(int group, int images_, int steps_)
      : image0(group * (kTile / steps_)), images(images_), steps(steps_) {}

  // Copies 64 channels of every row to a tile; rows of images that there are not become zero.
  __device__ __forceinline__ void copy(u32 tile, const u16* frames, int pixels, int pixel,
                                       int channels, int channel) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const i64 first = static_cast<i64>(row % steps) * images + image0;
    const u16* from = frames + (first * pixels + pixel) * channels + channel + 8 * chunk;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int image = (row + i * kRowsApart) / steps;
      const bool valid = image0 + image < images;
      cp_async_16_or_zero(tile + swizzled<kRowBytes>(row + i * kRowsApart, chunk),
                          from + (valid ? static_cast<i64>(image) * pixels * channels : 0), valid);
    }
  }
};

// Copies a tile of a matrix with rows of `pitch`.
__device__ __forceinline__ void copy_matrix(u32 tile, const u16* matrix, i64 pitch) {
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kCopies; ++i)
    cp_async_16(tile + swizzled<kRowBytes>(row + i * kRowsApart, chunk),
                matrix + (row + i * kRowsApart) * pitch + 8 * chunk);
}

// Calls `copy(stage)`, which starts the copies of a step and returns false where there are no more
// steps, ahead of `multiply(first operand, second operand)` of the same step; leaves no copy under
// way and the shared memory free.
template <class Copy, class Multiply>
__device__ __forceinline__ void run_pipeline(const Copy& copy, const Multiply& multiply) {
  const u32 base = shared_address(shared);
  int issued = 0;
  const auto issue = [&]() {
    if (copy(base + issued % kStages * kStageBytes)) ++issued;
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) issue();
#pragma unroll 1
  for (int consumed = 0; consumed < issued; ++consumed) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    issue();
    const u32 stage = base + consumed % kStages * kStageBytes;
    multiply(stage, stage + kTileBytes);
  }
  cp_async_wait<0>();
  __syncthreads();
}

// One convolution: what it reads, or, transposed, the gradient of what it writes.
struct Operand {
  const u16* frames;  // [T, B, side, side, channels]
  const u16* weight;  // [filters, depth], tap 0 first
  int depth;          // of the taps that are held: those before the first are never read
  int side;
  int channels;
  int kernel;
  int stride;
};

// A step of the walk over taps and channels of an operand.
template <bool kTransposed>
struct Walk {
  Operand operand;
  int row, column;   // of the pixel written
  int tap, channel;  // where it is
  int pixel;         // read by the tap

  __device__ __forceinline__ Walk(const Operand& operand_, int row_, int column_)
      : operand(operand_), row(row_), column(column_), tap(-1), channel(0), pixel(0) {
    next_tap();
  }
  __device__ __forceinline__ bool done() const { return tap == operand.kernel * operand.kernel; }
  __device__ __forceinline__ void next() {
    channel += kTile;
    if (channel < operand.channels) return;
    channel = 0;
    next_tap();
  }

 private:
  // Moves on to a tap that is not in the padding.
  __device__ __forceinline__ void next_tap() {
    while (++tap < operand.kernel * operand.kernel) {
      const int down = tap / operand.kernel - operand.kernel / 2;
      const int right = tap % operand.kernel - operand.kernel / 2;
      int y = row * operand.stride + down, x = column * operand.stride + right;
      if constexpr (kTransposed) {
        y = row - down;
        x = column - right;
        if (y % operand.stride != 0 || x % operand.stride != 0) continue;
        y /= operand.stride;
        x /= operand.stride;
      }
      pixel = y * operand.side + x;
      if (y >= 0 && y < operand.side && x >= 0 && x < operand.side) return;
    }
  }
};

// sums of a tile: rows of the pixel (row, column) by 64 channels from `first` on, of `written`
// channels, of a convolution and, where its weight is not null, of a second one.
template <bool kTransposed>
__device__ __forceinline__ void convolve(Sums& sums, const Rows& rows, const Operand& operand,
                                         const Operand& second, int row, int column, int written,
                                         int first) {
  Walk<kTransposed> walk(operand, row, column);
  bool last = second.weight == nullptr;
  const auto copy = [&](u32 stage) {
    if (walk.done() && !last) {
      walk = Walk<kTransposed>(second, row, column);
      last = true;
    }
    if (walk.done()) return false;
    const Operand& from = walk.operand;
    rows.copy(stage, from.frames, from.side * from.side, walk.pixel, from.channels, walk.channel);
    // Filters by channels read; transposed, channels read (its filters) by channels written.
    const i64 at = kTransposed ? static_cast<i64>(walk.channel) * from.depth +
                                     walk.tap * written + first
                               : static_cast<i64>(first) * from.depth +
                                     walk.tap * from.channels + walk.channel;
    copy_matrix(stage + kTileBytes, from.weight + at, from.depth);
    walk.next();
    return true;
  };
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  const u32 a = lane_by_row<kRowBytes>(warp_row, lane);
  const u32 b = kTransposed ? lane_by_row<kRowBytes>(0, lane) ^ (2 * warp_column)
                            : lane_by_column<kRowBytes>(warp_column, lane);
  clear(sums);
  run_pipeline(copy, [&](u32 frames, u32 weight) {
    if constexpr (kTransposed) {
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) {
        u32 fragments[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          ldmatrix_x4(fragments[i], (frames + a ^ (step * 32)) + i * 16 * kRowBytes);
        multiply_step_ab(sums, fragments, weight + b + step * 16 * kRowBytes);
      }
    } else {
      multiply_abt<kTile / 16, kRowBytes>(sums, frames + a, weight + b);
    }
  });
}

// Calls `store(row, column, two neighbouring sums)` for each pair that this thread holds.
template <class Store>
__device__ __forceinline__ void for_each_pair(const Sums& sums, const Store& store) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store(warp / 2 * 32 + 16 * i + 8 * half + lane / 4,
              warp % 2 * 32 + 8 * j + lane % 4 * 2,
              make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]));
}

// The sums of a tile where all threads read them, [row][kPitch].
__device__ __forceinline__ const float* spread(const Sums& sums) {
  float* all = reinterpret_cast<float*>(shared);
  for_each_pair(sums, [&](int row, int column, float2 pair) {
    *reinterpret_cast<float2*>(all + row * kPitch + column) = pair;
  });
  __syncthreads();
  return all;
}
