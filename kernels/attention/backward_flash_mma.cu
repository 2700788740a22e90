// Backward pass of attention on tensor cores by mma.sync.m16n8k16: a thread block keeps dk and dv
// of its 128 keys in registers, and sums dq in global memory.
//
//   prepare:  delta[i] = sum_c dout[i,c] out[i,c];  the dq accumulator = 0
//   main, per block of 128 keys, for each step of queries:
//             P^T = exp(k q^T / sqrt(d) - lse);  dP^T = v dout^T;  dS^T = P^T (dP^T - delta)
//             dv += P^T dout;  dk += dS^T q;  dq_sum += dS k
//   finish:   dq = dq_sum / sqrt(d), dk is scaled where it is stored
//
// Threads of the main kernel: a thread block has eight warps and runs alone on its SM. Four score
// warps compute P^T and accumulate dv; four gradient warps compute dP^T and dS^T and accumulate dk.
// Each score warp keeps dv of 32 keys in registers, each gradient warp dk of 32 keys. The scores
// P^T and their gradients dS^T have keys as rows, so that the accumulators of one mma serve
// directly as A operands of the next mma. Each score warp passes its 16-bit P^T to one gradient
// warp through shared memory, in the order of the mma fragments. Each gradient warp passes its dS^T
// to all warps through swizzled shared memory, because dq sums over all keys of the block. Each of
// the eight warps computes a 32x32 piece of dq, one query step late: gradient warps while the score
// warps compute P^T, score warps while the gradient warps compute dS^T.
// Shared memory, 16-bit, XOR-swizzled: k, v [128][d]; q, dout [2 stages][M][d]; P^T; dS^T
// [2][128][M]; lse and delta. M is the number of queries per step: 64 at d = 128, 128 at d = 64.
// Each query step has one barrier of the thread block and, to pass P^T, one barrier of each pair of
// a score warp and a gradient warp. On sm_80, whose shared memory is smaller, q and dout have a
// single stage: the tiles of a query step are copied after the tiles of the previous step were
// read.
// Order of addition: dk and dv are bitwise equal in every run. The dq accumulator is summed by fp32
// atomic reductions in L2, whose order is not fixed, so the low bits of dq differ between runs. (A
// separate kernel for dq would make dq repeatable, at the cost of seven GEMMs instead of five.)
// Without a causal mask, thread blocks start at different query steps, so that they do not all add
// to the same rows of dq at once.
// Layout: the tensors q, k, v, out and their gradients are dense [b, h, s, d]. With -DSTRIDED=1
// batches, heads and rows may have any strides; the row strides of q and dout are compile-time
// constants. The row statistics (lse, delta) and the dq accumulator are always dense.
// Bound: tensor cores, with 10 b h s^2 d floating-point operations (half of them with a causal
// mask). Shared-memory bandwidth is almost as limiting: one mma reads 128 to 256 bytes of it.
// Compared with backward_naive, this kernel has no s^2 memory traffic, uses tensor cores, and needs
// one pass over the keys. Like backward_naive, this kernel recomputes the probabilities P from lse.
#include "attention/shape.cuh"
#include "attention/warp_gemm.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"

constexpr int kTileM = TILE_QUERIES;  // queries a step
constexpr int kTileN = TILE_KEYS;     // keys a block
#ifndef PREPARED_QUERIES
#define PREPARED_QUERIES TILE_QUERIES
#endif
#if PREPARED_QUERIES != TILE_QUERIES && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "only backward_flash_wgmma has such steps, which needs sm_90a"
#endif
constexpr int kPreparedM =
    PREPARED_QUERIES;  // queries per step of the kernel that runs after prepare
constexpr int kThreads = THREADS;
static_assert(kThreads == 256 && kTileN == 128, "four warps a role, 32 keys a warp");
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kRowChunks = kRowBytes / 16;  // 16-byte chunks of a row
constexpr int kDsRowBytes = kTileM * 2;
constexpr int kRowsPerPass = kThreads / kRowChunks;
constexpr int kSteps = kHeadDim / 16;  // mma steps along the head dimension
#if !STRIDED
#define Q_ROW HEAD_DIM
#define DOUT_ROW HEAD_DIM
#endif
constexpr Stride kQRow = Q_ROW, kDoutRow = DOUT_ROW;  // elements from a row to the next one
constexpr int kStages = STAGES;                       // of q, dout and the row statistics
static_assert(kStages == 1 || kStages == 2, "one is copied while another is read, or there is one");

