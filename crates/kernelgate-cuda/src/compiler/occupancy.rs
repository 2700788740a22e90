//! Theoretical occupancy of a kernel: how many of its warps fit on a multiprocessor, from its
//! registers, shared memory and block size.

use crate::architecture::{RESERVED_SHARED_BYTES_PER_BLOCK, multiprocessor_limits};

/// Number of 32-bit registers of a multiprocessor, equal on all supported architectures.
const REGISTERS_PER_MULTIPROCESSOR: u32 = 64 * 1024;
/// Registers are allocated to a warp in multiples of this number.
const REGISTER_ALLOCATION_UNIT_PER_WARP: u32 = 256;
/// Warps get registers in groups of four, because a multiprocessor has four schedulers.
const WARPS_PER_REGISTER_ALLOCATION: u32 = 4;
/// Shared memory is allocated to a thread block in multiples of this number of bytes.
const SHARED_BYTES_ALLOCATION_UNIT: u32 = 128;

/// Resident warps of the kernel as a share of the warps that a multiprocessor can hold, 0 to 1;
/// `None` if the table lacks the architecture.
///
/// `registers` are per thread, `shared_bytes` per block (static and dynamic together), and `block`
/// is the number of threads per block, 1 to 1024.
pub fn theoretical_occupancy_of_kernel(
    arch: &str,
    registers: u32,
    shared_bytes: u32,
    block: u32,
) -> Option<f64> {
    let limits = multiprocessor_limits(arch)?;
    let warps = block.div_ceil(32);
    let by_warps = limits.max_resident_warps / warps;
    let registers_a_warp = (registers * 32)
        .next_multiple_of(REGISTER_ALLOCATION_UNIT_PER_WARP)
        .max(REGISTER_ALLOCATION_UNIT_PER_WARP);
    let by_registers =
        (REGISTERS_PER_MULTIPROCESSOR / registers_a_warp / WARPS_PER_REGISTER_ALLOCATION
            * WARPS_PER_REGISTER_ALLOCATION)
            / warps;
    let by_shared = limits.shared_memory_bytes
        / (shared_bytes + RESERVED_SHARED_BYTES_PER_BLOCK)
            .next_multiple_of(SHARED_BYTES_ALLOCATION_UNIT);
    let blocks = limits.max_resident_blocks.min(by_warps).min(by_registers).min(by_shared);
    Some(f64::from(blocks * warps) / f64::from(limits.max_resident_warps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy_equals_known_results_of_nvidias_calculator() {
        assert_eq!(theoretical_occupancy_of_kernel("sm_90a", 32, 0, 256), Some(1.0));
        assert_eq!(theoretical_occupancy_of_kernel("sm_90a", 255, 98_304, 128), Some(8.0 / 64.0));
        assert_eq!(theoretical_occupancy_of_kernel("sm_90a", 64, 0, 128), Some(0.5));
        assert_eq!(theoretical_occupancy_of_kernel("sm_80", 40, 0, 1024), Some(0.5));
        assert_eq!(theoretical_occupancy_of_kernel("sm_90a", 16, 200_000, 64), Some(2.0 / 64.0));
        assert_eq!(theoretical_occupancy_of_kernel("sm_42", 16, 0, 64), None);
    }
}
