//! The search: which commit is compared with which, with what threshold, and what follows.
//!
//! The ends are compared first, and their difference is the effect that is looked for. A commit is
//! slow or not by whether it is slower than the good end by more than half of the effect, which is
//! as far from either. Whatever answers promises that each answer is wrong with at most the
//! probability that the plan says, so all of them together with at most [`RISK`]. What is not
//! decided is asked again with twice as many blocks, then left out, never guessed. At the end the
//! commit is compared with the one before it, so that what is told was measured on these two.

use serde::{Deserialize, Serialize};

use crate::gate::paired::TestPlan;
use kernelgate::measure::plausibility;

/// Highest probability that any answer of a search is wrong.
pub const RISK: f64 = 0.05;
/// How often a question is asked before its commit is left out.
pub const ATTEMPTS: u32 = 3;

/// What is asked: is the head slower than the base?
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Question {
    /// What it is compared with, a place in the list of commits; 0 is the good end.
    pub base: usize,
    /// What is judged.
    pub head: usize,
    /// How often it was asked before; each time takes twice as many blocks as the time before.
    pub attempt: u32,
    /// What counts as slower; none for what does on the device: the ends.
    pub plan: Option<TestPlan>,
}

/// Times of two commits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Head over base.
    pub ratio: f64,
    /// Lower end of its interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Times {
    /// Checks that the ratio and its interval can have been measured.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_ratio("a ratio", self.ratio)?;
        match self.low <= self.high && [self.low, self.high].iter().all(|end| end.abs() < 1e15) {
            true => Ok(()),
            false => Err(format!("an interval from {} to {}", self.low, self.high)),
        }
    }
}

/// What a comparison says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Slower by more than the threshold.
    Slower(Times),
    /// Not slower by as much.
    NotSlower(Times),
    /// Too much noise for so many blocks: why.
    Undecided(String),
    /// The head cannot be measured: it does not build, say.
    Unusable(String),
}

/// How a search ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// With commits.
    Found(Found),
    /// The ends do not differ.
    NoDifference(Times),
    /// Whether the ends differ could not be told: why.
    EndsUndecided(String),
    /// An end cannot be measured: why.
    EndUnusable(String),
}

/// The commits that slowed the case down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Found {
    /// The last place that is not slow.
    pub last_good: usize,
    /// The first that is slow. Where it does not follow the last good one, any of those between, or
    /// this, did it.
    pub first_bad: usize,
    /// What could not be told of places that were asked about, in the order of asking.
    pub left_out: Vec<(usize, String)>,
    /// The ends.
    pub ends: Times,
    /// The two places against each other.
    pub confirmation: Answer,
    /// Questions, each time that one was asked.
    pub asked: usize,
    /// 1 less the highest probability that any answer was wrong.
    pub confidence: f64,
}

impl Found {
    /// Whether the two places differ as the ends do.
    pub const fn is_confirmed(&self) -> bool {
        matches!(self.confirmation, Answer::Slower(_))
    }
}

/// Searches among places 0, which is good, to `last`, which is bad; at least 1. `compare` answers.
pub fn search<E>(
    last: usize,
    blocks: usize,
    mut compare: impl FnMut(&Question) -> Result<Answer, E>,
) -> Result<Ended, E> {
    let mut asked = 0;
    let mut ask = |base: usize, head: usize, plan: Option<TestPlan>| {
        let mut answer = Answer::Undecided(String::new());
        for attempt in 0..ATTEMPTS {
            asked += 1;
            let plan = plan.map(|plan| TestPlan { max_blocks: blocks << attempt, ..plan });
            answer = compare(&Question { base, head, attempt, plan })?;
            if !matches!(answer, Answer::Undecided(_)) {
                break;
            }
        }
        Ok(answer)
    };
    let ends = match ask(0, last, None)? {
        Answer::Slower(times) => times,
        Answer::NotSlower(times) => return Ok(Ended::NoDifference(times)),
        Answer::Undecided(why) => return Ok(Ended::EndsUndecided(why)),
        Answer::Unusable(why) => return Ok(Ended::EndUnusable(why)),
    };
    // One for each halving, and the confirmation; the ends were asked at the device's own level.
    let questions = usize::BITS - last.leading_zeros() + 1;
    let level = RISK / f64::from(questions);
    let plan = half_way(ends.ratio, level);
    let (mut last_good, mut first_bad) = (0, last);
    let mut left_out: Vec<(usize, String)> = Vec::new();
    let mut answers = 0;
    let mut of_first_bad = None;
    while let Some(middle) = middle(last_good, first_bad, &left_out) {
        let answer = ask(0, middle, Some(plan))?;
        match answer {
            Answer::Slower(_) => {
                first_bad = middle;
                of_first_bad = Some(answer);
            }
            Answer::NotSlower(_) => last_good = middle,
            Answer::Undecided(why) | Answer::Unusable(why) => {
                left_out.push((middle, why));
                continue;
            }
        }
        answers += 1;
    }
    let confirmation = match of_first_bad {
        // That very question was just answered.
        Some(answer) if last_good == 0 => answer,
        _ => {
            answers += 1;
            ask(last_good, first_bad, Some(plan))?
        }
    };
    Ok(Ended::Found(Found {
        last_good,
        first_bad,
        left_out,
        ends,
        confirmation,
        asked,
        confidence: 1.0 - (level * f64::from(answers)).min(1.0),
    }))
}

/// The plan that tells a commit of either end from one of the other, each wrongly with at most
/// that probability.
fn half_way(ratio: f64, level: f64) -> TestPlan {
    // Rounded, so that what was read from a file gives the same.
    let relative = ((ratio.sqrt() - 1.0) * 1e5).round() / 1e5;
    TestPlan {
        relative,
        absolute_ns: 0.0,
        tolerated: relative,
        false_alarms: level,
        missed: level,
        ..TestPlan::default()
    }
}

/// The place nearest to the middle between two that was not left out; none where there is none.
fn middle(low: usize, high: usize, left_out: &[(usize, String)]) -> Option<usize> {
    let open = |place: &usize| !left_out.iter().any(|(other, _)| other == place);
    (low + 1..high).filter(open).min_by_key(|place| (2 * place).abs_diff(low + high))
}

#[cfg(test)]
mod tests;
