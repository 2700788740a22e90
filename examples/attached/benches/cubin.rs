//! This bench times a kernel from a cubin that was compiled elsewhere, for sm_90 only; on another
//! GPU the case is skipped.

use attached::{A, axpy_problem_at_point};
use kernelgate::attach::*;
use kernelgate::harness::Harness;

const CUBIN: &[u8] = include_bytes!("../kernels/axpy.sm_90.cubin");

fn main() -> std::process::ExitCode {
    let suite = AttachedWorkload::new("attached/axpy", &["n=16777216"], axpy_problem_at_point);
    let suite = suite.add_stream_row("cuda/cubin", ["x", "y", "out"], |at, [x, y, out]| {
        let kernel =
            at.load_kernel(&KernelImage::from_bytes("axpy.sm_90.cubin", CUBIN)?, "axpy")?;
        let n = at.axis_number("n")? as u32;
        let parameters = KernelArgumentList::new()
            .with_value(A)
            .with_address(x)
            .with_address(y)
            .with_address(out)
            .with_value(n);
        let dims = Launch::new([n.div_ceil(256), 1, 1], [256, 1, 1]);
        let launch = PreparedLaunch::check_and_prepare(at.device(), kernel, dims, parameters)?;
        Ok(RowLaunchClosures::new(move || launch.enqueue()))
    });
    Harness::new("cubin", [suite]).main()
}
