//! Command-line flags that select the recorded sessions (calls of `cargo bench`) that a kernelgate
//! verb reads.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kernelgate::display::counted_noun;
use kernelgate::record::store::RecordLookupError;
use kernelgate::record::text::clean_message_for_terminal;
use kernelgate::record::{BenchProcessRun, CargoPackageId, RecordFoldersOfPackage, SessionOfRuns};

/// Flags that select the recorded sessions (calls of `cargo bench`) that a kernelgate verb reads.
#[derive(Debug, clap::Args)]
pub struct SessionSelectionFlags {
    /// Use this recorded session in place of the last one: its folder (repeatable; each session is
    /// a process run)
    #[arg(id = "session", long = "session", value_name = "DIR")]
    session_folders: Vec<PathBuf>,
    /// Number of recorded sessions to use, the latest first; each session is a process run
    #[arg(id = "last",
        long = "last",
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "session",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    latest_session_count: u16,
}

impl SessionSelectionFlags {
    /// Reads the process runs of the selected sessions, without runs of packages other than the one
    /// in the current folder, and no run twice.
    pub fn read_runs_of_package(
        &self,
        store: &RecordFoldersOfPackage,
    ) -> anyhow::Result<Vec<BenchProcessRun>> {
        let sessions = match self.session_folders.is_empty() {
            true => store.read_last_sessions(self.latest_session_count.into())?,
            false => {
                store.read_sessions_in_folders(self.session_folders.iter().map(PathBuf::as_path))?
            }
        };
        let sessions = without_runs_of_other_packages(sessions, store)?;
        let mut runs: Vec<BenchProcessRun> = sessions.into_iter().flat_map(|it| it.runs).collect();
        if !self.session_folders.is_empty() {
            runs.sort_by_cached_key(BenchProcessRun::key_in_baseline);
        }
        Ok(runs)
    }
}

/// Removes the runs of other packages, which may share the target folder, and names these packages
/// on standard error. Outside a package, the runs of all packages are kept.
pub fn without_runs_of_other_packages(
    mut sessions: Vec<SessionOfRuns>,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<Vec<SessionOfRuns>> {
    let Some(own) = &store.package else { return Ok(sessions) };
    let mut others: BTreeMap<CargoPackageId, usize> = BTreeMap::new();
    let mut unnamed = 0;
    for run in sessions.iter().flat_map(|session| &session.runs) {
        match &run.package {
            Some(package) if package != own => *others.entry(package.clone()).or_default() += 1,
            Some(_) => {}
            None => unnamed += 1,
        }
    }
    for session in &mut sessions {
        session.runs.retain(|run| run.may_belong_to_package(own));
    }
    if sessions.iter().all(|session| session.runs.is_empty()) {
        return Err(RecordLookupError::RunsOnlyOfOtherPackages {
            current_package: own.clone(),
            runs_folder: sessions.first().map(|it| it.session_folder.clone()).unwrap_or_default(),
            other_packages: others.into_keys().collect(),
        }
        .into());
    }
    for (package, runs) in others {
        print_unused_runs(runs, &package.to_string(), own);
    }
    if unnamed > 0 {
        let runs = counted_noun(unnamed, "run");
        let text = format!("{runs} without a recorded package counted as of package {own}");
        eprintln!("{}", clean_message_for_terminal(&text));
    }
    Ok(sessions)
}

/// Prints on standard error how many runs of another package are not used.
pub fn print_unused_runs(runs: usize, package: &str, own: &CargoPackageId) {
    let runs = counted_noun(runs, "run");
    let text = format!("{runs} of package {package} not used: this is package {own}");
    eprintln!("{}", clean_message_for_terminal(&text));
}
