//! Benches that lie, fail and attack: each behaviour is refused by name, and none of their text
//! acts on a terminal, in a comment, a page, a table or a test report.

#![cfg(unix)]

use kernelgate::protocol::{
    BenchCaseListing, BenchCaseStatus, CaseVerificationResponse, ListedBenchCase,
    ListedImplementation, ListedWorkload, ResponseToBenchAction,
};

use crate::outputs::snapshot;
use crate::package::Outcome;
use crate::package::outcome::normalized;
use crate::package::toy::{ANSWERS, RECORDS, TOY_CASE, Toy};

fn verified(case: &str) -> CaseVerificationResponse {
    CaseVerificationResponse {
        case: case.to_owned(),
        status: BenchCaseStatus::Ok,
        checked: 10,
        total: 10,
        max_error: 0.25,
        relative_l2: 0.125,
        rounding: 0.5,
        by_output: std::collections::BTreeMap::new(),
        data_set: None,
        inputs: None,
        repeatable: Some(true),
        reason: None,
        kernels: Vec::new(),
    }
}

/// A toy bench that answers `verify` correctly.
fn toy() -> Toy {
    Toy::new(ResponseToBenchAction::Verify(vec![verified(TOY_CASE)]))
}

/// Checks for a non-zero exit code, no panic, and no control character. Returns the first error
/// message.
#[track_caller]
fn refused(name: &str, outcome: &Outcome) -> String {
    let all = outcome.all();
    assert!(matches!(outcome.code, Some(1..=4)), "{name}: {:?} {all}", outcome.code);
    for wrong in ["panicked", "internal error", "stack overflow"] {
        assert!(!all.contains(wrong), "{name}: {all}");
    }
    let acts = all.chars().find(|c| c.is_control() && !['\n', '\t'].contains(c));
    assert_eq!(acts, None, "{name}: {all:?}");
    let is_error = |line: &&str| line.starts_with("error: ") || line.starts_with("refused: ");
    let message = outcome.stderr.lines().find(is_error).unwrap_or_default();
    format!("{name}: {}\n", normalized(message))
}

#[test]
fn a_response_that_cannot_be_is_refused_by_name() {
    let toy = toy();
    assert_eq!(toy.kernelgate("verify --dir benches --format json").exits(0).cases(), [TOY_CASE]);
    let mut refusals = String::new();
    // A number, a name or the envelope, and its replacement.
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
        (TOY_CASE, "toy/\\u001b[2J/n1/cpu/hot"),
        (TOY_CASE, "toy/\\u202escale/n1/cpu/hot"),
        (TOY_CASE, "toy/scale\\n0 failed"),
        ("\"status\": \"ok\"", "\"status\": \"perfect\""),
        ("kernelgate-response", "kernelgate.response"),
        ("\"schema_version\": 1", "\"schema_version\": 9"),
        ("\"schema_version\": 1", "\"schema_version\": 0"),
        ("\"verify\":", "\"list\":"),
        ("\"bench\": \"toy\"", "\"bench\": {}"),
        ("{", "[{"),
        ("\"bench\": \"toy\"", "\"bench\": \"other\""),
        (TOY_CASE, "  "),
        ("\"checked\": 10", "\"checked\": 10, \"case\": \"a\""),
    ] {
        toy.answers(ResponseToBenchAction::Verify(vec![verified(TOY_CASE)]));
        toy.answers_with(from, to);
        refusals += &refused(&format!("{from} -> {to}"), &toy.kernelgate("verify --dir benches"));
    }
    toy.answers(ResponseToBenchAction::Verify(vec![verified(TOY_CASE), verified("toy/other")]));
    toy.answers_with("toy/other", TOY_CASE);
    refusals += &refused("a case twice", &toy.kernelgate("verify --dir benches"));
    toy.answers(ResponseToBenchAction::Peers(Vec::new()));
    refusals += &refused("another answer", &toy.kernelgate("verify --dir benches"));
    snapshot("hostile", "responses", &refusals);
}

