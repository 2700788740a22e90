//! Groups trials into blocks for the gate, and determines which blocks are still to run; all
//! functions of the module `rounds` are pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::gate::inconclusive_reason::{InconclusiveReason, MeasurementFailureOnSide};
use crate::gate::paired::{
    ComparedArm, ComparisonTestPlan, PairedDecisionsOfRound, TimedTrialBlock,
    TimedTrialBlocksByCase,
};
use kernelgate::record::criterion_store::IMPLEMENTATION_NAME_OF_CRITERION_CASES;
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, CaseTimeInTrial, TrialOfComparison,
};
use kernelgate::stats::{median, weighted_median};
use kernelgate_cuda::CaseFailureReason;

/// Text for a requested case that a bench process neither timed, failed nor skipped.
const NOT_LISTED_REASON: &str = "the bench did not list it";
pub const PROCESSES_PER_BLOCK: usize = 4;

/// Returns which build runs at a place of a block: base, head, head, base; every second block has
/// the reverse order.
pub const fn arm_at_place_of_block(block: usize, place: usize) -> ComparedArm {
    let base_leads = block.is_multiple_of(2);
    let outer = place == 0 || place + 1 == PROCESSES_PER_BLOCK;
    if base_leads == outer { ComparedArm::BaseBuild } else { ComparedArm::HeadBuild }
}

/// Reduces the samples of each case in one process to one time: their median, weighted for samples
/// of unequal numbers of launches.
///
/// In the median of a case's samples, a sample with more launches (from Criterion's linear
/// sampling) has a weight proportional to the square root of its number of launches. If launch
/// times scatter independently, the square root of the launch count is proportional to the inverse
/// standard deviation of a sample's mean, which gives the median the least variance. The square
/// root also gives long samples, which interruptions disturb most, less weight than a mean, a
/// slope, or a weight equal to the number of launches would.
pub fn median_timings_by_case(run: &BenchProcessRun) -> BTreeMap<String, CaseTimeInTrial> {
    let others = run.telemetry.iter().filter_map(|reading| reading.other_process_count).max();
    let timing_of = |case: &CaseRecordWithSamples| {
        let samples = &case.samples;
        let times = samples.launch_times_by_sample_ns();
        let weights: Vec<f64> =
            samples.launches_per_sample.iter().map(|launches| (*launches as f64).sqrt()).collect();
        let cycles: Vec<f64> = times
            .iter()
            .zip(&samples.sm_clock_per_sample_mhz)
            .map(|(time_ns, mhz)| time_ns * mhz * 1e-3)
            .collect();
        CaseTimeInTrial {
            median_time_ns: weighted_median(&times, &weights),
            median_cycles_per_launch: (!cycles.is_empty()).then(|| median(&cycles)),
            contention_share: match run.environment.is_cpu_run() {
                true => samples.conditions.other_processes_cpu_share,
                false => samples
                    .conditions
                    .other_gpu_processes
                    .or(others)
                    .map(|others| if others > 0 { 1.0 } else { 0.0 }),
            },
            at_power_cap: samples.power.as_ref().is_some_and(|power| power.at_power_cap),
            slowed_by_heat_or_hardware: samples.conditions.throttled_samples > 0,
            time_is_mean: case.implementation == IMPLEMENTATION_NAME_OF_CRITERION_CASES,
        }
    };
    run.cases.iter().map(|(id, case)| (id.clone(), timing_of(case))).collect()
}

/// Removes the trials of blocks that did not complete all four processes.
pub fn remove_trials_of_unfinished_blocks(trials: &mut Vec<TrialOfComparison>) {
    let mut places: BTreeMap<(u32, String, usize), usize> = BTreeMap::new();
    for trial in trials.iter().filter(|trial| trial.reason_of_early_end.is_none()) {
        *places.entry((trial.round, trial.bench.clone(), trial.block_in_round)).or_default() += 1;
    }
    trials.retain(|trial| {
        let whole = places.get(&(trial.round, trial.bench.clone(), trial.block_in_round))
            == Some(&PROCESSES_PER_BLOCK);
        whole || trial.reason_of_early_end.is_some()
    });
}

