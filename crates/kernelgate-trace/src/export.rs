//! Writes a trace as Chrome trace JSON for Perfetto and chrome://tracing, with one track per host
//! thread and per stream, and arrows from launch calls to GPU operations. Viewers drop overlapping
//! spans on one track unless they nest, so overlapping GPU operations of one stream are placed on
//! additional tracks.
//!
//! kernelgate can read the exported file again and computes the same tables from it. The exported
//! file omits host waits, operating-system calls, allocations and counters.

use std::fmt::Write as _;
use std::io::{self, Write};

use crate::analyze::launches::{LaunchCallOfOperations, NO_LAUNCH_CALL};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::model::Trace;
use crate::model::gpu::CopiedMemoryKind;
use crate::model::host::HostRangeStyle;

/// Streams appear in the viewer under artificial process ids: this number plus the place index of
/// the device.
const FIRST_PROCESS_ID_OF_DEVICE_TRACKS: i64 = 1_000_000_000;

/// Writes a trace.
///
/// # Errors
/// Fails if writing to `out` fails.
pub fn write_perfetto_json(trace: &Trace, out: &mut impl Write) -> io::Result<()> {
    let mut events = TraceEventArrayWriter { out, is_before_first_event: true };
    write!(events.out, "{{\"schemaVersion\":1,\"deviceProperties\":[")?;
    for (index, device) in trace.devices.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(
            events.out,
            "{comma}{{\"id\":{},\"name\":{}",
            device.device_ordinal,
            quoted_json_string(&device.device_name)
        )?;
        if let Some(count) = device.multiprocessors {
            write!(events.out, ",\"numSms\":{count}")?;
        }
        write!(events.out, "}}")?;
    }
    write!(events.out, "],\"traceEvents\":[")?;
    let lanes = TracksOfOperationsInStreams::assign_operations_to_free_tracks(trace);
    write_process_and_thread_names(trace, &lanes, &mut events)?;
    write_host_calls_ranges_and_marks(trace, &mut events)?;
    write_gpu_operations_and_launch_arrows(trace, &lanes, &mut events)?;
    writeln!(events.out, "\n]}}")?;
    events.out.flush()
}

/// Writes the elements of the `traceEvents` array, with commas between them.
struct TraceEventArrayWriter<'a, W> {
    out: &'a mut W,
    is_before_first_event: bool,
}

impl<W: Write> TraceEventArrayWriter<'_, W> {
    /// Appends one event to the array; `event` is the text of the JSON object without its braces.
    fn append_event_object(&mut self, event: &str) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_before_first_event) { "" } else { "," };
        write!(self.out, "{comma}\n{{{event}}}")
    }
}

/// Quotes and escapes a text as a JSON string.
fn quoted_json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Converts nanoseconds to microseconds with exactly three decimals, without rounding.
fn nanoseconds_as_microseconds_text(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    format!("{sign}{}.{:03}", ns / 1000, ns % 1000)
}

/// Formats start and duration of a span as the JSON fields `"ts":…,"dur":…`, in microseconds.
fn start_and_duration_json_fields(start: i64, end: i64) -> String {
    format!(
        "\"ts\":{},\"dur\":{}",
        nanoseconds_as_microseconds_text(start),
        nanoseconds_as_microseconds_text(end - start)
    )
}

