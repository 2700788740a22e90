// Parts of the persistent denoise kernel: the mapping of work to thread blocks, the memory layouts,
// and the two producers.
//
// Columns of a weight are assigned in units of 8 columns (out, down) or 16 columns (qkv, gate_up)
// to 15 clusters of eight thread blocks. In a cluster:
//
//   qkv, gate_up   two slices of k, four quarters of the cluster's columns
//   out, down      eight slices of k; all of the cluster's columns, up to 72
//
// The owner of a row adds up the slices of k: each block sends its sums to the owner's shared
// memory, as bf16 (in qkv as fp32). Thread block r of a cluster owns rows 8 r to 8 r + 7 of h for
// the cluster's columns and keeps them in registers.
//
// Threads: two consumer warpgroups compute; in a third warpgroup, one thread is the weight producer
// and one warp the activation producer.
//
// Weights are bf16 or codes: fp8 (e4m3) with a power of two for each column, or int4 with a scale
// for each column and half a group (128 of k). With coded weights, a fourth warpgroup decodes the
// codes in place, so that the tensor cores read bf16. Decoding the weights is exact; all code
// besides the decoder is the same for bf16 and coded weights.
//
// Weights are loaded across grid barriers: each GEMM's weights are requested as soon as their place
// in shared memory is free, a few pieces at a time. A memory fence waits for all asynchronous
// copies in flight to its multiprocessor: with 32 KB in flight the fence takes 1700 cycles instead
// of 600. Therefore a thread block requests no weights from the end of its GEMMs until it has
// arrived at the grid barrier.
#pragma once
#include "common/bulk.cuh"
#include "common/cluster.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"
#include "common/stages.cuh"
#include "common/wgmma/tile.cuh"
#include "denoise/model.cuh"
#include "denoise/units.cuh"

static_assert(kWidth == 1024 && kMlp == 4096 && kHeads == 8 && kHeadDim == 256,
              "the split is this model's");
constexpr int kThreads = THREADS, kWorkers = 256, kDecoders = 128;  // all; computing; decoding
constexpr int kClusters = CLUSTERS, kRanks = RANKS, kBlocks = kClusters * kRanks;
constexpr int kMaxRows = MAX_ROWS, kMaxKeys = MAX_KEYS, kQueryRows = kMaxRows * kHeads;

// A panel holds 64 columns (along k) of all rows of an activation. Rows 56 to 63 of a tensor-core
// tile hold unrelated data, and the sums of these rows are never used.
constexpr int kPanelElements = kMaxRows * 64;
constexpr u32 kPanelBytes = kPanelElements * 2;

// Number of units of columns of each GEMM, and the maximum that one cluster computes (for qkv and
// gate_up a quarter of a cluster). A unit of the GEMMs qkv and gate_up has 16 columns.
constexpr int kWidthUnits = kWidth / 8, kMaxWidthUnits = 9;
constexpr int kQkvUnits = (kHeads + 2) * kHeadDim / 16, kMaxQkvUnits = 3;
constexpr int kGateUpUnits = 2 * kMlp / 16, kMaxGateUpUnits = 9;
constexpr int kFirstGroupUnits =
    5;  // of gate_up's, by the first warpgroup; the others by the second

// Regions of shared memory. Weights lie in shared memory in panels along k. The weights of qkv
// reuse the shared memory of gate_up's panels 0 to 2, those of down that of gate_up's panels 4 to
// 7.
constexpr u32 kGateUpAt = 0, kGateUpPanel = kMaxGateUpUnits * 2048;
constexpr u32 kQkvAt = 0, kQkvPanel = kMaxQkvUnits * 2048;
constexpr u32 kDownAt = 4 * kGateUpPanel, kDownPanel = kMaxWidthUnits * 1024;
constexpr u32 kXAt = 8 * kGateUpPanel;  // eight panels of an activation; out: four, and
constexpr u32 kOutAt = kXAt + 4 * kPanelBytes, kOutPanel = kMaxWidthUnits * 1024;  // its weights
constexpr u32 kPartsAt = kOutAt + 4 * kOutPanel, kPartsBytes = 18432;  // what others send
constexpr u32 kSharedBytes = kPartsAt + kPartsBytes;
constexpr u32 kRowPartBytes = 1152, kRowPartsBytes = kRanks * kRowPartBytes,
              kQkvPartsBytes = 128 * 48, kGateUpPartBytes = 128 * 8;
static_assert(8 * kQkvPanel <= 3 * kGateUpPanel && 8 * kDownPanel <= 4 * kGateUpPanel &&
                  kXAt + 8 * kPanelBytes <= kPartsAt,
              "regions overlap");
