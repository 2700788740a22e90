//! Is a run slower than the baseline? Verdicts with their interval and what could have been detected; refusal where the question
//! makes no sense.
//!
//! The unit of a decision is a process run: one median a run and case. Deliberately absent: measuring, printing.

pub mod interval;
pub mod resources;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::exit::Exit;
use crate::record::environment::Mismatch;
use crate::record::{Baseline, BaselineCase, CaseRecord, Run};
use interval::{Ratio, Side};

/// What counts as slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Policy {
    /// Smallest change of the time, relative to the baseline, that matters.
    pub relative: f64,
    /// Smallest change of the time that matters, nanoseconds.
    pub absolute_ns: f64,
    /// Relative half-width assumed for a side with a single process run, whose spread between runs nobody saw.
    pub single_run: f64,
    /// Widest relative interval from which "unchanged" may still be said.
    pub widest: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self { relative: 0.05, absolute_ns: 100.0, single_run: 0.10, widest: 0.60 }
    }
}

/// What the measurements say about a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Slower by more than the threshold, whole interval.
    Regressed,
    /// The interval is too wide to say anything.
    Inconclusive,
    /// Faster by more than the threshold, whole interval.
    Improved,
    /// No change that matters was seen.
    Unchanged,
}

impl Verdict {
    /// The word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Regressed => "regressed",
            Self::Inconclusive => "inconclusive",
            Self::Improved => "improved",
            Self::Unchanged => "unchanged",
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
    /// Median over the baseline's runs of their medians, nanoseconds a launch.
    pub base_ns: f64,
    /// The same of the runs.
    pub head_ns: f64,
    /// Head over base with its interval.
    pub ratio: Ratio,
    /// Smallest slow-down that this comparison would have called regressed, relative.
    pub detectable: f64,
    /// Process runs of the baseline.
    pub base_runs: usize,
    /// Process runs judged.
    pub head_runs: usize,
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

/// The outcome of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Name of the baseline.
    pub baseline: String,
    /// The device.
    pub device: String,
    /// What counted as slower.
    pub policy: Policy,
    /// Verdicts, worst first, then by id.
    pub judged: Vec<Judged>,
    /// Differences that forbid a comparison.
    pub refused: Vec<Refusal>,
    /// Cases of the runs that the baseline lacks.
    pub new: Vec<String>,
    /// Cases of the baseline that the runs lack.
    pub not_run: Vec<String>,
    /// Cases that failed in the runs, with the error.
    pub failed: BTreeMap<String, String>,
    /// Bench processes that did not get to their end.
    pub interrupted: Vec<String>,
}

impl Report {
    /// The exit code: refusal before regression before doubt.
    pub fn exit(&self) -> Exit {
        let any = |verdict| self.judged.iter().any(|judged| judged.verdict == verdict);
        if !self.refused.is_empty() {
            Exit::Refused
        } else if any(Verdict::Regressed) || !self.failed.is_empty() {
            Exit::Regression
        } else if any(Verdict::Inconclusive) || !self.interrupted.is_empty() || self.judged.is_empty() {
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

/// Holds runs against a baseline. `runs` is not empty; several runs of one bench binary are several process runs of its cases.
pub fn compare(baseline: &Baseline, runs: &[Run], policy: Policy) -> Report {
    let mut head: BTreeMap<&str, Vec<(&Run, &CaseRecord)>> = BTreeMap::new();
    for run in runs {
        for (id, case) in &run.cases {
            head.entry(id).or_default().push((run, case));
        }
    }
    let mut judged = Vec::new();
    let mut refused: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    for (id, head) in &head {
        let Some(base) = baseline.cases.get(*id) else { continue };
        let differences = differences(baseline, base, head);
        if differences.is_empty() {
            judged.push(judge(id, base, head, policy));
        }
        for difference in differences {
            let key = (difference.field.to_owned(), difference.base, difference.head);
            refused.entry(key).or_default().insert((*id).to_owned());
        }
    }
    judged.sort_by(|a: &Judged, b| a.verdict.cmp(&b.verdict).then_with(|| a.case.cmp(&b.case)));
    let measured = |id: &String| head.contains_key(id.as_str());
    Report {
        baseline: baseline.name.clone(),
        device: runs.first().map(|run| run.environment.device_name.clone()).unwrap_or_default(),
        policy,
        judged,
        refused: refused
            .into_iter()
            .map(|((field, base, head), cases)| Refusal { field, base, head, cases: cases.into_iter().collect() })
            .collect(),
        new: head.keys().filter(|id| !baseline.cases.contains_key(**id)).map(ToString::to_string).collect(),
        not_run: baseline.cases.keys().filter(|id| !measured(id)).cloned().collect(),
        failed: runs.iter().flat_map(|run| run.failed.clone()).collect(),
        interrupted: runs.iter().filter(|run| !run.complete).map(|run| run.bench.clone()).collect(),
    }
}

/// Everything that makes the case of the runs another one than the baseline's.
fn differences(baseline: &Baseline, base: &BaselineCase, head: &[(&Run, &CaseRecord)]) -> Vec<Mismatch> {
    let mut found: Vec<Mismatch> = Vec::new();
    for (run, case) in head {
        for key in base.samples.keys() {
            found.extend(run.environment.mismatches(&baseline.runs[key].environment));
        }
        let definition = [
            ("revision", base.revision.to_string(), case.revision.to_string()),
            ("work", format!("{:?}", base.work), format!("{:?}", case.work)),
        ];
        let changed = definition.into_iter().filter(|(_, base, head)| base != head);
        found.extend(changed.map(|(field, base, head)| Mismatch { field, base, head }));
    }
    found
}

fn judge(id: &str, base: &BaselineCase, head: &[(&Run, &CaseRecord)], policy: Policy) -> Judged {
    let base_side = Side::of(base.samples.values(), policy.single_run);
    let head_side = Side::of(head.iter().map(|(_, case)| &case.samples), policy.single_run);
    let ratio = Ratio::of(&head_side, &base_side);
    let matters = |ratio: f64| {
        let change = (ratio - 1.0).abs();
        change > policy.relative && change * base_side.center_ns > policy.absolute_ns
    };
    let verdict = if ratio.low > 1.0 && matters(ratio.low) {
        Verdict::Regressed
    } else if ratio.high < 1.0 && matters(ratio.high) {
        Verdict::Improved
    } else if ratio.high - ratio.low > policy.widest {
        Verdict::Inconclusive
    } else {
        Verdict::Unchanged
    };
    let smallest = policy.relative.max(policy.absolute_ns / base_side.center_ns);
    Judged {
        case: id.to_owned(),
        verdict,
        base_ns: base_side.center_ns,
        head_ns: head_side.center_ns,
        ratio,
        detectable: (1.0 + smallest) * ratio.center / ratio.low - 1.0,
        base_runs: base_side.runs,
        head_runs: head_side.runs,
    }
}

#[cfg(test)]
mod tests;
