// All operations of ResNet-18 except GEMMs and neurons, one kernel for each operation, as a
// framework launches them in eager mode.
//
// The frames are time-major, [T, B, side, side, channels]; spikes are bytes, currents fp32, and
// operands of GEMMs bf16. bf16 represents the spikes, and the images and weights of this problem,
// exactly. Threads: one for each element; kernels that gather a GEMM operand use one for eight
// adjacent columns. Shared memory: only for the reduction of the logits. Bound: launch latency of
// these kernels at the usual batch sizes. For large batches the bound is memory bandwidth, because
// gathering writes the operand of a convolution kernel² times.
#include "common/element16.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "resnet18/spikes.cuh"

constexpr int kThreads = THREADS;
constexpr int kPacket = 8;  // channels of a thread where spikes are read

__device__ __forceinline__ i64 thread_index() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

// Pixel that an output pixel's tap reads, in a convolution window centred on every stride-th pixel.
struct TapSourcePixel {
  int row;
  int column;
  bool inside;
};

__device__ __forceinline__ TapSourcePixel source_of(int pixel, int tap, int side, int out_side,
                                                    int kernel,
                                            int stride) {
  TapSourcePixel source;
  source.row = pixel / out_side * stride + tap / kernel - kernel / 2;
  source.column = pixel % out_side * stride + tap % kernel - kernel / 2;
  source.inside = source.row >= 0 && source.row < side && source.column >= 0 &&
                  source.column < side;
  return source;
}

// Writes one time step t of the network's input: frames[t] = t < fed ? images : 0; `frames` points
// to that step.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_encode(const float* __restrict__ images, float* __restrict__ frames,
                           i64 elements, int fed) {
  const i64 i = thread_index();
  if (i < elements) frames[i] = fed != 0 ? images[i] : 0.f;
}

// Gathers (im2col) fp32 frames to a bf16 GEMM operand with rows [frames · out_side², padded], with
// every tap of the convolution window. Elements in the image's padding and the columns after the
// last one become zero. Each thread writes eight columns of a row of the GEMM operand.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_gather(const float* __restrict__ frames, uint4* __restrict__ rows, i64 packets,
                           int side, int channels, int out_side, int kernel, int stride,
                           int padded) {
  const i64 i = thread_index();
  if (i >= packets) return;
  const i64 row = quotient(i, padded / kPacket), frame = quotient(row, out_side * out_side);
  const int column = static_cast<int>(i - row * (padded / kPacket)) * kPacket;
  const int pixel = static_cast<int>(row - frame * out_side * out_side);
  const int first_row = pixel / out_side * stride - kernel / 2;
  const int first_column = pixel % out_side * stride - kernel / 2;
  int channel = column % channels;
  int down = column / channels / kernel, right = column / channels % kernel;
  float x[kPacket];
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    const int y = first_row + down, from = first_column + right;
    const bool inside = down < kernel && y >= 0 && y < side && from >= 0 && from < side;
    x[j] = inside ? frames[((frame * side + y) * side + from) * channels + channel] : 0.f;
    if (++channel < channels) continue;
    channel = 0;
    if (++right < kernel) continue;
    right = 0;
    ++down;
  }
  rows[i] = make_uint4(Bf16::pack(x[0], x[1]), Bf16::pack(x[2], x[3]), Bf16::pack(x[4], x[5]),
                       Bf16::pack(x[6], x[7]));
}

// Gathers (im2col) spikes to a bf16 GEMM operand, for the taps from `first` on. Each thread copies
// eight channels of a row of the GEMM operand.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_gather_spikes(const uint2* __restrict__ spikes, uint4* __restrict__ rows,
                                  i64 packets, int side, int channels, int out_side, int kernel,
                                  int stride, int first, int taps) {
  const i64 i = thread_index();
  if (i >= packets) return;
  const int packets_of_tap = channels / kPacket;
  const i64 tap_index_of_packet = quotient(i, packets_of_tap),
      row = quotient(tap_index_of_packet, taps);
  const int packet = static_cast<int>(i - tap_index_of_packet * packets_of_tap);
  const int tap = static_cast<int>(tap_index_of_packet - row * taps) + first;
  const i64 frame = quotient(row, out_side * out_side);
  const int pixel = static_cast<int>(row - frame * out_side * out_side);
  const TapSourcePixel source = source_of(pixel, tap, side, out_side, kernel, stride);
  uint2 bytes = make_uint2(0, 0);
  if (source.inside)
    bytes = spikes[((frame * side + source.row) * side + source.column) * packets_of_tap + packet];
  rows[i] = bf16x8_of_spikes(bytes.x, bytes.y);
}

