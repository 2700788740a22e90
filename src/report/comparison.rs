//! The outcome of `compare` as text and Markdown: headline, regressions first, each with its interval and what could have been seen.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::table::Table;
use super::time;
use crate::gate::Verdict;
use crate::gate::comparison::{Compared, Comparison};

/// Cases of a kind that are named one by one.
const SHOWN: usize = 20;

/// For a terminal.
pub fn text(comparison: &Comparison) -> String {
    let mut out = format!("base {}, head {}, on {}\n", comparison.base, comparison.head, comparison.device);
    if !comparison.judged.is_empty() {
        let _ = writeln!(out, "\n{}", table(&comparison.judged).text());
    }
    for line in notes(comparison) {
        let _ = write!(out, "\n{line}");
    }
    let _ = write!(out, "\n{}", headline(comparison));
    out
}

/// For a pull request: headline and what got slower in sight, the rest folded.
pub fn markdown(comparison: &Comparison) -> String {
    let mut out =
        format!("**{}**\n\nBase {}, head {}, on {}.\n", headline(comparison), comparison.base, comparison.head, comparison.device);
    let (worst, rest): (Vec<_>, Vec<_>) =
        comparison.judged.iter().cloned().partition(|compared| compared.decision.verdict == Verdict::Regressed);
    if !worst.is_empty() {
        let _ = writeln!(out, "\n{}", table(&worst).markdown());
    }
    for line in notes(comparison) {
        let _ = write!(out, "\n- {line}");
    }
    if !rest.is_empty() {
        let (count, rest) = (rest.len(), table(&rest).markdown());
        let _ = writeln!(out, "\n\n<details><summary>{count} other cases</summary>\n\n{rest}\n\n</details>");
    }
    out
}

/// "1 regressed, 0 improved, 5 unchanged, 0 inconclusive of 6 (threshold 1%)".
pub fn headline(comparison: &Comparison) -> String {
    let verdicts = [Verdict::Regressed, Verdict::Improved, Verdict::Unchanged, Verdict::Inconclusive];
    let counts = verdicts.map(|verdict| format!("{} {}", comparison.count(verdict), verdict.name())).join(", ");
    let more = |count: usize, word: &str| if count == 0 { String::new() } else { format!(", {count} {word}") };
    let refused = comparison.refused.iter().map(|refusal| refusal.cases.len()).sum();
    format!(
        "{counts}{}{} of {} (threshold {}%)",
        more(comparison.failed.len(), "failed"),
        more(refused, "refused"),
        comparison.judged.len(),
        100.0 * comparison.plan.relative
    )
}

fn table(judged: &[Compared]) -> Table {
    let mut table = Table::new(&["case", "verdict", "base", "head", "change", "interval", "detectable", "pairs"]);
    for compared in judged {
        let decision = &compared.decision;
        let percent = |ratio: f64| if ratio.is_finite() { format!("{:+.1}%", 100.0 * (ratio - 1.0)) } else { "∞".to_owned() };
        let again = compared.confirmation.as_ref().map(|again| format!(" + {}", again.pairs)).unwrap_or_default();
        table.row(vec![
            decision.case.clone(),
            compared.verdict.name().to_owned(),
            time(decision.base_ns),
            time(decision.head_ns),
            percent(decision.ratio.center),
            format!("{} … {}", percent(decision.ratio.low), percent(decision.ratio.high)),
            decision.detectable.map_or_else(|| "-".to_owned(), |detectable| format!("{:.1}%", 100.0 * detectable)),
            format!("{}{again}", decision.pairs),
        ]);
    }
    table
}

fn notes(comparison: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    for refusal in &comparison.refused {
        let (first, more) = (refusal.cases.first().cloned().unwrap_or_default(), refusal.cases.len().saturating_sub(1));
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        lines.push(format!(
            "refused: {} is `{}` in the base and `{}` in the head: {first}{more}",
            refusal.field, refusal.base, refusal.head
        ));
    }
    let with_reason = |lines: &mut Vec<String>, cases: &BTreeMap<String, String>, label: &str| {
        lines.extend(cases.iter().map(|(case, reason)| format!("{label}: {case}: {reason}")));
    };
    with_reason(&mut lines, &comparison.failed, "failed in the head");
    with_reason(&mut lines, &comparison.failed_in_base, "failed in the base, not judged");
    with_reason(&mut lines, &comparison.skipped, "skipped in the head, timed in the base");
    for broken in &comparison.broken {
        let so = if broken.given_up { "; its undecided cases were given up" } else { "" };
        lines.push(format!("broke: {} of the {}: {}{so}", broken.bench, broken.side, broken.reason));
    }
    lines.extend(inconclusive(comparison));
    for (cases, label) in [
        (&comparison.new, "new, not judged"),
        (&comparison.removed, "removed"),
        (&comparison.foreign, "bench without this harness, left alone"),
        (&comparison.identical, "the same executable on both sides, byte by byte"),
    ] {
        lines.extend(cases.iter().take(SHOWN).map(|case| format!("{label}: {case}")));
        if cases.len() > SHOWN {
            lines.push(format!("{label}: {} more", cases.len() - SHOWN));
        }
    }
    if comparison.judged.is_empty() {
        lines.push("nothing to judge: no case is in both".to_owned());
    }
    lines.extend(comparison.calibration.clone());
    lines.extend(comparison.delays.iter().map(|delays| format!("DELAYED on purpose, the head's launches, nanoseconds: {delays}")));
    if !comparison.optimised {
        lines.push("warning: built without optimisation; times mean nothing".to_owned());
    }
    for (round, facts) in comparison.rounds.iter().enumerate() {
        lines.push(format!("round {}: {} blocks, {} processes, {:.0} s", round + 1, facts.blocks, facts.processes, facts.wall_s));
    }
    lines
}

/// One line a reason: how many cases, which first, and how many pairs would probably settle them all.
fn inconclusive(comparison: &Comparison) -> Vec<String> {
    let mut by_reason: BTreeMap<&str, Vec<&Compared>> = BTreeMap::new();
    for compared in comparison.judged.iter().filter(|compared| compared.verdict == Verdict::Inconclusive) {
        by_reason.entry(compared.reason().unwrap_or("no reason")).or_default().push(compared);
    }
    let line = |(reason, cases): (&str, Vec<&Compared>)| {
        let more = if cases.len() == 1 { String::new() } else { format!(" and {} more", cases.len() - 1) };
        let needed = cases.iter().filter_map(|compared| compared.decision.pairs_needed).max();
        let needed = needed.map(|pairs| format!("; about {pairs} pairs would settle it")).unwrap_or_default();
        format!("inconclusive: {reason}: {}{more}{needed}", cases[0].decision.case)
    };
    by_reason.into_iter().map(line).collect()
}
