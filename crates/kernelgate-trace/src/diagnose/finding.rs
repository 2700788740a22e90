//! Data types of a trace's diagnosis: findings, questions with answers, and use of GPUs.

use super::account::ProcessTimeAccountOnGpu;
use super::answers::KernelTimeAnswers;
use super::critical::gains::CriticalPathAndGains;
use super::device_memory::ProcessMemoryOnGpu;
use super::host::gpu_gaps::IdleGapsOfProcessOnGpu;
use super::network::PhasesOfNetwork;
use crate::analyze::classes::OperationClass;
use crate::analyze::operations::GpuOperationId;
use crate::analyze::work::utilization::GpuPeakUseOfTrace;

/// Severity of a finding, by the share of time that removing its cause could save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingSeverity {
    /// Good to know.
    Information,
    /// The finding costs time.
    Warning,
    /// The finding costs at least 10 % of the time, or makes other findings doubtful.
    Severe,
}

impl FindingSeverity {
    /// Returns the label of the severity, confidence or kind of records in printed output.
    pub fn printed_severity_label(self) -> &'static str {
        match self {
            Self::Information => "information",
            Self::Warning => "warning",
            Self::Severe => "severe",
        }
    }
}

/// Smallest saving, in percent of the trace's time, for which a finding is severe.
const MIN_SAVING_PERCENT_FOR_SEVERE_FINDING: f64 = 10.0;
/// Smallest saving, in percent of the trace's time, for which a finding is a warning.
const MIN_SAVING_PERCENT_FOR_WARNING_FINDING: f64 = 2.0;

impl FindingSeverity {
    /// Returns the severity of a finding that could save `saved_ns` of `span_ns` nanoseconds.
    #[allow(clippy::cast_precision_loss)]
    pub fn severity_from_possible_saving(saved_ns: i64, span_ns: i64) -> FindingSeverity {
        let share = saved_ns as f64 / span_ns.max(1) as f64 * 100.0;
        match share {
            _ if share >= MIN_SAVING_PERCENT_FOR_SEVERE_FINDING => Self::Severe,
            _ if share >= MIN_SAVING_PERCENT_FOR_WARNING_FINDING => Self::Warning,
            _ => Self::Information,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingConfidence {
    /// The finding is based on an estimate, or on few records.
    LowConfidence,
    /// The finding follows from the records by an assumption that its text names.
    MediumConfidence,
    /// Recorded as such.
    HighConfidence,
}

impl FindingConfidence {
    /// Returns the label of this value in printed output.
    pub fn printed_confidence_label(self) -> &'static str {
        match self {
            Self::LowConfidence => "low",
            Self::MediumConfidence => "medium",
            Self::HighConfidence => "high",
        }
    }
}

/// A number with its unit, such as `%`, `us`, `ms` or `calls`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredNumberWithUnit {
    pub number_in_unit: f64,
    /// Unit of the number.
    pub unit: &'static str,
}

/// A kernel, call or copy of the trace, with its times, that shows a finding.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FindingEvidence {
    /// Name of the kernel, API call or copy that shows the finding.
    pub kernel_call_or_copy_name: String,
    /// Number of kernels, calls or copies that the evidence covers.
    pub covered_count: usize,
    /// Total duration of the kernels, calls or copies that show the finding, nanoseconds.
    pub total_duration_ns: Option<i64>,
    /// Path of the innermost range in which all these operations were launched.
    pub innermost_common_range_path: Option<String>,
    /// Start and end of the longest of these kernels, calls or copies, nanoseconds of the trace's
    /// clock.
    pub longest_instance_start_and_end_ns: Option<(i64, i64)>,
    /// Operating-system id of the process, and ordinal of the GPU, where the evidence was recorded.
    pub process_id_and_device: Option<(i64, u32)>,
}

/// Kernels of one function and launch shape, and the share of their time that would remain after a
/// remedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelsAndTimeShareAfterRemedy {
    /// Index into [`crate::model::Trace::functions`].
    pub function_index: u32,
    /// Index into [`crate::model::Trace::shapes`].
    pub launch_shape_index: u32,
    /// Share of the kernels' time that remains after the remedy, 0 to 1.
    pub remaining_time_share: f64,
}

