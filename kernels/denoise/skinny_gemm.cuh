// GEMMs of a few rows with a large weight matrix W, y[64 rows][tile] = x[64 rows][k] W[k][tile],
// where each weight is read once.
//
// A cluster of kSplit thread blocks shares a tile of kTileN columns of W; thread block r computes
// the r-th slice of k. The weights of a tile's slice of k are contiguous in memory and fit into the
// thread block's shared memory. One thread therefore requests all weights of the slice before x is
// available, without a ring buffer: the bytes in flight hide the memory latency. After the requests
// for weights, x is loaded or computed (the norm and its modulation), and the tensor cores multiply
// group after group of weight rows. Each thread block then sends each peer the sums of the 64 /
// kSplit rows that the peer finishes: a fixed order of additions, no atomics, no second kernel.
//
// When weights are loaded, they are packed once as [tile][k / group][panel of 64 columns][group of
// up to 64 rows][64], with XOR-swizzled 16-byte chunks. Activations between two GEMMs have the
// layout that x needs: [64 rows][k / 64 panels][64 rows][64], with XOR-swizzled 16-byte chunks.
// Threads: two warpgroups, each computing half of the tile's columns; thread 0 requests the copies
// of weights. Shared memory: up to four panels of x, the slice of W, then the partial sums that the
// cluster's blocks sent: [rank][64 / kSplit rows][kTileN] fp32.
#pragma once
#include "common/bulk.cuh"
#include "common/cluster.cuh"
#include "common/memory.cuh"
#include "common/wgmma/tile.cuh"
#include "denoise/model.cuh"
#include "denoise/panel.cuh"

constexpr int kThreads = THREADS;
constexpr int kTileM = TILE_ROWS;          // rows of x and y
constexpr int kPanelBytes = kTileM * 128;  // 64 columns of x

template <int kDepth_, int kTileN_, int kSplit_>
struct SkinnyGemm {
  static constexpr int kDepth = kDepth_, kTileN = kTileN_, kSplit = kSplit_;
  static constexpr int kSliceDepth = ceil_div(kDepth / 16, kSplit) * 16;
  static constexpr int kGroupWeightRows = kSliceDepth < 64 ? kSliceDepth : 64,
                       kGroups = kSliceDepth /
                                 kGroupWeightRows;  // weight rows that are waited for together
  static constexpr int kPanels = kTileN / 64;
  static constexpr int kGroupBytes = kPanels * kGroupWeightRows * 128;
  static constexpr int kGroupsAtOnce = kGroups < 4 ? kGroups : 4,
                       kRounds = kGroups / kGroupsAtOnce;  // panels of x in shared memory
  static constexpr int kWOffset = kGroupsAtOnce * kPanelBytes;  // bytes before W in shared memory
  static constexpr int kPartsOffset = kWOffset + kGroups * kGroupBytes;
  static constexpr int kRankRows = kTileM / kSplit;  // rows that a block of the cluster finishes
  static constexpr int kPartRowBytes = kTileN * 4, kPartBytes = kRankRows * kPartRowBytes;
  static constexpr int kSharedBytes = kPartsOffset + kSplit * kPartBytes;
  static constexpr int kColumns = kTileN / 2;  // of a warpgroup
  static_assert(kDepth % kSliceDepth == 0 && kSliceDepth % kGroupWeightRows == 0 &&
                    kGroups % kGroupsAtOnce == 0,
                "slices are whole groups, groups whole rounds");
  static_assert(kTileN == 64 || kTileN == 128, "a warpgroup has 32 or 64 columns");
  static_assert(kSharedBytes <= 226 * 1024,
                "a block has 227 KiB of shared memory, some of it static");
};

// Tile of columns and slice of k that a thread block computes in a skinny GEMM, and its barriers.
template <typename P>
struct SkinnyGemmWork {
  int tile, rank, k0, row0, rows_left;
  bool active;
  u32 base, weights_come, x_comes, parts_come;

  // Initialises the barriers and starts the copies of the slice's weights. `barriers` has room for
  // 8 bytes for each weight group, for each panel of x, and for the parts from other blocks.
  __device__ __forceinline__ SkinnyGemmWork(int rows, const void* shared, const void* barriers,
                                  const u16* weights) {
    tile = blockIdx.x / P::kSplit;
    rank = static_cast<int>(cluster_rank());
    k0 = rank * P::kSliceDepth;
    active = k0 < P::kDepth;
    row0 = blockIdx.y * kTileM;
    rows_left = min_of(kTileM, rows - row0);
    base = shared_address(shared);
    weights_come = shared_address(barriers);
    x_comes = weights_come + P::kGroups * 8;
    parts_come = x_comes + P::kGroupsAtOnce * 8;
    if (threadIdx.x == 0) {
      for (int i = 0; i < P::kGroups + P::kGroupsAtOnce + 1; ++i)
        mbarrier_init(weights_come + i * 8, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_bytes(parts_come, P::kSplit * P::kPartBytes);
      if (active) {
        const u16* from = weights + static_cast<i64>(tile * (P::kDepth / P::kGroupWeightRows) +
                                                     k0 / P::kGroupWeightRows) *
                                        (P::kGroupBytes / 2);
#pragma unroll
        for (int group = 0; group < P::kGroups; ++group) {
          mbarrier_arrive_expect_bytes(weights_come + group * 8, P::kGroupBytes);
          bulk_copy_to_shared(base + P::kWOffset + group * P::kGroupBytes,
                    from + group * (P::kGroupBytes / 2), P::kGroupBytes, weights_come + group * 8);
        }
      }
    }
    __syncthreads();
    cluster_arrive();
    allow_next_kernel();
    wait_for_previous_kernels();
  }
};

template <typename P>
constexpr int kBarriers = P::kGroups + P::kGroupsAtOnce + 1;  // of weights, of x, of sums

// Input x that an earlier GEMM wrote in panels; x is copied panel by panel to shared memory.
template <typename P>
struct PanelInput {
  const u16* x;

