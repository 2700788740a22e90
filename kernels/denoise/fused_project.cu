// The expert's projections, each with what stands before and after it: the norm before, rotation, GELU or the gated residual after.
//
//   qkv      q, k, v = adaRMS(h) [q_proj k_proj v_proj]; q and k rotated; k and v written behind the cached prefix
//   out      h += gate (attended o_proj), and the sums of squares that the next norm needs
//   gate_up  hidden = gelu_tanh(adaRMS(h) gate_proj) (adaRMS(h) up_proj)
//   down     h += gate (hidden down_proj), and the sums of squares
//   time     silu(x W + b): the two layers of the time's embedding, a row a step
//   style    cond W + b in fp32: scale, shift and gate of all steps and layers, before the loop
//
// Threads, shared memory and the split over clusters: denoise/skinny_gemm.cuh. Eight columns of q, k or v and the eight that they rotate
// with, and eight of gate and of up, are neighbours in a tile: one thread finishes both.
// Bound: memory, 35 MB of weights a layer; each byte of them is read once for all 64 rows. The tensor cores are half busy.
// Against the library's products: no launches for norm, rotation, activation and residual, no round trips of y, and enough blocks for
// every multiprocessor whatever the number of columns.
#include "denoise/skinny_gemm.cuh"

using Qkv = Product<kWidth, 64, 4>;
using Out = Product<kQueryWidth, 64, 8>;
using GateUp = Product<kWidth, 128, 2>;
using Down = Product<kMlp, 64, 8>;
using Linear = Product<kWidth, 64, 4>;

static_assert((kHeads + 2) * kHeadDim % Qkv::kTileN == 0 && 2 * kMlp % GateUp::kTileN == 0, "tiles of columns are whole");
static_assert(Out::kRankRows * 32 == kThreads && Down::kRankRows * 32 == kThreads, "a warp finishes a row of 64 columns");
static_assert(Qkv::kRankRows * 16 == kThreads && Linear::kRankRows * 16 == kThreads, "a thread finishes four elements");

// What a block of a product works on.
template <typename P>
struct Work {
  int tile, rank, k0, row0, rows_left;
  bool active;
  u32 base;

  __device__ __forceinline__ Work(int rows, const void* shared) {
    tile = blockIdx.x / P::kSplit;
    rank = static_cast<int>(cluster_rank());
    k0 = rank * P::kSlice;
    active = k0 < P::kDepth;
    row0 = blockIdx.y * kTileM;
    rows_left = min_of(kTileM, rows - row0);
    base = shared_address(shared);
  }
};

// Copies of the weights, wait, x as it is, product.
template <typename P>
__device__ __forceinline__ void multiply_plain(const Work<P>& work, Columns columns, const u16* x) {
  if (work.active) stream_weights<P>(work.base, columns, work.k0);
  allow_next_kernel();
  wait_for_previous_kernels();
  Rows<P> placed;
  if (work.active) placed.load(x + static_cast<i64>(work.row0) * P::kDepth + work.k0, work.rows_left);
  const Plain plain[P::kParts] = {};
  multiply<P>(work.base, work.active, placed, work.rows_left, plain);
}

// The same with adaRMS of the residual stream before the product.
template <typename P>
__device__ __forceinline__ void multiply_modulated(const Work<P>& work, Columns columns, const u16* h, const float* squares, const float* style) {
  __shared__ float inverse[kTileM];
  if (work.active) stream_weights<P>(work.base, columns, work.k0);
  allow_next_kernel();
  wait_for_previous_kernels();
  // All of it is asked for before any of it is used: one latency.
  Rows<P> placed;
  Modulated modulated[P::kParts];
  if (work.active) {
    placed.load(h + static_cast<i64>(work.row0) * P::kDepth + work.k0, work.rows_left);
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
      modulated[part].load(style, work.k0 + part * P::kPart + own_chunk<P>() * 8);
      modulated[part].inverse = inverse;
    }
  }
  const int row = threadIdx.x;
  if (row < work.rows_left) inverse[row] = inverse_rms(squares + static_cast<i64>(work.row0 + row) * kSquares);
  __syncthreads();
  multiply<P>(work.base, work.active, placed, work.rows_left, modulated);
}

// Where the cluster's peers may end: nobody reads their parts any more. Whoever read has used what it read, so nothing is under way.
__device__ __forceinline__ void leave_cluster() {
  cluster_arrive_relaxed();
  cluster_wait();
}

__device__ __forceinline__ Columns columns_of(const u16* matrix, int stride, int column) { return {matrix + column, stride}; }

