//! Matches the cases of base and head of a comparison by their ids, and records why other cases
//! cannot be compared.

use std::collections::{BTreeMap, BTreeSet};

use crate::gate::inconclusive_reason::{InconclusiveReason, MeasurementFailureOnSide};
use crate::gate::paired::ComparedArm;
use crate::gate::verdicts::{CasesByDifferingField, ComparisonRefusal};
use kernelgate::record::BenchProcessRun;
use kernelgate_cuda::CaseFailureReason;

/// Result of matching the cases of base and head: the cases to compare, and all other cases by the
/// reason why they are not compared.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CasesMatchedBetweenSides {
    /// Cases to compare.
    pub judged_cases: BTreeSet<String>,
    /// Facts that differ between base and head and forbid a comparison, each with the affected
    /// cases.
    pub refused_cases_by_field: CasesByDifferingField,
    /// Ids of the cases that only the head build has.
    pub new_cases: Vec<String>,
    /// Ids of the cases that only the base build has.
    pub removed_cases: Vec<String>,
    /// Cases of the base that the head skipped, each with the head's reason.
    pub skipped_in_head: BTreeMap<String, String>,
    /// Cases that failed in the head build, each with the error.
    pub failed_in_head: BTreeMap<String, CaseFailureReason>,
    /// Cases that failed in the base only; the head verified them or does not have them.
    pub failed_in_base: BTreeMap<String, CaseFailureReason>,
    /// Cases that cannot be compared, each with the reasons: skipped in the base, or in a bench
    /// that failed.
    pub unmeasured_cases: BTreeMap<String, Vec<InconclusiveReason>>,
}

impl CasesMatchedBetweenSides {
    /// Matches the cases of one bench by the runs of base and head; a side without the bench has no
    /// run.
    pub fn match_cases_of_runs(
        &mut self,
        base: Option<&BenchProcessRun>,
        head: Option<&BenchProcessRun>,
    ) {
        let ids = |run: Option<&BenchProcessRun>| {
            run.into_iter().flat_map(|run| run.cases.keys().cloned()).collect::<BTreeSet<String>>()
        };
        let (base_ids, head_ids) = (ids(base), ids(head));
        let failed =
            |run: Option<&BenchProcessRun>| run.map(|run| run.failed.clone()).unwrap_or_default();
        let (base_failed, head_failed) = (failed(base), failed(head));
        let skipped = |id: &String| head.and_then(|run| run.skipped.get(id)).cloned();
        for (id, error) in base_failed.iter().filter(|(id, _)| !head_failed.contains_key(*id)) {
            match skipped(id) {
                Some(why) => {
                    let failed = InconclusiveReason::CaseFailedInBase(
                        MeasurementFailureOnSide::in_side_with_reason(
                            ComparedArm::BaseBuild,
                            error.failure_sentence.as_str(),
                        ),
                    );
                    let skipped = InconclusiveReason::CaseSkipped(
                        MeasurementFailureOnSide::in_side_with_reason(ComparedArm::HeadBuild, why),
                    );
                    self.unmeasured_cases.insert(id.clone(), vec![failed, skipped]);
                }
                None => drop(self.failed_in_base.insert(id.clone(), error.clone())),
            }
        }
        for id in
            head_ids.iter().filter(|id| !base_ids.contains(*id) && !base_failed.contains_key(*id))
        {
            // A case that the base's code supports on no machine counts as new, like a case that
            // the base does not have.
            let skip = base
                .filter(|run| !run.unsupported_case_ids.contains(id))
                .and_then(|run| run.skipped.get(id));
            match skip {
                Some(why) => {
                    let skipped = InconclusiveReason::CaseSkipped(
                        MeasurementFailureOnSide::in_side_with_reason(
                            ComparedArm::BaseBuild,
                            why.as_str(),
                        ),
                    );
                    self.unmeasured_cases.insert(id.clone(), vec![skipped]);
                }
                None => self.new_cases.push(id.clone()),
            }
        }
        for id in
            base_ids.iter().filter(|id| !head_ids.contains(*id) && !head_failed.contains_key(*id))
        {
            match skipped(id) {
                Some(reason) => drop(self.skipped_in_head.insert(id.clone(), reason)),
                None => self.removed_cases.push(id.clone()),
            }
        }
        self.failed_in_head.extend(head_failed);
        if let (Some(base), Some(head)) = (base, head) {
            for id in base_ids.intersection(&head_ids) {
                let differing = differing_definition_fields(base, head, id);
                if differing.is_empty() {
                    self.judged_cases.insert(id.clone());
                }
                for key in differing {
                    self.refused_cases_by_field.entry(key).or_default().insert(id.clone());
                }
            }
        }
    }

