//! Draws charts of time, rate and share of the limit over each problem axis that varies, with one
//! curve for each implementation.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::{ChartWithFileName, ChartsOfOneKind};
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice, ProblemAxisValues};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, CurveOrPointSeries, PlottedUnit, PointWithRange,
    ReferenceLine, TitledChart, XyChart,
};

/// Largest number of chart groups that are drawn for one workload and axis.
const MAX_CURVE_GROUPS_PER_AXIS: usize = 3;
/// Largest number of curve charts that are drawn.
const MAX_CURVE_CHARTS: usize = 150;

/// A quantity (time, rate or share of the limit) that a chart shows over a problem axis.
struct QuantityOverAxis {
    /// Word for the plotted quantity in the name of the chart's file.
    name: &'static str,
    label: &'static str,
    kind: AxisScaleKind,
    quantity: PlottedUnit,
    /// Function that computes the quantity of a case from a time in nanoseconds.
    quantity_from_time_ns: fn(&CaseWithItsRuns, f64) -> Option<f64>,
}

const LAUNCH_TIME_QUANTITY: QuantityOverAxis = QuantityOverAxis {
    name: "time",
    label: "time of a launch",
    kind: AxisScaleKind::Logarithmic,
    quantity: PlottedUnit::TimeNs,
    quantity_from_time_ns: |_, time_ns| Some(time_ns),
};

fn throughput_quantity(unit: &'static str) -> QuantityOverAxis {
    QuantityOverAxis {
        name: "rate",
        label: "rate",
        kind: AxisScaleKind::Logarithmic,
        quantity: PlottedUnit::AmountPerSecond(unit),
        quantity_from_time_ns: |case, time_ns| {
            Some(case.declared_amount_and_unit()?.0 / time_ns * 1e9)
        },
    }
}

const SHARE_OF_LIMIT_QUANTITY: QuantityOverAxis = QuantityOverAxis {
    name: "of-limit",
    label: "share of the limit",
    kind: AxisScaleKind::LinearFromZero,
    quantity: PlottedUnit::ShareAsPercent,
    quantity_from_time_ns: |case, time_ns| {
        Some(case.limit.as_ref()?.share_of_limit_reached(time_ns))
    },
};

/// Cases of a workload whose problems differ in only one axis, drawn as curves over that axis.
struct CurvesOverOneAxis<'a> {
    workload: &'a str,
    varying_axis: &'a str,
    /// The other axis values, which all curves of the chart share.
    other_axis_values: ProblemAxisValues,
    cache_state: &'a str,
    cases_by_axis_value: Vec<(u64, &'a CaseWithItsRuns)>,
    /// Values that the varying axis has among the cases.
    axis_values: BTreeSet<u64>,
}

/// Draws up to three charts (time, rate, share of the limit) for each group of problems that differ
/// in only one axis.
pub fn curve_charts(measured: &MeasurementsOfOneDevice) -> ChartsOfOneKind {
    let mut gallery = ChartsOfOneKind::default();
    let mut drawn: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for group in group_cases_by_varying_axis(&measured.cases) {
        let figures = figures_of_curve_group(measured, &group);
        let count = drawn.entry((group.workload, group.varying_axis)).or_default();
        *count += 1;
        if *count > MAX_CURVE_GROUPS_PER_AXIS {
            gallery.omitted_charts += figures.len();
        } else {
            gallery.add_all_or_skip(MAX_CURVE_CHARTS, figures);
        }
    }
    gallery
}

/// Groups the cases that differ in only one axis, if that axis has at least three values. Within a
/// workload, the axes with the most values come first; within an axis, the groups with the most
/// values and cases.
fn group_cases_by_varying_axis(cases: &[CaseWithItsRuns]) -> Vec<CurvesOverOneAxis<'_>> {
    type CurveGroupKey<'a> = (&'a str, &'a str, ProblemAxisValues, &'a str);
    let mut groups: BTreeMap<CurveGroupKey<'_>, Vec<(u64, &CaseWithItsRuns)>> = BTreeMap::new();
    for case in cases {
        for (axis, value) in &case.axes.numeric_axes {
            let key = (
                &*case.workload,
                axis.as_str(),
                case.axes.without_numeric_axes(&[axis]),
                &*case.cache_state,
            );
            groups.entry(key).or_default().push((*value, case));
        }
    }
    let mut all: Vec<CurvesOverOneAxis<'_>> = groups
        .into_iter()
        .map(|((workload, axis, rest, cache), cases)| {
            let values = cases.iter().map(|(value, _)| *value).collect();
            CurvesOverOneAxis {
                workload,
                varying_axis: axis,
                other_axis_values: rest,
                cache_state: cache,
                cases_by_axis_value: cases,
                axis_values: values,
            }
        })
        .filter(|group| group.axis_values.len() > 2)
        .collect();
    let mut most: BTreeMap<(String, String), usize> = BTreeMap::new();
    for group in &all {
        let most =
            most.entry((group.workload.to_owned(), group.varying_axis.to_owned())).or_default();
        *most = (*most).max(group.axis_values.len());
    }
    let of_axis = |group: &CurvesOverOneAxis<'_>| {
        most[&(group.workload.to_owned(), group.varying_axis.to_owned())]
    };
    all.sort_by_key(|group| {
        let size =
            (group.axis_values.len(), group.cache_state == "hot", group.cases_by_axis_value.len());
        (group.workload, Reverse(of_axis(group)), group.varying_axis, Reverse(size))
    });
    all
}

