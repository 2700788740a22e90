//! NVIDIA's shared libraries that this crate opens: their file names and the features that need
//! them.

use std::ffi::CStr;

/// An NVIDIA shared library that parts of kernelgate need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvidiaLibrary {
    /// `libcuda`: the driver. Only the driver package installs `libcuda`.
    CudaDriver,
    /// The library NVRTC (`libnvrtc`), which compiles kernels and does not need a GPU.
    Nvrtc,
    /// `libcublasLt`: GEMMs.
    CublasLt,
    /// The library CUPTI (`libcupti`), which records when kernels ran on the GPU.
    Cupti,
    /// The library NVML (`libnvidia-ml`), which reports clocks, power, temperature and other
    /// processes of GPUs. Only the driver package installs `libnvidia-ml`.
    Nvml,
    /// `libcudnn`: operation graphs.
    Cudnn,
    /// The library NCCL (`libnccl`), which provides collectives over several GPUs.
    Nccl,
}

impl NvidiaLibrary {
    /// Every NVIDIA library that this crate opens.
    pub const ALL_NVIDIA_LIBRARIES: [Self; 7] = [
        Self::CudaDriver,
        Self::Nvrtc,
        Self::CublasLt,
        Self::Cupti,
        Self::Nvml,
        Self::Cudnn,
        Self::Nccl,
    ];

    /// Name in messages.
    pub const fn library_name_in_messages(self) -> &'static str {
        match self {
            Self::CudaDriver => "NVIDIA driver (libcuda)",
            Self::Nvrtc => "NVRTC (libnvrtc)",
            Self::CublasLt => "cuBLASLt (libcublasLt)",
            Self::Cupti => "CUPTI (libcupti)",
            Self::Nvml => "NVML (libnvidia-ml)",
            Self::Cudnn => "cuDNN (libcudnn)",
            Self::Nccl => "NCCL (libnccl)",
        }
    }

    /// Returns the name of the library in run records: "nvrtc".
    pub const fn name_in_run_records(self) -> &'static str {
        match self {
            Self::CudaDriver => "driver",
            Self::Nvrtc => "nvrtc",
            Self::CublasLt => "cublaslt",
            Self::Cupti => "cupti",
            Self::Nvml => "nvml",
            Self::Cudnn => "cudnn",
            Self::Nccl => "nccl",
        }
    }

    /// File names to try for the library and this CUDA major version, best first.
    pub(super) fn file_names_for_cuda_major(self, major: u32) -> Vec<String> {
        match self {
            Self::CudaDriver => vec!["libcuda.so.1".to_owned(), "libcuda.so".to_owned()],
            Self::Nvrtc => vec![format!("libnvrtc.so.{major}")],
            Self::CublasLt => vec![format!("libcublasLt.so.{major}")],
            Self::Cupti => vec![format!("libcupti.so.{major}")],
            Self::Nvml => vec!["libnvidia-ml.so.1".to_owned()],
            // The file name of cuDNN does not contain the CUDA version.
            Self::Cudnn => vec!["libcudnn.so.9".to_owned()],
            Self::Nccl => vec!["libnccl.so.2".to_owned()],
        }
    }

    /// Name of a function that every version of the library exports; it serves to recognise the
    /// library.
    pub(super) const fn function_exported_by_every_version(self) -> &'static CStr {
        match self {
            Self::CudaDriver => c"cuDriverGetVersion",
            Self::Nvrtc => c"nvrtcVersion",
            Self::CublasLt => c"cublasLtGetVersion",
            Self::Cupti => c"cuptiGetVersion",
            Self::Nvml => c"nvmlInit_v2",
            Self::Cudnn => c"cudnnGetVersion",
            Self::Nccl => c"ncclGetVersion",
        }
    }

    /// Returns whether the library comes only with the driver, because its version must match the
    /// driver's kernel module.
    pub(super) const fn comes_with_driver_package(self) -> bool {
        matches!(self, Self::CudaDriver | Self::Nvml)
    }

    /// Sentence for messages: the features of kernelgate that are unavailable without the library.
    pub const fn effect_of_missing_library_text(self) -> &'static str {
        match self {
            Self::CudaDriver | Self::Nvrtc => "without it no case runs on a GPU",
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
