//! Why a case is inconclusive: facts in fields, which become a sentence when they are printed.

use std::fmt;

use serde::Serialize;

use super::paired::{Arm, Decision, Doubt};
use super::verification::VerificationLoss;

/// Why a case is inconclusive.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Reason {
    /// The baseline has one process run, and nothing shows its process-to-process variance.
    SingleRun {
        /// Relative half-width that is assumed for it.
        assumed: f64,
    },
    /// The interval allows what matters and what does not.
    Wide {
        /// Its lower end, head over base.
        low: f64,
        /// Its upper end.
        high: f64,
    },
    /// The estimate is beyond the threshold, and smaller than the runs can detect.
    Undetectable {
        /// Smallest slow-down that they can detect, relative.
        detectable: f64,
    },
    /// The GPU was throttled on the side whose times decide.
    Throttled {
        /// That side.
        side: Arm,
    },
    /// The SM clock differs between the sides.
    Clock {
        /// SM clock of the head over that of the base.
        ratio: f64,
    },
    /// The power state of a side did not settle, and its range covers the change.
    Unsettled {
        /// Relative width of the range.
        width: f64,
    },
    /// The host's launch time is in the times of that side only.
    HostBound {
        /// That side.
        side: Arm,
    },
    /// The outputs were verified less than before.
    LessVerified(VerificationLoss),
    /// Too few pairs for any verdict at the promised error rate.
    TooFewPairs {
        /// Usable pairs.
        pairs: usize,
    },
    /// Contention differs between the builds.
    Contention {
        /// Mean share with the base; absent where unknown.
        base: Option<f64>,
        /// Mean share with the head; absent where unknown.
        head: Option<f64>,
    },
    /// Processes of one build differ in this case as the two builds would have to.
    Null {
        /// Lower end of the interval of the null pairs.
        low: f64,
        /// Its upper end.
        high: f64,
    },
    /// Processes of one build differ in too many cases.
    Environment,
    /// The second round does not confirm a slow-down.
    NotConfirmed,
    /// A process skipped the case.
    Skipped {
        /// Of that build.
        side: Arm,
        /// Why.
        why: String,
    },
    /// Both builds skip the case.
    SkippedOnBoth {
        /// Why the head does.
        why: String,
    },
    /// The case failed in a build.
    Failed {
        /// That build.
        side: Arm,
        /// How.
        error: String,
    },
    /// The bench of the case broke.
    BenchBroke {
        /// In that build.
        side: Arm,
        /// How.
        error: String,
    },
    /// The bench of the case cannot be driven.
    Undrivable {
        /// In that build.
        side: Arm,
        /// Why.
        why: String,
    },
    /// Another bench has a case of the same id, which is compared.
    OtherBench {
        /// That bench.
        owner: String,
        /// The bench of this case.
        bench: String,
    },
    /// No block ended in time.
    NoBlock {
        /// Wall time of the round, seconds.
        budget_s: f64,
        /// Most blocks of the round.
        max_blocks: usize,
    },
}

impl Reason {
    /// Why a decision is inconclusive.
    pub fn from_decision(decision: &Decision) -> Option<Self> {
        let Decision { ratio, null, .. } = decision;
        Some(match decision.reason? {
            Doubt::TooFewPairs => Self::TooFewPairs { pairs: decision.pairs },
            Doubt::Wide => Self::Wide { low: ratio.low, high: ratio.high },
            Doubt::Clock => {
                let cycles = decision.cycles.map_or(ratio.center, |cycles| cycles.center);
                Self::Clock { ratio: cycles / ratio.center }
            }
            Doubt::Contention => {
                Self::Contention { base: decision.base_contention, head: decision.head_contention }
            }
            Doubt::Null => Self::Null { low: null.low, high: null.high },
            Doubt::Environment => Self::Environment,
        })
    }

    /// Whether it kept the case from being measured, or measured to the end.
    pub const fn is_case_error(&self) -> bool {
        matches!(
            self,
            Self::LessVerified(_)
                | Self::Skipped { .. }
                | Self::SkippedOnBoth { .. }
                | Self::Failed { .. }
                | Self::BenchBroke { .. }
                | Self::Undrivable { .. }
                | Self::OtherBench { .. }
                | Self::NoBlock { .. }
        )
    }

    /// The `kind` that JSON and JUnit XML have.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::SingleRun { .. } => "single_run",
            Self::Wide { .. } => "wide",
            Self::Undetectable { .. } => "undetectable",
            Self::Throttled { .. } => "throttled",
            Self::Clock { .. } => "clock",
            Self::Unsettled { .. } => "unsettled",
            Self::HostBound { .. } => "host_bound",
            Self::LessVerified(_) => "less_verified",
            Self::TooFewPairs { .. } => "too_few_pairs",
            Self::Contention { .. } => "contention",
            Self::Null { .. } => "null",
            Self::Environment => "environment",
            Self::NotConfirmed => "not_confirmed",
            Self::Skipped { .. } => "skipped",
            Self::SkippedOnBoth { .. } => "skipped_on_both",
            Self::Failed { .. } => "failed",
            Self::BenchBroke { .. } => "bench_broke",
            Self::Undrivable { .. } => "undrivable",
            Self::OtherBench { .. } => "other_bench",
            Self::NoBlock { .. } => "no_block",
        }
    }
}

/// Several in one sentence.
pub fn joined<'a>(reasons: impl IntoIterator<Item = &'a Reason>) -> String {
    reasons.into_iter().map(Reason::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SingleRun { .. } => f.write_str("the baseline has one run only"),
            Self::Wide { .. } => f.write_str("interval too wide"),
            Self::Undetectable { .. } => {
                f.write_str("beyond the threshold, less than these runs can detect")
            }
            Self::Throttled { .. } => f.write_str("the GPU was throttled"),
            Self::Clock { .. } => f.write_str("the SM clock differs between the sides"),
            Self::Unsettled { .. } => f.write_str("the power state did not settle"),
            Self::HostBound { .. } => {
                f.write_str("the host's launches are in the times of one side")
            }
            Self::LessVerified(loss) => f.write_str(&loss.words()),
            Self::TooFewPairs { .. } => f.write_str("too few pairs"),
            Self::Contention { .. } => {
                f.write_str("co-running processes took more during one build")
            }
            Self::Null { .. } => f.write_str("the same build differs from itself"),
            Self::Environment => {
                f.write_str("the same build differs from itself, whatever the case")
            }
            Self::NotConfirmed => f.write_str("not confirmed by a second round"),
            Self::Skipped { side, why } => write!(f, "skipped in the {side}: {why}"),
            Self::SkippedOnBoth { why } => f.write_str(why),
            Self::Failed { side, error } => write!(f, "failed in the {side}: {error}"),
            Self::BenchBroke { side, error } => write!(f, "its bench broke in the {side}: {error}"),
            Self::Undrivable { side, why } => {
                write!(f, "its bench cannot be driven in the {side}: {why}")
            }
            Self::OtherBench { owner, bench } => write!(
                f,
                "bench {owner} has a case of this id too: --bench {bench} asks for this one"
            ),
            Self::NoBlock { budget_s, max_blocks } => {
                write!(f, "no block of it ended within {budget_s:.0} s and {max_blocks} blocks")
            }
        }
    }
}
