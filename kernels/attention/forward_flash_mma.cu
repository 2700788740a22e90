// Attention forward in one kernel on the tensor cores through mma.sync.m16n8k16, with an online
// softmax.
//
//   c = log2(e) / sqrt(d)
//   for each block of keys, the last first:
//     S = q k^T;  m' = max(m, max_j S);  P = exp2((S - m') c)
//     l = l exp2((m - m') c) + sum_j P;  o = o exp2((m - m') c) + P v;  m = m'
//   out = o / l,  lse = m / sqrt(d) + ln(l)
//
// The three rescalings are skipped while no row's maximum has grown by more than 2^8 in P. The
// reference maximum m is then a little smaller than the true maximum; the result is the same, and
// no element of P exceeds 2^8.
//
// Threads: a thread block of four warps computes 128 queries. A warp has 32 queries as two 16-row
// matrix tiles, so that each B fragment of k or v read from shared memory serves two mma. P never
// leaves the registers: the accumulator layout of q k^T equals the layout of mma's A operand for P
// v. Two thread blocks run on an SM, so that each scheduler has one warp in its softmax while
// another warp is in its GEMMs. Shared memory, 16-bit rows of d with 16-byte chunks XOR-swizzled by
// row: q [128][d], k and v [2 stages][64][d] each, 96 KiB at d = 128. The cp.async copies of the
// next key block are issued between the mma steps of q k^T, one key block ahead of their use. The
// loop over key blocks has one barrier of the thread block for each key block. Order of thread
// blocks: with full attention the query tiles of a head are adjacent. With a causal mask the heads
// form groups whose k and v fit into L2; within a group the query tiles with the most keys come
// first. Layout: by default all tensors are dense [b, h, s, d]. In a build with -DSTRIDED=1,
// batches, heads and rows have any strides; the row strides of k and v are compile-time constants.
// Bound: tensor cores, 4 b h s^2 d FLOPs (half with a causal mask); on sm_90 mma.sync reaches about
// 62 % of the rate of wgmma. Against forward_flash: mma instead of FMA, 16-bit tiles, asynchronous
// copies, P in registers, and rescaling only where a maximum grew by more than 2^8.
#include "attention/shape.cuh"
#include "attention/warp_gemm.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kBlocksPerSm = 2;
constexpr int kTileM = TILE_QUERIES;  // queries per thread block
constexpr int kTileN = 64;            // keys per step
constexpr int kStages = 2;
constexpr bool kQInRegisters =
    kHeadDim == 64;  // d = 128 has no registers left for the query fragments

#if !STRIDED
#define K_ROW HEAD_DIM
#define V_ROW HEAD_DIM
#endif
constexpr Stride kKRow = K_ROW, kVRow = V_ROW;  // elements from a row to the next one
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kRowChunks = kRowBytes / 16;  // 16-byte chunks of a row
constexpr int kSteps = kHeadDim / 16;       // mma steps along the head dimension
constexpr int kM = kTileM / (16 * kWarps);  // matrix tiles a warp: rows of S and o,
constexpr int kN = kTileN / 8;              // 8-wide tiles along the columns of S,
constexpr int kD = kHeadDim / 8;            // 8-wide tiles along the columns of o
constexpr int kWarpRows = 16 * kM;
constexpr int kStageBytes = kTileN * kRowBytes;
constexpr int kKOffset = kTileM * kRowBytes;
constexpr int kVOffset = kKOffset + kStages * kStageBytes;
constexpr int kSharedBytes = kVOffset + kStages * kStageBytes;
constexpr int kRowsPerPass = kThreads / kRowChunks;
constexpr int kPasses = kTileN / kRowsPerPass;
constexpr float kRescaleThreshold = 8.f / kScaleLog2;
constexpr i64 kL2Budget = 24 << 20;  // bytes of k and v that one group of heads may hold in the L2

static_assert(kTileM % (16 * kWarps) == 0,
              "each warp owns whole 16-row matrix tiles of the query block");
static_assert(kTileN % 16 == 0, "a block of keys is whole matrix tiles");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");
static_assert(kSharedBytes * kBlocksPerSm <= 227 * 1024,
              "the blocks of an SM share 227 KiB of shared memory");

