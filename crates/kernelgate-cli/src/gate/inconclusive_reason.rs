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
    #[serde(rename = "single_run")]
    BaselineHasSingleRun {
        /// Relative half-width of the time interval that is assumed for a single process run.
        #[serde(rename = "assumed")]
        assumed_interval_half_width: f64,
    },
    /// The confidence interval of the time ratio is too wide to exclude a regression or to show
    /// one.
    #[serde(rename = "wide")]
    IntervalTooWide(TimeRatioWithInterval),
    /// The estimated change is beyond the threshold but smaller than the smallest change that these
    /// runs can detect.
    #[serde(rename = "undetectable")]
    ChangeBelowDetectable {
        /// Smallest relative slow-down of a case that the compared process runs can detect.
        #[serde(rename = "detectable")]
        smallest_detectable_slowdown: f64,
    },
    /// The GPU was throttled while the base or the head was measured.
    #[serde(rename = "throttled")]
    GpuThrottled(SideThatCausesDoubt),
    /// Another process computed on the GPU while the base or the head was measured.
    SharedGpu(SideThatCausesDoubt),
    /// The SM clocks of base and head differ so much that they explain the time difference.
    #[serde(rename = "clock")]
    DifferentSmClocks {
        /// SM clock of the head divided by the SM clock of the base.
        #[serde(rename = "ratio")]
        head_to_base_clock_ratio: f64,
    },
    /// The GPU's power state did not settle, and the range of the times meanwhile covers the
    /// measured change.
    #[serde(rename = "unsettled")]
    PowerStateUnsettled {
        /// Relative width of the range of the case's times while the power state had not settled.
        #[serde(rename = "width")]
        relative_time_range_width: f64,
    },
    /// In base or head only, the GPU waited for the host, so its times include the host's launch
    /// time.
    HostBound(SideThatCausesDoubt),
    /// The head verified the outputs of the case less completely than the base.
    LessVerified(VerificationLoss),
    /// There are too few pairs of processes for a verdict with the promised error rates.
    TooFewPairs {
        /// Number of pairs of base and head that can be used.
        #[serde(rename = "pairs")]
        usable_pairs: usize,
    },
    /// Too few usable pairs remain, because the GPU was throttled in the other pairs.
    #[serde(rename = "throttled_pairs")]
    TooManyThrottledPairs {
        /// Number of pairs of base and head that can be used.
        #[serde(rename = "pairs")]
        usable_pairs: usize,
    },
    /// Other processes used different shares of the CPU beside the base and beside the head.
    #[serde(rename = "contention")]
    DifferentCpuContention {
        /// Mean share of the CPU that other processes used beside the base's processes; `None` if
        /// unknown.
        #[serde(rename = "base")]
        base_cpu_contention: Option<f64>,
        /// Mean share of the CPU that other processes used beside the head's processes; `None` if
        /// unknown.
        #[serde(rename = "head")]
        other_cpu_share_beside_head: Option<f64>,
    },
    /// The times of the case differ by more than the threshold between processes of one and the
    /// same build.
    #[serde(rename = "null")]
    IdenticalBuildsDiffer(TimeRatioWithInterval),
    /// In too many cases, times differ between processes of one and the same build, so the
    /// environment is unstable.
    #[serde(rename = "environment")]
    UnstableEnvironment,
    /// The comparison's second round did not confirm the regression that its first round found.
    #[serde(rename = "not_confirmed")]
    RegressionNotConfirmed,
    /// One process of a build (base or head) skipped the case, although others measured it.
    #[serde(rename = "skipped")]
    CaseSkipped(MeasurementFailureOnSide),
    /// The case failed in a process of the base.
    #[serde(rename = "failed")]
    CaseFailedInBase(MeasurementFailureOnSide),
    /// The bench of the case failed, so its remaining cases could not be measured.
    #[serde(rename = "bench_broke")]
    BenchFailed(MeasurementFailureOnSide),
    /// The bench of the case understands neither kernelgate's bench protocol nor Criterion's flags.
    #[serde(rename = "undrivable")]
    UnsupportedBenchHarness(MeasurementFailureOnSide),
    /// Another bench has a case with an equal id, which is compared instead of this one.
    #[serde(rename = "other_bench")]
    CaseOwnedByOtherBench {
        /// Name of the bench whose case with this id is compared.
        #[serde(rename = "owner")]
        compared_bench: String,
        /// Name of the bench whose case with this id is not compared.
        #[serde(rename = "bench")]
        bench_not_compared: String,
    },
    /// No block of the case was complete when the round's budget ended.
    #[serde(rename = "no_block")]
    NoCompleteBlock {
        /// Wall time budget of the comparison's round, seconds.
        #[serde(rename = "budget_s")]
        round_budget_s: f64,
        /// Largest number of blocks of the comparison's round.
        #[serde(rename = "max_blocks")]
        max_trial_blocks: usize,
    },
}

/// The side (base or head) whose condition makes the verdict inconclusive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SideThatCausesDoubt {
    /// The side (base or head) whose measuring condition causes the doubt.
    pub side: ComparedArm,
}

/// Failure in one build (base or head) that prevented the measurement of a case, with the reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasurementFailureOnSide {
    /// The build that failed: base or head.
    pub side: ComparedArm,
    /// Reason why the case was not measured in this build, as a text.
    #[serde(rename = "why")]
    pub failure_reason: String,
}

impl MeasurementFailureOnSide {
    pub fn in_side_with_reason(side: ComparedArm, why: impl Into<String>) -> Self {
        Self { side, failure_reason: why.into() }
    }
}

