// ST-BIF neurons of ResNet-18 over all time steps in registers, with spikes and gradients in bf16.
// The computation of the neurons' input currents is deliberately not part of neurons.cuh.
#pragma once
#include "common/element16.cuh"
#include "common/types.cuh"
#include "st_bif/neuron.cuh"

constexpr int kSteps = STEPS;  // time steps

// Loads two adjacent 16-bit elements as one 32-bit word.
__device__ __forceinline__ u32 load_16_bit_pair(const u16* p) {
  return *reinterpret_cast<const u32*>(p);
}
__device__ __forceinline__ void store_pair(u16* p, u32 pair) { *reinterpret_cast<u32*>(p) = pair; }

// Converts two spikes, each stored as s·q, to bf16, which holds -1, 0 and 1 exactly.
__device__ __forceinline__ u32 pack_spike_pair_as_bf16(float low, float high) {
  return Bf16::pack(low * kInverseQuantum, high * kInverseQuantum);
}

// Returns the input current of a neuron of the stem in a fed time step.
__device__ __forceinline__ float stem_current(float conv, float bias, float divisor) {
  return __fdiv_rn(conv + bias, divisor);
}

// Replaces the gradient of a neuron's spikes in `g` by the gradient of its currents; the forward
// pass is replayed from the currents.
__device__ __forceinline__ void spike_to_current_gradients(const StBifNeuron& neuron,
                                                           const GaussianSurrogate& surrogate,
                                                 const float (&x)[kSteps], float (&g)[kSteps]) {
  SurrogateCoefficients k[kSteps];
  float v = neuron.start_v, u = neuron.start_u;
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    const float fraction_before_step = u;
    const NeuronStepResults step = advance_neuron_one_step<false>(neuron, x[t], t, v, u);
    k[t] = surrogate_coefficients(surrogate, step, fraction_before_step);
  }
  float gv = 0.f, gt = 0.f;
#pragma unroll
  for (int t = kSteps - 1; t >= 0; --t) g[t] = step_neuron_backward(neuron, k[t], g[t], gv, gt);
}
