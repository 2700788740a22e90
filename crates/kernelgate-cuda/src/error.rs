//! Errors of devices: compiling, loading, launching, memory.

use std::fmt;

/// The reason why a backend could not prepare or launch a case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A call of the driver failed.
    #[error("launch failed: failed to {action}: {status}")]
    Driver {
        /// The action: "make a stream".
        action: String,
        /// Answer of the driver.
        status: DriverStatusCode,
    },
    /// The computation itself failed.
    #[error("launch failed: {0}")]
    Launch(String),
    /// A kernel does not compile; the text names it and holds the compiler's log.
    #[error("{0}")]
    Compile(String),
    /// The device no longer answers, or its context is broken: nothing more can run on it in this
    /// process.
    #[error("the GPU was lost: {0}")]
    Lost(String),
    /// A library that this implementation stands on is missing or does not compute the problem: a
    /// skip, not a fault.
    #[error("{0}")]
    Unsupported(String),
    /// The events on the stream do not enclose the computation, so no time would be correct.
    #[error("has no time: {0}")]
    NotTimed(String),
    /// The work needs more memory than is available.
    #[error("needs {needed} of memory, {available} are free")]
    OutOfMemory {
        /// Required amount, with its unit.
        needed: String,
        /// Available amount, with its unit.
        available: String,
    },
}

/// Status with which a call of the driver failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverStatusCode {
    /// Name of the status: "CUDA_ERROR_OUT_OF_MEMORY".
    pub name: String,
    /// Text of the driver; a driver that is shutting down, as while its process ends, has none.
    pub text: Option<String>,
}

impl fmt::Display for DriverStatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({})",
            self.name,
            self.text.as_deref().unwrap_or("without a text of the driver")
        )
    }
}
