//! Runs single bench processes before a calibration's comparison: they measure case times, anchor
//! rates and the sizes of injected delays. The module `probe_processes` does not interpret the
//! results of its processes; `calibrate` does.

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
    /// Size of the injected GPU delay for each case.
    pub delay_sizes_by_case: BTreeMap<String, u64>,
    /// Cases to which the requested delay cannot be added, with the reasons.
    pub cases_without_delay: BTreeMap<String, CaseFailureReason>,
}

impl ComparisonEngine<'_> {
    /// Runs one process of each of the base's benches, and returns the measured nanoseconds per
    /// launch of each case.
    pub fn time_cases_in_one_process(
        &self,
        prepared: &PreparedSides,
    ) -> Result<BTreeMap<String, f64>, CompareError> {
        let runs = self.run_one_process_per_bench(prepared, ComparedArm::BaseBuild, "probe")?;
        let timings = runs.iter().flat_map(rounds::median_timings_by_case);
        Ok(timings.map(|(id, timing)| (id, timing.median_time_ns)).collect())
    }

    /// Runs one process of the base that measures the anchors (rates of fixed work), and returns
    /// their record; `None` if every bench uses Criterion without kernelgate.
    pub fn measure_anchors_in_base_process(
        &self,
        prepared: &PreparedSides,
    ) -> Result<Option<ShardAnchorRecord>, CompareError> {
        let of_harness =
            |bench: &&ComparedBench| bench.control_method != BenchControlMethod::CriterionFlags;
        let Some(bench) = prepared.benches.iter().find(of_harness) else { return Ok(None) };
        let cases = bench.compared_cases.iter().take(1).cloned().collect();
        let request = TrialRequestToBench {
            measure_anchor_rates: true,
            sampling: TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
            ..self.request_for_one_trial(bench, ComparedArm::BaseBuild, "anchors".to_owned(), cases)
        };
        let broken = |reason| CompareError::CalibrationBenchFailed {
            bench: bench.bench_name.clone(),
            failure_reason: reason,
        };
        let run = self
            .run_trial_process(
                ComparedArm::BaseBuild,
                &bench.bench_name,
                &request,
                bench.process_timeout,
            )
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
        delayed.retain_cases(&self.request.injection.injected_delays_ns.keys().cloned().collect());
        let runs = self.run_one_process_per_bench(&delayed, ComparedArm::HeadBuild, "delays")?;
        let mut found = InjectedGpuDelaySizes::default();
        for run in runs {
            let sized = |(id, case): (_, CaseRecordWithSamples)| {
                Some((id, case.samples.delay_ns_or_bytes?))
            };
            found.delay_sizes_by_case.extend(run.cases.into_iter().filter_map(sized));
            found.cases_without_delay.extend(run.failed);
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
            let request = self.request_for_one_trial(
                bench,
                arm,
                session.to_owned(),
                bench.compared_cases.clone(),
            );
            let run =
                self.run_trial_process(arm, &bench.bench_name, &request, bench.process_timeout);
            let broken = |reason| CompareError::CalibrationBenchFailed {
                bench: bench.bench_name.clone(),
                failure_reason: reason,
            };
            let run = run.map_err(broken)?;
            runs.extend(run);
        }
        Ok(runs)
    }
}
