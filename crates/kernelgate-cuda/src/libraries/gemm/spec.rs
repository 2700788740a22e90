//! Description of a GEMM of row-major matrices, and its column-major layout for cuBLASLt.

use super::dtype::GemmMatrixDtype;
use super::epilogue::{GemmEpilogue, GemmEpilogueActivation};
use super::error::GemmError;
use crate::libraries::lt;

/// Which device scalars, each an f32, an fp8 GEMM uses: factors of A, B and D, and the largest
/// magnitude of D before its factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GemmScalesPresent {
    /// Whether the fp8 GEMM multiplies A by a scale factor in device memory.
    pub has_a_scale: bool,
    /// Whether the fp8 GEMM multiplies B by a scale factor in device memory.
    pub has_b_scale: bool,
    /// Whether the fp8 GEMM multiplies D by a scale factor in device memory.
    pub has_d_scale: bool,
    /// Whether the GEMM writes the largest magnitude of D to device memory.
    pub writes_amax_of_d: bool,
}

/// D `[m, n]` = epilogue(alpha · op(A) `[m, k]` · op(B) `[k, n]` + beta · C `[m, n]`), a batch of
/// them; matrices are row-major.
///
/// Callers of `GemmSpec::new` write only the fields that differ from its defaults: `GemmSpec {
/// b_transposed: true, ..GemmSpec::new(m, n, k, Bf16, F32) }`. Leading dimensions and strides count
/// elements; `None` means that rows and matrices follow each other without a gap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemmSpec {
    /// Rows of D.
    pub m: usize,
    /// Columns of D.
    pub n: usize,
    /// Number of products that each element of D sums.
    pub k: usize,
    /// Element type of matrix A.
    pub a: GemmMatrixDtype,
    /// Element type of matrix B.
    pub b: GemmMatrixDtype,
    /// Element type of the result D and of C.
    pub d: GemmMatrixDtype,
    /// Whether the tensor cores round the GEMM's f32 inputs to TF32.
    pub rounds_inputs_to_tf32: bool,
    /// Whether A is stored as `[k, m]`; otherwise as `[m, k]`.
    pub a_transposed: bool,
    /// Whether B is stored as `[n, k]`; otherwise as `[k, n]`.
    pub b_transposed: bool,
    /// Distance from one stored row of A to the next, elements.
    pub lda: Option<usize>,
    /// Distance from one stored row of B to the next, elements.
    pub ldb: Option<usize>,
    /// Distance from one row of C to the next, elements; `None` means `ldd`.
    pub ldc: Option<usize>,
    /// Distance from one row of D to the next, elements.
    pub ldd: Option<usize>,
    /// Number of GEMMs of equal shape in the batch; 1 for a single GEMM.
    pub batch_count: usize,
    /// Distance from one matrix A of the batch to the next, elements; 0 if all products share one
    /// A.
    pub batch_stride_a: Option<usize>,
    /// Distance from one matrix B of the batch to the next, elements; 0 if all products share one
    /// B.
    pub batch_stride_b: Option<usize>,
    /// Distance from one matrix C of the batch to the next, elements; `None` means
    /// `batch_stride_d`.
    pub batch_stride_c: Option<usize>,
    /// Distance from one matrix D of the batch to the next, elements.
    pub batch_stride_d: Option<usize>,
    /// Factor alpha of the matrix product A·B.
    pub alpha: f32,
    /// Factor `beta` of matrix C; the GEMM does not read C if `beta` is 0. Matrix C is the old
    /// content of D unless the launch names another matrix.
    pub beta: f32,
    /// Epilogue of the GEMM: bias, activation or gradient, applied before the result is stored.
    pub epilogue: GemmEpilogue,
    /// Scales of fp8 matrices.
    pub scales: GemmScalesPresent,
    /// Alignment in bytes that the addresses of all matrices are known to have. cuBLASLt does not
    /// propose algorithms that need more alignment than these bytes; its default is 256.
    pub min_address_alignment_bytes: u32,
}

/// Alignment, bytes, that cuBLASLt assumes for matrix addresses by default.
pub(super) const DEFAULT_MATRIX_ALIGNMENT: u32 = 256;

/// Column-major layout in which cuBLASLt sees one row-major matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ColumnMajorLayout {
    pub dtype: GemmMatrixDtype,
    pub rows: usize,
    pub columns: usize,
    /// Leading dimension: distance from one column of the matrix to the next, elements.
    pub ld: usize,
    /// Distance from one matrix of the batch to the next, elements.
    pub batch_stride: usize,
}

