//! The process runs of measurements and baselines, with the data that a history needs.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::Timestamp;
use kernelgate::record::{
    Baseline, BaselineRun, CaseRun, Environment, FileError, Measurement, Package, ProcessRun,
    Provenance, file,
};

/// Medians of the cases that one bench process measured.
#[derive(Debug, Clone, PartialEq)]
pub struct IndexedRun {
    /// `<session>/<process>`.
    pub key: String,
    /// The bench binary, with its shard.
    pub process: String,
    /// Name of the package, if the record has one.
    pub package: Option<String>,
    /// Start of the run, milliseconds since 1970; 0 if the record has no valid time.
    pub started_ms: i64,
    /// Fingerprint that comparable environments share.
    pub model: String,
    /// The card, or host, among those of its model.
    pub card: String,
    /// Description of the device.
    pub device: String,
    /// Code that was measured.
    pub provenance: Provenance,
    /// Revision of the definition and the time of each case, by id.
    pub cases: BTreeMap<String, (u32, CaseRun)>,
}

/// A file of the store.
pub enum IndexedRecordFile {
    /// A record of one process.
    Run(Box<ProcessRun>),
    /// A baseline with several process runs.
    Baseline(Box<Baseline>),
}

impl IndexedRecordFile {
    /// Reads a file of either kind.
    pub fn read(path: &Path) -> Result<Self, String> {
        match file::read::<ProcessRun>(path) {
            Ok(run) => Ok(Self::Run(Box::new(run))),
            Err(FileError::Foreign { .. }) => match file::read::<Baseline>(path) {
                Ok(baseline) => Ok(Self::Baseline(Box::new(baseline))),
                Err(FileError::Foreign { .. }) => {
                    Err("neither a run nor a baseline of kernelgate".to_owned())
                }
                Err(error) => Err(error.to_string()),
            },
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The process runs of a measurement. Runs whose launches were delayed on purpose are skipped.
pub fn index_measurement(measurement: &Measurement) -> impl Iterator<Item = IndexedRun> {
    measurement.runs().iter().filter(|run| run.delays.is_empty()).map(index_run)
}

fn index_run(run: &ProcessRun) -> IndexedRun {
    let cases = run.cases.iter();
    let measured = (&run.started, &run.environment, &run.provenance);
    IndexedRun {
        package: run.package.as_ref().map(Package::to_string),
        cases: cases
            .map(|(id, case)| (id.clone(), (case.revision, CaseRun::from_case(case))))
            .collect(),
        ..empty_indexed_run(run.key(), measured)
    }
}

/// The process runs of a baseline.
pub fn index_baseline(baseline: &Baseline) -> impl Iterator<Item = IndexedRun> {
    baseline.runs.iter().map(|(key, run)| {
        let BaselineRun { started, environment, package, provenance, .. } = run;
        let package = package.as_ref().map(Package::to_string);
        let cases = baseline.cases.iter().filter_map(|(id, case)| {
            Some((id.clone(), (case.revision, case.runs.get(key)?.clone())))
        });
        let measured = (started, environment, provenance);
        IndexedRun { package, cases: cases.collect(), ..empty_indexed_run(key.clone(), measured) }
    })
}

fn empty_indexed_run(
    key: String,
    (started, environment, provenance): (&String, &Environment, &Provenance),
) -> IndexedRun {
    let started = started.parse::<Timestamp>().map_or(0, |started| started.as_millisecond());
    IndexedRun {
        process: key.rsplit('/').next().unwrap_or_default().to_owned(),
        key,
        package: None,
        started_ms: started,
        model: environment.fingerprint(),
        card: environment.device_id(),
        device: environment.describe(),
        provenance: provenance.clone(),
        cases: BTreeMap::new(),
    }
}
