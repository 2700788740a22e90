//! Sums a GPU's communication, copies and page migrations by kind: bytes, bandwidth, and the time
//! that no compute hides.

use hashbrown::HashMap;

use crate::analyze::classes::{CommunicationLibraryAndCollective, OperationClass};
use crate::analyze::operations::{GpuOperationId, GpuOperationKind};
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::work::bus_bandwidth;
use crate::diagnose::trace_facts::DiagnosisContext;
use crate::model::interned_names::InternedNameId;

/// Communication, copies or page migrations of one kind on a GPU, summed.
#[derive(Debug, Clone, PartialEq)]
pub struct TransfersOfOneKind {
    /// Class of the transfer: communication, copy or page migration.
    pub transfer_class: OperationClass,
    /// Library and collective of a communication, or direction of a copy or page migration.
    pub transfer_label: String,
    /// Number of transfers.
    pub transfer_count: usize,
    /// Sum of the durations of these transfers, nanoseconds.
    pub total_transfer_ns: i64,
    /// Time of these transfers in which no compute kernel runs on the GPU, nanoseconds.
    pub exposed_transfer_ns: i64,
    /// Total bytes of those transfers whose size was recorded.
    pub recorded_transfer_bytes: u64,
    /// Bus bandwidth of the collectives in GB/s; waiting for other ranks counts as transfer time.
    pub collective_bus_gb_per_s: Option<f64>,
    /// Start and end of the longest of these transfers, nanoseconds.
    pub longest_transfer_start_and_end_ns: (i64, i64),
    /// Number of these transfers on a stream that also runs compute kernels, which cannot hide
    /// them.
    pub transfer_count_on_compute_streams: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum TransferKind {
    Communication(CommunicationLibraryAndCollective),
    CopyWithLabel(InternedNameId),
    PageMigrationWithLabel(InternedNameId),
}

#[derive(Default)]
struct TransferSums {
    transfer_count: usize,
    total_transfer_ns: i64,
    exposed_transfer_ns: i64,
    recorded_transfer_bytes: u64,
    collective_bus_bytes: f64,
    collective_bus_ns: i64,
    longest_transfer_start_and_end_ns: (i64, i64),
    transfer_count_on_compute_streams: usize,
}

/// Sums the transfers of a process on a GPU while the GPU's time is cut into pieces.
pub(super) struct TransferSummation<'a> {
    context: &'a DiagnosisContext<'a>,
    sums_by_kind: HashMap<TransferKind, TransferSums>,
    /// For each place (process, GPU and stream), whether compute kernels run there.
    place_runs_compute_kernels: Vec<bool>,
}

impl<'a> TransferSummation<'a> {
    pub fn sum_transfers_of_operations(
        context: &'a DiagnosisContext<'a>,
        operations: &OperationsInOrder,
    ) -> Self {
        let mut computes = vec![false; context.trace.places.len()];
        for id in operations.iter() {
            if context.classes.class_of_gpu_operation(id) == OperationClass::ComputeKernel {
                computes[context.operations.place_of_operation(id).0 as usize] = true;
            }
        }
        let mut transfers =
            Self { context, sums_by_kind: HashMap::new(), place_runs_compute_kernels: computes };
        operations.iter().for_each(|id| transfers.add_transfer_operation(id));
        transfers
    }

    fn transfer_kind_of_operation(&self, id: GpuOperationId) -> Option<TransferKind> {
        let label = || {
            self.context.trace.copies.direction_label
                [self.context.operations.kind_and_table_row(id).1]
        };
        match self.context.classes.class_of_gpu_operation(id) {
            OperationClass::Communication => {
                self.context.classes.communication_of_operation(id).map(TransferKind::Communication)
            }
            OperationClass::Copy => Some(TransferKind::CopyWithLabel(label())),
            OperationClass::PageMigration => Some(TransferKind::PageMigrationWithLabel(label())),
            OperationClass::ComputeKernel
            | OperationClass::CudaGraphLaunch
            | OperationClass::Memset => None,
        }
    }

