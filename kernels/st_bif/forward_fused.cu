// Forward pass of the ST-BIF neuron over all time steps in one launch.
//
//   v = (0.5 + p)·θ ; c = 0 ; for t: v += x[t] ; H[t] = v
//     s = +1 if v >= θ and c < Tmax, -1 if v < 0 and c > Tmin, else 0
//     v -= θ·s (and p·θ/Tmax while t < Tmax) ; c += s
//     S[t] = s ; C[t] = c
//
// Threads: one for each neuron; it loops over t with scalar accesses. Shared memory: none. Bound:
// memory, 5 bytes for each neuron and time step in f32, 3 in 16-bit; 10 and 8 if H (fp32) and C
// (int8) are saved for training. Against forward_per_step: the neurons' state stays in registers,
// which saves 16 bytes for each neuron and time step, and T launches become one.
#include "common/element.cuh"

/// `membranes` (H) and `tracers` (C), both [T, N], are both null if no gradient is needed,
/// otherwise both are set; `v_final` ([N]) may be null. The saved tracers are int8, so `tracers`
/// may be set only if Tmin >= -128 and Tmax <= 127.
extern "C" __global__ void st_bif_forward_fused(
    const Element* __restrict__ x, signed char* __restrict__ spikes, float* __restrict__ membranes,
    signed char* __restrict__ tracers, float* __restrict__ v_final, long long neurons,
    long long steps, float theta, int tmin, int tmax, float prefire) {
  const long long n = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= neurons) return;
  const float leak = prefire * theta / static_cast<float>(tmax);
  const bool saves_for_backward = membranes != nullptr;
  float v = (0.5f + prefire) * theta;
  int c = 0;
  for (long long t = 0; t < steps; ++t) {
    const long long at = t * neurons + n;
    v = __fadd_rn(v, load_element_as_float(x + at));
    if (saves_for_backward) membranes[at] = v;
    const int spike = v >= theta && c < tmax ? 1 : v < 0.0f && c > tmin ? -1 : 0;
    v = __fmaf_rn(-theta, static_cast<float>(spike), v);
    if (t < tmax) v = __fadd_rn(v, -leak);
    c += spike;
    spikes[at] = static_cast<signed char>(spike);
    if (saves_for_backward) tracers[at] = static_cast<signed char>(c);
  }
  if (v_final != nullptr) v_final[n] = v;
}
