//! Which share of the device's peaks operators and ranges use: kernels joined with the operators
//! that launched them, and those with their work. Absent: text and JSON of the utilization.

use std::fmt::Write as _;
use std::hash::Hash;

use hashbrown::{HashMap, HashSet};
use serde_json::{Value, json};

use super::context::Context;
use super::labels::short_name;
use super::text::{percent, time, wrap};
use crate::analyze::launches::NONE;
use crate::analyze::ranges::paths::{PathId, ROOT};
use crate::analyze::work::operator_work::{self, Work};
use crate::analyze::work::peaks::{Peaks, Precision};
use crate::analyze::work::utilization::{OperatorUse, RangeUtilization, Utilization, WorkSum};
use crate::model::Trace;
use crate::model::gpu::WorkCount;
use crate::model::names::Name;
use crate::stats::{shorten, thousands};

/// Operators and ranges that are listed.
const TOP: usize = 10;
/// Ranges deeper than this are not listed.
const DEPTH: usize = 2;
/// Work above this multiple of the tensor peak has wrong shapes. Clocks above the data sheet's and
/// convolutions by Winograd's algorithm reach more than the peak, but not this much.
const MOST_OF_PEAK: f64 = 3.0;

/// Executions of an operator.
struct Call<'a> {
    name: &'a str,
    /// How many.
    times: usize,
    /// The work of one.
    work: Work,
    /// Time of all kernels of these calls.
    kernel_ns: i64,
    path: PathId,
    device: u32,
}

impl Call<'_> {
    fn is_possible(&self, peaks: Option<&Peaks>) -> bool {
        let mut sum = WorkSum::default();
        self.add_to(&mut sum, peaks);
        sum.tensor_share().is_none_or(|share| share <= MOST_OF_PEAK)
    }

    fn add_to(&self, sum: &mut WorkSum, peaks: Option<&Peaks>) {
        sum.add_times(self.times, &self.work, self.kernel_ns, peaks);
    }
}

/// Calls whose work is known.
struct Calls<'a> {
    /// Calls that are listed by operator.
    operators: Vec<Call<'a>>,
    /// Calls from which ranges and the total are summed, where these are not `operators`.
    whole: Option<Vec<Call<'a>>>,
}

/// The utilization of a trace.
pub(super) fn utilization(context: &Context<'_>) -> Utilization {
    let trace = context.trace;
    let on_gpu = &trace.kernels.on_gpu;
    let length = |row: usize| on_gpu.length(row);
    let mut found =
        Utilization { kernel_ns: (0..on_gpu.len()).map(length).sum(), ..Utilization::default() };
    let Calls { operators: calls, whole } = calls(context);
    if calls.is_empty() {
        found.unknown.push(
            "FLOPs and bytes: the trace has no shapes of operators; record with PyTorch's profiler \
             and record_shapes=True, or put m, n and k into the names of matrix products \
             (gemm_m4096_n512_k1024_bf16)"
                .to_owned(),
        );
        return found;
    }
    let peaks = device_peaks(trace, &calls, &mut found);
    let peaks_of = |call: &Call<'_>| peaks.get(&call.device).and_then(Option::as_ref);
    let (possible, impossible): (Vec<&Call<'_>>, Vec<&Call<'_>>) =
        calls.iter().partition(|call| call.is_possible(peaks_of(call)));
    let mut operators: HashMap<(&str, Option<Precision>), WorkSum> = HashMap::new();
    for call in &possible {
        let sum = operators.entry((call.name, call.work.precision)).or_default();
        call.add_to(sum, peaks_of(call));
    }
    let mut ranges: HashMap<PathId, WorkSum> = HashMap::new();
    let whole = whole.as_ref().map(|calls| calls.iter().collect()).unwrap_or(possible);
    for call in whole {
        call.add_to(&mut found.all, peaks_of(call));
        let mut path = call.path;
        while path != ROOT {
            call.add_to(ranges.entry(path).or_default(), peaks_of(call));
            path = context.host.paths.parent(path);
        }
    }
    if let Some(first) = impossible.first() {
        found.unknown.push(format!(
            "the work of {} operators, such as {}: their recorded shapes need more than {MOST_OF_PEAK} \
             times the tensor peak",
            impossible.len(),
            first.name
        ));
    }
    found.operators = operators
        .into_iter()
        .map(|((name, precision), sum)| OperatorUse { name: name.to_owned(), precision, sum })
        .collect();
    found
        .operators
        .sort_by(|a, b| b.sum.kernel_ns.cmp(&a.sum.kernel_ns).then_with(|| a.name.cmp(&b.name)));
    found.operators.truncate(TOP);
    found.ranges = outer_ranges(context, ranges);
    found
}

