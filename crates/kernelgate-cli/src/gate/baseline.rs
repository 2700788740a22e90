//! Runs against a baseline: which cases can be compared, and what the comparison of each says.

use std::collections::{BTreeMap, BTreeSet};

use super::costs;
use super::interval::{Ratio, SideTimes, SingleRun, SpreadSource};
use super::numerics::{self, NumericsPolicy, NumericsReport};
use super::rules::Rules;
use super::single_run::CalibratedSpreads;
use super::verification::VerificationLoss;
use super::{Doubt, GateReport, Judged, Policy, Refusal, Verdict};
use kernelgate::record::{
    Baseline, BaselineCase, BaselineRun, CaseNumerics, CaseOfRun, CaseRun, EarlierRuns,
    Environment, LaunchCosts, Measurement, Numerics, ProcessRun, Provenance, Verification,
};

/// Compares a measurement with a baseline. `spreads` are the device's, where it was calibrated;
/// `rules` are the package's, and the report lists those that could not be applied. Errors of other
/// seeds than the runs' are added by [`judge_numerics`].
pub fn compare(
    baseline: &Baseline,
    measurement: &Measurement,
    policy: Policy,
    spreads: &CalibratedSpreads,
    rules: &Rules,
) -> GateReport {
    let (runs, head) = (measurement.runs(), measurement.cases());
    let (mut judged, mut grown_costs, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
    let mut refused: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    let (mut losses, mut unverified) = (Vec::new(), Vec::new());
    for (id, head) in &head {
        let Some(base) = baseline.cases.get(*id) else { continue };
        let differences: Vec<_> =
            head.iter().flat_map(|it| baseline.mismatches(base, it.run, it.case)).collect();
        if differences.is_empty() {
            let set = policy.of_case(id, rules);
            let policy = set.accepting(rules.accepted_slower(id));
            let mut found = judge(baseline, id, head, policy, spreads);
            let threshold = set.threshold(found.same_device, found.base_ns);
            found.verdict = found.verdict.told(found.ratio.center, threshold);
            let verified = head.iter().map(|it| it.case.verification.value());
            let verified = verified.reduce(Verification::least).unwrap_or_default();
            let loss = VerificationLoss::between(id, base.verification, verified)
                .filter(|_| !rules.accepts_less_verified(id));
            if loss.is_some() && found.verdict != Verdict::Regressed {
                found.verdict = Verdict::Inconclusive;
                found.reason = Some(Doubt::LessVerified);
            }
            if loss.is_none() && verified == Verification::Unverified {
                unverified.push((*id).to_owned());
            }
            losses.extend(loss);
            judged.push(found);
            let before: Vec<LaunchCosts> = base.runs.values().map(|run| run.costs).collect();
            let now: Vec<LaunchCosts> = head.iter().map(|it| it.case.into()).collect();
            let (sides, limits) = ([&before[..], &now[..]], rules.limits(id));
            grown_costs.extend(costs::grown(id, sides, &limits));
            let on_host = head.iter().all(|it| it.run.environment.on_host());
            bounds.extend(costs::bounds(id, sides, &limits, on_host));
        }
        for difference in differences {
            let key = (difference.field.to_owned(), difference.base, difference.head);
            refused.entry(key).or_default().insert((*id).to_owned());
        }
    }
    judged.sort_by(|a: &Judged, b| a.verdict.cmp(&b.verdict).then_with(|| a.case.cmp(&b.case)));
    let failed: BTreeMap<String, String> = runs.iter().flat_map(|run| run.failed.clone()).collect();
    let missing = || {
        baseline
            .cases
            .keys()
            .filter(|id| !head.contains_key(id.as_str()) && !failed.contains_key(*id))
    };
    let skips: BTreeMap<&String, &String> = runs.iter().flat_map(|run| &run.skipped).collect();
    GateReport {
        baseline: baseline.name.clone(),
        device: measurement.environment().map(Environment::describe).unwrap_or_default(),
        base_commits: commits(used(baseline, &judged).map(|run| &run.provenance)),
        head_commits: commits(runs.iter().map(|run| &run.provenance)),
        other_device: other_device(baseline, runs, &judged),
        staleness: None,
        policy,
        judged,
        refused: refused
            .into_iter()
            .map(|((field, base, head), cases)| Refusal {
                field,
                base,
                head,
                cases: cases.into_iter().collect(),
            })
            .collect(),
        new: head
            .keys()
            .filter(|id| !baseline.cases.contains_key(**id))
            .map(ToString::to_string)
            .collect(),
        not_run: missing().filter(|id| !skips.contains_key(id)).cloned().collect(),
        skipped: missing().filter_map(|id| Some((id.clone(), (*skips.get(id)?).clone()))).collect(),
        failed,
        interrupted: runs.iter().filter(|run| !run.complete).map(|run| run.bench.clone()).collect(),
        missing_shards: measurement.missing_shards(),
        own: runs.iter().filter(|run| baseline.has(run)).map(ProcessRun::key).collect(),
        numerics: NumericsReport::default(),
        costs: grown_costs,
        verification: losses,
        unverified,
        rules: costs::unjudged(rules, &bounds),
    }
}

/// Compares the errors of judged cases: those of the runs, and of the records that are of the same
/// executables.
pub fn judge_numerics(
    report: GateReport,
    baseline: &Baseline,
    measurement: &Measurement,
    records: &[Numerics],
    (policy, rules): (&NumericsPolicy, &Rules),
) -> GateReport {
    let mut head: BTreeMap<&str, CaseNumerics> = BTreeMap::new();
    for run in measurement.runs() {
        for (id, case) in &run.cases {
            head.entry(id).or_default().insert_verified(run.seed, &case.verification);
        }
        let same = |record: &&Numerics| {
            run.executable.as_ref() == Some(&record.executable)
                && record.environment.mismatches(&run.environment).is_empty()
        };
        for record in records.iter().filter(same) {
            for id in run.cases.keys() {
                let Some(found) = record.of_case(id) else { continue };
                head.entry(id).or_default().insert_all(found);
            }
        }
    }
    let both = report.judged.iter().filter_map(|judged| {
        let base = baseline.cases[&judged.case].numerics.as_ref()?;
        Some((judged.case.as_str(), base, head.get(judged.case.as_str())?))
    });
    let numerics = numerics::compare(both, policy, |case| policy.allowed(case, rules));
    GateReport { numerics, ..report }
}

/// What judging takes of each case of a baseline, whatever is judged: the range of its runs with
/// and without contention and a single run's allowance, and whether its times are too long.
pub fn figures(baseline: &Baseline) -> BTreeMap<&str, Figures> {
    let of = |case: &BaselineCase| {
        let times = |single, contended| SideTimes::of(case.runs.values(), single, contended);
        Figures {
            times: [times(0.0, true), times(0.0, false), times(1.0, true)],
            earlier: case.earlier.as_ref().map(EarlierRuns::spread),
            throttled: case.runs.values().any(|run| run.throttled > 0),
            host_bound: case.runs.values().any(|run| run.host_bound),
        }
    };
    baseline.cases.iter().map(|(id, case)| (id.as_str(), of(case))).collect()
}

/// The same, of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    times: [SideTimes; 3],
    earlier: Option<f64>,
    throttled: bool,
    host_bound: bool,
}

