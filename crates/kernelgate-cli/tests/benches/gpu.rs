//! The harness on a real GPU: right and broken kernels. Without a GPU every test prints that and
//! passes; with `KERNELGATE_REQUIRE_GPU=1` it fails.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernelgate_cuda::driver::device;
use serde_json::{Value, json};

use crate::package::{TempPackage, copy_executable, fixture_path};

/// Locks the device, so that one test at a time uses it; `None` without a GPU.
fn lock_gpu_if_present() -> Option<MutexGuard<'static, ()>> {
    static GPU_LOCK: Mutex<()> = Mutex::new(());
    match device::check_gpu_and_compiler(0, None) {
        Ok(()) => Some(GPU_LOCK.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(error) => {
            assert!(std::env::var_os("KERNELGATE_REQUIRE_GPU").is_none(), "no GPU: {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

struct BenchOutcome {
    exit_code: Option<i32>,
    output_text: String,
    /// The run record, if one was written.
    run_record: Option<Value>,
}

impl BenchOutcome {
    #[track_caller]
    fn assert_exit_code(&self, code: i32) {
        assert_eq!(self.exit_code, Some(code), "{}", self.output_text);
        assert!(!self.output_text.contains("panicked at"), "{}", self.output_text);
    }

    /// Kinds and texts of the failures of a row.
    fn failures_of_implementation(&self, row: &str) -> Vec<(&str, &str)> {
        let failed = self.run_record.as_ref().unwrap()["failed"].as_object().unwrap().iter();
        let of_row = failed.filter(|(case, _)| case.contains(&format!("/{row}/")));
        of_row
            .map(|(_, why)| {
                (why["kind"].as_str().unwrap_or_default(), why["text"].as_str().unwrap())
            })
            .collect()
    }

    fn case_ids_in_record_field(&self, name: &str) -> Vec<&str> {
        self.run_record.as_ref().unwrap()[name]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect()
    }
}

/// Runs an example's bench binary in a folder of its own.
fn run_example_bench(example: &str, line: &str) -> BenchOutcome {
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"))
        .parent()
        .unwrap()
        .join("examples")
        .join(example);
    assert!(
        program.is_file(),
        "{} is missing: run the whole `cargo test`, or `cargo build --examples` first",
        program.display()
    );
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(program)
        .args(
            "--bench --noplot --warm-up-time 0.01 --measurement-time 0.05 --sample-size 10"
                .split(' '),
        )
        .args(line.split_whitespace())
        .current_dir(folder.path())
        .env("CARGO_MANIFEST_DIR", folder.path())
        .env("CARGO_TARGET_DIR", folder.path().join("target"))
        .env("KERNELGATE_SESSION", "s")
        .env_remove("CRITERION_HOME")
        .output()
        .unwrap();
    let record: PathBuf = folder.path().join(format!("target/kernelgate/runs/s/{example}.json"));
    BenchOutcome {
        exit_code: output.status.code(),
        output_text: format!(
            "{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        run_record: std::fs::read(record).ok().map(|bytes| serde_json::from_slice(&bytes).unwrap()),
    }
}

#[test]
fn a_right_kernel_is_verified_timed_hot_and_cold_and_recorded() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let outcome = run_example_bench("faults", "n1000003/cuda/right/");
    outcome.assert_exit_code(0);
    assert_eq!(outcome.case_ids_in_record_field("cases").len(), 2, "hot and cold");
    let run = outcome.run_record.as_ref().unwrap();
    assert_eq!(run["complete"], true);
    assert!(run["environment"]["gpus"][0]["uuid"].as_str().unwrap().starts_with("GPU-"));
    assert_eq!(run["telemetry"].as_array().unwrap().len(), 2);
    assert!(run["limits"]["overhead"]["around_launch_ns"].as_f64().unwrap() > 0.0);
    for case in run["cases"].as_object().unwrap().values() {
        assert!(
            !case["samples"]["clock_mhz"].as_array().unwrap().is_empty(),
            "no clock beside the samples"
        );
        assert_eq!(case["verification"]["checked"], 1_000_003);
    }
    let time = |cache: &str| {
        let samples =
            &run["cases"][format!("fixture/faults/n1000003/cuda/right/{cache}")]["samples"];
        samples["elapsed_ns"][0].as_f64().unwrap() / samples["launches"][0].as_f64().unwrap()
    };
    assert!(time("cold") > time("hot"), "8 MB fit L2: cold must cost more than hot");
}

#[test]
fn a_bad_kernel_has_no_time_and_the_others_go_on() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let outcome =
        run_example_bench("faults", "n100000/cuda/(right|wrong|unwritten|syntax|shape|memory)/");
    outcome.assert_exit_code(1);
    let [(kind, log), _] = outcome.failures_of_implementation("syntax")[..] else {
        panic!("{}", outcome.output_text)
    };
    assert_eq!(kind, "compile");
    assert!(log.contains("faults.cu(3)"), "the compiler's log names the file and the line: {log}");
    assert_eq!(outcome.case_ids_in_record_field("cases").len(), 2, "right, hot and cold");
    assert_eq!(
        outcome.case_ids_in_record_field("failed").len(),
        8,
        "wrong, unwritten, syntax, shape"
    );
    assert_eq!(outcome.case_ids_in_record_field("skipped").len(), 2, "memory");
}

#[test]
fn an_illegal_address_loses_the_device_and_nothing_else() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let outcome = run_example_bench("faults", "n100000/cuda/(right|address|right_again)/");
    outcome.assert_exit_code(1);
    let lost: Vec<_> = outcome
        .failures_of_implementation("address")
        .into_iter()
        .filter(|(kind, _)| *kind == "lost")
        .collect();
    assert!(!lost.is_empty(), "{}", outcome.output_text);
    assert!(lost.iter().all(|(_, why)| why.contains("CUDA_ERROR_ILLEGAL_ADDRESS")), "{lost:?}");
    assert_eq!(outcome.case_ids_in_record_field("cases").len(), 2, "what ran before is kept");
    assert_eq!(outcome.case_ids_in_record_field("failed").len(), 4, "what ran after has no time");
    // The GPU still works after the failed case: the next bench process runs.
    run_example_bench("faults", "n100000/cuda/right_again/hot").assert_exit_code(0);
}

#[test]
fn a_hung_kernel_is_abandoned() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let outcome = run_example_bench("faults", "--timeout 2 n100000/cuda/(right/|hang)");
    outcome.assert_exit_code(1);
    let lost =
        outcome.failures_of_implementation("hang").into_iter().filter(|(kind, _)| *kind == "lost");
    assert!(lost.count() > 0, "{}", outcome.output_text);
    assert_eq!(outcome.case_ids_in_record_field("cases").len(), 2);
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let outcome = run_example_bench("faults", "--device 99");
    outcome.assert_exit_code(2);
    assert_eq!(outcome.run_record, None);
}

#[test]
fn every_case_of_an_outside_kernel_gets_a_time() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let outcome = run_example_bench("saxpy_cuda", "--axis n=1000,1000003");
    outcome.assert_exit_code(0);
    assert_eq!(outcome.case_ids_in_record_field("cases").len(), 4);
}

