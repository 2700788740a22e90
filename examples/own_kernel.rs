//! A complete bench of a CUDA kernel: inputs, fp64 reference, work and launch.
use kernelgate::attach::*;
use kernelgate::harness::Harness;

const SAXPY: &str = r#"extern "C" __global__
void saxpy(const float* x, const float* y, float* out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.5f * x[i] + y[i];
}"#;

fn main() -> std::process::ExitCode {
    let saxpy = AttachedWorkload::new("example/own_kernel", &["n=1048576,67108864"], |point| {
        let n = point.number("n")?;
        let reference = OutputReference::from_function(move |inputs| {
            let pairs = inputs.f32_elements("x").iter().zip(inputs.f32_elements("y"));
            let out = pairs.map(|(&x, &y)| 2.5 * f64::from(x) + f64::from(y));
            vec![Expected::all("out", [n], out.collect::<Vec<f64>>())]
        });
        let [x, y, out] = ["x", "y", "out"].map(|name| TensorSpec::new(name, [n], Dtype::F32));
        let (work, tolerance) = (Work::bytes(8 * n as u64, 4 * n as u64), Tolerances::by_dtype());
        Ok(ProblemDefinition { inputs: vec![x, y], outputs: vec![out], reference, work, tolerance })
    });
    let saxpy = saxpy.add_stream_row("cuda/saxpy", ["x", "y", "out"], |at, [x, y, out]| {
        let n = at.axis_number("n")? as u32;
        let dims = Launch::new([n.div_ceil(256), 1, 1], [256, 1, 1]);
        let addresses = KernelArgumentList::new().with_address(x).with_address(y).with_address(out);
        at.compile_launch(SAXPY, "saxpy", dims, addresses.with_value(n))
    });
    Harness::new("own_kernel", [saxpy]).main()
}
