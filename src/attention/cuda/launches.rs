//! Attention over tensors of the caller: launches from a device, a shape, layouts and addresses.
//!
//! [`ForwardCall`] and [`BackwardCall`] choose and load kernels once for all layers of a shape. The
//! method `launches` of both types receives the addresses of one layer. Memory for tensors and
//! scratch, and techniques other than the two for 16-bit training, are excluded on purpose.

use std::sync::Arc;

use super::backward::{mma as backward_mma, wgmma as backward_wgmma};
use super::call::{
    AttentionScratchBytes, AttentionTechnique, BackwardAddresses, ForwardAddresses,
    OrderedLaunches, QueryGradientSumOrder, ScratchAddresses,
};
use super::forward::{mma as forward_mma, wgmma as forward_wgmma};
use super::launch::Extents;
use super::layout::{
    AttentionShape, BackwardLayout, ForwardLayout, UnsupportedAttention, check_addresses,
};
use kernelgate::backend::BackendError;
use kernelgate_cuda::Device;

impl AttentionTechnique {
    /// The fastest technique for a shape that the device can run.
    pub fn fastest_on_device(
        device: &Device,
        shape: &AttentionShape,
    ) -> Result<Self, BackendError> {
        let (arch, shared_bytes) = (&device.facts().arch, device.shared_bytes_a_block()?);
        let unmet = forward_wgmma::FLASH_WGMMA_KERNEL.unmet_requirement_for(
            &Extents::new(shape, None),
            arch,
            shared_bytes,
        );
        Ok(if unmet.is_none() { Self::FlashWgmma } else { Self::FlashMma })
    }
}

/// Attention forward, `softmax(q kᵀ / sqrt(d)) v`, of one shape and layout on a device.
pub struct ForwardCall {
    device: Arc<Device>,
    shape: AttentionShape,
    layout: ForwardLayout,
    technique: AttentionTechnique,
}

impl ForwardCall {
    /// Compiles and loads the kernel.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] with the text of an [`UnsupportedAttention`], or if the device
    /// cannot run the kernel; others when it does not compile or load.
    pub fn new(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &ForwardLayout,
        technique: AttentionTechnique,
    ) -> Result<Self, BackendError> {
        layout.check(shape)?;
        let forward =
            Self { device: Arc::clone(device), shape: *shape, layout: *layout, technique };
        let extents = Extents::new(shape, layout.rows(shape));
        match technique {
            AttentionTechnique::FlashMma => {
                forward_mma::FLASH_MMA_KERNEL.compile_and_load(device, &extents)?
            }
            AttentionTechnique::FlashWgmma => {
                forward_wgmma::FLASH_WGMMA_KERNEL.compile_and_load(device, &extents)?
            }
        };
        Ok(forward)
    }

    /// Prepares the forward's launch over the tensors at these addresses.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if an address is not a multiple of 16; others when
    /// device memory is short.
    pub fn prepare_launches(
        &self,
        addresses: &ForwardAddresses,
    ) -> Result<OrderedLaunches, BackendError> {
        let Self { device, shape, layout, .. } = self;
        let ForwardAddresses { q, k, v, out, .. } = *addresses;
        check_addresses(&[("q", q), ("k", k), ("v", v), ("out", out)])?;
        let extents = Extents::new(shape, layout.rows(shape));
        match self.technique {
            AttentionTechnique::FlashMma => {
                forward_mma::prepare_flash_mma_launch(device, &extents, layout, addresses)
            }
            AttentionTechnique::FlashWgmma => {
                forward_wgmma::prepare_flash_wgmma_launch(device, &extents, layout, addresses)
            }
        }
    }
}

/// Attention backward, the gradients of queries, keys and values, of one shape and layout on a
/// device.
pub struct BackwardCall {
    device: Arc<Device>,
    shape: AttentionShape,
    layout: BackwardLayout,
    kernels: BackwardKernels,
}

/// Choice of the kernels of an attention backward, by technique.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackwardKernels {
    Mma(backward_mma::QueryStages),
    Wgmma(backward_wgmma::BackwardBlockWork),
}

