//! Errors of the driver, with the action that failed.

use std::ffi::CStr;

use cudarc::driver::{DriverError, sys};

use crate::error::{BackendError, DriverStatusCode};

/// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
pub fn describe(error: &DriverError) -> String {
    driver_status(error).to_string()
}

fn driver_status(error: &DriverError) -> DriverStatusCode {
    let text = |text: Result<&CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).ok()
    };
    let name = text(error.error_name()).unwrap_or_else(|| format!("{:?}", error.0));
    DriverStatusCode { name, text: text(error.error_string()) }
}

pub fn failed(action: &str, error: &DriverError) -> BackendError {
    use sys::CUresult as R;
    let status = driver_status(error);
    // After one of these errors the context answers every call with the same error.
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
    match lost {
        true => BackendError::Lost(format!("failed to {action}: {status}")),
        false => BackendError::Driver { action: action.to_owned(), status },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_error_without_a_text_is_described_by_its_name() {
        let mut status = DriverStatusCode { name: "CUDA_ERROR_X".to_owned(), text: None };
        assert_eq!(status.to_string(), "CUDA_ERROR_X (without a text of the driver)");
        status.text = Some("x".to_owned());
        assert_eq!(status.to_string(), "CUDA_ERROR_X (x)");
    }
}
