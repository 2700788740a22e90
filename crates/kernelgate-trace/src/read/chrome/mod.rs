//! Reads Chrome trace JSON as PyTorch's profiler (Kineto), JAX and kernelgate write it, also
//! compressed with gzip.
//!
//! The reader streams events one by one, so that the trace file need not fit into memory. The
//! reader counts and skips elements that are not trace events. The reader ignores Python functions,
//! counters and flow arrows; correlation ids connect GPU operations with launch calls instead.

mod collective;
mod copies;
mod event;
mod json_events;
mod lanes;
mod xla;

use std::path::Path;

use event::{
    ChromeEventArguments, ChromeTraceEvent, decimal_microseconds_as_nanoseconds,
    json_list_as_three_dimensions, json_value_as_integer, json_value_as_text,
};
use hashbrown::HashMap;
use json_events::ChromeFilePart;
use lanes::FIRST_PLACEHOLDER_PROCESS;
use serde_json::value::RawValue;

use super::json_source;
use super::trace_builder::TraceBuilder;
use crate::error::TraceError;
use crate::model::gpu::{
    GpuOperationColumns, KernelLaunchShape, ProcessDeviceContextAndStream, SynchronisationTarget,
};
use crate::model::host::{HostRangeStyle, RecordedOperatorInputs};
use crate::model::{DistinctValues, Trace, TraceRecorder, TracedDevice};

/// Reads a trace file in Chrome trace JSON.
///
/// # Errors
/// The file cannot be read, or contains no trace event.
pub(super) fn read_chrome_trace(path: &Path) -> Result<Trace, TraceError> {
    let source = json_source::open_plain_or_gzip_json(path)
        .map_err(TraceError::unreadable_file_error(path))?;
    let mut reader = ChromeTraceReader::default();
    reader.builder.trace.recorder = TraceRecorder::PytorchOrChromeTrace;
    let contents = json_events::stream_chrome_events_and_fields(source, |part| {
        reader.add_event_or_field(&part)
    });
    if let Some(error) = &contents.read_error {
        let reason = format!("JSON after {} events: {error}", reader.events);
        if reader.events == 0 {
            return Err(TraceError::broken_trace_file_error(path, reason));
        }
        reader.builder.trace.quality.unreadable_parts.push(reason);
    }
    if reader.events == 0 {
        let reason = match (contents.has_event_array, reader.non_event_elements) {
            (true, 0) => "the trace has no events: `traceEvents` is empty",
            _ => "JSON without `traceEvents`, or whose elements are not events of a trace",
        };
        return Err(TraceError::UnknownFormat { path: path.to_owned(), reason: reason.to_owned() });
    }
    let quality = &mut reader.builder.trace.quality;
    quality.invalid_json_events = contents.invalid_json_events;
    quality.invalid_utf8_texts = contents.invalid_utf8_events;
    Ok(reader.close_ranges_and_finish_trace())
}

#[derive(Default)]
struct ChromeTraceReader {
    builder: TraceBuilder,
    /// Number of trace events of any kind.
    events: u64,
    /// Number of elements of the event array that are not trace events.
    non_event_elements: u64,
    /// Open `B` events by thread: each with start time and name of the range.
    open_ranges_by_thread: HashMap<u32, Vec<(i64, String)>>,
    /// Open `b` events by category and id: start time, thread and name of the range; such ranges
    /// may end on another thread.
    open_ranges_by_id: HashMap<(String, i64), (i64, u32, String)>,
    /// The pid fields of GPU operations; PyTorch writes the device number into this field.
    gpu_operation_pids: DistinctValues<i64>,
    /// CUDA calls by process: GPU operations without launch calls are attributed to the process
    /// with the most launch calls.
    cuda_call_count_by_process: HashMap<u32, u64>,
    /// Devices and streams, if XLA's profiler wrote the trace.
    xla: xla::XlaProcessesAndThreads,
}

impl ChromeTraceReader {
    fn add_event_or_field(&mut self, part: &ChromeFilePart<'_>) {
        match part {
            ChromeFilePart::TopLevelField("deviceProperties", value) => {
                self.read_device_properties(value)
            }
            ChromeFilePart::TopLevelField(key, value) => {
                let text = serde_json::from_str(value).unwrap_or_else(|_| (*value).to_owned());
                self.builder.trace.metadata.insert((*key).to_owned(), text);
            }
            // Any JSON object parses as an event, but only trace events have a phase (`ph`).
            ChromeFilePart::Event(event) if event.ph.is_empty() => {
                self.non_event_elements += 1;
                self.builder.trace.quality.implausible_value_count += 1;
            }
            ChromeFilePart::Event(event) => {
                self.events += 1;
                self.add_event_by_phase(event);
            }
            ChromeFilePart::NonEventElement => {
                self.non_event_elements += 1;
                self.builder.trace.quality.implausible_value_count += 1;
            }
        }
    }

