// Work distribution of the kernel resnet18_best_layers: the layout of shared memory, the part of
// each layer that a thread block computes, the depth of its sums. The computation of the layers is
// deliberately not part of best.cuh.
#pragma once
#include "common/bulk.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "common/wgmma/tile.cuh"
#include "resnet18/neurons.cuh"
#include "resnet18/packed.cuh"

constexpr int kRanks = RANKS, kLayers = LAYERS, kSlots = SLOTS;  // blocks of a group; weight slots
constexpr int kGroupThreads = 128, kGroups = 4, kMultiplying = kGroups * kGroupThreads;
static_assert(kMultiplying + kGroupThreads == THREADS, "and a warpgroup that copies");
constexpr int kImages = kRows / kSteps;  // images that a group of blocks computes at once
constexpr int kTileFilters = 32, kTileBytes = kTileFilters * kChannels * 2;
constexpr int kSlotBytes = 2 * kTileBytes;
constexpr int kSumsBytes = 1 << 16, kMapBytes = 64 * kGroupBytes, kMaps = 3;
constexpr int kUnit = kSteps > kOctet ? kSteps : kOctet;  // rows of a thread's neurons

struct LayerParameters {
  const u16* weight;         // tiles [filters / 32, depth / 64], tap 0 first; the tiles before the
                             // first tap that reads pixels are absent
  const float* bias;         // [filters]
  const u16* second_weight;  // [filters, second_channels] of a 1x1 convolution of the map before
  const float* second_bias;  // the layer's input; both are null without a 1x1 convolution
  u16* spikes;               // [T, B, side², filters] where they are kept, else null
  float* currents;           // the same
  i64 depth;                 // of a filter, in 64 channels of a tap
  u64* sent;     // words that blocks send each other, with tags: a packed map for each group
};

__device__ __forceinline__ void barrier_arrive_count_times(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// Computes acc[64][64] += x[64][16] w[64][16]^T with x in registers; common/wgmma/tile.cuh
// describes the layouts.
__device__ __forceinline__ void wgmma_w_transposed(float (&d)[32], const u32 (&x)[4], u64 w) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : ACCUMULATORS_32(d, 0)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w));
}

extern __shared__ __align__(1024) char shared[];
constexpr int kSumsAt = kSlots * kSlotBytes, kMapsAt = kSumsAt + kSumsBytes;
constexpr int kLayersAt = kMapsAt + kMaps * kMapBytes;
constexpr int kShiftsAt = kLayersAt + kLayers * static_cast<int>(sizeof(LayerParameters));
constexpr int kMaxFiltersPerBlock = 64;  // of a block, in a layer
constexpr int kBarriersAt = kShiftsAt + kLayers * kMaxFiltersPerBlock * 4;
static_assert(kBarriersAt + 2 * kSlots * 8 <= SHARED_BYTES, "all of it fits");

__device__ __forceinline__ const LayerParameters& layer_parameters_at(int n) {
  return reinterpret_cast<const LayerParameters*>(shared + kLayersAt)[n];
}
// Returns the biases of the thread block's filters in a layer, in the form in which a fed time step
// adds them to the currents.
__device__ __forceinline__ float* bias_address_of_layer(int layer) {
  return reinterpret_cast<float*>(shared + kShiftsAt) + layer * kMaxFiltersPerBlock;
}
__device__ __forceinline__ u32 full_barrier(int slot) {
  return shared_address(shared) + kBarriersAt + slot * 8;
}
__device__ __forceinline__ u32 empty_barrier(int slot) { return full_barrier(kSlots + slot); }
__device__ __forceinline__ u32 feature_map_address(int n) {
  return shared_address(shared) + kMapsAt + n % kMaps * kMapBytes;
}
__device__ __forceinline__ void multiplying_barrier() { named_barrier_sync(1, kMultiplying); }

// The part of a layer that a thread block computes, where the layer's output has kSide x kSide
// pixels and 512 / kSide filters.
template <int kSide>
struct BlockShareOfLayer {
  static constexpr int kParts = kSide == 8   ? 8
                                : kSide == 4 ? 4
                                             : 1;  // into which the pixels are divided
  static constexpr int kPixels = kSide * kSide / kParts, kAllFilters = 512 / kSide;
  static constexpr int kFilters = kAllFilters * kParts / kRanks;
  // A warpgroup computes up to four pixels and one part of the depth of the sums.
  static constexpr int kPixelGroups = ceil_div(kPixels, 4), kDepthGroups = kGroups / kPixelGroups;
  // A step of the GEMM has 64 channels of 64 filters, or up to 128 channels of 32 filters.
  static constexpr int kTileRows = kFilters / kTileFilters, kStepGroups = 2 / kTileRows;
  static_assert(kDepthGroups * kPixels * kRows * kFilters * 4 <= kSumsBytes, "the sums fit");
  int first_pixel, first_filter;

  __device__ __forceinline__ explicit BlockShareOfLayer(int rank)
      : first_pixel(rank / (kRanks / kParts) * kPixels),
        first_filter(rank % (kRanks / kParts) * kFilters) {}
};

constexpr int kLayersPerStage = kLayers / 4;

// Returns whether a layer is the first of a stage that halves the side of the map. The second layer
// of a stage that halves the side has two operands: its own convolution and that of the shortcut.
template <int kSide>
__device__ __forceinline__ bool layer_starts_stage(int number) {
  return kSide < 8 && number % kLayersPerStage == 0;
}
template <int kSide>
__device__ __forceinline__ int number_of_layer_operands(int number) {
  return kSide < 8 && number % kLayersPerStage == 1 ? 2 : 1;
}

// One operand of a layer's sums: its convolution or that of its shortcut, in GEMM steps of some
// channels of one tap. The window has `kernel`² taps and begins at offset `first` from the pixel;
// taps that read no pixel anywhere are not part of it. All fields of the operand are derived from
// the layer's number, so that the compiler sees that a warpgroup does not diverge.
template <int kSide>
struct LayerOperand {
  int first, kernel, stride, side, groups, map;
  int step_groups, steps_shift;  // of a tap
  bool whole;                    // whether the window is all of the filter, not a part of 3x3

  __device__ __forceinline__ LayerOperand(int number, bool second) {
    const int halved = second || layer_starts_stage<kSide>(number) ? 1 : 0;  // from input to output
    stride = 1 << halved;
    side = kSide << halved;
    groups = BlockShareOfLayer<kSide>::kAllFilters / kChannels >> halved;
    whole = second;
    first = second || kSide == 1 ? 0 : -1;
    kernel = second ? 1 : kSide == 1 ? side : 3;
    map = second ? number - 1 : number;
    step_groups = min_of(groups, BlockShareOfLayer<kSide>::kStepGroups);
    steps_shift = 31 - __clz(groups / step_groups);
  }
  __device__ __forceinline__ int steps() const { return kernel * kernel << steps_shift; }
};

// Position of a GEMM step within an operand: tap, channels and tile of the weight.
struct GemmStepPosition {
  int down, right, group;  // off the pixel; its first 64 channels
  int tile;                // of a row of the weight's tiles

  template <int kSide>
  __device__ __forceinline__ GemmStepPosition(const LayerOperand<kSide>& of, int number) {
    const int tap = number >> of.steps_shift;
    group = (number - (tap << of.steps_shift)) * of.step_groups;
    const int row = of.kernel == 3 ? tap * 11 >> 5 : tap >> (of.kernel - 1);  // tap / kernel
    down = of.first + row;
    right = of.first + tap - row * of.kernel;
    tile = (of.whole ? 0 : (down + 1) * 3 + right + 1) * of.groups + group;
  }
};
