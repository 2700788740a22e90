//! Conclusion of a command that judges, in the one form from which reports for reviewers and
//! programs are made ([`super::formats`]).

use std::collections::BTreeSet;

use super::judgement_cells;
use crate::gate::costs::CostGrowth;
use crate::gate::judgement::Judgement;
use crate::gate::outputs::verification::VerificationLoss;
use crate::gate::rules::{RULES_FILE, RulesReport};
use crate::gate::verdict::Verdict;
use crate::gate::verdicts::{RefusedBench, Verdicts};
use kernelgate::display::table::TextTable;
use kernelgate::stats::median;
use kernelgate_cuda::CaseFailure;

/// A comparison or a gate, in the form that reports are made from.
#[derive(Debug, Clone, PartialEq)]
pub struct VerdictSummary {
    /// The verb: "kernelgate compare".
    pub verb: &'static str,
    /// Name of the package, if the verb knows it.
    pub package: Option<String>,
    /// The headline: "1 regressed, 0 improved, 13 unchanged, 0 inconclusive of 14 (threshold 1%)".
    pub headline: String,
    /// Rows about base, head, device and method: name and text.
    pub facts: Vec<(&'static str, String)>,
    /// Cases, worst first.
    pub rows: Vec<Judgement>,
    /// Cases that were not judged: wrong, refused or not run.
    pub others: Vec<UnjudgedEntry>,
    /// Effects of the package's rules on the verdicts.
    pub rules: RulesReport,
    /// Lines that a reader must know besides the table.
    pub notes: Vec<String>,
    /// Lines of the report that may be folded.
    pub details: Vec<String>,
    /// Unit of the evidence of the rows: "pairs" or "runs".
    pub evidence: &'static str,
    /// The command that repeats the judgement locally.
    pub reproduce: String,
}

/// A case, or another entry, without a time to judge.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnjudgedEntry {
    /// Id of the case, or a name for all cases.
    pub name: String,
    /// Severity.
    pub kind: UnjudgedKind,
    /// The reason in words.
    pub why: String,
    /// Facts of the reason: name and value.
    pub facts: Vec<(String, String)>,
}

/// Severity of a case that was not judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnjudgedKind {
    /// The output is wrong, or a process failed.
    Failed,
    /// The case is not comparable with the base.
    Refused,
    /// The case did not run, or has nothing to compare with.
    Skipped,
}

impl UnjudgedEntry {
    /// Makes an entry for an unjudged case.
    pub fn new(name: &str, kind: UnjudgedKind, why: impl Into<String>) -> Self {
        Self { name: name.to_owned(), kind, why: why.into(), facts: Vec::new() }
    }

    /// A case that failed, with the facts of the reason.
    pub fn failed_entry(name: &str, kind: UnjudgedKind, label: &str, why: &CaseFailure) -> Self {
        let mut facts: Vec<_> =
            why.numbers.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
        facts.extend(why.names.clone());
        if !why.kind.is_empty() {
            facts.insert(0, ("reason".to_owned(), why.kind.clone()));
        }
        Self { facts, ..Self::new(name, kind, format!("{label}: {why}")) }
    }

    /// Refused cases, with the field that differs; `sides` are the names of base and head.
    pub fn refused_entries(refused: &[RefusedBench], sides: [&str; 2]) -> Vec<UnjudgedEntry> {
        let refused_cases = |RefusedBench { field, base, head, cases }: &RefusedBench| {
            let why = format!(
                "refused: {field} is `{base}` in the {} and `{head}` in the {}",
                sides[0], sides[1]
            );
            cases
                .iter()
                .map(|case| Self::new(case, UnjudgedKind::Refused, why.clone()))
                .collect::<Vec<_>>()
        };
        refused.iter().flat_map(refused_cases).collect()
    }
}

/// The number of bounds that could not be judged, "; 2 bounds of kernelgate.toml not judged", or an
/// empty text. Such bounds, even alone, make the exit code 3.
pub fn unjudged_rules_text(rules: &RulesReport) -> String {
    match rules.undecided.len() {
        0 => String::new(),
        1 => format!("; 1 bound of {RULES_FILE} not judged"),
        count => format!("; {count} bounds of {RULES_FILE} not judged"),
    }
}

/// Entries for bounds of the package's rules that could not be judged.
pub fn unjudged_rules(rules: &RulesReport) -> Vec<UnjudgedEntry> {
    let entry = |why: &String| UnjudgedEntry::new(RULES_FILE, UnjudgedKind::Skipped, why.clone());
    rules.undecided.iter().map(entry).collect()
}

