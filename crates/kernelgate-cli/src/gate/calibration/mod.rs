//! A calibration of the gate on a device: comparisons with known correct verdicts, and all their
//! measured times.
//!
//! In a calibration, a *null* comparison has the same executable as base and as head. Every other
//! kind of comparison in a calibration is a null comparison with a changed head. In a *layout*
//! comparison, the head's code and memory lie at other addresses. An *injected* comparison delays
//! each launch of the head by a wait of some per cent of the case's time. A *work* comparison
//! delays each launch of the head by additional passes over memory. A *single* comparison delays
//! only one case of the head. A *sham* comparison runs artificial load while the head's processes
//! are timed. The module `calibration` stores and evaluates calibrations; it neither runs their
//! comparisons (`compare::calibrate` does) nor prints.

pub mod anchors;
pub mod recommend;
pub mod summary;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::VerdictOnCase;
use super::paired::{
    CaseTimeInTrial, ComparedArm, ComparisonTestPlan, TimedTrialBlock, TimedTrialBlocksByCase,
};
pub use anchors::anchor_tolerance_from_noise;
use kernelgate::measure::anchors::ShardAnchorRecord;
use kernelgate::measure::plausibility;
use kernelgate::record::file::RecordFileType;
use kernelgate::record::json_columns;
use kernelgate::record::text;
use kernelgate::record::{CommitAndChanges, RunEnvironment, ShardOfWork, TrialSamplingPlan};
pub use recommend::{RecommendedThresholds, recommend_thresholds};
pub use summary::{CalibrationSummaryTables, summarise_calibration};

/// Largest number of blocks that the test plan of a recorded comparison may have.
const MAX_BLOCKS_OF_RECORDED_PLAN: usize = 10_000;

/// Kind of a calibration's comparison, which determines its correct verdicts.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CalibrationComparisonKind {
    /// A/A comparison: base and head are identical, so no case is slower.
    #[serde(rename = "null")]
    IdenticalBuilds,
    /// Base and head are identical, but artificial load ran on the host or GPU during the head's
    /// processes.
    #[serde(rename = "sham")]
    ShamLoad,
    /// Base and head are identical, but the head's code and memory lay at other addresses.
    #[serde(rename = "layout")]
    OtherCodeLayout,
    /// Every launch of the head is delayed by a wait of this percentage of the case's time.
    #[serde(rename = "injected")]
    SlowdownByWaitPercent(f64),
    /// Every launch of the head is slowed by additional work that takes this percentage of the
    /// case's time.
    #[serde(rename = "work")]
    SlowdownByWorkPercent(f64),
    /// Only one case of the head is delayed, by a wait of this percentage of its time.
    #[serde(rename = "single")]
    OneCaseSlowdownPercent(f64),
}

impl CalibrationComparisonKind {
    /// Returns the name of the kind for reports: "A/A", "sham load", "5 % slower".
    pub fn kind_name(self) -> String {
        match self {
            Self::IdenticalBuilds => "A/A".to_owned(),
            Self::ShamLoad => "sham load".to_owned(),
            Self::OtherCodeLayout => "other layout".to_owned(),
            Self::SlowdownByWaitPercent(percent) => format!("{percent} % slower"),
            Self::SlowdownByWorkPercent(percent) => format!("{percent} % more work"),
            Self::OneCaseSlowdownPercent(percent) => format!("one case {percent} % slower"),
        }
    }

    /// Returns the injected slow-down of the head, per cent of the case's time; `None` if nothing
    /// was injected.
    pub const fn injected_slowdown_percent(self) -> Option<f64> {
        match self {
            Self::IdenticalBuilds | Self::ShamLoad | Self::OtherCodeLayout => None,
            Self::SlowdownByWaitPercent(percent)
            | Self::SlowdownByWorkPercent(percent)
            | Self::OneCaseSlowdownPercent(percent) => Some(percent),
        }
    }
}

