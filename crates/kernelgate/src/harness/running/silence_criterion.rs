//! Silences Criterion, so that by default only kernelgate's table appears in the output of `cargo
//! bench`. Criterion still writes its store and reports; with `--verbose`, its lines are printed
//! too.
//!
//! Criterion has no setting that suppresses its advice. Criterion's briefest format still prints a
//! line per case to standard output, so standard output is redirected to the null device.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::stdio;

/// Command-line flags that select Criterion's briefest output format.
pub const CRITERION_BRIEF_OUTPUT_FLAGS: [&str; 2] = ["--output-format", "bencher"];

/// Runs `work` while standard output is redirected to the null device.
pub fn run_with_silent_stdout<T>(work: impl FnOnce() -> T) -> T {
    use std::io::Write;
    // Criterion prints the name of its plotting library once, when it is first constructed; this
    // construction happens silently.
    run_with_stream_to_null_device(stdio::stderr(), stdio::dup2_stderr, || {
        drop(criterion::Criterion::default())
    });
    let _ = std::io::stdout().flush();
    let flushed = || {
        let done = work();
        let _ = std::io::stdout().flush();
        done
    };
    run_with_stream_to_null_device(stdio::stdout(), stdio::dup2_stdout, flushed)
}

/// Runs `work` while a stream is redirected to the null device; if redirecting fails, the stream is
/// unchanged.
fn run_with_stream_to_null_device<T>(
    stream: BorrowedFd<'_>,
    set: impl Fn(OwnedFd) -> rustix::io::Result<()>,
    work: impl FnOnce() -> T,
) -> T {
    let ends = duplicate_and_null_device(stream);
    let led = ends.and_then(|(kept, nowhere)| set(nowhere).ok().map(|()| kept));
    let done = work();
    led.map(set);
    done
}

/// Duplicates the stream's file descriptor, and opens the null device.
fn duplicate_and_null_device(stream: BorrowedFd<'_>) -> Option<(OwnedFd, OwnedFd)> {
    let nowhere = std::fs::File::options().write(true).open("/dev/null").ok()?;
    Some((stream.try_clone_to_owned().ok()?, nowhere.into()))
}

/// Redirects standard error to the null device as long as the guard lives, except within
/// [`run_with_original_stderr`](Self::run_with_original_stderr): Criterion prints advice about
/// sampling to standard error if a launch takes as long as a sample.
pub struct CriterionStderrSilencer {
    stderr_copy_and_null_device: Option<(OwnedFd, OwnedFd)>,
}

impl CriterionStderrSilencer {
    /// Silences standard error if `silent` is set.
    pub fn silence_stderr_if(silent: bool) -> Self {
        let ends = if silent { duplicate_and_null_device(stdio::stderr()) } else { None };
        Self {
            stderr_copy_and_null_device: ends
                .filter(|(_, nowhere)| stdio::dup2_stderr(nowhere).is_ok()),
        }
    }

    /// Runs `work` with the original standard error.
    pub fn run_with_original_stderr<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some((kept, nowhere)) = &self.stderr_copy_and_null_device else { return work() };
        // If a redirection fails, standard error is unchanged.
        let _ = stdio::dup2_stderr(kept);
        let done = work();
        let _ = stdio::dup2_stderr(nowhere);
        done
    }
}

impl Drop for CriterionStderrSilencer {
    fn drop(&mut self) {
        if let Some((kept, _)) = &self.stderr_copy_and_null_device {
            let _ = stdio::dup2_stderr(kept);
        }
    }
}
