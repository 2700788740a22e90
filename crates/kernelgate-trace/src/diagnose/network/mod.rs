//! Analyses a traced neural network by phases (forward, backward, optimizer): kernel times, host
//! against GPU time, and softmax against attention's matrix products.
//!
//! Phases are recognised by the names of ranges, in the module `phase`.

mod attention;
mod json;
mod phase;
mod text;

use hashbrown::HashMap;

pub use attention::{AttentionKernels, KernelsOfAttentionOperation};
pub use phase::{AttentionOperation, TrainingPhase};

use super::host::gap_cause::IdleCauseKind;
use super::trace_facts::DiagnosisContext;
use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId};
use crate::analyze::timeline::idle_time::exclusive_busy_ns_of_operations;
use crate::analyze::work::kernel_kinds::KernelWorkClass;
use crate::model::interned_names::InternedNameId;
use phase::RangeEnclosesPhaseOrPart;

/// Smallest share of the time for which a kernel or an idle cause is listed.
pub const MIN_TIME_SHARE_TO_LIST: f64 = 0.01;

/// Launches and time of one kernel name in one pass of a phase, as mean over all passes.
#[derive(Debug, Clone, PartialEq)]
pub struct MeanKernelUsePerPass {
    pub kernel_name: String,
    /// Kind of work of the kernel, as its name shows.
    pub class: KernelWorkClass,
    pub launches_per_pass: f64,
    /// Mean kernel time in one pass, nanoseconds.
    pub kernel_ns_per_pass: f64,
}

/// Times of a phase (forward, backward or optimizer) in one pass, as mean over all passes.
#[derive(Debug, Clone, PartialEq)]
pub struct MeanPhaseTimesPerPass {
    pub phase: TrainingPhase,
    /// Number of passes of the phase in the trace.
    pub passes: usize,
    /// Time of the program's own ranges around the phase on the host, nanoseconds; `None` without
    /// such ranges, or if they are in a CUDA graph.
    pub host_ns_per_pass: Option<f64>,
    /// Nanoseconds in which an operation of the phase ran while no operation of another phase that
    /// had started earlier ran.
    pub busy_ns_per_pass: f64,
    /// Idle time of the GPU before operations of the phase, nanoseconds.
    pub idle_ns_per_pass: f64,
    /// Idle time of the phase by cause, nanoseconds, the longest first.
    pub idle_ns_by_cause: Vec<(IdleCauseKind, f64)>,
    /// Kernels of the phase by time, the longest first.
    pub kernels: Vec<MeanKernelUsePerPass>,
}

/// Phases of a neural network in a trace: forward, backward and optimizer.
#[derive(Debug, Clone, PartialEq)]
pub struct PhasesOfNetwork {
    /// Phases that occur in the trace, in the order of a training step.
    pub phases: Vec<MeanPhaseTimesPerPass>,
    /// Attention kernels of the forward passes, if attention has a range for each of its
    /// operations.
    pub attention: Option<AttentionKernels>,
    /// Forward passes.
    pub forward_passes: usize,
    /// Time of kernels outside all phases divided by the time of all kernels, 0 to 1.
    pub kernel_time_share_outside_phases: f64,
}

impl PhasesOfNetwork {
    pub fn times_of_phase(&self, phase: TrainingPhase) -> Option<&MeanPhaseTimesPerPass> {
        self.phases.iter().find(|of| of.phase == phase)
    }

    /// Whether the network has a backward pass, which computes gradients.
    pub fn has_backward_phase(&self) -> bool {
        self.times_of_phase(TrainingPhase::Backward).is_some()
    }

    /// Kernels of one whole training step by time, the longest first.
    pub fn kernels_of_training_step(&self) -> Vec<MeanKernelUsePerPass> {
        let mut kernels: Vec<MeanKernelUsePerPass> = Vec::new();
        for kernel in self.phases.iter().flat_map(|phase| &phase.kernels) {
            match kernels.iter_mut().find(|known| known.kernel_name == kernel.kernel_name) {
                Some(known) => {
                    known.launches_per_pass += kernel.launches_per_pass;
                    known.kernel_ns_per_pass += kernel.kernel_ns_per_pass;
                }
                None => kernels.push(kernel.clone()),
            }
        }
        sort_by_mean_kernel_time(&mut kernels);
        kernels
    }
}

/// Sum of the mean kernel times per pass, nanoseconds.
pub fn total_kernel_ns_per_pass(kernels: &[MeanKernelUsePerPass]) -> f64 {
    kernels.iter().map(|kernel| kernel.kernel_ns_per_pass).sum()
}

