//! Epilogues of a GEMM: work of the GEMM kernel on the result D before D is stored.

use crate::libraries::lt;

/// Activation function that a GEMM's epilogue applies to each element of the result D.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemmEpilogueActivation {
    /// max(x, 0). The auxiliary matrix is a mask with one bit for each element.
    Relu,
    /// GELU by tanh. The auxiliary matrix is the input of the activation function, in the dtype of
    /// D.
    Gelu,
}

/// Work that the kernel of a GEMM does on the result D before D is stored. A bias has one element
/// for each column of D.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GemmEpilogue {
    /// The epilogue does nothing, so the GEMM stores D = alpha·A·B + beta·C.
    #[default]
    NoEpilogue,
    /// Adds the bias.
    Bias,
    /// The epilogue adds the bias, if there is one, and applies an activation function.
    Activation {
        /// Activation function that is applied to each element of D.
        function: GemmEpilogueActivation,
        /// Whether the epilogue adds a bias before the activation.
        adds_bias: bool,
        /// Whether the epilogue also stores the auxiliary matrix that [`Self::ActivationGradient`]
        /// needs.
        stores_auxiliary_matrix: bool,
    },
    /// The epilogue multiplies the result by the derivative of an activation function, computed
    /// from the auxiliary matrix of the forward pass.
    ActivationGradient {
        /// Activation function whose derivative multiplies each element.
        function: GemmEpilogueActivation,
        /// Whether the epilogue also stores the sums of D over its rows, which are the gradient of
        /// the bias.
        stores_bias_gradient: bool,
    },
    /// The epilogue also stores the sums of op(A) over k, which are m elements.
    BiasGradientFromA,
    /// The epilogue also stores the sums of op(B) over k, which are n elements.
    BiasGradientFromB,
}

impl GemmEpilogue {
    pub(super) const fn uses_bias_vector(self) -> bool {
        match self {
            Self::NoEpilogue => false,
            Self::Bias | Self::BiasGradientFromA | Self::BiasGradientFromB => true,
            Self::Activation { adds_bias: bias, .. } => bias,
            Self::ActivationGradient { stores_bias_gradient: bias_gradient, .. } => bias_gradient,
        }
    }

    pub(super) const fn activation_with_auxiliary_matrix(self) -> Option<GemmEpilogueActivation> {
        match self {
            Self::Activation { function, stores_auxiliary_matrix: true, .. }
            | Self::ActivationGradient { function, .. } => Some(function),
            _ => None,
        }
    }

    /// cuBLASLt computes Dᵀ = op(B)ᵀ·op(A)ᵀ of column-major matrices, so cuBLASLt's A is B here,
    /// and its bias gradients are exchanged.
    pub(super) const fn cublaslt_epilogue(self) -> lt::Epilogue {
        use GemmEpilogueActivation::{Gelu, Relu};
        use lt::Epilogue as E;
        match self {
            Self::NoEpilogue => E::CUBLASLT_EPILOGUE_DEFAULT,
            Self::Bias => E::CUBLASLT_EPILOGUE_BIAS,
            Self::Activation { function: Relu, adds_bias: bias, stores_auxiliary_matrix: aux } => {
                match (bias, aux) {
                    (false, false) => E::CUBLASLT_EPILOGUE_RELU,
                    (true, false) => E::CUBLASLT_EPILOGUE_RELU_BIAS,
                    (false, true) => E::CUBLASLT_EPILOGUE_RELU_AUX,
                    (true, true) => E::CUBLASLT_EPILOGUE_RELU_AUX_BIAS,
                }
            }
            Self::Activation { function: Gelu, adds_bias: bias, stores_auxiliary_matrix: aux } => {
                match (bias, aux) {
                    (false, false) => E::CUBLASLT_EPILOGUE_GELU,
                    (true, false) => E::CUBLASLT_EPILOGUE_GELU_BIAS,
                    (false, true) => E::CUBLASLT_EPILOGUE_GELU_AUX,
                    (true, true) => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                }
            }
            Self::ActivationGradient { function, stores_bias_gradient: bias_gradient } => {
                match (function, bias_gradient) {
                    (Relu, false) => E::CUBLASLT_EPILOGUE_DRELU,
                    (Relu, true) => E::CUBLASLT_EPILOGUE_DRELU_BGRAD,
                    (Gelu, false) => E::CUBLASLT_EPILOGUE_DGELU,
                    (Gelu, true) => E::CUBLASLT_EPILOGUE_DGELU_BGRAD,
                }
            }
            Self::BiasGradientFromA => E::CUBLASLT_EPILOGUE_BGRADB,
            Self::BiasGradientFromB => E::CUBLASLT_EPILOGUE_BGRADA,
        }
    }
}
