//! Share of the device's peaks that operators and ranges use: kernels are joined with the operators
//! that launched them and with the declared work. Text and JSON output of the utilization are in
//! other modules.

use std::fmt::Write as _;
use std::hash::Hash;

use hashbrown::{HashMap, HashSet};
use serde_json::{Value, json};

use super::answers::kernels_by_path;
use super::labels::readable_name;
use super::text::{percent, time, wrap_line};
use super::trace_facts::DiagnosisContext;
use crate::analyze::launches::NO_CALL;
use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId};
use crate::analyze::work::device_peaks::{DevicePeaks, MatrixPrecision};
use crate::analyze::work::operator_work::{self, OperatorWork};
use crate::analyze::work::utilization::{
    DeviceUtilization, OperatorUtilization, RangeUtilization, WorkAndTimeSum,
};
use crate::model::Trace;
use crate::model::gpu::DeclaredWorkCount;
use crate::model::interned_names::NameId;
use crate::stats::{shorten, with_thousands_separators};

/// Maximum number of operators and ranges that are listed.
const MAX_LISTED: usize = 10;
/// Ranges deeper than this are not listed.
const MAX_LISTED_DEPTH: usize = 2;
/// Work above this multiple of the tensor peak has wrong shapes. Clocks above the data sheet's and
/// Winograd convolutions reach more than the peak, but not this multiple.
const MAX_POSSIBLE_PEAK_RATIO: f64 = 3.0;

/// Executions of an operator.
struct OperatorCall<'a> {
    name: &'a str,
    /// How many.
    times: usize,
    work: OperatorWork,
    /// Time of all kernels of these calls.
    kernel_ns: i64,
    path: RangePathId,
    device: u32,
}

impl OperatorCall<'_> {
    fn is_possible_work(&self, peaks: Option<&DevicePeaks>) -> bool {
        let mut sum = WorkAndTimeSum::default();
        self.add_to_sum(&mut sum, peaks);
        sum.share_of_tensor_peak().is_none_or(|share| share <= MAX_POSSIBLE_PEAK_RATIO)
    }

    fn add_to_sum(&self, sum: &mut WorkAndTimeSum, peaks: Option<&DevicePeaks>) {
        sum.add_operator_calls(self.times, &self.work, self.kernel_ns, peaks);
    }
}

/// Operator calls whose work is known.
struct KnownOperatorCalls<'a> {
    /// Calls that are listed under the name of their operator.
    operators: Vec<OperatorCall<'a>>,
    /// Calls from which ranges and the total are summed, where these are not `operators`.
    whole: Option<Vec<OperatorCall<'a>>>,
}

