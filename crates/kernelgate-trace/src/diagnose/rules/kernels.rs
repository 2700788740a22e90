//! Diagnosis rules about launch shapes and kernels that leave multiprocessors or lanes idle.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedRecordKind, InspectedShareOfRecords, KernelsAndTimeShareAfterRemedy,
    MeasuredNumberWithUnit,
};
use super::super::labels::shortened_kernel_name_for_readers;
use super::super::trace_facts::DiagnosisContext;
use super::super::vendor_names::GpuVendor;
use super::launches::require_gpu_operations;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, evidence_of_single_operation, percent_or_zero,
    sorted_and_limited_evidence,
};
use crate::analyze::classes::OperationClass;
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::timeline::idle_time::ProcessActivityOnGpu;
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::model::TracedDevice;
use crate::model::gpu::KernelLaunchShape;

/// Smallest share of the kernel time, in percent, that faulty launch shapes must take for a
/// finding.
const MIN_FAULTY_KERNEL_TIME_PERCENT: f64 = 5.0;
/// Smallest idle share, in percent, that the last wave of blocks must cause for a finding.
const MIN_IDLE_TAIL_WAVE_PERCENT: f64 = 20.0;
/// Occupancy, theoretical or achieved, in percent, below which kernels are reported; the value is
/// that of the attention guide's checklist.
pub(crate) const LOW_OCCUPANCY_PERCENT: f64 = 50.0;
/// Number of threads of a warp on all NVIDIA GPUs.
const NVIDIA_WARP_THREADS: u32 = 32;
/// Number of registers that the hardware allocates to a warp at a time.
const WARP_REGISTER_ALLOCATION_UNIT: u32 = 256;

/// How many blocks of a kernel launch a multiprocessor can hold at the same time, and which
/// resource limits the number.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ResidentBlocksPerMultiprocessor {
    resident_blocks: u32,
    /// Threads of the resident blocks divided by the most threads that a multiprocessor holds
    /// (theoretical occupancy), in percent.
    theoretical_occupancy_percent: f64,
    limiting_resource: &'static str,
}

/// Returns `None` if the trace does not contain the limits of the GPU's multiprocessors.
fn blocks_resident_on_multiprocessor(
    device: &TracedDevice,
    shape: &KernelLaunchShape,
) -> Option<ResidentBlocksPerMultiprocessor> {
    let (threads_per_sm, warp) = (device.threads_per_sm?, warp_or_wavefront_threads(device));
    let warps = u32::try_from(shape.threads_per_block()).ok()?.div_ceil(warp).max(1);
    let mut limits = vec![("block size", threads_per_sm / warp / warps)];
    if let Some(blocks) = device.blocks_per_sm {
        limits.push(("blocks of a multiprocessor", blocks));
    }
    if let Some(registers) = device.registers_per_sm.filter(|_| shape.registers_per_thread > 0) {
        let of_warp = shape
            .registers_per_thread
            .checked_mul(warp)?
            .checked_next_multiple_of(WARP_REGISTER_ALLOCATION_UNIT)?;
        limits.push(("registers", registers / of_warp / warps));
    }
    let shared = shape.static_shared_bytes.checked_add(shape.dynamic_shared_bytes)?;
    if let Some(of_sm) = device.shared_bytes_per_sm.filter(|_| shared > 0) {
        limits.push(("shared memory", of_sm / shared));
    }
    let (limiter, blocks) = limits.into_iter().min_by_key(|&(_, blocks)| blocks)?;
    let resident = u64::from(blocks) * u64::from(warps) * u64::from(warp);
    #[allow(clippy::cast_precision_loss)]
    let occupancy = resident as f64 / f64::from(threads_per_sm) * 100.0;
    Some(ResidentBlocksPerMultiprocessor {
        resident_blocks: blocks,
        theoretical_occupancy_percent: occupancy.min(100.0),
        limiting_resource: limiter,
    })
}

