//! Sizes and ranks of collectives as the framework (such as PyTorch) recorded them.

use super::interned_names::InternedNameId;

/// One row per collective kernel that the framework described, sorted by the kernel's row in the
/// kernel table.
#[derive(Debug, Clone, Default)]
pub struct RecordedCollectiveTable {
    /// Row in [`super::Trace::kernels`].
    pub kernel: Vec<u32>,
    /// The framework's name of the collective, such as `allreduce`.
    pub name: Vec<InternedNameId>,
    /// The communicator's name and ranks, as text from the trace.
    pub communicator: Vec<InternedNameId>,
    /// Number of ranks in the communicator; 0 if the trace does not record it.
    pub ranks: Vec<u32>,
    /// Bytes that each rank contributes to the collective.
    pub bytes_in: Vec<u64>,
    /// Bytes that each rank receives from the collective.
    pub bytes_out: Vec<u64>,
}

/// One of [`RecordedCollectiveTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedCollective {
    /// The framework's name of the collective, such as `allreduce`.
    pub name: InternedNameId,
    /// The communicator.
    pub communicator: InternedNameId,
    /// Number of ranks in the communicator; 0 if the trace does not record it.
    pub ranks: u32,
    /// Bytes that each rank contributes to the collective.
    pub bytes_in: u64,
    /// Bytes that each rank receives from the collective.
    pub bytes_out: u64,
}

impl RecordedCollectiveTable {
    /// Appends a kernel's collective; kernels must be appended in ascending order of their rows in
    /// the kernel table.
    pub fn push_collective_of_kernel(&mut self, kernel: u32, call: RecordedCollective) {
        self.kernel.push(kernel);
        self.name.push(call.name);
        self.communicator.push(call.communicator);
        self.ranks.push(call.ranks);
        self.bytes_in.push(call.bytes_in);
        self.bytes_out.push(call.bytes_out);
    }

    /// Returns the collective that the framework recorded for a kernel, if it recorded one.
    pub fn recorded_collective_of_kernel(&self, kernel: u32) -> Option<RecordedCollective> {
        let row = self.kernel.binary_search(&kernel).ok()?;
        Some(RecordedCollective {
            name: self.name[row],
            communicator: self.communicator[row],
            ranks: self.ranks[row],
            bytes_in: self.bytes_in[row],
            bytes_out: self.bytes_out[row],
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
