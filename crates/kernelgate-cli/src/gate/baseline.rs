//! Judges runs against a baseline: decides which cases can be compared, and gives each of these a
//! verdict.

use std::collections::{BTreeMap, BTreeSet};

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::costs;
use super::inconclusive_reason::{InconclusiveReason, SideThatCausesDoubt};
use super::judgement::{
    BaselineRunEvidence, CaseJudgement, JudgementEvidence, RunCountAndSpreadOfSide,
};
use super::limits::CaseTimeAndErrorLimits;
use super::outputs::numerics::{self, OutputErrorReport};
use super::outputs::verification::VerificationLoss;
use super::paired::ComparedArm;
use super::ratio_interval::{
    AssumedSpreadOfSingleRun, SourceOfAssumedSpread, TimeIntervalOfSide, TimeRatioWithInterval,
};
use super::rules::PackageGateRules;
use super::same_card_runs::ChosenRunsOfCase;
use super::single_run::CalibratedSpreadsByCase;
use super::verdict::VerdictOnCase;
use super::verdicts::{
    CasesByDifferingField, ComparisonRefusal, ExitFactsOfGateOrCompare, VerdictsAndFindings,
};
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseInBaseline, CaseInProcessRun, CaseOutputErrorsBySeed,
    CaseSummaryOfRun, CommitAndChanges, EarlierRunsWithOtherCode, LaunchCostsBesidesDeviceTime,
    MeasurementOfRuns, OutputErrorsOfExecutable, OutputVerificationExtent, ProcessRunInBaseline,
    RunEnvironment,
};
use kernelgate_cuda::CaseFailureReason;

/// Verdicts and findings of `kernelgate gate`, with the facts that only `gate` has.
pub type BaselineVerdicts = VerdictsAndFindings<BaselineComparisonFacts>;

/// Settings of a judgement against a baseline: the limits, and the time differences that are
/// attributed to other devices or single runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BaselineJudgementSettings {
    /// Thresholds: the smallest slow-downs that count as regressions.
    pub limits: CaseTimeAndErrorLimits,
    /// Relative time difference that two devices of one model may have; it is added to the
    /// threshold if baseline and run may be from different devices.
    pub relative_time_tolerance_between_devices: f64,
    /// Relative half-width of the time interval that is assumed for a side with a single run, if
    /// neither a calibration nor earlier runs show the variance between processes.
    pub assumed_single_run_spread: f64,
    /// Largest relative width of the ratio's confidence interval with which a case can count as
    /// unchanged.
    pub max_relative_interval_width: f64,
    /// Share of the host's CPU time that other processes may use before the report warns.
    pub max_contention_without_warning: f64,
}

impl Default for BaselineJudgementSettings {
    fn default() -> Self {
        Self {
            limits: CaseTimeAndErrorLimits::default_with_relative_limit(0.05),
            relative_time_tolerance_between_devices: 0.22,
            assumed_single_run_spread: 0.10,
            max_relative_interval_width: 0.60,
            max_contention_without_warning: 0.10,
        }
    }
}

impl BaselineJudgementSettings {
    /// Returns the relative time difference that the devices of baseline and run may have: 0 for
    /// the same device.
    pub const fn allowed_device_time_difference(&self, same: bool) -> f64 {
        if same { 0.0 } else { self.relative_time_tolerance_between_devices }
    }

    /// Returns the relative threshold of a case without limits of its own, including the allowance
    /// for another device.
    pub fn relative_threshold(&self, same_device: bool) -> f64 {
        self.limits
            .regression_threshold(f64::INFINITY, self.allowed_device_time_difference(same_device))
            .limit_value
    }
}

impl Serialize for BaselineJudgementSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("relative", &self.limits.relative_time_change_threshold.limit_value)?;
        map.serialize_entry(
            "absolute_ns",
            &self.limits.absolute_time_change_threshold_ns.limit_value,
        )?;
        map.serialize_entry("other_device", &self.relative_time_tolerance_between_devices)?;
        map.serialize_entry("single_run", &self.assumed_single_run_spread)?;
        map.serialize_entry("widest", &self.max_relative_interval_width)?;
        map.serialize_entry("contention", &self.max_contention_without_warning)?;
        map.end()
    }
}

