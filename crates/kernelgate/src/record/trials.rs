//! The trials of a comparison so far, saved after each, so that an interrupted comparison loses
//! none.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::file::Record;

/// A comparison while it grows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Trials {
    /// What must be the same for the comparison to be resumed: executables, settings, by name.
    pub identity: BTreeMap<String, String>,
    /// Every trial, in time order.
    pub trials: Vec<TrialRecord>,
}

/// One process of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRecord {
    /// 1, or 2 for the confirmation.
    pub round: u32,
    /// The bench binary.
    pub bench: String,
    /// Block of the round, from 0; counted for each bench binary.
    pub block: usize,
    /// Place in the block, 0 to 3.
    pub place: usize,
    /// Whether it ran the head.
    pub head: bool,
    /// Wall time of the process, seconds.
    pub wall_s: f64,
    /// What it found, by case.
    pub cases: BTreeMap<String, Timing>,
    /// Cases that failed in it, with the error.
    pub failed: BTreeMap<String, String>,
    /// Cases that it was asked for and neither timed nor failed, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, String>,
    /// Why it did not get to its end.
    pub broke: Option<String>,
}

/// One case in one process.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Timing {
    /// Median over the samples, nanoseconds a launch or an iteration. Positive and finite, or the
    /// gate leaves its block out.
    pub time_ns: f64,
    /// Median over the samples of time times SM clock, cycles a launch; none on the host.
    pub cycles: Option<f64>,
    /// Share of the host's CPU time that co-running processes took, 0 to 1; on a GPU 1 if another
    /// process computed on it, else 0. None where unknown.
    pub contention: Option<f64>,
    /// Whether the time is a mean over many iterations, as Criterion's are, and not of one launch:
    /// a smallest change that matters in nanoseconds a launch says nothing about it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub averaged: bool,
}

impl Record for Trials {
    const SCHEMA: &'static str = "kernelgate.trials";
    const VERSION: u64 = 1;
    const KIND: &'static str = "comparison";
    const FREE_TEXT: &'static [&'static str] = &["broke", "failed", "identity"];

    fn validate(&self) -> Result<(), String> {
        for trial in &self.trials {
            if trial.place > 3 || !(1..=2).contains(&trial.round) {
                return Err(format!("a trial at place {} of round {}", trial.place, trial.round));
            }
            if let Some((id, timing)) = trial
                .cases
                .iter()
                .find(|(_, timing)| !(timing.time_ns > 0.0 && timing.time_ns < 1e18))
            {
                return Err(format!("case {id}: a time of {} ns", timing.time_ns));
            }
        }
        Ok(())
    }
}
