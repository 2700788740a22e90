//! Input and output of the decision from interleaved processes of two builds (paired comparison).
//!
//! One process gives one time; the statistics count processes, not the samples within a process.
//! A block consists of four new processes in the order base, head, head, base, or the reverse, so
//! that a steady drift affects both builds equally. Each block gives two pairs of neighbouring base
//! and head processes. The function [`decide_cases_with_one_plan()`] may be called after every
//! block: its error rates hold however often it is called.
//!
//! The module `paired` does not run processes, choose their order or print results.

pub mod alpha_spending;
pub mod decide_blocks;
mod log_time_pairs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::limits::{CaseTimeAndErrorLimits, LimitSource, LimitWithSource, RequestedLimits};
use super::ratio_interval::TimeRatioWithInterval;
use super::verdict::VerdictOnCase;
pub use decide_blocks::{decide_cases_with_one_plan, decide_cases_with_own_thresholds};
pub use kernelgate::record::CaseTimeInTrial;
use kernelgate::stats::benjamini_hochberg_adjusted;

/// One of the two compared builds (arms of the paired test): base or head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComparedArm {
    /// The base build, against which the head is compared.
    #[serde(rename = "base")]
    BaseBuild,
    /// The head build, which gets the verdict.
    #[serde(rename = "head")]
    HeadBuild,
}

impl ComparedArm {
    /// Returns the name of the build: "base" or "head".
    pub const fn arm_name(self) -> &'static str {
        match self {
            Self::BaseBuild => "base",
            Self::HeadBuild => "head",
        }
    }
}

impl std::fmt::Display for ComparedArm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.arm_name())
    }
}

/// A block of the paired test: four consecutive processes of one bench in the order base, head,
/// head, base, or the reverse.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimedTrialBlock {
    /// The build whose processes were the first and the last of the block.
    #[serde(rename = "leader")]
    pub first_and_last_arm: ComparedArm,
    /// The case's timings in the block's two processes of the base, in time order.
    pub base: [CaseTimeInTrial; 2],
    /// The case's timings in the block's two processes of the head, in time order.
    pub head: [CaseTimeInTrial; 2],
}

/// Thresholds, promised error rates and block counts of a comparison. The test plan is fixed before
/// the first block of the comparison runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ComparisonTestPlan {
    /// Smallest relative change of the time that counts, relative to the faster build.
    #[serde(rename = "relative")]
    pub relative_time_change_threshold: f64,
    /// Smallest change of the time that counts, nanoseconds per launch. The larger of the relative
    /// and the absolute threshold applies to a case. The absolute threshold does not apply to times
    /// that are means over many iterations ([`CaseTimeInTrial::time_is_mean`]).
    #[serde(rename = "absolute_ns")]
    pub absolute_time_change_threshold_ns: f64,
    /// Largest relative change that a case declared unchanged may have with the promised error
    /// rate. A case without evidence of a change, whose interval excludes changes above
    /// `max_unchanged_relative_change`, is declared unchanged after
    /// [`ComparisonTestPlan::min_blocks_for_unchanged`], twice as many and so on, or after the last
    /// block. The tolerated change is never below the threshold.
    #[serde(rename = "tolerated")]
    pub max_unchanged_relative_change: f64,
    /// Number of blocks from which a case may be declared unchanged within the tolerated change.
    /// Only undecided cases get more than `min_blocks_for_unchanged` blocks.
    #[serde(rename = "settle_blocks")]
    pub min_blocks_for_unchanged: usize,
    /// Highest probability that a comparison reports any regression although no case is slower than
    /// the threshold; otherwise the highest expected share of false regressions among those
    /// reported.
    #[serde(rename = "false_alarms")]
    pub max_false_alarm_probability: f64,
    /// Highest probability, for each case, that it is declared unchanged although its change is
    /// larger than the verdict excludes.
    #[serde(rename = "missed")]
    pub max_missed_change_probability: f64,
    /// Largest difference in [`CaseTimeInTrial::contention_share`] between the two processes of a
    /// pair with which the pair is used as evidence.
    #[serde(rename = "contention")]
    pub max_contention_difference_of_pair: f64,
    /// Assumed relative time that one unit of contention costs: 1 for perfectly divisible work, the
    /// number of cores for work that is divided among them once.
    #[serde(rename = "contention_weight")]
    pub slowdown_per_contention: f64,
    /// Probability with which the test must find a slow-down for it to count as detectable
    /// (statistical power).
    #[serde(rename = "power")]
    pub statistical_power: f64,
    /// Largest number of blocks of each case in a round; this number fixes the interim analyses.
    #[serde(rename = "max_blocks")]
    pub max_trial_blocks: usize,
}

