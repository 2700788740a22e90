//! Reasons why a case is inconclusive: the variants store facts, which printing turns into a
//! sentence.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::outputs::verification::VerificationLoss;
use super::paired::{CauseOfInconclusiveDecision, ComparedArm, PairedDecisionOnCase};
use super::ratio_interval::TimeRatioWithInterval;

/// The reason why a case has no verdict, or the verdict "inconclusive".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum InconclusiveReason {
    /// The baseline has only one process run of the case, and its variance between processes is not
    /// known.
    SingleRun {
        /// Relative half-width of the time interval that is assumed for the variance between
        /// processes.
        assumed: f64,
    },
    /// The confidence interval of the time ratio is too wide to exclude a regression or to show
    /// one.
    Wide(TimeRatioWithInterval),
    /// The estimated change is beyond the threshold but smaller than the smallest change that these
    /// runs can detect.
    Undetectable {
        /// Smallest relative slow-down that these runs can detect.
        detectable: f64,
    },
    /// The GPU was throttled.
    Throttled(SideThatCausesDoubt),
    /// Another process computed on the GPU during the run.
    SharedGpu(SideThatCausesDoubt),
    /// The SM clocks of base and head differ so much that they explain the time difference.
    Clock {
        /// SM clock of the head divided by that of the base.
        ratio: f64,
    },
    /// The GPU's power state did not settle, and the range of the times meanwhile covers the
    /// measured change.
    Unsettled {
        /// Relative width of the range of the case's times while the power state had not settled.
        width: f64,
    },
    /// In base or head only, the GPU waited for the host, so its times include the host's launch
    /// time.
    HostBound(SideThatCausesDoubt),
    /// The head verified the outputs of the case less completely than the base.
    LessVerified(VerificationLoss),
    /// There are too few pairs of processes for a verdict with the promised error rates.
    TooFewPairs {
        /// Number of pairs of base and head that can be used.
        pairs: usize,
    },
    /// Too few usable pairs remain, because the GPU was throttled in the other pairs.
    ThrottledPairs {
        /// Number of pairs of base and head that can be used.
        pairs: usize,
    },
    /// Other processes used different shares of the CPU beside the base and beside the head.
    Contention {
        /// Mean share of the CPU that other processes used beside the base's processes; `None` if
        /// unknown.
        base: Option<f64>,
        /// Mean share of the CPU that other processes used beside the head's processes; `None` if
        /// unknown.
        head: Option<f64>,
    },
    /// The times of this case differ by more than the threshold between processes of one and the
    /// same build.
    Null(TimeRatioWithInterval),
    /// In too many cases, times differ between processes of one and the same build, so the
    /// environment is unstable.
    Environment,
    /// The comparison's second round did not confirm the regression that its first round found.
    NotConfirmed,
    /// One process of a build (base or head) skipped the case, although others measured it.
    Skipped(FailureInBuild),
    /// The case failed in a process of the base.
    Failed(FailureInBuild),
    /// The bench of the case failed, so its remaining cases could not be measured.
    BenchBroke(FailureInBuild),
    /// The bench of the case understands neither kernelgate's bench protocol nor Criterion's flags.
    Undrivable(FailureInBuild),
    /// Another bench has a case with an equal id, which is compared instead of this one.
    OtherBench {
        /// Name of the bench whose case with this id is compared.
        owner: String,
        /// Name of the bench whose case with this id is not compared.
        bench: String,
    },
    /// No block of the case was complete when the round's budget ended.
    NoBlock {
        /// Wall time budget of the comparison's round, seconds.
        budget_s: f64,
        /// Largest number of blocks of the comparison's round.
        max_blocks: usize,
    },
}

/// The side (base or head) whose condition makes the verdict inconclusive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SideThatCausesDoubt {
    /// The base or the head.
    pub side: ComparedArm,
}

/// Failure in one build (base or head) that prevented the measurement of a case, with the reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FailureInBuild {
    /// The build that failed: base or head.
    pub side: ComparedArm,
    /// Reason for this entry, as a text.
    pub why: String,
}

impl FailureInBuild {
    pub fn in_side_with_reason(side: ComparedArm, why: impl Into<String>) -> Self {
        Self { side, why: why.into() }
    }
}

