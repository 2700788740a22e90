//! Selects the cases to run: those of the chosen effort that match the filter; ids are unique.

use std::collections::BTreeSet;

use super::backend_choice::ChosenBackend;
use super::filter::CaseIdFilter;
use crate::backend::BackendKind;
use crate::harness::error::{HarnessError, MAX_COMPARED_FILTER_CHARACTERS};
use crate::harness::panic_guard;
use crate::measure::CacheState;
use crate::measure::limits::DeclaredWorkAndCacheState;
use crate::record::{DeclaredWorkRecord, DivisionAmongShardsSummary, ProblemsDividedAmongShards};
use crate::suite::{ImplementationNameAndBackend, ProblemWithImplementations, WorkloadSuite};
use crate::workload::{
    AxisError, AxisValuesFromCommandLine, BenchEffort, Point, SizeOfDefaultProblems,
};

/// From this many bytes per launch on, there is no cold case, because a launch finds little data of
/// the previous launch in the caches anyway. On a GPU with a large L2, the threshold is a multiple
/// of the L2 size.
const MIN_BYTES_WITHOUT_COLD_CASE: u64 = 256 << 20;
const MIN_L2_MULTIPLE_WITHOUT_COLD_CASE: u64 = 4;

/// A problem with its selected cases.
pub struct SelectedProblem<'a> {
    /// The suite of the problem, with its implementations.
    pub suite: &'a WorkloadSuite,
    /// The problem's axes.
    pub axis_values: Point,
    /// The problem that the selected cases compute.
    pub problem: Box<dyn ProblemWithImplementations>,
    /// The selected cases of the problem that can run.
    pub cases: Vec<SelectedCase>,
}

impl SelectedProblem<'_> {
    /// `workload/problem`: Criterion's group.
    pub fn workload_and_problem_id(&self) -> String {
        format!("{}/{}", self.suite.workload_name(), self.axis_values)
    }

    /// The problem's declared work with the cache state of each selected case.
    pub fn work_and_cache_state_of_cases(&self) -> impl Iterator<Item = DeclaredWorkAndCacheState> {
        let work = self.problem.problem().work();
        self.cases
            .iter()
            .map(move |case| DeclaredWorkAndCacheState { work: work.clone(), cache: case.cache })
    }
}

/// A selected case: an implementation of the problem in one cache state (hot or cold).
pub struct SelectedCase {
    /// Index of the implementation in its suite.
    pub implementation_index: usize,
    /// Name and backend of the implementation.
    pub implementation: ImplementationNameAndBackend,
    /// Whether the case is timed with hot or cold caches.
    pub cache: CacheState,
    /// Whole id: `workload/problem/implementation/cache`.
    pub case_id: String,
}

impl SelectedCase {
    /// `implementation/cache`: Name of the case's function in Criterion's benchmark group.
    pub fn criterion_function_name(&self) -> String {
        format!("{}/{}", self.implementation.name, self.cache.cache_state_name())
    }
}

/// Result of a case selection: problems with selected cases, and skipped cases.
#[derive(Default)]
pub struct SelectedAndSkippedCases<'a> {
    /// The problems with at least one case that can run.
    pub problems_with_cases: Vec<SelectedProblem<'a>>,
    /// Ids of selected cases that cannot run on this machine, each with the reason.
    pub skipped_ids_and_reasons: Vec<(String, String)>,
    /// Ids of skipped cases that no machine can run, because the implementation does not support
    /// the problem.
    pub unsupported_case_ids: BTreeSet<String>,
    /// How the cases are divided into shards, if this process runs one shard.
    pub division_among_shards: Option<DivisionAmongShardsSummary>,
}