static_assert(kRowPartsBytes <= kPartsBytes &&
                  kMaxGateUpUnits * kGateUpPartBytes <= kPartsBytes,
              "parts overlap");
static_assert(kThreads == kWorkers + 128 + (kCoded ? kDecoders : 0), "who does what");
static_assert(kWorkers == 256 && kClusters == 15 && kRanks == 8 && kMaxRows == 56,
              "the split is among two warpgroups of 120 blocks");
static_assert(kSharedBytes == SHARED_BYTES, "the row declares what the regions take");
static_assert(kSharedBytes + 1024 <= 227 * 1024, "more than a multiprocessor has");

struct PersistentArguments {
  u16* h;  // [rows][width]
  const u16 *qkv, *out, *gate_up,
      *down;  // [layers][k / 64][columns / 8] units; bf16: [8][64], 16-byte chunks XOR-swizzled by
              // column
  const float *styles1, *styles2;          // [layers][steps][3 width]
  const float* final_styles;               // [steps][3 width]
  const float *shift_qkv, *shift_gate_up;  // [layers][steps][columns as packed]
  const float2* angles;                    // [rows][head_dim / 2]
  u16 *keys,
      *values;  // [layers][1024 / 16][head_dim / 16][32 lanes][8], as fragments; values transposed
  u16 *x, *q, *attended, *hidden;  // activations
  float* squares;                  // [2][56][16]: of a row of h, by cluster
  u32* counter;                    // of blocks that have arrived; 0 before
  const u16* action_out;           // [width][32]
  const float* out_bias;
  const u16* action_in;  // [32][width]
  const float* in_bias;
  float *velocity, *state;  // [rows][32]; one of them
  float dt;
  int rows, prefix, layers, steps;
};

// Returns the offset of element k of a row of an activation, in the layout [k / 64][56 rows][64]
// with swizzled 16-byte chunks.
__device__ __forceinline__ u32 activation_offset(u32 row, u32 k) {
  return k / 64 * kPanelElements + row * 64 + ((k % 64 / 8) ^ (row & 7)) * 8 + k % 8;
}
// Returns the offset of element k of a query row, in the layout [4][56 8 rows (token, head)][64].
__device__ __forceinline__ u32 query_offset(u32 row, u32 k) {
  return (k / 64 * kQueryRows + row) * 64 + ((k % 64 / 8) ^ (row & 7)) * 8 + k % 8;
}
// Returns the offset of one element of a layer's keys or values, which are stored as fragments of
// 16 keys x 16 columns. A fragment has the order in which the lanes hold it as an operand of
// wgmma_w_transposed. In fragments of keys adjacent elements are columns, in fragments of values
// adjacent elements are keys.
__device__ __forceinline__ u32 key_offset(u32 key, u32 column) {
  return (key / 16 * (kHeadDim / 16) + column / 16) * 256 + (key % 8 * 4 + column % 8 / 2) * 8 +
         (key % 16 / 8 + column % 16 / 8 * 2) * 2 + column % 2;
}
__device__ __forceinline__ u32 value_offset(u32 key, u32 column) {
  return (key / 16 * (kHeadDim / 16) + column / 16) * 256 + (column % 8 * 4 + key % 8 / 2) * 8 +
         (column % 16 / 8 + key % 16 / 8 * 2) * 2 + key % 2;
}

// Range of a GEMM's units of columns that one part of the grid computes.
struct UnitRange {
  int first, count;
  __device__ __forceinline__ UnitRange(int units, int part, int parts) {
    first = part * units / parts;
    count = (part + 1) * units / parts - first;
  }
};

// Position of a thread block in the grid, and the shared-memory addresses of its barriers.
struct BlockContext {
  u32 base;    // of shared memory
  u32 x_full;  // four: a quarter of the panels each
  u32 qkv_full, gate_up_full, out_full,
      down_full;  // a panel each; gate_up: two, for the warpgroups
  u32 qkv_free, gate_up_free, gate_up_upper_free,
      down_free;  // the weights have been read; gate_up: all, and panels 4 to 7
  u32 parts_full, second_parts_full, queries_full, rows_full,
      keys_full;  // second_parts: what gate_up's second warpgroup is sent; keys: of this layer
  u32 hold;  // a word: no weights are requested for while it is not 0
  u32 coded, pieces;  // of pieces of codes in turn: their barriers, and three words of each
  u32 x_parity = 0, parts_parity = 0;
  int cluster, rank;
  int group, warp, lane, thread;  // warpgroup, warp in it, lane, thread in the warpgroup
  static constexpr u32 kSlots = 8;  // of pieces that have been requested
  static constexpr int kBarriers = 4 + 8 + 16 + 4 + 8 + 4 + 5,
                       kWords = kBarriers + 1 + (kCoded ? kSlots * 3 : 0);  // of 8 bytes

