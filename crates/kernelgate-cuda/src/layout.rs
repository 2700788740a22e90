//! Moves code and memory to other addresses on purpose, as happens by chance between two builds.
//! Two builds of equal code can differ in speed by their addresses alone, so a calibration of the
//! gate must include that effect.
//!
//! The variable `KERNELGATE_LAYOUT` holds the number of a memory layout. With a layout number,
//! every compiled module gets padding functions before its kernels, and device memory and the
//! host's heap begin with a padding allocation. This module does not change the order of functions
//! in the host executable, which the linker decides.

use std::fmt::Write as _;

/// Name of the macro and of the environment variable that hold the layout number.
pub const LAYOUT_NUMBER_VARIABLE: &str = "KERNELGATE_LAYOUT";

/// Allocates host memory that is never freed, so that all later host allocations of the process
/// move; does nothing without a layout number.
pub fn pad_host_heap_for_layout(layout: Option<u32>) {
    if let Some(layout) = layout {
        std::mem::forget(Vec::<u8>::with_capacity(1040 * (layout as usize % 97 + 1)));
    }
}

/// CUDA source of padding functions that are compiled before the kernels of a module. The number
/// and the lengths of the padding functions depend on the layout number.
pub fn padding_functions_source(layout: u32) -> String {
    let mut text = String::new();
    for index in 0..1 + layout % 3 {
        let steps = 8 * (1 + (7 * layout + 3 * index) % 31);
        let _ = write!(
            text,
            "extern \"C\" __global__ void kernelgate_padding_{index}(float* x) {{\n    float y = \
             *x;\n#pragma unroll\n    for (int k = 0; k < {steps}; ++k) y = y * y + {index}.5f;\n    \
             *x = y;\n}}\n"
        );
    }
    // The directive keeps the line numbers of the kernel's own file in the compiler's messages.
    text + "#line 1\n"
}

/// Bytes of device memory that are allocated before anything else, depending on the layout number:
/// 1.25 to 76 MiB.
pub const fn device_padding_bytes(layout: u32) -> usize {
    (layout as usize % 61 + 1) * 5 * (1 << 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_layout_numbers_differ_in_code_and_memory_addresses() {
        for layout in 0..60 {
            assert_ne!(padding_functions_source(layout), padding_functions_source(layout + 1));
            assert_ne!(device_padding_bytes(layout), device_padding_bytes(layout + 1));
        }
    }
}
