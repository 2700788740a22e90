//! Charts of the differences between the process runs of each case.

use std::collections::BTreeMap;

use super::Gallery;
use super::speed::changes;
use crate::pages::measured::{Case, Measured};
use crate::plot::{Row, RowMark};
use kernelgate::display::time;
use kernelgate::stats::{Spread, half_range};

/// Largest number of runs that are drawn one by one; more are drawn by their quartiles and ends.
const MAX_SINGLE_RUNS: usize = 12;

/// The medians of the process runs relative to their median, a row for each case with several runs.
pub fn distributions(measured: &Measured) -> Gallery {
    let mut rows: BTreeMap<&str, Vec<Row>> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.medians_ns.len() > 1) {
        rows.entry(&case.workload).or_default().push(row(case));
    }
    changes(
        rows,
        "runs",
        (
            "process runs",
            "median of each process run against the median of all; of many runs, ends and quartiles",
        ),
        "difference from the median",
    )
}

fn row(case: &Case) -> Row {
    let middle = case.time_ns();
    let relative: Vec<f64> = case.medians_ns.iter().map(|median| median / middle).collect();
    let marks = if relative.len() <= MAX_SINGLE_RUNS {
        vec![RowMark::Dots(relative, 0)]
    } else {
        let (low, high) = case.range_ns();
        let Spread { q1, q3, .. } = Spread::from_values(&relative);
        vec![RowMark::Interval(low / middle, 1.0, high / middle, 0), RowMark::Span(q1, q3, 0)]
    };
    Row {
        label: format!("{} {} {}", case.problem, case.implementation, case.cache),
        value: format!("{} ±{:.2}%", time(middle), 100.0 * half_range(&case.medians_ns)),
        marks,
    }
}