/// Returns the complete blocks of a round, by case, in the order of time. A block counts for a case
/// only if all four processes of the block timed the case.
pub fn complete_blocks_by_case(trials: &[TrialOfComparison], round: u32) -> TimedTrialBlocksByCase {
    let mut blocks: Vec<((&str, usize), Vec<&TrialOfComparison>)> = Vec::new();
    for trial in
        trials.iter().filter(|trial| trial.round == round && trial.reason_of_early_end.is_none())
    {
        let key = (trial.bench.as_str(), trial.block_in_round);
        match blocks.iter_mut().find(|(other, _)| *other == key) {
            Some((_, places)) => places.push(trial),
            None => blocks.push((key, vec![trial])),
        }
    }
    let mut observed = TimedTrialBlocksByCase::new();
    for (_, mut places) in
        blocks.into_iter().filter(|(_, places)| places.len() == PROCESSES_PER_BLOCK)
    {
        places.sort_by_key(|trial| trial.position_in_block);
        for id in places[0].cases.keys() {
            let pair_of = |head: bool| -> Option<[CaseTimeInTrial; 2]> {
                let found = places
                    .iter()
                    .filter(|trial| trial.ran_head_build == head)
                    .map(|trial| trial.cases.get(id).copied());
                found.collect::<Option<Vec<_>>>()?.try_into().ok()
            };
            if let (Some(base), Some(head)) = (pair_of(false), pair_of(true)) {
                let leader = if places[0].ran_head_build {
                    ComparedArm::HeadBuild
                } else {
                    ComparedArm::BaseBuild
                };
                observed.entry(id.clone()).or_default().push(TimedTrialBlock {
                    first_and_last_arm: leader,
                    base,
                    head,
                });
            }
        }
    }
    observed
}

/// Returns the requested cases for which more blocks are needed: those that the gate left
/// undecided, and those without a block.
pub fn cases_that_need_more_blocks(
    wanted: &BTreeSet<String>,
    observed: &TimedTrialBlocksByCase,
    outcome: &PairedDecisionsOfRound,
) -> BTreeSet<String> {
    wanted
        .iter()
        .filter(|id| !observed.contains_key(*id) || outcome.undecided_cases.contains(id))
        .cloned()
        .collect()
}

/// Returns the requested cases without a time in a process's run, each with the reason: skipped by
/// the process, or not listed by the bench.
pub fn reasons_of_untimed_cases(
    asked: &BTreeSet<String>,
    run: Option<&BenchProcessRun>,
) -> BTreeMap<String, String> {
    let timed = |id: &&String| run.is_some_and(|run| run.cases.contains_key(*id));
    let failed = |id: &&String| run.is_some_and(|run| run.failed.contains_key(*id));
    let reason = |id: &String| {
        run.and_then(|run| run.skipped.get(id)).map_or(NOT_LISTED_REASON, String::as_str)
    };
    let without = asked.iter().filter(|id| !timed(id) && !failed(id));
    without.map(|id| (id.clone(), reason(id).to_owned())).collect()
}

/// Returns the cases that failed in a process of the head, each with the error.
pub fn failures_in_head_processes(
    trials: &[TrialOfComparison],
) -> BTreeMap<String, CaseFailureReason> {
    trials
        .iter()
        .filter(|trial| trial.ran_head_build)
        .flat_map(|trial| trial.failed.clone())
        .collect()
}

/// Returns the cases that later trials no longer request, with the first reason: a process of
/// either build skipped the case, or it failed in a process of the base.
pub fn reasons_to_stop_timing_cases(
    trials: &[TrialOfComparison],
) -> BTreeMap<String, InconclusiveReason> {
    let mut stopped = BTreeMap::new();
    for trial in trials {
        let side =
            if trial.ran_head_build { ComparedArm::HeadBuild } else { ComparedArm::BaseBuild };
        for (id, why) in &trial.skipped {
            let skipped = || {
                InconclusiveReason::CaseSkipped(MeasurementFailureOnSide::in_side_with_reason(
                    side,
                    why.as_str(),
                ))
            };
            stopped.entry(id.clone()).or_insert_with(skipped);
        }
        for (id, error) in trial.failed.iter().filter(|_| side == ComparedArm::BaseBuild) {
            let failed = || {
                InconclusiveReason::CaseFailedInBase(MeasurementFailureOnSide::in_side_with_reason(
                    side,
                    error.failure_sentence.as_str(),
                ))
            };
            stopped.entry(id.clone()).or_insert_with(failed);
        }
    }
    stopped
}

