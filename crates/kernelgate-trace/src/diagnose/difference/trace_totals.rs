//! Sums the times of one trace into the parts (operations, idle causes, ranges, calls) by which two
//! traces are compared.

use std::collections::BTreeMap;
use std::path::Path;

use hashbrown::HashMap;

use super::super::finding::TraceDiagnosis;
pub use super::super::host::FunctionCallSum;
use super::super::host::gap_cause::{IdleCauseAndBlamedName, IdleCauseKind};
use super::super::ncu_launches::{ncu_launch_duration_ns, ncu_metric_of_launch};
use super::super::trace_facts::DiagnosisContext;
use super::super::{rules, with_context_of_streamed_export};
use super::trace_setup::MachineAndRecorderOfTrace;
use crate::analyze::operations::{
    GpuOperationId, GpuOperationKind, PRINTED_MEMSET_NAME, printed_memcpy_name,
};
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::timeline::idle_time;
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::gpu::{CopiedMemoryKind, KernelLaunchShape};
use crate::model::interned_names::replace_digits_by_number_sign;

/// Kind of a part of a trace's whole time: a kind of operation, or idle time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TracePartKind {
    /// Launches of a kernel.
    Kernel,
    /// Copies of one direction between given kinds of memory.
    Copy,
    /// Sets of memory.
    Memset,
    /// Launches of CUDA graphs whose single kernels were not recorded.
    CudaGraphLaunch,
    /// Idle time of the GPU with a known cause.
    IdleTimeOfKnownCause,
    /// Idle time of the GPU whose cause the trace does not show.
    UnexplainedIdleTime,
}

impl TracePartKind {
    /// Returns the label of the kind of trace part in printed output.
    pub fn printed_trace_part_kind(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Copy => "copy",
            Self::Memset => "set",
            Self::CudaGraphLaunch => "graph",
            Self::IdleTimeOfKnownCause => "idle",
            Self::UnexplainedIdleTime => "unexplained",
        }
    }
}

/// A part of a trace's whole time; the key is equal in two traces that are compared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TracePartKey {
    pub kind: TracePartKind,
    /// Name of the kernel, `[CUDA memcpy …]` with the kinds of memory, or the cause of idle time.
    pub part_name: String,
}

/// Number of operations, and times, of one part of a trace.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TracePartCountAndTimes {
    /// Number of operations.
    pub operation_count: usize,
    /// Sum of the operations' durations, nanoseconds; operations that run at the same time count
    /// fully.
    pub total_operation_ns: i64,
    /// Nanoseconds in which an operation of this part ran while no operation that had started
    /// earlier ran. The `own_ns` of all parts of a trace add up to its whole time.
    pub exclusive_ns: i64,
    /// Launch shapes of the kernel, each with its number of launches.
    pub launches_by_shape: BTreeMap<KernelLaunchShape, usize>,
    /// Nsight Compute metrics of the kernel by name, summed over its launches.
    pub ncu_metric_sums: BTreeMap<&'static str, f64>,
}

impl TracePartCountAndTimes {
    fn add_one_operation(&mut self, total_ns: i64, own_ns: i64) {
        self.operation_count += 1;
        self.total_operation_ns += total_ns;
        self.exclusive_ns += own_ns;
    }

    /// Mean duration of the trace part's operations, nanoseconds; 0 without operations.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean_operation_ns(&self) -> f64 {
        self.total_operation_ns as f64 / self.operation_count.max(1) as f64
    }
}

/// Times summed over the ranges whose paths differ only in numbers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RangePathTimes {
    /// How many ranges.
    pub range_count: usize,
    /// Total time that the ranges of this path lasted on the host, nanoseconds.
    pub host_range_ns: i64,
    /// Operations that were launched in these ranges but in no range inside them, with the idle
    /// time before these operations.
    pub launched_operations: TracePartCountAndTimes,
}

/// A CUDA function that launches or waits, with the innermost range from which it was called.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CalledFunctionAndRange {
    /// Name of the called function, without its version.
    pub function_name: String,
    /// Path, without numbers in names, of the innermost range around the calls; `None` outside all
    /// ranges.
    pub innermost_range_path: Option<String>,
}

