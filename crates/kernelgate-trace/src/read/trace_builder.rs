//! Builds a trace while a reader reads its file.

use std::borrow::Cow;

use super::demangle::readable_kernel_name;
use crate::model::gpu::{KernelFunction, LaunchShape, OperationPlace, PlaceId};
use crate::model::host::{HostThread, OperatorInputs};
use crate::model::interned_names::NameId;
use crate::model::{InternedValues, Trace, TracedProcess};

/// Names of copy directions, by the number that CUPTI and Nsight Systems use.
pub(super) const COPY_DIRECTIONS: &[&str] = &[
    "Unknown",
    "Host-to-Device",
    "Device-to-Host",
    "Host-to-Array",
    "Array-to-Host",
    "Array-to-Array",
    "Array-to-Device",
    "Device-to-Array",
    "Device-to-Device",
    "Host-to-Host",
    "Peer-to-Peer",
    "Unified Host-to-Device",
    "Unified Device-to-Host",
    "Unified Device-to-Device",
];

/// A trace and the tables that give its rows their indices.
#[derive(Debug, Default)]
pub(super) struct TraceBuilder {
    pub trace: Trace,
    processes: InternedValues<u64>,
    threads: InternedValues<(u32, i64)>,
    places: InternedValues<OperationPlace>,
    functions: InternedValues<KernelFunction>,
    shapes: InternedValues<LaunchShape>,
    inputs: InternedValues<OperatorInputs>,
}

impl TraceBuilder {
    /// The process of a key; the first mention of a key gives it its id.
    pub fn process_of_key(&mut self, key: u64, pid: i64) -> u32 {
        let index = self.processes.intern(key);
        if index as usize == self.trace.processes.len() {
            self.trace.processes.push(TracedProcess { key, pid, name: None });
        }
        index
    }

    pub fn thread_of_tid(&mut self, process: u32, tid: i64) -> u32 {
        let index = self.threads.intern((process, tid));
        if index as usize == self.trace.threads.len() {
            self.trace.threads.push(HostThread { process, tid, name: None });
        }
        index
    }

    pub fn place(&mut self, place: OperationPlace) -> PlaceId {
        PlaceId(self.places.intern(place))
    }

    pub fn function(&mut self, demangled: NameId, short: NameId) -> u32 {
        self.functions.intern(KernelFunction { demangled, short })
    }

    pub fn shape(&mut self, shape: LaunchShape) -> u32 {
        self.shapes.intern(shape)
    }

    /// Stores the inputs of an operator and returns the index that
    /// [`crate::model::host::HostRangeTable::inputs`] holds.
    pub fn inputs(&mut self, inputs: OperatorInputs) -> u32 {
        self.inputs.intern(inputs) + 1
    }

    /// Puts the tables as they are by now into the trace; mangled names become readable.
    pub fn copy_tables_to_trace(&mut self) {
        let names = &mut self.trace.names;
        for function in &mut self.functions.values {
            for name in [&mut function.demangled, &mut function.short] {
                if let Cow::Owned(readable) = readable_kernel_name(names.text(*name)) {
                    *name = names.intern_text(&readable);
                }
            }
        }
        self.trace.places.clone_from(&self.places.values);
        self.trace.functions.clone_from(&self.functions.values);
        self.trace.shapes.clone_from(&self.shapes.values);
        self.trace.inputs.clone_from(&self.inputs.values);
    }

    /// Returns the finished trace with its tables.
    pub fn finish_trace(mut self) -> Trace {
        self.copy_tables_to_trace();
        self.trace
    }
}
