//! Judges runs against a baseline: which cases can be compared, and the judgement of each.

use std::collections::{BTreeMap, BTreeSet};

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::costs;
use super::inconclusive_reason::{DecidingSide, InconclusiveReason};
use super::judgement::{Judgement, JudgementEvidence, RunEvidence, SideRunCounts};
use super::limits::CaseLimits;
use super::outputs::numerics::{self, NumericsReport};
use super::outputs::verification::VerificationLoss;
use super::paired::Arm;
use super::ratio_interval::{SideTimeInterval, SingleRunSpread, SpreadSource, TimeRatio};
use super::rules::PackageRules;
use super::same_card_runs::ComparedCaseRuns;
use super::single_run::CalibratedSpreads;
use super::verdict::Verdict;
use super::verdicts::{ExitFacts, RefusedBench, RefusedFields, Verdicts};
use kernelgate::record::{
    Baseline, BaselineCase, BaselineRun, CaseInRun, CaseNumerics, CaseRun, EarlierRuns,
    Environment, LaunchCosts, Measurement, Numerics, ProcessRun, Provenance, VerificationExtent,
};
use kernelgate_cuda::CaseFailure;

/// The outcome of `gate`.
pub type GateReport = Verdicts<BaselineFacts>;

/// Settings of the judgement: the limits, and how much runs may differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatePolicy {
    /// Smallest slow-downs that count as regressions.
    pub limits: CaseLimits,
    /// Relative time difference that two devices of one model may have: added if a case's baseline
    /// is not known to be of the same device.
    pub other_device: f64,
    /// Relative half-width assumed for a side with a single process run, where neither a
    /// calibration nor earlier runs show its process-to-process variance.
    pub single_run: f64,
    /// Widest relative confidence interval with which a case counts as unchanged.
    pub widest: f64,
    /// Share of the host's CPU time used by other processes above which the report warns.
    pub contention: f64,
}

impl Default for GatePolicy {
    fn default() -> Self {
        Self {
            limits: CaseLimits::default_limit(0.05),
            other_device: 0.22,
            single_run: 0.10,
            widest: 0.60,
            contention: 0.10,
        }
    }
}

impl GatePolicy {
    /// Returns the largest relative time difference between the devices of both sides.
    pub const fn device_difference(&self, same: bool) -> f64 {
        if same { 0.0 } else { self.other_device }
    }

    /// Relative part of the threshold of a case without limits of its own.
    pub fn relative_for_device(&self, same_device: bool) -> f64 {
        self.limits.threshold(f64::INFINITY, self.device_difference(same_device)).value
    }
}

impl Serialize for GatePolicy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("relative", &self.limits.relative.value)?;
        map.serialize_entry("absolute_ns", &self.limits.absolute_ns.value)?;
        map.serialize_entry("other_device", &self.other_device)?;
        map.serialize_entry("single_run", &self.single_run)?;
        map.serialize_entry("widest", &self.widest)?;
        map.serialize_entry("contention", &self.contention)?;
        map.end()
    }
}

/// Baseline, policy and runs of a comparison with a baseline.
#[derive(Debug, Clone, PartialEq)]
pub struct BaselineFacts {
    /// Name of the baseline.
    pub baseline: String,
    /// Code of the judged runs of the baseline, one entry a commit.
    pub base_commits: Vec<String>,
    /// Code that was judged.
    pub head_commits: Vec<String>,
    /// Devices of the baseline and of the run, if they may be two devices.
    pub other_device: Option<(String, String)>,
    /// Whether the baseline's file lacks a checksum, so that editing it goes unnoticed.
    pub unsealed: bool,
    /// Age of the baseline; absent where it was not computed.
    pub staleness: Option<BaselineStaleness>,
    /// Settings with which the runs were judged.
    pub policy: GatePolicy,
    /// Cases of the baseline that the runs lack: removed, or not requested.
    pub not_run: Vec<String>,
    /// Bench processes that ended before their last case.
    pub interrupted: Vec<String>,
    pub missing_shards: Vec<String>,
    /// Process runs that are both in the baseline and in the judged run: they were compared with
    /// themselves.
    pub own: Vec<String>,
}

