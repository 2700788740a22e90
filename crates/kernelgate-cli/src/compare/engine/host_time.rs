//! Measures the host's time of a launch again if the processes that verified both sides make it
//! suspect: further pairs of short processes, which launch and do not measure the device's time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{ComparisonEngine, index};
use crate::compare::SideInjection;
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::BenchDriver;
use crate::compare::trials::trial_driver;
use crate::gate::costs::host_time;
use crate::gate::costs::{CaseCost, CostGrowth};
use crate::gate::paired::Arm;
use kernelgate::record::{TrialRequest, TrialSampling};

impl ComparisonEngine<'_> {
    /// Returns the costs that grew; grown host times are measured again as long as the budget
    /// lasts.
    pub(super) fn measure_host_time_again(
        &self,
        prepared: &PreparedSides,
        costs: Vec<CostGrowth>,
        started: Instant,
    ) -> Vec<CostGrowth> {
        let (suspected, mut rest): (Vec<_>, Vec<_>) =
            costs.into_iter().partition(|it| it.cost == CaseCost::HostTime);
        let needed = host_time::further_pairs(suspected.len());
        rest.extend(host_time::confirm_cost_growth(suspected, |cases, pair| {
            if started.elapsed() > self.request.budget {
                return None;
            }
            let (count, next) = (cases.len(), pair + 1);
            self.progress.detail(&format!(
                "the host may take longer to launch {count} cases: pair {next} of {needed}"
            ));
            Some(self.measure_host_times(prepared, cases, pair))
        }));
        rest
    }

    /// Measures the host time of launches of these cases in one more process of base and head each.
    fn measure_host_times(
        &self,
        prepared: &PreparedSides,
        cases: &BTreeSet<String>,
        pair: usize,
    ) -> BTreeMap<String, [f64; 2]> {
        let mut found = BTreeMap::new();
        let ours = |bench: &&ComparedBench| matches!(bench.driver, BenchDriver::Protocol(_));
        for bench in prepared.benches.iter().filter(ours) {
            let cases: BTreeSet<String> = bench.cases.intersection(cases).cloned().collect();
            if cases.is_empty() {
                continue;
            }
            let mut times = [BTreeMap::new(), BTreeMap::new()];
            // The order alternates, so that a drift has opposite signs in neighbouring pairs.
            let order = [Arm::Base, Arm::Head];
            for arm in if pair.is_multiple_of(2) { order } else { [order[1], order[0]] } {
                times[index(arm)] = self.host_times_of(arm, bench, &cases);
            }
            let [base, mut head] = times;
            let both = |(id, base)| head.remove(&id).map(|head| (id, [base, head]));
            found.extend(base.into_iter().filter_map(both));
        }
        found
    }

    /// Runs a process that measures the host time of these cases. If the process fails, prints the
    /// error and returns no times.
    fn host_times_of(
        &self,
        arm: Arm,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
    ) -> BTreeMap<String, f64> {
        let request = TrialRequest {
            sampling: TrialSampling::VERIFICATION_SAMPLING,
            ..self.trial_request(bench, arm, "host-time".to_owned(), cases.clone())
        };
        let run =
            self.describe_trial(arm, &bench.name, &request, bench.timeout).and_then(|mut trial| {
                trial.injection = SideInjection::default();
                trial_driver::run(&self.setup(), &trial)
            });
        match run {
            Ok(run) => {
                let times = run.into_iter().flat_map(|run| run.cases);
                let host_times =
                    times.filter_map(|(id, case)| Some((id, case.samples.costs.host_launch_ns?)));
                host_times.filter(|(_, time_ns)| *time_ns > 0.0).collect()
            }
            Err(why) => {
                self.progress.say(&format!("error: {arm} {} launched again: {why}", bench.name));
                BTreeMap::new()
            }
        }
    }
}
