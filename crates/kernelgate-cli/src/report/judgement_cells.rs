//! A judgement of a case as cells of a table.

use crate::gate::judgement::{Judgement, JudgementEvidence};
use kernelgate::display::time_text;

/// The time of the base, "1.254 ms", or "-" without a time.
pub fn base_time_cell(judged: &Judgement) -> String {
    cell_if_timed(judged, |judged| time_text(judged.base_ns))
}

/// The time of the head, or "-" without a time.
pub fn head(judged: &Judgement) -> String {
    cell_if_timed(judged, |judged| time_text(judged.head_ns))
}

/// The change, "+25.3%", or "-" without times.
pub fn change(judged: &Judgement) -> String {
    cell_if_timed(judged, |judged| percent(judged.ratio.center))
}

/// The interval of the change, "+24.9% … +25.8%", or "-" without times.
pub fn interval(judged: &Judgement) -> String {
    cell_if_timed(judged, |judged| {
        format!("{} … {}", percent(judged.ratio.low), percent(judged.ratio.high))
    })
}

/// The detectable change, "1.3%", or "-" if nothing is detectable.
pub fn detectable(judged: &Judgement) -> String {
    judged.detectable.map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", 100.0 * share))
}

/// p value of "not slower than the threshold"; `None` without a test.
pub fn p_value_of_slower(judged: &Judgement) -> Option<f64> {
    judged.pairs().map(|pairs| &pairs.decision).filter(|it| it.pairs > 0).map(|it| it.p_slower)
}

/// The p value, "0.0012", "< 0.0001", or "-" without a test.
pub fn p(judged: &Judgement) -> String {
    match p_value_of_slower(judged) {
        None => "-".to_owned(),
        Some(p) if p < 1e-4 => "< 0.0001".to_owned(),
        Some(p) => format!("{p:.4}"),
    }
}

/// The evidence: "12 + 16" pairs of both rounds, "5:3" runs of base and head.
pub fn evidence(judged: &Judgement) -> String {
    match &judged.evidence {
        JudgementEvidence::Runs(runs) => format!("{}:{}", runs.base.runs, runs.head.runs),
        JudgementEvidence::Pairs(pairs) => match &pairs.confirmation {
            Some(second) => format!("{} + {}", pairs.decision.pairs, second.pairs),
            None => pairs.decision.pairs.to_string(),
        },
    }
}

/// Text of a relative change: "+25.3%"; "∞" if it has no bound.
pub fn percent(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:+.1}%", 100.0 * (ratio - 1.0)) } else { "∞".to_owned() }
}

fn cell_if_timed(judged: &Judgement, cell: impl Fn(&Judgement) -> String) -> String {
    if judged.is_timed() { cell(judged) } else { "-".to_owned() }
}