  __device__ __forceinline__ BlockContext(u32 shared, u32 barriers) : base(shared),
      x_full(barriers) {
    qkv_full = x_full + 4 * 8, gate_up_full = qkv_full + 8 * 8, out_full = gate_up_full + 16 * 8,
    down_full = out_full + 4 * 8;
    qkv_free = down_full + 8 * 8, gate_up_free = qkv_free + 8,
    gate_up_upper_free = gate_up_free + 8, down_free = gate_up_upper_free + 8;
    parts_full = down_free + 8, second_parts_full = parts_full + 8,
    queries_full = second_parts_full + 8, rows_full = queries_full + 8,
    keys_full = rows_full + 8, hold = keys_full + 8, coded = hold + 8, pieces = coded + kSlots * 8;
    cluster = blockIdx.x / kRanks, rank = blockIdx.x % kRanks;
    thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    // The shuffles make the values uniform over the warp for the compiler, so that a branch on them
    // does not diverge at tensor-core instructions.
    group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0),
    warp = __shfl_sync(kFullWarp, thread / 32, 0);
  }
  __device__ __forceinline__ void initialise_barriers() const {
    for (u32 at = x_full; at < qkv_full; at += 8) mbarrier_init(at, 1);
    for (u32 at = qkv_full; at < qkv_free; at += 8) mbarrier_init(at, kCoded ? kDecoders / 32 : 1);
    if (kCoded)
      for (u32 at = coded; at < pieces; at += 8) mbarrier_init(at, 1);
    mbarrier_init(qkv_free, 4), mbarrier_init(down_free, 4);  // warps that multiply
    mbarrier_init(gate_up_free, 8), mbarrier_init(gate_up_upper_free, 8);
    for (u32 at = parts_full; at < hold; at += 8) mbarrier_init(at, 1);
    store_shared_volatile(hold, 0);
    mbarrier_init_fence();
  }
  // Makes the compiler compute derived values again in each phase: kept across phases, they would
  // fill the registers.
  __device__ __forceinline__ void rematerialize() {
    asm volatile("" : "+r"(lane), "+r"(warp), "+r"(thread), "+r"(cluster), "+r"(rank));
  }

  __device__ __forceinline__ int row(int half) const {
    return warp * 16 + lane / 4 + 8 * half;
  }                                                                  // of a tile's sums
  __device__ __forceinline__ int slice() const { return rank / 4; }  // of k, in qkv and gate_up
  __device__ __forceinline__ UnitRange width() const { return UnitRange(kWidthUnits, cluster,
      kClusters); }
  __device__ __forceinline__ UnitRange qkv() const {
    return UnitRange(kQkvUnits, cluster * 4 + rank % 4, kClusters * 4);
  }
  __device__ __forceinline__ UnitRange gate_up() const {
    return UnitRange(kGateUpUnits, cluster * 4 + rank % 4, kClusters * 4);
  }
  __device__ __forceinline__ bool owns_rows(const PersistentArguments& a) const {
    return rank * 8 < a.rows;
  }
};

// Query rows and keys of a thread block's attention: a cluster has 32 query rows (token, head), and
// each of its blocks an eighth of the keys.
struct AttentionShare {
  int row0, first, seen;  // first query; first key, and how many
  bool active;
  __device__ __forceinline__ AttentionShare(const PersistentArguments& a, const BlockContext& b) {
    const int context = a.prefix + a.rows,
              keys = min_of(kMaxKeys / kRanks, ceil_div(ceil_div(context, kRanks), 16) * 16);
    row0 = b.cluster * 32, first = b.rank * keys;
    active = row0 < a.rows * kHeads;
    seen = max_of(0, min_of(keys, context - first));
  }
};

// Stages of the kernel's timer, in the order of their names in the kernel's Rust declaration. Each
// phase has three timer stages: until its first input is available, until its results are computed,
// and until these are written.
enum TimerStage : int { kStart = 0, kQkv = 1, kAttention = 4, kOut = 7, kGateUp = 10, kDown = 13,
    kRows =
    16 };

// Numbers of the named barriers of a thread block of the persistent kernel.
enum NamedBarrierNumber : u32 {
  kAttended = 1,
  kNormed = 2,
  kWorkersBarrier = 3,
  kArrived = 4,
  kNormedHere = 5,
  kDecoding = 6
};

// Signals the end of a phase to the activation producer; all consumer threads call the function.
// Does not wait.
__device__ __forceinline__ void arrive() {
  fence_proxy_async_shared();
  named_barrier_arrive(kArrived, kWorkers + 32);
}
// Stops requests for weights until the thread block has arrived at the grid barrier; the first
// thread of a warpgroup writes the flag.
__device__ __forceinline__ void stop_weight_requests(const BlockContext& b) {
  if (b.thread == 0) store_shared_volatile(b.hold, 1);
}

