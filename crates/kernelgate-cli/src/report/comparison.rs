//! Texts of `compare`: both builds, cases that were not timed with the reason, changes in code.

use std::collections::BTreeMap;
use std::time::Duration;

use super::summary::{self, UnjudgedEntry, UnjudgedKind};
use super::verdicts::{VerdictWording, cases_with_reason, lines_for_first_cases};
use crate::gate::comparison::{BuildFacts, Comparison, CriterionOnlyBench};
use crate::gate::judgement::Judgement;
use crate::gate::kernels::code::ComparedKernels;
use crate::gate::paired::{Arm, PairedDecision};
use crate::gate::rules::RemovedCasesMeaning;
use kernelgate::display::duration;
use kernelgate::record::text::indent_lines;
use kernelgate_cuda::CaseFailure;

/// Label of a case that the base alone got wrong.
const FAILED_IN_BASE: &str = "failed in the base, not judged";

/// A note on the unit of the times of benches that use Criterion alone.
const CRITERION_UNIT_NOTE: &str = "times of Criterion's benches are nanoseconds, unless a bench sets a \
                    measurement of its own: its store does not say";

/// Largest number of code changes that are listed one by one.
const MAX_NAMED_CODE_CHANGES: usize = 20;

impl VerdictWording for BuildFacts {
    const METHOD_COMMAND: &'static str = "kernelgate compare";
    const SIDE_NAMES: [&'static str; 2] = ["base", "head"];
    const SIDE_COLUMNS: [&'static str; 2] = Self::SIDE_NAMES;
    const EVIDENCE_UNIT: &'static str = "pairs";
    const ROW_EXPLANATION: &'static [&'static str] = &[
        "interval: 95 %; p: of \"not slower than the threshold\", over all cases and interim \
         analyses; pairs: of the first round + of the second, which must agree before anything is \
         called slower",
        "change: the median over pairs of processes that ran one after the other, not of the two \
         times; a block is four processes, two pairs",
    ];
    const FAILED_LABEL: &'static str = "failed in the head";
    const SKIPPED_LABEL: &'static str = "skipped in the head, timed in the base";

    // A bench whose executables are the same file on both sides cannot have changed.
    fn first_line(comparison: &Comparison) -> Option<String> {
        let untimed = comparison.facts.untimed.len();
        (untimed > 0).then(|| {
            let which = match comparison.judged.is_empty() {
                true => "the two builds are the same file, byte by byte".to_owned(),
                false => {
                    format!("{} is the same file in both", comparison.facts.identical.join(", "))
                }
            };
            let cases = if untimed == 1 { "case was" } else { "cases were" };
            format!("{which}: {untimed} {cases} not timed (--time-identical times all the same)")
        })
    }

    fn identical_executable_cases(&self) -> usize {
        self.untimed.len()
    }

    fn heading(comparison: &Comparison) -> String {
        let (facts, device) = (&comparison.facts, &comparison.device);
        let on = if device.is_empty() { String::new() } else { format!(", on {device}") };
        format!("base {}, head {}{on}", facts.base, facts.head)
    }

    fn facts(comparison: &Comparison) -> Vec<(&'static str, String)> {
        let Self { base, head, rounds, budget_s, .. } = &comparison.facts;
        let mut facts = vec![("base", base.clone()), ("head", head.clone())];
        facts.push(("on", comparison.device.clone()));
        facts.extend(noise_floor(comparison).map(|words| ("noise floor", words)));
        facts.extend(clock_line(comparison).map(|words| ("SM clock", words)));
        let blocks: usize = rounds.iter().map(|round| round.blocks).sum();
        let wall_s: f64 = rounds.iter().map(|round| round.wall_s).sum();
        facts.push((
            "took",
            format!("{blocks} blocks of four processes, {wall_s:.0} s of {budget_s:.0} s a round"),
        ));
        facts
    }

    fn threshold_percent(comparison: &Comparison) -> f64 {
        100.0 * comparison.limits.relative.value
    }

    fn more_headline_parts(&self) -> String {
        let removed = match self.removed.len() {
            0 => String::new(),
            count => format!("; {count} removed"),
        };
        let broke = |side: Arm| match self.abandoned_benches(side).len() {
            0 => String::new(),
            1 => format!("; 1 bench broke in the {side}"),
            count => format!("; {count} benches broke in the {side}"),
        };
        broke(Arm::Head) + &broke(Arm::Base) + &removed
    }

    fn more_seeds_advice(&self, seeds: usize) -> String {
        format!("{seeds} seeds would decide, for which the time did not suffice")
    }

    /// Estimated time of the additional pairs that would decide these cases, at the cost of the
    /// pairs so far.
    fn remedy(comparison: &Comparison, cases: &[&Judgement]) -> String {
        fn decision<'a>(judged: &&'a Judgement) -> Option<&'a PairedDecision> {
            Some(&judged.pairs()?.decision)
        }
        let pairs: usize =
            comparison.judged.iter().filter_map(|it| Some(decision(&it)?.pairs)).sum();
        let Some(round) = comparison.facts.rounds.first().filter(|_| pairs > 0) else {
            return String::new();
        };
        let more = |it: &PairedDecision| Some(it.pairs_needed?.saturating_sub(it.pairs));
        let more: Vec<usize> = cases.iter().filter_map(decision).filter_map(more).collect();
        if more.is_empty() {
            return String::new();
        }
        let seconds = more.iter().sum::<usize>() as f64 * round.wall_s / pairs as f64;
        let time = duration::duration_text(Duration::from_secs_f64(seconds.clamp(1.0, 1e9)));
        format!("; about {time} more would settle {}", if more.len() == 1 { "it" } else { "them" })
    }

    fn others(comparison: &Comparison) -> Vec<UnjudgedEntry> {
        let (facts, rules) = (&comparison.facts, &comparison.rules);
        let kind = match rules.removed {
            RemovedCasesMeaning::Fail => UnjudgedKind::Failed,
            RemovedCasesMeaning::Inconclusive | RemovedCasesMeaning::Ignore => {
                UnjudgedKind::Skipped
            }
        };
        let removed = facts.removed.iter().map(|case| match rules.accepts_removed(case) {
            true => UnjudgedEntry::new(case, UnjudgedKind::Skipped, "removed, as accepted"),
            false => UnjudgedEntry::new(case, kind, "removed"),
        });
        let left_alone = facts.left_alone.iter().map(|(bench, why)| {
            let why = format!("left alone: {why}");
            UnjudgedEntry::new(&format!("bench {bench}"), UnjudgedKind::Skipped, why)
        });
        let failed = |(case, why): (&String, &CaseFailure)| {
            UnjudgedEntry::failed_entry(case, UnjudgedKind::Skipped, FAILED_IN_BASE, why)
        };
        let abandoned = facts.broken.iter().filter(|broken| broken.abandoned).map(|broken| {
            let kind = match broken.side {
                Arm::Head => UnjudgedKind::Failed,
                Arm::Base => UnjudgedKind::Skipped,
            };
            let why = format!("broke in the {}: {}", broken.side, broken.reason);
            UnjudgedEntry::new(&format!("bench {}", broken.bench), kind, why)
        });
        let missing = facts
            .missing_shards
            .iter()
            .map(|shard| UnjudgedEntry::new(shard, UnjudgedKind::Failed, "missing"));
        let unmeasured = facts.failed_in_base.iter().map(failed).chain(abandoned).chain(missing);
        unmeasured.chain(removed).chain(left_alone).collect()
    }

    fn first_note_lines(comparison: &Comparison) -> Vec<String> {
        let facts = &comparison.facts;
        let mut lines: Vec<String> = facts
            .explanations
            .iter()
            .map(|(case, why)| format!("{case}: {}", why.words()))
            .collect();
        lines.extend(unaffected_cases_note(facts));
        lines.extend(lines_for_first_cases(&facts.removed, "removed"));
        lines
    }

    fn notes_on_unmeasured(&self) -> Vec<String> {
        let mut lines = cases_with_reason(&self.failed_in_base, FAILED_IN_BASE);
        lines.extend(self.broken.iter().map(|broken| {
            let so = if broken.abandoned { "; its undecided cases were abandoned" } else { "" };
            let reason = indent_lines(&broken.reason);
            format!("broke: {} of the {}: {reason}{so}", broken.bench, broken.side)
        }));
        let missing = |shard: &String| format!("missing: {shard}, whose cases are not judged");
        lines.extend(self.missing_shards.iter().map(missing));
        lines
    }

    fn last_note_lines(comparison: &Comparison) -> Vec<String> {
        let Self { delays, optimised, .. } = &comparison.facts;
        let delayed = |delays: &String| {
            format!("DELAYED on purpose, the head's launches, nanoseconds: {delays}")
        };
        let warning = "warning: built without optimisation; times mean nothing".to_owned();
        delays.iter().map(delayed).chain((!optimised).then_some(warning)).collect()
    }

    fn details(comparison: &Comparison) -> Vec<String> {
        let facts = &comparison.facts;
        let mut lines = code_lines(comparison);
        lines.extend(facts.criterion.iter().map(CriterionOnlyBench::words));
        if !facts.criterion.is_empty() {
            lines.push(CRITERION_UNIT_NOTE.to_owned());
        }
        let left_alone: Vec<String> =
            facts.left_alone.iter().map(|(bench, why)| format!("{bench}: {why}")).collect();
        for (cases, label) in [
            (&comparison.unverified, "unverified, only its time is compared"),
            (&comparison.new, "new, not judged"),
            (&left_alone, "bench left alone"),
            (&facts.identical, "the same executable on both sides, byte by byte"),
        ] {
            lines.extend(lines_for_first_cases(cases, label));
        }
        lines.extend(facts.calibration.clone());
        lines.extend(facts.rounds.iter().enumerate().map(|(round, facts)| {
            format!(
                "round {}: {} blocks, {} processes, {:.0} s",
                round + 1,
                facts.blocks,
                facts.processes,
                facts.wall_s
            )
        }));
        lines
    }
}