    /// Returns the ids of all cases of base and head, compared or not.
    pub fn all_case_ids(&self) -> Vec<String> {
        let named = self.failed_in_head.keys().chain(self.failed_in_base.keys());
        let others = self.skipped_in_head.keys().chain(self.unmeasured_cases.keys());
        let listed = self.judged_cases.iter().chain(&self.new_cases).chain(&self.removed_cases);
        let refused = self.refused_cases_by_field.values().flatten();
        listed.chain(named).chain(others).chain(refused).cloned().collect()
    }

    /// Removes from a bench's run the cases whose ids another bench owns already, and records them
    /// as not measured.
    pub fn remove_cases_owned_by_other_bench(
        &mut self,
        run: &mut BenchProcessRun,
        owners: &BTreeMap<String, String>,
        bench: &str,
    ) {
        let other = |id: &String| owners.get(id).filter(|owner| *owner != bench).cloned();
        let ids: Vec<String> =
            run.cases.keys().chain(run.failed.keys()).chain(run.skipped.keys()).cloned().collect();
        for (id, owner) in ids.into_iter().filter_map(|id| other(&id).map(|owner| (id, owner))) {
            run.cases.remove(&id);
            run.failed.remove(&id);
            run.skipped.remove(&id);
            let why = InconclusiveReason::CaseOwnedByOtherBench {
                compared_bench: owner,
                bench_not_compared: bench.to_owned(),
            };
            self.unmeasured_cases.insert(format!("{id} (bench {bench})"), vec![why]);
        }
    }

    /// Records the cases that both base and head skipped as not measured, with the head's reason;
    /// only for benches of which every case was requested.
    pub fn record_cases_skipped_by_both(
        &mut self,
        base: Option<&BenchProcessRun>,
        head: Option<&BenchProcessRun>,
    ) {
        let (Some(base), Some(head)) = (base, head) else { return };
        let both = head.skipped.iter().filter(|(id, _)| base.skipped.contains_key(*id));
        let reason = |why: &String| {
            vec![InconclusiveReason::CaseSkipped(MeasurementFailureOnSide::in_side_with_reason(
                ComparedArm::HeadBuild,
                why.as_str(),
            ))]
        };
        self.unmeasured_cases.extend(both.map(|(id, why)| (id.clone(), reason(why))));
    }

    /// Records the cases of a bench that failed in its first process as not measured, as far as the
    /// other side's run lists them.
    pub fn record_cases_of_failed_bench(
        &mut self,
        base: Option<&BenchProcessRun>,
        head: Option<&BenchProcessRun>,
        why: &InconclusiveReason,
    ) {
        for run in base.iter().chain(&head) {
            self.unmeasured_cases
                .extend(run.cases.keys().map(|id| (id.clone(), vec![why.clone()])));
        }
        self.failed_in_base.extend(base.into_iter().flat_map(|run| run.failed.clone()));
        self.failed_in_head.extend(head.into_iter().flat_map(|run| run.failed.clone()));
    }

    /// Records the cases that a bench listed before it failed as not measured, unless they are
    /// known already.
    pub fn record_listed_cases_of_failed_bench(
        &mut self,
        cases: BTreeSet<String>,
        why: impl Fn() -> Option<InconclusiveReason>,
    ) {
        let listed: BTreeSet<String> = self.all_case_ids().into_iter().collect();
        let unknown = cases.into_iter().filter(|id| !listed.contains(id));
        self.unmeasured_cases.extend(unknown.filter_map(|id| Some((id, vec![why()?]))));
    }

    /// Returns one refusal of the comparison for each field that differs between base and head.
    pub fn comparison_refusals_by_field(&self) -> Vec<ComparisonRefusal> {
        ComparisonRefusal::from_differing_fields(self.refused_cases_by_field.clone())
    }
}