constexpr int kQBytes = kTileM * kRowBytes;
constexpr int kKvBytes = kTileN * kRowBytes;
constexpr int kDsBytes = kTileN * kDsRowBytes;
constexpr int kStatsBytes = 2 * kTileM * 4;  // row statistics lse and delta
constexpr int kKOffset = 0;
constexpr int kVOffset = kKOffset + kKvBytes;
constexpr int kQOffset = kVOffset + kKvBytes;
constexpr int kDoOffset = kQOffset + kStages * kQBytes;
constexpr int kPOffset = kDoOffset + kStages * kQBytes;
constexpr int kDsOffset = kPOffset + kDsBytes;
constexpr int kStatsOffset = kDsOffset + 2 * kDsBytes;
constexpr int kSharedBytes = kStatsOffset + kStages * kStatsBytes;
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");
static_assert(kSharedBytes <= 227 * 1024,
              "one block's tiles must fit the 227 KiB of shared memory a block can have");

// The eight warps divide dq of one query step, [kTileM x d], into pieces of 32 x kDqColumns.
constexpr int kDqWarpsM = kTileM / 32;  // warps along the queries of dq
constexpr int kDqColumns = kHeadDim / (8 / kDqWarpsM);
static_assert(kDqColumns == 32, "the layout of the dQ accumulator assumes 32x32 warp tiles");

// Layout of the dq accumulator in floats: [head][step][warp 0-7][fragment (i, j) 0-7][lane][4]. The
// dq accumulator of one query step takes kTileM * d floats.

