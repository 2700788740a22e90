//! A diagnosis as JSON has the form that `schema/diagnosis.json` describes.

use crate::fixture::NsysExport;
use crate::fixture::kineto::{A100_FILLING_KERNEL, KernelPlaceAndShape, KinetoTrace};
use kernelgate_trace::diagnose::diagnose_trace_in_memory;
use kernelgate_trace::diagnose::difference::{SummedTimesOfTrace, compare_summed_traces};
use kernelgate_trace::diagnose::ranks::{TraceOfRank, join_ranks_to_job};
use serde_json::Value;

const DIAGNOSIS_JSON_SCHEMA: &str = include_str!("../../../schema/diagnosis.json");
const JOB_JSON_SCHEMA: &str = include_str!("../../../schema/job.json");
const DIFFERENCE_JSON_SCHEMA: &str = include_str!("../../../schema/difference.json");

/// Collects the paths at which a value violates a JSON schema, for those schema keywords that
/// kernelgate's schemas use.
fn collect_schema_violations(
    schema: &Value,
    value: &Value,
    root: &Value,
    path: &str,
    errors: &mut Vec<String>,
) {
    if let Some(reference) = schema["$ref"].as_str() {
        let definition = root.pointer(&reference[1..]).unwrap();
        return collect_schema_violations(definition, value, root, path, errors);
    }
    if let Some(expected) = schema.get("const").filter(|expected| *expected != value) {
        errors.push(format!("{path}: {value}, not {expected}"));
    }
    if let Some(words) = schema["enum"].as_array().filter(|words| !words.contains(value)) {
        errors.push(format!("{path}: {value}, not one of {words:?}"));
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(some) => some.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let fits = kinds.contains(&kind) || (kind == "integer" && kinds.contains(&"number"));
    if !kinds.is_empty() && !fits {
        errors.push(format!("{path}: {value}, not {kinds:?}"));
    }
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        collect_schema_violations(&schema["items"], item, root, &format!("{path}/{index}"), errors);
    }
    let Some(members) = value.as_object() else { return };
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !members.contains_key(name) {
            errors.push(format!("{path}: no {name}"));
        }
    }
    for (name, member) in members {
        match schema["properties"].get(name) {
            Some(known) => {
                collect_schema_violations(known, member, root, &format!("{path}/{name}"), errors)
            }
            None if schema["additionalProperties"] == false => {
                errors.push(format!("{path}: {name} is not described"));
            }
            None => {}
        }
    }
}

fn schema_violations(schema: &str, value: &Value) -> Vec<String> {
    let schema: Value = serde_json::from_str(schema).unwrap();
    let mut errors = Vec::new();
    collect_schema_violations(&schema, value, &schema, "", &mut errors);
    errors
}

#[test]
fn every_diagnosis_fits_the_schema() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..300 {
        let start = f64::from(step) * 40.0;
        trace.add_launch(
            start,
            (start + 20.0, 4.0),
            "k",
            KernelPlaceAndShape { grid_blocks: 5, ..A100_FILLING_KERNEL },
        );
        if step % 10 == 0 {
            trace.add_api_call((start + 10.0, 9.0), "cudaDeviceSynchronize");
        }
    }
    let id = trace.add_api_call((20_000.0, 5.0), "cudaMemcpyAsync");
    trace.add_memory_copy(id, (20_010.0, 900.0), "HtoD (Pageable -> Device)", 1000);
    let mut export = NsysExport::new();
    export.add_nvtx_range(1_000, Some(50_000), 59, "step");
    export.add_launch((1_100, 1_200), (2_000, 9_000), 1, "k");
    export.add_launch((40_000, 41_000), (90_000, 99_000), 2, "k");
    export.add_kernel(7, (200_000, 300_000), 77, "orphan");
    let network = crate::network::read_fixture_trace("transformer_training_h100.json.gz");
    let traces = [
        trace.read_as_trace(),
        export.read_as_trace().unwrap(),
        NsysExport::new().read_as_trace().unwrap(),
        network,
    ];
    for trace in &traces {
        let json = diagnose_trace_in_memory(trace).diagnosis_to_json();
        assert_eq!(schema_violations(DIAGNOSIS_JSON_SCHEMA, &json), Vec::<String>::new());
        let keys: Vec<&str> = json["findings"]
            .as_array()
            .unwrap()
            .iter()
            .map(|finding| finding["key"].as_str().unwrap())
            .collect();
        let mut different = keys.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), keys.len(), "{keys:?}");
    }
}

#[test]
fn a_job_and_a_difference_fit_their_schemas() {
    let all_reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)";
    let rank = |compute: f64| {
        let mut trace = KinetoTrace::a100_trace();
        for step in 0..4 {
            let start = f64::from(step) * 1_000.0;
            trace.add_launch(start, (start + 10.0, compute), "gemm", A100_FILLING_KERNEL);
            trace.add_launch(
                start + 5.0,
                (start + 10.0 + compute, 890.0 - compute),
                all_reduce,
                A100_FILLING_KERNEL,
            );
        }
        trace.read_as_trace()
    };
    let parts = [300.0, 800.0]
        .map(|of| TraceOfRank::split_trace_into_ranks(&format!("rank {of}"), rank(of)));
    let job = join_ranks_to_job(parts.into_iter().flatten().collect()).job_to_json();
    assert_eq!(schema_violations(JOB_JSON_SCHEMA, &job), Vec::<String>::new());
    assert_eq!((&job["joined"], &job["stragglers"][0]), (&4.into(), &"rank 800".into()));
    let sums = [300.0, 800.0].map(|of| SummedTimesOfTrace::sum_times_of_loaded_trace(&rank(of)));
    let [base, head] = sums;
    let difference = compare_summed_traces(base, head).difference_to_json();
    assert_eq!(schema_violations(DIFFERENCE_JSON_SCHEMA, &difference), Vec::<String>::new());
    assert!(difference["parts"][0]["key"].as_str().is_some_and(|key| key.contains("gemm")));
}

#[test]
fn the_schema_refuses_undeclared_fields() {
    let mut json =
        diagnose_trace_in_memory(&KinetoTrace::trace_of_a100_with_kernel()).diagnosis_to_json();
    json["findings"] = serde_json::json!([{ "id": "gaps" }]);
    json["devices"][0]["busy"] = 5.into();
    json["schema_version"] = 9.into();
    insta::assert_snapshot!(schema_violations(DIAGNOSIS_JSON_SCHEMA, &json).join("\n"), @r"
    /devices/0: busy is not described
    /findings/0: no key
    /findings/0: no severity
    /findings/0: no confidence
    /findings/0: no title
    /findings/0: no measured
    /findings/0: no threshold
    /findings/0: no recoverable_ns
    /findings/0: no replayed_ns
    /findings/0: no replayed_further_ns
    /findings/0: no evidence
    /findings/0: no advice
    /findings/0: no false_positive
    /schema_version: 9, not 2
    ");
}
