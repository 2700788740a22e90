//! Implementations: each is one way to compute a problem on one backend.

use std::sync::Arc;

use kernelgate_cuda::driver::memory;
use kernelgate_cuda::{BackendError, Device, Devices};

use super::compute_target::BackendKind;
use super::program::{LaunchProgram, ProgramLaunchMode};
use super::{cpu, cuda};
use crate::workload::Tensors;

/// One way to compute a problem on one backend: its name, a support check and its preparation.
///
/// ```
/// # use kernelgate::prelude::*;
/// # struct Double { n: usize }
/// # impl Problem for Double {
/// #     fn inputs(&self, seed: u64) -> Tensors {
/// #         Tensors::new().with_tensor("x", [self.n], random::normal_values(seed, "x", self.n))
/// #     }
/// #     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
/// #         let out: Vec<f64> = inputs.f32_elements("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
/// #         vec![Expected::all("out", [self.n], out)]
/// #     }
/// #     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
/// #     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
/// #     fn host_memory_bytes(&self) -> u64 { 16 * self.n as u64 }
/// # }
/// const ROWS: &[Implementation<Double>] = &[Implementation {
///     implementation_name: "cpu",
///     description: "one thread",
///     supports: |_| Ok(()),
///     prepare: PrepareFunction::Cpu(|problem, inputs| {
///         let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
///         CpuTask::new(inputs, outputs, |inputs, outputs| {
///             let pairs = outputs.f32_mut("out").iter_mut().zip(inputs.f32_elements("x"));
///             pairs.for_each(|(out, x)| *out = 2.0 * x);
///         })
///     }),
/// }];
/// assert_eq!(ROWS[0].implementation_name, "cpu");
/// ```
pub struct Implementation<P> {
    /// Name of the implementation, `cpu` or `<backend>/<technique>`: part of the case id.
    pub implementation_name: &'static str,
    /// Description in one line, which `kernelgate list` prints.
    pub description: &'static str,
    /// Whether the implementation can compute this problem; otherwise the reason, such as "computes
    /// f32 only".
    pub supports: fn(&P) -> Result<(), String>,
    /// Function that prepares the implementation for launches.
    pub prepare: PrepareFunction<P>,
}

/// Function that copies inputs, allocates outputs and scratch memory, and returns the task that is
/// launched.
pub enum PrepareFunction<P> {
    /// Prepares a task that runs on the host.
    Cpu(fn(&P, Arc<Tensors>) -> cpu::CpuTask),
    /// Prepares a task on the host; the function gets the implementation's name, under which the
    /// problem holds the closure.
    CpuByRowName(fn(&P, &str, Arc<Tensors>) -> cpu::CpuTask),
    /// Prepares a task that runs on one NVIDIA GPU.
    Cuda(PrepareOnOneGpu<P>),
    /// Prepares a task on one GPU that declares its device memory, so that a case that is too large
    /// is skipped before anything is allocated.
    CudaWithDeclaredMemory {
        /// Bytes of device memory for inputs, outputs and scratch.
        device_bytes: fn(&P) -> u64,
        /// Function that prepares the implementation for launches on one GPU.
        prepare: PrepareOnOneGpu<P>,
    },
    /// Prepares a task on one GPU; the function gets the implementation's name, under which the
    /// problem holds the closure.
    CudaByRowName {
        /// Bytes of device memory for inputs, outputs and scratch.
        device_bytes: fn(&P) -> u64,
        /// Function that prepares the implementation with the given name for launches on one GPU.
        prepare: fn(&P, &str, &Tensors, &Arc<Device>) -> Result<cuda::CudaTask, BackendError>,
    },
    /// Prepares a task on all GPUs of a set, which declares its device memory per GPU.
    CudaOnGpuSet {
        /// Bytes of device memory per GPU for inputs, outputs and scratch.
        device_bytes: fn(&P) -> u64,
        /// Prepares the implementation for a problem and its inputs on the GPUs of a set.
        prepare: fn(&P, &Tensors, &Devices) -> Result<cuda::CudaTask, BackendError>,
    },
    /// Prepares a task on one GPU from a list of launches ([`LaunchProgram`]) that the function
    /// writes; the list determines the device memory.
    Program(fn(&P) -> LaunchProgram, ProgramLaunchMode),
}

/// Function that prepares a problem for launches on one NVIDIA GPU.
pub type PrepareOnOneGpu<P> =
    fn(&P, &Tensors, &Arc<Device>) -> Result<cuda::CudaTask, BackendError>;

impl<P> Implementation<P> {
    /// The backend on which the implementation runs.
    pub fn backend_of_implementation(&self) -> BackendKind {
        match self.prepare {
            PrepareFunction::Cpu(_) | PrepareFunction::CpuByRowName(_) => BackendKind::Cpu,
            _ => BackendKind::Cuda,
        }
    }

    /// Bytes of device memory that the implementation declares for a problem; `None` on the host,
    /// or if it declares none.
    pub fn declared_device_bytes(&self, problem: &P) -> Option<u64> {
        match self.prepare {
            PrepareFunction::CudaWithDeclaredMemory { device_bytes, .. }
            | PrepareFunction::CudaByRowName { device_bytes, .. }
            | PrepareFunction::CudaOnGpuSet { device_bytes, .. } => Some(device_bytes(problem)),
            PrepareFunction::Program(write, _) => Some(write(problem).device_bytes()),
            PrepareFunction::Cpu(_)
            | PrepareFunction::CpuByRowName(_)
            | PrepareFunction::Cuda(_) => None,
        }
    }

    /// Checks the free device memory and prepares a problem on all GPUs of a set, or on the first
    /// GPU if the implementation uses one GPU.
    pub fn prepare_on_gpus(
        &self,
        problem: &P,
        inputs: &Tensors,
        devices: &Devices,
    ) -> Result<cuda::CudaTask, BackendError> {
        let PrepareFunction::CudaOnGpuSet { device_bytes, prepare } = self.prepare else {
            return self.prepare_on_one_gpu(problem, inputs, devices.first_device());
        };
        devices.for_each_with_context_current(|_, device| {
            memory::require_free_device_memory(device, device_bytes(problem))
        })?;
        prepare(problem, inputs, devices)
    }

    /// Checks the free device memory and prepares a problem on one NVIDIA GPU.
    ///
    /// # Errors
    /// Fails if free device memory is insufficient, if the device, a library or a kernel fails, or
    /// if the implementation runs on the host.
    pub fn prepare_on_one_gpu(
        &self,
        problem: &P,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<cuda::CudaTask, BackendError> {
        match self.prepare {
            PrepareFunction::Cuda(prepare) => prepare(problem, inputs, device),
            PrepareFunction::CudaWithDeclaredMemory { device_bytes, prepare } => {
                memory::require_free_device_memory(device, device_bytes(problem))?;
                prepare(problem, inputs, device)
            }
            PrepareFunction::CudaByRowName { device_bytes, prepare } => {
                memory::require_free_device_memory(device, device_bytes(problem))?;
                prepare(problem, self.implementation_name, inputs, device)
            }
            PrepareFunction::CudaOnGpuSet { .. } => {
                self.prepare_on_gpus(problem, inputs, &Devices::from(device))
            }
            PrepareFunction::Program(write, capture) => {
                let program = write(problem);
                memory::require_free_device_memory(device, program.device_bytes())?;
                program.into_task(device, inputs, capture)
            }
            PrepareFunction::Cpu(_) | PrepareFunction::CpuByRowName(_) => {
                let message = format!("{} does not run on this backend", self.implementation_name);
                Err(BackendError::ComputationFailed(message))
            }
        }
    }
}
