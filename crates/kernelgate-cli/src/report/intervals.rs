//! Changes with their intervals as lines of text, for a comment that can show no picture.

use super::cells;
use crate::gate::judgement::Judgement;
use crate::gate::verdict::Verdict;
use kernelgate::display::table::shortened;

/// Columns of the drawing.
const FIELD: usize = 41;
/// Most columns of a case's id. It stands last: what a reader has to scroll to is its end, and no
/// two cases look alike.
const ID: usize = 160;
/// Most lines.
const MAX_ROWS: usize = 12;
/// The drawing shows at least this change to either side.
const LEAST: f64 = 0.02;

/// Of the cases that have times the regressed ones, then those that changed most; nothing where there is none. `<` and `>` are ends that lie outside.
pub fn text(rows: &[Judgement]) -> Option<String> {
    let mut timed: Vec<&Judgement> = rows.iter().filter(|row| row.is_timed()).collect();
    let size = |row: &Judgement| (row.ratio.center - 1.0).abs();
    timed.sort_by(|a, b| {
        let rank = |row: &Judgement| row.verdict != Verdict::Regressed;
        rank(a).cmp(&rank(b)).then(size(b).total_cmp(&size(a)))
    });
    let left_out = timed.len().saturating_sub(MAX_ROWS);
    timed.truncate(MAX_ROWS);
    let widest = timed.iter().map(|row| size(row)).fold(0.0, f64::max);
    let end = (1.5 * widest).max(LEAST);
    let label = |share: f64| format!("{:+.1}%", 100.0 * share);
    let (low, high) = (label(-end), label(end));
    // The 0 stands above the middle of the field.
    let (left, right) = (FIELD / 2 - low.len(), FIELD - FIELD / 2 - 1 - high.len());
    let head = format!("{low}{:left$}0{:right$}{high}", "", "");
    let lines = timed.iter().map(|row| line(row, end));
    let more = (left_out > 0).then(|| format!("and {left_out} more cases"));
    let all: Vec<String> = [head].into_iter().chain(lines).chain(more).collect();
    (!timed.is_empty()).then(|| all.join("\n"))
}

fn line(row: &Judgement, end: f64) -> String {
    let middle = FIELD / 2;
    // The column of a ratio; infinity and what lies outside are ends.
    let column = |ratio: f64| {
        let share = ((ratio - 1.0) / end).clamp(-1.0, 1.0);
        (middle as f64 + share * middle as f64).round() as usize
    };
    let mut field = vec![' '; FIELD];
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
    format!("{field} {:>8}  {}", cells::change(row), shortened(&row.case, ID))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::interval::Ratio;
    use crate::gate::judgement::tests::timed;

    fn row(case: &str, verdict: Verdict, (low, center, high): (f64, f64, f64)) -> Judgement {
        timed(case, verdict, Ratio { center, low, high })
    }

    #[test]
    fn intervals_lie_on_their_side_of_no_change() {
        let long = format!("family/operation/{}/cuda/x/hot", "n".repeat(80));
        let drawn = text(&[
            row("a/improved", Verdict::Improved, (0.88, 0.9, 0.92)),
            row(&long, Verdict::Regressed, (1.02, 1.04, 1.06)),
            row("a/wide", Verdict::Inconclusive, (0.0, 1.0, f64::INFINITY)),
        ])
        .unwrap();
        let lines: Vec<Vec<char>> = drawn.lines().map(|line| line.chars().collect()).collect();
        let at = |line: usize| lines[line].iter().position(|c| *c == 'o').unwrap();
        // The regressed one comes first, with its whole id.
        assert!(drawn.lines().nth(1).unwrap().ends_with(&long), "{drawn}");
        assert!(at(1) > 20 && at(2) < 20, "{drawn}");
        assert_eq!(at(3), 20, "{drawn}");
        assert!(lines[3].contains(&'<') && lines[3].contains(&'>'), "{drawn}");
        assert_eq!(lines[0][20], '0', "{drawn}");
    }

    #[test]
    fn many_are_counted_and_none_is_nothing() {
        let of = |i: usize| row(&format!("a/{i}"), Verdict::Unchanged, (0.99, 1.0, 1.01));
        let drawn = text(&(0..50).map(of).collect::<Vec<_>>()).unwrap();
        assert_eq!(drawn.lines().count(), MAX_ROWS + 2);
        assert!(drawn.ends_with("and 38 more cases"), "{drawn}");
        let unmeasured = Judgement { base_ns: 0.0, ..of(0) };
        assert_eq!(text(&[unmeasured]), None);
    }
}
