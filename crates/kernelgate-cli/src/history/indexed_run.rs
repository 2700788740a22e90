//! A record file as the process runs in it, of each what a history needs.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::Timestamp;
use kernelgate::record::{
    Baseline, BaselineRun, CaseRun, Environment, FileError, Package, ProcessRun, Provenance, file,
};

/// What one bench process measured, as medians.
#[derive(Debug, Clone, PartialEq)]
pub struct IndexedRun {
    /// `<session>/<process>`.
    pub key: String,
    /// The bench binary, with its shard.
    pub process: String,
    /// The package as [`Package`]'s text has it, where the record has one.
    pub package: Option<String>,
    /// When it started, milliseconds since 1970; 0 where the record says no time.
    pub started_ms: i64,
    /// Names the environments it is comparable with.
    pub model: String,
    /// The card, or host, among those of its model.
    pub card: String,
    /// The device for a person.
    pub device: String,
    /// Of which code.
    pub provenance: Provenance,
    /// Revision of its definition and the time of each case, by id.
    pub cases: BTreeMap<String, (u32, CaseRun)>,
}

/// A file of the store.
pub enum RecordFile {
    /// One process.
    Run(Box<ProcessRun>),
    /// Several.
    Baseline(Box<Baseline>),
}

impl RecordFile {
    /// Reads either.
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

    /// The process runs in it. Those whose launches were delayed on purpose are none.
    pub fn process_runs(self) -> Vec<IndexedRun> {
        match self {
            Self::Run(run) if run.delays.is_empty() => vec![of_run(&run)],
            Self::Run(_) => Vec::new(),
            Self::Baseline(baseline) => of_baseline(&baseline),
        }
    }
}

fn of_run(run: &ProcessRun) -> IndexedRun {
    let cases = run.cases.iter();
    let measured = (&run.started, &run.environment, &run.provenance);
    IndexedRun {
        package: run.package.as_ref().map(Package::to_string),
        cases: cases
            .map(|(id, case)| (id.clone(), (case.revision, CaseRun::from_case(case))))
            .collect(),
        ..empty(run.key(), measured)
    }
}

fn of_baseline(baseline: &Baseline) -> Vec<IndexedRun> {
    let each = baseline.runs.iter().map(|(key, run)| {
        let BaselineRun { started, environment, package, provenance, .. } = run;
        let package = package.as_ref().map(Package::to_string);
        let cases = baseline.cases.iter().filter_map(|(id, case)| {
            Some((id.clone(), (case.revision, case.runs.get(key)?.clone())))
        });
        let measured = (started, environment, provenance);
        IndexedRun { package, cases: cases.collect(), ..empty(key.clone(), measured) }
    });
    each.collect()
}

fn empty(
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
