//! Makes the page of the verdicts on a change: one chart of all cases, with text around it.

use maud::{Markup, html};

use super::charts::{ChartFigure, ChartGallery};
use super::page_frame::{self, PageSection};
use crate::gate::judgement::Judgement;
use crate::gate::verdict::Verdict;
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, LabelledRow, LabelledRows, MAX_ROWS,
    PlotError, PlottedUnit, ScaleKind,
};
use crate::report::judgement_cells;
use crate::report::summary::{self, VerdictSummary};

/// Verdicts in the order of the colours.
const LEGEND_VERDICTS: [Verdict; 5] = [
    Verdict::Unchanged,
    Verdict::Regressed,
    Verdict::Improved,
    Verdict::Inconclusive,
    Verdict::Accepted,
];

/// A chart of the change of each case with its interval, regressions first and then the largest
/// changes; `None` if nothing was timed.
pub fn changes(summary: &VerdictSummary) -> Option<ChartFigure> {
    let mut rows: Vec<&Judgement> = summary.rows.iter().filter(|row| row.is_timed()).collect();
    rows.sort_by(|a, b| {
        let size = |row: &Judgement| (row.ratio.center.ln()).abs();
        let rank = |row: &Judgement| row.verdict != Verdict::Regressed;
        rank(a).cmp(&rank(b)).then(size(b).total_cmp(&size(a)))
    });
    let left_out = rows.len().saturating_sub(MAX_ROWS);
    rows.truncate(MAX_ROWS);
    if rows.is_empty() {
        return None;
    }
    let row = |row: &&Judgement| {
        let colour =
            LEGEND_VERDICTS.iter().position(|verdict| *verdict == row.verdict).unwrap_or(0);
        let bound =
            |bound: f64| if bound.is_finite() && bound > 0.0 { bound } else { row.ratio.center };
        let ratio = row.ratio;
        LabelledRow {
            label: row.case.clone(),
            value: format!("{} {}", judgement_cells::change(row), row.verdict.name()),
            marks: vec![ChartRowMark::Interval(
                bound(ratio.low),
                ratio.center,
                bound(ratio.high),
                colour,
            )],
        }
    };
    let accepted = rows.iter().any(|row| row.verdict == Verdict::Accepted);
    let shown = LEGEND_VERDICTS.iter().filter(|verdict| accepted || **verdict != Verdict::Accepted);
    let more =
        if left_out > 0 { format!("; {left_out} more cases in the table") } else { String::new() };
    let chart = ChartWithTitle {
        title: summary.headline.clone(),
        subtitle: format!(
            "change of the time of a launch with its interval; right is slower{more}"
        ),
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new("change", PlottedUnit::Change, ScaleKind::Linear),
            legend: shown.map(|verdict| verdict.name().to_owned()).collect(),
            rows: rows.iter().map(row).collect(),
            origin: Some(1.0),
        }),
    };
    Some(ChartFigure { name: "change".to_owned(), chart })
}

/// The section of the verdicts: headline, facts, picture, cases and notes.
pub fn verdict_section(summary: &VerdictSummary) -> Result<Markup, PlotError> {
    let figure = changes(summary).map(|mut figure| {
        // The headline stands above the picture already.
        "change of each case".clone_into(&mut figure.chart.title);
        figure
    });
    let figures = figure.into_iter().collect();
    let picture = page_frame::chart_gallery(&ChartGallery { figures, left_out: 0 })?;
    let table = summary::table(&summary.rows, ["base", "head"], summary.evidence);
    let header: Vec<&str> = table.column_names().iter().map(String::as_str).collect();
    let verdict = |row: usize| Some(summary.rows[row].verdict.name());
    let others: Vec<String> =
        summary.others.iter().map(|other| format!("{}: {}", other.name, other.why)).collect();
    Ok(html! {
        p { strong { (page_frame::printable(&summary.headline)) } }
        (page_frame::facts(&summary.facts))
        (picture)
        (page_frame::table_with_classes(&header, table.rows(), verdict))
        @if !summary.notes.is_empty() { (page_frame::lines(&summary.notes)) }
        @if !others.is_empty() {
            details { summary { (others.len()) " without a verdict" } (page_frame::lines(&others)) }
        }
        details { summary { "Details, and how to repeat this" }
            (page_frame::lines(&summary.details)) pre { (page_frame::printable(&summary.reproduce)) } }
    })
}