/// Summed times of one trace, by which it is compared with another trace.
#[derive(Debug, Clone)]
pub struct SummedTimesOfTrace {
    pub recorder_program: String,
    /// Machine, recorder and recording options of the trace.
    pub machine_and_recorder: MachineAndRecorderOfTrace,
    /// Time from the first to the last operation, summed over all processes and GPUs; for Nsight
    /// Compute, the sum of all profiled launches. Nanoseconds.
    pub summed_whole_time_ns: i64,
    /// Time in which at least one operation ran, nanoseconds, summed over all processes and GPUs.
    pub summed_gpu_busy_ns: i64,
    /// Processes on devices.
    pub process_gpu_pair_count: usize,
    /// The whole time divided by operation name and by cause of idle time.
    pub sums_by_part: BTreeMap<TracePartKey, TracePartCountAndTimes>,
    /// The whole time divided by the range path in which operations were launched; the key ""
    /// stands for outside all ranges.
    pub times_by_range_path: BTreeMap<String, RangePathTimes>,
    /// Number and time of the host's calls of each CUDA function from each range.
    pub sums_by_called_function: BTreeMap<CalledFunctionAndRange, FunctionCallSum>,
    /// Findings of the trace's diagnosis, each with rule id and title.
    pub finding_ids_and_titles: Vec<(&'static str, String)>,
}

/// Names of the Nsight Compute metrics by which two traces' kernels are compared.
const COMPARED_NCU_METRICS: &[&str] = &[
    "Registers Per Thread",
    "Local Memory Spilling Requests",
    "Theoretical Occupancy",
    "Achieved Occupancy",
    "Compute (SM) Throughput",
    "Memory Throughput",
    "DRAM Throughput",
    "L1/TEX Hit Rate",
    "L2 Hit Rate",
    "Executed Instructions",
];

impl SummedTimesOfTrace {
    /// Sums the times of a trace that is completely in memory.
    pub fn sum_times_of_loaded_trace(trace: &Trace) -> Self {
        Self::sum_from_diagnosis_context(&DiagnosisContext::join_trace_in_memory(
            trace,
            !trace.declared_work.is_empty(),
        ))
    }

    /// Sums an Nsight Systems export of any length; its ranges and calls are read without being
    /// kept in memory. Returns `None` if the file is not an export or report of Nsight Systems.
    pub fn sum_export_while_reading(path: &Path) -> Result<Option<SummedTimesOfTrace>, TraceError> {
        with_context_of_streamed_export(path, Self::sum_from_diagnosis_context)
    }

    fn sum_from_diagnosis_context(context: &DiagnosisContext<'_>) -> SummedTimesOfTrace {
        let trace = context.trace;
        let TraceDiagnosis {
            recorder_and_version: recorder,
            data_quality_findings: quality,
            findings,
            ..
        } = rules::apply_all_rules_to_trace(context);
        let findings = quality.into_iter().chain(findings);
        let mut sums = Self {
            machine_and_recorder: MachineAndRecorderOfTrace::read_setup_of_trace(trace, &recorder),
            recorder_program: recorder,
            summed_whole_time_ns: context
                .activities
                .iter()
                .map(idle_time::ProcessActivityOnGpu::first_start_to_last_end_ns)
                .sum(),
            summed_gpu_busy_ns: context
                .activities
                .iter()
                .map(|activity| activity.gpu_busy_ns)
                .sum(),
            process_gpu_pair_count: context.activities.len(),
            sums_by_part: BTreeMap::new(),
            times_by_range_path: BTreeMap::new(),
            sums_by_called_function: BTreeMap::new(),
            finding_ids_and_titles: findings
                .map(|finding| (finding.rule_id, finding.finding_title))
                .collect(),
        };
        if context.operations.is_empty() {
            sums.add_launches_of_nsight_compute(trace);
        }
        let mut places = TimesByRangePath::empty_sums_of_all_paths(context);
        sums.add_times_of_operations(context, &mut places);
        sums.add_idle_times_by_cause(context, &mut places);
        sums.add_times_of_host_calls(context, &places);
        sums.times_by_range_path = places.range_path_texts.into_iter().zip(places.sums).collect();
        sums
    }

