//! Epilogues: work on the result of a GEMM before it is stored.

use crate::libraries::lt;

/// An activation function in the epilogue of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemmActivation {
    /// max(x, 0). The aux matrix is a mask of one bit for each element.
    Relu,
    /// GELU by tanh. The aux matrix is the input of the function, in the dtype of D.
    Gelu,
}

/// Work that a GEMM does on its result before it is stored. A bias has one element a column of D.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GemmEpilogue {
    /// Epilogue that stores the plain result: D = alpha·A·B + beta·C.
    #[default]
    None,
    /// Adds the bias.
    Bias,
    /// Epilogue that adds the bias, if there is one, and applies a function.
    Activation {
        /// Function that is applied to each element.
        function: GemmActivation,
        /// Whether the epilogue adds a bias before the activation.
        bias: bool,
        /// Whether the epilogue writes the auxiliary matrix that [`Self::ActivationGradient`]
        /// needs.
        aux: bool,
    },
    /// Multiplies the result by the derivative of a function, for the aux of its forward pass.
    ActivationGradient {
        /// Function whose derivative multiplies each element.
        function: GemmActivation,
        /// Whether the epilogue writes the sum of D over its rows, which is the gradient of the
        /// bias.
        bias_gradient: bool,
    },
    /// Also writes the sum of op(A) over k: m elements.
    BiasGradientA,
    /// Also writes the sum of op(B) over k: n elements.
    BiasGradientB,
}

impl GemmEpilogue {
    pub(super) const fn has_bias(self) -> bool {
        match self {
            Self::None => false,
            Self::Bias | Self::BiasGradientA | Self::BiasGradientB => true,
            Self::Activation { bias, .. } => bias,
            Self::ActivationGradient { bias_gradient, .. } => bias_gradient,
        }
    }

    pub(super) const fn function_with_aux(self) -> Option<GemmActivation> {
        match self {
            Self::Activation { function, aux: true, .. }
            | Self::ActivationGradient { function, .. } => Some(function),
            _ => None,
        }
    }

    /// This library epilogue is for exchanged matrices: cuBLASLt computes Dᵀ = op(B)ᵀ·op(A)ᵀ, so
    /// its A is this B.
    pub(super) const fn library_epilogue(self) -> lt::Epilogue {
        use GemmActivation::{Gelu, Relu};
        use lt::Epilogue as E;
        match self {
            Self::None => E::CUBLASLT_EPILOGUE_DEFAULT,
            Self::Bias => E::CUBLASLT_EPILOGUE_BIAS,
            Self::Activation { function: Relu, bias, aux } => match (bias, aux) {
                (false, false) => E::CUBLASLT_EPILOGUE_RELU,
                (true, false) => E::CUBLASLT_EPILOGUE_RELU_BIAS,
                (false, true) => E::CUBLASLT_EPILOGUE_RELU_AUX,
                (true, true) => E::CUBLASLT_EPILOGUE_RELU_AUX_BIAS,
            },
            Self::Activation { function: Gelu, bias, aux } => match (bias, aux) {
                (false, false) => E::CUBLASLT_EPILOGUE_GELU,
                (true, false) => E::CUBLASLT_EPILOGUE_GELU_BIAS,
                (false, true) => E::CUBLASLT_EPILOGUE_GELU_AUX,
                (true, true) => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            },
            Self::ActivationGradient { function, bias_gradient } => match (function, bias_gradient)
            {
                (Relu, false) => E::CUBLASLT_EPILOGUE_DRELU,
                (Relu, true) => E::CUBLASLT_EPILOGUE_DRELU_BGRAD,
                (Gelu, false) => E::CUBLASLT_EPILOGUE_DGELU,
                (Gelu, true) => E::CUBLASLT_EPILOGUE_DGELU_BGRAD,
            },
            Self::BiasGradientA => E::CUBLASLT_EPILOGUE_BGRADB,
            Self::BiasGradientB => E::CUBLASLT_EPILOGUE_BGRADA,
        }
    }
}
