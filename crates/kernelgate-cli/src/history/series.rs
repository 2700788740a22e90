//! Computes the history of a case's time over commits on one device, and the commits at which its
//! level changed.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::CaseHistoryError;
use super::case_index::HistoryStoreIndex;
use super::commit_order::GitCommitOrder;
use super::indexed_run::ProcessRunInIndex;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::record::{CargoPackageId, CommitAndChanges};
use kernelgate::stats::change_points::MAX_VALUES_TO_SEARCH_LEVEL_CHANGES;
use kernelgate::stats::{detect_level_changes, median};

/// Default of the smallest relative change of a time level that the history reports; it equals the
/// threshold of `compare`.
pub const MIN_REPORTED_LEVEL_CHANGE: f64 = 0.01;
/// Smallest relative noise that the search for level changes assumes, because recorded medians are
/// rounded.
const MIN_ASSUMED_RELATIVE_NOISE: f64 = 0.001;
/// A detected level change at most this many runs away from the first run of a commit is attributed
/// to that commit, because an outlier can shift it.
const MAX_RUNS_FROM_CHANGE_TO_COMMIT: usize = 2;

/// Query that selects which case histories are computed from a history store.
#[derive(Debug)]
pub struct CaseHistoryQuery<'a> {
    /// The package whose runs are shown, together with runs without a recorded package; `None` for
    /// all packages.
    pub package: Option<&'a CargoPackageId>,
    /// Filter that selects cases by their current ids.
    pub cases: &'a CaseIdFilter,
    /// Current ids of renamed cases, by their earlier ids.
    pub current_ids_of_renamed_cases: &'a BTreeMap<String, String>,
    /// Whether the times of all cards of one model form one history.
    pub joins_cards_of_model: bool,
    /// Whether to exclude runs of commits that are not in the commit order.
    pub only_known_commits: bool,
    /// Smallest relative change of the time level that is reported.
    pub min_relative_level_change: f64,
}

/// The recorded times of one case on one device over commits, with the changes of their level.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseTimeHistory {
    /// Current id of the case, after all renames.
    #[serde(rename = "case")]
    pub current_case_id: String,
    /// Name of the package whose case it is; `None` if the runs of the case record no package.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "package")]
    pub package_name: Option<String>,
    /// Earlier ids of the case under which runs are recorded.
    #[serde(rename = "formerly")]
    pub earlier_ids: BTreeSet<String>,
    /// Revision of the case's definition; times of different revisions form separate histories.
    #[serde(rename = "revision")]
    pub definition_revision: u32,
    /// Fingerprint of the environments whose times this history contains.
    #[serde(rename = "fingerprint")]
    pub environment_fingerprint: String,
    /// The card or host; `None` if the times of all cards of a model are joined.
    #[serde(rename = "card")]
    pub card_or_host_id: Option<String>,
    /// Description of the device, from the most recent run.
    pub device: String,
    /// Times of the case in the order of the commits, one point for each commit.
    pub points: Vec<HistoryPointOfCommit>,
    /// Changes of the case's time level, the oldest first.
    pub changes: Vec<TimeLevelChange>,
    /// Number of process runs that are ordered by their start time, because their commit is not in
    /// the commit order.
    #[serde(rename = "placed_by_time")]
    pub runs_ordered_by_time: usize,
    /// Number of the oldest process runs that were not searched for level changes, because there
    /// are too many runs.
    #[serde(rename = "not_searched")]
    pub runs_not_searched_for_changes: usize,
}

