//! The decision from interleaved process runs of two builds: its input and its output.
//!
//! The unit of the statistics is a process, not a sample. Four fresh processes make a block,
//! base-head-head-base or head-base-base-head, so that even drift through a block affects both
//! sides equally; each block gives two pairs of neighbours. [`decide_all()`] is pure and may be
//! called after every block: its error rates hold however often it is called.
//!
//! Running processes, choosing their order and printing are deliberately elsewhere.

pub mod alpha_spending;
pub mod decide_blocks;
mod log_time_pairs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::limits::{AskedLimits, CaseLimits, LimitSource, SourcedLimit};
use super::ratio_interval::TimeRatio;
use super::verdict::Verdict;
pub use decide_blocks::{decide_all, decide_cases};
pub use kernelgate::record::CaseTiming;
use kernelgate::stats::benjamini_hochberg_adjusted;

/// An arm: one of the two compared builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arm {
    /// The base build, with which the head is compared.
    Base,
    /// The head build, which is judged.
    Head,
}

impl Arm {
    /// Name of the arm: "base" or "head".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Head => "head",
        }
    }
}

impl std::fmt::Display for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A block: four consecutive processes in the order base, head, head, base, or the reverse.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrialBlock {
    /// Returns the build of the block's first and last process.
    pub leader: Arm,
    /// The two processes of the base, in time order.
    pub base: [CaseTiming; 2],
    /// The two processes of the head, in time order.
    pub head: [CaseTiming; 2],
}

/// Thresholds of a comparison and its promised error rates. The plan is fixed before the first
/// block runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TestPlan {
    /// Smallest change of the time that matters, relative to the faster build.
    pub relative: f64,
    /// Smallest change of the time that matters, nanoseconds a launch. The larger of the relative
    /// and the absolute threshold applies. The absolute threshold does not apply to times that are
    /// means over iterations ([`CaseTiming::averaged`]).
    pub absolute_ns: f64,
    /// Largest change that an unchanged case may hide, relative. A case without evidence of a
    /// change, whose interval excludes larger changes, is unchanged after
    /// [`TestPlan::settle_blocks`], after twice as many and so on, or once no more blocks come.
    /// Never below the threshold.
    pub tolerated: f64,
    /// Blocks after which a case may be unchanged by `tolerated`. Only undecided cases get more
    /// blocks than this number.
    pub settle_blocks: usize,
    /// Highest probability that any case is called regressed in a comparison whose head is not
    /// slower than the threshold; if some cases are slower, the highest expected share of wrong
    /// cases among those called regressed.
    pub false_alarms: f64,
    /// Highest probability that a case with a larger change than its verdict excludes is called
    /// unchanged; for each case.
    pub missed: f64,
    /// Difference in [`CaseTiming::contention`] between the processes of a pair above which the
    /// pair is not used as evidence.
    pub contention: f64,
    /// Assumed relative time that one unit of contention costs below that difference: 1 for
    /// perfectly divisible work, the number of cores for work that is divided among them once.
    pub contention_weight: f64,
    /// Probability with which an effect must be found to count as detectable.
    pub power: f64,
    /// Largest number of blocks of the comparison; they fix the interim analyses.
    pub max_blocks: usize,
}

impl Default for TestPlan {
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

impl TestPlan {
    /// Returns the plan with the limits that the user set.
    pub fn overridden_by(self, asked: &AskedLimits, max_blocks: Option<usize>) -> Self {
        let relative = asked.relative.unwrap_or(self.relative);
        Self {
            relative,
            absolute_ns: asked.absolute_ns.unwrap_or(self.absolute_ns),
            tolerated: asked.tolerated.unwrap_or(self.tolerated).max(relative),
            max_blocks: max_blocks.unwrap_or(self.max_blocks),
            ..self
        }
    }

    /// The limits of a plan, with their source.
    pub const fn limits(&self, source: LimitSource) -> CaseLimits {
        CaseLimits {
            relative: SourcedLimit { value: self.relative, source },
            absolute_ns: SourcedLimit { value: self.absolute_ns, source },
            ..CaseLimits::default_limit(self.relative)
        }
    }

    /// Returns the plan for a case with these limits.
    pub fn within(self, limits: &CaseLimits) -> Self {
        let (relative, absolute_ns) =
            (limits.failing_relative_limit().value, limits.absolute_ns.value);
        Self { relative, absolute_ns, ..self }
    }
}

/// The cases among which an error rate is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorRateFamily {
    /// The cases of the decision, adjusted by Benjamini-Hochberg.
    Given,
    /// The family has this number of cases, of which a shard decides some; p values are adjusted by
    /// Bonferroni, so that a shard's decision does not depend on other shards.
    Plan(usize),
}

