//! Makes the verdict comment for a pull request in Markdown: its headline and the slower cases are
//! visible, everything else is folded. A pull-request comment is never longer than its service,
//! such as GitHub, allows.

use std::fmt::Write as _;

use crate::gate::judgement::CaseJudgement;
use crate::gate::verdict::VerdictOnCase;
use crate::report::summary::VerdictSummary;
use crate::report::{intervals, judgement_cells};
use kernelgate::display::harmless_text::EscapedForMarkdown;
use kernelgate::display::table::AlignedTextTable;

/// Largest number of bytes of a pull-request comment. GitHub accepts comments of 65,536 characters;
/// the rest is left for text that scripts add to the comment.
pub const MAX_PULL_REQUEST_COMMENT_BYTES: usize = 60_000;
/// Largest numbers of entries per list of the comment, tried from the first on until the comment is
/// short enough.
const MAX_LIST_ENTRIES_TO_TRY: [usize; 8] = [usize::MAX, 1000, 500, 200, 100, 50, 20, 5];
/// Largest number of characters of a line of notes in a pull-request comment.
const MAX_COMMENT_LINE_CHARACTERS: usize = 400;

/// The pull-request comment on the verdicts as Markdown.
pub fn pull_request_comment_markdown(summary: &VerdictSummary) -> String {
    for shown in MAX_LIST_ENTRIES_TO_TRY {
        let text = comment_with_entries_limit(summary, shown);
        if text.len() <= MAX_PULL_REQUEST_COMMENT_BYTES {
            return text;
        }
    }
    let mut text = comment_with_entries_limit(summary, 1);
    text.truncate(text.floor_char_boundary(MAX_PULL_REQUEST_COMMENT_BYTES));
    text.push_str("\n\n… cut: the whole result is what `--format json` prints\n");
    text
}

fn comment_with_entries_limit(summary: &VerdictSummary, shown: usize) -> String {
    let mut out = format!("**{}**\n\n", summary.report_headline);
    for (name, words) in &summary.facts_on_compared_sides {
        let _ = writeln!(out, "- {name}: {}", escaped_and_shortened_line(words));
    }
    let slower = |row: &&CaseJudgement| {
        [VerdictOnCase::Regressed, VerdictOnCase::AcceptedSlowdown].contains(&row.verdict)
    };
    let (mut worst, rest): (Vec<_>, Vec<_>) = summary.rows.iter().partition(slower);
    worst.sort_by(|a, b| {
        a.verdict.cmp(&b.verdict).then(b.ratio.estimated_ratio.total_cmp(&a.ratio.estimated_ratio))
    });
    if !worst.is_empty() {
        let accepted = worst.iter().any(|row| row.verdict == VerdictOnCase::AcceptedSlowdown);
        let _ = writeln!(
            out,
            "\n{}",
            markdown_table_of_judgements(&worst, shown, summary.evidence_unit, accepted)
        );
    }
    if let Some(drawn) = intervals::intervals_text_plot(&summary.rows) {
        let _ = writeln!(out, "\n```\n{}\n```", drawn.replace('`', "'"));
    }
    out.push_str(&markdown_list_with_limit(&summary.notes_below_table, shown));
    if !rest.is_empty() {
        let (count, rest) =
            (rest.len(), markdown_table_of_judgements(&rest, shown, summary.evidence_unit, true));
        let _ = writeln!(
            out,
            "\n<details><summary>{count} other cases</summary>\n\n{rest}\n\n</details>"
        );
    }
    let words = "change: of the time, above 0 is slower; detectable: the smallest slow-down that \
                 would have been found";
    let (details, reproduce) =
        (markdown_list_with_limit(&summary.foldable_lines, shown), &summary.command_to_reproduce);
    let _ =
        writeln!(out, "\n<details><summary>Details, and how to repeat this</summary>\n\n- {words}");
    let _ = writeln!(out, "{}\n```\n{reproduce}\n```\n\n</details>", details.trim_start());
    out
}

/// A Markdown list of at most `shown` lines, preceded by an empty line; without lines the text is
/// empty.
fn markdown_list_with_limit(lines: &[String], shown: usize) -> String {
    let mut out = if lines.is_empty() { String::new() } else { "\n".to_owned() };
    for each in lines.iter().take(shown) {
        let _ = writeln!(out, "- {}", escaped_and_shortened_line(each));
    }
    out + &note_on_rows_left_out_for_length(lines.len(), shown, "notes")
}