impl Default for ComparisonTestPlan {
    fn default() -> Self {
        Self {
            relative_time_change_threshold: 0.01,
            absolute_time_change_threshold_ns: 100.0,
            max_unchanged_relative_change: 0.05,
            min_blocks_for_unchanged: 24,
            max_false_alarm_probability: 0.01,
            max_missed_change_probability: 0.05,
            max_contention_difference_of_pair: 0.02,
            slowdown_per_contention: 2.0,
            statistical_power: 0.8,
            max_trial_blocks: 96,
        }
    }
}

impl ComparisonTestPlan {
    /// Returns this test plan with the thresholds and the number of blocks that the user set.
    pub fn with_requested_limits(self, asked: &RequestedLimits, max_blocks: Option<usize>) -> Self {
        let relative =
            asked.relative_time_change_threshold.unwrap_or(self.relative_time_change_threshold);
        Self {
            relative_time_change_threshold: relative,
            absolute_time_change_threshold_ns: asked
                .absolute_time_change_threshold_ns
                .unwrap_or(self.absolute_time_change_threshold_ns),
            max_unchanged_relative_change: asked
                .max_unchanged_relative_change
                .unwrap_or(self.max_unchanged_relative_change)
                .max(relative),
            max_trial_blocks: max_blocks.unwrap_or(self.max_trial_blocks),
            ..self
        }
    }

    /// Returns the thresholds of this test plan as limits of a case, each with the given source.
    pub const fn limits_with_source(&self, source: LimitSource) -> CaseTimeAndErrorLimits {
        CaseTimeAndErrorLimits {
            relative_time_change_threshold: LimitWithSource {
                limit_value: self.relative_time_change_threshold,
                source,
            },
            absolute_time_change_threshold_ns: LimitWithSource {
                limit_value: self.absolute_time_change_threshold_ns,
                source,
            },
            ..CaseTimeAndErrorLimits::default_with_relative_limit(
                self.relative_time_change_threshold,
            )
        }
    }

    /// Returns this test plan with the thresholds of one case.
    pub fn with_thresholds_of_case(self, limits: &CaseTimeAndErrorLimits) -> Self {
        let (relative, absolute_ns) = (
            limits.failing_relative_limit().limit_value,
            limits.absolute_time_change_threshold_ns.limit_value,
        );
        Self {
            relative_time_change_threshold: relative,
            absolute_time_change_threshold_ns: absolute_ns,
            ..self
        }
    }
}

/// The cases over which the error rates of a decision are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorRateFamily {
    /// The family is the cases of one decision; their p values are adjusted by Benjamini-Hochberg.
    CasesOfThisDecision,
    /// The family is all cases of a comparison in shards, of which one decision has some; p values
    /// are adjusted by Bonferroni, so that shards decide independently.
    CasesOfAllShards(usize),
}

impl ErrorRateFamily {
    /// Returns the number of cases to adjust for, if this decision has `given` cases.
    fn number_of_cases_in_family(self, given: usize) -> usize {
        match self {
            Self::CasesOfThisDecision => given.max(1),
            Self::CasesOfAllShards(cases) => cases.max(given).max(1),
        }
    }

    /// Adjusts the p values of a decision's cases for the number of cases in the family.
    fn adjust_p_values_for_family(self, p_values: &[f64]) -> Vec<f64> {
        match self {
            Self::CasesOfThisDecision => benjamini_hochberg_adjusted(p_values),
            Self::CasesOfAllShards(_) => {
                let cases = self.number_of_cases_in_family(p_values.len()) as f64;
                p_values.iter().map(|p| (p * cases).min(1.0)).collect()
            }
        }
    }
}

/// Why a paired decision is inconclusive;
/// [`InconclusiveReason`](super::inconclusive_reason::InconclusiveReason) adds the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CauseOfInconclusiveDecision {
    /// There are too few pairs of processes for a verdict with the promised error rates.
    TooFewPairs,
    /// The GPU was throttled in so many blocks that too few pairs are left.
    #[serde(rename = "throttled")]
    TooManyThrottledBlocks,
    /// The confidence interval is too wide to exclude a relevant change or to show one.
    #[serde(rename = "wide")]
    IntervalTooWide,
    /// The time changed but the number of clock cycles did not, so the clock frequency changed.
    #[serde(rename = "clock")]
    ClockFrequencyChanged,
    /// Contention for the host's CPU differed between the processes of base and head.
    #[serde(rename = "contention")]
    DifferentCpuContention,
    /// The times of the case differ by more than the threshold between processes of one and the
    /// same build.
    #[serde(rename = "null")]
    IdenticalBuildsDiffer,
    /// Times differ between processes of one build in too many cases, or one build's processes slow
    /// the next process, so no measurement in this environment can be trusted.
    #[serde(rename = "environment")]
    UnstableEnvironment,
}

