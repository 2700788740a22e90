//! Reads Chrome's trace format, as PyTorch's profiler (Kineto) writes it, also compressed by gzip.
//!
//! Events are read one by one, so that the file need not fit into memory. An event of another shape
//! than expected is counted and skipped. Absent: Python functions, flow arrows (operations and
//! calls are joined by their correlation ids), counters.

mod collective;
mod copies;
mod event;
mod json_events;
mod lanes;
mod xla;

use std::path::Path;

use event::{ChromeEvent, EventArguments, as_integer, dimensions, exact_nanoseconds, text};
use hashbrown::HashMap;
use json_events::ChromePart;
use lanes::FIRST_LANE_PROCESS;
use serde_json::value::RawValue;

use super::json_source;
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::{LaunchShape, OperationColumns, OperationPlace, SynchronisationKind};
use crate::model::host::{OperatorInputs, RangeStyle};
use crate::model::{InternedValues, Trace, TraceRecorder, TracedDevice};

/// Reads a file.
///
/// # Errors
/// The file cannot be read, or holds no event of a trace.
pub(super) fn read_chrome_trace(path: &Path) -> Result<Trace, TraceError> {
    let source = json_source::open_json(path).map_err(TraceError::io(path))?;
    let mut reader = ChromeReader::default();
    reader.builder.trace.recorder = TraceRecorder::Chrome;
    let contents = json_events::read_document(source, |part| reader.read_part(&part));
    if let Some(error) = &contents.error {
        let reason = format!("JSON after {} events: {error}", reader.events);
        if reader.events == 0 {
            return Err(TraceError::broken_file(path, reason));
        }
        reader.builder.trace.quality.unreadable.push(reason);
    }
    if reader.events == 0 {
        let reason = match (contents.has_events, reader.others) {
            (true, 0) => "the trace has no events: `traceEvents` is empty",
            _ => "JSON without `traceEvents`, or whose elements are not events of a trace",
        };
        return Err(TraceError::Unknown { path: path.to_owned(), reason: reason.to_owned() });
    }
    let quality = &mut reader.builder.trace.quality;
    quality.broken_events = contents.broken;
    quality.invalid_texts = contents.invalid;
    Ok(reader.finish_trace())
}

#[derive(Default)]
struct ChromeReader {
    builder: TraceBuilder,
    /// Events of any kind.
    events: u64,
    /// Elements between the events that are not events.
    others: u64,
    /// Open `B` events by process and thread: range start and name.
    open: HashMap<u32, Vec<(i64, String)>>,
    /// Open `b` events, which end anywhere, by id: range start, thread and name.
    open_by_id: HashMap<(String, i64), (i64, u32, String)>,
    /// The process id field of GPU operations, which is the number of a device.
    lanes: InternedValues<i64>,
    /// CUDA calls by process: GPU work without launch calls is attributed to the process with the
    /// most launches.
    calls: HashMap<u32, u64>,
    /// Devices and streams, where XLA wrote the trace.
    xla: xla::XlaLines,
}

impl ChromeReader {
    fn read_part(&mut self, part: &ChromePart<'_>) {
        match part {
            ChromePart::Field("deviceProperties", value) => self.read_devices(value),
            ChromePart::Field(key, value) => {
                let text = serde_json::from_str(value).unwrap_or_else(|_| (*value).to_owned());
                self.builder.trace.metadata.insert((*key).to_owned(), text);
            }
            // Any JSON object can be read as an event, but events of a trace have a phase.
            ChromePart::Event(event) if event.ph.is_empty() => {
                self.others += 1;
                self.builder.trace.quality.odd_values += 1;
            }
            ChromePart::Event(event) => {
                self.events += 1;
                self.read_event(event);
            }
            ChromePart::Other => {
                self.others += 1;
                self.builder.trace.quality.odd_values += 1;
            }
        }
    }

    fn read_devices(&mut self, value: &str) {
        let Ok(devices) = serde_json::from_str::<Vec<serde_json::Value>>(value) else {
            self.builder.trace.quality.odd_values += 1;
            return;
        };
        for device in devices {
            let number =
                |key: &str| device[key].as_u64().and_then(|value| u32::try_from(value).ok());
            self.builder.trace.devices.push(TracedDevice {
                id: number("id").unwrap_or(0),
                name: device["name"].as_str().unwrap_or_default().to_owned(),
                multiprocessors: number("numSms"),
                compute: number("computeMajor").zip(number("computeMinor")),
                threads_per_sm: number("maxThreadsPerMultiprocessor"),
                registers_per_sm: number("regsPerMultiprocessor"),
                // The second field name is used by ROCm.
                shared_per_sm: number("sharedMemPerMultiprocessor")
                    .or_else(|| number("maxSharedMemoryPerMultiProcessor")),
                blocks_per_sm: None,
                warp: number("warpSize"),
            });
        }
    }

