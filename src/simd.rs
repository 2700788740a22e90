//! Leaving AVX code behind: what every caller of `faer`'s matrix products has to do.

use std::hint::black_box;

use pulp::Arch;

/// Clears the upper halves of this thread's vector registers.
///
/// `faer`'s x86 kernels (private-gemm-x86 0.1.22) return without `vzeroupper`. Until something executes one, SSE code of the
/// same thread merges into the dirty halves: measured here, f64 `exp` takes 130 ns instead of 4 (`libm` and all scalar
/// code is SSE at the baseline target). The compiler ends every AVX function with a `vzeroupper`, and a `pulp` dispatch is
/// one; on other machines this is a few additions. Products with `Par::Seq` leave only their own thread dirty, others all
/// of rayon's: `rayon::broadcast(|_| leave_avx())` cleans those.
#[inline]
pub fn leave_avx() {
    let mut values = black_box([1.0f32; 32]);
    Arch::new().dispatch(|| values.iter_mut().for_each(|x| *x += 1.0));
    black_box(values);
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::linalg::matmul::matmul;
    use faer::{Accum, Mat, Par};
    use std::time::{Duration, Instant};

    fn exponentials() -> Duration {
        (0..5)
            .map(|_| {
                let start = Instant::now();
                black_box((0..10_000).map(|i| black_box(-1e-4 * f64::from(i)).exp()).sum::<f64>());
                start.elapsed()
            })
            .min()
            .expect("several timings")
    }

    #[test]
    fn scalar_code_is_as_fast_after_a_product_as_before() {
        let a = Mat::from_fn(128, 128, |i, j| (i + j) as f64);
        let mut c = Mat::zeros(128, 128);
        leave_avx();
        let before = exponentials();
        matmul(c.as_mut(), Accum::Replace, a.as_ref(), a.as_ref(), 1.0, Par::Seq);
        leave_avx();
        let after = exponentials();
        // The fault is a factor of 30; a factor of 8 leaves room for a busy machine.
        assert!(after < 8 * before, "{before:?} before, {after:?} after");
    }
}
