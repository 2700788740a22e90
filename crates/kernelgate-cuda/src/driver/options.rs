//! Options with which a GPU is opened and kernels are compiled for it.
#![allow(
    clippy::disallowed_methods,
    reason = "the boundary: variables of the process become options here"
)]

use std::time::Duration;

use crate::architecture;
use crate::compiler::source::{KernelBuildVariant, NamedKernelFile};

/// Options with which a GPU is opened and kernels are compiled for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Time after which a kernel that has not finished is treated as hung.
    pub hung_kernel_timeout: Duration,
    /// Architecture for which kernels are compiled in place of the GPU's own; `None` for the GPU's
    /// own.
    pub kernel_architecture_override: Option<String>,
    /// Variant in which kernels are compiled: layout of code and memory, and source line
    /// information.
    pub variant: KernelBuildVariant,
    /// Whether newly allocated device memory is filled with the byte 0xff. The tool initcheck of
    /// compute-sanitizer finds bytes that were never written only in memory that is not filled.
    pub fills_new_device_memory: bool,
    /// How GEMMs are run under compute-sanitizer (value of `KERNELGATE_GEMMS`): empty, `seen` or
    /// `none`.
    pub sanitizer_gemms_setting: String,
    /// Kernel files that the executable embeds, for kernel sources without files of their own.
    pub embedded_kernel_files: &'static [NamedKernelFile],
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            hung_kernel_timeout: Duration::from_secs(60),
            kernel_architecture_override: None,
            variant: KernelBuildVariant::default(),
            fills_new_device_memory: true,
            sanitizer_gemms_setting: String::new(),
            embedded_kernel_files: &[],
        }
    }
}

impl DeviceOptions {
    /// Reads the device options from the environment variables `KERNELGATE_ARCH`,
    /// `KERNELGATE_LAYOUT`, `KERNELGATE_LINE_INFO`, `KERNELGATE_UNFILLED` and `KERNELGATE_GEMMS`.
    pub fn from_environment() -> DeviceOptions {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        Self {
            kernel_architecture_override: architecture::architecture_from_environment(),
            variant: KernelBuildVariant {
                layout_number: variable("KERNELGATE_LAYOUT").and_then(|text| text.parse().ok()),
                has_line_info: variable("KERNELGATE_LINE_INFO").is_some(),
            },
            fills_new_device_memory: variable("KERNELGATE_UNFILLED").is_none(),
            sanitizer_gemms_setting: variable("KERNELGATE_GEMMS").unwrap_or_default(),
            ..Self::default()
        }
    }
}
