//! `kernelgate baseline`: saves, lists, shows, extends, imports and exports the committed
//! baselines.

use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::benches::bench_requests::{self, BenchRequestSettings};
use crate::verbs::correct::numerics;
use crate::verbs::shared::bench_flags::BenchExecutableFlags;
use crate::verbs::shared::case_selection::error_for_unexpected_response;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::output::{OutputFormat, print_as_json, refuse_to_overwrite_input};
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::sessions::SessionSelectionFlags;
use crate::verbs::shared::settings::BenchSettingsFlags;
use kernelgate::display::harmless_text::EscapedForCsv;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{counted_noun, time_text};
use kernelgate::exit::ProcessExitReason;
use kernelgate::protocol::{RequestedBenchAction, ResponseToBenchAction};
use kernelgate::record::environment::IncomparableEnvironmentField;
use kernelgate::record::store::check_baseline_file_name;
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseSummaryOfRun, ExclusiveFileLock, MeasurementOfRuns,
    RecordFoldersOfPackage, RunEnvironment, file,
};
use kernelgate::stats::median;

/// Time within which a bench process must answer which device it uses.
const DEVICE_QUERY_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, clap::Subcommand)]
pub enum BaselineSubverb {
    /// Run `cargo bench` several times and make a baseline of the runs
    Save(super::save::SaveBaselineArguments),
    /// List baselines with device, age and cases, and broken files
    #[command(name = "list")]
    ListBaselines {
        /// How to print
        #[arg(long, value_enum, default_value = "text")]
        format: OutputFormat,
    },
    /// Print the path of this machine's baseline
    ///
    /// `gate` would use this baseline for the device. Exits with code 2 if this device has no
    /// baseline of that name.
    #[command(name = "find")]
    FindBaselinePath {
        /// Name of the baseline
        #[arg(id = "name", value_name = "NAME")]
        baseline_name: String,
        #[command(flatten)]
        settings: BenchSettingsFlags,
        #[command(flatten)]
        benches: BenchExecutableFlags,
    },
    /// Show the cases of one baseline with their times
    #[command(name = "show")]
    ShowBaselineCases {
        /// Name of the baseline
        #[arg(id = "name", value_name = "NAME")]
        baseline_name: String,
        /// Folder of the device in baselines/ [default: the device of this machine]
        #[arg(id = "device", value_name = "DEVICE", long = "device")]
        device_folder: Option<String>,
        /// How to print
        #[arg(long, value_enum, default_value = "text")]
        format: OutputFormat,
    },
    /// Add the last run to a baseline
    ///
    /// With several process runs `gate` finds smaller changes.
    #[command(name = "add")]
    AddLastRun {
        /// Name of the baseline, which is created if it does not exist
        #[arg(id = "name", value_name = "NAME")]
        baseline_name: String,
        #[command(flatten)]
        sessions: SessionSelectionFlags,
    },
    /// Check a baseline file and copy it to where `gate` reads it
    #[command(name = "import")]
    ImportBaselineFile {
        /// File of a baseline
        #[arg(id = "file", value_name = "FILE")]
        baseline_file: PathBuf,
        /// Name of the copied baseline [default: the name in the file]
        #[arg(id = "name", value_name = "NAME", long = "name")]
        new_baseline_name: Option<String>,
        /// Replace an existing baseline of that name
        #[arg(long = "force")]
        replaces_existing: bool,
    },
    /// Accept a baseline file edited or merged by hand: write its checksum again
    #[command(name = "seal")]
    RewriteChecksum {
        /// File of a baseline
        #[arg(id = "file", value_name = "FILE")]
        baseline_file: PathBuf,
    },
    /// Copy a baseline to a file, as JSON or as CSV with one line per case and run
    #[command(name = "export")]
    ExportBaselineToFile {
        /// Name of the baseline
        #[arg(id = "name", value_name = "NAME")]
        baseline_name: String,
        /// File to which the baseline is written, with the ending .json or .csv
        #[arg(id = "file", value_name = "FILE")]
        export_file: PathBuf,
        /// Folder of the device in baselines/ [default: the device of this machine]
        #[arg(id = "device", value_name = "DEVICE", long = "device")]
        device_folder: Option<String>,
    },
}