/// Makes the HTML page of the verdicts.
pub fn page(summary: &VerdictSummary) -> Result<String, PlotError> {
    let sections = [PageSection::new("verdicts", "Verdicts", verdict_section(summary)?)];
    Ok(page_frame::page(&page_title(summary), &html! {}, &sections))
}

/// Title of the page: "my-kernels: main (1a2b3c4d) → working tree (5e6f7a8b)".
fn page_title(summary: &VerdictSummary) -> String {
    let fact = |name: &str| summary.facts.iter().find(|fact| fact.0 == name).map(|fact| &*fact.1);
    let subject = summary.package.as_deref().unwrap_or(summary.verb);
    match (fact("base"), fact("head")) {
        (Some(base), Some(head)) => format!("{subject}: {base} → {head}"),
        _ => subject.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::judgement::tests::timed;
    use crate::gate::ratio_interval::TimeRatio;

    fn row(i: usize, verdict: Verdict, center: f64) -> Judgement {
        timed(&format!("w/f/<b>{i}"), verdict, TimeRatio { center, low: 0.0, high: f64::INFINITY })
    }

    fn verdict_summary(rows: Vec<Judgement>) -> VerdictSummary {
        VerdictSummary {
            verb: "kernelgate compare",
            package: Some("my-kernels".to_owned()),
            headline: "1 regressed".to_owned(),
            facts: vec![("base", "main".to_owned()), ("head", "HEAD".to_owned())],
            rows,
            others: vec![],
            rules: crate::gate::rules::RulesReport::default(),
            notes: vec!["a <note>".to_owned()],
            details: vec![],
            evidence: "pairs",
            reproduce: "kernelgate compare".to_owned(),
        }
    }

    #[test]
    fn the_verdict_picture_begins_with_regressions_and_has_a_limited_length() {
        let mut rows: Vec<Judgement> =
            (0..100).map(|i| row(i, Verdict::Unchanged, 1.0 + 0.0001 * i as f64)).collect();
        rows.push(row(100, Verdict::Regressed, 1.002));
        rows.push(Judgement { base_ns: 0.0, ..row(101, Verdict::Inconclusive, 1.0) });
        let chart = changes(&verdict_summary(rows)).unwrap().chart;
        insta::assert_snapshot!(chart.subtitle, @"change of the time of a launch with its interval; right is slower; 41 more cases in the table");
        let ChartBody::Rows(body) = &chart.body else { panic!("rows") };
        assert_eq!(body.rows.len(), MAX_ROWS);
        let labels: Vec<&str> = body.rows[..2].iter().map(|row| row.label.as_str()).collect();
        assert_eq!(labels, ["w/f/<b>100", "w/f/<b>99"]);
        assert!(changes(&verdict_summary(vec![])).is_none());
    }

    #[test]
    fn the_verdict_page_lists_every_case_and_escapes_foreign_markup() {
        let page = page(&verdict_summary(vec![row(1, Verdict::Regressed, 1.5)])).unwrap();
        assert!(page.contains("w/f/&lt;b&gt;1") && page.contains("a &lt;note&gt;"), "{page}");
        assert!(!page.contains("<b>") && page.contains("<svg"), "{page}");
        assert!(page.contains("<h1>my-kernels: main → HEAD</h1>"), "{page}");
        assert!(page.contains("<tr class=\"regressed\">"), "{page}");
        assert_eq!(page.matches("1 regressed").count(), 1, "{page}");
    }
}
