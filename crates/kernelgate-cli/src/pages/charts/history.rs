//! Draws charts of case times over commits, with lines at the levels of the times.

use super::{ChartWithFileName, ChartsOfOneKind};
use crate::history::CaseTimeHistory;
use crate::history::series::HistoryPointOfCommit;
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, CurveOrPointSeries, PlottedUnit, PointWithRange,
    ReferenceLine, TitledChart, XyChart,
};
use crate::report::judgement_cells::ratio_as_percent_change;
use kernelgate::stats::median;

/// Largest number of commits in a history chart; only the last ones are drawn.
const MAX_COMMITS_IN_HISTORY_CHART: usize = 120;
/// Largest number of history charts that are drawn.
const MAX_HISTORY_CHARTS: usize = 24;
/// A history chart's time axis extends at least this relative distance below and above the last
/// level, so that noise does not fill the chart.
const MIN_RELATIVE_RANGE_OF_TIME_AXIS: f64 = 0.03;

/// Draws one history chart for each case; the cases whose time changed most recently come first.
pub fn history_charts(
    measured: &MeasurementsOfOneDevice,
    histories: &[CaseTimeHistory],
) -> ChartsOfOneKind {
    let mut drawn: Vec<(&CaseWithItsRuns, &CaseTimeHistory)> = measured
        .cases
        .iter()
        .flat_map(|case| {
            let of_case =
                histories.iter().filter(|history| history.current_case_id == case.case_id);
            of_case.map(move |history| (case, history))
        })
        .collect();
    let since = |history: &CaseTimeHistory| {
        let point = history.changes.last().map(|change| &history.points[change.first_point_after]);
        point.map(|point| point.first_process_start_unix_ms)
    };
    drawn.sort_by_key(|(_, history)| std::cmp::Reverse(since(history)));
    let mut gallery = ChartsOfOneKind::default();
    drawn.into_iter().for_each(|(case, history)| {
        gallery.add_all_or_skip(MAX_HISTORY_CHARTS, vec![history_chart_of_case(case, history)])
    });
    gallery
}

fn history_chart_of_case(case: &CaseWithItsRuns, history: &CaseTimeHistory) -> ChartWithFileName {
    let hidden = history.points.len().saturating_sub(MAX_COMMITS_IN_HISTORY_CHART);
    let points = &history.points[hidden..];
    let mark = |(at, point): (usize, &HistoryPointOfCommit)| PointWithRange {
        x: at as f64,
        y: point.median_launch_ns,
        y_range: (point.smallest_run_median_ns, point.largest_run_median_ns),
    };
    let level = corners_of_level_line(history, hidden);
    let last = level.last().map_or(0.0, |(_, ns)| *ns);
    let name = |at: usize| (at as f64, points[at].measured_code().short_commit_with_changes_mark());
    let changed =
        history.changes.iter().filter_map(|change| change.first_point_after.checked_sub(hidden));
    let mut ticks: Vec<usize> = changed.chain([0, points.len() - 1]).collect();
    ticks.sort_unstable();
    ticks.dedup();
    let x = ChartAxis {
        fixed_ticks: ticks.into_iter().map(name).collect(),
        ..ChartAxis::with_round_ticks(
            "commits, the last on the right",
            PlottedUnit::Count,
            AxisScaleKind::Linear,
        )
    };
    let y = ChartAxis {
        values_to_cover: vec![
            last * (1.0 - MIN_RELATIVE_RANGE_OF_TIME_AXIS),
            last * (1.0 + MIN_RELATIVE_RANGE_OF_TIME_AXIS),
        ],
        ..ChartAxis::with_round_ticks(
            "time of a launch",
            PlottedUnit::TimeNs,
            AxisScaleKind::Linear,
        )
    };
    let change = history.changes.last().map(|change| {
        let code = history.points[change.first_point_after]
            .measured_code()
            .short_commit_with_changes_mark();
        format!(
            ", last change {} at {code}",
            ratio_as_percent_change(1.0 + change.relative_level_change)
        )
    });
    let revision = match history.definition_revision {
        1 => String::new(),
        revision => format!("; revision {revision}"),
    };
    let card = history.card_or_host_id.as_ref().map(|card| format!("; {card}")).unwrap_or_default();
    let older = if hidden > 0 { format!("; {hidden} older commits hidden") } else { String::new() };
    let chart = TitledChart {
        chart_title: format!("{} {}", case.workload, case.problem_id),
        chart_subtitle: format!(
            "{} {}{revision}{older}{card}",
            case.implementation, case.cache_state
        ),
        body: ChartBody::Xy(XyChart {
            horizontal_axis: x,
            vertical_axis: y,
            series: vec![CurveOrPointSeries {
                legend_name: "median and range of a commit's runs".to_owned(),
                colour_number: 0,
                joined_by_lines: false,
                marks: points.iter().enumerate().map(mark).collect(),
            }],
            reference_lines: vec![ReferenceLine {
                legend_name: format!("level{}", change.unwrap_or_default()),
                line_corners: level,
            }],
            fills_page_width: false,
        }),
    };
    ChartWithFileName::with_file_name_from_words(&[&history.current_case_id, "history"], chart)
}

