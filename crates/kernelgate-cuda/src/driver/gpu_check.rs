//! Checks, without opening it, whether a GPU can run kernels, and determines the code that it
//! needs.

use std::ffi::c_void;
use std::path::PathBuf;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{CudaContext, DriverError, result};

use super::driver_error::describe;
use crate::architecture;
use crate::compiler::nvrtc;
use crate::library::{self, CudaVersion, OLDEST_SUPPORTED_DRIVER, RequiredLibrary};

/// The reason why no GPU can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A library of NVIDIA was not found.
    #[error("{} is missing: {}", .0.name(), .0.install_advice())]
    Missing(RequiredLibrary),
    /// The driver is installed and returns an error.
    #[error("the NVIDIA driver failed to {action}: {error}")]
    Driver {
        /// Action that failed, such as "initialise".
        action: &'static str,
        /// Text of the driver's or the system's error.
        error: String,
    },
    /// The driver lacks functions that are called.
    #[error(
        "the NVIDIA driver supports CUDA {0}, {OLDEST_SUPPORTED_DRIVER} is needed: update the driver"
    )]
    OldDriver(CudaVersion),
    /// The loader finds a toolkit's stub, which is to link against, under the name that cudarc asks
    /// for.
    #[error(
        "the loader finds the stub {} before the NVIDIA driver {}: leave its folder out of \
         LD_LIBRARY_PATH",
        .found.display(), .driver.display()
    )]
    Stub {
        /// Path of the stub that the loader finds.
        found: PathBuf,
        /// Path of the driver library that should be loaded instead.
        driver: PathBuf,
    },
    /// The driver cannot load the code that NVRTC generates.
    #[error(
        "the NVIDIA driver supports CUDA {driver} and does not take what NVRTC {nvrtc} generates \
         ({}): {}", .file.display(), older_nvrtc_hint(*.driver)
    )]
    NewCompiler {
        /// CUDA version of NVRTC.
        nvrtc: CudaVersion,
        /// Path of the NVRTC library.
        file: PathBuf,
        /// Latest CUDA version that the driver supports.
        driver: CudaVersion,
    },
    /// Error: NVRTC does not know the architecture of the GPU.
    #[error(
        "NVRTC {nvrtc} does not generate code for {arch}: a newer one does, or KERNELGATE_ARCH=sm_80 \
         runs what older cards run"
    )]
    OldCompiler {
        /// CUDA version of NVRTC.
        nvrtc: CudaVersion,
        /// Architecture of the GPU, such as "sm_90a".
        arch: String,
    },
    /// The GPU is older than Ampere.
    #[error("the GPU is {0}, sm_80 (Ampere) or later is needed")]
    OldDevice(String),
    /// `KERNELGATE_ARCH` cannot be followed.
    #[error("KERNELGATE_ARCH: {0}")]
    Architecture(String),
    /// No GPU at all.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    /// The machine has no GPU with this number.
    #[error(
        "there is no GPU {wanted}: this machine has {count}, counted from 0{}",
        visible.as_ref().map_or_else(String::new, |visible| {
            format!(", as CUDA_VISIBLE_DEVICES={visible} shows and orders them")
        })
    )]
    NoSuchDevice {
        /// Requested ordinal of the GPU.
        wanted: usize,
        /// Number of GPUs that the driver finds.
        count: usize,
        /// Value of the environment variable that hides and reorders GPUs, if it is set.
        visible: Option<String>,
    },
    /// Error: a set has GPUs of different models.
    #[error(
        "GPU {} is {}, GPU {} is {}: the GPUs of a set are of one model, --devices names them",
        first.0, first.1, other.0, other.1
    )]
    OtherModel {
        /// Ordinal and model name of the first GPU of the set.
        first: (usize, String),
        /// Ordinal and model name of the GPU that differs.
        other: (usize, String),
    },
}

/// Returns the number of GPUs that the driver finds.
///
/// # Errors
/// Fails if there is no driver, it is too old, or it fails.
pub fn gpu_count() -> Result<usize, DeviceError> {
    let driver = library::load_once(RequiredLibrary::Driver)
        .ok_or(DeviceError::Missing(RequiredLibrary::Driver))?;
    let failed =
        |action| move |error: DriverError| DeviceError::Driver { action, error: describe(&error) };
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(DeviceError::NoDevice),
        Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => {
            return Err(DeviceError::Stub {
                found: driver_file_of_cudarc(),
                driver: driver.file.clone(),
            });
        }
        other => other.map_err(failed("initialise"))?,
    }
    let mut version = 0;
    // SAFETY: the driver is loaded and initialised, and the pointer is valid.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(failed("query its version"))?;
    let version = CudaVersion::from_driver_number(version);
    if version < OLDEST_SUPPORTED_DRIVER {
        return Err(DeviceError::OldDriver(version));
    }
    Ok(CudaContext::device_count().map_err(failed("count GPUs"))?.max(0) as usize)
}

