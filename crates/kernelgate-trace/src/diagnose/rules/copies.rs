//! Copies and sets that hold up the host or the GPU.

use hashbrown::HashMap;

use super::super::context::Context;
use super::super::finding::{Confidence, DeviceUse, Evidence, Finding, Severity};
use super::super::text::bytes as shown_bytes;
use super::outcome::{Outcome, most_expensive, number};
use crate::analyze::operations::Kind;
use crate::model::gpu::MemoryKind;

/// Synchronous copies to the device up to this size return at once: the data goes with the command.
const SMALL: u64 = 64 << 10;

/// Operations that share a description and a range.
fn group(
    context: &Context<'_>,
    operations: impl Iterator<Item = (u32, String)>,
) -> (Vec<Evidence>, usize, i64) {
    let mut groups: HashMap<(String, Option<String>), Evidence> = HashMap::new();
    let (mut count, mut total) = (0, 0);
    for (id, what) in operations {
        let (start, end) = (context.all.start(id), context.all.end(id));
        count += 1;
        total += end - start;
        let range = context.path_of(id);
        let evidence = groups.entry((what.clone(), range.clone())).or_insert_with(|| Evidence {
            what,
            count: 0,
            total_ns: Some(0),
            range,
            span: Some((start, end)),
            place: Some(context.place_of(id)),
        });
        evidence.count += 1;
        evidence.total_ns = evidence.total_ns.map(|ns| ns + end - start);
        if evidence.span.is_some_and(|(from, to)| end - start > to - from) {
            evidence.span = Some((start, end));
        }
    }
    (most_expensive(groups.into_values().collect()), count, total)
}

/// Operations of a kind, with their rows and the names of their calls.
fn of_kind<'a>(
    context: &'a Context<'a>,
    kind: Kind,
) -> impl Iterator<Item = (u32, usize, &'a str)> {
    context.all.ids().filter_map(move |id| {
        let (own, row) = context.all.part(id);
        (own == kind).then_some(())?;
        let call = context.host.launched_by(context.trace, id)?;
        Some((id, row, context.function(call)))
    })
}

pub(super) fn pageable(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let copies = &context.trace.copies;
    if copies.on_gpu.is_empty() {
        return Outcome::Skipped("the trace holds no copies".to_owned());
    }
    let pageable =
        |row: usize| [copies.source[row], copies.target[row]].contains(&MemoryKind::Pageable);
    let found = of_kind(context, Kind::Copy)
        .filter(|&(_, row, call)| call.contains("Async") && pageable(row))
        .map(|(id, row, call)| {
            let direction = context.trace.names.text(copies.kind[row]);
            let (from, to) = (copies.source[row].label(), copies.target[row].label());
            (id, format!("{call} {direction} ({from} to {to})"))
        });
    let (evidence, count, total) = group(context, found);
    if count == 0 {
        return Outcome::Found(Vec::new());
    }
    let bytes: u64 =
        (0..copies.bytes.len()).filter(|&row| pageable(row)).map(|row| copies.bytes[row]).sum();
    #[allow(clippy::cast_precision_loss)]
    let speed = bytes as f64 / total.max(1) as f64;
    Outcome::Found(vec![Finding {
        id: "pageable-copy",
        severity: Severity::Warning,
        confidence: Confidence::High,
        title: format!(
            "asynchronous copies with pageable memory: {count}, {} at {speed:.1} GB/s; the host \
             waits for each",
            shown_bytes(bytes)
        ),
        measured: number(count, "copies"),
        threshold: number(0, "copies"),
        recoverable_ns: None,
        evidence,
        advice: "allocate the host side page-locked (cudaHostAlloc, pin_memory=True) and copy \
                 non-blocking",
        false_positive: "copies at start-up, such as loading a model once",
    }])
}

pub(super) fn synchronous_copies(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let copies = &context.trace.copies;
    if copies.on_gpu.is_empty() {
        return Outcome::Skipped("the trace holds no copies".to_owned());
    }
    let found = of_kind(context, Kind::Copy)
        .filter(|&(_, row, call)| {
            let small = context.trace.names.text(copies.kind[row]) == "Host-to-Device"
                && copies.bytes[row] <= SMALL;
            call.to_ascii_lowercase().contains("memcpy") && !call.contains("Async") && !small
        })
        .map(|(id, row, call)| {
            (id, format!("{call} {}", context.trace.names.text(copies.kind[row])))
        });
    let (evidence, count, total) = group(context, found);
    Outcome::Found(synchronous("synchronous-copy", "copies", evidence, count, total))
}

pub(super) fn synchronous_sets(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    if context.trace.sets.on_gpu.is_empty() {
        return Outcome::Skipped("the trace holds no sets".to_owned());
    }
    let found = of_kind(context, Kind::Set)
        .filter(|&(_, _, call)| {
            call.to_ascii_lowercase().contains("memset") && !call.contains("Async")
        })
        .map(|(id, _, call)| (id, call.to_owned()));
    let (evidence, count, total) = group(context, found);
    Outcome::Found(synchronous("synchronous-set", "sets", evidence, count, total))
}

fn synchronous(
    id: &'static str,
    unit: &'static str,
    evidence: Vec<Evidence>,
    count: usize,
    total: i64,
) -> Vec<Finding> {
    if count == 0 {
        return Vec::new();
    }
    #[allow(clippy::cast_precision_loss)]
    let milliseconds = total as f64 / 1e6;
    vec![Finding {
        id,
        severity: Severity::Warning,
        confidence: Confidence::High,
        title: format!("{unit} that hold up the host: {count}, {milliseconds:.3} ms on the GPU"),
        measured: number(count, unit),
        threshold: number(0, unit),
        recoverable_ns: Some(total),
        evidence,
        advice: "use the asynchronous form on a stream, with page-locked memory",
        false_positive: "calls at start-up, or whose result the host needs at once",
    }]
}
