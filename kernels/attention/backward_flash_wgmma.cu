// Attention backward for sm_90a: GEMMs use wgmma and tensor copies (TMA) load the tiles. The dk and
// dv of a key block stay in registers, dq is summed in device memory.
//
//   per block of 128 keys, for each step of 64 queries:
//     p^T = exp(k q^T / sqrt(d) - lse);  dp^T = v dout^T;  ds^T = p^T (dp^T - delta)
//     dv += p^T dout;  dk += ds^T q;  dq_sum += ds k
//
// backward_flash_mma has the kernels that run before and after this one, and defines the layouts of
// the row statistics and of dq_sum.
//
// Threads: two compute warpgroups own 64 keys each and have 240 registers a thread. In a third
// warpgroup, which keeps 24 registers a thread, one thread issues the copies. Keys are rows, so
// that p^T and ds^T are wgmma operands in the registers where they were computed. Each warpgroup
// also writes ds^T to shared memory, because dq sums over the keys of both warpgroups. Each
// warpgroup computes half of dq's columns, or at d = 64 all columns of every other step. A thread
// block steps through all query heads that share its keys, so that dk and dv are summed over these
// heads in registers.
// Several thread blocks may share a key block: each has some of the query heads that read the keys,
// or some of the query steps if the last round of key blocks would leave multiprocessors idle. They
// add dk and dv to sums in device memory; the last to arrive rounds the sums. If thread blocks have
// fewer query heads, concurrent blocks work on fewer heads, whose tiles L2 holds.
// With -DWHOLE=1, for short heads, a thread block stays on its multiprocessor and computes whole
// heads, one key block after the other. One thread sums its elements of a step's dq over these key
// blocks in a fixed order. The dq sum lies in device memory of the thread block, which L2 holds,
// and is rounded after the last key block. WHOLE needs no additions by other blocks, no zeroing
// before and no kernel after. Shared memory has two stages of keys and values.
// With -DWIDE=1, for long heads of 128 bf16, a step has 80 queries: wgmma reads keys and values
// from shared memory less often, and warpgroups wait for each other less often. Registers hold the
// probabilities only as rounded, so that ds^T is a product of rounded factors. A warpgroup computes
// half of the rows of dq^T; a second kernel transposes and rounds the sums.
// Shared memory: keys, values; two stages of queries with their row statistics; two stages of dout;
// two stages of ds^T, so that a step can write its ds^T while the previous one is still read. All
// tiles but the statistics are columns of 64 elements, whose rows of 128 bytes have wgmma's
// swizzle.
// Layout: tensor maps have the strides of batches, heads and rows of each tensor.
//
// Overlap: a warpgroup computes the exponentials while the GEMM of dp runs, ds while the GEMM of dv
// runs, and adds dq while the GEMM of dk runs. While one warpgroup computes exponentials, the other
// warpgroup keeps the tensor cores busy. Starting the next step's q k^T before this step's dq would
// need more registers than a thread has. Reading dk's operand from shared memory would free the
// registers, but is slower. Order of addition: as in backward_flash_mma, the order of additions to
// dq is not fixed, nor that of several thread blocks to dk and dv. With
// -DDETERMINISTIC=1 the order is fixed: a counter in memory for each query step names the key block
// that may add to dq next. A second thread of the copying warpgroup waits for this counter and
// advances it, so that compute threads wait only if it is another block's turn. Key blocks add in
// the order in which they start, so that no thread block waits for one that has not started. With
// full attention the order goes upwards, each key block one step behind the previous key block.
// With a causal mask the order goes downwards from the diagonal, where every key block starts, and
// no thread block waits.
//
// Bound: tensor cores, 10 b h s^2 d FLOPs (half if causal). Shared memory is close behind: a GEMM
// of 64 columns reads 128 bytes of it a cycle. The GEMM reads half of that where one operand is in
// registers, as keys and values are at d = 64.
// Against backward_flash_mma: tensor cores read operands from shared memory without loading them
// into registers, and copies take no time of compute threads.
#include "attention/shape.cuh"
#include "attention/warpgroup/gemm.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/tensor_copy.cuh"
#include "common/wgmma/ring.cuh"