/// A calibration of the gate on one device: comparisons of one executable with itself, with known
/// correct verdicts and one test plan.
///
/// In a calibration file, the comparisons name a case by its index in `cases`; `#0` names the first
/// case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct GateCalibration {
    /// Start time of the calibration's first comparison, RFC 3339, UTC.
    #[serde(rename = "started")]
    pub first_comparison_start_time: String,
    /// Device and build with which the record was measured.
    pub environment: RunEnvironment,
    /// Commit of the calibrated package's code, and whether files differed from the commit.
    pub provenance: CommitAndChanges,
    /// Facts that all comparisons of the calibration share, by name: settings, filter, hashes of
    /// the executables.
    #[serde(rename = "identity")]
    pub calibration_identity_facts: BTreeMap<String, String>,
    /// The command lines with which the calibration was measured; merged calibrations have several.
    #[serde(rename = "commands")]
    pub calibration_command_lines: BTreeSet<String>,
    /// Test plan of each of the calibration's comparisons: thresholds, error rates and numbers of
    /// blocks.
    pub plan: ComparisonTestPlan,
    /// Largest wall time of each round of a comparison, seconds.
    #[serde(rename = "budget_s")]
    pub round_budget_s: f64,
    /// How long each process warmed up and timed a case.
    pub sampling: TrialSamplingPlan,
    /// Nanoseconds per launch of each calibrated case, from a process before the first comparison.
    #[serde(rename = "cases")]
    pub launch_ns_by_case: BTreeMap<String, f64>,
    /// Cases that the calibration did not measure, as lines with the reason.
    #[serde(rename = "left_out")]
    pub unmeasured_cases_with_reason: BTreeSet<String>,
    /// Cases of benches that use Criterion without kernelgate, whose slow-downs are simulated.
    /// Launches of benches without kernelgate cannot be delayed, so the injected delay was added to
    /// their measured times instead.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[serde(rename = "simulated")]
    pub cases_with_simulated_slowdowns: BTreeSet<String>,
    /// Identity of the shard of the calibration that this file holds; `None` for a whole
    /// calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "part")]
    pub shard_identity: Option<CalibrationShardIdentity>,
    /// Largest relative difference of anchor rates with which shards from two cards of this model
    /// may be merged, from [`anchor_tolerance_from_noise()`]; `None` if the default applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "anchor_tolerance")]
    pub anchor_rate_tolerance: Option<f64>,
    /// Thresholds that [`recommend_thresholds()`] derived from the comparisons when the file was
    /// written.
    pub recommended: Option<RecommendedThresholds>,
    /// All comparisons of the calibration, in the order of their start times. In the file,
    /// comparisons name a case by its index in the map `cases`; `#0` names the first case.
    pub comparisons: Vec<CalibrationComparisonRecord>,
}

/// Identity of one shard of a calibration, for files that hold only a part of its comparisons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationShardIdentity {
    /// The shard of the divided work that the record covers.
    pub shard: ShardOfWork,
    /// Hash of the list of all comparisons and cases of the calibration; it is equal in all its
    /// shards.
    #[serde(rename = "plan")]
    pub plan_hash: String,
    /// Number of comparisons in this part of a calibration.
    #[serde(rename = "comparisons")]
    pub comparisons_in_shard: usize,
}