    fn add_times_of_operations(
        &mut self,
        context: &DiagnosisContext<'_>,
        places: &mut TimesByRangePath,
    ) {
        let own = idle_time::exclusive_busy_ns_of_operations(context.trace);
        let mut parts: HashMap<OperationNameKey, TracePartCountAndTimes> = HashMap::new();
        for id in context.operations.all_operation_ids() {
            let total_ns = context.operations.operation_length_ns(id);
            let own_ns = own.at(id as usize);
            let part =
                parts.entry(OperationNameKey::name_key_of_operation(context, id)).or_default();
            part.add_one_operation(total_ns, own_ns);
            if let (GpuOperationKind::Kernel, row) = context.operations.kind_and_table_row(id)
                && let Some(shape) = context.trace.kernels.launch_shape_index.decoded_row(row)
            {
                *part.launches_by_shape.entry(context.trace.shapes[shape as usize]).or_default() +=
                    1;
            }
            places
                .times_of_operation_path(context, id)
                .launched_operations
                .add_one_operation(total_ns, own_ns);
        }
        for (key, amount) in parts {
            // Several functions may have the same kernel name, so their sums are added.
            let sum = self
                .sums_by_part
                .entry(key.operation_key_for_comparison(context.trace))
                .or_default();
            sum.operation_count += amount.operation_count;
            sum.total_operation_ns += amount.total_operation_ns;
            sum.exclusive_ns += amount.exclusive_ns;
            for (shape, count) in amount.launches_by_shape {
                *sum.launches_by_shape.entry(shape).or_default() += count;
            }
        }
    }

    fn add_idle_times_by_cause(
        &mut self,
        context: &DiagnosisContext<'_>,
        places: &mut TimesByRangePath,
    ) {
        let mut causes: HashMap<IdleCauseAndBlamedName, TracePartCountAndTimes> = HashMap::new();
        let gaps =
            context.activities.iter().flat_map(|activity| activity.gaps.iter(&context.operations));
        for gap in gaps {
            for (why, ns) in context.causes_and_ns_of_idle_gap(&gap) {
                causes.entry(why).or_default().add_one_operation(ns, ns);
            }
            places
                .times_of_operation_path(context, gap.operation_after_gap)
                .launched_operations
                .exclusive_ns += gap.idle_gap_length_ns();
        }
        for ((kind, name), amount) in causes {
            let function = context.text_of_blamed_function_or_range((kind, name));
            let function = function.map_or(String::new(), |function| format!(": {function}"));
            let part = match kind {
                IdleCauseKind::NoLaunchCallRecorded | IdleCauseKind::HostAndGpuClocksDisagree => {
                    TracePartKind::UnexplainedIdleTime
                }
                _ => TracePartKind::IdleTimeOfKnownCause,
            };
            let name = format!("{}{function}", kind.printed_idle_cause());
            // Versions of one CUDA function, such as `cudaMalloc_v3020`, have the same name here,
            // so their idle times are added.
            let sum =
                self.sums_by_part.entry(TracePartKey { kind: part, part_name: name }).or_default();
            sum.operation_count += amount.operation_count;
            sum.total_operation_ns += amount.total_operation_ns;
            sum.exclusive_ns += amount.exclusive_ns;
        }
    }

    fn add_times_of_host_calls(
        &mut self,
        context: &DiagnosisContext<'_>,
        places: &TimesByRangePath,
    ) {
        for (&(name, path), sum) in &context.host_summary.call_sums_by_function {
            let function = context.function_name_without_version(name).to_owned();
            let place = path.map(|path| places.sums_index_of_range_path[path as usize]);
            let range = place.map(|place| places.range_path_texts[place as usize].clone());
            // Versions of one CUDA function, such as `cudaMalloc_v3020`, have the same name here,
            // so their calls are added.
            self.sums_by_called_function
                .entry(CalledFunctionAndRange {
                    function_name: function,
                    innermost_range_path: range,
                })
                .or_default()
                .add_other_calls(*sum);
        }
    }