// The prepare kernel computes delta of each row, and zeroes the dq accumulator dq_sum unless it is
// null. Each head has ceil(s/M)*M rows; d/8 lanes, each of which reads 16 bytes, handle one row.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_flash_mma_prepare(const u16* __restrict__ out, const u16* __restrict__ dout,
                                         const float* __restrict__ lse, float* __restrict__ stats,
                                         float* __restrict__ dq_sum, int seqlen, int batch_heads,
                                         int heads, const __grid_constant__ Strides out_strides,
                                         const __grid_constant__ Strides dout_strides,
                                         const __grid_constant__ Strides lse_strides) {
  constexpr int kLanes = kRowChunks;  // lanes a row, 16 bytes each
  const int padded_queries_of_head = (seqlen + kPreparedM - 1) / kPreparedM * kPreparedM;
  const i64 padded_rows_of_all_heads = static_cast<i64>(batch_heads) * padded_queries_of_head;
  const i64 padded_row_of_lanes =
      (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  if (padded_row_of_lanes >= padded_rows_of_all_heads) return;
  const i64 head = padded_row_of_lanes / padded_queries_of_head;
  const int query_in_head = static_cast<int>(padded_row_of_lanes - head * padded_queries_of_head);
  float delta_sum = 0.f;
  if (query_in_head < seqlen) {
    const i64 out_offset =
        row_offset(out_strides, head, heads, seqlen, query_in_head, 0) + lane * 8;
    const i64 dout_offset =
        row_offset(dout_strides, head, heads, seqlen, query_in_head, 0) + lane * 8;
    const uint4 out_16_bytes = *reinterpret_cast<const uint4*>(out + out_offset);
    const uint4 dout_16_bytes = *reinterpret_cast<const uint4*>(dout + dout_offset);
    const u32 out_words[4] = {out_16_bytes.x, out_16_bytes.y, out_16_bytes.z, out_16_bytes.w},
              dout_words[4] = {dout_16_bytes.x, dout_16_bytes.y, dout_16_bytes.z, dout_16_bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      delta_sum = fma_f32(Element::low(out_words[i]), Element::low(dout_words[i]), delta_sum);
      delta_sum = fma_f32(Element::high(out_words[i]), Element::high(dout_words[i]), delta_sum);
    }
  }
  delta_sum = sum_across_lane_group<kLanes>(delta_sum);
  if (lane == 0) {
    // The row statistics are stored as [head][step][2][kPreparedM]: log2-sum-exp of each row, then
    // negated delta of each row; both are zero for padding rows.
    const i64 stats_index = head * padded_queries_of_head * 2 +
                            static_cast<i64>(query_in_head / kPreparedM) * (2 * kPreparedM) +
                            query_in_head % kPreparedM;
    stats[stats_index] =
        query_in_head < seqlen
            ? lse[offset_of_row_number(lse_strides, head, heads, seqlen, query_in_head, 0)] * kLog2E
            : 0.f;
    stats[stats_index + kPreparedM] = -delta_sum;
  }
  if (dq_sum == nullptr) return;
  float4* zeroed_dq_sum = reinterpret_cast<float4*>(dq_sum + padded_row_of_lanes * kHeadDim) + lane;
  zeroed_dq_sum[0] = make_float4(0.f, 0.f, 0.f, 0.f);
  zeroed_dq_sum[kLanes] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// A build of the prepare kernel for another main kernel (backward_flash_wgmma) ends here.
#if PREPARED_QUERIES == TILE_QUERIES
// Computes the calling warp's 32x32 piece of dq for one query step, dS[32 queries][128 keys] times
// k[128][32 columns], and adds the piece to the dq accumulator in global memory.
__device__ __forceinline__ void add_dq_piece_of_warp(u32 ds_lane, u32 k_lane, float* dq_at) {
  float acc[2][4][4];
  clear(acc);
  multiply_atb<kTileN / 16, kDsRowBytes, kRowBytes>(acc, ds_lane, k_lane);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      reduce_add_f32x4(dq_at + (i * 4 + j) * 128, acc[i][j][0], acc[i][j][1], acc[i][j][2],
                       acc[i][j][3]);
}

// Rounds the calling warp's 32 x d gradients (dk or dv) to 16 bits through a shared tile, and
// stores those of its rows that exist, with an index below `rows_left`, to global memory.
__device__ __forceinline__ void round_and_store_gradients_of_warp(
    const float (&acc)[2][kHeadDim / 8][4], float scale, u32 tile, u16* to, Stride stride,
    int warp_row, int rows_left, u32 lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const u32 r[4] = {Element::pack(acc[i][2 * j][0] * scale, acc[i][2 * j][1] * scale),
                        Element::pack(acc[i][2 * j][2] * scale, acc[i][2 * j][3] * scale),
                        Element::pack(acc[i][2 * j + 1][0] * scale, acc[i][2 * j + 1][1] * scale),
                        Element::pack(acc[i][2 * j + 1][2] * scale, acc[i][2 * j + 1][3] * scale)};
      stmatrix_x4(
          (tile + ldmatrix_lane_address_rows_by_k<kRowBytes>(warp_row + i * 16, lane)) ^ (j * 32),
          r);
    }
  __syncwarp();
  constexpr int kRowsStoredAtOnce = kWarpSize / kRowChunks;
#pragma unroll
  for (int pass = 0; pass < 32 / kRowsStoredAtOnce; ++pass) {
    const int row = warp_row + pass * kRowsStoredAtOnce + lane / kRowChunks,
              chunk = lane % kRowChunks;
    const uint4 x = load_shared_b128(tile + swizzled_chunk_offset<kRowBytes>(row, chunk));
    if (row < rows_left)
      *reinterpret_cast<uint4*>(to + static_cast<i64>(row) * stride + chunk * 8) = x;
  }
}

// The main kernel: each thread block computes dk and dv of 128 keys of one head, and its part of
// dq.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_flash_mma(
    const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v,
    const u16* __restrict__ dout, const float* __restrict__ stats, float* __restrict__ dq_sum,
    u16* __restrict__ dk, u16* __restrict__ dv, int seqlen, int batch_heads, int heads,
    const __grid_constant__ Strides q_strides, const __grid_constant__ Strides k_strides,
    const __grid_constant__ Strides v_strides, const __grid_constant__ Strides dout_strides,
    const __grid_constant__ Strides dk_strides, const __grid_constant__ Strides dv_strides) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  const int tid = threadIdx.x;
  const u32 lane = tid % kWarpSize;
  const int warp = tid / kWarpSize, role_warp = warp % 4;
  const bool is_score_warp = warp < 4;
  const int key_blocks_of_head = (seqlen + kTileN - 1) / kTileN;
  const int query_steps_of_head = (seqlen + kTileM - 1) / kTileM;
  const int head = blockIdx.x / key_blocks_of_head;
  const int key_block = blockIdx.x % key_blocks_of_head;
  const int first_key_of_block = key_block * kTileN;

  q += head_offset(q_strides, head, heads, seqlen);
  dout += head_offset(dout_strides, head, heads, seqlen);
  auto offset_of_first_key = [&](const Strides& strides) {
    return head_offset(strides, head, heads, seqlen) +
           static_cast<i64>(first_key_of_block) * row_stride(strides);
  };
  k += offset_of_first_key(k_strides);
  v += offset_of_first_key(v_strides);
  dk += offset_of_first_key(dk_strides);
  dv += offset_of_first_key(dv_strides);
  stats += static_cast<i64>(head) * query_steps_of_head * (2 * kTileM);
  dq_sum +=
      static_cast<i64>(head) * query_steps_of_head * (kTileM * kHeadDim) + warp * 1024 + lane * 4;

  const int first_query_step = kCausal ? first_key_of_block / kTileM : 0;
  const int query_step_count = query_steps_of_head - first_query_step;
  // Without a causal mask, thread blocks start at different query steps, so that they do not all
  // add to the same rows of dq at once.
  const int query_step_rotation = kCausal ? 0 : key_block * (kTileN / kTileM) % query_steps_of_head;
  auto query_step_at = [&](int t) {
    if (kCausal) return first_query_step + t;
    const int s = t + query_step_rotation;
    return s >= query_steps_of_head ? s - query_steps_of_head : s;
  };

  const int row_copied_by_thread = tid / kRowChunks, chunk_copied_by_thread = tid % kRowChunks;
  const u32 shared_copy_target =
      base + swizzled_chunk_offset<kRowBytes>(row_copied_by_thread, chunk_copied_by_thread);
  auto offset_copied_by_thread = [&](Stride row) {
    return row_copied_by_thread * row + chunk_copied_by_thread * 8;
  };
  q += offset_copied_by_thread(kQRow);
  dout += offset_copied_by_thread(kDoutRow);

  auto load_step = [&](int step, int stage) {
    const int rows_left = seqlen - step * kTileM - row_copied_by_thread;
    copy_rows_to_shared_async<kTileM, kRowsPerPass, true>(
        shared_copy_target + kQOffset + stage * kQBytes,
        q + static_cast<i64>(step) * (kTileM * kQRow), kQRow, rows_left);
    copy_rows_to_shared_async<kTileM, kRowsPerPass, true>(
        shared_copy_target + kDoOffset + stage * kQBytes,
        dout + static_cast<i64>(step) * (kTileM * kDoutRow), kDoutRow, rows_left);
    if (tid < kStatsBytes / 16)
      cp_async_16_bytes(base + kStatsOffset + stage * kStatsBytes + tid * 16,
                        stats + static_cast<i64>(step) * (2 * kTileM) + tid * 4);
    cp_async_commit();
  };
  const Stride k_row_stride = row_stride(k_strides), v_row_stride = row_stride(v_strides);
  copy_rows_to_shared_async<kTileN, kRowsPerPass, true>(
      shared_copy_target + kKOffset, k + offset_copied_by_thread(k_row_stride), k_row_stride,
      seqlen - first_key_of_block - row_copied_by_thread);
  copy_rows_to_shared_async<kTileN, kRowsPerPass, true>(
      shared_copy_target + kVOffset, v + offset_copied_by_thread(v_row_stride), v_row_stride,
      seqlen - first_key_of_block - row_copied_by_thread);
  load_step(query_step_at(0), 0);

  const int first_key_row_of_warp = role_warp * 32;
  // A score warp first multiplies k by q, then P^T by dout; a gradient warp first multiplies v by
  // dout, then dS^T by q.
  const u32 a_operand_address =
      base + (is_score_warp ? kKOffset : kVOffset) +
      ldmatrix_lane_address_rows_by_k<kRowBytes>(first_key_row_of_warp, lane);
  const u32 first_b_operand_address = base + (is_score_warp ? kQOffset : kDoOffset) +
                                      ldmatrix_lane_address_columns_by_k<kRowBytes>(0, lane);
  const u32 second_b_operand_address = base + (is_score_warp ? kDoOffset : kQOffset) +
                                       ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane);
  const u32 p_exchange_address = base + kPOffset + role_warp * (kDsBytes / 4) + lane * 16;
  const u32 ds_store_address =
      base + kDsOffset + ldmatrix_lane_address_rows_by_k<kDsRowBytes>(first_key_row_of_warp, lane);
  const u32 ds_load_address =
      (base + kDsOffset + ldmatrix_lane_address_columns_by_k<kDsRowBytes>(0, lane)) ^
      ((warp % kDqWarpsM) * 64);
  const u32 k_load_address =
      (base + kKOffset + ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane)) ^
      ((warp / kDqWarpsM) * (kDqColumns * 2));
  const u32 stats_address_of_lane =
      base + kStatsOffset + (lane & 3) * 8 + (is_score_warp ? 0 : kTileM * 4);

  float acc[2][kHeadDim / 8][4];
  clear(acc);

  auto add_dq_of_step = [&](int t) {
    add_dq_piece_of_warp(ds_load_address + (t & 1) * kDsBytes, k_load_address,
                         dq_sum + static_cast<i64>(query_step_at(t)) * (kTileM * kHeadDim));
  };