/// Computes how much of the devices' peaks a trace uses.
pub(super) fn trace_utilization(context: &DiagnosisContext<'_>) -> DeviceUtilization {
    let trace = context.trace;
    let mut found = DeviceUtilization {
        kernel_ns: trace.kernels.on_gpu.total_duration_ns(),
        ..DeviceUtilization::default()
    };
    let KnownOperatorCalls { operators: calls, whole } = known_operator_calls(context);
    if calls.is_empty() {
        found.unknown.push(
            "FLOPs and bytes: the trace has no shapes of operators; record with PyTorch's profiler \
             and record_shapes=True, or put m, n and k into the names of matrix products \
             (gemm_m4096_n512_k1024_bf16)"
                .to_owned(),
        );
        return found;
    }
    let peaks = peaks_by_device(trace, &calls, &mut found);
    let peaks_of = |call: &OperatorCall<'_>| peaks.get(&call.device).and_then(Option::as_ref);
    let (possible, impossible): (Vec<&OperatorCall<'_>>, Vec<&OperatorCall<'_>>) =
        calls.iter().partition(|call| call.is_possible_work(peaks_of(call)));
    let mut operators: HashMap<(&str, Option<MatrixPrecision>), WorkAndTimeSum> = HashMap::new();
    for call in &possible {
        let sum = operators.entry((call.name, call.work.precision)).or_default();
        call.add_to_sum(sum, peaks_of(call));
    }
    let mut ranges: HashMap<RangePathId, WorkAndTimeSum> = HashMap::new();
    let whole = whole.as_ref().map(|calls| calls.iter().collect()).unwrap_or(possible);
    for call in whole {
        call.add_to_sum(&mut found.all, peaks_of(call));
        for path in context.host.paths.path_and_parents(call.path) {
            call.add_to_sum(ranges.entry(path).or_default(), peaks_of(call));
        }
    }
    if let Some(first) = impossible.first() {
        found.unknown.push(format!(
            "the work of {} operators, such as {}: their recorded shapes need more than {MAX_POSSIBLE_PEAK_RATIO} \
             times the tensor peak",
            impossible.len(),
            first.name
        ));
    }
    found.operators = operators
        .into_iter()
        .map(|((name, precision), sum)| OperatorUtilization {
            name: name.to_owned(),
            precision,
            sum,
        })
        .collect();
    found
        .operators
        .sort_by(|a, b| b.sum.kernel_ns.cmp(&a.sum.kernel_ns).then_with(|| a.name.cmp(&b.name)));
    found.operators.truncate(MAX_LISTED);
    found.ranges = outer_two_range_levels(context, ranges);
    found
}

/// Operators whose work is known, with the kernels that they launched.
fn known_operator_calls<'a>(context: &DiagnosisContext<'a>) -> KnownOperatorCalls<'a> {
    let trace = context.trace;
    if trace.work.iter().any(|declared| declared.work != DeclaredWorkCount::default()) {
        let whole = declared_work_of_launches(context);
        let parts = declared_work_of_parts(context);
        return match parts.is_empty() {
            true => KnownOperatorCalls { operators: whole, whole: None },
            false => KnownOperatorCalls { operators: parts, whole: Some(whole) },
        };
    }
    let operators = match context.host.kept.of_operation.is_empty() {
        true => {
            let mut named = gemms_in_named_ranges(context);
            named.extend(gemms_by_kernel_name(context, &named));
            named
        }
        false => operators_by_input_shape(context),
    };
    KnownOperatorCalls { operators, whole: None }
}

/// The declared work of each launch of a case.
fn declared_work_of_launches<'a>(context: &DiagnosisContext<'a>) -> Vec<OperatorCall<'a>> {
    let declared = context.trace.work.iter().filter_map(|of| {
        let whole = DeclaredPaths {
            name: &of.path,
            times: launch_count_of_case(context),
            work: operator_work::work_of_declared_count(&of.work)?,
        };
        whole.call(context, |path| path == of.path)
    });
    declared.collect()
}

/// The declared work of a case's parts, whose ranges may be those of a graph's capture.
fn declared_work_of_parts<'a>(context: &DiagnosisContext<'a>) -> Vec<OperatorCall<'a>> {
    let declared = context.trace.parts.iter().filter_map(|of| {
        let part = DeclaredPaths {
            name: &of.label,
            times: launch_count_of_case(context),
            work: operator_work::work_of_declared_count(&of.work)?,
        };
        part.call(context, |path| {
            let before = path.strip_suffix(of.range.as_str());
            before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
        })
    });
    declared.collect()
}

/// Number of times that the case was launched.
fn launch_count_of_case(context: &DiagnosisContext<'_>) -> usize {
    let Some(work) = context.trace.work.first() else { return 0 };
    let paths = &context.host.paths;
    let own =
        |path: &RangePathId| *path != ROOT_PATH && paths.text(context.trace, *path) == work.path;
    let step = (0..).take(paths.len()).find(own);
    step.map_or(0, |step| context.host.of_path[step as usize].count)
}

/// Work that is declared for some paths.
struct DeclaredPaths<'a> {
    name: &'a str,
    times: usize,
    work: OperatorWork,
}

