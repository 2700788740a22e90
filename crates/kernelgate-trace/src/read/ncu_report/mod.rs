//! Reads reports of Nsight Compute (`.ncu-rep`) without running that program.
//!
//! A report is a header and blocks. A block holds compiled kernels, then results; each part is a
//! protobuf message behind its length. NVIDIA documents the messages in `extras/FileFormat` of an
//! installation; the numbers below are theirs, up to Nsight Compute 2026.3. Unknown fields are
//! skipped, so that newer reports are read as far as their format agrees. Disassembled
//! instructions, charts and sampled time lines of the report are not read.

mod protobuf_fields;
mod source_lines;

use std::io::{BufReader, Read};
use std::path::Path;

use hashbrown::HashMap;
use protobuf_fields::{ProtobufMessage, WireValue};
use source_lines::{CubinLines, SourceFileLine};

use super::demangle::readable_kernel_name;
use super::ncu::add_launch_metric;
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::LaunchShape;
use crate::model::interned_names::TraceNames;
use crate::model::kernel_metrics::{ProfiledLaunch, SourceStalls};
use crate::model::{Trace, TraceRecorder, TracedDevice};

/// Bytes with which a report file begins.
pub(super) const REPORT_MAGIC: &[u8] = b"NVR\0";
/// The newest release whose messages are known.
const NEWEST_KNOWN_RELEASE: (u32, u32) = (2026, 3);
/// Longest message that is read, bytes.
const MAX_MESSAGE_BYTES: u32 = 1 << 30;
/// Bytes of compiled kernels that are kept to find source lines.
const MAX_KEPT_BINARY_BYTES: usize = 256 << 20;
/// Largest number of source lines that are kept for a launch.
const MAX_SOURCE_LINES: usize = 20;

/// Numbers of the fields of a block's header.
mod block {
    pub const SOURCES_FIELD: u64 = 1;
    pub const SESSION_FIELD: u64 = 3;
    pub const STRINGS_FIELD: u64 = 4;
    pub const PROCESS_FIELD: u64 = 6;
    /// Results in the order in which they are written: launches, ranges, command lists, graphs.
    pub const RESULT_KINDS: [u64; 4] = [2, 7, 8, 9];
}

/// Numbers of the fields of a kind of result.
struct ResultFieldNumbers {
    /// Name of the row where it has no kernel.
    name: &'static str,
    metrics: u64,
    sections: u64,
    rules: u64,
}

/// Kinds of results in the order of [`block::RESULT_KINDS`].
const RESULT_KINDS: [ResultFieldNumbers; 4] = [
    ResultFieldNumbers { name: "kernel", metrics: 13, sections: 17, rules: 19 },
    ResultFieldNumbers { name: "range", metrics: 4, sections: 7, rules: 20 },
    ResultFieldNumbers { name: "command list", metrics: 4, sections: 7, rules: 21 },
    ResultFieldNumbers { name: "graph", metrics: 4, sections: 7, rules: 22 },
];

/// Reads a report.
///
/// # Errors
/// The file cannot be read, is not a report, or holds no result.
pub(super) fn read_ncu_report(path: &Path) -> Result<Trace, TraceError> {
    let file = std::fs::File::open(path).map_err(TraceError::io(path))?;
    let left = file.metadata().map_err(TraceError::io(path))?.len();
    let mut file = ReportFile { source: BufReader::with_capacity(1 << 16, file), left };
    let mut magic = [0; 4];
    if file.source.read_exact(&mut magic).is_err() || magic != REPORT_MAGIC {
        let reason = format!(
            "it is not a report of Nsight Compute: its first bytes are not NVR; if ncu opens it, \
             run: ncu --csv --page details --import {} > {}",
            path.display(),
            path.with_extension("csv").display()
        );
        return Err(TraceError::Unknown { path: path.to_owned(), reason });
    }
    file.left -= 4;
    let mut report = NcuReport::default();
    report.builder.trace.recorder = TraceRecorder::NsightCompute;
    let outcome = report.read_blocks(&mut file);
    let read = report.builder.trace.profiled.len();
    if let Err(reason) = outcome {
        let reason = format!("report after {read} results: {reason}");
        if read == 0 {
            return Err(TraceError::broken_file(path, reason));
        }
        report.builder.trace.quality.unreadable.push(reason);
    }
    if read == 0 {
        return Err(TraceError::broken_file(path, "it holds no profiled launch"));
    }
    Ok(report.builder.finish_trace())
}

