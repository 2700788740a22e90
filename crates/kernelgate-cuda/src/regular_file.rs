//! Reads files that other users may have created or named, and refuses devices and pipes.

use std::io::Read;
use std::path::Path;

/// Opens a regular file. A device or a pipe is refused, because reading or opening it could take
/// for ever.
///
/// # Errors
/// Fails if the path is not a regular file, or cannot be opened. A symbolic link without a target
/// is reported as such, not as a missing file, because somebody made it on purpose.
pub fn open_file_unless_device_or_pipe(path: &Path) -> std::io::Result<std::fs::File> {
    let kind = std::fs::metadata(path)
        .map_err(|cause| missing_link_target_error(path, cause))?
        .file_type();
    if !kind.is_file() && !kind.is_dir() {
        return Err(std::io::Error::other("it is no file but a device, a pipe or a socket"));
    }
    std::fs::File::open(path)
}

/// Returns an error that names a symbolic link's missing target, otherwise `cause`.
fn missing_link_target_error(path: &Path, cause: std::io::Error) -> std::io::Error {
    match std::fs::read_link(path) {
        Ok(to) if cause.kind() == std::io::ErrorKind::NotFound => {
            std::io::Error::other(format!("a link to nothing ({})", to.display()))
        }
        _ => cause,
    }
}

/// Reads a whole file, unless it is a device or a pipe.
///
/// # Errors
/// Fails with the errors of [`open_file_unless_device_or_pipe()`], and if the file cannot be read.
pub fn read_file_unless_device_or_pipe(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file_unless_device_or_pipe(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_folders_and_dangling_links_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        std::fs::write(&path, [7, 0, 255]).unwrap();
        assert_eq!(read_file_unless_device_or_pipe(&path).unwrap(), [7, 0, 255]);
        assert!(
            read_file_unless_device_or_pipe(folder.path()).is_err()
                && read_file_unless_device_or_pipe(&folder.path().join("none")).is_err()
        );
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert_eq!(
            read_file_unless_device_or_pipe(&link).unwrap_err().to_string(),
            "a link to nothing (nowhere)"
        );
        let why = read_file_unless_device_or_pipe(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(why, "it is no file but a device, a pipe or a socket");
    }
}
