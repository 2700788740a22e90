//! Runs single processes before a calibration's comparison, which measure how long cases take and
//! find the sizes of injected delays. This module does not use the results of these processes;
//! `calibrate` does.

use std::collections::BTreeMap;

use crate::compare::CompareError;
use crate::compare::engine::ComparisonEngine;
use crate::compare::engine::rounds;
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::BenchDriver;
use crate::gate::paired::Arm;
use kernelgate::measure::anchors::AnchorRecord;
use kernelgate::record::{CaseRecord, ProcessRun, TrialRequest, TrialSampling};
use kernelgate_cuda::CaseFailure;

/// Sizes of the injected delays on a GPU, in the unit of the delaying kernels.
#[derive(Debug, Default)]
pub struct InjectedDelaySizes {
    /// Sizes by case.
    pub sizes: BTreeMap<String, u64>,
    /// Cases to which the requested delay cannot be added, with the reasons.
    pub failed: BTreeMap<String, CaseFailure>,
}

impl ComparisonEngine<'_> {
    /// Runs one process of each bench of the base, timed as any other: nanoseconds a launch by
    /// case, and how long the cases were timed.
    pub fn probe(&self, prepared: &PreparedSides) -> Result<BTreeMap<String, f64>, CompareError> {
        let runs = self.run_one_process(prepared, Arm::Base, "probe")?;
        let timings = runs.iter().flat_map(rounds::timings_by_case);
        Ok(timings.map(|(id, timing)| (id, timing.time_ns)).collect())
    }

    /// Returns the rates of fixed work, which one process of the base measures beside one case;
    /// absent if every bench uses Criterion alone.
    pub fn anchors(&self, prepared: &PreparedSides) -> Result<Option<AnchorRecord>, CompareError> {
        let of_harness = |bench: &&ComparedBench| bench.driver != BenchDriver::Criterion;
        let Some(bench) = prepared.benches.iter().find(of_harness) else { return Ok(None) };
        let cases = bench.cases.iter().take(1).cloned().collect();
        let request = TrialRequest {
            anchors: true,
            sampling: TrialSampling::VERIFICATION_SAMPLING,
            ..self.trial_request(bench, Arm::Base, "anchors".to_owned(), cases)
        };
        let broken = |reason| CompareError::Broken { bench: bench.name.clone(), reason };
        let run =
            self.run_process(Arm::Base, &bench.name, &request, bench.timeout).map_err(broken)?;
        Ok(run.and_then(|run| run.anchors))
    }

    /// Returns the delay sizes that one process of the head finds for each bench, by case, and the
    /// reasons why other cases have none.
    pub fn injected_delay_sizes(
        &self,
        prepared: &PreparedSides,
    ) -> Result<InjectedDelaySizes, CompareError> {
        let mut delayed = prepared.clone();
        delayed.keep(&self.request.injection.delays_ns.keys().cloned().collect());
        let runs = self.run_one_process(&delayed, Arm::Head, "delays")?;
        let mut found = InjectedDelaySizes::default();
        for run in runs {
            let sized = |(id, case): (_, CaseRecord)| Some((id, case.samples.delay_size?));
            found.sizes.extend(run.cases.into_iter().filter_map(sized));
            found.failed.extend(run.failed);
        }
        Ok(found)
    }

    /// Runs one process of each bench of a side, timed as any other.
    fn run_one_process(
        &self,
        prepared: &PreparedSides,
        arm: Arm,
        session: &str,
    ) -> Result<Vec<ProcessRun>, CompareError> {
        let mut runs = Vec::new();
        for bench in &prepared.benches {
            let request = self.trial_request(bench, arm, session.to_owned(), bench.cases.clone());
            let run = self.run_process(arm, &bench.name, &request, bench.timeout);
            let broken = |reason| CompareError::Broken { bench: bench.name.clone(), reason };
            let run = run.map_err(broken)?;
            runs.extend(run);
        }
        Ok(runs)
    }
}
