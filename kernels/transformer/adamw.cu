// AdamW over every parameter of the network: one launch, one arena.
//
//   m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2,  t = step + 1
//   p' = p - rate decay p - rate m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps)
//   copy = p' rounded to the element
//
// Parameters p, moments m and v are fp32 [elements]. The gradients of the first f32_elements are
// fp32, those of the others have the row's dtype; both counts are multiples of 4. The step counter
// lies in device memory, so that a captured graph can be replayed. Outputs may overwrite the
// inputs.
// Threads: QUADS groups of four elements each, a block apart, all loads before the first store.
// Shared memory: none.
// Bound: DRAM, 28 bytes an element with 16-bit gradients and copy, 28 in fp32 without a copy.
#include "common/cluster.cuh"
#include "transformer/quads.cuh"
#include "common/types.cuh"

constexpr int kThreads = THREADS;
constexpr int kQuads = QUADS;

constexpr float kBeta1 = 0.9f, kOneMinusBeta1 = 0.1f;
constexpr float kBeta2 = 0.999f, kOneMinusBeta2 = 0.001f;
constexpr float kLnBeta1 = -0.10536051565782628f, kLnBeta2 = -0.0010005003335835335f;
constexpr float kEpsilon = 1e-8f;

// 1 - b^t without cancellation, from ln b.
__device__ __forceinline__ float bias_correction(float ln_beta, float t) {
  return -expm1f(t * ln_beta);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transformer_adamw(const float* p, const float* m, const float* v, const float* gradient_f32,
                      const Element* gradient, const float* step, float* new_p, float* new_m,
                      float* new_v, Element* copy, i64 f32_elements, i64 elements, float rate,
                      float decay) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const i64 first = (static_cast<i64>(blockIdx.x) * (kThreads * kQuads) + threadIdx.x) * 4;
  Quad parameter[kQuads], mean[kQuads], variance[kQuads];
  Packet<16> packed[kQuads];  // gradients: two words or four
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const i64 at = first + i * (kThreads * 4);
    if (at >= elements) break;
    load_f32_quad(p + at, parameter[i]);
    load_f32_quad(m + at, mean[i]);
    load_f32_quad(v + at, variance[i]);
    if (at < f32_elements) {
      packed[i] = load_coherent<16>(gradient_f32 + at);
    } else {
      const ElementPacket<4> own = load_packed_quad(gradient + (at - f32_elements));
#pragma unroll
      for (int word = 0; word < own.kWords; ++word) packed[i].word[word] = own.word[word];
    }
  }
  const float t = *step + 1.f;
  const float scaled_rate = rate / bias_correction(kLnBeta1, t);
  const float scale = rsqrtf(bias_correction(kLnBeta2, t));
  const float kept = 1.f - rate * decay;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const i64 at = first + i * (kThreads * 4);
    if (at >= elements) break;
    Quad slope;
    if (at < f32_elements) {
      unpack_f32(packed[i], slope);
    } else {
      ElementPacket<4> own;
#pragma unroll
      for (int word = 0; word < own.kWords; ++word) own.word[word] = packed[i].word[word];
      unpack<4>(own, slope);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float g = slope[j];
      mean[i][j] = kBeta1 * mean[i][j] + kOneMinusBeta1 * g;
      variance[i][j] = kBeta2 * variance[i][j] + kOneMinusBeta2 * g * g;
      const float divisor = sqrtf(variance[i][j]) * scale + kEpsilon;
      parameter[i][j] = parameter[i][j] * kept - scaled_rate * mean[i][j] / divisor;
    }
    store_f32_quad(new_p + at, parameter[i]);
    store_f32_quad(new_m + at, mean[i]);
    store_f32_quad(new_v + at, variance[i]);
    if (copy != nullptr) store_quad(copy + at, parameter[i]);
  }
}
