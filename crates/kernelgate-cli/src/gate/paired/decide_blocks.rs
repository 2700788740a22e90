//! Turns blocks into verdicts.
//!
//! **Regressed** needs three rejections of "not slower than the threshold" by the signed-rank test
//! on the pairs: in time, in time without the possible cost of contention, and in cycles if the
//! clock was read. The p value of a case is the largest of the three (an intersection-union test:
//! each H0 has to be rejected by itself), each valid at any interim analysis, and
//! Benjamini-Hochberg over the cases holds at [`TestPlan::false_alarms`]. **Improved** is decided
//! alike for a faster head. **Unchanged** needs both "slower by the threshold" and "faster by the
//! threshold" rejected, or, when the blocks end, no evidence of any change and an interval that
//! excludes changes above [`TestPlan::tolerated`]. All other cases continue, and are
//! **inconclusive** when the blocks end.

use super::alpha_spending::{
    AlphaSpending, FINAL_ANALYSIS_WEIGHT, UnchangedAnalyses, always_valid_p,
};
use super::log_time_pairs::{ChangeDirection, PairDifferences, mean_arm_contention};
use super::{
    Arm, BlocksByCase, ErrorRateFamily, InconclusiveCause, PairedDecision, PairedOutcome, TestPlan,
};
use crate::gate::ratio_interval::TimeRatio;
use crate::gate::verdict::Verdict;
use kernelgate::stats::signed_rank::signed_rank_p_greater;
use kernelgate::stats::{WalshAverages, median, power};

/// Share of the cases, at least two, whose null pairs must show a difference to call the
/// environment unsound.
const UNSOUND_CASE_SHARE: f64 = 0.1;
/// Part of [`TestPlan::missed`] at which a difference from 1 is evidence of a change, so that the
/// case is not unchanged by the tolerated change. This criterion is strict: this share of identical
/// builds would be inconclusive.
const CHANGE_EVIDENCE_PART: f64 = 0.1;

/// Decides the cases for which the blocks so far suffice. This function is pure and may be called
/// after every block. `last` says that no more blocks come, and must not depend on their results
/// (the budget is used up, the user interrupted). If all cases are decided, the test at the end of
/// the comparison is not needed.
///
/// A case keeps its verdict when more blocks of other cases come. All calls during a comparison
/// must pass the same set of cases, because their number determines the interim analyses.
pub fn decide_all(cases: &BlocksByCase, plan: &TestPlan, last: bool) -> PairedOutcome {
    decide_cases(cases, plan, &|_| *plan, ErrorRateFamily::Given, last)
}

