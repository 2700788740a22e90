//! Formats the difference of two traces as JSON for other programs. Lists of two values contain the
//! value of the first trace and the value of the second trace.

use serde_json::{Value, json};

use super::{
    DifferenceOfTwoTraces, DifferingSetupProperty, FunctionCallsInBothTraces,
    RangePathTimesOfBothTraces, TracePartComparison,
};

/// Version of this JSON format; the version is raised when a field changes its meaning. The JSON
/// schema of the format is `schema/difference.json` of this crate.
pub const DIFFERENCE_JSON_SCHEMA_VERSION: u32 = 2;

impl DifferenceOfTwoTraces {
    /// Converts the difference of two traces to JSON, with the field `schema_version`.
    pub fn difference_to_json(&self) -> Value {
        let [base, head] = &self.wholes;
        let findings = |found: &[(&str, String)]| -> Vec<Value> {
            found.iter().map(|(id, title)| json!({ "id": id, "title": title })).collect()
        };
        json!({
            "schema_version": DIFFERENCE_JSON_SCHEMA_VERSION,
            "setup": self.setup_changes.iter().map(setup_change_to_json).collect::<Vec<_>>(),
            "other_machine": self.are_machines_different(),
            "recorders": [base.recorder_program, head.recorder_program],
            "whole_ns": [base.summed_whole_time_ns, head.summed_whole_time_ns],
            "busy_ns": [base.summed_gpu_busy_ns, head.summed_gpu_busy_ns],
            "kernels": [base.kernel_count, head.kernel_count],
            "change_ns": self.whole_time_change_ns(),
            "unexplained_ns": self.change_of_unexplained_idle_ns(),
            "kernel_kinds": self.kernel_time_of_both_by_work_class().iter().map(|(kind, total_ns)| {
                json!({ "kind": kind.printed_work_class_label(), "total_ns": total_ns })
            }).collect::<Vec<_>>(),
            "parts": self.part_changes.iter().map(part_change_to_json).collect::<Vec<_>>(),
            "ranges": self.range_path_changes.iter().map(range_path_change_to_json).collect::<Vec<_>>(),
            "calls": self.host_call_changes.iter().map(call_change_to_json).collect::<Vec<_>>(),
            "findings_only_in": self.findings.each_ref().map(|found| findings(found)),
            "notes": self.comparability_notes,
        })
    }
}

fn setup_change_to_json(change: &DifferingSetupProperty) -> Value {
    json!({
        "property": change.property.label_and_json_key(),
        "name": Some(&change.recorder_option_name).filter(|name| !name.is_empty()),
        "values": change.values,
    })
}

fn part_change_to_json(change: &TracePartComparison) -> Value {
    let amounts = change.amounts.each_ref();
    json!({
        "key": format!("{}:{}", change.part.kind.printed_trace_part_kind(), change.part.part_name),
        "kind": change.part.kind.printed_trace_part_kind(),
        "name": change.part.part_name,
        "change": change.kind_of_part_change().printed_change_label(),
        "count": amounts.map(|amount| amount.operation_count),
        "total_ns": amounts.map(|amount| amount.total_operation_ns),
        "own_ns": amounts.map(|amount| amount.exclusive_ns),
        "change_ns": change.exclusive_time_change_ns(),
        "by_number_ns": change.change_due_to_operation_count_ns(),
        "by_length_ns": change.change_due_to_operation_length_ns(),
        "evidence": change.describe_launch_shape_and_metric_changes(),
    })
}

fn range_path_change_to_json(change: &RangePathTimesOfBothTraces) -> Value {
    let places = change.places.each_ref();
    json!({
        "range": change.range_path,
        "ranges": places.map(|place| place.range_count),
        "host_ns": places.map(|place| place.host_range_ns),
        "operations": places.map(|place| place.launched_operations.operation_count),
        "own_ns": places.map(|place| place.launched_operations.exclusive_ns),
        "change_ns": change.launched_time_change_ns(),
    })
}

fn call_change_to_json(change: &FunctionCallsInBothTraces) -> Value {
    json!({
        "function": change.site.function_name,
        "range": change.site.innermost_range_path,
        "waits": change.calls.iter().any(|calls| calls.waits_for_gpu),
        "count": change.calls.map(|calls| calls.calls),
        "total_ns": change.calls.map(|calls| calls.total_call_ns),
        "change_ns": change.host_call_time_change_ns(),
    })
}
