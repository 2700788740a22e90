//! Charts of time, rate and share of the limit over each axis that varies, with a curve for each
//! implementation.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::{ChartFigure, ChartGallery};
use crate::pages::measured_runs::{MeasuredCase, ProblemAxes, ReportMeasurements};
use crate::plot::{
    ChartAxis, ChartBody, ChartWithTitle, CurveMark, CurveSeries, GuideLine, PlottedUnit,
    ScaleKind, Xy,
};

/// Largest number of groups of problems that are drawn for one workload and axis.
const MAX_GROUPS_PER_AXIS: usize = 3;
/// Largest number of charts.
const MAX_CHARTS: usize = 150;

/// A quantity that a chart shows over an axis of the problems.
struct PlottedQuantity {
    /// Part of the name of the chart's file.
    name: &'static str,
    label: &'static str,
    kind: ScaleKind,
    quantity: PlottedUnit,
    /// Function that computes the quantity from a case and its time in nanoseconds.
    value: fn(&MeasuredCase, f64) -> Option<f64>,
}

const TIME_QUANTITY: PlottedQuantity = PlottedQuantity {
    name: "time",
    label: "time of a launch",
    kind: ScaleKind::Log,
    quantity: PlottedUnit::Time,
    value: |_, time_ns| Some(time_ns),
};

fn rate_quantity(unit: &'static str) -> PlottedQuantity {
    PlottedQuantity {
        name: "rate",
        label: "rate",
        kind: ScaleKind::Log,
        quantity: PlottedUnit::Rate(unit),
        value: |case, time_ns| Some(case.amount()?.0 / time_ns * 1e9),
    }
}

const SHARE_QUANTITY: PlottedQuantity = PlottedQuantity {
    name: "of-limit",
    label: "share of the limit",
    kind: ScaleKind::FromZero,
    quantity: PlottedUnit::Share,
    value: |case, time_ns| Some(case.limit.as_ref()?.fraction(time_ns)),
};

/// Problems of a workload that differ in only one axis.
struct CurveGroup<'a> {
    workload: &'a str,
    axis: &'a str,
    /// Axis values and words that all curves of the chart share.
    rest: ProblemAxes,
    cache: &'a str,
    cases: Vec<(u64, &'a MeasuredCase)>,
    /// Values of the axis that occur in the cases.
    values: BTreeSet<u64>,
}

/// Three charts for each group of problems that differ in one axis.
pub fn curves(measured: &ReportMeasurements) -> ChartGallery {
    let mut gallery = ChartGallery::default();
    let mut drawn: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for group in curve_groups(&measured.cases) {
        let figures = curve_figures(measured, &group);
        let count = drawn.entry((group.workload, group.axis)).or_default();
        *count += 1;
        if *count > MAX_GROUPS_PER_AXIS {
            gallery.left_out += figures.len();
        } else {
            gallery.add(MAX_CHARTS, figures);
        }
    }
    gallery
}

/// Groups of cases that have at least three values of the axis. The axes with most values come
/// first, and within an axis the groups with most values and cases.
fn curve_groups(cases: &[MeasuredCase]) -> Vec<CurveGroup<'_>> {
    type CurveKey<'a> = (&'a str, &'a str, ProblemAxes, &'a str);
    let mut groups: BTreeMap<CurveKey<'_>, Vec<(u64, &MeasuredCase)>> = BTreeMap::new();
    for case in cases {
        for (axis, value) in &case.axes.numbers {
            let key = (&*case.workload, axis.as_str(), case.axes.without(&[axis]), &*case.cache);
            groups.entry(key).or_default().push((*value, case));
        }
    }
    let mut all: Vec<CurveGroup<'_>> = groups
        .into_iter()
        .map(|((workload, axis, rest, cache), cases)| {
            let values = cases.iter().map(|(value, _)| *value).collect();
            CurveGroup { workload, axis, rest, cache, cases, values }
        })
        .filter(|group| group.values.len() > 2)
        .collect();
    let mut most: BTreeMap<(String, String), usize> = BTreeMap::new();
    for group in &all {
        let most = most.entry((group.workload.to_owned(), group.axis.to_owned())).or_default();
        *most = (*most).max(group.values.len());
    }
    let of_axis =
        |group: &CurveGroup<'_>| most[&(group.workload.to_owned(), group.axis.to_owned())];
    all.sort_by_key(|group| {
        let size = (group.values.len(), group.cache == "hot", group.cases.len());
        (group.workload, Reverse(of_axis(group)), group.axis, Reverse(size))
    });
    all
}

