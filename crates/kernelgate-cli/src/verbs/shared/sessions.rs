//! Selects the recorded sessions of a verb.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kernelgate::display::counted_noun;
use kernelgate::record::store::StoreError;
use kernelgate::record::text::printable_on_terminal;
use kernelgate::record::{BaselineStore, CargoPackage, ProcessRun, Session};

/// Selects the recorded sessions of a verb.
#[derive(Debug, clap::Args)]
pub struct SelectedSessions {
    /// Use this recorded invocation in place of the last one: its folder (repeatable; each one is a
    /// process run)
    #[arg(long, value_name = "DIR")]
    session: Vec<PathBuf>,
    /// Number of recorded invocations to use, the latest first; each one is a process run
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "session",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    last: u16,
}

impl SelectedSessions {
    /// Reads the sessions, with the runs of the package in the current folder, no run twice.
    pub fn read(&self, store: &BaselineStore) -> anyhow::Result<Vec<ProcessRun>> {
        let sessions = match self.session.is_empty() {
            true => store.last_sessions(self.last.into())?,
            false => store.sessions_in_folders(self.session.iter().map(PathBuf::as_path))?,
        };
        let sessions = without_other_packages(sessions, store)?;
        let mut runs: Vec<ProcessRun> = sessions.into_iter().flat_map(|it| it.runs).collect();
        if !self.session.is_empty() {
            runs.sort_by_cached_key(ProcessRun::baseline_key);
        }
        Ok(runs)
    }
}

/// Removes runs of other packages, which may share the target folder, and names them on standard
/// error. Outside of a package, runs of all packages are used.
pub fn without_other_packages(
    mut sessions: Vec<Session>,
    store: &BaselineStore,
) -> anyhow::Result<Vec<Session>> {
    let Some(own) = &store.package else { return Ok(sessions) };
    let mut others: BTreeMap<CargoPackage, usize> = BTreeMap::new();
    let mut unnamed = 0;
    for run in sessions.iter().flat_map(|session| &session.runs) {
        match &run.package {
            Some(package) if package != own => *others.entry(package.clone()).or_default() += 1,
            Some(_) => {}
            None => unnamed += 1,
        }
    }
    for session in &mut sessions {
        session.runs.retain(|run| run.may_be_of_package(own));
    }
    if sessions.iter().all(|session| session.runs.is_empty()) {
        return Err(StoreError::OtherPackages {
            package: own.clone(),
            folder: sessions.first().map(|it| it.folder.clone()).unwrap_or_default(),
            others: others.into_keys().collect(),
        }
        .into());
    }
    for (package, runs) in others {
        report_unused_runs(runs, &package.to_string(), own);
    }
    if unnamed > 0 {
        let runs = counted_noun(unnamed, "run");
        let text = format!("{runs} without a recorded package counted as of package {own}");
        eprintln!("{}", printable_on_terminal(&text));
    }
    Ok(sessions)
}

/// Names on standard error the runs of another package that are not used.
pub fn report_unused_runs(runs: usize, package: &str, own: &CargoPackage) {
    let runs = counted_noun(runs, "run");
    let text = format!("{runs} of package {package} not used: this is package {own}");
    eprintln!("{}", printable_on_terminal(&text));
}
