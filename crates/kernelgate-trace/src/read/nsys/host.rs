//! Reads CUDA API calls, operating-system calls, CUDA graph node creations and thread switches from
//! an Nsight Systems export.

use super::NsysExportReader;
use super::ids::{CUDA_API_CALL_TABLE, process_key_pid_and_tid_of_global_id};
use crate::error::TraceError;

/// Name of API calls for which the export contains no function name.
pub(super) const NAME_OF_UNNAMED_CALLS: &str = "unknown call";

impl NsysExportReader {
    pub(super) fn read_cuda_api_calls(&mut self) -> Result<(), TraceError> {
        if !self.has_table_or_record_missing(CUDA_API_CALL_TABLE) {
            return Ok(());
        }
        let mut calls = std::mem::take(&mut self.builder.trace.calls);
        calls.reserve_api_calls(self.database.row_count_upper_bound(CUDA_API_CALL_TABLE));
        let unknown = self.builder.trace.names.intern_text(NAME_OF_UNNAMED_CALLS);
        let names = ["start", "end", "globalTid", "nameId", "correlationId"];
        self.visit_rows_and_record_problems(
            CUDA_API_CALL_TABLE,
            &names,
            |builder, strings, row| {
                let quality = &mut builder.trace.quality;
                let Some(start) = quality.plausible_time_or_count_as_odd(row.cell_as_integer(0))
                else {
                    return;
                };
                let end =
                    quality.plausible_time_or_count_as_odd(row.cell_as_integer(1)).unwrap_or(start);
                let end = quality.plausible_span_end_or_start(start, end);
                let (key, pid, tid) =
                    process_key_pid_and_tid_of_global_id(row.cell_as_integer(2).unwrap_or(0));
                let process = builder.index_of_process(key, pid);
                let thread = builder.index_of_host_thread(process, tid);
                let name = row.cell_as_integer(3).and_then(|id| strings.get(&id)).copied();
                let correlation =
                    builder.trace.quality.correlation_id_or_zero(row.cell_as_integer(4));
                calls.push_api_call(start, end, thread, name.unwrap_or(unknown), correlation);
            },
        )?;
        self.builder.trace.calls = calls;
        Ok(())
    }

    pub(super) fn read_long_os_calls(&mut self) -> Result<(), TraceError> {
        let mut calls = std::mem::take(&mut self.builder.trace.os_calls);
        let unknown = self.builder.trace.names.intern_text(NAME_OF_UNNAMED_CALLS);
        let names = ["start", "end", "globalTid", "nameId"];
        self.visit_rows_and_record_problems("OSRT_API", &names, |builder, strings, row| {
            let quality = &mut builder.trace.quality;
            let Some(start) = quality.plausible_time_or_count_as_odd(row.cell_as_integer(0)) else {
                return;
            };
            let end =
                quality.plausible_time_or_count_as_odd(row.cell_as_integer(1)).unwrap_or(start);
            calls.end_ns.push(quality.plausible_span_end_or_start(start, end));
            let (key, pid, tid) =
                process_key_pid_and_tid_of_global_id(row.cell_as_integer(2).unwrap_or(0));
            let process = builder.index_of_process(key, pid);
            calls.start_ns.push(start);
            calls.thread_index.push(builder.index_of_host_thread(process, tid));
            let name = row.cell_as_integer(3).and_then(|id| strings.get(&id)).copied();
            calls.function_name.push(name.unwrap_or(unknown));
        })?;
        self.builder.trace.os_calls = calls;
        Ok(())
    }

    /// Reads when and on which thread CUDA graph nodes were created or cloned.
    pub(super) fn read_graph_node_creations(&mut self) -> Result<(), TraceError> {
        let mut events = std::mem::take(&mut self.builder.trace.node_events);
        let names = ["start", "globalTid", "graphNodeId", "originalGraphNodeId"];
        self.visit_rows_and_record_problems(
            "CUDA_GRAPH_NODE_EVENTS",
            &names,
            |builder, _, row| {
                let time =
                    builder.trace.quality.plausible_time_or_count_as_odd(row.cell_as_integer(0));
                let (Some(time), Some(id), Some(node)) =
                    (time, row.cell_as_integer(1), row.cell_as_integer(2))
                else {
                    return;
                };
                let (key, pid, tid) = process_key_pid_and_tid_of_global_id(id);
                let process = builder.index_of_process(key, pid);
                events.time_ns.push(time);
                events.thread_index.push(builder.index_of_host_thread(process, tid));
                events.node_id.push(node.cast_unsigned());
                events
                    .cloned_from_node_id
                    .push(row.cell_as_integer(3).unwrap_or(0).cast_unsigned());
            },
        )?;
        self.builder.trace.node_events = events;
        Ok(())
    }

    pub(super) fn read_thread_context_switches(&mut self) -> Result<(), TraceError> {
        let mut switches = std::mem::take(&mut self.builder.trace.context_switches);
        self.visit_rows_and_record_problems(
            "SCHED_EVENTS",
            &["start", "globalTid", "isSchedIn"],
            |builder, _, row| {
                let time =
                    builder.trace.quality.plausible_time_or_count_as_odd(row.cell_as_integer(0));
                let (Some(time), Some(id)) = (time, row.cell_as_integer(1)) else { return };
                let (key, pid, tid) = process_key_pid_and_tid_of_global_id(id);
                let process = builder.index_of_process(key, pid);
                switches.time_ns.push(time);
                switches.thread_index.push(builder.index_of_host_thread(process, tid));
                switches.is_put_on_cpu.push(row.cell_as_integer(2) == Some(1));
            },
        )?;
        self.builder.trace.context_switches = switches;
        Ok(())
    }
}
