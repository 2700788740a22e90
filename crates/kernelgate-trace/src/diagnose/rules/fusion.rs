//! Short kernels that always follow each other: one producer and one consumer, which one kernel
//! could compute.

use hashbrown::{HashMap, HashSet};

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    FusibleKernel, InspectedShare, InspectedUnit, NumberWithUnit,
};
use super::super::labels::readable_name;
use super::super::trace_facts::DiagnosisContext;
use super::rule_outcome::{
    MissingData, RuleResult, most_expensive_evidence, operation_evidence, percent,
};
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::time_order::SortedOperations;
use crate::analyze::work::kernel_kinds::KernelClass;
use crate::model::Trace;
use crate::stats::shorten;

/// Kernels up to this length count as short, in nanoseconds.
const SHORT_KERNEL_NS: i64 = 20_000;
/// Number of times that a pair must occur.
const MIN_PAIR_REPEATS: usize = 5;
/// Part of the kernel time from which pairs matter, in percent.
const MIN_TIME_SHARE: f64 = 2.0;

/// Launches of a kernel, and of a pair of neighbours on one stream.
#[derive(Clone, Copy, Default)]
struct LaunchTotals {
    count: usize,
    total_ns: i64,
}

struct NeighbourPair {
    count: usize,
    /// Duration of both kernels of the pair, without the gap between them, nanoseconds.
    kernels_ns: i64,
    /// Idle time between the two kernels, nanoseconds.
    gap_ns: i64,
    first: u32,
    /// Path of the range around all kernels of the chain.
    path: RangePathId,
}

/// Pairs that share a kernel are a chain: the longest kernel stays, without the idle time between.
#[derive(Default)]
struct KernelChains {
    /// Time of all kernels of the chains.
    fused_ns: i64,
    /// Part of that time that fusing saves, with the idle time between the kernels.
    saved_ns: i64,
    /// For each kernel name, whether the kernel stays, and whether it follows another one of the
    /// chain.
    kernels: HashMap<u32, (bool, bool)>,
}

fn chains_of_pairs(
    pairs: &HashMap<(u32, u32), NeighbourPair>,
    total_ns: impl Fn(u32) -> i64,
) -> KernelChains {
    let next: HashMap<u32, u32> = pairs.keys().copied().collect();
    let behind: HashSet<u32> = next.values().copied().collect();
    let mut chains = KernelChains::default();
    for first in next.keys().filter(|name| !behind.contains(*name)) {
        let chain = std::iter::successors(Some(*first), |name| next.get(name).copied());
        let chain: Vec<(u32, i64)> = chain.map(|name| (name, total_ns(name))).collect();
        let longest = chain.iter().max_by_key(|&&(_, ns)| ns).map_or(*first, |&(name, _)| name);
        for &(name, ns) in &chain {
            let (stays, follows) = (name == longest, name != *first);
            chains.kernels.insert(name, (stays, follows));
            chains.fused_ns += ns;
            chains.saved_ns += if stays { 0 } else { ns };
        }
        let gap = |link: &[(u32, i64)]| pairs[&(link[0].0, link[1].0)].gap_ns;
        chains.saved_ns += chain.windows(2).map(gap).sum::<i64>();
    }
    chains
}

impl KernelChains {
    /// The hypothetical change that fuses the kernels of the chain.
    fn fusion_remedy(&self, trace: &Trace) -> FindingRemedy {
        let functions = (0u32..).zip(&trace.functions).filter_map(|(function, of)| {
            let &(stays, follows) = self.kernels.get(&of.demangled.0)?;
            Some(FusibleKernel { function, stays, follows })
        });
        FindingRemedy::Fused(functions.collect())
    }
}

pub(super) fn fusion_finding_text() -> String {
    format!(
        "kernels of up to {} µs, no matmul or attention, that ran one after the other on a stream \
         {MIN_PAIR_REPEATS} times or more and never otherwise, take {MIN_TIME_SHARE} % of the kernel time",
        SHORT_KERNEL_NS / 1000
    )
}