/// The record of one comparison of a calibration, whose correct verdicts are known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationComparisonRecord {
    /// The difference between base and head (none, a sham load, the code layout or an injected
    /// slow-down), which determines the correct verdicts.
    pub kind: CalibrationComparisonKind,
    /// Number of the comparison among the calibration's comparisons of its kind, from 0, counted
    /// over all shards.
    #[serde(rename = "number")]
    pub number_within_kind: usize,
    /// Start time of this comparison, RFC 3339, UTC.
    #[serde(rename = "started")]
    pub comparison_start_time: String,
    /// Wall time, seconds.
    #[serde(rename = "wall_s")]
    pub comparison_wall_s: f64,
    /// Number of processes.
    #[serde(rename = "processes")]
    pub process_count: usize,
    /// Nanoseconds by which each launch of the head was delayed, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "delays_ns")]
    pub injected_delays_ns: BTreeMap<String, f64>,
    /// Verdicts that the gate gave when the comparison was made, by case.
    pub verdicts: BTreeMap<String, VerdictOnCase>,
    /// Texts of the reasons why cases were inconclusive, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "reasons")]
    pub inconclusive_reasons_by_case: BTreeMap<String, String>,
    /// Cases that could not be run or measured to the end, each with the reason: for example, the
    /// delay cannot be added on this device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "failed")]
    pub failed_cases_with_reason: BTreeMap<String, String>,
    /// Bench processes that failed, each with the reason, as lines of text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "broken")]
    pub failed_bench_processes: Vec<String>,
    /// All measured times of the comparison's first round, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "json_columns")]
    #[serde(rename = "first")]
    pub first_round_times: BTreeMap<String, CaseBlocksAsColumns>,
    /// All measured times of the comparison's second round, which confirms regressions, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "json_columns")]
    #[serde(rename = "second")]
    pub second_round_times: BTreeMap<String, CaseBlocksAsColumns>,
    /// Identifier of the GPU or host on which the comparison ran.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[serde(rename = "card")]
    pub card_or_host_id: String,
    /// Anchors (rates of fixed work) of the device, measured just before this comparison; `None` if
    /// they were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchors: Option<ShardAnchorRecord>,
}

/// The timed blocks of one case as columns for a JSON file: each side has two processes per block,
/// in time order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseBlocksAsColumns {
    /// One letter for each block, `b` if a process of the base ran first in the block, `h` if one
    /// of the head did.
    #[serde(rename = "leaders")]
    pub leading_side_letters: String,
    /// Timings of the case in the base's processes, two per block.
    pub base: CaseTimingColumns,
    /// Timings of the case in the head's processes, two per block.
    pub head: CaseTimingColumns,
    /// [`CaseTimeInTrial::time_is_mean`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "averaged")]
    pub times_are_iteration_means: bool,
}

/// Timings of one case in the processes of one side (base or head), as columns for a JSON file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseTimingColumns {
    /// [`CaseTimeInTrial::median_time_ns`].
    #[serde(rename = "time_ns")]
    pub process_times_ns: Vec<f64>,
    /// Values of [`CaseTimeInTrial::median_cycles_per_launch`] for each process; empty if no
    /// process has one, a single value if it is equal in all processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "cycles")]
    pub clock_cycles: Vec<Option<f64>>,
    /// Values of [`CaseTimeInTrial::contention_share`] for each process; empty if no process has
    /// one, a single value if it is equal in all processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "contention")]
    pub cpu_contention_shares: Vec<Option<f64>>,
    /// Indices of the processes that ran at the GPU's power cap
    /// ([`CaseTimeInTrial::at_power_cap`]).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[serde(rename = "at_cap")]
    pub processes_at_power_cap: BTreeSet<usize>,
    /// Indices of the processes in which the GPU was throttled
    /// ([`CaseTimeInTrial::slowed_by_heat_or_hardware`]).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[serde(rename = "throttled")]
    pub throttled_processes: BTreeSet<usize>,
}

