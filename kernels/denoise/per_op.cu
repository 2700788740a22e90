// The expert's operations that are no matrix products, one kernel each: what a framework launches in eager mode.
//
// Activations are bf16 in memory, arithmetic is fp32; styles, norms, scores and the Euler state are fp32.
// Threads: rows of the residual stream are a block each (norm, softmax), everything else one element or one packet a thread.
// Shared memory: block reductions only.
// Bound: launching. A tensor of 50 rows moves in less time than a kernel takes to start.
#include "common/element16.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "denoise/panel.cuh"

constexpr int kThreads = 256;

__device__ __forceinline__ i64 thread_index() { return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exp2_approx(-x * kLog2E)); }

// out[row] = [sin(2 pi t / period), cos(2 pi t / period)] in fp64, with width / 2 periods from 4e-3 to 4 in geometric steps. The time of a
// row is times[row], or where that is null *time. With `panels`, out lies as a product of the fused kernels takes it, else row by row.
// grid ceil(width / 2 / 256) * rows
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_embed(const float* __restrict__ time, const double* __restrict__ times, u16* __restrict__ out, int width, int row_blocks,
                     int panels) {
  const int half = width / 2, row = blockIdx.x / row_blocks, i = (blockIdx.x % row_blocks) * kThreads + threadIdx.x;
  if (i >= half) return;
  const double t = times != nullptr ? times[row] : static_cast<double>(*time);
  const double fraction = half > 1 ? static_cast<double>(i) / (half - 1) : 0.0;
  const double period = 4e-3 * pow(4.0 / 4e-3, fraction);
  double sine, cosine;
  sincospi(2.0 * t / period, &sine, &cosine);
  const i64 first = static_cast<i64>(row) * width;
  out[panels != 0 ? panel_at(row, i, width) : first + i] = Bf16::from_f32(static_cast<float>(sine));
  out[panels != 0 ? panel_at(row, half + i, width) : first + half + i] = Bf16::from_f32(static_cast<float>(cosine));
}

// x += bias, in place; with `silu`, then x sigmoid(x).
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_bias(u16* __restrict__ x, const float* __restrict__ bias, int columns, i64 elements, int silu) {
  const i64 i = thread_index();
  if (i >= elements) return;
  float y = Bf16::to_f32(x[i]) + bias[i % columns];
  if (silu != 0) y *= sigmoid(y);
  x[i] = Bf16::from_f32(y);
}

// out = bf16(x)
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_cast(const float* __restrict__ x, u16* __restrict__ out, i64 elements) {
  const i64 i = thread_index();
  if (i < elements) out[i] = Bf16::from_f32(x[i]);
}

// out = x
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_copy(const float* __restrict__ x, float* __restrict__ out, i64 elements) {
  const i64 i = thread_index();
  if (i < elements) out[i] = x[i];
}

// angles[row][i] = (cos, sin)(position / 1e4^(2 i / head_dim)) of positions first..; angles are reduced in fp64
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_angles(float2* __restrict__ angles, int first, int rows, int head_dim) {
  const i64 index = thread_index();
  const int half = head_dim / 2, row = static_cast<int>(index / half), i = static_cast<int>(index % half);
  if (row >= rows) return;
  double sine, cosine;
  sincos((first + row) * pow(1e4, -2.0 * i / head_dim), &sine, &cosine);
  angles[index] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

// out = h / sqrt(mean h^2 + 1e-6); a block a row
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_norm(const u16* __restrict__ h, float* __restrict__ out, int width) {
  __shared__ float scratch[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * width;
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    const float x = Bf16::to_f32(h[row + i]);
    sum += x * x;
  }
  const float inverse = rsqrtf(block_sum<kThreads>(sum, scratch) / width + 1e-6f);
  for (int i = threadIdx.x; i < width; i += kThreads) out[row + i] = Bf16::to_f32(h[row + i]) * inverse;
}

// y = x (1 + scale) + shift, with (scale, shift) the first two thirds of style + bias; `y` is bf16, or `exact` fp32: the other is null
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_modulate(const float* __restrict__ x, const float* __restrict__ style, const float* __restrict__ bias, u16* __restrict__ y,
                        float* __restrict__ exact, int width, i64 elements) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int column = static_cast<int>(i % width);
  const float scale = style[column] + bias[column], shift = style[width + column] + bias[width + column];
  const float value = x[i] * (1.f + scale) + shift;
  if (exact != nullptr) exact[i] = value;
  else y[i] = Bf16::from_f32(value);
}

