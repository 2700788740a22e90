//! JSON of AMD's `rocprofv3 --output-format json`: kernels, copies, HIP and HSA calls, markers.
//!
//! Counters and instruction samples of rocprof are not read.

use std::io::BufReader;
use std::path::Path;

use hashbrown::HashMap;
use serde::Deserialize;

use super::json_source;
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::{LaunchShape, MemoryKind, OperationColumns, OperationPlace};
use crate::model::host::RangeStyle;
use crate::model::{Trace, TraceRecorder, TracedDevice};

const ROCPROF_ROOT_KEY: &str = "rocprofiler-sdk-tool";

/// Returns whether a text begins like a file of rocprofv3.
pub(super) fn looks_like_rocprof(head: &[u8]) -> bool {
    head.windows(ROCPROF_ROOT_KEY.len()).any(|part| part == ROCPROF_ROOT_KEY.as_bytes())
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
    agents: Vec<RocprofAgent>,
    strings: RocprofStrings,
    kernel_symbols: Vec<RocprofKernelSymbol>,
    buffer_records: RocprofBufferRecords,
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
struct RocprofAgent {
    id: RocprofHandle,
    /// Kind of the agent: 1 is a CPU, 2 a GPU.
    r#type: u32,
    name: String,
    product_name: String,
    /// Number of the agent among agents of its type.
    logical_node_type_id: Option<u32>,
    cu_count: Option<u32>,
    max_waves_per_cu: Option<u32>,
    wave_front_size: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofStrings {
    /// Names of operations by kind of record.
    buffer_records: Vec<RocprofKindNames>,
    /// Texts of markers by their correlation id.
    marker_api: Vec<RocprofMarkerText>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofKindNames {
    operations: Vec<String>,
}

#[derive(Deserialize)]
struct RocprofMarkerText {
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
struct RocprofBufferRecords {
    kernel_dispatch: Vec<RocprofRecord>,
    memory_copy: Vec<RocprofRecord>,
    hip_api: Vec<RocprofRecord>,
    hsa_api: Vec<RocprofRecord>,
    rccl_api: Vec<RocprofRecord>,
    marker_api: Vec<RocprofRecord>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofRecord {
    kind: usize,
    operation: usize,
    thread_id: i64,
    correlation_id: RocprofCorrelation,
    start_timestamp: u64,
    end_timestamp: u64,
    dispatch_info: RocprofDispatch,
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
struct RocprofDispatch {
    agent_id: RocprofHandle,
    queue_id: RocprofHandle,
    kernel_id: u64,
    group_segment_size: u32,
    private_segment_size: u32,
    workgroup_size: RocprofSize,
    /// Size of the grid in work items, not in work groups.
    grid_size: RocprofSize,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RocprofSize {
    x: u32,
    y: u32,
    z: u32,
}

impl RocprofSize {
    fn to_array(&self) -> [u32; 3] {
        [self.x, self.y, self.z]
    }
}

/// Reads a file.
///
/// # Errors
/// The file cannot be read, is broken, or holds no record.
pub(super) fn read_rocprof_json(path: &Path) -> Result<Trace, TraceError> {
    let source = json_source::open_json(path).map_err(TraceError::io(path))?;
    let file: RocprofFile = serde_json::from_reader(BufReader::with_capacity(1 << 18, source))
        .map_err(|error| TraceError::broken_file(path, format!("JSON of rocprofv3: {error}")))?;
    let mut builder = TraceBuilder::default();
    builder.trace.recorder = TraceRecorder::Rocprof;
    for process in &file.processes {
        RocprofReader::new(process, &mut builder).read_all_records();
    }
    let trace = builder.finish_trace();
    if trace.operation_count() == 0 && trace.calls.is_empty() {
        let reason = "it holds no kernel, copy or call; record with: rocprofv3 --sys-trace \
                      --output-format json -- PROGRAM";
        return Err(TraceError::broken_file(path, reason));
    }
    Ok(trace)
}

/// The records of a process while they are read.
struct RocprofReader<'a> {
    records: &'a RocprofProcess,
    builder: &'a mut TraceBuilder,
    process: u32,
    /// Numbers of GPUs by the handle of their agent.
    devices: HashMap<u64, u32>,
    kernels: HashMap<u64, &'a str>,
    markers: HashMap<u64, &'a str>,
}

impl<'a> RocprofReader<'a> {
    fn new(records: &'a RocprofProcess, builder: &'a mut TraceBuilder) -> Self {
        let pid = records.metadata.pid;
        let process = builder.process_of_key(pid.cast_unsigned(), pid);
        let name = |symbol: &'a RocprofKernelSymbol| {
            let names =
                [&symbol.formatted_kernel_name, &symbol.demangled_kernel_name, &symbol.kernel_name];
            let name = names.into_iter().find(|name| !name.is_empty());
            (symbol.kernel_id, name.map_or("unknown kernel", |name| name.as_str()))
        };
        let mut reader = Self {
            records,
            builder,
            process,
            devices: HashMap::new(),
            kernels: records.kernel_symbols.iter().map(name).collect(),
            markers: records
                .strings
                .marker_api
                .iter()
                .map(|it| (it.key, it.value.as_str()))
                .collect(),
        };
        reader.add_gpu_agents();
        reader
    }

    fn add_gpu_agents(&mut self) {
        let gpus = self.records.agents.iter().filter(|agent| agent.r#type == 2);
        for (index, agent) in (0u32..).zip(gpus) {
            let id = agent.logical_node_type_id.unwrap_or(index);
            self.devices.insert(agent.id.handle, id);
            let same = |device: &TracedDevice| device.id == id;
            if self.builder.trace.devices.iter().any(same) {
                continue;
            }
            let name =
                if agent.product_name.is_empty() { &agent.name } else { &agent.product_name };
            self.builder.trace.devices.push(TracedDevice {
                id,
                name: name.clone(),
                multiprocessors: agent.cu_count,
                warp: agent.wave_front_size,
                threads_per_sm: agent
                    .max_waves_per_cu
                    .zip(agent.wave_front_size)
                    .and_then(|(waves, threads)| waves.checked_mul(threads)),
                ..TracedDevice::default()
            });
        }
    }

    fn read_all_records(mut self) {
        let records = &self.records.buffer_records;
        self.add_dispatches(&records.kernel_dispatch);
        self.add_copies(&records.memory_copy);
        for calls in [&records.hip_api, &records.hsa_api, &records.rccl_api] {
            self.add_host_calls(calls);
        }
        self.add_ranges(&records.marker_api);
    }

    /// The times of a record; `None` if the record has no times.
    fn record_times(&mut self, record: &RocprofRecord) -> Option<(i64, i64)> {
        let quality = &mut self.builder.trace.quality;
        if record.start_timestamp == 0 && record.end_timestamp == 0 {
            quality.without_times += 1;
            return None;
        }
        let [start, end] = [record.start_timestamp, record.end_timestamp]
            .map(|ns| quality.time(Some(i64::try_from(ns).unwrap_or(i64::MAX))));
        let start = start?;
        Some((start, quality.plausible_span_end(start, end.unwrap_or(start))))
    }

    fn push(
        &mut self,
        operations: &mut OperationColumns,
        record: &RocprofRecord,
        agent: RocprofHandle,
    ) -> bool {
        let Some((start, end)) = self.record_times(record) else { return false };
        let stream = match record.stream_id.handle {
            0 => record.dispatch_info.queue_id.handle,
            stream => stream,
        };
        let device = self.devices.get(&agent.handle).copied().unwrap_or(0);
        let place = OperationPlace { process: self.process, device, context: 0, stream };
        let place = self.builder.place(place);
        let correlation = self.correlation_of_record(record);
        operations.push(start, end, place, correlation);
        true
    }

    fn correlation_of_record(&mut self, record: &RocprofRecord) -> u32 {
        let id = i64::try_from(record.correlation_id.internal).ok();
        self.builder.trace.quality.correlation(id)
    }

    fn add_dispatches(&mut self, rows: &[RocprofRecord]) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        for row in rows {
            let info = &row.dispatch_info;
            if !self.push(&mut kernels.on_gpu, row, info.agent_id) {
                continue;
            }
            let name = self.kernels.get(&info.kernel_id).copied().unwrap_or("unknown kernel");
            let name = self.builder.trace.names.intern_text(name);
            kernels.function.push(self.builder.function(name, name));
            let (block, items) = (info.workgroup_size.to_array(), info.grid_size.to_array());
            kernels.shape.push(self.builder.shape(LaunchShape {
                grid: std::array::from_fn(|axis| items[axis].div_ceil(block[axis].max(1))),
                block,
                static_shared: info.group_segment_size,
                local: info.private_segment_size,
                ..LaunchShape::default()
            }));
        }
        self.builder.trace.kernels = kernels;
    }

    fn add_copies(&mut self, rows: &[RocprofRecord]) {
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        for row in rows {
            let gpu = |handle: &RocprofHandle| self.devices.contains_key(&handle.handle);
            let (from, to) = (gpu(&row.src_agent_id), gpu(&row.dst_agent_id));
            let agent = if to { row.dst_agent_id } else { row.src_agent_id };
            if !self.push(&mut copies.on_gpu, row, agent) {
                continue;
            }
            let label = match (from, to) {
                (false, true) => "Host-to-Device",
                (true, false) => "Device-to-Host",
                (true, true) => "Device-to-Device",
                (false, false) => "Host-to-Host",
            };
            copies.bytes.push(row.bytes);
            copies.kind.push(self.builder.trace.names.intern_text(label));
            let memory = |gpu| if gpu { MemoryKind::Device } else { MemoryKind::Unknown };
            copies.source.push(memory(from));
            copies.target.push(memory(to));
        }
        self.builder.trace.copies = copies;
    }

    fn name_of_operation(&self, record: &RocprofRecord) -> &'a str {
        let kind = self.records.strings.buffer_records.get(record.kind);
        let name = kind.and_then(|kind| kind.operations.get(record.operation));
        name.map_or("unknown call", String::as_str)
    }

    fn add_host_calls(&mut self, rows: &[RocprofRecord]) {
        for row in rows {
            let Some((start, end)) = self.record_times(row) else { continue };
            let thread = self.builder.thread_of_tid(self.process, row.thread_id);
            let name = self.builder.trace.names.intern_text(self.name_of_operation(row));
            let correlation = self.correlation_of_record(row);
            self.builder.trace.calls.push(start, end, thread, name, correlation);
        }
    }

    fn add_ranges(&mut self, rows: &[RocprofRecord]) {
        for row in rows {
            let Some((start, end)) = self.record_times(row) else { continue };
            let text = self.markers.get(&row.correlation_id.internal).copied();
            let thread = self.builder.thread_of_tid(self.process, row.thread_id);
            let name = text.unwrap_or_else(|| self.name_of_operation(row));
            let trace = &mut self.builder.trace;
            let name = trace.names.intern_text(name);
            if start == end {
                trace.marks.time.push(start);
                trace.marks.thread.push(thread);
                trace.marks.name.push(name);
            } else {
                trace.ranges.push(start, end, thread, name, RangeStyle::PushPop);
            }
        }
    }
}