impl SelectedAndSkippedCases<'_> {
    /// Cases to run.
    pub fn runnable_case_count(&self) -> usize {
        self.problems_with_cases.iter().map(|group| group.cases.len()).sum()
    }

    /// Summarises how `partition` divides the selected cases into shards.
    pub fn summarize_shard_division(
        &self,
        bench: &str,
        partition: &ProblemsDividedAmongShards,
    ) -> DivisionAmongShardsSummary {
        let problems = self.problems_with_cases.iter().map(|group| {
            (
                group.workload_and_problem_id(),
                group.cases.iter().map(|case| case.case_id.as_str()).collect(),
            )
        });
        partition.summarize_division_into_shards(bench, problems)
    }

    /// Reverses the order of the problems, and of the cases within each problem.
    pub fn reverse_cases(&mut self) {
        self.problems_with_cases.reverse();
        self.problems_with_cases.iter_mut().for_each(|group| group.cases.reverse());
    }

    /// Moves the cases in `first` to the front: problems with such a case come first, and within a
    /// problem these cases come first. All other cases keep their order.
    pub fn move_cases_to_front(&mut self, first: &BTreeSet<String>) {
        let later = |case: &SelectedCase| !first.contains(&case.case_id);
        for group in &mut self.problems_with_cases {
            group.cases.sort_by_key(later);
        }
        self.problems_with_cases.sort_by_key(|group| group.cases.iter().all(later));
    }

    /// Whether the selection contains no case at all, not even a skipped one.
    pub fn is_without_any_case(&self) -> bool {
        self.problems_with_cases.is_empty() && self.skipped_ids_and_reasons.is_empty()
    }
}

/// Criteria by which cases are selected: effort, backend, axis values, filter and shard.
#[derive(Clone, Copy)]
pub struct CaseSelectionCriteria<'c> {
    /// Effort of the run, which determines the selected points.
    pub effort: BenchEffort,
    /// Backend on which the selected cases run.
    pub chosen_backend: &'c ChosenBackend,
    /// Axis values from the command line, which replace the selection's own values.
    pub axes: &'c [AxisValuesFromCommandLine],
    /// Filter that selects cases by their ids.
    pub filter: &'c CaseIdFilter,
    /// Division of the problems among shards, if this process runs one shard.
    pub division_among_shards: Option<&'c ProblemsDividedAmongShards>,
}

/// Selects the cases of all problems of all suites.
pub fn select_cases<'a>(
    suites: impl IntoIterator<Item = &'a WorkloadSuite>,
    effort: BenchEffort,
    place: &ChosenBackend,
    axes: &[AxisValuesFromCommandLine],
    filter: &CaseIdFilter,
) -> Result<SelectedAndSkippedCases<'a>, HarnessError> {
    CaseSelectionCriteria {
        effort,
        chosen_backend: place,
        axes,
        filter,
        division_among_shards: None,
    }
    .select_cases_of_suites(suites)
}