    fn read_event(&mut self, event: &ChromeEvent<'_>) {
        match event.ph.as_ref() {
            "X" => self.add_span(event),
            "M" => self.name(event),
            "B" | "E" => self.add_range_bracket(event),
            "b" | "e" => self.add_range_bracket_by_id(event),
            "i" | "I" if event.name == "[memory]" => self.add_allocation(event),
            _ => {}
        }
    }

    /// Memory that PyTorch's allocator hands out or takes back, where it was profiled.
    fn add_allocation(&mut self, event: &ChromeEvent<'_>) {
        let arguments = EventArguments::new(event);
        if as_integer(arguments.device_type) != Some(1) {
            return;
        }
        let (Some(time), Some(bytes)) =
            (exact_nanoseconds(event.ts), as_integer(arguments.memory_bytes))
        else {
            self.builder.trace.quality.odd_values += 1;
            return;
        };
        let thread = self.thread_of_event(event);
        let process = self.builder.trace.threads[thread as usize].process;
        let device = as_integer(arguments.memory_device).and_then(|id| u32::try_from(id).ok());
        let device = device.unwrap_or(0);
        let place = self.builder.place(OperationPlace { process, device, context: 0, stream: 0 });
        let address = as_integer(arguments.address).unwrap_or(0).cast_unsigned();
        let allocations = &mut self.builder.trace.allocations;
        allocations.push(time, place, address, bytes.unsigned_abs(), bytes < 0);
    }

    /// The thread of an event; an id that is not a number counts as -1.
    fn thread_of_event(&mut self, event: &ChromeEvent<'_>) -> u32 {
        let pid = as_integer(event.pid).unwrap_or(-1);
        let process = self.builder.process_of_key(pid.cast_unsigned(), pid);
        let tid = as_integer(event.tid).unwrap_or(-1);
        self.builder.thread_of_tid(process, tid)
    }

    fn name(&mut self, event: &ChromeEvent<'_>) {
        let arguments = EventArguments::new(event);
        let (Some(name), Some(pid)) = (arguments.name, as_integer(event.pid)) else { return };
        let label = text(name);
        let name = self.builder.trace.names.intern_text(&label);
        match event.name.as_ref() {
            "process_name" => {
                self.xla.note_process_name(pid, &label);
                let process = self.builder.process_of_key(pid.cast_unsigned(), pid) as usize;
                self.builder.trace.processes[process].name = Some(name);
            }
            "thread_name" => {
                self.xla.note_xla_thread(pid, as_integer(event.tid).unwrap_or(-1), &label);
                let thread = self.thread_of_event(event) as usize;
                self.builder.trace.threads[thread].name = Some(name);
            }
            _ => {}
        }
    }

    fn add_range_bracket(&mut self, event: &ChromeEvent<'_>) {
        let Some(time) = exact_nanoseconds(event.ts) else {
            self.builder.trace.quality.odd_values += 1;
            return;
        };
        let thread = self.thread_of_event(event);
        let open = self.open.entry(thread).or_default();
        if event.ph == "B" {
            open.push((time, event.name.clone().into_owned()));
        } else if let Some((start, name)) = open.pop() {
            self.add_range(start, time, thread, &name, RangeStyle::PushPop);
        } else {
            self.builder.trace.quality.odd_values += 1;
        }
    }

    fn add_range_bracket_by_id(&mut self, event: &ChromeEvent<'_>) {
        let (Some(time), Some(id)) = (exact_nanoseconds(event.ts), as_integer(event.id)) else {
            self.builder.trace.quality.odd_values += 1;
            return;
        };
        let key = (event.cat.clone().into_owned(), id);
        if event.ph == "b" {
            let thread = self.thread_of_event(event);
            self.open_by_id.insert(key, (time, thread, event.name.clone().into_owned()));
        } else if let Some((start, thread, name)) = self.open_by_id.remove(&key) {
            let end = self.builder.trace.quality.plausible_span_end(start, time);
            self.add_range(start, end, thread, &name, RangeStyle::StartEnd);
        } else {
            self.builder.trace.quality.odd_values += 1;
        }
    }

