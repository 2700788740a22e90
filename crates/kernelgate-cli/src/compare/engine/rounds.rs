//! Turns trials into blocks for the gate, and finds the blocks still to run: pure functions.

use std::collections::{BTreeMap, BTreeSet};

use crate::gate::inconclusive_reason::{BuildFailure, InconclusiveReason};
use crate::gate::paired::{Arm, BlocksByCase, PairedOutcome, TestPlan, TrialBlock};
use kernelgate::record::criterion_store::CRITERION_IMPLEMENTATION;
use kernelgate::record::{CaseRecord, CaseTiming, ProcessRun, TrialRecord};
use kernelgate::stats::{median, weighted_median};
use kernelgate_cuda::CaseFailure;

/// The reason for a case that the process neither timed, failed nor skipped.
const NOT_LISTED_REASON: &str = "the bench did not list it";
pub const PROCESSES_PER_BLOCK: usize = 4;

/// The build at a place of a block: base, head, head, base, and the reverse in every second block.
pub const fn arm(block: usize, place: usize) -> Arm {
    let base_leads = block.is_multiple_of(2);
    let outer = place == 0 || place + 1 == PROCESSES_PER_BLOCK;
    if base_leads == outer { Arm::Base } else { Arm::Head }
}

/// The timing of each case in a process: the median over its samples.
///
/// Samples of different numbers of launches (Criterion's, in linear sampling) are weighted by the
/// root of the number. If launches scatter independently, this is the inverse of the standard
/// deviation of a sample's mean, the weight for which a median has the least variance. If
/// interruptions make samples longer, the longest samples, which are interrupted most often, get
/// less weight than in a mean, a slope, or a median weighted by the number itself.
pub fn timings_by_case(run: &ProcessRun) -> BTreeMap<String, CaseTiming> {
    let others = run.telemetry.iter().filter_map(|reading| reading.other_processes).max();
    let timing_of = |case: &CaseRecord| {
        let samples = &case.samples;
        let times = samples.per_launch_ns();
        let weights: Vec<f64> =
            samples.launches.iter().map(|launches| (*launches as f64).sqrt()).collect();
        let cycles: Vec<f64> = times
            .iter()
            .zip(&samples.clock_mhz)
            .map(|(time_ns, mhz)| time_ns * mhz * 1e-3)
            .collect();
        CaseTiming {
            time_ns: weighted_median(&times, &weights),
            cycles: (!cycles.is_empty()).then(|| median(&cycles)),
            contention: match run.environment.is_on_host() {
                true => samples.conditions.contention,
                false => samples
                    .conditions
                    .other_processes
                    .or(others)
                    .map(|others| if others > 0 { 1.0 } else { 0.0 }),
            },
            at_cap: samples.power.as_ref().is_some_and(|power| power.at_cap),
            throttled: samples.conditions.throttled > 0,
            averaged: case.implementation == CRITERION_IMPLEMENTATION,
        }
    };
    run.cases.iter().map(|(id, case)| (id.clone(), timing_of(case))).collect()
}

/// Removes the trials of blocks that were not finished.
pub fn drop_unfinished_blocks(trials: &mut Vec<TrialRecord>) {
    let mut places: BTreeMap<(u32, String, usize), usize> = BTreeMap::new();
    for trial in trials.iter().filter(|trial| trial.broke.is_none()) {
        *places.entry((trial.round, trial.bench.clone(), trial.block)).or_default() += 1;
    }
    trials.retain(|trial| {
        let whole = places.get(&(trial.round, trial.bench.clone(), trial.block))
            == Some(&PROCESSES_PER_BLOCK);
        whole || trial.broke.is_some()
    });
}

/// Whole blocks of a round, by case and in time order. A block counts for a case only if all its
/// processes timed the case.
pub fn whole_blocks_by_case(trials: &[TrialRecord], round: u32) -> BlocksByCase {
    let mut blocks: Vec<((&str, usize), Vec<&TrialRecord>)> = Vec::new();
    for trial in trials.iter().filter(|trial| trial.round == round && trial.broke.is_none()) {
        let key = (trial.bench.as_str(), trial.block);
        match blocks.iter_mut().find(|(other, _)| *other == key) {
            Some((_, places)) => places.push(trial),
            None => blocks.push((key, vec![trial])),
        }
    }
    let mut observed = BlocksByCase::new();
    for (_, mut places) in
        blocks.into_iter().filter(|(_, places)| places.len() == PROCESSES_PER_BLOCK)
    {
        places.sort_by_key(|trial| trial.place);
        for id in places[0].cases.keys() {
            let pair_of = |head: bool| -> Option<[CaseTiming; 2]> {
                let found = places
                    .iter()
                    .filter(|trial| trial.head == head)
                    .map(|trial| trial.cases.get(id).copied());
                found.collect::<Option<Vec<_>>>()?.try_into().ok()
            };
            if let (Some(base), Some(head)) = (pair_of(false), pair_of(true)) {
                let leader = if places[0].head { Arm::Head } else { Arm::Base };
                observed.entry(id.clone()).or_default().push(TrialBlock { leader, base, head });
            }
        }
    }
    observed
}

