//! Calls NVRTC, NVIDIA's runtime compiler, which compiles kernel source to machine code for one
//! architecture, or to PTX. Needs no GPU.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::source::{KernelBuild, NamedKernelFile};
use crate::architecture::compute_capability_number;
use crate::library::{self, NvidiaLibrary};

/// The reason why a kernel could not be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelCompileError {
    /// NVRTC was not found.
    #[error("{} is missing: {}", NvidiaLibrary::Nvrtc.library_name_in_messages(), NvidiaLibrary::Nvrtc.advice_to_install_library())]
    NvrtcNotFound,
    /// The source has errors, or NVRTC does not know the architecture.
    #[error("kernel {kernel} does not compile for {target_architecture}:\n{nvrtc_log}")]
    InvalidSourceOrArchitecture {
        /// Name of the kernel build: file and macros.
        kernel: String,
        /// Architecture for which the kernel was compiled, such as "sm_90a".
        target_architecture: String,
        /// Messages of NVRTC, with source lines.
        nvrtc_log: String,
    },
    /// The executable does not embed the text of the kernel file.
    #[error(
        "the text of kernel {kernel_file} is not embedded: `{kernel_file}.cu` is missing in the files of the \
         bench (`Harness::kernel_files`)"
    )]
    SourceTextNotEmbedded {
        /// File, without `.cu`.
        kernel_file: &'static str,
    },
    /// NVRTC itself failed.
    #[error("NVRTC failed on kernel {kernel_build_name}: {nvrtc_result_code}")]
    NvrtcFailed {
        /// Name of the kernel build: file and macros.
        kernel_build_name: String,
        /// Name of NVRTC's result code for the failure.
        nvrtc_result_code: String,
    },
}

/// Machine code of a kernel build that NVRTC compiled, with the log of NVRTC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CubinWithCompilerLog {
    /// The cubin (ELF image) for a real architecture, or PTX with a zero byte at its end for a
    /// virtual architecture.
    pub cubin_or_ptx: Vec<u8>,
    /// Warnings of NVRTC, and the report of the assembler ptxas.
    pub compiler_log: String,
}

/// Version of the found NVRTC library as (major, minor).
///
/// # Errors
/// Fails if the NVRTC library is missing.
pub fn found_nvrtc_version() -> Result<(i32, i32), KernelCompileError> {
    let version =
        library::choose_nvrtc_library().ok_or(KernelCompileError::NvrtcNotFound)?.nvrtc_version;
    Ok((version.major as i32, version.minor as i32))
}

/// Whether NVRTC can compile for an architecture such as `sm_90a`; true if NVRTC does not list its
/// architectures.
///
/// # Errors
/// Fails if NVRTC is missing.
pub fn nvrtc_supports_architecture(arch: &str) -> Result<bool, KernelCompileError> {
    let api = nvrtc_functions()?;
    let mut count = 0;
    // SAFETY: NVRTC gets a pointer to a local variable, which is valid during the call.
    if unsafe { (api.get_num_supported_archs)(&raw mut count) } != NVRTC_SUCCESS {
        return Ok(true);
    }
    let mut known = vec![0; count.max(0) as usize];
    // SAFETY: the vector has room for all architectures that NVRTC reports.
    if unsafe { (api.get_supported_archs)(known.as_mut_ptr()) } != NVRTC_SUCCESS {
        return Ok(true);
    }
    Ok(compute_capability_number(arch).is_none_or(|number| known.contains(&(number as c_int))))
}

/// Identity of the NVRTC library: its version and, if known, size and modification time of its
/// file. Two NVRTC libraries with the same version number may generate different code. The identity
/// of the NVRTC library is determined once per process.
///
/// # Errors
/// Fails if NVRTC is missing.
pub fn nvrtc_version_and_file() -> Result<&'static str, KernelCompileError> {
    static NVRTC_VERSION_AND_FILE: OnceLock<String> = OnceLock::new();
    let (major, minor) = found_nvrtc_version()?;
    Ok(NVRTC_VERSION_AND_FILE.get_or_init(|| {
        let loaded = library::open_library_once(NvidiaLibrary::Nvrtc);
        let file = loaded.and_then(|loaded| std::fs::metadata(&loaded.path_or_library_name).ok());
        let modified = |file: &std::fs::Metadata| {
            let since = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
            Some(since.as_secs())
        };
        match file {
            Some(file) => format!("{major}.{minor} {} {:?}", file.len(), modified(&file)),
            None => format!("{major}.{minor}"),
        }
    }))
}

