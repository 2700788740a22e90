//! Converts panics of a workload or implementation to errors of the case.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::exit::ProcessExitReason;
use kernelgate_cuda::CaseFailureReason;

/// Message and source location of the last panic that was not printed.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Installs a panic hook that stores messages for [`catch_panic`] instead of printing them, unless
/// the user asked for a backtrace.
///
/// The macro `print!` panics if writing to standard output fails. After a closed pipe (`cargo bench
/// | head`), the process ends with SIGPIPE's exit code; any other write failure is reported as an
/// error.
pub fn install_hook_that_stores_panic_messages(backtrace: bool) {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or("no message");
        if let Some((stream, cause)) = stream_and_cause_of_failed_print(text) {
            if is_broken_pipe(cause) {
                std::process::exit(ProcessExitReason::BROKEN_PIPE_EXIT_CODE);
            }
            if stream == "stdout" {
                eprintln!("error: failed to write to standard output: {cause}");
            }
            std::process::exit(ProcessExitReason::InvalidUsageOrInput as i32);
        }
        if backtrace {
            return print(info);
        }
        let place = info
            .location()
            .map(|place| format!(" ({}:{})", place.file(), place.line()))
            .unwrap_or_default();
        *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{text}{place}"));
    }));
}

/// Parses the panic message of a failed `print!` into stream and cause.
fn stream_and_cause_of_failed_print(message: &str) -> Option<(&str, &str)> {
    message.strip_prefix("failed printing to ")?.split_once(": ")
}

/// Whether the text of an operating-system error means a broken pipe.
fn is_broken_pipe(cause: &str) -> bool {
    let number = cause.rsplit_once("(os error ").and_then(|(_, end)| end.strip_suffix(')'));
    let error = number.and_then(|number| number.parse().ok());
    let kind = error.map(|error| std::io::Error::from_raw_os_error(error).kind());
    kind == Some(std::io::ErrorKind::BrokenPipe)
}

/// Message of a caught panic.
#[derive(Debug, thiserror::Error)]
#[error("panicked: {0}")]
pub struct CaughtPanicMessage(String);

impl From<CaughtPanicMessage> for CaseFailureReason {
    fn from(panic: CaughtPanicMessage) -> Self {
        Self::failure_with_kind_and_sentence("panicked", panic)
    }
}

/// Runs code that may panic; a panic becomes an error with the panic's message.
pub fn catch_panic<T>(run: impl FnOnce() -> T) -> Result<T, CaughtPanicMessage> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let kept = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned());
        CaughtPanicMessage(kept.or(text).unwrap_or_else(|| "no message".to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_distinguished_from_a_full_disk() {
        let cause_of = |message| {
            stream_and_cause_of_failed_print(message)
                .map(|(stream, cause)| (stream, is_broken_pipe(cause)))
        };
        let broken = "failed printing to stdout: Broken pipe (os error 32)";
        assert_eq!(cause_of(broken), Some(("stdout", true)));
        let full = "failed printing to stdout: No space left on device (os error 28)";
        assert_eq!(cause_of(full), Some(("stdout", false)));
        assert_eq!(cause_of("failed to do something: x"), None);
    }
}
