//! Measures the host's ceiling for fp32 matrix products: multiply-adds of SIMD vectors that stay in
//! registers, on one thread and on all. A library's GEMM is not used as the ceiling, because which
//! library is fastest depends on the matrix shape.

use std::hint::black_box;

use pulp::{Arch, Simd, WithSimd};

use super::best_pass::TimingWindowBudget;

/// Number of independent sums in registers: enough to hide the latency of multiply-adds, and few
/// enough for 16 registers.
const INDEPENDENT_SIMD_SUMS: usize = 12;
/// Number of multiply-adds to each sum in one pass, which takes some 10 µs.
const MULTIPLY_ADDS_PER_SUM: usize = 1 << 13;

/// Operations a second.
pub fn measure_host_f32_flops_per_s() -> f64 {
    let arch = Arch::new();
    let operations = arch.dispatch(FlopsOfMultiplyAddPass);
    let one_s = TimingWindowBudget::CEILING_BUDGET
        .fastest_pass_on_this_thread_s(|| arch.dispatch(SimdMultiplyAddPass));
    let all_s = TimingWindowBudget::SINGLE_CEILING_BUDGET
        .fastest_pass_on_all_threads_s(|_| arch.dispatch(SimdMultiplyAddPass));
    // On a busy host one thread alone may be faster than all threads together, because threads wait
    // for each other.
    (rayon::current_num_threads() as f64 * operations / all_s).max(operations / one_s)
}

/// Counts the floating-point operations of one [`SimdMultiplyAddPass`] pass with the widest SIMD
/// vectors.
struct FlopsOfMultiplyAddPass;

impl WithSimd for FlopsOfMultiplyAddPass {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        2.0 * (S::F32_LANES * INDEPENDENT_SIMD_SUMS * MULTIPLY_ADDS_PER_SUM) as f64
    }
}

struct SimdMultiplyAddPass;

impl WithSimd for SimdMultiplyAddPass {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [factor, term] = [0.999_f32, 0.001].map(|value| simd.splat_f32s(black_box(value)));
        let mut sums = [simd.splat_f32s(black_box(1.0)); INDEPENDENT_SIMD_SUMS];
        for _ in 0..MULTIPLY_ADDS_PER_SUM {
            for sum in &mut sums {
                *sum = simd.mul_add_e_f32s(*sum, factor, term);
            }
        }
        let all = sums.into_iter().reduce(|one, other| simd.add_f32s(one, other));
        black_box(all.map(|all| simd.reduce_sum_f32s(all)));
    }
}
