//! Bench of `out = a x + y`: the definition of the problem, an implementation for the CPU and one
//! for the GPU.
//!
//! The guide docs/guides/first-kernel.md shows this file piece by piece.

use std::process::ExitCode;

use kernelgate::prelude::*;

const A: f32 = 2.5;

/// The computation `out = a x + y` as kernelgate's problem type, independent of any device.
struct Saxpy {
    n: usize,
}

impl Problem for Saxpy {
    /// Draws the inputs from the seed, so that every process times equal numbers.
    fn inputs(&self, seed: u64) -> Tensors {
        let normal = |name| random::normal_values(seed, name, self.n);
        Tensors::new().with("x", [self.n], normal("x")).with("y", [self.n], normal("y"))
    }

    /// Expected outputs in fp64, with which every row is compared before it is timed.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let pairs = inputs.f32("x").iter().zip(inputs.f32("y"));
        let out: Vec<f64> =
            pairs.map(|(&x, &y)| f64::from(A) * f64::from(x) + f64::from(y)).collect();
        vec![Expected::all("out", [self.n], out)]
    }

    /// Bytes read and written at least, and operations: "of limit" is derived from them.
    fn work(&self) -> Work {
        let n = self.n as u64;
        Work::bytes(8 * n, 4 * n).with_flops(FlopUnit::Vector, Dtype::F32, 2 * n)
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 1e-6, relative_l2: 1e-6 }
    }

    /// Host memory for inputs, fp64 reference and outputs: a case that does not fit is skipped.
    fn host_bytes(&self) -> u64 {
        self.n as u64 * (8 + 8 + 4)
    }
}

const SAXPY: Workload<Saxpy> = Workload {
    name: "saxpy",
    about: "out = a x + y",
    revision: 1,
    axes: &[Axis::number("n", "elements")],
    default: &["n=1048576"],
    accelerator: &["n=67108864"],
    thorough: &["n=1000,65536,16777216"],
    bind: |point| Ok(Saxpy { n: point.number("n")? }),
};

const THREADS: usize = 256;
const KERNEL: cuda::KernelSpec<Saxpy> = cuda::KernelSpec {
    // `kernelgate resources` compiles the source once, because the source has no macros that
    // distinguish builds.
    listed_build_parameters: || vec![Saxpy { n: 1 }],
    ..cuda::KernelSpec::new(
        cuda::Source::new("saxpy", include_str!("saxpy.cu")),
        "saxpy",
        THREADS,
        |saxpy| [saxpy.n.div_ceil(THREADS), 1, 1],
    )
};

/// The implementations of the workload; each becomes one row of the result table.
const ROWS: &[Implementation<Saxpy>] = &[
    Implementation {
        name: "cpu",
        about: "one thread",
        supports: |_| Ok(()),
        prepare: Prepare::Cpu(|problem, inputs| {
            let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
            CpuTask::new(inputs, outputs, |inputs, outputs| {
                let (x, y, out) = (inputs.f32("x"), inputs.f32("y"), outputs.f32_mut("out"));
                out.iter_mut().zip(x).zip(y).for_each(|((out, x), y)| *out = A * x + y);
            })
        }),
    },
    Implementation {
        name: "cuda/thread_per_element",
        about: "a thread an element",
        supports: |_| Ok(()),
        prepare: Prepare::Cuda(|problem, inputs, device| {
            let kernel = KERNEL.compile_and_load(device, problem)?;
            let upload = |name| device.upload(inputs.tensor(name).as_bytes());
            let (x, y, n) = (upload("x")?, upload("y")?, problem.n);
            let out = cuda::Output::new(device, "out", [n], Dtype::F32)?;
            let inputs = cuda::named_inputs([("x", &x), ("y", &y)]);
            Ok(cuda::CudaTask::new(device, inputs, vec![out], move |outputs| {
                kernel.launch_with(&[
                    A.into(),
                    (&x).into(),
                    (&y).into(),
                    outputs[0].argument(),
                    (n as i64).into(),
                ])
            }))
        }),
    },
];

fn main() -> ExitCode {
    let kernels = kernelgate_cuda::spec::list_kernel_rows(&[KERNEL]);
    Harness::new("saxpy", vec![join_rows(&SAXPY, ROWS)]).kernels(kernels).main()
}