impl ExitFacts for BaselineFacts {
    fn is_incomplete(GateReport { facts, .. }: &GateReport) -> bool {
        !facts.interrupted.is_empty() || !facts.missing_shards.is_empty()
    }
}

/// Age of the oldest run that the judged cases of a baseline use.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct BaselineStaleness {
    /// Start time of the baseline's run, RFC 3339, UTC.
    pub recorded: String,
    /// Commit of the code that the baseline's run measured.
    pub commit: String,
    /// Whole days since the baseline was recorded; absent if `recorded` is not a valid time.
    pub days: Option<i64>,
    /// Number of commits since the baseline's commit; absent if git does not know it.
    pub commits: Option<u64>,
}

/// Judges a measurement by comparing it with a baseline. `spreads` are the calibrated differences
/// between processes of this device; `rules` are the package's rules, and the report lists rules
/// that could not be applied. [`judge_numerics`] later adds the errors that `verify` measured with
/// further seeds.
///
/// Long because one pass over the cases fills every list of the report.
#[expect(clippy::too_many_lines)]
pub fn judge_against_baseline(
    baseline: &Baseline,
    measurement: &Measurement,
    policy: GatePolicy,
    spreads: &CalibratedSpreads,
    rules: &PackageRules,
) -> GateReport {
    let (runs, head) = (measurement.process_runs(), measurement.runs_by_case());
    let (mut judged, mut grown_costs, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
    let mut refused = RefusedFields::new();
    let (mut losses, mut unverified) = (Vec::new(), Vec::new());
    for (id, head) in &head {
        let Some(base) = baseline.cases.get(*id) else { continue };
        let differences: Vec<_> =
            head.iter().flat_map(|it| baseline.case_mismatches(base, it.run, it.case)).collect();
        if differences.is_empty() {
            let limits = rules.resolve(id, &policy.limits);
            let found = judge_case(baseline, id, head, &GatePolicy { limits, ..policy }, spreads);
            let verified = head.iter().map(|it| it.case.verification.value());
            let verified =
                verified.reduce(VerificationExtent::weaker_verification).unwrap_or_default();
            let loss = VerificationLoss::from_extents(id, base.verification, verified)
                .filter(|_| !rules.accepts_less_verified(id));
            if loss.is_none() && verified == VerificationExtent::Unverified {
                unverified.push((*id).to_owned());
            }
            judged.push(match loss.clone() {
                Some(loss) => found.less_verified(loss),
                None => found,
            });
            losses.extend(loss);
            let before: Vec<LaunchCosts> = base.runs.values().map(|run| run.costs).collect();
            let now: Vec<LaunchCosts> =
                head.iter().map(|it| it.case.samples.costs_with_energy()).collect();
            let (sides, set) = ([&before[..], &now[..]], rules.limits(id));
            grown_costs.extend(costs::grown_costs(id, sides, &set));
            let on_host = head.iter().all(|it| it.run.environment.is_on_host());
            bounds.extend(costs::cost_bounds(id, sides, &set, on_host));
        }
        for difference in differences {
            let key = (difference.field.to_owned(), difference.base, difference.head);
            refused.entry(key).or_default().insert((*id).to_owned());
        }
    }
    let failed: BTreeMap<String, CaseFailure> =
        runs.iter().flat_map(|run| run.failed.clone()).collect();
    let missing = || {
        baseline
            .cases
            .keys()
            .filter(|id| !head.contains_key(id.as_str()) && !failed.contains_key(*id))
    };
    let skips: BTreeMap<&String, &String> = runs.iter().flat_map(|run| &run.skipped).collect();
    let facts = BaselineFacts {
        baseline: baseline.name.clone(),
        base_commits: distinct_commits(runs_in_use(baseline, &judged).map(|run| &run.provenance)),
        head_commits: distinct_commits(runs.iter().map(|run| &run.provenance)),
        other_device: other_device_warning(baseline, runs, &judged),
        unsealed: false,
        staleness: None,
        policy,
        not_run: missing().filter(|id| !skips.contains_key(id)).cloned().collect(),
        interrupted: runs.iter().filter(|run| !run.complete).map(|run| run.bench.clone()).collect(),
        missing_shards: measurement.missing_shards(),
        own: runs.iter().filter(|run| baseline.has(run)).map(ProcessRun::baseline_key).collect(),
    };
    let skipped = missing().filter_map(|id| Some((id.clone(), (*skips.get(id)?).clone())));
    let mut report = GateReport {
        device: measurement.environment().map(Environment::device_description).unwrap_or_default(),
        limits: policy.limits,
        judged,
        refused: RefusedBench::from_fields(refused),
        new: head
            .keys()
            .filter(|id| !baseline.cases.contains_key(**id))
            .map(ToString::to_string)
            .collect(),
        skipped: skipped.collect(),
        failed,
        unverified,
        verification: losses,
        numerics: NumericsReport::default(),
        costs: grown_costs,
        rules: costs::unjudged_cost_bounds(rules, &bounds),
        facts,
    };
    report.sort();
    report
}

/// Compares the output errors of judged cases with those of the baseline, from runs and from error
/// records of the same executables.
pub fn judge_numerics(
    report: GateReport,
    baseline: &Baseline,
    measurement: &Measurement,
    records: &[Numerics],
    rules: &PackageRules,
) -> GateReport {
    let mut head: BTreeMap<&str, CaseNumerics> = BTreeMap::new();
    for run in measurement.process_runs() {
        for (id, case) in &run.cases {
            head.entry(id).or_default().insert_verified_case(run.seed, &case.verification);
        }
        let same = |record: &&Numerics| {
            run.executable.as_ref() == Some(&record.executable)
                && record.environment.mismatches(&run.environment).is_empty()
        };
        for record in records.iter().filter(same) {
            for id in run.cases.keys() {
                let Some(found) = record.errors_of_case(id) else { continue };
                head.entry(id).or_default().insert_all_seeds(found);
            }
        }
    }
    let both = report.judged.iter().filter_map(|judged| {
        let base = baseline.cases[&judged.case].numerics.as_ref()?;
        Some((judged.case.as_str(), base, head.get(judged.case.as_str())?))
    });
    let growth = |case: &str| rules.resolve(case, &report.limits).growth.value;
    let numerics = numerics::compare_numerics(both, growth);
    GateReport { numerics, ..report }
}

/// Figures of each case of a baseline, which do not depend on the measurement that is judged: the
/// range of its runs with and without contention and a single run's allowance, and whether its
/// times are too long.
pub fn figures(baseline: &Baseline) -> BTreeMap<&str, BaselineCaseFigures> {
    let figures = |case: &BaselineCase| {
        let times = |single, contended| {
            SideTimeInterval::ratio_from_runs(case.runs.values(), single, contended)
        };
        BaselineCaseFigures {
            times: [times(0.0, true), times(0.0, false), times(1.0, true)],
            earlier: case.earlier.as_ref().map(EarlierRuns::spread),
            throttled: case.runs.values().any(|run| run.conditions.throttled > 0),
            shared_gpu: case.runs.values().any(|run| run.conditions.shared_gpu()),
            host_bound: case.runs.values().any(|run| run.conditions.host_bound),
        }
    };
    baseline.cases.iter().map(|(id, case)| (id.as_str(), figures(case))).collect()
}

#[derive(Debug, Clone, PartialEq)]
pub struct BaselineCaseFigures {
    times: [SideTimeInterval; 3],
    earlier: Option<f64>,
    throttled: bool,
    shared_gpu: bool,
    host_bound: bool,
}

/// Returns the runs of the baseline that judged cases use.
fn runs_in_use<'a>(
    baseline: &'a Baseline,
    judged: impl IntoIterator<Item = &'a Judgement>,
) -> impl Iterator<Item = &'a BaselineRun> {
    let judged = judged.into_iter();
    let keys: BTreeSet<&String> =
        judged.flat_map(|judged| baseline.cases[&judged.case].runs.keys()).collect();
    keys.into_iter().map(|key| &baseline.runs[key])
}

