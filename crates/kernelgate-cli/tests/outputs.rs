//! Complete outputs of the verbs on the fixture, as snapshots. Facts of the run and of the machine
//! are replaced: times, dates, folders, the device.

use regex::Regex;

use crate::package::{Outcome, Package};

/// Replaces the parts of a text that differ from run to run.
fn normalized(package: &Package, text: &str) -> String {
    let folder = package.path("").display().to_string();
    let text = text.replace(folder.trim_end_matches('/'), "FOLDER");
    [
        (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "INSTANT"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "DATE"),
        (r"\d{4}-\d\d-\d\d", "DAY"),
        (r"(?m)^(cpu|simd|memory|load|governor|library|gpu|kernels|tool|counters|setting) .*(\n {2,}.*)*", "$1 HERE"),
        (r"[^\n,\x22:]+, \d+ cores, \d+ threads", "DEVICE"),
        (r"INSTANT, [^\n]*, \d+ threads", "INSTANT, DEVICE"),
        (r"(?m)^DEVICE; host \w+", "DEVICE; host HOST"),
        (r"worst at [^\n]*", "worst at PLACE"),
        (r"baselines/[\w.-]+/", "baselines/DEVICE/"),
        (r"[\w.-]+/(a|main)\b", "DEVICE/$1"),
        (r"\b[0-9a-f]{16,64}\b", "HASH"),
        (r"\b\d+(\.\d+)? (ns|µs|ms|s|%|GB/s|MB/s|kB/s|kB|MB|GB|GFLOP/s|MFLOP/s)\b", "N $2"),
        (r"±\s*\d+(\.\d+)?%", "±N%"),
        (r"\d+\.\d+e-?\d+", "N"),
        (r"(\S) {2,}", "$1  "),
        (r"-{2,}", "--"),
    ]
    .iter()
    .fold(text, |text, (from, to)| Regex::new(from).unwrap().replace_all(&text, *to).into_owned())
}

/// Both output streams with the exit code.
fn both_streams(package: &Package, outcome: &Outcome) -> String {
    let Outcome { code, stdout, stderr } = outcome;
    let text = format!("exit {}\n-- stdout\n{stdout}\n-- stderr\n{stderr}", code.unwrap_or(-1));
    normalized(package, &text)
}

/// JSON with its names, and placeholders for measured numbers.
fn names(value: &serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(name, value)| (name.clone(), names(value))).collect())
        }
        Value::Array(values) => values.iter().take(2).map(names).collect(),
        Value::Number(number) if number.is_f64() => {
            let digits = format!("{:.3e}", number.as_f64().unwrap());
            Value::String(digits)
        }
        other => other.clone(),
    }
}

/// A package with a baseline `a` of two runs at 200 µs, and a run `head`: one case at 300 µs, one
/// unchanged.
fn slower() -> Package {
    let package = Package::new();
    for session in ["b1", "b2"] {
        let mut bench = package.bench_command(session, "");
        assert!(bench.env("KERNELGATE_COMMIT", "aaaa1111").output().unwrap().status.success());
        package.kernelgate("baseline add a").expect(0, &[]);
    }
    for record in [package.baseline("a"), package.record("b1"), package.record("b2")] {
        package.set_times(&record, 200_000.0);
    }
    let mut bench = package.bench_command("head", "");
    assert!(bench.env("KERNELGATE_COMMIT", "bbbb2222").output().unwrap().status.success());
    package.set_times(&package.record("head"), 200_000.0);
    package.set_case_times(&package.record("head"), "n64", 300_000.0);
    package
}

#[test]
fn a_gate_in_every_format() {
    let package = slower();
    for format in ["text", "markdown", "junit"] {
        let outcome = package.kernelgate(&format!("gate --baseline a --format {format}"));
        insta::assert_snapshot!(format!("gate.{format}"), both_streams(&package, &outcome));
    }
    let json = package.kernelgate("gate --baseline a --format json");
    let value: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let text = serde_json::to_string_pretty(&names(&value)).unwrap();
    insta::assert_snapshot!("gate.json", normalized(&package, &text));
}

#[test]
fn a_gate_whose_package_accepts_a_slow_down() {
    let package = slower();
    package.write_rules(
        "[[threshold]]\ncases = 'n64'\nrelative = 0.03\n[[accept]]\ncases = 'spin/'\n\
         slower = 0.6\nreason = 'exact sums'\nbaseline = 'aaaa1111'\n",
    );
    let outcome = package.kernelgate("gate --baseline a");
    insta::assert_snapshot!("gate_accepted", both_streams(&package, &outcome));
}

#[test]
fn baselines_and_runs_as_lists() {
    let package = slower();
    for (name, line) in [
        ("baseline_list", "baseline list"),
        ("baseline_show", "baseline show a"),
        ("runs", "runs"),
        ("runs_costs", "runs --costs"),
        ("history", "history"),
        ("report", "report"),
    ] {
        insta::assert_snapshot!(name, both_streams(&package, &package.kernelgate(line)));
    }
}

#[test]
fn cases_are_listed_and_verified() {
    let package = Package::new();
    let dir = package.dir();
    for (name, line) in [
        ("list", format!("list {dir}")),
        ("verify", format!("verify {dir}")),
        ("verify_wrong", format!("verify --axis n=64 --axis fault=wrong {dir}")),
    ] {
        insta::assert_snapshot!(name, both_streams(&package, &package.kernelgate(&line)));
    }
}

#[test]
fn verbose_prints_the_commands_that_run() {
    let package = Package::new();
    let dir = package.dir();
    let commands = |flag: &str| {
        let outcome = package.kernelgate(&format!("{flag} list {dir}"));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let lines = outcome.stderr.lines().filter(|line| line.starts_with("+ "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(commands(""), [""; 0]);
    let shown = commands("--verbose");
    assert!(shown.iter().any(|line| line.contains("executables") && line.contains("--list")));
}

#[test]
fn a_comparison_of_one_file_with_itself() {
    let package = Package::new();
    package.dir();
    let line = "compare --base-dir executables --head-dir executables --backend cpu";
    let outcome = package.kernelgate(line);
    insta::assert_snapshot!("compare_identical", normalized(&package, &outcome.stdout));
}

#[test]
fn mistakes_of_the_command_line() {
    let package = Package::new();
    for (name, line) in [
        ("gate_without_a_run", "gate --baseline a"),
        ("gate_with_a_negative_threshold", "gate --baseline a --relative=-1"),
        ("compare_without_a_base", "compare"),
    ] {
        insta::assert_snapshot!(name, both_streams(&package, &package.kernelgate(line)));
    }
}

#[test]
fn doctor_names_every_check() {
    let package = Package::new();
    let outcome = package.kernelgate("doctor");
    let text = normalized(&package, &outcome.stdout);
    // The GPU, its libraries and its tools depend on the machine.
    let fixed = ["build", "baselines", "runs"];
    let lines: Vec<&str> =
        text.lines().filter(|line| fixed.iter().any(|what| line.starts_with(what))).collect();
    insta::assert_snapshot!("doctor", lines.join("\n"));
}
