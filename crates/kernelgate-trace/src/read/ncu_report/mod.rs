//! Reads Nsight Compute reports (`.ncu-rep`) without running Nsight Compute.
//!
//! A report file is a header followed by blocks. A block contains compiled kernels, then profile
//! results; each part is a length followed by a protobuf message. NVIDIA documents the protobuf
//! messages in `extras/FileFormat` of an Nsight Compute installation; the field numbers below
//! follow that documentation up to Nsight Compute 2026.3. The reader skips unknown protobuf fields,
//! so that it can read newer reports as far as their format is unchanged. The reader ignores
//! disassembled instructions, charts and sampled timelines in the report.

mod protobuf_fields;
mod source_lines;

use std::io::{BufReader, Read};
use std::path::Path;

use hashbrown::HashMap;
use protobuf_fields::{ProtobufMessageBytes, ProtobufWireValue};
use source_lines::{CubinSourceLines, SourceFileAndLine};

use super::demangle::demangle_kernel_name;
use super::ncu::add_metric_under_current_name;
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::KernelLaunchShape;
use crate::model::interned_names::InternedTraceNames;
use crate::model::kernel_metrics::{NcuProfiledLaunch, WarpStallsOfSourceLine};
use crate::model::{Trace, TraceRecorder, TracedDevice};

/// The first bytes of every Nsight Compute report file.
pub(super) const NCU_REPORT_MAGIC: &[u8] = b"NVR\0";
/// The newest Nsight Compute release (year, number) whose report format this reader knows.
const NEWEST_KNOWN_NCU_RELEASE: (u32, u32) = (2026, 3);
/// Maximum size in bytes of a protobuf message in a report.
const MAX_REPORT_MESSAGE_BYTES: u32 = 1 << 30;
/// Maximum total size in bytes of the cubins that are kept to look up source lines.
const MAX_KEPT_CUBIN_BYTES: usize = 256 << 20;
/// Maximum number of source lines with warp stalls that are kept per kernel launch.
const MAX_STALLED_SOURCE_LINES: usize = 20;

/// Protobuf field numbers in the header of a report block.
mod block {
    pub const COMPILED_KERNEL_COUNT_FIELD_NUMBER: u64 = 1;
    pub const SESSION_MESSAGE_FIELD_NUMBER: u64 = 3;
    pub const METRIC_TEXTS_FIELD_NUMBER: u64 = 4;
    pub const PROCESS_FIELD_NUMBER: u64 = 6;
    /// Fields with the number of results of each kind, in file order: kernel launches, ranges,
    /// command lists, graphs.
    pub const RESULT_COUNT_FIELD_NUMBERS: [u64; 4] = [2, 7, 8, 9];
}

/// Protobuf field numbers in a result message of one kind.
struct ProtobufFieldsOfResultKind {
    /// Name of the result kind; results other than kernels are listed under it.
    result_kind_name: &'static str,
    metrics_field_number: u64,
    sections_field_number: u64,
    rules_field_number: u64,
}

/// Field numbers of each kind of result, in the order of [`block::RESULT_COUNT_FIELD_NUMBERS`].
const RESULT_FIELD_NUMBERS: [ProtobufFieldsOfResultKind; 4] = [
    ProtobufFieldsOfResultKind {
        result_kind_name: "kernel",
        metrics_field_number: 13,
        sections_field_number: 17,
        rules_field_number: 19,
    },
    ProtobufFieldsOfResultKind {
        result_kind_name: "range",
        metrics_field_number: 4,
        sections_field_number: 7,
        rules_field_number: 20,
    },
    ProtobufFieldsOfResultKind {
        result_kind_name: "command list",
        metrics_field_number: 4,
        sections_field_number: 7,
        rules_field_number: 21,
    },
    ProtobufFieldsOfResultKind {
        result_kind_name: "graph",
        metrics_field_number: 4,
        sections_field_number: 7,
        rules_field_number: 22,
    },
];

