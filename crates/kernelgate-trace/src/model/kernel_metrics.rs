//! Metrics that Nsight Compute measured for single launches.

use std::collections::BTreeMap;

use super::gpu::LaunchShape;
use super::names::NameId;

/// One profiled launch of a kernel.
#[derive(Debug, Clone)]
pub struct ProfiledLaunch {
    /// The id in the report.
    pub id: String,
    /// The kernel.
    pub kernel: NameId,
    /// Grid and block, as far as the report has them.
    pub shape: LaunchShape,
    /// Device and compute capability, as written.
    pub device: String,
    /// Metric by name, with its unit. A metric without a number is skipped.
    pub metrics: BTreeMap<NameId, KernelMetric>,
    /// Results of the tool's own rules: name and text.
    pub rules: Vec<(NameId, NameId)>,
    /// Source lines at which warps waited, those with most samples first; empty where the report
    /// has no samples or the kernel no line table.
    pub lines: Vec<SourceStalls>,
}

/// Samples of warps that waited at a source line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStalls {
    /// The source file.
    pub file: NameId,
    /// The line, counted from 1.
    pub line: u32,
    /// Number of samples in which a warp waited at this line.
    pub samples: u64,
    /// The most frequent stall reason of these samples.
    pub reason: NameId,
}

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelMetric {
    /// The number.
    pub value: f64,
    /// Unit of the metric as written, such as `%` or `byte/second`.
    pub unit: NameId,
}