/// Returns the value of the environment variable that selects the GPUs visible to the driver.
#[expect(clippy::disallowed_methods, reason = "a variable of the driver")]
fn visible_gpus() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

/// Checks that GPUs, by ordinal and name, are of one model.
///
/// # Errors
/// Fails with the first GPU that is of another model than the first GPU.
pub(super) fn require_one_gpu_model<'a>(
    gpus: impl IntoIterator<Item = (usize, &'a str)>,
) -> Result<(), DeviceError> {
    let mut gpus = gpus.into_iter().map(|(ordinal, name)| (ordinal, name.to_owned()));
    let Some(first) = gpus.next() else { return Ok(()) };
    match gpus.find(|(_, name)| *name != first.1) {
        Some(other) => Err(DeviceError::OtherModel { first, other }),
        None => Ok(()),
    }
}

/// Architecture of a GPU, read without opening the GPU.
pub(super) fn device_architecture(device: sys::CUdevice) -> Result<String, DriverError> {
    // SAFETY: the device handle came from the driver.
    let capability = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    Ok(architecture_name(
        capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// Architecture-specific instructions exist from Hopper on; their architecture name has a suffix.
fn architecture_name(major: i32, minor: i32) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// Size of a GPU's L2 cache, bytes, without opening the GPU; 0 if the driver does not report it.
pub fn l2_cache_bytes(ordinal: usize) -> u64 {
    let query = || {
        let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
        // SAFETY: the driver gave that device.
        unsafe {
            result::device::get_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        }
        .ok()
    };
    gpu_count().ok().and_then(|_| query()).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Whether the selected GPU and what running on it needs are there, perhaps as another
/// architecture; opens
/// nothing.
///
/// # Errors
/// Fails with the first requirement that this machine does not meet.
pub fn check_gpu(ordinal: usize, architecture: Option<&str>) -> Result<(), DeviceError> {
    let failed =
        |action| move |error: DriverError| DeviceError::Driver { action, error: describe(&error) };
    // The user set the architecture, so it is checked even without a GPU.
    parse_architecture_number(architecture)?;
    let count = gpu_count()?;
    if count == 0 {
        return Err(DeviceError::NoDevice);
    }
    if ordinal >= count {
        return Err(DeviceError::NoSuchDevice { wanted: ordinal, count, visible: visible_gpus() });
    }
    let own = result::device::get(ordinal as i32).and_then(device_architecture);
    let code = CodeTarget::for_architecture(
        &own.map_err(failed("query its architecture"))?,
        architecture,
    )?;
    check_compiler_supports(&code.arch)
}

/// Checks that an installed NVRTC supports an architecture and generates code that the driver can
/// load.
fn check_compiler_supports(arch: &str) -> Result<(), DeviceError> {
    let missing = DeviceError::Missing(RequiredLibrary::Nvrtc);
    let Some(loaded) = library::load_once(RequiredLibrary::Nvrtc) else { return Err(missing) };
    let (Some(nvrtc), Some(driver)) = (library::choose_nvrtc(), library::driver_cuda_version())
    else {
        return Err(missing);
    };
    if !nvrtc.fits {
        let file = loaded.file.clone();
        return Err(DeviceError::NewCompiler { nvrtc: nvrtc.version, file, driver });
    }
    if !nvrtc::nvrtc_supports(arch).unwrap_or(true) {
        let arch = arch.to_owned();
        return Err(DeviceError::OldCompiler { nvrtc: nvrtc.version, arch });
    }
    Ok(())
}

/// Parses the number of the architecture that the user named.
fn parse_architecture_number(named: Option<&str>) -> Result<Option<u32>, DeviceError> {
    let Some(arch) = named else { return Ok(None) };
    let wrong = |what: String| Err(DeviceError::Architecture(what));
    match architecture::capability_number(arch) {
        None => wrong(format!("`{arch}` is no architecture such as sm_80")),
        Some(wanted) if wanted < architecture::MIN_ARCHITECTURE => {
            wrong(format!("kernels are compiled for sm_80 or later, not for {arch}"))
        }
        wanted => Ok(wanted),
    }
}

/// How to get an NVRTC whose code a driver takes.
pub fn older_nvrtc_hint(driver: CudaVersion) -> String {
    let CudaVersion { major, minor } = driver;
    let package = if major < 13 {
        format!("nvidia-cuda-nvrtc-cu{major}")
    } else {
        "nvidia-cuda-nvrtc".to_owned()
    };
    let version = if architecture::requested_architecture().is_some() {
        format!("{major}.{minor}")
    } else {
        major.to_string()
    };
    format!("pip install '{package}=={version}.*', or name its folder in KERNELGATE_CUDA_LIBS")
}

/// The driver file that the cudarc crate opened; cudarc searches by file names of its own, so it
/// may find another file.
fn driver_file_of_cudarc() -> PathBuf {
    // SAFETY: the driver is loaded, so that there is one to be found; only an address is taken.
    let address = unsafe {
        sys::culib().get::<*const c_void>(b"cuDriverGetVersion\0").map(|symbol| *symbol).ok()
    };
    address.and_then(library::mapped_library_file).unwrap_or_else(|| PathBuf::from("libcuda.so"))
}

/// The code for which kernels are compiled on a card.
pub(super) struct CodeTarget {
    /// The architecture: "sm_80".
    pub arch: String,
    /// Compilation target of NVRTC: the GPU's architecture, or "compute_80" (PTX).
    pub code: String,
    /// Whether the user set the architecture by `KERNELGATE_ARCH`.
    pub named: bool,
}

impl CodeTarget {
    /// A target for kernels of other code, which are compiled already.
    pub fn for_compiled_code(own: String) -> Self {
        Self { code: own.clone(), arch: own, named: false }
    }

    /// Returns the compilation target for a GPU's architecture, or for the architecture that the
    /// user set.
    pub fn for_architecture(own: &str, named: Option<&str>) -> Result<CodeTarget, DeviceError> {
        let number = architecture::capability_number;
        if number(own).is_none_or(|own| own < architecture::MIN_ARCHITECTURE) {
            return Err(DeviceError::OldDevice(own.to_owned()));
        }
        let Some(arch) = named else {
            return Ok(Self { arch: own.to_owned(), code: own.to_owned(), named: false });
        };
        let wrong = |what: String| Err(DeviceError::Architecture(what));
        if parse_architecture_number(Some(arch))? > number(own) {
            return wrong(format!("this GPU is {own} and runs no code of {arch}"));
        }
        let specific = !arch.ends_with(|c: char| c.is_ascii_digit());
        if specific && arch != own {
            return wrong(format!(
                "code of {arch} runs on that architecture only, this GPU is {own}"
            ));
        }
        let code = arch.replacen("sm_", "compute_", 1);
        Ok(Self { code, arch: arch.to_owned(), named: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invisible_gpu_is_reported_with_the_variable_that_hides_it() {
        let error = |visible: Option<&str>| {
            let visible = visible.map(str::to_owned);
            DeviceError::NoSuchDevice { wanted: 1, count: 1, visible }.to_string()
        };
        let without = "there is no GPU 1: this machine has 1, counted from 0";
        assert_eq!(error(None), without);
        let with = format!("{without}, as CUDA_VISIBLE_DEVICES=3 shows and orders them");
        assert_eq!(error(Some("3")), with);
    }

    #[test]
    fn gpus_of_different_models_are_named_in_the_error() {
        assert_eq!(require_one_gpu_model([(0, "NVIDIA H200"), (2, "NVIDIA H200")]), Ok(()));
        let mixed =
            require_one_gpu_model([(3, "NVIDIA H200"), (0, "NVIDIA H200"), (1, "NVIDIA H100")]);
        let words = "GPU 3 is NVIDIA H200, GPU 1 is NVIDIA H100: the GPUs of a set are of one \
                     model, --devices names them";
        assert_eq!(mixed.unwrap_err().to_string(), words);
    }

    #[test]
    fn a_named_architecture_must_be_one_that_the_card_can_run() {
        let target = |own, named: &str| {
            CodeTarget::for_architecture(own, Some(named)).map(|code| (code.arch, code.code))
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
        let own = CodeTarget::for_architecture("sm_86", None).map(|code| (code.arch, code.code));
        assert_eq!(own, accepted("sm_86", "sm_86"));
        let old = CodeTarget::for_architecture("sm_75", Some("sm_80")).map(drop).unwrap_err();
        assert_eq!(old.to_string(), "the GPU is sm_75, sm_80 (Ampere) or later is needed");
    }
}
