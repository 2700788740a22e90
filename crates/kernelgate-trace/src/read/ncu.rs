//! CSV of Nsight Compute (`ncu --csv`), the details page or the raw page.
//!
//! Program output and `==PROF==` lines may stand before, behind and between the records. Columns
//! are found by their header: versions of `ncu` write 12, 15 or 20 columns. This reader has no
//! timeline, which Nsight Compute does not record.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use hashbrown::{HashMap, HashSet};

use super::demangle::readable_kernel_name;
use super::locale_numbers::{DecimalFormat, looks_numeric};
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::LaunchShape;
use crate::model::interned_names::TraceNames;
use crate::model::kernel_metrics::{KernelMetric, ProfiledLaunch};
use crate::model::{Trace, TraceRecorder};

/// Bytes of CSV that are read at most.
const MAX_CSV_BYTES: u64 = 1 << 30;
/// Lines of other output in front of the header that are looked through at most.
const MAX_LINES_BEFORE_HEADER: usize = 1_000_000;

/// Metric names of old versions of Nsight Compute, with their present names.
const RENAMED_METRICS: &[(&str, &str)] = &[
    ("SM [%]", "Compute (SM) Throughput"),
    ("SOL SM", "Compute (SM) Throughput"),
    ("SM Throughput", "Compute (SM) Throughput"),
    ("Memory [%]", "Memory Throughput"),
    ("SOL Memory", "Memory Throughput"),
    ("SOL FB", "DRAM Throughput"),
    ("SOL DRAM", "DRAM Throughput"),
    ("SOL L2", "L2 Cache Throughput"),
    ("SOL TEX", "L1/TEX Cache Throughput"),
    ("SOL L1/TEX Cache", "L1/TEX Cache Throughput"),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "Compute (SM) Throughput"),
    ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", "Memory Throughput"),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "DRAM Throughput"),
    ("gpu__time_duration.sum", "Duration"),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
    ("sm__maximum_warps_per_active_cycle_pct", "Theoretical Occupancy"),
    ("launch__occupancy_limit_registers", "Block Limit Registers"),
    ("launch__occupancy_limit_shared_mem", "Block Limit Shared Mem"),
    ("launch__occupancy_limit_warps", "Block Limit Warps"),
    ("launch__occupancy_limit_blocks", "Block Limit SM"),
    ("launch__waves_per_multiprocessor", "Waves Per SM"),
    ("launch__registers_per_thread", "Registers Per Thread"),
    ("smsp__issue_active.avg.per_cycle_active", "Issued Warp Per Scheduler"),
];

/// Separators of columns: of `ncu`, and of spreadsheets that stored its file again.
const CSV_SEPARATORS: &[u8] = b",;\t";

/// The separator of columns, if a line is the header of Nsight Compute's CSV.
fn csv_separator(line: &str) -> Option<u8> {
    let first = *line.strip_prefix("\"ID\"")?.as_bytes().first()?;
    (CSV_SEPARATORS.contains(&first) && line.contains("\"Kernel Name\"")).then_some(first)
}

/// Returns whether a file contains the header of Nsight Compute's CSV.
pub(super) fn looks_like_ncu_csv(path: &Path) -> std::io::Result<bool> {
    let mut lines = BufReader::new(std::fs::File::open(path)?.take(MAX_CSV_BYTES));
    let mut line = Vec::new();
    for _ in 0..MAX_LINES_BEFORE_HEADER {
        line.clear();
        // A line without an end is cut, so that it cannot fill the memory.
        if (&mut lines).take(1 << 16).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if csv_separator(&String::from_utf8_lossy(&line)).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads the profiled launches of a CSV file.
///
/// # Errors
/// The file cannot be read, is too large, or holds no launch.
pub(super) fn read_ncu_csv(path: &Path) -> Result<Trace, TraceError> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(TraceError::io(path))?;
    file.take(MAX_CSV_BYTES + 1).read_to_end(&mut bytes).map_err(TraceError::io(path))?;
    if bytes.len() as u64 > MAX_CSV_BYTES {
        return Err(TraceError::TooLarge {
            path: path.to_owned(),
            reason: format!("more than {} MiB of CSV", MAX_CSV_BYTES >> 20),
        });
    }
    let text = String::from_utf8_lossy(&bytes);
    let mut builder = TraceBuilder::default();
    builder.trace.recorder = TraceRecorder::NsightCompute;
    for section in split_csv_sections(&text) {
        add_section(&section, &mut builder);
    }
    if builder.trace.profiled.is_empty() {
        return Err(TraceError::broken_file(path, "it holds no profiled launch"));
    }
    Ok(builder.finish_trace())
}

/// Splits the text into CSV headers with their records, without the output of other programs.
fn split_csv_sections(text: &str) -> Vec<String> {
    let mut sections: Vec<String> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        if !open && csv_separator(line).is_some() {
            sections.push(String::new());
        }
        let Some(section) = sections.last_mut() else { continue };
        if !open && (!line.starts_with('"') || line.starts_with("==")) {
            continue;
        }
        section.push_str(line);
        section.push('\n');
        open ^= line.matches('"').count() % 2 == 1;
    }
    sections
}

/// The records of a section with its columns.
struct NcuCsvSection {
    header: csv::StringRecord,
    records: Vec<csv::StringRecord>,
    /// The units of the raw page, which stand in a record without an id.
    units: csv::StringRecord,
    /// Number of records that cannot be read.
    broken: u64,
}

