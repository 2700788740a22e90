use std::convert::Infallible;
use std::path::Path;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::*;
use crate::gate::VerdictOnCase;
use crate::gate::calibration::{CalibrationComparisonKind, GateCalibration};
use crate::gate::paired::{
    CaseTimeInTrial, PairedDecisionOnCase, TimedTrialBlock, TimedTrialBlocksByCase,
    decide_cases_with_one_plan,
};
use kernelgate::record::file;

const TEN_PERCENT_SLOWER: HeadToBaseTimeRatio =
    HeadToBaseTimeRatio { time_ratio: 1.1, time_ratio_low: 1.05, time_ratio_high: 1.15 };

/// Bisects with noise-free answers: commits from position `first_bad` are slow, and some commits
/// cannot be measured.
fn bisect_without_noise(
    last: usize,
    first_bad: usize,
    unusable: &[usize],
) -> (BisectionEnd, Vec<BisectionQuestion>) {
    let mut asked = Vec::new();
    let compare = |question: &BisectionQuestion| -> Result<BisectionAnswer, Infallible> {
        asked.push(*question);
        let slow = |place: usize| place >= first_bad;
        Ok(match question {
            BisectionQuestion { head_position: head, .. } if unusable.contains(head) => {
                BisectionAnswer::UnmeasurableWithReason("why".to_owned())
            }
            BisectionQuestion { base_position: base, head_position: head, .. }
                if !slow(*base) && slow(*head) =>
            {
                BisectionAnswer::Slower(TEN_PERCENT_SLOWER)
            }
            _ => BisectionAnswer::NotSlower(TEN_PERCENT_SLOWER),
        })
    };
    let Ok(ended) = bisect_commit_range(last, 96, compare);
    (ended, asked)
}