    fn add_range(&mut self, start: i64, end: i64, thread: u32, name: &str, style: RangeStyle) {
        let trace = &mut self.builder.trace;
        let name = trace.names.intern_text(name);
        trace.ranges.push(start, end, thread, name, style);
    }

    fn add_span(&mut self, event: &ChromeEvent<'_>) {
        let Some(start) = exact_nanoseconds(event.ts) else {
            self.builder.trace.quality.odd_values += 1;
            return;
        };
        let duration = exact_nanoseconds(event.dur).unwrap_or(0);
        let end =
            self.builder.trace.quality.plausible_span_end(start, start.saturating_add(duration));
        match event.cat.as_ref() {
            "" => self.add_event_without_category(event, start, end),
            "kernel" | "Kernel" => self.add_kernel(event, start, end),
            "gpu_memcpy" | "Memcpy" => self.add_copy(event, start, end),
            "gpu_memset" | "Memset" => {
                let arguments = EventArguments::new(event);
                let mut sets = std::mem::take(&mut self.builder.trace.sets);
                if self.add_operation(&mut sets.on_gpu, event, &arguments, (start, end)) {
                    sets.bytes
                        .push(as_integer(arguments.bytes).unwrap_or(0).max(0).cast_unsigned());
                }
                self.builder.trace.sets = sets;
            }
            "gpu_graph" => {
                let arguments = EventArguments::new(event);
                let mut graphs = std::mem::take(&mut self.builder.trace.graphs);
                if self.add_operation(&mut graphs.on_gpu, event, &arguments, (start, end)) {
                    let id = as_integer(arguments.graph).and_then(|id| u32::try_from(id).ok());
                    graphs.executable.push(id.unwrap_or(0));
                }
                self.builder.trace.graphs = graphs;
            }
            "cuda_sync" => self.add_wait(event, start, end),
            "cuda_runtime" | "cuda_driver" | "Runtime" => self.call(event, start, end),
            "overhead" | "Overhead" => self.builder.trace.quality.overhead.push((start, end)),
            // Spans of the profiler itself, shadows of host ranges on the GPU, and Python frames.
            "Trace" | "gpu_user_annotation" | "python_function" => {}
            _ => self.add_host_range(event, start, end),
        }
    }

    fn add_host_range(&mut self, event: &ChromeEvent<'_>, start: i64, end: i64) {
        let thread = self.thread_of_event(event);
        self.add_range(start, end, thread, &event.name, RangeStyle::PushPop);
        // Most operators have arguments, but few files have the operators' shapes.
        if event.args.is_some_and(|arguments| arguments.get().contains("\"Input Dims\"")) {
            let arguments = EventArguments::new(event);
            let names = &mut self.builder.trace.names;
            let mut list = |value: Option<_>| names.intern_text(value.map_or("[]", RawValue::get));
            let [dims, types, values] =
                [arguments.dims, arguments.types, arguments.values].map(&mut list);
            let inputs = self.builder.inputs(OperatorInputs { dims, types, values });
            self.builder.trace.ranges.set_operator_inputs(inputs);
        }
    }

    fn add_wait(&mut self, event: &ChromeEvent<'_>, start: i64, end: i64) {
        let arguments = EventArguments::new(event);
        let mut syncs = std::mem::take(&mut self.builder.trace.syncs);
        if self.add_operation(&mut syncs.on_gpu, event, &arguments, (start, end)) {
            syncs.kind.push(match event.name.as_ref() {
                "Stream Sync" | "Stream Synchronize" => SynchronisationKind::Stream,
                "Event Sync" | "Event Synchronize" => SynchronisationKind::Event,
                "Context Sync" | "Context Synchronize" => SynchronisationKind::Context,
                "Stream Wait Event" => SynchronisationKind::StreamWaitsEvent,
                _ => SynchronisationKind::Unknown,
            });
        }
        self.builder.trace.syncs = syncs;
    }