impl<'a> DeclaredPaths<'a> {
    /// Adds the time of the kernels in these paths; `None` if no path has a kernel.
    fn call(
        self,
        context: &DiagnosisContext<'_>,
        is: impl Fn(&str) -> bool,
    ) -> Option<OperatorCall<'a>> {
        let (trace, paths) = (context.trace, &context.host.paths);
        // A path has a larger number than its parent path.
        let mut inside: Vec<Option<RangePathId>> = vec![None; paths.len()];
        for path in (1..).take(paths.len() - 1) {
            let around = inside[paths.parent_path(path) as usize];
            inside[path as usize] = around.or_else(|| is(&paths.text(trace, path)).then_some(path));
        }
        let Self { name, times, work } = self;
        let mut found: Option<OperatorCall<'a>> = None;
        for id in context.all.kernel_ids() {
            let Some(path) = inside[context.path_id_of_operation(id) as usize] else { continue };
            let (_, device) = context.process_and_device_of(id);
            let call =
                found.get_or_insert(OperatorCall { name, times, work, kernel_ns: 0, path, device });
            call.kernel_ns += context.all.length(id);
            let kernel = trace.kernel_name(id as usize);
            call.work.precision = tensor_core_precision(call.work.precision, kernel);
        }
        found
    }
}

/// Matrix products in ranges whose names have their sizes: each range is one product.
fn gemms_in_named_ranges<'a>(context: &DiagnosisContext<'a>) -> Vec<OperatorCall<'a>> {
    let (trace, paths) = (context.trace, &context.host.paths);
    // For each path, the innermost path with sizes that contains it, or itself.
    let mut sized: Vec<Option<(RangePathId, OperatorWork)>> = vec![None; paths.len()];
    for path in (1..).take(paths.len() - 1) {
        let name = trace.names.text(paths.name(path));
        let own = operator_work::work_of_named_gemm(name).map(|work| (path, work));
        sized[path as usize] = own.or(sized[paths.parent_path(path) as usize]);
    }
    let mut calls: HashMap<(RangePathId, u32), OperatorCall<'a>> = HashMap::new();
    for id in context.all.kernel_ids() {
        let Some((path, work)) = sized[context.path_id_of_operation(id) as usize] else { continue };
        let (_, device) = context.process_and_device_of(id);
        let call = calls.entry((path, device)).or_insert_with(|| OperatorCall {
            name: trace.names.text(paths.name(path)),
            times: context.host.of_path[path as usize].count,
            work,
            kernel_ns: 0,
            path,
            device,
        });
        call.kernel_ns += context.all.length(id);
        let kernel = trace.kernel_name(id as usize);
        call.work.precision = tensor_core_precision(call.work.precision, kernel);
    }
    let around = |(path, device)| {
        let parent = paths.parent_path(path);
        (parent != ROOT_PATH).then_some((parent, device))
    };
    without_enclosing_ranges(calls, around).collect()
}

/// Matrix products by the names of kernels that are in none of the ranges with sizes.
fn gemms_by_kernel_name<'a>(
    context: &DiagnosisContext<'a>,
    ranges: &[OperatorCall<'_>],
) -> Vec<OperatorCall<'a>> {
    let trace = context.trace;
    let works: Vec<Option<OperatorWork>> = trace
        .functions
        .iter()
        .map(|of| operator_work::work_of_named_gemm(trace.names.text(of.demangled)))
        .collect();
    if works.iter().all(Option::is_none) {
        return Vec::new();
    }
    let paths = &context.host.paths;
    let in_range = |id: u32| {
        let mut around = paths.path_and_parents(context.path_id_of_operation(id));
        around.any(|path| ranges.iter().any(|range| range.path == path))
    };
    let call = |id: u32| {
        let work = works[trace.kernels.function.at(id as usize) as usize]?;
        let (_, device) = context.process_and_device_of(id);
        let (name, kernel_ns) = (trace.kernel_name(id as usize), context.all.length(id));
        let path = context.path_id_of_operation(id);
        (!in_range(id)).then_some(OperatorCall { name, times: 1, work, kernel_ns, path, device })
    };
    context.all.kernel_ids().filter_map(call).collect()
}

