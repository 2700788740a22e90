//! `kernelgate completions`: a script that completes verbs and flags in a shell.

use clap_complete::Shell;
use kernelgate::exit::ExitReason;

#[derive(Debug, clap::Args)]
pub struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(arguments: &CompletionsArguments, mut command: clap::Command) -> ExitReason {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "kernelgate", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    ExitReason::Fine
}
