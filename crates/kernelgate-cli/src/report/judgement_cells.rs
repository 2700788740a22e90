//! Texts of the table cells of one judged case.

use crate::gate::judgement::{CaseJudgement, JudgementEvidence};
use kernelgate::display::time_text;

/// The time of a case in the base build, "1.254 ms", or "-" if the case was not timed.
pub fn base_time_cell(judged: &CaseJudgement) -> String {
    cell_or_dash_if_untimed(judged, |judged| time_text(judged.base_launch_ns))
}

/// The time of a case in the head build, "1.254 ms", or "-" if the case was not timed.
pub fn head_time_cell(judged: &CaseJudgement) -> String {
    cell_or_dash_if_untimed(judged, |judged| time_text(judged.head_launch_ns))
}

/// The relative change of a case's time from base to head, "+25.3%", or "-" if the case was not
/// timed.
pub fn time_change_cell(judged: &CaseJudgement) -> String {
    cell_or_dash_if_untimed(judged, |judged| ratio_as_percent_change(judged.ratio.estimated_ratio))
}

/// The confidence interval of the relative change of time, "+24.9% … +25.8%", or "-" if the case
/// was not timed.
pub fn time_change_interval_cell(judged: &CaseJudgement) -> String {
    cell_or_dash_if_untimed(judged, |judged| {
        format!(
            "{} … {}",
            ratio_as_percent_change(judged.ratio.ratio_low),
            ratio_as_percent_change(judged.ratio.ratio_high)
        )
    })
}

/// The smallest relative change of time that the measurement could detect, "1.3%", or "-" if
/// unknown.
pub fn detectable_change_cell(judged: &CaseJudgement) -> String {
    judged
        .detectable_change
        .map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", 100.0 * share))
}

/// p value of the hypothesis that the case is not slower than the threshold; `None` if the verdict
/// does not come from pairs of processes.
pub fn p_value_of_not_slower(judged: &CaseJudgement) -> Option<f64> {
    judged
        .paired_evidence()
        .map(|pairs| &pairs.first_round_decision)
        .filter(|it| it.usable_pairs > 0)
        .map(|it| it.p_value_of_not_slower)
}

/// The p value of a judged case as text, "0.0012" or "< 0.0001", or "-" if there was no test.
pub fn p_value_cell(judged: &CaseJudgement) -> String {
    match p_value_of_not_slower(judged) {
        None => "-".to_owned(),
        Some(p) if p < 1e-4 => "< 0.0001".to_owned(),
        Some(p) => format!("{p:.4}"),
    }
}

/// The amount of evidence: "12 + 16" pairs of processes in two rounds, or "5:3" process runs of
/// base and head.
pub fn evidence_count_cell(judged: &CaseJudgement) -> String {
    match &judged.evidence {
        JudgementEvidence::Runs(runs) => format!("{}:{}", runs.base.run_count, runs.head.run_count),
        JudgementEvidence::Pairs(pairs) => match &pairs.second_round_decision {
            Some(second) => {
                format!("{} + {}", pairs.first_round_decision.usable_pairs, second.usable_pairs)
            }
            None => pairs.first_round_decision.usable_pairs.to_string(),
        },
    }
}

/// A ratio of times as a relative change: 1.253 is "+25.3%"; an infinite ratio is "∞".
pub fn ratio_as_percent_change(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:+.1}%", 100.0 * (ratio - 1.0)) } else { "∞".to_owned() }
}

fn cell_or_dash_if_untimed(
    judged: &CaseJudgement,
    cell: impl Fn(&CaseJudgement) -> String,
) -> String {
    if judged.has_times() { cell(judged) } else { "-".to_owned() }
}