/// The baseline's runs that judged cases rest on.
fn used<'a>(baseline: &'a Baseline, judged: &[Judged]) -> impl Iterator<Item = &'a BaselineRun> {
    let keys: BTreeSet<&String> =
        judged.iter().flat_map(|judged| baseline.cases[&judged.case].runs.keys()).collect();
    keys.into_iter().map(|key| &baseline.runs[key])
}

fn commits<'a>(provenances: impl Iterator<Item = &'a Provenance>) -> Vec<String> {
    provenances.map(Provenance::short).collect::<BTreeSet<_>>().into_iter().collect()
}

fn other_device(
    baseline: &Baseline,
    runs: &[ProcessRun],
    judged: &[Judged],
) -> Option<(String, String)> {
    let used: Vec<&BaselineRun> = used(baseline, judged).collect();
    let mut pairs = runs
        .iter()
        .flat_map(|run| used.iter().map(move |base| (&base.environment, &run.environment)));
    pairs
        .find(|(base, head)| !head.same_device(base))
        .map(|(base, head)| (base.device_id(), head.device_id()))
}

fn judge(
    baseline: &Baseline,
    id: &str,
    head: &[CaseOfRun<'_>],
    policy: Policy,
    spreads: &CalibratedSpreads,
) -> Judged {
    let base = &baseline.cases[id];
    // Contention on the host changes the times of its own cores only.
    let contended = head.iter().all(|it| it.run.environment.on_host());
    let same = |run: &ProcessRun| {
        base.runs.keys().all(|key| run.environment.same_device(&baseline.runs[key].environment))
    };
    let same_device = head.iter().all(|it| same(it.run));
    let mut base_runs = base.runs.keys().map(|key| &baseline.runs[key]);
    let base_single = match (base_runs.next(), base_runs.next()) {
        (Some(only), None) => Some(spreads.of_base(id, base, &only.environment, policy.single_run)),
        _ => None,
    };
    let head_single = match head {
        [only] => Some(spreads.of_head(id, only.run, policy.single_run)),
        _ => None,
    };
    let half_width =
        |single: Option<SingleRun>| single.map_or(policy.single_run, |single| single.relative);
    let head_runs: Vec<CaseRun> = head.iter().map(|it| CaseRun::of(&it.case.samples)).collect();
    let base_side = SideTimes::of(base.runs.values(), half_width(base_single), contended);
    let head_side = SideTimes::of(&head_runs, half_width(head_single), contended);
    let ratio = Ratio::of(&head_side, &base_side);
    let threshold = policy.threshold(same_device, base_side.center_ns);
    let (verdict, reason) = verdict(&ratio, threshold, base_single, policy);
    let base_runs: Vec<&CaseRun> = base.runs.values().collect();
    let head_refs: Vec<&CaseRun> = head_runs.iter().collect();
    let doubt = too_long(verdict, &base_runs, &head_refs)
        .or_else(|| unsettled(&ratio, threshold, base_runs.iter().chain(&head_refs).copied()));
    let (verdict, reason) = match doubt {
        Some(doubt) if verdict != Verdict::Inconclusive => (Verdict::Inconclusive, Some(doubt)),
        _ => (verdict, reason),
    };
    Judged {
        case: id.to_owned(),
        verdict,
        reason,
        same_device,
        threshold,
        base_ns: base_side.center_ns,
        head_ns: head_side.center_ns,
        ratio,
        detectable: (1.0 + threshold) * ratio.center / ratio.low - 1.0,
        base_spread: base_side.spread,
        head_spread: head_side.spread,
        base_runs: base_side.runs,
        head_runs: head_side.runs,
        base_single,
        head_single,
        base_contention: base_side.contention,
        head_contention: head_side.contention,
    }
}

/// Doubts a verdict on a case whose power state did not settle, if the range of its times is wider
/// than the threshold and covers the change.
fn unsettled<'a>(
    ratio: &Ratio,
    threshold: f64,
    runs: impl Iterator<Item = &'a CaseRun>,
) -> Option<Doubt> {
    let widths = runs.filter_map(|run| run.power?.range).map(|[low, high]| high / low - 1.0);
    let width = widths.fold(0.0, f64::max);
    let covered = (1.0 / (1.0 + width)..=1.0 + width).contains(&ratio.center);
    (width > threshold && covered).then_some(Doubt::Unsettled)
}