/// Number of threads of a warp (AMD: wavefront) on the GPU; AMD Instinct GPUs have 64.
fn warp_or_wavefront_threads(device: &TracedDevice) -> u32 {
    let usual = if device.device_name.contains("Instinct") { 64 } else { NVIDIA_WARP_THREADS };
    device.threads_per_warp.filter(|&warp| warp > 0).unwrap_or(usual)
}

/// All launches of one kernel function with one launch shape on one GPU.
struct KernelLaunchesOfShape<'a> {
    kernel_name: &'a str,
    shape: KernelLaunchShape,
    /// Indices of the kernel's function and of its launch shape in the trace.
    function_and_shape_indices: (u32, u32),
    /// Ordinal of the GPU, with its description if the trace contains one.
    gpu_ordinal: u32,
    device: Option<&'a TracedDevice>,
    launch_count: usize,
    total_kernel_ns: i64,
    /// Time of these kernels during which communication runs on the same GPU, nanoseconds.
    ns_beside_communication: i64,
    first_operation_id: u32,
    /// Path of the innermost range around all these launches.
    common_range_path: RangePathId,
}

impl KernelLaunchesOfShape<'_> {
    /// Whether communication runs for more than half of the kernels' time, so that they may leave
    /// multiprocessors free on purpose.
    fn runs_mostly_beside_communication(&self) -> bool {
        self.ns_beside_communication * 2 > self.total_kernel_ns
    }

    fn multiprocessor_count_of_gpu(&self) -> Option<u32> {
        self.device?.multiprocessors
    }

    fn resident_blocks_on_multiprocessor(&self) -> Option<ResidentBlocksPerMultiprocessor> {
        blocks_resident_on_multiprocessor(self.device?, &self.shape)
    }

    /// Number of threads of a warp on the kernels' GPU; `None` for an AMD GPU that the trace does
    /// not describe.
    fn warp_threads_of_gpu(&self, vendor: GpuVendor) -> Option<u32> {
        match (self.device, vendor) {
            (Some(device), _) => Some(warp_or_wavefront_threads(device)),
            (None, GpuVendor::Nvidia) => Some(NVIDIA_WARP_THREADS),
            (None, GpuVendor::Amd) => None,
        }
    }

    /// Text for a GPU that the trace does not describe.
    fn reason_gpu_is_unknown(&self) -> String {
        let id = self.gpu_ordinal;
        format!("device {id}, on which the kernels ran, is not described in the trace")
    }
}

/// Indices of kernel function and launch shape (`None` if not recorded), and ordinal of the GPU.
type FunctionShapeAndGpu = (u32, Option<u32>, u32);

/// Compute kernels grouped by function, launch shape and GPU, as far as their data suffices for a
/// rule.
struct KernelsByLaunchShape<'a> {
    groups: Vec<KernelLaunchesOfShape<'a>>,
    /// Total time of all compute kernels, and of CUDA graphs of which single kernels were not
    /// recorded, nanoseconds.
    all_kernels_ns: i64,
    /// Time of kernels that a rule cannot inspect, by the text of what is missing, nanoseconds.
    uninspected_ns_by_reason: BTreeMap<String, i64>,
}

/// Time spans in which communication runs, by process id and GPU.
struct CommunicationSpansByGpu(HashMap<(i64, u32), UnionOfTimeSpans>);

impl CommunicationSpansByGpu {
    fn collect_communication_spans(context: &DiagnosisContext<'_>) -> Self {
        let mut spans: HashMap<(i64, u32), Vec<(i64, i64)>> = HashMap::new();
        let all = &context.operations;
        let is =
            |id: &u32| context.classes.class_of_gpu_operation(*id) == OperationClass::Communication;
        for id in all.all_operation_ids().filter(is) {
            spans
                .entry(context.process_id_and_gpu_of_operation(id))
                .or_default()
                .push(all.operation_start_and_end_ns(id));
        }
        Self(
            spans
                .into_iter()
                .map(|(place, spans)| (place, UnionOfTimeSpans::union_of_spans(spans)))
                .collect(),
        )
    }

