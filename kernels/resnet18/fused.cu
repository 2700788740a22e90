// A layer a kernel: convolution, bias, residual and neurons over all time steps.
//
//   x[t] = theta · (conv(s)[t] + conv1x1(r)[t] or r[t]) + [t < fed] bias
//   spikes[t] = neurons(x[0..t])
//
// An implicit GEMM on bf16 tensor cores: spikes, which bf16 holds exactly, are converted from bytes
// in registers, and sums are fp32. The channels of a step are numbered so that a lane's operand is
// 16 neighbouring ones: what a lane calls k is another channel than in the instruction's manual,
// the same one for both operands.
// Threads: 4 warps a block, 2 x 2 over a tile of 64 rows by COLUMNS filters. The rows of a tile are
// one output pixel of 64 / STEPS images, all time steps of each, so a tap is in the padding for the
// whole block or for none of it, and is then skipped; and the neurons of a tile have all their
// currents in it. After the GEMM the tile passes through shared memory, a thread a neuron.
// Shared memory: a ring of stages, 64 x 64 spikes and COLUMNS x 64 bf16 each, filled by
// asynchronous copies; then the currents.
// Bound: latency. At B = 32 a layer is a microsecond of tensor cores in 9 to 36 steps, and its
// weights and spikes are in L2.
// Every kernel is launched with programmatic dependent launch: its blocks start while those of the
// layer before end, and wait for them.
// Changed from per_op: no operand, current or membrane in memory, a launch a layer in place of
// T + 4, multiplications with the padding left out.
#include "common/cluster.cuh"
#include "common/element16.cuh"
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "resnet18/spikes.cuh"
#include "st_bif/neuron.cuh"

constexpr int kSteps = STEPS, kColumns = COLUMNS, kRows = ROWS, kDepth = DEPTH;
constexpr int kThreads = THREADS, kImages = kRows / kSteps;
static_assert(kThreads == 128, "four warps, and two threads load a row");
static_assert(kRows == 64 && kDepth == 64, "a thread copies half a row, a lane reads a quarter");
static_assert(kRows % kSteps == 0, "a tile holds all time steps of its images");
static_assert(kColumns == 32 || kColumns == 64, "two warps share the columns, 16 or 32 each");
constexpr int kStageBytes = kRows * kDepth + kColumns * 2 * kDepth;
constexpr int kStages = (48 << 10) / kStageBytes;  // all static shared memory
constexpr int kPitch = kColumns + 1;  // of the currents: neighbouring rows in different banks
static_assert(kStages >= 3 && kRows * kPitch * 4 <= kStages * kStageBytes,
              "copies are ahead of their use, and the currents fit where the stages were");

__device__ __forceinline__ void wait_for_previous_layer() {
  allow_next_kernel();
  wait_for_previous_kernels();
}

// One convolution's operand.
struct Operand {
  const signed char* spikes;  // [T, B, side, side, channels]
  const u16* weight;          // [filters, depth] bf16, tap 0 first
  int depth;                  // of the taps that are held: those before are never read
  int side;
  int channels;
  int kernel;
  int stride;
};

// Byte offset of a 16-byte chunk of a filter in a tile of weights: neighbouring rows are swapped in
// pairs of chunks, so that the eight lanes of a phase, four a row, hit different banks.
__device__ __forceinline__ u32 weight_offset(int column, int chunk) {
  return column * 2 * kDepth + (chunk ^ (column & 1)) * 16;
}

// The two lower and the two upper of four spikes as bf16.
__device__ __forceinline__ u32 low_spikes(u32 bytes) {
  return bf16x2_of_spikes(__byte_perm(bytes, 0, 0x4140));
}
__device__ __forceinline__ u32 high_spikes(u32 bytes) {
  return bf16x2_of_spikes(__byte_perm(bytes, 0, 0x4342));
}

