//! `kernelgate history`: shows times over commits, and manages the store that they come from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};
use serde::Serialize;

use crate::gate::rules::rules_file;
use crate::history::import::{ImportResult, import_records};
use crate::history::prune::prune_store;
use crate::history::series::MIN_REPORTED_CHANGE;
use crate::history::{
    CaseHistory, CommitOrder, HistoryIndex, HistoryQuery, HistoryStore, SkippedRecordFile,
    case_histories,
};
use crate::report;
use crate::verbs::shared::output::print_json;
use crate::verbs::shared::sessions;
use crate::verbs::shared::settings::parse_fraction;
use kernelgate::display::terminal;
use kernelgate::exit::ExitReason;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::record::BaselineStore;
use kernelgate::record::text::printable_path;

/// How histories are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum HistoryFormat {
    /// For a terminal
    #[default]
    Text,
    /// Everything, for programs
    Json,
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct HistoryArguments {
    #[command(subcommand)]
    verb: Option<HistoryVerb>,
    #[command(flatten)]
    show: HistoryShowArguments,
}

#[derive(Debug, clap::Args)]
struct HistoryShowArguments {
    /// Id of a case, or a regular expression that ids match [default: all cases]
    case: Option<String>,
    #[command(flatten)]
    place: HistoryStoreArguments,
    /// Show only runs of commits in the history of this revision [default: all runs, in the order
    /// of HEAD's history, those of other commits by their recorded start]
    #[arg(long, value_name = "REV")]
    branch: Option<String>,
    /// Treat all cards of one model, or all hosts, as one device
    #[arg(long)]
    join_cards: bool,
    /// Count runs of the case OLD as runs of the case NEW (repeatable; `[renamed]` in
    /// kernelgate.toml does it for every call)
    #[arg(long = "as", value_name = "OLD=NEW", value_parser = parse_case_rename)]
    renamed: Vec<(String, String)>,
    /// Smallest change of the level that is reported, as a fraction of the time
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction, default_value_t = MIN_REPORTED_CHANGE)]
    smallest: f64,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: HistoryFormat,
}

/// Selects a store.
#[derive(Debug, clap::Args)]
struct HistoryStoreArguments {
    /// Folder of the store [default: KERNELGATE_HISTORY, else kernelgate/ of the target folder]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum HistoryVerb {
    /// Import runs and baselines from files and folders
    Import {
        /// Files of runs or baselines, or folders, which are searched with their subfolders
        #[arg(required = true, value_name = "FILE|DIR")]
        sources: Vec<PathBuf>,
        #[command(flatten)]
        place: HistoryStoreArguments,
    },
    /// Import all records of other stores
    Merge {
        /// Folders of the other stores
        #[arg(required = true, value_name = "DIR")]
        stores: Vec<PathBuf>,
        #[command(flatten)]
        place: HistoryStoreArguments,
    },
    /// Remove the records of old runs
    Prune {
        /// Number of runs to keep of each bench on each device, the latest ones
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
        keep: u32,
        /// Print the number of sessions that would be removed, and remove none
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        place: HistoryStoreArguments,
    },
}

fn parse_case_rename(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => {
            Ok((old.to_owned(), new.to_owned()))
        }
        _ => Err("an old and a new id are needed, OLD=NEW".to_owned()),
    }
}

impl HistoryStoreArguments {
    /// Opens the store for a verb that reads; a named store must exist.
    fn open_store_to_read(&self, store: &BaselineStore) -> anyhow::Result<HistoryStore> {
        self.store.as_ref().map_or(Ok(()), |folder| check_store(folder))?;
        Ok(self.open(store))
    }

    fn open(&self, store: &BaselineStore) -> HistoryStore {
        let store_at = |folder: &PathBuf| HistoryStore::at(folder);
        self.store.as_ref().map_or_else(|| HistoryStore::around_run_folder(&store.runs), store_at)
    }
}

pub fn run(arguments: &HistoryArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    match &arguments.verb {
        None => show_history(&arguments.show, store),
        Some(HistoryVerb::Import { sources, place }) => {
            let place = place.open(store);
            Ok(report_imported_files(&place, &import_records(&place, sources)?))
        }
        Some(HistoryVerb::Merge { stores, place }) => {
            stores.iter().try_for_each(|folder| check_store(folder))?;
            let place = place.open(store);
            let parts = stores.iter().flat_map(|it| [it.join("runs"), it.join("imported")]);
            let parts: Vec<PathBuf> = parts.filter(|part| part.is_dir()).collect();
            Ok(report_imported_files(&place, &import_records(&place, &parts)?))
        }
        Some(HistoryVerb::Prune { keep, dry_run, place }) => {
            let place = place.open_store_to_read(store)?;
            let removed = prune_store(&place, usize::try_from(*keep)?, *dry_run)?;
            let what = if *dry_run { "would be removed" } else { "removed" };
            println!("{removed} sessions {what} in {}", printable_path(place.root()));
            Ok(ExitReason::Fine)
        }
    }
}

