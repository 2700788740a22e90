//! Errors of GPUs: in compilation, loading, launches and memory.

use std::fmt;

use crate::case_failure::CaseFailure;

/// The reason why a backend could not prepare or launch a case.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BackendError {
    /// A function of the CUDA driver failed.
    #[error("launch failed: failed to {action}: {status}")]
    Driver {
        /// The action that failed, for example "make a stream".
        action: String,
        /// Error code of the driver, with its text.
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
    /// Error: a library that the implementation needs is missing or does not support the problem;
    /// the case is skipped.
    #[error("{0}")]
    Unsupported(String),
    /// The events on the stream do not enclose the computation, so no time would be correct.
    #[error("has no time: {0}")]
    NotTimed(CaseFailure),
    /// The work needs more memory than is available.
    #[error(
        "needs {} on the GPU of memory, {} are free",
        gigabytes_text(*needed), available.map_or_else(|| "an unknown amount".to_owned(), gigabytes_text)
    )]
    OutOfMemory {
        /// Required bytes.
        needed: u64,
        /// Available bytes, if the driver reports them.
        available: Option<u64>,
    },
}

fn gigabytes_text(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

impl From<&BackendError> for CaseFailure {
    fn from(error: &BackendError) -> Self {
        let kind = match error {
            BackendError::NotTimed(why) => return why.clone().with_text(error.to_string()),
            BackendError::Driver { .. } => "driver",
            BackendError::Launch(_) => "launch",
            BackendError::Compile(_) => "compile",
            BackendError::Lost(_) => "lost",
            BackendError::Unsupported(_) => "unsupported",
            BackendError::OutOfMemory { .. } => "out_of_memory",
        };
        let failure = Self::new(kind, error);
        match error {
            BackendError::Driver { action, status } => {
                failure.with_name("action", action).with_name("status", &status.name)
            }
            BackendError::OutOfMemory { needed, available } => {
                let failure = failure.with_count("needed_bytes", *needed);
                available.map_or(failure.clone(), |it| failure.with_count("available_bytes", it))
            }
            _ => failure,
        }
    }
}

/// Status with which a call of the driver failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverStatusCode {
    /// Name of the driver's error code, for example "CUDA_ERROR_OUT_OF_MEMORY".
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
