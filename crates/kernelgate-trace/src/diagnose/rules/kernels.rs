//! Launch shapes that leave multiprocessors idle.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::super::context::Context;
use super::super::finding::{
    Confidence, DeviceUse, Evidence, Finding, Inspected, Measure, Remedy, Severity, ShorterKernels,
    Unit,
};
use super::super::labels::short_name;
use super::super::platform::Vendor;
use super::launches::no_work;
use super::outcome::{Lack, Outcome, most_expensive, percent};
use crate::analyze::classes::Class;
use crate::analyze::ranges::paths::PathId;
use crate::analyze::timeline::cover::Union;
use crate::analyze::timeline::idle::Activity;
use crate::model::Device;
use crate::model::gpu::LaunchShape;

/// Part of the kernel time from which a shape matters.
const TIME_SHARE: f64 = 5.0;
/// Idle part of the last wave from which it matters.
const TAIL: f64 = 20.0;
/// Occupancy below which it is low, theoretical or achieved, in percent; so says the checklist.
pub(crate) const OCCUPANCY: f64 = 50.0;
/// Threads of a warp on all devices of NVIDIA.
const NVIDIA_WARP: u32 = 32;
/// Registers are given to warps in pieces of this many.
const REGISTER_UNIT: u32 = 256;

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
    let (threads_per_sm, warp) = (device.threads_per_sm?, warp(device));
    let warps = u32::try_from(shape.threads()).ok()?.div_ceil(warp).max(1);
    let mut limits = vec![("block size", threads_per_sm / warp / warps)];
    if let Some(blocks) = device.blocks_per_sm {
        limits.push(("blocks of a multiprocessor", blocks));
    }
    if let Some(registers) = device.registers_per_sm.filter(|_| shape.registers > 0) {
        let of_warp = shape.registers.checked_mul(warp)?.checked_next_multiple_of(REGISTER_UNIT)?;
        limits.push(("registers", registers / of_warp / warps));
    }
    let shared = shape.static_shared.checked_add(shape.dynamic_shared)?;
    if let Some(of_sm) = device.shared_per_sm.filter(|_| shared > 0) {
        limits.push(("shared memory", of_sm / shared));
    }
    let (limiter, blocks) = limits.into_iter().min_by_key(|&(_, blocks)| blocks)?;
    let resident = u64::from(blocks) * u64::from(warps) * u64::from(warp);
    #[allow(clippy::cast_precision_loss)]
    let occupancy = resident as f64 / f64::from(threads_per_sm) * 100.0;
    Some(Residency { blocks, occupancy: occupancy.min(100.0), limiter })
}

/// Threads that run in lockstep; AMD's compute devices have 64.
fn warp(device: &Device) -> u32 {
    let usual = if device.name.contains("Instinct") { 64 } else { NVIDIA_WARP };
    device.warp.filter(|&warp| warp > 0).unwrap_or(usual)
}

/// Kernels of one name and shape on one device.
struct ShapeGroup<'a> {
    name: &'a str,
    shape: LaunchShape,
    /// Function and shape of the kernels in the trace.
    key: (u32, u32),
    /// The number of the device, and the description where the trace has one.
    device_id: u32,
    device: Option<&'a Device>,
    count: usize,
    total_ns: i64,
    /// Time of the kernels during communication, nanoseconds.
    beside_ns: i64,
    first: u32,
    /// Path of the range around all launches.
    path: PathId,
}

impl ShapeGroup<'_> {
    /// Whether the kernels leave multiprocessors to communication that runs beside most of them.
    fn shares_device(&self) -> bool {
        self.beside_ns * 2 > self.total_ns
    }

    fn multiprocessors(&self) -> Option<u32> {
        self.device?.multiprocessors
    }

    fn residency(&self) -> Option<Residency> {
        residency(self.device?, &self.shape)
    }

    /// Threads that run in lockstep.
    fn warp(&self, vendor: Vendor) -> Option<u32> {
        match (self.device, vendor) {
            (Some(device), _) => Some(warp(device)),
            (None, Vendor::Nvidia) => Some(NVIDIA_WARP),
            (None, Vendor::Amd) => None,
        }
    }

    /// The reason why nothing is known about its device.
    fn undescribed(&self) -> String {
        let id = self.device_id;
        format!("device {id}, on which the kernels ran, is not described in the trace")
    }
}

