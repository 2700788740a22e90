//! Device addresses of the matrices and other operands of one GEMM launch.

use super::error::GemmError;
use super::spec::GemmSpec;
use crate::libraries::lt::Attribute;

/// Device addresses of the operands of one GEMM launch; their shapes and layouts are in its
/// [`GemmSpec`]. An address that the GEMM's epilogue and scales do not need is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GemmOperandAddresses<A = u64> {
    /// Address of matrix A.
    pub matrix_a: A,
    /// Address of matrix B.
    pub matrix_b: A,
    /// Address of matrix C; absent if C is the old content of D.
    pub matrix_c: Option<A>,
    /// Address of matrix D; D overlaps neither A nor B, and overlaps C only if C and D are one
    /// matrix.
    pub matrix_d: A,
    /// Address of the bias vector that the epilogue adds, or of the bias gradient that the epilogue
    /// writes.
    pub bias: Option<A>,
    /// Address of the matrix that cuBLASLt's epilogue saves for the backward pass, or reads in it;
    /// its size is [`GemmSpec::aux_matrix_bytes_of_whole_batch`].
    pub aux_matrix: Option<A>,
    /// Address of the f32 by which the elements of fp8 matrix A are multiplied.
    pub scale_a: Option<A>,
    /// Address of the f32 by which the elements of fp8 matrix B are multiplied.
    pub scale_b: Option<A>,
    /// Address of the f32 by which the elements of D are multiplied before they are rounded to fp8.
    pub scale_d: Option<A>,
    /// Address to which the GEMM writes the largest magnitude of D before D's scale factor is
    /// applied, an f32.
    pub amax_d: Option<A>,
    /// Address of a workspace for this GEMM launch alone; if absent, the launches of a lane (one
    /// stream) share a workspace.
    pub workspace: Option<A>,
}

impl<A: Copy> GemmOperandAddresses<A> {
    /// Matrices alone.
    pub const fn gemm_operands_from_a_b_d(a: A, b: A, d: A) -> Self {
        Self {
            matrix_a: a,
            matrix_b: b,
            matrix_c: None,
            matrix_d: d,
            bias: None,
            aux_matrix: None,
            scale_a: None,
            scale_b: None,
            scale_d: None,
            amax_d: None,
            workspace: None,
        }
    }

    /// Converts the address of each operand of the GEMM by the function `address`.
    pub fn map_operand_addresses<B>(
        self,
        mut address: impl FnMut(A) -> B,
    ) -> GemmOperandAddresses<B> {
        GemmOperandAddresses {
            matrix_a: address(self.matrix_a),
            matrix_b: address(self.matrix_b),
            matrix_c: self.matrix_c.map(&mut address),
            matrix_d: address(self.matrix_d),
            bias: self.bias.map(&mut address),
            aux_matrix: self.aux_matrix.map(&mut address),
            scale_a: self.scale_a.map(&mut address),
            scale_b: self.scale_b.map(&mut address),
            scale_d: self.scale_d.map(&mut address),
            amax_d: self.amax_d.map(&mut address),
            workspace: self.workspace.map(&mut address),
        }
    }
}

impl<A: Copy> From<[A; 3]> for GemmOperandAddresses<A> {
    fn from([a, b, d]: [A; 3]) -> Self {
        Self::gemm_operands_from_a_b_d(a, b, d)
    }
}

impl GemmOperandAddresses {
    /// Returns the cuBLASLt attributes and the addresses of bias, auxiliary matrix, scales and
    /// amax, as far as the GEMM needs them. cuBLASLt gets matrices A and B exchanged, so A's scale
    /// is set as cuBLASLt's B scale.
    ///
    /// # Errors
    /// The error is the name of the first operand that the launch lacks.
    pub(super) fn bias_aux_and_scale_pointer_attributes(
        &self,
        spec: &GemmSpec,
    ) -> Result<GemmPointerAttributes, GemmError> {
        use Attribute as At;
        let mut pointers = [None; 6];
        let needs = [
            (
                spec.bias_element_count_unless_none().is_some(),
                At::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                self.bias,
                "the bias",
            ),
            (
                spec.aux_row_stride_in_elements_or_bits().is_some(),
                At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                self.aux_matrix,
                "aux",
            ),
            (
                spec.scales.has_b_scale,
                At::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                self.scale_b,
                "B's scale",
            ),
            (
                spec.scales.has_a_scale,
                At::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                self.scale_a,
                "A's scale",
            ),
            (
                spec.scales.has_d_scale,
                At::CUBLASLT_MATMUL_DESC_D_SCALE_POINTER,
                self.scale_d,
                "D's scale",
            ),
            (
                spec.scales.writes_amax_of_d,
                At::CUBLASLT_MATMUL_DESC_AMAX_D_POINTER,
                self.amax_d,
                "D's amax",
            ),
        ];
        for (pointer, (needed, attribute, address, name)) in pointers.iter_mut().zip(needs) {
            if needed {
                let address = address.ok_or(GemmError::MissingOperand(name))?;
                *pointer = Some((attribute, address));
            }
        }
        Ok(pointers)
    }
}

/// Attributes of cuBLASLt's GEMM description whose values are device addresses: bias, auxiliary
/// matrix, scales of A, B and D, amax of D.
pub(super) type GemmPointerAttributes = [Option<(Attribute, u64)>; 6];