/// A kernel function of a chain of kernels that one fused kernel could compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelOfFusibleChain {
    /// Index into [`crate::model::Trace::functions`].
    pub function_index: u32,
    /// Whether this kernel is the longest one of its chain, whose time remains after fusing.
    pub keeps_time_after_fusing: bool,
    /// Whether another kernel of the chain runs before this one; fusing also removes the idle time
    /// between the two.
    pub follows_fused_kernel: bool,
}

/// The change of the program that would remove the cause of a finding, as a replay assumes it.
#[derive(Debug, Clone, PartialEq)]
pub enum FindingRemedy {
    /// A replay cannot compute what the change gains.
    GainNotReplayable,
    /// Launch calls, and the host's time between them, take no time, as if a CUDA graph were
    /// launched.
    LaunchAsCudaGraph,
    /// In the replay of the remedy, the host takes no time in these spans, nanoseconds of the
    /// trace's clock.
    WithoutHostPauses(Vec<(i64, i64)>),
    /// In the replay of the remedy, the host never waits for the GPU.
    NoHostWaits,
    /// In the replay of the remedy, all operations of this class take no time.
    NoTimeForOperationClass(OperationClass),
    /// In the replay of the remedy, these single operations take no time.
    NoTimeForOperations(Vec<GpuOperationId>),
    ShorterKernels(Vec<KernelsAndTimeShareAfterRemedy>),
    /// In the replay of the remedy, one fused kernel replaces each chain of kernels.
    FusedKernels(Vec<KernelOfFusibleChain>),
}

/// Time that the remedy of a finding would save, by a replay of the recorded dependencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayedGainOfRemedy {
    /// Nanoseconds by which the remedy alone shortens the trace.
    pub saved_ns_alone: i64,
    /// Further nanoseconds that the remedy saves after those of all earlier findings; these values
    /// add up to the gain of all remedies.
    pub further_saved_ns: i64,
}

/// A possible improvement of the traced program that a diagnosis rule found.
#[derive(Debug, Clone, PartialEq)]
pub struct DiagnosisFinding {
    /// Id of the diagnosis rule.
    pub rule_id: &'static str,
    /// Severity of the finding, by the time that its cause costs.
    pub severity: FindingSeverity,
    /// Certainty of the finding.
    pub confidence: FindingConfidence,
    /// One sentence.
    pub finding_title: String,
    /// The measured value.
    pub measured_value: MeasuredNumberWithUnit,
    /// The threshold with which the rule compared the measured value.
    pub rule_threshold: MeasuredNumberWithUnit,
    /// Upper bound of the nanoseconds that removing the cause saves, if known; at most the gain of
    /// the replay.
    pub max_recoverable_ns: Option<i64>,
    /// The change that would remove the cause of the finding.
    pub remedy: FindingRemedy,
    /// Time that the remedy would save, if the remedy can be replayed.
    pub replayed_gain: Option<ReplayedGainOfRemedy>,
    /// Kernels, calls or copies that show the finding, those with most time first.
    pub evidence: Vec<FindingEvidence>,
    pub advice: String,
    /// Text about circumstances in which the finding is a false positive.
    pub false_positive_note: &'static str,
}

impl DiagnosisFinding {
    /// Sorts findings by the time that they could save, then by severity, largest first.
    pub(super) fn sort_findings_by_savings(findings: &mut [Self]) {
        findings
            .sort_by_key(|of| std::cmp::Reverse((of.max_recoverable_ns.unwrap_or(0), of.severity)));
    }

    /// Limits the finding's savings to the replayed gain, and its severity to what follows from
    /// these savings.
    pub(super) fn limit_savings_and_severity_to_replay(&mut self, gain_ns: i64, span_ns: i64) {
        let gain_ns = gain_ns.max(0);
        if self.max_recoverable_ns.is_none_or(|claimed| claimed > gain_ns) {
            self.max_recoverable_ns = Some(gain_ns);
            self.severity =
                self.severity.min(FindingSeverity::severity_from_possible_saving(gain_ns, span_ns));
        }
    }
}