#[test]
fn a_bench_that_attacks_is_named_and_leaves_nothing() {
    let toy = toy();
    let victim = toy.package.path("victim");
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
        ("no text", "head -c 1000 /dev/urandom > \"$RESPONSE\""),
        ("no response", "rm -f \"$RESPONSE\""),
        ("the request in place of a response", "cp \"$REQUEST\" \"$RESPONSE\""),
        ("hangs after it answered", "exec sleep 60"),
        ("hangs without an answer", "rm -f \"$RESPONSE\"; exec sleep 60"),
        ("stops itself", "kill -STOP $$"),
    ] {
        toy.behaves(&format!("{ANSWERS}\n{script}"));
        let outcome = toy.kernelgate("verify --dir benches --wait 2s");
        refusals += &refused(name, &outcome);
        assert!(!victim.exists(), "{name}");
    }
    snapshot("hostile", "attacks", &refusals);
    // The answer itself is complete.
    for (name, script) in [
        ("a child that outlives it", "sleep 20 &"),
        (
            "a flood of words",
            "i=0; while [ $i -lt 3000 ]; do echo 0123456789 >&2; i=$((i+1)); done",
        ),
        ("escapes on its streams", "printf '\\033[2J\\033]0;t\\007' >&2; printf '\\033c'"),
        ("closed streams", "exec >&- 2>&-"),
    ] {
        toy.behaves(&format!("{ANSWERS}\n{script}"));
        let outcome = toy.kernelgate("verify --dir benches --wait 10s");
        assert_eq!(outcome.code, Some(0), "{name}: {}", outcome.all());
        assert!(!outcome.all().contains('\u{1b}'), "{name}: {:?}", outcome.all());
    }
}

/// Long because it is a table of faults.
#[test]
#[expect(clippy::too_many_lines)]
fn a_record_of_a_trial_that_cannot_be_is_refused() {
    let toy = toy();
    toy.behaves(RECORDS);
    toy.records(|_| ());
    let fine = toy.compare();
    assert!(matches!(fine.code, Some(0 | 3)), "{}", fine.all());
    assert!(fine.stdout.contains(TOY_CASE), "{}", fine.all());
    type Change = fn(&mut serde_json::Value);
    let changes: [(&str, Change); 29] = [
        ("spent_s -1", |run| run["spent_s"] = serde_json::json!({ "whole": -1 })),
        ("spent_s 1e300", |run| run["spent_s"] = serde_json::json!({ "whole": 1e300 })),
        ("another session", |run| run["session"] = "other".into()),
        ("a path as session", |run| run["session"] = "../../x".into()),
        ("another bench", |run| run["bench"] = "other".into()),
        ("another executable", |run| run["executable"] = "feed".into()),
        ("another commit", |run| run["provenance"]["commit"] = "951c294".into()),
        ("changes", |run| run["provenance"]["dirty"] = true.into()),
        ("another processor", |run| run["environment"]["device_name"] = "Z80".into()),
        ("longer than it ran", |run| samples(run, "elapsed_ns", &[1e11; 4])),
        ("no executable", |run| run["executable"] = serde_json::Value::Null),
        ("another shard", |run| run["shard"] = serde_json::json!({ "index": 1, "count": 2 })),
        ("21 samples", |run| samples(run, "elapsed_ns", &[2e5; 21])),
        ("no cores", |run| run["environment"]["cores"] = 0.into()),
        ("timed and skipped", |run| run["skipped"] = serde_json::json!({ TOY_CASE: "x" })),
        ("timed and failed", |run| {
            run["failed"] = serde_json::json!({ TOY_CASE: { "text": "x" } })
        }),
        ("an error after timing", |run| {
            let verification = &mut case(run)["verification"];
            verification["allowed"] = serde_json::json!({ "max_error": 5e-6, "relative_l2": 1.0 });
            let after =
                serde_json::json!({ "inputs": "same", "max_error": 0.5, "relative_l2": 0.0 });
            verification["after"] = after;
        }),
        ("delays", |run| run["delays"] = serde_json::json!({ TOY_CASE: 5 })),
        ("times of 0", |run| samples(run, "elapsed_ns", &[0.0; 4])),
        ("times of -1", |run| samples(run, "elapsed_ns", &[-1.0; 4])),
        ("times of 1e300", |run| samples(run, "elapsed_ns", &[1e300; 4])),
        ("fewer times", |run| samples(run, "elapsed_ns", &[2e5; 3])),
        ("no times", |run| samples(run, "elapsed_ns", &[])),
        ("contention of 5", |run| case(run)["samples"]["conditions"]["contention"] = 5.into()),
        ("more elements than there are", |run| case(run)["verification"]["checked"] = 2.into()),
        ("more work than any machine does", |run| {
            case(run)["work"]["read_bytes"] = u64::MAX.into()
        }),
        ("an error beyond the tolerance", |run| {
            let verification = &mut case(run)["verification"];
            verification["max_error"] = 0.5.into();
            let allowed = serde_json::json!({ "max_error": 5e-6, "relative_l2": 1.0 });
            verification["allowed"] = allowed;
        }),
        ("cores beyond count", |run| run["environment"]["cores"] = u64::MAX.into()),
        ("an escape in a name", |run| case(run)["cache"] = "\u{1b}[2J".into()),
    ];
    let mut refusals = String::new();
    for (name, change) in changes {
        toy.records(change);
        refusals += &refused(name, &toy.compare());
    }
    toy.records(|run| run["started"] = "yesterday".into());
    refusals += &refused("no time", &toy.compare());
    // A record of another case, a crash, a folder at the path of the record.
    toy.records(|_| ());
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
        toy.behaves(&format!("{RECORDS}\n{script}"));
        refusals += &refused(name, &toy.compare());
        // Files that it left do not break the next comparison.
        toy.behaves(RECORDS);
        assert!(matches!(toy.compare().code, Some(0 | 3)), "after {name}");
    }
    // The base's executable is overwritten in place while it is compared.
    let base = toy.package.path("target/kernelgate/compare/base/bin/toy");
    toy.behaves(&format!("{RECORDS}\nprintf x >> '{}'", base.display()));
    let changed = toy.compare();
    assert_eq!(changed.code, Some(4), "{}", changed.all());
    refusals += &refused("a changed executable", &changed);
    snapshot("hostile", "records", &refusals);
}

