// Computes softmax(q k^T) v of 32 query rows in a cluster of thread blocks, where each thread block
// has its share of the keys. The rows of the tensor-core tiles lie along keys and head_dim, so that
// keys and values are register operands. Keys and values are loaded before the queries are
// available.
//
//   s [128 keys][32 rows] = k q^T;  p = 2^(s - top of the block);  o [256][32] = v^T p
//
// Each block sends its partial outputs, maxima and sums to the shared memory of the blocks. Thread
// block r of the cluster combines columns 32 r to 32 r + 31 of head_dim of the output.
#pragma once
#include "denoise/persistent.cuh"

constexpr int kBlockKeys = kMaxKeys / kRanks;
constexpr u32 kQueriesAt = kXAt, kProbabilitiesAt = kQueriesAt + 4 * 4096,
              kTopsAt = kProbabilitiesAt + 2 * 4096, kSumsAt = kTopsAt + 1024,
              kFactorsAt = kSumsAt + 1024, kStagedAt = kQueriesAt;
constexpr u32 kStatesAt =
    kPartsAt + kRanks * 2048;  // behind the parts: top and sum of each row, from each block
static_assert(kFactorsAt + 1024 <= kOutAt, "out's weights come meanwhile");

// Keys and values as register operands of a warp: its 16 keys, and 2 x 16 of the 256 columns of the
// values for all 128 keys.
struct KeyValueFragments {
  u32 k[16][4] = {}, v[2][8][4] = {};
  // Loads sixteen keys and their values at a time: either those of the prefix, or those that this
  // layer has computed.
  __device__ __forceinline__ void load(const PersistentArguments& a, const BlockContext& b,
      const AttentionShare& share,
                                       const u16* keys, const u16* values, bool fresh) {
    const int mine = share.first / 16 + b.group * 4 + b.warp;
    if (((mine + 1) * 16 > a.prefix) == fresh) {
      const uint4* from = reinterpret_cast<const uint4*>(keys) + mine * 512 + b.lane;
#pragma unroll
      for (int i = 0; i < 16; ++i) load_bypassing_l1(k[i], from + i * 32);
    }
    const uint4* from =
        reinterpret_cast<const uint4*>(values) + (share.first + b.group * 8 + b.warp) * 32 + b.lane;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) {
      if (((share.first / 16 + i + 1) * 16 > a.prefix) != fresh) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) load_bypassing_l1(v[half][i], from + (i * 16 + half * 4)
           * 32);
    }
  }
};