    /// Nanoseconds of an operation during which communication runs on its GPU.
    fn kernel_duration_ns(&self, context: &DiagnosisContext<'_>, id: u32) -> i64 {
        if self.0.is_empty() {
            return 0;
        }
        let union = self.0.get(&context.process_id_and_gpu_of_operation(id));
        union.map_or(0, |union| {
            union.covered_ns_within(context.operations.operation_start_and_end_ns(id))
        })
    }
}

impl<'a> KernelsByLaunchShape<'a> {
    /// Groups the compute kernels of a trace; communication kernels are omitted, because they use
    /// few multiprocessors on purpose.
    fn group_compute_kernels_by_shape(
        context: &DiagnosisContext<'a>,
    ) -> Result<KernelsByLaunchShape<'a>, DataMissingForRule> {
        let trace = context.trace;
        let kernels = &trace.kernels;
        require_gpu_operations(context)?;
        let graphs = &trace.graphs.on_gpu;
        let in_graphs = graphs.sum_of_operation_durations_ns();
        let mut shapes = Self {
            groups: vec![],
            all_kernels_ns: in_graphs,
            uninspected_ns_by_reason: BTreeMap::new(),
        };
        if in_graphs > 0 {
            shapes
                .uninspected_ns_by_reason
                .insert("graphs were recorded whole".to_owned(), in_graphs);
        }
        let mut groups: HashMap<FunctionShapeAndGpu, (Option<KernelLaunchesOfShape<'a>>, i64)> =
            HashMap::new();
        let communication = CommunicationSpansByGpu::collect_communication_spans(context);
        for row in 0..kernels.on_gpu.operation_count() {
            let length = kernels.on_gpu.operation_duration_ns(row);
            let id = u32::try_from(row).unwrap_or(u32::MAX);
            let place = &trace.places[kernels.on_gpu.place.at(row).0 as usize];
            let shape = kernels.launch_shape_index.decoded_row(row);
            let key = (kernels.function_index.at(row), shape, place.device);
            let (group, total_ns) = groups.entry(key).or_insert_with(|| {
                let shaped = |shape: u32| KernelLaunchesOfShape {
                    kernel_name: trace.demangled_kernel_name(row),
                    shape: trace.shapes[shape as usize],
                    function_and_shape_indices: (kernels.function_index.at(row), shape),
                    gpu_ordinal: place.device,
                    device: trace
                        .devices
                        .iter()
                        .find(|device| device.device_ordinal == place.device),
                    launch_count: 0,
                    total_kernel_ns: 0,
                    ns_beside_communication: 0,
                    first_operation_id: id,
                    common_range_path: context.range_path_of_operation(id),
                };
                (shape.map(shaped), 0)
            });
            *total_ns += length;
            if let Some(group) = group {
                group.common_range_path =
                    context.common_path_with_operation(group.common_range_path, id);
                group.launch_count += 1;
                group.total_kernel_ns += length;
                group.ns_beside_communication += communication.kernel_duration_ns(context, id);
            }
        }
        let compute = |(function, ..): &FunctionShapeAndGpu| {
            context.classes.communication_of_kernel_function(*function).is_none()
        };
        for (_, (group, total_ns)) in groups.into_iter().filter(|(key, _)| compute(key)) {
            shapes.all_kernels_ns += total_ns;
            match group
                .filter(|of| of.shape.blocks_in_grid() > 0 && of.shape.threads_per_block() > 0)
            {
                Some(group) => shapes.groups.push(group),
                None => {
                    let missing = "launch shapes are not in the trace".to_owned();
                    *shapes.uninspected_ns_by_reason.entry(missing).or_default() += total_ns;
                }
            }
        }
        if shapes.all_kernels_ns == 0
            && shapes.uninspected_ns_by_reason.is_empty()
            && shapes.groups.is_empty()
        {
            return Err(DataMissingForRule::program_has_no_such_work(
                "the trace holds no compute kernels",
            ));
        }
        shapes
            .groups
            .sort_by_key(|of| (std::cmp::Reverse(of.total_kernel_ns), of.first_operation_id));
        shapes.without_groups_that_lack_data(context, |_| None)
    }

