//! Runs comparisons whose answer is known (`kernelgate calibrate`), and recommends thresholds from
//! the results.

use kernelgate::record::text::printable_path;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;

use crate::compare::calibrate::{self, CalibrationRequest};
use crate::compare::progress::parse_duration;
use crate::compare::{ComparisonRequest, PlanBasis, SideSource};
use crate::gate::calibration::{Calibration, CalibrationSummary, summarise_calibration};
use crate::gate::paired::TestPlan;
use crate::report::calibration;
use crate::verbs::shared::comparison::ComparisonFlags;
use crate::verbs::shared::output::{
    OutputFormat, arguments_of_process, print_json, shell_command_line,
};
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::settings::refuse_injected_changes;
use kernelgate::display::terminal;
use kernelgate::exit::ExitReason;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::record::{BaselineStore, file};

#[derive(Debug, clap::Args)]
pub struct CalibrateArguments {
    /// Use all cases whose id matches this regular expression; without it and without --axis a few
    /// cases are chosen by their time
    filter: Option<String>,
    /// Folder with bench executables, in place of a build of the working tree
    #[arg(long, value_name = "DIR", conflicts_with = "package")]
    dir: Option<PathBuf>,
    /// Number of comparisons of an executable with itself
    #[arg(long, value_name = "COUNT", default_value_t = 200)]
    comparisons: usize,
    /// Slow-downs to inject into the head, per cent of each case's time
    #[arg(long, value_name = "PERCENT[,PERCENT]", value_delimiter = ',', default_value = "1,2,5")]
    inject: Vec<f64>,
    /// Number of comparisons for each slow-down of --inject and --work
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    power_comparisons: usize,
    /// Slow-downs of the head by passes over memory in place of a wait, per cent of each case's
    /// time
    #[arg(long, value_name = "PERCENT[,PERCENT]", value_delimiter = ',')]
    work: Vec<f64>,
    /// Number of comparisons for each slow-down in which only one case is slower, another one each
    /// time
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    single: usize,
    /// Number of comparisons of an executable with itself in which the head's code and memory have
    /// other addresses
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    layouts: usize,
    /// Number of comparisons in which another load runs on the host's cores, or on the GPU, beside
    /// the head's processes [default: one for 20 of --comparisons]
    #[arg(long, value_name = "COUNT")]
    sham: Option<usize>,
    /// Time of a comparison's round, after which undecided cases are inconclusive
    #[arg(long, value_name = "TIME", default_value = "3m", value_parser = parse_duration)]
    budget: Duration,
    /// Time limit of the calibration, builds included; a comparison that may take longer is not
    /// started, and --resume continues. The estimate is the longest comparison so far, at first
    /// --budget
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    total_time: Option<Duration>,
    /// Largest number of cases that are chosen where none are named
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    cases: usize,
    #[command(flatten)]
    flags: ComparisonFlags,
    /// Continue the last calibration, which was interrupted or ran out of time
    #[arg(long)]
    resume: bool,
    /// Merge the files of shards, or of several calibrations, and measure nothing
    #[arg(
        long,
        value_name = "FILE",
        num_args = 1..,
        conflicts_with_all = ["filter", "bench", "dir", "resume", "shard"]
    )]
    merge: Vec<PathBuf>,
    /// File to write, also if the calibration is not complete [default:
    /// baselines/DEVICE/calibration.json, of a part kernelgate/calibrate/part-I-of-N.json of the
    /// target folder]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

impl CalibrateArguments {
    fn sham_comparisons(&self) -> usize {
        self.sham.unwrap_or(self.comparisons / 20)
    }
}

/// Flags about this machine's files and output, which do not change the measurement.
const LOCAL_ONLY_FLAGS: &[&str] = &["--dir", "--output", "--baselines", "--records", "--format"];

/// JSON output of a calibration: counts and recommendations, without times.
#[derive(serde::Serialize)]
struct CalibrationReportJson<'a> {
    calibration: &'a Path,
    summary: CalibrationSummary,
    recommended: Option<&'a crate::gate::calibration::RecommendedThresholds>,
}

