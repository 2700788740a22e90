//! Measures the host's launch time of suspected cases again, in alternating pairs of short base and
//! head processes, before a growth is reported.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{ComparisonEngine, index_of_side};
use crate::compare::InjectedHeadChanges;
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::BenchControlMethod;
use crate::compare::trials::trial_driver;
use crate::gate::costs::host_time;
use crate::gate::costs::{LaunchCostGrowthOfCase, LaunchCostKind};
use crate::gate::paired::ComparedArm;
use kernelgate::record::{TrialRequestToBench, TrialSamplingPlan};

impl ComparisonEngine<'_> {
    /// Returns the costs that grew; a growth of the host's launch time is first measured again, as
    /// long as the budget lasts.
    pub(super) fn confirm_grown_host_launch_times(
        &self,
        prepared: &PreparedSides,
        costs: Vec<LaunchCostGrowthOfCase>,
        started: Instant,
    ) -> Vec<LaunchCostGrowthOfCase> {
        let (suspected, mut rest): (Vec<_>, Vec<_>) =
            costs.into_iter().partition(|it| it.cost == LaunchCostKind::HostEnqueueTime);
        let needed = host_time::further_pairs_for_suspected_cases(suspected.len());
        rest.extend(host_time::confirm_suspected_growth(suspected, |cases, pair| {
            if started.elapsed() > self.request.round_time_budget {
                return None;
            }
            let (count, next) = (cases.len(), pair + 1);
            self.progress.print_detail(&format!(
                "the host may take longer to launch {count} cases: pair {next} of {needed}"
            ));
            Some(self.measure_launch_time_in_both_builds(prepared, cases, pair))
        }));
        rest
    }

    /// Runs one more process of the base and one of the head that measure the host's launch time of
    /// these cases.
    fn measure_launch_time_in_both_builds(
        &self,
        prepared: &PreparedSides,
        cases: &BTreeSet<String>,
        pair: usize,
    ) -> BTreeMap<String, [f64; 2]> {
        let mut found = BTreeMap::new();
        let ours = |bench: &&ComparedBench| {
            matches!(bench.control_method, BenchControlMethod::ProtocolVersion(_))
        };
        for bench in prepared.benches.iter().filter(ours) {
            let cases: BTreeSet<String> =
                bench.compared_cases.intersection(cases).cloned().collect();
            if cases.is_empty() {
                continue;
            }
            let mut times = [BTreeMap::new(), BTreeMap::new()];
            // The order of base and head alternates from pair to pair, so that a drift has opposite
            // signs in neighbouring pairs.
            let order = [ComparedArm::BaseBuild, ComparedArm::HeadBuild];
            for arm in if pair.is_multiple_of(2) { order } else { [order[1], order[0]] } {
                times[index_of_side(arm)] =
                    self.measure_launch_time_in_one_process(arm, bench, &cases);
            }
            let [base, mut head] = times;
            let both = |(id, base)| head.remove(&id).map(|head| (id, [base, head]));
            found.extend(base.into_iter().filter_map(both));
        }
        found
    }

    /// Runs one bench process that measures the host's launch time of these cases, nanoseconds per
    /// launch. If the process that measures launch times fails, prints its error and returns no
    /// times.
    fn measure_launch_time_in_one_process(
        &self,
        arm: ComparedArm,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
    ) -> BTreeMap<String, f64> {
        let request = TrialRequestToBench {
            sampling: TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
            ..self.request_for_one_trial(bench, arm, "host-time".to_owned(), cases.clone())
        };
        let run = self
            .describe_trial_process(arm, &bench.bench_name, &request, bench.process_timeout)
            .and_then(|mut trial| {
                trial.injection = InjectedHeadChanges::default();
                trial_driver::run_trial(&self.shared_trial_setup(), &trial)
            });
        match run {
            Ok(run) => {
                let times = run.into_iter().flat_map(|run| run.cases);
                let host_times =
                    times.filter_map(|(id, case)| Some((id, case.samples.costs.host_launch_ns?)));
                host_times.filter(|(_, time_ns)| *time_ns > 0.0).collect()
            }
            Err(why) => {
                self.progress.print_line(&format!(
                    "error: {arm} {} launched again: {why}",
                    bench.bench_name
                ));
                BTreeMap::new()
            }
        }
    }
}
