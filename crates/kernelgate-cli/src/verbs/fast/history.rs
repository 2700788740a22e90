//! `kernelgate history`: prints the times of cases over commits, and imports, merges and prunes the
//! store of these times.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};
use serde::Serialize;

use crate::gate::rules::rules_file;
use crate::history::import::{RecordImportResult, import_records_into_store};
use crate::history::prune::prune_old_record_folders;
use crate::history::series::MIN_REPORTED_LEVEL_CHANGE;
use crate::history::{
    CaseHistoryQuery, CaseTimeHistory, FileWithoutRun, GitCommitOrder, HistoryRecordStore,
    HistoryStoreIndex, compute_case_histories,
};
use crate::report;
use crate::verbs::shared::output::print_as_json;
use crate::verbs::shared::sessions;
use crate::verbs::shared::settings::parse_fraction_or_percentage;
use kernelgate::display::terminal;
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::record::RecordFoldersOfPackage;
use kernelgate::record::text::path_for_terminal;

/// Output formats of `kernelgate history`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum HistoryOutputFormat {
    /// For a terminal
    #[default]
    Text,
    /// Everything, for programs
    Json,
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct HistoryCommandArguments {
    #[command(subcommand)]
    verb: Option<HistorySubverb>,
    #[command(flatten)]
    show: HistoryShowFlags,
}

#[derive(Debug, clap::Args)]
struct HistoryShowFlags {
    /// Id of a case, or a regular expression that ids match [default: all cases]
    #[arg(id = "case", value_name = "CASE")]
    case_id_or_regex: Option<String>,
    #[command(flatten)]
    history_store: HistoryStoreFlags,
    /// Show only runs of commits in the history of this revision [default: all runs, in the order
    /// of HEAD's history, those of other commits by their recorded start]
    #[arg(long = "branch", value_name = "REV")]
    revision_with_history: Option<String>,
    /// Treat all GPUs of one model as one device, and all CPU hosts as one device
    #[arg(long = "join-cards")]
    join_cards_of_model: bool,
    /// Count runs of the case OLD as runs of the case NEW (repeatable; `[renamed]` in
    /// kernelgate.toml does it for every call)
    #[arg(id = "renamed", long = "as", value_name = "OLD=NEW", value_parser = parse_old_and_new_case_id)]
    old_and_new_case_ids: Vec<(String, String)>,
    /// Smallest change of a case's time level that is reported, as a fraction of the time
    #[arg(long = "smallest", value_name = "FRACTION", value_parser = parse_fraction_or_percentage, default_value_t = MIN_REPORTED_LEVEL_CHANGE)]
    min_relative_level_change: f64,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: HistoryOutputFormat,
}

/// Selects a store.
#[derive(Debug, clap::Args)]
struct HistoryStoreFlags {
    /// Folder of the history store [default: the one in KERNELGATE_HISTORY, else kernelgate/ of
    /// cargo's target folder]
    #[arg(id = "store", long = "store", value_name = "DIR")]
    history_store_folder: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum HistorySubverb {
    /// Import recorded runs and baselines from files and folders into the history store
    #[command(name = "import")]
    ImportRecords {
        /// Files of runs or baselines, or folders, which are searched with their subfolders
        #[arg(required = true, value_name = "FILE|DIR")]
        record_paths: Vec<PathBuf>,
        #[command(flatten)]
        history_store: HistoryStoreFlags,
    },
    /// Import all records of other history stores
    #[command(name = "merge")]
    MergeStores {
        /// Folders of the other history stores
        #[arg(required = true, value_name = "DIR")]
        other_store_folders: Vec<PathBuf>,
        #[command(flatten)]
        history_store: HistoryStoreFlags,
    },
    /// Remove the records of old runs from the history store
    #[command(name = "prune")]
    PruneOldRuns {
        /// Number of runs to keep of each bench on each device; the latest runs are kept
        #[arg(long = "keep", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
        kept_runs_per_bench: u32,
        /// Print the number of recorded sessions that would be removed, and remove none
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        history_store: HistoryStoreFlags,
    },
}

fn parse_old_and_new_case_id(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => {
            Ok((old.to_owned(), new.to_owned()))
        }
        _ => Err("an old and a new id are needed, OLD=NEW".to_owned()),
    }
}

impl HistoryStoreFlags {
    /// Opens the history store for a verb that only reads; a store named by a flag must already
    /// exist.
    fn open_existing_history_store(
        &self,
        store: &RecordFoldersOfPackage,
    ) -> anyhow::Result<HistoryRecordStore> {
        self.history_store_folder
            .as_ref()
            .map_or(Ok(()), |folder| require_history_store(folder))?;
        Ok(self.open_or_default_history_store(store))
    }

    fn open_or_default_history_store(&self, store: &RecordFoldersOfPackage) -> HistoryRecordStore {
        let store_at = |folder: &PathBuf| HistoryRecordStore::in_folder(folder);
        self.history_store_folder
            .as_ref()
            .map_or_else(|| HistoryRecordStore::with_runs_folder(&store.runs_folder), store_at)
    }
}

