//! The host's work as tables with columns.

use super::gpu::select_elements;
use super::interned_names::NameId;

/// A thread of a host process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostThread {
    /// Index into [`super::Trace::processes`].
    pub process: u32,
    /// Thread id in the operating system.
    pub tid: i64,
    /// Name of the thread, if it was recorded.
    pub name: Option<NameId>,
}

/// Calls of the CUDA runtime and driver. Times are nanoseconds of the trace's clock.
#[derive(Debug, Clone, Default)]
pub struct ApiCallTable {
    /// Time at which each call was entered, nanoseconds.
    pub start: Vec<i64>,
    /// Time at which the call returned, nanoseconds.
    pub end: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// Name of the called function, with its version suffix if it has one.
    pub name: Vec<NameId>,
    /// The correlation id that joins the call with its operations, within its process; 0: it
    /// launched nothing.
    pub correlation: Vec<u32>,
}

impl ApiCallTable {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.start.len()
    }

    /// Whether the table has no call.
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

    pub(crate) fn select_rows(&self, rows: &[u32]) -> Self {
        Self {
            start: select_elements(&self.start, rows),
            end: select_elements(&self.end, rows),
            thread: select_elements(&self.thread, rows),
            name: select_elements(&self.name, rows),
            correlation: select_elements(&self.correlation, rows),
        }
    }
}

/// The way in which a range was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RangeStyle {
    /// The range is on the stack of its thread, so ranges of a thread nest.
    PushPop,
    /// The range has an id; such ranges may overlap, and may end on another thread.
    StartEnd,
}

impl RangeStyle {
    /// Name of the style in Nsight Systems.
    pub fn label(self) -> &'static str {
        match self {
            Self::PushPop => "PushPop",
            Self::StartEnd => "StartEnd",
        }
    }
}

/// Table of named spans of host time: NVTX ranges and annotations of PyTorch.
#[derive(Debug, Clone, Default)]
pub struct HostRangeTable {
    /// Time at which each range was opened, nanoseconds.
    pub start: Vec<i64>,
    /// Time at which the range was closed; for a range never closed, the last time of the trace.
    pub end: Vec<i64>,
    /// The thread that opened each range: an index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// Text of the range, behind `domain:` where it is in a named domain.
    pub name: Vec<NameId>,
    /// The way in which each range was opened.
    pub style: Vec<RangeStyle>,
    /// The inputs of the operator that it is: 1 + index into [`super::Trace::inputs`], 0 where they
    /// are not known; empty where none are.
    pub inputs: Vec<u32>,
}

/// Inputs of an operator, as the recorder wrote them: JSON lists with an element an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperatorInputs {
    /// Sizes of the operator's tensors along each axis.
    pub dims: NameId,
    /// Data types of the operator's inputs.
    pub types: NameId,
    /// Values of arguments that are not tensors.
    pub values: NameId,
}

impl HostRangeTable {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.start.len()
    }

    /// Whether the table has no range.
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

    pub(crate) fn select_rows(&self, rows: &[u32]) -> Self {
        Self {
            start: select_elements(&self.start, rows),
            end: select_elements(&self.end, rows),
            thread: select_elements(&self.thread, rows),
            name: select_elements(&self.name, rows),
            style: select_elements(&self.style, rows),
            inputs: select_elements(&self.inputs, rows),
        }
    }
}

/// Table of named moments of host time: NVTX marks.
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
    /// Time at which the call was entered, nanoseconds.
    pub start: Vec<i64>,
    /// Time at which the call returned, nanoseconds.
    pub end: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// The function.
    pub name: Vec<NameId>,
}

/// Table of the times at which the scheduler put threads on a CPU or took them off.
#[derive(Debug, Clone, Default)]
pub struct ThreadSwitchTable {
    /// When.
    pub time: Vec<i64>,
    /// Index into [`super::Trace::threads`].
    pub thread: Vec<u32>,
    /// Whether the thread was put on the CPU.
    pub on_cpu: Vec<bool>,
}