pub fn run_baseline_command(
    verb: &BaselineSubverb,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    match verb {
        BaselineSubverb::Save(arguments) => {
            super::save::run_baseline_save_command(arguments, store)
        }
        BaselineSubverb::FindBaselinePath { baseline_name: name, settings, benches } => {
            print_baseline_path_of_this_device(store, name, settings, benches)
        }
        BaselineSubverb::RewriteChecksum { baseline_file: file } => renew_baseline_checksum(file),
        BaselineSubverb::ListBaselines { format } => print_baselines(store, *format),
        BaselineSubverb::ShowBaselineCases {
            baseline_name: name,
            device_folder: device,
            format,
        } => print_cases_of_baseline(
            &read_baseline_of_device(store, device.as_deref(), name)?,
            *format,
        ),
        BaselineSubverb::AddLastRun { baseline_name: name, sessions } => {
            add_runs_to_baseline(store, name, sessions.read_runs_of_package(store)?)
        }
        BaselineSubverb::ImportBaselineFile {
            baseline_file: file,
            new_baseline_name: name,
            replaces_existing: force,
        } => import_baseline_file(store, file, name.as_deref(), *force),
        BaselineSubverb::ExportBaselineToFile {
            baseline_name: name,
            export_file: file,
            device_folder: device,
        } => {
            let device = device_folder_of_baseline(store, device.as_deref(), name)?;
            refuse_to_overwrite_input("the export", file, &store.path_of_baseline(&device, name)?)?;
            export_baseline_as_csv(&store.read_baseline(&device, name)?, file)
        }
    }
}

fn read_baseline_of_device(
    store: &RecordFoldersOfPackage,
    device: Option<&str>,
    name: &str,
) -> anyhow::Result<BaselineFile> {
    Ok(store.read_baseline(&device_folder_of_baseline(store, device, name)?, name)?)
}

/// Returns the named device, or the only device that has a baseline of that name, or the CPU of
/// this machine.
fn device_folder_of_baseline(
    store: &RecordFoldersOfPackage,
    device: Option<&str>,
    name: &str,
) -> anyhow::Result<String> {
    if let Some(device) = device {
        check_baseline_file_name(device).map_err(|_| {
            anyhow::anyhow!("--device {device}: no folder of baselines has such a name")
        })?;
        return Ok(device.to_owned());
    }
    let devices: Vec<String> = store
        .list_baseline_files()?
        .into_iter()
        .filter(|file| file.1 == name)
        .map(|file| file.0)
        .collect();
    Ok(match &devices[..] {
        [only] => only.clone(),
        _ => RunEnvironment::environment_of_process_on_cpu().baseline_folder_of_device_and_count(),
    })
}

fn print_baseline_path_of_this_device(
    store: &RecordFoldersOfPackage,
    name: &str,
    settings: &BenchSettingsFlags,
    benches: &BenchExecutableFlags,
) -> anyhow::Result<ProcessExitReason> {
    // The name of the baseline is checked before benches are built to find out the device.
    check_baseline_file_name(name)?;
    let running = &interrupt::kill_child_and_exit_on_interrupt()?;
    let found = benches.find_selected_benches(&store.package_root, running)?;
    let settings = settings.bench_environment_variables();
    let asking = BenchRequestSettings {
        bench_variables: settings,
        criterion_filter: None,
        response_timeout: DEVICE_QUERY_TIMEOUT,
        running_child: running,
    };
    // All benches of a supported device run on that device, so the first answer decides.
    let mut devices: Vec<String> = Vec::new();
    for (bench, answer) in bench_requests::request_from_all_benches(
        &found,
        &asking,
        &RequestedBenchAction::ReportEnvironment,
    )? {
        let ResponseToBenchAction::Environment(environment) = answer else {
            return Err(error_for_unexpected_response(&bench));
        };
        devices.push(environment.baseline_folder_of_device_and_count());
    }
    devices.dedup();
    let baselines = devices
        .iter()
        .map(|device| store.read_baseline(device, name).map(|_| device))
        .collect::<Vec<_>>();
    let device = match baselines.into_iter().reduce(|first, next| first.or(next)) {
        Some(found) => found?,
        None => anyhow::bail!("no bench says what it runs on"),
    };
    println!("{}", store.path_of_baseline(device, name)?.display());
    Ok(ProcessExitReason::Success)
}

