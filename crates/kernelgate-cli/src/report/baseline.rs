//! Texts of `gate`: the baseline and its age, the difference between runs, cases that did not run.

use std::collections::BTreeSet;

use super::summary::{self, UnjudgedEntry, UnjudgedKind};
use super::verdicts::{VerdictWording, lines_for_first_cases};
use crate::gate::baseline::{BaselineFacts, GateReport};
use crate::gate::judgement::{Judgement, RunEvidence, SideRunCounts};
use crate::gate::ratio_interval::SpreadSource;

impl VerdictWording for BaselineFacts {
    const METHOD_COMMAND: &'static str = "kernelgate gate";
    const SIDE_NAMES: [&'static str; 2] = ["baseline", "run"];
    const SIDE_COLUMNS: [&'static str; 2] = ["baseline", "now"];
    const EVIDENCE_UNIT: &'static str = "runs";
    const ROW_EXPLANATION: &'static [&'static str] = &[
        "interval: the worst that the ranges of the runs allow; runs: of the baseline, and judged",
    ];
    const FAILED_LABEL: &'static str = "failed";
    const SKIPPED_LABEL: &'static str = "skipped, in the baseline";

    fn heading(report: &GateReport) -> String {
        format!("{}, on {}", baseline_words(&report.facts), report.device)
    }

    fn facts(report: &GateReport) -> Vec<(&'static str, String)> {
        let spreads = report.judged.iter().flat_map(|judged| {
            let sides = judged.runs().map(|runs| [runs.base.spread, runs.head.spread]);
            let spreads = sides.into_iter().flatten().flatten();
            spreads.map(|spread| (judged.case.as_str(), spread)).collect::<Vec<_>>()
        });
        let noise = summary::noise_floor_text("runs of one side are", spreads);
        let mut facts = vec![
            ("base", baseline_words(&report.facts)),
            ("head", report.facts.head_commits.join(", ")),
            ("on", report.device.clone()),
        ];
        facts.extend(noise.map(|words| ("noise floor", words)));
        facts
    }

    // The wider threshold counts as soon as any device differs.
    fn threshold_percent(report: &GateReport) -> f64 {
        let same_device = report.facts.other_device.is_none();
        100.0 * report.facts.policy.relative_for_device(same_device)
    }

    fn refusal(report: &GateReport) -> Option<String> {
        let mut fields: Vec<_> = report.refused.iter().map(|it| it.field.as_str()).collect();
        fields.dedup();
        let fields = fields.join(", ");
        let words = format!("Refused: not comparable with the baseline (differing: {fields})");
        (!report.refused.is_empty()).then_some(words)
    }

    fn more_headline_parts(&self) -> String {
        let interrupted =
            if self.interrupted.is_empty() { "" } else { "; the run was interrupted" };
        let missing = if self.missing_shards.is_empty() { "" } else { "; shards are missing" };
        format!("{interrupted}{missing}")
    }

    fn more_seeds_advice(&self, seeds: usize) -> String {
        format!(
            "{seeds} seeds would decide: `kernelgate verify --seeds {seeds}` with this code, and \
             with the baseline's before `kernelgate baseline add {}`",
            self.baseline
        )
    }

    fn remedy(_: &GateReport, _: &[&Judgement]) -> String {
        "; more runs judged, or `kernelgate compare`, would decide".to_owned()
    }

    fn others(report: &GateReport) -> Vec<UnjudgedEntry> {
        let facts = &report.facts;
        let bench = |bench: &String, why: &str| {
            UnjudgedEntry::new(&format!("bench {bench}"), UnjudgedKind::Failed, why)
        };
        let why = "interrupted: did not get to its end";
        let interrupted = facts.interrupted.iter().map(|name| bench(name, why));
        let missing = facts.missing_shards.iter().map(|shard| bench(shard, "missing"));
        let not_run = facts.not_run.iter().map(|case| {
            UnjudgedEntry::new(case, UnjudgedKind::Skipped, "in the baseline, not run")
        });
        interrupted.chain(missing).chain(not_run).collect()
    }

    fn notes_on_unmeasured(&self) -> Vec<String> {
        let interrupted =
            |bench: &String| format!("interrupted: bench `{bench}` did not get to its end");
        let missing = |shard: &String| format!("missing: {shard}, whose cases are not judged");
        let mut lines: Vec<String> = self.interrupted.iter().map(interrupted).collect();
        lines.extend(self.missing_shards.iter().map(missing));
        lines.extend(lines_for_first_cases(
            &self.own,
            "compared with itself, the baseline was saved from it",
        ));
        lines
    }

    fn last_note_lines(report: &GateReport) -> Vec<String> {
        let BaselineFacts { policy, other_device, .. } = &report.facts;
        let most = |side: fn(&RunEvidence) -> SideRunCounts| {
            judged_runs(report).map(|it| side(it).contention).fold(0.0, f64::max)
        };
        let (base, head) = (most(|runs| runs.base), most(|runs| runs.head));
        let mut lines = Vec::new();
        if base.max(head) > policy.contention {
            lines.push(format!(
                "warning: co-running processes took up to {:.0}% of the CPU time during the run \
                 and {:.0}% during the baseline's: measure on an idle machine",
                100.0 * head,
                100.0 * base
            ));
        }
        if report.facts.unsealed {
            lines.push(format!(
                "the file of the baseline `{}` has no checksum: an edit of it is not noticed; \
                 `kernelgate baseline seal FILE` takes it as it is",
                report.facts.baseline
            ));
        }
        lines.extend(single_run_allowances(report));
        let cards: BTreeSet<&String> =
            judged_runs(report).filter_map(|it| it.card.as_ref()).collect();
        if !cards.is_empty() {
            let cases = judged_runs(report).filter(|it| it.card.is_some()).count();
            let cards = cards.into_iter().cloned().collect::<Vec<_>>().join(", ");
            lines.push(format!(
                "{cases} cases are compared on a card that both sides share ({cards}), without \
                 their runs on other cards"
            ));
        }
        lines.extend(other_device.as_ref().map(|(base, head)| {
            format!(
                "not known to be the same device ({base} in the baseline, {head} in the run): two \
                 of one model may differ by {:.0}%, so that the threshold is {:.1}% in place of \
                 {:.1}%",
                100.0 * policy.other_device,
                100.0 * policy.relative_for_device(false),
                100.0 * policy.relative_for_device(true)
            )
        }));
        lines
    }

    fn details(report: &GateReport) -> Vec<String> {
        let mut lines =
            lines_for_first_cases(&report.unverified, "unverified, only its time is compared");
        lines.extend(lines_for_first_cases(&report.new, "new, not judged"));
        lines.extend(lines_for_first_cases(&report.facts.not_run, "in the baseline, not run"));
        lines
    }
}

/// The process runs of each judged case.
fn judged_runs(report: &GateReport) -> impl Iterator<Item = &RunEvidence> {
    report.judged.iter().filter_map(Judgement::runs)
}

/// The baseline in words: "baseline `main` of 1a2b3c4d, recorded 2026-11-21, 12 days and 34 commits
/// ago".
fn baseline_words(report: &BaselineFacts) -> String {
    let commits = if report.base_commits.is_empty() {
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
    format!("baseline `{}`{commits}{}", report.baseline, age.unwrap_or_default())
}

/// Notes on the spread assumed for cases with a single run, and how to measure it.
fn single_run_allowances(report: &GateReport) -> Vec<String> {
    let mut lines = Vec::new();
    let given = |side: fn(&RunEvidence) -> SideRunCounts, from: SpreadSource| {
        let singles = judged_runs(report).filter_map(|runs| side(runs).single);
        singles.filter(|single| single.from == from).map(|single| single.relative).reduce(f64::max)
    };
    let (base, head) = (|runs: &RunEvidence| runs.base, |runs: &RunEvidence| runs.head);
    if given(base, SpreadSource::Assumed).is_some() {
        lines.push(format!(
            "the baseline has one process run of a case: how its runs differ is unknown, and a \
             difference of more than {:.1}% that the allowance for that could explain is \
             inconclusive: `kernelgate baseline save {} --runs 5` on the old code records enough, \
             `kernelgate baseline add` adds the last run",
            BaselineFacts::threshold_percent(report),
            report.facts.baseline
        ));
    }
    if let Some(most) = given(base, SpreadSource::EarlierRuns) {
        lines.push(format!(
            "one process run in the baseline: given up to ±{:.1}%, as the several runs differed \
             that it replaced",
            100.0 * most
        ));
    }
    for (side, what) in
        [(base as fn(&RunEvidence) -> SideRunCounts, "in the baseline"), (head, "judged")]
    {
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
            "one process run is judged: ±{:.0}% is assumed for the difference between runs; after \
             more of `cargo bench`, `kernelgate gate --last COUNT` shows it",
            100.0 * report.facts.policy.single_run
        ));
    }
    lines
}
