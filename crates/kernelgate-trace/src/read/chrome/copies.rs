//! Parses copy direction and memory kinds from the names of copies in Chrome traces.

use crate::model::gpu::CopiedMemoryKind;

/// Expands a short copy direction: `HtoD` becomes `Host-to-Device`.
pub(super) fn expand_copy_direction(direction: &str) -> &str {
    match direction {
        "HtoD" | "H2D" => "Host-to-Device",
        "DtoH" | "D2H" => "Device-to-Host",
        "DtoD" | "D2D" => "Device-to-Device",
        "HtoH" | "H2H" => "Host-to-Host",
        "PtoP" | "P2P" => "Peer-to-Peer",
        other => other,
    }
}

/// Parses source and target memory kind from a copy's name, such as `Memcpy HtoD (Pageable ->
/// Device)`.
pub(super) fn source_and_target_memory_of_copy(name: &str) -> [CopiedMemoryKind; 2] {
    let kinds = name.split_once('(').map_or("", |(_, kinds)| kinds.trim_end_matches(')'));
    let (source, target) = kinds.split_once("->").unwrap_or(("", ""));
    [source, target].map(|text| match text.trim() {
        "Pageable" => CopiedMemoryKind::Pageable,
        "Pinned" => CopiedMemoryKind::Pinned,
        "Device" => CopiedMemoryKind::DeviceMemory,
        "Array" => CopiedMemoryKind::CudaArray,
        "Managed" | "Unified" => CopiedMemoryKind::Managed,
        _ => CopiedMemoryKind::Unknown,
    })
}
