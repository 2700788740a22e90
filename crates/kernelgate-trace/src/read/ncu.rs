//! Reads CSV output of Nsight Compute (`ncu --csv`), from the details page or the raw page.
//!
//! Output of the profiled program and `==PROF==` lines may appear before, between and after the CSV
//! records. The reader finds columns by their header, because versions of `ncu` write 12, 15 or 20
//! columns. The resulting trace contains profiled launches but no timeline, because Nsight Compute
//! records none.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use hashbrown::{HashMap, HashSet};

use super::demangle::demangle_kernel_name;
use super::locale_numbers::{DecimalSeparatorFormat, looks_like_number_in_any_format};
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::KernelLaunchShape;
use crate::model::interned_names::InternedTraceNames;
use crate::model::kernel_metrics::{NcuMetricValue, NcuProfiledLaunch};
use crate::model::{Trace, TraceRecorder};

/// Maximum size of a CSV file of Nsight Compute, in bytes.
const MAX_NCU_CSV_BYTES: u64 = 1 << 30;
/// Maximum number of lines of other output that are searched for the CSV header.
const MAX_LINES_BEFORE_CSV_HEADER: usize = 1_000_000;

/// Metric names of older Nsight Compute versions and of the raw page, each with the name on the
/// current details page.
const NCU_METRIC_OLD_AND_CURRENT_NAMES: &[(&str, &str)] = &[
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

/// Column separators that `ncu` writes, or that spreadsheet programs write when they save the CSV
/// again.
const CSV_COLUMN_SEPARATORS: &[u8] = b",;\t";

/// Returns the column separator if the line is the header of Nsight Compute's CSV; `None` for other
/// lines.
fn column_separator_of_ncu_header(line: &str) -> Option<u8> {
    let first = *line.strip_prefix("\"ID\"")?.as_bytes().first()?;
    (CSV_COLUMN_SEPARATORS.contains(&first) && line.contains("\"Kernel Name\"")).then_some(first)
}

/// Whether a file contains the header line of Nsight Compute's CSV.
pub(super) fn contains_ncu_csv_header(path: &Path) -> std::io::Result<bool> {
    let mut lines = BufReader::new(std::fs::File::open(path)?.take(MAX_NCU_CSV_BYTES));
    let mut line = Vec::new();
    for _ in 0..MAX_LINES_BEFORE_CSV_HEADER {
        line.clear();
        // Reading a line stops at 64 KiB, so that a file without line breaks cannot fill the
        // memory.
        if (&mut lines).take(1 << 16).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if column_separator_of_ncu_header(&String::from_utf8_lossy(&line)).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads kernel launches and their metrics from CSV of Nsight Compute.
///
/// # Errors
/// The file cannot be read, is too large, or contains no profiled launch.
pub(super) fn read_ncu_csv(path: &Path) -> Result<Trace, TraceError> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(TraceError::unreadable_file_error(path))?;
    file.take(MAX_NCU_CSV_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(TraceError::unreadable_file_error(path))?;
    if bytes.len() as u64 > MAX_NCU_CSV_BYTES {
        return Err(TraceError::TooLarge {
            path: path.to_owned(),
            reason: format!("more than {} MiB of CSV", MAX_NCU_CSV_BYTES >> 20),
        });
    }
    let text = String::from_utf8_lossy(&bytes);
    let mut builder = TraceBuilder::default();
    builder.trace.recorder = TraceRecorder::NsightCompute;
    for section in split_ncu_csv_at_headers(&text) {
        add_launches_of_ncu_csv_section(&section, &mut builder);
    }
    if builder.trace.profiled_launches.is_empty() {
        return Err(TraceError::broken_trace_file_error(path, "it holds no profiled launch"));
    }
    Ok(builder.finish_trace())
}

/// Splits the text into sections of a CSV header and its records, and drops the output of other
/// programs.
fn split_ncu_csv_at_headers(text: &str) -> Vec<String> {
    let mut sections: Vec<String> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        if !open && column_separator_of_ncu_header(line).is_some() {
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

/// One header line of Nsight Compute's CSV with the records that follow.
struct NcuCsvHeaderAndRecords {
    header: csv::StringRecord,
    records: Vec<csv::StringRecord>,
    /// The units of the raw page, which are in a record without a launch id.
    metric_units: csv::StringRecord,
    /// Number of CSV records that could not be parsed.
    unparsable_record_count: u64,
}

impl NcuCsvHeaderAndRecords {
    fn parse_ncu_csv_section(text: &str) -> Option<NcuCsvHeaderAndRecords> {
        let mut reader = csv::ReaderBuilder::new()
            .flexible(true)
            .delimiter(column_separator_of_ncu_header(text)?)
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
        Some(Self {
            header,
            records,
            metric_units: units.unwrap_or_default(),
            unparsable_record_count: broken,
        })
    }

    fn index_of_column(&self, name: &str) -> Option<usize> {
        self.header.iter().position(|title| title == name)
    }

    /// The metrics of a CSV record, each with name, unit and value as text.
    fn names_units_and_values_of_record<'a>(
        &'a self,
        record: &'a csv::StringRecord,
    ) -> impl Iterator<Item = [&'a str; 3]> + 'a {
        let field = |index: Option<usize>| index.and_then(|i| record.get(i)).unwrap_or("");
        let columns =
            ["Metric Name", "Metric Unit", "Metric Value"].map(|name| self.index_of_column(name));
        let details = columns[0].map(|_| columns.map(field));
        let raw = self
            .header
            .iter()
            .enumerate()
            .filter(move |(_, name)| details.is_none() && name.contains("__"));
        let raw = raw.map(|(i, name)| {
            [name, self.metric_units.get(i).unwrap_or(""), record.get(i).unwrap_or("")]
        });
        details.into_iter().chain(raw)
    }
}

fn add_launches_of_ncu_csv_section(text: &str, builder: &mut TraceBuilder) {
    let Some(section) = NcuCsvHeaderAndRecords::parse_ncu_csv_section(text) else { return };
    let trace = &mut builder.trace;
    trace.quality.implausible_value_count += section.unparsable_record_count;
    let all =
        section.records.iter().flat_map(|record| section.names_units_and_values_of_record(record));
    let format = DecimalSeparatorFormat::detect_from_values_and_units(
        all.map(|[_, unit, value]| (value, unit)),
    );
    if format == DecimalSeparatorFormat::DecimalComma {
        trace.quality.interpretation_notes.push(
            "numbers are written as 1.234,5 (the locale of the machine that ran ncu), and are read \
             so"
                .to_owned(),
        );
    }
    let numbers: HashSet<&str> = section
        .records
        .iter()
        .flat_map(|record| section.names_units_and_values_of_record(record))
        .filter(|[_, _, value]| format.parse_number_with_separators(value).is_some())
        .map(|[name, ..]| name)
        .collect();
    // Texts without digits are valid for modes and device names, and for metrics that `ncu` could
    // not measure; they are not counted as odd.
    let odd = |[name, unit, value]: [&str; 3]| {
        let measured = !matches!(value.trim(), "" | "n/a" | "nan" | "inf" | "-nan" | "(!) n/a");
        measured
            && (looks_like_number_in_any_format(value)
                || !unit.is_empty()
                || numbers.contains(name))
    };
    let mut launches: HashMap<(String, String), usize> = HashMap::new();
    for record in &section.records {
        let field = |name: &str| {
            section.index_of_column(name).and_then(|i| record.get(i)).unwrap_or("").to_owned()
        };
        let key = (field("Process ID"), field("ID"));
        let index = *launches.entry(key).or_insert_with(|| {
            trace.profiled_launches.push(NcuProfiledLaunch {
                launch_id: field("ID"),
                kernel_name: trace.names.intern_text(&demangle_kernel_name(&field("Kernel Name"))),
                shape: KernelLaunchShape {
                    grid: parse_grid_or_block_size(&field("Grid Size")),
                    block: parse_grid_or_block_size(&field("Block Size")),
                    ..KernelLaunchShape::default()
                },
                device_description: format!(
                    "device {}, compute capability {}",
                    field("Device"),
                    field("CC")
                ),
                metrics: Default::default(),
                rule_names_and_messages: Vec::new(),
                lines: Vec::new(),
            });
            trace.profiled_launches.len() - 1
        });
        let launch = &mut trace.profiled_launches[index];
        for [name, unit, value] in section.names_units_and_values_of_record(record) {
            match format.parse_number_with_separators(value) {
                Some(value) => {
                    add_metric_under_current_name(&mut trace.names, launch, name, unit, value)
                }
                None => {
                    trace.quality.implausible_value_count += u64::from(odd([name, unit, value]))
                }
            }
        }
        let rule = field("Rule Name");
        if !rule.is_empty() {
            let text = field("Rule Description");
            launch
                .rule_names_and_messages
                .push((trace.names.intern_text(&rule), trace.names.intern_text(&text)));
        }
    }
}

/// Adds a metric to a launch under the name of current Nsight Compute versions.
pub(super) fn add_metric_under_current_name(
    names: &mut InternedTraceNames,
    launch: &mut NcuProfiledLaunch,
    name: &str,
    unit: &str,
    value: f64,
) {
    if name.is_empty() {
        return;
    }
    let name = NCU_METRIC_OLD_AND_CURRENT_NAMES
        .iter()
        .find(|(old, _)| *old == name)
        .map_or(name, |(_, new)| *new);
    // Nsight Compute uses the name "Throughput" both for a percentage of the peak and for a rate,
    // so the unit is added to the name of a rate.
    let key = if name.ends_with("Throughput") && unit != "%" {
        names.intern_text(&format!("{name} [{unit}]"))
    } else {
        names.intern_text(name)
    };
    let unit = names.intern_text(unit);
    launch.metrics.entry(key).or_insert(NcuMetricValue { metric_value: value, unit });
}

/// Parses a grid or block size such as `(9, 32, 1)` or `9x32x1`; missing dimensions are 0.
fn parse_grid_or_block_size(text: &str) -> [u32; 3] {
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
    fn grid_sizes_are_parsed_in_both_notations() {
        assert_eq!(parse_grid_or_block_size("(9, 32, 1)"), [9, 32, 1]);
        assert_eq!(parse_grid_or_block_size("128x2"), [128, 2, 0]);
    }
}
