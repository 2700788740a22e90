//! Which cases to run: the selection of an effort, narrowed by the filter; ids are unique by
//! construction.

use std::collections::BTreeSet;

use super::backend_choice::BenchPlace;
use super::filter::CaseFilter;
use crate::backend::BackendKind;
use crate::harness::error::{HarnessError, MAX_COMPARED_TEXT_CHARACTERS};
use crate::harness::panic_guard;
use crate::measure::CacheState;
use crate::measure::limits::CaseWork;
use crate::record::{BenchShardPlan, ShardPartition, WorkRecord};
use crate::suite::{BoundProblem, ImplementationInfo, Suite};
use crate::workload::{AxisError, AxisOverride, DefaultScale, Effort, Point};

/// Smallest number of bytes at which hot and cold caches are alike, so that no cold case exists: a
/// launch finds little of the previous launch's data. On a GPU with a larger L2 it is a multiple of
/// the L2's size.
const BEYOND_CACHES_BYTES: u64 = 256 << 20;
const MULTIPLE_OF_L2: u64 = 4;

/// A problem with those of its implementations that were selected.
pub struct ProblemGroup<'a> {
    /// The suite that the group's problem belongs to, with its implementations.
    pub suite: &'a Suite,
    /// The problem's axes.
    pub point: Point,
    /// The problem.
    pub bound: Box<dyn BoundProblem>,
    /// Selected cases whose implementation can compute the problem.
    pub cases: Vec<SelectedCase>,
}

impl ProblemGroup<'_> {
    /// `workload/problem`: Criterion's group.
    pub fn id(&self) -> String {
        format!("{}/{}", self.suite.name(), self.point)
    }

    /// Declared work of each selected case.
    pub fn declared_works(&self) -> impl Iterator<Item = CaseWork> {
        let work = self.bound.problem().work();
        self.cases.iter().map(move |case| CaseWork { work: work.clone(), cache: case.cache })
    }
}

/// One selected case: an implementation of the group's problem in one cache state.
pub struct SelectedCase {
    /// Index of the selected case's implementation in its suite.
    pub index: usize,
    /// The implementation.
    pub row: ImplementationInfo,
    /// State of the caches in which the case is timed.
    pub cache: CacheState,
    /// Whole id: `workload/problem/implementation/cache`.
    pub id: String,
}

impl SelectedCase {
    /// `implementation/cache`: Name of the case's function in Criterion's benchmark group.
    pub fn criterion_function_name(&self) -> String {
        format!("{}/{}", self.row.name, self.cache.name())
    }
}

/// Result of a selection.
#[derive(Default)]
pub struct CaseSelectionResult<'a> {
    /// Problems with at least one case to run.
    pub groups: Vec<ProblemGroup<'a>>,
    /// Ids of cases that cannot run on this machine, each with the reason.
    pub skipped: Vec<(String, String)>,
    /// Skipped cases that no machine can run, because their implementation does not compute the
    /// problem.
    pub unsupported: BTreeSet<String>,
    /// Plan of all shards, if the selected cases are one shard.
    pub plan: Option<BenchShardPlan>,
}

impl CaseSelectionResult<'_> {
    /// Cases to run.
    pub fn case_count(&self) -> usize {
        self.groups.iter().map(|group| group.cases.len()).sum()
    }

    /// Summarises how `partition` divides the selected cases among shards.
    pub fn plan(&self, bench: &str, partition: &ShardPartition) -> BenchShardPlan {
        let problems = self
            .groups
            .iter()
            .map(|group| (group.id(), group.cases.iter().map(|case| case.id.as_str()).collect()));
        partition.plan_of_problems(bench, problems)
    }

    /// Reverses the order of the problems, and of the cases of each.
    pub fn reverse_cases(&mut self) {
        self.groups.reverse();
        self.groups.iter_mut().for_each(|group| group.cases.reverse());
    }

    /// Moves the cases in `first` to the front: first the problems that have such a case, then
    /// these cases within their problem. All other cases keep their order behind the moved ones.
    pub fn move_to_front(&mut self, first: &BTreeSet<String>) {
        let later = |case: &SelectedCase| !first.contains(&case.id);
        for group in &mut self.groups {
            group.cases.sort_by_key(later);
        }
        self.groups.sort_by_key(|group| group.cases.iter().all(later));
    }

    /// Returns whether the selection matched nothing at all, not even a case that is skipped.
    pub fn matched_nothing(&self) -> bool {
        self.groups.is_empty() && self.skipped.is_empty()
    }
}

