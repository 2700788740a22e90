//! Diagnosis rule about the quality of the trace's data.

mod impossible_times;
mod messages;

use super::super::finding::{
    DiagnosisFinding, FindingEvidence, FindingSeverity, GpuUseOfProcess, InspectedRecordKind,
    MeasuredNumberWithUnit,
};
use super::super::host::gap_cause::IdleCauseKind;
use super::super::trace_facts::DiagnosisContext;
use super::rule_outcome::{
    FindingsOrMissingData, all_records_inspected, count_as_number_with_unit, data_quality_finding,
    percent_or_zero,
};
use crate::analyze::timeline::idle_time::GpuIdleGap;
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::model::TraceRecorder;
use impossible_times::MAX_HARMLESS_STREAM_OVERLAP_NS;

/// Largest share of the GPU's time, in percent, that the profiler's own work may take before times
/// are doubtful.
const MAX_PROFILER_OVERHEAD_PERCENT: f64 = 5.0;
/// A gap that is at least this many times as long as all other time of the GPU is taken for a clock
/// jump or a pause.
const MIN_CLOCK_JUMP_LENGTH_RATIO: i64 = 100;

pub(super) fn data_quality_rule_text() -> String {
    format!(
        "records dropped, orphaned, unreadable or odd; graphs recorded whole; the profiler at work \
         for more than {MAX_PROFILER_OVERHEAD_PERCENT} % of the time; a gap {MIN_CLOCK_JUMP_LENGTH_RATIO} times as long as everything else; \
         operations that overlap on one stream by more than {} µs or start before their launch",
        MAX_HARMLESS_STREAM_OVERLAP_NS / 1000
    )
}

/// Finds reasons to doubt the trace's data. The function `find_data_quality_problems` is long
/// because it has one sentence for each reason.
#[expect(clippy::too_many_lines)]
pub(super) fn find_data_quality_problems(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    let (trace, quality) = (context.trace, &context.trace.quality);
    let mut found = Vec::new();
    let count = |count: u64| {
        count_as_number_with_unit(usize::try_from(count).unwrap_or(usize::MAX), "records")
    };
    if context.operations.is_empty() && trace.profiled_launches.is_empty() {
        found.push(finding_without_gpu_work(context));
    }
    for part in &quality.unreadable_parts {
        found.push(data_quality_finding(
            FindingSeverity::Severe,
            format!("a part could not be read to its end: {part}"),
            count_as_number_with_unit(1, "parts"),
            "export or record again; sums below are of the rest",
            "nothing",
        ));
    }
    for note in &quality.interpretation_notes {
        found.push(data_quality_finding(
            FindingSeverity::Information,
            note.clone(),
            count_as_number_with_unit(1, "notes"),
            "check one number against the recorder's own output",
            "the file is as described",
        ));
    }
    if quality.dropped_records > 0 {
        found.push(data_quality_finding(
            FindingSeverity::Severe,
            format!("the recorder lost {} records", quality.dropped_records),
            count(quality.dropped_records),
            "record a shorter time, or with larger buffers",
            "nothing",
        ));
    }
    impossible_times::find_operations_without_times(context, &mut found);
    impossible_times::find_overlaps_on_streams(context, &mut found);
    impossible_times::find_operations_starting_before_launch(context, &mut found);
    if !quality.missing_tables_or_fields.is_empty() && trace.profiled_launches.is_empty() {
        found.push(data_quality_finding(
            FindingSeverity::Information,
            format!("not recorded: {}", quality.missing_tables_or_fields.join(", ")),
            count_as_number_with_unit(quality.missing_tables_or_fields.len(), "tables"),
            format!(
                "{}; questions that need them are listed as not measured",
                context.platform.advice_to_record_launch_calls()
            ),
            "the program has none of these",
        ));
    }
    find_operations_without_launch_call(context, &mut found);
    find_graphs_recorded_whole(context, &mut found);
    for (what, records, advice) in [
        (
            "ranges were never closed; they end with the trace",
            quality.unclosed_ranges,
            UNCLOSED_RANGES_ADVICE,
        ),
        (
            "records end before they start; they count as zero long",
            quality.spans_with_reversed_times,
            REVERSED_TIMES_ADVICE,
        ),
        (
            "events are no valid JSON and do not count",
            quality.invalid_json_events,
            BROKEN_EVENTS_ADVICE,
        ),
        (
            "values do not fit their field and do not count",
            quality.implausible_value_count,
            IMPLAUSIBLE_VALUES_ADVICE,
        ),
        (
            "texts are not UTF-8; bytes that are not read as \u{fffd}",
            quality.invalid_utf8_texts,
            INVALID_TEXTS_ADVICE,
        ),
    ] {
        if records > 0 {
            let title = format!("{records} {what}");
            found.push(data_quality_finding(
                FindingSeverity::Information,
                title,
                count(records),
                advice,
                "a trace that was stopped while the program ran",
            ));
        }
    }
    find_large_profiler_overhead(context, devices, &mut found);
    find_gap_that_may_be_clock_jump(context, devices, &mut found);
    add_finding_of_profiler_messages(context, &mut found);
    Ok((
        found,
        all_records_inspected(
            context.operations.len().max(trace.profiled_launches.len()),
            InspectedRecordKind::GpuOperations,
        ),
    ))
}

