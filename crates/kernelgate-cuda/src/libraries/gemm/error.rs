//! Errors of GEMMs.

use super::dtype::GemmMatrixDtype;
use super::epilogue::GemmEpilogue;
use crate::BackendError;
use crate::libraries::lt::CublasLtError;

/// The reason why a GEMM cannot be described, prepared or enqueued.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GemmError {
    /// One of m, n, k and the number of GEMMs in the batch is zero.
    #[error("a GEMM of {m} x {n}, k = {k}, batch {batch_count} is empty")]
    ZeroSizedGemm {
        /// Number of rows of the result D.
        m: usize,
        /// Number of columns of the result D.
        n: usize,
        /// Number of products that each element of D sums.
        k: usize,
        /// Number of GEMMs in the batch.
        batch_count: usize,
    },
    /// The leading dimension of a matrix is shorter than a stored row.
    #[error(
        "matrix {matrix_name} has rows of {stored_row_elements} elements and a leading dimension of {leading_dimension}"
    )]
    LeadingDimensionTooShort {
        /// Name of the matrix (`A`, `B`, `C` or `D`).
        matrix_name: char,
        /// Leading dimension: distance in elements from one stored row to the next.
        leading_dimension: usize,
        /// Length of a stored row in elements.
        stored_row_elements: usize,
    },
    /// The result matrices of a batch of GEMMs overlap in memory.
    #[error(
        "results of {m} x {n} overlap: one is {batch_stride} elements behind the other, rows are {leading_dimension} apart"
    )]
    OverlappingResultMatrices {
        /// Distance in elements from one result matrix of the batch to the next.
        batch_stride: usize,
        /// Distance in elements from one row of the result matrix to the next.
        leading_dimension: usize,
        /// Number of rows of the result D.
        m: usize,
        /// Number of columns of the result D.
        n: usize,
    },
    /// cuBLASLt does not support this combination of dtypes.
    #[error("cuBLASLt multiplies no {a} by {b} into {d}{}", if *.rounds_f32_to_tf32 { " in TF32" } else { "" })]
    UnsupportedDtypes {
        /// Element type of matrix A.
        a: GemmMatrixDtype,
        /// Element type of matrix B.
        b: GemmMatrixDtype,
        /// Element type of the result D.
        d: GemmMatrixDtype,
        /// Whether f32 operands are rounded to TF32.
        rounds_f32_to_tf32: bool,
    },
    /// cuBLASLt does not support this epilogue for this dtype of D.
    #[error("cuBLASLt has no epilogue {epilogue:?} for results in {d}")]
    UnsupportedEpilogue {
        /// The requested epilogue.
        epilogue: GemmEpilogue,
        /// Element type of the result D.
        d: GemmMatrixDtype,
    },
    /// A scale or an amax was requested for a matrix that is not fp8.
    #[error("matrix {matrix_name} is {dtype}: only fp8 matrices have a scale or an amax")]
    ScaleOfNonFp8Matrix {
        /// Name of the matrix (`A`, `B` or `D`).
        matrix_name: char,
        /// Element type of the matrix, which is not an 8-bit float.
        dtype: GemmMatrixDtype,
    },
    /// alpha or beta is not a whole number, although D is i32, where both factors are integers.
    #[error("alpha = {alpha} and beta = {beta} must be integers for sums in i32")]
    NonIntegerAlphaOrBeta {
        /// Factor alpha of the matrix product A·B.
        alpha: f32,
        /// Factor beta of matrix C.
        beta: f32,
    },
    /// cuBLASLt's heuristic proposes no algorithm for the GEMM.
    #[error("cuBLASLt has no algorithm for a GEMM of {m} x {n}, k = {k}: {status}")]
    NoGemmAlgorithmProposed {
        /// Number of rows of the result D.
        m: usize,
        /// Number of columns of the result D.
        n: usize,
        /// Length of the sums.
        k: usize,
        /// Status that cuBLASLt's heuristic returned.
        status: CublasLtError,
    },
    /// The library failed.
    #[error("cuBLASLt failed to {failed_action}: {status}")]
    CublasLtCallFailed {
        /// Action of cuBLASLt that failed, such as "launch a GEMM".
        failed_action: &'static str,
        /// Status that cuBLASLt returned.
        status: CublasLtError,
    },
    /// The operands of a launch lack an address that the specification of the GEMM requires.
    #[error("a launch of this GEMM needs the address of {0}")]
    MissingOperand(&'static str),
    /// The variable `KERNELGATE_GEMMS` has an unknown value.
    #[error("KERNELGATE_GEMMS takes `seen` or `none`, not `{0}`")]
    InvalidGemmsVariable(String),
}

impl GemmError {
    /// Whether cuBLASLt does not support this GEMM, in general or on this GPU, so that the case is
    /// skipped.
    pub const fn means_unsupported_gemm(&self) -> bool {
        matches!(
            self,
            Self::UnsupportedDtypes { .. }
                | Self::UnsupportedEpilogue { .. }
                | Self::NoGemmAlgorithmProposed { .. }
        )
    }

    /// Returns a function that turns a status of cuBLASLt into an error with this action.
    pub(in crate::libraries) fn error_for_cublaslt_action(
        action: &'static str,
    ) -> impl Fn(CublasLtError) -> Self {
        move |status| Self::CublasLtCallFailed { failed_action: action, status }
    }
}

impl From<GemmError> for BackendError {
    fn from(error: GemmError) -> Self {
        match error.means_unsupported_gemm() {
            true => Self::Unsupported(error.to_string()),
            false => Self::ComputationFailed(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_gemm_skips_the_case_and_a_failed_one_fails() {
        let refused = GemmError::NoGemmAlgorithmProposed {
            m: 8,
            n: 64,
            k: 3,
            status: CublasLtError::NOT_SUPPORTED,
        };
        let reason = "cuBLASLt has no algorithm for a GEMM of 8 x 64, k = 3: \
                      CUBLAS_STATUS_NOT_SUPPORTED";
        assert_eq!(BackendError::from(refused), BackendError::Unsupported(reason.to_owned()));
        let failed = GemmError::CublasLtCallFailed {
            failed_action: "open",
            status: CublasLtError::LIBRARY_OR_FUNCTION_MISSING,
        };
        assert!(matches!(BackendError::from(failed), BackendError::ComputationFailed(_)));
        let empty = GemmError::ZeroSizedGemm { m: 0, n: 1, k: 1, batch_count: 1 };
        assert!(matches!(BackendError::from(empty), BackendError::ComputationFailed(_)));
    }
}
