//! Sums a device's communication, copies and page migrations by kind: how much, how fast, and how
//! much of it no compute hides.

use hashbrown::HashMap;

use crate::analyze::classes::{CommunicationKind, OperationClass};
use crate::analyze::operations::{OperationId, OperationKind};
use crate::analyze::time_order::SortedOperations;
use crate::analyze::work::bus_bandwidth;
use crate::diagnose::trace_facts::DiagnosisContext;
use crate::model::interned_names::NameId;

/// Operations of one kind that move data.
#[derive(Debug, Clone, PartialEq)]
pub struct TransferSum {
    /// Class of the transfer: communication, copy or page migration.
    pub class: OperationClass,
    /// The collective and its library, or the direction of the copy.
    pub label: String,
    /// Number of transfers.
    pub count: usize,
    /// Sum of the lengths of the transfers, nanoseconds.
    pub total_ns: i64,
    /// Time of these transfers in which nothing computes, nanoseconds.
    pub exposed_ns: i64,
    /// Bytes of the transfers whose size was recorded.
    pub bytes: u64,
    /// Bus bandwidth in GB/s; waiting for other ranks counts as time.
    pub bus: Option<f64>,
    /// Start and end of the longest transfer.
    pub longest: (i64, i64),
    /// Number of transfers on a stream that also computes: no compute can hide them.
    pub beside_compute: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum TransferKey {
    Communication(CommunicationKind),
    Copy(NameId),
    Migration(NameId),
}

#[derive(Default)]
struct TransferTotals {
    count: usize,
    total_ns: i64,
    exposed_ns: i64,
    bytes: u64,
    bus_bytes: f64,
    bus_ns: i64,
    longest: (i64, i64),
    beside_compute: usize,
}

/// The transfers of a device while its time is cut.
pub(super) struct DeviceTransfers<'a> {
    context: &'a DiagnosisContext<'a>,
    sums: HashMap<TransferKey, TransferTotals>,
    /// For each process and device, whether kernels compute at the moment.
    computes: Vec<bool>,
}

impl<'a> DeviceTransfers<'a> {
    pub fn new(context: &'a DiagnosisContext<'a>, operations: &SortedOperations) -> Self {
        let mut computes = vec![false; context.trace.places.len()];
        for id in operations.iter() {
            if context.classes.class_of_operation(id) == OperationClass::Compute {
                computes[context.all.place(id).0 as usize] = true;
            }
        }
        let mut transfers = Self { context, sums: HashMap::new(), computes };
        operations.iter().for_each(|id| transfers.add(id));
        transfers
    }

    fn transfer_key(&self, id: OperationId) -> Option<TransferKey> {
        let label = || self.context.trace.copies.kind[self.context.all.kind_and_row(id).1];
        match self.context.classes.class_of_operation(id) {
            OperationClass::Communication => {
                self.context.classes.communication_of_operation(id).map(TransferKey::Communication)
            }
            OperationClass::Copy => Some(TransferKey::Copy(label())),
            OperationClass::Migration => Some(TransferKey::Migration(label())),
            OperationClass::Compute | OperationClass::Graph | OperationClass::Set => None,
        }
    }

    fn add(&mut self, id: OperationId) {
        let Some(key) = self.transfer_key(id) else { return };
        let (trace, all) = (self.context.trace, &self.context.all);
        let span = all.span(id);
        let sum = self
            .sums
            .entry(key)
            .or_insert_with(|| TransferTotals { longest: span, ..TransferTotals::default() });
        sum.count += 1;
        sum.total_ns += span.1 - span.0;
        if span.1 - span.0 > sum.longest.1 - sum.longest.0 {
            sum.longest = span;
        }
        let place = all.place(id).0 as usize;
        sum.beside_compute += usize::from(self.computes[place]);
        match all.kind_and_row(id) {
            (OperationKind::Copy, row) => sum.bytes += trace.copies.bytes[row],
            _ => {
                let Some(call) = trace.collectives.call_of_kernel(id) else { return };
                let TransferKey::Communication(CommunicationKind { collective, .. }) = key else {
                    return;
                };
                sum.bytes += call.bytes_in.max(call.bytes_out);
                sum.bus_bytes += bus_bandwidth::bytes_across_link(
                    collective,
                    call.ranks,
                    call.bytes_in,
                    call.bytes_out,
                );
                sum.bus_ns += span.1 - span.0;
            }
        }
    }

    /// Counts time that no compute hides for the operation that it belongs to.
    pub fn add_exposed_time(&mut self, owner: OperationId, ns: i64) {
        if let Some(sum) = self.transfer_key(owner).and_then(|key| self.sums.get_mut(&key)) {
            sum.exposed_ns += ns;
        }
    }

    /// All kinds of transfers, most exposed time first.
    pub fn into_sorted_transfers(self) -> Vec<TransferSum> {
        let names = &self.context.trace.names;
        let mut all: Vec<TransferSum> = self
            .sums
            .into_iter()
            .map(|(key, sum)| {
                let (class, label) = match key {
                    TransferKey::Communication(CommunicationKind { library, collective }) => {
                        let label = format!("{} {}", library.label(), collective.label());
                        (OperationClass::Communication, label)
                    }
                    TransferKey::Copy(label) => {
                        (OperationClass::Copy, names.text(label).to_owned())
                    }
                    TransferKey::Migration(label) => {
                        (OperationClass::Migration, names.text(label).to_owned())
                    }
                };
                #[allow(clippy::cast_precision_loss)]
                let bus = (sum.bus_bytes > 0.0 && sum.bus_ns > 0)
                    .then(|| sum.bus_bytes / sum.bus_ns as f64);
                TransferSum {
                    class,
                    label,
                    count: sum.count,
                    total_ns: sum.total_ns,
                    exposed_ns: sum.exposed_ns,
                    bytes: sum.bytes,
                    bus,
                    longest: sum.longest,
                    beside_compute: sum.beside_compute,
                }
            })
            .collect();
        all.sort_by(|a, b| {
            let key = |of: &TransferSum| std::cmp::Reverse((of.exposed_ns, of.total_ns));
            (key(a), a.class, &a.label).cmp(&(key(b), b.class, &b.label))
        });
        all
    }
}