/// Cases that more blocks may decide: cases that the gate could not decide yet, and cases without a
/// block.
pub fn undecided_cases(
    wanted: &BTreeSet<String>,
    observed: &BlocksByCase,
    outcome: &PairedOutcome,
) -> BTreeSet<String> {
    wanted
        .iter()
        .filter(|id| !observed.contains_key(*id) || outcome.undecided.contains(id))
        .cloned()
        .collect()
}

/// Returns the requested cases that have no time in a run, each with the reason: skipped by it, or
/// absent.
pub fn skip_reasons(
    asked: &BTreeSet<String>,
    run: Option<&ProcessRun>,
) -> BTreeMap<String, String> {
    let timed = |id: &&String| run.is_some_and(|run| run.cases.contains_key(*id));
    let failed = |id: &&String| run.is_some_and(|run| run.failed.contains_key(*id));
    let reason = |id: &String| {
        run.and_then(|run| run.skipped.get(id)).map_or(NOT_LISTED_REASON, String::as_str)
    };
    let without = asked.iter().filter(|id| !timed(id) && !failed(id));
    without.map(|id| (id.clone(), reason(id).to_owned())).collect()
}

/// Cases that failed in a process of the head, with the error.
pub fn failure_reasons(trials: &[TrialRecord]) -> BTreeMap<String, CaseFailure> {
    trials.iter().filter(|trial| trial.head).flat_map(|trial| trial.failed.clone()).collect()
}

/// Cases that are not requested again although the head did not fail, with the first reason: a
/// process of either build skipped them, or one of the base failed.
pub fn stop_reasons(trials: &[TrialRecord]) -> BTreeMap<String, InconclusiveReason> {
    let mut stopped = BTreeMap::new();
    for trial in trials {
        let side = if trial.head { Arm::Head } else { Arm::Base };
        for (id, why) in &trial.skipped {
            let skipped = || InconclusiveReason::Skipped(BuildFailure::new(side, why.as_str()));
            stopped.entry(id.clone()).or_insert_with(skipped);
        }
        for (id, error) in trial.failed.iter().filter(|_| side == Arm::Base) {
            let failed =
                || InconclusiveReason::Failed(BuildFailure::new(side, error.text.as_str()));
            stopped.entry(id.clone()).or_insert_with(failed);
        }
    }
    stopped
}

/// The next block of a bench binary in a round.
pub fn next_block(trials: &[TrialRecord], round: u32, bench: &str) -> usize {
    trials
        .iter()
        .filter(|trial| trial.round == round && trial.bench == bench)
        .map(|trial| trial.block + 1)
        .max()
        .unwrap_or(0)
}

/// Estimates the remaining time of a round: the blocks that each open case probably needs, at the
/// wall time per case of the last block of its bench.
pub fn time_left(
    trials: &[TrialRecord],
    round: u32,
    open: &BTreeSet<String>,
    outcome: &PairedOutcome,
    plan: &TestPlan,
) -> RoundTimeLeft {
    let (mut likely_s, mut most_s) = (0.0, 0.0);
    let of_round = || trials.iter().filter(|trial| trial.round == round);
    let benches: BTreeSet<&str> = of_round().map(|trial| trial.bench.as_str()).collect();
    for bench in benches {
        let done = next_block(trials, round, bench);
        let last: Vec<&TrialRecord> =
            of_round().filter(|it| it.bench == bench && it.block + 1 == done).collect();
        let cases: BTreeSet<&String> = last.iter().flat_map(|trial| trial.cases.keys()).collect();
        let wall_s: f64 = last.iter().map(|trial| trial.wall_s).sum();
        let most = plan.max_blocks.saturating_sub(done);
        let likely = |id: &String| {
            let decision = outcome.decision(id)?;
            Some(decision.pairs_needed?.saturating_sub(decision.pairs).div_ceil(2).clamp(1, most))
        };
        for id in cases.iter().filter(|id| open.contains(**id)) {
            let block_s = wall_s / cases.len() as f64;
            likely_s += block_s * likely(id).unwrap_or(most) as f64;
            most_s += block_s * most as f64;
        }
    }
    RoundTimeLeft { likely_s, most_s }
}

