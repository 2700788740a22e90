//! Diagnosis rule about pages of managed memory that migrate, or on which the GPU faults.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedRecordKind, MeasuredNumberWithUnit,
};
use super::super::text::format_bytes_with_unit as shown_bytes;
use super::super::trace_facts::DiagnosisContext;
use super::launches::require_gpu_operations;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, all_records_inspected, evidence_of_single_operation,
};
use crate::analyze::classes::OperationClass;
use crate::analyze::operations::GpuOperationId;
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::model::gpu::ManagedPageFaultTable;
use crate::model::{Trace, TraceRecorder};

/// Page migrations of a process on a GPU, either during its kernels or between them, summed.
#[derive(Default)]
struct PageMigrationSums {
    migration_count: usize,
    migrated_bytes: u64,
    total_migration_ns: i64,
    longest_migration: Option<GpuOperationId>,
}

impl PageMigrationSums {
    fn add_page_migration(&mut self, context: &DiagnosisContext<'_>, id: GpuOperationId) {
        let length = |id: GpuOperationId| context.operations.operation_length_ns(id);
        let (_, row) = context.operations.kind_and_table_row(id);
        self.migration_count += 1;
        self.migrated_bytes += context.trace.copies.copied_bytes[row];
        self.total_migration_ns += length(id);
        if self.longest_migration.is_none_or(|known| length(id) > length(known)) {
            self.longest_migration = Some(id);
        }
    }

    fn evidence_of_page_migrations(
        &self,
        context: &DiagnosisContext<'_>,
        what: &str,
    ) -> Option<FindingEvidence> {
        let longest = self.longest_migration?;
        Some(FindingEvidence {
            covered_count: self.migration_count,
            total_duration_ns: Some(self.total_migration_ns),
            innermost_common_range_path: None,
            ..evidence_of_single_operation(
                context,
                longest,
                format!("{what}: {}", shown_bytes(self.migrated_bytes)),
            )
        })
    }
}

/// Page faults of a process on one GPU, and on the host.
#[derive(Default)]
struct PageFaultsOfProcess {
    gpu_page_faults: u64,
    cpu_page_faults: u64,
    /// Time spans of groups of page faults of the GPU, in order of time, nanoseconds.
    gpu_page_fault_spans_ns: Vec<(i64, i64)>,
}

impl PageFaultsOfProcess {
    fn sum_page_faults_of_process(
        context: &DiagnosisContext<'_>,
        (pid, device): (i64, u32),
    ) -> Self {
        let (trace, mut of) = (context.trace, Self::default());
        let faults = &trace.page_faults;
        for row in 0..faults.start_ns.len() {
            if trace.processes[faults.process_index[row] as usize].pid != pid {
                continue;
            }
            if faults.device[row] == ManagedPageFaultTable::HOST_INSTEAD_OF_DEVICE {
                of.cpu_page_faults += faults.fault_count[row];
            } else if faults.device[row] == device {
                of.gpu_page_faults += faults.fault_count[row];
                of.gpu_page_fault_spans_ns.push((faults.start_ns[row], faults.end_ns[row]));
            }
        }
        of.gpu_page_fault_spans_ns.sort_unstable();
        of
    }

    fn page_faults_text(&self) -> String {
        match (self.gpu_page_faults, self.cpu_page_faults) {
            (0, 0) => String::new(),
            (device, host) => format!("; {device} page faults of the device, {host} of the host"),
        }
    }

    fn evidence_of_gpu_page_faults(&self, place: (i64, u32)) -> Option<FindingEvidence> {
        let longest = self.gpu_page_fault_spans_ns.iter().max_by_key(|(start, end)| end - start)?;
        Some(FindingEvidence {
            kernel_call_or_copy_name: format!(
                "groups of page faults of the device: {} faults",
                self.gpu_page_faults
            ),
            covered_count: self.gpu_page_fault_spans_ns.len(),
            total_duration_ns: Some(
                self.gpu_page_fault_spans_ns.iter().map(|(start, end)| end - start).sum(),
            ),
            innermost_common_range_path: None,
            longest_instance_start_and_end_ns: Some(*longest),
            process_id_and_device: Some(place),
        })
    }
}

/// Returns the reason why a trace without page migrations does not show whether pages migrated;
/// `None` if it does.
fn reason_migrations_are_not_recorded(trace: &Trace) -> Option<&'static str> {
    const MIGRATIONS_UNAVAILABLE_MESSAGE: &str = "Unified Memory cannot be traced";
    if trace.recorder != TraceRecorder::NsightSystems {
        return Some("this recorder has no page migrations");
    }
    let failed = trace
        .quality
        .profiler_messages
        .iter()
        .any(|message| message.contains(MIGRATIONS_UNAVAILABLE_MESSAGE));
    failed.then_some("the recorder could not trace managed memory on these devices")
}

pub(super) fn page_migrations_rule_text() -> String {
    "pages of managed memory migrate, or the device faults on them".to_owned()
}

