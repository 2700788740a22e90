//! Device addresses of one launch of a GEMM.

use super::error::GemmError;
use super::spec::GemmSpec;
use crate::libraries::lt::Attribute;

/// Device addresses of a launch; matrices lie as the GEMM's [`GemmSpec`] describes. Operands that
/// the epilogue and scales do not need are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GemmOperands<A = u64> {
    /// Address of matrix A.
    pub a: A,
    /// Address of matrix B.
    pub b: A,
    /// Address of matrix C, if it differs from D.
    pub c: Option<A>,
    /// D; overlaps neither A nor B, and C only where both are one matrix.
    pub d: A,
    /// Address of the bias, or of the bias gradient.
    pub bias: Option<A>,
    /// Address of the epilogue's auxiliary matrix; its size is [`GemmSpec::aux_bytes`].
    pub aux: Option<A>,
    /// Address of the f32 factor of matrix A.
    pub scale_a: Option<A>,
    /// Address of the f32 factor of matrix B.
    pub scale_b: Option<A>,
    /// Address of the f32 factor of matrix D.
    pub scale_d: Option<A>,
    /// Largest magnitude of D before D's scale factor is applied, an f32.
    pub amax_d: Option<A>,
    /// Workspace for this GEMM launch alone; if absent, the launches of a lane share a workspace.
    pub workspace: Option<A>,
}

impl<A: Copy> GemmOperands<A> {
    /// Matrices alone.
    pub const fn new(a: A, b: A, d: A) -> Self {
        Self {
            a,
            b,
            c: None,
            d,
            bias: None,
            aux: None,
            scale_a: None,
            scale_b: None,
            scale_d: None,
            amax_d: None,
            workspace: None,
        }
    }

    /// Converts the address of each operand of the GEMM with a function.
    pub fn map_addresses<B>(self, mut address: impl FnMut(A) -> B) -> GemmOperands<B> {
        GemmOperands {
            a: address(self.a),
            b: address(self.b),
            c: self.c.map(&mut address),
            d: address(self.d),
            bias: self.bias.map(&mut address),
            aux: self.aux.map(&mut address),
            scale_a: self.scale_a.map(&mut address),
            scale_b: self.scale_b.map(&mut address),
            scale_d: self.scale_d.map(&mut address),
            amax_d: self.amax_d.map(&mut address),
            workspace: self.workspace.map(&mut address),
        }
    }
}

impl<A: Copy> From<[A; 3]> for GemmOperands<A> {
    fn from([a, b, d]: [A; 3]) -> Self {
        Self::new(a, b, d)
    }
}

impl GemmOperands {
    /// The attributes that hold the addresses which the description needs besides the matrices. A
    /// and B are exchanged for the library.
    ///
    /// # Errors
    /// The error is the name of the first operand that the launch lacks.
    pub(super) fn pointer_attributes(
        &self,
        spec: &GemmSpec,
    ) -> Result<PointerAttributes, GemmError> {
        use Attribute as At;
        let mut pointers = [None; 6];
        let needs = [
            (
                spec.bias_element_count().is_some(),
                At::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                self.bias,
                "the bias",
            ),
            (
                spec.aux_leading_dimension().is_some(),
                At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                self.aux,
                "aux",
            ),
            (spec.scales.b, At::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, self.scale_b, "B's scale"),
            (spec.scales.a, At::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, self.scale_a, "A's scale"),
            (spec.scales.d, At::CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, self.scale_d, "D's scale"),
            (spec.scales.amax_d, At::CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, self.amax_d, "D's amax"),
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

/// Those attributes of a GEMM's description that are device addresses.
pub(super) type PointerAttributes = [Option<(Attribute, u64)>; 6];
