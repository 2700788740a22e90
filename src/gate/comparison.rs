//! The outcome of `compare`: what was decided of each case, what could not be judged and why, and the exit code.

use std::collections::BTreeMap;

use serde::Serialize;

use super::paired::{Decision, Plan};
use super::{Refusal, Verdict};
use crate::exit::Exit;

/// Two builds, compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What was compared with: "main (1a2b3c4d)".
    pub base: String,
    /// What was judged.
    pub head: String,
    /// Where.
    pub device: String,
    /// What counted as slower.
    pub plan: Plan,
    /// Cases of both, worst verdict first, then by id.
    pub judged: Vec<Compared>,
    /// Differences that forbid a comparison, with the cases concerned.
    pub refused: Vec<Refusal>,
    /// Cases that only the head has.
    pub new: Vec<String>,
    /// Cases that only the base has.
    pub removed: Vec<String>,
    /// Cases that the base timed and the head skipped, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Cases that failed in the head, with the error.
    pub failed: BTreeMap<String, String>,
    /// Cases that failed in the base only: the head mended them, and there is nothing to compare with.
    pub failed_in_base: BTreeMap<String, String>,
    /// Processes that broke.
    pub broken: Vec<Broken>,
    /// Bench binaries without this harness: left alone.
    pub foreign: Vec<String>,
    /// Bench binaries that are the same in both, byte by byte: what differs between them is noise.
    pub identical: Vec<String>,
    /// Whether the code was optimised.
    pub optimised: bool,
    /// Delays added to launches of the head on purpose: its times are not the code's.
    pub delays: Option<String>,
    /// What the comparison took, by round.
    pub rounds: Vec<Round>,
}

/// A case of both builds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// What is concluded in the end; a regression that the second round does not confirm is inconclusive.
    pub verdict: Verdict,
    /// Of the first round.
    pub decision: Decision,
    /// Of the second round, from blocks of its own; only where the first says regressed.
    pub confirmation: Option<Decision>,
}

impl Compared {
    /// From both rounds.
    pub fn new(decision: Decision, confirmation: Option<Decision>) -> Self {
        let again = confirmation.as_ref().is_some_and(|decision| decision.verdict == Verdict::Regressed);
        let verdict = match decision.verdict {
            Verdict::Regressed if !again => Verdict::Inconclusive,
            verdict => verdict,
        };
        Self { verdict, decision, confirmation }
    }

    /// Why it is inconclusive.
    pub fn reason(&self) -> Option<&'static str> {
        match self.decision.verdict {
            Verdict::Regressed if self.verdict == Verdict::Inconclusive => Some("not confirmed by a second round"),
            _ => self.decision.reason.map(super::paired::Reason::words),
        }
    }
}

/// A process that did not get to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Broken {
    /// The bench binary.
    pub bench: String,
    /// "base" or "head".
    pub side: String,
    /// How.
    pub reason: String,
    /// Whether its cases are undecided because of it.
    pub given_up: bool,
}

/// What a round took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Round {
    /// Most blocks that a bench binary went through.
    pub blocks: usize,
    /// Processes.
    pub processes: usize,
    /// Their wall time, seconds.
    pub wall_s: f64,
}

impl Comparison {
    /// The exit code: refusal before regression before doubt. Where nothing was judged: inconclusive.
    pub fn exit(&self) -> Exit {
        let given_up = |side: &str| self.broken.iter().any(|broken| broken.given_up && broken.side == side);
        if !self.refused.is_empty() {
            Exit::Refused
        } else if self.count(Verdict::Regressed) > 0 || !self.failed.is_empty() || given_up("head") {
            Exit::Regression
        } else if self.count(Verdict::Inconclusive) > 0 || !self.skipped.is_empty() || given_up("base") || self.judged.is_empty() {
            Exit::Inconclusive
        } else {
            Exit::Fine
        }
    }

    /// Cases with that verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.judged.iter().filter(|compared| compared.verdict == verdict).count()
    }
}