impl CaseTimingColumns {
    fn from_case_timings<'a>(
        observations: impl Iterator<Item = &'a CaseTimeInTrial>,
    ) -> CaseTimingColumns {
        let observations: Vec<&CaseTimeInTrial> = observations.collect();
        let optional_column =
            |value: &dyn Fn(&CaseTimeInTrial) -> Option<f64>| -> Vec<Option<f64>> {
                let values: Vec<Option<f64>> =
                    observations.iter().map(|found| value(found)).collect();
                let has_values = values.iter().any(Option::is_some);
                match values.first().filter(|first| values.iter().all(|value| value == *first)) {
                    Some(first) if has_values => vec![*first],
                    _ if has_values => values,
                    _ => Vec::new(),
                }
            };
        // Times are stored with six significant digits, whose rounding is less than a hundredth of
        // the noise; more digits would only enlarge the file.
        let indices = |holds: fn(&CaseTimeInTrial) -> bool| -> BTreeSet<usize> {
            (0..observations.len()).filter(|&index| holds(observations[index])).collect()
        };
        let six_digits = |value: f64| format!("{value:.5e}").parse().unwrap_or(value);
        let contention =
            |found: &CaseTimeInTrial| found.contention_share.map(|it| (it * 1e4).round() / 1e4);
        Self {
            process_times_ns: observations
                .iter()
                .map(|found| six_digits(found.median_time_ns))
                .collect(),
            clock_cycles: optional_column(&|found| found.median_cycles_per_launch.map(six_digits)),
            cpu_contention_shares: optional_column(&contention),
            processes_at_power_cap: indices(|found| found.at_power_cap),
            throttled_processes: indices(|found| found.slowed_by_heat_or_hardware),
        }
    }

    fn time_in_trial(&self, index: usize, averaged: bool) -> Option<CaseTimeInTrial> {
        let time_ns = *self.process_times_ns.get(index)?;
        let value_at = |values: &[Option<f64>]| match values {
            [all] => *all,
            each => each.get(index).copied().flatten(),
        };
        let (cycles, contention) =
            (value_at(&self.clock_cycles), value_at(&self.cpu_contention_shares));
        let (at_cap, throttled) = (
            self.processes_at_power_cap.contains(&index),
            self.throttled_processes.contains(&index),
        );
        Some(CaseTimeInTrial {
            median_time_ns: time_ns,
            median_cycles_per_launch: cycles,
            contention_share: contention,
            at_power_cap: at_cap,
            slowed_by_heat_or_hardware: throttled,
            time_is_mean: averaged,
        })
    }
}

impl CaseBlocksAsColumns {
    /// Converts the timed blocks of a case into columns for a file.
    pub fn from_trial_blocks(blocks: &[TimedTrialBlock]) -> CaseBlocksAsColumns {
        Self {
            leading_side_letters: blocks
                .iter()
                .map(
                    |block| {
                        if block.first_and_last_arm == ComparedArm::BaseBuild { 'b' } else { 'h' }
                    },
                )
                .collect(),
            base: CaseTimingColumns::from_case_timings(blocks.iter().flat_map(|block| &block.base)),
            head: CaseTimingColumns::from_case_timings(blocks.iter().flat_map(|block| &block.head)),
            times_are_iteration_means: blocks.iter().any(|block| {
                block.base.iter().chain(&block.head).any(|timing| timing.time_is_mean)
            }),
        }
    }

    /// Converts the columns of a file back into timed blocks.
    pub fn to_trial_blocks(&self) -> Vec<TimedTrialBlock> {
        let pair = |column: &CaseTimingColumns, block: usize| {
            let at = |index| column.time_in_trial(index, self.times_are_iteration_means);
            Some([at(2 * block)?, at(2 * block + 1)?])
        };
        let block = |(index, leader): (usize, char)| {
            let leader =
                if leader == 'b' { ComparedArm::BaseBuild } else { ComparedArm::HeadBuild };
            Some(TimedTrialBlock {
                first_and_last_arm: leader,
                base: pair(&self.base, index)?,
                head: pair(&self.head, index)?,
            })
        };
        self.leading_side_letters.chars().enumerate().map_while(block).collect()
    }
}

impl CalibrationComparisonRecord {
    /// Returns the verdicts of the comparison by case; cases that could not be delayed have no
    /// verdict.
    pub fn verdicts_by_case(&self) -> impl Iterator<Item = (&str, VerdictOnCase)> {
        self.verdicts.iter().map(|(case, verdict)| (case.as_str(), *verdict))
    }

