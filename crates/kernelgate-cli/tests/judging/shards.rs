//! Shards, budgets and several runs of bench processes, and the handling of their records.

#![cfg(unix)]

use std::path::Path;

use crate::package::outcome::normalized;
use crate::package::{Outcome, Package, fixture_path, lines_with};
use kernelgate::record::run::NOT_RUN_REASON_PREFIX;
use serde_json::Value;

const FOUR: &str = "--axis n=64,96,128,160";

fn ids(run: &Value, of: &str) -> Vec<String> {
    run[of].as_object().unwrap().keys().cloned().collect()
}

fn record(package: &Package, session: &str, name: &str) -> Value {
    let path = package.path(&format!("target/kernelgate/runs/{session}/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Makes the two shards of session `parts` the first and the last of three, in session `three`.
fn first_and_last_of_three(package: &Package) {
    std::fs::create_dir_all(package.path("target/kernelgate/runs/three")).unwrap();
    for (from, to) in [(1, 1), (2, 3)] {
        let mut run = record(package, "parts", &format!("fixture-{from}-of-2"));
        run["shard"] = serde_json::json!({ "index": to, "count": 3 });
        run["session"] = "three".into();
        run.as_object_mut().unwrap().remove("checksum");
        let path = format!("target/kernelgate/runs/three/fixture-{to}-of-3.json");
        std::fs::write(package.path(&path), run.to_string()).unwrap();
    }
}

#[test]
fn shards_share_the_cases_and_are_put_together() {
    let package = Package::new();
    package.bench("whole", FOUR).exits(0);
    for shard in ["1", "2"] {
        package.bench("parts", &format!("{FOUR} --shard {shard}/2")).exits(0);
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
    let first = merge(&merged);
    insta::assert_snapshot!(first.text(), @r"
    exit 0
    2 shards merged
    4 cases on 1 device in target/merged
    ");
    assert_eq!(merge(&merged).text(), first.text());
    merge(&format!("{folder}/fixture-1-of-2.json --output target/half")).exits(3);
    let whole = merge(&format!("{folder} {}", package.record("whole").display()));
    insta::assert_snapshot!(whole.refusal(2), @"error: FOLDER/target/kernelgate/runs/whole/fixture.json: measured without --shard: it is the whole, not a part");

    // Both shards together are the last session, for a baseline and for the gate.
    insta::assert_snapshot!(package.kernelgate("baseline add main").text(), @r"
    exit 0
    4 cases, up to 1 runs each, in FOLDER/baselines/DEVICE/main.json
    ");
    for index in [1, 2] {
        let name = format!("target/kernelgate/runs/parts/fixture-{index}-of-2.json");
        package.set_times(&package.path(&name), 1e6);
    }
    package.set_times(&package.baseline("main"), 1e6);
    package.kernelgate(&format!("baseline seal {}", package.baseline("main").display()));
    let gate =
        |flags: &str| package.kernelgate(&format!("gate --baseline main --format json {flags}"));
    assert_eq!(gate("").exits(0).verdicts(), ["unchanged"; 4]);
    // One of three shards is missing; two shards of another division do not belong to it.
    first_and_last_of_three(&package);
    let three = "--session target/kernelgate/runs/three";
    let judged = gate(three);
    assert_eq!(judged.exits(3).verdicts(), ["unchanged"; 4]);
    assert_eq!(judged.json()["missing_shards"], serde_json::json!(["fixture, shard 2/3"]));
    let mixed = format!("{three} --session target/kernelgate/runs/parts");
    let refused = package.kernelgate(&format!("gate --baseline main {mixed}"));
    insta::assert_snapshot!(refused.text(), @r"
    exit 4
    refused: number of shards is `2` in the run parts/fixture-1-of-2 and `3` in the run three/fixture-1-of-3: these are no shards of one measurement
    ");
    let merged = merge("target/kernelgate/runs/parts target/kernelgate/runs/three");
    insta::assert_snapshot!(merged.text(), @r"
    exit 4
    refused: number of shards is `2` in target/kernelgate/runs/parts/fixture-1-of-2.json and `3` in target/kernelgate/runs/three/fixture-1-of-3.json
    ");
    let added = package.kernelgate(&format!("baseline add other {mixed}"));
    assert_eq!(added.text(), refused.text());
    let added = package.kernelgate(&format!("baseline add other {three}"));
    insta::assert_snapshot!(added.text(), @r"
    exit 0
    4 cases, up to 1 runs each, in FOLDER/baselines/DEVICE/other.json
    -- stderr
    warning: fixture, shard 2/3 is missing: the baseline gets the cases of the others
    ");
    insta::assert_snapshot!(package.bench("bad", "--shard 3/2").refusal(2), @r"
    error: invalid value '3/2' for '--shard <I/N|auto>': `3/2`: a shard is 1/2 to 2/2; shards are counted from 1

    For more information, try '--help'.
    ");
}

#[cfg(target_os = "linux")]
#[test]
fn a_session_that_does_not_fit_on_the_disk_is_named_and_leaves_nothing() {
    let package = Package::new();
    write_shards(&package, "parts", ["GPU-1", "GPU-2"]);
    std::fs::create_dir(package.path("target")).unwrap();
    let mut shell = package.command(Path::new("sh"), "-c");
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let merge = format!("{program} merge parts --output target/merged");
    let full = shell.arg(format!("trap '' XFSZ; ulimit -f 0; exec {merge}")).output().unwrap();
    insta::assert_snapshot!(Outcome::from(full).refusal(2), @"error: failed to write target/merged/st_bif-1-of-2.json: File too large (os error 27)");
    let left = std::fs::read_dir(package.path("target")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("merged")), "{left:?}");
    package.kernelgate("merge parts --output target/merged").exits(0);
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
        package.kernelgate(&format!("{line} {shard}")).exits(0);
    }
    let shards = "target/kernelgate/compare/shards";
    let merge = |paths: &str| {
        package.kernelgate(&format!("merge {paths} --anchor-tolerance 100 --format json"))
    };
    let notes = |outcome: &Outcome| outcome.json()["rules"]["notes"].clone();
    let both = merge(shards);
    // One block is too few for a decision.
    let json = both.exits(3).json();
    let judged = json["judged"].as_array().unwrap();
    assert!(judged.len() == 4 && judged.iter().all(|it| it["decision"]["pairs"] == 2), "{json}");
    assert_eq!(json["missing_shards"], serde_json::json!([]));
    // A pattern that matches in one shard only has an effect.
    assert_eq!(notes(&both), serde_json::json!(["[[threshold]] `n999` matches no case"]));
    let reversed = merge(&format!("{shards}/2-of-2.json {shards}/1-of-2.json"));
    assert_eq!(reversed.stdout, both.stdout);
    let half = merge(&format!("{shards}/2-of-2.json"));
    let missing = &half.exits(3).json()["missing_shards"];
    assert_eq!(missing, &serde_json::json!(["comparison, shard 1/2"]));
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

/// Writes both shards of a run on two GPUs into a folder.
fn write_shards(package: &Package, folder: &str, cards: [&str; 2]) {
    for (index, card) in [1, 2].into_iter().zip(cards) {
        let workload = ["st_bif/backward", "st_bif/forward"][index as usize - 1];
        let path = package.path(&format!("{folder}/{index}.json"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, on_card(card, index, workload).to_string()).unwrap();
    }
}

#[test]
fn a_merge_counts_the_cases_on_a_shared_gpu() {
    let package = Package::new();
    // Another process computed on the GPU beside a case of the second shard.
    write_shards(&package, "shared", ["GPU-1", "GPU-2"]);
    let mut shared = on_card("GPU-2", 2, "st_bif/forward");
    let case = shared["cases"].as_object_mut().unwrap().values_mut().next().unwrap();
    case["samples"]["conditions"]["other_processes"] = 1.into();
    std::fs::write(package.path("shared/2.json"), shared.to_string()).unwrap();
    let shared = package.kernelgate("merge shared --output shared-merged");
    insta::assert_snapshot!(shared.text(), @r"
    exit 0
    2 shards merged
    cases of shared/2.json beside which another process computed on the GPU: 1; `gate` gives no verdict against them
    3 cases on 2 devices in shared-merged
    ");
    let shared = package.kernelgate("merge shared --output shared-merged --format json");
    assert_eq!(shared.exits(0).json()["shared_gpu"], serde_json::json!({ "shared/2.json": 1 }));
}

#[test]
fn shards_on_two_cards_of_a_model_are_one_measurement() {
    let package = Package::new();
    write_shards(&package, "own", ["GPU-1", "GPU-2"]);
    write_shards(&package, "exchanged", ["GPU-2", "GPU-1"]);
    let merged = "target/kernelgate/runs/merged";
    insta::assert_snapshot!(package.kernelgate(&format!("merge own --output {merged}")).text(), @r"
    exit 0
    2 shards merged
    3 cases on 2 devices in target/kernelgate/runs/merged
    ");
    package.kernelgate("merge exchanged --output exchanged-merged").exits(0);
    package.kernelgate(&format!("baseline add main --session {merged}")).exits(0);
    // Each case is compared on the card that both sides have, or by model with a wider threshold.
    for (session, same_device, other_device) in [
        (merged, true, Value::Null),
        ("exchanged-merged", false, serde_json::json!(["GPU-2", "GPU-1"])),
    ] {
        let line = format!("gate --baseline main --format json --session {session}");
        let gate = package.kernelgate(&line);
        assert_eq!(gate.exits(0).verdicts(), ["unchanged"; 3]);
        let json = gate.json();
        assert_eq!(json["judged"][0]["same_device"], same_device, "{json}");
        assert_eq!(json["other_device"], other_device, "{json}");
    }
    // A history has a series for each card, a report all cases with both cards.
    insta::assert_snapshot!(package.kernelgate("history").text(), @r"
    exit 0
    NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz; GPU-1
    case  commits  runs  last  last change  times
    st_bif/backward/n33554432_t8_level8_f32/cuda/replay/hot  1  1  N µs  ▁

    NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz; GPU-2
    case  commits  runs  last  last change  times
    st_bif/forward/n33554432_t8_level8_f32_int8/cuda/fused/hot
                1  1  N µs  ▁
    st_bif/forward/n33554432_t8_level8_f32_int8/cuda/vectorized/hot
                1  1  N µs  ▁

    in the order of recorded times: there is no git history here
    ");
    package.kernelgate("report --out page").exits(0);
    let report = std::fs::read_to_string(package.path("page/report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["cases"].as_array().unwrap().len(), 3);
    assert_eq!(report["facts"][1], serde_json::json!(["card", "GPU-1, GPU-2"]));
}

/// Runs a program as one shard.
fn run_shard(package: &Package, program: &Path, line: &str, shard: &str) -> Outcome {
    let mut command = package.command(program, line);
    command.env("KERNELGATE_SHARD", shard).output().unwrap().into()
}

#[test]
fn a_verb_without_a_bench_run_states_that_it_takes_a_shard() {
    let package = Package::new();
    let dir = package.dir();
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let run = |program: &Path, line: &str, shard: &str| run_shard(&package, program, line, shard);
    let mut printed = Vec::new();
    for line in [format!("verify {dir} {FOUR}"), format!("list {dir} {FOUR}")] {
        let first = run(program, &line, "1/2");
        let second = run(program, &line, "2/2");
        printed.push(lines_with(&first.exits(0).all(), "shard 1/2"));
        assert_ne!(first.stdout, second.stdout);
        assert!(!package.kernelgate(&line).all().contains("shard"));
    }
    for flag in ["--test", "--list", "--profile-time 1 --bench n64"] {
        let first = run(&fixture_path(), &format!("{flag} {FOUR}"), "1/2");
        printed.push(lines_with(&first.exits(0).stderr, "shard 1/2"));
        let whole = package.command(&fixture_path(), &format!("{flag} {FOUR}")).output().unwrap();
        assert!(!Outcome::from(whole).all().contains("shard"));
    }
    insta::assert_snapshot!(normalized(&printed.join("\n")), @r"
    2 ok, 0 failed, 2 skipped; of shard 1/2 only
    fixture: shard 1/2: 2 of 4 cases
    shard 1/2 in FOLDER/target/kernelgate/verify/1-of-2.json: `kernelgate merge` takes it
    2 cases run here; of shard 1/2 only
    fixture: shard 1/2: 2 of 4 cases
    fixture: shard 1/2: 2 of 4 cases
    fixture: shard 1/2: 2 of 4 cases
    fixture: shard 1/2: 0 of 1 cases
    ");
}

/// They merge in any order, with the exit code of one verification.
#[test]
fn shards_of_a_verification_are_put_together() {
    let package = Package::new();
    let (dir, program) = (package.dir(), Path::new(env!("CARGO_BIN_EXE_kernelgate")));
    let run = |line: &str, shard: &str| run_shard(&package, program, line, shard);
    ["1/2", "2/2"].iter().for_each(|shard| {
        run(&format!("verify {dir} {FOUR}"), shard).exits(0);
    });
    let records = ["1", "2"].map(|index| format!("target/kernelgate/verify/{index}-of-2.json"));
    let [one_half, other_half] = &records;
    let merged = package.kernelgate(&format!("merge {one_half} {other_half}"));
    insta::assert_snapshot!(merged.text(), @r"
    exit 0
    case  status  checked  max error  relative L2  same bits again
    fixture/spin/n128_none/cpu/hot  ok  100.0000%  N  N  yes
    fixture/spin/n160_none/cpu/hot  ok  100.0000%  N  N  yes
    fixture/spin/n64_none/cpu/hot  ok  100.0000%  N  N  yes
    fixture/spin/n96_none/cpu/hot  ok  100.0000%  N  N  yes
    skipped 4: cpu/never supports nothing: fixture/spin/n128_none/cpu/never/hot, and 3 more
    4 ok, 0 failed, 4 skipped
    -- stderr
    2 shards merged
    ");
    let reversed = package.kernelgate(&format!("merge {other_half} {one_half}"));
    assert_eq!(merged.stdout, reversed.stdout);
    let half = package.kernelgate(&format!("merge {other_half}"));
    insta::assert_snapshot!(half.exits(3).stderr, @r"
    1 shard merged
    missing: verification, shard 1/2
    ");
    // A case belongs to one shard only.
    let path = package.path(one_half);
    let mut forged: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    forged["shard"]["index"] = 2.into();
    std::fs::write(package.path("forged.json"), forged.to_string()).unwrap();
    let forged = package.kernelgate(&format!("merge {one_half} forged.json"));
    insta::assert_snapshot!(forged.text(), @r"
    exit 4
    refused: shard of fixture/spin/n128_none/cpu/hot is `1/2` in target/kernelgate/verify/1-of-2.json and `2/2` in forged.json
    ");
    let other_filter = format!("verify {dir} {FOUR} n96|n128 --shard-output other.json");
    run(&other_filter, "1/2").exits(0);
    let other = package.kernelgate(&format!("merge other.json {other_half}"));
    insta::assert_snapshot!(other.text(), @r"
    exit 4
    refused: plan is `HASH` in other.json and `HASH` in target/kernelgate/verify/2-of-2.json
    ");
    // A shard without a case still belongs to the whole.
    let empty = (1..=64).map(|index| run(&format!("verify {dir} n64"), &format!("{index}/64")));
    let outcomes: Vec<Outcome> = empty.take(3).collect();
    let none = outcomes.iter().find(|it| it.stdout.contains("0 ok")).unwrap();
    insta::assert_snapshot!(none.text(), @r"
    exit 0
    0 ok, 0 failed, 0 skipped; of shard 1/64 only
    -- stderr
    fixture: shard 1/64: 0 of 1 cases
    fixture: 64 shards for 1 problems: some shards have no case
    shard 1/64 in FOLDER/target/kernelgate/verify/1-of-64.json: `kernelgate merge` takes it
    ");
    // A shard whose cases are all skipped, as on a machine without its GPU, does not count.
    let skipped = format!("verify {dir} cpu/never {FOUR}");
    for shard in ["1/1", ""] {
        let outcome = run(&skipped, shard);
        let error = lines_with(&outcome.exits(2).stderr, "error:");
        assert_eq!(error, "error: nothing was verified: every case was skipped");
    }
}

#[test]
fn a_budget_ends_before_the_next_case_and_what_is_left_is_listed() {
    let package = Package::new();
    // Making the inputs alone takes longer than the budget.
    let mut none = package.bench_command("none", &format!("{FOUR} --budget 0.01s"));
    let none = Outcome::from(none.env("FIXTURE_INPUTS_MS", "20").output().unwrap());
    insta::assert_snapshot!(none.exits(0).stdout, @r"
    no case was timed
    skipped 4: cpu/never supports nothing
    skipped 4: not run: the budget of 0 s is used up
    ");

    let run = package.run("none");
    let reasons = run["skipped"].as_object().unwrap().values();
    let left =
        reasons.filter(|why| why.as_str().unwrap().starts_with(NOT_RUN_REASON_PREFIX)).count();
    assert_eq!((ids(&run, "cases").len(), left), (0, 4));
    assert_eq!(run["complete"], true);
    // A requested case without a time does not pass.
    package.bench("whole", FOUR).exits(0);
    let whole = "--session target/kernelgate/runs/whole";
    package.kernelgate(&format!("baseline add main {whole}")).exits(0);
    let gate = package.kernelgate("gate --baseline main --session target/kernelgate/runs/none");
    insta::assert_snapshot!(gate.text(), @r"
    exit 3
    baseline `main`,DEVICE

    skipped, in the baseline: fixture/spin/n128_none/cpu/hot: not run: the budget of N s is used up
    skipped, in the baseline: fixture/spin/n160_none/cpu/hot: not run: the budget of N s is used up
    skipped, in the baseline: fixture/spin/n64_none/cpu/hot: not run: the budget of N s is used up
    skipped, in the baseline: fixture/spin/n96_none/cpu/hot: not run: the budget of N s is used up
    nothing to judge: no case is both in the baseline and in the run

    0 regressed, 0 improved, 0 unchanged, 0 inconclusive of 0 (threshold 5%); 4 skipped
    ");
    let thorough = package.bench("thorough", "--effort thorough --budget 0.01s n64");
    insta::assert_snapshot!(normalized(&lines_with(&thorough.exits(0).stderr, "of timing")), @"at least N s of timing: 8 cases, 1 of them by their times in the last session; inputs, references and verification of 8 problems come on top; --budget TIME or --shard I/N makes it shorter");
    insta::assert_snapshot!(package.bench("bad", "--budget soon").refusal(2), @r"
    error: invalid value 'soon' for '--budget <TIME>': `soon`: a time is 500ms, 90s, 5m or 1h

    For more information, try '--help'.
    ");
}

#[test]
fn runs_of_different_code_are_not_one_side() {
    let package = Package::new();
    let measured = |session: &str, commit: &str, time_ns: f64| {
        let mut bench = package.bench_command(session, "");
        Outcome::from(bench.env("KERNELGATE_COMMIT", commit).output().unwrap()).exits(0);
        package.set_times(&package.record(session), time_ns);
    };
    measured("b1", "aaaa1111", 200_000.0);
    package.kernelgate("baseline add a").exits(0);
    measured("m1", "bbbb2222", 182_000.0);
    measured("m2", "cccc3333", 300_000.0);
    let gate =
        |flags: &str| package.kernelgate(&format!("gate --baseline a --format json {flags}"));
    assert_eq!(gate("").exits(1).verdicts(), ["regressed", "regressed"]);
    let both = ["m1", "m2"].map(|it| format!("--session target/kernelgate/runs/{it}")).join(" ");
    for which in ["--last 2", &both] {
        let added = package.kernelgate(&format!("baseline add b {which}"));
        insta::allow_duplicates! { insta::assert_snapshot!(added.text(), @r"
        exit 4
        refused: commit is `bbbb2222` in the run m1/fixture and `cccc3333` in the run m2/fixture: these are no process runs of the same code
        ") };
        assert_eq!(package.kernelgate(&format!("gate --baseline a {which}")).text(), added.text());
    }
    // `--last` selects several runs of one commit.
    measured("m3", "cccc3333", 301_000.0);
    let judged = gate("--last 2");
    assert_eq!(judged.exits(1).verdicts(), ["regressed", "regressed"]);
    assert_eq!(judged.json()["judged"][0]["head_runs"], 2);
    let mut run = package.run("m3");
    run["executable"] = "0123".into();
    std::fs::write(package.record("m3"), run.to_string()).unwrap();
    insta::assert_snapshot!(package.kernelgate("gate --baseline a --last 2").text(), @r"
    exit 4
    refused: executable is `HASH` in the run m2/fixture and `0123` in the run m3/fixture: these are no process runs of the same code
    ");
    gate("").exits(1);
}
