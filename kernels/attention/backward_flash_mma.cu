// Attention backward on the tensor cores through mma.sync.m16n8k16: dk and dv of a key block stay
// on the chip, dq is summed in memory.
//
//   prepare:  delta[i] = sum_c dout[i,c] out[i,c];  the dq accumulator = 0
//   main, per block of 128 keys, for each step of queries:
//             P^T = exp(k q^T / sqrt(d) - lse);  dP^T = v dout^T;  dS^T = P^T (dP^T - delta)
//             dv += P^T dout;  dk += dS^T q;  dq_sum += dS k
//   finish:   dq = dq_sum / sqrt(d), dk is scaled where it is stored
//
// Threads of the main kernel: a thread block has eight warps and runs alone on its SM. Four score
// warps compute P^T and accumulate dv; four gradient warps compute dP^T and dS^T and accumulate dk.
// Each warp keeps its 32 keys x d of dv or dk in registers. Scores and their gradients are stored
// transposed (keys are rows), so that P^T and dS^T are A operands straight from the accumulators. A
// score warp passes P^T to its gradient warp through shared memory in fragment order (16-bit). Each
// gradient warp passes dS^T to all warps through swizzled shared memory, because dq sums over all
// keys of the block. All eight warps compute a 32x32 piece of dq each, one step late: gradient
// warps while the score warps compute P^T, score warps while the gradient warps compute dS^T.
// Shared memory, 16-bit, XOR-swizzled: k, v [128][d]; q, dout [2 stages][M][d]; P^T; dS^T
// [2][128][M]; lse and delta. M is the number of queries a step: 64 at d = 128 and 128 at d = 64.
// Each step has one block barrier and, for P^T, one barrier of each warp pair. On sm_80 a block has
// less shared memory and one stage: the tiles of a step are copied after the tiles of the previous
// step were read.
// Order of addition: dk and dv are bitwise equal in every run. dq is summed by fp32 reductions in
// L2, whose order is not fixed, so the low bits of dq may differ between runs. (A separate kernel
// for dq would make it repeatable, at the cost of seven GEMMs instead of five.)
// Full attention: thread blocks start at different query steps, so that they do not all add to the
// same rows of dq at once.
// Layout: tensors are dense [b, h, s, d]. With -DSTRIDED=1 batches, heads and rows have any
// strides; the row strides of q and dout are compile-time constants. The row statistics and the dq
// accumulator are dense.
// Bound: tensor cores, 10 b h s^2 d FLOPs (half if causal). Shared-memory bandwidth is close
// behind: one mma reads 128 to 256 bytes of shared memory.
// Against backward_naive: no s^2 traffic, tensor cores, one pass. Like backward_naive, this kernel
// recomputes the probabilities P from lse.
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
constexpr int kPreparedM = PREPARED_QUERIES;  // queries a step of the kernel after prepare
constexpr int kThreads = THREADS;
static_assert(kThreads == 256 && kTileN == 128, "four warps a role, 32 keys a warp");
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kRowChunks = kRowBytes / 16;
constexpr int kDsRowBytes = kTileM * 2;
constexpr int kRowsPerPass = kThreads / kRowChunks;
constexpr int kSteps = kHeadDim / 16;
#if !STRIDED
#define Q_ROW HEAD_DIM
#define DOUT_ROW HEAD_DIM
#endif
constexpr Stride kQRow = Q_ROW, kDoutRow = DOUT_ROW;  // elements from a row to the next one
constexpr int kStages = STAGES;  // of q, dout and the row statistics
static_assert(kStages == 1 || kStages == 2, "one is copied while another is read, or there is one");

constexpr int kQBytes = kTileM * kRowBytes;
constexpr int kKvBytes = kTileN * kRowBytes;
constexpr int kDsBytes = kTileN * kDsRowBytes;
constexpr int kStatsBytes = 2 * kTileM * 4;
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

// The dQ of a step, [kTileM x d], is split among the eight warps as pieces of 32 x kDqColumns.
constexpr int kDqWarpsM = kTileM / 32;
constexpr int kDqColumns = kHeadDim / (8 / kDqWarpsM);
static_assert(kDqColumns == 32, "the layout of the dQ accumulator assumes 32x32 warp tiles");

