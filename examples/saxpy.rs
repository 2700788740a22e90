//! Your own kernel under kernelgate: `y ← a·x + y` with its reference, its work and one
//! implementation.
//!
//! `cargo run --release --example saxpy -- --bench` verifies, times and records it. In a package of
//! your own this file is `benches/saxpy.rs`, with `[[bench]] name = "saxpy"`, `harness = false` in
//! Cargo.toml, and `cargo bench` runs it.

use std::process::ExitCode;

use kernelgate::prelude::*;
use rayon::prelude::*;

const A: f32 = 2.5;

/// What is computed: the definition, without any device.
struct Saxpy {
    n: usize,
}

impl Problem for Saxpy {
    fn inputs(&self, seed: u64) -> Tensors {
        let normal = |name| random::normal(seed, name, self.n);
        Tensors::new().with("x", [self.n], normal("x")).with("y", [self.n], normal("y"))
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let pairs = inputs.f32("x").iter().zip(inputs.f32("y"));
        let out: Vec<f64> =
            pairs.map(|(&x, &y)| f64::from(A) * f64::from(x) + f64::from(y)).collect();
        vec![Expected::all("out", [self.n], out)]
    }

    fn work(&self) -> Work {
        let n = self.n as u64;
        Work::bytes(8 * n, 4 * n).with_flops(Unit::Vector, Dtype::F32, 2 * n)
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 1e-6, relative_l2: 1e-6 }
    }
}

const SAXPY: Workload<Saxpy> = Workload {
    name: "example/saxpy",
    about: "y = a x + y",
    revision: 1,
    axes: &[Axis::number("n", "elements")],
    default: &["n=1048576,16777216"],
    accelerator: &[],
    thorough: &["n=1024,65536,1048576,16777216,67108864"],
    bind: |point| Ok(Saxpy { n: point.number("n")? }),
};

/// How it is computed: one row an implementation.
const IMPLEMENTATIONS: &[Implementation<Saxpy>] = &[Implementation {
    name: "cpu",
    about: "rayon over chunks",
    supports: |_| Ok(()),
    prepare: Prepare::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
        CpuTask::new(inputs, outputs, |inputs, outputs| {
            let (x, y, out) = (inputs.f32("x"), inputs.f32("y"), outputs.f32_mut("out"));
            out.par_chunks_mut(1 << 14)
                .zip(x.par_chunks(1 << 14))
                .zip(y.par_chunks(1 << 14))
                .for_each(|((out, x), y)| {
                    out.iter_mut().zip(x).zip(y).for_each(|((out, x), y)| *out = A * x + y);
                });
        })
    }),
}];

fn main() -> ExitCode {
    Harness::new("saxpy", vec![suite(&SAXPY, IMPLEMENTATIONS)]).main()
}
