//! Report texts of `kernelgate compare`: both builds, the reason why cases were not timed, and
//! changes in machine code.

use std::collections::BTreeMap;
use std::time::Duration;

use super::summary::{self, UnjudgedEntry, UnjudgedReasonKind};
use super::verdicts::{
    VerdictReportTexts, labelled_cases_with_reasons, labelled_lines_of_first_cases,
};
use crate::gate::comparison::{BuildComparisonFacts, Comparison, CriterionOnlyBench};
use crate::gate::judgement::CaseJudgement;
use crate::gate::kernels::code::ArchitectureKernelComparison;
use crate::gate::paired::{ComparedArm, PairedDecisionOnCase};
use crate::gate::rules::RemovedCasesEffect;
use kernelgate::display::duration;
use kernelgate::record::text::indent_every_line;
use kernelgate_cuda::CaseFailureReason;

/// Label of a case whose output is wrong in the base build but correct in the head build.
const FAILED_IN_BASE_LABEL: &str = "failed in the base, not judged";

/// Report note on the time unit of benches that use Criterion alone, without kernelgate.
const CRITERION_UNIT_NOTE: &str = "times of Criterion's benches are nanoseconds, unless a bench sets a \
                    measurement of its own: its store does not say";

/// Largest number of machine-code changes that the report lists.
const MAX_LISTED_CODE_CHANGES: usize = 20;