    fn read_device_properties(&mut self, value: &str) {
        let Ok(devices) = serde_json::from_str::<Vec<serde_json::Value>>(value) else {
            self.builder.trace.quality.implausible_value_count += 1;
            return;
        };
        for device in devices {
            let number =
                |key: &str| device[key].as_u64().and_then(|value| u32::try_from(value).ok());
            self.builder.trace.devices.push(TracedDevice {
                device_ordinal: number("id").unwrap_or(0),
                device_name: device["name"].as_str().unwrap_or_default().to_owned(),
                multiprocessors: number("numSms"),
                compute_capability: number("computeMajor").zip(number("computeMinor")),
                threads_per_sm: number("maxThreadsPerMultiprocessor"),
                registers_per_sm: number("regsPerMultiprocessor"),
                // PyTorch for ROCm uses the second field name.
                shared_bytes_per_sm: number("sharedMemPerMultiprocessor")
                    .or_else(|| number("maxSharedMemoryPerMultiProcessor")),
                blocks_per_sm: None,
                threads_per_warp: number("warpSize"),
            });
        }
    }

    fn add_event_by_phase(&mut self, event: &ChromeTraceEvent<'_>) {
        match event.ph.as_ref() {
            "X" => self.add_span_by_category(event),
            "M" => self.read_process_or_thread_name(event),
            "B" | "E" => self.begin_or_end_nested_range(event),
            "b" | "e" => self.begin_or_end_range_by_id(event),
            "i" | "I" if event.name == "[memory]" => self.add_gpu_allocation_or_free(event),
            _ => {}
        }
    }

    /// Adds an allocation or free of GPU memory that PyTorch's allocator reported; present if
    /// memory was profiled.
    fn add_gpu_allocation_or_free(&mut self, event: &ChromeTraceEvent<'_>) {
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        if json_value_as_integer(arguments.device_type) != Some(1) {
            return;
        }
        let (Some(time), Some(bytes)) = (
            decimal_microseconds_as_nanoseconds(event.ts),
            json_value_as_integer(arguments.memory_bytes),
        ) else {
            self.builder.trace.quality.implausible_value_count += 1;
            return;
        };
        let thread = self.index_of_event_thread(event);
        let process = self.builder.trace.threads[thread as usize].process_index;
        let device =
            json_value_as_integer(arguments.memory_device_id).and_then(|id| u32::try_from(id).ok());
        let device = device.unwrap_or(0);
        let place = self.builder.index_of_operation_place(ProcessDeviceContextAndStream {
            process_index: process,
            device,
            context: 0,
            stream: 0,
        });
        let address = json_value_as_integer(arguments.address).unwrap_or(0).cast_unsigned();
        let allocations = &mut self.builder.trace.allocations;
        allocations.push_allocation_or_free(time, place, address, bytes.unsigned_abs(), bytes < 0);
    }

    /// Returns the host thread of an event; a pid or tid that is not a number counts as -1.
    fn index_of_event_thread(&mut self, event: &ChromeTraceEvent<'_>) -> u32 {
        let pid = json_value_as_integer(event.pid).unwrap_or(-1);
        let process = self.builder.index_of_process(pid.cast_unsigned(), pid);
        let tid = json_value_as_integer(event.tid).unwrap_or(-1);
        self.builder.index_of_host_thread(process, tid)
    }

    fn read_process_or_thread_name(&mut self, event: &ChromeTraceEvent<'_>) {
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        let (Some(name), Some(pid)) = (arguments.name, json_value_as_integer(event.pid)) else {
            return;
        };
        let label = json_value_as_text(name);
        let name = self.builder.trace.names.intern_text(&label);
        match event.name.as_ref() {
            "process_name" => {
                self.xla.record_process_by_name(pid, &label);
                let process = self.builder.index_of_process(pid.cast_unsigned(), pid) as usize;
                self.builder.trace.processes[process].process_name = Some(name);
            }
            "thread_name" => {
                self.xla.record_device_thread_by_name(
                    pid,
                    json_value_as_integer(event.tid).unwrap_or(-1),
                    &label,
                );
                let thread = self.index_of_event_thread(event) as usize;
                self.builder.trace.threads[thread].thread_name = Some(name);
            }
            _ => {}
        }
    }

