// Attention of all query heads of the action expert, which share a single key-value head. Prefix
// and suffix form one sequence of keys, which is split over a cluster.
//
//   o = softmax(q k^T / sqrt(e)) v
//   q [rows = S heads][e], k and v [context][e], o in panels of 64 columns of [S][heads e]
//
// A cluster of 8 blocks shares 32 query rows. A query row is one head of one token, so each cluster
// reads k and v once for all heads of its tokens. Each thread block of a cluster processes every
// eighth tile of up to 128 keys, with an online softmax. With up to 1024 keys a thread block has
// only one key tile, and all copies of this tile are in flight at once. Each thread block leaves
// its unnormalised output, maxima and sums in shared memory, and then combines the eight blocks'
// parts of 4 of the 32 rows. Threads: 8 warps. For q k^T a warp computes the scores of 16 keys, for
// p v 32 columns (16 if e is small), each for all 32 query rows. Shared memory: rows of e elements
// (at least 128 bytes), 16-byte chunks XOR-swizzled by row: q [32], k [128], v [128]; and p
// [32][128]. After the last GEMM, the fp32 output overwrites the keys in shared memory. Bound: the
// latency of two dependent GEMMs on 32 x 128 x e, and of reading 128 keys and values. The two GEMMs
// and reading the keys and values take about 4 us a layer, independent of the amount of other work.
#include "common/cluster.cuh"
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"
#include "denoise/model.cuh"
#include "denoise/panel.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kBlocksOfCluster = SPLIT;
constexpr int kRows = TILE_ROWS;  // query rows of a cluster
constexpr int kKeys = 128;        // most keys of a key tile
constexpr int kRankRows = kRows / kBlocksOfCluster;

constexpr int kRowBytes = kHeadDim * 2 < 128 ? 128 : kHeadDim * 2;
constexpr int kRowChunks = kHeadDim / 8;
constexpr int kPRowBytes = kKeys * 2;
constexpr int kKOffset = kRows * kRowBytes;
constexpr int kVOffset = kKOffset + kKeys * kRowBytes;
constexpr int kPOffset = kVOffset + kKeys * kRowBytes;
constexpr int kSharedBytes = kPOffset + kRows * kPRowBytes;
constexpr int kColumns = kHeadDim / kWarps < 16 ? 16 : kHeadDim / kWarps;  // of the output, a warp
constexpr int kValueWarps = kHeadDim / kColumns;
constexpr int kOutStride = kHeadDim + 8;  // floats of an output row in shared memory
constexpr int kQuadsPerHead = kHeadDim / 4;

static_assert(kRows * kOutStride * 4 <= kKeys * kRowBytes, "the output fits over k");
static_assert((kRowBytes & (kRowBytes - 1)) == 0, "steps along a row are XORs of its address");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");
static_assert(kRows == 32, "a warp has all rows as two matrix tiles");
static_assert(kKeys == kWarps * 16 && kSharedBytes <= 227 * 1024,
              "a warp has 16 keys, a block 227 KiB of shared memory");

// Product of the score scale 1/sqrt(e) and log2(e), with which a probability takes one FMA and one
// ex2.
__device__ __forceinline__ float score_scale_times_log2e() {
  return kLog2E * rsqrtf(static_cast<float>(kHeadDim));
}

// Starts the copies of `count` rows to shared memory; rows at or past `left` become zero.
template <int kCount>
__device__ __forceinline__ void start_copies_of_rows(u32 to, const u16* from, int left) {
  for (int i = threadIdx.x; i < kCount * kRowChunks; i += kThreads) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    const bool row_exists = row < left;
    cp_async_16_bytes_or_zeros(
        to + swizzled_chunk_offset<kRowBytes>(row, chunk),
        from + (row_exists ? static_cast<i64>(row) * kHeadDim + chunk * 8 : 0), row_exists);
  }
}

