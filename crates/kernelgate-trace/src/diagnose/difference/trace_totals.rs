//! The totals of a trace, in the parts that two traces are compared by.

use std::collections::BTreeMap;
use std::path::Path;

use hashbrown::HashMap;

use super::super::finding::TraceDiagnosis;
pub use super::super::host::FunctionCalls;
use super::super::host::gap_cause::{CauseAndName, IdleCauseKind};
use super::super::ncu_launches::{launch_duration_ns, launch_metric};
use super::super::trace_facts::DiagnosisContext;
use super::super::{rules, with_streamed_context};
use super::trace_setup::TraceSetup;
use crate::analyze::operations::{MEMSET_NAME, OperationId, OperationKind, memcpy_name};
use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::timeline::idle_time;
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::gpu::{LaunchShape, MemoryKind};
use crate::model::interned_names::without_numbers_in_name;

/// Kind of a part of the whole: operation or idle time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TracePartKind {
    /// Launches of a kernel.
    Kernel,
    /// Copies of a direction and between kinds of memory.
    Copy,
    /// Sets of memory.
    Set,
    /// Launches of graphs that were recorded whole.
    Graph,
    /// Idle time with a certain cause.
    Idle,
    /// Idle time whose cause is not in the trace.
    Unexplained,
}

impl TracePartKind {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Copy => "copy",
            Self::Set => "set",
            Self::Graph => "graph",
            Self::Idle => "idle",
            Self::Unexplained => "unexplained",
        }
    }
}

/// A part of the whole, identified by a key that is equal in both traces.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TracePart {
    pub kind: TracePartKind,
    /// The kernel, `[CUDA memcpy …]` with the kinds of memory, or the cause of idle time.
    pub name: String,
}

/// Count and times of a part of a trace.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CountAndTimes {
    /// Number of operations.
    pub count: usize,
    /// Sum of their durations, nanoseconds; operations that run at once count each in full.
    pub total_ns: i64,
    /// Nanoseconds in which this part ran and no operation that started earlier did. The `own_ns`
    /// of all parts add up to the whole time.
    pub own_ns: i64,
    /// Launch shapes of a kernel, with how often each was launched.
    pub shapes: BTreeMap<LaunchShape, usize>,
    /// Metrics of a kernel that Nsight Compute measured, summed over its launches.
    pub metrics: BTreeMap<&'static str, f64>,
}

impl CountAndTimes {
    fn add(&mut self, total_ns: i64, own_ns: i64) {
        self.count += 1;
        self.total_ns += total_ns;
        self.own_ns += own_ns;
    }

    /// Mean time of an operation, nanoseconds; 0 without operations.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean_ns(&self) -> f64 {
        self.total_ns as f64 / self.count.max(1) as f64
    }
}

/// Range path without numbers in its names, with the operations launched directly in its ranges.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RangePathSums {
    /// How many ranges.
    pub ranges: usize,
    /// Host time of all calls of the part, in nanoseconds.
    pub host_ns: i64,
    /// Operations launched in these ranges and in no inner range, with the idle time before them.
    pub launched: CountAndTimes,
}

/// A function, and the range that it was called in, of calls that launch or wait.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallSite {
    /// Name of the called function, without its version.
    pub function: String,
    /// The path of the innermost range around the calls, without numbers.
    pub range: Option<String>,
}

/// Summed times of one trace, for a comparison.
#[derive(Debug, Clone)]
pub struct TraceSums {
    pub recorder: String,
    /// Machine and options of the trace.
    pub setup: TraceSetup,
    /// Time from the first operation to the last operation of all processes and devices; for Nsight
    /// Compute, the sum of all launches. Nanoseconds.
    pub whole_ns: i64,
    /// The time in which at least one operation ran, nanoseconds.
    pub busy_ns: i64,
    /// Processes on devices.
    pub activities: usize,
    /// The whole time by operation and by cause of idle time.
    pub parts: BTreeMap<TracePart, CountAndTimes>,
    /// The whole time by range of the launch; the key "" is outside of all ranges.
    pub places: BTreeMap<String, RangePathSums>,
    /// Calls of CUDA.
    pub calls: BTreeMap<CallSite, FunctionCalls>,
    /// Findings: rule and title.
    pub findings: Vec<(&'static str, String)>,
}

/// Metrics of Nsight Compute that are compared.
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

impl TraceSums {
    /// Sums up a trace.
    pub fn new(trace: &Trace) -> Self {
        Self::from_context(&DiagnosisContext::new(trace, !trace.work.is_empty()))
    }

