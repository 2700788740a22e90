//! Bench of `out = a x + y`: the definition of the problem, an implementation for the CPU and one
//! for the GPU.
//!
//! The guide docs/guides/first-kernel.md shows this file piece by piece.

use std::process::ExitCode;

use kernelgate::prelude::*;

const FACTOR_OF_X: f32 = 2.5;

/// The computation `out = a x + y` as kernelgate's problem type, independent of any device.
struct Saxpy {
    n: usize,
}

impl Problem for Saxpy {
    /// Draws the inputs from the seed, so that every process times equal numbers.
    fn inputs(&self, seed: u64) -> Tensors {
        let normal = |name| random::normal_values(seed, name, self.n);
        let inputs = Tensors::new().with_tensor("x", [self.n], normal("x"));
        inputs.with_tensor("y", [self.n], normal("y"))
    }

    /// Expected outputs in fp64, with which every row is compared before it is timed.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let pairs = inputs.f32_elements("x").iter().zip(inputs.f32_elements("y"));
        let out: Vec<f64> =
            pairs.map(|(&x, &y)| f64::from(FACTOR_OF_X) * f64::from(x) + f64::from(y)).collect();
        vec![Expected::all("out", [self.n], out)]
    }

    /// Returns the minimum of bytes read and written, and the operations, from which the column "of
    /// limit" is derived.
    fn work(&self) -> Work {
        let n = self.n as u64;
        Work::bytes(8 * n, 4 * n).with_flops(FlopUnit::VectorArithmetic, Dtype::F32, 2 * n)
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 1e-6, relative_l2: 1e-6 }
    }

    /// Host memory for inputs, fp64 reference and outputs: a case that does not fit is skipped.
    fn host_memory_bytes(&self) -> u64 {
        self.n as u64 * (8 + 8 + 4)
    }
}

const SAXPY: Workload<Saxpy> = Workload {
    name: "saxpy",
    about: "out = a x + y",
    revision: 1,
    axes: &[Axis::number("n", "elements")],
    default_selection_lines: &["n=1048576"],
    accelerator_selection_lines: &["n=67108864"],
    thorough_selection_lines: &["n=1000,65536,16777216"],
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
        implementation_name: "cpu",
        description: "one thread",
        supports: |_| Ok(()),
        prepare: PrepareFunction::Cpu(|problem, inputs| {
            let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
            CpuTask::new(inputs, outputs, |inputs, outputs| {
                let (x, y, out) =
                    (inputs.f32_elements("x"), inputs.f32_elements("y"), outputs.f32_mut("out"));
                out.iter_mut().zip(x).zip(y).for_each(|((out, x), y)| *out = FACTOR_OF_X * x + y);
            })
        }),
    },
    Implementation {
        implementation_name: "cuda/thread_per_element",
        description: "a thread an element",
        supports: |_| Ok(()),
        prepare: PrepareFunction::Cuda(|problem, inputs, device| {
            let kernel = KERNEL.compile_and_load(device, problem)?;
            let upload = |name| device.upload(inputs.tensor(name).as_bytes());
            let (x, y, n) = (upload("x")?, upload("y")?, problem.n);
            let out = cuda::DeviceOutput::new(device, "out", [n], Dtype::F32)?;
            let inputs = cuda::named_inputs([("x", &x), ("y", &y)]);
            Ok(cuda::CudaTask::new(device, inputs, vec![out], move |outputs| {
                kernel.launch_with(&[
                    FACTOR_OF_X.into(),
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
    Harness::new("saxpy", vec![join_workload_with_implementations(&SAXPY, ROWS)])
        .kernels(kernels)
        .main()
}
