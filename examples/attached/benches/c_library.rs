//! This bench times a kernel that a library written in C launches through the CUDA driver API.

use attached::{A, AXPY_PTX, AxpyLaunchFunction, AxpyLoadFunction, axpy_problem_at_point};
use kernelgate::attach::*;
use kernelgate::harness::Harness;
use libloading::Library;

fn main() -> std::process::ExitCode {
    let suite = AttachedWorkload::new("attached/axpy", &["n=16777216"], axpy_problem_at_point);
    let suite = suite.add_stream_row("cuda/c_library", ["x", "y", "out"], |at, [x, y, out]| {
        let failed = |error: libloading::Error| BackendError::ComputationFailed(error.to_string());
        // The C library stays loaded until the process ends, because it contains the kernel that
        // the bench launches.
        let library =
            Box::leak(Box::new(unsafe { Library::new(env!("AXPY_LIBRARY")) }.map_err(failed)?));
        let load = unsafe { library.get::<AxpyLoadFunction>(b"axpy_load") }.map_err(failed)?;
        let axpy = *unsafe { library.get::<AxpyLaunchFunction>(b"axpy") }.map_err(failed)?;
        let (kernel, stream) = (unsafe { load(AXPY_PTX.as_ptr()) }, at.stream().raw_pointer());
        let n = at.axis_number("n")? as u32;
        Ok(RowLaunchClosures::new(move || match unsafe { axpy(kernel, stream, A, x, y, out, n) } {
            0 => Ok(()),
            error => Err(format!("axpy: CUDA error {error}")),
        }))
    });
    Harness::new("c_library", [suite]).main()
}
