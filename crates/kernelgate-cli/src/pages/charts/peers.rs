//! Draws charts that compare peers (other people's kernels) with the project's own implementations
//! for the same problems.

use super::ChartsOfOneKind;
use super::speed::divide_rows_into_charts;
use crate::pages::measured_runs::PeerTimeForProblem;
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, LabelledRowsChart, MarkInChartRow,
    PlottedUnit, TitledChart,
};

/// Largest number of charts.
const MAX_PEER_CHARTS: usize = 8;

/// Draws a row for each peer and problem: the peer's time divided by the time of the project's own
/// implementation.
pub fn peer_comparison_charts(times: &[PeerTimeForProblem]) -> ChartsOfOneKind {
    let row = |time: &PeerTimeForProblem| {
        let ratio = time.peer_ns / time.own_fastest_ns;
        let shown = kernelgate::display::time_text;
        ChartRowWithLabel {
            label: format!("{} {} / {}", time.problem, time.peer, time.implementation),
            value_text: format!("{} / {}", shown(time.peer_ns), shown(time.own_fastest_ns)),
            marks: vec![MarkInChartRow::Interval(
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
            title: format!("Peers{part}"),
            subtitle: "the peer's time over ours, logarithmic".to_owned(),
            body: ChartBody::Rows(LabelledRowsChart {
                axis: ChartAxis::with_round_ticks(
                    "peer over ours",
                    PlottedUnit::Count,
                    AxisScaleKind::Log,
                ),
                legend: vec!["ours is faster".to_owned(), "the peer is faster".to_owned()],
                rows: vec![],
                origin: Some(1.0),
            }),
        }),
    );
    gallery
}
