// Products of a few rows with a large weight matrix: y[64 rows][tile] = x[64 rows][k] W[k][tile], the weights streamed once.
//
// A cluster of kSplit blocks shares a tile of kTileN columns; block r takes the r-th slice of k. The whole slice of the weights fits the
// block's shared memory, so that every copy of it is issued at once, before anything of x is known: bytes in flight hide the memory's
// latency, and there is no ring to refill. Then x is made (the norm and its modulation on the way, if the product has one), then the warps
// multiply group after group of weight rows as they arrive, then the partial tiles lie in shared memory and each block of the cluster
// finishes 64 / kSplit rows, reading its peers' parts: a fixed order of sums, no atomics, no second kernel.
// All of x is asked for at once too; where the slice is long it passes through shared memory in parts of 256 columns, so that the blocks
// of every product are on the device together: a cluster that has to wait for another one doubles the time.
//
// Threads: 8 warps, 2 over rows, kTileN / 32 over columns, the rest over steps of k; a warp computes 32 x 32.
// Shared memory: x [64][part of the slice] bf16, W [slice][kTileN] bf16, 16-byte chunks XOR-swizzled by row; over both, after the last product,
// partial tiles [warps over k][64][kTileN + 8] fp32.
#pragma once
#include "common/cluster.cuh"
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "denoise/model.cuh"

constexpr int kThreads = 256;
constexpr int kTileM = 64;

template <int kDepth_, int kTileN_, int kSplit_>
struct Product {
  static constexpr int kDepth = kDepth_, kTileN = kTileN_, kSplit = kSplit_;
  static constexpr int kSlice = ceil_div(kDepth / 16, kSplit) * 16;
  static constexpr int kParts = kSlice > 256 ? kSlice / 256 : 1, kPart = kSlice / kParts;  // of x in shared memory
  static constexpr int kARowBytes = kPart * 2 < 128 ? 128 : kPart * 2;
  static constexpr int kBRowBytes = kTileN * 2;
  static constexpr int kBChunks = kTileN / 8;
  static constexpr int kGroup = kSlice < 64 ? kSlice : 64;  // weight rows that are waited for together
  static constexpr int kGroups = kSlice / kGroup, kPartGroups = kPart / kGroup;
  static constexpr int kBOffset = kTileM * kARowBytes;
  static constexpr int kWarpsN = kTileN / 32, kWarpsK = 8 / (2 * kWarpsN);
  static constexpr int kPartialStride = kTileN + 8;
  static constexpr int kPartialFloats = kTileM * kPartialStride;
  static constexpr int kRankRows = kTileM / kSplit;
  static constexpr int kOperandBytes = kBOffset + kSlice * kBRowBytes, kPartialBytes = kWarpsK * kPartialFloats * 4;
  static constexpr int kSharedBytes = kOperandBytes > kPartialBytes ? kOperandBytes : kPartialBytes;
  static constexpr int kRowsPerPass = kThreads / (kPart / 8), kPasses = ceil_div(kTileM, kRowsPerPass);  // of placing x
  static_assert(kDepth % kSlice == 0 && kSlice % kPart == 0 && kPart % kGroup == 0, "slices are whole parts, parts whole groups");
  static_assert((kARowBytes & (kARowBytes - 1)) == 0, "steps along a row of x are XORs of its address");
  static_assert(kTileN == 64 || kTileN == 128, "two or four warps over the columns");
  static_assert(kSharedBytes <= 227 * 1024, "a block has 227 KiB of shared memory");
};

// Eight neighbouring columns of a row-major matrix.
struct Columns {
  const u16* first;
  int stride;
};

