// Forward pass of the ST-BIF neuron over all time steps with wide accesses; spikes are two-bit
// codes.
//
//   v = (0.5 + p)·θ ; c = 0 ; for t: v += x[t]
//     s = +1 if v >= θ and c < Tmax, -1 if v < 0 and c > Tmin, else 0
//     v -= θ·s (and p·θ/Tmax while t < Tmax) ; c += s ; S[t] = s
//
// Spike layout: [T, ceil(N / 4)] bytes. Byte k of row t holds the spikes of neurons 4k .. 4k+3,
// neuron 4k+i in bits 2i and 2i+1 (i = 0 lowest): 00 is 0, 01 is +1, 11 is -1 (two's complement),
// 10 never occurs. Each row of packed spikes is padded to a whole byte with 00. Threads: each
// handles PER_THREAD neurons (16 bytes of x: 4 neurons in f32, 8 in 16-bit). The loop over t goes
// in chunks of CHUNK time steps; a thread issues all loads of a chunk before it uses the first.
// Shared memory: none. Bound: memory, 4.25 bytes for each neuron and time step in f32, 2.25 in
// 16-bit; about 10 instructions for each. Against forward_vectorized: spikes take a quarter of the
// bytes. Rows of x are unaligned if N is not a multiple of PER_THREAD: x is then loaded element by
// element.
#include "st_bif/neuron.cuh"
#include "common/element.cuh"

#ifndef CHUNK
#define CHUNK 4
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (CHUNK <= 2 ? 12 : 8)
#endif

constexpr int kNeuronsPerThread = PER_THREAD;
constexpr int kStepsPerChunk = CHUNK;
static_assert(kNeuronsPerThread == 4 || kNeuronsPerThread == 8,
              "PER_THREAD must be 4 or 8: a thread packs whole bytes of four spikes");
static_assert(kNeuronsPerThread * kElementBytes <= 16,
              "PER_THREAD elements must fit one 16-byte load");
static_assert(kStepsPerChunk >= 1 && kStepsPerChunk <= 16 &&
                  (kStepsPerChunk & (kStepsPerChunk - 1)) == 0,
              "CHUNK steps are held in registers: 1, 2, 4, 8 or 16");
static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "BLOCK must be whole warps, at most 1024 threads");

/// Loads x of kCount consecutive neurons from neuron `first` on: with one load or, if rows are
/// unaligned, one by one with 0 beyond the last neuron.
template <bool kVector, int kCount>
struct InputOfNeurons {
  ElementPacket<kVector ? kCount : 1> packet[kVector ? 1 : kCount];

  __device__ __forceinline__ void load(const Element* row, long long first, long long neurons) {
    if constexpr (kVector) {
      packet[0] = load_read_only_packet<kCount * kElementBytes>(row + first);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        packet[j].word[0] = 0;
        if (first + j < neurons) packet[j] = load_read_only_packet<kElementBytes>(row + first + j);
      }
    }
  }
  __device__ __forceinline__ void unpack_to_floats(float (&value)[kCount]) const {
    if constexpr (kVector) {
      unpack_elements_to_floats<kCount>(packet[0], value);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) value[j] = element_to_float<false>(packet[j].word[0]);
    }
  }
};

/// Runs kSteps time steps at a time from step `t`, with all their loads before the first use; half
/// as many steps at a time for the remainder.
template <bool kPrefire, bool kVector, int kSteps, int kCount>
__device__ __forceinline__ void run_forward_steps(const StBifNeuron& neuron, const Element* x,
                                          unsigned char* spikes, long long neurons, long long first,
                                          long long t, long long steps, float (&v)[kCount],
                                          float (&u)[kCount]) {
  const long long row_bytes = (neurons + 3) / 4;
#pragma unroll 1
  for (; t + kSteps <= steps; t += kSteps) {
    InputOfNeurons<kVector, kCount> input[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) input[i].load(x + (t + i) * neurons, first, neurons);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float value[kCount], spike[kCount];
      input[i].unpack_to_floats(value);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        spike[j] = advance_neuron_one_step<kPrefire>(neuron, value[j], t + i, v[j], u[j]).spike;
        if (!kVector && first + j >= neurons) spike[j] = 0.0f;
      }
      Packet<kCount / 4> codes;
      codes.word[0] = spikes_to_two_bit<kCount>(spike);
      store_packet_evict_first<kCount / 4>(spikes + (t + i) * row_bytes + first / 4, codes);
    }
  }
  if constexpr (kSteps > 1) {
    if (t < steps)
      run_forward_steps<kPrefire, kVector, kSteps /
          2>(neuron, x, spikes, neurons, first, t, steps, v, u);
  }
}

/// Runs all time steps of kCount consecutive neurons from neuron `first` on.
template <bool kPrefire, bool kVector, int kSteps, int kCount>
__device__ __forceinline__ void run_packed_forward(const StBifNeuron& neuron, const Element* x,
                                                   unsigned char* spikes,
                                    float* v_final, long long neurons, long long first,
                                    long long steps) {
  if (first >= neurons) return;
  float v[kCount], u[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    v[j] = neuron.start_v;
    u[j] = neuron.start_u;
  }
  run_forward_steps<kPrefire, kVector, kSteps>(neuron, x, spikes, neurons, first, 0, steps, v, u);
  if (v_final != nullptr) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (first + j < neurons) v_final[first + j] = v[j];
    }
  }
}

/// The input x is [T, N], 16-byte aligned; spikes are [T, ceil(N / 4)] bytes, 2-byte aligned.
/// v_final, fp32 [N], may be null.
extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
    st_bif_forward_packed(const Element* __restrict__ x, unsigned char* __restrict__ spikes,
                          float* __restrict__ v_final, long long neurons, long long steps,
                          float theta, int tmin, int tmax, float prefire) {
  const StBifNeuron neuron(theta, tmin, tmax, prefire);
  const long long first_neuron_of_thread_block =
      static_cast<long long>(blockIdx.x) * (blockDim.x * kNeuronsPerThread);
  if (neurons % kNeuronsPerThread != 0) {
    // Each pass of the loop computes one byte of packed spikes, those of four neurons. The bytes
    // that a thread computes are blockDim.x apart, so that a warp's accesses are coalesced.
#pragma unroll 1
    for (int part = 0; part < kNeuronsPerThread / 4; ++part) {
      const long long first =
          first_neuron_of_thread_block +
              (static_cast<long long>(part) * blockDim.x + threadIdx.x) * 4;
      run_packed_forward<true, false, kStepsPerChunk, 4>(neuron, x, spikes, v_final, neurons, first,
                                                         steps);
    }
  } else if (prefire != 0.0f) {
    run_packed_forward<true, true, kStepsPerChunk, kNeuronsPerThread>(
        neuron, x, spikes, v_final, neurons,
        first_neuron_of_thread_block + threadIdx.x * kNeuronsPerThread, steps);
  } else {
    run_packed_forward<false, true, kStepsPerChunk, kNeuronsPerThread>(
        neuron, x, spikes, v_final, neurons,
        first_neuron_of_thread_block + threadIdx.x * kNeuronsPerThread, steps);
  }
}
