//! The process runs of measurements and baselines, with the data that a history needs.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use kernelgate::record::{
    Baseline, BaselineRun, CargoPackage, CaseRun, Environment, Measurement, ProcessRun, Provenance,
    RecordFileError, file,
};

/// Medians of the cases that one bench process measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IndexedRun {
    /// Name of the bench process, with its shard.
    pub process: String,
    /// Name of the package, if the record has one.
    pub package: Option<String>,
    /// Start of the run, milliseconds since 1970; 0 if the record has no valid time.
    pub started_ms: i64,
    /// Fingerprint that all comparable environments share.
    pub model: String,
    /// Identifier that distinguishes the card or host from others of its model.
    pub card: String,
    /// Description of the device.
    pub device: String,
    /// Code that was measured.
    pub provenance: Provenance,
    /// Revision of the definition and nanoseconds a launch of each case, by id.
    pub cases: BTreeMap<String, (u32, f64)>,
}

/// A record file of the history store: a run or a baseline.
pub enum IndexedRecordFile {
    Run(Box<ProcessRun>),
    /// A baseline, which holds several process runs.
    Baseline(Box<Baseline>),
}

impl IndexedRecordFile {
    /// Reads a run record or a baseline file.
    pub fn read(path: &Path) -> Result<IndexedRecordFile, String> {
        match file::read::<ProcessRun>(path) {
            Ok(run) => Ok(Self::Run(Box::new(run))),
            Err(RecordFileError::Foreign { .. }) => match file::read::<Baseline>(path) {
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

/// Index entries for the process runs of a measurement. Runs whose launches were delayed on purpose
/// are skipped.
pub fn index_measurement(measurement: &Measurement) -> impl Iterator<Item = IndexedRun> {
    measurement.process_runs().iter().filter(|run| run.delays.is_empty()).map(index_run)
}

fn index_run(run: &ProcessRun) -> IndexedRun {
    let cases = run.cases.iter();
    let measured = (&run.started, &run.environment, &run.provenance);
    IndexedRun {
        package: run.package.as_ref().map(CargoPackage::to_string),
        cases: cases
            .map(|(id, case)| (id.clone(), (case.revision, CaseRun::from_record(case).median_ns)))
            .collect(),
        ..empty_indexed_run(&run.baseline_key(), measured)
    }
}

/// Index entries for the process runs of a baseline.
pub fn index_baseline(baseline: &Baseline) -> impl Iterator<Item = IndexedRun> {
    baseline.runs.iter().map(|(key, run)| {
        let BaselineRun { started, environment, package, provenance, .. } = run;
        let package = package.as_ref().map(CargoPackage::to_string);
        let cases = baseline.cases.iter().filter_map(|(id, case)| {
            Some((id.clone(), (case.revision, case.runs.get(key)?.median_ns)))
        });
        let measured = (started, environment, provenance);
        IndexedRun { package, cases: cases.collect(), ..empty_indexed_run(key, measured) }
    })
}

fn empty_indexed_run(
    key: &str,
    (started, environment, provenance): (&String, &Environment, &Provenance),
) -> IndexedRun {
    let started = started.parse::<Timestamp>().map_or(0, |started| started.as_millisecond());
    IndexedRun {
        process: key.rsplit('/').next().unwrap_or_default().to_owned(),
        package: None,
        started_ms: started,
        model: environment.environment_fingerprint(),
        card: environment.device_identifier(),
        device: environment.device_description(),
        provenance: provenance.clone(),
        cases: BTreeMap::new(),
    }
}
