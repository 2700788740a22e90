//! Finds the critical path of a trace, and replays its dependencies to compute what shorter
//! kernels, launches or transfers would gain.

pub mod gains;

use std::cmp::Reverse;

use hashbrown::{HashMap, HashSet};

use crate::analyze::classes::OperationClass;
use crate::analyze::operations::{GpuOperationId, GpuOperationKind};
use crate::analyze::replay::{
    CriticalPathSegmentKind, ReplayChange, ReplayedHostTime, TraceDependencies,
};
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::diagnose::critical::gains::{
    CriticalPathAndGains, HypotheticalSpeedup, SpeedupWithGain,
};
use crate::diagnose::finding::{
    DiagnosisFinding, FindingRemedy, KernelOfFusibleChain, ReplayedGainOfRemedy,
};
use crate::diagnose::labels::shortened_kernel_name_for_readers;
use crate::diagnose::trace_facts::DiagnosisContext;

/// Largest number of kernel names for which half the time is replayed.
const MAX_KERNELS_REPLAYED_AT_HALF_TIME: usize = 3;

/// Returns the critical path of a trace, empty without operations, and sets for each finding the
/// time that its remedy would gain. Callers sort the findings by savings before this call.
pub(in crate::diagnose) fn find_critical_path_and_gains(
    context: &DiagnosisContext<'_>,
    findings: &mut [DiagnosisFinding],
) -> CriticalPathAndGains {
    let host = &context.host_summary;
    let Some(of) =
        TraceDependencies::find_dependencies(context.trace, &host.launches, &host.wait_calls)
    else {
        DiagnosisFinding::sort_findings_by_savings(findings);
        return CriticalPathAndGains::default();
    };
    let mut sums: HashMap<String, i64> = HashMap::new();
    let mut total_ns = 0;
    let mut names: HashMap<u32, String> = HashMap::new();
    of.visit_critical_path_of_trace(|segment, ns| {
        total_ns += ns;
        let label = match segment {
            CriticalPathSegmentKind::RunningOperation(id) => {
                match context.classes.class_of_gpu_operation(id) {
                    OperationClass::ComputeKernel => {
                        let function = context
                            .trace
                            .kernels
                            .function_index
                            .at(context.operations.kind_and_table_row(id).1);
                        let name = names.entry(function);
                        name.or_insert_with(|| {
                            shortened_kernel_name_for_readers(
                                &context.operations.printed_operation_name(id),
                            )
                        })
                        .clone()
                    }
                    class => class.printed_operation_class().to_owned(),
                }
            }
            other => other.printed_segment_label().to_owned(),
        };
        *sums.entry(label).or_default() += ns;
    });
    let mut segments: Vec<(String, i64)> = sums.into_iter().collect();
    segments.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let run = TraceReplay {
        context,
        dependencies: of,
        page_migration_ns_by_kernel: kernel_time_during_page_migrations(context),
    };
    run.set_replayed_gains_of_findings(findings, total_ns);
    CriticalPathAndGains {
        critical_path_ns: total_ns,
        critical_path_ns_by_segment_kind: segments,
        gains: run.replay_hypothetical_speedups(),
    }
}

/// Dependencies of a trace, prepared for replays with changed durations.
struct TraceReplay<'a> {
    context: &'a DiagnosisContext<'a>,
    dependencies: TraceDependencies<'a>,
    /// For each kernel during which pages migrated, the nanoseconds from the first to the last
    /// migration.
    page_migration_ns_by_kernel: HashMap<GpuOperationId, i64>,
}

