//! Matches the cases of both sides of a comparison, with the reasons why others cannot be compared.

use std::collections::{BTreeMap, BTreeSet};

use crate::gate::inconclusive_reason::{BuildFailure, InconclusiveReason};
use crate::gate::paired::Arm;
use crate::gate::verdicts::{RefusedBench, RefusedFields};
use kernelgate::record::ProcessRun;
use kernelgate_cuda::CaseFailure;

/// Cases that both builds of a bench have, found in the runs that verified them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MatchedCases {
    /// Cases to compare.
    pub judged: BTreeSet<String>,
    /// Differing facts that forbid a comparison of some cases.
    pub refused: RefusedFields,
    /// Cases that only the head build has.
    pub new: Vec<String>,
    /// Cases that only the base build has.
    pub removed: Vec<String>,
    /// Cases of the base that the head skipped, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Cases that failed in the head build, with the error.
    pub failed: BTreeMap<String, CaseFailure>,
    /// Cases that failed in the base only, and are verified or absent in the head.
    pub failed_in_base: BTreeMap<String, CaseFailure>,
    /// Requested cases that cannot be compared, with the reason: skipped in the base, or of a bench
    /// that failed.
    pub unmeasured: BTreeMap<String, Vec<InconclusiveReason>>,
}

impl MatchedCases {
    /// Sorts the cases of a bench; a side without the bench has no run.
    pub fn add(&mut self, base: Option<&ProcessRun>, head: Option<&ProcessRun>) {
        let ids = |run: Option<&ProcessRun>| {
            run.into_iter().flat_map(|run| run.cases.keys().cloned()).collect::<BTreeSet<String>>()
        };
        let (base_ids, head_ids) = (ids(base), ids(head));
        let failed =
            |run: Option<&ProcessRun>| run.map(|run| run.failed.clone()).unwrap_or_default();
        let (base_failed, head_failed) = (failed(base), failed(head));
        let skipped = |id: &String| head.and_then(|run| run.skipped.get(id)).cloned();
        for (id, error) in base_failed.iter().filter(|(id, _)| !head_failed.contains_key(*id)) {
            match skipped(id) {
                Some(why) => {
                    let failed = InconclusiveReason::Failed(BuildFailure::new(
                        Arm::Base,
                        error.text.as_str(),
                    ));
                    let skipped = InconclusiveReason::Skipped(BuildFailure::new(Arm::Head, why));
                    self.unmeasured.insert(id.clone(), vec![failed, skipped]);
                }
                None => drop(self.failed_in_base.insert(id.clone(), error.clone())),
            }
        }
        for id in
            head_ids.iter().filter(|id| !base_ids.contains(*id) && !base_failed.contains_key(*id))
        {
            // A case that the base could not compute on any machine is new, like a case that it did
            // not have.
            let skip = base
                .filter(|run| !run.unsupported.contains(id))
                .and_then(|run| run.skipped.get(id));
            match skip {
                Some(why) => {
                    let skipped =
                        InconclusiveReason::Skipped(BuildFailure::new(Arm::Base, why.as_str()));
                    self.unmeasured.insert(id.clone(), vec![skipped]);
                }
                None => self.new.push(id.clone()),
            }
        }
        for id in
            base_ids.iter().filter(|id| !head_ids.contains(*id) && !head_failed.contains_key(*id))
        {
            match skipped(id) {
                Some(reason) => drop(self.skipped.insert(id.clone(), reason)),
                None => self.removed.push(id.clone()),
            }
        }
        self.failed.extend(head_failed);
        if let (Some(base), Some(head)) = (base, head) {
            for id in base_ids.intersection(&head_ids) {
                let differing = definition_differences(base, head, id);
                if differing.is_empty() {
                    self.judged.insert(id.clone());
                }
                for key in differing {
                    self.refused.entry(key).or_default().insert(id.clone());
                }
            }
        }
    }

    /// Returns every case id of base or head.
    pub fn ids(&self) -> Vec<String> {
        let named = self.failed.keys().chain(self.failed_in_base.keys());
        let others = self.skipped.keys().chain(self.unmeasured.keys());
        let listed = self.judged.iter().chain(&self.new).chain(&self.removed);
        let refused = self.refused.values().flatten();
        listed.chain(named).chain(others).chain(refused).cloned().collect()
    }