impl CaseSelectionCriteria<'_> {
    /// Selects cases.
    ///
    /// A suite that lacks an overridden axis, or does not accept the value, contributes no case. A
    /// problem whose axis values are accepted singly but not together is skipped with the reason.
    ///
    /// # Errors
    /// Fails if two cases have equal ids, a problem's work is invalid, or no suite accepts the
    /// overrides.
    pub fn select_cases_of_suites<'a>(
        self,
        suites: impl IntoIterator<Item = &'a WorkloadSuite>,
    ) -> Result<SelectedAndSkippedCases<'a>, HarnessError> {
        let Self { axes, .. } = self;
        let mut ids = BTreeSet::new();
        let mut selection = SelectedAndSkippedCases::default();
        let (mut taken, mut refused) = (false, Vec::new());
        for suite in suites {
            let Ok(points) = suite.points_selected_by_effort(
                self.effort,
                self.chosen_backend.kind.default_problem_scale(),
                axes,
            ) else {
                continue;
            };
            for point in points {
                let id = format!("{}/{point}", suite.workload_name());
                let bound = match suite.problem_at_point(&point) {
                    Ok(bound) => bound,
                    Err(error) => {
                        refused.push((id, error));
                        continue;
                    }
                };
                taken = true;
                let declared = panic_guard::catch_panic(|| bound.problem().work());
                let declared = declared.map_err(|panic| panic.to_string()).and_then(|work| {
                    DeclaredWorkRecord::from(&work).check_declared_work_plausible()?;
                    Ok(work.total_bytes())
                });
                let bytes = declared.map_err(|problem| HarnessError::ImpossibleDeclaredWork {
                    problem_id: id.clone(),
                    work_fault: problem,
                })?;
                if self.division_among_shards.is_none_or(|part| part.contains_problem(&id)) {
                    let group = SelectedProblem {
                        suite,
                        axis_values: point,
                        problem: bound,
                        cases: Vec::new(),
                    };
                    self.add_matching_cases(&mut selection, group, bytes, &mut ids)?;
                }
            }
        }
        if !taken || axes.is_empty() {
            if let Some((case, problem)) = refused.into_iter().next() {
                return Err(HarnessError::DefaultAxisValuesRejected {
                    problem_id: case,
                    rejection: problem,
                });
            }
        } else {
            refused.retain(|(id, _)| self.filter.selects_case_id(id));
            let reasons = refused.into_iter().map(|(id, problem)| (id, problem.to_string()));
            selection.skipped_ids_and_reasons.extend(reasons);
        }
        Ok(selection)
    }

    /// Adds those cases of a problem that match the filter; `bytes` is the number of bytes that a
    /// launch moves.
    fn add_matching_cases<'a>(
        self,
        selection: &mut SelectedAndSkippedCases<'a>,
        mut group: SelectedProblem<'a>,
        bytes: u64,
        ids: &mut BTreeSet<String>,
    ) -> Result<(), HarnessError> {
        let Self { chosen_backend: place, .. } = self;
        // A user who overrides an axis has chosen the problems, so all of their implementations are
        // selected.
        let rows = self.axes.is_empty().then(|| {
            group.suite.implementations_run_at_scan_point(self.effort, &group.axis_values)
        });
        let rows = rows.flatten();
        let gpus = group.problem.problem().gpus();
        for (index, &row) in group.suite.implementations_of_workload().iter().enumerate() {
            if rows.is_some_and(|rows| !rows.contains(&row.name)) {
                continue;
            }
            for &cache in cache_states_to_time(row.backend, bytes, place.l2_bytes) {
                let id = format!(
                    "{}/{}/{}",
                    group.workload_and_problem_id(),
                    row.name,
                    cache.cache_state_name()
                );
                if !ids.insert(id.clone()) {
                    return Err(HarnessError::DuplicateCaseId { case_id: id });
                }
                if !self.filter.selects_case_id(&id) {
                    continue;
                }
                if let Err(reason) = group.problem.check_implementation_supports_problem(index) {
                    selection.unsupported_case_ids.insert(id.clone());
                    selection.skipped_ids_and_reasons.push((id, format!("{} {reason}", row.name)));
                } else if row.backend != place.kind {
                    selection
                        .skipped_ids_and_reasons
                        .push((id, place.reason_against_other_backend.clone()));
                } else if let Some(reason) = too_few_gpus_reason(row.backend, gpus, place.gpu_count)
                {
                    selection.skipped_ids_and_reasons.push((id, reason));
                } else {
                    group.cases.push(SelectedCase {
                        implementation_index: index,
                        implementation: row,
                        cache,
                        case_id: id,
                    });
                }
            }
        }
        if !group.cases.is_empty() {
            selection.problems_with_cases.push(group);
        }
        Ok(())
    }
}

/// Why a case that needs `needed` GPUs does not run on `available` GPUs; `None` if there are
/// enough.
fn too_few_gpus_reason(backend: BackendKind, needed: usize, available: usize) -> Option<String> {
    (backend == BackendKind::Cuda && needed > available).then(|| {
        format!("needs {needed} GPUs, this run has {available}: --devices {needed} takes the first {needed}")
    })
}

/// Returns the cache states in which a case is timed: hot and cold, or only hot. Cases on the CPU
/// are only timed hot, because kernelgate cannot empty the CPU's caches.
fn cache_states_to_time(backend: BackendKind, bytes: u64, l2_bytes: u64) -> &'static [CacheState] {
    match backend {
        BackendKind::Cuda
            if bytes
                < MIN_BYTES_WITHOUT_COLD_CASE.max(MIN_L2_MULTIPLE_WITHOUT_COLD_CASE * l2_bytes) =>
        {
            &[CacheState::HotCaches, CacheState::ColdCaches]
        }
        _ => &[CacheState::HotCaches],
    }
}