// h += gate branch, with the gate the last third of style + bias
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_residual(u16* __restrict__ h, const u16* __restrict__ branch, const float* __restrict__ style, const float* __restrict__ bias,
                        int width, i64 elements) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const int column = 2 * width + static_cast<int>(i % width);
  h[i] = Bf16::from_f32(Bf16::to_f32(h[i]) + (style[column] + bias[column]) * Bf16::to_f32(branch[i]));
}

// Rotates the pairs (i, i + head_dim / 2) of every head of q [rows, heads, head_dim] and of k [rows, head_dim], in place.
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_rope(u16* __restrict__ q, u16* __restrict__ k, const float2* __restrict__ angles, int rows, int heads, int head_dim) {
  const i64 index = thread_index();
  const int half = head_dim / 2, pairs = (heads + 1) * half;
  const int row = static_cast<int>(index / pairs), rest = static_cast<int>(index % pairs), head = rest / half, i = rest % half;
  if (row >= rows) return;
  u16* x = head < heads ? q + (static_cast<i64>(row) * heads + head) * head_dim : k + static_cast<i64>(row) * head_dim;
  const float2 turn = angles[static_cast<i64>(row) * half + i];
  const float a = Bf16::to_f32(x[i]), b = Bf16::to_f32(x[i + half]);
  x[i] = Bf16::from_f32(a * turn.x - b * turn.y);
  x[i + half] = Bf16::from_f32(b * turn.x + a * turn.y);
}

// keys = [k_cache; k; zeros], values = [v_cache; v; zeros]: `padded` rows of head_dim, packets of 8 elements
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_concat(const uint4* __restrict__ k_cache, const uint4* __restrict__ v_cache, const uint4* __restrict__ k, const uint4* __restrict__ v,
                      uint4* __restrict__ keys, uint4* __restrict__ values, int prefix, int rows, int padded, int packets) {
  const i64 i = thread_index();
  const i64 cached = static_cast<i64>(prefix) * packets, seen = cached + static_cast<i64>(rows) * packets;
  if (i >= static_cast<i64>(padded) * packets) return;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  keys[i] = i < cached ? k_cache[i] : i < seen ? k[i - cached] : zero;
  values[i] = i < cached ? v_cache[i] : i < seen ? v[i - cached] : zero;
}

// p = softmax(scores * scale) of the first `context` of `padded` columns, zero beyond; a block a row
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_softmax(const float* __restrict__ scores, u16* __restrict__ p, int context, int padded, float scale) {
  __shared__ float scratch[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * padded;
  float top = negative_infinity();
  for (int i = threadIdx.x; i < context; i += kThreads) top = max_f32(top, scores[row + i]);
  top = block_max<kThreads>(top, scratch);
  float sum = 0.f;
  for (int i = threadIdx.x; i < context; i += kThreads) sum += exp2_approx((scores[row + i] - top) * scale * kLog2E);
  const float inverse = 1.f / block_sum<kThreads>(sum, scratch);
  for (int i = threadIdx.x; i < padded; i += kThreads)
    p[row + i] = Bf16::from_f32(i < context ? exp2_approx((scores[row + i] - top) * scale * kLog2E) * inverse : 0.f);
}

// gate = gelu_tanh(gate) up, in place
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_gelu(u16* __restrict__ gate, const u16* __restrict__ up, i64 elements) {
  const i64 i = thread_index();
  if (i >= elements) return;
  const float x = Bf16::to_f32(gate[i]);
  // x/2 (1 + tanh(u)) = x sigmoid(2 u)
  const float gelu = x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
  gate[i] = Bf16::from_f32(gelu * Bf16::to_f32(up[i]));
}

// velocity [rows, 32] = y [rows, width] out [width, 32] + bias; a block a row, a warp an eighth of the width, a lane a column
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_action_out(const float* __restrict__ y, const u16* __restrict__ out, const float* __restrict__ bias, float* __restrict__ velocity,
                          int width) {
  __shared__ float parts[kThreads / 32][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0.f;
  for (int i = warp; i < width; i += kThreads / 32)
    sum += y[static_cast<i64>(blockIdx.x) * width + i] * Bf16::to_f32(out[static_cast<i64>(i) * 32 + lane]);
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
  float total = bias[lane];
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += parts[i][lane];
  velocity[static_cast<i64>(blockIdx.x) * 32 + lane] = total;
}

// x += dt velocity
extern "C" __global__ void __launch_bounds__(kThreads)
denoise_per_op_euler(float* __restrict__ x, const float* __restrict__ velocity, float dt, i64 elements) {
  const i64 i = thread_index();
  if (i < elements) x[i] += dt * velocity[i];
}