// Layout of the dQ accumulator in floats: [head][step][warp 0-7][fragment (i, j) 0-7][lane][4]. The
// dQ of one step takes kTileM * d floats.

// The kernel computes delta and zeroes dq_sum, unless dq_sum is null. Each of the b*h*padded rows,
// where padded = ceil(s/M)*M, is handled by d/8 lanes that read 16 bytes each.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_flash_mma_prepare(const u16* __restrict__ out, const u16* __restrict__ dout,
                                         const float* __restrict__ lse, float* __restrict__ stats,
                                         float* __restrict__ dq_sum, int seqlen, int batch_heads,
                                         int heads, const __grid_constant__ Strides out_strides,
                                         const __grid_constant__ Strides dout_strides,
                                         const __grid_constant__ Strides lse_strides) {
  constexpr int kLanes = kRowChunks;  // lanes a row, 16 bytes each
  const int padded = (seqlen + kPreparedM - 1) / kPreparedM * kPreparedM;
  const i64 rows = static_cast<i64>(batch_heads) * padded;
  const i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  if (row >= rows) return;
  const i64 head = row / padded;
  const int at = static_cast<int>(row - head * padded);
  float sum = 0.f;
  if (at < seqlen) {
    const i64 offset = row_offset(out_strides, head, heads, seqlen, at, 0) + lane * 8;
    const i64 dout_offset = row_offset(dout_strides, head, heads, seqlen, at, 0) + lane * 8;
    const uint4 o = *reinterpret_cast<const uint4*>(out + offset);
    const uint4 g = *reinterpret_cast<const uint4*>(dout + dout_offset);
    const u32 ow[4] = {o.x, o.y, o.z, o.w}, gw[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = fma_f32(Element::low(ow[i]), Element::low(gw[i]), sum);
      sum = fma_f32(Element::high(ow[i]), Element::high(gw[i]), sum);
    }
  }
  sum = lanes_sum<kLanes>(sum);
  if (lane == 0) {
    // The statistics are stored as [head][step][2][kPreparedM]: a row's log2-sum-exp, then its
    // negated delta; padding rows are zero.
    const i64 slot =
        head * padded * 2 + static_cast<i64>(at / kPreparedM) * (2 * kPreparedM) + at % kPreparedM;
    stats[slot] =
        at < seqlen ? lse[number_offset(lse_strides, head, heads, seqlen, at, 0)] * kLog2E : 0.f;
    stats[slot + kPreparedM] = -sum;
  }
  if (dq_sum == nullptr) return;
  float4* zero = reinterpret_cast<float4*>(dq_sum + row * kHeadDim) + lane;
  zero[0] = make_float4(0.f, 0.f, 0.f, 0.f);
  zero[kLanes] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// A build that prepares the steps of another kernel ends here.
#if PREPARED_QUERIES == TILE_QUERIES
// Computes this warp's 32x32 piece of one step's dq, dS[32 queries][128 keys] k[128][32 columns],
// and adds the piece to the dq accumulator.
__device__ __forceinline__ void add_dq(u32 ds_lane, u32 k_lane, float* dq_at) {
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

// Rounds the warp's 32 x d gradients into its 32 rows of a shared tile and stores the rows below
// `rows_left`.
__device__ __forceinline__ void store_gradient(const float (&acc)[2][kHeadDim / 8][4], float scale,
                                               u32 tile, u16* to, Stride stride, int warp_row,
                                               int rows_left, u32 lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const u32 r[4] = {Element::pack(acc[i][2 * j][0] * scale, acc[i][2 * j][1] * scale),
                        Element::pack(acc[i][2 * j][2] * scale, acc[i][2 * j][3] * scale),
                        Element::pack(acc[i][2 * j + 1][0] * scale, acc[i][2 * j + 1][1] * scale),
                        Element::pack(acc[i][2 * j + 1][2] * scale, acc[i][2 * j + 1][3] * scale)};
      stmatrix_x4((tile + lane_by_row<kRowBytes>(warp_row + i * 16, lane)) ^ (j * 32), r);
    }
  __syncwarp();
  constexpr int kStoreRows = kWarpSize / kRowChunks;
#pragma unroll
  for (int pass = 0; pass < 32 / kStoreRows; ++pass) {
    const int row = warp_row + pass * kStoreRows + lane / kRowChunks, chunk = lane % kRowChunks;
    const uint4 x = load_shared_b128(tile + swizzled<kRowBytes>(row, chunk));
    if (row < rows_left)
      *reinterpret_cast<uint4*>(to + static_cast<i64>(row) * stride + chunk * 8) = x;
  }
}

// Each thread block computes one tile of keys of one head.
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
  const bool is_score = warp < 4;
  const int key_blocks = (seqlen + kTileN - 1) / kTileN;
  const int steps = (seqlen + kTileM - 1) / kTileM;
  const int head = blockIdx.x / key_blocks;
  const int key_block = blockIdx.x % key_blocks;
  const int key0 = key_block * kTileN;

  q += head_offset(q_strides, head, heads, seqlen);
  dout += head_offset(dout_strides, head, heads, seqlen);
  auto first_key = [&](const Strides& strides) {
    return head_offset(strides, head, heads, seqlen) +
           static_cast<i64>(key0) * row_stride(strides);
  };
  k += first_key(k_strides);
  v += first_key(v_strides);
  dk += first_key(dk_strides);
  dv += first_key(dv_strides);
  stats += static_cast<i64>(head) * steps * (2 * kTileM);
  dq_sum += static_cast<i64>(head) * steps * (kTileM * kHeadDim) + warp * 1024 + lane * 4;

  const int first_step = kCausal ? key0 / kTileM : 0;
  const int step_count = steps - first_step;
  // With full attention, thread blocks start at different query steps, so that they do not all add
  // to the same rows of dQ at once.
  const int rotation = kCausal ? 0 : key_block * (kTileN / kTileM) % steps;
  auto step_at = [&](int t) {
    if (kCausal) return first_step + t;
    const int s = t + rotation;
    return s >= steps ? s - steps : s;
  };

  const int copy_row = tid / kRowChunks, copy_chunk = tid % kRowChunks;
  const u32 copy_to = base + swizzled<kRowBytes>(copy_row, copy_chunk);
  auto copy_offset = [&](Stride row) { return copy_row * row + copy_chunk * 8; };
  q += copy_offset(kQRow);
  dout += copy_offset(kDoutRow);

  auto load_step = [&](int step, int stage) {
    const int rows_left = seqlen - step * kTileM - copy_row;
    copy_rows<kTileM, kRowsPerPass, true>(copy_to + kQOffset + stage * kQBytes,
                                          q + static_cast<i64>(step) * (kTileM * kQRow), kQRow,
                                          rows_left);
    copy_rows<kTileM, kRowsPerPass, true>(copy_to + kDoOffset + stage * kQBytes,
                                          dout + static_cast<i64>(step) * (kTileM * kDoutRow),
                                          kDoutRow, rows_left);
    if (tid < kStatsBytes / 16)
      cp_async_16(base + kStatsOffset + stage * kStatsBytes + tid * 16,
                  stats + static_cast<i64>(step) * (2 * kTileM) + tid * 4);
    cp_async_commit();
  };
  const Stride k_row = row_stride(k_strides), v_row = row_stride(v_strides);
  copy_rows<kTileN, kRowsPerPass, true>(copy_to + kKOffset, k + copy_offset(k_row), k_row,
                                        seqlen - key0 - copy_row);
  copy_rows<kTileN, kRowsPerPass, true>(copy_to + kVOffset, v + copy_offset(v_row), v_row,
                                        seqlen - key0 - copy_row);
  load_step(step_at(0), 0);

  const int warp_row = role_warp * 32;
  // A score warp multiplies A = K by B = Q, then by B = dO; a gradient warp multiplies A = V by B =
  // dO, then by B = Q.
  const u32 a_lane =
      base + (is_score ? kKOffset : kVOffset) + lane_by_row<kRowBytes>(warp_row, lane);
  const u32 first_b = base + (is_score ? kQOffset : kDoOffset) + lane_by_column<kRowBytes>(0, lane);
  const u32 second_b = base + (is_score ? kDoOffset : kQOffset) + lane_by_row<kRowBytes>(0, lane);
  const u32 p_lane = base + kPOffset + role_warp * (kDsBytes / 4) + lane * 16;
  const u32 ds_store = base + kDsOffset + lane_by_row<kDsRowBytes>(warp_row, lane);
  const u32 ds_load =
      (base + kDsOffset + lane_by_column<kDsRowBytes>(0, lane)) ^ ((warp % kDqWarpsM) * 64);
  const u32 k_load =
      (base + kKOffset + lane_by_row<kRowBytes>(0, lane)) ^ ((warp / kDqWarpsM) * (kDqColumns * 2));
  const u32 stats_lane = base + kStatsOffset + (lane & 3) * 8 + (is_score ? 0 : kTileM * 4);

  float acc[2][kHeadDim / 8][4];
  clear(acc);

  auto add_dq_of = [&](int t) {
    add_dq(ds_load + (t & 1) * kDsBytes, k_load,
           dq_sum + static_cast<i64>(step_at(t)) * (kTileM * kHeadDim));
  };
#pragma unroll 1
  for (int t = 0; t < step_count; ++t) {
    const int stage = t & 1, copied = kStages == 2 ? stage : 0;
    if (kStages == 1 && t > 0) {
      __syncthreads();  // nothing reads the last step's tiles any more
      load_step(step_at(t), 0);
    }
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles have arrived, the last step's dS is whole, and what it
                      // The tiles of the previous step have been read by all warps and may be
                      // overwritten.
    if (kStages == 2 && t + 1 < step_count) load_step(step_at(t + 1), copied ^ 1);
    const u32 q_stage = copied * kQBytes, stats_at = stats_lane + copied * kStatsBytes;
    if (is_score) {
      float s[2][kTileM / 8][4];
      clear(s);
      multiply_abt<kSteps, kRowBytes>(s, a_lane, first_b + q_stage);
      const int step = step_at(t);
      const bool masked = kCausal ? step * kTileM < key0 + kTileN : key0 + kTileN > seqlen;
      const int key = key0 + warp_row + static_cast<int>(lane >> 2);
      const int query = step * kTileM + static_cast<int>(lane & 3) * 2;
      u32 p[kTileM / 16][2][4];
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks) {
        const float2 lse[2] = {load_shared_f32x2(stats_at + ks * 64),
                               load_shared_f32x2(stats_at + ks * 64 + 32)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* x = &s[i][2 * ks + e / 2][(e & 1) * 2];
            p[ks][i][e] = Element::pack(exp2_approx(fma_f32(x[0], kScaleLog2, -lse[e / 2].x)),
                                        exp2_approx(fma_f32(x[1], kScaleLog2, -lse[e / 2].y)));
          }
          if (masked) {  // on P, whose bits an AND clears whatever they are
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key_e = key + i * 16 + (e & 1) * 8, query_e = query + ks * 16 + (e / 2) * 8;
              if (kCausal ? key_e > query_e : key_e >= seqlen) p[ks][i][e] &= 0xffff0000u;
              if (kCausal ? key_e > query_e + 1 : key_e >= seqlen) p[ks][i][e] = 0u;
            }
          }
          store_shared_b128(p_lane + (ks * 2 + i) * 512, p[ks][i][0], p[ks][i][1], p[ks][i][2],
                            p[ks][i][3]);
        }
      }
      barrier_arrive(1 + role_warp, 64);
      if (t > 0) add_dq_of(t - 1);
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks)
        multiply_step_ab(acc, p[ks], second_b + q_stage + ks * 16 * kRowBytes);
    } else {
      if (t > 0) add_dq_of(t - 1);
      // The accumulators start at -delta of their column, so that the GEMM yields dP - delta.
      float dp[2][kTileM / 8][4];
#pragma unroll
      for (int j = 0; j < kTileM / 8; ++j) {
        const float2 delta = load_shared_f32x2(stats_at + j * 32);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          dp[i][j][0] = dp[i][j][2] = delta.x;
          dp[i][j][1] = dp[i][j][3] = delta.y;
        }
      }
      multiply_abt<kSteps, kRowBytes>(dp, a_lane, first_b + q_stage);
      barrier_sync(1 + role_warp, 64);
      u32 ds[kTileM / 16][2][4];
      uint4 ahead = load_shared_b128(p_lane);
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 p[4] = {ahead.x, ahead.y, ahead.z, ahead.w};
          if (ks * 2 + i + 1 < kTileM / 8)
            ahead = load_shared_b128(p_lane + (ks * 2 + i + 1) * 512);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* x = &dp[i][2 * ks + e / 2][(e & 1) * 2];
            ds[ks][i][e] = Element::pack(Element::low(p[e]) * x[0], Element::high(p[e]) * x[1]);
          }
          stmatrix_x4(((ds_store + stage * kDsBytes) ^ (ks * 32)) + i * 16 * kDsRowBytes,
                      ds[ks][i]);
        }
