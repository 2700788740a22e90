//! Writes the verdicts of `kernelgate gate` or `kernelgate compare` as text and as a summary:
//! headline, and regressed cases first, with the interval and the detectable change of each case.
//! The trait [`VerdictReportTexts`] has the texts that differ between `kernelgate gate` and
//! `kernelgate compare`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fmt::Write as _;

use super::summary::{self, UnjudgedEntry, UnjudgedReasonKind, VerdictSummary};
use crate::gate::inconclusive_reason::InconclusiveReason;
use crate::gate::judgement::CaseJudgement;
use crate::gate::verdict::VerdictOnCase;
use crate::gate::verdicts::{ExitFactsOfGateOrCompare, VerdictsAndFindings};
use kernelgate::record::text::{clean_message_for_terminal, indent_every_line};
use kernelgate_cuda::CaseFailureReason;

/// Largest number of cases that a line of each kind lists by name.
const MAX_CASES_NAMED_PER_KIND: usize = 20;

/// The report texts that differ between the two ways of judging, `kernelgate gate` and `kernelgate
/// compare`.
pub trait VerdictReportTexts: ExitFactsOfGateOrCompare {
    /// The judging verb, such as "kernelgate compare".
    const JUDGING_COMMAND: &'static str;
    /// Names of base and head in sentences of the report.
    const NAMES_OF_BASE_AND_HEAD: [&'static str; 2];
    /// Titles of the table columns with the times of base and head.
    const SIDE_COLUMN_TITLES: [&'static str; 2];
    /// Unit of the evidence in the last table column: "pairs" of processes or process "runs".
    const UNIT_OF_EVIDENCE_COLUMN: &'static str;
    const TABLE_COLUMNS_EXPLANATION: &'static [&'static str];
    /// Report text before the name of a case that failed.
    const FAILED_CASE_LABEL: &'static str;
    /// Report text before the name of a case that the head did not run.
    const SKIPPED_CASE_LABEL: &'static str;

    /// A line on cases that were not timed because the executables are equal; it precedes the whole
    /// report.
    fn line_on_identical_executables(_: &VerdictsAndFindings<Self>) -> Option<String> {
        None
    }
    /// One report line that names the base, the head and the device.
    fn base_head_and_device_line(verdicts: &VerdictsAndFindings<Self>) -> String;
    /// Report rows about base, head, device and noise, each with a name and a text.
    fn table_rows_on_base_head_and_device(
        verdicts: &VerdictsAndFindings<Self>,
    ) -> Vec<(&'static str, String)>;
    /// Largest relative slow-down of a case that is not a regression, per cent.
    fn regression_threshold_percent(verdicts: &VerdictsAndFindings<Self>) -> f64;
    /// The headline if nothing could be judged because base and head are not comparable.
    fn headline_if_sides_are_not_comparable(_: &VerdictsAndFindings<Self>) -> Option<String> {
        None
    }
    /// Number of cases that were not timed because their bench's executables are equal byte by byte
    /// in both builds.
    fn count_cases_with_identical_executables(&self) -> usize {
        0
    }
    /// Further parts of the report's headline, each after "; ".
    fn further_headline_parts(&self) -> String;
    /// Advice on how to verify the cases with this number of seeds of input data.
    fn advice_to_verify_with_seeds(&self, seeds: usize) -> String;
    /// Advice on how to get a decision on these inconclusive cases, after "; ".
    fn advice_for_inconclusive_cases(
        verdicts: &VerdictsAndFindings<Self>,
        cases: &[&CaseJudgement],
    ) -> String;
    /// Report entries for cases that have no row in the table because they have no time.
    fn entries_for_cases_without_times(verdicts: &VerdictsAndFindings<Self>) -> Vec<UnjudgedEntry>;
    /// Lines of the verdict report that come before all other lines.
    fn report_notes_before_others(_: &VerdictsAndFindings<Self>) -> Vec<String> {
        Vec::new()
    }
    /// Report lines about cases that were not measured.
    fn notes_on_unmeasured_cases(&self) -> Vec<String>;
    /// Lines of the verdict report that come after all other lines.
    fn report_notes_after_others(verdicts: &VerdictsAndFindings<Self>) -> Vec<String>;
    /// Report lines that require no action by the reader.
    fn lines_that_need_no_action(verdicts: &VerdictsAndFindings<Self>) -> Vec<String>;
}

/// The verdict report as plain text, with a table as wide as the terminal if its width is known.
pub fn verdict_report_text<F: VerdictReportTexts>(
    verdicts: &VerdictsAndFindings<F>,
    columns: Option<usize>,
) -> String {
    let first =
        F::line_on_identical_executables(verdicts).map(|line| line + "\n").unwrap_or_default();
    let mut out = format!("{first}{}\n", F::base_head_and_device_line(verdicts));
    if !verdicts.judged_cases.is_empty() {
        let table = summary::judgements_table(
            &verdicts.judged_cases,
            F::SIDE_COLUMN_TITLES,
            F::UNIT_OF_EVIDENCE_COLUMN,
        );
        let _ = writeln!(
            out,
            "\n{}\n{}",
            table.aligned_text_for_terminal(columns),
            F::TABLE_COLUMNS_EXPLANATION.join("\n")
        );
    }
    let lines = [verdict_report_notes(verdicts), F::lines_that_need_no_action(verdicts)].concat();
    lines.iter().for_each(|line| out.extend(["\n", line]));
    let _ =
        write!(out, "{}\n{}", if lines.is_empty() { "" } else { "\n" }, verdict_headline(verdicts));
    clean_message_for_terminal(&out).into_owned()
}

/// The verdict report as a [`VerdictSummary`], from which comments, JUnit XML and pages are made.
/// `reproduce` is the command with which a reader repeats the judgement locally.
pub fn verdict_report_summary<F: VerdictReportTexts>(
    verdicts: &VerdictsAndFindings<F>,
    reproduce: &str,
) -> VerdictSummary {
    let mut details: Vec<String> =
        F::TABLE_COLUMNS_EXPLANATION.iter().map(|line| (*line).to_owned()).collect();
    details.extend(F::lines_that_need_no_action(verdicts));
    VerdictSummary {
        judging_verb: F::JUDGING_COMMAND,
        package_name: None,
        report_headline: verdict_headline(verdicts),
        facts_on_compared_sides: F::table_rows_on_base_head_and_device(verdicts),
        rows: verdicts.judged_cases.clone(),
        unjudged_entries: all_unjudged_entries(verdicts),
        rules: verdicts.rules.clone(),
        notes_below_table: F::line_on_identical_executables(verdicts)
            .into_iter()
            .chain(verdict_report_notes(verdicts))
            .collect(),
        foldable_lines: details,
        evidence_unit: F::UNIT_OF_EVIDENCE_COLUMN,
        command_to_reproduce: reproduce.to_owned(),
    }
}

/// The headline of the verdict report: "1 regressed, 0 improved, 5 unchanged, 0 inconclusive of 6
/// (threshold 1%)".
pub fn verdict_headline<F: VerdictReportTexts>(verdicts: &VerdictsAndFindings<F>) -> String {
    if let Some(refusal) = F::headline_if_sides_are_not_comparable(verdicts) {
        return refusal;
    }
    let identical = verdicts.method_facts.count_cases_with_identical_executables();
    let mut counts =
        summary::verdict_counts_text(|verdict| verdicts.count_cases_with_verdict(verdict));
    if identical > 0 {
        let words = format!("{identical} identical");
        counts =
            if verdicts.judged_cases.is_empty() { words } else { format!("{counts}, {words}") };
    }
    let more = |count: usize, word: &str| match count {
        0 => String::new(),
        count => format!(", {count} {word}"),
    };
    let refused = verdicts.refused.iter().map(|refusal| refusal.affected_cases.len()).sum();
    let skipped = match verdicts.skipped_in_head.len() {
        0 => String::new(),
        count => format!("; {count} skipped"),
    };
    format!(
        "{counts}{}{}{} of {} (threshold {}%){}{skipped}{}",
        more(verdicts.failed_in_head.len(), "failed"),
        summary::non_time_findings_headline(verdicts),
        more(refused, "refused"),
        verdicts.judged_cases.len() + identical,
        (10.0 * F::regression_threshold_percent(verdicts)).round() / 10.0,
        verdicts.method_facts.further_headline_parts(),
        summary::unjudged_bounds_headline(&verdicts.rules),
    )
}

fn all_unjudged_entries<F: VerdictReportTexts>(
    verdicts: &VerdictsAndFindings<F>,
) -> Vec<UnjudgedEntry> {
    let mut others = Vec::new();
    let failed = |(case, why): (&String, &CaseFailureReason)| {
        UnjudgedEntry::failed_case_entry(
            case,
            UnjudgedReasonKind::WrongOutputOrBenchFailed,
            F::FAILED_CASE_LABEL,
            why,
        )
    };
    others.extend(verdicts.failed_in_head.iter().map(failed));
    let skipped = |(case, why): (&String, &String)| {
        UnjudgedEntry::unjudged_with_reason(
            case,
            UnjudgedReasonKind::NotTimedOnBothSides,
            format!("{}: {why}", F::SKIPPED_CASE_LABEL),
        )
    };
    others.extend(verdicts.skipped_in_head.iter().map(skipped));
    others.extend(
        summary::non_time_finding_entries(verdicts, |seeds| {
            verdicts.method_facts.advice_to_verify_with_seeds(seeds)
        })
        .0,
    );
    others.extend(summary::unjudged_bound_entries(&verdicts.rules));
    others
        .extend(UnjudgedEntry::refused_case_entries(&verdicts.refused, F::NAMES_OF_BASE_AND_HEAD));
    let new = |case: &String| {
        UnjudgedEntry::unjudged_with_reason(
            case,
            UnjudgedReasonKind::NotTimedOnBothSides,
            "new, not judged",
        )
    };
    others.extend(verdicts.new_cases.iter().map(new));
    others.extend(F::entries_for_cases_without_times(verdicts));
    if others.is_empty() {
        let nothing = |why| {
            UnjudgedEntry::unjudged_with_reason(
                F::JUDGING_COMMAND,
                UnjudgedReasonKind::NotTimedOnBothSides,
                why,
            )
        };
        others.extend(headline_if_nothing_judged(verdicts).map(nothing));
    }
    others
}

fn headline_if_nothing_judged<F: VerdictReportTexts>(
    verdicts: &VerdictsAndFindings<F>,
) -> Option<String> {
    let [base, head] = F::NAMES_OF_BASE_AND_HEAD;
    let nothing = verdicts.has_no_case_judged_or_unchanged() && verdicts.refused.is_empty();
    nothing.then(|| format!("nothing to judge: no case is both in the {base} and in the {head}"))
}

fn verdict_report_notes<F: VerdictReportTexts>(verdicts: &VerdictsAndFindings<F>) -> Vec<String> {
    let [base, head] = F::NAMES_OF_BASE_AND_HEAD;
    let mut lines = F::report_notes_before_others(verdicts);
    lines.extend(verdicts.refused.iter().map(|refusal| {
        let cases = first_name_and_number_of_others(&refusal.affected_cases);
        let (field, of_base, of_head) =
            (&refusal.differing_field, &refusal.base_value, &refusal.head_value);
        format!(
            "refused: {field} is `{of_base}` in the {base} and `{of_head}` in the {head}: {cases}"
        )
    }));
    lines.extend(labelled_cases_with_reasons(&verdicts.failed_in_head, F::FAILED_CASE_LABEL));
    lines.extend(
        summary::non_time_finding_entries(verdicts, |seeds| {
            verdicts.method_facts.advice_to_verify_with_seeds(seeds)
        })
        .1,
    );
    lines.extend(labelled_cases_with_reasons(&verdicts.skipped_in_head, F::SKIPPED_CASE_LABEL));
    lines.extend(verdicts.method_facts.notes_on_unmeasured_cases());
    lines.extend(lines_by_inconclusive_reason(verdicts));
    lines.extend(headline_if_nothing_judged(verdicts));
    lines.extend(verdicts.rules.report_lines());
    lines.extend(F::report_notes_after_others(verdicts));
    lines
}

/// A report line for each reason why cases are inconclusive: number of cases, first case, and
/// advice.
fn lines_by_inconclusive_reason<F: VerdictReportTexts>(
    verdicts: &VerdictsAndFindings<F>,
) -> Vec<String> {
    let mut by_reason: BTreeMap<String, Vec<&CaseJudgement>> = BTreeMap::new();
    // Cases that are inconclusive for these reasons are listed by name on lines of their own, with
    // advice.
    let has_line = |reason: &InconclusiveReason| {
        matches!(
            reason,
            InconclusiveReason::BaselineHasSingleRun { .. } | InconclusiveReason::LessVerified(_)
        )
    };
    let open =
        verdicts.judged_cases.iter().filter(|judged| judged.verdict == VerdictOnCase::Inconclusive);
    for judged in open.filter(|judged| !judged.reasons.iter().all(has_line)) {
        by_reason
            .entry(judged.joined_inconclusive_reasons().unwrap_or_default())
            .or_default()
            .push(judged);
    }
    let line = |(reason, cases): (String, Vec<&CaseJudgement>)| {
        let names: Vec<&String> = cases.iter().map(|judged| &judged.case_id).collect();
        format!(
            "inconclusive: {reason}: {}{}",
            first_name_and_number_of_others(&names),
            F::advice_for_inconclusive_cases(verdicts, &cases)
        )
    };
    by_reason.into_iter().map(line).collect()
}

/// A line "LABEL: CASE: REASON" for each case.
pub fn labelled_cases_with_reasons(
    cases: &BTreeMap<String, impl Display>,
    label: &str,
) -> Vec<String> {
    let line = |(case, why): (&String, _)| {
        format!("{label}: {case}: {}", indent_every_line(&ToString::to_string(why)))
    };
    cases.iter().map(line).collect()
}

/// Short list of names: "CASE", or "CASE and 3 more".
fn first_name_and_number_of_others(cases: &[impl AsRef<str>]) -> String {
    match cases {
        [only] => only.as_ref().to_owned(),
        [first, more @ ..] => format!("{} and {} more", first.as_ref(), more.len()),
        [] => String::new(),
    }
}

/// For each of the first 20 cases a line of the label and the case, then a line with the number of
/// further cases.
pub fn labelled_lines_of_first_cases(cases: &[String], label: &str) -> Vec<String> {
    let mut lines: Vec<String> = cases
        .iter()
        .take(MAX_CASES_NAMED_PER_KIND)
        .map(|case| format!("{label}: {case}"))
        .collect();
    if cases.len() > MAX_CASES_NAMED_PER_KIND {
        lines.push(format!("{label}: {} more", cases.len() - MAX_CASES_NAMED_PER_KIND));
    }
    lines
}
