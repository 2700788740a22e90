//! The numbers of a page as CSV and JSON.

use serde::Serialize;

use super::charts::PeerTime;
use super::measured::{Case, Measured};
use kernelgate::measure::limits::Limits;

/// Version of the JSON.
const SCHEMA: u32 = 1;

/// A case, one line of the CSV; what is not known is empty.
#[derive(Debug, Serialize)]
struct CaseNumbers<'a> {
    case: &'a str,
    workload: &'a str,
    problem: &'a str,
    implementation: &'a str,
    cache: &'a str,
    runs: usize,
    /// Median over the process runs, nanoseconds a launch.
    median_ns: f64,
    min_ns: f64,
    max_ns: f64,
    /// Half the interquartile range within a process over its median.
    spread: f64,
    limit_ns: Option<f64>,
    limited_by: Option<&'a str>,
    of_limit: Option<f64>,
    flops: f64,
    read_bytes: u64,
    write_bytes: u64,
    /// Of the amount that the rate counts, a second.
    rate: Option<f64>,
    rate_of: Option<&'static str>,
    max_error: Option<f64>,
    relative_l2: Option<f64>,
}

impl<'a> From<&'a Case> for CaseNumbers<'a> {
    fn from(case: &'a Case) -> Self {
        let (min_ns, max_ns) = case.range_ns();
        let median_ns = case.time_ns();
        Self {
            case: &case.id,
            workload: &case.workload,
            problem: &case.problem,
            implementation: &case.implementation,
            cache: &case.cache,
            runs: case.medians_ns.len(),
            median_ns,
            min_ns,
            max_ns,
            spread: case.spread,
            limit_ns: case.limit.as_ref().map(|limit| limit.time_ns),
            limited_by: case.limit.as_ref().map(|limit| &*limit.by),
            of_limit: case.of_limit(),
            flops: case.flops(),
            read_bytes: case.work.read_bytes,
            write_bytes: case.work.write_bytes,
            rate: case.amount().map(|(amount, _)| amount / median_ns * 1e9),
            rate_of: case.amount().map(|(_, unit)| unit),
            max_error: case.errors.map(|errors| errors.max_error),
            relative_l2: case.errors.map(|errors| errors.relative_l2),
        }
    }
}

/// Every case, a line each.
///
/// # Errors
/// Never, as far as is known: writing to memory does not fail.
pub fn csv(measured: &Measured) -> Result<String, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    measured.cases.iter().try_for_each(|case| writer.serialize(CaseNumbers::from(case)))?;
    let bytes = writer.into_inner().map_err(|error| error.into_error())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// All that a page shows, as numbers.
#[derive(Debug, Serialize)]
pub struct ReportNumbers<'a> {
    schema_version: u32,
    device: &'a str,
    facts: Vec<(&'a str, &'a str)>,
    limits: &'a Limits,
    cases: Vec<CaseWithRuns<'a>>,
    peers: Vec<(&'a str, &'a str, f64)>,
    skipped: &'a std::collections::BTreeMap<String, std::collections::BTreeSet<String>>,
    failed: &'a std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct CaseWithRuns<'a> {
    numbers: CaseNumbers<'a>,
    medians_ns: &'a [f64],
}

/// Of measurements and the peers' times.
pub fn numbers<'a>(measured: &'a Measured, peers: &'a [PeerTime]) -> ReportNumbers<'a> {
    let case = |case: &'a Case| CaseWithRuns {
        numbers: CaseNumbers::from(case),
        medians_ns: &case.medians_ns,
    };
    ReportNumbers {
        schema_version: SCHEMA,
        device: &measured.device,
        facts: measured.facts.iter().map(|(name, words)| (*name, words.as_str())).collect(),
        limits: &measured.limits,
        cases: measured.cases.iter().map(case).collect(),
        peers: peers.iter().map(|time| (&*time.problem, &*time.peer, time.peer_ns)).collect(),
        skipped: &measured.skipped,
        failed: &measured.failed,
    }
}
