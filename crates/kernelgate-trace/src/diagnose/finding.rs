//! The diagnosis of a trace: findings, questions with their answers, devices.

use super::account::DeviceTimeAccount;
use super::answers::TraceAnswers;
use super::critical::gains::CriticalPath;
use super::device_memory::MemoryUse;
use super::host::gpu_gaps::IdleGapReport;
use super::network::NetworkPhases;
use crate::analyze::classes::OperationClass;
use crate::analyze::operations::OperationId;
use crate::analyze::work::utilization::DeviceUtilization;

/// Severity of a finding, by the time that it costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingSeverity {
    /// Good to know.
    Information,
    /// Costs time.
    Warning,
    /// Costs most of the time that is lost, or makes other findings doubtful.
    Severe,
}

impl FindingSeverity {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::Information => "information",
            Self::Warning => "warning",
            Self::Severe => "severe",
        }
    }
}

/// Part of a span from which what could be saved is severe, in percent.
const MIN_SEVERE_SAVING_PERCENT: f64 = 10.0;
/// Part of the time from which a saving is a warning.
const MIN_WARNING_SAVING_PERCENT: f64 = 2.0;

impl FindingSeverity {
    /// The severity of a finding that could save a part of a span.
    #[allow(clippy::cast_precision_loss)]
    pub fn from_saving(saved_ns: i64, span_ns: i64) -> FindingSeverity {
        let share = saved_ns as f64 / span_ns.max(1) as f64 * 100.0;
        match share {
            _ if share >= MIN_SEVERE_SAVING_PERCENT => Self::Severe,
            _ if share >= MIN_WARNING_SAVING_PERCENT => Self::Warning,
            _ => Self::Information,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingConfidence {
    /// The finding rests on an estimate, or on few records.
    Low,
    /// Follows from the records by an assumption that is named.
    Medium,
    /// Recorded as such.
    High,
}

impl FindingConfidence {
    /// Label in printed output.
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
pub struct NumberWithUnit {
    pub value: f64,
    /// Unit of the measure.
    pub unit: &'static str,
}

/// A place in the trace that shows a finding.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FindingEvidence {
    /// Name of the kernel, API call or copy.
    pub what: String,
    /// How often.
    pub count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: Option<i64>,
    /// The path of the innermost range in which all operations of the finding were launched.
    pub range: Option<String>,
    /// Span of the longest such kernel, call or copy, in nanoseconds of the trace.
    pub span: Option<(i64, i64)>,
    /// Process id and device.
    pub place: Option<(i64, u32)>,
}

/// Kernels that could be shorter, with the possible factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShortenedKernels {
    /// Index into [`crate::model::Trace::functions`].
    pub function: u32,
    /// Index into [`crate::model::Trace::shapes`].
    pub shape: u32,
    /// The part of the time of the kernels that is left.
    pub left: f64,
}

/// A kernel of a chain that one kernel could compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusibleKernel {
    /// Index into [`crate::model::Trace::functions`].
    pub function: u32,
    /// Whether the fused kernel is the longest one of its chain, whose time remains.
    pub stays: bool,
    /// Whether another kernel of the chain runs before this one; fusing removes the time between
    /// them.
    pub follows: bool,
}

/// The change that mends a finding, for a replay.
#[derive(Debug, Clone, PartialEq)]
pub enum FindingRemedy {
    /// The gain of the change cannot be computed by a replay.
    NotReplayed,
    /// Launch calls and the host between them take no time, as in a graph.
    Graph,
    /// The host takes no time in these spans.
    WithoutPauses(Vec<(i64, i64)>),
    /// The host never waits for the GPU.
    NoWaits,
    /// Operations of a class take no time.
    Without(OperationClass),
    /// The given single operations take no time.
    WithoutOperations(Vec<OperationId>),
    Shorter(Vec<ShortenedKernels>),
    /// Each chain of kernels is replaced by one kernel.
    Fused(Vec<FusibleKernel>),
}

/// The gain of mending a finding, by the replay of the recorded dependencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayedGain {
    /// Nanoseconds by which the remedy alone shortens the trace.
    pub alone_ns: i64,
    /// Additional nanoseconds saved once all earlier findings are mended: these values add up to
    /// the gain of all findings.
    pub further_ns: i64,
}

