//! The host's work: calls of CUDA and of the operating system, and the scheduler's decisions.

use super::NsysReader;
use super::ids::{RUNTIME_CALL_TABLE, split_global_id};
use crate::error::TraceError;

/// Name of calls without a recorded name.
pub(super) const UNKNOWN_CALL_NAME: &str = "unknown call";

impl NsysReader {
    pub(super) fn read_host_calls(&mut self) -> Result<(), TraceError> {
        if !self.note_if_table_missing(RUNTIME_CALL_TABLE) {
            return Ok(());
        }
        let mut calls = std::mem::take(&mut self.builder.trace.calls);
        calls.reserve_rows(self.database.rows_at_most(RUNTIME_CALL_TABLE));
        let unknown = self.builder.trace.names.intern_text(UNKNOWN_CALL_NAME);
        let names = ["start", "end", "globalTid", "nameId", "correlationId"];
        self.visit_rows(RUNTIME_CALL_TABLE, &names, |builder, strings, row| {
            let quality = &mut builder.trace.quality;
            let Some(start) = quality.time(row.integer_cell(0)) else { return };
            let end = quality.time(row.integer_cell(1)).unwrap_or(start);
            let end = quality.plausible_span_end(start, end);
            let (key, pid, tid) = split_global_id(row.integer_cell(2).unwrap_or(0));
            let process = builder.process_of_key(key, pid);
            let thread = builder.thread_of_tid(process, tid);
            let name = row.integer_cell(3).and_then(|id| strings.get(&id)).copied();
            let correlation = builder.trace.quality.correlation(row.integer_cell(4));
            calls.push(start, end, thread, name.unwrap_or(unknown), correlation);
        })?;
        self.builder.trace.calls = calls;
        Ok(())
    }

    pub(super) fn read_os_calls(&mut self) -> Result<(), TraceError> {
        let mut calls = std::mem::take(&mut self.builder.trace.os_calls);
        let unknown = self.builder.trace.names.intern_text(UNKNOWN_CALL_NAME);
        let names = ["start", "end", "globalTid", "nameId"];
        self.visit_rows("OSRT_API", &names, |builder, strings, row| {
            let quality = &mut builder.trace.quality;
            let Some(start) = quality.time(row.integer_cell(0)) else { return };
            let end = quality.time(row.integer_cell(1)).unwrap_or(start);
            calls.end.push(quality.plausible_span_end(start, end));
            let (key, pid, tid) = split_global_id(row.integer_cell(2).unwrap_or(0));
            let process = builder.process_of_key(key, pid);
            calls.start.push(start);
            calls.thread.push(builder.thread_of_tid(process, tid));
            let name = row.integer_cell(3).and_then(|id| strings.get(&id)).copied();
            calls.name.push(name.unwrap_or(unknown));
        })?;
        self.builder.trace.os_calls = calls;
        Ok(())
    }

    /// Reads how nodes of CUDA graphs were created and cloned.
    pub(super) fn read_graph_node_events(&mut self) -> Result<(), TraceError> {
        let mut events = std::mem::take(&mut self.builder.trace.node_events);
        let names = ["start", "globalTid", "graphNodeId", "originalGraphNodeId"];
        self.visit_rows("CUDA_GRAPH_NODE_EVENTS", &names, |builder, _, row| {
            let time = builder.trace.quality.time(row.integer_cell(0));
            let (Some(time), Some(id), Some(node)) =
                (time, row.integer_cell(1), row.integer_cell(2))
            else {
                return;
            };
            let (key, pid, tid) = split_global_id(id);
            let process = builder.process_of_key(key, pid);
            events.time.push(time);
            events.thread.push(builder.thread_of_tid(process, tid));
            events.node.push(node.cast_unsigned());
            events.original.push(row.integer_cell(3).unwrap_or(0).cast_unsigned());
        })?;
        self.builder.trace.node_events = events;
        Ok(())
    }

    pub(super) fn read_thread_switches(&mut self) -> Result<(), TraceError> {
        let mut switches = std::mem::take(&mut self.builder.trace.switches);
        self.visit_rows(
            "SCHED_EVENTS",
            &["start", "globalTid", "isSchedIn"],
            |builder, _, row| {
                let time = builder.trace.quality.time(row.integer_cell(0));
                let (Some(time), Some(id)) = (time, row.integer_cell(1)) else { return };
                let (key, pid, tid) = split_global_id(id);
                let process = builder.process_of_key(key, pid);
                switches.time.push(time);
                switches.thread.push(builder.thread_of_tid(process, tid));
                switches.on_cpu.push(row.integer_cell(2) == Some(1));
            },
        )?;
        self.builder.trace.switches = switches;
        Ok(())
    }
}
