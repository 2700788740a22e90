// Attention backward for sm_90a: wgmma computes the GEMMs of the attention gradients, and tensor
// copies (TMA) load the tiles. The dk and dv of a key block stay in registers, dq is summed in
// device memory.
//
//   per block of 128 keys, for each step of 64 queries:
//     p^T = exp(k q^T / sqrt(d) - lse);  dp^T = v dout^T;  ds^T = p^T (dp^T - delta)
//     dv += p^T dout;  dk += ds^T q;  dq_sum += ds k
//
// backward_flash_mma has the kernels that run before and after this one, and defines the layouts of
// the row statistics and of dq_sum.
//
// Threads: each thread block has two compute warpgroups, which own 64 keys each and have 240
// registers a thread. In the third warpgroup of a thread block, which keeps 24 registers a thread,
// one thread issues the tensor copies. The accumulators of p^T and ds^T have keys as rows, so wgmma
// reads them as operands from the registers where they were computed. Each compute warpgroup also
// writes its ds^T to shared memory, because dq sums over the keys of both warpgroups. Each compute
// warpgroup computes half of dq's columns in every step, or at d = 64 all columns in every other
// step. A thread block steps through all query heads that share its keys, so that dk and dv are
// summed over these heads in registers. Several thread blocks may share a key block: each handles
// some of the query heads that read the keys, or some query steps if the last round is partly
// filled. Thread blocks that share a key block add dk and dv to fp32 sums in device memory; the
// last thread block to arrive rounds the sums and stores them. With fewer query heads per thread
// block, the thread blocks that run at the same time read fewer heads, whose tiles then fit into
// L2. A build with -DWHOLE=1, for short heads, has persistent thread blocks, which compute whole
// heads, one key block after the other. In a WHOLE build, each thread sums its elements of a step's
// dq over the key blocks of the head, in a fixed order. In a WHOLE build, each thread block has its
// own dq sums in device memory, which stay in L2 and are rounded after the head's last key block.
// In a WHOLE build no other thread block adds to dq: no launch zeroes dq before, and no launch
// rounds dq after. A WHOLE build has two stages of keys and values in shared memory. A build with
// -DWIDE=1, for long heads of 128 bf16, has steps of 80 queries: fewer shared-memory reads of keys
// and values, and fewer waits between warpgroups. In a WIDE build, registers hold only the rounded
// probabilities, so ds^T is a product of rounded factors. In a WIDE build, each compute warpgroup
// computes half of the rows of dq^T; a second kernel transposes and rounds the dq sums. Shared
// memory: keys, values; two stages each of queries with row statistics, of dout, and of ds^T, so
// that a step can write ds^T while the previous one is read. All tiles in shared memory except the
// row statistics consist of columns of 64 elements, whose rows of 128 bytes have wgmma's swizzle.
// Layout: the tensor maps contain the strides of the batches, heads and rows of each tensor.
//
// Overlap: a warpgroup computes the exponentials during the GEMM of dp, computes ds during the GEMM
// of dv, and adds dq to memory during the GEMM of dk. While one compute warpgroup computes
// exponentials, the other compute warpgroup keeps the tensor cores busy. Starting the next step's q
// k^T before this step's dq would need more registers than a thread has. wgmma could read dk's
// operand ds^T from shared memory instead of registers, which would free registers but was slower.
// Order of addition: thread blocks add to dq in no fixed order; those that share a key block also
// add to dk and dv in no fixed order. A build with -DDETERMINISTIC=1 fixes the order of additions
// to dq: a counter in device memory for each query step names the key block that may add next. A
// second thread of the copying warpgroup waits for the turn counter and advances it, so compute
// threads wait only until their thread block's turn. In the fixed order, key blocks add to dq in
// the order in which they start, so no thread block waits for one that has not started. With full
// attention and the fixed order, key blocks go through the query steps upwards, each one step
// behind the previous key block. With a causal mask and the fixed order, every key block starts at
// its diagonal and goes through the query steps downwards, so no thread block waits.
//
// Bound: tensor cores, 10 b h s^2 d FLOPs (half if causal). Shared-memory bandwidth is nearly a
// second bound: a wgmma of 64 columns reads 128 bytes of shared memory a cycle, all that is
// available. A wgmma reads half of these bytes if one operand is in registers, as keys and values
// are at d = 64. Against backward_flash_mma: tensor cores read operands from shared memory without
// loading them into registers, and copies take no time of compute threads.
#include "attention/shape.cuh"
#include "attention/warpgroup/gemm.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/tensor_copy.cuh"
#include "common/wgmma/ring.cuh"

