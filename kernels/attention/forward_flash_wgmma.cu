// Attention forward in one kernel for sm_90a: GEMMs use wgmma, and tensor copies (TMA) load the
// tiles.
//
//   c = log2(e) / sqrt(d)
//   for each block of keys, last first:
//     s = q k^T;  top' = max(top, max s);  p = exp2(c (s - top'));  a = exp2(c (top - top'))
//     sum = a sum + sum p;  o = a o + p v
//   out = o / sum;  lse = top / sqrt(d) + ln(sum)
//
// Threads: three compute warpgroups process 64 queries each and have 160 registers a thread. In the
// fourth warpgroup of a thread block, which keeps 32 registers a thread, one thread issues the
// tensor copies. A thread block is persistent and takes query tiles of up to 192 queries, one after
// the other, from a list. The host makes the list of query tiles, because with a causal mask the
// work of the tiles differs much. In builds other than PARTS=3, a query tile is a whole head of up
// to 256 queries and keys, which are copied once. In these whole-head builds the warpgroups take
// the 64-query parts of a tile in rotation and go on to the next head, so they seldom wait for each
// other. Shared memory holds all keys of a head of four parts at once; otherwise a warpgroup's
// second part would wait for keys that its first part still holds. In whole-head builds a second
// copying thread copies the queries. Thread blocks process whole heads at different speeds, so they
// take heads from a counter in device memory and pass the tile to their threads through shared
// memory. Layout: the tensor maps contain the strides of the batches, heads and rows of each
// tensor. Shared memory: stages of queries, of keys and of values; the next tile's queries arrive
// in a second stage in time. A warpgroup writes its rounded output over its own queries in shared
// memory. All tiles are columns of 64 elements, whose rows of 128 bytes are swizzled for wgmma.
// Each stage in shared memory has a full barrier and an empty barrier.
//
// Overlap: a warpgroup starts q k^T of the next key block, then p v of the current one, and
// computes the next block's exponentials while p v runs. While one warpgroup computes exponentials,
// the other compute warpgroups use the tensor cores. The weights p stay in registers: the
// accumulator of q k^T has the register layout of the operand of p v. The output o is rescaled only
// if a row's maximum grows by more than 2^8; without rescaling, no p exceeds 256.
//
// In a build with -DFP8=1, q, k and v are e4m3 with one scale a head (warpgroup/gemm_e4m3.cuh). For
// an fp8 build, the kernel attention_transpose_values transposes the values before this attention
// kernel runs. In an fp8 build the softmax weights p are rounded to e4m3. In an fp8 build the
// weight at a row's maximum is 2^6, because the smallest positive e4m3 number is 2^-9. An fp8 build
// has registers for the next key block's weights p, so these are rounded while p v of the current
// block runs. An fp8 build writes no log-sum-exp.
//
// Bound: tensor cores; at d = 64 also the exp2 throughput. Against forward_flash_mma: tensor cores
// read operands from shared memory without loading them into registers, and copies take no time of
// compute threads. Three compute warpgroups share each key block: the L2 traffic for keys is a
// third of that of 64 queries alone.
#include "attention/shape.cuh"
#include "attention/warpgroup/gemm.cuh"
#include "attention/warpgroup/gemm_e4m3.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"
#include "common/tensor_copy.cuh"
#include "common/wgmma/ring.cuh"

