//! Is a run slower than the baseline? Verdicts with their interval and what could have been
//! detected; refusal where the question makes no sense.
//!
//! The unit of a decision is a process run: one median a run and case. Deliberately absent:
//! measuring, printing.

pub mod baseline;
pub mod calibration;
pub mod code;
pub mod comparison;
pub mod costs;
pub mod explanation;
pub mod host_time;
pub mod interval;
pub mod numerics;
pub mod paired;
pub mod resources;
pub mod rules;
pub mod rules_file;
pub mod single_run;
pub mod verification;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use baseline::compare;
use costs::CostGrowth;
use interval::{Ratio, SingleRun};
use kernelgate::exit::Exit;
use numerics::NumericsReport;
use rules::{Rules, RulesReport};
use verification::VerificationLoss;

/// What counts as slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Policy {
    /// Smallest change of the time, relative to the baseline, that matters.
    pub relative: f64,
    /// Smallest change of the time that matters, nanoseconds.
    pub absolute_ns: f64,
    /// Relative difference that two devices of one model may have: comes on top where a case's
    /// baseline is not known to be of the same device.
    pub other_device: f64,
    /// Relative half-width assumed for a side with a single process run, where neither a
    /// calibration nor earlier runs tell its process-to-process variance.
    pub single_run: f64,
    /// Widest relative interval from which "unchanged" may still be said.
    pub widest: f64,
    /// Share of the host's CPU time taken by co-running processes above which the report warns.
    pub contention: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            relative: 0.05,
            absolute_ns: 100.0,
            other_device: 0.22,
            single_run: 0.10,
            widest: 0.60,
            contention: 0.10,
        }
    }
}

impl Policy {
    /// With the thresholds that the package sets for a case.
    pub fn of_case(self, case: &str, rules: &Rules) -> Self {
        let limits = rules.limits(case);
        Self {
            relative: limits.relative.unwrap_or(self.relative),
            absolute_ns: limits.absolute_ns.unwrap_or(self.absolute_ns),
            ..self
        }
    }

    /// With a slow-down that is accepted, where one is.
    pub fn accepting(self, slower: Option<f64>) -> Self {
        Self { relative: slower.unwrap_or(self.relative).max(self.relative), ..self }
    }

    /// Smallest relative change that matters of a case that takes that long in the baseline.
    pub fn threshold(&self, same_device: bool, base_ns: f64) -> f64 {
        self.relative_on(same_device).max(self.absolute_ns / base_ns)
    }

    /// Smallest relative change that matters, on the baseline's device or on another of its model.
    pub fn relative_on(&self, same_device: bool) -> f64 {
        if same_device {
            self.relative
        } else {
            (1.0 + self.relative) * (1.0 + self.other_device) - 1.0
        }
    }
}

/// What the measurements say about a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Slower by more than the threshold, whole interval.
    Regressed,
    /// Slower by more than the threshold by its estimate, and by no more than the package accepts
    /// of the case.
    Accepted,
    /// A change that matters is neither shown nor excluded.
    Inconclusive,
    /// Faster by more than the threshold, whole interval.
    Improved,
    /// The estimate is within the threshold, from an interval that is not too wide to say so.
    Unchanged,
}

impl Verdict {
    /// A verdict by the bound that is accepted of a case, for a reader who knows the threshold: what
    /// is slower than that is no unchanged time.
    pub fn told(self, ratio: f64, threshold: f64) -> Self {
        match self {
            Self::Unchanged if ratio > 1.0 + threshold => Self::Accepted,
            verdict => verdict,
        }
    }

    /// The word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Regressed => "regressed",
            Self::Accepted => "accepted",
            Self::Inconclusive => "inconclusive",
            Self::Improved => "improved",
            Self::Unchanged => "unchanged",
        }
    }
}

/// Why a case is inconclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Doubt {
    /// The baseline has one process run, and nothing tells its process-to-process variance.
    SingleRun,
    /// The runs of a side differ too much.
    Wide,
    /// The estimate is beyond the threshold, and smaller than what the runs can detect.
    Undetectable,
    /// The GPU was throttled on the side that is, or may hide, the slower one.
    Throttled,
    /// The SM clock of that side was lower than that of the other.
    Clock,
    /// The power state of a side did not settle, and its range covers the change.
    Unsettled,
    /// The host's launch time is in the times of that side, and not in those of the other.
    HostBound,
    /// The outputs were verified less than the baseline's.
    LessVerified,
}

impl Doubt {
    /// The words for tables and messages.
    pub const fn words(self) -> &'static str {
        match self {
            Self::SingleRun => "the baseline has one run only",
            Self::Wide => "interval too wide",
            Self::Undetectable => "beyond the threshold, less than these runs can detect",
            Self::Throttled => "the GPU was throttled",
            Self::Clock => "the SM clock was lower on one side",
            Self::Unsettled => "the power state did not settle",
            Self::HostBound => "the host's launches are in the times of one side",
            Self::LessVerified => "less verified than the baseline",
        }
    }
}

