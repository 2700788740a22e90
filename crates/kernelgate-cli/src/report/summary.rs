//! What a verdict verb concluded, in the one shape that its formats for reviewers and programs are
//! made from ([`super::comment`], [`super::junit`]).

use std::collections::BTreeSet;

use crate::gate::costs::CostGrowth;
use crate::gate::interval::Ratio;
use crate::gate::numerics::NumericsReport;
use crate::gate::rules::{FILE, RulesReport};
use crate::gate::verification::VerificationLoss;
use crate::gate::{Refusal, Verdict};
use kernelgate::display::table::Table;
use kernelgate::display::time;
use kernelgate::stats::median;

/// A comparison or a gate, in the form that reports are made from.
#[derive(Debug, Clone, PartialEq)]
pub struct VerdictSummary {
    /// The verb: "kernelgate compare".
    pub verb: &'static str,
    /// "1 regressed, 0 improved, 13 unchanged, 0 inconclusive of 14 (threshold 1%)".
    pub headline: String,
    /// What was compared with what, and where: name and words.
    pub facts: Vec<(&'static str, String)>,
    /// Cases, worst first.
    pub rows: Vec<SummaryRow>,
    /// What has no row: wrong, refused, not run.
    pub others: Vec<Unjudged>,
    /// What the package's rules did.
    pub rules: RulesReport,
    /// What a reader must know besides the table, a line each.
    pub notes: Vec<String>,
    /// What may be folded.
    pub details: Vec<String>,
    /// What `evidence` of the rows counts: "pairs" or "runs".
    pub evidence: &'static str,
    /// The command that does the same at home.
    pub reproduce: String,
}

/// A judged case.
#[derive(Debug, Clone, PartialEq)]
pub struct SummaryRow {
    /// The case.
    pub case: String,
    /// What is concluded.
    pub verdict: Verdict,
    /// Why it is inconclusive.
    pub reason: Option<String>,
    /// Time of what is compared with, nanoseconds a launch.
    pub base_ns: f64,
    /// Time of what is judged.
    pub head_ns: f64,
    /// Head over base with its interval.
    pub ratio: Ratio,
    /// Smallest slow-down that would have been found, relative; none where none can be.
    pub detectable: Option<f64>,
    /// p value of "not slower than the threshold"; none where no test was made.
    pub p_slower: Option<f64>,
    /// "12 + 16" pairs, "5:3" runs.
    pub evidence: String,
}

impl SummaryRow {
    /// Whether there are times; a case that could not be measured has none.
    pub const fn is_timed(&self) -> bool {
        self.base_ns > 0.0
    }

    /// "1.254 ms", or "-" without a time.
    pub fn base(&self) -> String {
        if self.is_timed() { time(self.base_ns) } else { "-".to_owned() }
    }

    /// The same of the head.
    pub fn head(&self) -> String {
        if self.is_timed() { time(self.head_ns) } else { "-".to_owned() }
    }

    /// "+25.3%", or "-" without times.
    pub fn change(&self) -> String {
        if self.is_timed() { percent(self.ratio.center) } else { "-".to_owned() }
    }

    /// "+24.9% … +25.8%", or "-" without times.
    pub fn interval(&self) -> String {
        match self.is_timed() {
            true => format!("{} … {}", percent(self.ratio.low), percent(self.ratio.high)),
            false => "-".to_owned(),
        }
    }

    /// "1.3%", or "-" where nothing is detectable.
    pub fn detectable(&self) -> String {
        self.detectable
            .map_or_else(|| "-".to_owned(), |detectable| format!("{:.1}%", 100.0 * detectable))
    }

    /// "0.0012", "< 0.0001", or "-" without a test.
    pub fn p(&self) -> String {
        match self.p_slower {
            None => "-".to_owned(),
            Some(p) if p < 1e-4 => "< 0.0001".to_owned(),
            Some(p) => format!("{p:.4}"),
        }
    }
}

/// A relative change: "+25.3%"; "∞" where there is no bound.
pub fn percent(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:+.1}%", 100.0 * (ratio - 1.0)) } else { "∞".to_owned() }
}

/// Something that has no time to judge.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unjudged {
    /// A case, or what stands for all of them.
    pub name: String,
    /// How bad.
    pub kind: UnjudgedKind,
    /// In words.
    pub why: String,
}

/// How bad it is that something was not judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnjudgedKind {
    /// Wrong output, a process that broke.
    Failed,
    /// Not comparable.
    Refused,
    /// Not run, or nothing to compare with.
    Skipped,
}

impl Unjudged {
    /// One of a kind.
    pub fn new(name: &str, kind: UnjudgedKind, why: impl Into<String>) -> Self {
        Self { name: name.to_owned(), kind, why: why.into() }
    }

    /// The cases that were refused, with the field; `sides` is what base and head are called.
    pub fn refused(refused: &[Refusal], sides: [&str; 2]) -> Vec<Self> {
        let of = |Refusal { field, base, head, cases }: &Refusal| {
            let why = format!(
                "refused: {field} is `{base}` in the {} and `{head}` in the {}",
                sides[0], sides[1]
            );
            cases
                .iter()
                .map(|case| Self::new(case, UnjudgedKind::Refused, why.clone()))
                .collect::<Vec<_>>()
        };
        refused.iter().flat_map(of).collect()
    }
}

