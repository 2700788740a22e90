//! The host's work as columns.

use super::gpu::pick;
use super::names::NameId;

/// A thread of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostThread {
    /// Index into [`super::Trace::processes`].
    pub process: u32,
    /// The operating system's id of the thread.
    pub tid: i64,
    /// Name of the thread, where recorded.
    pub name: Option<NameId>,
}

/// Calls of the CUDA runtime and driver. Times are nanoseconds of the trace's clock.
#[derive(Debug, Clone, Default)]
pub struct ApiCallTable {
    /// When the call was entered.
    pub start: Vec<i64>,
    /// When the call returned.
    pub end: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// The function, with the suffix of its version if it has one.
    pub name: Vec<NameId>,
    /// The id that joins it with its operations, within its process; 0: it launched nothing.
    pub correlation: Vec<u32>,
}

impl ApiCallTable {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.start.len()
    }

    /// Whether there is no call.
    pub fn is_empty(&self) -> bool {
        self.start.is_empty()
    }

    /// Adds one.
    pub fn push(&mut self, start: i64, end: i64, thread: u32, name: NameId, correlation: u32) {
        self.start.push(start);
        self.end.push(end);
        self.thread.push(thread);
        self.name.push(name);
        self.correlation.push(correlation);
    }

    pub(crate) fn reserve_rows(&mut self, rows: usize) {
        self.start.reserve_exact(rows);
        self.end.reserve_exact(rows);
        self.thread.reserve_exact(rows);
        self.name.reserve_exact(rows);
        self.correlation.reserve_exact(rows);
    }

    pub(crate) fn pick(&self, rows: &[u32]) -> Self {
        Self {
            start: pick(&self.start, rows),
            end: pick(&self.end, rows),
            thread: pick(&self.thread, rows),
            name: pick(&self.name, rows),
            correlation: pick(&self.correlation, rows),
        }
    }
}

/// How a range was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RangeStyle {
    /// The range is on the stack of its thread, so ranges of a thread nest.
    PushPop,
    /// The range has an id; such ranges may overlap, and may end on another thread.
    StartEnd,
}

impl RangeStyle {
    /// The style as Nsight Systems names it.
    pub fn label(self) -> &'static str {
        match self {
            Self::PushPop => "PushPop",
            Self::StartEnd => "StartEnd",
        }
    }
}

/// Named spans of host time: NVTX ranges, annotations of PyTorch.
#[derive(Debug, Clone, Default)]
pub struct HostRangeTable {
    /// When the range was opened.
    pub start: Vec<i64>,
    /// When the range was closed; the last time of the trace for one that was never closed.
    pub end: Vec<i64>,
    /// Index into [`super::Trace::threads`]: the thread that opened it.
    pub thread: Vec<u32>,
    /// Text of the range, behind `domain:` where it is in a named domain.
    pub name: Vec<NameId>,
    /// How the range was opened.
    pub style: Vec<RangeStyle>,
    /// The inputs of the operator that it is: 1 + index into [`super::Trace::inputs`], 0 where they
    /// are not known; empty where none are.
    pub inputs: Vec<u32>,
}

/// Inputs of an operator, as the recorder wrote them: JSON lists with an element an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperatorInputs {
    /// Sizes of tensors by axis.
    pub dims: NameId,
    /// Types of the inputs' values.
    pub types: NameId,
    /// Values of arguments that are not tensors.
    pub values: NameId,
}

impl HostRangeTable {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.start.len()
    }

    /// Whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.start.is_empty()
    }

    /// Adds one.
    pub fn push(&mut self, start: i64, end: i64, thread: u32, name: NameId, style: RangeStyle) {
        self.start.push(start);
        self.end.push(end);
        self.thread.push(thread);
        self.name.push(name);
        self.style.push(style);
        if !self.inputs.is_empty() {
            self.inputs.push(0);
        }
    }

    /// The inputs of the operator that a range is, as in [`Self::inputs`].
    pub(crate) fn operator_inputs_of_range(&self, row: usize) -> u32 {
        self.inputs.get(row).copied().unwrap_or(0)
    }

    /// Gives inputs, as in [`Self::inputs`], to the range that was added last.
    pub(crate) fn set_operator_inputs(&mut self, inputs: u32) {
        if inputs == 0 {
            return;
        }
        self.inputs.resize(self.start.len(), 0);
        if let Some(last) = self.inputs.last_mut() {
            *last = inputs;
        }
    }

    pub(crate) fn reserve_rows(&mut self, rows: usize) {
        self.start.reserve_exact(rows);
        self.end.reserve_exact(rows);
        self.thread.reserve_exact(rows);
        self.name.reserve_exact(rows);
        self.style.reserve_exact(rows);
    }

    pub(crate) fn pick(&self, rows: &[u32]) -> Self {
        Self {
            start: pick(&self.start, rows),
            end: pick(&self.end, rows),
            thread: pick(&self.thread, rows),
            name: pick(&self.name, rows),
            style: pick(&self.style, rows),
            inputs: pick(&self.inputs, rows),
        }
    }
}

/// Named moments of host time: NVTX marks.
#[derive(Debug, Clone, Default)]
pub struct HostMarkTable {
    /// When.
    pub time: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// Text of the mark, behind `domain:` where it is in a named domain.
    pub name: Vec<NameId>,
}

/// Calls of the operating system that took long.
#[derive(Debug, Clone, Default)]
pub struct OsCallTable {
    /// When the call was entered.
    pub start: Vec<i64>,
    /// When the call returned.
    pub end: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// The function.
    pub name: Vec<NameId>,
}

/// Threads that the scheduler put on a CPU or took off it.
#[derive(Debug, Clone, Default)]
pub struct ThreadSwitchTable {
    /// When.
    pub time: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// Whether the thread was put on the CPU.
    pub on_cpu: Vec<bool>,
}
