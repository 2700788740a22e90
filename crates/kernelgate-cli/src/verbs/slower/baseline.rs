//! The verb `kernelgate baseline`, which manages the committed baselines.

use kernelgate::record::text::{printable_on_terminal, printable_path};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::benches::bench_requests::{self, RequestSettings};
use crate::verbs::correct::numerics;
use crate::verbs::shared::bench_flags::BenchFlags;
use crate::verbs::shared::case_selection::unexpected_response;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::output::{OutputFormat, print_json, refuse_overwriting_source};
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::sessions::SelectedSessions;
use crate::verbs::shared::settings::BenchProcessSettings;
use kernelgate::display::harmless_text::CsvText;
use kernelgate::display::table::TextTable;
use kernelgate::display::{counted_noun, time_text};
use kernelgate::exit::ExitReason;
use kernelgate::protocol::{BenchResponseBody, RequestedAction};
use kernelgate::record::environment::EnvironmentMismatch;
use kernelgate::record::store::check_path_component;
use kernelgate::record::{
    Baseline, BaselineStore, CaseRun, Environment, FileLock, Measurement, ProcessRun, file,
};
use kernelgate::stats::median;

/// Timeout of a bench that is asked for its device.
const DEVICE_ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, clap::Subcommand)]
pub enum BaselineVerb {
    /// Run the benches several times and make a baseline of it
    Save(super::save::SaveArguments),
    /// List baselines with device, age and cases, and broken files
    List {
        /// How to print
        #[arg(long, value_enum, default_value = "text")]
        format: OutputFormat,
    },
    /// Print the path of this machine's baseline
    ///
    /// `gate` would use this baseline for the device. Exits with 2 if the device has no such
    /// baseline.
    Find {
        /// Name of the baseline
        name: String,
        #[command(flatten)]
        settings: BenchProcessSettings,
        #[command(flatten)]
        benches: BenchFlags,
    },
    /// Show the cases of one baseline
    Show {
        /// Name of the baseline
        name: String,
        /// Folder of the device in baselines/ [default: that of this machine]
        #[arg(long)]
        device: Option<String>,
        /// How to print
        #[arg(long, value_enum, default_value = "text")]
        format: OutputFormat,
    },
    /// Add the last run to a baseline
    ///
    /// With several process runs `gate` finds smaller changes.
    Add {
        /// Name of the baseline; a missing one is created
        name: String,
        #[command(flatten)]
        sessions: SelectedSessions,
    },
    /// Check a baseline file and copy it to where `gate` reads it
    Import {
        /// File of a baseline
        file: PathBuf,
        /// Name of the copy [default: the one in the file]
        #[arg(long)]
        name: Option<String>,
        /// Replace a baseline of that name
        #[arg(long)]
        force: bool,
    },
    /// Accept a baseline file that was edited or merged by hand
    Seal {
        /// File of a baseline
        file: PathBuf,
    },
    /// Copy a baseline to a file, as JSON or as a CSV with one line per case and run
    Export {
        /// Name of the baseline
        name: String,
        /// File to write, with the ending .json or .csv
        file: PathBuf,
        /// Folder of the device in baselines/ [default: that of this machine]
        #[arg(long)]
        device: Option<String>,
    },
}

pub fn run(verb: &BaselineVerb, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    match verb {
        BaselineVerb::Save(arguments) => super::save::run(arguments, store),
        BaselineVerb::Find { name, settings, benches } => {
            find_baseline(store, name, settings, benches)
        }
        BaselineVerb::Seal { file } => seal_baseline(file),
        BaselineVerb::List { format } => list_baselines(store, *format),
        BaselineVerb::Show { name, device, format } => {
            print_baseline(&read(store, device.as_deref(), name)?, *format)
        }
        BaselineVerb::Add { name, sessions } => add(store, name, sessions.read(store)?),
        BaselineVerb::Import { file, name, force } => {
            import_baseline(store, file, name.as_deref(), *force)
        }
        BaselineVerb::Export { name, file, device } => {
            let device = device_of_baseline(store, device.as_deref(), name)?;
            refuse_overwriting_source("the export", file, &store.baseline_path(&device, name)?)?;
            export_csv(&store.baseline(&device, name)?, file)
        }
    }
}

fn read(store: &BaselineStore, device: Option<&str>, name: &str) -> anyhow::Result<Baseline> {
    Ok(store.baseline(&device_of_baseline(store, device, name)?, name)?)
}

/// Returns the named device, or the only device with a baseline of that name, or the CPU of this
/// machine.
fn device_of_baseline(
    store: &BaselineStore,
    device: Option<&str>,
    name: &str,
) -> anyhow::Result<String> {
    if let Some(device) = device {
        check_path_component(device).map_err(|_| {
            anyhow::anyhow!("--device {device}: no folder of baselines has such a name")
        })?;
        return Ok(device.to_owned());
    }
    let devices: Vec<String> = store
        .baseline_files()?
        .into_iter()
        .filter(|file| file.1 == name)
        .map(|file| file.0)
        .collect();
    Ok(match &devices[..] {
        [only] => only.clone(),
        _ => Environment::cpu().baseline_folder_name(),
    })
}