impl InconclusiveReason {
    /// Returns the reason why a paired decision is inconclusive; `None` for a decision with another
    /// verdict.
    pub fn from_paired_decision(decision: &PairedDecisionOnCase) -> Option<InconclusiveReason> {
        let ratio = decision.ratio;
        Some(match decision.reason? {
            CauseOfInconclusiveDecision::TooFewPairs => Self::TooFewPairs { pairs: decision.pairs },
            CauseOfInconclusiveDecision::Throttled => {
                Self::ThrottledPairs { pairs: decision.pairs }
            }
            CauseOfInconclusiveDecision::Wide => Self::Wide(ratio),
            CauseOfInconclusiveDecision::Clock => {
                let cycles = decision.cycles.unwrap_or(ratio);
                Self::Clock { ratio: cycles.center / ratio.center }
            }
            CauseOfInconclusiveDecision::Contention => {
                Self::Contention { base: decision.base_contention, head: decision.head_contention }
            }
            CauseOfInconclusiveDecision::Null => Self::Null(decision.null),
            CauseOfInconclusiveDecision::Environment => Self::Environment,
        })
    }

    /// Returns whether the reason is an error that prevented the complete measurement of the case,
    /// and not the noise of its times.
    pub const fn is_measurement_error(&self) -> bool {
        use InconclusiveReason::{
            BenchBroke, Failed, LessVerified, NoBlock, OtherBench, Skipped, Undrivable,
        };
        matches!(
            self,
            LessVerified(_)
                | Skipped(_)
                | Failed(_)
                | BenchBroke(_)
                | Undrivable(_)
                | OtherBench { .. }
                | NoBlock { .. }
        )
    }

    /// Returns the reason's `kind` for JSON, and its text.
    fn kind_and_text(&self) -> (&'static str, String) {
        let failed = |what: &str, FailureInBuild { side, why }: &FailureInBuild| {
            format!("{what} the {side}: {why}")
        };
        let (kind, words) = match self {
            Self::LessVerified(loss) => return ("less_verified", loss.describe_loss()),
            Self::Skipped(it) => return ("skipped", failed("skipped in", it)),
            Self::Failed(it) => return ("failed", failed("failed in", it)),
            Self::BenchBroke(it) => return ("bench_broke", failed("its bench broke in", it)),
            Self::Undrivable(it) => {
                return ("undrivable", failed("its bench cannot be driven in", it));
            }
            Self::OtherBench { owner, bench } => {
                let ask = format!("--bench {bench} asks for this one");
                return ("other_bench", format!("bench {owner} has a case of this id too: {ask}"));
            }
            Self::NoBlock { budget_s, max_blocks } => {
                let limits = format!("{budget_s:.0} s and {max_blocks} blocks");
                return ("no_block", format!("no block of it ended within {limits}"));
            }
            Self::SingleRun { .. } => ("single_run", "the baseline has one run only"),
            Self::Wide(_) => ("wide", "interval too wide"),
            Self::Undetectable { .. } => {
                ("undetectable", "beyond the threshold, less than these runs can detect")
            }
            Self::Throttled(_) => ("throttled", "the GPU was throttled"),
            Self::SharedGpu(_) => ("shared_gpu", "another process computed on the GPU"),
            Self::Clock { .. } => ("clock", "the SM clock differs between the sides"),
            Self::Unsettled { .. } => ("unsettled", "the power state did not settle"),
            Self::HostBound(_) => {
                ("host_bound", "the host's launches are in the times of one side")
            }
            Self::TooFewPairs { .. } => ("too_few_pairs", "too few pairs"),
            Self::ThrottledPairs { .. } => {
                ("throttled_pairs", "too few pairs, as the GPU was throttled in others")
            }
            Self::Contention { .. } => {
                ("contention", "co-running processes took more during one build")
            }
            Self::Null(_) => ("null", "the same build differs from itself"),
            Self::Environment => {
                ("environment", "the same build differs from itself, whatever the case")
            }
            Self::NotConfirmed => ("not_confirmed", "not confirmed by a second round"),
        };
        (kind, words.to_owned())
    }

    /// Returns the `kind` of the reason that JSON and JUnit XML files contain.
    pub fn json_kind(&self) -> &'static str {
        self.kind_and_text().0
    }
}

/// Joins the texts of several reasons, separated by semicolons.
pub fn join_reason_texts<'a>(reasons: impl IntoIterator<Item = &'a InconclusiveReason>) -> String {
    reasons.into_iter().map(InconclusiveReason::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for InconclusiveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind_and_text().1)
    }
}
