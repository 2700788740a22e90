//! `kernelgate gate`: compares the times of the last run with a committed baseline.

use std::collections::BTreeMap;

use super::verdict::VerdictOutputFlags;
use crate::benches::package;
use crate::gate::baseline::{
    self, AgeOfBaseline, BaselineComparisonFacts, BaselineJudgementSettings, BaselineVerdicts,
    judge_output_errors,
};
use crate::gate::calibration::GateCalibration;
use crate::gate::limits::{LimitSource, RequestedLimits};
use crate::gate::rules::PackageGateRules;
use crate::gate::rules::rules_file::{self, MAX_RATIO_IN_RULES, MAX_TIME_IN_RULES_NS};
use crate::gate::single_run::CalibratedSpreadsByCase;
use crate::report::formats::metrics;
use crate::report::verdicts;
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::sessions::SessionSelectionFlags;
use crate::verbs::shared::settings::{check_flag_in_range, parse_fraction_or_percentage};
use kernelgate::display::terminal;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::store::RecordLookupError;
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CommitAndChanges, MeasurementOfRuns, RecordFoldersOfPackage,
    file,
};
use regex::Regex;

#[derive(Debug, clap::Args)]
pub struct GateCommandArguments {
    /// The baseline: baselines/DEVICE/NAME.json
    #[arg(id = "baseline", long = "baseline", value_name = "NAME")]
    baseline_name: String,
    #[command(flatten)]
    sessions: SessionSelectionFlags,
    /// Smallest change of a case's time that matters, as a fraction of the baseline's time
    /// [default: 0.05]
    #[arg(id = "relative", long = "relative", value_name = "FRACTION", value_parser = parse_fraction_or_percentage)]
    min_relative_change: Option<f64>,
    /// Smallest change of a case's time that matters, in nanoseconds [default: 100]
    #[arg(id = "absolute", long = "absolute", value_name = "NS")]
    min_change_ns: Option<f64>,
    /// Difference in time between two devices of one model, as a fraction; added to --relative if
    /// the baseline may come from another device
    #[arg(id = "other_device", long = "other-device", value_name = "FRACTION", value_parser = parse_fraction_or_percentage, default_value_t = BaselineJudgementSettings::default().relative_time_tolerance_between_devices)]
    other_device_tolerance: f64,
    /// Factor by which a case's output errors against the reference may grow from the baseline to
    /// the run [default: 1.5]
    #[arg(id = "growth", long = "growth", value_name = "RATIO")]
    max_error_growth_factor: Option<f64>,
    #[command(flatten)]
    output: VerdictOutputFlags,
}

pub fn run_gate_command(
    arguments: &GateCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    check_flag_in_range("--relative", arguments.min_relative_change, 0.0..=MAX_RATIO_IN_RULES)?;
    check_flag_in_range("--absolute", arguments.min_change_ns, 0.0..=MAX_TIME_IN_RULES_NS)?;
    check_flag_in_range(
        "--other-device",
        arguments.other_device_tolerance,
        0.0..=MAX_RATIO_IN_RULES,
    )?;
    check_flag_in_range("--growth", arguments.max_error_growth_factor, 1.0..=MAX_RATIO_IN_RULES)?;
    kernelgate::record::store::check_baseline_file_name(&arguments.baseline_name)?;
    let measurement =
        MeasurementOfRuns::from_matching_runs(arguments.sessions.read_runs_of_package(store)?)
            .map_err(RefusalToCompare::refusal_printed_on_stdout)?;
    let flags = RequestedLimits {
        relative_time_change_threshold: arguments.min_relative_change,
        absolute_time_change_threshold_ns: arguments.min_change_ns,
        output_error_growth_threshold: arguments.max_error_growth_factor,
        ..RequestedLimits::default()
    };
    let usual = BaselineJudgementSettings::default();
    let limits = usual.limits.overridden_by(&flags, LimitSource::CommandLineFlag);
    let policy = BaselineJudgementSettings {
        limits,
        relative_time_tolerance_between_devices: arguments.other_device_tolerance,
        ..usual
    };
    let report =
        judge_against_named_baseline(store, &arguments.baseline_name, &measurement, policy)?;
    let mut summary = verdicts::verdict_report_summary(
        &report,
        &gate_commands_to_run_locally(&arguments.baseline_name),
    );
    summary.package_name = store.package.as_ref().map(|package| package.name.clone());
    arguments.output.print_and_write_all_formats(
        &verdicts::verdict_report_text(&report, terminal::terminal_columns()),
        &summary,
        &report,
        &metrics::metrics_of_process_runs(measurement.process_runs_of_measurement()),
    )?;
    Ok(report.exit_reason())
}

/// Judges a measurement against the named baseline, with the rules of the package's
/// `kernelgate.toml`.
pub fn judge_against_named_baseline(
    store: &RecordFoldersOfPackage,
    baseline: &str,
    measurement: &MeasurementOfRuns,
    policy: BaselineJudgementSettings,
) -> anyhow::Result<BaselineVerdicts> {
    let rules = rules_file::read_rules_in_folder(&store.package_root)?;
    compare_with_baseline_of_device(store, baseline, measurement, (policy, rules))
        .map_err(|error| suggest_packages_with_baseline(error, store, baseline))
}

/// The commands with which a reader repeats the gate's judgement locally, as text.
pub fn gate_commands_to_run_locally(baseline: &str) -> String {
    format!(
        "cargo bench   # as often as wanted\nkernelgate gate --baseline {baseline} --last COUNT"
    )
}