fn find_baseline(
    store: &BaselineStore,
    name: &str,
    settings: &BenchProcessSettings,
    benches: &BenchFlags,
) -> anyhow::Result<ExitReason> {
    // The name is checked before benches are built to find the device.
    check_path_component(name)?;
    let running = &interrupt::watched_processes()?;
    let found = benches.find(&store.root, running)?;
    let settings = settings.variables();
    let asking =
        RequestSettings { settings, filter: None, timeout: DEVICE_ANSWER_TIMEOUT, running };
    // Every bench of a supported device runs on that device.
    let mut devices: Vec<String> = Vec::new();
    for (bench, answer) in
        bench_requests::ask_all_benches(&found, &asking, &RequestedAction::Environment)?
    {
        let BenchResponseBody::Environment(environment) = answer else {
            return Err(unexpected_response(&bench));
        };
        devices.push(environment.baseline_folder_name());
    }
    devices.dedup();
    let baselines = devices
        .iter()
        .map(|device| store.baseline(device, name).map(|_| device))
        .collect::<Vec<_>>();
    let device = match baselines.into_iter().reduce(|first, next| first.or(next)) {
        Some(found) => found?,
        None => anyhow::bail!("no bench says what it runs on"),
    };
    println!("{}", store.baseline_path(device, name)?.display());
    Ok(ExitReason::Fine)
}

fn add(store: &BaselineStore, name: &str, runs: Vec<ProcessRun>) -> anyhow::Result<ExitReason> {
    let measurement = Measurement::from_runs(runs).map_err(Refusal::result)?;
    for missing in measurement.missing_shards() {
        eprintln!("warning: {missing} is missing: the baseline gets the cases of the others");
    }
    let runs = measurement.process_runs();
    let path = store.baseline_path(&measurement.device_folder(), name)?;
    let _lock = FileLock::acquire_for_file(&path)?;
    let mut baseline = Baseline::open_or_empty(&path, name)?;
    anyhow::ensure!(
        runs.iter().any(|run| !run.cases.is_empty()),
        "no case was measured: there is nothing to add"
    );
    for run in runs.iter().filter(|run| !run.complete) {
        eprintln!(
            "warning: the run {} did not get to its end: only its {} finished cases are added",
            run.baseline_key(),
            run.cases.len()
        );
    }
    for run in runs.iter().filter(|run| run.stated_commit) {
        eprintln!(
            "the commit {} of the run {} is as KERNELGATE_COMMIT stated it",
            run.provenance.short_commit(),
            run.baseline_key()
        );
    }
    for run in runs.iter().filter(|run| !run.cases.is_empty()) {
        if let Err(differing) = baseline.add(run) {
            for EnvironmentMismatch { field, base, head } in differing {
                println!(
                    "refused: {field} is `{base}` in the baseline and `{head}` in the run {}",
                    run.baseline_key()
                );
            }
            return Ok(ExitReason::Refused);
        }
    }
    for record in store.numerics(runs)? {
        numerics::print_saved_errors(&record, baseline.add_seed_errors(&record));
    }
    file::write(&path, &baseline)?;
    let most = baseline.cases.values().map(|case| case.runs.len()).max().unwrap_or_default();
    println!(
        "{}, up to {most} runs each, in {}",
        counted_noun(baseline.cases.len(), "case"),
        printable_path(&path)
    );
    Ok(ExitReason::Fine)
}

#[derive(Debug, Default, Serialize)]
struct ListedBaselineJson {
    device: String,
    name: String,
    cases: usize,
    runs: usize,
    /// Start time of the newest run.
    newest: Option<String>,
    commit: Option<String>,
    /// The reason why the file cannot be used.
    error: Option<String>,
}

