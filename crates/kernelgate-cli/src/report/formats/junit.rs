//! Writes verdicts as JUnit XML for the test views of CI systems: one JUnit test case for each
//! benchmark case.
//!
//! In JUnit XML a regressed case is a failure, a wrong or refused case is an error, and an unjudged
//! or inconclusive case is skipped with its reason. A regressed case within a bound that
//! `kernelgate.toml` accepts passes, with the bound as its output; all effects of `kernelgate.toml`
//! are JUnit properties. Equal verdicts give byte-for-byte equal JUnit XML: the file contains no
//! times of day and no random ids.

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use crate::gate::judgement::CaseJudgement;
use crate::gate::rules::RULES_FILE_NAME;
use crate::gate::verdict::VerdictOnCase;
use crate::report::judgement_cells;
use crate::report::summary::{UnjudgedReasonKind, VerdictSummary};
use kernelgate::display::harmless_text::EscapedForJunit;

pub fn junit_xml_of_verdicts(summary: &VerdictSummary) -> String {
    let mut suite = TestSuite::new(summary.judging_verb);
    for (name, words) in &summary.facts_on_compared_sides {
        suite.add_property((*name, &*escape_for_junit_xml(words)));
    }
    for line in summary.rules.report_lines() {
        suite.add_property((RULES_FILE_NAME, &*escape_for_junit_xml(&line)));
    }
    suite.add_test_cases(summary.rows.iter().map(|row| {
        let mut case = junit_case_of_workload(
            &row.case_id,
            junit_status_of_judgement(row, summary.evidence_unit),
        );
        let facts = junit_properties_of_judgement(row);
        case.add_properties(facts.iter().map(|(name, value)| (*name, value.as_str())));
        let accepted = summary.rules.accepted.iter().filter(|it| it.case_id == row.case_id);
        let mut accepted: Vec<String> = accepted
            .map(|it| format!("accepted in {RULES_FILE_NAME}: {}", it.acceptance_text()))
            .collect();
        if row.verdict == VerdictOnCase::AcceptedSlowdown {
            let (change, interval) = (
                judgement_cells::time_change_cell(row),
                judgement_cells::time_change_interval_cell(row),
            );
            accepted.push(format!("slower by {change} ({interval})"));
        }
        if !accepted.is_empty() {
            case.set_system_out(&*escape_for_junit_xml(&accepted.join("\n")));
        }
        case
    }));
    for other in &summary.unjudged_entries {
        let kind = if other.kind == UnjudgedReasonKind::NotTimedOnBothSides {
            None
        } else {
            Some(NonSuccessKind::Error)
        };
        let mut status = kind.map_or_else(TestCaseStatus::skipped, TestCaseStatus::non_success);
        status.set_message(&*escape_for_junit_xml(&other.reason_not_judged));
        if kind.is_some() {
            status.set_type(if other.kind == UnjudgedReasonKind::IncomparableSettings {
                "refused"
            } else {
                "failed"
            });
        }
        let mut case = junit_case_of_workload(&other.case_or_bench_name, status);
        let escape = |(name, value): &(String, String)| {
            (escape_for_junit_xml(name), escape_for_junit_xml(value))
        };
        let facts: Vec<_> = other.facts_behind_reason.iter().map(escape).collect();
        case.add_properties(facts.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        suite.add_test_case(case);
    }
    let mut report = Report::new(&*escape_for_junit_xml(&summary.report_headline));
    report.add_test_suite(suite);
    let mut xml = report.to_string().expect("text in memory can be written");
    if !xml.ends_with('\n') {
        xml.push('\n');
    }
    xml
}

/// The JUnit properties of a benchmark case: verdict, threshold, times, ratio with interval,
/// detectable change and reasons.
fn junit_properties_of_judgement(row: &CaseJudgement) -> Vec<(&'static str, String)> {
    let share = |value: f64| format!("{value:.6}");
    let mut facts = vec![
        ("verdict", row.verdict.verdict_name().to_owned()),
        ("threshold", share(row.regression_threshold.limit_value)),
    ];
    if row.has_times() {
        let ratio = row.ratio;
        facts.extend([
            ("base_ns", format!("{:.1}", row.base_launch_ns)),
            ("head_ns", format!("{:.1}", row.head_launch_ns)),
            ("ratio", share(ratio.estimated_ratio)),
            ("ratio_low", share(ratio.ratio_low)),
            ("ratio_high", share(ratio.ratio_high)),
        ]);
        facts.extend(row.detectable_change.map(|it| ("detectable", share(it))));
    }
    facts.extend(row.reasons.iter().map(|reason| ("reason", reason.json_kind().to_owned())));
    facts
}

/// Escapes text of others, such as case names, for XML.
fn escape_for_junit_xml(text: &str) -> String {
    EscapedForJunit(text).to_string()
}

/// A JUnit test case; its class name is the workload of the benchmark case, such as
/// "attention.forward".
fn junit_case_of_workload(name: &str, status: TestCaseStatus) -> TestCase {
    let name = &*escape_for_junit_xml(name);
    let mut case = TestCase::new(name, status);
    let mut parts = name.split('/');
    if let (Some(family), Some(operation), Some(_)) = (parts.next(), parts.next(), parts.next()) {
        case.set_classname(format!("{family}.{operation}"));
    } else {
        case.set_classname("kernelgate");
    }
    case
}

fn junit_status_of_judgement(row: &CaseJudgement, evidence: &str) -> TestCaseStatus {
    let p = judgement_cells::p_value_of_not_slower(row)
        .map(|_| format!(", p {}", judgement_cells::p_value_cell(row)))
        .unwrap_or_default();
    let (base, head, count) = (
        judgement_cells::base_time_cell(row),
        judgement_cells::head_time_cell(row),
        judgement_cells::evidence_count_cell(row),
    );
    let (change, interval) =
        (judgement_cells::time_change_cell(row), judgement_cells::time_change_interval_cell(row));
    let detectable = judgement_cells::detectable_change_cell(row);
    let numbers = format!(
        "{change} ({interval}), {base} to {head}, detectable {detectable}{p}, {count} {evidence}"
    );
    match row.verdict {
        VerdictOnCase::Regressed => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            status.set_type("regressed").set_message(format!("slower by {numbers}"));
            status
        }
        VerdictOnCase::Inconclusive => {
            let mut status = TestCaseStatus::skipped();
            let numbers = if row.has_times() { format!(": {numbers}") } else { String::new() };
            let reason =
                row.joined_inconclusive_reasons().unwrap_or_else(|| "no reason".to_owned());
            status.set_message(format!("inconclusive: {}{numbers}", escape_for_junit_xml(&reason)));
            status
        }
        VerdictOnCase::Improved | VerdictOnCase::Unchanged | VerdictOnCase::AcceptedSlowdown => {
            TestCaseStatus::success()
        }
    }
}