/// Consecutive process runs of one commit, which a chart draws as one point.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HistoryPointOfCommit {
    /// Commit of the code that a process run measured.
    #[serde(rename = "commit")]
    pub measured_commit: Option<String>,
    /// Whether tracked files of the measured code differed from the commit.
    #[serde(rename = "dirty")]
    pub differs_from_commit: bool,
    /// Start of the commit's first process run, milliseconds since 1970.
    #[serde(rename = "started_ms")]
    pub first_process_start_unix_ms: i64,
    /// Median over the commit's process runs of their median times, nanoseconds per launch.
    #[serde(rename = "median_ns")]
    pub median_launch_ns: f64,
    /// Smallest median time among the commit's process runs, nanoseconds per launch.
    #[serde(rename = "low_ns")]
    pub smallest_run_median_ns: f64,
    /// Largest median time among the commit's process runs, nanoseconds per launch.
    #[serde(rename = "high_ns")]
    pub largest_run_median_ns: f64,
    /// Median time of each of the commit's process runs in time order, nanoseconds per launch.
    #[serde(rename = "runs_ns")]
    pub run_medians_ns: Vec<f64>,
}

impl HistoryPointOfCommit {
    /// Returns the commit that the point's process runs measured, and whether files differed from
    /// the commit.
    pub fn measured_code(&self) -> CommitAndChanges {
        CommitAndChanges { commit: self.measured_commit.clone(), dirty: self.differs_from_commit }
    }
}

/// A lasting change of the level of a case's times in its history.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimeLevelChange {
    /// Index in [`CaseTimeHistory::points`] of the first point after the level change.
    #[serde(rename = "point")]
    pub first_point_after: usize,
    /// The last measured commit before the level change.
    #[serde(rename = "after")]
    pub last_commit_before_change: Option<String>,
    /// The first measured commit after the level change; equal to `last_commit_before_change` if
    /// the level changed between runs of one build.
    #[serde(rename = "up_to")]
    pub first_commit_after_change: Option<String>,
    /// The commits that may have caused the level change, the oldest first; empty if no commit can
    /// be the cause.
    #[serde(rename = "commits")]
    pub possible_cause_commits: Vec<String>,
    /// Relative change of the time level: 0.05 means 5 % slower.
    #[serde(rename = "change")]
    pub relative_level_change: f64,
    /// Lower end of the 95 % confidence interval of the relative change.
    #[serde(rename = "low")]
    pub relative_change_low: f64,
    /// Upper end of the 95 % confidence interval of the relative change.
    #[serde(rename = "high")]
    pub relative_change_high: f64,
    /// Equals [`kernelgate::stats::DetectedLevelChange::rank_sum_confidence`].
    #[serde(rename = "confidence")]
    pub level_change_confidence: f64,
    /// Whether the level changed between runs of one build, which shows that the machine changed
    /// and not the code.
    #[serde(rename = "same_build")]
    pub changed_within_one_build: bool,
}

/// The time of a case in the history index, with its process run.
#[derive(Clone, Copy)]
struct IndexedTimeOfCase<'a> {
    /// Id of the case at the time of the run, before renames.
    recorded_case_id: &'a str,
    /// Nanoseconds per launch.
    median_launch_ns: f64,
    run: &'a ProcessRunInIndex,
}

/// Key of the times that form one history: case, model, card, revision and package.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct CaseHistoryKey {
    case_id: String,
    environment_fingerprint: String,
    card_or_host_id: Option<String>,
    definition_revision: u32,
    package_name: Option<String>,
}

