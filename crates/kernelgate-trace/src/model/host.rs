//! Host threads, API calls, NVTX ranges and marks, operating-system calls and thread switches of a
//! trace, as columns.

use super::gpu::select_column_elements;
use super::interned_names::InternedNameId;

/// A thread of a traced host process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostThread {
    /// Index into [`super::Trace::processes`].
    pub process_index: u32,
    /// The operating system's thread id.
    pub tid: i64,
    /// Name of the host thread, if the trace records it.
    pub thread_name: Option<InternedNameId>,
}

/// Host calls of functions of the CUDA runtime or driver API. Times of API calls are nanoseconds on
/// the trace's clock.
#[derive(Debug, Clone, Default)]
pub struct ApiCallTable {
    /// Time at which the host entered each API call, in nanoseconds.
    pub start_ns: Vec<i64>,
    /// Time at which each API call returned, in nanoseconds.
    pub end_ns: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread_index: Vec<u32>,
    /// Name of the called CUDA API function, with its version suffix if it has one.
    pub function_name: Vec<InternedNameId>,
    /// The correlation id that connects the API call with its GPU operations in the same process;
    /// 0: the call launched nothing.
    pub correlation: Vec<u32>,
}

impl ApiCallTable {
    /// Number of API calls in the table.
    pub fn call_count(&self) -> usize {
        self.start_ns.len()
    }

    /// Whether the table contains no API call.
    pub fn has_no_call(&self) -> bool {
        self.start_ns.is_empty()
    }

    /// Adds one API call.
    pub fn push_api_call(
        &mut self,
        start: i64,
        end: i64,
        thread: u32,
        name: InternedNameId,
        correlation: u32,
    ) {
        self.start_ns.push(start);
        self.end_ns.push(end);
        self.thread_index.push(thread);
        self.function_name.push(name);
        self.correlation.push(correlation);
    }

    pub(crate) fn reserve_api_calls(&mut self, rows: usize) {
        self.start_ns.reserve_exact(rows);
        self.end_ns.reserve_exact(rows);
        self.thread_index.reserve_exact(rows);
        self.function_name.reserve_exact(rows);
        self.correlation.reserve_exact(rows);
    }

    pub(crate) fn select_api_calls(&self, rows: &[u32]) -> Self {
        Self {
            start_ns: select_column_elements(&self.start_ns, rows),
            end_ns: select_column_elements(&self.end_ns, rows),
            thread_index: select_column_elements(&self.thread_index, rows),
            function_name: select_column_elements(&self.function_name, rows),
            correlation: select_column_elements(&self.correlation, rows),
        }
    }
}

/// Whether a range was opened by push/pop or by start/end calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostRangeStyle {
    /// A push/pop range of NVTX: the ranges of one thread form a stack and nest.
    PushPop,
    /// A start/end range of NVTX: such ranges have ids, may overlap, and may end on another thread
    /// than they started.
    StartEnd,
}

impl HostRangeStyle {
    /// Nsight Systems' name of the range style: "PushPop" or "StartEnd".
    pub fn nsys_style_label(self) -> &'static str {
        match self {
            Self::PushPop => "PushPop",
            Self::StartEnd => "StartEnd",
        }
    }
}

/// Table of named time spans on the host: NVTX ranges, and operators and annotations of PyTorch.
#[derive(Debug, Clone, Default)]
pub struct HostRangeTable {
    /// Time at which each range was opened, in nanoseconds.
    pub start_ns: Vec<i64>,
    /// Time at which each range was closed, in nanoseconds; for a range that was never closed, the
    /// last time in the trace.
    pub end_ns: Vec<i64>,
    /// Index into [`super::Trace::threads`] of the thread that opened each range.
    pub thread_index: Vec<u32>,
    /// Text of each range, after `domain:` if the range is in a named NVTX domain.
    pub range_name: Vec<InternedNameId>,
    /// Whether each range was opened by push/pop or by start/end calls.
    pub style: Vec<HostRangeStyle>,
    /// For a range that is an operator call, 1 + the index of its inputs in
    /// [`super::Trace::operator_inputs`]; 0: unknown; the column is empty if no inputs are known.
    pub operator_inputs_number: Vec<u32>,
}

