//! Which recorded invocations a verb is about.

use std::path::PathBuf;

use kernelgate::record::{ProcessRun, Session, Store};

/// Which recorded invocations a verb is about.
#[derive(Debug, clap::Args)]
pub struct Sessions {
    /// Folder of a recorded invocation, in place of the last one; several are several process runs
    #[arg(long, value_name = "DIR")]
    session: Vec<PathBuf>,
    /// The last so many invocations: several process runs
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "session",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    last: u16,
}

impl Sessions {
    /// Their runs, no run twice.
    pub fn read(&self, store: &Store) -> anyhow::Result<Vec<ProcessRun>> {
        let runs = |sessions: Vec<Session>| sessions.into_iter().flat_map(|it| it.runs).collect();
        if self.session.is_empty() {
            return Ok(runs(store.last_sessions(self.last.into())?));
        }
        let mut runs: Vec<ProcessRun> =
            runs(store.sessions(self.session.iter().map(PathBuf::as_path))?);
        runs.sort_by_cached_key(ProcessRun::key);
        Ok(runs)
    }
}