/// Operators by the shapes of their inputs, where ranges were kept.
fn operators_by_input_shape<'a>(context: &DiagnosisContext<'a>) -> Vec<OperatorCall<'a>> {
    let trace = context.trace;
    let kept = &context.host.kept;
    // For each range, the innermost range with known work: the range itself, or an enclosing range.
    let mut with_work: HashMap<u32, Option<u32>> = HashMap::new();
    let mut works: HashMap<(u32, NameId), Option<OperatorWork>> = HashMap::new();
    let mut by_range: HashMap<u32, OperatorCall<'a>> = HashMap::new();
    let mut calls = Vec::new();
    let mut by_name: HashMap<u32, Option<OperatorWork>> = HashMap::new();
    for id in context.all.kernel_ids() {
        let (row, kernel_ns) = (id as usize, context.all.length(id));
        let path = context.path_id_of_operation(id);
        let (_, device) = context.process_and_device_of(id);
        let kernel = trace.functions[trace.kernels.function.at(row) as usize].demangled;
        let mut work_of = |number: u32| {
            let range = kept.ranges[number as usize];
            let name = context.host.paths.name(range.path);
            *works.entry((range.inputs, name)).or_insert_with(|| {
                let inputs =
                    range.inputs.checked_sub(1).and_then(|at| trace.inputs.get(at as usize));
                let text = trace.names.text(name);
                match inputs {
                    Some(inputs) => operator_work::work_of_operator(text, inputs, &trace.names),
                    None => operator_work::work_of_named_gemm(text),
                }
            })
        };
        let innermost = kept.of_operation.get(row).map_or(NO_CALL, |(range, _)| *range);
        let range = match with_work.get(&innermost) {
            Some(known) => *known,
            None => {
                let mut at = innermost;
                while at != NO_CALL && work_of(at).is_none() {
                    at = kept.ranges[at as usize].around;
                }
                let range = (at != NO_CALL).then_some(at);
                with_work.insert(innermost, range);
                range
            }
        };
        if let Some(number) = range {
            let work = work_of(number);
            let name = context.host.paths.name(kept.ranges[number as usize].path);
            if let Some(work) = work {
                let call = by_range.entry(number).or_insert_with(|| OperatorCall {
                    name: trace.names.text(name),
                    times: 1,
                    work,
                    kernel_ns: 0,
                    path,
                    device,
                });
                call.kernel_ns += kernel_ns;
                call.work.precision =
                    tensor_core_precision(call.work.precision, trace.names.text(kernel));
            }
            continue;
        }
        let work = by_name
            .entry(kernel.0)
            .or_insert_with(|| operator_work::work_of_named_gemm(trace.names.text(kernel)));
        if let Some(work) = *work {
            let name = trace.names.text(kernel);
            calls.push(OperatorCall { name, times: 1, work, kernel_ns, path, device });
        }
    }
    let around =
        |number: u32| Some(kept.ranges[number as usize].around).filter(|&at| at != NO_CALL);
    calls.extend(without_enclosing_ranges(by_range, around));
    calls
}

/// Calls of ranges without those whose work a range inside of them counts: For example,
/// `aten::matmul` may launch a kernel besides the kernels of its `aten::mm`.
fn without_enclosing_ranges<'a, K: Copy + Eq + Hash>(
    mut calls: HashMap<K, OperatorCall<'a>>,
    around: impl Fn(K) -> Option<K>,
) -> impl Iterator<Item = OperatorCall<'a>> {
    let multiplies = |call: &OperatorCall<'_>| call.work.flops > 0.0;
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

