//! The outcome of `compare` as text and as a summary: headline, regressions first, each with its
//! interval and what could have been seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::summary::{self, Findings, SummaryRow, Unjudged, UnjudgedKind, VerdictSummary};
use crate::gate::Verdict;
use crate::gate::code::KernelsCompared;
use crate::gate::comparison::{Compared, Comparison, CriterionBench};
use kernelgate::record::text::{indented, printable};

/// How to read the interval and the pairs of a row.
const READING: &str = "interval: 95 %; p: of \"not slower than the threshold\", over all cases \
                       and interim analyses; pairs: of the first round + of the second, which must agree \
                       before anything is called slower";

/// What is known of the times of benches that use Criterion alone.
const UNIT: &str = "times of Criterion's benches are nanoseconds, unless a bench sets a \
                    measurement of its own: its store does not say";

/// Cases of a kind that are named one by one.
const SHOWN: usize = 20;

/// What a change is of, which the two times beside it are not.
const CHANGE: &str = "change: the median over pairs of processes that ran one after the other, not \
                      of the two times; a block is four processes, two pairs";

/// For a terminal, of so many columns where it has a width.
pub fn text(comparison: &Comparison, columns: Option<usize>) -> String {
    let mut out = same_file(comparison).map(|line| format!("{line}\n")).unwrap_or_default();
    let (base, head, device) = (&comparison.base, &comparison.head, &comparison.device);
    let on = if device.is_empty() { String::new() } else { format!(", on {device}") };
    let _ = writeln!(out, "base {base}, head {head}{on}");
    if !comparison.judged.is_empty() {
        let _ = writeln!(
            out,
            "\n{}",
            summary::table(comparison.judged.iter().map(row), ["base", "head"], "pairs")
                .text_within(columns)
        );
        let _ = writeln!(out, "{READING}\n{CHANGE}");
    }
    let lines = [notes(comparison), details(comparison)].concat();
    lines.iter().for_each(|line| out.extend(["\n", line]));
    let _ = write!(out, "{}\n{}", if lines.is_empty() { "" } else { "\n" }, headline(comparison));
    printable(&out).into_owned()
}

/// Said first: nothing can have changed in what is the same file.
fn same_file(comparison: &Comparison) -> Option<String> {
    let untimed = comparison.untimed.len();
    (untimed > 0).then(|| {
        let which = match comparison.judged.is_empty() {
            true => "the two builds are the same file, byte by byte".to_owned(),
            false => format!("{} is the same file in both", comparison.identical.join(", ")),
        };
        let cases = if untimed == 1 { "case was" } else { "cases were" };
        format!("{which}: {untimed} {cases} not timed (--time-identical times all the same)")
    })
}