/// The decision on one case, from the pairs of base and head processes of one round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedDecisionOnCase {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// The verdict on the case; inconclusive as long as the case is not decided.
    pub verdict: VerdictOnCase,
    /// The cause why the decision is inconclusive; `None` for other verdicts.
    pub reason: Option<CauseOfInconclusiveDecision>,
    /// Median time of the case over the base's processes, nanoseconds per launch; 0 without a
    /// usable pair.
    #[serde(rename = "base_ns")]
    pub base_median_launch_ns: f64,
    /// Median time of the case over the head's processes, nanoseconds per launch; 0 without a
    /// usable pair.
    #[serde(rename = "head_ns")]
    pub head_median_launch_ns: f64,
    /// Head over base: The time ratio is a Hodges-Lehmann estimate with an exact confidence
    /// interval, each end of which is wrong with at most half of
    /// [`ComparisonTestPlan::max_missed_change_probability`] (2.5 % by default). With too few pairs
    /// for that confidence, the interval is the range of the pairs; without a usable pair, the time
    /// ratio is 1 in 0 to infinity.
    pub ratio: TimeRatioWithInterval,
    /// Ratio of the clock cycles of head and base, if every process recorded them; `None`
    /// otherwise.
    #[serde(rename = "cycles")]
    pub cycle_ratio: Option<TimeRatioWithInterval>,
    /// Ratio of the null pairs: processes of one build against each other, with signs such that a
    /// steady drift cancels.
    #[serde(rename = "null")]
    pub null_pair_ratio: TimeRatioWithInterval,
    /// Relative threshold of this case: the larger of the plan's relative and absolute thresholds.
    #[serde(rename = "threshold")]
    pub relative_threshold: f64,
    /// p value of "the head is not slower than the threshold", valid at any stopping time and
    /// adjusted for the number of cases. If the verdict is *regressed*, `p_value_of_not_slower` is
    /// at most [`ComparisonTestPlan::max_false_alarm_probability`].
    #[serde(rename = "p_slower")]
    pub p_value_of_not_slower: f64,
    /// p value of "the head is not faster than the threshold", valid at any stopping time and
    /// adjusted for the number of cases.
    #[serde(rename = "p_faster")]
    pub p_value_of_not_faster: f64,
    /// Smallest relative slow-down of the case that the measured number of pairs finds, with the
    /// measured variance, with probability [`ComparisonTestPlan::statistical_power`]; `None` if
    /// there are too few pairs.
    #[serde(rename = "detectable")]
    pub smallest_detectable_slowdown: Option<f64>,
    /// Number of pairs of base and head that can be used.
    #[serde(rename = "pairs")]
    pub usable_pairs: usize,
    /// Number of pairs with which an undecided case of this variance would probably be decided;
    /// `None` if more pairs would not help.
    pub pairs_needed: Option<usize>,
    /// Number of pairs at the interim analysis that decided the case; `None` if no analysis decided
    /// it before the last block.
    #[serde(rename = "decided_at")]
    pub pairs_at_decision: Option<usize>,
    /// Mean contention share beside the base's processes; `None` if it was not recorded.
    #[serde(rename = "base_contention")]
    pub base_cpu_contention: Option<f64>,
    /// Mean contention share beside the head's processes; `None` if it was not recorded.
    #[serde(rename = "head_contention")]
    pub head_cpu_contention: Option<f64>,
}

/// The decisions on all cases of one round of a comparison, preliminary or final.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedDecisionsOfRound {
    /// The decision on each case, sorted by verdict from the worst to the best, then by case id.
    pub decisions: Vec<PairedDecisionOnCase>,
    /// Ids of the cases that more blocks may decide, sorted; empty after the last block.
    #[serde(rename = "undecided")]
    pub undecided_cases: Vec<String>,
    /// Ids of the cases whose null pairs (processes of one build) differ significantly.
    #[serde(rename = "null_fired")]
    pub cases_with_differing_null_pairs: Vec<String>,
    /// Whether times agree between processes of one build; if not, every case is inconclusive.
    #[serde(rename = "environment_sound")]
    pub environment_is_stable: bool,
}

impl PairedDecisionsOfRound {
    /// Returns the number of cases that the round decided with the given verdict.
    pub fn count_cases_with_verdict(&self, verdict: VerdictOnCase) -> usize {
        self.decisions.iter().filter(|decision| decision.verdict == verdict).count()
    }

    /// Returns the decision on the case with this id; `None` if the round has no such case.
    pub fn decision_on_case(&self, case: &str) -> Option<&PairedDecisionOnCase> {
        self.decisions.iter().find(|decision| decision.case_id == case)
    }
}

/// The timed blocks of each case in time order, by case id.
pub type TimedTrialBlocksByCase = BTreeMap<String, Vec<TimedTrialBlock>>;

#[cfg(test)]
pub(crate) mod tests;
