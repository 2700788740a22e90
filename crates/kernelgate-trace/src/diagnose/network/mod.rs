//! A network by its phases: which kernels the time of inference and of training goes to, why host
//! and device times differ, and softmax against the matrix products of attention.
//!
//! Phases are ranges (`phase`).

mod attention;
mod json;
mod phase;
mod text;

use hashbrown::HashMap;

pub use attention::{AttentionOperationUse, AttentionUse};
pub use phase::{AttentionOperation, TrainingPhase};

use super::host::gap_cause::IdleCauseKind;
use super::trace_facts::DiagnosisContext;
use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId};
use crate::analyze::timeline::idle_time::exclusive_busy_times;
use crate::analyze::work::kernel_kinds::KernelClass;
use crate::model::interned_names::NameId;
use phase::PhaseExtent;

/// Part of the time from which a kernel or a cause is listed.
pub const MIN_LISTED_TIME_SHARE: f64 = 0.01;

/// A kernel in one pass, on average over all passes.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelUsePerPass {
    pub name: String,
    /// Kind of work of the kernel, by its name.
    pub class: KernelClass,
    pub launches: f64,
    /// Kernel time of the launches of one pass, nanoseconds.
    pub kernel_ns: f64,
}

/// A phase in one pass, on average over all passes.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseUsePerPass {
    pub phase: TrainingPhase,
    /// Passes in the trace.
    pub passes: usize,
    /// Time of the host in the program's ranges, in nanoseconds; absent without such, and where
    /// they are in a graph.
    pub host_ns: Option<f64>,
    /// Time in which an operation of the phase ran, and no operation of another phase that had
    /// started earlier.
    pub busy_ns: f64,
    /// Idle time of the device between the phase's operations.
    pub idle_ns: f64,
    /// The idle time by its cause, the longest first.
    pub idle: Vec<(IdleCauseKind, f64)>,
    /// Kernels of the phase in the order of their time, the longest first.
    pub kernels: Vec<KernelUsePerPass>,
}

/// The phases of a network in a trace, such as forward and backward.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkPhases {
    /// Phases that occur, in the order of a training step.
    pub phases: Vec<PhaseUsePerPass>,
    /// Attention of the forward passes, if attention has operations of its own.
    pub attention: Option<AttentionUse>,
    /// Forward passes.
    pub passes: usize,
    /// Part of the time of all kernels that is in no phase, 0 to 1.
    pub outside: f64,
}

impl NetworkPhases {
    pub fn use_in_phase(&self, phase: TrainingPhase) -> Option<&PhaseUsePerPass> {
        self.phases.iter().find(|of| of.phase == phase)
    }

    /// Whether gradients are computed.
    pub fn trains(&self) -> bool {
        self.use_in_phase(TrainingPhase::Backward).is_some()
    }

    /// Kernels of a whole training step in the order of their time, the longest first.
    pub fn step_kernels(&self) -> Vec<KernelUsePerPass> {
        let mut kernels: Vec<KernelUsePerPass> = Vec::new();
        for kernel in self.phases.iter().flat_map(|phase| &phase.kernels) {
            match kernels.iter_mut().find(|known| known.name == kernel.name) {
                Some(known) => {
                    known.launches += kernel.launches;
                    known.kernel_ns += kernel.kernel_ns;
                }
                None => kernels.push(kernel.clone()),
            }
        }
        sort_by_kernel_time(&mut kernels);
        kernels
    }
}

/// Total time of these kernels, nanoseconds.
pub fn total_kernel_ns(kernels: &[KernelUsePerPass]) -> f64 {
    kernels.iter().map(|kernel| kernel.kernel_ns).sum()
}

/// The part of the time of kernels by kind, 0 to 1, the largest first.
pub fn time_share_by_class(kernels: &[KernelUsePerPass]) -> Vec<(KernelClass, f64)> {
    let all = total_kernel_ns(kernels).max(1.0);
    let mut shares: Vec<(KernelClass, f64)> = Vec::new();
    for kernel in kernels {
        match shares.iter_mut().find(|(class, _)| *class == kernel.class) {
            Some((_, share)) => *share += kernel.kernel_ns / all,
            None => shares.push((kernel.class, kernel.kernel_ns / all)),
        }
    }
    shares.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    shares
}