impl BackwardCall {
    /// Compiles and loads the kernels of the backward.
    pub fn new(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &BackwardLayout,
        technique: AttentionTechnique,
        order: QueryGradientSumOrder,
    ) -> Result<Self, BackendError> {
        layout.check(shape)?;
        let extents = Extents::new(shape, layout.rows(shape));
        let kernels = match technique {
            AttentionTechnique::FlashMma => BackwardKernels::Mma(
                backward_mma::QueryStages::choose_for_device(device, &extents)?,
            ),
            AttentionTechnique::FlashWgmma => BackwardKernels::Wgmma(
                backward_wgmma::BackwardBlockWork::fastest_kernels_of_device(
                    device, &extents, order,
                ),
            ),
        };
        Self::load_with_kernels(device, shape, layout, kernels, order)
    }

    /// Attention backward by `flash_wgmma` with the given division of its work.
    #[cfg(test)]
    pub(super) fn flash_wgmma_with_blocks(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &BackwardLayout,
        blocks: backward_wgmma::BackwardBlockWork,
    ) -> Result<Self, BackendError> {
        Self::load_with_kernels(
            device,
            shape,
            layout,
            BackwardKernels::Wgmma(blocks),
            QueryGradientSumOrder::Any,
        )
    }

    fn load_with_kernels(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &BackwardLayout,
        kernels: BackwardKernels,
        order: QueryGradientSumOrder,
    ) -> Result<Self, BackendError> {
        let extents = Extents::new(shape, layout.rows(shape));
        match kernels {
            BackwardKernels::Mma(stages) => {
                let AttentionShape { heads, key_heads, .. } = *shape;
                if heads != key_heads {
                    return Err(UnsupportedAttention::GroupedGradients { heads, key_heads }.into());
                }
                if order == QueryGradientSumOrder::Fixed {
                    return Err(UnsupportedAttention::FixedOrder.into());
                }
                backward_mma::load_backward_kernels(device, &extents, stages)?;
            }
            BackwardKernels::Wgmma(blocks) => {
                backward_wgmma::load_backward_kernels(device, &extents, blocks)?;
            }
        }
        Ok(Self { device: Arc::clone(device), shape: *shape, layout: *layout, kernels })
    }

    /// Bytes of scratch memory that are enough for any device and technique: at least
    /// [`Self::scratch_bytes`].
    pub fn max_scratch_bytes(shape: &AttentionShape) -> AttentionScratchBytes {
        let extents = Extents::new(shape, None);
        AttentionScratchBytes {
            any: backward_mma::row_statistics_bytes(&extents)
                + backward_mma::dq_sum_bytes(&extents),
            zeroed: backward_wgmma::most_bytes_to_zero(&extents),
        }
    }

    /// Bytes of scratch memory that the backward's launches need.
    pub fn scratch_bytes(&self) -> AttentionScratchBytes {
        let extents = Extents::new(&self.shape, None);
        AttentionScratchBytes {
            any: backward_mma::row_statistics_bytes(&extents)
                + backward_mma::dq_sum_bytes(&extents),
            zeroed: match self.kernels {
                BackwardKernels::Mma(_) => 0,
                BackwardKernels::Wgmma(blocks) => backward_wgmma::bytes_to_zero(&extents, blocks),
            },
        }
    }

    /// Prepares the backward's launches over the tensors at these addresses.
    pub fn prepare_launches(
        &self,
        addresses: &BackwardAddresses,
        scratch: &ScratchAddresses,
    ) -> Result<OrderedLaunches, BackendError> {
        let Self { device, shape, layout, .. } = self;
        let BackwardAddresses { q, k, v, out, grad_out, grad_q, grad_k, grad_v, .. } = *addresses;
        check_addresses(&[("q", q), ("k", k), ("v", v), ("out", out), ("grad_out", grad_out)])?;
        check_addresses(&[("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)])?;
        check_addresses(&[("scratch", scratch.any), ("zeroed scratch", scratch.zeroed)])?;
        let extents = Extents::new(shape, layout.rows(shape));
        let call =
            backward_mma::PendingLaunches { device, extents: &extents, layout, addresses, scratch };
        match self.kernels {
            BackwardKernels::Mma(stages) => {
                backward_mma::prepare_mma_backward_launches(&call, stages)
            }
            BackwardKernels::Wgmma(blocks) => {
                backward_wgmma::prepare_wgmma_backward_launches(&call, blocks)
            }
        }
    }
}

#[cfg(test)]
mod tests;
