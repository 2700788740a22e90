//! Decides whether the host's time to launch a case grew between base and head. The two
//! verification processes measure one launch time each, which scatters, so growth is only suspected
//! until further pairs of processes are tested.
//!
//! For m suspected cases, growth is shown if Wilcoxon's signed-rank test on ln(head / base) minus
//! the allowed growth has p ≤ `MAX_FALSE_COST_FINDING_PROBABILITY` / m (Bonferroni), on new pairs
//! only. The module `host_time` runs no processes, because the caller measures the pairs.

use std::collections::{BTreeMap, BTreeSet};

use super::{GrowthConfirmationPairs, LaunchCostGrowthOfCase};
use kernelgate::stats::{median, signed_rank};

/// Smallest number of further process pairs with which the signed-rank test can show growth of the
/// host's launch time.
const MIN_PAIRS_TO_SHOW_HOST_TIME_GROWTH: usize = 8;
/// Highest probability that growth of the host's launch time is falsely reported for any case.
const MAX_FALSE_COST_FINDING_PROBABILITY: f64 = 0.01;

/// Returns how many further process pairs are measured for this number of suspected cases: enough
/// for a decision if all pairs have one sign.
pub fn further_pairs_for_suspected_cases(suspected: usize) -> usize {
    let level = MAX_FALSE_COST_FINDING_PROBABILITY / suspected.max(1) as f64;
    ((1.0 / level).log2().ceil() as usize).max(MIN_PAIRS_TO_SHOW_HOST_TIME_GROWTH)
}

/// Measures further pairs for the suspected cases, and returns those whose growth is shown or
/// undecided, without those that did not grow. The callback `measure` runs one more base and head
/// process, and returns both host launch times per case, nanoseconds; `None` stops the measurement
/// because the time is over.
pub fn confirm_suspected_growth(
    suspected: Vec<LaunchCostGrowthOfCase>,
    mut measure: impl FnMut(&BTreeSet<String>, usize) -> Option<BTreeMap<String, [f64; 2]>>,
) -> Vec<LaunchCostGrowthOfCase> {
    let (needed, tests) = (further_pairs_for_suspected_cases(suspected.len()), suspected.len());
    let mut measured: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
    let mut open = suspected;
    for pair in 0..needed {
        if open.is_empty() {
            break;
        }
        let cases = open.iter().map(|it| it.case_id.clone()).collect();
        let Some(found) = measure(&cases, pair) else { break };
        for (case, times) in found {
            measured.entry(case).or_default().push(times);
        }
        open.retain(|it| {
            measured
                .get(&it.case_id)
                .is_none_or(|pairs| !is_suspicion_refuted(pairs, it.allowed_relative_growth))
        });
    }
    let judged = |it: LaunchCostGrowthOfCase| {
        let pairs = measured.get(&it.case_id).map(Vec::as_slice).unwrap_or_default();
        judge_growth_from_pairs(it, pairs, MAX_FALSE_COST_FINDING_PROBABILITY / tests as f64)
    };
    open.into_iter().map(judged).collect()
}

/// Returns ln(head / base) minus ln(1 + allowed growth), for each pair of processes.
fn log_growth_beyond_allowed(pairs: &[[f64; 2]], allowed: f64) -> Vec<f64> {
    pairs.iter().map(|[base, head]| (head / base).ln() - allowed.ln_1p()).collect()
}

/// Returns whether at least half of the pairs are within the allowed growth, which ends the
/// suspicion of a case early.
fn is_suspicion_refuted(pairs: &[[f64; 2]], allowed: f64) -> bool {
    pairs.len() >= MIN_PAIRS_TO_SHOW_HOST_TIME_GROWTH / 2
        && median(&log_growth_beyond_allowed(pairs, allowed)) <= 0.0
}