/// A report file whose messages are read one by one.
struct ReportFile {
    source: BufReader<std::fs::File>,
    /// Number of bytes that were not read yet.
    left: u64,
}

impl ReportFile {
    /// The next message of the file, whose length precedes it; `None` at the end of the file.
    fn next_message(&mut self) -> Result<Option<Vec<u8>>, String> {
        if self.left == 0 {
            return Ok(None);
        }
        let mut length = [0; 4];
        self.source.read_exact(&mut length).map_err(|_| "the file is cut off".to_owned())?;
        let length = u32::from_le_bytes(length);
        self.left = self.left.saturating_sub(4);
        if length > MAX_MESSAGE_BYTES || u64::from(length) > self.left {
            return Err(format!(
                "a part of {length} bytes, {} bytes before the end of the file",
                self.left
            ));
        }
        let mut bytes = vec![0; length as usize];
        self.source.read_exact(&mut bytes).map_err(|error| error.to_string())?;
        self.left -= u64::from(length);
        Ok(Some(bytes))
    }

    fn require_message(&mut self, part: &str) -> Result<Vec<u8>, String> {
        self.next_message()?.ok_or_else(|| format!("the file ends before a {part}"))
    }
}

#[derive(Default)]
struct NcuReport {
    builder: TraceBuilder,
    /// Texts that metrics of the report refer to. A block without texts uses the texts of the
    /// previous block.
    strings: Vec<String>,
    /// Compiled kernels by the reference that results have, with their lines once asked for.
    binaries: HashMap<u64, CubinOrLines>,
    binary_bytes: usize,
    process: String,
}

enum CubinOrLines {
    Cubin(Vec<u8>),
    Read(CubinLines),
}

impl NcuReport {
    fn read_blocks(&mut self, file: &mut ReportFile) -> Result<(), String> {
        file.require_message("header")?;
        while let Some(header) = file.next_message()? {
            let header = ProtobufMessage(&header);
            self.read_session(header.message_field(block::SESSION_FIELD));
            let strings = header.message_field(block::STRINGS_FIELD).repeated_field(1);
            let strings: Vec<String> =
                strings.map(|text| String::from_utf8_lossy(text.0).into_owned()).collect();
            if !strings.is_empty() {
                self.strings = strings;
            }
            self.process = header.message_field(block::PROCESS_FIELD).text_field(3);
            for _ in 0..header.integer_field(block::SOURCES_FIELD).unwrap_or(0) {
                let source = file.require_message("compiled kernel")?;
                self.source(ProtobufMessage(&source));
            }
            for (number, fields) in block::RESULT_KINDS.into_iter().zip(&RESULT_KINDS) {
                for _ in 0..header.integer_field(number).unwrap_or(0) {
                    let result = file.require_message("result")?;
                    self.read_result(ProtobufMessage(&result), fields);
                }
            }
        }
        Ok(())
    }

