//! NVRTC: kernel source to machine code for one architecture, or to PTX. Needs no GPU.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::source::{KernelBuild, KernelFile};
use crate::architecture::capability_number;
use crate::library::{self, RequiredLibrary};

/// The reason why a kernel has no machine code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// NVRTC was not found.
    #[error("{} is missing: {}", RequiredLibrary::Nvrtc.name(), RequiredLibrary::Nvrtc.install_advice())]
    Missing,
    /// The source is wrong, or the architecture is unknown.
    #[error("kernel {kernel} does not compile for {arch}:\n{log}")]
    Source {
        /// File and macros of the kernel build.
        kernel: String,
        /// Architecture for which it was compiled, such as "sm_90a".
        arch: String,
        /// Messages of the compiler, with source lines.
        log: String,
    },
    /// The executable does not embed the kernel file.
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
        /// File and macros of the kernel build.
        kernel: String,
        /// NVRTC's name for its result code.
        code: String,
    },
}

/// Machine code that NVRTC compiled, with the compiler's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompiledCubin {
    /// ELF image for the architecture; for a virtual one PTX, with a zero at its end.
    pub cubin: Vec<u8>,
    /// Warnings of NVRTC and the report of the assembler.
    pub log: String,
}

/// Version of the NVRTC library as (major, minor).
///
/// # Errors
/// Fails if the NVRTC library is missing.
pub fn installed_nvrtc_version() -> Result<(i32, i32), CompileError> {
    let version = library::choose_nvrtc().ok_or(CompileError::Missing)?.version;
    Ok((version.major as i32, version.minor as i32))
}

/// Whether NVRTC generates code for an architecture such as `sm_90a`; true if it does not report
/// its architectures.
///
/// # Errors
/// Fails if NVRTC is missing.
pub fn nvrtc_supports(arch: &str) -> Result<bool, CompileError> {
    let api = nvrtc_api()?;
    let mut count = 0;
    // SAFETY: the call gets pointers to local variables, which are valid during the call.
    if unsafe { (api.count_archs)(&raw mut count) } != NVRTC_SUCCESS {
        return Ok(true);
    }
    let mut known = vec![0; count.max(0) as usize];
    // SAFETY: the vector has room for all architectures that NVRTC reports.
    if unsafe { (api.archs)(known.as_mut_ptr()) } != NVRTC_SUCCESS {
        return Ok(true);
    }
    Ok(capability_number(arch).is_none_or(|number| known.contains(&(number as c_int))))
}

