//! Tests of shards, time budgets and several runs of bench processes, and of how their records are
//! merged and judged.

#![cfg(unix)]

use std::path::Path;

use crate::package::outcome::redact_varying_parts;
use crate::package::{ProcessOutcome, TempPackage, fixture_path, lines_with_word};
use kernelgate::record::run::NOT_RUN_REASON_PREFIX;
use serde_json::Value;

const FOUR_CASES_FLAGS: &str = "--axis n=64,96,128,160";

fn case_ids_in_field(run: &Value, of: &str) -> Vec<String> {
    run[of].as_object().unwrap().keys().cloned().collect()
}

fn read_run_record(package: &TempPackage, session: &str, name: &str) -> Value {
    let path = package.package_path(&format!("target/kernelgate/runs/{session}/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Makes the two shards of session `parts` the first and the last of three, in session `three`.
fn make_shards_first_and_last_of_three(package: &TempPackage) {
    std::fs::create_dir_all(package.package_path("target/kernelgate/runs/three")).unwrap();
    for (from, to) in [(1, 1), (2, 3)] {
        let mut run = read_run_record(package, "parts", &format!("fixture-{from}-of-2"));
        run["shard"] = serde_json::json!({ "index": to, "count": 3 });
        run["session"] = "three".into();
        run.as_object_mut().unwrap().remove("checksum");
        let path = format!("target/kernelgate/runs/three/fixture-{to}-of-3.json");
        std::fs::write(package.package_path(&path), run.to_string()).unwrap();
    }
}

#[test]
fn shards_share_the_cases_and_are_put_together() {
    let package = TempPackage::new();
    package.run_fixture_bench("whole", FOUR_CASES_FLAGS).assert_exit(0);
    for shard in ["1", "2"] {
        package
            .run_fixture_bench("parts", &format!("{FOUR_CASES_FLAGS} --shard {shard}/2"))
            .assert_exit(0);
    }
    let parts =
        [1, 2].map(|index| read_run_record(&package, "parts", &format!("fixture-{index}-of-2")));
    let mut both: Vec<String> =
        parts.iter().flat_map(|run| case_ids_in_field(run, "cases")).collect();
    assert!(parts.iter().all(|run| case_ids_in_field(run, "cases").len() < 4));
    both.sort();
    assert_eq!(both, case_ids_in_field(&package.read_run_record("whole"), "cases"));
    assert_eq!((&parts[1]["shard"]["index"], &parts[1]["shard"]["count"]), (&2.into(), &2.into()));

    // Each shard's record has the plan of both shards, and the anchor rates of the device on which
    // the shard ran.
    let plan = &parts[0]["plan"];
    assert_eq!(
        (plan, &plan["cases"], &plan["split"]),
        (&parts[1]["plan"], &4.into(), &"hash".into())
    );
    assert!(parts.iter().all(|run| run["anchors"]["measured"]["memory_bytes_per_s"].is_number()));
    let merge = |arguments: &str| package.run_kernelgate(&format!("merge {arguments}"));
    let folder = "target/kernelgate/runs/parts";
    // Ceilings of a host with other load differ from one process to the next.
    let merged = format!("{folder} --output target/merged --anchor-tolerance 100");
    let first = merge(&merged);
    insta::assert_snapshot!(first.text_for_snapshot(), @r"
    exit 0
    2 shards merged
    4 cases on 1 device in target/merged
    ");
    assert_eq!(merge(&merged).text_for_snapshot(), first.text_for_snapshot());
    merge(&format!("{folder}/fixture-1-of-2.json --output target/half")).assert_exit(3);
    let whole = merge(&format!("{folder} {}", package.run_record_path("whole").display()));
    insta::assert_snapshot!(whole.refusal_message(2), @"error: FOLDER/target/kernelgate/runs/whole/fixture.json: measured without --shard: it is the whole, not a part");

    // Both shards of a run together count as the last session for `baseline add` and for `gate`.
    insta::assert_snapshot!(package.run_kernelgate("baseline add main").text_for_snapshot(), @r"
    exit 0
    4 cases, up to 1 runs each, in FOLDER/baselines/DEVICE/main.json
    ");
    for index in [1, 2] {
        let name = format!("target/kernelgate/runs/parts/fixture-{index}-of-2.json");
        package.set_record_times(&package.package_path(&name), 1e6);
    }
    package.set_record_times(&package.baseline_path("main"), 1e6);
    package.run_kernelgate(&format!("baseline seal {}", package.baseline_path("main").display()));
    let gate = |flags: &str| {
        package.run_kernelgate(&format!("gate --baseline main --format json {flags}"))
    };
    assert_eq!(gate("").assert_exit(0).json_verdicts(), ["unchanged"; 4]);
    // The session lacks one of three shards, and has none of the two shards of another division.
    make_shards_first_and_last_of_three(&package);
    let three = "--session target/kernelgate/runs/three";
    let judged = gate(three);
    assert_eq!(judged.assert_exit(3).json_verdicts(), ["unchanged"; 4]);
    assert_eq!(
        judged.stdout_as_json()["missing_shards"],
        serde_json::json!(["fixture, shard 2/3"])
    );
    let mixed = format!("{three} --session target/kernelgate/runs/parts");
    let refused = package.run_kernelgate(&format!("gate --baseline main {mixed}"));
    insta::assert_snapshot!(refused.text_for_snapshot(), @r"
    exit 4
    refused: number of shards is `2` in the run parts/fixture-1-of-2 and `3` in the run three/fixture-1-of-3: these are no shards of one measurement
    ");
    let merged = merge("target/kernelgate/runs/parts target/kernelgate/runs/three");
    insta::assert_snapshot!(merged.text_for_snapshot(), @r"
    exit 4
    refused: number of shards is `2` in target/kernelgate/runs/parts/fixture-1-of-2.json and `3` in target/kernelgate/runs/three/fixture-1-of-3.json
    ");
    let added = package.run_kernelgate(&format!("baseline add other {mixed}"));
    assert_eq!(added.text_for_snapshot(), refused.text_for_snapshot());
    let added = package.run_kernelgate(&format!("baseline add other {three}"));
    insta::assert_snapshot!(added.text_for_snapshot(), @r"
    exit 0
    4 cases, up to 1 runs each, in FOLDER/baselines/DEVICE/other.json
    -- stderr
    warning: fixture, shard 2/3 is missing: the baseline gets the cases of the others
    ");
    insta::assert_snapshot!(package.run_fixture_bench("bad", "--shard 3/2").refusal_message(2), @r"
    error: invalid value '3/2' for '--shard <I/N|auto>': `3/2`: a shard is 1/2 to 2/2; shards are counted from 1

    For more information, try '--help'.
    ");
}

#[cfg(target_os = "linux")]
#[test]
fn a_session_that_does_not_fit_on_the_disk_is_named_and_leaves_nothing() {
    let package = TempPackage::new();
    write_shards_of_two_gpus(&package, "parts", ["GPU-1", "GPU-2"]);
    std::fs::create_dir(package.package_path("target")).unwrap();
    let mut shell = package.package_command(Path::new("sh"), "-c");
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let merge = format!("{program} merge parts --output target/merged");
    let full = shell.arg(format!("trap '' XFSZ; ulimit -f 0; exec {merge}")).output().unwrap();
    insta::assert_snapshot!(ProcessOutcome::from(full).refusal_message(2), @"error: failed to write target/merged/st_bif-1-of-2.json: File too large (os error 27)");
    let left = std::fs::read_dir(package.package_path("target")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("merged")), "{left:?}");
    package.run_kernelgate("merge parts --output target/merged").assert_exit(0);
}

#[test]
fn a_sharded_comparison_is_decided_when_all_shards_exist() {
    let package = TempPackage::new();
    let dir = package.bench_folder_flags().replace("--dir ", "");
    let rules = ["n64_", "n999"]
        .map(|cases| format!("[[threshold]]\ncases = \"{cases}\"\nrelative = 0.5\n"));
    std::fs::write(package.package_path("kernelgate.toml"), rules.concat()).unwrap();
    let line = format!(
        "compare --base-dir {dir} --head-dir {dir} --time-identical --backend cpu {FOUR_CASES_FLAGS} \
         --max-blocks 1 --case-time 0.01s --shard"
    );
    for shard in ["1/2", "2/2"] {
        package.run_kernelgate(&format!("{line} {shard}")).assert_exit(0);
    }
    let shards = "target/kernelgate/compare/shards";
    let merge = |paths: &str| {
        package.run_kernelgate(&format!("merge {paths} --anchor-tolerance 100 --format json"))
    };
    let notes = |outcome: &ProcessOutcome| outcome.stdout_as_json()["rules"]["notes"].clone();
    let both = merge(shards);
    // One block of four trials is too few for a decision.
    let json = both.assert_exit(3).stdout_as_json();
    let judged = json["judged"].as_array().unwrap();
    assert!(judged.len() == 4 && judged.iter().all(|it| it["decision"]["pairs"] == 2), "{json}");
    assert_eq!(json["missing_shards"], serde_json::json!([]));
    // A rule whose pattern matches a case in only one of the shards still has an effect after the
    // merge.
    assert_eq!(notes(&both), serde_json::json!(["[[threshold]] `n999` matches no case"]));
    let reversed = merge(&format!("{shards}/2-of-2.json {shards}/1-of-2.json"));
    assert_eq!(reversed.stdout, both.stdout);
    let half = merge(&format!("{shards}/2-of-2.json"));
    let missing = &half.assert_exit(3).stdout_as_json()["missing_shards"];
    assert_eq!(missing, &serde_json::json!(["comparison, shard 1/2"]));
    assert_eq!(notes(&half), serde_json::json!([]));
}

/// A shard of a run on a GPU, with the cases of one workload.
fn shard_record_of_gpu(uuid: &str, index: u32, workload: &str) -> Value {
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
fn write_shards_of_two_gpus(package: &TempPackage, folder: &str, cards: [&str; 2]) {
    for (index, card) in [1, 2].into_iter().zip(cards) {
        let workload = ["st_bif/backward", "st_bif/forward"][index as usize - 1];
        let path = package.package_path(&format!("{folder}/{index}.json"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, shard_record_of_gpu(card, index, workload).to_string()).unwrap();
    }
}

#[test]
fn a_merge_counts_the_cases_on_a_shared_gpu() {
    let package = TempPackage::new();
    // While a case of the second shard ran, another process computed on the GPU.
    write_shards_of_two_gpus(&package, "shared", ["GPU-1", "GPU-2"]);
    let mut shared = shard_record_of_gpu("GPU-2", 2, "st_bif/forward");
    let case = shared["cases"].as_object_mut().unwrap().values_mut().next().unwrap();
    case["samples"]["conditions"]["other_processes"] = 1.into();
    std::fs::write(package.package_path("shared/2.json"), shared.to_string()).unwrap();
    let shared = package.run_kernelgate("merge shared --output shared-merged");
    insta::assert_snapshot!(shared.text_for_snapshot(), @r"
    exit 0
    2 shards merged
    cases of shared/2.json beside which another process computed on the GPU: 1; `gate` gives no verdict against them
    3 cases on 2 devices in shared-merged
    ");
    let shared = package.run_kernelgate("merge shared --output shared-merged --format json");
    assert_eq!(
        shared.assert_exit(0).stdout_as_json()["shared_gpu"],
        serde_json::json!({ "shared/2.json": 1 })
    );
}

#[test]
fn shards_on_two_cards_of_a_model_are_one_measurement() {
    let package = TempPackage::new();
    write_shards_of_two_gpus(&package, "own", ["GPU-1", "GPU-2"]);
    write_shards_of_two_gpus(&package, "exchanged", ["GPU-2", "GPU-1"]);
    let merged = "target/kernelgate/runs/merged";
    insta::assert_snapshot!(package.run_kernelgate(&format!("merge own --output {merged}")).text_for_snapshot(), @r"
    exit 0
    2 shards merged
    3 cases on 2 devices in target/kernelgate/runs/merged
    ");
    package.run_kernelgate("merge exchanged --output exchanged-merged").assert_exit(0);
    package.run_kernelgate(&format!("baseline add main --session {merged}")).assert_exit(0);
    // Each case is compared with the baseline of the same card, or, if the cards differ, of the
    // same model with a wider threshold.
    for (session, same_device, other_device) in [
        (merged, true, Value::Null),
        ("exchanged-merged", false, serde_json::json!(["GPU-2", "GPU-1"])),
    ] {
        let line = format!("gate --baseline main --format json --session {session}");
        let gate = package.run_kernelgate(&line);
        assert_eq!(gate.assert_exit(0).json_verdicts(), ["unchanged"; 3]);
        let json = gate.stdout_as_json();
        assert_eq!(json["judged"][0]["same_device"], same_device, "{json}");
        assert_eq!(json["other_device"], other_device, "{json}");
    }
    // `kernelgate history` shows one series for each card; the report shows all three cases on one
    // page that names both cards.
    insta::assert_snapshot!(package.run_kernelgate("history").text_for_snapshot(), @r"
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
    package.run_kernelgate("report --out page").assert_exit(0);
    let report = std::fs::read_to_string(package.package_path("page/report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["cases"].as_array().unwrap().len(), 3);
    assert_eq!(report["facts"][1], serde_json::json!(["card", "GPU-1, GPU-2"]));
}

/// Runs a program as one shard.
fn run_program_as_shard(
    package: &TempPackage,
    program: &Path,
    line: &str,
    shard: &str,
) -> ProcessOutcome {
    let mut command = package.package_command(program, line);
    command.env("KERNELGATE_SHARD", shard).output().unwrap().into()
}

#[test]
fn a_verb_without_a_bench_run_states_that_it_takes_a_shard() {
    let package = TempPackage::new();
    let dir = package.bench_folder_flags();
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let run = |program: &Path, line: &str, shard: &str| {
        run_program_as_shard(&package, program, line, shard)
    };
    let mut printed = Vec::new();
    for line in
        [format!("verify {dir} {FOUR_CASES_FLAGS}"), format!("list {dir} {FOUR_CASES_FLAGS}")]
    {
        let first = run(program, &line, "1/2");
        let second = run(program, &line, "2/2");
        printed.push(lines_with_word(&first.assert_exit(0).stdout_and_stderr(), "shard 1/2"));
        assert_ne!(first.stdout, second.stdout);
        assert!(!package.run_kernelgate(&line).stdout_and_stderr().contains("shard"));
    }
    for flag in ["--test", "--list", "--profile-time 1 --bench n64"] {
        let first = run(&fixture_path(), &format!("{flag} {FOUR_CASES_FLAGS}"), "1/2");
        printed.push(lines_with_word(&first.assert_exit(0).stderr, "shard 1/2"));
        let whole = package
            .package_command(&fixture_path(), &format!("{flag} {FOUR_CASES_FLAGS}"))
            .output()
            .unwrap();
        assert!(!ProcessOutcome::from(whole).stdout_and_stderr().contains("shard"));
    }
    insta::assert_snapshot!(redact_varying_parts(&printed.join("\n")), @r"
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

/// Verification shards merge in any order, with the exit code of one whole verification.
#[test]
fn shards_of_a_verification_are_put_together() {
    let package = TempPackage::new();
    let (dir, program) =
        (package.bench_folder_flags(), Path::new(env!("CARGO_BIN_EXE_kernelgate")));
    let run = |line: &str, shard: &str| run_program_as_shard(&package, program, line, shard);
    ["1/2", "2/2"].iter().for_each(|shard| {
        run(&format!("verify {dir} {FOUR_CASES_FLAGS}"), shard).assert_exit(0);
    });
    let records = ["1", "2"].map(|index| format!("target/kernelgate/verify/{index}-of-2.json"));
    let [one_half, other_half] = &records;
    let merged = package.run_kernelgate(&format!("merge {one_half} {other_half}"));
    insta::assert_snapshot!(merged.text_for_snapshot(), @r"
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
    let reversed = package.run_kernelgate(&format!("merge {other_half} {one_half}"));
    assert_eq!(merged.stdout, reversed.stdout);
    let half = package.run_kernelgate(&format!("merge {other_half}"));
    insta::assert_snapshot!(half.assert_exit(3).stderr, @r"
    1 shard merged
    missing: verification, shard 1/2
    ");
    // The merge refuses two shards that have the same case.
    let path = package.package_path(one_half);
    let mut forged: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    forged["shard"]["index"] = 2.into();
    std::fs::write(package.package_path("forged.json"), forged.to_string()).unwrap();
    let forged = package.run_kernelgate(&format!("merge {one_half} forged.json"));
    insta::assert_snapshot!(forged.text_for_snapshot(), @r"
    exit 4
    refused: shard of fixture/spin/n128_none/cpu/hot is `1/2` in target/kernelgate/verify/1-of-2.json and `2/2` in forged.json
    ");
    let other_filter =
        format!("verify {dir} {FOUR_CASES_FLAGS} n96|n128 --shard-output other.json");
    run(&other_filter, "1/2").assert_exit(0);
    let other = package.run_kernelgate(&format!("merge other.json {other_half}"));
    insta::assert_snapshot!(other.text_for_snapshot(), @r"
    exit 4
    refused: plan is `HASH` in other.json and `HASH` in target/kernelgate/verify/2-of-2.json
    ");
    // A shard without a case still counts as a part of the whole verification.
    let empty = (1..=64).map(|index| run(&format!("verify {dir} n64"), &format!("{index}/64")));
    let outcomes: Vec<ProcessOutcome> = empty.take(3).collect();
    let none = outcomes.iter().find(|it| it.stdout.contains("0 ok")).unwrap();
    insta::assert_snapshot!(none.text_for_snapshot(), @r"
    exit 0
    0 ok, 0 failed, 0 skipped; of shard 1/64 only
    -- stderr
    fixture: shard 1/64: 0 of 1 cases
    fixture: 64 shards for 1 problems: some shards have no case
    shard 1/64 in FOLDER/target/kernelgate/verify/1-of-64.json: `kernelgate merge` takes it
    ");
    // A verification whose cases are all skipped, as on a machine without the needed GPU, fails.
    let skipped = format!("verify {dir} cpu/never {FOUR_CASES_FLAGS}");
    for shard in ["1/1", ""] {
        let outcome = run(&skipped, shard);
        let error = lines_with_word(&outcome.assert_exit(2).stderr, "error:");
        assert_eq!(error, "error: nothing was verified: every case was skipped");
    }
}

#[test]
fn a_budget_ends_before_the_next_case_and_what_is_left_is_listed() {
    let package = TempPackage::new();
    // Making the input data of the first case alone takes longer than the time budget.
    let mut none = package.bench_command("none", &format!("{FOUR_CASES_FLAGS} --budget 0.01s"));
    let none = ProcessOutcome::from(none.env("FIXTURE_INPUTS_MS", "20").output().unwrap());
    insta::assert_snapshot!(none.assert_exit(0).stdout, @r"
    no case was timed
    skipped 4: cpu/never supports nothing
    skipped 4: not run: the budget of 0 s is used up
    ");

    let run = package.read_run_record("none");
    let reasons = run["skipped"].as_object().unwrap().values();
    let left =
        reasons.filter(|why| why.as_str().unwrap().starts_with(NOT_RUN_REASON_PREFIX)).count();
    assert_eq!((case_ids_in_field(&run, "cases").len(), left), (0, 4));
    assert_eq!(run["complete"], true);
    // A requested case that was not timed makes the gate fail to pass.
    package.run_fixture_bench("whole", FOUR_CASES_FLAGS).assert_exit(0);
    let whole = "--session target/kernelgate/runs/whole";
    package.run_kernelgate(&format!("baseline add main {whole}")).assert_exit(0);
    let gate = package.run_kernelgate("gate --baseline main --session target/kernelgate/runs/none");
    insta::assert_snapshot!(gate.text_for_snapshot(), @r"
    exit 3
    baseline `main`,DEVICE

    skipped, in the baseline: fixture/spin/n128_none/cpu/hot: not run: the budget of N s is used up
    skipped, in the baseline: fixture/spin/n160_none/cpu/hot: not run: the budget of N s is used up
    skipped, in the baseline: fixture/spin/n64_none/cpu/hot: not run: the budget of N s is used up
    skipped, in the baseline: fixture/spin/n96_none/cpu/hot: not run: the budget of N s is used up
    nothing to judge: no case is both in the baseline and in the run

    0 regressed, 0 improved, 0 unchanged, 0 inconclusive of 0 (threshold 5%); 4 skipped
    ");
    let thorough = package.run_fixture_bench("thorough", "--effort thorough --budget 0.01s n64");
    insta::assert_snapshot!(redact_varying_parts(&lines_with_word(&thorough.assert_exit(0).stderr, "of timing")), @"at least N s of timing: 8 cases, 1 of them by their times in the last session; inputs, references and verification of 8 problems come on top; --budget TIME or --shard I/N makes it shorter");
    insta::assert_snapshot!(package.run_fixture_bench("bad", "--budget soon").refusal_message(2), @r"
    error: invalid value 'soon' for '--budget <TIME>': `soon`: a time is 500ms, 90s, 5m or 1h

    For more information, try '--help'.
    ");
}

#[test]
fn runs_of_different_code_are_not_one_side() {
    let package = TempPackage::new();
    let measured = |session: &str, commit: &str, time_ns: f64| {
        let mut bench = package.bench_command(session, "");
        ProcessOutcome::from(bench.env("KERNELGATE_COMMIT", commit).output().unwrap())
            .assert_exit(0);
        package.set_record_times(&package.run_record_path(session), time_ns);
    };
    measured("b1", "aaaa1111", 200_000.0);
    package.run_kernelgate("baseline add a").assert_exit(0);
    measured("m1", "bbbb2222", 182_000.0);
    measured("m2", "cccc3333", 300_000.0);
    let gate =
        |flags: &str| package.run_kernelgate(&format!("gate --baseline a --format json {flags}"));
    assert_eq!(gate("").assert_exit(1).json_verdicts(), ["regressed", "regressed"]);
    let both = ["m1", "m2"].map(|it| format!("--session target/kernelgate/runs/{it}")).join(" ");
    for which in ["--last 2", &both] {
        let added = package.run_kernelgate(&format!("baseline add b {which}"));
        insta::allow_duplicates! { insta::assert_snapshot!(added.text_for_snapshot(), @r"
        exit 4
        refused: commit is `bbbb2222` in the run m1/fixture and `cccc3333` in the run m2/fixture: these are no process runs of the same code
        ") };
        assert_eq!(
            package.run_kernelgate(&format!("gate --baseline a {which}")).text_for_snapshot(),
            added.text_for_snapshot()
        );
    }
    // `--last` selects several runs of one commit.
    measured("m3", "cccc3333", 301_000.0);
    let judged = gate("--last 2");
    assert_eq!(judged.assert_exit(1).json_verdicts(), ["regressed", "regressed"]);
    assert_eq!(judged.stdout_as_json()["judged"][0]["head_runs"], 2);
    let mut run = package.read_run_record("m3");
    run["executable"] = "0123".into();
    std::fs::write(package.run_record_path("m3"), run.to_string()).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a --last 2").text_for_snapshot(), @r"
    exit 4
    refused: executable is `HASH` in the run m2/fixture and `0123` in the run m3/fixture: these are no process runs of the same code
    ");
    gate("").assert_exit(1);
}