/// For reviewers and programs. `reproduce` is the command that compares the same at home.
pub fn summary(comparison: &Comparison, reproduce: &str) -> VerdictSummary {
    let mut facts = vec![
        ("base", comparison.base.clone()),
        ("head", comparison.head.clone()),
        ("on", comparison.device.clone()),
    ];
    facts.extend(noise_floor(comparison).map(|words| ("noise floor", words)));
    facts.extend(clock(comparison).map(|words| ("SM clock", words)));
    let (blocks, wall_s) = comparison
        .rounds
        .iter()
        .fold((0, 0.0), |sum, round| (sum.0 + round.blocks, sum.1 + round.wall_s));
    let budget_s = comparison.budget_s;
    facts.push((
        "took",
        format!("{blocks} blocks of four processes, {wall_s:.0} s of {budget_s:.0} s a round"),
    ));
    let mut others = Vec::new();
    for (cases, kind, label) in [
        (&comparison.failed, UnjudgedKind::Failed, "failed in the head"),
        (&comparison.failed_in_base, UnjudgedKind::Skipped, "failed in the base, not judged"),
        (&comparison.skipped, UnjudgedKind::Skipped, "skipped in the head, timed in the base"),
    ] {
        others.extend(
            cases
                .iter()
                .map(|(case, reason)| Unjudged::new(case, kind, format!("{label}: {reason}"))),
        );
    }
    others.extend(findings(comparison).0);
    others.extend(summary::undecided(&comparison.rules));
    others.extend(Unjudged::refused(&comparison.refused, ["base", "head"]));
    let abandoned = comparison.broken.iter().filter(|broken| broken.abandoned);
    others.extend(abandoned.map(|broken| {
        let kind = if broken.side == "head" { UnjudgedKind::Failed } else { UnjudgedKind::Skipped };
        Unjudged::new(
            &format!("bench {}", broken.bench),
            kind,
            format!("broke in the {}: {}", broken.side, broken.reason),
        )
    }));
    others.extend(
        comparison
            .new
            .iter()
            .map(|case| Unjudged::new(case, UnjudgedKind::Skipped, "new, not judged")),
    );
    if nothing_to_judge(comparison) && others.is_empty() {
        others.push(Unjudged::new(
            "comparison",
            UnjudgedKind::Skipped,
            "nothing to judge: no case is in both",
        ));
    }
    VerdictSummary {
        verb: "kernelgate compare",
        headline: headline(comparison),
        facts,
        rows: comparison.judged.iter().map(row).collect(),
        others,
        rules: comparison.rules.clone(),
        notes: same_file(comparison).into_iter().chain(notes(comparison)).collect(),
        details: [vec![READING.to_owned()], details(comparison)].concat(),
        evidence: "pairs",
        reproduce: reproduce.to_owned(),
    }
}

fn row(compared: &Compared) -> SummaryRow {
    let decision = &compared.decision;
    let again = compared
        .confirmation
        .as_ref()
        .map(|again| format!(" + {}", again.pairs))
        .unwrap_or_default();
    SummaryRow {
        case: decision.case.clone(),
        verdict: compared.verdict,
        reason: compared.reason(),
        base_ns: decision.base_ns,
        head_ns: decision.head_ns,
        ratio: decision.ratio,
        detectable: decision.detectable,
        p_slower: (decision.pairs > 0).then_some(decision.p_slower),
        evidence: format!("{}{again}", decision.pairs),
    }
}

/// What processes of one build differ by: the interval of the null pairs.
fn noise_floor(comparison: &Comparison) -> Option<String> {
    let widths = comparison.judged.iter().map(|compared| &compared.decision).map(|decision| {
        let width = (decision.null.high - decision.null.low) / 2.0;
        (decision.case.as_str(), width)
    });
    summary::noise_floor("a build against itself is", widths)
}

/// How far the SM clock of the head was from the base's, where it was read: the change in cycles
/// over the change in time.
fn clock(comparison: &Comparison) -> Option<String> {
    let decisions = comparison.judged.iter().map(|compared| &compared.decision);
    let shifts =
        decisions.filter_map(|decision| Some(decision.cycles?.center / decision.ratio.center));
    let furthest = shifts
        .filter(|shift| shift.is_finite())
        .max_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()))?;
    Some(format!(
        "the head's was within {:.2}% of the base's in every case",
        100.0 * (furthest - 1.0).abs()
    ))
}

/// "1 regressed, 0 improved, 5 unchanged, 0 inconclusive of 6 (threshold 1%)".
pub fn headline(comparison: &Comparison) -> String {
    let counts = summary::counts(|verdict| comparison.count(verdict));
    let more = |count: usize, word: &str| {
        if count == 0 { String::new() } else { format!(", {count} {word}") }
    };
    let refused = comparison.refused.iter().map(|refusal| refusal.cases.len()).sum();
    let abandoned = |side: &str| {
        let of_side = comparison.broken.iter().filter(|it| it.abandoned && it.side == side);
        let benches: BTreeSet<&str> = of_side.map(|it| it.bench.as_str()).collect();
        match benches.len() {
            0 => String::new(),
            1 => format!("; 1 bench broke in the {side}"),
            count => format!("; {count} benches broke in the {side}"),
        }
    };
    let skipped = match comparison.skipped.len() {
        0 => String::new(),
        count => format!("; {count} skipped in the head"),
    };
    format!(
        "{counts}{}{}{} of {} (threshold {}%){}{}{skipped}{}",
        more(comparison.failed.len(), "failed"),
        summary::found(besides_times(comparison)),
        more(refused, "refused"),
        comparison.judged.len(),
        100.0 * comparison.plan.relative,
        abandoned("head"),
        abandoned("base"),
        summary::not_judged(&comparison.rules),
    )
}