    /// Removes and records the cases of a run whose ids an earlier bench already has.
    pub fn remove_duplicate_cases(
        &mut self,
        run: &mut ProcessRun,
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
            let why = InconclusiveReason::OtherBench { owner, bench: bench.to_owned() };
            self.unmeasured.insert(format!("{id} (bench {bench})"), vec![why]);
        }
    }

    /// Keeps cases that neither side can measure, with the reason of the head: for benches of which
    /// every case is requested.
    pub fn keep_skipped_cases(&mut self, base: Option<&ProcessRun>, head: Option<&ProcessRun>) {
        let (Some(base), Some(head)) = (base, head) else { return };
        let both = head.skipped.iter().filter(|(id, _)| base.skipped.contains_key(*id));
        let reason = |why: &String| {
            vec![InconclusiveReason::Skipped(BuildFailure::new(Arm::Head, why.as_str()))]
        };
        self.unmeasured.extend(both.map(|(id, why)| (id.clone(), reason(why))));
    }

    /// Adds the cases of a bench that failed during verification, as far as the other side lists
    /// them.
    pub fn abandon_cases(
        &mut self,
        base: Option<&ProcessRun>,
        head: Option<&ProcessRun>,
        why: &InconclusiveReason,
    ) {
        for run in base.iter().chain(&head) {
            self.unmeasured.extend(run.cases.keys().map(|id| (id.clone(), vec![why.clone()])));
        }
        self.failed_in_base.extend(base.into_iter().flat_map(|run| run.failed.clone()));
        self.failed.extend(head.into_iter().flat_map(|run| run.failed.clone()));
    }

    /// Adds the cases that a bench listed before it failed, unless a side has more of its cases.
    pub fn abandon_listed_cases(
        &mut self,
        cases: BTreeSet<String>,
        why: impl Fn() -> Option<InconclusiveReason>,
    ) {
        let listed: BTreeSet<String> = self.ids().into_iter().collect();
        let unknown = cases.into_iter().filter(|id| !listed.contains(id));
        self.unmeasured.extend(unknown.filter_map(|id| Some((id, vec![why()?]))));
    }

    /// The refusals, by field.
    pub fn comparison_refusals(&self) -> Vec<RefusedBench> {
        RefusedBench::from_fields(self.refused.clone())
    }
}

