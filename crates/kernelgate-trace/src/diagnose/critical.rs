//! The critical path of a trace, and what shorter kernels, launches or transfers would gain: the
//! recorded dependencies replayed.

use hashbrown::HashMap;

use super::context::Context;
use super::labels::short_name;
use crate::analyze::classes::Class;
use crate::analyze::operations::{Kind, OperationId};
use crate::analyze::replay::{Change, Dependencies, LaunchCall, Segment};

/// Kernels that are replayed and listed.
const KERNELS: usize = 3;

/// A change of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Faster {
    /// A kernel takes half as long.
    Kernel(String),
    /// Launch calls take no time.
    Launches,
    /// The host does not wait for the GPU.
    Waits,
    /// Communication takes no time.
    Communication,
    /// Copies take no time.
    Copies,
    /// Page migrations take no time, nor the part of kernels beside them.
    Migrations,
}

impl Faster {
    /// As text.
    pub fn label(&self) -> String {
        match self {
            Self::Kernel(name) => format!("half the time of {name}"),
            Self::Launches => "launch calls that take no time".to_owned(),
            Self::Waits => "a host that does not wait for the GPU".to_owned(),
            Self::Communication => "communication that takes no time".to_owned(),
            Self::Copies => "copies that take no time".to_owned(),
            Self::Migrations => "page migrations that take no time".to_owned(),
        }
    }
}

/// The gain of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gain {
    /// The change.
    pub change: Faster,
    /// The recorded time that the change removes, nanoseconds; `None` where it has no sum.
    pub removed_ns: Option<i64>,
    /// Nanoseconds that the trace is shorter.
    pub gain_ns: i64,
}

/// The critical path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriticalPath {
    /// From the first start to the last end, nanoseconds.
    pub total_ns: i64,
    /// Its segments by kind, the longest first; they add up to the total.
    pub segments: Vec<(String, i64)>,
    /// Gains of changes, the largest first.
    pub gains: Vec<Gain>,
}

impl CriticalPath {
    /// The gain of the change that mends a finding.
    pub fn gain_of_rule(&self, rule: &str) -> Option<i64> {
        let change = match rule {
            "launch-bound" => Faster::Launches,
            "sync-in-loop" => Faster::Waits,
            "exposed-communication" => Faster::Communication,
            "exposed-copy" | "synchronous-copy" | "pageable-copy" => Faster::Copies,
            "page-migration" => Faster::Migrations,
            _ => return None,
        };
        self.gains.iter().find(|gain| gain.change == change).map(|gain| gain.gain_ns)
    }
}

/// The critical path of a trace; empty without operations.
pub(super) fn critical_path(context: &Context<'_>) -> CriticalPath {
    let launch = |id: OperationId| {
        let call = context.host.launch(id)?;
        Some(LaunchCall { start: call.start, end: call.end(), thread: call.thread })
    };
    let Some(of) = Dependencies::new(context.trace, launch, &context.host.wait_calls) else {
        return CriticalPath::default();
    };
    let mut sums: HashMap<String, i64> = HashMap::new();
    let mut total_ns = 0;
    let mut names: HashMap<u32, String> = HashMap::new();
    for (segment, ns) in of.critical_path() {
        total_ns += ns;
        let label = match segment {
            Segment::Operation(id) => match context.classes.class(id) {
                Class::Compute => {
                    let function = context.trace.kernels.function[context.all.part(id).1];
                    let name = names.entry(function);
                    name.or_insert_with(|| short_name(&context.all.name(id))).clone()
                }
                class => class.label().to_owned(),
            },
            Segment::LaunchLatency => "from launch call to start".to_owned(),
            Segment::BetweenOperations => "between dependent operations".to_owned(),
            Segment::LaunchCalls => "launch calls".to_owned(),
            Segment::Host => "host between launch calls".to_owned(),
            Segment::WaitReturn => "return from waits".to_owned(),
            Segment::Unknown => "launches that the trace does not hold".to_owned(),
        };
        *sums.entry(label).or_default() += ns;
    }
    let mut segments: Vec<(String, i64)> = sums.into_iter().collect();
    segments.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    CriticalPath { total_ns, segments, gains: gains(context, &of) }
}

