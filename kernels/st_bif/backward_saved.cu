// Backward pass of the ST-BIF neuron from the saved membrane H and tracer C, with a Gaussian
// surrogate gradient.
//
//   g(z, w) = exp(-z² / (2·(0.405·w)²)) / w
//   gV = gv_final ; gT = 0 ; for t = T-1 .. 0, with H = H[t], c = C[t-1] (C[-1] = 0):
//     a =  g(H-θ, θ)·[c < Tmax] + g(-H, θ)·[c > Tmin]
//     b = -( [H >= θ]·g(Tmax - c, 1) + [H < 0]·g(c - Tmin, 1) )
//     m = gY[t] - θ·gV + gT ; gx[t] = gV = m·a + gV ; gT = m·b + gT
//
// Threads: each handles PER_THREAD neurons (4: 16 bytes of H). The loop over t goes downwards in
// chunks of CHUNK time steps; a thread issues all loads of a chunk before it uses the first. Shared
// memory: none. Bound: memory; for each neuron and time step, reading H (4 bytes), C (1) and gY and
// writing gx takes 13 bytes in f32, 9 in 16-bit. A time step takes about 27 instructions, 3 of them
// exponentials. backward_saved reads what forward_fused saved, and is the first rung of the
// backward ladder.
#include "st_bif/neuron.cuh"
#include "st_bif/columns.cuh"

#ifndef CHUNK
#define CHUNK 4
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (kElementBytes == 4 ? 5 : 8)
#endif

constexpr int kStepsPerChunk = CHUNK;
constexpr int kNeuronsPerThread = PER_THREAD;
static_assert(kNeuronsPerThread == 1 || kNeuronsPerThread == 2 || kNeuronsPerThread == 4,
              "PER_THREAD must be 1, 2 or 4: H is loaded with one instruction");
static_assert(kStepsPerChunk >= 1 && kStepsPerChunk <= 16 &&
                  (kStepsPerChunk & (kStepsPerChunk - 1)) == 0,
              "CHUNK steps are held in registers: 1, 2, 4, 8 or 16");
static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "BLOCK must be whole warps, at most 1024 threads");

struct SavedBackwardArrays {
  const Element* gy;
  const float* membranes;
  const signed char* tracers;
  Element* gx;
  long long neurons;
};

/// Steps backwards through time, kSteps steps at a time, from t = end - 1 downwards; half as many
/// steps at a time for the remainder.
template <int kSteps, class Own>
__device__ __forceinline__ void run_backward_steps(const Own& own, const StBifNeuron& neuron,
                                          const GaussianSurrogate& surrogate,
                                              const SavedBackwardArrays& arrays,
                                          long long end, float (&gv)[Own::kCount],
                                          float (&gt)[Own::kCount]) {
  constexpr int kCount = Own::kCount;
#pragma unroll 1
  for (; end >= kSteps; end -= kSteps) {
    typename Own::Raw gradient[kSteps];
    Packet<4 * kCount> membrane[kSteps];
    Packet<kCount> tracer[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const long long row = (end - 1 - i) * arrays.neurons;
      membrane[i] = load_read_only_packet<4 * kCount>(arrays.membranes + row + own.first);
      gradient[i] = own.load(arrays.gy + row);
      tracer[i].word[0] = 0;
      if (end - 1 - i > 0)
        tracer[i] = load_read_only_packet<kCount>(arrays.tracers + row - arrays.neurons +
            own.first);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float value[kCount];
      unpack_elements_to_floats<kCount>(gradient[i], value);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        NeuronStepResults step;
        step.membrane = __uint_as_float(membrane[i].word[j]);
        step.spike = 0.0f;
        step.up = one_if_ge(step.membrane, neuron.theta);
        step.down = one_if_lt(step.membrane, 0.0f);
        const SurrogateCoefficients k =
            surrogate_coefficients(surrogate, step,
                                   int8_tracer_to_fraction(neuron, tracer[i].word[0], j));
        value[j] = step_neuron_backward(neuron, k, value[j], gv[j], gt[j]);
      }
      own.store(arrays.gx + (end - 1 - i) * arrays.neurons, value);
    }
  }
  if constexpr (kSteps > 1) {
    if (end > 0) run_backward_steps<kSteps / 2>(own, neuron, surrogate, arrays, end, gv, gt);
  }
}

template <class Own>
__device__ __forceinline__ void run_saved_backward(const Own& own, const StBifNeuron& neuron,
                                                   const SavedBackwardArrays& arrays,
                                    const float* gv_final, long long steps) {
  const GaussianSurrogate surrogate(neuron);
  float gv[Own::kCount], gt[Own::kCount];
#pragma unroll
  for (int j = 0; j < Own::kCount; ++j) {
    gv[j] = gv_final == nullptr ? 0.0f : gv_final[own.first + j];
    gt[j] = 0.0f;
  }
  run_backward_steps<Own::kCount == 1 ? 2 * kStepsPerChunk : kStepsPerChunk>(own, neuron, surrogate,
                                                                             arrays, steps, gv, gt);
}

/// The arrays gy and gx have the layout [T, N] in the element type. The membranes, fp32 [T, N], and
/// the tracers, int8 [T, N], are those that forward_fused saved. All arrays of the kernel are
/// 16-byte aligned, and gx must not overlap any of them. gv_final, fp32 [N], may be null.
extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    st_bif_backward_saved(const Element* __restrict__ gy, const float* __restrict__ membranes,
                          const signed char* __restrict__ tracers,
                          const float* __restrict__ gv_final, Element* __restrict__ gx,
                          long long neurons, long long steps, float theta, int tmin, int tmax,
                          float prefire) {
  const StBifNeuron neuron(theta, tmin, tmax, prefire);
  const SavedBackwardArrays arrays = {gy, membranes, tracers, gx, neurons};
  const long long first_neuron = first_neuron_of_block<kNeuronsPerThread>();
  if (neurons % kNeuronsPerThread == 0) {
    const ThreadColumns<kNeuronsPerThread> own(first_neuron + threadIdx.x * kNeuronsPerThread);
    if (own.first < neurons) run_saved_backward(own, neuron, arrays, gv_final, steps);
  } else if constexpr (kNeuronsPerThread > 1) {
#pragma unroll 1
    for (int part = 0; part < kNeuronsPerThread; ++part) {
      const ThreadColumns<1> own(first_neuron + static_cast<long long>(part) * blockDim.x +
                                 threadIdx.x);
      if (own.first < neurons) run_saved_backward(own, neuron, arrays, gv_final, steps);
    }
  }
}
