// ResNet-18 inference of the whole network, from images to logits, in one launch: groups of eight
// thread blocks compute a few images each and exchange spikes through L2. In training, a separate
// launch computes the stem's neurons and the pooling after them; this launch then computes the
// layers from the pooled spikes.
//
//   x[t] = theta · (conv(s)[t] + conv1x1(r)[t] or r[t]) + [t < fed] bias / divisor
//   spikes[t] = neurons(x[0..t])
//   logits = weight · scale · Σ_t spikes + share · bias
//
// Sixteen rows belong to each pixel: all time steps of 16 / T images. In each layer a block has
// some pixels and filters, with all time steps of their neurons. A block begins a layer as soon as
// the spikes that its part reads have arrived, so all blocks have to be resident at once. A group
// of blocks processes its images one after another. Threads: four warpgroups multiply, with 32 or
// 64 filters and one warp for each pixel; the warpgroups share the pixels and the depth. After a
// layer's GEMM each thread computes the neurons of two filters. One more warp copies weights to a
// ring of slots in shared memory, 32 filters by 64 channels each, ahead of all layers. Shared
// memory: the ring of weights; the sums of each part of the depth; three packed spike maps, used in
// rotation; the layers' parameters; barriers. Bound: tensor cores. A wgmma whose operand x is in
// registers takes 64 cycles, for any number of filters up to 64. Besides the wgmmas, the latencies
// of exchanging spikes and of the neurons limit this kernel. Against the fused kernels: no launch
// between layers, packed spikes between thread blocks, a tenth of the bytes from L2.
#include "common/bulk.cuh"
#include "common/cluster.cuh"
#include "common/element16.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"
#include "common/stages.cuh"
#include "common/tensor_copy.cuh"
#include "common/wgmma/tile.cuh"
#include "resnet18/best.cuh"
#include "resnet18/best_stem.cuh"
#include "resnet18/neurons.cuh"
#include "resnet18/packed.cuh"

// Index of the thread's warpgroup; the shuffle shows the compiler that the index is uniform in a
// warp.
__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
}

// Copies the weights of a layer to the ring of slots; `slot` counts all slots used so far. One
// thread executes the function.
template <int kSide>
__device__ __forceinline__ void copy_layer_weights(int number, int rank, int& slot) {
  using Own = BlockShareOfLayer<kSide>;
  const LayerParameters& layer = layer_parameters_at(number);
  const Own share(rank);
#pragma unroll 1
  for (int second = 0; second < number_of_layer_operands<kSide>(number); ++second) {
    const LayerOperand<kSide> operand(number, second != 0);
    const u16* weight = second != 0 ? layer.second_weight : layer.weight;
    const int row_tiles = second != 0 ? operand.groups : static_cast<int>(layer.depth);
    const int steps = operand.steps();
#pragma unroll 1
    for (int i = 0; i < steps; ++i, ++slot) {
      const GemmStepPosition step(operand, i);
      const int at = slot % kSlots, round = slot / kSlots;
      if (round > 0) mbarrier_wait(empty_barrier(at), (round - 1) % 2);
      const u32 bytes = Own::kTileRows * operand.step_groups * kTileBytes;
      mbarrier_arrive_expect_bytes(full_barrier(at), bytes);
#pragma unroll
      for (int n = 0; n < Own::kTileRows; ++n) {
        const int row = share.first_filter / kTileFilters + n;
        bulk_copy_to_shared(shared_address(shared) + at * kSlotBytes + n * kTileBytes,
                  weight + (row * row_tiles + step.tile) * (kTileBytes / 2),
                  bytes / Own::kTileRows, full_barrier(at));
      }
    }
  }
}

