//! Rules about whether the GPU waits for launches.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedShare, InspectedUnit, NumberWithUnit, ProcessDeviceUse,
};
use super::super::host::gap_cause::{IdleCauseKind, MIN_GAP_WITH_OTHER_HOST_WORK_NS};
use super::super::host::gpu_gaps::{
    GapsWithCauses, IdleCause, IdleGapReport, MIN_SEVERE_GAP_NS, MIN_WARNING_GAP_NS,
    OperationsAroundGap, explain_gaps,
};
use super::super::labels::readable_name;
use super::super::trace_facts::DiagnosisContext;
use super::super::vendor_names::TracePlatform;
use super::rule_outcome::{
    MissingData, RuleResult, count_with_noun, inspected_all, inspected_some, percent,
};
use crate::analyze::timeline::idle_time::{DeviceActivity, IdleGap};
use crate::model::Trace;
use crate::stats::{GroupedSamples, ValueSummary, shorten};

/// Busy shares at or above this leave launches nothing to gain.
const BUSY_PERCENT: f64 = 70.0;
/// Kernels that are shorter than this are hidden by launches.
const SHORT_GPU_TIME_NS: f64 = 10_000.0;
/// Smallest number of launches whose median counts.
const MIN_LAUNCHES_FOR_MEDIAN: usize = 30;
/// Characters of the name of an operation before or behind a gap.
const GAP_NAME_WIDTH: usize = 38;
/// A remedy must save at least the idle time divided by this number.
const MIN_MENDED_IDLE_DIVISOR: i64 = 4;
/// Maximum number of gap transitions that are shown as evidence.
const MAX_SHOWN_TRANSITIONS: usize = 3;
/// Part of the span that a class of gaps may take.
const MIN_GAP_CLASS_PERCENT: f64 = 5.0;

/// Kernels and launch calls of a process on a device.
struct KernelAndLaunchCallSums {
    kernels: ValueSummary,
    /// Time of the launch calls, for each kernel that they launched.
    call_ns_a_kernel: f64,
    calls: usize,
}

/// Launches of an activity, which is given by its number.
#[allow(clippy::cast_precision_loss)]
fn launch_sums_of_activity(
    context: &DiagnosisContext<'_>,
    index: usize,
) -> KernelAndLaunchCallSums {
    let trace: &Trace = context.trace;
    let (host, activity) = (&context.host, &context.activities[index]);
    let on_gpu = &trace.kernels.on_gpu;
    let own = |row: &usize| {
        let place = &trace.places[on_gpu.place.at(*row).0 as usize];
        (place.process, place.device) == (activity.process, activity.device)
    };
    let mut lengths = GroupedSamples::default();
    (0..on_gpu.len()).filter(own).for_each(|row| lengths.push(0, on_gpu.length(row)));
    let calls = host.launch_calls.summary_of_group(u32::try_from(index).unwrap_or(u32::MAX));
    // One launch call of a graph launches many kernels.
    let ratio = calls.count as f64 / host.launched_kernels[index].max(1) as f64;
    KernelAndLaunchCallSums {
        kernels: lengths.into_counted_values().summary_of_group(0),
        call_ns_a_kernel: calls.median * ratio,
        calls: calls.count,
    }
}

/// Rules that need launches state it if the trace has no launches.
pub(super) fn check_launch_calls(context: &DiagnosisContext<'_>) -> Result<(), MissingData> {
    check_gpu_work(context)?;
    let record = context.platform.record_launches_advice();
    MissingData::unless(context.host.calls > 0, "calls of the host were not recorded", record)
}

/// Rules about operations state it if the trace has no work of a GPU.
pub(super) fn check_gpu_work(context: &DiagnosisContext<'_>) -> Result<(), MissingData> {
    let record = context.platform.record_launches_advice();
    MissingData::unless(!context.all.is_empty(), "the trace holds no operation of a GPU", record)
}

pub(super) fn launch_bound_rule_text() -> String {
    format!(
        "busy below {BUSY_PERCENT} %, and the median kernel shorter than its launch, or shorter than {} µs \
         with {MIN_LAUNCHES_FOR_MEDIAN} launches; more than half of the idle time in gaps of up to {} ms is host code, \
         launch calls and their latency",
        SHORT_GPU_TIME_NS / 1e3,
        MIN_GAP_WITH_OTHER_HOST_WORK_NS / 1_000_000
    )
}

