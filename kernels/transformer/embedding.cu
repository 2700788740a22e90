// Token embedding and its gradient, which is summed either in a fixed order or by atomic additions.
//
//   x[t] = table[token[t]],  dtable[w] = sum over t with token[t] = w of dx[t]
//
// Tokens are whole numbers in fp32. For a token that is not a whole number of the vocabulary, the
// embedded row is NaN and the gradient gets no addend. Threads: the kernels embed and
// embedding_gradient_atomic use one thread for four elements. In the kernel embedding_gradient each
// warp computes 128 x QUADS columns of one row of the vocabulary. Each warp scans all tokens, 128
// at once, and adds the matching rows of dx in the order of their positions, so every run gives the
// same bits. embedding_gradient writes every row of the gradient. Shared memory: embedding_gradient
// holds TOKENS tokens for each thread block. Bound: the memory traffic of x, and of the table's
// gradient, which is as large as the table.
#define STREAM_STORE "st.global"
#include "common/cluster.cuh"
#include "common/memory.cuh"
#include "common/types.cuh"
#include "transformer/quads.cuh"

constexpr int kThreads = THREADS, kQuads = QUADS, kTokens = TOKENS;
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kWarpTokens = 4 * kWarpSize;  // tokens that a warp compares at once
static_assert(kTokens % kWarpTokens == 0, "a warp compares whole groups of tokens");

__device__ __forceinline__ bool is_valid_token(float token, int vocabulary) {
  return token >= 0.f && token < static_cast<float>(vocabulary) &&
         token == static_cast<float>(static_cast<int>(token));
}

// A token's index and the four columns of its row that one thread handles.
struct TokenAndThreadColumns {
  i64 row;
  int column;
  bool token_exists;  // before the last row's end
  float token;
};

__device__ __forceinline__ TokenAndThreadColumns token_columns_of_thread(const float* tokens, i64 count,
                                                                int d) {
  const int row_quads = d / 4;
  const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 row = quotient(at, row_quads);
  const int column = static_cast<int>(at - row * row_quads) * 4;
  const bool token_exists = row < count;
  return {row, column, token_exists, token_exists ? tokens[row] : -1.f};
}

// The output x is fp32 [tokens, d], the table [vocabulary, d]; d is a multiple of 4.
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_embed(const float* tokens, const Element* table, float* x, i64 count, int d,
                      int vocabulary) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const auto [row, column, token_exists, token] = token_columns_of_thread(tokens, count, d);
  if (!token_exists) return;
  Quad values;
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(0x7fc00000u);
  if (is_valid_token(token, vocabulary)) {
    load_element_quad(table + static_cast<i64>(token) * d + column, values);
  }
  store_f32_quad(x + row * d + column, values);
}

// Adds the gradient of the embedding to grad_table, fp32 [vocabulary, d], which must be zero before
// the kernel; the additions are atomic.
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_embedding_gradient_atomic(const float* tokens, const float* grad_x,
                                          float* grad_table, i64 count, int d, int vocabulary) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const auto [row, column, token_exists, token] = token_columns_of_thread(tokens, count, d);
  if (!token_exists || !is_valid_token(token, vocabulary)) return;
  Quad values;
  load_f32_quad(grad_x + row * d + column, values);
  float* to = grad_table + static_cast<i64>(token) * d + column;
  reduce_add_f32x4(to, values[0], values[1], values[2], values[3]);
}

// Each thread block computes the gradients of kWarps rows of the vocabulary (blockIdx.x) and of 128
// kQuads columns (blockIdx.y).
extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_embedding_gradient(const float* tokens, const float* grad_x, float* grad_table,
                                   i64 count, int d, int vocabulary) {
  __shared__ __align__(16) float staged[kTokens];
  wait_for_previous_kernels();
  allow_next_kernel();
  const int lane = threadIdx.x % kWarpSize;
  const int vocabulary_row = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const int first = blockIdx.y * (kWarpTokens * kQuads) + lane * 4;
  const float row_as_token = static_cast<float>(vocabulary_row);
  Quad sums[kQuads] = {};
  for (i64 begin = 0; begin < count; begin += kTokens) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens; i += kThreads) {
      staged[i] = begin + i < count ? tokens[begin + i] : -1.f;
    }
    __syncthreads();
    const int tokens_in_block = static_cast<int>(min_of<i64>(kTokens, count - begin));
    for (int group = 0; group < tokens_in_block; group += kWarpTokens) {
      const float4 four_tokens = *reinterpret_cast<const float4*>(staged + group + lane * 4);
      const u32 match_bits =
          (four_tokens.x == row_as_token ? 1u : 0u) | (four_tokens.y == row_as_token ? 2u : 0u) |
                          (four_tokens.z == row_as_token ?
                           4u : 0u) | (four_tokens.w == row_as_token ? 8u : 0u);
      for (u32 lanes = __ballot_sync(kFullWarp, match_bits != 0); lanes != 0; lanes &= lanes - 1) {
        const int source = __ffs(static_cast<int>(lanes)) - 1;
        for (u32 rest = __shfl_sync(kFullWarp, match_bits, source); rest != 0; rest &= rest - 1) {
          const i64 token = begin + group + source * 4 + __ffs(static_cast<int>(rest)) - 1;
#pragma unroll
          for (int i = 0; i < kQuads; ++i) {
            const int column = first + i * kWarpTokens;
            if (column >= d) break;
            Quad values;
            load_f32_quad(grad_x + token * d + column, values);
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] += values[j];
          }
        }
      }
    }
  }
  if (vocabulary_row >= vocabulary) return;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = first + i * kWarpTokens;
    if (column < d)
      store_f32_quad(grad_table + static_cast<i64>(vocabulary_row) * d + column, sums[i]);
  }
}