// Producer that copies weights to shared memory in the order in which the GEMMs need them; one
// thread executes its code.
class WeightProducer {
 public:
  __device__ __forceinline__ WeightProducer(const PersistentArguments& a, const BlockContext& b)
      : a(a), b(b), width(b.width()), qkv(b.qkv()), gate_up(b.gate_up()) {}

  __device__ __forceinline__ void request_all_weights() {
#pragma unroll 1
    for (int step = 0; step < a.steps; ++step)
#pragma unroll 1
      for (int layer = 0; layer < a.layers; ++layer, parity ^= 1)
        request_weights_of_layer(layer, step == 0 && layer == 0);
  }

 private:
  const PersistentArguments& a;
  const BlockContext& b;
  const UnitRange width, qkv, gate_up;
  u32 parity = 0;
  static constexpr int kInFlightFactor = kCoded ? 2 : 1;  // so that as many bytes are in flight
  static constexpr int kMaxPieces = 4 * kInFlightFactor, kGateUpPieces = kCoded ? 3 : 4;
  static_assert(kMaxPieces <= BlockContext::kSlots, "a slot is free when its turn comes");
  u32 requested[kMaxPieces] = {};  // the last pieces' barriers, the parity in the last bit; 0: none
  u32 slot = 0;

  // Requests a piece of `units` units of weights once fewer than kPieces pieces (for codes: twice
  // as many) are in flight.
  template <int kPieces>
  __device__ __forceinline__ void request(u32 to, const u16* from, u32 units, u32 barrier) {
    const u32 oldest_pending_piece = requested[kMaxPieces - kPieces * kInFlightFactor];
    if (oldest_pending_piece != 0)
      mbarrier_wait(oldest_pending_piece & ~1u, oldest_pending_piece & 1);
#pragma unroll
    for (int i = 0; i + 1 < kMaxPieces; ++i) requested[i] = requested[i + 1];
    requested[kMaxPieces - 1] = barrier | parity;
    while (load_shared_volatile(b.hold) != 0) {
    }
    const u32 bytes = units * kStoredBytes;
    if (kCoded) {
      const u32 piece = b.pieces + slot * 16;
      store_shared_volatile(piece, to), store_shared_volatile(piece + 4, units),
          store_shared_volatile(piece + 8, barrier);
      to += units * kUnitBytes - bytes, barrier = b.coded + slot * 8;
      slot = (slot + 1) % BlockContext::kSlots;
    }
    mbarrier_arrive_expect_bytes(barrier, bytes);
    bulk_copy_to_shared(to, from, bytes, barrier);
  }
  __device__ __forceinline__ void request_gate_up(const u16* from, int panel) {
    const u32 to = b.base + kGateUpAt + panel * kGateUpPanel, barrier = b.gate_up_full + panel * 16;
    constexpr u32 kFirstGroupGateUpUnits = kFirstGroupUnits * 2;
    from += panel * (kGateUpUnits * 2 * kStoredU16s);
    request<kGateUpPieces>(to, from, kFirstGroupGateUpUnits, barrier);
    request<kGateUpPieces>(to + kFirstGroupGateUpUnits * kUnitBytes,
                           from + kFirstGroupGateUpUnits * kStoredU16s,
                           gate_up.count * 2 - kFirstGroupGateUpUnits, barrier + 8);
  }