constexpr int kGroups = 2, kGroupThreads = 128, kThreads = THREADS;
constexpr bool kDeterministic = DETERMINISTIC != 0;
constexpr bool kGrouped = GROUPED != 0;  // a block has some of the heads that share keys
constexpr bool kWhole = WHOLE != 0;      // a block has all keys of a head
constexpr bool kWide = WIDE != 0;        // steps of 80 queries
// A block has one head of queries. The loop over steps then has no branch, and the compiler orders
// its instructions better.
constexpr bool kOneHead = kWide && !kDeterministic && !kGrouped;
// Several blocks may have the same keys.
constexpr bool kShared = kGrouped || (!kDeterministic && !kWhole && !kCausal);
constexpr int kKeys = TILE_KEYS, kQueries = kWide ? 80 : 64;  // of a block, of a step
// Rows in one tile of row statistics and of dq_sum: one query step at d = 128, two at d = 64.
constexpr int kTileRows = TILE_QUERIES;
// At d = 64 there are registers left: warpgroups keep keys and values in registers as operands, and
// take turns in adding dq. At d = 128 both warpgroups read keys and values from shared memory, and
// each adds half of every step's dq.
constexpr bool kRegistersLeft = kHeadDim == 64;
constexpr int kDqGroups = kRegistersLeft ? 1 : kGroups;  // of a step
constexpr int kDqColumns = kHeadDim / kDqGroups;         // of a warpgroup
constexpr int kDqValues = kWide ? kQueries / 2 : kDqColumns / 2;  // of a thread
constexpr int kColumns = kHeadDim / 64;
// With a causal mask, thread blocks are ordered in sets of heads that run together: about as many
// blocks as a GPU has multiprocessors.
constexpr int kBlocksTogether = 128;
constexpr int kManySteps = 4096 / kQueries;  // of a head from which blocks keep in step
constexpr int kStatsBytes = 2 * kQueries * 4;
constexpr int kKeysBytes = kKeys * kHeadDim * 2, kQueriesBytes = kQueries * kHeadDim * 2;
constexpr int kGradientsBytes = kKeys * (kWide ? 128 : kQueries) * 2;  // of the scores
constexpr int kInputStages = kWhole ? 2 : 1;
constexpr int kValuesOffset = kKeysBytes, kQueriesOffset = kInputStages * 2 * kKeysBytes;
constexpr int kOutOffset = kQueriesOffset + 2 * kQueriesBytes;
constexpr int kGradientsOffset = kOutOffset + 2 * kQueriesBytes;
constexpr int kStatsOffset = kGradientsOffset + 2 * kGradientsBytes;
constexpr int kBarriersOffset = kStatsOffset + 2 * kStatsBytes;
constexpr int kSharedBytes = kBarriersOffset + (kInputStages + 5) * 16;

static_assert(kThreads == (kGroups + 1) * kGroupThreads, "a warpgroup copies, the others compute");
static_assert(kKeys == kGroups * kGroupRows, "a warpgroup has 64 keys");
static_assert(!kGrouped || (!kDeterministic && !kWhole), "its sums have no order");
static_assert(!kWhole || !kDeterministic, "its sums have an order, of one head");
static_assert(!kWide || (kHeadDim == 128 && kTileRows == kQueries && !kWhole),
              "its sums of dq are transposed, in memory of all blocks");
static_assert(!kWide || !kDeterministic || !kCausal, "steps do not begin at blocks of keys");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");

using Inputs = Ring<kInputStages, 2 * kKeysBytes, kWhole ? kGroups : 1>;
using Steps = Ring<2, kQueriesBytes, kGroups * kGroupThreads / kWarpSize>;
// Ring of one slot for the fixed order of additions to dq: full when it is this block's turn, empty
// when its adding warps have finished.
using Turn = Ring<1, 0, kDqGroups * kGroupThreads / kWarpSize>;

