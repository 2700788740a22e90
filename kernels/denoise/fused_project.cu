// GEMMs of the action expert, each fused with its neighbours: the norm before it, and after it the
// rotation, GELU or gated residual.
//
//   qkv      q, k, v = adaRMS(h) [q_proj k_proj v_proj]; q and k rotated;
//            k and v written behind the cached prefix
//   out      h += gate (attended o_proj), and the sums of squares that the next norm needs
//   gate_up  hidden = gelu_tanh(adaRMS(h) gate_proj) (adaRMS(h) up_proj)
//   down     h += gate (hidden down_proj), and the sums of squares
//   time     silu(x W + b): the two layers of the time's embedding, a row a step
//   style    cond W + b in fp32: scale, shift and gate of all steps and layers, before the loop
//
// denoise/skinny_gemm.cuh describes threads, shared memory, layouts and the split over clusters. In
// the packed weights, eight columns of q or k lie beside the eight columns with which they rotate,
// and eight columns of gate beside those of up. One thread therefore finishes both columns of such
// a pair. Bound: latency. Reading the 35 MB of weights of a layer, each byte once, takes 8 us.
// Launching, loading x and exchanging sums within a cluster happen one after the other and take
// longer than reading the weights. Against library GEMMs: no launches for norm, rotation,
// activation and residual, no round trips of y through memory, and enough thread blocks for any
// number of columns.
#include "denoise/skinny_gemm.cuh"

using Qkv = SkinnyGemm<kWidth, TILE_COLUMNS, QKV_SPLIT>;
using Out = SkinnyGemm<kQueryWidth, TILE_COLUMNS, OUT_SPLIT>;
using GateUp = SkinnyGemm<kWidth, TILE_COLUMNS, GATE_UP_SPLIT>;  // two blocks a multiprocessor
using Down = SkinnyGemm<kMlp, TILE_COLUMNS, DOWN_SPLIT>;
using Linear = SkinnyGemm<kWidth, TILE_COLUMNS, LINEAR_SPLIT>;

static_assert(Qkv::kSharedBytes == QKV_SHARED_BYTES && Out::kSharedBytes == OUT_SHARED_BYTES &&
                  GateUp::kSharedBytes == GATE_UP_SHARED_BYTES &&
                  Down::kSharedBytes == DOWN_SHARED_BYTES &&
                  Linear::kSharedBytes == LINEAR_SHARED_BYTES,
              "the rows declare what the tiles take");

static_assert((kHeads + 2) * kHeadDim % Qkv::kTileN == 0 && 2 * kMlp % GateUp::kTileN == 0,
              "tiles of columns are whole");
static_assert(Out::kRankRows * 32 == kThreads && Down::kRankRows * 32 == kThreads,
              "a warp finishes a row of 64 columns");
static_assert(Qkv::kRankRows * 16 == kThreads && Linear::kRankRows * 16 == kThreads,
              "a thread finishes four elements");

// Each cluster computes a tile of columns of q, k and v; blockIdx.y is a tile of rows. The keys and
// values have the layout [prefix + rows][head_dim].
extern "C" __global__ void __cluster_dims__(Qkv::kSplit, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_project_qkv(const u16* h, const float* squares, const float* style,
                              const u16* __restrict__ weights, const float2* angles, u16* q,
                              u16* keys, u16* values, int rows, int prefix) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barriers[kBarriers<Qkv>];
  __shared__ float inverse[kTileM];
  const SkinnyGemmWork<Qkv> work(rows, shared, barriers, weights);
  ModulatedInput<Qkv> x{h, squares, style, inverse};
  constexpr int kChunksOf8PerHead = kHeadDim / 8;
  const int row_of_block = static_cast<int>(threadIdx.x) / 16,
            row = work.rank * Qkv::kRankRows + row_of_block, item = threadIdx.x % 16;
  const int chunk = work.tile * 8 + item / 4 * 2, head = chunk / kChunksOf8PerHead,
            column = chunk % kChunksOf8PerHead / 2 * 8 + item % 4 * 2;
  const i64 token = work.row0 + row;
  const bool row_exists = row < work.rows_left;
  float4 turn = make_float4(1.f, 0.f, 1.f, 0.f);  // cos, sin, cos, sin
  if (row_exists && head <= kHeads)
    turn = *reinterpret_cast<const float4*>(angles + token * kHalfHead + column);
  multiply_and_send_row_sums(work, x);
  if (row_exists) {
    const int at = item / 4 * 16 + item % 4 * 2;
    const float2 left = pair_total_over_cluster(work, row_of_block, at), right =
        pair_total_over_cluster(work, row_of_block, at + 8);
    u16* to = head < kHeads    ? q + token * kQueryWidth + head * kHeadDim
              : head == kHeads ? keys + (prefix + token) * kHeadDim
                               : values + (prefix + token) * kHeadDim;
    *reinterpret_cast<u32*>(to + column) =
        Bf16::pack(left.x * turn.x - right.x * turn.y, left.y * turn.z - right.y * turn.w);
    *reinterpret_cast<u32*>(to + kHalfHead + column) =
        Bf16::pack(right.x * turn.x + left.x * turn.y, right.y * turn.z + left.y * turn.w);
  }
}