fn write_process_and_thread_names<W: Write>(
    trace: &Trace,
    lanes: &TracksOfOperationsInStreams,
    events: &mut TraceEventArrayWriter<'_, W>,
) -> io::Result<()> {
    let mut name = |kind: &str, pid: i64, tid: i64, name: &str| {
        let name = quoted_json_string(name);
        events.append_event_object(&format!(
            "\"ph\":\"M\",\"name\":\"{kind}\",\"pid\":{pid},\"tid\":{tid},\
             \"args\":{{\"name\":{name}}}"
        ))
    };
    for process in &trace.processes {
        if let Some(text) = process.process_name {
            name("process_name", process.pid, 0, trace.names.text_of_name(text))?;
        }
    }
    for thread in &trace.threads {
        if let Some(text) = thread.thread_name {
            let pid = trace.processes[thread.process_index as usize].pid;
            name("thread_name", pid, thread.tid, trace.names.text_of_name(text))?;
        }
    }
    for (index, place) in (0..).zip(&trace.places) {
        let process = trace.processes[place.process_index as usize].pid;
        let device = format!("GPU {} of process {process}", place.device);
        name(
            "process_name",
            FIRST_PROCESS_ID_OF_DEVICE_TRACKS + first_place_of_same_device(trace, index),
            0,
            &device,
        )?;
        for lane in 0..lanes.track_count_by_stream[index as usize].max(1) {
            let beside = if lane > 0 { format!(", concurrent {lane}") } else { String::new() };
            let stream = format!("stream {}{beside}", place.stream);
            let track = lanes.perfetto_thread_id(index, lane);
            name(
                "thread_name",
                FIRST_PROCESS_ID_OF_DEVICE_TRACKS + first_place_of_same_device(trace, index),
                track,
                &stream,
            )?;
        }
    }
    Ok(())
}

/// For each GPU operation, the number of its track within its stream.
struct TracksOfOperationsInStreams {
    track_of_operation: Vec<u32>,
    /// For each stream, the number of its viewer tracks.
    track_count_by_stream: Vec<u32>,
    /// For each stream, the total number of tracks of all streams with a smaller index.
    track_count_of_earlier_streams: Vec<u32>,
}

/// Maximum number of viewer tracks per stream; further overlapping operations use the track that
/// ends first.
const MAX_TRACKS_PER_STREAM: usize = 64;

/// Track ids of a stream's second and further viewer tracks start at this number.
const FIRST_ADDITIONAL_TRACK_ID: i64 = 1_000_000;

impl TracksOfOperationsInStreams {
    /// Assigns each GPU operation the first track of its stream that is free when the operation
    /// starts.
    fn assign_operations_to_free_tracks(trace: &Trace) -> TracksOfOperationsInStreams {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let mut order: Vec<GpuOperationId> = all.all_operation_ids().collect();
        let key =
            |&id: &GpuOperationId| (all.operation_start_ns(id), all.operation_end_exclusive_ns(id));
        if !order.is_sorted_by_key(key) {
            order.sort_by_key(key);
        }
        let mut ends: Vec<Vec<i64>> = vec![Vec::new(); trace.places.len()];
        let mut of_operation = vec![0; all.len()];
        for id in order {
            let ends = &mut ends[all.place_of_operation(id).0 as usize];
            let free = ends.iter().position(|&end| end <= all.operation_start_ns(id));
            let lane = free.unwrap_or_else(|| {
                if ends.len() < MAX_TRACKS_PER_STREAM {
                    ends.push(0);
                    return ends.len() - 1;
                }
                (0..ends.len()).min_by_key(|&lane| ends[lane]).unwrap_or(0)
            });
            ends[lane] = all.operation_end_exclusive_ns(id);
            of_operation[id as usize] = u32::try_from(lane).unwrap_or(u32::MAX);
        }
        let counts = ends.iter().map(|ends| u32::try_from(ends.len()).unwrap_or(u32::MAX));
        let counts: Vec<u32> = counts.collect();
        let before = counts.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count)));
        Self {
            track_count_of_earlier_streams: before.collect(),
            track_of_operation: of_operation,
            track_count_by_stream: counts,
        }
    }

    /// Returns the Perfetto thread id of a stream's viewer track.
    fn perfetto_thread_id(&self, place: u32, lane: u32) -> i64 {
        match lane {
            0 => i64::from(place),
            _ => {
                FIRST_ADDITIONAL_TRACK_ID
                    + i64::from(self.track_count_of_earlier_streams[place as usize])
                    + i64::from(lane)
            }
        }
    }
}

/// Returns the index of the first place with the same process and device as this place, so that
/// their streams share a viewer process.
fn first_place_of_same_device(trace: &Trace, place: u32) -> i64 {
    let device = |place: &crate::model::gpu::ProcessDeviceContextAndStream| {
        (place.process_index, place.device)
    };
    let own = device(&trace.places[place as usize]);
    let first = trace.places.iter().position(|place| device(place) == own);
    i64::try_from(first.unwrap_or(0)).unwrap_or(0)
}

