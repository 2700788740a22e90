//! Defines declared work: the operations and bytes that the mathematics of a problem needs in any
//! implementation. The measured ceilings of a device are in another module (`measure::limits`).

use super::tensor::Dtype;

/// Kind of hardware unit that executes floating-point operations: matrix units or vector units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlopUnit {
    /// Matrix multiplications (GEMMs).
    Matmul,
    /// All operations besides matrix products: element-wise operations, reductions, exponentials.
    VectorArithmetic,
}

impl FlopUnit {
    /// Returns the name of the hardware unit in files.
    pub const fn hardware_unit_name(self) -> &'static str {
        match self {
            Self::Matmul => "matmul",
            Self::VectorArithmetic => "vector",
        }
    }
}

/// Number of floating-point operations on one kind of unit in one dtype; a multiply-add counts as
/// two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlopsOfUnitAndDtype {
    /// Kind of hardware unit that executes the operations.
    pub unit: FlopUnit,
    /// Dtype of the operands.
    pub dtype: Dtype,
    /// Number of floating-point operations.
    pub operations: u64,
}

impl FlopsOfUnitAndDtype {
    /// Returns the key of the measured ceiling for these operations: unit and dtype, such as
    /// "matmul f32".
    pub fn key_of_measured_ceiling(&self) -> String {
        format!("{} {}", self.unit.hardware_unit_name(), self.dtype.dtype_name())
    }
}

/// Declared work of one launch of a problem: floating-point operations, and bytes of memory
/// traffic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of floating-point operations by kind of hardware unit and dtype.
    pub flops: Vec<FlopsOfUnitAndDtype>,
    /// Minimum of bytes that an implementation must read: each input once.
    pub min_read_bytes: u64,
    /// Minimum of bytes that an implementation must write: each output once.
    pub min_write_bytes: u64,
    /// Data that one launch sends between GPUs; `None` if the problem uses one GPU.
    pub link: Option<DeclaredGpuLinkWork>,
}

/// Bytes that one execution of a problem sends between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeclaredGpuLinkWork {
    /// Minimum of bytes that a GPU must receive, for the GPU that receives most. These bytes
    /// divided by the time of a launch give the bus bandwidth as nccl-tests defines it.
    pub min_received_bytes: u64,
    /// Whether every GPU also sends as many bytes as it receives; otherwise only the first GPU
    /// sends.
    pub both_ways: bool,
    /// Number of GPUs.
    pub gpu_count: usize,
}

impl Work {
    /// Declares work that only reads and writes memory, without floating-point operations.
    pub fn bytes(read_bytes: u64, write_bytes: u64) -> Work {
        Self {
            flops: Vec::new(),
            min_read_bytes: read_bytes,
            min_write_bytes: write_bytes,
            link: None,
        }
    }

    /// Adds operations to the work and returns it.
    pub fn with_flops(mut self, unit: FlopUnit, dtype: Dtype, count: u64) -> Self {
        self.flops.push(FlopsOfUnitAndDtype { unit, dtype, operations: count });
        self
    }

    /// Adds the data that passes between GPUs, and returns the work for chained calls.
    pub fn with_link(mut self, link: DeclaredGpuLinkWork) -> Self {
        self.link = Some(link);
        self
    }

    /// Returns the number of matmul operations of all dtypes.
    pub fn matmul_flops(&self) -> u64 {
        self.flops
            .iter()
            .filter(|flops| flops.unit == FlopUnit::Matmul)
            .map(|flops| flops.operations)
            .sum()
    }

    /// Returns the number of bytes read and written.
    pub fn total_bytes(&self) -> u64 {
        self.min_read_bytes + self.min_write_bytes
    }
}