/// Facts about a comparison of runs with a baseline that belong to the whole comparison: baseline,
/// commits, devices, missing cases.
#[derive(Debug, Clone, PartialEq)]
pub struct BaselineComparisonFacts {
    /// Name of the baseline.
    pub baseline_name: String,
    /// Commits of the baseline's runs with which cases were compared, each once.
    pub baseline_commits: Vec<String>,
    /// Commits of the judged runs' code, each once.
    pub judged_commits: Vec<String>,
    /// Name of the baseline's device and of the run's device, if they may be different devices.
    pub baseline_and_run_device: Option<(String, String)>,
    /// Whether the baseline's file has no checksum, so that manual changes to it cannot be
    /// detected.
    pub baseline_lacks_checksum: bool,
    /// Age of the baseline in days and commits; `None` if it was not computed.
    pub staleness: Option<AgeOfBaseline>,
    /// Settings with which process runs were judged against the baseline.
    pub policy: BaselineJudgementSettings,
    /// Cases of the baseline that the judged runs do not have: removed, or not requested.
    pub baseline_cases_not_run: Vec<String>,
    /// Names of the benches whose process ended before it had measured all its cases.
    pub interrupted_benches: Vec<String>,
    pub missing_shards: Vec<String>,
    /// Keys of process runs that belong both to the baseline and to the judged runs, and so were
    /// compared with themselves.
    pub runs_compared_with_themselves: Vec<String>,
}

impl ExitFactsOfGateOrCompare for BaselineComparisonFacts {
    fn lacks_requested_measurement(
        BaselineVerdicts { method_facts: facts, .. }: &BaselineVerdicts,
    ) -> bool {
        !facts.interrupted_benches.is_empty() || !facts.missing_shards.is_empty()
    }
}

/// Age of the oldest baseline run with which a judged case was compared.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AgeOfBaseline {
    /// Start time of the oldest used baseline run, RFC 3339, UTC.
    #[serde(rename = "recorded")]
    pub oldest_run_start_time: String,
    /// Commit of the code that the oldest used baseline run measured.
    #[serde(rename = "commit")]
    pub oldest_run_commit: String,
    /// Whole days since that baseline run was recorded; `None` if `oldest_run_start_time` is not a
    /// valid time.
    #[serde(rename = "days")]
    pub days_since_oldest_run: Option<i64>,
    /// Number of commits since the commit of the oldest used baseline run; `None` if git does not
    /// know that commit.
    #[serde(rename = "commits")]
    pub commits_since_oldest_run: Option<u64>,
}

