//! Draws the implementations of a problem as bars (a ladder), from the slowest to the fastest.

use super::{ChartWithFileName, ChartsOfOneKind};
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice, PeerTimeForProblem};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, LabelledRowsChart,
    MAX_ROWS_PER_ROW_CHART, MarkInChartRow, PlottedUnit, TitledChart,
};
use kernelgate::display::time_text;

/// Smallest number of implementations of a problem for which a ladder chart is drawn.
const MIN_LADDER_IMPLEMENTATIONS: usize = 3;
/// Largest number of ladder charts that are drawn for one workload.
const MAX_LADDERS_PER_WORKLOAD: usize = 3;
/// Largest number of ladder charts that are drawn.
const MAX_LADDER_CHARTS: usize = 40;
/// Ratio of the slowest to the fastest time from which a ladder chart has a logarithmic axis.
const MIN_TIME_RATIO_FOR_LOG_AXIS: f64 = 12.0;

/// Draws a ladder chart for each workload's problems with the most implementations.
pub fn ladder_charts(measured: &MeasurementsOfOneDevice) -> ChartsOfOneKind {
    let mut gallery = ChartsOfOneKind::default();
    let same = |a: &CaseWithItsRuns, b: &CaseWithItsRuns| {
        (&a.workload, &a.problem_id, &a.cache_state) == (&b.workload, &b.problem_id, &b.cache_state)
    };
    let mut problems: Vec<&[CaseWithItsRuns]> = measured
        .cases
        .chunk_by(same)
        .filter(|cases| cases.len() >= MIN_LADDER_IMPLEMENTATIONS)
        .collect();
    // Ladders with more implementations come first; among equally long ones, those with the larger
    // time.
    problems.sort_by(|a, b| {
        let size = |cases: &[CaseWithItsRuns]| (cases.len(), cases[0].cache_state == "hot");
        (&a[0].workload, size(b))
            .cmp(&(&b[0].workload, size(a)))
            .then(b[0].median_launch_ns().total_cmp(&a[0].median_launch_ns()))
    });
    for workload in problems.chunk_by(|a, b| a[0].workload == b[0].workload) {
        for cases in workload.iter().take(MAX_LADDERS_PER_WORKLOAD) {
            gallery
                .add_all_or_skip(MAX_LADDER_CHARTS, vec![ladder_chart_of_problem(measured, cases)]);
        }
        gallery.omitted_charts += workload.len().saturating_sub(MAX_LADDERS_PER_WORKLOAD);
    }
    gallery
}

/// Draws the ladder chart of all implementations of one problem, from the slowest to the fastest.
fn ladder_chart_of_problem(
    measured: &MeasurementsOfOneDevice,
    cases: &[CaseWithItsRuns],
) -> ChartWithFileName {
    let first = &cases[0];
    let peers = measured.peer_times_for_case(first);
    let row = |case: &CaseWithItsRuns| {
        let share =
            case.fraction_of_limit().map(|share| format!(", {:.1}% of limit", 100.0 * share));
        let limit = case
            .limit
            .iter()
            .map(|limit| MarkInChartRow::VerticalTickAtValue(limit.shortest_launch_ns));
        let row = ChartRowWithLabel {
            row_label: case.implementation.clone(),
            value_text: time_text(case.median_launch_ns()) + &share.unwrap_or_default(),
            marks: [MarkInChartRow::BarToValue(
                case.median_launch_ns(),
                usize::from(!case.is_fastest_of_problem),
            )]
            .into_iter()
            .chain(limit)
            .collect(),
        };
        (case.median_launch_ns(), row)
    };
    let peer_row = |peer: &&PeerTimeForProblem| {
        let marks = vec![MarkInChartRow::BarToValue(peer.peer_launch_ns, 2)];
        (
            peer.peer_launch_ns,
            ChartRowWithLabel {
                row_label: peer.peer_name.clone(),
                value_text: time_text(peer.peer_launch_ns),
                marks,
            },
        )
    };
    let mut rows: Vec<(f64, ChartRowWithLabel)> =
        cases.iter().map(row).chain(peers.iter().map(peer_row)).collect();
    rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    // The slowest implementations are skipped, because a chart of thousands of rows is unreadable
    // and takes gigabytes.
    let left_out = rows.len().saturating_sub(MAX_ROWS_PER_ROW_CHART);
    let rows = rows.split_off(left_out);
    let (slowest, fastest) = (rows[0].0, rows[rows.len() - 1].0);
    let wide = slowest > MIN_TIME_RATIO_FOR_LOG_AXIS * fastest;
    let more = match left_out {
        0 => String::new(),
        count => format!("; {count} slower cases in the table"),
    };
    let of_peers = (!peers.is_empty()).then_some("peers");
    let legend = ["fastest", "others"].into_iter().chain(of_peers);
    let by = first
        .limit
        .as_ref()
        .map(|limit| format!("; upright line: the limit, set by {}", limit.deciding_ceiling));
    let (kind, spacing) = match wide {
        true => (AxisScaleKind::Logarithmic, ", logarithmic"),
        false => (AxisScaleKind::LinearFromZero, ""),
    };
    let chart = TitledChart {
        chart_title: format!("{} {}", first.workload, first.problem_id),
        chart_subtitle: format!("{}{}{more}", first.cache_state, by.unwrap_or_default()),
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                &format!("time of a launch{spacing}"),
                PlottedUnit::TimeNs,
                kind,
            ),
            mark_colour_legend: legend.map(str::to_owned).collect(),
            rows: rows.into_iter().map(|(_, row)| row).collect(),
            vertical_line_value: None,
        }),
    };
    ChartWithFileName::with_file_name_from_words(
        &[&first.workload, &first.problem_id, &first.cache_state, "ladder"],
        chart,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{
        BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, MeasurementOfRuns, RunEnvironment,
    };

    #[test]
    fn a_chart_of_many_implementations_names_the_omitted_ones() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        for i in 0..MAX_ROWS_PER_ROW_CHART + 40 {
            let name = format!("cuda/row{i:03}");
            let timed = CaseRecordWithSamples::example_with_sample_times(vec![1000.0 + i as f64]);
            let case = CaseRecordWithSamples { implementation: name.clone(), ..timed };
            run.cases.insert(format!("w/f/n1/{name}/hot"), case);
        }
        let drawn = ladder_charts(
            &MeasurementsOfOneDevice::join_runs_and_baselines(
                &MeasurementOfRuns::group_matching_runs_into_measurements([run]),
                &[],
            )
            .unwrap(),
        );
        let chart = &drawn.figures[0].chart;
        insta::assert_snapshot!(chart.chart_subtitle, @"hot; 40 slower cases in the table");
        let ChartBody::Rows(rows) = &chart.body else { panic!("no rows") };
        let labels: Vec<&str> = rows.rows.iter().map(|row| row.row_label.as_str()).collect();
        assert_eq!(labels.len(), MAX_ROWS_PER_ROW_CHART);
        assert_eq!([labels[0], labels[MAX_ROWS_PER_ROW_CHART - 1]], ["cuda/row059", "cuda/row000"]);
    }
}