// Computes a warpgroup's sums of a layer; the sums are doubled, as the spikes are. While the tensor
// cores work for one warpgroup, the other warpgroups unpack the spikes of their next step.
template <int kSide>
__device__ __forceinline__ void multiply(float (&sums)[BlockShareOfLayer<kSide>::kFilters / 2],
                                         int number,
                                         int rank, int& slot) {
  using Own = BlockShareOfLayer<kSide>;
  constexpr int kDepthStepsOfTile = kChannels / 16, kOfStep = Own::kStepGroups * kDepthStepsOfTile;
  const Own share(rank);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warpgroup();
  const int own_pixel = group % Own::kPixelGroups * 4 + warp;
  const int depth_group = group / Own::kPixelGroups;
  const int pixel = share.first_pixel + own_pixel;
  const u32 factor = lane_factor(lane);
#pragma unroll 1
  for (int second = 0; second < number_of_layer_operands<kSide>(number); ++second) {
    const LayerOperand<kSide> operand(number, second != 0);
    const int side = operand.side, steps = operand.steps();
    const int row = pixel / kSide * operand.stride, column = pixel % kSide * operand.stride;
    const u32 map = feature_map_address(operand.map + kMaps) + lane_words(lane);
    // Returns the address of the spikes that a GEMM step reads, and whether the pixel under the tap
    // exists. Outside of the map spikes count as zero, and the returned address is that of any
    // existing pixel.
    bool exists;
    u32 words;
    const auto find = [&](int number) {
      const GemmStepPosition step(operand, number);
      const int y = row + step.down, x = column + step.right;
      exists = own_pixel < Own::kPixels && y >= 0 && y < side && x >= 0 && x < side;
      words = map + ((exists ? y * side + x : 0) * operand.groups + step.group) * kGroupBytes;
    };
    find(depth_group);
#pragma unroll 1
    for (int i = depth_group; i < steps; i += Own::kDepthGroups) {
      const int at = (slot + i) % kSlots;
      const u64 weights = ::wgmma_operand_descriptor(shared_address(shared) + at * kSlotBytes);
      u32 a[kOfStep][4];
      int tile[kOfStep];
#pragma unroll
      for (int k = 0; k < kOfStep; ++k) {
        // A tap with only one group of 64 channels has no second group: zeros stand for its spikes,
        // multiplied by the first group's weights.
        tile[k] = k / kDepthStepsOfTile < operand.step_groups ? k / kDepthStepsOfTile : 0;
        const u32 bits = exists && tile[k] == k / kDepthStepsOfTile ? kTopBits : 0;
        load_spike_fragment(a[k], (words + tile[k] * kGroupBytes) ^ (k % kDepthStepsOfTile * 16),
                            factor, bits);
      }
      mbarrier_wait(full_barrier(at), (slot + i) / kSlots % 2);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kOfStep; ++k)
        wgmma_w_transposed(
            sums, a[k],
            advance_operand_descriptor(weights, tile[k] * kTileBytes + k % kDepthStepsOfTile * 32));
      wgmma_commit();
      find(i + Own::kDepthGroups);
      wgmma_wait<0>();
      if (threadIdx.x % kGroupThreads == 0)
        barrier_arrive_count_times(empty_barrier(at), 2 / Own::kPixelGroups);
    }
    slot += steps;
  }
}

// Layout of the GEMM sums in shared memory: part of the depth, pixel of the thread block, row,
// filter of the thread block. The order of the filters depends on the row, so that the rows of a
// fragment lie in different banks.
template <int kSide>
struct SharedGemmSums {
  using Own = BlockShareOfLayer<kSide>;
  static constexpr int kRowBytes = Own::kFilters * 4, kPixelBytes = kRows * kRowBytes;
  static constexpr int kPartBytes = Own::kPixels * kPixelBytes;
  static constexpr int kFilterOrders = 4, kFilterOrderBytes = 32;  // orders of filters, by row
  static_assert(kRowBytes >= kFilterOrders * kFilterOrderBytes, "an order permutes a row");