impl VerdictReportTexts for BuildComparisonFacts {
    const JUDGING_COMMAND: &'static str = "kernelgate compare";
    const NAMES_OF_BASE_AND_HEAD: [&'static str; 2] = ["base", "head"];
    const SIDE_COLUMN_TITLES: [&'static str; 2] = Self::NAMES_OF_BASE_AND_HEAD;
    const UNIT_OF_EVIDENCE_COLUMN: &'static str = "pairs";
    const TABLE_COLUMNS_EXPLANATION: &'static [&'static str] = &[
        "interval: 95 %; p: of \"not slower than the threshold\", over all cases and interim \
         analyses; pairs: of the first round + of the second, which must agree before anything is \
         called slower",
        "change: the median over pairs of processes that ran one after the other, not of the two \
         times; a block is four processes, two pairs",
    ];
    const FAILED_CASE_LABEL: &'static str = "failed in the head";
    const SKIPPED_CASE_LABEL: &'static str = "skipped in the head, timed in the base";

    // If the executables of a bench are equal byte by byte in base and head, its cases were not
    // timed, which the first line reports.
    fn line_on_identical_executables(comparison: &Comparison) -> Option<String> {
        let untimed = comparison.method_facts.cases_with_identical_executable.len();
        (untimed > 0).then(|| {
            let which = match comparison.judged_cases.is_empty() {
                true => "the two builds are the same file, byte by byte".to_owned(),
                false => {
                    format!(
                        "{} is the same file in both",
                        comparison.method_facts.benches_with_identical_executables.join(", ")
                    )
                }
            };
            let cases = if untimed == 1 { "case was" } else { "cases were" };
            format!("{which}: {untimed} {cases} not timed (--time-identical times all the same)")
        })
    }

    fn count_cases_with_identical_executables(&self) -> usize {
        self.cases_with_identical_executable.len()
    }

    fn base_head_and_device_line(comparison: &Comparison) -> String {
        let (facts, device) = (&comparison.method_facts, &comparison.device);
        let on = if device.is_empty() { String::new() } else { format!(", on {device}") };
        format!("base {}, head {}{on}", facts.base_revision, facts.head_revision)
    }

    fn table_rows_on_base_head_and_device(comparison: &Comparison) -> Vec<(&'static str, String)> {
        let Self {
            base_revision: base, head_revision: head, rounds, round_budget_s: budget_s, ..
        } = &comparison.method_facts;
        let mut facts = vec![("base", base.clone()), ("head", head.clone())];
        facts.push(("on", comparison.device.clone()));
        facts.extend(
            noise_between_processes_of_one_build(comparison).map(|words| ("noise floor", words)),
        );
        facts.extend(sm_clock_difference_line(comparison).map(|words| ("SM clock", words)));
        let blocks: usize = rounds.iter().map(|round| round.most_trial_blocks).sum();
        let wall_s: f64 = rounds.iter().map(|round| round.total_process_wall_s).sum();
        facts.push((
            "took",
            format!("{blocks} blocks of four processes, {wall_s:.0} s of {budget_s:.0} s a round"),
        ));
        facts
    }

    fn regression_threshold_percent(comparison: &Comparison) -> f64 {
        100.0 * comparison.default_case_limits.relative_time_change_threshold.limit_value
    }

    fn further_headline_parts(&self) -> String {
        let removed = match self.removed_cases.len() {
            0 => String::new(),
            count => format!("; {count} removed"),
        };
        let broke = |side: ComparedArm| match self.benches_abandoned_on_side(side).len() {
            0 => String::new(),
            1 => format!("; 1 bench broke in the {side}"),
            count => format!("; {count} benches broke in the {side}"),
        };
        broke(ComparedArm::HeadBuild) + &broke(ComparedArm::BaseBuild) + &removed
    }

    fn advice_to_verify_with_seeds(&self, seeds: usize) -> String {
        format!("{seeds} seeds would decide, for which the time did not suffice")
    }

    /// Estimates how long the additional pairs of processes that would decide these inconclusive
    /// cases take, from the time per pair so far.
    fn advice_for_inconclusive_cases(comparison: &Comparison, cases: &[&CaseJudgement]) -> String {
        fn paired_decision_of_judgement<'a>(
            judged: &&'a CaseJudgement,
        ) -> Option<&'a PairedDecisionOnCase> {
            Some(&judged.paired_evidence()?.first_round_decision)
        }
        let pairs: usize = comparison
            .judged_cases
            .iter()
            .filter_map(|it| Some(paired_decision_of_judgement(&it)?.usable_pairs))
            .sum();
        let Some(round) = comparison.method_facts.rounds.first().filter(|_| pairs > 0) else {
            return String::new();
        };
        let more =
            |it: &PairedDecisionOnCase| Some(it.pairs_needed?.saturating_sub(it.usable_pairs));
        let more: Vec<usize> =
            cases.iter().filter_map(paired_decision_of_judgement).filter_map(more).collect();
        if more.is_empty() {
            return String::new();
        }
        let seconds = more.iter().sum::<usize>() as f64 * round.total_process_wall_s / pairs as f64;
        let time = duration::duration_text(Duration::from_secs_f64(seconds.clamp(1.0, 1e9)));
        format!("; about {time} more would settle {}", if more.len() == 1 { "it" } else { "them" })
    }

    fn entries_for_cases_without_times(comparison: &Comparison) -> Vec<UnjudgedEntry> {
        let (facts, rules) = (&comparison.method_facts, &comparison.rules);
        let kind = match rules.removed {
            RemovedCasesEffect::FailComparison => UnjudgedReasonKind::WrongOutputOrBenchFailed,
            RemovedCasesEffect::MakeInconclusive | RemovedCasesEffect::ListOnly => {
                UnjudgedReasonKind::NotTimedOnBothSides
            }
        };
        let removed =
            facts.removed_cases.iter().map(|case| match rules.accepts_removal_of_case(case) {
                true => UnjudgedEntry::unjudged_with_reason(
                    case,
                    UnjudgedReasonKind::NotTimedOnBothSides,
                    "removed, as accepted",
                ),
                false => UnjudgedEntry::unjudged_with_reason(case, kind, "removed"),
            });
        let left_alone = facts.unusable_benches.iter().map(|(bench, why)| {
            let why = format!("left alone: {why}");
            UnjudgedEntry::unjudged_with_reason(
                &format!("bench {bench}"),
                UnjudgedReasonKind::NotTimedOnBothSides,
                why,
            )
        });
        let failed = |(case, why): (&String, &CaseFailureReason)| {
            UnjudgedEntry::failed_case_entry(
                case,
                UnjudgedReasonKind::NotTimedOnBothSides,
                FAILED_IN_BASE_LABEL,
                why,
            )
        };
        let abandoned =
            facts.failed_processes.iter().filter(|broken| broken.bench_abandoned).map(|broken| {
                let kind = match broken.side {
                    ComparedArm::HeadBuild => UnjudgedReasonKind::WrongOutputOrBenchFailed,
                    ComparedArm::BaseBuild => UnjudgedReasonKind::NotTimedOnBothSides,
                };
                let why = format!("broke in the {}: {}", broken.side, broken.failure_reason);
                UnjudgedEntry::unjudged_with_reason(
                    &format!("bench {}", broken.bench_name),
                    kind,
                    why,
                )
            });
        let missing = facts.missing_shards.iter().map(|shard| {
            UnjudgedEntry::unjudged_with_reason(
                shard,
                UnjudgedReasonKind::WrongOutputOrBenchFailed,
                "missing",
            )
        });
        let unmeasured = facts.failed_in_base.iter().map(failed).chain(abandoned).chain(missing);
        unmeasured.chain(removed).chain(left_alone).collect()
    }

    fn report_notes_before_others(comparison: &Comparison) -> Vec<String> {
        let facts = &comparison.method_facts;
        let mut lines: Vec<String> = facts
            .explanations
            .iter()
            .map(|(case, why)| format!("{case}: {}", why.explanation_text()))
            .collect();
        lines.extend(note_on_cases_with_unchanged_code(facts));
        lines.extend(labelled_lines_of_first_cases(&facts.removed_cases, "removed"));
        lines
    }

    fn notes_on_unmeasured_cases(&self) -> Vec<String> {
        let mut lines = labelled_cases_with_reasons(&self.failed_in_base, FAILED_IN_BASE_LABEL);
        lines.extend(self.failed_processes.iter().map(|broken| {
            let so =
                if broken.bench_abandoned { "; its undecided cases were abandoned" } else { "" };
            let reason = indent_every_line(&broken.failure_reason);
            format!("broke: {} of the {}: {reason}{so}", broken.bench_name, broken.side)
        }));
        let missing = |shard: &String| format!("missing: {shard}, whose cases are not judged");
        lines.extend(self.missing_shards.iter().map(missing));
        lines
    }

    fn report_notes_after_others(comparison: &Comparison) -> Vec<String> {
        let Self { injected_delays_text: delays, optimised_build: optimised, .. } =
            &comparison.method_facts;
        let delayed = |delays: &String| {
            format!("DELAYED on purpose, the head's launches, nanoseconds: {delays}")
        };
        let warning = "warning: built without optimisation; times mean nothing".to_owned();
        delays.iter().map(delayed).chain((!optimised).then_some(warning)).collect()
    }

    fn lines_that_need_no_action(comparison: &Comparison) -> Vec<String> {
        let facts = &comparison.method_facts;
        let mut lines = machine_code_change_lines(comparison);
        lines.extend(facts.criterion_benches.iter().map(CriterionOnlyBench::describe_cost));
        if !facts.criterion_benches.is_empty() {
            lines.push(CRITERION_UNIT_NOTE.to_owned());
        }
        let left_alone: Vec<String> =
            facts.unusable_benches.iter().map(|(bench, why)| format!("{bench}: {why}")).collect();
        for (cases, label) in [
            (&comparison.unverified_cases, "unverified, only its time is compared"),
            (&comparison.new_cases, "new, not judged"),
            (&left_alone, "bench left alone"),
            (
                &facts.benches_with_identical_executables,
                "the same executable on both sides, byte by byte",
            ),
        ] {
            lines.extend(labelled_lines_of_first_cases(cases, label));
        }
        lines.extend(facts.calibration_description.clone());
        lines.extend(facts.rounds.iter().enumerate().map(|(round, facts)| {
            format!(
                "round {}: {} blocks, {} processes, {:.0} s",
                round + 1,
                facts.most_trial_blocks,
                facts.process_count,
                facts.total_process_wall_s
            )
        }));
        lines
    }
}

