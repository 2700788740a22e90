//! Checks whether a GPU can run kernels, without opening the GPU, and determines the architecture
//! for which kernels are compiled.

use std::ffi::c_void;
use std::path::PathBuf;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{CudaContext, DriverError, result};

use super::driver_error::driver_error_text;
use crate::architecture;
use crate::compiler::nvrtc;
use crate::library::{self, CudaVersion, NvidiaLibrary, OLDEST_SUPPORTED_DRIVER};

/// The reason why a GPU or a set of GPUs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuUnusableError {
    /// A library of NVIDIA that is needed was not found.
    #[error("{} is missing: {}", .0.library_name_in_messages(), .0.advice_to_install_library())]
    LibraryMissing(NvidiaLibrary),
    /// A function of the installed NVIDIA driver returned an error.
    #[error("the NVIDIA driver failed to {failed_action}: {driver_error_text}")]
    DriverCallFailed {
        /// The action that failed, such as "initialise".
        failed_action: &'static str,
        /// Error text of the driver or of the operating system.
        driver_error_text: String,
    },
    /// The driver is older than the oldest supported version.
    #[error(
        "the NVIDIA driver supports CUDA {0}, {OLDEST_SUPPORTED_DRIVER} is needed: update the driver"
    )]
    DriverTooOld(CudaVersion),
    /// The dynamic loader finds a stub library of the CUDA toolkit, which only serves linking,
    /// before the NVIDIA driver.
    #[error(
        "the loader finds the stub {} before the NVIDIA driver {}: leave its folder out of \
         LD_LIBRARY_PATH",
        .stub_library.display(), .driver_library.display()
    )]
    StubLibraryFoundFirst {
        /// Path of the stub library that the loader finds.
        stub_library: PathBuf,
        /// Path of the real driver library.
        driver_library: PathBuf,
    },
    /// The driver is too old to load the code that the found NVRTC generates.
    #[error(
        "the NVIDIA driver supports CUDA {driver_cuda_version} and does not take what NVRTC {nvrtc_version} generates \
         ({}): {}", .nvrtc_library.display(), advice_on_fitting_nvrtc(*.driver_cuda_version)
    )]
    DriverTooOldForNvrtc {
        /// CUDA version of NVRTC.
        nvrtc_version: CudaVersion,
        /// Path of the NVRTC library.
        nvrtc_library: PathBuf,
        /// Latest CUDA version that the driver supports.
        driver_cuda_version: CudaVersion,
    },
    /// Error: NVRTC is too old to compile for the architecture of the GPU.
    #[error(
        "NVRTC {nvrtc_version} does not generate code for {gpu_architecture}: a newer one does, or KERNELGATE_ARCH=sm_80 \
         runs what older cards run"
    )]
    NvrtcTooOldForGpu {
        /// CUDA version of NVRTC.
        nvrtc_version: CudaVersion,
        /// Architecture of the GPU, such as "sm_90a".
        gpu_architecture: String,
    },
    /// The GPU's architecture is older than sm_80 (Ampere).
    #[error("the GPU is {0}, sm_80 (Ampere) or later is needed")]
    GpuTooOld(String),
    /// `KERNELGATE_ARCH` names no architecture, or one whose code this GPU cannot run.
    #[error("KERNELGATE_ARCH: {0}")]
    InvalidArchitectureVariable(String),
    /// The driver finds no GPU.
    #[error("the NVIDIA driver finds no GPU")]
    NoGpuFound,
    /// The machine has no GPU with the requested ordinal.
    #[error(
        "there is no GPU {requested_ordinal}: this machine has {gpu_count}, counted from 0{}",
        cuda_visible_devices.as_ref().map_or_else(String::new, |visible| {
            format!(", as CUDA_VISIBLE_DEVICES={visible} shows and orders them")
        })
    )]
    NoGpuWithOrdinal {
        /// Requested ordinal of the GPU.
        requested_ordinal: usize,
        /// Number of GPUs that the driver reports.
        gpu_count: usize,
        /// Value of the variable `CUDA_VISIBLE_DEVICES`, which hides and reorders GPUs, if it is
        /// set.
        cuda_visible_devices: Option<String>,
    },
    /// The GPUs of a set are of different models.
    #[error(
        "GPU {} is {}, GPU {} is {}: the GPUs of a set are of one model, --devices names them",
        first_gpu.0, first_gpu.1, differing_gpu.0, differing_gpu.1
    )]
    GpuModelsDiffer {
        /// Ordinal and model name of the first GPU of the set.
        first_gpu: (usize, String),
        /// Ordinal and model name of the GPU that differs.
        differing_gpu: (usize, String),
    },
}