  // Returns the shared-memory address of the first GEMM sum of a row. The sum of a filter lies `4 ·
  // filter ^ row % kFilterOrders · kFilterOrderBytes` further; the second term is a constant in
  // unrolled loops over rows.
  static __device__ __forceinline__ char* at(int part, int pixel, int row) {
    return shared + kSumsAt + part * kPartBytes + pixel * kPixelBytes + row * kRowBytes;
  }
};

// Writes a warpgroup's GEMM sums to shared memory, from which all threads read them.
template <int kSide>
__device__ __forceinline__ void write_sums_to_shared_memory(
    const float (&sums)[BlockShareOfLayer<kSide>::kFilters / 2]) {
  using Own = BlockShareOfLayer<kSide>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warpgroup();
  const int pixel = group % Own::kPixelGroups * 4 + warp, part = group / Own::kPixelGroups;
  if (pixel >= Own::kPixels) return;
  using At = SharedGemmSums<kSide>;
  const int row = lane / 4;
  char* const first = At::at(part, pixel, row) + lane % 4 * 8;
#pragma unroll
  for (int turn = 0; turn < At::kFilterOrders; ++turn) {
    char* const to = first + (turn ^ row % At::kFilterOrders) * At::kFilterOrderBytes;
#pragma unroll
    for (int j = turn; j < Own::kFilters / 8; j += At::kFilterOrders)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(to + (j - turn) * At::kFilterOrderBytes +
                                   half * 8 * At::kRowBytes) =
            make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
  }
}

// Returns the address to which this group of thread blocks sends the output map of a layer, which
// has `pixels` pixels.
__device__ __forceinline__ u64* output_map_address(const LayerParameters& layer, int pixels,
                                                   int channels) {
  const i64 map_words = static_cast<i64>(pixels) * channels;
  return layer.sent + blockIdx.x / kRanks * map_words;
}

// Waits for the pixel rows `first` to `last` of a spike map that other thread blocks send, and
// copies them to the packed map `number`.
__device__ __forceinline__ void receive_packed_map_rows(const u64* from, int number, int side,
                                                        int channels,
                                        int first, int last, u32 tag) {
  constexpr int kMaxPieces = 2;  // pieces of two words of a thread: 4x4 pixels of 128 channels
  const int words_per_pixel = channels / kChannels * (kGroupBytes / 8);
  const int begin = max_of(first, 0) * side * words_per_pixel;
  const int end = min_of(last + 1, side) * side * words_per_pixel;
  const u32 to = feature_map_address(number);
  u32 missing = 0;
#pragma unroll
  for (int i = 0; i < kMaxPieces; ++i)
    if (begin + static_cast<int>(threadIdx.x) + i * kMultiplying < end) missing |= 1u << i;
  while (missing != 0) {
    u32 words[kMaxPieces][2];
    bool came[kMaxPieces];
#pragma unroll
    for (int i = 0; i < kMaxPieces; ++i)
      if (missing >> i & 1)
        came[i] = receive_tagged_words(from + 2 * (begin + threadIdx.x + i * kMultiplying),
            words[i], tag);
#pragma unroll
    for (int i = 0; i < kMaxPieces; ++i)
      if ((missing >> i & 1) && came[i]) {
        const u32 at = to + 8 * (begin + threadIdx.x + i * kMultiplying);
        store_shared_b32(at, words[i][0]);
        store_shared_b32(at + 4, words[i][1]);
        missing &= ~(1u << i);
      }
  }
}

struct LayerNeuronArguments {
  int images, image0, fed;  // the group's first image
  float theta;
  int tmax;
  u32 tag;  // of the round
};

