// GEMMs with few rows: each row belongs to one denoising step. The weights are read once, and the
// inputs do not depend on the actions: the persistent kernel finds the results in memory when it
// starts.
//
//   styles  cond W + b in fp32: scale, shift and gate of all steps and layers
//   shifts  shift W: what a norm's shift adds to each column of the GEMM after it; the shift as the
//           sum of two bf16, which keeps 16 bits of it
//
// A block computes a share of the units (8 columns) of all layers, in tasks of up to 16 units of
// one layer. For each task a thread block steps through k in panels of 64. The thread block's
// weights pass through a ring of slots in shared memory; each slot holds one panel of one task. One
// thread keeps the ring of weights full across tasks: the bytes in flight hide the memory latency.
// Two thread blocks run on each multiprocessor. Threads: eight warps multiply, each two units of a
// task; one further thread requests the copies of weights. Shared memory: the input x [parts][16
// steps][1024] and the ring of weight slots. Bound: device memory, because every weight is read
// once.
#include "common/bulk.cuh"
#include "common/cluster.cuh"
#include "common/memory.cuh"
#include "denoise/model.cuh"
#include "denoise/panel.cuh"
#include "denoise/units.cuh"

constexpr int kThreads = THREADS, kWarps = 8, kWorkers = kWarps * 32;
constexpr int kDenoisingStepRows = 16;  // denoising steps that fill the rows of a tensor-core tile
constexpr int kPieceUnits = 16;         // most units of weights in a piece
constexpr int kPanels = kWidth / 64;    // panels of 64 columns of x
constexpr u32 kRowBytes = kWidth * 2, kPieceBytes = kPieceUnits * kStoredBytes;
constexpr u32 kWorkersBarrier = 1;  // a named barrier
static_assert(kThreads == kWorkers + 32, "eight warps multiply, one copies");
static_assert(kStoredBytes % 16 == 0, "units are copied in bulk");

// The GEMMs of all layers that have the same kind of weights: out [layers][steps][columns] = x W +
// bias [layers][columns]; `bias` may be null.
struct StackedLayerGemms {
  const u16* weights;
  const float* bias;  // or null
  float* out;
  int columns, layers;
};

// A thread block's share of the weight units of all stacks, task after task: a task has up to 16
// units of a layer and up to 16 denoising steps.
template <int kStacks>
struct TasksOfBlock {
  const StackedLayerGemms (&stacks)[kStacks];
  int steps, next = 0, end = 0;  // units of the share that are left
  int stack = 0, layer, unit, count = 0, first_step = 0;  // of the task
  __device__ __forceinline__ TasksOfBlock(const StackedLayerGemms (&stacks)[kStacks], int steps)
      : stacks(stacks), steps(steps) {
    i64 all = 0;
#pragma unroll
    for (int i = 0; i < kStacks; ++i) all += size(stacks[i]);
    next = static_cast<int>(all * blockIdx.x / gridDim.x);
    end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  }
  static __device__ __forceinline__ int size(const StackedLayerGemms& of) {
    return of.columns / 8 * of.layers;
  }
  // Stack of the current task: all layers' GEMMs with one kind of weights. Comparisons instead of
  // an array index keep the stacks in registers.
  __device__ __forceinline__ StackedLayerGemms of() const {
    StackedLayerGemms found = stacks[0];
#pragma unroll
    for (int i = 1; i < kStacks; ++i)
      if (stack == i) found = stacks[i];
    return found;
  }
  // Moves to the next task: further denoising steps of the same columns of weights, or further
  // columns. The tasks of a layer are as equal in size as possible.
  __device__ __forceinline__ bool advance() {
    if (count > 0 && first_step + kDenoisingStepRows < steps) {
      first_step += kDenoisingStepRows;
      return true;
    }
    if (next >= end) return false;
    int in_stack = next;
    stack = 0;
#pragma unroll
    for (int i = 0; i + 1 < kStacks; ++i)
      if (stack == i && in_stack >= size(stacks[i])) in_stack -= size(stacks[i]), stack = i + 1;
    const int units = of().columns / 8;
    layer = in_stack / units, unit = in_stack % units, first_step = 0;
    const int units_left_in_layer = min_of(end - next, units - unit);
    count = ceil_div(units_left_in_layer, ceil_div(units_left_in_layer, kPieceUnits));
    next += count;
    return true;
  }
};

