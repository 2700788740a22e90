//! The JSON fields of a recording's file. A list or a field that is missing reads as empty or 0.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Deserialize)]
pub struct RecordingFile {
    pub schema: String,
    pub schema_version: u64,
    #[serde(default)]
    pub case: String,
    #[serde(default)]
    pub steps: u64,
    #[serde(default)]
    pub limits: Vec<LimitRow>,
    #[serde(default)]
    pub work: DeclaredWorkRow,
    #[serde(default)]
    pub parts: Vec<DeclaredPartRow>,
    #[serde(default)]
    pub device: DeviceFactsRow,
    #[serde(default)]
    pub other_devices: Vec<DeviceFactsRow>,
    pub trace: RecordedRows,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct DeclaredWorkRow {
    pub flops: BTreeMap<String, f64>,
    pub read_bytes: f64,
    pub write_bytes: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct DeclaredPartRow {
    pub label: String,
    pub range: String,
    pub work: DeclaredWorkRow,
}

#[derive(Deserialize)]
pub struct LimitRow {
    pub by: String,
    pub time_ns: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct DeviceFactsRow {
    pub id: u32,
    pub name: String,
    pub compute: Option<[u32; 2]>,
    pub multiprocessors: Option<u32>,
    pub threads_per_sm: Option<u32>,
    pub registers_per_sm: Option<u32>,
    pub shared_per_sm: Option<u32>,
    pub blocks_per_sm: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedRows {
    pub pid: u32,
    pub names: Vec<String>,
    pub kernels: Vec<RecordedKernelRow>,
    pub copies: Vec<RecordedCopyRow>,
    pub sets: Vec<RecordedMemsetRow>,
    pub calls: Vec<CallRow>,
    pub waits: Vec<RecordedWaitRow>,
    pub ranges: Vec<RangeRow>,
    pub graph_nodes: Vec<RecordedGraphNodeRow>,
    pub allocations: Vec<RecordedAllocationRow>,
    pub page_faults: Vec<PageFaultRow>,
    pub overhead: Vec<[u64; 2]>,
    pub dropped: u64,
}

#[derive(Deserialize, Default, Clone, Copy)]
#[serde(default)]
pub struct On {
    pub device: u32,
    pub context: u32,
    pub stream: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedKernelRow {
    pub name: u32,
    pub start: u64,
    pub end: u64,
    pub on: On,
    pub correlation: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub registers: u32,
    pub static_shared: u32,
    pub dynamic_shared: u32,
    pub local: u32,
    pub graph_node: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedCopyRow {
    pub start: u64,
    pub end: u64,
    pub on: On,
    pub correlation: u32,
    pub bytes: u64,
    pub kind: u8,
    pub source: u8,
    pub target: u8,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedMemsetRow {
    pub start: u64,
    pub end: u64,
    pub on: On,
    pub correlation: u32,
    pub bytes: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct CallRow {
    pub name: u32,
    pub start: u64,
    pub end: u64,
    pub thread: u32,
    pub correlation: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedWaitRow {
    pub start: u64,
    pub end: u64,
    pub on: On,
    pub correlation: u32,
    pub kind: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RangeRow {
    pub name: u32,
    pub start: u64,
    pub end: u64,
    pub thread: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedGraphNodeRow {
    pub id: u64,
    pub ranges: Vec<u32>,
}

/// A page fault of the host, or a group of faults of a device.
#[derive(Deserialize, Default)]
#[serde(default)]
pub struct PageFaultRow {
    pub start: u64,
    pub end: u64,
    pub count: Option<u64>,
    pub device: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedAllocationRow {
    pub time: u64,
    pub on: On,
    pub address: u64,
    pub bytes: i64,
}
