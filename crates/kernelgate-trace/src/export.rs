//! A trace as Chrome's JSON, which Perfetto and chrome://tracing show: a track a thread, a track a
//! stream, arrows from each launch to its operations. Viewers drop spans of a track that overlap
//! without nesting, so operations of one stream that overlap get tracks of their own.
//!
//! The exported file can be read again, and gives the same tables. Absent: waits, calls of the
//! operating system, allocations and counters.

use std::fmt::Write as _;
use std::io::{self, Write};

use crate::analyze::launches::{NO_CALL, TraceLaunches};
use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::model::Trace;
use crate::model::gpu::MemoryKind;
use crate::model::host::RangeStyle;

/// Tracks of streams belong to a process of their own in the viewer: this, and the place.
const FIRST_STREAM_TRACK_PROCESS: i64 = 1_000_000_000;

/// Writes a trace.
///
/// # Errors
/// An error of writing.
pub fn write_perfetto(trace: &Trace, out: &mut impl Write) -> io::Result<()> {
    let mut events = JsonEventWriter { out, first: true };
    write!(events.out, "{{\"schemaVersion\":1,\"deviceProperties\":[")?;
    for (index, device) in trace.devices.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(events.out, "{comma}{{\"id\":{},\"name\":{}", device.id, json_string(&device.name))?;
        if let Some(count) = device.multiprocessors {
            write!(events.out, ",\"numSms\":{count}")?;
        }
        write!(events.out, "}}")?;
    }
    write!(events.out, "],\"traceEvents\":[")?;
    let lanes = StreamTracks::assign_tracks(trace);
    write_track_names(trace, &lanes, &mut events)?;
    write_host_events(trace, &mut events)?;
    write_gpu_events(trace, &lanes, &mut events)?;
    writeln!(events.out, "\n]}}")?;
    events.out.flush()
}

/// The array of events while it is written.
struct JsonEventWriter<'a, W> {
    out: &'a mut W,
    first: bool,
}

impl<W: Write> JsonEventWriter<'_, W> {
    /// Writes an event, given its text without brackets.
    fn add(&mut self, event: &str) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.first) { "" } else { "," };
        write!(self.out, "{comma}\n{{{event}}}")
    }
}

/// Formats a text as a JSON string.
fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Nanoseconds as microseconds with three decimals, exactly.
fn microseconds_text(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    format!("{sign}{}.{:03}", ns / 1000, ns % 1000)
}

/// `"ts":…,"dur":…` of a span.
fn span_fields(start: i64, end: i64) -> String {
    format!("\"ts\":{},\"dur\":{}", microseconds_text(start), microseconds_text(end - start))
}

fn write_track_names<W: Write>(
    trace: &Trace,
    lanes: &StreamTracks,
    events: &mut JsonEventWriter<'_, W>,
) -> io::Result<()> {
    let mut name = |kind: &str, pid: i64, tid: i64, name: &str| {
        let name = json_string(name);
        events.add(&format!(
            "\"ph\":\"M\",\"name\":\"{kind}\",\"pid\":{pid},\"tid\":{tid},\
             \"args\":{{\"name\":{name}}}"
        ))
    };
    for process in &trace.processes {
        if let Some(text) = process.name {
            name("process_name", process.pid, 0, trace.names.text(text))?;
        }
    }
    for thread in &trace.threads {
        if let Some(text) = thread.name {
            let pid = trace.processes[thread.process as usize].pid;
            name("thread_name", pid, thread.tid, trace.names.text(text))?;
        }
    }
    for (index, place) in (0..).zip(&trace.places) {
        let process = trace.processes[place.process as usize].pid;
        let device = format!("GPU {} of process {process}", place.device);
        name(
            "process_name",
            FIRST_STREAM_TRACK_PROCESS + track_of_device(trace, index),
            0,
            &device,
        )?;
        for lane in 0..lanes.counts[index as usize].max(1) {
            let beside = if lane > 0 { format!(", concurrent {lane}") } else { String::new() };
            let stream = format!("stream {}{beside}", place.stream);
            let track = lanes.track_number(index, lane);
            name(
                "thread_name",
                FIRST_STREAM_TRACK_PROCESS + track_of_device(trace, index),
                track,
                &stream,
            )?;
        }
    }
    Ok(())
}

/// Which of the tracks of its stream each operation is on.
struct StreamTracks {
    of_operation: Vec<u32>,
    /// Tracks of each place.
    counts: Vec<u32>,
    /// Number of tracks of all places before each place.
    before: Vec<u32>,
}

/// Tracks of a stream; what overlaps more than that shares the last to be free.
const MAX_TRACKS_PER_STREAM: usize = 64;

