//! Which recorded invocations a verb is about.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kernelgate::record::{Run, Store};

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
    pub fn read(&self, store: &Store) -> anyhow::Result<Vec<Run>> {
        if self.session.is_empty() {
            return Ok(store.last_sessions(self.last.into())?);
        }
        let mut runs: BTreeMap<String, Run> = BTreeMap::new();
        for folder in &self.session {
            for run in store.session(folder)? {
                let twice = runs.insert(run.key(), run);
                anyhow::ensure!(
                    twice.is_none(),
                    "--session {}: its runs are given twice",
                    folder.display()
                );
            }
        }
        Ok(runs.into_values().collect())
    }
}
