//! Diagnosis rules about idle time of the GPU: launch-bound programs, and gaps between operations.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    GpuUseOfProcess, InspectedRecordKind, InspectedShareOfRecords, MeasuredNumberWithUnit,
};
use super::super::host::gap_cause::{IdleCauseKind, MIN_GAP_OF_OTHER_HOST_WORK_NS};
use super::super::host::gpu_gaps::{
    CausesAndPairsOfGaps, GapsBetweenTwoOperations, IdleGapsOfProcessOnGpu, IdleTimeOfCause,
    MAX_IDLE_GAP_FOR_WARNING_NS, MIN_IDLE_GAP_FOR_WARNING_NS, explain_gaps_of_lengths,
};
use super::super::labels::shortened_kernel_name_for_readers;
use super::super::trace_facts::DiagnosisContext;
use super::super::vendor_names::TraceVendorAndRecorder;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, all_records_inspected,
    count_with_singular_or_plural, percent_or_zero, some_records_inspected,
};
use crate::analyze::timeline::idle_time::{GpuIdleGap, ProcessActivityOnGpu};
use crate::model::Trace;
use crate::stats::{ValueSummary, ValuesByGroup, shorten_in_the_middle};

/// Busy share of the GPU, in percent, from which on a program is not launch-bound.
const MIN_BUSY_PERCENT_IF_NOT_LAUNCH_BOUND: f64 = 70.0;
/// Median kernel duration, nanoseconds, below which a program with enough launches may be
/// launch-bound.
const MAX_MEDIAN_KERNEL_OF_LAUNCH_BOUND_NS: f64 = 10_000.0;
/// Smallest number of launches for which a short median kernel alone makes a program launch-bound.
const MIN_LAUNCHES_IF_KERNELS_SHORT: usize = 30;
/// Largest number of characters of an operation's name before or after a gap.
const MAX_GAP_OPERATION_NAME_CHARACTERS: usize = 38;
/// A remedy is taken only if its replay saves at least the idle time divided by this number.
const MIN_REPLAYED_GAIN_DIVISOR: i64 = 4;
/// Largest number of pairs of operations around gaps that are listed as evidence.
const MAX_LISTED_GAP_PAIRS: usize = 3;
/// Smallest share of the span, in percent, that the gaps of a length class must take for a finding.
const MIN_GAP_CLASS_TIME_PERCENT: f64 = 5.0;

/// Durations of the kernels of a process on a GPU, and of the host calls that launched them.
struct KernelAndLaunchCallTimes {
    kernel_durations: ValueSummary,
    /// Median duration of a launch call for each kernel that it launched, nanoseconds.
    median_call_ns_per_kernel: f64,
    launch_call_count: usize,
}

/// Sums the kernels and launch calls of the activity (process on a GPU) with this index.
#[allow(clippy::cast_precision_loss)]
fn kernel_and_launch_times_of_activity(
    context: &DiagnosisContext<'_>,
    index: usize,
) -> KernelAndLaunchCallTimes {
    let trace: &Trace = context.trace;
    let (host, activity) = (&context.host_summary, &context.activities[index]);
    let on_gpu = &trace.kernels.on_gpu;
    let own = |row: &usize| {
        let place = &trace.places[on_gpu.place.at(*row).0 as usize];
        (place.process_index, place.device) == (activity.process_index, activity.gpu_ordinal)
    };
    let mut lengths = ValuesByGroup::default();
    (0..on_gpu.operation_count())
        .filter(own)
        .for_each(|row| lengths.push_value_of_group(0, on_gpu.operation_duration_ns(row)));
    let calls =
        host.launch_call_ns_by_activity.summary_of_group(u32::try_from(index).unwrap_or(u32::MAX));
    // One launch call of a graph launches many kernels, so calls are divided by kernels.
    let ratio =
        calls.value_count as f64 / host.launched_kernel_count_by_activity[index].max(1) as f64;
    KernelAndLaunchCallTimes {
        kernel_durations: lengths.into_sorted_values_with_counts().summary_of_group(0),
        median_call_ns_per_kernel: calls.median * ratio,
        launch_call_count: calls.value_count,
    }
}