fn sort_by_kernel_time(kernels: &mut [KernelUsePerPass]) {
    kernels.sort_by(|a, b| b.kernel_ns.total_cmp(&a.kernel_ns).then_with(|| a.name.cmp(&b.name)));
}

/// The phases of a trace, if its ranges name phases.
#[allow(clippy::cast_precision_loss)]
pub(super) fn network_phases(context: &DiagnosisContext<'_>) -> Option<NetworkPhases> {
    let places = PhasesOfPaths::new(context);
    let kernels = &context.trace.kernels;
    let operation_of = |row: usize| {
        let path = context.path_id_of_operation(u32::try_from(row).unwrap_or(u32::MAX));
        let forward = places.phase(path).is_none_or(|phase| phase == TrainingPhase::Forward);
        places.attention[path as usize].filter(|_| forward)
    };
    let attention = AttentionUse::new(context, operation_of);
    let mut sums: [TrainingPhaseSum; 3] = Default::default();
    let own_ns = exclusive_busy_times(context.trace);
    let (mut all_ns, mut outside_ns) = (0, 0);
    for id in context.all.ids() {
        let phase = places.phase(context.path_id_of_operation(id));
        if let Some(phase) = phase {
            sums[phase as usize].busy_ns += own_ns.at(id as usize);
        }
        let Some(function) = kernels.function.get(id as usize) else { continue };
        let kernel_ns = context.all.length(id);
        all_ns += kernel_ns;
        match phase {
            Some(phase) => {
                let name = context.trace.functions[function as usize].demangled;
                let (launches, ns) = sums[phase as usize].kernels.entry(name).or_default();
                *launches += 1;
                *ns += kernel_ns;
            }
            None => outside_ns += kernel_ns,
        }
    }
    for gap in context.activities.iter().flat_map(|of| of.gaps.iter(&context.all)) {
        let [before, after] =
            [gap.before, gap.after].map(|id| places.phase(context.path_id_of_operation(id)));
        if let Some(phase) = after.filter(|_| before == after) {
            for ((kind, _), ns) in context.causes_of_gap(&gap) {
                *sums[phase as usize].idle.entry(kind).or_default() += ns;
            }
        }
    }
    let passes = TrainingPhase::ALL_PHASES.map(|phase| places.passes_of_phase(context, phase));
    let some =
        TrainingPhase::ALL_PHASES.into_iter().zip(sums).filter(|(_, sum)| !sum.kernels.is_empty());
    let used = |(phase, sum): (TrainingPhase, TrainingPhaseSum)| {
        let host_ns = places.host_ns[phase as usize];
        sum.mean_over_passes(context, phase, passes[phase as usize], host_ns)
    };
    let phases: Vec<PhaseUsePerPass> = some.map(used).collect();
    let passes = passes[TrainingPhase::Forward as usize];
    let outside = if phases.is_empty() { 0.0 } else { outside_ns as f64 / all_ns.max(1) as f64 };
    let any = !phases.is_empty() || attention.is_some();
    any.then_some(NetworkPhases { phases, attention, passes, outside })
}

/// The phase and the operation of each path of ranges.
struct PhasesOfPaths {
    phases: Vec<Option<TrainingPhase>>,
    attention: Vec<Option<AttentionOperation>>,
    /// The phase that gets everything outside of all phases' ranges.
    outside: Option<TrainingPhase>,
    /// Ranges that the program opened around a phase.
    opened: [usize; 3],
    /// Host time of the ranges of each phase, nanoseconds.
    host_ns: [i64; 3],
}

