//! Computes which share of a GPU's peak FLOP rate and memory bandwidth the traced operators and
//! ranges reach, from kernel times and from each operator's known FLOPs and bytes. This module also
//! formats the utilization section of a diagnosis, as text and as JSON.

use std::fmt::Write as _;
use std::hash::Hash;

use hashbrown::{HashMap, HashSet};
use serde_json::{Value, json};

use super::answers::kernel_count_and_ns_by_range_path;
use super::labels::shortened_kernel_name_for_readers;
use super::text::{append_wrapped_line, format_nanoseconds, percent_of_whole};
use super::trace_facts::DiagnosisContext;
use crate::analyze::launches::NO_LAUNCH_CALL;
use crate::analyze::operations::GpuOperationId;
use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId};
use crate::analyze::work::device_peaks::{GpuPeakThroughput, MatrixPrecision};
use crate::analyze::work::operator_work::{self, OperatorFlopsAndBytes};
use crate::analyze::work::utilization::{
    GpuPeakUseOfTrace, OperatorWorkAndKernelTime, RangeWorkAndKernelTime, SummedWorkAndKernelTime,
};
use crate::model::Trace;
use crate::model::gpu::DeclaredOperationsAndBytes;
use crate::model::interned_names::InternedNameId;
use crate::stats::{shorten_in_the_middle, with_thousands_separators};

/// Maximum number of operators, and of ranges, that the utilization section lists.
const MAX_LISTED_OPERATORS_OR_RANGES: usize = 10;
/// The utilization section lists only ranges on the two outermost nesting levels.
const MAX_LISTED_RANGE_DEPTH: usize = 2;
/// If an operator's FLOPs per kernel time exceed this multiple of the device's tensor-core peak,
/// the trace recorded wrong input shapes, and the operator is excluded. Boost clocks and Winograd
/// convolutions can exceed the data sheet's tensor-core peak, but never by this multiple.
const MAX_PLAUSIBLE_SHARE_OF_TENSOR_PEAK: f64 = 3.0;

/// Calls of one framework operator, with their work and kernel time.
struct OperatorCallsWithWork<'a> {
    operator_name: &'a str,
    /// Number of calls of this operator.
    calls: usize,
    work: OperatorFlopsAndBytes,
    /// Summed duration of all kernels that these operator calls launched, in nanoseconds.
    total_kernel_ns: i64,
    path: RangePathId,
    device: u32,
}

impl OperatorCallsWithWork<'_> {
    /// Adds a kernel that these operator calls launched: its duration, and TF32 if its name shows
    /// that precision.
    fn add_kernel(&mut self, context: &DiagnosisContext<'_>, id: GpuOperationId) {
        self.total_kernel_ns += context.operations.operation_length_ns(id);
        let kernel = context.trace.demangled_kernel_name(id as usize);
        self.work.precision = precision_with_tf32_from_kernel_name(self.work.precision, kernel);
    }

    fn is_below_plausible_share_of_tensor_peak(&self, peaks: Option<&GpuPeakThroughput>) -> bool {
        let mut sum = SummedWorkAndKernelTime::default();
        self.add_work_and_kernel_time_to_sum(&mut sum, peaks);
        sum.matrix_peak_share_of_kernel_time()
            .is_none_or(|share| share <= MAX_PLAUSIBLE_SHARE_OF_TENSOR_PEAK)
    }

    fn add_work_and_kernel_time_to_sum(
        &self,
        sum: &mut SummedWorkAndKernelTime,
        peaks: Option<&GpuPeakThroughput>,
    ) {
        sum.add_equal_operator_calls(self.calls, &self.work, self.total_kernel_ns, peaks);
    }
}

/// Operator calls whose FLOPs and bytes are known.
struct OperatorCallsWithKnownWork<'a> {
    /// Operator calls that the utilization section lists by operator name.
    operators: Vec<OperatorCallsWithWork<'a>>,
    /// Operator calls to sum for ranges and for the whole trace; `None`: sum the calls in
    /// `operators`.
    calls_to_sum: Option<Vec<OperatorCallsWithWork<'a>>>,
}