/// Function, shape where it was recorded, and device.
type GroupKey = (u32, Option<u32>, u32);

/// Compute kernels by name and shape, and which part of their time is known so well.
struct Shapes<'a> {
    groups: Vec<ShapeGroup<'a>>,
    /// Nanoseconds of all of them, with graphs that were recorded whole.
    whole_ns: i64,
    /// Nanoseconds by what is missing.
    missing: BTreeMap<String, i64>,
}

/// Times of communication by process and device.
struct CommunicationTimes(HashMap<(i64, u32), Union>);

impl CommunicationTimes {
    fn communication(context: &Context<'_>) -> Self {
        let mut spans: HashMap<(i64, u32), Vec<(i64, i64)>> = HashMap::new();
        let all = &context.all;
        let is = |id: &u32| context.classes.class(*id) == Class::Communication;
        for id in all.ids().filter(is) {
            spans.entry(context.place_of(id)).or_default().push((all.start(id), all.end(id)));
        }
        Self(spans.into_iter().map(|(place, spans)| (place, Union::new(spans))).collect())
    }

    /// Nanoseconds of an operation in which communication runs beside it.
    fn ns(&self, context: &Context<'_>, id: u32) -> i64 {
        if self.0.is_empty() {
            return 0;
        }
        let union = self.0.get(&context.place_of(id));
        union.map_or(0, |union| union.within((context.all.start(id), context.all.end(id))))
    }
}

