//! The time by top kernels, kinds of kernels and components of a run, and how stable it repeats.

use hashbrown::HashMap;

use super::trace_facts::DiagnosisContext;
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::work::kernel_kinds::KernelClass;
use crate::model::interned_names::NameId;
use crate::stats::{GroupedSamples, ValueSummary};

/// Maximum number of kernels and components that are listed.
const MAX_LISTED: usize = 10;

/// A kernel and its part of the time of all kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTimeShare {
    pub name: String,
    /// Kind of work of the kernel, by its name.
    pub class: KernelClass,
    /// Launches of the kernel.
    pub summary: ValueSummary,
    /// The kernel's part of the kernel time, 0 to 1.
    pub share: f64,
}

/// Usual sizes of a head of attention.
pub(super) const HEAD_SIZES: [u32; 2] = [64, 128];

/// Ranges of one path: a component of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunComponent {
    pub path: String,
    /// Number of ranges that enclose the component's range.
    pub depth: usize,
    /// Host time of the component's ranges, summarised.
    pub host: ValueSummary,
    /// Number of kernels that were launched in the component.
    pub kernels: usize,
    /// Total time of the component's kernels, nanoseconds.
    pub kernel_ns: i64,
    /// The component's part of the time of all kernels, 0 to 1.
    pub share: f64,
}

impl RunComponent {
    /// Standard deviation of the host time of the component's ranges over their mean; `None` of
    /// fewer than three.
    pub fn host_time_variation(&self) -> Option<f64> {
        (self.host.count >= 3 && self.host.mean > 0.0).then(|| self.host.deviation / self.host.mean)
    }
}

/// Answers about a trace: its time by kernel, kind of work and component.
#[derive(Debug, Clone, Default)]
pub struct TraceAnswers {
    /// The time of all kernels, in nanoseconds.
    pub kernel_ns: i64,
    /// The kernels that take the most time.
    pub top_kernels: Vec<KernelTimeShare>,
    /// Kernel time by kind of work: nanoseconds and launches, the most expensive first.
    pub classes: Vec<(KernelClass, i64, usize)>,
    /// Components (outer ranges) that take the most kernel time.
    pub components: Vec<RunComponent>,
}

impl TraceAnswers {
    /// Time of softmax kernels over that of matmul kernels, if both are separate kernels.
    #[allow(clippy::cast_precision_loss)]
    pub fn softmax_over_matmul_time(&self) -> Option<f64> {
        let time = |class| self.classes.iter().find(|(of, ..)| *of == class).map(|(_, ns, _)| *ns);
        let (softmax, matmul) = (time(KernelClass::Softmax)?, time(KernelClass::Matmul)?);
        (matmul > 0).then(|| softmax as f64 / matmul as f64)
    }

    /// FLOPs of softmax over FLOPs of matmul in attention with `head` values a head: for each score
    /// 5 of softmax (largest, difference, exponential, sum, division), and 2 for each value in both
    /// products.
    pub fn softmax_to_matmul_flops(head: u32) -> f64 {
        5.0 / (4.0 * f64::from(head))
    }

    #[allow(clippy::cast_precision_loss)]
    pub(super) fn new(context: &DiagnosisContext<'_>) -> Self {
        let kernels = &context.trace.kernels;
        let kernel_ns = kernels.on_gpu.total_duration_ns();
        let share = |ns: i64| ns as f64 / kernel_ns.max(1) as f64;
        let mut samples = GroupedSamples::default();
        for (row, function) in kernels.function.iter().enumerate() {
            let name = context.trace.functions[function as usize].demangled;
            samples.push(name.0, kernels.on_gpu.length(row));
        }
        let lengths = samples.into_counted_values();
        let mut all: Vec<KernelTimeShare> = lengths
            .groups_with_values()
            .map(|name| {
                let summary = lengths.summary_of_group(name);
                let name = context.trace.names.text(NameId(name));
                KernelTimeShare {
                    name: name.to_owned(),
                    class: KernelClass::from_kernel_name(name),
                    summary,
                    share: share(summary.total),
                }
            })
            .collect();
        all.sort_by(|a, b| b.summary.total.cmp(&a.summary.total).then_with(|| a.name.cmp(&b.name)));
        let mut classes: HashMap<KernelClass, (i64, usize)> = HashMap::new();
        for kernel in &all {
            let sum = classes.entry(kernel.class).or_default();
            sum.0 += kernel.summary.total;
            sum.1 += kernel.summary.count;
        }
        let mut classes: Vec<_> =
            classes.into_iter().map(|(class, (ns, count))| (class, ns, count)).collect();
        classes.sort_by_key(|&(class, ns, _)| (std::cmp::Reverse(ns), class));
        all.truncate(MAX_LISTED);
        Self { kernel_ns, top_kernels: all, classes, components: run_components(context, &share) }
    }
}

/// Number and nanoseconds of the kernels launched in each range path, ranges inside it included.
pub(super) fn kernels_by_path(context: &DiagnosisContext<'_>) -> Vec<(usize, i64)> {
    let paths = &context.host.paths;
    let mut kernels = vec![(0, 0); paths.len()];
    for id in context.all.kernel_ids() {
        for path in paths.path_and_parents(context.path_id_of_operation(id)) {
            let (count, ns) = &mut kernels[path as usize];
            *count += 1;
            *ns += context.all.length(id);
        }
    }
    kernels
}

/// The outermost ranges and the ranges directly inside them.
fn run_components(context: &DiagnosisContext<'_>, share: &dyn Fn(i64) -> f64) -> Vec<RunComponent> {
    let paths = &context.host.paths;
    // Kernels count for every path around their launch.
    let kernels = kernels_by_path(context);
    let depth = |path: RangePathId| paths.path_and_parents(path).skip(1).take(3).count();
    let mut order: Vec<RangePathId> = (1..)
        .take(paths.len() - 1)
        .filter(|&path| kernels[path as usize].0 > 0 && depth(path) < 2)
        .collect();
    order.sort_by_key(|&path| (std::cmp::Reverse(kernels[path as usize].1), path));
    order.truncate(MAX_LISTED);
    order
        .into_iter()
        .map(|path| {
            let (count, ns) = kernels[path as usize];
            RunComponent {
                path: paths.text(context.trace, path),
                depth: depth(path),
                host: context.host.lengths.summary_of_group(path),
                kernels: count,
                kernel_ns: ns,
                share: share(ns),
            }
        })
        .collect()
}
