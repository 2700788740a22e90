//! Rules about launch shapes that leave multiprocessors idle.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedShare, InspectedUnit, NumberWithUnit, ShortenedKernels,
};
use super::super::labels::readable_name;
use super::super::trace_facts::DiagnosisContext;
use super::super::vendor_names::GpuVendor;
use super::launches::check_gpu_work;
use super::rule_outcome::{
    MissingData, RuleResult, most_expensive_evidence, operation_evidence, percent,
};
use crate::analyze::classes::OperationClass;
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::timeline::idle_time::DeviceActivity;
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::model::TracedDevice;
use crate::model::gpu::LaunchShape;

/// Part of the kernel time from which a shape matters.
const MIN_KERNEL_TIME_PERCENT: f64 = 5.0;
/// Idle part of the last wave from which it matters.
const TAIL_PERCENT: f64 = 20.0;
/// Occupancy below which it is low, theoretical or achieved, in percent; so says the checklist.
pub(crate) const LOW_OCCUPANCY_PERCENT: f64 = 50.0;
/// Threads of a warp on all devices of NVIDIA.
const NVIDIA_WARP_SIZE: u32 = 32;
/// Number of registers that are allocated to a warp at a time.
const REGISTER_ALLOCATION_UNIT: u32 = 256;

/// How many blocks of a launch a multiprocessor holds at once, and what limits that.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MultiprocessorResidency {
    blocks: u32,
    /// Resident threads over the most possible, in percent.
    occupancy: f64,
    limiter: &'static str,
}

/// `None`: the device's limits are not in the trace.
fn residency_on_multiprocessor(
    device: &TracedDevice,
    shape: &LaunchShape,
) -> Option<MultiprocessorResidency> {
    let (threads_per_sm, warp) = (device.threads_per_sm?, warp_size(device));
    let warps = u32::try_from(shape.threads_per_block()).ok()?.div_ceil(warp).max(1);
    let mut limits = vec![("block size", threads_per_sm / warp / warps)];
    if let Some(blocks) = device.blocks_per_sm {
        limits.push(("blocks of a multiprocessor", blocks));
    }
    if let Some(registers) = device.registers_per_sm.filter(|_| shape.registers > 0) {
        let of_warp = shape
            .registers
            .checked_mul(warp)?
            .checked_next_multiple_of(REGISTER_ALLOCATION_UNIT)?;
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
    Some(MultiprocessorResidency { blocks, occupancy: occupancy.min(100.0), limiter })
}

/// Threads that run in lockstep; AMD's compute devices have 64.
fn warp_size(device: &TracedDevice) -> u32 {
    let usual = if device.name.contains("Instinct") { 64 } else { NVIDIA_WARP_SIZE };
    device.warp.filter(|&warp| warp > 0).unwrap_or(usual)
}

/// Kernels of one name and shape on one device.
struct LaunchShapeGroup<'a> {
    name: &'a str,
    shape: LaunchShape,
    /// Function and shape of the kernels in the trace.
    key: (u32, u32),
    /// Number of the device, with its description if the trace has one.
    device_id: u32,
    device: Option<&'a TracedDevice>,
    count: usize,
    total_ns: i64,
    /// Time of the kernels during communication, nanoseconds.
    beside_ns: i64,
    first: u32,
    /// Path of the range around all launches.
    path: RangePathId,
}

impl LaunchShapeGroup<'_> {
    /// Whether the kernels leave multiprocessors free for communication that runs at the same time.
    fn shares_device_with_communication(&self) -> bool {
        self.beside_ns * 2 > self.total_ns
    }

    fn multiprocessor_count(&self) -> Option<u32> {
        self.device?.multiprocessors
    }

    fn multiprocessor_residency(&self) -> Option<MultiprocessorResidency> {
        residency_on_multiprocessor(self.device?, &self.shape)
    }

    /// Number of threads that run in lockstep.
    fn warp_size(&self, vendor: GpuVendor) -> Option<u32> {
        match (self.device, vendor) {
            (Some(device), _) => Some(warp_size(device)),
            (None, GpuVendor::Nvidia) => Some(NVIDIA_WARP_SIZE),
            (None, GpuVendor::Amd) => None,
        }
    }

    /// The reason why the kernel's device is unknown.
    fn unknown_device_reason(&self) -> String {
        let id = self.device_id;
        format!("device {id}, on which the kernels ran, is not described in the trace")
    }
}

