//! `kernelgate stats`: prints the tables of `nsys stats` for traces of Nsight Systems, PyTorch and
//! kernelgate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kernelgate::display::harmless_text::EscapedForCsv;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::text::{
    clean_message_for_terminal, join_lines_with_spaces, path_for_terminal,
};
use kernelgate_trace::analyze::timeline::idle_time;
use kernelgate_trace::model::{Trace, TraceRecorder};
use kernelgate_trace::read::WantedTraceParts;
use kernelgate_trace::stats::{self, StatsReport, StatsTable};
use regex::Regex;
use serde_json::json;

use super::trace_file;
use crate::verbs::shared::output::{
    json_safe_for_terminals as json_text, print_as_json, write_all_files_or_none,
};

/// Version of the JSON output of `kernelgate stats`.
const STATS_JSON_VERSION: u32 = 1;

/// File size from which a trace is read again for each table, so that only the rows of one table
/// are in memory.
const MIN_FILE_BYTES_TO_READ_PER_TABLE: u64 = 256 << 20;

#[derive(Debug, Args)]
pub struct StatsCommandArguments {
    /// Traces: SQLite exports or reports of Nsight Systems, JSON of PyTorch's profiler (.gz too)
    #[arg(id = "traces", required = true, value_name = "TRACE")]
    trace_files: Vec<PathBuf>,
    /// Names of the tables in `nsys stats`, separated by commas [default: all]
    #[arg(id = "report", long = "report", value_name = "NAME", value_delimiter = ',', value_parser = parse_nsys_report_name)]
    stats_tables: Vec<StatsReport>,
    /// How tables are written
    #[arg(long, value_enum, default_value_t)]
    format: StatsOutputFormat,
    /// Use only GPU work that was launched inside ranges of this path, or of a path with this end;
    /// `*` matches any text
    #[arg(id = "range", long = "range", value_name = "PATH")]
    range_path_pattern: Option<String>,
    /// Print only rows whose name matches; percentages still refer to the whole table
    #[arg(id = "filter", long = "filter", value_name = "REGEX")]
    row_name_regex: Option<Regex>,
    /// Write the tables into this folder, one file each, with a summary of all traces
    #[arg(id = "out", long = "out", value_name = "DIR")]
    output_folder: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum StatsOutputFormat {
    /// For a terminal
    #[default]
    #[value(name = "table")]
    TerminalTable,
    /// CSV for a spreadsheet, with the columns of `nsys stats`
    Csv,
    /// For programs
    Json,
}

fn parse_nsys_report_name(name: &str) -> Result<StatsReport, String> {
    StatsReport::from_nsys_report_name(name).ok_or_else(|| {
        let names: Vec<&str> =
            StatsReport::ALL_REPORTS.iter().map(|report| report.nsys_report_name()).collect();
        format!("no such table; there are {}", names.join(", "))
    })
}

pub fn run_stats_command(arguments: &StatsCommandArguments) -> anyhow::Result<ProcessExitReason> {
    let reports = if arguments.stats_tables.is_empty() {
        StatsReport::ALL_REPORTS.to_vec()
    } else {
        arguments.stats_tables.clone()
    };
    let names = distinct_file_names_of_traces(&arguments.trace_files);
    let mut summaries = Vec::new();
    let mut printed = Vec::new();
    for (path, name) in arguments.trace_files.iter().zip(&names) {
        let (trace, mut tables) = trace_and_stats_tables(path, &reports, arguments)?;
        if let Some(expression) = &arguments.row_name_regex {
            tables.iter_mut().for_each(|table| table.keep_rows_with_matching_name(expression));
        }
        if let Some(folder) = &arguments.output_folder {
            let files = stats_table_files(name, &tables, arguments.format)?;
            write_all_files_or_none(
                folder,
                files.iter().map(|(name, text)| (name.as_str(), text.clone())),
                &[],
            )?;
            summaries.push(summary_entry_of_trace(path, &trace, &files));
            continue;
        }
        match arguments.format {
            StatsOutputFormat::Json => printed.push(stats_tables_as_json(path, &tables)),
            format => print_stats_tables(path, &tables, format, arguments.trace_files.len() > 1),
        }
    }
    if let Some(folder) = &arguments.output_folder {
        let all = json!({ "schema_version": STATS_JSON_VERSION, "traces": summaries });
        write_all_files_or_none(folder, [("summary.json", json_text(&all)?)], &[])?;
        println!(
            "{} traces, {} tables each: {}",
            names.len(),
            reports.len(),
            path_for_terminal(folder)
        );
    } else if arguments.format == StatsOutputFormat::Json {
        print_as_json(&json!({ "schema_version": STATS_JSON_VERSION, "traces": printed }))?;
    }
    Ok(ProcessExitReason::Success)
}

/// Reads the rows of a trace that the tables need, only those inside `--range`.
fn read_trace_for_tables(
    path: &Path,
    reports: &[StatsReport],
    arguments: &StatsCommandArguments,
) -> anyhow::Result<Trace> {
    let mut wanted = reports.iter().fold(WantedTraceParts::default(), |all, report| {
        all.union_of_parts(report.trace_parts_for_report())
    });
    if arguments.output_folder.is_some() {
        wanted.reads_operations = true;
    }
    let trace = trace_file::read_trace_inside_range(
        path,
        &wanted,
        arguments.range_path_pattern.as_deref(),
    )?;
    if trace.recorder == TraceRecorder::NsightCompute {
        anyhow::bail!(
            "{} is of Nsight Compute, which records no timeline; `kernelgate diagnose` reads it",
            path.display()
        );
    }
    Ok(trace)
}

/// Prints, as warnings, which parts of a trace could not be read.
fn print_unreadable_parts(path: &Path, problems: &BTreeSet<String>) {
    for problem in problems {
        eprintln!(
            "warning: {}",
            clean_message_for_terminal(&format!("{}: {problem}", path.display()))
        );
    }
}

/// Makes the requested tables of a trace, and returns them with the trace's facts for
/// `summary.json`.
fn trace_and_stats_tables(
    path: &Path,
    reports: &[StatsReport],
    arguments: &StatsCommandArguments,
) -> anyhow::Result<(Trace, Vec<StatsTable>)> {
    let large =
        std::fs::metadata(path).is_ok_and(|file| file.len() >= MIN_FILE_BYTES_TO_READ_PER_TABLE);
    if !large || arguments.range_path_pattern.is_some() {
        let trace = read_trace_for_tables(path, reports, arguments)?;
        print_unreadable_parts(path, &trace.quality.unreadable_parts.iter().cloned().collect());
        let tables = reports.iter().map(|&report| stats::make_table(&trace, report)).collect();
        return Ok((trace, tables));
    }
    // For a large file, each table is made by reading the trace anew, so that only one table's rows
    // are in memory.
    let (mut tables, mut problems) = (Vec::new(), BTreeSet::new());
    for &report in reports {
        let streamed = stats::table_from_streamed_export(path, report)
            .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
        let (trace, table) = match streamed {
            Some(streamed) => (streamed.trace, streamed.table),
            None => {
                let trace = read_trace_for_tables(path, &[report], arguments)?;
                let table = stats::make_table(&trace, report);
                (trace, table)
            }
        };
        tables.push(table);
        problems.extend(trace.quality.unreadable_parts);
    }
    print_unreadable_parts(path, &problems);
    Ok((read_trace_for_tables(path, &[], arguments)?, tables))
}

fn print_stats_tables(
    path: &Path,
    tables: &[StatsTable],
    format: StatsOutputFormat,
    several: bool,
) {
    if several {
        println!("{}", path_for_terminal(path));
    }
    for (index, table) in tables.iter().enumerate() {
        if tables.len() > 1 {
            println!("{}{}", if index > 0 { "\n" } else { "" }, table.report_name);
        }
        match format {
            _ if table.rows.is_empty() => println!("(no rows)"),
            StatsOutputFormat::Csv => print!("{}", stats_table_as_csv(table)),
            _ => print!("{}", stats_table_as_text(table)),
        }
    }
}

/// A statistics table as CSV, with its text cells, which come from the trace, escaped.
fn stats_table_as_csv(table: &StatsTable) -> String {
    let mut table = table.clone();
    table.replace_text_cells(|text| EscapedForCsv(text).to_string());
    table.to_csv()
}

/// A statistics table for a terminal, with each text cell, which comes from the trace, on one line.
fn stats_table_as_text(table: &StatsTable) -> String {
    let mut table = table.clone();
    table.replace_text_cells(join_lines_with_spaces);
    table.to_terminal_text()
}

fn stats_tables_as_json(path: &Path, tables: &[StatsTable]) -> serde_json::Value {
    let tables: Vec<serde_json::Value> = tables.iter().map(StatsTable::table_as_json).collect();
    json!({ "trace": path.display().to_string(), "tables": tables })
}

/// File names and texts of the tables of one trace.
fn stats_table_files(
    name: &str,
    tables: &[StatsTable],
    format: StatsOutputFormat,
) -> anyhow::Result<Vec<(String, String)>> {
    let file = |table: &StatsTable| {
        let (extension, text) = match format {
            StatsOutputFormat::Csv => ("csv", stats_table_as_csv(table)),
            StatsOutputFormat::TerminalTable => ("txt", stats_table_as_text(table)),
            StatsOutputFormat::Json => ("json", json_text(&table.table_as_json())?),
        };
        Ok((format!("{name}_{}.{extension}", table.report_name), text))
    };
    tables.iter().map(file).collect()
}

/// A distinct base name for the files of each trace: the trace's name, with its folder if two names
/// are equal.
fn distinct_file_names_of_traces(traces: &[PathBuf]) -> Vec<String> {
    let part = |path: Option<&std::ffi::OsStr>| {
        path.map_or(String::new(), |name| name.to_string_lossy().replace(['/', '\\'], "_"))
    };
    let stem = |path: &Path| {
        let name = part(path.file_name());
        name.split('.').next().filter(|stem| !stem.is_empty()).unwrap_or("trace").to_owned()
    };
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    traces.iter().for_each(|path| *seen.entry(stem(path)).or_default() += 1);
    let mut used: BTreeMap<String, usize> = BTreeMap::new();
    let name = |path: &PathBuf| {
        let mut name = stem(path);
        if seen[&name] > 1 {
            name = format!("{}_{name}", part(path.parent().and_then(Path::file_name)));
        }
        let times = used.entry(name.clone()).or_default();
        *times += 1;
        if *times > 1 { format!("{name}_{times}") } else { name }
    };
    traces.iter().map(name).collect()
}

/// The entry of one trace in `summary.json`.
fn summary_entry_of_trace(
    path: &Path,
    trace: &Trace,
    files: &[(String, String)],
) -> serde_json::Value {
    let activities = idle_time::activities_by_process_and_gpu(trace, |_| true);
    let busy_ns: i64 = activities.iter().map(|of| of.gpu_busy_ns).sum();
    let span_ns: i64 =
        activities.iter().map(idle_time::ProcessActivityOnGpu::first_start_to_last_end_ns).sum();
    let kernels = stats::make_table(trace, StatsReport::KernelsByName);
    let top = kernels.rows.first().map(|row| row[kernels.filtered_column_index].cell_as_csv_text());
    json!({
        "trace": path.display().to_string(),
        "recorder": trace.recorder.recorder_label(),
        "kernels": trace.kernels.on_gpu.operation_count(),
        "copies": trace.copies.on_gpu.operation_count(),
        "sets": trace.memsets.on_gpu.operation_count(),
        "graph_launches": trace.graphs.on_gpu.operation_count(),
        "gpu_busy_ns": busy_ns,
        "gpu_span_ns": span_ns,
        "top_kernel": top,
        "files": files.iter().map(|(name, _)| name).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exported_trace_gets_its_own_file_name() {
        let names = |paths: &[&str]| {
            distinct_file_names_of_traces(&paths.iter().map(PathBuf::from).collect::<Vec<_>>())
        };
        assert_eq!(names(&["a/x.sqlite", "b/y.pt.trace.json.gz"]), ["x", "y"]);
        assert_eq!(names(&["a/trace.sqlite", "b/trace.sqlite"]), ["a_trace", "b_trace"]);
        assert_eq!(names(&["a/trace.sqlite", "a/trace.sqlite"]), ["a_trace", "a_trace_2"]);
    }
}
