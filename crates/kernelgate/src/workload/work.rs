//! Declared work: the operations and bytes that the mathematics needs, independent of an
//! implementation. Measured limits are in another module (`measure::limits`).

use super::tensor::Dtype;

/// Hardware unit that executes floating-point operations: matrix or vector unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlopUnit {
    /// GEMMs.
    Matmul,
    /// All operations besides GEMMs: element-wise work, reductions, exponentials.
    Vector,
}

impl FlopUnit {
    /// Name of the hardware unit in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Matmul => "matmul",
            Self::Vector => "vector",
        }
    }
}

/// Floating-point operations of one unit and dtype; a multiply-add counts two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flops {
    /// Hardware unit that executes the operations.
    pub unit: FlopUnit,
    /// Dtype of the operands.
    pub dtype: Dtype,
    /// How many.
    pub count: u64,
}

impl Flops {
    /// Key of the operations' unit and dtype among the ceilings: "matmul f32".
    pub fn ceiling_key(&self) -> String {
        format!("{} {}", self.unit.name(), self.dtype.name())
    }
}

/// Declared work of one launch of a problem: operations and bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations by unit and dtype.
    pub flops: Vec<Flops>,
    /// The fewest bytes that must be read: each input once.
    pub read_bytes: u64,
    /// The fewest bytes that must be written: each output once.
    pub write_bytes: u64,
    /// Data that passes between GPUs, if the problem uses several.
    pub link: Option<GpuLinkWork>,
}

/// Bytes that pass between the GPUs of a set in one execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuLinkWork {
    /// Fewest bytes that a GPU has to receive; the GPU with the most counts. Divided by the time of
    /// a launch, these bytes give the bus bandwidth of nccl-tests.
    pub bytes: u64,
    /// Whether every GPU also sends as many bytes as it receives; otherwise only the first GPU
    /// sends.
    pub both_ways: bool,
    /// Number of GPUs.
    pub gpus: usize,
}

impl Work {
    /// Declares work that only moves memory.
    pub fn bytes(read_bytes: u64, write_bytes: u64) -> Work {
        Self { flops: Vec::new(), read_bytes, write_bytes, link: None }
    }

    /// Adds operations, for chaining.
    pub fn with_flops(mut self, unit: FlopUnit, dtype: Dtype, count: u64) -> Self {
        self.flops.push(Flops { unit, dtype, count });
        self
    }

    /// Adds the data that passes between GPUs, for chaining.
    pub fn with_link(mut self, link: GpuLinkWork) -> Self {
        self.link = Some(link);
        self
    }

    /// Number of GEMM operations of all dtypes.
    pub fn matmul_flops(&self) -> u64 {
        self.flops
            .iter()
            .filter(|flops| flops.unit == FlopUnit::Matmul)
            .map(|flops| flops.count)
            .sum()
    }

    /// Bytes read and written.
    pub fn total_bytes(&self) -> u64 {
        self.read_bytes + self.write_bytes
    }
}
