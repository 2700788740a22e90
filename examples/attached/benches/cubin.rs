//! This bench times a kernel from a cubin that was compiled elsewhere, for sm_90 only; on another
//! GPU the case is skipped.

use attached::{A, axpy_problem_at_point};
use kernelgate::attach::*;
use kernelgate::harness::Harness;

const CUBIN: &[u8] = include_bytes!("../kernels/axpy.sm_90.cubin");

fn main() -> std::process::ExitCode {
    let suite = Attached::new("attached/axpy", &["n=16777216"], axpy_problem_at_point);
    let suite = suite.row("cuda/cubin", ["x", "y", "out"], |at, [x, y, out]| {
        let kernel = at.kernel(&KernelImage::from_bytes("axpy.sm_90.cubin", CUBIN)?, "axpy")?;
        let n = at.number("n")? as u32;
        let parameters =
            KernelArgumentList::new().value(A).address(x).address(y).address(out).value(n);
        let dims = Launch::new([n.div_ceil(256), 1, 1], [256, 1, 1]);
        let launch = PreparedLaunch::check_and_prepare(at.device(), kernel, dims, parameters)?;
        Ok(RowLaunches::new(move || launch.enqueue()))
    });
    Harness::new("cubin", [suite]).main()
}
