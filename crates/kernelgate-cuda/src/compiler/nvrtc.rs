//! NVRTC: kernel source to machine code for one architecture. Needs no GPU.

use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use super::source::{Build, HEADERS};
use crate::library::{self, Library};

/// Why a kernel has no machine code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// NVRTC was not found.
    #[error("{} is missing: {}", Library::Nvrtc.name(), Library::Nvrtc.advice())]
    Missing,
    /// The source is wrong, or the architecture is unknown.
    #[error("kernel {kernel} does not compile for {arch}:\n{log}")]
    Source {
        /// File and macros.
        kernel: String,
        /// Architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// NVRTC itself failed.
    #[error("NVRTC failed on kernel {kernel}: {code}")]
    Compiler {
        /// File and macros.
        kernel: String,
        /// NVRTC's result.
        code: String,
    },
}

/// Machine code and the compiler's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompiledCubin {
    /// ELF image for the architecture.
    pub cubin: Vec<u8>,
    /// Warnings and the assembler's report.
    pub log: String,
}

/// NVRTC's version as (major, minor).
///
/// # Errors
/// When NVRTC is missing.
pub fn version() -> Result<(i32, i32), CompileError> {
    library::load(Library::Nvrtc).ok_or(CompileError::Missing)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded and both pointers are valid.
    let result = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    check(result, "version")?;
    Ok((major, minor))
}

/// Which NVRTC this is: its version and, where the system tells, size and time of its file. Builds
/// of one version differ in what they generate. Found out once a process.
///
/// # Errors
/// When NVRTC is missing.
pub fn identity() -> Result<&'static str, CompileError> {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    let (major, minor) = version()?;
    Ok(IDENTITY.get_or_init(|| {
        let path = library::loaded_file("libnvrtc.so");
        let file = path.and_then(|path| std::fs::metadata(path).ok());
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

/// Compiles a build for a real architecture such as `sm_90a`.
///
/// # Errors
/// When NVRTC is missing or the source does not compile; the error holds the compiler's log.
pub fn compile(build: &Build, arch: &str) -> Result<CompiledCubin, CompileError> {
    compile_text(&build.name(), build.source.text, build.source.headers, &build.options(arch), arch)
}

/// Compiles source text with the common headers and others, each a name and its text.
///
/// # Errors
/// As [`compile`].
pub fn compile_text(
    kernel: &str,
    source: &str,
    headers: &[(&str, &str)],
    options: &[String],
    arch: &str,
) -> Result<CompiledCubin, CompileError> {
    library::load(Library::Nvrtc).ok_or(CompileError::Missing)?;
    let text = |text: &str| CString::new(text.replace('\0', " ")).expect("no NUL is left");
    let (source, name) =
        (text(source), text(&format!("{}.cu", kernel.split(' ').next().unwrap_or(kernel))));
    let header_texts: Vec<CString> =
        HEADERS.iter().chain(headers).map(|(_, source)| text(source)).collect();
    let header_names: Vec<CString> =
        HEADERS.iter().chain(headers).map(|(name, _)| text(name)).collect();
    let pointers = |strings: &[CString]| {
        strings.iter().map(|string| string.as_ptr()).collect::<Vec<*const c_char>>()
    };
    let (texts, names) = (pointers(&header_texts), pointers(&header_names));
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let option_pointers = pointers(&options);
    let mut handle = ptr::null_mut();
    // SAFETY: every string is NUL-terminated and outlives the program; the counts are those of the
    // arrays.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut handle,
            source.as_ptr(),
            name.as_ptr(),
            texts.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        )
    };
    check(created, kernel)?;
    let program = Program { handle };
    // SAFETY: the program is alive, and the options are an array of that many NUL-terminated
    // strings.
    let compiled = unsafe {
        sys::nvrtcCompileProgram(
            program.handle,
            option_pointers.len() as i32,
            option_pointers.as_ptr(),
        )
    };
    let log = program.log();
    match compiled {
        sys::nvrtcResult::NVRTC_SUCCESS => {}
        sys::nvrtcResult::NVRTC_ERROR_COMPILATION
        | sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION => {
            return Err(CompileError::Source {
                kernel: kernel.to_owned(),
                arch: arch.to_owned(),
                log,
            });
        }
        other => {
            return Err(CompileError::Compiler {
                kernel: kernel.to_owned(),
                code: format!("{other:?}"),
            });
        }
    }
    let mut size = 0;
    // SAFETY: the program is alive and compiled.
    check(unsafe { sys::nvrtcGetCUBINSize(program.handle, &raw mut size) }, kernel)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that NVRTC asked for.
    check(unsafe { sys::nvrtcGetCUBIN(program.handle, cubin.as_mut_ptr().cast()) }, kernel)?;
    Ok(CompiledCubin { cubin, log })
}

/// Destroys the program at the end of its scope.
struct Program {
    handle: sys::nvrtcProgram,
}

impl Program {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive.
        if unsafe { sys::nvrtcGetProgramLogSize(self.handle, &raw mut size) }
            != sys::nvrtcResult::NVRTC_SUCCESS
        {
            return String::new();
        }
        let mut log = vec![0u8; size.max(1)];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetProgramLog(self.handle, log.as_mut_ptr().cast()) };
        CStr::from_bytes_until_nul(&log)
            .map(|log| log.to_string_lossy().trim().to_owned())
            .unwrap_or_default()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive and not used again.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.handle) };
    }
}

fn check(result: sys::nvrtcResult, kernel: &str) -> Result<(), CompileError> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => {
            Err(CompileError::Compiler { kernel: kernel.to_owned(), code: format!("{other:?}") })
        }
    }
}