// Reduces eight values over each set of eight lanes l with equal l % 4. After the reduction a lane
// holds the result for value (l / 16) 4 + (l / 8 % 2) 2 + l / 4 % 2.
template <typename Op>
__device__ __forceinline__ float reduce_eight_values_across_lanes(const float (&v)[8], int lane,
                                                                  Op op) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, lane & 16 ? v[i] : v[i + 4], 16);
    four[i] = op(lane & 16 ? v[i + 4] : v[i], other);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, lane & 8 ? four[i] : four[i + 2], 8);
    two[i] = op(lane & 8 ? four[i + 2] : four[i], other);
  }
  const float other = __shfl_xor_sync(kFullWarp, lane & 4 ? two[0] : two[1], 4);
  return op(lane & 4 ? two[1] : two[0], other);
}
// row_of gives the query row of value i of a lane; query_row_after_transposition gives the row that
// the lane has after the transposition.
__device__ __forceinline__ int row_of(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
__device__ __forceinline__ int query_row_after_transposition(int lane) {
  return row_of(lane, (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1));
}

__device__ __forceinline__ float load_shared_f32(u32 shared) {
  return bits_to_f32(load_shared_b32(shared));
}
__device__ __forceinline__ void store_shared_f32(u32 shared, float x) {
  store_shared_b32(shared, __float_as_uint(x));
}

// Computes the attention of the thread block's `share` of the keys; all compute threads of the
// cluster call the function once the queries have arrived.
__device__ __forceinline__ void attend_to_share_of_keys(const PersistentArguments& a,
                                                        BlockContext& b,
                                                            const AttentionShare& share,
                                       const KeyValueFragments& f) {
  const float scale = kLog2E * rsqrtf(static_cast<float>(kHeadDim));
  const int warp = b.group * 4 + b.warp, own_row = query_row_after_transposition(b.lane);
  if (threadIdx.x == 0) mbarrier_arrive_expect_bytes(b.parts_full, kPartsBytes);

  // Accumulator element s[4 j + 2 h + i] is the score of key 8 h + lane / 4 of the warp and query
  // row 8 j + lane % 4 * 2 + i.
  float s[16] = {};
  const u64 queries = wgmma_operand_descriptor(b.base + kQueriesAt);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    wgmma_w_transposed(s, f.k[i], advance_operand_descriptor(queries, i / 4 * 4096 + i % 4 * 32));
  wgmma_commit();
  wgmma_wait<0>();
  const int key = b.group * 64 + b.warp * 16 + b.lane / 4;
  float tops[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i / 2 * 4 + i % 2;
    s[at] = key < share.seen ? s[at] * scale : negative_infinity();
    s[at + 2] = key + 8 < share.seen ? s[at + 2] * scale : negative_infinity();
    tops[i] = max_f32(s[at], s[at + 2]);
  }
  store_shared_f32(b.base + kTopsAt + warp * 128 + own_row * 4,
                   reduce_eight_values_across_lanes(tops, b.lane, [](float x,
                       float y) { return max_f32(x, y); }));
  named_barrier_sync(kWorkersBarrier, kWorkers);
  float top = load_shared_f32(b.base + kTopsAt + b.lane * 4);  // of row `lane`
#pragma unroll
  for (int i = 1; i < 8; ++i)
    top = max_f32(top, load_shared_f32(b.base + kTopsAt + i * 128 + b.lane * 4));
  const float finite_maximum = share.seen > 0 ? top : 0.f;  // without keys all p are 0
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i / 2 * 4 + i % 2;
    const float m = __shfl_sync(kFullWarp, finite_maximum, row_of(b.lane, i));
    s[at] = exp2_approx(s[at] - m), s[at + 2] = exp2_approx(s[at + 2] - m);
    sums[i] = s[at] + s[at + 2];
  }
  // The probabilities p are stored in shared memory as [keys / 64][32 rows][64 keys].
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    u32 p[4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
      p[m] = Bf16::pack(s[(pair * 2 + m / 2) * 4 + m % 2 * 2],
                        s[(pair * 2 + m / 2) * 4 + m % 2 * 2 + 1]);
    const int row = (pair * 2 + b.lane / 16) * 8 + b.lane % 8;
    stmatrix_x4_trans(b.base + kProbabilitiesAt + b.group * 4096 +
                          swizzled_chunk_offset<128>(row, b.warp * 2 + b.lane / 8 % 2),
                      p);
  }
  fence_proxy_async_shared();
  named_barrier_sync(kWorkersBarrier, kWorkers);
  stop_weight_requests(b);

  float o[2][16] = {};
  const u64 probabilities = wgmma_operand_descriptor(b.base + kProbabilitiesAt);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      wgmma_w_transposed(o[half], f.v[half][i],
                         advance_operand_descriptor(probabilities, i / 4 * 4096 + i % 4 * 32));
  wgmma_commit();
  store_shared_f32(b.base + kSumsAt + warp * 128 + own_row * 4,
                   reduce_eight_values_across_lanes(sums, b.lane, [](float x, float y) { return x +
                       y; }));
  named_barrier_sync(kWorkersBarrier, kWorkers);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += load_shared_f32(b.base + kSumsAt + i * 128 + b.lane * 4);
  // Each warp sends this thread block's row maxima and sums to one other thread block of the
  // cluster.
  st_async_f32x2(cluster_address(b.base + kStatesAt + b.rank * 256 + b.lane * 8, warp), top, sum,
                 cluster_address(b.parts_full, warp));
  wgmma_wait<0>();
  // Accumulator o[half] holds the 16 output columns from group 128 + half 64 + warp 16 on.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 owner = b.group * 4 + half * 2 + b.warp / 2;
    const u32 to =
        cluster_address(b.base + kPartsAt + b.rank * 2048 + b.warp % 2 * 1024 + b.lane * 16, owner);
    const u32 barrier = cluster_address(b.parts_full, owner);
    const float (&x)[16] = o[half];
#pragma unroll
    for (int i = 0; i < 16; i += 8)
      st_async_b128(to + i * 64, Bf16::pack(x[i], x[i + 1]), Bf16::pack(x[i + 2], x[i + 3]),
                    Bf16::pack(x[i + 4], x[i + 5]), Bf16::pack(x[i + 6], x[i + 7]), barrier);
  }
  end_timed_stage(kAttention + 1);
  mbarrier_wait(b.parts_full, b.parts_parity);
  b.parts_parity ^= 1;

  // Each warp computes the factors that rescale the output part of one thread block; each lane
  // computes the factor of one row.
  {
    float2 states[kRanks];
#pragma unroll
    for (int i = 0; i < kRanks; ++i)
      states[i] = load_shared_f32x2(b.base + kStatesAt + i * 256 + b.lane * 8);
    float most = states[0].x, all = 0.f, mine = 0.f;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) most = max_f32(most, states[i].x);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const float weight = exp2_approx(states[i].x - most);
      all += weight * states[i].y;
      if (i == warp) mine = weight;
    }
    store_shared_f32(b.base + kFactorsAt + warp * 128 + b.lane * 4, mine * reciprocal_approx(all));
  }
  named_barrier_sync(kWorkersBarrier, kWorkers);
  if (b.group == 1) return;
  const int high = b.warp / 2, rows16 = b.warp % 2;  // of the columns, of the rows
  float y[8] = {};
