// GEMM that computes queries, keys and values, with rotary embedding (RoPE) in its epilogue:
//
//   qkv = x w^T;  a pair (a, b) of q or k -> (a cos - b sin, a sin + b cos)
//
// Layout: x [tokens, k], w [3 heads head_dim, k], qkv [tokens, 3, heads, head_dim]; token t has
// position t % context. The RoPE table, fp32 [context, head_dim / 2, 2], holds the cosine and the
// sine of each position and pair. Threads, shared memory and order of tiles:
// transformer/wide_gemm.cuh. Two adjacent accumulator columns of a thread are a RoPE pair. A thread
// loads the angles of its columns before the GEMM; if several heads lie in a tile, these heads
// share the angles. Bound: tensor cores. Against a separate rope kernel after the GEMM: queries and
// keys pass through memory once.
#define STREAM_STORE "st.global"
#include "transformer/wide_gemm.cuh"

constexpr int kHeadDim = HEAD_DIM;

struct RopeEpilogue {
  static constexpr int kTileColumns = kColumns;
  static __device__ __forceinline__ TmaBoxOrigin box(int k, int tile, int half) {
    return {k, tile * kColumns + half * kHalf, 0, 0};
  }

  // Number of groups of eight columns after which the columns' RoPE angles repeat, because the next
  // head begins.
  static constexpr int kAnglePeriodGroups = kColumns % kHeadDim == 0 ? kHeadDim / 8 : kColumns / 8;
  // Cosine and sine of the RoPE pairs that a lane has in its two rows.
  struct EpilogueInputs {
    Packet<8> angle[kAnglePeriodGroups][2];
  };

  Element* qkv;
  const float* table;
  int tokens, columns, context;

  __device__ __forceinline__ void load(EpilogueInputs& loaded, int row, int tile) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = (row + lane / 4 + 8 * h) % context;
      const float* angles = table + static_cast<i64>(position) * kHeadDim;
#pragma unroll
      for (int group = 0; group < kAnglePeriodGroups; ++group)
        loaded.angle[group][h] = load_read_only_packet<8>(
            angles + (tile * kColumns + 8 * group) % kHeadDim + lane % 4 * 2);
    }
  }

  __device__ __forceinline__ void store(Accumulator& d, const EpilogueInputs& loaded, u32 slice,
                                        int row, int tile) const {
    const int first = tile * kColumns;
    const int rotated_columns_of_tile = columns / 3 * 2 - first;  // columns of the tile that are
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (8 * j >= rotated_columns_of_tile) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Packet<8>& angle = loaded.angle[j % kAnglePeriodGroups][h];
        const float cosine = __uint_as_float(angle.word[0]);
        const float sine = __uint_as_float(angle.word[1]);
        const float a = d[4 * j + 2 * h], b = d[4 * j + 2 * h + 1];
        d[4 * j + 2 * h] = a * cosine - b * sine;
        d[4 * j + 2 * h + 1] = a * sine + b * cosine;
      }
    }
    u32 words[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i)
      words[i] = pack_floats_to_element_pair(d[2 * i], d[2 * i + 1]);
    store_rows_through_slice(slice, words, qkv, columns, row, tokens, first, columns);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    transformer_gemm_rope(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                          Element* qkv, const float* table, int tokens, int columns, int k,
                          int context) {
  run_wide_gemm(x, w, GemmShape{tokens, columns, k},
                RopeEpilogue{qkv, table, tokens, columns, context});
}
