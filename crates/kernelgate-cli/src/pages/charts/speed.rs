//! Draws charts of times with cold caches against hot caches, and of output errors against speed.

use std::collections::BTreeMap;

use super::{ChartWithFileName, ChartsOfOneKind};
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, CurveOrPointSeries, LabelledRowsChart,
    MAX_ROWS_PER_ROW_CHART, MarkInChartRow, PlottedUnit, PointWithRange, TitledChart, XyChart,
};
use kernelgate::display::time_text;

/// Largest number of charts of each kind that are drawn: cold against hot caches, or error against
/// speed.
const MAX_CHARTS_OF_A_KIND: usize = 30;

/// Draws a chart for each workload: the time of a launch with cold caches relative to the time with
/// hot caches.
pub fn cold_against_hot_cache_charts(measured: &MeasurementsOfOneDevice) -> ChartsOfOneKind {
    let key = |case: &CaseWithItsRuns| {
        (case.workload.clone(), case.problem_id.clone(), case.implementation.clone())
    };
    let cold: BTreeMap<_, &CaseWithItsRuns> = measured
        .cases
        .iter()
        .filter(|case| case.cache_state == "cold")
        .map(|case| (key(case), case))
        .collect();
    let mut rows: BTreeMap<&str, Vec<ChartRowWithLabel>> = BTreeMap::new();
    for hot in measured.cases.iter().filter(|case| case.cache_state == "hot") {
        let Some(cold) = cold.get(&key(hot)) else { continue };
        let ratio = cold.median_launch_ns() / hot.median_launch_ns();
        rows.entry(&hot.workload).or_default().push(ChartRowWithLabel {
            row_label: format!("{} {}", hot.problem_id, hot.implementation),
            value_text: format!(
                "{} hot, {} cold",
                time_text(hot.median_launch_ns()),
                time_text(cold.median_launch_ns())
            ),
            marks: vec![MarkInChartRow::IntervalWithCentreDot(
                ratio.min(1.0),
                ratio,
                ratio.max(1.0),
                0,
            )],
        });
    }
    relative_change_charts(
        rows,
        "caches",
        (
            "cold caches against hot ones",
            "change of the time of a launch when its data come from memory",
        ),
        "cold over hot",
    )
}

/// Draws given relative changes, one chart for each workload. The argument `name` is part of the
/// charts' file names; title and subtitle follow the workload's name; `axis` names the axis.
pub fn relative_change_charts(
    rows: BTreeMap<&str, Vec<ChartRowWithLabel>>,
    name: &str,
    (title, subtitle): (&str, &str),
    axis: &str,
) -> ChartsOfOneKind {
    let mut gallery = ChartsOfOneKind::default();
    for (workload, rows) in rows {
        gallery.add_all_or_skip(
            MAX_CHARTS_OF_A_KIND,
            divide_rows_into_charts(workload, name, rows, |part| TitledChart {
                chart_title: format!("{workload}: {title}{part}"),
                chart_subtitle: subtitle.to_owned(),
                body: ChartBody::Rows(LabelledRowsChart {
                    horizontal_axis: ChartAxis::with_round_ticks(
                        axis,
                        PlottedUnit::RatioAsRelativeChange,
                        AxisScaleKind::Linear,
                    ),
                    mark_colour_legend: vec![],
                    rows: vec![],
                    vertical_line_value: Some(1.0),
                }),
            }),
        );
    }
    gallery
}

/// Divides rows into charts of at most [`MAX_ROWS_PER_ROW_CHART`] rows; the function `chart` makes
/// an empty chart whose title ends with the given text.
pub fn divide_rows_into_charts(
    workload: &str,
    name: &str,
    rows: Vec<ChartRowWithLabel>,
    chart: impl Fn(&str) -> TitledChart,
) -> Vec<ChartWithFileName> {
    let parts = rows.len().div_ceil(MAX_ROWS_PER_ROW_CHART);
    let each = rows.chunks(MAX_ROWS_PER_ROW_CHART).enumerate().map(|(i, rows)| {
        let part = if parts > 1 { format!(" ({} of {parts})", i + 1) } else { String::new() };
        let mut chart = chart(&part);
        if let ChartBody::Rows(body) = &mut chart.body {
            body.rows = rows.to_vec();
        }
        ChartWithFileName::with_file_name_from_words(&[workload, name, &part], chart)
    });
    each.collect()
}

/// Draws the output error over the time relative to the problem's fastest implementation, for
/// workloads with several implementations.
pub fn error_against_speed_charts(measured: &MeasurementsOfOneDevice) -> ChartsOfOneKind {
    let fastest: BTreeMap<(&str, &str, &str), f64> = measured
        .cases
        .iter()
        .filter(|case| case.is_fastest_of_problem)
        .map(|case| {
            ((&*case.workload, &*case.problem_id, &*case.cache_state), case.median_launch_ns())
        })
        .collect();
    let mut workloads: BTreeMap<&str, BTreeMap<&str, Vec<PointWithRange>>> = BTreeMap::new();
    let mut exact: BTreeMap<&str, usize> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.cache_state != "cold") {
        let Some(errors) = case.errors else { continue };
        if errors.max_error == 0.0 {
            *exact.entry(&case.workload).or_default() += 1;
            continue;
        }
        let best = fastest[&(&*case.workload, &*case.problem_id, &*case.cache_state)];
        let mark =
            PointWithRange::point_without_range(case.median_launch_ns() / best, errors.max_error);
        workloads
            .entry(&case.workload)
            .or_default()
            .entry(&case.implementation)
            .or_default()
            .push(mark);
    }
    let mut gallery = ChartsOfOneKind::default();
    // A workload with a single implementation gets no chart, because there is nothing to compare.
    for (workload, series) in workloads.into_iter().filter(|(_, series)| series.len() > 1) {
        let exact = exact.get(workload).map(|count| format!("; {count} exact cases are not shown"));
        let series = series.into_iter().map(|(name, marks)| CurveOrPointSeries {
            legend_name: name.to_owned(),
            colour_number: measured.colour_of_implementation(workload, name),
            joined_by_lines: false,
            marks,
        });
        let chart = TitledChart {
            chart_title: format!("{workload}: errors beside speed"),
            chart_subtitle: format!(
                "largest error over the largest value{}",
                exact.unwrap_or_default()
            ),
            body: ChartBody::Xy(XyChart {
                horizontal_axis: ChartAxis::with_round_ticks(
                    "time over the fastest of the problem",
                    PlottedUnit::Count,
                    AxisScaleKind::Logarithmic,
                ),
                vertical_axis: ChartAxis::with_round_ticks(
                    "error, logarithmic",
                    PlottedUnit::RelativeError,
                    AxisScaleKind::Logarithmic,
                ),
                series: series.collect(),
                reference_lines: vec![],
                fills_page_width: false,
            }),
        };
        gallery.add_all_or_skip(
            MAX_CHARTS_OF_A_KIND,
            vec![ChartWithFileName::with_file_name_from_words(&[workload, "errors"], chart)],
        );
    }
    gallery
}
