//! Reasons why a case is inconclusive: fields hold the facts, and printing makes a sentence.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::outputs::verification::VerificationLoss;
use super::paired::{Arm, InconclusiveCause, PairedDecision};
use super::ratio_interval::TimeRatio;

/// The reason why a case is inconclusive.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum InconclusiveReason {
    /// The baseline has one process run, and nothing shows its process-to-process variance.
    SingleRun {
        /// Relative half-width that is assumed for the variance between processes.
        assumed: f64,
    },
    /// The confidence interval contains both relevant and irrelevant changes.
    Wide(TimeRatio),
    /// The estimate is beyond the threshold, and smaller than the runs can detect.
    Undetectable {
        /// Smallest relative slow-down that the runs can detect.
        detectable: f64,
    },
    /// The GPU was throttled.
    Throttled(DecidingSide),
    /// Another process computed on the GPU during the run.
    SharedGpu(DecidingSide),
    /// The SM clock of base and head differs.
    Clock {
        /// SM clock of the head over that of the base.
        ratio: f64,
    },
    /// The power state of a side did not settle, and its range covers the change.
    Unsettled {
        /// Relative width of the range of the case's times.
        width: f64,
    },
    /// The host's launch time is in the times of one side only.
    HostBound(DecidingSide),
    /// The outputs were verified less completely than before.
    LessVerified(VerificationLoss),
    /// Too few pairs for any verdict at the promised error rate.
    TooFewPairs {
        /// Usable pairs.
        pairs: usize,
    },
    /// Too few pairs remain, because the GPU was throttled in the others.
    ThrottledPairs {
        /// Usable pairs.
        pairs: usize,
    },
    /// The contention for the host's CPU differs between the builds.
    Contention {
        /// Mean contention share beside the base; absent if unknown.
        base: Option<f64>,
        /// Mean contention share beside the head; absent if unknown.
        head: Option<f64>,
    },
    /// Processes of one and the same build differ in this case by more than the threshold.
    Null(TimeRatio),
    /// Processes of one and the same build differ in too many cases.
    Environment,
    /// The second round did not confirm the slow-down that the first round found.
    NotConfirmed,
    /// A process of one build skipped the case, although others ran it.
    Skipped(BuildFailure),
    /// The case failed in a process of one build.
    Failed(BuildFailure),
    /// The bench that contains the case failed.
    BenchBroke(BuildFailure),
    /// The bench that contains the case has neither kernelgate's nor Criterion's flags.
    Undrivable(BuildFailure),
    /// Another bench has a case with an equal id, and that case is compared instead.
    OtherBench {
        /// The bench whose case is compared.
        owner: String,
        /// Name of the other bench that has this case.
        bench: String,
    },
    /// No block of the case ended before the budget did.
    NoBlock {
        /// Wall time budget of the round, seconds.
        budget_s: f64,
        /// Largest number of blocks of the round.
        max_blocks: usize,
    },
}

/// The side whose condition makes the verdict inconclusive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DecidingSide {
    /// Either the base or the head.
    pub side: Arm,
}

/// The failure of a build that kept a case from being measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BuildFailure {
    /// The build.
    pub side: Arm,
    /// The reason.
    pub why: String,
}

impl BuildFailure {
    pub fn new(side: Arm, why: impl Into<String>) -> Self {
        Self { side, why: why.into() }
    }
}

impl InconclusiveReason {
    /// Reason why a decision is inconclusive.
    pub fn from_decision(decision: &PairedDecision) -> Option<InconclusiveReason> {
        let ratio = decision.ratio;
        Some(match decision.reason? {
            InconclusiveCause::TooFewPairs => Self::TooFewPairs { pairs: decision.pairs },
            InconclusiveCause::Throttled => Self::ThrottledPairs { pairs: decision.pairs },
            InconclusiveCause::Wide => Self::Wide(ratio),
            InconclusiveCause::Clock => {
                let cycles = decision.cycles.unwrap_or(ratio);
                Self::Clock { ratio: cycles.center / ratio.center }
            }
            InconclusiveCause::Contention => {
                Self::Contention { base: decision.base_contention, head: decision.head_contention }
            }
            InconclusiveCause::Null => Self::Null(decision.null),
            InconclusiveCause::Environment => Self::Environment,
        })
    }

    /// Returns whether the reason prevented a complete measurement of the case.
    pub const fn is_case_error(&self) -> bool {
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

    /// Returns the `kind` in JSON, and the reason in words.
    fn parts(&self) -> (&'static str, String) {
        let failed = |what: &str, BuildFailure { side, why }: &BuildFailure| {
            format!("{what} the {side}: {why}")
        };
        let (kind, words) = match self {
            Self::LessVerified(loss) => return ("less_verified", loss.words()),
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

    /// Returns the `kind` of the reason for JSON and JUnit XML.
    pub fn name(&self) -> &'static str {
        self.parts().0
    }
}

/// Joins several reasons into one sentence.
pub fn joined<'a>(reasons: impl IntoIterator<Item = &'a InconclusiveReason>) -> String {
    reasons.into_iter().map(InconclusiveReason::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for InconclusiveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.parts().1)
    }
}
