// Backward pass of the ST-BIF neuron without saved state: the kernel reloads x, replays the forward
// pass in registers, then steps backwards. T (the macro STEPS) is a compile-time constant, 1 to 16.
//
//   forward over t gives H[t] and c[t-1], and with them
//     a[t] =  g(H-θ, θ)·[c < Tmax] + g(-H, θ)·[c > Tmin]
//     b[t] = -( [H >= θ]·g(Tmax - c, 1) + [H < 0]·g(c - Tmin, 1) )
//     g(z, w) = exp(-z² / (2·(0.405·w)²)) / w
//   then gV = gv_final ; gT = 0 ; for t = T-1 .. 0:
//     m = gY[t] - θ·gV + gT ; gx[t] = gV = m·a + gV ; gT = m·b + gT
//
// Threads: each handles PER_THREAD neurons (2; 4 in 16-bit where T <= 8). Each thread loads all T
// values of x and of gY before it uses the first; a[t] and b[t] stay in registers. Shared memory:
// none. Bound: memory; for each neuron and time step, reading x and gY and writing gx takes 12
// bytes in f32, 6 in 16-bit. A time step takes about 33 instructions, 3 of them exponentials, which
// is near the issue limit in the 16-bit build. Against backward_saved: the membranes H and tracers
// C are recomputed from x, so neither pass moves them through memory. Memory accesses are wide, and
// the coefficients a and b are computed while gY is loading. Rows are unaligned if N is not a
// multiple of PER_THREAD: the kernel then uses scalar accesses, coalesced over the warp.
#include "st_bif/neuron.cuh"
#include "st_bif/columns.cuh"

#ifndef STEPS
#error "define STEPS, the number of time steps (1 to 16); backward_replay_any takes any number"
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (kElementBytes == 2 ? 5 : STEPS <= 8 ? 6 : 4)
#endif

constexpr int kSteps = STEPS;  // time steps
constexpr int kNeuronsPerThread = PER_THREAD;
static_assert(kSteps >= 1 && kSteps <= MAX_STEPS,
              "STEPS is 1 to MAX_STEPS: two coefficients a step are held in registers");
static_assert(kNeuronsPerThread == 1 || kNeuronsPerThread == 2 || kNeuronsPerThread == 4 ||
                  kNeuronsPerThread == 8,
              "PER_THREAD must be 1, 2, 4 or 8");
static_assert(kNeuronsPerThread * kElementBytes <= 16,
              "PER_THREAD elements must fit one 16-byte load");
static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "BLOCK must be whole warps, at most 1024 threads");

template <bool kPrefire, class Own>
__device__ __forceinline__ void run_replay_backward(const Own& own, const StBifNeuron& neuron,
                                                    const Element* x,
                                    const Element* gy, const float* gv_final, Element* gx,
                                    long long neurons) {
  constexpr int kCount = Own::kCount;
  typename Own::Raw input[kSteps], gradient[kSteps];
#pragma unroll
  for (int t = 0; t < kSteps; ++t) input[t] = own.load(x + t * neurons);
#pragma unroll
  for (int t = kSteps - 1; t >= 0; --t) gradient[t] = own.load(gy + t * neurons);

  const GaussianSurrogate surrogate(neuron);
  float v[kCount], u[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    v[j] = neuron.start_v;
    u[j] = neuron.start_u;
  }
  SurrogateCoefficients k[kSteps][kCount];
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    float value[kCount];
    unpack_elements_to_floats<kCount>(input[t], value);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float fraction_before_step = u[j];
      const NeuronStepResults step =
          advance_neuron_one_step<kPrefire>(neuron, value[j], t, v[j], u[j]);
      k[t][j] = surrogate_coefficients(surrogate, step, fraction_before_step);
    }
  }

  float gv[kCount], gt[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    gv[j] = gv_final == nullptr ? 0.0f : gv_final[own.first + j];
    gt[j] = 0.0f;
  }
#pragma unroll
  for (int t = kSteps - 1; t >= 0; --t) {
    float value[kCount];
    unpack_elements_to_floats<kCount>(gradient[t], value);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      value[j] = step_neuron_backward(neuron, k[t][j], value[j], gv[j], gt[j]);
    own.store(gx + t * neurons, value);
  }
}

/// The arrays x, gy and gx are [T, N] in the element type and 16-byte aligned; gx must not overlap
/// x or gy. gv_final, fp32 [N], may be null.
extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    st_bif_backward_replay(const Element* __restrict__ x, const Element* __restrict__ gy,
                           const float* __restrict__ gv_final, Element* __restrict__ gx,
                           long long neurons, float theta, int tmin, int tmax, float prefire) {
  const StBifNeuron neuron(theta, tmin, tmax, prefire);
  const long long first_neuron = first_neuron_of_block<kNeuronsPerThread>();
  if (neurons % kNeuronsPerThread == 0) {
    const ThreadColumns<kNeuronsPerThread> own(first_neuron + threadIdx.x * kNeuronsPerThread);
    if (own.first < neurons) {
      if (prefire != 0.0f) {
        run_replay_backward<true>(own, neuron, x, gy, gv_final, gx, neurons);
      } else {
        run_replay_backward<false>(own, neuron, x, gy, gv_final, gx, neurons);
      }
    }
  } else if constexpr (kNeuronsPerThread > 1) {
#pragma unroll 1
    for (int part = 0; part < kNeuronsPerThread; ++part) {
      const ThreadColumns<1> own(first_neuron + static_cast<long long>(part) * blockDim.x +
                                 threadIdx.x);
      if (own.first < neurons) run_replay_backward<true>(own, neuron, x, gy, gv_final, gx, neurons);
    }
  }
}
