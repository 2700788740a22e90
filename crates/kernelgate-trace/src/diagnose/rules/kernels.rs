//! Launch shapes that leave multiprocessors idle.

use hashbrown::HashMap;

use super::super::context::Context;
use super::super::finding::{Confidence, DeviceUse, Evidence, Finding, Measure, Severity};
use super::super::labels::short_name;
use super::outcome::{Outcome, most_expensive, percent};
use crate::analyze::paths::PathId;
use crate::model::Device;
use crate::model::gpu::LaunchShape;

/// Part of the kernel time from which a shape matters.
const TIME_SHARE: f64 = 5.0;
/// Idle part of the last wave from which it matters.
const TAIL: f64 = 20.0;
/// Theoretical occupancy below which it is low.
const OCCUPANCY: f64 = 80.0;
/// Registers are given to warps in pieces of this many.
const REGISTER_UNIT: u32 = 256;
const WARP: u32 = 32;

/// How many blocks of a launch a multiprocessor holds at once, and what limits that.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Residency {
    blocks: u32,
    /// Resident threads over the most possible, in percent.
    occupancy: f64,
    limiter: &'static str,
}

/// `None`: the device's limits are not in the trace.
fn residency(device: &Device, shape: &LaunchShape) -> Option<Residency> {
    let threads_per_sm = device.threads_per_sm?;
    let warps = u32::try_from(shape.threads()).ok()?.div_ceil(WARP).max(1);
    let mut limits = vec![("block size", threads_per_sm / WARP / warps)];
    if let Some(blocks) = device.blocks_per_sm {
        limits.push(("blocks of a multiprocessor", blocks));
    }
    if let Some(registers) = device.registers_per_sm.filter(|_| shape.registers > 0) {
        let of_warp = (shape.registers * WARP).next_multiple_of(REGISTER_UNIT);
        limits.push(("registers", registers / of_warp / warps));
    }
    let shared = shape.static_shared + shape.dynamic_shared;
    if let Some(of_sm) = device.shared_per_sm.filter(|_| shared > 0) {
        limits.push(("shared memory", of_sm / shared));
    }
    let (limiter, blocks) = limits.into_iter().min_by_key(|&(_, blocks)| blocks)?;
    let occupancy = f64::from(blocks * warps * WARP) / f64::from(threads_per_sm) * 100.0;
    Some(Residency { blocks, occupancy: occupancy.min(100.0), limiter })
}

/// Kernels of one name and shape on one device.
struct Shaped<'a> {
    name: &'a str,
    shape: LaunchShape,
    device: &'a Device,
    count: usize,
    total_ns: i64,
    first: u32,
    /// The range around all of them.
    path: PathId,
}

/// Kernels by name and shape, or why there are none; with the time of all kernels.
fn shaped<'a>(context: &Context<'a>) -> Result<(Vec<Shaped<'a>>, i64), String> {
    let trace = context.trace;
    let kernels = &trace.kernels;
    if kernels.on_gpu.is_empty() {
        return Err("the trace holds no kernels".to_owned());
    }
    if kernels.shape.is_empty() {
        return Err("launch shapes were not recorded".to_owned());
    }
    if trace.devices.iter().all(|device| device.multiprocessors.is_none()) {
        return Err("the trace does not describe the GPU (TARGET_INFO_GPU)".to_owned());
    }
    let mut groups: HashMap<(u32, u32, u32), Shaped<'a>> = HashMap::new();
    // What runs in graphs that were recorded whole is work of kernels, too.
    let graphs = &trace.graphs.on_gpu;
    let mut total: i64 = graphs.start.iter().zip(&graphs.end).map(|(start, end)| end - start).sum();
    for row in 0..kernels.on_gpu.len() {
        // Communication kernels have few blocks on purpose.
        if context.classes.function(kernels.function[row]).is_some() {
            continue;
        }
        let length = kernels.on_gpu.end[row] - kernels.on_gpu.start[row];
        let id = u32::try_from(row).unwrap_or(u32::MAX);
        total += length;
        let place = &trace.places[kernels.on_gpu.place[row].0 as usize];
        let Some(device) = trace.devices.iter().find(|device| device.id == place.device) else {
            continue;
        };
        let key = (kernels.function[row], kernels.shape[row], place.device);
        let group = groups.entry(key).or_insert_with(|| Shaped {
            name: trace.kernel_name(row),
            shape: trace.shapes[kernels.shape[row] as usize],
            device,
            count: 0,
            total_ns: 0,
            first: id,
            path: context.path_id(id),
        });
        group.path = context.around(group.path, id);
        group.count += 1;
        group.total_ns += length;
    }
    let mut all: Vec<Shaped<'a>> = groups.into_values().collect();
    all.sort_by_key(|of| (std::cmp::Reverse(of.total_ns), of.first));
    Ok((all, total))
}