/// Function, shape where it was recorded, and device.
type LaunchShapeKey = (u32, Option<u32>, u32);

/// Compute kernels by name and shape, and which part of their time is known so well.
struct KernelShapes<'a> {
    groups: Vec<LaunchShapeGroup<'a>>,
    /// Nanoseconds of all launches of this shape, with graphs that were recorded whole.
    whole_ns: i64,
    /// Nanoseconds of kernels that could not be inspected, by what is missing.
    missing: BTreeMap<String, i64>,
}

/// Times of communication by process and device.
struct CommunicationTimes(HashMap<(i64, u32), UnitedSpans>);

impl CommunicationTimes {
    fn new(context: &DiagnosisContext<'_>) -> Self {
        let mut spans: HashMap<(i64, u32), Vec<(i64, i64)>> = HashMap::new();
        let all = &context.all;
        let is =
            |id: &u32| context.classes.class_of_operation(*id) == OperationClass::Communication;
        for id in all.ids().filter(is) {
            spans.entry(context.process_and_device_of(id)).or_default().push(all.span(id));
        }
        Self(spans.into_iter().map(|(place, spans)| (place, UnitedSpans::new(spans))).collect())
    }

    /// Nanoseconds of an operation during which communication runs.
    fn ns(&self, context: &DiagnosisContext<'_>, id: u32) -> i64 {
        if self.0.is_empty() {
            return 0;
        }
        let union = self.0.get(&context.process_and_device_of(id));
        union.map_or(0, |union| union.covered_within(context.all.span(id)))
    }
}

impl<'a> KernelShapes<'a> {
    /// Groups the kernels; communication kernels use few multiprocessors on purpose.
    fn group_compute_kernels(
        context: &DiagnosisContext<'a>,
    ) -> Result<KernelShapes<'a>, MissingData> {
        let trace = context.trace;
        let kernels = &trace.kernels;
        check_gpu_work(context)?;
        let graphs = &trace.graphs.on_gpu;
        let in_graphs = graphs.total_duration_ns();
        let mut shapes = Self { groups: vec![], whole_ns: in_graphs, missing: BTreeMap::new() };
        if in_graphs > 0 {
            shapes.missing.insert("graphs were recorded whole".to_owned(), in_graphs);
        }
        let mut groups: HashMap<LaunchShapeKey, (Option<LaunchShapeGroup<'a>>, i64)> =
            HashMap::new();
        let communication = CommunicationTimes::new(context);
        for row in 0..kernels.on_gpu.len() {
            let length = kernels.on_gpu.length(row);
            let id = u32::try_from(row).unwrap_or(u32::MAX);
            let place = &trace.places[kernels.on_gpu.place.at(row).0 as usize];
            let shape = kernels.shape.get(row);
            let key = (kernels.function.at(row), shape, place.device);
            let (group, total_ns) = groups.entry(key).or_insert_with(|| {
                let shaped = |shape: u32| LaunchShapeGroup {
                    name: trace.kernel_name(row),
                    shape: trace.shapes[shape as usize],
                    key: (kernels.function.at(row), shape),
                    device_id: place.device,
                    device: trace.devices.iter().find(|device| device.id == place.device),
                    count: 0,
                    total_ns: 0,
                    beside_ns: 0,
                    first: id,
                    path: context.path_id_of_operation(id),
                };
                (shape.map(shaped), 0)
            });
            *total_ns += length;
            if let Some(group) = group {
                group.path = context.innermost_path_around(group.path, id);
                group.count += 1;
                group.total_ns += length;
                group.beside_ns += communication.ns(context, id);
            }
        }
        let compute =
            |(function, ..): &LaunchShapeKey| context.classes.communication_of(*function).is_none();
        for (_, (group, total_ns)) in groups.into_iter().filter(|(key, _)| compute(key)) {
            shapes.whole_ns += total_ns;
            match group.filter(|of| of.shape.block_count() > 0 && of.shape.threads_per_block() > 0)
            {
                Some(group) => shapes.groups.push(group),
                None => {
                    let missing = "launch shapes are not in the trace".to_owned();
                    *shapes.missing.entry(missing).or_default() += total_ns;
                }
            }
        }
        if shapes.whole_ns == 0 && shapes.missing.is_empty() && shapes.groups.is_empty() {
            return Err(MissingData::no_work("the trace holds no compute kernels"));
        }
        shapes.groups.sort_by_key(|of| (std::cmp::Reverse(of.total_ns), of.first));
        shapes.without_launches_that_lack(context, |_| None)
    }

