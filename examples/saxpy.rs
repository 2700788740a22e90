//! A bench with an implementation on the host CPU: it computes `out = a x + y`, and has an fp64
//! reference, declared work and a tolerance.
//!
//! `cargo run --release --example saxpy -- --bench` verifies this example, times it and records the
//! run. In a user's package this file is `benches/saxpy.rs`, with `[[bench]] name = "saxpy"`,
//! `harness = false` in Cargo.toml, and `cargo bench` runs it. The example `own_kernel.rs` has an
//! implementation on a GPU.

use std::process::ExitCode;

use kernelgate::attach::*;
use kernelgate::harness::Harness;
use rayon::prelude::*;

const FACTOR_OF_X: f32 = 2.5;

/// Number of elements that one task of a host thread computes.
const ELEMENTS_PER_HOST_TASK: usize = 1 << 14;

fn main() -> ExitCode {
    let saxpy = AttachedWorkload::new("example/saxpy", &["n=1048576,16777216"], |point| {
        let n = point.number("n")?;
        let reference = OutputReference::from_function(move |inputs| {
            let pairs = inputs.f32_elements("x").iter().zip(inputs.f32_elements("y"));
            let out = pairs.map(|(&x, &y)| f64::from(FACTOR_OF_X) * f64::from(x) + f64::from(y));
            vec![Expected::all("out", [n], out.collect::<Vec<f64>>())]
        });
        let [x, y, out] = ["x", "y", "out"].map(|name| TensorSpec::new(name, [n], Dtype::F32));
        let work = Work::bytes(8 * n as u64, 4 * n as u64);
        let tolerance = Tolerances::all(1e-6, 1e-6);
        Ok(ProblemDefinition { inputs: vec![x, y], outputs: vec![out], reference, work, tolerance })
    });
    let saxpy = saxpy.about("y = a x + y").revision(1);
    let saxpy = saxpy.add_host_row("cpu", |inputs, outputs| {
        let (x, y, out) =
            (inputs.f32_elements("x"), inputs.f32_elements("y"), outputs.f32_mut("out"));
        let chunks = out
            .par_chunks_mut(ELEMENTS_PER_HOST_TASK)
            .zip(x.par_chunks(ELEMENTS_PER_HOST_TASK))
            .zip(y.par_chunks(ELEMENTS_PER_HOST_TASK));
        chunks.for_each(|((out, x), y)| {
            out.iter_mut().zip(x).zip(y).for_each(|((out, x), y)| *out = FACTOR_OF_X * x + y);
        });
    });
    Harness::new("saxpy", [saxpy]).main()
}
