use super::*;
use crate::record::{CargoPackageId, CommitAndChanges, GpuInEnvironment};

fn clean_provenance_of_commit(hash: &str) -> CommitAndChanges {
    CommitAndChanges { commit: Some(hash.to_owned()), dirty: false }
}

fn example_run_without_shard() -> BenchProcessRun {
    let machine = Some("this host".to_owned());
    let host = RunEnvironment {
        machine_hash: machine,
        built_with_optimisation: true,
        ..RunEnvironment::environment_of_process_on_cpu()
    };
    let case = CaseRecordWithSamples::example_with_sample_times(vec![1e6]);
    BenchProcessRun {
        executable_hash: Some("build 1".to_owned()),
        cases: [("w/f/n1/cpu/hot".to_owned(), case)].into(),
        ..BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            host,
            clean_provenance_of_commit("aaaa"),
        )
    }
}

fn example_run_of_shard(index: u32, count: u32) -> BenchProcessRun {
    BenchProcessRun {
        shard: Some(ShardOfWork { index_from_one: index, shard_count: count }),
        executable_hash: Some(format!("build {index}")),
        cases: BTreeMap::new(),
        ..example_run_without_shard()
    }
}

/// Returns the reason why the second run, of session `t`, cannot join the measurement that the
/// first run begins.
fn difference_when_joining(
    first: BenchProcessRun,
    second: BenchProcessRun,
) -> Option<DifferingFactOfRuns> {
    let second = BenchProcessRun { session_name: "t".to_owned(), ..second };
    MeasurementOfRuns::from_matching_runs(vec![first, second]).err().map(|differing| *differing)
}

fn example_gpu_environment(driver: &str, uuid: &str) -> RunEnvironment {
    RunEnvironment {
        device_kind: "cuda".to_owned(),
        device_name: "NVIDIA H200".to_owned(),
        gpus: GpuInEnvironment::example_h200_with_driver(uuid, driver).into(),
        ..example_run_without_shard().environment
    }
}

#[test]
fn a_differing_fact_of_two_runs_is_named_with_both_values() {
    let of_case = |change: fn(&mut CaseRecordWithSamples)| {
        let mut run = example_run_without_shard();
        run.cases.values_mut().for_each(change);
        run
    };
    let environment = |change: fn(&mut RunEnvironment)| {
        let mut run = example_run_without_shard();
        change(&mut run.environment);
        run
    };
    let two_shards = BenchProcessRun { cases: BTreeMap::new(), ..example_run_of_shard(1, 2) };
    let changed = CommitAndChanges { dirty: true, ..clean_provenance_of_commit("aaaa") };
    let package = |name: &str| {
        let package =
            CargoPackageId { name: name.to_owned(), manifest_path: "Cargo.toml".to_owned() };
        BenchProcessRun { package: Some(package), ..example_run_without_shard() }
    };
    let differing = difference_when_joining(package("one"), package("two")).unwrap();
    assert_eq!(differing.fact_name, "package");
    assert_eq!(differing.first_run_value, "one (Cargo.toml)");
    assert_eq!(differing.second_run_value, "two (Cargo.toml)");
    assert_eq!(difference_when_joining(package("one"), example_run_without_shard()), None);
    for (second, field, left, right) in [
        (two_shards, "number of shards", "1", "2"),
        (
            BenchProcessRun {
                provenance: clean_provenance_of_commit("bbbb"),
                ..example_run_without_shard()
            },
            "commit",
            "aaaa",
            "bbbb",
        ),
        (
            BenchProcessRun { provenance: changed, ..example_run_without_shard() },
            "commit",
            "aaaa",
            "aaaa+changes",
        ),
        (
            BenchProcessRun { effort: "quick".to_owned(), ..example_run_without_shard() },
            "effort",
            "default",
            "quick",
        ),
        (BenchProcessRun { seed: 2, ..example_run_without_shard() }, "seed", "1", "2"),
        (
            BenchProcessRun {
                executable_hash: Some("build 2".to_owned()),
                ..example_run_without_shard()
            },
            "executable",
            "build 1",
            "build 2",
        ),
        (environment(|it| it.built_with_optimisation = false), "optimised", "true", "false"),
        (
            environment(|it| it.device_name = "another".to_owned()),
            "device_name",
            &example_run_without_shard().environment.device_name,
            "another",
        ),
        (of_case(|case| case.workload_revision = 2), "revision", "1", "2"),
    ] {
        let differing = difference_when_joining(example_run_without_shard(), second).expect(field);
        assert_eq!((differing.fact_name, &*differing.runs[0]), (field, "s/b"));
        assert!(differing.runs[1].starts_with("t/b"), "{:?}", differing.runs);
        assert_eq!(
            (&*differing.first_run_value, &*differing.second_run_value),
            (left, right),
            "{field}"
        );
    }
    let differing = difference_when_joining(
        example_run_without_shard(),
        of_case(|case| case.work.min_read_bytes = 16),
    )
    .unwrap();
    assert_eq!((differing.fact_name, &*differing.case_id.unwrap()), ("work", "w/f/n1/cpu/hot"));
}

