//! Makes the HTML page of the verdicts of `gate` or `compare`: one chart of all cases, and texts.

use maud::{Markup, html};

use super::charts::{ChartWithFileName, ChartsOfOneKind};
use super::page_frame::{self, HtmlPageSection};
use crate::gate::judgement::CaseJudgement;
use crate::gate::verdict::VerdictOnCase;
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartDrawingError, ChartRowWithLabel, LabelledRowsChart,
    MAX_ROWS_PER_ROW_CHART, MarkInChartRow, PlottedUnit, TitledChart,
};
use crate::report::judgement_cells;
use crate::report::summary::{self, VerdictSummary};

/// The verdicts in the order in which the chart's colours are assigned to them.
const VERDICTS_IN_COLOUR_ORDER: [VerdictOnCase; 5] = [
    VerdictOnCase::Unchanged,
    VerdictOnCase::Regressed,
    VerdictOnCase::Improved,
    VerdictOnCase::Inconclusive,
    VerdictOnCase::AcceptedSlowdown,
];

/// Draws a chart of each case's time change with its interval: regressions first, then the largest
/// changes; `None` if no case was timed.
pub fn time_change_chart(summary: &VerdictSummary) -> Option<ChartWithFileName> {
    let mut rows: Vec<&CaseJudgement> = summary.rows.iter().filter(|row| row.has_times()).collect();
    rows.sort_by(|a, b| {
        let size = |row: &CaseJudgement| (row.ratio.estimated_ratio.ln()).abs();
        let rank = |row: &CaseJudgement| row.verdict != VerdictOnCase::Regressed;
        rank(a).cmp(&rank(b)).then(size(b).total_cmp(&size(a)))
    });
    let left_out = rows.len().saturating_sub(MAX_ROWS_PER_ROW_CHART);
    rows.truncate(MAX_ROWS_PER_ROW_CHART);
    if rows.is_empty() {
        return None;
    }
    let row = |row: &&CaseJudgement| {
        let colour = VERDICTS_IN_COLOUR_ORDER
            .iter()
            .position(|verdict| *verdict == row.verdict)
            .unwrap_or(0);
        let bound = |bound: f64| {
            if bound.is_finite() && bound > 0.0 { bound } else { row.ratio.estimated_ratio }
        };
        let ratio = row.ratio;
        ChartRowWithLabel {
            row_label: row.case_id.clone(),
            value_text: format!(
                "{} {}",
                judgement_cells::time_change_cell(row),
                row.verdict.verdict_name()
            ),
            marks: vec![MarkInChartRow::IntervalWithCentreDot(
                bound(ratio.ratio_low),
                ratio.estimated_ratio,
                bound(ratio.ratio_high),
                colour,
            )],
        }
    };
    let accepted = rows.iter().any(|row| row.verdict == VerdictOnCase::AcceptedSlowdown);
    let shown = VERDICTS_IN_COLOUR_ORDER
        .iter()
        .filter(|verdict| accepted || **verdict != VerdictOnCase::AcceptedSlowdown);
    let more =
        if left_out > 0 { format!("; {left_out} more cases in the table") } else { String::new() };
    let chart = TitledChart {
        chart_title: summary.report_headline.clone(),
        chart_subtitle: format!(
            "change of the time of a launch with its interval; right is slower{more}"
        ),
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "change",
                PlottedUnit::RatioAsRelativeChange,
                AxisScaleKind::Linear,
            ),
            mark_colour_legend: shown.map(|verdict| verdict.verdict_name().to_owned()).collect(),
            rows: rows.iter().map(row).collect(),
            vertical_line_value: Some(1.0),
        }),
    };
    Some(ChartWithFileName { file_name_stem: "change".to_owned(), chart })
}

/// Builds the page section of the verdicts: headline, facts, chart, cases and notes.
pub fn build_verdict_section(summary: &VerdictSummary) -> Result<Markup, ChartDrawingError> {
    let figure = time_change_chart(summary).map(|mut figure| {
        // The chart gets another title, because the section already shows the headline above it.
        "change of each case".clone_into(&mut figure.chart.chart_title);
        figure
    });
    let figures = figure.into_iter().collect();
    let picture = page_frame::charts_side_by_side(&ChartsOfOneKind { figures, omitted_charts: 0 })?;
    let table = summary::judgements_table(&summary.rows, ["base", "head"], summary.evidence_unit);
    let header: Vec<&str> = table.column_names().iter().map(String::as_str).collect();
    let verdict = |row: usize| Some(summary.rows[row].verdict.verdict_name());
    let others: Vec<String> = summary
        .unjudged_entries
        .iter()
        .map(|other| format!("{}: {}", other.case_or_bench_name, other.reason_not_judged))
        .collect();
    Ok(html! {
        p { strong { (page_frame::printable_on_page(&summary.report_headline)) } }
        (page_frame::facts_list(&summary.facts_on_compared_sides))
        (picture)
        (page_frame::html_table_with_row_classes(&header, table.rows(), verdict))
        @if !summary.notes_below_table.is_empty() { (page_frame::html_list_of_lines(&summary.notes_below_table)) }
        @if !others.is_empty() {
            details { summary { (others.len()) " without a verdict" } (page_frame::html_list_of_lines(&others)) }
        }
        details { summary { "Details, and how to repeat this" }
            (page_frame::html_list_of_lines(&summary.foldable_lines)) pre { (page_frame::printable_on_page(&summary.command_to_reproduce)) } }
    })
}

