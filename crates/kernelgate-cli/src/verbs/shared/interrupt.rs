//! Handles Ctrl-C and termination signals for verbs that start processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::benches::child_process::ChildProcess;
use kernelgate::exit::ExitReason;

/// Watches for interrupts: an interrupt ends the running process and its descendants, and then the
/// program. To be called once.
pub fn watched_processes() -> anyhow::Result<ChildProcess> {
    watch_interrupts_printing(String::new)
}

/// Watches for interrupts; the text that `last` returns is printed then.
pub fn watch_interrupts_printing(
    last: impl Fn() -> String + Send + 'static,
) -> anyhow::Result<ChildProcess> {
    watch_interrupts_with(last, PartialResults::default())
}

/// Passes interrupts on to the running process, for a verb whose processes handle them, and ends
/// the program with that process. To be called once.
pub fn forward_interrupts() -> anyhow::Result<ChildProcess> {
    let running = ChildProcess::default();
    let held = running.clone();
    ctrlc::set_handler(move || held.interrupt())
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}

/// State for a verb that shows partial results when it is interrupted.
#[derive(Clone, Default)]
pub struct PartialResults {
    has_some: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
}

impl PartialResults {
    /// After this call, the first interrupt ends the running process but not the program, which
    /// must check [`Self::was_interrupted`].
    pub fn catch_interrupts(&self) {
        self.has_some.store(true, Ordering::SeqCst);
    }

    /// Whether an interrupt came after [`Self::catch_interrupts`] was called.
    pub fn was_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }
}

/// Watches for interrupts as [`watched_processes`] does, for a verb that shows partial results.
pub fn watch_interrupts_partial() -> anyhow::Result<(ChildProcess, PartialResults)> {
    let partial = PartialResults::default();
    Ok((watch_interrupts_with(String::new, partial.clone())?, partial))
}

fn watch_interrupts_with(
    last: impl Fn() -> String + Send + 'static,
    partial: PartialResults,
) -> anyhow::Result<ChildProcess> {
    let running = ChildProcess::in_process_groups();
    let held = running.clone();
    let handler = move || {
        let first = !partial.interrupted.swap(true, Ordering::SeqCst);
        if first && partial.has_some.load(Ordering::SeqCst) {
            held.kill_and_wait();
            return;
        }
        held.kill_all();
        eprintln!("\ninterrupted{}", last());
        std::process::exit(ExitReason::INTERRUPTED_EXIT_CODE);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}
