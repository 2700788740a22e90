//! The result of `kernelgate gate` or `kernelgate compare` in the single form from which comments,
//! JUnit XML and pages are made ([`super::formats`]).

use std::collections::BTreeSet;

use super::judgement_cells;
use crate::gate::costs::LaunchCostGrowthOfCase;
use crate::gate::judgement::CaseJudgement;
use crate::gate::outputs::verification::VerificationLoss;
use crate::gate::rules::{GateRulesEffectReport, RULES_FILE_NAME};
use crate::gate::verdict::VerdictOnCase;
use crate::gate::verdicts::{ComparisonRefusal, VerdictsAndFindings};
use kernelgate::display::table::AlignedTextTable;
use kernelgate::stats::median;
use kernelgate_cuda::CaseFailureReason;

/// The verdicts of `kernelgate gate` or `kernelgate compare` in the form from which all formatted
/// reports are made.
#[derive(Debug, Clone, PartialEq)]
pub struct VerdictSummary {
    /// The judging verb, such as "kernelgate compare".
    pub judging_verb: &'static str,
    /// Name of the Cargo package whose benches were judged; `None` if the verb does not know the
    /// package.
    pub package_name: Option<String>,
    /// The headline of the report: "1 regressed, 0 improved, 13 unchanged, 0 inconclusive of 14
    /// (threshold 1%)".
    pub report_headline: String,
    /// Rows about base, head, device and method, each with a name and a text.
    pub facts_on_compared_sides: Vec<(&'static str, String)>,
    /// Cases, worst first.
    pub rows: Vec<CaseJudgement>,
    /// Cases without a verdict on their time, with the reason: the output was wrong, the case was
    /// refused, or the case did not run.
    pub unjudged_entries: Vec<UnjudgedEntry>,
    /// Effects of the package's `kernelgate.toml` on the verdicts.
    pub rules: GateRulesEffectReport,
    /// Lines below the table that every reader of the report must see.
    pub notes_below_table: Vec<String>,
    /// Lines of the report that a comment may fold.
    pub foldable_lines: Vec<String>,
    /// Unit of the evidence in the last column of the table: "pairs" of processes or process
    /// "runs".
    pub evidence_unit: &'static str,
    /// The command with which a reader repeats the judgement on a machine of his own.
    pub command_to_reproduce: String,
}

/// An entry of the report without a verdict on time: a case, a bench or a whole shard that was not
/// judged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnjudgedEntry {
    /// Id of the case, or a name such as "bench NAME" for all cases of a bench.
    pub case_or_bench_name: String,
    /// Severity.
    pub kind: UnjudgedReasonKind,
    /// The reason why the entry was not judged, in words.
    pub reason_not_judged: String,
    /// Numbers and names that explain why the entry was not judged, each as name and value.
    pub facts_behind_reason: Vec<(String, String)>,
}

/// The kind of reason why an entry was not judged, which also decides how severe the report shows
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnjudgedReasonKind {
    /// The output of the case is wrong, or the process of the bench failed.
    WrongOutputOrBenchFailed,
    /// Baseline or base and the judged run have different settings, so the case cannot be compared.
    IncomparableSettings,
    /// The case did not run, or the other side has no times of the case to compare with.
    NotTimedOnBothSides,
}

impl UnjudgedEntry {
    /// Makes a report entry for a case that was not judged, without further facts.
    pub fn unjudged_with_reason(
        name: &str,
        kind: UnjudgedReasonKind,
        why: impl Into<String>,
    ) -> Self {
        Self {
            case_or_bench_name: name.to_owned(),
            kind,
            reason_not_judged: why.into(),
            facts_behind_reason: Vec::new(),
        }
    }

    /// Makes a report entry for a case that failed, with the facts of the failure.
    pub fn failed_case_entry(
        name: &str,
        kind: UnjudgedReasonKind,
        label: &str,
        why: &CaseFailureReason,
    ) -> Self {
        let mut facts: Vec<_> = why
            .numbers_in_failure_sentence
            .iter()
            .map(|(name, value)| (name.clone(), value.to_string()))
            .collect();
        facts.extend(why.names_in_failure_sentence.clone());
        if !why.failure_kind.is_empty() {
            facts.insert(0, ("reason".to_owned(), why.failure_kind.clone()));
        }
        Self {
            facts_behind_reason: facts,
            ..Self::unjudged_with_reason(name, kind, format!("{label}: {why}"))
        }
    }

