//! Makes the comment for a pull request: headline and slower cases are visible, the rest is folded.
//! The comment is never longer than a forge allows.

use std::fmt::Write as _;

use crate::gate::judgement::Judgement;
use crate::gate::verdict::Verdict;
use crate::report::summary::VerdictSummary;
use crate::report::{intervals, judgement_cells};
use kernelgate::display::harmless_text::MarkdownText;
use kernelgate::display::table::TextTable;

/// Largest number of bytes of a comment. GitHub accepts 65,536 characters; the remainder is for
/// text that scripts add.
pub const MAX_COMMENT_BYTES: usize = 60_000;
/// Numbers of entries per list that are tried one after the other until the comment is short
/// enough.
const CASES_TO_TRY: [usize; 8] = [usize::MAX, 1000, 500, 200, 100, 50, 20, 5];
/// Largest number of characters of a line of notes.
const MAX_COMMENT_LINE: usize = 400;

/// The comment as Markdown.
pub fn markdown(summary: &VerdictSummary) -> String {
    for shown in CASES_TO_TRY {
        let text = comment_with_at_most(summary, shown);
        if text.len() <= MAX_COMMENT_BYTES {
            return text;
        }
    }
    let mut text = comment_with_at_most(summary, 1);
    text.truncate(text.floor_char_boundary(MAX_COMMENT_BYTES));
    text.push_str("\n\n… cut: the whole result is what `--format json` prints\n");
    text
}

fn comment_with_at_most(summary: &VerdictSummary, shown: usize) -> String {
    let mut out = format!("**{}**\n\n", summary.headline);
    for (name, words) in &summary.facts {
        let _ = writeln!(out, "- {name}: {}", escaped_line(words));
    }
    let slower = |row: &&Judgement| [Verdict::Regressed, Verdict::Accepted].contains(&row.verdict);
    let (mut worst, rest): (Vec<_>, Vec<_>) = summary.rows.iter().partition(slower);
    worst.sort_by(|a, b| a.verdict.cmp(&b.verdict).then(b.ratio.center.total_cmp(&a.ratio.center)));
    if !worst.is_empty() {
        let accepted = worst.iter().any(|row| row.verdict == Verdict::Accepted);
        let _ = writeln!(out, "\n{}", judgement_rows(&worst, shown, summary.evidence, accepted));
    }
    if let Some(drawn) = intervals::interval_plot(&summary.rows) {
        let _ = writeln!(out, "\n```\n{}\n```", drawn.replace('`', "'"));
    }
    out.push_str(&markdown_list(&summary.notes, shown));
    if !rest.is_empty() {
        let (count, rest) = (rest.len(), judgement_rows(&rest, shown, summary.evidence, true));
        let _ = writeln!(
            out,
            "\n<details><summary>{count} other cases</summary>\n\n{rest}\n\n</details>"
        );
    }
    let words = "change: of the time, above 0 is slower; detectable: the smallest slow-down that \
                 would have been found";
    let (details, reproduce) = (markdown_list(&summary.details, shown), &summary.reproduce);
    let _ =
        writeln!(out, "\n<details><summary>Details, and how to repeat this</summary>\n\n- {words}");
    let _ = writeln!(out, "{}\n```\n{reproduce}\n```\n\n</details>", details.trim_start());
    out
}

/// A Markdown list of the lines, after an empty line; an empty text without lines.
fn markdown_list(lines: &[String], shown: usize) -> String {
    let mut out = if lines.is_empty() { String::new() } else { "\n".to_owned() };
    for each in lines.iter().take(shown) {
        let _ = writeln!(out, "- {}", escaped_line(each));
    }
    out + &omitted_rows_note(lines.len(), shown, "notes")
}