// Ring of weight slots in shared memory; each slot has one barrier for full and one for free.
template <int kSlots>
struct WeightSlotRing {
  u32 pieces, full, free;
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ WeightSlotRing(u32 pieces, u32 barriers)
      : pieces(pieces), full(barriers), free(barriers + kSlots * 8) {}
  __device__ __forceinline__ void initialise_barriers() const {
    for (u32 i = 0; i < kSlots; ++i)
      mbarrier_init(full + i * 8, 1), mbarrier_init(free + i * 8, kWorkers);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ u32 piece() const { return pieces + slot * kPieceBytes; }
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

// Returns the offset of eight elements along k of a denoising step in a part of x in shared memory.
// In rows of odd denoising steps the two halves of a panel are exchanged, so that adjacent rows lie
// in different banks.
__device__ __forceinline__ u32 x_offset(u32 step, u32 chunk) {
  return step * kRowBytes + (chunk ^ (step % 2 * 4)) * 16;
}

// Loads eight weights along k of one column of a unit from shared memory, and decodes them to bf16.
__device__ __forceinline__ uint4 load_chunk(u32 unit, u32 column, u32 chunk) {
  if (!kCoded) return load_shared_b128(unit + column * 128 + (chunk ^ column) * 16);
  const u32 factor =
      repeat_half_of_word(load_shared_b32(unit + kCodeBytes + column / 2 * 4), column % 2);
  const u32 lane = chunk / 2 * 8 + column;  // of a warp that decodes the unit
  if (kInt4) return decode_int4(load_shared_b32(unit + lane * 8 + chunk % 2 * 4), factor);
  const u32 codes = unit + lane * 16 + chunk % 2 * 8;
  const uint2 low = decode_e4m3_to_bf16(load_shared_b32(codes), factor),
              high = decode_e4m3_to_bf16(load_shared_b32(codes + 4), factor);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// Multiplies the input x by the weights of all stacks. The template argument for rows writes x to
// shared memory in parts; the products of the parts are added. The weights W have the layout that
// the persistent kernel uses.
template <int kSlots, typename Rows, int kStacks>
__device__ __forceinline__ void multiply_rows_by_all_stacks(
    const Rows& rows, const StackedLayerGemms (&stacks)[kStacks], int steps) {
  constexpr int kPartsOfInput = Rows::kPartsOfInput;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[2 * kSlots];
  const u32 base = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  WeightSlotRing<kSlots> ring(base + kPartsOfInput * kDenoisingStepRows * kRowBytes,
                              shared_address(barriers));
  TasksOfBlock<kStacks> tasks(stacks, steps);
  if (threadIdx.x == 0) ring.initialise_barriers();
  __syncthreads();
  allow_next_kernel();

  if (warp == kWarps) {
    if (lane != 0) return;
    int waits = -kSlots;  // pieces that were given back, when one is asked for
    while (tasks.advance()) {
      const StackedLayerGemms of = tasks.of();
      const i64 units = of.columns / 8;
      const u16* from = of.weights + (tasks.layer * kPanels * units + tasks.unit) * kStoredU16s;
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel, ring.advance()) {
        if (waits < 0)
          ++waits;
        else
          mbarrier_wait(ring.free + ring.slot * 8, ring.parity ^ 1);
        const u32 bytes = tasks.count * kStoredBytes, full = ring.full + ring.slot * 8;
        mbarrier_arrive_expect_bytes(full, bytes);
        bulk_copy_to_shared(ring.piece(), from + panel * units * kStoredU16s, bytes, full);
      }
    }
    return;
  }

  wait_for_previous_kernels();
  const u32 group = lane / 4, lane_in_quad = lane % 4;
  int stack = -1, layer = -1, first_step = -1;  // of x in shared memory
  while (tasks.advance()) {
    if (tasks.first_step != first_step ||
        (Rows::kDiffersByLayer && (tasks.stack != stack || tasks.layer != layer))) {
      stack = tasks.stack, layer = tasks.layer, first_step = tasks.first_step;
      named_barrier_sync(kWorkersBarrier, kWorkers);
#pragma unroll 4
      for (int i = threadIdx.x; i < kDenoisingStepRows * kWidth / 8; i += kWorkers) {
        const int step = i / (kWidth / 8), chunk = i % (kWidth / 8);
        rows.put_chunk(base + x_offset(step, chunk), stack, layer, first_step + step, steps,
                       chunk * 8);
      }
      named_barrier_sync(kWorkersBarrier, kWorkers);
    }
    float acc[2][4] = {};
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel, ring.advance()) {
      mbarrier_wait(ring.full + ring.slot * 8, ring.parity);
      uint4 w[2][2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (warp + i * kWarps < tasks.count)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            w[i][half] = load_chunk(ring.piece() + (warp + i * kWarps) * kStoredBytes, group,
                                    lane_in_quad + half * 4);
#pragma unroll
      for (int part = 0; part < kPartsOfInput; ++part) {
        const u32 from = base + part * kDenoisingStepRows * kRowBytes;
        const uint4 x[4] = {
            load_shared_b128(from + x_offset(group, panel * 8 + lane_in_quad)),
            load_shared_b128(from + x_offset(group + 8, panel * 8 + lane_in_quad)),
            load_shared_b128(from + x_offset(group, panel * 8 + lane_in_quad + 4)),
            load_shared_b128(from + x_offset(group + 8, panel * 8 + lane_in_quad + 4))};
        // The order of k within the GEMM does not matter, as long as both operands have the same
        // order.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 left = w[i][0], right = w[i][1];
          Bf16::mma(acc[i], {x[0].x, x[1].x, x[2].x, x[3].x}, left.x, right.x);
          Bf16::mma(acc[i], {x[0].y, x[1].y, x[2].y, x[3].y}, left.y, right.y);
          Bf16::mma(acc[i], {x[0].z, x[1].z, x[2].z, x[3].z}, left.z, right.z);
          Bf16::mma(acc[i], {x[0].w, x[1].w, x[2].w, x[3].w}, left.w, right.w);
        }
      }
      // Every lane arrives at the barrier: if one lane arrived for its warp, compute-sanitizer's
      // racecheck would not see that the other lanes have read.
      mbarrier_arrive(ring.free + ring.slot * 8);
    }
    const StackedLayerGemms of = tasks.of();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (warp + i * kWarps >= tasks.count) continue;
      const int column = (tasks.unit + warp + i * kWarps) * 8 + lane_in_quad * 2;
      float2 b = make_float2(0.f, 0.f);
      if (of.bias != nullptr)
        b = *reinterpret_cast<const float2*>(of.bias + static_cast<i64>(tasks.layer) * of.columns +
                                             column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = first_step + group + half * 8;
        if (step < steps)
          *reinterpret_cast<float2*>(
              of.out + (static_cast<i64>(tasks.layer) * steps + step) * of.columns + column) =
              make_float2(acc[i][2 * half] + b.x, acc[i][2 * half + 1] + b.y);
      }
    }
  }
}