/// Returns the number of the next block of a bench in a round, counted from 0.
pub fn next_block_of_bench(trials: &[TrialOfComparison], round: u32, bench: &str) -> usize {
    trials
        .iter()
        .filter(|trial| trial.round == round && trial.bench == bench)
        .map(|trial| trial.block_in_round + 1)
        .max()
        .unwrap_or(0)
}

/// Estimates the remaining time of a round, from the blocks that each undecided case needs and the
/// wall time per case of its bench's last block.
pub fn estimate_round_time_left(
    trials: &[TrialOfComparison],
    round: u32,
    open: &BTreeSet<String>,
    outcome: &PairedDecisionsOfRound,
    plan: &ComparisonTestPlan,
) -> EstimatedRoundTimeLeft {
    let (mut likely_s, mut most_s) = (0.0, 0.0);
    let of_round = || trials.iter().filter(|trial| trial.round == round);
    let benches: BTreeSet<&str> = of_round().map(|trial| trial.bench.as_str()).collect();
    for bench in benches {
        let done = next_block_of_bench(trials, round, bench);
        let last: Vec<&TrialOfComparison> =
            of_round().filter(|it| it.bench == bench && it.block_in_round + 1 == done).collect();
        let cases: BTreeSet<&String> = last.iter().flat_map(|trial| trial.cases.keys()).collect();
        let wall_s: f64 = last.iter().map(|trial| trial.wall_s).sum();
        let most = plan.max_trial_blocks.saturating_sub(done);
        let likely = |id: &String| {
            let decision = outcome.decision_on_case(id)?;
            Some(
                decision
                    .pairs_needed?
                    .saturating_sub(decision.usable_pairs)
                    .div_ceil(2)
                    .clamp(1, most),
            )
        };
        for id in cases.iter().filter(|id| open.contains(**id)) {
            let block_s = wall_s / cases.len() as f64;
            likely_s += block_s * likely(id).unwrap_or(most) as f64;
            most_s += block_s * most as f64;
        }
    }
    EstimatedRoundTimeLeft { likely_time_left_s: likely_s, max_time_left_s: most_s }
}

/// Estimate of how long the current round of a comparison still takes, seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EstimatedRoundTimeLeft {
    /// Estimated remaining time of the round, seconds, if the later pairs have the same variance as
    /// the pairs so far.
    pub likely_time_left_s: f64,
    /// Longest remaining time of the round, seconds: no undecided case is decided before the plan's
    /// last block.
    pub max_time_left_s: f64,
}

impl EstimatedRoundTimeLeft {
    /// Weight of the newest estimate of the time left against the previous one, because a single
    /// block changes the estimate a lot while blocks are few.
    const NEWEST_TIME_LEFT_ESTIMATE_WEIGHT: f64 = 0.25;

