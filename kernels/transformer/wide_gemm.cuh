// bf16 GEMM for sm_90a whose epilogue f sees the whole accumulator of a tile: y = f(x w^T).
//
// The operands of the GEMM are x [tokens, k] and w in rows of k; k is a multiple of 64, the columns
// of y are a multiple of 8.
//
// Threads: each thread block has two compute warpgroups with 232 registers a thread. In the third
// warpgroup of a thread block, which keeps 40 registers a thread, one thread issues the tensor
// copies. Thread blocks are persistent: each computes every gridDim.x-th output tile. Each compute
// warpgroup computes half of the rows of a tile and all its columns. A compute warpgroup may start
// the next tile while the other one is in its epilogue: they synchronise only by the shared-memory
// stages, which both read. Shared memory: kStages stages, each with a tile of x and a tile of w: 64
// columns of k in swizzled rows of 128 bytes. Each warp also has a slice of y in padded rows of
// shared memory, from which it stores whole packets. Order of output tiles: as many row tiles as L2
// can keep are computed for all columns, then the next ones, so that w is seldom read again. Bound:
// tensor cores.
#pragma once
#include "common/cluster.cuh"
#include "common/element.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/tensor_copy.cuh"
#include "common/wgmma/ring.cuh"
#include "common/wgmma/wide_tile.cuh"

constexpr int kRows = TILE_ROWS, kColumns = TILE_COLUMNS, kStages = STAGES;  // of an output tile
constexpr int kThreads = THREADS;
constexpr int kGroupBytes = 20 << 20;  // of rows of x that are used for all columns of y
constexpr int kGroups = 2, kGroupThreads = 128, kWarps = kGroups * 4;
constexpr int kDepth = 64, kRowBytes = 2 * kDepth;  // of k a step, and of its rows
constexpr int kParts = kRows / (kGroups * 64);      // accumulators of a warpgroup, 64 rows each
constexpr int kHalf = kColumns / 2;                 // columns of a box of w
constexpr int kXBytes = kRows * kRowBytes, kHalfBytes = kHalf * kRowBytes;
constexpr int kStageBytes = kXBytes + 2 * kHalfBytes;
// Number of columns of y that a warp stores at a time; rows of the slice are padded so that they
// begin at different banks.
constexpr int kSliceColumns = SLICE_COLUMNS;
constexpr int kSliceRowBytes = (kSliceColumns + 8) * 2, kSliceBytes = 16 * kSliceRowBytes;
constexpr int kSlicesOffset = kStages * kStageBytes;
constexpr int kBarriersOffset = kSlicesOffset + kWarps * kSliceBytes;
constexpr int kSharedBytes = kBarriersOffset + kStages * 16;

static_assert(kThreads == (kGroups + 1) * kGroupThreads, "a warpgroup copies, two compute");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");
static_assert(kSliceColumns % 16 == 0 && kColumns % kSliceColumns == 0, "slices fill a tile");
static_assert(kHalfBytes % 1024 == 0, "both halves of w begin at a group of eight rows");

using Stages = SharedMemoryCopyRing<kStages, kStageBytes, kWarps>;

// Extents of the GEMM: rows, columns and depth.
struct GemmShape {
  int tokens, columns, k;
};

// Numbers of row tiles (of x) and of column tiles (of y) of a launch.
struct OutputTileCounts {
  int rows, columns, group;

  __device__ __forceinline__ OutputTileCounts(const GemmShape& shape, int tile_columns)
      : rows(ceil_div(shape.tokens, kRows)),
        columns(ceil_div(shape.columns, tile_columns)),
        group(max_of(1, kGroupBytes / (kRows * 2 * shape.k))) {}
  __device__ __forceinline__ int count() const { return rows * columns; }
  __device__ __forceinline__ int2 tile(int index) const {
    const int row_group = index / (group * columns),
        tile_in_row_group = index - row_group * group * columns;
    const int row_tiles_in_group = min_of(group, rows - row_group * group),
        column = tile_in_row_group / row_tiles_in_group;
    return {row_group * group + tile_in_row_group - column * row_tiles_in_group, column};
  }
};

// Copies the tiles of x and w into the ring of stages; one thread executes the function.
// Epilogue::box returns the origin in w of each half of a tile of w.
template <typename Epilogue>
__device__ __forceinline__ void copy_operand_tiles(const Stages& ring, const TensorMap& x,
                                                   const TensorMap& w,
                                        const GemmShape& shape) {
  const OutputTileCounts tiles(shape, Epilogue::kTileColumns);
  u32 n = 0;
  for (int index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
    const int2 tile = tiles.tile(index);
    for (int k = 0; k < shape.k; k += kDepth, ++n) {
      ring.begin_fill(n, kStageBytes);
      const u32 to = ring.stage(n), full = ring.full(n);
      tma_load_box(to, x, {k, tile.x * kRows, 0, 0}, full);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tma_load_box(to + kXBytes + half * kHalfBytes, w, Epilogue::box(k, tile.y, half), full);
    }
  }
}

