//! Whether the GPU waits for launches.

use super::super::cause::CauseKind;
use super::super::context::Context;
use super::super::finding::{Confidence, DeviceUse, Evidence, Finding, Measure, Severity};
use super::super::labels::short_name;
use super::outcome::{Outcome, percent};
use crate::model::Trace;
use crate::stats::Summary;

/// Busy shares at or above this leave launches nothing to gain.
const BUSY: f64 = 70.0;
/// Kernels that are shorter than this are hidden by launches.
const SHORT_NS: f64 = 10_000.0;
/// Launches below which a median says nothing.
const FEW: usize = 100;
/// Part of the span that a class of gaps may take.
const GAP_SHARE: f64 = 5.0;

/// Kernels and launch calls of a process on a device.
struct Launched {
    kernels: Summary,
    /// Time of the launch calls, for each kernel that they launched.
    call_ns_a_kernel: f64,
    calls: usize,
}

/// Those of an activity, by its number.
#[allow(clippy::cast_precision_loss)]
fn launched(context: &Context<'_>, index: usize) -> Launched {
    let trace: &Trace = context.trace;
    let (host, activity) = (&context.host, &context.activities[index]);
    let on_gpu = &trace.kernels.on_gpu;
    let own = |row: &usize| {
        let place = &trace.places[on_gpu.place[*row].0 as usize];
        (place.process, place.device) == (activity.process, activity.device)
    };
    let length = |row| on_gpu.end[row] - on_gpu.start[row];
    let mut lengths: Vec<i64> = (0..on_gpu.len()).filter(own).map(length).collect();
    let calls = host.launch_calls.summary(u32::try_from(index).unwrap_or(u32::MAX));
    // A graph's one call launches many kernels.
    let ratio = calls.count as f64 / host.launched_kernels[index].max(1) as f64;
    Launched {
        kernels: Summary::of(&mut lengths),
        call_ns_a_kernel: calls.median * ratio,
        calls: calls.count,
    }
}

pub(super) fn launch_bound(context: &Context<'_>, devices: &[DeviceUse]) -> Outcome {
    if context.trace.kernels.on_gpu.is_empty() {
        return Outcome::Skipped("the trace holds no kernels".to_owned());
    }
    if context.host.calls == 0 {
        return Outcome::Skipped(
            "CUDA calls were not recorded; record with --trace=cuda".to_owned(),
        );
    }
    let mut found = Vec::new();
    for (index, (device, activity)) in devices.iter().zip(&context.activities).enumerate() {
        let busy = percent(device.busy_ns, activity.span_ns());
        let Launched { kernels, call_ns_a_kernel, calls } = launched(context, index);
        let shorter = calls > 0 && kernels.median < call_ns_a_kernel;
        let short = kernels.median < SHORT_NS && calls >= FEW;
        if busy >= BUSY || !(shorter || short) {
            continue;
        }
        // What was launched long before its turn did not wait for its launch.
        let queued = device.gaps.of_causes(&[CauseKind::Queued, CauseKind::Unknown]);
        if queued * 2 > device.gaps.total_ns() {
            continue;
        }
        let waiting = [CauseKind::LaunchCall, CauseKind::HostCode, CauseKind::OsCall];
        let recoverable = device.gaps.of_causes(&waiting);
        found.push(Finding {
            id: "launch-bound",
            severity: Severity::Severe,
            confidence: if shorter { Confidence::High } else { Confidence::Medium },
            title: format!(
                "device {} is busy {busy:.1} % of the time: the median kernel takes {:.1} µs, \
                 launching one {:.1} µs",
                device.device,
                kernels.median / 1e3,
                call_ns_a_kernel / 1e3
            ),
            measured: Measure { value: busy, unit: "% busy" },
            threshold: Measure { value: BUSY, unit: "% busy" },
            recoverable_ns: Some(recoverable),
            evidence: transitions(device, 3),
            advice: "launch less often: capture the step in a CUDA graph, fuse short kernels, or \
                     keep a persistent kernel; look for host code between launches",
            false_positive: "a trace that is mostly start-up or loading: restrict it with --range",
        });
    }
    Outcome::Found(found)
}

