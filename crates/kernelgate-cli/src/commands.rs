//! Prints each external command (git, cargo, benches) that kernelgate runs, if `--verbose` is set.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use kernelgate::record::text::clean_message_for_terminal;

static COMMANDS_ARE_SHOWN: AtomicBool = AtomicBool::new(false);

/// Makes [`print_command_if_verbose`] print every external command from now on.
pub fn enable_command_printing() {
    COMMANDS_ARE_SHOWN.store(true, Ordering::Relaxed);
}

/// Whether [`print_command_if_verbose`] prints.
pub fn is_command_printing_enabled() -> bool {
    COMMANDS_ARE_SHOWN.load(Ordering::Relaxed)
}

/// Prints an external command before kernelgate runs it, with its folder and changed environment
/// variables, on standard error, if `--verbose` is set.
pub fn print_command_if_verbose(command: &Command) {
    if is_command_printing_enabled() {
        eprintln!("+ {}", clean_message_for_terminal(&format!("{command:?}")));
    }
}
