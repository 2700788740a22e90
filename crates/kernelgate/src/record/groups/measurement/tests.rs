use super::*;
use crate::record::{CargoPackage, Gpu, Provenance};

fn provenance_of_commit(hash: &str) -> Provenance {
    Provenance { commit: Some(hash.to_owned()), dirty: false }
}

fn unsharded_run() -> ProcessRun {
    let machine = Some("this host".to_owned());
    let host = Environment { machine, optimised: true, ..Environment::cpu() };
    let case = CaseRecord::untimed_samples(vec![1e6]);
    ProcessRun {
        executable: Some("build 1".to_owned()),
        cases: [("w/f/n1/cpu/hot".to_owned(), case)].into(),
        ..ProcessRun::start_now("b", "s", host, provenance_of_commit("aaaa"))
    }
}

fn shard_run(index: u32, count: u32) -> ProcessRun {
    ProcessRun {
        shard: Some(Shard { index, count }),
        executable: Some(format!("build {index}")),
        cases: BTreeMap::new(),
        ..unsharded_run()
    }
}

/// Reason why a run of session `t` cannot join the measurement that another run begins.
fn refusal_to_join(first: ProcessRun, second: ProcessRun) -> Option<DifferingRunFact> {
    let second = ProcessRun { session: "t".to_owned(), ..second };
    Measurement::from_runs(vec![first, second]).err().map(|differing| *differing)
}

fn gpu_environment(driver: &str, uuid: &str) -> Environment {
    Environment {
        device_kind: "cuda".to_owned(),
        device_name: "NVIDIA H200".to_owned(),
        gpus: Gpu::h200_with_driver(uuid, driver).into(),
        ..unsharded_run().environment
    }
}

#[test]
fn each_differing_fact_of_two_runs_is_named_with_both_values() {
    let of_case = |change: fn(&mut CaseRecord)| {
        let mut run = unsharded_run();
        run.cases.values_mut().for_each(change);
        run
    };
    let environment = |change: fn(&mut Environment)| {
        let mut run = unsharded_run();
        change(&mut run.environment);
        run
    };
    let two_shards = ProcessRun { cases: BTreeMap::new(), ..shard_run(1, 2) };
    let changed = Provenance { dirty: true, ..provenance_of_commit("aaaa") };
    let package = |name: &str| {
        let package = CargoPackage { name: name.to_owned(), manifest: "Cargo.toml".to_owned() };
        ProcessRun { package: Some(package), ..unsharded_run() }
    };
    let differing = refusal_to_join(package("one"), package("two")).unwrap();
    assert_eq!(differing.field, "package");
    assert_eq!((&*differing.left, &*differing.right), ("one (Cargo.toml)", "two (Cargo.toml)"));
    assert_eq!(refusal_to_join(package("one"), unsharded_run()), None);
    for (second, field, left, right) in [
        (two_shards, "number of shards", "1", "2"),
        (
            ProcessRun { provenance: provenance_of_commit("bbbb"), ..unsharded_run() },
            "commit",
            "aaaa",
            "bbbb",
        ),
        (ProcessRun { provenance: changed, ..unsharded_run() }, "commit", "aaaa", "aaaa+changes"),
        (
            ProcessRun { effort: "quick".to_owned(), ..unsharded_run() },
            "effort",
            "default",
            "quick",
        ),
        (ProcessRun { seed: 2, ..unsharded_run() }, "seed", "1", "2"),
        (
            ProcessRun { executable: Some("build 2".to_owned()), ..unsharded_run() },
            "executable",
            "build 1",
            "build 2",
        ),
        (environment(|it| it.optimised = false), "optimised", "true", "false"),
        (
            environment(|it| it.device_name = "another".to_owned()),
            "device_name",
            &unsharded_run().environment.device_name,
            "another",
        ),
        (of_case(|case| case.revision = 2), "revision", "1", "2"),
    ] {
        let differing = refusal_to_join(unsharded_run(), second).expect(field);
        assert_eq!((differing.field, &*differing.runs[0]), (field, "s/b"));
        assert!(differing.runs[1].starts_with("t/b"), "{:?}", differing.runs);
        assert_eq!((&*differing.left, &*differing.right), (left, right), "{field}");
    }
    let differing =
        refusal_to_join(unsharded_run(), of_case(|case| case.work.read_bytes = 16)).unwrap();
    assert_eq!((differing.field, &*differing.case.unwrap()), ("work", "w/f/n1/cpu/hot"));
}

#[test]
fn another_driver_or_gpu_model_prevents_a_merge_and_another_card_does_not() {
    let on = |environment| ProcessRun { environment, ..unsharded_run() };
    let first = || on(gpu_environment("580.82", "GPU-1"));
    let field = |second| refusal_to_join(first(), on(second)).map(|it| it.field);
    assert_eq!(field(gpu_environment("590.1", "GPU-1")), Some("gpu.driver"));
    let mut other_model = gpu_environment("580.82", "GPU-2");
    other_model.gpus =
        Gpu { multiprocessors: 114, ..Gpu::h200_with_driver("GPU-2", "580.82") }.into();
    assert_eq!(field(other_model), Some("gpu.multiprocessors"));
    assert_eq!(field(gpu_environment("580.99", "GPU-2")), None);
}

