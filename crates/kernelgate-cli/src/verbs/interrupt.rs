//! Ctrl-C, or a termination signal, for verbs that start processes.

use crate::benches::child::Running;
use kernelgate::exit::Exit;

/// For the processes that a verb starts, one after the other: an interrupt ends the one that runs,
/// and all that it started, before the program ends. To be called once.
///
/// # Errors
/// When the signals cannot be watched.
pub fn watched() -> anyhow::Result<Running> {
    watched_saying(String::new)
}

/// The same; what `last` returns is said then.
///
/// # Errors
/// As [`watched`].
pub fn watched_saying(last: impl Fn() -> String + Send + 'static) -> anyhow::Result<Running> {
    let running = Running::in_groups();
    let held = running.clone();
    let handler = move || {
        held.kill();
        eprintln!("\ninterrupted{}", last());
        std::process::exit(Exit::INTERRUPTED);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}
