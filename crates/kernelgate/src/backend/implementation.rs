//! Rows: one way to compute a problem on one backend.

use std::sync::Arc;

use kernelgate_cuda::driver::memory;
use kernelgate_cuda::{BackendError, Device, Devices};

use super::compute_target::BackendKind;
use super::program::{Capture, Program};
use super::{cpu, cuda};
use crate::workload::Tensors;

/// One way to compute a problem on one backend, with its name and its preparation.
///
/// ```
/// # use kernelgate::prelude::*;
/// # struct Double { n: usize }
/// # impl Problem for Double {
/// #     fn inputs(&self, seed: u64) -> Tensors {
/// #         Tensors::new().with("x", [self.n], random::normal_values(seed, "x", self.n))
/// #     }
/// #     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
/// #         let out: Vec<f64> = inputs.f32("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
/// #         vec![Expected::all("out", [self.n], out)]
/// #     }
/// #     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
/// #     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
/// #     fn host_bytes(&self) -> u64 { 16 * self.n as u64 }
/// # }
/// const ROWS: &[Implementation<Double>] = &[Implementation {
///     name: "cpu",
///     about: "one thread",
///     supports: |_| Ok(()),
///     prepare: Prepare::Cpu(|problem, inputs| {
///         let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
///         CpuTask::new(inputs, outputs, |inputs, outputs| {
///             let pairs = outputs.f32_mut("out").iter_mut().zip(inputs.f32("x"));
///             pairs.for_each(|(out, x)| *out = 2.0 * x);
///         })
///     }),
/// }];
/// assert_eq!(ROWS[0].name, "cpu");
/// ```
pub struct Implementation<P> {
    /// Name of the implementation, `cpu` or `<backend>/<technique>`: part of the case id.
    pub name: &'static str,
    /// Description of the implementation that `kernelgate list` prints in one line.
    pub about: &'static str,
    /// Whether the implementation computes this problem; otherwise the reason, a fragment such as
    /// "computes f32 only".
    pub supports: fn(&P) -> Result<(), String>,
    /// Function that makes the implementation ready to launch.
    pub prepare: Prepare<P>,
}

/// Places inputs, allocates outputs and scratch, and returns the task that launches.
pub enum Prepare<P> {
    /// Prepares a task that runs on the host.
    Cpu(fn(&P, Arc<Tensors>) -> cpu::CpuTask),
    /// A task on the host, by a closure that the problem holds under the row's name.
    CpuByName(fn(&P, &str, Arc<Tensors>) -> cpu::CpuTask),
    /// Prepares a task that runs on one NVIDIA GPU.
    Cuda(PrepareOnCuda<P>),
    /// A task on an NVIDIA GPU that declares its memory: a case that is too large is skipped before
    /// anything is allocated.
    CudaWithin {
        /// Device memory of inputs, outputs and scratch, bytes.
        device_bytes: fn(&P) -> u64,
        /// Makes the implementation ready.
        prepare: PrepareOnCuda<P>,
    },
    /// A task on an NVIDIA GPU, by a closure that the problem holds under the row's name.
    CudaByName {
        /// Device memory of inputs, outputs and scratch, bytes.
        device_bytes: fn(&P) -> u64,
        /// Makes the implementation with the given name ready to launch.
        prepare: fn(&P, &str, &Tensors, &Arc<Device>) -> Result<cuda::CudaTask, BackendError>,
    },
    /// Prepares a task that runs on all GPUs of a set, and declares its memory on each GPU.
    CudaSet {
        /// Device memory of inputs, outputs and scratch on one GPU, bytes.
        device_bytes: fn(&P) -> u64,
        /// Prepares the implementation for a problem and its inputs.
        prepare: fn(&P, &Tensors, &Devices) -> Result<cuda::CudaTask, BackendError>,
    },
    /// A task on an NVIDIA GPU, as a list of launches that the function writes; the list declares
    /// its memory.
    Program(fn(&P) -> Program, Capture),
}

/// Makes a problem ready on an NVIDIA GPU.
pub type PrepareOnCuda<P> = fn(&P, &Tensors, &Arc<Device>) -> Result<cuda::CudaTask, BackendError>;

impl<P> Implementation<P> {
    /// The backend on which the implementation runs.
    pub fn backend(&self) -> BackendKind {
        match self.prepare {
            Prepare::Cpu(_) | Prepare::CpuByName(_) => BackendKind::Cpu,
            _ => BackendKind::Cuda,
        }
    }

    /// Device memory that the implementation declares for a problem, bytes; `None` on the host and
    /// if it declares none.
    pub fn device_bytes(&self, problem: &P) -> Option<u64> {
        match self.prepare {
            Prepare::CudaWithin { device_bytes, .. }
            | Prepare::CudaByName { device_bytes, .. }
            | Prepare::CudaSet { device_bytes, .. } => Some(device_bytes(problem)),
            Prepare::Program(write, _) => Some(write(problem).device_bytes()),
            Prepare::Cpu(_) | Prepare::CpuByName(_) | Prepare::Cuda(_) => None,
        }
    }

    /// Prepares a problem on the GPUs of a set: on all GPUs, or on the first GPU only.
    pub fn prepare_on(
        &self,
        problem: &P,
        inputs: &Tensors,
        devices: &Devices,
    ) -> Result<cuda::CudaTask, BackendError> {
        let Prepare::CudaSet { device_bytes, prepare } = self.prepare else {
            return self.prepare_cuda(problem, inputs, devices.first_device());
        };
        devices.for_each_device(|_, device| {
            memory::require_free_memory(device, device_bytes(problem))
        })?;
        prepare(problem, inputs, devices)
    }

    /// Makes a problem ready on an NVIDIA GPU.
    ///
    /// # Errors
    /// Fails if the device has less memory than it declares, or the device, a library or a kernel
    /// fails, or if it runs on the host.
    pub fn prepare_cuda(
        &self,
        problem: &P,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<cuda::CudaTask, BackendError> {
        match self.prepare {
            Prepare::Cuda(prepare) => prepare(problem, inputs, device),
            Prepare::CudaWithin { device_bytes, prepare } => {
                memory::require_free_memory(device, device_bytes(problem))?;
                prepare(problem, inputs, device)
            }
            Prepare::CudaByName { device_bytes, prepare } => {
                memory::require_free_memory(device, device_bytes(problem))?;
                prepare(problem, self.name, inputs, device)
            }
            Prepare::CudaSet { .. } => self.prepare_on(problem, inputs, &Devices::from(device)),
            Prepare::Program(write, capture) => {
                let program = write(problem);
                memory::require_free_memory(device, program.device_bytes())?;
                program.into_task(device, inputs, capture)
            }
            Prepare::Cpu(_) | Prepare::CpuByName(_) => {
                let message = format!("{} does not run on this backend", self.name);
                Err(BackendError::Launch(message))
            }
        }
    }
}