/// Returns the corners of the line that shows the time level between changes (the median of the
/// process runs there), for the points from `hidden` on.
fn corners_of_level_line(history: &CaseTimeHistory, hidden: usize) -> Vec<(f64, f64)> {
    let count = history.points.len();
    let mut ends: Vec<usize> =
        history.changes.iter().map(|change| change.first_point_after).collect();
    ends.extend([0, count]);
    ends.sort_unstable();
    ends.dedup();
    // A change of the level is drawn half-way between the two neighbouring points of the history.
    let edge = |point: usize| match point.saturating_sub(hidden) {
        0 => 0.0,
        shown if point == count => shown as f64 - 1.0,
        shown => shown as f64 - 0.5,
    };
    let mut corners = Vec::new();
    for end in ends.windows(2).filter(|end| end[1] > hidden) {
        let runs = history.points[end[0]..end[1]].iter().flat_map(|point| &point.run_medians_ns);
        let middle = median(&runs.copied().collect::<Vec<f64>>());
        corners.extend(end.iter().map(|point| (edge(*point), middle)));
    }
    corners
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::series::TimeLevelChange;
    use kernelgate::record::{
        BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, MeasurementOfRuns, RunEnvironment,
    };

    const TEST_CASE_ID: &str = "w/f/n1/cpu/hot";

    fn test_measurements_of_one_run() -> MeasurementsOfOneDevice {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "1",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        run.cases = [TEST_CASE_ID, "w/f/n2/cpu/hot"]
            .map(|id| {
                (id.to_owned(), CaseRecordWithSamples::example_with_sample_times(vec![100.0]))
            })
            .into();
        MeasurementsOfOneDevice::join_runs_and_baselines(
            &MeasurementOfRuns::group_matching_runs_into_measurements([run]),
            &[],
        )
        .unwrap()
    }

    /// Makes a test history with a level of 100 ns before the point `slower_from` and 110 ns from
    /// there on; 0 means no change.
    fn test_history(case: &str, points: usize, slower_from: usize) -> CaseTimeHistory {
        let time = |at: usize| if at >= slower_from { 110.0 } else { 100.0 };
        let point = |at: usize| HistoryPointOfCommit {
            measured_commit: Some(format!("{at:08x}")),
            differs_from_commit: false,
            first_process_start_unix_ms: at as i64,
            median_launch_ns: time(at),
            smallest_run_median_ns: time(at),
            largest_run_median_ns: time(at),
            run_medians_ns: vec![time(at)],
        };
        let change = TimeLevelChange {
            first_point_after: slower_from,
            last_commit_before_change: None,
            first_commit_after_change: None,
            possible_cause_commits: vec![],
            relative_level_change: 0.1,
            relative_change_low: 0.09,
            relative_change_high: 0.11,
            level_change_confidence: 0.99,
            changed_within_one_build: false,
        };
        CaseTimeHistory {
            package_name: None,
            current_case_id: case.to_owned(),
            earlier_ids: [].into(),
            definition_revision: 1,
            environment_fingerprint: "f".to_owned(),
            card_or_host_id: None,
            device: "d".to_owned(),
            points: (0..points).map(point).collect(),
            changes: if slower_from > 0 { vec![change] } else { vec![] },
            runs_ordered_by_time: 0,
            runs_not_searched_for_changes: 0,
        }
    }

    fn xy_body_of_figure(figure: &ChartWithFileName) -> &XyChart {
        let ChartBody::Xy(body) = &figure.chart.body else { panic!("curves") };
        body
    }

    #[test]
    fn charts_of_changed_cases_come_first_and_show_their_levels() {
        let steady = test_history(TEST_CASE_ID, 5, 0);
        let changed = test_history("w/f/n2/cpu/hot", 6, 4);
        let of_another = test_history("w/f/n3/cpu/hot", 5, 0);
        let gallery =
            history_charts(&test_measurements_of_one_run(), &[steady, changed, of_another]);
        let titles: Vec<&str> =
            gallery.figures.iter().map(|it| it.chart.chart_title.as_str()).collect();
        assert_eq!(titles, ["w/f n2", "w/f n1"]);
        let drawn = xy_body_of_figure(&gallery.figures[0]);
        assert_eq!(drawn.reference_lines[0].legend_name, "level, last change +10.0% at 00000004");
        assert_eq!(
            drawn.reference_lines[0].line_corners,
            [(0.0, 100.0), (3.5, 100.0), (3.5, 110.0), (5.0, 110.0)]
        );
        let ticks: Vec<&str> =
            drawn.horizontal_axis.fixed_ticks.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(ticks, ["00000000", "00000004", "00000005"]);
        assert_eq!(drawn.series[0].marks.len(), 6);
    }

    #[test]
    fn only_the_last_of_many_commits_are_drawn() {
        let gallery = history_charts(
            &test_measurements_of_one_run(),
            &[test_history(TEST_CASE_ID, 500, 100)],
        );
        let drawn = xy_body_of_figure(&gallery.figures[0]);
        assert_eq!(drawn.series[0].marks.len(), MAX_COMMITS_IN_HISTORY_CHART);
        assert_eq!(drawn.reference_lines[0].line_corners, [(0.0, 110.0), (119.0, 110.0)]);
        insta::assert_snapshot!(gallery.figures[0].chart.chart_subtitle, @"cpu hot; 380 older commits hidden");
        gallery.figures[0].chart.render_svg().unwrap();
    }
}
