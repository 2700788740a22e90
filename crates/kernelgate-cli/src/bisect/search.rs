//! The search: which commit is compared with which, with what threshold, and what follows.
//!
//! The ends are compared first, and their difference is the effect to find. A commit is slow or not
//! by whether it is slower than the good end by more than half of the effect, which is as far from
//! either. The comparison promises that each answer is wrong with at most the probability that the
//! plan gives, so all of them together with at most [`WRONG_ANSWER_PROBABILITY`]. An undecided
//! question is asked again with twice as many blocks; if it stays undecided its commit is skipped,
//! never guessed. At the end of the search, the first bad commit is compared with the commit before
//! it, so that the reported difference was measured on these two.

use serde::{Deserialize, Serialize};

use crate::gate::paired::TestPlan;
use kernelgate::measure::plausibility;

/// Highest probability that any answer of a search is wrong.
pub const WRONG_ANSWER_PROBABILITY: f64 = 0.05;
/// Number of attempts at a question before its commit is skipped.
pub const MAX_ATTEMPTS: u32 = 3;

/// The question whether the head is slower than the base.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BisectionQuestion {
    /// Position of the base in the list of commits; 0 is the good end.
    pub base: usize,
    /// Position of the head in the searched list of commits.
    pub head: usize,
    /// Number of earlier attempts at this comparison; each attempt takes twice as many blocks as
    /// the one before.
    pub attempt: u32,
    /// Thresholds of the comparison; `None` uses the thresholds of the device, as the comparison of
    /// the two ends does.
    pub plan: Option<TestPlan>,
}

/// Times of two commits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CommitTimeRatio {
    /// Time of the head commit over that of the base commit.
    pub ratio: f64,
    /// Lower end of the confidence interval of the time ratio.
    pub low: f64,
    /// Upper end of the confidence interval of the time ratio.
    pub high: f64,
}

impl CommitTimeRatio {
    /// Checks that the ratio and its interval can have been measured.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_ratio("a ratio", self.ratio)?;
        match self.low <= self.high && [self.low, self.high].iter().all(|end| end.abs() < 1e15) {
            true => Ok(()),
            false => Err(format!("an interval from {} to {}", self.low, self.high)),
        }
    }
}

/// The answer of a comparison of two commits: slower, not slower, or undecided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BisectionAnswer {
    /// The head is slower than the base by more than the threshold.
    Slower(CommitTimeRatio),
    /// The head is not slower than the base by more than the threshold.
    NotSlower(CommitTimeRatio),
    /// The comparison was inconclusive: the noise is too large for this number of blocks; the text
    /// states the reason.
    Undecided(String),
    /// The head commit cannot be measured; the text states the reason, for example that it does not
    /// build.
    Unusable(String),
}

/// The ways in which a search can end.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchEnd {
    /// The search found commits.
    Found(SlowdownRange),
    /// The good and the bad end do not differ in time.
    NoDifference(CommitTimeRatio),
    /// The comparison of the ends was inconclusive, with the reason.
    EndsUndecided(String),
    /// One end of the search cannot be measured; the text states the reason.
    EndUnusable(String),
}

/// The range of commits that contains the slow-down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SlowdownRange {
    /// Position of the last commit at which the case is not slow.
    pub last_good: usize,
    /// Index of the first commit at which the case is slow. If the first bad commit does not
    /// directly follow the last good one, any commit after the last good one may have caused the
    /// slow-down.
    pub first_bad: usize,
    /// Places that could not be compared, with the reason, in the order of the questions.
    pub left_out: Vec<(usize, String)>,
    /// Comparison of the ends.
    pub ends: CommitTimeRatio,
    /// Comparison of the last good commit with the first bad one.
    pub confirmation: BisectionAnswer,
    /// Number of comparisons that were made, including repeated ones.
    pub asked: usize,
    /// 1 less the highest probability that any answer was wrong.
    pub confidence: f64,
}

impl SlowdownRange {
    /// Returns whether the two commits differ as much as the two ends of the search.
    pub const fn is_confirmed(&self) -> bool {
        matches!(self.confirmation, BisectionAnswer::Slower(_))
    }
}

/// Searches among the places 0, which is good, to `last`, which is bad and at least 1. The closure
/// `compare` answers.
pub fn search_slowdown<E>(
    last: usize,
    blocks: usize,
    mut compare: impl FnMut(&BisectionQuestion) -> Result<BisectionAnswer, E>,
) -> Result<SearchEnd, E> {
    let mut asked = 0;
    let mut ask = |base: usize, head: usize, plan: Option<TestPlan>| {
        let mut answer = BisectionAnswer::Undecided(String::new());
        for attempt in 0..MAX_ATTEMPTS {
            asked += 1;
            let plan = plan.map(|plan| TestPlan { max_blocks: blocks << attempt, ..plan });
            answer = compare(&BisectionQuestion { base, head, attempt, plan })?;
            if !matches!(answer, BisectionAnswer::Undecided(_)) {
                break;
            }
        }
        Ok(answer)
    };
    let ends = match ask(0, last, None)? {
        BisectionAnswer::Slower(times) => times,
        BisectionAnswer::NotSlower(times) => return Ok(SearchEnd::NoDifference(times)),
        BisectionAnswer::Undecided(why) => return Ok(SearchEnd::EndsUndecided(why)),
        BisectionAnswer::Unusable(why) => return Ok(SearchEnd::EndUnusable(why)),
    };
    // Each halving takes one comparison, and the confirmation one more; the two ends were compared
    // at the device's own level.
    let questions = usize::BITS - last.leading_zeros() + 1;
    let level = WRONG_ANSWER_PROBABILITY / f64::from(questions);
    let plan = bisection_plan(ends.ratio, level);
    let (mut last_good, mut first_bad) = (0, last);
    let mut left_out: Vec<(usize, String)> = Vec::new();
    let mut answers = 0;
    let mut answer_of_first_bad = None;
    while let Some(middle) = middle_commit(last_good, first_bad, &left_out) {
        let answer = ask(0, middle, Some(plan))?;
        match answer {
            BisectionAnswer::Slower(_) => {
                first_bad = middle;
                answer_of_first_bad = Some(answer);
            }
            BisectionAnswer::NotSlower(_) => last_good = middle,
            BisectionAnswer::Undecided(why) | BisectionAnswer::Unusable(why) => {
                left_out.push((middle, why));
                continue;
            }
        }
        answers += 1;
    }
    let confirmation = match answer_of_first_bad {
        // The first comparison already compared these two commits.
        Some(answer) if last_good == 0 => answer,
        _ => {
            answers += 1;
            ask(last_good, first_bad, Some(plan))?
        }
    };
    Ok(SearchEnd::Found(SlowdownRange {
        last_good,
        first_bad,
        left_out,
        ends,
        confirmation,
        asked,
        confidence: 1.0 - (level * f64::from(answers)).min(1.0),
    }))
}

/// Returns a test plan that distinguishes commits like the good end from commits like the bad end,
/// each wrongly with at most the given probability.
fn bisection_plan(ratio: f64, level: f64) -> TestPlan {
    // The threshold is rounded, so that values read from a file give an equal plan.
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

/// Returns the commit nearest to the middle of a range that was not skipped; `None` if there is no
/// such commit.
fn middle_commit(low: usize, high: usize, left_out: &[(usize, String)]) -> Option<usize> {
    let open = |place: &usize| !left_out.iter().any(|(other, _)| other == place);
    (low + 1..high).filter(open).min_by_key(|place| (2 * place).abs_diff(low + high))
}

#[cfg(test)]
mod tests;
