//! Rows: one way to compute a problem on one backend.

use std::sync::Arc;

use kernelgate_cuda::{BackendError, Device};

use super::target::BackendKind;
use super::{cpu, cuda};
use crate::workload::Tensors;

/// One way to compute a problem on one backend.
pub struct Implementation<P> {
    /// `cpu`, or `<backend>/<technique>`: part of the case id.
    pub name: &'static str,
    /// One line for `kernelgate list`.
    pub about: &'static str,
    /// Whether it computes this problem; otherwise the reason, a fragment such as "computes f32
    /// only".
    pub supports: fn(&P) -> Result<(), String>,
    /// Makes it ready to launch.
    pub prepare: Prepare<P>,
}

/// Places inputs, allocates outputs and scratch, and returns what launches the computation.
pub enum Prepare<P> {
    /// On the host.
    Cpu(fn(&P, Arc<Tensors>) -> cpu::CpuTask),
    /// On an NVIDIA GPU.
    Cuda(CudaPrepare<P>),
    /// On an NVIDIA GPU, its memory declared: a case that is too large is skipped before anything
    /// is allocated.
    CudaWithin {
        /// Device memory of inputs, outputs and scratch, bytes.
        device_bytes: fn(&P) -> u64,
        /// Makes it ready.
        prepare: CudaPrepare<P>,
    },
}

/// Makes a problem ready on an NVIDIA GPU.
pub type CudaPrepare<P> = fn(&P, &Tensors, &Arc<Device>) -> Result<cuda::CudaTask, BackendError>;

impl<P> Implementation<P> {
    /// The backend it runs on.
    pub fn backend(&self) -> BackendKind {
        match self.prepare {
            Prepare::Cpu(_) => BackendKind::Cpu,
            Prepare::Cuda(_) | Prepare::CudaWithin { .. } => BackendKind::Cuda,
        }
    }
}
