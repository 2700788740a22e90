//! Element types of matrices.

use crate::libraries::lt;

/// Element type of a matrix in a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmMatrixDtype {
    /// Brain floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// 8-bit floats with 4 exponent and 3 mantissa bits.
    E4m3,
    /// 8-bit floats with 5 exponent and 2 mantissa bits.
    E5m2,
    /// Signed bytes.
    I8,
    /// 32-bit integers, the type of sums of products of signed bytes.
    I32,
}

impl GemmMatrixDtype {
    /// Size of a matrix element in bytes.
    pub const fn size_of_element_in_bytes(self) -> usize {
        match self {
            Self::E4m3 | Self::E5m2 | Self::I8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
        }
    }

    /// Whether the dtype is an 8-bit float (E4M3 or E5M2).
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    pub(super) const fn cublaslt_data_type(self) -> lt::DataType {
        match self {
            Self::Bf16 => lt::DataType::CUDA_R_16BF,
            Self::F16 => lt::DataType::CUDA_R_16F,
            Self::F32 => lt::DataType::CUDA_R_32F,
            Self::E4m3 => lt::DataType::CUDA_R_8F_E4M3,
            Self::E5m2 => lt::DataType::CUDA_R_8F_E5M2,
            Self::I8 => lt::DataType::CUDA_R_8I,
            Self::I32 => lt::DataType::CUDA_R_32I,
        }
    }
}

impl std::fmt::Display for GemmMatrixDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::I8 => "i8",
            Self::I32 => "i32",
        })
    }
}