    fn add_transfer_operation(&mut self, id: GpuOperationId) {
        let Some(key) = self.transfer_kind_of_operation(id) else { return };
        let (trace, all) = (self.context.trace, &self.context.operations);
        let span = all.operation_start_and_end_ns(id);
        let sum = self.sums_by_kind.entry(key).or_insert_with(|| TransferSums {
            longest_transfer_start_and_end_ns: span,
            ..TransferSums::default()
        });
        sum.transfer_count += 1;
        sum.total_transfer_ns += span.1 - span.0;
        if span.1 - span.0
            > sum.longest_transfer_start_and_end_ns.1 - sum.longest_transfer_start_and_end_ns.0
        {
            sum.longest_transfer_start_and_end_ns = span;
        }
        let place = all.place_of_operation(id).0 as usize;
        sum.transfer_count_on_compute_streams +=
            usize::from(self.place_runs_compute_kernels[place]);
        match all.kind_and_table_row(id) {
            (GpuOperationKind::Copy, row) => {
                sum.recorded_transfer_bytes += trace.copies.copied_bytes[row]
            }
            _ => {
                let Some(call) = trace.collectives.recorded_collective_of_kernel(id) else {
                    return;
                };
                let TransferKind::Communication(CommunicationLibraryAndCollective {
                    collective,
                    ..
                }) = key
                else {
                    return;
                };
                sum.recorded_transfer_bytes += call.contributed_bytes.max(call.received_bytes);
                sum.collective_bus_bytes += bus_bandwidth::bytes_across_link_of_rank(
                    collective,
                    call.ranks,
                    call.contributed_bytes,
                    call.received_bytes,
                );
                sum.collective_bus_ns += span.1 - span.0;
            }
        }
    }

    /// Adds time that no compute kernel hides to the transfer kind of the operation that owns this
    /// time.
    pub fn add_exposed_time_of_operation(&mut self, owner: GpuOperationId, ns: i64) {
        if let Some(sum) =
            self.transfer_kind_of_operation(owner).and_then(|key| self.sums_by_kind.get_mut(&key))
        {
            sum.exposed_transfer_ns += ns;
        }
    }

    /// Returns the sums of all kinds of transfers, most exposed time first.
    pub fn into_transfers_by_exposed_time(self) -> Vec<TransfersOfOneKind> {
        let names = &self.context.trace.names;
        let mut all: Vec<TransfersOfOneKind> = self
            .sums_by_kind
            .into_iter()
            .map(|(key, sum)| {
                let (class, label) = match key {
                    TransferKind::Communication(CommunicationLibraryAndCollective {
                        library,
                        collective,
                    }) => {
                        let label = format!(
                            "{} {}",
                            library.printed_communication_library(),
                            collective.collective_label()
                        );
                        (OperationClass::Communication, label)
                    }
                    TransferKind::CopyWithLabel(label) => {
                        (OperationClass::Copy, names.text_of_name(label).to_owned())
                    }
                    TransferKind::PageMigrationWithLabel(label) => {
                        (OperationClass::PageMigration, names.text_of_name(label).to_owned())
                    }
                };
                #[allow(clippy::cast_precision_loss)]
                let bus = (sum.collective_bus_bytes > 0.0 && sum.collective_bus_ns > 0)
                    .then(|| sum.collective_bus_bytes / sum.collective_bus_ns as f64);
                TransfersOfOneKind {
                    transfer_class: class,
                    transfer_label: label,
                    transfer_count: sum.transfer_count,
                    total_transfer_ns: sum.total_transfer_ns,
                    exposed_transfer_ns: sum.exposed_transfer_ns,
                    recorded_transfer_bytes: sum.recorded_transfer_bytes,
                    collective_bus_gb_per_s: bus,
                    longest_transfer_start_and_end_ns: sum.longest_transfer_start_and_end_ns,
                    transfer_count_on_compute_streams: sum.transfer_count_on_compute_streams,
                }
            })
            .collect();
        all.sort_by(|a, b| {
            let key = |of: &TransfersOfOneKind| {
                std::cmp::Reverse((of.exposed_transfer_ns, of.total_transfer_ns))
            };
            (key(a), a.transfer_class, &a.transfer_label).cmp(&(
                key(b),
                b.transfer_class,
                &b.transfer_label,
            ))
        });
        all
    }
}
