//! Theoretical occupancy: how many warps of a kernel fit on a multiprocessor, from its registers,
//! shared memory and block size.

use crate::architecture::{RESERVED_SHARED_BYTES_PER_BLOCK, multiprocessor_limits};

/// Registers of a multiprocessor, equal on all architectures.
const REGISTERS_PER_MULTIPROCESSOR: u32 = 64 * 1024;
/// Allocation unit of registers for a warp.
const REGISTER_GRANULE: u32 = 256;
/// Registers are allocated to groups of four warps: one for each scheduler.
const WARP_ALLOCATION_UNIT: u32 = 4;
/// Allocation unit of shared memory for a block, bytes.
const SHARED_ALLOCATION_UNIT: u32 = 128;

/// Share of the warps that a multiprocessor can hold, 0 to 1; `None` if the table lacks the
/// architecture.
///
/// `registers` a thread, `shared_bytes` a block (static and dynamic together), `block` threads from
/// 1 to 1024.
pub fn theoretical_occupancy(
    arch: &str,
    registers: u32,
    shared_bytes: u32,
    block: u32,
) -> Option<f64> {
    let limits = multiprocessor_limits(arch)?;
    let warps = block.div_ceil(32);
    let by_warps = limits.warps / warps;
    let registers_a_warp =
        (registers * 32).next_multiple_of(REGISTER_GRANULE).max(REGISTER_GRANULE);
    let by_registers = (REGISTERS_PER_MULTIPROCESSOR / registers_a_warp / WARP_ALLOCATION_UNIT
        * WARP_ALLOCATION_UNIT)
        / warps;
    let by_shared = limits.shared_bytes
        / (shared_bytes + RESERVED_SHARED_BYTES_PER_BLOCK).next_multiple_of(SHARED_ALLOCATION_UNIT);
    let blocks = limits.blocks.min(by_warps).min(by_registers).min(by_shared);
    Some(f64::from(blocks * warps) / f64::from(limits.warps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy_equals_known_results_of_nvidias_calculator() {
        assert_eq!(theoretical_occupancy("sm_90a", 32, 0, 256), Some(1.0));
        assert_eq!(theoretical_occupancy("sm_90a", 255, 98_304, 128), Some(8.0 / 64.0));
        assert_eq!(theoretical_occupancy("sm_90a", 64, 0, 128), Some(0.5));
        assert_eq!(theoretical_occupancy("sm_80", 40, 0, 1024), Some(0.5));
        assert_eq!(theoretical_occupancy("sm_90a", 16, 200_000, 64), Some(2.0 / 64.0));
        assert_eq!(theoretical_occupancy("sm_42", 16, 0, 64), None);
    }
}