fn nothing_to_judge(comparison: &Comparison) -> bool {
    let Comparison { judged, untimed, unaffected, .. } = comparison;
    judged.is_empty() && untimed.is_empty() && unaffected.is_empty()
}

fn besides_times(comparison: &Comparison) -> Findings<'_> {
    let Comparison { verification, numerics, costs, .. } = comparison;
    Findings { verification, numerics, costs }
}

/// Cases that are verified less, cases that lost accuracy, and costs that grew.
fn findings(comparison: &Comparison) -> (Vec<Unjudged>, Vec<String>) {
    summary::findings(besides_times(comparison), |seeds| {
        format!("{seeds} seeds would tell, which the time did not suffice for")
    })
}

fn notes(comparison: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    let explained = comparison.explanations.iter();
    lines.extend(explained.map(|(case, why)| format!("{case}: {}", why.words())));
    lines.extend(unaffected(comparison));
    lines.extend(kernels(comparison));
    for refusal in &comparison.refused {
        let (first, more) = (
            refusal.cases.first().cloned().unwrap_or_default(),
            refusal.cases.len().saturating_sub(1),
        );
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        lines.push(format!(
            "refused: {} is `{}` in the base and `{}` in the head: {first}{more}",
            refusal.field, refusal.base, refusal.head
        ));
    }
    let with_reason = |lines: &mut Vec<String>, cases: &BTreeMap<String, String>, label: &str| {
        let each = cases.iter().map(|(case, reason)| (case, indented(reason)));
        lines.extend(each.map(|(case, reason)| format!("{label}: {case}: {reason}")));
    };
    with_reason(&mut lines, &comparison.failed, "failed in the head");
    lines.extend(findings(comparison).1);
    with_reason(&mut lines, &comparison.failed_in_base, "failed in the base, not judged");
    with_reason(&mut lines, &comparison.skipped, "skipped in the head, timed in the base");
    for broken in &comparison.broken {
        let so = if broken.abandoned { "; its undecided cases were abandoned" } else { "" };
        let reason = indented(&broken.reason);
        lines.push(format!("broke: {} of the {}: {reason}{so}", broken.bench, broken.side));
    }
    lines.extend(inconclusive(comparison));
    if nothing_to_judge(comparison) {
        lines.push("nothing to judge: no case is in both".to_owned());
    }
    lines.extend(comparison.rules.lines());
    lines.extend(
        comparison.delays.iter().map(|delays| {
            format!("DELAYED on purpose, the head's launches, nanoseconds: {delays}")
        }),
    );
    if !comparison.optimised {
        lines.push("warning: built without optimisation; times mean nothing".to_owned());
    }
    lines
}

/// What differs in machine code and launches between the builds, each with the cases that use it;
/// nothing where no bench tells its kernels.
fn code(comparison: &Comparison) -> Vec<String> {
    let known: Vec<_> = comparison.code.iter().filter(|(_, code)| code.is_known()).collect();
    let mut by_change: BTreeMap<String, Vec<&String>> = BTreeMap::new();
    for (case, code) in &known {
        for (what, changes) in [("code", &code.code), ("launches", &code.launches)] {
            for change in changes {
                by_change.entry(format!("{what} changed: {change}")).or_default().push(case);
            }
        }
    }
    let mut lines: Vec<String> = by_change
        .into_iter()
        .map(|(change, cases)| match &cases[..] {
            [case] => format!("{change} (in {case})"),
            cases => format!("{change} (in {} cases, {} the first)", cases.len(), cases[0]),
        })
        .collect();
    let more = lines.len().saturating_sub(SHOWN);
    lines.truncate(SHOWN);
    lines.extend((more > 0).then(|| format!("code or launches changed: {more} more kernels")));
    if !known.is_empty() {
        let changed = known.iter().filter(|(_, code)| code.has_changed()).count();
        let all = comparison.judged.len() + comparison.unaffected.len();
        lines.push(format!(
            "machine code: other code or launches in {changed} of {all} cases, the same in {}, not \
             known of {}; code of the host is not compared",
            known.len() - changed,
            all.saturating_sub(known.len())
        ));
    }
    lines
}

