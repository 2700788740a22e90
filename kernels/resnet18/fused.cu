// One kernel for each layer of the network: convolution, bias, residual and neurons over all time
// steps.
//
//   x[t] = theta · (conv(s)[t] + conv1x1(r)[t] or r[t]) + [t < fed] bias / divisor
//   spikes[t] = neurons(x[0..t])
//
// An implicit GEMM on bf16 tensor cores: spikes are bf16, which holds them exactly, and sums are
// fp32. A GEMM tile holds all time steps of its neurons. After the GEMM the sums pass through
// shared memory, so that each thread gets all time steps of two neurons. Threads and shared memory
// of the GEMM tiles: see resnet18/tiles.cuh. A thread block has two groups of threads, or four
// (GROUPS=4) if every thread block has a multiprocessor of its own. Bound: latency. At batch size
// 32 a layer takes a microsecond of tensor cores in at most 18 steps, and its weights and spikes
// are in L2. Each layer's kernel is launched with programmatic dependent launch (PDL): its thread
// blocks start while those of the previous layer end, and wait for them. Against per_op: no GEMM
// operand or membrane in memory, currents stored only for a backward pass, one launch a layer
// instead of T + 4, no multiplications with the padding.
#include "common/cluster.cuh"
#include "common/reduce.cuh"
#include "resnet18/neurons.cuh"
#include "resnet18/tiles.cuh"

constexpr int kImages = kTile / kSteps;  // images of a tile
static_assert(kTile % kSteps == 0, "a tile holds all time steps of its images");

__device__ __forceinline__ void wait_for_previous_layer() {
  allow_next_kernel();
  wait_for_previous_kernels();
}

// The output spikes of the layer have the layout [T, B, side², filters]. The second operand is the
// shortcut's 1x1 convolution with its own stride; its weight is null if the residual block has no
// such convolution. The pointers `identity` and `currents`, both [T, B, side², filters], may be
// null.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_block(const u16* first, const u16* weight, int depth, int first_side,
                         int first_channels, int kernel, int stride, const u16* second,
                         const u16* second_weight, int second_side, int second_channels,
                         int second_stride, const u16* identity, const float* bias,
                         const float* second_bias, u16* spikes, float* currents, int images,
                         int side, int filters, int fed, float divisor, float theta, int tmax) {
  wait_for_previous_layer();
  const int image_groups = ceil_div(images, kImages);
  const int pixel = blockIdx.x / image_groups, pixels = side * side;
  ImageRowsOfTile rows(images, kSteps);
  rows.image0 = blockIdx.x % image_groups * kImages;
  const int filter0 = blockIdx.y * kTile;

  // The addends of the sums (bias and identity) are loaded while the GEMM runs.
  using Own = NeuronPair<kSteps>;
  const i64 step_elements = static_cast<i64>(images) * pixels * filters;
  u32 residual[Own::kPairsOfThread][kSteps] = {};
  float shift[Own::kPairsOfThread][2] = {};
#pragma unroll
  for (int n = 0; n < Own::kPairsOfThread; ++n) {
    const Own pair(n, rows, pixel, pixels, filters, filter0);
    if (!pair.exists) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int filter = filter0 + pair.column + j;
      shift[n][j] = __fdiv_rn(bias[filter], divisor);
      if (second_bias != nullptr) shift[n][j] += __fdiv_rn(second_bias[filter], divisor);
    }
    if (identity == nullptr) continue;
#pragma unroll
    for (int t = 0; t < kSteps; ++t)
      residual[n][t] = load_16_bit_pair(identity + pair.at + t * step_elements);
  }

  Sums sums;
  const ConvolutionOperand main = {first, weight, depth, first_side, first_channels, kernel,
      stride};
  const ConvolutionOperand shortcut = {second,          second_weight, second_channels, second_side,
                            second_channels, 1,             second_stride};
  compute_convolution_sums<false>(sums, rows, main, shortcut, pixel / side, pixel % side, filters,
      filter0);
  share_sums_in_shared_memory(sums);

  const StBifNeuron neuron(theta, 0, tmax, 0.f);