fn case(run: &mut serde_json::Value) -> &mut serde_json::Value {
    &mut run["cases"][TOY_CASE]
}

fn samples(run: &mut serde_json::Value, field: &str, values: &[f64]) {
    case(run)["samples"][field] = values.into();
}

/// Names that are plain text, but have a meaning for a spreadsheet, a browser or a forge.
const HOSTILE: [&str; 8] = [
    "=cmd|' /C calc'!A0",
    "@SUM(1)",
    "@octocat",
    "<script>alert(1)</script>",
    "https:||evil.example",
    "](http:||evil.example)",
    "o#1",
    "&lt;b&gt;",
];

/// Checks that no name of [`HOSTILE`] acts as Markdown.
#[track_caller]
fn inert_markdown(text: &str) {
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

fn hostile_id(word: &str) -> String {
    // A part of an id cannot contain `/`.
    format!("{}/scale/n1/cpu/hot", word.replace("||", "\\\\"))
}

#[test]
fn names_of_others_are_inert_in_every_output_of_every_verb() {
    let cases = HOSTILE.map(|word| verified(&hostile_id(word)));
    let failed = HOSTILE.map(|word| CaseVerificationResponse {
        status: BenchCaseStatus::Failed,
        reason: Some(format!("{word} \u{1b}[2J\u{202e} https://evil.example o#1 @octocat")),
        ..verified(&hostile_id(word).replace("scale", "fails"))
    });
    let skipped = CaseVerificationResponse {
        status: BenchCaseStatus::Skipped,
        reason: Some("<script> @octocat".to_owned()),
        ..verified(&hostile_id("@octocat").replace("scale", "skips"))
    };
    let all: Vec<CaseVerificationResponse> =
        cases.into_iter().chain(failed).chain([skipped]).collect();
    let toy = Toy::new(ResponseToBenchAction::Verify(all));
    let markdown = toy.kernelgate("verify --dir benches --format markdown");
    assert_eq!(markdown.code, Some(1), "{}", markdown.all());
    inert_markdown(&markdown.stdout);
    for format in ["text", "json"] {
        refused(
            format,
            toy.kernelgate(&format!("verify --dir benches --format {format}")).exits(1),
        );
    }
    let listed = |word: &&str| ListedBenchCase {
        case: hostile_id(word),
        status: BenchCaseStatus::Skipped,
        reason: Some(format!("{word}\u{1b}[2J")),
        unsupported: false,
        matmul_flops: 0,
        bytes: 0,
        host_bytes: 0,
        device_bytes: None,
    };
    let row = ListedImplementation { name: "<script>".to_owned(), about: "@octocat".to_owned() };
    toy.answers(ResponseToBenchAction::List(BenchCaseListing {
        backend: "cpu".to_owned(),
        otherwise: "https://evil.example \u{1b}[2J".to_owned(),
        workloads: vec![ListedWorkload {
            name: "@octocat/scale".to_owned(),
            about: "=cmd".to_owned(),
            axes: vec![["n", "<b>", "@octocat"].map(str::to_owned)],
            implementations: vec![row],
        }],
        cases: HOSTILE.iter().map(listed).collect(),
    }));
    for format in ["text", "markdown", "json"] {
        let outcome = toy.kernelgate(&format!("list --dir benches --format {format}"));
        assert_eq!(outcome.code, Some(0), "{format}: {}", outcome.all());
        assert!(!outcome.all().contains('\u{1b}'), "{format}: {:?}", outcome.all());
    }
    records_of_others(&toy);
}

/// Writes a baseline and a run with hostile ids and failures, and reads them with the verbs.
fn records_of_others(toy: &Toy) {
    let runs = toy.package.path("target/kernelgate/runs");
    let session = |name: &str, factor: f64| {
        toy.records(|run| {
            let case = case(run).take();
            let ids = HOSTILE.map(|word| (hostile_id(word), case.clone()));
            run["cases"] = serde_json::Value::Object(ids.into_iter().collect());
            for case in run["cases"].as_object_mut().unwrap().values_mut() {
                case["samples"]["elapsed_ns"] = vec![2e5 * factor; 4].into();
            }
            run["failed"] = serde_json::json!({ "w/f/<b>/cpu/hot": {
                "text": "https://evil.example @octocat o#1 <script> \u{1b}[2J\u{202e}" } });
            run["session"] = name.into();
        });
        std::fs::create_dir_all(runs.join(name)).unwrap();
        std::fs::copy(toy.package.path("run.json"), runs.join(name).join("toy.json")).unwrap();
    };
    session("s1", 1.0);
    toy.kernelgate("baseline add a").exits(0);
    session("s2", 1.5);
    let gate = toy.kernelgate("gate --baseline a --out out");
    refused("gate", gate.exits(1));
    let out = |name: &str| std::fs::read_to_string(toy.package.path("out").join(name)).unwrap();
    inert_markdown(&out("comment.md"));
    for name in ["report.html", "junit.xml", "change.svg", "result.json"] {
        let text = out(name);
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{name}");
        if name != "result.json" {
            assert!(!text.contains("<script>alert"), "{name}");
        }
    }
    toy.kernelgate("report").exits(0);
    let csv = std::fs::read_to_string(toy.package.path("target/kernelgate/report/cases.csv"));
    let csv = csv.unwrap();
    for field in csv.lines().skip(1).flat_map(|line| line.split(',')) {
        let field = field.trim_matches('"');
        let number = field.parse::<f64>().is_ok();
        assert!(number || !field.starts_with(['=', '+', '-', '@', '\t']), "{field}: {csv}");
    }
    toy.kernelgate("baseline export a a.csv").exits(0);
    let exported = std::fs::read_to_string(toy.package.path("a.csv")).unwrap();
    assert!(!exported.contains("\n=cmd") && !exported.contains("\n@"), "{exported}");
    for line in ["runs", "runs --costs", "baseline show a", "baseline list", "history @octocat"] {
        let outcome = toy.kernelgate(line);
        assert!(outcome.code.is_some_and(|code| code < 5), "{line}: {}", outcome.all());
        let acts = outcome.all().chars().any(|c| c.is_control() && !['\n', '\t'].contains(&c));
        assert!(!acts, "{line}: {:?}", outcome.all());
    }
    inert_markdown(&toy.kernelgate("baseline show a --format markdown").stdout);
}

/// Names of kernels and ranges in a trace are escaped.
#[test]
fn names_in_a_trace_are_inert_in_stats_and_diagnoses() {
    let package = crate::package::Package::new();
    let name = |word: &str| format!("{word}\u{1b}[2J\u{202e}\nSEVERE 9 kernels lost");
    let events: Vec<serde_json::Value> = HOSTILE
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
    std::fs::write(package.path("trace.json"), trace.to_string()).unwrap();
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
        let outcome = package.kernelgate(line);
        let all = outcome.all();
        assert!(outcome.code.is_some_and(|code| code < 5), "{line}: {all}");
        let acts = all.chars().any(|c| c.is_control() && !['\n', '\t'].contains(&c));
        assert!(!acts && !all.contains('\u{202e}'), "{line}: {all:?}");
        // No line of a name is taken for one of the program's.
        assert!(!all.lines().any(|line| line.starts_with("SEVERE 9")), "{line}: {all}");
        if line.ends_with("csv") {
            assert!(!all.contains("\n=cmd") && !all.contains("\"=cmd"), "{all}");
        }
    }
    let page = std::fs::read_to_string(package.path("page.html")).unwrap();
    assert!(!page.contains('\u{1b}') && !page.contains("<script>alert"), "a page");
}