/// Estimate of the time left in the current round, seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundTimeLeft {
    /// Remaining time if later pairs have the variance of the pairs so far, seconds.
    pub likely_s: f64,
    /// The time if no open case is decided before the blocks end.
    pub most_s: f64,
}

impl RoundTimeLeft {
    /// Weight of the newest estimate: a single block moves it a lot while blocks are few.
    const NEWEST_ESTIMATE_WEIGHT: f64 = 0.25;

    /// Weights this estimate with the one shown `passed_s` seconds before; the result is at least
    /// one block.
    pub fn smoothed_estimate(self, before: Option<Self>, passed_s: f64) -> Self {
        let Some(before) = before else { return self };
        let counted_down = (before.likely_s - passed_s).max(0.0);
        let likely_s = Self::NEWEST_ESTIMATE_WEIGHT * self.likely_s
            + (1.0 - Self::NEWEST_ESTIMATE_WEIGHT) * counted_down;
        Self { likely_s: likely_s.min(self.most_s), ..self }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use kernelgate::record::{CaseRecord, Environment, Provenance};

    /// A test trial of one case at a given block and place.
    pub fn trial(block: usize, place: usize, time_ns: f64) -> TrialRecord {
        TrialRecord {
            round: 1,
            bench: "b".to_owned(),
            block,
            place,
            head: arm(block, place) == Arm::Head,
            wall_s: 1.0,
            cases: [("x".to_owned(), CaseTiming { time_ns, ..CaseTiming::default() })].into(),
            failed: BTreeMap::new(),
            skipped: BTreeMap::new(),
            broke: None,
        }
    }

    #[test]
    fn a_case_without_a_time_is_requested_once_and_keeps_its_reason() {
        let requested: BTreeSet<String> =
            ["gone", "short", "timed", "wrong"].map(str::to_owned).into();
        fn reasons<T: From<&'static str>>(ids: &[&str]) -> BTreeMap<String, T> {
            ids.iter().map(|id| ((*id).to_owned(), "why".into())).collect()
        }
        let run = ProcessRun {
            cases: [("timed".to_owned(), CaseRecord::untimed_samples(vec![1.0]))].into(),
            skipped: reasons(&["short", "not asked for"]),
            failed: reasons(&["wrong"]),
            ..ProcessRun::start_now("b", "r1-b0-p0", Environment::cpu(), Provenance::default())
        };
        let skipped = skip_reasons(&requested, Some(&run));
        assert_eq!(
            skipped,
            [("gone", NOT_LISTED_REASON), ("short", "why")]
                .map(|(id, why)| (id.to_owned(), why.to_owned()))
                .into()
        );
        assert_eq!(skip_reasons(&requested, None).len(), 4, "a bench that has none of the cases");
        let base = TrialRecord { skipped, failed: reasons(&["wrong"]), ..trial(0, 0, 1.0) };
        let head = TrialRecord {
            skipped: reasons(&["short", "late"]),
            failed: reasons(&["broken"]),
            ..trial(0, 1, 1.0)
        };
        let trials = [base, head];
        let (stopped, failed) = (stop_reasons(&trials), failure_reasons(&trials));
        let skipped = |side| InconclusiveReason::Skipped(BuildFailure::new(side, "why"));
        assert_eq!(stopped["short"], skipped(Arm::Base), "the first reason");
        assert_eq!(stopped["late"], skipped(Arm::Head));
        let failed_in_base = InconclusiveReason::Failed(BuildFailure::new(Arm::Base, "why"));
        assert_eq!(stopped["wrong"], failed_in_base);
        assert_eq!(stopped.keys().collect::<Vec<_>>(), ["gone", "late", "short", "wrong"]);
        assert_eq!(failed.keys().collect::<Vec<_>>(), ["broken"]);
    }