impl<'a> Shapes<'a> {
    /// Groups the kernels; communication kernels use few multiprocessors on purpose.
    fn collect(context: &Context<'a>) -> Result<Self, Lack> {
        let trace = context.trace;
        let kernels = &trace.kernels;
        if context.all.is_empty() {
            return Err(no_work(context));
        }
        let graphs = &trace.graphs.on_gpu;
        let in_graphs = graphs.total_ns();
        let mut shapes = Self { groups: vec![], whole_ns: in_graphs, missing: BTreeMap::new() };
        if in_graphs > 0 {
            shapes.missing.insert("graphs were recorded whole".to_owned(), in_graphs);
        }
        let mut groups: HashMap<GroupKey, (Option<ShapeGroup<'a>>, i64)> = HashMap::new();
        let communication = CommunicationTimes::communication(context);
        for row in 0..kernels.on_gpu.len() {
            let length = kernels.on_gpu.length(row);
            let id = u32::try_from(row).unwrap_or(u32::MAX);
            let place = &trace.places[kernels.on_gpu.place.at(row).0 as usize];
            let shape = kernels.shape.get(row);
            let key = (kernels.function.at(row), shape, place.device);
            let (group, total_ns) = groups.entry(key).or_insert_with(|| {
                let shaped = |shape: u32| ShapeGroup {
                    name: trace.kernel_name(row),
                    shape: trace.shapes[shape as usize],
                    key: (kernels.function.at(row), shape),
                    device_id: place.device,
                    device: trace.devices.iter().find(|device| device.id == place.device),
                    count: 0,
                    total_ns: 0,
                    beside_ns: 0,
                    first: id,
                    path: context.path_id(id),
                };
                (shape.map(shaped), 0)
            });
            *total_ns += length;
            if let Some(group) = group {
                group.path = context.around(group.path, id);
                group.count += 1;
                group.total_ns += length;
                group.beside_ns += communication.ns(context, id);
            }
        }
        let compute = |(function, ..): &GroupKey| context.classes.function(*function).is_none();
        for (_, (group, total_ns)) in groups.into_iter().filter(|(key, _)| compute(key)) {
            shapes.whole_ns += total_ns;
            match group.filter(|of| of.shape.blocks() > 0 && of.shape.threads() > 0) {
                Some(group) => shapes.groups.push(group),
                None => {
                    let missing = "launch shapes are not in the trace".to_owned();
                    *shapes.missing.entry(missing).or_default() += total_ns;
                }
            }
        }
        if shapes.whole_ns == 0 && shapes.missing.is_empty() && shapes.groups.is_empty() {
            return Err(Lack::absent("the trace holds no compute kernels"));
        }
        shapes.groups.sort_by_key(|of| (std::cmp::Reverse(of.total_ns), of.first));
        shapes.without(context, |_| None)
    }

    /// Launch shapes on devices whose number of multiprocessors is known.
    fn with_multiprocessors(context: &Context<'a>) -> Result<Self, Lack> {
        Self::collect(context)?
            .without(context, |of| of.multiprocessors().is_none().then(|| of.undescribed()))
    }

    /// Keeps only launches whose limits are known too.
    fn with_limits(context: &Context<'a>) -> Result<Self, Lack> {
        Self::with_multiprocessors(context)?.without(context, |of| match of.residency() {
            Some(_) => None,
            None => Some(format!(
                "the limits of a multiprocessor of device {} are not in the trace",
                of.device_id
            )),
        })
    }

    /// Removes launches that lack a fact, which is counted by its name.
    fn without(
        mut self,
        context: &Context<'a>,
        lacks: impl Fn(&ShapeGroup<'a>) -> Option<String>,
    ) -> Result<Self, Lack> {
        for of in std::mem::take(&mut self.groups) {
            match lacks(&of) {
                Some(missing) => *self.missing.entry(missing).or_default() += of.total_ns,
                None => self.groups.push(of),
            }
        }
        match self.groups.is_empty() {
            true => Err(Lack::new(self.reason(), context.platform.record_shapes())),
            false => Ok(self),
        }
    }

    /// The missing facts, the largest part first.
    fn reason(&self) -> String {
        let mut missing: Vec<(&String, i64)> =
            self.missing.iter().map(|(of, ns)| (of, *ns)).collect();
        missing.sort_by_key(|&(_, ns)| std::cmp::Reverse(ns));
        let whole = self.whole_ns;
        let words = missing.iter().map(|(of, ns)| match missing.len() {
            1 => (*of).clone(),
            _ => format!("{of} ({:.1} % of the kernel time)", percent(*ns, whole)),
        });
        words.collect::<Vec<_>>().join("; ")
    }

    fn inspected(&self, context: &Context<'_>) -> Inspected {
        Inspected {
            seen: self.groups.iter().map(|of| of.total_ns).sum(),
            whole: self.whole_ns,
            unit: Unit::KernelTime,
            missing: (!self.missing.is_empty())
                .then(|| format!("{}; {}", self.reason(), context.platform.record_shapes())),
        }
    }
}

fn evidence(context: &Context<'_>, of: &ShapeGroup<'_>, words: String) -> Evidence {
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

/// The words of a finding about shapes.
struct ShapeWords {
    id: &'static str,
    /// Highest severity of a finding that is an estimate.
    worst: Severity,
    title: String,
    advice: String,
    false_positive: &'static str,
}

/// A shape with the part of its time that it loses, 0 to 1; `None` where nobody can say.
struct Loss {
    evidence: Evidence,
    lost: Option<f64>,
}

/// Checks every shape; those that lose something make a finding if they take enough time.
fn check(
    context: &Context<'_>,
    shapes: Result<Shapes<'_>, Lack>,
    words: ShapeWords,
    loss: impl Fn(&ShapeGroup<'_>) -> Option<Loss>,
) -> Outcome {
    let shapes = match shapes {
        Ok(shapes) => shapes,
        Err(lack) => return lack.into(),
    };
    let (keys, losses): (Vec<(u32, u32)>, Vec<Loss>) =
        shapes.groups.iter().filter_map(|of| Some((of.key, loss(of)?))).unzip();
    let shorter = |(&(function, shape), loss): (&(u32, u32), &Loss)| {
        Some(ShorterKernels { function, shape, left: 1.0 - loss.lost? })
    };
    let shorter: Option<Vec<ShorterKernels>> = keys.iter().zip(&losses).map(shorter).collect();
    let time: i64 = losses.iter().filter_map(|loss| loss.evidence.total_ns).sum();
    let share = percent(time, shapes.whole_ns);
    let inspected = shapes.inspected(context);
    if share < TIME_SHARE {
        return Outcome::Checked(Vec::new(), inspected);
    }
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let saved = |loss: &Loss| {
        let ns = loss.evidence.total_ns.unwrap_or(0) as f64;
        loss.lost.map(|lost| (ns * lost) as i64)
    };
    let recoverable: Option<i64> = losses.iter().map(saved).sum();
    let span = context.activities.iter().map(Activity::span_ns).sum();
    let severity = match recoverable {
        Some(ns) => Severity::from_saving(ns, span).min(words.worst),
        None => Severity::Information,
    };
    let found = Finding {
        id: words.id,
        severity,
        confidence: Confidence::Medium,
        title: format!("kernels of {share:.1} % of the kernel time {}", words.title),
        measured: Measure { value: share, unit: "% of kernel time" },
        threshold: Measure { value: TIME_SHARE, unit: "% of kernel time" },
        recoverable_ns: recoverable,
        remedy: shorter.map_or(Remedy::NotReplayed, Remedy::Shorter),
        replayed: None,
        evidence: most_expensive(losses.into_iter().map(|loss| loss.evidence).collect()),
        advice: words.advice,
        false_positive: words.false_positive,
    };
    Outcome::Checked(vec![found], inspected)
}

pub(super) fn small_grids_finds() -> String {
    format!("kernels with fewer blocks than multiprocessors take {TIME_SHARE} % of the kernel time")
}

pub(super) fn block_sizes_finds() -> String {
    format!(
        "kernels whose block size is no multiple of the warp ({NVIDIA_WARP}, on AMD's compute \
         devices 64) take {TIME_SHARE} % of the kernel time"
    )
}

/// ShapeWords in names of matrix products in fp32 on CUDA cores, and of those on tensor cores.
const CUDA_CORES: &[&str] = &["sgemm", "scudnn", "simt_", "ffma"];
const TENSOR_CORES: &[&str] = &["tensorop", "tf32", "s1688", "s16816", "xf32"];
/// The first compute capability with tensor cores.
const WITH_TENSOR_CORES: u32 = 7;
/// Part of the time of a product that tensor cores leave: they multiply 8 times as fast, and memory
/// limits many products before that.
const TENSOR_CORE_TIME_SHARE: f64 = 0.5;

/// Whether a kernel multiplies matrices in fp32, on a device that has tensor cores.
fn without_tensor_cores(of: &ShapeGroup<'_>) -> bool {
    let name = short_name(of.name).to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    let capability = of.device.and_then(|device| device.compute);
    capability.is_none_or(|(major, _)| major >= WITH_TENSOR_CORES)
        && has(CUDA_CORES)
        && !has(TENSOR_CORES)
}

pub(super) fn fp32_products_finds() -> String {
    format!(
        "matrix products in fp32 on CUDA cores, by names such as sgemm, take {TIME_SHARE} % of the \
         kernel time on a device with tensor cores"
    )
}

pub(super) fn fp32_products(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    if context.platform.vendor == Vendor::Amd {
        let reason = "names of AMD's kernels do not show which unit multiplies";
        return Lack::absent(reason).into();
    }
    let words = ShapeWords {
        id: "fp32-matmul",
        worst: Severity::Warning,
        title: "multiply matrices in fp32 without tensor cores".to_owned(),
        advice: "multiply in TF32 (torch.set_float32_matmul_precision(\"high\"), \
                 CUBLAS_COMPUTE_32F_FAST_TF32; from compute capability 8.0 on), or in bf16 or fp16 \
                 (autocast)"
            .to_owned(),
        false_positive: "results that need 24 bits of each factor",
    };
    check(context, Shapes::collect(context), words, |of| {
        without_tensor_cores(of).then(|| {
            let words = "fp32 on CUDA cores".to_owned();
            Loss {
                evidence: evidence(context, of, words),
                lost: Some(1.0 - TENSOR_CORE_TIME_SHARE),
            }
        })
    })
}

pub(super) fn tails_finds() -> String {
    format!(
        "kernels of more than one wave that lose {TAIL} % or more in their last wave take \
         {TIME_SHARE} % of the kernel time"
    )
}

pub(super) fn occupancy_finds() -> String {
    format!(
        "kernels with a theoretical occupancy below {OCCUPANCY} % take {TIME_SHARE} % of the \
         kernel time"
    )
}

pub(super) fn small_grids(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let unit = context.platform.multiprocessors();
    let words = ShapeWords {
        id: "small-grid",
        worst: Severity::Severe,
        title: format!("have fewer blocks than the GPU has {unit}"),
        advice: "split the work into more blocks (split-K, smaller tiles), batch it, or run \
                 kernels concurrently on parallel streams or graph branches"
            .to_owned(),
        false_positive: "kernels that run beside others on purpose",
    };
    check(context, Shapes::with_multiprocessors(context), words, |of| {
        let multiprocessors = u64::from(of.multiprocessors()?);
        let blocks = of.shape.blocks();
        if blocks >= multiprocessors || of.shares_device() {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let idle = 1.0 - blocks as f64 / multiprocessors as f64;
        let plural = if blocks == 1 { "" } else { "s" };
        let words = format!("{blocks} block{plural} for {multiprocessors} {unit}");
        Some(Loss { evidence: evidence(context, of, words), lost: Some(idle) })
    })
}

pub(super) fn block_sizes(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let platform = context.platform;
    let vendor = platform.vendor;
    let shapes = Shapes::collect(context).and_then(|shapes| {
        shapes.without(context, |of| of.warp(vendor).is_none().then(|| of.undescribed()))
    });
    let widths = shapes.as_ref().map(|shapes| {
        let mut widths: Vec<u32> = shapes.groups.iter().filter_map(|of| of.warp(vendor)).collect();
        widths.sort_unstable();
        widths.dedup();
        widths.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
    });
    let words = ShapeWords {
        id: "block-size",
        worst: Severity::Severe,
        title: format!("have a block size that is no multiple of a {}", platform.warp()),
        advice: format!("make the block size a multiple of {}", widths.unwrap_or_default()),
        false_positive: "kernels that one warp or less computes on purpose",
    };
    check(context, shapes, words, |of| {
        let (threads, warp) = (of.shape.threads(), u64::from(of.warp(vendor)?));
        let lanes = threads.checked_next_multiple_of(warp)?;
        let idle = lanes - threads;
        if idle == 0 {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let lost = idle as f64 / lanes as f64;
        let words = format!("{idle} of {lanes} lanes idle, {} of {warp}", platform.warp());
        Some(Loss { evidence: evidence(context, of, words), lost: Some(lost) })
    })
}

pub(super) fn tails(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let words = ShapeWords {
        id: "tail",
        worst: Severity::Warning,
        title: "leave a fifth of the GPU or more idle in their last wave".to_owned(),
        advice: "choose tiles so that blocks fill whole waves, or use a persistent or stream-K \
                 kernel"
            .to_owned(),
        false_positive: "blocks of different length fill a wave anyway; kernels that overlap with \
                         the next one",
    };
    check(context, Shapes::with_limits(context), words, |of| {
        let resident = of.residency().filter(|of| of.blocks > 0)?;
        let slots = f64::from(resident.blocks) * f64::from(of.multiprocessors()?);
        #[allow(clippy::cast_precision_loss)]
        let waves = of.shape.blocks() as f64 / slots;
        let lost = 1.0 - waves / waves.ceil();
        if waves <= 1.0 || lost * 100.0 < TAIL || of.shares_device() {
            return None;
        }
        let evidence = evidence(context, of, format!("{waves:.2} waves"));
        Some(Loss { evidence, lost: Some(lost) })
    })
}

pub(super) fn occupancy(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let profiler = context.platform.kernel_profiler();
    let words = ShapeWords {
        id: "occupancy",
        worst: Severity::Information,
        title: format!("have a theoretical occupancy below {OCCUPANCY} %"),
        advice: format!(
            "fewer registers (__launch_bounds__), less shared memory, or another block size; \
             measure stalls with {profiler} first: 50 to 75 % is often enough"
        ),
        false_positive: "GEMM and attention kernels that hide latency by instruction-level \
                         parallelism",
    };
    check(context, Shapes::with_limits(context), words, |of| {
        let resident = of.residency()?;
        if resident.occupancy >= OCCUPANCY {
            return None;
        }
        let words = format!("{:.0} %, limited by {}", resident.occupancy, resident.limiter);
        // A timeline cannot say how much more warps would save.
        Some(Loss { evidence: evidence(context, of, words), lost: None })
    })
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
        let resident = |shape| residency(&device, &shape).unwrap();
        let full = resident(shape(256, 32, 0));
        assert_eq!((full.blocks, full.occupancy), (8, 100.0));
        let registers = resident(shape(128, 255, 0));
        // 255 registers × 32 lanes round up to 8192 for each of 4 warps: two blocks.
        assert_eq!((registers.blocks, registers.limiter), (2, "registers"));
        assert_eq!(registers.occupancy, 12.5);
        let shared = resident(shape(128, 32, 100_000));
        assert_eq!((shared.blocks, shared.limiter), (2, "shared memory"));
        let small = resident(shape(32, 16, 0));
        assert_eq!((small.blocks, small.limiter), (32, "blocks of a multiprocessor"));
        assert_eq!(residency(&Device::default(), &shape(32, 16, 0)), None);
    }
}
