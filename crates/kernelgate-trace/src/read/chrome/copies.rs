//! Directions and memories of copies, by their names.

use crate::model::gpu::MemoryKind;

/// The full direction of a copy, from its short form.
pub(super) fn copy_direction(direction: &str) -> &str {
    match direction {
        "HtoD" | "H2D" => "Host-to-Device",
        "DtoH" | "D2H" => "Device-to-Host",
        "DtoD" | "D2D" => "Device-to-Device",
        "HtoH" | "H2H" => "Host-to-Host",
        "PtoP" | "P2P" => "Peer-to-Peer",
        other => other,
    }
}

/// The memories that a copy reads and writes, as in `Memcpy HtoD (Pageable -> Device)`.
pub(super) fn memories_of_copy(name: &str) -> [MemoryKind; 2] {
    let kinds = name.split_once('(').map_or("", |(_, kinds)| kinds.trim_end_matches(')'));
    let (source, target) = kinds.split_once("->").unwrap_or(("", ""));
    [source, target].map(|text| match text.trim() {
        "Pageable" => MemoryKind::Pageable,
        "Pinned" => MemoryKind::Pinned,
        "Device" => MemoryKind::Device,
        "Array" => MemoryKind::Array,
        "Managed" | "Unified" => MemoryKind::Managed,
        _ => MemoryKind::Unknown,
    })
}