// Adds gate x W to h for 64 columns of this thread block's rows, and sums the squares of the new h
// over these 64 columns. Each warp handles one row: the lower half of its lanes adds the partial
// sums of one half of the cluster's blocks, the upper half those of the other.
template <typename P>
__device__ __forceinline__ void add_gated_gemm_to_h(const SkinnyGemmWork<P>& work, const u16* x,
                                                    const float* style,
                                          u16* h, float* squares) {
  const int lane = threadIdx.x % kWarpSize, half = lane / 16,
            row_of_block = static_cast<int>(threadIdx.x) / 32,
                row = work.rank * P::kRankRows + row_of_block;
  const i64 token = work.row0 + row;
  const int column = work.tile * P::kTileN + lane % 16 * 4 + half * 2;
  const bool row_exists = row < work.rows_left;
  u32* at = reinterpret_cast<u32*>(h + token * kWidth + column);
  const u32 old_h_pair = row_exists ? *at : 0;
  const float2 gate = *reinterpret_cast<const float2*>(style + 2 * kWidth + column);
  PanelInput<P> panels{x};
  multiply_and_send_row_sums(work, panels);
  if (!row_exists) return;
  const float4 part =
      quad_total_over_ranks<P, P::kSplit /
          2>(work, half * (P::kSplit / 2), row_of_block, lane % 16 * 4);
  // Each lane keeps two of the four sums and sends the other two to its partner lane.
  const float given_x = half == 0 ? part.z : part.x, given_y = half == 0 ? part.w : part.y;
  const float taken_x = __shfl_xor_sync(kFullWarp, given_x, 16),
              taken_y = __shfl_xor_sync(kFullWarp, given_y, 16);
  const float y_x = (half == 0 ? part.x : part.z) + taken_x,
              y_y = (half == 0 ? part.y : part.w) + taken_y;
  const u32 new_h_pair =
      Bf16::pack(Bf16::low(old_h_pair) + gate.x * y_x, Bf16::high(old_h_pair) + gate.y * y_y);
  *at = new_h_pair;
  float sum = Bf16::low(new_h_pair) * Bf16::low(new_h_pair) +
      Bf16::high(new_h_pair) * Bf16::high(new_h_pair);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kFullWarp, sum, mask);
  if (lane == 0) squares[token * kSquareSumsPerRow + work.tile] = sum;
}