/// "; 2 bounds of kernelgate.toml not judged", or nothing: why the exit code is 3 where all else is
/// fine.
pub fn not_judged(rules: &RulesReport) -> String {
    match rules.undecided.len() {
        0 => String::new(),
        1 => format!("; 1 bound of {FILE} not judged"),
        count => format!("; {count} bounds of {FILE} not judged"),
    }
}

/// Entries for what the package's rules set and nothing could be told of.
pub fn undecided(rules: &RulesReport) -> Vec<Unjudged> {
    let entry = |why: &String| Unjudged::new(FILE, UnjudgedKind::Skipped, why.clone());
    rules.undecided.iter().map(entry).collect()
}

/// Findings besides times.
#[derive(Clone, Copy)]
pub struct Findings<'a> {
    /// Cases that are verified less than before.
    pub verification: &'a [VerificationLoss],
    /// Cases that lost accuracy, or may have.
    pub numerics: &'a NumericsReport,
    /// Costs that grew.
    pub costs: &'a [CostGrowth],
}

/// Entries of their own for what was found besides times, and the lines that say the same; `remedy`
/// says how to get more seeds.
pub fn findings(
    Findings { verification, numerics, costs }: Findings<'_>,
    remedy: impl Fn(usize) -> String,
) -> (Vec<Unjudged>, Vec<String>) {
    let loss = |it: &VerificationLoss| {
        let kind = if it.is_shown() { UnjudgedKind::Failed } else { UnjudgedKind::Skipped };
        Unjudged::new(&it.case, kind, it.words())
    };
    let mut others: Vec<Unjudged> = verification.iter().map(loss).collect();
    others.extend(numerics.shown().map(|it| {
        Unjudged::new(&it.case, UnjudgedKind::Failed, format!("less accurate: {}", it.words()))
    }));
    others.extend(numerics.suspected().map(|it| {
        let remedy = match it.one_data_set {
            true => "other seeds have no data of their own: accept it with `growth` in \
                     kernelgate.toml, or compare with code, for other inputs too"
                .to_owned(),
            false => remedy(it.needed),
        };
        let why = format!("may be less accurate: {}; {remedy}", it.words());
        Unjudged::new(&it.case, UnjudgedKind::Skipped, why)
    }));
    let cost = |it: &CostGrowth| match it.is_shown() {
        true => Unjudged::new(&it.case, UnjudgedKind::Failed, it.words()),
        false => {
            let why = format!("may cost more: {}", it.words());
            Unjudged::new(&it.case, UnjudgedKind::Skipped, why)
        }
    };
    others.extend(costs.iter().map(cost));
    let line = |it: &Unjudged| match it.kind {
        UnjudgedKind::Skipped => format!("inconclusive: {}: {}", it.name, it.why),
        _ => format!("{}: {}", it.name, it.why),
    };
    let lines = others.iter().map(line).collect();
    (others, lines)
}

/// The same in a headline: ", 1 no longer verified, 2 less accurate, 1 of higher cost".
pub fn found(Findings { verification, numerics, costs }: Findings<'_>) -> String {
    let losses = |shown: bool| verification.iter().filter(|it| it.is_shown() == shown).count();
    let cases = |shown: bool| {
        let of = costs.iter().filter(|it| it.is_shown() == shown).map(|it| &it.case);
        of.collect::<BTreeSet<_>>().len()
    };
    let counted = [
        (losses(true), "no longer verified"),
        (losses(false), "less verified"),
        (numerics.shown().count(), "less accurate"),
        (numerics.suspected().count(), "maybe less accurate"),
        (cases(true), "of higher cost"),
        (cases(false), "maybe of higher cost"),
    ];
    let some = counted.into_iter().filter(|(count, _)| *count > 0);
    some.map(|(count, words)| format!(", {count} {words}")).collect()
}

/// Rows for a terminal; `sides` is what base and head are called, `evidence` what the last column
/// counts.
pub fn table(rows: impl Iterator<Item = SummaryRow>, sides: [&str; 2], evidence: &str) -> Table {
    let mut table = Table::new(&[
        "case",
        "verdict",
        sides[0],
        sides[1],
        "change",
        "interval",
        "detectable",
        evidence,
    ]);
    for row in rows {
        let (change, interval, detectable) = (row.change(), row.interval(), row.detectable());
        let (base, head) = (row.base(), row.head());
        table.row(vec![
            row.case,
            row.verdict.name().to_owned(),
            base,
            head,
            change,
            interval,
            detectable,
            row.evidence,
        ]);
    }
    table
}

/// "1 regressed, 0 improved, 5 unchanged, 0 inconclusive"; after the first, where there are any,
/// "2 accepted".
pub fn counts(count: impl Fn(Verdict) -> usize) -> String {
    use Verdict::{Accepted, Improved, Inconclusive, Regressed, Unchanged};
    let verdicts = [Regressed, Accepted, Improved, Unchanged, Inconclusive].into_iter();
    let told = verdicts.filter(|verdict| *verdict != Accepted || count(*verdict) > 0);
    told.map(|verdict| format!("{} {}", count(verdict), verdict.name()))
        .collect::<Vec<_>>()
        .join(", ")
}

/// What differs by itself (`what`): the relative half-widths of cases.
pub fn noise_floor<'a>(what: &str, widths: impl Iterator<Item = (&'a str, f64)>) -> Option<String> {
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
