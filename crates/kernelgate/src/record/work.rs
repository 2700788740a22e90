//! The declared work of a case, as stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::files::text::printable_on_terminal;
use crate::workload::Work;

/// Most operations and bytes of a launch that can be true, in all.
const MAX_DECLARED_WORK: u64 = 1 << 62;

/// Declared work, as stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkRecord {
    /// Operations, by unit and dtype ("matmul f32").
    pub flops: BTreeMap<String, u64>,
    /// Fewest bytes read.
    pub read_bytes: u64,
    /// Fewest bytes written.
    pub write_bytes: u64,
    /// Fewest bytes that a GPU receives from others, in work over several.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub link_bytes: u64,
}

impl From<&Work> for WorkRecord {
    fn from(work: &Work) -> Self {
        let mut flops = BTreeMap::new();
        for part in &work.flops {
            let count: &mut u64 =
                flops.entry(format!("{} {}", part.unit.name(), part.dtype.name())).or_default();
            *count = count.saturating_add(part.count);
        }
        let link_bytes = work.link.map_or(0, |link| link.bytes);
        Self { flops, read_bytes: work.read_bytes, write_bytes: work.write_bytes, link_bytes }
    }
}

/// Prints declared work as "matmul f32 100, read 8 B, write 8 B".
impl std::fmt::Display for WorkRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.flops.iter().try_for_each(|(unit, count)| write!(f, "{unit} {count}, "))?;
        write!(f, "read {} B, write {} B", self.read_bytes, self.write_bytes)?;
        match self.link_bytes {
            0 => Ok(()),
            bytes => write!(f, ", receive {bytes} B"),
        }
    }
}

impl WorkRecord {
    /// Number of GEMM operations of all dtypes.
    pub fn matmul_flops(&self) -> u64 {
        self.flops
            .iter()
            .filter(|(unit, _)| unit.starts_with("matmul "))
            .map(|(_, count)| count)
            .sum()
    }

    /// Bytes read and written.
    pub fn total_bytes(&self) -> u64 {
        self.read_bytes + self.write_bytes
    }

    /// Checks the facts that deserialising does not enforce: sums of the counts do not overflow.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        let counted =
            self.flops.values().chain([&self.read_bytes, &self.write_bytes, &self.link_bytes]);
        let sum = counted.copied().try_fold(0, u64::checked_add);
        match sum {
            Some(..=MAX_DECLARED_WORK) => Ok(()),
            _ => Err(format!(
                "more work than any machine does: {}",
                printable_on_terminal(&self.to_string())
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_work_whose_sums_overflow_is_invalid() {
        let work = |matmul: u64, read_bytes: u64| WorkRecord {
            flops: BTreeMap::from([("matmul f32".to_owned(), matmul), ("other f32".to_owned(), 1)]),
            read_bytes,
            write_bytes: 4,
            link_bytes: 0,
        };
        assert_eq!(work(1 << 61, 1 << 50).validate(), Ok(()));
        for (matmul, read_bytes) in
            [(u64::MAX, 0), (0, u64::MAX), (1 << 62, 1 << 62), (MAX_DECLARED_WORK, 0)]
        {
            let problem = work(matmul, read_bytes).validate().unwrap_err();
            let declared = work(matmul, read_bytes).to_string();
            assert_eq!(problem, format!("more work than any machine does: {declared}"));
        }
    }
}