    /// Makes a report entry for each refused case, with the field that differs; `sides` names base
    /// and head.
    pub fn refused_case_entries(
        refused: &[ComparisonRefusal],
        sides: [&str; 2],
    ) -> Vec<UnjudgedEntry> {
        let refused_cases = |ComparisonRefusal {
                                 differing_field: field,
                                 base_value: base,
                                 head_value: head,
                                 affected_cases: cases,
                             }: &ComparisonRefusal| {
            let why = format!(
                "refused: {field} is `{base}` in the {} and `{head}` in the {}",
                sides[0], sides[1]
            );
            cases
                .iter()
                .map(|case| {
                    Self::unjudged_with_reason(
                        case,
                        UnjudgedReasonKind::IncomparableSettings,
                        why.clone(),
                    )
                })
                .collect::<Vec<_>>()
        };
        refused.iter().flat_map(refused_cases).collect()
    }
}

/// Headline part on the number of bounds of `kernelgate.toml` that could not be judged, "; 2 bounds
/// of kernelgate.toml not judged"; empty if all bounds were judged. A bound of `kernelgate.toml`
/// that could not be judged, even a single one, makes the exit code 3.
pub fn unjudged_bounds_headline(rules: &GateRulesEffectReport) -> String {
    match rules.notes_on_unjudged_limits.len() {
        0 => String::new(),
        1 => format!("; 1 bound of {RULES_FILE_NAME} not judged"),
        count => format!("; {count} bounds of {RULES_FILE_NAME} not judged"),
    }
}

/// Makes a report entry for each bound of `kernelgate.toml` that could not be judged.
pub fn unjudged_bound_entries(rules: &GateRulesEffectReport) -> Vec<UnjudgedEntry> {
    let entry = |why: &String| {
        UnjudgedEntry::unjudged_with_reason(
            RULES_FILE_NAME,
            UnjudgedReasonKind::NotTimedOnBothSides,
            why.clone(),
        )
    };
    rules.notes_on_unjudged_limits.iter().map(entry).collect()
}

/// Report entries for findings besides times (lost verification, lower accuracy, higher cost), and
/// the lines with the same text; `remedy` gives the advice for a number of seeds.
pub fn non_time_finding_entries<F>(
    verdicts: &VerdictsAndFindings<F>,
    remedy: impl Fn(usize) -> String,
) -> (Vec<UnjudgedEntry>, Vec<String>) {
    let VerdictsAndFindings {
        verification_losses: verification, numerics, grown_costs: costs, ..
    } = verdicts;
    let loss = |it: &VerificationLoss| {
        let kind = if it.is_complete_loss() {
            UnjudgedReasonKind::WrongOutputOrBenchFailed
        } else {
            UnjudgedReasonKind::NotTimedOnBothSides
        };
        UnjudgedEntry::unjudged_with_reason(&it.case_id, kind, it.describe_verification_loss())
    };
    let mut others: Vec<UnjudgedEntry> = verification.iter().map(loss).collect();
    others.extend(numerics.shown_accuracy_losses().map(|it| {
        UnjudgedEntry::unjudged_with_reason(
            &it.case_id,
            UnjudgedReasonKind::WrongOutputOrBenchFailed,
            format!("less accurate: {}", it.describe_error_growth()),
        )
    }));
    others.extend(numerics.suspected_accuracy_losses().map(|it| {
        let remedy = match it.seeds_share_one_data_set {
            true => "other seeds have no data of their own: accept it with `growth` in \
                     kernelgate.toml, or compare with code, for other inputs too"
                .to_owned(),
            false => remedy(it.seeds_needed),
        };
        let why = format!("may be less accurate: {}; {remedy}", it.describe_error_growth());
        UnjudgedEntry::unjudged_with_reason(
            &it.case_id,
            UnjudgedReasonKind::NotTimedOnBothSides,
            why,
        )
    }));
    let cost = |it: &LaunchCostGrowthOfCase| match it.is_growth_established() {
        true => UnjudgedEntry::unjudged_with_reason(
            &it.case_id,
            UnjudgedReasonKind::WrongOutputOrBenchFailed,
            it.describe_growth(),
        ),
        false => {
            let why = format!("may cost more: {}", it.describe_growth());
            UnjudgedEntry::unjudged_with_reason(
                &it.case_id,
                UnjudgedReasonKind::NotTimedOnBothSides,
                why,
            )
        }
    };
    others.extend(costs.iter().map(cost));
    let line = |it: &UnjudgedEntry| match it.kind {
        UnjudgedReasonKind::NotTimedOnBothSides => {
            format!("inconclusive: {}: {}", it.case_or_bench_name, it.reason_not_judged)
        }
        _ => format!("{}: {}", it.case_or_bench_name, it.reason_not_judged),
    };
    let lines = others.iter().map(line).collect();
    (others, lines)
}

