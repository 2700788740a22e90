//! `kernelgate stats`: prints the tables of `nsys stats`, for traces of several recorders.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kernelgate::display::harmless_text::CsvText;
use kernelgate::exit::ExitReason;
use kernelgate::record::text::{on_one_line, printable_on_terminal, printable_path};
use kernelgate_trace::analyze::timeline::idle_time;
use kernelgate_trace::model::{Trace, TraceRecorder};
use kernelgate_trace::read::WantedTraceParts;
use kernelgate_trace::stats::{self, StatsReport, StatsTable};
use regex::Regex;
use serde_json::json;

use super::trace_file;
use crate::verbs::shared::output::{json as json_text, print_json, write_files};

/// Version of the JSON output of `kernelgate stats`.
const STATS_SCHEMA: u32 = 1;

/// Size of a file from which it is read once for each table, so that fewer rows are in memory.
const MIN_BYTES_TO_READ_BY_TABLE: u64 = 256 << 20;

#[derive(Debug, Args)]
pub struct StatsArguments {
    /// Traces: SQLite exports or reports of Nsight Systems, JSON of PyTorch's profiler (.gz too)
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Names of the tables in `nsys stats`, separated by commas [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = parse_report)]
    report: Vec<StatsReport>,
    /// How tables are written
    #[arg(long, value_enum, default_value_t)]
    format: StatsTableFormat,
    /// Use only work that was launched inside ranges of this path, or of a path with this end; `*`
    /// matches any text
    #[arg(long, value_name = "PATH")]
    range: Option<String>,
    /// Print only rows whose name matches; shares stay shares of the whole table
    #[arg(long, value_name = "REGEX")]
    filter: Option<Regex>,
    /// Write the tables into this folder, one file each, with a summary of all traces
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum StatsTableFormat {
    /// For a terminal
    #[default]
    Table,
    /// For a spreadsheet, with the columns of `nsys stats`
    Csv,
    /// For programs
    Json,
}

fn parse_report(name: &str) -> Result<StatsReport, String> {
    StatsReport::from_name(name).ok_or_else(|| {
        let names: Vec<&str> =
            StatsReport::ALL_REPORTS.iter().map(|report| report.name()).collect();
        format!("no such table; there are {}", names.join(", "))
    })
}

pub fn run(arguments: &StatsArguments) -> anyhow::Result<ExitReason> {
    let reports = if arguments.report.is_empty() {
        StatsReport::ALL_REPORTS.to_vec()
    } else {
        arguments.report.clone()
    };
    let names = trace_file_names(&arguments.traces);
    let mut summaries = Vec::new();
    let mut printed = Vec::new();
    for (path, name) in arguments.traces.iter().zip(&names) {
        let (trace, mut tables) = report_tables(path, &reports, arguments)?;
        if let Some(expression) = &arguments.filter {
            tables.iter_mut().for_each(|table| table.keep_matching_rows(expression));
        }
        if let Some(folder) = &arguments.out {
            let files = table_files(name, &tables, arguments.format)?;
            write_files(
                folder,
                files.iter().map(|(name, text)| (name.as_str(), text.clone())),
                &[],
            )?;
            summaries.push(stats_summary(path, &trace, &files));
            continue;
        }
        match arguments.format {
            StatsTableFormat::Json => printed.push(tables_document(path, &tables)),
            format => print_tables(path, &tables, format, arguments.traces.len() > 1),
        }
    }
    if let Some(folder) = &arguments.out {
        let all = json!({ "schema_version": STATS_SCHEMA, "traces": summaries });
        write_files(folder, [("summary.json", json_text(&all)?)], &[])?;
        println!(
            "{} traces, {} tables each: {}",
            names.len(),
            reports.len(),
            printable_path(folder)
        );
    } else if arguments.format == StatsTableFormat::Json {
        print_json(&json!({ "schema_version": STATS_SCHEMA, "traces": printed }))?;
    }
    Ok(ExitReason::Fine)
}

/// The trace with the tables that are needed, restricted to `--range`.
fn load_for_reports(
    path: &Path,
    reports: &[StatsReport],
    arguments: &StatsArguments,
) -> anyhow::Result<Trace> {
    let mut wanted = reports.iter().fold(WantedTraceParts::default(), |all, report| {
        all.wanted_by_either(report.wanted_parts())
    });
    if arguments.out.is_some() {
        wanted.operations = true;
    }
    let trace = trace_file::read_trace_tables(path, &wanted, arguments.range.as_deref())?;
    if trace.recorder == TraceRecorder::NsightCompute {
        anyhow::bail!(
            "{} is of Nsight Compute, which records no timeline; `kernelgate diagnose` reads it",
            path.display()
        );
    }
    Ok(trace)
}

/// Prints what could not be read, each problem once.
fn print_read_problems(path: &Path, problems: &BTreeSet<String>) {
    for problem in problems {
        eprintln!("warning: {}", printable_on_terminal(&format!("{}: {problem}", path.display())));
    }
}