/// Number from which the additional tracks of a stream are counted.
const FIRST_ADDITIONAL_TRACK: i64 = 1_000_000;

impl StreamTracks {
    /// Puts each operation on the first track of its stream that is free when it starts.
    fn assign_tracks(trace: &Trace) -> StreamTracks {
        let all = AllOperations::new(trace);
        let mut order: Vec<OperationId> = all.ids().collect();
        let key = |&id: &OperationId| (all.start(id), all.end(id));
        if !order.is_sorted_by_key(key) {
            order.sort_by_key(key);
        }
        let mut ends: Vec<Vec<i64>> = vec![Vec::new(); trace.places.len()];
        let mut of_operation = vec![0; all.len()];
        for id in order {
            let ends = &mut ends[all.place(id).0 as usize];
            let free = ends.iter().position(|&end| end <= all.start(id));
            let lane = free.unwrap_or_else(|| {
                if ends.len() < MAX_TRACKS_PER_STREAM {
                    ends.push(0);
                    return ends.len() - 1;
                }
                (0..ends.len()).min_by_key(|&lane| ends[lane]).unwrap_or(0)
            });
            ends[lane] = all.end(id);
            of_operation[id as usize] = u32::try_from(lane).unwrap_or(u32::MAX);
        }
        let counts = ends.iter().map(|ends| u32::try_from(ends.len()).unwrap_or(u32::MAX));
        let counts: Vec<u32> = counts.collect();
        let before = counts.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count)));
        Self { before: before.collect(), of_operation, counts }
    }

    /// Number of a track in the Perfetto viewer.
    fn track_number(&self, place: u32, lane: u32) -> i64 {
        match lane {
            0 => i64::from(place),
            _ => FIRST_ADDITIONAL_TRACK + i64::from(self.before[place as usize]) + i64::from(lane),
        }
    }
}

/// The number of the first place with the same process and device.
fn track_of_device(trace: &Trace, place: u32) -> i64 {
    let device = |place: &crate::model::gpu::OperationPlace| (place.process, place.device);
    let own = device(&trace.places[place as usize]);
    let first = trace.places.iter().position(|place| device(place) == own);
    i64::try_from(first.unwrap_or(0)).unwrap_or(0)
}

fn write_host_events<W: Write>(
    trace: &Trace,
    events: &mut JsonEventWriter<'_, W>,
) -> io::Result<()> {
    let track = |thread: u32| {
        let thread = &trace.threads[thread as usize];
        (trace.processes[thread.process as usize].pid, thread.tid)
    };
    let calls = &trace.calls;
    for row in 0..calls.len() {
        let (pid, tid) = track(calls.thread[row]);
        let name = json_string(trace.names.text(calls.name[row]));
        let times = span_fields(calls.start[row], calls.end[row]);
        events.add(&format!(
            "\"ph\":\"X\",\"cat\":\"cuda_runtime\",\"name\":{name},\"pid\":{pid},\"tid\":{tid},\
             {times},\"args\":{{\"correlation\":{}}}",
            calls.correlation[row]
        ))?;
    }
    let ranges = &trace.ranges;
    for row in 0..ranges.len() {
        let (pid, tid) = track(ranges.thread[row]);
        let name = json_string(trace.names.text(ranges.name[row]));
        let (start, end) = (ranges.start[row], ranges.end[row]);
        match ranges.style[row] {
            RangeStyle::PushPop => events.add(&format!(
                "\"ph\":\"X\",\"cat\":\"user_annotation\",\"name\":{name},\"pid\":{pid},\
                 \"tid\":{tid},{}",
                span_fields(start, end)
            ))?,
            // Ranges that overlap cannot stand on one track.
            RangeStyle::StartEnd => {
                for (phase, time) in [("b", start), ("e", end)] {
                    events.add(&format!(
                        "\"ph\":\"{phase}\",\"cat\":\"range\",\"id\":{row},\"name\":{name},\
                         \"pid\":{pid},\"tid\":{tid},\"ts\":{}",
                        microseconds_text(time)
                    ))?;
                }
            }
        }
    }
    let marks = &trace.marks;
    for (row, &time) in marks.time.iter().enumerate() {
        let (pid, tid) = track(marks.thread[row]);
        events.add(&format!(
            "\"ph\":\"i\",\"cat\":\"mark\",\"s\":\"t\",\"name\":{},\"pid\":{pid},\"tid\":{tid},\
             \"ts\":{}",
            json_string(trace.names.text(marks.name[row])),
            microseconds_text(time)
        ))?;
    }
    Ok(())
}