/// Returns the share of the kernel time of each kind of work, 0 to 1, the largest first.
pub fn kernel_time_share_by_work_class(
    kernels: &[MeanKernelUsePerPass],
) -> Vec<(KernelWorkClass, f64)> {
    let all = total_kernel_ns_per_pass(kernels).max(1.0);
    let mut shares: Vec<(KernelWorkClass, f64)> = Vec::new();
    for kernel in kernels {
        match shares.iter_mut().find(|(class, _)| *class == kernel.class) {
            Some((_, share)) => *share += kernel.kernel_ns_per_pass / all,
            None => shares.push((kernel.class, kernel.kernel_ns_per_pass / all)),
        }
    }
    shares.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    shares
}

fn sort_by_mean_kernel_time(kernels: &mut [MeanKernelUsePerPass]) {
    kernels.sort_by(|a, b| {
        b.kernel_ns_per_pass
            .total_cmp(&a.kernel_ns_per_pass)
            .then_with(|| a.kernel_name.cmp(&b.kernel_name))
    });
}

/// Returns the phases of the network in a trace; `None` if no range names a phase.
#[allow(clippy::cast_precision_loss)]
pub(super) fn find_phases_of_network(context: &DiagnosisContext<'_>) -> Option<PhasesOfNetwork> {
    let places = PhaseOfEachRangePath::find_phase_of_each_range_path(context);
    let kernels = &context.trace.kernels;
    let operation_of = |row: usize| {
        let path = context.range_path_of_operation(u32::try_from(row).unwrap_or(u32::MAX));
        let forward =
            places.phase_of_range_path(path).is_none_or(|phase| phase == TrainingPhase::Forward);
        places.attention_operation_of_path[path as usize].filter(|_| forward)
    };
    let attention = AttentionKernels::sum_attention_kernels(context, operation_of);
    let mut sums: [PhaseTimesOfAllPasses; 3] = Default::default();
    let own_ns = exclusive_busy_ns_of_operations(context.trace);
    let (mut all_ns, mut outside_ns) = (0, 0);
    for id in context.operations.all_operation_ids() {
        let phase = places.phase_of_range_path(context.range_path_of_operation(id));
        if let Some(phase) = phase {
            sums[phase as usize].total_busy_ns += own_ns.at(id as usize);
        }
        let Some(function) = kernels.function_index.decoded_row(id as usize) else { continue };
        let kernel_ns = context.operations.operation_length_ns(id);
        all_ns += kernel_ns;
        match phase {
            Some(phase) => {
                let name = context.trace.functions[function as usize].demangled_name;
                let (launches, ns) =
                    sums[phase as usize].launches_and_ns_by_kernel_name.entry(name).or_default();
                *launches += 1;
                *ns += kernel_ns;
            }
            None => outside_ns += kernel_ns,
        }
    }
    for gap in context.activities.iter().flat_map(|of| of.gaps.iter(&context.operations)) {
        let [before, after] = [gap.operation_before_gap, gap.operation_after_gap]
            .map(|id| places.phase_of_range_path(context.range_path_of_operation(id)));
        if let Some(phase) = after.filter(|_| before == after) {
            for ((kind, _), ns) in context.causes_and_ns_of_idle_gap(&gap) {
                *sums[phase as usize].idle_ns_by_cause.entry(kind).or_default() += ns;
            }
        }
    }
    let passes = TrainingPhase::ALL_TRAINING_PHASES
        .map(|phase| places.number_of_passes_of_phase(context, phase));
    let some = TrainingPhase::ALL_TRAINING_PHASES
        .into_iter()
        .zip(sums)
        .filter(|(_, sum)| !sum.launches_and_ns_by_kernel_name.is_empty());
    let used = |(phase, sum): (TrainingPhase, PhaseTimesOfAllPasses)| {
        let host_ns = places.host_ns[phase as usize];
        sum.into_mean_per_pass(context, phase, passes[phase as usize], host_ns)
    };
    let phases: Vec<MeanPhaseTimesPerPass> = some.map(used).collect();
    let passes = passes[TrainingPhase::Forward as usize];
    let outside = if phases.is_empty() { 0.0 } else { outside_ns as f64 / all_ns.max(1) as f64 };
    let any = !phases.is_empty() || attention.is_some();
    any.then_some(PhasesOfNetwork {
        phases,
        attention,
        forward_passes: passes,
        kernel_time_share_outside_phases: outside,
    })
}

/// For each range path of the trace, its phase and its attention operation.
struct PhaseOfEachRangePath {
    phase_of_path: Vec<Option<TrainingPhase>>,
    attention_operation_of_path: Vec<Option<AttentionOperation>>,
    /// Phase to which everything outside the ranges of phases is assigned; `None` if that is no
    /// phase.
    phase_outside_ranges: Option<TrainingPhase>,
    /// For each phase, the number of ranges that the program itself opened around the whole phase.
    opened: [usize; 3],
    /// For each phase, the total time that its ranges lasted on the host, nanoseconds.
    host_ns: [i64; 3],
}

