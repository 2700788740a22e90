//! Input and output of the decision from interleaved processes of two builds (paired comparison).
//!
//! One process gives one time; the statistics count processes, not the samples within a process.
//! A block consists of four new processes in the order base, head, head, base, or the reverse, so
//! that a steady drift affects both builds equally. Each block gives two pairs of neighbouring base
//! and head processes. The function [`decide_cases_with_one_plan()`] may be called after every
//! block: its error rates hold however often it is called.
//!
//! This module does not run processes, choose their order or print results.

pub mod alpha_spending;
pub mod decide_blocks;
mod log_time_pairs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::limits::{CaseLimits, LimitSource, LimitWithSource, RequestedLimits};
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
    Base,
    /// The head build, which gets the verdict.
    Head,
}

impl ComparedArm {
    /// Returns the name of the build: "base" or "head".
    pub const fn arm_name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Head => "head",
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
pub struct TimedBlock {
    /// The build whose processes were the first and the last of the block.
    pub leader: ComparedArm,
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
    pub relative: f64,
    /// Smallest change of the time that counts, nanoseconds per launch. The larger of the relative
    /// and the absolute threshold applies to a case. The absolute threshold does not apply to times
    /// that are means over many iterations ([`CaseTimeInTrial::averaged`]).
    pub absolute_ns: f64,
    /// Largest relative change that a case declared unchanged may have with the promised error
    /// rate. A case without evidence of a change, whose interval excludes changes above
    /// `tolerated`, is declared unchanged after [`ComparisonTestPlan::settle_blocks`], twice as
    /// many and so on, or after the last block. Never below the threshold.
    pub tolerated: f64,
    /// Number of blocks from which a case may be declared unchanged within the tolerated change.
    /// Only undecided cases get more than `settle_blocks` blocks.
    pub settle_blocks: usize,
    /// Highest probability that a comparison reports any regression although no case is slower than
    /// the threshold; otherwise the highest expected share of false regressions among those
    /// reported.
    pub false_alarms: f64,
    /// Highest probability, for each case, that it is declared unchanged although its change is
    /// larger than the verdict excludes.
    pub missed: f64,
    /// Largest difference in [`CaseTimeInTrial::contention`] between the two processes of a pair
    /// with which the pair is used as evidence.
    pub contention: f64,
    /// Assumed relative time that one unit of contention costs: 1 for perfectly divisible work, the
    /// number of cores for work that is divided among them once.
    pub contention_weight: f64,
    /// Probability with which the test must find a slow-down for it to count as detectable
    /// (statistical power).
    pub power: f64,
    /// Largest number of blocks of each case in a round; this number fixes the interim analyses.
    pub max_blocks: usize,
}

impl Default for ComparisonTestPlan {
    fn default() -> Self {
        Self {
            relative: 0.01,
            absolute_ns: 100.0,
            tolerated: 0.05,
            settle_blocks: 24,
            false_alarms: 0.01,
            missed: 0.05,
            contention: 0.02,
            contention_weight: 2.0,
            power: 0.8,
            max_blocks: 96,
        }
    }
}

impl ComparisonTestPlan {
    /// Returns this test plan with the thresholds and the number of blocks that the user set.
    pub fn with_requested_limits(self, asked: &RequestedLimits, max_blocks: Option<usize>) -> Self {
        let relative = asked.relative.unwrap_or(self.relative);
        Self {
            relative,
            absolute_ns: asked.absolute_ns.unwrap_or(self.absolute_ns),
            tolerated: asked.tolerated.unwrap_or(self.tolerated).max(relative),
            max_blocks: max_blocks.unwrap_or(self.max_blocks),
            ..self
        }
    }

    /// Returns the thresholds of this test plan as limits of a case, each with the given source.
    pub const fn limits_with_source(&self, source: LimitSource) -> CaseLimits {
        CaseLimits {
            relative: LimitWithSource { value: self.relative, source },
            absolute_ns: LimitWithSource { value: self.absolute_ns, source },
            ..CaseLimits::default_with_relative_limit(self.relative)
        }
    }

    /// Returns this test plan with the thresholds of one case.
    pub fn with_thresholds_of_case(self, limits: &CaseLimits) -> Self {
        let (relative, absolute_ns) =
            (limits.failing_relative_limit().value, limits.absolute_ns.value);
        Self { relative, absolute_ns, ..self }
    }
}

/// The cases over which the error rates of a decision are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorRateFamily {
    /// The cases of this decision; their p values are adjusted by Benjamini-Hochberg.
    Given,
    /// All cases of a comparison in shards, of which this decision has some; p values are adjusted
    /// by Bonferroni, so that shards decide independently.
    Plan(usize),
}

impl ErrorRateFamily {
    /// Returns the number of cases to adjust for, if this decision has `given` cases.
    fn number_of_cases_in_family(self, given: usize) -> usize {
        match self {
            Self::Given => given.max(1),
            Self::Plan(cases) => cases.max(given).max(1),
        }
    }

