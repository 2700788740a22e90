//! Describes the diagnosis rules for the generated reference page.

use super::super::finding::FindingSeverity;
use super::super::vendor_names::{GpuVendor, TraceVendorAndRecorder};
use crate::model::TraceRecorder;

/// Kind of records that a trace must contain for a diagnosis rule to answer its question.
#[derive(Debug, Clone, Copy)]
pub(super) enum RecordsNeededByRule {
    /// Any trace.
    AnyTrace,
    /// GPU operations, and the host calls that launched them.
    OperationsAndLaunchCalls,
    /// Launch shapes of kernels, and the description of the GPU.
    LaunchShapes,
    /// GPU operations, and page faults of managed memory.
    OperationsAndPageFaults,
    /// Counters over time.
    HardwareCounterSamples,
    /// Hardware counters of single kernel launches; the text contains the options of `ncu` that
    /// record them.
    NcuMetrics(&'static str),
    /// Ranges for which operations and bytes are declared.
    DeclaredWork,
}

impl RecordsNeededByRule {
    /// Returns advice on which command records the records that a rule needs, on NVIDIA GPUs.
    pub(super) fn advice_to_record_on_nvidia(self) -> String {
        let nsys = TraceVendorAndRecorder {
            vendor: GpuVendor::Nvidia,
            recorder: TraceRecorder::NsightSystems,
        };
        match self {
            Self::AnyTrace => String::new(),
            Self::OperationsAndLaunchCalls => nsys.advice_to_record_launch_calls().to_owned(),
            Self::LaunchShapes => nsys.advice_to_record_launch_shapes().to_owned(),
            Self::OperationsAndPageFaults => nsys.advice_to_record_page_migrations().to_owned(),
            Self::HardwareCounterSamples => nsys.advice_to_sample_hardware_counters().to_owned(),
            Self::NcuMetrics(options) => format!("measure with ncu {options}, or --set full"),
            Self::DeclaredWork => "record with kernelgate profile CASE".to_owned(),
        }
    }
}

/// Entry about one diagnosis rule for the generated reference page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleReferenceEntry {
    /// Id of the rule and of its findings.
    pub rule_id: &'static str,
    /// The question that the rule answers.
    pub question: &'static str,
    /// The condition, with its thresholds, under which the rule has a finding.
    pub condition_text: String,
    /// Highest severity that findings of the rule can have.
    pub highest_severity: FindingSeverity,
    /// Advice on how to record the data that the rule needs, on NVIDIA GPUs.
    pub recording_advice: String,
}