/// Which cases to select.
#[derive(Clone, Copy)]
pub struct SelectionChoice<'c> {
    /// Points that are selected.
    pub effort: Effort,
    /// Backend that runs them.
    pub place: &'c BenchPlace,
    /// Axis values of the command line that replace those of the selection.
    pub axes: &'c [AxisOverride],
    /// Ids that are selected.
    pub filter: &'c CaseFilter,
    /// Part of the problems.
    pub part: Option<&'c ShardPartition>,
}

/// Selects cases of all problems of all suites.
pub fn select_cases<'a>(
    suites: impl IntoIterator<Item = &'a Suite>,
    effort: Effort,
    place: &BenchPlace,
    axes: &[AxisOverride],
    filter: &CaseFilter,
) -> Result<CaseSelectionResult<'a>, HarnessError> {
    SelectionChoice { effort, place, axes, filter, part: None }.select_suites(suites)
}

impl SelectionChoice<'_> {
    /// Selects cases.
    ///
    /// A suite without an overridden axis, or which rejects its value, contributes nothing. A suite
    /// that accepts each value but not their combination is skipped, with its reason.
    ///
    /// # Errors
    /// Fails if two cases share an id, a problem cannot state its work, or no suite accepts the
    /// overrides.
    pub fn select_suites<'a>(
        self,
        suites: impl IntoIterator<Item = &'a Suite>,
    ) -> Result<CaseSelectionResult<'a>, HarnessError> {
        let Self { axes, .. } = self;
        let mut ids = BTreeSet::new();
        let mut selection = CaseSelectionResult::default();
        let (mut taken, mut refused) = (false, Vec::new());
        for suite in suites {
            let Ok(points) = suite.points(self.effort, self.place.kind.scale(), axes) else {
                continue;
            };
            for point in points {
                let id = format!("{}/{point}", suite.name());
                let bound = match suite.bind(&point) {
                    Ok(bound) => bound,
                    Err(error) => {
                        refused.push((id, error));
                        continue;
                    }
                };
                taken = true;
                let declared = panic_guard::catch_panic(|| bound.problem().work());
                let declared = declared.map_err(|panic| panic.to_string()).and_then(|work| {
                    WorkRecord::from(&work).validate()?;
                    Ok(work.total_bytes())
                });
                let bytes =
                    declared.map_err(|problem| HarnessError::Work { case: id.clone(), problem })?;
                if self.part.is_none_or(|part| part.has(&id)) {
                    let group = ProblemGroup { suite, point, bound, cases: Vec::new() };
                    self.add_matching_cases(&mut selection, group, bytes, &mut ids)?;
                }
            }
        }
        if !taken || axes.is_empty() {
            if let Some((case, problem)) = refused.into_iter().next() {
                return Err(HarnessError::Problem { case, problem });
            }
        } else {
            refused.retain(|(id, _)| self.filter.matches_id(id));
            let reasons = refused.into_iter().map(|(id, problem)| (id, problem.to_string()));
            selection.skipped.extend(reasons);
        }
        Ok(selection)
    }

    /// Adds the cases of a problem that the filter matches; a launch of the problem moves `bytes`
    /// bytes.
    fn add_matching_cases<'a>(
        self,
        selection: &mut CaseSelectionResult<'a>,
        mut group: ProblemGroup<'a>,
        bytes: u64,
        ids: &mut BTreeSet<String>,
    ) -> Result<(), HarnessError> {
        let Self { place, .. } = self;
        // A user who overrides an axis has chosen the problems, so all of their rows are selected.
        let rows = self.axes.is_empty().then(|| group.suite.scan_rows(self.effort, &group.point));
        let rows = rows.flatten();
        let gpus = group.bound.problem().gpus();
        for (index, &row) in group.suite.implementations().iter().enumerate() {
            if rows.is_some_and(|rows| !rows.contains(&row.name)) {
                continue;
            }
            for &cache in cache_states_of(row.backend, bytes, place.l2_bytes) {
                let id = format!("{}/{}/{}", group.id(), row.name, cache.name());
                if !ids.insert(id.clone()) {
                    return Err(HarnessError::SameId { case: id });
                }
                if !self.filter.matches_id(&id) {
                    continue;
                }
                if let Err(reason) = group.bound.supports(index) {
                    selection.unsupported.insert(id.clone());
                    selection.skipped.push((id, format!("{} {reason}", row.name)));
                } else if row.backend != place.kind {
                    selection.skipped.push((id, place.otherwise.clone()));
                } else if let Some(reason) = too_few_gpus_reason(row.backend, gpus, place.gpus) {
                    selection.skipped.push((id, reason));
                } else {
                    group.cases.push(SelectedCase { index, row, cache, id });
                }
            }
        }
        if !group.cases.is_empty() {
            selection.groups.push(group);
        }
        Ok(())
    }
}

