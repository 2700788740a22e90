// Backward pass of the ST-BIF neuron without saved state, for any number of time steps known only
// at run time. Checkpoints of the neuron's state are stored in the rows of gx that are not written
// yet.
//
//   pass 1: forward over t; at the start of each whole chunk of CHUNK steps but the first,
//           v and c go into that chunk's rows of gx
//   pass 2: chunks from the last to the first: restore v and c,
//           replay the forward of the chunk in registers
//             a[t] =  g(H-θ, θ)·[c < Tmax] + g(-H, θ)·[c > Tmin]
//             b[t] = -( [H >= θ]·g(Tmax - c, 1) + [H < 0]·g(c - Tmin, 1) )
//             g(z, w) = exp(-z² / (2·(0.405·w)²)) / w
//           then reverse it: m = gY[t] - θ·gV + gT ; gx[t] = gV = m·a + gV ; gT = m·b + gT
//
// Threads: each handles PER_THREAD neurons and touches only its own columns of gx, so threads share
// nothing. Shared memory: none. Bound: memory; x of the last chunk of time steps is read once, x of
// all other chunks twice. Each neuron and time step takes up to 16 bytes in f32 (8 in 16-bit) plus
// 16/CHUNK bytes for the checkpoints; backward_replay takes 12 (6). Against backward_replay: T is a
// run-time number, and the kernel still needs no workspace.
#include "st_bif/neuron.cuh"
#include "st_bif/columns.cuh"

#ifndef CHUNK
#define CHUNK (kElementBytes == 4 ? 16 : 8)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 8
#endif

constexpr int kStepsPerChunk = CHUNK;
constexpr int kNeuronsPerThread = PER_THREAD;
constexpr int kStateRows = 8 / kElementBytes;  // rows of gx that hold the 8 bytes of v and u
static_assert(kStepsPerChunk >= kStateRows && kStepsPerChunk <= 16,
              "CHUNK must hold the checkpoint (2 rows of f32, 4 of 16-bit) and fit registers (16)");
static_assert(kNeuronsPerThread == 1 || kNeuronsPerThread == 2 || kNeuronsPerThread == 4 ||
                  kNeuronsPerThread == 8,
              "PER_THREAD must be 1, 2, 4 or 8");
static_assert(kNeuronsPerThread * kElementBytes <= 16,
              "PER_THREAD elements must fit one 16-byte load");
static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "BLOCK must be whole warps, at most 1024 threads");

/// Saves the bits of the neurons' `state` (v and c) in kStateRows / 2 rows of gx, beginning at
/// `row`.
template <class Own>
__device__ __forceinline__ void save_state_in_rows(const Own& own, Element* row, long long neurons,
                                     const float (&state)[Own::kCount]) {
  unsigned int bits[Own::kCount];
#pragma unroll
  for (int j = 0; j < Own::kCount; ++j) bits[j] = __float_as_uint(state[j]);
  own.store_raw_bits(row, bits);
  if constexpr (kElementBytes == 2) {
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j) bits[j] >>= 16;
    own.store_raw_bits(row + neurons, bits);
  }
}

/// Restores the neurons' state that `save_state_in_rows` wrote.
template <class Own>
__device__ __forceinline__ void restore_state_from_rows(const Own& own, const Element* row,
                                                        long long neurons,
                                        float (&state)[Own::kCount]) {
  unsigned int low[Own::kCount];
  own.load_raw_bits(row, low);
  if constexpr (kElementBytes == 2) {
    unsigned int high[Own::kCount];
    own.load_raw_bits(row + neurons, high);
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j) low[j] |= high[j] << 16;
  }
#pragma unroll
  for (int j = 0; j < Own::kCount; ++j) state[j] = __uint_as_float(low[j]);
}

/// Replays the forward pass over the chunk of time steps that starts at step t, and keeps only the
/// final state.
template <class Own>
__device__ __forceinline__ void replay_chunk_for_final_state(const Own& own,
    const StBifNeuron& neuron, const Element* x,
                                           long long neurons, long long t, float (&v)[Own::kCount],
                                           float (&u)[Own::kCount]) {
  typename Own::Raw input[kStepsPerChunk];
#pragma unroll
  for (int i = 0; i < kStepsPerChunk; ++i) input[i] = own.load(x + (t + i) * neurons);
#pragma unroll
  for (int i = 0; i < kStepsPerChunk; ++i) {
    float value[Own::kCount];
    unpack_elements_to_floats<Own::kCount>(input[i], value);
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j)
      advance_neuron_one_step<true>(neuron, value[j], t + i, v[j], u[j]);
  }
}

