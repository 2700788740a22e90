//! Heat maps of the fastest implementation over two or more axes that vary together.

use std::collections::{BTreeMap, BTreeSet};

use super::{ChartFigure, ChartGallery};
use crate::pages::measured_runs::{MeasuredCase, ProblemAxes, ReportMeasurements};
use crate::plot::{ChartBody, ChartWithTitle, HeatMap, PlottedUnit};
use kernelgate::display::natural_sort_key;

/// Smallest number of cells of a map.
const MIN_HEAT_MAP_CELLS: usize = 5;
/// Largest number of columns.
const MAX_COLUMNS: usize = 12;
/// Largest number of charts.
const MAX_CHARTS: usize = 24;

/// Makes a chart for each group of problems that differ in two or more numbers: the first number
/// varies downwards, the others to the right.
pub fn heat_maps(measured: &ReportMeasurements) -> ChartGallery {
    let mut gallery = ChartGallery::default();
    type Key<'a> = (&'a str, &'a str, Vec<&'a str>, Vec<&'a str>);
    let mut groups: BTreeMap<Key<'_>, Vec<&MeasuredCase>> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.best) {
        let names = case.axes.numbers.keys().map(String::as_str).collect();
        let words = case.axes.words.values().map(String::as_str).collect();
        groups.entry((&case.workload, &case.cache, names, words)).or_default().push(case);
    }
    for ((workload, cache, _, words), cases) in groups {
        if let Some(figure) = heat_figure(workload, cache, &words.join(" "), &cases) {
            gallery.add(MAX_CHARTS, vec![figure]);
        }
    }
    gallery
}

fn heat_figure(
    workload: &str,
    cache: &str,
    words: &str,
    cases: &[&MeasuredCase],
) -> Option<ChartFigure> {
    let values = |axis: &str| -> BTreeSet<u64> {
        cases.iter().filter_map(|case| case.axes.numbers.get(axis).copied()).collect()
    };
    let names = cases.first()?.axes.numbers.keys();
    let varying: Vec<&str> =
        names.map(String::as_str).filter(|axis| values(axis).len() > 1).collect();
    let (down, right) = varying.split_first().filter(|(_, right)| !right.is_empty())?;
    if cases.len() < MIN_HEAT_MAP_CELLS {
        return None;
    }
    let column = |case: &MeasuredCase| -> String {
        let axis_text = |axis: &&str| format!("{axis}{}", case.axes.numbers[*axis]);
        right.iter().map(axis_text).collect::<Vec<_>>().join(" ")
    };
    let columns: BTreeSet<(Vec<(String, u64)>, String)> =
        cases.iter().map(|case| (natural_sort_key(&column(case)), column(case))).collect();
    if columns.len() > MAX_COLUMNS {
        return None;
    }
    let rows: Vec<u64> = values(down).into_iter().collect();
    // If all limits are known, the map shows shares of the limit, which compare problems of
    // different sizes.
    let shares = cases.iter().all(|case| case.limit.is_some());
    let value = |case: &&&MeasuredCase| {
        case.fraction_of_limit().filter(|_| shares).unwrap_or_else(|| case.median_time_ns())
    };
    let cell = |row: u64, (_, name): &(Vec<(String, u64)>, String)| {
        let here = |case: &&&MeasuredCase| case.axes.numbers[*down] == row && column(case) == *name;
        cases.iter().find(here).as_ref().map(value)
    };
    let of_row = |row: &u64| columns.iter().map(|column| cell(*row, column)).collect();
    let shared =
        ProblemAxes { words: BTreeMap::new(), ..cases[0].axes.without(&varying) }.to_string();
    let what = if shares { "share of the limit" } else { "time of a launch" };
    let chart = ChartWithTitle {
        title: format!("{workload} over {}", varying.join(", ")),
        subtitle: format!("{what}, fastest implementation; {shared} {words}, {cache}"),
        body: ChartBody::Heat(HeatMap {
            columns: columns.iter().map(|(_, name)| name.clone()).collect(),
            rows: rows.iter().map(|row| format!("{down}{row}")).collect(),
            cells: rows.iter().map(of_row).collect(),
            quantity: if shares { PlottedUnit::Share } else { PlottedUnit::Time },
            names: (right.join(" "), (*down).to_owned()),
        }),
    };
    Some(ChartFigure::new(&[workload, &varying.join("_"), words, cache, "map"], chart))
}