// Computes one layer: waits for its input spikes, multiplies, advances the neurons and sends their
// spikes.
template <int kSide>
__device__ __forceinline__ void compute_layer(int number, int rank, int& slot,
                                              const LayerNeuronArguments& with) {
  using Own = BlockShareOfLayer<kSide>;
  constexpr int kPairs = Own::kFilters / 2, kUnits = kRows / kUnit;  // pairs of filters, row units
  constexpr int kNeuronPairTasks = Own::kPixels * kUnits * kPairs;
  static_assert(kMultiplying % kPairs == 0, "a thread keeps its filters");
  const LayerParameters& layer = layer_parameters_at(number);
  const Own share(rank);
  const int pair = threadIdx.x % kPairs, filter = share.first_filter + 2 * pair;
  if (number > 0) {
    const int first = share.first_pixel / kSide, rows = Own::kPixels / kSide;
    const LayerOperand<kSide> input(number, false);
    const int channels = input.groups * kChannels;
    receive_packed_map_rows(output_map_address(layer_parameters_at(number - 1),
        input.side * input.side, channels), number, input.side,
            channels, first * input.stride - 1, (first + rows - 1) * input.stride + 1, with.tag);
  }
  multiplying_barrier();
  float sums[Own::kFilters / 2] = {};
  multiply<kSide>(sums, number, rank, slot);
  write_sums_to_shared_memory<kSide>(sums);
  multiplying_barrier();

  const float2 shift = *reinterpret_cast<const float2*>(bias_address_of_layer(number) + 2 * pair);
  const StBifNeuron neuron(with.theta, 0, with.tmax, 0.f);
  const float half_theta = 0.5f * with.theta;  // as sums are doubled
  const bool identity = number % 2 == 1 && number_of_layer_operands<kSide>(number) == 1;
  u64* sent = output_map_address(layer, kSide * kSide, Own::kAllFilters);
  for (int task = threadIdx.x; task < kNeuronPairTasks; task += kMultiplying) {
    const int unit = task / kPairs % kUnits, own_pixel = task / kPairs / kUnits;
    const int pixel = share.first_pixel + own_pixel;
    float v[2], u[2];
    // Shared-memory addresses of the unit's rows of sums, one for each order of filters.
    using At = SharedGemmSums<kSide>;
    const char* sums_at[At::kFilterOrders];
#pragma unroll
    for (int turn = 0; turn < At::kFilterOrders; ++turn)
      sums_at[turn] =
          At::at(0, own_pixel, unit * kUnit) + ((pair * 8) ^ (turn * At::kFilterOrderBytes));
#pragma unroll
    for (int octet = 0; octet < kUnit / kOctet; ++octet) {
      const u32 offset = word_offset(filter / 2, unit * (kUnit / kOctet) + octet);
      const u32 offset_of_pixel = pixel * (Own::kAllFilters / kChannels) * kGroupBytes;
      const u32 before =
          identity ? load_shared_b32(feature_map_address(number + 2) + offset_of_pixel + offset)
                   : 0;
      // All input currents are loaded before the first time step, so that the loads do not wait for
      // the neurons.
      float2 x[kOctet];
      float low[kOctet], high[kOctet];
      const auto row = [&](int r) { return unit * kUnit + octet * kOctet + r; };
      const auto step = [&](int r) { return (octet * kOctet + r) % kSteps; };
#pragma unroll
      for (int r = 0; r < kOctet; ++r) {
        const int row_in_unit = octet * kOctet + r;
        const char* const from =
            sums_at[row_in_unit % At::kFilterOrders] + row_in_unit * At::kRowBytes;
        x[r] = *reinterpret_cast<const float2*>(from);
#pragma unroll
        for (int part = 1; part < Own::kDepthGroups; ++part) {
          const float2 addend_of_depth_part =
              *reinterpret_cast<const float2*>(from + part * At::kPartBytes);
          x[r].x += addend_of_depth_part.x;
          x[r].y += addend_of_depth_part.y;
        }
      }
      if (identity) {
#pragma unroll
        for (int r = 0; r < kOctet; ++r) {
          const u32 residual = spike_pair_in_top_bits(before, r);
          x[r].x += Bf16::low(residual);
          x[r].y += Bf16::high(residual);
        }
      }
#pragma unroll
      for (int r = 0; r < kOctet; ++r) {
        const bool is_fed_time_step = step(r) < with.fed;
        x[r].x = fmaf(half_theta, x[r].x, is_fed_time_step ? shift.x : 0.f);
        x[r].y = fmaf(half_theta, x[r].y, is_fed_time_step ? shift.y : 0.f);
      }
#pragma unroll
      for (int r = 0; r < kOctet; ++r) {
        if (step(r) == 0) v[0] = v[1] = neuron.start_v, u[0] = u[1] = neuron.start_u;
        low[r] = advance_neuron_one_step<false>(neuron, x[r].x, step(r), v[0], u[0]).spike;
        high[r] = advance_neuron_one_step<false>(neuron, x[r].y, step(r), v[1], u[1]).spike;
      }
      // In two's complement, the two bits of a spike are its presence and its sign.
      const u32 word = spikes_to_two_bit(low) | spikes_to_two_bit(high) << 16;
      send_word(sent + (offset_of_pixel + offset) / 4, word, with.tag);
      if (layer.spikes == nullptr) continue;
#pragma unroll
      for (int r = 0; r < kOctet; ++r) {
        const int image = with.image0 + row(r) / kSteps;
        if (image >= with.images) continue;
        const i64 frame = static_cast<i64>(step(r)) * with.images + image;
        const i64 to = (frame * kSide * kSide + pixel) * Own::kAllFilters + filter;
        store_pair(layer.spikes + to, pack_spike_pair_as_bf16(low[r], high[r]));
        if (layer.currents != nullptr) *reinterpret_cast<float2*>(layer.currents + to) = x[r];
      }
    }
  }
}

