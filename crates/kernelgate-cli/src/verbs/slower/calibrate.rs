//! `kernelgate calibrate`: runs comparisons with a known correct verdict, and recommends thresholds
//! from the rate of wrong verdicts.

use kernelgate::record::text::path_for_terminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;

use crate::compare::calibrate::{self, CalibrationRequest};
use crate::compare::progress::parse_duration;
use crate::compare::{BuildComparisonRequest, ComparedSideSource, TestPlanBasis};
use crate::gate::calibration::{CalibrationSummaryTables, GateCalibration, summarise_calibration};
use crate::gate::paired::ComparisonTestPlan;
use crate::report::calibration;
use crate::verbs::shared::comparison::ComparisonCommandFlags;
use crate::verbs::shared::output::{
    OutputFormat, command_line_arguments_of_process, print_as_json,
    shell_command_line_without_flags,
};
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::settings::refuse_injection_variables_of_user;
use kernelgate::display::terminal;
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::record::{RecordFoldersOfPackage, file};

#[derive(Debug, clap::Args)]
pub struct CalibrateCommandArguments {
    /// Use all cases whose id matches this regular expression; without it and without --axis, a few
    /// cases are chosen by their time
    #[arg(id = "filter", value_name = "FILTER")]
    case_id_regex: Option<String>,
    /// Folder with bench executables, in place of a build of the working tree
    #[arg(id = "dir", long = "dir", value_name = "DIR", conflicts_with = "package")]
    bench_executables_folder: Option<PathBuf>,
    /// Number of comparisons of a bench executable with itself
    #[arg(id = "comparisons", long = "comparisons", value_name = "COUNT", default_value_t = 200)]
    self_comparison_count: usize,
    /// Slow-downs to inject into the head as an added wait, per cent of each case's time
    #[arg(
        long = "inject",
        value_name = "PERCENT[,PERCENT]",
        value_delimiter = ',',
        default_value = "1,2,5"
    )]
    injected_wait_percents: Vec<f64>,
    /// Number of comparisons for each slow-down of --inject and of --work
    #[arg(long = "power-comparisons", value_name = "COUNT", default_value_t = 20)]
    comparisons_per_slowdown: usize,
    /// Slow-downs to inject into the head as added passes over memory, per cent of each case's time
    #[arg(id = "work", long = "work", value_name = "PERCENT[,PERCENT]", value_delimiter = ',')]
    injected_work_percents: Vec<f64>,
    /// Number of comparisons for each slow-down in which only one case is made slower, a different
    /// one in each comparison
    #[arg(id = "single", long = "single", value_name = "COUNT", default_value_t = 0)]
    single_case_comparison_count: usize,
    /// Number of comparisons of a bench executable with itself in which the head's code and memory
    /// have other addresses
    #[arg(long = "layouts", value_name = "COUNT", default_value_t = 0)]
    layout_comparison_count: usize,
    /// Number of comparisons in which another load runs on the host's cores, or on the GPU, beside
    /// the head's processes [default: one for 20 of --comparisons]
    #[arg(id = "sham", long = "sham", value_name = "COUNT")]
    sham_load_comparison_count: Option<usize>,
    /// Time limit of one measuring round of a comparison, after which undecided cases are
    /// inconclusive
    #[arg(id = "budget", long = "budget", value_name = "TIME", default_value = "3m", value_parser = parse_duration)]
    measuring_round_time_limit: Duration,
    /// Time limit of the whole calibration, builds included; a comparison that may take longer is
    /// not started, and --resume continues. The estimate for a comparison is the duration of the
    /// longest comparison so far, at first that of --budget
    #[arg(long = "total-time", value_name = "TIME", value_parser = parse_duration)]
    whole_calibration_time_limit: Option<Duration>,
    /// Largest number of cases that are chosen if neither a filter nor --axis selects cases
    #[arg(id = "cases", long = "cases", value_name = "COUNT", default_value_t = 4)]
    max_chosen_cases: usize,
    #[command(flatten)]
    flags: ComparisonCommandFlags,
    /// Continue the last calibration, which was interrupted or ran out of time
    #[arg(id = "resume", long = "resume")]
    resumes_calibration: bool,
    /// Merge the files of shards, or of several calibrations, and measure nothing
    #[arg(id = "merge",
        long = "merge",
        value_name = "FILE",
        num_args = 1..,
        conflicts_with_all = ["filter", "bench", "dir", "resume", "shard"]
    )]
    calibration_files_to_merge: Vec<PathBuf>,
    /// File to write, also if the calibration is not complete [default:
    /// baselines/DEVICE/calibration.json, of a part kernelgate/calibrate/part-I-of-N.json of the
    /// target folder]
    #[arg(id = "output", long = "output", value_name = "FILE")]
    calibration_output_file: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