/// Fields of a case's definition and environment that differ, with both values.
fn definition_differences(
    base: &ProcessRun,
    head: &ProcessRun,
    id: &str,
) -> Vec<(String, String, String)> {
    let (a, b) = (&base.cases[id], &head.cases[id]);
    let fields = [
        ("revision", a.revision.to_string(), b.revision.to_string()),
        ("work", a.work.to_string(), b.work.to_string()),
        ("axes", format!("{:?}", a.problem), format!("{:?}", b.problem)),
        ("seed", base.seed.to_string(), head.seed.to_string()),
    ];
    let own =
        fields.into_iter().filter(|(_, a, b)| a != b).map(|(field, a, b)| (field.to_owned(), a, b));
    let around = head.environment.mismatches(&base.environment);
    own.chain(
        around
            .into_iter()
            .map(|mismatch| (mismatch.field.to_owned(), mismatch.base, mismatch.head)),
    )
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{CaseRecord, Environment, Provenance};

    fn run(cases: &[&str], failed: &[&str], skipped: &[&str]) -> ProcessRun {
        fn reasons<T: From<&'static str>>(ids: &[&str]) -> BTreeMap<String, T> {
            ids.iter().map(|id| ((*id).to_owned(), "why".into())).collect()
        }
        ProcessRun {
            complete: true,
            cases: cases
                .iter()
                .map(|id| ((*id).to_owned(), CaseRecord::untimed_samples(vec![1.0])))
                .collect(),
            skipped: reasons(skipped),
            failed: reasons(failed),
            ..ProcessRun::start_now("b", "verify", Environment::cpu(), Provenance::default())
        }
    }

    #[test]
    fn a_case_id_of_two_benches_is_measured_only_in_the_first() {
        let owners = [("both".to_owned(), "first".to_owned())].into();
        let mut matched = MatchedCases::default();
        for _side in 0..2 {
            let mut second = run(&["both", "own"], &[], &[]);
            matched.remove_duplicate_cases(&mut second, &owners, "second");
            assert_eq!(second.cases.keys().collect::<Vec<_>>(), ["own"]);
            let mut first = run(&["both"], &[], &[]);
            matched.remove_duplicate_cases(&mut first, &owners, "first");
            assert_eq!(first.cases.len(), 1);
        }
        let why = InconclusiveReason::OtherBench {
            owner: "first".to_owned(),
            bench: "second".to_owned(),
        };
        let row = ("both (bench second)".to_owned(), vec![why]);
        assert_eq!(matched.unmeasured, [row].into());
    }

    #[test]
    fn a_case_that_neither_side_can_measure_is_listed_if_all_cases_were_requested() {
        let (base, head) = (run(&["a"], &[], &["twice", "gone"]), run(&["a"], &[], &["twice"]));
        let mut matched = MatchedCases::default();
        matched.add(Some(&base), Some(&head));
        assert_eq!(matched.unmeasured, BTreeMap::new());
        matched.keep_skipped_cases(Some(&base), Some(&head));
        let why = vec![InconclusiveReason::Skipped(BuildFailure::new(Arm::Head, "why"))];
        assert_eq!(matched.unmeasured, [("twice".to_owned(), why)].into());
        matched.keep_skipped_cases(None, Some(&head));
        assert_eq!(matched.unmeasured.len(), 1);
    }

    #[test]
    fn cases_are_sorted_into_matched_new_removed_skipped_and_failed() {
        let mut matched = MatchedCases::default();
        let base = run(&["both", "gone", "skips", "breaks"], &["mended", "wrong"], &[]);
        let head = run(&["both", "new", "mended"], &["breaks", "wrong"], &["skips"]);
        matched.add(Some(&base), Some(&head));
        assert_eq!(matched.judged.iter().collect::<Vec<_>>(), ["both"]);
        assert_eq!(
            (&matched.new[..], &matched.removed[..]),
            (&["new".to_owned()][..], &["gone".to_owned()][..])
        );
        assert_eq!(matched.failed.keys().collect::<Vec<_>>(), ["breaks", "wrong"]);
        assert_eq!(matched.failed_in_base.keys().collect::<Vec<_>>(), ["mended"]);
        assert_eq!(matched.skipped.keys().collect::<Vec<_>>(), ["skips"]);
        assert!(matched.unmeasured.is_empty());
        matched.add(None, Some(&run(&["of a new bench"], &[], &[])));
        assert_eq!(matched.new, ["new", "of a new bench"]);
        assert_eq!(matched.comparison_refusals(), []);
    }

    #[test]
    fn newly_supported_cases_are_new_and_cases_that_lacked_memory_are_not() {
        let mut matched = MatchedCases::default();
        let base = run(&[], &[], &["supported now", "too large before"]);
        let base = ProcessRun { unsupported: ["supported now".to_owned()].into(), ..base };
        matched.add(Some(&base), Some(&run(&["supported now", "too large before"], &[], &[])));
        assert_eq!(matched.new, ["supported now"]);
        assert_eq!(matched.unmeasured.keys().collect::<Vec<_>>(), ["too large before"]);
    }

    #[test]
    fn a_case_that_one_side_cannot_measure_keeps_the_reason() {
        let mut matched = MatchedCases::default();
        let base = run(&[], &["worse"], &["large", "nowhere"]);
        matched.add(Some(&base), Some(&run(&["large"], &[], &["worse", "nowhere"])));
        let why = || "why".to_owned();
        let skipped = |side| InconclusiveReason::Skipped(BuildFailure::new(side, why()));
        let failed = InconclusiveReason::Failed(BuildFailure::new(Arm::Base, why()));
        assert_eq!(matched.unmeasured["large"], [skipped(Arm::Base)]);
        assert_eq!(matched.unmeasured["worse"], [failed, skipped(Arm::Head)]);
        let broke = InconclusiveReason::BenchBroke(BuildFailure::new(Arm::Base, why()));
        matched.abandon_cases(None, Some(&run(&["left"], &["wrong"], &[])), &broke);
        assert_eq!(matched.unmeasured["left"], [broke]);
        assert_eq!(matched.unmeasured.len(), 3);
        assert_eq!(matched.failed.keys().collect::<Vec<_>>(), ["wrong"]);
        assert!(
            matched.new.is_empty()
                && matched.failed_in_base.is_empty()
                && matched.judged.is_empty()
        );
    }

    #[test]
    fn a_differing_definition_or_environment_is_refused_with_the_field() {
        let mut matched = MatchedCases::default();
        let (base, mut head) = (run(&["a", "b"], &[], &[]), run(&["a", "b"], &[], &[]));
        head.cases.get_mut("a").unwrap().work.read_bytes = 9;
        matched.add(Some(&base), Some(&head));
        assert_eq!(matched.judged.iter().collect::<Vec<_>>(), ["b"]);
        let refusal = &matched.comparison_refusals()[0];
        assert_eq!((refusal.field.as_str(), &refusal.cases[..]), ("work", &["a".to_owned()][..]));
        head.seed = 2;
        let mut matched = MatchedCases::default();
        matched.add(Some(&base), Some(&head));
        assert!(matched.judged.is_empty());
        assert_eq!(
            matched
                .comparison_refusals()
                .iter()
                .map(|refusal| refusal.field.as_str())
                .collect::<Vec<_>>(),
            ["seed", "work"]
        );
    }
}