/// Judges a measurement against a baseline: gives a verdict for each case that both have. The
/// argument `spreads` holds the differences between processes that this device's calibration
/// measured. The argument `rules` holds the package's rules; the report lists rules that could not
/// be applied. The function [`judge_output_errors`] later adds the output errors that `verify`
/// measured with further seeds.
///
/// The function `judge_against_baseline` is long because one loop over the cases fills all lists of
/// the report.
#[expect(clippy::too_many_lines)]
pub fn judge_against_baseline(
    baseline: &BaselineFile,
    measurement: &MeasurementOfRuns,
    policy: BaselineJudgementSettings,
    spreads: &CalibratedSpreadsByCase,
    rules: &PackageGateRules,
) -> BaselineVerdicts {
    let (runs, head) =
        (measurement.process_runs_of_measurement(), measurement.process_runs_by_case_id());
    let (mut judged, mut grown_costs, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
    let mut refused = CasesByDifferingField::new();
    let (mut losses, mut unverified) = (Vec::new(), Vec::new());
    for (id, head) in &head {
        let Some(base) = baseline.cases.get(*id) else { continue };
        let differences: Vec<_> =
            head.iter().flat_map(|it| baseline.mismatches_of_case(base, it.run, it.case)).collect();
        if differences.is_empty() {
            let limits = rules.limits_of_case(id, &policy.limits);
            let found = judge_case_against_baseline(
                baseline,
                id,
                head,
                &BaselineJudgementSettings { limits, ..policy },
                spreads,
            );
            let verified = head.iter().map(|it| it.case.verification.verification_extent());
            let verified =
                verified.reduce(OutputVerificationExtent::weaker_of_both).unwrap_or_default();
            let loss = VerificationLoss::from_extents(id, base.verification, verified)
                .filter(|_| !rules.accepts_less_verification(id));
            if loss.is_none() && verified == OutputVerificationExtent::Unverified {
                unverified.push((*id).to_owned());
            }
            judged.push(match loss.clone() {
                Some(loss) => found.with_verification_loss(loss),
                None => found,
            });
            losses.extend(loss);
            let before: Vec<LaunchCostsBesidesDeviceTime> =
                base.runs.values().map(|run| run.costs).collect();
            let now: Vec<LaunchCostsBesidesDeviceTime> =
                head.iter().map(|it| it.case.samples.launch_costs_with_energy()).collect();
            let (sides, set) = ([&before[..], &now[..]], rules.threshold_limits_for_case(id));
            grown_costs.extend(costs::costs_grown_beyond_limits(id, sides, &set));
            let on_host = head.iter().all(|it| it.run.environment.is_cpu_run());
            bounds.extend(costs::cost_limits_of_case(id, sides, &set, on_host));
        }
        for difference in differences {
            let key =
                (difference.field_name.to_owned(), difference.base_value, difference.head_value);
            refused.entry(key).or_default().insert((*id).to_owned());
        }
    }
    let failed: BTreeMap<String, CaseFailureReason> =
        runs.iter().flat_map(|run| run.failed.clone()).collect();
    let missing = || {
        baseline
            .cases
            .keys()
            .filter(|id| !head.contains_key(id.as_str()) && !failed.contains_key(*id))
    };
    let skips: BTreeMap<&String, &String> = runs.iter().flat_map(|run| &run.skipped).collect();
    let facts = BaselineComparisonFacts {
        baseline_name: baseline.baseline_name.clone(),
        baseline_commits: distinct_short_commits(
            baseline_runs_of_judged_cases(baseline, &judged).map(|run| &run.provenance),
        ),
        judged_commits: distinct_short_commits(runs.iter().map(|run| &run.provenance)),
        baseline_and_run_device: names_of_differing_devices(baseline, runs, &judged),
        baseline_lacks_checksum: false,
        staleness: None,
        policy,
        baseline_cases_not_run: missing().filter(|id| !skips.contains_key(id)).cloned().collect(),
        interrupted_benches: runs
            .iter()
            .filter(|run| !run.ended_normally)
            .map(|run| run.bench.clone())
            .collect(),
        missing_shards: measurement.shards_without_run(),
        runs_compared_with_themselves: runs
            .iter()
            .filter(|run| baseline.contains_run(run))
            .map(BenchProcessRun::key_in_baseline)
            .collect(),
    };
    let skipped = missing().filter_map(|id| Some((id.clone(), (*skips.get(id)?).clone())));
    let mut report = BaselineVerdicts {
        device: measurement
            .environment_of_first_run()
            .map(RunEnvironment::description_of_device)
            .unwrap_or_default(),
        default_case_limits: policy.limits,
        judged_cases: judged,
        refused: ComparisonRefusal::from_differing_fields(refused),
        new_cases: head
            .keys()
            .filter(|id| !baseline.cases.contains_key(**id))
            .map(ToString::to_string)
            .collect(),
        skipped_in_head: skipped.collect(),
        failed_in_head: failed,
        unverified_cases: unverified,
        verification_losses: losses,
        numerics: OutputErrorReport::default(),
        grown_costs,
        rules: costs::report_unjudged_cost_limits(rules, &bounds),
        method_facts: facts,
    };
    report.sort_judgements();
    report
}

/// Compares the output errors of judged cases with the errors in the baseline; the errors come from
/// the runs and from `verify` records of the same executables.
pub fn judge_output_errors(
    report: BaselineVerdicts,
    baseline: &BaselineFile,
    measurement: &MeasurementOfRuns,
    records: &[OutputErrorsOfExecutable],
    rules: &PackageGateRules,
) -> BaselineVerdicts {
    let mut head: BTreeMap<&str, CaseOutputErrorsBySeed> = BTreeMap::new();
    for run in measurement.process_runs_of_measurement() {
        for (id, case) in &run.cases {
            head.entry(id).or_default().add_errors_of_verified_case(run.seed, &case.verification);
        }
        let same = |record: &&OutputErrorsOfExecutable| {
            run.executable_hash.as_ref() == Some(&record.executable_hash)
                && record.environment.incomparable_facts_with_base(&run.environment).is_empty()
        };
        for record in records.iter().filter(same) {
            for id in run.cases.keys() {
                let Some(found) = record.output_errors_of_case(id) else { continue };
                head.entry(id).or_default().add_errors_of_all_seeds(found);
            }
        }
    }
    let both = report.judged_cases.iter().filter_map(|judged| {
        let base = baseline.cases[&judged.case_id].numerics.as_ref()?;
        Some((judged.case_id.as_str(), base, head.get(judged.case_id.as_str())?))
    });
    let growth = |case: &str| {
        rules
            .limits_of_case(case, &report.default_case_limits)
            .output_error_growth_threshold
            .limit_value
    };
    let numerics = numerics::compare_output_errors(both, growth);
    BaselineVerdicts { numerics, ..report }
}

/// Returns the figures of each baseline case that do not depend on the judged measurement: time
/// intervals with and without contention, and conditions that lengthen times.
pub fn figures_of_baseline_cases(baseline: &BaselineFile) -> BTreeMap<&str, BaselineCaseFigures> {
    let figures = |case: &CaseInBaseline| {
        let times = |single, contended| {
            TimeIntervalOfSide::interval_from_runs(case.runs.values(), single, contended)
        };
        BaselineCaseFigures {
            times: [times(0.0, true), times(0.0, false), times(1.0, true)],
            earlier_relative_half_range: case
                .earlier
                .as_ref()
                .map(EarlierRunsWithOtherCode::relative_half_range_of_medians),
            any_run_throttled: case.runs.values().any(|run| run.conditions.throttled_samples > 0),
            gpu_shared_in_any_run: case
                .runs
                .values()
                .any(|run| run.conditions.was_gpu_shared_with_other_processes()),
            any_run_host_bound: case
                .runs
                .values()
                .any(|run| run.conditions.includes_host_launch_time),
        }
    };
    baseline.cases.iter().map(|(id, case)| (id.as_str(), figures(case))).collect()
}

#[derive(Debug, Clone, PartialEq)]
pub struct BaselineCaseFigures {
    times: [TimeIntervalOfSide; 3],
    earlier_relative_half_range: Option<f64>,
    any_run_throttled: bool,
    gpu_shared_in_any_run: bool,
    any_run_host_bound: bool,
}

/// Returns the runs of the baseline with which the judged cases were compared.
fn baseline_runs_of_judged_cases<'a>(
    baseline: &'a BaselineFile,
    judged: impl IntoIterator<Item = &'a CaseJudgement>,
) -> impl Iterator<Item = &'a ProcessRunInBaseline> {
    let judged = judged.into_iter();
    let keys: BTreeSet<&String> =
        judged.flat_map(|judged| baseline.cases[&judged.case_id].runs.keys()).collect();
    keys.into_iter().map(|key| &baseline.runs[key])
}

