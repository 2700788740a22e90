// Tiles of implicit-GEMM convolutions over bf16 frames [T, B, side, side, channels]. The rows of a
// tile are one output pixel of some images in all time steps. A tap of the convolution is therefore
// in the padding for the whole tile or for none of its rows, and taps in the padding are skipped.
// The epilogues that use the sums of a tile are deliberately not part of tiles.cuh.
//
// Threads: groups of 4 warps; the warps of a group compute 2 x 2 parts of a tile of 64 x 64 sums.
// The thread groups of a block take the steps of a GEMM in alternation, so that a tile waits less
// if few other thread blocks share its multiprocessor. Shared memory: for each thread group a ring
// of stages with two operands of 64 x 64, filled by asynchronous copies; afterwards the sums of
// each group.
#pragma once
#include "common/element16.cuh"
using Element = Bf16;
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "common/warp_gemm.cuh"

constexpr int kThreads = THREADS, kTile = TILE, kStages = STAGES;  // kTile: side of a tile of sums
constexpr int kGroupThreads = 128, kGroups = kThreads / kGroupThreads;
static_assert(kThreads % kGroupThreads == 0 && kTile == 64,
              "a thread copies a chunk of every 16th row");
constexpr int kRowBytes = 2 * kTile, kTileBytes = kTile * kRowBytes, kStageBytes = 2 * kTileBytes;
// A row of a tile has eight chunks of 16 bytes.
constexpr int kRowsBetweenCopies = kGroupThreads / 8, kCopiesPerThread = kTile / kRowsBetweenCopies;
constexpr int kPitch = kTile + 8;  // of sums: those that a half-warp stores are in different banks
static_assert(kStages >= 3 && kTile * kPitch * 4 <= kStages * kStageBytes,
              "copies are ahead of their use, and the sums fit where the stages were");

using Sums = float[2][4][4];  // a warp's 32 x 32

extern __shared__ __align__(1024) char shared[];

__device__ __forceinline__ int group() { return threadIdx.x / kGroupThreads; }
__device__ __forceinline__ int group_thread() { return threadIdx.x % kGroupThreads; }
__device__ __forceinline__ int group_warp() { return group_thread() / 32; }

// Rows of a GEMM tile: all time steps of some images at one pixel. The addresses that this thread
// copies are computed once, because the steps of a GEMM leave no time for divisions.
struct ImageRowsOfTile {
  int images, chunk, shared_offset;
  int step, local, apart;  // of this thread's first row: its step and image; images between rows
  int image0;

  __device__ __forceinline__ ImageRowsOfTile(int images_, int steps) : images(images_), image0(0) {
    const int row = group_thread() / 8;
    chunk = group_thread() % 8;
    shared_offset = swizzled_chunk_offset<kRowBytes>(row, chunk);
    step = row % steps;
    local = row / steps;
    apart = kRowsBetweenCopies / steps;
  }

  // Copies 64 channels of every row of the tile to shared memory; rows of images past the last one
  // become zero.
  __device__ __forceinline__ void copy(u32 tile, const u16* frames, int pixels, int pixel,
                                       int channels, int channel) const {
    const i64 frame = static_cast<i64>(step) * images + image0 + local;
    const u16* from = frames + (frame * pixels + pixel) * channels + channel + 8 * chunk;
    const i64 between = static_cast<i64>(apart) * pixels * channels;
#pragma unroll
    for (int i = 0; i < kCopiesPerThread; ++i) {
      const bool valid = image0 + local + i * apart < images;
      cp_async_16_bytes_or_zeros(tile + shared_offset + i * kRowsBetweenCopies * kRowBytes,
                                 valid ? from + i * between : frames, valid);
    }
  }
};

// Copies a 64 x 64 tile of a matrix to shared memory; the matrix has rows that are `pitch` elements
// apart.
__device__ __forceinline__ void copy_matrix_tile(u32 tile, const u16* matrix, int pitch) {
  const int row = group_thread() / 8, chunk = group_thread() % 8;
  const u16* from = matrix + static_cast<i64>(row) * pitch + 8 * chunk;
  const i64 between = static_cast<i64>(kRowsBetweenCopies) * pitch;
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i)
    cp_async_16_bytes(
        tile + swizzled_chunk_offset<kRowBytes>(row, chunk) + i * kRowsBetweenCopies * kRowBytes,
        from + i * between);
}

// Runs the steps of a tile's GEMM as a pipeline of asynchronous copies and multiplications.
// `copy(stage)` starts the copies of a step and returns false after the last step; `multiply(first
// operand, second operand)` follows later for the same step. When `run_gemm_pipeline` returns, no
// copy is in flight and the shared memory is free.
template <class Copy, class Multiply>
__device__ __forceinline__ void run_gemm_pipeline(const Copy& copy, const Multiply& multiply) {
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
    named_barrier_sync(1 + group(), kGroupThreads);
    issue();
    const u32 stage = base + consumed % kStages * kStageBytes;
    multiply(stage, stage + kTileBytes);
  }
  cp_async_wait<0>();
  __syncthreads();
}

// Operand of one convolution: its input or, in the transposed convolution of the backward pass, the
// gradient of its output.
struct ConvolutionOperand {
  const u16* frames;  // [T, B, side, side, channels]
  const u16* weight;  // [filters, depth], tap 0 first
  int depth;          // of the taps that are held: those before the first are never read
  int side;
  int channels;
  int kernel;
  int stride;
};

