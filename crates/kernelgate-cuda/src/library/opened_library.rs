//! A shared library that is open in this process.

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};

use super::library_kind::RequiredLibrary;
use super::version::CudaVersion;
use super::{complete_file, search};

/// An open library with the path of its file.
pub struct OpenedLibrary {
    library: libloading::Library,
    file: PathBuf,
}

impl OpenedLibrary {
    /// Opens a file, or a name on the loader's path; `None` if that fails or the file is another
    /// library.
    pub fn open_library(library: RequiredLibrary, file: &Path) -> Option<OpenedLibrary> {
        Self::try_open(library, file).ok()
    }

    /// Opens a file, or a name on the loader's path.
    ///
    /// # Errors
    /// The error is a fragment that states why the library cannot be used.
    pub fn try_open(library: RequiredLibrary, file: &Path) -> Result<OpenedLibrary, String> {
        let handle = open_with_local_symbols(file)?;
        let mut opened = Self { library: handle, file: file.to_owned() };
        let landmark = opened.function_address(library.function_in_every_version());
        let landmark = landmark.ok_or_else(|| {
            format!(
                "it is another library, without {}",
                library.function_in_every_version().to_string_lossy()
            )
        })?;
        if let Some(mapped) = mapped_library_file(landmark) {
            opened.file = mapped;
        }
        Ok(opened)
    }

    /// Path of the library's file, or the name by which it was opened if the system does not report
    /// the path.
    pub fn library_path(&self) -> &Path {
        &self.file
    }

    /// Looks up the address of a function in the library.
    pub fn function_address(&self, name: &CStr) -> Option<*const c_void> {
        // SAFETY: only the address is taken; its type is the caller's business.
        let symbol = unsafe { self.library.get::<*const c_void>(name.to_bytes_with_nul()) };
        symbol.map(|symbol| *symbol).ok()
    }

    pub fn nvrtc_version(&self) -> Option<CudaVersion> {
        let address = self.function_address(c"nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function's type in every version; both pointers are valid.
        let status = unsafe {
            let function: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = cast(address);
            function(&raw mut major, &raw mut minor)
        };
        (status == 0).then_some(CudaVersion { major: major as u32, minor: minor as u32 })
    }
}

/// Converts an address to a function pointer of type `F`.
///
/// # Safety
/// `F` is the type of the function at that address.
pub unsafe fn cast<F: Copy>(address: *const c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>(), "F is a function pointer") };
    // SAFETY: address and function pointer have the same size; the caller promises the type.
    unsafe { std::mem::transmute_copy(&address) }
}

/// Opens a library for the life of the process, if it exists, because another library opens it by
/// name alone.
pub fn keep_open(file: &Path) {
    if file.is_file() {
        std::mem::forget(open_with_local_symbols(file).ok());
    }
}

/// Symbols of the library stay local; otherwise calls of one version could reach another version in
/// the process.
fn open_with_local_symbols(file: &Path) -> Result<libloading::Library, String> {
    // Path at which the loader will find the library, if that can be determined.
    let path =
        if file.is_absolute() { Some(file.to_owned()) } else { search::file_found_by_loader(file) };
    path.map_or(Ok(()), |path| complete_file::check_complete_file(&path))?;
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: loading NVIDIA's own libraries runs their initialisers, which have no
    // precondition.
    let opened = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
    opened.map(libloading::Library::from).map_err(|error| error.to_string())
}

/// Returns the file from which an address of this process was mapped, if the system reports it
/// (Linux).
pub fn mapped_library_file(address: *const c_void) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    mapped_file_at_address(&maps, address as u64)
}

/// The file of the range that holds an address, in the format of `/proc/PID/maps`.
fn mapped_file_at_address(maps: &str, address: u64) -> Option<PathBuf> {
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    maps.lines().find_map(|line| {
        let mut fields = line.splitn(6, ' ');
        let (begin, end) = fields.next()?.split_once('-')?;
        let holds = (number(begin)?..number(end)?).contains(&address);
        let file = fields.nth(4).map(str::trim).filter(|file| file.starts_with('/'))?;
        holds.then(|| PathBuf::from(file))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_address_leads_to_its_library_file() {
        let maps = "7f10-7f20 r--p 00000000 fd:00 12 /lib/a b.so\n7f20-7f30 r-xp 00010000 fd:00 12  \
                    \u{20}             /lib/c.so\n7f30-7f40 rw-p 00000000 00:00 0\n";
        let at =
            |address| mapped_file_at_address(maps, address).map(|file| file.display().to_string());
        assert_eq!(at(0x7f1f).as_deref(), Some("/lib/a b.so"));
        assert_eq!(at(0x7f20).as_deref(), Some("/lib/c.so"));
        assert_eq!((at(0x7f35), at(0x7f0f)), (None, None));
    }
}
