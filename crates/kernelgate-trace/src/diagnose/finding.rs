//! What is said of a trace.

use super::answers::Answers;
use super::device_memory::MemoryUse;
use super::gaps::GapReport;

/// How much a finding costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Good to know.
    Information,
    /// Costs time.
    Warning,
    /// Costs most of the time that is lost, or makes other findings doubtful.
    Severe,
}

impl Severity {
    /// As text.
    pub fn label(self) -> &'static str {
        match self {
            Self::Information => "information",
            Self::Warning => "warning",
            Self::Severe => "severe",
        }
    }
}

/// How sure a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Confidence {
    /// An estimate, or few records.
    Low,
    /// Follows from the records by an assumption that is named.
    Medium,
    /// Recorded as such.
    High,
}

impl Confidence {
    /// As text.
    pub fn label(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// A number with its unit, such as `%`, `us`, `ms` or `calls`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measure {
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
}

/// A place in the trace that shows a finding.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evidence {
    /// What: a kernel, a call, a copy.
    pub what: String,
    /// How often.
    pub count: usize,
    /// How long in all, in nanoseconds.
    pub total_ns: Option<i64>,
    /// The path of the innermost range that all of it was launched in.
    pub range: Option<String>,
    /// Where one of them is, the longest if they differ, in nanoseconds of the trace.
    pub span: Option<(i64, i64)>,
    /// Process id and device.
    pub place: Option<(i64, u32)>,
}

/// Something that a rule found.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The rule.
    pub id: &'static str,
    /// How much it costs.
    pub severity: Severity,
    /// How sure it is.
    pub confidence: Confidence,
    /// One sentence.
    pub title: String,
    /// What was measured.
    pub measured: Measure,
    /// What it was held against.
    pub threshold: Measure,
    /// Nanoseconds that mending it could save at most, where that can be said.
    pub recoverable_ns: Option<i64>,
    /// Where it is seen, the most expensive first.
    pub evidence: Vec<Evidence>,
    /// What to do.
    pub advice: &'static str,
    /// When it is no fault.
    pub false_positive: &'static str,
}

/// A rule that could not be applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The rule.
    pub rule: &'static str,
    /// What is missing, and how to get it.
    pub reason: String,
}

/// What a process did on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceUse {
    /// The system's id of the process.
    pub pid: i64,
    /// The device.
    pub device: u32,
    /// Its name, where the trace has it.
    pub name: Option<String>,
    /// First and last time of an operation.
    pub span: (i64, i64),
    /// Nanoseconds in which at least one operation ran.
    pub busy_ns: i64,
    /// Operations.
    pub operations: usize,
    /// Times without an operation.
    pub gaps: GapReport,
}

/// Everything that is said of a trace.
#[derive(Debug, Clone)]
pub struct Diagnosis {
    /// Who recorded it, with the version where known.
    pub recorder: String,
    /// What the text counts its times from: the first activity of traces whose clock counts from
    /// 1970, else 0.
    pub origin_ns: i64,
    /// Kernels, copies, sets, graph launches, calls, ranges, profiled launches.
    pub records: [(&'static str, usize); 7],
    /// Each process on each device.
    pub devices: Vec<DeviceUse>,
    /// Device memory, where allocations were recorded.
    pub memory: Vec<MemoryUse>,
    /// Data quality first, then by severity and by what can be saved.
    pub findings: Vec<Finding>,
    /// Rules that lack data.
    pub skipped: Vec<Skipped>,
    /// Rules that found nothing.
    pub passed: Vec<&'static str>,
    /// Where the time goes.
    pub answers: Answers,
}
