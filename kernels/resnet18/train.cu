// All operations of a ResNet-18 training step except GEMMs, neurons and the forward pass, one
// kernel for each, as a framework launches them in eager mode.
//
// Gradients of activations are fp32, [T, B, side, side, channels]; as operands of GEMMs they are
// rounded to bf16. Parameters and momenta are fp32 in memory. Every sum in these training kernels
// has a fixed order of additions. Threads: one for each element; the transposition and the column
// sums use tiles instead. Shared memory: tiles of 32 x 33 elements, and reductions over a thread
// block. Bound of these training kernels: memory bandwidth for large batches, launch latency for
// small ones.
#include "common/element16.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS;
constexpr int kTile = 32;  // rows and columns of a tile that is transposed

__device__ __forceinline__ i64 thread_index() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

// Rounds the columns from `first` on of the weight [filters, depth] to bf16 `packed` [filters,
// columns], followed by zeros.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_pack(const float* __restrict__ weight, u16* __restrict__ packed, i64 elements,
                        int depth, int first, int columns) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int column = first + static_cast<int>(i % columns);
  packed[i] =
      Bf16::from_f32(column < depth ? weight[i / columns * depth + column] : 0.f);
}

// Divides the biases by the divisor: shares = bias / divisor.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_share(const float* __restrict__ bias, float* __restrict__ shares, i64 elements,
                         float divisor) {
  const i64 i = thread_index();
  if (i < elements) shares[i] = __fdiv_rn(bias[i], divisor);
}

// In one thread block, computes the loss, mean over images of log Σ exp(logits) - logits[label],
// and the gradient of the logits.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_loss(const float* __restrict__ logits, const signed char* __restrict__ labels,
                        float* __restrict__ loss, float* __restrict__ gradient, int images,
                        int classes) {
  __shared__ float scratch[kThreads / 32];
  float sum = 0.f;
  for (int image = threadIdx.x; image < images; image += kThreads) {
    const float* row = logits + static_cast<i64>(image) * classes;
    const int label = labels[image];
    float largest = row[0];
    for (int i = 1; i < classes; ++i) largest = fmaxf(largest, row[i]);
    float powers = 0.f;
    for (int i = 0; i < classes; ++i) powers += expf(row[i] - largest);
    sum += logf(powers) + largest - row[label];
    for (int i = 0; i < classes; ++i)
      gradient[static_cast<i64>(image) * classes + i] =
          (expf(row[i] - largest) / powers - (i == label ? 1.f : 0.f)) / images;
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) *loss = sum / images;
}

// Computes the classifier's input: features [B, channels] = scale · Σ over steps and pixels of
// spikes.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_features(const signed char* __restrict__ spikes, float* __restrict__ features,
                            i64 elements, int channels, int pixels, int steps, float scale) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const i64 image = i / channels, images = elements / channels;
  int count = 0;
  for (int t = 0; t < steps; ++t) {
    const signed char* frame = spikes + (t * images + image) * pixels * channels + i % channels;
    for (int pixel = 0; pixel < pixels; ++pixel)
      count += frame[static_cast<i64>(pixel) * channels];
  }
  features[i] = scale * static_cast<float>(count);
}

// Gradients of the classifier's weight [classes, channels] and bias [classes]: the sums over images
// of the logits' gradient times features, and of the logits' gradient.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_classifier(const float* __restrict__ logits, const float* __restrict__ features,
                              float* __restrict__ weight, float* __restrict__ bias, i64 elements,
                              int images, int classes, int channels) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int label = static_cast<int>(i / channels), channel = static_cast<int>(i % channels);
  float sum = 0.f, total = 0.f;
  for (int image = 0; image < images; ++image) {
    const float g = logits[static_cast<i64>(image) * classes + label];
    sum = fmaf(g, features[static_cast<i64>(image) * channels + channel], sum);
    total += g;
  }
  weight[i] = sum;
  if (channel == 0) bias[label] = total;
}

// Computes the gradient of the last layer's spikes, equal in all time steps and pixels: scale · Σ
// over classes of the logits' gradient · weight.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_last(const float* __restrict__ logits, const float* __restrict__ weight,
                        float* __restrict__ gradient, i64 elements, int images, int classes,
                        int channels, int pixels, float scale) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int channel = static_cast<int>(i % channels);
  const i64 image = i / channels / pixels % images;
  float sum = 0.f;
  for (int label = 0; label < classes; ++label)
    sum = fmaf(logits[image * classes + label],
               weight[static_cast<i64>(label) * channels + channel], sum);
  gradient[i] = scale * sum;
}

