//! Times of a case over commits on one device, and the places where its level changed.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::HistoryError;
use super::case_index::HistoryIndex;
use super::commit_order::CommitOrder;
use super::indexed_run::IndexedRun;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::record::{CargoPackage, Provenance};
use kernelgate::stats::change_points::MAX_SEQUENCE_VALUES;
use kernelgate::stats::{change_points, median};

/// Smallest relative change that is reported, as in `compare`'s threshold.
pub const MIN_REPORTED_CHANGE: f64 = 0.01;
/// Smallest relative noise of process medians, because they are rounded.
const MIN_RELATIVE_NOISE: f64 = 0.001;
/// Number of runs by which a detected change may be off its commit: an outlier at the end of a
/// commit's runs looks like a run of the next commit.
const MAX_COMMIT_OFFSET_RUNS: usize = 2;

/// Selects histories.
#[derive(Debug)]
pub struct HistoryQuery<'a> {
    /// The package whose runs count, besides runs without a recorded package; absent for all
    /// packages.
    pub package: Option<&'a CargoPackage>,
    /// Filter that selects cases by their present names.
    pub cases: &'a CaseFilter,
    /// Present names of cases by their earlier names.
    pub renamed: &'a BTreeMap<String, String>,
    /// Whether cards of one model count as one device.
    pub join_cards: bool,
    /// Excludes runs of commits that are not in the commit order.
    pub known_only: bool,
    /// Smallest relative change that is reported.
    pub smallest: f64,
}

/// The recorded times of a case on one device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseHistory {
    /// Present id of the case, after renames.
    pub case: String,
    /// Name of the package, if its runs record one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub package: Option<String>,
    /// Earlier ids of the case, before renames.
    pub formerly: BTreeSet<String>,
    /// Revision of the case's definition: times of different revisions are not comparable.
    pub revision: u32,
    /// Fingerprint of the environments whose times can be compared.
    pub fingerprint: String,
    /// The card or host; `None` if the cards of a model are joined.
    pub card: Option<String>,
    /// Description of the device, from the last run.
    pub device: String,
    /// Times of the case in the order of commits.
    pub points: Vec<HistoryPoint>,
    /// Changes of the case's time level, oldest first.
    pub changes: Vec<LevelChange>,
    /// Process runs that are ordered by their recorded time, because their commit is not in the
    /// history of the revision.
    pub placed_by_time: usize,
    /// Process runs that were excluded from the search for changes: the oldest of very many.
    pub not_searched: usize,
}

/// Consecutive process runs of one commit, drawn as one point.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HistoryPoint {
    /// Commit that was measured.
    pub commit: Option<String>,
    /// Whether tracked files differed from the commit.
    pub dirty: bool,
    /// Start of the first run, milliseconds since 1970.
    pub started_ms: i64,
    /// Median over the process medians, nanoseconds a launch.
    pub median_ns: f64,
    /// The smallest process median.
    pub low_ns: f64,
    /// The largest process median.
    pub high_ns: f64,
    /// Median time of each process run, in time order.
    pub runs_ns: Vec<f64>,
}

impl HistoryPoint {
    /// Code that was measured.
    pub fn code(&self) -> Provenance {
        Provenance { commit: self.commit.clone(), dirty: self.dirty }
    }
}

/// A change of the level of a case's times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LevelChange {
    /// Index in [`CaseHistory::points`] of the first point after the change.
    pub point: usize,
    /// The last commit before the change of the time.
    pub after: Option<String>,
    /// The first commit after the change; equal to `after` if the level changed within the runs of
    /// one build.
    pub up_to: Option<String>,
    /// The commits that may have caused the change, the oldest first; empty if no commit can have
    /// caused it.
    pub commits: Vec<String>,
    /// Relative change of the time at this commit.
    pub change: f64,
    /// Lower end of the 95 % interval of the change.
    pub low: f64,
    /// Upper end of the 95 % interval of the change.
    pub high: f64,
    /// Equals [`kernelgate::stats::ChangePoint::confidence`].
    pub confidence: f64,
    /// Whether one build had times on both levels: then the machine changed, not the code.
    pub same_build: bool,
}

