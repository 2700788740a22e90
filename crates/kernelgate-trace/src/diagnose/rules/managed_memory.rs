//! Pages of managed memory that migrate while they are used.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedUnit, NumberWithUnit,
};
use super::super::text::format_bytes as shown_bytes;
use super::super::trace_facts::DiagnosisContext;
use super::launches::check_gpu_work;
use super::rule_outcome::{MissingData, RuleResult, inspected_all, operation_evidence};
use crate::analyze::classes::OperationClass;
use crate::analyze::operations::OperationId;
use crate::analyze::time_order::SortedOperations;
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::model::gpu::PageFaultTable;
use crate::model::{Trace, TraceRecorder};

/// Page migrations of a device, during its kernels or between them.
#[derive(Default)]
struct PageMigrations {
    count: usize,
    bytes: u64,
    total_ns: i64,
    longest: Option<OperationId>,
}

impl PageMigrations {
    fn add(&mut self, context: &DiagnosisContext<'_>, id: OperationId) {
        let length = |id: OperationId| context.all.length(id);
        let (_, row) = context.all.kind_and_row(id);
        self.count += 1;
        self.bytes += context.trace.copies.bytes[row];
        self.total_ns += length(id);
        if self.longest.is_none_or(|known| length(id) > length(known)) {
            self.longest = Some(id);
        }
    }

    fn migration_evidence(
        &self,
        context: &DiagnosisContext<'_>,
        what: &str,
    ) -> Option<FindingEvidence> {
        let longest = self.longest?;
        Some(FindingEvidence {
            count: self.count,
            total_ns: Some(self.total_ns),
            range: None,
            ..operation_evidence(context, longest, format!("{what}: {}", shown_bytes(self.bytes)))
        })
    }
}

/// Page faults of a process on one device, and of its host.
#[derive(Default)]
struct PageFaultSum {
    on_device: u64,
    on_host: u64,
    /// Groups of faults of the device, in order of time.
    spans: Vec<(i64, i64)>,
}

impl PageFaultSum {
    fn new(context: &DiagnosisContext<'_>, (pid, device): (i64, u32)) -> Self {
        let (trace, mut of) = (context.trace, Self::default());
        let faults = &trace.page_faults;
        for row in 0..faults.start.len() {
            if trace.processes[faults.process[row] as usize].pid != pid {
                continue;
            }
            if faults.device[row] == PageFaultTable::HOST_PLACE {
                of.on_host += faults.count[row];
            } else if faults.device[row] == device {
                of.on_device += faults.count[row];
                of.spans.push((faults.start[row], faults.end[row]));
            }
        }
        of.spans.sort_unstable();
        of
    }

    fn page_fault_words(&self) -> String {
        match (self.on_device, self.on_host) {
            (0, 0) => String::new(),
            (device, host) => format!("; {device} page faults of the device, {host} of the host"),
        }
    }

    fn fault_evidence(&self, place: (i64, u32)) -> Option<FindingEvidence> {
        let longest = self.spans.iter().max_by_key(|(start, end)| end - start)?;
        Some(FindingEvidence {
            what: format!("groups of page faults of the device: {} faults", self.on_device),
            count: self.spans.len(),
            total_ns: Some(self.spans.iter().map(|(start, end)| end - start).sum()),
            range: None,
            span: Some(*longest),
            place: Some(place),
        })
    }
}

/// Returns the reason why a trace without migrations does not answer the question.
fn migrations_not_recorded_reason(trace: &Trace) -> Option<&'static str> {
    const MIGRATIONS_UNAVAILABLE_MESSAGE: &str = "Unified Memory cannot be traced";
    if trace.recorder != TraceRecorder::NsightSystems {
        return Some("this recorder has no page migrations");
    }
    let failed = trace
        .quality
        .messages
        .iter()
        .any(|message| message.contains(MIGRATIONS_UNAVAILABLE_MESSAGE));
    failed.then_some("the recorder could not trace managed memory on these devices")
}

pub(super) fn managed_finding_text() -> String {
    "pages of managed memory migrate, or the device faults on them".to_owned()
}