/// Returns for each kernel the time from its first to its last page migration; on GPUs without
/// recorded migrations, from its page faults.
fn kernel_time_during_page_migrations(
    context: &DiagnosisContext<'_>,
) -> HashMap<GpuOperationId, i64> {
    let all = &context.operations;
    let [mut migrations, mut faulted] = [(); 2].map(|()| HashMap::<_, Vec<(i64, i64)>>::new());
    for id in all.all_operation_ids().filter(|&id| context.is_operation_page_migration(id)) {
        migrations
            .entry(context.process_id_and_gpu_of_operation(id))
            .or_default()
            .push(all.operation_start_and_end_ns(id));
    }
    let faults = &context.trace.page_faults;
    for row in (0..faults.start_ns.len()).filter(|_| migrations.is_empty()) {
        let pid = context.trace.processes[faults.process_index[row] as usize].pid;
        let span = (faults.start_ns[row], faults.end_ns[row]);
        faulted.entry((pid, faults.device[row])).or_default().push(span);
    }
    migrations.extend(faulted);
    let unions: HashMap<(i64, u32), UnionOfTimeSpans> = migrations
        .into_iter()
        .map(|(place, spans)| (place, UnionOfTimeSpans::union_of_spans(spans)))
        .collect();
    let mut beside_ns = HashMap::new();
    for id in all.all_operation_ids().filter(|_| !unions.is_empty()) {
        if let (GpuOperationKind::Kernel, Some(union)) =
            (all.kind_and_table_row(id).0, unions.get(&context.process_id_and_gpu_of_operation(id)))
        {
            match union.first_to_last_covered_ns_within(all.operation_start_and_end_ns(id)) {
                0 => {}
                ns => _ = beside_ns.insert(id, ns),
            }
        }
    }
    beside_ns
}

impl TraceReplay<'_> {
    /// Replays the remedy of each finding alone, and together with the remedies of all earlier
    /// findings.
    fn set_replayed_gains_of_findings(&self, findings: &mut [DiagnosisFinding], span_ns: i64) {
        let mut alone: Vec<(FindingRemedy, i64)> = Vec::new();
        for finding in
            findings.iter_mut().filter(|of| of.remedy != FindingRemedy::GainNotReplayable)
        {
            let replayed = alone.iter().find(|(remedy, _)| *remedy == finding.remedy);
            let gain_ns = replayed.map_or_else(
                || {
                    let mut changes = ChangesOfOneReplay::default();
                    changes.add_remedy_of_finding(&finding.remedy);
                    changes.ns_saved_in_replay(self)
                },
                |&(_, ns)| ns,
            );
            finding.limit_savings_and_severity_to_replay(gain_ns, span_ns);
            finding.replayed_gain =
                Some(ReplayedGainOfRemedy { saved_ns_alone: gain_ns, further_saved_ns: 0 });
            alone.push((finding.remedy.clone(), gain_ns));
        }
        DiagnosisFinding::sort_findings_by_savings(findings);
        let mut together = ChangesOfOneReplay::default();
        let mut gained_ns = 0;
        for finding in findings.iter_mut() {
            let Some(ReplayedGainOfRemedy { saved_ns_alone: alone_ns, .. }) = finding.replayed_gain
            else {
                continue;
            };
            let first = together == ChangesOfOneReplay::default();
            let before = together.clone();
            together.add_remedy_of_finding(&finding.remedy);
            let all_ns = match (first, before == together) {
                (true, _) => alone_ns,
                (false, true) => gained_ns,
                (false, false) => together.ns_saved_in_replay(self),
            };
            finding.replayed_gain = Some(ReplayedGainOfRemedy {
                saved_ns_alone: alone_ns,
                further_saved_ns: all_ns - gained_ns,
            });
            gained_ns = all_ns;
        }
    }

    fn replay_hypothetical_speedups(&self) -> Vec<SpeedupWithGain> {
        let context = self.context;
        let trace = context.trace;
        // Nanoseconds of kernels, summed by kernel function.
        let mut by_function = vec![0i64; trace.functions.len()];
        let on_gpu = &trace.kernels.on_gpu;
        for (row, function) in trace.kernels.function_index.iter_decoded_rows().enumerate() {
            by_function[function as usize] += on_gpu.operation_duration_ns(row);
        }
        let mut functions: Vec<(i64, u32)> = (0u32..)
            .zip(&by_function)
            .filter(|&(function, &ns)| {
                ns > 0 && context.classes.communication_of_kernel_function(function).is_none()
            })
            .map(|(function, &ns)| (ns, function))
            .collect();
        functions.sort_unstable_by_key(|&(ns, function)| (Reverse(ns), function));
        functions.truncate(MAX_KERNELS_REPLAYED_AT_HALF_TIME);
        let mut changes: Vec<(HypotheticalSpeedup, ChangesOfOneReplay)> = Vec::new();
        let none = ChangesOfOneReplay::default;
        for &(_, function) in &functions {
            let name = trace.names.text_of_name(trace.functions[function as usize].demangled_name);
            let halved = ChangesOfOneReplay {
                remaining_share_by_function: [(function, 0.5)].into(),
                ..none()
            };
            changes.push((
                HypotheticalSpeedup::HalvedKernelTime(shortened_kernel_name_for_readers(name)),
                halved,
            ));
        }
        let has = |class: OperationClass| {
            let mut accounts = context.operations.all_operation_ids();
            accounts.any(|id| context.classes.class_of_gpu_operation(id) == class)
        };
        if context.host_summary.operations_without_launch_call < context.operations.len() {
            changes.push((
                HypotheticalSpeedup::NoLaunchCallTime,
                ChangesOfOneReplay { launch_calls_take_no_time: true, ..none() },
            ));
        }
        if !context.host_summary.wait_calls.is_empty() {
            changes.push((
                HypotheticalSpeedup::NoHostWaits,
                ChangesOfOneReplay { host_waits_take_no_time: true, ..none() },
            ));
        }
        let classes = [
            (HypotheticalSpeedup::NoCommunicationTime, OperationClass::Communication),
            (HypotheticalSpeedup::NoCopyTime, OperationClass::Copy),
            (HypotheticalSpeedup::NoPageMigrationTime, OperationClass::PageMigration),
        ];
        for (change, class) in classes {
            if has(class) {
                changes.push((
                    change,
                    ChangesOfOneReplay { zero_time_operation_classes: vec![class], ..none() },
                ));
            }
        }
        // Only two replays run at the same time, because each replay stores a number for each
        // operation.
        let replayed =
            |part: &[(HypotheticalSpeedup, ChangesOfOneReplay)]| -> Vec<SpeedupWithGain> {
                part.iter()
                    .map(|(change, changes)| changes.gain_of_hypothetical_speedup(self, change))
                    .collect()
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
            b.gain_ns.cmp(&a.gain_ns).then_with(|| {
                a.change.printed_speedup_label().cmp(&b.change.printed_speedup_label())
            })
        });
        gains
    }
}