/// Returns the number of GPUs that the driver reports.
///
/// # Errors
/// Fails if the driver is missing or too old, or returns an error.
pub fn count_gpus() -> Result<usize, GpuUnusableError> {
    let driver = library::open_library_once(NvidiaLibrary::CudaDriver)
        .ok_or(GpuUnusableError::LibraryMissing(NvidiaLibrary::CudaDriver))?;
    let failed = |action| {
        move |error: DriverError| GpuUnusableError::DriverCallFailed {
            failed_action: action,
            driver_error_text: driver_error_text(&error),
        }
    };
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            return Err(GpuUnusableError::NoGpuFound);
        }
        Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => {
            return Err(GpuUnusableError::StubLibraryFoundFirst {
                stub_library: driver_library_opened_by_cudarc(),
                driver_library: driver.path_or_library_name.clone(),
            });
        }
        other => other.map_err(failed("initialise"))?,
    }
    let mut version = 0;
    // SAFETY: the driver is loaded and initialised, and the pointer is valid.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(failed("query its version"))?;
    let version = CudaVersion::cuda_version_from_driver_number(version);
    if version < OLDEST_SUPPORTED_DRIVER {
        return Err(GpuUnusableError::DriverTooOld(version));
    }
    Ok(CudaContext::device_count().map_err(failed("count GPUs"))?.max(0) as usize)
}

/// Value of the environment variable `CUDA_VISIBLE_DEVICES`, which selects the GPUs that the driver
/// reports.
#[expect(clippy::disallowed_methods, reason = "a variable of the driver")]
fn cuda_visible_devices() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

/// Checks that all GPUs, given by ordinal and model name, are of one model.
///
/// # Errors
/// Fails if a GPU is of another model than the first GPU; the error names both GPUs.
pub(super) fn require_same_gpu_model<'a>(
    gpus: impl IntoIterator<Item = (usize, &'a str)>,
) -> Result<(), GpuUnusableError> {
    let mut gpus = gpus.into_iter().map(|(ordinal, name)| (ordinal, name.to_owned()));
    let Some(first) = gpus.next() else { return Ok(()) };
    match gpus.find(|(_, name)| *name != first.1) {
        Some(other) => {
            Err(GpuUnusableError::GpuModelsDiffer { first_gpu: first, differing_gpu: other })
        }
        None => Ok(()),
    }
}