impl PhasesOfPaths {
    fn new(context: &DiagnosisContext<'_>) -> Self {
        let paths = &context.host.paths;
        let (mut phases, mut attention) = (vec![None; paths.len()], vec![None; paths.len()]);
        let (mut opened, mut host_ns, mut found) = ([0; 3], [0; 3], [false; 3]);
        // A path has a larger number than its parent path.
        for path in (1..).take(paths.len() - 1) {
            let name = context.trace.names.text(paths.name(path));
            let around = paths.parent_path(path) as usize;
            attention[path as usize] =
                attention[around].or_else(|| AttentionOperation::phase_of_range(name));
            let own = TrainingPhase::from_range_name(name);
            phases[path as usize] = own.map(|(phase, _)| phase).or(phases[around]);
            let Some((phase, extent)) = own else { continue };
            found[phase as usize] = true;
            if extent == PhaseExtent::AroundPhase
                && phases[around] != Some(phase)
                && let Some(ranges) = context.host.of_path.get(path as usize)
            {
                opened[phase as usize] += ranges.count;
                host_ns[phase as usize] += ranges.host_ns;
            }
        }
        let [forward, rest @ ..] = found;
        // The parts of a recorded network belong to its forward pass, unless the ranges differ.
        let others = rest.contains(&true) || !context.trace.parts.is_empty();
        let outside = (!forward && others).then_some(TrainingPhase::Forward);
        Self { phases, attention, outside, opened, host_ns }
    }

    fn phase(&self, path: RangePathId) -> Option<TrainingPhase> {
        match path {
            ROOT_PATH => self.outside,
            path => self.phases[path as usize].or(self.outside),
        }
    }

    /// Passes of a phase in the trace: launches of a recorded case, else the ranges around it, else
    /// as many as of the forward pass.
    fn passes_of_phase(&self, context: &DiagnosisContext<'_>, phase: TrainingPhase) -> usize {
        let opened =
            |phase: TrainingPhase| Some(self.opened[phase as usize]).filter(|count| *count > 0);
        match context.recorded_step_count() {
            1 => opened(phase).or_else(|| opened(TrainingPhase::Forward)).unwrap_or(1),
            steps => steps,
        }
    }
}

/// Sums over all passes of one phase of a network.
#[derive(Default)]
struct TrainingPhaseSum {
    busy_ns: i64,
    idle: HashMap<IdleCauseKind, i64>,
    /// Launches and their time by name of the kernel.
    kernels: HashMap<NameId, (usize, i64)>,
}

impl TrainingPhaseSum {
    #[allow(clippy::cast_precision_loss)]
    fn mean_over_passes(
        self,
        context: &DiagnosisContext<'_>,
        phase: TrainingPhase,
        passes: usize,
        host_ns: i64,
    ) -> PhaseUsePerPass {
        let each = |sum: i64| sum as f64 / passes as f64;
        let kernel = |(name, (launches, ns)): (NameId, (usize, i64))| {
            let name = context.trace.names.text(name);
            KernelUsePerPass {
                name: name.to_owned(),
                class: KernelClass::from_kernel_name(name),
                launches: launches as f64 / passes as f64,
                kernel_ns: each(ns),
            }
        };
        let mut kernels: Vec<KernelUsePerPass> = self.kernels.into_iter().map(kernel).collect();
        sort_by_kernel_time(&mut kernels);
        let mut idle: Vec<(IdleCauseKind, f64)> =
            self.idle.into_iter().map(|(kind, ns)| (kind, each(ns))).collect();
        idle.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        PhaseUsePerPass {
            phase,
            passes,
            host_ns: (host_ns > 0).then(|| each(host_ns)),
            busy_ns: each(self.busy_ns),
            idle_ns: idle.iter().map(|(_, ns)| ns).sum(),
            idle,
            kernels,
        }
    }
}

impl DiagnosisContext<'_> {
    /// Launches that a recording of a case holds; 1 of other traces.
    fn recorded_step_count(&self) -> usize {
        let steps = self.trace.metadata.get("steps").and_then(|steps| steps.parse().ok());
        steps.filter(|_| self.trace.metadata.contains_key("case")).unwrap_or(1)
    }
}