/// Hypothetical changes of the program that one replay assumes together.
#[derive(Debug, Clone, Default, PartialEq)]
struct ChangesOfOneReplay {
    /// For each kernel function, the share of its kernels' time that remains after the changes.
    remaining_share_by_function: HashMap<u32, f64>,
    /// For each kernel function and launch shape, the share of its kernels' time that remains after
    /// the changes.
    remaining_share_by_shape: HashMap<(u32, u32), f64>,
    /// Classes of operations that take no time in the replay.
    zero_time_operation_classes: Vec<OperationClass>,
    /// Single operations that take no time in the replay.
    zero_time_operations: HashSet<GpuOperationId>,
    launch_calls_take_no_time: bool,
    host_waits_take_no_time: bool,
    /// Kernel functions of chains that the replay treats as one fused kernel.
    fused_kernel_functions: HashMap<u32, KernelOfFusibleChain>,
    /// Spans in which the host paused, nanoseconds, which take no time in the replay.
    removed_host_pauses: Vec<(i64, i64)>,
    /// Whether the host's own time between its launch calls is zero in the replay.
    removes_host_time: bool,
}

impl ChangesOfOneReplay {
    /// Adds the remedy of a finding; if two remedies shorten the same kernels, the larger effect
    /// counts.
    fn add_remedy_of_finding(&mut self, remedy: &FindingRemedy) {
        match remedy {
            FindingRemedy::GainNotReplayable => {}
            FindingRemedy::LaunchAsCudaGraph => {
                (self.launch_calls_take_no_time, self.removes_host_time) = (true, true)
            }
            FindingRemedy::NoHostWaits => self.host_waits_take_no_time = true,
            FindingRemedy::WithoutHostPauses(spans) => {
                spans.iter().for_each(|&(start, end)| self.add_and_merge_removed_pause(start, end));
            }
            FindingRemedy::FusedKernels(kernels) => self
                .fused_kernel_functions
                .extend(kernels.iter().map(|of| (of.function_index, *of))),
            FindingRemedy::NoTimeForOperationClass(class)
                if self.zero_time_operation_classes.contains(class) => {}
            FindingRemedy::NoTimeForOperationClass(class) => {
                self.zero_time_operation_classes.push(*class)
            }
            FindingRemedy::NoTimeForOperations(ids) => self.zero_time_operations.extend(ids),
            FindingRemedy::ShorterKernels(kernels) => {
                for of in kernels {
                    let left = self
                        .remaining_share_by_shape
                        .entry((of.function_index, of.launch_shape_index))
                        .or_insert(1.0);
                    *left = left.min(of.remaining_time_share);
                }
            }
        }
    }

