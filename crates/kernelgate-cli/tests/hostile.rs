//! Tests with benches that lie, fail and attack: each behaviour is refused by name, and none of
//! their text acts on a terminal, comment, page, table or test report.

#![cfg(unix)]

use kernelgate::protocol::{
    BenchCaseStatus, BenchListResponse, CaseVerificationResponse, ListedBenchCase,
    ListedImplementation, ListedWorkload, ResponseToBenchAction,
};

use crate::outputs::assert_text_snapshot;
use crate::package::ProcessOutcome;
use crate::package::outcome::redact_varying_parts;
use crate::package::toy::{
    SCRIPT_THAT_COPIES_RESPONSE, SCRIPT_THAT_WRITES_TRIAL_RECORD, TOY_CASE_ID, ToyPackage,
};

fn verified_case_response(case: &str) -> CaseVerificationResponse {
    CaseVerificationResponse {
        case_id: case.to_owned(),
        status: BenchCaseStatus::Ok,
        compared_elements: 10,
        output_elements: 10,
        max_error_over_max_reference: 0.25,
        relative_l2_error: 0.125,
        rounding_relative_l2_error: 0.5,
        errors_by_output: std::collections::BTreeMap::new(),
        input_data_set_hash: None,
        single_seed_inputs_hash: None,
        repeated_launch_is_bit_equal: Some(true),
        failure_or_skip_reason: None,
        launched_kernels: Vec::new(),
    }
}

/// A toy bench that answers `verify` correctly.
fn toy_bench_with_correct_outputs() -> ToyPackage {
    ToyPackage::new(ResponseToBenchAction::Verify(vec![verified_case_response(TOY_CASE_ID)]))
}

/// Checks for a non-zero exit code, no panic, and no control character. Returns the first error
/// message of the program.
#[track_caller]
fn assert_refused_without_panic(name: &str, outcome: &ProcessOutcome) -> String {
    let all = outcome.stdout_and_stderr();
    assert!(matches!(outcome.exit_code, Some(1..=4)), "{name}: {:?} {all}", outcome.exit_code);
    for wrong in ["panicked", "internal error", "stack overflow"] {
        assert!(!all.contains(wrong), "{name}: {all}");
    }
    let acts = all.chars().find(|c| c.is_control() && !['\n', '\t'].contains(c));
    assert_eq!(acts, None, "{name}: {all:?}");
    let is_error = |line: &&str| line.starts_with("error: ") || line.starts_with("refused: ");
    let message = outcome.stderr.lines().find(is_error).unwrap_or_default();
    format!("{name}: {}\n", redact_varying_parts(message))
}

#[test]
fn a_response_that_cannot_be_is_refused_by_name() {
    let toy = toy_bench_with_correct_outputs();
    assert_eq!(
        toy.run_kernelgate("verify --dir benches --format json").assert_exit(0).json_case_ids(),
        [TOY_CASE_ID]
    );
    let mut refusals = String::new();
    // Each invalid answer replaces a number, a name or the outer JSON object by another text.
    for (from, to) in [
        ("\"checked\": 10", "\"checked\": 20"),
        ("\"checked\": 10", "\"checked\": -1"),
        ("\"checked\": 10", "\"checked\": 1e300"),
        ("\"total\": 10", "\"total\": 18446744073709551616"),
        ("\"max_error\": 0.25", "\"max_error\": -1"),
        ("\"max_error\": 0.25", "\"max_error\": 1e300"),
        ("\"max_error\": 0.25", "\"max_error\": NaN"),
        ("\"max_error\": 0.25", "\"max_error\": \"0.25\""),
        ("\"relative_l2\": 0.125", "\"relative_l2\": null"),
        ("\"rounding\": 0.5", "\"rounding\": -0.5"),
        (TOY_CASE_ID, "toy/\\u001b[2J/n1/cpu/hot"),
        (TOY_CASE_ID, "toy/\\u202escale/n1/cpu/hot"),
        (TOY_CASE_ID, "toy/scale\\n0 failed"),
        ("\"status\": \"ok\"", "\"status\": \"perfect\""),
        ("kernelgate-response", "kernelgate.response"),
        ("\"schema_version\": 1", "\"schema_version\": 9"),
        ("\"schema_version\": 1", "\"schema_version\": 0"),
        ("\"verify\":", "\"list\":"),
        ("\"bench\": \"toy\"", "\"bench\": {}"),
        ("{", "[{"),
        ("\"bench\": \"toy\"", "\"bench\": \"other\""),
        (TOY_CASE_ID, "  "),
        ("\"checked\": 10", "\"checked\": 10, \"case\": \"a\""),
    ] {
        toy.prepare_response(ResponseToBenchAction::Verify(vec![verified_case_response(
            TOY_CASE_ID,
        )]));
        toy.replace_text_in_response(from, to);
        refusals += &assert_refused_without_panic(
            &format!("{from} -> {to}"),
            &toy.run_kernelgate("verify --dir benches"),
        );
    }
    toy.prepare_response(ResponseToBenchAction::Verify(vec![
        verified_case_response(TOY_CASE_ID),
        verified_case_response("toy/other"),
    ]));
    toy.replace_text_in_response("toy/other", TOY_CASE_ID);
    refusals +=
        &assert_refused_without_panic("a case twice", &toy.run_kernelgate("verify --dir benches"));
    toy.prepare_response(ResponseToBenchAction::Peers(Vec::new()));
    refusals += &assert_refused_without_panic(
        "another answer",
        &toy.run_kernelgate("verify --dir benches"),
    );
    assert_text_snapshot("hostile", "responses", &refusals);
}

