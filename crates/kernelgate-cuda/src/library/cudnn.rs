//! Finds the CUDA version that a cuDNN library was built for, because cuDNN's file name does not
//! contain it.
//!
//! kernelgate does not call `cudnnGetCudartVersion` on a cuDNN before choosing it: each function
//! opens a component file by name, which stays in the process and serves every later cuDNN. This
//! module therefore searches cuDNN's file `libcudnn_ops.so.9`, which contains kernels, for the
//! version text that NVIDIA's compiler leaves there. If `libcudnn_ops.so.9` lacks this text, the
//! CUDA version is unknown.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Text that NVIDIA's compiler writes into a file before its own version.
const CUDA_VERSION_TEXT_PREFIX: &[u8] = b"Cuda compilation tools, release ";
/// File of cuDNN that contains kernels, in the folder of the main file; the compiler's version text
/// lies near its start.
const CUDNN_FILE_WITH_CUDA_VERSION: &str = "libcudnn_ops.so.9";
/// Bytes of cuDNN's file that one read adds to the search for the version text.
const CUDNN_FILE_CHUNK_BYTES: usize = 1 << 20;
/// Largest number of bytes of cuDNN's file that are searched for the version text; the file has 107
/// MB for CUDA 12.
const MAX_SEARCHED_CUDNN_FILE_BYTES: u64 = 1 << 30;

/// Returns whether a cuDNN library was built for the CUDA major version `major`; true if its CUDA
/// version is unknown.
pub fn cudnn_fits_cuda_major(file: &Path, major: u32) -> bool {
    cuda_major_of_cudnn_file(file).is_none_or(|of| of == major)
}

/// Returns the CUDA major version that a cuDNN library was built for, read from the kernels' file
/// beside it.
pub fn cuda_major_of_cudnn_file(file: &Path) -> Option<u32> {
    let part = file.parent()?.join(CUDNN_FILE_WITH_CUDA_VERSION);
    find_cuda_major_in_stream(File::open(part).ok()?.take(MAX_SEARCHED_CUDNN_FILE_BYTES))
}

fn find_cuda_major_in_stream(mut text: impl Read) -> Option<u32> {
    // The version text may begin in one chunk of the file and end in the next chunk, so the end of
    // each chunk is kept.
    let overlap = CUDA_VERSION_TEXT_PREFIX.len() + 2;
    let mut searched = Vec::with_capacity(CUDNN_FILE_CHUNK_BYTES + overlap);
    loop {
        let kept = searched.len().min(overlap);
        searched.drain(..searched.len() - kept);
        let read =
            text.by_ref().take(CUDNN_FILE_CHUNK_BYTES as u64).read_to_end(&mut searched).ok()?;
        if let Some(major) = find_cuda_major_in_bytes(&searched) {
            return Some(major);
        }
        if read == 0 {
            return None;
        }
    }
}

fn find_cuda_major_in_bytes(searched: &[u8]) -> Option<u32> {
    searched.windows(CUDA_VERSION_TEXT_PREFIX.len() + 3).find_map(|window| {
        let version = window.strip_prefix(CUDA_VERSION_TEXT_PREFIX)?;
        let digits = version.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = std::str::from_utf8(&version[..digits]).ok()?;
        (version.get(digits) == Some(&b'.')).then(|| number.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPILER_VERSION_TEXT: &[u8] = b"Cuda compilation tools, release 13.0, V13.0.48";

    #[test]
    fn a_cudnn_built_for_another_cuda_major_is_recognised() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libcudnn.so.9");
        assert!(cudnn_fits_cuda_major(&library, 12), "nothing is known");
        std::fs::write(folder.path().join(CUDNN_FILE_WITH_CUDA_VERSION), COMPILER_VERSION_TEXT)
            .unwrap();
        assert!(cudnn_fits_cuda_major(&library, 13) && !cudnn_fits_cuda_major(&library, 12));
        std::fs::write(
            folder.path().join(CUDNN_FILE_WITH_CUDA_VERSION),
            "without a text of the compiler",
        )
        .unwrap();
        assert_eq!(cuda_major_of_cudnn_file(&library), None);
        assert!(
            cudnn_fits_cuda_major(Path::new("libcudnn.so.9"), 12),
            "the system does not report the file"
        );
    }

    #[test]
    fn the_compiler_version_text_is_found_at_any_offset() {
        for before in [
            0,
            7,
            CUDNN_FILE_CHUNK_BYTES - CUDA_VERSION_TEXT_PREFIX.len() - 2,
            CUDNN_FILE_CHUNK_BYTES - 5,
            CUDNN_FILE_CHUNK_BYTES,
            3 * CUDNN_FILE_CHUNK_BYTES - 20,
        ] {
            let text = [
                &vec![0; before][..],
                b"ilation tools, release 9.9",
                COMPILER_VERSION_TEXT,
                &[0; 99],
            ]
            .concat();
            assert_eq!(find_cuda_major_in_stream(&text[..]), Some(13), "{before}");
        }
        let other = b"Cuda compilation tools, release x, Cuda compilation tools, release 12.9,";
        assert_eq!(find_cuda_major_in_stream(&other[..]), Some(12));
        assert_eq!(
            find_cuda_major_in_stream(&COMPILER_VERSION_TEXT[..CUDA_VERSION_TEXT_PREFIX.len() + 1]),
            None
        );
        assert_eq!(find_cuda_major_in_stream(&b""[..]), None);
    }
}