// Biases of one filter of the thread block in layer `number`: that of the layer and that of its
// shortcut. A thread loads the biases early and divides them later by the divisor.
struct FilterBiases {
  int number, own;
  float bias, second;
};

// Finds the layer and filter of bias number `i` of the thread block; biases are ordered by stage,
// layer and filter.
template <int kSide>
__device__ __forceinline__ void locate_bias(FilterBiases& of, int& filter, int& i, int first,
                                          int rank) {
  using Own = BlockShareOfLayer<kSide>;
  constexpr int kCount = kLayersPerStage * Own::kFilters;
  if (i >= 0 && i < kCount) {
    of.number = first + i / Own::kFilters;
    of.own = i % Own::kFilters;
    filter = Own(rank).first_filter + of.own;
  }
  i -= kCount;
}
__device__ __forceinline__ FilterBiases load_bias(int i, int rank) {
  FilterBiases of = {-1, 0, 0.f, 0.f};
  int filter = 0;
  locate_bias<8>(of, filter, i, 0, rank);
  locate_bias<4>(of, filter, i, kLayersPerStage, rank);
  locate_bias<2>(of, filter, i, 2 * kLayersPerStage, rank);
  locate_bias<1>(of, filter, i, 3 * kLayersPerStage, rank);
  if (of.number < 0) return of;
  const LayerParameters& layer = layer_parameters_at(of.number);
  of.bias = layer.bias[filter];
  if (layer.second_bias != nullptr) of.second = layer.second_bias[filter];
  return of;
}
// Stores the bias of a filter in the form in which each fed time step adds it. Each bias is divided
// only once, because a division takes as long as the additions of a layer.
__device__ __forceinline__ void store_divided_bias(const FilterBiases& of, float divisor) {
  if (of.number < 0) return;
  float shift = __fdiv_rn(of.bias, divisor);
  if (layer_parameters_at(of.number).second_bias != nullptr) shift += __fdiv_rn(of.second, divisor);
  bias_address_of_layer(of.number)[of.own] = shift;
}