/// Returns missing data if the trace has no host calls, for rules that need launch calls.
pub(super) fn require_host_calls(context: &DiagnosisContext<'_>) -> Result<(), DataMissingForRule> {
    require_gpu_operations(context)?;
    let record = context.platform.advice_to_record_launch_calls();
    DataMissingForRule::error_unless_recorded(
        context.host_summary.calls > 0,
        "calls of the host were not recorded",
        record,
    )
}

/// Returns missing data if the trace has no GPU operations, for rules about operations.
pub(super) fn require_gpu_operations(
    context: &DiagnosisContext<'_>,
) -> Result<(), DataMissingForRule> {
    let record = context.platform.advice_to_record_launch_calls();
    DataMissingForRule::error_unless_recorded(
        !context.operations.is_empty(),
        "the trace holds no operation of a GPU",
        record,
    )
}

pub(super) fn launch_bound_rule_text() -> String {
    format!(
        "busy below {MIN_BUSY_PERCENT_IF_NOT_LAUNCH_BOUND} %, and the median kernel shorter than its launch, or shorter than {} µs \
         with {MIN_LAUNCHES_IF_KERNELS_SHORT} launches; more than half of the idle time in gaps of up to {} ms is host code, \
         launch calls and their latency",
        MAX_MEDIAN_KERNEL_OF_LAUNCH_BOUND_NS / 1e3,
        MIN_GAP_OF_OTHER_HOST_WORK_NS / 1_000_000
    )
}

pub(super) fn find_launch_bound_processes(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    let kernels = context.trace.kernels.on_gpu.operation_count();
    require_host_calls(context)?;
    if kernels == 0 {
        return Err(DataMissingForRule::program_has_no_such_work("the trace holds no kernels"));
    }
    let joined: usize = context.host_summary.launched_kernel_count_by_activity.iter().sum();
    let record = context.platform.advice_to_record_launch_calls();
    if joined == 0 {
        return Err(DataMissingForRule::missing_data_with_advice(
            "no kernel can be joined with the call that launched it",
            record,
        ));
    }
    let missing = "the calls that launched the other kernels are not in the trace";
    let inspected = InspectedShareOfRecords {
        reason_for_uninspected_records: (joined < kernels).then(|| format!("{missing}; {record}")),
        ..some_records_inspected(joined, kernels, InspectedRecordKind::GpuOperations)
    };
    let mut found = Vec::new();
    for (index, (device, activity)) in devices.iter().zip(&context.activities).enumerate() {
        // Gaps above 1 ms are subtracted from the span, because in these the host did not launch.
        let gaps = &device.idle_gaps;
        let span_ns = activity.first_start_to_last_end_ns() - gaps.gaps_above_1_ms_total_ns;
        let busy = percent_or_zero(device.gpu_busy_ns, span_ns);
        let KernelAndLaunchCallTimes {
            kernel_durations: kernels,
            median_call_ns_per_kernel: call_ns_a_kernel,
            launch_call_count: calls,
        } = kernel_and_launch_times_of_activity(context, index);
        let shorter = calls > 0 && kernels.median < call_ns_a_kernel;
        let short = kernels.median < MAX_MEDIAN_KERNEL_OF_LAUNCH_BOUND_NS
            && calls >= MIN_LAUNCHES_IF_KERNELS_SHORT;
        if busy >= MIN_BUSY_PERCENT_IF_NOT_LAUNCH_BOUND || !(shorter || short) {
            continue;
        }
        // The program is not launch-bound if at most half of the idle time in gaps up to 1 ms is
        // launching, because its work was queued before.
        let recoverable = gaps.host_launching_idle_ns;
        if recoverable * 2 <= gaps.total_length_of_gaps_ns() - gaps.gaps_above_1_ms_total_ns {
            continue;
        }
        let is_short = |ns| ns <= MIN_GAP_OF_OTHER_HOST_WORK_NS;
        let CausesAndPairsOfGaps { transitions, .. } =
            explain_gaps_of_lengths(context, activity, &gaps.idle_time_by_cause, is_short);
        found.push(DiagnosisFinding {
            rule_id: "launch-bound",
            severity: FindingSeverity::severity_from_possible_saving(
                recoverable,
                activity.first_start_to_last_end_ns(),
            ),
            confidence: if shorter { FindingConfidence::HighConfidence } else { FindingConfidence::MediumConfidence },
            finding_title: format!(
                "device {} is busy {busy:.1} % of the time{}: the median kernel takes {:.1} µs, \
                 launching one {:.1} µs",
                device.gpu_ordinal,
                if device.idle_gaps.gaps_above_1_ms_total_ns > 0 { " outside of gaps above 1 ms" } else { "" },
                kernels.median / 1e3,
                call_ns_a_kernel / 1e3
            ),
            measured_value: MeasuredNumberWithUnit { number_in_unit: busy, unit: "% busy" },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_BUSY_PERCENT_IF_NOT_LAUNCH_BOUND,
                unit: "% busy",
            },
            max_recoverable_ns: Some(recoverable),
            remedy: FindingRemedy::LaunchAsCudaGraph,
            replayed_gain: None,
            evidence: evidence_of_operations_around_gaps(device, &transitions),
            advice: format!(
                "launch less often: capture the step in a {}, fuse short kernels, or keep a \
                 persistent kernel; look for host code between launches",
                context.platform.cuda_or_hip_graph_term()
            ),
            false_positive_note: "a trace that is mostly start-up or loading: restrict it with --range",
        });
    }
    Ok((found, inspected))
}