// Numbers of named barriers. Barrier 1 (even steps) or 2 (odd steps): ds of a step is written.
// Barrier 3 + group: the gradient of a warpgroup is in shared memory. Barrier 5: both warpgroups
// have read all keys.
constexpr u32 kWrittenBarrier = 1, kStoreBarrier = 3, kReadBarrier = 5;
struct Rings {
  Inputs inputs;  // keys and values, filled once for each block of keys
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

// One step of the loop over queries: the query head, counted over all batches, and the first query
// of the step.
struct Step {
  int head, query;
};

// Key blocks of the last round, each divided by query steps among several thread blocks: from key
// block `first` on, `halves` key blocks among two thread blocks each, the others among `parts`.
struct LastRound {
  int first, halves, parts;
};

// Work of a thread block: one block of keys, and the query steps that attend to some of these keys.
//
// With a causal mask, a key block has between one query step and all of them. Thread blocks that
// run together belong to a few heads. Among these blocks, the key blocks with most steps start
// first, so that few multiprocessors are idle at the end.
struct Work {
  int head;               // of keys, among those of all batches
  int first_head, heads;  // of queries that read it, those of the block
  int key, seqlen;
  int batch, key_heads, share;  // heads of keys a batch; of queries, those that share one
  int first, count;  // of the steps of a head of queries
  int start;         // at which of them, unless down
  bool down;         // from the last one
  int tiles;
  int parts = 1, shared = 0;  // thread blocks that have the keys; which of the shared key blocks

  __device__ __forceinline__ Work(int index, int seqlen, int key_heads, int share, int heads,
                                  LastRound last)
      : heads(heads), seqlen(seqlen), key_heads(key_heads), share(share) {
    const int blocks = (seqlen + kKeys - 1) / kKeys;
    int part = 0;
    if (kShared && !kGrouped && index >= last.first) {
      index -= last.first;
      if (index < 2 * last.halves) {
        parts = 2, part = index % 2, shared = index / 2;
      } else {
        index -= 2 * last.halves;
        parts = last.parts, part = index % parts, shared = last.halves + index / parts;
      }
      index = last.first + shared;
    }
    int block = index % blocks;
    int group = index / blocks;  // of so many heads of queries
    if (kCausal && kDeterministic) block = blocks - 1 - block;
    if (kCausal && !kDeterministic && !kWhole) {
      const int together = (kBlocksTogether + blocks - 1) / blocks;
      const int from = group / together * together;
      const int groups = min_of(together, static_cast<int>(gridDim.x) / blocks - from);
      const int within = index - from * blocks;
      group = from + within % groups;
      block = within / groups;
    }
    first_head = group * heads;
    head = kGrouped ? first_head / share : group;
    batch = head / key_heads;
    key = block * kKeys;
    tiles = (seqlen + kTileRows - 1) / kTileRows;
    first = kCausal ? key / kQueries : 0;
    count = (seqlen + kQueries - 1) / kQueries - first;
    const bool in_step = heads == 1 && first + count >= kManySteps;
    start = in_step ? 0 : apart();
    down = kCausal && in_step;
    if (kGrouped) {
      parts = share / heads;
      shared = head * blocks + block;
    } else if (kShared && parts > 1) {
      const int end = count * (part + 1) / parts;
      first = count * part / parts;
      count = end - first;
      start = 0;
    }
  }
  __device__ __forceinline__ int apart() const {
    return static_cast<int>(blockIdx.x) * 3 % count;
  }
  __device__ __forceinline__ int steps() const { return heads * count; }
  // Returns whether this key block is the last one that adds to dq of `step`.
  __device__ __forceinline__ bool is_last(const Step& step) const {
    return kCausal ? step.query / kKeys == key / kKeys : key + kKeys >= seqlen;
  }
  // Index of this thread's partial sum of a step's dq, beginning at a column. The layout for all
  // thread blocks is [block][step][columns / 64][8][128 threads][4].
  __device__ __forceinline__ int sum_of(const Step& step, int column) const {
    const int of_head = (seqlen + kQueries - 1) / kQueries;
    const int part = (blockIdx.x * of_head + step.query / kQueries) * kColumns + column / 64;
    return part * (kQueries * 64) + threadIdx.x % kGroupThreads * 4;
  }
  __device__ __forceinline__ BoxOrigin keys_at(int column, int row) const {
    return {column, row, head - batch * key_heads, batch};
  }
  __device__ __forceinline__ BoxOrigin queries_at(int column, const Step& step) const {
    return {column, step.query, step.head - batch * key_heads * share, batch};
  }
  // Index of a query row among the rows of all heads, where each head is padded to whole tiles.
  __device__ __forceinline__ i64 row(int head, int query) const {
    return static_cast<i64>(head) * tiles * kTileRows + query;
  }
  // Thread blocks of a head start at different query steps, so that they do not all add to the same
  // rows of dq. For long heads that share no keys, thread blocks start at the same step: L2 then
  // reads each query tile once for all blocks. The saved reads outweigh the cost of adding to the
  // same rows of dq at once. With a causal mask the common first step is the last one, to which all
  // key blocks are visible; each thread block goes down to its diagonal.
  __device__ __forceinline__ Step step(int n) const {
    const int of_heads = kOneHead || heads == 1 ? 0 : n / count;
    int index = n - of_heads * count;
    if (!kDeterministic && !kWhole) index = down ? count - 1 - index : index + start;
    return {first_head + of_heads, (first + (index < count ? index : index - count)) * kQueries};
  }
};

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, int rows, BoxOrigin at,
                                          u32 barrier) {
#pragma unroll
  for (int column = 0; column < kColumns; ++column, at.column += 64)
    copy_box(to + column * rows * kColumnBytes, map, at, barrier);
}