// Starts the copies of this block's weights: chunk c of a tile's row is columns(c). One group of copies each kGroup rows.
template <typename P>
__device__ __forceinline__ void stream_weights(u32 base, Columns columns, int k0) {
  constexpr int kRowsPerPass = kThreads / P::kBChunks;
  constexpr int kPasses = ceil_div(P::kGroup, kRowsPerPass);
  const int row0 = threadIdx.x / P::kBChunks, chunk = threadIdx.x % P::kBChunks;
  const u16* from = columns.first + static_cast<i64>(k0 + row0) * columns.stride;
  const i64 pass_stride = static_cast<i64>(kRowsPerPass) * columns.stride;
#pragma unroll
  for (int group = 0; group < P::kGroups; ++group) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row0 + pass * kRowsPerPass;
      if (P::kGroup % kRowsPerPass == 0 || row < P::kGroup)
        cp_async_16(base + P::kBOffset + swizzled<P::kBRowBytes>(group * P::kGroup + row, chunk), from + pass * pass_stride);
    }
    from += static_cast<i64>(P::kGroup) * columns.stride;
    cp_async_commit();
  }
}

// What a row of x goes through on its way: nothing.
struct Plain {
  __device__ __forceinline__ uint4 operator()(int, uint4 x) const { return x; }
};

// adaRMS of eight columns: x / rms (1 + scale) + shift.
struct Modulated {
  float4 scale[2], shift[2];
  const float* inverse;  // 1 / rms of the tile's rows, shared memory

  __device__ __forceinline__ void load(const float* style, int column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = *reinterpret_cast<const float4*>(style + column + i * 4);
      shift[i] = *reinterpret_cast<const float4*>(style + kWidth + column + i * 4);
    }
  }

  __device__ __forceinline__ u32 pair(float r, u32 x, float a, float b, float c, float d) const {
    return Bf16::pack(Bf16::low(x) * r * (1.f + a) + c, Bf16::high(x) * r * (1.f + b) + d);
  }

  __device__ __forceinline__ uint4 operator()(int row, uint4 x) const {
    const float r = inverse[row];
    return make_uint4(pair(r, x.x, scale[0].x, scale[0].y, shift[0].x, shift[0].y), pair(r, x.y, scale[0].z, scale[0].w, shift[0].z, shift[0].w),
                      pair(r, x.z, scale[1].x, scale[1].y, shift[1].x, shift[1].y), pair(r, x.w, scale[1].z, scale[1].w, shift[1].z, shift[1].w));
  }
};

// The eight columns of a part of x that this thread places in shared memory.
template <typename P>
__device__ __forceinline__ int own_chunk() { return threadIdx.x % (P::kPart / 8); }

// This thread's share of the slice of x [rows][kDepth], in registers; rows at or past rows_left zero.
template <typename P>
struct Rows {
  uint4 packets[P::kParts][P::kPasses];

  __device__ __forceinline__ void load(const u16* x, int rows_left) {
    const int row0 = threadIdx.x / (P::kPart / 8);
#pragma unroll
    for (int part = 0; part < P::kParts; ++part)
#pragma unroll
      for (int pass = 0; pass < P::kPasses; ++pass) {
        const int row = row0 + pass * P::kRowsPerPass;
        packets[part][pass] = make_uint4(0, 0, 0, 0);
        if (row < rows_left)
          packets[part][pass] = *reinterpret_cast<const uint4*>(x + static_cast<i64>(row) * P::kDepth + part * P::kPart + own_chunk<P>() * 8);
      }
  }

  template <typename Through>
  __device__ __forceinline__ void place(u32 base, int part, int rows_left, const Through& through) {
    const int row0 = threadIdx.x / (P::kPart / 8);
#pragma unroll
    for (int pass = 0; pass < P::kPasses; ++pass) {
      const int row = row0 + pass * P::kRowsPerPass;
      uint4 packet = packets[part][pass];
      if (row < rows_left) packet = through(row, packet);
      if (kTileM % P::kRowsPerPass == 0 || row < kTileM)
        store_shared_b128(base + swizzled<P::kARowBytes>(row, own_chunk<P>()), packet.x, packet.y, packet.z, packet.w);
    }
  }
};

