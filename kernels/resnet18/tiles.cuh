// Tiles of implicit GEMMs over frames [T, B, side, side, channels] in bf16. The rows of a tile are
// one pixel of some images in all time steps. A tap is therefore in the padding for the whole tile
// or for none of it, and taps in the padding are skipped. The epilogues that use a tile's sums are
// excluded on purpose.
//
// Threads: groups of 4 warps, 2 x 2 over a tile of 64 x 64 sums. Groups alternate in the steps of a
// GEMM, so that a tile with few neighbours on its multiprocessor waits less.
// Shared memory: for each group a ring of stages with two operands of 64 x 64, filled by
// asynchronous copies; afterwards the sums of each group.
#pragma once
#include "common/element16.cuh"
using Element = Bf16;
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "common/warp_gemm.cuh"

constexpr int kThreads = THREADS, kTile = TILE, kStages = STAGES;
constexpr int kGroupThreads = 128, kGroups = kThreads / kGroupThreads;
static_assert(kThreads % kGroupThreads == 0 && kTile == 64,
              "a thread copies a chunk of every 16th row");
constexpr int kRowBytes = 2 * kTile, kTileBytes = kTile * kRowBytes, kStageBytes = 2 * kTileBytes;
constexpr int kRowsApart = kGroupThreads / 8, kCopies = kTile / kRowsApart;  // a row is eight chunks
constexpr int kPitch = kTile + 8;  // of sums: those that a half-warp stores are in different banks
static_assert(kStages >= 3 && kTile * kPitch * 4 <= kStages * kStageBytes,
              "copies are ahead of their use, and the sums fit where the stages were");

using Sums = float[2][4][4];  // a warp's 32 x 32

extern __shared__ __align__(1024) char shared[];

__device__ __forceinline__ int group() { return threadIdx.x / kGroupThreads; }
__device__ __forceinline__ int group_thread() { return threadIdx.x % kGroupThreads; }
__device__ __forceinline__ int group_warp() { return group_thread() / 32; }

// Rows of a tile: all time steps of some images. The addresses that this thread copies are computed
// once, because the steps of a GEMM leave no time for divisions.
struct Rows {
  int images, chunk, shared_offset;
  int step, local, apart;  // of this thread's first row: its step and image; images between rows
  int image0;

  __device__ __forceinline__ Rows(int images_, int steps) : images(images_), image0(0) {
    const int row = group_thread() / 8;
    chunk = group_thread() % 8;
    shared_offset = swizzled<kRowBytes>(row, chunk);
    step = row % steps;
    local = row / steps;
    apart = kRowsApart / steps;
  }

  // Copies 64 channels of every row to a tile; rows of images past the last one become zero.
  __device__ __forceinline__ void copy(u32 tile, const u16* frames, int pixels, int pixel,
                                       int channels, int channel) const {
    const i64 frame = static_cast<i64>(step) * images + image0 + local;
    const u16* from = frames + (frame * pixels + pixel) * channels + channel + 8 * chunk;
    const i64 between = static_cast<i64>(apart) * pixels * channels;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool valid = image0 + local + i * apart < images;
      cp_async_16_or_zero(tile + shared_offset + i * kRowsApart * kRowBytes,
                          valid ? from + i * between : frames, valid);
    }
  }
};

// Copies a tile of a matrix whose rows are `pitch` elements apart.
__device__ __forceinline__ void copy_matrix(u32 tile, const u16* matrix, int pitch) {
  const int row = group_thread() / 8, chunk = group_thread() % 8;
  const u16* from = matrix + static_cast<i64>(row) * pitch + 8 * chunk;
  const i64 between = static_cast<i64>(kRowsApart) * pitch;
#pragma unroll
  for (int i = 0; i < kCopies; ++i)
    cp_async_16(tile + swizzled<kRowBytes>(row, chunk) + i * kRowsApart * kRowBytes,
                from + i * between);
}

// Runs the steps of a GEMM as a pipeline. `copy(stage)` starts the copies of a step and returns
// false after the last step; `multiply(first operand, second operand)` follows later for the same
// step. After the last step no copy is in flight and the shared memory is free.
template <class Copy, class Multiply>
__device__ __forceinline__ void run_pipeline(const Copy& copy, const Multiply& multiply) {
  const u32 base = shared_address(shared) + group() * kStages * kStageBytes;
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
    barrier_sync(1 + group(), kGroupThreads);
    issue();
    const u32 stage = base + consumed % kStages * kStageBytes;
    multiply(stage, stage + kTileBytes);
  }
  cp_async_wait<0>();
  __syncthreads();
}

// Operand of one convolution: its input or, if transposed, the gradient of its output.
struct Operand {
  const u16* frames;  // [T, B, side, side, channels]
  const u16* weight;  // [filters, depth], tap 0 first
  int depth;          // of the taps that are held: those before the first are never read
  int side;
  int channels;
  int kernel;
  int stride;
};