fn judge_growth_from_pairs(
    growth: LaunchCostGrowthOfCase,
    pairs: &[[f64; 2]],
    level: f64,
) -> LaunchCostGrowthOfCase {
    let excess = log_growth_beyond_allowed(pairs, growth.allowed_relative_growth);
    let further = GrowthConfirmationPairs {
        pair_count: pairs.len(),
        pairs_with_growth: excess.iter().filter(|excess| **excess > 0.0).count(),
        growth_confirmed: pairs.len() >= MIN_PAIRS_TO_SHOW_HOST_TIME_GROWTH
            && signed_rank::signed_rank_p_value_for_upward_shift(&excess) <= level,
    };
    let middle = |side: usize, first: f64| match pairs {
        [] => first,
        pairs => median(&pairs.iter().map(|pair| pair[side]).collect::<Vec<_>>()),
    };
    LaunchCostGrowthOfCase {
        base_cost: middle(0, growth.base_cost),
        head_cost: middle(1, growth.head_cost),
        growth_confirmation: Some(further),
        ..growth
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::costs::LaunchCostKind;

    fn test_suspected_growths(cases: &[&str]) -> Vec<LaunchCostGrowthOfCase> {
        let suspect = |case: &&str| LaunchCostGrowthOfCase {
            case_id: (*case).to_owned(),
            cost: LaunchCostKind::HostEnqueueTime,
            base_cost: 4000.0,
            head_cost: 6000.0,
            allowed_relative_growth: 0.1,
            growth_confirmation: None,
        };
        cases.iter().map(suspect).collect()
    }

    /// Returns the outcome for a suspected case whose head processes take these multiples of 4 µs,
    /// and the number of measured pairs.
    fn outcome_for_head_times(heads: &[f64]) -> (Vec<LaunchCostGrowthOfCase>, usize) {
        let mut requested = 0;
        let settled = confirm_suspected_growth(test_suspected_growths(&["x"]), |cases, pair| {
            assert_eq!(cases.iter().collect::<Vec<_>>(), ["x"]);
            requested += 1;
            Some([("x".to_owned(), [4000.0, 4000.0 * heads.get(pair)?])].into())
        });
        (settled, requested)
    }

    #[test]
    fn growth_of_host_time_is_confirmed_if_further_pairs_agree() {
        let (grown, requested) = outcome_for_head_times(&[1.5; 8]);
        assert_eq!(requested, 8);
        assert!(grown[0].is_growth_established());
        assert_eq!(
            grown[0].describe_growth(),
            "host time of a launch 6.000 µs, was 4.000 µs (+50.0%, 10% are allowed) in 8 of 8 \
             further pairs of processes"
        );
        // In this test, noise caused the suspicion, which four further pairs refute.
        assert_eq!(outcome_for_head_times(&[1.0; 8]), (vec![], 4));
        assert_eq!(
            outcome_for_head_times(&[1.09, 1.0, 1.3, 1.02, 1.5, 1.5, 1.5, 1.5]),
            (vec![], 4)
        );
        // In this test, most pairs grew, but too little for a finding at the required level.
        let (unclear, requested) =
            outcome_for_head_times(&[1.3, 1.01, 1.4, 1.3, 1.02, 1.3, 1.2, 1.3]);
        assert_eq!((unclear.len(), requested), (1, 8));
        assert!(!unclear[0].is_growth_established(), "{unclear:?}");
        insta::assert_snapshot!(unclear[0].describe_growth(), @"host time of a launch 5.200 µs, was 4.000 µs (+30.0%, 10% are allowed) in 6 of 8 further pairs of processes");
        // In this test, the growth stays undecided because the time ends before enough pairs are
        // measured.
        for pairs in [0, 3, 7] {
            let (unclear, _) = outcome_for_head_times(&[1.5; 8][..pairs]);
            assert!(
                !unclear[0].is_growth_established()
                    && unclear[0].growth_confirmation.unwrap().pair_count == pairs
            );
        }
    }

    #[test]
    fn more_suspected_cases_take_more_pairs_of_processes() {
        assert_eq!([0, 1, 2, 10, 40].map(further_pairs_for_suspected_cases), [8, 8, 8, 10, 12]);
        let cases: Vec<String> = (0..10).map(|i| format!("c{i}")).collect();
        let names: Vec<&str> = cases.iter().map(String::as_str).collect();
        let settled = confirm_suspected_growth(test_suspected_growths(&names), |cases, pair| {
            (pair < 9).then(|| cases.iter().map(|it| (it.clone(), [1.0, 2.0])).collect())
        });
        assert_eq!(settled.len(), 10);
        assert!(settled.iter().all(|it| !it.is_growth_established()), "nine pairs of ten");
    }

    /// In this test, the head takes exactly the allowed time, so every finding of growth is false.
    #[test]
    fn false_alarms_of_host_time_are_as_rare_as_the_level_promises() {
        let (mut state, mut alarms) = (1u64, 0);
        let mut uniform = || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        };
        for _ in 0..4000 {
            let settled =
                confirm_suspected_growth(test_suspected_growths(&["a", "b", "c"]), |cases, _| {
                    let mut side = |level: f64| level * (1.0 + 0.3 * uniform());
                    let pair = |it: &String| (it.clone(), [side(1.0), side(1.1)]);
                    Some(cases.iter().map(pair).collect())
                });
            alarms +=
                usize::from(settled.iter().any(LaunchCostGrowthOfCase::is_growth_established));
        }
        // The test expects at most 40 false findings; 70 would be nearly 5 standard deviations
        // more.
        assert!(alarms < 70, "{alarms} of 4000");
    }
}