/// A clock of one side below this share of the other's, as where it was set or the power limit
/// lowered, is no doing of the code.
const LOW_CLOCK: f64 = 0.9;

/// Why a verdict does not stand on times that are longer than the code's: a slow-down on those of
/// the head, and no slow-down on those of the baseline.
fn too_long(verdict: Verdict, base: &[&CaseRun], head: &[&CaseRun]) -> Option<Doubt> {
    let (suspect, other) = match verdict {
        Verdict::Regressed => (head, base),
        Verdict::Improved | Verdict::Unchanged | Verdict::Accepted => (base, head),
        Verdict::Inconclusive => return None,
    };
    let host_bound = |side: &[&CaseRun]| side.iter().any(|run| run.host_bound);
    if suspect.iter().any(|run| run.throttled > 0) {
        return Some(Doubt::Throttled);
    }
    let clock_mhz = |side: &[&CaseRun]| {
        let told: Vec<f64> = side.iter().filter_map(|run| run.median_clock_mhz).collect();
        (!told.is_empty()).then(|| kernelgate::stats::median(&told))
    };
    // At the power cap a lower clock is the kernel's own doing: it draws more power.
    let at_cap = |side: &[&CaseRun]| side.iter().any(|run| run.power.is_some_and(|it| it.at_cap));
    if at_cap(suspect) {
        return (host_bound(suspect) && !host_bound(other)).then_some(Doubt::HostBound);
    }
    if clock_mhz(suspect).zip(clock_mhz(other)).is_some_and(|(low, high)| low < LOW_CLOCK * high) {
        return Some(Doubt::Clock);
    }
    (host_bound(suspect) && !host_bound(other)).then_some(Doubt::HostBound)
}

fn verdict(
    ratio: &Ratio,
    threshold: f64,
    base_single: Option<SingleRun>,
    policy: Policy,
) -> (Verdict, Option<Doubt>) {
    let beyond = if ratio.low > 1.0 + threshold {
        Some(Verdict::Regressed)
    } else if ratio.high < 1.0 - threshold {
        Some(Verdict::Improved)
    } else {
        None
    };
    // An estimate that matters and is not shown to be real is not shown to be noise either: smaller
    // than what could have been detected, it says nothing about the code.
    let matters = !(1.0 - threshold..=1.0 + threshold).contains(&ratio.center);
    match beyond {
        Some(verdict) => (verdict, None),
        None if matters && base_single.is_some_and(|it| it.from == SpreadSource::Assumed) => {
            (Verdict::Inconclusive, Some(Doubt::SingleRun))
        }
        None if ratio.high - ratio.low > policy.widest => {
            (Verdict::Inconclusive, Some(Doubt::Wide))
        }
        None if matters => (Verdict::Inconclusive, Some(Doubt::Undetectable)),
        None => (Verdict::Unchanged, None),
    }
}
