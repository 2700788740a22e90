// Decoding: attention forward of few queries over a long cache of keys and values, with grouped
// query heads. The decode kernel computes on the tensor cores through mma.sync.m16n8k16.
//
//   c = log2(e) / sqrt(d); for the share * queries rows of q that see the same keys:
//     S^T = k q^T;  m' = max(m, max_j S);  P^T = exp2((S^T - m') c)
//     l = l exp2((m - m') c) + sum_j P;  o^T = o^T exp2((m - m') c) + v^T P^T;  m = m'
//   out = sum_w o_w exp2((m_w - m) c) / sum_w l_w exp2((m_w - m) c) over those that shared the
//   keys
//
// Keys and values are the A operands of mma. The eight columns of the B operand are query rows of
// the heads that share keys: few query rows fill eight columns better than sixteen rows of an A
// operand. The query rows of the heads that share keys are adjacent in memory.
//
// Threads: each warp processes STEP_KEYS keys of every key tile, with its own copies, row maxima
// and row sums. The warps of a thread block do not synchronise until the thread block has processed
// its last key of a head. The key tiles of all heads form one list, and each thread block processes
// an equal, contiguous part of this list. If several thread blocks share a head, the last of them
// to finish combines their partial outputs, always in the same order. Shared memory: Shared memory:
// for each warp STAGES steps of keys and values, in 16-bit rows with 16-byte chunks XOR-swizzled by
// row; later o, m and l of each warp. Bound: memory, 4 keys d bytes for each key-value head. The
// asynchronous copies keep STAGES - 1 of STAGES steps of keys and values in flight. Against
// forward_flash_mma: query heads that share keys read them once, several thread blocks can share a
// head's keys, and a tile has eight query rows instead of 128.
#include "attention/shape.cuh"
#include "common/fragments.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kStages = STAGES;
constexpr int kRows = TILE_ROWS;      // rows of q per thread block
constexpr int kStepKeys = STEP_KEYS;  // keys per warp and step
constexpr int kTileKeys = kWarps * kStepKeys;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kRowChunks = kRowBytes / 16;                           // 16-byte chunks of a row
constexpr int kCopyRows = static_cast<int>(kWarpSize) / kRowChunks;  // rows a warp copies at once
constexpr int kM = kStepKeys / 16;                                   // matrix tiles of keys,
constexpr int kN = kRows / 8;                                        // matrix tiles of rows of q,
constexpr int kD = kHeadDim / 16;  // matrix tiles of elements of a head
constexpr u32 kPartBytes = kStepKeys * kRowBytes;                    // keys, or values
constexpr u32 kStageBytes = 2 * kPartBytes;
constexpr int kPitch = kHeadDim + 4;   // floats of a row of o in shared memory
constexpr int kPieces = kHeadDim / 4;  // of a row, as the parts of a head are put together
constexpr int kPartsAtOnce = 2;        // read before the first is added
constexpr float kRescaleThreshold = 8.f / kScaleLog2;

static_assert(kStages >= 2, "a step computes while others are copied");
static_assert(kStepKeys % 16 == 0 && kRows % 8 == 0, "steps and rows are whole matrix tiles");
static_assert(kStepKeys % kCopyRows == 0, "a warp copies whole rows");
static_assert(kWarps * (kStages * kStageBytes + kRows * (kPitch + 2) * 4) == SHARED_BYTES,
              "the row declares what the tiles take");

