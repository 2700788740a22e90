//! Clears the upper halves of the processor's AVX registers, which `faer`'s matrix kernels leave in
//! use.

use std::hint::black_box;

use pulp::Arch;

/// Executes `vzeroupper` on this thread, which clears the upper halves of the vector registers.
///
/// `faer`'s matrix kernels for x86 (private-gemm-x86 0.1.22) return without executing `vzeroupper`.
/// Until a thread executes `vzeroupper`, its SSE instructions are slow: f64 `exp` took 130 ns
/// instead of 4 (`libm` and scalar code use SSE). The compiler ends every AVX function with
/// `vzeroupper`, and `pulp`'s dispatch runs such a function; without AVX, this function does only a
/// few additions. A `faer` GEMM with `Par::Seq` leaves AVX state on its own thread only, a parallel
/// GEMM on all of rayon's threads. `rayon::broadcast(|_| clear_upper_avx())` clears the AVX state
/// of all of rayon's threads.
#[inline]
pub fn clear_upper_avx() {
    let mut values = black_box([1.0f32; 32]);
    Arch::new().dispatch(|| values.iter_mut().for_each(|x| *x += 1.0));
    black_box(values);
}
