//! Report texts of `kernelgate gate`: the baseline and its age, the spread between runs, and cases
//! that did not run.

use std::collections::BTreeSet;

use super::summary::{self, UnjudgedEntry, UnjudgedKind};
use super::verdicts::{VerdictReportTexts, labelled_lines_of_first_cases};
use crate::gate::baseline::{BaselineComparisonFacts, BaselineVerdicts};
use crate::gate::judgement::{BaselineRunEvidence, CaseJudgement, RunCountAndSpreadOfSide};
use crate::gate::ratio_interval::SourceOfAssumedSpread;

impl VerdictReportTexts for BaselineComparisonFacts {
    const JUDGING_COMMAND: &'static str = "kernelgate gate";
    const NAMES_OF_BASE_AND_HEAD: [&'static str; 2] = ["baseline", "run"];
    const SIDE_COLUMN_TITLES: [&'static str; 2] = ["baseline", "now"];
    const UNIT_OF_EVIDENCE_COLUMN: &'static str = "runs";
    const TABLE_COLUMNS_EXPLANATION: &'static [&'static str] = &[
        "interval: the worst that the ranges of the runs allow; runs: of the baseline, and judged",
    ];
    const FAILED_CASE_LABEL: &'static str = "failed";
    const SKIPPED_CASE_LABEL: &'static str = "skipped, in the baseline";

    fn base_head_and_device_line(report: &BaselineVerdicts) -> String {
        format!("{}, on {}", describe_baseline_and_age(&report.facts), report.device)
    }

    fn table_rows_on_base_head_and_device(
        report: &BaselineVerdicts,
    ) -> Vec<(&'static str, String)> {
        let spreads = report.judged_cases.iter().flat_map(|judged| {
            let sides =
                judged.baseline_run_evidence().map(|runs| [runs.base.spread, runs.head.spread]);
            let spreads = sides.into_iter().flatten().flatten();
            spreads.map(|spread| (judged.case.as_str(), spread)).collect::<Vec<_>>()
        });
        let noise = summary::noise_floor_sentence("runs of one side are", spreads);
        let mut facts = vec![
            ("base", describe_baseline_and_age(&report.facts)),
            ("head", report.facts.head_commits.join(", ")),
            ("on", report.device.clone()),
        ];
        facts.extend(noise.map(|words| ("noise floor", words)));
        facts
    }

    // If any device differs between baseline and run, all cases get the wider threshold of
    // `other_device`.
    fn threshold_in_percent(report: &BaselineVerdicts) -> f64 {
        let same_device = report.facts.other_device.is_none();
        100.0 * report.facts.policy.relative_threshold(same_device)
    }

    fn headline_if_all_is_refused(report: &BaselineVerdicts) -> Option<String> {
        let mut fields: Vec<_> = report.refused.iter().map(|it| it.field.as_str()).collect();
        fields.dedup();
        let fields = fields.join(", ");
        let words = format!("Refused: not comparable with the baseline (differing: {fields})");
        (!report.refused.is_empty()).then_some(words)
    }

    fn further_headline_parts(&self) -> String {
        let interrupted =
            if self.interrupted.is_empty() { "" } else { "; the run was interrupted" };
        let missing = if self.missing_shards.is_empty() { "" } else { "; shards are missing" };
        format!("{interrupted}{missing}")
    }

    fn advice_for_more_seeds(&self, seeds: usize) -> String {
        format!(
            "{seeds} seeds would decide: `kernelgate verify --seeds {seeds}` with this code, and \
             with the baseline's before `kernelgate baseline add {}`",
            self.baseline
        )
    }

    fn advice_for_inconclusive_cases(_: &BaselineVerdicts, _: &[&CaseJudgement]) -> String {
        "; more runs judged, or `kernelgate compare`, would decide".to_owned()
    }

    fn entries_for_cases_without_times(report: &BaselineVerdicts) -> Vec<UnjudgedEntry> {
        let facts = &report.facts;
        let bench = |bench: &String, why: &str| {
            UnjudgedEntry::unjudged_with_reason(
                &format!("bench {bench}"),
                UnjudgedKind::Failed,
                why,
            )
        };
        let why = "interrupted: did not get to its end";
        let interrupted = facts.interrupted.iter().map(|name| bench(name, why));
        let missing = facts.missing_shards.iter().map(|shard| bench(shard, "missing"));
        let not_run = facts.not_run.iter().map(|case| {
            UnjudgedEntry::unjudged_with_reason(
                case,
                UnjudgedKind::Skipped,
                "in the baseline, not run",
            )
        });
        interrupted.chain(missing).chain(not_run).collect()
    }

    fn notes_on_unmeasured_cases(&self) -> Vec<String> {
        let interrupted =
            |bench: &String| format!("interrupted: bench `{bench}` did not get to its end");
        let missing = |shard: &String| format!("missing: {shard}, whose cases are not judged");
        let mut lines: Vec<String> = self.interrupted.iter().map(interrupted).collect();
        lines.extend(self.missing_shards.iter().map(missing));
        lines.extend(labelled_lines_of_first_cases(
            &self.own,
            "compared with itself, the baseline was saved from it",
        ));
        lines
    }

    fn report_notes_after_others(report: &BaselineVerdicts) -> Vec<String> {
        let BaselineComparisonFacts { policy, other_device, .. } = &report.facts;
        let most = |side: fn(&BaselineRunEvidence) -> RunCountAndSpreadOfSide| {
            runs_of_judged_cases(report).map(|it| side(it).contention).fold(0.0, f64::max)
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
        lines.extend(single_run_spread_notes(report));
        let cards: BTreeSet<&String> =
            runs_of_judged_cases(report).filter_map(|it| it.card.as_ref()).collect();
        if !cards.is_empty() {
            let cases = runs_of_judged_cases(report).filter(|it| it.card.is_some()).count();
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
                100.0 * policy.tolerance_between_devices,
                100.0 * policy.relative_threshold(false),
                100.0 * policy.relative_threshold(true)
            )
        }));
        lines
    }

    fn lines_that_need_no_action(report: &BaselineVerdicts) -> Vec<String> {
        let mut lines = labelled_lines_of_first_cases(
            &report.unverified_cases,
            "unverified, only its time is compared",
        );
        lines.extend(labelled_lines_of_first_cases(&report.new_cases, "new, not judged"));
        lines.extend(labelled_lines_of_first_cases(
            &report.facts.not_run,
            "in the baseline, not run",
        ));
        lines
    }
}

