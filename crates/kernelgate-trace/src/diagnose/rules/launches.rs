//! Whether the GPU waits for launches.

use super::super::context::Context;
use super::super::finding::{
    Confidence, DeviceUse, Evidence, Finding, Inspected, Measure, Remedy, Severity, Unit,
};
use super::super::host::cause::{CauseKind, LONGER_THAN_LAUNCHES_NS};
use super::super::host::gaps::{
    Cause, ExplainedGaps, GapReport, SEVERE_NS, Transition, WARNING_NS, explain,
};
use super::super::labels::short_name;
use super::super::platform::Platform;
use super::outcome::{Lack, Outcome, all_of, counted, percent, some_of};
use crate::analyze::timeline::idle::{Activity, Gap};
use crate::model::Trace;
use crate::stats::{Samples, Summary, shorten};

/// Busy shares at or above this leave launches nothing to gain.
const BUSY: f64 = 70.0;
/// Kernels that are shorter than this are hidden by launches.
const SHORT_NS: f64 = 10_000.0;
/// Smallest number of launches whose median counts.
const FEW: usize = 30;
/// Characters of the name of an operation before or behind a gap.
const NAME: usize = 38;
/// One part in so many of the idle time that a change has to mend.
const IDLE_OVER_GAIN: i64 = 4;
/// Transitions that show a finding.
const TRANSITIONS: usize = 3;
/// Part of the span that a class of gaps may take.
const GAP_SHARE: f64 = 5.0;

/// Kernels and launch calls of a process on a device.
struct LaunchSums {
    kernels: Summary,
    /// Time of the launch calls, for each kernel that they launched.
    call_ns_a_kernel: f64,
    calls: usize,
}

/// Launches of an activity, which is given by its number.
#[allow(clippy::cast_precision_loss)]
fn launched(context: &Context<'_>, index: usize) -> LaunchSums {
    let trace: &Trace = context.trace;
    let (host, activity) = (&context.host, &context.activities[index]);
    let on_gpu = &trace.kernels.on_gpu;
    let own = |row: &usize| {
        let place = &trace.places[on_gpu.place.at(*row).0 as usize];
        (place.process, place.device) == (activity.process, activity.device)
    };
    let mut lengths = Samples::default();
    (0..on_gpu.len()).filter(own).for_each(|row| lengths.push(0, on_gpu.length(row)));
    let calls = host.launch_calls.summary(u32::try_from(index).unwrap_or(u32::MAX));
    // One launch call of a graph launches many kernels.
    let ratio = calls.count as f64 / host.launched_kernels[index].max(1) as f64;
    LaunchSums {
        kernels: lengths.counted().summary(0),
        call_ns_a_kernel: calls.median * ratio,
        calls: calls.count,
    }
}

/// The rules that need launches say so where the trace has none.
pub(super) fn calls_lack(context: &Context<'_>) -> Option<Lack> {
    if context.all.is_empty() {
        return Some(no_work(context));
    }
    let record = || context.platform.record_launches();
    (context.host.calls == 0).then(|| Lack::new("calls of the host were not recorded", record()))
}

/// The reason to skip a rule where the trace has no work of a GPU.
pub(super) fn no_work(context: &Context<'_>) -> Lack {
    Lack::new("the trace holds no operation of a GPU", context.platform.record_launches())
}

pub(super) fn launch_bound_finds() -> String {
    format!(
        "busy below {BUSY} %, and the median kernel shorter than its launch, or shorter than {} µs \
         with {FEW} launches; more than half of the idle time in gaps of up to {} ms is host code, \
         launch calls and their latency",
        SHORT_NS / 1e3,
        LONGER_THAN_LAUNCHES_NS / 1_000_000
    )
}

