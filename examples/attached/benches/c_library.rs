//! A kernel that a library in C launches, by the driver API.

use attached::{A, Axpy, Load, PTX, axpy};
use kernelgate::attach::*;
use kernelgate::harness::Harness;
use libloading::Library;

fn main() -> std::process::ExitCode {
    let suite = Attached::new("attached/axpy", &["n=16777216"], axpy);
    let suite = suite.row("cuda/c_library", ["x", "y", "out"], |at, [x, y, out]| {
        let failed = |error: libloading::Error| BackendError::Launch(error.to_string());
        // The library stays loaded, because it contains the launched kernel.
        let library =
            Box::leak(Box::new(unsafe { Library::new(env!("AXPY_LIBRARY")) }.map_err(failed)?));
        let load = unsafe { library.get::<Load>(b"axpy_load") }.map_err(failed)?;
        let axpy = *unsafe { library.get::<Axpy>(b"axpy") }.map_err(failed)?;
        let (kernel, stream) = (unsafe { load(PTX.as_ptr()) }, at.stream().raw_pointer());
        let n = at.number("n")? as u32;
        Ok(RowLaunches::new(move || match unsafe { axpy(kernel, stream, A, x, y, out, n) } {
            0 => Ok(()),
            error => Err(format!("axpy: CUDA error {error}")),
        }))
    });
    Harness::new("c_library", [suite]).main()
}