/// Entries of their own for findings besides times, and the lines with the same text; `remedy`
/// advises how to get more seeds.
pub fn finding_entries<F>(
    verdicts: &Verdicts<F>,
    remedy: impl Fn(usize) -> String,
) -> (Vec<UnjudgedEntry>, Vec<String>) {
    let Verdicts { verification, numerics, costs, .. } = verdicts;
    let loss = |it: &VerificationLoss| {
        let kind = if it.is_failure() { UnjudgedKind::Failed } else { UnjudgedKind::Skipped };
        UnjudgedEntry::new(&it.case, kind, it.words())
    };
    let mut others: Vec<UnjudgedEntry> = verification.iter().map(loss).collect();
    others.extend(numerics.losses().map(|it| {
        UnjudgedEntry::new(&it.case, UnjudgedKind::Failed, format!("less accurate: {}", it.words()))
    }));
    others.extend(numerics.suspected_growth().map(|it| {
        let remedy = match it.one_data_set {
            true => "other seeds have no data of their own: accept it with `growth` in \
                     kernelgate.toml, or compare with code, for other inputs too"
                .to_owned(),
            false => remedy(it.needed),
        };
        let why = format!("may be less accurate: {}; {remedy}", it.words());
        UnjudgedEntry::new(&it.case, UnjudgedKind::Skipped, why)
    }));
    let cost = |it: &CostGrowth| match it.is_shown() {
        true => UnjudgedEntry::new(&it.case, UnjudgedKind::Failed, it.words()),
        false => {
            let why = format!("may cost more: {}", it.words());
            UnjudgedEntry::new(&it.case, UnjudgedKind::Skipped, why)
        }
    };
    others.extend(costs.iter().map(cost));
    let line = |it: &UnjudgedEntry| match it.kind {
        UnjudgedKind::Skipped => format!("inconclusive: {}: {}", it.name, it.why),
        _ => format!("{}: {}", it.name, it.why),
    };
    let lines = others.iter().map(line).collect();
    (others, lines)
}

/// Findings besides times as parts of a headline: ", 1 no longer verified, 2 less accurate, 1 of
/// higher cost".
pub fn headline_findings<F>(verdicts: &Verdicts<F>) -> String {
    let Verdicts { verification, numerics, costs, .. } = verdicts;
    let losses = |shown: bool| verification.iter().filter(|it| it.is_failure() == shown).count();
    let cases = |shown: bool| {
        let grown = costs.iter().filter(|it| it.is_shown() == shown).map(|it| &it.case);
        grown.collect::<BTreeSet<_>>().len()
    };
    let counted = [
        (losses(true), "no longer verified"),
        (losses(false), "less verified"),
        (numerics.losses().count(), "less accurate"),
        (numerics.suspected_growth().count(), "maybe less accurate"),
        (cases(true), "of higher cost"),
        (cases(false), "maybe of higher cost"),
    ];
    let some = counted.into_iter().filter(|(count, _)| *count > 0);
    some.map(|(count, words)| format!(", {count} {words}")).collect()
}

/// Rows for a terminal; `sides` are the names of base and head, `evidence` is the unit of the last
/// column.
pub fn table(rows: &[Judgement], sides: [&str; 2], evidence: &str) -> TextTable {
    let [base, head] = sides;
    let columns = ["case", "verdict", base, head, "change", "interval", "detectable", evidence];
    let mut table = TextTable::new(&columns);
    for row in rows {
        table.row(vec![
            row.case.clone(),
            row.verdict.name().to_owned(),
            judgement_cells::base_time_cell(row),
            judgement_cells::head(row),
            judgement_cells::change(row),
            judgement_cells::interval(row),
            judgement_cells::detectable(row),
            judgement_cells::evidence(row),
        ]);
    }
    table
}

/// Counts by verdict: "1 regressed, 0 improved, 5 unchanged, 0 inconclusive"; "2 accepted" follows
/// the first if there are any.
pub fn counts(count: impl Fn(Verdict) -> usize) -> String {
    use Verdict::{Accepted, Improved, Inconclusive, Regressed, Unchanged};
    let verdicts = [Regressed, Accepted, Improved, Unchanged, Inconclusive].into_iter();
    let shown = verdicts.filter(|verdict| *verdict != Accepted || count(*verdict) > 0);
    shown
        .map(|verdict| format!("{} {}", count(verdict), verdict.name()))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Relative half-widths of cases: a difference (`what`) that occurs without a change of the code.
pub fn noise_floor_text<'a>(
    what: &str,
    widths: impl Iterator<Item = (&'a str, f64)>,
) -> Option<String> {
    let mut widths: Vec<(&str, f64)> = widths.filter(|(_, width)| width.is_finite()).collect();
    widths.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (worst, most) = widths.last()?;
    let middle = median(&widths.iter().map(|(_, width)| *width).collect::<Vec<_>>());
    Some(format!(
        "{what} within ±{:.2}% in the median case, ±{:.2}% in the worst ({worst})",
        100.0 * middle,
        100.0 * most
    ))
}