impl CalibrateCommandArguments {
    fn number_of_sham_comparisons(&self) -> usize {
        self.sham_load_comparison_count.unwrap_or(self.self_comparison_count / 20)
    }
}

/// Flags on files and output of this machine, which are dropped from the recorded command because
/// they do not change the measurement.
const FLAGS_NOT_RECORDED: &[&str] = &["--dir", "--output", "--baselines", "--records", "--format"];

/// JSON output of `kernelgate calibrate`: counts of verdicts and recommended thresholds, without
/// the measured times.
#[derive(serde::Serialize)]
struct CalibrationReportJson<'a> {
    #[serde(rename = "calibration")]
    calibration_file: &'a Path,
    summary: CalibrationSummaryTables,
    #[serde(rename = "recommended")]
    recommended_thresholds: Option<&'a crate::gate::calibration::RecommendedThresholds>,
}

pub fn run_calibrate_command(
    arguments: &CalibrateCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    if !arguments.calibration_files_to_merge.is_empty() {
        return merge_calibration_files_of_flag(arguments, store);
    }
    check_calibrate_arguments(arguments)?;
    let folder = store.generated_files_folder.join("calibrate");
    let state = match arguments.flags.settings.requested_shard() {
        Some(shard) => folder.join(format!("part-{}.json", shard.label_for_file_name())),
        None => folder.join("state.json"),
    };
    let basis = TestPlanBasis::Fixed(ComparisonTestPlan::default());
    let request = BuildComparisonRequest {
        base: arguments
            .bench_executables_folder
            .clone()
            .map_or(ComparedSideSource::WorkTree, ComparedSideSource::PrebuiltFolder),
        criterion_filter: arguments.case_id_regex.clone(),
        times_identical_executables: true,
        ..arguments.flags.self_comparison_request(
            store,
            basis,
            arguments.measuring_round_time_limit,
            folder,
        )?
    };
    let measured = ComparisonTestPlan::default()
        .with_requested_limits(&request.plan.requested_limits, request.plan.max_trial_blocks);
    let settings = CalibrationRequest {
        identical_build_comparisons: arguments.self_comparison_count,
        code_layout_comparisons: arguments.layout_comparison_count,
        slowdowns_by_wait_percent: arguments.injected_wait_percents.clone(),
        slowdowns_by_work_percent: arguments.injected_work_percents.clone(),
        comparisons_per_slowdown: arguments.comparisons_per_slowdown,
        single_case_comparisons: arguments.single_case_comparison_count,
        sham_load_comparisons: arguments.number_of_sham_comparisons(),
        shard: arguments.flags.settings.requested_shard(),
        plan: measured,
        max_chosen_cases: arguments.max_chosen_cases,
        cases_chosen_by_user: user_selects_cases(arguments),
        total_time_limit: arguments.whole_calibration_time_limit,
        command_line: shell_command_line_without_flags(
            command_line_arguments_of_process(),
            FLAGS_NOT_RECORDED,
            &["--resume"],
        ),
        calibration_state_file: state.clone(),
        resume_interrupted_calibration: arguments.resumes_calibration,
    };
    let (calibration, left) = calibrate::run_calibration(&request, &settings)
        .map_err(RefusalToCompare::from_compare_error)?;
    let save = |path: &Path| file::write_record_atomically(path, &calibration);
    if left > 0 {
        arguments.calibration_output_file.as_deref().map(save).transpose()?;
        print_calibration_report(arguments.format, &calibration, &state)?;
        eprintln!(
            "{left} comparisons are left: the same command with --resume goes on; so far in {}",
            state.display()
        );
        return Ok(ProcessExitReason::Inconclusive);
    }
    let otherwise = if arguments.flags.settings.requested_shard().is_some() {
        state
    } else {
        store.path_of_calibration(&calibration.environment.baseline_folder_of_device_and_count())
    };
    let output = arguments.calibration_output_file.clone().unwrap_or(otherwise);
    save(&output)?;
    print_calibration_report(arguments.format, &calibration, &output)?;
    Ok(ProcessExitReason::Success)
}

