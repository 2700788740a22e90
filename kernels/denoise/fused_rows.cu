// Work on each row of actions before the first and after each pass through the layers.
//
//   begin  x = noise;  h = x action_in + b
//   end    velocity = (h / rms (1 + scale) + shift) action_out + b in fp32;  x += dt velocity;
//          h = x action_in + b for the next step
//
// Threads: one block for each row of actions. For action_in a thread computes four columns; for
// action_out a thread sums eight columns over every 64th row of the weight. Shared memory: the row
// of 32 actions, the normalised row of h in fp32, and partial sums. Bound: latency. Each of the two
// matrix-vector products, action_in and action_out, reads 64 KB of weights from L2.
#include "common/cluster.cuh"
#include "common/reduce.cuh"
#include "denoise/actions.cuh"
#include "denoise/model.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
static_assert(kWidth % (kThreads / 4) == 0, "four threads a row of action_out, in whole passes");

// Computes one row h [width] = x [32] action_in + b, and the sum of squares of h. The first entry
// of `squares` for this row gets the whole sum of squares, and all its other entries become zero.
__device__ __forceinline__ void project_actions_to_h_row(const float* x, const u16* action_in,
                                                         const float* bias,
                                      u16* h, float* squares, float* scratch) {
  float sum = 0.f;
  for (int column = threadIdx.x * 4; column < kWidth; column += kThreads * 4) {
    float y[4];
    project_actions_to_four_columns(x, action_in, bias, column, y);
    const uint2 rounded = make_uint2(Bf16::pack(y[0], y[1]), Bf16::pack(y[2], y[3]));
    *reinterpret_cast<uint2*>(h + column) = rounded;
    const float z[4] = {Bf16::low(rounded.x), Bf16::high(rounded.x), Bf16::low(rounded.y),
                        Bf16::high(rounded.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += z[i] * z[i];
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x < kSquareSumsPerRow) squares[threadIdx.x] = threadIdx.x == 0 ? sum : 0.f;
}

// Each thread block handles one row of actions. If `state` is null, the kernel does not copy the
// noise to `state`.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_fused_rows_begin(const float* noise, const u16* __restrict__ action_in,
                             const float* __restrict__ bias, float* state, u16* h, float* squares) {
  __shared__ float x[kActionColumns], scratch[kWarps];
  const i64 row = blockIdx.x;
  allow_next_kernel();
  wait_for_previous_kernels();
  if (threadIdx.x < kActionColumns) {
    const float value = noise[row * kActionColumns + threadIdx.x];
    x[threadIdx.x] = value;
    if (state != nullptr) state[row * kActionColumns + threadIdx.x] = value;
  }
  __syncthreads();
  project_actions_to_h_row(x, action_in, bias, h + row * kWidth, squares + row * kSquareSumsPerRow,
                           scratch);
}

// Each thread block handles one row of actions. The kernel writes the velocity to `velocity`, or
// adds dt times it to `state` if `velocity` is null; with `more` it also computes h for the next
// step.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_fused_rows_end(u16* h, float* squares, const float* style,
                           const u16* __restrict__ action_out, const float* __restrict__ out_bias,
                           const u16* __restrict__ action_in, const float* __restrict__ in_bias,
                           float* velocity, float* state, float dt, int more) {
  __shared__ float x[kActionColumns], scratch[kWarps], y[kWidth], parts[kWarps][kActionColumns];
  const i64 row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  h += row * kWidth;
  squares += row * kSquareSumsPerRow;
  allow_next_kernel();
  wait_for_previous_kernels();
  const float inverse = inverse_rms_of_h_row(squares);
  for (int i = threadIdx.x; i < kWidth; i += kThreads)
    y[i] = Bf16::to_f32(h[i]) * inverse * (1.f + style[i]) + style[kWidth + i];
  __syncthreads();
  float sums[8] = {};
  partial_projection_to_actions<kThreads>(y, action_out, sums);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sums[j] += __shfl_xor_sync(kFullWarp, sums[j], mask);
    if (lane < 4) parts[warp][lane * 8 + j] = sums[j];
  }
  __syncthreads();
  if (warp == 0) {
    float v = out_bias[lane];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) v += parts[i][lane];
    if (velocity != nullptr) {
      velocity[row * kActionColumns + lane] = v;
    } else {
      x[lane] = state[row * kActionColumns + lane] + dt * v;
      state[row * kActionColumns + lane] = x[lane];
    }
  }
  if (more == 0) return;
  __syncthreads();
  project_actions_to_h_row(x, action_in, in_bias, h, squares, scratch);
}