// Number of key blocks and of query steps that a thread block completed before its current work.
struct Before {
  int works = 0, steps = 0;
};

// Copies the tiles of a block's work; executed by one thread of the copying warpgroup.
__device__ __forceinline__ void produce(const Rings& rings, const TensorMap& q, const TensorMap& k,
                                        const TensorMap& v, const TensorMap& dout,
                                        const float* stats, const Work& work,
                                        const Before& before) {
  const u32 full = rings.inputs.full(before.works), inputs = rings.inputs.stage(before.works);
  rings.inputs.begin_fill(before.works, 2 * kKeysBytes);
  const BoxOrigin keys = work.keys_at(0, work.key);
  copy_tile(inputs, k, kKeys, keys, full);
  copy_tile(inputs + kValuesOffset, v, kKeys, keys, full);
  for (int i = 0; i < work.steps(); ++i) {
    const int n = before.steps + i;
    const Step step = work.step(i);
    rings.queries.begin_fill(n, kQueriesBytes + kStatsBytes);
    copy_tile(rings.queries.stage(n), q, kQueries, work.queries_at(0, step),
              rings.queries.full(n));
    // A tile of row statistics holds the lse of all its rows, then the delta of all its rows.
    const float* from = stats + work.row(step.head, step.query) * 2 - step.query % kTileRows;
    const u32 to = rings.stats + n % 2 * kStatsBytes;
    copy_bulk(to, from, kStatsBytes / 2, rings.queries.full(n));
    copy_bulk(to + kStatsBytes / 2, from + kTileRows, kStatsBytes / 2, rings.queries.full(n));
    rings.dout.begin_fill(n, kQueriesBytes);
    copy_tile(rings.dout.stage(n), dout, kQueries, work.queries_at(0, step), rings.dout.full(n));
  }
}

// Keeps the order of additions to dq; executed by one thread. `turns` counts the key blocks that
// have added to each query step of each head; the counters are zero before and after the kernel.
__device__ __forceinline__ void take_turns(const Rings& rings, u32* turns, const Work& work) {
  const int block = work.key / kKeys;
  const bool last = kCausal ? block == 0 : work.key + kKeys >= work.seqlen;
  const int steps = work.first + work.count;  // of a head
#pragma unroll 1
  for (int n = 0; n < work.steps(); ++n) {
    const Step step = work.step(n);
    const int index = step.query / kQueries;
    u32* turn = turns + static_cast<i64>(step.head) * steps + index;
    // With a causal mask, the last key block that is visible to a query step adds first.
    const u32 before = kCausal ? index / (kKeys / kQueries) - block : block;
    while (load_acquire(turn) != before) {
    }
    barrier_arrive_one(rings.turn.full(n));
    barrier_wait(rings.turn.empty(n), n % 2);
    store_release(turn, last ? 0 : before + 1);
  }
}

// Replaces the scores of a query step by probabilities; the lane holds the key rows `key` and `key`
// + 8.
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

// Two neighbours of p * x, rounded, from probabilities p in fp32 or, if WIDE, as rounded.
__device__ __forceinline__ u32 multiply_pair(const float (&p)[kQueries / 2], int pair, float x,
                                             float y) {
  return Element::pack(p[2 * pair] * x, p[2 * pair + 1] * y);
}
__device__ __forceinline__ u32 multiply_pair(const u32 (&p)[kQueries / 4], int pair, float x,
                                             float y) {
  return Bf16::multiply(p[pair], Bf16::pack(x, y));
}