#[test]
fn a_bench_that_attacks_is_named_and_leaves_nothing() {
    let toy = toy_bench_with_correct_outputs();
    let victim = toy.package.package_path("victim");
    let mut refusals = String::new();
    for (name, script) in [
        ("dies of a signal after it answered", "kill -SEGV $$"),
        ("exits with 7 after it answered", "exit 7"),
        ("a folder as response", "rm -f \"$RESPONSE\"; mkdir \"$RESPONSE\""),
        ("a FIFO as response", "rm -f \"$RESPONSE\"; mkfifo \"$RESPONSE\""),
        ("a device as response", "ln -sf /dev/zero \"$RESPONSE\""),
        ("a circle of links", "ln -sf response.json \"$RESPONSE\""),
        ("an empty response", ": > \"$RESPONSE\""),
        ("half a response", "head -c 40 \"$ROOT/answer.json\" > \"$RESPONSE\""),
        ("a response of 300 MB", "truncate -s 300M \"$RESPONSE\""),
        ("a million brackets", "head -c 1000000 /dev/zero | tr '\\0' '[' > \"$RESPONSE\""),
        ("no text", "head -c 1000 /dev/zero | tr '\\0' '\\377' > \"$RESPONSE\""),
        ("no response", "rm -f \"$RESPONSE\""),
        ("the request in place of a response", "cp \"$REQUEST\" \"$RESPONSE\""),
        ("hangs after it answered", "exec sleep 60"),
        ("hangs without an answer", "rm -f \"$RESPONSE\"; exec sleep 60"),
        ("stops itself", "kill -STOP $$"),
    ] {
        toy.set_script_after_request(&format!("{SCRIPT_THAT_COPIES_RESPONSE}\n{script}"));
        let outcome = toy.run_kernelgate("verify --dir benches --wait 2s");
        refusals += &assert_refused_without_panic(name, &outcome);
        assert!(!victim.exists(), "{name}");
    }
    assert_text_snapshot("hostile", "attacks", &refusals);
    // The bench's answer is complete, but the process misbehaves in other ways.
    for (name, script) in [
        ("a child that outlives it", "sleep 20 &"),
        (
            "a flood of words",
            "i=0; while [ $i -lt 3000 ]; do echo 0123456789 >&2; i=$((i+1)); done",
        ),
        ("escapes on its streams", "printf '\\033[2J\\033]0;t\\007' >&2; printf '\\033c'"),
        ("closed streams", "exec >&- 2>&-"),
    ] {
        toy.set_script_after_request(&format!("{SCRIPT_THAT_COPIES_RESPONSE}\n{script}"));
        let outcome = toy.run_kernelgate("verify --dir benches --wait 10s");
        assert_eq!(outcome.exit_code, Some(0), "{name}: {}", outcome.stdout_and_stderr());
        assert!(
            !outcome.stdout_and_stderr().contains('\u{1b}'),
            "{name}: {:?}",
            outcome.stdout_and_stderr()
        );
    }
}

