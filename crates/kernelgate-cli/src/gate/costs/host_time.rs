//! Decides whether the host's time to start a launch grew. One process of each build measures two
//! host times that scatter by themselves, so a difference is only suspected: further pairs of
//! processes decide it as times are decided.
//!
//! With m suspected cases, growth is found where Wilcoxon's signed-rank test on ln(head / base),
//! less what is allowed, has p of at most `COST_FALSE_ALARMS` / m (Bonferroni); the pairs are new,
//! so that being suspected does not count. This module does not run processes.

use std::collections::{BTreeMap, BTreeSet};

use super::{ConfirmationPairs, CostGrowth};
use kernelgate::stats::{median, signed_rank};

/// Smallest number of further pairs of processes that can show growth of the host time.
const MIN_HOST_TIME_PAIRS: usize = 8;
/// Highest probability of a false finding of growth in any case.
const COST_FALSE_ALARMS: f64 = 0.01;

/// Returns how many further pairs of processes are needed for this number of suspected cases:
/// enough to decide if all pairs have one sign.
pub fn further_pairs(suspected: usize) -> usize {
    let level = COST_FALSE_ALARMS / suspected.max(1) as f64;
    ((1.0 / level).log2().ceil() as usize).max(MIN_HOST_TIME_PAIRS)
}

/// Returns the suspected cases that grew, or may have grown. `measure` gives the host's times of
/// these cases in one more process of base and of head each, nanoseconds; `None` ends the
/// measurement for lack of time.
pub fn confirm_cost_growth(
    suspected: Vec<CostGrowth>,
    mut measure: impl FnMut(&BTreeSet<String>, usize) -> Option<BTreeMap<String, [f64; 2]>>,
) -> Vec<CostGrowth> {
    let (needed, tests) = (further_pairs(suspected.len()), suspected.len());
    let mut measured: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
    let mut open = suspected;
    for pair in 0..needed {
        if open.is_empty() {
            break;
        }
        let cases = open.iter().map(|it| it.case.clone()).collect();
        let Some(found) = measure(&cases, pair) else { break };
        for (case, times) in found {
            measured.entry(case).or_default().push(times);
        }
        open.retain(|it| {
            measured.get(&it.case).is_none_or(|pairs| !shows_no_growth(pairs, it.allowed))
        });
    }
    let judged = |it: CostGrowth| {
        let pairs = measured.get(&it.case).map(Vec::as_slice).unwrap_or_default();
        judge_growth(it, pairs, COST_FALSE_ALARMS / tests as f64)
    };
    open.into_iter().map(judged).collect()
}

/// Returns ln(head / base) minus the allowed growth, for each pair.
fn log_excess_growth(pairs: &[[f64; 2]], allowed: f64) -> Vec<f64> {
    pairs.iter().map(|[base, head]| (head / base).ln() - allowed.ln_1p()).collect()
}

/// Returns whether at least half of the pairs are within the allowed growth, which counts as no
/// growth.
fn shows_no_growth(pairs: &[[f64; 2]], allowed: f64) -> bool {
    pairs.len() >= MIN_HOST_TIME_PAIRS / 2 && median(&log_excess_growth(pairs, allowed)) <= 0.0
}