impl NcuCsvSection {
    fn parse(text: &str) -> Option<NcuCsvSection> {
        let mut reader = csv::ReaderBuilder::new()
            .flexible(true)
            .delimiter(csv_separator(text)?)
            .from_reader(text.as_bytes());
        let header = reader.headers().ok()?.clone();
        let id = header.iter().position(|name| name == "ID")?;
        let (mut records, mut broken) = (Vec::new(), 0);
        let mut units = None;
        for record in reader.records() {
            match record {
                Ok(record) if record.get(id).is_some_and(|id| !id.is_empty()) => {
                    records.push(record);
                }
                Ok(record) => {
                    units.get_or_insert(record);
                }
                Err(_) => broken += 1,
            }
        }
        Some(Self { header, records, units: units.unwrap_or_default(), broken })
    }

    fn column_index(&self, name: &str) -> Option<usize> {
        self.header.iter().position(|title| title == name)
    }

    /// Metrics with units and values, as written.
    fn metrics_of_record<'a>(
        &'a self,
        record: &'a csv::StringRecord,
    ) -> impl Iterator<Item = [&'a str; 3]> + 'a {
        let field = |index: Option<usize>| index.and_then(|i| record.get(i)).unwrap_or("");
        let columns =
            ["Metric Name", "Metric Unit", "Metric Value"].map(|name| self.column_index(name));
        let details = columns[0].map(|_| columns.map(field));
        let raw = self
            .header
            .iter()
            .enumerate()
            .filter(move |(_, name)| details.is_none() && name.contains("__"));
        let raw = raw
            .map(|(i, name)| [name, self.units.get(i).unwrap_or(""), record.get(i).unwrap_or("")]);
        details.into_iter().chain(raw)
    }
}

fn add_section(text: &str, builder: &mut TraceBuilder) {
    let Some(section) = NcuCsvSection::parse(text) else { return };
    let trace = &mut builder.trace;
    trace.quality.odd_values += section.broken;
    let all = section.records.iter().flat_map(|record| section.metrics_of_record(record));
    let format = DecimalFormat::detect_format(all.map(|[_, unit, value]| (value, unit)));
    if format == DecimalFormat::Comma {
        trace.quality.notes.push(
            "numbers are written as 1.234,5 (the locale of the machine that ran ncu), and are read \
             so"
                .to_owned(),
        );
    }
    let numbers: HashSet<&str> = section
        .records
        .iter()
        .flat_map(|record| section.metrics_of_record(record))
        .filter(|[_, _, value]| format.parse_number(value).is_some())
        .map(|[name, ..]| name)
        .collect();
    // Names of modes and devices are right without digits, and so is what ncu could not measure.
    let odd = |[name, unit, value]: [&str; 3]| {
        let measured = !matches!(value.trim(), "" | "n/a" | "nan" | "inf" | "-nan" | "(!) n/a");
        measured && (looks_numeric(value) || !unit.is_empty() || numbers.contains(name))
    };
    let mut launches: HashMap<(String, String), usize> = HashMap::new();
    for record in &section.records {
        let field = |name: &str| {
            section.column_index(name).and_then(|i| record.get(i)).unwrap_or("").to_owned()
        };
        let key = (field("Process ID"), field("ID"));
        let index = *launches.entry(key).or_insert_with(|| {
            trace.profiled.push(ProfiledLaunch {
                id: field("ID"),
                kernel: trace.names.intern_text(&readable_kernel_name(&field("Kernel Name"))),
                shape: LaunchShape {
                    grid: parse_dimensions(&field("Grid Size")),
                    block: parse_dimensions(&field("Block Size")),
                    ..LaunchShape::default()
                },
                device: format!("device {}, compute capability {}", field("Device"), field("CC")),
                metrics: Default::default(),
                rules: Vec::new(),
                lines: Vec::new(),
            });
            trace.profiled.len() - 1
        });
        let launch = &mut trace.profiled[index];
        for [name, unit, value] in section.metrics_of_record(record) {
            match format.parse_number(value) {
                Some(value) => add_launch_metric(&mut trace.names, launch, name, unit, value),
                None => trace.quality.odd_values += u64::from(odd([name, unit, value])),
            }
        }
        let rule = field("Rule Name");
        if !rule.is_empty() {
            let text = field("Rule Description");
            launch.rules.push((trace.names.intern_text(&rule), trace.names.intern_text(&text)));
        }
    }
}

/// Adds a metric under its present name.
pub(super) fn add_launch_metric(
    names: &mut TraceNames,
    launch: &mut ProfiledLaunch,
    name: &str,
    unit: &str,
    value: f64,
) {
    if name.is_empty() {
        return;
    }
    let name = RENAMED_METRICS.iter().find(|(old, _)| *old == name).map_or(name, |(_, new)| *new);
    // The name "Throughput" stands both for a share of the peak and for a rate.
    let key = if name.ends_with("Throughput") && unit != "%" {
        names.intern_text(&format!("{name} [{unit}]"))
    } else {
        names.intern_text(name)
    };
    let unit = names.intern_text(unit);
    launch.metrics.entry(key).or_insert(KernelMetric { value, unit });
}

/// Parses dimensions such as `(9, 32, 1)` or `9x32x1`.
fn parse_dimensions(text: &str) -> [u32; 3] {
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .filter(|part| !part.is_empty())
        .map(|part| part.parse().unwrap_or(0));
    std::array::from_fn(|_| numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launch_dimensions_are_parsed_in_both_notations() {
        assert_eq!(parse_dimensions("(9, 32, 1)"), [9, 32, 1]);
        assert_eq!(parse_dimensions("128x2"), [128, 2, 0]);
    }
}