    /// Averages this estimate of the time left with the one that was shown `passed_s` seconds ago
    /// and is counted down; the result never exceeds the longest remaining time.
    pub fn smoothed_with_previous_estimate(self, before: Option<Self>, passed_s: f64) -> Self {
        let Some(before) = before else { return self };
        let counted_down = (before.likely_time_left_s - passed_s).max(0.0);
        let likely_s = Self::NEWEST_TIME_LEFT_ESTIMATE_WEIGHT * self.likely_time_left_s
            + (1.0 - Self::NEWEST_TIME_LEFT_ESTIMATE_WEIGHT) * counted_down;
        Self { likely_time_left_s: likely_s.min(self.max_time_left_s), ..self }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use kernelgate::record::{CaseRecordWithSamples, CommitAndChanges, RunEnvironment};

    /// Makes a test trial of one case at the given block and place.
    pub fn test_trial(block: usize, place: usize, time_ns: f64) -> TrialOfComparison {
        TrialOfComparison {
            round: 1,
            bench: "b".to_owned(),
            block_in_round: block,
            position_in_block: place,
            ran_head_build: arm_at_place_of_block(block, place) == ComparedArm::HeadBuild,
            wall_s: 1.0,
            cases: [(
                "x".to_owned(),
                CaseTimeInTrial { median_time_ns: time_ns, ..CaseTimeInTrial::default() },
            )]
            .into(),
            failed: BTreeMap::new(),
            skipped: BTreeMap::new(),
            reason_of_early_end: None,
        }
    }

    #[test]
    fn an_untimed_case_is_requested_once_and_keeps_its_reason() {
        let requested: BTreeSet<String> =
            ["gone", "short", "timed", "wrong"].map(str::to_owned).into();
        fn test_reasons<T: From<&'static str>>(ids: &[&str]) -> BTreeMap<String, T> {
            ids.iter().map(|id| ((*id).to_owned(), "why".into())).collect()
        }
        let run = BenchProcessRun {
            cases: [(
                "timed".to_owned(),
                CaseRecordWithSamples::example_with_sample_times(vec![1.0]),
            )]
            .into(),
            skipped: test_reasons(&["short", "not asked for"]),
            failed: test_reasons(&["wrong"]),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                "r1-b0-p0",
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        };
        let skipped = reasons_of_untimed_cases(&requested, Some(&run));
        assert_eq!(
            skipped,
            [("gone", NOT_LISTED_REASON), ("short", "why")]
                .map(|(id, why)| (id.to_owned(), why.to_owned()))
                .into()
        );
        assert_eq!(
            reasons_of_untimed_cases(&requested, None).len(),
            4,
            "a bench that has none of the cases"
        );
        let base = TrialOfComparison {
            skipped,
            failed: test_reasons(&["wrong"]),
            ..test_trial(0, 0, 1.0)
        };
        let head = TrialOfComparison {
            skipped: test_reasons(&["short", "late"]),
            failed: test_reasons(&["broken"]),
            ..test_trial(0, 1, 1.0)
        };
        let trials = [base, head];
        let (stopped, failed) =
            (reasons_to_stop_timing_cases(&trials), failures_in_head_processes(&trials));
        let skipped = |side| {
            InconclusiveReason::CaseSkipped(MeasurementFailureOnSide::in_side_with_reason(
                side, "why",
            ))
        };
        assert_eq!(stopped["short"], skipped(ComparedArm::BaseBuild), "the first reason");
        assert_eq!(stopped["late"], skipped(ComparedArm::HeadBuild));
        let failed_in_base = InconclusiveReason::CaseFailedInBase(
            MeasurementFailureOnSide::in_side_with_reason(ComparedArm::BaseBuild, "why"),
        );
        assert_eq!(stopped["wrong"], failed_in_base);
        assert_eq!(stopped.keys().collect::<Vec<_>>(), ["gone", "late", "short", "wrong"]);
        assert_eq!(failed.keys().collect::<Vec<_>>(), ["broken"]);
    }

    #[test]
    fn samples_are_weighted_by_the_root_of_their_number_of_launches() {
        // The test imitates Criterion's linear sampling: each sample has 1 to 5 times as many
        // launches; the short samples are outliers.
        let mut case =
            CaseRecordWithSamples::example_with_sample_times(vec![30.0, 44.0, 30.3, 40.0, 50.5]);
        case.samples.launches_per_sample = vec![1, 2, 3, 4, 5];
        let run = |case: &CaseRecordWithSamples| BenchProcessRun {
            cases: [("x".to_owned(), case.clone())].into(),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                "s",
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        };
        let found = |case: &CaseRecordWithSamples| median_timings_by_case(&run(case))["x"];
        assert_eq!((found(&case).median_time_ns, found(&case).time_is_mean), (10.1, false));
        case.samples.launches_per_sample = vec![1; 5];
        case.implementation = IMPLEMENTATION_NAME_OF_CRITERION_CASES.to_owned();
        assert_eq!((found(&case).median_time_ns, found(&case).time_is_mean), (40.0, true));
    }

    #[test]
    fn blocks_alternate_between_the_orders_abba_and_baab() {
        use ComparedArm::{BaseBuild, HeadBuild};
        assert_eq!(
            [0, 1, 2, 3].map(|place| arm_at_place_of_block(0, place)),
            [BaseBuild, HeadBuild, HeadBuild, BaseBuild]
        );
        assert_eq!(
            [0, 1, 2, 3].map(|place| arm_at_place_of_block(1, place)),
            [HeadBuild, BaseBuild, BaseBuild, HeadBuild]
        );
        assert_eq!(arm_at_place_of_block(2, 0), BaseBuild);
    }