// grid tiles * 4 x ceil(rows / 64), clusters of 4; keys and values are [prefix + rows][head_dim]
extern "C" __global__ void __cluster_dims__(Qkv::kSplit, 1, 1) __launch_bounds__(kThreads)
denoise_fused_project_qkv(const u16* h, const float* squares, const float* style, const u16* __restrict__ q_proj, const u16* __restrict__ k_proj,
                          const u16* __restrict__ v_proj, const float2* angles, u16* q, u16* keys, u16* values, int rows, int prefix) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Work<Qkv> work(rows, shared);
  constexpr int kHeadChunks = kHeadDim / 8;
  {
    const int chunk = work.tile * Qkv::kBChunks + static_cast<int>(threadIdx.x) % Qkv::kBChunks;
    const int head = chunk / kHeadChunks, in_head = chunk % kHeadChunks;
    const int column = (in_head % 2) * kHalfHead + in_head / 2 * 8;
    const Columns columns = head < kHeads    ? columns_of(q_proj, kQueryWidth, head * kHeadDim + column)
                            : head == kHeads ? columns_of(k_proj, kHeadDim, column)
                                             : columns_of(v_proj, kHeadDim, column);
    multiply_modulated(work, columns, h, squares, style);
  }
  const int row = work.rank * Qkv::kRankRows + static_cast<int>(threadIdx.x) / 16, item = threadIdx.x % 16;
  const int at = item / 4 * 16 + item % 4 * 2;
  if (row < work.rows_left) {
    const float2 left = total<Qkv>(work.base, row, at), right = total<Qkv>(work.base, row, at + 8);
    const i64 token = work.row0 + row;
    const int chunk = work.tile * Qkv::kBChunks + item / 4 * 2;
    const int head = chunk / kHeadChunks, column = chunk % kHeadChunks / 2 * 8 + item % 4 * 2;
    u32 first = Bf16::pack(left.x, left.y), second = Bf16::pack(right.x, right.y);
    if (head <= kHeads) {
      const float4 turn = *reinterpret_cast<const float4*>(angles + token * kHalfHead + column);  // cos, sin, cos, sin
      first = Bf16::pack(left.x * turn.x - right.x * turn.y, left.y * turn.z - right.y * turn.w);
      second = Bf16::pack(right.x * turn.x + left.x * turn.y, right.y * turn.z + left.y * turn.w);
    }
    u16* to = head < kHeads    ? q + token * kQueryWidth + head * kHeadDim
              : head == kHeads ? keys + (prefix + token) * kHeadDim
                               : values + (prefix + token) * kHeadDim;
    *reinterpret_cast<u32*>(to + column) = first;
    *reinterpret_cast<u32*>(to + kHalfHead + column) = second;
  }
  leave_cluster();
}

// h += gate y for 64 columns of this block's rows; the sum of squares of the 64 beside it. A warp has a row: the lower half of its lanes
// reads the parts of one half of the cluster, the upper half those of the other.
template <typename P>
__device__ __forceinline__ void add_gated(const Work<P>& work, const float* style, u16* h, float* squares) {
  const int lane = threadIdx.x % kWarpSize, half = lane / 16, row = work.rank * P::kRankRows + static_cast<int>(threadIdx.x) / 32;
  if (row < work.rows_left) {
    const i64 token = work.row0 + row;
    const int in_tile = lane % 16 * 4 + half * 2, column = work.tile * P::kTileN + in_tile;
    u32* at = reinterpret_cast<u32*>(h + token * kWidth + column);
    const u32 before = *at;
    const float2 gate = *reinterpret_cast<const float2*>(style + 2 * kWidth + column);
    const float4 part = total_of<P, P::kSplit / 2>(work.base, half * (P::kSplit / 2), row, lane % 16 * 4);
    // Each lane keeps two of the four elements and gives the others to its partner.
    const float given_x = half == 0 ? part.z : part.x, given_y = half == 0 ? part.w : part.y;
    const float taken_x = __shfl_xor_sync(kFullWarp, given_x, 16), taken_y = __shfl_xor_sync(kFullWarp, given_y, 16);
    const float y_x = (half == 0 ? part.x : part.z) + taken_x, y_y = (half == 0 ? part.y : part.w) + taken_y;
    const u32 after = Bf16::pack(Bf16::low(before) + gate.x * y_x, Bf16::high(before) + gate.y * y_y);
    *at = after;
    float sum = Bf16::low(after) * Bf16::low(after) + Bf16::high(after) * Bf16::high(after);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kFullWarp, sum, mask);
    if (lane == 0) squares[token * kSquares + work.tile] = sum;
  }
  leave_cluster();
}

// grid width / 64 * 8 x ceil(rows / 64), clusters of 8
extern "C" __global__ void __cluster_dims__(Out::kSplit, 1, 1) __launch_bounds__(kThreads)
denoise_fused_project_out(const u16* attended, const u16* __restrict__ o_proj, const float* style, u16* h, float* squares, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Work<Out> work(rows, shared);
  const int column = work.tile * Out::kTileN + static_cast<int>(threadIdx.x) % Out::kBChunks * 8;
  multiply_plain(work, columns_of(o_proj, kWidth, column), attended);
  add_gated(work, style, h, squares);
}

