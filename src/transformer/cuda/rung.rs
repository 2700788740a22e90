//! The choices of a rung.

use super::kernels::gemm;

use crate::attention::cuda::QueryGradientSumOrder;
use crate::transformer::shape::Shape;
use kernelgate::workload::Dtype;
use kernelgate_cuda::Device;

/// The kernels of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Scores, softmax and values, with the scores in memory in f32.
    Unfused,
    /// Fused, with sums of the backward in that order.
    Fused(QueryGradientSumOrder),
}

impl Attention {
    /// Whether the attention computes a shape.
    pub fn supports(self, shape: &Shape) -> Result<(), String> {
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

/// GEMMs that have the kernel after them in their epilogue where the device allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// All GEMMs are the library's, with kernels after them.
    Library,
    /// The products before the rotary embedding, SwiGLU and its gradient are this suite's, for a
    /// device with that many multiprocessors.
    WithEpilogues {
        /// Multiprocessors.
        multiprocessors: usize,
    },
}

/// The kernels of a rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernels {
    /// Kernels of attention.
    pub attention: Attention,
    /// Kernels of the products before attention, before SwiGLU and before its gradient.
    pub products: Products,
}

impl From<Attention> for Kernels {
    fn from(attention: Attention) -> Self {
        Self { attention, products: Products::Library }
    }
}

impl Attention {
    /// The rung's kernels for a shape on a device.
    pub fn on(self, device: &Device, shape: &Shape) -> Kernels {
        let facts = device.facts();
        let own = matches!(self, Self::Fused(_))
            && facts.arch == gemm::ARCHITECTURE
            && gemm::Product::computes(shape);
        let products = match own {
            true => Products::WithEpilogues { multiprocessors: facts.multiprocessors as usize },
            false => Products::Library,
        };
        Kernels { attention: self, products }
    }
}

/// The order of gradients of matrices and updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// One launch after the other, AdamW of all tensors in one.
    Serial,
    /// Gradients of matrices run concurrently with those of activations, those of a group of layers
    /// at once, and AdamW of a group as soon as its gradients exist.
    Overlapped {
        /// Layers of a group.
        group: usize,
    },
}

impl Schedule {
    /// Groups of layers that are large enough for the smallest gradients, `[d, d]`, to have a tile
    /// for each multiprocessor; at least three groups, because no gradient of activations is left
    /// to run concurrently with the update of the last one.
    pub fn overlapped(shape: &Shape) -> Self {
        /// Elements of the tiles of 128 by 256 of all multiprocessors of an H100.
        const FILLED: usize = 132 * 128 * 256;
        const LEAST_GROUPS: usize = 3;
        let least = FILLED.div_ceil(shape.d * shape.d).clamp(1, shape.layers);
        let groups = shape.layers.div_ceil(least).max(LEAST_GROUPS);
        Self::Overlapped { group: shape.layers.div_ceil(groups) }
    }
}
