// Attention backward for sm_90a: tensor cores through wgmma, tiles by tensor copies; dk and dv of a
// block of keys stay in registers, dq is summed in memory.
//
//   per block of 128 keys, for each step of 64 queries:
//     p^T = exp(k q^T / sqrt(d) - lse);  dp^T = v dout^T;  ds^T = p^T (dp^T - delta)
//     dv += p^T dout;  dk += ds^T q;  dq_sum += ds k
//
// The kernels before and after it, and the layouts of their row statistics and of dq_sum, are those
// of backward_flash_mma.
//
// Threads: two warpgroups of 64 keys each compute, with 240 registers a thread; one thread of a
// third, which keeps 24, copies. Keys are rows, so that p^T and ds^T are operands in the registers
// where they were computed; ds^T goes to shared memory too, because dq sums over the keys of both
// warpgroups, each of which computes half of it.
// Shared memory: keys, values; two stages of queries with their statistics, and of dout; two of
// ds^T, so that a step's is written while the last one's may still be read. All but the statistics
// are columns of 64 elements, whose rows of 128 bytes are swizzled as wgmma wants it.
//
// Overlap: the exponentials are computed while dp runs, ds while dv does, and dq is added while dk
// does; what is left, the other warpgroup fills. To start the next step's q k^T before this one's
// dq takes more registers than there are, and with dk's operand in shared memory instead is slower.
// Order of addition: as in backward_flash_mma, dq's is not fixed. With -DDETERMINISTIC=1 it is:
// each step of queries has a turn in memory, the block of keys that may add to it next. A thread
// beside the one that copies waits for the turn and passes it on, so that those that compute wait
// only if it is not theirs yet. Turns go from a block to one that starts later, so that no block
// waits for one that cannot start: upwards, where a block is a step behind the one before. Where
// causal they go downwards from the diagonal, where every block starts and no block waits.
//
// Bound: tensor cores, 10 b h s^2 d FLOPs (half if causal). Against flash_mma: operands come to the
// tensor cores from shared memory without passing through registers, copies take no thread's time.
#include "attention/ring.cuh"
#include "attention/shape.cuh"
#include "attention/warpgroup_gemm.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/tensor_copy.cuh"

constexpr int kGroups = 2, kGroupThreads = 128, kThreads = THREADS;
constexpr bool kDeterministic = DETERMINISTIC != 0;
constexpr int kKeys = TILE_KEYS, kQueries = 64;  // of a block, of a step
// Rows of the tiles of row statistics and of dq_sum: two steps where d = 64.
constexpr int kTileRows = TILE_QUERIES;
constexpr int kDqColumns = kHeadDim / 2;  // of a warpgroup
constexpr int kColumns = kHeadDim / 64;
// Blocks of the heads that run together where causal: about as many as a GPU has multiprocessors.
constexpr int kBlocksTogether = 128;
constexpr int kStatsBytes = 2 * kQueries * 4;
constexpr int kKeysBytes = kKeys * kHeadDim * 2, kQueriesBytes = kQueries * kHeadDim * 2;
constexpr int kGradientsBytes = kKeys * kQueries * 2;  // of the scores
constexpr int kValuesOffset = kKeysBytes, kQueriesOffset = 2 * kKeysBytes;
constexpr int kOutOffset = kQueriesOffset + 2 * kQueriesBytes;
constexpr int kGradientsOffset = kOutOffset + 2 * kQueriesBytes;
constexpr int kStatsOffset = kGradientsOffset + 2 * kGradientsBytes;
constexpr int kBarriersOffset = kStatsOffset + 2 * kStatsBytes;
constexpr int kSharedBytes = kBarriersOffset + 6 * 16;

static_assert(kThreads == (kGroups + 1) * kGroupThreads, "a warpgroup copies, the others compute");
static_assert(kKeys == kGroups * kGroupRows, "a warpgroup has 64 keys");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");