/// Kind of records that a diagnosis rule inspects, and in which it counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InspectedRecordKind {
    /// Nanoseconds of kernels.
    KernelTime,
    /// Number of kernels, copies, memsets and graph launches.
    GpuOperations,
    Copies,
    /// Sets of memory.
    Memsets,
    /// Host calls of CUDA functions.
    HostCalls,
    /// Number of kernel launches that Nsight Compute profiled.
    ProfiledLaunches,
    /// Samples of counters.
    CounterSamples,
    NamedRanges,
}

impl InspectedRecordKind {
    /// Returns the label of this value in printed output.
    pub fn printed_inspected_record_kind(self) -> &'static str {
        match self {
            Self::KernelTime => "kernel time",
            Self::GpuOperations => "operations",
            Self::Copies => "copies",
            Self::Memsets => "sets",
            Self::HostCalls => "calls",
            Self::ProfiledLaunches => "profiled launches",
            Self::CounterSamples => "samples",
            Self::NamedRanges => "ranges",
        }
    }
}

impl InspectedRecordKind {
    /// Key of the record kind in JSON; the key never changes.
    pub fn record_kind_json_key(self) -> &'static str {
        match self {
            Self::KernelTime => "kernel_ns",
            Self::GpuOperations => "operations",
            Self::Copies => "copies",
            Self::Memsets => "sets",
            Self::HostCalls => "calls",
            Self::ProfiledLaunches => "profiled_launches",
            Self::CounterSamples => "samples",
            Self::NamedRanges => "ranges",
        }
    }
}

/// How many of a trace's records a diagnosis rule could inspect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InspectedShareOfRecords {
    /// Number of records, or nanoseconds, that have all data that the rule needs.
    pub inspected_count_or_ns: i64,
    /// Number of all records, or nanoseconds, that the rule would have to inspect.
    pub whole_count_or_ns: i64,
    /// Kind of the records, and so the unit, of the inspected and the whole amount.
    pub inspected_record_kind: InspectedRecordKind,
    /// Reason why the rule could not inspect all records, and how to record what is missing.
    pub reason_for_uninspected_records: Option<String>,
}

/// Smallest share of the records that a rule must have inspected before it may answer "no".
const MIN_INSPECTED_SHARE_FOR_ANSWER_NO: f64 = 0.9;

impl InspectedShareOfRecords {
    /// Inspected records divided by all records, 0 to 1.
    #[allow(clippy::cast_precision_loss)]
    pub fn inspected_share_of_records(&self) -> f64 {
        if self.whole_count_or_ns <= 0 {
            0.0
        } else {
            self.inspected_count_or_ns as f64 / self.whole_count_or_ns as f64
        }
    }

    /// Whether the rule inspected so large a share of the records that it may answer "no".
    pub fn is_share_enough_for_answer_no(&self) -> bool {
        self.inspected_share_of_records() >= MIN_INSPECTED_SHARE_FOR_ANSWER_NO
    }
}

/// Answer of a diagnosis rule to its question about a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiagnosisRuleAnswer {
    /// Findings say so.
    Yes {
        /// Number of findings of the rule.
        finding_count: usize,
        /// Share of the records that the rule inspected.
        inspected: InspectedShareOfRecords,
    },
    /// The rule inspected enough records, and found nothing.
    No {
        /// Share of the records that the rule inspected.
        inspected: InspectedShareOfRecords,
    },
    /// The trace lacks data that the rule needs for an answer.
    CannotAnswer {
        /// Text of the reason why the question has no answer.
        reason: String,
        /// How to record the missing data; empty if nothing can be recorded.
        how_to_record: String,
        /// The share of records that the rule could inspect, if that is only a part.
        inspected: Option<InspectedShareOfRecords>,
    },
}

/// A question of the diagnosis about a trace, with the answer of its rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuestionWithAnswer {
    /// Id of the rule that answers the question, which is also the id of its findings.
    pub rule_id: &'static str,
    /// In words.
    pub question_text: &'static str,
    pub answer: DiagnosisRuleAnswer,
}

