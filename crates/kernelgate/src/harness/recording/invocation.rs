//! The `cargo bench` invocation to which a bench process belongs, and the session folder for its
//! record.

use std::path::{Path, PathBuf};

use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::harness::error::HarnessError;
use crate::record::sessions::session_name_from_start_and_process;
use crate::record::{BenchProcessRun, RecordFoldersOfPackage, file};

/// Names the session.
pub const SESSION_NAME_VARIABLE: &str = "KERNELGATE_SESSION";

/// One run of `cargo bench`, or a single bench process that was started without cargo.
pub struct CargoBenchInvocation {
    /// Name of the session folder of this invocation: the user's `KERNELGATE_SESSION`, else the
    /// invocation's id.
    pub session_folder_name: String,
    /// Start time and process id of the cargo process, or of the bench process if it was started
    /// without cargo.
    pub invocation_id: String,
}

impl CargoBenchInvocation {
    /// Describes the invocation of this process; `session` is the session name, if the user chose
    /// one.
    pub fn invocation_of_this_process(session: Option<String>) -> Self {
        let id = invocation_id();
        Self { session_folder_name: session.unwrap_or_else(|| id.clone()), invocation_id: id }
    }

    /// Writes the run record of one bench executable and returns its path; the closure `run` makes
    /// the record for a given path. Benches of several packages may have equal names; within one
    /// invocation, the second record gets a number.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or another invocation has used the session name.
    pub fn write_run_record_of_bench(
        &self,
        store: &RecordFoldersOfPackage,
        bench: &str,
        run: impl Fn(&Path) -> BenchProcessRun,
    ) -> Result<PathBuf, HarnessError> {
        let names = std::iter::once(bench.to_owned());
        for name in names.chain((2..).map(|number| format!("{bench}-{number}"))) {
            let path = store.path_of_run_record(&self.session_folder_name, &name);
            match file::create_record_exclusively(&path, &run(&path)) {
                Ok(()) => return Ok(path),
                Err(error) if error.is_because_file_exists() => {}
                Err(error) => return Err(error.into()),
            }
            let there = file::read_record::<BenchProcessRun>(&path)
                .ok()
                .and_then(|run| run.cargo_invocation_id);
            if there.as_deref() != Some(&self.invocation_id) {
                let session = self.session_folder_name.clone();
                return Err(HarnessError::SessionNameTaken {
                    session_name: session,
                    earlier_record_path: path,
                });
            }
        }
        unreachable!("numbers do not end")
    }

    /// Reads the run records that earlier benches of this invocation wrote into the session folder.
    pub fn runs_of_earlier_benches(&self, folder: &Path) -> Vec<BenchProcessRun> {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let runs =
            files.filter_map(|entry| file::read_record::<BenchProcessRun>(&entry.path()).ok());
        runs.filter(|run| run.cargo_invocation_id.as_deref() == Some(&self.invocation_id)).collect()
    }
}

/// Id of the invocation: start time and process number of the parent cargo process, else of this
/// process.
fn invocation_id() -> String {
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
    session_name_from_start_and_process(time, id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{CommitAndChanges, RunEnvironment};

    #[test]
    fn a_second_invocation_with_the_same_session_name_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = RecordFoldersOfPackage::for_package_root(folder.path(), folder.path());
        let invoked = |id: &str| CargoBenchInvocation {
            session_folder_name: "par".to_owned(),
            invocation_id: id.to_owned(),
        };
        let record = |invocation: &str| {
            let run = BenchProcessRun {
                cargo_invocation_id: Some(invocation.to_owned()),
                ..BenchProcessRun::empty_run_starting_now(
                    "b",
                    "par",
                    RunEnvironment::environment_of_process_on_cpu(),
                    CommitAndChanges::default(),
                )
            };
            invoked(invocation).write_run_record_of_bench(&store, "b", |_| run.clone())
        };
        // The threads start together, so that none finds a record of another when it begins.
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
        assert_eq!(
            file::read_record::<BenchProcessRun>(path).unwrap().cargo_invocation_id.as_deref(),
            Some(*first)
        );
        let named = |error: &HarnessError| match error {
            HarnessError::SessionNameTaken { session_name: session, .. } => session == "par",
            _ => false,
        };
        assert!(refused.len() == 3 && refused.iter().all(named), "{refused:?}");
        // A second bench with an equal name in one invocation gets a numbered file.
        assert_eq!(record(first).unwrap(), path.with_file_name("b-2.json"));
    }
}
