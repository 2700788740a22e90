//! Errors of work on a GPU: in compilation, loading, launches, timing and memory.

use std::fmt;

use crate::case_failure::CaseFailureReason;

/// The reason why a case could not be prepared, launched or timed on a backend (GPU or CPU).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BackendError {
    /// A function of the CUDA driver returned an error.
    #[error("launch failed: failed to {failed_action}: {status}")]
    DriverCallFailed {
        /// The action that failed, for example "make a stream".
        failed_action: String,
        /// Error code of the driver, with the driver's text.
        status: DriverErrorCode,
    },
    /// The computation of an implementation failed on its backend.
    #[error("launch failed: {0}")]
    ComputationFailed(String),
    /// A kernel could not be compiled; the text names the kernel and contains the compiler's log.
    #[error("{0}")]
    CompilationFailed(String),
    /// The device no longer answers, or its CUDA context is broken, so that this process can run
    /// nothing more on it.
    #[error("the GPU was lost: {0}")]
    DeviceLost(String),
    /// The GPU or a library lacks what the implementation needs; the case is then skipped.
    #[error("{0}")]
    Unsupported(String),
    /// The events on the stream do not enclose all work of the launch, so any measured time would
    /// be wrong.
    #[error("has no time: {0}")]
    NotTimed(CaseFailureReason),
    /// The work needs more device memory than is free.
    #[error(
        "needs {} on the GPU of memory, {} are free",
        bytes_as_gigabytes_text(*needed_bytes), free_bytes.map_or_else(|| "an unknown amount".to_owned(), bytes_as_gigabytes_text)
    )]
    OutOfMemory {
        /// Required bytes.
        needed_bytes: u64,
        /// Free bytes, if the driver reports them.
        free_bytes: Option<u64>,
    },
}

fn bytes_as_gigabytes_text(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

impl From<&BackendError> for CaseFailureReason {
    fn from(error: &BackendError) -> Self {
        let kind = match error {
            BackendError::NotTimed(why) => {
                return why.clone().with_failure_sentence(error.to_string());
            }
            BackendError::DriverCallFailed { .. } => "driver",
            BackendError::ComputationFailed(_) => "launch",
            BackendError::CompilationFailed(_) => "compile",
            BackendError::DeviceLost(_) => "lost",
            BackendError::Unsupported(_) => "unsupported",
            BackendError::OutOfMemory { .. } => "out_of_memory",
        };
        let failure = Self::failure_with_kind_and_sentence(kind, error);
        match error {
            BackendError::DriverCallFailed { failed_action: action, status } => failure
                .with_name_fact("action", action)
                .with_name_fact("status", &status.error_code_name),
            BackendError::OutOfMemory { needed_bytes: needed, free_bytes: available } => {
                let failure = failure.with_count_fact("needed_bytes", *needed);
                available
                    .map_or(failure.clone(), |it| failure.with_count_fact("available_bytes", it))
            }
            _ => failure,
        }
    }
}

/// Error code with which a function of the CUDA driver failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverErrorCode {
    /// Name of the driver's error code, for example "CUDA_ERROR_OUT_OF_MEMORY".
    pub error_code_name: String,
    /// The driver's text for the error; `None` while the driver shuts down at the end of its
    /// process.
    pub driver_error_text: Option<String>,
}

impl fmt::Display for DriverErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({})",
            self.error_code_name,
            self.driver_error_text.as_deref().unwrap_or("without a text of the driver")
        )
    }
}
