//! Attention on the GPU: the ladder from three kernels with the scores in memory to one kernel on
//! the tensor cores.
//!
//! Each kernel's file under `kernels/attention` explains its computation, thread mapping and bound.
//! `forward` and `backward` are the ladders; [`ForwardCall`] and [`BackwardCall`] launch the fast
//! kernels over a network's own tensors. All work except the launches is done while a case is
//! prepared. The dtype f32 is excluded on purpose: no kernel here computes it.

mod append;
mod backward;
mod call;
mod components;
mod cublaslt;
mod cudnn;
mod forward;
mod launch;
mod launches;
mod layout;
mod ring;

use crate::attention::definition::AttentionForward;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::Implementation;
use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};

pub use append::{
    BackwardPointers, ForwardPointers, ScratchPointers, append_attention_backward,
    append_attention_forward,
};
pub use call::{
    AttentionScratchBytes, AttentionTechnique, BackwardAddresses, ForwardAddresses, LaunchStep,
    OrderedLaunches, QueryGradientSumOrder, ScratchAddresses,
};
pub use components::{SCORES_ROWS, SOFTMAX, VALUES_ROWS};
pub use launches::{BackwardCall, ForwardCall};
pub use layout::{AttentionShape, BackwardLayout, ForwardLayout, Strides, UnsupportedAttention};
pub use ring::RING_ROWS as RING;

/// Rows of the forward ladder and the row of the library.
pub fn forward_rows() -> impl Iterator<Item = &'static Implementation<AttentionForward>> {
    let wgmma = [&forward::FLASH_WGMMA_ROW, &forward::wgmma::FLASH_WGMMA_FP8_ROW];
    forward::FORWARD_LADDER
        .iter()
        .chain(wgmma)
        .chain([&forward::decode::FLASH_DECODE_ROW, &cudnn::FORWARD])
}

/// Rows of the backward ladder and the row of the library.
pub fn backward_rows() -> impl Iterator<Item = &'static Implementation<AttentionBackward>> {
    backward::BACKWARD_LADDER.iter().chain([
        &backward::WGMMA_ROW,
        &backward::FIXED_ORDER_ROW,
        &cudnn::BACKWARD,
    ])
}

/// Every kernel of the attention family.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list_kernel_rows(components::KERNELS),
        list_kernel_rows(forward::KERNELS),
        list_kernel_rows(forward::mma::KERNELS),
        list_kernel_rows(forward::wgmma::KERNELS),
        list_kernel_rows(forward::decode::KERNELS),
        list_kernel_rows(ring::KERNELS),
        list_kernel_rows(backward::KERNELS),
        list_kernel_rows(backward::mma::KERNELS),
        list_kernel_rows(backward::wgmma::KERNELS),
    ]
    .concat()
}

#[cfg(test)]
mod tests;