/// Operators whose work is known, with the kernels that they launched.
fn calls<'a>(context: &Context<'a>) -> Calls<'a> {
    let trace = context.trace;
    if trace.work.iter().any(|declared| declared.work != WorkCount::default()) {
        let whole = declared_whole(context);
        let parts = declared_parts(context);
        return match parts.is_empty() {
            true => Calls { operators: whole, whole: None },
            false => Calls { operators: parts, whole: Some(whole) },
        };
    }
    let operators = match context.host.kept.of_operation.is_empty() {
        true => {
            let mut named = named_ranges(context);
            named.extend(named_kernels(context, &named));
            named
        }
        false => by_shape(context),
    };
    Calls { operators, whole: None }
}

/// The work of each launch of a case.
fn declared_whole<'a>(context: &Context<'a>) -> Vec<Call<'a>> {
    let declared = context.trace.work.iter().filter_map(|of| {
        let whole = Declares {
            name: &of.path,
            times: steps(context),
            work: operator_work::declared(&of.work)?,
        };
        whole.call(context, |path| path == of.path)
    });
    declared.collect()
}

/// The work of the parts of a case, whose ranges may be those of a graph's capture.
fn declared_parts<'a>(context: &Context<'a>) -> Vec<Call<'a>> {
    let declared = context.trace.parts.iter().filter_map(|of| {
        let part = Declares {
            name: &of.label,
            times: steps(context),
            work: operator_work::declared(&of.work)?,
        };
        part.call(context, |path| {
            let before = path.strip_suffix(of.range.as_str());
            before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
        })
    });
    declared.collect()
}

/// How often the case was launched.
fn steps(context: &Context<'_>) -> usize {
    let Some(work) = context.trace.work.first() else { return 0 };
    let paths = &context.host.paths;
    let own = |path: &PathId| *path != ROOT && paths.text(context.trace, *path) == work.path;
    let step = (0..).take(paths.len()).find(own);
    step.map_or(0, |step| context.host.of_path[step as usize].count)
}

/// Work that is declared for some paths.
struct Declares<'a> {
    name: &'a str,
    times: usize,
    work: Work,
}

impl<'a> Declares<'a> {
    /// Adds the time of the kernels in these paths; `None` if no path has a kernel.
    fn call(self, context: &Context<'_>, is: impl Fn(&str) -> bool) -> Option<Call<'a>> {
        let (trace, paths) = (context.trace, &context.host.paths);
        // A path is numbered behind the one around it.
        let mut inside: Vec<Option<PathId>> = vec![None; paths.len()];
        for path in (1..).take(paths.len() - 1) {
            let around = inside[paths.parent(path) as usize];
            inside[path as usize] = around.or_else(|| is(&paths.text(trace, path)).then_some(path));
        }
        let Self { name, times, work } = self;
        let mut found: Option<Call<'a>> = None;
        for (row, function) in trace.kernels.function.iter().enumerate() {
            let id = u32::try_from(row).unwrap_or(u32::MAX);
            let Some(path) = inside[context.path_id(id) as usize] else { continue };
            let device = trace.places[trace.kernels.on_gpu.place.at(row).0 as usize].device;
            let call = found.get_or_insert(Call { name, times, work, kernel_ns: 0, path, device });
            call.kernel_ns += context.all.length(id);
            let kernel = trace.names.text(trace.functions[function as usize].demangled);
            call.work.precision = tensor_precision(call.work.precision, kernel);
        }
        found
    }
}

/// Matrix products in ranges whose names have their sizes: each range is one product.
fn named_ranges<'a>(context: &Context<'a>) -> Vec<Call<'a>> {
    let (trace, paths) = (context.trace, &context.host.paths);
    // For each path, the innermost path with sizes that contains it, or itself.
    let mut sized: Vec<Option<(PathId, Work)>> = vec![None; paths.len()];
    for path in (1..).take(paths.len() - 1) {
        let name = trace.names.text(paths.name(path));
        let own = operator_work::named_product(name).map(|work| (path, work));
        sized[path as usize] = own.or(sized[paths.parent(path) as usize]);
    }
    let mut calls: HashMap<(PathId, u32), Call<'a>> = HashMap::new();
    for (row, function) in trace.kernels.function.iter().enumerate() {
        let id = u32::try_from(row).unwrap_or(u32::MAX);
        let Some((path, work)) = sized[context.path_id(id) as usize] else { continue };
        let device = trace.places[trace.kernels.on_gpu.place.at(row).0 as usize].device;
        let call = calls.entry((path, device)).or_insert_with(|| Call {
            name: trace.names.text(paths.name(path)),
            times: context.host.of_path[path as usize].count,
            work,
            kernel_ns: 0,
            path,
            device,
        });
        call.kernel_ns += context.all.length(id);
        let kernel = trace.names.text(trace.functions[function as usize].demangled);
        call.work.precision = tensor_precision(call.work.precision, kernel);
    }
    let around = |(path, device)| {
        let parent = paths.parent(path);
        (parent != ROOT).then_some((parent, device))
    };
    counted_once(calls, around).collect()
}

