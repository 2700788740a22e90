//! The rules, in the order in which they are applied; data quality first.

mod copies;
mod exposed;
mod fusion;
mod impossible;
mod kernels;
mod launches;
mod managed;
mod memory;
mod messages;
mod metrics;
mod outcome;
mod quality;
mod waits;
mod work;

use super::account;
use super::answers::Answers;
use super::context::Context;
use super::critical;
use super::device_memory;
use super::finding::{Answer, DeviceUse, Diagnosis, Finding, Inspected, QUALITY, Question, Unit};
use super::host::gaps;
use super::utilization::utilization;
use crate::model::Recorder;
use outcome::{Lack, Outcome, all_of};

type Rule = fn(&Context<'_>, &[DeviceUse]) -> Outcome;

/// A rule and the question that it answers.
struct Asked {
    id: &'static str,
    question: &'static str,
    rule: Rule,
}

const fn ask(id: &'static str, question: &'static str, rule: Rule) -> Asked {
    Asked { id, question, rule }
}

const RULES: &[Asked] = &[
    ask(QUALITY, "Is anything wrong with the trace itself?", quality::data_quality),
    ask("launch-bound", "Does the GPU wait for launches?", launches::launch_bound),
    ask("gaps", "Is the GPU idle between its operations?", launches::gaps),
    ask("sync-in-loop", "Does the host wait for the GPU in a loop?", waits::in_loops),
    ask("pageable-copy", "Do asynchronous copies use pageable memory?", copies::pageable),
    ask("synchronous-copy", "Do copies hold up the host?", copies::synchronous_copies),
    ask("synchronous-set", "Do memsets hold up the host?", copies::synchronous_sets),
    ask("page-migration", "Do pages of managed memory migrate?", managed::migrations),
    ask("exposed-copy", "Do copies run with no kernel beside them?", exposed::copies),
    ask(
        "exposed-communication",
        "Does communication run with no compute beside it?",
        exposed::communication,
    ),
    ask("block-size", "Do block sizes leave lanes of a warp idle?", kernels::block_sizes),
    ask("small-grid", "Do grids leave multiprocessors idle?", kernels::small_grids),
    ask("tail", "Does the last wave leave multiprocessors idle?", kernels::tails),
    ask("occupancy", "Is the theoretical occupancy low?", kernels::occupancy),
    ask("fusion", "Could short kernels be fused?", fusion::fusion),
    ask("sampled-bound", "Which unit bounds the GPU, by samples?", metrics::sampled_bound),
    ask("kernel-bound", "Which unit bounds each kernel?", metrics::kernel_bound),
    ask("work-bound", "Which limit bounds each range with declared work?", work::work_bound),
    ask("achieved-occupancy", "Is the achieved occupancy low?", metrics::achieved_occupancy),
    ask("stalls", "Do warps stall mostly for one reason?", metrics::stalls),
    ask("coalescing", "Are accesses to global memory uncoalesced?", memory::coalescing),
    ask("bank-conflicts", "Do accesses to shared memory conflict?", memory::bank_conflicts),
    ask("divergence", "Do threads of a warp diverge?", memory::divergence),
];

/// The answer of a rule; its findings join the others.
fn answer(outcome: Outcome, findings: &mut Vec<Finding>) -> Answer {
    match outcome {
        Outcome::Checked(found, inspected) if found.is_empty() => match inspected.enough() {
            true => Answer::No { inspected },
            false => {
                let (reason, record) = partly(&inspected);
                Answer::CannotAnswer { reason, record, inspected: Some(inspected) }
            }
        },
        Outcome::Checked(found, inspected) => {
            let answer = Answer::Yes { findings: found.len(), inspected };
            findings.extend(found);
            answer
        }
        Outcome::Lacks(Lack { reason, record }) => {
            Answer::CannotAnswer { reason, record, inspected: None }
        }
    }
}

/// Why a part without a finding does not answer the question.
fn partly(inspected: &Inspected) -> (String, String) {
    let missing = inspected.missing.clone().unwrap_or_default();
    let (why, record) = missing.rsplit_once("; ").unwrap_or((&missing, ""));
    let seen = format!("nothing found in {inspected}");
    let reason = if why.is_empty() { seen } else { format!("{seen}; {why}") };
    (reason, record.to_owned())
}

/// Applies every rule.
pub(super) fn apply(context: &Context<'_>) -> Diagnosis {
    let trace = context.trace;
    let devices: Vec<DeviceUse> = context
        .activities
        .iter()
        .zip(account::accounts(context))
        .map(|(activity, account)| {
            let device = trace.devices.iter().find(|device| device.id == activity.device);
            DeviceUse {
                pid: trace.processes[activity.process as usize].pid,
                device: activity.device,
                name: device.map(|device| device.name.clone()).filter(|name| !name.is_empty()),
                span: activity.span,
                busy_ns: activity.busy_ns,
                operations: activity.operations,
                account,
                gaps: gaps::report(context, activity),
            }
        })
        .collect();
    let (mut quality, mut findings, mut questions) = (Vec::new(), Vec::new(), Vec::new());
    for Asked { id, question, rule } in RULES {
        let found = if *id == QUALITY { &mut quality } else { &mut findings };
        let answer = answer(rule(context, &devices), found);
        questions.push(Question { id, text: question, answer });
    }
    quality.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings.sort_by_key(|finding| {
        std::cmp::Reverse((finding.recoverable_ns.unwrap_or(0), finding.severity))
    });
    let critical_path = critical::critical_path(context, &mut findings);
    let memory = device_memory::memory_use(trace, &context.host.outermost);
    questions.push(memory_question(context, memory.len()));
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
            Recorder::Chrome | Recorder::Cupti | Recorder::Xla | Recorder::Rocprof => {
                trace.span().map_or(0, |(first, _)| first)
            }
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
        critical_path,
        memory,
        quality,
        findings,
        questions,
        answers: Answers::new(context),
        utilization: utilization(context),
    }
}

/// Device memory is a table, not a rule.
fn memory_question(context: &Context<'_>, tables: usize) -> Question {
    let rows = context.trace.allocations.time.len();
    let answer = match tables {
        0 => Answer::CannotAnswer {
            reason: "allocations were not recorded".to_owned(),
            record: context.platform.record_memory().to_owned(),
            inspected: None,
        },
        findings => Answer::Yes { findings, inspected: all_of(rows, Unit::Calls) },
    };
    Question { id: "device memory", text: "How much device memory was held?", answer }
}
