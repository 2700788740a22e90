//! Runs single bench processes before a calibration's comparison: they measure case times, anchor
//! rates and the sizes of injected delays. This module does not interpret the results of these
//! processes; `calibrate` does.

use std::collections::BTreeMap;

use crate::compare::CompareError;
use crate::compare::engine::ComparisonEngine;
use crate::compare::engine::rounds;
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::BenchControlMethod;
use crate::gate::paired::ComparedArm;
use kernelgate::measure::anchors::ShardAnchorRecord;
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, TrialRequestToBench, TrialSamplingPlan,
};
use kernelgate_cuda::CaseFailureReason;

/// Sizes of the injected GPU delays of each case, in the unit of the kernels that cause the delay.
#[derive(Debug, Default)]
pub struct InjectedGpuDelaySizes {
    /// Size of the injected delay for each case.
    pub sizes: BTreeMap<String, u64>,
    /// Cases to which the requested delay cannot be added, with the reasons.
    pub failed: BTreeMap<String, CaseFailureReason>,
}

impl ComparisonEngine<'_> {
    /// Runs one process of each of the base's benches, and returns the measured nanoseconds per
    /// launch of each case.
    pub fn time_cases_in_one_process(
        &self,
        prepared: &PreparedSides,
    ) -> Result<BTreeMap<String, f64>, CompareError> {
        let runs = self.run_one_process_per_bench(prepared, ComparedArm::Base, "probe")?;
        let timings = runs.iter().flat_map(rounds::median_timings_by_case);
        Ok(timings.map(|(id, timing)| (id, timing.time_ns)).collect())
    }

    /// Runs one process of the base that measures the anchors (rates of fixed work), and returns
    /// their record; `None` if every bench uses Criterion without kernelgate.
    pub fn measure_anchors_in_base_process(
        &self,
        prepared: &PreparedSides,
    ) -> Result<Option<ShardAnchorRecord>, CompareError> {
        let of_harness =
            |bench: &&ComparedBench| bench.control_method != BenchControlMethod::Criterion;
        let Some(bench) = prepared.benches.iter().find(of_harness) else { return Ok(None) };
        let cases = bench.cases.iter().take(1).cloned().collect();
        let request = TrialRequestToBench {
            anchors: true,
            sampling: TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
            ..self.request_for_one_trial(bench, ComparedArm::Base, "anchors".to_owned(), cases)
        };
        let broken = |reason| CompareError::Broken { bench: bench.name.clone(), reason };
        let run = self
            .run_trial_process(ComparedArm::Base, &bench.name, &request, bench.timeout)
            .map_err(broken)?;
        Ok(run.and_then(|run| run.anchors))
    }

    /// Runs one process of each of the head's benches, and returns the delay size that it found for
    /// each case, or the reason why it found none.
    pub fn measure_injected_delay_sizes(
        &self,
        prepared: &PreparedSides,
    ) -> Result<InjectedGpuDelaySizes, CompareError> {
        let mut delayed = prepared.clone();
        delayed.retain_cases(&self.request.injection.delays_ns.keys().cloned().collect());
        let runs = self.run_one_process_per_bench(&delayed, ComparedArm::Head, "delays")?;
        let mut found = InjectedGpuDelaySizes::default();
        for run in runs {
            let sized =
                |(id, case): (_, CaseRecordWithSamples)| Some((id, case.samples.delay_size?));
            found.sizes.extend(run.cases.into_iter().filter_map(sized));
            found.failed.extend(run.failed);
        }
        Ok(found)
    }

    /// Runs one process of each bench of one side (base or head), which times all its cases as in
    /// any other trial.
    fn run_one_process_per_bench(
        &self,
        prepared: &PreparedSides,
        arm: ComparedArm,
        session: &str,
    ) -> Result<Vec<BenchProcessRun>, CompareError> {
        let mut runs = Vec::new();
        for bench in &prepared.benches {
            let request =
                self.request_for_one_trial(bench, arm, session.to_owned(), bench.cases.clone());
            let run = self.run_trial_process(arm, &bench.name, &request, bench.timeout);
            let broken = |reason| CompareError::Broken { bench: bench.name.clone(), reason };
            let run = run.map_err(broken)?;
            runs.extend(run);
        }
        Ok(runs)
    }
}