// Returns the rounded gradients of the scores (ds), from the gradients of the probabilities (dp).
template <class Probabilities>
__device__ __forceinline__ void score_gradients(u32 (&ds)[kQueries / 4],
                                                const float (&dp)[kQueries / 2],
                                                const Probabilities& p, u32 stats) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 minus_delta =
        load_shared_f32x2(stats + (kQueries + j * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 2 * j; i < 2 * j + 2; ++i)
      ds[i] = multiply_pair(p, i, dp[2 * i] + minus_delta.x, dp[2 * i + 1] + minus_delta.y);
  }
}

// Adds the warpgroup's columns of a step's dq, beginning at `column`, to the accumulator in device
// memory. A tile of the accumulator is stored as [32 x 32 pieces][16 x 8 fragments][lane][4].
// If WIDE, a tile is stored as [16 columns][8 queries][lane][4]. There is one address: the others
// are constants further.
__device__ __forceinline__ void add_dq(const float (&dq)[kDqValues], float* dq_sum,
                                       const Work& work, const Step& step, int column) {
  constexpr int kFragment = 128, kPiece = 8 * kFragment, kPieces = kTileRows / 32;  // of 32 columns
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const int in_tile = step.query % kTileRows, row16 = in_tile / 16 + warp;
  float* to = dq_sum + work.row(step.head, step.query - in_tile) * kHeadDim + lane * 4;
  to += kWide ? (column / 16 + warp) * (kQueries * 16)
              : (column / 32 * kPieces + row16 / 2) * kPiece + row16 % 2 * 4 * kFragment;
#pragma unroll
  for (int j = 0; j < kDqValues / 4; ++j)
    reduce_add_f32x4(to + (kWide ? j * kFragment : j / 4 * kPieces * kPiece + j % 4 * kFragment),
                     dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

// Adds to dq the sum of the previous key blocks, which the same thread stored.
__device__ __forceinline__ void add_sum(float (&dq)[kDqValues], const float* from) {
  constexpr int kAtATime = 4;  // more take too many registers
#pragma unroll
  for (int first = 0; first < kDqColumns / 8; first += kAtATime) {
    float4 x[kAtATime];
#pragma unroll
    for (int j = 0; j < kAtATime; ++j)
      x[j] = load_l2(reinterpret_cast<const float4*>(from + (first + j) * kGroupThreads * 4));
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      float* const to = dq + 4 * (first + j);
      to[0] += x[j].x, to[1] += x[j].y, to[2] += x[j].z, to[3] += x[j].w;
    }
  }
}
__device__ __forceinline__ void store_sum(const float (&dq)[kDqValues], float* to) {
#pragma unroll
  for (int j = 0; j < kDqColumns / 8; ++j)
    *reinterpret_cast<float4*>(to + j * kGroupThreads * 4) =
        make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

// Stores the warpgroup's columns of a step's dq to device memory. The values pass through the
// warpgroup's part of the tile of score gradients.
__device__ __forceinline__ void store_dq(float (&dq)[kDqValues], u32 tile,
                                         const TensorMap& map, const Work& work, const Step& step,
                                         int column, int group) {
  // The barrier ensures that the other warpgroup has read the score gradients as well.
  if (kDqGroups == kGroups) barrier_sync(kReadBarrier, kGroups * kGroupThreads);
#pragma unroll
  for (int i = 0; i < kDqValues; ++i) dq[i] *= kScale;
  u32 words[kDqValues / 2];
  round_to_operand(words, dq);
  store_operand<kGroupRows>(tile, words, 0);
  fence_async();
  barrier_sync(kStoreBarrier + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    store_box(map, work.queries_at(column, step), tile);
    store_box_commit();
  }
}

// The 64 rows of keys or values of a warpgroup, which are an operand in every query step. A GEMM of
// 64 columns with both operands in shared memory uses the whole shared-memory bandwidth.
template <bool kInRegisters>
struct Rows;
template <>
struct Rows<false> {
  u32 rows;
  __device__ __forceinline__ Rows(u32 tile, int first) : rows(tile + first * kColumnBytes) {}
  __device__ __forceinline__ void times(float (&s)[kQueries / 2], u32 b) const {
    multiply_abt<kKeys, kQueries>(s, rows, b);
  }
};
#if !WIDE
template <>
struct Rows<true> {
  u32 words[kHeadDim / 4];
  __device__ __forceinline__ Rows(u32 tile, int first) { load_operand<kKeys>(words, tile, first); }
  __device__ __forceinline__ void times(float (&s)[kQueries / 2], u32 b) const {
    multiply_abt<kQueries>(s, words, b);
  }
};
#endif

// Stores the warpgroup's dk or dv to device memory, through its rows of a shared tile that is no
// longer read.
__device__ __forceinline__ void store_gradient(float (&d)[kHeadDim / 2], float scale, u32 tile,
                                               const TensorMap& map, const Work& work, int group) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) d[i] *= scale;
  u32 words[kHeadDim / 4];
  round_to_operand(words, d);
  store_operand<kKeys>(tile, words, group * kGroupRows);
  fence_async();
  barrier_sync(kStoreBarrier + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    for (int column = 0; column < kColumns; ++column)
      store_box(map, work.keys_at(column * 64, work.key + group * kGroupRows),
                tile + (column * kKeys + group * kGroupRows) * kColumnBytes);
    store_box_commit();
  }
}

