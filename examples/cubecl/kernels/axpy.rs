//! Defines the kernel `out = 2.5 x + y` in CubeCL, and returns its CUDA C++ text. CubeCL's runtime
//! launches on streams that it does not expose; kernelgate therefore refuses its launches as work
//! on another stream.

use cubecl_core as cubecl;
use cubecl_core::codegen::Compiler;
use cubecl_core::frontend::ArrayCompilationArg;
use cubecl_core::prelude::*;
use cubecl_cuda::{CudaCompiler, CudaRuntime};

/// Factor of `x` in `out = 2.5 x + y`.
pub const A: f32 = 2.5;

/// Number of threads of a thread block.
pub const THREADS_PER_BLOCK: u32 = 256;

/// A header that the kernel text includes and NVRTC does not find; it may be empty, because NVRTC
/// has its contents built in.
pub const EMPTY_HEADERS_FOR_NVRTC: &[(&str, &str)] = &[("cuda_runtime.h", "")];

/// Value of the last argument of every CubeCL kernel, the address of lengths and scalars; 0,
/// because this kernel uses none.
pub const NO_LENGTHS_AND_SCALARS: u64 = 0;

#[cube(launch)]
fn axpy(x: &Array<f32>, y: &Array<f32>, out: &mut Array<f32>, #[comptime] n: u32) {
    if ABSOLUTE_POS < n {
        out[ABSOLUTE_POS] = A * x[ABSOLUTE_POS] + y[ABSOLUTE_POS];
    }
}

/// Returns the name and the CUDA C++ text of the kernel for `n` elements; its arguments are three
/// pointers and [`NO_LENGTHS_AND_SCALARS`].
pub fn kernel_name_and_cuda_source(n: u32) -> (String, String) {
    let array = || ArrayCompilationArg { inplace: None, line_size: 1 };
    let settings = KernelSettings::default().cube_dim(CubeDim::new_1d(THREADS_PER_BLOCK));
    let kernel = axpy::Axpy::<CudaRuntime>::new(settings, array(), array(), array(), n);
    let definition = kernel.define();
    let name = definition.options.kernel_name.clone();
    let mode = ExecutionMode::Unchecked;
    (name, CudaCompiler::default().compile(definition, &Default::default(), mode).to_string())
}
