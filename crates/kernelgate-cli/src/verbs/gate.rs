//! `kernelgate gate`: the last run against a committed baseline.

use super::sessions::Sessions;
use super::verdict::VerdictOutput;
use crate::benches::package;
use crate::gate::calibration::Calibration;
use crate::gate::single_run::CalibratedSpreads;
use crate::gate::{GateReport, Policy, Staleness, compare, shards};
use crate::report::{metrics, verdicts};
use kernelgate::display::terminal;
use kernelgate::exit::Exit;
use kernelgate::record::store::StoreError;
use kernelgate::record::text::printable;
use kernelgate::record::{Baseline, Run, Store, file};

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
    /// Difference that two devices of one model may have, as a fraction: on top of --relative
    /// where the baseline's device is not known to be this one
    #[arg(long, value_name = "FRACTION", default_value_t = Policy::default().other_device)]
    other_device: f64,
    #[command(flatten)]
    output: VerdictOutput,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let fractions = [
        ("--relative", arguments.relative),
        ("--absolute", arguments.absolute),
        ("--other-device", arguments.other_device),
    ];
    for (flag, value) in fractions {
        anyhow::ensure!(value >= 0.0 && value.is_finite(), "{flag} takes a number from 0");
    }
    kernelgate::record::store::check_name(&arguments.baseline)?;
    let runs = arguments.sessions.read(store)?;
    if let Some(why) = shards::differing(&runs) {
        println!("refused: {}", printable(&why));
        return Ok(Exit::Refused);
    }
    let policy = Policy {
        relative: arguments.relative,
        absolute_ns: arguments.absolute,
        other_device: arguments.other_device,
        ..Policy::default()
    };
    let report = hold(store, &arguments.baseline, &runs, policy)
        .map_err(|error| elsewhere(error, store, &arguments.baseline))?;
    let again = format!(
        "cargo bench   # as often as wanted\nkernelgate gate --baseline {} --last COUNT",
        arguments.baseline
    );
    let summary = verdicts::summary(&report, &again);
    arguments.output.tell(
        &verdicts::text(&report, terminal::columns()),
        &summary,
        &report,
        &metrics::of_runs(&runs),
    )?;
    Ok(report.exit())
}

/// Names the packages of the workspace that have a baseline of that name, where this one has none.
fn elsewhere(error: StoreError, store: &Store, name: &str) -> anyhow::Error {
    let mut others = Vec::new();
    if matches!(error, StoreError::NoBaseline { .. }) {
        others = package::other_baselines(store);
        others.retain(|folder| {
            let there = Store { baselines: folder.clone(), ..store.clone() };
            there.baseline_files().is_ok_and(|files| files.iter().any(|(_, it, _)| it == name))
        });
    }
    let error = anyhow::Error::from(error);
    match others.first() {
        Some(folder) => anyhow::anyhow!(
            "{error}; another package of the workspace has one: call the program there, or name \
             it with --baselines {}",
            folder.display()
        ),
        None => error,
    }
}

/// Holds the runs against their device's baseline. Where only another device has one of that name,
/// the refusal says so.
fn hold(store: &Store, name: &str, runs: &[Run], policy: Policy) -> Result<GateReport, StoreError> {
    let device = runs.first().map(|run| run.environment.slug()).unwrap_or_default();
    let spreads = match file::read::<Calibration>(&store.calibration_path(&device)) {
        Ok(calibration) => CalibratedSpreads::of(&calibration),
        Err(error) if error.is_not_found() => CalibratedSpreads::default(),
        Err(error) => return Err(error.into()),
    };
    let compare = |baseline: &Baseline| compare(baseline, runs, policy, &spreads);
    match store.baseline(&device, name) {
        Ok(baseline) => {
            let report = compare(&baseline);
            Ok(GateReport { staleness: staleness(store, &baseline, &report), ..report })
        }
        Err(missing @ StoreError::NoBaseline { .. }) => {
            let elsewhere =
                store.baseline_files()?.into_iter().filter(|(_, other, _)| other == name);
            let reports = elsewhere
                .filter_map(|(device, ..)| Some(compare(&store.baseline(&device, name).ok()?)));
            reports.into_iter().find(|report| !report.refused.is_empty()).ok_or(missing)
        }
        Err(error) => Err(error),
    }
}

/// Of the oldest run that a judged case rests on.
fn staleness(store: &Store, baseline: &Baseline, report: &GateReport) -> Option<Staleness> {
    let used = report.judged.iter().flat_map(|judged| baseline.cases[&judged.case].runs.keys());
    let oldest = used.map(|key| &baseline.runs[key]).min_by(|a, b| a.started.cmp(&b.started))?;
    let started: Option<jiff::Timestamp> = oldest.started.parse().ok();
    Some(Staleness {
        recorded: oldest.started.clone(),
        commit: oldest.provenance.short(),
        days: started.map(|started| jiff::Timestamp::now().duration_since(started).as_hours() / 24),
        commits: oldest.provenance.commits_behind(&store.root),
    })
}