fn distinct_commits<'a>(provenances: impl Iterator<Item = &'a Provenance>) -> Vec<String> {
    provenances.map(Provenance::short_commit).collect::<BTreeSet<_>>().into_iter().collect()
}

fn other_device_warning(
    baseline: &Baseline,
    runs: &[ProcessRun],
    judged: &[Judgement],
) -> Option<(String, String)> {
    let on_other_cards =
        judged.iter().filter(|judged| judged.runs().is_some_and(|runs| !runs.same_device));
    let used: Vec<&BaselineRun> = runs_in_use(baseline, on_other_cards).collect();
    let mut pairs = runs
        .iter()
        .flat_map(|run| used.iter().map(move |base| (&base.environment, &run.environment)));
    pairs
        .find(|(base, head)| !head.is_same_device(base))
        .map(|(base, head)| (base.device_identifier(), head.device_identifier()))
}

fn judge_case(
    baseline: &Baseline,
    id: &str,
    head: &[CaseInRun<'_>],
    policy: &GatePolicy,
    spreads: &CalibratedSpreads,
) -> Judgement {
    let base = &baseline.cases[id];
    // On the host, contention changes only the times of the cores that the case uses.
    let contended = head.iter().all(|it| it.run.environment.is_on_host());
    let ComparedCaseRuns { base: base_runs, head, same_device, card } =
        ComparedCaseRuns::choose(baseline, base, head);
    let base_single = match base_runs[..] {
        [(environment, _)] => {
            Some(spreads.spread_of_baseline_case(id, base, environment, policy.single_run))
        }
        _ => None,
    };
    let base_runs: Vec<&CaseRun> = base_runs.into_iter().map(|(_, run)| run).collect();
    let head_single = match &head[..] {
        [only] => Some(spreads.spread_of_head_case(id, only.run, policy.single_run)),
        _ => None,
    };
    let half_width = |single: Option<SingleRunSpread>| {
        single.map_or(policy.single_run, |single| single.relative)
    };
    let head_runs: Vec<CaseRun> =
        head.iter().map(|it| CaseRun::from_samples(&it.case.samples)).collect();
    let base_side = SideTimeInterval::ratio_from_runs(
        base_runs.iter().copied(),
        half_width(base_single),
        contended,
    );
    let head_side =
        SideTimeInterval::ratio_from_runs(&head_runs, half_width(head_single), contended);
    let ratio = TimeRatio::from_side_times(&head_side, &base_side);
    let (base_ns, device) = (base_side.center_ns, policy.device_difference(same_device));
    let threshold = policy.limits.failing_limit(base_ns, device);
    let detectable = (1.0 + threshold.value) * ratio.center / ratio.low - 1.0;
    let (verdict, reason) =
        match verdict_by_interval(&ratio, threshold.value, base_single, policy.widest) {
            Ok(verdict) => {
                let head_runs: Vec<&CaseRun> = head_runs.iter().collect();
                let all = base_runs.iter().chain(&head_runs).copied();
                let doubt = slowed_clock_reason(verdict, &base_runs, &head_runs)
                    .or_else(|| unsettled_reason(&ratio, threshold.value, all));
                match doubt {
                    Some(doubt) => (Verdict::Inconclusive, Some(doubt)),
                    None => (policy.limits.reported(verdict, ratio.center, base_ns, device), None),
                }
            }
            Err(doubt) => (Verdict::Inconclusive, Some(doubt)),
        };
    Judgement {
        case: id.to_owned(),
        verdict,
        reasons: reason.into_iter().collect(),
        threshold,
        base_ns,
        head_ns: head_side.center_ns,
        ratio,
        detectable: Some(detectable),
        evidence: JudgementEvidence::Runs(Box::new(RunEvidence {
            same_device,
            card,
            base: SideRunCounts::new(&base_side, base_single),
            head: SideRunCounts::new(&head_side, head_single),
        })),
    }
}

/// Doubts a verdict on a case whose power state did not settle, if the range of its times is wider
/// than the threshold and covers the change.
fn unsettled_reason<'a>(
    ratio: &TimeRatio,
    threshold: f64,
    runs: impl Iterator<Item = &'a CaseRun>,
) -> Option<InconclusiveReason> {
    let widths = runs.filter_map(|run| run.power?.range).map(|[low, high]| high / low - 1.0);
    let width = widths.fold(0.0, f64::max);
    let covered = (1.0 / (1.0 + width)..=1.0 + width).contains(&ratio.center);
    (width > threshold && covered).then_some(InconclusiveReason::Unsettled { width })
}

