//! The driver's results as errors, with what was being done.

use cudarc::driver::{DriverError, sys};

use crate::BackendError;

/// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
pub fn describe(error: &DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    };
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}

/// An error of the driver, with what was being done.
pub fn failed(action: &str, error: &DriverError) -> BackendError {
    use sys::CUresult as R;
    let text = format!("failed to {action}: {}", describe(error));
    // After these the context answers every call with the same error.
    let lost = matches!(
        error.0,
        R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
    );
    if lost { BackendError::Lost(text) } else { BackendError::Launch(text) }
}