/// The function is long because it contains a table of invalid record contents.
#[test]
#[expect(clippy::too_many_lines)]
fn a_record_of_a_trial_that_cannot_be_is_refused() {
    let toy = toy_bench_with_correct_outputs();
    toy.set_script_after_request(SCRIPT_THAT_WRITES_TRIAL_RECORD);
    toy.prepare_trial_record(|_| ());
    let fine = toy.compare_with_itself();
    assert!(matches!(fine.exit_code, Some(0 | 3)), "{}", fine.stdout_and_stderr());
    assert!(fine.stdout.contains(TOY_CASE_ID), "{}", fine.stdout_and_stderr());
    type JsonEdit = fn(&mut serde_json::Value);
    let changes: [(&str, JsonEdit); 29] = [
        ("spent_s -1", |run| run["spent_s"] = serde_json::json!({ "whole": -1 })),
        ("spent_s 1e300", |run| run["spent_s"] = serde_json::json!({ "whole": 1e300 })),
        ("another session", |run| run["session"] = "other".into()),
        ("a path as session", |run| run["session"] = "../../x".into()),
        ("another bench", |run| run["bench"] = "other".into()),
        ("another executable", |run| run["executable"] = "feed".into()),
        ("another commit", |run| run["provenance"]["commit"] = "951c294".into()),
        ("changes", |run| run["provenance"]["dirty"] = true.into()),
        ("another processor", |run| run["environment"]["device_name"] = "Z80".into()),
        ("longer than it ran", |run| set_samples_of_toy_case(run, "elapsed_ns", &[1e11; 4])),
        ("no executable", |run| run["executable"] = serde_json::Value::Null),
        ("another shard", |run| run["shard"] = serde_json::json!({ "index": 1, "count": 2 })),
        ("21 samples", |run| set_samples_of_toy_case(run, "elapsed_ns", &[2e5; 21])),
        ("no cores", |run| run["environment"]["cores"] = 0.into()),
        ("timed and skipped", |run| run["skipped"] = serde_json::json!({ TOY_CASE_ID: "x" })),
        ("timed and failed", |run| {
            run["failed"] = serde_json::json!({ TOY_CASE_ID: { "text": "x" } })
        }),
        ("an error after timing", |run| {
            let verification = &mut toy_case_of_record(run)["verification"];
            verification["allowed"] = serde_json::json!({ "max_error": 5e-6, "relative_l2": 1.0 });
            let after =
                serde_json::json!({ "inputs": "same", "max_error": 0.5, "relative_l2": 0.0 });
            verification["after"] = after;
        }),
        ("delays", |run| run["delays"] = serde_json::json!({ TOY_CASE_ID: 5 })),
        ("times of 0", |run| set_samples_of_toy_case(run, "elapsed_ns", &[0.0; 4])),
        ("times of -1", |run| set_samples_of_toy_case(run, "elapsed_ns", &[-1.0; 4])),
        ("times of 1e300", |run| set_samples_of_toy_case(run, "elapsed_ns", &[1e300; 4])),
        ("fewer times", |run| set_samples_of_toy_case(run, "elapsed_ns", &[2e5; 3])),
        ("no times", |run| set_samples_of_toy_case(run, "elapsed_ns", &[])),
        ("contention of 5", |run| {
            toy_case_of_record(run)["samples"]["conditions"]["contention"] = 5.into()
        }),
        ("more elements than there are", |run| {
            toy_case_of_record(run)["verification"]["checked"] = 2.into()
        }),
        ("more work than any machine does", |run| {
            toy_case_of_record(run)["work"]["read_bytes"] = u64::MAX.into()
        }),
        ("an error beyond the tolerance", |run| {
            let verification = &mut toy_case_of_record(run)["verification"];
            verification["max_error"] = 0.5.into();
            let allowed = serde_json::json!({ "max_error": 5e-6, "relative_l2": 1.0 });
            verification["allowed"] = allowed;
        }),
        ("cores beyond count", |run| run["environment"]["cores"] = u64::MAX.into()),
        ("an escape in a name", |run| toy_case_of_record(run)["cache"] = "\u{1b}[2J".into()),
    ];
    let mut refusals = String::new();
    for (name, change) in changes {
        toy.prepare_trial_record(change);
        refusals += &assert_refused_without_panic(name, &toy.compare_with_itself());
    }
    toy.prepare_trial_record(|run| run["started"] = "yesterday".into());
    refusals += &assert_refused_without_panic("no time", &toy.compare_with_itself());
    // The trial writes a record of another case, crashes, or leaves a folder at the path of the
    // record.
    toy.prepare_trial_record(|_| ());
    for (name, script) in [
        ("a crash after the record", "kill -SEGV $$"),
        ("an exit code after the record", "exit 9"),
        ("the code of a failed case without one", "exit 1"),
        ("no response", "rm \"$RESPONSE\""),
        ("another response", "cp \"$ROOT/answer.json\" \"$RESPONSE\""),
        ("no record", "rm -f \"$RECORD\"; exit 3"),
        ("a folder as record", "rm -f \"$RECORD\"; mkdir \"$RECORD\""),
        ("a FIFO as record", "rm -f \"$RECORD\"; mkfifo \"$RECORD\""),
    ] {
        toy.set_script_after_request(&format!("{SCRIPT_THAT_WRITES_TRIAL_RECORD}\n{script}"));
        refusals += &assert_refused_without_panic(name, &toy.compare_with_itself());
        // Files that the failed trial left do not break the next comparison.
        toy.set_script_after_request(SCRIPT_THAT_WRITES_TRIAL_RECORD);
        assert!(matches!(toy.compare_with_itself().exit_code, Some(0 | 3)), "after {name}");
    }
    // The bench process overwrites the base's executable while the comparison runs.
    let base = toy.package.package_path("target/kernelgate/compare/base/bin/toy");
    toy.set_script_after_request(&format!(
        "{SCRIPT_THAT_WRITES_TRIAL_RECORD}\nprintf x >> '{}'",
        base.display()
    ));
    let changed = toy.compare_with_itself();
    assert_eq!(changed.exit_code, Some(4), "{}", changed.stdout_and_stderr());
    refusals += &assert_refused_without_panic("a changed executable", &changed);
    assert_text_snapshot("hostile", "records", &refusals);
}

