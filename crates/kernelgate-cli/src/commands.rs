//! Prints the commands that the program runs, if `--verbose` asks for it.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use kernelgate::record::text::printable_on_terminal;

static COMMANDS_ARE_SHOWN: AtomicBool = AtomicBool::new(false);

/// Makes [`print_command`] print every command from now on.
pub fn show_all_commands() {
    COMMANDS_ARE_SHOWN.store(true, Ordering::Relaxed);
}

/// Whether [`print_command`] prints.
pub fn are_commands_shown() -> bool {
    COMMANDS_ARE_SHOWN.load(Ordering::Relaxed)
}

/// Prints a command that is about to run, with its folder and the variables that differ, on
/// standard error.
pub fn print_command(command: &Command) {
    if are_commands_shown() {
        eprintln!("+ {}", printable_on_terminal(&format!("{command:?}")));
    }
}