constexpr bool kFp8 = FP8 != 0;  // q, k and v are e4m3
using Gemm = ChooseType<kFp8, AttentionGemmsE4m3, AttentionGemms16Bit>::Type;
constexpr int kGroups = 3, kGroupThreads = 128, kThreads = THREADS;
constexpr int kQueryStages = QUERY_STAGES, kKeyStages = KEY_STAGES, kValueStages = VALUE_STAGES;
constexpr int kKeys = TILE_KEYS;  // of a block
constexpr int kParts = PARTS;     // of a tile, 64 queries each
constexpr bool kPartsRotate = kParts != kGroups;  // a warpgroup's part changes from tile to tile
// Number of 64-query parts in one copy of queries: one part, or all parts of a tile.
constexpr int kPartsPerCopy = kPartsRotate ? 1 : kParts;
// Number of copies of queries from the one for a warpgroup to the next one for the same warpgroup.
constexpr int kCopiesPerRotation = kPartsRotate ? kGroups : 1;
constexpr int kRowBytes = kHeadDim * Gemm::kElementBytes;  // of queries, keys, values
constexpr int kColumns = kRowBytes / kColumnBytes;         // 128-byte columns of a tile
constexpr int kColumnElements = kColumnBytes / Gemm::kElementBytes;
constexpr int kOutputColumnBlocks = kHeadDim / 64;
// Bytes of shared memory that hold a warpgroup's queries and later its output.
constexpr int kQueriesBytes = kGroupRows * kHeadDim * 2;
constexpr int kBlockBytes = kKeys * kRowBytes;
constexpr int kTileStages = TILE_STAGES, kTileRecordBytes = 16;
constexpr int kKeysOffset = kQueryStages * kPartsPerCopy * kQueriesBytes;
constexpr int kValuesOffset = kKeysOffset + kKeyStages * kBlockBytes;
constexpr int kBarriersOffset = kValuesOffset + kValueStages * kBlockBytes;
constexpr int kTilesOffset = kBarriersOffset + 16 * (kQueryStages + kKeyStages + kValueStages);
constexpr int kSharedBytes =
    kTilesOffset + (kPartsRotate ? (kTileRecordBytes + 16) * kTileStages : 0);
// The largest softmax weight p is 2^8. A row's maximum may grow by 2^kMaxGrowthWithoutRescaleLog2
// before o is rescaled, so weights are computed relative to a maximum that is
// 2^kMaxGrowthWithoutRescaleLog2 lower. In fp8 kMaxGrowthWithoutRescaleLog2 is small, because small
// weights p would round to zero.
constexpr float kMaxGrowthWithoutRescaleLog2 = kFp8 ? 2.f : 8.f,
                kTopWeightLog2 = 8.f - kMaxGrowthWithoutRescaleLog2;

static_assert(kThreads == (kGroups + 1) * kGroupThreads, "a warpgroup copies, the others compute");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the tiles take");
static_assert(!kFp8 || kHeadDim == 128, "in fp8 a row is a column of 128 bytes");
static_assert(kQueryStages > kCopiesPerRotation, "a copy is released once the next one is read");

// Number of warps that release a stage of keys or values: the warps of all parts of a tile. A
// warpgroup without a part of a tile also waits for the tile's keys and values, because a barrier
// shows only whether its last phase was even or odd. A stage of queries belongs to one warpgroup,
// whose first thread releases the stage.
constexpr int kReadingWarpgroups = kParts > kGroups ? kParts : kGroups;
constexpr int kReadingWarps = kReadingWarpgroups * kGroupThreads / kWarpSize;
using Queries = SharedMemoryCopyRing<kQueryStages, kPartsPerCopy * kQueriesBytes, kPartsPerCopy>;
using Keys = SharedMemoryCopyRing<kKeyStages, kBlockBytes, kReadingWarps>;
using ValueBlocks = SharedMemoryCopyRing<kValueStages, kBlockBytes, kReadingWarps>;
// Ring of tile descriptions in shared memory, read by all compute warps and by the thread that
// copies queries.
using Tiles =
    SharedMemoryCopyRing<kTileStages, kTileRecordBytes, kGroups * kGroupThreads / kWarpSize + 1>;
struct ForwardSharedRings {
  Queries queries;
  Keys keys;
  ValueBlocks values;
  Tiles tiles;
  __device__ __forceinline__ explicit ForwardSharedRings(u32 base)
      : queries{base, base + kBarriersOffset},
        keys{base + kKeysOffset, queries.barriers + Queries::kBarrierBytes},
        values{base + kValuesOffset, keys.barriers + Keys::kBarrierBytes},
        tiles{base + kTilesOffset, base + kTilesOffset + kTileStages * kTileRecordBytes} {}
};

// Type of the kernel's values argument: a tensor map, or for fp8 a pointer to blocks in device
// memory that already have the layout of shared memory.
using Values = ChooseType<kFp8, const u8*, TensorMap>::Type;

// Pointers to the fp8 scales of each head's queries, keys and values.
struct Fp8ScalesOfHeads {
  const float *q, *k, *v;
};

struct AttentionSizes {
  int queries, keys;  // of a head
  int heads, share;   // heads of queries a batch; those that share a head of keys and values
  int total;          // heads of queries of all batches
};