fn evidence(context: &Context<'_>, of: &Shaped<'_>, words: String) -> Evidence {
    let [x, y, z] = of.shape.grid;
    let threads = of.shape.threads();
    Evidence {
        what: format!("{words}: grid {x}×{y}×{z} of {threads} threads, {}", short_name(of.name)),
        count: of.count,
        total_ns: Some(of.total_ns),
        range: context.range(of.path),
        span: Some((context.all.start(of.first), context.all.end(of.first))),
        place: Some(context.place_of(of.first)),
    }
}

/// A finding of shapes that together take enough time, or none.
fn finding(
    (id, advice, false_positive): (&'static str, &'static str, &'static str),
    title: &str,
    evidence: Vec<(Evidence, f64)>,
    total: i64,
) -> Outcome {
    let time: i64 = evidence.iter().filter_map(|(evidence, _)| evidence.total_ns).sum();
    let share = percent(time, total);
    if share < TIME_SHARE {
        return Outcome::Found(Vec::new());
    }
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let lost =
        |(evidence, lost): &(Evidence, f64)| (evidence.total_ns.unwrap_or(0) as f64 * lost) as i64;
    let recoverable = evidence.iter().map(lost).sum();
    Outcome::Found(vec![Finding {
        id,
        severity: Severity::Warning,
        confidence: Confidence::Medium,
        title: format!("kernels of {share:.1} % of the kernel time {title}"),
        measured: Measure { value: share, unit: "% of kernel time" },
        threshold: Measure { value: TIME_SHARE, unit: "% of kernel time" },
        recoverable_ns: Some(recoverable),
        evidence: most_expensive(evidence.into_iter().map(|(evidence, _)| evidence).collect()),
        advice,
        false_positive,
    }])
}

pub(super) fn small_grids(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let (shapes, total) = match shaped(context) {
        Ok(shapes) => shapes,
        Err(reason) => return Outcome::Skipped(reason),
    };
    let small = shapes.iter().filter_map(|of| {
        let multiprocessors = u64::from(of.device.multiprocessors?);
        let blocks = of.shape.blocks();
        if blocks == 0 || blocks >= multiprocessors {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let idle = 1.0 - blocks as f64 / multiprocessors as f64;
        let words = format!("{blocks} blocks for {multiprocessors} multiprocessors");
        Some((evidence(context, of, words), idle))
    });
    finding(
        (
            "small-grid",
            "split the work into more blocks (split-K, smaller tiles), batch it, or run kernels \
             concurrently on parallel streams or graph branches",
            "kernels that run beside others on purpose",
        ),
        "have fewer blocks than the GPU has multiprocessors",
        small.collect(),
        total,
    )
}

pub(super) fn block_sizes(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let (shapes, total) = match shaped(context) {
        Ok(shapes) => shapes,
        Err(reason) => return Outcome::Skipped(reason),
    };
    let odd = shapes.iter().filter_map(|of| {
        let (threads, warp) = (of.shape.threads(), u64::from(WARP));
        let idle = threads.next_multiple_of(warp) - threads;
        if idle == 0 {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let lost = idle as f64 / (threads + idle) as f64;
        let words = format!("{idle} threads of a block idle in their last warp");
        Some((evidence(context, of, words), lost))
    });
    finding(
        (
            "block-size",
            "make the block size a multiple of 32",
            "kernels that one warp or less computes on purpose",
        ),
        "have a block size that is no multiple of a warp",
        odd.collect(),
        total,
    )
}

/// The same, where the trace says how many blocks a multiprocessor holds.
fn shaped_with_limits<'a>(context: &Context<'a>) -> Result<(Vec<Shaped<'a>>, i64), String> {
    let (shapes, total) = shaped(context)?;
    if shapes.iter().all(|of| residency(of.device, &of.shape).is_none()) {
        return Err("the trace does not hold the limits of a multiprocessor".to_owned());
    }
    Ok((shapes, total))
}

pub(super) fn tails(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let (shapes, total) = match shaped_with_limits(context) {
        Ok(shapes) => shapes,
        Err(reason) => return Outcome::Skipped(reason),
    };
    let with_tail = shapes.iter().filter_map(|of| {
        let resident = residency(of.device, &of.shape).filter(|of| of.blocks > 0)?;
        let slots = f64::from(resident.blocks) * f64::from(of.device.multiprocessors?);
        #[allow(clippy::cast_precision_loss)]
        let waves = of.shape.blocks() as f64 / slots;
        let lost = 1.0 - waves / waves.ceil();
        if waves <= 1.0 || lost * 100.0 < TAIL {
            return None;
        }
        Some((evidence(context, of, format!("{waves:.2} waves")), lost))
    });
    finding(
        (
            "tail",
            "choose tiles so that blocks fill whole waves, or use a persistent or stream-K kernel",
            "blocks of different length fill a wave anyway; kernels that overlap with the next one",
        ),
        "leave a fifth of the GPU or more idle in their last wave",
        with_tail.collect(),
        total,
    )
}

pub(super) fn occupancy(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let (shapes, total) = match shaped_with_limits(context) {
        Ok(shapes) => shapes,
        Err(reason) => return Outcome::Skipped(reason),
    };
    let low = shapes.iter().filter_map(|of| {
        let resident = residency(of.device, &of.shape)?;
        if resident.occupancy >= OCCUPANCY {
            return None;
        }
        let words = format!("{:.0} %, limited by {}", resident.occupancy, resident.limiter);
        // What more warps would save cannot be told from a timeline.
        Some((evidence(context, of, words), 0.0))
    });
    let mut outcome = finding(
        (
            "occupancy",
            "fewer registers (__launch_bounds__), less shared memory, or another block size; \
             measure stalls with ncu first: 50 to 75 % is often enough",
            "GEMM and attention kernels that hide latency by instruction-level parallelism",
        ),
        "have a theoretical occupancy below 80 %",
        low.collect(),
        total,
    );
    if let Outcome::Found(found) = &mut outcome {
        found.iter_mut().for_each(|finding| {
            finding.severity = Severity::Information;
            finding.recoverable_ns = None;
        });
    }
    outcome
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_smallest_limit_is_the_limiter() {
        let device = Device {
            multiprocessors: Some(132),
            threads_per_sm: Some(2048),
            registers_per_sm: Some(65536),
            shared_per_sm: Some(233_472),
            blocks_per_sm: Some(32),
            ..Device::default()
        };
        let shape = |threads, registers, dynamic_shared| LaunchShape {
            block: [threads, 1, 1],
            registers,
            dynamic_shared,
            ..LaunchShape::default()
        };
        let of = |shape| residency(&device, &shape).unwrap();
        let full = of(shape(256, 32, 0));
        assert_eq!((full.blocks, full.occupancy), (8, 100.0));
        let registers = of(shape(128, 255, 0));
        // 255 registers × 32 lanes round up to 8192 for each of 4 warps: two blocks.
        assert_eq!((registers.blocks, registers.limiter), (2, "registers"));
        assert_eq!(registers.occupancy, 12.5);
        let shared = of(shape(128, 32, 100_000));
        assert_eq!((shared.blocks, shared.limiter), (2, "shared memory"));
        let small = of(shape(32, 16, 0));
        assert_eq!((small.blocks, small.limiter), (32, "blocks of a multiprocessor"));
        assert_eq!(residency(&Device::default(), &shape(32, 16, 0)), None);
    }
}
