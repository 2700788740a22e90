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
    Empty {
        /// Number of rows of D.
        m: usize,
        /// Number of columns of D.
        n: usize,
        /// Length of the sums.
        k: usize,
        /// Number of GEMMs in the batch.
        batch_count: usize,
    },
    /// A leading dimension is shorter than a row.
    #[error("matrix {matrix} has rows of {row} elements and a leading dimension of {ld}")]
    LeadingDimension {
        /// Name of the matrix: `A`, `B`, `C` or `D`.
        matrix: char,
        /// Distance from one stored row to the next, elements.
        ld: usize,
        /// Length of a stored row, elements.
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
        /// Number of rows of D.
        m: usize,
        /// Number of columns of D.
        n: usize,
    },
    /// cuBLASLt has no GEMM of these dtypes.
    #[error("cuBLASLt multiplies no {a} by {b} into {d}{}", if *.tf32 { " in TF32" } else { "" })]
    Dtypes {
        /// Element type of matrix A.
        a: MatrixDtype,
        /// Element type of matrix B.
        b: MatrixDtype,
        /// Element type of the result D.
        d: MatrixDtype,
        /// Whether f32 operands are rounded to TF32.
        tf32: bool,
    },
    /// cuBLASLt lacks this epilogue for this dtype.
    #[error("cuBLASLt has no epilogue {epilogue:?} for results in {d}")]
    Epilogue {
        /// The requested epilogue.
        epilogue: GemmEpilogue,
        /// Element type of the result D.
        d: MatrixDtype,
    },
    /// A scale belongs to a matrix that is not fp8.
    #[error("matrix {matrix} is {dtype}: only fp8 matrices have a scale or an amax")]
    Scale {
        /// Name of the matrix: `A`, `B` or `D`.
        matrix: char,
        /// Element type of the matrix, which is not fp8.
        dtype: MatrixDtype,
    },
    /// Error: alpha and beta must be whole numbers, because sums of integers are scaled by
    /// integers.
    #[error("alpha = {alpha} and beta = {beta} must be integers for sums in i32")]
    Scalars {
        /// Factor of the product.
        alpha: f32,
        /// Factor of matrix C.
        beta: f32,
    },
    /// The heuristic of cuBLASLt proposes no algorithm.
    #[error("cuBLASLt has no algorithm for a GEMM of {m} x {n}, k = {k}: {status}")]
    NoAlgorithm {
        /// Number of rows of D.
        m: usize,
        /// Number of columns of D.
        n: usize,
        /// Length of the sums.
        k: usize,
        /// Status that the heuristic returned.
        status: LtError,
    },
    /// The library failed.
    #[error("cuBLASLt failed to {action}: {status}")]
    Library {
        /// Action that failed, such as "launch a GEMM".
        action: &'static str,
        /// Status that cuBLASLt returned.
        status: LtError,
    },
    /// A launch lacks an address that the description asks for.
    #[error("a launch of this GEMM needs the address of {0}")]
    MissingOperand(&'static str),
    /// The variable `KERNELGATE_GEMMS` is set to an unknown word.
    #[error("KERNELGATE_GEMMS takes `seen` or `none`, not `{0}`")]
    Variable(String),
}

impl GemmError {
    /// Returns whether the library does not support this GEMM, in general or on this GPU: the case
    /// is skipped.
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
    fn an_unsupported_gemm_skips_the_case_and_a_failed_one_fails() {
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
