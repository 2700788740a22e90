//! `kernelgate report`: writes recorded runs as an HTML page, with its charts as image files and
//! its numbers as CSV and JSON.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::peers;
use crate::gate::baseline::BaselineJudgementSettings;
use crate::gate::rules::rules_file;
use crate::history::series::MIN_REPORTED_LEVEL_CHANGE;
use crate::history::{
    CaseHistoryQuery, CaseTimeHistory, GitCommitOrder, HistoryRecordStore, compute_case_histories,
};
use crate::pages::charts::ChartWithFileName;
use crate::pages::measured_runs::MeasurementsOfOneDevice;
use crate::pages::report::{self, CaseHistoriesOnPage};
use crate::pages::{results, tables};
use crate::report::verdicts;
use crate::verbs::shared::output::json_safe_for_terminals;
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::sessions::SessionSelectionFlags;
use crate::verbs::slower::gate;
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::record::file_set::ReplacementFileSet;
use kernelgate::record::store::RecordLookupError;
use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use kernelgate::record::{
    BaselineFile, BenchProcessRun, MeasurementOfRuns, RecordFileError, RecordFoldersOfPackage, file,
};

#[derive(Debug, clap::Args)]
pub struct ReportCommandArguments {
    /// Show only cases whose id matches this regular expression
    #[arg(id = "filter", value_name = "FILTER", conflicts_with_all = ["baseline", "results"])]
    case_id_regex: Option<String>,
    /// Runs or baselines in place of the last run: files, or folders of them (repeatable)
    #[arg(id = "runs", long = "runs", value_name = "PATH", num_args = 1.., conflicts_with_all = ["session", "last"])]
    run_and_baseline_paths: Vec<PathBuf>,
    #[command(flatten)]
    sessions: SessionSelectionFlags,
    /// Show verdicts against this baseline of the device: baselines/DEVICE/NAME.json
    #[arg(id = "baseline", long = "baseline", value_name = "NAME")]
    baseline_name: Option<String>,
    /// Show times of other libraries' kernels (peers) from this output of `kernelgate peers
    /// --format json`
    #[arg(id = "peers", long = "peers", value_name = "FILE")]
    peer_times_file: Option<PathBuf>,
    /// Show times over commits from this history store [default: as `kernelgate history`; with
    /// --runs none]
    #[arg(id = "store", long = "store", value_name = "DIR")]
    history_store_folder: Option<PathBuf>,
    /// In the times over commits, treat all GPUs of one model as one device, and all CPU hosts as
    /// one device
    #[arg(long = "join-cards")]
    join_cards_of_model: bool,
    /// Folder for index.html, plots/, cases.csv, history.csv and report.json [default:
    /// kernelgate/report/ of the target folder]
    #[arg(id = "out", long = "out", value_name = "DIR")]
    report_folder: Option<PathBuf>,
    /// Write Markdown pages of results into this folder instead, one per family: rows, peers,
    /// limits, clocks and power states; if pages of the folder mark tables by `<!-- results FILTER:
    /// COLUMN, COLUMN -->`, only these tables are filled
    #[arg(id = "results", long = "results", value_name = "DIR", conflicts_with_all = ["out", "baseline", "store"])]
    results_pages_folder: Option<PathBuf>,
}