    /// Returns whether the comparison's verdict for any case is that the head is slower.
    pub fn has_regressed_case(&self) -> bool {
        self.verdicts_by_case().any(|(_, verdict)| verdict == VerdictOnCase::Regressed)
    }

    /// Returns whether the comparison judged a case as slower into which no delay was injected.
    pub fn has_false_alarm(&self) -> bool {
        let slower = |(case, verdict): (&str, VerdictOnCase)| {
            verdict == VerdictOnCase::Regressed && !self.injected_delays_ns.contains_key(case)
        };
        self.verdicts_by_case().any(slower)
    }

    /// Returns the timed blocks of the comparison's first or second round by case, at most `most`
    /// blocks for each case.
    pub fn blocks_of_round(&self, second: bool, most: usize) -> TimedTrialBlocksByCase {
        let series = if second { &self.second_round_times } else { &self.first_round_times };
        let blocks = |series: &CaseBlocksAsColumns| {
            series.to_trial_blocks().into_iter().take(most).collect()
        };
        series.iter().map(|(case, series)| (case.clone(), blocks(series))).collect()
    }
}

impl GateCalibration {
    /// Sentence that a report prints before the list of Criterion cases, whose slow-downs are
    /// simulated.
    pub const SIMULATED_CASES_NOTE: &str = "slow-downs are added to the recorded times of these, in which \
                                 nothing can be delayed: ";

    /// Returns the calibration's comparisons of one kind.
    pub fn comparisons_of_kind(
        &self,
        kind: CalibrationComparisonKind,
    ) -> impl Iterator<Item = &CalibrationComparisonRecord> {
        self.comparisons.iter().filter(move |comparison| comparison.kind == kind)
    }

    /// Returns the kinds of comparisons that the calibration contains, each once, in the order of
    /// [`CalibrationComparisonKind`].
    pub fn contained_comparison_kinds(&self) -> Vec<CalibrationComparisonKind> {
        let mut kinds: Vec<_> = self.comparisons.iter().map(|comparison| comparison.kind).collect();
        kinds.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        kinds.dedup();
        kinds
    }

    /// Returns the sizes of the injected slow-downs, per cent, each once, in ascending order.
    pub fn injected_slowdown_percents(&self) -> Vec<f64> {
        let mut percents: Vec<f64> = self
            .contained_comparison_kinds()
            .into_iter()
            .filter_map(CalibrationComparisonKind::injected_slowdown_percent)
            .collect();
        percents.sort_by(f64::total_cmp);
        percents.dedup();
        percents
    }

    /// Returns whether all comparisons that the calibration (or its shard) plans were made.
    pub fn has_all_planned_comparisons(&self) -> bool {
        self.shard_identity
            .as_ref()
            .is_none_or(|part| self.comparisons.len() >= part.comparisons_in_shard)
    }

