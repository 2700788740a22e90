use super::*;
use crate::record::{CargoPackage, Gpu, Provenance};

fn provenance_of_commit(hash: &str) -> Provenance {
    Provenance { commit: Some(hash.to_owned()), dirty: false }
}

fn whole() -> ProcessRun {
    let machine = Some("this host".to_owned());
    let host = Environment { machine, optimised: true, ..Environment::cpu() };
    let case = CaseRecord::from_samples(vec![1e6]);
    ProcessRun {
        executable: Some("build 1".to_owned()),
        cases: [("w/f/n1/cpu/hot".to_owned(), case)].into(),
        ..ProcessRun::start("b", "s", host, provenance_of_commit("aaaa"))
    }
}

fn shard(index: u32, count: u32) -> ProcessRun {
    ProcessRun {
        shard: Some(Shard { index, count }),
        executable: Some(format!("build {index}")),
        cases: BTreeMap::new(),
        ..whole()
    }
}

/// Reason why a run of session `t` cannot join the measurement that another run begins.
fn refusal_to_join(first: ProcessRun, second: ProcessRun) -> Option<DifferingRunFact> {
    let second = ProcessRun { session: "t".to_owned(), ..second };
    Measurement::from_runs(vec![first, second]).err().map(|differing| *differing)
}

fn on_gpu(driver: &str, uuid: &str) -> Environment {
    Environment {
        device_kind: "cuda".to_owned(),
        device_name: "NVIDIA H200".to_owned(),
        gpus: Gpu::h200_with_driver(uuid, driver).into(),
        ..whole().environment
    }
}

#[test]
fn each_fact_that_differs_is_named_with_both_values() {
    let of_case = |change: fn(&mut CaseRecord)| {
        let mut run = whole();
        run.cases.values_mut().for_each(change);
        run
    };
    let environment = |change: fn(&mut Environment)| {
        let mut run = whole();
        change(&mut run.environment);
        run
    };
    let two_shards = ProcessRun { cases: BTreeMap::new(), ..shard(1, 2) };
    let changed = Provenance { dirty: true, ..provenance_of_commit("aaaa") };
    let package = |name: &str| {
        let package = CargoPackage { name: name.to_owned(), manifest: "Cargo.toml".to_owned() };
        ProcessRun { package: Some(package), ..whole() }
    };
    let differing = refusal_to_join(package("one"), package("two")).unwrap();
    assert_eq!(differing.field, "package");
    assert_eq!((&*differing.left, &*differing.right), ("one (Cargo.toml)", "two (Cargo.toml)"));
    assert_eq!(refusal_to_join(package("one"), whole()), None);
    for (second, field, left, right) in [
        (two_shards, "number of shards", "1", "2"),
        (
            ProcessRun { provenance: provenance_of_commit("bbbb"), ..whole() },
            "commit",
            "aaaa",
            "bbbb",
        ),
        (ProcessRun { provenance: changed, ..whole() }, "commit", "aaaa", "aaaa+changes"),
        (ProcessRun { effort: "quick".to_owned(), ..whole() }, "effort", "default", "quick"),
        (ProcessRun { seed: 2, ..whole() }, "seed", "1", "2"),
        (
            ProcessRun { executable: Some("build 2".to_owned()), ..whole() },
            "executable",
            "build 1",
            "build 2",
        ),
        (environment(|it| it.optimised = false), "optimised", "true", "false"),
        (
            environment(|it| it.device_name = "another".to_owned()),
            "device_name",
            &whole().environment.device_name,
            "another",
        ),
        (of_case(|case| case.revision = 2), "revision", "1", "2"),
    ] {
        let differing = refusal_to_join(whole(), second).expect(field);
        assert_eq!((differing.field, &*differing.runs[0]), (field, "s/b"));
        assert!(differing.runs[1].starts_with("t/b"), "{:?}", differing.runs);
        assert_eq!((&*differing.left, &*differing.right), (left, right), "{field}");
    }
    let differing = refusal_to_join(whole(), of_case(|case| case.work.read_bytes = 16)).unwrap();
    assert_eq!((differing.field, &*differing.case.unwrap()), ("work", "w/f/n1/cpu/hot"));
}

#[test]
fn another_driver_or_gpu_model_is_refused_and_another_card_is_not() {
    let on = |environment| ProcessRun { environment, ..whole() };
    let first = || on(on_gpu("580.82", "GPU-1"));
    let field = |second| refusal_to_join(first(), on(second)).map(|it| it.field);
    assert_eq!(field(on_gpu("590.1", "GPU-1")), Some("gpu.driver"));
    let mut other_model = on_gpu("580.82", "GPU-2");
    other_model.gpus =
        Gpu { multiprocessors: 114, ..Gpu::h200_with_driver("GPU-2", "580.82") }.into();
    assert_eq!(field(other_model), Some("gpu.multiprocessors"));
    assert_eq!(field(on_gpu("580.99", "GPU-2")), None);
}