fn judgement_rows(rows: &[&Judgement], shown: usize, evidence: &str, verdicts: bool) -> String {
    let tested = rows.iter().any(|row| judgement_cells::p_value_of_slower(row).is_some());
    let mut header = vec!["case", "change", "interval", "detectable"];
    header.extend(tested.then_some("p"));
    header.extend(["base", "head", evidence]);
    if verdicts {
        header.push("verdict");
    }
    let mut table = TextTable::new(&header);
    for row in rows.iter().take(shown) {
        let (change, interval) = (judgement_cells::change(row), judgement_cells::interval(row));
        let mut line = vec![row.case.clone(), change, interval, judgement_cells::detectable(row)];
        line.extend(tested.then(|| judgement_cells::p(row)));
        line.extend([
            judgement_cells::base_time_cell(row),
            judgement_cells::head(row),
            judgement_cells::evidence(row),
        ]);
        if verdicts {
            let reason = row.reason().map(|reason| format!(": {reason}")).unwrap_or_default();
            line.push(format!("{}{reason}", row.verdict.name()));
        }
        table.row(line);
    }
    table.to_markdown() + &omitted_rows_note(rows.len(), shown, "cases")
}

fn omitted_rows_note(count: usize, shown: usize, what: &str) -> String {
    if count <= shown {
        String::new()
    } else {
        format!("\n\n… and {} more {what}, omitted for length\n", count - shown)
    }
}

/// A text as one line of limited length, with its markup escaped.
fn escaped_line(text: &str) -> String {
    let mut text = MarkdownText(text).to_string();
    if text.chars().count() > MAX_COMMENT_LINE {
        text = text.chars().take(MAX_COMMENT_LINE).chain(['…']).collect();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::judgement::tests::timed;
    use crate::gate::ratio_interval::TimeRatio;
    use crate::report::summary::UnjudgedEntry;

    fn row(i: usize, verdict: Verdict) -> Judgement {
        let case =
            format!("family/operation/n{i}_with_a_rather_long_name_f32/cuda/implementation/hot");
        timed(&case, verdict, TimeRatio { center: 1.25, low: 1.24, high: 1.26 })
    }

    fn summary_with_notes(rows: Vec<Judgement>, notes: Vec<String>) -> VerdictSummary {
        VerdictSummary {
            verb: "kernelgate compare",
            package: None,
            headline: "headline".to_owned(),
            facts: vec![],
            rows,
            others: Vec::<UnjudgedEntry>::new(),
            rules: crate::gate::rules::RulesReport::default(),
            notes,
            details: vec![],
            evidence: "pairs",
            reproduce: "kernelgate compare --base main".to_owned(),
        }
    }

    #[test]
    fn a_comment_stays_below_the_length_limit() {
        let few = markdown(&summary_with_notes(vec![row(0, Verdict::Regressed)], vec![]));
        assert!(few.contains("n0_") && !few.contains("omitted"));
        let mut omitted = Vec::new();
        for verdict in [Verdict::Regressed, Verdict::Unchanged] {
            let many = markdown(&summary_with_notes(
                (0..5000).map(|i| row(i, verdict)).collect(),
                [vec!["x".repeat(100_000); 30], vec!["x".repeat(100); 3000]].concat(),
            ));
            assert!(many.len() <= MAX_COMMENT_BYTES, "{}", many.len());
            omitted.extend(many.lines().filter(|it| it.contains("omitted")).map(str::to_owned));
            assert_eq!(many.matches("<details>").count(), many.matches("</details>").count());
            assert!(many.contains("--base main"));
        }
        insta::assert_debug_snapshot!(omitted, @r#"
        [
            "… and 4900 more cases, omitted for length",
            "… and 2930 more notes, omitted for length",
            "… and 2930 more notes, omitted for length",
            "… and 4900 more cases, omitted for length",
        ]
        "#);
        let mut endless = row(0, Verdict::Regressed);
        endless.case = "ä".repeat(100_000);
        assert!(
            markdown(&summary_with_notes(vec![endless], vec![])).len() <= MAX_COMMENT_BYTES + 100
        );
    }

    #[test]
    fn foreign_text_in_a_comment_is_escaped() {
        let text = markdown(&summary_with_notes(vec![], vec!["a <b>\nc | d".to_owned()]));
        assert!(text.contains("- a &lt;b> c \\| d\n"), "{text}");
        let text = markdown(&summary_with_notes(
            vec![],
            vec!["\u{1b}[31mred\u{7} ![x](http://y) \\[z]".to_owned()],
        ));
        assert!(text.contains("- red\\\\u{7} !\\[x](http:&#8203;//y) \\\\\\[z]\n"), "{text}");
    }
}