const fn user_selects_cases(arguments: &CalibrateCommandArguments) -> bool {
    arguments.case_id_regex.is_some() || arguments.flags.settings.overrides_axes()
}

fn check_calibrate_arguments(arguments: &CalibrateCommandArguments) -> anyhow::Result<()> {
    for (flag, percents) in [
        ("--inject", &arguments.injected_wait_percents),
        ("--work", &arguments.injected_work_percents),
    ] {
        for percent in percents {
            anyhow::ensure!(
                *percent > 0.0 && *percent <= 1000.0,
                "{flag} takes percentages above 0, up to 1000, not {percent}"
            );
        }
    }
    for (flag, count) in [
        ("--comparisons", arguments.self_comparison_count),
        ("--power-comparisons", arguments.comparisons_per_slowdown),
        ("--single", arguments.single_case_comparison_count),
        ("--layouts", arguments.layout_comparison_count),
        ("--sham", arguments.number_of_sham_comparisons()),
    ] {
        anyhow::ensure!(count <= 100_000, "{flag} takes a number up to 100000");
    }
    anyhow::ensure!(arguments.max_chosen_cases > 0, "--cases takes a number from 1");
    refuse_injection_variables_of_user()?;
    CaseIdFilter::parse_exact_id_or_regex(arguments.case_id_regex.as_deref(), false)?;
    anyhow::ensure!(
        arguments.flags.settings.requested_shard().is_none() || user_selects_cases(arguments),
        "--shard needs a filter or --axis: which cases are short enough may differ from part to \
         part"
    );
    Ok(())
}

fn merge_calibration_files_of_flag(
    arguments: &CalibrateCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let merged = read_and_merge_calibrations(&arguments.calibration_files_to_merge)?;
    let output =
        write_calibration_file(&merged, arguments.calibration_output_file.as_deref(), store)?;
    print_calibration_report(arguments.format, &merged, &output)?;
    Ok(ProcessExitReason::Success)
}

/// Writes a merged calibration to its file and prints its report.
pub fn save_and_print_calibration(
    merged: &GateCalibration,
    output: Option<&Path>,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<()> {
    let output = write_calibration_file(merged, output, store)?;
    print_calibration_report(OutputFormat::Text, merged, &output)
}

/// Reads several calibration files and merges them into one calibration.
fn read_and_merge_calibrations(files: &[PathBuf]) -> anyhow::Result<GateCalibration> {
    let mut merged: Option<GateCalibration> = None;
    for path in files {
        let read: GateCalibration = file::read_record(path)?;
        match &mut merged {
            None => merged = Some(read),
            Some(merged) => {
                if let Err(differs) = merged.check_and_merge_calibration(read) {
                    let (other, first) = (path.display(), files[0].display());
                    let why = format!("{other} is of something else than {first}: {differs}");
                    return Err(RefusalToCompare::refusal_printed_on_stderr(why).into());
                }
            }
        }
    }
    let mut merged = merged.context("--merge takes files")?;
    merged.derive_thresholds_and_anchor_tolerance();
    Ok(merged)
}

/// Writes a calibration to the file of `--output` or to its default place, and returns the path.
fn write_calibration_file(
    merged: &GateCalibration,
    output: Option<&Path>,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<PathBuf> {
    let usual =
        || store.path_of_calibration(&merged.environment.baseline_folder_of_device_and_count());
    let output = output.map_or_else(usual, Path::to_owned);
    file::write_record_atomically(&output, merged)?;
    Ok(output)
}

fn print_calibration_report(
    format: OutputFormat,
    calibration: &GateCalibration,
    at: &Path,
) -> anyhow::Result<()> {
    match format {
        OutputFormat::Text => terminal::print_broken_to_terminal_width(
            &calibration::calibration_report_text(calibration, terminal::terminal_columns()),
        ),
        OutputFormat::Markdown => {
            println!("{}", calibration::calibration_report_markdown(calibration))
        }
        OutputFormat::Json => print_as_json(&CalibrationReportJson {
            calibration_file: at,
            summary: summarise_calibration(calibration),
            recommended_thresholds: calibration.recommended.as_ref(),
        })?,
    }
    eprintln!("written to {}", path_for_terminal(at));
    Ok(())
}