fn unwrap_found_slowdown(ended: BisectionEnd) -> CommitRangeWithSlowdown {
    match ended {
        BisectionEnd::SlowdownFound(found) => found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn bisection_finds_the_slow_commit_with_one_comparison_per_halving() {
    for last in 1..40 {
        for first_bad in 1..=last {
            let (ended, asked) = bisect_without_noise(last, first_bad, &[]);
            let found = unwrap_found_slowdown(ended);
            assert_eq!(
                (found.last_good_position, found.first_bad_position),
                (first_bad - 1, first_bad)
            );
            assert!(
                found.is_slowdown_confirmed()
                    && found.bisection_confidence >= 1.0 - MAX_WRONG_BISECTION_PROBABILITY
            );
            assert!(asked.len() as u32 <= 2 + usize::BITS - last.leading_zeros(), "{asked:?}");
            let end = asked.last().unwrap();
            assert_eq!(
                (end.base_position, end.head_position),
                (first_bad - 1, first_bad),
                "the reported difference is measured"
            );
        }
    }
}

#[test]
fn commits_that_cannot_be_measured_are_skipped_or_reported_as_a_range() {
    let places = |unusable: &[usize]| {
        let found = unwrap_found_slowdown(bisect_without_noise(10, 6, unusable).0);
        (found.last_good_position, found.first_bad_position)
    };
    assert_eq!(places(&[1, 3, 4, 7, 9]), (5, 6));
    assert_eq!(places(&[5]), (4, 6));
    assert_eq!(places(&[6, 7]), (5, 8));
    assert_eq!(places(&[1, 2, 3, 4, 5, 6, 7, 8, 9]), (0, 10));
    assert_eq!(
        unwrap_found_slowdown(bisect_without_noise(10, 6, &[5]).0).skipped_positions,
        [(5, "why".to_owned())]
    );
    assert_eq!(
        bisect_without_noise(10, 6, &[10]).0,
        BisectionEnd::BadEndUnmeasurable("why".to_owned())
    );
    assert_eq!(
        bisect_without_noise(10, 11, &[]).0,
        BisectionEnd::BadEndNotSlower(TEN_PERCENT_SLOWER)
    );
}

#[test]
fn an_inconclusive_comparison_is_repeated_with_more_blocks() {
    let mut asked = Vec::new();
    let compare = |question: &BisectionQuestion| -> Result<BisectionAnswer, Infallible> {
        asked.push(*question);
        Ok(match question.head_position {
            4 => BisectionAnswer::Slower(TEN_PERCENT_SLOWER),
            2 => BisectionAnswer::UndecidedWithReason("noise".to_owned()),
            // In this test the second comparison of a pair gives a verdict, after an inconclusive
            // first one.
            1 if question.earlier_attempts == 0 => {
                BisectionAnswer::UndecidedWithReason("noise".to_owned())
            }
            1 => BisectionAnswer::NotSlower(TEN_PERCENT_SLOWER),
            _ => BisectionAnswer::Slower(TEN_PERCENT_SLOWER),
        })
    };
    let Ok(ended) = bisect_commit_range(4, 10, compare);
    let found = unwrap_found_slowdown(ended);
    assert_eq!((found.last_good_position, found.first_bad_position), (1, 3));
    assert_eq!(found.skipped_positions, [(2, "noise".to_owned())]);
    let blocks = |head: usize| -> Vec<usize> {
        let of_head = asked.iter().filter(|it| it.head_position == head && it.base_position == 0);
        of_head.map(|it| it.plan.unwrap().max_trial_blocks).collect()
    };
    assert_eq!((blocks(2), blocks(1)), (vec![10, 20, 40], vec![10, 20]));
    let plan = asked[1].plan.unwrap();
    assert_eq!(
        (plan.absolute_time_change_threshold_ns, plan.max_unchanged_relative_change),
        (0.0, plan.relative_time_change_threshold)
    );
    assert!(
        (plan.relative_time_change_threshold - 0.0488).abs() < 1e-3,
        "half of 10 %: {}",
        plan.relative_time_change_threshold
    );
    let Ok(ends) = bisect_commit_range(4, 10, |_| {
        Ok::<_, Infallible>(BisectionAnswer::UndecidedWithReason("noise".to_owned()))
    });
    assert_eq!(ends, BisectionEnd::GoodAndBadEndUndecided("noise".to_owned()));
}

#[test]
fn a_slow_down_spread_over_many_commits_is_not_blamed_on_one() {
    // In this test each commit is 1 % slower than the commit before, which is less than half of the
    // searched slow-down.
    let compare = |BisectionQuestion { base_position: base, head_position: head, plan, .. }: &BisectionQuestion| -> Result<BisectionAnswer, Infallible> {
        let ratio = 1.01f64.powi(i32::try_from(head - base).unwrap());
        let times = HeadToBaseTimeRatio { time_ratio: ratio, time_ratio_low: ratio, time_ratio_high: ratio };
        let slower = ratio > 1.0 + plan.map_or(0.01, |plan| plan.relative_time_change_threshold);
        Ok(if slower { BisectionAnswer::Slower(times) } else { BisectionAnswer::NotSlower(times) })
    };
    let Ok(ended) = bisect_commit_range(16, 10, compare);
    assert!(!unwrap_found_slowdown(ended).is_slowdown_confirmed());
}

/// Reads the blocks of all A/A comparisons of one case from the recorded calibration of an H200.
fn recorded_a_a_blocks() -> Vec<TimedTrialBlock> {
    const H200_CALIBRATION_FILE: &str = "../../docs/calibrations/h200.json";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(H200_CALIBRATION_FILE);
    let calibration: GateCalibration = file::read_record(&path).unwrap();
    let case = calibration.launch_ns_by_case.keys().next().unwrap();
    let comparisons = calibration
        .comparisons_of_kind(CalibrationComparisonKind::IdenticalBuilds)
        .filter_map(|it| it.first_round_times.get(case));
    comparisons.flat_map(|series| series.to_trial_blocks()).collect()
}

fn scale_head_time(timing: &mut CaseTimeInTrial, ratio: f64) {
    timing.median_time_ns *= ratio;
    timing.median_cycles_per_launch = timing.median_cycles_per_launch.map(|cycles| cycles * ratio);
}

/// Simulates one round of a comparison: takes recorded blocks until the case is decided, as
/// `compare` does.
fn simulate_comparison_round(
    noise: &[TimedTrialBlock],
    [base, head]: [f64; 2],
    plan: &ComparisonTestPlan,
    random: &mut impl Rng,
) -> PairedDecisionOnCase {
    let mut observed = TimedTrialBlocksByCase::from([("case".to_owned(), Vec::new())]);
    loop {
        let blocks = observed.get_mut("case").unwrap();
        let mut block = noise[random.random_range(0..noise.len())];
        block.base.iter_mut().for_each(|timing| scale_head_time(timing, base));
        block.head.iter_mut().for_each(|timing| scale_head_time(timing, head));
        blocks.push(block);
        let ended = blocks.len() >= plan.max_trial_blocks;
        let outcome = decide_cases_with_one_plan(&observed, plan, ended);
        if outcome.undecided_cases.is_empty() {
            return outcome.decisions.into_iter().next().unwrap();
        }
    }
}

/// Simulates the bisection answer of a comparison with its first and its second round.
fn simulate_bisection_answer(
    noise: &[TimedTrialBlock],
    sides: [f64; 2],
    plan: &ComparisonTestPlan,
    random: &mut impl Rng,
) -> BisectionAnswer {
    let first = simulate_comparison_round(noise, sides, plan, random);
    let ratio = first.ratio;
    let times = HeadToBaseTimeRatio {
        time_ratio: ratio.estimated_ratio,
        time_ratio_low: ratio.ratio_low,
        time_ratio_high: ratio.ratio_high,
    };
    match first.verdict {
        VerdictOnCase::Regressed
            if simulate_comparison_round(noise, sides, plan, random).verdict
                == VerdictOnCase::Regressed =>
        {
            BisectionAnswer::Slower(times)
        }
        VerdictOnCase::Regressed | VerdictOnCase::Inconclusive => {
            BisectionAnswer::UndecidedWithReason("noise".to_owned())
        }
        _ => BisectionAnswer::NotSlower(times),
    }
}

/// The test bisects 64 commits, one of which makes the case 10 % slower, in the timing noise that
/// an H200 recorded. The environment variable `KERNELGATE_SIMULATIONS` sets the number of simulated
/// bisections.
#[test]
fn a_slow_commit_is_found_in_recorded_h200_noise() {
    let count = std::env::var("KERNELGATE_SIMULATIONS").ok().and_then(|it| it.parse().ok());
    let count: u64 = count.unwrap_or(20);
    let noise = recorded_a_a_blocks();
    let right = |seed: u64| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let first_slow = random.random_range(1..=64);
        let compare = |question: &BisectionQuestion| -> Result<BisectionAnswer, Infallible> {
            let time = |place: usize| if place >= first_slow { 1.1 } else { 1.0 };
            let blocks =
                ComparisonTestPlan::default().max_trial_blocks << question.earlier_attempts;
            let default =
                ComparisonTestPlan { max_trial_blocks: blocks, ..ComparisonTestPlan::default() };
            let plan = question.plan.unwrap_or(default);
            let sides = [time(question.base_position), time(question.head_position)];
            Ok(simulate_bisection_answer(&noise, sides, &plan, &mut random))
        };
        let Ok(ended) =
            bisect_commit_range(64, ComparisonTestPlan::default().max_trial_blocks, compare);
        let found = unwrap_found_slowdown(ended);
        found.is_slowdown_confirmed()
            && (found.last_good_position, found.first_bad_position) == (first_slow - 1, first_slow)
    };
    let wrong: Vec<u64> = (0..count).into_par_iter().filter(|seed| !right(*seed)).collect();
    println!("{} of {count} right", count as usize - wrong.len());
    assert!(
        wrong.len() as f64
            <= MAX_WRONG_BISECTION_PROBABILITY * count as f64 * f64::from(count > 20),
        "{wrong:?}"
    );
}
