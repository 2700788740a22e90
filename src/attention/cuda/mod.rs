//! Attention on the GPU: the ladder from three kernels with the scores in memory to one on the tensor cores.
//!
//! What each kernel does, its thread mapping and its bound are in its file under `kernels/attention`. Everything but the launches
//! happens while a case is prepared. Deliberately absent: f32, which no kernel here computes.

mod backward;
mod components;
mod cudnn;
mod forward;
mod launch;

use launch::Extents;

use crate::attention::components::{Scores, Softmax, ValuesProduct};
use crate::attention::definition::{Backward, Forward};
use kernelgate::backend::{Implementation, Prepare};

/// Forward ladder.
pub const FORWARD: &[Implementation<Forward>] = &[
    Implementation {
        name: "cuda/naive",
        about: "three launches, scores and probabilities in device memory, one thread an element: the starting point",
        supports: |problem| Extents::from(&problem.attention).supported_with_scores(forward::NAIVE),
        prepare: Prepare::CudaWithin { device_bytes: forward::naive_bytes, prepare: forward::naive },
    },
    Implementation {
        name: "cuda/tiled",
        about: "the same three launches with tiles in shared memory and 4x4 results a thread",
        supports: |problem| Extents::from(&problem.attention).supported_with_scores(forward::TILED),
        prepare: Prepare::CudaWithin { device_bytes: forward::tiled_bytes, prepare: forward::tiled },
    },
    Implementation {
        name: "cuda/flash",
        about: "one launch, online softmax: scores never leave the chip; CUDA cores",
        supports: |problem| Extents::from(&problem.attention).supported(forward::FLASH),
        prepare: Prepare::CudaWithin { device_bytes: forward::flash_bytes, prepare: forward::flash },
    },
    Implementation {
        name: "cuda/flash_mma",
        about: "as flash, products on the tensor cores through mma.sync, asynchronous copies",
        supports: |problem| Extents::from(&problem.attention).supported(forward::FLASH_MMA),
        prepare: Prepare::CudaWithin { device_bytes: forward::flash_bytes, prepare: forward::flash_mma },
    },
    Implementation {
        name: "cuda/cudnn",
        about: "the library's fused attention, by its own heuristic: the peer",
        supports: |problem| cudnn::supported(&problem.attention),
        prepare: Prepare::CudaWithin { device_bytes: forward::flash_bytes, prepare: cudnn::forward },
    },
];

/// Backward ladder.
pub const BACKWARD: &[Implementation<Backward>] = &[
    Implementation {
        name: "cuda/naive",
        about: "four launches, probabilities and gradients of the scores in device memory: the starting point",
        supports: |problem| Extents::from(&problem.attention).supported_with_scores(backward::NAIVE),
        prepare: Prepare::CudaWithin { device_bytes: backward::naive_bytes, prepare: backward::naive },
    },
    Implementation {
        name: "cuda/flash_mma",
        about: "probabilities recomputed on the chip, tensor cores through mma.sync; the order of dq's sums is not fixed",
        supports: |problem| Extents::from(&problem.attention).supported(backward::FLASH_MMA),
        prepare: Prepare::CudaWithin { device_bytes: backward::flash_mma_bytes, prepare: backward::flash_mma },
    },
    Implementation {
        name: "cuda/cudnn",
        about: "the library's fused gradients, by its own heuristic: the peer",
        supports: |problem| cudnn::supported(&problem.attention),
        prepare: Prepare::CudaWithin { device_bytes: cudnn::backward_bytes, prepare: cudnn::backward },
    },
];

/// q kᵀ apart.
pub const SCORES: &[Implementation<Scores>] = &[Implementation {
    name: "cuda/naive",
    about: "the first launch of forward's cuda/naive",
    supports: |problem| Extents::from(&problem.shape).supported_with_scores(&forward::NAIVE[..1]),
    prepare: Prepare::CudaWithin { device_bytes: components::scores_bytes, prepare: components::scores },
}];

/// Softmax apart.
pub const SOFTMAX: &[Implementation<Softmax>] = &[Implementation {
    name: "cuda/naive",
    about: "the second launch of forward's cuda/naive: a block a row, three passes over it",
    supports: |problem| Extents::from(&problem.shape).supported_with_scores(&forward::NAIVE[1..2]),
    prepare: Prepare::CudaWithin { device_bytes: components::softmax_bytes, prepare: components::softmax },
}];

/// p v apart.
pub const VALUES: &[Implementation<ValuesProduct>] = &[Implementation {
    name: "cuda/naive",
    about: "the third launch of forward's cuda/naive",
    supports: |problem| Extents::from(&problem.shape).supported_with_scores(&forward::NAIVE[2..]),
    prepare: Prepare::CudaWithin { device_bytes: components::values_bytes, prepare: components::values },
}];

#[cfg(test)]
mod tests;
