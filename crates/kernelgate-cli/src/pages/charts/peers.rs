//! Draws charts that compare peers (other people's kernels) with the project's own implementations
//! for the same problems.

use super::ChartsOfOneKind;
use super::speed::divide_rows_into_charts;
use crate::pages::measured_runs::PeerTimeForProblem;
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, LabelledRowsChart, MarkInChartRow,
    PlottedUnit, TitledChart,
};

/// Largest number of charts that compare times with those of peers.
const MAX_PEER_CHARTS: usize = 8;

/// Draws a row for each peer and problem: the peer's time divided by the time of the project's own
/// implementation.
pub fn peer_comparison_charts(times: &[PeerTimeForProblem]) -> ChartsOfOneKind {
    let row = |time: &PeerTimeForProblem| {
        let ratio = time.peer_launch_ns / time.own_fastest_launch_ns;
        let shown = kernelgate::display::time_text;
        ChartRowWithLabel {
            row_label: format!(
                "{} {} / {}",
                time.workload_and_problem, time.peer_name, time.fastest_own_implementation
            ),
            value_text: format!(
                "{} / {}",
                shown(time.peer_launch_ns),
                shown(time.own_fastest_launch_ns)
            ),
            marks: vec![MarkInChartRow::IntervalWithCentreDot(
                ratio.min(1.0),
                ratio,
                ratio.max(1.0),
                usize::from(ratio < 1.0),
            )],
        }
    };
    let mut gallery = ChartsOfOneKind::default();
    gallery.add_all_or_skip(
        MAX_PEER_CHARTS,
        divide_rows_into_charts("peers", "", times.iter().map(row).collect(), |part| TitledChart {
            chart_title: format!("Peers{part}"),
            chart_subtitle: "the peer's time over ours, logarithmic".to_owned(),
            body: ChartBody::Rows(LabelledRowsChart {
                horizontal_axis: ChartAxis::with_round_ticks(
                    "peer over ours",
                    PlottedUnit::Count,
                    AxisScaleKind::Logarithmic,
                ),
                mark_colour_legend: vec![
                    "ours is faster".to_owned(),
                    "the peer is faster".to_owned(),
                ],
                rows: vec![],
                vertical_line_value: Some(1.0),
            }),
        }),
    );
    gallery
}
