//! The gate's outcome as text and as a summary: headline, regressions first, each with its interval
//! and what could have been seen.

use std::fmt::Write as _;

use super::summary::{self, Findings, SummaryRow, Unjudged, UnjudgedKind, VerdictSummary};
use crate::gate::interval::{SingleRun, SpreadSource};
use crate::gate::{Doubt, GateReport, Judged};
use kernelgate::record::text::{indented, printable};

/// How to read the interval and the runs of a row.
const READING: &str =
    "interval: the worst that the ranges of the runs allow; runs: of the baseline, and judged";

/// For a terminal, of so many columns where it has a width.
pub fn text(report: &GateReport, columns: Option<usize>) -> String {
    let mut out = format!("{}, on {}\n", base(report), report.device);
    if !report.judged.is_empty() {
        let _ = writeln!(
            out,
            "\n{}",
            summary::table(report.judged.iter().map(row), ["baseline", "now"], "runs")
                .text_within(columns)
        );
        let _ = writeln!(out, "{READING}");
    }
    let lines = [notes(report), details(report)].concat();
    lines.iter().for_each(|line| out.extend(["\n", line]));
    let _ = write!(out, "{}\n{}", if lines.is_empty() { "" } else { "\n" }, headline(report));
    printable(&out).into_owned()
}

/// For reviewers and programs. `reproduce` is the command that holds the same at home.
pub fn summary(report: &GateReport, reproduce: &str) -> VerdictSummary {
    let mut facts = vec![
        ("base", base(report)),
        ("head", report.head_commits.join(", ")),
        ("on", report.device.clone()),
    ];
    facts.extend(noise_floor(report).map(|words| ("noise floor", words)));
    let mut others: Vec<Unjudged> = report
        .failed
        .iter()
        .map(|(case, error)| Unjudged::new(case, UnjudgedKind::Failed, format!("failed: {error}")))
        .collect();
    others.extend(findings(report).0);
    others.extend(summary::undecided(&report.rules));
    others.extend(Unjudged::refused(&report.refused, ["baseline", "run"]));
    let interrupted = |bench: &String| {
        Unjudged::new(
            &format!("bench {bench}"),
            UnjudgedKind::Failed,
            "interrupted: did not get to its end",
        )
    };
    others.extend(report.interrupted.iter().map(interrupted));
    let missing =
        |shard: &String| Unjudged::new(&format!("bench {shard}"), UnjudgedKind::Failed, "missing");
    others.extend(report.missing_shards.iter().map(missing));
    let skipped = |(case, reason): (&String, &String)| {
        Unjudged::new(case, UnjudgedKind::Skipped, format!("skipped, in the baseline: {reason}"))
    };
    others.extend(report.skipped.iter().map(skipped));
    others.extend(
        report.new.iter().map(|case| Unjudged::new(case, UnjudgedKind::Skipped, "new, not judged")),
    );
    others.extend(
        report
            .not_run
            .iter()
            .map(|case| Unjudged::new(case, UnjudgedKind::Skipped, "in the baseline, not run")),
    );
    if report.judged.is_empty() && others.is_empty() {
        others.push(Unjudged::new("gate", UnjudgedKind::Skipped, "nothing to judge"));
    }
    VerdictSummary {
        verb: "kernelgate gate",
        headline: headline(report),
        facts,
        rows: report.judged.iter().map(row).collect(),
        others,
        rules: report.rules.clone(),
        notes: notes(report),
        details: [vec![READING.to_owned()], details(report)].concat(),
        evidence: "runs",
        reproduce: reproduce.to_owned(),
    }
}

fn row(judged: &Judged) -> SummaryRow {
    SummaryRow {
        case: judged.case.clone(),
        verdict: judged.verdict,
        reason: judged.reason.map(|doubt| doubt.words().to_owned()),
        base_ns: judged.base_ns,
        head_ns: judged.head_ns,
        ratio: judged.ratio,
        detectable: Some(judged.detectable),
        p_slower: None,
        evidence: format!("{}:{}", judged.base_runs, judged.head_runs),
    }
}