fn list_baselines(store: &BaselineStore, format: OutputFormat) -> anyhow::Result<ExitReason> {
    let files = store.baseline_files()?;
    let mut listed = Vec::new();
    for (device, name, path) in files {
        let mut row = ListedBaselineJson { device, name, ..ListedBaselineJson::default() };
        match file::read::<Baseline>(&path) {
            Ok(baseline) => {
                let newest = baseline.runs.values().max_by(|a, b| a.started.cmp(&b.started));
                row.cases = baseline.cases.len();
                row.runs = baseline.runs.len();
                row.newest = newest.map(|run| run.started.clone());
                row.commit = newest.map(|run| run.provenance.short_commit());
            }
            Err(error) => row.error = Some(error.to_string()),
        }
        listed.push(row);
    }
    let broken = listed.iter().any(|row| row.error.is_some());
    if format == OutputFormat::Json {
        print_json(&listed)?;
    } else {
        let mut table = TextTable::new(&["baseline", "cases", "runs", "newest", "commit"]);
        for row in listed.iter().filter(|row| row.error.is_none()) {
            table.row(vec![
                format!("{}/{}", row.device, row.name),
                row.cases.to_string(),
                row.runs.to_string(),
                row.newest.clone().unwrap_or_else(|| "-".to_owned()),
                row.commit.clone().unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        if listed.is_empty() {
            println!(
                "no baselines in {}: `cargo bench -- --save-baseline NAME` makes one",
                store.baselines.display()
            );
        } else {
            println!("{}", format.table(&table));
        }
        listed
            .iter()
            .filter_map(|row| row.error.as_ref())
            .for_each(|error| println!("broken: {}", printable_on_terminal(error)));
    }
    Ok(if broken { ExitReason::Usage } else { ExitReason::Fine })
}

fn print_baseline(baseline: &Baseline, format: OutputFormat) -> anyhow::Result<ExitReason> {
    if format == OutputFormat::Json {
        print!("{}", file::record_text(baseline));
        return Ok(ExitReason::Fine);
    }
    for (key, run) in &baseline.runs {
        println!(
            "run {key}: {}, {}, {} threads, {}{}",
            run.started,
            run.environment.device_name,
            run.environment.threads,
            run.provenance.short_commit(),
            if run.stated_commit { " (as stated)" } else { "" }
        );
    }
    let mut table = TextTable::new(&["case", "time", "spread", "runs"]);
    for (id, case) in &baseline.cases {
        let medians: Vec<f64> = case.runs.values().map(|run| run.median_ns).collect();
        let relative: Vec<f64> = case.runs.values().map(|run| run.spread).collect();
        table.row(vec![
            id.clone(),
            time_text(median(&medians)),
            format!("±{:.1}%", 100.0 * median(&relative)),
            case.runs.len().to_string(),
        ]);
    }
    println!("\n{}", format.table(&table));
    Ok(ExitReason::Fine)
}

fn import_baseline(
    store: &BaselineStore,
    from: &Path,
    name: Option<&str>,
    force: bool,
) -> anyhow::Result<ExitReason> {
    let mut baseline: Baseline = file::read(from)?;
    anyhow::ensure!(!baseline.cases.is_empty(), "{} holds no case", from.display());
    let devices: std::collections::BTreeSet<String> =
        baseline.runs.values().map(|run| run.environment.baseline_folder_name()).collect();
    anyhow::ensure!(
        devices.len() == 1,
        "{} holds runs of {} devices, a baseline has one",
        from.display(),
        devices.len()
    );
    if let Some(name) = name {
        baseline.name = name.to_owned();
    }
    let device = devices.into_iter().next().unwrap_or_default();
    let path = store.baseline_path(&device, &baseline.name)?;
    let _lock = FileLock::acquire_for_file(&path)?;
    anyhow::ensure!(force || !path.exists(), "{} exists: --force replaces it", path.display());
    if !file::has_checksum(from) {
        eprintln!(
            "warning: {} has no checksum, so that nobody knows whether it was edited: it is \
             taken as it is",
            from.display()
        );
    }
    file::write(&path, &baseline)?;
    println!("{} to {}", counted_noun(baseline.cases.len(), "case"), printable_path(&path));
    Ok(ExitReason::Fine)
}

fn seal_baseline(path: &Path) -> anyhow::Result<ExitReason> {
    let path = &file::follow_link(path);
    // Without the file, reading it gives the most helpful error.
    let _lock = path.is_file().then(|| FileLock::acquire_for_file(path)).transpose()?;
    let baseline: Baseline = file::read_without_checksum(path)?;
    file::write(path, &baseline)?;
    let cases = counted_noun(baseline.cases.len(), "case");
    println!("sealed without change: {cases} in {}", printable_path(path));
    Ok(ExitReason::Fine)
}

fn export_csv(baseline: &Baseline, to: &Path) -> anyhow::Result<ExitReason> {
    let text = match to.extension().and_then(|ending| ending.to_str()) {
        Some("json") => file::record_text(baseline),
        Some("csv") => csv(baseline),
        _ => anyhow::bail!("{}: the ending says the format: .json or .csv", to.display()),
    };
    file::write_text(to, &text)?;
    println!("{} to {}", counted_noun(baseline.cases.len(), "case"), printable_path(to));
    Ok(ExitReason::Fine)
}

/// A field of a CSV file, quoted by RFC 4180.
fn csv_cell(text: &str) -> String {
    let text = CsvText(text).to_string();
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// A CSV with one line for each case and run.
fn csv(baseline: &Baseline) -> String {
    let mut text = "case,run,samples,launches,median_ns,spread\n".to_owned();
    for (id, case) in &baseline.cases {
        for (run, CaseRun { samples, total_launches, median_ns, spread, .. }) in &case.runs {
            let (id, run) = (csv_cell(id), csv_cell(run));
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
        assert_eq!(["a/b", "a,b", "a \"b\""].map(csv_cell), ["a/b", "\"a,b\"", "\"a \"\"b\"\"\""]);
    }
}
