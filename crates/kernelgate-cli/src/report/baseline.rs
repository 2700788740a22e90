//! Report texts of `kernelgate gate`: the baseline and its age, the spread between runs, and cases
//! that did not run.

use std::collections::BTreeSet;

use super::summary::{self, UnjudgedEntry, UnjudgedReasonKind};
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
        format!("{}, on {}", describe_baseline_and_age(&report.method_facts), report.device)
    }

    fn table_rows_on_base_head_and_device(
        report: &BaselineVerdicts,
    ) -> Vec<(&'static str, String)> {
        let spreads = report.judged_cases.iter().flat_map(|judged| {
            let sides = judged
                .baseline_run_evidence()
                .map(|runs| [runs.base.relative_half_range, runs.head.relative_half_range]);
            let spreads = sides.into_iter().flatten().flatten();
            spreads.map(|spread| (judged.case_id.as_str(), spread)).collect::<Vec<_>>()
        });
        let noise = summary::noise_floor_sentence("runs of one side are", spreads);
        let mut facts = vec![
            ("base", describe_baseline_and_age(&report.method_facts)),
            ("head", report.method_facts.judged_commits.join(", ")),
            ("on", report.device.clone()),
        ];
        facts.extend(noise.map(|words| ("noise floor", words)));
        facts
    }

    // If any device differs between baseline and run, all cases get the wider threshold of
    // `other_device`.
    fn regression_threshold_percent(report: &BaselineVerdicts) -> f64 {
        let same_device = report.method_facts.baseline_and_run_device.is_none();
        100.0 * report.method_facts.policy.relative_threshold(same_device)
    }

    fn headline_if_sides_are_not_comparable(report: &BaselineVerdicts) -> Option<String> {
        let mut fields: Vec<_> =
            report.refused.iter().map(|it| it.differing_field.as_str()).collect();
        fields.dedup();
        let fields = fields.join(", ");
        let words = format!("Refused: not comparable with the baseline (differing: {fields})");
        (!report.refused.is_empty()).then_some(words)
    }

    fn further_headline_parts(&self) -> String {
        let interrupted =
            if self.interrupted_benches.is_empty() { "" } else { "; the run was interrupted" };
        let missing = if self.missing_shards.is_empty() { "" } else { "; shards are missing" };
        format!("{interrupted}{missing}")
    }

    fn advice_to_verify_with_seeds(&self, seeds: usize) -> String {
        format!(
            "{seeds} seeds would decide: `kernelgate verify --seeds {seeds}` with this code, and \
             with the baseline's before `kernelgate baseline add {}`",
            self.baseline_name
        )
    }

    fn advice_for_inconclusive_cases(_: &BaselineVerdicts, _: &[&CaseJudgement]) -> String {
        "; more runs judged, or `kernelgate compare`, would decide".to_owned()
    }

    fn entries_for_cases_without_times(report: &BaselineVerdicts) -> Vec<UnjudgedEntry> {
        let facts = &report.method_facts;
        let bench = |bench: &String, why: &str| {
            UnjudgedEntry::unjudged_with_reason(
                &format!("bench {bench}"),
                UnjudgedReasonKind::WrongOutputOrBenchFailed,
                why,
            )
        };
        let why = "interrupted: did not get to its end";
        let interrupted = facts.interrupted_benches.iter().map(|name| bench(name, why));
        let missing = facts.missing_shards.iter().map(|shard| bench(shard, "missing"));
        let not_run = facts.baseline_cases_not_run.iter().map(|case| {
            UnjudgedEntry::unjudged_with_reason(
                case,
                UnjudgedReasonKind::NotTimedOnBothSides,
                "in the baseline, not run",
            )
        });
        interrupted.chain(missing).chain(not_run).collect()
    }

    fn notes_on_unmeasured_cases(&self) -> Vec<String> {
        let interrupted =
            |bench: &String| format!("interrupted: bench `{bench}` did not get to its end");
        let missing = |shard: &String| format!("missing: {shard}, whose cases are not judged");
        let mut lines: Vec<String> = self.interrupted_benches.iter().map(interrupted).collect();
        lines.extend(self.missing_shards.iter().map(missing));
        lines.extend(labelled_lines_of_first_cases(
            &self.runs_compared_with_themselves,
            "compared with itself, the baseline was saved from it",
        ));
        lines
    }

    fn report_notes_after_others(report: &BaselineVerdicts) -> Vec<String> {
        let BaselineComparisonFacts { policy, baseline_and_run_device: other_device, .. } =
            &report.method_facts;
        let most = |side: fn(&BaselineRunEvidence) -> RunCountAndSpreadOfSide| {
            runs_of_judged_cases(report).map(|it| side(it).cpu_contention_share).fold(0.0, f64::max)
        };
        let (base, head) = (most(|runs| runs.base), most(|runs| runs.head));
        let mut lines = Vec::new();
        if base.max(head) > policy.max_contention_without_warning {
            lines.push(format!(
                "warning: co-running processes took up to {:.0}% of the CPU time during the run \
                 and {:.0}% during the baseline's: measure on an idle machine",
                100.0 * head,
                100.0 * base
            ));
        }
        if report.method_facts.baseline_lacks_checksum {
            lines.push(format!(
                "the file of the baseline `{}` has no checksum: an edit of it is not noticed; \
                 `kernelgate baseline seal FILE` takes it as it is",
                report.method_facts.baseline_name
            ));
        }
        lines.extend(single_run_spread_notes(report));
        let cards: BTreeSet<&String> =
            runs_of_judged_cases(report).filter_map(|it| it.compared_card.as_ref()).collect();
        if !cards.is_empty() {
            let cases =
                runs_of_judged_cases(report).filter(|it| it.compared_card.is_some()).count();
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
                100.0 * policy.relative_time_tolerance_between_devices,
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
            &report.method_facts.baseline_cases_not_run,
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
    let commits = if report.baseline_commits.is_empty() {
        String::new()
    } else {
        format!(" of {}", report.baseline_commits.join(", "))
    };
    let age = report.staleness.as_ref().map(|age| {
        let counted = |count: Option<i64>, unit: &str| {
            count.map(
                |count| if count == 1 { format!("1 {unit}") } else { format!("{count} {unit}s") },
            )
        };
        let commits = age.commits_since_oldest_run.and_then(|commits| i64::try_from(commits).ok());
        let ago: Vec<String> =
            [counted(age.days_since_oldest_run, "day"), counted(commits, "commit")]
                .into_iter()
                .flatten()
                .collect();
        let ago =
            if ago.is_empty() { String::new() } else { format!(", {} ago", ago.join(" and ")) };
        format!(
            ", recorded {}{ago}",
            age.oldest_run_start_time.get(..10).unwrap_or(&age.oldest_run_start_time)
        )
    });
    format!("baseline `{}`{commits}{}", report.baseline_name, age.unwrap_or_default())
}

/// Report lines on cases with only one process run: the assumed spread between runs, and how to
/// measure the spread.
fn single_run_spread_notes(report: &BaselineVerdicts) -> Vec<String> {
    let mut lines = Vec::new();
    let given = |side: fn(&BaselineRunEvidence) -> RunCountAndSpreadOfSide,
                 from: SourceOfAssumedSpread| {
        let singles = runs_of_judged_cases(report).filter_map(|runs| side(runs).single_run_spread);
        singles
            .filter(|single| single.from == from)
            .map(|single| single.relative_half_width)
            .reduce(f64::max)
    };
    let (base, head) =
        (|runs: &BaselineRunEvidence| runs.base, |runs: &BaselineRunEvidence| runs.head);
    if given(base, SourceOfAssumedSpread::AssumedWithoutMeasurement).is_some() {
        lines.push(format!(
            "the baseline has one process run of a case: how its runs differ is unknown, and a \
             difference of more than {:.1}% that the allowance for that could explain is \
             inconclusive: `kernelgate baseline save {} --runs 5` on the old code records enough, \
             `kernelgate baseline add` adds the last run",
            BaselineComparisonFacts::regression_threshold_percent(report),
            report.method_facts.baseline_name
        ));
    }
    if let Some(most) = given(base, SourceOfAssumedSpread::EarlierCodeRuns) {
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
        if let Some(most) = given(side, SourceOfAssumedSpread::DeviceCalibration) {
            lines.push(format!(
                "one process run {what}: given up to ±{:.1}%, as processes differed in the \
                 calibration of this device",
                100.0 * most
            ));
        }
    }
    if given(head, SourceOfAssumedSpread::AssumedWithoutMeasurement).is_some() {
        lines.push(format!(
            "one process run is judged: ±{:.0}% is assumed for the difference between runs; after \
             more of `cargo bench`, `kernelgate gate --last COUNT` shows it",
            100.0 * report.method_facts.policy.assumed_single_run_spread
        ));
    }
    lines
}