/// Reads profiled kernel launches, metrics and devices from an Nsight Compute report.
///
/// # Errors
/// The file cannot be read, is not an Nsight Compute report, or contains no result.
pub(super) fn read_ncu_report(path: &Path) -> Result<Trace, TraceError> {
    let file = std::fs::File::open(path).map_err(TraceError::unreadable_file_error(path))?;
    let left = file.metadata().map_err(TraceError::unreadable_file_error(path))?.len();
    let mut file =
        NcuReportFile { source: BufReader::with_capacity(1 << 16, file), remaining_bytes: left };
    let mut magic = [0; 4];
    if file.source.read_exact(&mut magic).is_err() || magic != NCU_REPORT_MAGIC {
        let reason = format!(
            "it is not a report of Nsight Compute: its first bytes are not NVR; if ncu opens it, \
             run: ncu --csv --page details --import {} > {}",
            path.display(),
            path.with_extension("csv").display()
        );
        return Err(TraceError::UnknownFormat { path: path.to_owned(), reason });
    }
    file.remaining_bytes -= 4;
    let mut report = NcuReportReader::default();
    report.builder.trace.recorder = TraceRecorder::NsightCompute;
    let outcome = report.read_report_blocks(&mut file);
    let read = report.builder.trace.profiled_launches.len();
    if let Err(reason) = outcome {
        let reason = format!("report after {read} results: {reason}");
        if read == 0 {
            return Err(TraceError::broken_trace_file_error(path, reason));
        }
        report.builder.trace.quality.unreadable_parts.push(reason);
    }
    if read == 0 {
        return Err(TraceError::broken_trace_file_error(path, "it holds no profiled launch"));
    }
    Ok(report.builder.finish_trace())
}

/// An Nsight Compute report file that is read message by message.
struct NcuReportFile {
    source: BufReader<std::fs::File>,
    /// Number of bytes between the read position and the end of the report file.
    remaining_bytes: u64,
}

impl NcuReportFile {
    /// Reads the next protobuf message, which follows its length in four bytes; `None` at the end
    /// of the report file.
    fn read_next_message(&mut self) -> Result<Option<Vec<u8>>, String> {
        if self.remaining_bytes == 0 {
            return Ok(None);
        }
        let mut length = [0; 4];
        self.source.read_exact(&mut length).map_err(|_| "the file is cut off".to_owned())?;
        let length = u32::from_le_bytes(length);
        self.remaining_bytes = self.remaining_bytes.saturating_sub(4);
        if length > MAX_REPORT_MESSAGE_BYTES || u64::from(length) > self.remaining_bytes {
            return Err(format!(
                "a part of {length} bytes, {} bytes before the end of the file",
                self.remaining_bytes
            ));
        }
        let mut bytes = vec![0; length as usize];
        self.source.read_exact(&mut bytes).map_err(|error| error.to_string())?;
        self.remaining_bytes -= u64::from(length);
        Ok(Some(bytes))
    }

    fn read_required_message(&mut self, part: &str) -> Result<Vec<u8>, String> {
        self.read_next_message()?.ok_or_else(|| format!("the file ends before a {part}"))
    }
}

#[derive(Default)]
struct NcuReportReader {
    builder: TraceBuilder,
    /// Texts to which the metrics of the report refer by index. A report block without own texts
    /// uses the texts of the previous block.
    metric_texts: Vec<String>,
    /// Compiled kernels (cubins) by the id to which results refer; a cubin is replaced by its
    /// source lines at the first lookup.
    cubins_by_id: HashMap<u64, CubinOrParsedLines>,
    kept_cubin_bytes: usize,
    process_name: String,
}

enum CubinOrParsedLines {
    CubinBytes(Vec<u8>),
    ParsedLines(CubinSourceLines),
}

