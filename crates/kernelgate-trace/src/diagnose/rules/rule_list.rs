//! The rules as a list for the reference pages.

use super::super::finding::FindingSeverity;
use super::super::vendor_names::{GpuVendor, TracePlatform};
use crate::model::TraceRecorder;

/// The records without which a rule cannot answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum RequiredRecords {
    /// Any trace.
    Anything,
    /// The rule needs GPU operations and the calls that launch them.
    Launches,
    /// Launch shapes and the description of the device.
    Shapes,
    /// Operations and page faults of managed memory.
    Migrations,
    /// Counters over time.
    Samples,
    /// Counters of single launches, with these options of `ncu`.
    Metrics(&'static str),
    /// Ranges with declared work.
    DeclaredWork,
}

impl RequiredRecords {
    /// The command that records the data on NVIDIA GPUs.
    pub(super) fn recording_command(self) -> String {
        let nsys =
            TracePlatform { vendor: GpuVendor::Nvidia, recorder: TraceRecorder::NsightSystems };
        match self {
            Self::Anything => String::new(),
            Self::Launches => nsys.record_launches_advice().to_owned(),
            Self::Shapes => nsys.record_shapes_advice().to_owned(),
            Self::Migrations => nsys.record_migrations_advice().to_owned(),
            Self::Samples => nsys.sample_counters_advice().to_owned(),
            Self::Metrics(options) => format!("measure with ncu {options}, or --set full"),
            Self::DeclaredWork => "record with kernelgate profile CASE".to_owned(),
        }
    }
}

/// An entry of the reference page about a diagnosis rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleEntry {
    /// Id of the findings that the rule makes.
    pub id: &'static str,
    /// The question that the rule answers.
    pub question: &'static str,
    /// States when the rule finds something, with its thresholds.
    pub finds: String,
    /// The highest severity of the rule's findings.
    pub worst: FindingSeverity,
    /// How to record what the rule needs, on NVIDIA's devices.
    pub record: String,
}
