// A layer a kernel: convolution, bias, residual and neurons over all time steps.
//
//   x[t] = theta · (conv(s)[t] + conv1x1(r)[t] or r[t]) + [t < fed] bias
//   spikes[t] = neurons(x[0..t])
//
// An implicit GEMM on bf16 tensor cores: spikes, which bf16 holds exactly, are converted on their
// way from bytes to shared memory, and sums are fp32.
// Threads: 4 warps a block, 2 x 2 over a tile of 64 rows by COLUMNS filters. The rows of a tile are
// one output pixel of 64 / STEPS images, all time steps of each, so a tap is in the padding for the
// whole block or for none of it, and is then skipped; and the neurons of a tile have all their
// currents in it. After the GEMM the tile passes through shared memory, a thread a neuron.
// Shared memory: two stages of 64 x 64 and COLUMNS x 64 bf16, swizzled; then the currents.
// Bound: latency. At B = 32 a layer is a microsecond of tensor cores in 9 to 36 steps, and its
// weights and spikes are in L2.
// Changed from per_op: no operand, current or membrane in memory, a launch a layer in place of
// T + 4, multiplications with the padding left out.
#include "common/element16.cuh"
#include "common/fragments.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "resnet18/spikes.cuh"
#include "st_bif/neuron.cuh"

constexpr int kSteps = STEPS, kColumns = COLUMNS, kRows = ROWS, kDepth = DEPTH;
constexpr int kThreads = THREADS, kImages = kRows / kSteps, kRowBytes = 2 * kDepth;
static_assert(kThreads == 128, "four warps, and two threads load a row");
static_assert(kRows == 64 && kDepth == 64, "a row of a tile is one swizzled line of 128 bytes");
static_assert(kRows % kSteps == 0, "a tile holds all time steps of its images");
static_assert(kColumns == 32 || kColumns == 64, "two warps share the columns, 16 or 32 each");
constexpr int kStageBytes = (kRows + kColumns) * kRowBytes;
constexpr int kPitch = kColumns + 1;  // of the currents: neighbouring rows in different banks
static_assert(2 * kStageBytes <= 48 << 10 && kRows * kPitch * 4 <= 2 * kStageBytes,
              "static shared memory, and the currents fit where the stages were");

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

// A thread's half row of a step's operand: 32 spikes.
struct Half {
  uint4 part[2];
};

__device__ __forceinline__ Half load_half(const signed char* row, bool valid) {
  Half half;
  const uint4* from = reinterpret_cast<const uint4*>(row);
  half.part[0] = valid ? from[0] : make_uint4(0, 0, 0, 0);
  half.part[1] = valid ? from[1] : make_uint4(0, 0, 0, 0);
  return half;
}

__device__ __forceinline__ void store_half(char* tile, int row, int side, const Half& half) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 words[4] = {half.part[i].x, half.part[i].y, half.part[i].z, half.part[i].w};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 at = swizzled<kRowBytes>(row, 4 * side + 2 * i + j);
      *reinterpret_cast<uint4*>(tile + at) = bf16x8_of_spikes(words[2 * j], words[2 * j + 1]);
    }
  }
}

// The steps of one operand, of which some are skipped.
struct Cursor {
  int tap;
  int channel;
};