    /// Reads the version that wrote the report, and the machine.
    fn read_session(&mut self, session: ProtobufMessage<'_>) {
        let trace = &mut self.builder.trace;
        for version in session.repeated_field(8) {
            let (provider, version) = (version.text_field(1), version.text_field(2));
            if provider.contains("Compute") && !trace.metadata.contains_key("PRODUCT_VERSION") {
                let mut numbers = version.split('.').map_while(|part| part.parse().ok());
                let release = numbers.next().zip(numbers.next());
                if release.is_some_and(|release| release > NEWEST_KNOWN_RELEASE) {
                    trace.quality.notes.push(format!(
                        "Nsight Compute {version} wrote the report; its format is known up to \
                         {}.{}, and what is new is skipped",
                        NEWEST_KNOWN_RELEASE.0, NEWEST_KNOWN_RELEASE.1
                    ));
                }
                trace.metadata.insert("PRODUCT_VERSION".to_owned(), version);
            }
        }
        let computer = session.message_field(4).text_field(5);
        if !computer.is_empty() {
            trace.metadata.insert("host".to_owned(), computer);
        }
    }

    /// Keeps a compiled kernel.
    fn source(&mut self, source: ProtobufMessage<'_>) {
        let (Some(reference), binary) = (source.integer_field(1), source.message_field(4).0) else {
            return;
        };
        if binary.is_empty() || self.binary_bytes + binary.len() > MAX_KEPT_BINARY_BYTES {
            return;
        }
        self.binary_bytes += binary.len();
        self.binaries.insert(reference, CubinOrLines::Cubin(binary.to_vec()));
    }

    fn read_result(&mut self, result: ProtobufMessage<'_>, fields: &ResultFieldNumbers) {
        let number = self.builder.trace.profiled.len();
        let is_kernel = fields.name == "kernel";
        let mangled = if is_kernel { result.text_field(5) } else { String::new() };
        let name = if is_kernel {
            kernel_name_of_result(result)
        } else {
            format!("{} {number}", fields.name)
        };
        let (names, mut labels) = (&mut self.builder.trace.names, HashMap::new());
        for section in result.repeated_field(fields.sections) {
            for metric in section.message_field(4).repeated_field(2) {
                labels.insert(metric.text_field(1), (metric.text_field(2), metric.text_field(5)));
            }
        }
        let mut launch = ProfiledLaunch {
            id: number.to_string(),
            kernel: names.intern_text(&name),
            shape: if is_kernel { result_shape(result) } else { LaunchShape::default() },
            device: String::new(),
            metrics: Default::default(),
            rules: texts_of_ncu_rules(result, fields, names),
            lines: Vec::new(),
        };
        let mut attributes = DeviceAttributes::default();
        let mut stalls = WarpStallSamples::default();
        for metric in result.repeated_field(fields.metrics) {
            let Some(name) = metric.integer_field(1).and_then(|id| usize::try_from(id).ok()) else {
                continue;
            };
            let Some(name) = self.strings.get(name) else {
                self.builder.trace.quality.odd_values += 1;
                continue;
            };
            let value = metric_value(metric.message_field(2));
            if let Some(value) = &value {
                attributes.add(name, value);
            }
            stalls.add(name, metric);
            let Some(MetricScalar::Number(value)) = value else { continue };
            let unit = unit_by_metric_name(name);
            add_launch_metric(&mut self.builder.trace.names, &mut launch, name, unit, value);
            if let Some((label, own)) = labels.get(name).filter(|(label, _)| !label.is_empty()) {
                let unit = if own.is_empty() { unit } else { own };
                add_launch_metric(&mut self.builder.trace.names, &mut launch, label, unit, value);
            }
        }
        launch.device = attributes.value_text();
        if let Some(device) = attributes.traced_device()
            && !self.builder.trace.devices.contains(&device)
        {
            self.builder.trace.devices.push(device);
        }
        let reference = result.message_field(15).integer_field(1).unwrap_or(0);
        launch.lines = self.stalls_by_source_line(&stalls, reference, &mangled);
        self.builder.trace.profiled.push(launch);
    }