// Each cluster of eight thread blocks computes one tile of 32 query rows.
extern "C" __global__ void __cluster_dims__(kBlocksOfCluster, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_attention(const u16* q, const u16* keys, const u16* values, u16* out, int rows,
                            int context, int prefix) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float warp_top[kWarps][kRows], warp_sum[kWarps][kRows];
  __shared__ __align__(8) float2 state[kRows];  // maximum and sum of a row, for the cluster
  const u32 base = shared_address(shared);
  const int warp = threadIdx.x / kWarpSize;
  const u32 lane = threadIdx.x % kWarpSize;
  const int rank = static_cast<int>(cluster_rank());
  const int row0 = blockIdx.x / kBlocksOfCluster * kRows, rows_left = min_of(kRows, rows - row0);
  // With up to 1024 keys, every thread block of the cluster has the same number of keys, a multiple
  // of 16.
  const int block_keys = min_of(kKeys, ceil_div(ceil_div(context, kBlocksOfCluster), 16) * 16);

  auto copy_block = [&](int first) {
    const int keys_of_tile = min_of(block_keys, context - first);
    start_copies_of_rows<kKeys>(base + kKOffset, keys + static_cast<i64>(first) * kHeadDim,
                                keys_of_tile);
    cp_async_commit();
    start_copies_of_rows<kKeys>(base + kVOffset, values + static_cast<i64>(first) * kHeadDim,
                                keys_of_tile);
    cp_async_commit();
  };
  // The keys of the prefix existed before this denoising step: key tiles that lie entirely in the
  // prefix do not depend on the previous kernel.
  const int first_key_of_block = rank * block_keys;
  const bool independent_of_previous_kernel = first_key_of_block + block_keys <= prefix;
  if (independent_of_previous_kernel) copy_block(first_key_of_block);
  allow_next_kernel();
  wait_for_previous_kernels();
  start_copies_of_rows<kRows>(base, q + static_cast<i64>(row0) * kHeadDim, rows_left);
  cp_async_commit();

  float o[2][kColumns / 8][4];
  clear(o);
  float top[4], sum[4];  // row 2i + h is matrix tile i, row lane/4 + 8h
#pragma unroll
  for (int r = 0; r < 4; ++r) top[r] = negative_infinity(), sum[r] = 0.f;
  const float scale = score_scale_times_log2e();

  const u32 q_lane = base + ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane);
  const u32 k_lane =
      base + kKOffset + ldmatrix_lane_address_columns_by_k<kRowBytes>(warp * 16, lane);
  const u32 v_lane = (base + kVOffset + ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane)) ^
                     (warp * kColumns * 2);
  const u32 p_lane = base + kPOffset + ldmatrix_lane_address_rows_by_k<kPRowBytes>(0, lane);

