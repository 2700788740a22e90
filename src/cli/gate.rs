//! `kernelgate gate`: the last run against a committed baseline.

use std::path::PathBuf;

use super::{Format, print_json};
use crate::exit::Exit;
use crate::gate::{Policy, compare};
use crate::record::Store;
use crate::report::verdicts;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The baseline: baselines/DEVICE/NAME.json
    #[arg(long, value_name = "NAME")]
    baseline: String,
    /// Folder of a recorded invocation, in place of the last one; several are several process runs
    #[arg(long, value_name = "DIR")]
    session: Vec<PathBuf>,
    /// Smallest change that matters, as a fraction of the baseline's time
    #[arg(long, value_name = "FRACTION", default_value_t = Policy::default().relative)]
    relative: f64,
    /// Smallest change that matters, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = Policy::default().absolute_ns)]
    absolute: f64,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    for (flag, value) in [("--relative", arguments.relative), ("--absolute", arguments.absolute)] {
        anyhow::ensure!(value >= 0.0 && value.is_finite(), "{flag} takes a number from 0");
    }
    crate::record::store::check_name(&arguments.baseline)?;
    let mut runs = Vec::new();
    for folder in &arguments.session {
        runs.extend(store.session(folder)?);
    }
    if arguments.session.is_empty() {
        runs = store.last_session()?;
    }
    let device = runs.first().map(|run| run.environment.slug()).unwrap_or_default();
    let baseline = store.baseline(&device, &arguments.baseline)?;
    let policy = Policy { relative: arguments.relative, absolute_ns: arguments.absolute, ..Policy::default() };
    let report = compare(&baseline, &runs, policy);
    match arguments.format {
        Format::Text => println!("{}", verdicts::text(&report)),
        Format::Markdown => println!("{}", verdicts::markdown(&report)),
        Format::Json => print_json(&report)?,
    }
    Ok(report.exit())
}
