//! Shards, budgets and several runs of bench processes, and the handling of their records.

#![cfg(unix)]

use crate::package::{Outcome, Package, fixture_path, lines_with};
use kernelgate::record::run::NOT_RUN_PREFIX;
use serde_json::Value;

const FOUR: &str = "--axis n=64,96,128,160";

fn ids(run: &Value, of: &str) -> Vec<String> {
    run[of].as_object().unwrap().keys().cloned().collect()
}

fn record(package: &Package, session: &str, name: &str) -> Value {
    let path = package.path(&format!("target/kernelgate/runs/{session}/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn shards_share_the_cases_and_are_put_together() {
    let package = Package::new();
    package.bench("whole", FOUR).expect(0, &[]);
    for shard in ["1", "2"] {
        let line = format!("{FOUR} --shard {shard}/2");
        package.bench("parts", &line).expect(0, &[&format!("fixture, shard {shard}/2: ")]);
    }
    let parts = [1, 2].map(|index| record(&package, "parts", &format!("fixture-{index}-of-2")));
    let mut both: Vec<String> = parts.iter().flat_map(|run| ids(run, "cases")).collect();
    assert!(parts.iter().all(|run| ids(run, "cases").len() < 4));
    both.sort();
    assert_eq!(both, ids(&package.run("whole"), "cases"));
    assert_eq!((&parts[1]["shard"]["index"], &parts[1]["shard"]["count"]), (&2.into(), &2.into()));

    // Each record has the plan of both shards, and rates of the device on which it ran.
    let plan = &parts[0]["plan"];
    assert_eq!(
        (plan, &plan["cases"], &plan["split"]),
        (&parts[1]["plan"], &4.into(), &"hash".into())
    );
    assert!(parts.iter().all(|run| run["anchors"]["measured"]["memory_bytes_per_s"].is_number()));
    let merge = |arguments: &str| package.kernelgate(&format!("merge {arguments}"));
    let folder = "target/kernelgate/runs/parts";
    // Ceilings of a host with other load differ from one process to the next.
    let merged = format!("{folder} --output target/merged --anchor-tolerance 100");
    let expected = ["2 shards merged", "4 cases on 1 device in target/merged"];
    merge(&merged).expect(0, &expected);
    merge(&merged).expect(0, &expected);
    merge(&format!("{folder}/fixture-1-of-2.json --output target/half"))
        .expect(3, &["missing: bench fixture, shard 2/2"]);
    merge(&format!("{folder} {}", package.record("whole").display()))
        .expect(2, &["whole/fixture.json: measured without --shard"]);

    // Both shards together are the last session, for a baseline and for the gate.
    package.kernelgate("baseline add main").expect(0, &["4 cases, up to 1 runs each"]);
    for index in [1, 2] {
        let name = format!("target/kernelgate/runs/parts/fixture-{index}-of-2.json");
        package.set_times(&package.path(&name), 1e6);
    }
    package.set_times(&package.baseline("main"), 1e6);
    package.kernelgate(&format!("baseline seal {}", package.baseline("main").display()));
    package.kernelgate("gate --baseline main").expect(0, &["4 unchanged"]);
    // One of three shards is missing; two shards of another division do not belong to it.
    for shard in ["1", "3"] {
        package.bench("three", &format!("{FOUR} --shard {shard}/3")).expect(0, &[]);
    }
    let three = "--session target/kernelgate/runs/three";
    package
        .kernelgate(&format!("gate --baseline main {three}"))
        .expect(3, &["missing: fixture, shard 2/3", "; shards are missing"]);
    let mixed = format!("{three} --session target/kernelgate/runs/parts");
    let refused = "refused: number of shards is `2` in the run parts/fixture-1-of-2 and `3`";
    package.kernelgate(&format!("gate --baseline main {mixed}")).expect(4, &[refused]);
    let refused_files = "refused: number of shards is `2` in target/kernelgate/runs/parts/";
    merge("target/kernelgate/runs/parts target/kernelgate/runs/three").expect(4, &[refused_files]);
    package.kernelgate(&format!("baseline add other {mixed}")).expect(4, &[refused]);
    package
        .kernelgate(&format!("baseline add other {three}"))
        .expect(0, &["warning: fixture, shard 2/3 is missing"]);
    package.bench("bad", "--shard 3/2").expect(2, &["a shard is 1/2 to 2/2", "--shard"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_session_that_does_not_fit_on_the_disk_is_named_and_leaves_nothing() {
    let package = Package::new();
    package.bench("parts", "--shard 1/1").expect(0, &[]);
    let mut shell = package.command(std::path::Path::new("sh"), "-c");
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let merge = format!("{program} merge target/kernelgate/runs/parts --output target/merged");
    let full = shell.arg(format!("trap '' XFSZ; ulimit -f 0; exec {merge}")).output().unwrap();
    let words = "failed to write target/merged/fixture-1-of-1.json: File too large";
    Outcome::from(full).expect(2, &[words]);
    let left = std::fs::read_dir(package.path("target")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("merged")), "{left:?}");
    package.kernelgate("merge target/kernelgate/runs/parts --output target/merged").expect(0, &[]);
}

#[test]
fn a_comparison_in_shards_is_decided_when_all_are_there() {
    let package = Package::new();
    let dir = package.dir().replace("--dir ", "");
    let rules = ["n64_", "n999"]
        .map(|cases| format!("[[threshold]]\ncases = \"{cases}\"\nrelative = 0.5\n"));
    std::fs::write(package.path("kernelgate.toml"), rules.concat()).unwrap();
    let line = format!(
        "compare --base-dir {dir} --head-dir {dir} --time-identical --backend cpu {FOUR} \
         --max-blocks 1 --case-time 0.01s --shard"
    );
    for shard in ["1/2", "2/2"] {
        let words = format!("shard {shard} in {}", package.path("target").display());
        package.kernelgate(&format!("{line} {shard}")).expect(0, &[&words, "`kernelgate merge`"]);
    }
    let shards = "target/kernelgate/compare/shards";
    let merge = |paths: &str| {
        package.kernelgate(&format!("merge {paths} --anchor-tolerance 100 --format json"))
    };
    let notes = |outcome: &Outcome| {
        let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
        json["rules"]["notes"].clone()
    };
    let both = merge(shards);
    // One block is too few for a decision.
    both.expect(3, &["2 shards merged"]);
    let json: Value = serde_json::from_str(&both.stdout).unwrap();
    let judged = json["judged"].as_array().unwrap();
    assert!(judged.len() == 4 && judged.iter().all(|it| it["decision"]["pairs"] == 2), "{json}");
    assert_eq!(json["missing_shards"], serde_json::json!([]));
    // A pattern that matches in one shard only has an effect.
    assert_eq!(notes(&both), serde_json::json!(["[[threshold]] `n999` matches no case"]));
    let reversed = merge(&format!("{shards}/2-of-2.json {shards}/1-of-2.json"));
    assert_eq!(reversed.stdout, both.stdout);
    let half = merge(&format!("{shards}/2-of-2.json"));
    half.expect(3, &["missing: comparison, shard 1/2"]);
    assert_eq!(notes(&half), serde_json::json!([]));
}

/// A shard of a run on a GPU, with the cases of one workload.
fn on_card(uuid: &str, index: u32, workload: &str) -> Value {
    let mut run: Value = serde_json::from_str(include_str!("../fixture/gpu_run.json")).unwrap();
    run["environment"]["gpus"][0]["uuid"] = uuid.into();
    run["session"] = format!("{uuid}-{index}").into();
    run["provenance"]["dirty"] = false.into();
    run["shard"] = serde_json::json!({ "index": index, "count": 2 });
    run["plan"] = serde_json::json!({ "digest": "d", "cases": 3, "problems": 2, "split": "hash" });
    run["anchors"] = serde_json::json!({ "measured": {
        "power": "steady", "memory_bytes_per_s": 3.2e12, "matmul_flops_per_s": 8.8e14,
    } });
    let cases = run["cases"].as_object_mut().unwrap();
    cases.retain(|_, case| case["workload"] == workload);
    for case in cases.values_mut() {
        case["samples"]["power"] = serde_json::json!({ "state": "steady" });
    }
    run
}

#[test]
fn shards_on_two_cards_of_a_model_are_one_measurement() {
    let package = Package::new();
    let write = |folder: &str, cards: [&str; 2]| {
        for (index, card) in [1, 2].into_iter().zip(cards) {
            let workload = ["st_bif/backward", "st_bif/forward"][index as usize - 1];
            let path = package.path(&format!("{folder}/{index}.json"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, on_card(card, index, workload).to_string()).unwrap();
        }
    };
    write("own", ["GPU-1", "GPU-2"]);
    write("exchanged", ["GPU-2", "GPU-1"]);
    let merged = "target/kernelgate/runs/merged";
    package
        .kernelgate(&format!("merge own --output {merged}"))
        .expect(0, &["2 shards merged", "3 cases on 2 devices"]);
    package.kernelgate("merge exchanged --output exchanged-merged").expect(0, &[]);
    // Another process computed on the GPU beside a case of the second shard.
    write("shared", ["GPU-1", "GPU-2"]);
    let mut shared = on_card("GPU-2", 2, "st_bif/forward");
    let case = shared["cases"].as_object_mut().unwrap().values_mut().next().unwrap();
    case["samples"]["conditions"]["other_processes"] = 1.into();
    std::fs::write(package.path("shared/2.json"), shared.to_string()).unwrap();
    package
        .kernelgate("merge shared --output shared-merged")
        .expect(0, &["shared/2.json beside which another process computed on the GPU: 1; `gate`"]);
    package
        .kernelgate("merge shared --output shared-merged --format json")
        .expect(0, &["\"shared_gpu\": {\n    \"shared/2.json\": 1"]);
    package.kernelgate(&format!("baseline add main --session {merged}")).expect(0, &["3 cases"]);
    // Each case is compared on the card that both sides have, or by model with a wider threshold.
    let gate =
        |session: &str| package.kernelgate(&format!("gate --baseline main --session {session}"));
    let same = gate(merged);
    same.expect(0, &["3 unchanged"]);
    assert_eq!(lines_with(&same.all(), "same device"), "");
    gate("exchanged-merged").expect(0, &["not known to be the same device", "3 unchanged"]);
    // A history has a series for each card, a report all cases with both cards.
    let history = package.kernelgate("history");
    history.expect(0, &["; GPU-1", "; GPU-2", "cuda/replay/hot", "cuda/fused/hot"]);
    package.kernelgate("report --out page").expect(0, &[]);
    let report = std::fs::read_to_string(package.path("page/report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["cases"].as_array().unwrap().len(), 3);
    assert!(report["facts"].to_string().contains("GPU-1, GPU-2"), "{}", report["facts"]);
}

#[test]
fn a_verb_without_a_bench_run_states_that_it_takes_a_shard() {
    let package = Package::new();
    let dir = package.dir();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let one = "fixture: shard 1/2: ";
    let run = |program: &std::path::Path, line: &str, shard: &str| {
        let mut command = package.command(program, line);
        Outcome::from(command.env("KERNELGATE_SHARD", shard).output().unwrap())
    };
    let mut printed = Vec::new();
    for line in [format!("verify {dir} {FOUR}"), format!("list {dir} {FOUR}")] {
        let first = run(program, &line, "1/2");
        first.expect(0, &[one, " of 4 cases", "of shard 1/2 only"]);
        let second = run(program, &line, "2/2");
        printed.push(lines_with(&first.stdout, "shard"));
        assert_ne!(first.stdout, second.stdout);
        assert!(!package.kernelgate(&line).all().contains("shard"));
    }
    insta::assert_debug_snapshot!(printed, @r#"
    [
        "2 ok, 0 failed, 2 skipped; of shard 1/2 only",
        "2 cases run here; of shard 1/2 only",
    ]
    "#);
    for flag in ["--test", "--list", "--profile-time 1 --bench n64"] {
        run(&fixture_path(), &format!("{flag} {FOUR}"), "1/2").expect(0, &[one]);
        let whole = package.command(&fixture_path(), &format!("{flag} {FOUR}")).output().unwrap();
        assert!(!Outcome::from(whole).all().contains("shard"));
    }
    // Records of `verify` merge in any order, with the exit code of one verification.
    let records = ["1", "2"].map(|index| format!("target/kernelgate/verify/{index}-of-2.json"));
    let [one_half, other_half] = &records;
    let merged = package.kernelgate(&format!("merge {one_half} {other_half}"));
    merged.expect(0, &["2 shards merged", "4 ok, 0 failed, 4 skipped"]);
    let reversed = package.kernelgate(&format!("merge {other_half} {one_half}"));
    assert_eq!(merged.stdout, reversed.stdout);
    package
        .kernelgate(&format!("merge {other_half}"))
        .expect(3, &["missing: verification, shard 1/2"]);
    // A case belongs to one shard only.
    let path = package.path(one_half);
    let mut forged: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    forged["shard"]["index"] = 2.into();
    std::fs::write(package.path("forged.json"), forged.to_string()).unwrap();
    package
        .kernelgate(&format!("merge {one_half} forged.json"))
        .expect(4, &["refused: shard of ", "is `1/2` in target", "`2/2` in forged.json"]);
    let other_filter = format!("verify {dir} {FOUR} n96|n128 --shard-output other.json");
    run(program, &other_filter, "1/2").expect(0, &["shard 1/2 in other.json"]);
    package
        .kernelgate(&format!("merge other.json {other_half}"))
        .expect(4, &["refused: plan is `", "other.json"]);
    // A shard without a case still belongs to the whole.
    let empty =
        (1..=64).map(|index| run(program, &format!("verify {dir} n64"), &format!("{index}/64")));
    let outcomes: Vec<Outcome> = empty.take(3).collect();
    let none = outcomes.iter().find(|it| it.stdout.contains("0 ok")).unwrap();
    none.expect(0, &["0 ok, 0 failed, 0 skipped; of shard", "0 of 1 cases"]);
    // A shard whose cases are all skipped, as on a machine without its GPU, does not count.
    let skipped = format!("verify {dir} cpu/never {FOUR}");
    for shard in ["1/1", ""] {
        run(program, &skipped, shard).expect(2, &["nothing was verified: every case was skipped"]);
    }
}

#[test]
fn a_budget_ends_before_the_next_case_and_what_is_left_is_listed() {
    let package = Package::new();
    // Making the inputs alone takes longer than the budget.
    let mut none = package.bench_command("none", &format!("{FOUR} --budget 0.01s"));
    Outcome::from(none.env("FIXTURE_INPUTS_MS", "20").output().unwrap()).expect(
        0,
        &["cases not run: the budget of 0 s is used up", "skipped 4: not run: the budget"],
    );
    let run = package.run("none");
    let reasons = run["skipped"].as_object().unwrap().values();
    let left = reasons.filter(|why| why.as_str().unwrap().starts_with(NOT_RUN_PREFIX)).count();
    assert_eq!((ids(&run, "cases").len(), left), (0, 4));
    assert_eq!(run["complete"], true);
    // A requested case without a time does not pass.
    package.bench("whole", FOUR).expect(0, &[]);
    let whole = "--session target/kernelgate/runs/whole";
    package.kernelgate(&format!("baseline add main {whole}")).expect(0, &[]);
    package
        .kernelgate("gate --baseline main --session target/kernelgate/runs/none")
        .expect(3, &["not run: the budget"]);
    let outcome = package.bench("thorough", "--effort thorough --budget 0.01s n64");
    outcome.expect(0, &["at least ", "of timing: ", "by their times in the last session"]);
    package
        .bench("bad", "--budget soon")
        .expect(2, &["a time is 500ms, 90s, 5m or 1h", "--budget"]);
}

#[test]
fn runs_of_different_code_are_not_one_side() {
    let package = Package::new();
    let measured = |session: &str, commit: &str, time_ns: f64| {
        let mut bench = package.bench_command(session, "");
        Outcome::from(bench.env("KERNELGATE_COMMIT", commit).output().unwrap()).expect(0, &[]);
        package.set_times(&package.record(session), time_ns);
    };
    measured("b1", "aaaa1111", 200_000.0);
    package.kernelgate("baseline add a").expect(0, &[]);
    measured("m1", "bbbb2222", 182_000.0);
    measured("m2", "cccc3333", 300_000.0);
    let gate = |flags: &str| package.kernelgate(&format!("gate --baseline a {flags}"));
    gate("").expect(1, &["2 regressed"]);
    let both = ["m1", "m2"].map(|it| format!("--session target/kernelgate/runs/{it}")).join(" ");
    for which in ["--last 2", &both] {
        let why = "refused: commit is `bbbb2222` in the run m1/fixture and `cccc3333` in the run \
                   m2/fixture: these are no process runs of the same code";
        gate(which).expect(4, &[why]);
        package.kernelgate(&format!("baseline add b {which}")).expect(4, &[why]);
    }
    // `--last` selects several runs of one commit.
    measured("m3", "cccc3333", 301_000.0);
    gate("--last 2").expect(1, &["2 regressed", "1:2"]);
    let mut run = package.run("m3");
    run["executable"] = "0123".into();
    std::fs::write(package.record("m3"), run.to_string()).unwrap();
    gate("--last 2").expect(4, &["refused: executable is ", "`0123` in the run m3/fixture"]);
    gate("").expect(1, &["2 regressed"]);
}
