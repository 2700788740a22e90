//! Charts of the differences between the process runs of each case.

use std::collections::BTreeMap;

use super::ChartGallery;
use super::speed::change_charts;
use crate::pages::measured_runs::{MeasuredCase, ReportMeasurements};
use crate::plot::{ChartRowMark, LabelledRow};
use kernelgate::display::time_text;
use kernelgate::stats::{QuartileSpread, relative_half_range};

/// Largest number of runs that are drawn one by one; more are drawn by their quartiles and ends.
const MAX_RUNS_DRAWN_SINGLY: usize = 12;

/// The medians of the process runs relative to their median, a row for each case with several runs.
pub fn run_distributions(measured: &ReportMeasurements) -> ChartGallery {
    let mut rows: BTreeMap<&str, Vec<LabelledRow>> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.medians_ns.len() > 1) {
        rows.entry(&case.workload).or_default().push(row(case));
    }
    change_charts(
        rows,
        "runs",
        (
            "process runs",
            "median of each process run against the median of all; of many runs, ends and quartiles",
        ),
        "difference from the median",
    )
}

fn row(case: &MeasuredCase) -> LabelledRow {
    let middle = case.median_time_ns();
    let relative: Vec<f64> = case.medians_ns.iter().map(|median| median / middle).collect();
    let marks = if relative.len() <= MAX_RUNS_DRAWN_SINGLY {
        vec![ChartRowMark::Dots(relative, 0)]
    } else {
        let (low, high) = case.median_range_ns();
        let QuartileSpread { q1, q3, .. } = QuartileSpread::from_values(&relative);
        vec![
            ChartRowMark::Interval(low / middle, 1.0, high / middle, 0),
            ChartRowMark::Span(q1, q3, 0),
        ]
    };
    LabelledRow {
        label: format!("{} {} {}", case.problem, case.implementation, case.cache),
        value: format!(
            "{} ±{:.2}%",
            time_text(middle),
            100.0 * relative_half_range(&case.medians_ns)
        ),
        marks,
    }
}
