//! Snapshot tests of the complete outputs of the verbs on the fixture. In the snapshots, facts that
//! vary by run or machine (times, dates, folders, the device) are replaced by placeholders.

use std::path::Path;

use crate::package::outcome::redact_varying_parts;
use crate::package::{ProcessOutcome, TempPackage};

/// Compares a text with the snapshot of that name in a folder of `snapshots`.
#[track_caller]
pub fn assert_text_snapshot(folder: &str, name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(format!("snapshots/{folder}"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// Exit code, standard output and standard error of a process, with varying parts replaced.
pub fn exit_code_and_both_streams(outcome: &ProcessOutcome) -> String {
    let ProcessOutcome { exit_code: code, stdout, stderr } = outcome;
    let text = format!("exit {}\n-- stdout\n{stdout}\n-- stderr\n{stderr}", code.unwrap_or(-1));
    redact_varying_parts(&text)
}

/// Replaces the numbers in a JSON document by placeholders, and keeps the field names.
fn json_with_numbers_replaced(value: &serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Object(fields) => Value::Object(
            fields
                .iter()
                .map(|(name, value)| (name.clone(), json_with_numbers_replaced(value)))
                .collect(),
        ),
        Value::Array(values) => values.iter().take(2).map(json_with_numbers_replaced).collect(),
        Value::Number(number) if number.is_f64() => {
            let digits = format!("{:.3e}", number.as_f64().unwrap());
            Value::String(digits)
        }
        other => other.clone(),
    }
}

/// A package with a baseline `a` of two runs at 200 µs, and a run `head`: one case at 300 µs, one
/// unchanged.
fn package_with_one_slower_case() -> TempPackage {
    let package = TempPackage::new();
    for session in ["b1", "b2"] {
        let mut bench = package.bench_command(session, "");
        assert!(bench.env("KERNELGATE_COMMIT", "aaaa1111").output().unwrap().status.success());
        package.run_kernelgate("baseline add a").assert_exit(0);
    }
    for record in
        [package.baseline_path("a"), package.run_record_path("b1"), package.run_record_path("b2")]
    {
        package.set_record_times(&record, 200_000.0);
    }
    let mut bench = package.bench_command("head", "");
    assert!(bench.env("KERNELGATE_COMMIT", "bbbb2222").output().unwrap().status.success());
    package.set_record_times(&package.run_record_path("head"), 200_000.0);
    package.set_case_times(&package.run_record_path("head"), "n64", 300_000.0);
    package
}

#[test]
fn a_gate_in_every_format() {
    let package = package_with_one_slower_case();
    for format in ["text", "markdown", "junit"] {
        let outcome = package.run_kernelgate(&format!("gate --baseline a --format {format}"));
        assert_text_snapshot(
            "slower",
            &format!("gate.{format}"),
            &exit_code_and_both_streams(&outcome),
        );
    }
    let json = package.run_kernelgate("gate --baseline a --format json");
    let value: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let text = serde_json::to_string_pretty(&json_with_numbers_replaced(&value)).unwrap();
    assert_text_snapshot("slower", "gate.json", &redact_varying_parts(&text));
}

#[test]
fn a_gate_whose_package_accepts_a_slow_down() {
    let package = package_with_one_slower_case();
    package.write_rules_file(
        "[[threshold]]\ncases = 'n64'\nrelative = 0.03\n[[accept]]\ncases = 'spin/'\n\
         slower = 0.6\nreason = 'exact sums'\nbaseline = 'aaaa1111'\n",
    );
    let outcome = package.run_kernelgate("gate --baseline a");
    assert_text_snapshot("slower", "gate_accepted", &exit_code_and_both_streams(&outcome));
}

#[test]
fn baselines_and_runs_as_lists() {
    let package = package_with_one_slower_case();
    for (folder, name, line) in [
        ("slower", "baseline_list", "baseline list"),
        ("slower", "baseline_show", "baseline show a"),
        ("fast", "runs", "runs"),
        ("fast", "runs_costs", "runs --costs"),
        ("fast", "history", "history"),
        ("fast", "report", "report"),
        ("fast", "diff", "diff b1 head"),
        ("fast", "peers", "peers"),
    ] {
        assert_text_snapshot(
            folder,
            name,
            &exit_code_and_both_streams(&package.run_kernelgate(line)),
        );
    }
}

#[test]
fn cases_are_listed_and_verified() {
    let package = TempPackage::new();
    let dir = package.bench_folder_flags();
    for (name, line) in [
        ("list", format!("list {dir}")),
        ("verify", format!("verify {dir}")),
        ("verify_wrong", format!("verify --axis n=64 --axis fault=wrong {dir}")),
    ] {
        assert_text_snapshot(
            "correct",
            name,
            &exit_code_and_both_streams(&package.run_kernelgate(&line)),
        );
    }
}

#[test]
fn verbose_prints_the_commands_that_run() {
    let package = TempPackage::new();
    let dir = package.bench_folder_flags();
    let commands = |flag: &str| {
        let outcome = package.run_kernelgate(&format!("{flag} list {dir}"));
        assert_eq!(outcome.exit_code, Some(0), "{}", outcome.stderr);
        let lines = outcome.stderr.lines().filter(|line| line.starts_with("+ "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(commands(""), [""; 0]);
    let shown = commands("--verbose");
    assert!(shown.iter().any(|line| line.contains("executables") && line.contains("--list")));
}

#[test]
fn a_comparison_of_one_file_with_itself() {
    let package = TempPackage::new();
    package.bench_folder_flags();
    let line = "compare --base-dir executables --head-dir executables --backend cpu";
    let outcome = package.run_kernelgate(line);
    assert_text_snapshot("slower", "compare_identical", &redact_varying_parts(&outcome.stdout));
}

/// The toy bench's answer is the resources response in the fuzzer's corpus.
#[cfg(unix)]
#[test]
fn resources_of_kernels_as_a_table() {
    use crate::package::toy::ToyPackage;
    use kernelgate::protocol::BenchResponseFile;
    use kernelgate::record::file;

    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../kernelgate-fuzz/tests/corpus/response/resources.json");
    let toy = ToyPackage::new(file::read_record::<BenchResponseFile>(&path).unwrap().answer);
    let outcome = toy.run_kernelgate("resources --dir benches");
    assert_text_snapshot("slower", "resources", &exit_code_and_both_streams(&outcome));
}

#[test]
fn two_shards_as_one_measurement() {
    let package = TempPackage::new();
    for shard in ["1-of-2", "2-of-2"] {
        package
            .run_fixture_bench(shard, &format!("--shard {}", shard.replace("-of-", "/")))
            .assert_exit(0);
    }
    let runs = "target/kernelgate/runs/1-of-2 target/kernelgate/runs/2-of-2";
    let merged = package.run_kernelgate(&format!("merge {runs} --anchor-tolerance 100"));
    assert_text_snapshot("fleet", "merge", &exit_code_and_both_streams(&merged));
    let missing = package.run_kernelgate("merge target/kernelgate/runs/1-of-2");
    assert_text_snapshot("fleet", "merge_without_a_shard", &exit_code_and_both_streams(&missing));
}

#[test]
fn jobs_of_schedulers_as_a_dry_run() {
    let package = TempPackage::new();
    let job = format!("--dry-run --shards 2 --folder jobs {}", package.bench_folder_flags());
    for (name, line) in [
        ("submit_slurm", format!("submit slurm {job} -- bench")),
        (
            "submit_kubernetes",
            "submit kubernetes --dry-run --shards 2 --image i:1 --claim c --executable /bin/b -- bench"
                .to_owned(),
        ),
    ] {
        assert_text_snapshot("fleet", name, &exit_code_and_both_streams(&package.run_kernelgate(&line)));
    }
}

#[test]
fn mistakes_of_the_command_line() {
    let package = TempPackage::new();
    for (name, line) in [
        ("gate_without_a_run", "gate --baseline a"),
        ("gate_with_a_negative_threshold", "gate --baseline a --relative=-1"),
        ("compare_without_a_base", "compare"),
    ] {
        assert_text_snapshot(
            "mistakes",
            name,
            &exit_code_and_both_streams(&package.run_kernelgate(line)),
        );
    }
}

#[test]
fn doctor_names_every_check() {
    let package = TempPackage::new();
    std::fs::write(package.package_path("Cargo.toml"), "[package]\nname = \"a\"\n").unwrap();
    let outcome = package.run_kernelgate("doctor");
    let text = redact_varying_parts(&outcome.stdout);
    // The GPU, its libraries and its tools depend on the machine.
    let fixed = ["build", "baselines", "runs"];
    let lines: Vec<&str> =
        text.lines().filter(|line| fixed.iter().any(|what| line.starts_with(what))).collect();
    assert_text_snapshot("setup", "doctor", &lines.join("\n"));
}