    fn begin_or_end_nested_range(&mut self, event: &ChromeTraceEvent<'_>) {
        let Some(time) = decimal_microseconds_as_nanoseconds(event.ts) else {
            self.builder.trace.quality.implausible_value_count += 1;
            return;
        };
        let thread = self.index_of_event_thread(event);
        let open = self.open_ranges_by_thread.entry(thread).or_default();
        if event.ph == "B" {
            open.push((time, event.name.clone().into_owned()));
        } else if let Some((start, name)) = open.pop() {
            self.push_host_range(start, time, thread, &name, HostRangeStyle::PushPop);
        } else {
            self.builder.trace.quality.implausible_value_count += 1;
        }
    }

    fn begin_or_end_range_by_id(&mut self, event: &ChromeTraceEvent<'_>) {
        let (Some(time), Some(id)) =
            (decimal_microseconds_as_nanoseconds(event.ts), json_value_as_integer(event.id))
        else {
            self.builder.trace.quality.implausible_value_count += 1;
            return;
        };
        let key = (event.cat.clone().into_owned(), id);
        if event.ph == "b" {
            let thread = self.index_of_event_thread(event);
            self.open_ranges_by_id.insert(key, (time, thread, event.name.clone().into_owned()));
        } else if let Some((start, thread, name)) = self.open_ranges_by_id.remove(&key) {
            let end = self.builder.trace.quality.plausible_span_end_or_start(start, time);
            self.push_host_range(start, end, thread, &name, HostRangeStyle::StartEnd);
        } else {
            self.builder.trace.quality.implausible_value_count += 1;
        }
    }

    fn push_host_range(
        &mut self,
        start: i64,
        end: i64,
        thread: u32,
        name: &str,
        style: HostRangeStyle,
    ) {
        let trace = &mut self.builder.trace;
        let name = trace.names.intern_text(name);
        trace.ranges.push_host_range(start, end, thread, name, style);
    }

    fn add_span_by_category(&mut self, event: &ChromeTraceEvent<'_>) {
        let Some(start) = decimal_microseconds_as_nanoseconds(event.ts) else {
            self.builder.trace.quality.implausible_value_count += 1;
            return;
        };
        let duration = decimal_microseconds_as_nanoseconds(event.dur).unwrap_or(0);
        let end = self
            .builder
            .trace
            .quality
            .plausible_span_end_or_start(start, start.saturating_add(duration));
        match event.cat.as_ref() {
            "" => self.add_event_without_category(event, start, end),
            "kernel" | "Kernel" => self.add_kernel_from_arguments(event, start, end),
            "gpu_memcpy" | "Memcpy" => self.add_memory_copy(event, start, end),
            "gpu_memset" | "Memset" => {
                let arguments = ChromeEventArguments::parse_arguments_of_event(event);
                let mut sets = std::mem::take(&mut self.builder.trace.memsets);
                if self.add_operation_from_arguments(
                    &mut sets.on_gpu,
                    event,
                    &arguments,
                    (start, end),
                ) {
                    sets.set_bytes.push(
                        json_value_as_integer(arguments.bytes).unwrap_or(0).max(0).cast_unsigned(),
                    );
                }
                self.builder.trace.memsets = sets;
            }
            "gpu_graph" => {
                let arguments = ChromeEventArguments::parse_arguments_of_event(event);
                let mut graphs = std::mem::take(&mut self.builder.trace.graphs);
                if self.add_operation_from_arguments(
                    &mut graphs.on_gpu,
                    event,
                    &arguments,
                    (start, end),
                ) {
                    let id = json_value_as_integer(arguments.graph_id)
                        .and_then(|id| u32::try_from(id).ok());
                    graphs.executable_graph_id.push(id.unwrap_or(0));
                }
                self.builder.trace.graphs = graphs;
            }
            "cuda_sync" => self.add_synchronisation(event, start, end),
            "cuda_runtime" | "cuda_driver" | "Runtime" => self.add_cuda_api_call(event, start, end),
            "overhead" | "Overhead" => {
                self.builder.trace.quality.profiler_overhead_spans.push((start, end))
            }
            // Skips spans of the profiler itself, copies of host ranges on the GPU timeline, and
            // Python frames.
            "Trace" | "gpu_user_annotation" | "python_function" => {}
            _ => self.add_host_range_with_operator_inputs(event, start, end),
        }
    }

