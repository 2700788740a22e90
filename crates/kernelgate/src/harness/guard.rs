//! Panics of a workload or implementation become errors of their case.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::exit::Exit;

/// Message and place of the last panic.
static LAST: Mutex<Option<String>> = Mutex::new(None);

/// Keeps panic messages for [`catch`] instead of printing them, unless a backtrace was asked for.
///
/// A reader that went away (`cargo bench | head`) ends the process as the signal for it does:
/// `print!` panics there.
pub fn keep_panics() {
    let backtrace = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or("no message");
        if text.starts_with("failed printing to std") {
            std::process::exit(Exit::BROKEN_PIPE);
        }
        if backtrace {
            return print(info);
        }
        let place = info
            .location()
            .map(|place| format!(" ({}:{})", place.file(), place.line()))
            .unwrap_or_default();
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{text}{place}"));
    }));
}

/// Runs something that may panic; the error is the panic's message.
pub fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let kept = LAST.lock().unwrap_or_else(PoisonError::into_inner).take();
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned());
        format!("panicked: {}", kept.or(text).unwrap_or_else(|| "no message".to_owned()))
    })
}