#pragma unroll 1
  for (int t = 0; t < query_step_count; ++t) {
    const int stage = t & 1, copied = kStages == 2 ? stage : 0;
    if (kStages == 1 && t > 0) {
      __syncthreads();  // nothing reads the last step's tiles any more
      load_step(query_step_at(t), 0);
    }
    cp_async_wait<0>();
    // After this barrier the tiles of this query step are in shared memory, and dS of the previous
    // step is complete. The tiles of the previous query step may be overwritten, because all warps
    // have read them.
    __syncthreads();
    if (kStages == 2 && t + 1 < query_step_count) load_step(query_step_at(t + 1), copied ^ 1);
    const u32 q_stage_offset = copied * kQBytes,
              stats_address = stats_address_of_lane + copied * kStatsBytes;
    if (is_score_warp) {
      float s[2][kTileM / 8][4];
      clear(s);
      multiply_abt<kSteps, kRowBytes>(s, a_operand_address,
                                      first_b_operand_address + q_stage_offset);
      const int step = query_step_at(t);
      const bool needs_mask = kCausal ? step * kTileM < first_key_of_block + kTileN
                                      : first_key_of_block + kTileN > seqlen;
      const int first_key_of_lane =
          first_key_of_block + first_key_row_of_warp + static_cast<int>(lane >> 2);
      const int first_query_of_lane = step * kTileM + static_cast<int>(lane & 3) * 2;
      u32 p[kTileM / 16][2][4];
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks) {
        const float2 lse[2] = {load_shared_f32x2(stats_address + ks * 64),
                               load_shared_f32x2(stats_address + ks * 64 + 32)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* two_scores = &s[i][2 * ks + e / 2][(e & 1) * 2];
            p[ks][i][e] =
                Element::pack(exp2_approx(fma_f32(two_scores[0], kScaleLog2, -lse[e / 2].x)),
                              exp2_approx(fma_f32(two_scores[1], kScaleLog2, -lse[e / 2].y)));
          }
          if (needs_mask) {  // on P, whose bits an AND clears whatever they are
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key_of_pair = first_key_of_lane + i * 16 + (e & 1) * 8,
                        first_query_of_pair = first_query_of_lane + ks * 16 + (e / 2) * 8;
              if (kCausal ? key_of_pair > first_query_of_pair : key_of_pair >= seqlen)
                p[ks][i][e] &= 0xffff0000u;
              if (kCausal ? key_of_pair > first_query_of_pair + 1 : key_of_pair >= seqlen)
                p[ks][i][e] = 0u;
            }
          }
          store_shared_b128(p_exchange_address + (ks * 2 + i) * 512, p[ks][i][0], p[ks][i][1],
                            p[ks][i][2], p[ks][i][3]);
        }
      }
      named_barrier_arrive(1 + role_warp, 64);
      if (t > 0) add_dq_of_step(t - 1);
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks)
        multiply_step_ab(acc, p[ks],
                         second_b_operand_address + q_stage_offset + ks * 16 * kRowBytes);
    } else {
      if (t > 0) add_dq_of_step(t - 1);
      // The accumulators of dP^T start at -delta of their query, so that the GEMM gives dP^T -
      // delta.
      float dp[2][kTileM / 8][4];
#pragma unroll
      for (int j = 0; j < kTileM / 8; ++j) {
        const float2 delta = load_shared_f32x2(stats_address + j * 32);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          dp[i][j][0] = dp[i][j][2] = delta.x;
          dp[i][j][1] = dp[i][j][3] = delta.y;
        }
      }
      multiply_abt<kSteps, kRowBytes>(dp, a_operand_address,
                                      first_b_operand_address + q_stage_offset);
      named_barrier_sync(1 + role_warp, 64);
      u32 ds[kTileM / 16][2][4];
      uint4 next_p_fragment = load_shared_b128(p_exchange_address);
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 p[4] = {next_p_fragment.x, next_p_fragment.y, next_p_fragment.z,
                            next_p_fragment.w};
          if (ks * 2 + i + 1 < kTileM / 8)
            next_p_fragment = load_shared_b128(p_exchange_address + (ks * 2 + i + 1) * 512);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* two_dp = &dp[i][2 * ks + e / 2][(e & 1) * 2];
            ds[ks][i][e] =
                Element::pack(Element::low(p[e]) * two_dp[0], Element::high(p[e]) * two_dp[1]);
          }
          stmatrix_x4(((ds_store_address + stage * kDsBytes) ^ (ks * 32)) + i * 16 * kDsRowBytes,
                      ds[ks][i]);
        }
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks)
        multiply_step_ab(acc, ds[ks],
                         second_b_operand_address + q_stage_offset + ks * 16 * kRowBytes);
    }
  }
  __syncthreads();
  add_dq_of_step(query_step_count - 1);
  __syncthreads();
  if (is_score_warp)
    round_and_store_gradients_of_warp(acc, 1.f, base + kVOffset, dv, row_stride(dv_strides),
                                      first_key_row_of_warp, seqlen - first_key_of_block, lane);
  else
    round_and_store_gradients_of_warp(acc, kScale, base + kKOffset, dk, row_stride(dk_strides),
                                      first_key_row_of_warp, seqlen - first_key_of_block, lane);
}