/// A time of a case in the index, with its process run.
#[derive(Clone, Copy)]
struct IndexedTime<'a> {
    /// Id of the case, as the record has it.
    case: &'a str,
    /// Nanoseconds a launch.
    median_ns: f64,
    run: &'a IndexedRun,
}

/// Key of the times that make one series.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct CaseSeriesKey {
    case: String,
    model: String,
    card: Option<String>,
    revision: u32,
    package: Option<String>,
}

/// The histories in a store's index, by case, then device.
pub fn case_histories(
    index: &HistoryIndex,
    query: &HistoryQuery<'_>,
    order: &CommitOrder,
) -> Result<Vec<CaseHistory>, HistoryError> {
    let mut selected: BTreeMap<&str, Option<String>> = BTreeMap::new();
    for name in index.runs().flat_map(|run| run.cases.keys()) {
        if !selected.contains_key(name.as_str()) {
            let now = current_case_name(name, query.renamed)?;
            selected.insert(name, Some(now).filter(|now| query.cases.matches_id(now)));
        }
    }
    let own = query.package.map(CargoPackage::to_string);
    let mut series: BTreeMap<CaseSeriesKey, Vec<IndexedTime<'_>>> = BTreeMap::new();
    for run in index.runs() {
        // A run without a recorded package counts for the requested package.
        let package = run.package.clone().or_else(|| own.clone());
        if own.is_some() && package != own {
            continue;
        }
        for (name, (revision, median_ns)) in &run.cases {
            let Some(case) = &selected[name.as_str()] else { continue };
            let key = CaseSeriesKey {
                case: case.clone(),
                model: run.model.clone(),
                card: (!query.join_cards).then(|| run.card.clone()),
                revision: *revision,
                package: package.clone(),
            };
            series.entry(key).or_default().push(IndexedTime {
                case: name,
                median_ns: *median_ns,
                run,
            });
        }
    }
    let found = series.into_iter().map(|(key, rows)| {
        let CaseSeriesKey { case, model: fingerprint, card, revision, package } = key;
        let history = CaseHistory {
            case,
            package,
            formerly: BTreeSet::new(),
            revision,
            fingerprint,
            card,
            device: String::new(),
            points: Vec::new(),
            changes: Vec::new(),
            placed_by_time: 0,
            not_searched: 0,
        };
        history.with(&rows, query, order)
    });
    Ok(found.filter(|history| !history.points.is_empty()).collect())
}

/// The present name of a case after all its renames.
fn current_case_name(
    name: &str,
    renamed: &BTreeMap<String, String>,
) -> Result<String, HistoryError> {
    let mut now = name;
    for _ in 0..=renamed.len() {
        match renamed.get(now) {
            Some(next) => now = next,
            None => return Ok(now.to_owned()),
        }
    }
    Err(HistoryError::RenameCircle { case: name.to_owned() })
}