fn gains(context: &Context<'_>, of: &Dependencies<'_>) -> Vec<Gain> {
    let trace = context.trace;
    // Compute time by function.
    let mut by_function = vec![0i64; trace.functions.len()];
    let on_gpu = &trace.kernels.on_gpu;
    for (row, &function) in trace.kernels.function.iter().enumerate() {
        by_function[function as usize] += on_gpu.end[row] - on_gpu.start[row];
    }
    let mut functions: Vec<(i64, u32)> = (0u32..)
        .zip(&by_function)
        .filter(|&(function, &ns)| ns > 0 && context.classes.function(function).is_none())
        .map(|(function, &ns)| (ns, function))
        .collect();
    functions.sort_unstable_by_key(|&(ns, function)| (std::cmp::Reverse(ns), function));
    functions.truncate(KERNELS);
    let mut changes: Vec<(Faster, Target)> = Vec::new();
    for &(_, function) in &functions {
        let name = trace.names.text(trace.functions[function as usize].demangled);
        changes.push((Faster::Kernel(short_name(name)), Target::Function(function)));
    }
    let has = |class: Class| {
        let mut accounts = context.all.ids();
        accounts.any(|id| context.classes.class(id) == class)
    };
    if context.host.orphans < context.all.len() {
        changes.push((Faster::Launches, Target::Launches));
    }
    if !context.host.wait_calls.is_empty() {
        changes.push((Faster::Waits, Target::Waits));
    }
    let classes = [
        (Faster::Communication, Class::Communication),
        (Faster::Copies, Class::Copy),
        (Faster::Migrations, Class::Migration),
    ];
    for (change, class) in classes {
        if has(class) {
            changes.push((change, Target::Class(class)));
        }
    }
    let mut gains: Vec<Gain> = std::thread::scope(|scope| {
        // Two replays at a time: each needs three numbers an operation.
        let half = changes.len().div_ceil(2);
        let work = |part: &[(Faster, Target)]| {
            part.iter().map(|(change, target)| gain(context, of, change, *target)).collect()
        };
        let (first, second) = changes.split_at(half);
        let first = scope.spawn(move || -> Vec<Gain> { work(first) });
        let second: Vec<Gain> = work(second);
        let mut all = first.join().expect("a replay does not panic");
        all.extend(second);
        all
    });
    gains.sort_by(|a, b| {
        b.gain_ns.cmp(&a.gain_ns).then_with(|| a.change.label().cmp(&b.change.label()))
    });
    gains
}

/// The operations or calls that a change makes shorter.
#[derive(Debug, Clone, Copy)]
enum Target {
    Function(u32),
    Class(Class),
    Launches,
    Waits,
}

fn gain(context: &Context<'_>, of: &Dependencies<'_>, change: &Faster, target: Target) -> Gain {
    let hit = |id: OperationId| match target {
        Target::Function(function) => {
            let (kind, row) = context.all.part(id);
            kind == Kind::Kernel && context.trace.kernels.function[row] == function
        }
        Target::Class(class) => context.classes.class(id) == class,
        Target::Launches | Target::Waits => false,
    };
    let rest = |ns: i64| if matches!(target, Target::Function(_)) { ns / 2 } else { 0 };
    let length = |id: OperationId, ns: i64| if hit(id) { rest(ns) } else { ns };
    let launch = |ns: i64| if matches!(target, Target::Launches) { 0 } else { ns };
    let waits = !matches!(target, Target::Waits);
    let removed = |id: OperationId| {
        let ns = context.all.end(id) - context.all.start(id);
        ns - length(id, ns)
    };
    let removed_ns = match target {
        Target::Function(_) | Target::Class(_) => Some(context.all.ids().map(removed).sum()),
        Target::Launches | Target::Waits => None,
    };
    let gain_ns = of.gain(&Change { length: &length, launch: &launch, waits });
    Gain { change: change.clone(), removed_ns, gain_ns }
}