  __device__ __forceinline__ void request_weights_of_layer(int layer, bool first) {
    constexpr i64 kLayerCacheElements = kMaxKeys * kHeadDim;
    const u16* from =
        a.qkv + ((layer * i64{16} + b.slice() * 8) * kQkvUnits + qkv.first) * (2 * kStoredU16s);
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
      request<4>(b.base + kQkvAt + i * kQkvPanel, from + i * (kQkvUnits * 2 * kStoredU16s),
                 qkv.count * 2, b.qkv_full + i * 8);
    // Because consumers load keys and values from L2 to registers, this loop prefetches a layer's
    // keys and values into L2, in 128 pieces of 4096 bytes.
    for (int piece = blockIdx.x; piece < 128; piece += kBlocks) {
      bulk_prefetch_to_l2(a.keys + layer * kLayerCacheElements + piece * 2048, 4096);
      bulk_prefetch_to_l2(a.values + layer * kLayerCacheElements + piece * 2048, 4096);
    }

    const u16* from_gate_up =
        a.gate_up +
        ((layer * i64{16} + b.slice() * 8) * kGateUpUnits + gate_up.first) * (2 * kStoredU16s);
    request_gate_up(from_gate_up, 3);
    if (!first) mbarrier_wait(b.down_free, parity ^ 1);
#pragma unroll 1
    for (int i = 4; i < 8; ++i) request_gate_up(from_gate_up, i);
    mbarrier_wait(b.qkv_free, parity);
    from = a.out + ((layer * i64{32} + b.rank * 4) * kWidthUnits + width.first) * kStoredU16s;
#pragma unroll 1
    for (int i = 0; i < 4; ++i)
      request<3>(b.base + kOutAt + i * kOutPanel, from + i * (kWidthUnits * kStoredU16s),
                 width.count, b.out_full + i * 8);
#pragma unroll 1
    for (int i = 0; i < 3; ++i) request_gate_up(from_gate_up, i);

    // The weights of down must arrive between gate_up's GEMMs and down's own GEMM: by then the
    // prefetch has brought them into L2.
    from = a.down + ((layer * i64{64} + b.rank * 8) * kWidthUnits + width.first) * kStoredU16s;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const long long start_clock = clock64();
      while (clock64() - start_clock < 200) {
      }  // not all at once
      bulk_prefetch_to_l2(from + i * (kWidthUnits * kStoredU16s), width.count * kStoredBytes);
    }
    mbarrier_wait(b.gate_up_upper_free, parity);
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
      request<4>(b.base + kDownAt + i * kDownPanel, from + i * (kWidthUnits * kStoredU16s),
                 width.count, b.down_full + i * 8);
    mbarrier_wait(b.gate_up_free, parity);
  }
};

// Decodes eight codes along k of one column to bf16: half number `half` of the sixteen codes that a
// lane has of a unit.
__device__ __forceinline__ uint4 decode_eight_codes(const uint4& codes, int half, u32 factor) {
  if (kInt4) return decode_int4(half == 0 ? codes.x : codes.y, factor);
  const uint2 low = decode_e4m3_to_bf16(half == 0 ? codes.x : codes.z, factor),
              high = decode_e4m3_to_bf16(half == 0 ? codes.y : codes.w, factor);
  return make_uint4(low.x, low.y, high.x, high.y);
}
// Loads the sixteen codes that a lane has of a unit; for int4 the upper half of the result is
// unused.
__device__ __forceinline__ uint4 load_codes(u32 unit, int lane) {
  if (!kInt4) return load_shared_b128(unit + lane * 16);
  return make_uint4(load_shared_b32(unit + lane * 8), load_shared_b32(unit + lane * 8 + 4), 0, 0);
}

// Decodes weights from codes to the bf16 units that the tensor cores read, piece after piece; the
// fourth warpgroup executes the code.
class Decoder {
 public:
  __device__ __forceinline__ Decoder(const PersistentArguments& a, const BlockContext& b) : a(a),
      b(b) {}

  __device__ __forceinline__ void decode_all_weights() {
    const u32 pieces = static_cast<u32>(a.steps * a.layers) * kWeightPiecesOfLayer;
#pragma unroll 1
    for (u32 piece = 0; piece < pieces; ++piece) {
      const u32 slot = piece % BlockContext::kSlots, words = b.pieces + slot * 16;
      mbarrier_wait(b.coded + slot * 8, piece / BlockContext::kSlots & 1);
      decode_piece(load_shared_volatile(words), static_cast<int>(load_shared_volatile(words + 4)),
                   load_shared_volatile(words + 8));
    }
  }

 private:
  static constexpr u32 kWeightPiecesOfLayer = 8 + 2 * 8 + 4 + 8;
  static constexpr int kDecoderWarps = kDecoders / 32,
                       kMaxWarpUnits = (2 * kFirstGroupUnits + kDecoderWarps - 1) /
                                       kDecoderWarps;  // most units
  static_assert(kMaxWidthUnits <= 2 * kFirstGroupUnits && 2 * kMaxQkvUnits <= 2 * kFirstGroupUnits,
                "the first group's pieces are the largest");
  const PersistentArguments& a;
  const BlockContext& b;