    fn add_host_range_with_operator_inputs(
        &mut self,
        event: &ChromeTraceEvent<'_>,
        start: i64,
        end: i64,
    ) {
        let thread = self.index_of_event_thread(event);
        self.push_host_range(start, end, thread, &event.name, HostRangeStyle::PushPop);
        // Checking for the text first avoids parsing the arguments of most operators, because few
        // traces contain operator shapes.
        if event.args.is_some_and(|arguments| arguments.get().contains("\"Input Dims\"")) {
            let arguments = ChromeEventArguments::parse_arguments_of_event(event);
            let names = &mut self.builder.trace.names;
            let mut list = |value: Option<_>| names.intern_text(value.map_or("[]", RawValue::get));
            let [dims, types, values] =
                [arguments.input_dims, arguments.input_types, arguments.concrete_inputs]
                    .map(&mut list);
            let inputs = self.builder.intern_operator_inputs(RecordedOperatorInputs {
                dims_json: dims,
                types_json: types,
                values_json: values,
            });
            self.builder.trace.ranges.set_operator_inputs_of_last_range(inputs);
        }
    }

    fn add_synchronisation(&mut self, event: &ChromeTraceEvent<'_>, start: i64, end: i64) {
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        let mut syncs = std::mem::take(&mut self.builder.trace.synchronisation_waits);
        if self.add_operation_from_arguments(&mut syncs.on_gpu, event, &arguments, (start, end)) {
            syncs.kind.push(match event.name.as_ref() {
                "Stream Sync" | "Stream Synchronize" => SynchronisationTarget::HostWaitsForStream,
                "Event Sync" | "Event Synchronize" => SynchronisationTarget::HostWaitsForEvent,
                "Context Sync" | "Context Synchronize" => {
                    SynchronisationTarget::HostWaitsForContext
                }
                "Stream Wait Event" => SynchronisationTarget::StreamWaitsEvent,
                _ => SynchronisationTarget::Unknown,
            });
        }
        self.builder.trace.synchronisation_waits = syncs;
    }

    fn add_cuda_api_call(&mut self, event: &ChromeTraceEvent<'_>, start: i64, end: i64) {
        let correlation = ChromeEventArguments::parse_arguments_of_event(event).correlation_id();
        let correlation = self.builder.trace.quality.correlation_id_or_zero(correlation);
        let thread = self.index_of_event_thread(event);
        let process = self.builder.trace.threads[thread as usize].process_index;
        *self.cuda_call_count_by_process.entry(process).or_default() += 1;
        let name = self.builder.trace.names.intern_text(&event.name);
        self.builder.trace.calls.push_api_call(start, end, thread, name, correlation);
    }

    /// Adds an event without a category: a GPU operation of XLA or of PyTorch's old autograd
    /// profiler, or a host range.
    fn add_event_without_category(&mut self, event: &ChromeTraceEvent<'_>, start: i64, end: i64) {
        let pid = json_value_as_integer(event.pid).unwrap_or(-1);
        let tid = json_value_as_integer(event.tid).unwrap_or(-1);
        match self.xla.device_and_thread_kind(pid, tid) {
            Some((device, xla::XlaDeviceThreadKind::CudaStream(stream))) => {
                self.add_xla_gpu_operation(event, (device, stream), start, end);
            }
            Some((_, xla::XlaDeviceThreadKind::DerivedSpans)) => {}
            None if event.pid.is_some_and(|pid| json_value_as_text(pid) == "CUDA functions") => {
                self.add_torch_autograd_profiler_kernel(event, tid, start, end);
            }
            None if self.xla.has_xla_devices()
                && event.name.starts_with("cu")
                && ChromeEventArguments::parse_arguments_of_event(event)
                    .correlation_id()
                    .is_some() =>
            {
                self.add_cuda_api_call(event, start, end);
            }
            None => self.add_host_range_with_operator_inputs(event, start, end),
        }
    }