impl NcuReportReader {
    fn read_report_blocks(&mut self, file: &mut NcuReportFile) -> Result<(), String> {
        file.read_required_message("header")?;
        while let Some(header) = file.read_next_message()? {
            let header = ProtobufMessageBytes(&header);
            self.read_version_and_host_name(
                header.nested_message_or_empty(block::SESSION_MESSAGE_FIELD_NUMBER),
            );
            let strings = header
                .nested_message_or_empty(block::METRIC_TEXTS_FIELD_NUMBER)
                .nested_messages_of_repeated_field(1);
            let strings: Vec<String> =
                strings.map(|text| String::from_utf8_lossy(text.0).into_owned()).collect();
            if !strings.is_empty() {
                self.metric_texts = strings;
            }
            self.process_name =
                header.nested_message_or_empty(block::PROCESS_FIELD_NUMBER).text_field_or_empty(3);
            for _ in 0..header
                .integer_field_if_present(block::COMPILED_KERNEL_COUNT_FIELD_NUMBER)
                .unwrap_or(0)
            {
                let source = file.read_required_message("compiled kernel")?;
                self.keep_cubin(ProtobufMessageBytes(&source));
            }
            for (number, fields) in
                block::RESULT_COUNT_FIELD_NUMBERS.into_iter().zip(&RESULT_FIELD_NUMBERS)
            {
                for _ in 0..header.integer_field_if_present(number).unwrap_or(0) {
                    let result = file.read_required_message("result")?;
                    self.add_launch_from_result(ProtobufMessageBytes(&result), fields);
                }
            }
        }
        Ok(())
    }

    /// Reads the Nsight Compute version and the host name from the session message of a report
    /// block.
    fn read_version_and_host_name(&mut self, session: ProtobufMessageBytes<'_>) {
        let trace = &mut self.builder.trace;
        for version in session.nested_messages_of_repeated_field(8) {
            let (provider, version) =
                (version.text_field_or_empty(1), version.text_field_or_empty(2));
            if provider.contains("Compute") && !trace.metadata.contains_key("PRODUCT_VERSION") {
                let mut numbers = version.split('.').map_while(|part| part.parse().ok());
                let release = numbers.next().zip(numbers.next());
                if release.is_some_and(|release| release > NEWEST_KNOWN_NCU_RELEASE) {
                    trace.quality.interpretation_notes.push(format!(
                        "Nsight Compute {version} wrote the report; its format is known up to \
                         {}.{}, and what is new is skipped",
                        NEWEST_KNOWN_NCU_RELEASE.0, NEWEST_KNOWN_NCU_RELEASE.1
                    ));
                }
                trace.metadata.insert("PRODUCT_VERSION".to_owned(), version);
            }
        }
        let computer = session.nested_message_or_empty(4).text_field_or_empty(5);
        if !computer.is_empty() {
            trace.metadata.insert("host".to_owned(), computer);
        }
    }

    /// Keeps a compiled kernel (cubin) of the report, to look up source lines later.
    fn keep_cubin(&mut self, source: ProtobufMessageBytes<'_>) {
        let (Some(reference), binary) =
            (source.integer_field_if_present(1), source.nested_message_or_empty(4).0)
        else {
            return;
        };
        if binary.is_empty() || self.kept_cubin_bytes + binary.len() > MAX_KEPT_CUBIN_BYTES {
            return;
        }
        self.kept_cubin_bytes += binary.len();
        self.cubins_by_id.insert(reference, CubinOrParsedLines::CubinBytes(binary.to_vec()));
    }