/// Replays the forward pass of `count` time steps (kStepsPerChunk if kWhole) from step t, and then
/// computes their backward pass in reverse order.
template <bool kWhole, class Own>
__device__ __forceinline__ void replay_and_reverse_steps(const Own& own, const StBifNeuron& neuron,
                                              const GaussianSurrogate& surrogate, const Element* x,
                                              const Element* gy, Element* gx, long long neurons,
                                              long long t, int count, float (&v)[Own::kCount],
                                              float (&u)[Own::kCount], float (&gv)[Own::kCount],
                                              float (&gt)[Own::kCount]) {
  typename Own::Raw input[kStepsPerChunk], gradient[kStepsPerChunk];
#pragma unroll
  for (int i = 0; i < kStepsPerChunk; ++i) {
    if (kWhole || i < count) input[i] = own.load(x + (t + i) * neurons);
  }
#pragma unroll
  for (int i = kStepsPerChunk - 1; i >= 0; --i) {
    if (kWhole || i < count) gradient[i] = own.load(gy + (t + i) * neurons);
  }
  SurrogateCoefficients k[kStepsPerChunk][Own::kCount];
#pragma unroll
  for (int i = 0; i < kStepsPerChunk; ++i) {
    if (kWhole || i < count) {
      float value[Own::kCount];
      unpack_elements_to_floats<Own::kCount>(input[i], value);
#pragma unroll
      for (int j = 0; j < Own::kCount; ++j) {
        const float fraction_before_step = u[j];
        const NeuronStepResults step =
            advance_neuron_one_step<true>(neuron, value[j], t + i, v[j], u[j]);
        k[i][j] = surrogate_coefficients(surrogate, step, fraction_before_step);
      }
    }
  }
#pragma unroll
  for (int i = kStepsPerChunk - 1; i >= 0; --i) {
    if (kWhole || i < count) {
      float value[Own::kCount];
      unpack_elements_to_floats<Own::kCount>(gradient[i], value);
#pragma unroll
      for (int j = 0; j < Own::kCount; ++j)
        value[j] = step_neuron_backward(neuron, k[i][j], value[j], gv[j], gt[j]);
      own.store(gx + (t + i) * neurons, value);
    }
  }
}

template <class Own>
__device__ __forceinline__ void run_chunked_replay_backward(const Own& own,
    const StBifNeuron& neuron, const Element* x,
                                    const Element* gy, const float* gv_final, Element* gx,
                                    long long neurons, long long steps) {
  const GaussianSurrogate surrogate(neuron);
  float v[Own::kCount], u[Own::kCount], gv[Own::kCount], gt[Own::kCount];
#pragma unroll
  for (int j = 0; j < Own::kCount; ++j) {
    v[j] = neuron.start_v;
    u[j] = neuron.start_u;
    gv[j] = gv_final == nullptr ? 0.0f : gv_final[own.first + j];
    gt[j] = 0.0f;
  }
  const long long last =
      (steps - 1) / kStepsPerChunk * kStepsPerChunk;  // first step of the last chunk
#pragma unroll 1
  for (long long t = 0; t < last; t += kStepsPerChunk) {
    if (t > 0) {
      save_state_in_rows(own, gx + t * neurons, neurons, v);
      save_state_in_rows(own, gx + (t + kStateRows / 2) * neurons, neurons, u);
    }
    replay_chunk_for_final_state(own, neuron, x, neurons, t, v, u);
  }
  const int count = static_cast<int>(steps - last);
  if (count < kStepsPerChunk)
    replay_and_reverse_steps<false>(own, neuron, surrogate, x, gy, gx, neurons, last, count, v, u,
                                    gv, gt);
#pragma unroll 1
  for (long long t = count < kStepsPerChunk ? last - kStepsPerChunk : last; t >= 0;
       t -= kStepsPerChunk) {
    if (t == 0) {
#pragma unroll
      for (int j = 0; j < Own::kCount; ++j) {
        v[j] = neuron.start_v;
        u[j] = neuron.start_u;
      }
    } else if (t < last) {
      restore_state_from_rows(own, gx + t * neurons, neurons, v);
      restore_state_from_rows(own, gx + (t + kStateRows / 2) * neurons, neurons, u);
    }
    replay_and_reverse_steps<true>(own, neuron, surrogate, x, gy, gx, neurons, t, kStepsPerChunk, v,
                                   u, gv, gt);
  }
}

/// The arrays x, gy and gx are [T, N] in the element type and 16-byte aligned; gx must not overlap
/// x or gy. gv_final, fp32 [N], may be null. Callers pass T of at least 1.
extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    st_bif_backward_replay_any(const Element* __restrict__ x, const Element* __restrict__ gy,
                               const float* __restrict__ gv_final, Element* gx, long long neurons,
                               long long steps, float theta, int tmin, int tmax, float prefire) {
  const StBifNeuron neuron(theta, tmin, tmax, prefire);
  const long long first_neuron = first_neuron_of_block<kNeuronsPerThread>();
  if (neurons % kNeuronsPerThread == 0) {
    const ThreadColumns<kNeuronsPerThread> own(first_neuron + threadIdx.x * kNeuronsPerThread);
    if (own.first < neurons)
      run_chunked_replay_backward(own, neuron, x, gy, gv_final, gx, neurons, steps);
  } else if constexpr (kNeuronsPerThread > 1) {
#pragma unroll 1
    for (int part = 0; part < kNeuronsPerThread; ++part) {
      const ThreadColumns<1> own(first_neuron + static_cast<long long>(part) * blockDim.x +
                                 threadIdx.x);
      if (own.first < neurons)
        run_chunked_replay_backward(own, neuron, x, gy, gv_final, gx, neurons, steps);
    }
  }
}