impl PhaseOfEachRangePath {
    fn find_phase_of_each_range_path(context: &DiagnosisContext<'_>) -> Self {
        let paths = &context.host_summary.paths;
        let (mut phases, mut attention) = (vec![None; paths.len()], vec![None; paths.len()]);
        let (mut opened, mut host_ns, mut found) = ([0; 3], [0; 3], [false; 3]);
        // A path has a larger number than its parent path, so the parent's phase is already known.
        for path in (1..).take(paths.len() - 1) {
            let name = context.trace.names.text_of_name(paths.last_name_of_path(path));
            let around = paths.parent_of_range_path(path) as usize;
            attention[path as usize] = attention[around]
                .or_else(|| AttentionOperation::attention_operation_from_range_name(name));
            let own = TrainingPhase::phase_and_extent_from_range_name(name);
            phases[path as usize] = own.map(|(phase, _)| phase).or(phases[around]);
            let Some((phase, extent)) = own else { continue };
            found[phase as usize] = true;
            if extent == RangeEnclosesPhaseOrPart::AroundWholePhase
                && phases[around] != Some(phase)
                && let Some(ranges) = context.host_summary.count_and_time_of_path.get(path as usize)
            {
                opened[phase as usize] += ranges.range_count;
                host_ns[phase as usize] += ranges.total_host_ns;
            }
        }
        let [forward, rest @ ..] = found;
        // In a recording of kernelgate, parts outside phase ranges belong to the forward pass,
        // unless ranges name other phases.
        let others = rest.contains(&true) || !context.trace.declared_parts.is_empty();
        let outside = (!forward && others).then_some(TrainingPhase::Forward);
        Self {
            phase_of_path: phases,
            attention_operation_of_path: attention,
            phase_outside_ranges: outside,
            opened,
            host_ns,
        }
    }

    fn phase_of_range_path(&self, path: RangePathId) -> Option<TrainingPhase> {
        match path {
            ROOT_RANGE_PATH => self.phase_outside_ranges,
            path => self.phase_of_path[path as usize].or(self.phase_outside_ranges),
        }
    }

    /// Returns the number of passes of a phase: launches of a recorded kernelgate case, otherwise
    /// the program's ranges around the phase, otherwise those around the forward pass.
    fn number_of_passes_of_phase(
        &self,
        context: &DiagnosisContext<'_>,
        phase: TrainingPhase,
    ) -> usize {
        let opened =
            |phase: TrainingPhase| Some(self.opened[phase as usize]).filter(|count| *count > 0);
        match context.number_of_recorded_case_launches() {
            1 => opened(phase).or_else(|| opened(TrainingPhase::Forward)).unwrap_or(1),
            steps => steps,
        }
    }
}

/// Busy time, idle time and kernels of one phase, summed over all its passes.
#[derive(Default)]
struct PhaseTimesOfAllPasses {
    total_busy_ns: i64,
    idle_ns_by_cause: HashMap<IdleCauseKind, i64>,
    /// By kernel name, the number of launches and their total time, nanoseconds.
    launches_and_ns_by_kernel_name: HashMap<InternedNameId, (usize, i64)>,
}

impl PhaseTimesOfAllPasses {
    #[allow(clippy::cast_precision_loss)]
    fn into_mean_per_pass(
        self,
        context: &DiagnosisContext<'_>,
        phase: TrainingPhase,
        passes: usize,
        host_ns: i64,
    ) -> MeanPhaseTimesPerPass {
        let each = |sum: i64| sum as f64 / passes as f64;
        let kernel = |(name, (launches, ns)): (InternedNameId, (usize, i64))| {
            let name = context.trace.names.text_of_name(name);
            MeanKernelUsePerPass {
                kernel_name: name.to_owned(),
                class: KernelWorkClass::work_class_from_kernel_name(name),
                launches_per_pass: launches as f64 / passes as f64,
                kernel_ns_per_pass: each(ns),
            }
        };
        let mut kernels: Vec<MeanKernelUsePerPass> =
            self.launches_and_ns_by_kernel_name.into_iter().map(kernel).collect();
        sort_by_mean_kernel_time(&mut kernels);
        let mut idle: Vec<(IdleCauseKind, f64)> =
            self.idle_ns_by_cause.into_iter().map(|(kind, ns)| (kind, each(ns))).collect();
        idle.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        MeanPhaseTimesPerPass {
            phase,
            passes,
            host_ns_per_pass: (host_ns > 0).then(|| each(host_ns)),
            busy_ns_per_pass: each(self.total_busy_ns),
            idle_ns_per_pass: idle.iter().map(|(_, ns)| ns).sum(),
            idle_ns_by_cause: idle,
            kernels,
        }
    }
}

impl DiagnosisContext<'_> {
    /// Returns the number of launches in a recording of a kernelgate case; 1 for other traces.
    fn number_of_recorded_case_launches(&self) -> usize {
        let steps = self.trace.metadata.get("steps").and_then(|steps| steps.parse().ok());
        steps.filter(|_| self.trace.metadata.contains_key("case")).unwrap_or(1)
    }
}