    #[test]
    fn trials_of_unfinished_blocks_are_dropped() {
        let mut trials: Vec<_> =
            (0..7).map(|i| test_trial(i / 4, i % 4, 10.0 + i as f64)).collect();
        let blocks = &complete_blocks_by_case(&trials, 1)["x"];
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].first_and_last_arm, ComparedArm::BaseBuild);
        assert_eq!(blocks[0].base.map(|observation| observation.median_time_ns), [10.0, 13.0]);
        assert_eq!(blocks[0].head.map(|observation| observation.median_time_ns), [11.0, 12.0]);
        assert!(complete_blocks_by_case(&trials, 2).is_empty());
        assert_eq!(next_block_of_bench(&trials, 1, "b"), 2);
        remove_trials_of_unfinished_blocks(&mut trials);
        assert_eq!(
            (
                trials.len(),
                next_block_of_bench(&trials, 1, "b"),
                next_block_of_bench(&trials, 2, "b")
            ),
            (4, 1, 0)
        );
        trials[3].cases.clear();
        assert!(complete_blocks_by_case(&trials, 1).is_empty(), "a process lacks the case");
    }

    #[test]
    fn cases_without_a_finished_block_are_undecided() {
        let selected: BTreeSet<String> = ["x".to_owned(), "y".to_owned()].into();
        let trials: Vec<_> = (0..4).map(|i| test_trial(0, i, 1.0)).collect();
        let outcome = PairedDecisionsOfRound {
            decisions: vec![],
            undecided_cases: vec![],
            cases_with_differing_null_pairs: vec![],
            environment_is_stable: true,
        };
        assert_eq!(
            cases_that_need_more_blocks(&selected, &complete_blocks_by_case(&trials, 1), &outcome),
            ["y".to_owned()].into()
        );
    }

    /// In this test a bench has two undecided cases and its block takes 4 s: one case needs 10 more
    /// pairs, the other an unknown number.
    #[test]
    fn the_time_left_counts_the_cost_of_every_undecided_case() {
        let mut trials: Vec<_> = (0..8).map(|i| test_trial(i / 4, i % 4, 1.0)).collect();
        for trial in &mut trials {
            trial.cases.insert("y".to_owned(), CaseTimeInTrial::default());
        }
        let plan = ComparisonTestPlan { max_trial_blocks: 24, ..ComparisonTestPlan::default() };
        let mut outcome = crate::gate::paired::decide_cases_with_one_plan(
            &complete_blocks_by_case(&trials, 1),
            &plan,
            false,
        );
        for decision in &mut outcome.decisions {
            decision.pairs_needed = (decision.case_id == "x").then_some(14);
        }
        let open = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
        let left = |open| estimate_round_time_left(&trials, 1, &open, &outcome, &plan);
        assert_eq!(
            left(open(&["x"])),
            EstimatedRoundTimeLeft { likely_time_left_s: 10.0, max_time_left_s: 44.0 }
        );
        assert_eq!(
            left(open(&["x", "y"])),
            EstimatedRoundTimeLeft { likely_time_left_s: 54.0, max_time_left_s: 88.0 }
        );
        assert_eq!(
            left(open(&[])),
            EstimatedRoundTimeLeft { likely_time_left_s: 0.0, max_time_left_s: 0.0 }
        );
    }

    /// The test gives three estimates of the time left, a minute apart, of a comparison in which no
    /// case was decided: 1 s, 3 min, 1 s.
    #[test]
    fn a_smoothed_estimate_of_the_time_left_does_not_jump() {
        let raw = [180.0, 4.0, 176.0, 2.0, 172.0, 1.0, 168.0];
        let mut shown: Option<EstimatedRoundTimeLeft> = None;
        for likely_s in raw {
            let next =
                EstimatedRoundTimeLeft { likely_time_left_s: likely_s, max_time_left_s: 400.0 }
                    .smoothed_with_previous_estimate(shown, 2.0);
            let before = shown.map_or(180.0, |before| before.likely_time_left_s);
            assert!(
                (next.likely_time_left_s - before).abs() <= 48.0,
                "{before} then {}",
                next.likely_time_left_s
            );
            shown = Some(next);
        }
        assert!(shown.is_some_and(|shown| shown.likely_time_left_s > 60.0), "{shown:?}");
        let end = EstimatedRoundTimeLeft { likely_time_left_s: 1.0, max_time_left_s: 4.0 }
            .smoothed_with_previous_estimate(shown, 2.0);
        assert_eq!(end.likely_time_left_s, 4.0, "not more than the blocks that are left");
    }
}
