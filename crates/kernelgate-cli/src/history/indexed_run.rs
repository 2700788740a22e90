//! The data of a process run that the history index keeps: name, start, device, commit and the
//! cases' median times.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use kernelgate::record::{
    BaselineFile, BenchProcessRun, CargoPackageId, CaseSummaryOfRun, CommitAndChanges,
    MeasurementOfRuns, ProcessRunInBaseline, RecordFileError, RunEnvironment, file,
};

/// The median times of the cases that one bench process measured, with the process's identity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessRunInIndex {
    /// Name of the bench, with the shard that the process ran.
    pub process: String,
    /// Name of the package whose bench ran; `None` if the record has none.
    pub package: Option<String>,
    /// Start of the process run, milliseconds since 1970; 0 if the record has no valid time.
    pub started_ms: i64,
    /// Fingerprint of the environment; it is equal for all environments whose times can be
    /// compared.
    pub model: String,
    /// Identifier of the card or host, which distinguishes it from others of its model.
    pub card: String,
    /// Description of the device.
    pub device: String,
    /// Code that was measured.
    pub provenance: CommitAndChanges,
    /// Definition revision and median nanoseconds per launch of each case, by case id.
    pub cases: BTreeMap<String, (u32, f64)>,
}

/// A record file of the history store: a run or a baseline.
pub enum RunOrBaselineFile {
    Run(Box<BenchProcessRun>),
    /// A baseline file, which holds several process runs.
    Baseline(Box<BaselineFile>),
}

impl RunOrBaselineFile {
    /// Reads a record file as a run or, if it is not a run, as a baseline.
    pub fn read_run_or_baseline(path: &Path) -> Result<RunOrBaselineFile, String> {
        match file::read_record::<BenchProcessRun>(path) {
            Ok(run) => Ok(Self::Run(Box::new(run))),
            Err(RecordFileError::Foreign { .. }) => match file::read_record::<BaselineFile>(path) {
                Ok(baseline) => Ok(Self::Baseline(Box::new(baseline))),
                Err(RecordFileError::Foreign { .. }) => {
                    Err("neither a run nor a baseline of kernelgate".to_owned())
                }
                Err(error) => Err(error.to_string()),
            },
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Converts the process runs of a measurement into index entries. Runs with injected delays are
/// skipped, because their times do not describe the code.
pub fn index_entries_of_measurement(
    measurement: &MeasurementOfRuns,
) -> impl Iterator<Item = ProcessRunInIndex> {
    measurement
        .process_runs_of_measurement()
        .iter()
        .filter(|run| run.delays.is_empty())
        .map(index_entry_of_run)
}

fn index_entry_of_run(run: &BenchProcessRun) -> ProcessRunInIndex {
    let cases = run.cases.iter();
    let measured = (&run.started, &run.environment, &run.provenance);
    ProcessRunInIndex {
        package: run.package.as_ref().map(CargoPackageId::to_string),
        cases: cases
            .map(|(id, case)| {
                (
                    id.clone(),
                    (case.revision, CaseSummaryOfRun::summarize_case_record(case).median_ns),
                )
            })
            .collect(),
        ..index_entry_without_cases(&run.key_in_baseline(), measured)
    }
}

/// Converts the process runs in a baseline into index entries.
pub fn index_entries_of_baseline(
    baseline: &BaselineFile,
) -> impl Iterator<Item = ProcessRunInIndex> {
    baseline.runs.iter().map(|(key, run)| {
        let ProcessRunInBaseline { started, environment, package, provenance, .. } = run;
        let package = package.as_ref().map(CargoPackageId::to_string);
        let cases = baseline.cases.iter().filter_map(|(id, case)| {
            Some((id.clone(), (case.revision, case.runs.get(key)?.median_ns)))
        });
        let measured = (started, environment, provenance);
        ProcessRunInIndex {
            package,
            cases: cases.collect(),
            ..index_entry_without_cases(key, measured)
        }
    })
}

fn index_entry_without_cases(
    key: &str,
    (started, environment, provenance): (&String, &RunEnvironment, &CommitAndChanges),
) -> ProcessRunInIndex {
    let started = started.parse::<Timestamp>().map_or(0, |started| started.as_millisecond());
    ProcessRunInIndex {
        process: key.rsplit('/').next().unwrap_or_default().to_owned(),
        package: None,
        started_ms: started,
        model: environment.name_of_comparable_environments(),
        card: environment.id_of_gpus_or_host(),
        device: environment.description_of_device(),
        provenance: provenance.clone(),
        cases: BTreeMap::new(),
    }
}
