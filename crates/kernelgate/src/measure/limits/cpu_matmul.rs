//! The host's ceiling of f32 GEMMs: multiply-adds of vectors that never leave registers, on all
//! threads of the backend. A GEMM of a library does not serve as the ceiling, because the fastest
//! library depends on the matrix shape.

use std::hint::black_box;

use pulp::{Arch, Simd, WithSimd};

use super::best_pass::PassWindows;

/// Number of independent sums: more than the latency of a multiply-add times the number of units,
/// and few enough for 16 registers.
const INDEPENDENT_SUMS: usize = 12;
/// Multiply-adds of each sum in a pass: some 10 µs.
const MULTIPLY_ADD_ROUNDS: usize = 1 << 13;

/// Operations a second.
pub fn flops_per_s() -> f64 {
    let arch = Arch::new();
    let operations = arch.dispatch(OperationCount);
    let one_s = PassWindows::CEILING_WINDOWS.fastest_s(|| arch.dispatch(MultiplyAddRounds));
    let all_s =
        PassWindows::SINGLE_CEILING_WINDOWS.fastest_on_all_s(|_| arch.dispatch(MultiplyAddRounds));
    // On a busy machine a thread alone may be faster than all that wait for each other.
    (rayon::current_num_threads() as f64 * operations / all_s).max(operations / one_s)
}

/// Number of operations of [`MultiplyAddRounds`] with the widest vectors.
struct OperationCount;

impl WithSimd for OperationCount {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        2.0 * (S::F32_LANES * INDEPENDENT_SUMS * MULTIPLY_ADD_ROUNDS) as f64
    }
}

struct MultiplyAddRounds;

impl WithSimd for MultiplyAddRounds {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [factor, term] = [0.999_f32, 0.001].map(|value| simd.splat_f32s(black_box(value)));
        let mut sums = [simd.splat_f32s(black_box(1.0)); INDEPENDENT_SUMS];
        for _ in 0..MULTIPLY_ADD_ROUNDS {
            for sum in &mut sums {
                *sum = simd.mul_add_e_f32s(*sum, factor, term);
            }
        }
        let all = sums.into_iter().reduce(|one, other| simd.add_f32s(one, other));
        black_box(all.map(|all| simd.reduce_sum_f32s(all)));
    }
}