/// Shapes, data types and values of an operator's inputs, as the recorder wrote them: each field is
/// a JSON list with one element per argument of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordedOperatorInputs {
    /// JSON list of the sizes of each input tensor along each axis.
    pub dims_json: InternedNameId,
    /// JSON list of the data types of the operator's inputs.
    pub types_json: InternedNameId,
    /// JSON list of the values of arguments that are not tensors.
    pub values_json: InternedNameId,
}

impl HostRangeTable {
    /// Number of ranges in the table.
    pub fn range_count(&self) -> usize {
        self.start_ns.len()
    }

    /// Whether the table contains no range.
    pub fn has_no_range(&self) -> bool {
        self.start_ns.is_empty()
    }

    /// Adds one host range.
    pub fn push_host_range(
        &mut self,
        start: i64,
        end: i64,
        thread: u32,
        name: InternedNameId,
        style: HostRangeStyle,
    ) {
        self.start_ns.push(start);
        self.end_ns.push(end);
        self.thread_index.push(thread);
        self.range_name.push(name);
        self.style.push(style);
        if !self.operator_inputs_number.is_empty() {
            self.operator_inputs_number.push(0);
        }
    }

    /// For a range that is an operator call, 1 + the index of its inputs, as in
    /// [`Self::operator_inputs_number`]; 0: unknown.
    pub(crate) fn operator_inputs_number_of_range(&self, row: usize) -> u32 {
        self.operator_inputs_number.get(row).copied().unwrap_or(0)
    }

    /// Sets the operator inputs of the last range of the table, numbered as in
    /// [`Self::operator_inputs_number`].
    pub(crate) fn set_operator_inputs_of_last_range(&mut self, inputs: u32) {
        if inputs == 0 {
            return;
        }
        self.operator_inputs_number.resize(self.start_ns.len(), 0);
        if let Some(last) = self.operator_inputs_number.last_mut() {
            *last = inputs;
        }
    }

    pub(crate) fn reserve_ranges(&mut self, rows: usize) {
        self.start_ns.reserve_exact(rows);
        self.end_ns.reserve_exact(rows);
        self.thread_index.reserve_exact(rows);
        self.range_name.reserve_exact(rows);
        self.style.reserve_exact(rows);
    }

    pub(crate) fn select_ranges(&self, rows: &[u32]) -> Self {
        Self {
            start_ns: select_column_elements(&self.start_ns, rows),
            end_ns: select_column_elements(&self.end_ns, rows),
            thread_index: select_column_elements(&self.thread_index, rows),
            range_name: select_column_elements(&self.range_name, rows),
            style: select_column_elements(&self.style, rows),
            operator_inputs_number: select_column_elements(&self.operator_inputs_number, rows),
        }
    }
}

/// Table of named instants on the host: NVTX marks.
#[derive(Debug, Clone, Default)]
pub struct HostMarkerTable {
    /// Time of each row, nanoseconds of the trace's clock.
    pub time_ns: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread_index: Vec<u32>,
    /// Text of each mark, after `domain:` if the mark is in a named NVTX domain.
    pub mark_name: Vec<InternedNameId>,
}

/// Calls of operating-system functions that took longer than the recorder's threshold.
#[derive(Debug, Clone, Default)]
pub struct SlowOsCallTable {
    /// Time at which the thread entered the operating-system call, in nanoseconds.
    pub start_ns: Vec<i64>,
    /// Time at which the operating-system call returned, in nanoseconds.
    pub end_ns: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread_index: Vec<u32>,
    /// The function.
    pub function_name: Vec<InternedNameId>,
}

/// Times at which the operating system's scheduler put host threads on a CPU or took them off.
#[derive(Debug, Clone, Default)]
pub struct ThreadContextSwitchTable {
    /// Time of each row, nanoseconds of the trace's clock.
    pub time_ns: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread_index: Vec<u32>,
    /// Whether the scheduler put the thread on a CPU (true) or took the thread off (false).
    pub is_put_on_cpu: Vec<bool>,
}