// A query tile: rows of one head from `row` on, 64 rows for each of the first `groups` parts.
struct QueryTile {
  int row, groups, head, batch;

  // Reads query tile number `index` from this thread block's list of tiles. The lists of all thread
  // blocks have the same length; a tile with zero groups ends a list.
  static __device__ __forceinline__ QueryTile tile_from_list(const int4* tiles, int index) {
    const int4 entry = tiles[static_cast<i64>(index) * gridDim.x + blockIdx.x];
    return {entry.x, entry.y, entry.z, entry.w};
  }
  // Returns the whole head number `head_over_all_batches`, counted over all batches, as one query
  // tile. Beyond the last head the returned tile has zero groups.
  static __device__ __forceinline__ QueryTile tile_of_whole_head(const AttentionSizes& shape,
      int head_over_all_batches) {
    const int batch = head_over_all_batches / shape.heads;
    return {0, head_over_all_batches < shape.total ? kParts : 0,
        head_over_all_batches - batch * shape.heads, batch};
  }
  // Returns the index of the tile's query head among the heads of all batches.
  __device__ __forceinline__ int head_index_over_all_batches(const AttentionSizes& shape) const {
    return batch * shape.heads + head;
  }
};

// Source of a thread block's query tiles: a list that the host made, or a counter of heads that all
// thread blocks share.
struct QueryTileSource {
  const int4* list;
  u32* taken;

  // Returns the next head that no thread block has taken. A thread block begins with the head of
  // its own index and takes another head after each, so every head increments the counter once. The
  // last increment of a launch wraps the head counter to zero for the next launch.
  __device__ __forceinline__ int take_head_from_counter(const AttentionSizes& shape) const {
    return static_cast<int>(atomicInc(taken, shape.total - 1) + gridDim.x);
  }
};

__device__ __forceinline__ void publish_tile_to_block(const Tiles& ring, u32 n,
                                                      const QueryTile& tile) {
  mbarrier_wait(ring.empty(n), n / kTileStages % 2 ^ 1);
  store_shared_b128(ring.stage(n), tile.row, tile.groups, tile.head, tile.batch);
  mbarrier_arrive(ring.full(n));
}

// Returns query tile number `index` of this thread block, for the threads that did not take the
// tile from the head counter.
__device__ __forceinline__ QueryTile tile_of_block(const ForwardSharedRings& rings,
                                                   const QueryTileSource& source, int index) {
  if (kPartsRotate) {
    rings.tiles.wait(index);
    const uint4 tile = load_shared_b128(rings.tiles.stage(index));
    return {static_cast<int>(tile.x), static_cast<int>(tile.y), static_cast<int>(tile.z),
            static_cast<int>(tile.w)};
  } else {
    return QueryTile::tile_from_list(source.list, index);
  }
}

// Returns the number of key blocks that any query before index `end` sees. The last query of a head
// sees all keys.
__device__ __forceinline__ int key_blocks_seen_before(const AttentionSizes& shape, int end) {
  const int seen = kCausal ? min_of(shape.keys, end + shape.keys - shape.queries) : shape.keys;
  return seen > 0 ? (seen + kKeys - 1) / kKeys : 0;
}

template <class Blocks>
__device__ __forceinline__ void copy_key_or_value_block(const Blocks& ring, u32 n,
                                                        const TensorMap& map,
                                           int block, int head, int batch) {
  ring.begin_fill(n, kBlockBytes);
#pragma unroll
  for (int column = 0; column < kColumns; ++column)
    tma_load_box(ring.stage(n) + column * kKeys * kColumnBytes, map,
             {column * kColumnElements, block * kKeys, head, batch}, ring.full(n));
}

__device__ __forceinline__ void copy_value_block(const ValueBlocks& ring, u32 n,
                                                 const TensorMap& map,
                                            const AttentionSizes& shape, int block,
                                                const QueryTile& tile) {
  copy_key_or_value_block(ring, n, map, block, tile.head / shape.share, tile.batch);
}
__device__ __forceinline__ void copy_value_block(const ValueBlocks& ring, u32 n, const u8* values,
                                            const AttentionSizes& shape, int block,
                                                const QueryTile& tile) {
  const int blocks = (shape.keys + kKeys - 1) / kKeys;
  const int head = tile.head_index_over_all_batches(shape) / shape.share;
  ring.begin_fill(n, kBlockBytes);
  bulk_copy_to_shared(ring.stage(n), values + (static_cast<i64>(head) * blocks +
      block) * kBlockBytes,
            kBlockBytes, ring.full(n));
}

