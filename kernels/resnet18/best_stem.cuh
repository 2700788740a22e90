// Stem of ResNet-18, computed in the launch of the layers: 7x7 convolution with stride 2, neurons,
// 3x3 pooling with stride 2. A thread block computes one row of the pooled map, which needs three
// rows of the convolution, and sends the row's spikes as a layer does. Saving the stem's state for
// a backward pass is deliberately not part of best_stem.cuh.
//
// Images are copied to shared memory as bf16 with four channels a pixel, the last of which is zero.
// With four channels a pixel, sixteen columns of the stem's GEMM, [7][8][4] of rows, pixels and
// channels, are contiguous for ldmatrix.
#pragma once
#include "common/element16.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "resnet18/best.cuh"
#include "resnet18/neurons.cuh"
#include "resnet18/packed.cuh"

constexpr int kImageSide = 32, kImageChannels = 3, kWindow = 7;
constexpr int kConvSide = kImageSide / 2, kConvRows = 3, kPooledSide = kConvSide / 2;
constexpr int kImageRows = 2 * (kConvRows - 1) + kWindow, kImageColumns = 2 * kConvSide + 6;
constexpr int kPixelBytes = 8, kImageRowBytes = kImageColumns * kPixelBytes;
constexpr int kImageBytes = kImageRows * kImageRowBytes;
constexpr int kStemSteps = 2 * kWindow;  // of 16 columns: four pixels
constexpr int kStemRowTiles = kImages * kConvRows;  // of 16 pixels
constexpr int kStemPitch = kChannels + 2;  // of sums: neighbours are in different banks
static_assert(kImages * kImageBytes <= kMapBytes, "the images fit a map");
static_assert(kStemRowTiles * kConvSide * kStemPitch * 4 <= kSumsBytes, "the sums fit");
static_assert(kImageRowBytes % 16 == 0 && kPooledSide == kRanks, "a block has a row");

constexpr int kPooledWords = kPooledSide * kPooledSide * kChannels;  // that a group sends

struct StemPoolArguments {
  float2 shift;  // of the thread's channels
  u64* sent;          // packed maps of the pooled spikes, of each group
  float divisor;
};

constexpr int kStemPixels = kImages * kImageRows * kImageColumns;
constexpr int kPixelsOfThread = ceil_div(kStemPixels, kMultiplying);

// Data that a thread of the stem reads from device memory: pixels of the images, its filters as B
// fragments and the biases of its channels. A thread issues all its loads of stem inputs before it
// uses the first.
struct StemThreadInputs {
  float x[kPixelsOfThread][kImageChannels];
  uint4 b[kStemSteps / 2];
  float2 shift;
};

// Index of the pair of channels whose neurons the thread computes.
__device__ __forceinline__ int stem_channel_pair_index() {
  return threadIdx.x % (kMultiplying / 2) / 32 * 4 + threadIdx.x % 32 / kPooledSide;
}

// Loads the thread's filters of the stem, stored as [8 filters each][pair of steps][lane][two words
// of each], and its biases.
__device__ __forceinline__ void load_stem_parameters(StemThreadInputs& in, const uint4* filters,
                                                     const float* bias) {
  const int lane = threadIdx.x % 32, filter_octet = threadIdx.x / 32 % 8;
#pragma unroll
  for (int i = 0; i < kStemSteps / 2; ++i)
    in.b[i] = filters[(filter_octet * (kStemSteps / 2) + i) * 32 + lane];
  in.shift =
      make_float2(bias[2 * stem_channel_pair_index()], bias[2 * stem_channel_pair_index() + 1]);
}

// Loads the rows of images, [B, 32, 32, 3], that the thread block's part of the stem reads,
// surrounded by zeros.
__device__ __forceinline__ void load_stem_image_pixels(StemThreadInputs& in, const float* images,
                                                       int rank,
                                            int count, int image0) {
  constexpr int kPixels = kStemPixels, kOfThread = kPixelsOfThread;
  auto& x = in.x;
#pragma unroll
  for (int n = 0; n < kOfThread; ++n) {
    const int i = threadIdx.x + n * kMultiplying;
    const int local = i / (kImageRows * kImageColumns);
    const int row = i / kImageColumns % kImageRows + 4 * rank - 5, column = i % kImageColumns - 3;
    const bool inside = i < kPixels && row >= 0 && row < kImageSide && column >= 0 &&
                        column < kImageSide;
    // Indices of images past the last one are replaced by the last image's index, so that all loads
    // are valid.
    const i64 image = min_of(image0 + local, count - 1);
    const float* from =
        images + ((image * kImageSide + (inside ? row : 0)) * kImageSide + (inside ? column : 0)) *
                     kImageChannels;
#pragma unroll
    for (int c = 0; c < kImageChannels; ++c) x[n][c] = inside ? from[c] : 0.f;
  }
}

// Writes the loaded pixels of the images to shared memory as bf16.
__device__ __forceinline__ void store_image_pixels_to_shared(const StemThreadInputs& in) {
  constexpr int kPixels = kStemPixels, kOfThread = kPixelsOfThread;
  const u32 to = feature_map_address(1);
  const auto& x = in.x;
#pragma unroll
  for (int n = 0; n < kOfThread; ++n) {
    const int i = threadIdx.x + n * kMultiplying;
    if (i >= kPixels) continue;
    store_shared_b32(to + i * kPixelBytes, Bf16::pack(x[n][0], x[n][1]));
    store_shared_b32(to + i * kPixelBytes + 4, Bf16::pack(x[n][2], 0.f));
  }
}