pub fn run_history_command(
    arguments: &HistoryCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    match &arguments.verb {
        None => print_histories(&arguments.show, store),
        Some(HistorySubverb::ImportRecords { record_paths: sources, history_store: place }) => {
            let place = place.open_or_default_history_store(store);
            Ok(print_import_result(&place, &import_records_into_store(&place, sources)?))
        }
        Some(HistorySubverb::MergeStores { other_store_folders: stores, history_store: place }) => {
            stores.iter().try_for_each(|folder| require_history_store(folder))?;
            let place = place.open_or_default_history_store(store);
            let parts = stores.iter().flat_map(|it| [it.join("runs"), it.join("imported")]);
            let parts: Vec<PathBuf> = parts.filter(|part| part.is_dir()).collect();
            Ok(print_import_result(&place, &import_records_into_store(&place, &parts)?))
        }
        Some(HistorySubverb::PruneOldRuns {
            kept_runs_per_bench: keep,
            dry_run,
            history_store: place,
        }) => {
            let place = place.open_existing_history_store(store)?;
            let removed = prune_old_record_folders(&place, usize::try_from(*keep)?, *dry_run)?;
            let what = if *dry_run { "would be removed" } else { "removed" };
            println!("{removed} sessions {what} in {}", path_for_terminal(place.root_folder()));
            Ok(ProcessExitReason::Success)
        }
    }
}

/// Returns an error for a folder that the user named as a history store but that is not one.
pub fn require_history_store(folder: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        HistoryRecordStore::is_history_store_folder(folder),
        "{} is not a store: it has neither runs/ nor imported/",
        folder.display()
    );
    Ok(())
}

/// Prints how many files were imported; the exit code is "broken input" if no named file is a
/// record.
fn print_import_result(
    place: &HistoryRecordStore,
    imported: &RecordImportResult,
) -> ProcessExitReason {
    let RecordImportResult {
        newly_imported_records: new,
        already_stored_records: known,
        files_without_run: skipped,
    } = imported;
    if !skipped.is_empty() {
        eprintln!("{}", report::history::skipped_record_files_text(skipped));
    }
    println!("{new} new records, {known} known, in {}", path_for_terminal(place.root_folder()));
    if new + known > 0 {
        return ProcessExitReason::Success;
    }
    if skipped.is_empty() {
        eprintln!(
            "error: no record in what was named: runs and baselines are files ending in .json"
        );
    }
    ProcessExitReason::InvalidUsageOrInput
}

/// Warns on standard error of packages whose runs are in the history store but are not used.
fn warn_of_runs_of_other_packages(index: &HistoryStoreIndex, store: &RecordFoldersOfPackage) {
    let Some(own) = &store.package else { return };
    for (package, runs) in
        index.run_count_by_package().into_iter().filter(|(it, _)| *it != own.to_string())
    {
        sessions::print_unused_runs(runs, &package, own);
    }
}

/// JSON output of `kernelgate history --format json`.
#[derive(Serialize)]
struct HistoriesJson<'a> {
    histories: &'a [CaseTimeHistory],
    skipped: &'a [FileWithoutRun],
}

fn print_histories(
    arguments: &HistoryShowFlags,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let smallest = arguments.min_relative_level_change;
    anyhow::ensure!(
        (0.0..10.0).contains(&smallest),
        "--smallest takes a fraction of the time, from 0"
    );
    let mut renamed: BTreeMap<String, String> =
        rules_file::read_rules_in_folder(&store.package_root)?.current_ids_of_renamed_cases;
    renamed.extend(arguments.old_and_new_case_ids.iter().cloned());
    let place = arguments.history_store.open_existing_history_store(store)?;
    let (index, kept) = place.update_and_return_index()?;
    if !kept {
        let root = path_for_terminal(place.root_folder());
        eprintln!("no index can be written in {root}: its records are read each time");
    }
    warn_of_runs_of_other_packages(&index, store);
    let order = GitCommitOrder::ancestors_in_repository(
        &store.package_root,
        arguments.revision_with_history.as_deref(),
    )?;
    let find = |cases: &CaseIdFilter| {
        let query = CaseHistoryQuery {
            package: store.package.as_ref(),
            cases,
            current_ids_of_renamed_cases: &renamed,
            joins_cards_of_model: arguments.join_cards_of_model,
            only_known_commits: arguments.revision_with_history.is_some(),
            min_relative_level_change: smallest,
        };
        compute_case_histories(&index, &query, &order)
    };
    // A text equal to a case id selects that case, even if the text also is a regular expression
    // that other ids match.
    let exact =
        arguments.case_id_or_regex.as_ref().map(|case| find(&CaseIdFilter::ExactId(case.clone())));
    let found = match exact.transpose()? {
        Some(found) if !found.is_empty() => found,
        _ => find(&CaseIdFilter::parse_exact_id_or_regex(
            arguments.case_id_or_regex.as_deref(),
            false,
        )?)?,
    };
    let skipped = place.files_without_runs(&index);
    match arguments.format {
        HistoryOutputFormat::Json => {
            print_as_json(&HistoriesJson { histories: &found, skipped: &skipped })?;
        }
        HistoryOutputFormat::Text => {
            if !skipped.is_empty() {
                eprintln!("{}", report::history::skipped_record_files_text(&skipped));
            }
            if !found.is_empty() {
                terminal::print_broken_to_terminal_width(&report::history::histories_report_text(
                    &found,
                    &order,
                    terminal::terminal_columns(),
                ));
            }
        }
    }
    anyhow::ensure!(!found.is_empty(), no_selected_run_message(arguments, place.root_folder()));
    Ok(ProcessExitReason::Success)
}

/// The error message for a history without any selected run.
fn no_selected_run_message(arguments: &HistoryShowFlags, root: &Path) -> String {
    let root = path_for_terminal(root);
    match (&arguments.case_id_or_regex, &arguments.revision_with_history) {
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