fn distinct_short_commits<'a>(
    provenances: impl Iterator<Item = &'a CommitAndChanges>,
) -> Vec<String> {
    provenances
        .map(CommitAndChanges::short_commit_with_changes_mark)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

fn names_of_differing_devices(
    baseline: &BaselineFile,
    runs: &[BenchProcessRun],
    judged: &[CaseJudgement],
) -> Option<(String, String)> {
    let on_other_cards = judged
        .iter()
        .filter(|judged| judged.baseline_run_evidence().is_some_and(|runs| !runs.same_device));
    let used: Vec<&ProcessRunInBaseline> =
        baseline_runs_of_judged_cases(baseline, on_other_cards).collect();
    let mut pairs = runs
        .iter()
        .flat_map(|run| used.iter().map(move |base| (&base.environment, &run.environment)));
    pairs
        .find(|(base, head)| !head.has_same_gpus_or_host_as(base))
        .map(|(base, head)| (base.id_of_gpus_or_host(), head.id_of_gpus_or_host()))
}

fn judge_case_against_baseline(
    baseline: &BaselineFile,
    id: &str,
    head: &[CaseInProcessRun<'_>],
    policy: &BaselineJudgementSettings,
    spreads: &CalibratedSpreadsByCase,
) -> CaseJudgement {
    let base = &baseline.cases[id];
    // Contention of the host's CPU is considered only for cases that run on the host, because it
    // changes their times.
    let contended = head.iter().all(|it| it.run.environment.is_cpu_run());
    let ChosenRunsOfCase { base: base_runs, head, same_device, compared_card } =
        ChosenRunsOfCase::choose_runs_of_one_card(baseline, base, head);
    let base_single = match base_runs[..] {
        [(environment, _)] => Some(spreads.spread_for_single_baseline_run(
            id,
            base,
            environment,
            policy.assumed_single_run_spread,
        )),
        _ => None,
    };
    let base_runs: Vec<&CaseSummaryOfRun> = base_runs.into_iter().map(|(_, run)| run).collect();
    let head_single = match &head[..] {
        [only] => Some(spreads.spread_for_single_judged_run(
            id,
            only.run,
            policy.assumed_single_run_spread,
        )),
        _ => None,
    };
    let half_width = |single: Option<AssumedSpreadOfSingleRun>| {
        single.map_or(policy.assumed_single_run_spread, |single| single.relative_half_width)
    };
    let head_runs: Vec<CaseSummaryOfRun> =
        head.iter().map(|it| CaseSummaryOfRun::summarize_samples(&it.case.samples)).collect();
    let base_side = TimeIntervalOfSide::interval_from_runs(
        base_runs.iter().copied(),
        half_width(base_single),
        contended,
    );
    let head_side =
        TimeIntervalOfSide::interval_from_runs(&head_runs, half_width(head_single), contended);
    let ratio = TimeRatioWithInterval::from_head_and_base_intervals(&head_side, &base_side);
    let base_ns = base_side.median_launch_ns;
    let device = policy.allowed_device_time_difference(same_device);
    let threshold = policy.limits.smallest_failing_slowdown(base_ns, device);
    let detectable = (1.0 + threshold.limit_value) * ratio.estimated_ratio / ratio.ratio_low - 1.0;
    let (verdict, reason) = match verdict_from_confidence_interval(
        &ratio,
        threshold.limit_value,
        base_single,
        policy.max_relative_interval_width,
    ) {
        Ok(verdict) => {
            let head_runs: Vec<&CaseSummaryOfRun> = head_runs.iter().collect();
            let all = base_runs.iter().chain(&head_runs).copied();
            let doubt = doubt_from_slowed_side(verdict, &base_runs, &head_runs)
                .or_else(|| doubt_from_unsettled_power_state(&ratio, threshold.limit_value, all));
            let estimate = ratio.estimated_ratio;
            match doubt {
                Some(doubt) => (VerdictOnCase::Inconclusive, Some(doubt)),
                None => (
                    policy.limits.verdict_with_acceptance(verdict, estimate, base_ns, device),
                    None,
                ),
            }
        }
        Err(doubt) => (VerdictOnCase::Inconclusive, Some(doubt)),
    };
    CaseJudgement {
        case_id: id.to_owned(),
        verdict,
        reasons: reason.into_iter().collect(),
        regression_threshold: threshold,
        base_launch_ns: base_ns,
        head_launch_ns: head_side.median_launch_ns,
        ratio,
        detectable_change: Some(detectable),
        evidence: JudgementEvidence::Runs(Box::new(BaselineRunEvidence {
            same_device,
            compared_card,
            base: RunCountAndSpreadOfSide::from_time_interval(&base_side, base_single),
            head: RunCountAndSpreadOfSide::from_time_interval(&head_side, head_single),
        })),
    }
}

/// Returns a reason to doubt the verdict if the GPU's power state did not settle, and the range of
/// times meanwhile exceeds the threshold and covers the change.
fn doubt_from_unsettled_power_state<'a>(
    ratio: &TimeRatioWithInterval,
    threshold: f64,
    runs: impl Iterator<Item = &'a CaseSummaryOfRun>,
) -> Option<InconclusiveReason> {
    let widths = runs.filter_map(|run| run.power?.range).map(|[low, high]| high / low - 1.0);
    let width = widths.fold(0.0, f64::max);
    let covered = (1.0 / (1.0 + width)..=1.0 + width).contains(&ratio.estimated_ratio);
    (width > threshold && covered)
        .then_some(InconclusiveReason::PowerStateUnsettled { relative_time_range_width: width })
}

/// If the ratio of the two sides' SM clocks is below this value, the time difference is attributed
/// to the clock and not to the code.
const MIN_COMPARABLE_CLOCK_RATIO: f64 = 0.9;

/// Returns the reason why a verdict is inconclusive because one side was slowed by its conditions:
/// a slowed head explains a regression, a slowed baseline hides one.
fn doubt_from_slowed_side(
    verdict: VerdictOnCase,
    base: &[&CaseSummaryOfRun],
    head: &[&CaseSummaryOfRun],
) -> Option<InconclusiveReason> {
    let (side, suspect, other) = match verdict {
        VerdictOnCase::Regressed => (ComparedArm::HeadBuild, head, base),
        VerdictOnCase::Improved | VerdictOnCase::Unchanged | VerdictOnCase::AcceptedSlowdown => {
            (ComparedArm::BaseBuild, base, head)
        }
        VerdictOnCase::Inconclusive => return None,
    };
    if suspect.iter().any(|run| run.conditions.throttled_samples > 0) {
        return Some(InconclusiveReason::GpuThrottled(SideThatCausesDoubt { side }));
    }
    if suspect.iter().any(|run| run.conditions.was_gpu_shared_with_other_processes()) {
        return Some(InconclusiveReason::SharedGpu(SideThatCausesDoubt { side }));
    }
    // A side at its power cap is not doubted for a lower clock, because the kernel itself lowers
    // the clock by drawing more power.
    let at_cap = suspect.iter().any(|run| run.power.is_some_and(|it| it.at_power_cap));
    let clock_mhz = |side: &[&CaseSummaryOfRun]| {
        let read: Vec<f64> = side.iter().filter_map(|run| run.median_sm_clock_mhz).collect();
        (!read.is_empty()).then(|| kernelgate::stats::median(&read))
    };
    if let (false, Some(low), Some(high)) = (at_cap, clock_mhz(suspect), clock_mhz(other))
        && low < MIN_COMPARABLE_CLOCK_RATIO * high
    {
        let ratio = if side == ComparedArm::HeadBuild { low / high } else { high / low };
        return Some(InconclusiveReason::DifferentSmClocks { head_to_base_clock_ratio: ratio });
    }
    let host_bound = |side: &[&CaseSummaryOfRun]| {
        side.iter().any(|run| run.conditions.includes_host_launch_time)
    };
    (host_bound(suspect) && !host_bound(other))
        .then_some(InconclusiveReason::HostBound(SideThatCausesDoubt { side }))
}

/// Returns the verdict that follows from the ratio's confidence interval alone, or the reason why
/// the interval gives none.
fn verdict_from_confidence_interval(
    ratio: &TimeRatioWithInterval,
    threshold: f64,
    base_single: Option<AssumedSpreadOfSingleRun>,
    widest: f64,
) -> Result<VerdictOnCase, InconclusiveReason> {
    if ratio.ratio_low > 1.0 + threshold {
        return Ok(VerdictOnCase::Regressed);
    }
    if ratio.ratio_high < 1.0 - threshold {
        return Ok(VerdictOnCase::Improved);
    }
    // If the estimated change exceeds the threshold but is smaller than the detectable change, it
    // shows neither a change nor its absence.
    let matters = !(1.0 - threshold..=1.0 + threshold).contains(&ratio.estimated_ratio);
    match base_single {
        Some(single)
            if matters && single.from == SourceOfAssumedSpread::AssumedWithoutMeasurement =>
        {
            Err(InconclusiveReason::BaselineHasSingleRun {
                assumed_interval_half_width: single.relative_half_width,
            })
        }
        _ if ratio.ratio_high - ratio.ratio_low > widest => {
            Err(InconclusiveReason::IntervalTooWide(*ratio))
        }
        _ if matters => {
            let detectable = (1.0 + threshold) * ratio.estimated_ratio / ratio.ratio_low - 1.0;
            Err(InconclusiveReason::ChangeBelowDetectable {
                smallest_detectable_slowdown: detectable,
            })
        }
        _ => Ok(VerdictOnCase::Unchanged),
    }
}