/// Adds a finding with the warnings and errors that the profiler reported.
fn add_finding_of_profiler_messages(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let quality = &context.trace.quality;
    if !quality.profiler_messages.is_empty() && !context.operations.is_empty() {
        let mut finding = data_quality_finding(
            FindingSeverity::Information,
            format!(
                "the profiler reported {} warnings and errors",
                quality.profiler_messages.len()
            ),
            count_as_number_with_unit(quality.profiler_messages.len(), "messages"),
            "read them; most concern libraries that the program does not use",
            "warnings about APIs that were not to be traced",
        );
        if let Some(reason) = messages::reason_for_missing_records(&quality.profiler_messages, true)
        {
            finding.severity = FindingSeverity::Warning;
            finding.finding_title = format!("{}: {}", finding.finding_title, reason.reason_text);
            finding.advice = reason.advice;
        }
        finding.evidence = messages::recorder_messages_as_evidence(&quality.profiler_messages);
        found.push(finding);
    }
}

/// Returns the finding that the trace has no GPU work; the recorder's messages may give a reason.
fn finding_without_gpu_work(context: &DiagnosisContext<'_>) -> DiagnosisFinding {
    let trace = context.trace;
    let mut own =
        trace.processes.iter().filter(|_| trace.recorder == TraceRecorder::PytorchOrChromeTrace);
    let gpu_process = own.find_map(|process| {
        let name = trace.names.text_of_name(process.process_name?);
        (name.contains("GPU") || name == "CUDA functions").then_some(name)
    });
    let reason = messages::reason_for_missing_records(&trace.quality.profiler_messages, false);
    let sites = context.host_summary.call_sums_by_function.iter();
    let launching = sites
        .filter(|((name, _), _)| context.function_name_without_version(*name).contains("Launch"));
    let launches: usize = launching.map(|(_, calls)| calls.calls).sum();
    let because = match (&reason, gpu_process) {
        (Some(reason), _) => format!(": {}", reason.reason_text),
        (None, Some(name)) => format!(
            "; the rows of \"{name}\" are not in a form that this program knows, such as that of \
             JAX or of PyTorch's old profiler"
        ),
        (None, None) if launches > 0 => format!(
            ", though {launches} calls launch work: the profiler recorded calls or counters, and \
             no operations"
        ),
        (None, None) => String::new(),
    };
    let record = context.platform.advice_to_record_launch_calls();
    let advice = match reason {
        Some(reason) => reason.advice,
        None => format!("{record}, and let the program run until its GPU work is done"),
    };
    let title = "the trace holds no kernel, copy, set or graph launch: nothing about the GPU can \
                 be concluded";
    let mut finding = data_quality_finding(
        FindingSeverity::Severe,
        format!("{title}{because}"),
        count_as_number_with_unit(0, "operations"),
        advice,
        "a program that does not use the GPU",
    );
    finding.evidence = messages::recorder_messages_as_evidence(&trace.quality.profiler_messages);
    finding
}

const UNCLOSED_RANGES_ADVICE: &str =
    "their lengths are upper bounds; close every range, or record to the end";
const REVERSED_TIMES_ADVICE: &str = "times around them are doubtful; record again";
const IMPLAUSIBLE_VALUES_ADVICE: &str = "record again; sums below are without them";
const BROKEN_EVENTS_ADVICE: &str =
    "PyTorch writes some strings unescaped (with_stack=True); the rest was read";
const INVALID_TEXTS_ADVICE: &str = "give ranges names in UTF-8";

/// Adds a finding if the trace lacks launch calls of operations, and says which questions this
/// affects.
fn find_operations_without_launch_call(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let operations_without_call = context.host_summary.operations_without_launch_call;
    let launched = context.operations.len() - context.classes.page_migration_count();
    if operations_without_call == 0 || context.host_summary.calls == 0 {
        return;
    }
    #[allow(clippy::cast_precision_loss)]
    let share = operations_without_call as f64 / launched.max(1) as f64 * 100.0;
    let severity =
        if share > 5.0 { FindingSeverity::Warning } else { FindingSeverity::Information };
    let mut finding = data_quality_finding(
        severity,
        format!(
            "{operations_without_call} of {launched} operations were launched by calls that the trace does not hold"
        ),
        MeasuredNumberWithUnit { number_in_unit: share, unit: "%" },
        "start recording before the program launches, or skip its first step; their ranges and the \
         causes of the gaps before them are unknown",
        "a recording that starts in the middle of a run",
    );
    finding.rule_threshold = MeasuredNumberWithUnit { number_in_unit: 5.0, unit: "%" };
    found.push(finding);
}