#pragma unroll
  for (int n = 0; n < Own::kPairsOfThread; ++n) {
    const Own pair(n, rows, pixel, pixels, filters, filter0);
    if (!pair.exists) continue;
    float v[2] = {neuron.start_v, neuron.start_v}, u[2] = {neuron.start_u, neuron.start_u};
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const float2 sum = sum_pair_over_thread_groups(pair.row + t, pair.column);
      float2 x;
      x.x = fmaf(theta, sum.x + Bf16::low(residual[n][t]), t < fed ? shift[n][0] : 0.f);
      x.y = fmaf(theta, sum.y + Bf16::high(residual[n][t]), t < fed ? shift[n][1] : 0.f);
      const float low = advance_neuron_one_step<false>(neuron, x.x, t, v[0], u[0]).spike;
      const float high = advance_neuron_one_step<false>(neuron, x.y, t, v[1], u[1]).spike;
      const i64 at = pair.at + t * step_elements;
      store_pair(spikes + at, pack_spike_pair_as_bf16(low, high));
      if (currents != nullptr) *reinterpret_cast<float2*>(currents + at) = x;
    }
  }
}

#ifndef GROUPS  // blocks of more groups are for the layers above alone
// Computes the neurons of the stem over all time steps from their currents x[t] = [t < fed] (conv +
// bias) / divisor. The convolution of the stem is computed once for each image, since all fed time
// steps have the same input. Each thread computes two neurons of the stem's map [B, pixels,
// channels].
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_stem(const float* conv, const float* bias, u16* spikes, i64 neurons,
                        int channels, int fed, float divisor, float theta, int tmax) {
  wait_for_previous_layer();
  const i64 i = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * 2;
  if (i >= neurons) return;
  const int channel = static_cast<int>(i - quotient(i, channels) * channels);
  const float2 sum = *reinterpret_cast<const float2*>(conv + i);
  const float x[2] = {stem_current(sum.x, bias[channel], divisor),
                      stem_current(sum.y, bias[channel + 1], divisor)};
  const StBifNeuron neuron(theta, 0, tmax, 0.f);
  float v[2] = {neuron.start_v, neuron.start_v}, u[2] = {neuron.start_u, neuron.start_u};
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    const float low = advance_neuron_one_step<false>(neuron, t < fed ? x[0] : 0.f, t, v[0],
                                                     u[0]).spike;
    const float high = advance_neuron_one_step<false>(neuron, t < fed ? x[1] : 0.f, t, v[1],
                                                      u[1]).spike;
    store_pair(spikes + t * neurons + i, pack_spike_pair_as_bf16(low, high));
  }
}

// Computes the stem's pooled spikes, pool(Σ_t s) - pool(Σ_{t-1} s), of all time steps. Each thread
// computes two channels of the pooled map [B, out_side², channels]. `sources` may be null;
// otherwise it gets, for each pooled spike, the tap of the first maximum.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_pool(const u16* spikes, u16* pooled, unsigned char* sources, i64 outputs,
                        i64 inputs, int side, int channels, int out_side) {
  wait_for_previous_layer();
  const i64 i = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * 2;
  if (i >= outputs) return;
  const i64 position = quotient(i, channels), image = quotient(position, out_side * out_side);
  const int channel = static_cast<int>(i - position * channels);
  const int pixel = static_cast<int>(position - image * out_side * out_side);
  const int first_row = pixel / out_side * 2 - 1, first_column = pixel % out_side * 2 - 1;
  // Taps of the pooling window in the padding read the centre pixel and are ignored in the maximum,
  // so that no load needs a branch.
  const u16* from[9];
  bool inside[9];
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    int row = first_row + tap / 3, column = first_column + tap % 3;
    inside[tap] = row >= 0 && row < side && column >= 0 && column < side;
    if (!inside[tap]) row = first_row + 1, column = first_column + 1;
    from[tap] = spikes + ((image * side + row) * side + column) * channels + channel;
  }
  float sums[9][2] = {}, largest[kSteps][2];
  int source[kSteps][2];
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    largest[t][0] = largest[t][1] = -128.f;
    source[t][0] = source[t][1] = 0;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      const u32 pair = load_16_bit_pair(from[tap] + t * inputs);
      sums[tap][0] += Bf16::low(pair);
      sums[tap][1] += Bf16::high(pair);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool larger = inside[tap] && sums[tap][j] > largest[t][j];
        largest[t][j] = larger ? sums[tap][j] : largest[t][j];
        source[t][j] = larger ? tap : source[t][j];
      }
    }
  }
  // The kernel stores its results after all loads, because a store between loads would delay them.
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    float before[2] = {};
    if (t > 0) before[0] = largest[t - 1][0], before[1] = largest[t - 1][1];
    store_pair(pooled + t * outputs + i,
               Bf16::pack(largest[t][0] - before[0], largest[t][1] - before[1]));
    if (sources == nullptr) continue;
    *reinterpret_cast<u16*>(sources + t * outputs + i) =
        static_cast<u16>(source[t][0] | source[t][1] << 8);
  }
}

