//! Verdicts as JUnit XML, for the test views of CI systems, with a test case for each case.
//!
//! Regressed is a failure, wrong or refused an error, and an unjudged or inconclusive case is
//! skipped with its reason. The bound that the package accepts for a case is its output, so that it
//! differs from a plain pass; all effects of `kernelgate.toml` are properties. Equal results give
//! equal bytes: the file contains no times of day and no random ids.

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use crate::gate::judgement::Judgement;
use crate::gate::rules::RULES_FILE;
use crate::gate::verdict::Verdict;
use crate::report::judgement_cells;
use crate::report::summary::{UnjudgedKind, VerdictSummary};
use kernelgate::display::harmless_text::JunitText;

pub fn xml(summary: &VerdictSummary) -> String {
    let mut suite = TestSuite::new(summary.verb);
    for (name, words) in &summary.facts {
        suite.add_property((*name, &*escape_xml(words)));
    }
    for line in summary.rules.lines() {
        suite.add_property((RULES_FILE, &*escape_xml(&line)));
    }
    suite.add_test_cases(summary.rows.iter().map(|row| {
        let mut case = junit_case(&row.case, junit_status(row, summary.evidence));
        let facts = junit_properties(row);
        case.add_properties(facts.iter().map(|(name, value)| (*name, value.as_str())));
        let accepted = summary.rules.accepted.iter().filter(|it| it.case == row.case);
        let mut accepted: Vec<String> =
            accepted.map(|it| format!("accepted in {RULES_FILE}: {}", it.words())).collect();
        if row.verdict == Verdict::Accepted {
            let (change, interval) = (judgement_cells::change(row), judgement_cells::interval(row));
            accepted.push(format!("slower by {change} ({interval})"));
        }
        if !accepted.is_empty() {
            case.set_system_out(&*escape_xml(&accepted.join("\n")));
        }
        case
    }));
    for other in &summary.others {
        let kind =
            if other.kind == UnjudgedKind::Skipped { None } else { Some(NonSuccessKind::Error) };
        let mut status = kind.map_or_else(TestCaseStatus::skipped, TestCaseStatus::non_success);
        status.set_message(&*escape_xml(&other.why));
        if kind.is_some() {
            status.set_type(if other.kind == UnjudgedKind::Refused { "refused" } else { "failed" });
        }
        let mut case = junit_case(&other.name, status);
        let escape = |(name, value): &(String, String)| (escape_xml(name), escape_xml(value));
        let facts: Vec<_> = other.facts.iter().map(escape).collect();
        case.add_properties(facts.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        suite.add_test_case(case);
    }
    let mut report = Report::new(&*escape_xml(&summary.headline));
    report.add_test_suite(suite);
    let mut xml = report.to_string().expect("text in memory can be written");
    if !xml.ends_with('\n') {
        xml.push('\n');
    }
    xml
}

/// The properties of a test case in JUnit XML.
fn junit_properties(row: &Judgement) -> Vec<(&'static str, String)> {
    let share = |value: f64| format!("{value:.6}");
    let mut facts =
        vec![("verdict", row.verdict.name().to_owned()), ("threshold", share(row.threshold.value))];
    if row.is_timed() {
        let ratio = row.ratio;
        facts.extend([
            ("base_ns", format!("{:.1}", row.base_ns)),
            ("head_ns", format!("{:.1}", row.head_ns)),
            ("ratio", share(ratio.center)),
            ("ratio_low", share(ratio.low)),
            ("ratio_high", share(ratio.high)),
        ]);
        facts.extend(row.detectable.map(|it| ("detectable", share(it))));
    }
    facts.extend(row.reasons.iter().map(|reason| ("reason", reason.name().to_owned())));
    facts
}

/// Escapes text that others wrote for XML.
fn escape_xml(text: &str) -> String {
    JunitText(text).to_string()
}

/// A test case in the class of its workload: "attention.forward".
fn junit_case(name: &str, status: TestCaseStatus) -> TestCase {
    let name = &*escape_xml(name);
    let mut case = TestCase::new(name, status);
    let mut parts = name.split('/');
    if let (Some(family), Some(operation), Some(_)) = (parts.next(), parts.next(), parts.next()) {
        case.set_classname(format!("{family}.{operation}"));
    } else {
        case.set_classname("kernelgate");
    }
    case
}

fn junit_status(row: &Judgement, evidence: &str) -> TestCaseStatus {
    let p = judgement_cells::p_value_of_slower(row)
        .map(|_| format!(", p {}", judgement_cells::p(row)))
        .unwrap_or_default();
    let (base, head, count) = (
        judgement_cells::base_time_cell(row),
        judgement_cells::head(row),
        judgement_cells::evidence(row),
    );
    let (change, interval) = (judgement_cells::change(row), judgement_cells::interval(row));
    let detectable = judgement_cells::detectable(row);
    let numbers = format!(
        "{change} ({interval}), {base} to {head}, detectable {detectable}{p}, {count} {evidence}"
    );
    match row.verdict {
        Verdict::Regressed => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            status.set_type("regressed").set_message(format!("slower by {numbers}"));
            status
        }
        Verdict::Inconclusive => {
            let mut status = TestCaseStatus::skipped();
            let numbers = if row.is_timed() { format!(": {numbers}") } else { String::new() };
            let reason = row.reason().unwrap_or_else(|| "no reason".to_owned());
            status.set_message(format!("inconclusive: {}{numbers}", escape_xml(&reason)));
            status
        }
        Verdict::Improved | Verdict::Unchanged | Verdict::Accepted => TestCaseStatus::success(),
    }
}