pub(super) fn launch_bound_rule(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
) -> RuleResult {
    let kernels = context.trace.kernels.on_gpu.len();
    check_launch_calls(context)?;
    if kernels == 0 {
        return Err(MissingData::no_work("the trace holds no kernels"));
    }
    let joined: usize = context.host.launched_kernels.iter().sum();
    let record = context.platform.record_launches_advice();
    if joined == 0 {
        return Err(MissingData::new(
            "no kernel can be joined with the call that launched it",
            record,
        ));
    }
    let missing = "the calls that launched the other kernels are not in the trace";
    let inspected = InspectedShare {
        missing: (joined < kernels).then(|| format!("{missing}; {record}")),
        ..inspected_some(joined, kernels, InspectedUnit::Operations)
    };
    let mut found = Vec::new();
    for (index, (device, activity)) in devices.iter().zip(&context.activities).enumerate() {
        // In long gaps the host did not launch.
        let span_ns = activity.span_of_gaps_ns() - device.gaps.long_ns;
        let busy = percent(device.busy_ns, span_ns);
        let KernelAndLaunchCallSums { kernels, call_ns_a_kernel, calls } =
            launch_sums_of_activity(context, index);
        let shorter = calls > 0 && kernels.median < call_ns_a_kernel;
        let short = kernels.median < SHORT_GPU_TIME_NS && calls >= MIN_LAUNCHES_FOR_MEDIAN;
        if busy >= BUSY_PERCENT || !(shorter || short) {
            continue;
        }
        // Work that was launched long before its turn did not wait for its launch.
        let recoverable = device.gaps.launching_ns;
        if recoverable * 2 <= device.gaps.total_ns() - device.gaps.long_ns {
            continue;
        }
        let is_short = |ns| ns <= MIN_GAP_WITH_OTHER_HOST_WORK_NS;
        let GapsWithCauses { transitions, .. } =
            explain_gaps(context, activity, &device.gaps.causes, is_short);
        found.push(DiagnosisFinding {
            id: "launch-bound",
            severity: FindingSeverity::from_saving(recoverable, activity.span_of_gaps_ns()),
            confidence: if shorter { FindingConfidence::High } else { FindingConfidence::Medium },
            title: format!(
                "device {} is busy {busy:.1} % of the time{}: the median kernel takes {:.1} µs, \
                 launching one {:.1} µs",
                device.device,
                if device.gaps.long_ns > 0 { " outside of gaps above 1 ms" } else { "" },
                kernels.median / 1e3,
                call_ns_a_kernel / 1e3
            ),
            measured: NumberWithUnit { value: busy, unit: "% busy" },
            threshold: NumberWithUnit { value: BUSY_PERCENT, unit: "% busy" },
            recoverable_ns: Some(recoverable),
            remedy: FindingRemedy::Graph,
            replayed: None,
            evidence: transition_evidence(device, &transitions),
            advice: format!(
                "launch less often: capture the step in a {}, fuse short kernels, or keep a \
                 persistent kernel; look for host code between launches",
                context.platform.graph_term()
            ),
            false_positive: "a trace that is mostly start-up or loading: restrict it with --range",
        });
    }
    Ok((found, inspected))
}

fn transition_evidence(
    device: &ProcessDeviceUse,
    transitions: &[OperationsAroundGap],
) -> Vec<FindingEvidence> {
    let evidence =
        transitions.iter().take(MAX_SHOWN_TRANSITIONS).map(|transition| FindingEvidence {
            what: [&transition.before, &transition.after]
                .map(|name| shorten(&readable_name(name), GAP_NAME_WIDTH))
                .join(" → "),
            count: transition.count,
            total_ns: Some(transition.total_ns),
            range: transition.range.clone(),
            span: Some(transition.longest),
            place: Some((device.pid, device.device)),
        });
    evidence.collect()
}

pub(super) fn gaps_rule_text() -> String {
    let [warning, severe] = [MIN_WARNING_GAP_NS, MIN_SEVERE_GAP_NS].map(|ns| ns / 1000);
    format!(
        "gaps above {severe} µs, or those of {warning} to {severe} µs, take more than {MIN_GAP_CLASS_PERCENT} % \
         of the span"
    )
}