pub fn run_report_command(
    arguments: &ReportCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let (runs, baselines) = match arguments.run_and_baseline_paths.is_empty() {
        true => (arguments.sessions.read_runs_of_package(store)?, Vec::new()),
        false => read_runs_and_baselines(&arguments.run_and_baseline_paths)?,
    };
    let measurements = MeasurementOfRuns::group_matching_runs_into_measurements(runs);
    let mut measured = MeasurementsOfOneDevice::join_runs_and_baselines(&measurements, &baselines)
        .map_err(RefusalToCompare::refusal_printed_on_stderr)?;
    if let Some(filter) = &arguments.case_id_regex {
        let filter = CaseIdFilter::parse_exact_id_or_regex(Some(filter), false)?;
        measured.retain_cases_by_id(|id| filter.selects_case_id(id));
        anyhow::ensure!(!measured.cases.is_empty(), "no case matches the filter");
    }
    if let Some(path) = &arguments.peer_times_file {
        let (device, times) = peers::read_device_and_peer_times(path)?;
        if device != measured.device {
            let cases = &measured.device;
            let why = format!("the peers were timed on {device}, the cases on {cases}");
            return Err(RefusalToCompare::refusal_printed_on_stderr(why).into());
        }
        measured.peers = times;
        let strangers = measured.peer_problems_without_case();
        if let Some(first) = strangers.first() {
            let (count, all) = (strangers.len(), measured.peers.len());
            let text = format!("--peers: {count} of {all} times are of no case here: {first} …");
            eprintln!("{}", clean_message_for_terminal(&text));
        }
    }
    if let Some(folder) = &arguments.results_pages_folder {
        return fill_or_write_result_tables(folder, &measured);
    }
    let verdict = match &arguments.baseline_name {
        None => None,
        Some(name) => {
            let measurement = MeasurementOfRuns::join_runs_of_measurements(measurements)
                .map_err(RefusalToCompare::refusal_printed_on_stderr)?;
            let judged = gate::judge_against_named_baseline(
                store,
                name,
                &measurement,
                BaselineJudgementSettings::default(),
            )?;
            Some(verdicts::verdict_report_summary(
                &judged,
                &gate::gate_commands_to_run_locally(name),
            ))
        }
    };
    let history = read_histories_for_page(arguments, store, &measured)?;
    let content = report::ReportPageContent {
        measured: &measured,
        history: history.as_ref(),
        verdict: verdict.as_ref(),
    };
    let page = report::report_page(&content)?;
    let kept = store.default_report_page_path();
    let folder = arguments.report_folder.as_deref().or(kept.parent()).unwrap_or(Path::new(""));
    let index = folder.join("index.html");
    let csv = tables::cases_as_csv(&measured).context("failed to write cases.csv")?;
    let mut files = vec![
        ("cases.csv", csv),
        ("report.json", json_safe_for_terminals(&tables::numbers_of_report_page(&content))?),
    ];
    if let Some(history) = &history {
        let csv = tables::histories_as_csv(&history.histories);
        files.push(("history.csv", csv.context("failed to write history.csv")?));
    }
    files.push(("index.html", page.page_html));
    let set = ReplacementFileSet::begin_file_set_for_folder(folder).context("--out")?;
    write_charts_as_svg_and_png(&set.temporary_folder_of_set().join("plots"), &page.figures)?;
    files
        .into_iter()
        .try_for_each(|(name, text)| set.add_synced_file(name, text))
        .context("--out")?;
    let absent: &[&str] = if history.is_some() { &[] } else { &["history.csv"] };
    set.replace_earlier_set(absent).context("--out")?;
    println!("{}", path_for_terminal(&index));
    Ok(ProcessExitReason::Success)
}

/// Fills the result tables that Markdown pages of the folder mark with comments; if no page marks a
/// table, writes a page for each family of workloads.
fn fill_or_write_result_tables(
    folder: &Path,
    measured: &MeasurementsOfOneDevice,
) -> anyhow::Result<ProcessExitReason> {
    let pages = results::results_pages_of_families(measured)
        .map_err(RefusalToCompare::refusal_printed_on_stderr)?;
    let filled = pages_with_filled_result_tables(folder, measured)?;
    if !filled.is_empty() {
        let texts = filled.iter().map(|(path, text)| (path.as_path(), text.as_str()));
        file::replace_files_after_writing_all(texts).context("--results")?;
        filled.iter().for_each(|(path, _)| println!("{}", path_for_terminal(path)));
        return Ok(ProcessExitReason::Success);
    }
    let write = || {
        let set = ReplacementFileSet::begin_file_set_for_folder(folder)?;
        pages
            .iter()
            .try_for_each(|page| set.add_synced_file(&page.page_file_name, &page.page_markdown))?;
        set.replace_earlier_set(&[])
    };
    write().context("--results")?;
    pages
        .iter()
        .for_each(|page| println!("{}", path_for_terminal(&folder.join(&page.page_file_name))));
    Ok(ProcessExitReason::Success)
}

/// Largest size in bytes of a Markdown page whose marked tables are filled.
const MAX_MARKDOWN_PAGE_BYTES: u64 = 1 << 20;

/// The text of each Markdown page of a folder that marks result tables, with these tables filled.
fn pages_with_filled_result_tables(
    folder: &Path,
    measured: &MeasurementsOfOneDevice,
) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let mut pages = Vec::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(pages) };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_none_or(|it| it != "md") {
            continue;
        }
        let named = || format!("--results: {}", path_for_terminal(&path));
        let text =
            file::read_untrusted_text_up_to(&path, MAX_MARKDOWN_PAGE_BYTES).with_context(named)?;
        if let Some(text) =
            results::fill_marked_tables_of_page(&text, measured).with_context(named)?
        {
            pages.push((path, text));
        }
    }
    pages.sort();
    Ok(pages)
}

/// Reads the times over commits of the page's cases and devices from the history store; `None`
/// without a store, or if the store has a single commit. If the default history store cannot be
/// used, the HTML page is made without times over commits.
fn read_histories_for_page(
    arguments: &ReportCommandArguments,
    store: &RecordFoldersOfPackage,
    measured: &MeasurementsOfOneDevice,
) -> anyhow::Result<Option<CaseHistoriesOnPage>> {
    if let Some(folder) = &arguments.history_store_folder {
        super::history::require_history_store(folder)?;
        return read_histories_from_store(
            &HistoryRecordStore::in_folder(folder),
            arguments,
            store,
            measured,
        );
    }
    let usual = HistoryRecordStore::with_runs_folder(&store.runs_folder);
    if !arguments.run_and_baseline_paths.is_empty()
        || !HistoryRecordStore::is_history_store_folder(usual.root_folder())
    {
        return Ok(None);
    }
    read_histories_from_store(&usual, arguments, store, measured).or_else(|error| {
        eprintln!("{}", clean_message_for_terminal(&format!("no times over commits: {error:#}")));
        Ok(None)
    })
}