/// Compiles a kernel build to a cubin for a real architecture such as `sm_90a`, or to PTX for a
/// virtual architecture such as `compute_80`.
///
/// # Errors
/// Fails if NVRTC is missing or the source does not compile; the error holds the compiler's log.
pub fn compile_to_cubin_or_ptx(
    build: &KernelBuild,
    arch: &str,
) -> Result<CubinWithCompilerLog, KernelCompileError> {
    if build.source.find_source_text().is_none() {
        return Err(KernelCompileError::SourceTextNotEmbedded {
            kernel_file: build.source.kernel_file_name,
        });
    }
    compile_source_text_with_nvrtc(
        &build.kernel_build_name(),
        &build.source_text_with_padding(),
        &build.included_headers(),
        &build.nvrtc_options(arch),
        arch,
    )
}

/// Compiles a source text with NVRTC; the text can include the given headers and no other files.
pub fn compile_source_text_with_nvrtc(
    kernel: &str,
    source: &str,
    headers: &[NamedKernelFile],
    options: &[String],
    arch: &str,
) -> Result<CubinWithCompilerLog, KernelCompileError> {
    let api = nvrtc_functions()?;
    let text = |text: &str| CString::new(text.replace('\0', " ")).expect("no NUL is left");
    let (source, name) =
        (text(source), text(&format!("{}.cu", kernel.split(' ').next().unwrap_or(kernel))));
    let header_texts: Vec<CString> = headers.iter().map(|(_, source)| text(source)).collect();
    let header_names: Vec<CString> = headers.iter().map(|(name, _)| text(name)).collect();
    let pointers = |strings: &[CString]| {
        strings.iter().map(|string| string.as_ptr()).collect::<Vec<*const c_char>>()
    };
    let (texts, names) = (pointers(&header_texts), pointers(&header_names));
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let option_pointers = pointers(&options);
    let mut handle = ptr::null_mut();
    // SAFETY: every string is NUL-terminated and outlives the NVRTC program; the counts are the
    // lengths of the arrays.
    let created = unsafe {
        (api.create)(
            &raw mut handle,
            source.as_ptr(),
            name.as_ptr(),
            texts.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        )
    };
    api.check_nvrtc_status(created, kernel)?;
    let program = OwnedNvrtcProgram { handle, api };
    // SAFETY: the NVRTC program is alive, and the options are an array of NUL-terminated strings
    // with the passed length.
    let compiled = unsafe {
        (api.compile)(program.handle, option_pointers.len() as i32, option_pointers.as_ptr())
    };
    let log = program.log_of_compilation();
    match compiled {
        NVRTC_SUCCESS => {}
        NVRTC_INVALID_OPTION | NVRTC_COMPILATION_ERROR => {
            return Err(KernelCompileError::InvalidSourceOrArchitecture {
                kernel: kernel.to_owned(),
                target_architecture: arch.to_owned(),
                nvrtc_log: log,
            });
        }
        other => {
            return Err(KernelCompileError::NvrtcFailed {
                kernel_build_name: kernel.to_owned(),
                nvrtc_result_code: api.text_of_status(other),
            });
        }
    }
    let (tell_size, get) = if arch.starts_with("compute_") {
        (api.get_ptx_size, api.get_ptx)
    } else {
        (api.get_cubin_size, api.get_cubin)
    };
    let mut size = 0;
    // SAFETY: the NVRTC program is alive and compiled.
    api.check_nvrtc_status(unsafe { tell_size(program.handle, &raw mut size) }, kernel)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that NVRTC asked for.
    api.check_nvrtc_status(unsafe { get(program.handle, cubin.as_mut_ptr().cast()) }, kernel)?;
    Ok(CubinWithCompilerLog { cubin_or_ptx: cubin, compiler_log: log })
}

/// A program object of NVRTC, which is destroyed when it goes out of scope.
struct OwnedNvrtcProgram {
    handle: NvrtcProgramHandle,
    api: &'static NvrtcFunctions,
}

impl OwnedNvrtcProgram {
    fn log_of_compilation(&self) -> String {
        let mut size = 0;
        // SAFETY: the NVRTC program is alive, and the pointer is valid.
        if unsafe { (self.api.get_program_log_size)(self.handle, &raw mut size) } != NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0u8; size.max(1)];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { (self.api.get_program_log)(self.handle, log.as_mut_ptr().cast()) };
        CStr::from_bytes_until_nul(&log)
            .map(|log| log.to_string_lossy().trim().to_owned())
            .unwrap_or_default()
    }
}

impl Drop for OwnedNvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the NVRTC program is alive and not used again.
        unsafe { (self.api.destroy_program)(&raw mut self.handle) };
    }
}

