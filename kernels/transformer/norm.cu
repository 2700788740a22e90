// RMSNorm of the rows of the fp32 residual stream, and the gradients of its input and gain. A
// forward variant first adds a branch to the stream.
//
//   x = residual + branch,  r = 1 / sqrt(mean_i x_i^2 + eps),  y_i = x_i r gain_i
//   dx_i = residual gradient_i + r (gain_i dy_i - x_i r^2 mean_j (gain_j dy_j x_j))
//   dgain_i = sum over rows of dy_i x_i r
//
// Threads: Each group of GROUP threads holds a row in registers, as QUADS groups of four elements
// for each thread. The forward kernels of RMSNorm have one row for each thread block. In the
// backward kernel a thread block has THREADS / GROUP rows at once, strides over the rows and sums
// its gain gradients in registers. gain_gradient has a thread block for 32 columns of one gain,
// with 32 threads for each column. In gain_gradient the threads sum partial rows in a fixed order,
// so that every run gives the same bits. Shared memory: the row sums of each group of threads; in
// the backward kernel also one row of gain gradients. Bound: memory. With 16-bit elements the
// forward moves 6 bytes an element, or 12 with the addition; the backward moves 16 with a residual
// gradient and 12 without.
#define STREAM_STORE "st.global"
#include "common/cluster.cuh"
#include "common/memory.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "transformer/quads.cuh"

constexpr int kThreads = THREADS, kGroupThreads = GROUP, kQuads = QUADS;
constexpr int kGroups = kThreads / kGroupThreads,
              kWarps = kGroupThreads / static_cast<int>(kWarpSize);
constexpr int kRow = kGroupThreads * kQuads * 4;  // elements that a group has room for
constexpr float kEpsilon = 1e-5f;
static_assert(kThreads % kGroupThreads == 0 && kGroupThreads % 32 == 0 && kGroups <= 15,
              "groups are whole warps, and each has a named barrier");

// Sums x over the threads of a group that holds one row. Two consecutive calls use the two halves
// of `scratch`, so that one barrier for each call is enough.
__device__ __forceinline__ float group_sum(float x, float (&scratch)[2][kWarps], int half,
                                           int group) {
  x = sum_across_lane_group<32>(x);
  const int thread = threadIdx.x % kGroupThreads;
  if (thread % kWarpSize == 0) scratch[half][thread / kWarpSize] = x;
  named_barrier_sync(1 + group, kGroupThreads);
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += scratch[half][i];
  return total;
}

// Normalises row blockIdx.x of x, after adding the branch to it if kAdds.
template <bool kAdds>
__device__ __forceinline__ void normalize_row_of_block(const float* x, const Element* branch,
                                                       float* sum,
                                          const Element* gain, Element* y, float* inverse, int d) {
  __shared__ float scratch[2][kWarps];
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 row = static_cast<i64>(blockIdx.x) * d;
  const int first = threadIdx.x * 4;
  Quad values[kQuads];
  ElementPacket<4> added[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kGroupThreads * 4);
    if (column < d) {
      load_f32_quad(x + row + column, values[i]);
      if (kAdds) added[i] = load_packed_quad(branch + row + column);
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kGroupThreads * 4);
    if (column >= d) break;
    Quad addends;
    if (kAdds) unpack_elements_to_floats<4>(added[i], addends);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kAdds) values[i][j] += addends[j];
      squares += values[i][j] * values[i][j];
    }
    if (kAdds) store_f32_quad(sum + row + column, values[i]);
  }
  const float r = rsqrtf(group_sum(squares, scratch, 0, 0) / static_cast<float>(d) + kEpsilon);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kGroupThreads * 4);
    if (column >= d) break;
    Quad gains;
    load_element_quad(gain + column, gains);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i][j] *= r * gains[j];
    store_element_quad(y + row + column, values[i]);
  }
  if (threadIdx.x == 0) inverse[blockIdx.x] = r;
}

// The input x is fp32 [tokens, d]; gain is [d], y [tokens, d], inverse fp32 [tokens]. d is a
// multiple of 4 and at most kRow.
extern "C" __global__ void __launch_bounds__(kGroupThreads)
    transformer_norm(const float* x, const Element* gain, Element* y, float* inverse, int d) {
  normalize_row_of_block<false>(x, nullptr, nullptr, gain, y, inverse, d);
}

