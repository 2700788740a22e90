//! Answers about a traced run: which kernels, kinds of kernels and components take the time, and
//! how much component times vary.

use hashbrown::HashMap;

use super::trace_facts::DiagnosisContext;
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::work::kernel_kinds::KernelWorkClass;
use crate::model::interned_names::InternedNameId;
use crate::stats::{ValueSummary, ValuesByGroup};

/// Largest number of kernels, and of components, that are listed.
const MAX_LISTED_KERNELS_AND_COMPONENTS: usize = 10;

/// A kernel name with its launches and its share of the time of all kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelWithTimeShare {
    pub kernel_name: String,
    /// Kind of work of the kernel, as its name shows.
    pub class: KernelWorkClass,
    /// Summary of the durations of the kernel's launches.
    pub launch_time_summary: ValueSummary,
    /// This kernel's time divided by the time of all kernels, 0 to 1.
    pub share_of_kernel_time: f64,
}

/// Usual numbers of values of an attention head's vectors (head sizes).
pub(super) const USUAL_ATTENTION_HEAD_SIZES: [u32; 2] = [64, 128];

/// A component of a run: the ranges with one path, with the kernels launched inside.
#[derive(Debug, Clone, PartialEq)]
pub struct RangePathHostAndKernelTimes {
    pub range_path: String,
    /// Number of ranges that enclose the component's range.
    pub enclosing_range_count: usize,
    /// Summary of the times that the component's ranges lasted on the host.
    pub host_times: ValueSummary,
    /// Number of kernels that were launched inside the component's ranges.
    pub kernel_count: usize,
    /// Total time of the component's kernels, nanoseconds.
    pub kernel_ns: i64,
    /// Time of the component's kernels divided by the time of all kernels, 0 to 1.
    pub share_of_kernel_time: f64,
}

impl RangePathHostAndKernelTimes {
    /// Coefficient of variation (standard deviation by mean) of the ranges' times on the host;
    /// `None` for fewer than three ranges.
    pub fn coefficient_of_variation_of_host_time(&self) -> Option<f64> {
        (self.host_times.value_count >= 3 && self.host_times.mean > 0.0)
            .then(|| self.host_times.standard_deviation / self.host_times.mean)
    }
}

/// Kernel time of a trace by kernel, by kind of work and by component.
#[derive(Debug, Clone, Default)]
pub struct KernelTimeAnswers {
    /// Total time of all kernels of the trace, nanoseconds.
    pub all_kernels_ns: i64,
    /// Kernel names that take the most time, longest first.
    pub top_kernels: Vec<KernelWithTimeShare>,
    /// For each kind of work, nanoseconds and number of kernel launches, most time first.
    pub ns_and_launches_by_class: Vec<(KernelWorkClass, i64, usize)>,
    /// Components (outer range paths) whose kernels take the most time, most first.
    pub components: Vec<RangePathHostAndKernelTimes>,
}

impl KernelTimeAnswers {
    /// Time of softmax kernels divided by time of matmul kernels, if the trace has both.
    #[allow(clippy::cast_precision_loss)]
    pub fn softmax_time_by_matmul_time(&self) -> Option<f64> {
        let time = |class| {
            self.ns_and_launches_by_class.iter().find(|(of, ..)| *of == class).map(|(_, ns, _)| *ns)
        };
        let (softmax, matmul) = (time(KernelWorkClass::Softmax)?, time(KernelWorkClass::Matmul)?);
        (matmul > 0).then(|| softmax as f64 / matmul as f64)
    }

    /// FLOPs of softmax by FLOPs of matmul in attention: for each score, 5 of softmax (maximum,
    /// difference, exponential, sum, division) and 4 · `head` of both products.
    pub fn softmax_flops_by_matmul_flops(head: u32) -> f64 {
        5.0 / (4.0 * f64::from(head))
    }

