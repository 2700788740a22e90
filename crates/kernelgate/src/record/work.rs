//! Records the declared work of a case: bytes and operations of one launch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::files::text::clean_message_for_terminal;
use crate::workload::Work;

/// Largest plausible sum of the operations and bytes of one launch.
const MAX_DECLARED_OPERATIONS_AND_BYTES: u64 = 1 << 62;

/// Declared work of one launch, as record files store it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredWorkRecord {
    /// Number of operations of one launch, by compute unit and dtype ("matmul f32").
    #[serde(rename = "flops")]
    pub flops_by_unit_and_dtype: BTreeMap<String, u64>,
    /// Fewest bytes read.
    #[serde(rename = "read_bytes")]
    pub min_read_bytes: u64,
    /// Fewest bytes written.
    #[serde(rename = "write_bytes")]
    pub min_write_bytes: u64,
    /// Minimum of bytes that a GPU receives from other GPUs in one launch; 0 for one GPU.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    #[serde(rename = "link_bytes")]
    pub min_received_bytes: u64,
}

impl From<&Work> for DeclaredWorkRecord {
    fn from(work: &Work) -> Self {
        let mut flops = BTreeMap::new();
        for part in &work.flops {
            let count: &mut u64 = flops
                .entry(format!("{} {}", part.unit.hardware_unit_name(), part.dtype.dtype_name()))
                .or_default();
            *count = count.saturating_add(part.operations);
        }
        let link_bytes = work.link.map_or(0, |link| link.min_received_bytes);
        Self {
            flops_by_unit_and_dtype: flops,
            min_read_bytes: work.min_read_bytes,
            min_write_bytes: work.min_write_bytes,
            min_received_bytes: link_bytes,
        }
    }
}

/// Prints the declared work as "matmul f32 100, read 8 B, write 8 B".
impl std::fmt::Display for DeclaredWorkRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.flops_by_unit_and_dtype
            .iter()
            .try_for_each(|(unit, count)| write!(f, "{unit} {count}, "))?;
        write!(f, "read {} B, write {} B", self.min_read_bytes, self.min_write_bytes)?;
        match self.min_received_bytes {
            0 => Ok(()),
            bytes => write!(f, ", receive {bytes} B"),
        }
    }
}

impl DeclaredWorkRecord {
    /// Returns the number of matmul operations of all dtypes.
    pub fn matmul_flops_of_all_dtypes(&self) -> u64 {
        self.flops_by_unit_and_dtype
            .iter()
            .filter(|(unit, _)| unit.starts_with("matmul "))
            .map(|(_, count)| count)
            .sum()
    }

    /// Returns the number of bytes read and written.
    pub fn bytes_read_and_written(&self) -> u64 {
        self.min_read_bytes + self.min_write_bytes
    }

    /// Fails if the sum of all operations and bytes is implausibly large or overflows.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_declared_work_plausible(&self) -> Result<(), String> {
        let counted = self.flops_by_unit_and_dtype.values().chain([
            &self.min_read_bytes,
            &self.min_write_bytes,
            &self.min_received_bytes,
        ]);
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
            flops_by_unit_and_dtype: BTreeMap::from([
                ("matmul f32".to_owned(), matmul),
                ("other f32".to_owned(), 1),
            ]),
            min_read_bytes: read_bytes,
            min_write_bytes: 4,
            min_received_bytes: 0,
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
