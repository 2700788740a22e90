//! The hardware's own record of what ran.

pub mod cupti;
pub mod summary;

/// A kernel as the hardware saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRecord {
    /// Its symbol.
    pub name: String,
    /// When it began, nanoseconds of the device's clock.
    pub start_ns: u64,
    /// When it had finished, nanoseconds of the device's clock.
    pub end_ns: u64,
}

impl KernelRecord {
    /// How long it ran, nanoseconds.
    pub const fn elapsed_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}
