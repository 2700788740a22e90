//! Collectives as described by the framework that called them.

use super::interned_names::NameId;

/// Descriptions of the kernels that communicate, in the order of their rows.
#[derive(Debug, Clone, Default)]
pub struct CollectiveTable {
    /// Row in [`super::Trace::kernels`].
    pub kernel: Vec<u32>,
    /// Name of the collective that the framework uses.
    pub name: Vec<NameId>,
    /// The communicator: its name and its ranks, as written.
    pub group: Vec<NameId>,
    /// Number of ranks of the communicator; 0 if it is not recorded.
    pub ranks: Vec<u32>,
    /// Bytes that each rank contributes.
    pub bytes_in: Vec<u64>,
    /// Bytes that each rank receives.
    pub bytes_out: Vec<u64>,
}

/// One of [`CollectiveTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveKernelCall {
    /// The collective, as the framework calls it.
    pub name: NameId,
    /// The communicator.
    pub group: NameId,
    /// Ranks of the communicator; 0 where it is not recorded.
    pub ranks: u32,
    /// Bytes that a rank contributes.
    pub bytes_in: u64,
    /// Bytes that a rank receives.
    pub bytes_out: u64,
}

impl CollectiveTable {
    /// Adds the description of a kernel, whose row number is larger than earlier ones.
    pub fn push(&mut self, kernel: u32, call: CollectiveKernelCall) {
        self.kernel.push(kernel);
        self.name.push(call.name);
        self.group.push(call.group);
        self.ranks.push(call.ranks);
        self.bytes_in.push(call.bytes_in);
        self.bytes_out.push(call.bytes_out);
    }

    /// The framework's description of a kernel's collective, if it was recorded.
    pub fn call_of_kernel(&self, kernel: u32) -> Option<CollectiveKernelCall> {
        let row = self.kernel.binary_search(&kernel).ok()?;
        Some(CollectiveKernelCall {
            name: self.name[row],
            group: self.group[row],
            ranks: self.ranks[row],
            bytes_in: self.bytes_in[row],
            bytes_out: self.bytes_out[row],
        })
    }

    /// The collectives of the kernels at some rows, with the rows that these kernels then have.
    pub(crate) fn select_kernels(&self, kernels: &[u32]) -> Self {
        let mut picked = Self::default();
        for (new, &old) in (0u32..).zip(kernels) {
            if let Some(call) = self.call_of_kernel(old) {
                picked.push(new, call);
            }
        }
        picked
    }
}
