// Backward pass of a layer in one kernel: the transposed convolution, the gradient of the shortcut,
// and the backward of the neurons that wrote the convolution's input, which replays their currents.
//
//   spikes' gradient = theta · (convT(g) + conv1x1T(h) or h)
//   currents' gradient = neurons backward(currents, spikes' gradient)
//
// An implicit GEMM on bf16 tensor cores, like the forward pass: a tile holds all time steps of its
// neurons. Gradients of spikes and currents are bf16 in memory. Sums, and the gradients that
// neurons carry between time steps, are fp32 in registers. Threads and shared memory of the GEMM
// tiles: see resnet18/tiles.cuh. Bound: latency for small batches; for large ones the memory
// traffic of the currents. Against train.cu: no gathered gradient, no fp32 gradient of spikes in
// memory, no transposed copy of the weight.
#include "common/cluster.cuh"
#include "resnet18/neurons.cuh"
#include "resnet18/tiles.cuh"

constexpr int kImages = kTile / kSteps;  // images of a tile

// The output `gradient`, bf16 [T, B, side², channels], is the gradient of the currents of the
// neurons whose spikes the convolution reads. If no currents are given, the output is instead
// `spikes_gradient`, the fp32 gradient of the spikes. The second operand (the shortcut's
// convolution) and `identity` have the same meaning as in the forward kernel.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_block_backward(const u16* first, const u16* weight, int depth, int first_side,
                                  int first_channels, int kernel, int stride, const u16* second,
                                  const u16* second_weight, int second_depth, int second_side,
                                  int second_channels, int second_stride, const u16* identity,
                                  const float* currents, u16* gradient, float* spikes_gradient,
                                  int images, int side, int channels, float theta, int tmax) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int image_groups = ceil_div(images, kImages);
  const int pixel = blockIdx.x / image_groups, pixels = side * side;
  ImageRowsOfTile rows(images, kSteps);
  rows.image0 = blockIdx.x % image_groups * kImages;
  const int channel0 = blockIdx.y * kTile;

  // The currents and other operands that the epilogue combines with the sums are loaded while the
  // GEMM runs.
  using Own = NeuronPair<kSteps>;
  const i64 step_elements = static_cast<i64>(images) * pixels * channels;
  u32 residual[Own::kPairsOfThread][kSteps] = {};
  float low[Own::kPairsOfThread][kSteps] = {}, high[Own::kPairsOfThread][kSteps] = {};
#pragma unroll
  for (int n = 0; n < Own::kPairsOfThread; ++n) {
    const Own pair(n, rows, pixel, pixels, channels, channel0);
    if (!pair.exists) continue;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const i64 at = pair.at + t * step_elements;
      if (identity != nullptr) residual[n][t] = load_16_bit_pair(identity + at);
      if (currents == nullptr) continue;
      const float2 x = *reinterpret_cast<const float2*>(currents + at);
      low[n][t] = x.x;
      high[n][t] = x.y;
    }
  }

  Sums sums;
  const ConvolutionOperand main = {first, weight, depth, first_side, first_channels, kernel,
      stride};
  const ConvolutionOperand shortcut = {second,          second_weight, second_depth, second_side,
                            second_channels, 1,             second_stride};
  compute_convolution_sums<true>(sums, rows, main, shortcut, pixel / side, pixel % side, channels,
      channel0);
  share_sums_in_shared_memory(sums);

  const StBifNeuron neuron(theta, 0, tmax, 0.f);
  const GaussianSurrogate surrogate(neuron);
#pragma unroll
  for (int n = 0; n < Own::kPairsOfThread; ++n) {
    const Own pair(n, rows, pixel, pixels, channels, channel0);
    if (!pair.exists) continue;
    float g_low[kSteps], g_high[kSteps];
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const float2 sum = sum_pair_over_thread_groups(pair.row + t, pair.column);
      g_low[t] = theta * (sum.x + Bf16::low(residual[n][t]));
      g_high[t] = theta * (sum.y + Bf16::high(residual[n][t]));
    }
    if (currents != nullptr) {
      spike_to_current_gradients(neuron, surrogate, low[n], g_low);
      spike_to_current_gradients(neuron, surrogate, high[n], g_high);
    }
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const i64 at = pair.at + t * step_elements;
      if (currents != nullptr) {
        store_pair(gradient + at, Bf16::pack(g_low[t], g_high[t]));
      } else {
        *reinterpret_cast<float2*>(spikes_gradient + at) = make_float2(g_low[t], g_high[t]);
      }
    }
  }
}

#ifndef GROUPS  // blocks of more groups are for the layers above alone
// Computes the bf16 gradient of the stem's currents, summed over the fed time steps, in which the
// currents are equal; each thread has two neurons of [B, side², channels]. `spikes_gradient` is the
// gradient of the pooled spikes, [T, B, out_side², channels]; `sources` has the source pixel of
// each pooled spike. Without pooling, `spikes_gradient` is the gradient of the stem's own spikes.
// In the telescoped pooling, a spike counts in the sums of all later time steps. The spikes of a
// time step therefore get the pooling's gradient of that step minus that of the next step.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_stem_backward(const float* conv, const float* bias,
                                 const float* spikes_gradient, const unsigned char* sources,
                                 u16* gradient, i64 neurons, i64 outputs, int side, int channels,
                                 int out_side, int fed, float divisor, float theta, int tmax) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= neurons) return;
  const i64 position = quotient(i, channels), image = quotient(position, side * side);
  const int channel = static_cast<int>(i - position * channels);
  const int pixel = static_cast<int>(position - image * side * side);
  float g[kSteps] = {};
  if (sources == nullptr) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) g[t] = spikes_gradient[t * neurons + i];
  } else {
    const int row = pixel / side, column = pixel % side;
    // Number of pooling windows that contain an element: along an axis two if the element's index
    // is odd, otherwise one.
#pragma unroll
    for (int window = 0; window < 4; ++window) {
      const int y = row / 2 + window / 2, x = column / 2 + window % 2;
      if (y > (row + 1) / 2 || x > (column + 1) / 2 || y >= out_side || x >= out_side) continue;
      const int tap = (row - 2 * y + 1) * 3 + column - 2 * x + 1;
      const i64 at = ((image * out_side + y) * out_side + x) * channels + channel;
      float pooled[kSteps];
      int source[kSteps];
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
        pooled[t] = spikes_gradient[t * outputs + at];
        source[t] = sources[t * outputs + at];
      }
      float after = 0.f;
#pragma unroll
      for (int t = kSteps - 1; t >= 0; --t) {
        if (source[t] == tap) after += pooled[t] - (t + 1 < kSteps ? pooled[t + 1] : 0.f);
        g[t] += after;
      }
    }
  }
  const float current = stem_current(conv[i], bias[channel], divisor);
  float x[kSteps];
#pragma unroll
  for (int t = 0; t < kSteps; ++t) x[t] = t < fed ? current : 0.f;
  const StBifNeuron neuron(theta, 0, tmax, 0.f);
  spike_to_current_gradients(neuron, GaussianSurrogate(neuron), x, g);
  float sum = 0.f;
#pragma unroll
  for (int t = 0; t < kSteps; ++t) sum += t < fed ? g[t] : 0.f;
  gradient[i] = Bf16::from_f32(sum);
}
#endif