pub(super) fn launch_bound(context: &Context<'_>, devices: &[DeviceUse]) -> Outcome {
    let kernels = context.trace.kernels.on_gpu.len();
    if let Some(lack) = calls_lack(context) {
        return lack.into();
    }
    if kernels == 0 {
        return Lack::absent("the trace holds no kernels").into();
    }
    let joined: usize = context.host.launched_kernels.iter().sum();
    let record = context.platform.record_launches();
    if joined == 0 {
        return Lack::new("no kernel can be joined with the call that launched it", record).into();
    }
    let missing = "the calls that launched the other kernels are not in the trace";
    let inspected = Inspected {
        missing: (joined < kernels).then(|| format!("{missing}; {record}")),
        ..some_of(joined, kernels, Unit::Operations)
    };
    let mut found = Vec::new();
    for (index, (device, activity)) in devices.iter().zip(&context.activities).enumerate() {
        // In long gaps the host did not launch.
        let span_ns = activity.span_ns() - device.gaps.long_ns;
        let busy = percent(device.busy_ns, span_ns);
        let LaunchSums { kernels, call_ns_a_kernel, calls } = launched(context, index);
        let shorter = calls > 0 && kernels.median < call_ns_a_kernel;
        let short = kernels.median < SHORT_NS && calls >= FEW;
        if busy >= BUSY || !(shorter || short) {
            continue;
        }
        // Work that was launched long before its turn did not wait for its launch.
        let recoverable = device.gaps.launching_ns;
        if recoverable * 2 <= device.gaps.total_ns() - device.gaps.long_ns {
            continue;
        }
        let is_short = |ns| ns <= LONGER_THAN_LAUNCHES_NS;
        let ExplainedGaps { transitions, .. } =
            explain(context, activity, &device.gaps.causes, is_short);
        found.push(Finding {
            id: "launch-bound",
            severity: Severity::from_saving(recoverable, activity.span_ns()),
            confidence: if shorter { Confidence::High } else { Confidence::Medium },
            title: format!(
                "device {} is busy {busy:.1} % of the time{}: the median kernel takes {:.1} µs, \
                 launching one {:.1} µs",
                device.device,
                if device.gaps.long_ns > 0 { " outside of gaps above 1 ms" } else { "" },
                kernels.median / 1e3,
                call_ns_a_kernel / 1e3
            ),
            measured: Measure { value: busy, unit: "% busy" },
            threshold: Measure { value: BUSY, unit: "% busy" },
            recoverable_ns: Some(recoverable),
            remedy: Remedy::Graph,
            replayed: None,
            evidence: transition_evidence(device, &transitions),
            advice: format!(
                "launch less often: capture the step in a {}, fuse short kernels, or keep a \
                 persistent kernel; look for host code between launches",
                context.platform.graph()
            ),
            false_positive: "a trace that is mostly start-up or loading: restrict it with --range",
        });
    }
    Outcome::Checked(found, inspected)
}

fn transition_evidence(device: &DeviceUse, transitions: &[Transition]) -> Vec<Evidence> {
    let evidence = transitions.iter().take(TRANSITIONS).map(|transition| Evidence {
        what: [&transition.before, &transition.after]
            .map(|name| shorten(&short_name(name), NAME))
            .join(" → "),
        count: transition.count,
        total_ns: Some(transition.total_ns),
        range: transition.range.clone(),
        span: Some(transition.longest),
        place: Some((device.pid, device.device)),
    });
    evidence.collect()
}

pub(super) fn gaps_finds() -> String {
    let [warning, severe] = [WARNING_NS, SEVERE_NS].map(|ns| ns / 1000);
    format!(
        "gaps above {severe} µs, or those of {warning} to {severe} µs, take more than {GAP_SHARE} % \
         of the span"
    )
}

