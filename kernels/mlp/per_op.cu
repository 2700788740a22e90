// All operations of a two-layer perceptron except its GEMMs: activation and softmax, forward and
// backward.
//
// Equations, rows r of C classes, elements i of the hidden layer, s = 1 / (1 + e^-z):
//
//   a_i = z_i s_i
//   p_rc = e^(l_rc - max_r) / sum_c e^(l_rc - max_r)
//   dl_rc = p_rc (dp_rc - sum_c dp_rc p_rc)
//   dz_i = da_i s_i (1 + z_i (1 - s_i))
//
// Threads: the activation kernels have one thread for each element of the hidden layer. The softmax
// kernels have one thread block for each row, whose threads stride over the classes.
// Shared memory: only for the reductions of the softmax over a thread block.
// Bound: DRAM bandwidth, because the kernels read and write the fp32 results of the GEMMs.
#include "common/element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS;

__device__ __forceinline__ i64 thread_index() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ float sigmoid(float z) { return 1.f / (1.f + __expf(-z)); }

extern "C" __global__ void __launch_bounds__(kThreads)
    mlp_per_op_activate(const float* __restrict__ z, Element* __restrict__ a, i64 n) {
  const i64 i = thread_index();
  if (i < n) store_element(a + i, z[i] * sigmoid(z[i]));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mlp_per_op_activate_backward(const float* __restrict__ z, const float* __restrict__ grad_a,
                                 Element* __restrict__ grad_z, i64 n) {
  const i64 i = thread_index();
  if (i >= n) return;
  const float s = sigmoid(z[i]);
  store_element(grad_z + i, grad_a[i] * s * (1.f + z[i] * (1.f - s)));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mlp_per_op_softmax(const float* __restrict__ logits, float* __restrict__ p, int classes) {
  __shared__ float scratch[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * classes;
  float top = negative_infinity();
  for (int c = threadIdx.x; c < classes; c += kThreads) top = max_f32(top, logits[row + c]);
  top = block_max<kThreads>(top, scratch);
  float sum = 0.f;
  for (int c = threadIdx.x; c < classes; c += kThreads) sum += __expf(logits[row + c] - top);
  sum = block_sum<kThreads>(sum, scratch);
  for (int c = threadIdx.x; c < classes; c += kThreads) {
    p[row + c] = __expf(logits[row + c] - top) / sum;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mlp_per_op_softmax_backward(const float* __restrict__ p, const float* __restrict__ grad_p,
                                Element* __restrict__ grad_logits, int classes) {
  __shared__ float scratch[kThreads / 32];
  const i64 row = static_cast<i64>(blockIdx.x) * classes;
  float mean = 0.f;
  for (int c = threadIdx.x; c < classes; c += kThreads) mean += p[row + c] * grad_p[row + c];
  mean = block_sum<kThreads>(mean, scratch);
  for (int c = threadIdx.x; c < classes; c += kThreads) {
    store_element(grad_logits + row + c, p[row + c] * (grad_p[row + c] - mean));
  }
}
