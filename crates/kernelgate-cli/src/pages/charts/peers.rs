//! Charts that compare other people's kernels with ours for the same problems.

use super::ChartGallery;
use super::speed::charts_of_at_most_max_rows;
use crate::pages::measured_runs::PeerTime;
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, LabelledRow, LabelledRows, PlottedUnit,
    ScaleKind,
};

/// Largest number of charts.
const MAX_CHARTS: usize = 8;

/// A row for each peer of a problem: the time of the peer over ours.
pub fn peers(times: &[PeerTime]) -> ChartGallery {
    let row = |time: &PeerTime| {
        let ratio = time.peer_ns / time.ours_ns;
        let shown = kernelgate::display::time_text;
        LabelledRow {
            label: format!("{} {} / {}", time.problem, time.peer, time.implementation),
            value: format!("{} / {}", shown(time.peer_ns), shown(time.ours_ns)),
            marks: vec![ChartRowMark::Interval(
                ratio.min(1.0),
                ratio,
                ratio.max(1.0),
                usize::from(ratio < 1.0),
            )],
        }
    };
    let mut gallery = ChartGallery::default();
    gallery.add(
        MAX_CHARTS,
        charts_of_at_most_max_rows("peers", "", times.iter().map(row).collect(), |part| {
            ChartWithTitle {
                title: format!("Peers{part}"),
                subtitle: "the peer's time over ours, logarithmic".to_owned(),
                body: ChartBody::Rows(LabelledRows {
                    axis: ChartAxis::new("peer over ours", PlottedUnit::Count, ScaleKind::Log),
                    legend: vec!["ours is faster".to_owned(), "the peer is faster".to_owned()],
                    rows: vec![],
                    origin: Some(1.0),
                }),
            }
        }),
    );
    gallery
}
