//! Metrics that Nsight Compute measured for single launches.

use std::collections::BTreeMap;

use super::gpu::LaunchShape;
use super::interned_names::NameId;

/// One kernel launch that Nsight Compute profiled.
#[derive(Debug, Clone)]
pub struct ProfiledLaunch {
    /// Id of the launch in the report.
    pub id: String,
    pub kernel: NameId,
    /// Grid and block of the launch, as far as the report contains them.
    pub shape: LaunchShape,
    /// Device and compute capability, as written in the report.
    pub device: String,
    /// Metrics of the launch by name, with units. A metric without a number is skipped.
    pub metrics: BTreeMap<NameId, KernelMetric>,
    /// Results of the tool's own rules: name and text.
    pub rules: Vec<(NameId, NameId)>,
    /// Source lines at which warps waited, the most sampled first; empty if the report has no
    /// samples or the kernel no line table.
    pub lines: Vec<SourceStalls>,
}

/// Samples of warps that waited at a source line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStalls {
    pub file: NameId,
    /// Number of the source line, counted from 1.
    pub line: u32,
    /// Number of samples in which a warp waited at this line.
    pub samples: u64,
    /// The most frequent stall reason of these samples.
    pub reason: NameId,
}

/// Value of a metric with its unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelMetric {
    /// The number.
    pub value: f64,
    /// Unit of the metric as written, such as `%` or `byte/second`.
    pub unit: NameId,
}
