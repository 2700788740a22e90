//! `kernelgate completions`: prints a script with which a shell completes kernelgate's verbs and
//! flags.

use clap_complete::Shell;
use kernelgate::exit::ProcessExitReason;

#[derive(Debug, clap::Args)]
pub struct CompletionsCommandArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run_completions_command(
    arguments: &CompletionsCommandArguments,
    mut command: clap::Command,
) -> ProcessExitReason {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "kernelgate", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    ProcessExitReason::Success
}
