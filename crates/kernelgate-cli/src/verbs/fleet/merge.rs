//! `kernelgate merge`: merges the records of all shards into one measurement, comparison,
//! calibration or verification.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::fleet::counted_shards::{
    MaxAnchorRateDifference, ShardMergeAccount, ShardRecordWithFile,
};
use crate::fleet::merge::{
    self, MergedRecordKind, MergedRunRecords, MergedVerificationShards, RecordMergeError,
};
use crate::gate::calibration::GateCalibration;
use crate::gate::comparison_shard;
use crate::gate::rules::rules_file::MAX_RATIO_IN_RULES;
use crate::report::formats::metrics;
use crate::report::verdicts;
use crate::verbs::correct::verify;
use crate::verbs::shared::output::{OutputFormat, print_as_json};
use crate::verbs::shared::settings::{check_flag_in_range, parse_fraction_or_percentage};
use crate::verbs::slower::calibrate;
use crate::verbs::slower::verdict::{VerdictOutputFlags, VerdictOutputFormat};
use kernelgate::display::{counted_noun, terminal};
use kernelgate::exit::ProcessExitReason;
use kernelgate::protocol::BenchCaseStatus;
use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use kernelgate::record::{BenchProcessRun, RecordFoldersOfPackage, file};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: of runs and calibrations 0 whole, 3 a shard is missing, excluded or \
                  interrupted; of a comparison those of `kernelgate compare`; 2 a file cannot be \
                  read; 4 records that do not belong together."
)]
pub struct MergeCommandArguments {
    /// Record files of shards, or folders, which are searched with their subfolders
    #[arg(value_name = "PATH", required = true)]
    shard_record_paths: Vec<PathBuf>,
    /// Folder of the merged session, or file of the merged calibration [default: a folder among
    /// the recorded runs, or baselines/DEVICE/calibration.json]
    #[arg(id = "output", long = "output", value_name = "PATH")]
    merged_output_path: Option<PathBuf>,
    /// Largest relative difference between the anchors (rates of fixed work) of two shards that are
    /// merged [default: 0.03 on GPUs, 0.3 on hosts, or what the calibration of the device has]
    #[arg(id = "anchor_tolerance", long = "anchor-tolerance", value_name = "FRACTION", value_parser = parse_fraction_or_percentage)]
    max_relative_anchor_difference: Option<f64>,
    #[command(flatten)]
    verdict: VerdictOutputFlags,
}

/// A merged session of runs in JSON output.
#[derive(Serialize)]
struct MergedSessionJson<'a> {
    #[serde(rename = "session")]
    merged_session_folder: &'a Path,
    #[serde(rename = "cases")]
    merged_case_count: usize,
    #[serde(rename = "devices")]
    device_names: Vec<String>,
    #[serde(rename = "not_run")]
    cases_not_run: usize,
    /// For each file of a shard, how many of its cases were measured while another process computed
    /// on the GPU.
    #[serde(rename = "shared_gpu")]
    cases_with_shared_gpu_by_file: BTreeMap<&'a Path, usize>,
    #[serde(rename = "records")]
    account: &'a ShardMergeAccount,
}

/// Merges the records.
pub fn run_merge_command(
    arguments: &MergeCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    check_flag_in_range(
        "--anchor-tolerance",
        arguments.max_relative_anchor_difference,
        0.0..=MAX_RATIO_IN_RULES,
    )?;
    let files = merge::collect_record_files(&arguments.shard_record_paths)?;
    let merged = match merge::common_kind_of_records(&files)? {
        MergedRecordKind::BenchRuns => merge_run_shards_into_store(arguments, store, &files),
        MergedRecordKind::BuildComparisons => merge_and_print_comparison(arguments, store, &files),
        MergedRecordKind::CalibrationParts => {
            merge_calibration_shards_to_file(arguments, store, &files)
        }
        MergedRecordKind::OutputVerifications => merge_and_print_verifications(arguments, &files),
    };
    match merged {
        Err(refused)
            if matches!(
                refused.downcast_ref(),
                Some(RecordMergeError::RecordsDifferInField { .. })
            ) =>
        {
            println!("{}", clean_message_for_terminal(&refused.to_string()));
            Ok(ProcessExitReason::ResultsNotComparable)
        }
        merged => merged,
    }
}

/// The largest accepted relative difference between the anchors (rates of fixed work) of two
/// shards: from the flag, else from the calibration of the device.
fn anchor_tolerance_from_flag_or_calibration(
    arguments: &MergeCommandArguments,
    store: &RecordFoldersOfPackage,
    slug: Option<String>,
) -> MaxAnchorRateDifference {
    let calibrated = || {
        let calibration: GateCalibration =
            file::read_record(&store.path_of_calibration(&slug?)).ok()?;
        calibration.anchor_rate_tolerance
    };
    MaxAnchorRateDifference(arguments.max_relative_anchor_difference.or_else(calibrated))
}