// spikes [T, B, side², filters]; the second operand is a 1x1 convolution with a stride of its own,
// and absent where its weight is null; `identity` [T, B, side², filters] may be null too.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_block(const signed char* __restrict__ first, const u16* __restrict__ weight,
                         int depth, int side, int channels, int kernel, int stride,
                         const signed char* __restrict__ second,
                         const u16* __restrict__ second_weight, int second_side,
                         int second_channels, int second_stride,
                         const signed char* __restrict__ identity, const float* __restrict__ bias,
                         const float* __restrict__ second_bias, signed char* __restrict__ spikes,
                         int images, int out_side, int filters, int fed, float theta, int tmax) {
  __shared__ __align__(128) char shared[2 * kStageBytes];
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

  const Operand operands[2] = {
      {first, weight, depth, side, channels, kernel, stride},
      {second, second_weight, second_channels, second_side, second_channels, 1, second_stride}};
  int number = 0;
  Cursor cursor = {0, 0};
  // Moves on to a tap that is not in the padding; false behind the last.
  const auto settle = [&]() {
    for (; number < 2; ++number, cursor.tap = 0) {
      const Operand& o = operands[number];
      if (o.weight == nullptr) continue;
      for (; cursor.tap < o.kernel * o.kernel; ++cursor.tap) {
        const int y = out_row * o.stride + cursor.tap / o.kernel - o.kernel / 2;
        const int x = out_column * o.stride + cursor.tap % o.kernel - o.kernel / 2;
        if (y >= 0 && y < o.side && x >= 0 && x < o.side) return true;
      }
    }
    return false;
  };
  const auto advance_cursor = [&]() {
    cursor.channel += kDepth;
    if (cursor.channel == operands[number].channels) {
      cursor.channel = 0;
      ++cursor.tap;
    }
    return settle();
  };
  const auto load = [&]() {
    const Operand& o = operands[number];
    const int y = out_row * o.stride + cursor.tap / o.kernel - o.kernel / 2;
    const int x = out_column * o.stride + cursor.tap % o.kernel - o.kernel / 2;
    const i64 at = ((frame * o.side + y) * o.side + x) * o.channels + cursor.channel + 32 * half;
    return load_half(o.spikes + at, valid);
  };
  const u32 base = shared_address(shared);
  const auto load_weight = [&](int stage) {
    const Operand& o = operands[number];
    const u32 tile = base + stage * kStageBytes + kRows * kRowBytes;
#pragma unroll
    for (int i = threadIdx.x; i < kColumns * 8; i += kThreads) {
      const int column = i / 8, chunk = i % 8;
      cp_async_16(tile + swizzled<kRowBytes>(column, chunk),
                  o.weight + static_cast<i64>(filter0 + column) * o.depth +
                      cursor.tap * o.channels + cursor.channel + 8 * chunk);
    }
    cp_async_commit();
  };

  constexpr int kTilesN = kColumns / 16;  // of eight columns a warp
  float acc[2][kTilesN][4];
  clear(acc);
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * (kColumns / 2);

  bool more = settle();
  Half next = {};
  if (more) {
    next = load();
    load_weight(0);
  }
  int stage = 0;
  while (more) {
    store_half(shared + stage * kStageBytes, row, half, next);
    more = advance_cursor();
    if (more) next = load();
    cp_async_wait<0>();
    __syncthreads();
    if (more) load_weight(stage ^ 1);
    const u32 a_tile = base + stage * kStageBytes;
    const u32 b_tile = a_tile + kRows * kRowBytes;
    const u32 a_lane = a_tile + lane_by_row<kRowBytes>(warp_row, lane);
    const u32 b_lane = b_tile + lane_by_column<kRowBytes>(warp_column, lane);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      u32 a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(a[i], (a_lane ^ (k * 32)) + i * 16 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kTilesN; j += 2) {
        u32 b[4];
        ldmatrix_x4(b, (b_lane ^ (k * 32)) + j * 8 * kRowBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Bf16::mma(acc[i][j], a[i], b[0], b[1]);
          Bf16::mma(acc[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
    stage ^= 1;
  }
  __syncthreads();

  float* currents = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = warp_row + 16 * i + lane / 4 + e / 2 * 8;
        const int c = warp_column + 8 * j + lane % 4 * 2 + e % 2;
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
    resnet18_fused_stem(const float* __restrict__ conv, const float* __restrict__ bias,
                        signed char* __restrict__ spikes, i64 neurons, int channels, int fed,
                        float divisor, float theta, int tmax) {
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
    resnet18_fused_pool(const signed char* __restrict__ spikes, signed char* __restrict__ pooled,
                        i64 outputs, i64 inputs, int side, int channels, int out_side) {
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
      const int row = pixel / out_side * 2 + tap / 3 - 1, column = pixel % out_side * 2 + tap % 3 - 1;
      if (row < 0 || row >= side || column < 0 || column >= side) continue;
      const i64 at = ((image * side + row) * side + column) * channels + channel;
      sums[tap] += spikes[step * inputs + at];
      largest = sums[tap] > largest ? sums[tap] : largest;
    }
    pooled[step * outputs + i] = static_cast<signed char>(largest - before);
    before = largest;
  }
}
