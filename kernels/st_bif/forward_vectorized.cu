// Forward pass of the ST-BIF neuron over all time steps with wide accesses; spikes are int8.
//
//   v = (0.5 + p)·θ ; c = 0 ; for t: v += x[t]
//     s = +1 if v >= θ and c < Tmax, -1 if v < 0 and c > Tmin, else 0
//     v -= θ·s (and p·θ/Tmax while t < Tmax) ; c += s ; S[t] = s
//
// Threads: each handles PER_THREAD neurons (16 bytes of x: 4 in f32, 8 in 16-bit). The loop over t
// goes in chunks of CHUNK time steps; a thread issues all loads of a chunk before it uses the
// first. Shared memory: none. Bound: memory, 5 bytes for each neuron and time step in f32, 3 in
// 16-bit; about 11 instructions for each. Against forward_fused: 16-byte loads, CHUNK of them in
// flight for each thread, time steps without branches, spikes packed four to a word. Rows are
// unaligned if N is not a multiple of PER_THREAD: the kernel then uses scalar accesses, coalesced
// over the warp.
#include "st_bif/neuron.cuh"
#include "st_bif/columns.cuh"

#ifndef CHUNK
#define CHUNK 4
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (CHUNK <= 2 ? 12 : 8)
#endif

constexpr int kNeuronsPerThread = PER_THREAD;
constexpr int kStepsPerChunk = CHUNK;
static_assert(kNeuronsPerThread == 4 || kNeuronsPerThread == 8,
              "PER_THREAD must be 4 or 8: spikes are stored as whole 4- or 8-byte words");
static_assert(kNeuronsPerThread * kElementBytes <= 16,
              "PER_THREAD elements must fit one 16-byte load");
static_assert(kStepsPerChunk >= 1 && kStepsPerChunk <= 16 &&
                  (kStepsPerChunk & (kStepsPerChunk - 1)) == 0,
              "CHUNK steps are held in registers: 1, 2, 4, 8 or 16");
static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "BLOCK must be whole warps, at most 1024 threads");

template <int kCount>
__device__ __forceinline__ void store_spikes_as_int8(signed char* address,
                                                     const float (&spike)[kCount]) {
  Packet<kCount> packet;
  if constexpr (kCount == 1) {
    packet.word[0] = spike_to_int8(spike[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      packet.word[i / 4] = spikes_to_int8x4(spike[i], spike[i + 1], spike[i + 2], spike[i + 3]);
    }
  }
  store_packet_evict_first<kCount>(address, packet);
}

/// Runs kSteps time steps at a time from step `t`, with all their loads before the first use; half
/// as many steps at a time for the remainder.
template <bool kPrefire, int kSteps, class Own>
__device__ __forceinline__ void run_forward_steps(const Own& own, const StBifNeuron& neuron,
                                                  const Element* x,
                                          signed char* spikes, long long neurons, long long t,
                                          long long steps, float (&v)[Own::kCount],
                                          float (&u)[Own::kCount]) {
#pragma unroll 1
  for (; t + kSteps <= steps; t += kSteps) {
    typename Own::Raw raw[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) raw[i] = own.load(x + (t + i) * neurons);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float input[Own::kCount], spike[Own::kCount];
      unpack_elements_to_floats<Own::kCount>(raw[i], input);
#pragma unroll
      for (int j = 0; j < Own::kCount; ++j)
        spike[j] = advance_neuron_one_step<kPrefire>(neuron, input[j], t + i, v[j], u[j]).spike;
      store_spikes_as_int8(spikes + (t + i) * neurons + own.first, spike);
    }
  }
  if constexpr (kSteps > 1) {
    if (t < steps)
      run_forward_steps<kPrefire, kSteps / 2>(own, neuron, x, spikes, neurons, t, steps, v, u);
  }
}

template <bool kPrefire, class Own>
__device__ __forceinline__ void run_vectorized_forward(const Own& own, const StBifNeuron& neuron,
                                                       const Element* x,
                                    signed char* spikes, float* v_final, long long neurons,
                                    long long steps) {
  float v[Own::kCount], u[Own::kCount];
#pragma unroll
  for (int j = 0; j < Own::kCount; ++j) {
    v[j] = neuron.start_v;
    u[j] = neuron.start_u;
  }
  run_forward_steps<kPrefire, Own::kCount == 1 ? 2 * kStepsPerChunk : kStepsPerChunk>(
      own, neuron, x, spikes, neurons, 0, steps, v, u);
  if (v_final != nullptr) {
#pragma unroll
    for (int j = 0; j < Own::kCount; ++j) v_final[own.first + j] = v[j];
  }
}

/// The input x is [T, N], 16-byte aligned; spikes are int8 [T, N], 8-byte aligned. v_final, fp32
/// [N], may be null.
extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    st_bif_forward_vectorized(const Element* __restrict__ x, signed char* __restrict__ spikes,
                              float* __restrict__ v_final, long long neurons, long long steps,
                              float theta, int tmin, int tmax, float prefire) {
  const StBifNeuron neuron(theta, tmin, tmax, prefire);
  const long long first_neuron = first_neuron_of_block<kNeuronsPerThread>();
  if (neurons % kNeuronsPerThread == 0) {
    const ThreadColumns<kNeuronsPerThread> own(first_neuron + threadIdx.x * kNeuronsPerThread);
    if (own.first < neurons) {
      if (prefire != 0.0f) {
        run_vectorized_forward<true>(own, neuron, x, spikes, v_final, neurons, steps);
      } else {
        run_vectorized_forward<false>(own, neuron, x, spikes, v_final, neurons, steps);
      }
    }
  } else if constexpr (kNeuronsPerThread > 1) {
#pragma unroll 1
    for (int part = 0; part < kNeuronsPerThread; ++part) {
      const ThreadColumns<1> own(first_neuron + static_cast<long long>(part) * blockDim.x +
                                 threadIdx.x);
      if (own.first < neurons)
        run_vectorized_forward<true>(own, neuron, x, spikes, v_final, neurons, steps);
    }
  }
}