// Each cluster computes a tile of columns of the attention output projection `out`; blockIdx.y is a
// tile of rows.
extern "C" __global__ void __cluster_dims__(Out::kSplit, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_project_out(const u16* attended, const u16* __restrict__ weights,
                              const float* style, u16* h, float* squares, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barriers[kBarriers<Out>];
  const SkinnyGemmWork<Out> work(rows, shared, barriers, weights);
  add_gated_gemm_to_h(work, attended, style, h, squares);
}

// Each cluster computes a tile of columns of the feed-forward projection `down`; blockIdx.y is a
// tile of rows.
extern "C" __global__ void __cluster_dims__(Down::kSplit, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_project_down(const u16* hidden, const u16* __restrict__ weights,
                               const float* style, u16* h, float* squares, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barriers[kBarriers<Down>];
  const SkinnyGemmWork<Down> work(rows, shared, barriers, weights);
  add_gated_gemm_to_h(work, hidden, style, h, squares);
}

// Each cluster computes a tile of columns of the feed-forward projections gate and up; blockIdx.y
// is a tile of rows.
extern "C" __global__ void __cluster_dims__(GateUp::kSplit, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_project_gate_up(const u16* h, const float* squares, const float* style,
                                  const u16* __restrict__ weights, u16* hidden, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barriers[kBarriers<GateUp>];
  __shared__ float inverse[kTileM];
  const SkinnyGemmWork<GateUp> work(rows, shared, barriers, weights);
  ModulatedInput<GateUp> x{h, squares, style, inverse};
  multiply_and_send_row_sums(work, x);
  constexpr int kRowItems = GateUp::kTileN / 4;  // two columns of gate and the two of up
#pragma unroll
  for (int i = 0; i < ceil_div(GateUp::kRankRows * kRowItems, kThreads); ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x),
        row_of_block = index / kRowItems,
              row = work.rank * GateUp::kRankRows + row_of_block;
    if (row >= work.rows_left) break;
    const int item = index % kRowItems, at = item / 4 * 16 + item % 4 * 2;
    const float2 gate = pair_total_over_cluster(work, row_of_block, at), up =
        pair_total_over_cluster(work, row_of_block, at + 8);
    const int column = work.tile * (GateUp::kTileN / 2) + item / 4 * 8 + item % 4 * 2;
    *reinterpret_cast<u32*>(hidden + panel_element_offset(work.row0 + row, column, kMlp)) =
        Bf16::pack(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y);
  }
}

// Four adjacent elements of x W + b, with their row and first column.
struct FourLinearOutputs {
  float4 value;
  int row, column;
};

__device__ __forceinline__ FourLinearOutputs four_linear_outputs(const SkinnyGemmWork<Linear>& work,
                                                                 const u16* x, const float* bias) {
  PanelInput<Linear> panels{x};
  multiply_and_send_row_sums(work, panels);
  const int row_of_block = static_cast<int>(threadIdx.x) / 16,
            at = static_cast<int>(threadIdx.x) % 16 * 4;
  FourLinearOutputs y = {quad_total_over_ranks<Linear, Linear::kSplit>(work, 0, row_of_block, at),
            work.rank * Linear::kRankRows + row_of_block, work.tile * Linear::kTileN + at};
  const float4 c = *reinterpret_cast<const float4*>(bias + y.column);
  y.value.x += c.x, y.value.y += c.y, y.value.z += c.z, y.value.w += c.w;
  return y;
}

__device__ __forceinline__ float silu(float x) {
  return x * reciprocal_approx(1.f + exp2_approx(-x * kLog2E));
}

// Each cluster computes a tile of columns of the time embedding; blockIdx.y is a tile of rows.
extern "C" __global__ void __cluster_dims__(Linear::kSplit, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_project_time(const u16* x, const u16* __restrict__ weights,
                               const float* __restrict__ bias, u16* out, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barriers[kBarriers<Linear>];
  const SkinnyGemmWork<Linear> work(rows, shared, barriers, weights);
  const FourLinearOutputs y = four_linear_outputs(work, x, bias);
  if (y.row < work.rows_left)
    *reinterpret_cast<uint2*>(out + panel_element_offset(work.row0 + y.row, y.column, kWidth)) =
        make_uint2(Bf16::pack(silu(y.value.x), silu(y.value.y)),
                   Bf16::pack(silu(y.value.z), silu(y.value.w)));
}

// Each cluster computes a tile of columns of the adaRMS styles; blockIdx.y is a tile of rows,
// blockIdx.z the layer. The adaRMS styles (scale, shift, gate) are written as [layers][rows][3
// width].
extern "C" __global__ void __cluster_dims__(Linear::kSplit, 1, 1) __launch_bounds__(kThreads)
    denoise_fused_project_style(const u16* cond, const u16* __restrict__ weights,
                                const float* __restrict__ bias, float* out, int rows) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barriers[kBarriers<Linear>];
  constexpr int kStyleColumns = 3 * kWidth;
  const i64 layer = blockIdx.z;
  const SkinnyGemmWork<Linear> work(rows, shared, barriers,
                                    weights + layer * kWidth * kStyleColumns);
  const FourLinearOutputs y = four_linear_outputs(work, cond, bias + layer * kStyleColumns);
  if (y.row < work.rows_left)
    *reinterpret_cast<float4*>(out + (layer * rows + work.row0 + y.row) * kStyleColumns +
                               y.column) = y.value;
}