/// A finding: a possible improvement that a rule found.
#[derive(Debug, Clone, PartialEq)]
pub struct DiagnosisFinding {
    /// The rule.
    pub id: &'static str,
    /// Cost of the finding.
    pub severity: FindingSeverity,
    /// Certainty of the finding.
    pub confidence: FindingConfidence,
    /// One sentence.
    pub title: String,
    /// The measured value.
    pub measured: NumberWithUnit,
    /// The threshold with which the rule compares.
    pub threshold: NumberWithUnit,
    /// Upper bound of the nanoseconds that mending the finding saves, where known: no more than its
    /// replay gains.
    pub recoverable_ns: Option<i64>,
    /// The change that would remove the cause.
    pub remedy: FindingRemedy,
    /// The gain of the change, if the change can be replayed.
    pub replayed: Option<ReplayedGain>,
    /// Places of the finding, the most expensive first.
    pub evidence: Vec<FindingEvidence>,
    pub advice: String,
    /// Circumstances in which the finding is a false positive.
    pub false_positive: &'static str,
}

impl DiagnosisFinding {
    /// Sorts findings by their savings, then by severity.
    pub(super) fn sort_by_savings(findings: &mut [Self]) {
        findings.sort_by_key(|of| std::cmp::Reverse((of.recoverable_ns.unwrap_or(0), of.severity)));
    }

    /// Limits the savings of a finding to the replayed gain, and its severity to the remaining
    /// savings.
    pub(super) fn limit_savings_to_gain(&mut self, gain_ns: i64, span_ns: i64) {
        let gain_ns = gain_ns.max(0);
        if self.recoverable_ns.is_none_or(|claimed| claimed > gain_ns) {
            self.recoverable_ns = Some(gain_ns);
            self.severity = self.severity.min(FindingSeverity::from_saving(gain_ns, span_ns));
        }
    }
}

/// Kind of records that a rule inspects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InspectedUnit {
    /// Nanoseconds of kernels.
    KernelTime,
    /// Kernels, copies, memsets and graph launches.
    Operations,
    Copies,
    /// Sets of memory.
    Sets,
    /// Calls of the host.
    Calls,
    /// Kernel launches that Nsight Compute profiled.
    ProfiledLaunches,
    /// Samples of counters.
    Samples,
    Ranges,
}

impl InspectedUnit {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::KernelTime => "kernel time",
            Self::Operations => "operations",
            Self::Copies => "copies",
            Self::Sets => "sets",
            Self::Calls => "calls",
            Self::ProfiledLaunches => "profiled launches",
            Self::Samples => "samples",
            Self::Ranges => "ranges",
        }
    }
}

impl InspectedUnit {
    /// The key of the unit in JSON, which never changes.
    pub fn json_key(self) -> &'static str {
        match self {
            Self::KernelTime => "kernel_ns",
            Self::Operations => "operations",
            Self::Copies => "copies",
            Self::Sets => "sets",
            Self::Calls => "calls",
            Self::ProfiledLaunches => "profiled_launches",
            Self::Samples => "samples",
            Self::Ranges => "ranges",
        }
    }
}

/// Number and share of the records that a rule could inspect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InspectedShare {
    /// The part with all data that the rule needs.
    pub seen: i64,
    /// All of the whole.
    pub whole: i64,
    /// The unit of both.
    pub unit: InspectedUnit,
    /// Reason why not all records could be inspected, and how to record all of them.
    pub missing: Option<String>,
}

/// Share of all records that a rule must inspect before it may answer "no".
const MIN_INSPECTED_SHARE_FOR_NO: f64 = 0.9;

impl InspectedShare {
    /// The inspected share, from 0 to 1.
    #[allow(clippy::cast_precision_loss)]
    pub fn inspected_share(&self) -> f64 {
        if self.whole <= 0 { 0.0 } else { self.seen as f64 / self.whole as f64 }
    }

    /// Whether the rule inspected so many records that it can answer no.
    pub fn is_enough_for_no(&self) -> bool {
        self.inspected_share() >= MIN_INSPECTED_SHARE_FOR_NO
    }
}

