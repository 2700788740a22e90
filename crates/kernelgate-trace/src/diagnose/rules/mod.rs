//! The rules, in the order in which they are applied; data quality first.

mod copies;
mod fusion;
mod kernels;
mod launches;
mod memory;
mod metrics;
mod outcome;
mod quality;
mod waits;
mod work;

use super::answers::Answers;
use super::context::Context;
use super::device_memory;
use super::finding::{DeviceUse, Diagnosis, Skipped};
use super::gaps;
use crate::model::Recorder;
use outcome::Outcome;

type Rule = fn(&Context<'_>, &[DeviceUse]) -> Outcome;

const RULES: &[(&str, Rule)] = &[
    ("data-quality", quality::data_quality),
    ("launch-bound", launches::launch_bound),
    ("gaps", launches::gaps),
    ("sync-in-loop", waits::in_loops),
    ("pageable-copy", copies::pageable),
    ("synchronous-copy", copies::synchronous_copies),
    ("synchronous-set", copies::synchronous_sets),
    ("block-size", kernels::block_sizes),
    ("small-grid", kernels::small_grids),
    ("tail", kernels::tails),
    ("occupancy", kernels::occupancy),
    ("fusion", fusion::fusion),
    ("sampled-bound", metrics::sampled_bound),
    ("kernel-bound", metrics::kernel_bound),
    ("work-bound", work::work_bound),
    ("achieved-occupancy", metrics::achieved_occupancy),
    ("stalls", metrics::stalls),
    ("coalescing", memory::coalescing),
    ("bank-conflicts", memory::bank_conflicts),
    ("divergence", memory::divergence),
];

/// Applies every rule.
pub(super) fn apply(context: &Context<'_>) -> Diagnosis {
    let trace = context.trace;
    let devices: Vec<DeviceUse> = context
        .activities
        .iter()
        .map(|activity| {
            let device = trace.devices.iter().find(|device| device.id == activity.device);
            DeviceUse {
                pid: trace.processes[activity.process as usize].pid,
                device: activity.device,
                name: device.map(|device| device.name.clone()),
                span: activity.span,
                busy_ns: activity.busy_ns,
                operations: activity.operations,
                gaps: gaps::report(context, activity),
            }
        })
        .collect();
    let (mut findings, mut skipped, mut passed) = (Vec::new(), Vec::new(), Vec::new());
    for (rule, apply) in RULES {
        match apply(context, &devices) {
            Outcome::Found(found) if found.is_empty() => passed.push(*rule),
            Outcome::Found(found) => findings.extend(found),
            Outcome::Skipped(reason) => skipped.push(Skipped { rule, reason }),
        }
    }
    findings.sort_by_key(|finding| {
        let quality = finding.id == "data-quality";
        let recoverable = finding.recoverable_ns.unwrap_or(0);
        (!quality, std::cmp::Reverse((finding.severity, recoverable)))
    });
    let memory = device_memory::of(trace, &context.host.outermost);
    if memory.is_empty() && trace.operations() > 0 {
        let reason = "allocations were not recorded; record with --cuda-memory-usage=true, or \
                      PyTorch's profiler with profile_memory=True";
        skipped.push(Skipped { rule: "device memory", reason: reason.to_owned() });
    }
    let version = ["EXPORT_PRODUCT_VERSION", "PRODUCT_VERSION"]
        .iter()
        .find_map(|key| trace.metadata.get(*key));
    let mut recorder = trace.recorder.label().to_owned();
    if let Some(version) = version {
        recorder.push_str(&format!(" {version}"));
    }
    Diagnosis {
        recorder,
        origin_ns: match trace.recorder {
            Recorder::Chrome | Recorder::Cupti => trace.span().map_or(0, |(first, _)| first),
            _ => 0,
        },
        records: [
            ("kernels", trace.kernels.on_gpu.len()),
            ("copies", trace.copies.on_gpu.len()),
            ("sets", trace.sets.on_gpu.len()),
            ("graph launches", trace.graphs.on_gpu.len()),
            ("CUDA calls", context.host.calls),
            ("ranges", context.host.ranges),
            ("profiled launches", trace.profiled.len()),
        ],
        devices,
        memory,
        findings,
        skipped,
        passed,
        answers: Answers::of(context),
    }
}