/// The decision of the first round for each case.
fn paired_decisions(comparison: &Comparison) -> impl Iterator<Item = &PairedDecision> {
    comparison.judged.iter().filter_map(|judged| Some(&judged.pairs()?.decision))
}

/// Spread of processes of one build: the interval of the null pairs.
fn noise_floor(comparison: &Comparison) -> Option<String> {
    let widths = paired_decisions(comparison).map(|decision| {
        let width = (decision.null.high - decision.null.low) / 2.0;
        (decision.case.as_str(), width)
    });
    summary::noise_floor_text("a build against itself is", widths)
}

/// The change of the head's SM clock relative to the base's, if it was read: the change in cycles
/// over the change in time.
fn clock_line(comparison: &Comparison) -> Option<String> {
    let shifts = paired_decisions(comparison)
        .filter_map(|decision| Some(decision.cycles?.center / decision.ratio.center));
    let furthest = shifts
        .filter(|shift| shift.is_finite())
        .max_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()))?;
    Some(format!(
        "the head's was within {:.2}% of the base's in every case",
        100.0 * (furthest - 1.0).abs()
    ))
}

/// Differences in machine code and launches between the builds, each with the cases that use it;
/// empty if no bench lists its kernels.
fn code_lines(comparison: &Comparison) -> Vec<String> {
    let listed: Vec<_> = comparison.facts.code.iter().filter(|(_, code)| code.is_known()).collect();
    let mut by_change: BTreeMap<String, Vec<&String>> = BTreeMap::new();
    for (case, code) in &listed {
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
    let more = lines.len().saturating_sub(MAX_NAMED_CODE_CHANGES);
    lines.truncate(MAX_NAMED_CODE_CHANGES);
    lines.extend((more > 0).then(|| format!("code or launches changed: {more} more kernels")));
    if !listed.is_empty() {
        let changed = listed.iter().filter(|(_, code)| code.has_changed()).count();
        let all = comparison.judged.len() + comparison.facts.unaffected.len();
        lines.push(format!(
            "machine code: other code or launches in {changed} of {all} cases, the same in {}, not \
             known of {}; code of the host is not compared",
            listed.len() - changed,
            all.saturating_sub(listed.len())
        ));
    }
    lines
}

/// The kernels that differ for an architecture.
pub fn kernels(compared: &ComparedKernels) -> Vec<String> {
    let ComparedKernels { arch, same, changed, not_compared } = compared;
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

/// Cases that `--affected` did not time, and the changes that this cannot exclude.
fn unaffected_cases_note(facts: &BuildFacts) -> Option<String> {
    let count = facts.unaffected.len();
    let cases = if count == 1 { "case" } else { "cases" };
    (count > 0).then(|| {
        format!(
            "--affected: {count} {cases} with the same machine code and launches verified and not \
             timed; what the host does for them may have changed all the same"
        )
    })
}
