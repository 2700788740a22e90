//! Recording of a case. A recording may also be a file of its own, which `kernelgate_trace` reads.

use kernelgate_cuda::observe::activity::{RecordedActivity, RecordedDevice};
use serde::{Deserialize, Serialize};

use crate::measure::limits::TimeLimit;
use crate::measure::plausibility;
use crate::record::file::RecordType;
use crate::record::{SampleUnit, WorkRecord};

/// Recorded activity of the process and the GPU during consecutive launches of a case, with one
/// wait at the end.
///
/// Ranges: the case's id around all; `step` around each launch; `reset` around the restoring of
/// state before it; `wait` at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRecording {
    /// Id of the case.
    pub case: String,
    /// Launches before.
    pub warm_up: u32,
    /// Launches that were recorded.
    pub steps: u32,
    /// Host time from before the first launch to the end of the wait, nanoseconds.
    pub wall_ns: u64,
    /// Host time that recording adds to a launch, nanoseconds: the median over pairs of launch
    /// series of an empty kernel, with and without recording.
    pub launch_cost_ns: Option<f64>,
    /// The least times of a launch by the device's measured ceilings, hot.
    pub limits: Vec<TimeLimit>,
    /// Declared work of one launch of the recorded case.
    #[serde(default)]
    pub work: WorkRecord,
    /// Number of samples that a launch computes, for a throughput.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
    /// Unit of the samples in which throughput is stated.
    #[serde(default, skip_serializing_if = "SampleUnit::is_default_unit")]
    pub sample_unit: SampleUnit,
    /// Parts of the network that have rows in tables of the profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<RecordedPart>,
    /// Stages inside the case's kernels, if their rows name stages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<RecordedStages>,
    /// Device memory of the case by purpose, bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_uses: Vec<(String, u64)>,
    /// The device on which the case ran; the first device, if it ran on several.
    pub device: RecordedDevice,
    /// Further GPUs on which the case ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_devices: Vec<RecordedDevice>,
    /// Recorded operations, and the allocations since the preparation began.
    pub trace: RecordedActivity,
}

/// One part of a problem, as in [`crate::workload::BreakdownPart`], with the ceiling that limits it
/// on this device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedPart {
    /// Table of the part.
    pub table: String,
    /// Name of the problem's part in tables.
    pub label: String,
    /// End of the paths of the part's ranges.
    pub range: String,
    /// The least times of the declared work in one launch, hot.
    pub limits: Vec<TimeLimit>,
    /// Declared work of the problem's part in one launch.
    #[serde(default)]
    pub work: WorkRecord,
}

/// Times of the stages of a kernel, measured by clocks inside the kernel. The stage times come from
/// launches of another build of the same source, after the recorded launches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedStages {
    /// The kernel.
    pub kernel: String,
    /// Stages of the kernel.
    pub names: Vec<String>,
    /// Number of launches whose stages were counted.
    pub launches: u32,
    /// Cycles of each stage in each thread block over all counted launches: by block, then by
    /// stage.
    pub cycles: Vec<Vec<u64>>,
}

impl CaseRecording {
    /// Name of the range around each recorded launch.
    pub const LAUNCH_RANGE: &str = "step";
}

impl RecordType for CaseRecording {
    const SCHEMA: &'static str = "kernelgate-recording";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "recording";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["names"];
    const ONE_LINE_FIELDS: &'static [&'static str] = &[
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

    fn validate(&self) -> Result<(), String> {
        plausibility::check_count("wall_ns", self.wall_ns)?;
        self.launch_cost_ns.map_or(Ok(()), plausibility::check_cost_ns)?;
        self.samples.map_or(Ok(()), |count| plausibility::check_count("samples", count))?;
        let parts = self.parts.iter().flat_map(|part| &part.limits);
        self.limits.iter().chain(parts).try_for_each(TimeLimit::validate)?;
        let parts = self.parts.iter().map(|part| &part.work);
        parts.chain([&self.work]).try_for_each(WorkRecord::validate)?;
        for (memory_use, bytes) in &self.memory_uses {
            plausibility::check_bytes(memory_use, *bytes)?;
        }
        for cycles in self.stages.iter().flat_map(|stages| stages.cycles.iter().flatten()) {
            plausibility::check_count("cycles of a stage", *cycles)?;
        }
        let count = self.trace.names.len();
        match self.trace.kernels.iter().find(|kernel| kernel.name as usize >= count) {
            Some(kernel) => Err(format!("a kernel of name {} of {count}", kernel.name)),
            None => Ok(()),
        }
    }
}