    /// Returns the name and both values of the first fact that prevents merging two calibrations;
    /// `None` if they can be merged.
    pub fn first_fact_that_prevents_merging(&self, other: &Self) -> Option<(String, [String; 2])> {
        if let Some(mismatch) =
            other.environment.incomparable_facts_with_base(&self.environment).into_iter().next()
        {
            return Some((
                mismatch.field_name.to_owned(),
                [mismatch.base_value, mismatch.head_value],
            ));
        }
        let shared = |of: &Self| {
            // The setting `KERNELGATE_DEVICE` may differ, because two cards of one machine may
            // share a calibration.
            let own = of
                .calibration_identity_facts
                .iter()
                .filter(|(name, _)| *name != "KERNELGATE_DEVICE");
            own.map(|(name, value)| (name.clone(), value.clone())).collect::<BTreeMap<_, _>>()
        };
        let (left, right) = (shared(self), shared(other));
        if let Some(name) = first_differing_name(&left, &right) {
            let values = [&left, &right].map(|facts| facts.get(&name).cloned().unwrap_or_default());
            return Some((name, values));
        }
        let differing_number = first_differing_field("plan", &self.plan, &other.plan)
            .or_else(|| first_differing_field("sampling", &self.sampling, &other.sampling));
        if differing_number.is_some() {
            return differing_number;
        }
        let facts = |of: &Self| {
            let cases: Vec<&str> = of.launch_ns_by_case.keys().map(String::as_str).collect();
            [("cases", cases.join(", "))]
        };
        let parts = self.shard_identity.as_ref().zip(other.shard_identity.as_ref());
        let of_parts = parts.map(|(one, other)| {
            [one, other].map(|part| {
                [
                    ("number of shards", part.shard.shard_count.to_string()),
                    ("plan", part.plan_hash.clone()),
                ]
            })
        });
        let of_parts = of_parts.into_iter().flat_map(|[one, other]| one.into_iter().zip(other));
        let mut both = facts(self).into_iter().zip(facts(other)).chain(of_parts);
        let ((field, left), (_, right)) = both.find(|(one, other)| one != other)?;
        Some((field.to_owned(), [left, right]))
    }

    /// Checks that another calibration belongs to this one, and adds its comparisons; a comparison
    /// that is already present is not added again.
    pub fn check_and_merge_calibration(&mut self, other: Self) -> Result<(), String> {
        if let Some((field, [left, right])) = self.first_fact_that_prevents_merging(&other) {
            return Err(format!("{field} is `{left}` and `{right}`"));
        }
        self.merge_checked_calibration_part(other);
        Ok(())
    }

    /// Adds the comparisons of another part of this calibration, which
    /// [`Self::first_fact_that_prevents_merging`] must have accepted before.
    pub fn merge_checked_calibration_part(&mut self, other: Self) {
        if self.shard_identity != other.shard_identity {
            self.shard_identity = None;
        }
        for comparison in other.comparisons {
            if !self.comparisons.contains(&comparison) {
                self.comparisons.push(comparison);
            }
        }
        self.comparisons.sort_by(|a, b| a.comparison_start_time.cmp(&b.comparison_start_time));
        self.calibration_command_lines.extend(other.calibration_command_lines);
        self.unmeasured_cases_with_reason.extend(other.unmeasured_cases_with_reason);
        self.cases_with_simulated_slowdowns.extend(other.cases_with_simulated_slowdowns);
        self.first_comparison_start_time =
            self.first_comparison_start_time.clone().min(other.first_comparison_start_time);
        // The recommended thresholds are removed after a merge, because they must be derived again
        // from all comparisons.
        self.recommended = None;
    }

    /// Derives from the comparisons the recommended thresholds for `compare` and the anchor
    /// tolerance for `merge`.
    pub fn derive_thresholds_and_anchor_tolerance(&mut self) {
        self.recommended = Some(recommend_thresholds(self));
        self.anchor_rate_tolerance =
            anchor_tolerance_from_noise(&self.comparisons).or(self.anchor_rate_tolerance);
    }
}

/// Returns an error that names the field if its value is not within the range.
fn check_value_in_range(
    field: &str,
    value: f64,
    range: std::ops::Range<f64>,
) -> Result<(), String> {
    if range.contains(&value) { Ok(()) } else { Err(format!("{field} is {value}")) }
}