fn toy_case_of_record(run: &mut serde_json::Value) -> &mut serde_json::Value {
    &mut run["cases"][TOY_CASE_ID]
}

fn set_samples_of_toy_case(run: &mut serde_json::Value, field: &str, values: &[f64]) {
    toy_case_of_record(run)["samples"][field] = values.into();
}

/// Test names that are plain text, but have a meaning for a spreadsheet, a browser or a
/// code-hosting site.
const HOSTILE_NAMES: [&str; 8] = [
    "=cmd|' /C calc'!A0",
    "@SUM(1)",
    "@octocat",
    "<script>alert(1)</script>",
    "https:||evil.example",
    "](http:||evil.example)",
    "o#1",
    "&lt;b&gt;",
];

/// Checks that no name of [`HOSTILE_NAMES`] acts as Markdown.
#[track_caller]
fn assert_names_are_inert_markdown(text: &str) {
    let (mut code, mut lines) = (false, Vec::new());
    for line in text.lines() {
        if line.starts_with("```") {
            code = !code;
        } else if !code {
            lines.push(line);
        }
    }
    let text = lines.join("\n");
    for live in ["<script", "@octocat", "@SUM", "https://evil", "[x](http", "o#1", " &lt;b"] {
        assert!(!text.contains(live), "{live}: {text}");
    }
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text:?}");
}

fn case_id_with_text(word: &str) -> String {
    // A part of a case id cannot contain `/`.
    format!("{}/scale/n1/cpu/hot", word.replace("||", "\\\\"))
}

