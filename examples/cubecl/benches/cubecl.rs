//! This bench times a kernel written in CubeCL, which CubeCL compiles to CUDA C++ and kernelgate
//! launches on the timed stream.

use cubecl_row::*;
use kernelgate::attach::*;
use kernelgate::harness::Harness;

fn main() -> std::process::ExitCode {
    let suite = AttachedWorkload::new("attached/axpy", &["n=16777216"], |point| {
        let n = point.number("n")?;
        let [x, y, out] = ["x", "y", "out"].map(|name| TensorSpec::new(name, [n], Dtype::F32));
        let reference = OutputReference::from_function(move |inputs| {
            let pairs = inputs.f32_elements("x").iter().zip(inputs.f32_elements("y"));
            let out = pairs.map(|(&x, &y)| f64::from(A) * f64::from(x) + f64::from(y));
            vec![Expected::all("out", [n], out.collect::<Vec<f64>>())]
        });
        let (work, tolerance) = (Work::bytes(8 * n as u64, 4 * n as u64), Tolerances::by_dtype());
        Ok(ProblemDefinition { inputs: vec![x, y], outputs: vec![out], reference, work, tolerance })
    });
    let suite = suite.add_stream_row("cuda/cubecl", ["x", "y", "out"], |at, [x, y, out]| {
        let n = at.axis_number("n")? as u32;
        let (name, text) = kernel_name_and_cuda_source(n);
        let source = Source::new("axpy", text.leak()).with_headers(EMPTY_HEADERS_FOR_NVRTC);
        let kernel = at.device().load_kernel(&source.with_macros(&[]), &name)?;
        let parameters = KernelArgumentList::new().with_address(x).with_address(y);
        let parameters = parameters.with_address(out).with_value(NO_LENGTHS_AND_SCALARS);
        let dims = Launch::new([n.div_ceil(THREADS_PER_BLOCK), 1, 1], [THREADS_PER_BLOCK, 1, 1]);
        let launch = PreparedLaunch::check_and_prepare(at.device(), kernel, dims, parameters)?;
        Ok(RowLaunchClosures::new(move || launch.enqueue()))
    });
    Harness::new("cubecl", [suite]).main()
}