/// If this package has no baseline of that name, adds to the error which other packages of the
/// workspace have one.
fn suggest_packages_with_baseline(
    error: RecordLookupError,
    store: &RecordFoldersOfPackage,
    name: &str,
) -> anyhow::Error {
    let mut others = Vec::new();
    if matches!(error, RecordLookupError::NoBaseline { .. }) {
        others = package::baseline_folders_of_other_packages(store);
        others.retain(|folder| {
            let there =
                RecordFoldersOfPackage { baselines_folder: folder.clone(), ..store.clone() };
            there.list_baseline_files().is_ok_and(|files| files.iter().any(|(_, it, _)| it == name))
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

/// Compares a measurement with the named baseline of the device on which it was measured. If
/// another device has a baseline of that name and this device has none, the report refuses to
/// compare and names the difference.
fn compare_with_baseline_of_device(
    store: &RecordFoldersOfPackage,
    name: &str,
    measurement: &MeasurementOfRuns,
    (policy, rules): (BaselineJudgementSettings, PackageGateRules),
) -> Result<BaselineVerdicts, RecordLookupError> {
    let (runs, device) =
        (measurement.process_runs_of_measurement(), measurement.baseline_folder_of_device());
    let spreads = match file::read_record::<GateCalibration>(&store.path_of_calibration(&device)) {
        Ok(calibration) => CalibratedSpreadsByCase::from_calibration(&calibration),
        Err(error) if error.is_because_file_is_missing() => CalibratedSpreadsByCase::default(),
        Err(error) => return Err(error.into()),
    };
    let records = store.read_output_errors_of_executables(runs)?;
    let compare = |baseline: &BaselineFile| {
        let (rules, expired) = rules.clone().without_expired_acceptances(|cases| {
            baseline_commits_of_matching_cases(baseline, runs, cases)
        });
        let report =
            baseline::judge_against_baseline(baseline, measurement, policy, &spreads, &rules);
        let report = judge_output_errors(report, baseline, measurement, &records, &rules);
        let recorded = runs.iter().flat_map(|run| run.cases.keys().chain(run.skipped.keys()));
        let ids: Vec<&str> = baseline.cases.keys().chain(recorded).map(String::as_str).collect();
        let mut of_rules = rules.report_effects(&report.judged_case_ids(), Some(&ids));
        of_rules.notes_on_rules_without_effect.extend(expired);
        of_rules.notes_on_rules_without_effect.extend(report.rules.notes_on_rules_without_effect);
        of_rules.notes_on_unjudged_limits.extend(report.rules.notes_on_unjudged_limits);
        BaselineVerdicts { rules: of_rules, ..report }
    };
    match store.read_baseline(&device, name) {
        Ok(baseline) => {
            let report = compare(&baseline);
            let staleness = age_of_oldest_used_baseline_run(store, &baseline, &report);
            let unsealed = !file::file_contains_checksum(&store.path_of_baseline(&device, name)?);
            let facts = BaselineComparisonFacts {
                staleness,
                baseline_lacks_checksum: unsealed,
                ..report.method_facts
            };
            Ok(BaselineVerdicts { method_facts: facts, ..report })
        }
        Err(missing @ RecordLookupError::NoBaseline { .. }) => {
            let elsewhere =
                store.list_baseline_files()?.into_iter().filter(|(_, other, _)| other == name);
            let reports = elsewhere.filter_map(|(device, ..)| {
                Some(compare(&store.read_baseline(&device, name).ok()?))
            });
            reports.into_iter().find(|report| !report.refused.is_empty()).ok_or(missing)
        }
        Err(error) => Err(error),
    }
}

/// Distinct commits with which the baseline recorded those cases that were measured now and match
/// the regular expression.
fn baseline_commits_of_matching_cases(
    baseline: &BaselineFile,
    runs: &[BenchProcessRun],
    wanted: &Regex,
) -> Vec<CommitAndChanges> {
    let cases = runs.iter().flat_map(|run| run.cases.keys()).filter(|case| wanted.is_match(case));
    let keys = cases.filter_map(|id| baseline.cases.get(id)).flat_map(|case| case.runs.keys());
    let code = keys.map(|key| &baseline.runs[key].provenance);
    let code: BTreeMap<_, _> = code.map(|it| ((&it.commit, it.dirty), it)).collect();
    code.into_values().cloned().collect()
}

/// Age, in days and commits, of the oldest baseline run that any judged case uses.
fn age_of_oldest_used_baseline_run(
    store: &RecordFoldersOfPackage,
    baseline: &BaselineFile,
    report: &BaselineVerdicts,
) -> Option<AgeOfBaseline> {
    let used =
        report.judged_cases.iter().flat_map(|judged| baseline.cases[&judged.case_id].runs.keys());
    let oldest =
        used.map(|key| &baseline.runs[key]).min_by(|a, b| a.start_time.cmp(&b.start_time))?;
    let started: Option<jiff::Timestamp> = oldest.start_time.parse().ok();
    Some(AgeOfBaseline {
        oldest_run_start_time: oldest.start_time.clone(),
        oldest_run_commit: oldest.provenance.short_commit_with_changes_mark(),
        days_since_oldest_run: started
            .map(|started| jiff::Timestamp::now().duration_since(started).as_hours() / 24),
        commits_since_oldest_run: oldest.provenance.commits_behind_checkout(&store.package_root),
    })
}
