//! Calibration of the paired decision on a device: comparisons whose answer is known, with all
//! their times.
//!
//! *Null* comparisons have the same executable on both sides. All other kinds change the head of
//! such a comparison. *Layout* comparisons have code and memory at other addresses. *Injected*
//! comparisons delay the head's launches by a share of their time; *work* comparisons do so by
//! passes over memory; *single* comparisons delay one case alone. *Sham* comparisons run artificial
//! load beside the head's processes only. This module neither runs comparisons
//! (`compare::calibrate` does) nor prints.

pub mod anchors;
pub mod recommend;
pub mod summary;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Verdict;
use super::paired::{Arm, BlocksByCase, CaseTiming, TestPlan, TrialBlock};
pub use anchors::anchor_tolerance;
use kernelgate::measure::anchors::AnchorRecord;
use kernelgate::measure::plausibility;
use kernelgate::record::file::RecordType;
use kernelgate::record::json_columns;
use kernelgate::record::text;
use kernelgate::record::{Environment, Provenance, Shard, TrialSampling};
pub use recommend::{RecommendedThresholds, recommend};
pub use summary::{CalibrationSummary, summarise_calibration};

/// Largest number of blocks that a comparison may have.
const MAX_BLOCKS: usize = 10_000;

/// The known answer of a calibration's comparison.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparisonKind {
    /// Both builds are identical, so no case is slower.
    Null,
    /// The two builds are identical; the host or the GPU had co-running load during the head's
    /// processes.
    Sham,
    /// The two builds are identical, but the head's code and memory lay at other addresses.
    Layout,
    /// Every launch of the head is delayed by this percentage of the case's time.
    Injected(f64),
    /// Every case of the head is slowed by this percentage through extra work instead of a wait.
    Work(f64),
    /// Only one case of the head is delayed, by this percentage of its time.
    Single(f64),
}

impl ComparisonKind {
    /// Name of the kind: "A/A", "sham load", "5 % slower".
    pub fn name(self) -> String {
        match self {
            Self::Null => "A/A".to_owned(),
            Self::Sham => "sham load".to_owned(),
            Self::Layout => "other layout".to_owned(),
            Self::Injected(percent) => format!("{percent} % slower"),
            Self::Work(percent) => format!("{percent} % more work"),
            Self::Single(percent) => format!("one case {percent} % slower"),
        }
    }

    /// Injected slow-down of the head, per cent; `None` if nothing was injected.
    pub const fn injected_percent(self) -> Option<f64> {
        match self {
            Self::Null | Self::Sham | Self::Layout => None,
            Self::Injected(percent) | Self::Work(percent) | Self::Single(percent) => Some(percent),
        }
    }
}

/// Comparisons with a known answer on one device, of one executable, with one plan.
///
/// In a file the comparisons name a case by its place in `cases`: `#0` is the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct Calibration {
    /// Start time of the first comparison, RFC 3339, UTC.
    pub started: String,
    /// Device and build.
    pub environment: Environment,
    /// Code of the package.
    pub provenance: Provenance,
    /// Facts that comparisons of one calibration share, by name: executables, settings.
    pub identity: BTreeMap<String, String>,
    /// The command lines with which the calibration was measured.
    pub commands: BTreeSet<String>,
    /// Test plan of each comparison: thresholds and numbers of blocks.
    pub plan: TestPlan,
    /// Largest wall time of a round, seconds.
    pub budget_s: f64,
    /// Duration for which each process timed a case.
    pub sampling: TrialSampling,
    /// Nanoseconds per launch of each case, from the process that verified it or from a later
    /// process.
    pub cases: BTreeMap<String, f64>,
    /// Cases that the calibration did not measure, with the reason.
    pub left_out: BTreeSet<String>,
    /// Cases of benches that use Criterion alone, whose slow-downs are simulated. Benches whose
    /// launches cannot be delayed: the injected delay was added to their times instead.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub simulated: BTreeSet<String>,
    /// The shard of the calibration that this file holds; absent for a whole calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<CalibrationPart>,
    /// Largest relative difference of the anchor rates of two cards of this model whose shards may
    /// be merged, [`anchor_tolerance()`]; absent if the default applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchor_tolerance: Option<f64>,
    /// Thresholds that [`recommend()`] derived when the file was written.
    pub recommended: Option<RecommendedThresholds>,
    /// All comparisons of the calibration in order of time. Comparisons name a case by its index in
    /// the map `cases`: `#0` is the first.
    pub comparisons: Vec<CalibrationComparison>,
}