/// Computes which share of the GPUs' peak FLOP rate and memory bandwidth the trace's kernels reach.
pub(super) fn utilization_of_trace(context: &DiagnosisContext<'_>) -> GpuPeakUseOfTrace {
    let trace = context.trace;
    let mut found = GpuPeakUseOfTrace {
        all_kernels_ns: trace.kernels.on_gpu.sum_of_operation_durations_ns(),
        ..GpuPeakUseOfTrace::default()
    };
    let OperatorCallsWithKnownWork { operators: calls, calls_to_sum: whole } =
        operator_calls_with_known_work(context);
    if calls.is_empty() {
        found.unanswered_questions.push(
            "FLOPs and bytes: the trace has no shapes of operators; record with PyTorch's profiler \
             and record_shapes=True, or put m, n and k into the names of matrix products \
             (gemm_m4096_n512_k1024_bf16)"
                .to_owned(),
        );
        return found;
    }
    let peaks = peak_rates_by_device(trace, &calls, &mut found);
    let peaks_of =
        |call: &OperatorCallsWithWork<'_>| peaks.get(&call.device).and_then(Option::as_ref);
    let (possible, impossible): (Vec<&OperatorCallsWithWork<'_>>, Vec<&OperatorCallsWithWork<'_>>) =
        calls.iter().partition(|call| call.is_below_plausible_share_of_tensor_peak(peaks_of(call)));
    let mut operators: HashMap<(&str, Option<MatrixPrecision>), SummedWorkAndKernelTime> =
        HashMap::new();
    for call in &possible {
        let sum = operators.entry((call.operator_name, call.work.precision)).or_default();
        call.add_work_and_kernel_time_to_sum(sum, peaks_of(call));
    }
    let mut ranges: HashMap<RangePathId, SummedWorkAndKernelTime> = HashMap::new();
    let whole = whole.as_ref().map(|calls| calls.iter().collect()).unwrap_or(possible);
    for call in whole {
        call.add_work_and_kernel_time_to_sum(&mut found.all_operators, peaks_of(call));
        for path in context.host_summary.paths.path_and_enclosing_paths(call.path) {
            call.add_work_and_kernel_time_to_sum(ranges.entry(path).or_default(), peaks_of(call));
        }
    }
    if let Some(first) = impossible.first() {
        found.unanswered_questions.push(format!(
            "the work of {} operators, such as {}: their recorded shapes need more than {MAX_PLAUSIBLE_SHARE_OF_TENSOR_PEAK} \
             times the tensor peak",
            impossible.len(),
            first.operator_name
        ));
    }
    found.operators = operators
        .into_iter()
        .map(|((name, precision), sum)| OperatorWorkAndKernelTime {
            operator_name: name.to_owned(),
            precision,
            work_and_kernel_time: sum,
        })
        .collect();
    found.operators.sort_by(|a, b| {
        b.work_and_kernel_time
            .kernel_ns
            .cmp(&a.work_and_kernel_time.kernel_ns)
            .then_with(|| a.operator_name.cmp(&b.operator_name))
    });
    found.operators.truncate(MAX_LISTED_OPERATORS_OR_RANGES);
    found.ranges = utilization_of_outer_two_range_levels(context, ranges);
    found
}

/// Finds operators with known FLOPs and bytes, together with the durations of the kernels that they
/// launched.
fn operator_calls_with_known_work<'a>(
    context: &DiagnosisContext<'a>,
) -> OperatorCallsWithKnownWork<'a> {
    let trace = context.trace;
    if trace
        .declared_work
        .iter()
        .any(|declared| declared.work != DeclaredOperationsAndBytes::default())
    {
        let whole = declared_work_of_whole_cases(context);
        let parts = declared_work_of_problem_parts(context);
        return match parts.is_empty() {
            true => OperatorCallsWithKnownWork { operators: whole, calls_to_sum: None },
            false => OperatorCallsWithKnownWork { operators: parts, calls_to_sum: Some(whole) },
        };
    }
    let operators = match context.host_summary.kept_ranges.range_and_call_of_operation.is_empty() {
        true => {
            let mut named = gemm_calls_from_range_names(context);
            named.extend(gemm_calls_from_kernel_names(context, &named));
            named
        }
        false => operator_calls_from_input_shapes(context),
    };
    OperatorCallsWithKnownWork { operators, calls_to_sum: None }
}