// Starts copy number n of the queries, which contains the `count` parts from part `first` on.
__device__ __forceinline__ void copy_query_parts(const Queries& ring, u32 n, const TensorMap& map,
                                             const QueryTile& tile, int first, int count) {
  ring.begin_fill(n, count * kGroupRows * kRowBytes);
  for (int i = 0; i < count * kColumns; ++i) {
    const int part = i / kColumns, column = i % kColumns;
    const u32 to = ring.stage(n) + part * kQueriesBytes;
    tma_load_box(to + column * kGroupRows * kColumnBytes, map,
             {column * kColumnElements, tile.row + (first + part) * kGroupRows, tile.head,
              tile.batch},
             ring.full(n));
  }
}

// Copies the queries of all tiles, in builds whose warpgroups take parts in rotation; one thread
// executes the function.
__device__ __forceinline__ void copy_queries_of_all_tiles(const ForwardSharedRings& rings,
                                                          const TensorMap& q,
                                                const QueryTileSource& source) {
  for (int index = 0;; ++index) {
    const QueryTile tile = tile_of_block(rings, source, index);
    if (kPartsRotate) rings.tiles.release(index);
    if (tile.groups == 0) return;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part)
      copy_query_parts(rings.queries, index * kParts + part, q, tile, part, 1);
  }
}

// Copies the keys and values of all tiles, and the queries unless another thread copies them; one
// thread executes the function.
__device__ __forceinline__ void copy_tiles_of_all_blocks(const ForwardSharedRings& rings,
                                                         const TensorMap& q, const TensorMap& k,
                                        const Values& v, const QueryTileSource& source,
                                        const AttentionSizes& shape) {
  u32 n = 0;
  int next = blockIdx.x;  // of all heads
  for (int index = 0;; ++index) {
    const QueryTile tile = kPartsRotate ? QueryTile::tile_of_whole_head(shape, next) :
        QueryTile::tile_from_list(source.list, index);
    if (kPartsRotate) publish_tile_to_block(rings.tiles, index, tile);
    if (tile.groups == 0) return;
    if (kPartsRotate) next = source.take_head_from_counter(shape);
    if (!kPartsRotate) copy_query_parts(rings.queries, index, q, tile, 0, tile.groups);
    const int head = tile.head / shape.share;
    const int blocks = key_blocks_seen_before(shape, tile.row + tile.groups * kGroupRows);
    // Keys are copied one key block ahead of values, because the scores of the next block start
    // before p v of the current one.
    for (int block = blocks; block >= 0; --block) {
      if (block > 0) copy_key_or_value_block(rings.keys, n + blocks - block, k, block - 1, head,
          tile.batch);
      if (block < blocks) copy_value_block(rings.values, n + blocks - block - 1, v, shape, block,
          tile);
    }
    n += blocks;
  }
}

// The elements that a lane holds of two query rows: rows lane / 4 and lane / 4 + 8 of its warp's 16
// rows.
struct LaneRowsOfWarpgroup {
  float o[kHeadDim / 2];
  float s[kKeys / 2];
  u32 p[kFp8 ? 2 : 1][kKeys / Gemm::kKeysPerWeightWord];  // of a block, and of the next
  float top[2], sum[2];
  float scale, growth;  // in fp8

  // Product of log2(e) and of the factor that turns q k^T into scores.
  __device__ __forceinline__ float scale_log2() const { return kFp8 ? scale : kScaleLog2; }
  // Amount by which an element of q k^T may exceed a row's running maximum before o is rescaled.
  __device__ __forceinline__ float max_growth_before_rescale() const {
    return kFp8 ? growth : kMaxGrowthWithoutRescaleLog2 / kScaleLog2;
  }
};