fn evidence_of_operations_around_gaps(
    device: &GpuUseOfProcess,
    transitions: &[GapsBetweenTwoOperations],
) -> Vec<FindingEvidence> {
    let evidence =
        transitions.iter().take(MAX_LISTED_GAP_PAIRS).map(|transition| FindingEvidence {
            kernel_call_or_copy_name: [&transition.operation_before, &transition.operation_after]
                .map(|name| {
                    shorten_in_the_middle(
                        &shortened_kernel_name_for_readers(name),
                        MAX_GAP_OPERATION_NAME_CHARACTERS,
                    )
                })
                .join(" → "),
            covered_count: transition.gap_count,
            total_duration_ns: Some(transition.total_gap_ns),
            innermost_common_range_path: transition.common_range_path.clone(),
            longest_instance_start_and_end_ns: Some(transition.longest_gap_start_and_end_ns),
            process_id_and_device: Some((device.pid, device.gpu_ordinal)),
        });
    evidence.collect()
}

pub(super) fn idle_gaps_rule_text() -> String {
    let [warning, severe] =
        [MIN_IDLE_GAP_FOR_WARNING_NS, MAX_IDLE_GAP_FOR_WARNING_NS].map(|ns| ns / 1000);
    format!(
        "gaps above {severe} µs, or those of {warning} to {severe} µs, take more than {MIN_GAP_CLASS_TIME_PERCENT} % \
         of the span"
    )
}