/// Returns the reason why a case that needs `needed` GPUs does not run on `available` GPUs.
fn too_few_gpus_reason(backend: BackendKind, needed: usize, available: usize) -> Option<String> {
    (backend == BackendKind::Cuda && needed > available).then(|| {
        format!("needs {needed} GPUs, this run has {available}: --devices {needed} takes the first {needed}")
    })
}

/// Returns in which cache states a case is timed: hot, cold or both. The CPU backend has no means
/// to empty the caches.
fn cache_states_of(backend: BackendKind, bytes: u64, l2_bytes: u64) -> &'static [CacheState] {
    match backend {
        BackendKind::Cuda if bytes < BEYOND_CACHES_BYTES.max(MULTIPLE_OF_L2 * l2_bytes) => {
            &[CacheState::Hot, CacheState::Cold]
        }
        _ => &[CacheState::Hot],
    }
}

/// Checks overrides against every workload there is: an axis or value that none takes is a mistake.
///
/// # Errors
/// Fails with the error of the first workload, or if an axis is unknown, with the names of all
/// axes.
pub fn check_axis_overrides<'a>(
    suites: impl Iterator<Item = &'a Suite>,
    overrides: &[AxisOverride],
) -> Result<(), HarnessError> {
    let suites: Vec<_> = suites.collect();
    for wanted in overrides {
        let with_axis: Vec<_> = suites
            .iter()
            .filter(|suite| suite.axes().iter().any(|axis| axis.name == wanted.axis))
            .collect();
        let one = std::slice::from_ref(wanted);
        if with_axis.is_empty() {
            let axes: BTreeSet<&str> =
                suites.iter().flat_map(|suite| suite.axes()).map(|axis| axis.name).collect();
            let (axis, axes) = (wanted.axis.clone(), axes.into_iter().collect());
            return Err(HarnessError::UnknownAxis { axis, axes });
        }
        let points = |suite: &&Suite| suite.points(Effort::Thorough, DefaultScale::Host, one);
        let errors: Result<Vec<AxisError>, _> =
            with_axis.iter().map(|suite| points(suite).map_or_else(Ok, Err)).collect();
        if let Ok(errors) = errors {
            return Err(errors.into_iter().next().expect("an axis has a workload").into());
        }
    }
    Ok(())
}

/// The error for axes that no case of these suites has: a value that no suite with its axis
/// accepts, or values that are accepted one by one but not together.
pub fn unmatched_axis_error<'a>(
    suites: impl Iterator<Item = &'a Suite>,
    overrides: &[AxisOverride],
) -> HarnessError {
    let suites: Vec<_> = suites.collect();
    for wanted in overrides {
        let has_axis = |suite: &&&Suite| suite.axes().iter().any(|a| a.name == wanted.axis);
        let one = std::slice::from_ref(wanted);
        let tried = suites.iter().filter(has_axis);
        let tried: Vec<_> =
            tried.map(|suite| suite.points(Effort::Thorough, DefaultScale::Host, one)).collect();
        if let Some(Err(error)) = tried.first()
            && tried.iter().all(Result::is_err)
        {
            return error.clone().into();
        }
    }
    let axes =
        overrides.iter().map(|wanted| format!("{}={}", wanted.axis, wanted.values.join(",")));
    HarnessError::NoCombination { axes: axes.collect() }
}