#[test]
fn a_refusal_is_a_sentence_with_the_runs_and_their_values() {
    let other = ProcessRun { provenance: provenance_of_commit("bbbb"), ..whole() };
    assert_eq!(
        refusal_to_join(whole(), other).unwrap().to_string(),
        "commit is `aaaa` in the run s/b and `bbbb` in the run t/b: these are no process runs of \
         the same code"
    );
    assert_eq!(
        refusal_to_join(shard(1, 2), shard(2, 3)).unwrap().to_string(),
        "number of shards is `2` in the run s/b-1-of-2 and `3` in the run t/b-2-of-3: these are \
         no shards of one measurement"
    );
    let mut redefined = whole();
    redefined.cases.values_mut().for_each(|case| case.revision = 2);
    let text = refusal_to_join(whole(), redefined).unwrap().to_string();
    assert_eq!(
        text,
        "revision of w/f/n1/cpu/hot is `1` in the run s/b and `2` in the run t/b: these are no process runs of the same code"
    );
}

#[test]
fn shards_of_one_commit_belong_together_whoever_built_them() {
    assert_eq!(refusal_to_join(shard(1, 2), shard(2, 2)), None);
    let changed = |index| ProcessRun {
        provenance: Provenance { dirty: true, ..provenance_of_commit("aaaa") },
        ..shard(index, 2)
    };
    assert_eq!(refusal_to_join(changed(1), changed(2)).unwrap().field, "executable");
}

#[test]
fn a_definition_is_compared_with_every_earlier_run_of_the_bench() {
    let with_case = |session: &str, index, revision| {
        let mut case = CaseRecord::from_samples(vec![1e6]);
        case.revision = revision;
        ProcessRun {
            session: session.to_owned(),
            cases: [("a".to_owned(), case)].into(),
            ..shard(index, 2)
        }
    };
    let runs = vec![shard(1, 2), with_case("s", 2, 1), with_case("t", 2, 2)];
    let differing = Measurement::from_runs(runs).unwrap_err();
    assert_eq!(differing.field, "revision");
    assert_eq!(differing.runs, ["s/b-2-of-2", "t/b-2-of-2"]);
}

#[test]
fn shards_without_a_common_case_have_one_definition_of_a_workload() {
    let with_case = |index, id: &str, revision| {
        let mut case = CaseRecord::from_samples(vec![1e6]);
        case.revision = revision;
        ProcessRun { cases: [(id.to_owned(), case)].into(), ..shard(index, 2) }
    };
    assert_eq!(refusal_to_join(with_case(1, "a", 1), with_case(2, "b", 1)), None);
    let differing = refusal_to_join(with_case(1, "a", 1), with_case(2, "b", 2)).unwrap();
    assert_eq!((differing.field, differing.case), ("revision", Some("b".to_owned())));
}

#[test]
fn another_bench_or_another_machine_may_have_its_own_build() {
    let other = || ProcessRun { provenance: provenance_of_commit("bbbb"), ..whole() };
    assert_eq!(refusal_to_join(whole(), ProcessRun { bench: "c".to_owned(), ..other() }), None);
    assert_eq!(refusal_to_join(whole(), whole()), None);
    assert_eq!(refusal_to_join(whole(), ProcessRun { executable: None, ..whole() }), None);
    let on = |machine: Option<&str>| ProcessRun {
        executable: Some("build 2".to_owned()),
        environment: Environment { machine: machine.map(str::to_owned), ..whole().environment },
        ..whole()
    };
    assert_eq!(refusal_to_join(whole(), on(Some("another host"))), None);
    assert_eq!(refusal_to_join(whole(), on(None)).unwrap().field, "executable");
}

#[test]
fn runs_of_one_build_are_split_into_one_measurement() {
    let run_of = |session: &str, hash: &str| ProcessRun {
        session: session.to_owned(),
        provenance: provenance_of_commit(hash),
        ..whole()
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
fn a_case_has_every_process_run_that_measured_it() {
    let second = ProcessRun { session: "t".to_owned(), ..whole() };
    let other = ProcessRun { bench: "c".to_owned(), cases: BTreeMap::new(), ..whole() };
    let measurement = Measurement::from_runs(vec![whole(), other, second]).unwrap();
    let cases = measurement.runs_by_case();
    let keys: Vec<String> = cases["w/f/n1/cpu/hot"].iter().map(|it| it.run.key()).collect();
    assert_eq!((cases.len(), keys), (1, vec!["s/b".to_owned(), "t/b".to_owned()]));
}

#[test]
fn a_shard_that_the_others_lack_is_missing() {
    let missing = |runs: Vec<ProcessRun>| Measurement::from_runs(runs).unwrap().missing_shards();
    assert_eq!(missing(vec![shard(1, 4)]), [""; 0]);
    assert_eq!(missing(vec![shard(1, 2), shard(2, 2)]), [""; 0]);
    assert_eq!(missing(vec![shard(1, 4), shard(4, 4), shard(2, 4)]), ["b, shard 3/4"]);
}
