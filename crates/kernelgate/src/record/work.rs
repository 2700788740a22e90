//! Records the declared work of a case: bytes and operations of one launch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::files::text::clean_message_for_terminal;
use crate::workload::Work;

/// Largest plausible sum of the operations and bytes of one launch.
const MAX_DECLARED_OPERATIONS_AND_BYTES: u64 = 1 << 62;

/// Declared work, as stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredWorkRecord {
    /// Number of operations of one launch, by compute unit and dtype ("matmul f32").
    pub flops: BTreeMap<String, u64>,
    /// Fewest bytes read.
    pub read_bytes: u64,
    /// Fewest bytes written.
    pub write_bytes: u64,
    /// Minimum of bytes that a GPU receives from other GPUs in one launch; 0 for one GPU.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    pub link_bytes: u64,
}

impl From<&Work> for DeclaredWorkRecord {
    fn from(work: &Work) -> Self {
        let mut flops = BTreeMap::new();
        for part in &work.flops {
            let count: &mut u64 = flops
                .entry(format!("{} {}", part.unit.hardware_unit_name(), part.dtype.name()))
                .or_default();
            *count = count.saturating_add(part.count);
        }
        let link_bytes = work.link.map_or(0, |link| link.min_received_bytes);
        Self { flops, read_bytes: work.read_bytes, write_bytes: work.write_bytes, link_bytes }
    }
}

/// Prints the declared work as "matmul f32 100, read 8 B, write 8 B".
impl std::fmt::Display for DeclaredWorkRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.flops.iter().try_for_each(|(unit, count)| write!(f, "{unit} {count}, "))?;
        write!(f, "read {} B, write {} B", self.read_bytes, self.write_bytes)?;
        match self.link_bytes {
            0 => Ok(()),
            bytes => write!(f, ", receive {bytes} B"),
        }
    }
}

impl DeclaredWorkRecord {
    /// Returns the number of matmul operations of all dtypes.
    pub fn matmul_flops_of_all_dtypes(&self) -> u64 {
        self.flops
            .iter()
            .filter(|(unit, _)| unit.starts_with("matmul "))
            .map(|(_, count)| count)
            .sum()
    }

    /// Returns the number of bytes read and written.
    pub fn bytes_read_and_written(&self) -> u64 {
        self.read_bytes + self.write_bytes
    }

    /// Fails if the sum of all operations and bytes is implausibly large or overflows.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_declared_work_plausible(&self) -> Result<(), String> {
        let counted =
            self.flops.values().chain([&self.read_bytes, &self.write_bytes, &self.link_bytes]);
        let sum = counted.copied().try_fold(0, u64::checked_add);
        match sum {
            Some(..=MAX_DECLARED_OPERATIONS_AND_BYTES) => Ok(()),
            _ => Err(format!(
                "more work than any machine does: {}",
                clean_message_for_terminal(&self.to_string())
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_work_whose_sum_overflows_is_refused() {
        let work = |matmul: u64, read_bytes: u64| DeclaredWorkRecord {
            flops: BTreeMap::from([("matmul f32".to_owned(), matmul), ("other f32".to_owned(), 1)]),
            read_bytes,
            write_bytes: 4,
            link_bytes: 0,
        };
        assert_eq!(work(1 << 61, 1 << 50).check_declared_work_plausible(), Ok(()));
        for (matmul, read_bytes) in [
            (u64::MAX, 0),
            (0, u64::MAX),
            (1 << 62, 1 << 62),
            (MAX_DECLARED_OPERATIONS_AND_BYTES, 0),
        ] {
            let problem = work(matmul, read_bytes).check_declared_work_plausible().unwrap_err();
            let declared = work(matmul, read_bytes).to_string();
            assert_eq!(problem, format!("more work than any machine does: {declared}"));
        }
    }
}
