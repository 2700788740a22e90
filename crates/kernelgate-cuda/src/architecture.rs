//! Resource limits of GPU architectures by name, so that kernels can be judged without such a card.
//!
//! The resource limits of each architecture are those of the table "Technical Specifications per
//! Compute Capability" in NVIDIA's CUDA C++ Programming Guide. This module does not ask the driver
//! for attributes of an installed card.

/// Variable that names an architecture to run as, instead of the card's own.
pub const ARCHITECTURE_VARIABLE: &str = "KERNELGATE_ARCH";

/// Architecture that the user requests instead of the card's own, as written: for
/// [`DeviceOptions`](crate::DeviceOptions), and for the choice of NVRTC, which a process makes
/// once.
#[allow(clippy::disallowed_methods, reason = "the boundary: becomes an option of devices")]
pub fn requested_architecture() -> Option<String> {
    let named = std::env::var_os(ARCHITECTURE_VARIABLE).filter(|named| !named.is_empty())?;
    Some(named.to_string_lossy().into_owned())
}

/// Oldest architecture for which anything here is compiled: Ampere.
pub const MIN_ARCHITECTURE: u32 = 80;

/// The least architecture with clusters, bulk copies and programmatic dependent launch: Hopper.
pub const HOPPER_ARCHITECTURE: u32 = 90;

/// Shared memory that the system keeps of each block, bytes.
pub const RESERVED_SHARED_BYTES_PER_BLOCK: u32 = 1024;

/// Capacity of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultiprocessorLimits {
    /// Largest number of warps resident on a multiprocessor.
    pub warps: u32,
    /// Largest number of thread blocks resident on a multiprocessor.
    pub blocks: u32,
    /// Shared memory, bytes.
    pub shared_bytes: u32,
}

/// Compute capability, major and minor digits together: 90 of "sm_90a"; `None` if the text is not
/// the name of an NVIDIA architecture.
pub fn capability_number(arch: &str) -> Option<u32> {
    let digits = arch.strip_prefix("sm_")?;
    let digits = digits.strip_suffix(['a', 'f']).unwrap_or(digits);
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    digits.parse().ok().filter(|number| plain && (10..1000).contains(number))
}

/// Capacity of an architecture's multiprocessors; `None` if this table lacks the architecture.
pub fn multiprocessor_limits(arch: &str) -> Option<MultiprocessorLimits> {
    let (warps, blocks, shared_kib) = match capability_number(arch)? {
        80 | 87 => (64, 32, 164),
        86 => (48, 16, 100),
        89 => (48, 24, 100),
        90 | 100 | 103 => (64, 32, 228),
        120 | 121 => (48, 24, 100),
        _ => return None,
    };
    Some(MultiprocessorLimits { warps, blocks, shared_bytes: shared_kib * 1024 })
}

/// Maximum shared memory of a block, bytes; `None` if this table lacks the architecture.
pub fn shared_bytes_a_block(arch: &str) -> Option<u32> {
    multiprocessor_limits(arch).map(|limits| limits.shared_bytes - RESERVED_SHARED_BYTES_PER_BLOCK)
}

/// Returns whether a kernel of this architecture may be launched before the previous one has ended
/// (programmatic dependent launch).
pub fn supports_programmatic_launch(arch: &str) -> bool {
    capability_number(arch).is_some_and(|number| number >= HOPPER_ARCHITECTURE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_name_determines_its_number_and_shared_memory() {
        assert_eq!(
            ["sm_80", "sm_90a", "sm_100f", "sm_120a"].map(capability_number),
            [80, 90, 100, 120].map(Some)
        );
        for name in ["90", "sm_", "sm_x", "sm_9", "gfx942", "compute_80", "sm_90b"] {
            assert_eq!(capability_number(name), None, "{name}");
        }
        let kib = |arch| shared_bytes_a_block(arch).map(|bytes| bytes / 1024);
        assert_eq!(
            ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"].map(kib),
            [163, 99, 99, 227, 227, 99].map(Some)
        );
        assert_eq!(kib("sm_75"), None);
        assert!(supports_programmatic_launch("sm_90") && !supports_programmatic_launch("sm_89"));
    }
}