impl QuestionWithAnswer {
    /// Reason why the question has no answer, and how to record the missing data; `None` if it has
    /// an answer.
    pub fn reason_without_answer(&self) -> Option<String> {
        let DiagnosisRuleAnswer::CannotAnswer { reason, how_to_record: record, .. } = &self.answer
        else {
            return None;
        };
        Some(match record.is_empty() {
            true => reason.clone(),
            false => format!("{reason}; {record}"),
        })
    }
}

/// Use of one GPU by one process of the trace.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuUseOfProcess {
    /// Process id in the operating system.
    pub pid: i64,
    pub gpu_ordinal: u32,
    /// Name of the GPU, if the trace contains it.
    pub gpu_name: Option<String>,
    /// Start of the process's first and end of its last operation on this GPU, nanoseconds.
    pub first_start_and_last_end_ns: (i64, i64),
    /// Nanoseconds in which at least one operation of the process ran on this GPU.
    pub gpu_busy_ns: i64,
    pub operation_count: usize,
    pub account: ProcessTimeAccountOnGpu,
    /// Idle gaps of the process on this GPU, with their causes.
    pub idle_gaps: IdleGapsOfProcessOnGpu,
}

/// The complete diagnosis of one trace.
#[derive(Debug, Clone)]
pub struct TraceDiagnosis {
    /// Name of the trace's recorder, with its version if known.
    pub recorder_and_version: String,
    /// Time from which printed times count, nanoseconds: the first activity if the trace's clock
    /// counts from 1970, otherwise 0.
    pub printed_time_origin_ns: i64,
    /// Numbers of the trace's kernels, copies, memsets, graph launches, host calls, ranges and
    /// profiled launches.
    pub records: [(&'static str, usize); 7],
    /// Use of each GPU by each process.
    pub gpu_use_by_process: Vec<GpuUseOfProcess>,
    /// Critical path of the trace, and the gains of hypothetical changes.
    pub critical_path: CriticalPathAndGains,
    /// Device memory over time for each process and GPU, if the trace records allocations.
    pub device_memory_over_time: Vec<ProcessMemoryOnGpu>,
    /// Findings about the quality of the trace's data, worst first.
    pub data_quality_findings: Vec<DiagnosisFinding>,
    /// Findings of possible improvements, sorted by the time that they could save.
    pub findings: Vec<DiagnosisFinding>,
    /// Questions of all diagnosis rules, with their answers.
    pub questions: Vec<QuestionWithAnswer>,
    /// Kernel time by kernel, by kind of work and by range.
    pub answers: KernelTimeAnswers,
    /// Share of the GPU's peak throughput that the trace's operators use.
    pub utilization: GpuPeakUseOfTrace,
    /// Phases of a neural network (such as forward and backward), if ranges name them.
    pub network: Option<PhasesOfNetwork>,
}

impl TraceDiagnosis {
    /// Returns the question that the rule with this id answers.
    pub fn question_of_rule(&self, id: &str) -> Option<&QuestionWithAnswer> {
        self.questions.iter().find(|question| question.rule_id == id)
    }

    /// Whether the rule with this id inspected enough records and found nothing.
    pub fn has_rule_found_nothing(&self, id: &str) -> bool {
        self.question_of_rule(id)
            .is_some_and(|question| matches!(question.answer, DiagnosisRuleAnswer::No { .. }))
    }

    /// Whether any question has an answer, other than the question about the quality of the data.
    pub fn answers_any_gpu_question(&self) -> bool {
        let answered = |question: &&QuestionWithAnswer| {
            question.rule_id != DATA_QUALITY_RULE_ID
                && !matches!(question.answer, DiagnosisRuleAnswer::CannotAnswer { .. })
        };
        self.questions.iter().any(|question| answered(&question))
    }

    /// Worst severity of all findings, including findings about the quality of the data.
    pub fn worst_severity_of_findings(&self) -> Option<FindingSeverity> {
        self.data_quality_findings
            .iter()
            .chain(&self.findings)
            .map(|finding| finding.severity)
            .max()
    }
}

/// Rule id of the findings about the quality of the trace's data.
pub const DATA_QUALITY_RULE_ID: &str = "data-quality";
