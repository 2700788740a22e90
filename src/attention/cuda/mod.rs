//! Attention on the GPU: a ladder of kernels, from three kernels that store the scores in device
//! memory to one fused kernel on the tensor cores.
//!
//! Each kernel's file under `kernels/attention` explains its computation, thread mapping and bound.
//! The modules `forward` and `backward` hold the attention kernel ladders; [`AttentionForwardCall`]
//! and [`AttentionBackwardCall`] launch the fast attention kernels over tensors that a network
//! owns. Attention kernels are compiled, loaded and given their memory while a case is prepared;
//! the timed work only launches kernels. Attention kernels support no f32 tensors, on purpose.

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
use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};

pub use append::{
    AttentionBackwardPointers, AttentionBackwardScratchPointers, AttentionForwardPointers,
    append_attention_backward, append_attention_forward,
};
pub use call::{
    AttentionBackwardAddresses, AttentionForwardAddresses, AttentionGemmTechnique,
    AttentionKernelLaunch, AttentionLaunches, AttentionScratchAddresses, AttentionScratchBytes,
    QueryGradientSumOrder,
};
pub use components::{CUDA_SCORES_STEP_ROWS, CUDA_SOFTMAX_STEP_ROWS, CUDA_VALUES_STEP_ROWS};
pub use launches::{AttentionBackwardCall, AttentionForwardCall};
pub use layout::{
    AttentionBackwardLayout, AttentionForwardLayout, AttentionShape, AttentionTensorStrides,
    UnsupportedAttention,
};
pub use ring::CUDA_RING_ATTENTION_ROWS as RING;

/// All implementations of attention forward on one GPU: kernelgate's own kernels and cuDNN's.
pub fn attention_forward_rows() -> impl Iterator<Item = &'static Implementation<AttentionForward>> {
    let wgmma =
        [&forward::WGMMA_FORWARD_IMPLEMENTATION, &forward::wgmma::WGMMA_FP8_FORWARD_IMPLEMENTATION];
    forward::OWN_CUDA_FORWARD_IMPLEMENTATIONS.iter().chain(wgmma).chain([
        &forward::decode::FLASH_DECODE_FORWARD_IMPLEMENTATION,
        &cudnn::CUDNN_FORWARD_IMPLEMENTATION,
    ])
}

/// All implementations of attention backward on one GPU: kernelgate's own kernels and cuDNN's.
pub fn attention_backward_rows() -> impl Iterator<Item = &'static Implementation<AttentionBackward>>
{
    backward::OWN_CUDA_BACKWARD_IMPLEMENTATIONS.iter().chain([
        &backward::WGMMA_BACKWARD_IMPLEMENTATION,
        &backward::DETERMINISTIC_BACKWARD_IMPLEMENTATION,
        &cudnn::CUDNN_BACKWARD_IMPLEMENTATION,
    ])
}

/// Lists every CUDA kernel of the attention family, for compile checks and kernel tables.
pub fn list_attention_kernels() -> Vec<ListedKernelBuild> {
    [
        list_kernel_rows(components::SEPARATE_ATTENTION_STEP_KERNELS),
        list_kernel_rows(forward::TILED_AND_FLASH_FORWARD_KERNELS),
        list_kernel_rows(forward::mma::FORWARD_MMA_KERNELS),
        list_kernel_rows(forward::wgmma::FORWARD_WGMMA_KERNELS),
        list_kernel_rows(forward::decode::DECODE_KERNELS),
        list_kernel_rows(ring::RING_BARRIER_AND_MERGE_KERNELS),
        list_kernel_rows(backward::NAIVE_BACKWARD_KERNELS),
        list_kernel_rows(backward::mma::BACKWARD_MMA_KERNELS),
        list_kernel_rows(backward::wgmma::BACKWARD_WGMMA_KERNELS),
    ]
    .concat()
}

#[cfg(test)]
mod tests;