using Accumulator = float[kColumns / 2];

// Computes x w^T for the rows of this warpgroup, from fill n of the stages on.
__device__ __forceinline__ void multiply_operand_tiles(Accumulator (&d)[kParts],
                                                       const Stages& ring, u32& n,
                                         int group, int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++n) {
    ring.wait(n);
    const u64 x = wgmma_operand_descriptor(ring.stage(n) + group * (kXBytes / kGroups));
    const u64 w = wgmma_operand_descriptor(ring.stage(n) + kXBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        wgmma_wide(d[part], advance_operand_descriptor(x, part * 64 * kRowBytes + i * 32),
                   advance_operand_descriptor(w, i * 32), i > 0 || step > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) ring.release_by_warp(n - 1);
  }
  wgmma_wait<0>();
  // Prevents the compiler from reading an accumulator before the wait for its wgmma group.
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[part][i])::"memory");
  ring.release_by_warp(n - 1);
}

// Writes 16 rows x kSliceColumns columns of a warp's results to the warp's slice of shared memory,
// from word `from` on. Element words[2 j + h] has two adjacent columns of row lane / 4 + 8 h, as in
// the accumulator.
template <int kWords>
__device__ __forceinline__ void write_rows_to_slice(u32 slice, const u32 (&words)[kWords],
                                                    int from) {
  const u32 lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kSliceColumns / 8; i += 2) {
    const int at = from + 2 * i;
    const u32 four_words[4] = {words[at], words[at + 1], words[at + 2], words[at + 3]};
    stmatrix_x4(slice + lane % 16 * kSliceRowBytes + (i + lane / 16) * 16, four_words);
  }
}

// Stores 16 rows x 4 kWords columns of a warp's results to y, from `row` and `column` on, through
// the warp's slice of shared memory.
template <int kWords>
__device__ __forceinline__ void store_rows_through_slice(u32 slice, const u32 (&words)[kWords],
                                                         Element* y,
                                           i64 stride, int row, int rows, int column, int columns) {
  constexpr int kPackets = kSliceColumns / 8;  // of a row of a slice
  static_assert(4 * kWords % kSliceColumns == 0, "slices fill the columns");
  const u32 lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int from = 0; from < 4 * kWords; from += kSliceColumns) {
    write_rows_to_slice(slice, words, from / 4);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * kPackets; i += kWarpSize) {
      const int at = i + lane, row_in_slice = at / kPackets, column_in_slice = at % kPackets * 8;
      if (row + row_in_slice < rows && column + from + column_in_slice < columns) {
        const uint4 x = load_shared_b128(slice + row_in_slice * kSliceRowBytes +
                                         column_in_slice * 2);
        const Packet<16> packet = {{x.x, x.y, x.z, x.w}};
        store_packet_evict_first<16>(
            y + (row + row_in_slice) * stride + column + from + column_in_slice, packet);
      }
    }
    __syncwarp();
  }
}

// Body of a GEMM kernel that processes its results by `epilogue`. For each of a warp's parts of 16
// rows, `epilogue` gets the accumulator and the data that it loaded for the part before the GEMM.
template <typename Epilogue>
__device__ __forceinline__ void run_wide_gemm(const TensorMap& x, const TensorMap& w,
                                          const GemmShape& shape, const Epilogue& epilogue) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  const Stages ring{base, base + kBarriersOffset};
  const int group = threadIdx.x / kGroupThreads;
  if (threadIdx.x == 0) {
    ring.init();
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernels();
  if (group == kGroups) {
    setmaxnreg_decrease<40>();
    if (threadIdx.x % kGroupThreads == 0) copy_operand_tiles<Epilogue>(ring, x, w, shape);
  } else {
    setmaxnreg_increase<232>();
    const u32 warp = threadIdx.x / kWarpSize;
    const u32 slice = base + kSlicesOffset + warp * kSliceBytes;
    const OutputTileCounts tiles(shape, Epilogue::kTileColumns);
    u32 n = 0;
    for (int index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
      const int2 tile = tiles.tile(index);
      const int first = tile.x * kRows + group * (kRows / kGroups) + warp % 4 * 16;
      typename Epilogue::EpilogueInputs loaded[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        epilogue.load(loaded[part], first + part * 64, tile.y);
      Accumulator d[kParts];
      multiply_operand_tiles(d, ring, n, group, shape.k / kDepth);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        epilogue.store(d[part], loaded[part], slice, first + part * 64, tile.y);
    }
  }
  allow_next_kernel();
}
