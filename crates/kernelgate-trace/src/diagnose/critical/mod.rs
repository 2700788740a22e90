//! The critical path of a trace, and what shorter kernels, launches or transfers would gain: the
//! recorded dependencies replayed.

pub mod gains;

use std::cmp::Reverse;

use hashbrown::{HashMap, HashSet};

use crate::analyze::classes::OperationClass;
use crate::analyze::operations::{OperationId, OperationKind};
use crate::analyze::replay::{
    CriticalPathSegment, OperationDependencies, ReplayChange, ReplayedHostTime,
};
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::diagnose::critical::gains::{ChangeGain, CriticalPath, FasterPart};
use crate::diagnose::finding::{DiagnosisFinding, FindingRemedy, FusibleKernel, ReplayedGain};
use crate::diagnose::labels::readable_name;
use crate::diagnose::trace_facts::DiagnosisContext;

/// Maximum number of kernels that are replayed and listed.
const MAX_REPLAYED_KERNELS: usize = 3;

/// The critical path of a trace, empty without operations, and what mending each finding gains.
/// Findings must be sorted by savings before the critical path is computed.
pub(in crate::diagnose) fn critical_path(
    context: &DiagnosisContext<'_>,
    findings: &mut [DiagnosisFinding],
) -> CriticalPath {
    let host = &context.host;
    let Some(of) = OperationDependencies::new(context.trace, &host.launches, &host.wait_calls)
    else {
        DiagnosisFinding::sort_by_savings(findings);
        return CriticalPath::default();
    };
    let mut sums: HashMap<String, i64> = HashMap::new();
    let mut total_ns = 0;
    let mut names: HashMap<u32, String> = HashMap::new();
    of.critical_path(|segment, ns| {
        total_ns += ns;
        let label = match segment {
            CriticalPathSegment::Operation(id) => match context.classes.class_of_operation(id) {
                OperationClass::Compute => {
                    let function =
                        context.trace.kernels.function.at(context.all.kind_and_row(id).1);
                    let name = names.entry(function);
                    name.or_insert_with(|| readable_name(&context.all.name(id))).clone()
                }
                class => class.label().to_owned(),
            },
            other => other.label().to_owned(),
        };
        *sums.entry(label).or_default() += ns;
    });
    let mut segments: Vec<(String, i64)> = sums.into_iter().collect();
    segments.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let run = PreparedReplay { context, of, beside_ns: time_with_migrations(context) };
    run.replay_finding_remedies(findings, total_ns);
    CriticalPath { total_ns, segments, gains: run.gains_of_changes() }
}

/// A trace that is prepared for replays.
struct PreparedReplay<'a> {
    context: &'a DiagnosisContext<'a>,
    of: OperationDependencies<'a>,
    /// Nanoseconds of each kernel during which pages migrated.
    beside_ns: HashMap<OperationId, i64>,
}

/// The part of each kernel from its first migration to its last one; of a device that migrates
/// nothing, its page faults.
fn time_with_migrations(context: &DiagnosisContext<'_>) -> HashMap<OperationId, i64> {
    let all = &context.all;
    let [mut migrations, mut faulted] = [(); 2].map(|()| HashMap::<_, Vec<(i64, i64)>>::new());
    for id in all.ids().filter(|&id| context.is_page_migration(id)) {
        migrations.entry(context.process_and_device_of(id)).or_default().push(all.span(id));
    }
    let faults = &context.trace.page_faults;
    for row in (0..faults.start.len()).filter(|_| migrations.is_empty()) {
        let pid = context.trace.processes[faults.process[row] as usize].pid;
        let span = (faults.start[row], faults.end[row]);
        faulted.entry((pid, faults.device[row])).or_default().push(span);
    }
    migrations.extend(faulted);
    let unions: HashMap<(i64, u32), UnitedSpans> =
        migrations.into_iter().map(|(place, spans)| (place, UnitedSpans::new(spans))).collect();
    let mut beside_ns = HashMap::new();
    for id in all.ids().filter(|_| !unions.is_empty()) {
        if let (OperationKind::Kernel, Some(union)) =
            (all.kind_and_row(id).0, unions.get(&context.process_and_device_of(id)))
        {
            match union.extent_inside(all.span(id)) {
                0 => {}
                ns => _ = beside_ns.insert(id, ns),
            }
        }
    }
    beside_ns
}

