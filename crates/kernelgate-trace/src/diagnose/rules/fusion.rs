//! Short kernels that always follow each other: one producer and one consumer, which one kernel
//! could compute.

use hashbrown::{HashMap, HashSet};

use super::super::context::Context;
use super::super::finding::{
    Confidence, DeviceUse, Evidence, Finding, Inspected, Measure, Remedy, Severity, Unit,
};
use super::super::labels::short_name;
use super::outcome::{Lack, Outcome, most_expensive, percent};
use crate::analyze::ranges::paths::PathId;
use crate::analyze::work::kernel_kinds::KernelClass;
use crate::stats::shorten;

/// Kernels up to this length count as short, in nanoseconds.
const SHORT_NS: i64 = 20_000;
/// Times that a pair has to be seen.
const REPEATS: usize = 5;
/// Part of the kernel time from which pairs matter, in percent.
const TIME_SHARE: f64 = 2.0;

/// Launches of a kernel, and of a pair of neighbours on one stream.
#[derive(Clone, Copy, Default)]
struct Sum {
    count: usize,
    total_ns: i64,
}

/// A pair of neighbours.
struct Pair {
    count: usize,
    /// Both kernels, without what is between them.
    kernels_ns: i64,
    /// The idle time between them.
    gap_ns: i64,
    first: u32,
    /// The range around all of them.
    path: PathId,
}

/// Time of the kernels of all pairs, each once, and what fusing could save at most: pairs that share
/// a kernel are a chain, of which the longest kernel stays, without the idle time between.
fn chains(pairs: &HashMap<(u32, u32), Pair>, total_ns: impl Fn(u32) -> i64) -> (i64, i64) {
    let next: HashMap<u32, u32> = pairs.keys().copied().collect();
    let behind: HashSet<u32> = next.values().copied().collect();
    let (mut fused_ns, mut saved_ns) = (0, pairs.values().map(|pair| pair.gap_ns).sum());
    for first in next.keys().filter(|name| !behind.contains(*name)) {
        let chain = std::iter::successors(Some(*first), |name| next.get(name).copied());
        let times: Vec<i64> = chain.map(&total_ns).collect();
        let sum: i64 = times.iter().sum();
        fused_ns += sum;
        saved_ns += sum - times.iter().max().copied().unwrap_or(0);
    }
    (fused_ns, saved_ns)
}

pub(super) fn fusion(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    let kernels = &context.trace.kernels;
    if kernels.on_gpu.is_empty() {
        return Lack::absent("the trace holds no kernels").into();
    }
    let name = |row: usize| context.trace.functions[kernels.function[row] as usize].demangled.0;
    let length = |row: usize| kernels.on_gpu.end[row] - kernels.on_gpu.start[row];
    let mut order: Vec<u32> =
        (0..u32::try_from(kernels.on_gpu.len()).unwrap_or(u32::MAX)).collect();
    let key = |&row: &u32| (kernels.on_gpu.place[row as usize], kernels.on_gpu.start[row as usize]);
    if !order.is_sorted_by_key(key) {
        order.sort_by_key(key);
    }
    let mut sums: HashMap<u32, Sum> = HashMap::new();
    for row in 0..kernels.on_gpu.len() {
        let sum = sums.entry(name(row)).or_default();
        sum.count += 1;
        sum.total_ns += length(row);
    }
    let mut pairs: HashMap<(u32, u32), Pair> = HashMap::new();
    for neighbours in order.windows(2) {
        let [first, second] = [neighbours[0] as usize, neighbours[1] as usize];
        let gap = kernels.on_gpu.start[second] - kernels.on_gpu.end[first];
        if kernels.on_gpu.place[first] != kernels.on_gpu.place[second] || gap > SHORT_NS {
            continue;
        }
        let pair = pairs.entry((name(first), name(second))).or_insert(Pair {
            count: 0,
            kernels_ns: 0,
            gap_ns: 0,
            first: neighbours[0],
            path: context.path_id(neighbours[0]),
        });
        pair.path = context.around(pair.path, neighbours[0]);
        pair.count += 1;
        pair.kernels_ns += length(first) + length(second);
        pair.gap_ns += gap.max(0);
    }
    let text = |name: u32| context.trace.names.text(crate::model::names::Name(name));
    let short = |name: u32| {
        let Sum { count, total_ns } = sums[&name];
        total_ns <= SHORT_NS * i64::try_from(count).unwrap_or(i64::MAX)
    };
    let fusible = |name: u32| {
        let class = KernelClass::from_name(text(name));
        short(name)
            && !matches!(
                class,
                KernelClass::Matmul | KernelClass::Attention | KernelClass::Communication
            )
    };
    // Each runs only with the other: what one writes, nobody else between them reads.
    pairs.retain(|&(a, b), pair| {
        let alone = [a, b].iter().all(|name| sums[name].count == pair.count);
        a != b && alone && pair.count >= REPEATS && fusible(a) && fusible(b)
    });
    let total: i64 = sums.values().map(|sum| sum.total_ns).sum();
    let graphs = &context.trace.graphs.on_gpu;
    let whole: i64 = graphs.start.iter().zip(&graphs.end).map(|(start, end)| end - start).sum();
    let inspected = Inspected {
        seen: total,
        whole: total + whole,
        unit: Unit::KernelTime,
        missing: (whole > 0).then(|| {
            let record = context.platform.graph_nodes();
            format!("graphs were recorded whole; {record}")
        }),
    };
    let (fused_ns, saved_ns) = chains(&pairs, |name| sums[&name].total_ns);
    let share = percent(fused_ns, total);
    if share < TIME_SHARE {
        return Outcome::Checked(Vec::new(), inspected);
    }
    let evidence = pairs
        .iter()
        .map(|(&(a, b), pair)| {
            let [a, b] = [a, b].map(|name| shorten(&short_name(text(name)), 45));
            Evidence {
                what: format!("{a} → {b}"),
                count: pair.count,
                total_ns: Some(pair.kernels_ns),
                range: context.range(pair.path),
                span: Some((context.all.start(pair.first), context.all.end(pair.first))),
                place: Some(context.place_of(pair.first)),
            }
        })
        .collect();
    let found = Finding {
        id: "fusion",
        severity: Severity::Information,
        confidence: Confidence::Low,
        title: format!(
            "{} pairs of short kernels always run one after the other: {share:.1} % of the kernel \
             time could be fused",
            pairs.len()
        ),
        measured: Measure { value: share, unit: "% of kernel time" },
        threshold: Measure { value: TIME_SHARE, unit: "% of kernel time" },
        recoverable_ns: Some(saved_ns),
        remedy: Remedy::NotReplayed,
        replayed: None,
        evidence: most_expensive(evidence),
        advice: "compute both in one kernel, which keeps what is between them in registers; \
                 torch.compile fuses elementwise kernels"
            .to_owned(),
        false_positive: "the second does not read what the first wrote, or needs all of it",
    };
    Outcome::Checked(vec![found], inspected)
}