// Replaces the scores of a key block by softmax weights p, relative to the row's running maximum.
// Returns whether the output o must be scaled; the factors for the lane's two rows are then in
// `alpha`. The lane's row r sees the keys before limit[r], counted from the first key whose score
// the lane holds.
template <bool kMask>
__device__ __forceinline__ bool scores_to_probabilities(LaneRowsOfWarpgroup& rows,
                                                        float (&alpha)[2], const int (&limit)[2]) {
  float best[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int r = i / 2 % 2;
    if (kMask && i / 4 * 8 + i % 2 >= limit[r]) rows.s[i] = negative_infinity();
    best[r] = max_f32(best[r], rows.s[i]);
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      best[r] = max_f32(best[r], __shfl_xor_sync(kFullWarp, best[r], lanes));
  const bool any_maximum_grew =
      __any_sync(kFullWarp, best[0] > rows.top[0] + rows.max_growth_before_rescale() ||
                                best[1] > rows.top[1] + rows.max_growth_before_rescale());
  // While a query row has seen no key, its maximum is -inf.
  auto finite = [](float top) { return kMask && top == negative_infinity() ? 0.f : top; };
  if (any_maximum_grew) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = max_f32(rows.top[r], best[r]);
      alpha[r] = exp2_approx((rows.top[r] - finite(top)) * rows.scale_log2());
      rows.top[r] = top;
      rows.sum[r] *= alpha[r];
    }
  }
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    shift[r] = fma_f32(-finite(rows.top[r]), rows.scale_log2(), kTopWeightLog2);
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 2) {
    const int r = i / 2 % 2;
    rows.s[i] = exp2_approx(fma_f32(rows.s[i], rows.scale_log2(), shift[r]));
    rows.s[i + 1] = exp2_approx(fma_f32(rows.s[i + 1], rows.scale_log2(), shift[r]));
    rows.sum[r] += rows.s[i] + rows.s[i + 1];
  }
  return any_maximum_grew;
}

// Position of a lane in the 64 query rows of its warpgroup.
struct LanePosition {
  AttentionSizes shape;
  int row;     // the lane's first
  int column;  // the lane's first

  __device__ __forceinline__ void find_visible_keys(int (&limit)[2], int block) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int seen = row + 8 * r + 1 + shape.keys - shape.queries;
      limit[r] = (kCausal ? min_of(shape.keys, seen) : shape.keys) - block * kKeys - column;
    }
  }
};

// Starts the asynchronous GEMM q k^T of the scores with the keys of fill n of the key ring.
__device__ __forceinline__ void start_scores_gemm(LaneRowsOfWarpgroup& rows,
                                                  const ForwardSharedRings& rings, u32 q, u32 n) {
  rings.keys.wait(n);
  Gemm::scores(rows.s, q, rings.keys.stage(n));
}

template <int kOf>
__device__ __forceinline__ void start_values_gemm(LaneRowsOfWarpgroup& rows,
                                                  const ForwardSharedRings& rings, u32 n) {
  rings.values.wait(n);
  Gemm::values(rows.o, rows.p[kOf], rings.values.stage(n));
}

// Adds p v of fill n with the weights p[kOf], and computes the weights p[kNext] of fill n + 1, the
// next lower key block. If kOf and kNext differ, p[kNext] is rounded while p v still reads p[kOf].
template <bool kMask, int kOf, int kNext>
__device__ __forceinline__ void process_key_block(LaneRowsOfWarpgroup& rows,
                                                  const ForwardSharedRings& rings,
                                                  const LanePosition& place, u32 q, u32 n,
                                                  int block) {
  start_scores_gemm(rows, rings, q, n + 1);
  start_values_gemm<kOf>(rows, rings, n);
  wgmma_wait<1>();
  pin_accumulator(rows.s);
  rings.keys.release_by_warp(n + 1);
  int limit[2];
  if (kMask) place.find_visible_keys(limit, block);
  float alpha[2];
  const bool any_maximum_grew = scores_to_probabilities<kMask>(rows, alpha, limit);
  if (kOf != kNext) Gemm::round(rows.p[kNext], rows.s);
  wgmma_wait<0>();
  pin_accumulator(rows.o);
  rings.values.release_by_warp(n);
  if (any_maximum_grew) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.o[i] *= alpha[i / 2 % 2];
  }
  if (kOf == kNext) Gemm::round(rows.p[kNext], rows.s);
}

// Releases a stage of queries once the tensor store has read the output that was written over these
// queries.
__device__ __forceinline__ void release_queries_after_output_store(const ForwardSharedRings& rings,
                                                                   int index) {
  if (threadIdx.x % kGroupThreads != 0 || index < 0) return;
  tma_store_wait_read();
  rings.queries.release(index);
}

