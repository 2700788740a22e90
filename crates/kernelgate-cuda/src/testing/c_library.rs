//! A test library in C that launches a kernel by the CUDA driver API on streams of its own, as
//! foreign code called by a workload may do.

use std::ffi::{CStr, c_char, c_int};
use std::process::Command;

use crate::{BackendError, Device};

const C_LIBRARY_SOURCE: &str = include_str!("c_library.c");
const TRIPLING_KERNEL_PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("triple.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("PTX is text"),
    };

/// The test library, compiled and loaded; it owns a stream and a CUDA kernel that triples f32
/// elements.
pub struct LaunchingCLibrary {
    library: libloading::Library,
}

impl LaunchingCLibrary {
    /// Compiles the test library with the C compiler (`CC`, else `cc`), loads it, and loads its
    /// kernel into the device's context. With `own_stream` the C library launches on a non-blocking
    /// stream that it creates, otherwise on the default stream.
    ///
    /// # Errors
    /// Fails if there is no C compiler, or the library or its kernel does not load.
    pub fn compile_and_open_c_library(
        device: &Device,
        own_stream: bool,
    ) -> Result<LaunchingCLibrary, BackendError> {
        let failed = |what: &str, why: String| {
            BackendError::ComputationFailed(format!("failed to {what}: {why}"))
        };
        let folder = tempfile::tempdir()
            .map_err(|error| failed("make a folder for a C library", error.to_string()))?;
        let (source, file) = (folder.path().join("library.c"), folder.path().join("library.so"));
        std::fs::write(&source, C_LIBRARY_SOURCE)
            .map_err(|error| failed("write a C library", error.to_string()))?;
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(&compiler);
        command.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&file).arg(&source).arg("-ldl");
        match command.status() {
            Ok(status) if status.success() => {}
            other => return Err(failed("compile a C library", format!("{compiler}: {other:?}"))),
        }
        // SAFETY: the C source of the library has no initialisers.
        let library = unsafe { libloading::Library::new(&file) }
            .map_err(|error| failed("load a C library", error.to_string()))?;
        type OpenTestLibraryFunction = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        device
            .context()
            .bind_to_thread()
            .map_err(|error| failed("make the context current", error.to_string()))?;
        // SAFETY: the C function has this type; the PTX text ends with a null byte.
        let status = unsafe {
            let open = library.get::<OpenTestLibraryFunction>(b"kernelgate_test_open\0");
            open.map(|open| open(TRIPLING_KERNEL_PTX.as_ptr(), own_stream.into()))
        };
        match status {
            Ok(0) => Ok(Self { library }),
            other => Err(failed("open a C library", format!("{other:?}"))),
        }
    }

    /// Makes the C library enqueue a kernel that computes y = 3 x for `n` f32 elements at these
    /// device addresses.
    pub fn enqueue_tripling_kernel(&self, x: u64, y: u64, n: i64) -> Result<(), BackendError> {
        type LaunchTriplingFunction = unsafe extern "C" fn(u64, u64, i64) -> c_int;
        // SAFETY: the C function has this type; its kernel accesses device memory only.
        let status = unsafe {
            let triple = self.library.get::<LaunchTriplingFunction>(b"kernelgate_test_triple\0");
            triple.map(|triple| triple(x, y, n))
        };
        match status {
            Ok(0) => Ok(()),
            other => {
                Err(BackendError::ComputationFailed(format!("the C library fails: {other:?}")))
            }
        }
    }
}