impl CaseHistory {
    fn with(
        mut self,
        rows: &[IndexedTime<'_>],
        query: &HistoryQuery<'_>,
        order: &CommitOrder,
    ) -> Self {
        // A process run may be stored in a run record and in a baseline.
        let same = |row: &IndexedTime<'_>| {
            let IndexedRun { started_ms, process, provenance, .. } = row.run;
            (*started_ms, process.clone(), provenance.commit.clone())
        };
        let rows: BTreeMap<_, IndexedTime<'_>> = rows.iter().map(|row| (same(row), *row)).collect();
        let mut rows: Vec<IndexedTime<'_>> = rows.into_values().collect();
        let place_of = |row: &IndexedTime<'_>| {
            row.run.provenance.commit.as_deref().and_then(|commit| order.place(commit))
        };
        if query.known_only {
            rows.retain(|row| place_of(row).is_some());
        }
        if let Some(last) = rows.iter().max_by_key(|row| row.run.started_ms) {
            self.device.clone_from(&last.run.device);
        }
        let names = rows.iter().map(|row| row.case.to_owned());
        self.formerly = names.filter(|name| *name != self.case).collect();
        let (mut placed, others): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|row| place_of(row).is_some());
        placed.sort_by_key(|row| (place_of(row), row.run.provenance.dirty, row.run.started_ms));
        self.placed_by_time = others.len();
        let rows = merge_by_commit(placed, others);
        self.points = points(&rows);
        self.find_changes(query, order);
        self
    }

    fn find_changes(&mut self, query: &HistoryQuery<'_>, order: &CommitOrder) {
        let medians = self.points.iter().flat_map(|point| &point.runs_ns);
        let logarithms: Vec<f64> = medians.map(|ns| ns.ln()).collect();
        self.not_searched = logarithms.len().saturating_sub(MAX_SEQUENCE_VALUES);
        let smallest = query.smallest.ln_1p();
        let found = change_points(&logarithms[self.not_searched..], smallest, MIN_RELATIVE_NOISE);
        // Indices of the first run of each point.
        let mut begins = Vec::new();
        let mut count = 0;
        for point in &self.points {
            begins.push(count);
            count += point.runs_ns.len();
        }
        for change in found {
            let at = self.not_searched + change.at;
            let nearest = (1..begins.len()).min_by_key(|point| begins[*point].abs_diff(at));
            let between =
                nearest.filter(|point| begins[*point].abs_diff(at) <= MAX_COMMIT_OFFSET_RUNS);
            let inside = begins.partition_point(|begin| *begin <= at).saturating_sub(1);
            let point = between.unwrap_or(inside);
            let before = &self.points[between.map_or(inside, |point| point - 1)];
            let (after, up_to) = (before.commit.clone(), self.points[point].commit.clone());
            let commits = match (&after, &up_to) {
                (Some(after), Some(up_to)) => order.between(after, up_to).to_vec(),
                _ => Vec::new(),
            };
            self.changes.push(LevelChange {
                point,
                after,
                up_to,
                commits,
                change: change.shift.exp_m1(),
                low: change.low.exp_m1(),
                high: change.high.exp_m1(),
                confidence: change.confidence,
                same_build: between.is_none(),
            });
        }
    }
}

/// Merges runs in the order of their commits with other runs, each before the first run that
/// started later.
fn merge_by_commit<'a>(
    placed: Vec<IndexedTime<'a>>,
    mut others: Vec<IndexedTime<'a>>,
) -> Vec<IndexedTime<'a>> {
    others.sort_by_key(|row| row.run.started_ms);
    let mut others = others.into_iter().peekable();
    let mut rows = Vec::new();
    for row in placed {
        while let Some(other) = others.next_if(|other| other.run.started_ms < row.run.started_ms) {
            rows.push(other);
        }
        rows.push(row);
    }
    rows.extend(others);
    rows
}

/// Groups consecutive runs of the same code.
fn points(rows: &[IndexedTime<'_>]) -> Vec<HistoryPoint> {
    let same =
        |one: &IndexedTime<'_>, two: &IndexedTime<'_>| one.run.provenance == two.run.provenance;
    let each = rows.chunk_by(same).map(|rows| {
        let runs_ns: Vec<f64> = rows.iter().map(|row| row.median_ns).collect();
        let Provenance { commit, dirty } = rows[0].run.provenance.clone();
        HistoryPoint {
            commit,
            dirty,
            started_ms: rows.iter().map(|row| row.run.started_ms).min().unwrap_or_default(),
            median_ns: median(&runs_ns),
            low_ns: runs_ns.iter().copied().fold(f64::INFINITY, f64::min),
            high_ns: runs_ns.iter().copied().fold(0.0, f64::max),
            runs_ns,
        }
    });
    each.collect()
}

#[cfg(test)]
mod tests;