// List of the key tiles of all units: a unit is one tile of query rows, and each of the `units`
// units has `tiles` key tiles. Each thread block processes an equal, contiguous part of the list of
// key tiles.
struct KeyTileListPart {
  int units, tiles;
  __device__ __forceinline__ i64 total() const { return static_cast<i64>(units) * tiles; }
  __device__ __forceinline__ i64 first(int block) const {
    return total() * block / static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ int block_of(i64 tile) const {
    return static_cast<int>(((tile + 1) * gridDim.x - 1) / total());
  }
};

// Partial results in device memory of thread blocks that process only a part of a unit's keys: o,
// then m and l of each query row.
struct PartialResultsInMemory {
  float* sums;
  int slots;
  __device__ __forceinline__ float* out(int partial_result_slot, int row) const {
    return sums + (static_cast<i64>(partial_result_slot) * kRows + row) * kHeadDim;
  }
  __device__ __forceinline__ float* stats(int partial_result_slot, int row) const {
    return sums + static_cast<i64>(slots) * kRows * kHeadDim +
           (static_cast<i64>(partial_result_slot) * kRows + row) * 2;
  }
};

// Four elements of an output row, summed over partial results that are relative to different row
// maxima.
struct MergedOutputElements {
  float top = negative_infinity(), sum = 0.f, x[4] = {};
  __device__ __forceinline__ void add(float maximum_of_part, float part_sum, float4 part) {
    if (maximum_of_part == negative_infinity()) return;  // saw no key
    const float merged_maximum = max_f32(top, maximum_of_part);
    const float keep = exp2_approx((top - merged_maximum) * kScaleLog2);
    const float part_output_factor = exp2_approx((maximum_of_part - merged_maximum) * kScaleLog2);
    top = merged_maximum;
    sum = sum * keep + part_sum * part_output_factor;
    x[0] = x[0] * keep + part.x * part_output_factor;
    x[1] = x[1] * keep + part.y * part_output_factor;
    x[2] = x[2] * keep + part.z * part_output_factor;
    x[3] = x[3] * keep + part.w * part_output_factor;
  }
  __device__ __forceinline__ void store(u16* to) const {
    const float inverse = 1.f / sum;
    *reinterpret_cast<uint2*>(to) = make_uint2(Element::pack(x[0] * inverse, x[1] * inverse),
                                               Element::pack(x[2] * inverse, x[3] * inverse));
  }
};

// Running softmax and unnormalised output of one warp for the query rows of its tile. A lane holds,
// of each matrix tile j, the query columns lane % 4 * 2 and the next one.
struct WarpSoftmaxAndOutput {
  float o[kN][kD][4];
  float top[kN][2];  // running maximum of the raw scores, the same in lanes of the same columns
  float sum[kN][2];  // this lane's share

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kD; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[j][i][e] = 0.f;
      top[j][0] = top[j][1] = negative_infinity();
      sum[j][0] = sum[j][1] = 0.f;
    }
  }

  // Rescales the output and the sum of a query row if the step's scores raise the row's maximum.
  __device__ __forceinline__ void raise_row_maxima(const float (&s)[kM][kN][4]) {
    float best[kN][2];
    bool grow = false;
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        best[j][h] = max_f32(s[0][j][h], s[0][j][h + 2]);
#pragma unroll
        for (int i = 1; i < kM; ++i)
          best[j][h] = max_f32(best[j][h], max_f32(s[i][j][h], s[i][j][h + 2]));
        grow |= best[j][h] > top[j][h] + kRescaleThreshold;
      }
    if (!__any_sync(kFullWarp, grow)) return;
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float merged_maximum = best[j][h];
#pragma unroll
        for (int mask = 4; mask < static_cast<int>(kWarpSize); mask *= 2)
          merged_maximum = max_f32(merged_maximum,
                                   __shfl_xor_sync(kFullWarp, merged_maximum, mask));
        merged_maximum = max_f32(merged_maximum, top[j][h]);
        const float keep =
            top[j][h] == merged_maximum ?
                1.f : exp2_approx((top[j][h] - merged_maximum) * kScaleLog2);
        top[j][h] = merged_maximum;
        sum[j][h] *= keep;
#pragma unroll
        for (int i = 0; i < kD; ++i) {
          o[j][i][h] *= keep;
          o[j][i][h + 2] *= keep;
        }
      }
  }
};

// Processes one step of the warp's keys and values, which are in shared memory. `key` is the index
// of the first key whose score the lane holds. With `mask`, a query row attends only to the keys
// below `seen`.
__device__ __forceinline__ void process_keys_of_step(WarpSoftmaxAndOutput& rows,
                                                     const u32 (&q)[kN][kD][2], u32 k_lane,
                                        u32 v_lane, int key, const int (&seen)[kN][2], bool mask) {
  float s[kM][kN][4];
  clear(s);
#pragma unroll
  for (int step = 0; step < kD; ++step)
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      u32 a[4];
      ldmatrix_x4(a, (k_lane ^ (step * 32)) + i * 16 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kN; ++j) Element::mma(s[i][j], a, q[j][step][0], q[j][step][1]);
    }
  if (mask) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (key + i * 16 + e / 2 * 8 >= seen[j][e % 2]) s[i][j][e] = negative_infinity();
  }
  rows.raise_row_maxima(s);
  u32 p[kM][kN][2];
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)  // a row that has seen no key has no maximum
      shift[h] = rows.top[j][h] == negative_infinity() ? 0.f : -rows.top[j][h] * kScaleLog2;
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float p0 = exp2_approx(fma_f32(s[i][j][2 * half], kScaleLog2, shift[0]));
        const float p1 = exp2_approx(fma_f32(s[i][j][2 * half + 1], kScaleLog2, shift[1]));
        rows.sum[j][0] += p0;
        rows.sum[j][1] += p1;
        p[i][j][half] = movmatrix_trans(Element::pack(p0, p1));
      }
  }
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      u32 a[4];
      ldmatrix_x4_trans(a, (v_lane ^ (d * 32)) + i * 16 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kN; ++j) Element::mma(rows.o[j][d], a, p[i][j][0], p[i][j][1]);
    }
}