/// Matrix products by the names of kernels that are in none of the ranges with sizes.
fn named_kernels<'a>(context: &Context<'a>, ranges: &[Call<'_>]) -> Vec<Call<'a>> {
    let trace = context.trace;
    let works: Vec<Option<Work>> = trace
        .functions
        .iter()
        .map(|of| operator_work::named_product(trace.names.text(of.demangled)))
        .collect();
    if works.iter().all(Option::is_none) {
        return Vec::new();
    }
    let paths = &context.host.paths;
    let in_range = |id: u32| {
        let mut path = context.path_id(id);
        while path != ROOT && ranges.iter().all(|range| range.path != path) {
            path = paths.parent(path);
        }
        path != ROOT
    };
    let call = |(row, function): (usize, u32)| {
        let id = u32::try_from(row).unwrap_or(u32::MAX);
        let work = works[function as usize]?;
        let device = trace.places[trace.kernels.on_gpu.place.at(row).0 as usize].device;
        let kernel_ns = context.all.length(id);
        let name = trace.names.text(trace.functions[function as usize].demangled);
        let path = context.path_id(id);
        (!in_range(id)).then_some(Call { name, times: 1, work, kernel_ns, path, device })
    };
    trace.kernels.function.iter().enumerate().filter_map(call).collect()
}

/// Operators by the shapes of their inputs, where ranges were kept.
fn by_shape<'a>(context: &Context<'a>) -> Vec<Call<'a>> {
    let trace = context.trace;
    let kept = &context.host.kept;
    let on_gpu = &trace.kernels.on_gpu;
    // For each range, the innermost range with known work: itself, or one around it.
    let mut with_work: HashMap<u32, Option<u32>> = HashMap::new();
    let mut works: HashMap<(u32, Name), Option<Work>> = HashMap::new();
    let mut by_range: HashMap<u32, Call<'a>> = HashMap::new();
    let mut calls = Vec::new();
    let mut by_name: HashMap<u32, Option<Work>> = HashMap::new();
    for row in 0..on_gpu.len() {
        let id = u32::try_from(row).unwrap_or(u32::MAX);
        let kernel_ns = on_gpu.length(row);
        let (path, device) =
            (context.path_id(id), trace.places[on_gpu.place.at(row).0 as usize].device);
        let kernel = trace.functions[trace.kernels.function.at(row) as usize].demangled;
        let mut work_of = |number: u32| {
            let range = kept.ranges[number as usize];
            let name = context.host.paths.name(range.path);
            *works.entry((range.inputs, name)).or_insert_with(|| {
                let inputs =
                    range.inputs.checked_sub(1).and_then(|at| trace.inputs.get(at as usize));
                let text = trace.names.text(name);
                match inputs {
                    Some(inputs) => operator_work::operator(text, inputs, &trace.names),
                    None => operator_work::named_product(text),
                }
            })
        };
        let innermost = kept.of_operation.get(row).map_or(NONE, |(range, _)| *range);
        let range = match with_work.get(&innermost) {
            Some(known) => *known,
            None => {
                let mut at = innermost;
                while at != NONE && work_of(at).is_none() {
                    at = kept.ranges[at as usize].around;
                }
                let range = (at != NONE).then_some(at);
                with_work.insert(innermost, range);
                range
            }
        };
        if let Some(number) = range {
            let work = work_of(number);
            let name = context.host.paths.name(kept.ranges[number as usize].path);
            if let Some(work) = work {
                let call = by_range.entry(number).or_insert_with(|| Call {
                    name: trace.names.text(name),
                    times: 1,
                    work,
                    kernel_ns: 0,
                    path,
                    device,
                });
                call.kernel_ns += kernel_ns;
                call.work.precision =
                    tensor_precision(call.work.precision, trace.names.text(kernel));
            }
            continue;
        }
        let work = by_name
            .entry(kernel.0)
            .or_insert_with(|| operator_work::named_product(trace.names.text(kernel)));
        if let Some(work) = *work {
            let name = trace.names.text(kernel);
            calls.push(Call { name, times: 1, work, kernel_ns, path, device });
        }
    }
    let around = |number: u32| Some(kept.ranges[number as usize].around).filter(|&at| at != NONE);
    calls.extend(counted_once(by_range, around));
    calls
}

