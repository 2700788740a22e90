//! Chooses the backend of a bench process: a GPU if the machine has one and an implementation uses
//! it, else the CPU, with the reason.

use crate::backend::{BackendKind, BenchDevices};
use crate::harness::error::HarnessError;
use crate::suite::WorkloadSuite;
use kernelgate_cuda::driver::device::{self, GpuUnusableError};
use kernelgate_cuda::{DeviceOptions, Devices};

/// Default timeout of GPU launches in seconds, longer than any reasonable launch.
pub const DEFAULT_GPU_TIMEOUT_S: u64 = 60;
/// Default timeout of launches on the host in seconds, where a launch may use a single core.
pub const DEFAULT_HOST_TIMEOUT_S: u64 = 600;

/// The backend on which a bench process runs its cases, and why it does not run cases of the other
/// backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenBackend {
    /// The backend.
    pub kind: BackendKind,
    /// Why cases of the other backend do not run, as a fragment of a message.
    pub reason_against_other_backend: String,
    /// Size of the GPU's L2 cache in bytes; 0 on the CPU.
    pub l2_bytes: u64,
    /// Number of GPUs that the process uses; 0 on the CPU.
    pub gpu_count: usize,
}

/// The backend and GPUs that the user requested on the command line.
#[derive(Debug, Clone)]
pub struct RequestedBackendAndGpus {
    /// The requested backend; `None`: a GPU if the machine has one, else the CPU.
    pub backend: Option<BackendKind>,
    /// Ordinals of the requested GPUs, starting at 0; `None` if the user requested none.
    pub gpu_ordinals: Option<Devices<usize>>,
    /// Options with which GPUs are opened.
    pub options: DeviceOptions,
}

impl RequestedBackendAndGpus {
    fn requested_or_first_gpu(&self) -> Devices<usize> {
        self.gpu_ordinals.clone().unwrap_or_else(|| Devices::from(0))
    }

    /// Chooses the backend without opening a device.
    ///
    /// # Errors
    /// Fails if a requested GPU is not available.
    pub fn choose_backend<'a>(
        &self,
        mut suites: impl Iterator<Item = &'a WorkloadSuite>,
    ) -> Result<ChosenBackend, HarnessError> {
        let (ordinals, architecture) =
            (self.requested_or_first_gpu(), self.options.kernel_architecture_override.as_deref());
        let gpu = || {
            ordinals
                .iter()
                .try_for_each(|&ordinal| device::check_gpu_and_compiler(ordinal, architecture))
        };
        let cpu = |otherwise: String| ChosenBackend {
            kind: BackendKind::Cpu,
            reason_against_other_backend: otherwise,
            l2_bytes: 0,
            gpu_count: 0,
        };
        let cuda = || ChosenBackend {
            kind: BackendKind::Cuda,
            reason_against_other_backend: "this run is on the GPU: --backend cpu runs them"
                .to_owned(),
            l2_bytes: device::l2_cache_bytes_of_gpu(*ordinals.first_device()),
            gpu_count: ordinals.device_count(),
        };
        match self.backend {
            Some(BackendKind::Cpu) => Ok(cpu("this run is on the CPU, as asked".to_owned())),
            Some(BackendKind::Cuda) => gpu().map_err(HarnessError::NoGpu).map(|()| cuda()),
            // The user requested a GPU, so the bench must not fall back to the CPU.
            None if self.gpu_ordinals.is_some() => {
                gpu().map_err(HarnessError::NoGpu).map(|()| cuda())
            }
            None => {
                if !suites.any(|suite| {
                    suite
                        .implementations_of_workload()
                        .iter()
                        .any(|row| row.backend == BackendKind::Cuda)
                }) {
                    return Ok(cpu(
                        "on the CPU: no workload here has a CUDA implementation".to_owned()
                    ));
                }
                match gpu() {
                    Ok(()) => Ok(cuda()),
                    // The user requested an architecture, so an unsuitable one is an error.
                    Err(error @ GpuUnusableError::InvalidArchitectureVariable(_)) => {
                        Err(HarnessError::NoGpu(error))
                    }
                    Err(error) => Ok(cpu(format!("no GPU: {error}"))),
                }
            }
        }
    }

    /// Opens the chosen GPUs; the CPU needs no opening.
    ///
    /// # Errors
    /// Fails if a GPU cannot be opened.
    pub fn open_target(&self, place: &ChosenBackend) -> Result<BenchDevices, HarnessError> {
        match place.kind {
            BackendKind::Cpu => Ok(BenchDevices::Cpu),
            BackendKind::Cuda => match self.requested_or_first_gpu().open(&self.options) {
                Ok(devices) => Ok(BenchDevices::Cuda(devices)),
                Err(error) => Err(HarnessError::NoGpu(error)),
            },
        }
    }
}
