//! Silences Criterion: by default only our table appears in the output of `cargo bench`.
//! Criterion's store and reports are still written, and `--verbose` prints its lines.
//!
//! Criterion has no setting that silences its advice. Criterion's briefest format prints a line for
//! each case to standard output, which is redirected to the null device meanwhile.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::stdio;

/// Command-line flag that selects Criterion's briefest output format.
pub const BRIEFEST_FORMAT_FLAG: [&str; 2] = ["--output-format", "bencher"];

/// Runs `work` while standard output is redirected to the null device.
pub fn silence_output<T>(work: impl FnOnce() -> T) -> T {
    use std::io::Write;
    // Criterion prints the name of its plotting library once, as soon as it is constructed.
    with_stream_redirected(stdio::stderr(), stdio::dup2_stderr, || {
        drop(criterion::Criterion::default())
    });
    let _ = std::io::stdout().flush();
    let flushed = || {
        let done = work();
        let _ = std::io::stdout().flush();
        done
    };
    with_stream_redirected(stdio::stdout(), stdio::dup2_stdout, flushed)
}

/// Runs `work` while a stream is redirected to the null device; if that fails, the stream stays as
/// it is.
fn with_stream_redirected<T>(
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

/// A copy of the stream's descriptor and one of the null device.
fn duplicate_and_null_device(stream: BorrowedFd<'_>) -> Option<(OwnedFd, OwnedFd)> {
    let nowhere = std::fs::File::options().write(true).open("/dev/null").ok()?;
    Some((stream.try_clone_to_owned().ok()?, nowhere.into()))
}

/// Redirects standard error to the null device while it lives, except within
/// [`with_original_stderr`](Self::with_original_stderr): Silences the advice to change the sampling
/// plan, which Criterion prints to standard error if a launch takes as long as a sample.
pub struct WithoutCriterionAdvice {
    ends: Option<(OwnedFd, OwnedFd)>,
}

impl WithoutCriterionAdvice {
    /// Silences standard error if Criterion is to print nothing.
    pub fn new(silent: bool) -> Self {
        let ends = if silent { duplicate_and_null_device(stdio::stderr()) } else { None };
        Self { ends: ends.filter(|(_, nowhere)| stdio::dup2_stderr(nowhere).is_ok()) }
    }

    /// Runs `work` with the original standard error.
    pub fn with_original_stderr<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some((kept, nowhere)) = &self.ends else { return work() };
        // If either redirection fails, standard error is left unchanged.
        let _ = stdio::dup2_stderr(kept);
        let done = work();
        let _ = stdio::dup2_stderr(nowhere);
        done
    }
}

impl Drop for WithoutCriterionAdvice {
    fn drop(&mut self) {
        if let Some((kept, _)) = &self.ends {
            let _ = stdio::dup2_stderr(kept);
        }
    }
}