pub(super) fn find_fusible_kernels(context: &DiagnosisContext<'_>) -> RuleResult {
    let kernels = &context.trace.kernels;
    if kernels.on_gpu.is_empty() {
        return Err(MissingData::no_work("the trace holds no kernels"));
    }
    let name = |row: usize| context.trace.functions[kernels.function.at(row) as usize].demangled.0;
    let length = |row: usize| kernels.on_gpu.length(row);
    let rows = 0..u32::try_from(kernels.on_gpu.len()).unwrap_or(u32::MAX);
    let order = SortedOperations::operations_by_key(rows, |row| {
        (kernels.on_gpu.place.at(row as usize), kernels.on_gpu.start.at(row as usize))
    });
    let mut sums: HashMap<u32, LaunchTotals> = HashMap::new();
    for row in 0..kernels.on_gpu.len() {
        let sum = sums.entry(name(row)).or_default();
        sum.count += 1;
        sum.total_ns += length(row);
    }
    let mut pairs: HashMap<(u32, u32), NeighbourPair> = HashMap::new();
    for (before, after) in order.iter().zip(order.iter().skip(1)) {
        let [first, second] = [before as usize, after as usize];
        let gap = kernels.on_gpu.start.at(second) - kernels.on_gpu.end(first);
        if kernels.on_gpu.place.at(first) != kernels.on_gpu.place.at(second)
            || gap > SHORT_KERNEL_NS
        {
            continue;
        }
        let pair = pairs.entry((name(first), name(second))).or_insert(NeighbourPair {
            count: 0,
            kernels_ns: 0,
            gap_ns: 0,
            first: before,
            path: context.path_id_of_operation(before),
        });
        pair.path = context.innermost_path_around(pair.path, before);
        pair.count += 1;
        pair.kernels_ns += length(first) + length(second);
        pair.gap_ns += gap.max(0);
    }
    let text = |name: u32| context.trace.names.text(crate::model::interned_names::NameId(name));
    let short = |name: u32| {
        let LaunchTotals { count, total_ns } = sums[&name];
        total_ns <= SHORT_KERNEL_NS * i64::try_from(count).unwrap_or(i64::MAX)
    };
    let fusible = |name: u32| {
        let class = KernelClass::from_kernel_name(text(name));
        short(name)
            && !matches!(
                class,
                KernelClass::Matmul | KernelClass::Attention | KernelClass::Communication
            )
    };
    // Both kernels always run together, so that no other kernel between them reads what the first
    // one writes.
    pairs.retain(|&(a, b), pair| {
        let alone = [a, b].iter().all(|name| sums[name].count == pair.count);
        a != b && alone && pair.count >= MIN_PAIR_REPEATS && fusible(a) && fusible(b)
    });
    let total: i64 = sums.values().map(|sum| sum.total_ns).sum();
    let graphs = &context.trace.graphs.on_gpu;
    let whole: i64 = graphs.total_duration_ns();
    let inspected = InspectedShare {
        seen: total,
        whole: total + whole,
        unit: InspectedUnit::KernelTime,
        missing: (whole > 0).then(|| {
            let record = context.platform.advice_to_trace_graph_nodes();
            format!("graphs were recorded whole; {record}")
        }),
    };
    let chains = chains_of_pairs(&pairs, |name| sums[&name].total_ns);
    let share = percent(chains.fused_ns, total);
    if share < MIN_TIME_SHARE {
        return Ok((Vec::new(), inspected));
    }
    Ok((vec![fusion_finding(context, &pairs, &chains, share)], inspected))
}

fn fusion_finding(
    context: &DiagnosisContext<'_>,
    pairs: &HashMap<(u32, u32), NeighbourPair>,
    chains: &KernelChains,
    share: f64,
) -> DiagnosisFinding {
    let label = |name: u32| {
        shorten(
            &readable_name(context.trace.names.text(crate::model::interned_names::NameId(name))),
            45,
        )
    };
    let evidence = pairs
        .iter()
        .map(|(&(a, b), pair)| {
            let [a, b] = [a, b].map(label);
            FindingEvidence {
                count: pair.count,
                total_ns: Some(pair.kernels_ns),
                range: context.range_path_text(pair.path),
                ..operation_evidence(context, pair.first, format!("{a} → {b}"))
            }
        })
        .collect();
    DiagnosisFinding {
        id: "fusion",
        severity: FindingSeverity::Information,
        confidence: FindingConfidence::Low,
        title: format!(
            "{} pairs of short kernels always run one after the other: {share:.1} % of the kernel \
             time could be fused",
            pairs.len()
        ),
        measured: NumberWithUnit { value: share, unit: "% of kernel time" },
        threshold: NumberWithUnit { value: MIN_TIME_SHARE, unit: "% of kernel time" },
        recoverable_ns: Some(chains.saved_ns),
        remedy: chains.fusion_remedy(context.trace),
        replayed: None,
        evidence: most_expensive_evidence(evidence),
        advice: "compute both in one kernel, which keeps what is between them in registers; \
                 torch.compile fuses elementwise kernels"
            .to_owned(),
        false_positive: "the second does not read what the first wrote, or needs all of it",
    }
}