    /// Launch shapes on devices whose number of multiprocessors is known.
    fn groups_with_multiprocessors(context: &DiagnosisContext<'a>) -> Result<Self, MissingData> {
        Self::group_compute_kernels(context)?.without_launches_that_lack(context, |of| {
            of.multiprocessor_count().is_none().then(|| of.unknown_device_reason())
        })
    }

    /// Keeps only groups of launches whose device limits are known.
    fn groups_with_device_limits(context: &DiagnosisContext<'a>) -> Result<Self, MissingData> {
        Self::groups_with_multiprocessors(context)?.without_launches_that_lack(context, |of| {
            match of.multiprocessor_residency() {
                Some(_) => None,
                None => Some(format!(
                    "the limits of a multiprocessor of device {} are not in the trace",
                    of.device_id
                )),
            }
        })
    }

    /// Removes launches that lack a fact, and counts them by the name of the fact.
    fn without_launches_that_lack(
        mut self,
        context: &DiagnosisContext<'a>,
        lacks: impl Fn(&LaunchShapeGroup<'a>) -> Option<String>,
    ) -> Result<Self, MissingData> {
        for of in std::mem::take(&mut self.groups) {
            match lacks(&of) {
                Some(missing) => *self.missing.entry(missing).or_default() += of.total_ns,
                None => self.groups.push(of),
            }
        }
        match self.groups.is_empty() {
            true => Err(MissingData::new(self.reason(), context.platform.record_shapes_advice())),
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

    fn inspected_share(&self, context: &DiagnosisContext<'_>) -> InspectedShare {
        InspectedShare {
            seen: self.groups.iter().map(|of| of.total_ns).sum(),
            whole: self.whole_ns,
            unit: InspectedUnit::KernelTime,
            missing: (!self.missing.is_empty())
                .then(|| format!("{}; {}", self.reason(), context.platform.record_shapes_advice())),
        }
    }
}

fn shape_evidence(
    context: &DiagnosisContext<'_>,
    of: &LaunchShapeGroup<'_>,
    words: String,
) -> FindingEvidence {
    let [x, y, z] = of.shape.grid;
    let threads = of.shape.threads_per_block();
    let name = readable_name(of.name);
    let what = format!("{words}: grid {x}×{y}×{z} of {threads} threads, {name}");
    FindingEvidence {
        count: of.count,
        total_ns: Some(of.total_ns),
        range: context.range_path_text(of.path),
        ..operation_evidence(context, of.first, what)
    }
}

/// The words of a finding about shapes.
struct ShapeFindingText {
    id: &'static str,
    /// Highest severity for a finding that is an estimate.
    worst: FindingSeverity,
    title: String,
    advice: String,
    false_positive: &'static str,
}

/// A shape with the part of its time that it loses, 0 to 1; `None` where nobody can say.
struct ShapeTimeLoss {
    evidence: FindingEvidence,
    lost: Option<f64>,
}

/// Checks every launch shape; shapes that lose time make a finding if they take enough time.
fn check_launch_shapes(
    context: &DiagnosisContext<'_>,
    shapes: Result<KernelShapes<'_>, MissingData>,
    words: ShapeFindingText,
    loss: impl Fn(&LaunchShapeGroup<'_>) -> Option<ShapeTimeLoss>,
) -> RuleResult {
    let shapes = shapes?;
    let (keys, losses): (Vec<(u32, u32)>, Vec<ShapeTimeLoss>) =
        shapes.groups.iter().filter_map(|of| Some((of.key, loss(of)?))).unzip();
    let shorter = |(&(function, shape), loss): (&(u32, u32), &ShapeTimeLoss)| {
        Some(ShortenedKernels { function, shape, left: 1.0 - loss.lost? })
    };
    let shorter: Option<Vec<ShortenedKernels>> = keys.iter().zip(&losses).map(shorter).collect();
    let time: i64 = losses.iter().filter_map(|loss| loss.evidence.total_ns).sum();
    let share = percent(time, shapes.whole_ns);
    let inspected = shapes.inspected_share(context);
    if share < MIN_KERNEL_TIME_PERCENT {
        return Ok((Vec::new(), inspected));
    }
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let saved = |loss: &ShapeTimeLoss| {
        let ns = loss.evidence.total_ns.unwrap_or(0) as f64;
        loss.lost.map(|lost| (ns * lost) as i64)
    };
    let recoverable: Option<i64> = losses.iter().map(saved).sum();
    let span = context.activities.iter().map(DeviceActivity::span_of_gaps_ns).sum();
    let severity = match recoverable {
        Some(ns) => FindingSeverity::from_saving(ns, span).min(words.worst),
        None => FindingSeverity::Information,
    };
    let found = DiagnosisFinding {
        id: words.id,
        severity,
        confidence: FindingConfidence::Medium,
        title: format!("kernels of {share:.1} % of the kernel time {}", words.title),
        measured: NumberWithUnit { value: share, unit: "% of kernel time" },
        threshold: NumberWithUnit { value: MIN_KERNEL_TIME_PERCENT, unit: "% of kernel time" },
        recoverable_ns: recoverable,
        remedy: shorter.map_or(FindingRemedy::NotReplayed, FindingRemedy::Shorter),
        replayed: None,
        evidence: most_expensive_evidence(losses.into_iter().map(|loss| loss.evidence).collect()),
        advice: words.advice,
        false_positive: words.false_positive,
    };
    Ok((vec![found], inspected))
}

pub(super) fn small_grids_rule_text() -> String {
    format!(
        "kernels with fewer blocks than multiprocessors take {MIN_KERNEL_TIME_PERCENT} % of the kernel time"
    )
}

pub(super) fn block_sizes_rule_text() -> String {
    format!(
        "kernels whose block size is no multiple of the warp ({NVIDIA_WARP_SIZE}, on AMD's compute \
         devices 64) take {MIN_KERNEL_TIME_PERCENT} % of the kernel time"
    )
}

/// Words in the names of fp32 matrix products: one list for CUDA cores, and one for tensor cores.
const CUDA_CORE_GEMM_WORDS: &[&str] = &["sgemm", "scudnn", "simt_", "ffma"];
const TENSOR_CORE_GEMM_WORDS: &[&str] = &["tensorop", "tf32", "s1688", "s16816", "xf32"];
/// The first compute capability with tensor cores.
const FIRST_CAPABILITY_WITH_TENSOR_CORES: u32 = 7;
/// Part of the time of a product that tensor cores leave: they multiply 8 times as fast, and memory
/// limits many products before that.
const TENSOR_CORE_TIME_SAVING: f64 = 0.5;

/// Whether a kernel multiplies matrices in fp32, on a device that has tensor cores.
fn is_fp32_gemm_without_tensor_cores(of: &LaunchShapeGroup<'_>) -> bool {
    let name = readable_name(of.name).to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    let capability = of.device.and_then(|device| device.compute);
    capability.is_none_or(|(major, _)| major >= FIRST_CAPABILITY_WITH_TENSOR_CORES)
        && has(CUDA_CORE_GEMM_WORDS)
        && !has(TENSOR_CORE_GEMM_WORDS)
}

pub(super) fn fp32_gemms_rule_text() -> String {
    format!(
        "matrix products in fp32 on CUDA cores, by names such as sgemm, take {MIN_KERNEL_TIME_PERCENT} % of the \
         kernel time on a device with tensor cores"
    )
}

pub(super) fn fp32_gemms_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    if context.platform.vendor == GpuVendor::Amd {
        let reason = "names of AMD's kernels do not show which unit multiplies";
        return Err(MissingData::no_work(reason));
    }
    let words = ShapeFindingText {
        id: "fp32-matmul",
        worst: FindingSeverity::Warning,
        title: "multiply matrices in fp32 without tensor cores".to_owned(),
        advice: "multiply in TF32 (torch.set_float32_matmul_precision(\"high\"), \
                 CUBLAS_COMPUTE_32F_FAST_TF32; from compute capability 8.0 on), or in bf16 or fp16 \
                 (autocast)"
            .to_owned(),
        false_positive: "results that need 24 bits of each factor",
    };
    check_launch_shapes(context, KernelShapes::group_compute_kernels(context), words, |of| {
        is_fp32_gemm_without_tensor_cores(of).then(|| {
            let words = "fp32 on CUDA cores".to_owned();
            ShapeTimeLoss {
                evidence: shape_evidence(context, of, words),
                lost: Some(1.0 - TENSOR_CORE_TIME_SAVING),
            }
        })
    })
}

pub(super) fn tail_waves_rule_text() -> String {
    format!(
        "kernels of more than one wave that lose {TAIL_PERCENT} % or more in their last wave take \
         {MIN_KERNEL_TIME_PERCENT} % of the kernel time"
    )
}

pub(super) fn low_occupancy_rule_text() -> String {
    format!(
        "kernels with a theoretical occupancy below {LOW_OCCUPANCY_PERCENT} % take {MIN_KERNEL_TIME_PERCENT} % of the \
         kernel time"
    )
}

pub(super) fn small_grids_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    let unit = context.platform.multiprocessor_term();
    let words = ShapeFindingText {
        id: "small-grid",
        worst: FindingSeverity::Severe,
        title: format!("have fewer blocks than the GPU has {unit}"),
        advice: "split the work into more blocks (split-K, smaller tiles), batch it, or run \
                 kernels concurrently on parallel streams or graph branches"
            .to_owned(),
        false_positive: "kernels that run beside others on purpose",
    };
    check_launch_shapes(context, KernelShapes::groups_with_multiprocessors(context), words, |of| {
        let multiprocessors = u64::from(of.multiprocessor_count()?);
        let blocks = of.shape.block_count();
        if blocks >= multiprocessors || of.shares_device_with_communication() {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let idle = 1.0 - blocks as f64 / multiprocessors as f64;
        let plural = if blocks == 1 { "" } else { "s" };
        let words = format!("{blocks} block{plural} for {multiprocessors} {unit}");
        Some(ShapeTimeLoss { evidence: shape_evidence(context, of, words), lost: Some(idle) })
    })
}

pub(super) fn block_sizes_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    let platform = context.platform;
    let vendor = platform.vendor;
    let shapes = KernelShapes::group_compute_kernels(context).and_then(|shapes| {
        shapes.without_launches_that_lack(context, |of| {
            of.warp_size(vendor).is_none().then(|| of.unknown_device_reason())
        })
    });
    let widths = shapes.as_ref().map(|shapes| {
        let mut widths: Vec<u32> =
            shapes.groups.iter().filter_map(|of| of.warp_size(vendor)).collect();
        widths.sort_unstable();
        widths.dedup();
        widths.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
    });
    let words = ShapeFindingText {
        id: "block-size",
        worst: FindingSeverity::Severe,
        title: format!("have a block size that is no multiple of a {}", platform.warp_term()),
        advice: format!("make the block size a multiple of {}", widths.unwrap_or_default()),
        false_positive: "kernels that one warp or less computes on purpose",
    };
    check_launch_shapes(context, shapes, words, |of| {
        let (threads, warp) = (of.shape.threads_per_block(), u64::from(of.warp_size(vendor)?));
        let lanes = threads.checked_next_multiple_of(warp)?;
        let idle = lanes - threads;
        if idle == 0 {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let lost = idle as f64 / lanes as f64;
        let words = format!("{idle} of {lanes} lanes idle, {} of {warp}", platform.warp_term());
        Some(ShapeTimeLoss { evidence: shape_evidence(context, of, words), lost: Some(lost) })
    })
}

pub(super) fn tail_waves_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    let words = ShapeFindingText {
        id: "tail",
        worst: FindingSeverity::Warning,
        title: "leave a fifth of the GPU or more idle in their last wave".to_owned(),
        advice: "choose tiles so that blocks fill whole waves, or use a persistent or stream-K \
                 kernel"
            .to_owned(),
        false_positive: "blocks of different length fill a wave anyway; kernels that overlap with \
                         the next one",
    };
    check_launch_shapes(context, KernelShapes::groups_with_device_limits(context), words, |of| {
        let resident = of.multiprocessor_residency().filter(|of| of.blocks > 0)?;
        let slots = f64::from(resident.blocks) * f64::from(of.multiprocessor_count()?);
        #[allow(clippy::cast_precision_loss)]
        let waves = of.shape.block_count() as f64 / slots;
        let lost = 1.0 - waves / waves.ceil();
        if waves <= 1.0 || lost * 100.0 < TAIL_PERCENT || of.shares_device_with_communication() {
            return None;
        }
        let evidence = shape_evidence(context, of, format!("{waves:.2} waves"));
        Some(ShapeTimeLoss { evidence, lost: Some(lost) })
    })
}

pub(super) fn low_occupancy_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    let profiler = context.platform.kernel_profiler_name();
    let words = ShapeFindingText {
        id: "occupancy",
        worst: FindingSeverity::Information,
        title: format!("have a theoretical occupancy below {LOW_OCCUPANCY_PERCENT} %"),
        advice: format!(
            "fewer registers (__launch_bounds__), less shared memory, or another block size; \
             measure stalls with {profiler} first: 50 to 75 % is often enough"
        ),
        false_positive: "GEMM and attention kernels that hide latency by instruction-level \
                         parallelism",
    };
    check_launch_shapes(context, KernelShapes::groups_with_device_limits(context), words, |of| {
        let resident = of.multiprocessor_residency()?;
        if resident.occupancy >= LOW_OCCUPANCY_PERCENT {
            return None;
        }
        let words = format!("{:.0} %, limited by {}", resident.occupancy, resident.limiter);
        // A timeline cannot say how much more warps would save.
        Some(ShapeTimeLoss { evidence: shape_evidence(context, of, words), lost: None })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_smallest_residency_limit_is_named_as_the_limiter() {
        let device = TracedDevice {
            multiprocessors: Some(132),
            threads_per_sm: Some(2048),
            registers_per_sm: Some(65536),
            shared_per_sm: Some(233_472),
            blocks_per_sm: Some(32),
            ..TracedDevice::default()
        };
        let shape = |threads, registers, dynamic_shared| LaunchShape {
            block: [threads, 1, 1],
            registers,
            dynamic_shared,
            ..LaunchShape::default()
        };
        let resident = |shape| residency_on_multiprocessor(&device, &shape).unwrap();
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
        assert_eq!(residency_on_multiprocessor(&TracedDevice::default(), &shape(32, 16, 0)), None);
    }
}