    fn call(&mut self, event: &ChromeEvent<'_>, start: i64, end: i64) {
        let correlation = EventArguments::new(event).correlation();
        let correlation = self.builder.trace.quality.correlation(correlation);
        let thread = self.thread_of_event(event);
        let process = self.builder.trace.threads[thread as usize].process;
        *self.calls.entry(process).or_default() += 1;
        let name = self.builder.trace.names.intern_text(&event.name);
        self.builder.trace.calls.push(start, end, thread, name, correlation);
    }

    /// An event of XLA, of PyTorch's old autograd profiler, or a range.
    fn add_event_without_category(&mut self, event: &ChromeEvent<'_>, start: i64, end: i64) {
        let pid = as_integer(event.pid).unwrap_or(-1);
        let tid = as_integer(event.tid).unwrap_or(-1);
        match self.xla.device_and_line_kind(pid, tid) {
            Some((device, xla::XlaDeviceLine::Stream(stream))) => {
                self.add_xla_operation(event, (device, stream), start, end);
            }
            Some((_, xla::XlaDeviceLine::Derived)) => {}
            None if event.pid.is_some_and(|pid| text(pid) == "CUDA functions") => {
                self.add_autograd_kernel(event, tid, start, end);
            }
            None if self.xla.has_xla_devices()
                && event.name.starts_with("cu")
                && EventArguments::new(event).correlation().is_some() =>
            {
                self.call(event, start, end);
            }
            None => self.add_host_range(event, start, end),
        }
    }

    fn add_xla_operation(
        &mut self,
        event: &ChromeEvent<'_>,
        (device, stream): (u32, u64),
        start: i64,
        end: i64,
    ) {
        self.builder.trace.recorder = TraceRecorder::Xla;
        let arguments = EventArguments::new(event);
        let place =
            OperationPlace { process: self.lane_process(event), device, context: 0, stream };
        let details = |value: Option<_>| value.map(text).unwrap_or_default();
        if let Some(direction) = event.name.strip_prefix("Memcpy") {
            let mut copies = std::mem::take(&mut self.builder.trace.copies);
            if self.add_operation_at(&mut copies.on_gpu, place, &arguments, start, end) {
                let details = details(arguments.copy_details);
                copies.bytes.push(xla::bytes_of_details(&details));
                copies
                    .kind
                    .push(self.builder.trace.names.intern_text(copies::copy_direction(direction)));
                let [source, target] = xla::copied_memory_kinds(&details);
                copies.source.push(source);
                copies.target.push(target);
            }
            self.builder.trace.copies = copies;
        } else if event.name.starts_with("Memset") {
            let mut sets = std::mem::take(&mut self.builder.trace.sets);
            if self.add_operation_at(&mut sets.on_gpu, place, &arguments, start, end) {
                sets.bytes.push(xla::bytes_of_details(&details(arguments.set_details)));
            }
            self.builder.trace.sets = sets;
        } else {
            let shape = xla::shape(&details(arguments.kernel_details));
            self.add_kernel_at(event, place, shape, &arguments, (start, end));
        }
    }

    /// A kernel of `torch.autograd.profiler`, whose thread is the device.
    fn add_autograd_kernel(&mut self, event: &ChromeEvent<'_>, tid: i64, start: i64, end: i64) {
        let device = u32::try_from(tid).unwrap_or(0);
        let place =
            OperationPlace { process: self.lane_process(event), device, context: 0, stream: 0 };
        let arguments = EventArguments::new(event);
        self.add_kernel_at(event, place, LaunchShape::default(), &arguments, (start, end));
    }

    /// The lane of an operation, as a process.
    fn lane_process(&mut self, event: &ChromeEvent<'_>) -> u32 {
        FIRST_LANE_PROCESS | self.lanes.intern(as_integer(event.pid).unwrap_or(-1))
    }

    fn place(&mut self, event: &ChromeEvent<'_>, arguments: &EventArguments<'_>) -> OperationPlace {
        let number = |value| as_integer(value).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
        let process = match as_integer(arguments.process) {
            Some(pid) => self.builder.process_of_key(pid.cast_unsigned(), pid),
            None => self.lane_process(event),
        };
        OperationPlace {
            process,
            device: number(arguments.device),
            context: number(arguments.context),
            stream: as_integer(arguments.stream).unwrap_or(0).cast_unsigned(),
        }
    }

