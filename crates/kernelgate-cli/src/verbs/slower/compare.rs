//! `kernelgate compare`: compares two builds by running their bench processes alternately until
//! every case has a verdict.

use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;

use super::resources::require_architecture_name;
use super::verdict::{VerdictOutputFlags, VerdictOutputFormat};
use crate::compare::progress::parse_duration;
use crate::compare::{
    self, BuildComparisonRequest, ComparedSideSource, ComparisonOutcome, TestPlanBasis,
};
use crate::gate::rules::rules_file::MAX_RATIO_IN_RULES;
use crate::report::formats::metrics;
use crate::report::{comparison, verdicts};
use crate::verbs::shared::comparison::ComparisonCommandFlags;
use crate::verbs::shared::output::{
    command_line_arguments_of_process, print_as_json, shell_command_line_without_flags,
};
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::settings::{check_flag_in_range, refuse_injection_variables_of_user};
use kernelgate::display::terminal;
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::record::{RecordFoldersOfPackage, file};

#[derive(Debug, clap::Args)]
pub struct CompareCommandArguments {
    /// Compare only cases whose id matches this regular expression
    #[arg(id = "filter", value_name = "FILTER")]
    case_id_regex: Option<String>,
    /// Revision of the base: any that git knows
    #[arg(id = "base", long = "base", value_name = "REV", required_unless_present = "base_dir")]
    base_revision: Option<String>,
    /// Revision of the head [default: the working tree with uncommitted changes]
    #[arg(id = "head", long = "head", value_name = "REV")]
    head_revision: Option<String>,
    /// Folder with the bench executables of the base, in place of a build
    #[arg(id = "base_dir", long = "base-dir", value_name = "DIR", conflicts_with = "base")]
    base_executables_folder: Option<PathBuf>,
    /// Folder with the bench executables of the head, in place of a build
    #[arg(long = "head-dir", value_name = "DIR", conflicts_with = "head")]
    head_executables_folder: Option<PathBuf>,
    /// Exclude this untracked file or folder from the working tree's side (repeatable); files that
    /// .gitignore names are always excluded
    #[arg(long = "leave-out", value_name = "PATH")]
    excluded_untracked_paths: Vec<PathBuf>,
    /// Time limit of the comparison's measurement, after which undecided cases are inconclusive.
    /// The confirmation of slower cases may take as long again
    #[arg(id = "budget", long = "budget", value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    measurement_time_limit: Duration,
    #[command(flatten)]
    flags: ComparisonCommandFlags,
    /// Factor by which a case's output errors against the reference may grow from base to head
    /// [default: 1.5]
    #[arg(id = "growth", long = "growth", value_name = "RATIO")]
    max_error_growth_factor: Option<f64>,
    /// Also time cases whose bench executable is equal byte by byte on both sides
    #[arg(long = "time-identical")]
    times_identical_executables: bool,
    /// Time only cases whose kernels or launches changed, or are unknown. Changes of host code are
    /// not detected
    #[arg(id = "affected", long = "affected")]
    times_only_changed_kernels: bool,
    /// List the kernels whose machine code for this architecture differs, and time nothing
    /// (repeatable); needs NVRTC and no GPU
    #[arg(id = "kernels",
        long = "kernels",
        value_name = "ARCH",
        conflicts_with_all = ["affected", "resume", "shard_output", "build_only", "out"]
    )]
    kernel_diff_architectures: Vec<String>,
    /// Do not profile base and head if a case got slower
    #[arg(long = "no-profile")]
    skips_profile: bool,
    /// Continue the last comparison, which was interrupted
    #[arg(id = "resume", long = "resume")]
    resumes_comparison: bool,
    /// File of the shard that `--shard` measures, for `kernelgate merge` [default:
    /// kernelgate/compare/shards/I-of-N.json in cargo's target folder]
    #[arg(id = "shard_output", long = "shard-output", value_name = "FILE")]
    shard_output_file: Option<PathBuf>,
    /// Build both sides into DIR/base and DIR/head, and compare nothing; --base-dir and --head-dir
    /// read these folders, also on another machine
    #[arg(id = "build_only", long = "build-only", value_name = "DIR", conflicts_with_all = ["resume", "shard_output"])]
    build_only_folder: Option<PathBuf>,
    #[command(flatten)]
    output: VerdictOutputFlags,
}

/// Prints the kernels whose machine code differs between base and head, and times nothing. The exit
/// code is 0 if at least one kernel was compared for each architecture, else 3.
fn print_changed_kernels(
    request: &BuildComparisonRequest,
    arguments: &CompareCommandArguments,
) -> anyhow::Result<ProcessExitReason> {
    let kernels =
        compare::compare_kernels_of_both_builds(request, &arguments.kernel_diff_architectures)?;
    let lines: Vec<String> = kernels.iter().flat_map(comparison::changed_kernel_lines).collect();
    match arguments.output.requested_verdict_format() {
        VerdictOutputFormat::Json => print_as_json(&serde_json::json!({ "kernels": kernels }))?,
        _ => {
            terminal::print_broken_to_terminal_width(&clean_message_for_terminal(&lines.join("\n")))
        }
    }
    let compared = kernels.iter().all(|it| it.identical_kernels + it.kernel_differences.len() > 0);
    Ok(if compared { ProcessExitReason::Success } else { ProcessExitReason::Inconclusive })
}

