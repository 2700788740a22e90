//! Collectives as PyTorch describes them in the arguments of their kernels.

use serde_json::value::RawValue;

use super::event::{EventArguments, as_integer, text};
use crate::model::collectives::CollectiveKernelCall;
use crate::model::interned_names::TraceNames;

/// Bytes of an element by the name of its type.
const ELEMENT_TYPE_BYTES: &[(&str, u64)] = &[
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

/// Reads the collective that a kernel's arguments describe, if they do.
pub(super) fn read_collective_call(
    arguments: &EventArguments<'_>,
    names: &mut TraceNames,
) -> Option<CollectiveKernelCall> {
    let name = text(arguments.collective?);
    let written = |value: Option<&RawValue>| value.map(|value| text(value).into_owned());
    let element = written(arguments.element).unwrap_or_default();
    let size =
        ELEMENT_TYPE_BYTES.iter().find(|(name, _)| *name == element).map_or(0, |&(_, size)| size);
    let bytes = |value: Option<&RawValue>| {
        as_integer(value).unwrap_or(0).max(0).cast_unsigned().saturating_mul(size)
    };
    let group = [written(arguments.group_name), written(arguments.group_ranks)];
    let group: Vec<String> = group.into_iter().flatten().collect();
    Some(CollectiveKernelCall {
        name: names.intern_text(&name),
        group: names.intern_text(&group.join(" ")),
        ranks: as_integer(arguments.group_size).and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        bytes_in: bytes(arguments.elements_in),
        bytes_out: bytes(arguments.elements_out),
    })
}