/// Identity of NVRTC: its version and, if the system reports them, size and time of its file. NVRTC
/// builds of one version number may generate different code. Determined once per process.
///
/// # Errors
/// Fails if NVRTC is missing.
pub fn nvrtc_identity() -> Result<&'static str, CompileError> {
    static NVRTC_IDENTITY: OnceLock<String> = OnceLock::new();
    let (major, minor) = installed_nvrtc_version()?;
    Ok(NVRTC_IDENTITY.get_or_init(|| {
        let loaded = library::load_once(RequiredLibrary::Nvrtc);
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

/// Compiles a build for a real architecture such as `sm_90a`, or to PTX for a virtual one such as
/// `compute_80`.
///
/// # Errors
/// Fails if NVRTC is missing or the source does not compile; the error holds the compiler's log.
pub fn compile_to_cubin(build: &KernelBuild, arch: &str) -> Result<CompiledCubin, CompileError> {
    if build.source.find_text().is_none() {
        return Err(CompileError::NoText { kernel: build.source.file });
    }
    compile_source_text(
        &build.name(),
        &build.compiled_text(),
        &build.headers_of_build(),
        &build.compiler_options(arch),
        arch,
    )
}

/// Compiles source text with NVRTC; the text can include the given headers and no other headers.
pub fn compile_source_text(
    kernel: &str,
    source: &str,
    headers: &[KernelFile],
    options: &[String],
    arch: &str,
) -> Result<CompiledCubin, CompileError> {
    let api = nvrtc_api()?;
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
    api.check(created, kernel)?;
    let program = NvrtcProgram { handle, api };
    // SAFETY: the NVRTC program is alive, and the options are an array of NUL-terminated strings
    // with the passed length.
    let compiled = unsafe {
        (api.compile)(program.handle, option_pointers.len() as i32, option_pointers.as_ptr())
    };
    let log = program.compiler_log();
    match compiled {
        NVRTC_SUCCESS => {}
        NVRTC_INVALID_OPTION | NVRTC_COMPILATION_ERROR => {
            return Err(CompileError::Source {
                kernel: kernel.to_owned(),
                arch: arch.to_owned(),
                log,
            });
        }
        other => {
            return Err(CompileError::Compiler {
                kernel: kernel.to_owned(),
                code: api.describe(other),
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
    api.check(unsafe { tell_size(program.handle, &raw mut size) }, kernel)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that NVRTC asked for.
    api.check(unsafe { get(program.handle, cubin.as_mut_ptr().cast()) }, kernel)?;
    Ok(CompiledCubin { cubin, log })
}

/// An NVRTC program, which is destroyed at the end of its scope.
struct NvrtcProgram {
    handle: NvrtcHandle,
    api: &'static NvrtcApi,
}

impl NvrtcProgram {
    fn compiler_log(&self) -> String {
        let mut size = 0;
        // SAFETY: the NVRTC program is alive.
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

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the program is alive and not used again.
        unsafe { (self.api.destroy)(&raw mut self.handle) };
    }
}

type NvrtcHandle = *mut c_void;
/// Result code of an NVRTC function; the codes have the same numbers in every NVRTC version.
type NvrtcStatus = c_int;
const NVRTC_SUCCESS: NvrtcStatus = 0;
const NVRTC_INVALID_OPTION: NvrtcStatus = 5;
const NVRTC_COMPILATION_ERROR: NvrtcStatus = 6;
/// Reads the size of an object of a program, bytes.
type NvrtcSizeFunction = unsafe extern "C" fn(NvrtcHandle, *mut usize) -> NvrtcStatus;
/// NVRTC function that copies an output of a program (machine code, log) to memory.
type Get = unsafe extern "C" fn(NvrtcHandle, *mut c_char) -> NvrtcStatus;

/// Functions of the NVRTC library that was opened.
struct NvrtcApi {
    create: unsafe extern "C" fn(
        *mut NvrtcHandle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> NvrtcStatus,
    compile: unsafe extern "C" fn(NvrtcHandle, c_int, *const *const c_char) -> NvrtcStatus,
    destroy: unsafe extern "C" fn(*mut NvrtcHandle) -> NvrtcStatus,
    cubin_size: NvrtcSizeFunction,
    cubin: Get,
    ptx_size: NvrtcSizeFunction,
    ptx: Get,
    log_size: NvrtcSizeFunction,
    log: Get,
    count_archs: unsafe extern "C" fn(*mut c_int) -> NvrtcStatus,
    archs: unsafe extern "C" fn(*mut c_int) -> NvrtcStatus,
    error_string: unsafe extern "C" fn(NvrtcStatus) -> *const c_char,
}

fn nvrtc_api() -> Result<&'static NvrtcApi, CompileError> {
    static API: OnceLock<Option<NvrtcApi>> = OnceLock::new();
    API.get_or_init(load_nvrtc).as_ref().ok_or(CompileError::Missing)
}

fn load_nvrtc() -> Option<NvrtcApi> {
    let library = RequiredLibrary::Nvrtc;
    // SAFETY: the function types are those of `nvrtc.h`, which are the same from CUDA 12 to 13:
    // results are enumerations with the size of an int, and programs are pointers.
    unsafe {
        Some(NvrtcApi {
            create: library::typed_function(library, c"nvrtcCreateProgram")?,
            compile: library::typed_function(library, c"nvrtcCompileProgram")?,
            destroy: library::typed_function(library, c"nvrtcDestroyProgram")?,
            cubin_size: library::typed_function(library, c"nvrtcGetCUBINSize")?,
            cubin: library::typed_function(library, c"nvrtcGetCUBIN")?,
            ptx_size: library::typed_function(library, c"nvrtcGetPTXSize")?,
            ptx: library::typed_function(library, c"nvrtcGetPTX")?,
            log_size: library::typed_function(library, c"nvrtcGetProgramLogSize")?,
            log: library::typed_function(library, c"nvrtcGetProgramLog")?,
            count_archs: library::typed_function(library, c"nvrtcGetNumSupportedArchs")?,
            archs: library::typed_function(library, c"nvrtcGetSupportedArchs")?,
            error_string: library::typed_function(library, c"nvrtcGetErrorString")?,
        })
    }
}

impl NvrtcApi {
    fn describe(&self, status: NvrtcStatus) -> String {
        // SAFETY: NVRTC has a text for every number, which lives as long as the library.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        text.to_string_lossy().into_owned()
    }

    fn check(&self, status: NvrtcStatus, kernel: &str) -> Result<(), CompileError> {
        if status == NVRTC_SUCCESS {
            return Ok(());
        }
        Err(CompileError::Compiler { kernel: kernel.to_owned(), code: self.describe(status) })
    }
}
