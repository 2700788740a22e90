// Forward pass of the ST-BIF neuron with one launch for each time step and the state in memory.
//
//   v += x[t]
//   s = +1 if v >= θ and c < Tmax, -1 if v < 0 and c > Tmin, else 0
//   v -= θ·s (and p·θ/Tmax while t < Tmax) ; c += s
//
// Threads: one for each neuron, scalar accesses. Shared memory: none. Bound: memory. Each neuron
// and time step reads x (4 or 2 bytes), v (4) and c (4), and writes v, c and one byte of spike: 21
// bytes in f32, 19 in 16-bit (at t = 0 only x is read). Without moving the state, 5 and 3 bytes
// would suffice. forward_per_step is the first rung of the forward ladder: it works like a
// framework that calls the neuron once a time step.
#include "common/element.cuh"

/// The arrays `v` (membranes) and `c` (tracers), [N], carry the neurons' state from launch to
/// launch; the launch with t = 0 initialises them.
extern "C" __global__ void st_bif_forward_per_step(const Element* __restrict__ x,
                                                   signed char* __restrict__ spikes,
                                                   float* __restrict__ v, int* __restrict__ c,
                                                   long long neurons, long long t, float theta,
                                                   int tmin, int tmax, float prefire) {
  const long long n = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= neurons) return;
  const long long at = t * neurons + n;
  float membrane = t == 0 ? (0.5f + prefire) * theta : v[n];
  int tracer = t == 0 ? 0 : c[n];
  membrane = __fadd_rn(membrane, load_element_as_float(x + at));
  const int spike = membrane >= theta && tracer < tmax ? 1
                    : membrane < 0.0f && tracer > tmin ? -1
                                                       : 0;
  membrane = __fmaf_rn(-theta, static_cast<float>(spike), membrane);
  if (t < tmax) membrane = __fadd_rn(membrane, -(prefire * theta / static_cast<float>(tmax)));
  v[n] = membrane;
  c[n] = tracer + spike;
  spikes[at] = static_cast<signed char>(spike);
}