/// Idle time by class, where a class takes more of the span than it may.
pub(super) fn find_idle_classes(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
) -> RuleResult {
    check_gpu_work(context)?;
    let mut found = Vec::new();
    for (device, activity) in devices.iter().zip(&context.activities) {
        let gaps = &device.gaps;
        let severe = percent(gaps.severe.total_ns, activity.span_of_gaps_ns());
        let warning = percent(gaps.warning.total_ns, activity.span_of_gaps_ns());
        let is_severe = |ns| ns > MIN_SEVERE_GAP_NS;
        let is_warning = |ns| (MIN_WARNING_GAP_NS..=MIN_SEVERE_GAP_NS).contains(&ns);
        let (class, explained, share, label) = if severe > MIN_GAP_CLASS_PERCENT {
            let explained = explain_gaps(context, activity, &gaps.causes, is_severe);
            (gaps.severe, explained, severe, "above 50 µs")
        } else if warning > MIN_GAP_CLASS_PERCENT {
            let explained = explain_gaps(context, activity, &gaps.causes, is_warning);
            (gaps.warning, explained, warning, "of 20 to 50 µs")
        } else {
            continue;
        };
        let GapsWithCauses { causes, transitions } = explained;
        let main = causes.first();
        let loading = code_loading_in_gaps(context, gaps, activity);
        let remedies: Vec<FindingRemedy> =
            causes.iter().map(|cause| remedy_of_idle_cause(cause, &loading)).collect();
        let first = remedies.iter().find(|remedy| **remedy != FindingRemedy::NotReplayed);
        // Without a replay the saving of a remedy is unknown.
        let mended = causes.iter().zip(&remedies).filter(|(_, remedy)| first == Some(*remedy));
        let mended_ns: i64 = mended.map(|(cause, _)| cause.total_ns).sum();
        // A change that mends little of the idle time does not mend the finding.
        let (saved, remedy) = match first {
            Some(remedy) if mended_ns * MIN_MENDED_IDLE_DIVISOR >= class.total_ns => {
                (mended_ns, remedy.clone())
            }
            _ => (0, FindingRemedy::NotReplayed),
        };
        let words = main.map_or(String::new(), |cause| {
            let once = cause.once && cause.kind != IdleCauseKind::FirstLaunch;
            let once = if once { ", once" } else { "" };
            format!("; most of the idle time: {}{once}", cause.label())
        });
        found.push(DiagnosisFinding {
            id: "gaps",
            severity: gap_severity((main, gaps.gap_count()), saved, activity.span_of_gaps_ns()),
            confidence: confidence_in_cause(main),
            title: format!(
                "device {} is idle for {share:.1} % of the time in {} {label}{words}",
                device.device,
                count_with_noun(class.count, "gap")
            ),
            measured: NumberWithUnit { value: share, unit: "% of the span" },
            threshold: NumberWithUnit { value: MIN_GAP_CLASS_PERCENT, unit: "% of the span" },
            recoverable_ns: (saved > 0).then_some(saved),
            remedy,
            replayed: None,
            evidence: gap_evidence(device, &causes, &transitions),
            advice: main.map_or(String::new(), |cause| gap_advice(cause, context.platform)),
            false_positive: "work that other processes did on the device is not in the trace",
        });
    }
    Ok((found, inspected_all(context.all.len(), InspectedUnit::Operations)))
}

/// The parts of gaps in which a call loaded the kernel that it launched.
fn code_loading_in_gaps(
    context: &DiagnosisContext<'_>,
    gaps: &IdleGapReport,
    activity: &DeviceActivity,
) -> Vec<(i64, i64)> {
    if gaps.idle_ns_of_causes(&[IdleCauseKind::FirstLaunch]) == 0 {
        return Vec::new();
    }
    let loads = |gap: &IdleGap| {
        context.causes_of_gap(gap).any(|((kind, _), _)| kind == IdleCauseKind::FirstLaunch)
    };
    let loading = activity.gaps.iter(&context.all).filter(loads).filter_map(|gap| {
        let call = context.launch_call(gap.after)?;
        Some((call.start.max(gap.start), call.end.min(gap.end)))
    });
    loading.collect()
}

/// The change that mends a cause; `loading` are the first launches.
fn remedy_of_idle_cause(cause: &IdleCause, loading: &[(i64, i64)]) -> FindingRemedy {
    match cause.kind {
        IdleCauseKind::FirstLaunch => FindingRemedy::WithoutPauses(loading.to_vec()),
        IdleCauseKind::HostCode
        | IdleCauseKind::OffCpu
        | IdleCauseKind::OsCall
        | IdleCauseKind::Call
        | IdleCauseKind::LaunchCall
            if cause.once =>
        {
            FindingRemedy::WithoutPauses(vec![cause.longest])
        }
        _ if cause.once => FindingRemedy::NotReplayed,
        IdleCauseKind::Wait => FindingRemedy::NoWaits,
        IdleCauseKind::HostCode
        | IdleCauseKind::OffCpu
        | IdleCauseKind::OsCall
        | IdleCauseKind::Call
        | IdleCauseKind::LaunchCall
        | IdleCauseKind::LaunchLatency => FindingRemedy::Graph,
        _ => FindingRemedy::NotReplayed,
    }
}

/// Pauses that happen once cost no step; nobody knows what could be saved of a gap without a
/// reason.
fn gap_severity(
    (main, count): (Option<&IdleCause>, usize),
    saved: i64,
    span_ns: i64,
) -> FindingSeverity {
    let starts_up = |cause: &IdleCause| cause.once || cause.kind == IdleCauseKind::FirstLaunch;
    let once = main.is_some_and(starts_up) && count > 1;
    match FindingSeverity::from_saving(saved, span_ns) {
        FindingSeverity::Severe if once => FindingSeverity::Warning,
        FindingSeverity::Information => FindingSeverity::Warning,
        severity => severity,
    }
}