fn write_host_calls_ranges_and_marks<W: Write>(
    trace: &Trace,
    events: &mut TraceEventArrayWriter<'_, W>,
) -> io::Result<()> {
    let track = |thread: u32| {
        let thread = &trace.threads[thread as usize];
        (trace.processes[thread.process_index as usize].pid, thread.tid)
    };
    let calls = &trace.calls;
    for row in 0..calls.call_count() {
        let (pid, tid) = track(calls.thread_index[row]);
        let name = quoted_json_string(trace.names.text_of_name(calls.function_name[row]));
        let times = start_and_duration_json_fields(calls.start_ns[row], calls.end_ns[row]);
        events.append_event_object(&format!(
            "\"ph\":\"X\",\"cat\":\"cuda_runtime\",\"name\":{name},\"pid\":{pid},\"tid\":{tid},\
             {times},\"args\":{{\"correlation\":{}}}",
            calls.correlation[row]
        ))?;
    }
    let ranges = &trace.ranges;
    for row in 0..ranges.range_count() {
        let (pid, tid) = track(ranges.thread_index[row]);
        let name = quoted_json_string(trace.names.text_of_name(ranges.range_name[row]));
        let (start, end) = (ranges.start_ns[row], ranges.end_ns[row]);
        match ranges.style[row] {
            HostRangeStyle::PushPop => events.append_event_object(&format!(
                "\"ph\":\"X\",\"cat\":\"user_annotation\",\"name\":{name},\"pid\":{pid},\
                 \"tid\":{tid},{}",
                start_and_duration_json_fields(start, end)
            ))?,
            // Start/end ranges may overlap without nesting, so they are written as asynchronous
            // events.
            HostRangeStyle::StartEnd => {
                for (phase, time) in [("b", start), ("e", end)] {
                    events.append_event_object(&format!(
                        "\"ph\":\"{phase}\",\"cat\":\"range\",\"id\":{row},\"name\":{name},\
                         \"pid\":{pid},\"tid\":{tid},\"ts\":{}",
                        nanoseconds_as_microseconds_text(time)
                    ))?;
                }
            }
        }
    }
    let marks = &trace.host_marks;
    for (row, &time) in marks.time_ns.iter().enumerate() {
        let (pid, tid) = track(marks.thread_index[row]);
        events.append_event_object(&format!(
            "\"ph\":\"i\",\"cat\":\"mark\",\"s\":\"t\",\"name\":{},\"pid\":{pid},\"tid\":{tid},\
             \"ts\":{}",
            quoted_json_string(trace.names.text_of_name(marks.mark_name[row])),
            nanoseconds_as_microseconds_text(time)
        ))?;
    }
    Ok(())
}

fn write_gpu_operations_and_launch_arrows<W: Write>(
    trace: &Trace,
    lanes: &TracksOfOperationsInStreams,
    events: &mut TraceEventArrayWriter<'_, W>,
) -> io::Result<()> {
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let launches = LaunchCallOfOperations::join_operations_with_host_calls(trace);
    let tracks: Vec<i64> = (0u32..)
        .take(trace.places.len())
        .map(|place| FIRST_PROCESS_ID_OF_DEVICE_TRACKS + first_place_of_same_device(trace, place))
        .collect();
    for id in all.all_operation_ids() {
        let place_id = all.place_of_operation(id);
        let place = &trace.places[place_id.0 as usize];
        let pid = tracks[place_id.0 as usize];
        let tid = lanes.perfetto_thread_id(place_id.0, lanes.track_of_operation[id as usize]);
        let (category, name, arguments) = operation_category_name_and_arguments(trace, &all, id);
        let process = trace.processes[place.process_index as usize].pid;
        events.append_event_object(&format!(
            "\"ph\":\"X\",\"cat\":\"{category}\",\"name\":{},\"pid\":{pid},\"tid\":{tid},{},\
             \"args\":{{\"process\":{process},\"device\":{},\"context\":{},\"stream\":{},\
             \"correlation\":{}{arguments}}}",
            quoted_json_string(&name),
            start_and_duration_json_fields(
                all.operation_start_ns(id),
                all.operation_end_exclusive_ns(id)
            ),
            place.device,
            place.context,
            place.stream,
            all.correlation_id_of_operation(id)
        ))?;
        let call = launches.call_index_of_operation[id as usize];
        if call == NO_LAUNCH_CALL {
            continue;
        }
        let thread = &trace.threads[trace.calls.thread_index[call as usize] as usize];
        let from = (
            trace.processes[thread.process_index as usize].pid,
            thread.tid,
            trace.calls.start_ns[call as usize],
        );
        let to = (pid, tid, all.operation_start_ns(id));
        for (phase, (pid, tid, time)) in [("\"s\"", from), ("\"f\",\"bp\":\"e\"", to)] {
            events.append_event_object(&format!(
                "\"ph\":{phase},\"cat\":\"ac2g\",\"name\":\"ac2g\",\"id\":{id},\"pid\":{pid},\
                 \"tid\":{tid},\"ts\":{}",
                nanoseconds_as_microseconds_text(time)
            ))?;
        }
    }
    Ok(())
}

