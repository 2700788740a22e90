//! Access to files that other users may have created or named.

use std::io::Read;
use std::path::Path;

/// Opens a regular file. A device or a pipe in its place would be read, or waited for, without end.
///
/// # Errors
/// Fails if the path is not a regular file, or cannot be opened. A dangling link is reported as
/// such, not as a missing file, because somebody made it on purpose.
pub fn open_regular_file(path: &Path) -> std::io::Result<std::fs::File> {
    let kind =
        std::fs::metadata(path).map_err(|cause| missing_target_error(path, cause))?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        return Err(std::io::Error::other("it is no file but a device, a pipe or a socket"));
    }
    std::fs::File::open(path)
}

/// The error of a link whose target is missing, else `cause`.
fn missing_target_error(path: &Path, cause: std::io::Error) -> std::io::Error {
    match std::fs::read_link(path) {
        Ok(to) if cause.kind() == std::io::ErrorKind::NotFound => {
            std::io::Error::other(format!("a link to nothing ({})", to.display()))
        }
        _ => cause,
    }
}

/// Reads a regular file.
///
/// # Errors
/// Fails with the errors of [`open_regular_file()`], and if the file cannot be read.
pub fn read_regular_file(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular_file(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        std::fs::write(&path, [7, 0, 255]).unwrap();
        assert_eq!(read_regular_file(&path).unwrap(), [7, 0, 255]);
        assert!(
            read_regular_file(folder.path()).is_err()
                && read_regular_file(&folder.path().join("none")).is_err()
        );
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert_eq!(
            read_regular_file(&link).unwrap_err().to_string(),
            "a link to nothing (nowhere)"
        );
        let why = read_regular_file(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(why, "it is no file but a device, a pipe or a socket");
    }
}
