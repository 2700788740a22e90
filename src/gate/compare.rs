//! Runs against a baseline: which cases can be compared, and what the comparison of each says.

use std::collections::{BTreeMap, BTreeSet};

use super::interval::{Ratio, Side};
use super::{Judged, Policy, Refusal, Report, Verdict};
use crate::record::{Baseline, BaselineCase, CaseRecord, Run};

/// A case as several process runs measured it.
type Measured<'a> = [(&'a Run, &'a CaseRecord)];

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
        let differences: Vec<_> = head.iter().flat_map(|(run, case)| baseline.mismatches(base, run, case)).collect();
        if differences.is_empty() {
            judged.push(judge(id, base, head, policy));
        }
        for difference in differences {
            let key = (difference.field.to_owned(), difference.base, difference.head);
            refused.entry(key).or_default().insert((*id).to_owned());
        }
    }
    judged.sort_by(|a: &Judged, b| a.verdict.cmp(&b.verdict).then_with(|| a.case.cmp(&b.case)));
    let failed: BTreeMap<String, String> = runs.iter().flat_map(|run| run.failed.clone()).collect();
    let missing = || baseline.cases.keys().filter(|id| !head.contains_key(id.as_str()) && !failed.contains_key(*id));
    let skips: BTreeMap<&String, &String> = runs.iter().flat_map(|run| &run.skipped).collect();
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
        not_run: missing().filter(|id| !skips.contains_key(id)).cloned().collect(),
        skipped: missing().filter_map(|id| Some((id.clone(), (*skips.get(id)?).clone()))).collect(),
        failed,
        interrupted: runs.iter().filter(|run| !run.complete).map(|run| run.bench.clone()).collect(),
        own: runs.iter().map(Run::key).filter(|key| baseline.runs.contains_key(key)).collect(),
    }
}

fn judge(id: &str, base: &BaselineCase, head: &Measured<'_>, policy: Policy) -> Judged {
    // What others do on the host changes the times of its own cores only.
    let contended = head.iter().all(|(run, _)| run.environment.on_host());
    let base_side = Side::of(base.samples.values(), policy.single_run, contended);
    let head_side = Side::of(head.iter().map(|(_, case)| &case.samples), policy.single_run, contended);
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
        base_contention: base_side.contention,
        head_contention: head_side.contention,
    }
}
