//! Draws the relative changes of cases with their intervals as lines of characters, for
//! pull-request comments without pictures.

use super::judgement_cells;
use crate::gate::judgement::CaseJudgement;
use crate::gate::verdict::VerdictOnCase;
use kernelgate::display::table::shorten_in_the_middle_to;

const INTERVAL_PLOT_COLUMNS: usize = 41;
/// Largest number of characters of a case's id in the plot of intervals. The case id is the last
/// part of a line of the plot, so only the end of a long id needs scrolling; 160 characters suffice
/// to distinguish ids.
const MAX_CASE_ID_CHARACTERS: usize = 160;
/// Largest number of cases in the text plot, one on each line.
const MAX_CASES_IN_INTERVAL_PLOT: usize = 12;
/// Smallest relative change that the plot covers on each side of 0 (0.02 is 2 %).
const MIN_PLOTTED_RELATIVE_CHANGE: f64 = 0.02;

/// Draws the intervals of timed cases as text: first regressed cases, then other cases from the
/// largest change to the smallest; `None` if no case was timed. `<` and `>` mark ends of an
/// interval that lie outside the plotted range.
pub fn intervals_text_plot(rows: &[CaseJudgement]) -> Option<String> {
    let mut timed: Vec<&CaseJudgement> = rows.iter().filter(|row| row.has_times()).collect();
    let size = |row: &CaseJudgement| (row.ratio.estimated_ratio - 1.0).abs();
    timed.sort_by(|a, b| {
        let rank = |row: &CaseJudgement| row.verdict != VerdictOnCase::Regressed;
        rank(a).cmp(&rank(b)).then(size(b).total_cmp(&size(a)))
    });
    let left_out = timed.len().saturating_sub(MAX_CASES_IN_INTERVAL_PLOT);
    timed.truncate(MAX_CASES_IN_INTERVAL_PLOT);
    let widest = timed.iter().map(|row| size(row)).fold(0.0, f64::max);
    let end = (1.5 * widest).max(MIN_PLOTTED_RELATIVE_CHANGE);
    let label = |share: f64| format!("{:+.1}%", 100.0 * share);
    let (low, high) = (label(-end), label(end));
    // The label "0" stands above the middle column of the plot.
    let (left, right) = (
        INTERVAL_PLOT_COLUMNS / 2 - low.len(),
        INTERVAL_PLOT_COLUMNS - INTERVAL_PLOT_COLUMNS / 2 - 1 - high.len(),
    );
    let head = format!("{low}{:left$}0{:right$}{high}", "", "");
    let lines = timed.iter().map(|row| interval_as_text_line(row, end));
    let more = (left_out > 0).then(|| format!("and {left_out} more cases"));
    let all: Vec<String> = [head].into_iter().chain(lines).chain(more).collect();
    (!timed.is_empty()).then(|| all.join("\n"))
}

fn interval_as_text_line(row: &CaseJudgement, end: f64) -> String {
    let middle = INTERVAL_PLOT_COLUMNS / 2;
    // Plot column of a time ratio; ratios outside the plotted range, also infinite ones, are drawn
    // at its ends.
    let column = |ratio: f64| {
        let share = ((ratio - 1.0) / end).clamp(-1.0, 1.0);
        (middle as f64 + share * middle as f64).round() as usize
    };
    let mut field = vec![' '; INTERVAL_PLOT_COLUMNS];
    field[middle] = '|';
    let (low, high) = (column(row.ratio.ratio_low), column(row.ratio.ratio_high));
    field[low..=high].fill('-');
    if row.ratio.ratio_low < 1.0 - end {
        field[low] = '<';
    }
    if row.ratio.ratio_high > 1.0 + end {
        field[high] = '>';
    }
    field[column(row.ratio.estimated_ratio)] = 'o';
    let field: String = field.into_iter().collect();
    format!(
        "{field} {:>8}  {}",
        judgement_cells::time_change_cell(row),
        shorten_in_the_middle_to(&row.case_id, MAX_CASE_ID_CHARACTERS)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::judgement::tests::test_judgement_with_ratio;
    use crate::gate::ratio_interval::TimeRatioWithInterval;

    fn judgement_with_interval(
        case: &str,
        verdict: VerdictOnCase,
        (low, center, high): (f64, f64, f64),
    ) -> CaseJudgement {
        test_judgement_with_ratio(
            case,
            verdict,
            TimeRatioWithInterval { estimated_ratio: center, ratio_low: low, ratio_high: high },
        )
    }

    #[test]
    fn an_interval_is_drawn_left_of_no_change_if_faster() {
        let long = format!("family/operation/{}/cuda/x/hot", "n".repeat(80));
        let drawn = intervals_text_plot(&[
            judgement_with_interval("a/improved", VerdictOnCase::Improved, (0.88, 0.9, 0.92)),
            judgement_with_interval(&long, VerdictOnCase::Regressed, (1.02, 1.04, 1.06)),
            judgement_with_interval(
                "a/wide",
                VerdictOnCase::Inconclusive,
                (0.0, 1.0, f64::INFINITY),
            ),
        ])
        .unwrap();
        let lines: Vec<Vec<char>> = drawn.lines().map(|line| line.chars().collect()).collect();
        let at = |line: usize| lines[line].iter().position(|c| *c == 'o').unwrap();
        // The regressed case comes first in the list, with its whole case id.
        assert!(drawn.lines().nth(1).unwrap().ends_with(&long), "{drawn}");
        assert!(at(1) > 20 && at(2) < 20, "{drawn}");
        assert_eq!(at(3), 20, "{drawn}");
        assert!(lines[3].contains(&'<') && lines[3].contains(&'>'), "{drawn}");
        assert_eq!(lines[0][20], '0', "{drawn}");
    }

    #[test]
    fn the_plot_counts_cases_beyond_its_limit_and_is_none_without_cases() {
        let unchanged = |i: usize| {
            judgement_with_interval(&format!("a/{i}"), VerdictOnCase::Unchanged, (0.99, 1.0, 1.01))
        };
        let drawn = intervals_text_plot(&(0..50).map(unchanged).collect::<Vec<_>>()).unwrap();
        assert_eq!(drawn.lines().count(), MAX_CASES_IN_INTERVAL_PLOT + 2);
        assert_eq!(drawn.lines().last(), Some("and 38 more cases"), "{drawn}");
        let unmeasured = CaseJudgement { base_launch_ns: 0.0, ..unchanged(0) };
        assert_eq!(intervals_text_plot(&[unmeasured]), None);
    }
}
