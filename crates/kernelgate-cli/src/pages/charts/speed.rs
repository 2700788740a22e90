//! Charts of cold caches against hot ones, and of errors against speed.

use std::collections::BTreeMap;

use super::{ChartFigure, ChartGallery};
use crate::pages::measured_runs::{MeasuredCase, ReportMeasurements};
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, CurveMark, CurveSeries, LabelledRow,
    LabelledRows, MAX_ROWS, PlottedUnit, ScaleKind, Xy,
};
use kernelgate::display::time_text;

/// Largest number of charts of a kind.
const MAX_SPEED_CHARTS: usize = 30;

/// A chart for each workload: the additional time of a launch with cold caches.
pub fn cold_cache_charts(measured: &ReportMeasurements) -> ChartGallery {
    let key = |case: &MeasuredCase| {
        (case.workload.clone(), case.problem.clone(), case.implementation.clone())
    };
    let cold: BTreeMap<_, &MeasuredCase> = measured
        .cases
        .iter()
        .filter(|case| case.cache == "cold")
        .map(|case| (key(case), case))
        .collect();
    let mut rows: BTreeMap<&str, Vec<LabelledRow>> = BTreeMap::new();
    for hot in measured.cases.iter().filter(|case| case.cache == "hot") {
        let Some(cold) = cold.get(&key(hot)) else { continue };
        let ratio = cold.median_time_ns() / hot.median_time_ns();
        rows.entry(&hot.workload).or_default().push(LabelledRow {
            label: format!("{} {}", hot.problem, hot.implementation),
            value: format!(
                "{} hot, {} cold",
                time_text(hot.median_time_ns()),
                time_text(cold.median_time_ns())
            ),
            marks: vec![ChartRowMark::Interval(ratio.min(1.0), ratio, ratio.max(1.0), 0)],
        });
    }
    change_charts(
        rows,
        "caches",
        (
            "cold caches against hot ones",
            "change of the time of a launch when its data come from memory",
        ),
        "cold over hot",
    )
}

/// Charts of changes, one for each workload. `name` begins the names of the charts; their title and
/// subtitle follow the workload, and the axis has the given name.
pub fn change_charts(
    rows: BTreeMap<&str, Vec<LabelledRow>>,
    name: &str,
    (title, subtitle): (&str, &str),
    axis: &str,
) -> ChartGallery {
    let mut gallery = ChartGallery::default();
    for (workload, rows) in rows {
        gallery.add(
            MAX_SPEED_CHARTS,
            charts_of_at_most_max_rows(workload, name, rows, |part| ChartWithTitle {
                title: format!("{workload}: {title}{part}"),
                subtitle: subtitle.to_owned(),
                body: ChartBody::Rows(LabelledRows {
                    axis: ChartAxis::new(axis, PlottedUnit::Change, ScaleKind::Linear),
                    legend: vec![],
                    rows: vec![],
                    origin: Some(1.0),
                }),
            }),
        );
    }
    gallery
}

/// Divides rows into charts of at most [`MAX_ROWS`] rows; `chart` makes an empty chart whose title
/// gets these words.
pub fn charts_of_at_most_max_rows(
    workload: &str,
    name: &str,
    rows: Vec<LabelledRow>,
    chart: impl Fn(&str) -> ChartWithTitle,
) -> Vec<ChartFigure> {
    let parts = rows.len().div_ceil(MAX_ROWS);
    let each = rows.chunks(MAX_ROWS).enumerate().map(|(i, rows)| {
        let part = if parts > 1 { format!(" ({} of {parts})", i + 1) } else { String::new() };
        let mut chart = chart(&part);
        if let ChartBody::Rows(body) = &mut chart.body {
            body.rows = rows.to_vec();
        }
        ChartFigure::new(&[workload, name, &part], chart)
    });
    each.collect()
}

/// Errors against the reference over the time relative to the fastest row of the problem, for
/// workloads with several implementations.
pub fn errors(measured: &ReportMeasurements) -> ChartGallery {
    let fastest: BTreeMap<(&str, &str, &str), f64> = measured
        .cases
        .iter()
        .filter(|case| case.best)
        .map(|case| ((&*case.workload, &*case.problem, &*case.cache), case.median_time_ns()))
        .collect();
    let mut workloads: BTreeMap<&str, BTreeMap<&str, Vec<CurveMark>>> = BTreeMap::new();
    let mut exact: BTreeMap<&str, usize> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.cache != "cold") {
        let Some(errors) = case.errors else { continue };
        if errors.max_error == 0.0 {
            *exact.entry(&case.workload).or_default() += 1;
            continue;
        }
        let best = fastest[&(&*case.workload, &*case.problem, &*case.cache)];
        let mark = CurveMark::at(case.median_time_ns() / best, errors.max_error);
        workloads
            .entry(&case.workload)
            .or_default()
            .entry(&case.implementation)
            .or_default()
            .push(mark);
    }
    let mut gallery = ChartGallery::default();
    // A workload with one implementation has nothing to compare.
    for (workload, series) in workloads.into_iter().filter(|(_, series)| series.len() > 1) {
        let exact = exact.get(workload).map(|count| format!("; {count} exact cases are not shown"));
        let series = series.into_iter().map(|(name, marks)| CurveSeries {
            name: name.to_owned(),
            colour: measured.colour(workload, name),
            joined: false,
            marks,
        });
        let chart = ChartWithTitle {
            title: format!("{workload}: errors beside speed"),
            subtitle: format!("largest error over the largest value{}", exact.unwrap_or_default()),
            body: ChartBody::Xy(Xy {
                x: ChartAxis::new(
                    "time over the fastest of the problem",
                    PlottedUnit::Count,
                    ScaleKind::Log,
                ),
                y: ChartAxis::new("error, logarithmic", PlottedUnit::Error, ScaleKind::Log),
                series: series.collect(),
                guides: vec![],
                broad: false,
            }),
        };
        gallery.add(MAX_SPEED_CHARTS, vec![ChartFigure::new(&[workload, "errors"], chart)]);
    }
    gallery
}