/// The kernels that differ for each architecture that was asked for.
fn kernels(comparison: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    for KernelsCompared { arch, same, changed, not_compared } in &comparison.kernels {
        let differ = changed.len();
        let how_many = match (differ + same, not_compared.is_empty()) {
            (0, true) => "none compared, as no bench lists one".to_owned(),
            (0, false) => "none compared".to_owned(),
            (all, _) => format!("{differ} of {all} differ"),
        };
        lines.push(format!("kernels for {arch}: {how_many}"));
        let shown = changed.iter().take(SHOWN);
        lines.extend(shown.map(|(kernel, what)| format!("{arch}: {kernel}: {what}")));
        let more = differ.saturating_sub(SHOWN);
        lines.extend((more > 0).then(|| format!("{arch}: {more} more kernels")));
        let not = not_compared.iter();
        lines.extend(not.map(|(what, why)| format!("{arch}: {what} not compared: {why}")));
    }
    lines
}

/// Which cases were left out as asked, and what that does not exclude.
fn unaffected(comparison: &Comparison) -> Option<String> {
    let count = comparison.unaffected.len();
    let cases = if count == 1 { "case" } else { "cases" };
    (count > 0).then(|| {
        format!(
            "--affected: {count} {cases} with the same machine code and launches verified and not \
             timed; what the host does for them may have changed all the same"
        )
    })
}

/// What nobody needs to act on.
fn details(comparison: &Comparison) -> Vec<String> {
    let mut lines = code(comparison);
    lines.extend(comparison.criterion.iter().map(CriterionBench::words));
    if !comparison.criterion.is_empty() {
        lines.push(UNIT.to_owned());
    }
    let left_alone: Vec<String> =
        comparison.left_alone.iter().map(|(bench, why)| format!("{bench}: {why}")).collect();
    for (cases, label) in [
        (&comparison.unverified, "unverified, only its time is compared"),
        (&comparison.new, "new, not judged"),
        (&comparison.removed, "removed"),
        (&left_alone, "bench without this harness, left alone"),
        (&comparison.identical, "the same executable on both sides, byte by byte"),
    ] {
        lines.extend(cases.iter().take(SHOWN).map(|case| format!("{label}: {case}")));
        if cases.len() > SHOWN {
            lines.push(format!("{label}: {} more", cases.len() - SHOWN));
        }
    }
    lines.extend(comparison.calibration.clone());
    for (round, facts) in comparison.rounds.iter().enumerate() {
        lines.push(format!(
            "round {}: {} blocks, {} processes, {:.0} s",
            round + 1,
            facts.blocks,
            facts.processes,
            facts.wall_s
        ));
    }
    lines
}

/// One line a reason: how many cases, which first, and how many pairs would probably settle them
/// all.
fn inconclusive(comparison: &Comparison) -> Vec<String> {
    let mut by_reason: BTreeMap<String, Vec<&Compared>> = BTreeMap::new();
    for compared in
        comparison.judged.iter().filter(|compared| compared.verdict == Verdict::Inconclusive)
    {
        by_reason
            .entry(compared.reason().unwrap_or_else(|| "no reason".to_owned()))
            .or_default()
            .push(compared);
    }
    let line = |(reason, cases): (String, Vec<&Compared>)| {
        let more =
            if cases.len() == 1 { String::new() } else { format!(" and {} more", cases.len() - 1) };
        let needed = cases.iter().filter_map(|compared| compared.decision.pairs_needed).max();
        let needed = needed
            .map(|pairs| format!("; about {pairs} pairs would settle it"))
            .unwrap_or_default();
        format!("inconclusive: {reason}: {}{more}{needed}", cases[0].decision.case)
    };
    by_reason.into_iter().map(line).collect()
}