    /// Totals of an export of any length, whose ranges and calls are read without being kept.
    /// `None` for a file of other formats than exports and reports of Nsight Systems.
    pub fn sum_streamed(path: &Path) -> Result<Option<TraceSums>, TraceError> {
        with_streamed_context(path, Self::from_context)
    }

    fn from_context(context: &DiagnosisContext<'_>) -> TraceSums {
        let trace = context.trace;
        let TraceDiagnosis { recorder, quality, findings, .. } = rules::apply_all_rules(context);
        let findings = quality.into_iter().chain(findings);
        let mut sums = Self {
            setup: TraceSetup::new(trace, &recorder),
            recorder,
            whole_ns: context
                .activities
                .iter()
                .map(idle_time::DeviceActivity::span_of_gaps_ns)
                .sum(),
            busy_ns: context.activities.iter().map(|activity| activity.busy_ns).sum(),
            activities: context.activities.len(),
            parts: BTreeMap::new(),
            places: BTreeMap::new(),
            calls: BTreeMap::new(),
            findings: findings.map(|finding| (finding.id, finding.title)).collect(),
        };
        if context.all.is_empty() {
            sums.add_profiled_launches(trace);
        }
        let mut places = SumsByRangePath::new(context);
        sums.add_operation_times(context, &mut places);
        sums.add_idle_times(context, &mut places);
        sums.add_call_times(context, &places);
        sums.places = places.texts.into_iter().zip(places.sums).collect();
        sums
    }

    fn add_operation_times(
        &mut self,
        context: &DiagnosisContext<'_>,
        places: &mut SumsByRangePath,
    ) {
        let own = idle_time::exclusive_busy_times(context.trace);
        let mut parts: HashMap<OperationNameKey, CountAndTimes> = HashMap::new();
        for id in context.all.ids() {
            let total_ns = context.all.length(id);
            let own_ns = own.at(id as usize);
            let part = parts.entry(OperationNameKey::new(context, id)).or_default();
            part.add(total_ns, own_ns);
            if let (OperationKind::Kernel, row) = context.all.kind_and_row(id)
                && let Some(shape) = context.trace.kernels.shape.get(row)
            {
                *part.shapes.entry(context.trace.shapes[shape as usize]).or_default() += 1;
            }
            places.at(context, id).launched.add(total_ns, own_ns);
        }
        for (key, amount) in parts {
            // Kernels with one name may be several functions.
            let sum = self.parts.entry(key.trace_part_of_key(context.trace)).or_default();
            sum.count += amount.count;
            sum.total_ns += amount.total_ns;
            sum.own_ns += amount.own_ns;
            for (shape, count) in amount.shapes {
                *sum.shapes.entry(shape).or_default() += count;
            }
        }
    }

    fn add_idle_times(&mut self, context: &DiagnosisContext<'_>, places: &mut SumsByRangePath) {
        let mut causes: HashMap<CauseAndName, CountAndTimes> = HashMap::new();
        let gaps = context.activities.iter().flat_map(|activity| activity.gaps.iter(&context.all));
        for gap in gaps {
            for (why, ns) in context.causes_of_gap(&gap) {
                causes.entry(why).or_default().add(ns, ns);
            }
            places.at(context, gap.after).launched.own_ns += gap.gap_ns();
        }
        for ((kind, name), amount) in causes {
            let function = context.blamed_function_or_range((kind, name));
            let function = function.map_or(String::new(), |function| format!(": {function}"));
            let part = match kind {
                IdleCauseKind::Unknown | IdleCauseKind::Clocks => TracePartKind::Unexplained,
                _ => TracePartKind::Idle,
            };
            let name = format!("{}{function}", kind.label());
            // Versions of one function, such as `cudaMalloc_v3020`, are summed together.
            let sum = self.parts.entry(TracePart { kind: part, name }).or_default();
            sum.count += amount.count;
            sum.total_ns += amount.total_ns;
            sum.own_ns += amount.own_ns;
        }
    }

    fn add_call_times(&mut self, context: &DiagnosisContext<'_>, places: &SumsByRangePath) {
        for (&(name, path), sum) in &context.host.sites {
            let function = context.function_name(name).to_owned();
            let place = path.map(|path| places.of_path[path as usize]);
            let range = place.map(|place| places.texts[place as usize].clone());
            // Versions of one function, such as `cudaMalloc_v3020`, count as one.
            self.calls.entry(CallSite { function, range }).or_default().add(*sum);
        }
    }