/// For each judged case, the process runs of the baseline and of the judged run.
fn runs_of_judged_cases(report: &BaselineVerdicts) -> impl Iterator<Item = &BaselineRunEvidence> {
    report.judged_cases.iter().filter_map(CaseJudgement::baseline_run_evidence)
}

/// Describes the baseline: "baseline `main` of 1a2b3c4d, recorded 2026-11-21, 12 days and 34
/// commits ago".
fn describe_baseline_and_age(report: &BaselineComparisonFacts) -> String {
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

/// Report lines on cases with only one process run: the assumed spread between runs, and how to
/// measure the spread.
fn single_run_spread_notes(report: &BaselineVerdicts) -> Vec<String> {
    let mut lines = Vec::new();
    let given = |side: fn(&BaselineRunEvidence) -> RunCountAndSpreadOfSide,
                 from: SourceOfAssumedSpread| {
        let singles = runs_of_judged_cases(report).filter_map(|runs| side(runs).single_run_spread);
        singles.filter(|single| single.from == from).map(|single| single.relative).reduce(f64::max)
    };
    let (base, head) =
        (|runs: &BaselineRunEvidence| runs.base, |runs: &BaselineRunEvidence| runs.head);
    if given(base, SourceOfAssumedSpread::Assumed).is_some() {
        lines.push(format!(
            "the baseline has one process run of a case: how its runs differ is unknown, and a \
             difference of more than {:.1}% that the allowance for that could explain is \
             inconclusive: `kernelgate baseline save {} --runs 5` on the old code records enough, \
             `kernelgate baseline add` adds the last run",
            BaselineComparisonFacts::threshold_in_percent(report),
            report.facts.baseline
        ));
    }
    if let Some(most) = given(base, SourceOfAssumedSpread::EarlierRuns) {
        lines.push(format!(
            "one process run in the baseline: given up to ±{:.1}%, as the several runs differed \
             that it replaced",
            100.0 * most
        ));
    }
    for (side, what) in [
        (base as fn(&BaselineRunEvidence) -> RunCountAndSpreadOfSide, "in the baseline"),
        (head, "judged"),
    ] {
        if let Some(most) = given(side, SourceOfAssumedSpread::Calibration) {
            lines.push(format!(
                "one process run {what}: given up to ±{:.1}%, as processes differed in the \
                 calibration of this device",
                100.0 * most
            ));
        }
    }
    if given(head, SourceOfAssumedSpread::Assumed).is_some() {
        lines.push(format!(
            "one process run is judged: ±{:.0}% is assumed for the difference between runs; after \
             more of `cargo bench`, `kernelgate gate --last COUNT` shows it",
            100.0 * report.facts.policy.single_run
        ));
    }
    lines
}