struct WarpSoftmaxAndOutput {
  float o[kM][kD][4];
  float top[kM *
            2];  // running maximum of the raw scores; row 2i + h is matrix tile i, row lane/4 + 8h
  float sum[kM * 2];  // this lane's share of the row sum
};

// Processes one key block: scores, softmax and P v of the warp's 32 queries. With a causal mask,
// `row0` is the index of the last key that the warp's first query row sees. The function calls
// `copy(step)` between the steps of q k^T.
template <bool kMask, typename Copy>
__device__ __forceinline__ void process_key_block(WarpSoftmaxAndOutput& rows,
                                        const u32 (&q_fragments)[kQInRegisters ? kSteps : 1][kM][4],
                                        u32 q_lane, u32 k_lane, u32 v_lane, int row0, int key0,
                                        int keys, u32 lane, Copy copy) {
  float s[kM][kN][4];
  clear(s);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 a[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      if (kQInRegisters) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = q_fragments[kQInRegisters ? step : 0][i][e];
      } else {
        ldmatrix_x4(a[i], (q_lane ^ (step * 32)) + i * 16 * kRowBytes);
      }
    }
    multiply_step_abt<kRowBytes>(s, a, k_lane ^ (step * 32));
    copy(step);
  }

  if (kMask) {
    const int first_key = key0 + static_cast<int>(lane & 3) * 2,
              first_row = row0 + static_cast<int>(lane >> 2);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first_key + j * 8 + (e & 1), row = first_row + i * 16 + (e >> 1) * 8;
          if (key >= keys || (kCausal && key > row)) s[i][j][e] = negative_infinity();
        }
  }

  float best[kM * 2];
  bool any_maximum_grew = false;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const int i = r / 2, h = (r % 2) * 2;
    float x = max_f32(s[i][0][h], s[i][0][h + 1]);
#pragma unroll
    for (int j = 1; j < kN; ++j) x = max_f32(x, max_f32(s[i][j][h], s[i][j][h + 1]));
    best[r] = x;
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (int r = 0; r < kM * 2; ++r)
      best[r] = max_f32(best[r], __shfl_xor_sync(kFullWarp, best[r], mask));
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) any_maximum_grew |= best[r] > rows.top[r] + kRescaleThreshold;
  if (__any_sync(kFullWarp, any_maximum_grew)) {
#pragma unroll
    for (int r = 0; r < kM * 2; ++r) {
      const float top = max_f32(rows.top[r], best[r]);
      // While a query row has seen no key, its maximum is -inf and its rescaling factor is 1.
      const float alpha =
          kMask && rows.top[r] == top ? 1.f : exp2_approx((rows.top[r] - top) * kScaleLog2);
      const int i = r / 2, h = (r % 2) * 2;
      rows.top[r] = top;
      rows.sum[r] *= alpha;
#pragma unroll
      for (int j = 0; j < kD; ++j) {
        rows.o[i][j][h] *= alpha;
        rows.o[i][j][h + 1] *= alpha;
      }
    }
  }
  float shift[kM * 2];
#pragma unroll
  for (int r = 0; r < kM * 2; ++r)
    shift[r] = kMask && rows.top[r] == negative_infinity() ? 0.f : -rows.top[r] * kScaleLog2;

  // Computes P of 16 keys, as an A fragment of the GEMM P v.
  auto exponentials = [&](int step, u32(&p)[kM][4]) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = i * 2 + (e & 1);
        const float* x = &s[i][2 * step + e / 2][(e & 1) * 2];
        const float p0 = exp2_approx(fma_f32(x[0], kScaleLog2, shift[r])),
                    p1 = exp2_approx(fma_f32(x[1], kScaleLog2, shift[r]));
        rows.sum[r] += p0 + p1;
        p[i][e] = Element::pack(p0, p1);
      }
  };
  u32 p[2][kM][4];
  exponentials(0, p[0]);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
    // The exponentials for the next 16 keys run concurrently with the mma of the current 16 keys.
    if (step + 1 < kTileN / 16) exponentials(step + 1, p[(step + 1) & 1]);
    multiply_step_ab(rows.o, p[step & 1], v_lane + step * 16 * kRowBytes);
  }
}