/// Calls of ranges without those whose work a range inside of them counts: `aten::matmul` may launch
/// a kernel besides those of its `aten::mm`.
fn counted_once<'a, K: Copy + Eq + Hash>(
    mut calls: HashMap<K, Call<'a>>,
    around: impl Fn(K) -> Option<K>,
) -> impl Iterator<Item = Call<'a>> {
    let multiplies = |call: &Call<'_>| call.work.flops > 0.0;
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

/// Factors of 32 bits are rounded where the kernel's name says so.
fn tensor_precision(precision: Option<Precision>, kernel: &str) -> Option<Precision> {
    let rounds = || {
        let kernel = kernel.to_ascii_lowercase();
        ["tf32", "s1688", "xf32"].iter().any(|word| kernel.contains(word))
    };
    match precision {
        Some(Precision::Fp32) if rounds() => Some(Precision::Tf32),
        precision => precision,
    }
}

/// Peaks by device, and what is not known about them.
fn device_peaks(
    trace: &Trace,
    calls: &[Call<'_>],
    found: &mut Utilization,
) -> HashMap<u32, Option<Peaks>> {
    let mut peaks = HashMap::new();
    for call in calls {
        peaks.entry(call.device).or_insert_with(|| {
            let device = trace.devices.iter().find(|device| device.id == call.device);
            let name = device.map(|device| device.name.as_str()).unwrap_or_default();
            let peaks = Peaks::for_device(name);
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
    let without = |call: &&Call<'_>| {
        let peaks = peaks.get(&call.device).copied().flatten();
        let peak = |precision| peaks.and_then(|peaks| peaks.flops_per_ns(precision));
        call.work.flops > 0.0 && peaks.is_some() && call.work.precision.and_then(peak).is_none()
    };
    if let Some(call) = calls.iter().find(without) {
        let precision = call.work.precision.map_or("unknown precision", Precision::label);
        let name = call.name;
        found.unknown.push(format!("shares of the peak of {name}: {precision} has no peak here"));
    }
    peaks
}

/// Ranges with at most one around them.
fn outer_ranges(context: &Context<'_>, sums: HashMap<PathId, WorkSum>) -> Vec<RangeUtilization> {
    let paths = &context.host.paths;
    let depth = |mut path: PathId| {
        let mut depth = 0;
        while path != ROOT {
            path = paths.parent(path);
            depth += 1;
        }
        depth
    };
    let mut kernel_ns = vec![0; paths.len()];
    let on_gpu = &context.trace.kernels.on_gpu;
    for row in 0..on_gpu.len() {
        let mut path = context.path_id(u32::try_from(row).unwrap_or(u32::MAX));
        while path != ROOT {
            kernel_ns[path as usize] += on_gpu.length(row);
            path = paths.parent(path);
        }
    }
    let mut order: Vec<PathId> =
        sums.keys().copied().filter(|&path| depth(path) <= DEPTH).collect();
    order.sort_by_key(|&path| (std::cmp::Reverse(kernel_ns[path as usize]), path));
    order.truncate(TOP);
    order
        .into_iter()
        .map(|path| RangeUtilization {
            path: paths.text(context.trace, path),
            kernel_ns: kernel_ns[path as usize],
            host_ns: context.host.of_path[path as usize].host_ns,
            sum: sums[&path],
        })
        .collect()
}

impl RangeUtilization {
    /// The peaks that a range reaches, or its rate on an unknown device; `None` without either.
    fn reached(&self) -> Option<String> {
        let sum = &self.sum;
        if let Some(tensor) = sum.tensor_share_of(self.kernel_ns) {
            // A range that only launches its kernels is over before they are.
            let host = match self.host_ns >= self.kernel_ns {
                true => {
                    format!(", {} over its host time", share(sum.tensor_share_of(self.host_ns)))
                }
                false => String::new(),
            };
            return Some(format!(
                "{} of the tensor peak over its kernels{host}",
                share(Some(tensor))
            ));
        }
        let memory = sum.memory_share().map(|of| format!("{} of the memory peak", share(Some(of))));
        let rate = || {
            let rate = sum.teraflops().filter(|rate| *rate >= 0.1)?;
            Some(format!("{rate:.1} TFLOP/s over its kernels"))
        };
        memory.or_else(rate)
    }
}

fn share(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

impl Utilization {
    /// Writes a section of text; writes nothing where no work is known and no device is named.
    pub(super) fn write(&self, text: &mut String) {
        if self.operators.is_empty() {
            return;
        }
        let device = self.device.as_ref().map_or("unknown device", |(name, _)| name);
        let _ = writeln!(text, "\nUtilization of {device} (work by shapes, names or declarations)");
        let line = format!(
            "work is known of {:.1} % of the kernel time: {} of the tensor peak, {} of what the \
             roofline allows",
            percent(self.all.kernel_ns, self.kernel_ns),
            share(self.all.tensor_share()),
            share(self.all.roofline_share())
        );
        wrap(text, &line, "  ", "    ");
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
            let name = shorten(&format!("{}{precision}", short_name(&operator.name)), 30);
            let _ = writeln!(
                text,
                "  {name:<31}{:>10}{:>12}{:>9}{:>9}{:>9}{:>9}  {}",
                thousands(&sum.count.to_string()),
                time(sum.kernel_ns),
                number(sum.teraflops()),
                number(sum.intensity()),
                share(sum.tensor_share().or(sum.memory_share())),
                share(sum.roofline_share()),
                sum.limit().map_or("-", |limit| limit.label())
            );
        }
        for range in &self.ranges {
            if let Some(reached) = range.reached() {
                let line = format!(
                    "{}: {reached}; work known of {:.1} %",
                    shorten(&range.path, 40),
                    percent(range.sum.kernel_ns, range.kernel_ns)
                );
                wrap(text, &line, "  ", "    ");
            }
        }
        for unknown in &self.unknown {
            wrap(text, &format!("cannot answer {unknown}"), "  ", "    ");
        }
    }

    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let sum = |sum: &WorkSum| {
            json!({
                "operators": sum.count,
                "kernel_ns": sum.kernel_ns,
                "flops": sum.flops,
                "bytes": sum.bytes,
                "flops_per_byte": sum.intensity(),
                "tera_flops_per_s": sum.teraflops(),
                "share_of_tensor_peak": sum.tensor_share(),
                "share_of_memory_peak": sum.memory_share(),
                "share_of_roofline": sum.roofline_share(),
                "limit": sum.limit().map(|limit| limit.label()),
            })
        };
        let operators = self.operators.iter().map(|operator| {
            json!({
                "name": operator.name,
                "precision": operator.precision.map(Precision::label),
                "sum": sum(&operator.sum),
            })
        });
        let ranges = self.ranges.iter().map(|range| {
            json!({
                "range": range.path,
                "kernel_ns": range.kernel_ns,
                "host_ns": range.host_ns,
                "share_of_tensor_peak": range.sum.tensor_share_of(range.kernel_ns),
                "share_of_tensor_peak_of_host_time": range.sum.tensor_share_of(range.host_ns),
                "sum": sum(&range.sum),
            })
        });
        json!({
            "device": self.device.as_ref().map(|(name, _)| name),
            "coverage": self.coverage(),
            "all": sum(&self.all),
            "operators": operators.collect::<Vec<_>>(),
            "ranges": ranges.collect::<Vec<_>>(),
            "cannot_answer": self.unknown,
        })
    }
}
