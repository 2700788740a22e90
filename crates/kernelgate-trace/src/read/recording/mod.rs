//! Recordings of `kernelgate profile --out`: what CUPTI recorded in the process that was measured,
//! in the plain form of `kernelgate_cuda::observe::activity`, one list a kind of record.

mod rows;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use hashbrown::HashMap;
use rows::{
    DeclaredWorkRow, On, RecordedGraphNodeRow, RecordedKernelRow, RecordedRows, RecordingFile,
};

use super::demangle::readable_kernel_name;
use super::trace_builder::{COPY_DIRECTIONS, TraceBuilder};
use crate::error::TraceError;
use crate::model::gpu::{
    CudaGraphNode, DeclaredProblemPart, DeclaredRangeWork, DeclaredWorkCount, LaunchShape,
    MemoryKind, OperationColumns, OperationPlace, PageFaultTable, PlaceId, SynchronisationKind,
};
use crate::model::host::RangeStyle;
use crate::model::interned_names::NameId;
use crate::model::quality::TraceQuality;
use crate::model::{Trace, TraceRecorder, TracedDevice};

const RECORDING_SCHEMA: &str = "kernelgate-recording";
/// Newest version of recordings that this reader knows.
const RECORDING_VERSION: u64 = 1;

/// Returns whether a text begins as a recording: the name of the format comes before the records.
pub(super) fn looks_like_recording(head: &[u8]) -> bool {
    head.windows(RECORDING_SCHEMA.len()).any(|part| part == RECORDING_SCHEMA.as_bytes())
}

/// Reads a recording.
///
/// # Errors
/// The file cannot be read, is cut short or of a newer version.
pub(super) fn read_recording(path: &Path) -> Result<Trace, TraceError> {
    let file = File::open(path).map_err(TraceError::io(path))?;
    let recording: RecordingFile = serde_json::from_reader(BufReader::with_capacity(1 << 18, file))
        .map_err(|error| TraceError::broken_file(path, format!("broken or cut short ({error})")))?;
    if recording.schema != RECORDING_SCHEMA {
        return Err(TraceError::broken_file(path, format!("it is of `{}`", recording.schema)));
    }
    if recording.schema_version > RECORDING_VERSION {
        return Err(TraceError::broken_file(
            path,
            format!(
                "written by a newer kernelgate (schema {}, this one reads up to {RECORDING_VERSION})",
                recording.schema_version
            ),
        ));
    }
    Ok(RecordingReader::new(&recording).read_all_rows(&recording))
}

/// State of a kernelgate recording while it is read.
struct RecordingReader {
    builder: TraceBuilder,
    process: u32,
    names: Vec<NameId>,
    unknown: NameId,
}

impl RecordingReader {
    fn new(recording: &RecordingFile) -> Self {
        let mut builder = TraceBuilder::default();
        let pid = recording.trace.pid;
        let process = builder.process_of_key(u64::from(pid), i64::from(pid));
        let all = &mut builder.trace.names;
        let names = recording
            .trace
            .names
            .iter()
            .map(|text| all.intern_text(&readable_kernel_name(text)))
            .collect();
        let unknown = all.intern_text("unknown");
        Self { builder, process, names, unknown }
    }

    fn read_all_rows(mut self, recording: &RecordingFile) -> Trace {
        let activity = &recording.trace;
        self.builder.trace.recorder = TraceRecorder::Cupti;
        self.add_recording_information(recording);
        self.kernels(&activity.kernels);
        self.add_memory_operations(activity);
        self.add_host_activity(activity);
        self.add_graph_nodes(&activity.graph_nodes);
        let quality = &mut self.builder.trace.quality;
        quality.dropped = activity.dropped;
        for &[start, end] in &activity.overhead {
            let span = plausible_span(quality, start, end);
            quality.overhead.push(span);
        }
        self.builder.finish_trace()
    }