/// Computes the histories of the selected cases from the index of a history store, sorted by case,
/// then device.
pub fn compute_case_histories(
    index: &HistoryStoreIndex,
    query: &CaseHistoryQuery<'_>,
    order: &GitCommitOrder,
) -> Result<Vec<CaseTimeHistory>, CaseHistoryError> {
    let mut selected: BTreeMap<&str, Option<String>> = BTreeMap::new();
    for name in index.all_indexed_runs().flat_map(|run| run.revision_and_median_ns_by_case.keys()) {
        if !selected.contains_key(name.as_str()) {
            let now = current_case_id(name, query.current_ids_of_renamed_cases)?;
            selected.insert(name, Some(now).filter(|now| query.cases.selects_case_id(now)));
        }
    }
    let own = query.package.map(CargoPackageId::to_string);
    let mut series: BTreeMap<CaseHistoryKey, Vec<IndexedTimeOfCase<'_>>> = BTreeMap::new();
    for run in index.all_indexed_runs() {
        // A run without a recorded package counts as a run of the requested package.
        let package = run.package_name.clone().or_else(|| own.clone());
        if own.is_some() && package != own {
            continue;
        }
        for (name, (revision, median_ns)) in &run.revision_and_median_ns_by_case {
            let Some(case) = &selected[name.as_str()] else { continue };
            let key = CaseHistoryKey {
                case_id: case.clone(),
                environment_fingerprint: run.environment_fingerprint.clone(),
                card_or_host_id: (!query.joins_cards_of_model).then(|| run.card_or_host_id.clone()),
                definition_revision: *revision,
                package_name: package.clone(),
            };
            series.entry(key).or_default().push(IndexedTimeOfCase {
                recorded_case_id: name,
                median_launch_ns: *median_ns,
                run,
            });
        }
    }
    let found = series.into_iter().map(|(key, rows)| {
        let CaseHistoryKey {
            case_id: case,
            environment_fingerprint: fingerprint,
            card_or_host_id: card,
            definition_revision: revision,
            package_name: package,
        } = key;
        let history = CaseTimeHistory {
            current_case_id: case,
            package_name: package,
            earlier_ids: BTreeSet::new(),
            definition_revision: revision,
            environment_fingerprint: fingerprint,
            card_or_host_id: card,
            device: String::new(),
            points: Vec::new(),
            changes: Vec::new(),
            runs_ordered_by_time: 0,
            runs_not_searched_for_changes: 0,
        };
        history.filled_from_indexed_times(&rows, query, order)
    });
    Ok(found.filter(|history| !history.points.is_empty()).collect())
}

/// Returns the current id of a case after all its renames; an error if the renames form a circle.
fn current_case_id(
    name: &str,
    renamed: &BTreeMap<String, String>,
) -> Result<String, CaseHistoryError> {
    let mut now = name;
    for _ in 0..=renamed.len() {
        match renamed.get(now) {
            Some(next) => now = next,
            None => return Ok(now.to_owned()),
        }
    }
    Err(CaseHistoryError::RenameCircle { case: name.to_owned() })
}

