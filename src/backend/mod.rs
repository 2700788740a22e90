//! How problems are computed: one implementation a row, on one backend.
//!
//! Deliberately absent: clocks. A backend launches and synchronises; `measure` times.

pub mod cpu;
pub mod cuda;

use std::sync::Arc;

use crate::workload::{Scale, Tensors};

/// Which kind of device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendKind {
    /// The host's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl BackendKind {
    /// The name used in ids and files; implementation names start with it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// How large the problems are that a person would look at there.
    pub const fn scale(self) -> Scale {
        match self {
            Self::Cpu => Scale::Host,
            Self::Cuda => Scale::Accelerator,
        }
    }
}

/// What a process computes on.
#[derive(Clone)]
pub enum Target {
    /// The host's cores.
    Cpu,
    /// This GPU.
    Cuda(Arc<cuda::device::Device>),
}

impl Target {
    /// Its kind.
    pub const fn kind(&self) -> BackendKind {
        match self {
            Self::Cpu => BackendKind::Cpu,
            Self::Cuda(_) => BackendKind::Cuda,
        }
    }

    /// What asks the device about itself; none on the CPU, or where NVML is missing.
    pub fn telemetry(&self) -> Option<cuda::telemetry::Telemetry> {
        match self {
            Self::Cpu => None,
            Self::Cuda(device) => cuda::telemetry::Telemetry::open(&device.facts().uuid),
        }
    }
}

/// One way to compute a problem on one backend.
pub struct Implementation<P> {
    /// `cpu`, or `<backend>/<technique>`: part of the case id.
    pub name: &'static str,
    /// One line for `kernelgate list`.
    pub about: &'static str,
    /// Whether it computes this problem; otherwise the reason, a fragment such as "computes f32 only".
    pub supports: fn(&P) -> Result<(), String>,
    /// Makes it ready to launch.
    pub prepare: Prepare<P>,
}

/// Places inputs, allocates outputs and scratch, and returns what launches the computation.
pub enum Prepare<P> {
    /// On the host.
    Cpu(fn(&P, Arc<Tensors>) -> cpu::Task),
    /// On an NVIDIA GPU.
    Cuda(CudaPrepare<P>),
    /// On an NVIDIA GPU, its memory declared: a case that is too large is skipped before anything is allocated.
    CudaWithin {
        /// Device memory of inputs, outputs and scratch, bytes.
        device_bytes: fn(&P) -> u64,
        /// Makes it ready.
        prepare: CudaPrepare<P>,
    },
}

/// Makes a problem ready on an NVIDIA GPU.
pub type CudaPrepare<P> = fn(&P, &Tensors, &Arc<cuda::device::Device>) -> Result<cuda::task::Task, BackendError>;

impl<P> Implementation<P> {
    /// The backend it runs on.
    pub fn backend(&self) -> BackendKind {
        match self.prepare {
            Prepare::Cpu(_) => BackendKind::Cpu,
            Prepare::Cuda(_) | Prepare::CudaWithin { .. } => BackendKind::Cuda,
        }
    }
}

/// A problem made ready on a backend: inputs placed, outputs allocated, nothing left to compile or allocate.
pub trait Executable {
    /// Overwrites every output with NaN (0x7f for integers).
    ///
    /// # Errors
    /// When the device fails.
    fn poison_outputs(&mut self) -> Result<(), BackendError>;

    /// Starts the computation once; may return before it has finished.
    ///
    /// # Errors
    /// When the launch fails.
    fn launch(&mut self) -> Result<(), BackendError>;

    /// Waits until every launch has finished.
    ///
    /// # Errors
    /// When a launch failed on the device.
    fn synchronize(&mut self) -> Result<(), BackendError>;

    /// The outputs in host memory, in the workload's own form.
    ///
    /// # Errors
    /// When the device fails.
    fn outputs(&mut self) -> Result<&Tensors, BackendError>;
}

/// Why a backend could not do its part.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The computation itself failed.
    #[error("launch failed: {0}")]
    Launch(String),
    /// A kernel does not compile; the text names it and holds the compiler's log.
    #[error("{0}")]
    Compile(String),
    /// The device no longer answers, or its context is broken: nothing more can run on it in this process.
    #[error("the GPU was lost: {0}")]
    Lost(String),
    /// A library that this implementation stands on is missing or does not compute the problem: a skip, not a fault.
    #[error("{0}")]
    Unsupported(String),
    /// More memory than there is.
    #[error("needs {needed} of memory, {available} are free")]
    OutOfMemory {
        /// What the case needs, with its unit.
        needed: String,
        /// What is there, with its unit.
        available: String,
    },
}
