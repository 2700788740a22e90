//! Draws charts of the differences between the process runs of each case.

use std::collections::BTreeMap;

use super::ChartsOfOneKind;
use super::speed::relative_change_charts;
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use crate::plot::{ChartRowWithLabel, MarkInChartRow};
use kernelgate::display::time_text;
use kernelgate::stats::{MedianAndQuartiles, half_range_by_median};

/// Largest number of runs of a case that are drawn as single dots; more runs are drawn as range and
/// quartiles.
const MAX_RUNS_DRAWN_AS_DOTS: usize = 12;

/// Draws, for each case with several process runs, the runs' median times relative to the median of
/// these.
pub fn charts_of_differences_between_runs(measured: &MeasurementsOfOneDevice) -> ChartsOfOneKind {
    let mut rows: BTreeMap<&str, Vec<ChartRowWithLabel>> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.run_medians_ns.len() > 1) {
        rows.entry(&case.workload).or_default().push(chart_row_of_case_runs(case));
    }
    relative_change_charts(
        rows,
        "runs",
        (
            "process runs",
            "median of each process run against the median of all; of many runs, ends and quartiles",
        ),
        "difference from the median",
    )
}

fn chart_row_of_case_runs(case: &CaseWithItsRuns) -> ChartRowWithLabel {
    let middle = case.median_launch_ns();
    let relative: Vec<f64> = case.run_medians_ns.iter().map(|median| median / middle).collect();
    let marks = if relative.len() <= MAX_RUNS_DRAWN_AS_DOTS {
        vec![MarkInChartRow::RingsAtValues(relative, 0)]
    } else {
        let (low, high) = case.range_of_run_medians_ns();
        let MedianAndQuartiles { q1, q3, .. } =
            MedianAndQuartiles::median_and_quartiles_from_values(&relative);
        vec![
            MarkInChartRow::IntervalWithCentreDot(low / middle, 1.0, high / middle, 0),
            MarkInChartRow::RectangleBetweenValues(q1, q3, 0),
        ]
    };
    ChartRowWithLabel {
        row_label: format!("{} {} {}", case.problem_id, case.implementation, case.cache_state),
        value_text: format!(
            "{} ±{:.2}%",
            time_text(middle),
            100.0 * half_range_by_median(&case.run_medians_ns)
        ),
        marks,
    }
}
