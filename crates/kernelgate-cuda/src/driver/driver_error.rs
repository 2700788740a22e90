//! Turns errors of the CUDA driver into texts and into kernelgate's error types, with the name of
//! the action that failed.

use std::ffi::CStr;

use cudarc::driver::{DriverError, sys};

use crate::error::{BackendError, DriverErrorCode};

/// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
pub fn driver_error_text(error: &DriverError) -> String {
    driver_status_of_error(error).to_string()
}

fn driver_status_of_error(error: &DriverError) -> DriverErrorCode {
    let text = |text: Result<&CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).ok()
    };
    let name = text(error.error_name()).unwrap_or_else(|| format!("{:?}", error.0));
    DriverErrorCode { error_code_name: name, driver_error_text: text(error.error_string()) }
}

pub fn error_for_failed_action(action: &str, error: &DriverError) -> BackendError {
    use sys::CUresult as R;
    let status = driver_status_of_error(error);
    // After one of these errors, every later call in the CUDA context returns the same error.
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
        true => BackendError::DeviceLost(format!("failed to {action}: {status}")),
        false => BackendError::DriverCallFailed { failed_action: action.to_owned(), status },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_error_without_a_text_is_described_by_its_name() {
        let mut status =
            DriverErrorCode { error_code_name: "CUDA_ERROR_X".to_owned(), driver_error_text: None };
        assert_eq!(status.to_string(), "CUDA_ERROR_X (without a text of the driver)");
        status.driver_error_text = Some("x".to_owned());
        assert_eq!(status.to_string(), "CUDA_ERROR_X (x)");
    }
}
