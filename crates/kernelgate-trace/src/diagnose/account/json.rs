//! Accounts for programs.

use serde_json::{Map, Value, json};

use super::{DeviceIterations, DeviceTimeAccount, TimeAccount};
use crate::analyze::timeline::BusyTimeLine;

impl TimeAccount {
    /// Converts to a JSON object: nanoseconds of each line, which add up to `total_ns`.
    pub fn to_json(&self) -> Value {
        let busy: Map<String, Value> = BusyTimeLine::ALL_LINES
            .iter()
            .map(|&line| (line.json_key().to_owned(), self.busy_ns_of_line(line).into()))
            .collect();
        let idle: Map<String, Value> =
            self.idle.iter().map(|(cause, &ns)| (cause.json_key().to_owned(), ns.into())).collect();
        json!({
            "total_ns": self.total_ns(),
            "busy_ns": busy,
            "idle_ns": idle,
            "unclassified_ns": self.unclassified_idle_ns(),
        })
    }
}

impl DeviceTimeAccount {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let ranges = self.ranges.iter().map(|range| {
            json!({ "range": range.path, "depth": range.depth, "time": range.account.to_json() })
        });
        let transfers = self.transfers.iter().map(|of| {
            json!({
                "class": of.class.label(),
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
            "time": self.total.to_json(),
            "iterations": self.iterations.as_ref().map(DeviceIterations::to_json),
            "transfers": transfers.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
        })
    }
}

impl DeviceIterations {
    fn to_json(&self) -> Value {
        let each = self.each.iter().map(
            |of| json!({ "start": of.span.0, "end": of.span.1, "time": of.account.to_json() }),
        );
        let lengths = self.sorted_steady_lengths();
        json!({
            "found_by": self.sign.label(),
            "count": self.lengths.len(),
            "start_up": self.before.to_json(),
            "steady": self.steady.to_json(),
            "steady_median_ns": lengths.get(lengths.len() / 2),
            "unusual": self.unusually_long_iterations(),
            "each": each.collect::<Vec<_>>(),
            "after": self.after.to_json(),
        })
    }
}
