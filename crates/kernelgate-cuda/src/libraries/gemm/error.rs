//! Errors of GEMMs.

use super::dtype::MatrixDtype;
use super::epilogue::GemmEpilogue;
use crate::BackendError;
use crate::libraries::lt::LtError;

/// The reason why a GEMM is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GemmError {
    /// m, n, k or the batch count is zero.
    #[error("a GEMM of {m} x {n}, k = {k}, batch {batch_count} is empty")]
    Empty { m: usize, n: usize, k: usize, batch_count: usize },
    /// A leading dimension is shorter than a row.
    #[error("matrix {matrix} has rows of {row} elements and a leading dimension of {ld}")]
    LeadingDimension {
        /// Name of the matrix: `A`, `B`, `C` or `D`.
        matrix: char,
        ld: usize,
        row: usize,
    },
    /// The result matrices of a batched GEMM overlap.
    #[error(
        "results of {m} x {n} overlap: one is {stride} elements behind the other, rows are {ld} apart"
    )]
    OverlappingResults {
        /// Distance from one result matrix of the batch to the next, elements.
        stride: usize,
        /// Distance from one row of the matrix to the next, elements.
        ld: usize,
        m: usize,
        n: usize,
    },
    /// cuBLASLt has no GEMM of these dtypes.
    #[error("cuBLASLt multiplies no {a} by {b} into {d}{}", if *.tf32 { " in TF32" } else { "" })]
    Dtypes { a: MatrixDtype, b: MatrixDtype, d: MatrixDtype, tf32: bool },
    /// cuBLASLt lacks this epilogue for this dtype.
    #[error("cuBLASLt has no epilogue {epilogue:?} for results in {d}")]
    Epilogue { epilogue: GemmEpilogue, d: MatrixDtype },
    /// A scale belongs to a matrix that is not fp8.
    #[error("matrix {matrix} is {dtype}: only fp8 matrices have a scale or an amax")]
    Scale {
        /// `A`, `B` or `D`.
        matrix: char,
        dtype: MatrixDtype,
    },
    /// Sums of integers are scaled by integers.
    #[error("alpha = {alpha} and beta = {beta} must be integers for sums in i32")]
    Scalars { alpha: f32, beta: f32 },
    /// The heuristic of cuBLASLt proposes no algorithm.
    #[error("cuBLASLt has no algorithm for a GEMM of {m} x {n}, k = {k}: {status}")]
    NoAlgorithm { m: usize, n: usize, k: usize, status: LtError },
    /// The library failed.
    #[error("cuBLASLt failed to {action}: {status}")]
    Library { action: &'static str, status: LtError },
    /// A launch lacks an address that the description asks for.
    #[error("a launch of this GEMM needs the address of {0}")]
    MissingOperand(&'static str),
    /// The variable `KERNELGATE_GEMMS` is set to an unknown word.
    #[error("KERNELGATE_GEMMS takes `seen` or `none`, not `{0}`")]
    Variable(String),
}

impl GemmError {
    /// Whether the library does not compute it, or not on this GPU: a skip and no fault.
    pub const fn is_unsupported(&self) -> bool {
        matches!(self, Self::Dtypes { .. } | Self::Epilogue { .. } | Self::NoAlgorithm { .. })
    }

    /// Makes an error of the library from its status and the action that failed.
    pub(in crate::libraries) fn library_error(action: &'static str) -> impl Fn(LtError) -> Self {
        move |status| Self::Library { action, status }
    }
}

impl From<GemmError> for BackendError {
    fn from(error: GemmError) -> Self {
        match error.is_unsupported() {
            true => Self::Unsupported(error.to_string()),
            false => Self::Launch(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_gemms_are_skips_and_failures_are_not() {
        let refused = GemmError::NoAlgorithm { m: 8, n: 64, k: 3, status: LtError::NOT_SUPPORTED };
        let reason = "cuBLASLt has no algorithm for a GEMM of 8 x 64, k = 3: \
                      CUBLAS_STATUS_NOT_SUPPORTED";
        assert_eq!(BackendError::from(refused), BackendError::Unsupported(reason.to_owned()));
        let failed = GemmError::Library { action: "open", status: LtError::NO_FUNCTION };
        assert!(matches!(BackendError::from(failed), BackendError::Launch(_)));
        let empty = GemmError::Empty { m: 0, n: 1, k: 1, batch_count: 1 };
        assert!(matches!(BackendError::from(empty), BackendError::Launch(_)));
    }
}
