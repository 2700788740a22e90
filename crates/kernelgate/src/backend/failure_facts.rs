//! Converts a typed error into the failure of a case, with the error's fields as named facts.

use std::fmt::Display;

use kernelgate_cuda::CaseFailureReason;
use serde::Serialize;
use serde_json::Value;

/// Makes a case failure from an error: its text becomes the message, and its fields become named
/// facts. The error type serializes with the tag `kind`; its other fields are numbers or texts. A
/// number that is NaN or infinite appears only in the message, because JSON cannot represent it.
pub fn case_failure_with_error_fields(error: &(impl Serialize + Display)) -> CaseFailureReason {
    let mut failure = CaseFailureReason::from(error.to_string());
    let Ok(Value::Object(fields)) = serde_json::to_value(error) else { return failure };
    for (name, value) in fields {
        match value {
            Value::String(kind) if name == "kind" => failure.failure_kind = kind,
            Value::String(value) => _ = failure.names_in_failure_sentence.insert(name, value),
            value => failure
                .numbers_in_failure_sentence
                .extend(value.as_f64().map(|number| (name, number))),
        }
    }
    failure
}