#pragma unroll
      for (int ks = 0; ks < kTileM / 16; ++ks)
        multiply_step_ab(acc, ds[ks], second_b + q_stage + ks * 16 * kRowBytes);
    }
  }
  __syncthreads();
  add_dq_of(step_count - 1);
  __syncthreads();
  if (is_score)
    store_gradient(acc, 1.f, base + kVOffset, dv, row_stride(dv_strides), warp_row, seqlen - key0,
                   lane);
  else
    store_gradient(acc, kScale, base + kKOffset, dk, row_stride(dk_strides), warp_row,
                   seqlen - key0, lane);
}

// The finishing kernel computes dq = scale * accumulator and undoes the fragment order. Each warp
// handles one fragment row of 16x32 elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_flash_mma_finish(const float* __restrict__ dq_sum, u16* __restrict__ dq,
                                        int seqlen, int batch_heads, int heads,
                                        const __grid_constant__ Strides dq_strides) {
  const int steps = (seqlen + kTileM - 1) / kTileM;
  const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) /
                   kWarpSize;  // one warp a 16 x 32 fragment row
  const int lane = threadIdx.x % kWarpSize;
  if (warp >= static_cast<i64>(batch_heads) * steps * 16) return;
  const float4* from = reinterpret_cast<const float4*>(dq_sum) + warp * 128 + lane;
  u32 upper[4], lower[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 x = from[j * 32];
    upper[j] = Element::pack(x.x * kScale, x.y * kScale);
    lower[j] = Element::pack(x.z * kScale, x.w * kScale);
  }
  // The four lanes of a quad transpose 4x4 values, so that lane t of the quad ends with all eight
  // columns of fragment t.
  const int t = lane & 3;
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const bool high = (t & mask) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & mask) continue;
      const u32 give_upper = high ? upper[j] : upper[j | mask],
                give_lower = high ? lower[j] : lower[j | mask];
      const u32 got_upper = __shfl_xor_sync(kFullWarp, give_upper, mask),
                got_lower = __shfl_xor_sync(kFullWarp, give_lower, mask);
      if (high) {
        upper[j] = got_upper;
        lower[j] = got_lower;
      } else {
        upper[j | mask] = got_upper;
        lower[j | mask] = got_lower;
      }
    }
  }
  const i64 tile = warp / 16;
  const int in_tile = static_cast<int>(warp % 16), owner = in_tile / 2, i = in_tile % 2;
  const i64 head = tile / steps;
  const int row =
      static_cast<int>(tile % steps) * kTileM + (owner % kDqWarpsM) * 32 + i * 16 + (lane >> 2);
  u16* to = dq + row_offset(dq_strides, head, heads, seqlen, row, 0) +
            (owner / kDqWarpsM) * kDqColumns + t * 8;
  if (row < seqlen)
    *reinterpret_cast<uint4*>(to) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
  if (row + 8 < seqlen)
    *reinterpret_cast<uint4*>(to + 8 * row_stride(dq_strides)) =
        make_uint4(lower[0], lower[1], lower[2], lower[3]);
}
#endif