/// Paths are made absolute, because git runs in another working folder.
fn paths_from_working_folder(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let here = std::env::current_dir().context("failed to find the working folder")?;
    Ok(paths.iter().map(|path| here.join(path)).collect())
}

fn side_source_of_flags(folder: Option<&PathBuf>, revision: Option<&String>) -> ComparedSideSource {
    match (folder, revision) {
        (Some(folder), _) => ComparedSideSource::PrebuiltFolder(folder.clone()),
        (_, Some(revision)) => ComparedSideSource::GitRevision(revision.clone()),
        _ => ComparedSideSource::WorkTree,
    }
}

pub fn run_compare_command(
    arguments: &CompareCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    refuse_injection_variables_of_user()?;
    CaseIdFilter::parse_exact_id_or_regex(arguments.case_id_regex.as_deref(), false)?;
    check_flag_in_range("--growth", arguments.max_error_growth_factor, 1.0..=MAX_RATIO_IN_RULES)?;
    for arch in &arguments.kernel_diff_architectures {
        require_architecture_name("--kernels", arch)?;
        let format = arguments.output.requested_verdict_format();
        let has_form = matches!(format, VerdictOutputFormat::Text | VerdictOutputFormat::Json);
        anyhow::ensure!(has_form, "--kernels prints text or JSON only");
    }
    let (flags, shard) = (&arguments.flags, arguments.flags.settings.requested_shard());
    let folder = store.generated_files_folder.join("compare");
    let folder = shard.map_or(folder.clone(), |shard| folder.join(shard.label_for_file_name()));
    let basis = TestPlanBasis::CalibrationOfDevice(store.clone());
    let mut request = BuildComparisonRequest {
        base: side_source_of_flags(
            arguments.base_executables_folder.as_ref(),
            arguments.base_revision.as_ref(),
        ),
        head: side_source_of_flags(
            arguments.head_executables_folder.as_ref(),
            arguments.head_revision.as_ref(),
        ),
        shard,
        criterion_filter: arguments.case_id_regex.clone(),
        bench_variables: flags.settings.bench_environment_variables(),
        times_identical_executables: arguments.times_identical_executables,
        only_affected_cases: arguments.times_only_changed_kernels,
        profiles_slower_cases: !arguments.skips_profile,
        resume_interrupted_comparison: arguments.resumes_comparison,
        paths_excluded_from_snapshot: paths_from_working_folder(
            &arguments.excluded_untracked_paths,
        )?,
        ..flags.self_comparison_request(store, basis, arguments.measurement_time_limit, folder)?
    };
    request.plan.requested_limits.output_error_growth_threshold = arguments.max_error_growth_factor;
    if let Some(output) = &arguments.build_only_folder {
        compare::build_sides_into_folder(&request, output)?;
        eprintln!("built into base/ and head/ of {}", path_for_terminal(output));
        return Ok(ProcessExitReason::Success);
    }
    arguments.output.check_output_folder_is_writable()?;
    if !arguments.kernel_diff_architectures.is_empty() {
        return print_changed_kernels(&request, arguments);
    }
    let ComparisonOutcome { comparison: outcome, shard: kept } =
        compare::run_comparison(&request).map_err(RefusalToCompare::from_compare_error)?;
    let again = shell_command_line_without_flags(
        command_line_arguments_of_process(),
        &["--format", "--out"],
        &["--resume"],
    );
    let mut summary = verdicts::verdict_report_summary(&outcome, &again);
    let own = || store.package.as_ref().map(|package| package.name.clone());
    summary.package_name = flags.package_name.clone().or_else(own);
    arguments.output.print_and_write_all_formats(
        &verdicts::verdict_report_text(&outcome, terminal::terminal_columns()),
        &summary,
        &outcome,
        &metrics::head_metrics_of_comparison(&outcome),
    )?;
    let Some(kept) = kept else { return Ok(outcome.exit_reason()) };
    let usual = || {
        store
            .generated_files_folder
            .join("compare/shards")
            .join(format!("{}.json", kept.shard.label_for_file_name()))
    };
    let path = arguments.shard_output_file.clone().unwrap_or_else(usual);
    file::write_record_atomically(&path, &*kept)?;
    eprintln!(
        "shard {} in {}: `kernelgate merge` decides when all {} are there",
        kept.shard,
        path_for_terminal(&path),
        kept.shard.shard_count
    );
    Ok(ProcessExitReason::Success)
}
