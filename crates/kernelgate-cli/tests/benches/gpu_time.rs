//! A Criterion bench of CUDA code with our measurement: the changes in its source, its record and
//! the gate on it, and refusals. The tests use a fake CUDA driver, so that no GPU is needed; its
//! streams are real queues, but their clock is simulated.

#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::package::outcome::redact_varying_parts;
use crate::package::outside::TempCargoPackage;
use crate::package::{ProcessOutcome, lines_with_word};

const QUICK_CRITERION_FLAGS: &str = "--noplot --warm-up-time 0.02 --measurement-time 0.05 --sample-size 10 \
                     --nresamples 10";

fn read_drop_in_example(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/drop_in");
    std::fs::read_to_string(folder.join(name)).unwrap()
}

/// A package with this bench, and the fake CUDA driver beside it. The bench imports Criterion
/// through `kernelgate::gpu_time`, because `cargo test` may have built several versions of
/// Criterion.
fn package_with_fake_driver(bench: &str) -> TempCargoPackage {
    let bench =
        format!("use kernelgate::gpu_time::criterion;\n{}", without_module_documentation(bench));
    let outside = TempCargoPackage::new(&[("drop_in", &bench)]);
    for file in ["gpu/mod.rs", "gpu/scale.ptx"] {
        let text = read_drop_in_example(file).replace("    fn open()", "    pub fn open()");
        outside.write_file(&format!("benches/{file}"), &text);
    }
    outside.write_file("lib/driver.c", include_str!("../fixture/fake_driver.c"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-pthread", "-o", "libcuda.so.1", "driver.c"])
        .current_dir(outside.package_path("lib"))
        .status()
        .unwrap();
    assert!(compiled.success());
    std::os::unix::fs::symlink("libcuda.so.1", outside.package_path("lib/libcuda.so")).unwrap();
    outside.write_file(".gitignore", "target\nlib\n");
    outside
}

/// Removes the documentation of a bench's module, which must be at the start of a file.
fn without_module_documentation(bench: &str) -> String {
    bench.lines().filter(|line| !line.starts_with("//!")).map(|line| format!("{line}\n")).collect()
}

fn add_fake_driver(outside: &TempCargoPackage, mut command: Command) -> Command {
    command.env("LD_LIBRARY_PATH", outside.package_path("lib")).env("KERNELGATE_TIMEOUT", "20");
    command.env("CARGO_ENCODED_RUSTFLAGS", crate::package::rustc_flags_linking_kernelgate());
    // Without Python, no wheels of CUPTI are found, which would not fit this driver.
    command.env("VIRTUAL_ENV", outside.package_path("nowhere"));
    command
}

fn run_with_fake_driver(outside: &TempCargoPackage, program: &str, line: &str) -> ProcessOutcome {
    add_fake_driver(outside, outside.package_command(program, line)).output().unwrap().into()
}

fn run_drop_in_bench(outside: &TempCargoPackage, line: &str) -> ProcessOutcome {
    run_with_fake_driver(
        outside,
        env!("CARGO"),
        &format!("bench --offline --bench drop_in -- {QUICK_CRITERION_FLAGS} {line}"),
    )
}

fn run_kernelgate(outside: &TempCargoPackage, line: &str) -> ProcessOutcome {
    run_with_fake_driver(outside, env!("CARGO_BIN_EXE_kernelgate"), line)
}

/// Path of the only run record in the last recorded session.
fn path_of_only_record(outside: &TempCargoPackage) -> PathBuf {
    let sessions = std::fs::read_dir(outside.package_path("target/kernelgate/runs")).unwrap();
    let mut sessions: Vec<PathBuf> = sessions.map(|entry| entry.unwrap().path()).collect();
    sessions.sort_by_key(|folder| folder.metadata().unwrap().modified().unwrap());
    sessions.last().unwrap().join("drop_in.json")
}

fn read_json_file(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Lines of one text that are not in the other, without comments and empty lines.
fn lines_missing_in_other<'a>(text: &'a str, other: &str) -> Vec<&'a str> {
    let mut others: Vec<&str> = other.lines().map(str::trim).collect();
    let code = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut only = Vec::new();
    for line in code.filter(|line| !line.starts_with("//")) {
        match others.iter().position(|other| *other == line) {
            Some(same) => drop(others.remove(same)),
            None => only.push(line),
        }
    }
    only
}

#[test]
fn a_criterion_bench_needs_two_changes_and_no_waits() {
    let (before, after) = (read_drop_in_example("before.rs"), read_drop_in_example("after.rs"));
    let (removed, added) =
        (lines_missing_in_other(&before, &after), lines_missing_in_other(&after, &before));
    let waits = removed.iter().filter(|line| **line == "gpu.wait();").count();
    assert_eq!((waits, removed.len() - waits, added.len()), (3, 2, 8), "{removed:?}\n{added:?}");
    assert!(after.lines().all(|line| line.len() <= 100));
}

#[test]
fn a_bench_in_gpu_time_is_recorded_saved_and_gated() {
    let outside = package_with_fake_driver(&read_drop_in_example("after.rs"));
    outside.commit_all_files();
    let first = run_drop_in_bench(&outside, "--save-baseline main");
    first.assert_exit(0);
    insta::assert_snapshot!(lines_with_word(&first.stdout, "fill/1048576 and"), @r"
    unverified, nothing says whether the outputs are right: copy/1048576, copy/67108864, fill/1048576 and 3 more
    without a record of a launch: short work on another stream may pass: copy/1048576, copy/67108864, fill/1048576 and 3 more
    ");
    let saved = first.stderr.trim().lines().last().unwrap();
    insta::assert_snapshot!(redact_varying_parts(saved), @"baseline `main` saved in FOLDER/baselines/DEVICE/main.json");
    let saved = read_json_file(&path_of_only_record(&outside));
    let cases = saved["cases"].as_object().unwrap();
    let ids: Vec<&str> = cases.keys().map(String::as_str).collect();
    let both = |name: &str| [format!("{name}/1048576"), format!("{name}/67108864")];
    let expected: Vec<String> =
        ["copy", "fill", "scale"].iter().flat_map(|name| both(name)).collect();
    assert_eq!(ids, expected);
    assert_eq!(saved["environment"]["device_name"], "Fake GPU");
    assert_eq!(saved["complete"], true);
    // Simulated work takes 2 µs, and 1 ns more for each KiB.
    let large = &cases["fill/67108864"]["samples"];
    let launches = large["launches"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap());
    let times = large["elapsed_ns"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap());
    let mut each: Vec<f64> = times.zip(launches).map(|(time, launches)| time / launches).collect();
    each.sort_by(f64::total_cmp);
    assert!((67_536.0..80_000.0).contains(&each[0]), "{each:?}");
    assert!(large["host_bound"].is_null(), "{large}");
    // Criterion's own result files and flags work as without kernelgate.
    assert!(outside.package_path("target/criterion/fill/67108864/main/sample.json").is_file());

    run_drop_in_bench(&outside, "--baseline main copy/6").assert_exit(0);
    let gate = run_kernelgate(&outside, "gate --baseline main --relative 5 --format json");
    assert_eq!(gate.assert_exit(0).json_verdicts(), ["unchanged"]);
    assert_eq!(gate.json_case_ids(), ["copy/67108864"]);
    let mut slower = add_fake_driver(
        &outside,
        outside.package_command(
            env!("CARGO"),
            &format!("bench --offline --bench drop_in -- {QUICK_CRITERION_FLAGS} /6"),
        ),
    );
    ProcessOutcome::from(slower.env("FAKE_SLOWER", "40").output().unwrap()).assert_exit(0);
    let gate = run_kernelgate(&outside, "gate --baseline main --format json");
    assert_eq!(gate.assert_exit(1).json_verdicts(), ["regressed"; 3]);
    for line in ["--list", "--test fill", "--quick fill/1048576", "--profile-time 1 fill/1"] {
        let outcome = run_bench_by_criterion(&outside, line);
        assert!(
            outcome.assert_exit(0).stdout.contains("fill/1048576"),
            "{line}: {}",
            outcome.stdout_and_stderr()
        );
    }
    let save = "baseline save again --runs 2 -- --bench drop_in -- --quick --nresamples 9 copy";
    let saved = run_kernelgate(&outside, save);
    insta::assert_snapshot!(redact_varying_parts(saved.assert_exit(0).stdout.lines().last().unwrap()), @"2 cases, 2 runs each, in FOLDER/baselines/DEVICE/again.json");
}

fn run_bench_by_criterion(outside: &TempCargoPackage, line: &str) -> ProcessOutcome {
    run_with_fake_driver(
        outside,
        env!("CARGO"),
        &format!("bench --offline --bench drop_in -- --noplot --nresamples 9 {line}"),
    )
}

/// Source of the drop-in bench, changed so that the variable HOW selects a misbehaving routine or a
/// wrong stream.
fn bench_with_ill_behaved_routine() -> String {
    const ILL_BEHAVED_ROUTINE_SOURCE: &str = r#"
thread_local!(static OTHER: Gpu = Gpu::open());

fn how() -> String {
    std::env::var("HOW").unwrap_or_default()
}

fn handle() -> *mut u8 {
    match &*how() {
        "null" => std::ptr::null_mut(),
        "no stream" => [0_u64; 8].as_ptr().cast::<u8>().cast_mut(),
        _ => Gpu::get().stream().cast(),
    }
}

fn filled(gpu: &Gpu, how: &str, buffer: u64, bytes: usize) {
    match how {
        "nothing" => {}
        "elsewhere" => OTHER.with(|other| {
            other.fill(buffer, bytes);
            other.wait();
        }),
        "waits" => {
            gpu.fill(buffer, bytes);
            gpu.wait();
        }
        _ => gpu.fill(buffer, bytes),
    }
}

fn fill_case(b: &mut kernelgate::gpu_time::Bencher, gpu: &Gpu, buffer: u64, bytes: usize) {
    let how = how();
    match &*how {
        "its own time" => b.iter_custom(|n| std::time::Duration::from_micros(n).into()),
        how => b.iter(|| filled(gpu, how, buffer, bytes)),
    }
}
"#;
    let after = read_drop_in_example("after.rs").replace("Gpu::get().stream()", "handle()");
    let after =
        after.replace("gpu.copy(target, source, bytes);", "copied(gpu, target, source, bytes);");
    let (from, to) = (
        "b.iter(|| {\n                gpu.fill(buffer, bytes);\n            });",
        "fill_case(b, gpu, buffer, bytes);",
    );
    assert!(after.contains(from), "{after}");
    let copied = "fn copied(gpu: &Gpu, target: u64, source: u64, bytes: usize) {\n    if how() != \
                  \"copies nothing\" {\n        gpu.copy(target, source, bytes);\n    }\n}\n";
    format!("{}{ILL_BEHAVED_ROUTINE_SOURCE}{copied}", after.replace(from, to))
}

#[test]
fn a_bench_without_gpu_time_is_refused_and_host_time_is_reported() {
    let outside = package_with_fake_driver(&bench_with_ill_behaved_routine());
    let how = |how: &str, filter: &str| -> ProcessOutcome {
        let line = format!("bench --offline --bench drop_in -- {QUICK_CRITERION_FLAGS} {filter}");
        let mut command = add_fake_driver(&outside, outside.package_command(env!("CARGO"), &line));
        command.env("HOW", how).output().unwrap().into()
    };
    let nothing = ["nothing", "elsewhere"].map(|kind| {
        let outcome = how(kind, "");
        let record = read_json_file(&path_of_only_record(&outside));
        assert_eq!(record["complete"], false);
        assert!(record["cases"].as_object().unwrap().is_empty(), "{record}");
        let text = record["failed"]["the first case"]["text"].as_str().unwrap();
        let message = outcome.error_message(1);
        assert_eq!(message.lines().next(), Some(&*format!("error: the first case: {text}")));
        message
    });
    assert_eq!(nothing[0], nothing[1]);
    insta::assert_snapshot!(nothing[0], @r"
    error: the first case: has no time: the routine enqueues nothing on the stream that is timed; what runs on another stream, or on the host, has no time here
    run recorded in FOLDER/target/kernelgate/runs/SESSION/drop_in.json
    `kernelgate report` draws it in FOLDER/target/kernelgate/report/index.html
    ");
    // The error message names the case before the failing one, and cases that were measured earlier
    // are kept.
    let copies = how("copies nothing", "");
    insta::assert_snapshot!(copies.error_message(1), @r"
    error: the case after `fill/67108864`: has no time: the routine enqueues nothing on the stream that is timed; what runs on another stream, or on the host, has no time here
    run recorded in FOLDER/target/kernelgate/runs/SESSION/drop_in.json
    `kernelgate report` draws it in FOLDER/target/kernelgate/report/index.html
    ");
    assert_eq!(
        read_json_file(&path_of_only_record(&outside))["cases"].as_object().unwrap().len(),
        2
    );

    insta::assert_snapshot!(how("null", "").error_message(2), @"error: failed to time a stream: the stream's handle is null; where the legacy default stream is meant, say so: it has a handle of its own");
    insta::assert_snapshot!(how("no stream", "").error_message(2), @"error: failed to time a stream: ADDRESS is no stream that lives: CUDA_ERROR_INVALID_HANDLE (invalid resource handle)");

    // If the host is delayed while the launches are verified, they look as if they ran on another
    // stream, and the bench is refused.
    let mut timed = how("waits", "fill");
    for _ in 0..2 {
        if timed.exit_code != Some(0) {
            timed.assert_exit(1);
            timed = how("waits", "fill");
        }
    }
    insta::assert_snapshot!(lines_with_word(&timed.assert_exit(0).stdout_and_stderr(), "host-bound"), @"host-bound, the host's launches are in the time: fill/1048576, fill/67108864");
    how("its own time", "^(fill|copy)/1048576$").assert_exit(0);
    let record = read_json_file(&path_of_only_record(&outside));
    insta::assert_snapshot!(format!("{:#}", record["skipped"]), @r#"
    {
      "fill/1048576": "its routine measures the time itself (iter_custom)"
    }
    "#);
    let cases = record["cases"].as_object().unwrap();
    assert_eq!(cases.keys().collect::<Vec<_>>(), ["copy/1048576"]);
}

#[test]
fn two_builds_are_compared_by_gpu_time() {
    let outside = package_with_fake_driver(&read_drop_in_example("after.rs"));
    outside.commit_all_files();
    let slower =
        read_drop_in_example("gpu/mod.rs").replace("7 => u8, bytes =>", "7 => u8, 30 * bytes =>");
    outside.write_file("benches/gpu/mod.rs", &slower);
    let line = "compare --base HEAD --relative 2 --tolerated 4 --case-time 0.02s --max-blocks 12 \
                --format json fill/67108864";
    let outcome = run_kernelgate(&outside, line);
    let json = outcome.assert_exit(1).stdout_as_json();
    assert_eq!(json["unverified"], serde_json::json!(["fill/67108864"]));
    assert!(json["device"].as_str().unwrap().starts_with("Fake GPU"), "{}", json["device"]);
    let judged = &json["judged"][0];
    assert_eq!(judged["decision"]["case"], "fill/67108864");
    assert_eq!(judged["verdict"], "regressed");
    assert!(
        !outside.package_path("target/kernelgate/runs").exists(),
        "no trial is taken for a run"
    );
}

/// Runs the drop-in example with the real CUDA driver.
#[test]
fn the_example_runs_on_a_gpu() {
    let Some((_device, _alone)) = kernelgate_cuda::testing::lock_first_gpu() else { return };
    let outside = package_with_fake_driver(&read_drop_in_example("after.rs"));
    let line = format!("bench --offline --bench drop_in -- {QUICK_CRITERION_FLAGS}");
    let mut command = outside.package_command(env!("CARGO"), &line);
    command.env("CARGO_ENCODED_RUSTFLAGS", crate::package::rustc_flags_linking_kernelgate());
    let outcome = ProcessOutcome::from(command.output().unwrap());
    eprintln!("{}", outcome.stdout);
    outcome.assert_exit(0);
    let record = read_json_file(&path_of_only_record(&outside));
    let cases = record["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 6);
    // On every GPU, copying 64 MiB takes between 10 µs and 10 ms.
    let samples = &cases["copy/67108864"]["samples"];
    let (times, launches) = (&samples["elapsed_ns"], &samples["launches"]);
    let each = times[0].as_f64().unwrap() / launches[0].as_f64().unwrap();
    assert!((1e4..1e7).contains(&each), "{samples}");
    assert!(samples["conditions"]["host_bound"].is_null(), "{samples}");
}