// Computes the attention of a warpgroup's query rows over the `seen` key blocks that they see,
// which are fills n and following of the rings.
__device__ __forceinline__ void attend_to_key_blocks(LaneRowsOfWarpgroup& rows,
                                                     const ForwardSharedRings& rings,
                                                         const LanePosition& place, u32 q,
                                       u32 n, int seen, int key_blocks_without_mask, int copy) {
  start_scores_gemm(rows, rings, q, n);
  release_queries_after_output_store(rings, copy - kCopiesPerRotation);
  wgmma_wait<0>();
  pin_accumulator(rows.s);
  rings.keys.release_by_warp(n);
  int block = seen - 1, limit[2];
  place.find_visible_keys(limit, block);
  float alpha[2];
  scores_to_probabilities<true>(rows, alpha, limit);
  Gemm::round(rows.p[0], rows.s);
  if (kCausal) {
#pragma unroll 1
    for (; block > key_blocks_without_mask; ++n)
      process_key_block<true, 0, 0>(rows, rings, place, q, n, --block);
  }
  if (kFp8) {
    constexpr int kOtherBuffer = kFp8 ? 1 : 0;
#pragma unroll 1
    for (; block > 1; n += 2) {
      process_key_block<false, 0, kOtherBuffer>(rows, rings, place, q, n, --block);
      process_key_block<false, kOtherBuffer, 0>(rows, rings, place, q, n + 1, --block);
    }
  }
#pragma unroll 1
  for (; block > 0; ++n) process_key_block<false, 0, 0>(rows, rings, place, q, n, --block);
  start_values_gemm<0>(rows, rings, n);
  wgmma_wait<0>();
  pin_accumulator(rows.o);
  rings.values.release_by_warp(n);
}

// Divides o by the row sums, writes the log-sum-exp and starts the tensor store of the output.
__device__ __forceinline__ void normalise_and_store_output(LaneRowsOfWarpgroup& rows,
                                                           const LanePosition& place,
                                                               const TensorMap& out,
                                       float* lse, const Strides& lse_strides, float value_scale,
                                       u32 staging, int group, int first_row,
                                           const QueryTile& tile) {
  const u32 lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = sum_across_lane_group<4>(rows.sum[r]);
    const float inverse = total > 0.f ? value_scale * reciprocal_approx(total) : 0.f;
    const int row = place.row + 8 * r;
    if (lse != nullptr && lane % 4 == 0 && row < place.shape.queries)
      lse[lse_strides.first_row(tile.batch, tile.head) + row * lse_strides.row] =
          (rows.top[r] * rows.scale_log2() - kTopWeightLog2 + log2_approx(total)) * kLn2;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i)
      if (i / 2 % 2 == r) rows.o[i] *= inverse;
  }
  // The barrier ensures that all warps of the warpgroup have read the queries before the output
  // overwrites them.
  named_barrier_sync(1 + group, kGroupThreads);
  u32 words[kHeadDim / 4];
  round_accumulator_to_operand(words, rows.o);
  store_operand_rows_to_tile<kGroupRows>(staging, words, 0);
  fence_proxy_async_shared();
  named_barrier_sync(1 + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    for (int column = 0; column < kOutputColumnBlocks; ++column)
      tma_store_box(out, {column * 64, first_row, tile.head, tile.batch},
                staging + column * kGroupRows * kColumnBytes);
    tma_store_commit_group();
  }
}

// Waits for and releases the key blocks from fill n on that this warpgroup does not read.
__device__ __forceinline__ void release_unread_key_blocks(const ForwardSharedRings& rings, u32 n,
                                                          int blocks) {
  for (int i = 0; i < blocks; ++i, ++n) {
    rings.keys.wait(n);
    rings.keys.release_by_warp(n);
    rings.values.wait(n);
    rings.values.release_by_warp(n);
  }
}