/// Checks axis overrides against all workloads: an axis or value that no workload accepts is an
/// error.
///
/// # Errors
/// Fails with the error of the first workload that has the axis, or with the names of all axes if
/// none has it.
pub fn check_overrides_are_accepted_by_a_workload<'a>(
    suites: impl Iterator<Item = &'a WorkloadSuite>,
    overrides: &[AxisValuesFromCommandLine],
) -> Result<(), HarnessError> {
    let suites: Vec<_> = suites.collect();
    for wanted in overrides {
        let with_axis: Vec<_> = suites
            .iter()
            .filter(|suite| {
                suite.axes_of_workload().iter().any(|axis| axis.axis_name == wanted.axis)
            })
            .collect();
        let one = std::slice::from_ref(wanted);
        if with_axis.is_empty() {
            let axes: BTreeSet<&str> = suites
                .iter()
                .flat_map(|suite| suite.axes_of_workload())
                .map(|axis| axis.axis_name)
                .collect();
            let (axis, axes) = (wanted.axis.clone(), axes.into_iter().collect());
            return Err(HarnessError::UnknownAxis { unknown_axis: axis, known_axis_names: axes });
        }
        let points = |suite: &&WorkloadSuite| {
            suite.points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostCpuSizes,
                one,
            )
        };
        let errors: Result<Vec<AxisError>, _> =
            with_axis.iter().map(|suite| points(suite).map_or_else(Ok, Err)).collect();
        if let Ok(errors) = errors {
            return Err(errors.into_iter().next().expect("an axis has a workload").into());
        }
    }
    Ok(())
}

/// The error that no case has the overridden axis values: a value that no suite accepts, or values
/// that no suite accepts together.
pub fn overridden_axis_values_match_nothing_error<'a>(
    suites: impl Iterator<Item = &'a WorkloadSuite>,
    overrides: &[AxisValuesFromCommandLine],
) -> HarnessError {
    let suites: Vec<_> = suites.collect();
    for wanted in overrides {
        let has_axis = |suite: &&&WorkloadSuite| {
            suite.axes_of_workload().iter().any(|a| a.axis_name == wanted.axis)
        };
        let one = std::slice::from_ref(wanted);
        let tried = suites.iter().filter(has_axis);
        let tried: Vec<_> = tried
            .map(|suite| {
                suite.points_selected_by_effort(
                    BenchEffort::Thorough,
                    SizeOfDefaultProblems::HostCpuSizes,
                    one,
                )
            })
            .collect();
        if let Some(Err(error)) = tried.first()
            && tried.iter().all(Result::is_err)
        {
            return error.clone().into();
        }
    }
    let axes = overrides
        .iter()
        .map(|wanted| format!("{}={}", wanted.axis, wanted.replacement_values.join(",")));
    HarnessError::NoCaseWithAxisValues { axis_assignments: axes.collect() }
}

/// Ids of all cases at all efforts, including cases that cannot run here.
pub fn case_ids_of_all_efforts<'a>(suites: impl Iterator<Item = &'a WorkloadSuite>) -> Vec<String> {
    let anywhere = ChosenBackend {
        kind: BackendKind::Cpu,
        reason_against_other_backend: String::new(),
        l2_bytes: 0,
        gpu_count: 1,
    };
    let everything =
        select_cases(suites, BenchEffort::Thorough, &anywhere, &[], &CaseIdFilter::AllCases);
    let Ok(selection) = everything else { return Vec::new() };
    let running = selection
        .problems_with_cases
        .iter()
        .flat_map(|group| group.cases.iter().map(|case| case.case_id.clone()));
    running.chain(selection.skipped_ids_and_reasons.iter().map(|(id, _)| id.clone())).collect()
}

