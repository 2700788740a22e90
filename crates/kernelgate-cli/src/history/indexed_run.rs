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
    #[serde(rename = "process")]
    pub bench_and_shard_name: String,
    /// Name of the package whose bench ran; `None` if the record has none.
    #[serde(rename = "package")]
    pub package_name: Option<String>,
    /// Start of the process run, milliseconds since 1970; 0 if the record has no valid time.
    #[serde(rename = "started_ms")]
    pub process_start_unix_ms: i64,
    /// Fingerprint of the environment; it is equal for all environments whose times can be
    /// compared.
    #[serde(rename = "model")]
    pub environment_fingerprint: String,
    /// Identifier of the card or host, which distinguishes it from others of its model.
    #[serde(rename = "card")]
    pub card_or_host_id: String,
    /// Description of the device that ran the bench process.
    pub device: String,
    /// Commit of the code that the process run measured, and whether files differed from the
    /// commit.
    pub provenance: CommitAndChanges,
    /// Definition revision and median nanoseconds per launch of each case, by case id.
    #[serde(rename = "cases")]
    pub revision_and_median_ns_by_case: BTreeMap<String, (u32, f64)>,
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
            Err(RecordFileError::NotExpectedRecordKind { .. }) => {
                match file::read_record::<BaselineFile>(path) {
                    Ok(baseline) => Ok(Self::Baseline(Box::new(baseline))),
                    Err(RecordFileError::NotExpectedRecordKind { .. }) => {
                        Err("neither a run nor a baseline of kernelgate".to_owned())
                    }
                    Err(error) => Err(error.to_string()),
                }
            }
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
        .filter(|run| run.injected_delays_ns.is_empty())
        .map(index_entry_of_run)
}

fn index_entry_of_run(run: &BenchProcessRun) -> ProcessRunInIndex {
    let cases = run.cases.iter();
    let measured = (&run.start_time, &run.environment, &run.provenance);
    ProcessRunInIndex {
        package_name: run.package.as_ref().map(CargoPackageId::to_string),
        revision_and_median_ns_by_case: cases
            .map(|(id, case)| {
                (
                    id.clone(),
                    (
                        case.workload_revision,
                        CaseSummaryOfRun::summarize_case_record(case).median_launch_ns,
                    ),
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
        let ProcessRunInBaseline { start_time: started, environment, package, provenance, .. } =
            run;
        let package = package.as_ref().map(CargoPackageId::to_string);
        let cases = baseline.cases.iter().filter_map(|(id, case)| {
            Some((id.clone(), (case.workload_revision, case.runs.get(key)?.median_launch_ns)))
        });
        let measured = (started, environment, provenance);
        ProcessRunInIndex {
            package_name: package,
            revision_and_median_ns_by_case: cases.collect(),
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
        bench_and_shard_name: key.rsplit('/').next().unwrap_or_default().to_owned(),
        package_name: None,
        process_start_unix_ms: started,
        environment_fingerprint: environment.name_of_comparable_environments(),
        card_or_host_id: environment.id_of_gpus_or_host(),
        device: environment.description_of_device(),
        provenance: provenance.clone(),
        revision_and_median_ns_by_case: BTreeMap::new(),
    }
}