// Adds the warpgroup's dk and dv to the sums of all thread blocks that have the keys. Returns
// whether this one is the last of them; dk and dv are then the sums, and the memory is zero again.
__device__ __forceinline__ bool join_gradients(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2],
                                               float* sums, u32* arrived, const Work& work,
                                               int group) {
  constexpr int kSum = kGroupRows * kHeadDim, kNext = 4 * kGroupThreads;
  const int sum = work.shared * kGroups + group;
  const bool first_thread = threadIdx.x % kGroupThreads == 0;
  float* const dk_sum = sums + static_cast<i64>(sum) * (2 * kSum) + threadIdx.x % kGroupThreads * 4;
  float* const dv_sum = dk_sum + kSum;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    const float* const x = dk + 4 * j;
    const float* const y = dv + 4 * j;
    reduce_add_f32x4(dk_sum + j * kNext, x[0], x[1], x[2], x[3]);
    reduce_add_f32x4(dv_sum + j * kNext, y[0], y[1], y[2], y[3]);
  }
  __threadfence();
  barrier_sync(kStoreBarrier + group, kGroupThreads);
  const u32 others = static_cast<u32>(work.parts) - 1;
  const bool came_last = first_thread && atomicAdd(arrived + sum, 1u) == others;
  if (!barrier_any(kStoreBarrier + group, kGroupThreads, came_last)) return false;
  __threadfence();
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    float4* const from_dk = reinterpret_cast<float4*>(dk_sum + j * kNext);
    float4* const from_dv = reinterpret_cast<float4*>(dv_sum + j * kNext);
    const float4 x = load_l2(from_dk), y = load_l2(from_dv);
    dk[4 * j] = x.x, dk[4 * j + 1] = x.y, dk[4 * j + 2] = x.z, dk[4 * j + 3] = x.w;
    dv[4 * j] = y.x, dv[4 * j + 1] = y.y, dv[4 * j + 2] = y.z, dv[4 * j + 3] = y.w;
    *from_dk = *from_dv = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (first_thread) arrived[sum] = 0;
  return true;
}

