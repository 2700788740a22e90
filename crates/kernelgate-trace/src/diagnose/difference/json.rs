//! Formats a difference of two traces as JSON, for programs. Lists with two entries contain the
//! values of the first and the second trace.

use serde_json::{Value, json};

use super::{
    FunctionCallChange, RangePathChange, SetupPropertyChange, TraceDifference, TracePartChange,
};

/// Version of the JSON format; it is raised when a field changes its meaning. The schema of the
/// format is `schema/difference.json` of this crate.
pub const DIFFERENCE_SCHEMA: u32 = 2;

impl TraceDifference {
    /// Converts the difference to JSON, with `schema_version`.
    pub fn to_json(&self) -> Value {
        let [base, head] = &self.wholes;
        let findings = |found: &[(&str, String)]| -> Vec<Value> {
            found.iter().map(|(id, title)| json!({ "id": id, "title": title })).collect()
        };
        json!({
            "schema_version": DIFFERENCE_SCHEMA,
            "setup": self.setup.iter().map(setup_json).collect::<Vec<_>>(),
            "other_machine": self.is_other_machine(),
            "recorders": [base.recorder, head.recorder],
            "whole_ns": [base.whole_ns, head.whole_ns],
            "busy_ns": [base.busy_ns, head.busy_ns],
            "kernels": [base.kernels, head.kernels],
            "change_ns": self.total_change_ns(),
            "unexplained_ns": self.unexplained_idle_ns(),
            "kernel_kinds": self.kernel_time_by_class().iter().map(|(kind, total_ns)| {
                json!({ "kind": kind.label(), "total_ns": total_ns })
            }).collect::<Vec<_>>(),
            "parts": self.parts.iter().map(part_json).collect::<Vec<_>>(),
            "ranges": self.places.iter().map(path_json).collect::<Vec<_>>(),
            "calls": self.calls.iter().map(calls_json).collect::<Vec<_>>(),
            "findings_only_in": self.findings.each_ref().map(|found| findings(found)),
            "notes": self.notes,
        })
    }
}

fn setup_json(change: &SetupPropertyChange) -> Value {
    json!({
        "property": change.property.label(),
        "name": Some(&change.name).filter(|name| !name.is_empty()),
        "values": change.values,
    })
}

fn part_json(change: &TracePartChange) -> Value {
    let amounts = change.amounts.each_ref();
    json!({
        "key": format!("{}:{}", change.part.kind.label(), change.part.name),
        "kind": change.part.kind.label(),
        "name": change.part.name,
        "change": change.change().label(),
        "count": amounts.map(|amount| amount.count),
        "total_ns": amounts.map(|amount| amount.total_ns),
        "own_ns": amounts.map(|amount| amount.own_ns),
        "change_ns": change.total_change_ns(),
        "by_number_ns": change.change_by_count_ns(),
        "by_length_ns": change.change_by_length_ns(),
        "evidence": change.describe_launch_changes(),
    })
}

fn path_json(change: &RangePathChange) -> Value {
    let places = change.places.each_ref();
    json!({
        "range": change.path,
        "ranges": places.map(|place| place.ranges),
        "host_ns": places.map(|place| place.host_ns),
        "operations": places.map(|place| place.launched.count),
        "own_ns": places.map(|place| place.launched.own_ns),
        "change_ns": change.total_change_ns(),
    })
}

fn calls_json(change: &FunctionCallChange) -> Value {
    json!({
        "function": change.site.function,
        "range": change.site.range,
        "waits": change.calls.iter().any(|calls| calls.wait),
        "count": change.calls.map(|calls| calls.count),
        "total_ns": change.calls.map(|calls| calls.total_ns),
        "change_ns": change.total_change_ns(),
    })
}
