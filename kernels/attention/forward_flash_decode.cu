// Decoding: attention forward of few queries over a long cache of keys and values, with grouped
// query heads. One kernel, on the tensor cores through mma.sync.m16n8k16.
//
//   c = log2(e) / sqrt(d); for the share * queries rows of q that see the same keys:
//     S^T = k q^T;  m' = max(m, max_j S);  P^T = exp2((S^T - m') c)
//     l = l exp2((m - m') c) + sum_j P;  o^T = o^T exp2((m - m') c) + v^T P^T;  m = m'
//   out = sum_w o_w exp2((m_w - m) c) / sum_w l_w exp2((m_w - m) c) over those that shared the
//   keys
//
// Keys and values are the A operands of mma. The eight columns of its B operand are query rows of a
// group of heads, which fills eight columns better than sixteen rows. The query rows of a group are
// neighbours in memory.
//
// Threads: each warp processes STEP_KEYS keys of every tile, with copies, maxima and sums of its
// own. Warps do not synchronise until the block has seen its last key of a head. The key tiles of
// all heads form one list, and each block gets an equal, contiguous part of it. If several blocks
// share a head, the last of them to finish combines their partial outputs, always in the same
// order.
// Shared memory: STAGES steps of keys and values for each warp, 16-bit rows of d with 16-byte
// chunks XOR-swizzled by row; afterwards o, m and l of each warp.
// Bound: memory, 4 keys d bytes for each key-value head. The copies keep STAGES - 1 of STAGES steps
// in flight.
// Against forward_flash_mma: a group of query heads reads its keys once, several blocks can share a
// head's keys, and a tile has eight query rows instead of 128.
#include "attention/shape.cuh"
#include "common/fragments.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kStages = STAGES;
constexpr int kRows = TILE_ROWS;      // rows of q a block
constexpr int kStepKeys = STEP_KEYS;  // keys a warp and step
constexpr int kTileKeys = kWarps * kStepKeys;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kRowChunks = kRowBytes / 16;
constexpr int kCopyRows = static_cast<int>(kWarpSize) / kRowChunks;  // rows a warp copies at once
constexpr int kM = kStepKeys / 16;                                   // matrix tiles of keys,
constexpr int kN = kRows / 8;                                        // of rows of q,
constexpr int kD = kHeadDim / 16;                                    // of elements of a head
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

// List of key tiles of all units: each of the `units` tiles of query rows has `tiles` key tiles.
// Thread blocks get equal parts of this list of key tiles.
struct Work {
  int units, tiles;
  __device__ __forceinline__ i64 total() const { return static_cast<i64>(units) * tiles; }
  __device__ __forceinline__ i64 first(int block) const {
    return total() * block / static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ int block_of(i64 tile) const {
    return static_cast<int>(((tile + 1) * gridDim.x - 1) / total());
  }
};

// Partial results in device memory of blocks that process only a part of a unit's keys: o, then m
// and l of each row.
struct Partials {
  float* sums;
  int slots;
  __device__ __forceinline__ float* out(int slot, int row) const {
    return sums + (static_cast<i64>(slot) * kRows + row) * kHeadDim;
  }
  __device__ __forceinline__ float* stats(int slot, int row) const {
    return sums + static_cast<i64>(slots) * kRows * kHeadDim +
           (static_cast<i64>(slot) * kRows + row) * 2;
  }
};

// Four elements of an output row, accumulated over partial results that are relative to different
// maxima.
struct Merged {
  float top = negative_infinity(), sum = 0.f, x[4] = {};
  __device__ __forceinline__ void add(float part_top, float part_sum, float4 part) {
    if (part_top == negative_infinity()) return;  // saw no key
    const float higher = max_f32(top, part_top);
    const float keep = exp2_approx((top - higher) * kScaleLog2);
    const float take = exp2_approx((part_top - higher) * kScaleLog2);
    top = higher;
    sum = sum * keep + part_sum * take;
    x[0] = x[0] * keep + part.x * take;
    x[1] = x[1] * keep + part.y * take;
    x[2] = x[2] * keep + part.z * take;
    x[3] = x[3] * keep + part.w * take;
  }
  __device__ __forceinline__ void store(u16* to) const {
    const float inverse = 1.f / sum;
    *reinterpret_cast<uint2*>(to) = make_uint2(Element::pack(x[0] * inverse, x[1] * inverse),
                                               Element::pack(x[2] * inverse, x[3] * inverse));
  }
};

// Running softmax and output of a warp. A lane holds columns lane % 4 * 2 and the next one of
// matrix tile j.
struct Rows {
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

  // Rescales the output and sums of a query row if the step's scores raise its maximum.
  __device__ __forceinline__ void raise(const float (&s)[kM][kN][4]) {
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
        float higher = best[j][h];
#pragma unroll
        for (int mask = 4; mask < static_cast<int>(kWarpSize); mask *= 2)
          higher = max_f32(higher, __shfl_xor_sync(kFullWarp, higher, mask));
        higher = max_f32(higher, top[j][h]);
        const float keep =
            top[j][h] == higher ? 1.f : exp2_approx((top[j][h] - higher) * kScaleLog2);
        top[j][h] = higher;
        sum[j][h] *= keep;
#pragma unroll
        for (int i = 0; i < kD; ++i) {
          o[j][i][h] *= keep;
          o[j][i][h + 2] *= keep;
        }
      }
  }
};