/// The record of one shard of a calibration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationPart {
    /// The shard.
    pub shard: Shard,
    /// Hash of all comparisons of the calibration: equal in all parts.
    pub plan: String,
    /// Comparisons of this part.
    pub comparisons: usize,
}

/// One comparison of a calibration, whose correct answer is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationComparison {
    /// The change that was made to the head, if any, from which the right answer follows.
    pub kind: ComparisonKind,
    /// Number of the comparison within its kind, from 0, over all shards.
    pub number: usize,
    /// Start time of the comparison, RFC 3339, UTC.
    pub started: String,
    /// Wall time, seconds.
    pub wall_s: f64,
    /// Number of processes.
    pub processes: usize,
    /// Nanoseconds added to each launch of the head, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub delays_ns: BTreeMap<String, f64>,
    /// Verdicts that the gate gave when the comparison was made.
    pub verdicts: BTreeMap<String, Verdict>,
    /// Reasons why cases were inconclusive, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<String, String>,
    /// Cases that could not be run, or not measured to the end, with the reason: for example, the
    /// device cannot make the delay.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed: BTreeMap<String, String>,
    /// Processes that failed, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub broken: Vec<String>,
    /// All times of the comparison's first round, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "json_columns")]
    pub first: BTreeMap<String, BlockSeries>,
    /// All times of the confirming second round, by case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "json_columns")]
    pub second: BTreeMap<String, BlockSeries>,
    /// Name of the card or host on which the comparison ran.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub card: String,
    /// Rates of fixed work on that device, measured just before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchors: Option<AnchorRecord>,
}

/// Blocks of a case as columns: two entries a block, in time order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockSeries {
    /// One letter for each block, for the arm that ran first: `b` if the base led, `h` if the head
    /// did.
    pub leaders: String,
    /// Timings of the base build's processes.
    pub base: TrialColumn,
    /// Timings of the head build's processes.
    pub head: TrialColumn,
    /// [`CaseTiming::averaged`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub averaged: bool,
}

/// Timings of one case in the processes of one side.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrialColumn {
    /// [`CaseTiming::time_ns`].
    pub time_ns: Vec<f64>,
    /// Values of [`CaseTiming::cycles`]; empty if no process has them, a single value if it is the
    /// same for all processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cycles: Vec<Option<f64>>,
    /// Values of [`CaseTiming::contention`]; empty if no process has them, a single value if it is
    /// the same for all processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contention: Vec<Option<f64>>,
    /// Indices of the processes that ran at the power cap, [`CaseTiming::at_cap`].
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub at_cap: BTreeSet<usize>,
    /// Indices of the processes for which [`CaseTiming::throttled`] is set.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub throttled: BTreeSet<usize>,
}

impl TrialColumn {
    fn from_timings<'a>(observations: impl Iterator<Item = &'a CaseTiming>) -> TrialColumn {
        let observations: Vec<&CaseTiming> = observations.collect();
        let optional_column = |value: &dyn Fn(&CaseTiming) -> Option<f64>| -> Vec<Option<f64>> {
            let values: Vec<Option<f64>> = observations.iter().map(|found| value(found)).collect();
            let has_values = values.iter().any(Option::is_some);
            match values.first().filter(|first| values.iter().all(|value| value == *first)) {
                Some(first) if has_values => vec![*first],
                _ if has_values => values,
                _ => Vec::new(),
            }
        };
        // Six digits are less than a hundredth of the noise; more would only make the file larger.
        let indices = |holds: fn(&CaseTiming) -> bool| -> BTreeSet<usize> {
            (0..observations.len()).filter(|&index| holds(observations[index])).collect()
        };
        let six_digits = |value: f64| format!("{value:.5e}").parse().unwrap_or(value);
        let contention = |found: &CaseTiming| found.contention.map(|it| (it * 1e4).round() / 1e4);
        Self {
            time_ns: observations.iter().map(|found| six_digits(found.time_ns)).collect(),
            cycles: optional_column(&|found| found.cycles.map(six_digits)),
            contention: optional_column(&contention),
            at_cap: indices(|found| found.at_cap),
            throttled: indices(|found| found.throttled),
        }
    }

    fn at(&self, index: usize, averaged: bool) -> Option<CaseTiming> {
        let time_ns = *self.time_ns.get(index)?;
        let value_at = |values: &[Option<f64>]| match values {
            [all] => *all,
            each => each.get(index).copied().flatten(),
        };
        let (cycles, contention) = (value_at(&self.cycles), value_at(&self.contention));
        let (at_cap, throttled) = (self.at_cap.contains(&index), self.throttled.contains(&index));
        Some(CaseTiming { time_ns, cycles, contention, at_cap, throttled, averaged })
    }
}

