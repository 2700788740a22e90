// Macros that select the build of every attention kernel: -DDTYPE=Bf16|F16 -DHEAD_DIM=64|128
// -DCAUSAL=0|1.
#pragma once
#include "common/element16.cuh"
#include "common/types.cuh"

#ifndef DTYPE
#error "compile with -DDTYPE=Bf16 or -DDTYPE=F16"
#endif
#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=64 or -DHEAD_DIM=128"
#endif
#ifndef CAUSAL
#error "compile with -DCAUSAL=0 or -DCAUSAL=1"
#endif

using Element = DTYPE;
constexpr int kHeadDim = HEAD_DIM;
constexpr bool kCausal = CAUSAL != 0;  // a causal mask applies
static_assert(kHeadDim == 64 || kHeadDim == 128,
              "attention kernels support a head dimension of 64 or 128");

// The softmax scale 1/sqrt(d), and its product with log2(e), with which exp(scale * (s - m)) is one
// FMA and one ex2.
constexpr float kScale = kHeadDim == 64 ? 0.125f : 0.08838834764831845f;
constexpr float kScaleLog2 = kScale * kLog2E;

// Strides of a tensor: distances in elements from one batch, head and row to the next one. The
// elements of a tensor's row are contiguous.
struct Strides {
  i64 batch, head, row;

  __device__ __forceinline__ i64 first_row(int batch_index, int head_index) const {
    return batch_index * batch + head_index * head;
  }
};

// A kernel without tensor maps has a build for dense tensors [b, h, s, d], which reads no strides,
// and with -DSTRIDED=1 a build for any strides. The row strides that inner loops need are
// compile-time constants in the STRIDED build, because no registers are left for variable strides.
#ifndef STRIDED
#define STRIDED 0
#endif
constexpr bool kStrided = STRIDED != 0;  // tensors have any strides

using Stride = ChooseType<kStrided, i64, int>::Type;

// Returns the offset in elements of a head in a tensor of `heads` heads a batch and `rows` rows a
// head; `head` counts over all batches.
__device__ __forceinline__ i64 head_offset(const Strides& strides, i64 head, int heads, int rows) {
  if (!kStrided) return head * rows * kHeadDim;
  const int batch = static_cast<int>(head) / heads;
  return strides.first_row(batch, static_cast<int>(head) - batch * heads);
}
// Returns the offset in elements of row `row` of the tile whose first row is `first`.
__device__ __forceinline__ i64 row_offset(const Strides& strides, i64 head, int heads, int rows,
                                          int first, int row) {
  if (!kStrided) return (head * rows + first + row) * kHeadDim;
  return head_offset(strides, head, heads, rows) + (first + row) * strides.row;
}
// Returns the offset of row `row` of the tile whose first row is `first`, in a tensor with one
// number for each row, such as lse.
__device__ __forceinline__ i64 offset_of_row_number(const Strides& strides, i64 head, int heads,
                                                    int rows, int first, int row) {
  if (!kStrided) return head * rows + first + row;
  return row_offset(strides, head, heads, rows, first, row);
}
__device__ __forceinline__ Stride row_stride(const Strides& strides) {
  return kStrided ? strides.row : kHeadDim;
}
