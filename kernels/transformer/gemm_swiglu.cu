// GEMM that computes gate and up, with SwiGLU in its epilogue: h = silu(x gate^T) (x up^T).
//
// Layout of this GEMM: x [tokens, k], gate and up [2, ff, k], h [tokens, ff]. A tile of w has kHalf
// rows of gate and the matching kHalf rows of up, so that a thread's accumulator has both operands
// of its elements of h. A build with -DSAVED=1 also writes gates and ups for the backward pass, as
// [tokens, 2, ff]. Threads, shared memory and order of tiles: transformer/wide_gemm.cuh. Bound:
// tensor cores. Against a separate swiglu kernel after the GEMM: gates and ups do not pass through
// device memory.
#define STREAM_STORE "st.global"
#include "transformer/wide_gemm.cuh"

constexpr bool kSaved = SAVED != 0;

struct SwigluEpilogue {
  static constexpr int kTileColumns = kHalf;  // of h
  static __device__ __forceinline__ TmaBoxOrigin box(int k, int tile, int half) {
    return {k, tile * kHalf, half, 0};
  }

  struct EpilogueInputs {};

  Element *h, *gate_up;
  int tokens, ff;

  __device__ __forceinline__ void load(EpilogueInputs&, int, int) const {}
  __device__ __forceinline__ void store(const Accumulator& d, const EpilogueInputs&, u32 slice,
                                        int row, int tile) const {
    constexpr int kWords = kHalf / 4;  // words of two elements of h of a lane
    const int column = tile * kHalf;
    u32 words[kWords];
    if (kSaved) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          words[i] = pack_floats_to_element_pair(d[half * kHalf / 2 + 2 * i],
                                                 d[half * kHalf / 2 + 2 * i + 1]);
        store_rows_through_slice(slice, words, gate_up + half * ff, 2 * ff, row, tokens, column,
                                 ff);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float h[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float gate = d[2 * i + j], up = d[kHalf / 2 + 2 * i + j];
        h[j] = up * gate * reciprocal_approx(1.f + exp2_approx(-kLog2E * gate));
      }
      words[i] = pack_floats_to_element_pair(h[0], h[1]);
    }
    store_rows_through_slice(slice, words, h, ff, row, tokens, column, ff);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    transformer_gemm_swiglu(const __grid_constant__ TensorMap x,
        const __grid_constant__ TensorMap w,
                            Element* h, Element* gate_up, int tokens, int ff, int k) {
  run_wide_gemm(x, w, GemmShape{tokens, ff, k}, SwigluEpilogue{h, gate_up, tokens, ff});
}
