//! The bisection algorithm: it decides which commits are compared, with which threshold, and which
//! commit is reported as the cause.
//!
//! The bisection first compares the good commit with the bad commit; their time ratio is the
//! slow-down to find. A commit counts as slow if it is slower than the good commit by more than
//! half of the searched slow-down, on a logarithmic scale. Each comparison of the bisection is
//! wrong with at most the probability in its plan, so any answer is wrong with at most
//! [`MAX_WRONG_BISECTION_PROBABILITY`]. The bisection repeats an undecided comparison with twice as
//! many blocks; a commit whose comparison stays undecided is skipped. At the end, the bisection
//! compares the first bad commit with the last good commit, so that the reported difference was
//! measured between these two.

use serde::{Deserialize, Serialize};

use crate::gate::paired::ComparisonTestPlan;
use kernelgate::measure::plausibility;

/// Highest probability that at least one answer of a whole bisection is wrong.
pub const MAX_WRONG_BISECTION_PROBABILITY: f64 = 0.05;
/// Largest number of comparisons of one pair of commits before the bisection skips the commit as
/// undecided.
pub const MAX_COMPARISONS_OF_A_PAIR: u32 = 3;

/// A question of the bisection: is the case slower at the head commit than at the base commit?
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BisectionQuestion {
    /// Position of the base commit in the bisected list of commits; 0 is the good end.
    pub base_position: usize,
    /// Position of the head commit in the bisected list of commits; 0 is the good end.
    pub head_position: usize,
    /// Number of earlier comparisons of this pair of commits; each repetition takes twice as many
    /// blocks as the one before.
    pub earlier_attempts: u32,
    /// Test plan of the comparison, with its thresholds; `None` uses the device's thresholds, as
    /// for the comparison of the good with the bad end.
    pub plan: Option<ComparisonTestPlan>,
}

/// Time of a case at one commit relative to its time at another commit, with a confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HeadToBaseTimeRatio {
    /// Time of the case at the head commit over its time at the base commit.
    #[serde(rename = "ratio")]
    pub time_ratio: f64,
    /// Lower end of the confidence interval of the head-to-base time ratio.
    #[serde(rename = "low")]
    pub time_ratio_low: f64,
    /// Upper end of the confidence interval of the head-to-base time ratio.
    #[serde(rename = "high")]
    pub time_ratio_high: f64,
}

impl HeadToBaseTimeRatio {
    /// Checks that a ratio read from a file is plausible: finite, of credible size, and with an
    /// ordered confidence interval.
    pub fn check_time_ratio_plausibility(&self) -> Result<(), String> {
        plausibility::check_time_ratio_plausible("a ratio", self.time_ratio)?;
        match self.time_ratio_low <= self.time_ratio_high
            && [self.time_ratio_low, self.time_ratio_high].iter().all(|end| end.abs() < 1e15)
        {
            true => Ok(()),
            false => {
                Err(format!("an interval from {} to {}", self.time_ratio_low, self.time_ratio_high))
            }
        }
    }
}

/// The answer of a comparison of two commits: the case is slower, not slower or undecided at the
/// head, or the head cannot be measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BisectionAnswer {
    /// The case is slower at the head than at the base by more than the threshold.
    Slower(HeadToBaseTimeRatio),
    /// The case is not slower at the head than at the base by more than the threshold.
    NotSlower(HeadToBaseTimeRatio),
    /// The comparison of the two commits was inconclusive, because the noise is too large for the
    /// number of blocks; the text states the reason.
    #[serde(rename = "undecided")]
    UndecidedWithReason(String),
    /// The case cannot be measured at the head commit; the text states the reason, for example that
    /// the commit does not build.
    #[serde(rename = "unusable")]
    UnmeasurableWithReason(String),
}

/// The ways in which a bisection can end: commits found, no slow-down between the ends, or the ends
/// undecided or not measurable.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BisectionEnd {
    /// The bisection found the commits of which one slowed the case down.
    #[serde(rename = "found")]
    SlowdownFound(CommitRangeWithSlowdown),
    /// The case's time at the bad end does not exceed its time at the good end by more than the
    /// threshold.
    #[serde(rename = "no_difference")]
    BadEndNotSlower(HeadToBaseTimeRatio),
    /// The comparison of the good with the bad end was inconclusive; the text states the reason.
    #[serde(rename = "ends_undecided")]
    GoodAndBadEndUndecided(String),
    /// The bad end of the bisection cannot be measured; the text states the reason.
    #[serde(rename = "end_unusable")]
    BadEndUnmeasurable(String),
}

/// The range of commits in which the bisection located the slow-down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CommitRangeWithSlowdown {
    /// Position, in the bisected list of commits, of the last commit at which the case is not slow.
    #[serde(rename = "last_good")]
    pub last_good_position: usize,
    /// Position, in the bisected list of commits, of the first commit at which the case is slow. If
    /// the first bad commit does not directly follow the last good one, any commit between them or
    /// the first bad one may have caused the slow-down.
    #[serde(rename = "first_bad")]
    pub first_bad_position: usize,
    /// Positions of the commits that could not be compared, with the reasons, in the order of the
    /// comparisons.
    #[serde(rename = "left_out")]
    pub skipped_positions: Vec<(usize, String)>,
    /// Time of the case at the bad end of the bisection relative to its time at the good end.
    #[serde(rename = "ends")]
    pub bad_to_good_time_ratio: HeadToBaseTimeRatio,
    /// Answer of the comparison of the last good commit (base) with the first bad commit (head).
    pub confirmation: BisectionAnswer,
    /// Number of comparisons that the bisection made, including repeated ones.
    #[serde(rename = "asked")]
    pub comparisons_made: usize,
    /// Confidence of the bisection: 1 minus the bound on the probability that any of its answers
    /// was wrong.
    #[serde(rename = "confidence")]
    pub bisection_confidence: f64,
}