/// Headline parts that count findings besides times: ", 1 no longer verified, 2 less accurate, 1 of
/// higher cost".
pub fn non_time_findings_headline<F>(verdicts: &VerdictsAndFindings<F>) -> String {
    let VerdictsAndFindings {
        verification_losses: verification, numerics, grown_costs: costs, ..
    } = verdicts;
    let losses =
        |shown: bool| verification.iter().filter(|it| it.is_complete_loss() == shown).count();
    let cases = |shown: bool| {
        let grown =
            costs.iter().filter(|it| it.is_growth_established() == shown).map(|it| &it.case_id);
        grown.collect::<BTreeSet<_>>().len()
    };
    let counted = [
        (losses(true), "no longer verified"),
        (losses(false), "less verified"),
        (numerics.shown_accuracy_losses().count(), "less accurate"),
        (numerics.suspected_accuracy_losses().count(), "maybe less accurate"),
        (cases(true), "of higher cost"),
        (cases(false), "maybe of higher cost"),
    ];
    let some = counted.into_iter().filter(|(count, _)| *count > 0);
    some.map(|(count, words)| format!(", {count} {words}")).collect()
}

/// Table of judged cases for a terminal; `sides` names base and head, and `evidence` is the title
/// of the last column.
pub fn judgements_table(
    rows: &[CaseJudgement],
    sides: [&str; 2],
    evidence: &str,
) -> AlignedTextTable {
    let [base, head] = sides;
    let columns = ["case", "verdict", base, head, "change", "interval", "detectable", evidence];
    let mut table = AlignedTextTable::new(&columns);
    for row in rows {
        table.add_row(vec![
            row.case_id.clone(),
            row.verdict.verdict_name().to_owned(),
            judgement_cells::base_time_cell(row),
            judgement_cells::head_time_cell(row),
            judgement_cells::time_change_cell(row),
            judgement_cells::time_change_interval_cell(row),
            judgement_cells::detectable_change_cell(row),
            judgement_cells::evidence_count_cell(row),
        ]);
    }
    table
}

/// Number of cases with each verdict: "1 regressed, 0 improved, 5 unchanged, 0 inconclusive"; ", 2
/// accepted" follows the regressed cases if there are any.
pub fn verdict_counts_text(count: impl Fn(VerdictOnCase) -> usize) -> String {
    use VerdictOnCase::{AcceptedSlowdown, Improved, Inconclusive, Regressed, Unchanged};
    let verdicts = [Regressed, AcceptedSlowdown, Improved, Unchanged, Inconclusive].into_iter();
    let shown = verdicts.filter(|verdict| *verdict != AcceptedSlowdown || count(*verdict) > 0);
    shown
        .map(|verdict| format!("{} {}", count(verdict), verdict.verdict_name()))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Describes the spread of times that occurs without any change of code: median and largest
/// relative half-width over the cases; `what` is the subject of the sentence.
pub fn noise_floor_sentence<'a>(
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