impl ErrorRateFamily {
    /// Number of cases to adjust for, if the decision has `given` cases.
    fn family_size(self, given: usize) -> usize {
        match self {
            Self::Given => given.max(1),
            Self::Plan(cases) => cases.max(given).max(1),
        }
    }

    /// Adjusts p values for the number of cases in the family.
    fn adjust_p_values(self, p_values: &[f64]) -> Vec<f64> {
        match self {
            Self::Given => benjamini_hochberg_adjusted(p_values),
            Self::Plan(_) => {
                let cases = self.family_size(p_values.len()) as f64;
                p_values.iter().map(|p| (p * cases).min(1.0)).collect()
            }
        }
    }
}

/// The doubt that keeps a decision open; [`Reason`](super::inconclusive_reason::InconclusiveReason)
/// adds the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InconclusiveCause {
    /// Too few pairs for any verdict at the promised error rate.
    TooFewPairs,
    /// The GPU was throttled in so many pairs that too few pairs are left.
    Throttled,
    /// The interval contains both relevant and irrelevant changes.
    Wide,
    /// The time changed and the cycles did not, so the clock changed.
    Clock,
    /// Contention of the host's CPU differed between the builds.
    Contention,
    /// Processes of the same build differ in this case by more than the threshold.
    Null,
    /// Processes of the same build differ in too many cases, or because of after-effects of the
    /// other build's processes: no measurement here and now can be trusted.
    Environment,
}

/// The decision on one case of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedDecision {
    /// The case.
    pub case: String,
    /// The verdict; inconclusive as long as it is not decided.
    pub verdict: Verdict,
    /// Reason why the decision is inconclusive; `None` for other verdicts.
    pub reason: Option<InconclusiveCause>,
    /// Median over the base's processes, nanoseconds a launch; 0 without a usable pair.
    pub base_ns: f64,
    /// Median over the head's processes, nanoseconds a launch; 0 without a usable pair.
    pub head_ns: f64,
    /// Head over base: Hodges-Lehmann estimate and exact interval, each end wrong with a
    /// probability of at most half [`TestPlan::missed`] (2.5 % by default). With too few pairs for
    /// that interval, it goes from the smallest to the largest pair; without a usable pair the
    /// ratio is 1 within 0 to infinity.
    pub ratio: TimeRatio,
    /// Ratio of the cycles, if the clock was read in every process.
    pub cycles: Option<TimeRatio>,
    /// Ratio of the null pairs: processes of one build against each other, signs so that drift
    /// cancels.
    pub null: TimeRatio,
    /// Smallest change of the time that matters in this case, relative: the larger of the plan's
    /// thresholds.
    pub threshold: f64,
    /// p value of "the head is not slower than the threshold", valid at any interim analysis,
    /// adjusted over the cases. The p value is at most [`TestPlan::false_alarms`] if the verdict is
    /// *regressed*.
    pub p_slower: f64,
    /// p value of "the head is not faster than the threshold", valid and adjusted like `p_slower`.
    pub p_faster: f64,
    /// Smallest relative slow-down that this number of pairs with this variance finds with
    /// probability [`TestPlan::power`]; `None` with too few pairs to find any.
    pub detectable: Option<f64>,
    /// Usable pairs.
    pub pairs: usize,
    /// Number of pairs with which an open or inconclusive case of this variance would probably be
    /// decided; `None` if more pairs would not help.
    pub pairs_needed: Option<usize>,
    /// Pairs at the interim analysis that decided; `None` if none decided before the blocks ended.
    pub decided_at: Option<usize>,
    /// Mean contention share beside the base's processes; `None` if unknown.
    pub base_contention: Option<f64>,
    /// Mean contention share beside the head's processes; `None` if unknown.
    pub head_contention: Option<f64>,
}

/// The decisions on all cases of a comparison, preliminary or final.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedOutcome {
    /// The decision of every case, worst verdict first, then by case id.
    pub decisions: Vec<PairedDecision>,
    /// Cases that more blocks may decide, in id order; empty at the end.
    pub undecided: Vec<String>,
    /// Cases whose null pairs show a difference.
    pub null_fired: Vec<String>,
    /// Whether processes of equal builds agree; if not, every case is inconclusive.
    pub environment_sound: bool,
}

impl PairedOutcome {
    /// Cases with that verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.decisions.iter().filter(|decision| decision.verdict == verdict).count()
    }

    /// Returns the decision on the case with this id.
    pub fn decision(&self, case: &str) -> Option<&PairedDecision> {
        self.decisions.iter().find(|decision| decision.case == case)
    }
}

/// Observed blocks in time order, by case.
pub type BlocksByCase = BTreeMap<String, Vec<TrialBlock>>;

#[cfg(test)]
pub(crate) mod tests;
