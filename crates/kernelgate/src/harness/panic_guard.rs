//! Panics of a workload or implementation become errors of their case.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::exit::ExitReason;
use kernelgate_cuda::CaseFailure;

/// Message and source location of the last panic.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Keeps panic messages for [`catch_panic`] instead of printing them, unless the user asked for a
/// backtrace.
///
/// The macro `print!` panics if it cannot write to standard output. A closed pipe (`cargo bench |
/// head`) then ends the process as its signal would; any other failure is reported as an error.
pub fn keep_panic_messages(backtrace: bool) {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or("no message");
        if let Some((stream, cause)) = failed_print_stream(text) {
            if is_broken_pipe(cause) {
                std::process::exit(ExitReason::BROKEN_PIPE_EXIT_CODE);
            }
            if stream == "stdout" {
                eprintln!("error: failed to write to standard output: {cause}");
            }
            std::process::exit(ExitReason::Usage as i32);
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

/// The stream and the cause in the message of a `print!` that could not write.
fn failed_print_stream(message: &str) -> Option<(&str, &str)> {
    message.strip_prefix("failed printing to ")?.split_once(": ")
}

/// Whether the system's error is a broken pipe.
fn is_broken_pipe(cause: &str) -> bool {
    let number = cause.rsplit_once("(os error ").and_then(|(_, end)| end.strip_suffix(')'));
    let error = number.and_then(|number| number.parse().ok());
    let kind = error.map(|error| std::io::Error::from_raw_os_error(error).kind());
    kind == Some(std::io::ErrorKind::BrokenPipe)
}

/// Message of a panic that was caught.
#[derive(Debug, thiserror::Error)]
#[error("panicked: {0}")]
pub struct CaughtPanic(String);

impl From<CaughtPanic> for CaseFailure {
    fn from(panic: CaughtPanic) -> Self {
        Self::new("panicked", panic)
    }
}

/// Runs something that may panic; the error is the panic's message.
pub fn catch_panic<T>(run: impl FnOnce() -> T) -> Result<T, CaughtPanic> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let kept = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned());
        CaughtPanic(kept.or(text).unwrap_or_else(|| "no message".to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_pipe_is_distinguished_from_a_full_disk() {
        let cause_of = |message| {
            failed_print_stream(message).map(|(stream, cause)| (stream, is_broken_pipe(cause)))
        };
        let broken = "failed printing to stdout: Broken pipe (os error 32)";
        assert_eq!(cause_of(broken), Some(("stdout", true)));
        let full = "failed printing to stdout: No space left on device (os error 28)";
        assert_eq!(cause_of(full), Some(("stdout", false)));
        assert_eq!(cause_of("failed to do something: x"), None);
    }
}