using Inputs = Ring<1, 2 * kKeysBytes, 1>;
using Steps = Ring<2, kQueriesBytes, kGroups * kGroupThreads / kWarpSize>;
// Full once it is the block's turn, empty once its warps have added.
using Turn = Ring<1, 0, kGroups * kGroupThreads / kWarpSize>;
struct Rings {
  Inputs inputs;  // keys and values, filled once
  Steps queries, dout;
  Turn turn;
  u32 gradients, stats;
  __device__ __forceinline__ explicit Rings(u32 base)
      : inputs{base, base + kBarriersOffset},
        queries{base + kQueriesOffset, inputs.barriers + Inputs::kBarrierBytes},
        dout{base + kOutOffset, queries.barriers + Steps::kBarrierBytes},
        turn{base, dout.barriers + Steps::kBarrierBytes},
        gradients(base + kGradientsOffset),
        stats(base + kStatsOffset) {}
};

// What a block computes: a block of keys, with the steps of queries that see some of them.
//
// Where causal, blocks have work for one step to all of them. Those that run together are of a few
// heads, and of all of these the longest go first, so that few multiprocessors are idle at the end.
struct Work {
  int head, key, seqlen, first, count, tiles;

  __device__ __forceinline__ explicit Work(int seqlen) : seqlen(seqlen) {
    const int blocks = (seqlen + kKeys - 1) / kKeys;
    int block = blockIdx.x % blocks;
    head = blockIdx.x / blocks;
    if (kCausal && kDeterministic) block = blocks - 1 - block;
    if (kCausal && !kDeterministic) {
      const int together = (kBlocksTogether + blocks - 1) / blocks;
      const int from = head / together * together;
      const int heads = min_of(together, static_cast<int>(gridDim.x) / blocks - from);
      const int within = blockIdx.x - from * blocks;
      head = from + within % heads;
      block = within / heads;
    }
    key = block * kKeys;
    tiles = (seqlen + kTileRows - 1) / kTileRows;
    first = kCausal ? key / kQueries : 0;
    count = (seqlen + kQueries - 1) / kQueries - first;
  }
  // Where a row of the head is among those of all heads, padded to whole tiles.
  __device__ __forceinline__ i64 row(int query) const {
    return static_cast<i64>(head) * tiles * kTileRows + query;
  }
  // Blocks of a head start at different steps, so that they do not all add to the same rows of dq.
  // Where causal they would meet there even if each started at its diagonal: a block of two steps
  // less starts when the one before it in its place, of two steps less too, has ended.
  __device__ __forceinline__ int step(int index) const {
    if (kDeterministic) return first + index;
    const int shifted = index + static_cast<int>(blockIdx.x) * 3 % count;
    return first + (shifted < count ? shifted : shifted - count);
  }
};

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, int rows, int row, int head,
                                          u32 barrier) {
#pragma unroll
  for (int column = 0; column < kColumns; ++column)
    copy_box(to + column * rows * kColumnBytes, map, column * 64, row, head, barrier);
}

// What the thread does that copies.
__device__ __forceinline__ void produce(const Rings& rings, const TensorMap& q, const TensorMap& k,
                                        const TensorMap& v, const TensorMap& dout,
                                        const float* stats, const Work& work) {
  rings.inputs.begin_fill(0, 2 * kKeysBytes);
  copy_tile(rings.inputs.data, k, kKeys, work.key, work.head, rings.inputs.full(0));
  copy_tile(rings.inputs.data + kValuesOffset, v, kKeys, work.key, work.head, rings.inputs.full(0));
  for (int n = 0; n < work.count; ++n) {
    const int step = work.step(n);
    rings.queries.begin_fill(n, kQueriesBytes + kStatsBytes);
    copy_tile(rings.queries.stage(n), q, kQueries, step * kQueries, work.head,
              rings.queries.full(n));
    // Of a tile's rows first all lse, then all delta.
    const float* from = stats + work.row(step * kQueries) * 2 - step * kQueries % kTileRows;
    const u32 to = rings.stats + n % 2 * kStatsBytes;
    copy_bulk(to, from, kStatsBytes / 2, rings.queries.full(n));
    copy_bulk(to + kStatsBytes / 2, from + kTileRows, kStatsBytes / 2, rings.queries.full(n));
    rings.dout.begin_fill(n, kQueriesBytes);
    copy_tile(rings.dout.stage(n), dout, kQueries, step * kQueries, work.head, rings.dout.full(n));
  }
}