impl BlockSeries {
    /// Stores the blocks of a case as columns.
    pub fn from_blocks(blocks: &[TrialBlock]) -> BlockSeries {
        Self {
            leaders: blocks
                .iter()
                .map(|block| if block.leader == Arm::Base { 'b' } else { 'h' })
                .collect(),
            base: TrialColumn::from_timings(blocks.iter().flat_map(|block| &block.base)),
            head: TrialColumn::from_timings(blocks.iter().flat_map(|block| &block.head)),
            averaged: blocks
                .iter()
                .any(|block| block.base.iter().chain(&block.head).any(|timing| timing.averaged)),
        }
    }

    /// Restores the blocks of trials from the columns.
    pub fn blocks(&self) -> Vec<TrialBlock> {
        let pair = |column: &TrialColumn, block: usize| {
            let at = |index| column.at(index, self.averaged);
            Some([at(2 * block)?, at(2 * block + 1)?])
        };
        let block = |(index, leader): (usize, char)| {
            let leader = if leader == 'b' { Arm::Base } else { Arm::Head };
            Some(TrialBlock {
                leader,
                base: pair(&self.base, index)?,
                head: pair(&self.head, index)?,
            })
        };
        self.leaders.chars().enumerate().map_while(block).collect()
    }
}

impl CalibrationComparison {
    /// Verdicts of the cases that count for the kind: cases that could not be delayed are absent.
    pub fn judged(&self) -> impl Iterator<Item = (&str, Verdict)> {
        self.verdicts.iter().map(|(case, verdict)| (case.as_str(), *verdict))
    }

    /// Returns whether the comparison judged any case as slower.
    pub fn has_regressed_case(&self) -> bool {
        self.judged().any(|(_, verdict)| verdict == Verdict::Regressed)
    }

    /// Returns whether the comparison judged a case as slower although its code is unchanged.
    pub fn is_false_alarm(&self) -> bool {
        let slower = |(case, verdict): (&str, Verdict)| {
            verdict == Verdict::Regressed && !self.delays_ns.contains_key(case)
        };
        self.judged().any(slower)
    }

    /// Blocks of a round, by case, at most `most` for each case.
    pub fn observed(&self, second: bool, most: usize) -> BlocksByCase {
        let series = if second { &self.second } else { &self.first };
        let blocks = |series: &BlockSeries| series.blocks().into_iter().take(most).collect();
        series.iter().map(|(case, series)| (case.clone(), blocks(series))).collect()
    }
}

impl Calibration {
    /// Sentence before the list of cases whose error rates were simulated.
    pub const SIMULATED_CASES_NOTE: &str = "slow-downs are added to the recorded times of these, in which \
                                 nothing can be delayed: ";

    /// Comparisons of one kind.
    pub fn comparisons_of(
        &self,
        kind: ComparisonKind,
    ) -> impl Iterator<Item = &CalibrationComparison> {
        self.comparisons.iter().filter(move |comparison| comparison.kind == kind)
    }

    /// The kinds of the comparisons, in the order of [`ComparisonKind`].
    pub fn kinds(&self) -> Vec<ComparisonKind> {
        let mut kinds: Vec<_> = self.comparisons.iter().map(|comparison| comparison.kind).collect();
        kinds.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        kinds.dedup();
        kinds
    }

    /// Returns the injected slow-downs, per cent, in ascending order.
    pub fn injected_percents(&self) -> Vec<f64> {
        let mut percents: Vec<f64> =
            self.kinds().into_iter().filter_map(ComparisonKind::injected_percent).collect();
        percents.sort_by(f64::total_cmp);
        percents.dedup();
        percents
    }

    /// Returns whether all comparisons of the calibration's shard were made.
    pub fn is_complete(&self) -> bool {
        self.part.as_ref().is_none_or(|part| self.comparisons.len() >= part.comparisons)
    }