/// Architecture of a GPU, such as "sm_90a", read without opening the GPU.
pub(super) fn architecture_of_gpu(device: sys::CUdevice) -> Result<String, DriverError> {
    // SAFETY: the device handle came from the driver.
    let capability = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    Ok(architecture_name_of_capability(
        capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// GPUs from Hopper on have architecture-specific instructions, for which the architecture name
/// ends in "a".
fn architecture_name_of_capability(major: i32, minor: i32) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// Size in bytes of a GPU's L2 cache, read without opening the GPU; 0 if it is unknown.
pub fn l2_cache_bytes_of_gpu(ordinal: usize) -> u64 {
    let query = || {
        let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
        // SAFETY: the device handle came from the driver.
        unsafe {
            result::device::get_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        }
        .ok()
    };
    count_gpus().ok().and_then(|_| query()).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Checks, without opening the GPU, that the GPU, its driver and NVRTC can run kernels, for its own
/// or for another named architecture.
///
/// # Errors
/// Fails with the first requirement that this machine does not meet.
pub fn check_gpu_and_compiler(
    ordinal: usize,
    architecture: Option<&str>,
) -> Result<(), GpuUnusableError> {
    let failed = |action| {
        move |error: DriverError| GpuUnusableError::DriverCallFailed {
            failed_action: action,
            driver_error_text: driver_error_text(&error),
        }
    };
    // The architecture that the user named is checked even on a machine without a GPU.
    parse_named_architecture(architecture)?;
    let count = count_gpus()?;
    if count == 0 {
        return Err(GpuUnusableError::NoGpuFound);
    }
    if ordinal >= count {
        return Err(GpuUnusableError::NoGpuWithOrdinal {
            requested_ordinal: ordinal,
            gpu_count: count,
            cuda_visible_devices: cuda_visible_devices(),
        });
    }
    let own = result::device::get(ordinal as i32).and_then(architecture_of_gpu);
    let code = CompilationTarget::for_own_or_named_architecture(
        &own.map_err(failed("query its architecture"))?,
        architecture,
    )?;
    check_nvrtc_supports(&code.compilation_architecture)
}

/// Checks that the found NVRTC supports an architecture and generates code that the driver can
/// load.
fn check_nvrtc_supports(arch: &str) -> Result<(), GpuUnusableError> {
    let missing = GpuUnusableError::LibraryMissing(NvidiaLibrary::Nvrtc);
    let Some(loaded) = library::open_library_once(NvidiaLibrary::Nvrtc) else {
        return Err(missing);
    };
    let (Some(nvrtc), Some(driver)) =
        (library::choose_nvrtc_library(), library::newest_cuda_version_of_driver())
    else {
        return Err(missing);
    };
    if !nvrtc.driver_can_load_generated_code {
        let file = loaded.path_or_library_name.clone();
        return Err(GpuUnusableError::DriverTooOldForNvrtc {
            nvrtc_version: nvrtc.nvrtc_version,
            nvrtc_library: file,
            driver_cuda_version: driver,
        });
    }
    if !nvrtc::nvrtc_supports_architecture(arch).unwrap_or(true) {
        let arch = arch.to_owned();
        return Err(GpuUnusableError::NvrtcTooOldForGpu {
            nvrtc_version: nvrtc.nvrtc_version,
            gpu_architecture: arch,
        });
    }
    Ok(())
}

/// Parses the architecture that the user named, such as "sm_80", into its number; `None` if the
/// user named none.
fn parse_named_architecture(named: Option<&str>) -> Result<Option<u32>, GpuUnusableError> {
    let Some(arch) = named else { return Ok(None) };
    let wrong = |what: String| Err(GpuUnusableError::InvalidArchitectureVariable(what));
    match architecture::compute_capability_number(arch) {
        None => wrong(format!("`{arch}` is no architecture such as sm_80")),
        Some(wanted) if wanted < architecture::MIN_SUPPORTED_ARCHITECTURE => {
            wrong(format!("kernels are compiled for sm_80 or later, not for {arch}"))
        }
        wanted => Ok(wanted),
    }
}

/// Advice on how to install an NVRTC whose code a driver of this CUDA version can load.
pub fn advice_on_fitting_nvrtc(driver: CudaVersion) -> String {
    let CudaVersion { major, minor } = driver;
    let package = if major < 13 {
        format!("nvidia-cuda-nvrtc-cu{major}")
    } else {
        "nvidia-cuda-nvrtc".to_owned()
    };
    let version = if architecture::architecture_from_environment().is_some() {
        format!("{major}.{minor}")
    } else {
        major.to_string()
    };
    format!("pip install '{package}=={version}.*', or name its folder in KERNELGATE_CUDA_LIBS")
}

/// Path of the driver library that the crate cudarc opened, which may differ from the one that
/// kernelgate found, because cudarc searches by its own file names.
fn driver_library_opened_by_cudarc() -> PathBuf {
    // SAFETY: the driver library is loaded, so the symbol can be found; only its address is read.
    let address = unsafe {
        sys::culib().get::<*const c_void>(b"cuDriverGetVersion\0").map(|symbol| *symbol).ok()
    };
    address
        .and_then(library::library_file_mapped_at_address)
        .unwrap_or_else(|| PathBuf::from("libcuda.so"))
}

/// The architecture and the NVRTC target for which kernels are compiled on a GPU.
pub(super) struct CompilationTarget {
    /// The architecture: "sm_80".
    pub compilation_architecture: String,
    /// Compilation target of NVRTC: a real architecture such as "sm_90a", or a virtual one such as
    /// "compute_80" (PTX).
    pub nvrtc_target: String,
    /// Whether the user named the architecture in `KERNELGATE_ARCH`.
    pub named_by_user: bool,
}

impl CompilationTarget {
    /// The compilation target of a device that only runs kernels compiled elsewhere: the GPU's own
    /// architecture.
    pub fn for_precompiled_code(own: String) -> Self {
        Self { nvrtc_target: own.clone(), compilation_architecture: own, named_by_user: false }
    }

    /// Chooses the compilation target: the GPU's own architecture, or the architecture that the
    /// user named, if this GPU can run its code.
    pub fn for_own_or_named_architecture(
        own: &str,
        named: Option<&str>,
    ) -> Result<CompilationTarget, GpuUnusableError> {
        let number = architecture::compute_capability_number;
        if number(own).is_none_or(|own| own < architecture::MIN_SUPPORTED_ARCHITECTURE) {
            return Err(GpuUnusableError::GpuTooOld(own.to_owned()));
        }
        let Some(arch) = named else {
            return Ok(Self {
                compilation_architecture: own.to_owned(),
                nvrtc_target: own.to_owned(),
                named_by_user: false,
            });
        };
        let wrong = |what: String| Err(GpuUnusableError::InvalidArchitectureVariable(what));
        if parse_named_architecture(Some(arch))? > number(own) {
            return wrong(format!("this GPU is {own} and runs no code of {arch}"));
        }
        let specific = !arch.ends_with(|c: char| c.is_ascii_digit());
        if specific && arch != own {
            return wrong(format!(
                "code of {arch} runs on that architecture only, this GPU is {own}"
            ));
        }
        let code = arch.replacen("sm_", "compute_", 1);
        Ok(Self {
            nvrtc_target: code,
            compilation_architecture: arch.to_owned(),
            named_by_user: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invisible_gpu_is_reported_with_the_variable_that_hides_it() {
        let error = |visible: Option<&str>| {
            let visible = visible.map(str::to_owned);
            GpuUnusableError::NoGpuWithOrdinal {
                requested_ordinal: 1,
                gpu_count: 1,
                cuda_visible_devices: visible,
            }
            .to_string()
        };
        let without = "there is no GPU 1: this machine has 1, counted from 0";
        assert_eq!(error(None), without);
        let with = format!("{without}, as CUDA_VISIBLE_DEVICES=3 shows and orders them");
        assert_eq!(error(Some("3")), with);
    }

    #[test]
    fn gpus_of_different_models_are_named_in_the_error() {
        assert_eq!(require_same_gpu_model([(0, "NVIDIA H200"), (2, "NVIDIA H200")]), Ok(()));
        let mixed =
            require_same_gpu_model([(3, "NVIDIA H200"), (0, "NVIDIA H200"), (1, "NVIDIA H100")]);
        let words = "GPU 3 is NVIDIA H200, GPU 1 is NVIDIA H100: the GPUs of a set are of one \
                     model, --devices names them";
        assert_eq!(mixed.unwrap_err().to_string(), words);
    }

    #[test]
    fn a_named_architecture_must_be_one_that_the_gpu_can_run() {
        let target = |own, named: &str| {
            CompilationTarget::for_own_or_named_architecture(own, Some(named))
                .map(|code| (code.compilation_architecture, code.nvrtc_target))
        };
        let accepted = |arch: &str, code: &str| Ok((arch.to_owned(), code.to_owned()));
        assert_eq!(target("sm_90a", "sm_80"), accepted("sm_80", "compute_80"));
        assert_eq!(target("sm_90a", "sm_90a"), accepted("sm_90a", "compute_90a"));
        assert_eq!(target("sm_120a", "sm_89"), accepted("sm_89", "compute_89"));
        for (own, named, problem) in [
            ("sm_90a", "80", "`80` is no architecture such as sm_80"),
            ("sm_90a", "compute_80", "`compute_80` is no architecture such as sm_80"),
            ("sm_90a", "sm_75", "kernels are compiled for sm_80 or later, not for sm_75"),
            ("sm_86", "sm_89", "this GPU is sm_86 and runs no code of sm_89"),
            ("sm_90a", "sm_100a", "this GPU is sm_90a and runs no code of sm_100a"),
            (
                "sm_100a",
                "sm_90a",
                "code of sm_90a runs on that architecture only, this GPU is sm_100a",
            ),
        ] {
            let error = target(own, named).unwrap_err().to_string();
            assert_eq!(error, format!("KERNELGATE_ARCH: {problem}"));
        }
        let own = CompilationTarget::for_own_or_named_architecture("sm_86", None)
            .map(|code| (code.compilation_architecture, code.nvrtc_target));
        assert_eq!(own, accepted("sm_86", "sm_86"));
        let old = CompilationTarget::for_own_or_named_architecture("sm_75", Some("sm_80"))
            .map(drop)
            .unwrap_err();
        assert_eq!(old.to_string(), "the GPU is sm_75, sm_80 (Ampere) or later is needed");
    }
}
