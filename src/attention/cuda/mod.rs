//! Attention on the GPU: the ladder from three kernels with the scores in memory to one on the
//! tensor cores.
//!
//! What each kernel does, its thread mapping and its bound are in its file under
//! `kernels/attention`. A ladder's file has its kernels' rows and its implementations. Everything
//! but the launches happens while a case is prepared. Deliberately absent: f32, which no kernel
//! here computes.

mod backward;
mod backward_wgmma;
mod components;
mod cublaslt;
mod cudnn;
mod forward;
mod forward_decode;
mod forward_wgmma;
mod launch;
mod launches;
mod layout;
mod saved;
mod tile_lists;

use crate::attention::definition::AttentionForward;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::Implementation;
use kernelgate_cuda::spec::{ListedKernel, list};

pub use components::{SCORES, SOFTMAX, VALUES};
pub use launches::{
    Backward, BackwardAddresses, Forward, ForwardAddresses, Launches, Scratch, ScratchBytes, Step,
    SumOrder, Technique,
};
pub use layout::{BackwardLayout, ForwardLayout, Shape, Strides, Unsupported};

/// Forward ladder, and the library.
pub fn forward() -> impl Iterator<Item = &'static Implementation<AttentionForward>> {
    let wgmma = [&forward_wgmma::ROW, &forward_wgmma::FP8_ROW];
    forward::LADDER.iter().chain(wgmma).chain([&forward_decode::ROW, &cudnn::FORWARD])
}

/// Backward ladder, and the library.
pub fn backward() -> impl Iterator<Item = &'static Implementation<AttentionBackward>> {
    backward::LADDER.iter().chain([
        &backward_wgmma::ROW,
        &backward_wgmma::FIXED_ORDER_ROW,
        &cudnn::BACKWARD,
    ])
}

/// Every kernel of the family.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list(components::KERNELS),
        list(forward::KERNELS),
        list(forward_wgmma::KERNELS),
        list(forward_decode::KERNELS),
        list(backward::KERNELS),
        list(backward_wgmma::KERNELS),
    ]
    .concat()
}

#[cfg(test)]
mod tests;