/// The error that no case matches the filter, with suggestions.
pub fn filter_matches_nothing_error<'a>(
    filter: &CaseIdFilter,
    suites: impl Iterator<Item = &'a WorkloadSuite>,
) -> HarnessError {
    let suggestions = case_ids_similar_to_filter(filter, &case_ids_of_all_efforts(suites));
    HarnessError::FilterMatchesNoCase {
        case_filter: filter.user_filter_text().unwrap_or_default().to_owned(),
        similar_case_ids: suggestions,
    }
}

/// Suggests up to three case ids, or parts of ids, that are similar to a mistyped filter, most
/// similar first.
pub fn case_ids_similar_to_filter(filter: &CaseIdFilter, ids: &[String]) -> Vec<String> {
    let Some(text) =
        filter.user_filter_text().filter(|text| text.len() <= MAX_COMPARED_FILTER_CHARACTERS)
    else {
        return Vec::new();
    };
    let mut candidates = BTreeSet::new();
    for id in ids {
        if matches!(filter, CaseIdFilter::ExactId(_)) {
            candidates.insert(id.as_str());
            continue;
        }
        let ends = id.match_indices('/').map(|(end, _)| end).chain([id.len()]);
        candidates.extend(ends.map(|end| &id[..end]));
        candidates.extend(id.split('/').filter(|part| part.len() > 3));
    }
    let mut scored: Vec<(f64, &str)> = candidates
        .into_iter()
        // Candidates of less than half or more than twice the filter's length are too different to
        // be meant.
        .filter(|candidate| text.len() <= 2 * candidate.len() && candidate.len() <= 2 * text.len())
        .map(|candidate| (strsim::normalized_damerau_levenshtein(text, candidate), candidate))
        .filter(|(score, _)| *score >= 0.5)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, candidate)| candidate.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample::{
        suites_of_both_test_benches, suites_of_first_test_bench, suites_with_overflowing_work,
    };
    use super::*;

    #[test]
    fn a_mistyped_filter_suggests_similar_case_ids() {
        let ids = [
            "attention/forward/s1024_d64_full_f32/cpu/hot".to_owned(),
            "st_bif/backward/n4_f32/cpu/hot".to_owned(),
        ];
        let suggestions = |text: &str, exact| {
            case_ids_similar_to_filter(
                &CaseIdFilter::parse_exact_id_or_regex(Some(text), exact).unwrap(),
                &ids,
            )
        };
        assert_eq!(suggestions("atention/foward", false)[0], "attention/forward");
        assert_eq!(suggestions("s1024_d64_ful_f32", false)[0], "s1024_d64_full_f32");
        assert_eq!(suggestions("stbif", false)[0], "st_bif");
        assert!(suggestions("zzzzzz", false).is_empty());
        // With an exact filter, only whole ids are suggested.
        assert_eq!(suggestions("st_bif/backward/n4_f32/cpu", true), [&ids[1][..]]);
        assert!(suggestions("st_bif", true).is_empty());
        // A very long filter gets no suggestions, because comparing it with every id would take
        // minutes.
        assert!(suggestions(&"st_bif/".repeat(100_000), true).is_empty());
    }

    #[test]
    fn a_workload_that_rejects_axis_values_is_skipped_with_reason() {
        let place = ChosenBackend {
            kind: BackendKind::Cpu,
            reason_against_other_backend: String::new(),
            l2_bytes: 0,
            gpu_count: 1,
        };
        let select_with = |suites: &[WorkloadSuite], overrides: &[&str], filter: Option<&str>| {
            let overrides: Vec<_> = overrides.iter().map(|item| item.parse().unwrap()).collect();
            let filter = CaseIdFilter::parse_exact_id_or_regex(filter, false).unwrap();
            let suites = suites.iter();
            select_cases(suites, BenchEffort::Default, &place, &overrides, &filter)
                .map(|selection| {
                    (selection.runnable_case_count(), selection.skipped_ids_and_reasons)
                })
                .map_err(|error| error.to_string())
        };
        let reason = "no gradients at level 16";
        let skipped = |id: &str| (id.to_owned(), reason.to_owned());
        let backward = skipped("spike/backward/n8_t4_level16");
        assert_eq!(
            select_with(&suites_of_first_test_bench(), &["level=16"], None),
            Ok((2, vec![backward.clone()]))
        );
        assert_eq!(
            select_with(&suites_of_first_test_bench(), &["level=16"], Some("forward")),
            Ok((2, vec![]))
        );
        assert_eq!(
            select_with(&suites_of_first_test_bench(), &["level=16"], Some("backward")),
            Ok((0, vec![backward.clone()]))
        );
        assert_eq!(select_with(&suites_of_first_test_bench(), &["level=4"], None), Ok((3, vec![])));
        // Here no other bench has a workload that accepts the axis value.
        let refused = select_with(&suites_of_first_test_bench()[1..], &["level=16"], None);
        assert_eq!(refused, Err(format!("{}: {reason}", backward.0)));
    }

    #[test]
    fn declared_work_that_overflows_names_the_problem() {
        let place = ChosenBackend {
            kind: BackendKind::Cpu,
            reason_against_other_backend: String::new(),
            l2_bytes: 0,
            gpu_count: 1,
        };
        let suites = suites_with_overflowing_work();
        let suites = suites.iter();
        let refused =
            select_cases(suites, BenchEffort::Default, &place, &[], &CaseIdFilter::AllCases)
                .err()
                .unwrap();
        let expected = "spike/huge/n8: declared work: more work than any machine does: read \
                      18446744073709551615 B, write 1 B";
        assert_eq!(refused.to_string(), expected);
    }

    #[test]
    fn a_case_that_needs_more_gpus_than_available_is_skipped() {
        assert_eq!(too_few_gpus_reason(BackendKind::Cuda, 2, 2), None);
        assert_eq!(too_few_gpus_reason(BackendKind::Cpu, 2, 1), None);
        let reason = "needs 4 GPUs, this run has 2: --devices 4 takes the first 4";
        assert_eq!(too_few_gpus_reason(BackendKind::Cuda, 4, 2).as_deref(), Some(reason));
    }

    #[test]
    fn cases_moved_to_the_front_come_first() {
        let suites = suites_of_both_test_benches();
        let place = ChosenBackend {
            kind: BackendKind::Cpu,
            reason_against_other_backend: String::new(),
            l2_bytes: 0,
            gpu_count: 1,
        };
        let suites = suites.iter();
        let mut selection =
            select_cases(suites, BenchEffort::Default, &place, &[], &CaseIdFilter::AllCases)
                .unwrap();
        let ids = |selection: &SelectedAndSkippedCases<'_>| -> Vec<String> {
            let cases = selection.problems_with_cases.iter().flat_map(|group| &group.cases);
            cases.map(|case| case.case_id.clone()).collect()
        };
        let before = ids(&selection);
        let last = before.last().unwrap().clone();
        assert!(before.len() > 2 && before[0] != last, "{before:?}");
        selection.move_cases_to_front(&BTreeSet::from([last.clone(), "not here".to_owned()]));
        let after = ids(&selection);
        assert_eq!(after[0], last);
        // Cases of other problems keep their order.
        let others = |ids: &[String]| -> Vec<String> {
            let problem = last.rsplitn(3, '/').last().unwrap();
            ids.iter().filter(|id| !id.starts_with(problem)).cloned().collect()
        };
        assert_eq!(others(&after), others(&before));
        assert_eq!(after.len(), before.len());
    }

    #[test]
    fn an_axis_value_that_no_workload_accepts_is_an_error() {
        let suites = suites_of_both_test_benches();
        let check = |item: &str| {
            check_overrides_are_accepted_by_a_workload(suites.iter(), &[item.parse().unwrap()])
        };
        assert!(check("t=3").is_ok());
        match check("level=5").unwrap_err() {
            HarnessError::Axis(AxisError::InvalidAxisValue {
                axis,
                rejected_value: value,
                accepted_values: expected,
            }) => {
                assert_eq!([&*axis, &value, &expected], ["level", "5", "one of 4, 8, 16"]);
            }
            other => panic!("{other:?}"),
        }
        match check("zz=1").unwrap_err() {
            HarnessError::UnknownAxis { unknown_axis: axis, known_axis_names: axes } => {
                assert!(axis == "zz" && axes.contains(&"level"), "{axes:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}
