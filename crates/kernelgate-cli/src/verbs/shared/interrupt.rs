//! Ctrl-C, or a termination signal, for verbs that start processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::benches::child::Running;
use kernelgate::exit::Exit;

/// For the processes that a verb starts, one after the other: an interrupt ends the one that runs,
/// and all that it started, before the program ends. To be called once.
pub fn watched() -> anyhow::Result<Running> {
    watched_saying(String::new)
}

/// The same; what `last` returns is said then.
pub fn watched_saying(last: impl Fn() -> String + Send + 'static) -> anyhow::Result<Running> {
    watched_with(last, Partial::default())
}

/// For a verb whose processes watch for interrupts themselves: an interrupt goes to the one that runs,
/// and this program ends as that one does. To be called once.
pub fn forwarded() -> anyhow::Result<Running> {
    let running = Running::default();
    let held = running.clone();
    ctrlc::set_handler(move || held.interrupt())
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}

/// For a verb that shows what it has when it is interrupted.
#[derive(Clone, Default)]
pub struct Partial {
    has_some: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
}

impl Partial {
    /// From now on the first interrupt ends the process that runs and not the program, which is to
    /// ask [`Self::interrupted`].
    pub fn begin(&self) {
        self.has_some.store(true, Ordering::SeqCst);
    }

    /// Whether an interrupt came since then.
    pub fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }
}

/// As [`watched`], for a verb that shows what it has.
pub fn watched_partial() -> anyhow::Result<(Running, Partial)> {
    let partial = Partial::default();
    Ok((watched_with(String::new, partial.clone())?, partial))
}

fn watched_with(
    last: impl Fn() -> String + Send + 'static,
    partial: Partial,
) -> anyhow::Result<Running> {
    let running = Running::in_groups();
    let held = running.clone();
    let handler = move || {
        let first = !partial.interrupted.swap(true, Ordering::SeqCst);
        if first && partial.has_some.load(Ordering::SeqCst) {
            held.end();
            return;
        }
        held.kill();
        eprintln!("\ninterrupted{}", last());
        std::process::exit(Exit::INTERRUPTED);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}