fn add_runs_to_baseline(
    store: &RecordFoldersOfPackage,
    name: &str,
    runs: Vec<BenchProcessRun>,
) -> anyhow::Result<ProcessExitReason> {
    let measurement = MeasurementOfRuns::from_matching_runs(runs)
        .map_err(RefusalToCompare::refusal_printed_on_stdout)?;
    for missing in measurement.shards_without_run() {
        eprintln!("warning: {missing} is missing: the baseline gets the cases of the others");
    }
    let runs = measurement.process_runs_of_measurement();
    let path = store.path_of_baseline(&measurement.baseline_folder_of_device(), name)?;
    let _lock = ExclusiveFileLock::acquire_lock_for_file(&path)?;
    let mut baseline = BaselineFile::read_or_create_empty(&path, name)?;
    anyhow::ensure!(
        runs.iter().any(|run| !run.cases.is_empty()),
        "no case was measured: there is nothing to add"
    );
    for run in runs.iter().filter(|run| !run.ended_normally) {
        eprintln!(
            "warning: the run {} did not get to its end: only its {} finished cases are added",
            run.key_in_baseline(),
            run.cases.len()
        );
    }
    for run in runs.iter().filter(|run| run.commit_is_from_variable) {
        eprintln!(
            "the commit {} of the run {} is as KERNELGATE_COMMIT stated it",
            run.provenance.short_commit_with_changes_mark(),
            run.key_in_baseline()
        );
    }
    for run in runs.iter().filter(|run| !run.cases.is_empty()) {
        if let Err(differing) = baseline.add_comparable_run(run) {
            for IncomparableEnvironmentField {
                field_name: field,
                base_value: base,
                head_value: head,
            } in differing
            {
                println!(
                    "refused: {field} is `{base}` in the baseline and `{head}` in the run {}",
                    run.key_in_baseline()
                );
            }
            return Ok(ProcessExitReason::ResultsNotComparable);
        }
    }
    for record in store.read_output_errors_of_executables(runs)? {
        numerics::print_errors_saved_in_baseline(
            &record,
            baseline.add_output_errors_by_seed(&record),
        );
    }
    file::write_record_atomically(&path, &baseline)?;
    let most = baseline.cases.values().map(|case| case.runs.len()).max().unwrap_or_default();
    println!(
        "{}, up to {most} runs each, in {}",
        counted_noun(baseline.cases.len(), "case"),
        path_for_terminal(&path)
    );
    Ok(ProcessExitReason::Success)
}

#[derive(Debug, Default, Serialize)]
struct ListedBaselineJson {
    #[serde(rename = "device")]
    device_folder: String,
    #[serde(rename = "name")]
    baseline_name: String,
    #[serde(rename = "cases")]
    case_count: usize,
    #[serde(rename = "runs")]
    run_count: usize,
    /// Start time of the newest process run in the baseline.
    #[serde(rename = "newest")]
    newest_run_start: Option<String>,
    #[serde(rename = "commit")]
    newest_run_commit: Option<String>,
    /// The reason why the baseline file cannot be used; `None` if it can.
    #[serde(rename = "error")]
    unusable_reason: Option<String>,
}