/// Checks that the numbers of a test plan that was read from a file are within their possible
/// ranges.
pub(super) fn check_test_plan_ranges(plan: &ComparisonTestPlan) -> Result<(), String> {
    for (field, value) in [
        ("plan.relative", plan.relative_time_change_threshold),
        ("plan.absolute_ns", plan.absolute_time_change_threshold_ns),
        ("plan.tolerated", plan.max_unchanged_relative_change),
        ("plan.contention", plan.max_contention_difference_of_pair),
        ("plan.contention_weight", plan.slowdown_per_contention),
    ] {
        check_value_in_range(field, value, 0.0..1e12)?;
    }
    for (field, value) in [
        ("plan.false_alarms", plan.max_false_alarm_probability),
        ("plan.missed", plan.max_missed_change_probability),
        ("plan.power", plan.statistical_power),
    ] {
        check_value_in_range(field, value, f64::MIN_POSITIVE..1.0)?;
    }
    for (field, blocks) in [
        ("plan.settle_blocks", plan.min_blocks_for_unchanged),
        ("plan.max_blocks", plan.max_trial_blocks),
    ] {
        if !(1..=MAX_BLOCKS_OF_RECORDED_PLAN).contains(&blocks) {
            return Err(format!("{field} is {blocks}"));
        }
    }
    Ok(())
}

/// Returns the first name (in the maps' order) that has different values in two maps, or is in only
/// one of them.
pub fn first_differing_name(
    a: &BTreeMap<String, String>,
    b: &BTreeMap<String, String>,
) -> Option<String> {
    a.keys().chain(b.keys()).find(|name| a.get(*name) != b.get(*name)).cloned()
}

/// Returns the path and both values of the first field that differs between two records of one
/// type.
pub fn first_differing_field<T: Serialize>(
    name: &str,
    one: &T,
    other: &T,
) -> Option<(String, [String; 2])> {
    let [one, other] = [one, other].map(|of| serde_json::to_value(of).unwrap_or_default());
    let (field, value) = one.as_object()?.iter().find(|(field, value)| other[*field] != **value)?;
    Some((format!("{name}.{field}"), [value.to_string(), other[field].to_string()]))
}

impl Serialize for GateCalibration {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        let places: BTreeMap<&String, usize> = self.launch_ns_by_case.keys().zip(0..).collect();
        let place = |case: String| places.get(&case).map_or(case, |place| format!("#{place}"));
        let named = self.comparisons.iter().cloned();
        let comparisons = named.map(|comparison| comparison.with_renamed_cases(&place)).collect();
        Self::serialize(&Self { comparisons, ..self.clone() }, output)
    }
}

impl<'de> Deserialize<'de> for GateCalibration {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let mut read = Self::deserialize(input)?;
        let cases: Vec<String> = read.launch_ns_by_case.keys().cloned().collect();
        let case = |name: String| {
            let place: Option<usize> = name.strip_prefix('#').and_then(|it| it.parse().ok());
            let place = place.and_then(|place| cases.get(place));
            place.cloned().unwrap_or(name)
        };
        let numbered = std::mem::take(&mut read.comparisons).into_iter();
        read.comparisons =
            numbered.map(|comparison| comparison.with_renamed_cases(&case)).collect();
        Ok(read)
    }
}

impl RecordFileType for GateCalibration {
    const SCHEMA: &'static str = "kernelgate-calibration";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_READABLE_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "calibration";
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] = &["first", "second"];
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] =
        &["anchors", "broken", "commands", "failed", "identity", "left_out"];

    fn check_record_plausible(&self) -> Result<(), String> {
        text::check_is_rfc3339_time(&self.first_comparison_start_time)
            .map_err(|problem| format!("started: {problem}"))?;
        self.environment.check_environment_plausible()?;
        check_test_plan_ranges(&self.plan)?;
        check_value_in_range("budget_s", self.round_budget_s, 0.0..1e12)?;
        self.sampling.check_sampling_plan_plausible()?;
        self.anchor_rate_tolerance
            .map_or(Ok(()), |it| check_value_in_range("anchor_tolerance", it, 0.0..1e3))?;
        self.shard_identity
            .as_ref()
            .map_or(Ok(()), |part| part.shard.check_shard_index_and_count())?;
        for (case, time_ns) in &self.launch_ns_by_case {
            plausibility::check_launch_ns_plausible(&format!("case {case}: a time"), *time_ns)?;
        }
        if let Some(recommended) = &self.recommended {
            recommended.check_recommendation_fits_plan(&self.plan)?;
        }
        for comparison in &self.comparisons {
            comparison.check_comparison_plausibility()?;
        }
        Ok(())
    }
}