// Processes one step of a warp's keys and values from shared memory. `key` is the lane's first key.
// With `mask`, a row attends only to keys below `seen`.
__device__ __forceinline__ void process(Rows& rows, const u32 (&q)[kN][kD][2], u32 k_lane,
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
  rows.raise(s);
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
// for each unit, which is zero before and after. If `causal` is 1, the last query sees all keys and
// each earlier query one key less than the next.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_flash_decode(const u16* __restrict__ q, const u16* __restrict__ k,
                                   const u16* __restrict__ v, u16* __restrict__ out,
                                   float* __restrict__ sums, u32* __restrict__ arrived, int units,
                                   int row_tiles, int queries, int keys, int share, int causal) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const Work work{units, (keys + kTileKeys - 1) / kTileKeys};
  const Partials partials{sums, 2 * static_cast<int>(gridDim.x)};
  const i64 begin = work.first(blockIdx.x), end = work.first(blockIdx.x + 1);
  const int steps = static_cast<int>(end - begin), head_rows = share * queries;
  float* const warps_o = reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes);
  float* const warps_stats = warps_o + kWarps * kRows * kPitch;

  // Copies run ahead of the computation, also across the end of a head.
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
          cp_async_16_or_zero(
              to + part * kPartBytes + swizzled<kRowBytes>(copy_row + row, copy_chunk),
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
  const u32 k_lane = ring + lane_by_row<kRowBytes>(0, lane);
  const u32 v_lane = ring + kPartBytes + lane_by_column<kRowBytes>(0, lane);
  for (int step = 0; step < steps;) {
    const int row0 = unit % row_tiles * kRows;  // of the rows that share a head of keys
    const i64 unit_row = static_cast<i64>(unit / row_tiles) * head_rows + row0;
    u32 q_fragments[kN][kD][2];
    int seen[kN][2];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int row = j * 8 + lane / 4;
      const u32* from =
          reinterpret_cast<const u32*>(q + (unit_row + row) * kHeadDim) + lane % 4;
#pragma unroll
      for (int i = 0; i < kD; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q_fragments[j][i][half] = row0 + row < head_rows ? from[i * 8 + half * 4] : 0u;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        seen[j][h] =
            keys - causal * (queries - 1 - (row0 + j * 8 + lane % 4 * 2 + h) % queries);
    }
    Rows rows;
    rows.clear();
    const bool from_first = tile == 0;
    const int until = min_of(steps, step + work.tiles - tile);
    const int unmasked = keys - causal * (queries - 1);  // keys before are seen by all
#pragma unroll 1
    for (; step < until; ++step, ++tile) {
      cp_async_wait<kStages - 2>();
      __syncwarp();
      copy(step + kStages - 1);
      const u32 stage = static_cast<u32>(step % kStages) * kStageBytes;
      const int key = tile * kTileKeys + warp * kStepKeys;
      process(rows, q_fragments, k_lane + stage, v_lane + stage, key + lane / 4, seen,
              key + kStepKeys > unmasked);
    }

    // Combines the outputs of the block's warps in shared memory.
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
    const bool whole = from_first && tile == work.tiles;
    const int slot = 2 * static_cast<int>(blockIdx.x) + from_first;
    const int pieces = min_of(kRows, head_rows - row0) * kPieces;
    for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
      const int row = piece / kPieces, column = piece % kPieces * 4;
      Merged merged;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int from = w * kRows + row;
        merged.add(warps_stats[from * 2], warps_stats[from * 2 + 1],
                   *reinterpret_cast<const float4*>(&warps_o[from * kPitch + column]));
      }
      if (whole) {
        merged.store(out + (unit_row + row) * kHeadDim + column);
      } else {
        *reinterpret_cast<float4*>(partials.out(slot, row) + column) =
            make_float4(merged.x[0], merged.x[1], merged.x[2], merged.x[3]);
        if (column == 0) {
          partials.stats(slot, row)[0] = merged.top;
          partials.stats(slot, row)[1] = merged.sum;
        }
      }
    }
    if (!whole) {
      const int first = work.block_of(static_cast<i64>(unit) * work.tiles);
      const int final = work.block_of(static_cast<i64>(unit + 1) * work.tiles - 1);
      __threadfence();
      __syncthreads();
      const bool came_last =
          threadIdx.x == 0 && atomicAdd(arrived + unit, 1u) == static_cast<u32>(final - first);
      if (__syncthreads_or(came_last)) {
        __threadfence();
        for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
          const int row = piece / kPieces, column = piece % kPieces * 4;
          Merged merged;
          for (int from = first; from <= final; from += kPartsAtOnce) {
            float top[kPartsAtOnce], sum[kPartsAtOnce];
            float4 x[kPartsAtOnce];
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i) {
              const int block = min_of(from + i, final), part = 2 * block + (block == first);
              const float* stats = partials.stats(part, row);
              top[i] = load_l2(stats);
              sum[i] = load_l2(stats + 1);
              x[i] = load_l2(reinterpret_cast<const float4*>(partials.out(part, row) + column));
            }
#pragma unroll
            for (int i = 0; i < kPartsAtOnce; ++i)
              if (from + i <= final) merged.add(top[i], sum[i], x[i]);
          }
          merged.store(out + (unit_row + row) * kHeadDim + column);
        }
        if (threadIdx.x == 0) arrived[unit] = 0;
      }
    }
    __syncthreads();  // the warps' parts are read, and may be written again
    ++unit;
    tile = 0;
  }
}
