//! Draws heat maps of the fastest implementation over problem axes of which two or more vary
//! together.

use std::collections::{BTreeMap, BTreeSet};

use super::{ChartWithFileName, ChartsOfOneKind};
use crate::pages::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice, ProblemAxisValues};
use crate::plot::{ChartBody, HeatMapData, PlottedUnit, TitledChart};
use kernelgate::display::natural_sort_key;

/// Smallest number of cases for which a heat map is drawn.
const MIN_HEAT_MAP_CASES: usize = 5;
/// Largest number of columns of a heat map.
const MAX_HEAT_MAP_COLUMNS: usize = 12;
/// Largest number of heat maps that are drawn.
const MAX_HEAT_MAP_CHARTS: usize = 24;

/// Draws a heat map for each group of problems that differ in two or more numeric axes: the first
/// axis gives the rows, the others give the columns.
pub fn heat_map_charts(measured: &MeasurementsOfOneDevice) -> ChartsOfOneKind {
    let mut gallery = ChartsOfOneKind::default();
    type HeatMapGroupKey<'a> = (&'a str, &'a str, Vec<&'a str>, Vec<&'a str>);
    let mut groups: BTreeMap<HeatMapGroupKey<'_>, Vec<&CaseWithItsRuns>> = BTreeMap::new();
    for case in measured.cases.iter().filter(|case| case.is_fastest_of_problem) {
        let names = case.axes.numeric_axes.keys().map(String::as_str).collect();
        let words = case.axes.word_axes.values().map(String::as_str).collect();
        groups.entry((&case.workload, &case.cache_state, names, words)).or_default().push(case);
    }
    for ((workload, cache, _, words), cases) in groups {
        if let Some(figure) = heat_map_figure(workload, cache, &words.join(" "), &cases) {
            gallery.add_all_or_skip(MAX_HEAT_MAP_CHARTS, vec![figure]);
        }
    }
    gallery
}

fn heat_map_figure(
    workload: &str,
    cache: &str,
    words: &str,
    cases: &[&CaseWithItsRuns],
) -> Option<ChartWithFileName> {
    let values = |axis: &str| -> BTreeSet<u64> {
        cases.iter().filter_map(|case| case.axes.numeric_axes.get(axis).copied()).collect()
    };
    let names = cases.first()?.axes.numeric_axes.keys();
    let varying: Vec<&str> =
        names.map(String::as_str).filter(|axis| values(axis).len() > 1).collect();
    let (down, right) = varying.split_first().filter(|(_, right)| !right.is_empty())?;
    if cases.len() < MIN_HEAT_MAP_CASES {
        return None;
    }
    let column = |case: &CaseWithItsRuns| -> String {
        let axis_text = |axis: &&str| format!("{axis}{}", case.axes.numeric_axes[*axis]);
        right.iter().map(axis_text).collect::<Vec<_>>().join(" ")
    };
    let columns: BTreeSet<(Vec<(String, u64)>, String)> =
        cases.iter().map(|case| (natural_sort_key(&column(case)), column(case))).collect();
    if columns.len() > MAX_HEAT_MAP_COLUMNS {
        return None;
    }
    let rows: Vec<u64> = values(down).into_iter().collect();
    // If all limits are known, the heat map shows shares of the limit, which are comparable between
    // problems of different sizes.
    let shares = cases.iter().all(|case| case.limit.is_some());
    let value = |case: &&&CaseWithItsRuns| {
        case.fraction_of_limit().filter(|_| shares).unwrap_or_else(|| case.median_launch_ns())
    };
    let cell = |row: u64, (_, name): &(Vec<(String, u64)>, String)| {
        let here = |case: &&&CaseWithItsRuns| {
            case.axes.numeric_axes[*down] == row && column(case) == *name
        };
        cases.iter().find(here).as_ref().map(value)
    };
    let of_row = |row: &u64| columns.iter().map(|column| cell(*row, column)).collect();
    let shared = ProblemAxisValues {
        word_axes: BTreeMap::new(),
        ..cases[0].axes.without_numeric_axes(&varying)
    }
    .to_string();
    let what = if shares { "share of the limit" } else { "time of a launch" };
    let chart = TitledChart {
        chart_title: format!("{workload} over {}", varying.join(", ")),
        chart_subtitle: format!("{what}, fastest implementation; {shared} {words}, {cache}"),
        body: ChartBody::Heat(HeatMapData {
            column_titles: columns.iter().map(|(_, name)| name.clone()).collect(),
            row_labels: rows.iter().map(|row| format!("{down}{row}")).collect(),
            cell_values: rows.iter().map(of_row).collect(),
            quantity: if shares { PlottedUnit::ShareAsPercent } else { PlottedUnit::TimeNs },
            x_and_y_axis_names: (right.join(" "), (*down).to_owned()),
        }),
    };
    Some(ChartWithFileName::with_file_name_from_words(
        &[workload, &varying.join("_"), words, cache, "map"],
        chart,
    ))
}
