//! Moves code and memory to other addresses on purpose, as another build may do. Two builds of
//! equal code differ by their addresses, so a calibration of the gate must include that effect.
//!
//! `KERNELGATE_LAYOUT` numbers a layout. Every module that is compiled gets further functions, so
//! that kernels lie elsewhere in their module, and the device's memory and the host's heap begin
//! with an allocation of another size. Deliberately absent: the order of a host executable's
//! functions, which its linker decides.

use std::fmt::Write as _;

/// The macro and the environment variable that number a layout.
pub const LAYOUT_VARIABLE: &str = "KERNELGATE_LAYOUT";

/// Moves all later host allocations of the process, if it has a layout.
pub fn pad_heap_for_layout(layout: Option<u32>) {
    if let Some(layout) = layout {
        std::mem::forget(Vec::<u8>::with_capacity(1040 * (layout as usize % 97 + 1)));
    }
}

/// Functions that go before a module's own, as CUDA source. The number and lengths of the padding
/// functions depend on the layout.
pub fn padding_functions(layout: u32) -> String {
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
    // Messages of the compiler name the lines of the kernel's file.
    text + "#line 1\n"
}

/// Bytes that are allocated before anything else: 1.25 to 76 MiB, an odd number of pages.
pub const fn padding_bytes(layout: u32) -> usize {
    (layout as usize % 61 + 1) * 5 * (1 << 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_layout_numbers_differ_in_code_and_memory_addresses() {
        for layout in 0..60 {
            assert_ne!(padding_functions(layout), padding_functions(layout + 1));
            assert_ne!(padding_bytes(layout), padding_bytes(layout + 1));
        }
    }
}
