//! Finds the CUDA version that a cuDNN library was built for, which its file name does not contain.
//!
//! The function `cudnnGetCudartVersion` returns the CUDA version of cuDNN, but must not be called
//! on a library that may not be used: each function opens a component file (`libcudnn_graph.so.9`)
//! by its name alone, and the first opened component stays in the process and serves every later
//! cuDNN. This module therefore searches the component file with kernels for the version text that
//! NVIDIA's compiler leaves there. If the file lacks this text, the CUDA version is unknown.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Text that the compiler writes before its version.
const CUDA_VERSION_MARK: &[u8] = b"Cuda compilation tools, release ";
/// Part of the library with kernels, beside the main file; the text lies near its start.
const CUDNN_OPS_FILE: &str = "libcudnn_ops.so.9";
/// Number of bytes of the library file that are searched at once.
const READ_CHUNK_BYTES: usize = 1 << 20;
/// Bytes that are searched in all: the part has 107 MB for CUDA 12.
const MAX_SEARCHED_BYTES: u64 = 1 << 30;

/// Returns whether a cuDNN library may be used with a CUDA of that major version, as far as is
/// known.
pub fn fits_cuda_version(file: &Path, major: u32) -> bool {
    cuda_major_of_file(file).is_none_or(|of| of == major)
}

/// The major version of the CUDA that a cuDNN was built for.
pub fn cuda_major_of_file(file: &Path) -> Option<u32> {
    let part = file.parent()?.join(CUDNN_OPS_FILE);
    cuda_major_in_text(File::open(part).ok()?.take(MAX_SEARCHED_BYTES))
}

fn cuda_major_in_text(mut text: impl Read) -> Option<u32> {
    // The mark text and its two digits may begin in one chunk of the file and end in the next
    // chunk.
    let overlap = CUDA_VERSION_MARK.len() + 2;
    let mut searched = Vec::with_capacity(READ_CHUNK_BYTES + overlap);
    loop {
        let kept = searched.len().min(overlap);
        searched.drain(..searched.len() - kept);
        let read = text.by_ref().take(READ_CHUNK_BYTES as u64).read_to_end(&mut searched).ok()?;
        if let Some(major) = first_cuda_major(&searched) {
            return Some(major);
        }
        if read == 0 {
            return None;
        }
    }
}

fn first_cuda_major(searched: &[u8]) -> Option<u32> {
    searched.windows(CUDA_VERSION_MARK.len() + 3).find_map(|window| {
        let version = window.strip_prefix(CUDA_VERSION_MARK)?;
        let digits = version.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = std::str::from_utf8(&version[..digits]).ok()?;
        (version.get(digits) == Some(&b'.')).then(|| number.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUDNN_VERSION_TEXT: &[u8] = b"Cuda compilation tools, release 13.0, V13.0.48";

    #[test]
    fn a_cudnn_for_another_cuda_version_is_recognised_by_the_file_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libcudnn.so.9");
        assert!(fits_cuda_version(&library, 12), "nothing is known");
        std::fs::write(folder.path().join(CUDNN_OPS_FILE), CUDNN_VERSION_TEXT).unwrap();
        assert!(fits_cuda_version(&library, 13) && !fits_cuda_version(&library, 12));
        std::fs::write(folder.path().join(CUDNN_OPS_FILE), "without a text of the compiler")
            .unwrap();
        assert_eq!(cuda_major_of_file(&library), None);
        assert!(
            fits_cuda_version(Path::new("libcudnn.so.9"), 12),
            "the system does not report the file"
        );
    }

    #[test]
    fn the_version_text_is_found_at_any_offset_in_the_file() {
        for before in [
            0,
            7,
            READ_CHUNK_BYTES - CUDA_VERSION_MARK.len() - 2,
            READ_CHUNK_BYTES - 5,
            READ_CHUNK_BYTES,
            3 * READ_CHUNK_BYTES - 20,
        ] {
            let text =
                [&vec![0; before][..], b"ilation tools, release 9.9", CUDNN_VERSION_TEXT, &[0; 99]]
                    .concat();
            assert_eq!(cuda_major_in_text(&text[..]), Some(13), "{before}");
        }
        let other = b"Cuda compilation tools, release x, Cuda compilation tools, release 12.9,";
        assert_eq!(cuda_major_in_text(&other[..]), Some(12));
        assert_eq!(cuda_major_in_text(&CUDNN_VERSION_TEXT[..CUDA_VERSION_MARK.len() + 1]), None);
        assert_eq!(cuda_major_in_text(&b""[..]), None);
    }
}