    fn add_recording_information(&mut self, recording: &RecordingFile) {
        let trace = &mut self.builder.trace;
        let devices = std::iter::once(&recording.device).chain(&recording.other_devices);
        trace.devices.extend(devices.map(|device| TracedDevice {
            id: device.id,
            name: device.name.clone(),
            multiprocessors: device.multiprocessors,
            compute: device.compute.map(|[major, minor]| (major, minor)),
            threads_per_sm: device.threads_per_sm,
            registers_per_sm: device.registers_per_sm,
            shared_per_sm: device.shared_per_sm,
            blocks_per_sm: device.blocks_per_sm,
            warp: None,
        }));
        trace.metadata.insert("case".to_owned(), recording.case.clone());
        trace.metadata.insert("steps".to_owned(), recording.steps.to_string());
        let work = declared_work_count(&recording.work);
        if !recording.limits.is_empty() || work != DeclaredWorkCount::default() {
            let limits = recording.limits.iter().map(|limit| (limit.by.clone(), limit.time_ns));
            // Path of the range around each launch.
            let path = format!("{}/step", recording.case);
            trace.work.push(DeclaredRangeWork { path, limits: limits.collect(), work });
        }
        let parts = recording.parts.iter().map(|part| DeclaredProblemPart {
            label: part.label.clone(),
            range: part.range.clone(),
            work: declared_work_count(&part.work),
        });
        trace.parts.extend(parts.filter(|part| part.work != DeclaredWorkCount::default()));
    }

    fn name(&mut self, index: u32) -> NameId {
        let name = self.names.get(index as usize).copied();
        self.builder.trace.quality.odd_values += u64::from(name.is_none());
        name.unwrap_or(self.unknown)
    }

    fn place(&mut self, on: On) -> PlaceId {
        let On { device, context, stream } = on;
        let process = self.process;
        self.builder.place(OperationPlace { process, device, context, stream: u64::from(stream) })
    }

    /// Adds a GPU operation; returns `false` if the record has no times.
    fn push(
        &mut self,
        operations: &mut OperationColumns,
        (start, end): (u64, u64),
        on: On,
        correlation: u32,
    ) -> bool {
        if start == 0 && end == 0 {
            self.builder.trace.quality.without_times += 1;
            return false;
        }
        let (start, end) = plausible_span(&mut self.builder.trace.quality, start, end);
        operations.push(start, end, self.place(on), correlation);
        true
    }

