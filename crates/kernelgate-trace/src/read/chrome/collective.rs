//! Reads the sizes and ranks of a collective from the arguments that PyTorch records with its
//! kernel.

use serde_json::value::RawValue;

use super::event::{ChromeEventArguments, json_value_as_integer, json_value_as_text};
use crate::model::collectives::RecordedCollective;
use crate::model::interned_names::InternedTraceNames;

/// Bytes per element for each data-type name that PyTorch writes.
const BYTES_PER_ELEMENT_OF_TORCH_TYPE: &[(&str, u64)] = &[
    ("Float8_e4m3fn", 1),
    ("Float8_e5m2", 1),
    ("Bool", 1),
    ("Byte", 1),
    ("Char", 1),
    ("Half", 2),
    ("BFloat16", 2),
    ("Short", 2),
    ("Int", 4),
    ("Float", 4),
    ("Long", 8),
    ("Double", 8),
    ("ComplexFloat", 8),
    ("ComplexDouble", 16),
];

/// Reads the collective from the arguments of a kernel event; `None` if the arguments name no
/// collective.
pub(super) fn read_recorded_collective(
    arguments: &ChromeEventArguments<'_>,
    names: &mut InternedTraceNames,
) -> Option<RecordedCollective> {
    let name = json_value_as_text(arguments.collective_name?);
    let written =
        |value: Option<&RawValue>| value.map(|value| json_value_as_text(value).into_owned());
    let element = written(arguments.element_type).unwrap_or_default();
    let size = BYTES_PER_ELEMENT_OF_TORCH_TYPE
        .iter()
        .find(|(name, _)| *name == element)
        .map_or(0, |&(_, size)| size);
    let bytes = |value: Option<&RawValue>| {
        json_value_as_integer(value).unwrap_or(0).max(0).cast_unsigned().saturating_mul(size)
    };
    let group = [written(arguments.group_name), written(arguments.group_ranks)];
    let group: Vec<String> = group.into_iter().flatten().collect();
    Some(RecordedCollective {
        collective_name: names.intern_text(&name),
        communicator_name: names.intern_text(&group.join(" ")),
        ranks: json_value_as_integer(arguments.group_size)
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(0),
        contributed_bytes: bytes(arguments.elements_in),
        received_bytes: bytes(arguments.elements_out),
    })
}