/// Makes the tables of a trace, and returns the trace as far as a summary needs it.
fn report_tables(
    path: &Path,
    reports: &[StatsReport],
    arguments: &StatsArguments,
) -> anyhow::Result<(Trace, Vec<StatsTable>)> {
    let large = std::fs::metadata(path).is_ok_and(|file| file.len() >= MIN_BYTES_TO_READ_BY_TABLE);
    if !large || arguments.range.is_some() {
        let trace = load_for_reports(path, reports, arguments)?;
        print_read_problems(path, &trace.quality.unreadable.iter().cloned().collect());
        let tables = reports.iter().map(|&report| stats::make_table(&trace, report)).collect();
        return Ok((trace, tables));
    }
    // The tables are read one after the other, each with as little memory as it needs.
    let (mut tables, mut problems) = (Vec::new(), BTreeSet::new());
    for &report in reports {
        let streamed = stats::table_of_streamed_export(path, report)
            .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
        let (trace, table) = match streamed {
            Some(streamed) => (streamed.trace, streamed.table),
            None => {
                let trace = load_for_reports(path, &[report], arguments)?;
                let table = stats::make_table(&trace, report);
                (trace, table)
            }
        };
        tables.push(table);
        problems.extend(trace.quality.unreadable);
    }
    print_read_problems(path, &problems);
    Ok((load_for_reports(path, &[], arguments)?, tables))
}

fn print_tables(path: &Path, tables: &[StatsTable], format: StatsTableFormat, several: bool) {
    if several {
        println!("{}", printable_path(path));
    }
    for (index, table) in tables.iter().enumerate() {
        if tables.len() > 1 {
            println!("{}{}", if index > 0 { "\n" } else { "" }, table.report);
        }
        match format {
            _ if table.rows.is_empty() => println!("(no rows)"),
            StatsTableFormat::Csv => print!("{}", csv(table)),
            _ => print!("{}", padded_table(table)),
        }
    }
}

/// A table as CSV; names come from the trace.
fn csv(table: &StatsTable) -> String {
    let mut table = table.clone();
    table.map_text_cells(|text| CsvText(text).to_string());
    table.to_csv()
}

/// A table for a terminal; names come from the trace.
fn padded_table(table: &StatsTable) -> String {
    let mut table = table.clone();
    table.map_text_cells(on_one_line);
    table.to_text()
}

fn tables_document(path: &Path, tables: &[StatsTable]) -> serde_json::Value {
    let tables: Vec<serde_json::Value> = tables.iter().map(StatsTable::cell_to_json).collect();
    json!({ "trace": path.display().to_string(), "tables": tables })
}

/// Names and texts of the files of a trace.
fn table_files(
    name: &str,
    tables: &[StatsTable],
    format: StatsTableFormat,
) -> anyhow::Result<Vec<(String, String)>> {
    let file = |table: &StatsTable| {
        let (extension, text) = match format {
            StatsTableFormat::Csv => ("csv", csv(table)),
            StatsTableFormat::Table => ("txt", padded_table(table)),
            StatsTableFormat::Json => ("json", json_text(&table.cell_to_json())?),
        };
        Ok((format!("{name}_{}.{extension}", table.report), text))
    };
    tables.iter().map(file).collect()
}

/// One file name for each trace: its own name, with its folder if two names are equal.
fn trace_file_names(traces: &[PathBuf]) -> Vec<String> {
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

/// The entry of a trace in `summary.json`.
fn stats_summary(path: &Path, trace: &Trace, files: &[(String, String)]) -> serde_json::Value {
    let activities = idle_time::activity_of_devices(trace, |_| true);
    let busy_ns: i64 = activities.iter().map(|of| of.busy_ns).sum();
    let span_ns: i64 = activities.iter().map(idle_time::DeviceActivity::span_of_gaps_ns).sum();
    let kernels = stats::make_table(trace, StatsReport::GpuKernels);
    let top = kernels.rows.first().map(|row| row[kernels.named_by].csv_text());
    json!({
        "trace": path.display().to_string(),
        "recorder": trace.recorder.label(),
        "kernels": trace.kernels.on_gpu.len(),
        "copies": trace.copies.on_gpu.len(),
        "sets": trace.sets.on_gpu.len(),
        "graph_launches": trace.graphs.on_gpu.len(),
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
        let names =
            |paths: &[&str]| trace_file_names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(names(&["a/x.sqlite", "b/y.pt.trace.json.gz"]), ["x", "y"]);
        assert_eq!(names(&["a/trace.sqlite", "b/trace.sqlite"]), ["a_trace", "b_trace"]);
        assert_eq!(names(&["a/trace.sqlite", "a/trace.sqlite"]), ["a_trace", "a_trace_2"]);
    }
}