  __device__ __forceinline__ void prepare(const SkinnyGemmWork<P>& work) { place_panels(work, 0); }

  __device__ __forceinline__ void place_panels(const SkinnyGemmWork<P>& work, int round) {
    constexpr int kPanelsOfDepth = ceil_div(P::kDepth, 64);
    if (threadIdx.x != 0) return;
    const u32 panel0 = blockIdx.y * kPanelsOfDepth + work.k0 / 64 + round * P::kGroupsAtOnce;
    const u16* from = x + static_cast<i64>(panel0) * (kPanelBytes / 2);
#pragma unroll
    for (int i = 0; i < P::kGroupsAtOnce; ++i) {
      mbarrier_arrive_expect_bytes(work.x_comes + i * 8, kPanelBytes);
      bulk_copy_to_shared(work.base + i * kPanelBytes, from + i * (kPanelBytes / 2), kPanelBytes,
                work.x_comes + i * 8);
    }
  }

  __device__ __forceinline__ void wait_for_panel(const SkinnyGemmWork<P>& work, int round,
                                                 int panel) {
    mbarrier_wait(work.x_comes + panel * 8, round);
  }

  // A slice of k that is smaller than a panel begins inside a panel, at this offset in bytes.
  __device__ __forceinline__ u32 offset(const SkinnyGemmWork<P>& work) const {
    return work.k0 % 64 * 2;
  }
};

// Input x that adaRMS computes from the residual stream h: h / rms (1 + scale) + shift. A thread
// first loads all its elements of h into registers, and modulates them on the way to shared memory.
template <typename P>
struct ModulatedInput {
  static constexpr int kChunks = P::kGroupsAtOnce * P::kGroupWeightRows / 8,
                       kRowsPerPass = kThreads / kChunks, kPasses = ceil_div(kTileM, kRowsPerPass);
  const u16* h;
  const float *squares, *style;
  float* inverse;  // 1 / rms of the tile's rows, shared memory
  uint4 packets[P::kRounds][kPasses];
  float4 scale[P::kRounds][2], shift[P::kRounds][2];

  __device__ __forceinline__ void prepare(const SkinnyGemmWork<P>& work) {
    const int row0 = threadIdx.x / kChunks, column0 = work.k0 + threadIdx.x % kChunks * 8;
#pragma unroll
    for (int round = 0; round < P::kRounds; ++round) {
      const int column = column0 + round * kChunks * 8;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = row0 + pass * kRowsPerPass;
        packets[round][pass] = make_uint4(0, 0, 0, 0);
        if (row < work.rows_left)
          packets[round][pass] = *reinterpret_cast<const uint4*>(
              h + static_cast<i64>(work.row0 + row) * P::kDepth + column);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[round][i] = *reinterpret_cast<const float4*>(style + column + i * 4);
        shift[round][i] = *reinterpret_cast<const float4*>(style + kWidth + column + i * 4);
      }
    }
    const int row = threadIdx.x;
    if (row < work.rows_left)
      inverse[row] =
          inverse_rms_of_h_row(squares + static_cast<i64>(work.row0 + row) * kSquareSumsPerRow);
    __syncthreads();
    place_panels(work, 0);
  }

  static __device__ __forceinline__ u32 pair(float r, u32 x, float a, float b, float c, float d) {
    return Bf16::pack(Bf16::low(x) * r * (1.f + a) + c, Bf16::high(x) * r * (1.f + b) + d);
  }