type NvrtcProgramHandle = *mut c_void;
/// Result code of an NVRTC function; the codes have the same numbers in every NVRTC version.
type NvrtcResultCode = c_int;
const NVRTC_SUCCESS: NvrtcResultCode = 0;
const NVRTC_INVALID_OPTION: NvrtcResultCode = 5;
const NVRTC_COMPILATION_ERROR: NvrtcResultCode = 6;
/// Type of NVRTC functions that return the size in bytes of an output of a program.
type NvrtcSizeFunction = unsafe extern "C" fn(NvrtcProgramHandle, *mut usize) -> NvrtcResultCode;
/// Type of NVRTC functions that copy an output of a program (machine code or log) to the caller's
/// memory.
type NvrtcCopyFunction = unsafe extern "C" fn(NvrtcProgramHandle, *mut c_char) -> NvrtcResultCode;

/// Pointers to the functions of the NVRTC library that this process opened.
struct NvrtcFunctions {
    create: unsafe extern "C" fn(
        *mut NvrtcProgramHandle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> NvrtcResultCode,
    compile:
        unsafe extern "C" fn(NvrtcProgramHandle, c_int, *const *const c_char) -> NvrtcResultCode,
    destroy_program: unsafe extern "C" fn(*mut NvrtcProgramHandle) -> NvrtcResultCode,
    get_cubin_size: NvrtcSizeFunction,
    get_cubin: NvrtcCopyFunction,
    get_ptx_size: NvrtcSizeFunction,
    get_ptx: NvrtcCopyFunction,
    get_program_log_size: NvrtcSizeFunction,
    get_program_log: NvrtcCopyFunction,
    get_num_supported_archs: unsafe extern "C" fn(*mut c_int) -> NvrtcResultCode,
    get_supported_archs: unsafe extern "C" fn(*mut c_int) -> NvrtcResultCode,
    get_error_string: unsafe extern "C" fn(NvrtcResultCode) -> *const c_char,
}

fn nvrtc_functions() -> Result<&'static NvrtcFunctions, KernelCompileError> {
    static NVRTC_FUNCTIONS: OnceLock<Option<NvrtcFunctions>> = OnceLock::new();
    NVRTC_FUNCTIONS
        .get_or_init(load_nvrtc_functions)
        .as_ref()
        .ok_or(KernelCompileError::NvrtcNotFound)
}

fn load_nvrtc_functions() -> Option<NvrtcFunctions> {
    let library = NvidiaLibrary::Nvrtc;
    // SAFETY: the function types are those of `nvrtc.h`, which are the same from CUDA 12 to 13:
    // results are enumerations with the size of an int, and programs are pointers.
    unsafe {
        Some(NvrtcFunctions {
            create: library::typed_library_function(library, c"nvrtcCreateProgram")?,
            compile: library::typed_library_function(library, c"nvrtcCompileProgram")?,
            destroy_program: library::typed_library_function(library, c"nvrtcDestroyProgram")?,
            get_cubin_size: library::typed_library_function(library, c"nvrtcGetCUBINSize")?,
            get_cubin: library::typed_library_function(library, c"nvrtcGetCUBIN")?,
            get_ptx_size: library::typed_library_function(library, c"nvrtcGetPTXSize")?,
            get_ptx: library::typed_library_function(library, c"nvrtcGetPTX")?,
            get_program_log_size: library::typed_library_function(
                library,
                c"nvrtcGetProgramLogSize",
            )?,
            get_program_log: library::typed_library_function(library, c"nvrtcGetProgramLog")?,
            get_num_supported_archs: library::typed_library_function(
                library,
                c"nvrtcGetNumSupportedArchs",
            )?,
            get_supported_archs: library::typed_library_function(
                library,
                c"nvrtcGetSupportedArchs",
            )?,
            get_error_string: library::typed_library_function(library, c"nvrtcGetErrorString")?,
        })
    }
}

impl NvrtcFunctions {
    fn text_of_status(&self, status: NvrtcResultCode) -> String {
        // SAFETY: NVRTC has a static text for every result code, which stays valid while the
        // library is open.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) };
        text.to_string_lossy().into_owned()
    }

    fn check_nvrtc_status(
        &self,
        status: NvrtcResultCode,
        kernel: &str,
    ) -> Result<(), KernelCompileError> {
        if status == NVRTC_SUCCESS {
            return Ok(());
        }
        Err(KernelCompileError::NvrtcFailed {
            kernel_build_name: kernel.to_owned(),
            nvrtc_result_code: self.text_of_status(status),
        })
    }
}
