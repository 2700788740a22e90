// The ST-BIF neuron in fp32 registers: one time step forward, and the surrogate coefficients of one
// time step backward.
//
//   v += x ; H = v
//   s  = +1 if v >= θ and c < Tmax ; -1 if v < 0 and c > Tmin ; 0 otherwise
//   v -= θ·s, and p·θ/Tmax while t < Tmax ; c += s
//
// The tracer c is stored as a fraction u = 1 - (Tmax - c)·q with q = 2^-23. The upper bound c =
// Tmax of the tracer is u = 1, so that a saturating add clamps u to the bound, and a step of c by 1
// is exactly one quantum q. The conditions of a spike of +1 and of -1 exclude each other (θ > 0).
// Clamping c + [v >= θ] - [v < 0] to [Tmin, Tmax] therefore gives exactly the next tracer c + s,
// and s·q is the change of u. One time step of a neuron takes 8 instructions, 3 of them on the
// half-rate pipe, without a branch. Every operation rounds exactly as the neuron's equations do, so
// the spikes equal those of the direct form bit for bit. The fraction u requires θ > 0 and Tmax -
// Tmin <= 2^22; the spike s is 0 where v is NaN.
#pragma once

#include "common/math.cuh"

constexpr float kQuantum = 0x1p-23f;  // u per unit of c
constexpr float kInverseQuantum = 0x1p23f;

struct StBifNeuron {
  float theta;
  float theta_per_quantum;  // θ / q
  float lowest;             // u at c = Tmin
  float start_u;            // u at c = 0
  float start_v;            // (0.5 + p)·θ
  float leak;               // p·θ / Tmax, taken off while t < Tmax
  int tmax;

  __device__ __forceinline__ StBifNeuron(float theta_, int tmin, int tmax_, float prefire)
      : theta(theta_),
        theta_per_quantum(theta_ * kInverseQuantum),
        lowest(1.0f - kQuantum * static_cast<float>(tmax_ - tmin)),
        start_u(1.0f - kQuantum * static_cast<float>(tmax_)),
        start_v((0.5f + prefire) * theta_),
        leak(prefire == 0.0f ? 0.0f : prefire * theta_ / static_cast<float>(tmax_)),
        tmax(tmax_) {}
};

/// Results of one time step of a neuron, besides its new membrane v and tracer u. `spike` is the
/// spike s times the quantum q; `up` and `down` are [H >= θ] and [H < 0] as 0.0 or 1.0.
struct NeuronStepResults {
  float membrane;
  float spike;
  float up;
  float down;
};

/// Advances a neuron by one time step and returns the results of this step. With kPrefire false the
/// arithmetic is that of prefire p = 0, one subtraction shorter.
template <bool kPrefire>
__device__ __forceinline__ NeuronStepResults advance_neuron_one_step(const StBifNeuron& neuron,
    float x, int t, float& v, float& u) {
  NeuronStepResults step;
  step.membrane = __fadd_rn(v, x);
  step.up = one_if_ge(step.membrane, neuron.theta);
  step.down = one_if_lt(step.membrane, 0.0f);
  const float fraction_after_rise = fma_saturated(step.up, kQuantum, u);
  const float next = fmaxf(__fmaf_rn(step.down, -kQuantum, fraction_after_rise), neuron.lowest);
  step.spike = __fadd_rn(next, -u);
  u = next;
  v = __fmaf_rn(step.spike, -neuron.theta_per_quantum, step.membrane);
  if constexpr (kPrefire) {
    if (t < neuron.tmax) v = __fadd_rn(v, -neuron.leak);
  }
  return step;
}

/// Converts byte `index` (0 to 3) of a word of int8 tracers to the fraction u that stands for the
/// tracer in registers. In the conversion, the tracer's byte becomes the mantissa of the fp32
/// number 2^23 + 128 + c.
__device__ __forceinline__ float int8_tracer_to_fraction(const StBifNeuron& neuron,
                                                         unsigned int word,
                                                  int index) {
  const float biased = __uint_as_float(replace_lowest_byte(word ^ 0x80808080u, index, 0x4b000000u));
  return __fmaf_rn(biased, kQuantum, -kQuantum * static_cast<float>(neuron.tmax + 128));
}

/// Packs four spikes, each stored as s·q, as int8 into one word, spike 0 in the lowest byte. Two
/// spikes at a time are added to the mantissa of 2^23 + 0x8080, byte by byte, without borrow;
/// flipping the top bits restores the sign.
__device__ __forceinline__ unsigned int spikes_to_int8x4(float s0, float s1, float s2, float s3) {
  constexpr float kBase = 0x1p23f + 0x8080;
  const float low = __fmaf_rn(s1, kInverseQuantum * 0x1p8f, __fmaf_rn(s0, kInverseQuantum, kBase));
  const float high = __fmaf_rn(s3, kInverseQuantum * 0x1p8f, __fmaf_rn(s2, kInverseQuantum, kBase));
  return join_low_halves(__float_as_uint(low), __float_as_uint(high)) ^ 0x80808080u;
}

/// Converts one spike, stored as s·q, to an int8 in the lowest byte.
__device__ __forceinline__ unsigned int spike_to_int8(float s) {
  return (__float_as_uint(__fmaf_rn(s, kInverseQuantum, 0x1p23f + 0x80)) & 0xffu) ^ 0x80u;
}

