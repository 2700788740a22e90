//! Draws the roofline chart: operations per second over operations per byte for all cases, with
//! their limits. The roofline chart takes the limit of a case from its record, as the tables do for
//! the share of the limit.

use std::collections::BTreeMap;

use kernelgate::measure::limits::MeasuredMemoryLimit;

use super::ChartWithFileName;
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, CurveOrPointSeries, PlottedUnit, PointWithRange,
    ReferenceLine, TitledChart, XyChart,
};

/// Draws the roofline chart of the cases that declare operations and bytes; `None` if there is no
/// such case.
pub fn roofline_chart_of_cases(measured: &MeasurementsOfOneDevice) -> Option<ChartWithFileName> {
    let mut series: BTreeMap<&str, Vec<PointWithRange>> = BTreeMap::new();
    let mut limits: Vec<PointWithRange> = Vec::new();
    for case in measured.cases.iter().filter(|case| case.cache_state != "cold") {
        if let Some((x, y)) = roofline_coordinates(case) {
            series
                .entry(&case.workload)
                .or_default()
                .push(PointWithRange::point_without_range(x, y));
            let limit = case
                .fraction_of_limit()
                .map(|share| PointWithRange::point_without_range(x, y / share));
            limits.extend(limit.filter(|limit| !limits.contains(limit)));
        }
    }
    let marks = || series.values().flatten();
    let low = marks().map(|mark| mark.x).fold(f64::INFINITY, f64::min) / 2.0;
    let high = marks().map(|mark| mark.x).fold(0.0, f64::max) * 2.0;
    if low > high {
        return None;
    }
    let guides = roofline_reference_lines(measured, (low, high));
    let named = series.into_iter().chain((!limits.is_empty()).then_some(("limit", limits)));
    let series = named.enumerate().map(|(colour, (name, marks))| CurveOrPointSeries {
        legend_name: name.to_owned(),
        colour_number: colour,
        joined_by_lines: false,
        marks,
    });
    let subtitle = match guides.is_empty() {
        true => "a point a case; the records hold no ceilings".to_owned(),
        false => "a point a case with hot caches, its limit above it; lines: measured ceilings"
            .to_owned(),
    };
    let chart = TitledChart {
        chart_title: "Roofline".to_owned(),
        chart_subtitle: subtitle,
        body: ChartBody::Xy(XyChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "operations a byte, logarithmic",
                PlottedUnit::Count,
                AxisScaleKind::Logarithmic,
            ),
            vertical_axis: ChartAxis::with_round_ticks(
                "operations a second, logarithmic",
                PlottedUnit::AmountPerSecond("FLOP"),
                AxisScaleKind::Logarithmic,
            ),
            series: series.collect(),
            reference_lines: guides,
            fills_page_width: true,
        }),
    };
    Some(ChartWithFileName::with_file_name_from_words(&["roofline"], chart))
}

fn roofline_coordinates(case: &CaseWithItsRuns) -> Option<(f64, f64)> {
    // If a case has GEMM operations, only these are counted, because its other operations are
    // negligible.
    let flops = match case.work.matmul_flops_of_all_dtypes() {
        0 => case.total_declared_flops(),
        matmul => matmul as f64,
    };
    let bytes = case.work.bytes_read_and_written() as f64;
    (flops > 0.0 && bytes > 0.0).then(|| (flops / bytes, flops / case.median_launch_ns() * 1e9))
}

/// Returns the lines of the roofline: the memory ceiling rises with operations per byte, and each
/// measured peak rate is a flat line from where memory allows it.
fn roofline_reference_lines(
    measured: &MeasurementsOfOneDevice,
    (low, high): (f64, f64),
) -> Vec<ReferenceLine> {
    let limits = &measured.limits;
    let top = limits.flops_per_s.values().copied().fold(0.0, f64::max);
    let memory = limits
        .memory_limit_with_most_bytes()
        .map(MeasuredMemoryLimit::bytes_read_and_written_per_s);
    let mut guides = Vec::new();
    if let Some(rate) = memory {
        let end = if top > 0.0 { (top / rate).min(high) } else { high };
        if end > low {
            guides.push(ReferenceLine {
                legend_name: format!(
                    "memory {}",
                    PlottedUnit::AmountPerSecond("B").short_text_with_unit(rate)
                ),
                line_corners: vec![(low, low * rate), (end, end * rate)],
            });
        }
    }
    for (unit, rate) in &limits.flops_per_s {
        let from = memory.map_or(low, |memory| (rate / memory).clamp(low, high));
        guides.push(ReferenceLine {
            legend_name: format!(
                "{unit} {}",
                PlottedUnit::AmountPerSecond("FLOP").short_text_with_unit(*rate)
            ),
            line_corners: vec![(from, *rate), (high, *rate)],
        });
    }
    guides
}