/// Ratio of SM clocks below which a time difference is not due to the code: the clock was set, or
/// the power limit lowered.
const LOW_CLOCK_RATIO: f64 = 0.9;

/// The reason why a verdict is inconclusive because a lower clock slowed one side down: a slowed
/// head explains a regression, a slowed baseline hides one.
fn slowed_clock_reason(
    verdict: Verdict,
    base: &[&CaseRun],
    head: &[&CaseRun],
) -> Option<InconclusiveReason> {
    let (side, suspect, other) = match verdict {
        Verdict::Regressed => (Arm::Head, head, base),
        Verdict::Improved | Verdict::Unchanged | Verdict::Accepted => (Arm::Base, base, head),
        Verdict::Inconclusive => return None,
    };
    if suspect.iter().any(|run| run.conditions.throttled > 0) {
        return Some(InconclusiveReason::Throttled(DecidingSide { side }));
    }
    if suspect.iter().any(|run| run.conditions.shared_gpu()) {
        return Some(InconclusiveReason::SharedGpu(DecidingSide { side }));
    }
    // At the power cap the kernel itself causes a lower clock: it draws more power.
    let at_cap = suspect.iter().any(|run| run.power.is_some_and(|it| it.at_cap));
    let clock_mhz = |side: &[&CaseRun]| {
        let read: Vec<f64> = side.iter().filter_map(|run| run.median_clock_mhz).collect();
        (!read.is_empty()).then(|| kernelgate::stats::median(&read))
    };
    if let (false, Some(low), Some(high)) = (at_cap, clock_mhz(suspect), clock_mhz(other))
        && low < LOW_CLOCK_RATIO * high
    {
        let ratio = if side == Arm::Head { low / high } else { high / low };
        return Some(InconclusiveReason::Clock { ratio });
    }
    let host_bound = |side: &[&CaseRun]| side.iter().any(|run| run.conditions.host_bound);
    (host_bound(suspect) && !host_bound(other))
        .then_some(InconclusiveReason::HostBound(DecidingSide { side }))
}

/// The verdict by the interval alone, or the reason why the interval allows no verdict.
fn verdict_by_interval(
    ratio: &TimeRatio,
    threshold: f64,
    base_single: Option<SingleRunSpread>,
    widest: f64,
) -> Result<Verdict, InconclusiveReason> {
    if ratio.low > 1.0 + threshold {
        return Ok(Verdict::Regressed);
    }
    if ratio.high < 1.0 - threshold {
        return Ok(Verdict::Improved);
    }
    // An estimate beyond the threshold that is smaller than the detectable change shows neither a
    // change nor its absence.
    let matters = !(1.0 - threshold..=1.0 + threshold).contains(&ratio.center);
    match base_single {
        Some(single) if matters && single.from == SpreadSource::Assumed => {
            Err(InconclusiveReason::SingleRun { assumed: single.relative })
        }
        _ if ratio.high - ratio.low > widest => Err(InconclusiveReason::Wide(*ratio)),
        _ if matters => {
            let detectable = (1.0 + threshold) * ratio.center / ratio.low - 1.0;
            Err(InconclusiveReason::Undetectable { detectable })
        }
        _ => Ok(Verdict::Unchanged),
    }
}