/// Idle time by class, where a class takes more of the span than it may.
pub(super) fn gaps(context: &Context<'_>, devices: &[DeviceUse]) -> Outcome {
    if context.all.is_empty() {
        return no_work(context).into();
    }
    let mut found = Vec::new();
    for (device, activity) in devices.iter().zip(&context.activities) {
        let gaps = &device.gaps;
        let severe = percent(gaps.severe.total_ns, activity.span_ns());
        let warning = percent(gaps.warning.total_ns, activity.span_ns());
        let is_severe = |ns| ns > SEVERE_NS;
        let is_warning = |ns| (WARNING_NS..=SEVERE_NS).contains(&ns);
        let (class, explained, share, label) = if severe > GAP_SHARE {
            let explained = explain(context, activity, &gaps.causes, is_severe);
            (gaps.severe, explained, severe, "above 50 µs")
        } else if warning > GAP_SHARE {
            let explained = explain(context, activity, &gaps.causes, is_warning);
            (gaps.warning, explained, warning, "of 20 to 50 µs")
        } else {
            continue;
        };
        let ExplainedGaps { causes, transitions } = explained;
        let main = causes.first();
        let loading = first_launches(context, gaps, activity);
        let remedies: Vec<Remedy> = causes.iter().map(|cause| remedy_of(cause, &loading)).collect();
        let first = remedies.iter().find(|remedy| **remedy != Remedy::NotReplayed);
        // Without a replay the saving of a remedy is unknown.
        let mended = causes.iter().zip(&remedies).filter(|(_, remedy)| first == Some(*remedy));
        let mended_ns: i64 = mended.map(|(cause, _)| cause.total_ns).sum();
        // A change that mends little of the idle time does not mend the finding.
        let (saved, remedy) = match first {
            Some(remedy) if mended_ns * IDLE_OVER_GAIN >= class.total_ns => {
                (mended_ns, remedy.clone())
            }
            _ => (0, Remedy::NotReplayed),
        };
        let words = main.map_or(String::new(), |cause| {
            let once = cause.once && cause.kind != CauseKind::FirstLaunch;
            let once = if once { ", once" } else { "" };
            format!("; most of the idle time: {}{once}", cause.label())
        });
        found.push(Finding {
            id: "gaps",
            severity: severity((main, gaps.count()), saved, activity.span_ns()),
            confidence: confidence(main),
            title: format!(
                "device {} is idle for {share:.1} % of the time in {} {label}{words}",
                device.device,
                counted(class.count, "gap")
            ),
            measured: Measure { value: share, unit: "% of the span" },
            threshold: Measure { value: GAP_SHARE, unit: "% of the span" },
            recoverable_ns: (saved > 0).then_some(saved),
            remedy,
            replayed: None,
            evidence: evidence(device, &causes, &transitions),
            advice: main.map_or(String::new(), |cause| advice(cause, context.platform)),
            false_positive: "work that other processes did on the device is not in the trace",
        });
    }
    Outcome::Checked(found, all_of(context.all.len(), Unit::Operations))
}

/// The parts of gaps in which a call loaded the kernel that it launched.
fn first_launches(context: &Context<'_>, gaps: &GapReport, activity: &Activity) -> Vec<(i64, i64)> {
    if gaps.idle_by_causes(&[CauseKind::FirstLaunch]) == 0 {
        return Vec::new();
    }
    let loads =
        |gap: &Gap| context.causes_of(gap).any(|((kind, _), _)| kind == CauseKind::FirstLaunch);
    let loading = activity.gaps.iter(&context.all).filter(loads).filter_map(|gap| {
        let call = context.launch(gap.after)?;
        Some((call.start.max(gap.start), call.end.min(gap.end)))
    });
    loading.collect()
}

/// The change that mends a cause; `loading` are the first launches.
fn remedy_of(cause: &Cause, loading: &[(i64, i64)]) -> Remedy {
    match cause.kind {
        CauseKind::FirstLaunch => Remedy::WithoutPauses(loading.to_vec()),
        CauseKind::HostCode
        | CauseKind::OffCpu
        | CauseKind::OsCall
        | CauseKind::Call
        | CauseKind::LaunchCall
            if cause.once =>
        {
            Remedy::WithoutPauses(vec![cause.longest])
        }
        _ if cause.once => Remedy::NotReplayed,
        CauseKind::Wait => Remedy::NoWaits,
        CauseKind::HostCode
        | CauseKind::OffCpu
        | CauseKind::OsCall
        | CauseKind::Call
        | CauseKind::LaunchCall
        | CauseKind::LaunchLatency => Remedy::Graph,
        _ => Remedy::NotReplayed,
    }
}

/// Pauses that happen once cost no step; nobody knows what could be saved of a gap without a reason.
fn severity((main, count): (Option<&Cause>, usize), saved: i64, span_ns: i64) -> Severity {
    let starts_up = |cause: &Cause| cause.once || cause.kind == CauseKind::FirstLaunch;
    let once = main.is_some_and(starts_up) && count > 1;
    match Severity::from_saving(saved, span_ns) {
        Severity::Severe if once => Severity::Warning,
        Severity::Information => Severity::Warning,
        severity => severity,
    }
}

