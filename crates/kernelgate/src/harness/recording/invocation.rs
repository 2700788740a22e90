//! The invocation that a bench process belongs to, and the session that its record goes into.

use std::path::{Path, PathBuf};

use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::harness::error::HarnessError;
use crate::record::sessions::session_name;
use crate::record::{BaselineStore, ProcessRun, file};

/// Names the session.
pub const SESSION_VARIABLE: &str = "KERNELGATE_SESSION";

/// One run of `cargo bench`, or one bench process that was started without cargo.
pub struct BenchInvocation {
    /// Name of the session folder of this invocation: KERNELGATE_SESSION, else the id.
    pub session: String,
    /// Start time and process id of the cargo process, or of the bench process if it was started
    /// without cargo.
    pub id: String,
}

impl BenchInvocation {
    /// Makes the invocation of this process; `session` names its session folder if the user chose a
    /// name.
    pub fn new(session: Option<String>) -> Self {
        let id = id();
        Self { session: session.unwrap_or_else(|| id.clone()), id }
    }

    /// Writes the record of one bench of this invocation; `run` learns the record's path, which is
    /// returned. Benches of several packages may share a name: the second of one invocation gets a
    /// number.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or another invocation has recorded the bench under that
    /// name: one of the two runs would be lost, or the two would be mixed up.
    pub fn write_bench_record(
        &self,
        store: &BaselineStore,
        bench: &str,
        run: impl Fn(&Path) -> ProcessRun,
    ) -> Result<PathBuf, HarnessError> {
        let names = std::iter::once(bench.to_owned());
        for name in names.chain((2..).map(|number| format!("{bench}-{number}"))) {
            let path = store.run_record_path(&self.session, &name);
            match file::write_new(&path, &run(&path)) {
                Ok(()) => return Ok(path),
                Err(error) if error.is_already_there() => {}
                Err(error) => return Err(error.into()),
            }
            let there = file::read::<ProcessRun>(&path).ok().and_then(|run| run.invocation);
            if there.as_deref() != Some(&self.id) {
                let session = self.session.clone();
                return Err(HarnessError::SessionTaken { session, path });
            }
        }
        unreachable!("numbers do not end")
    }

    /// The runs of the invocation's benches so far, by the records in the folder of its session.
    pub fn earlier_runs(&self, folder: &Path) -> Vec<ProcessRun> {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let runs = files.filter_map(|entry| file::read::<ProcessRun>(&entry.path()).ok());
        runs.filter(|run| run.invocation.as_deref() == Some(&self.id)).collect()
    }
}

/// Returns an id of the cargo process that runs this process, else of this process: start time and
/// process number.
fn id() -> String {
    let mut system = System::new().ok();
    let own = sysinfo::get_current_pid().ok();
    let mut process = |pid: Pid| -> Option<(String, u64, Option<Pid>)> {
        let system = system.as_mut()?;
        system.refresh_processes_specifics(
            ProcessesToUpdate::Some(&[pid]),
            false,
            ProcessRefreshKind::nothing(),
        );
        let process = system.process(pid)?;
        Some((
            process.name().to_string_lossy().into_owned(),
            process.start_time(),
            process.parent(),
        ))
    };
    let this = own.and_then(&mut process);
    let cargo = this
        .as_ref()
        .and_then(|(_, _, parent)| *parent)
        .and_then(|pid| process(pid).map(|found| (pid, found)));
    let (started, id) = match (cargo, this) {
        (Some((pid, (name, started, _))), _) if name.starts_with("cargo") => {
            (started, pid.as_u32())
        }
        (_, Some((_, started, _))) => (started, std::process::id()),
        _ => (0, std::process::id()),
    };
    let time = jiff::Timestamp::from_second(started as i64).unwrap_or_default();
    session_name(time, id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Environment, Provenance};

    #[test]
    fn the_first_invocation_keeps_the_session_name_and_a_second_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = BaselineStore::at(folder.path(), folder.path());
        let invoked = |id: &str| BenchInvocation { session: "par".to_owned(), id: id.to_owned() };
        let record = |invocation: &str| {
            let run = ProcessRun {
                invocation: Some(invocation.to_owned()),
                ..ProcessRun::start_now("b", "par", Environment::cpu(), Provenance::default())
            };
            invoked(invocation).write_bench_record(&store, "b", |_| run.clone())
        };
        // The threads start together, so each reads before any has written.
        let written = std::sync::Mutex::new(Vec::new());
        let refused = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for invocation in ["1", "2", "3", "4"] {
                let (record, written, refused) = (&record, &written, &refused);
                scope.spawn(move || match record(invocation) {
                    Ok(path) => written.lock().unwrap().push((invocation, path)),
                    Err(error) => refused.lock().unwrap().push(error),
                });
            }
        });
        let (written, refused) = (written.into_inner().unwrap(), refused.into_inner().unwrap());
        let [(first, path)] = &written[..] else { panic!("{written:?}") };
        assert_eq!(file::read::<ProcessRun>(path).unwrap().invocation.as_deref(), Some(*first));
        let named = |error: &HarnessError| match error {
            HarnessError::SessionTaken { session, .. } => session == "par",
            _ => false,
        };
        assert!(refused.len() == 3 && refused.iter().all(named), "{refused:?}");
        // A second bench of the same name in one invocation gets a numbered file.
        assert_eq!(record(first).unwrap(), path.with_file_name("b-2.json"));
    }
}
