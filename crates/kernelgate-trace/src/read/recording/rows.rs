//! The JSON fields of a kernelgate recording. A list or field that is missing in the JSON becomes
//! empty or 0.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Deserialize)]
pub struct RecordingJson {
    #[serde(rename = "schema")]
    pub schema_name: String,
    pub schema_version: u64,
    #[serde(default)]
    #[serde(rename = "case")]
    pub case_id: String,
    #[serde(default)]
    #[serde(rename = "steps")]
    pub launch_count: u64,
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
    #[serde(rename = "flops")]
    pub flops_by_unit_and_dtype: BTreeMap<String, f64>,
    pub read_bytes: f64,
    pub write_bytes: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedProblemPart {
    #[serde(rename = "label")]
    pub part_name: String,
    #[serde(rename = "range")]
    pub range_path_suffix: String,
    pub work: RecordedDeclaredWork,
}

#[derive(Deserialize)]
pub struct RecordedTimeLimit {
    #[serde(rename = "by")]
    pub limiting_resource: String,
    #[serde(rename = "time_ns")]
    pub min_time_ns: f64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedDeviceFacts {
    #[serde(rename = "id")]
    pub device_ordinal: u32,
    #[serde(rename = "name")]
    pub device_name: String,
    pub compute: Option<[u32; 2]>,
    pub multiprocessors: Option<u32>,
    pub threads_per_sm: Option<u32>,
    pub registers_per_sm: Option<u32>,
    #[serde(rename = "shared_per_sm")]
    pub shared_bytes_per_sm: Option<u32>,
    pub blocks_per_sm: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedActivityRows {
    pub pid: u32,
    pub names: Vec<String>,
    pub kernels: Vec<RecordedKernelRow>,
    pub copies: Vec<RecordedCopyRow>,
    #[serde(rename = "sets")]
    pub memsets: Vec<RecordedMemsetRow>,
    pub calls: Vec<RecordedApiCallRow>,
    pub waits: Vec<RecordedWaitRow>,
    pub ranges: Vec<RecordedRangeRow>,
    pub graph_nodes: Vec<RecordedGraphNodeRow>,
    pub allocations: Vec<RecordedAllocationOrFreeRow>,
    pub page_faults: Vec<RecordedPageFaultRow>,
    pub overhead: Vec<[u64; 2]>,
    #[serde(rename = "dropped")]
    pub dropped_record_count: u64,
}

#[derive(Deserialize, Default, Clone, Copy)]
#[serde(default)]
pub struct RecordedDeviceContextAndStream {
    pub device: u32,
    pub context: u32,
    pub stream: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedKernelRow {
    #[serde(rename = "name")]
    pub name_index: u32,
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    pub on: RecordedDeviceContextAndStream,
    pub correlation: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    #[serde(rename = "registers")]
    pub registers_per_thread: u32,
    #[serde(rename = "static_shared")]
    pub static_shared_bytes: u32,
    #[serde(rename = "dynamic_shared")]
    pub dynamic_shared_bytes: u32,
    #[serde(rename = "local")]
    pub local_bytes_per_thread: u32,
    pub graph_node: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedCopyRow {
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    pub on: RecordedDeviceContextAndStream,
    pub correlation: u32,
    #[serde(rename = "bytes")]
    pub copied_bytes: u64,
    #[serde(rename = "kind")]
    pub cupti_copy_kind: u8,
    #[serde(rename = "source")]
    pub cupti_source_memory_kind: u8,
    #[serde(rename = "target")]
    pub cupti_target_memory_kind: u8,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedMemsetRow {
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    pub on: RecordedDeviceContextAndStream,
    pub correlation: u32,
    #[serde(rename = "bytes")]
    pub set_bytes: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedApiCallRow {
    #[serde(rename = "name")]
    pub name_index: u32,
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    #[serde(rename = "thread")]
    pub thread_id: u32,
    pub correlation: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedWaitRow {
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    pub on: RecordedDeviceContextAndStream,
    pub correlation: u32,
    #[serde(rename = "kind")]
    pub cupti_synchronization_type: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedRangeRow {
    #[serde(rename = "name")]
    pub name_index: u32,
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    #[serde(rename = "thread")]
    pub thread_id: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedGraphNodeRow {
    #[serde(rename = "id")]
    pub graph_node_id: u64,
    #[serde(rename = "ranges")]
    pub range_name_indices: Vec<u32>,
}

/// A recorded page fault of the host, or a recorded group of page faults of a GPU.
#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedPageFaultRow {
    #[serde(rename = "start")]
    pub start_ns: u64,
    #[serde(rename = "end")]
    pub end_ns: u64,
    #[serde(rename = "count")]
    pub fault_count: Option<u64>,
    pub device: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct RecordedAllocationOrFreeRow {
    #[serde(rename = "time")]
    pub time_ns: u64,
    pub on: RecordedDeviceContextAndStream,
    pub address: u64,
    #[serde(rename = "bytes")]
    pub bytes_negative_if_freed: i64,
}
