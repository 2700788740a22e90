//! Choice of the backend of a process: the GPU if there is one and a row has kernels for it, else
//! the CPU, with the reason.

use crate::backend::{BackendKind, BenchTarget};
use crate::harness::error::HarnessError;
use crate::suite::Suite;
use kernelgate_cuda::driver::device::{self, DeviceError};
use kernelgate_cuda::{DeviceOptions, Devices};

/// Default timeout, which is longer than any sensible launch.
pub const DEFAULT_GPU_TIMEOUT_S: u64 = 60;
/// Timeout of launches on the host, where a launch may use a single core.
pub const DEFAULT_HOST_TIMEOUT_S: u64 = 600;

/// The backend on which a bench process runs, and the reason why the other backend is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchPlace {
    /// The backend.
    pub kind: BackendKind,
    /// Reason why cases of the other backend cannot run, as a fragment for messages.
    pub otherwise: String,
    /// Size of the GPU's L2 cache, bytes; 0 on the CPU.
    pub l2_bytes: u64,
    /// Number of GPUs on which the process runs; 0 on the CPU.
    pub gpus: usize,
}

/// The GPUs that the user requested on the command line.
#[derive(Debug, Clone)]
pub struct DeviceRequest {
    /// The backend that the user chose; `None`: a GPU if the machine has one, else the CPU.
    pub backend: Option<BackendKind>,
    /// The GPUs, counted from 0; `None` if the user named none.
    pub devices: Option<Devices<usize>>,
    /// Options with which the GPUs are opened.
    pub options: DeviceOptions,
}

impl DeviceRequest {
    fn requested_gpus(&self) -> Devices<usize> {
        self.devices.clone().unwrap_or_else(|| Devices::from(0))
    }

    /// Chooses; opens nothing.
    ///
    /// # Errors
    /// Fails if a GPU was asked for and cannot be had.
    pub fn choose_place<'a>(
        &self,
        mut suites: impl Iterator<Item = &'a Suite>,
    ) -> Result<BenchPlace, HarnessError> {
        let (ordinals, architecture) =
            (self.requested_gpus(), self.options.architecture.as_deref());
        let gpu =
            || ordinals.iter().try_for_each(|&ordinal| device::check_gpu(ordinal, architecture));
        let cpu = |otherwise: String| BenchPlace {
            kind: BackendKind::Cpu,
            otherwise,
            l2_bytes: 0,
            gpus: 0,
        };
        let cuda = || BenchPlace {
            kind: BackendKind::Cuda,
            otherwise: "this run is on the GPU: --backend cpu runs them".to_owned(),
            l2_bytes: device::l2_cache_bytes(*ordinals.first_device()),
            gpus: ordinals.device_count(),
        };
        match self.backend {
            Some(BackendKind::Cpu) => Ok(cpu("this run is on the CPU, as asked".to_owned())),
            Some(BackendKind::Cuda) => gpu().map_err(HarnessError::NoGpu).map(|()| cuda()),
            // The user named a GPU, so falling back to the host is not an option.
            None if self.devices.is_some() => gpu().map_err(HarnessError::NoGpu).map(|()| cuda()),
            None => {
                if !suites.any(|suite| {
                    suite.implementations().iter().any(|row| row.backend == BackendKind::Cuda)
                }) {
                    return Ok(cpu(
                        "on the CPU: no workload here has a CUDA implementation".to_owned()
                    ));
                }
                match gpu() {
                    Ok(()) => Ok(cuda()),
                    // The user named an architecture explicitly, so a wrong one is an error.
                    Err(error @ DeviceError::Architecture(_)) => Err(HarnessError::NoGpu(error)),
                    Err(error) => Ok(cpu(format!("no GPU: {error}"))),
                }
            }
        }
    }

    /// Opens the chosen GPUs; the CPU needs no opening.
    ///
    /// # Errors
    /// Fails if the GPU cannot be opened.
    pub fn open(&self, place: &BenchPlace) -> Result<BenchTarget, HarnessError> {
        match place.kind {
            BackendKind::Cpu => Ok(BenchTarget::Cpu),
            BackendKind::Cuda => match self.requested_gpus().open(&self.options) {
                Ok(devices) => Ok(BenchTarget::Cuda(devices)),
                Err(error) => Err(HarnessError::NoGpu(error)),
            },
        }
    }
}
