//! Resource limits of GPU architectures, looked up by name such as "sm_90a", so that compiled
//! kernels can be judged on a machine without such a GPU.
//!
//! The resource limits of each architecture are those of the table "Technical Specifications per
//! Compute Capability" in NVIDIA's CUDA C++ Programming Guide. This module does not ask the driver
//! for attributes of an installed GPU.

/// Environment variable that names the architecture for which kernels are compiled, in place of the
/// GPU's own architecture.
pub const ARCHITECTURE_ENVIRONMENT_VARIABLE: &str = "KERNELGATE_ARCH";

/// The text of the variable `KERNELGATE_ARCH`, which becomes an option of devices
/// ([`DeviceOptions`](crate::DeviceOptions)) and decides which NVRTC a process chooses.
#[allow(clippy::disallowed_methods, reason = "the boundary: becomes an option of devices")]
pub fn architecture_from_environment() -> Option<String> {
    let named =
        std::env::var_os(ARCHITECTURE_ENVIRONMENT_VARIABLE).filter(|named| !named.is_empty())?;
    Some(named.to_string_lossy().into_owned())
}

/// Oldest architecture for which kernelgate compiles kernels (sm_80, Ampere).
pub const MIN_SUPPORTED_ARCHITECTURE: u32 = 80;

/// Oldest architecture with thread-block clusters, bulk copies and programmatic dependent launches
/// (sm_90, Hopper).
pub const HOPPER_COMPUTE_CAPABILITY: u32 = 90;

/// Bytes of shared memory that the CUDA system reserves in each thread block.
pub const RESERVED_SHARED_BYTES_PER_BLOCK: u32 = 1024;

/// Capacity of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultiprocessorLimits {
    /// Largest number of warps resident on a multiprocessor.
    pub max_resident_warps: u32,
    /// Largest number of thread blocks resident on a multiprocessor.
    pub max_resident_blocks: u32,
    /// Shared memory, bytes.
    pub shared_memory_bytes: u32,
}

/// Compute capability as one number, such as 90 for "sm_90a"; `None` if the text is not the name of
/// an NVIDIA architecture.
pub fn compute_capability_number(arch: &str) -> Option<u32> {
    let digits = arch.strip_prefix("sm_")?;
    let digits = digits.strip_suffix(['a', 'f']).unwrap_or(digits);
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    digits.parse().ok().filter(|number| plain && (10..1000).contains(number))
}

/// Warps, blocks and shared memory that a multiprocessor of this architecture can hold; `None` if
/// the table lacks the architecture.
pub fn multiprocessor_limits(arch: &str) -> Option<MultiprocessorLimits> {
    let (warps, blocks, shared_kib) = match compute_capability_number(arch)? {
        80 | 87 => (64, 32, 164),
        86 => (48, 16, 100),
        89 => (48, 24, 100),
        90 | 100 | 103 => (64, 32, 228),
        120 | 121 => (48, 24, 100),
        _ => return None,
    };
    Some(MultiprocessorLimits {
        max_resident_warps: warps,
        max_resident_blocks: blocks,
        shared_memory_bytes: shared_kib * 1024,
    })
}

/// Largest number of bytes of shared memory that a thread block may use; `None` if the table lacks
/// the architecture.
pub fn max_shared_bytes_per_block(arch: &str) -> Option<u32> {
    multiprocessor_limits(arch)
        .map(|limits| limits.shared_memory_bytes - RESERVED_SHARED_BYTES_PER_BLOCK)
}

/// Whether this architecture has programmatic dependent launch, by which a kernel may start before
/// the previous kernel has ended.
pub fn supports_programmatic_dependent_launch(arch: &str) -> bool {
    compute_capability_number(arch).is_some_and(|number| number >= HOPPER_COMPUTE_CAPABILITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_name_determines_its_number_and_shared_memory() {
        assert_eq!(
            ["sm_80", "sm_90a", "sm_100f", "sm_120a"].map(compute_capability_number),
            [80, 90, 100, 120].map(Some)
        );
        for name in ["90", "sm_", "sm_x", "sm_9", "gfx942", "compute_80", "sm_90b"] {
            assert_eq!(compute_capability_number(name), None, "{name}");
        }
        let kib = |arch| max_shared_bytes_per_block(arch).map(|bytes| bytes / 1024);
        assert_eq!(
            ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"].map(kib),
            [163, 99, 99, 227, 227, 99].map(Some)
        );
        assert_eq!(kib("sm_75"), None);
        assert!(
            supports_programmatic_dependent_launch("sm_90")
                && !supports_programmatic_dependent_launch("sm_89")
        );
    }
}
