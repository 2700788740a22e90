//! Errors of the driver, with the action that failed.

use std::ffi::CStr;

use cudarc::driver::{DriverError, sys};

use crate::BackendError;

/// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
pub fn describe(error: &DriverError) -> String {
    let text = |text: Result<&CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).ok()
    };
    status_text(error.0, text(error.error_name()), text(error.error_string()))
}

/// A driver that is shutting down, as while its process ends, has no texts.
fn status_text(code: sys::CUresult, name: Option<String>, text: Option<String>) -> String {
    let name = name.unwrap_or_else(|| format!("{code:?}"));
    format!("{name} ({})", text.as_deref().unwrap_or("without a text of the driver"))
}

/// An error of the driver, with the action that failed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_texts_of_the_driver_has_its_name() {
        let code = sys::CUresult::CUDA_ERROR_DEINITIALIZED;
        let without = "CUDA_ERROR_DEINITIALIZED (without a text of the driver)";
        assert_eq!(status_text(code, None, None), without);
        let [name, text] = ["CUDA_ERROR_X", "x"].map(|text| Some(text.to_owned()));
        assert_eq!(status_text(code, name, text), "CUDA_ERROR_X (x)");
    }
}