/// A case that is in the baseline and in the runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judged {
    /// The case.
    pub case: String,
    /// What is concluded.
    pub verdict: Verdict,
    /// Why it is inconclusive; none for other verdicts.
    pub reason: Option<Doubt>,
    /// Whether all runs are known to be of the same device.
    pub same_device: bool,
    /// Smallest relative change that matters here.
    pub threshold: f64,
    /// Median over the baseline's runs of their medians, nanoseconds a launch.
    pub base_ns: f64,
    /// The same of the runs.
    pub head_ns: f64,
    /// Head over base with its interval.
    pub ratio: Ratio,
    /// Smallest slow-down that this comparison would have called regressed, relative.
    pub detectable: f64,
    /// Relative half-width of the range of the baseline's runs; none with one run.
    pub base_spread: Option<f64>,
    /// The same of the runs judged.
    pub head_spread: Option<f64>,
    /// Process runs of the baseline.
    pub base_runs: usize,
    /// Process runs judged.
    pub head_runs: usize,
    /// What the baseline's only run was given for the difference between runs; none with several.
    pub base_single: Option<SingleRun>,
    /// The same of the only run judged.
    pub head_single: Option<SingleRun>,
    /// Share of the host's CPU time that co-running processes took in the baseline's runs; 0 where
    /// unknown or without effect.
    pub base_contention: f64,
    /// The same in the runs.
    pub head_contention: f64,
}

/// Why a case or the whole comparison was refused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Refusal {
    /// Field that differs, as named in the files.
    pub field: String,
    /// Value of the baseline.
    pub base: String,
    /// Value of the run.
    pub head: String,
    /// Cases concerned.
    pub cases: Vec<String>,
}

/// How old the oldest run is that a baseline's cases rest on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Staleness {
    /// When it started, RFC 3339, UTC.
    pub recorded: String,
    /// The code it measured.
    pub commit: String,
    /// Whole days since; none where the start is no time.
    pub days: Option<i64>,
    /// Commits since; none where git does not tell.
    pub commits: Option<u64>,
}

/// The outcome of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GateReport {
    /// Name of the baseline.
    pub baseline: String,
    /// The device.
    pub device: String,
    /// Code that the baseline's judged runs were of, one entry a commit.
    pub base_commits: Vec<String>,
    /// Code that was judged.
    pub head_commits: Vec<String>,
    /// The baseline's device and the run's, where they are not known to be one and the same.
    pub other_device: Option<(String, String)>,
    /// How old the baseline is, where somebody looked.
    pub staleness: Option<Staleness>,
    /// What counted as slower.
    pub policy: Policy,
    /// Verdicts, worst first, then by id.
    pub judged: Vec<Judged>,
    /// Differences that forbid a comparison.
    pub refused: Vec<Refusal>,
    /// Cases of the runs that the baseline lacks.
    pub new: Vec<String>,
    /// Cases of the baseline that the runs lack: removed, or not asked for.
    pub not_run: Vec<String>,
    /// Cases of the baseline that the runs skipped, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Cases that failed in the runs, with the error.
    pub failed: BTreeMap<String, String>,
    /// Bench processes that did not get to their end.
    pub interrupted: Vec<String>,
    /// Shards that the others lack.
    pub missing_shards: Vec<String>,
    /// Process runs that are on both sides: these were compared with themselves.
    pub own: Vec<String>,
    /// Errors against the reference, before and now.
    pub numerics: NumericsReport,
    /// What a launch takes besides time and the package does not allow.
    pub costs: Vec<CostGrowth>,
    /// Judged cases that were verified less than the baseline.
    pub verification: Vec<VerificationLoss>,
    /// Judged cases that are compared with nothing, now and in the baseline.
    pub unverified: Vec<String>,
    /// What the package's rules did.
    pub rules: RulesReport,
}

impl GateReport {
    /// The exit code: refusal before regression before doubt.
    pub fn exit(&self) -> Exit {
        let any = |verdict| self.judged.iter().any(|judged| judged.verdict == verdict);
        if !self.refused.is_empty() {
            Exit::Refused
        } else if any(Verdict::Regressed)
            || !self.failed.is_empty()
            || self.numerics.shown().next().is_some()
            || self.costs.iter().any(CostGrowth::is_shown)
            || self.verification.iter().any(VerificationLoss::is_shown)
        {
            Exit::Regression
        } else if any(Verdict::Inconclusive)
            || !self.verification.is_empty()
            || self.numerics.suspected().next().is_some()
            || !self.costs.is_empty()
            || !self.interrupted.is_empty()
            || !self.missing_shards.is_empty()
            || !self.skipped.is_empty()
            || !self.rules.undecided.is_empty()
            || self.judged.is_empty()
        {
            Exit::Inconclusive
        } else {
            Exit::Fine
        }
    }

    /// Cases with that verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.judged.iter().filter(|judged| judged.verdict == verdict).count()
    }
}

#[cfg(test)]
mod tests;
