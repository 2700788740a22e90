//! Recording of a case. Defines the recording of a case in a response, which can also be a file
//! that the crate `kernelgate_trace` reads.

use kernelgate_cuda::observe::activity::{CuptiRecordedActivity, RecordedDeviceLimits};
use serde::{Deserialize, Serialize};

use crate::measure::limits::ShortestLaunchTime;
use crate::measure::plausibility;
use crate::record::file::RecordFileType;
use crate::record::{DeclaredWorkRecord, ThroughputItemUnit};

/// CUPTI's recording of the process and the GPU during consecutive launches of one case, with a
/// single wait at the end.
///
/// Named ranges in the recording: the case id around all, `step` around each launch, `reset` around
/// the state's reset before a launch, and `wait` at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CuptiCaseRecording {
    /// Id of the case.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Launches before.
    #[serde(rename = "warm_up")]
    pub warm_up_launches: u32,
    /// Number of launches that CUPTI recorded.
    #[serde(rename = "steps")]
    pub recorded_launches: u32,
    /// Host time from before the first recorded launch until the wait for the last launch has
    /// ended, nanoseconds.
    #[serde(rename = "wall_ns")]
    pub recorded_launches_wall_ns: u64,
    /// Host time that CUPTI's recording adds to a launch, nanoseconds: median difference between
    /// series of empty kernels with and without recording.
    #[serde(rename = "launch_cost_ns")]
    pub cupti_overhead_per_launch_ns: Option<f64>,
    /// Shortest times of a launch by each measured ceiling of the device, with hot caches.
    pub limits: Vec<ShortestLaunchTime>,
    /// Declared bytes and operations of one launch of the recorded case.
    #[serde(default)]
    pub work: DeclaredWorkRecord,
    /// Number of data items (for example images or tokens) that one launch computes, from which
    /// throughput is derived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "samples")]
    pub items_per_launch: Option<u64>,
    /// Unit of the data items in which the throughput is stated.
    #[serde(default, skip_serializing_if = "ThroughputItemUnit::is_default_unit")]
    pub sample_unit: ThroughputItemUnit,
    /// Parts of the recorded network that get rows in the tables of the profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<RecordedNetworkPart>,
    /// Times of the stages inside the case's kernels, if its implementation names stages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<KernelStageCycles>,
    /// Device memory of the recorded case, bytes by purpose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "memory_uses")]
    pub memory_bytes_by_purpose: Vec<(String, u64)>,
    /// The GPU on which the recorded case ran; the first one if it ran on several.
    pub device: RecordedDeviceLimits,
    /// Further GPUs on which the recorded case ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_devices: Vec<RecordedDeviceLimits>,
    /// Operations and calls that CUPTI recorded during the launches, and allocations since the
    /// preparation of the case began.
    pub trace: CuptiRecordedActivity,
}

/// One part of the recorded network, as in [`crate::workload::ProblemPartForProfile`], with the
/// shortest times that this device's ceilings allow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedNetworkPart {
    /// Name of the profile table in which the network part is a row.
    #[serde(rename = "table")]
    pub profile_table: String,
    /// Name of the network part in tables.
    #[serde(rename = "label")]
    pub part_label: String,
    /// Ending by which the recorded ranges of this network part are found: the end of their paths.
    #[serde(rename = "range")]
    pub range_path_ending: String,
    /// Shortest times of the network part's declared work in one launch, by each measured ceiling,
    /// with hot caches.
    pub limits: Vec<ShortestLaunchTime>,
    /// Declared bytes and operations of the network part in one launch.
    #[serde(default)]
    pub work: DeclaredWorkRecord,
}

/// Durations of the stages inside a kernel, measured by GPU clock reads in the kernel. Stage times
/// come from separate launches, after the recorded ones, of an instrumented build of the same
/// kernel source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelStageCycles {
    /// Name of the instrumented kernel.
    #[serde(rename = "kernel")]
    pub kernel_name: String,
    /// Names of the stages inside the kernel.
    #[serde(rename = "names")]
    pub stage_names: Vec<String>,
    /// Number of launches over which the cycles of the stages were summed.
    #[serde(rename = "launches")]
    pub summed_launches: u32,
    /// Clock cycles of the stages, summed over these launches: one list for each thread block, with
    /// one number for each stage.
    #[serde(rename = "cycles")]
    pub stage_cycles_by_block: Vec<Vec<u64>>,
}

impl CuptiCaseRecording {
    /// Name of the range that surrounds each recorded launch.
    pub const RANGE_NAME_OF_LAUNCH: &str = "step";
}

impl RecordFileType for CuptiCaseRecording {
    const SCHEMA: &'static str = "kernelgate-recording";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "recording";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &["names"];
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] = &[
        "kernels",
        "copies",
        "sets",
        "calls",
        "waits",
        "ranges",
        "graph_nodes",
        "allocations",
        "overhead",
    ];

    fn check_record_plausible(&self) -> Result<(), String> {
        plausibility::check_count_plausible("wall_ns", self.recorded_launches_wall_ns)?;
        self.cupti_overhead_per_launch_ns
            .map_or(Ok(()), plausibility::check_overhead_ns_plausible)?;
        self.items_per_launch
            .map_or(Ok(()), |count| plausibility::check_count_plausible("samples", count))?;
        let parts = self.parts.iter().flat_map(|part| &part.limits);
        self.limits
            .iter()
            .chain(parts)
            .try_for_each(ShortestLaunchTime::check_limit_time_plausible)?;
        let parts = self.parts.iter().map(|part| &part.work);
        parts
            .chain([&self.work])
            .try_for_each(DeclaredWorkRecord::check_declared_work_plausible)?;
        for (memory_use, bytes) in &self.memory_bytes_by_purpose {
            plausibility::check_bytes_plausible(memory_use, *bytes)?;
        }
        for cycles in
            self.stages.iter().flat_map(|stages| stages.stage_cycles_by_block.iter().flatten())
        {
            plausibility::check_count_plausible("cycles of a stage", *cycles)?;
        }
        let count = self.trace.interned_names.len();
        match self.trace.kernels.iter().find(|kernel| kernel.name_index as usize >= count) {
            Some(kernel) => Err(format!("a kernel of name {} of {count}", kernel.name_index)),
            None => Ok(()),
        }
    }
}
