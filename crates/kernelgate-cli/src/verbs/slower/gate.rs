//! `kernelgate gate`: compares the last run with a committed baseline.

use std::collections::BTreeMap;

use super::verdict::VerdictOutput;
use crate::benches::package;
use crate::gate::baseline::{
    self, BaselineFacts, BaselineStaleness, GatePolicy, GateReport, judge_numerics,
};
use crate::gate::calibration::Calibration;
use crate::gate::limits::{AskedLimits, LimitSource};
use crate::gate::rules::PackageRules;
use crate::gate::rules::rules_file::{self, MAX_ACCEPTED_TIME_NS, MAX_RULE_RATIO};
use crate::gate::single_run::CalibratedSpreads;
use crate::report::formats::metrics;
use crate::report::verdicts;
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::sessions::SelectedSessions;
use crate::verbs::shared::settings::{check_flag_range, parse_fraction};
use kernelgate::display::terminal;
use kernelgate::exit::ExitReason;
use kernelgate::record::store::StoreError;
use kernelgate::record::{Baseline, BaselineStore, Measurement, ProcessRun, Provenance, file};
use regex::Regex;

#[derive(Debug, clap::Args)]
pub struct GateArguments {
    /// The baseline: baselines/DEVICE/NAME.json
    #[arg(long, value_name = "NAME")]
    baseline: String,
    #[command(flatten)]
    sessions: SelectedSessions,
    /// Smallest change that matters, as a fraction of the baseline's time [default: 0.05]
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    relative: Option<f64>,
    /// Smallest change that matters, in nanoseconds [default: 100]
    #[arg(long, value_name = "NS")]
    absolute: Option<f64>,
    /// Difference that two devices of one model may have, as a fraction; added to --relative if the
    /// baseline may be of another device
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction, default_value_t = GatePolicy::default().other_device)]
    other_device: f64,
    /// Ratio of a case's errors against the reference above which they have grown [default: 1.5]
    #[arg(long, value_name = "RATIO")]
    growth: Option<f64>,
    #[command(flatten)]
    output: VerdictOutput,
}

pub fn run(arguments: &GateArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    check_flag_range("--relative", arguments.relative, 0.0..=MAX_RULE_RATIO)?;
    check_flag_range("--absolute", arguments.absolute, 0.0..=MAX_ACCEPTED_TIME_NS)?;
    check_flag_range("--other-device", arguments.other_device, 0.0..=MAX_RULE_RATIO)?;
    check_flag_range("--growth", arguments.growth, 1.0..=MAX_RULE_RATIO)?;
    kernelgate::record::store::check_path_component(&arguments.baseline)?;
    let measurement =
        Measurement::from_runs(arguments.sessions.read(store)?).map_err(Refusal::result)?;
    let flags = AskedLimits {
        relative: arguments.relative,
        absolute_ns: arguments.absolute,
        growth: arguments.growth,
        ..AskedLimits::default()
    };
    let usual = GatePolicy::default();
    let limits = usual.limits.overridden_by(&flags, LimitSource::Flag);
    let policy = GatePolicy { limits, other_device: arguments.other_device, ..usual };
    let report = judge_measurement(store, &arguments.baseline, &measurement, policy)?;
    let mut summary = verdicts::summary(&report, &local_reproduction_commands(&arguments.baseline));
    summary.package = store.package.as_ref().map(|package| package.name.clone());
    arguments.output.print_and_write(
        &verdicts::text(&report, terminal::terminal_columns()),
        &summary,
        &report,
        &metrics::from_runs(measurement.process_runs()),
    )?;
    Ok(report.exit())
}

/// Judges a measurement against a baseline, with the rules of the package.
pub fn judge_measurement(
    store: &BaselineStore,
    baseline: &str,
    measurement: &Measurement,
    policy: GatePolicy,
) -> anyhow::Result<GateReport> {
    let rules = rules_file::read_rules_of_folder(&store.root)?;
    compare_with_baseline(store, baseline, measurement, (policy, rules))
        .map_err(|error| suggest_packages(error, store, baseline))
}

