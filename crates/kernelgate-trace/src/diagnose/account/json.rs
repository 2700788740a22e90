//! Accounts for programs.

use serde_json::{Map, Value, json};

use super::{GpuTimeAccount, IterationsOnGpu, ProcessTimeAccountOnGpu};
use crate::analyze::timeline::BusyTimeCategoryOfGpu;

impl GpuTimeAccount {
    /// Converts the account to a JSON object: nanoseconds of each line, which add up to `total_ns`.
    pub fn time_account_to_json(&self) -> Value {
        let busy: Map<String, Value> = BusyTimeCategoryOfGpu::ALL_BUSY_TIME_CATEGORIES
            .iter()
            .map(|&line| {
                (line.busy_category_json_key().to_owned(), self.busy_ns_of_category(line).into())
            })
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
    /// Converts the process's time accounts, iterations and transfers to JSON.
    pub fn process_account_to_json(&self) -> Value {
        let ranges = self.range_path_accounts.iter().map(|range| {
            json!({ "range": range.range_path, "depth": range.enclosing_range_count, "time": range.account.time_account_to_json() })
        });
        let transfers = self.transfers.iter().map(|of| {
            json!({
                "class": of.transfer_class.printed_operation_class(),
                "kind": of.transfer_label,
                "count": of.transfer_count,
                "total_ns": of.total_transfer_ns,
                "exposed_ns": of.exposed_transfer_ns,
                "bytes": (of.recorded_transfer_bytes > 0).then_some(of.recorded_transfer_bytes),
                "bus_gb_s": of.collective_bus_gb_per_s,
                "on_compute_streams": of.transfer_count_on_compute_streams,
            })
        });
        json!({
            "process": self.pid,
            "device": self.gpu_ordinal,
            "time": self.whole_trace_account.time_account_to_json(),
            "iterations": self.iterations.as_ref().map(IterationsOnGpu::iteration_accounts_to_json),
            "transfers": transfers.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
        })
    }
}

impl IterationsOnGpu {
    fn iteration_accounts_to_json(&self) -> Value {
        let each = self.listed_iterations.iter().map(
            |of| json!({ "start": of.iteration_start_and_end_ns.0, "end": of.iteration_start_and_end_ns.1, "time": of.account.time_account_to_json() }),
        );
        let lengths = self.sorted_iteration_lengths_without_first();
        json!({
            "found_by": self.evidence.printed_iteration_evidence(),
            "count": self.iteration_lengths_ns.len(),
            "start_up": self.account_before_first_iteration.time_account_to_json(),
            "steady": self.account_without_first_iteration.time_account_to_json(),
            "steady_median_ns": lengths.get(lengths.len() / 2),
            "unusual": self.numbers_of_unusually_long_iterations(),
            "each": each.collect::<Vec<_>>(),
            "after": self.account_after_last_iteration.time_account_to_json(),
        })
    }
}