#pragma unroll
  for (int i = 0; i < kRanks; ++i) {
    const uint4 part =
        load_shared_b128(b.base + kPartsAt + i * 2048 + high * 1024 + rows16 * 512 + b.lane * 16);
    const u32 factors = b.base + kFactorsAt + i * 128 + (rows16 * 16 + b.lane % 4 * 2) * 4;
    const float2 low = load_shared_f32x2(factors), up = load_shared_f32x2(factors + 32);
    y[0] += low.x * Bf16::low(part.x), y[1] += low.y * Bf16::high(part.x),
        y[2] += low.x * Bf16::low(part.y), y[3] += low.y * Bf16::high(part.y);
    y[4] += up.x * Bf16::low(part.z), y[5] += up.y * Bf16::high(part.z),
        y[6] += up.x * Bf16::low(part.w), y[7] += up.y * Bf16::high(part.w);
  }
  // The output passes through shared memory as [32 rows][32 columns], to bring a row's columns
  // together.
  const auto staged_at = [&](int row, int chunk) {
    return b.base + kStagedAt + row * 64 + (chunk ^ (row / 2 & 3)) * 16;
  };
  const u32 pairs[4] = {Bf16::pack(y[0], y[1]), Bf16::pack(y[2], y[3]), Bf16::pack(y[4], y[5]),
                        Bf16::pack(y[6], y[7])};
  stmatrix_x4_trans(
      staged_at((rows16 * 2 + b.lane / 16) * 8 + b.lane % 8, high * 2 + b.lane / 8 % 2), pairs);
  named_barrier_sync(kAttended, 128);
  const int row = b.thread / 4, chunk = b.thread % 4, at = share.row0 + row;
  if (at < a.rows * kHeads)
    *reinterpret_cast<uint4*>(
        a.attended +
        activation_offset(at / kHeads, at % kHeads * kHeadDim + b.rank * 32 + chunk * 8)) =
        load_shared_b128(staged_at(row, chunk));
}