// spikes [T, B, side², filters]; the second operand is a 1x1 convolution with a stride of its own,
// and absent where its weight is null; `identity` [T, B, side², filters] may be null too.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_block(const signed char* first, const u16* __restrict__ weight,
                         int depth, int side, int channels, int kernel, int stride,
                         const signed char* second,
                         const u16* __restrict__ second_weight, int second_side,
                         int second_channels, int second_stride,
                         const signed char* identity, const float* __restrict__ bias,
                         const float* __restrict__ second_bias, signed char* spikes,
                         int images, int out_side, int filters, int fed, float theta, int tmax) {
  __shared__ __align__(128) char shared[kStages * kStageBytes];
  wait_for_previous_layer();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int groups = ceil_div(images, kImages);
  const int pixel = blockIdx.x / groups, image0 = blockIdx.x % groups * kImages;
  const int filter0 = blockIdx.y * kColumns;
  const int out_row = pixel / out_side, out_column = pixel % out_side;

  // The row that this thread loads half of.
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  const int image = image0 + row / kSteps, t = row % kSteps;
  const bool valid = image < images;
  const i64 frame = static_cast<i64>(t) * images + (valid ? image : 0);

  Operand operand = {first, weight, depth, side, channels, kernel, stride};
  bool last = second_weight == nullptr;
  int tap = 0, channel = 0, y = 0, x = 0;
  // Moves on to a tap that is not in the padding; false behind the last.
  const auto settle = [&]() {
    while (true) {
      for (; tap < operand.kernel * operand.kernel; ++tap) {
        y = out_row * operand.stride + tap / operand.kernel - operand.kernel / 2;
        x = out_column * operand.stride + tap % operand.kernel - operand.kernel / 2;
        if (y >= 0 && y < operand.side && x >= 0 && x < operand.side) return true;
      }
      if (last) return false;
      operand = {second, second_weight, second_channels, second_side, second_channels, 1,
                 second_stride};
      last = true;
      tap = 0;
    }
  };
  const u32 base = shared_address(shared);
  bool more = settle();
  int issued = 0;
  // Copies the next step's operands, if there is one, to the stage after the last.
  const auto issue = [&]() {
    if (more) {
      const u32 spikes_tile = base + issued % kStages * kStageBytes;
      const u32 weight_tile = spikes_tile + kRows * kDepth;
      const signed char* from =
          operand.spikes +
          ((frame * operand.side + y) * operand.side + x) * operand.channels + channel;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        cp_async_16_or_zero(spikes_tile + row * kDepth + (2 * half + i) * 16,
                            from + (2 * half + i) * 16, valid);
      const u16* column0 = operand.weight + tap * operand.channels + channel;
#pragma unroll
      for (int i = threadIdx.x; i < kColumns * 8; i += kThreads) {
        const int column = i / 8, chunk = i % 8;
        cp_async_16(weight_tile + weight_offset(column, chunk),
                    column0 + static_cast<i64>(filter0 + column) * operand.depth + 8 * chunk);
      }
      ++issued;
      channel += kDepth;
      if (channel == operand.channels) {
        channel = 0;
        ++tap;
        more = settle();
      }
    }
    cp_async_commit();
  };

  constexpr int kTilesN = kColumns / 16;  // of eight columns a warp
  float acc[2][kTilesN][4];
  clear(acc);
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * (kColumns / 2);
  const int group = lane / 4, quad = lane % 4;

#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) issue();
#pragma unroll 1
  for (int consumed = 0; consumed < issued; ++consumed) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    issue();
    const u32 spikes_tile = base + consumed % kStages * kStageBytes;
    const u32 weight_tile = spikes_tile + kRows * kDepth;
    uint4 bytes[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        bytes[i][j] = load_shared_b128(
            spikes_tile + (warp_row + 16 * i + 8 * j + group) * kDepth + quad * 16);
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      const int column = warp_column + 8 * j + group;
      const uint4 low = load_shared_b128(weight_tile + weight_offset(column, 2 * quad));
      const uint4 high = load_shared_b128(weight_tile + weight_offset(column, 2 * quad + 1));
      const u32 b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 upper[4] = {bytes[i][0].x, bytes[i][0].y, bytes[i][0].z, bytes[i][0].w};
        const u32 lower[4] = {bytes[i][1].x, bytes[i][1].y, bytes[i][1].z, bytes[i][1].w};
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          const u32 a[4] = {low_spikes(upper[k]), low_spikes(lower[k]), high_spikes(upper[k]),
                            high_spikes(lower[k])};
          Bf16::mma(acc[i][j], a, b[2 * k], b[2 * k + 1]);
        }
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  float* currents = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = warp_row + 16 * i + group + e / 2 * 8;
        const int c = warp_column + 8 * j + quad * 2 + e % 2;
        currents[r * kPitch + c] = acc[i][j][e];
      }
  __syncthreads();

  const Neuron neuron(theta, 0, tmax, 0.f);
  const int pixels = out_side * out_side;
  for (int i = threadIdx.x; i < kImages * kColumns; i += kThreads) {
    const int column = i % kColumns, local = i / kColumns, filter = filter0 + column;
    if (image0 + local >= images) continue;
    const float shift =
        bias[filter] + (second_bias == nullptr ? 0.f : second_bias[filter]);
    float v = neuron.start_v, u = neuron.start_u;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const i64 at =
          ((static_cast<i64>(step) * images + image0 + local) * pixels + pixel) * filters + filter;
      float sum = currents[(local * kSteps + step) * kPitch + column];
      if (identity != nullptr) sum += static_cast<float>(identity[at]);
      const float x = fmaf(theta, sum, step < fed ? shift : 0.f);
      const Step now = advance<false>(neuron, x, step, v, u);
      spikes[at] = static_cast<signed char>(spike_to_int8(now.spike));
    }
  }
}

// Neurons of the stem, all steps: x[t] = [t < fed] (conv + bias) / divisor, with the convolution
// once an image; a thread a neuron of [B, pixels, channels]
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_stem(const float* conv, const float* __restrict__ bias,
                        signed char* __restrict__ spikes, i64 neurons, int channels, int fed,
                        float divisor, float theta, int tmax) {
  wait_for_previous_layer();
  const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= neurons) return;
  const float x = __fdiv_rn(conv[i] + bias[i % channels], divisor);
  const Neuron neuron(theta, 0, tmax, 0.f);
  float v = neuron.start_v, u = neuron.start_u;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const Step now = advance<false>(neuron, step < fed ? x : 0.f, step, v, u);
    spikes[step * neurons + i] = static_cast<signed char>(spike_to_int8(now.spike));
  }
}

// pool(Σ_t s) - pool(Σ_{t-1} s) of all steps; a thread an output of [B, out_side², channels]
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_pool(const signed char* spikes, signed char* pooled,
                        i64 outputs, i64 inputs, int side, int channels, int out_side) {
  wait_for_previous_layer();
  const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= outputs) return;
  const int channel = static_cast<int>(i % channels);
  const i64 position = i / channels;
  const int pixel = static_cast<int>(position % (out_side * out_side));
  const i64 image = position / (out_side * out_side);
  int sums[9] = {};
  int before = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int largest = -128;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      const int row = pixel / out_side * 2 + tap / 3 - 1;
      const int column = pixel % out_side * 2 + tap % 3 - 1;
      if (row < 0 || row >= side || column < 0 || column >= side) continue;
      const i64 at = ((image * side + row) * side + column) * channels + channel;
      sums[tap] += spikes[step * inputs + at];
      largest = sums[tap] > largest ? sums[tap] : largest;
    }
    pooled[step * outputs + i] = static_cast<signed char>(largest - before);
    before = largest;
  }
}
