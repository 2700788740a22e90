//! The roofline: operations a second over operations a byte, for all cases, with their limits. The
//! chart takes the limit of a case from its record, as tables do for the share of the limit.

use std::collections::BTreeMap;

use kernelgate::measure::limits::MemoryLimit;

use super::ChartFigure;
use crate::pages::measured_runs::{MeasuredCase, ReportMeasurements};
use crate::plot::{
    ChartAxis, ChartBody, ChartWithTitle, CurveMark, CurveSeries, GuideLine, PlottedUnit,
    ScaleKind, Xy,
};

/// The roofline of the cases that declare operations and bytes; `None` without such a case.
pub fn roofline_figure(measured: &ReportMeasurements) -> Option<ChartFigure> {
    let mut series: BTreeMap<&str, Vec<CurveMark>> = BTreeMap::new();
    let mut limits: Vec<CurveMark> = Vec::new();
    for case in measured.cases.iter().filter(|case| case.cache != "cold") {
        if let Some((x, y)) = roofline_point(case) {
            series.entry(&case.workload).or_default().push(CurveMark::at(x, y));
            let limit = case.fraction_of_limit().map(|share| CurveMark::at(x, y / share));
            limits.extend(limit.filter(|limit| !limits.contains(limit)));
        }
    }
    let marks = || series.values().flatten();
    let low = marks().map(|mark| mark.x).fold(f64::INFINITY, f64::min) / 2.0;
    let high = marks().map(|mark| mark.x).fold(0.0, f64::max) * 2.0;
    if low > high {
        return None;
    }
    let guides = roofline_guides(measured, (low, high));
    let named = series.into_iter().chain((!limits.is_empty()).then_some(("limit", limits)));
    let series = named.enumerate().map(|(colour, (name, marks))| CurveSeries {
        name: name.to_owned(),
        colour,
        joined: false,
        marks,
    });
    let subtitle = match guides.is_empty() {
        true => "a point a case; the records hold no ceilings".to_owned(),
        false => "a point a case with hot caches, its limit above it; lines: measured ceilings"
            .to_owned(),
    };
    let chart = ChartWithTitle {
        title: "Roofline".to_owned(),
        subtitle,
        body: ChartBody::Xy(Xy {
            x: ChartAxis::new("operations a byte, logarithmic", PlottedUnit::Count, ScaleKind::Log),
            y: ChartAxis::new(
                "operations a second, logarithmic",
                PlottedUnit::Rate("FLOP"),
                ScaleKind::Log,
            ),
            series: series.collect(),
            guides,
            broad: true,
        }),
    };
    Some(ChartFigure::new(&["roofline"], chart))
}

fn roofline_point(case: &MeasuredCase) -> Option<(f64, f64)> {
    // Operations outside GEMMs are negligible beside GEMMs.
    let flops = match case.work.matmul_flops() {
        0 => case.flops(),
        matmul => matmul as f64,
    };
    let bytes = case.work.total_bytes() as f64;
    (flops > 0.0 && bytes > 0.0).then(|| (flops / bytes, flops / case.median_time_ns() * 1e9))
}

/// Roofline lines: the memory ceiling of the largest traffic rises up to the highest measured rate
/// of operations, and each rate is a flat line from where memory allows it.
fn roofline_guides(measured: &ReportMeasurements, (low, high): (f64, f64)) -> Vec<GuideLine> {
    let limits = &measured.limits;
    let top = limits.flops_per_s.values().copied().fold(0.0, f64::max);
    let memory = limits.largest_memory().map(MemoryLimit::bytes_per_s);
    let mut guides = Vec::new();
    if let Some(rate) = memory {
        let end = if top > 0.0 { (top / rate).min(high) } else { high };
        if end > low {
            guides.push(GuideLine {
                name: format!("memory {}", PlottedUnit::Rate("B").text(rate)),
                points: vec![(low, low * rate), (end, end * rate)],
            });
        }
    }
    for (unit, rate) in &limits.flops_per_s {
        let from = memory.map_or(low, |memory| (rate / memory).clamp(low, high));
        guides.push(GuideLine {
            name: format!("{unit} {}", PlottedUnit::Rate("FLOP").text(*rate)),
            points: vec![(from, *rate), (high, *rate)],
        });
    }
    guides
}
