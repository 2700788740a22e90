//! Rules on the quality of the trace itself.

mod impossible_times;
mod messages;

use super::super::finding::{
    DiagnosisFinding, FindingEvidence, FindingSeverity, InspectedUnit, NumberWithUnit,
    ProcessDeviceUse,
};
use super::super::host::gap_cause::IdleCauseKind;
use super::super::trace_facts::DiagnosisContext;
use super::rule_outcome::{RuleResult, doubtful_trace_finding, inspected_all, number, percent};
use crate::analyze::timeline::idle_time::IdleGap;
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::model::TraceRecorder;
use impossible_times::MAX_HARMLESS_OVERLAP_NS;

/// The profiler's own work, as a part of the time of the GPU, above which times are doubtful.
const MAX_PROFILER_OVERHEAD_PERCENT: f64 = 5.0;
/// A gap this many times as long as all other time is taken for a jump of the clock, or a pause.
const CLOCK_JUMP_LENGTH_RATIO: i64 = 100;

pub(super) fn quality_finding_text() -> String {
    format!(
        "records dropped, orphaned, unreadable or odd; graphs recorded whole; the profiler at work \
         for more than {MAX_PROFILER_OVERHEAD_PERCENT} % of the time; a gap {CLOCK_JUMP_LENGTH_RATIO} times as long as everything else; \
         operations that overlap on one stream by more than {} µs or start before their launch",
        MAX_HARMLESS_OVERLAP_NS / 1000
    )
}

/// Rule that finds reasons to doubt the trace itself. The function is long because it has a
/// sentence for each reason.
#[expect(clippy::too_many_lines)]
pub(super) fn data_quality_rule(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
) -> RuleResult {
    let (trace, quality) = (context.trace, &context.trace.quality);
    let mut found = Vec::new();
    let count = |count: u64| number(usize::try_from(count).unwrap_or(usize::MAX), "records");
    if context.all.is_empty() && trace.profiled.is_empty() {
        found.push(no_gpu_work_finding(context));
    }
    for part in &quality.unreadable {
        found.push(doubtful_trace_finding(
            FindingSeverity::Severe,
            format!("a part could not be read to its end: {part}"),
            number(1, "parts"),
            "export or record again; sums below are of the rest",
            "nothing",
        ));
    }
    for note in &quality.notes {
        found.push(doubtful_trace_finding(
            FindingSeverity::Information,
            note.clone(),
            number(1, "notes"),
            "check one number against the recorder's own output",
            "the file is as described",
        ));
    }
    if quality.dropped > 0 {
        found.push(doubtful_trace_finding(
            FindingSeverity::Severe,
            format!("the recorder lost {} records", quality.dropped),
            count(quality.dropped),
            "record a shorter time, or with larger buffers",
            "nothing",
        ));
    }
    impossible_times::find_operations_without_times(context, &mut found);
    impossible_times::find_stream_overlaps(context, &mut found);
    impossible_times::find_starts_before_launches(context, &mut found);
    if !quality.missing.is_empty() && trace.profiled.is_empty() {
        found.push(doubtful_trace_finding(
            FindingSeverity::Information,
            format!("not recorded: {}", quality.missing.join(", ")),
            number(quality.missing.len(), "tables"),
            format!(
                "{}; questions that need them are listed as not measured",
                context.platform.record_launches_advice()
            ),
            "the program has none of these",
        ));
    }
    find_operations_without_call(context, &mut found);
    find_graphs_without_nodes(context, &mut found);
    for (what, records, advice) in [
        (
            "ranges were never closed; they end with the trace",
            quality.unclosed_ranges,
            UNCLOSED_RANGES_ADVICE,
        ),
        (
            "records end before they start; they count as zero long",
            quality.backwards,
            DOUBTFUL_CLOCK_ADVICE,
        ),
        ("events are no valid JSON and do not count", quality.broken_events, STRINGS_ADVICE),
        ("values do not fit their field and do not count", quality.odd_values, RECORD_AGAIN_ADVICE),
        (
            "texts are not UTF-8; bytes that are not read as \u{fffd}",
            quality.invalid_texts,
            NAMES_ADVICE,
        ),
    ] {
        if records > 0 {
            let title = format!("{records} {what}");
            found.push(doubtful_trace_finding(
                FindingSeverity::Information,
                title,
                count(records),
                advice,
                "a trace that was stopped while the program ran",
            ));
        }
    }
    find_profiler_overhead(context, devices, &mut found);
    find_clock_jump(context, devices, &mut found);
    find_profiler_messages(context, &mut found);
    Ok((
        found,
        inspected_all(context.all.len().max(trace.profiled.len()), InspectedUnit::Operations),
    ))
}

