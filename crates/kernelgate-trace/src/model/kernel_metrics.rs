//! What Nsight Compute measured of single launches.

use std::collections::BTreeMap;

use super::gpu::LaunchShape;
use super::names::Name;

/// One profiled launch of a kernel.
#[derive(Debug, Clone)]
pub struct ProfiledLaunch {
    /// The id in the report.
    pub id: String,
    /// The kernel.
    pub kernel: Name,
    /// Grid and block, as far as the report has them.
    pub shape: LaunchShape,
    /// Device and compute capability, as written.
    pub device: String,
    /// Metric by name, with its unit. A metric without a number is left out.
    pub metrics: BTreeMap<Name, Metric>,
    /// What the tool's own rules say: name and text.
    pub rules: Vec<(Name, Name)>,
}

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    /// The number.
    pub value: f64,
    /// Its unit as written, such as `%` or `byte/second`.
    pub unit: Name,
}