impl CommitRangeWithSlowdown {
    /// Returns whether the direct comparison of the last good with the first bad commit found the
    /// first bad commit slower.
    pub const fn is_slowdown_confirmed(&self) -> bool {
        matches!(self.confirmation, BisectionAnswer::Slower(_))
    }
}

/// Bisects the commits between position 0, which is good, and position `last`, which is bad and at
/// least 1; the closure `compare` compares two commits and returns the answer.
pub fn bisect_commit_range<E>(
    last: usize,
    blocks: usize,
    mut compare: impl FnMut(&BisectionQuestion) -> Result<BisectionAnswer, E>,
) -> Result<BisectionEnd, E> {
    let mut asked = 0;
    let mut ask = |base: usize, head: usize, plan: Option<ComparisonTestPlan>| {
        let mut answer = BisectionAnswer::UndecidedWithReason(String::new());
        for attempt in 0..MAX_COMPARISONS_OF_A_PAIR {
            asked += 1;
            let plan =
                plan.map(|plan| ComparisonTestPlan { max_trial_blocks: blocks << attempt, ..plan });
            answer = compare(&BisectionQuestion {
                base_position: base,
                head_position: head,
                earlier_attempts: attempt,
                plan,
            })?;
            if !matches!(answer, BisectionAnswer::UndecidedWithReason(_)) {
                break;
            }
        }
        Ok(answer)
    };
    let ends = match ask(0, last, None)? {
        BisectionAnswer::Slower(times) => times,
        BisectionAnswer::NotSlower(times) => return Ok(BisectionEnd::BadEndNotSlower(times)),
        BisectionAnswer::UndecidedWithReason(why) => {
            return Ok(BisectionEnd::GoodAndBadEndUndecided(why));
        }
        BisectionAnswer::UnmeasurableWithReason(why) => {
            return Ok(BisectionEnd::BadEndUnmeasurable(why));
        }
    };
    // The error probability is divided by the number of comparisons: one for each halving and one
    // confirmation; the comparison of the ends uses the device's own error probability.
    let questions = usize::BITS - last.leading_zeros() + 1;
    let level = MAX_WRONG_BISECTION_PROBABILITY / f64::from(questions);
    let plan = test_plan_for_bisection(ends.time_ratio, level);
    let (mut last_good, mut first_bad) = (0, last);
    let mut left_out: Vec<(usize, String)> = Vec::new();
    let mut answers = 0;
    let mut answer_of_first_bad = None;
    while let Some(middle) = middle_commit_not_skipped(last_good, first_bad, &left_out) {
        let answer = ask(0, middle, Some(plan))?;
        match answer {
            BisectionAnswer::Slower(_) => {
                first_bad = middle;
                answer_of_first_bad = Some(answer);
            }
            BisectionAnswer::NotSlower(_) => last_good = middle,
            BisectionAnswer::UndecidedWithReason(why)
            | BisectionAnswer::UnmeasurableWithReason(why) => {
                left_out.push((middle, why));
                continue;
            }
        }
        answers += 1;
    }
    let confirmation = match answer_of_first_bad {
        // If the last good commit is the good end, the comparison that found the first bad commit
        // already compared these two commits.
        Some(answer) if last_good == 0 => answer,
        _ => {
            answers += 1;
            ask(last_good, first_bad, Some(plan))?
        }
    };
    Ok(BisectionEnd::SlowdownFound(CommitRangeWithSlowdown {
        last_good_position: last_good,
        first_bad_position: first_bad,
        skipped_positions: left_out,
        bad_to_good_time_ratio: ends,
        confirmation,
        comparisons_made: asked,
        bisection_confidence: 1.0 - (level * f64::from(answers)).min(1.0),
    }))
}

/// Returns a test plan whose threshold lies between the good and the bad end, and which
/// misclassifies a commit like either end with at most the given probability.
fn test_plan_for_bisection(ratio: f64, level: f64) -> ComparisonTestPlan {
    // The threshold is rounded, so that the plan stays equal if an interrupted bisection reads the
    // measured ratio from its state file.
    let relative = ((ratio.sqrt() - 1.0) * 1e5).round() / 1e5;
    ComparisonTestPlan {
        relative_time_change_threshold: relative,
        absolute_time_change_threshold_ns: 0.0,
        max_unchanged_relative_change: relative,
        max_false_alarm_probability: level,
        max_missed_change_probability: level,
        ..ComparisonTestPlan::default()
    }
}

/// Returns the position nearest to the middle between two commits that was not skipped; `None` if
/// no position between them is left.
fn middle_commit_not_skipped(
    low: usize,
    high: usize,
    left_out: &[(usize, String)],
) -> Option<usize> {
    let open = |place: &usize| !left_out.iter().any(|(other, _)| other == place);
    (low + 1..high).filter(open).min_by_key(|place| (2 * place).abs_diff(low + high))
}

#[cfg(test)]
mod tests;
