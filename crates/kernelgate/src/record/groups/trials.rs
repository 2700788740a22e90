//! The trials of a comparison, saved after each trial, so that an interrupted comparison loses
//! none.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::plausibility;
use crate::record::files::file::RecordType;
use crate::record::files::text;
use kernelgate_cuda::CaseFailure;

/// The trials of a comparison; their file is written anew after each block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ComparisonTrials {
    /// Executables and settings, by name, that must be unchanged to resume the comparison.
    pub identity: BTreeMap<String, String>,
    /// All trials of the comparison, in time order.
    pub trials: Vec<TrialRecord>,
}

/// One trial: one process of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRecord {
    /// Round of the comparison: 1, or 2 for the confirmation.
    pub round: u32,
    /// The bench binary.
    pub bench: String,
    /// Block of the round, from 0; counted for each bench binary.
    pub block: usize,
    /// Position of the trial in its block, 0 to 3.
    pub place: usize,
    /// Whether the trial ran the head build.
    pub head: bool,
    /// Wall time of the trial's process, seconds.
    pub wall_s: f64,
    /// Times by case.
    pub cases: BTreeMap<String, CaseTiming>,
    /// Cases that failed in this process, with the error.
    pub failed: BTreeMap<String, CaseFailure>,
    /// Requested cases that the process neither timed nor failed, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, String>,
    /// Reason why the trial did not get to its end.
    pub broke: Option<String>,
}

/// Time of one case in one process of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct CaseTiming {
    /// Median over the samples, nanoseconds a launch or an iteration. The measured time must be
    /// positive and finite; otherwise the gate excludes the trial's block.
    pub time_ns: f64,
    /// Median over the samples of time times SM clock, cycles a launch; none on the host.
    pub cycles: Option<f64>,
    /// Share of the host's CPU time that co-running processes took, 0 to 1; on a GPU 1 if another
    /// process computed on it, else 0. None where unknown.
    pub contention: Option<f64>,
    /// Whether the power cap held the SM clock down. Cycles then decide nothing: a kernel that
    /// draws more power is slower although its cycles are equal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_cap: bool,
    /// Whether heat or a slow-down of the hardware held the clock down. The gate ignores a block
    /// with a trial that was throttled.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub throttled: bool,
    /// Whether the time is a mean over many iterations, as Criterion measures it, instead of the
    /// time of single launches. A smallest relevant change in nanoseconds per launch does not apply
    /// to an averaged time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub averaged: bool,
}

impl RecordType for ComparisonTrials {
    const SCHEMA: &'static str = "kernelgate-trials";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "comparison";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["broke", "failed", "identity"];

    fn validate(&self) -> Result<(), String> {
        self.trials.iter().try_for_each(TrialRecord::validate)
    }
}

impl TrialRecord {
    /// Checks the place and the numbers of a trial.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the trial or the case, and the number.
    fn validate(&self) -> Result<(), String> {
        if self.place > 3 || !(1..=2).contains(&self.round) {
            return Err(format!("a trial at place {} of round {}", self.place, self.round));
        }
        text::check_plain_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        plausibility::check_count("block", self.block as u64)?;
        let named = |why| format!("bench {}, block {}: {why}", self.bench, self.block);
        plausibility::check_seconds("wall_s", self.wall_s).map_err(named)?;
        let case = |(id, timing): (&String, &CaseTiming)| {
            text::check_case_id(id)?;
            timing.validate().map_err(|why| format!("case {id}: {why}"))
        };
        self.cases.iter().try_for_each(case)
    }
}

impl CaseTiming {
    /// Checks that the numbers of a case are plausible.
    fn validate(&self) -> Result<(), String> {
        plausibility::check_launch_ns("a time", self.time_ns)?;
        self.cycles.map_or(Ok(()), plausibility::check_cycles)?;
        self.contention.map_or(Ok(()), |share| plausibility::check_share("contention", share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_numbers_of_a_trial_are_refused() {
        let trial = TrialRecord {
            round: 1,
            bench: "b".to_owned(),
            block: 0,
            place: 0,
            head: false,
            wall_s: 1.0,
            cases: [("x".to_owned(), CaseTiming { time_ns: 5.0, ..CaseTiming::default() })].into(),
            failed: BTreeMap::new(),
            skipped: BTreeMap::new(),
            broke: None,
        };
        assert_eq!(trial.validate(), Ok(()));
        for wall_s in [-1.0, 1e300, f64::NAN, f64::INFINITY] {
            let why = TrialRecord { wall_s, ..trial.clone() }.validate().unwrap_err();
            assert!(why.starts_with("bench b, block 0: wall_s of "), "{why}");
        }
        let timed = |timing: CaseTiming| {
            let cases = [("x".to_owned(), timing)].into();
            TrialRecord { cases, ..trial.clone() }.validate().unwrap_err()
        };
        let timing = trial.cases["x"];
        assert_eq!(
            timed(CaseTiming { time_ns: -1.0, ..timing }),
            "case x: a time of -1 ns a launch"
        );
        let cycles = Some(-5.0);
        assert_eq!(timed(CaseTiming { cycles, ..timing }), "case x: -5 cycles a launch");
        let contention = Some(1.5);
        assert_eq!(timed(CaseTiming { contention, ..timing }), "case x: contention of 1.5");
    }
}