#[test]
fn another_driver_or_gpu_model_prevents_joining_runs() {
    let on = |environment| BenchProcessRun { environment, ..example_run_without_shard() };
    let first = || on(example_gpu_environment("580.82", "GPU-1"));
    let field = |second| difference_when_joining(first(), on(second)).map(|it| it.fact_name);
    assert_eq!(field(example_gpu_environment("590.1", "GPU-1")), Some("gpu.driver"));
    let mut other_model = example_gpu_environment("580.82", "GPU-2");
    other_model.gpus = GpuInEnvironment {
        multiprocessors: 114,
        ..GpuInEnvironment::example_h200_with_driver("GPU-2", "580.82")
    }
    .into();
    assert_eq!(field(other_model), Some("gpu.multiprocessors"));
    assert_eq!(field(example_gpu_environment("580.99", "GPU-2")), None);
}

#[test]
fn a_refusal_to_join_names_both_runs_and_their_values() {
    let other = BenchProcessRun {
        provenance: clean_provenance_of_commit("bbbb"),
        ..example_run_without_shard()
    };
    assert_eq!(
        difference_when_joining(example_run_without_shard(), other).unwrap().to_string(),
        "commit is `aaaa` in the run s/b and `bbbb` in the run t/b: these are no process runs of \
         the same code"
    );
    assert_eq!(
        difference_when_joining(example_run_of_shard(1, 2), example_run_of_shard(2, 3))
            .unwrap()
            .to_string(),
        "number of shards is `2` in the run s/b-1-of-2 and `3` in the run t/b-2-of-3: these are \
         no shards of one measurement"
    );
    let mut redefined = example_run_without_shard();
    redefined.cases.values_mut().for_each(|case| case.workload_revision = 2);
    let text = difference_when_joining(example_run_without_shard(), redefined).unwrap().to_string();
    assert_eq!(
        text,
        "revision of w/f/n1/cpu/hot is `1` in the run s/b and `2` in the run t/b: these are no process runs of the same code"
    );
}

#[test]
fn shards_of_one_commit_form_one_measurement() {
    assert_eq!(
        difference_when_joining(example_run_of_shard(1, 2), example_run_of_shard(2, 2)),
        None
    );
    let changed = |index| BenchProcessRun {
        provenance: CommitAndChanges { dirty: true, ..clean_provenance_of_commit("aaaa") },
        ..example_run_of_shard(index, 2)
    };
    assert_eq!(difference_when_joining(changed(1), changed(2)).unwrap().fact_name, "executable");
}

#[test]
fn a_case_definition_must_match_every_earlier_run_of_its_bench() {
    let with_case = |session: &str, index, revision| {
        let mut case = CaseRecordWithSamples::example_with_sample_times(vec![1e6]);
        case.workload_revision = revision;
        BenchProcessRun {
            session_name: session.to_owned(),
            cases: [("a".to_owned(), case)].into(),
            ..example_run_of_shard(index, 2)
        }
    };
    let runs = vec![example_run_of_shard(1, 2), with_case("s", 2, 1), with_case("t", 2, 2)];
    let differing = MeasurementOfRuns::from_matching_runs(runs).unwrap_err();
    assert_eq!(differing.fact_name, "revision");
    assert_eq!(differing.runs, ["s/b-2-of-2", "t/b-2-of-2"]);
}