/// Returns one entry per declared case: FLOPs and bytes of all launches of the case, and the case's
/// kernel time.
fn declared_work_of_whole_cases<'a>(
    context: &DiagnosisContext<'a>,
) -> Vec<OperatorCallsWithWork<'a>> {
    let declared = context.trace.declared_work.iter().filter_map(|of| {
        let whole = DeclaredWorkOnRangePaths {
            case_or_part_name: &of.range_path,
            launch_count: launch_count_of_traced_case(context),
            work: operator_work::work_of_declared_operations(&of.work)?,
        };
        whole.join_kernels_on_matching_paths(context, |path| path == of.range_path)
    });
    declared.collect()
}

/// Returns the declared FLOPs and bytes of each part of a benchmark case, whose NVTX ranges may
/// have been open while a CUDA graph was captured.
fn declared_work_of_problem_parts<'a>(
    context: &DiagnosisContext<'a>,
) -> Vec<OperatorCallsWithWork<'a>> {
    let declared = context.trace.declared_parts.iter().filter_map(|of| {
        let part = DeclaredWorkOnRangePaths {
            case_or_part_name: &of.part_name,
            launch_count: launch_count_of_traced_case(context),
            work: operator_work::work_of_declared_operations(&of.work)?,
        };
        part.join_kernels_on_matching_paths(context, |path| {
            let before = path.strip_suffix(of.range_path_suffix.as_str());
            before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
        })
    });
    declared.collect()
}

/// Number of times that the traced benchmark case was launched.
fn launch_count_of_traced_case(context: &DiagnosisContext<'_>) -> usize {
    let Some(work) = context.trace.declared_work.first() else { return 0 };
    let paths = &context.host_summary.paths;
    let own = |path: &RangePathId| {
        *path != ROOT_RANGE_PATH
            && paths.path_text_with_slashes(context.trace, *path) == work.range_path
    };
    let step = (0..).take(paths.len()).find(own);
    step.map_or(0, |step| context.host_summary.count_and_time_of_path[step as usize].range_count)
}

/// FLOPs and bytes that a benchmark case declares for all kernels on some range paths.
struct DeclaredWorkOnRangePaths<'a> {
    case_or_part_name: &'a str,
    launch_count: usize,
    work: OperatorFlopsAndBytes,
}

impl<'a> DeclaredWorkOnRangePaths<'a> {
    /// Joins the declared work with the summed time of the kernels on the matching range paths;
    /// `None` if no kernel ran on them.
    fn join_kernels_on_matching_paths(
        self,
        context: &DiagnosisContext<'_>,
        is: impl Fn(&str) -> bool,
    ) -> Option<OperatorCallsWithWork<'a>> {
        let (trace, paths) = (context.trace, &context.host_summary.paths);
        // The loop meets parents first, because the index of a range path is larger than the index
        // of its parent path.
        let mut inside: Vec<Option<RangePathId>> = vec![None; paths.len()];
        for path in (1..).take(paths.len() - 1) {
            let around = inside[paths.parent_of_range_path(path) as usize];
            inside[path as usize] =
                around.or_else(|| is(&paths.path_text_with_slashes(trace, path)).then_some(path));
        }
        let Self { case_or_part_name: name, launch_count: times, work } = self;
        let mut found: Option<OperatorCallsWithWork<'a>> = None;
        for id in context.operations.kernel_ids() {
            let Some(path) = inside[context.range_path_of_operation(id) as usize] else { continue };
            let (_, device) = context.process_id_and_gpu_of_operation(id);
            let call = found.get_or_insert(OperatorCallsWithWork {
                operator_name: name,
                calls: times,
                work,
                total_kernel_ns: 0,
                path,
                device,
            });
            call.add_kernel(context, id);
        }
        found
    }
}

