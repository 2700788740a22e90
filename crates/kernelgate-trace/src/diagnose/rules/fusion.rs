//! Diagnosis rule about short kernels of which one always runs directly after the other, so that
//! one kernel could compute both.

use hashbrown::{HashMap, HashSet};

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedRecordKind, InspectedShareOfRecords, KernelOfFusibleChain, MeasuredNumberWithUnit,
};
use super::super::labels::shortened_kernel_name_for_readers;
use super::super::trace_facts::DiagnosisContext;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, evidence_of_single_operation, percent_or_zero,
    sorted_and_limited_evidence,
};
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::work::kernel_kinds::KernelWorkClass;
use crate::model::Trace;
use crate::stats::shorten_in_the_middle;

/// Longest mean duration, nanoseconds, of a kernel that counts as short; also the longest gap
/// between kernels of a pair.
const MAX_SHORT_KERNEL_NS: i64 = 20_000;
/// Smallest number of times that a pair of kernels must run one after the other.
const MIN_REPEATS_OF_KERNEL_PAIR: usize = 5;
/// Smallest share of the kernel time, in percent, that fusible kernels must take for a finding.
const MIN_FUSIBLE_TIME_PERCENT: f64 = 2.0;

/// Number of launches of a kernel name, and their total time.
#[derive(Clone, Copy, Default)]
struct KernelLaunchCountAndTime {
    launch_count: usize,
    total_kernel_ns: i64,
}

struct ConsecutiveKernelPair {
    pair_count: usize,
    /// Total duration of both kernels of the pair, without the gaps between them, nanoseconds.
    total_ns_of_both_kernels: i64,
    /// Total idle time between the first and the second kernel of the pair, nanoseconds.
    total_gap_ns: i64,
    first_operation_id: u32,
    /// Path of the innermost range around all launches of the pair.
    common_range_path: RangePathId,
}

/// Pairs that share a kernel form a chain; fusing a chain leaves the time of its longest kernel,
/// and removes the gaps.
#[derive(Default)]
struct FusibleKernelChains {
    /// Total time of all kernels of the chains, nanoseconds.
    total_chain_kernel_ns: i64,
    /// Time that fusing all chains would save, gaps between their kernels included, nanoseconds.
    savable_ns: i64,
    /// For each kernel name, whether it is the longest of its chain, and whether it follows another
    /// kernel of the chain.
    is_longest_and_follower_by_kernel: HashMap<u32, (bool, bool)>,
}

fn join_pairs_to_chains(
    pairs: &HashMap<(u32, u32), ConsecutiveKernelPair>,
    total_ns: impl Fn(u32) -> i64,
) -> FusibleKernelChains {
    let next: HashMap<u32, u32> = pairs.keys().copied().collect();
    let behind: HashSet<u32> = next.values().copied().collect();
    let mut chains = FusibleKernelChains::default();
    for first in next.keys().filter(|name| !behind.contains(*name)) {
        let chain = std::iter::successors(Some(*first), |name| next.get(name).copied());
        let chain: Vec<(u32, i64)> = chain.map(|name| (name, total_ns(name))).collect();
        let longest = chain.iter().max_by_key(|&&(_, ns)| ns).map_or(*first, |&(name, _)| name);
        for &(name, ns) in &chain {
            let (stays, follows) = (name == longest, name != *first);
            chains.is_longest_and_follower_by_kernel.insert(name, (stays, follows));
            chains.total_chain_kernel_ns += ns;
            chains.savable_ns += if stays { 0 } else { ns };
        }
        let gap = |link: &[(u32, i64)]| pairs[&(link[0].0, link[1].0)].total_gap_ns;
        chains.savable_ns += chain.windows(2).map(gap).sum::<i64>();
    }
    chains
}

impl FusibleKernelChains {
    /// Returns the remedy in which each chain becomes one kernel, for a replay.
    fn remedy_of_fusing_chains(&self, trace: &Trace) -> FindingRemedy {
        let functions = (0u32..).zip(&trace.functions).filter_map(|(function, of)| {
            let &(stays, follows) =
                self.is_longest_and_follower_by_kernel.get(&of.demangled_name.0)?;
            Some(KernelOfFusibleChain {
                function_index: function,
                keeps_time_after_fusing: stays,
                follows_fused_kernel: follows,
            })
        });
        FindingRemedy::FusedKernels(functions.collect())
    }
}

pub(super) fn fusible_kernels_rule_text() -> String {
    format!(
        "kernels of up to {} µs, no matmul or attention, that ran one after the other on a stream \
         {MIN_REPEATS_OF_KERNEL_PAIR} times or more and never otherwise, take {MIN_FUSIBLE_TIME_PERCENT} % of the kernel time",
        MAX_SHORT_KERNEL_NS / 1000
    )
}

