//! Choices by which the rungs of the language model differ.

use super::kernels::gemm;

use crate::attention::cuda::QueryGradientSumOrder;
use crate::transformer::shape::LmShape;
use kernelgate::workload::Dtype;
use kernelgate_cuda::Device;

/// Kernels that compute attention in a rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RungAttention {
    /// Unfused attention: scores, softmax and values, with f32 scores in memory.
    Unfused,
    /// Fused attention, whose backward sums in the given order.
    Fused(QueryGradientSumOrder),
}

impl RungAttention {
    /// Checks whether the attention kernels support a shape.
    pub fn check_attention_support(self, shape: &LmShape) -> Result<(), String> {
        if !shape.d.is_multiple_of(8) || !shape.ff.is_multiple_of(8) {
            return Err("moves rows whose elements are a multiple of 8".to_owned());
        }
        match self {
            Self::Unfused => Ok(()),
            Self::Fused(_) => match (shape.dtype, shape.head_dim()) {
                (Dtype::Bf16, 64 | 128) => Ok(()),
                (Dtype::Bf16, d) => Err(format!("its attention has heads of 64 or 128, not {d}")),
                _ => Err("computes bf16 only".to_owned()),
            },
        }
    }
}

/// GEMMs that include the kernel after them in their epilogue, if the device allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemmEpilogues {
    /// All GEMMs are the library's, followed by separate kernels.
    Library,
    /// The GEMMs before the rotary embedding, SwiGLU and its gradient are our own kernels, for a
    /// device with this number of multiprocessors.
    WithEpilogues {
        /// Number of multiprocessors of the device.
        multiprocessors: usize,
    },
}

/// Kernels of a rung on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RungKernels {
    /// Kernels that compute attention.
    pub attention: RungAttention,
    /// Kernels of the GEMMs before the rotary embedding, before SwiGLU and before its gradient.
    pub products: GemmEpilogues,
}

impl From<RungAttention> for RungKernels {
    fn from(attention: RungAttention) -> Self {
        Self { attention, products: GemmEpilogues::Library }
    }
}

impl RungAttention {
    /// Selects the rung's kernels for a shape on a device.
    pub fn on(self, device: &Device, shape: &LmShape) -> RungKernels {
        let facts = device.facts();
        let own = matches!(self, Self::Fused(_))
            && facts.arch == gemm::WGMMA_ARCHITECTURE
            && gemm::EpilogueGemm::supports_shape(shape);
        let products = match own {
            true => {
                GemmEpilogues::WithEpilogues { multiprocessors: facts.multiprocessors as usize }
            }
            false => GemmEpilogues::Library,
        };
        RungKernels { attention: self, products }
    }
}

/// Order of the gradients of matrices and of the updates in a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientSchedule {
    /// Launches follow one another, and a single AdamW launch updates all tensors.
    Serial,
    /// Gradients of matrices run concurrently with those of activations. The matrix gradients of a
    /// group of layers are computed at once, and AdamW updates a group as soon as its gradients
    /// exist.
    Overlapped {
        /// Number of layers whose matrix gradients are computed as one group.
        group: usize,
    },
}

impl GradientSchedule {
    /// Chooses groups of layers that are large enough for the smallest gradients, `[d, d]`, to have
    /// a tile for each multiprocessor. The layers form at least three groups, because no gradient
    /// of activations is left to run concurrently with the update of the last group.
    pub fn overlapped_schedule(shape: &LmShape) -> Self {
        /// Number of elements in the tiles of 128 by 256 of all multiprocessors of an H100.
        const ELEMENTS_OF_ALL_TILES: usize = 132 * 128 * 256;
        const MIN_LAYER_GROUPS: usize = 3;
        let least = ELEMENTS_OF_ALL_TILES.div_ceil(shape.d * shape.d).clamp(1, shape.layers);
        let groups = shape.layers.div_ceil(least).max(MIN_LAYER_GROUPS);
        Self::Overlapped { group: shape.layers.div_ceil(groups) }
    }
}