fn judge_growth(growth: CostGrowth, pairs: &[[f64; 2]], level: f64) -> CostGrowth {
    let excess = log_excess_growth(pairs, growth.allowed);
    let further = ConfirmationPairs {
        pairs: pairs.len(),
        grown: excess.iter().filter(|excess| **excess > 0.0).count(),
        found: pairs.len() >= MIN_HOST_TIME_PAIRS
            && signed_rank::signed_rank_p_greater(&excess) <= level,
    };
    let middle = |side: usize, first: f64| match pairs {
        [] => first,
        pairs => median(&pairs.iter().map(|pair| pair[side]).collect::<Vec<_>>()),
    };
    CostGrowth {
        base: middle(0, growth.base),
        head: middle(1, growth.head),
        further: Some(further),
        ..growth
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::costs::CaseCost;

    fn suspected_growths(cases: &[&str]) -> Vec<CostGrowth> {
        let suspect = |case: &&str| CostGrowth {
            case: (*case).to_owned(),
            cost: CaseCost::HostTime,
            base: 4000.0,
            head: 6000.0,
            allowed: 0.1,
            further: None,
        };
        cases.iter().map(suspect).collect()
    }

    /// Outcome for a suspected case whose head processes take these multiples of 4 µs; also returns
    /// the number of measured pairs.
    fn confirmed_growths(heads: &[f64]) -> (Vec<CostGrowth>, usize) {
        let mut requested = 0;
        let settled = confirm_cost_growth(suspected_growths(&["x"]), |cases, pair| {
            assert_eq!(cases.iter().collect::<Vec<_>>(), ["x"]);
            requested += 1;
            Some([("x".to_owned(), [4000.0, 4000.0 * heads.get(pair)?])].into())
        });
        (settled, requested)
    }

    #[test]
    fn growth_of_host_time_is_confirmed_if_further_pairs_agree() {
        let (grown, requested) = confirmed_growths(&[1.5; 8]);
        assert_eq!(requested, 8);
        assert!(grown[0].is_shown());
        assert_eq!(
            grown[0].words(),
            "host time of a launch 6.000 µs, was 4.000 µs (+50.0%, 10% are allowed) in 8 of 8 \
             further pairs of processes"
        );
        // The suspicion was due to noise, which four pairs show.
        assert_eq!(confirmed_growths(&[1.0; 8]), (vec![], 4));
        assert_eq!(confirmed_growths(&[1.09, 1.0, 1.3, 1.02, 1.5, 1.5, 1.5, 1.5]), (vec![], 4));
        // Most pairs grew, but not as clearly as a finding requires.
        let (unclear, requested) = confirmed_growths(&[1.3, 1.01, 1.4, 1.3, 1.02, 1.3, 1.2, 1.3]);
        assert_eq!((unclear.len(), requested), (1, 8));
        assert!(!unclear[0].is_shown(), "{unclear:?}");
        insta::assert_snapshot!(unclear[0].words(), @"host time of a launch 5.200 µs, was 4.000 µs (+30.0%, 10% are allowed) in 6 of 8 further pairs of processes");
        // The growth also stays undecided if time ends before the necessary pairs are measured.
        for pairs in [0, 3, 7] {
            let (unclear, _) = confirmed_growths(&[1.5; 8][..pairs]);
            assert!(!unclear[0].is_shown() && unclear[0].further.unwrap().pairs == pairs);
        }
    }

    #[test]
    fn more_suspected_cases_take_more_pairs_of_processes() {
        assert_eq!([0, 1, 2, 10, 40].map(further_pairs), [8, 8, 8, 10, 12]);
        let cases: Vec<String> = (0..10).map(|i| format!("c{i}")).collect();
        let names: Vec<&str> = cases.iter().map(String::as_str).collect();
        let settled = confirm_cost_growth(suspected_growths(&names), |cases, pair| {
            (pair < 9).then(|| cases.iter().map(|it| (it.clone(), [1.0, 2.0])).collect())
        });
        assert_eq!(settled.len(), 10);
        assert!(settled.iter().all(|it| !it.is_shown()), "nine pairs of ten");
    }

    /// If the head takes exactly what is allowed, every alarm is false.
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
            let settled = confirm_cost_growth(suspected_growths(&["a", "b", "c"]), |cases, _| {
                let mut side = |level: f64| level * (1.0 + 0.3 * uniform());
                let pair = |it: &String| (it.clone(), [side(1.0), side(1.1)]);
                Some(cases.iter().map(pair).collect())
            });
            alarms += usize::from(settled.iter().any(CostGrowth::is_shown));
        }
        // At most 40 are expected; 70 would be nearly 5 standard deviations more.
        assert!(alarms < 70, "{alarms} of 4000");
    }
}
