//! Checks whether a shared library's file is complete; if it is truncated, the loader maps it
//! anyway, and access to the missing part ends the process (SIGBUS).

use std::path::Path;

use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache, elf};

use crate::regular_file;

/// Accepts an ELF file that contains all bytes that the loader maps. Also accepts a file that is
/// not ELF, because the loader reports that itself.
///
/// # Errors
/// The error is a sentence fragment that states that the file cannot be read, or is truncated.
pub fn check_library_file_is_complete(file: &Path) -> Result<(), String> {
    let opened =
        regular_file::open_file_unless_device_or_pipe(file).map_err(|cause| cause.to_string())?;
    let length = opened.metadata().map_err(|cause| cause.to_string())?.len();
    let data = ReadCache::new(opened);
    let Ok(header) = elf::FileHeader64::<Endianness>::parse(&data) else { return Ok(()) };
    let Ok(endian) = header.endian() else { return Ok(()) };
    let Ok(segments) = header.program_headers(endian, &data) else {
        return Err(format!("it is cut: it ends after {length} bytes"));
    };
    let loaded = segments.iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD);
    let end_of = |segment: &elf::ProgramHeader64<Endianness>| {
        segment.p_offset(endian).saturating_add(segment.p_filesz(endian))
    };
    match loaded.map(end_of).max() {
        Some(end) if end > length => {
            Err(format!("it is cut: it ends after {length} bytes of at least {end}"))
        }
        _ => Ok(()),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_library_file_is_refused_with_its_length() {
        use std::io::Read as _;
        #[allow(clippy::disallowed_methods, reason = "a test reads its own file")]
        let own = std::env::current_exe().unwrap();
        assert_eq!(check_library_file_is_complete(&own), Ok(()));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lib.so");
        let mut start = vec![0; 4096];
        std::fs::File::open(&own).unwrap().read_exact(&mut start).unwrap();
        for kept in [100, 4096] {
            std::fs::write(&path, &start[..kept]).unwrap();
            let why = check_library_file_is_complete(&path).unwrap_err();
            assert!(why.starts_with(&format!("it is cut: it ends after {kept} bytes")), "{why}");
        }
        std::fs::write(&path, "no library").unwrap();
        assert_eq!(check_library_file_is_complete(&path), Ok(()));
        assert!(check_library_file_is_complete(folder.path().join("none").as_path()).is_err());
    }
}