impl PreparedReplay<'_> {
    /// Replays the remedy of each finding alone, and together with the remedies of all earlier
    /// findings.
    fn replay_finding_remedies(&self, findings: &mut [DiagnosisFinding], span_ns: i64) {
        let mut alone: Vec<(FindingRemedy, i64)> = Vec::new();
        for finding in findings.iter_mut().filter(|of| of.remedy != FindingRemedy::NotReplayed) {
            let replayed = alone.iter().find(|(remedy, _)| *remedy == finding.remedy);
            let gain_ns = replayed.map_or_else(
                || {
                    let mut changes = CombinedChanges::default();
                    changes.add(&finding.remedy);
                    changes.gain_of_run(self)
                },
                |&(_, ns)| ns,
            );
            finding.limit_savings_to_gain(gain_ns, span_ns);
            finding.replayed = Some(ReplayedGain { alone_ns: gain_ns, further_ns: 0 });
            alone.push((finding.remedy.clone(), gain_ns));
        }
        DiagnosisFinding::sort_by_savings(findings);
        let mut together = CombinedChanges::default();
        let mut gained_ns = 0;
        for finding in findings.iter_mut() {
            let Some(ReplayedGain { alone_ns, .. }) = finding.replayed else { continue };
            let first = together == CombinedChanges::default();
            let before = together.clone();
            together.add(&finding.remedy);
            let all_ns = match (first, before == together) {
                (true, _) => alone_ns,
                (false, true) => gained_ns,
                (false, false) => together.gain_of_run(self),
            };
            finding.replayed = Some(ReplayedGain { alone_ns, further_ns: all_ns - gained_ns });
            gained_ns = all_ns;
        }
    }

    fn gains_of_changes(&self) -> Vec<ChangeGain> {
        let context = self.context;
        let trace = context.trace;
        // Compute time by function.
        let mut by_function = vec![0i64; trace.functions.len()];
        let on_gpu = &trace.kernels.on_gpu;
        for (row, function) in trace.kernels.function.iter().enumerate() {
            by_function[function as usize] += on_gpu.length(row);
        }
        let mut functions: Vec<(i64, u32)> = (0u32..)
            .zip(&by_function)
            .filter(|&(function, &ns)| {
                ns > 0 && context.classes.communication_of(function).is_none()
            })
            .map(|(function, &ns)| (ns, function))
            .collect();
        functions.sort_unstable_by_key(|&(ns, function)| (Reverse(ns), function));
        functions.truncate(MAX_REPLAYED_KERNELS);
        let mut changes: Vec<(FasterPart, CombinedChanges)> = Vec::new();
        let none = CombinedChanges::default;
        for &(_, function) in &functions {
            let name = trace.names.text(trace.functions[function as usize].demangled);
            let halved = CombinedChanges { functions: [(function, 0.5)].into(), ..none() };
            changes.push((FasterPart::Kernel(readable_name(name)), halved));
        }
        let has = |class: OperationClass| {
            let mut accounts = context.all.ids();
            accounts.any(|id| context.classes.class_of_operation(id) == class)
        };
        if context.host.operations_without_call < context.all.len() {
            changes.push((FasterPart::Launches, CombinedChanges { no_launches: true, ..none() }));
        }
        if !context.host.wait_calls.is_empty() {
            changes.push((FasterPart::Waits, CombinedChanges { no_waits: true, ..none() }));
        }
        let classes = [
            (FasterPart::Communication, OperationClass::Communication),
            (FasterPart::Copies, OperationClass::Copy),
            (FasterPart::Migrations, OperationClass::Migration),
        ];
        for (change, class) in classes {
            if has(class) {
                changes.push((change, CombinedChanges { without: vec![class], ..none() }));
            }
        }
        // Two at a time: each replay needs a number an operation.
        let replayed = |part: &[(FasterPart, CombinedChanges)]| -> Vec<ChangeGain> {
            part.iter().map(|(change, changes)| changes.gain_with_label(self, change)).collect()
        };
        let (first, second) = changes.split_at(changes.len() / 2);
        let mut gains = std::thread::scope(|scope| {
            let second = scope.spawn(|| replayed(second));
            let mut gains = replayed(first);
            match second.join() {
                Ok(second) => gains.extend(second),
                Err(panic) => std::panic::resume_unwind(panic),
            }
            gains
        });
        gains.sort_by(|a, b| {
            b.gain_ns.cmp(&a.gain_ns).then_with(|| a.change.label().cmp(&b.change.label()))
        });
        gains
    }
}