    fn add_launch_from_result(
        &mut self,
        result: ProtobufMessageBytes<'_>,
        fields: &ProtobufFieldsOfResultKind,
    ) {
        let number = self.builder.trace.profiled_launches.len();
        let is_kernel = fields.result_kind_name == "kernel";
        let mangled = if is_kernel { result.text_field_or_empty(5) } else { String::new() };
        let name = if is_kernel {
            kernel_name_of_result(result)
        } else {
            format!("{} {number}", fields.result_kind_name)
        };
        let (names, mut labels) = (&mut self.builder.trace.names, HashMap::new());
        for section in result.nested_messages_of_repeated_field(fields.sections_field_number) {
            for metric in section.nested_message_or_empty(4).nested_messages_of_repeated_field(2) {
                labels.insert(
                    metric.text_field_or_empty(1),
                    (metric.text_field_or_empty(2), metric.text_field_or_empty(5)),
                );
            }
        }
        let mut launch = NcuProfiledLaunch {
            launch_id: number.to_string(),
            kernel_name: names.intern_text(&name),
            shape: if is_kernel {
                launch_shape_of_result(result)
            } else {
                KernelLaunchShape::default()
            },
            device_description: String::new(),
            metrics: Default::default(),
            rule_names_and_messages: names_and_messages_of_ncu_rules(result, fields, names),
            lines: Vec::new(),
        };
        let mut attributes = ReportDeviceAttributes::default();
        let mut stalls = WarpStallSamplesByInstruction::default();
        for metric in result.nested_messages_of_repeated_field(fields.metrics_field_number) {
            let Some(name) =
                metric.integer_field_if_present(1).and_then(|id| usize::try_from(id).ok())
            else {
                continue;
            };
            let Some(name) = self.metric_texts.get(name) else {
                self.builder.trace.quality.implausible_value_count += 1;
                continue;
            };
            let value = parse_metric_value(metric.nested_message_or_empty(2));
            if let Some(value) = &value {
                attributes.store_device_attribute(name, value);
            }
            stalls.add_samples_of_metric(name, metric);
            let Some(NcuMetricNumberOrText::Number(value)) = value else { continue };
            let unit = guess_unit_from_metric_name(name);
            add_metric_under_current_name(
                &mut self.builder.trace.names,
                &mut launch,
                name,
                unit,
                value,
            );
            if let Some((label, own)) = labels.get(name).filter(|(label, _)| !label.is_empty()) {
                let unit = if own.is_empty() { unit } else { own };
                add_metric_under_current_name(
                    &mut self.builder.trace.names,
                    &mut launch,
                    label,
                    unit,
                    value,
                );
            }
        }
        launch.device_description = attributes.device_and_compute_capability_text();
        if let Some(device) = attributes.to_traced_device()
            && !self.builder.trace.devices.contains(&device)
        {
            self.builder.trace.devices.push(device);
        }
        let reference = result.nested_message_or_empty(15).integer_field_if_present(1).unwrap_or(0);
        launch.lines = self.warp_stalls_by_source_line(&stalls, reference, &mangled);
        self.builder.trace.profiled_launches.push(launch);
    }

    /// Sums warp-stall samples by source line of a kernel; returns the lines with the most samples
    /// first.
    fn warp_stalls_by_source_line(
        &mut self,
        stalls: &WarpStallSamplesByInstruction,
        reference: u64,
        kernel: &str,
    ) -> Vec<WarpStallsOfSourceLine> {
        let Some(first) = stalls.first_instruction_address else { return Vec::new() };
        let Some(binary) = self.cubins_by_id.get_mut(&reference) else { return Vec::new() };
        if let CubinOrParsedLines::CubinBytes(cubin) = binary {
            *binary = CubinOrParsedLines::ParsedLines(CubinSourceLines::from_cubin_or_empty(cubin));
        }
        let CubinOrParsedLines::ParsedLines(lines) = binary else { return Vec::new() };
        let mut sums: HashMap<&SourceFileAndLine, HashMap<&str, u64>> = HashMap::new();
        for (&(address, ref reason), &samples) in &stalls.samples_by_address_and_reason {
            let offset = address.checked_sub(first);
            if let Some(line) =
                offset.and_then(|offset| lines.source_line_at_instruction_offset(kernel, offset))
            {
                *sums.entry(line).or_default().entry(reason).or_default() += samples;
            }
        }
        let names = &mut self.builder.trace.names;
        let mut all: Vec<WarpStallsOfSourceLine> = sums
            .into_iter()
            .map(|(line, reasons)| {
                let most = reasons.iter().max_by_key(|&(reason, samples)| (samples, *reason));
                WarpStallsOfSourceLine {
                    source_file: names.intern_text(&line.source_file),
                    line_number: line.line_number,
                    stalled_sample_count: reasons.values().sum(),
                    main_stall_reason_of_line: names
                        .intern_text(most.map_or("", |(reason, _)| reason)),
                }
            })
            .collect();
        all.sort_by_key(|line| {
            (std::cmp::Reverse(line.stalled_sample_count), line.source_file, line.line_number)
        });
        all.truncate(MAX_STALLED_SOURCE_LINES);
        all
    }
}