    #[test]
    fn samples_are_weighted_by_their_number_of_iterations() {
        // Linear sampling: 1 to 5 times as many iterations; the short samples are outliers.
        let mut case = CaseRecord::untimed_samples(vec![30.0, 44.0, 30.3, 40.0, 50.5]);
        case.samples.launches = vec![1, 2, 3, 4, 5];
        let run = |case: &CaseRecord| ProcessRun {
            cases: [("x".to_owned(), case.clone())].into(),
            ..ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default())
        };
        let found = |case: &CaseRecord| timings_by_case(&run(case))["x"];
        assert_eq!((found(&case).time_ns, found(&case).averaged), (10.1, false));
        case.samples.launches = vec![1; 5];
        case.implementation = CRITERION_IMPLEMENTATION.to_owned();
        assert_eq!((found(&case).time_ns, found(&case).averaged), (40.0, true));
    }

    #[test]
    fn blocks_alternate_between_the_orders_abba_and_baab() {
        use Arm::{Base, Head};
        assert_eq!([0, 1, 2, 3].map(|place| arm(0, place)), [Base, Head, Head, Base]);
        assert_eq!([0, 1, 2, 3].map(|place| arm(1, place)), [Head, Base, Base, Head]);
        assert_eq!(arm(2, 0), Base);
    }

    #[test]
    fn trials_of_unfinished_blocks_are_dropped() {
        let mut trials: Vec<_> = (0..7).map(|i| trial(i / 4, i % 4, 10.0 + i as f64)).collect();
        let blocks = &whole_blocks_by_case(&trials, 1)["x"];
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].leader, Arm::Base);
        assert_eq!(blocks[0].base.map(|observation| observation.time_ns), [10.0, 13.0]);
        assert_eq!(blocks[0].head.map(|observation| observation.time_ns), [11.0, 12.0]);
        assert!(whole_blocks_by_case(&trials, 2).is_empty());
        assert_eq!(next_block(&trials, 1, "b"), 2);
        drop_unfinished_blocks(&mut trials);
        assert_eq!(
            (trials.len(), next_block(&trials, 1, "b"), next_block(&trials, 2, "b")),
            (4, 1, 0)
        );
        trials[3].cases.clear();
        assert!(whole_blocks_by_case(&trials, 1).is_empty(), "a process lacks the case");
    }

    #[test]
    fn cases_without_a_finished_block_are_undecided() {
        let selected: BTreeSet<String> = ["x".to_owned(), "y".to_owned()].into();
        let trials: Vec<_> = (0..4).map(|i| trial(0, i, 1.0)).collect();
        let outcome = PairedOutcome {
            decisions: vec![],
            undecided: vec![],
            null_fired: vec![],
            environment_sound: true,
        };
        assert_eq!(
            undecided_cases(&selected, &whole_blocks_by_case(&trials, 1), &outcome),
            ["y".to_owned()].into()
        );
    }

    /// The test has two cases in a bench whose block takes 4 s: one case needs 10 more pairs, the
    /// need of the other is unknown.
    #[test]
    fn the_time_left_counts_the_cost_of_every_undecided_case() {
        let mut trials: Vec<_> = (0..8).map(|i| trial(i / 4, i % 4, 1.0)).collect();
        for trial in &mut trials {
            trial.cases.insert("y".to_owned(), CaseTiming::default());
        }
        let plan = TestPlan { max_blocks: 24, ..TestPlan::default() };
        let mut outcome =
            crate::gate::paired::decide_all(&whole_blocks_by_case(&trials, 1), &plan, false);
        for decision in &mut outcome.decisions {
            decision.pairs_needed = (decision.case == "x").then_some(14);
        }
        let open = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
        let left = |open| time_left(&trials, 1, &open, &outcome, &plan);
        assert_eq!(left(open(&["x"])), RoundTimeLeft { likely_s: 10.0, most_s: 44.0 });
        assert_eq!(left(open(&["x", "y"])), RoundTimeLeft { likely_s: 54.0, most_s: 88.0 });
        assert_eq!(left(open(&[])), RoundTimeLeft { likely_s: 0.0, most_s: 0.0 });
    }

    /// The estimates of a comparison in which nothing was decided for a minute: 1 s, 3 min, 1 s.
    #[test]
    fn a_smoothed_estimate_of_the_time_left_does_not_jump() {
        let raw = [180.0, 4.0, 176.0, 2.0, 172.0, 1.0, 168.0];
        let mut shown: Option<RoundTimeLeft> = None;
        for likely_s in raw {
            let next = RoundTimeLeft { likely_s, most_s: 400.0 }.smoothed_estimate(shown, 2.0);
            let before = shown.map_or(180.0, |before| before.likely_s);
            assert!((next.likely_s - before).abs() <= 48.0, "{before} then {}", next.likely_s);
            shown = Some(next);
        }
        assert!(shown.is_some_and(|shown| shown.likely_s > 60.0), "{shown:?}");
        let end = RoundTimeLeft { likely_s: 1.0, most_s: 4.0 }.smoothed_estimate(shown, 2.0);
        assert_eq!(end.likely_s, 4.0, "not more than the blocks that are left");
    }
}