/// Changes of the program that are assumed together in a replay.
#[derive(Debug, Clone, Default, PartialEq)]
struct CombinedChanges {
    /// By function, the part of its kernels' time that remains after the changes.
    functions: HashMap<u32, f64>,
    /// By function and launch shape, the part of the kernels' time that remains after the changes.
    shapes: HashMap<(u32, u32), f64>,
    /// Operation classes that take no time in the replay.
    without: Vec<OperationClass>,
    /// Operations that take no time in the replay.
    operations: HashSet<OperationId>,
    no_launches: bool,
    no_waits: bool,
    /// Chains of kernels that are one kernel, by function.
    fused: HashMap<u32, FusibleKernel>,
    /// Times in which the host paused, which the replay removes.
    pauses: Vec<(i64, i64)>,
    /// Whether the host takes no time between its launch calls.
    no_host: bool,
}

impl CombinedChanges {
    /// Adds the remedy of a finding; of two that make a kernel shorter the larger effect counts.
    fn add(&mut self, remedy: &FindingRemedy) {
        match remedy {
            FindingRemedy::NotReplayed => {}
            FindingRemedy::Graph => (self.no_launches, self.no_host) = (true, true),
            FindingRemedy::NoWaits => self.no_waits = true,
            FindingRemedy::WithoutPauses(spans) => {
                spans.iter().for_each(|&(start, end)| self.add_removed_pause(start, end));
            }
            FindingRemedy::Fused(kernels) => {
                self.fused.extend(kernels.iter().map(|of| (of.function, *of)))
            }
            FindingRemedy::Without(class) if self.without.contains(class) => {}
            FindingRemedy::Without(class) => self.without.push(*class),
            FindingRemedy::WithoutOperations(ids) => self.operations.extend(ids),
            FindingRemedy::Shorter(kernels) => {
                for of in kernels {
                    let left = self.shapes.entry((of.function, of.shape)).or_insert(1.0);
                    *left = left.min(of.left);
                }
            }
        }
    }

    /// Adds a host pause to remove; overlapping pauses are joined.
    fn add_removed_pause(&mut self, mut start: i64, mut end: i64) {
        self.pauses.retain(|&(from, to)| {
            let apart = to < start || end < from;
            if !apart {
                (start, end) = (start.min(from), end.max(to));
            }
            apart
        });
        self.pauses.push((start, end));
    }

    /// The remaining duration of an operation after the changes.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn changed_length(&self, run: &PreparedReplay<'_>, id: OperationId, ns: i64) -> i64 {
        let context = run.context;
        let ns = match run
            .beside_ns
            .get(&id)
            .filter(|_| self.without.contains(&OperationClass::Migration))
        {
            Some(beside) => ns - beside,
            None => ns,
        };
        if !self.without.is_empty()
            && self.without.contains(&context.classes.class_of_operation(id))
        {
            return 0;
        }
        if !self.operations.is_empty() && self.operations.contains(&id) {
            return 0;
        }
        if self.functions.is_empty() && self.shapes.is_empty() && self.fused.is_empty() {
            return ns;
        }
        let (OperationKind::Kernel, row) = context.all.kind_and_row(id) else { return ns };
        let kernels = &context.trace.kernels;
        let shape = || {
            let key = (kernels.function.at(row), kernels.shape.get(row)?);
            self.shapes.get(&key)
        };
        let left = self.functions.get(&kernels.function.at(row)).or_else(shape);
        let ns = left.map_or(ns, |left| (ns as f64 * left).round() as i64);
        let Some(fused) = self.fused.get(&kernels.function.at(row)) else { return ns };
        // If a fused operation is removed, the idle gap before it is removed too.
        let before = if fused.follows { run.of.gap_before(id) } else { 0 };
        if fused.stays { ns - before } else { -before }
    }

    fn gain_of_run(&self, run: &PreparedReplay<'_>) -> i64 {
        run.of.trace_gain_ns(&ReplayChange {
            length: &|id, ns| self.changed_length(run, id, ns),
            launches: !self.no_launches,
            waits: !self.no_waits,
            host: match (self.no_host, &self.pauses[..]) {
                (true, _) => ReplayedHostTime::Scaled(0.0),
                (false, []) => ReplayedHostTime::Recorded,
                (false, pauses) => ReplayedHostTime::WithoutPauses(pauses),
            },
        })
    }

    fn gain_with_label(&self, run: &PreparedReplay<'_>, change: &FasterPart) -> ChangeGain {
        let all = &run.context.all;
        let removed = |id: OperationId| {
            let ns = all.length(id);
            ns - self.changed_length(run, id, ns)
        };
        let shorter = !self.functions.is_empty() || !self.without.is_empty();
        ChangeGain {
            change: change.clone(),
            removed_ns: shorter.then(|| all.ids().map(removed).sum()),
            gain_ns: self.gain_of_run(run),
        }
    }
}
