//! Reads recordings of `kernelgate profile --out`: the activity that CUPTI recorded in the measured
//! process, as JSON with one list per kind of record.

mod rows;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use hashbrown::HashMap;
use rows::{
    On, RecordedActivityRows, RecordedDeclaredWork, RecordedGraphNodeRow, RecordedKernelRow,
    RecordingJson,
};

use super::demangle::demangle_kernel_name;
use super::trace_builder::{COPY_DIRECTIONS, TraceBuilder};
use crate::error::TraceError;
use crate::model::gpu::{
    CopiedMemoryKind, CudaGraphNodeWithRanges, DeclaredOperationsAndBytes, DeclaredProblemPart,
    DeclaredWorkOfRange, GpuOperationColumns, KernelLaunchShape, ManagedPageFaultTable,
    OperationPlaceIndex, ProcessDeviceContextAndStream, SynchronisationTarget,
};
use crate::model::host::HostRangeStyle;
use crate::model::interned_names::InternedNameId;
use crate::model::quality::MissingAndImplausibleTraceData;
use crate::model::{Trace, TraceRecorder, TracedDevice};

const RECORDING_SCHEMA_NAME: &str = "kernelgate-recording";
/// Newest schema version of kernelgate recordings that this reader supports.
const NEWEST_RECORDING_SCHEMA_VERSION: u64 = 1;

/// Whether the first bytes of a file contain the schema name of kernelgate recordings.
pub(super) fn looks_like_kernelgate_recording(head: &[u8]) -> bool {
    head.windows(RECORDING_SCHEMA_NAME.len()).any(|part| part == RECORDING_SCHEMA_NAME.as_bytes())
}

/// Reads a trace from a recording of `kernelgate profile --out`.
///
/// # Errors
/// The file cannot be read, is truncated, or has a newer schema version.
pub(super) fn read_kernelgate_recording(path: &Path) -> Result<Trace, TraceError> {
    let file = File::open(path).map_err(TraceError::unreadable_file_error(path))?;
    let recording: RecordingJson = serde_json::from_reader(BufReader::with_capacity(1 << 18, file))
        .map_err(|error| {
            TraceError::broken_trace_file_error(path, format!("broken or cut short ({error})"))
        })?;
    if recording.schema != RECORDING_SCHEMA_NAME {
        return Err(TraceError::broken_trace_file_error(
            path,
            format!("it is of `{}`", recording.schema),
        ));
    }
    if recording.schema_version > NEWEST_RECORDING_SCHEMA_VERSION {
        return Err(TraceError::broken_trace_file_error(
            path,
            format!(
                "written by a newer kernelgate (schema {}, this one reads up to {NEWEST_RECORDING_SCHEMA_VERSION})",
                recording.schema_version
            ),
        ));
    }
    Ok(KernelgateRecordingReader::with_names_of_recording(&recording).read_all_activity(&recording))
}

/// The trace that is being built from a kernelgate recording.
struct KernelgateRecordingReader {
    builder: TraceBuilder,
    process: u32,
    names: Vec<InternedNameId>,
    unknown: InternedNameId,
}

impl KernelgateRecordingReader {
    fn with_names_of_recording(recording: &RecordingJson) -> Self {
        let mut builder = TraceBuilder::default();
        let pid = recording.trace.pid;
        let process = builder.index_of_process(u64::from(pid), i64::from(pid));
        let all = &mut builder.trace.names;
        let names = recording
            .trace
            .names
            .iter()
            .map(|text| all.intern_text(&demangle_kernel_name(text)))
            .collect();
        let unknown = all.intern_text("unknown");
        Self { builder, process, names, unknown }
    }

    fn read_all_activity(mut self, recording: &RecordingJson) -> Trace {
        let activity = &recording.trace;
        self.builder.trace.recorder = TraceRecorder::Cupti;
        self.add_devices_and_declared_work(recording);
        self.add_recorded_kernels(&activity.kernels);
        self.add_recorded_memory_activity(activity);
        self.add_recorded_calls_ranges_and_waits(activity);
        self.add_recorded_graph_nodes(&activity.graph_nodes);
        let quality = &mut self.builder.trace.quality;
        quality.dropped_records = activity.dropped;
        for &[start, end] in &activity.overhead {
            let span = plausible_start_and_end(quality, start, end);
            quality.profiler_overhead_spans.push(span);
        }
        self.builder.finish_trace()
    }