pub(super) fn page_migrations_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    check_gpu_work(context)?;
    let mut migrations: Vec<OperationId> =
        context.all.ids().filter(|&id| context.is_page_migration(id)).collect();
    if migrations.is_empty() {
        let places = context
            .activities
            .iter()
            .map(|of| (context.trace.processes[of.process as usize].pid, of.device));
        let faulted: Vec<DiagnosisFinding> = places
            .filter(|&place| PageFaultSum::new(context, place).on_device > 0)
            .map(|place| migration_finding(context, place, &[]))
            .collect();
        if !faulted.is_empty() {
            let groups = context.trace.page_faults.start.len();
            return Ok((faulted, inspected_all(groups, InspectedUnit::Operations)));
        }
        if let Some(reason) = migrations_not_recorded_reason(context.trace) {
            return Err(MissingData::new(reason, context.platform.record_migrations_advice()));
        }
        let copies = context.trace.copies.on_gpu.len();
        if copies == 0 {
            return Err(MissingData::no_work("the trace holds no copies and no page migrations"));
        }
        return Ok((Vec::new(), inspected_all(copies, InspectedUnit::Copies)));
    }
    let owner = |id: OperationId| context.process_and_device_of(id);
    migrations.sort_by_key(|&id| (owner(id), context.all.start(id)));
    let mut found = Vec::new();
    for device in migrations.chunk_by(|&a, &b| owner(a) == owner(b)) {
        found.push(migration_finding(context, owner(device[0]), device));
    }
    Ok((found, inspected_all(migrations.len(), InspectedUnit::Copies)))
}

fn migration_finding(
    context: &DiagnosisContext<'_>,
    place: (i64, u32),
    migrations: &[OperationId],
) -> DiagnosisFinding {
    let all = &context.all;
    let faults = PageFaultSum::new(context, place);
    let kernels = context.trace.kernels.on_gpu.len();
    let own = (0..u32::try_from(kernels).unwrap_or(u32::MAX))
        .filter(|&id| context.process_and_device_of(id) == place);
    let kernels = SortedOperations::operations_by_key(own, |id| all.span(id));
    let (mut during, mut between) = (PageMigrations::default(), PageMigrations::default());
    // The time in each kernel during which pages migrated.
    let (mut paused_ns, mut next, mut until) = (0, 0, (i64::MIN, i64::MIN));
    let mut pages: Option<(i64, i64)> = None;
    for &id in migrations {
        let (start, end) = all.span(id);
        while let Some(kernel) = kernels.get(next).filter(|&kernel| all.start(kernel) <= start) {
            if all.end(kernel) > until.1 {
                until = all.span(kernel);
            }
            next += 1;
        }
        if start >= until.1 {
            between.add(context, id);
            continue;
        }
        during.add(context, id);
        pages = match pages {
            Some((first, last)) if first >= until.0 => Some((first, last.max(end.min(until.1)))),
            closed => {
                paused_ns += closed.map_or(0, |(first, last)| last - first);
                Some((start, end.min(until.1)))
            }
        };
    }
    paused_ns += pages.map_or(0, |(first, last)| last - first);
    // Without migrations the device maps memory of the host, or new pages, at each fault.
    let faulted_ns = match migrations {
        [] => UnitedSpans::new(faults.spans.clone()).covered_ns(),
        _ => 0,
    };
    let saved = paused_ns + between.total_ns + faulted_ns;
    let span: i64 = context
        .activities
        .iter()
        .filter(|of| (context.trace.processes[of.process as usize].pid, of.device) == place)
        .map(|of| of.span_of_gaps_ns())
        .sum();
    let count = during.count + between.count;
    #[allow(clippy::cast_precision_loss)]
    let measured = NumberWithUnit { value: count as f64, unit: "migrations" };
    let evidence = [
        faults.fault_evidence(place),
        during.migration_evidence(context, "while kernels ran"),
        between.migration_evidence(context, "between kernels, as the host touches pages"),
    ];
    DiagnosisFinding {
        id: "page-migration",
        severity: FindingSeverity::from_saving(saved, span),
        confidence: FindingConfidence::Medium,
        title: format!(
            "{} of managed memory migrated in {count} pieces: {} while kernels ran, {} between \
             them{}",
            shown_bytes(during.bytes + between.bytes),
            during.count,
            between.count,
            faults.page_fault_words()
        ),
        measured,
        threshold: NumberWithUnit { value: 0.0, unit: "migrations" },
        recoverable_ns: Some(saved),
        remedy: FindingRemedy::Without(OperationClass::Migration),
        replayed: None,
        evidence: evidence.into_iter().flatten().collect(),
        advice: format!(
            "move pages before they are used, in large pieces: {}, or explicit copies",
            context.platform.prefetch_advice()
        ),
        false_positive: "data that is touched once, or does not fit into the device's memory",
    }
}
