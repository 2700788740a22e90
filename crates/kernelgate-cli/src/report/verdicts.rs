//! The verdicts of `gate` or `compare` as text and as a summary: headline, regressions first, each
//! with its interval and the detectable change. Each method of judgement (gate, compare) has its
//! own report texts.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fmt::Write as _;

use super::summary::{self, UnjudgedEntry, UnjudgedKind, VerdictSummary};
use crate::gate::inconclusive_reason::InconclusiveReason;
use crate::gate::judgement::Judgement;
use crate::gate::verdict::Verdict;
use crate::gate::verdicts::{ExitFacts, Verdicts};
use kernelgate::record::text::{indent_lines, printable_on_terminal};
use kernelgate_cuda::CaseFailure;

/// Largest number of cases that are listed one by one in each kind.
const MAX_NAMED_CASES: usize = 20;

/// Texts in the report of one method of judgement.
pub trait VerdictWording: ExitFacts {
    /// The verb: "kernelgate compare".
    const METHOD_COMMAND: &'static str;
    /// Names of base and head in sentences.
    const SIDE_NAMES: [&'static str; 2];
    /// Names of base and head as columns.
    const SIDE_COLUMNS: [&'static str; 2];
    /// Unit of the numbers in the last column.
    const EVIDENCE_UNIT: &'static str;
    const ROW_EXPLANATION: &'static [&'static str];
    /// Text before the name of a case that failed.
    const FAILED_LABEL: &'static str;
    /// Text before the name of a case that the head skipped.
    const SKIPPED_LABEL: &'static str;

    /// A line before everything.
    fn first_line(_: &Verdicts<Self>) -> Option<String> {
        None
    }
    /// Base, head and device.
    fn heading(verdicts: &Verdicts<Self>) -> String;
    /// Rows about base, head, device and noise: name and text.
    fn facts(verdicts: &Verdicts<Self>) -> Vec<(&'static str, String)>;
    /// The relative threshold of slow-downs, per cent.
    fn threshold_percent(verdicts: &Verdicts<Self>) -> f64;
    /// The headline if the method judged nothing.
    fn refusal(_: &Verdicts<Self>) -> Option<String> {
        None
    }
    /// Number of cases that are not timed, because both builds have the same executable.
    fn identical_executable_cases(&self) -> usize {
        0
    }
    /// Further parts of the headline, each after "; ".
    fn more_headline_parts(&self) -> String;
    /// Advice on how to verify with this number of seeds.
    fn more_seeds_advice(&self, seeds: usize) -> String;
    /// Advice on how to get a verdict on these inconclusive cases, after "; ".
    fn remedy(verdicts: &Verdicts<Self>, cases: &[&Judgement]) -> String;
    /// Entries without a row.
    fn others(verdicts: &Verdicts<Self>) -> Vec<UnjudgedEntry>;
    /// Lines before all others.
    fn first_note_lines(_: &Verdicts<Self>) -> Vec<String> {
        Vec::new()
    }
    /// Lines about cases that were not measured.
    fn notes_on_unmeasured(&self) -> Vec<String>;
    /// Lines after all others.
    fn last_note_lines(verdicts: &Verdicts<Self>) -> Vec<String>;
    /// Lines of the report that require no action.
    fn details(verdicts: &Verdicts<Self>) -> Vec<String>;
}

/// Text of the report for a terminal of this width, if the width is known.
pub fn text<F: VerdictWording>(verdicts: &Verdicts<F>, columns: Option<usize>) -> String {
    let first = F::first_line(verdicts).map(|line| line + "\n").unwrap_or_default();
    let mut out = format!("{first}{}\n", F::heading(verdicts));
    if !verdicts.judged.is_empty() {
        let table = summary::table(&verdicts.judged, F::SIDE_COLUMNS, F::EVIDENCE_UNIT);
        let _ =
            writeln!(out, "\n{}\n{}", table.text_within(columns), F::ROW_EXPLANATION.join("\n"));
    }
    let lines = [verdict_notes(verdicts), F::details(verdicts)].concat();
    lines.iter().for_each(|line| out.extend(["\n", line]));
    let _ =
        write!(out, "{}\n{}", if lines.is_empty() { "" } else { "\n" }, verdict_headline(verdicts));
    printable_on_terminal(&out).into_owned()
}

/// Summary of the report for reviewers and programs. `reproduce` is the command that repeats the
/// judgement locally.
pub fn summary<F: VerdictWording>(verdicts: &Verdicts<F>, reproduce: &str) -> VerdictSummary {
    let mut details: Vec<String> =
        F::ROW_EXPLANATION.iter().map(|line| (*line).to_owned()).collect();
    details.extend(F::details(verdicts));
    VerdictSummary {
        verb: F::METHOD_COMMAND,
        package: None,
        headline: verdict_headline(verdicts),
        facts: F::facts(verdicts),
        rows: verdicts.judged.clone(),
        others: others(verdicts),
        rules: verdicts.rules.clone(),
        notes: F::first_line(verdicts).into_iter().chain(verdict_notes(verdicts)).collect(),
        details,
        evidence: F::EVIDENCE_UNIT,
        reproduce: reproduce.to_owned(),
    }
}

/// The headline: "1 regressed, 0 improved, 5 unchanged, 0 inconclusive of 6 (threshold 1%)".
pub fn verdict_headline<F: VerdictWording>(verdicts: &Verdicts<F>) -> String {
    if let Some(refusal) = F::refusal(verdicts) {
        return refusal;
    }
    let identical = verdicts.facts.identical_executable_cases();
    let mut counts = summary::counts(|verdict| verdicts.count(verdict));
    if identical > 0 {
        let words = format!("{identical} identical");
        counts = if verdicts.judged.is_empty() { words } else { format!("{counts}, {words}") };
    }
    let more = |count: usize, word: &str| match count {
        0 => String::new(),
        count => format!(", {count} {word}"),
    };
    let refused = verdicts.refused.iter().map(|refusal| refusal.cases.len()).sum();
    let skipped = match verdicts.skipped.len() {
        0 => String::new(),
        count => format!("; {count} skipped"),
    };
    format!(
        "{counts}{}{}{} of {} (threshold {}%){}{skipped}{}",
        more(verdicts.failed.len(), "failed"),
        summary::headline_findings(verdicts),
        more(refused, "refused"),
        verdicts.judged.len() + identical,
        (10.0 * F::threshold_percent(verdicts)).round() / 10.0,
        verdicts.facts.more_headline_parts(),
        summary::unjudged_rules_text(&verdicts.rules),
    )
}

fn others<F: VerdictWording>(verdicts: &Verdicts<F>) -> Vec<UnjudgedEntry> {
    let mut others = Vec::new();
    let failed = |(case, why): (&String, &CaseFailure)| {
        UnjudgedEntry::failed_entry(case, UnjudgedKind::Failed, F::FAILED_LABEL, why)
    };
    others.extend(verdicts.failed.iter().map(failed));
    let skipped = |(case, why): (&String, &String)| {
        UnjudgedEntry::new(case, UnjudgedKind::Skipped, format!("{}: {why}", F::SKIPPED_LABEL))
    };
    others.extend(verdicts.skipped.iter().map(skipped));
    others.extend(
        summary::finding_entries(verdicts, |seeds| verdicts.facts.more_seeds_advice(seeds)).0,
    );
    others.extend(summary::unjudged_rules(&verdicts.rules));
    others.extend(UnjudgedEntry::refused_entries(&verdicts.refused, F::SIDE_NAMES));
    let new = |case: &String| UnjudgedEntry::new(case, UnjudgedKind::Skipped, "new, not judged");
    others.extend(verdicts.new.iter().map(new));
    others.extend(F::others(verdicts));
    if others.is_empty() {
        let nothing = |why| UnjudgedEntry::new(F::METHOD_COMMAND, UnjudgedKind::Skipped, why);
        others.extend(nothing_judged_text(verdicts).map(nothing));
    }
    others
}

fn nothing_judged_text<F: VerdictWording>(verdicts: &Verdicts<F>) -> Option<String> {
    let [base, head] = F::SIDE_NAMES;
    let nothing = verdicts.judged_nothing() && verdicts.refused.is_empty();
    nothing.then(|| format!("nothing to judge: no case is both in the {base} and in the {head}"))
}

fn verdict_notes<F: VerdictWording>(verdicts: &Verdicts<F>) -> Vec<String> {
    let [base, head] = F::SIDE_NAMES;
    let mut lines = F::first_note_lines(verdicts);
    lines.extend(verdicts.refused.iter().map(|refusal| {
        let cases = first_names_and_count(&refusal.cases);
        let (field, of_base, of_head) = (&refusal.field, &refusal.base, &refusal.head);
        format!(
            "refused: {field} is `{of_base}` in the {base} and `{of_head}` in the {head}: {cases}"
        )
    }));
    lines.extend(cases_with_reason(&verdicts.failed, F::FAILED_LABEL));
    lines.extend(
        summary::finding_entries(verdicts, |seeds| verdicts.facts.more_seeds_advice(seeds)).1,
    );
    lines.extend(cases_with_reason(&verdicts.skipped, F::SKIPPED_LABEL));
    lines.extend(verdicts.facts.notes_on_unmeasured());
    lines.extend(inconclusive_lines(verdicts));
    lines.extend(nothing_judged_text(verdicts));
    lines.extend(verdicts.rules.lines());
    lines.extend(F::last_note_lines(verdicts));
    lines
}

/// One line for each reason why cases are inconclusive: the number of cases, the first case, and
/// advice.
fn inconclusive_lines<F: VerdictWording>(verdicts: &Verdicts<F>) -> Vec<String> {
    let mut by_reason: BTreeMap<String, Vec<&Judgement>> = BTreeMap::new();
    // Reasons of these kinds are printed on separate lines, with advice.
    let has_line = |reason: &InconclusiveReason| {
        matches!(reason, InconclusiveReason::SingleRun { .. } | InconclusiveReason::LessVerified(_))
    };
    let open = verdicts.judged.iter().filter(|judged| judged.verdict == Verdict::Inconclusive);
    for judged in open.filter(|judged| !judged.reasons.iter().all(has_line)) {
        by_reason.entry(judged.reason().unwrap_or_default()).or_default().push(judged);
    }
    let line = |(reason, cases): (String, Vec<&Judgement>)| {
        let names: Vec<&String> = cases.iter().map(|judged| &judged.case).collect();
        format!(
            "inconclusive: {reason}: {}{}",
            first_names_and_count(&names),
            F::remedy(verdicts, &cases)
        )
    };
    by_reason.into_iter().map(line).collect()
}

/// A line "LABEL: CASE: REASON" for each case.
pub fn cases_with_reason(cases: &BTreeMap<String, impl Display>, label: &str) -> Vec<String> {
    let line = |(case, why): (&String, _)| {
        format!("{label}: {case}: {}", indent_lines(&ToString::to_string(why)))
    };
    cases.iter().map(line).collect()
}

/// Names in short form: "CASE", or "CASE and 3 more".
fn first_names_and_count(cases: &[impl AsRef<str>]) -> String {
    match cases {
        [only] => only.as_ref().to_owned(),
        [first, more @ ..] => format!("{} and {} more", first.as_ref(), more.len()),
        [] => String::new(),
    }
}

/// Lines "LABEL: Lines "LABEL: CASE" for the first entries of a long list.
pub fn lines_for_first_cases(cases: &[String], label: &str) -> Vec<String> {
    let mut lines: Vec<String> =
        cases.iter().take(MAX_NAMED_CASES).map(|case| format!("{label}: {case}")).collect();
    if cases.len() > MAX_NAMED_CASES {
        lines.push(format!("{label}: {} more", cases.len() - MAX_NAMED_CASES));
    }
    lines
}