/// Decides with thresholds by case and error rates over a family of cases: `of_case` gives the plan
/// with the smallest change that matters in that case, and may change nothing else.
pub fn decide_cases(
    cases: &BlocksByCase,
    plan: &TestPlan,
    of_case: &dyn Fn(&str) -> TestPlan,
    family: ErrorRateFamily,
    last: bool,
) -> PairedOutcome {
    let level = plan.false_alarms / family.family_size(cases.len()) as f64;
    let most = plan.max_blocks.saturating_mul(2);
    let settling = UnchangedAnalyses::new(plan);
    let plans: Vec<TestPlan> = cases.keys().map(|case| of_case(case)).collect();
    let (change, same) = (AlphaSpending::new(level, most), AlphaSpending::new(plan.missed, most));
    let of_plan =
        |plan| InterimTests { plan, level, change: &change, same: &same, settling: &settling };
    let tests: Vec<InterimTests<'_>> = plans.iter().map(of_plan).collect();
    let pairs: Vec<PairDifferences> =
        cases.values().map(|blocks| PairDifferences::from_blocks(blocks)).collect();
    // The interim analyses before the end decide first: decided cases are not analysed again.
    let mut standings: Vec<CaseEvidence> =
        tests.iter().zip(&pairs).map(|(tests, pairs)| tests.case_evidence(pairs, false)).collect();
    let before: Vec<CaseConclusion> = conclude_family(&standings, plan, family, true);
    let each = standings.iter_mut().zip(tests.iter().zip(&pairs)).zip(&before);
    for ((standing, (tests, pairs)), concluded) in each {
        if concluded.at.is_none() && (last || pairs.len() >= most) {
            *standing = tests.case_evidence(pairs, true);
        }
    }
    let sound = !has_after_effect(&pairs, plan, last);
    let concluded = conclude_family(&standings, plan, family, sound);
    let undecided = |index: usize| concluded[index].at.is_none() && !standings[index].ended;
    let names = |keep: &dyn Fn(usize) -> bool| -> Vec<String> {
        cases
            .keys()
            .enumerate()
            .filter(|(index, _)| keep(*index))
            .map(|(_, case)| case.clone())
            .collect()
    };
    let mut decisions: Vec<PairedDecision> = cases
        .iter()
        .zip(tests.iter().zip(pairs.iter().zip(concluded.iter().zip(&standings))))
        .map(|((case, blocks), (tests, (pairs, (concluded, standing))))| PairedDecision {
            case: case.clone(),
            base_contention: mean_arm_contention(blocks, Arm::Base),
            head_contention: mean_arm_contention(blocks, Arm::Head),
            ..tests.describe_case(pairs, concluded, standing.ended)
        })
        .collect();
    decisions.sort_by(|a, b| a.verdict.cmp(&b.verdict).then_with(|| a.case.cmp(&b.case)));
    PairedOutcome {
        decisions,
        undecided: names(&undecided),
        null_fired: names(&|index| concluded[index].null_fired),
        environment_sound: concluded
            .iter()
            .all(|concluded| concluded.reason != Some(InconclusiveCause::Environment)),
    }
}

/// The interim tests of a comparison and the analyses at which they run.
struct InterimTests<'a> {
    plan: &'a TestPlan,
    /// Level of the test of a single case that allows for the number of cases.
    level: f64,
    change: &'a AlphaSpending,
    /// Alpha spending of the tests for the absence of a change.
    same: &'a AlphaSpending,
    /// Analyses at which changes above the tolerated one may be excluded.
    settling: &'a UnchangedAnalyses,
}

/// p values of a case that are valid at any interim analysis, for both directions, with the number
/// of pairs at the analysis that gave them.
struct ChangeEvidence {
    /// p value of the test on times, without clock cycles.
    time: f64,
    /// Largest p value of time, time without contention, and cycles.
    all: f64,
    /// The doubt that gave the largest p value, if it is not the time.
    objection: InconclusiveCause,
    /// Pairs at the interim analysis that excluded a relevant change in cycles: more blocks would
    /// not help the time.
    clock_at: Option<usize>,
    /// Pairs at the interim analysis of `all`.
    at: usize,
}

impl ChangeEvidence {
    /// The verdict on a change in time that cycles or contention do not confirm.
    fn unconfirmed_verdict(&self) -> (Verdict, Option<InconclusiveCause>, Option<usize>) {
        match self.clock_at {
            Some(at) => (Verdict::Inconclusive, Some(InconclusiveCause::Clock), Some(at)),
            None => (Verdict::Inconclusive, Some(self.objection), None),
        }
    }
}

/// Evidence of one case alone, before the family of cases is considered.
struct CaseEvidence {
    slower: ChangeEvidence,
    faster: ChangeEvidence,
    /// p values of the null pairs, both directions.
    null: [f64; 2],
    /// Pairs at the interim analysis that excluded any relevant change.
    same_at: Option<usize>,
    /// Whether the comparison has its last block.
    ended: bool,
    /// Verdict if no test decides; it is final after the last block.
    otherwise: (Verdict, Option<InconclusiveCause>),
    /// Number of pairs now.
    pairs: usize,
}