    /// Source lines at which warps of the kernel waited most.
    fn stalls_by_source_line(
        &mut self,
        stalls: &WarpStallSamples,
        reference: u64,
        kernel: &str,
    ) -> Vec<SourceStalls> {
        let Some(first) = stalls.first else { return Vec::new() };
        let Some(binary) = self.binaries.get_mut(&reference) else { return Vec::new() };
        if let CubinOrLines::Cubin(cubin) = binary {
            *binary = CubinOrLines::Read(CubinLines::from_cubin(cubin));
        }
        let CubinOrLines::Read(lines) = binary else { return Vec::new() };
        let mut sums: HashMap<&SourceFileLine, HashMap<&str, u64>> = HashMap::new();
        for (&(address, ref reason), &samples) in &stalls.samples {
            let offset = address.checked_sub(first);
            if let Some(line) =
                offset.and_then(|offset| lines.source_line_of_instruction(kernel, offset))
            {
                *sums.entry(line).or_default().entry(reason).or_default() += samples;
            }
        }
        let names = &mut self.builder.trace.names;
        let mut all: Vec<SourceStalls> = sums
            .into_iter()
            .map(|(line, reasons)| {
                let most = reasons.iter().max_by_key(|&(reason, samples)| (samples, *reason));
                SourceStalls {
                    file: names.intern_text(&line.file),
                    line: line.line,
                    samples: reasons.values().sum(),
                    reason: names.intern_text(most.map_or("", |(reason, _)| reason)),
                }
            })
            .collect();
        all.sort_by_key(|line| (std::cmp::Reverse(line.samples), line.file, line.line));
        all.truncate(MAX_SOURCE_LINES);
        all
    }
}

fn kernel_name_of_result(result: ProtobufMessage<'_>) -> String {
    let texts = [31, 7, 5, 6].map(|field| result.text_field(field));
    let name = texts.iter().find(|name| !name.is_empty());
    name.map_or_else(|| "unknown kernel".to_owned(), |name| readable_kernel_name(name).into_owned())
}

fn result_shape(result: ProtobufMessage<'_>) -> LaunchShape {
    let dimensions = |field| {
        let message = result.message_field(field);
        [1, 2, 3].map(|axis| {
            message.integer_field(axis).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        })
    };
    LaunchShape { grid: dimensions(10), block: dimensions(11), ..LaunchShape::default() }
}

/// Texts of the rules of Nsight Compute, with the name of the rule.
fn texts_of_ncu_rules(
    result: ProtobufMessage<'_>,
    fields: &ResultFieldNumbers,
    names: &mut TraceNames,
) -> Vec<(crate::model::interned_names::NameId, crate::model::interned_names::NameId)> {
    let mut rules = Vec::new();
    for rule in result.repeated_field(fields.rules) {
        let name = names.intern_text(&rule.text_field(1));
        for item in rule.message_field(3).repeated_field(1) {
            let message = item.message_field(1).text_field(1);
            if !message.is_empty() {
                rules.push((name, names.intern_text(&message)));
            }
        }
    }
    rules
}

/// The value of a metric: integer, float or text.
#[derive(Debug, Clone, PartialEq)]
enum MetricScalar {
    Number(f64),
    Text(String),
}

fn metric_value(message: ProtobufMessage<'_>) -> Option<MetricScalar> {
    #[allow(clippy::cast_precision_loss)]
    let number = |field| match field {
        (2, WireValue::Bits32(bits)) => Some(f64::from(f32::from_bits(bits))),
        (3, WireValue::Bits64(bits)) => Some(f64::from_bits(bits)),
        (4 | 5, WireValue::Number(value)) => Some(value as f64),
        _ => None,
    };
    message.all_fields().find_map(|field| match field {
        (1, WireValue::Bytes(text)) => {
            Some(MetricScalar::Text(String::from_utf8_lossy(text).into_owned()))
        }
        field => number(field).filter(|value| value.is_finite()).map(MetricScalar::Number),
    })
}

