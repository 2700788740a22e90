//! Builds a trace step by step while a reader reads the trace file.

use std::borrow::Cow;

use super::demangle::demangle_kernel_name;
use crate::model::gpu::{
    KernelFunctionName, KernelLaunchShape, OperationStreamIndex, ProcessDeviceContextAndStream,
};
use crate::model::host::{HostThread, RecordedOperatorInputs};
use crate::model::interned_names::InternedNameId;
use crate::model::{DistinctValues, Trace, TracedHostProcess};

/// Labels of copy directions, by the number that CUPTI and Nsight Systems use.
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

/// A trace under construction, with tables of distinct values to which its rows refer by index.
#[derive(Debug, Default)]
pub(super) struct TraceBuilder {
    pub trace: Trace,
    process_keys: DistinctValues<u64>,
    process_and_tid_of_threads: DistinctValues<(u32, i64)>,
    places: DistinctValues<ProcessDeviceContextAndStream>,
    functions: DistinctValues<KernelFunctionName>,
    shapes: DistinctValues<KernelLaunchShape>,
    inputs: DistinctValues<RecordedOperatorInputs>,
}

impl TraceBuilder {
    /// Returns the index of the process with this key, and adds the process if the key is new.
    pub fn index_of_process(&mut self, key: u64, pid: i64) -> u32 {
        let index = self.process_keys.index_of_value(key);
        if index as usize == self.trace.processes.len() {
            self.trace.processes.push(TracedHostProcess {
                unique_process_key: key,
                pid,
                process_name: None,
            });
        }
        index
    }

    pub fn index_of_host_thread(&mut self, process: u32, tid: i64) -> u32 {
        let index = self.process_and_tid_of_threads.index_of_value((process, tid));
        if index as usize == self.trace.threads.len() {
            self.trace.threads.push(HostThread { process_index: process, tid, thread_name: None });
        }
        index
    }

    pub fn index_of_operation_place(
        &mut self,
        place: ProcessDeviceContextAndStream,
    ) -> OperationStreamIndex {
        OperationStreamIndex(self.places.index_of_value(place))
    }

    pub fn index_of_kernel_function(
        &mut self,
        demangled: InternedNameId,
        short: InternedNameId,
    ) -> u32 {
        self.functions
            .index_of_value(KernelFunctionName { demangled_name: demangled, short_name: short })
    }

    pub fn index_of_launch_shape(&mut self, shape: KernelLaunchShape) -> u32 {
        self.shapes.index_of_value(shape)
    }

    /// Stores operator inputs if they are new, and returns their number for
    /// [`crate::model::host::HostRangeTable::operator_inputs_number`].
    pub fn intern_operator_inputs(&mut self, inputs: RecordedOperatorInputs) -> u32 {
        self.inputs.index_of_value(inputs) + 1
    }

    /// Copies the tables of distinct values, as filled so far, into the trace, and demangles kernel
    /// names.
    pub fn copy_tables_and_demangle_kernel_names(&mut self) {
        let names = &mut self.trace.names;
        for function in &mut self.functions.values {
            for name in [&mut function.demangled_name, &mut function.short_name] {
                if let Cow::Owned(readable) = demangle_kernel_name(names.text_of_name(*name)) {
                    *name = names.intern_text(&readable);
                }
            }
        }
        self.trace.places.clone_from(&self.places.values);
        self.trace.functions.clone_from(&self.functions.values);
        self.trace.shapes.clone_from(&self.shapes.values);
        self.trace.operator_inputs.clone_from(&self.inputs.values);
    }

    /// Copies the final tables of distinct values into the trace, and returns the trace.
    pub fn finish_trace(mut self) -> Trace {
        self.copy_tables_and_demangle_kernel_names();
        self.trace
    }
}