/// Returns the event category, the name and the additional JSON arguments of a GPU operation.
fn operation_category_name_and_arguments(
    trace: &Trace,
    all: &AllGpuOperations<'_>,
    id: GpuOperationId,
) -> (&'static str, String, String) {
    let mut arguments = String::new();
    match all.kind_and_table_row(id) {
        (GpuOperationKind::Kernel, row) => {
            if let Some(shape) = trace.kernels.launch_shape_index.decoded_row(row) {
                let shape = &trace.shapes[shape as usize];
                let _ = write!(
                    arguments,
                    ",\"grid\":{:?},\"block\":{:?},\"registers per thread\":{},\
                     \"shared memory\":{}",
                    shape.grid,
                    shape.block,
                    shape.registers_per_thread,
                    shape.static_shared_bytes.saturating_add(shape.dynamic_shared_bytes)
                );
            }
            if let Some(node) = trace.kernels.graph_node.decoded_row(row).filter(|&node| node != 0)
            {
                let _ = write!(arguments, ",\"graph node id\":{node}");
            }
            ("kernel", trace.demangled_kernel_name(row).to_owned(), arguments)
        }
        (GpuOperationKind::Copy, row) => {
            let copies = &trace.copies;
            let _ = write!(arguments, ",\"bytes\":{}", copies.copied_bytes[row]);
            let direction = trace.names.text_of_name(copies.direction_label[row]);
            let short = match direction {
                "Host-to-Device" => "HtoD",
                "Device-to-Host" => "DtoH",
                "Device-to-Device" => "DtoD",
                "Host-to-Host" => "HtoH",
                "Peer-to-Peer" => "PtoP",
                other => other,
            };
            let memory = |kind: CopiedMemoryKind| match kind {
                CopiedMemoryKind::Unknown => "Unknown",
                CopiedMemoryKind::Pageable => "Pageable",
                CopiedMemoryKind::Pinned => "Pinned",
                CopiedMemoryKind::DeviceMemory => "Device",
                CopiedMemoryKind::CudaArray => "Array",
                CopiedMemoryKind::Managed => "Managed",
            };
            let (from, to) = (memory(copies.source_memory[row]), memory(copies.target_memory[row]));
            ("gpu_memcpy", format!("Memcpy {short} ({from} -> {to})"), arguments)
        }
        (GpuOperationKind::Memset, row) => {
            let _ = write!(arguments, ",\"bytes\":{}", trace.memsets.set_bytes[row]);
            ("gpu_memset", "Memset".to_owned(), arguments)
        }
        (GpuOperationKind::CudaGraphLaunch, row) => {
            let _ = write!(arguments, ",\"graph\":{}", trace.graphs.executable_graph_id[row]);
            ("gpu_graph", all.printed_operation_name(id), arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_text_keeps_single_nanoseconds() {
        assert_eq!(
            nanoseconds_as_microseconds_text(1_712_195_495_505_543_217),
            "1712195495505543.217"
        );
        assert_eq!(nanoseconds_as_microseconds_text(-1_005), "-1.005");
        assert_eq!(nanoseconds_as_microseconds_text(-5), "-0.005");
        assert_eq!(nanoseconds_as_microseconds_text(0), "0.000");
    }
}
