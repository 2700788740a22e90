//! Accounts for programs.

use serde_json::{Map, Value, json};

use super::{GpuTimeAccount, IterationsOnGpu, ProcessTimeAccountOnGpu};
use crate::analyze::timeline::BusyTimeLineOfGpu;

impl GpuTimeAccount {
    /// Converts the account to a JSON object: nanoseconds of each line, which add up to `total_ns`.
    pub fn time_account_to_json(&self) -> Value {
        let busy: Map<String, Value> = BusyTimeLineOfGpu::ALL_BUSY_TIME_LINES
            .iter()
            .map(|&line| (line.busy_line_json_key().to_owned(), self.busy_ns_of_line(line).into()))
            .collect();
        let idle: Map<String, Value> = self
            .idle_ns_by_cause
            .iter()
            .map(|(cause, &ns)| (cause.idle_cause_json_key().to_owned(), ns.into()))
            .collect();
        json!({
            "total_ns": self.span_length_ns(),
            "busy_ns": busy,
            "idle_ns": idle,
            "unclassified_ns": self.idle_time_without_known_cause_ns(),
        })
    }
}

impl ProcessTimeAccountOnGpu {
    /// Converts this value to JSON.
    pub fn iterations_to_json(&self) -> Value {
        let ranges = self.ranges.iter().map(|range| {
            json!({ "range": range.path, "depth": range.enclosing_range_count, "time": range.account.time_account_to_json() })
        });
        let transfers = self.transfers.iter().map(|of| {
            json!({
                "class": of.transfer_class.printed_operation_class(),
                "kind": of.label,
                "count": of.transfer_count,
                "total_ns": of.total_ns,
                "exposed_ns": of.exposed_ns,
                "bytes": (of.bytes > 0).then_some(of.bytes),
                "bus_gb_s": of.bus_gb_per_s,
                "on_compute_streams": of.transfers_during_compute,
            })
        });
        json!({
            "process": self.pid,
            "device": self.device,
            "time": self.whole_trace_account.time_account_to_json(),
            "iterations": self.iterations.as_ref().map(IterationsOnGpu::gpu_time_account_to_json),
            "transfers": transfers.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
        })
    }
}

impl IterationsOnGpu {
    fn gpu_time_account_to_json(&self) -> Value {
        let each = self.listed_iterations.iter().map(
            |of| json!({ "start": of.start_and_end_ns.0, "end": of.start_and_end_ns.1, "time": of.account.time_account_to_json() }),
        );
        let lengths = self.sorted_lengths_without_first();
        json!({
            "found_by": self.evidence.printed_iteration_evidence(),
            "count": self.iteration_lengths_ns.len(),
            "start_up": self.account_before_first.time_account_to_json(),
            "steady": self.account_without_first.time_account_to_json(),
            "steady_median_ns": lengths.get(lengths.len() / 2),
            "unusual": self.numbers_of_unusually_long_iterations(),
            "each": each.collect::<Vec<_>>(),
            "after": self.account_after_last.time_account_to_json(),
        })
    }
}