    /// Adds a GPU operation; returns `false` if the event has no times.
    fn add_operation(
        &mut self,
        operations: &mut OperationColumns,
        event: &ChromeEvent<'_>,
        arguments: &EventArguments<'_>,
        (start, end): (i64, i64),
    ) -> bool {
        let place = self.place(event, arguments);
        self.add_operation_at(operations, place, arguments, start, end)
    }

    fn add_operation_at(
        &mut self,
        operations: &mut OperationColumns,
        place: OperationPlace,
        arguments: &EventArguments<'_>,
        start: i64,
        end: i64,
    ) -> bool {
        if start == 0 && end == 0 {
            self.builder.trace.quality.without_times += 1;
            return false;
        }
        let place = self.builder.place(place);
        let correlation = self.builder.trace.quality.correlation(arguments.correlation());
        operations.push(start, end, place, correlation);
        true
    }

    fn add_kernel(&mut self, event: &ChromeEvent<'_>, start: i64, end: i64) {
        let arguments = EventArguments::new(event);
        let number = |value| as_integer(value).and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        let shape = LaunchShape {
            grid: dimensions(arguments.grid),
            block: dimensions(arguments.block),
            registers: number(arguments.registers),
            static_shared: number(arguments.shared),
            ..LaunchShape::default()
        };
        let place = self.place(event, &arguments);
        self.add_kernel_at(event, place, shape, &arguments, (start, end));
    }

    fn add_kernel_at(
        &mut self,
        event: &ChromeEvent<'_>,
        place: OperationPlace,
        shape: LaunchShape,
        arguments: &EventArguments<'_>,
        (start, end): (i64, i64),
    ) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        if self.add_operation_at(&mut kernels.on_gpu, place, arguments, start, end) {
            let name = self.builder.trace.names.intern_text(&event.name);
            kernels.function.push(self.builder.function(name, name));
            kernels.shape.push(self.builder.shape(shape));
            kernels.push_graph_node(as_integer(arguments.graph_node).unwrap_or(0).cast_unsigned());
            let row = u32::try_from(kernels.on_gpu.len() - 1).expect("fewer than 2^32 kernels");
            if let Some(call) =
                collective::read_collective_call(arguments, &mut self.builder.trace.names)
            {
                self.builder.trace.collectives.push(row, call);
            }
        }
        self.builder.trace.kernels = kernels;
    }

    /// A copy, named like `Memcpy HtoD (Pageable -> Device)`.
    fn add_copy(&mut self, event: &ChromeEvent<'_>, start: i64, end: i64) {
        let arguments = EventArguments::new(event);
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        if self.add_operation(&mut copies.on_gpu, event, &arguments, (start, end)) {
            copies.bytes.push(as_integer(arguments.bytes).unwrap_or(0).max(0).cast_unsigned());
            let label = copies::copy_direction(event.name.split(' ').nth(1).unwrap_or("Unknown"));
            copies.kind.push(self.builder.trace.names.intern_text(label));
            let [source, target] = copies::memories_of_copy(&event.name);
            copies.source.push(source);
            copies.target.push(target);
        }
        self.builder.trace.copies = copies;
    }

    fn finish_trace(mut self) -> Trace {
        let last = self.builder.trace.first_and_last_ns().map_or(0, |(_, last)| last);
        for (thread, open) in std::mem::take(&mut self.open) {
            for (start, name) in open {
                self.builder.trace.quality.unclosed_ranges += 1;
                self.add_range(start, last.max(start), thread, &name, RangeStyle::PushPop);
            }
        }
        for (start, thread, name) in std::mem::take(&mut self.open_by_id).into_values() {
            self.builder.trace.quality.unclosed_ranges += 1;
            self.add_range(start, last.max(start), thread, &name, RangeStyle::StartEnd);
        }
        let busiest =
            self.calls.iter().max_by_key(|&(&process, &calls)| (calls, std::cmp::Reverse(process)));
        let busiest = match busiest {
            Some((&process, _)) => process,
            None => {
                let host = self.xla.host.unwrap_or(0);
                self.builder.process_of_key(host.cast_unsigned(), host)
            }
        };
        let mut trace = self.builder.finish_trace();
        let owners = lanes::process_of_each_lane(&trace, self.lanes.values.len(), busiest);
        for place in trace.places.iter_mut().filter(|place| place.process >= FIRST_LANE_PROCESS) {
            place.process = owners[(place.process - FIRST_LANE_PROCESS) as usize];
        }
        lanes::join_equal_places(&mut trace);
        trace
    }
}
