//! The host's ceiling of f32 GEMMs: multiply-adds of vectors that never leave registers, on all
//! threads of the backend. A library's GEMM does not serve as the ceiling, because the fastest one
//! depends on its shape.

use std::hint::black_box;

use pulp::{Arch, Simd, WithSimd};

use super::fastest::fastest_s;

/// Independent sums in flight: more than the latency of a multiply-add times the units for it, and
/// few enough for 16 registers.
const SUMS: usize = 12;
/// Multiply-adds of each sum in a pass: long enough that waking threads is little of it. Without
/// optimisation a sixteenth takes as long.
const ROUNDS: usize = if cfg!(debug_assertions) { 1 << 16 } else { 1 << 20 };

/// Operations a second.
pub fn flops_per_s() -> f64 {
    let arch = Arch::new();
    let mut flops = 0.0;
    let seconds = fastest_s(|| {
        let done = rayon::broadcast(|_| arch.dispatch(MultiplyAdds));
        flops = done.iter().sum();
    });
    flops / seconds
}

/// Rounds of multiply-adds; the number of their operations.
struct MultiplyAdds;

impl WithSimd for MultiplyAdds {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f64 {
        let [factor, term] = [0.999_f32, 0.001].map(|value| simd.splat_f32s(black_box(value)));
        let mut sums = [simd.splat_f32s(black_box(1.0)); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = simd.mul_add_e_f32s(*sum, factor, term);
            }
        }
        let all = sums.into_iter().reduce(|one, other| simd.add_f32s(one, other));
        black_box(all.map(|all| simd.reduce_sum_f32s(all)));
        2.0 * (S::F32_LANES * SUMS * ROUNDS) as f64
    }
}
