//! `kernelgate merge`: the records of all shards as one measurement, comparison or calibration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::fleet::counted_shards::{AnchorTolerance, MergeAccount, RecordPiece};
use crate::fleet::merge::{self, MergeError, MergedRecordKind, MergedRuns, MergedVerifications};
use crate::gate::calibration::Calibration;
use crate::gate::comparison_shard;
use crate::gate::rules::rules_file::MAX_RULE_RATIO;
use crate::report::formats::metrics;
use crate::report::verdicts;
use crate::verbs::correct::verify;
use crate::verbs::shared::output::{OutputFormat, print_json};
use crate::verbs::shared::settings::{check_flag_range, parse_fraction};
use crate::verbs::slower::calibrate;
use crate::verbs::slower::verdict::{VerdictFormat, VerdictOutput};
use kernelgate::display::{counted_noun, terminal};
use kernelgate::exit::ExitReason;
use kernelgate::protocol::CaseStatus;
use kernelgate::record::text::{printable_on_terminal, printable_path};
use kernelgate::record::{BaselineStore, ProcessRun, file};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: of runs and calibrations 0 whole, 3 a shard is missing, excluded or \
                  interrupted; of a comparison those of `kernelgate compare`; 2 a file cannot be \
                  read; 4 records that do not belong together."
)]
pub struct MergeArguments {
    /// Records of shards, or folders, which are searched with their subfolders
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Folder of the merged session, or file of the merged calibration [default: a folder among
    /// the recorded runs, or baselines/DEVICE/calibration.json]
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Largest relative difference of the anchors of two shards that are merged [default: 0.03 on
    /// GPUs, 0.3 on hosts, or what the calibration of the device has]
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    anchor_tolerance: Option<f64>,
    #[command(flatten)]
    verdict: VerdictOutput,
}

/// A merged session in JSON output.
#[derive(Serialize)]
struct MergedSessionJson<'a> {
    session: &'a Path,
    cases: usize,
    devices: Vec<String>,
    not_run: usize,
    /// By file of a shard, its cases beside which another process computed on the GPU.
    shared_gpu: BTreeMap<&'a Path, usize>,
    #[serde(rename = "records")]
    account: &'a MergeAccount,
}

/// Merges the records.
pub fn run(arguments: &MergeArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    check_flag_range("--anchor-tolerance", arguments.anchor_tolerance, 0.0..=MAX_RULE_RATIO)?;
    let files = merge::record_files(&arguments.paths)?;
    let merged = match merge::kind(&files)? {
        MergedRecordKind::Runs => merge_runs_to_store(arguments, store, &files),
        MergedRecordKind::Comparisons => merge_comparisons(arguments, store, &files),
        MergedRecordKind::Calibrations => merge_calibrations_to_file(arguments, store, &files),
        MergedRecordKind::Verifications => merge_verifications(arguments, &files),
    };
    match merged {
        Err(refused) if matches!(refused.downcast_ref(), Some(MergeError::Refused { .. })) => {
            println!("{}", printable_on_terminal(&refused.to_string()));
            Ok(ExitReason::Refused)
        }
        merged => merged,
    }
}

/// The tolerance of a flag, else of the calibration of a device.
fn merge_tolerance(
    arguments: &MergeArguments,
    store: &BaselineStore,
    slug: Option<String>,
) -> AnchorTolerance {
    let calibrated = || {
        let calibration: Calibration = file::read(&store.calibration_path(&slug?)).ok()?;
        calibration.anchor_tolerance
    };
    AnchorTolerance(arguments.anchor_tolerance.or_else(calibrated))
}

fn merge_runs_to_store(
    arguments: &MergeArguments,
    store: &BaselineStore,
    files: &[PathBuf],
) -> anyhow::Result<ExitReason> {
    let slug = merge::device_of_run(&files[0])?;
    let merged = merge::merge_runs(files, merge_tolerance(arguments, store, Some(slug)))?;
    let MergedRuns { runs, account, not_run } = &merged;
    let digest = file::hash_of_all(runs.iter().map(|piece| &*piece.hash));
    let usual = || store.runs.join(format!("merged-{}", &digest[..8]));
    let session = arguments.output.clone().unwrap_or_else(usual);
    if !runs.is_empty() {
        merge::write_session(&session, runs)?;
    }
    let cases = runs.iter().map(|piece| piece.record.cases.len()).sum();
    let mut devices: Vec<String> =
        runs.iter().map(|piece| piece.environment.device_identifier()).collect();
    devices.sort();
    devices.dedup();
    let shared_gpu = shared_gpu(runs);
    match arguments.verdict.verdict_format() {
        VerdictFormat::Json => {
            let (session, not_run) = (&*session, *not_run);
            let merged =
                MergedSessionJson { session, cases, devices, not_run, shared_gpu, account };
            print_json(&merged)?;
        }
        _ => {
            account
                .lines()
                .iter()
                .for_each(|line| terminal::print_wrapped(&printable_on_terminal(line)));
            if *not_run > 0 {
                println!("not run: {not_run} cases, for want of time or of the device");
            }
            for (path, cases) in shared_gpu {
                println!(
                    "cases of {} beside which another process computed on the GPU: {cases}; \
                     `gate` gives no verdict against them",
                    printable_path(path)
                );
            }
            if !runs.is_empty() {
                let (cards, folder) = (devices.len(), printable_path(&session));
                let (cases, cards) = (counted_noun(cases, "case"), counted_noun(cards, "device"));
                println!("{cases} on {cards} in {folder}");
            }
        }
    }
    let whole = account.is_whole() && *not_run == 0;
    Ok(if whole { ExitReason::Fine } else { ExitReason::Inconclusive })
}

/// By file of a shard, how many of its cases another process on the GPU ran beside; without the
/// shards that have none.
fn shared_gpu(runs: &[RecordPiece<ProcessRun>]) -> BTreeMap<&Path, usize> {
    let shared = |run: &ProcessRun| {
        run.cases.values().filter(|case| case.samples.conditions.shared_gpu()).count()
    };
    let counted = runs.iter().map(|piece| (&*piece.path, shared(&piece.record)));
    counted.filter(|&(_, cases)| cases > 0).collect()
}

fn merge_comparisons(
    arguments: &MergeArguments,
    store: &BaselineStore,
    files: &[PathBuf],
) -> anyhow::Result<ExitReason> {
    arguments.verdict.check()?;
    let slug = merge::device_of_comparison(&files[0])?;
    let merged =
        merge::merge_comparison_shards(files, merge_tolerance(arguments, store, Some(slug)))?;
    let account = merged.account;
    account.lines().iter().for_each(|line| eprintln!("{}", printable_on_terminal(line)));
    let Some(comparison) = comparison_shard::merge(merged.shards, account.missing) else {
        return Ok(ExitReason::Inconclusive);
    };
    let again = format!("kernelgate merge {}", merge::paths_on_one_line(&arguments.paths));
    let summary = verdicts::summary(&comparison, &again);
    arguments.verdict.print_and_write(
        &verdicts::text(&comparison, terminal::terminal_columns()),
        &summary,
        &comparison,
        &metrics::metrics_of_comparison(&comparison),
    )?;
    Ok(comparison.exit())
}

fn merge_calibrations_to_file(
    arguments: &MergeArguments,
    store: &BaselineStore,
    files: &[PathBuf],
) -> anyhow::Result<ExitReason> {
    let slug = merge::device_of_calibration(&files[0])?;
    let merged =
        merge::merge_calibration_records(files, merge_tolerance(arguments, store, Some(slug)))?;
    let account = merged.account;
    account.lines().iter().for_each(|line| eprintln!("{}", printable_on_terminal(line)));
    if let Some(calibration) = merged.calibration {
        calibrate::save_and_print(&calibration, arguments.output.as_deref(), store)?;
    }
    Ok(if account.is_whole() { ExitReason::Fine } else { ExitReason::Inconclusive })
}

fn merge_verifications(
    arguments: &MergeArguments,
    files: &[PathBuf],
) -> anyhow::Result<ExitReason> {
    let MergedVerifications { rows, account } = merge::merge_verification_shards(files)?;
    account.lines().iter().for_each(|line| eprintln!("{}", printable_on_terminal(line)));
    let format = match arguments.verdict.verdict_format() {
        VerdictFormat::Json => OutputFormat::Json,
        VerdictFormat::Markdown => OutputFormat::Markdown,
        _ => OutputFormat::Text,
    };
    let exit = verify::print_verified_cases(&rows, format, "")?;
    if rows.iter().all(|row| row.status == CaseStatus::Skipped) {
        anyhow::bail!("nothing was verified: every case was skipped");
    }
    Ok(if account.is_whole() { exit } else { exit.more_severe(ExitReason::Inconclusive) })
}