// Computes the gradients of a block's work; executed by each compute warpgroup.
__device__ __forceinline__ void consume(const Rings& rings, const TensorMap& dk_map,
                                        const TensorMap& dv_map, const TensorMap& dq_map,
                                        float* dq_sum, float* shared_sums, u32* arrived,
                                        const Work& work, const Before& before, int group) {
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const int first_key = work.key + group * kGroupRows;
  const int key = first_key + static_cast<int>(warp * 16 + lane / 4);
  const u32 keys = rings.inputs.stage(before.works), values = keys + kValuesOffset;
  // First column of dq that this warpgroup computes, and the address of the same column of the
  // keys.
  const int dq_column = group % kDqGroups * kDqColumns;
  const u32 dq_keys = keys + dq_column / 64 * kKeys * kColumnBytes;
  float dk[kHeadDim / 2], dv[kHeadDim / 2], s[kQueries / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
  rings.inputs.wait(before.works);
  const Rows<kRegistersLeft> key_rows(keys, group * kGroupRows);
  const Rows<kRegistersLeft> value_rows(values, group * kGroupRows);
#pragma unroll 1
  for (int i = 0; i < work.steps(); ++i) {
    const int n = before.steps + i;
    const Step step = work.step(i);
    const u32 stats = rings.stats + n % 2 * kStatsBytes;
    float dp[kQueries / 2];
    u32 p[kQueries / 4], ds[kQueries / 4];
    rings.queries.wait(n);
    key_rows.times(s, rings.queries.stage(n));
    rings.dout.wait(n);
    value_rows.times(dp, rings.dout.stage(n));
    // The stores of the previous key block's gradients have read the tile that the next keys
    // overwrite.
    if (kWhole && i == 0 && before.works > 0 && threadIdx.x % kGroupThreads == 0) {
      store_box_wait_read();
      rings.inputs.release(before.works - 1);
    }
    wgmma_wait<1>();
    settle(s);
    if (work.key + kKeys > work.seqlen || (kCausal && step.query < first_key + kGroupRows - 1))
      exponentials<true>(s, stats, key, step.query, work.seqlen);
    else
      exponentials<false>(s, stats, key, step.query, work.seqlen);
    round_to_operand(p, s);
    multiply_ab(dv, p, rings.dout.stage(n));
    // The GEMM of dp has finished.
    wgmma_wait<1>();
    settle(dp);
    if (kWide)
      score_gradients(ds, dp, p, stats);
    else
      score_gradients(ds, dp, s, stats);
    const u32 gradients = rings.gradients + n % 2 * kGradientsBytes;
    if (kWhole) {
      // The store of dq of two steps ago must have read this buffer.
      if (threadIdx.x % kGroupThreads == 0) store_box_wait_read();
      barrier_sync(kStoreBarrier + group, kGroupThreads);
    }
    store_operand<kKeys>(gradients, ds, group * kGroupRows);
    fence_async();
    // If the warpgroups alternate in adding dq, the warpgroup that does not add goes on to the next
    // step. When it arrives at the next step's barrier, this step's tile of score gradients may be
    // overwritten.
    const bool adds = kDqGroups == kGroups || n % kGroups == group;
    const u32 written = kWrittenBarrier + (kDqGroups == kGroups ? 0 : n % 2);
    if (adds) {
      float dq[kDqValues];
      barrier_sync(written, kGroups * kGroupThreads);
      if (kWide)
        multiply_atb<kKeys>(dq, dq_keys, gradients);
      else
        multiply_atb<kKeys>(dq, gradients, dq_keys);
      multiply_ab(dk, ds, rings.queries.stage(n));
      // The GEMMs of dq and of dv have finished.
      wgmma_wait<1>();
      settle(dq);
      rings.dout.release_by_warp(n);
      if (kDeterministic) rings.turn.wait(n);
      if (kWhole) {
        float* const sum = dq_sum + work.sum_of(step, dq_column);
        if (work.key > 0) add_sum(dq, sum);
        if (work.is_last(step))
          store_dq(dq, gradients + group * kGroupRows * kColumnBytes, dq_map, work, step,
                   dq_column, group);
        else
          store_sum(dq, sum);
      } else {
        add_dq(dq, dq_sum, work, step, dq_column);
      }
      if (kDeterministic) {
        __syncwarp();
        rings.turn.release_by_warp(n);
      }
      wgmma_wait<0>();
    } else {
      barrier_arrive(written, kGroups * kGroupThreads);
      multiply_ab(dk, ds, rings.queries.stage(n));
      wgmma_wait<0>();
      rings.dout.release_by_warp(n);
    }
    settle(dv);
    settle(dk);
    rings.queries.release_by_warp(n);
  }
  settle(dv);
  if (kShared && work.parts > 1 && !join_gradients(dk, dv, shared_sums, arrived, work, group)) {
    barrier_arrive(kReadBarrier, kGroups * kGroupThreads);
    return;
  }
  store_gradient(dv, 1.f, values, dv_map, work, group);
  // The barrier ensures that both warpgroups have read all keys for dq.
  barrier_sync(kReadBarrier, kGroups * kGroupThreads);
  store_gradient(dk, kScale, keys, dk_map, work, group);
  if (!kWhole && threadIdx.x % kGroupThreads == 0) store_box_wait_read();
}

// Calls `visit` with each key block of each head that this thread block computes, of `items` heads.
template <class Visit>
__device__ __forceinline__ void visit_heads(int seqlen, int key_heads, int share, int items,
                                            Visit visit) {
  const int blocks = (seqlen + kKeys - 1) / kKeys;
  Before before;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, ++before.works) {
      const Work work(item * blocks + block, seqlen, key_heads, share, share, {});
      visit(work, before);
      before.steps += work.steps();
    }
  }
}

