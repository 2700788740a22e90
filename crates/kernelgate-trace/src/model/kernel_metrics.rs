//! Kernel launches and their metrics as Nsight Compute measured them, one launch at a time.

use std::collections::BTreeMap;

use super::gpu::KernelLaunchShape;
use super::interned_names::InternedNameId;

/// One kernel launch that Nsight Compute profiled.
#[derive(Debug, Clone)]
pub struct NcuProfiledLaunch {
    /// Id of the kernel launch in the Nsight Compute report.
    pub launch_id: String,
    pub kernel_name: InternedNameId,
    /// Grid, block and resources of the launch, as far as the Nsight Compute report contains them.
    pub shape: KernelLaunchShape,
    /// Device name and compute capability, as written in the Nsight Compute report.
    pub device_description: String,
    /// Metrics of the kernel launch by metric name. A metric whose value is not a number is
    /// omitted.
    pub metrics: BTreeMap<InternedNameId, NcuMetricValue>,
    /// Findings of Nsight Compute's own rules: rule name and message.
    pub rule_names_and_messages: Vec<(InternedNameId, InternedNameId)>,
    /// Source lines at which warps stalled, most samples first; empty if the report has no samples
    /// or the kernel has no line table.
    pub lines: Vec<WarpStallsOfSourceLine>,
}

/// Warp-stall samples at one source line of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarpStallsOfSourceLine {
    pub source_file: InternedNameId,
    /// Number of the source line, starting at 1.
    pub line_number: u32,
    /// Number of samples in which a warp was stalled at the source line.
    pub stalled_sample_count: u64,
    /// The most frequent stall reason among the samples of the source line.
    pub main_stall_reason_of_line: InternedNameId,
}

/// Value and unit of a metric of one kernel launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NcuMetricValue {
    /// Numeric value of the Nsight Compute metric.
    pub metric_value: f64,
    /// Unit of the metric as written in the report, such as `%` or `byte/second`.
    pub unit: InternedNameId,
}