/// Finds matrix products in ranges whose names contain m, n and k: each such range counts as one
/// matrix product.
fn gemm_calls_from_range_names<'a>(
    context: &DiagnosisContext<'a>,
) -> Vec<OperatorCallsWithWork<'a>> {
    let (trace, paths) = (context.trace, &context.host_summary.paths);
    // For each range path, the innermost enclosing range path (or itself) whose name contains the
    // sizes of a matrix product.
    let mut sized: Vec<Option<(RangePathId, OperatorFlopsAndBytes)>> = vec![None; paths.len()];
    for path in (1..).take(paths.len() - 1) {
        let name = trace.names.text_of_name(paths.last_name_of_path(path));
        let own = operator_work::work_of_gemm_with_sizes_in_name(name).map(|work| (path, work));
        sized[path as usize] = own.or(sized[paths.parent_of_range_path(path) as usize]);
    }
    let mut calls: HashMap<(RangePathId, u32), OperatorCallsWithWork<'a>> = HashMap::new();
    for id in context.operations.kernel_ids() {
        let Some((path, work)) = sized[context.range_path_of_operation(id) as usize] else {
            continue;
        };
        let (_, device) = context.process_id_and_gpu_of_operation(id);
        let call = calls.entry((path, device)).or_insert_with(|| OperatorCallsWithWork {
            operator_name: trace.names.text_of_name(paths.last_name_of_path(path)),
            calls: context.host_summary.count_and_time_of_path[path as usize].range_count,
            work,
            total_kernel_ns: 0,
            path,
            device,
        });
        call.add_kernel(context, id);
    }
    let around = |(path, device)| {
        let parent = paths.parent_of_range_path(path);
        (parent != ROOT_RANGE_PATH).then_some((parent, device))
    };
    drop_calls_of_enclosing_ranges(calls, around).collect()
}

/// Finds matrix products by sizes in kernel names, for kernels outside all ranges whose names
/// contain sizes.
fn gemm_calls_from_kernel_names<'a>(
    context: &DiagnosisContext<'a>,
    ranges: &[OperatorCallsWithWork<'_>],
) -> Vec<OperatorCallsWithWork<'a>> {
    let trace = context.trace;
    let works: Vec<Option<OperatorFlopsAndBytes>> = trace
        .functions
        .iter()
        .map(|of| {
            operator_work::work_of_gemm_with_sizes_in_name(
                trace.names.text_of_name(of.demangled_name),
            )
        })
        .collect();
    if works.iter().all(Option::is_none) {
        return Vec::new();
    }
    let paths = &context.host_summary.paths;
    let in_range = |id: u32| {
        let mut around = paths.path_and_enclosing_paths(context.range_path_of_operation(id));
        around.any(|path| ranges.iter().any(|range| range.path == path))
    };
    let call = |id: u32| {
        let work = works[trace.kernels.function_index.at(id as usize) as usize]?;
        let (_, device) = context.process_id_and_gpu_of_operation(id);
        let (name, kernel_ns) =
            (trace.demangled_kernel_name(id as usize), context.operations.operation_length_ns(id));
        let path = context.range_path_of_operation(id);
        (!in_range(id)).then_some(OperatorCallsWithWork {
            operator_name: name,
            calls: 1,
            work,
            total_kernel_ns: kernel_ns,
            path,
            device,
        })
    };
    context.operations.kernel_ids().filter_map(call).collect()
}