// What the thread does that keeps the order of addition. `turns` has the blocks that have added to
// each step of each head, and is left as it was found: zero.
__device__ __forceinline__ void take_turns(const Rings& rings, u32* turns, const Work& work) {
  const int block = work.key / kKeys;
  const bool last = kCausal ? block == 0 : work.key + kKeys >= work.seqlen;
  u32* turn = turns + static_cast<i64>(work.head) * (work.first + work.count) + work.first;
  // Where causal, the last block that sees a step is the first to add.
  u32 before = kCausal ? 0 : block;
#pragma unroll 1
  for (int n = 0; n < work.count; ++n, ++turn) {
    while (load_acquire(turn) != before) {
    }
    barrier_arrive_one(rings.turn.full(n));
    barrier_wait(rings.turn.empty(n), n % 2);
    store_release(turn, last ? 0 : before + 1);
    if (kCausal && n % (kKeys / kQueries) == kKeys / kQueries - 1) ++before;
  }
}

// Probabilities of a step in place of its scores; the lane's rows are `key` and 8 further.
template <bool kMask>
__device__ __forceinline__ void exponentials(float (&s)[kQueries / 2], u32 stats, int key,
                                             int query, int seqlen) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 lse = load_shared_f32x2(stats + (j * 8 + column) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[4 * j + i];
      x = exp2_approx(fma_f32(x, kScaleLog2, i % 2 == 0 ? -lse.x : -lse.y));
      const int row = key + i / 2 * 8;
      if (kMask && (row >= seqlen || (kCausal && row > query + j * 8 + column + i % 2))) x = 0.f;
    }
  }
}

// Gradients of the scores in place of those of the probabilities.
__device__ __forceinline__ void score_gradients(float (&dp)[kQueries / 2],
                                                const float (&p)[kQueries / 2], u32 stats) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 minus_delta =
        load_shared_f32x2(stats + (kQueries + j * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = dp[4 * j + i];
      x = p[4 * j + i] * (x + (i % 2 == 0 ? minus_delta.x : minus_delta.y));
    }
  }
}

// The warpgroup's columns of dq of a step, in memory a tile's [32 x 32 pieces][16 x 8 fragments]
// [lane][4].
__device__ __forceinline__ void add_dq(const float (&dq)[kDqColumns / 2], float* dq_sum,
                                       const Work& work, int query, int group) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const int in_tile = query % kTileRows, row16 = in_tile / 16 + warp;
  float* to = dq_sum + work.row(query - in_tile) * kHeadDim + lane * 4;
#pragma unroll
  for (int j = 0; j < kDqColumns / 8; ++j) {
    const int piece = (group * (kDqColumns / 32) + j / 4) * (kTileRows / 32) + row16 / 2;
    const int fragment = piece * 8 + row16 % 2 * 4 + j % 4;
    reduce_add_f32x4(to + fragment * 128, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
}

// The warpgroup's gradient, through its rows of a tile that nobody reads any more, to memory.
__device__ __forceinline__ void store_gradient(float (&d)[kHeadDim / 2], float scale, u32 tile,
                                               const TensorMap& map, const Work& work, int group) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) d[i] *= scale;
  u32 words[kHeadDim / 4];
  round_to_operand(words, d);
  store_operand<kKeys>(tile, words, group * kGroupRows);
  fence_async();
  barrier_sync(2 + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    for (int column = 0; column < kColumns; ++column)
      store_box(map, column * 64, work.key + group * kGroupRows, work.head,
                tile + (column * kKeys + group * kGroupRows) * kColumnBytes);
    store_box_commit();
  }
}

