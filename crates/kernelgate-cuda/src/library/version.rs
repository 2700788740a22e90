//! Versions of CUDA.

use std::fmt;

/// A version of CUDA, such as 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
}

impl CudaVersion {
    /// Converts the version number that the CUDA driver reports, in which 12040 means 12.4.
    pub const fn cuda_version_from_driver_number(number: i32) -> Self {
        let number = number.unsigned_abs();
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }

    /// Parses a version of the form "12.4".
    pub fn parse_major_dot_minor(text: &str) -> Option<CudaVersion> {
        let (major, minor) = text.split_once('.')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Major versions of CUDA that kernelgate supports, newest first.
pub const SUPPORTED_CUDA_MAJORS: [u32; 2] = [NEWEST_CUDA_MAJOR, 12];
/// Newest major version of CUDA that kernelgate supports.
pub const NEWEST_CUDA_MAJOR: u32 = 13;
/// Oldest driver version that exports every driver function that this crate calls without checking
/// for it.
pub const OLDEST_SUPPORTED_DRIVER: CudaVersion = CudaVersion { major: 12, minor: 4 };