/// Returns a map whose keys are case ids with the case ids replaced through a function.
fn map_with_renamed_cases<T>(
    map: BTreeMap<String, T>,
    name: &impl Fn(String) -> String,
) -> BTreeMap<String, T> {
    map.into_iter().map(|(key, value)| (name(key), value)).collect()
}

impl CalibrationComparisonRecord {
    /// Returns the comparison with its case ids replaced through a function: by their indices for
    /// the file, or back.
    fn with_renamed_cases(self, name: &impl Fn(String) -> String) -> Self {
        Self {
            injected_delays_ns: map_with_renamed_cases(self.injected_delays_ns, name),
            verdicts: map_with_renamed_cases(self.verdicts, name),
            inconclusive_reasons_by_case: map_with_renamed_cases(
                self.inconclusive_reasons_by_case,
                name,
            ),
            failed_cases_with_reason: map_with_renamed_cases(self.failed_cases_with_reason, name),
            first_round_times: map_with_renamed_cases(self.first_round_times, name),
            second_round_times: map_with_renamed_cases(self.second_round_times, name),
            ..self
        }
    }

    /// Checks that the numbers of a comparison that was read from a file are plausible.
    fn check_comparison_plausibility(&self) -> Result<(), String> {
        text::check_is_rfc3339_time(&self.comparison_start_time)
            .map_err(|problem| format!("started: {problem}"))?;
        plausibility::check_wall_seconds_plausible(
            "wall_s of a comparison",
            self.comparison_wall_s,
        )?;
        plausibility::check_count_plausible("processes", self.process_count as u64)?;
        self.anchors.as_ref().map_or(Ok(()), ShardAnchorRecord::check_anchor_rates_plausible)?;
        if let Some(percent) = self.kind.injected_slowdown_percent()
            && !(percent > 0.0 && percent < 1e4)
        {
            return Err(format!("an injected slow-down of {percent} %"));
        }
        for (case, delay_ns) in &self.injected_delays_ns {
            plausibility::check_host_launch_ns_plausible(*delay_ns)
                .map_err(|why| format!("case {case}: {why}"))?;
        }
        let mut all = self.first_round_times.iter().chain(&self.second_round_times);
        all.try_for_each(|(case, series)| {
            series.check_column_lengths_and_values().map_err(|why| format!("case {case}: {why}"))
        })
    }
}

impl CaseBlocksAsColumns {
    /// Checks that each side has two timings per block, and that each number is plausible.
    pub fn check_column_lengths_and_values(&self) -> Result<(), String> {
        let entries = 2 * self.leading_side_letters.chars().count();
        [&self.base, &self.head]
            .iter()
            .try_for_each(|column| column.check_column_length_and_values(entries))
    }
}

impl CaseTimingColumns {
    fn check_column_length_and_values(&self, entries: usize) -> Result<(), String> {
        let optional = [&self.clock_cycles, &self.cpu_contention_shares];
        let mut lengths = optional.iter().map(|values| values.len());
        if self.process_times_ns.len() != entries
            || !lengths.all(|length| [0, 1, entries].contains(&length))
        {
            return Err("columns of different length".to_owned());
        }
        self.process_times_ns
            .iter()
            .try_for_each(|ns| plausibility::check_launch_ns_plausible("a time", *ns))?;
        self.clock_cycles
            .iter()
            .flatten()
            .try_for_each(|cycles| plausibility::check_cycles_per_launch_plausible(*cycles))?;
        let mut shares = self.cpu_contention_shares.iter().flatten();
        shares.try_for_each(|share| plausibility::check_share_plausible("contention", *share))
    }
}

#[cfg(test)]
pub(super) mod tests;