fn kernel_name_of_result(result: ProtobufMessageBytes<'_>) -> String {
    let texts = [31, 7, 5, 6].map(|field| result.text_field_or_empty(field));
    let name = texts.iter().find(|name| !name.is_empty());
    name.map_or_else(|| "unknown kernel".to_owned(), |name| demangle_kernel_name(name).into_owned())
}

fn launch_shape_of_result(result: ProtobufMessageBytes<'_>) -> KernelLaunchShape {
    let dimensions = |field| {
        let message = result.nested_message_or_empty(field);
        [1, 2, 3].map(|axis| {
            message.integer_field_if_present(axis).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        })
    };
    KernelLaunchShape {
        grid: dimensions(10),
        block: dimensions(11),
        ..KernelLaunchShape::default()
    }
}

/// Messages of Nsight Compute's rules in a result, each with the name of its rule.
fn names_and_messages_of_ncu_rules(
    result: ProtobufMessageBytes<'_>,
    fields: &ProtobufFieldsOfResultKind,
    names: &mut InternedTraceNames,
) -> Vec<(crate::model::interned_names::InternedNameId, crate::model::interned_names::InternedNameId)>
{
    let mut rules = Vec::new();
    for rule in result.nested_messages_of_repeated_field(fields.rules_field_number) {
        let name = names.intern_text(&rule.text_field_or_empty(1));
        for item in rule.nested_message_or_empty(3).nested_messages_of_repeated_field(1) {
            let message = item.nested_message_or_empty(1).text_field_or_empty(1);
            if !message.is_empty() {
                rules.push((name, names.intern_text(&message)));
            }
        }
    }
    rules
}

/// The value of a metric: a number or a text.
#[derive(Debug, Clone, PartialEq)]
enum NcuMetricNumberOrText {
    Number(f64),
    Text(String),
}

fn parse_metric_value(message: ProtobufMessageBytes<'_>) -> Option<NcuMetricNumberOrText> {
    #[allow(clippy::cast_precision_loss)]
    let number = |field| match field {
        (2, ProtobufWireValue::Bits32(bits)) => Some(f64::from(f32::from_bits(bits))),
        (3, ProtobufWireValue::Bits64(bits)) => Some(f64::from_bits(bits)),
        (4 | 5, ProtobufWireValue::Varint(value)) => Some(value as f64),
        _ => None,
    };
    message.fields_until_first_broken().find_map(|field| match field {
        (1, ProtobufWireValue::LengthDelimited(text)) => {
            Some(NcuMetricNumberOrText::Text(String::from_utf8_lossy(text).into_owned()))
        }
        field => number(field).filter(|value| value.is_finite()).map(NcuMetricNumberOrText::Number),
    })
}

/// Guesses the unit of a metric from words in the metric's name.
fn guess_unit_from_metric_name(name: &str) -> &'static str {
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

/// Attributes of the GPU, which each result of the report lists among its metrics.
#[derive(Default)]
struct ReportDeviceAttributes {
    device_id: Option<f64>,
    device_name: String,
    value_by_attribute: HashMap<String, u32>,
}