/// The output of `kernelgate`.
fn kernelgate_output(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kernelgate")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_injected_wait_copy_launch_and_spill_are_found_and_named() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let examples = Path::new(env!("CARGO_BIN_EXE_kernelgate")).parent().unwrap().join("examples");
    let dir = examples.to_str().unwrap();
    let cases = "n1000003/cuda/(right|waits|pageable|twice|spills)/";
    let profiled = kernelgate_output(&[
        "profile", "--dir", dir, "--bench", "faults", "--format", "json", "--out", out, cases,
    ]);
    let profiled: Vec<Value> = serde_json::from_str(&profiled).unwrap();
    let finding = |row: &str, id: &str| {
        let case = profiled.iter().find(|it| it["case"].as_str().unwrap().contains(row)).unwrap();
        let findings = case["recorded"]["diagnosis"]["findings"].as_array().unwrap();
        findings.iter().find(|it| it["id"] == id).cloned()
    };
    for id in ["sync-in-loop", "pageable-copy"] {
        assert_eq!(finding("/right/", id), None);
    }
    let wait = finding("/waits/", "sync-in-loop").unwrap();
    assert_eq!(wait["evidence"][0]["what"], "cuCtxSynchronize", "{wait}");
    let copy = finding("/pageable/", "pageable-copy").unwrap();
    let what = copy["evidence"][0]["what"].as_str().unwrap();
    assert_eq!(what.split_once('(').unwrap().1, "pageable to device)", "{copy}");
    let memory = |row: &str| {
        let case = profiled.iter().find(|it| it["case"].as_str().unwrap().contains(row)).unwrap();
        case["recorded"]["diagnosis"]["device_memory"][0]["peak_bytes"].as_u64().unwrap()
    };
    // The case holds its input and output arrays in device memory.
    assert!(memory("/right/") >= 8_000_000, "{}", memory("/right/"));
    let trace = |row: &str| format!("{out}/traces/fixture_faults_n1000003_cuda_{row}_hot.json");
    let changed = |row: &str, change: &str| {
        let text =
            kernelgate_output(&["diagnose", &trace("right"), &trace(row), "--format", "json"]);
        let difference: Value = serde_json::from_str(&text).unwrap();
        let parts = difference["difference"]["parts"].as_array().unwrap();
        let faults = |part: &&Value| {
            part["kind"] == "kernel" && part["name"].as_str().unwrap().starts_with("faults")
        };
        let part = parts.iter().filter(faults).find(|part| part["change"] == change);
        part.unwrap_or_else(|| panic!("{text}")).clone()
    };
    assert_eq!(changed("twice", "more often")["count"], json!([3, 6]));
    // CUPTI reports no local memory for the spilling kernel; its 32 registers are the limit that
    // its launch bounds set.
    let spills = changed("spills", "longer");
    let evidence = spills["evidence"].as_array().unwrap();
    assert!(evidence.contains(&json!("registers 16 -> 32")), "{spills}");
}