impl InterimTests<'_> {
    fn case_evidence(&self, pairs: &PairDifferences, ended: bool) -> CaseEvidence {
        let plan = self.plan;
        let n = pairs.len();
        let change = |direction| {
            let p = |test: &dyn Fn(usize) -> f64| {
                always_valid_p(self.change.analyses_up_to(n, ended), test)
            };
            let (time, at) = p(&|n| pairs.p_beyond_threshold(n, direction, plan));
            let (contention, contention_at) =
                p(&|n| pairs.p_beyond_without_contention(n, direction, plan));
            let (cycles, cycles_at) = p(&|n| pairs.beyond_threshold_in_cycles(n, direction, plan));
            let (same, same_at) = always_valid_p(self.same.analyses_up_to(n, ended), |n| {
                pairs.p_within_in_cycles(n, direction, plan)
            });
            ChangeEvidence {
                time,
                all: time.max(contention).max(cycles),
                objection: if cycles > contention {
                    InconclusiveCause::Clock
                } else {
                    InconclusiveCause::Contention
                },
                clock_at: (same <= plan.missed).then_some(same_at.max(at)),
                at: at.max(contention_at).max(if pairs.cycles_can_decide() {
                    cycles_at
                } else {
                    0
                }),
            }
        };
        let null = [ChangeDirection::Slower, ChangeDirection::Faster].map(|direction| {
            always_valid_p(self.change.analyses_up_to(n, ended), |n| {
                pairs.p_null_beyond_threshold(n, direction, plan)
            })
            .0
        });
        let same = |direction| {
            always_valid_p(self.same.analyses_up_to(n, ended), |n| {
                pairs.p_value_of_change(n, direction, plan)
            })
        };
        let (slower, faster) = (same(ChangeDirection::Slower), same(ChangeDirection::Faster));
        let same_at = slower.1.max(faster.1);
        let excluded = slower.0.max(faster.0) <= plan.missed
            && !self.contention_may_hide_slowdown(pairs, same_at);
        let settled_at = || {
            let UnchangedAnalyses { early, early_tail, .. } = self.settling;
            early.iter().copied().find(|analysis| {
                *analysis <= n && self.settled(pairs, *analysis, *early_tail) == Some(true)
            })
        };
        CaseEvidence {
            slower: change(ChangeDirection::Slower),
            faster: change(ChangeDirection::Faster),
            null,
            same_at: if excluded { Some(same_at) } else { settled_at() },
            ended,
            otherwise: if ended {
                self.at_end(pairs)
            } else {
                (Verdict::Inconclusive, Some(InconclusiveCause::Wide))
            },
            pairs: n,
        }
    }

    /// Returns the pairs at the interim analysis that decides with this number of pairs; if no
    /// other follows, at the end.
    fn pairs_at_analysis(&self, analysis: Option<usize>, pairs: usize) -> usize {
        analysis.unwrap_or_else(|| self.plan.max_blocks.saturating_mul(2).max(pairs))
    }

    /// Whether contention beside the base may hide a slow-down.
    fn contention_may_hide_slowdown(&self, pairs: &PairDifferences, n: usize) -> bool {
        pairs.p_base_not_more_contended(n, self.plan) <= FINAL_ANALYSIS_WEIGHT * self.plan.missed
    }

    /// Whether the first `n` pairs have no evidence of a change and exclude changes above the
    /// tolerated one, at this probability on either side; `None` if load may hide a change.
    fn settled(&self, pairs: &PairDifferences, n: usize, tail: f64) -> Option<bool> {
        let threshold = pairs.relevant_log_ratio(n, self.plan);
        let margin = self.plan.tolerated.ln_1p().max(threshold);
        let times = &pairs.time[..n];
        let walsh = WalshAverages::new(times);
        let all_beyond = |sign: f64| times.iter().all(|time| sign * time > threshold);
        // If there are too few pairs for so wide an interval, only all of them together count as
        // evidence.
        let evidence = all_beyond(1.0)
            || all_beyond(-1.0)
            || walsh
                .interval_with_tail(CHANGE_EVIDENCE_PART * tail)
                .is_some_and(|(low, high)| low > 0.0 || high < 0.0);
        let small = !evidence
            && walsh
                .interval_with_tail(tail)
                .is_some_and(|(low, high)| low > -margin && high < margin);
        if small && self.contention_may_hide_slowdown(pairs, n) { None } else { Some(small) }
    }

    fn at_end(&self, pairs: &PairDifferences) -> (Verdict, Option<InconclusiveCause>) {
        let n = pairs.len();
        match self.settled(pairs, n, self.settling.last_tail) {
            None => (Verdict::Inconclusive, Some(InconclusiveCause::Contention)),
            Some(true) => (Verdict::Unchanged, None),
            Some(false) if n < self.change.fewest_pairs(self.level) => {
                let throttled = pairs.excludes_throttled_blocks();
                let doubt = if throttled {
                    InconclusiveCause::Throttled
                } else {
                    InconclusiveCause::TooFewPairs
                };
                (Verdict::Inconclusive, Some(doubt))
            }
            Some(false) => (Verdict::Inconclusive, Some(InconclusiveCause::Wide)),
        }
    }

    /// The numbers of a case whose blocks may have `ended`; the decision's contention is added by
    /// the caller.
    fn describe_case(
        &self,
        pairs: &PairDifferences,
        concluded: &CaseConclusion,
        ended: bool,
    ) -> PairedDecision {
        let plan = self.plan;
        let n = pairs.len();
        let threshold = pairs.relevant_log_ratio(n, plan);
        let walsh = WalshAverages::new(&pairs.time);
        let tail = FINAL_ANALYSIS_WEIGHT * plan.missed;
        let level = FINAL_ANALYSIS_WEIGHT * self.level;
        let center = walsh.hodges_lehmann_center().unwrap_or(0.0).abs();
        let open = matches!(
            concluded.reason,
            None | Some(
                InconclusiveCause::TooFewPairs
                    | InconclusiveCause::Throttled
                    | InconclusiveCause::Wide
            )
        ) && concluded.verdict == Verdict::Inconclusive;
        // A larger budget moves the end, which is an analysis.
        let analysed_at = |analysis: Option<usize>, pairs: usize| match ended {
            true => pairs.next_multiple_of(2),
            false => self.pairs_at_analysis(analysis, pairs),
        };
        // A change above the threshold has to be shown to be above it; any other has to be shown to
        // be below it, or within what is tolerated at an analysis for that.
        let shown = |distance: f64, settles: f64| match walsh.standard_error() {
            Some(error) => power::pairs_needed(n, error, distance, settles, plan.power)
                .map(|needed| needed.max(n + 1)),
            None => Some(power::fewest_pairs_for_level(settles).max(n + 1)),
        };
        let needed = || {
            if center > threshold {
                return shown(center - threshold, level)
                    .map(|pairs| analysed_at(self.change.next_analysis_from(pairs), pairs));
            }
            let UnchangedAnalyses { early, early_tail, last_tail } = self.settling;
            let analysis = |pairs: usize| early.iter().copied().find(|it| *it >= pairs);
            let settles = if ended { *last_tail } else { *early_tail };
            let settled = shown(plan.tolerated.ln_1p().max(threshold) - center, settles)
                .map(|pairs| analysed_at(analysis(pairs), pairs));
            let same = shown(threshold - center, tail)
                .map(|pairs| analysed_at(self.same.next_analysis_from(pairs), pairs));
            [same, settled].into_iter().flatten().min()
        };
        let middle = |times: &[f64]| if times.is_empty() { 0.0 } else { median(times) };
        PairedDecision {
            case: String::new(),
            verdict: concluded.verdict,
            reason: concluded.reason,
            base_ns: middle(&pairs.base_ns),
            head_ns: middle(&pairs.head_ns),
            ratio: ratio_with_interval(&walsh, tail),
            cycles: pairs
                .cycles
                .as_ref()
                .filter(|cycles| !cycles.is_empty())
                .map(|cycles| ratio_with_interval(&WalshAverages::new(cycles), tail)),
            null: ratio_with_interval(&WalshAverages::new(&pairs.null), tail),
            threshold: threshold.exp_m1(),
            p_slower: concluded.p_slower,
            p_faster: concluded.p_faster,
            detectable: power::detectable_shift(&walsh, level, plan.power)
                .map(|shift| (threshold + shift).exp_m1()),
            pairs: n,
            pairs_needed: if open { needed() } else { None },
            decided_at: concluded.at,
            base_contention: None,
            head_contention: None,
        }
    }
}