pub(super) fn find_fusible_kernels(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    let kernels = &context.trace.kernels;
    if kernels.on_gpu.has_no_operation() {
        return Err(DataMissingForRule::program_has_no_such_work("the trace holds no kernels"));
    }
    let name = |row: usize| {
        context.trace.functions[kernels.function_index.at(row) as usize].demangled_name.0
    };
    let length = |row: usize| kernels.on_gpu.operation_duration_ns(row);
    let rows = 0..u32::try_from(kernels.on_gpu.operation_count()).unwrap_or(u32::MAX);
    let order = OperationsInOrder::sort_operations_by_key(rows, |row| {
        (kernels.on_gpu.place.at(row as usize), kernels.on_gpu.start_ns.at(row as usize))
    });
    let mut sums: HashMap<u32, KernelLaunchCountAndTime> = HashMap::new();
    for row in 0..kernels.on_gpu.operation_count() {
        let sum = sums.entry(name(row)).or_default();
        sum.launch_count += 1;
        sum.total_kernel_ns += length(row);
    }
    let mut pairs: HashMap<(u32, u32), ConsecutiveKernelPair> = HashMap::new();
    for (before, after) in order.iter().zip(order.iter().skip(1)) {
        let [first, second] = [before as usize, after as usize];
        let gap = kernels.on_gpu.start_ns.at(second) - kernels.on_gpu.operation_end_ns(first);
        if kernels.on_gpu.place.at(first) != kernels.on_gpu.place.at(second)
            || gap > MAX_SHORT_KERNEL_NS
        {
            continue;
        }
        let pair = pairs.entry((name(first), name(second))).or_insert(ConsecutiveKernelPair {
            pair_count: 0,
            total_ns_of_both_kernels: 0,
            total_gap_ns: 0,
            first_operation_id: before,
            common_range_path: context.range_path_of_operation(before),
        });
        pair.common_range_path = context.common_path_with_operation(pair.common_range_path, before);
        pair.pair_count += 1;
        pair.total_ns_of_both_kernels += length(first) + length(second);
        pair.total_gap_ns += gap.max(0);
    }
    let text = |name: u32| {
        context.trace.names.text_of_name(crate::model::interned_names::InternedNameId(name))
    };
    let short = |name: u32| {
        let KernelLaunchCountAndTime { launch_count: count, total_kernel_ns: total_ns } =
            sums[&name];
        total_ns <= MAX_SHORT_KERNEL_NS * i64::try_from(count).unwrap_or(i64::MAX)
    };
    let fusible = |name: u32| {
        let class = KernelWorkClass::work_class_from_kernel_name(text(name));
        short(name)
            && !matches!(
                class,
                KernelWorkClass::Matmul
                    | KernelWorkClass::Attention
                    | KernelWorkClass::Communication
            )
    };
    // A pair is kept only if neither kernel runs without the other, so that no third kernel reads
    // what the first one writes.
    pairs.retain(|&(a, b), pair| {
        let alone = [a, b].iter().all(|name| sums[name].launch_count == pair.pair_count);
        a != b && alone && pair.pair_count >= MIN_REPEATS_OF_KERNEL_PAIR && fusible(a) && fusible(b)
    });
    let total: i64 = sums.values().map(|sum| sum.total_kernel_ns).sum();
    let graphs = &context.trace.graphs.on_gpu;
    let whole: i64 = graphs.sum_of_operation_durations_ns();
    let inspected = InspectedShareOfRecords {
        inspected_count_or_ns: total,
        whole_count_or_ns: total + whole,
        inspected_record_kind: InspectedRecordKind::KernelTime,
        reason_for_uninspected_records: (whole > 0).then(|| {
            let record = context.platform.advice_to_record_graph_nodes();
            format!("graphs were recorded whole; {record}")
        }),
    };
    let chains = join_pairs_to_chains(&pairs, |name| sums[&name].total_kernel_ns);
    let share = percent_or_zero(chains.total_chain_kernel_ns, total);
    if share < MIN_FUSIBLE_TIME_PERCENT {
        return Ok((Vec::new(), inspected));
    }
    Ok((vec![finding_about_fusible_kernels(context, &pairs, &chains, share)], inspected))
}

fn finding_about_fusible_kernels(
    context: &DiagnosisContext<'_>,
    pairs: &HashMap<(u32, u32), ConsecutiveKernelPair>,
    chains: &FusibleKernelChains,
    share: f64,
) -> DiagnosisFinding {
    let label = |name: u32| {
        shorten_in_the_middle(
            &shortened_kernel_name_for_readers(
                context
                    .trace
                    .names
                    .text_of_name(crate::model::interned_names::InternedNameId(name)),
            ),
            45,
        )
    };
    let evidence = pairs
        .iter()
        .map(|(&(a, b), pair)| {
            let [a, b] = [a, b].map(label);
            FindingEvidence {
                covered_count: pair.pair_count,
                total_duration_ns: Some(pair.total_ns_of_both_kernels),
                innermost_common_range_path: context
                    .range_path_text_unless_root(pair.common_range_path),
                ..evidence_of_single_operation(
                    context,
                    pair.first_operation_id,
                    format!("{a} → {b}"),
                )
            }
        })
        .collect();
    DiagnosisFinding {
        rule_id: "fusion",
        severity: FindingSeverity::Information,
        confidence: FindingConfidence::LowConfidence,
        finding_title: format!(
            "{} pairs of short kernels always run one after the other: {share:.1} % of the kernel \
             time could be fused",
            pairs.len()
        ),
        measured_value: MeasuredNumberWithUnit { number_in_unit: share, unit: "% of kernel time" },
        rule_threshold: MeasuredNumberWithUnit {
            number_in_unit: MIN_FUSIBLE_TIME_PERCENT,
            unit: "% of kernel time",
        },
        max_recoverable_ns: Some(chains.savable_ns),
        remedy: chains.remedy_of_fusing_chains(context.trace),
        replayed_gain: None,
        evidence: sorted_and_limited_evidence(evidence),
        advice: "compute both in one kernel, which keeps what is between them in registers; \
                 torch.compile fuses elementwise kernels"
            .to_owned(),
        false_positive_note: "the second does not read what the first wrote, or needs all of it",
    }
}