    fn add_xla_gpu_operation(
        &mut self,
        event: &ChromeTraceEvent<'_>,
        (device, stream): (u32, u64),
        start: i64,
        end: i64,
    ) {
        self.builder.trace.recorder = TraceRecorder::XlaProfiler;
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        let place = ProcessDeviceContextAndStream {
            process_index: self.placeholder_process_of_gpu_pid(event),
            device,
            context: 0,
            stream,
        };
        let details = |value: Option<_>| value.map(json_value_as_text).unwrap_or_default();
        if let Some(direction) = event.name.strip_prefix("Memcpy") {
            let mut copies = std::mem::take(&mut self.builder.trace.copies);
            if self.add_operation_at_place(&mut copies.on_gpu, place, &arguments, start, end) {
                let details = details(arguments.memcpy_details);
                copies.copied_bytes.push(xla::byte_count_from_details(&details));
                copies.direction_label.push(
                    self.builder.trace.names.intern_text(copies::expand_copy_direction(direction)),
                );
                let [source, target] = xla::source_and_target_memory_from_details(&details);
                copies.source_memory.push(source);
                copies.target_memory.push(target);
            }
            self.builder.trace.copies = copies;
        } else if event.name.starts_with("Memset") {
            let mut sets = std::mem::take(&mut self.builder.trace.memsets);
            if self.add_operation_at_place(&mut sets.on_gpu, place, &arguments, start, end) {
                sets.set_bytes
                    .push(xla::byte_count_from_details(&details(arguments.memset_details)));
            }
            self.builder.trace.memsets = sets;
        } else {
            let shape = xla::launch_shape_from_kernel_details(&details(arguments.kernel_details));
            self.add_kernel_at_place(event, place, shape, &arguments, (start, end));
        }
    }

    /// Adds a kernel that `torch.autograd.profiler` recorded; the event's tid is the device number.
    fn add_torch_autograd_profiler_kernel(
        &mut self,
        event: &ChromeTraceEvent<'_>,
        tid: i64,
        start: i64,
        end: i64,
    ) {
        let device = u32::try_from(tid).unwrap_or(0);
        let place = ProcessDeviceContextAndStream {
            process_index: self.placeholder_process_of_gpu_pid(event),
            device,
            context: 0,
            stream: 0,
        };
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        self.add_kernel_at_place(
            event,
            place,
            KernelLaunchShape::default(),
            &arguments,
            (start, end),
        );
    }

    /// Returns a placeholder process number for the pid field of a GPU operation; the real process
    /// is found after all launch calls are read.
    fn placeholder_process_of_gpu_pid(&mut self, event: &ChromeTraceEvent<'_>) -> u32 {
        FIRST_PLACEHOLDER_PROCESS
            | self.gpu_operation_pids.index_of_value(json_value_as_integer(event.pid).unwrap_or(-1))
    }

    fn operation_place_from_arguments(
        &mut self,
        event: &ChromeTraceEvent<'_>,
        arguments: &ChromeEventArguments<'_>,
    ) -> ProcessDeviceContextAndStream {
        let number =
            |value| json_value_as_integer(value).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
        let process = match json_value_as_integer(arguments.launching_process_id) {
            Some(pid) => self.builder.index_of_process(pid.cast_unsigned(), pid),
            None => self.placeholder_process_of_gpu_pid(event),
        };
        ProcessDeviceContextAndStream {
            process_index: process,
            device: number(arguments.device),
            context: number(arguments.context),
            stream: json_value_as_integer(arguments.stream).unwrap_or(0).cast_unsigned(),
        }
    }

    /// Adds a GPU operation at the device and stream in its arguments; returns `false` if start and
    /// end are 0.
    fn add_operation_from_arguments(
        &mut self,
        operations: &mut GpuOperationColumns,
        event: &ChromeTraceEvent<'_>,
        arguments: &ChromeEventArguments<'_>,
        (start, end): (i64, i64),
    ) -> bool {
        let place = self.operation_place_from_arguments(event, arguments);
        self.add_operation_at_place(operations, place, arguments, start, end)
    }

    fn add_operation_at_place(
        &mut self,
        operations: &mut GpuOperationColumns,
        place: ProcessDeviceContextAndStream,
        arguments: &ChromeEventArguments<'_>,
        start: i64,
        end: i64,
    ) -> bool {
        if start == 0 && end == 0 {
            self.builder.trace.quality.operations_without_times += 1;
            return false;
        }
        let place = self.builder.index_of_operation_place(place);
        let correlation =
            self.builder.trace.quality.correlation_id_or_zero(arguments.correlation_id());
        operations.push_operation(start, end, place, correlation);
        true
    }

