//! `kernelgate report`: an HTML page, its charts as files, its numbers as CSV and JSON.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::peers;
use crate::gate::baseline::GatePolicy;
use crate::gate::rules::rules_file;
use crate::history::series::MIN_REPORTED_CHANGE;
use crate::history::{CaseHistory, CommitOrder, HistoryQuery, HistoryStore, case_histories};
use crate::pages::charts::ChartFigure;
use crate::pages::measured_runs::ReportMeasurements;
use crate::pages::report::{self, CommitHistories};
use crate::pages::{results, tables};
use crate::report::verdicts;
use crate::verbs::shared::output::json;
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::sessions::SelectedSessions;
use crate::verbs::slower::gate;
use kernelgate::exit::ExitReason;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::record::file_set::PreparedFileSet;
use kernelgate::record::store::StoreError;
use kernelgate::record::text::{printable_on_terminal, printable_path};
use kernelgate::record::{Baseline, BaselineStore, Measurement, ProcessRun, RecordFileError, file};

#[derive(Debug, clap::Args)]
pub struct ReportArguments {
    /// Show only cases whose id matches this regular expression
    #[arg(conflicts_with_all = ["baseline", "results"])]
    filter: Option<String>,
    /// Runs or baselines in place of the last run: files, or folders of them (repeatable)
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["session", "last"])]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    sessions: SelectedSessions,
    /// Show verdicts against this baseline of the device: baselines/DEVICE/NAME.json
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Show times of peers from this output of `kernelgate peers --format json`
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Show times over commits from this store [default: as `kernelgate history`; with --runs none]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Over commits, treat all cards of one model, or all hosts, as one device
    #[arg(long)]
    join_cards: bool,
    /// Folder for index.html, plots/, cases.csv, history.csv and report.json [default:
    /// kernelgate/report/ of the target folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write one Markdown page per family into this folder instead: rows, peers, limits, clocks and
    /// power states; where pages of the folder mark tables by `<!-- results FILTER: COLUMN, COLUMN
    /// -->`, fill these tables only
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "baseline", "store"])]
    results: Option<PathBuf>,
}

pub fn run(arguments: &ReportArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let (runs, baselines) = match arguments.runs.is_empty() {
        true => (arguments.sessions.read(store)?, Vec::new()),
        false => read_records_and_baselines(&arguments.runs)?,
    };
    let measurements = Measurement::group_into_measurements(runs);
    let mut measured =
        ReportMeasurements::new(&measurements, &baselines).map_err(Refusal::message)?;
    if let Some(filter) = &arguments.filter {
        let filter = CaseFilter::parse(Some(filter), false)?;
        measured.retain_cases(|id| filter.matches_id(id));
        anyhow::ensure!(!measured.cases.is_empty(), "no case matches the filter");
    }
    if let Some(path) = &arguments.peers {
        let (device, times) = peers::read(path)?;
        if device != measured.device {
            let cases = &measured.device;
            let why = format!("the peers were timed on {device}, the cases on {cases}");
            return Err(Refusal::message(why).into());
        }
        measured.peers = times;
        let strangers = measured.peers_without_case();
        if let Some(first) = strangers.first() {
            let (count, all) = (strangers.len(), measured.peers.len());
            let text = format!("--peers: {count} of {all} times are of no case here: {first} …");
            eprintln!("{}", printable_on_terminal(&text));
        }
    }
    if let Some(folder) = &arguments.results {
        return write_result_tables(folder, &measured);
    }
    let verdict = match &arguments.baseline {
        None => None,
        Some(name) => {
            let measurement =
                Measurement::join_measurements(measurements).map_err(Refusal::message)?;
            let judged = gate::judge_measurement(store, name, &measurement, GatePolicy::default())?;
            Some(verdicts::summary(&judged, &gate::local_reproduction_commands(name)))
        }
    };
    let history = read_commit_histories(arguments, store, &measured)?;
    let content = report::ReportContent {
        measured: &measured,
        history: history.as_ref(),
        verdict: verdict.as_ref(),
    };
    let page = report::page(&content)?;
    let kept = store.report_page();
    let folder = arguments.out.as_deref().or(kept.parent()).unwrap_or(Path::new(""));
    let index = folder.join("index.html");
    let csv = tables::cases_csv(&measured).context("failed to write cases.csv")?;
    let mut files =
        vec![("cases.csv", csv), ("report.json", json(&tables::report_numbers(&content))?)];
    if let Some(history) = &history {
        let csv = tables::history_csv(&history.histories);
        files.push(("history.csv", csv.context("failed to write history.csv")?));
    }
    files.push(("index.html", page.html));
    let set = PreparedFileSet::new(folder).context("--out")?;
    write_plots(&set.path().join("plots"), &page.figures)?;
    files.into_iter().try_for_each(|(name, text)| set.add(name, text)).context("--out")?;
    let absent: &[&str] = if history.is_some() { &[] } else { &["history.csv"] };
    set.replace_file_set(absent).context("--out")?;
    println!("{}", printable_path(&index));
    Ok(ExitReason::Fine)
}

/// Fills the marked tables of the pages in a folder; where no page marks any, writes a page for
/// each family.
fn write_result_tables(folder: &Path, measured: &ReportMeasurements) -> anyhow::Result<ExitReason> {
    let pages = results::family_pages(measured).map_err(Refusal::message)?;
    let filled = pages_with_filled_tables(folder, measured)?;
    if !filled.is_empty() {
        let texts = filled.iter().map(|(path, text)| (path.as_path(), text.as_str()));
        file::replace_files(texts).context("--results")?;
        filled.iter().for_each(|(path, _)| println!("{}", printable_path(path)));
        return Ok(ExitReason::Fine);
    }
    let write = || {
        let set = PreparedFileSet::new(folder)?;
        pages.iter().try_for_each(|page| set.add(&page.file, &page.text))?;
        set.replace_file_set(&[])
    };
    write().context("--results")?;
    pages.iter().for_each(|page| println!("{}", printable_path(&folder.join(&page.file))));
    Ok(ExitReason::Fine)
}