fn confidence(cause: Option<&Cause>) -> Confidence {
    match cause.map(|cause| cause.kind) {
        Some(
            CauseKind::EventWait
            | CauseKind::DefaultStream
            | CauseKind::HostFunction
            | CauseKind::FullQueue
            | CauseKind::WindowsDriver,
        ) => Confidence::Medium,
        Some(kind) if kind.explained() => Confidence::High,
        _ => Confidence::Low,
    }
}

/// Causes, then transitions.
fn evidence(device: &DeviceUse, causes: &[Cause], transitions: &[Transition]) -> Vec<Evidence> {
    let causes = causes.iter().take(3).map(|cause| Evidence {
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
fn loads_data(cause: &Cause) -> bool {
    cause.function.as_ref().is_some_and(|range| {
        let range = range.to_ascii_lowercase();
        ["dataloader", "data_loader", "dataiter", "load_batch", "next_batch", "input_pipeline"]
            .iter()
            .any(|word| range.contains(word))
    })
}

fn advice(cause: &Cause, platform: Platform) -> String {
    let graph = platform.graph();
    let words = match cause.kind {
        CauseKind::Call | CauseKind::LaunchCall | CauseKind::OsCall | CauseKind::HostCode
            if cause.once =>
        {
            "it happened once, as start-up does (context, library or module loading, the first \
             launch of a kernel, reading data): warm up before recording, or leave it out with \
             --range"
        }
        CauseKind::FirstLaunch => {
            "it happened once for each kernel, whose first launch loads its code, as start-up does: \
             warm up before recording, or leave it out with --range"
        }
        CauseKind::Wait => "launch the next work before waiting for the last, or do not wait",
        CauseKind::Call => "move this call out of the loop: allocate once, copy asynchronously",
        CauseKind::OsCall => "move calls that block (files, locks, sleeping) to another thread",
        CauseKind::OffCpu => "give the launching thread a CPU of its own",
        CauseKind::LaunchCall | CauseKind::LaunchLatency => {
            return format!("use a {graph}: one launch for many kernels");
        }
        CauseKind::HostCode if loads_data(cause) => {
            "load the next batch while the GPU works: more workers of the data loader, pinned \
             memory, batches prepared ahead"
        }
        CauseKind::HostCode => {
            return format!(
                "prepare the next launches while the GPU works: {graph}, fewer host steps, threads"
            );
        }
        CauseKind::BackToBack | CauseKind::InGraph => {
            "the work was queued: fewer and longer kernels, fewer dependencies between them"
        }
        CauseKind::EventWait => {
            "the work was launched in time: shorten the work that its stream waits for, or wait \
             for an earlier event"
        }
        CauseKind::DefaultStream => {
            "the work was launched in time: the legacy default stream waits for all others, and they \
             for it; use streams created with cudaStreamNonBlocking, or compile with \
             --default-stream per-thread"
        }
        CauseKind::HostFunction => {
            "the work was launched in time: keep functions of the host out of the stream"
        }
        CauseKind::Elsewhere => {
            "the work was launched in time: balance the devices, and overlap the transfer that it \
             waits for"
        }
        CauseKind::FullQueue => {
            return format!("queue fewer launches at once: {graph}, or launch in time");
        }
        CauseKind::WindowsDriver => {
            return format!(
                "the work was launched in time: use Linux, or a {graph}; allocate before the loop, \
                 since the driver maps new memory before it submits"
            );
        }
        CauseKind::NotStarted => {
            "the work was launched in time: look for a dependency that the trace lacks (an event, \
             another process or device, a callback), and record all processes and devices"
        }
        CauseKind::Migration => {
            return format!("move managed pages before they are used: {}", platform.prefetch());
        }
        CauseKind::Clocks => "the times of host and device do not fit: record again",
        CauseKind::Unknown => return platform.record_launches().to_owned(),
    };
    words.to_owned()
}