constexpr int kGroups = 2, kGroupThreads = 128, kThreads = THREADS;
constexpr bool kDeterministic = DETERMINISTIC != 0;  // dq is summed in a fixed order
constexpr bool kGrouped = GROUPED != 0;  // a block has some of the heads that share keys
constexpr bool kWhole = WHOLE != 0;      // a block has all keys of a head
constexpr bool kWide = WIDE != 0;        // steps of 80 queries
// With kOneHead, a thread block processes the queries of a single head. With a single query head
// the loop over query steps has no branch for the head, so the compiler orders its instructions
// better.
constexpr bool kOneHead = kWide && !kDeterministic;
// With kKeyBlocksAreShared, several thread blocks may compute the gradients of the same key block.
constexpr bool kKeyBlocksAreShared = kGrouped || (!kDeterministic && !kWhole && !kCausal);
constexpr int kKeys = TILE_KEYS, kQueries = kWide ? 80 : 64;  // of a block, of a step
// Number of rows in one tile of row statistics and of the dq sums: one query step at d = 128, two
// at d = 64.
constexpr int kTileRows = TILE_QUERIES;
// At d = 64 registers are left: each warpgroup keeps its keys and values in registers as operands,
// and the warpgroups take turns in adding dq. At d = 128 both warpgroups read keys and values from
// shared memory, and each adds half of the columns of every step's dq.
constexpr bool kOperandsStayInRegisters = kHeadDim == 64;
constexpr int kDqGroups = kOperandsStayInRegisters ? 1 : kGroups;  // of a step
constexpr int kDqColumns = kHeadDim / kDqGroups;         // of a warpgroup
constexpr int kDqValues = kWide ? kQueries / 2 : kDqColumns / 2;  // of a thread
constexpr int kColumns = kHeadDim / 64;                           // 64-element columns of a tile
// Number of thread blocks in a set of heads that run together under a causal mask: about as many as
// the GPU has multiprocessors.
constexpr int kConcurrentBlocks = 128;
constexpr int kMinStepsForLockstep = 4096 / kQueries;  // of a head from which blocks keep in step
constexpr int kStatsBytes = 2 * kQueries * 4;          // row statistics lse and delta
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

using Inputs = SharedMemoryCopyRing<kInputStages, 2 * kKeysBytes, kWhole ? kGroups : 1>;
using Steps = SharedMemoryCopyRing<2, kQueriesBytes, kGroups * kGroupThreads / kWarpSize>;
// Ring with one slot that fixes the order of additions to dq: full when this thread block's turn
// has come, empty when its warps have added.
using TurnToAddDq = SharedMemoryCopyRing<1, 0, kDqGroups * kGroupThreads / kWarpSize>;

// Numbers of named barriers. Named barriers 1 (even query steps) and 2 (odd steps): both warpgroups
// have written the step's score gradients ds. Named barrier 3 + group: the warpgroup has written
// its gradient tile to shared memory. Named barrier 5: both warpgroups have read all keys of the
// key block.
constexpr u32 kWrittenBarrier = 1, kStoreBarrier = 3, kReadBarrier = 5;
struct BackwardSharedRings {
  Inputs inputs;  // keys and values, filled once for each block of keys
  Steps queries, dout;
  TurnToAddDq turn;
  u32 gradients, stats;
  __device__ __forceinline__ explicit BackwardSharedRings(u32 base)
      : inputs{base, base + kBarriersOffset},
        queries{base + kQueriesOffset, inputs.barriers + Inputs::kBarrierBytes},
        dout{base + kOutOffset, queries.barriers + Steps::kBarrierBytes},
        turn{base, dout.barriers + Steps::kBarrierBytes},
        gradients(base + kGradientsOffset),
        stats(base + kStatsOffset) {}
};

// One step of the thread block's loop over queries: the query head, counted over all batches, and
// the first query of the step.
struct QueryStep {
  int head, query;
};

// Key blocks of the grid's last round: from key block `first` on, `halves` key blocks have two
// thread blocks each, the rest `parts` each.
struct LastRoundOfKeyBlocks {
  int first, halves, parts;
};

// Work of a thread block: one key block, and the query steps whose queries see some of its keys.
//
// With a causal mask, a key block is seen by between one query step and all query steps. Thread
// blocks that run at the same time belong to a few heads. Among the thread blocks that run
// together, the key blocks with the most query steps start first, so few multiprocessors are idle
// at the end.
struct KeyBlockWork {
  int head;               // of keys, among those of all batches
  int first_head, heads;  // of queries that read it, those of the block
  int key, seqlen;
  int batch, key_heads, share;  // heads of keys a batch; of queries, those that share one
  int first, count;  // of the steps of a head of queries
  int start;         // at which of them, unless down
  bool down;         // from the last one
  int tiles;
  int parts = 1, shared = 0;  // thread blocks that have the keys; which of the shared key blocks

