//! `kernelgate gate`: the last run against a committed baseline.

use super::{Format, Sessions, print_json};
use crate::exit::Exit;
use crate::gate::{Policy, Report, compare};
use crate::record::store::StoreError;
use crate::record::{Run, Store};
use crate::report::verdicts;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The baseline: baselines/DEVICE/NAME.json
    #[arg(long, value_name = "NAME")]
    baseline: String,
    #[command(flatten)]
    sessions: Sessions,
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
    let runs = arguments.sessions.read(store)?;
    let policy = Policy { relative: arguments.relative, absolute_ns: arguments.absolute, ..Policy::default() };
    let report = hold(store, &arguments.baseline, &runs, policy)?;
    match arguments.format {
        Format::Text => println!("{}", verdicts::text(&report)),
        Format::Markdown => println!("{}", verdicts::markdown(&report)),
        Format::Json => print_json(&report)?,
    }
    Ok(report.exit())
}

/// Holds the runs against their device's baseline. Where only another device has one of that name, the refusal says so.
fn hold(store: &Store, name: &str, runs: &[Run], policy: Policy) -> Result<Report, StoreError> {
    let device = runs.first().map(|run| run.environment.slug()).unwrap_or_default();
    match store.baseline(&device, name) {
        Ok(baseline) => Ok(compare(&baseline, runs, policy)),
        Err(missing @ StoreError::NoBaseline { .. }) => {
            let elsewhere = store.baseline_files().into_iter().filter(|(_, other, _)| other == name);
            let reports = elsewhere.filter_map(|(device, ..)| Some(compare(&store.baseline(&device, name).ok()?, runs, policy)));
            reports.into_iter().find(|report| !report.refused.is_empty()).ok_or(missing)
        }
        Err(error) => Err(error),
    }
}