// Packs the pooled spikes, [T, B, 64, 64], that the thread block's part of the first layer reads.
__device__ __forceinline__ void pack_pooled_spikes(const u16* pooled, int rank, int images,
                                            int image0) {
  const BlockShareOfLayer<8> share(rank);
  constexpr int kChunks = kChannels / 8, kSide = 8;
  const int first = max_of(share.first_pixel - kSide, 0);
  const int last = min_of(share.first_pixel + BlockShareOfLayer<8>::kPixels + kSide, kSide * kSide);
  for (int i = threadIdx.x; i < (last - first) * 2 * kChunks; i += kMultiplying) {
    const int chunk = i % kChunks, octet = i / kChunks % 2, pixel = first + i / kChunks / 2;
    uint4 spikes[kOctet];
#pragma unroll
    for (int r = 0; r < kOctet; ++r) {
      // Indices of images past the last one are replaced by the last image's, so that no load needs
      // a branch.
      const int row = octet * kOctet + r, image = min_of(image0 + row / kSteps, images - 1);
      const i64 frame = static_cast<i64>(row % kSteps) * images + image;
      spikes[r] = *reinterpret_cast<const uint4*>(
          pooled + (frame * kSide * kSide + pixel) * kChannels + 8 * chunk);
    }
    u32 words[4] = {};
#pragma unroll
    for (int r = 0; r < kOctet; ++r) {
      words[0] |= packed_pair(doubled(spikes[r].x), r);
      words[1] |= packed_pair(doubled(spikes[r].y), r);
      words[2] |= packed_pair(doubled(spikes[r].z), r);
      words[3] |= packed_pair(doubled(spikes[r].w), r);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      store_shared_b32(
          feature_map_address(0) + pixel * kGroupBytes + word_offset(4 * chunk + j, octet),
          words[j]);
  }
}

// Computes the logits: each warp of the group of thread blocks computes one image and class at a
// time.
__device__ __forceinline__ void compute_logits(const float* weight, const float* bias,
                                               float* logits,
                                         int images, int image0, int classes, float scale,
                                         float share, int rank) {
  constexpr int kFeatureChannels = 512;
  const int lane = threadIdx.x % 32;
  for (int task = threadIdx.x / 32 * kRanks + rank; task < kImages * classes;
       task += kMultiplying / 32 * kRanks) {
    const int local = task / classes, class_index = task % classes;
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < kFeatureChannels / 64; ++i) {
      const int pair = lane + 32 * i;
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        u32 rows = 0;  // of the image
#pragma unroll
        for (int r = 0; r < kOctet; ++r)
          if ((octet * kOctet + r) / kSteps == local) rows |= 1u << 2 * r;
        const u32 word = load_shared_b32(feature_map_address(kLayers) + word_offset(pair, octet));
        const float2 of_octet = spike_sums(word, rows);
        sum.x += of_octet.x;
        sum.y += of_octet.y;
      }
      const float* w = weight + static_cast<i64>(class_index) * kFeatureChannels + 2 * pair;
      score = fmaf(w[0], scale * sum.x, score);
      score = fmaf(w[1], scale * sum.y, score);
    }
    score = fmaf(share, bias[class_index], sum_across_lane_group<32>(score));
    const int image = image0 + local;
    if (lane == 0 && image < images)
      logits[static_cast<i64>(image) * classes + class_index] = score;
  }
}