/// Computes the work of each operator from its recorded input shapes; the trace must have kept its
/// single ranges.
fn operator_calls_from_input_shapes<'a>(
    context: &DiagnosisContext<'a>,
) -> Vec<OperatorCallsWithWork<'a>> {
    let trace = context.trace;
    let kept = &context.host_summary.kept_ranges;
    // For each range, the innermost range with known FLOPs and bytes: the range itself, or one that
    // encloses the range.
    let mut with_work: HashMap<u32, Option<u32>> = HashMap::new();
    let mut works: HashMap<(u32, InternedNameId), Option<OperatorFlopsAndBytes>> = HashMap::new();
    let mut by_range: HashMap<u32, OperatorCallsWithWork<'a>> = HashMap::new();
    let mut calls = Vec::new();
    let mut by_name: HashMap<u32, Option<OperatorFlopsAndBytes>> = HashMap::new();
    for id in context.operations.kernel_ids() {
        let (row, kernel_ns) = (id as usize, context.operations.operation_length_ns(id));
        let path = context.range_path_of_operation(id);
        let (_, device) = context.process_id_and_gpu_of_operation(id);
        let kernel = trace.functions[trace.kernels.function_index.at(row) as usize].demangled_name;
        let mut work_of = |number: u32| {
            let range = kept.ranges[number as usize];
            let name = context.host_summary.paths.last_name_of_path(range.path);
            *works.entry((range.operator_inputs_number, name)).or_insert_with(|| {
                let inputs = range
                    .operator_inputs_number
                    .checked_sub(1)
                    .and_then(|at| trace.operator_inputs.get(at as usize));
                let text = trace.names.text_of_name(name);
                match inputs {
                    Some(inputs) => {
                        operator_work::work_of_operator_call(text, inputs, &trace.names)
                    }
                    None => operator_work::work_of_gemm_with_sizes_in_name(text),
                }
            })
        };
        let innermost =
            kept.range_and_call_of_operation.get(row).map_or(NO_LAUNCH_CALL, |(range, _)| *range);
        let range = match with_work.get(&innermost) {
            Some(known) => *known,
            None => {
                let mut at = innermost;
                while at != NO_LAUNCH_CALL && work_of(at).is_none() {
                    at = kept.ranges[at as usize].enclosing_range_number;
                }
                let range = (at != NO_LAUNCH_CALL).then_some(at);
                with_work.insert(innermost, range);
                range
            }
        };
        let single_call = |operator_name, work, total_kernel_ns| OperatorCallsWithWork {
            operator_name,
            calls: 1,
            work,
            total_kernel_ns,
            path,
            device,
        };
        if let Some(number) = range {
            let work = work_of(number);
            let name =
                context.host_summary.paths.last_name_of_path(kept.ranges[number as usize].path);
            if let Some(work) = work {
                let name = trace.names.text_of_name(name);
                let call = by_range.entry(number).or_insert_with(|| single_call(name, work, 0));
                call.total_kernel_ns += kernel_ns;
                call.work.precision = precision_with_tf32_from_kernel_name(
                    call.work.precision,
                    trace.names.text_of_name(kernel),
                );
            }
            continue;
        }
        let work = by_name.entry(kernel.0).or_insert_with(|| {
            operator_work::work_of_gemm_with_sizes_in_name(trace.names.text_of_name(kernel))
        });
        if let Some(work) = *work {
            let name = trace.names.text_of_name(kernel);
            calls.push(single_call(name, work, kernel_ns));
        }
    }
    let around = |number: u32| {
        Some(kept.ranges[number as usize].enclosing_range_number).filter(|&at| at != NO_LAUNCH_CALL)
    };
    calls.extend(drop_calls_of_enclosing_ranges(by_range, around));
    calls
}

/// Drops the calls of an enclosing range if a nested range already counts the same work. For
/// example, `aten::matmul` encloses `aten::mm` and may launch one more kernel; only `aten::mm` is
/// counted.
fn drop_calls_of_enclosing_ranges<'a, K: Copy + Eq + Hash>(
    mut calls: HashMap<K, OperatorCallsWithWork<'a>>,
    around: impl Fn(K) -> Option<K>,
) -> impl Iterator<Item = OperatorCallsWithWork<'a>> {
    let multiplies = |call: &OperatorCallsWithWork<'_>| call.work.matrix_flops > 0.0;
    let mut counted: HashSet<K> = HashSet::new();
    for (&inner, call) in &calls {
        let outer = std::iter::successors(around(inner), |&range| around(range));
        let same =
            |range: &K| calls.get(range).is_some_and(|it| multiplies(it) == multiplies(call));
        counted.extend(outer.filter(same));
    }
    calls.retain(|range, _| !counted.contains(range));
    calls.into_values()
}

/// Returns TF32 for FP32 factors if the kernel's name shows that the kernel rounds them to TF32.
fn precision_with_tf32_from_kernel_name(
    precision: Option<MatrixPrecision>,
    kernel: &str,
) -> Option<MatrixPrecision> {
    let rounds = || {
        let kernel = kernel.to_ascii_lowercase();
        ["tf32", "s1688", "xf32"].iter().any(|word| kernel.contains(word))
    };
    match precision {
        Some(MatrixPrecision::Fp32) if rounds() => Some(MatrixPrecision::Tf32),
        precision => precision,
    }
}

