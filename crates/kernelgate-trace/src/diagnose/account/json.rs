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
            .idle
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
    /// Converts to JSON.
    pub fn iterations_to_json(&self) -> Value {
        let ranges = self.ranges.iter().map(|range| {
            json!({ "range": range.path, "depth": range.depth, "time": range.account.time_account_to_json() })
        });
        let transfers = self.transfers.iter().map(|of| {
            json!({
                "class": of.class.printed_operation_class(),
                "kind": of.label,
                "count": of.count,
                "total_ns": of.total_ns,
                "exposed_ns": of.exposed_ns,
                "bytes": (of.bytes > 0).then_some(of.bytes),
                "bus_gb_s": of.bus,
                "on_compute_streams": of.beside_compute,
            })
        });
        json!({
            "process": self.pid,
            "device": self.device,
            "time": self.total.time_account_to_json(),
            "iterations": self.iterations.as_ref().map(IterationsOnGpu::gpu_time_account_to_json),
            "transfers": transfers.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
        })
    }
}

impl IterationsOnGpu {
    fn gpu_time_account_to_json(&self) -> Value {
        let each = self.each.iter().map(
            |of| json!({ "start": of.span.0, "end": of.span.1, "time": of.account.time_account_to_json() }),
        );
        let lengths = self.sorted_lengths_without_first();
        json!({
            "found_by": self.sign.printed_iteration_evidence(),
            "count": self.lengths.len(),
            "start_up": self.before.time_account_to_json(),
            "steady": self.steady.time_account_to_json(),
            "steady_median_ns": lengths.get(lengths.len() / 2),
            "unusual": self.numbers_of_unusually_long_iterations(),
            "each": each.collect::<Vec<_>>(),
            "after": self.after.time_account_to_json(),
        })
    }
}