// Computes the neurons of the stem and their pooled spikes, pool(Σ_t s) - pool(Σ_{t-1} s), for all
// time steps. Each thread has two channels of the pooled output [B, out_side², channels], for which
// it computes the neurons of nine pixels. A neuron's tracer is the sum of its spikes. `sources` may
// be null; otherwise it gets, for each pooled spike, the tap of the first maximum.
extern "C" __global__ void __launch_bounds__(STEM_THREADS)
    resnet18_best_stem(const float* conv, const float* bias, u16* pooled, unsigned char* sources,
                       i64 outputs, int side, int channels, int out_side, int fed, float divisor,
                       float theta, int tmax) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const i64 i = (static_cast<i64>(blockIdx.x) * STEM_THREADS + threadIdx.x) * 2;
  if (i >= outputs) return;
  const i64 position = quotient(i, channels), image = quotient(position, out_side * out_side);
  const int channel = static_cast<int>(i - position * channels);
  const int pixel = static_cast<int>(position - image * out_side * out_side);
  const int first_row = pixel / out_side * 2 - 1, first_column = pixel % out_side * 2 - 1;
  // Taps of the pooling window in the padding read the centre pixel and are ignored in the maximum,
  // so that no load needs a branch.
  float2 sums[9];
  bool inside[9];
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    int row = first_row + tap / 3, column = first_column + tap % 3;
    inside[tap] = row >= 0 && row < side && column >= 0 && column < side;
    if (!inside[tap]) row = first_row + 1, column = first_column + 1;
    const i64 at = ((image * side + row) * side + column) * channels + channel;
    sums[tap] = *reinterpret_cast<const float2*>(conv + at);
  }
  const float shift[2] = {bias[channel], bias[channel + 1]};
  const StBifNeuron neuron(theta, 0, tmax, 0.f);
  float largest[kSteps][2];  // as tracers, which are positive
  u32 source[kSteps] = {};
#pragma unroll
  for (int t = 0; t < kSteps; ++t) largest[t][0] = largest[t][1] = 0.f;
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    if (!inside[tap]) continue;
    const float x[2] = {stem_current(sums[tap].x, shift[0], divisor),
                        stem_current(sums[tap].y, shift[1], divisor)};
    float v[2] = {neuron.start_v, neuron.start_v}, u[2] = {neuron.start_u, neuron.start_u};
#pragma unroll
    for (int t = 0; t < kSteps; ++t)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        advance_neuron_one_step<false>(neuron, t < fed ? x[j] : 0.f, t, v[j], u[j]);
        if (sources != nullptr && u[j] > largest[t][j])
          source[t] = source[t] & ~(0xffu << 8 * j) | tap << 8 * j;
        largest[t][j] = fmaxf(largest[t][j], u[j]);
      }
  }
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    float before[2] = {neuron.start_u, neuron.start_u};
    if (t > 0) before[0] = largest[t - 1][0], before[1] = largest[t - 1][1];
    store_pair(pooled + t * outputs + i,
               pack_spike_pair_as_bf16(largest[t][0] - before[0], largest[t][1] - before[1]));
    if (sources != nullptr)
      *reinterpret_cast<u16*>(sources + t * outputs + i) = static_cast<u16>(source[t]);
  }
}

