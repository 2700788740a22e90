//! The gate's outcome as text and Markdown: headline, regressions first, each with its interval and what could have been seen.

use std::fmt::Write as _;

use super::table::Table;
use super::time;
use crate::gate::{Judged, Report, Verdict};

/// For a terminal.
pub fn text(report: &Report) -> String {
    let mut out = format!("baseline `{}` on {}\n", report.baseline, report.device);
    if !report.judged.is_empty() {
        let _ = writeln!(out, "\n{}", table(&report.judged).text());
    }
    notes(report, &mut out, "");
    let _ = write!(out, "\n{}", headline(report));
    out
}

/// For a pull request: headline and regressions in sight, the rest folded.
pub fn markdown(report: &Report) -> String {
    let mut out = format!("**{}**\n\nBaseline `{}` on {}.\n", headline(report), report.baseline, report.device);
    let (worst, rest): (Vec<_>, Vec<_>) = report.judged.iter().cloned().partition(|judged| judged.verdict == Verdict::Regressed);
    if !worst.is_empty() {
        let _ = writeln!(out, "\n{}", table(&worst).markdown());
    }
    notes(report, &mut out, "- ");
    if !rest.is_empty() {
        let _ =
            writeln!(out, "\n<details><summary>{} other cases</summary>\n\n{}\n\n</details>", rest.len(), table(&rest).markdown());
    }
    out
}

/// "1 regressed, 0 improved, 5 unchanged, 0 inconclusive of 6 (threshold 5 %)".
pub fn headline(report: &Report) -> String {
    if !report.refused.is_empty() {
        let mut fields: Vec<_> = report.refused.iter().map(|refusal| refusal.field.as_str()).collect();
        fields.dedup();
        return format!("Refused: not comparable with the baseline (differing: {})", fields.join(", "));
    }
    let counts = [Verdict::Regressed, Verdict::Improved, Verdict::Unchanged, Verdict::Inconclusive]
        .map(|verdict| format!("{} {}", report.count(verdict), verdict.name()));
    let failed = if report.failed.is_empty() { String::new() } else { format!(", {} failed", report.failed.len()) };
    let interrupted = if report.interrupted.is_empty() { "" } else { "; the run was interrupted" };
    let (of, threshold) = (report.judged.len(), 100.0 * report.policy.relative);
    format!("{}{failed} of {of} (threshold {threshold:.0}%){interrupted}", counts.join(", "))
}

fn table(judged: &[Judged]) -> Table {
    let mut table = Table::new(&["case", "verdict", "baseline", "now", "change", "interval", "detectable", "runs"]);
    for judged in judged {
        let percent = |ratio: f64| format!("{:+.1}%", 100.0 * (ratio - 1.0));
        table.row(vec![
            judged.case.clone(),
            judged.verdict.name().to_owned(),
            time(judged.base_ns),
            time(judged.head_ns),
            percent(judged.ratio.center),
            format!("{} … {}", percent(judged.ratio.low), percent(judged.ratio.high)),
            format!("{:.1}%", 100.0 * judged.detectable),
            format!("{}:{}", judged.base_runs, judged.head_runs),
        ]);
    }
    table
}

fn notes(report: &Report, out: &mut String, bullet: &str) {
    let mut lines = Vec::new();
    for refusal in &report.refused {
        lines.push(format!(
            "refused: {} is `{}` in the baseline and `{}` in the run: {}",
            refusal.field,
            refusal.base,
            refusal.head,
            in_short(&refusal.cases),
        ));
    }
    lines.extend(report.failed.iter().map(|(case, error)| format!("failed: {case}: {error}")));
    lines.extend(report.interrupted.iter().map(|bench| format!("interrupted: bench `{bench}` did not get to its end")));
    lines.extend(report.skipped.iter().map(|(case, reason)| format!("skipped, in the baseline: {case}: {reason}")));
    lines.extend(first_of(&report.new, "new, not judged"));
    lines.extend(first_of(&report.not_run, "in the baseline, not run"));
    lines.extend(first_of(&report.own, "compared with itself, the baseline was saved from it"));
    if report.judged.is_empty() && report.refused.is_empty() {
        lines.push("nothing to judge: no case is both in the baseline and in the run".to_owned());
    }
    let contention = |side: fn(&Judged) -> f64| report.judged.iter().map(side).fold(0.0, f64::max);
    let (base, head) = (contention(|judged| judged.base_contention), contention(|judged| judged.head_contention));
    if base.max(head) > report.policy.contention {
        lines.push(format!(
            "warning: others took up to {:.0}% of the CPU time during the run and {:.0}% during the baseline's: measure on an idle \
             machine",
            100.0 * head,
            100.0 * base
        ));
    }
    if report.judged.iter().any(|judged| judged.base_runs == 1 || judged.head_runs == 1) {
        lines.push(format!(
            "one process run on a side: ±{:.0}% is assumed for what differs between runs; more runs tell it: after each further \
             `cargo bench`, `kernelgate baseline add {}` on the old code, `kernelgate gate --last COUNT` on the new",
            100.0 * report.policy.single_run,
            report.baseline
        ));
    }
    for line in lines {
        let _ = write!(out, "\n{bullet}{line}");
    }
    out.push('\n');
}

/// "CASE", or "CASE and 3 more".
fn in_short(cases: &[String]) -> String {
    match cases {
        [only] => only.clone(),
        [first, more @ ..] => format!("{first} and {} more", more.len()),
        [] => String::new(),
    }
}

/// "LABEL: CASE", for the first of many.
fn first_of(cases: &[String], label: &str) -> Vec<String> {
    const SHOWN: usize = 20;
    let mut lines: Vec<String> = cases.iter().take(SHOWN).map(|case| format!("{label}: {case}")).collect();
    if cases.len() > SHOWN {
        lines.push(format!("{label}: {} more", cases.len() - SHOWN));
    }
    lines
}