/// Adds the warnings and errors of the profiler.
fn find_profiler_messages(context: &DiagnosisContext<'_>, found: &mut Vec<DiagnosisFinding>) {
    let quality = &context.trace.quality;
    if !quality.messages.is_empty() && !context.all.is_empty() {
        let mut finding = doubtful_trace_finding(
            FindingSeverity::Information,
            format!("the profiler reported {} warnings and errors", quality.messages.len()),
            number(quality.messages.len(), "messages"),
            "read them; most concern libraries that the program does not use",
            "warnings about APIs that were not to be traced",
        );
        if let Some(reason) = messages::reason_in_messages(&quality.messages, true) {
            finding.severity = FindingSeverity::Warning;
            finding.title = format!("{}: {}", finding.title, reason.words);
            finding.advice = reason.advice;
        }
        finding.evidence = messages::messages_as_evidence(&quality.messages);
        found.push(finding);
    }
}

/// A trace without GPU work; the recorder's messages may say why.
fn no_gpu_work_finding(context: &DiagnosisContext<'_>) -> DiagnosisFinding {
    let trace = context.trace;
    let mut own = trace.processes.iter().filter(|_| trace.recorder == TraceRecorder::Chrome);
    let gpu_process = own.find_map(|process| {
        let name = trace.names.text(process.name?);
        (name.contains("GPU") || name == "CUDA functions").then_some(name)
    });
    let reason = messages::reason_in_messages(&trace.quality.messages, false);
    let sites = context.host.sites.iter();
    let launching = sites.filter(|((name, _), _)| context.function_name(*name).contains("Launch"));
    let launches: usize = launching.map(|(_, calls)| calls.count).sum();
    let because = match (&reason, gpu_process) {
        (Some(reason), _) => format!(": {}", reason.words),
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
    let record = context.platform.record_launches_advice();
    let advice = match reason {
        Some(reason) => reason.advice,
        None => format!("{record}, and let the program run until its GPU work is done"),
    };
    let title = "the trace holds no kernel, copy, set or graph launch: nothing about the GPU can \
                 be concluded";
    let mut finding = doubtful_trace_finding(
        FindingSeverity::Severe,
        format!("{title}{because}"),
        number(0, "operations"),
        advice,
        "a program that does not use the GPU",
    );
    finding.evidence = messages::messages_as_evidence(&trace.quality.messages);
    finding
}

const UNCLOSED_RANGES_ADVICE: &str =
    "their lengths are upper bounds; close every range, or record to the end";
const DOUBTFUL_CLOCK_ADVICE: &str = "times around them are doubtful; record again";
const RECORD_AGAIN_ADVICE: &str = "record again; sums below are without them";
const STRINGS_ADVICE: &str =
    "PyTorch writes some strings unescaped (with_stack=True); the rest was read";
const NAMES_ADVICE: &str = "give ranges names in UTF-8";

/// Operations without a call, and what that hides.
fn find_operations_without_call(context: &DiagnosisContext<'_>, found: &mut Vec<DiagnosisFinding>) {
    let operations_without_call = context.host.operations_without_call;
    let launched = context.all.len() - context.classes.migration_count();
    if operations_without_call == 0 || context.host.calls == 0 {
        return;
    }
    #[allow(clippy::cast_precision_loss)]
    let share = operations_without_call as f64 / launched.max(1) as f64 * 100.0;
    let severity =
        if share > 5.0 { FindingSeverity::Warning } else { FindingSeverity::Information };
    let mut finding = doubtful_trace_finding(
        severity,
        format!(
            "{operations_without_call} of {launched} operations were launched by calls that the trace does not hold"
        ),
        NumberWithUnit { value: share, unit: "%" },
        "start recording before the program launches, or skip its first step; their ranges and the \
         causes of the gaps before them are unknown",
        "a recording that starts in the middle of a run",
    );
    finding.threshold = NumberWithUnit { value: 5.0, unit: "%" };
    found.push(finding);
}

/// Finds graphs whose nodes were not recorded, so that no table has their kernels.
fn find_graphs_without_nodes(context: &DiagnosisContext<'_>, found: &mut Vec<DiagnosisFinding>) {
    let graphs = &context.trace.graphs.on_gpu;
    if graphs.is_empty() {
        return;
    }
    let time: i64 = graphs.total_duration_ns();
    let busy: i64 = context.activities.iter().map(|activity| activity.busy_ns).sum();
    let share = percent(time, busy);
    let mut finding = doubtful_trace_finding(
        if share > 50.0 { FindingSeverity::Warning } else { FindingSeverity::Information },
        format!(
            "{} graph launches were recorded whole: {share:.1} % of the busy time has no kernels",
            graphs.len()
        ),
        NumberWithUnit { value: share, unit: "% of busy time" },
        context.platform.advice_to_trace_graph_nodes(),
        "graphs whose launches alone are of interest",
    );
    finding.threshold = NumberWithUnit { value: 50.0, unit: "% of busy time" };
    found.push(finding);
}

/// The cost of the profiler itself while the GPU was used.
fn find_profiler_overhead(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
    found: &mut Vec<DiagnosisFinding>,
) {
    let (Some(first), Some(last)) = (
        devices.iter().map(|device| device.span.0).min(),
        devices.iter().map(|device| device.span.1).max(),
    ) else {
        return;
    };
    let overhead = context.trace.quality.overhead.iter().copied();
    let overhead = UnitedSpans::new(overhead.filter(|(start, end)| start < end).collect());
    let share = percent(overhead.covered_within((first, last)), last - first);
    if share > MAX_PROFILER_OVERHEAD_PERCENT {
        let mut finding = doubtful_trace_finding(
            FindingSeverity::Warning,
            format!("the profiler worked for {share:.1} % of the time in which the GPU was used"),
            NumberWithUnit { value: share, unit: "%" },
            "gaps and host times are longer than without the profiler; record fewer APIs, or later",
            "overhead on threads that launch nothing",
        );
        finding.threshold = NumberWithUnit { value: MAX_PROFILER_OVERHEAD_PERCENT, unit: "%" };
        found.push(finding);
    }
}

/// A gap that dwarfs everything else: shares of the span mean little.
fn find_clock_jump(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
    found: &mut Vec<DiagnosisFinding>,
) {
    for (device, activity) in devices.iter().zip(&context.activities) {
        let longest = activity.gaps.iter(&context.all).max_by_key(IdleGap::gap_ns);
        let Some(longest) = longest else { continue };
        // A call that lasts, or work that was launched, explains the gap.
        let unexplained = |kind| {
            matches!(kind, IdleCauseKind::HostCode | IdleCauseKind::OffCpu) || !kind.is_explained()
        };
        let causes = context.causes_of_gap(&longest);
        let doubtful = causes
            .filter(|((kind, _), _)| unexplained(*kind) && *kind != IdleCauseKind::NotStarted)
            .map(|(_, ns)| ns);
        if doubtful.sum::<i64>() * 2 < longest.gap_ns() {
            continue;
        }
        let rest = activity.span_of_gaps_ns() - longest.gap_ns();
        if rest <= 0 || longest.gap_ns() / CLOCK_JUMP_LENGTH_RATIO < rest {
            continue;
        }
        let mut finding = doubtful_trace_finding(
            FindingSeverity::Warning,
            format!(
                "one idle time on device {} is more than {CLOCK_JUMP_LENGTH_RATIO} times as long as everything else: \
                 the clock jumped, or the program paused",
                device.device
            ),
            NumberWithUnit {
                value: percent(longest.gap_ns(), activity.span_of_gaps_ns()),
                unit: "%",
            },
            "shares of the whole span mean little; restrict the trace with --range",
            "a program that waits for its user",
        );
        finding.evidence.push(FindingEvidence {
            what: "idle time".to_owned(),
            count: 1,
            total_ns: Some(longest.gap_ns()),
            range: context.path_of_operation(longest.after),
            span: Some((longest.start, longest.end)),
            place: Some((device.pid, device.device)),
        });
        found.push(finding);
    }
}