/// Largest page whose tables are filled, bytes.
const MAX_PAGE_BYTES: u64 = 1 << 20;

/// The pages of a folder that mark tables, with these tables filled.
fn pages_with_filled_tables(
    folder: &Path,
    measured: &ReportMeasurements,
) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let mut pages = Vec::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(pages) };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_none_or(|it| it != "md") {
            continue;
        }
        let named = || format!("--results: {}", printable_path(&path));
        let text = file::read_untrusted_text(&path, MAX_PAGE_BYTES).with_context(named)?;
        if let Some(text) = results::fill_marked_tables(&text, measured).with_context(named)? {
            pages.push((path, text));
        }
    }
    pages.sort();
    Ok(pages)
}

/// Times over commits of the cases and devices on the page; `None` without a store, or if it has
/// one commit only. If the default history store cannot be used, the page is made without
/// histories.
fn read_commit_histories(
    arguments: &ReportArguments,
    store: &BaselineStore,
    measured: &ReportMeasurements,
) -> anyhow::Result<Option<CommitHistories>> {
    if let Some(folder) = &arguments.store {
        super::history::check_store(folder)?;
        return histories_from_store(&HistoryStore::at(folder), arguments, store, measured);
    }
    let usual = HistoryStore::around_run_folder(&store.runs);
    if !arguments.runs.is_empty() || !HistoryStore::is_store(usual.root()) {
        return Ok(None);
    }
    histories_from_store(&usual, arguments, store, measured).or_else(|error| {
        eprintln!("{}", printable_on_terminal(&format!("no times over commits: {error:#}")));
        Ok(None)
    })
}

fn histories_from_store(
    place: &HistoryStore,
    arguments: &ReportArguments,
    store: &BaselineStore,
    measured: &ReportMeasurements,
) -> anyhow::Result<Option<CommitHistories>> {
    let (index, _) = place.index()?;
    let order = CommitOrder::from_repository_around(&store.root, None)?;
    let query = HistoryQuery {
        package: store.package.as_ref(),
        cases: &CaseFilter::OneOf(measured.cases.iter().map(|case| case.id.clone()).collect()),
        renamed: &rules_file::read_rules_of_folder(&store.root)?.renamed,
        join_cards: arguments.join_cards,
        known_only: false,
        smallest: MIN_REPORTED_CHANGE,
    };
    let mut histories = case_histories(&index, &query, &order)?;
    let is_shown = |history: &CaseHistory| {
        history.points.len() > 1 && measured.fingerprints.contains(&history.fingerprint)
    };
    histories.retain(is_shown);
    let order = crate::report::history::commit_order_text(&histories, &order);
    Ok(Some(CommitHistories { histories, order }).filter(|shown| !shown.histories.is_empty()))
}

/// Reads the run records and baselines at these paths. In a folder, a file that is neither a run
/// nor a baseline is named and skipped.
fn read_records_and_baselines(
    paths: &[PathBuf],
) -> anyhow::Result<(Vec<ProcessRun>, Vec<Baseline>)> {
    let (mut runs, mut baselines) = (Vec::new(), Vec::new());
    for path in paths {
        let files = if path.is_dir() { json_record_files(path) } else { vec![path.clone()] };
        if files.is_empty() {
            return Err(StoreError::NoRun(path.clone()).into());
        }
        for file in files {
            match file::read::<ProcessRun>(&file) {
                Ok(run) => runs.push(run),
                Err(RecordFileError::Foreign { .. }) => match file::read::<Baseline>(&file) {
                    Ok(baseline) => baselines.push(baseline),
                    Err(RecordFileError::Foreign { .. }) if path.is_dir() => {
                        let text =
                            format!("{}: neither a run nor a baseline, skipped", file.display());
                        eprintln!("{}", printable_on_terminal(&text));
                    }
                    Err(RecordFileError::Foreign { path, .. }) => anyhow::bail!(
                        "--runs {}: neither a run nor a baseline of kernelgate",
                        path.display()
                    ),
                    Err(error) => anyhow::bail!("--runs: {error}"),
                },
                Err(error) => anyhow::bail!("--runs: {error}"),
            }
        }
    }
    anyhow::ensure!(
        !runs.is_empty() || !baselines.is_empty(),
        "--runs: no run and no baseline among what was given"
    );
    let mut keys: Vec<(String, &str)> =
        runs.iter().map(|run| (run.baseline_key(), &*run.started)).collect();
    keys.sort();
    if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
        anyhow::bail!("--runs: the run {} is given twice", twice[0].0);
    }
    Ok((runs, baselines))
}

/// JSON files of a folder and of its direct subfolders.
fn json_record_files(folder: &Path) -> Vec<PathBuf> {
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

/// Writes each chart as SVG and PNG. Page files can be made again from records, so they are not
/// synced to disk.
fn write_plots(folder: &Path, figures: &[ChartFigure]) -> anyhow::Result<()> {
    let failed = || format!("--out: failed to write the plots into {}", folder.display());
    std::fs::create_dir_all(folder).with_context(failed)?;
    let write = |figure: &ChartFigure| -> anyhow::Result<()> {
        let path = |ending: &str| folder.join(format!("{}.{ending}", figure.name));
        std::fs::write(path("svg"), figure.chart.svg()?).with_context(failed)?;
        std::fs::write(path("png"), figure.chart.png()?).with_context(failed)
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