fn transitions(device: &DeviceUse, count: usize) -> Vec<Evidence> {
    device
        .gaps
        .transitions
        .iter()
        .take(count)
        .map(|transition| Evidence {
            what: format!("{} → {}", short_name(&transition.before), short_name(&transition.after)),
            count: transition.count,
            total_ns: Some(transition.total_ns),
            range: transition.range.clone(),
            span: Some(transition.longest),
            place: Some((device.pid, device.device)),
        })
        .collect()
}

/// Idle time by class, where a class takes more of the span than it may.
pub(super) fn gaps(context: &Context<'_>, devices: &[DeviceUse]) -> Outcome {
    if context.all.is_empty() {
        return Outcome::Skipped("the trace holds no operation of a GPU".to_owned());
    }
    let mut found = Vec::new();
    for (device, activity) in devices.iter().zip(&context.activities) {
        let gaps = &device.gaps;
        let severe = percent(gaps.severe.total_ns, activity.span_ns());
        let warning = percent(gaps.warning.total_ns, activity.span_ns());
        let (class, share, label) = if severe > GAP_SHARE {
            (gaps.severe, severe, "above 50 µs")
        } else if warning > GAP_SHARE {
            (gaps.warning, warning, "of 20 to 50 µs")
        } else {
            continue;
        };
        let severity = if severe > GAP_SHARE { Severity::Severe } else { Severity::Warning };
        let main = gaps.causes.first().map_or(String::new(), |cause| {
            let by = cause.function.as_ref().map_or(String::new(), |name| format!(" ({name})"));
            format!("; most of the idle time: {}{by}", cause.kind.label())
        });
        found.push(Finding {
            id: "gaps",
            severity,
            confidence: Confidence::High,
            title: format!(
                "device {} is idle for {share:.1} % of the time in {} gaps {label}{main}",
                device.device, class.count
            ),
            measured: Measure { value: share, unit: "% of the span" },
            threshold: Measure { value: GAP_SHARE, unit: "% of the span" },
            recoverable_ns: Some(class.total_ns),
            evidence: evidence(device),
            advice: advice(gaps.causes.first().map(|cause| cause.kind)),
            false_positive: "work that other processes did on the device is not in the trace",
        });
    }
    Outcome::Found(found)
}

/// Causes, then transitions.
fn evidence(device: &DeviceUse) -> Vec<Evidence> {
    let causes = device.gaps.causes.iter().take(3).map(|cause| Evidence {
        what: match &cause.function {
            Some(function) => format!("{}: {function}", cause.kind.label()),
            None => cause.kind.label().to_owned(),
        },
        count: cause.count,
        total_ns: Some(cause.total_ns),
        range: None,
        span: Some(cause.longest),
        place: Some((device.pid, device.device)),
    });
    causes.chain(transitions(device, 3)).collect()
}

fn advice(cause: Option<CauseKind>) -> &'static str {
    match cause {
        Some(CauseKind::Wait) => "launch the next work before waiting for the last, or do not wait",
        Some(CauseKind::Call) => {
            "move this call out of the loop: allocate once, copy asynchronously"
        }
        Some(CauseKind::OsCall) => "move what blocks (files, locks, sleeping) to another thread",
        Some(CauseKind::OffCpu) => "give the launching thread a CPU of its own",
        Some(CauseKind::LaunchCall) => "use a CUDA graph: one launch for many kernels",
        Some(CauseKind::Queued) => {
            "the work was there: look at dependencies between streams, and at copies in between"
        }
        Some(CauseKind::HostCode) => {
            "prepare the next launches while the GPU works: CUDA graph, fewer host steps, threads"
        }
        Some(CauseKind::Unknown) | None => "record the launches too (--trace=cuda)",
    }
}