    /// The first fact because of which two calibrations cannot be merged: its name and both values.
    pub fn mismatch(&self, other: &Self) -> Option<(String, [String; 2])> {
        if let Some(mismatch) = other.environment.mismatches(&self.environment).into_iter().next() {
            return Some((mismatch.field.to_owned(), [mismatch.base, mismatch.head]));
        }
        let shared = |of: &Self| {
            // Two cards of one machine may share a calibration, so the identity excludes the
            // card.
            let own = of.identity.iter().filter(|(name, _)| *name != "KERNELGATE_DEVICE");
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
            let cases: Vec<&str> = of.cases.keys().map(String::as_str).collect();
            [("cases", cases.join(", "))]
        };
        let parts = self.part.as_ref().zip(other.part.as_ref());
        let of_parts = parts.map(|(one, other)| {
            [one, other].map(|part| {
                [("number of shards", part.shard.count.to_string()), ("plan", part.plan.clone())]
            })
        });
        let of_parts = of_parts.into_iter().flat_map(|[one, other]| one.into_iter().zip(other));
        let mut both = facts(self).into_iter().zip(facts(other)).chain(of_parts);
        let ((field, left), (_, right)) = both.find(|(one, other)| one != other)?;
        Some((field.to_owned(), [left, right]))
    }

    /// Merges the comparisons of another calibration; a comparison that is already present is
    /// counted once.
    pub fn merge(&mut self, other: Self) -> Result<(), String> {
        if let Some((field, [left, right])) = self.mismatch(&other) {
            return Err(format!("{field} is `{left}` and `{right}`"));
        }
        self.add(other);
        Ok(())
    }

    /// Adds the comparisons of another part of this calibration, which [`Self::mismatch`] accepted.
    pub fn add(&mut self, other: Self) {
        if self.part != other.part {
            self.part = None;
        }
        for comparison in other.comparisons {
            if !self.comparisons.contains(&comparison) {
                self.comparisons.push(comparison);
            }
        }
        self.comparisons.sort_by(|a, b| a.started.cmp(&b.started));
        self.commands.extend(other.commands);
        self.left_out.extend(other.left_out);
        self.simulated.extend(other.simulated);
        self.started = self.started.clone().min(other.started);
        // Recommendations are derived from all comparisons, so they are removed and computed anew.
        self.recommended = None;
    }

    /// Derives the thresholds for `compare` and the tolerance for `merge` from the comparisons.
    pub fn derive_thresholds(&mut self) {
        self.recommended = Some(recommend(self));
        self.anchor_tolerance = anchor_tolerance(&self.comparisons).or(self.anchor_tolerance);
    }
}

/// Checks that a number of a field is in the range of possible values.
fn in_range(field: &str, value: f64, range: std::ops::Range<f64>) -> Result<(), String> {
    if range.contains(&value) { Ok(()) } else { Err(format!("{field} is {value}")) }
}

/// Checks that the numbers of a test plan are in range.
pub(super) fn check_plan(plan: &TestPlan) -> Result<(), String> {
    for (field, value) in [
        ("plan.relative", plan.relative),
        ("plan.absolute_ns", plan.absolute_ns),
        ("plan.tolerated", plan.tolerated),
        ("plan.contention", plan.contention),
        ("plan.contention_weight", plan.contention_weight),
    ] {
        in_range(field, value, 0.0..1e12)?;
    }
    for (field, value) in [
        ("plan.false_alarms", plan.false_alarms),
        ("plan.missed", plan.missed),
        ("plan.power", plan.power),
    ] {
        in_range(field, value, f64::MIN_POSITIVE..1.0)?;
    }
    for (field, blocks) in
        [("plan.settle_blocks", plan.settle_blocks), ("plan.max_blocks", plan.max_blocks)]
    {
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(format!("{field} is {blocks}"));
        }
    }
    Ok(())
}

/// Returns the first name whose values differ between two maps.
pub fn first_differing_name(
    a: &BTreeMap<String, String>,
    b: &BTreeMap<String, String>,
) -> Option<String> {
    a.keys().chain(b.keys()).find(|name| a.get(*name) != b.get(*name)).cloned()
}

/// The first field that differs between two records of one type: its path and both values.
pub fn first_differing_field<T: Serialize>(
    name: &str,
    one: &T,
    other: &T,
) -> Option<(String, [String; 2])> {
    let [one, other] = [one, other].map(|of| serde_json::to_value(of).unwrap_or_default());
    let (field, value) = one.as_object()?.iter().find(|(field, value)| other[*field] != **value)?;
    Some((format!("{name}.{field}"), [value.to_string(), other[field].to_string()]))
}

impl Serialize for Calibration {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        let places: BTreeMap<&String, usize> = self.cases.keys().zip(0..).collect();
        let place = |case: String| places.get(&case).map_or(case, |place| format!("#{place}"));
        let named = self.comparisons.iter().cloned();
        let comparisons = named.map(|comparison| comparison.rename(&place)).collect();
        Self::serialize(&Self { comparisons, ..self.clone() }, output)
    }
}