/// Layouts of the matrices in cuBLASLt's order: its A is the caller's B, because cuBLASLt computes
/// Dᵀ = op(B)ᵀ·op(A)ᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ColumnMajorLayouts {
    pub a: ColumnMajorLayout,
    pub b: ColumnMajorLayout,
    pub c: ColumnMajorLayout,
    pub d: ColumnMajorLayout,
}

impl GemmSpec {
    /// Describes D = A·B with A and B of dtype `inputs`, without batch, epilogue or gaps between
    /// rows.
    pub const fn new(
        m: usize,
        n: usize,
        k: usize,
        inputs: GemmMatrixDtype,
        d: GemmMatrixDtype,
    ) -> Self {
        Self {
            m,
            n,
            k,
            a: inputs,
            b: inputs,
            d,
            rounds_inputs_to_tf32: false,
            a_transposed: false,
            b_transposed: false,
            lda: None,
            ldb: None,
            ldc: None,
            ldd: None,
            batch_count: 1,
            batch_stride_a: None,
            batch_stride_b: None,
            batch_stride_c: None,
            batch_stride_d: None,
            alpha: 1.0,
            beta: 0.0,
            epilogue: GemmEpilogue::NoEpilogue,
            scales: GemmScalesPresent {
                has_a_scale: false,
                has_b_scale: false,
                has_d_scale: false,
                writes_amax_of_d: false,
            },
            min_address_alignment_bytes: DEFAULT_MATRIX_ALIGNMENT,
        }
    }

    /// Dtype of matrix C: the dtype of D, but bf16 if D is fp8.
    pub const fn dtype_of_c(&self) -> GemmMatrixDtype {
        if self.d.is_fp8() { GemmMatrixDtype::Bf16 } else { self.d }
    }

    /// Dtype of the bias and of its gradient: the dtype of D; with fp8 inputs f16 if D is f16,
    /// otherwise bf16.
    pub const fn dtype_of_bias_and_its_gradient(&self) -> GemmMatrixDtype {
        match self.d {
            d if !self.a.is_fp8() => d,
            GemmMatrixDtype::F16 => GemmMatrixDtype::F16,
            _ => GemmMatrixDtype::Bf16,
        }
    }

    /// Number of elements of the bias or of its gradient; `None` for an epilogue without a bias.
    pub const fn bias_element_count_unless_none(&self) -> Option<usize> {
        match self.epilogue {
            GemmEpilogue::BiasGradientFromA => Some(self.m),
            epilogue if epilogue.uses_bias_vector() => Some(self.n),
            _ => None,
        }
    }

    /// Distance from one row of the auxiliary matrix to the next, elements (bits for ReLU); `None`
    /// for an epilogue without an auxiliary matrix.
    pub const fn aux_row_stride_in_elements_or_bits(&self) -> Option<usize> {
        match self.epilogue.activation_with_auxiliary_matrix() {
            Some(GemmEpilogueActivation::Relu) => Some(self.n.next_multiple_of(128)),
            Some(GemmEpilogueActivation::Gelu) => Some(self.n.next_multiple_of(8)),
            None => None,
        }
    }

    /// Returns the total bytes of the epilogue's auxiliary matrices of all GEMMs of the batch.
    pub const fn aux_matrix_bytes_of_whole_batch(&self) -> Option<usize> {
        match (
            self.epilogue.activation_with_auxiliary_matrix(),
            self.aux_row_stride_in_elements_or_bits(),
        ) {
            (Some(GemmEpilogueActivation::Relu), Some(ld)) => {
                Some(self.batch_count * self.m * ld / 8)
            }
            (Some(GemmEpilogueActivation::Gelu), Some(ld)) => {
                Some(self.batch_count * self.m * ld * self.d.size_of_element_in_bytes())
            }
            _ => None,
        }
    }