fn print_baselines(
    store: &RecordFoldersOfPackage,
    format: OutputFormat,
) -> anyhow::Result<ProcessExitReason> {
    let files = store.list_baseline_files()?;
    let mut listed = Vec::new();
    for (device, name, path) in files {
        let mut row = ListedBaselineJson {
            device_folder: device,
            baseline_name: name,
            ..ListedBaselineJson::default()
        };
        match file::read_record::<BaselineFile>(&path) {
            Ok(baseline) => {
                let newest = baseline.runs.values().max_by(|a, b| a.start_time.cmp(&b.start_time));
                row.case_count = baseline.cases.len();
                row.run_count = baseline.runs.len();
                row.newest_run_start = newest.map(|run| run.start_time.clone());
                row.newest_run_commit =
                    newest.map(|run| run.provenance.short_commit_with_changes_mark());
            }
            Err(error) => row.unusable_reason = Some(error.to_string()),
        }
        listed.push(row);
    }
    let broken = listed.iter().any(|row| row.unusable_reason.is_some());
    if format == OutputFormat::Json {
        print_as_json(&listed)?;
    } else {
        let mut table = AlignedTextTable::new(&["baseline", "cases", "runs", "newest", "commit"]);
        for row in listed.iter().filter(|row| row.unusable_reason.is_none()) {
            table.add_row(vec![
                format!("{}/{}", row.device_folder, row.baseline_name),
                row.case_count.to_string(),
                row.run_count.to_string(),
                row.newest_run_start.clone().unwrap_or_else(|| "-".to_owned()),
                row.newest_run_commit.clone().unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        if listed.is_empty() {
            println!(
                "no baselines in {}: `cargo bench -- --save-baseline NAME` makes one",
                store.baselines_folder.display()
            );
        } else {
            println!("{}", format.format_table(&table));
        }
        listed
            .iter()
            .filter_map(|row| row.unusable_reason.as_ref())
            .for_each(|error| println!("broken: {}", clean_message_for_terminal(error)));
    }
    Ok(if broken { ProcessExitReason::InvalidUsageOrInput } else { ProcessExitReason::Success })
}

fn print_cases_of_baseline(
    baseline: &BaselineFile,
    format: OutputFormat,
) -> anyhow::Result<ProcessExitReason> {
    if format == OutputFormat::Json {
        print!("{}", file::json_text_of_record(baseline));
        return Ok(ProcessExitReason::Success);
    }
    for (key, run) in &baseline.runs {
        println!(
            "run {key}: {}, {}, {} threads, {}{}",
            run.start_time,
            run.environment.device_name,
            run.environment.cpu_backend_threads,
            run.provenance.short_commit_with_changes_mark(),
            if run.user_stated_commit { " (as stated)" } else { "" }
        );
    }
    let mut table = AlignedTextTable::new(&["case", "time", "spread", "runs"]);
    for (id, case) in &baseline.cases {
        let medians: Vec<f64> = case.runs.values().map(|run| run.median_launch_ns).collect();
        let relative: Vec<f64> =
            case.runs.values().map(|run| run.relative_half_interquartile_range).collect();
        table.add_row(vec![
            id.clone(),
            time_text(median(&medians)),
            format!("±{:.1}%", 100.0 * median(&relative)),
            case.runs.len().to_string(),
        ]);
    }
    println!("\n{}", format.format_table(&table));
    Ok(ProcessExitReason::Success)
}

fn import_baseline_file(
    store: &RecordFoldersOfPackage,
    from: &Path,
    name: Option<&str>,
    force: bool,
) -> anyhow::Result<ProcessExitReason> {
    let mut baseline: BaselineFile = file::read_record(from)?;
    anyhow::ensure!(!baseline.cases.is_empty(), "{} holds no case", from.display());
    let devices: std::collections::BTreeSet<String> = baseline
        .runs
        .values()
        .map(|run| run.environment.baseline_folder_of_device_and_count())
        .collect();
    anyhow::ensure!(
        devices.len() == 1,
        "{} holds runs of {} devices, a baseline has one",
        from.display(),
        devices.len()
    );
    if let Some(name) = name {
        baseline.baseline_name = name.to_owned();
    }
    let device = devices.into_iter().next().unwrap_or_default();
    let path = store.path_of_baseline(&device, &baseline.baseline_name)?;
    let _lock = ExclusiveFileLock::acquire_lock_for_file(&path)?;
    anyhow::ensure!(force || !path.exists(), "{} exists: --force replaces it", path.display());
    if !file::file_contains_checksum(from) {
        eprintln!(
            "warning: {} has no checksum, so that nobody knows whether it was edited: it is \
             taken as it is",
            from.display()
        );
    }
    file::write_record_atomically(&path, &baseline)?;
    println!("{} to {}", counted_noun(baseline.cases.len(), "case"), path_for_terminal(&path));
    Ok(ProcessExitReason::Success)
}

fn renew_baseline_checksum(path: &Path) -> anyhow::Result<ProcessExitReason> {
    let path = &file::resolve_symbolic_link(path);
    // If the file does not exist, no lock is taken, because the error of the read that follows
    // names the problem best.
    let _lock =
        path.is_file().then(|| ExclusiveFileLock::acquire_lock_for_file(path)).transpose()?;
    let baseline: BaselineFile = file::read_record_ignoring_checksum(path)?;
    file::write_record_atomically(path, &baseline)?;
    let cases = counted_noun(baseline.cases.len(), "case");
    println!("sealed without change: {cases} in {}", path_for_terminal(path));
    Ok(ProcessExitReason::Success)
}

fn export_baseline_as_csv(baseline: &BaselineFile, to: &Path) -> anyhow::Result<ProcessExitReason> {
    let text = match to.extension().and_then(|ending| ending.to_str()) {
        Some("json") => file::json_text_of_record(baseline),
        Some("csv") => baseline_as_csv(baseline),
        _ => anyhow::bail!("{}: the ending says the format: .json or .csv", to.display()),
    };
    file::write_text_atomically(to, &text)?;
    println!("{} to {}", counted_noun(baseline.cases.len(), "case"), path_for_terminal(to));
    Ok(ProcessExitReason::Success)
}

/// A field of a CSV file, quoted as RFC 4180 demands if it contains a comma, quotation mark or line
/// break.
fn quoted_csv_field(text: &str) -> String {
    let text = EscapedForCsv(text).to_string();
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// The runs of a baseline as CSV, with one line for each case and run.
fn baseline_as_csv(baseline: &BaselineFile) -> String {
    let mut text = "case,run,samples,launches,median_ns,spread\n".to_owned();
    for (id, case) in &baseline.cases {
        for (
            run,
            CaseSummaryOfRun {
                sample_count: samples,
                total_launches,
                median_launch_ns: median_ns,
                relative_half_interquartile_range: spread,
                ..
            },
        ) in &case.runs
        {
            let (id, run) = (quoted_csv_field(id), quoted_csv_field(run));
            text.push_str(&format!("{id},{run},{samples},{total_launches},{median_ns},{spread}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_csv_cell_is_quoted_only_if_necessary() {
        assert_eq!(
            ["a/b", "a,b", "a \"b\""].map(quoted_csv_field),
            ["a/b", "\"a,b\"", "\"a \"\"b\"\"\""]
        );
    }
}