#[test]
fn names_of_others_are_inert_in_every_output_of_every_verb() {
    let cases = HOSTILE_NAMES.map(|word| verified_case_response(&case_id_with_text(word)));
    let failed = HOSTILE_NAMES.map(|word| CaseVerificationResponse {
        status: BenchCaseStatus::Failed,
        failure_or_skip_reason: Some(format!(
            "{word} \u{1b}[2J\u{202e} https://evil.example o#1 @octocat"
        )),
        ..verified_case_response(&case_id_with_text(word).replace("scale", "fails"))
    });
    let skipped = CaseVerificationResponse {
        status: BenchCaseStatus::Skipped,
        failure_or_skip_reason: Some("<script> @octocat".to_owned()),
        ..verified_case_response(&case_id_with_text("@octocat").replace("scale", "skips"))
    };
    let all: Vec<CaseVerificationResponse> =
        cases.into_iter().chain(failed).chain([skipped]).collect();
    let toy = ToyPackage::new(ResponseToBenchAction::Verify(all));
    let markdown = toy.run_kernelgate("verify --dir benches --format markdown");
    assert_eq!(markdown.exit_code, Some(1), "{}", markdown.stdout_and_stderr());
    assert_names_are_inert_markdown(&markdown.stdout);
    for format in ["text", "json"] {
        assert_refused_without_panic(
            format,
            toy.run_kernelgate(&format!("verify --dir benches --format {format}")).assert_exit(1),
        );
    }
    let listed = |word: &&str| ListedBenchCase {
        case_id: case_id_with_text(word),
        status: BenchCaseStatus::Skipped,
        reason_not_runnable: Some(format!("{word}\u{1b}[2J")),
        runs_on_no_machine: false,
        matmul_flops_per_launch: 0,
        min_bytes_per_launch: 0,
        peak_host_memory_bytes: 0,
        declared_device_memory_bytes: None,
    };
    let row = ListedImplementation {
        implementation_name: "<script>".to_owned(),
        description: "@octocat".to_owned(),
    };
    toy.prepare_response(ResponseToBenchAction::List(BenchListResponse {
        backend: "cpu".to_owned(),
        reason_against_other_backend: "https://evil.example \u{1b}[2J".to_owned(),
        workloads: vec![ListedWorkload {
            workload_name: "@octocat/scale".to_owned(),
            description: "=cmd".to_owned(),
            axes: vec![["n", "<b>", "@octocat"].map(str::to_owned)],
            implementations: vec![row],
        }],
        cases: HOSTILE_NAMES.iter().map(listed).collect(),
    }));
    for format in ["text", "markdown", "json"] {
        let outcome = toy.run_kernelgate(&format!("list --dir benches --format {format}"));
        assert_eq!(outcome.exit_code, Some(0), "{format}: {}", outcome.stdout_and_stderr());
        assert!(
            !outcome.stdout_and_stderr().contains('\u{1b}'),
            "{format}: {:?}",
            outcome.stdout_and_stderr()
        );
    }
    write_and_read_hostile_records(&toy);
}

