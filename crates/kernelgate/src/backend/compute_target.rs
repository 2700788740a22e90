//! Compute target of a process: the host or a set of GPUs.

use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::launch::used_kernels::LoadedKernels;
use kernelgate_cuda::observe::telemetry::CardTelemetry;

use crate::workload::DefaultScale;

/// Kind of device on which an implementation computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendKind {
    /// The host's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl BackendKind {
    /// Name of the backend in case ids and file names; implementation names begin with it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Size of the problems that suit this target.
    pub const fn scale(self) -> DefaultScale {
        match self {
            Self::Cpu => DefaultScale::Host,
            Self::Cuda => DefaultScale::Accelerator,
        }
    }
}

/// The device on which a process runs its cases: the CPU, or a set of GPUs.
#[derive(Clone)]
pub enum BenchTarget {
    /// The host's cores.
    Cpu,
    /// The GPUs on which cases run.
    Cuda(Devices),
}

impl BenchTarget {
    /// Kind of the target.
    pub const fn kind(&self) -> BackendKind {
        match self {
            Self::Cpu => BackendKind::Cpu,
            Self::Cuda(_) => BackendKind::Cuda,
        }
    }

    /// Returns a view of the target that records the kernels which one row loads, and that record;
    /// on the host it stays empty.
    pub fn recording(&self) -> (Self, LoadedKernels) {
        match self {
            Self::Cpu => (Self::Cpu, LoadedKernels::default()),
            Self::Cuda(devices) => {
                let (views, loaded) = devices.recording_views();
                (Self::Cuda(views), loaded)
            }
        }
    }

    /// The readings of the device; `None` on the CPU, or if NVML is missing.
    pub fn telemetry(&self) -> Option<CardTelemetry> {
        match self {
            Self::Cpu => None,
            Self::Cuda(devices) => CardTelemetry::open_card(&devices.first_device().facts().uuid),
        }
    }

    /// Ordinals of GPUs on which other processes compute, with the number of these processes, as
    /// far as NVML reports it.
    pub fn others_computing(&self) -> Vec<(usize, u32)> {
        let Self::Cuda(devices) = self else { return Vec::new() };
        let others = |uuid: &str| CardTelemetry::open_card(uuid)?.other_computing_processes();
        let facts = devices.iter().map(|device| device.facts());
        let counts = facts.filter_map(|facts| Some((facts.ordinal, others(&facts.uuid)?)));
        counts.filter(|(_, others)| *others > 0).collect()
    }
}