    /// Adjusts the p values of a decision's cases for the number of cases in the family.
    fn adjust_p_values_for_family(self, p_values: &[f64]) -> Vec<f64> {
        match self {
            Self::Given => benjamini_hochberg_adjusted(p_values),
            Self::Plan(_) => {
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
    Throttled,
    /// The confidence interval is too wide to exclude a relevant change or to show one.
    Wide,
    /// The time changed but the number of clock cycles did not, so the clock frequency changed.
    Clock,
    /// Contention for the host's CPU differed between the processes of base and head.
    Contention,
    /// The times of this case differ by more than the threshold between processes of one and the
    /// same build.
    Null,
    /// Times differ between processes of one build in too many cases, or one build's processes slow
    /// the next process, so no measurement in this environment can be trusted.
    Environment,
}

/// The decision on one case, from the pairs of base and head processes of one round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedDecisionOnCase {
    /// Id of the case: `workload/problem/implementation/cache`.
    pub case: String,
    /// The verdict on the case; inconclusive as long as the case is not decided.
    pub verdict: VerdictOnCase,
    /// The cause why the decision is inconclusive; `None` for other verdicts.
    pub reason: Option<CauseOfInconclusiveDecision>,
    /// Median time of the case over the base's processes, nanoseconds per launch; 0 without a
    /// usable pair.
    pub base_ns: f64,
    /// Median time of the case over the head's processes, nanoseconds per launch; 0 without a
    /// usable pair.
    pub head_ns: f64,
    /// Head over base: The time ratio is a Hodges-Lehmann estimate with an exact confidence
    /// interval, each end of which is wrong with at most half of [`ComparisonTestPlan::missed`]
    /// (2.5 % by default). With too few pairs for that confidence, the interval is the range of the
    /// pairs; without a usable pair, the time ratio is 1 in 0 to infinity.
    pub ratio: TimeRatioWithInterval,
    /// Ratio of the clock cycles of head and base, if every process recorded them; `None`
    /// otherwise.
    pub cycles: Option<TimeRatioWithInterval>,
    /// Ratio of the null pairs: processes of one build against each other, with signs such that a
    /// steady drift cancels.
    pub null: TimeRatioWithInterval,
    /// Relative threshold of this case: the larger of the plan's relative and absolute thresholds.
    pub threshold: f64,
    /// p value of "the head is not slower than the threshold", valid at any stopping time and
    /// adjusted for the number of cases. If the verdict is *regressed*, `p_slower` is at most
    /// [`ComparisonTestPlan::false_alarms`].
    pub p_slower: f64,
    /// p value of "the head is not faster than the threshold", valid at any stopping time and
    /// adjusted for the number of cases.
    pub p_faster: f64,
    /// Smallest relative slow-down that this number of pairs with this variance finds with
    /// probability [`ComparisonTestPlan::power`]; `None` if there are too few pairs.
    pub detectable: Option<f64>,
    /// Number of pairs of base and head that can be used.
    pub pairs: usize,
    /// Number of pairs with which an undecided case of this variance would probably be decided;
    /// `None` if more pairs would not help.
    pub pairs_needed: Option<usize>,
    /// Number of pairs at the interim analysis that decided the case; `None` if no analysis decided
    /// it before the last block.
    pub decided_at: Option<usize>,
    /// Mean contention share beside the base's processes; `None` if it was not recorded.
    pub base_contention: Option<f64>,
    /// Mean contention share beside the head's processes; `None` if it was not recorded.
    pub head_contention: Option<f64>,
}

/// The decisions on all cases of one round of a comparison, preliminary or final.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedDecisionsOfRound {
    /// The decision on each case, sorted by verdict from the worst to the best, then by case id.
    pub decisions: Vec<PairedDecisionOnCase>,
    /// Ids of the cases that more blocks may decide, sorted; empty after the last block.
    pub undecided: Vec<String>,
    /// Ids of the cases whose null pairs (processes of one build) differ significantly.
    pub null_fired: Vec<String>,
    /// Whether times agree between processes of one build; if not, every case is inconclusive.
    pub environment_sound: bool,
}

impl PairedDecisionsOfRound {
    /// Cases with that verdict.
    pub fn count_cases_with_verdict(&self, verdict: VerdictOnCase) -> usize {
        self.decisions.iter().filter(|decision| decision.verdict == verdict).count()
    }

    /// Returns the decision on the case with this id; `None` if the round has no such case.
    pub fn decision_on_case(&self, case: &str) -> Option<&PairedDecisionOnCase> {
        self.decisions.iter().find(|decision| decision.case == case)
    }
}

/// The timed blocks of each case in time order, by case id.
pub type TimedBlocksByCase = BTreeMap<String, Vec<TimedBlock>>;

#[cfg(test)]
pub(crate) mod tests;