    /// Groups compute kernels on GPUs whose number of multiprocessors is in the trace.
    fn groups_with_known_multiprocessor_count(
        context: &DiagnosisContext<'a>,
    ) -> Result<Self, DataMissingForRule> {
        Self::group_compute_kernels_by_shape(context)?
            .without_groups_that_lack_data(context, |of| {
                of.multiprocessor_count_of_gpu().is_none().then(|| of.reason_gpu_is_unknown())
            })
    }

    /// Keeps the compute kernels on GPUs for which the trace contains the limits of a
    /// multiprocessor, grouped by launch shape.
    fn groups_with_known_multiprocessor_limits(
        context: &DiagnosisContext<'a>,
    ) -> Result<Self, DataMissingForRule> {
        Self::groups_with_known_multiprocessor_count(context)?.without_groups_that_lack_data(
            context,
            |of| match of.resident_blocks_on_multiprocessor() {
                Some(_) => None,
                None => Some(format!(
                    "the limits of a multiprocessor of device {} are not in the trace",
                    of.gpu_ordinal
                )),
            },
        )
    }

    /// Removes groups of kernels for which `lacks` names missing data, and adds their time to the
    /// uninspected time of that reason.
    fn without_groups_that_lack_data(
        mut self,
        context: &DiagnosisContext<'a>,
        lacks: impl Fn(&KernelLaunchesOfShape<'a>) -> Option<String>,
    ) -> Result<Self, DataMissingForRule> {
        for of in std::mem::take(&mut self.groups) {
            match lacks(&of) {
                Some(missing) => {
                    *self.uninspected_ns_by_reason.entry(missing).or_default() += of.total_kernel_ns
                }
                None => self.groups.push(of),
            }
        }
        match self.groups.is_empty() {
            true => Err(DataMissingForRule::missing_data_with_advice(
                self.missing_data_text(),
                context.platform.advice_to_record_launch_shapes(),
            )),
            false => Ok(self),
        }
    }

    /// Returns what data is missing, as text, with the largest share of the kernel time first.
    fn missing_data_text(&self) -> String {
        let mut missing: Vec<(&String, i64)> =
            self.uninspected_ns_by_reason.iter().map(|(of, ns)| (of, *ns)).collect();
        missing.sort_by_key(|&(_, ns)| std::cmp::Reverse(ns));
        let whole = self.all_kernels_ns;
        let words = missing.iter().map(|(of, ns)| match missing.len() {
            1 => (*of).clone(),
            _ => format!("{of} ({:.1} % of the kernel time)", percent_or_zero(*ns, whole)),
        });
        words.collect::<Vec<_>>().join("; ")
    }

    fn inspected_share_of_kernel_time(
        &self,
        context: &DiagnosisContext<'_>,
    ) -> InspectedShareOfRecords {
        InspectedShareOfRecords {
            inspected_count_or_ns: self.groups.iter().map(|of| of.total_kernel_ns).sum(),
            whole_count_or_ns: self.all_kernels_ns,
            inspected_record_kind: InspectedRecordKind::KernelTime,
            reason_for_uninspected_records: (!self.uninspected_ns_by_reason.is_empty()).then(
                || {
                    format!(
                        "{}; {}",
                        self.missing_data_text(),
                        context.platform.advice_to_record_launch_shapes()
                    )
                },
            ),
        }
    }
}

fn evidence_of_launch_shape(
    context: &DiagnosisContext<'_>,
    of: &KernelLaunchesOfShape<'_>,
    words: String,
) -> FindingEvidence {
    let [x, y, z] = of.shape.grid;
    let threads = of.shape.threads_per_block();
    let name = shortened_kernel_name_for_readers(of.kernel_name);
    let what = format!("{words}: grid {x}×{y}×{z} of {threads} threads, {name}");
    FindingEvidence {
        covered_count: of.launch_count,
        total_duration_ns: Some(of.total_kernel_ns),
        innermost_common_range_path: context.range_path_text_unless_root(of.common_range_path),
        ..evidence_of_single_operation(context, of.first_operation_id, what)
    }
}

/// Texts and severity limit of a finding about launch shapes.
struct LaunchShapeFindingTexts {
    finding_id: &'static str,
    /// Highest severity that the finding may have, because its savings are an estimate.
    highest_severity: FindingSeverity,
    title: String,
    advice: String,
    false_positive_note: &'static str,
}

/// Evidence of a launch shape, and the estimated share of its time that is lost, 0 to 1; `None` if
/// that cannot be estimated.
struct LaunchShapeWithLostTime {
    evidence: FindingEvidence,
    lost_time_share: Option<f64>,
}

/// Makes a finding of all launch shapes for which `loss` gives lost time, if these take enough of
/// the kernel time.
fn finding_of_launch_shapes_that_lose_time(
    context: &DiagnosisContext<'_>,
    shapes: Result<KernelsByLaunchShape<'_>, DataMissingForRule>,
    words: LaunchShapeFindingTexts,
    loss: impl Fn(&KernelLaunchesOfShape<'_>) -> Option<LaunchShapeWithLostTime>,
) -> FindingsOrMissingData {
    let shapes = shapes?;
    let (keys, losses): (Vec<(u32, u32)>, Vec<LaunchShapeWithLostTime>) = shapes
        .groups
        .iter()
        .filter_map(|of| Some((of.function_and_shape_indices, loss(of)?)))
        .unzip();
    let shorter = |(&(function, shape), loss): (&(u32, u32), &LaunchShapeWithLostTime)| {
        Some(KernelsAndTimeShareAfterRemedy {
            function_index: function,
            launch_shape_index: shape,
            remaining_time_share: 1.0 - loss.lost_time_share?,
        })
    };
    let shorter: Option<Vec<KernelsAndTimeShareAfterRemedy>> =
        keys.iter().zip(&losses).map(shorter).collect();
    let time: i64 = losses.iter().filter_map(|loss| loss.evidence.total_duration_ns).sum();
    let share = percent_or_zero(time, shapes.all_kernels_ns);
    let inspected = shapes.inspected_share_of_kernel_time(context);
    if share < MIN_FAULTY_KERNEL_TIME_PERCENT {
        return Ok((Vec::new(), inspected));
    }
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let saved = |loss: &LaunchShapeWithLostTime| {
        let ns = loss.evidence.total_duration_ns.unwrap_or(0) as f64;
        loss.lost_time_share.map(|lost| (ns * lost) as i64)
    };
    let recoverable: Option<i64> = losses.iter().map(saved).sum();
    let span =
        context.activities.iter().map(ProcessActivityOnGpu::first_start_to_last_end_ns).sum();
    let severity = match recoverable {
        Some(ns) => {
            FindingSeverity::severity_from_possible_saving(ns, span).min(words.highest_severity)
        }
        None => FindingSeverity::Information,
    };
    let found = DiagnosisFinding {
        rule_id: words.finding_id,
        severity,
        confidence: FindingConfidence::MediumConfidence,
        finding_title: format!("kernels of {share:.1} % of the kernel time {}", words.title),
        measured_value: MeasuredNumberWithUnit { number_in_unit: share, unit: "% of kernel time" },
        rule_threshold: MeasuredNumberWithUnit {
            number_in_unit: MIN_FAULTY_KERNEL_TIME_PERCENT,
            unit: "% of kernel time",
        },
        max_recoverable_ns: recoverable,
        remedy: shorter.map_or(FindingRemedy::GainNotReplayable, FindingRemedy::ShorterKernels),
        replayed_gain: None,
        evidence: sorted_and_limited_evidence(
            losses.into_iter().map(|loss| loss.evidence).collect(),
        ),
        advice: words.advice,
        false_positive_note: words.false_positive_note,
    };
    Ok((vec![found], inspected))
}

pub(super) fn small_grids_rule_text() -> String {
    format!(
        "kernels with fewer blocks than multiprocessors take {MIN_FAULTY_KERNEL_TIME_PERCENT} % of the kernel time"
    )
}

pub(super) fn block_sizes_rule_text() -> String {
    format!(
        "kernels whose block size is no multiple of the warp ({NVIDIA_WARP_THREADS}, on AMD's compute \
         devices 64) take {MIN_FAULTY_KERNEL_TIME_PERCENT} % of the kernel time"
    )
}

/// Words that show that a kernel is an fp32 GEMM on CUDA cores, and words that show that it uses
/// tensor cores.
const CUDA_CORE_GEMM_NAME_WORDS: &[&str] = &["sgemm", "scudnn", "simt_", "ffma"];
const TENSOR_CORE_GEMM_NAME_WORDS: &[&str] = &["tensorop", "tf32", "s1688", "s16816", "xf32"];
/// Major compute capability of the first NVIDIA GPUs with tensor cores.
const FIRST_COMPUTE_MAJOR_WITH_TENSOR_CORES: u32 = 7;
/// Estimated share of an fp32 GEMM's time that remains on tensor cores: they multiply 8 times as
/// fast, but memory limits many GEMMs before that.
const TIME_SHARE_LEFT_BY_TENSOR_CORES: f64 = 0.5;

/// Returns whether these kernels are fp32 GEMMs on CUDA cores, on a GPU that has tensor cores.
fn are_fp32_gemms_on_cuda_cores(of: &KernelLaunchesOfShape<'_>) -> bool {
    let name = shortened_kernel_name_for_readers(of.kernel_name).to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    let capability = of.device.and_then(|device| device.compute_capability);
    capability.is_none_or(|(major, _)| major >= FIRST_COMPUTE_MAJOR_WITH_TENSOR_CORES)
        && has(CUDA_CORE_GEMM_NAME_WORDS)
        && !has(TENSOR_CORE_GEMM_NAME_WORDS)
}

pub(super) fn fp32_gemms_rule_text() -> String {
    format!(
        "matrix products in fp32 on CUDA cores, by names such as sgemm, take {MIN_FAULTY_KERNEL_TIME_PERCENT} % of the \
         kernel time on a device with tensor cores"
    )
}

pub(super) fn find_fp32_gemms_on_cuda_cores(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    if context.platform.vendor == GpuVendor::Amd {
        let reason = "names of AMD's kernels do not show which unit multiplies";
        return Err(DataMissingForRule::program_has_no_such_work(reason));
    }
    let words = LaunchShapeFindingTexts {
        finding_id: "fp32-matmul",
        highest_severity: FindingSeverity::Warning,
        title: "multiply matrices in fp32 without tensor cores".to_owned(),
        advice: "multiply in TF32 (torch.set_float32_matmul_precision(\"high\"), \
                 CUBLAS_COMPUTE_32F_FAST_TF32; from compute capability 8.0 on), or in bf16 or fp16 \
                 (autocast)"
            .to_owned(),
        false_positive_note: "results that need 24 bits of each factor",
    };
    finding_of_launch_shapes_that_lose_time(
        context,
        KernelsByLaunchShape::group_compute_kernels_by_shape(context),
        words,
        |of| {
            are_fp32_gemms_on_cuda_cores(of).then(|| {
                let words = "fp32 on CUDA cores".to_owned();
                LaunchShapeWithLostTime {
                    evidence: evidence_of_launch_shape(context, of, words),
                    lost_time_share: Some(1.0 - TIME_SHARE_LEFT_BY_TENSOR_CORES),
                }
            })
        },
    )
}

pub(super) fn tail_waves_rule_text() -> String {
    format!(
        "kernels of more than one wave that lose {MIN_IDLE_TAIL_WAVE_PERCENT} % or more in their last wave take \
         {MIN_FAULTY_KERNEL_TIME_PERCENT} % of the kernel time"
    )
}

pub(super) fn low_occupancy_rule_text() -> String {
    format!(
        "kernels with a theoretical occupancy below {LOW_OCCUPANCY_PERCENT} % take {MIN_FAULTY_KERNEL_TIME_PERCENT} % of the \
         kernel time"
    )
}

pub(super) fn find_grids_smaller_than_gpu(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    let unit = context.platform.multiprocessors_or_compute_units_term();
    let words = LaunchShapeFindingTexts {
        finding_id: "small-grid",
        highest_severity: FindingSeverity::Severe,
        title: format!("have fewer blocks than the GPU has {unit}"),
        advice: "split the work into more blocks (split-K, smaller tiles), batch it, or run \
                 kernels concurrently on parallel streams or graph branches"
            .to_owned(),
        false_positive_note: "kernels that run beside others on purpose",
    };
    finding_of_launch_shapes_that_lose_time(
        context,
        KernelsByLaunchShape::groups_with_known_multiprocessor_count(context),
        words,
        |of| {
            let multiprocessors = u64::from(of.multiprocessor_count_of_gpu()?);
            let blocks = of.shape.blocks_in_grid();
            if blocks >= multiprocessors || of.runs_mostly_beside_communication() {
                return None;
            }
            #[allow(clippy::cast_precision_loss)]
            let idle = 1.0 - blocks as f64 / multiprocessors as f64;
            let plural = if blocks == 1 { "" } else { "s" };
            let words = format!("{blocks} block{plural} for {multiprocessors} {unit}");
            Some(LaunchShapeWithLostTime {
                evidence: evidence_of_launch_shape(context, of, words),
                lost_time_share: Some(idle),
            })
        },
    )
}

pub(super) fn find_block_sizes_with_idle_lanes(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    let platform = context.platform;
    let vendor = platform.vendor;
    let shapes = KernelsByLaunchShape::group_compute_kernels_by_shape(context).and_then(|shapes| {
        shapes.without_groups_that_lack_data(context, |of| {
            of.warp_threads_of_gpu(vendor).is_none().then(|| of.reason_gpu_is_unknown())
        })
    });
    let widths = shapes.as_ref().map(|shapes| {
        let mut widths: Vec<u32> =
            shapes.groups.iter().filter_map(|of| of.warp_threads_of_gpu(vendor)).collect();
        widths.sort_unstable();
        widths.dedup();
        widths.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
    });
    let words = LaunchShapeFindingTexts {
        finding_id: "block-size",
        highest_severity: FindingSeverity::Severe,
        title: format!(
            "have a block size that is no multiple of a {}",
            platform.warp_or_wavefront_term()
        ),
        advice: format!("make the block size a multiple of {}", widths.unwrap_or_default()),
        false_positive_note: "kernels that one warp or less computes on purpose",
    };
    finding_of_launch_shapes_that_lose_time(context, shapes, words, |of| {
        let (threads, warp) =
            (of.shape.threads_per_block(), u64::from(of.warp_threads_of_gpu(vendor)?));
        let lanes = threads.checked_next_multiple_of(warp)?;
        let idle = lanes - threads;
        if idle == 0 {
            return None;
        }
        #[allow(clippy::cast_precision_loss)]
        let lost = idle as f64 / lanes as f64;
        let words = format!(
            "{idle} of {lanes} lanes idle, {} of {warp}",
            platform.warp_or_wavefront_term()
        );
        Some(LaunchShapeWithLostTime {
            evidence: evidence_of_launch_shape(context, of, words),
            lost_time_share: Some(lost),
        })
    })
}

pub(super) fn find_launches_with_idle_tail_wave(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    let words = LaunchShapeFindingTexts {
        finding_id: "tail",
        highest_severity: FindingSeverity::Warning,
        title: "leave a fifth of the GPU or more idle in their last wave".to_owned(),
        advice: "choose tiles so that blocks fill whole waves, or use a persistent or stream-K \
                 kernel"
            .to_owned(),
        false_positive_note: "blocks of different length fill a wave anyway; kernels that overlap with \
                         the next one",
    };
    finding_of_launch_shapes_that_lose_time(
        context,
        KernelsByLaunchShape::groups_with_known_multiprocessor_limits(context),
        words,
        |of| {
            let resident =
                of.resident_blocks_on_multiprocessor().filter(|of| of.resident_blocks > 0)?;
            let slots =
                f64::from(resident.resident_blocks) * f64::from(of.multiprocessor_count_of_gpu()?);
            #[allow(clippy::cast_precision_loss)]
            let waves = of.shape.blocks_in_grid() as f64 / slots;
            let lost = 1.0 - waves / waves.ceil();
            if waves <= 1.0
                || lost * 100.0 < MIN_IDLE_TAIL_WAVE_PERCENT
                || of.runs_mostly_beside_communication()
            {
                return None;
            }
            let evidence = evidence_of_launch_shape(context, of, format!("{waves:.2} waves"));
            Some(LaunchShapeWithLostTime { evidence, lost_time_share: Some(lost) })
        },
    )
}

pub(super) fn find_low_theoretical_occupancy(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    let profiler = context.platform.kernel_profiler_name();
    let words = LaunchShapeFindingTexts {
        finding_id: "occupancy",
        highest_severity: FindingSeverity::Information,
        title: format!("have a theoretical occupancy below {LOW_OCCUPANCY_PERCENT} %"),
        advice: format!(
            "fewer registers (__launch_bounds__), less shared memory, or another block size; \
             measure stalls with {profiler} first: 50 to 75 % is often enough"
        ),
        false_positive_note: "GEMM and attention kernels that hide latency by instruction-level \
                         parallelism",
    };
    finding_of_launch_shapes_that_lose_time(
        context,
        KernelsByLaunchShape::groups_with_known_multiprocessor_limits(context),
        words,
        |of| {
            let resident = of.resident_blocks_on_multiprocessor()?;
            if resident.theoretical_occupancy_percent >= LOW_OCCUPANCY_PERCENT {
                return None;
            }
            let words = format!(
                "{:.0} %, limited by {}",
                resident.theoretical_occupancy_percent, resident.limiting_resource
            );
            // No lost time is estimated, because a timeline does not show how much time more
            // resident warps would save.
            Some(LaunchShapeWithLostTime {
                evidence: evidence_of_launch_shape(context, of, words),
                lost_time_share: None,
            })
        },
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_resource_with_the_fewest_blocks_is_the_limiter() {
        let device = TracedDevice {
            multiprocessors: Some(132),
            threads_per_sm: Some(2048),
            registers_per_sm: Some(65536),
            shared_bytes_per_sm: Some(233_472),
            blocks_per_sm: Some(32),
            ..TracedDevice::default()
        };
        let shape = |threads, registers, dynamic_shared| KernelLaunchShape {
            block: [threads, 1, 1],
            registers_per_thread: registers,
            dynamic_shared_bytes: dynamic_shared,
            ..KernelLaunchShape::default()
        };
        let resident = |shape| blocks_resident_on_multiprocessor(&device, &shape).unwrap();
        let full = resident(shape(256, 32, 0));
        assert_eq!((full.resident_blocks, full.theoretical_occupancy_percent), (8, 100.0));
        let registers = resident(shape(128, 255, 0));
        // 255 registers × 32 lanes are 8160, rounded up to 8192 for each of 4 warps, so the
        // registers hold two blocks.
        assert_eq!((registers.resident_blocks, registers.limiting_resource), (2, "registers"));
        assert_eq!(registers.theoretical_occupancy_percent, 12.5);
        let shared = resident(shape(128, 32, 100_000));
        assert_eq!((shared.resident_blocks, shared.limiting_resource), (2, "shared memory"));
        let small = resident(shape(32, 16, 0));
        assert_eq!(
            (small.resident_blocks, small.limiting_resource),
            (32, "blocks of a multiprocessor")
        );
        assert_eq!(
            blocks_resident_on_multiprocessor(&TracedDevice::default(), &shape(32, 16, 0)),
            None
        );
    }
}