/// Fp32 factors count as rounded to tf32 if the kernel's name shows it.
fn tensor_core_precision(
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

/// Peaks of each device, and notes on missing ones.
fn peaks_by_device(
    trace: &Trace,
    calls: &[OperatorCall<'_>],
    found: &mut DeviceUtilization,
) -> HashMap<u32, Option<DevicePeaks>> {
    let mut peaks = HashMap::new();
    for call in calls {
        peaks.entry(call.device).or_insert_with(|| {
            let device = trace.devices.iter().find(|device| device.id == call.device);
            let name = device.map(|device| device.name.as_str()).unwrap_or_default();
            let peaks = DevicePeaks::from_device_name(name);
            match peaks {
                Some(peaks) => found.device = Some((name.to_owned(), peaks)),
                None if name.is_empty() => found.unknown.push(format!(
                    "shares of the peak: the trace does not name device {}",
                    call.device
                )),
                None => found
                    .unknown
                    .push(format!("shares of the peak: the peaks of {name} are not in the table")),
            }
            peaks
        });
    }
    let without = |call: &&OperatorCall<'_>| {
        let peaks = peaks.get(&call.device).copied().flatten();
        let peak = |precision| peaks.and_then(|peaks| peaks.peak_flops_per_ns(precision));
        call.work.flops > 0.0 && peaks.is_some() && call.work.precision.and_then(peak).is_none()
    };
    if let Some(call) = calls.iter().find(without) {
        let precision = call.work.precision.map_or("unknown precision", MatrixPrecision::label);
        let name = call.name;
        found.unknown.push(format!("shares of the peak of {name}: {precision} has no peak here"));
    }
    peaks
}

/// Ranges that are outermost or directly inside an outermost range.
fn outer_two_range_levels(
    context: &DiagnosisContext<'_>,
    sums: HashMap<RangePathId, WorkAndTimeSum>,
) -> Vec<RangeUtilization> {
    let paths = &context.host.paths;
    let kernels = kernels_by_path(context);
    let kernel_ns = |path: RangePathId| kernels[path as usize].1;
    let depth = |path: RangePathId| paths.path_and_parents(path).count();
    let mut order: Vec<RangePathId> =
        sums.keys().copied().filter(|&path| depth(path) <= MAX_LISTED_DEPTH).collect();
    order.sort_by_key(|&path| (std::cmp::Reverse(kernel_ns(path)), path));
    order.truncate(MAX_LISTED);
    order
        .into_iter()
        .map(|path| RangeUtilization {
            path: paths.text(context.trace, path),
            kernel_ns: kernel_ns(path),
            host_ns: context.host.of_path[path as usize].host_ns,
            sum: sums[&path],
        })
        .collect()
}

impl RangeUtilization {
    /// The peaks that a range reaches, or its rate on an unknown device; `None` without either.
    fn reached_peaks_text(&self) -> Option<String> {
        let sum = &self.sum;
        if let Some(tensor) = sum.share_of_tensor_peak_over(self.kernel_ns) {
            // A range that only launches its kernels ends before its kernels end.
            let host = match self.host_ns >= self.kernel_ns {
                true => {
                    format!(
                        ", {} over its host time",
                        share_cell(sum.share_of_tensor_peak_over(self.host_ns))
                    )
                }
                false => String::new(),
            };
            return Some(format!(
                "{} of the tensor peak over its kernels{host}",
                share_cell(Some(tensor))
            ));
        }
        let memory = sum
            .share_of_memory_peak()
            .map(|of| format!("{} of the memory peak", share_cell(Some(of))));
        let rate = || {
            let rate = sum.achieved_teraflops().filter(|rate| *rate >= 0.1)?;
            Some(format!("{rate:.1} TFLOP/s over its kernels"))
        };
        memory.or_else(rate)
    }
}

fn share_cell(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

impl DeviceUtilization {
    /// Writes a section of text; writes nothing where no work is known and no device is named.
    pub(super) fn write_utilization(&self, text: &mut String) {
        if self.operators.is_empty() {
            return;
        }
        let device = self.device.as_ref().map_or("unknown device", |(name, _)| name);
        let _ = writeln!(text, "\nUtilization of {device} (work by shapes, names or declarations)");
        let line = format!(
            "work is known of {:.1} % of the kernel time: {} of the tensor peak, {} of what the \
             roofline allows",
            percent(self.all.kernel_ns, self.kernel_ns),
            share_cell(self.all.share_of_tensor_peak()),
            share_cell(self.all.share_of_roofline())
        );
        wrap_line(text, &line, "  ", "    ");
        let _ = writeln!(
            text,
            "  {:<31}{:>10}{:>12}{:>9}{:>9}{:>9}{:>9}  limit",
            "operator", "times", "kernels", "TFLOP/s", "FLOP/B", "of peak", "roofline"
        );
        for operator in &self.operators {
            let sum = &operator.sum;
            let number =
                |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
            let precision = operator.precision.filter(|_| sum.flops > 0.0);
            let precision = precision.map_or(String::new(), |of| format!(" {}", of.label()));
            let name = shorten(&format!("{}{precision}", readable_name(&operator.name)), 30);
            let _ = writeln!(
                text,
                "  {name:<31}{:>10}{:>12}{:>9}{:>9}{:>9}{:>9}  {}",
                with_thousands_separators(sum.count),
                time(sum.kernel_ns),
                number(sum.achieved_teraflops()),
                number(sum.flops_per_byte()),
                share_cell(sum.share_of_tensor_peak().or(sum.share_of_memory_peak())),
                share_cell(sum.share_of_roofline()),
                sum.limiting_peak().map_or("-", |limit| limit.label())
            );
        }
        for range in &self.ranges {
            if let Some(reached) = range.reached_peaks_text() {
                let line = format!(
                    "{}: {reached}; work known of {:.1} %",
                    shorten(&range.path, 40),
                    percent(range.sum.kernel_ns, range.kernel_ns)
                );
                wrap_line(text, &line, "  ", "    ");
            }
        }
        for unknown in &self.unknown {
            wrap_line(text, &format!("cannot answer {unknown}"), "  ", "    ");
        }
    }

    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let sum = |sum: &WorkAndTimeSum| {
            json!({
                "operators": sum.count,
                "kernel_ns": sum.kernel_ns,
                "flops": sum.flops,
                "bytes": sum.bytes,
                "flops_per_byte": sum.flops_per_byte(),
                "tera_flops_per_s": sum.achieved_teraflops(),
                "share_of_tensor_peak": sum.share_of_tensor_peak(),
                "share_of_memory_peak": sum.share_of_memory_peak(),
                "share_of_roofline": sum.share_of_roofline(),
                "limit": sum.limiting_peak().map(|limit| limit.label()),
            })
        };
        let operators = self.operators.iter().map(|operator| {
            json!({
                "name": operator.name,
                "precision": operator.precision.map(MatrixPrecision::label),
                "sum": sum(&operator.sum),
            })
        });
        let ranges = self.ranges.iter().map(|range| {
            json!({
                "range": range.path,
                "kernel_ns": range.kernel_ns,
                "host_ns": range.host_ns,
                "share_of_tensor_peak": range.sum.share_of_tensor_peak_over(range.kernel_ns),
                "share_of_tensor_peak_of_host_time": range.sum.share_of_tensor_peak_over(range.host_ns),
                "sum": sum(&range.sum),
            })
        });
        json!({
            "device": self.device.as_ref().map(|(name, _)| name),
            "coverage": self.known_work_share(),
            "all": sum(&self.all),
            "operators": operators.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
            "cannot_answer": self.unknown,
        })
    }
}
