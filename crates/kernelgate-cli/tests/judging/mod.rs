//! Tests of the verdicts from baselines, comparisons, rules and calibrations.

mod baselines;
mod bisect;
mod calibrate;
mod code;
mod compare;
mod rules;
mod shards;
mod verification;

use regex::Regex;
use serde_json::Value;

use crate::package::ProcessOutcome;
use crate::package::outcome::redact_varying_parts;

/// Fields of the JSON of a gate or comparison that are empty if there is nothing to report.
const JSON_FIELDS_EMPTY_WITHOUT_FINDINGS: &[&str] = &[
    "/identical",
    "/foreign",
    "/left_alone",
    "/new",
    "/removed",
    "/failed",
    "/failed_in_base",
    "/broken",
    "/skipped",
    "/not_run",
    "/unverified",
    "/verification",
    "/refused",
    "/missing_shards",
    "/numerics/grown",
    "/costs",
    "/rules/thresholds",
    "/rules/accepted",
    "/rules/notes",
    "/rules/undecided",
];

/// The report of a gate or comparison as JSON without its times: the verdict on each case with its
/// reasons, and every other field that reports something.
#[track_caller]
fn report_without_times(outcome: &ProcessOutcome) -> String {
    let json = outcome.stdout_as_json();
    let mut text = String::new();
    for case in json["judged"].as_array().unwrap() {
        let text_of = |field: &str| case[field].as_str().unwrap();
        text += &format!("{} {}", text_of("case"), text_of("verdict"));
        for reason in case["reasons"].as_array().unwrap() {
            text += &format!(" {reason}");
        }
        text += "\n";
    }
    for field in JSON_FIELDS_EMPTY_WITHOUT_FINDINGS {
        match json.pointer(field) {
            Some(Value::Array(values)) => {
                values.iter().for_each(|value| text += &format!("{}: {value}\n", &field[1..]));
            }
            Some(Value::Object(values)) => {
                for (name, value) in values {
                    text += &format!("{}: {name}: {value}\n", &field[1..]);
                }
            }
            _ => {}
        }
    }
    let number = Regex::new(r"\d+\.\d{3,}(e-?\d+)?").unwrap();
    redact_varying_parts(number.replace_all(text.trim_end(), "N").as_ref())
}

/// The error with which a process ended, without the progress before it and the lines of code that
/// a compiler adds.
#[track_caller]
fn error_message(outcome: &ProcessOutcome, code: i32) -> String {
    let messages = &outcome.assert_exit(code).stderr;
    let start = messages.find("error: ").unwrap_or_else(|| panic!("no error: {messages}"));
    let words = |line: &&str| line.starts_with(char::is_alphabetic);
    let lines: Vec<&str> = messages[start..].lines().filter(words).collect();
    let commit = Regex::new(r"\([0-9a-f]{8}\)").unwrap();
    redact_varying_parts(&commit.replace_all(&lines.join("\n"), "(COMMIT)"))
}