impl CaseTimeHistory {
    fn filled_from_indexed_times(
        mut self,
        rows: &[IndexedTimeOfCase<'_>],
        query: &CaseHistoryQuery<'_>,
        order: &GitCommitOrder,
    ) -> Self {
        // One process run may be stored twice, in a run record and in a baseline, and counts once.
        let same = |row: &IndexedTimeOfCase<'_>| {
            let ProcessRunInIndex {
                process_start_unix_ms: started_ms,
                bench_and_shard_name: process,
                provenance,
                ..
            } = row.run;
            (*started_ms, process.clone(), provenance.commit.clone())
        };
        let rows: BTreeMap<_, IndexedTimeOfCase<'_>> =
            rows.iter().map(|row| (same(row), *row)).collect();
        let mut rows: Vec<IndexedTimeOfCase<'_>> = rows.into_values().collect();
        let place_of = |row: &IndexedTimeOfCase<'_>| {
            row.run.provenance.commit.as_deref().and_then(|commit| order.position_of_commit(commit))
        };
        if query.only_known_commits {
            rows.retain(|row| place_of(row).is_some());
        }
        if let Some(last) = rows.iter().max_by_key(|row| row.run.process_start_unix_ms) {
            self.device.clone_from(&last.run.device);
        }
        let names = rows.iter().map(|row| row.recorded_case_id.to_owned());
        self.earlier_ids = names.filter(|name| *name != self.current_case_id).collect();
        let (mut placed, others): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|row| place_of(row).is_some());
        placed.sort_by_key(|row| {
            (place_of(row), row.run.provenance.dirty, row.run.process_start_unix_ms)
        });
        self.runs_ordered_by_time = others.len();
        let rows = merge_runs_of_unknown_commits(placed, others);
        self.points = group_runs_into_points(&rows);
        self.find_level_changes(query, order);
        self
    }

    fn find_level_changes(&mut self, query: &CaseHistoryQuery<'_>, order: &GitCommitOrder) {
        let medians = self.points.iter().flat_map(|point| &point.run_medians_ns);
        let logarithms: Vec<f64> = medians.map(|ns| ns.ln()).collect();
        self.runs_not_searched_for_changes =
            logarithms.len().saturating_sub(MAX_VALUES_TO_SEARCH_LEVEL_CHANGES);
        let smallest = query.min_relative_level_change.ln_1p();
        let found = detect_level_changes(
            &logarithms[self.runs_not_searched_for_changes..],
            smallest,
            MIN_ASSUMED_RELATIVE_NOISE,
        );
        // For each point of the history, the index of its first run among all runs.
        let mut begins = Vec::new();
        let mut count = 0;
        for point in &self.points {
            begins.push(count);
            count += point.run_medians_ns.len();
        }
        for change in found {
            let at = self.runs_not_searched_for_changes + change.first_index_after_change;
            let nearest = (1..begins.len()).min_by_key(|point| begins[*point].abs_diff(at));
            let between = nearest
                .filter(|point| begins[*point].abs_diff(at) <= MAX_RUNS_FROM_CHANGE_TO_COMMIT);
            let inside = begins.partition_point(|begin| *begin <= at).saturating_sub(1);
            let point = between.unwrap_or(inside);
            let before = &self.points[between.map_or(inside, |point| point - 1)];
            let (after, up_to) =
                (before.measured_commit.clone(), self.points[point].measured_commit.clone());
            let commits = match (&after, &up_to) {
                (Some(after), Some(up_to)) => order.commits_after_up_to(after, up_to).to_vec(),
                _ => Vec::new(),
            };
            self.changes.push(TimeLevelChange {
                first_point_after: point,
                last_commit_before_change: after,
                first_commit_after_change: up_to,
                possible_cause_commits: commits,
                relative_level_change: change.level_shift.exp_m1(),
                relative_change_low: change.shift_lower_bound.exp_m1(),
                relative_change_high: change.shift_upper_bound.exp_m1(),
                level_change_confidence: change.rank_sum_confidence,
                changed_within_one_build: between.is_none(),
            });
        }
    }
}

/// Merges runs in commit order with runs of unknown commits, each of which is placed before the
/// first run that started later.
fn merge_runs_of_unknown_commits<'a>(
    placed: Vec<IndexedTimeOfCase<'a>>,
    mut others: Vec<IndexedTimeOfCase<'a>>,
) -> Vec<IndexedTimeOfCase<'a>> {
    others.sort_by_key(|row| row.run.process_start_unix_ms);
    let mut others = others.into_iter().peekable();
    let mut rows = Vec::new();
    for row in placed {
        while let Some(other) =
            others.next_if(|other| other.run.process_start_unix_ms < row.run.process_start_unix_ms)
        {
            rows.push(other);
        }
        rows.push(row);
    }
    rows.extend(others);
    rows
}

/// Groups consecutive runs of the same code into points of the history.
fn group_runs_into_points(rows: &[IndexedTimeOfCase<'_>]) -> Vec<HistoryPointOfCommit> {
    let same = |one: &IndexedTimeOfCase<'_>, two: &IndexedTimeOfCase<'_>| {
        one.run.provenance == two.run.provenance
    };
    let each = rows.chunk_by(same).map(|rows| {
        let runs_ns: Vec<f64> = rows.iter().map(|row| row.median_launch_ns).collect();
        let CommitAndChanges { commit, dirty } = rows[0].run.provenance.clone();
        HistoryPointOfCommit {
            measured_commit: commit,
            differs_from_commit: dirty,
            first_process_start_unix_ms: rows
                .iter()
                .map(|row| row.run.process_start_unix_ms)
                .min()
                .unwrap_or_default(),
            median_launch_ns: median(&runs_ns),
            smallest_run_median_ns: runs_ns.iter().copied().fold(f64::INFINITY, f64::min),
            largest_run_median_ns: runs_ns.iter().copied().fold(0.0, f64::max),
            run_medians_ns: runs_ns,
        }
    });
    each.collect()
}

#[cfg(test)]
mod tests;