// Returns the shared-memory address of the sum of a filter for one pixel of a row tile.
__device__ __forceinline__ float* stem_sums_at(int tile, int pixel, int filter) {
  return reinterpret_cast<float*>(shared + kSumsAt) + (tile * kConvSide + pixel) * kStemPitch +
         filter;
}

// Computes the sums of the stem's convolution: each warp has eight filters and half of the row
// tiles.
__device__ __forceinline__ void compute_stem_convolution_sums(const uint4 (&b)[kStemSteps / 2]) {
  constexpr int kHalfOfRowTiles = ceil_div(kStemRowTiles, 2);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int filter_octet = warp % 8, first = warp / 8 * kHalfOfRowTiles;
  const u32 shared_image_address = feature_map_address(1) + first / kConvRows * kImageBytes +
                                   first % kConvRows * 2 * kImageRowBytes +
                                   (lane % 16 + lane / 16) * 2 * kPixelBytes;
  // Offset from the warp's first row tile to its i-th row tile; 0 if the i-th does not exist.
  const auto tile = [&](int i) {
    return first + i < kStemRowTiles
               ? i / kConvRows * kImageBytes + i % kConvRows * 2 * kImageRowBytes
               : 0;
  };
  static_assert(kHalfOfRowTiles % kConvRows == 0 || kStemRowTiles == kConvRows,
                "tiles are of whole images");
  float sums[kHalfOfRowTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kStemSteps; ++step) {
    const uint4 pair = b[step / 2];
#pragma unroll
    for (int i = 0; i < kHalfOfRowTiles; ++i) {
      u32 a[4];
      ldmatrix_x4(a, shared_image_address + tile(i) + step / 2 * kImageRowBytes +
                  step % 2 * 4 * kPixelBytes);
      if (step % 2 == 0) {
        Bf16::mma(sums[i], a, pair.x, pair.y);
      } else {
        Bf16::mma(sums[i], a, pair.z, pair.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHalfOfRowTiles; ++i) {
    if (first + i >= kStemRowTiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(
          stem_sums_at(first + i, lane / 4 + 8 * half, filter_octet * 8 + lane % 4 * 2)) =
          make_float2(sums[i][2 * half], sums[i][2 * half + 1]);
  }
}

// Computes the neurons of the stem and their pooled spikes, pool(Σ_t s) - pool(Σ_{t-1} s). A thread
// computes two channels of a pooled pixel, one after the other. A thread computes two of the three
// columns of the pooling window; the adjacent lane has the third column. A neuron's tracer is the
// sum of its spikes.
__device__ __forceinline__ void compute_and_send_pooled_stem_spikes(const StemPoolArguments& stem,
                                                                    u16* pooled, int rank,
                                          int images, int image0, int fed, float theta, int tmax,
                                          u32 tag) {
  constexpr int kUnits = kRows / kUnit, kThreadsOfUnit = kMultiplying / 2, kWords = kUnit / kOctet;
  static_assert(kThreadsOfUnit == kPooledSide * kChannels / 2,
                "a thread has a pixel's pair of channels");
  const int unit = threadIdx.x / kThreadsOfUnit;
  if (unit >= kUnits) return;
  const int lane = threadIdx.x % 32, column = lane % kPooledSide;
  const int pair = stem_channel_pair_index();
  const int pixel = rank * kPooledSide + column;
  const StBifNeuron neuron(theta, 0, tmax, 0.f);
  u32 words[kWords] = {};
#pragma unroll 1
  for (int c = 0; c < 2; ++c) {
    const int channel = 2 * pair + c;
    const float shift = c == 0 ? stem.shift.x : stem.shift.y;
    float x[kConvRows][2], v[kConvRows][2], u[kConvRows][2], before = 0.f;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      float spikes[kOctet];
#pragma unroll
      for (int r = 0; r < kOctet; ++r) {
        const int row = word * kOctet + r, t = row % kSteps;
        const int local = unit * (kUnit / kSteps) + row / kSteps;
        if (t == 0) {
          before = neuron.start_u;
#pragma unroll
          for (int i = 0; i < kConvRows; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float sum = *stem_sums_at(local * kConvRows + i, 2 * column + j, channel);
              x[i][j] = stem_current(sum, shift, stem.divisor);
              v[i][j] = neuron.start_v;
              u[i][j] = neuron.start_u;
            }
        }
        float largest[2] = {};  // of a column
#pragma unroll
        for (int i = 0; i < kConvRows; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            advance_neuron_one_step<false>(neuron, t < fed ? x[i][j] : 0.f, t, v[i][j], u[i][j]);
            // The first thread block has no row of the convolution above its first two rows.
            if (i > 0 || rank > 0) largest[j] = fmaxf(largest[j], u[i][j]);
          }
        const float left = __shfl_up_sync(kFullWarp, largest[1], 1, kPooledSide);
        float most = fmaxf(largest[0], largest[1]);
        if (column > 0) most = fmaxf(most, left);
        spikes[r] = most - before;
        before = most;
        if (pooled != nullptr && image0 + local < images) {
          const i64 frame = static_cast<i64>(t) * images + image0 + local;
          pooled[(frame * kPooledSide * kPooledSide + pixel) * kChannels + channel] =
              Bf16::from_f32(spikes[r] * kInverseQuantum);
        }
      }
      words[word] |= spikes_to_two_bit(spikes) << 16 * c;
    }
  }
  u64* sent = stem.sent + blockIdx.x / kRanks * kPooledWords;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    const u32 offset = word_offset(pair, unit * kWords + word);
    send_word(sent + (pixel * kGroupBytes + offset) / 4, words[word], tag);
  }
}