/// Ids of all cases of all efforts.
pub fn all_case_ids<'a>(suites: impl Iterator<Item = &'a Suite>) -> Vec<String> {
    let anywhere =
        BenchPlace { kind: BackendKind::Cpu, otherwise: String::new(), l2_bytes: 0, gpus: 1 };
    let everything = select_cases(suites, Effort::Thorough, &anywhere, &[], &CaseFilter::All);
    let Ok(selection) = everything else { return Vec::new() };
    let running =
        selection.groups.iter().flat_map(|group| group.cases.iter().map(|case| case.id.clone()));
    running.chain(selection.skipped.iter().map(|(id, _)| id.clone())).collect()
}

/// The error for a filter that no case matches.
pub fn unmatched_filter_error<'a>(
    filter: &CaseFilter,
    suites: impl Iterator<Item = &'a Suite>,
) -> HarnessError {
    let suggestions = closest_ids(filter, &all_case_ids(suites));
    HarnessError::NoMatch { filter: filter.text().unwrap_or_default().to_owned(), suggestions }
}

/// Returns suggestions for a mistyped filter, best first: the closest case ids, or the beginnings
/// of ids if they are as close.
pub fn closest_ids(filter: &CaseFilter, ids: &[String]) -> Vec<String> {
    let Some(text) = filter.text().filter(|text| text.len() <= MAX_COMPARED_TEXT_CHARACTERS) else {
        return Vec::new();
    };
    let mut candidates = BTreeSet::new();
    for id in ids {
        if matches!(filter, CaseFilter::Exact(_)) {
            candidates.insert(id.as_str());
            continue;
        }
        let ends = id.match_indices('/').map(|(end, _)| end).chain([id.len()]);
        candidates.extend(ends.map(|end| &id[..end]));
        candidates.extend(id.split('/').filter(|part| part.len() > 3));
    }
    let mut scored: Vec<(f64, &str)> = candidates
        .into_iter()
        // Longer or shorter texts are too different to be meant.
        .filter(|candidate| text.len() <= 2 * candidate.len() && candidate.len() <= 2 * text.len())
        .map(|candidate| (strsim::normalized_damerau_levenshtein(text, candidate), candidate))
        .filter(|(score, _)| *score >= 0.5)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, candidate)| candidate.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample::{huge_suites, own_suites, suites_of_all_binaries};
    use super::*;

    #[test]
    fn a_mistyped_filter_gets_similar_case_ids_as_suggestions() {
        let ids = [
            "attention/forward/s1024_d64_full_f32/cpu/hot".to_owned(),
            "st_bif/backward/n4_f32/cpu/hot".to_owned(),
        ];
        let suggestions =
            |text: &str, exact| closest_ids(&CaseFilter::parse(Some(text), exact).unwrap(), &ids);
        assert_eq!(suggestions("atention/foward", false)[0], "attention/forward");
        assert_eq!(suggestions("s1024_d64_ful_f32", false)[0], "s1024_d64_full_f32");
        assert_eq!(suggestions("stbif", false)[0], "st_bif");
        assert!(suggestions("zzzzzz", false).is_empty());
        // A part of an id is not an id itself.
        assert_eq!(suggestions("st_bif/backward/n4_f32/cpu", true), [&ids[1][..]]);
        assert!(suggestions("st_bif", true).is_empty());
        // Suggestions for a very long filter need no comparison with each id, which would take
        // minutes.
        assert!(suggestions(&"st_bif/".repeat(100_000), true).is_empty());
    }

    #[test]
    fn workload_that_rejects_a_value_is_skipped_with_its_reason() {
        let place =
            BenchPlace { kind: BackendKind::Cpu, otherwise: String::new(), l2_bytes: 0, gpus: 1 };
        let select_with = |suites: &[Suite], overrides: &[&str], filter: Option<&str>| {
            let overrides: Vec<_> = overrides.iter().map(|item| item.parse().unwrap()).collect();
            let filter = CaseFilter::parse(filter, false).unwrap();
            let suites = suites.iter();
            select_cases(suites, Effort::Default, &place, &overrides, &filter)
                .map(|selection| (selection.case_count(), selection.skipped))
                .map_err(|error| error.to_string())
        };
        let reason = "no gradients at level 16";
        let skipped = |id: &str| (id.to_owned(), reason.to_owned());
        let backward = skipped("spike/backward/n8_t4_level16");
        assert_eq!(
            select_with(&own_suites(), &["level=16"], None),
            Ok((2, vec![backward.clone()]))
        );
        assert_eq!(select_with(&own_suites(), &["level=16"], Some("forward")), Ok((2, vec![])));
        assert_eq!(
            select_with(&own_suites(), &["level=16"], Some("backward")),
            Ok((0, vec![backward.clone()]))
        );
        assert_eq!(select_with(&own_suites(), &["level=4"], None), Ok((3, vec![])));
        // In this test, no workload of another bench accepts the axis value.
        let refused = select_with(&own_suites()[1..], &["level=16"], None);
        assert_eq!(refused, Err(format!("{}: {reason}", backward.0)));
    }

    #[test]
    fn work_whose_count_overflows_is_an_error_that_names_the_problem() {
        let place =
            BenchPlace { kind: BackendKind::Cpu, otherwise: String::new(), l2_bytes: 0, gpus: 1 };
        let suites = huge_suites();
        let suites = suites.iter();
        let refused =
            select_cases(suites, Effort::Default, &place, &[], &CaseFilter::All).err().unwrap();
        let expected = "spike/huge/n8: declared work: more work than any machine does: read \
                      18446744073709551615 B, write 1 B";
        assert_eq!(refused.to_string(), expected);
    }

    #[test]
    fn a_case_that_needs_more_gpus_than_there_are_is_skipped() {
        assert_eq!(too_few_gpus_reason(BackendKind::Cuda, 2, 2), None);
        assert_eq!(too_few_gpus_reason(BackendKind::Cpu, 2, 1), None);
        let reason = "needs 4 GPUs, this run has 2: --devices 4 takes the first 4";
        assert_eq!(too_few_gpus_reason(BackendKind::Cuda, 4, 2).as_deref(), Some(reason));
    }

    #[test]
    fn cases_moved_to_the_front_run_before_all_others() {
        let suites = suites_of_all_binaries();
        let place =
            BenchPlace { kind: BackendKind::Cpu, otherwise: String::new(), l2_bytes: 0, gpus: 1 };
        let suites = suites.iter();
        let mut selection =
            select_cases(suites, Effort::Default, &place, &[], &CaseFilter::All).unwrap();
        let ids = |selection: &CaseSelectionResult<'_>| -> Vec<String> {
            let cases = selection.groups.iter().flat_map(|group| &group.cases);
            cases.map(|case| case.id.clone()).collect()
        };
        let before = ids(&selection);
        let last = before.last().unwrap().clone();
        assert!(before.len() > 2 && before[0] != last, "{before:?}");
        selection.move_to_front(&BTreeSet::from([last.clone(), "not here".to_owned()]));
        let after = ids(&selection);
        assert_eq!(after[0], last);
        // The other cases of the same problem follow the moved case; all remaining cases keep their
        // order.
        let others = |ids: &[String]| -> Vec<String> {
            let problem = last.rsplitn(3, '/').last().unwrap();
            ids.iter().filter(|id| !id.starts_with(problem)).cloned().collect()
        };
        assert_eq!(others(&after), others(&before));
        assert_eq!(after.len(), before.len());
    }

    #[test]
    fn an_axis_value_that_no_workload_accepts_is_an_error() {
        let suites = suites_of_all_binaries();
        let check = |item: &str| check_axis_overrides(suites.iter(), &[item.parse().unwrap()]);
        assert!(check("t=3").is_ok());
        match check("level=5").unwrap_err() {
            HarnessError::Axis(AxisError::Value { axis, value, expected }) => {
                assert_eq!([&*axis, &value, &expected], ["level", "5", "one of 4, 8, 16"]);
            }
            other => panic!("{other:?}"),
        }
        match check("zz=1").unwrap_err() {
            HarnessError::UnknownAxis { axis, axes } => {
                assert!(axis == "zz" && axes.contains(&"level"), "{axes:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}