// Rounds the matrix x [rows, columns] to bf16, both as it is and transposed. Each thread block
// rounds and transposes one tile of x.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_round(const float* __restrict__ x, u16* __restrict__ rounded,
                         u16* __restrict__ transposed, i64 rows, int columns) {
  __shared__ u16 tile[kTile][kTile + 1];
  const int lane = threadIdx.x % kTile, warp = threadIdx.x / kTile;
  const int tiles = ceil_div(columns, kTile);
  const i64 row0 = static_cast<i64>(blockIdx.x / tiles) * kTile;
  const int column0 = static_cast<int>(blockIdx.x % tiles) * kTile;
  for (int i = warp; i < kTile; i += kThreads / kTile) {
    if (row0 + i >= rows || column0 + lane >= columns) continue;
    const i64 at = (row0 + i) * columns + column0 + lane;
    tile[i][lane] = rounded[at] = Bf16::from_f32(x[at]);
  }
  __syncthreads();
  for (int i = warp; i < kTile; i += kThreads / kTile) {
    if (row0 + lane >= rows || column0 + i >= columns) continue;
    transposed[(column0 + i) * rows + row0 + lane] = tile[lane][i];
  }
}

// Sums the columns of x [rows, columns] over each of `splits` parts of the rows, to sums [splits,
// columns]. Each thread block sums 32 columns of x over one part of the rows.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_sum_rows(const float* __restrict__ x, float* __restrict__ sums, i64 rows,
                            int columns, int splits) {
  __shared__ float parts[kThreads / kTile][kTile];
  const int lane = threadIdx.x % kTile, warp = threadIdx.x / kTile;
  const int tiles = ceil_div(columns, kTile);
  const int split = blockIdx.x / tiles, column = blockIdx.x % tiles * kTile + lane;
  const i64 length = (rows + splits - 1) / splits;
  const i64 begin = split * length, end = min_of(rows, begin + length);
  float sum = 0.f;
  if (column < columns)
    for (i64 row = begin + warp; row < end; row += kThreads / kTile)
      sum += x[row * columns + column];
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kThreads / kTile; ++i) total += parts[i][lane];
  sums[static_cast<i64>(split) * columns + column] = total;
}

// Transpose of gathering: input [frames, side², channels] = [accumulate] input + factor · Σ over
// taps from `first` on of rows [frames, out_side², taps, channels].
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_scatter(const float* __restrict__ rows, float* __restrict__ input, i64 elements,
                           int side, int channels, int out_side, int kernel, int stride, int first,
                           int taps, float factor, int accumulate) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int channel = static_cast<int>(i % channels);
  const i64 position = i / channels;
  const int pixel = static_cast<int>(position % (side * side));
  const i64 frame = position / (side * side);
  float sum = 0.f;
  for (int tap = first; tap < first + taps; ++tap) {
    const int row = pixel / side - tap / kernel + kernel / 2;
    const int column = pixel % side - tap % kernel + kernel / 2;
    if (row < 0 || column < 0 || row % stride != 0 || column % stride != 0) continue;
    if (row / stride >= out_side || column / stride >= out_side) continue;
    const i64 from = (frame * out_side + row / stride) * out_side + column / stride;
    sum += rows[(from * taps + tap - first) * channels + channel];
  }
  input[i] = fmaf(factor, sum, accumulate != 0 ? input[i] : 0.f);
}

// Scales y into x: x = factor · y.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_scale(float* __restrict__ x, const float* __restrict__ y, i64 elements,
                         float factor) {
  const i64 i = thread_index();
  if (i < elements) x[i] = factor * y[i];
}

// Computes the gradient of the spikes before the telescoped pooling. A spike counts in the
// pooling's sums of all later time steps, so the spikes of a step get the pooling's gradient of
// that step minus that of the next. Each thread computes the gradient of one element of [B, side²,
// channels] for all time steps.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_pool(const float* __restrict__ pooled, const unsigned char* __restrict__ sources,
                        float* __restrict__ gradient, i64 elements, i64 outputs, int side,
                        int channels, int out_side, int steps) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int channel = static_cast<int>(i % channels);
  const i64 position = i / channels;
  const int pixel = static_cast<int>(position % (side * side));
  const i64 image = position / (side * side);
  const int row = pixel / side, column = pixel % side;
  float after = 0.f;
  for (int t = steps - 1; t >= 0; --t) {
    for (int y = row / 2; y <= (row + 1) / 2; ++y) {
      for (int x = column / 2; x <= (column + 1) / 2; ++x) {
        if (y >= out_side || x >= out_side) continue;
        const int tap = (row - 2 * y + 1) * 3 + column - 2 * x + 1;
        const i64 at = t * outputs + ((image * out_side + y) * out_side + x) * channels + channel;
        if (sources[at] == tap) after += pooled[at] - (t + 1 < steps ? pooled[at + outputs] : 0.f);
      }
    }
    gradient[t * elements + i] = after;
  }
}

// SGD update of one parameter [filters, depth]: m' = momentum · m + factor · g; p' = p - rate · m'.
// The gradient g has the columns from `first` on, in rows of `pitch` elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_train_sgd(const float* __restrict__ parameters, const float* __restrict__ momenta,
                       const float* __restrict__ gradient, float* __restrict__ new_parameters,
                       float* __restrict__ new_momenta, i64 elements, int depth, int first,
                       int columns, int pitch, float factor, float momentum, float rate) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int column = static_cast<int>(i % depth) - first;
  const float g = column >= 0 && column < columns ? gradient[i / depth * pitch + column] : 0.f;
  const float m = fmaf(momentum, momenta[i], factor * g);
  new_momenta[i] = m;
  new_parameters[i] = fmaf(-rate, m, parameters[i]);
}