  __device__ __forceinline__ KeyBlockWork(int index, int seqlen, int key_heads, int share,
                                          int heads, LastRoundOfKeyBlocks last)
      : heads(heads), seqlen(seqlen), key_heads(key_heads), share(share) {
    const int blocks = (seqlen + kKeys - 1) / kKeys;
    int part = 0;
    if (kKeyBlocksAreShared && !kGrouped && index >= last.first) {
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
      const int heads_run_together = (kConcurrentBlocks + blocks - 1) / blocks;
      const int from = group / heads_run_together * heads_run_together;
      const int groups = min_of(heads_run_together, static_cast<int>(gridDim.x) / blocks - from);
      const int index_in_head_set = index - from * blocks;
      group = from + index_in_head_set % groups;
      block = index_in_head_set / groups;
    }
    first_head = group * heads;
    head = kGrouped ? first_head / share : group;
    batch = head / key_heads;
    key = block * kKeys;
    tiles = (seqlen + kTileRows - 1) / kTileRows;
    first = kCausal ? key / kQueries : 0;
    count = (seqlen + kQueries - 1) / kQueries - first;
    const bool blocks_go_in_step = heads == 1 && first + count >= kMinStepsForLockstep;
    start = blocks_go_in_step ? 0 : staggered_first_query_step();
    down = kCausal && blocks_go_in_step;
    if (kGrouped) {
      parts = share / heads;
      shared = head * blocks + block;
    } else if (kKeyBlocksAreShared && parts > 1) {
      const int end = count * (part + 1) / parts;
      first = count * part / parts;
      count = end - first;
      start = 0;
    }
  }
  __device__ __forceinline__ int staggered_first_query_step() const {
    return static_cast<int>(blockIdx.x) * 3 % count;
  }
  __device__ __forceinline__ int steps() const { return heads * count; }
  // Returns whether this key block is the last one that adds to the dq of `step`.
  __device__ __forceinline__ bool adds_last_to_dq_of(const QueryStep& step) const {
    return kCausal ? step.query / kKeys == key / kKeys : key + kKeys >= seqlen;
  }
  // Returns the index of this thread's part of the dq sum of `step` for the columns from `column`
  // on, in a WHOLE build. In a WHOLE build, the dq sums of all thread blocks have the layout
  // [block][step][columns / 64][8][128 threads][4].
  __device__ __forceinline__ int whole_dq_sum_index(const QueryStep& step, int column) const {
    const int steps_of_head = (seqlen + kQueries - 1) / kQueries;
    const int part = (blockIdx.x * steps_of_head + step.query / kQueries) * kColumns + column / 64;
    return part * (kQueries * 64) + threadIdx.x % kGroupThreads * 4;
  }
  __device__ __forceinline__ TmaBoxOrigin key_box_origin(int column, int row) const {
    return {column, row, head - batch * key_heads, batch};
  }
  __device__ __forceinline__ TmaBoxOrigin query_box_origin(int column,
      const QueryStep& step) const {
    return {column, step.query, step.head - batch * key_heads * share, batch};
  }
  // Returns the index of a query row among the query rows of all heads, where each head is padded
  // to whole tiles of rows.
  __device__ __forceinline__ i64 row(int head, int query) const {
    return static_cast<i64>(head) * tiles * kTileRows + query;
  }
  // The thread blocks of a head start at different query steps, so that they do not all add to the
  // same rows of dq at once. The thread blocks of a long head that shares no keys start at the same
  // query step: L2 then reads each query tile from memory once for all thread blocks of the head.
  // For long heads, the saved reads of query tiles outweigh the cost of adding to the same rows of
  // dq at once. With a causal mask the thread blocks start at the head's last query step, which
  // sees all key blocks; each goes down to its diagonal.
  __device__ __forceinline__ QueryStep step(int n) const {
    const int head_of_block = kOneHead || heads == 1 ? 0 : n / count;
    int index = n - head_of_block * count;
    if (!kDeterministic && !kWhole) index = down ? count - 1 - index : index + start;
    return {first_head + head_of_block,
        (first + (index < count ? index : index - count)) * kQueries};
  }
};

__device__ __forceinline__ void copy_tile_columns(u32 to, const TensorMap& map, int rows,
                                                  TmaBoxOrigin at,
                                          u32 barrier) {
#pragma unroll
  for (int column = 0; column < kColumns; ++column, at.column += 64)
    tma_load_box(to + column * rows * kColumnBytes, map, at, barrier);
}