pub fn run(arguments: &CalibrateArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    if !arguments.merge.is_empty() {
        return merge_calibration_files(arguments, store);
    }
    check_arguments(arguments)?;
    let folder = store.work.join("calibrate");
    let state = match arguments.flags.settings.shard() {
        Some(shard) => folder.join(format!("part-{}.json", shard.shard_file_label())),
        None => folder.join("state.json"),
    };
    let basis = PlanBasis::Fixed(TestPlan::default());
    let request = ComparisonRequest {
        base: arguments.dir.clone().map_or(SideSource::WorkTree, SideSource::Folder),
        filter: arguments.filter.clone(),
        time_identical: true,
        ..arguments.flags.request(store, basis, arguments.budget, folder)?
    };
    let measured = TestPlan::default().overridden_by(&request.plan.asked, request.plan.max_blocks);
    let settings = CalibrationRequest {
        null: arguments.comparisons,
        layouts: arguments.layouts,
        injected: arguments.inject.clone(),
        work: arguments.work.clone(),
        each: arguments.power_comparisons,
        single: arguments.single,
        sham: arguments.sham_comparisons(),
        shard: arguments.flags.settings.shard(),
        plan: measured,
        cases: arguments.cases,
        named: selects_cases(arguments),
        total: arguments.total_time,
        command: shell_command_line(arguments_of_process(), LOCAL_ONLY_FLAGS, &["--resume"]),
        state: state.clone(),
        resume: arguments.resume,
    };
    let (calibration, left) =
        calibrate::run_calibration(&request, &settings).map_err(Refusal::or_error)?;
    let save = |path: &Path| file::write(path, &calibration);
    if left > 0 {
        arguments.output.as_deref().map(save).transpose()?;
        print_calibration(arguments.format, &calibration, &state)?;
        eprintln!(
            "{left} comparisons are left: the same command with --resume goes on; so far in {}",
            state.display()
        );
        return Ok(ExitReason::Inconclusive);
    }
    let otherwise = if arguments.flags.settings.shard().is_some() {
        state
    } else {
        store.calibration_path(&calibration.environment.baseline_folder_name())
    };
    let output = arguments.output.clone().unwrap_or(otherwise);
    save(&output)?;
    print_calibration(arguments.format, &calibration, &output)?;
    Ok(ExitReason::Fine)
}

const fn selects_cases(arguments: &CalibrateArguments) -> bool {
    arguments.filter.is_some() || arguments.flags.settings.names_axes()
}

fn check_arguments(arguments: &CalibrateArguments) -> anyhow::Result<()> {
    for (flag, percents) in [("--inject", &arguments.inject), ("--work", &arguments.work)] {
        for percent in percents {
            anyhow::ensure!(
                *percent > 0.0 && *percent <= 1000.0,
                "{flag} takes percentages above 0, up to 1000, not {percent}"
            );
        }
    }
    for (flag, count) in [
        ("--comparisons", arguments.comparisons),
        ("--power-comparisons", arguments.power_comparisons),
        ("--single", arguments.single),
        ("--layouts", arguments.layouts),
        ("--sham", arguments.sham_comparisons()),
    ] {
        anyhow::ensure!(count <= 100_000, "{flag} takes a number up to 100000");
    }
    anyhow::ensure!(arguments.cases > 0, "--cases takes a number from 1");
    refuse_injected_changes()?;
    CaseFilter::parse(arguments.filter.as_deref(), false)?;
    anyhow::ensure!(
        arguments.flags.settings.shard().is_none() || selects_cases(arguments),
        "--shard needs a filter or --axis: which cases are short enough may differ from part to \
         part"
    );
    Ok(())
}

fn merge_calibration_files(
    arguments: &CalibrateArguments,
    store: &BaselineStore,
) -> anyhow::Result<ExitReason> {
    let merged = merged_calibration(&arguments.merge)?;
    let output = write_calibration(&merged, arguments.output.as_deref(), store)?;
    print_calibration(arguments.format, &merged, &output)?;
    Ok(ExitReason::Fine)
}

/// Writes a merged calibration to its file and prints it.
pub fn save_and_print(
    merged: &Calibration,
    output: Option<&Path>,
    store: &BaselineStore,
) -> anyhow::Result<()> {
    let output = write_calibration(merged, output, store)?;
    print_calibration(OutputFormat::Text, merged, &output)
}

/// Merges the calibrations in files.
fn merged_calibration(files: &[PathBuf]) -> anyhow::Result<Calibration> {
    let mut merged: Option<Calibration> = None;
    for path in files {
        let read: Calibration = file::read(path)?;
        match &mut merged {
            None => merged = Some(read),
            Some(merged) => {
                if let Err(differs) = merged.merge(read) {
                    let (other, first) = (path.display(), files[0].display());
                    let why = format!("{other} is of something else than {first}: {differs}");
                    return Err(Refusal::message(why).into());
                }
            }
        }
    }
    let mut merged = merged.context("--merge takes files")?;
    merged.derive_thresholds();
    Ok(merged)
}

/// Writes a calibration, and returns the path.
fn write_calibration(
    merged: &Calibration,
    output: Option<&Path>,
    store: &BaselineStore,
) -> anyhow::Result<PathBuf> {
    let usual = || store.calibration_path(&merged.environment.baseline_folder_name());
    let output = output.map_or_else(usual, Path::to_owned);
    file::write(&output, merged)?;
    Ok(output)
}

fn print_calibration(
    format: OutputFormat,
    calibration: &Calibration,
    at: &Path,
) -> anyhow::Result<()> {
    match format {
        OutputFormat::Text => {
            terminal::print_wrapped(&calibration::text(calibration, terminal::terminal_columns()))
        }
        OutputFormat::Markdown => println!("{}", calibration::markdown(calibration)),
        OutputFormat::Json => print_json(&CalibrationReportJson {
            calibration: at,
            summary: summarise_calibration(calibration),
            recommended: calibration.recommended.as_ref(),
        })?,
    }
    eprintln!("written to {}", printable_path(at));
    Ok(())
}