// grid width / 64 * 8 x ceil(rows / 64), clusters of 8
extern "C" __global__ void __cluster_dims__(Down::kSplit, 1, 1) __launch_bounds__(kThreads)
denoise_fused_project_down(const u16* hidden, const u16* __restrict__ down_proj, const float* style, u16* h, float* squares, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Work<Down> work(rows, shared);
  const int column = work.tile * Down::kTileN + static_cast<int>(threadIdx.x) % Down::kBChunks * 8;
  multiply_plain(work, columns_of(down_proj, kWidth, column), hidden);
  add_gated(work, style, h, squares);
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as x sigmoid(2 u)
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * reciprocal_approx(1.f + exp2_approx(-1.5957691216057308f * kLog2E * (x + 0.044715f * x * x * x)));
}

// grid mlp / 64 * 2 x ceil(rows / 64), clusters of 2
extern "C" __global__ void __cluster_dims__(GateUp::kSplit, 1, 1) __launch_bounds__(kThreads)
denoise_fused_project_gate_up(const u16* h, const float* squares, const float* style, const u16* __restrict__ gate_proj,
                              const u16* __restrict__ up_proj, u16* hidden, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Work<GateUp> work(rows, shared);
  const int chunk = work.tile * GateUp::kBChunks + static_cast<int>(threadIdx.x) % GateUp::kBChunks;
  multiply_modulated(work, columns_of(chunk % 2 == 0 ? gate_proj : up_proj, kMlp, chunk / 2 * 8), h, squares, style);
  constexpr int kItems = GateUp::kRankRows * 32;
#pragma unroll
  for (int i = 0; i < kItems / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = work.rank * GateUp::kRankRows + index / 32, item = index % 32;
    const int at = item / 4 * 16 + item % 4 * 2;
    if (row < work.rows_left) {
      const float2 gate = total<GateUp>(work.base, row, at), up = total<GateUp>(work.base, row, at + 8);
      const i64 to = static_cast<i64>(work.row0 + row) * kMlp + work.tile * 64 + item / 4 * 8 + item % 4 * 2;
      *reinterpret_cast<u32*>(hidden + to) = Bf16::pack(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y);
    }
  }
  leave_cluster();
}

// Four neighbouring elements of x W + b, and where they are.
struct Quad {
  float4 value;
  int row, column;
};

__device__ __forceinline__ Quad linear(const Work<Linear>& work, const u16* x, const u16* weights, const float* bias, int columns) {
  const int chunk = work.tile * Linear::kTileN + static_cast<int>(threadIdx.x) % Linear::kBChunks * 8;
  multiply_plain(work, columns_of(weights, columns, chunk), x);
  const int in_tile = work.rank * Linear::kRankRows + static_cast<int>(threadIdx.x) / 16, at = static_cast<int>(threadIdx.x) % 16 * 4;
  Quad y = {make_float4(0.f, 0.f, 0.f, 0.f), in_tile, work.tile * Linear::kTileN + at};
  if (in_tile < work.rows_left) {
    y.value = total_of<Linear, Linear::kSplit>(work.base, 0, in_tile, at);
    const float4 c = *reinterpret_cast<const float4*>(bias + y.column);
    y.value.x += c.x, y.value.y += c.y, y.value.z += c.z, y.value.w += c.w;
  }
  return y;
}

__device__ __forceinline__ float silu(float x) { return x * reciprocal_approx(1.f + exp2_approx(-x * kLog2E)); }

// grid width / 64 * 4 x ceil(rows / 64), clusters of 4
extern "C" __global__ void __cluster_dims__(Linear::kSplit, 1, 1) __launch_bounds__(kThreads)
denoise_fused_project_time(const u16* x, const u16* __restrict__ weights, const float* __restrict__ bias, u16* out, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Work<Linear> work(rows, shared);
  const Quad y = linear(work, x, weights, bias, kWidth);
  if (y.row < work.rows_left) {
    const i64 to = static_cast<i64>(work.row0 + y.row) * kWidth + y.column;
    *reinterpret_cast<uint2*>(out + to) =
        make_uint2(Bf16::pack(silu(y.value.x), silu(y.value.y)), Bf16::pack(silu(y.value.z), silu(y.value.w)));
  }
  leave_cluster();
}

// grid 3 width / 64 * 4 x ceil(rows / 64) x layers, clusters of 4; out is [layers][rows][3 width]
extern "C" __global__ void __cluster_dims__(Linear::kSplit, 1, 1) __launch_bounds__(kThreads)
denoise_fused_project_style(const u16* cond, const u16* __restrict__ weights, const float* __restrict__ bias, float* out, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Work<Linear> work(rows, shared);
  constexpr int kStyle = 3 * kWidth;
  const i64 layer = blockIdx.z;
  const Quad y = linear(work, cond, weights + layer * kWidth * kStyle, bias + layer * kStyle, kStyle);
  if (y.row < work.rows_left) {
    const i64 to = (layer * rows + work.row0 + y.row) * kStyle + y.column;
    *reinterpret_cast<float4*>(out + to) = y.value;
  }
  leave_cluster();
}
