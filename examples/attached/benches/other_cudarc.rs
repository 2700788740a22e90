//! This bench loads and launches its kernel through another version of the crate cudarc than
//! kernelgate uses.

use attached::{A, AXPY_PTX, axpy_problem_at_point};
use cudarc::driver::{result, sys};
use kernelgate::attach::*;
use kernelgate::harness::Harness;

fn main() -> std::process::ExitCode {
    let suite = AttachedWorkload::new("attached/axpy", &["n=16777216"], axpy_problem_at_point);
    let suite = suite.add_stream_row("cuda/other_cudarc", ["x", "y", "out"], |at, [x, y, out]| {
        let failed =
            |error: result::DriverError| BackendError::ComputationFailed(error.to_string());
        let module =
            unsafe { result::module::load_data(AXPY_PTX.as_ptr().cast()) }.map_err(failed)?;
        let axpy = unsafe { result::module::get_function(module, c"axpy".into()) };
        let (axpy, stream) = (axpy.map_err(failed)?, at.stream().raw_pointer::<sys::CUstream_st>());
        let (mut a, mut x, mut y, mut out) = (A, x, y, out);
        let mut n = at.axis_number("n")? as u32;
        Ok(RowLaunchClosures::new(move || unsafe {
            let mut all = [
                (&raw mut a).cast(),
                (&raw mut x).cast(),
                (&raw mut y).cast(),
                (&raw mut out).cast(),
                (&raw mut n).cast(),
            ];
            result::launch_kernel(axpy, (n.div_ceil(256), 1, 1), (256, 1, 1), 0, stream, &mut all)
        }))
    });
    Harness::new("other_cudarc", [suite]).main()
}