/// The commands that repeat the judgement locally.
pub fn local_reproduction_commands(baseline: &str) -> String {
    format!(
        "cargo bench   # as often as wanted\nkernelgate gate --baseline {baseline} --last COUNT"
    )
}

/// Adds to an error the packages of the workspace that have a baseline of that name, if this one
/// has none.
fn suggest_packages(error: StoreError, store: &BaselineStore, name: &str) -> anyhow::Error {
    let mut others = Vec::new();
    if matches!(error, StoreError::NoBaseline { .. }) {
        others = package::other_baselines(store);
        others.retain(|folder| {
            let there = BaselineStore { baselines: folder.clone(), ..store.clone() };
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

/// Compares a measurement with the baseline of its device. If the baseline of that name exists for
/// another device only, the refusal states so.
fn compare_with_baseline(
    store: &BaselineStore,
    name: &str,
    measurement: &Measurement,
    (policy, rules): (GatePolicy, PackageRules),
) -> Result<GateReport, StoreError> {
    let (runs, device) = (measurement.process_runs(), measurement.device_folder());
    let spreads = match file::read::<Calibration>(&store.calibration_path(&device)) {
        Ok(calibration) => CalibratedSpreads::from_calibration(&calibration),
        Err(error) if error.is_not_found() => CalibratedSpreads::default(),
        Err(error) => return Err(error.into()),
    };
    let records = store.numerics(runs)?;
    let compare = |baseline: &Baseline| {
        let (rules, expired) =
            rules.clone().rules_for_baseline(|cases| code_versions_of_cases(baseline, runs, cases));
        let report =
            baseline::judge_against_baseline(baseline, measurement, policy, &spreads, &rules);
        let report = judge_numerics(report, baseline, measurement, &records, &rules);
        let recorded = runs.iter().flat_map(|run| run.cases.keys().chain(run.skipped.keys()));
        let ids: Vec<&str> = baseline.cases.keys().chain(recorded).map(String::as_str).collect();
        let mut of_rules = rules.report(&report.cases(), Some(&ids));
        of_rules.notes.extend(expired);
        of_rules.notes.extend(report.rules.notes);
        of_rules.undecided.extend(report.rules.undecided);
        GateReport { rules: of_rules, ..report }
    };
    match store.baseline(&device, name) {
        Ok(baseline) => {
            let report = compare(&baseline);
            let staleness = baseline_staleness(store, &baseline, &report);
            let unsealed = !file::has_checksum(&store.baseline_path(&device, name)?);
            let facts = BaselineFacts { staleness, unsealed, ..report.facts };
            Ok(GateReport { facts, ..report })
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

/// Distinct code versions of the baseline's cases that were measured now and match.
fn code_versions_of_cases(
    baseline: &Baseline,
    runs: &[ProcessRun],
    wanted: &Regex,
) -> Vec<Provenance> {
    let cases = runs.iter().flat_map(|run| run.cases.keys()).filter(|case| wanted.is_match(case));
    let keys = cases.filter_map(|id| baseline.cases.get(id)).flat_map(|case| case.runs.keys());
    let code = keys.map(|key| &baseline.runs[key].provenance);
    let code: BTreeMap<_, _> = code.map(|it| ((&it.commit, it.dirty), it)).collect();
    code.into_values().cloned().collect()
}

/// Age of the oldest baseline run that a judged case uses.
fn baseline_staleness(
    store: &BaselineStore,
    baseline: &Baseline,
    report: &GateReport,
) -> Option<BaselineStaleness> {
    let used = report.judged.iter().flat_map(|judged| baseline.cases[&judged.case].runs.keys());
    let oldest = used.map(|key| &baseline.runs[key]).min_by(|a, b| a.started.cmp(&b.started))?;
    let started: Option<jiff::Timestamp> = oldest.started.parse().ok();
    Some(BaselineStaleness {
        recorded: oldest.started.clone(),
        commit: oldest.provenance.short_commit(),
        days: started.map(|started| jiff::Timestamp::now().duration_since(started).as_hours() / 24),
        commits: oldest.provenance.commits_behind(&store.root),
    })
}
