//! The implementations of a problem as bars: a ladder from the slowest to the fastest.

use super::{Figure, Gallery};
use crate::pages::measured::{Case, Measured};
use crate::plot::{Axis, Body, Chart, Quantity, Row, RowMark, Rows, ScaleKind};
use kernelgate::display::time;

/// Fewest implementations of a ladder.
const RUNGS: usize = 3;
/// Ladders that are drawn of one workload.
const OF_WORKLOAD: usize = 3;
/// Most charts.
const MOST: usize = 40;
/// From this ratio of the slowest to the fastest on, bars are logarithmic.
const WIDE: f64 = 12.0;

/// A chart for the problems with most implementations.
pub fn ladders(measured: &Measured) -> Gallery {
    let mut gallery = Gallery::default();
    let same = |a: &Case, b: &Case| {
        (&a.workload, &a.problem, &a.cache) == (&b.workload, &b.problem, &b.cache)
    };
    let mut problems: Vec<&[Case]> =
        measured.cases.chunk_by(same).filter(|cases| cases.len() >= RUNGS).collect();
    // The longest first, and of them the largest problem.
    problems.sort_by(|a, b| {
        let size = |cases: &[Case]| (cases.len(), cases[0].cache == "hot");
        (&a[0].workload, size(b))
            .cmp(&(&b[0].workload, size(a)))
            .then(b[0].time_ns().total_cmp(&a[0].time_ns()))
    });
    for workload in problems.chunk_by(|a, b| a[0].workload == b[0].workload) {
        for cases in workload.iter().take(OF_WORKLOAD) {
            gallery.add(MOST, vec![ladder(measured, cases)]);
        }
        gallery.left_out += workload.len().saturating_sub(OF_WORKLOAD);
    }
    gallery
}

/// Of one problem, the fastest case first.
fn ladder(measured: &Measured, cases: &[Case]) -> Figure {
    let first = &cases[0];
    let peers = measured.peers_of(first);
    let times = || cases.iter().map(Case::time_ns).chain(peers.values().copied());
    let (fastest, slowest) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
    let wide = slowest > WIDE * fastest;
    let row = |case: &Case| {
        let share = case.of_limit().map(|share| format!(", {:.1}% of limit", 100.0 * share));
        let limit = case.limit.iter().map(|limit| RowMark::Tick(limit.time_ns));
        let row = Row {
            label: case.implementation.clone(),
            value: time(case.time_ns()) + &share.unwrap_or_default(),
            marks: [RowMark::Bar(case.time_ns(), usize::from(!case.best))]
                .into_iter()
                .chain(limit)
                .collect(),
        };
        (case.time_ns(), row)
    };
    let of_peer = |(name, ns): (&&str, &f64)| {
        let marks = vec![RowMark::Bar(*ns, 2)];
        (*ns, Row { label: (*name).to_owned(), value: time(*ns), marks })
    };
    let mut rows: Vec<(f64, Row)> =
        cases.iter().map(row).chain(peers.iter().map(of_peer)).collect();
    rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    let of_peers = (!peers.is_empty()).then_some("peers");
    let legend = ["fastest", "others"].into_iter().chain(of_peers);
    let by =
        first.limit.as_ref().map(|limit| format!("; upright line: the limit, set by {}", limit.by));
    let (kind, spacing) = match wide {
        true => (ScaleKind::Log, ", logarithmic"),
        false => (ScaleKind::FromZero, ""),
    };
    let chart = Chart {
        title: format!("{} {}", first.workload, first.problem),
        subtitle: format!("{}{}", first.cache, by.unwrap_or_default()),
        body: Body::Rows(Rows {
            axis: Axis::new(&format!("time of a launch{spacing}"), Quantity::Time, kind),
            legend: legend.map(str::to_owned).collect(),
            rows: rows.into_iter().map(|(_, row)| row).collect(),
            origin: None,
        }),
    };
    Figure::new(&[&first.workload, &first.problem, &first.cache, "ladder"], chart)
}