// Computes the attention of a warpgroup's parts of all query tiles; each compute warpgroup executes
// the function.
__device__ __forceinline__ void compute_parts_of_all_tiles(const ForwardSharedRings& rings,
                                                           const TensorMap& out, float* lse,
                                                           const Strides& lse_strides,
                                                           const Fp8ScalesOfHeads& scales,
                                                           const QueryTileSource& source,
                                                           const AttentionSizes& shape, int group) {
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  u32 first_fill = 0;              // of the tile
  int copy = kPartsRotate ? group : 0;  // of the warpgroup's next queries
  int index = 0;
  auto go_on = [&](int blocks) {
    first_fill += blocks;
    if (kPartsRotate) {
      __syncwarp();
      rings.tiles.release_by_warp(index);
    }
    ++index;
  };
  for (;;) {
    const QueryTile tile = tile_of_block(rings, source, index);
    if (tile.groups == 0) break;
    const int blocks = key_blocks_seen_before(shape, tile.row + tile.groups * kGroupRows);
    if (kPartsRotate && copy / kParts > index) {
      release_unread_key_blocks(rings, first_fill, blocks);
      go_on(blocks);
      continue;
    }
    const int part = kPartsRotate ? copy % kParts : group;
    const int first_row = tile.row + part * kGroupRows;
    const bool group_has_part = part < tile.groups;
    const int seen = group_has_part ? key_blocks_seen_before(shape, first_row + kGroupRows) : 0;
    const u32 queries = rings.queries.stage(copy) + (kPartsRotate ? 0 : group) * kQueriesBytes;
    rings.queries.wait(copy);
    // Releases the key blocks that only later parts of the tile see, without reading them.
    release_unread_key_blocks(rings, first_fill, blocks - seen);
    const u32 n = first_fill + blocks - seen;
    LaneRowsOfWarpgroup rows;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.o[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.top[r] = negative_infinity();
      rows.sum[r] = 0.f;
    }
    float value_scale = 1.f;
    if (kFp8) {
      const int head = tile.head_index_over_all_batches(shape), key_head = head / shape.share;
      rows.scale = kScaleLog2 * scales.q[head] * scales.k[key_head];
      rows.growth = kMaxGrowthWithoutRescaleLog2 / rows.scale;
      value_scale = scales.v[key_head];
    }
    const LanePosition place{shape, first_row + static_cast<int>(warp * 16 + lane / 4),
                      static_cast<int>(lane % 4) * 2};
    if (seen > 0) {
      // Every row of the part sees all keys of the key blocks before number
      // `key_blocks_without_mask`, so these blocks need no mask.
      const int key_blocks_without_mask =
          kCausal ? (first_row + 1 + shape.keys - shape.queries) / kKeys : seen;
      attend_to_key_blocks(rows, rings, place, queries, n, seen, key_blocks_without_mask, copy);
    } else {
      release_queries_after_output_store(rings, copy - kCopiesPerRotation);
    }
    if (group_has_part)
      normalise_and_store_output(rows, place, out, lse, lse_strides, value_scale, queries, group,
          first_row, tile);
    copy += kCopiesPerRotation;
    if (!kPartsRotate || copy / kParts > index) go_on(blocks);
  }
  if (threadIdx.x % kGroupThreads == 0) tma_store_wait_read();
}

// Thread blocks find their query tiles in the list `tiles`, or by the head counter `taken`, which
// is zero before and after the launch. lse may be null.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_forward_flash_wgmma(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ Values v, const __grid_constant__ TensorMap out,
    float* __restrict__ lse, const __grid_constant__ Strides lse_strides,
    const __grid_constant__ Fp8ScalesOfHeads scales, const int4* __restrict__ tiles, u32* taken,
    int queries, int keys, int heads, int share, int total) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardSharedRings rings(shared_address(shared));
  const AttentionSizes shape{queries, keys, heads, share, total};
  const QueryTileSource source{tiles, taken};
  if (threadIdx.x == 0) {
    rings.queries.init();
    rings.keys.init();
    rings.values.init();
    if (kPartsRotate) rings.tiles.init();
    mbarrier_init_fence();
  }
  __syncthreads();
  // The shuffle makes the warpgroup index uniform over the warp, so that the compiler can rely on
  // it.
  const int group = __shfl_sync(kFullWarp, threadIdx.x / kGroupThreads, 0);
  if (group == kGroups) {
    setmaxnreg_decrease<32>();
    if (threadIdx.x == kGroups * kGroupThreads) copy_tiles_of_all_blocks(rings, q, k, v, source,
        shape);
    if (kPartsRotate && threadIdx.x == kGroups * kGroupThreads + kWarpSize)
      copy_queries_of_all_tiles(rings, q, source);
  } else {
    setmaxnreg_increase<160>();
    compute_parts_of_all_tiles(rings, out, lse, lse_strides, scales, source, shape, group);
  }
}