    /// Kernel launches that were profiled one by one have no timeline: their sum is the whole.
    fn add_profiled_launches(&mut self, trace: &Trace) {
        for launch in &trace.profiled {
            let name = trace.names.text(launch.kernel).to_owned();
            let part =
                self.parts.entry(TracePart { kind: TracePartKind::Kernel, name }).or_default();
            let ns = launch_duration_ns(trace, launch).unwrap_or(0);
            part.add(ns, ns);
            *part.shapes.entry(launch.shape).or_default() += 1;
            for name in COMPARED_NCU_METRICS {
                if let Some(value) = launch_metric(trace, launch, name) {
                    *part.metrics.entry(name).or_default() += value;
                }
            }
            self.whole_ns += ns;
            self.busy_ns += ns;
        }
    }
}

/// Key of an operation's name within one trace.
#[derive(PartialEq, Eq, Hash)]
enum OperationNameKey {
    Kernel(u32),
    Copy(u32, MemoryKind, MemoryKind),
    Set,
    Graph,
}

impl OperationNameKey {
    fn new(context: &DiagnosisContext<'_>, id: OperationId) -> Self {
        let trace = context.trace;
        match context.all.kind_and_row(id) {
            (OperationKind::Kernel, row) => {
                Self::Kernel(trace.functions[trace.kernels.function.at(row) as usize].demangled.0)
            }
            (OperationKind::Copy, row) => {
                let copies = &trace.copies;
                Self::Copy(copies.kind[row].0, copies.source[row], copies.target[row])
            }
            (OperationKind::Set, _) => Self::Set,
            // Graph ids are valid in one process only, so all graphs share one key.
            (OperationKind::Graph, _) => Self::Graph,
        }
    }

    fn trace_part_of_key(&self, trace: &Trace) -> TracePart {
        let text = |name: u32| trace.names.text(crate::model::interned_names::NameId(name));
        let (kind, name) = match self {
            Self::Kernel(name) => (TracePartKind::Kernel, text(*name).to_owned()),
            Self::Copy(kind, from, to) => {
                let unknown = [from, to].contains(&&MemoryKind::Unknown);
                let memory = format!(" ({} to {})", from.label(), to.label());
                let memory = if unknown { String::new() } else { memory };
                (TracePartKind::Copy, format!("{}{memory}", memcpy_name(text(*kind))))
            }
            Self::Set => (TracePartKind::Set, MEMSET_NAME.to_owned()),
            Self::Graph => (TracePartKind::Graph, "[CUDA graph]".to_owned()),
        };
        TracePart { kind, name }
    }
}

/// Sums of times by range path, ignoring numbers in names.
struct SumsByRangePath {
    /// The place of each path; 0 is outside of all ranges.
    of_path: Vec<u32>,
    texts: Vec<String>,
    sums: Vec<RangePathSums>,
}

impl SumsByRangePath {
    /// The ranges of a trace, with nothing launched in them yet.
    fn new(context: &DiagnosisContext<'_>) -> Self {
        let (trace, paths) = (context.trace, &context.host.paths);
        let mut places =
            Self { of_path: Vec::with_capacity(paths.len()), texts: Vec::new(), sums: Vec::new() };
        let mut known: HashMap<String, u32> = HashMap::new();
        for path in 0..RangePathId::try_from(paths.len()).unwrap_or(RangePathId::MAX) {
            let text = without_numbers_in_name(&paths.text(trace, path));
            let new = u32::try_from(known.len()).expect("fewer than 2^32 paths");
            places.of_path.push(*known.entry(text).or_insert(new));
        }
        places.sums.resize(known.len(), RangePathSums::default());
        places.texts.resize(known.len(), String::new());
        for (text, place) in known {
            places.texts[place as usize] = text;
        }
        for (&place, sum) in places.of_path.iter().zip(&context.host.of_path) {
            let place = &mut places.sums[place as usize];
            place.ranges += sum.count;
            place.host_ns += sum.host_ns;
        }
        places
    }

    /// The place at which an operation was launched.
    fn at(&mut self, context: &DiagnosisContext<'_>, id: OperationId) -> &mut RangePathSums {
        let path = context.host.launched_in.at(id as usize);
        &mut self.sums[self.of_path[path as usize] as usize]
    }
}
