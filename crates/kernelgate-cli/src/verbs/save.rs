//! `kernelgate baseline save`: several runs of `cargo bench`, each of fresh processes, become a
//! baseline.

use super::lock::locked;
use std::process::{Command, Stdio};

use kernelgate::exit::Exit;
use kernelgate::record::environment::Mismatch;
use kernelgate::record::store::check_name;
use kernelgate::record::{Baseline, Run, Store, file};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Its name
    name: String,
    /// How many times to run the benches: five show how runs differ, one shows nothing of it
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(1..=100)
    )]
    runs: u16,
    /// What `cargo bench` gets, for example: -- --bench st_bif -- --quick forward
    #[arg(last = true, value_name = "CARGO BENCH ARGUMENTS")]
    arguments: Vec<String>,
}

/// Runs the benches and writes the baseline at the end: until then, and when anything breaks, it is
/// as it was.
pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    check_name(&arguments.name)?;
    let started = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let mut sessions: Vec<Vec<Run>> = Vec::new();
    for number in 1..=arguments.runs {
        eprintln!("run {number} of {}", arguments.runs);
        let session = format!("{started}-{}-{number}", std::process::id());
        bench(store, &session, &arguments.arguments)?;
        let runs = store.session(&store.runs.join(&session))?;
        if let Some(interrupted) = runs.iter().find(|run| !run.complete) {
            anyhow::bail!(
                "bench `{}` did not get to its end in run {number}: the baseline is as it was",
                interrupted.bench
            );
        }
        sessions.push(runs);
    }
    let device = sessions[0][0].environment.slug();
    let path = store.baseline_path(&device, &arguments.name)?;
    let _lock = locked(&path)?;
    let mut baseline = Baseline::open(&path, &arguments.name)
        .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    for (number, runs) in sessions.iter().enumerate() {
        for run in runs {
            if number == 0 {
                baseline.merge(run);
            } else if let Err(differing) = baseline.add(run) {
                for Mismatch { field, base, head } in differing {
                    println!(
                        "refused: {field} is `{base}` in the first run and `{head}` in run {}",
                        number + 1
                    );
                }
                return Ok(Exit::Refused);
            }
        }
    }
    anyhow::ensure!(!baseline.cases.is_empty(), "no case was measured: there is nothing to save");
    file::write(&path, &baseline).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    println!(
        "{} cases, {} runs each, in {}",
        sessions[0].iter().map(|run| run.cases.len()).sum::<usize>(),
        sessions.len(),
        path.display()
    );
    Ok(Exit::Fine)
}

/// One `cargo bench`. What it prints goes to standard error: the result here is another.
fn bench(store: &Store, session: &str, arguments: &[String]) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&cargo);
    command
        .arg("bench")
        .args(arguments)
        .current_dir(&store.root)
        .env("KERNELGATE_SESSION", session)
        .stdin(Stdio::null());
    command.stdout(std::io::stderr());
    let status = command
        .status()
        .map_err(|error| anyhow::anyhow!("failed to start {}: {error}", cargo.display()))?;
    anyhow::ensure!(status.success(), "cargo bench ended with {status}: the baseline is as it was");
    Ok(())
}