// Numbers of key blocks and of query steps that this thread block completed before its current
// work, for the phases of the rings.
struct CompletedBlockAndStepCounts {
  int works = 0, steps = 0;
};

// Copies the tiles of one key block's work into the rings; one thread of the copying warpgroup
// executes the function.
__device__ __forceinline__ void copy_tiles_of_key_block(const BackwardSharedRings& rings,
                                                        const TensorMap& q, const TensorMap& k,
                                        const TensorMap& v, const TensorMap& dout,
                                        const float* stats, const KeyBlockWork& work,
                                        const CompletedBlockAndStepCounts& before) {
  const u32 full = rings.inputs.full(before.works), inputs = rings.inputs.stage(before.works);
  rings.inputs.begin_fill(before.works, 2 * kKeysBytes);
  const TmaBoxOrigin keys = work.key_box_origin(0, work.key);
  copy_tile_columns(inputs, k, kKeys, keys, full);
  copy_tile_columns(inputs + kValuesOffset, v, kKeys, keys, full);
  for (int i = 0; i < work.steps(); ++i) {
    const int n = before.steps + i;
    const QueryStep step = work.step(i);
    rings.queries.begin_fill(n, kQueriesBytes + kStatsBytes);
    copy_tile_columns(rings.queries.stage(n), q, kQueries, work.query_box_origin(0, step),
              rings.queries.full(n));
    // A tile of row statistics contains the lse of each of its rows, followed by the delta of each
    // of its rows.
    const float* from = stats + work.row(step.head, step.query) * 2 - step.query % kTileRows;
    const u32 to = rings.stats + n % 2 * kStatsBytes;
    bulk_copy_to_shared(to, from, kStatsBytes / 2, rings.queries.full(n));
    bulk_copy_to_shared(to + kStatsBytes / 2, from + kTileRows, kStatsBytes / 2,
        rings.queries.full(n));
    rings.dout.begin_fill(n, kQueriesBytes);
    copy_tile_columns(rings.dout.stage(n), dout, kQueries, work.query_box_origin(0, step),
        rings.dout.full(n));
  }
}

// Keeps the fixed order of the additions to dq; one thread of the copying warpgroup executes the
// function. `turns[head][step]` counts the key blocks that have added to the dq of a query step;
// all counters are zero before and after the kernel.
__device__ __forceinline__ void keep_order_of_dq_additions(const BackwardSharedRings& rings,
                                                           u32* turns, const KeyBlockWork& work) {
  const int block = work.key / kKeys;
  const bool last = kCausal ? block == 0 : work.key + kKeys >= work.seqlen;
  const int steps = work.first + work.count;  // of a head
#pragma unroll 1
  for (int n = 0; n < work.steps(); ++n) {
    const QueryStep step = work.step(n);
    const int index = step.query / kQueries;
    u32* turn = turns + static_cast<i64>(step.head) * steps + index;
    // With a causal mask, the last key block that a query step sees adds first to its dq.
    const u32 before = kCausal ? index / (kKeys / kQueries) - block : block;
    while (load_acquire_gpu_scope(turn) != before) {
    }
    mbarrier_arrive(rings.turn.full(n));
    mbarrier_wait(rings.turn.empty(n), n % 2);
    store_release(turn, last ? 0 : before + 1);
  }
}

// Replaces the scores of a query step by probabilities p^T; the lane holds the key rows `key` and
// `key` + 8.
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

// Returns two adjacent elements of p * x, rounded, where the probabilities p are fp32 or, in a WIDE
// build, already rounded.
__device__ __forceinline__ u32 multiply_and_round_pair(const float (&p)[kQueries / 2], int pair,
                                                       float x,
                                             float y) {
  return Element::pack(p[2 * pair] * x, p[2 * pair + 1] * y);
}
__device__ __forceinline__ u32 multiply_and_round_pair(const u32 (&p)[kQueries / 4], int pair,
                                                       float x,
                                             float y) {
  return Bf16::multiply(p[pair], Bf16::pack(x, y));
}

// Returns the score gradients ds, rounded, from the probabilities p and their gradients dp.
template <class Probabilities>
__device__ __forceinline__ void score_gradients(u32 (&ds)[kQueries / 4],
                                                const float (&dp)[kQueries / 2],
                                                const Probabilities& p, u32 stats) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 negated_deltas =
        load_shared_f32x2(stats + (kQueries + j * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 2 * j; i < 2 * j + 2; ++i)
      ds[i] = multiply_and_round_pair(p, i, dp[2 * i] + negated_deltas.x, dp[2 * i + 1] +
          negated_deltas.y);
  }
}