    #[allow(clippy::cast_precision_loss)]
    pub(super) fn answer_kernel_time_questions(context: &DiagnosisContext<'_>) -> Self {
        let kernels = &context.trace.kernels;
        let kernel_ns = kernels.on_gpu.sum_of_operation_durations_ns();
        let share = |ns: i64| ns as f64 / kernel_ns.max(1) as f64;
        let mut samples = ValuesByGroup::default();
        for (row, function) in kernels.function_index.iter_decoded_rows().enumerate() {
            let name = context.trace.functions[function as usize].demangled_name;
            samples.push_value_of_group(name.0, kernels.on_gpu.operation_duration_ns(row));
        }
        let lengths = samples.into_sorted_values_with_counts();
        let mut all: Vec<KernelWithTimeShare> = lengths
            .groups_with_values()
            .map(|name| {
                let summary = lengths.summary_of_group(name);
                let name = context.trace.names.text_of_name(InternedNameId(name));
                KernelWithTimeShare {
                    kernel_name: name.to_owned(),
                    class: KernelWorkClass::work_class_from_kernel_name(name),
                    launch_time_summary: summary,
                    share_of_kernel_time: share(summary.total),
                }
            })
            .collect();
        all.sort_by(|a, b| {
            b.launch_time_summary
                .total
                .cmp(&a.launch_time_summary.total)
                .then_with(|| a.kernel_name.cmp(&b.kernel_name))
        });
        let mut classes: HashMap<KernelWorkClass, (i64, usize)> = HashMap::new();
        for kernel in &all {
            let sum = classes.entry(kernel.class).or_default();
            sum.0 += kernel.launch_time_summary.total;
            sum.1 += kernel.launch_time_summary.value_count;
        }
        let mut classes: Vec<_> =
            classes.into_iter().map(|(class, (ns, count))| (class, ns, count)).collect();
        classes.sort_by_key(|&(class, ns, _)| (std::cmp::Reverse(ns), class));
        all.truncate(MAX_LISTED_KERNELS_AND_COMPONENTS);
        Self {
            all_kernels_ns: kernel_ns,
            top_kernels: all,
            ns_and_launches_by_class: classes,
            components: list_run_components(context, &share),
        }
    }
}

/// Returns for each range path the number and the nanoseconds of the kernels launched in its
/// ranges, including ranges inside.
pub(super) fn kernel_count_and_ns_by_range_path(
    context: &DiagnosisContext<'_>,
) -> Vec<(usize, i64)> {
    let paths = &context.host_summary.paths;
    let mut kernels = vec![(0, 0); paths.len()];
    for id in context.operations.kernel_ids() {
        for path in paths.path_and_enclosing_paths(context.range_path_of_operation(id)) {
            let (count, ns) = &mut kernels[path as usize];
            *count += 1;
            *ns += context.operations.operation_length_ns(id);
        }
    }
    kernels
}

/// Returns the components of the run: paths of the outermost ranges, and of the ranges directly
/// inside them.
fn list_run_components(
    context: &DiagnosisContext<'_>,
    share: &dyn Fn(i64) -> f64,
) -> Vec<RangePathHostAndKernelTimes> {
    let paths = &context.host_summary.paths;
    // A kernel counts for every range path that encloses its launch.
    let kernels = kernel_count_and_ns_by_range_path(context);
    let depth = |path: RangePathId| paths.path_and_enclosing_paths(path).skip(1).take(3).count();
    let mut order: Vec<RangePathId> = (1..)
        .take(paths.len() - 1)
        .filter(|&path| kernels[path as usize].0 > 0 && depth(path) < 2)
        .collect();
    order.sort_by_key(|&path| (std::cmp::Reverse(kernels[path as usize].1), path));
    order.truncate(MAX_LISTED_KERNELS_AND_COMPONENTS);
    order
        .into_iter()
        .map(|path| {
            let (count, ns) = kernels[path as usize];
            RangePathHostAndKernelTimes {
                range_path: paths.path_text_with_slashes(context.trace, path),
                enclosing_range_count: depth(path),
                host_times: context.host_summary.range_host_ns_by_path.summary_of_group(path),
                kernel_count: count,
                kernel_ns: ns,
                share_of_kernel_time: share(ns),
            }
        })
        .collect()
}
