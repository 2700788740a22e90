//! The implementations of a problem as bars: a ladder from the slowest to the fastest.

use super::{ChartFigure, ChartGallery};
use crate::pages::measured_runs::{MeasuredCase, PeerTime, ReportMeasurements};
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, LabelledRow, LabelledRows, MAX_ROWS,
    PlottedUnit, ScaleKind,
};
use kernelgate::display::time_text;

/// Smallest number of implementations of a ladder.
const MIN_LADDER_RUNGS: usize = 3;
/// Largest number of ladders that are drawn for one workload.
const MAX_LADDERS_PER_WORKLOAD: usize = 3;
/// Largest number of charts.
const MAX_CHARTS: usize = 40;
/// Ratio of the slowest to the fastest from which bars are logarithmic.
const MIN_RATIO_FOR_LOG_AXIS: f64 = 12.0;

/// A chart for the problems with most implementations.
pub fn ladder_charts(measured: &ReportMeasurements) -> ChartGallery {
    let mut gallery = ChartGallery::default();
    let same = |a: &MeasuredCase, b: &MeasuredCase| {
        (&a.workload, &a.problem, &a.cache) == (&b.workload, &b.problem, &b.cache)
    };
    let mut problems: Vec<&[MeasuredCase]> =
        measured.cases.chunk_by(same).filter(|cases| cases.len() >= MIN_LADDER_RUNGS).collect();
    // Longer ladders come first; among equally long ones, ladders of larger problems.
    problems.sort_by(|a, b| {
        let size = |cases: &[MeasuredCase]| (cases.len(), cases[0].cache == "hot");
        (&a[0].workload, size(b))
            .cmp(&(&b[0].workload, size(a)))
            .then(b[0].median_time_ns().total_cmp(&a[0].median_time_ns()))
    });
    for workload in problems.chunk_by(|a, b| a[0].workload == b[0].workload) {
        for cases in workload.iter().take(MAX_LADDERS_PER_WORKLOAD) {
            gallery.add(MAX_CHARTS, vec![ladder_figure(measured, cases)]);
        }
        gallery.left_out += workload.len().saturating_sub(MAX_LADDERS_PER_WORKLOAD);
    }
    gallery
}

/// Chart of all implementations of one problem, the fastest first.
fn ladder_figure(measured: &ReportMeasurements, cases: &[MeasuredCase]) -> ChartFigure {
    let first = &cases[0];
    let peers = measured.peers_of(first);
    let row = |case: &MeasuredCase| {
        let share =
            case.fraction_of_limit().map(|share| format!(", {:.1}% of limit", 100.0 * share));
        let limit = case.limit.iter().map(|limit| ChartRowMark::Tick(limit.time_ns));
        let row = LabelledRow {
            label: case.implementation.clone(),
            value: time_text(case.median_time_ns()) + &share.unwrap_or_default(),
            marks: [ChartRowMark::Bar(case.median_time_ns(), usize::from(!case.best))]
                .into_iter()
                .chain(limit)
                .collect(),
        };
        (case.median_time_ns(), row)
    };
    let peer_row = |peer: &&PeerTime| {
        let marks = vec![ChartRowMark::Bar(peer.peer_ns, 2)];
        (
            peer.peer_ns,
            LabelledRow { label: peer.peer.clone(), value: time_text(peer.peer_ns), marks },
        )
    };
    let mut rows: Vec<(f64, LabelledRow)> =
        cases.iter().map(row).chain(peers.iter().map(peer_row)).collect();
    rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    // The slowest are skipped: nobody reads a picture of thousands of rows, which would be
    // gigabytes.
    let left_out = rows.len().saturating_sub(MAX_ROWS);
    let rows = rows.split_off(left_out);
    let (slowest, fastest) = (rows[0].0, rows[rows.len() - 1].0);
    let wide = slowest > MIN_RATIO_FOR_LOG_AXIS * fastest;
    let more = match left_out {
        0 => String::new(),
        count => format!("; {count} slower cases in the table"),
    };
    let of_peers = (!peers.is_empty()).then_some("peers");
    let legend = ["fastest", "others"].into_iter().chain(of_peers);
    let by =
        first.limit.as_ref().map(|limit| format!("; upright line: the limit, set by {}", limit.by));
    let (kind, spacing) = match wide {
        true => (ScaleKind::Log, ", logarithmic"),
        false => (ScaleKind::FromZero, ""),
    };
    let chart = ChartWithTitle {
        title: format!("{} {}", first.workload, first.problem),
        subtitle: format!("{}{}{more}", first.cache, by.unwrap_or_default()),
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new(&format!("time of a launch{spacing}"), PlottedUnit::Time, kind),
            legend: legend.map(str::to_owned).collect(),
            rows: rows.into_iter().map(|(_, row)| row).collect(),
            origin: None,
        }),
    };
    ChartFigure::new(&[&first.workload, &first.problem, &first.cache, "ladder"], chart)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{CaseRecord, Environment, Measurement, ProcessRun, Provenance};

    #[test]
    fn a_chart_of_many_implementations_shows_the_fastest_and_states_it() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        for i in 0..MAX_ROWS + 40 {
            let name = format!("cuda/row{i:03}");
            let timed = CaseRecord::untimed_samples(vec![1000.0 + i as f64]);
            let case = CaseRecord { implementation: name.clone(), ..timed };
            run.cases.insert(format!("w/f/n1/{name}/hot"), case);
        }
        let drawn = ladder_charts(
            &ReportMeasurements::new(&Measurement::group_into_measurements([run]), &[]).unwrap(),
        );
        let chart = &drawn.figures[0].chart;
        insta::assert_snapshot!(chart.subtitle, @"hot; 40 slower cases in the table");
        let ChartBody::Rows(rows) = &chart.body else { panic!("no rows") };
        let labels: Vec<&str> = rows.rows.iter().map(|row| row.label.as_str()).collect();
        assert_eq!(labels.len(), MAX_ROWS);
        assert_eq!([labels[0], labels[MAX_ROWS - 1]], ["cuda/row059", "cuda/row000"]);
    }
}
