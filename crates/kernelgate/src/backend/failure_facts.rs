//! Failures of cases with the facts of typed errors: the fields of the error, by name.

use std::fmt::Display;

use kernelgate_cuda::CaseFailure;
use serde::Serialize;
use serde_json::Value;

/// Makes the record of a failed case from an error: its message as a sentence, and its fields as
/// facts. The error is serialized with a tag `kind`; its other fields are numbers and names. A
/// number that is not finite stays in the sentence alone.
pub fn failure_with_facts(error: &(impl Serialize + Display)) -> CaseFailure {
    let mut failure = CaseFailure::from(error.to_string());
    let Ok(Value::Object(fields)) = serde_json::to_value(error) else { return failure };
    for (name, value) in fields {
        match value {
            Value::String(kind) if name == "kind" => failure.kind = kind,
            Value::String(value) => _ = failure.names.insert(name, value),
            value => failure.numbers.extend(value.as_f64().map(|number| (name, number))),
        }
    }
    failure
}