    fn add_devices_and_declared_work(&mut self, recording: &RecordingJson) {
        let trace = &mut self.builder.trace;
        let devices = std::iter::once(&recording.device).chain(&recording.other_devices);
        trace.devices.extend(devices.map(|device| TracedDevice {
            id: device.id,
            name: device.name.clone(),
            multiprocessors: device.multiprocessors,
            compute_capability: device.compute.map(|[major, minor]| (major, minor)),
            threads_per_sm: device.threads_per_sm,
            registers_per_sm: device.registers_per_sm,
            shared_per_sm: device.shared_per_sm,
            blocks_per_sm: device.blocks_per_sm,
            threads_per_warp: None,
        }));
        trace.metadata.insert("case".to_owned(), recording.case.clone());
        trace.metadata.insert("steps".to_owned(), recording.steps.to_string());
        let work = declared_operations_and_bytes_of_row(&recording.work);
        if !recording.limits.is_empty() || work != DeclaredOperationsAndBytes::default() {
            let limits = recording.limits.iter().map(|limit| (limit.by.clone(), limit.time_ns));
            // The case's declared work belongs to the NVTX range that encloses each launch of the
            // case.
            let path = format!("{}/step", recording.case);
            trace.declared_work.push(DeclaredWorkOfRange { path, limits: limits.collect(), work });
        }
        let parts = recording.parts.iter().map(|part| DeclaredProblemPart {
            label: part.label.clone(),
            range: part.range.clone(),
            work: declared_operations_and_bytes_of_row(&part.work),
        });
        trace
            .declared_parts
            .extend(parts.filter(|part| part.work != DeclaredOperationsAndBytes::default()));
    }

    fn trace_name_of_recorded_name(&mut self, index: u32) -> InternedNameId {
        let name = self.names.get(index as usize).copied();
        self.builder.trace.quality.odd_values += u64::from(name.is_none());
        name.unwrap_or(self.unknown)
    }

    fn place_of_recorded_operation(&mut self, on: On) -> OperationPlaceIndex {
        let On { device, context, stream } = on;
        let process = self.process;
        self.builder.index_of_operation_place(ProcessDeviceContextAndStream {
            process,
            device,
            context,
            stream: u64::from(stream),
        })
    }

    /// Appends a GPU operation to a table; returns `false` if the record's start and end are 0.
    fn push_recorded_operation(
        &mut self,
        operations: &mut GpuOperationColumns,
        (start, end): (u64, u64),
        on: On,
        correlation: u32,
    ) -> bool {
        if start == 0 && end == 0 {
            self.builder.trace.quality.without_times += 1;
            return false;
        }
        let (start, end) = plausible_start_and_end(&mut self.builder.trace.quality, start, end);
        operations.push_operation(start, end, self.place_of_recorded_operation(on), correlation);
        true
    }