  __device__ __forceinline__ void place_panels(const SkinnyGemmWork<P>& work, int round) {
    const int row0 = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const u32 to = work.base + chunk / (P::kGroupWeightRows / 8) * kPanelBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row0 + pass * kRowsPerPass;
      uint4 x = packets[round][pass];
      if (row < work.rows_left) {
        const float r = inverse[row];
        const float4 *a = scale[round], *c = shift[round];
        x = make_uint4(pair(r, x.x, a[0].x, a[0].y, c[0].x, c[0].y),
                       pair(r, x.y, a[0].z, a[0].w, c[0].z, c[0].w),
                       pair(r, x.z, a[1].x, a[1].y, c[1].x, c[1].y),
                       pair(r, x.w, a[1].z, a[1].w, c[1].z, c[1].w));
      }
      if (kTileM % kRowsPerPass == 0 || row < kTileM)
        store_shared_b128(to + swizzled_chunk_offset<128>(row, chunk % (P::kGroupWeightRows / 8)),
                          x.x, x.y, x.z, x.w);
    }
    fence_proxy_async_shared();
    __syncthreads();
  }

  __device__ __forceinline__ void wait_for_panel(const SkinnyGemmWork<P>&, int, int) {}
  __device__ __forceinline__ u32 offset(const SkinnyGemmWork<P>&) const { return 0; }
};

// Multiplies the thread block's slice of k, and sends every thread block of the cluster the sums of
// the rows that it finishes. Afterwards all partial sums of this block's rows are in its own shared
// memory, and no thread block reads another one's shared memory.
template <typename P, typename X>
__device__ __forceinline__ void multiply_and_send_row_sums(const SkinnyGemmWork<P>& work, X& x) {
  const int warp = threadIdx.x / kWarpSize, group = warp / 4;
  const u32 lane = threadIdx.x % kWarpSize;
  float acc[P::kColumns / 2];
#pragma unroll
  for (int i = 0; i < P::kColumns / 2; ++i) acc[i] = 0.f;
  if (work.active) {
    const u32 columns_at = P::kPanels == 2 ? group * (P::kGroupWeightRows * 128) : group * 64;
    x.prepare(work);
#pragma unroll
    for (int round = 0; round < P::kRounds; ++round) {
      if (round > 0) {
        __syncthreads();
        x.place_panels(work, round);
      }
#pragma unroll
      for (int panel = 0; panel < P::kGroupsAtOnce; ++panel) {
        const int g = round * P::kGroupsAtOnce + panel;
        x.wait_for_panel(work, round, panel);
        mbarrier_wait(work.weights_come + g * 8, 0);
        wgmma_fence();
        const u32 x_offset = work.base + panel * kPanelBytes + x.offset(work),
                  w_at = work.base + P::kWOffset + g * P::kGroupBytes + columns_at;
#pragma unroll
        for (int step = 0; step < P::kGroupWeightRows / 16; ++step)
          wgmma(acc, wgmma_operand_descriptor(x_offset + step * 32),
                wgmma_operand_descriptor(w_at + step * 2048));
        wgmma_commit();
      }
      wgmma_wait<0>();
    }
  }
  cluster_wait();  // every block has its barrier
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp % 4 * 16 + half * 8 + static_cast<int>(lane >> 2),
              owner = row / P::kRankRows, in_part = row % P::kRankRows;
    const u32 to = cluster_address(
        work.base + P::kPartsOffset + work.rank * P::kPartBytes + in_part * P::kPartRowBytes,
        owner);
    const u32 barrier = cluster_address(work.parts_come, owner);
#pragma unroll
    for (int j = 0; j < P::kColumns / 8; ++j) {
      const u32 chunk = group * (P::kColumns / 4) + j * 2 + (lane & 3) / 2;
      st_async_f32x2(to + ((chunk ^ ((in_part & 7) * 2)) << 4) + (lane & 1) * 8,
                     acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1], barrier);
    }
  }
  mbarrier_wait(work.parts_come, 0);
}

// Offset in bytes of an element within each received part; `row` counts the rows that this thread
// block finishes.
template <typename P>
__device__ __forceinline__ u32 offset_in_received_part(const SkinnyGemmWork<P>& work, int row,
                                                       int column) {
  return work.base + P::kPartsOffset + row * P::kPartRowBytes +
         (((column / 4) ^ ((row & 7) * 2)) << 4) + column % 4 * 4;
}

// Returns two adjacent elements of y, each summed over the thread blocks of the cluster.
template <typename P>
__device__ __forceinline__ float2 pair_total_over_cluster(const SkinnyGemmWork<P>& work, int row,
                                                          int column) {
  float2 sum = make_float2(0.f, 0.f);
  const u32 at = offset_in_received_part(work, row, column);
#pragma unroll
  for (int rank = 0; rank < P::kSplit; ++rank) {
    const float2 part = load_shared_f32x2(at + rank * P::kPartBytes);
    sum.x += part.x, sum.y += part.y;
  }
  return sum;
}

// Returns four adjacent elements of y, each summed over kRanks thread blocks of the cluster.
template <typename P, int kRanks>
__device__ __forceinline__ float4 quad_total_over_ranks(const SkinnyGemmWork<P>& work,
                                                        int first_rank, int row,
                                           int column) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const u32 at = offset_in_received_part(work, row, column) + first_rank * P::kPartBytes;
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank) {
    const float4 part = load_shared_f32x4(at + rank * P::kPartBytes);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  return sum;
}