// Adds the warpgroup's columns of a step's dq, from `column` on, to the dq accumulator in device
// memory, atomically. A tile of the dq accumulator is stored as [32 x 32 pieces][16 x 8
// fragments][lane][4]. In a WIDE build, a tile of the dq accumulator is stored as [16 columns][8
// queries][lane][4]. The function computes one address: the offsets of all other elements from this
// address are compile-time constants.
__device__ __forceinline__ void add_dq_to_memory_accumulator(const float (&dq)[kDqValues],
                                                             float* dq_sum,
                                       const KeyBlockWork& work, const QueryStep& step,
                                           int column) {
  constexpr int kFragment = 128, kPiece = 8 * kFragment, kPieces = kTileRows / 32;  // of 32 columns
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const int row_in_statistics_tile = step.query % kTileRows,
      row16 = row_in_statistics_tile / 16 + warp;
  float* to = dq_sum + work.row(step.head, step.query - row_in_statistics_tile) * kHeadDim +
      lane * 4;
  to += kWide ? (column / 16 + warp) * (kQueries * 16)
              : (column / 32 * kPieces + row16 / 2) * kPiece + row16 % 2 * 4 * kFragment;
#pragma unroll
  for (int j = 0; j < kDqValues / 4; ++j)
    reduce_add_f32x4(to + (kWide ? j * kFragment : j / 4 * kPieces * kPiece + j % 4 * kFragment),
                     dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

// Adds to dq in registers the sum over the previous key blocks, which the same thread stored to
// memory.
__device__ __forceinline__ void add_stored_dq_sum(float (&dq)[kDqValues], const float* from) {
  constexpr int kPacketsAtATime = 4;  // more take too many registers
#pragma unroll
  for (int first = 0; first < kDqColumns / 8; first += kPacketsAtATime) {
    float4 x[kPacketsAtATime];
#pragma unroll
    for (int j = 0; j < kPacketsAtATime; ++j)
      x[j] = load_bypassing_l1(reinterpret_cast<const float4*>(from + (first +
          j) * kGroupThreads * 4));
#pragma unroll
    for (int j = 0; j < kPacketsAtATime; ++j) {
      float* const to = dq + 4 * (first + j);
      to[0] += x[j].x, to[1] += x[j].y, to[2] += x[j].z, to[3] += x[j].w;
    }
  }
}
__device__ __forceinline__ void store_dq_sum(const float (&dq)[kDqValues], float* to) {
#pragma unroll
  for (int j = 0; j < kDqColumns / 8; ++j)
    *reinterpret_cast<float4*>(to + j * kGroupThreads * 4) =
        make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

// Stores the warpgroup's columns of a step's finished dq, rounded, to the gradient tensor in device
// memory. The dq values pass through the warpgroup's part of the shared tile of score gradients to
// a tensor copy.
__device__ __forceinline__ void store_dq(float (&dq)[kDqValues], u32 tile,
                                         const TensorMap& map, const KeyBlockWork& work,
                                             const QueryStep& step,
                                         int column, int group) {
  // The barrier ensures that the other warpgroup has also read the score gradients that dq
  // overwrites.
  if (kDqGroups == kGroups) named_barrier_sync(kReadBarrier, kGroups * kGroupThreads);
#pragma unroll
  for (int i = 0; i < kDqValues; ++i) dq[i] *= kScale;
  u32 words[kDqValues / 2];
  round_accumulator_to_operand(words, dq);
  store_operand_rows_to_tile<kGroupRows>(tile, words, 0);
  fence_proxy_async_shared();
  named_barrier_sync(kStoreBarrier + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    tma_store_box(map, work.query_box_origin(column, step), tile);
    tma_store_commit_group();
  }
}

// The 64 rows of keys or values of a warpgroup, which are a wgmma operand in every query step. A
// wgmma of 64 columns with both operands in shared memory uses the whole shared-memory bandwidth.
template <bool kInRegisters>
struct OperandRowsOfWarpgroup;
template <>
struct OperandRowsOfWarpgroup<false> {
  u32 rows;
  __device__ __forceinline__ OperandRowsOfWarpgroup(u32 tile, int first) : rows(tile +
      first * kColumnBytes) {}
  __device__ __forceinline__ void multiply_rows_by(float (&s)[kQueries / 2], u32 b) const {
    multiply_abt<kKeys, kQueries>(s, rows, b);
  }
};
#if !WIDE
template <>
struct OperandRowsOfWarpgroup<true> {
  u32 words[kHeadDim / 4];
  __device__ __forceinline__ OperandRowsOfWarpgroup(u32 tile,
      int first) { load_operand<kKeys>(words, tile, first); }
  __device__ __forceinline__ void multiply_rows_by(float (&s)[kQueries / 2], u32 b) const {
    multiply_abt<kQueries>(s, words, b);
  }
};
#endif

// Stores the warpgroup's dk or dv, rounded, to device memory, through its rows of a shared tile
// that is no longer read.
__device__ __forceinline__ void store_gradient(float (&d)[kHeadDim / 2], float scale, u32 tile,
                                               const TensorMap& map, const KeyBlockWork& work,
                                                   int group) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) d[i] *= scale;
  u32 words[kHeadDim / 4];
  round_accumulator_to_operand(words, d);
  store_operand_rows_to_tile<kKeys>(tile, words, group * kGroupRows);
  fence_proxy_async_shared();
  named_barrier_sync(kStoreBarrier + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    for (int column = 0; column < kColumns; ++column)
      tma_store_box(map, work.key_box_origin(column * 64, work.key + group * kGroupRows),
                    tile + (column * kKeys + group * kGroupRows) * kColumnBytes);
    tma_store_commit_group();
  }
}

// Adds the warpgroup's dk and dv to the sums in device memory of all thread blocks that share the
// key block. Returns whether this warpgroup arrived last; dk and dv are then the complete sums, and
// the sums in memory are zero again.
__device__ __forceinline__ bool add_to_shared_gradients(float (&dk)[kHeadDim / 2],
                                                        float (&dv)[kHeadDim / 2], float* sums,
                                                        u32* arrived, const KeyBlockWork& work,
                                                        int group) {
  constexpr int kElements = kGroupRows * kHeadDim, kPacketStride = 4 * kGroupThreads;
  const int sum = work.shared * kGroups + group;
  const bool is_first_of_group = threadIdx.x % kGroupThreads == 0;
  float* const dk_sum =
      sums + static_cast<i64>(sum) * (2 * kElements) + threadIdx.x % kGroupThreads * 4;
  float* const dv_sum = dk_sum + kElements;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    const float* const x = dk + 4 * j;
    const float* const y = dv + 4 * j;
    reduce_add_f32x4(dk_sum + j * kPacketStride, x[0], x[1], x[2], x[3]);
    reduce_add_f32x4(dv_sum + j * kPacketStride, y[0], y[1], y[2], y[3]);
  }
  __threadfence();
  named_barrier_sync(kStoreBarrier + group, kGroupThreads);
  const u32 other_parts = static_cast<u32>(work.parts) - 1;
  const bool arrived_last = is_first_of_group && atomicAdd(arrived + sum, 1u) == other_parts;
  if (!named_barrier_any(kStoreBarrier + group, kGroupThreads, arrived_last)) return false;
  __threadfence();
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    float4* const from_dk = reinterpret_cast<float4*>(dk_sum + j * kPacketStride);
    float4* const from_dv = reinterpret_cast<float4*>(dv_sum + j * kPacketStride);
    const float4 x = load_bypassing_l1(from_dk), y = load_bypassing_l1(from_dv);
    dk[4 * j] = x.x, dk[4 * j + 1] = x.y, dk[4 * j + 2] = x.z, dk[4 * j + 3] = x.w;
    dv[4 * j] = y.x, dv[4 * j + 1] = y.y, dv[4 * j + 2] = y.z, dv[4 * j + 3] = y.w;
    *from_dk = *from_dv = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (is_first_of_group) arrived[sum] = 0;
  return true;
}

