//! Defines the file with all trials of a comparison, written after each block, so that an
//! interrupted comparison can resume.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::plausibility;
use crate::record::files::file::RecordFileType;
use crate::record::files::text;
use kernelgate_cuda::CaseFailureReason;

/// The trials of a comparison between base and head; the file is written anew after each block of
/// trials.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ComparisonTrialsFile {
    /// Executables and settings by name; a comparison resumes only if all are unchanged.
    #[serde(rename = "identity")]
    pub executables_and_settings: BTreeMap<String, String>,
    /// All trials of the comparison, in order of time.
    pub trials: Vec<TrialOfComparison>,
}

/// One trial of a comparison: one bench process of base or head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialOfComparison {
    /// Round of the comparison: 1, or 2 for the round that confirms a regression.
    pub round: u32,
    /// Name of the bench executable.
    pub bench: String,
    /// Number of the trial's block in its round, counted from 0 for each bench.
    #[serde(rename = "block")]
    pub block_in_round: usize,
    /// Position of the trial in its block, 0 to 3.
    #[serde(rename = "place")]
    pub position_in_block: usize,
    /// Whether the trial ran the head build (otherwise the base build).
    #[serde(rename = "head")]
    pub ran_head_build: bool,
    /// Wall time of the trial's bench process, seconds.
    pub wall_s: f64,
    /// Times by case.
    pub cases: BTreeMap<String, CaseTimeInTrial>,
    /// Cases that failed in this trial, with their errors.
    pub failed: BTreeMap<String, CaseFailureReason>,
    /// Requested cases that the trial neither timed nor reported as failed, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, String>,
    /// Reason why the bench process of this trial ended early.
    #[serde(rename = "broke")]
    pub reason_of_early_end: Option<String>,
}

/// Launch time of one case in one trial of a comparison, with its conditions.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct CaseTimeInTrial {
    /// Median time over the samples, nanoseconds per launch, or per iteration of a Criterion
    /// routine. The median must be positive and finite; otherwise the gate ignores the trial's
    /// block.
    #[serde(rename = "time_ns")]
    pub median_time_ns: f64,
    /// Median over the samples of launch time multiplied by SM clock, cycles per launch; absent on
    /// the host.
    #[serde(rename = "cycles")]
    pub median_cycles_per_launch: Option<f64>,
    /// Share of the host's CPU time that other processes used, 0 to 1; on a GPU 1 if another
    /// process computed on it, otherwise 0. None where unknown.
    #[serde(rename = "contention")]
    pub contention_share: Option<f64>,
    /// Whether the power cap lowered the SM clock in this trial. At the power cap the gate ignores
    /// the cycles, because a kernel that draws more power is slower although its cycles are equal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "at_cap")]
    pub at_power_cap: bool,
    /// Whether heat or a hardware slow-down lowered the SM clock in this trial. The gate ignores a
    /// block that contains a trial throttled in this way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "throttled")]
    pub slowed_by_heat_or_hardware: bool,
    /// Whether the time is a mean over many iterations, as Criterion measures, instead of a median
    /// of single launches. A smallest relevant change that the user gives in nanoseconds per launch
    /// is not applied to such a mean.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "averaged")]
    pub time_is_mean: bool,
}

impl RecordFileType for ComparisonTrialsFile {
    const SCHEMA: &'static str = "kernelgate-trials";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_READABLE_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "comparison";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &["broke", "failed", "identity"];

    fn check_record_plausible(&self) -> Result<(), String> {
        self.trials.iter().try_for_each(TrialOfComparison::check_trial_plausible)
    }
}

impl TrialOfComparison {
    /// Fails if the place or a number of this trial is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the trial or the case, and the number.
    fn check_trial_plausible(&self) -> Result<(), String> {
        if self.position_in_block > 3 || !(1..=2).contains(&self.round) {
            return Err(format!(
                "a trial at place {} of round {}",
                self.position_in_block, self.round
            ));
        }
        text::check_is_plain_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        plausibility::check_count_plausible("block", self.block_in_round as u64)?;
        let named = |why| format!("bench {}, block {}: {why}", self.bench, self.block_in_round);
        plausibility::check_wall_seconds_plausible("wall_s", self.wall_s).map_err(named)?;
        let case = |(id, timing): (&String, &CaseTimeInTrial)| {
            text::check_case_id_text(id)?;
            timing.check_case_time_plausible().map_err(|why| format!("case {id}: {why}"))
        };
        self.cases.iter().try_for_each(case)
    }
}

impl CaseTimeInTrial {
    /// Fails if a number of this case's timing is implausible.
    fn check_case_time_plausible(&self) -> Result<(), String> {
        plausibility::check_launch_ns_plausible("a time", self.median_time_ns)?;
        self.median_cycles_per_launch
            .map_or(Ok(()), plausibility::check_cycles_per_launch_plausible)?;
        self.contention_share
            .map_or(Ok(()), |share| plausibility::check_share_plausible("contention", share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn implausible_numbers_of_a_trial_are_refused() {
        let trial = TrialOfComparison {
            round: 1,
            bench: "b".to_owned(),
            block_in_round: 0,
            position_in_block: 0,
            ran_head_build: false,
            wall_s: 1.0,
            cases: [(
                "x".to_owned(),
                CaseTimeInTrial { median_time_ns: 5.0, ..CaseTimeInTrial::default() },
            )]
            .into(),
            failed: BTreeMap::new(),
            skipped: BTreeMap::new(),
            reason_of_early_end: None,
        };
        assert_eq!(trial.check_trial_plausible(), Ok(()));
        for wall_s in [-1.0, 1e300, f64::NAN, f64::INFINITY] {
            let why =
                TrialOfComparison { wall_s, ..trial.clone() }.check_trial_plausible().unwrap_err();
            assert!(why.starts_with("bench b, block 0: wall_s of "), "{why}");
        }
        let timed = |timing: CaseTimeInTrial| {
            let cases = [("x".to_owned(), timing)].into();
            TrialOfComparison { cases, ..trial.clone() }.check_trial_plausible().unwrap_err()
        };
        let timing = trial.cases["x"];
        assert_eq!(
            timed(CaseTimeInTrial { median_time_ns: -1.0, ..timing }),
            "case x: a time of -1 ns a launch"
        );
        let cycles = Some(-5.0);
        assert_eq!(
            timed(CaseTimeInTrial { median_cycles_per_launch: cycles, ..timing }),
            "case x: -5 cycles a launch"
        );
        let contention = Some(1.5);
        assert_eq!(
            timed(CaseTimeInTrial { contention_share: contention, ..timing }),
            "case x: contention of 1.5"
        );
    }
}
