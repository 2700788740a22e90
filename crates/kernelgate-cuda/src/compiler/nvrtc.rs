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
    #[error("{} is missing: {}", NvidiaLibrary::Nvrtc.name_in_messages(), NvidiaLibrary::Nvrtc.advice_to_install_library())]
    Missing,
    /// The source has errors, or NVRTC does not know the architecture.
    #[error("kernel {kernel} does not compile for {arch}:\n{log}")]
    Source {
        /// Name of the kernel build: file and macros.
        kernel: String,
        /// Architecture for which the kernel was compiled, such as "sm_90a".
        arch: String,
        /// Messages of NVRTC, with source lines.
        log: String,
    },
    /// The executable does not embed the text of the kernel file.
    #[error(
        "the text of kernel {kernel} is not embedded: `{kernel}.cu` is missing in the files of the \
         bench (`Harness::kernel_files`)"
    )]
    NoText {
        /// File, without `.cu`.
        kernel: &'static str,
    },
    /// NVRTC itself failed.
    #[error("NVRTC failed on kernel {kernel}: {code}")]
    Compiler {
        /// Name of the kernel build: file and macros.
        kernel: String,
        /// Name of NVRTC's result code for the failure.
        code: String,
    },
}

/// Machine code of a kernel build that NVRTC compiled, with the log of NVRTC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CubinWithCompilerLog {
    /// The cubin (ELF image) for a real architecture, or PTX with a zero byte at its end for a
    /// virtual architecture.
    pub cubin: Vec<u8>,
    /// Warnings of NVRTC, and the report of the assembler ptxas.
    pub log: String,
}

/// Version of the found NVRTC library as (major, minor).
///
/// # Errors
/// Fails if the NVRTC library is missing.
pub fn found_nvrtc_version() -> Result<(i32, i32), KernelCompileError> {
    let version = library::choose_nvrtc_library().ok_or(KernelCompileError::Missing)?.version;
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
    if unsafe { (api.count_archs)(&raw mut count) } != NVRTC_SUCCESS {
        return Ok(true);
    }
    let mut known = vec![0; count.max(0) as usize];
    // SAFETY: the vector has room for all architectures that NVRTC reports.
    if unsafe { (api.archs)(known.as_mut_ptr()) } != NVRTC_SUCCESS {
        return Ok(true);
    }
    Ok(compute_capability_number(arch).is_none_or(|number| known.contains(&(number as c_int))))
}

/// Identity of the NVRTC library: its version and, if known, size and modification time of its
/// file. Two NVRTC libraries with the same version number may generate different code. The identity
/// is determined once per process.
///
/// # Errors
/// Fails if NVRTC is missing.
pub fn nvrtc_version_and_file() -> Result<&'static str, KernelCompileError> {
    static NVRTC_IDENTITY: OnceLock<String> = OnceLock::new();
    let (major, minor) = found_nvrtc_version()?;
    Ok(NVRTC_IDENTITY.get_or_init(|| {
        let loaded = library::open_library_once(NvidiaLibrary::Nvrtc);
        let file = loaded.and_then(|loaded| std::fs::metadata(&loaded.file).ok());
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
        return Err(KernelCompileError::NoText { kernel: build.source.file });
    }
    compile_source_text_with_nvrtc(
        &build.file_and_macros(),
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
    api.check_status(created, kernel)?;
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
            return Err(KernelCompileError::Source {
                kernel: kernel.to_owned(),
                arch: arch.to_owned(),
                log,
            });
        }
        other => {
            return Err(KernelCompileError::Compiler {
                kernel: kernel.to_owned(),
                code: api.text_of_status(other),
            });
        }
    }
    let (tell_size, get) = if arch.starts_with("compute_") {
        (api.ptx_size, api.ptx)
    } else {
        (api.cubin_size, api.cubin)
    };
    let mut size = 0;
    // SAFETY: the NVRTC program is alive and compiled.
    api.check_status(unsafe { tell_size(program.handle, &raw mut size) }, kernel)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that NVRTC asked for.
    api.check_status(unsafe { get(program.handle, cubin.as_mut_ptr().cast()) }, kernel)?;
    Ok(CubinWithCompilerLog { cubin, log })
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
        if unsafe { (self.api.log_size)(self.handle, &raw mut size) } != NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0u8; size.max(1)];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { (self.api.log)(self.handle, log.as_mut_ptr().cast()) };
        CStr::from_bytes_until_nul(&log)
            .map(|log| log.to_string_lossy().trim().to_owned())
            .unwrap_or_default()
    }
}

impl Drop for OwnedNvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the NVRTC program is alive and not used again.
        unsafe { (self.api.destroy)(&raw mut self.handle) };
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
    destroy: unsafe extern "C" fn(*mut NvrtcProgramHandle) -> NvrtcResultCode,
    cubin_size: NvrtcSizeFunction,
    cubin: NvrtcCopyFunction,
    ptx_size: NvrtcSizeFunction,
    ptx: NvrtcCopyFunction,
    log_size: NvrtcSizeFunction,
    log: NvrtcCopyFunction,
    count_archs: unsafe extern "C" fn(*mut c_int) -> NvrtcResultCode,
    archs: unsafe extern "C" fn(*mut c_int) -> NvrtcResultCode,
    error_string: unsafe extern "C" fn(NvrtcResultCode) -> *const c_char,
}

fn nvrtc_functions() -> Result<&'static NvrtcFunctions, KernelCompileError> {
    static API: OnceLock<Option<NvrtcFunctions>> = OnceLock::new();
    API.get_or_init(load_nvrtc_functions).as_ref().ok_or(KernelCompileError::Missing)
}

fn load_nvrtc_functions() -> Option<NvrtcFunctions> {
    let library = NvidiaLibrary::Nvrtc;
    // SAFETY: the function types are those of `nvrtc.h`, which are the same from CUDA 12 to 13:
    // results are enumerations with the size of an int, and programs are pointers.
    unsafe {
        Some(NvrtcFunctions {
            create: library::typed_library_function(library, c"nvrtcCreateProgram")?,
            compile: library::typed_library_function(library, c"nvrtcCompileProgram")?,
            destroy: library::typed_library_function(library, c"nvrtcDestroyProgram")?,
            cubin_size: library::typed_library_function(library, c"nvrtcGetCUBINSize")?,
            cubin: library::typed_library_function(library, c"nvrtcGetCUBIN")?,
            ptx_size: library::typed_library_function(library, c"nvrtcGetPTXSize")?,
            ptx: library::typed_library_function(library, c"nvrtcGetPTX")?,
            log_size: library::typed_library_function(library, c"nvrtcGetProgramLogSize")?,
            log: library::typed_library_function(library, c"nvrtcGetProgramLog")?,
            count_archs: library::typed_library_function(library, c"nvrtcGetNumSupportedArchs")?,
            archs: library::typed_library_function(library, c"nvrtcGetSupportedArchs")?,
            error_string: library::typed_library_function(library, c"nvrtcGetErrorString")?,
        })
    }
}

impl NvrtcFunctions {
    fn text_of_status(&self, status: NvrtcResultCode) -> String {
        // SAFETY: NVRTC has a static text for every result code, which stays valid while the
        // library is open.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        text.to_string_lossy().into_owned()
    }

    fn check_status(
        &self,
        status: NvrtcResultCode,
        kernel: &str,
    ) -> Result<(), KernelCompileError> {
        if status == NVRTC_SUCCESS {
            return Ok(());
        }
        Err(KernelCompileError::Compiler {
            kernel: kernel.to_owned(),
            code: self.text_of_status(status),
        })
    }
}