impl ReportDeviceAttributes {
    fn store_device_attribute(&mut self, metric: &str, value: &NcuMetricNumberOrText) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        match (metric.strip_prefix("device__attribute_"), value) {
            (Some("display_name"), NcuMetricNumberOrText::Text(name)) => {
                self.device_name.clone_from(name)
            }
            (Some(attribute), NcuMetricNumberOrText::Number(value)) => {
                self.value_by_attribute.insert(attribute.to_owned(), *value as u32);
            }
            (None, NcuMetricNumberOrText::Number(value)) if metric == "launch__device_id" => {
                self.device_id = Some(*value);
            }
            _ => {}
        }
    }

    fn compute_capability_of_device(&self) -> Option<(u32, u32)> {
        let number = |name: &str| self.value_by_attribute.get(name).copied();
        number("compute_capability_major").zip(number("compute_capability_minor"))
    }

    /// Describes the device as text, in the same form as the reader of Nsight Compute's CSV.
    fn device_and_compute_capability_text(&self) -> String {
        let compute = self
            .compute_capability_of_device()
            .map_or("?".to_owned(), |(major, minor)| format!("{major}.{minor}"));
        format!("device {}, compute capability {compute}", self.device_id.unwrap_or(0.0))
    }

    fn to_traced_device(&self) -> Option<TracedDevice> {
        let number = |name: &str| self.value_by_attribute.get(name).copied();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let id = self.device_id.unwrap_or(0.0) as u32;
        (!self.device_name.is_empty()).then(|| TracedDevice {
            device_ordinal: id,
            device_name: self.device_name.clone(),
            multiprocessors: number("multiprocessor_count"),
            compute_capability: self.compute_capability_of_device(),
            threads_per_sm: number("max_threads_per_multiprocessor"),
            registers_per_sm: number("max_registers_per_multiprocessor"),
            shared_bytes_per_sm: number("max_shared_memory_per_multiprocessor"),
            blocks_per_sm: number("max_blocks_per_multiprocessor"),
            threads_per_warp: number("warp_size"),
        })
    }
}

/// Numbers of samples in which a warp was stalled, by instruction address and stall reason.
#[derive(Default)]
struct WarpStallSamplesByInstruction {
    /// Address of the kernel's first instruction; `None` until a metric lists the executed
    /// instructions.
    first_instruction_address: Option<u64>,
    samples_by_address_and_reason: HashMap<(u64, String), u64>,
}

impl WarpStallSamplesByInstruction {
    fn add_samples_of_metric(&mut self, name: &str, metric: ProtobufMessageBytes<'_>) {
        // The metric of executed instructions contains the kernel's first instruction; the metrics
        // of sampled instructions may not.
        let executed = name == "inst_executed" || name == "smsp__inst_executed";
        let reason = name.strip_prefix("smsp__pcsamp_warps_issue_stalled_");
        // Metrics ending in `_not_issued` count a subset of the samples again, so they are skipped.
        let reason = reason.filter(|reason| !reason.ends_with("_not_issued"));
        for element in metric.nested_messages_of_repeated_field(3) {
            let address = [5, 4].into_iter().find_map(|field| {
                element.nested_message_or_empty(1).integer_field_if_present(field)
            });
            let Some(address) = address else { continue };
            if executed {
                self.first_instruction_address = Some(
                    self.first_instruction_address.map_or(address, |first| first.min(address)),
                );
            }
            let (Some(reason), Some(NcuMetricNumberOrText::Number(samples))) =
                (reason, parse_metric_value(element.nested_message_or_empty(2)))
            else {
                continue;
            };
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let samples = samples as u64;
            if samples > 0 {
                *self
                    .samples_by_address_and_reason
                    .entry((address, reason.to_owned()))
                    .or_default() += samples;
            }
        }
    }
}