/// "baseline `main` of 1a2b3c4d, recorded 2026-11-21, 12 days and 34 commits ago".
fn base(report: &GateReport) -> String {
    let of = if report.base_commits.is_empty() {
        String::new()
    } else {
        format!(" of {}", report.base_commits.join(", "))
    };
    let age = report.staleness.as_ref().map(|age| {
        let counted = |count: Option<i64>, unit: &str| {
            count.map(
                |count| if count == 1 { format!("1 {unit}") } else { format!("{count} {unit}s") },
            )
        };
        let commits = age.commits.and_then(|commits| i64::try_from(commits).ok());
        let ago: Vec<String> =
            [counted(age.days, "day"), counted(commits, "commit")].into_iter().flatten().collect();
        let ago =
            if ago.is_empty() { String::new() } else { format!(", {} ago", ago.join(" and ")) };
        format!(", recorded {}{ago}", age.recorded.get(..10).unwrap_or(&age.recorded))
    });
    format!("baseline `{}`{of}{}", report.baseline, age.unwrap_or_default())
}

/// What runs of one side differ by.
fn noise_floor(report: &GateReport) -> Option<String> {
    let spreads = report.judged.iter().flat_map(|judged| {
        [judged.base_spread, judged.head_spread]
            .into_iter()
            .flatten()
            .map(|spread| (judged.case.as_str(), spread))
    });
    summary::noise_floor("runs of one side are", spreads)
}

/// "1 regressed, 0 improved, 5 unchanged, 0 inconclusive of 6 (threshold 5 %)".
pub fn headline(report: &GateReport) -> String {
    if !report.refused.is_empty() {
        let mut fields: Vec<_> =
            report.refused.iter().map(|refusal| refusal.field.as_str()).collect();
        fields.dedup();
        return format!(
            "Refused: not comparable with the baseline (differing: {})",
            fields.join(", ")
        );
    }
    let counts = summary::counts(|verdict| report.count(verdict));
    let failed = if report.failed.is_empty() {
        String::new()
    } else {
        format!(", {} failed", report.failed.len())
    };
    let found = summary::found(besides_times(report));
    let skipped = match report.skipped.len() {
        0 => String::new(),
        count => format!("; {count} skipped"),
    };
    let interrupted = if report.interrupted.is_empty() { "" } else { "; the run was interrupted" };
    let missing = if report.missing_shards.is_empty() { "" } else { "; shards are missing" };
    let bounds = summary::not_judged(&report.rules);
    let (of, threshold) = (report.judged.len(), 100.0 * relative(report));
    format!(
        "{counts}{failed}{found} of {of} (threshold {threshold:.0}%){skipped}{interrupted}{missing}{bounds}"
    )
}

fn besides_times(report: &GateReport) -> Findings<'_> {
    let GateReport { verification, numerics, costs, .. } = report;
    Findings { verification, numerics, costs }
}

/// Cases that are verified less, cases that lost accuracy, and costs that grew.
fn findings(report: &GateReport) -> (Vec<Unjudged>, Vec<String>) {
    summary::findings(besides_times(report), |seeds| {
        format!(
            "{seeds} seeds would tell: `kernelgate verify --seeds {seeds}` with this code, and \
             with the baseline's before `kernelgate baseline add {}`",
            report.baseline
        )
    })
}

/// The relative threshold; the wider one as soon as any device differs.
fn relative(report: &GateReport) -> f64 {
    report.policy.relative_on(report.other_device.is_none())
}