// Adds the branch [tokens, d] to x before the norm; the sum, in fp32, may overwrite x.
extern "C" __global__ void __launch_bounds__(kGroupThreads)
    transformer_norm_add(const float* x, const Element* branch, float* sum, const Element* gain,
                         Element* y, float* inverse, int d) {
  normalize_row_of_block<true>(x, branch, sum, gain, y, inverse, d);
}

// The gradient grad_x, fp32 [tokens, d], may overwrite residual_gradient, which may be null.
// `rounded` gets the gradient grad_x in the element type, or is null. The partial gain gradients,
// one row for each thread block, are fp32 [gridDim.x, d].
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_norm_backward(const float* x, const float* inverse, const Element* gain,
                              const Element* grad_y, const float* residual_gradient, float* grad_x,
                              Element* rounded, float* partials, i64 tokens, int d) {
  __shared__ float scratch[kGroups][2][kWarps];
  __shared__ __align__(16) float sums[kRow];
  wait_for_previous_kernels();
  allow_next_kernel();
  const int group = threadIdx.x / kGroupThreads, first = threadIdx.x % kGroupThreads * 4;
  Quad gain_sums[kQuads] = {};
  int half = 0;
  for (i64 token = static_cast<i64>(blockIdx.x) * kGroups + group; token < tokens;
       token += static_cast<i64>(gridDim.x) * kGroups) {
    const i64 row = token * d;
    Quad values[kQuads], slopes[kQuads], passed[kQuads] = {};
    ElementPacket<4> packed[kQuads];
    const float r = inverse[token];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int column = first + i * (kGroupThreads * 4);
      if (column >= d) break;
      load_f32_quad(x + row + column, values[i]);
      packed[i] = load_packed_quad(grad_y + row + column);
      if (residual_gradient != nullptr) {
        load_f32_quad(residual_gradient + row + column, passed[i]);
      }
    }
    float product = 0.f;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int column = first + i * (kGroupThreads * 4);
      if (column >= d) break;
      Quad gains;
      load_element_quad(gain + column, gains);
      unpack_elements_to_floats<4>(packed[i], slopes[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gain_sums[i][j] += slopes[i][j] * values[i][j] * r;
        slopes[i][j] *= gains[j];
        product += slopes[i][j] * values[i][j];
      }
    }
    product = group_sum(product, scratch[group], half, group);
    half ^= 1;
    const float gradient_projection = product / static_cast<float>(d) * r * r;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int column = first + i * (kGroupThreads * 4);
      if (column >= d) break;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        passed[i][j] += r * (slopes[i][j] - values[i][j] * gradient_projection);
      store_f32_quad(grad_x + row + column, passed[i]);
      if (rounded != nullptr) store_element_quad(rounded + row + column, passed[i]);
    }
  }
  // Thread group 0 adds the gain gradients of the other groups one after the other.
#pragma unroll 1
  for (int other = 1; other < kGroups; ++other) {
    if (group == other) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[first + i * (kGroupThreads * 4) + j] = gain_sums[i][j];
      }
    }
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) gain_sums[i][j] += sums[first + i * (kGroupThreads * 4) + j];
      }
    }
    __syncthreads();
  }
  if (group > 0) return;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * (kGroupThreads * 4);
    if (column >= d) break;
    store_f32_quad(partials + static_cast<i64>(blockIdx.x) * d + column, gain_sums[i]);
  }
}

// Sums partials, fp32 [gains, rows, d], to grad_gain, fp32 [gains, d]. blockIdx.x gives 32 columns,
// blockIdx.y the gain.
extern "C" __global__ void __launch_bounds__(1024)
    transformer_gain_gradient(const float* partials, float* grad_gain, int rows, int d) {
  __shared__ float sums[32][33];
  wait_for_previous_kernels();
  allow_next_kernel();
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  const float* from = partials + static_cast<i64>(blockIdx.y) * rows * d;
  float sum = 0.f;
  if (column < d) {
#pragma unroll 8
    for (int row = part; row < rows; row += 32) sum += from[static_cast<i64>(row) * d + column];
  }
  sums[part][lane] = sum;
  __syncthreads();
  // Warp w of the thread block sums the partial gradients of column w.
  const float total = sum_across_lane_group<32>(sums[lane][part]);
  const int column_of_warp = blockIdx.x * 32 + part;
  if (lane == 0 && column_of_warp < d)
    grad_gain[static_cast<i64>(blockIdx.y) * d + column_of_warp] = total;
}
