//! Options for opening a device and for compiling kernels for it.
#![allow(
    clippy::disallowed_methods,
    reason = "the boundary: variables of the process become options here"
)]

use std::time::Duration;

use crate::architecture;
use crate::compiler::source::{KernelFile, KernelVariant};

/// Options with which a device was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Time after which a running kernel is treated as hung.
    pub timeout: Duration,
    /// Architecture for which kernels are compiled, instead of the card's own.
    pub architecture: Option<String>,
    /// Variant of compiled kernels: layout of code and memory, line information.
    pub variant: KernelVariant,
    /// Whether newly allocated device memory is filled with a pattern. Only unfilled memory lets
    /// compute-sanitizer's initcheck find bytes that were never written.
    pub fills_memory: bool,
    /// Treatment of GEMMs under compute-sanitizer: empty, `seen` or `none`.
    pub gemms: String,
    /// Kernel files that the executable embeds, for sources without files of their own.
    pub files: &'static [KernelFile],
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            architecture: None,
            variant: KernelVariant::default(),
            fills_memory: true,
            gemms: String::new(),
            files: &[],
        }
    }
}

impl DeviceOptions {
    /// Reads the device options from environment variables: `KERNELGATE_ARCH`, `KERNELGATE_LAYOUT`,
    /// `KERNELGATE_LINE_INFO`, `KERNELGATE_UNFILLED` and `KERNELGATE_GEMMS`.
    pub fn from_environment() -> DeviceOptions {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        Self {
            architecture: architecture::requested_architecture(),
            variant: KernelVariant {
                layout: variable("KERNELGATE_LAYOUT").and_then(|text| text.parse().ok()),
                line_info: variable("KERNELGATE_LINE_INFO").is_some(),
            },
            fills_memory: variable("KERNELGATE_UNFILLED").is_none(),
            gemms: variable("KERNELGATE_GEMMS").unwrap_or_default(),
            ..Self::default()
        }
    }
}