  // The codes lie at the end of the place that the decoded piece will fill, so all codes are read
  // before the first result is written.
  __device__ __forceinline__ void decode_piece(u32 to, int units, u32 barrier) const {
    const u32 from = to + units * (kUnitBytes - kStoredBytes), column = b.lane % 8,
              chunk = b.lane / 8 * 2;
    uint4 codes[kMaxWarpUnits];
    u32 factors[kMaxWarpUnits];
#pragma unroll
    for (int i = 0; i < kMaxWarpUnits; ++i) {
      const int unit = i * kDecoderWarps + b.warp;
      if (unit >= units) continue;
      codes[i] = load_codes(from + unit * kStoredBytes, b.lane);
      factors[i] = repeat_half_of_word(
          load_shared_b32(from + unit * kStoredBytes + kCodeBytes + column / 2 * 4), column % 2);
    }
    named_barrier_sync(kDecoding, kDecoders);
#pragma unroll
    for (int i = 0; i < kMaxWarpUnits; ++i) {
      const int unit = i * kDecoderWarps + b.warp;
      if (unit >= units) continue;
      const u32 at = to + unit * kUnitBytes + column * 128;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 w = decode_eight_codes(codes[i], half, factors[i]);
        store_shared_b128(at + ((chunk + half) ^ column) * 16, w.x, w.y, w.z, w.w);
      }
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (b.lane == 0) mbarrier_arrive(barrier);
  }
};

// Returns true in exactly one lane of a warp whose lanes all call the function. The compiler then
// knows that only one lane continues, and generates no loop over lanes for the copies that this
// lane starts.
__device__ __forceinline__ bool elect_lane() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Producer that copies the activations which thread blocks write for each other, as soon as all
// blocks have arrived; one warp executes its code.
class ActivationProducer {
 public:
  __device__ __forceinline__ ActivationProducer(const PersistentArguments& a, const BlockContext& b)
      : a(a), b(b), share(a, b) {}

  __device__ __forceinline__ void copy_all_activations() {
#pragma unroll 1
    for (int step = 0; step < a.steps; ++step) {
#pragma unroll 1
      for (int layer = 0; layer < a.layers; ++layer) {
        wait_for_grid<8>();
        copy_panels_of_x<8, 0>(a.x + b.slice() * 8 * kPanelElements);
        wait_for_grid<0>();
        copy_queries();
        wait_for_grid<4>();
        copy_panels_of_x<4, 0>(a.attended + b.rank * 4 * kPanelElements);
        wait_for_grid<8>();
        copy_panels_of_x<8, 2>(a.x + b.slice() * 8 * kPanelElements);
        wait_for_grid<8>();
        copy_panels_of_x<8, 0>(a.hidden + b.rank * 8 * kPanelElements);
      }
      wait_for_grid<0>();
      if (b.lane == 0) mbarrier_arrive(b.rows_full);
    }
  }

 private:
  const PersistentArguments& a;
  const BlockContext& b;
  const AttentionShare share;
  u32 arrived = 0;  // blocks, when all will have

  // Grid barrier: waits for the consumers of this thread block, then for all thread blocks of the
  // grid. After the grid barrier the activations of all thread blocks can be copied; kPanels panels
  // of the next input x are expected.
  template <int kPanels>
  __device__ __forceinline__ void wait_for_grid() {
    arrived += kBlocks;
    named_barrier_sync(kArrived, kWorkers + 32);
    if (elect_lane()) {
      arrive_at_counter();
      store_shared_volatile(b.hold, 0);
    }
    expect_bytes_of_x<kPanels>();
    __syncwarp();
    u32 seen;
    do
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(a.counter));
    while (seen < arrived);
    // The loop polls with relaxed loads and acquires once at the end, because an acquire costs more
    // than a load.
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(a.counter) : "memory");
    fence_proxy_async_global();
    __syncwarp();
  }
  __device__ __forceinline__ void arrive_at_counter() const {
    // For red.add the compiler would generate code that counts the active lanes; red.inc avoids it.
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(a.counter), "r"(0xffffffffu)
                 : "memory");
  }
  template <int kPanels>
  __device__ __forceinline__ void expect_bytes_of_x() const {
    if (kPanels > 0 && b.lane < 4)
      mbarrier_arrive_expect_bytes(b.x_full + b.lane * 8, kPanels / 4 * row_bytes());
  }
  __device__ __forceinline__ u32 row_bytes() const { return a.rows * 128; }  // of a panel
  // Copies the existing rows of kPanels panels of the input x, one copy for each panel, counted on
  // four barriers. Part kFirstGroupGateUpUnits of x is requested first, in the order in which the
  // consumers use the parts. Rows of shared memory after the last row of x hold unrelated data, and
  // the sums of these rows are never used.
  template <int kPanels, int kFirstGroupGateUpUnits>
  __device__ __forceinline__ void copy_panels_of_x(const u16* from) {
    constexpr int kChunk = kPanels / 4;
    if (!elect_lane()) return;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const int panel = i ^ (kFirstGroupGateUpUnits * kChunk);
      bulk_copy_to_shared(b.base + kXAt + panel * kPanelBytes, from + panel * kPanelElements,
          row_bytes(),
                b.x_full + panel / kChunk * 8);
    }
  }
  __device__ __forceinline__ void copy_queries() {
    constexpr u32 kBytes = 32 * 128;  // of a copy: 32 query rows of 64 elements
    if (b.lane == 0) mbarrier_arrive(b.keys_full);
    if (b.lane == 0) mbarrier_arrive_expect_bytes(b.queries_full, share.active ? 4 * kBytes : 0);
    __syncwarp();
    if (share.active && b.lane < 4)
      bulk_copy_to_shared(b.base + kXAt + b.lane * kBytes, a.q + (b.lane * kQueryRows +
          share.row0) * 64,
                kBytes, b.queries_full);
  }
};