pub(super) fn find_page_migrations(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    require_gpu_operations(context)?;
    let mut migrations: Vec<GpuOperationId> = context
        .operations
        .all_operation_ids()
        .filter(|&id| context.is_operation_page_migration(id))
        .collect();
    if migrations.is_empty() {
        let places = context
            .activities
            .iter()
            .map(|of| (context.trace.processes[of.process_index as usize].pid, of.gpu_ordinal));
        let faulted: Vec<DiagnosisFinding> = places
            .filter(|&place| {
                PageFaultsOfProcess::sum_page_faults_of_process(context, place).gpu_page_faults > 0
            })
            .map(|place| finding_about_page_migrations(context, place, &[]))
            .collect();
        if !faulted.is_empty() {
            let groups = context.trace.page_faults.start_ns.len();
            return Ok((
                faulted,
                all_records_inspected(groups, InspectedRecordKind::GpuOperations),
            ));
        }
        if let Some(reason) = reason_migrations_are_not_recorded(context.trace) {
            return Err(DataMissingForRule::missing_data_with_advice(
                reason,
                context.platform.advice_to_record_page_migrations(),
            ));
        }
        let copies = context.trace.copies.on_gpu.operation_count();
        if copies == 0 {
            return Err(DataMissingForRule::program_has_no_such_work(
                "the trace holds no copies and no page migrations",
            ));
        }
        return Ok((Vec::new(), all_records_inspected(copies, InspectedRecordKind::Copies)));
    }
    let owner = |id: GpuOperationId| context.process_id_and_gpu_of_operation(id);
    migrations.sort_by_key(|&id| (owner(id), context.operations.operation_start_ns(id)));
    let mut found = Vec::new();
    for device in migrations.chunk_by(|&a, &b| owner(a) == owner(b)) {
        found.push(finding_about_page_migrations(context, owner(device[0]), device));
    }
    Ok((found, all_records_inspected(migrations.len(), InspectedRecordKind::Copies)))
}

fn finding_about_page_migrations(
    context: &DiagnosisContext<'_>,
    place: (i64, u32),
    migrations: &[GpuOperationId],
) -> DiagnosisFinding {
    let all = &context.operations;
    let faults = PageFaultsOfProcess::sum_page_faults_of_process(context, place);
    let kernels = context.trace.kernels.on_gpu.operation_count();
    let own = (0..u32::try_from(kernels).unwrap_or(u32::MAX))
        .filter(|&id| context.process_id_and_gpu_of_operation(id) == place);
    let kernels =
        OperationsInOrder::sort_operations_by_key(own, |id| all.operation_start_and_end_ns(id));
    let (mut during, mut between) = (PageMigrationSums::default(), PageMigrationSums::default());
    // Sums the time of kernels from their first to their last page migration.
    let (mut paused_ns, mut next, mut until) = (0, 0, (i64::MIN, i64::MIN));
    let mut pages: Option<(i64, i64)> = None;
    for &id in migrations {
        let (start, end) = all.operation_start_and_end_ns(id);
        while let Some(kernel) =
            kernels.get(next).filter(|&kernel| all.operation_start_ns(kernel) <= start)
        {
            if all.operation_end_exclusive_ns(kernel) > until.1 {
                until = all.operation_start_and_end_ns(kernel);
            }
            next += 1;
        }
        if start >= until.1 {
            between.add_page_migration(context, id);
            continue;
        }
        during.add_page_migration(context, id);
        pages = match pages {
            Some((first, last)) if first >= until.0 => Some((first, last.max(end.min(until.1)))),
            closed => {
                paused_ns += closed.map_or(0, |(first, last)| last - first);
                Some((start, end.min(until.1)))
            }
        };
    }
    paused_ns += pages.map_or(0, |(first, last)| last - first);
    // If pages do not migrate, each page fault makes the GPU map memory of the host, or new pages.
    let faulted_ns = match migrations {
        [] => UnionOfTimeSpans::union_of_spans(faults.gpu_page_fault_spans_ns.clone())
            .total_covered_ns(),
        _ => 0,
    };
    let saved = paused_ns + between.total_migration_ns + faulted_ns;
    let span: i64 = context
        .activities
        .iter()
        .filter(|of| {
            (context.trace.processes[of.process_index as usize].pid, of.gpu_ordinal) == place
        })
        .map(|of| of.first_start_to_last_end_ns())
        .sum();
    let count = during.migration_count + between.migration_count;
    #[allow(clippy::cast_precision_loss)]
    let measured = MeasuredNumberWithUnit { number_in_unit: count as f64, unit: "migrations" };
    let evidence = [
        faults.evidence_of_gpu_page_faults(place),
        during.evidence_of_page_migrations(context, "while kernels ran"),
        between.evidence_of_page_migrations(context, "between kernels, as the host touches pages"),
    ];
    DiagnosisFinding {
        rule_id: "page-migration",
        severity: FindingSeverity::severity_from_possible_saving(saved, span),
        confidence: FindingConfidence::MediumConfidence,
        finding_title: format!(
            "{} of managed memory migrated in {count} pieces: {} while kernels ran, {} between \
             them{}",
            shown_bytes(during.migrated_bytes + between.migrated_bytes),
            during.migration_count,
            between.migration_count,
            faults.page_faults_text()
        ),
        measured_value: measured,
        rule_threshold: MeasuredNumberWithUnit { number_in_unit: 0.0, unit: "migrations" },
        max_recoverable_ns: Some(saved),
        remedy: FindingRemedy::NoTimeForOperationClass(OperationClass::PageMigration),
        replayed_gain: None,
        evidence: evidence.into_iter().flatten().collect(),
        advice: format!(
            "move pages before they are used, in large pieces: {}, or explicit copies",
            context.platform.managed_memory_prefetch_advice()
        ),
        false_positive_note: "data that is touched once, or does not fit into the device's memory",
    }
}