    fn add_recorded_kernels(&mut self, rows: &[RecordedKernelRow]) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        for row in rows {
            let span = (row.start, row.end);
            if !self.push_recorded_operation(&mut kernels.on_gpu, span, row.on, row.correlation) {
                continue;
            }
            let name = self.trace_name_of_recorded_name(row.name);
            kernels.function.push_row(self.builder.index_of_kernel_function(name, name));
            kernels.shape.push_row(self.builder.index_of_launch_shape(KernelLaunchShape {
                grid: row.grid,
                block: row.block,
                registers: row.registers,
                static_shared: row.static_shared,
                dynamic_shared: row.dynamic_shared,
                local_bytes_per_thread: row.local,
            }));
            kernels.graph_node.push_row(row.graph_node);
        }
        self.builder.trace.kernels = kernels;
    }

    /// Adds the recorded copies, memsets, allocations and page faults to the trace.
    fn add_recorded_memory_activity(&mut self, activity: &RecordedActivityRows) {
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        for row in &activity.copies {
            let span = (row.start, row.end);
            if self.push_recorded_operation(&mut copies.on_gpu, span, row.on, row.correlation) {
                copies.bytes.push(row.bytes);
                let label =
                    COPY_DIRECTIONS.get(usize::from(row.kind)).unwrap_or(&COPY_DIRECTIONS[0]);
                copies.kind.push(self.builder.trace.names.intern_text(label));
                copies.source.push(memory_kind_from_cupti_number(row.source));
                copies.target.push(memory_kind_from_cupti_number(row.target));
            }
        }
        self.builder.trace.copies = copies;
        let mut sets = std::mem::take(&mut self.builder.trace.memsets);
        for row in &activity.sets {
            let span = (row.start, row.end);
            if self.push_recorded_operation(&mut sets.on_gpu, span, row.on, row.correlation) {
                sets.bytes.push(row.bytes);
            }
        }
        self.builder.trace.memsets = sets;
        let mut allocations = std::mem::take(&mut self.builder.trace.allocations);
        for row in &activity.allocations {
            let (place, bytes) =
                (self.place_of_recorded_operation(row.on), row.bytes.unsigned_abs());
            let time = plausible_time_or_zero(&mut self.builder.trace.quality, row.time);
            allocations.push_allocation_or_free(time, place, row.address, bytes, row.bytes < 0);
        }
        self.builder.trace.allocations = allocations;
        for row in &activity.page_faults {
            let trace = &mut self.builder.trace;
            let (start, end) =
                plausible_start_and_end(&mut trace.quality, row.start, row.end.max(row.start));
            trace.page_faults.start.push(start);
            trace.page_faults.end.push(end);
            trace.page_faults.process.push(self.process);
            trace
                .page_faults
                .device
                .push(row.device.unwrap_or(ManagedPageFaultTable::HOST_INSTEAD_OF_DEVICE));
            trace.page_faults.fault_count.push(row.count.unwrap_or(1));
        }
    }

    /// Calls, waits and ranges.
    fn add_recorded_calls_ranges_and_waits(&mut self, activity: &RecordedActivityRows) {
        for row in &activity.calls {
            let name = self.trace_name_of_recorded_name(row.name);
            let thread = self.builder.index_of_host_thread(self.process, i64::from(row.thread));
            let trace = &mut self.builder.trace;
            let (start, end) = plausible_start_and_end(&mut trace.quality, row.start, row.end);
            trace.calls.push_api_call(start, end, thread, name, row.correlation);
        }
        for row in &activity.ranges {
            let name = self.trace_name_of_recorded_name(row.name);
            let thread = self.builder.index_of_host_thread(self.process, i64::from(row.thread));
            let trace = &mut self.builder.trace;
            let (start, end) = plausible_start_and_end(&mut trace.quality, row.start, row.end);
            trace.ranges.push_host_range(start, end, thread, name, HostRangeStyle::PushPop);
        }
        // Recorded waits contain only a context, so the device is looked up from the kernels of
        // this context.
        let devices: HashMap<u32, u32> =
            activity.kernels.iter().map(|row| (row.on.context, row.on.device)).collect();
        let mut waits = std::mem::take(&mut self.builder.trace.synchronisation_waits);
        for row in &activity.waits {
            let device = devices.get(&row.on.context).copied().unwrap_or(row.on.device);
            let span = (row.start, row.end);
            if self.push_recorded_operation(
                &mut waits.on_gpu,
                span,
                On { device, ..row.on },
                row.correlation,
            ) {
                waits.kind.push(match row.kind {
                    1 => SynchronisationTarget::Event,
                    2 => SynchronisationTarget::StreamWaitsEvent,
                    3 => SynchronisationTarget::Stream,
                    4 => SynchronisationTarget::Context,
                    _ => SynchronisationTarget::Unknown,
                });
            }
        }
        self.builder.trace.synchronisation_waits = waits;
    }

    fn add_recorded_graph_nodes(&mut self, rows: &[RecordedGraphNodeRow]) {
        for row in rows {
            let ranges =
                row.ranges.iter().map(|&name| self.trace_name_of_recorded_name(name)).collect();
            self.builder.trace.graph_nodes.push(CudaGraphNodeWithRanges {
                process: self.process,
                id: row.id,
                ranges,
            });
        }
    }
}

fn declared_operations_and_bytes_of_row(row: &RecordedDeclaredWork) -> DeclaredOperationsAndBytes {
    let flops = row.flops.iter().map(|(unit, count)| (unit.clone(), *count));
    DeclaredOperationsAndBytes { flops: flops.collect(), bytes: row.read_bytes + row.write_bytes }
}

/// Returns a time in nanoseconds, or 0 if the time is implausible.
fn plausible_time_or_zero(quality: &mut MissingAndImplausibleTraceData, ns: u64) -> i64 {
    quality.plausible_time_or_count_as_odd(Some(i64::try_from(ns).unwrap_or(i64::MAX))).unwrap_or(0)
}

fn plausible_start_and_end(
    quality: &mut MissingAndImplausibleTraceData,
    start: u64,
    end: u64,
) -> (i64, i64) {
    let [start, end] = [start, end].map(|ns| plausible_time_or_zero(quality, ns));
    (start, quality.plausible_span_end_or_start(start, end))
}

/// Converts CUPTI's memory-kind number to a memory kind of the trace model.
fn memory_kind_from_cupti_number(kind: u8) -> CopiedMemoryKind {
    match kind {
        1 => CopiedMemoryKind::Pageable,
        2 => CopiedMemoryKind::Pinned,
        3 | 6 => CopiedMemoryKind::Device,
        4 => CopiedMemoryKind::Array,
        5 | 7 => CopiedMemoryKind::Managed,
        _ => CopiedMemoryKind::Unknown,
    }
}