// Each thread block computes one tile of 128 queries of one head. Each batch has `key_heads` key
// heads, and `share` query heads read each key head. With a causal mask the last query sees the
// last key. lse may be null.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) attention_forward_flash_mma(
    const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v,
    u16* __restrict__ out, float* __restrict__ lse, int queries, int keys, int batch_heads,
    int share, int key_heads, const __grid_constant__ Strides q_strides,
    const __grid_constant__ Strides k_strides, const __grid_constant__ Strides v_strides,
    const __grid_constant__ Strides out_strides, const __grid_constant__ Strides lse_strides) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  const int tid = threadIdx.x, warp = tid / kWarpSize;
  const u32 lane = tid % kWarpSize;
  const int tiles = (queries + kTileM - 1) / kTileM;
  // keys that the first query sees before its own
  const int keys_before_first_query = kCausal ? keys - queries : 0;

  int tile, head;
  if (kCausal) {
    const i64 heads_fitting_l2 = kL2Budget / (static_cast<i64>(keys) * kRowBytes * 2) * share;
    const int group = max_of(1,
        static_cast<int>(min_of(static_cast<i64>(batch_heads), heads_fitting_l2)));
    const int first = static_cast<int>(blockIdx.x) / (group * tiles) * group;
    const int size = min_of(group, batch_heads - first);
    const int block_in_head_group = static_cast<int>(blockIdx.x) - first * tiles;
    tile = tiles - 1 - block_in_head_group / size;
    head = first + block_in_head_group % size;
  } else {
    head = blockIdx.x / tiles;
    tile = blockIdx.x % tiles;
  }
  const int first_query_of_tile = tile * kTileM;
  const int keys_seen_by_tile =
      kCausal ? min_of(keys, first_query_of_tile + kTileM + keys_before_first_query) : keys;
  int block = (keys_seen_by_tile + kTileN - 1) / kTileN - 1;

  const int copy_row = tid / kRowChunks, copy_chunk = tid % kRowChunks;
  const u32 shared_copy_address = base + swizzled_chunk_offset<kRowBytes>(copy_row, copy_chunk);
  const int heads = key_heads * share, key_head = head / share;
  const i64 k_offset =
      row_offset(k_strides, key_head, key_heads, keys, block * kTileN, copy_row) + copy_chunk * 8;
  const i64 v_offset =
      row_offset(v_strides, key_head, key_heads, keys, block * kTileN, copy_row) + copy_chunk * 8;
  const u16* key_source = k + k_offset;
  const u16* value_source = v + v_offset;

  copy_rows_to_shared_async<kTileM, kRowsPerPass, true>(
      shared_copy_address,
      q + head_offset(q_strides, head, heads, queries) +
          static_cast<i64>(first_query_of_tile + copy_row) * row_stride(q_strides) + copy_chunk * 8,
      row_stride(q_strides), queries - first_query_of_tile - copy_row);
  copy_rows_to_shared_async<kTileN, kRowsPerPass, true>(shared_copy_address + kKOffset, key_source,
                                                        kKRow,
                                        keys - block * kTileN - copy_row);
  copy_rows_to_shared_async<kTileN, kRowsPerPass, true>(shared_copy_address + kVOffset,
                                                        value_source, kVRow,
                                        keys - block * kTileN - copy_row);
  cp_async_commit();

  WarpSoftmaxAndOutput rows;
  clear(rows.o);
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    rows.top[r] = negative_infinity();
    rows.sum[r] = 0.f;
  }

  const int row0 = first_query_of_tile + warp * kWarpRows;
  const u32 q_lane = base + ldmatrix_lane_address_rows_by_k<kRowBytes>(warp * kWarpRows, lane);
  const u32 k_lane = base + kKOffset + ldmatrix_lane_address_columns_by_k<kRowBytes>(0, lane);
  const u32 v_lane = base + kVOffset + ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane);
  u32 stage = 0;

  u32 q_fragments[kQInRegisters ? kSteps : 1][kM][4];
  if (kQInRegisters) {
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kM; ++i)
        ldmatrix_x4(q_fragments[kQInRegisters ? step : 0][i],
                    (q_lane ^ (step * 32)) + i * 16 * kRowBytes);
  }

  // Copies one part of the next key block; each mma step of q k^T issues one such part.
  auto copy_step = [&](int step) {
    if (block == 0) return;
    const u32 to = shared_copy_address + (stage ^ kStageBytes);
#pragma unroll
    for (int pass = step * kPasses / kSteps; pass < (step + 1) * kPasses / kSteps; ++pass) {
      cp_async_16_bytes(to + kKOffset + pass * kRowsPerPass * kRowBytes,
                  key_source + pass * kRowsPerPass * kKRow);
      cp_async_16_bytes(to + kVOffset + pass * kRowsPerPass * kRowBytes,
                  value_source + pass * kRowsPerPass * kVRow);
    }
  };
  auto copy_all = [&]() {
    if (block == 0) return;
    copy_rows_to_shared_async<kTileN, kRowsPerPass, false>(shared_copy_address + kKOffset + (stage ^
        kStageBytes), key_source,
                                           kKRow, 0);
    copy_rows_to_shared_async<kTileN, kRowsPerPass, false>(shared_copy_address + kVOffset + (stage ^
        kStageBytes), value_source,
                                           kVRow, 0);
  };
  auto begin = [&]() {
    cp_async_wait<0>();
    __syncthreads();
    key_source -= kTileN * kKRow;
    value_source -= kTileN * kVRow;
  };
  auto end = [&]() {
    cp_async_commit();
    stage ^= kStageBytes;
    --block;
  };

  // All query rows of the tile see every key of the key blocks before this one.
  const int key_blocks_without_mask =
      (kCausal ? first_query_of_tile + keys_before_first_query : keys) / kTileN;