/// Finds classes of gaps (by length) that take at least 5 % of the span, one finding for each
/// cause.
pub(super) fn find_long_idle_gaps(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    require_gpu_operations(context)?;
    let mut found = Vec::new();
    for (device, activity) in devices.iter().zip(&context.activities) {
        let gaps = &device.idle_gaps;
        let severe = percent_or_zero(
            gaps.gaps_above_50_us.total_gap_ns,
            activity.first_start_to_last_end_ns(),
        );
        let warning = percent_or_zero(
            gaps.gaps_of_20_to_50_us.total_gap_ns,
            activity.first_start_to_last_end_ns(),
        );
        let is_severe = |ns| ns > MAX_IDLE_GAP_FOR_WARNING_NS;
        let is_warning =
            |ns| (MIN_IDLE_GAP_FOR_WARNING_NS..=MAX_IDLE_GAP_FOR_WARNING_NS).contains(&ns);
        let (class, explained, share, label) = if severe > MIN_GAP_CLASS_TIME_PERCENT {
            let explained =
                explain_gaps_of_lengths(context, activity, &gaps.idle_time_by_cause, is_severe);
            (gaps.gaps_above_50_us, explained, severe, "above 50 µs")
        } else if warning > MIN_GAP_CLASS_TIME_PERCENT {
            let explained =
                explain_gaps_of_lengths(context, activity, &gaps.idle_time_by_cause, is_warning);
            (gaps.gaps_of_20_to_50_us, explained, warning, "of 20 to 50 µs")
        } else {
            continue;
        };
        let CausesAndPairsOfGaps { causes, transitions } = explained;
        let main = causes.first();
        let loading = spans_of_code_loading_in_gaps(context, gaps, activity);
        let remedies: Vec<FindingRemedy> =
            causes.iter().map(|cause| remedy_for_idle_cause(cause, &loading)).collect();
        let first = remedies.iter().find(|remedy| **remedy != FindingRemedy::GainNotReplayable);
        // A saving is known only for the causes of idle time whose remedy is replayed.
        let mended = causes.iter().zip(&remedies).filter(|(_, remedy)| first == Some(*remedy));
        let mended_ns: i64 = mended.map(|(cause, _)| cause.total_idle_ns).sum();
        // A remedy that saves less than a quarter of the idle time in a replay is not taken as the
        // finding's remedy.
        let (saved, remedy) = match first {
            Some(remedy) if mended_ns * MIN_REPLAYED_GAIN_DIVISOR >= class.total_gap_ns => {
                (mended_ns, remedy.clone())
            }
            _ => (0, FindingRemedy::GainNotReplayable),
        };
        let words = main.map_or(String::new(), |cause| {
            let once = cause.occurs_in_one_gap && cause.kind != IdleCauseKind::FirstKernelLaunch;
            let once = if once { ", once" } else { "" };
            format!("; most of the idle time: {}{once}", cause.printed_cause_with_name())
        });
        found.push(DiagnosisFinding {
            rule_id: "gaps",
            severity: severity_of_gap_finding(
                (main, gaps.number_of_idle_gaps()),
                saved,
                activity.first_start_to_last_end_ns(),
            ),
            confidence: confidence_in_idle_cause(main),
            finding_title: format!(
                "device {} is idle for {share:.1} % of the time in {} {label}{words}",
                device.gpu_ordinal,
                count_with_singular_or_plural(class.gap_count, "gap")
            ),
            measured_value: MeasuredNumberWithUnit { number_in_unit: share, unit: "% of the span" },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_GAP_CLASS_TIME_PERCENT,
                unit: "% of the span",
            },
            max_recoverable_ns: (saved > 0).then_some(saved),
            remedy,
            replayed_gain: None,
            evidence: evidence_of_idle_gaps(device, &causes, &transitions),
            advice: main
                .map_or(String::new(), |cause| advice_for_idle_cause(cause, context.platform)),
            false_positive_note: "work that other processes did on the device is not in the trace",
        });
    }
    Ok((found, all_records_inspected(context.operations.len(), InspectedRecordKind::GpuOperations)))
}

/// Returns the spans, inside gaps, of launch calls that loaded the code of their kernel.
fn spans_of_code_loading_in_gaps(
    context: &DiagnosisContext<'_>,
    gaps: &IdleGapsOfProcessOnGpu,
    activity: &ProcessActivityOnGpu,
) -> Vec<(i64, i64)> {
    if gaps.idle_ns_with_any_cause_of(&[IdleCauseKind::FirstKernelLaunch]) == 0 {
        return Vec::new();
    }
    let loads = |gap: &GpuIdleGap| {
        context
            .causes_and_ns_of_idle_gap(gap)
            .any(|((kind, _), _)| kind == IdleCauseKind::FirstKernelLaunch)
    };
    let loading = activity.gaps.iter(&context.operations).filter(loads).filter_map(|gap| {
        let call = context.launch_call_of_gpu_operation(gap.operation_after_gap)?;
        Some((call.call_start_ns.max(gap.start_ns), call.call_end_ns.min(gap.end_ns)))
    });
    loading.collect()
}