// What a warpgroup does that computes.
__device__ __forceinline__ void consume(const Rings& rings, const TensorMap& dk_map,
                                        const TensorMap& dv_map, float* dq_sum, const Work& work,
                                        int group) {
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const int first_key = work.key + group * kGroupRows;
  const int key = first_key + static_cast<int>(warp * 16 + lane / 4);
  const u32 keys = rings.inputs.data, values = keys + kValuesOffset;
  const u32 own = group * kGroupRows * kColumnBytes;
  // The columns of dq that are this warpgroup's, of the keys.
  const u32 dq_keys =
      keys + group * kDqColumns / 64 * kKeys * kColumnBytes + group * kDqColumns % 64 * 2;
  float dk[kHeadDim / 2], dv[kHeadDim / 2], s[kQueries / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
  rings.inputs.wait(0);
#pragma unroll 1
  for (int n = 0; n < work.count; ++n) {
    const int query = work.step(n) * kQueries;
    const u32 stats = rings.stats + n % 2 * kStatsBytes;
    float dp[kQueries / 2];
    u32 p[kQueries / 4], ds[kQueries / 4];
    rings.queries.wait(n);
    multiply_abt<kKeys, kQueries>(s, keys + own, rings.queries.stage(n));
    rings.dout.wait(n);
    multiply_abt<kKeys, kQueries>(dp, values + own, rings.dout.stage(n));
    wgmma_wait<1>();
    settle(s);
    if (work.key + kKeys > work.seqlen || (kCausal && query < first_key + kGroupRows - 1))
      exponentials<true>(s, stats, key, query, work.seqlen);
    else
      exponentials<false>(s, stats, key, query, work.seqlen);
    round_to_operand(p, s);
    multiply_ab(dv, p, rings.dout.stage(n));
    // dp is there.
    wgmma_wait<1>();
    settle(dp);
    score_gradients(dp, s, stats);
    round_to_operand(ds, dp);
    const u32 gradients = rings.gradients + n % 2 * kGradientsBytes;
    store_operand<kKeys>(gradients, ds, group * kGroupRows);
    fence_async();
    barrier_sync(1, kGroups * kGroupThreads);
    float dq[kDqColumns / 2];
    multiply_atb<kKeys>(dq, gradients, dq_keys);
    multiply_ab(dk, ds, rings.queries.stage(n));
    // dq is there, and dv.
    wgmma_wait<1>();
    settle(dq);
    rings.dout.release_by_warp(n);
    if (kDeterministic) rings.turn.wait(n);
    add_dq(dq, dq_sum, work, query, group);
    if (kDeterministic) {
      __syncwarp();
      rings.turn.release_by_warp(n);
    }
    wgmma_wait<0>();
    settle(dk);
    rings.queries.release_by_warp(n);
  }
  settle(dv);
  store_gradient(dv, 1.f, values, dv_map, work, group);
  // Both warpgroups have read all keys for dq.
  barrier_sync(1, kGroups * kGroupThreads);
  store_gradient(dk, kScale, keys, dk_map, work, group);
  if (threadIdx.x % kGroupThreads == 0) store_box_wait_read();
}

// a block of keys of a head a block
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_flash_wgmma(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
    const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
    const float* __restrict__ stats, float* __restrict__ dq_sum, u32* __restrict__ turns,
    int seqlen) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings rings(shared_address(shared));
  const Work work(seqlen);
  if (threadIdx.x == 0) {
    rings.inputs.init();
    rings.queries.init();
    rings.dout.init();
    rings.turn.init();
    barrier_init_fence();
  }
  __syncthreads();
  // The same for all lanes, which the compiler has to know.
  const int group = __shfl_sync(kFullWarp, threadIdx.x / kGroupThreads, 0);
  if (group == kGroups) {
    registers_down<24>();
    // By warps, or the two would share registers and spill.
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize % 4, 0);
    if (warp == 0) {
      if (threadIdx.x % kWarpSize == 0) produce(rings, q, k, v, dout, stats, work);
    } else if (kDeterministic && warp == 1) {
      if (threadIdx.x % kWarpSize == 0) take_turns(rings, turns, work);
    }
  } else {
    registers_up<240>();
    consume(rings, dk, dv, dq_sum, work, group);
  }
}