// Computes acc[64][kN] = x w over this thread block's slice of k; one warpgroup executes the
// function. kStride is the number of barriers for each panel of weights. The first chunk is
// kFirstGroupGateUpUnits; if kFirstGroupGateUpUnits is 2, lanes signal when the upper half of the
// weights has been read. The function ends the stages `stage` and `stage` + 1 of the kernel's
// timer.
template <int kN, int kPanels, u32 kPanel, int kStride = 1, int kFirstGroupGateUpUnits = 0>
__device__ __forceinline__ void multiply_slice_of_k(const BlockContext& b, float (&acc)[kN / 2],
                                                    u32 weights, u32 weights_full,
                                                    u32 weights_parity, TimerStage stage) {
  constexpr int kChunk = kPanels / 4;
  const u64 x = wgmma_operand_descriptor(b.base + kXAt), w = wgmma_operand_descriptor(weights);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[i] = 0.f;
#pragma unroll
  for (int turn = 0; turn < 4; ++turn) {
    const int chunk = turn ^ kFirstGroupGateUpUnits;
    mbarrier_wait(b.x_full + chunk * 8, b.x_parity);
    if (turn == 0) end_timed_stage(stage);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      mbarrier_wait(weights_full + (chunk * kChunk + i) * (8 * kStride), weights_parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma_w_transposed(
            acc, advance_operand_descriptor(x, (chunk * kChunk + i) * kPanelBytes + step * 32),
            advance_operand_descriptor(w, (chunk * kChunk + i) * kPanel + step * 32));
    wgmma_commit();
    if (kFirstGroupGateUpUnits == 2 && turn == 2) {
      wgmma_wait<1>();
      if (b.lane == 0) mbarrier_arrive(b.gate_up_upper_free);
    }
  }
  wgmma_wait<0>();
  end_timed_stage(stage + 1);
}
// Waits until all of x has arrived, in warps that do not multiply, so that their next wait is for
// the next x.
__device__ __forceinline__ void wait_for_x_without_reading(const BlockContext& b) {
#pragma unroll
  for (int i = 0; i < 4; ++i) mbarrier_wait(b.x_full + i * 8, b.x_parity);
}

// Computes 1 / rms of each row of h; one warpgroup executes the code.
struct InverseRmsOfRows {
  float4 x = {}, y = {};
  __device__ __forceinline__ void request(const float* squares, int thread) {
    const int row = min_of(thread / 2, kMaxRows - 1);
    const float4* from = reinterpret_cast<const float4*>(squares + row * 16 + thread % 2 * 8);
    x = load_bypassing_l1(from), y = load_bypassing_l1(from + 1);
    if (thread % 2 == 1) y.w = 0.f;  // there is no sixteenth cluster
  }
  __device__ __forceinline__ void store_inverse_rms(float* inverse, int thread) const {
    const float sum =
        sum_across_lane_group<2>(((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w)));
    if (thread % 2 == 0) inverse[thread / 2] = rsqrtf(sum / kWidth + kNormEpsilon);
  }
};

// Elements of h that a thread owns: two adjacent columns in each of two units, in one row.
struct OwnedElementsOfH {
  int row, column;  // of the first; the others are 1, 8 and 9 further
  bool has[2];
  __device__ __forceinline__ OwnedElementsOfH(const PersistentArguments& a, const BlockContext& b) {
    const UnitRange width = b.width();
    row = b.rank * 8 + b.group * 4 + b.warp;
    column = (width.first + b.lane / 4 * 2) * 8 + b.lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      has[e] = b.lane < 20 && row < a.rows && b.lane / 4 * 2 + e < width.count;
  }
};
// One fp32 value for each of the four columns of a thread's `OwnedElementsOfH`.
struct FourColumnValues {
  float x[4];
};
__device__ __forceinline__ FourColumnValues load_four_column_values(const OwnedElementsOfH& at,
                                                                    const float* from) {
  FourColumnValues f = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!at.has[e]) continue;
    const float2 two = *reinterpret_cast<const float2*>(from + at.column + e * 8);
    f.x[2 * e] = two.x, f.x[2 * e + 1] = two.y;
  }
  return f;
}
__device__ __forceinline__ FourColumnValues load_owned_h(const PersistentArguments& a,
                                                         const OwnedElementsOfH& at) {
  FourColumnValues f = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!at.has[e]) continue;
    const u32 pair =
        load_bypassing_l1(reinterpret_cast<const u32*>(a.h + at.row * kWidth + at.column + e * 8));
    f.x[2 * e] = Bf16::low(pair), f.x[2 * e + 1] = Bf16::high(pair);
  }
  return f;
}