// The groups of weight rows that belong to part kPart of x, from the kGroup-th of them on.
template <typename P, int kPart, int kGroup>
__device__ __forceinline__ void multiply_groups(float (&acc)[2][4][4], u32 a_lane, u32 b_lane, int warp_k) {
  constexpr int kAll = kPart * P::kPartGroups + kGroup;
  cp_async_wait<P::kGroups - 1 - kAll>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ceil_div(P::kGroup / 16, P::kWarpsK); ++i) {
    const int in_group = i * P::kWarpsK + warp_k;
    if ((P::kGroup / 16) % P::kWarpsK != 0 && in_group >= P::kGroup / 16) break;
    const int a_step = kGroup * (P::kGroup / 16) + in_group, b_step = kAll * (P::kGroup / 16) + in_group;
    u32 a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) ldmatrix_x4(a[m], (a_lane ^ (a_step * 32)) + m * 16 * P::kARowBytes);
#pragma unroll
    for (int np = 0; np < 2; ++np) {
      u32 b[4];
      ldmatrix_x4_trans(b, (b_lane ^ (np * 32)) + b_step * 16 * P::kBRowBytes);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Bf16::mma(acc[m][2 * np], a[m], b[0], b[1]);
        Bf16::mma(acc[m][2 * np + 1], a[m], b[2], b[3]);
      }
    }
  }
  if constexpr (kGroup + 1 < P::kPartGroups) multiply_groups<P, kPart, kGroup + 1>(acc, a_lane, b_lane, warp_k);
}

// Places part after part of x, multiplies it, and leaves the partial tiles in shared memory, for the whole cluster to read.
template <typename P, typename Through>
__device__ __forceinline__ void multiply(u32 base, bool active, Rows<P>& x, int rows_left, const Through (&through)[P::kParts]) {
  static_assert(P::kParts <= 2, "x passes in one or two parts");
  const int warp = threadIdx.x / kWarpSize;
  const u32 lane = threadIdx.x % kWarpSize;
  const int warp_m = warp % 2, warp_n = warp / 2 % P::kWarpsN, warp_k = warp / (2 * P::kWarpsN);
  float acc[2][4][4];
  clear(acc);
  if (active) {
    const u32 a_lane = base + lane_by_row<P::kARowBytes>(warp_m * 32, lane);
    const u32 b_lane = (base + P::kBOffset + lane_by_row<P::kBRowBytes>(0, lane)) ^ (warp_n * 64);
    x.place(base, 0, rows_left, through[0]);
    multiply_groups<P, 0, 0>(acc, a_lane, b_lane, warp_k);
    if constexpr (P::kParts == 2) {
      __syncthreads();
      x.place(base, 1, rows_left, through[1]);
      multiply_groups<P, 1, 0>(acc, a_lane, b_lane, warp_k);
    }
  }
  __syncthreads();
  const u32 partial = base + warp_k * P::kPartialFloats * 4;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row = warp_m * 32 + m * 16 + half * 8 + (lane >> 2), column = warp_n * 32 + n * 8 + (lane & 3) * 2;
        store_shared_f32x2(partial + (row * P::kPartialStride + column) * 4, acc[m][n][2 * half], acc[m][n][2 * half + 1]);
      }
  cluster_arrive();
  cluster_wait();
}

// Two neighbouring elements of the tile, summed over the cluster and the warps over k.
template <typename P>
__device__ __forceinline__ float2 total(u32 base, int row, int column) {
  float2 sum = make_float2(0.f, 0.f);
  const u32 at = base + (row * P::kPartialStride + column) * 4;
#pragma unroll
  for (int rank = 0; rank < P::kSplit; ++rank) {
    const u32 peer = cluster_address(at, rank);
#pragma unroll
    for (int k = 0; k < P::kWarpsK; ++k) {
      const float2 part = load_cluster_f32x2(peer + k * P::kPartialFloats * 4);
      sum.x += part.x;
      sum.y += part.y;
    }
  }
  return sum;
}

// Four neighbouring elements of the tile, summed over the warps over k of kRanks blocks of the cluster.
template <typename P, int kRanks>
__device__ __forceinline__ float4 total_of(u32 base, int first_rank, int row, int column) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const u32 at = base + (row * P::kPartialStride + column) * 4;
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank) {
    const u32 peer = cluster_address(at, first_rank + rank);
#pragma unroll
    for (int k = 0; k < P::kWarpsK; ++k) {
      const float4 part = load_cluster_f32x4(peer + k * P::kPartialFloats * 4);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
  }
  return sum;
}