fn curve_figures(measured: &ReportMeasurements, group: &CurveGroup<'_>) -> Vec<ChartFigure> {
    let unit = group.cases.iter().find_map(|(_, case)| Some(case.amount()?.1));
    let views = [Some(TIME_QUANTITY), unit.map(rate_quantity), Some(SHARE_QUANTITY)];
    views.into_iter().flatten().filter_map(|view| curve_figure(measured, group, &view)).collect()
}

fn curve_figure(
    measured: &ReportMeasurements,
    group: &CurveGroup<'_>,
    view: &PlottedQuantity,
) -> Option<ChartFigure> {
    let mut lines: BTreeMap<&str, Vec<CurveMark>> = BTreeMap::new();
    let mut peers: BTreeMap<&str, BTreeMap<u64, CurveMark>> = BTreeMap::new();
    let mut limit: BTreeMap<u64, f64> = BTreeMap::new();
    for (value, case) in &group.cases {
        let Some(y) = (view.value)(case, case.median_time_ns()) else { continue };
        let (low, high) = case.median_range_ns();
        let end = |time_ns| (view.value)(case, time_ns).unwrap_or(y);
        let (a, b) = (end(low), end(high));
        let mark = CurveMark { x: *value as f64, y, range: (a.min(b), a.max(b)) };
        lines.entry(&case.implementation).or_default().push(mark);
        for time in measured.peers_of(case) {
            let mark =
                (view.value)(case, time.peer_ns).map(|y| (*value, CurveMark::at(*value as f64, y)));
            peers.entry(&time.peer).or_default().extend(mark);
        }
        if let Some(allowed) = &case.limit
            && let Some(at) = (view.value)(case, allowed.time_ns)
        {
            limit.insert(*value, at);
        }
    }
    if lines.is_empty() {
        return None;
    }
    // Peers get the colours after those of the implementations.
    let first = measured.colours.keys().filter(|(workload, _)| workload == group.workload).count();
    let peers = peers.into_iter().enumerate().map(|(i, (name, marks))| CurveSeries {
        name: name.to_owned(),
        colour: first + i,
        joined: true,
        marks: marks.into_values().collect(),
    });
    let series: Vec<CurveSeries> = lines
        .into_iter()
        .map(|(name, mut marks)| {
            marks.sort_by(|a, b| a.x.total_cmp(&b.x));
            let colour = measured.colour(group.workload, name);
            CurveSeries { name: name.to_owned(), colour, joined: true, marks }
        })
        .chain(peers)
        .collect();
    let points: Vec<(f64, f64)> = limit.into_iter().map(|(x, y)| (x as f64, y)).collect();
    let guides = match points.is_empty() {
        true => vec![],
        false => vec![GuideLine { name: "limit".to_owned(), points }],
    };
    let ends = group.values.first().zip(group.values.last());
    let spaced = ends.is_some_and(|(first, last)| *first > 0 && last / first >= 4);
    let kind = if spaced { ScaleKind::Log } else { ScaleKind::Linear };
    let x = ChartAxis::new(group.axis, PlottedUnit::Count, kind);
    let spacing = if view.kind == ScaleKind::Log { ", logarithmic" } else { "" };
    let rest = group.rest.to_string();
    let chart = ChartWithTitle {
        title: format!("{} over {}", group.workload, group.axis),
        subtitle: format!("{rest}{}{}", if rest.is_empty() { "" } else { ", " }, group.cache),
        body: ChartBody::Xy(Xy {
            x: x.with_ticks(group.values.iter().map(|value| *value as f64)),
            y: ChartAxis::new(&format!("{}{spacing}", view.label), view.quantity, view.kind),
            series,
            guides,
            broad: false,
        }),
    };
    let words = [group.workload, group.axis, &rest, group.cache, view.name];
    Some(ChartFigure::new(&words, chart))
}