#[test]
fn shards_without_common_case_must_agree_on_the_workload() {
    let with_case = |index, id: &str, revision| {
        let mut case = CaseRecordWithSamples::example_with_sample_times(vec![1e6]);
        case.workload_revision = revision;
        BenchProcessRun { cases: [(id.to_owned(), case)].into(), ..example_run_of_shard(index, 2) }
    };
    assert_eq!(difference_when_joining(with_case(1, "a", 1), with_case(2, "b", 1)), None);
    let differing = difference_when_joining(with_case(1, "a", 1), with_case(2, "b", 2)).unwrap();
    assert_eq!((differing.fact_name, differing.case_id), ("revision", Some("b".to_owned())));
}

#[test]
fn runs_of_another_bench_or_machine_may_have_another_build() {
    let other = || BenchProcessRun {
        provenance: clean_provenance_of_commit("bbbb"),
        ..example_run_without_shard()
    };
    assert_eq!(
        difference_when_joining(
            example_run_without_shard(),
            BenchProcessRun { bench: "c".to_owned(), ..other() }
        ),
        None
    );
    assert_eq!(
        difference_when_joining(example_run_without_shard(), example_run_without_shard()),
        None
    );
    assert_eq!(
        difference_when_joining(
            example_run_without_shard(),
            BenchProcessRun { executable_hash: None, ..example_run_without_shard() }
        ),
        None
    );
    let on = |machine: Option<&str>| BenchProcessRun {
        executable_hash: Some("build 2".to_owned()),
        environment: RunEnvironment {
            machine_hash: machine.map(str::to_owned),
            ..example_run_without_shard().environment
        },
        ..example_run_without_shard()
    };
    assert_eq!(
        difference_when_joining(example_run_without_shard(), on(Some("another host"))),
        None
    );
    assert_eq!(
        difference_when_joining(example_run_without_shard(), on(None)).unwrap().fact_name,
        "executable"
    );
}

#[test]
fn process_runs_of_one_build_form_one_measurement() {
    let run_of = |session: &str, hash: &str| BenchProcessRun {
        session_name: session.to_owned(),
        provenance: clean_provenance_of_commit(hash),
        ..example_run_without_shard()
    };
    let split = MeasurementOfRuns::group_matching_runs_into_measurements([
        run_of("1", "aaaa"),
        run_of("2", "bbbb"),
        run_of("3", "aaaa"),
    ]);
    let sessions = |it: &MeasurementOfRuns| -> Vec<String> {
        it.process_runs_of_measurement().iter().map(|run| run.session_name.clone()).collect()
    };
    assert_eq!(split.iter().map(sessions).collect::<Vec<_>>(), [vec!["1", "3"], vec!["2"]]);
}

#[test]
fn a_case_lists_every_process_run_that_measured_it() {
    let second = BenchProcessRun { session_name: "t".to_owned(), ..example_run_without_shard() };
    let other = BenchProcessRun {
        bench: "c".to_owned(),
        cases: BTreeMap::new(),
        ..example_run_without_shard()
    };
    let measurement =
        MeasurementOfRuns::from_matching_runs(vec![example_run_without_shard(), other, second])
            .unwrap();
    let cases = measurement.process_runs_by_case_id();
    let keys: Vec<String> =
        cases["w/f/n1/cpu/hot"].iter().map(|it| it.run.key_in_baseline()).collect();
    assert_eq!((cases.len(), keys), (1, vec!["s/b".to_owned(), "t/b".to_owned()]));
}

#[test]
fn a_shard_without_process_run_is_reported_as_missing() {
    let missing = |runs: Vec<BenchProcessRun>| {
        MeasurementOfRuns::from_matching_runs(runs).unwrap().shards_without_run()
    };
    assert_eq!(missing(vec![example_run_of_shard(1, 4)]), [""; 0]);
    assert_eq!(missing(vec![example_run_of_shard(1, 2), example_run_of_shard(2, 2)]), [""; 0]);
    assert_eq!(
        missing(vec![
            example_run_of_shard(1, 4),
            example_run_of_shard(4, 4),
            example_run_of_shard(2, 4)
        ]),
        ["b, shard 3/4"]
    );
}