// Scales the currents and adds the bias in place: x = (factor · x + [i < fed] bias) / divisor. Only
// the first `fed` elements, which belong to the fed frames, get the bias.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_bias(float* x, const float* __restrict__ bias, i64 elements, i64 fed,
                         int channels, float factor, float divisor) {
  const i64 i = thread_index();
  if (i >= elements) return;
  x[i] = __fdiv_rn(fmaf(factor, x[i], i < fed ? bias[i % channels] : 0.f), divisor);
}

// Adds the currents y to the currents x: x += y.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_add(float* x, const float* __restrict__ y, i64 elements) {
  const i64 i = thread_index();
  if (i < elements) x[i] += y[i];
}

// Adds scaled spikes to the currents x: x += theta · spikes.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_add_spikes(float* x, const signed char* __restrict__ spikes, i64 elements,
                               float theta) {
  const i64 i = thread_index();
  if (i < elements) x[i] = fmaf(theta, static_cast<float>(spikes[i]), x[i]);
}

// One time step of the telescoped max pooling: spikes = pool(tracers) - before; before =
// pool(tracers). The tracer of a neuron is the sum of its spikes so far. `sources` may be null;
// otherwise it gets, for each pooled spike, the tap of the first maximum.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_pool(const int* __restrict__ tracers, int* __restrict__ before,
                         signed char* __restrict__ spikes, unsigned char* __restrict__ sources,
                         i64 elements, int side, int channels, int out_side, int t) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int channel = static_cast<int>(i % channels);
  const i64 position = i / channels;
  const int pixel = static_cast<int>(position % (out_side * out_side));
  const i64 image = position / (out_side * out_side);
  int largest = -128, first = 0;
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const TapSourcePixel source = source_of(pixel, tap, side, out_side, 3, 2);
    if (!source.inside) continue;
    const int tracer =
        tracers[((image * side + source.row) * side + source.column) * channels + channel];
    first = tracer > largest ? tap : first;
    largest = tracer > largest ? tracer : largest;
  }
  if (sources != nullptr) sources[i] = static_cast<unsigned char>(first);
  spikes[i] = static_cast<signed char>(largest - (t == 0 ? 0 : before[i]));
  before[i] = largest;
}

// Computes logits [B, classes] = or += Σ over `frames` frames of (weight · mean over pixels of
// theta · s), plus the bias times `fed`. Each thread block computes the logit of one image and one
// class.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_per_op_classify(const signed char* __restrict__ spikes,
                             const float* __restrict__ weight, const float* __restrict__ bias,
                             float* __restrict__ logits, int images, int classes, int pixels,
                             int channels, int frames, float scale, float fed, int accumulate) {
  __shared__ float scratch[kThreads / 32];
  const int image = blockIdx.x / classes, class_index = blockIdx.x % classes;
  float sum = 0.f;
  for (int channel = threadIdx.x; channel < channels; channel += kThreads) {
    int count = 0;
    for (int t = 0; t < frames; ++t) {
      const signed char* frame =
          spikes + (static_cast<i64>(t) * images + image) * pixels * channels + channel;
      for (int pixel = 0; pixel < pixels; ++pixel)
        count += frame[static_cast<i64>(pixel) * channels];
    }
    const float mean_spike = scale * static_cast<float>(count);
    sum = fmaf(weight[static_cast<i64>(class_index) * channels + channel], mean_spike, sum);
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x > 0) return;
  float* to = logits + static_cast<i64>(image) * classes + class_index;
  const float before = accumulate != 0 ? *to : 0.f;
  *to = before + fmaf(fed, bias[class_index], sum);
}