#pragma unroll 1
  while (block >= key_blocks_without_mask) {
    begin();
    copy_all();
    // the warp skips a key block that the mask hides from all its rows
    if (!kCausal || block * kTileN < row0 + keys_before_first_query + kWarpRows)
      process_key_block<true>(rows, q_fragments, q_lane, k_lane + stage, v_lane + stage,
                    row0 + keys_before_first_query,
                    block * kTileN, keys, lane, [](int) {});
    end();
  }
#pragma unroll 1
  while (block >= 0) {
    begin();
    process_key_block<false>(rows, q_fragments, q_lane, k_lane + stage, v_lane + stage,
                   row0 + keys_before_first_query,
                   block * kTileN, keys, lane, copy_step);
    end();
  }

  // Each warp writes its rounded output rows over its own queries in shared memory, which no other
  // warp reads, and stores whole rows from there.
  const u32 shared_output_of_warp = base + warp * kWarpRows * kRowBytes;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const float total = sum_across_lane_group<4>(rows.sum[r]);
    const float inverse = reciprocal_approx(total);
    const int i = r / 2, h = (r % 2) * 2;
    const int row = i * 16 + static_cast<int>(lane >> 2) + (r % 2) * 8;
#pragma unroll
    for (int j = 0; j < kD; ++j)
      store_shared_b32(
          shared_output_of_warp + swizzled_chunk_offset<kRowBytes>(row, j) + (lane & 3) * 4,
          Element::pack(rows.o[i][j][h] * inverse, rows.o[i][j][h + 1] * inverse));
    if (lse != nullptr && (lane & 3) == 0 && row0 + row < queries)
      lse[offset_of_row_number(lse_strides, head, heads, queries, row0, row)] =
          rows.top[r] * kScale + log2_approx(total) * kLn2;
  }
  __syncwarp();
  constexpr int kRowsStoredAtOnce = kWarpSize / kRowChunks;
  u16* to = out + head_offset(out_strides, head, heads, queries) +
            static_cast<i64>(row0) * row_stride(out_strides);
#pragma unroll
  for (int pass = 0; pass < kWarpRows / kRowsStoredAtOnce; ++pass) {
    const int row = pass * kRowsStoredAtOnce + lane / kRowChunks, chunk = lane % kRowChunks;
    const uint4 x =
        load_shared_b128(shared_output_of_warp + swizzled_chunk_offset<kRowBytes>(row, chunk));
    if (row0 + row < queries) *reinterpret_cast<uint4*>(to + row * row_stride(out_strides) +
        chunk * 8) = x;
  }
}