fn read_histories_from_store(
    place: &HistoryRecordStore,
    arguments: &ReportCommandArguments,
    store: &RecordFoldersOfPackage,
    measured: &MeasurementsOfOneDevice,
) -> anyhow::Result<Option<CaseHistoriesOnPage>> {
    let (index, _) = place.update_and_return_index()?;
    let order = GitCommitOrder::ancestors_in_repository(&store.package_root, None)?;
    let query = CaseHistoryQuery {
        package: store.package.as_ref(),
        cases: &CaseIdFilter::AnyOfIds(
            measured.cases.iter().map(|case| case.case_id.clone()).collect(),
        ),
        current_ids_of_renamed_cases: &rules_file::read_rules_in_folder(&store.package_root)?
            .current_ids_of_renamed_cases,
        joins_cards_of_model: arguments.join_cards_of_model,
        only_known_commits: false,
        min_relative_level_change: MIN_REPORTED_LEVEL_CHANGE,
    };
    let mut histories = compute_case_histories(&index, &query, &order)?;
    let is_shown = |history: &CaseTimeHistory| {
        history.points.len() > 1
            && measured.environment_fingerprints.contains(&history.environment_fingerprint)
    };
    histories.retain(is_shown);
    let order = crate::report::history::commit_order_description(&histories, &order);
    Ok(Some(CaseHistoriesOnPage { histories, commit_order_phrase: order })
        .filter(|shown| !shown.histories.is_empty()))
}

/// Reads the process runs and baselines in these files and folders. A file of a folder that is
/// neither a run nor a baseline is skipped, with a message.
fn read_runs_and_baselines(
    paths: &[PathBuf],
) -> anyhow::Result<(Vec<BenchProcessRun>, Vec<BaselineFile>)> {
    let (mut runs, mut baselines) = (Vec::new(), Vec::new());
    for path in paths {
        let files =
            if path.is_dir() { json_files_two_levels_deep(path) } else { vec![path.clone()] };
        if files.is_empty() {
            return Err(RecordLookupError::NoRunRecorded(path.clone()).into());
        }
        for file in files {
            match file::read_record::<BenchProcessRun>(&file) {
                Ok(run) => runs.push(run),
                Err(RecordFileError::NotExpectedRecordKind { .. }) => {
                    match file::read_record::<BaselineFile>(&file) {
                        Ok(baseline) => baselines.push(baseline),
                        Err(RecordFileError::NotExpectedRecordKind { .. }) if path.is_dir() => {
                            let text = format!(
                                "{}: neither a run nor a baseline, skipped",
                                file.display()
                            );
                            eprintln!("{}", clean_message_for_terminal(&text));
                        }
                        Err(RecordFileError::NotExpectedRecordKind {
                            record_path: path, ..
                        }) => anyhow::bail!(
                            "--runs {}: neither a run nor a baseline of kernelgate",
                            path.display()
                        ),
                        Err(error) => anyhow::bail!("--runs: {error}"),
                    }
                }
                Err(error) => anyhow::bail!("--runs: {error}"),
            }
        }
    }
    anyhow::ensure!(
        !runs.is_empty() || !baselines.is_empty(),
        "--runs: no run and no baseline among what was given"
    );
    let mut keys: Vec<(String, &str)> =
        runs.iter().map(|run| (run.key_in_baseline(), &*run.start_time)).collect();
    keys.sort();
    if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
        anyhow::bail!("--runs: the run {} is given twice", twice[0].0);
    }
    Ok((runs, baselines))
}

/// JSON files of a folder and of its direct subfolders.
fn json_files_two_levels_deep(folder: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let inside = |path: PathBuf| if path.is_dir() { entries(&path) } else { vec![path] };
    let is_json = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "json");
    entries(folder).into_iter().flat_map(inside).filter(is_json).collect()
}

/// Writes each chart of the report as an SVG file and a PNG file. Chart files are not synced to
/// disk (fsync), because they can be made again from the recorded runs.
fn write_charts_as_svg_and_png(folder: &Path, figures: &[ChartWithFileName]) -> anyhow::Result<()> {
    let failed = || format!("--out: failed to write the plots into {}", folder.display());
    std::fs::create_dir_all(folder).with_context(failed)?;
    let write = |figure: &ChartWithFileName| -> anyhow::Result<()> {
        let path = |ending: &str| folder.join(format!("{}.{ending}", figure.file_name_stem));
        std::fs::write(path("svg"), figure.chart.render_svg()?).with_context(failed)?;
        std::fs::write(path("png"), figure.chart.render_png()?).with_context(failed)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let part = figures.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let each =
            figures.chunks(part).map(|part| scope.spawn(move || part.iter().try_for_each(write)));
        let running: Vec<_> = each.collect();
        running.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("failed to draw a plot")))
        })
    })
}
