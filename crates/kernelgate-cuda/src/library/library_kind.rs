//! NVIDIA's libraries that this crate opens: their names and the features that need them.

use std::ffi::CStr;

/// A library that parts of kernelgate need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredLibrary {
    /// `libcuda`: the driver. The library comes with the driver only.
    Driver,
    /// `libnvrtc`, which compiles kernels and does not need a GPU.
    Nvrtc,
    /// `libcublasLt`: GEMMs.
    CublasLt,
    /// The library `libcupti`, which records kernels as the hardware ran them.
    Cupti,
    /// `libnvidia-ml`, which reports clocks, power, temperature and other processes. The driver
    /// package alone installs this library.
    Nvml,
    /// `libcudnn`: operation graphs.
    Cudnn,
    /// `libnccl`, which provides collectives over several GPUs.
    Nccl,
}

impl RequiredLibrary {
    /// Every library that this crate opens.
    pub const ALL_LIBRARIES: [Self; 7] = [
        Self::Driver,
        Self::Nvrtc,
        Self::CublasLt,
        Self::Cupti,
        Self::Nvml,
        Self::Cudnn,
        Self::Nccl,
    ];

    /// Name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Driver => "NVIDIA driver (libcuda)",
            Self::Nvrtc => "NVRTC (libnvrtc)",
            Self::CublasLt => "cuBLASLt (libcublasLt)",
            Self::Cupti => "CUPTI (libcupti)",
            Self::Nvml => "NVML (libnvidia-ml)",
            Self::Cudnn => "cuDNN (libcudnn)",
            Self::Nccl => "NCCL (libnccl)",
        }
    }

    /// Returns the name of the library in run records: "nvrtc".
    pub const fn record_name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Nvrtc => "nvrtc",
            Self::CublasLt => "cublaslt",
            Self::Cupti => "cupti",
            Self::Nvml => "nvml",
            Self::Cudnn => "cudnn",
            Self::Nccl => "nccl",
        }
    }

    /// File names to try for a CUDA of that major version, best first.
    pub(super) fn file_names(self, major: u32) -> Vec<String> {
        match self {
            Self::Driver => vec!["libcuda.so.1".to_owned(), "libcuda.so".to_owned()],
            Self::Nvrtc => vec![format!("libnvrtc.so.{major}")],
            Self::CublasLt => vec![format!("libcublasLt.so.{major}")],
            Self::Cupti => vec![format!("libcupti.so.{major}")],
            Self::Nvml => vec!["libnvidia-ml.so.1".to_owned()],
            // The file name of cuDNN does not contain the CUDA version.
            Self::Cudnn => vec!["libcudnn.so.9".to_owned()],
            Self::Nccl => vec!["libnccl.so.2".to_owned()],
        }
    }

    /// Name of a function that every version of the library has.
    pub(super) const fn function_in_every_version(self) -> &'static CStr {
        match self {
            Self::Driver => c"cuDriverGetVersion",
            Self::Nvrtc => c"nvrtcVersion",
            Self::CublasLt => c"cublasLtGetVersion",
            Self::Cupti => c"cuptiGetVersion",
            Self::Nvml => c"nvmlInit_v2",
            Self::Cudnn => c"cudnnGetVersion",
            Self::Nccl => c"ncclGetVersion",
        }
    }

    /// Returns whether the library comes with the driver and must match the kernel module, so that
    /// no Python wheel contains it.
    pub(super) const fn comes_with_driver(self) -> bool {
        matches!(self, Self::Driver | Self::Nvml)
    }

    /// Features that are unavailable without the library.
    pub const fn missing_library_effect(self) -> &'static str {
        match self {
            Self::Driver | Self::Nvrtc => "without it no case runs on a GPU",
            Self::CublasLt => {
                "without it ceilings of GEMMs are not measured, and rows that call it are skipped"
            }
            Self::Cupti => {
                "without it no record of a launch shows work on other streams, `kernelgate profile` \
                 records nothing, and `kernelgate timing` has nothing to compare with"
            }
            Self::Nvml => "without it clocks, power and other processes are not recorded",
            Self::Cudnn | Self::Nccl => "only rows that call it need it",
        }
    }
}
