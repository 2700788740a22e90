//! The JSON fields of a kernelgate recording. A list or field that is missing in the JSON becomes
//! empty or 0.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Deserialize)]
pub struct RecordingJson {
    pub schema: String,
    pub schema_version: u64,
    #[serde(default)]
    pub case: String,
    #[serde(default)]
    pub steps: u64,
    #[serde(default)]
    pub limits: Vec<RecordedTimeLimit>,
    #[serde(default)]
    pub work: RecordedDeclaredWork,
    #[serde(default)]
    pub parts: Vec<RecordedProblemPart>,
    #[serde(default)]
    pub device: RecordedDeviceFacts,
    #[serde(default)]
    pub other_devices: Vec<RecordedDeviceFacts>,
    pub trace: RecordedActivityRows,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedDeclaredWork {
    pub flops: BTreeMap<String, f64>,
    pub read_bytes: f64,
    pub write_bytes: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedProblemPart {
    pub label: String,
    pub range: String,
    pub work: RecordedDeclaredWork,
}

#[derive(Deserialize)]
pub struct RecordedTimeLimit {
    pub by: String,
    pub time_ns: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedDeviceFacts {
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
pub struct RecordedActivityRows {
    pub pid: u32,
    pub names: Vec<String>,
    pub kernels: Vec<RecordedKernelRow>,
    pub copies: Vec<RecordedCopyRow>,
    pub sets: Vec<RecordedMemsetRow>,
    pub calls: Vec<RecordedApiCallRow>,
    pub waits: Vec<RecordedWaitRow>,
    pub ranges: Vec<RecordedRangeRow>,
    pub graph_nodes: Vec<RecordedGraphNodeRow>,
    pub allocations: Vec<RecordedAllocationOrFreeRow>,
    pub page_faults: Vec<RecordedPageFaultRow>,
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
pub struct RecordedApiCallRow {
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
pub struct RecordedRangeRow {
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

/// A recorded page fault of the host, or a recorded group of page faults of a GPU.
#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedPageFaultRow {
    pub start: u64,
    pub end: u64,
    pub count: Option<u64>,
    pub device: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedAllocationOrFreeRow {
    pub time: u64,
    pub on: On,
    pub address: u64,
    pub bytes: i64,
}