#pragma unroll 1
  for (int first = first_key_of_block; first < context; first += kBlocksOfCluster * block_keys) {
    const int keys_of_tile = min_of(block_keys, context - first);
    if (first == first_key_of_block && independent_of_previous_kernel) {
      cp_async_wait<0>();  // q was asked for last
    } else {
      __syncthreads();  // the last block's k, v and p were read
      copy_block(first);
      cp_async_wait<1>();
    }
    __syncthreads();

    float s[2][2][4];
    clear(s);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      u32 b[4];
      ldmatrix_x4(b, k_lane ^ (step * 32));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        u32 a[4];
        ldmatrix_x4(a, (q_lane ^ (step * 32)) + m * 16 * kRowBytes);
        Bf16::mma(s[m][0], a, b[0], b[1]);
        Bf16::mma(s[m][1], a, b[2], b[3]);
      }
    }
    const int first_key = warp * 16 + static_cast<int>(lane & 3) * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[m][n][e] =
              first_key + n * 8 + (e & 1) < keys_of_tile ? s[m][n][e] * scale : negative_infinity();

    const int own_row = lane >> 2;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int m = r / 2, h = r % 2 * 2;
      const float row_maximum = max_across_lane_group<4>(
          max_f32(max_f32(s[m][0][h], s[m][0][h + 1]), max_f32(s[m][1][h], s[m][1][h + 1])));
      if ((lane & 3) == 0) warp_top[warp][m * 16 + r % 2 * 8 + own_row] = row_maximum;
    }
    __syncthreads();
    float alpha[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int m = r / 2, h = r % 2 * 2, row = m * 16 + r % 2 * 8 + own_row;
      float row_maximum = top[r];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) row_maximum = max_f32(row_maximum, warp_top[w][row]);
      alpha[r] = exp2_approx(
          // The factor is 0 in the first key block; `row_maximum` is finite, because every block
          // has a key
          top[r] - row_maximum);
      top[r] = row_maximum;
      float part = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float p0 = exp2_approx(s[m][n][h] - row_maximum),
            p1 = exp2_approx(s[m][n][h + 1] - row_maximum);
        part += p0 + p1;
        store_shared_b32(
            base + kPOffset + swizzled_chunk_offset<kPRowBytes>(row, warp * 2 + n) + (lane & 3) * 4,
            Bf16::pack(p0, p1));
      }
      part = sum_across_lane_group<4>(part);
      if ((lane & 3) == 0) warp_sum[warp][row] = part;
    }
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int m = r / 2, h = r % 2 * 2, row = m * 16 + r % 2 * 8 + own_row;
      sum[r] *= alpha[r];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum[r] += warp_sum[w][row];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        o[m][n][h] *= alpha[r];
        o[m][n][h + 1] *= alpha[r];
      }
    }
    if (warp < kValueWarps) {
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        u32 a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) ldmatrix_x4(a[m], (p_lane ^ (step * 32)) + m * 16 * kPRowBytes);
#pragma unroll
        for (int np = 0; np < kColumns / 16; ++np) {
          u32 b[4];
          ldmatrix_x4_trans(b, (v_lane ^ (np * 32)) + step * 16 * kRowBytes);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            Bf16::mma(o[m][2 * np], a[m], b[0], b[1]);
            Bf16::mma(o[m][2 * np + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
  }

  cp_async_wait<0>();  // a block without keys still has its copy of q under way
  __syncthreads();
  const u32 shared_output_parts = base + kKOffset;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int m = r / 2, h = r % 2 * 2, row = m * 16 + r % 2 * 8 + static_cast<int>(lane >> 2);
    if (warp == 0 && (lane & 3) == 0) state[row] = make_float2(top[r], sum[r]);
    if (warp < kValueWarps) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        store_shared_f32x2(
            shared_output_parts + (row * kOutStride + warp * kColumns + n * 8 + (lane & 3) * 2) *
                4, o[m][n][h],
            o[m][n][h + 1]);
    }
  }
  cluster_arrive();
  cluster_wait();

  const u32 shared_row_states = shared_address(state);
  for (int item = threadIdx.x; item < kRankRows * kQuadsPerHead; item += kThreads) {
    const int row = rank * kRankRows + item / kQuadsPerHead, column = item % kQuadsPerHead * 4;
    if (row >= rows_left) continue;
    float2 part_state[kBlocksOfCluster];
    float row_maximum = negative_infinity();
#pragma unroll
    for (int peer = 0; peer < kBlocksOfCluster; ++peer) {
      part_state[peer] = load_cluster_f32x2(cluster_address(shared_row_states + row * 8, peer));
      row_maximum = max_f32(row_maximum, part_state[peer].x);
    }
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    float weights = 0.f;
#pragma unroll
    for (int peer = 0; peer < kBlocksOfCluster; ++peer) {
      const float weight = exp2_approx(part_state[peer].x - row_maximum);
      const float4 part =
          load_cluster_f32x4(cluster_address(shared_output_parts + (row * kOutStride + column) * 4,
                                             peer));
      weights += weight * part_state[peer].y;
      y.x += weight * part.x, y.y += weight * part.y, y.z += weight * part.z,
          y.w += weight * part.w;
    }
    const float inverse = 1.f / weights;
    const int token = (row0 + row) / kHeads, head = (row0 + row) % kHeads;
    *reinterpret_cast<uint2*>(out +
                              panel_element_offset(token, head * kHeadDim + column, kQueryWidth)) =
        make_uint2(Bf16::pack(y.x * inverse, y.y * inverse),
                   Bf16::pack(y.z * inverse, y.w * inverse));
  }
  cluster_arrive_relaxed();  // all that was read has been used
  cluster_wait();
}