// Writes the inputs of the next norm and its GEMM for other thread blocks: h (1 + scale) and the
// partial sums of squares. All lanes of a warp must call the function.
__device__ __forceinline__ void publish_scaled_h_and_squares(const PersistentArguments& a,
                                                             const BlockContext& b,
                                                                 const OwnedElementsOfH& at,
                                        const FourColumnValues& h, const FourColumnValues& scale,
                                            float* squares) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!at.has[e]) continue;
    const float x = h.x[2 * e], y = h.x[2 * e + 1];
    sum += x * x + y * y;
    *reinterpret_cast<u32*>(a.x + activation_offset(at.row, at.column + e * 8)) =
        Bf16::pack(x * (1.f + scale.x[2 * e]), y * (1.f + scale.x[2 * e + 1]));
  }
  sum = sum_across_lane_group<32>(sum);
  if (b.lane == 0 && at.row < a.rows) squares[at.row * 16 + b.cluster] = sum;
}
// Writes h itself and its partial sums of squares for other thread blocks, as inputs of the final
// norm.
__device__ __forceinline__ void publish_h_and_squares(const PersistentArguments& a,
                                                      const BlockContext& b,
                                                          const OwnedElementsOfH& at,
                                          const FourColumnValues& h) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!at.has[e]) continue;
    const float x = h.x[2 * e], y = h.x[2 * e + 1];
    sum += x * x + y * y;
    *reinterpret_cast<u32*>(a.h + at.row * kWidth + at.column + e * 8) = Bf16::pack(x, y);
  }
  sum = sum_across_lane_group<32>(sum);
  if (b.lane == 0 && at.row < a.rows) a.squares[at.row * 16 + b.cluster] = sum;
}

// Sends the sums over this block's slice of k, in `out` and `down`, to the owners of the rows; the
// warpgroup that computed the sums executes the function.
__device__ __forceinline__ void send_row_sums_to_owners(const PersistentArguments& a,
                                                        const BlockContext& b,
                                          const float (&acc)[36]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 owner = b.warp * 2 + half;
    if (static_cast<int>(owner) * 8 >= a.rows) continue;
    const u32 to =
        cluster_address(b.base + kPartsAt + b.rank * kRowPartBytes + b.lane / 4 * 144, owner);
    const u32 barrier = cluster_address(b.parts_full, owner);
    u32 pairs[9];
#pragma unroll
    for (int j = 0; j < 9; ++j)
      pairs[j] = Bf16::pack(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      st_async_b128(to + j * 64 + b.lane % 4 * 16, pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2],
                    pairs[4 * j + 3], barrier);
    st_async_b32(to + 128 + b.lane % 4 * 4, pairs[8], barrier);
  }
}
// Adds gate times the sum over the cluster's slices of k to the thread's elements of h.
__device__ __forceinline__ void add_gated_sum_to_h(BlockContext& b, const OwnedElementsOfH& at,
                                                   const FourColumnValues& gate,
                                                       FourColumnValues& h) {
  mbarrier_wait(b.parts_full, b.parts_parity);
  b.parts_parity ^= 1;
  float y[4] = {};
  const int two = b.lane / 4;  // units
  const u32 from = b.base + kPartsAt + (b.group * 4 + b.warp) * 144 +
                   (two < 4 ? two / 2 * 64 + b.lane % 4 * 16 + two % 2 * 8 : 128 + b.lane % 4 * 4);
  if (at.has[0]) {
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const u32 left = load_shared_b32(from + i * kRowPartBytes),
                right = at.has[1] ? load_shared_b32(from + i * kRowPartBytes + 4) : 0;
      y[0] += Bf16::low(left), y[1] += Bf16::high(left), y[2] += Bf16::low(right),
          y[3] += Bf16::high(right);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const u32 new_h_pair = Bf16::pack(h.x[2 * e] + gate.x[2 * e] * y[2 * e],
                                 h.x[2 * e + 1] + gate.x[2 * e + 1] * y[2 * e + 1]);
    h.x[2 * e] = Bf16::low(new_h_pair), h.x[2 * e + 1] = Bf16::high(new_h_pair);
  }
}