/// For each judged case, the decision from the pairs of the first measuring round.
fn first_round_decisions(comparison: &Comparison) -> impl Iterator<Item = &PairedDecisionOnCase> {
    comparison
        .judged_cases
        .iter()
        .filter_map(|judged| Some(&judged.paired_evidence()?.first_round_decision))
}

/// Spread between processes of the same build, without any change of code: half the interval of the
/// null pairs, as a line of the report.
fn noise_between_processes_of_one_build(comparison: &Comparison) -> Option<String> {
    let widths = first_round_decisions(comparison).map(|decision| {
        let width =
            (decision.null_pair_ratio.ratio_high - decision.null_pair_ratio.ratio_low) / 2.0;
        (decision.case_id.as_str(), width)
    });
    summary::noise_floor_sentence("a build against itself is", widths)
}

/// Report line on how far the head's SM clock differed from the base's: change in cycles over
/// change in time; `None` if cycles were not measured.
fn sm_clock_difference_line(comparison: &Comparison) -> Option<String> {
    let shifts = first_round_decisions(comparison).filter_map(|decision| {
        Some(decision.cycle_ratio?.estimated_ratio / decision.ratio.estimated_ratio)
    });
    let furthest = shifts
        .filter(|shift| shift.is_finite())
        .max_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()))?;
    Some(format!(
        "the head's was within {:.2}% of the base's in every case",
        100.0 * (furthest - 1.0).abs()
    ))
}