impl<'de> Deserialize<'de> for Calibration {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let mut read = Self::deserialize(input)?;
        let cases: Vec<String> = read.cases.keys().cloned().collect();
        let case = |name: String| {
            let place: Option<usize> = name.strip_prefix('#').and_then(|it| it.parse().ok());
            let place = place.and_then(|place| cases.get(place));
            place.cloned().unwrap_or(name)
        };
        let numbered = std::mem::take(&mut read.comparisons).into_iter();
        read.comparisons = numbered.map(|comparison| comparison.rename(&case)).collect();
        Ok(read)
    }
}

impl RecordType for Calibration {
    const SCHEMA: &'static str = "kernelgate-calibration";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "calibration";
    const ONE_LINE_FIELDS: &'static [&'static str] = &["first", "second"];
    const FREE_TEXT_FIELDS: &'static [&'static str] =
        &["anchors", "broken", "commands", "failed", "identity", "left_out"];

    fn validate(&self) -> Result<(), String> {
        text::check_rfc3339_time(&self.started).map_err(|problem| format!("started: {problem}"))?;
        self.environment.validate()?;
        check_plan(&self.plan)?;
        in_range("budget_s", self.budget_s, 0.0..1e12)?;
        self.sampling.validate()?;
        self.anchor_tolerance.map_or(Ok(()), |it| in_range("anchor_tolerance", it, 0.0..1e3))?;
        self.part.as_ref().map_or(Ok(()), |part| part.shard.validate())?;
        for (case, time_ns) in &self.cases {
            plausibility::check_launch_ns(&format!("case {case}: a time"), *time_ns)?;
        }
        if let Some(recommended) = &self.recommended {
            recommended.validate(&self.plan)?;
        }
        for comparison in &self.comparisons {
            comparison.validate()?;
        }
        Ok(())
    }
}

/// Returns a map with its keys renamed.
fn renamed_cases<T>(
    map: BTreeMap<String, T>,
    name: &impl Fn(String) -> String,
) -> BTreeMap<String, T> {
    map.into_iter().map(|(key, value)| (name(key), value)).collect()
}

impl CalibrationComparison {
    /// Returns the comparison with its cases renamed.
    fn rename(self, name: &impl Fn(String) -> String) -> Self {
        Self {
            delays_ns: renamed_cases(self.delays_ns, name),
            verdicts: renamed_cases(self.verdicts, name),
            reasons: renamed_cases(self.reasons, name),
            failed: renamed_cases(self.failed, name),
            first: renamed_cases(self.first, name),
            second: renamed_cases(self.second, name),
            ..self
        }
    }

    /// Checks that the numbers of a comparison are plausible.
    fn validate(&self) -> Result<(), String> {
        text::check_rfc3339_time(&self.started).map_err(|problem| format!("started: {problem}"))?;
        plausibility::check_seconds("wall_s of a comparison", self.wall_s)?;
        plausibility::check_count("processes", self.processes as u64)?;
        self.anchors.as_ref().map_or(Ok(()), AnchorRecord::validate)?;
        if let Some(percent) = self.kind.injected_percent()
            && !(percent > 0.0 && percent < 1e4)
        {
            return Err(format!("an injected slow-down of {percent} %"));
        }
        for (case, delay_ns) in &self.delays_ns {
            plausibility::check_host_ns(*delay_ns).map_err(|why| format!("case {case}: {why}"))?;
        }
        let mut all = self.first.iter().chain(&self.second);
        all.try_for_each(|(case, series)| {
            series.validate().map_err(|why| format!("case {case}: {why}"))
        })
    }
}

impl BlockSeries {
    /// Checks that there are two values for each block on each side, and that each number is
    /// plausible.
    pub fn validate(&self) -> Result<(), String> {
        let entries = 2 * self.leaders.chars().count();
        [&self.base, &self.head].iter().try_for_each(|column| column.validate(entries))
    }
}

impl TrialColumn {
    fn validate(&self, entries: usize) -> Result<(), String> {
        let optional = [&self.cycles, &self.contention];
        let mut lengths = optional.iter().map(|values| values.len());
        if self.time_ns.len() != entries || !lengths.all(|length| [0, 1, entries].contains(&length))
        {
            return Err("columns of different length".to_owned());
        }
        self.time_ns.iter().try_for_each(|ns| plausibility::check_launch_ns("a time", *ns))?;
        self.cycles.iter().flatten().try_for_each(|cycles| plausibility::check_cycles(*cycles))?;
        let mut shares = self.contention.iter().flatten();
        shares.try_for_each(|share| plausibility::check_share("contention", *share))
    }
}

#[cfg(test)]
pub(super) mod tests;
