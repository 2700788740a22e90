//! A bench for a user's CUDA kernel: it launches `saxpy.cu` of this folder, and has an fp64
//! reference, declared work and a tolerance. `cargo run --release --example saxpy_cuda -- --bench`
//! verifies and times this example on a GPU. In a user's package this file is `benches/saxpy.rs`,
//! with `[[bench]] name = "saxpy"`, `harness = false` in Cargo.toml.

use std::process::ExitCode;

use kernelgate::prelude::*;

const FACTOR_OF_X: f32 = 2.5;

/// The computation `out = a x + y` as kernelgate's problem type, independent of any device.
struct Saxpy {
    n: usize,
}

impl Problem for Saxpy {
    fn inputs(&self, seed: u64) -> Tensors {
        let normal = |name| random::normal_values(seed, name, self.n);
        Tensors::new().with_tensor("x", [self.n], normal("x")).with_tensor(
            "y",
            [self.n],
            normal("y"),
        )
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let pairs = inputs.f32_elements("x").iter().zip(inputs.f32_elements("y"));
        let out = pairs.map(|(&x, &y)| f64::from(FACTOR_OF_X) * f64::from(x) + f64::from(y));
        vec![Expected::all("out", [self.n], out.collect::<Vec<f64>>())]
    }

    fn work(&self) -> Work {
        let n = self.n as u64;
        Work::bytes(8 * n, 4 * n).with_flops(FlopUnit::VectorArithmetic, Dtype::F32, 2 * n)
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 1e-6, relative_l2: 1e-6 }
    }
}

const SAXPY: Workload<Saxpy> = Workload {
    name: "example/saxpy_cuda",
    about: "y = a x + y",
    revision: 1,
    axes: &[Axis::number("n", "elements")],
    default_selection_lines: &["n=1048576,67108864"],
    accelerator_selection_lines: &[],
    thorough_selection_lines: &["n=1000,65536,16777216"],
    bind: |point| Ok(Saxpy { n: point.number("n")? }),
};

/// The kernel for kernelgate: its source file, symbol name, threads per block, and number of
/// blocks.
const SOURCE: cuda::Source = cuda::Source::new("saxpy", include_str!("saxpy.cu"));
const THREADS: usize = 256;
const KERNEL: cuda::KernelSpec<Saxpy> =
    cuda::KernelSpec::new(SOURCE, "saxpy", THREADS, |saxpy| [saxpy.n.div_ceil(THREADS), 1, 1]);

/// The implementations of the workload; each becomes one row of the result table.
const IMPLEMENTATIONS: &[Implementation<Saxpy>] = &[Implementation {
    implementation_name: "cuda/thread_per_element",
    description: "a thread an element",
    supports: |_| Ok(()),
    prepare: PrepareFunction::Cuda(|problem, inputs, device| {
        let kernel = KERNEL.compile_and_load(device, problem)?;
        let upload = |name| device.upload(inputs.tensor(name).as_bytes());
        let (x, y, n) = (upload("x")?, upload("y")?, problem.n as i64);
        let out = cuda::DeviceOutput::new(device, "out", [problem.n], Dtype::F32)?;
        let inputs = cuda::named_inputs([("x", &x), ("y", &y)]);
        Ok(cuda::CudaTask::new(device, inputs, vec![out], move |outputs| {
            let out = outputs[0].argument();
            kernel.launch_with(&[FACTOR_OF_X.into(), (&x).into(), (&y).into(), out, n.into()])
        }))
    }),
}];

fn main() -> ExitCode {
    Harness::new("saxpy_cuda", vec![join_workload_with_implementations(&SAXPY, IMPLEMENTATIONS)])
        .main()
}