/// Returns the remedy for an idle cause, as a replay assumes it; `loading` are the spans in which
/// first launches loaded code.
fn remedy_for_idle_cause(cause: &IdleTimeOfCause, loading: &[(i64, i64)]) -> FindingRemedy {
    match cause.kind {
        IdleCauseKind::FirstKernelLaunch => FindingRemedy::WithoutHostPauses(loading.to_vec()),
        IdleCauseKind::HostCodeBeforeLaunch
        | IdleCauseKind::LaunchThreadOffCpu
        | IdleCauseKind::LaunchThreadInOsCall
        | IdleCauseKind::LaunchThreadInOtherCudaCall
        | IdleCauseKind::LaunchCallStillRunning
            if cause.occurs_in_one_gap =>
        {
            FindingRemedy::WithoutHostPauses(vec![cause.longest_gap_start_and_end_ns])
        }
        _ if cause.occurs_in_one_gap => FindingRemedy::GainNotReplayable,
        IdleCauseKind::LaunchThreadWaitedForGpu => FindingRemedy::NoHostWaits,
        IdleCauseKind::HostCodeBeforeLaunch
        | IdleCauseKind::LaunchThreadOffCpu
        | IdleCauseKind::LaunchThreadInOsCall
        | IdleCauseKind::LaunchThreadInOtherCudaCall
        | IdleCauseKind::LaunchCallStillRunning
        | IdleCauseKind::LaunchLatency => FindingRemedy::LaunchAsCudaGraph,
        _ => FindingRemedy::GainNotReplayable,
    }
}

/// A pause that occurred once does not slow the program's steps, and for gaps without a known cause
/// the saving is unknown; both are information only.
fn severity_of_gap_finding(
    (main, count): (Option<&IdleTimeOfCause>, usize),
    saved: i64,
    span_ns: i64,
) -> FindingSeverity {
    let starts_up = |cause: &IdleTimeOfCause| {
        cause.occurs_in_one_gap || cause.kind == IdleCauseKind::FirstKernelLaunch
    };
    let once = main.is_some_and(starts_up) && count > 1;
    match FindingSeverity::severity_from_possible_saving(saved, span_ns) {
        FindingSeverity::Severe if once => FindingSeverity::Warning,
        FindingSeverity::Information => FindingSeverity::Warning,
        severity => severity,
    }
}

fn confidence_in_idle_cause(cause: Option<&IdleTimeOfCause>) -> FindingConfidence {
    match cause.map(|cause| cause.kind) {
        Some(
            IdleCauseKind::StreamWaitedForEvent
            | IdleCauseKind::StreamWaitedForDefaultStream
            | IdleCauseKind::StreamWaitedForHostFunction
            | IdleCauseKind::LaunchQueueFull
            | IdleCauseKind::WindowsDriverDelay,
        ) => FindingConfidence::MediumConfidence,
        Some(kind) if kind.is_reason_in_trace() => FindingConfidence::HighConfidence,
        _ => FindingConfidence::LowConfidence,
    }
}

/// Causes, then transitions.
fn evidence_of_idle_gaps(
    device: &GpuUseOfProcess,
    causes: &[IdleTimeOfCause],
    transitions: &[GapsBetweenTwoOperations],
) -> Vec<FindingEvidence> {
    let causes = causes.iter().take(3).map(|cause| FindingEvidence {
        kernel_call_or_copy_name: cause.printed_cause_with_name(),
        covered_count: cause.gap_count,
        total_duration_ns: Some(cause.total_idle_ns),
        innermost_common_range_path: None,
        longest_instance_start_and_end_ns: Some(cause.longest_gap_start_and_end_ns),
        process_id_and_device: Some((device.pid, device.gpu_ordinal)),
    });
    causes.chain(evidence_of_operations_around_gaps(device, transitions)).collect()
}

/// Advice for idle time in which the launching thread was inside a call of the operating system.
const BLOCKING_CALL_ADVICE: &str =
    "move calls that block (files, locks, sleeping) to another thread";

/// Advice for idle time in which the recorded host and GPU times contradict each other.
const CLOCKS_DISAGREE_ADVICE: &str = "the times of host and device do not fit: record again";