fn notes(report: &GateReport) -> Vec<String> {
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
    let failed = |(case, error): (&String, &String)| format!("failed: {case}: {}", indented(error));
    lines.extend(report.failed.iter().map(failed));
    lines.extend(findings(report).1);
    lines.extend(
        report
            .interrupted
            .iter()
            .map(|bench| format!("interrupted: bench `{bench}` did not get to its end")),
    );
    let missing = |shard: &String| format!("missing: {shard}, whose cases are not judged");
    lines.extend(report.missing_shards.iter().map(missing));
    lines.extend(
        report
            .skipped
            .iter()
            .map(|(case, why)| format!("skipped, in the baseline: {case}: {}", indented(why))),
    );
    lines.extend(first_of(&report.own, "compared with itself, the baseline was saved from it"));
    if report.judged.is_empty() && report.refused.is_empty() {
        lines.push("nothing to judge: no case is both in the baseline and in the run".to_owned());
    }
    // A baseline of one run has a line of its own.
    use Doubt::{Clock, HostBound, Throttled, Undetectable, Wide};
    for doubt in [Wide, Undetectable, Throttled, Clock, HostBound] {
        let cases: Vec<String> = report
            .judged
            .iter()
            .filter(|judged| judged.reason == Some(doubt))
            .map(|judged| judged.case.clone())
            .collect();
        if !cases.is_empty() {
            lines.push(format!(
                "inconclusive: {}: {}; more runs judged, or `kernelgate compare`, would decide",
                doubt.words(),
                in_short(&cases)
            ));
        }
    }
    let contention = |side: fn(&Judged) -> f64| report.judged.iter().map(side).fold(0.0, f64::max);
    let (base, head) =
        (contention(|judged| judged.base_contention), contention(|judged| judged.head_contention));
    if base.max(head) > report.policy.contention {
        lines.push(format!(
            "warning: co-running processes took up to {:.0}% of the CPU time during the run and {:.0}% during \
             the baseline's: measure on an idle machine",
            100.0 * head,
            100.0 * base
        ));
    }
    lines.extend(report.rules.lines());
    lines.extend(single_runs(report));
    if let Some((base, head)) = &report.other_device {
        lines.push(format!(
            "not known to be the same device ({base} in the baseline, {head} in the run): two of \
             one model may differ by {:.0}%, so that the threshold is {:.1}% in place of {:.1}%",
            100.0 * report.policy.other_device,
            100.0 * report.policy.relative_on(false),
            100.0 * report.policy.relative
        ));
    }
    lines
}

/// What single runs were given for the difference between runs, and how to learn it.
fn single_runs(report: &GateReport) -> Vec<String> {
    let mut lines = Vec::new();
    let given = |side: fn(&Judged) -> Option<SingleRun>, from: SpreadSource| {
        let of = report.judged.iter().filter_map(side).filter(|single| single.from == from);
        of.map(|single| single.relative).reduce(f64::max)
    };
    let (base, head) = (|judged: &Judged| judged.base_single, |judged: &Judged| judged.head_single);
    if given(base, SpreadSource::Assumed).is_some() {
        lines.push(format!(
            "the baseline has one process run of a case: how its runs differ is unknown, and a \
             difference of more than {:.1}% that the allowance for that could explain is \
             inconclusive: `kernelgate baseline save {} --runs 5` on the old code records enough, \
             `kernelgate baseline add` adds the last run",
            100.0 * relative(report),
            report.baseline
        ));
    }
    if let Some(most) = given(base, SpreadSource::EarlierRuns) {
        lines.push(format!(
            "one process run in the baseline: given up to ±{:.1}%, as the several runs differed \
             that it replaced",
            100.0 * most
        ));
    }
    for (side, what) in [(base as fn(&Judged) -> _, "in the baseline"), (head, "judged")] {
        if let Some(most) = given(side, SpreadSource::Calibration) {
            lines.push(format!(
                "one process run {what}: given up to ±{:.1}%, as processes differed in the \
                 calibration of this device",
                100.0 * most
            ));
        }
    }
    if given(head, SpreadSource::Assumed).is_some() {
        lines.push(format!(
            "one process run is judged: ±{:.0}% is assumed for what differs between runs; after \
             more of `cargo bench`, `kernelgate gate --last COUNT` tells it",
            100.0 * report.policy.single_run
        ));
    }
    lines
}

/// What nobody needs to act on.
fn details(report: &GateReport) -> Vec<String> {
    let mut lines = first_of(&report.unverified, "unverified, only its time is compared");
    lines.extend(first_of(&report.new, "new, not judged"));
    lines.extend(first_of(&report.not_run, "in the baseline, not run"));
    lines
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
    let mut lines: Vec<String> =
        cases.iter().take(SHOWN).map(|case| format!("{label}: {case}")).collect();
    if cases.len() > SHOWN {
        lines.push(format!("{label}: {} more", cases.len() - SHOWN));
    }
    lines
}
