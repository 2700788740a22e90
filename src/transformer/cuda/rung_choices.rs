//! Choices of kernels and of launch order by which the language model's rungs differ.

use super::kernels::gemm;

use crate::attention::cuda::QueryGradientSumOrder;
use crate::transformer::shape::LanguageModelShape;
use kernelgate::workload::Dtype;
use kernelgate_cuda::Device;

/// Kernels that compute attention in a rung of the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionOfRung {
    /// Unfused attention: separate kernels for scores, softmax and values, with f32 scores in
    /// memory.
    UnfusedAttention,
    /// Fused attention kernels, whose backward adds up the query gradients in the given order.
    FusedAttention(QueryGradientSumOrder),
}

impl AttentionOfRung {
    /// Checks that the rung's attention kernels support a model shape: its dtype and head size, and
    /// rows of a multiple of 8 elements.
    pub fn check_attention_kernels_support(self, shape: &LanguageModelShape) -> Result<(), String> {
        if !shape.model_width.is_multiple_of(8) || !shape.swiglu_hidden_width.is_multiple_of(8) {
            return Err("moves rows whose elements are a multiple of 8".to_owned());
        }
        match self {
            Self::UnfusedAttention => Ok(()),
            Self::FusedAttention(_) => match (shape.dtype, shape.elements_per_head()) {
                (Dtype::Bf16, 64 | 128) => Ok(()),
                (Dtype::Bf16, d) => Err(format!("its attention has heads of 64 or 128, not {d}")),
                _ => Err("computes bf16 only".to_owned()),
            },
        }
    }
}

/// Whether a rung uses GEMM kernels whose epilogue includes the elementwise kernel that otherwise
/// follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpilogueGemmChoice {
    /// All GEMMs of the rung are cuBLASLt's, followed by separate elementwise kernels.
    CublasLtWithoutEpilogues,
    /// The GEMMs before the rotary embedding, SwiGLU and its gradient are kernelgate's own kernels,
    /// for a device with this number of multiprocessors.
    OwnGemmsWithEpilogues {
        /// Number of multiprocessors of the device, each of which runs one block of the GEMMs with
        /// fused epilogues.
        multiprocessors: usize,
    },
}

/// Kernels with which a rung computes attention and GEMMs on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RungKernelChoice {
    /// Kernels with which the rung computes attention.
    pub attention: AttentionOfRung,
    /// Kernels of the three GEMMs before the rotary embedding, before SwiGLU, and before SwiGLU's
    /// gradient.
    pub epilogue_gemms: EpilogueGemmChoice,
}

impl From<AttentionOfRung> for RungKernelChoice {
    fn from(attention: AttentionOfRung) -> Self {
        Self { attention, epilogue_gemms: EpilogueGemmChoice::CublasLtWithoutEpilogues }
    }
}

impl AttentionOfRung {
    /// Selects the rung's kernels for a model shape on a device: epilogue GEMMs for fused attention
    /// on sm_90a.
    pub fn kernel_choice_for_device(
        self,
        device: &Device,
        shape: &LanguageModelShape,
    ) -> RungKernelChoice {
        let facts = device.gpu_properties();
        let own = matches!(self, Self::FusedAttention(_))
            && facts.kernel_architecture == gemm::WGMMA_GPU_ARCHITECTURE
            && gemm::EpilogueGemmParameters::supports_model_shape(shape);
        let products = match own {
            true => EpilogueGemmChoice::OwnGemmsWithEpilogues {
                multiprocessors: facts.multiprocessor_count as usize,
            },
            false => EpilogueGemmChoice::CublasLtWithoutEpilogues,
        };
        RungKernelChoice { attention: self, epilogue_gemms: products }
    }
}

/// Order in which a training step computes weight gradients and AdamW updates: serial or
/// overlapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightGradientSchedule {
    /// All launches of the training step follow one another, and a single AdamW launch updates all
    /// parameter tensors.
    SerialLaunches,
    /// Gradients of weight matrices are computed concurrently with the gradients of activations.
    /// The weight gradients of a group of layers are computed in batched GEMMs, and AdamW updates
    /// the group as soon as its gradients exist.
    OverlapsActivationGradients {
        /// Number of layers whose weight gradients are computed together as one group.
        layers_per_gradient_group: usize,
    },
}

impl WeightGradientSchedule {
    /// Chooses groups of so many layers that their smallest weight gradients, `[d, d]`, together
    /// have a tile for each multiprocessor. The layers form at least three groups, because no
    /// activation gradients are left to run concurrently with the update of the last group.
    pub fn overlapped_in_groups_of_layers(shape: &LanguageModelShape) -> Self {
        /// Number of elements in tiles of 128 by 256, one tile for each multiprocessor of an H100.
        const ELEMENTS_OF_ONE_TILE_PER_MULTIPROCESSOR: usize = 132 * 128 * 256;
        const MIN_WEIGHT_GRADIENT_GROUPS: usize = 3;
        let least = ELEMENTS_OF_ONE_TILE_PER_MULTIPROCESSOR
            .div_ceil(shape.model_width * shape.model_width)
            .clamp(1, shape.layers);
        let groups = shape.layers.div_ceil(least).max(MIN_WEIGHT_GRADIENT_GROUPS);
        Self::OverlapsActivationGradients {
            layers_per_gradient_group: shape.layers.div_ceil(groups),
        }
    }
}