/// Finds the peak rates of each device, and adds a note to `found.unknown` for each device without
/// known peaks.
fn peak_rates_by_device(
    trace: &Trace,
    calls: &[OperatorCallsWithWork<'_>],
    found: &mut GpuPeakUseOfTrace,
) -> HashMap<u32, Option<GpuPeakThroughput>> {
    let mut peaks = HashMap::new();
    for call in calls {
        peaks.entry(call.device).or_insert_with(|| {
            let device = trace.devices.iter().find(|device| device.device_ordinal == call.device);
            let name = device.map(|device| device.device_name.as_str()).unwrap_or_default();
            let peaks = GpuPeakThroughput::peak_throughput_of_gpu_name(name);
            match peaks {
                Some(peaks) => found.gpu_name_and_peaks = Some((name.to_owned(), peaks)),
                None if name.is_empty() => found.unanswered_questions.push(format!(
                    "shares of the peak: the trace does not name device {}",
                    call.device
                )),
                None => found
                    .unanswered_questions
                    .push(format!("shares of the peak: the peaks of {name} are not in the table")),
            }
            peaks
        });
    }
    let without = |call: &&OperatorCallsWithWork<'_>| {
        let peaks = peaks.get(&call.device).copied().flatten();
        let peak = |precision| peaks.and_then(|peaks| peaks.peak_operations_per_ns(precision));
        call.work.matrix_flops > 0.0
            && peaks.is_some()
            && call.work.precision.and_then(peak).is_none()
    };
    if let Some(call) = calls.iter().find(without) {
        let precision = call
            .work
            .precision
            .map_or("unknown precision", MatrixPrecision::printed_precision_label);
        let name = call.operator_name;
        found
            .unanswered_questions
            .push(format!("shares of the peak of {name}: {precision} has no peak here"));
    }
    peaks
}

/// Selects the ranges that are outermost, or directly inside an outermost range.
fn utilization_of_outer_two_range_levels(
    context: &DiagnosisContext<'_>,
    sums: HashMap<RangePathId, SummedWorkAndKernelTime>,
) -> Vec<RangeWorkAndKernelTime> {
    let paths = &context.host_summary.paths;
    let kernels = kernel_count_and_ns_by_range_path(context);
    let kernel_ns = |path: RangePathId| kernels[path as usize].1;
    let depth = |path: RangePathId| paths.path_and_enclosing_paths(path).count();
    let mut order: Vec<RangePathId> =
        sums.keys().copied().filter(|&path| depth(path) <= MAX_LISTED_RANGE_DEPTH).collect();
    order.sort_by_key(|&path| (std::cmp::Reverse(kernel_ns(path)), path));
    order.truncate(MAX_LISTED_OPERATORS_OR_RANGES);
    order
        .into_iter()
        .map(|path| RangeWorkAndKernelTime {
            range_path: paths.path_text_with_slashes(context.trace, path),
            kernel_ns: kernel_ns(path),
            host_range_ns: context.host_summary.count_and_time_of_path[path as usize].total_host_ns,
            work_and_kernel_time: sums[&path],
        })
        .collect()
}

impl RangeWorkAndKernelTime {
    /// Describes the share of the peaks that a range reaches, or its absolute FLOP rate if the
    /// device is unknown; `None` if neither is known.
    fn reached_peaks_or_rate_text(&self) -> Option<String> {
        let sum = &self.work_and_kernel_time;
        if let Some(tensor) = sum.matrix_peak_share_of_span(self.kernel_ns) {
            // The host time of a range that only launches kernels can end before its kernels end on
            // the GPU.
            let host = match self.host_range_ns >= self.kernel_ns {
                true => {
                    format!(
                        ", {} over its host time",
                        peak_share_as_percent_text(
                            sum.matrix_peak_share_of_span(self.host_range_ns)
                        )
                    )
                }
                false => String::new(),
            };
            return Some(format!(
                "{} of the tensor peak over its kernels{host}",
                peak_share_as_percent_text(Some(tensor))
            ));
        }
        let memory = sum
            .memory_peak_share_of_kernel_time()
            .map(|of| format!("{} of the memory peak", peak_share_as_percent_text(Some(of))));
        let rate = || {
            let rate = sum.achieved_tera_flops_per_second().filter(|rate| *rate >= 0.1)?;
            Some(format!("{rate:.1} TFLOP/s over its kernels"))
        };
        memory.or_else(rate)
    }
}