// The finish kernel scales the dq accumulator, rounds it to 16 bits, and stores it as dq in
// row-major order instead of fragment order. Each warp handles one fragment row of 16x32 elements
// of dq.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_flash_mma_finish(const float* __restrict__ dq_sum, u16* __restrict__ dq,
                                        int seqlen, int batch_heads, int heads,
                                        const __grid_constant__ Strides dq_strides) {
  const int query_steps_of_head = (seqlen + kTileM - 1) / kTileM;
  const i64 fragment_row_of_warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) /
                                   kWarpSize;  // one warp a 16 x 32 fragment row
  const int lane = threadIdx.x % kWarpSize;
  if (fragment_row_of_warp >= static_cast<i64>(batch_heads) * query_steps_of_head * 16) return;
  const float4* dq_sum_of_lane =
      reinterpret_cast<const float4*>(dq_sum) + fragment_row_of_warp * 128 + lane;
  u32 upper[4], lower[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 x = dq_sum_of_lane[j * 32];
    upper[j] = Element::pack(x.x * kScale, x.y * kScale);
    lower[j] = Element::pack(x.z * kScale, x.w * kScale);
  }
  // The four lanes of a quad transpose a 4x4 matrix of 32-bit words by shuffles, so that lane t of
  // the quad then has all eight columns of fragment t.
  const int lane_in_quad = lane & 3;
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const bool gives_lower_index = (lane_in_quad & mask) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & mask) continue;
      const u32 given_upper_word = gives_lower_index ? upper[j] : upper[j | mask],
                given_lower_word = gives_lower_index ? lower[j] : lower[j | mask];
      const u32 received_upper_word = __shfl_xor_sync(kFullWarp, given_upper_word, mask),
                received_lower_word = __shfl_xor_sync(kFullWarp, given_lower_word, mask);
      if (gives_lower_index) {
        upper[j] = received_upper_word;
        lower[j] = received_lower_word;
      } else {
        upper[j | mask] = received_upper_word;
        lower[j | mask] = received_lower_word;
      }
    }
  }
  const i64 query_step_of_all_heads = fragment_row_of_warp / 16;
  const int fragment_row_in_step = static_cast<int>(fragment_row_of_warp % 16),
            warp_that_summed = fragment_row_in_step / 2, i = fragment_row_in_step % 2;
  const i64 head = query_step_of_all_heads / query_steps_of_head;
  const int query_row_of_lane =
      static_cast<int>(query_step_of_all_heads % query_steps_of_head) * kTileM +
      (warp_that_summed % kDqWarpsM) * 32 + i * 16 + (lane >> 2);
  u16* to = dq + row_offset(dq_strides, head, heads, seqlen, query_row_of_lane, 0) +
            (warp_that_summed / kDqWarpsM) * kDqColumns + lane_in_quad * 8;
  if (query_row_of_lane < seqlen)
    *reinterpret_cast<uint4*>(to) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
  if (query_row_of_lane + 8 < seqlen)
    *reinterpret_cast<uint4*>(to + 8 * row_stride(dq_strides)) =
        make_uint4(lower[0], lower[1], lower[2], lower[3]);
}
#endif