fn write_gpu_events<W: Write>(
    trace: &Trace,
    lanes: &StreamTracks,
    events: &mut JsonEventWriter<'_, W>,
) -> io::Result<()> {
    let all = AllOperations::new(trace);
    let launches = TraceLaunches::join_operations_with_calls(trace);
    let tracks: Vec<i64> = (0u32..)
        .take(trace.places.len())
        .map(|place| FIRST_STREAM_TRACK_PROCESS + track_of_device(trace, place))
        .collect();
    for id in all.ids() {
        let place_id = all.place(id);
        let place = &trace.places[place_id.0 as usize];
        let pid = tracks[place_id.0 as usize];
        let tid = lanes.track_number(place_id.0, lanes.of_operation[id as usize]);
        let (category, name, arguments) = operation_fields(trace, &all, id);
        let process = trace.processes[place.process as usize].pid;
        events.add(&format!(
            "\"ph\":\"X\",\"cat\":\"{category}\",\"name\":{},\"pid\":{pid},\"tid\":{tid},{},\
             \"args\":{{\"process\":{process},\"device\":{},\"context\":{},\"stream\":{},\
             \"correlation\":{}{arguments}}}",
            json_string(&name),
            span_fields(all.start(id), all.end(id)),
            place.device,
            place.context,
            place.stream,
            all.correlation(id)
        ))?;
        let call = launches.call_of[id as usize];
        if call == NO_CALL {
            continue;
        }
        let thread = &trace.threads[trace.calls.thread[call as usize] as usize];
        let from = (
            trace.processes[thread.process as usize].pid,
            thread.tid,
            trace.calls.start[call as usize],
        );
        let to = (pid, tid, all.start(id));
        for (phase, (pid, tid, time)) in [("\"s\"", from), ("\"f\",\"bp\":\"e\"", to)] {
            events.add(&format!(
                "\"ph\":{phase},\"cat\":\"ac2g\",\"name\":\"ac2g\",\"id\":{id},\"pid\":{pid},\
                 \"tid\":{tid},\"ts\":{}",
                microseconds_text(time)
            ))?;
        }
    }
    Ok(())
}

/// Category, name and further arguments of an operation.
fn operation_fields(
    trace: &Trace,
    all: &AllOperations<'_>,
    id: OperationId,
) -> (&'static str, String, String) {
    let mut arguments = String::new();
    match all.kind_and_row(id) {
        (OperationKind::Kernel, row) => {
            if let Some(shape) = trace.kernels.shape.get(row) {
                let shape = &trace.shapes[shape as usize];
                let _ = write!(
                    arguments,
                    ",\"grid\":{:?},\"block\":{:?},\"registers per thread\":{},\
                     \"shared memory\":{}",
                    shape.grid,
                    shape.block,
                    shape.registers,
                    shape.static_shared.saturating_add(shape.dynamic_shared)
                );
            }
            if let Some(node) = trace.kernels.graph_node.get(row).filter(|&node| node != 0) {
                let _ = write!(arguments, ",\"graph node id\":{node}");
            }
            ("kernel", trace.kernel_name(row).to_owned(), arguments)
        }
        (OperationKind::Copy, row) => {
            let copies = &trace.copies;
            let _ = write!(arguments, ",\"bytes\":{}", copies.bytes[row]);
            let direction = trace.names.text(copies.kind[row]);
            let short = match direction {
                "Host-to-Device" => "HtoD",
                "Device-to-Host" => "DtoH",
                "Device-to-Device" => "DtoD",
                "Host-to-Host" => "HtoH",
                "Peer-to-Peer" => "PtoP",
                other => other,
            };
            let memory = |kind: MemoryKind| match kind {
                MemoryKind::Unknown => "Unknown",
                MemoryKind::Pageable => "Pageable",
                MemoryKind::Pinned => "Pinned",
                MemoryKind::Device => "Device",
                MemoryKind::Array => "Array",
                MemoryKind::Managed => "Managed",
            };
            let (from, to) = (memory(copies.source[row]), memory(copies.target[row]));
            ("gpu_memcpy", format!("Memcpy {short} ({from} -> {to})"), arguments)
        }
        (OperationKind::Set, row) => {
            let _ = write!(arguments, ",\"bytes\":{}", trace.sets.bytes[row]);
            ("gpu_memset", "Memset".to_owned(), arguments)
        }
        (OperationKind::Graph, row) => {
            let _ = write!(arguments, ",\"graph\":{}", trace.graphs.executable[row]);
            ("gpu_graph", all.name(id), arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_trace_keep_single_nanoseconds() {
        assert_eq!(microseconds_text(1_712_195_495_505_543_217), "1712195495505543.217");
        assert_eq!(microseconds_text(-1_005), "-1.005");
        assert_eq!(microseconds_text(-5), "-0.005");
        assert_eq!(microseconds_text(0), "0.000");
    }
}