// A batch has `key_heads` key heads, each read by `share` query heads. A thread block computes one
// key block for `heads` of the query heads that share it, and in the last round for some of the
// steps. `counters` are turns or, of shared key blocks, arrivals; they and `shared_sums` are zero
// before and after. Only a WHOLE build stores dq; its thread blocks compute some of the `items`
// heads. Every build but WHOLE needs dq_sum zeroed before.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_flash_wgmma(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
    const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
    const __grid_constant__ TensorMap dq, const float* __restrict__ stats,
    float* __restrict__ dq_sum, u32* __restrict__ counters, float* __restrict__ shared_sums,
    int seqlen, int key_heads, int share, int heads, int items,
    const __grid_constant__ LastRound last) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings rings(shared_address(shared));
  const Work work(blockIdx.x, seqlen, key_heads, share, heads, last);
  if (threadIdx.x == 0) {
    rings.inputs.init();
    rings.queries.init();
    rings.dout.init();
    rings.turn.init();
    barrier_init_fence();
  }
  __syncthreads();
  // The shuffle makes the index uniform over the warp, so that the compiler can rely on it.
  const int group = __shfl_sync(kFullWarp, threadIdx.x / kGroupThreads, 0);
  if (group == kGroups) {
    registers_down<24>();
    // Copying and keeping the order run in different warps: in one warp they would share registers
    // and spill.
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize % 4, 0);
    if (warp == 0) {
      if (threadIdx.x % kWarpSize == 0) {
        auto copy = [&](const Work& work, const Before& before) {
          produce(rings, q, k, v, dout, stats, work, before);
        };
        if (kWhole)
          visit_heads(seqlen, key_heads, share, items, copy);
        else
          copy(work, {});
      }
    } else if (kDeterministic && warp == 1) {
      if (threadIdx.x % kWarpSize == 0) take_turns(rings, counters, work);
    }
  } else {
    registers_up<240>();
    auto compute = [&](const Work& work, const Before& before) {
      consume(rings, dk, dv, dq, dq_sum, shared_sums, counters, work, before, group);
    };
    if (kWhole) {
      visit_heads(seqlen, key_heads, share, items, compute);
      if (threadIdx.x % kGroupThreads == 0) store_box_wait_read();
    } else {
      compute(work, {});
    }
  }
}

#if WIDE && !GROUPED && !DETERMINISTIC
// Rounds dq from its transposed sums; each thread block handles one query step of a head, and
// collects the columns of a row in shared memory.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_flash_wgmma_transpose(const float* __restrict__ dq_sum, u16* __restrict__ dq,
                                             int seqlen, int heads,
                                             const __grid_constant__ Strides strides) {
  constexpr int kRow = kHeadDim + 8, kEights = kHeadDim / 8;  // elements in shared memory; of a row
  __shared__ __align__(16) u16 tile[kQueries * kRow];
  const int steps = (seqlen + kQueries - 1) / kQueries;
  const int head = blockIdx.x / steps, first = (blockIdx.x - head * steps) * kQueries;
  const float4* const from = reinterpret_cast<const float4*>(dq_sum) +
                             static_cast<i64>(blockIdx.x) * (kQueries * kHeadDim / 4);
  for (int i = threadIdx.x; i < kQueries * kHeadDim / 4; i += kThreads) {
    const float4 x = from[i];
    const int lane = i % kWarpSize, fragment = i / kWarpSize;
    const int column = fragment / (kQueries / 8) * 16 + lane / 4;
    u16* const to = tile + (fragment % (kQueries / 8) * 8 + lane % 4 * 2) * kRow + column;
    to[0] = Element::from_f32(x.x * kScale), to[kRow] = Element::from_f32(x.y * kScale);
    to[8] = Element::from_f32(x.z * kScale), to[kRow + 8] = Element::from_f32(x.w * kScale);
  }
  __syncthreads();
  const int batch = head / heads;
  u16* const to = dq + strides.first_row(batch, head - batch * heads);
  for (int i = threadIdx.x; i < kQueries * kEights; i += kThreads) {
    const int row = i / kEights, column = i % kEights * 8;
    if (first + row < seqlen)
      *reinterpret_cast<uint4*>(to + (first + row) * strides.row + column) =
          *reinterpret_cast<const uint4*>(tile + row * kRow + column);
  }
}
#endif