    /// Adds a host pause that takes no time in the replay; overlapping pauses are merged.
    fn add_and_merge_removed_pause(&mut self, mut start: i64, mut end: i64) {
        self.removed_host_pauses.retain(|&(from, to)| {
            let apart = to < start || end < from;
            if !apart {
                (start, end) = (start.min(from), end.max(to));
            }
            apart
        });
        self.removed_host_pauses.push((start, end));
    }

    /// Returns the nanoseconds that an operation of `ns` nanoseconds takes after the changes.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn operation_ns_after_changes(
        &self,
        run: &TraceReplay<'_>,
        id: GpuOperationId,
        ns: i64,
    ) -> i64 {
        let context = run.context;
        let ns =
            match run.page_migration_ns_by_kernel.get(&id).filter(|_| {
                self.zero_time_operation_classes.contains(&OperationClass::PageMigration)
            }) {
                Some(beside) => ns - beside,
                None => ns,
            };
        if !self.zero_time_operation_classes.is_empty()
            && self
                .zero_time_operation_classes
                .contains(&context.classes.class_of_gpu_operation(id))
        {
            return 0;
        }
        if !self.zero_time_operations.is_empty() && self.zero_time_operations.contains(&id) {
            return 0;
        }
        if self.remaining_share_by_function.is_empty()
            && self.remaining_share_by_shape.is_empty()
            && self.fused_kernel_functions.is_empty()
        {
            return ns;
        }
        let (GpuOperationKind::Kernel, row) = context.operations.kind_and_table_row(id) else {
            return ns;
        };
        let kernels = &context.trace.kernels;
        let shape = || {
            let key =
                (kernels.function_index.at(row), kernels.launch_shape_index.decoded_row(row)?);
            self.remaining_share_by_shape.get(&key)
        };
        let left =
            self.remaining_share_by_function.get(&kernels.function_index.at(row)).or_else(shape);
        let ns = left.map_or(ns, |left| (ns as f64 * left).round() as i64);
        let Some(fused) = self.fused_kernel_functions.get(&kernels.function_index.at(row)) else {
            return ns;
        };
        // If a fused kernel is removed, the idle gap before it on its stream is removed too.
        let before = if fused.follows_fused_kernel {
            run.dependencies.gap_before_operation_on_stream_ns(id)
        } else {
            0
        };
        if fused.keeps_time_after_fusing { ns - before } else { -before }
    }

    fn ns_saved_in_replay(&self, run: &TraceReplay<'_>) -> i64 {
        run.dependencies.trace_ns_saved_by_change(&ReplayChange {
            replayed_duration_ns: &|id, ns| self.operation_ns_after_changes(run, id, ns),
            replays_recorded_launch_call_times: !self.launch_calls_take_no_time,
            keeps_host_waits: !self.host_waits_take_no_time,
            host_time_between_launches: match (
                self.removes_host_time,
                &self.removed_host_pauses[..],
            ) {
                (true, _) => ReplayedHostTime::ShareOfRecordedHostTime(0.0),
                (false, []) => ReplayedHostTime::RecordedHostTime,
                (false, pauses) => ReplayedHostTime::WithoutHostPauses(pauses),
            },
        })
    }

    fn gain_of_hypothetical_speedup(
        &self,
        run: &TraceReplay<'_>,
        change: &HypotheticalSpeedup,
    ) -> SpeedupWithGain {
        let all = &run.context.operations;
        let removed = |id: GpuOperationId| {
            let ns = all.operation_length_ns(id);
            ns - self.operation_ns_after_changes(run, id, ns)
        };
        let shorter = !self.remaining_share_by_function.is_empty()
            || !self.zero_time_operation_classes.is_empty();
        SpeedupWithGain {
            change: change.clone(),
            operation_ns_removed_by_change: shorter
                .then(|| all.all_operation_ids().map(removed).sum()),
            gain_ns: self.ns_saved_in_replay(run),
        }
    }
}