// Computes the gradients of one key block's work; each compute warpgroup executes the function for
// its 64 keys.
__device__ __forceinline__ void compute_gradients_of_key_block(const BackwardSharedRings& rings,
                                                               const TensorMap& dk_map,
                                        const TensorMap& dv_map, const TensorMap& dq_map,
                                        float* dq_sum, float* shared_sums, u32* arrived,
                                        const KeyBlockWork& work,
                                            const CompletedBlockAndStepCounts& before, int group) {
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const int first_key_of_group = work.key + group * kGroupRows;
  const int key = first_key_of_group + static_cast<int>(warp * 16 + lane / 4);
  const u32 keys = rings.inputs.stage(before.works), values = keys + kValuesOffset;
  // First column of dq that this warpgroup computes, and the shared-memory address of this column
  // of the keys.
  const int first_dq_column = group % kDqGroups * kDqColumns;
  const u32 keys_at_dq_column = keys + first_dq_column / 64 * kKeys * kColumnBytes;
  float dk[kHeadDim / 2], dv[kHeadDim / 2], s[kQueries / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
  rings.inputs.wait(before.works);
  const OperandRowsOfWarpgroup<kOperandsStayInRegisters> key_rows(keys, group * kGroupRows);
  const OperandRowsOfWarpgroup<kOperandsStayInRegisters> value_rows(values, group * kGroupRows);
#pragma unroll 1
  for (int i = 0; i < work.steps(); ++i) {
    const int n = before.steps + i;
    const QueryStep step = work.step(i);
    const u32 stats = rings.stats + n % 2 * kStatsBytes;
    float dp[kQueries / 2];
    u32 p[kQueries / 4], ds[kQueries / 4];
    rings.queries.wait(n);
    key_rows.multiply_rows_by(s, rings.queries.stage(n));
    rings.dout.wait(n);
    value_rows.multiply_rows_by(dp, rings.dout.stage(n));
    // The thread that started the stores of the previous key block's dk and dv waits until these
    // stores have read their tile. Then this thread releases the tile for the copies of the next
    // key block.
    if (kWhole && i == 0 && before.works > 0 && threadIdx.x % kGroupThreads == 0) {
      tma_store_wait_read();
      rings.inputs.release(before.works - 1);
    }
    wgmma_wait<1>();
    pin_accumulator(s);
    if (work.key + kKeys > work.seqlen ||
        (kCausal && step.query < first_key_of_group + kGroupRows - 1))
      exponentials<true>(s, stats, key, step.query, work.seqlen);
    else
      exponentials<false>(s, stats, key, step.query, work.seqlen);
    round_accumulator_to_operand(p, s);
    gemm_ab_from_registers(dv, p, rings.dout.stage(n));
    // The wait ensures that the GEMM of dp has finished.
    wgmma_wait<1>();
    pin_accumulator(dp);
    if (kWide)
      score_gradients(ds, dp, p, stats);
    else
      score_gradients(ds, dp, s, stats);
    const u32 gradients = rings.gradients + n % 2 * kGradientsBytes;
    if (kWhole) {
      // The store of dq of two steps ago must have read this shared tile before ds overwrites it.
      if (threadIdx.x % kGroupThreads == 0) tma_store_wait_read();
      named_barrier_sync(kStoreBarrier + group, kGroupThreads);
    }
    store_operand_rows_to_tile<kKeys>(gradients, ds, group * kGroupRows);
    fence_proxy_async_shared();
    // If the warpgroups alternate in adding dq, the warpgroup that does not add in this step goes
    // on to the next step. When both warpgroups arrive at the next step's barrier, this step's tile
    // of score gradients may be overwritten.
    const bool group_adds_dq = kDqGroups == kGroups || n % kGroups == group;
    const u32 ds_written_barrier = kWrittenBarrier + (kDqGroups == kGroups ? 0 : n % 2);
    if (group_adds_dq) {
      float dq[kDqValues];
      named_barrier_sync(ds_written_barrier, kGroups * kGroupThreads);
      if (kWide)
        multiply_atb<kKeys>(dq, keys_at_dq_column, gradients);
      else
        multiply_atb<kKeys>(dq, gradients, keys_at_dq_column);
      gemm_ab_from_registers(dk, ds, rings.queries.stage(n));
      // The wait ensures that the GEMMs of dq and of dv have finished.
      wgmma_wait<1>();
      pin_accumulator(dq);
      rings.dout.release_by_warp(n);
      if (kDeterministic) rings.turn.wait(n);
      if (kWhole) {
        float* const sum = dq_sum + work.whole_dq_sum_index(step, first_dq_column);
        if (work.key > 0) add_stored_dq_sum(dq, sum);
        if (work.adds_last_to_dq_of(step))
          store_dq(dq, gradients + group * kGroupRows * kColumnBytes, dq_map, work, step,
                   first_dq_column, group);
        else
          store_dq_sum(dq, sum);
      } else {
        add_dq_to_memory_accumulator(dq, dq_sum, work, step, first_dq_column);
      }
      if (kDeterministic) {
        __syncwarp();
        rings.turn.release_by_warp(n);
      }
      wgmma_wait<0>();
    } else {
      named_barrier_arrive(ds_written_barrier, kGroups * kGroupThreads);
      gemm_ab_from_registers(dk, ds, rings.queries.stage(n));
      wgmma_wait<0>();
      rings.dout.release_by_warp(n);
    }
    pin_accumulator(dv);
    pin_accumulator(dk);
    rings.queries.release_by_warp(n);
  }
  pin_accumulator(dv);
  if (kKeyBlocksAreShared && work.parts > 1 &&
      !add_to_shared_gradients(dk, dv, shared_sums, arrived, work, group)) {
    named_barrier_arrive(kReadBarrier, kGroups * kGroupThreads);
    return;
  }
  store_gradient(dv, 1.f, values, dv_map, work, group);
  // The barrier ensures that both warpgroups have read all keys for dq before dk and dv overwrite
  // the keys' tile.
  named_barrier_sync(kReadBarrier, kGroups * kGroupThreads);
  store_gradient(dk, kScale, keys, dk_map, work, group);
  if (!kWhole && threadIdx.x % kGroupThreads == 0) tma_store_wait_read();
}

// Calls `visit` with each key block of each head that this persistent thread block computes, out of
// `items` heads.
template <class Visit>
__device__ __forceinline__ void visit_key_blocks_of_heads(int seqlen, int key_heads, int share,
                                                          int items, Visit visit) {
  const int blocks = (seqlen + kKeys - 1) / kKeys;
  CompletedBlockAndStepCounts before;
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, ++before.works) {
      const KeyBlockWork work(item * blocks + block, seqlen, key_heads, share, share, {});
      visit(work, before);
      before.steps += work.steps();
    }
  }
}