/// Adds a finding if CUDA graphs were recorded as a whole, so that their kernels are in no table.
fn find_graphs_recorded_whole(context: &DiagnosisContext<'_>, found: &mut Vec<DiagnosisFinding>) {
    let graphs = &context.trace.graphs.on_gpu;
    if graphs.has_no_operation() {
        return;
    }
    let time: i64 = graphs.sum_of_operation_durations_ns();
    let busy: i64 = context.activities.iter().map(|activity| activity.gpu_busy_ns).sum();
    let share = percent_or_zero(time, busy);
    let mut finding = data_quality_finding(
        if share > 50.0 { FindingSeverity::Warning } else { FindingSeverity::Information },
        format!(
            "{} graph launches were recorded whole: {share:.1} % of the busy time has no kernels",
            graphs.operation_count()
        ),
        MeasuredNumberWithUnit { number_in_unit: share, unit: "% of busy time" },
        context.platform.advice_to_record_graph_nodes(),
        "graphs whose launches alone are of interest",
    );
    finding.rule_threshold =
        MeasuredNumberWithUnit { number_in_unit: 50.0, unit: "% of busy time" };
    found.push(finding);
}

/// Adds a finding if the profiler's own work took more than 5 % of the time in which the GPU was
/// used.
fn find_large_profiler_overhead(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
    found: &mut Vec<DiagnosisFinding>,
) {
    let (Some(first), Some(last)) = (
        devices.iter().map(|device| device.first_start_and_last_end_ns.0).min(),
        devices.iter().map(|device| device.first_start_and_last_end_ns.1).max(),
    ) else {
        return;
    };
    let overhead = context.trace.quality.profiler_overhead_spans.iter().copied();
    let overhead =
        UnionOfTimeSpans::union_of_spans(overhead.filter(|(start, end)| start < end).collect());
    let share = percent_or_zero(overhead.covered_ns_within((first, last)), last - first);
    if share > MAX_PROFILER_OVERHEAD_PERCENT {
        let mut finding = data_quality_finding(
            FindingSeverity::Warning,
            format!("the profiler worked for {share:.1} % of the time in which the GPU was used"),
            MeasuredNumberWithUnit { number_in_unit: share, unit: "%" },
            "gaps and host times are longer than without the profiler; record fewer APIs, or later",
            "overhead on threads that launch nothing",
        );
        finding.rule_threshold =
            MeasuredNumberWithUnit { number_in_unit: MAX_PROFILER_OVERHEAD_PERCENT, unit: "%" };
        found.push(finding);
    }
}

/// Adds a finding if a single gap is 100 times as long as all other time, so that shares of the
/// span mean little.
fn find_gap_that_may_be_clock_jump(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
    found: &mut Vec<DiagnosisFinding>,
) {
    for (device, activity) in devices.iter().zip(&context.activities) {
        let longest =
            activity.gaps.iter(&context.operations).max_by_key(GpuIdleGap::idle_gap_length_ns);
        let Some(longest) = longest else { continue };
        // A gap during which a long host call ran, or whose work was launched before, is explained
        // and no clock jump.
        let unexplained = |kind| {
            matches!(kind, IdleCauseKind::HostCodeBeforeLaunch | IdleCauseKind::LaunchThreadOffCpu)
                || !kind.is_reason_in_trace()
        };
        let causes = context.causes_and_ns_of_idle_gap(&longest);
        let doubtful = causes
            .filter(|((kind, _), _)| {
                unexplained(*kind) && *kind != IdleCauseKind::UnknownDelayAfterLaunch
            })
            .map(|(_, ns)| ns);
        if doubtful.sum::<i64>() * 2 < longest.idle_gap_length_ns() {
            continue;
        }
        let rest = activity.first_start_to_last_end_ns() - longest.idle_gap_length_ns();
        if rest <= 0 || longest.idle_gap_length_ns() / MIN_CLOCK_JUMP_LENGTH_RATIO < rest {
            continue;
        }
        let mut finding = data_quality_finding(
            FindingSeverity::Warning,
            format!(
                "one idle time on device {} is more than {MIN_CLOCK_JUMP_LENGTH_RATIO} times as long as everything else: \
                 the clock jumped, or the program paused",
                device.gpu_ordinal
            ),
            MeasuredNumberWithUnit {
                number_in_unit: percent_or_zero(
                    longest.idle_gap_length_ns(),
                    activity.first_start_to_last_end_ns(),
                ),
                unit: "%",
            },
            "shares of the whole span mean little; restrict the trace with --range",
            "a program that waits for its user",
        );
        finding.evidence.push(FindingEvidence {
            kernel_call_or_copy_name: "idle time".to_owned(),
            covered_count: 1,
            total_duration_ns: Some(longest.idle_gap_length_ns()),
            innermost_common_range_path: context
                .range_path_text_of_operation(longest.operation_after_gap),
            longest_instance_start_and_end_ns: Some((longest.start_ns, longest.end_ns)),
            process_id_and_device: Some((device.pid, device.gpu_ordinal)),
        });
        found.push(finding);
    }
}
