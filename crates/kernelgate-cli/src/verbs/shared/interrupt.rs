//! Handles Ctrl-C and termination signals for kernelgate verbs that start child processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::benches::child_process::SharedChildProcess;
use kernelgate::exit::ProcessExitReason;

/// Installs a signal handler: an interrupt kills the running child process with its descendants,
/// and then ends the program. Call this function only once in a process, because it installs a
/// signal handler.
pub fn kill_child_and_exit_on_interrupt() -> anyhow::Result<SharedChildProcess> {
    print_and_exit_on_interrupt(String::new)
}

/// Installs a signal handler that kills the child process, prints the text that `last` returns, and
/// ends the program.
pub fn print_and_exit_on_interrupt(
    last: impl Fn() -> String + Send + 'static,
) -> anyhow::Result<SharedChildProcess> {
    install_interrupt_handler(last, PartialResultsOnInterrupt::default())
}

/// Installs a signal handler that passes interrupts on to the running child process, which handles
/// them; the program goes on until the child ends. Call this function only once in a process,
/// because it installs a signal handler.
pub fn forward_interrupts_to_child() -> anyhow::Result<SharedChildProcess> {
    let running = SharedChildProcess::default();
    let held = running.clone();
    ctrlc::set_handler(move || held.interrupt_child())
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}

/// State shared with the signal handler of a verb that prints partial results after an interrupt.
#[derive(Clone, Default)]
pub struct PartialResultsOnInterrupt {
    has_partial_results: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
}

impl PartialResultsOnInterrupt {
    /// After this call, the first interrupt kills the running child process but does not end the
    /// program, which must check [`Self::was_interrupted`].
    pub fn survive_first_interrupt(&self) {
        self.has_partial_results.store(true, Ordering::SeqCst);
    }

    /// Whether an interrupt has arrived; the program survives it only after a call of
    /// [`Self::survive_first_interrupt`].
    pub fn was_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }
}

/// Installs a signal handler as [`kill_child_and_exit_on_interrupt`] does, for a verb that can
/// print partial results after the first interrupt.
pub fn keep_partial_results_on_interrupt()
-> anyhow::Result<(SharedChildProcess, PartialResultsOnInterrupt)> {
    let partial = PartialResultsOnInterrupt::default();
    Ok((install_interrupt_handler(String::new, partial.clone())?, partial))
}

fn install_interrupt_handler(
    last: impl Fn() -> String + Send + 'static,
    partial: PartialResultsOnInterrupt,
) -> anyhow::Result<SharedChildProcess> {
    let running = SharedChildProcess::with_own_process_groups();
    let held = running.clone();
    let handler = move || {
        let first = !partial.interrupted.swap(true, Ordering::SeqCst);
        if first && partial.has_partial_results.load(Ordering::SeqCst) {
            held.kill_child_and_wait();
            return;
        }
        held.kill_child_and_block_new_ones();
        eprintln!("\ninterrupted{}", last());
        std::process::exit(ProcessExitReason::INTERRUPTED_EXIT_CODE);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| anyhow::anyhow!("failed to watch for Ctrl-C: {error}"))?;
    Ok(running)
}