fn markdown_table_of_judgements(
    rows: &[&CaseJudgement],
    shown: usize,
    evidence: &str,
    verdicts: bool,
) -> String {
    let tested = rows.iter().any(|row| judgement_cells::p_value_of_not_slower(row).is_some());
    let mut header = vec!["case", "change", "interval", "detectable"];
    header.extend(tested.then_some("p"));
    header.extend(["base", "head", evidence]);
    if verdicts {
        header.push("verdict");
    }
    let mut table = AlignedTextTable::new(&header);
    for row in rows.iter().take(shown) {
        let (change, interval) = (
            judgement_cells::time_change_cell(row),
            judgement_cells::time_change_interval_cell(row),
        );
        let mut line = vec![
            row.case_id.clone(),
            change,
            interval,
            judgement_cells::detectable_change_cell(row),
        ];
        line.extend(tested.then(|| judgement_cells::p_value_cell(row)));
        line.extend([
            judgement_cells::base_time_cell(row),
            judgement_cells::head_time_cell(row),
            judgement_cells::evidence_count_cell(row),
        ]);
        if verdicts {
            let reason = row
                .joined_inconclusive_reasons()
                .map(|reason| format!(": {reason}"))
                .unwrap_or_default();
            line.push(format!("{}{reason}", row.verdict.verdict_name()));
        }
        table.add_row(line);
    }
    table.to_markdown() + &note_on_rows_left_out_for_length(rows.len(), shown, "cases")
}

fn note_on_rows_left_out_for_length(count: usize, shown: usize, what: &str) -> String {
    if count <= shown {
        String::new()
    } else {
        format!("\n\n… and {} more {what}, omitted for length\n", count - shown)
    }
}

/// A text on one line of limited length, with Markdown characters escaped.
fn escaped_and_shortened_line(text: &str) -> String {
    let mut text = EscapedForMarkdown(text).to_string();
    if text.chars().count() > MAX_COMMENT_LINE_CHARACTERS {
        text = text.chars().take(MAX_COMMENT_LINE_CHARACTERS).chain(['…']).collect();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::judgement::tests::test_judgement_with_ratio;
    use crate::gate::ratio_interval::TimeRatioWithInterval;
    use crate::report::summary::UnjudgedEntry;

    fn judgement_of_case_number(i: usize, verdict: VerdictOnCase) -> CaseJudgement {
        let case =
            format!("family/operation/n{i}_with_a_rather_long_name_f32/cuda/implementation/hot");
        test_judgement_with_ratio(
            &case,
            verdict,
            TimeRatioWithInterval { estimated_ratio: 1.25, ratio_low: 1.24, ratio_high: 1.26 },
        )
    }

    fn verdict_summary_with_notes(rows: Vec<CaseJudgement>, notes: Vec<String>) -> VerdictSummary {
        VerdictSummary {
            judging_verb: "kernelgate compare",
            package_name: None,
            report_headline: "headline".to_owned(),
            facts_on_compared_sides: vec![],
            rows,
            unjudged_entries: Vec::<UnjudgedEntry>::new(),
            rules: crate::gate::rules::GateRulesEffectReport::default(),
            notes_below_table: notes,
            foldable_lines: vec![],
            evidence_unit: "pairs",
            command_to_reproduce: "kernelgate compare --base main".to_owned(),
        }
    }

    #[test]
    fn a_pull_request_comment_stays_below_the_length_limit() {
        let few = pull_request_comment_markdown(&verdict_summary_with_notes(
            vec![judgement_of_case_number(0, VerdictOnCase::Regressed)],
            vec![],
        ));
        assert!(few.contains("n0_") && !few.contains("omitted"));
        let mut omitted = Vec::new();
        for verdict in [VerdictOnCase::Regressed, VerdictOnCase::Unchanged] {
            let many = pull_request_comment_markdown(&verdict_summary_with_notes(
                (0..5000).map(|i| judgement_of_case_number(i, verdict)).collect(),
                [vec!["x".repeat(100_000); 30], vec!["x".repeat(100); 3000]].concat(),
            ));
            assert!(many.len() <= MAX_PULL_REQUEST_COMMENT_BYTES, "{}", many.len());
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
        let mut endless = judgement_of_case_number(0, VerdictOnCase::Regressed);
        endless.case_id = "ä".repeat(100_000);
        assert!(
            pull_request_comment_markdown(&verdict_summary_with_notes(vec![endless], vec![])).len()
                <= MAX_PULL_REQUEST_COMMENT_BYTES + 100
        );
    }

    #[test]
    fn foreign_text_in_a_pull_request_comment_is_escaped() {
        let text = pull_request_comment_markdown(&verdict_summary_with_notes(
            vec![],
            vec!["a <b>\nc | d".to_owned()],
        ));
        assert!(text.contains("- a &lt;b> c \\| d\n"), "{text}");
        let text = pull_request_comment_markdown(&verdict_summary_with_notes(
            vec![],
            vec!["\u{1b}[31mred\u{7} ![x](http://y) \\[z]".to_owned()],
        ));
        assert!(text.contains("- red\\\\u{7} !\\[x](http:&#8203;//y) \\\\\\[z]\n"), "{text}");
    }
}