/// Whether the host was in a range whose name says that a data loader prepared the next batch.
fn is_cause_data_loading(cause: &IdleTimeOfCause) -> bool {
    cause.called_function_or_range_path.as_ref().is_some_and(|range| {
        let range = range.to_ascii_lowercase();
        ["dataloader", "data_loader", "dataiter", "load_batch", "next_batch", "input_pipeline"]
            .iter()
            .any(|word| range.contains(word))
    })
}

fn advice_for_idle_cause(cause: &IdleTimeOfCause, platform: TraceVendorAndRecorder) -> String {
    let graph = platform.cuda_or_hip_graph_term();
    let words = match cause.kind {
        IdleCauseKind::LaunchThreadInOtherCudaCall
        | IdleCauseKind::LaunchCallStillRunning
        | IdleCauseKind::LaunchThreadInOsCall
        | IdleCauseKind::HostCodeBeforeLaunch
            if cause.occurs_in_one_gap =>
        {
            "it happened once, as start-up does (context, library or module loading, the first \
             launch of a kernel, reading data): warm up before recording, or leave it out with \
             --range"
        }
        IdleCauseKind::FirstKernelLaunch => {
            "it happened once for each kernel, whose first launch loads its code, as start-up does: \
             warm up before recording, or leave it out with --range"
        }
        IdleCauseKind::LaunchThreadWaitedForGpu => {
            "launch the next work before waiting for the last, or do not wait"
        }
        IdleCauseKind::LaunchThreadInOtherCudaCall => {
            "move this call out of the loop: allocate once, copy asynchronously"
        }
        IdleCauseKind::LaunchThreadInOsCall => BLOCKING_CALL_ADVICE,
        IdleCauseKind::LaunchThreadOffCpu => "give the launching thread a CPU of its own",
        IdleCauseKind::LaunchCallStillRunning | IdleCauseKind::LaunchLatency => {
            return format!("use a {graph}: one launch for many kernels");
        }
        IdleCauseKind::HostCodeBeforeLaunch if is_cause_data_loading(cause) => {
            "load the next batch while the GPU works: more workers of the data loader, pinned \
             memory, batches prepared ahead"
        }
        IdleCauseKind::HostCodeBeforeLaunch => {
            return format!(
                "prepare the next launches while the GPU works: {graph}, fewer host steps, threads"
            );
        }
        IdleCauseKind::UsualStartOfQueuedOperation | IdleCauseKind::BetweenCudaGraphNodes => {
            "the work was queued: fewer and longer kernels, fewer dependencies between them"
        }
        IdleCauseKind::StreamWaitedForEvent => {
            "the work was launched in time: shorten the work that its stream waits for, or wait \
             for an earlier event"
        }
        IdleCauseKind::StreamWaitedForDefaultStream => {
            "the work was launched in time: the legacy default stream waits for all others, and they \
             for it; use streams created with cudaStreamNonBlocking, or compile with \
             --default-stream per-thread"
        }
        IdleCauseKind::StreamWaitedForHostFunction => {
            "the work was launched in time: keep functions of the host out of the stream"
        }
        IdleCauseKind::OtherGpuOrProcessBusy => {
            "the work was launched in time: balance the devices, and overlap the transfer that it \
             waits for"
        }
        IdleCauseKind::LaunchQueueFull => {
            return format!("queue fewer launches at once: {graph}, or launch in time");
        }
        IdleCauseKind::WindowsDriverDelay => {
            return format!(
                "the work was launched in time: use Linux, or a {graph}; allocate before the loop, \
                 since the driver maps new memory before it submits"
            );
        }
        IdleCauseKind::UnknownDelayAfterLaunch => {
            "the work was launched in time: look for a dependency that the trace lacks (an event, \
             another process or device, a callback), and record all processes and devices"
        }
        IdleCauseKind::PageMigration => {
            return format!(
                "move managed pages before they are used: {}",
                platform.managed_memory_prefetch_advice()
            );
        }
        IdleCauseKind::HostAndGpuClocksDisagree => CLOCKS_DISAGREE_ADVICE,
        IdleCauseKind::NoLaunchCallRecorded => {
            return platform.advice_to_record_launch_calls().to_owned();
        }
    };
    words.to_owned()
}