    fn kernels(&mut self, rows: &[RecordedKernelRow]) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        for row in rows {
            let span = (row.start, row.end);
            if !self.push(&mut kernels.on_gpu, span, row.on, row.correlation) {
                continue;
            }
            let name = self.name(row.name);
            kernels.function.push(self.builder.function(name, name));
            kernels.shape.push(self.builder.shape(LaunchShape {
                grid: row.grid,
                block: row.block,
                registers: row.registers,
                static_shared: row.static_shared,
                dynamic_shared: row.dynamic_shared,
                local: row.local,
            }));
            kernels.graph_node.push(row.graph_node);
        }
        self.builder.trace.kernels = kernels;
    }

    /// Adds copies, memsets, allocations and page faults.
    fn add_memory_operations(&mut self, activity: &RecordedRows) {
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        for row in &activity.copies {
            let span = (row.start, row.end);
            if self.push(&mut copies.on_gpu, span, row.on, row.correlation) {
                copies.bytes.push(row.bytes);
                let label =
                    COPY_DIRECTIONS.get(usize::from(row.kind)).unwrap_or(&COPY_DIRECTIONS[0]);
                copies.kind.push(self.builder.trace.names.intern_text(label));
                copies.source.push(memory_kind_of_cupti(row.source));
                copies.target.push(memory_kind_of_cupti(row.target));
            }
        }
        self.builder.trace.copies = copies;
        let mut sets = std::mem::take(&mut self.builder.trace.sets);
        for row in &activity.sets {
            let span = (row.start, row.end);
            if self.push(&mut sets.on_gpu, span, row.on, row.correlation) {
                sets.bytes.push(row.bytes);
            }
        }
        self.builder.trace.sets = sets;
        let mut allocations = std::mem::take(&mut self.builder.trace.allocations);
        for row in &activity.allocations {
            let (place, bytes) = (self.place(row.on), row.bytes.unsigned_abs());
            let time = time_or_zero(&mut self.builder.trace.quality, row.time);
            allocations.push(time, place, row.address, bytes, row.bytes < 0);
        }
        self.builder.trace.allocations = allocations;
        for row in &activity.page_faults {
            let trace = &mut self.builder.trace;
            let (start, end) =
                plausible_span(&mut trace.quality, row.start, row.end.max(row.start));
            trace.page_faults.start.push(start);
            trace.page_faults.end.push(end);
            trace.page_faults.process.push(self.process);
            trace.page_faults.device.push(row.device.unwrap_or(PageFaultTable::HOST_PLACE));
            trace.page_faults.count.push(row.count.unwrap_or(1));
        }
    }

    /// Calls, waits and ranges.
    fn add_host_activity(&mut self, activity: &RecordedRows) {
        for row in &activity.calls {
            let name = self.name(row.name);
            let thread = self.builder.thread_of_tid(self.process, i64::from(row.thread));
            let trace = &mut self.builder.trace;
            let (start, end) = plausible_span(&mut trace.quality, row.start, row.end);
            trace.calls.push(start, end, thread, name, row.correlation);
        }
        for row in &activity.ranges {
            let name = self.name(row.name);
            let thread = self.builder.thread_of_tid(self.process, i64::from(row.thread));
            let trace = &mut self.builder.trace;
            let (start, end) = plausible_span(&mut trace.quality, row.start, row.end);
            trace.ranges.push(start, end, thread, name, RangeStyle::PushPop);
        }
        // Waits name only a context, so the context's device is looked up.
        let devices: HashMap<u32, u32> =
            activity.kernels.iter().map(|row| (row.on.context, row.on.device)).collect();
        let mut waits = std::mem::take(&mut self.builder.trace.syncs);
        for row in &activity.waits {
            let device = devices.get(&row.on.context).copied().unwrap_or(row.on.device);
            let span = (row.start, row.end);
            if self.push(&mut waits.on_gpu, span, On { device, ..row.on }, row.correlation) {
                waits.kind.push(match row.kind {
                    1 => SynchronisationKind::Event,
                    2 => SynchronisationKind::StreamWaitsEvent,
                    3 => SynchronisationKind::Stream,
                    4 => SynchronisationKind::Context,
                    _ => SynchronisationKind::Unknown,
                });
            }
        }
        self.builder.trace.syncs = waits;
    }

    fn add_graph_nodes(&mut self, rows: &[RecordedGraphNodeRow]) {
        for row in rows {
            let ranges = row.ranges.iter().map(|&name| self.name(name)).collect();
            self.builder.trace.graph_nodes.push(CudaGraphNode {
                process: self.process,
                id: row.id,
                ranges,
            });
        }
    }
}

fn declared_work_count(row: &DeclaredWorkRow) -> DeclaredWorkCount {
    let flops = row.flops.iter().map(|(unit, count)| (unit.clone(), *count));
    DeclaredWorkCount { flops: flops.collect(), bytes: row.read_bytes + row.write_bytes }
}

/// Returns the time, or 0 if it is impossible.
fn time_or_zero(quality: &mut TraceQuality, ns: u64) -> i64 {
    quality.time(Some(i64::try_from(ns).unwrap_or(i64::MAX))).unwrap_or(0)
}

fn plausible_span(quality: &mut TraceQuality, start: u64, end: u64) -> (i64, i64) {
    let [start, end] = [start, end].map(|ns| time_or_zero(quality, ns));
    (start, quality.plausible_span_end(start, end))
}

/// Converts CUPTI's number of a memory kind.
fn memory_kind_of_cupti(kind: u8) -> MemoryKind {
    match kind {
        1 => MemoryKind::Pageable,
        2 => MemoryKind::Pinned,
        3 | 6 => MemoryKind::Device,
        4 => MemoryKind::Array,
        5 | 7 => MemoryKind::Managed,
        _ => MemoryKind::Unknown,
    }
}