/// Report lines on differences in GPU machine code and launches between the builds, each with the
/// cases that use the changed kernel; empty if no bench lists its kernels.
fn machine_code_change_lines(comparison: &Comparison) -> Vec<String> {
    let listed: Vec<_> = comparison
        .method_facts
        .kernel_comparisons_by_case
        .iter()
        .filter(|(_, code)| code.are_all_kernels_comparable())
        .collect();
    let mut by_change: BTreeMap<String, Vec<&String>> = BTreeMap::new();
    for (case, code) in &listed {
        for (what, changes) in
            [("code", &code.code_difference_lines), ("launches", &code.launch_difference_lines)]
        {
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
    let more = lines.len().saturating_sub(MAX_LISTED_CODE_CHANGES);
    lines.truncate(MAX_LISTED_CODE_CHANGES);
    lines.extend((more > 0).then(|| format!("code or launches changed: {more} more kernels")));
    if !listed.is_empty() {
        let changed = listed.iter().filter(|(_, code)| code.has_code_or_launches_changed()).count();
        let all = comparison.judged_cases.len() + comparison.method_facts.unaffected_cases.len();
        lines.push(format!(
            "machine code: other code or launches in {changed} of {all} cases, the same in {}, not \
             known of {}; code of the host is not compared",
            listed.len() - changed,
            all.saturating_sub(listed.len())
        ));
    }
    lines
}

/// Report lines on the kernels whose machine code for one architecture differs between the two
/// builds, and on those that could not be compared.
pub fn changed_kernel_lines(compared: &ArchitectureKernelComparison) -> Vec<String> {
    let ArchitectureKernelComparison {
        gpu_architecture: arch,
        identical_kernels: same,
        kernel_differences: changed,
        benches_not_compared: not_compared,
    } = compared;
    let differ = changed.len();
    let how_many = match (differ + same, not_compared.is_empty()) {
        (0, true) => "none compared, as no bench lists one".to_owned(),
        (0, false) => "none compared".to_owned(),
        (all, _) => format!("{differ} of {all} differ"),
    };
    let changed = changed.iter().map(|(kernel, what)| format!("{arch}: {kernel}: {what}"));
    let not = not_compared.iter().map(|(what, why)| format!("{arch}: {what} not compared: {why}"));
    [format!("kernels for {arch}: {how_many}")].into_iter().chain(changed).chain(not).collect()
}

/// Report line on the number of cases that `--affected` did not time because their machine code and
/// launches are equal; changes of host code may still affect them.
fn note_on_cases_with_unchanged_code(facts: &BuildComparisonFacts) -> Option<String> {
    let count = facts.unaffected_cases.len();
    let cases = if count == 1 { "case" } else { "cases" };
    (count > 0).then(|| {
        format!(
            "--affected: {count} {cases} with the same machine code and launches verified and not \
             timed; what the host does for them may have changed all the same"
        )
    })
}
