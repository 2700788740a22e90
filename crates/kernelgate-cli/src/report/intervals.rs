//! Changes with their intervals as lines of text, for a comment without pictures.

use super::judgement_cells;
use crate::gate::judgement::Judgement;
use crate::gate::verdict::Verdict;
use kernelgate::display::table::shortened_text;

const INTERVAL_DRAWING_COLUMNS: usize = 41;
/// Largest number of columns of a case's id. The interval is the last column, so that a reader has
/// to scroll only for its end, and no two cases look alike.
const MAX_CASE_ID_COLUMNS: usize = 160;
/// Largest number of lines.
const MAX_INTERVAL_ROWS: usize = 12;
/// Smallest change to either side that the drawing covers.
const MIN_DRAWN_CHANGE: f64 = 0.02;

/// Draws the intervals of timed cases: regressed cases, then the largest changes; `None` if no case
/// was timed. `<` and `>` mark ends of an interval that lie outside the drawing.
pub fn interval_plot(rows: &[Judgement]) -> Option<String> {
    let mut timed: Vec<&Judgement> = rows.iter().filter(|row| row.is_timed()).collect();
    let size = |row: &Judgement| (row.ratio.center - 1.0).abs();
    timed.sort_by(|a, b| {
        let rank = |row: &Judgement| row.verdict != Verdict::Regressed;
        rank(a).cmp(&rank(b)).then(size(b).total_cmp(&size(a)))
    });
    let left_out = timed.len().saturating_sub(MAX_INTERVAL_ROWS);
    timed.truncate(MAX_INTERVAL_ROWS);
    let widest = timed.iter().map(|row| size(row)).fold(0.0, f64::max);
    let end = (1.5 * widest).max(MIN_DRAWN_CHANGE);
    let label = |share: f64| format!("{:+.1}%", 100.0 * share);
    let (low, high) = (label(-end), label(end));
    // The label "0" stands above the middle of the drawing.
    let (left, right) = (
        INTERVAL_DRAWING_COLUMNS / 2 - low.len(),
        INTERVAL_DRAWING_COLUMNS - INTERVAL_DRAWING_COLUMNS / 2 - 1 - high.len(),
    );
    let head = format!("{low}{:left$}0{:right$}{high}", "", "");
    let lines = timed.iter().map(|row| interval_line(row, end));
    let more = (left_out > 0).then(|| format!("and {left_out} more cases"));
    let all: Vec<String> = [head].into_iter().chain(lines).chain(more).collect();
    (!timed.is_empty()).then(|| all.join("\n"))
}

fn interval_line(row: &Judgement, end: f64) -> String {
    let middle = INTERVAL_DRAWING_COLUMNS / 2;
    // The column of a ratio; values outside, also infinite ones, are drawn at the ends.
    let column = |ratio: f64| {
        let share = ((ratio - 1.0) / end).clamp(-1.0, 1.0);
        (middle as f64 + share * middle as f64).round() as usize
    };
    let mut field = vec![' '; INTERVAL_DRAWING_COLUMNS];
    field[middle] = '|';
    let (low, high) = (column(row.ratio.low), column(row.ratio.high));
    field[low..=high].fill('-');
    if row.ratio.low < 1.0 - end {
        field[low] = '<';
    }
    if row.ratio.high > 1.0 + end {
        field[high] = '>';
    }
    field[column(row.ratio.center)] = 'o';
    let field: String = field.into_iter().collect();
    format!(
        "{field} {:>8}  {}",
        judgement_cells::change(row),
        shortened_text(&row.case, MAX_CASE_ID_COLUMNS)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::judgement::tests::timed;
    use crate::gate::ratio_interval::TimeRatio;

    fn row(case: &str, verdict: Verdict, (low, center, high): (f64, f64, f64)) -> Judgement {
        timed(case, verdict, TimeRatio { center, low, high })
    }

    #[test]
    fn an_interval_is_drawn_on_its_side_of_no_change() {
        let long = format!("family/operation/{}/cuda/x/hot", "n".repeat(80));
        let drawn = interval_plot(&[
            row("a/improved", Verdict::Improved, (0.88, 0.9, 0.92)),
            row(&long, Verdict::Regressed, (1.02, 1.04, 1.06)),
            row("a/wide", Verdict::Inconclusive, (0.0, 1.0, f64::INFINITY)),
        ])
        .unwrap();
        let lines: Vec<Vec<char>> = drawn.lines().map(|line| line.chars().collect()).collect();
        let at = |line: usize| lines[line].iter().position(|c| *c == 'o').unwrap();
        // The regressed case comes first, with its whole id.
        assert!(drawn.lines().nth(1).unwrap().ends_with(&long), "{drawn}");
        assert!(at(1) > 20 && at(2) < 20, "{drawn}");
        assert_eq!(at(3), 20, "{drawn}");
        assert!(lines[3].contains(&'<') && lines[3].contains(&'>'), "{drawn}");
        assert_eq!(lines[0][20], '0', "{drawn}");
    }

    #[test]
    fn long_lists_are_cut_with_a_count_and_an_empty_list_gives_no_text() {
        let unchanged = |i: usize| row(&format!("a/{i}"), Verdict::Unchanged, (0.99, 1.0, 1.01));
        let drawn = interval_plot(&(0..50).map(unchanged).collect::<Vec<_>>()).unwrap();
        assert_eq!(drawn.lines().count(), MAX_INTERVAL_ROWS + 2);
        assert_eq!(drawn.lines().last(), Some("and 38 more cases"), "{drawn}");
        let unmeasured = Judgement { base_ns: 0.0, ..unchanged(0) };
        assert_eq!(interval_plot(&[unmeasured]), None);
    }
}