/// Returns the estimate with its interval, or with the range of the differences if there are too
/// few for an interval.
fn ratio_with_interval(walsh: &WalshAverages, tail: f64) -> TimeRatio {
    let (low, high) = walsh
        .interval_with_tail(tail)
        .or(walsh.range())
        .unwrap_or((f64::NEG_INFINITY, f64::INFINITY));
    TimeRatio {
        center: walsh.hodges_lehmann_center().unwrap_or(0.0).exp(),
        low: low.exp(),
        high: high.exp(),
    }
}

/// The null control of all cases together, a value for each block: whether an after-effect of one
/// build's processes (heat, load that outlives them) slows the process that follows. All cases
/// share such effects, and their median shows them even if each case alone is too noisy.
fn has_after_effect(pairs: &[PairDifferences], plan: &TestPlan, last: bool) -> bool {
    let blocks = pairs.iter().map(|pairs| pairs.len() / 2).max().unwrap_or(0);
    let null: Vec<f64> = (0..blocks)
        .map(|block| {
            median(
                &pairs.iter().filter_map(|pairs| pairs.null_pair_mean(block)).collect::<Vec<_>>(),
            )
        })
        .collect();
    let threshold = plan.relative.ln_1p();
    let spending = AlphaSpending::new(plan.false_alarms, plan.max_blocks);
    [1.0, -1.0].into_iter().any(|sign| {
        let test = |n: usize| {
            signed_rank_p_greater(
                &null[..n].iter().map(|value| sign * value - threshold).collect::<Vec<_>>(),
            )
        };
        always_valid_p(spending.analyses_up_to(blocks, last || blocks >= plan.max_blocks), test).0
            <= plan.false_alarms
    })
}