fn figures_of_curve_group(
    measured: &MeasurementsOfOneDevice,
    group: &CurvesOverOneAxis<'_>,
) -> Vec<ChartWithFileName> {
    let unit = group
        .cases_by_axis_value
        .iter()
        .find_map(|(_, case)| Some(case.declared_amount_and_unit()?.1));
    let views =
        [Some(LAUNCH_TIME_QUANTITY), unit.map(throughput_quantity), Some(SHARE_OF_LIMIT_QUANTITY)];
    views
        .into_iter()
        .flatten()
        .filter_map(|view| figure_of_curve_group(measured, group, &view))
        .collect()
}

fn figure_of_curve_group(
    measured: &MeasurementsOfOneDevice,
    group: &CurvesOverOneAxis<'_>,
    view: &QuantityOverAxis,
) -> Option<ChartWithFileName> {
    let mut lines: BTreeMap<&str, Vec<PointWithRange>> = BTreeMap::new();
    let mut peers: BTreeMap<&str, BTreeMap<u64, PointWithRange>> = BTreeMap::new();
    let mut limit: BTreeMap<u64, f64> = BTreeMap::new();
    for (value, case) in &group.cases_by_axis_value {
        let Some(y) = (view.quantity_from_time_ns)(case, case.median_launch_ns()) else { continue };
        let (low, high) = case.range_of_run_medians_ns();
        let end = |time_ns| (view.quantity_from_time_ns)(case, time_ns).unwrap_or(y);
        let (a, b) = (end(low), end(high));
        let mark = PointWithRange { x: *value as f64, y, y_range: (a.min(b), a.max(b)) };
        lines.entry(&case.implementation).or_default().push(mark);
        for time in measured.peer_times_for_case(case) {
            let mark = (view.quantity_from_time_ns)(case, time.peer_launch_ns)
                .map(|y| (*value, PointWithRange::point_without_range(*value as f64, y)));
            peers.entry(&time.peer_name).or_default().extend(mark);
        }
        if let Some(allowed) = &case.limit
            && let Some(at) = (view.quantity_from_time_ns)(case, allowed.shortest_launch_ns)
        {
            limit.insert(*value, at);
        }
    }
    if lines.is_empty() {
        return None;
    }
    // Peers (other people's kernels) get the colours after those of the workload's implementations.
    let first = measured
        .colour_by_implementation
        .keys()
        .filter(|(workload, _)| workload == group.workload)
        .count();
    let peers = peers.into_iter().enumerate().map(|(i, (name, marks))| CurveOrPointSeries {
        legend_name: name.to_owned(),
        colour_number: first + i,
        joined_by_lines: true,
        marks: marks.into_values().collect(),
    });
    let series: Vec<CurveOrPointSeries> = lines
        .into_iter()
        .map(|(name, mut marks)| {
            marks.sort_by(|a, b| a.x.total_cmp(&b.x));
            let colour = measured.colour_of_implementation(group.workload, name);
            CurveOrPointSeries {
                legend_name: name.to_owned(),
                colour_number: colour,
                joined_by_lines: true,
                marks,
            }
        })
        .chain(peers)
        .collect();
    let points: Vec<(f64, f64)> = limit.into_iter().map(|(x, y)| (x as f64, y)).collect();
    let guides = match points.is_empty() {
        true => vec![],
        false => vec![ReferenceLine { legend_name: "limit".to_owned(), line_corners: points }],
    };
    let ends = group.axis_values.first().zip(group.axis_values.last());
    let spaced = ends.is_some_and(|(first, last)| *first > 0 && last / first >= 4);
    let kind = if spaced { AxisScaleKind::Logarithmic } else { AxisScaleKind::Linear };
    let x = ChartAxis::with_round_ticks(group.varying_axis, PlottedUnit::Count, kind);
    let spacing = if view.kind == AxisScaleKind::Logarithmic { ", logarithmic" } else { "" };
    let rest = group.other_axis_values.to_string();
    let comma = if rest.is_empty() { "" } else { ", " };
    let chart = TitledChart {
        chart_title: format!("{} over {}", group.workload, group.varying_axis),
        chart_subtitle: format!("{rest}{comma}{}", group.cache_state),
        body: ChartBody::Xy(XyChart {
            horizontal_axis: x.with_ticks_at(group.axis_values.iter().map(|value| *value as f64)),
            vertical_axis: ChartAxis::with_round_ticks(
                &format!("{}{spacing}", view.label),
                view.quantity,
                view.kind,
            ),
            series,
            reference_lines: guides,
            fills_page_width: false,
        }),
    };
    let words = [group.workload, group.varying_axis, &rest, group.cache_state, view.name];
    Some(ChartWithFileName::with_file_name_from_words(&words, chart))
}