    /// Checks that cuBLASLt supports the GEMM's dtypes together and that extents and strides
    /// describe matrices that do not overlap.
    ///
    /// # Errors
    /// The error is the first operand whose layout is invalid.
    pub fn check_gemm_spec(&self) -> Result<(), GemmError> {
        let &Self {
            m,
            n,
            k,
            batch_count,
            a,
            b,
            d,
            rounds_inputs_to_tf32: tf32,
            epilogue,
            alpha,
            beta,
            ..
        } = self;
        if m == 0 || n == 0 || k == 0 || batch_count == 0 {
            return Err(GemmError::ZeroSizedGemm { m, n, k, batch_count });
        }
        if !self.cublaslt_supports_dtypes() {
            return Err(GemmError::UnsupportedDtypes { a, b, d, rounds_f32_to_tf32: tf32 });
        }
        if d == GemmMatrixDtype::I32 && epilogue != GemmEpilogue::NoEpilogue {
            return Err(GemmError::UnsupportedEpilogue { epilogue, d });
        }
        if d == GemmMatrixDtype::I32 && (alpha.fract() != 0.0 || beta.fract() != 0.0) {
            return Err(GemmError::NonIntegerAlphaOrBeta { alpha, beta });
        }
        let GemmScalesPresent {
            has_a_scale: scale_a,
            has_b_scale: scale_b,
            has_d_scale: scale_d,
            writes_amax_of_d: amax_d,
        } = self.scales;
        for (matrix, dtype, scaled) in
            [('A', a, scale_a), ('B', b, scale_b), ('D', d, scale_d || amax_d)]
        {
            if scaled && !dtype.is_fp8() {
                return Err(GemmError::ScaleOfNonFp8Matrix { matrix_name: matrix, dtype });
            }
        }
        let layouts = self.column_major_layouts();
        // cuBLASLt is column-major, so a column of its layout is a row of the caller's matrix.
        for (matrix, layout) in
            [('A', layouts.b), ('B', layouts.a), ('C', layouts.c), ('D', layouts.d)]
        {
            if layout.ld < layout.rows {
                return Err(GemmError::LeadingDimensionTooShort {
                    matrix_name: matrix,
                    leading_dimension: layout.ld,
                    stored_row_elements: layout.rows,
                });
            }
        }
        // The result matrices D of a batch lie one behind another, or side by side within rows of
        // one leading dimension.
        let (ld, stride) = (layouts.d.ld, layouts.d.batch_stride);
        let behind = stride >= (m - 1) * ld + n;
        let interleaved = stride >= n && (batch_count - 1) * stride + n <= ld;
        if batch_count > 1 && !behind && !interleaved {
            return Err(GemmError::OverlappingResultMatrices {
                batch_stride: stride,
                leading_dimension: ld,
                m,
                n,
            });
        }
        Ok(())
    }

    /// Whether cuBLASLt supports this combination of dtypes of A, B and D.
    const fn cublaslt_supports_dtypes(&self) -> bool {
        use GemmMatrixDtype::{Bf16, E4m3, E5m2, F16, F32, I8, I32};
        if self.rounds_inputs_to_tf32 && !matches!(self.a, F32) {
            return false;
        }
        matches!(
            (self.a, self.b, self.d),
            (Bf16, Bf16, Bf16 | F32)
                | (F16, F16, F16 | F32)
                | (F32, F32, F32)
                | (I8, I8, I32)
                | (E4m3, E4m3, Bf16 | F16 | F32 | E4m3)
                | (E4m3, E5m2, Bf16 | F16 | F32 | E4m3 | E5m2)
                | (E5m2, E4m3, Bf16 | F16 | F32 | E4m3 | E5m2)
        )
    }

    pub(super) const fn cublas_compute_type(&self) -> lt::Compute {
        match (self.d, self.rounds_inputs_to_tf32) {
            (GemmMatrixDtype::I32, _) => lt::Compute::CUBLAS_COMPUTE_32I,
            (_, true) => lt::Compute::CUBLAS_COMPUTE_32F_FAST_TF32,
            (_, false) => lt::Compute::CUBLAS_COMPUTE_32F,
        }
    }

    pub(super) const fn cublaslt_alpha_and_beta(&self) -> lt::GemmAlphaAndBeta {
        match self.d {
            GemmMatrixDtype::I32 => {
                lt::GemmAlphaAndBeta::I32AlphaBeta([self.alpha as i32, self.beta as i32])
            }
            _ => lt::GemmAlphaAndBeta::F32AlphaBeta([self.alpha, self.beta]),
        }
    }