/// Packs up to eight spikes, each stored as s·q, as two-bit codes, spike i in bits 2i and 2i+1: 00
/// is 0, 01 is +1, 11 is -1 (two's complement).
template <int kCount>
__device__ __forceinline__ unsigned int spikes_to_two_bit(const float (&spike)[kCount]) {
  static_assert(kCount == 4 || kCount == 8,
                "spikes are packed four to a byte, at most two bytes at a time");
  constexpr unsigned int kSigns = 0xaaaau & ((1u << (2 * kCount)) - 1u);
  float sum = 0x1p23f + kSigns;
  float weight = kInverseQuantum;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum = __fmaf_rn(spike[i], weight, sum);
    weight *= 4.0f;
  }
  return (__float_as_uint(sum) & ((1u << (2 * kCount)) - 1u)) ^ kSigns;
}

/// Constants of a neuron with which the Gaussian surrogate g(z, w) = exp(-z² / (2·(0.405·w)²)) / w
/// is computed as a power of two.
struct GaussianSurrogate {
  static constexpr float kUnitSharpness =
      2.097090960f;  // sqrt(log2(e) / 2) / 0.405: g(d, 1) = 2^-(d·kUnitSharpness)²
  static constexpr float kScaledDistancePerU =
      kUnitSharpness *
      kInverseQuantum;  // even and above 2^24, so kScaledDistancePerU + kZeroDistance is a float
  static constexpr float kZeroDistance = 32.0f;  // a distance at which 2^-(distance²) is 0
  float sharpness;                      // g(z, θ) = 2^(-(z·sharpness)² - log2 θ)
  float minus_log2_theta;
  float lowest_per_quantum;  // u at Tmin, over q
  float span_and_far;        // (Tmax - Tmin)·kUnitSharpness + kZeroDistance

  __device__ __forceinline__ explicit GaussianSurrogate(const StBifNeuron& neuron)
      : sharpness(kUnitSharpness / neuron.theta),
        minus_log2_theta(-log2_approx(neuron.theta)),
        lowest_per_quantum(neuron.lowest * kInverseQuantum),
        span_and_far(__fadd_rn(__fmaf_rn(neuron.lowest, -kScaledDistancePerU, kScaledDistancePerU),
                               kZeroDistance)) {}
};

/// Coefficients of one backward step, from H[t], the conditions on it, and u before the step:
///   a =  g(H-θ, θ)·[c < Tmax] + g(-H, θ)·[c > Tmin]
///   b = [H >= θ]·g(Tmax - c, 1) + [H < 0]·g(c - Tmin, 1)      (minus the equation's b)
struct SurrogateCoefficients {
  float a;
  float b;
};

__device__ __forceinline__ SurrogateCoefficients surrogate_coefficients(
    const GaussianSurrogate& surrogate,
                                                               const NeuronStepResults& step,
                                                                   float u) {
  const float scaled_membrane = __fmul_rn(step.membrane, surrogate.sharpness);
  const float scaled_excess_over_threshold = __fmaf_rn(step.membrane, surrogate.sharpness,
                                -GaussianSurrogate::kUnitSharpness);
  const float tracer_above_minimum =
      fma_saturated(u, kInverseQuantum, -surrogate.lowest_per_quantum);
  const float tracer_below_maximum = fma_saturated(u, -kInverseQuantum, kInverseQuantum);
  const float g_below = exp2_approx(__fmaf_rn(-scaled_membrane, scaled_membrane,
                                              surrogate.minus_log2_theta));
  const float g_above = exp2_approx(__fmaf_rn(-scaled_excess_over_threshold,
      scaled_excess_over_threshold, surrogate.minus_log2_theta));
  // Scaled distance of the tracer c, up to sign, to the bound that the membrane pushes against.
  // The distance is Tmax - c where H >= θ, and c - Tmin where H < 0. If neither H >= θ nor H < 0
  // holds, the distance is more than kZeroDistance, so that one exponential gives b in all three
  // cases.
  const float far =
      __fmaf_rn(u, -GaussianSurrogate::kScaledDistancePerU,
                GaussianSurrogate::kScaledDistancePerU + GaussianSurrogate::kZeroDistance);
  const float distance =
      __fmaf_rn(step.down, -surrogate.span_and_far,
                __fmaf_rn(step.up, -GaussianSurrogate::kZeroDistance, far));
  SurrogateCoefficients result;
  result.a = __fmaf_rn(tracer_below_maximum, g_above, __fmul_rn(tracer_above_minimum, g_below));
  result.b = exp2_approx(__fmul_rn(-distance, distance));
  return result;
}

/// Computes one time step of the neuron's backward, m = gY - θ·gV + gT ; gx = m·a + gV ; gT = m·b +
/// gT ; gV = gx, and returns gx.
__device__ __forceinline__ float step_neuron_backward(const StBifNeuron& neuron,
                                                      const SurrogateCoefficients& k, float gy,
                                         float& gv, float& gt) {
  const float m = __fmaf_rn(-neuron.theta, gv, __fadd_rn(gy, gt));
  gv = __fmaf_rn(m, k.a, gv);
  gt = __fmaf_rn(-m, k.b, gt);
  return gv;
}