/// The unit of a metric, derived from its name.
fn unit_by_metric_name(name: &str) -> &'static str {
    let has = |word: &str| name.contains(word);
    let per_second = name.ends_with(".per_second");
    match () {
        () if has("pct") => "%",
        () if has("time_duration") => "nsecond",
        () if has("bytes") && per_second => "byte/second",
        () if has("cycles") && per_second => "cycle/second",
        () if name.starts_with("launch__occupancy_limit") => "block",
        () if has("registers_per_thread") => "register/thread",
        () if has("shared_mem") => "byte/block",
        () if has("bytes") && !has("ratio") => "byte",
        () if has("cycles") && !has("per_cycle") && !has("ratio") => "cycle",
        () => "",
    }
}

/// Attributes of the device, which results have as metrics.
#[derive(Default)]
struct DeviceAttributes {
    id: Option<f64>,
    name: String,
    numbers: HashMap<String, u32>,
}

impl DeviceAttributes {
    fn add(&mut self, metric: &str, value: &MetricScalar) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        match (metric.strip_prefix("device__attribute_"), value) {
            (Some("display_name"), MetricScalar::Text(name)) => self.name.clone_from(name),
            (Some(attribute), MetricScalar::Number(value)) => {
                self.numbers.insert(attribute.to_owned(), *value as u32);
            }
            (None, MetricScalar::Number(value)) if metric == "launch__device_id" => {
                self.id = Some(*value);
            }
            _ => {}
        }
    }

    fn compute_capability(&self) -> Option<(u32, u32)> {
        let number = |name: &str| self.numbers.get(name).copied();
        number("compute_capability_major").zip(number("compute_capability_minor"))
    }

    /// The value as text, in the format of the CSV reader.
    fn value_text(&self) -> String {
        let compute = self
            .compute_capability()
            .map_or("?".to_owned(), |(major, minor)| format!("{major}.{minor}"));
        format!("device {}, compute capability {compute}", self.id.unwrap_or(0.0))
    }

    fn traced_device(&self) -> Option<TracedDevice> {
        let number = |name: &str| self.numbers.get(name).copied();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let id = self.id.unwrap_or(0.0) as u32;
        (!self.name.is_empty()).then(|| TracedDevice {
            id,
            name: self.name.clone(),
            multiprocessors: number("multiprocessor_count"),
            compute: self.compute_capability(),
            threads_per_sm: number("max_threads_per_multiprocessor"),
            registers_per_sm: number("max_registers_per_multiprocessor"),
            shared_per_sm: number("max_shared_memory_per_multiprocessor"),
            blocks_per_sm: number("max_blocks_per_multiprocessor"),
            warp: number("warp_size"),
        })
    }
}

/// Samples of warps that waited, by instruction and reason.
#[derive(Default)]
struct WarpStallSamples {
    /// Address of the kernel's first instruction, if metrics show it.
    first: Option<u64>,
    samples: HashMap<(u64, String), u64>,
}

impl WarpStallSamples {
    fn add(&mut self, name: &str, metric: ProtobufMessage<'_>) {
        // The list of executed instructions includes the first instruction; the list of sampled
        // instructions may not.
        let executed = name == "inst_executed" || name == "smsp__inst_executed";
        let reason = name.strip_prefix("smsp__pcsamp_warps_issue_stalled_");
        // A reason is counted once more for samples in which nothing was issued.
        let reason = reason.filter(|reason| !reason.ends_with("_not_issued"));
        for element in metric.repeated_field(3) {
            let address =
                [5, 4].into_iter().find_map(|field| element.message_field(1).integer_field(field));
            let Some(address) = address else { continue };
            if executed {
                self.first = Some(self.first.map_or(address, |first| first.min(address)));
            }
            let (Some(reason), Some(MetricScalar::Number(samples))) =
                (reason, metric_value(element.message_field(2)))
            else {
                continue;
            };
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let samples = samples as u64;
            if samples > 0 {
                *self.samples.entry((address, reason.to_owned())).or_default() += samples;
            }
        }
    }
}