    /// Launches that Nsight Compute profiled one by one have no timeline, so the sum of their
    /// durations is the whole time.
    fn add_launches_of_nsight_compute(&mut self, trace: &Trace) {
        for launch in &trace.profiled_launches {
            let name = trace.names.text_of_name(launch.kernel_name).to_owned();
            let part = self
                .sums_by_part
                .entry(TracePartKey { kind: TracePartKind::Kernel, part_name: name })
                .or_default();
            let ns = ncu_launch_duration_ns(trace, launch).unwrap_or(0);
            part.add_one_operation(ns, ns);
            *part.launches_by_shape.entry(launch.shape).or_default() += 1;
            for name in COMPARED_NCU_METRICS {
                if let Some(value) = ncu_metric_of_launch(trace, launch, name) {
                    *part.ncu_metric_sums.entry(name).or_default() += value;
                }
            }
            self.summed_whole_time_ns += ns;
            self.summed_gpu_busy_ns += ns;
        }
    }
}

/// Key that is equal for operations of one name within one trace.
#[derive(PartialEq, Eq, Hash)]
enum OperationNameKey {
    KernelNameId(u32),
    CopyLabelAndMemoryKinds(u32, CopiedMemoryKind, CopiedMemoryKind),
    AnyMemset,
    AnyCudaGraph,
}

impl OperationNameKey {
    fn name_key_of_operation(context: &DiagnosisContext<'_>, id: GpuOperationId) -> Self {
        let trace = context.trace;
        match context.operations.kind_and_table_row(id) {
            (GpuOperationKind::Kernel, row) => Self::KernelNameId(
                trace.functions[trace.kernels.function_index.at(row) as usize].demangled_name.0,
            ),
            (GpuOperationKind::Copy, row) => {
                let copies = &trace.copies;
                Self::CopyLabelAndMemoryKinds(
                    copies.direction_label[row].0,
                    copies.source_memory[row],
                    copies.target_memory[row],
                )
            }
            (GpuOperationKind::Memset, _) => Self::AnyMemset,
            // Ids of executable graphs are valid in one process only, so all graphs share one key.
            (GpuOperationKind::CudaGraphLaunch, _) => Self::AnyCudaGraph,
        }
    }

    fn operation_key_for_comparison(&self, trace: &Trace) -> TracePartKey {
        let text = |name: u32| {
            trace.names.text_of_name(crate::model::interned_names::InternedNameId(name))
        };
        let (kind, name) = match self {
            Self::KernelNameId(name) => (TracePartKind::Kernel, text(*name).to_owned()),
            Self::CopyLabelAndMemoryKinds(kind, from, to) => {
                let unknown = [from, to].contains(&&CopiedMemoryKind::Unknown);
                let memory =
                    format!(" ({} to {})", from.memory_kind_label(), to.memory_kind_label());
                let memory = if unknown { String::new() } else { memory };
                (TracePartKind::Copy, format!("{}{memory}", printed_memcpy_name(text(*kind))))
            }
            Self::AnyMemset => (TracePartKind::Memset, PRINTED_MEMSET_NAME.to_owned()),
            Self::AnyCudaGraph => (TracePartKind::CudaGraphLaunch, "[CUDA graph]".to_owned()),
        };
        TracePartKey { kind, part_name: name }
    }
}

/// Sums of times by range path, where numbers in names are ignored.
struct TimesByRangePath {
    /// For each range path, the index of its sums; index 0 stands for outside all ranges.
    sums_index_of_range_path: Vec<u32>,
    range_path_texts: Vec<String>,
    sums: Vec<RangePathTimes>,
}

impl TimesByRangePath {
    /// Creates empty sums for every range path of the trace.
    fn empty_sums_of_all_paths(context: &DiagnosisContext<'_>) -> Self {
        let (trace, paths) = (context.trace, &context.host_summary.paths);
        let mut places = Self {
            sums_index_of_range_path: Vec::with_capacity(paths.len()),
            range_path_texts: Vec::new(),
            sums: Vec::new(),
        };
        let mut known: HashMap<String, u32> = HashMap::new();
        for path in 0..RangePathId::try_from(paths.len()).unwrap_or(RangePathId::MAX) {
            let text = replace_digits_by_number_sign(&paths.path_text_with_slashes(trace, path));
            let new = u32::try_from(known.len()).expect("fewer than 2^32 paths");
            places.sums_index_of_range_path.push(*known.entry(text).or_insert(new));
        }
        places.sums.resize(known.len(), RangePathTimes::default());
        places.range_path_texts.resize(known.len(), String::new());
        for (text, place) in known {
            places.range_path_texts[place as usize] = text;
        }
        for (&place, sum) in
            places.sums_index_of_range_path.iter().zip(&context.host_summary.count_and_time_of_path)
        {
            let place = &mut places.sums[place as usize];
            place.range_count += sum.range_count;
            place.host_range_ns += sum.total_host_ns;
        }
        places
    }

    /// Returns the sums of the range path in which an operation was launched.
    fn times_of_operation_path(
        &mut self,
        context: &DiagnosisContext<'_>,
        id: GpuOperationId,
    ) -> &mut RangePathTimes {
        let path = context.host_summary.range_path_of_launch.at(id as usize);
        &mut self.sums[self.sums_index_of_range_path[path as usize] as usize]
    }
}
