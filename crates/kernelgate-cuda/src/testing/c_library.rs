//! A shared library in C that launches with the driver API on streams of its own, as foreign code
//! in a row may do.

use std::ffi::{CStr, c_char, c_int};
use std::process::Command;

use crate::{BackendError, Device};

const LIBRARY_SOURCE: &str = include_str!("c_library.c");
const TRIPLE_PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("triple.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("PTX is text"),
    };

/// The library, compiled and loaded; it has a kernel `triple` and a stream.
pub struct CLibrary {
    library: libloading::Library,
}

impl CLibrary {
    /// Compiles the library with the C compiler (`CC`, else `cc`), and loads it and its kernel into
    /// the device's context. The library launches on a non-blocking stream that it makes, or on the
    /// default stream.
    ///
    /// # Errors
    /// Fails if there is no C compiler, or the library or its kernel does not load.
    pub fn compile_and_open(device: &Device, own_stream: bool) -> Result<CLibrary, BackendError> {
        let failed =
            |what: &str, why: String| BackendError::Launch(format!("failed to {what}: {why}"));
        let folder = tempfile::tempdir()
            .map_err(|error| failed("make a folder for a C library", error.to_string()))?;
        let (source, file) = (folder.path().join("library.c"), folder.path().join("library.so"));
        std::fs::write(&source, LIBRARY_SOURCE)
            .map_err(|error| failed("write a C library", error.to_string()))?;
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(&compiler);
        command.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&file).arg(&source).arg("-ldl");
        match command.status() {
            Ok(status) if status.success() => {}
            other => return Err(failed("compile a C library", format!("{compiler}: {other:?}"))),
        }
        // SAFETY: the library is the source above, which has no initialisers.
        let library = unsafe { libloading::Library::new(&file) }
            .map_err(|error| failed("load a C library", error.to_string()))?;
        type OpenFunction = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        device
            .context()
            .bind_to_thread()
            .map_err(|error| failed("make the context current", error.to_string()))?;
        // SAFETY: the function has that type; the text ends with a null.
        let status = unsafe {
            let open = library.get::<OpenFunction>(b"kernelgate_test_open\0");
            open.map(|open| open(TRIPLE_PTX.as_ptr(), own_stream.into()))
        };
        match status {
            Ok(0) => Ok(Self { library }),
            other => Err(failed("open a C library", format!("{other:?}"))),
        }
    }

    /// Makes the library launch y = 3 x of `n` f32 elements at these addresses.
    pub fn enqueue_tripling(&self, x: u64, y: u64, n: i64) -> Result<(), BackendError> {
        type TripleFunction = unsafe extern "C" fn(u64, u64, i64) -> c_int;
        // SAFETY: the function has that type; what its kernel writes is on the device.
        let status = unsafe {
            let triple = self.library.get::<TripleFunction>(b"kernelgate_test_triple\0");
            triple.map(|triple| triple(x, y, n))
        };
        match status {
            Ok(0) => Ok(()),
            other => Err(BackendError::Launch(format!("the C library fails: {other:?}"))),
        }
    }
}