fn confidence_in_cause(cause: Option<&IdleCause>) -> FindingConfidence {
    match cause.map(|cause| cause.kind) {
        Some(
            IdleCauseKind::EventWait
            | IdleCauseKind::DefaultStream
            | IdleCauseKind::HostFunction
            | IdleCauseKind::FullQueue
            | IdleCauseKind::WindowsDriver,
        ) => FindingConfidence::Medium,
        Some(kind) if kind.is_explained() => FindingConfidence::High,
        _ => FindingConfidence::Low,
    }
}

/// Causes, then transitions.
fn gap_evidence(
    device: &ProcessDeviceUse,
    causes: &[IdleCause],
    transitions: &[OperationsAroundGap],
) -> Vec<FindingEvidence> {
    let causes = causes.iter().take(3).map(|cause| FindingEvidence {
        what: cause.label(),
        count: cause.count,
        total_ns: Some(cause.total_ns),
        range: None,
        span: Some(cause.longest),
        place: Some((device.pid, device.device)),
    });
    causes.chain(transition_evidence(device, transitions)).collect()
}

/// Whether the host was in the range of a data loader.
fn is_loading_data(cause: &IdleCause) -> bool {
    cause.function.as_ref().is_some_and(|range| {
        let range = range.to_ascii_lowercase();
        ["dataloader", "data_loader", "dataiter", "load_batch", "next_batch", "input_pipeline"]
            .iter()
            .any(|word| range.contains(word))
    })
}

fn gap_advice(cause: &IdleCause, platform: TracePlatform) -> String {
    let graph = platform.graph_term();
    let words = match cause.kind {
        IdleCauseKind::Call
        | IdleCauseKind::LaunchCall
        | IdleCauseKind::OsCall
        | IdleCauseKind::HostCode
            if cause.once =>
        {
            "it happened once, as start-up does (context, library or module loading, the first \
             launch of a kernel, reading data): warm up before recording, or leave it out with \
             --range"
        }
        IdleCauseKind::FirstLaunch => {
            "it happened once for each kernel, whose first launch loads its code, as start-up does: \
             warm up before recording, or leave it out with --range"
        }
        IdleCauseKind::Wait => "launch the next work before waiting for the last, or do not wait",
        IdleCauseKind::Call => "move this call out of the loop: allocate once, copy asynchronously",
        IdleCauseKind::OsCall => "move calls that block (files, locks, sleeping) to another thread",
        IdleCauseKind::OffCpu => "give the launching thread a CPU of its own",
        IdleCauseKind::LaunchCall | IdleCauseKind::LaunchLatency => {
            return format!("use a {graph}: one launch for many kernels");
        }
        IdleCauseKind::HostCode if is_loading_data(cause) => {
            "load the next batch while the GPU works: more workers of the data loader, pinned \
             memory, batches prepared ahead"
        }
        IdleCauseKind::HostCode => {
            return format!(
                "prepare the next launches while the GPU works: {graph}, fewer host steps, threads"
            );
        }
        IdleCauseKind::BackToBack | IdleCauseKind::InGraph => {
            "the work was queued: fewer and longer kernels, fewer dependencies between them"
        }
        IdleCauseKind::EventWait => {
            "the work was launched in time: shorten the work that its stream waits for, or wait \
             for an earlier event"
        }
        IdleCauseKind::DefaultStream => {
            "the work was launched in time: the legacy default stream waits for all others, and they \
             for it; use streams created with cudaStreamNonBlocking, or compile with \
             --default-stream per-thread"
        }
        IdleCauseKind::HostFunction => {
            "the work was launched in time: keep functions of the host out of the stream"
        }
        IdleCauseKind::Elsewhere => {
            "the work was launched in time: balance the devices, and overlap the transfer that it \
             waits for"
        }
        IdleCauseKind::FullQueue => {
            return format!("queue fewer launches at once: {graph}, or launch in time");
        }
        IdleCauseKind::WindowsDriver => {
            return format!(
                "the work was launched in time: use Linux, or a {graph}; allocate before the loop, \
                 since the driver maps new memory before it submits"
            );
        }
        IdleCauseKind::NotStarted => {
            "the work was launched in time: look for a dependency that the trace lacks (an event, \
             another process or device, a callback), and record all processes and devices"
        }
        IdleCauseKind::Migration => {
            return format!(
                "move managed pages before they are used: {}",
                platform.prefetch_advice()
            );
        }
        IdleCauseKind::Clocks => "the times of host and device do not fit: record again",
        IdleCauseKind::Unknown => return platform.record_launches_advice().to_owned(),
    };
    words.to_owned()
}