/// The answer of a diagnosis to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QuestionAnswer {
    /// Findings say so.
    Yes {
        /// How many.
        findings: usize,
        /// How much was inspected.
        inspected: InspectedShare,
    },
    /// The rule inspected enough, and found nothing.
    No {
        /// How much.
        inspected: InspectedShare,
    },
    /// The trace lacks the data that answers the question.
    CannotAnswer {
        /// Reason why the question has no answer.
        reason: String,
        /// How to record what is missing; empty where there is nothing to record.
        record: String,
        /// How much could be inspected, where that is a part.
        inspected: Option<InspectedShare>,
    },
}

/// A question of the diagnosis, with its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiagnosisQuestion {
    /// Id of the rule that answers the question, which is also the id of its findings.
    pub id: &'static str,
    /// In words.
    pub text: &'static str,
    pub answer: QuestionAnswer,
}

impl DiagnosisQuestion {
    /// Reason why the question cannot be answered, and how to record what is missing.
    pub fn missing_data_reason(&self) -> Option<String> {
        let QuestionAnswer::CannotAnswer { reason, record, .. } = &self.answer else { return None };
        Some(match record.is_empty() {
            true => reason.clone(),
            false => format!("{reason}; {record}"),
        })
    }
}

/// The work of a process on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessDeviceUse {
    /// Process id in the operating system.
    pub pid: i64,
    pub device: u32,
    /// Name of the device, if the trace contains it.
    pub name: Option<String>,
    /// Start of the first operation and end of the last one.
    pub span: (i64, i64),
    /// Nanoseconds in which at least one operation ran.
    pub busy_ns: i64,
    pub operations: usize,
    pub account: DeviceTimeAccount,
    /// Times without an operation.
    pub gaps: IdleGapReport,
}

/// The complete diagnosis of a trace.
#[derive(Debug, Clone)]
pub struct TraceDiagnosis {
    /// Name of the trace's recorder, with its version if known.
    pub recorder: String,
    /// The time from which the text counts: the first activity of traces whose clock counts from
    /// 1970, else 0.
    pub origin_ns: i64,
    /// Kernels, copies, sets, graph launches, calls, ranges, profiled launches.
    pub records: [(&'static str, usize); 7],
    /// Work of each process on each device.
    pub devices: Vec<ProcessDeviceUse>,
    /// The critical path, and what changes would gain.
    pub critical_path: CriticalPath,
    /// Device memory over time, if allocations were recorded.
    pub memory: Vec<MemoryUse>,
    /// How far the trace can be believed, worst first.
    pub quality: Vec<DiagnosisFinding>,
    /// Possible improvements, by what they could save.
    pub findings: Vec<DiagnosisFinding>,
    /// The questions of all rules, with their answers.
    pub questions: Vec<DiagnosisQuestion>,
    /// Time by kernel, kind of work and range.
    pub answers: TraceAnswers,
    /// Which share of the device's peaks is used.
    pub utilization: DeviceUtilization,
    /// The phases of a network, if its ranges name them.
    pub network: Option<NetworkPhases>,
}

impl TraceDiagnosis {
    /// The question that a rule answers, by the rule's id.
    pub fn question(&self, id: &str) -> Option<&DiagnosisQuestion> {
        self.questions.iter().find(|question| question.id == id)
    }

    /// Whether a rule inspected sufficient records and found nothing.
    pub fn has_rule_passed(&self, id: &str) -> bool {
        self.question(id)
            .is_some_and(|question| matches!(question.answer, QuestionAnswer::No { .. }))
    }

    /// Whether any question about the GPU's work has an answer.
    pub fn answers_any_gpu_question(&self) -> bool {
        let answered = |question: &&DiagnosisQuestion| {
            question.id != DATA_QUALITY_ID
                && !matches!(question.answer, QuestionAnswer::CannotAnswer { .. })
        };
        self.questions.iter().any(|question| answered(&question))
    }

    /// The worst severity of all findings, also of those about the quality of the data.
    pub fn worst_severity(&self) -> Option<FindingSeverity> {
        self.quality.iter().chain(&self.findings).map(|finding| finding.severity).max()
    }
}

/// The id of findings about the quality of the data.
pub const DATA_QUALITY_ID: &str = "data-quality";