#[test]
fn the_message_names_both_runs_and_their_differing_values() {
    let other = ProcessRun { provenance: provenance_of_commit("bbbb"), ..unsharded_run() };
    assert_eq!(
        refusal_to_join(unsharded_run(), other).unwrap().to_string(),
        "commit is `aaaa` in the run s/b and `bbbb` in the run t/b: these are no process runs of \
         the same code"
    );
    assert_eq!(
        refusal_to_join(shard_run(1, 2), shard_run(2, 3)).unwrap().to_string(),
        "number of shards is `2` in the run s/b-1-of-2 and `3` in the run t/b-2-of-3: these are \
         no shards of one measurement"
    );
    let mut redefined = unsharded_run();
    redefined.cases.values_mut().for_each(|case| case.revision = 2);
    let text = refusal_to_join(unsharded_run(), redefined).unwrap().to_string();
    assert_eq!(
        text,
        "revision of w/f/n1/cpu/hot is `1` in the run s/b and `2` in the run t/b: these are no process runs of the same code"
    );
}

#[test]
fn shards_of_one_commit_form_one_measurement_even_from_separate_builds() {
    assert_eq!(refusal_to_join(shard_run(1, 2), shard_run(2, 2)), None);
    let changed = |index| ProcessRun {
        provenance: Provenance { dirty: true, ..provenance_of_commit("aaaa") },
        ..shard_run(index, 2)
    };
    assert_eq!(refusal_to_join(changed(1), changed(2)).unwrap().field, "executable");
}

#[test]
fn a_case_definition_is_compared_with_every_earlier_run_of_the_bench() {
    let with_case = |session: &str, index, revision| {
        let mut case = CaseRecord::untimed_samples(vec![1e6]);
        case.revision = revision;
        ProcessRun {
            session: session.to_owned(),
            cases: [("a".to_owned(), case)].into(),
            ..shard_run(index, 2)
        }
    };
    let runs = vec![shard_run(1, 2), with_case("s", 2, 1), with_case("t", 2, 2)];
    let differing = Measurement::from_runs(runs).unwrap_err();
    assert_eq!(differing.field, "revision");
    assert_eq!(differing.runs, ["s/b-2-of-2", "t/b-2-of-2"]);
}

#[test]
fn shards_without_a_common_case_must_agree_on_the_workload_definition() {
    let with_case = |index, id: &str, revision| {
        let mut case = CaseRecord::untimed_samples(vec![1e6]);
        case.revision = revision;
        ProcessRun { cases: [(id.to_owned(), case)].into(), ..shard_run(index, 2) }
    };
    assert_eq!(refusal_to_join(with_case(1, "a", 1), with_case(2, "b", 1)), None);
    let differing = refusal_to_join(with_case(1, "a", 1), with_case(2, "b", 2)).unwrap();
    assert_eq!((differing.field, differing.case), ("revision", Some("b".to_owned())));
}

#[test]
fn runs_of_another_bench_or_machine_may_have_another_build() {
    let other = || ProcessRun { provenance: provenance_of_commit("bbbb"), ..unsharded_run() };
    assert_eq!(
        refusal_to_join(unsharded_run(), ProcessRun { bench: "c".to_owned(), ..other() }),
        None
    );
    assert_eq!(refusal_to_join(unsharded_run(), unsharded_run()), None);
    assert_eq!(
        refusal_to_join(unsharded_run(), ProcessRun { executable: None, ..unsharded_run() }),
        None
    );
    let on = |machine: Option<&str>| ProcessRun {
        executable: Some("build 2".to_owned()),
        environment: Environment {
            machine: machine.map(str::to_owned),
            ..unsharded_run().environment
        },
        ..unsharded_run()
    };
    assert_eq!(refusal_to_join(unsharded_run(), on(Some("another host"))), None);
    assert_eq!(refusal_to_join(unsharded_run(), on(None)).unwrap().field, "executable");
}

#[test]
fn runs_of_one_build_form_one_measurement() {
    let run_of = |session: &str, hash: &str| ProcessRun {
        session: session.to_owned(),
        provenance: provenance_of_commit(hash),
        ..unsharded_run()
    };
    let split = Measurement::group_into_measurements([
        run_of("1", "aaaa"),
        run_of("2", "bbbb"),
        run_of("3", "aaaa"),
    ]);
    let sessions = |it: &Measurement| -> Vec<String> {
        it.process_runs().iter().map(|run| run.session.clone()).collect()
    };
    assert_eq!(split.iter().map(sessions).collect::<Vec<_>>(), [vec!["1", "3"], vec!["2"]]);
}

#[test]
fn a_case_lists_every_process_run_that_measured_it() {
    let second = ProcessRun { session: "t".to_owned(), ..unsharded_run() };
    let other = ProcessRun { bench: "c".to_owned(), cases: BTreeMap::new(), ..unsharded_run() };
    let measurement = Measurement::from_runs(vec![unsharded_run(), other, second]).unwrap();
    let cases = measurement.runs_by_case();
    let keys: Vec<String> =
        cases["w/f/n1/cpu/hot"].iter().map(|it| it.run.baseline_key()).collect();
    assert_eq!((cases.len(), keys), (1, vec!["s/b".to_owned(), "t/b".to_owned()]));
}

#[test]
fn a_shard_without_a_run_is_reported_as_missing() {
    let missing = |runs: Vec<ProcessRun>| Measurement::from_runs(runs).unwrap().missing_shards();
    assert_eq!(missing(vec![shard_run(1, 4)]), [""; 0]);
    assert_eq!(missing(vec![shard_run(1, 2), shard_run(2, 2)]), [""; 0]);
    assert_eq!(missing(vec![shard_run(1, 4), shard_run(4, 4), shard_run(2, 4)]), ["b, shard 3/4"]);
}