/// A delay is fitted to each case before its comparison; a case to which it is too short a further
/// kernel is excluded from that comparison alone.
#[test]
fn calibrate_delays_cases_if_possible_and_skips_the_rest() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let package = TempPackage::new();
    std::fs::create_dir(package.package_path("bin")).unwrap();
    let example = Path::new(env!("CARGO_BIN_EXE_kernelgate")).parent().unwrap().join("examples");
    copy_executable(example.join("saxpy_cuda"), package.package_path("bin/saxpy_cuda"));
    let line = "calibrate --dir bin --bench saxpy_cuda --backend cuda \
                --axis n=1000,16777216 /hot --case-time 0.04s --relative 0.06 --max-blocks 8 \
                --comparisons 1 --inject 20 --work 20 --power-comparisons 1 --sham 0";
    package.run_kernelgate(line).assert_exit(0);
    let calibration = std::fs::read_to_string(package.baseline_path("calibration")).unwrap();
    let calibration: Value = serde_json::from_str(&calibration).unwrap();
    let comparisons = calibration["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 3);
    let (short, long) = ("n1000/", "n16777216/");
    for comparison in comparisons {
        let entry = |part: &str, case: &str| {
            let cases = comparison[part].as_object().cloned().unwrap_or_default();
            cases.into_iter().find(|(id, _)| id.contains(case)).map(|(_, value)| value)
        };
        if comparison["kind"] == "null" {
            for case in [short, long] {
                assert!(
                    entry("failed", case).is_none() && entry("delays_ns", case).is_none(),
                    "{comparison}"
                );
            }
            assert_ne!(entry("verdicts", long).unwrap(), "regressed", "{comparison}");
            continue;
        }
        let why = entry("failed", short).unwrap();
        let why = why.as_str().unwrap().replace(|c: char| c.is_ascii_digit() || c == '.', "");
        let without_numbers =
            "a delay of  ns cannot be made: a further kernel alone makes a launch  ns longer";
        assert_eq!(why.replace(" by work", ""), without_numbers, "{comparison}");
        assert_eq!(entry("verdicts", short), None, "{comparison}");
        assert_eq!(entry("verdicts", long).unwrap(), "regressed", "{comparison}");
    }
}

#[test]
fn timing_measures_every_part() {
    let Some(_gpu) = lock_gpu_if_present() else { return };
    let folder = tempfile::tempdir().unwrap();
    copy_executable(fixture_path(), folder.path().join("fixture"));
    let output = Command::new(env!("CARGO_BIN_EXE_kernelgate"))
        .args(["timing", "--format", "json", "--dir"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = |part: &str| report[part].as_array().cloned().unwrap_or_default();
    let number = |row: &Value, field: &str| row[field].as_f64().unwrap();
    assert!(!rows("spins").is_empty() && !rows("telemetry").is_empty());
    for row in rows("spins") {
        // The bound is far wider than the accuracy in docs/concepts/evidence.md, so that noise does
        // not fail the test.
        assert!((number(&row, "events_ns") / number(&row, "spent_ns") - 1.0).abs() < 0.1, "{row}");
    }
    for row in rows("cold") {
        assert!(
            number(&row, "cold_ns") > 0.9 * number(&row, "memory_ns"),
            "faster than memory, so not cold: {row}"
        );
    }
    if report["notes"].as_array().unwrap().is_empty() {
        assert!(!rows("cupti").is_empty());
        for row in rows("cupti").iter().filter(|row| number(row, "cupti_ns") > 1e5) {
            assert!(
                (number(row, "events_recorded_ns") / number(row, "cupti_ns") - 1.0).abs() < 0.1,
                "{row}"
            );
        }
    }
    let flops = report["limits"]["flops_per_s"].as_object().unwrap();
    assert!(
        flops.is_empty()
            || (flops.len() == 5 && flops["matmul bf16"].as_f64() > flops["matmul f32"].as_f64()),
        "{flops:?}"
    );
}