/// Returns the fields of a case's definition and of the environment that differ between base and
/// head, with both values.
fn differing_definition_fields(
    base: &BenchProcessRun,
    head: &BenchProcessRun,
    id: &str,
) -> Vec<(String, String, String)> {
    let (a, b) = (&base.cases[id], &head.cases[id]);
    let fields = [
        ("revision", a.workload_revision.to_string(), b.workload_revision.to_string()),
        ("work", a.work.to_string(), b.work.to_string()),
        ("axes", format!("{:?}", a.axis_values), format!("{:?}", b.axis_values)),
        ("seed", base.seed.to_string(), head.seed.to_string()),
    ];
    let own =
        fields.into_iter().filter(|(_, a, b)| a != b).map(|(field, a, b)| (field.to_owned(), a, b));
    let around = head.environment.incomparable_facts_with_base(&base.environment);
    own.chain(
        around.into_iter().map(|mismatch| {
            (mismatch.field_name.to_owned(), mismatch.base_value, mismatch.head_value)
        }),
    )
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{CaseRecordWithSamples, CommitAndChanges, RunEnvironment};

    fn make_test_bench_run(cases: &[&str], failed: &[&str], skipped: &[&str]) -> BenchProcessRun {
        fn test_reasons<T: From<&'static str>>(ids: &[&str]) -> BTreeMap<String, T> {
            ids.iter().map(|id| ((*id).to_owned(), "why".into())).collect()
        }
        BenchProcessRun {
            ended_normally: true,
            cases: cases
                .iter()
                .map(|id| {
                    ((*id).to_owned(), CaseRecordWithSamples::example_with_sample_times(vec![1.0]))
                })
                .collect(),
            skipped: test_reasons(skipped),
            failed: test_reasons(failed),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                "verify",
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        }
    }

    #[test]
    fn a_case_id_of_two_benches_is_measured_only_in_the_first() {
        let owners = [("both".to_owned(), "first".to_owned())].into();
        let mut matched = CasesMatchedBetweenSides::default();
        for _side in 0..2 {
            let mut second = make_test_bench_run(&["both", "own"], &[], &[]);
            matched.remove_cases_owned_by_other_bench(&mut second, &owners, "second");
            assert_eq!(second.cases.keys().collect::<Vec<_>>(), ["own"]);
            let mut first = make_test_bench_run(&["both"], &[], &[]);
            matched.remove_cases_owned_by_other_bench(&mut first, &owners, "first");
            assert_eq!(first.cases.len(), 1);
        }
        let why = InconclusiveReason::CaseOwnedByOtherBench {
            compared_bench: "first".to_owned(),
            bench_not_compared: "second".to_owned(),
        };
        let row = ("both (bench second)".to_owned(), vec![why]);
        assert_eq!(matched.unmeasured_cases, [row].into());
    }

    #[test]
    fn a_case_that_neither_side_can_measure_is_listed_if_all_cases_were_requested() {
        let (base, head) = (
            make_test_bench_run(&["a"], &[], &["twice", "gone"]),
            make_test_bench_run(&["a"], &[], &["twice"]),
        );
        let mut matched = CasesMatchedBetweenSides::default();
        matched.match_cases_of_runs(Some(&base), Some(&head));
        assert_eq!(matched.unmeasured_cases, BTreeMap::new());
        matched.record_cases_skipped_by_both(Some(&base), Some(&head));
        let why = vec![InconclusiveReason::CaseSkipped(
            MeasurementFailureOnSide::in_side_with_reason(ComparedArm::HeadBuild, "why"),
        )];
        assert_eq!(matched.unmeasured_cases, [("twice".to_owned(), why)].into());
        matched.record_cases_skipped_by_both(None, Some(&head));
        assert_eq!(matched.unmeasured_cases.len(), 1);
    }

    #[test]
    fn cases_are_sorted_into_matched_new_removed_skipped_and_failed() {
        let mut matched = CasesMatchedBetweenSides::default();
        let base =
            make_test_bench_run(&["both", "gone", "skips", "breaks"], &["mended", "wrong"], &[]);
        let head =
            make_test_bench_run(&["both", "new", "mended"], &["breaks", "wrong"], &["skips"]);
        matched.match_cases_of_runs(Some(&base), Some(&head));
        assert_eq!(matched.judged_cases.iter().collect::<Vec<_>>(), ["both"]);
        assert_eq!(
            (&matched.new_cases[..], &matched.removed_cases[..]),
            (&["new".to_owned()][..], &["gone".to_owned()][..])
        );
        assert_eq!(matched.failed_in_head.keys().collect::<Vec<_>>(), ["breaks", "wrong"]);
        assert_eq!(matched.failed_in_base.keys().collect::<Vec<_>>(), ["mended"]);
        assert_eq!(matched.skipped_in_head.keys().collect::<Vec<_>>(), ["skips"]);
        assert!(matched.unmeasured_cases.is_empty());
        matched
            .match_cases_of_runs(None, Some(&make_test_bench_run(&["of a new bench"], &[], &[])));
        assert_eq!(matched.new_cases, ["new", "of a new bench"]);
        assert_eq!(matched.comparison_refusals_by_field(), []);
    }

    #[test]
    fn newly_supported_cases_count_as_new_but_cases_that_lacked_memory_do_not() {
        let mut matched = CasesMatchedBetweenSides::default();
        let base = make_test_bench_run(&[], &[], &["supported now", "too large before"]);
        let base =
            BenchProcessRun { unsupported_case_ids: ["supported now".to_owned()].into(), ..base };
        matched.match_cases_of_runs(
            Some(&base),
            Some(&make_test_bench_run(&["supported now", "too large before"], &[], &[])),
        );
        assert_eq!(matched.new_cases, ["supported now"]);
        assert_eq!(matched.unmeasured_cases.keys().collect::<Vec<_>>(), ["too large before"]);
    }

    #[test]
    fn a_case_that_one_side_cannot_measure_keeps_the_reason() {
        let mut matched = CasesMatchedBetweenSides::default();
        let base = make_test_bench_run(&[], &["worse"], &["large", "nowhere"]);
        matched.match_cases_of_runs(
            Some(&base),
            Some(&make_test_bench_run(&["large"], &[], &["worse", "nowhere"])),
        );
        let why = || "why".to_owned();
        let skipped = |side| {
            InconclusiveReason::CaseSkipped(MeasurementFailureOnSide::in_side_with_reason(
                side,
                why(),
            ))
        };
        let failed = InconclusiveReason::CaseFailedInBase(
            MeasurementFailureOnSide::in_side_with_reason(ComparedArm::BaseBuild, why()),
        );
        assert_eq!(matched.unmeasured_cases["large"], [skipped(ComparedArm::BaseBuild)]);
        assert_eq!(matched.unmeasured_cases["worse"], [failed, skipped(ComparedArm::HeadBuild)]);
        let broke = InconclusiveReason::BenchFailed(MeasurementFailureOnSide::in_side_with_reason(
            ComparedArm::BaseBuild,
            why(),
        ));
        matched.record_cases_of_failed_bench(
            None,
            Some(&make_test_bench_run(&["left"], &["wrong"], &[])),
            &broke,
        );
        assert_eq!(matched.unmeasured_cases["left"], [broke]);
        assert_eq!(matched.unmeasured_cases.len(), 3);
        assert_eq!(matched.failed_in_head.keys().collect::<Vec<_>>(), ["wrong"]);
        assert!(
            matched.new_cases.is_empty()
                && matched.failed_in_base.is_empty()
                && matched.judged_cases.is_empty()
        );
    }

    #[test]
    fn a_case_with_a_differing_definition_or_environment_is_refused() {
        let mut matched = CasesMatchedBetweenSides::default();
        let (base, mut head) = (
            make_test_bench_run(&["a", "b"], &[], &[]),
            make_test_bench_run(&["a", "b"], &[], &[]),
        );
        head.cases.get_mut("a").unwrap().work.min_read_bytes = 9;
        matched.match_cases_of_runs(Some(&base), Some(&head));
        assert_eq!(matched.judged_cases.iter().collect::<Vec<_>>(), ["b"]);
        let refusal = &matched.comparison_refusals_by_field()[0];
        assert_eq!(
            (refusal.differing_field.as_str(), &refusal.affected_cases[..]),
            ("work", &["a".to_owned()][..])
        );
        head.seed = 2;
        let mut matched = CasesMatchedBetweenSides::default();
        matched.match_cases_of_runs(Some(&base), Some(&head));
        assert!(matched.judged_cases.is_empty());
        assert_eq!(
            matched
                .comparison_refusals_by_field()
                .iter()
                .map(|refusal| refusal.differing_field.as_str())
                .collect::<Vec<_>>(),
            ["seed", "work"]
        );
    }
}