impl InconclusiveReason {
    /// Returns the reason why a paired decision is inconclusive; `None` for a decision with another
    /// verdict.
    pub fn from_paired_decision(decision: &PairedDecisionOnCase) -> Option<InconclusiveReason> {
        let ratio = decision.ratio;
        Some(match decision.reason? {
            CauseOfInconclusiveDecision::TooFewPairs => {
                Self::TooFewPairs { usable_pairs: decision.usable_pairs }
            }
            CauseOfInconclusiveDecision::TooManyThrottledBlocks => {
                Self::TooManyThrottledPairs { usable_pairs: decision.usable_pairs }
            }
            CauseOfInconclusiveDecision::IntervalTooWide => Self::IntervalTooWide(ratio),
            CauseOfInconclusiveDecision::ClockFrequencyChanged => {
                let cycles = decision.cycle_ratio.unwrap_or(ratio);
                Self::DifferentSmClocks {
                    head_to_base_clock_ratio: cycles.estimated_ratio / ratio.estimated_ratio,
                }
            }
            CauseOfInconclusiveDecision::DifferentCpuContention => Self::DifferentCpuContention {
                base_cpu_contention: decision.base_cpu_contention,
                other_cpu_share_beside_head: decision.head_cpu_contention,
            },
            CauseOfInconclusiveDecision::IdenticalBuildsDiffer => {
                Self::IdenticalBuildsDiffer(decision.null_pair_ratio)
            }
            CauseOfInconclusiveDecision::UnstableEnvironment => Self::UnstableEnvironment,
        })
    }

    /// Returns whether the reason is an error that prevented the complete measurement of the case,
    /// and not the noise of its times.
    pub const fn is_measurement_error(&self) -> bool {
        use InconclusiveReason::{
            BenchFailed, CaseFailedInBase, CaseOwnedByOtherBench, CaseSkipped, LessVerified,
            NoCompleteBlock, UnsupportedBenchHarness,
        };
        matches!(
            self,
            LessVerified(_)
                | CaseSkipped(_)
                | CaseFailedInBase(_)
                | BenchFailed(_)
                | UnsupportedBenchHarness(_)
                | CaseOwnedByOtherBench { .. }
                | NoCompleteBlock { .. }
        )
    }

    /// Returns the reason's `kind` for JSON, and its text.
    fn json_kind_and_text(&self) -> (&'static str, String) {
        let failed = |what: &str, MeasurementFailureOnSide { side, failure_reason: why }: &MeasurementFailureOnSide| {
            format!("{what} the {side}: {why}")
        };
        let (kind, words) = match self {
            Self::LessVerified(loss) => {
                return ("less_verified", loss.describe_verification_loss());
            }
            Self::CaseSkipped(it) => return ("skipped", failed("skipped in", it)),
            Self::CaseFailedInBase(it) => return ("failed", failed("failed in", it)),
            Self::BenchFailed(it) => return ("bench_broke", failed("its bench broke in", it)),
            Self::UnsupportedBenchHarness(it) => {
                return ("undrivable", failed("its bench cannot be driven in", it));
            }
            Self::CaseOwnedByOtherBench { compared_bench: owner, bench_not_compared: bench } => {
                let ask = format!("--bench {bench} asks for this one");
                return ("other_bench", format!("bench {owner} has a case of this id too: {ask}"));
            }
            Self::NoCompleteBlock { round_budget_s: budget_s, max_trial_blocks: max_blocks } => {
                let limits = format!("{budget_s:.0} s and {max_blocks} blocks");
                return ("no_block", format!("no block of it ended within {limits}"));
            }
            Self::BaselineHasSingleRun { .. } => ("single_run", "the baseline has one run only"),
            Self::IntervalTooWide(_) => ("wide", "interval too wide"),
            Self::ChangeBelowDetectable { .. } => {
                ("undetectable", "beyond the threshold, less than these runs can detect")
            }
            Self::GpuThrottled(_) => ("throttled", "the GPU was throttled"),
            Self::SharedGpu(_) => ("shared_gpu", "another process computed on the GPU"),
            Self::DifferentSmClocks { .. } => ("clock", "the SM clock differs between the sides"),
            Self::PowerStateUnsettled { .. } => ("unsettled", "the power state did not settle"),
            Self::HostBound(_) => {
                ("host_bound", "the host's launches are in the times of one side")
            }
            Self::TooFewPairs { .. } => ("too_few_pairs", "too few pairs"),
            Self::TooManyThrottledPairs { .. } => {
                ("throttled_pairs", "too few pairs, as the GPU was throttled in others")
            }
            Self::DifferentCpuContention { .. } => {
                ("contention", "co-running processes took more during one build")
            }
            Self::IdenticalBuildsDiffer(_) => ("null", "the same build differs from itself"),
            Self::UnstableEnvironment => {
                ("environment", "the same build differs from itself, whatever the case")
            }
            Self::RegressionNotConfirmed => ("not_confirmed", "not confirmed by a second round"),
        };
        (kind, words.to_owned())
    }

    /// Returns the `kind` of the reason that JSON and JUnit XML files contain.
    pub fn json_kind(&self) -> &'static str {
        self.json_kind_and_text().0
    }
}

/// Joins the texts of several reasons, separated by semicolons.
pub fn join_reason_texts<'a>(reasons: impl IntoIterator<Item = &'a InconclusiveReason>) -> String {
    reasons.into_iter().map(InconclusiveReason::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for InconclusiveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.json_kind_and_text().1)
    }
}