// Iterator over the taps and channels of a convolution operand, whose stride is 1 or 2.
template <bool kTransposed>
struct TapAndChannelIterator {
  ConvolutionOperand operand;
  int row, column;       // of the pixel written
  int tap, down, right;  // where it is: the tap is `down` and `right` of the window's corner
  int channel;
  int pixel;  // read by the tap

  __device__ __forceinline__ TapAndChannelIterator(const ConvolutionOperand& operand_, int row_,
      int column_)
      : operand(operand_), row(row_), column(column_), tap(0), down(0), right(0), channel(0),
        pixel(0) {
    skip_taps_in_padding();
  }
  __device__ __forceinline__ bool done() const { return down == operand.kernel; }
  __device__ __forceinline__ void next() {
    channel += kTile;
    if (channel < operand.channels) return;
    channel = 0;
    next_tap();
    skip_taps_in_padding();
  }

 private:
  __device__ __forceinline__ void next_tap() {
    ++tap;
    if (++right < operand.kernel) return;
    right = 0;
    ++down;
  }
  // Returns the pixel that a tap reads along an axis; negative outside of the map.
  __device__ __forceinline__ int source(int at, int offset) const {
    offset -= operand.kernel / 2;
    if constexpr (!kTransposed) return at * operand.stride + offset;
    at -= offset;
    return at & (operand.stride - 1) ? -1 : at >> (operand.stride - 1);
  }
  // Advances the iterator to the next tap that is not in the padding.
  __device__ __forceinline__ void skip_taps_in_padding() {
    for (; !done(); next_tap()) {
      const int y = source(row, down), x = source(column, right);
      pixel = y * operand.side + x;
      if (y >= 0 && y < operand.side && x >= 0 && x < operand.side) return;
    }
  }
};

// Computes the sums of a tile: the rows of the pixel (row, column) by 64 of the `written` channels
// from `first` on. The sums of a tile are those of one convolution and, if its weight is not null,
// of a second convolution.
template <bool kTransposed>
__device__ __forceinline__ void compute_convolution_sums(Sums& sums, const ImageRowsOfTile& rows,
                                                         const ConvolutionOperand& operand,
                                         const ConvolutionOperand& second, int row, int column,
                                             int written,
                                         int first) {
  TapAndChannelIterator<kTransposed> walk(operand, row, column);
  bool last = second.weight == nullptr;
  int others = group();  // steps before the next one of this group
  const auto copy = [&](u32 stage) {
    while (true) {
      if (walk.done() && !last) {
        walk = TapAndChannelIterator<kTransposed>(second, row, column);
        last = true;
      }
      if (walk.done()) return false;
      if (others == 0) break;
      --others;
      walk.next();
    }
    others = kGroups - 1;
    const ConvolutionOperand& from = walk.operand;
    rows.copy(stage, from.frames, from.side * from.side, walk.pixel, from.channels, walk.channel);
    // The rows of the weight are filters and its columns input channels; in the transposed
    // convolution the rows are input channels.
    const i64 at = kTransposed ? static_cast<i64>(walk.channel) * from.depth +
                                     walk.tap * written + first
                               : static_cast<i64>(first) * from.depth +
                                     walk.tap * from.channels + walk.channel;
    copy_matrix_tile(stage + kTileBytes, from.weight + at, from.depth);
    walk.next();
    return true;
  };
  const u32 lane = threadIdx.x % 32, warp = group_warp();
  const u32 warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  const u32 a = ldmatrix_lane_address_rows_by_k<kRowBytes>(warp_row, lane);
  const u32 b = kTransposed
                    ? ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane) ^ (2 * warp_column)
                    : ldmatrix_lane_address_columns_by_k<kRowBytes>(warp_column, lane);
  clear(sums);
  run_gemm_pipeline(copy, [&](u32 frames, u32 weight) {
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

// Calls `store(row, column, two adjacent sums)` for each pair of sums that this thread holds.
template <class Store>
__device__ __forceinline__ void for_each_pair_of_sums(const Sums& sums, const Store& store) {
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

// Two adjacent neurons of a tile, for which one thread reads the sums of all time steps.
template <int kSteps>
struct NeuronPair {
  static constexpr int kPairsOfTile = kTile / kSteps * kTile / 2;
  static constexpr int kPairsOfThread = ceil_div(kPairsOfTile, kThreads);

  int row, column;  // of the first sum
  i64 at;           // of the first neuron among those of a step, [B, pixels, channels]
  bool exists;

  // Computes the position of this thread's n-th pair of neurons, in a tile of these images at one
  // pixel, from channel `first` on.
  __device__ __forceinline__ NeuronPair(int n, const ImageRowsOfTile& rows, int pixel, int pixels,
      int channels,
                                  int first) {
    const int i = threadIdx.x + n * kThreads, local = i / (kTile / 2);
    row = local * kSteps;
    column = i % (kTile / 2) * 2;
    at = (static_cast<i64>(rows.image0 + local) * pixels + pixel) * channels + first + column;
    exists = i < kPairsOfTile && rows.image0 + local < rows.images;
  }
};

// Writes the sums of a tile to shared memory, from which all threads read them.
__device__ __forceinline__ void share_sums_in_shared_memory(const Sums& sums) {
  float* own = reinterpret_cast<float*>(shared) + group() * kTile * kPitch;
  for_each_pair_of_sums(sums, [&](int row, int column, float2 pair) {
    *reinterpret_cast<float2*>(own + row * kPitch + column) = pair;
  });
  __syncthreads();
}

// Returns two adjacent sums of a tile, added over all thread groups, after
// `share_sums_in_shared_memory`.
__device__ __forceinline__ float2 sum_pair_over_thread_groups(int row, int column) {
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