    fn add_kernel_from_arguments(&mut self, event: &ChromeTraceEvent<'_>, start: i64, end: i64) {
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        let number =
            |value| json_value_as_integer(value).and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        let shape = KernelLaunchShape {
            grid: json_list_as_three_dimensions(arguments.grid),
            block: json_list_as_three_dimensions(arguments.block),
            registers_per_thread: number(arguments.registers_per_thread),
            static_shared_bytes: number(arguments.shared_memory),
            ..KernelLaunchShape::default()
        };
        let place = self.operation_place_from_arguments(event, &arguments);
        self.add_kernel_at_place(event, place, shape, &arguments, (start, end));
    }

    fn add_kernel_at_place(
        &mut self,
        event: &ChromeTraceEvent<'_>,
        place: ProcessDeviceContextAndStream,
        shape: KernelLaunchShape,
        arguments: &ChromeEventArguments<'_>,
        (start, end): (i64, i64),
    ) {
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        if self.add_operation_at_place(&mut kernels.on_gpu, place, arguments, start, end) {
            let name = self.builder.trace.names.intern_text(&event.name);
            kernels.function_index.push_row(self.builder.index_of_kernel_function(name, name));
            kernels.launch_shape_index.push_row(self.builder.index_of_launch_shape(shape));
            kernels.push_graph_node_of_last_kernel(
                json_value_as_integer(arguments.graph_node).unwrap_or(0).cast_unsigned(),
            );
            let row = u32::try_from(kernels.on_gpu.operation_count() - 1)
                .expect("fewer than 2^32 kernels");
            if let Some(call) =
                collective::read_recorded_collective(arguments, &mut self.builder.trace.names)
            {
                self.builder.trace.collectives.push_collective_of_kernel(row, call);
            }
        }
        self.builder.trace.kernels = kernels;
    }

    /// Adds a memory copy, whose name has a form like `Memcpy HtoD (Pageable -> Device)`.
    fn add_memory_copy(&mut self, event: &ChromeTraceEvent<'_>, start: i64, end: i64) {
        let arguments = ChromeEventArguments::parse_arguments_of_event(event);
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        if self.add_operation_from_arguments(&mut copies.on_gpu, event, &arguments, (start, end)) {
            copies
                .copied_bytes
                .push(json_value_as_integer(arguments.bytes).unwrap_or(0).max(0).cast_unsigned());
            let label =
                copies::expand_copy_direction(event.name.split(' ').nth(1).unwrap_or("Unknown"));
            copies.direction_label.push(self.builder.trace.names.intern_text(label));
            let [source, target] = copies::source_and_target_memory_of_copy(&event.name);
            copies.source_memory.push(source);
            copies.target_memory.push(target);
        }
        self.builder.trace.copies = copies;
    }

    fn close_ranges_and_finish_trace(mut self) -> Trace {
        let last = self.builder.trace.first_and_last_activity_ns().map_or(0, |(_, last)| last);
        for (thread, open) in std::mem::take(&mut self.open_ranges_by_thread) {
            for (start, name) in open {
                self.builder.trace.quality.unclosed_ranges += 1;
                self.push_host_range(
                    start,
                    last.max(start),
                    thread,
                    &name,
                    HostRangeStyle::PushPop,
                );
            }
        }
        for (start, thread, name) in std::mem::take(&mut self.open_ranges_by_id).into_values() {
            self.builder.trace.quality.unclosed_ranges += 1;
            self.push_host_range(start, last.max(start), thread, &name, HostRangeStyle::StartEnd);
        }
        let busiest = self
            .cuda_call_count_by_process
            .iter()
            .max_by_key(|&(&process, &calls)| (calls, std::cmp::Reverse(process)));
        let busiest = match busiest {
            Some((&process, _)) => process,
            None => {
                let host = self.xla.host_process_pid.unwrap_or(0);
                self.builder.index_of_process(host.cast_unsigned(), host)
            }
        };
        let mut trace = self.builder.finish_trace();
        let owners = lanes::host_process_of_each_gpu_pid(
            &trace,
            self.gpu_operation_pids.values.len(),
            busiest,
        );
        for place in
            trace.places.iter_mut().filter(|place| place.process_index >= FIRST_PLACEHOLDER_PROCESS)
        {
            place.process_index =
                owners[(place.process_index - FIRST_PLACEHOLDER_PROCESS) as usize];
        }
        lanes::merge_equal_places(&mut trace);
        trace
    }
}
