// AdamW step over all parameters of the network in one launch: the parameters lie in one arena.
//
//   m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2,  t = step + 1
//   p' = p - rate decay p - rate m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps)
//   copy = p' rounded to the element
//
// Parameters p and moments m and v are fp32 [elements]. The gradients of the first f32_elements
// parameters are fp32, all other gradients have the row's dtype; both counts are multiples of 4.
// The counter of training steps lies in device memory, so that a captured graph can be replayed.
// The new parameters and moments may be written over the old ones. Threads: each updates four
// elements, and the grid has as many threads as a multiprocessor holds (H200: 0.8 % faster than
// half as many threads with two groups of four). Shared memory: none. Bound: DRAM bandwidth; each
// parameter moves 28 bytes with 16-bit gradients and copy, and also 28 in fp32 without a copy.
#include "common/cluster.cuh"
#include "common/math.cuh"
#include "transformer/quads.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS;
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int kResidentThreads = 2048;
#else
constexpr int kResidentThreads = 1536;
#endif

constexpr float kBeta1 = 0.9f, kOneMinusBeta1 = 0.1f;
constexpr float kBeta2 = 0.999f, kOneMinusBeta2 = 0.001f;
constexpr float kLnBeta1 = -0.10536051565782628f, kLnBeta2 = -0.0010005003335835335f;
constexpr float kEpsilon = 1e-8f;

// Computes Adam's bias correction 1 - b^t from ln b, without cancellation.
__device__ __forceinline__ float bias_correction(float ln_beta, float t) {
  return -expm1f(t * ln_beta);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResidentThreads / kThreads)
    transformer_adamw(const float* p, const float* m, const float* v, const float* gradient_f32,
                      const Element* gradient, const float* step, float* new_p, float* new_m,
                      float* new_v, Element* copy, i64 f32_elements, i64 elements, float rate,
                      float decay) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 at = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (at >= elements) return;
  Quad parameter, mean, variance, slope;
  load_f32_quad(p + at, parameter);
  load_f32_quad(m + at, mean);
  load_f32_quad(v + at, variance);
  // The gradients are unpacked only after the thread has issued its last load.
  Packet<16> packed;
  ElementPacket<4> own;
  const bool gradient_is_f32 = kElementBytes == sizeof(float) || at < f32_elements;
  if (gradient_is_f32) {
    const float* from = gradient_f32 + at;
    if (at >= f32_elements) from = reinterpret_cast<const float*>(gradient + (at - f32_elements));
    packed = load_coherent_packet<16>(from);
  } else {
    own = load_packed_quad(gradient + (at - f32_elements));
  }
  const float t = *step + 1.f;
  const float scaled_rate = rate / bias_correction(kLnBeta1, t);
  const float scale = rsqrtf(bias_correction(kLnBeta2, t));
  const float weight_decay_factor = 1.f - rate * decay;
  if (gradient_is_f32) {
    unpack_f32_quad(packed, slope);
  } else {
    unpack_elements_to_floats<4>(own, slope);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float g = slope[j];
    mean[j] = kBeta1 * mean[j] + kOneMinusBeta1 * g;
    variance[j] = kBeta2 * variance[j] + kOneMinusBeta2 * g * g;
    const float divisor = sqrt_approx(variance[j]) * scale + kEpsilon;
    parameter[j] = parameter[j] * weight_decay_factor - scaled_rate * reciprocal_approx(divisor) *
        mean[j];
  }
  store_f32_quad(new_p + at, parameter);
  store_f32_quad(new_m + at, mean);
  store_f32_quad(new_v + at, variance);
  if (copy != nullptr) store_element_quad(copy + at, parameter);
}
