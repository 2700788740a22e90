//! The device on which a process runs its cases: the host's CPU or a set of GPUs.

use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::launch::used_kernels::LoadedKernelsRecord;
use kernelgate_cuda::observe::telemetry::CardTelemetryByNvml;

use crate::workload::SizeOfDefaultProblems;

/// Kind of device on which an implementation computes: CPU or CUDA GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendKind {
    /// The host's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl BackendKind {
    /// Name of the backend in case ids and file names; names of implementations begin with it, as
    /// in `cuda/naive`.
    pub const fn backend_name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Default size of the problems for this backend: small for the host, large for a GPU.
    pub const fn default_problem_scale(self) -> SizeOfDefaultProblems {
        match self {
            Self::Cpu => SizeOfDefaultProblems::HostCpuSizes,
            Self::Cuda => SizeOfDefaultProblems::HostAndAcceleratorSizes,
        }
    }
}

/// The device on which a process runs its cases: the CPU, or a set of GPUs.
#[derive(Clone)]
pub enum BenchDevices {
    /// The host's cores.
    Cpu,
    /// The GPUs on which a process runs its cases.
    Cuda(Devices),
}

impl BenchDevices {
    /// Kind of backend to which the device or devices belong.
    pub const fn backend_kind(&self) -> BackendKind {
        match self {
            Self::Cpu => BackendKind::Cpu,
            Self::Cuda(_) => BackendKind::Cuda,
        }
    }

    /// Returns a copy of the target that records the kernels that one row loads, and the record;
    /// the record stays empty on the host.
    pub fn with_record_of_loaded_kernels(&self) -> (Self, LoadedKernelsRecord) {
        match self {
            Self::Cpu => (Self::Cpu, LoadedKernelsRecord::default()),
            Self::Cuda(devices) => {
                let (views, loaded) = devices.views_recording_kernels();
                (Self::Cuda(views), loaded)
            }
        }
    }

    /// Opens NVML readings of the first GPU; `None` on the CPU, or if NVML is missing.
    pub fn open_card_telemetry(&self) -> Option<CardTelemetryByNvml> {
        match self {
            Self::Cpu => None,
            Self::Cuda(devices) => CardTelemetryByNvml::open_card_by_uuid(
                &devices.first_device().gpu_properties().gpu_uuid,
            ),
        }
    }

    /// Ordinals of the GPUs on which other processes compute, each with the number of these
    /// processes, as reported by NVML.
    pub fn gpus_with_other_computing_processes(&self) -> Vec<(usize, u32)> {
        let Self::Cuda(devices) = self else { return Vec::new() };
        let others = |uuid: &str| {
            CardTelemetryByNvml::open_card_by_uuid(uuid)?.other_processes_with_context_count()
        };
        let facts = devices.iter().map(|device| device.gpu_properties());
        let counts = facts.filter_map(|facts| Some((facts.gpu_ordinal, others(&facts.gpu_uuid)?)));
        counts.filter(|(_, others)| *others > 0).collect()
    }
}