    /// Returns the column-major layouts of the GEMM's row-major matrices for cuBLASLt: rows and
    /// columns are exchanged.
    pub(super) fn column_major_layouts(&self) -> ColumnMajorLayouts {
        let layout = |dtype, [rows, columns]: [usize; 2], ld: Option<usize>, stride| {
            let ld = ld.unwrap_or(rows);
            let batch_stride = Option::unwrap_or(stride, ld * columns);
            ColumnMajorLayout { dtype, rows, columns, ld, batch_stride }
        };
        let &Self { m, n, k, .. } = self;
        let a = if self.a_transposed { [m, k] } else { [k, m] };
        let b = if self.b_transposed { [k, n] } else { [n, k] };
        let (ldc, stride_c) = (self.ldc.or(self.ldd), self.batch_stride_c.or(self.batch_stride_d));
        ColumnMajorLayouts {
            a: layout(self.b, b, self.ldb, self.batch_stride_b),
            b: layout(self.a, a, self.lda, self.batch_stride_a),
            c: layout(self.dtype_of_c(), [n, m], ldc, stride_c),
            d: layout(self.d, [n, m], self.ldd, self.batch_stride_d),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::GemmMatrixDtype::{Bf16, E4m3, E5m2, F16, F32, I8, I32};
    use super::*;

    const PLAIN_6X4X10_GEMM: GemmSpec = GemmSpec::new(6, 4, 10, Bf16, F32);

    fn rows_columns_ld_and_batch_stride(layout: ColumnMajorLayout) -> [usize; 4] {
        [layout.rows, layout.columns, layout.ld, layout.batch_stride]
    }

    #[test]
    fn a_row_major_matrix_is_column_major_with_swapped_extents() {
        let layouts = PLAIN_6X4X10_GEMM.column_major_layouts();
        assert_eq!(rows_columns_ld_and_batch_stride(layouts.a), [4, 10, 4, 40], "B");
        assert_eq!(rows_columns_ld_and_batch_stride(layouts.b), [10, 6, 10, 60], "A");
        assert_eq!(rows_columns_ld_and_batch_stride(layouts.d), [4, 6, 4, 24]);
        assert_eq!(layouts.c, layouts.d);
        let both = GemmSpec { a_transposed: true, b_transposed: true, ..PLAIN_6X4X10_GEMM }
            .column_major_layouts();
        assert_eq!(rows_columns_ld_and_batch_stride(both.a), [10, 4, 10, 40], "B");
        assert_eq!(rows_columns_ld_and_batch_stride(both.b), [6, 10, 6, 60], "A");
        assert_eq!(both.d, layouts.d);
    }

    #[test]
    fn gemm_batches_are_contiguous_unless_strides_are_given() {
        let gaps = GemmSpec { ldb: Some(7), ldd: Some(9), batch_count: 3, ..PLAIN_6X4X10_GEMM };
        let layouts = gaps.column_major_layouts();
        assert_eq!(rows_columns_ld_and_batch_stride(layouts.a), [4, 10, 7, 70]);
        assert_eq!(rows_columns_ld_and_batch_stride(layouts.d), [4, 6, 9, 54]);
        assert_eq!(layouts.c, layouts.d, "C lies as D does");
        let shared =
            GemmSpec { batch_stride_b: Some(0), batch_stride_d: Some(100), ldc: Some(4), ..gaps };
        let layouts = shared.column_major_layouts();
        assert_eq!((layouts.a.batch_stride, layouts.d.batch_stride), (0, 100));
        assert_eq!(rows_columns_ld_and_batch_stride(layouts.c), [4, 6, 4, 100]);
        assert_eq!(shared.check_gemm_spec(), Ok(()));
    }

    #[test]
    fn gemms_with_an_empty_extent_or_overlapping_rows_are_refused() {
        let refused = |spec: GemmSpec| spec.check_gemm_spec().unwrap_err();
        assert!(matches!(
            refused(GemmSpec { k: 0, ..PLAIN_6X4X10_GEMM }),
            GemmError::ZeroSizedGemm { k: 0, .. }
        ));
        let short = GemmSpec { lda: Some(9), ..PLAIN_6X4X10_GEMM };
        assert_eq!(
            refused(short),
            GemmError::LeadingDimensionTooShort {
                matrix_name: 'A',
                leading_dimension: 9,
                stored_row_elements: 10
            }
        );
        assert_eq!(GemmSpec { a_transposed: true, ..short }.check_gemm_spec(), Ok(()));
        let overlapping =
            GemmSpec { batch_count: 2, batch_stride_d: Some(23), ..PLAIN_6X4X10_GEMM };
        assert_eq!(
            refused(overlapping),
            GemmError::OverlappingResultMatrices {
                batch_stride: 23,
                leading_dimension: 4,
                m: 6,
                n: 4
            }
        );
        // The next matrix D of the batch begins in the gap behind the last row, or in the gap
        // behind the first row.
        let behind = GemmSpec { ldd: Some(8), batch_stride_d: Some(44), ..overlapping };
        let interleaved = GemmSpec { batch_stride_d: Some(4), ..behind };
        assert_eq!([behind, interleaved].map(|spec| spec.check_gemm_spec()), [Ok(()), Ok(())]);
        assert!(GemmSpec { batch_count: 3, ..interleaved }.check_gemm_spec().is_err());
    }

    #[test]
    fn gemm_dtype_combinations_follow_cublaslts_table() {
        let checked = |a, b, d| GemmSpec { b, ..GemmSpec::new(16, 16, 16, a, d) }.check_gemm_spec();
        for (a, b, d) in [(F16, F16, F16), (I8, I8, I32), (E4m3, E5m2, E5m2), (F32, F32, F32)] {
            assert_eq!(checked(a, b, d), Ok(()));
        }
        for (a, b, d) in [(F16, Bf16, F32), (E5m2, E5m2, Bf16), (I8, I8, F32), (F32, F32, Bf16)] {
            assert_eq!(
                checked(a, b, d),
                Err(GemmError::UnsupportedDtypes { a, b, d, rounds_f32_to_tf32: false })
            );
        }
        assert!(
            GemmSpec { rounds_inputs_to_tf32: true, ..PLAIN_6X4X10_GEMM }
                .check_gemm_spec()
                .unwrap_err()
                .means_unsupported_gemm()
        );
        let integers = GemmSpec::new(16, 16, 16, I8, I32);
        let halved = GemmSpec { alpha: 0.5, ..integers };
        assert_eq!(
            halved.check_gemm_spec(),
            Err(GemmError::NonIntegerAlphaOrBeta { alpha: 0.5, beta: 0.0 })
        );
        let biased = GemmSpec { epilogue: GemmEpilogue::Bias, ..integers };
        assert!(biased.check_gemm_spec().unwrap_err().means_unsupported_gemm());
        let scales = GemmScalesPresent { has_d_scale: true, ..GemmScalesPresent::default() };
        let scaled = GemmSpec { scales, ..GemmSpec::new(16, 16, 16, E4m3, Bf16) };
        assert_eq!(
            scaled.check_gemm_spec(),
            Err(GemmError::ScaleOfNonFp8Matrix { matrix_name: 'D', dtype: Bf16 })
        );
    }

    #[test]
    fn fp8_gemms_take_a_16_bit_bias_and_bf16_c_for_fp8_d() {
        let fp8 = |d| GemmSpec::new(16, 16, 16, E4m3, d);
        assert_eq!(
            [E4m3, F16, F32].map(|d| fp8(d).dtype_of_bias_and_its_gradient()),
            [Bf16, F16, Bf16]
        );
        assert_eq!([E4m3, F16, F32].map(|d| fp8(d).dtype_of_c()), [Bf16, F16, F32]);
        assert_eq!(PLAIN_6X4X10_GEMM.dtype_of_bias_and_its_gradient(), F32);
    }

    #[test]
    fn gemm_auxiliary_rows_are_padded_as_cublaslt_requires() {
        let spec = |function| GemmSpec {
            n: 200,
            batch_count: 2,
            epilogue: GemmEpilogue::Activation {
                function,
                adds_bias: false,
                stores_auxiliary_matrix: true,
            },
            ..PLAIN_6X4X10_GEMM
        };
        let relu = spec(GemmEpilogueActivation::Relu);
        assert_eq!(
            (relu.aux_row_stride_in_elements_or_bits(), relu.aux_matrix_bytes_of_whole_batch()),
            (Some(256), Some(2 * 6 * 256 / 8))
        );
        let gelu = GemmSpec { n: 201, ..spec(GemmEpilogueActivation::Gelu) };
        assert_eq!(
            (gelu.aux_row_stride_in_elements_or_bits(), gelu.aux_matrix_bytes_of_whole_batch()),
            (Some(208), Some(2 * 6 * 208 * 4))
        );
        assert_eq!(
            (
                PLAIN_6X4X10_GEMM.aux_row_stride_in_elements_or_bits(),
                PLAIN_6X4X10_GEMM.aux_matrix_bytes_of_whole_batch()
            ),
            (None, None)
        );
        assert_eq!(relu.bias_element_count_unless_none(), None);
        let sums =
            |epilogue| GemmSpec { epilogue, ..PLAIN_6X4X10_GEMM }.bias_element_count_unless_none();
        assert_eq!(
            [GemmEpilogue::BiasGradientFromA, GemmEpilogue::BiasGradientFromB, GemmEpilogue::Bias]
                .map(sums),
            [Some(6), Some(4), Some(4)]
        );
    }
}