// Computes the classifier's logits [B, classes] = weight · features + share · bias, with features =
// scale · Σ over steps and pixels of spikes. If there are labels, the kernel also writes the
// features and the gradient of the mean cross entropy with respect to the last layer's currents.
// Each thread block computes the logits of one image.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_tail(const u16* spikes, const float* weight, const float* bias, float* logits,
                        const signed char* labels, float* features, const float* currents,
                        u16* gradient, int images, int classes, int pixels, int channels,
                        float scale, float share, float theta, int tmax) {
  __shared__ float scores[32], slopes[32];
  float* sums = reinterpret_cast<float*>(shared);
  wait_for_previous_layer();
  const i64 image = blockIdx.x;
  const i64 elements = static_cast<i64>(pixels) * channels, step_elements = images * elements;
  for (int channel = 2 * threadIdx.x; channel < channels; channel += 2 * kThreads) {
    float low = 0.f, high = 0.f;
    for (int pixel = 0; pixel < pixels; ++pixel) {
      const u16* from = spikes + image * elements + static_cast<i64>(pixel) * channels + channel;
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
        const u32 pair = load_16_bit_pair(from + t * step_elements);
        low += Bf16::low(pair);
        high += Bf16::high(pair);
      }
    }
    sums[channel] = scale * low;
    sums[channel + 1] = scale * high;
    if (labels == nullptr) continue;
    features[image * channels + channel] = scale * low;
    features[image * channels + channel + 1] = scale * high;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int class_index = threadIdx.x / 32; class_index < classes; class_index += kThreads / 32) {
    const float* row = weight + static_cast<i64>(class_index) * channels;
    float score = 0.f;
    for (int channel = lane; channel < channels; channel += 32)
      score = fmaf(row[channel], sums[channel], score);
    score = fmaf(share, bias[class_index], sum_across_lane_group<32>(score));
    if (lane > 0) continue;
    scores[class_index] = score;
    logits[image * classes + class_index] = score;
  }
  if (labels == nullptr) return;
  __syncthreads();
  if (threadIdx.x < classes) {
    float largest = scores[0], powers = 0.f;
    for (int i = 1; i < classes; ++i) largest = fmaxf(largest, scores[i]);
    for (int i = 0; i < classes; ++i) powers += expf(scores[i] - largest);
    const float label_probability = threadIdx.x == labels[image] ? 1.f : 0.f;
    slopes[threadIdx.x] = (expf(scores[threadIdx.x] - largest) / powers - label_probability) /
        images;
  }
  __syncthreads();
  const StBifNeuron neuron(theta, 0, tmax, 0.f);
  const GaussianSurrogate surrogate(neuron);
  for (int i = threadIdx.x; i < elements; i += kThreads) {
    const i64 at = image * elements + i;
    float x[kSteps], slope = 0.f;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) x[t] = currents[at + t * step_elements];
    for (int class_index = 0; class_index < classes; ++class_index)
      slope = fmaf(slopes[class_index],
                   weight[static_cast<i64>(class_index) * channels + i % channels], slope);
    float g[kSteps];
#pragma unroll
    for (int t = 0; t < kSteps; ++t) g[t] = scale * slope;
    spike_to_current_gradients(neuron, surrogate, x, g);
#pragma unroll
    for (int t = 0; t < kSteps; ++t) gradient[at + t * step_elements] = Bf16::from_f32(g[t]);
  }
}
#endif
