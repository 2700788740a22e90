//! `kernelgate completions`: a script that completes verbs and flags in a shell.

use clap_complete::Shell;
use kernelgate::exit::Exit;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(arguments: &Arguments, mut command: clap::Command) -> Exit {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "kernelgate", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    Exit::Fine
}
