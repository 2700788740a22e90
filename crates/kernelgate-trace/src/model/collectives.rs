//! Sizes and ranks of collectives as the framework (such as PyTorch) recorded them.

use super::interned_names::InternedNameId;

/// One row per collective kernel that the framework described, sorted by the kernel's row in the
/// kernel table.
#[derive(Debug, Clone, Default)]
pub struct RecordedCollectiveTable {
    /// Row in [`super::Trace::kernels`].
    pub kernel_row: Vec<u32>,
    /// The framework's name of the collective, such as `allreduce`.
    pub collective_name: Vec<InternedNameId>,
    /// The communicator's name and ranks, as text from the trace.
    pub communicator_name: Vec<InternedNameId>,
    /// Number of ranks in the communicator; 0 if the trace does not record it.
    pub rank_count: Vec<u32>,
    /// Bytes that each rank contributes to the collective.
    pub contributed_bytes: Vec<u64>,
    /// Bytes that each rank receives from the collective.
    pub received_bytes: Vec<u64>,
}

/// One of [`RecordedCollectiveTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedCollective {
    /// The framework's name of the collective, such as `allreduce`.
    pub collective_name: InternedNameId,
    /// The communicator.
    pub communicator_name: InternedNameId,
    /// Number of ranks in the communicator; 0 if the trace does not record it.
    pub ranks: u32,
    /// Bytes that each rank contributes to the collective.
    pub contributed_bytes: u64,
    /// Bytes that each rank receives from the collective.
    pub received_bytes: u64,
}

impl RecordedCollectiveTable {
    /// Appends a kernel's collective; kernels must be appended in ascending order of their rows in
    /// the kernel table.
    pub fn push_collective_of_kernel(&mut self, kernel: u32, call: RecordedCollective) {
        self.kernel_row.push(kernel);
        self.collective_name.push(call.collective_name);
        self.communicator_name.push(call.communicator_name);
        self.rank_count.push(call.ranks);
        self.contributed_bytes.push(call.contributed_bytes);
        self.received_bytes.push(call.received_bytes);
    }

    /// Returns the collective that the framework recorded for a kernel, if it recorded one.
    pub fn recorded_collective_of_kernel(&self, kernel: u32) -> Option<RecordedCollective> {
        let row = self.kernel_row.binary_search(&kernel).ok()?;
        Some(RecordedCollective {
            collective_name: self.collective_name[row],
            communicator_name: self.communicator_name[row],
            ranks: self.rank_count[row],
            contributed_bytes: self.contributed_bytes[row],
            received_bytes: self.received_bytes[row],
        })
    }

    /// Keeps the collectives of the selected kernel rows, and renumbers their rows to the positions
    /// in `kernels`.
    pub(crate) fn select_and_renumber_kernels(&self, kernels: &[u32]) -> Self {
        let mut picked = Self::default();
        for (new, &old) in (0u32..).zip(kernels) {
            if let Some(call) = self.recorded_collective_of_kernel(old) {
                picked.push_collective_of_kernel(new, call);
            }
        }
        picked
    }
}