/// Refuses a folder that was given as a history store but does not hold one.
pub fn check_store(folder: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        HistoryStore::is_store(folder),
        "{} is not a store: it has neither runs/ nor imported/",
        folder.display()
    );
    Ok(())
}

/// Prints the result of an import; broken input if no named file is a record.
fn report_imported_files(place: &HistoryStore, imported: &ImportResult) -> ExitReason {
    let ImportResult { new, known, skipped } = imported;
    if !skipped.is_empty() {
        eprintln!("{}", report::history::skipped(skipped));
    }
    println!("{new} new records, {known} known, in {}", printable_path(place.root()));
    if new + known > 0 {
        return ExitReason::Fine;
    }
    if skipped.is_empty() {
        eprintln!(
            "error: no record in what was named: runs and baselines are files ending in .json"
        );
    }
    ExitReason::Usage
}

/// Names on standard error the packages whose runs in the store are not used.
fn warn_of_other_packages(index: &HistoryIndex, store: &BaselineStore) {
    let Some(own) = &store.package else { return };
    for (package, runs) in index.packages().into_iter().filter(|(it, _)| *it != own.to_string()) {
        sessions::report_unused_runs(runs, &package, own);
    }
}

/// Output of `--format json`.
#[derive(Serialize)]
struct HistoryOutput<'a> {
    histories: &'a [CaseHistory],
    skipped: &'a [SkippedRecordFile],
}

fn show_history(
    arguments: &HistoryShowArguments,
    store: &BaselineStore,
) -> anyhow::Result<ExitReason> {
    let smallest = arguments.smallest;
    anyhow::ensure!(
        (0.0..10.0).contains(&smallest),
        "--smallest takes a fraction of the time, from 0"
    );
    let mut renamed: BTreeMap<String, String> =
        rules_file::read_rules_of_folder(&store.root)?.renamed;
    renamed.extend(arguments.renamed.iter().cloned());
    let place = arguments.place.open_store_to_read(store)?;
    let (index, kept) = place.index()?;
    if !kept {
        let root = printable_path(place.root());
        eprintln!("no index can be written in {root}: its records are read each time");
    }
    warn_of_other_packages(&index, store);
    let order = CommitOrder::from_repository_around(&store.root, arguments.branch.as_deref())?;
    let find = |cases: &CaseFilter| {
        let query = HistoryQuery {
            package: store.package.as_ref(),
            cases,
            renamed: &renamed,
            join_cards: arguments.join_cards,
            known_only: arguments.branch.is_some(),
            smallest,
        };
        case_histories(&index, &query, &order)
    };
    // An id selects that case, even if it has another meaning as a regular expression.
    let exact = arguments.case.as_ref().map(|case| find(&CaseFilter::Exact(case.clone())));
    let found = match exact.transpose()? {
        Some(found) if !found.is_empty() => found,
        _ => find(&CaseFilter::parse(arguments.case.as_deref(), false)?)?,
    };
    let skipped = place.skipped(&index);
    match arguments.format {
        HistoryFormat::Json => {
            print_json(&HistoryOutput { histories: &found, skipped: &skipped })?;
        }
        HistoryFormat::Text => {
            if !skipped.is_empty() {
                eprintln!("{}", report::history::skipped(&skipped));
            }
            if !found.is_empty() {
                terminal::print_wrapped(&report::history::text(
                    &found,
                    &order,
                    terminal::terminal_columns(),
                ));
            }
        }
    }
    anyhow::ensure!(!found.is_empty(), no_history_message(arguments, place.root()));
    Ok(ExitReason::Fine)
}

/// The message that no run was selected.
fn no_history_message(arguments: &HistoryShowArguments, root: &Path) -> String {
    let root = printable_path(root);
    match (&arguments.case, &arguments.branch) {
        (Some(case), _) => {
            format!("no run of a case `{case}` in {root}: `kernelgate history` lists all cases")
        }
        (None, Some(revision)) => {
            format!("no run of a commit in the history of {revision} in {root}")
        }
        (None, None) => {
            format!("no run in {root}: run `cargo bench` first, or `kernelgate history import`")
        }
    }
}