/// Makes the HTML page of the verdicts.
pub fn verdict_page(summary: &VerdictSummary) -> Result<String, ChartDrawingError> {
    let sections = [HtmlPageSection::with_anchor_and_title(
        "verdicts",
        "Verdicts",
        build_verdict_section(summary)?,
    )];
    Ok(page_frame::build_html_page(&verdict_page_title(summary), &html! {}, &sections))
}

/// Returns the title of the verdict page: "my-kernels: main (1a2b3c4d) → working tree (5e6f7a8b)".
fn verdict_page_title(summary: &VerdictSummary) -> String {
    let fact = |name: &str| {
        summary.facts_on_compared_sides.iter().find(|fact| fact.0 == name).map(|fact| &*fact.1)
    };
    let subject = summary.package_name.as_deref().unwrap_or(summary.judging_verb);
    match (fact("base"), fact("head")) {
        (Some(base), Some(head)) => format!("{subject}: {base} → {head}"),
        _ => subject.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::judgement::tests::test_judgement_with_ratio;
    use crate::gate::ratio_interval::TimeRatioWithInterval;

    fn test_judgement(i: usize, verdict: VerdictOnCase, center: f64) -> CaseJudgement {
        test_judgement_with_ratio(
            &format!("w/f/<b>{i}"),
            verdict,
            TimeRatioWithInterval {
                estimated_ratio: center,
                ratio_low: 0.0,
                ratio_high: f64::INFINITY,
            },
        )
    }

    fn test_verdict_summary(rows: Vec<CaseJudgement>) -> VerdictSummary {
        VerdictSummary {
            judging_verb: "kernelgate compare",
            package_name: Some("my-kernels".to_owned()),
            report_headline: "1 regressed".to_owned(),
            facts_on_compared_sides: vec![("base", "main".to_owned()), ("head", "HEAD".to_owned())],
            rows,
            unjudged_entries: vec![],
            rules: crate::gate::rules::GateRulesEffectReport::default(),
            notes_below_table: vec!["a <note>".to_owned()],
            foldable_lines: vec![],
            evidence_unit: "pairs",
            command_to_reproduce: "kernelgate compare".to_owned(),
        }
    }

    #[test]
    fn the_verdict_chart_begins_with_regressions_and_is_limited_in_length() {
        let mut rows: Vec<CaseJudgement> = (0..100)
            .map(|i| test_judgement(i, VerdictOnCase::Unchanged, 1.0 + 0.0001 * i as f64))
            .collect();
        rows.push(test_judgement(100, VerdictOnCase::Regressed, 1.002));
        rows.push(CaseJudgement {
            base_launch_ns: 0.0,
            ..test_judgement(101, VerdictOnCase::Inconclusive, 1.0)
        });
        let chart = time_change_chart(&test_verdict_summary(rows)).unwrap().chart;
        insta::assert_snapshot!(chart.chart_subtitle, @"change of the time of a launch with its interval; right is slower; 41 more cases in the table");
        let ChartBody::Rows(body) = &chart.body else { panic!("rows") };
        assert_eq!(body.rows.len(), MAX_ROWS_PER_ROW_CHART);
        let labels: Vec<&str> = body.rows[..2].iter().map(|row| row.row_label.as_str()).collect();
        assert_eq!(labels, ["w/f/<b>100", "w/f/<b>99"]);
        assert!(time_change_chart(&test_verdict_summary(vec![])).is_none());
    }

    #[test]
    fn the_verdict_page_lists_every_case_and_escapes_foreign_markup() {
        let page = verdict_page(&test_verdict_summary(vec![test_judgement(
            1,
            VerdictOnCase::Regressed,
            1.5,
        )]))
        .unwrap();
        assert!(page.contains("w/f/&lt;b&gt;1") && page.contains("a &lt;note&gt;"), "{page}");
        assert!(!page.contains("<b>") && page.contains("<svg"), "{page}");
        assert!(page.contains("<h1>my-kernels: main → HEAD</h1>"), "{page}");
        assert!(page.contains("<tr class=\"regressed\">"), "{page}");
        assert_eq!(page.matches("1 regressed").count(), 1, "{page}");
    }
}
