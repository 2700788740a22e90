//! Reads recordings of `kernelgate profile --out`: the activity that CUPTI recorded in the measured
//! process, as JSON with one list per kind of record.

mod rows;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use hashbrown::HashMap;
use rows::{
    RecordedActivityRows, RecordedDeclaredWork, RecordedDeviceContextAndStream,
    RecordedGraphNodeRow, RecordedKernelRow, RecordingJson,
};

use super::demangle::demangle_kernel_name;
use super::trace_builder::{COPY_DIRECTIONS, TraceBuilder};
use crate::error::TraceError;
use crate::model::gpu::{
    CopiedMemoryKind, CudaGraphNodeWithRanges, DeclaredOperationsAndBytes, DeclaredProblemPart,
    DeclaredWorkOfRange, GpuOperationColumns, KernelLaunchShape, ManagedPageFaultTable,
    OperationStreamIndex, ProcessDeviceContextAndStream, SynchronisationTarget,
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
    if recording.schema_name != RECORDING_SCHEMA_NAME {
        return Err(TraceError::broken_trace_file_error(
            path,
            format!("it is of `{}`", recording.schema_name),
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
    process_index: u32,
    trace_name_by_recorded_index: Vec<InternedNameId>,
    unknown_name: InternedNameId,
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
        Self {
            builder,
            process_index: process,
            trace_name_by_recorded_index: names,
            unknown_name: unknown,
        }
    }

    fn read_all_activity(mut self, recording: &RecordingJson) -> Trace {
        let activity = &recording.trace;
        self.builder.trace.recorder = TraceRecorder::KernelgateCupti;
        self.add_devices_and_declared_work(recording);
        self.add_recorded_kernels(&activity.kernels);
        self.add_recorded_memory_activity(activity);
        self.add_recorded_calls_ranges_and_waits(activity);
        self.add_recorded_graph_nodes(&activity.graph_nodes);
        let quality = &mut self.builder.trace.quality;
        quality.dropped_records = activity.dropped_record_count;
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
            device_ordinal: device.device_ordinal,
            device_name: device.device_name.clone(),
            multiprocessors: device.multiprocessors,
            compute_capability: device.compute.map(|[major, minor]| (major, minor)),
            threads_per_sm: device.threads_per_sm,
            registers_per_sm: device.registers_per_sm,
            shared_bytes_per_sm: device.shared_bytes_per_sm,
            blocks_per_sm: device.blocks_per_sm,
            threads_per_warp: None,
        }));
        trace.metadata.insert("case".to_owned(), recording.case_id.clone());
        trace.metadata.insert("steps".to_owned(), recording.launch_count.to_string());
        let work = declared_operations_and_bytes_of_row(&recording.work);
        if !recording.limits.is_empty() || work != DeclaredOperationsAndBytes::default() {
            let limits = recording
                .limits
                .iter()
                .map(|limit| (limit.limiting_resource.clone(), limit.min_time_ns));
            // The case's declared work belongs to the NVTX range that encloses each launch of the
            // case.
            let path = format!("{}/step", recording.case_id);
            trace.declared_work.push(DeclaredWorkOfRange {
                range_path: path,
                min_ns_by_resource: limits.collect(),
                work,
            });
        }
        let parts = recording.parts.iter().map(|part| DeclaredProblemPart {
            part_name: part.part_name.clone(),
            range_path_suffix: part.range_path_suffix.clone(),
            work: declared_operations_and_bytes_of_row(&part.work),
        });
        trace
            .declared_parts
            .extend(parts.filter(|part| part.work != DeclaredOperationsAndBytes::default()));
    }

    fn trace_name_of_recorded_name(&mut self, index: u32) -> InternedNameId {
        let name = self.trace_name_by_recorded_index.get(index as usize).copied();
        self.builder.trace.quality.implausible_value_count += u64::from(name.is_none());
        name.unwrap_or(self.unknown_name)
    }

    fn place_of_recorded_operation(
        &mut self,
        on: RecordedDeviceContextAndStream,
    ) -> OperationStreamIndex {
        let RecordedDeviceContextAndStream { device, context, stream } = on;
        let process = self.process_index;
        self.builder.index_of_operation_place(ProcessDeviceContextAndStream {
            process_index: process,
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
        on: RecordedDeviceContextAndStream,
        correlation: u32,
    ) -> bool {
        if start == 0 && end == 0 {
            self.builder.trace.quality.operations_without_times += 1;
            return false;
        }
        let (start, end) = plausible_start_and_end(&mut self.builder.trace.quality, start, end);
        operations.push_operation(start, end, self.place_of_recorded_operation(on), correlation);
        true
    }

    fn add_recorded_kernels(&mut self, rows: &[RecordedKernelRow]) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        for row in rows {
            let span = (row.start_ns, row.end_ns);
            if !self.push_recorded_operation(&mut kernels.on_gpu, span, row.on, row.correlation) {
                continue;
            }
            let name = self.trace_name_of_recorded_name(row.name_index);
            kernels.function_index.push_row(self.builder.index_of_kernel_function(name, name));
            kernels.launch_shape_index.push_row(self.builder.index_of_launch_shape(
                KernelLaunchShape {
                    grid: row.grid,
                    block: row.block,
                    registers_per_thread: row.registers_per_thread,
                    static_shared_bytes: row.static_shared_bytes,
                    dynamic_shared_bytes: row.dynamic_shared_bytes,
                    local_bytes_per_thread: row.local_bytes_per_thread,
                },
            ));
            kernels.graph_node.push_row(row.graph_node);
        }
        self.builder.trace.kernels = kernels;
    }

    /// Adds the recorded copies, memsets, allocations and page faults to the trace.
    fn add_recorded_memory_activity(&mut self, activity: &RecordedActivityRows) {
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        for row in &activity.copies {
            let span = (row.start_ns, row.end_ns);
            if self.push_recorded_operation(&mut copies.on_gpu, span, row.on, row.correlation) {
                copies.copied_bytes.push(row.copied_bytes);
                let label = COPY_DIRECTIONS
                    .get(usize::from(row.cupti_copy_kind))
                    .unwrap_or(&COPY_DIRECTIONS[0]);
                copies.direction_label.push(self.builder.trace.names.intern_text(label));
                copies
                    .source_memory
                    .push(memory_kind_from_cupti_number(row.cupti_source_memory_kind));
                copies
                    .target_memory
                    .push(memory_kind_from_cupti_number(row.cupti_target_memory_kind));
            }
        }
        self.builder.trace.copies = copies;
        let mut sets = std::mem::take(&mut self.builder.trace.memsets);
        for row in &activity.memsets {
            let span = (row.start_ns, row.end_ns);
            if self.push_recorded_operation(&mut sets.on_gpu, span, row.on, row.correlation) {
                sets.set_bytes.push(row.set_bytes);
            }
        }
        self.builder.trace.memsets = sets;
        let mut allocations = std::mem::take(&mut self.builder.trace.allocations);
        for row in &activity.allocations {
            let (place, bytes) = (
                self.place_of_recorded_operation(row.on),
                row.bytes_negative_if_freed.unsigned_abs(),
            );
            let time = plausible_time_or_zero(&mut self.builder.trace.quality, row.time_ns);
            allocations.push_allocation_or_free(
                time,
                place,
                row.address,
                bytes,
                row.bytes_negative_if_freed < 0,
            );
        }
        self.builder.trace.allocations = allocations;
        for row in &activity.page_faults {
            let trace = &mut self.builder.trace;
            let (start, end) = plausible_start_and_end(
                &mut trace.quality,
                row.start_ns,
                row.end_ns.max(row.start_ns),
            );
            trace.page_faults.start_ns.push(start);
            trace.page_faults.end_ns.push(end);
            trace.page_faults.process_index.push(self.process_index);
            trace
                .page_faults
                .device
                .push(row.device.unwrap_or(ManagedPageFaultTable::HOST_INSTEAD_OF_DEVICE));
            trace.page_faults.fault_count.push(row.fault_count.unwrap_or(1));
        }
    }

    /// Adds the recorded API calls, ranges and waits to the trace.
    fn add_recorded_calls_ranges_and_waits(&mut self, activity: &RecordedActivityRows) {
        for row in &activity.calls {
            let name = self.trace_name_of_recorded_name(row.name_index);
            let thread =
                self.builder.index_of_host_thread(self.process_index, i64::from(row.thread_id));
            let trace = &mut self.builder.trace;
            let (start, end) =
                plausible_start_and_end(&mut trace.quality, row.start_ns, row.end_ns);
            trace.calls.push_api_call(start, end, thread, name, row.correlation);
        }
        for row in &activity.ranges {
            let name = self.trace_name_of_recorded_name(row.name_index);
            let thread =
                self.builder.index_of_host_thread(self.process_index, i64::from(row.thread_id));
            let trace = &mut self.builder.trace;
            let (start, end) =
                plausible_start_and_end(&mut trace.quality, row.start_ns, row.end_ns);
            trace.ranges.push_host_range(start, end, thread, name, HostRangeStyle::PushPop);
        }
        // Recorded waits contain only a context, so the device is looked up from the kernels of
        // this context.
        let devices: HashMap<u32, u32> =
            activity.kernels.iter().map(|row| (row.on.context, row.on.device)).collect();
        let mut waits = std::mem::take(&mut self.builder.trace.synchronisation_waits);
        for row in &activity.waits {
            let device = devices.get(&row.on.context).copied().unwrap_or(row.on.device);
            let span = (row.start_ns, row.end_ns);
            if self.push_recorded_operation(
                &mut waits.on_gpu,
                span,
                RecordedDeviceContextAndStream { device, ..row.on },
                row.correlation,
            ) {
                waits.kind.push(match row.cupti_synchronization_type {
                    1 => SynchronisationTarget::HostWaitsForEvent,
                    2 => SynchronisationTarget::StreamWaitsEvent,
                    3 => SynchronisationTarget::HostWaitsForStream,
                    4 => SynchronisationTarget::HostWaitsForContext,
                    _ => SynchronisationTarget::Unknown,
                });
            }
        }
        self.builder.trace.synchronisation_waits = waits;
    }

    fn add_recorded_graph_nodes(&mut self, rows: &[RecordedGraphNodeRow]) {
        for row in rows {
            let ranges = row
                .range_name_indices
                .iter()
                .map(|&name| self.trace_name_of_recorded_name(name))
                .collect();
            self.builder.trace.graph_nodes.push(CudaGraphNodeWithRanges {
                process_index: self.process_index,
                graph_node_id: row.graph_node_id,
                ranges_open_at_creation: ranges,
            });
        }
    }
}

fn declared_operations_and_bytes_of_row(row: &RecordedDeclaredWork) -> DeclaredOperationsAndBytes {
    let flops = row.flops_by_unit_and_dtype.iter().map(|(unit, count)| (unit.clone(), *count));
    DeclaredOperationsAndBytes {
        flops_by_unit_and_dtype: flops.collect(),
        min_device_memory_bytes: row.read_bytes + row.write_bytes,
    }
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
        3 | 6 => CopiedMemoryKind::DeviceMemory,
        4 => CopiedMemoryKind::CudaArray,
        5 | 7 => CopiedMemoryKind::Managed,
        _ => CopiedMemoryKind::Unknown,
    }
}