fn peak_share_as_percent_text(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

impl GpuPeakUseOfTrace {
    /// Appends the utilization section to the text; appends nothing if no operator's work is known
    /// and no device is named.
    pub(super) fn append_utilization_section(&self, text: &mut String) {
        if self.operators.is_empty() {
            return;
        }
        let device = self.gpu_name_and_peaks.as_ref().map_or("unknown device", |(name, _)| name);
        let _ = writeln!(text, "\nUtilization of {device} (work by shapes, names or declarations)");
        let line = format!(
            "work is known of {:.1} % of the kernel time: {} of the tensor peak, {} of what the \
             roofline allows",
            percent_of_whole(self.all_operators.kernel_ns, self.all_kernels_ns),
            peak_share_as_percent_text(self.all_operators.matrix_peak_share_of_kernel_time()),
            peak_share_as_percent_text(self.all_operators.roofline_share_of_kernel_time())
        );
        append_wrapped_line(text, &line, "  ", "    ");
        let _ = writeln!(
            text,
            "  {:<31}{:>10}{:>12}{:>9}{:>9}{:>9}{:>9}  limit",
            "operator", "times", "kernels", "TFLOP/s", "FLOP/B", "of peak", "roofline"
        );
        for operator in &self.operators {
            let sum = &operator.work_and_kernel_time;
            let number =
                |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
            let precision = operator.precision.filter(|_| sum.summed_matrix_flops > 0.0);
            let precision =
                precision.map_or(String::new(), |of| format!(" {}", of.printed_precision_label()));
            let name = shorten_in_the_middle(
                &format!(
                    "{}{precision}",
                    shortened_kernel_name_for_readers(&operator.operator_name)
                ),
                30,
            );
            let _ = writeln!(
                text,
                "  {name:<31}{:>10}{:>12}{:>9}{:>9}{:>9}{:>9}  {}",
                with_thousands_separators(sum.operator_call_count),
                format_nanoseconds(sum.kernel_ns),
                number(sum.achieved_tera_flops_per_second()),
                number(sum.flops_per_byte_moved()),
                peak_share_as_percent_text(
                    sum.matrix_peak_share_of_kernel_time()
                        .or(sum.memory_peak_share_of_kernel_time())
                ),
                peak_share_as_percent_text(sum.roofline_share_of_kernel_time()),
                sum.roofline_limit_of_work().map_or("-", |limit| limit.printed_limit_label())
            );
        }
        for range in &self.ranges {
            if let Some(reached) = range.reached_peaks_or_rate_text() {
                let line = format!(
                    "{}: {reached}; work known of {:.1} %",
                    shorten_in_the_middle(&range.range_path, 40),
                    percent_of_whole(range.work_and_kernel_time.kernel_ns, range.kernel_ns)
                );
                append_wrapped_line(text, &line, "  ", "    ");
            }
        }
        for unknown in &self.unanswered_questions {
            append_wrapped_line(text, &format!("cannot answer {unknown}"), "  ", "    ");
        }
    }

    /// Converts the peak use of all GPUs of a trace to JSON.
    pub fn to_utilization_json(&self) -> Value {
        let sum = |sum: &SummedWorkAndKernelTime| {
            json!({
                "operators": sum.operator_call_count,
                "kernel_ns": sum.kernel_ns,
                "flops": sum.summed_matrix_flops,
                "bytes": sum.least_bytes,
                "flops_per_byte": sum.flops_per_byte_moved(),
                "tera_flops_per_s": sum.achieved_tera_flops_per_second(),
                "share_of_tensor_peak": sum.matrix_peak_share_of_kernel_time(),
                "share_of_memory_peak": sum.memory_peak_share_of_kernel_time(),
                "share_of_roofline": sum.roofline_share_of_kernel_time(),
                "limit": sum.roofline_limit_of_work().map(|limit| limit.printed_limit_label()),
            })
        };
        let operators = self.operators.iter().map(|operator| {
            json!({
                "name": operator.operator_name,
                "precision": operator.precision.map(MatrixPrecision::printed_precision_label),
                "sum": sum(&operator.work_and_kernel_time),
            })
        });
        let ranges = self.ranges.iter().map(|range| {
            json!({
                "range": range.range_path,
                "kernel_ns": range.kernel_ns,
                "host_ns": range.host_range_ns,
                "share_of_tensor_peak": range.work_and_kernel_time.matrix_peak_share_of_span(range.kernel_ns),
                "share_of_tensor_peak_of_host_time": range.work_and_kernel_time.matrix_peak_share_of_span(range.host_range_ns),
                "sum": sum(&range.work_and_kernel_time),
            })
        });
        json!({
            "device": self.gpu_name_and_peaks.as_ref().map(|(name, _)| name),
            "coverage": self.kernel_time_share_with_known_work(),
            "all": sum(&self.all_operators),
            "operators": operators.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
            "cannot_answer": self.unanswered_questions,
        })
    }
}