// Computes the network's logits from images or, if `images` is null, from pooled spikes. With
// images, the kernel also writes the stem's pooled spikes to `pooled` unless it is null. If
// `logits` is null, another kernel computes the classifier. `rounds` counts the rounds of each
// thread block over all launches of the kernel.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    resnet18_best_layers(const LayerParameters* layers, const float* inputs,
        const uint4* stem_filters,
                         const float* stem_bias, u64* stem_sent, float stem_divisor, u16* pooled,
                         const float* weight, const float* bias, float* logits, u32* rounds,
                         int images, int classes, int fed, float divisor, float theta, int tmax,
                         float scale, float share) {
  const int rank = blockIdx.x % kRanks;
  begin_stage_clocks();
  for (u32 i = threadIdx.x; i < kLayers * sizeof(LayerParameters) / 8; i += THREADS)
    reinterpret_cast<u64*>(shared + kLayersAt)[i] = reinterpret_cast<const u64*>(layers)[i];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(full_barrier(i), 1);
      mbarrier_init(empty_barrier(i), 2);
    }
    mbarrier_init_fence();
  }
  u32 tag = rounds[blockIdx.x];
  __syncthreads();

  const int groups = gridDim.x / kRanks, all = ceil_div(images, kImages);
  int slot = 0;
  if (threadIdx.x >= kMultiplying) {
    setmaxnreg_decrease<24>();
    if (threadIdx.x > kMultiplying) return;
    for (int group = blockIdx.x / kRanks; group < all; group += groups) {
#pragma unroll 1
      for (int n = 0; n < kLayersPerStage; ++n) copy_layer_weights<8>(n, rank, slot);
#pragma unroll 1
      for (int n = 0; n < kLayersPerStage; ++n)
        copy_layer_weights<4>(kLayersPerStage + n, rank, slot);
#pragma unroll 1
      for (int n = 0; n < kLayersPerStage; ++n)
        copy_layer_weights<2>(2 * kLayersPerStage + n, rank, slot);
#pragma unroll 1
      for (int n = 0; n < kLayersPerStage; ++n)
        copy_layer_weights<1>(3 * kLayersPerStage + n, rank, slot);
    }
    return;
  }
  setmaxnreg_increase<112>();
  // Each thread divides at most two biases, at a time when no other thread waits for it.
  const FilterBiases low = load_bias(threadIdx.x, rank), high = load_bias(threadIdx.x +
      kMultiplying, rank);
  end_timed_stage(0);
  bool divided = false;
  for (int group = blockIdx.x / kRanks; group < all; group += groups) {
    ++tag;
    const int image0 = group * kImages;
    const LayerNeuronArguments with = {images, image0, fed, theta, tmax, tag};
    if (inputs != nullptr) {
      StemThreadInputs in;
      load_stem_image_pixels(in, inputs, rank, images, image0);
      load_stem_parameters(in, stem_filters, stem_bias);
      store_image_pixels_to_shared(in);
      multiplying_barrier();
      end_timed_stage(1);
      compute_stem_convolution_sums(in.b);
      multiplying_barrier();
      end_timed_stage(2);
      const StemPoolArguments stem = {in.shift, stem_sent, stem_divisor};
      compute_and_send_pooled_stem_spikes(stem, pooled, rank, images, image0, fed, theta, tmax,
          tag);
      if (!divided) store_divided_bias(low, divisor), store_divided_bias(high, divisor);
      receive_packed_map_rows(stem_sent + blockIdx.x / kRanks * kPooledWords, 0, kPooledSide,
          kChannels, rank - 1,
              rank + 1, tag);
    } else {
      pack_pooled_spikes(pooled, rank, images, image0);
      if (!divided) store_divided_bias(low, divisor), store_divided_bias(high, divisor);
    }
    divided = true;
    end_timed_stage(3);
#pragma unroll 1
    for (int n = 0; n < kLayersPerStage; ++n)
      compute_layer<8>(n, rank, slot, with), end_timed_stage(4 + n);
#pragma unroll 1
    for (int n = 0; n < kLayersPerStage; ++n)
      compute_layer<4>(kLayersPerStage + n, rank, slot, with),
          end_timed_stage(4 + kLayersPerStage + n);
#pragma unroll 1
    for (int n = 0; n < kLayersPerStage; ++n)
      compute_layer<2>(2 * kLayersPerStage + n, rank, slot, with),
          end_timed_stage(4 + 2 * kLayersPerStage + n);
#pragma unroll 1
    for (int n = 0; n < kLayersPerStage; ++n)
      compute_layer<1>(3 * kLayersPerStage + n, rank, slot, with),
          end_timed_stage(4 + 3 * kLayersPerStage + n);
    if (logits != nullptr) {
      receive_packed_map_rows(output_map_address(layer_parameters_at(kLayers - 1), 1, 512), kLayers,
          1, 512, 0, 0, tag);
      multiplying_barrier();
      compute_logits(weight, bias, logits, images, image0, classes, scale, share, rank);
    }
    // The barrier ensures that all threads have read the spike maps before these are overwritten.
    multiplying_barrier();
    end_timed_stage(4 + kLayers);
  }
  store_stage_clocks();
  if (threadIdx.x == 0) rounds[blockIdx.x] = tag;
}