// Iterator over the taps and channels of an operand, whose stride is 1 or 2.
template <bool kTransposed>
struct Walk {
  Operand operand;
  int row, column;       // of the pixel written
  int tap, down, right;  // where it is: the tap is `down` and `right` of the window's corner
  int channel;
  int pixel;  // read by the tap

  __device__ __forceinline__ Walk(const Operand& operand_, int row_, int column_)
      : operand(operand_), row(row_), column(column_), tap(0), down(0), right(0), channel(0),
        pixel(0) {
    find_tap();
  }
  __device__ __forceinline__ bool done() const { return down == operand.kernel; }
  __device__ __forceinline__ void next() {
    channel += kTile;
    if (channel < operand.channels) return;
    channel = 0;
    next_tap();
    find_tap();
  }

 private:
  __device__ __forceinline__ void next_tap() {
    ++tap;
    if (++right < operand.kernel) return;
    right = 0;
    ++down;
  }
  // Pixel that a tap reads along an axis; negative outside of the map.
  __device__ __forceinline__ int source(int at, int offset) const {
    offset -= operand.kernel / 2;
    if constexpr (!kTransposed) return at * operand.stride + offset;
    at -= offset;
    return at & (operand.stride - 1) ? -1 : at >> (operand.stride - 1);
  }
  // Advances to the next tap that is not in the padding.
  __device__ __forceinline__ void find_tap() {
    for (; !done(); next_tap()) {
      const int y = source(row, down), x = source(column, right);
      pixel = y * operand.side + x;
      if (y >= 0 && y < operand.side && x >= 0 && x < operand.side) return;
    }
  }
};

// Computes the sums of a tile, rows of the pixel (row, column) by 64 of the `written` channels from
// `first` on. The sums are those of one convolution and, if its weight is not null, of a second
// convolution.
template <bool kTransposed>
__device__ __forceinline__ void convolve(Sums& sums, const Rows& rows, const Operand& operand,
                                         const Operand& second, int row, int column, int written,
                                         int first) {
  Walk<kTransposed> walk(operand, row, column);
  bool last = second.weight == nullptr;
  int others = group();  // steps before the next one of this group
  const auto copy = [&](u32 stage) {
    while (true) {
      if (walk.done() && !last) {
        walk = Walk<kTransposed>(second, row, column);
        last = true;
      }
      if (walk.done()) return false;
      if (others == 0) break;
      --others;
      walk.next();
    }
    others = kGroups - 1;
    const Operand& from = walk.operand;
    rows.copy(stage, from.frames, from.side * from.side, walk.pixel, from.channels, walk.channel);
    // Rows of the weight are filters and its columns input channels; if transposed, rows are input
    // channels.
    const i64 at = kTransposed ? static_cast<i64>(walk.channel) * from.depth +
                                     walk.tap * written + first
                               : static_cast<i64>(first) * from.depth +
                                     walk.tap * from.channels + walk.channel;
    copy_matrix(stage + kTileBytes, from.weight + at, from.depth);
    walk.next();
    return true;
  };
  const u32 lane = threadIdx.x % 32, warp = group_warp();
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

// Calls `store(row, column, two neighbouring sums)` for each pair of sums that this thread holds.
template <class Store>
__device__ __forceinline__ void for_each_pair(const Sums& sums, const Store& store) {
  const int lane = threadIdx.x % 32, warp = group_warp();
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

// Two neighbouring neurons of a tile, for which one thread reads the sums of all time steps.
template <int kSteps>
struct Pair {
  static constexpr int kInTile = kTile / kSteps * kTile / 2;
  static constexpr int kOfThread = ceil_div(kInTile, kThreads);

  int row, column;  // of the first sum
  i64 at;           // of the first neuron among those of a step, [B, pixels, channels]
  bool exists;

  // Position of this thread's n-th pair of neurons, in a tile of these images at one pixel, from a
  // channel on.
  __device__ __forceinline__ Pair(int n, const Rows& rows, int pixel, int pixels, int channels,
                                  int first) {
    const int i = threadIdx.x + n * kThreads, local = i / (kTile / 2);
    row = local * kSteps;
    column = i % (kTile / 2) * 2;
    at = (static_cast<i64>(rows.image0 + local) * pixels + pixel) * channels + first + column;
    exists = i < kInTile && rows.image0 + local < rows.images;
  }
};

// Writes the sums to shared memory, from which all threads read them.
__device__ __forceinline__ void spread(const Sums& sums) {
  float* own = reinterpret_cast<float*>(shared) + group() * kTile * kPitch;
  for_each_pair(sums, [&](int row, int column, float2 pair) {
    *reinterpret_cast<float2*>(own + row * kPitch + column) = pair;
  });
  __syncthreads();
}

// Adds two neighbouring sums of all groups, after `spread`.
__device__ __forceinline__ float2 spread_pair(int row, int column) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(
        reinterpret_cast<const float*>(shared) + (i * kTile + row) * kPitch + column);
    sum.x += pair.x;
    sum.y += pair.y;
  }
  return sum;
}
