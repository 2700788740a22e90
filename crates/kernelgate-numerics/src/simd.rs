//! Clears the processor's AVX state after every GEMM of `faer`.

use std::hint::black_box;

use pulp::Arch;

/// Clears the upper halves of this thread's vector registers.
///
/// `faer`'s x86 kernels (private-gemm-x86 0.1.22) return without `vzeroupper`. Until something
/// executes one, SSE code of the same thread merges into the dirty halves: measured here, f64 `exp`
/// takes 130 ns instead of 4 (`libm` and all scalar code is SSE at the baseline target). The
/// compiler ends every AVX function with a `vzeroupper`, and a `pulp` dispatch is one; on other
/// machines this is a few additions. GEMMs with `Par::Seq` leave only their own thread dirty,
/// others all of rayon's: `rayon::broadcast(|_| clear_upper_avx())` cleans those.
#[inline]
pub fn clear_upper_avx() {
    let mut values = black_box([1.0f32; 32]);
    Arch::new().dispatch(|| values.iter_mut().for_each(|x| *x += 1.0));
    black_box(values);
}