fn merge_run_shards_into_store(
    arguments: &MergeCommandArguments,
    store: &RecordFoldersOfPackage,
    files: &[PathBuf],
) -> anyhow::Result<ProcessExitReason> {
    let slug = merge::baseline_folder_of_run_record(&files[0])?;
    let merged = merge::merge_run_shards(
        files,
        anchor_tolerance_from_flag_or_calibration(arguments, store, Some(slug)),
    )?;
    let MergedRunRecords { runs, merge_account: account, cases_not_run: not_run } = &merged;
    let digest = file::hash_of_texts_hex(runs.iter().map(|piece| &*piece.record_hash));
    let usual = || store.runs_folder.join(format!("merged-{}", &digest[..8]));
    let session = arguments.merged_output_path.clone().unwrap_or_else(usual);
    if !runs.is_empty() {
        merge::write_merged_runs_into_folder(&session, runs)?;
    }
    let cases = runs.iter().map(|piece| piece.record.cases.len()).sum();
    let mut devices: Vec<String> =
        runs.iter().map(|piece| piece.environment.id_of_gpus_or_host()).collect();
    devices.sort();
    devices.dedup();
    let shared_gpu = cases_with_shared_gpu_by_file(runs);
    match arguments.verdict.requested_verdict_format() {
        VerdictOutputFormat::Json => {
            let (session, not_run) = (&*session, *not_run);
            let merged = MergedSessionJson {
                merged_session_folder: session,
                merged_case_count: cases,
                device_names: devices,
                cases_not_run: not_run,
                cases_with_shared_gpu_by_file: shared_gpu,
                account,
            };
            print_as_json(&merged)?;
        }
        _ => {
            account.merge_report_lines().iter().for_each(|line| {
                terminal::print_broken_to_terminal_width(&clean_message_for_terminal(line))
            });
            if *not_run > 0 {
                println!("not run: {not_run} cases, for want of time or of the device");
            }
            for (path, cases) in shared_gpu {
                println!(
                    "cases of {} beside which another process computed on the GPU: {cases}; \
                     `gate` gives no verdict against them",
                    path_for_terminal(path)
                );
            }
            if !runs.is_empty() {
                let (cards, folder) = (devices.len(), path_for_terminal(&session));
                let (cases, cards) = (counted_noun(cases, "case"), counted_noun(cards, "device"));
                println!("{cases} on {cards} in {folder}");
            }
        }
    }
    let whole = account.has_every_shard_complete() && *not_run == 0;
    Ok(if whole { ProcessExitReason::Success } else { ProcessExitReason::Inconclusive })
}

/// For each file of a shard, the number of its cases that ran while another process used the GPU;
/// files without such cases are absent.
fn cases_with_shared_gpu_by_file(
    runs: &[ShardRecordWithFile<BenchProcessRun>],
) -> BTreeMap<&Path, usize> {
    let shared = |run: &BenchProcessRun| {
        run.cases
            .values()
            .filter(|case| case.samples.conditions.was_gpu_shared_with_other_processes())
            .count()
    };
    let counted = runs.iter().map(|piece| (&*piece.record_path, shared(&piece.record)));
    counted.filter(|&(_, cases)| cases > 0).collect()
}

fn merge_and_print_comparison(
    arguments: &MergeCommandArguments,
    store: &RecordFoldersOfPackage,
    files: &[PathBuf],
) -> anyhow::Result<ProcessExitReason> {
    arguments.verdict.check_output_folder_is_writable()?;
    let slug = merge::baseline_folder_of_comparison_shard(&files[0])?;
    let merged = merge::merge_comparison_shards(
        files,
        anchor_tolerance_from_flag_or_calibration(arguments, store, Some(slug)),
    )?;
    let account = merged.merge_account;
    account
        .merge_report_lines()
        .iter()
        .for_each(|line| eprintln!("{}", clean_message_for_terminal(line)));
    let Some(comparison) =
        comparison_shard::merge_comparison_shard_records(merged.shards, account.missing_shards)
    else {
        return Ok(ProcessExitReason::Inconclusive);
    };
    let again =
        format!("kernelgate merge {}", merge::paths_on_one_line(&arguments.shard_record_paths));
    let summary = verdicts::verdict_report_summary(&comparison, &again);
    arguments.verdict.print_and_write_all_formats(
        &verdicts::verdict_report_text(&comparison, terminal::terminal_columns()),
        &summary,
        &comparison,
        &metrics::head_metrics_of_comparison(&comparison),
    )?;
    Ok(comparison.exit_reason())
}

fn merge_calibration_shards_to_file(
    arguments: &MergeCommandArguments,
    store: &RecordFoldersOfPackage,
    files: &[PathBuf],
) -> anyhow::Result<ProcessExitReason> {
    let slug = merge::baseline_folder_of_calibration_part(&files[0])?;
    let merged = merge::merge_calibration_records(
        files,
        anchor_tolerance_from_flag_or_calibration(arguments, store, Some(slug)),
    )?;
    let account = merged.merge_account;
    account
        .merge_report_lines()
        .iter()
        .for_each(|line| eprintln!("{}", clean_message_for_terminal(line)));
    if let Some(calibration) = merged.calibration {
        calibrate::save_and_print_calibration(
            &calibration,
            arguments.merged_output_path.as_deref(),
            store,
        )?;
    }
    Ok(if account.has_every_shard_complete() {
        ProcessExitReason::Success
    } else {
        ProcessExitReason::Inconclusive
    })
}

fn merge_and_print_verifications(
    arguments: &MergeCommandArguments,
    files: &[PathBuf],
) -> anyhow::Result<ProcessExitReason> {
    let MergedVerificationShards { rows, merge_account: account } =
        merge::merge_verification_shards(files)?;
    account
        .merge_report_lines()
        .iter()
        .for_each(|line| eprintln!("{}", clean_message_for_terminal(line)));
    let format = match arguments.verdict.requested_verdict_format() {
        VerdictOutputFormat::Json => OutputFormat::Json,
        VerdictOutputFormat::Markdown => OutputFormat::Markdown,
        _ => OutputFormat::Text,
    };
    let exit = verify::print_verified_cases(&rows, format, "")?;
    if rows.iter().all(|row| row.status == BenchCaseStatus::Skipped) {
        anyhow::bail!("nothing was verified: every case was skipped");
    }
    Ok(if account.has_every_shard_complete() {
        exit
    } else {
        exit.more_severe(ProcessExitReason::Inconclusive)
    })
}
