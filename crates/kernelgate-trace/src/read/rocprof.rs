//! Reads JSON of AMD's `rocprofv3 --output-format json`: kernels, copies, HIP, HSA and RCCL calls,
//! and markers.
//!
//! The reader ignores counters and instruction samples in rocprofv3's JSON.

use std::io::BufReader;
use std::path::Path;

use hashbrown::HashMap;
use serde::Deserialize;

use super::json_source;
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::{
    CopiedMemoryKind, GpuOperationColumns, KernelLaunchShape, ProcessDeviceContextAndStream,
};
use crate::model::host::HostRangeStyle;
use crate::model::{Trace, TraceRecorder, TracedDevice};

const ROCPROFV3_JSON_ROOT_KEY: &str = "rocprofiler-sdk-tool";

/// Whether the first bytes of a file contain the root key of rocprofv3's JSON.
pub(super) fn looks_like_rocprof(head: &[u8]) -> bool {
    head.windows(ROCPROFV3_JSON_ROOT_KEY.len())
        .any(|part| part == ROCPROFV3_JSON_ROOT_KEY.as_bytes())
}

#[derive(Deserialize)]
struct RocprofFile {
    #[serde(rename = "rocprofiler-sdk-tool")]
    processes: Vec<RocprofProcess>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofProcess {
    metadata: RocprofMetadata,
    agents: Vec<RocprofCpuOrGpuAgent>,
    strings: RocprofStrings,
    kernel_symbols: Vec<RocprofKernelSymbol>,
    buffer_records: RocprofRecordsByKind,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofMetadata {
    pid: i64,
}

#[derive(Deserialize, Default, Clone, Copy)]
#[serde(default)]
struct RocprofHandle {
    handle: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofCpuOrGpuAgent {
    id: RocprofHandle,
    /// Agent type: 1 is a CPU, 2 is a GPU.
    r#type: u32,
    name: String,
    product_name: String,
    /// Number of the agent among all agents of its type.
    logical_node_type_id: Option<u32>,
    cu_count: Option<u32>,
    max_waves_per_cu: Option<u32>,
    wave_front_size: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofStrings {
    /// Names of API functions and operations, by kind of record.
    buffer_records: Vec<RocprofOperationNamesOfKind>,
    /// Texts of markers, each with the correlation id of its record.
    marker_api: Vec<RocprofMarkerCorrelationAndText>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofOperationNamesOfKind {
    operations: Vec<String>,
}

#[derive(Deserialize)]
struct RocprofMarkerCorrelationAndText {
    key: u64,
    value: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofKernelSymbol {
    kernel_id: u64,
    formatted_kernel_name: String,
    demangled_kernel_name: String,
    kernel_name: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofRecordsByKind {
    kernel_dispatch: Vec<RocprofOperationOrCallRecord>,
    memory_copy: Vec<RocprofOperationOrCallRecord>,
    hip_api: Vec<RocprofOperationOrCallRecord>,
    hsa_api: Vec<RocprofOperationOrCallRecord>,
    rccl_api: Vec<RocprofOperationOrCallRecord>,
    marker_api: Vec<RocprofOperationOrCallRecord>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofOperationOrCallRecord {
    kind: usize,
    operation: usize,
    thread_id: i64,
    correlation_id: RocprofCorrelation,
    start_timestamp: u64,
    end_timestamp: u64,
    dispatch_info: RocprofKernelDispatchInfo,
    stream_id: RocprofHandle,
    dst_agent_id: RocprofHandle,
    src_agent_id: RocprofHandle,
    bytes: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofCorrelation {
    internal: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofKernelDispatchInfo {
    agent_id: RocprofHandle,
    queue_id: RocprofHandle,
    kernel_id: u64,
    group_segment_size: u32,
    private_segment_size: u32,
    workgroup_size: RocprofThreeDimensionalSize,
    /// Size of the grid in work items (threads), not in work groups.
    grid_size: RocprofThreeDimensionalSize,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofThreeDimensionalSize {
    x: u32,
    y: u32,
    z: u32,
}

impl RocprofThreeDimensionalSize {
    fn to_xyz_array(&self) -> [u32; 3] {
        [self.x, self.y, self.z]
    }
}

/// Reads a trace from rocprofv3's JSON.
///
/// # Errors
/// The file cannot be read, is invalid, or contains no kernel, copy or call.
pub(super) fn read_rocprofv3_json(path: &Path) -> Result<Trace, TraceError> {
    let source = json_source::open_plain_or_gzip_json(path)
        .map_err(TraceError::unreadable_file_error(path))?;
    let file: RocprofFile = serde_json::from_reader(BufReader::with_capacity(1 << 18, source))
        .map_err(|error| {
            TraceError::broken_trace_file_error(path, format!("JSON of rocprofv3: {error}"))
        })?;
    let mut builder = TraceBuilder::default();
    builder.trace.recorder = TraceRecorder::Rocprof;
    for process in &file.processes {
        RocprofProcessReader::for_process_records(process, &mut builder)
            .add_all_records_of_process();
    }
    let trace = builder.finish_trace();
    if trace.gpu_operation_count() == 0 && trace.calls.has_no_call() {
        let reason = "it holds no kernel, copy or call; record with: rocprofv3 --sys-trace \
                      --output-format json -- PROGRAM";
        return Err(TraceError::broken_trace_file_error(path, reason));
    }
    Ok(trace)
}

/// Adds the records of one process to the trace.
struct RocprofProcessReader<'a> {
    records: &'a RocprofProcess,
    builder: &'a mut TraceBuilder,
    process_index: u32,
    /// Device number of each GPU, by the handle of its agent.
    device_number_by_agent: HashMap<u64, u32>,
    kernel_name_by_id: HashMap<u64, &'a str>,
    marker_text_by_correlation: HashMap<u64, &'a str>,
}

impl<'a> RocprofProcessReader<'a> {
    fn for_process_records(records: &'a RocprofProcess, builder: &'a mut TraceBuilder) -> Self {
        let pid = records.metadata.pid;
        let process = builder.index_of_process(pid.cast_unsigned(), pid);
        let name = |symbol: &'a RocprofKernelSymbol| {
            let names =
                [&symbol.formatted_kernel_name, &symbol.demangled_kernel_name, &symbol.kernel_name];
            let name = names.into_iter().find(|name| !name.is_empty());
            (symbol.kernel_id, name.map_or("unknown kernel", |name| name.as_str()))
        };
        let mut reader = Self {
            records,
            builder,
            process_index: process,
            device_number_by_agent: HashMap::new(),
            kernel_name_by_id: records.kernel_symbols.iter().map(name).collect(),
            marker_text_by_correlation: records
                .strings
                .marker_api
                .iter()
                .map(|it| (it.key, it.value.as_str()))
                .collect(),
        };
        reader.add_gpu_agents_as_devices();
        reader
    }

    fn add_gpu_agents_as_devices(&mut self) {
        let gpus = self.records.agents.iter().filter(|agent| agent.r#type == 2);
        for (index, agent) in (0u32..).zip(gpus) {
            let id = agent.logical_node_type_id.unwrap_or(index);
            self.device_number_by_agent.insert(agent.id.handle, id);
            let same = |device: &TracedDevice| device.device_ordinal == id;
            if self.builder.trace.devices.iter().any(same) {
                continue;
            }
            let name =
                if agent.product_name.is_empty() { &agent.name } else { &agent.product_name };
            self.builder.trace.devices.push(TracedDevice {
                device_ordinal: id,
                device_name: name.clone(),
                multiprocessors: agent.cu_count,
                threads_per_warp: agent.wave_front_size,
                threads_per_sm: agent
                    .max_waves_per_cu
                    .zip(agent.wave_front_size)
                    .and_then(|(waves, threads)| waves.checked_mul(threads)),
                ..TracedDevice::default()
            });
        }
    }

    fn add_all_records_of_process(mut self) {
        let records = &self.records.buffer_records;
        self.add_kernel_dispatches(&records.kernel_dispatch);
        self.add_memory_copies(&records.memory_copy);
        for calls in [&records.hip_api, &records.hsa_api, &records.rccl_api] {
            self.add_host_api_calls(calls);
        }
        self.add_markers_as_ranges_or_marks(&records.marker_api);
    }

    /// Returns start and end of a record in nanoseconds; `None` if both are 0.
    fn start_and_end_of_record(
        &mut self,
        record: &RocprofOperationOrCallRecord,
    ) -> Option<(i64, i64)> {
        let quality = &mut self.builder.trace.quality;
        if record.start_timestamp == 0 && record.end_timestamp == 0 {
            quality.operations_without_times += 1;
            return None;
        }
        let [start, end] = [record.start_timestamp, record.end_timestamp].map(|ns| {
            quality.plausible_time_or_count_as_odd(Some(i64::try_from(ns).unwrap_or(i64::MAX)))
        });
        let start = start?;
        Some((start, quality.plausible_span_end_or_start(start, end.unwrap_or(start))))
    }

    fn push_gpu_operation(
        &mut self,
        operations: &mut GpuOperationColumns,
        record: &RocprofOperationOrCallRecord,
        agent: RocprofHandle,
    ) -> bool {
        let Some((start, end)) = self.start_and_end_of_record(record) else { return false };
        let stream = match record.stream_id.handle {
            0 => record.dispatch_info.queue_id.handle,
            stream => stream,
        };
        let device = self.device_number_by_agent.get(&agent.handle).copied().unwrap_or(0);
        let place = ProcessDeviceContextAndStream {
            process_index: self.process_index,
            device,
            context: 0,
            stream,
        };
        let place = self.builder.index_of_operation_place(place);
        let correlation = self.correlation_id_of_record(record);
        operations.push_operation(start, end, place, correlation);
        true
    }

    fn correlation_id_of_record(&mut self, record: &RocprofOperationOrCallRecord) -> u32 {
        let id = i64::try_from(record.correlation_id.internal).ok();
        self.builder.trace.quality.correlation_id_or_zero(id)
    }

    fn add_kernel_dispatches(&mut self, rows: &[RocprofOperationOrCallRecord]) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        for row in rows {
            let info = &row.dispatch_info;
            if !self.push_gpu_operation(&mut kernels.on_gpu, row, info.agent_id) {
                continue;
            }
            let name =
                self.kernel_name_by_id.get(&info.kernel_id).copied().unwrap_or("unknown kernel");
            let name = self.builder.trace.names.intern_text(name);
            kernels.function_index.push_row(self.builder.index_of_kernel_function(name, name));
            let (block, items) =
                (info.workgroup_size.to_xyz_array(), info.grid_size.to_xyz_array());
            kernels.launch_shape_index.push_row(self.builder.index_of_launch_shape(
                KernelLaunchShape {
                    grid: std::array::from_fn(|axis| items[axis].div_ceil(block[axis].max(1))),
                    block,
                    static_shared_bytes: info.group_segment_size,
                    local_bytes_per_thread: info.private_segment_size,
                    ..KernelLaunchShape::default()
                },
            ));
        }
        self.builder.trace.kernels = kernels;
    }

    fn add_memory_copies(&mut self, rows: &[RocprofOperationOrCallRecord]) {
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        for row in rows {
            let gpu =
                |handle: &RocprofHandle| self.device_number_by_agent.contains_key(&handle.handle);
            let (from, to) = (gpu(&row.src_agent_id), gpu(&row.dst_agent_id));
            let agent = if to { row.dst_agent_id } else { row.src_agent_id };
            if !self.push_gpu_operation(&mut copies.on_gpu, row, agent) {
                continue;
            }
            let label = match (from, to) {
                (false, true) => "Host-to-Device",
                (true, false) => "Device-to-Host",
                (true, true) => "Device-to-Device",
                (false, false) => "Host-to-Host",
            };
            copies.copied_bytes.push(row.bytes);
            copies.direction_label.push(self.builder.trace.names.intern_text(label));
            let memory =
                |gpu| if gpu { CopiedMemoryKind::DeviceMemory } else { CopiedMemoryKind::Unknown };
            copies.source_memory.push(memory(from));
            copies.target_memory.push(memory(to));
        }
        self.builder.trace.copies = copies;
    }

    fn operation_name_of_record(&self, record: &RocprofOperationOrCallRecord) -> &'a str {
        let kind = self.records.strings.buffer_records.get(record.kind);
        let name = kind.and_then(|kind| kind.operations.get(record.operation));
        name.map_or("unknown call", String::as_str)
    }

    fn add_host_api_calls(&mut self, rows: &[RocprofOperationOrCallRecord]) {
        for row in rows {
            let Some((start, end)) = self.start_and_end_of_record(row) else { continue };
            let thread = self.builder.index_of_host_thread(self.process_index, row.thread_id);
            let name = self.builder.trace.names.intern_text(self.operation_name_of_record(row));
            let correlation = self.correlation_id_of_record(row);
            self.builder.trace.calls.push_api_call(start, end, thread, name, correlation);
        }
    }

    fn add_markers_as_ranges_or_marks(&mut self, rows: &[RocprofOperationOrCallRecord]) {
        for row in rows {
            let Some((start, end)) = self.start_and_end_of_record(row) else { continue };
            let text = self.marker_text_by_correlation.get(&row.correlation_id.internal).copied();
            let thread = self.builder.index_of_host_thread(self.process_index, row.thread_id);
            let name = text.unwrap_or_else(|| self.operation_name_of_record(row));
            let trace = &mut self.builder.trace;
            let name = trace.names.intern_text(name);
            if start == end {
                trace.host_marks.time_ns.push(start);
                trace.host_marks.thread_index.push(thread);
                trace.host_marks.mark_name.push(name);
            } else {
                trace.ranges.push_host_range(start, end, thread, name, HostRangeStyle::PushPop);
            }
        }
    }
}