#if WEIGHT_BITS == 16
// Input of the GEMM that computes the styles: cond [64 steps][1024] in panels (denoise/panel.cuh),
// the same for all layers.
struct StyleGemmInput {
  static constexpr int kPartsOfInput = 1;
  static constexpr bool kDiffersByLayer = false;
  const u16* cond;
  __device__ __forceinline__ void put_chunk(u32 to, int, int, int step, int steps, int k) const {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (step < steps)
      x = *reinterpret_cast<const uint4*>(cond + panel_element_offset(step, k, kWidth));
    store_shared_b128(to, x.x, x.y, x.z, x.w);
  }
};

// Computes the adaRMS styles of the norms before attention and before the feed-forward (`layers`
// each) and of the final norm (one).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    denoise_streamed_styles(const u16* cond, const u16* weights1, const u16* weights2,
                            const u16* final_weights, const float* bias1, const float* bias2,
                            const float* final_bias, float* styles1, float* styles2,
                            float* final_styles, int layers, int steps) {
  static_assert(kDenoisingStepRows * kRowBytes + 5 * kPieceBytes == STYLES_SHARED_BYTES,
                "the row declares what x and the ring take");
  const StackedLayerGemms stacks[3] = {{weights1, bias1, styles1, 3 * kWidth, layers},
                                       {weights2, bias2, styles2, 3 * kWidth, layers},
                                       {final_weights, final_bias, final_styles, 3 * kWidth, 1}};
  multiply_rows_by_all_stacks<5>(StyleGemmInput{cond}, stacks, steps);
}
#endif

// Input of the GEMM that computes the shifts: the shift third of styles [layers][steps][3 width],
// which hold scale, shift, gate.
struct ShiftGemmInput {
  static constexpr int kPartsOfInput = 2;
  static constexpr bool kDiffersByLayer = true;
  const float *styles1, *styles2;
  __device__ __forceinline__ void put_chunk(u32 to, int stack, int layer, int step, int steps,
                                      int k) const {
    float x[8] = {};
    if (step < steps) {
      const float4* from = reinterpret_cast<const float4*>(
          (stack == 0 ? styles1 : styles2) +
          (static_cast<i64>(layer) * steps + step) * 3 * kWidth + kWidth + k);
      const float4 low = from[0], high = from[1];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    u32 first[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      first[i] = Bf16::pack(x[2 * i], x[2 * i + 1]);
      rest[i] = Bf16::pack(x[2 * i] - Bf16::low(first[i]), x[2 * i + 1] - Bf16::high(first[i]));
    }
    store_shared_b128(to, first[0], first[1], first[2], first[3]);
    store_shared_b128(to + kDenoisingStepRows * kRowBytes, rest[0], rest[1], rest[2], rest[3]);
  }
};

// Multiplies the shifts of the norms before attention and before the feed-forward by the weights of
// the GEMMs after these norms. The kernel of the shifts also resets the persistent kernel's counter
// to 0.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    denoise_streamed_shifts(const float* styles1, const float* styles2, const u16* qkv,
                            const u16* gate_up, float* shift_qkv, float* shift_gate_up,
                            u32* counter, int layers, int steps) {
  static_assert(
      2 * kDenoisingStepRows * kRowBytes + SHIFTS_SLOTS * kPieceBytes == SHIFTS_SHARED_BYTES,
      "the row declares what x and the ring take");
  const StackedLayerGemms stacks[2] = {{qkv, nullptr, shift_qkv, (kHeads + 2) * kHeadDim, layers},
                                       {gate_up, nullptr, shift_gate_up, 2 * kMlp, layers}};
  multiply_rows_by_all_stacks<SHIFTS_SLOTS>(ShiftGemmInput{styles1, styles2}, stacks, steps);
  // At this point all earlier kernels have ended, because a worker thread has waited for them.
  if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
}