/// Conclusion on a case, adjusted for the family of cases.
struct CaseConclusion {
    verdict: Verdict,
    reason: Option<InconclusiveCause>,
    /// Pairs at the interim analysis that decided.
    at: Option<usize>,
    p_slower: f64,
    p_faster: f64,
    null_fired: bool,
}

fn conclude_family(
    standings: &[CaseEvidence],
    plan: &TestPlan,
    family: ErrorRateFamily,
    sound: bool,
) -> Vec<CaseConclusion> {
    let adjusted = |p: &dyn Fn(&CaseEvidence) -> f64| {
        family.adjust_p_values(&standings.iter().map(p).collect::<Vec<_>>())
    };
    let significant = |p: f64| p <= plan.false_alarms;
    let (slower, faster) = (adjusted(&|s| s.slower.all), adjusted(&|s| s.faster.all));
    let (slower_in_time, faster_in_time) =
        (adjusted(&|s| s.slower.time), adjusted(&|s| s.faster.time));
    let (up, down) = (adjusted(&|s| s.null[0]), adjusted(&|s| s.null[1]));
    let fired: Vec<bool> =
        up.iter().zip(&down).map(|(&up, &down)| significant(up.min(down))).collect();
    let count = fired.iter().filter(|fired| **fired).count();
    let sound = sound && (count < 2 || count as f64 <= UNSOUND_CASE_SHARE * standings.len() as f64);
    let one = |(i, standing): (usize, &CaseEvidence)| {
        let (verdict, reason, at) = if !sound {
            (Verdict::Inconclusive, Some(InconclusiveCause::Environment), Some(standing.pairs))
        } else if fired[i] {
            (Verdict::Inconclusive, Some(InconclusiveCause::Null), Some(standing.pairs))
        } else if significant(slower[i]) {
            (Verdict::Regressed, None, Some(standing.slower.at))
        } else if significant(faster[i]) {
            (Verdict::Improved, None, Some(standing.faster.at))
        } else if significant(slower_in_time[i]) {
            standing.slower.unconfirmed_verdict()
        } else if significant(faster_in_time[i]) {
            standing.faster.unconfirmed_verdict()
        } else if let Some(at) = standing.same_at {
            (Verdict::Unchanged, None, Some(at))
        } else {
            (standing.otherwise.0, standing.otherwise.1, None)
        };
        CaseConclusion {
            verdict,
            reason,
            at,
            p_slower: slower[i],
            p_faster: faster[i],
            null_fired: fired[i],
        }
    };
    standings.iter().enumerate().map(one).collect()
}
