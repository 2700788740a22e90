//! Checks that the saved trials of an interrupted comparison fit the test plan of the comparison
//! that resumes it.

use std::collections::BTreeSet;

use super::rounds::arm_at_place_of_block;
use crate::compare::session::ComparedBench;
use crate::gate::paired::ComparedArm;
use kernelgate::record::TrialOfComparison;

/// Checks the saved trials of an interrupted comparison: known benches and cases, no more blocks
/// than the plan allows, each place of a block once and with the right build. Trials of a block in
/// which a process failed are not saved. `listed` holds all cases that base or head lists, because
/// a case that fails now may have been timed before the interruption.
pub fn check_saved_trials_fit_plan(
    trials: &[TrialOfComparison],
    benches: &[ComparedBench],
    listed: &BTreeSet<String>,
    max_blocks: usize,
) -> Result<(), String> {
    let mut places = BTreeSet::new();
    for trial in trials {
        let TrialOfComparison {
            round,
            bench,
            block_in_round: block,
            position_in_block: place,
            ran_head_build: head,
            ..
        } = trial;
        let at = format!("round {round}, bench {bench}, block {block}, place {place}");
        let Some(known) = benches.iter().find(|known| known.bench_name == *bench) else {
            return Err(format!("{at}: no such bench is compared"));
        };
        if *block >= max_blocks {
            return Err(format!("{at}: a round has at most {max_blocks} blocks"));
        }
        if *head != (arm_at_place_of_block(*block, *place) == ComparedArm::HeadBuild) {
            return Err(format!("{at}: the plan has the other build there"));
        }
        if !places.insert((*round, bench, *block, *place)) {
            return Err(format!("{at}: recorded twice"));
        }
        let ids = trial.cases.keys().chain(trial.failed.keys()).chain(trial.skipped.keys());
        let is_known = |id: &&String| known.compared_cases.contains(*id) || listed.contains(*id);
        if let Some(other) = ids.into_iter().find(|id| !is_known(id)) {
            return Err(format!("{at}: no such case is compared: {other}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::rounds::tests::test_trial;
    use super::*;
    use crate::compare::sides::copy_benches::BenchControlMethod;
    use crate::compare::trials::expected_record::FactsOfVerifiedRun;
    use kernelgate::measure::power::PowerStateOfSamples;
    use kernelgate::record::{
        BenchProcessRun, CaseTimeInTrial, CommitAndChanges, RunEnvironment, TrialSamplingPlan,
    };

    #[test]
    fn trials_of_another_plan_are_refused_on_resumption() {
        let run = BenchProcessRun::empty_run_starting_now(
            "b",
            "verify",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        let expected = || {
            FactsOfVerifiedRun::from_verified_run(
                &run,
                &BTreeSet::new(),
                Some(PowerStateOfSamples::SteadyUnderLoad),
            )
        };
        let benches = [ComparedBench {
            bench_name: "b".to_owned(),
            verified: Default::default(),
            expected: [expected(), expected()],
            compared_cases: ["x".to_owned()].into(),
            cases_timed_first: BTreeSet::new(),
            process_timeout: Duration::ZERO,
            sampling: TrialSamplingPlan::SAMPLING_ON_HOST,
            control_method: BenchControlMethod::ProtocolVersion(1),
        }];
        let listed = BTreeSet::from(["failed".to_owned()]);
        let trials: Vec<_> = (0..8).map(|i| test_trial(i / 4, i % 4, 10.0)).collect();
        let fit = |trials: &[TrialOfComparison]| {
            check_saved_trials_fit_plan(trials, &benches, &listed, 2)
        };
        assert_eq!(fit(&trials), Ok(()));
        let refused = |change: &dyn Fn(&mut Vec<TrialOfComparison>)| {
            let mut other = trials.clone();
            change(&mut other);
            fit(&other).unwrap_err()
        };
        let swapped = refused(&|trials| trials[1].ran_head_build = false);
        assert_eq!(
            swapped,
            "round 1, bench b, block 0, place 1: the plan has the other build there"
        );
        insta::assert_snapshot!(refused(&|trials| trials.push(trials[0].clone())), @"round 1, bench b, block 0, place 0: recorded twice");
        insta::assert_snapshot!(refused(&|trials| trials[0].bench = "c".to_owned()), @"round 1, bench c, block 0, place 0: no such bench is compared");
        insta::assert_snapshot!(refused(&|trials| trials[7].block_in_round = 2), @"round 1, bench b, block 2, place 3: a round has at most 2 blocks");
        let foreign = refused(&|trials| {
            trials[0].cases.insert("y".to_owned(), CaseTimeInTrial::default());
        });
        insta::assert_snapshot!(foreign, @"round 1, bench b, block 0, place 0: no such case is compared: y");
        let mut timed_before = trials.clone();
        timed_before[0].cases.insert("failed".to_owned(), CaseTimeInTrial::default());
        assert_eq!(fit(&timed_before), Ok(()));
    }
}