/// Writes a baseline and a run with hostile ids and failures, and reads them with the verbs.
fn write_and_read_hostile_records(toy: &ToyPackage) {
    let runs = toy.package.package_path("target/kernelgate/runs");
    let session = |name: &str, factor: f64| {
        toy.prepare_trial_record(|run| {
            let case = toy_case_of_record(run).take();
            let ids = HOSTILE_NAMES.map(|word| (case_id_with_text(word), case.clone()));
            run["cases"] = serde_json::Value::Object(ids.into_iter().collect());
            for case in run["cases"].as_object_mut().unwrap().values_mut() {
                case["samples"]["elapsed_ns"] = vec![2e5 * factor; 4].into();
            }
            run["failed"] = serde_json::json!({ "w/f/<b>/cpu/hot": {
                "text": "https://evil.example @octocat o#1 <script> \u{1b}[2J\u{202e}" } });
            run["session"] = name.into();
        });
        std::fs::create_dir_all(runs.join(name)).unwrap();
        std::fs::copy(toy.package.package_path("run.json"), runs.join(name).join("toy.json"))
            .unwrap();
    };
    session("s1", 1.0);
    toy.run_kernelgate("baseline add a").assert_exit(0);
    session("s2", 1.5);
    let gate = toy.run_kernelgate("gate --baseline a --out out");
    assert_refused_without_panic("gate", gate.assert_exit(1));
    let out =
        |name: &str| std::fs::read_to_string(toy.package.package_path("out").join(name)).unwrap();
    assert_names_are_inert_markdown(&out("comment.md"));
    for name in ["report.html", "junit.xml", "change.svg", "result.json"] {
        let text = out(name);
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{name}");
        if name != "result.json" {
            assert!(!text.contains("<script>alert"), "{name}");
        }
    }
    toy.run_kernelgate("report").assert_exit(0);
    let csv =
        std::fs::read_to_string(toy.package.package_path("target/kernelgate/report/cases.csv"));
    let csv = csv.unwrap();
    for field in csv.lines().skip(1).flat_map(|line| line.split(',')) {
        let field = field.trim_matches('"');
        let number = field.parse::<f64>().is_ok();
        assert!(number || !field.starts_with(['=', '+', '-', '@', '\t']), "{field}: {csv}");
    }
    toy.run_kernelgate("baseline export a a.csv").assert_exit(0);
    let exported = std::fs::read_to_string(toy.package.package_path("a.csv")).unwrap();
    assert!(!exported.contains("\n=cmd") && !exported.contains("\n@"), "{exported}");
    for line in ["runs", "runs --costs", "baseline show a", "baseline list", "history @octocat"] {
        let outcome = toy.run_kernelgate(line);
        assert!(
            outcome.exit_code.is_some_and(|code| code < 5),
            "{line}: {}",
            outcome.stdout_and_stderr()
        );
        let acts = outcome
            .stdout_and_stderr()
            .chars()
            .any(|c| c.is_control() && !['\n', '\t'].contains(&c));
        assert!(!acts, "{line}: {:?}", outcome.stdout_and_stderr());
    }
    assert_names_are_inert_markdown(
        &toy.run_kernelgate("baseline show a --format markdown").stdout,
    );
}

/// `stats` and `diagnose` escape the names of kernels and ranges in a trace.
#[test]
fn names_in_a_trace_are_inert_in_stats_and_diagnoses() {
    let package = crate::package::TempPackage::new();
    let name = |word: &str| format!("{word}\u{1b}[2J\u{202e}\nSEVERE 9 kernels lost");
    let events: Vec<serde_json::Value> = HOSTILE_NAMES
        .iter()
        .enumerate()
        .flat_map(|(index, word)| {
            let start = 1000.0 * index as f64;
            let on = serde_json::json!({ "correlation": index, "device": 0, "stream": 7 });
            [
                serde_json::json!({ "ph": "X", "cat": "kernel", "name": name(word), "pid": 0,
                    "tid": 7, "ts": start + 20.0, "dur": 100.0, "args": on }),
                serde_json::json!({ "ph": "X", "cat": "user_annotation", "name": name(word),
                    "pid": 1, "tid": 1, "ts": start, "dur": 300.0 }),
                serde_json::json!({ "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel",
                    "pid": 1, "tid": 1, "ts": start + 5.0, "dur": 5.0,
                    "args": { "correlation": index } }),
            ]
        })
        .collect();
    let trace = serde_json::json!({ "schemaVersion": 1, "traceEvents": events });
    std::fs::write(package.package_path("trace.json"), trace.to_string()).unwrap();
    for line in [
        "stats trace.json",
        "stats trace.json --format csv",
        "stats trace.json --format json",
        "diagnose trace.json",
        "diagnose trace.json --format json",
        "diagnose trace.json --html page.html",
        "diagnose trace.json trace.json",
        "export trace.json --output timeline.json",
    ] {
        let outcome = package.run_kernelgate(line);
        let all = outcome.stdout_and_stderr();
        assert!(outcome.exit_code.is_some_and(|code| code < 5), "{line}: {all}");
        let acts = all.chars().any(|c| c.is_control() && !['\n', '\t'].contains(&c));
        assert!(!acts && !all.contains('\u{202e}'), "{line}: {all:?}");
        // A name with line breaks never makes an output line that looks like one of the program's.
        assert!(!all.lines().any(|line| line.starts_with("SEVERE 9")), "{line}: {all}");
        if line.ends_with("csv") {
            assert!(!all.contains("\n=cmd") && !all.contains("\"=cmd"), "{all}");
        }
    }
    let page = std::fs::read_to_string(package.package_path("page.html")).unwrap();
    assert!(!page.contains('\u{1b}') && !page.contains("<script>alert"), "a page");
}