// The tensors are q and out [batch][heads_kv][share * queries][d], k and v
// [batch][heads_kv][keys][d]. There are batch * heads_kv * row_tiles units; `arrived` has a counter
// for each unit, which is zero before and after the kernel. If `causal` is 1, the last query sees
// all keys and each earlier query one key less than the next.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_flash_decode(const u16* __restrict__ q, const u16* __restrict__ k,
                                   const u16* __restrict__ v, u16* __restrict__ out,
                                   float* __restrict__ sums, u32* __restrict__ arrived, int units,
                                   int row_tiles, int queries, int keys, int share, int causal) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const KeyTileListPart work{units, (keys + kTileKeys - 1) / kTileKeys};
  const PartialResultsInMemory partials{sums, 2 * static_cast<int>(gridDim.x)};
  const i64 begin = work.first(blockIdx.x), end = work.first(blockIdx.x + 1);
  const int steps = static_cast<int>(end - begin), query_rows_sharing_keys = share * queries;
  float* const warps_o = reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes);
  float* const warps_stats = warps_o + kWarps * kRows * kPitch;

  // The asynchronous copies run ahead of the computation, also across the end of a unit.
  const u32 ring = shared_address(shared) + warp * kStages * kStageBytes;
  const int copy_row = lane / kRowChunks, copy_chunk = lane % kRowChunks;
  int copy_unit = static_cast<int>(begin / work.tiles);
  int copy_tile = static_cast<int>(begin % work.tiles);
  auto copy = [&](int step) {
    if (step < steps) {
      const int key = copy_tile * kTileKeys + warp * kStepKeys + copy_row;
      const i64 from =
          (static_cast<i64>(copy_unit / row_tiles) * keys + key) * kHeadDim + copy_chunk * 8;
      const u32 to = ring + static_cast<u32>(step % kStages) * kStageBytes;
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int row = 0; row < kStepKeys; row += kCopyRows)
          cp_async_16_bytes_or_zeros(
              to + part * kPartBytes + swizzled_chunk_offset<kRowBytes>(copy_row + row, copy_chunk),
              (part == 0 ? k : v) + from + row * kHeadDim, key + row < keys);
      if (++copy_tile == work.tiles) {
        copy_tile = 0;
        ++copy_unit;
      }
    }
    cp_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) copy(step);

  int unit = static_cast<int>(begin / work.tiles), tile = static_cast<int>(begin % work.tiles);
  const u32 k_lane = ring + ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane);
  const u32 v_lane = ring + kPartBytes + ldmatrix_lane_address_columns_by_k<kRowBytes>(0, lane);
  for (int step = 0; step < steps;) {
    const int row0 = unit % row_tiles * kRows;  // of the rows that share a head of keys
    const i64 first_query_row_of_unit =
        static_cast<i64>(unit / row_tiles) * query_rows_sharing_keys + row0;
    u32 q_fragments[kN][kD][2];
    int seen[kN][2];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int row = j * 8 + lane / 4;
      const u32* from =
          reinterpret_cast<const u32*>(q + (first_query_row_of_unit + row) * kHeadDim) + lane % 4;
#pragma unroll
      for (int i = 0; i < kD; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q_fragments[j][i][half] =
              row0 + row < query_rows_sharing_keys ? from[i * 8 + half * 4] : 0u;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        seen[j][h] =
            keys - causal * (queries - 1 - (row0 + j * 8 + lane % 4 * 2 + h) % queries);
    }
    WarpSoftmaxAndOutput rows;
    rows.clear();
    const bool starts_at_first_key_tile = tile == 0;
    const int end_step_of_unit = min_of(steps, step + work.tiles - tile);
    // Every query sees the keys before this key.
    const int keys_seen_by_all_queries = keys - causal * (queries - 1);
#pragma unroll 1
    for (; step < end_step_of_unit; ++step, ++tile) {
      cp_async_wait<kStages - 2>();
      __syncwarp();
      copy(step + kStages - 1);
      const u32 stage = static_cast<u32>(step % kStages) * kStageBytes;
      const int key = tile * kTileKeys + warp * kStepKeys;
      process_keys_of_step(rows, q_fragments, k_lane + stage, v_lane + stage, key + lane / 4, seen,
              key + kStepKeys > keys_seen_by_all_queries);
    }

    // Combines the outputs of the thread block's warps in shared memory.
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * kRows + j * 8 + lane % 4 * 2 + h;
#pragma unroll
        for (int i = 0; i < kD; ++i) {
          warps_o[row * kPitch + i * 16 + lane / 4] = rows.o[j][i][h];
          warps_o[row * kPitch + i * 16 + 8 + lane / 4] = rows.o[j][i][h + 2];
        }
        float sum = rows.sum[j][h];
#pragma unroll
        for (int mask = 4; mask < static_cast<int>(kWarpSize); mask *= 2)
          sum += __shfl_xor_sync(kFullWarp, sum, mask);
        if (lane / 4 == 0) {
          warps_stats[row * 2] = rows.top[j][h];
          warps_stats[row * 2 + 1] = sum;
        }
      }
    __syncthreads();
    const bool covers_whole_unit = starts_at_first_key_tile && tile == work.tiles;
    const int partial_result_slot = 2 * static_cast<int>(blockIdx.x) + starts_at_first_key_tile;
    const int pieces = min_of(kRows, query_rows_sharing_keys - row0) * kPieces;
    for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
      const int row = piece / kPieces, column = piece % kPieces * 4;
      MergedOutputElements merged;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int from = w * kRows + row;
        merged.add(warps_stats[from * 2], warps_stats[from * 2 + 1],
                   *reinterpret_cast<const float4*>(&warps_o[from * kPitch + column]));
      }
      if (covers_whole_unit) {
        merged.store(out + (first_query_row_of_unit + row) * kHeadDim + column);
      } else {
        *reinterpret_cast<float4*>(partials.out(partial_result_slot, row) + column) =
            make_float4(merged.x[0], merged.x[1], merged.x[2], merged.x[3]);
        if (column == 0) {
          partials.stats(partial_result_slot, row)[0] = merged.top;
          partials.stats(partial_result_slot, row)[1] = merged.sum;
        }
      }
    }
    if (!covers_whole_unit) {
      const int first = work.block_of(static_cast<i64>(unit) * work.tiles);
      const int last_block_of_unit = work.block_of(static_cast<i64>(unit + 1) * work.tiles - 1);
      __threadfence();
      __syncthreads();
      const bool arrived_last =
          threadIdx.x == 0 && atomicAdd(arrived + unit,
                                        1u) == static_cast<u32>(last_block_of_unit - first);
      if (__syncthreads_or(arrived_last)) {
        __threadfence();
        for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
          const int row = piece / kPieces, column = piece % kPieces * 4;
          MergedOutputElements merged;
          for (int from = first; from <= last_block_of_unit; from += kPartsAtOnce) {
            float top[kPartsAtOnce], sum[kPartsAtOnce];
            float4 x[kPartsAtOnce];
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i) {
              const int block = min_of(from + i, last_block_of_unit),
                  part = 2 * block + (block == first);
              const float* stats = partials.stats(part, row);
              top[i] = load_bypassing_l1(stats);
              sum[i] = load_bypassing_l1(stats + 1);
              x[i] = load_bypassing_l1(reinterpret_cast<const float4*>(partials.out(part, row) +
                  column));
            }
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i)
              if (from + i <= last_block_of_unit) merged.add(top[i], sum[i], x[i]);
          }
          merged.store(out + (first_query_row_of_unit + row) * kHeadDim + column);
        }
        if (threadIdx.x == 0) arrived[unit] = 0;
      }
    }
    __syncthreads();  // the warps' parts are read, and may be written again
    ++unit;
    tile = 0;
  }
}