// Each batch has `key_heads` key heads, and `share` query heads read each key head. A thread block
// computes one key block for `heads` of the query heads that share the keys, and in the last round
// for some of their query steps. `counters` are turn counters or arrival counters of shared key
// blocks; `counters` and `shared_sums` are zero before and after the kernel. Only a WHOLE build
// stores dq; each of its thread blocks computes some of the `items` heads. Every build except WHOLE
// needs the dq accumulator to be zero before the launch.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_flash_wgmma(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
    const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
    const __grid_constant__ TensorMap dq, const float* __restrict__ stats,
    float* __restrict__ dq_sum, u32* __restrict__ counters, float* __restrict__ shared_sums,
    int seqlen, int key_heads, int share, int heads, int items,
    const __grid_constant__ LastRoundOfKeyBlocks last) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardSharedRings rings(shared_address(shared));
  const KeyBlockWork work(blockIdx.x, seqlen, key_heads, share, heads, last);
  if (threadIdx.x == 0) {
    rings.inputs.init();
    rings.queries.init();
    rings.dout.init();
    rings.turn.init();
    mbarrier_init_fence();
  }
  __syncthreads();
  // The shuffle makes the warpgroup index uniform over the warp, so that the compiler can rely on
  // it.
  const int group = __shfl_sync(kFullWarp, threadIdx.x / kGroupThreads, 0);
  if (group == kGroups) {
    setmaxnreg_decrease<24>();
    // The thread that copies and the thread that keeps the order are in different warps: in one
    // warp they would share registers and spill.
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize % 4, 0);
    if (warp == 0) {
      if (threadIdx.x % kWarpSize == 0) {
        auto copy = [&](const KeyBlockWork& work, const CompletedBlockAndStepCounts& before) {
          copy_tiles_of_key_block(rings, q, k, v, dout, stats, work, before);
        };
        if (kWhole)
          visit_key_blocks_of_heads(seqlen, key_heads, share, items, copy);
        else
          copy(work, {});
      }
    } else if (kDeterministic && warp == 1) {
      if (threadIdx.x % kWarpSize == 0) keep_order_of_dq_additions(rings, counters, work);
    }
  } else {
    setmaxnreg_increase<240>();
    auto compute = [&](const KeyBlockWork& work, const CompletedBlockAndStepCounts& before) {
      compute_gradients_of_key_block(rings, dk, dv, dq, dq_sum, shared_sums, counters, work, before,
          group);
    };
    if (kWhole) {
      visit_key_blocks_of_heads(seqlen, key_heads, share, items, compute);
      if (threadIdx.x % kGroupThreads == 0) tma_store_wait_read();
    } else {
      compute(work, {});
    }
  }
}

#if WIDE && !GROUPED && !DETERMINISTIC
// Rounds dq from the transposed dq sums of a WIDE build; each thread block handles one query step
// of a head and collects its rows in shared memory.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_backward_flash_wgmma_transpose(const float* __restrict__ dq_sum, u16* __restrict__ dq,
                                             int seqlen, int heads,
                                             const __grid_constant__ Strides strides) {
  constexpr int kRow = kHeadDim + 8;        // elements of a row in shared memory
  constexpr int kChunksOf8 = kHeadDim / 8;  // of a row
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
  for (int i = threadIdx.x; i < kQueries * kChunksOf8; i += kThreads) {
    const int row = i / kChunksOf8, column = i % kChunksOf8 * 8;
    if (first + row < seqlen)
      *reinterpret_cast<uint4*>(to + (first + row) * strides.row + column) =
          *reinterpret_cast<const uint4*>(tile + row * kRow + column);
  }
}
#endif
