//! An NVIDIA shared library that is open in this process.

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};

use super::library_kind::NvidiaLibrary;
use super::version::CudaVersion;
use super::{complete_file, search};

/// An open shared library with the path of its file.
pub struct OpenedLibrary {
    library: libloading::Library,
    path_or_library_name: PathBuf,
}

impl OpenedLibrary {
    /// Opens a library by file, or by a name that the loader looks up; `None` if that fails or the
    /// file is another library.
    pub fn open_library_if_usable(library: NvidiaLibrary, file: &Path) -> Option<OpenedLibrary> {
        Self::open_library_or_reason(library, file).ok()
    }

    /// Opens a library by file, or by a name that the loader looks up, and checks that it exports
    /// the expected function.
    ///
    /// # Errors
    /// The error is a fragment that states why the library cannot be used.
    pub fn open_library_or_reason(
        library: NvidiaLibrary,
        file: &Path,
    ) -> Result<OpenedLibrary, String> {
        let handle = open_library_with_local_symbols(file)?;
        let mut opened = Self { library: handle, path_or_library_name: file.to_owned() };
        let landmark =
            opened.address_of_library_function(library.function_exported_by_every_version());
        let landmark = landmark.ok_or_else(|| {
            format!(
                "it is another library, without {}",
                library.function_exported_by_every_version().to_string_lossy()
            )
        })?;
        if let Some(mapped) = library_file_mapped_at_address(landmark) {
            opened.path_or_library_name = mapped;
        }
        Ok(opened)
    }

    /// Path of the library's file, or the name by which it was opened if the system does not report
    /// the path.
    pub fn path_or_name_of_opened_library(&self) -> &Path {
        &self.path_or_library_name
    }

    /// Looks up the address of a function in the library.
    pub fn address_of_library_function(&self, name: &CStr) -> Option<*const c_void> {
        // SAFETY: only the address of the symbol is taken; the caller of
        // `address_of_library_function` chooses its type.
        let symbol = unsafe { self.library.get::<*const c_void>(name.to_bytes_with_nul()) };
        symbol.map(|symbol| *symbol).ok()
    }

    pub fn reported_nvrtc_version(&self) -> Option<CudaVersion> {
        let address = self.address_of_library_function(c"nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: `nvrtcVersion` has this type in every version of NVRTC; both pointers are valid.
        let status = unsafe {
            let function: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                cast_address_to_function(address);
            function(&raw mut major, &raw mut minor)
        };
        (status == 0).then_some(CudaVersion { major: major as u32, minor: minor as u32 })
    }
}

/// Converts the address of a function to a function pointer of type `F`.
///
/// # Safety
/// `F` is the type of the function at that address.
pub unsafe fn cast_address_to_function<F: Copy>(address: *const c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>(), "F is a function pointer") };
    // SAFETY: address and function pointer have the same size; the caller promises that `F` is the
    // function's type.
    unsafe { std::mem::transmute_copy(&address) }
}

/// Opens a library until the process ends, if its file exists, so that a library that asks for it
/// by name finds it.
pub fn keep_library_file_open(file: &Path) {
    if file.is_file() {
        std::mem::forget(open_library_with_local_symbols(file).ok());
    }
}

/// Opens a library so that its symbols stay local; global symbols could mix two versions of a
/// library in one process.
fn open_library_with_local_symbols(file: &Path) -> Result<libloading::Library, String> {
    // Path of the file that the loader will open, if `LD_LIBRARY_PATH` determines it.
    let path = if file.is_absolute() {
        Some(file.to_owned())
    } else {
        search::file_found_on_loader_path(file)
    };
    path.map_or(Ok(()), |path| complete_file::check_library_file_is_complete(&path))?;
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: loading NVIDIA's own libraries runs their initialisers, which have no
    // precondition.
    let opened = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
    opened.map(libloading::Library::from).map_err(|error| error.to_string())
}

/// Returns the file from which an address of this process was mapped, if the system reports it
/// (Linux).
pub fn library_file_mapped_at_address(address: *const c_void) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    mapped_file_at_address_in_maps(&maps, address as u64)
}

/// Returns the file that is mapped at an address, from text in the format of `/proc/PID/maps`.
fn mapped_file_at_address_in_maps(maps: &str, address: u64) -> Option<PathBuf> {
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
    fn a_function_address_leads_to_its_library_file_in_proc_maps() {
        let maps = "7f10-7f20 r--p 00000000 fd:00 12 /lib/a b.so\n7f20-7f30 r-xp 00010000 fd:00 12  \
                    \u{20}             /lib/c.so\n7f30-7f40 rw-p 00000000 00:00 0\n";
        let at = |address| {
            mapped_file_at_address_in_maps(maps, address).map(|file| file.display().to_string())
        };
        assert_eq!(at(0x7f1f).as_deref(), Some("/lib/a b.so"));
        assert_eq!(at(0x7f20).as_deref(), Some("/lib/c.so"));
        assert_eq!((at(0x7f35), at(0x7f0f)), (None, None));
    }
}
