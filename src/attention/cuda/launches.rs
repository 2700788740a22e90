//! GPU attention over tensors of the caller: prepares kernel launches from a device, a shape,
//! memory layouts and device addresses.
//!
//! [`AttentionForwardCall`] and [`AttentionBackwardCall`] each choose and load their kernels once
//! for all layers of a shape. The methods `prepare_forward_launch_at_addresses` and
//! `prepare_backward_launches_at_addresses` receive the device addresses of the tensors of one
//! layer. This module deliberately allocates no memory for tensors or backward scratch, and
//! supports only the two techniques for 16-bit training.

use std::sync::Arc;

use super::backward::{mma as backward_mma, wgmma as backward_wgmma};
use super::call::{
    AttentionBackwardAddresses, AttentionForwardAddresses, AttentionGemmTechnique,
    AttentionLaunches, AttentionScratchAddresses, AttentionScratchBytes, QueryGradientSumOrder,
};
use super::forward::{mma as forward_mma, wgmma as forward_wgmma};
use super::launch::AttentionExtents;
use super::layout::{
    AttentionBackwardLayout, AttentionForwardLayout, AttentionShape, UnsupportedAttention,
    check_addresses_for_16_byte_copies,
};
use kernelgate::backend::BackendError;
use kernelgate_cuda::Device;

impl AttentionGemmTechnique {
    /// Returns the fastest technique that the device supports for an attention shape, which is
    /// `wgmma` if possible and `mma.sync` otherwise.
    pub fn fastest_technique_on_device(
        device: &Device,
        shape: &AttentionShape,
    ) -> Result<Self, BackendError> {
        let (arch, shared_bytes) =
            (&device.gpu_properties().kernel_architecture, device.max_shared_bytes_per_block()?);
        let unmet = forward_wgmma::FORWARD_FLASH_WGMMA_KERNEL.reason_gpu_cannot_run_kernel_for(
            &AttentionExtents::extents_of_attention_shape(shape, None),
            arch,
            shared_bytes,
        );
        Ok(if unmet.is_none() { Self::FlashWgmma } else { Self::FlashMma })
    }
}

/// Attention forward, `softmax(q kᵀ / sqrt(d)) v`, of one shape and one memory layout on one
/// device.
pub struct AttentionForwardCall {
    device: Arc<Device>,
    shape: AttentionShape,
    layout: AttentionForwardLayout,
    technique: AttentionGemmTechnique,
}

impl AttentionForwardCall {
    /// Compiles and loads the attention forward kernel of the technique.
    ///
    /// # Errors
    /// Returns [`BackendError::Unsupported`], with the text of an [`UnsupportedAttention`], if the
    /// kernel or the device does not support the shape. Returns other errors if the kernel does not
    /// compile or load.
    pub fn compile_and_load_attention_forward(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &AttentionForwardLayout,
        technique: AttentionGemmTechnique,
    ) -> Result<Self, BackendError> {
        layout.check_forward_shape_and_strides(shape)?;
        let forward =
            Self { device: Arc::clone(device), shape: *shape, layout: *layout, technique };
        let extents = AttentionExtents::extents_of_attention_shape(
            shape,
            layout.forward_row_strides_unless_dense(shape),
        );
        match technique {
            AttentionGemmTechnique::FlashMma => {
                forward_mma::FORWARD_FLASH_MMA_KERNEL.compile_and_load(device, &extents)?
            }
            AttentionGemmTechnique::FlashWgmma => {
                forward_wgmma::FORWARD_FLASH_WGMMA_KERNEL.compile_and_load(device, &extents)?
            }
        };
        Ok(forward)
    }

    /// Prepares the launch of the attention forward over the tensors at these device addresses,
    /// without enqueuing it.
    ///
    /// # Errors
    /// Returns [`BackendError::Unsupported`] if an address is not a multiple of 16. Returns other
    /// errors if device memory is short.
    pub fn prepare_forward_launch_at_addresses(
        &self,
        addresses: &AttentionForwardAddresses,
    ) -> Result<AttentionLaunches, BackendError> {
        let Self { device, shape, layout, .. } = self;
        let AttentionForwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            ..
        } = *addresses;
        check_addresses_for_16_byte_copies(&[("q", q), ("k", k), ("v", v), ("out", out)])?;
        let extents = AttentionExtents::extents_of_attention_shape(
            shape,
            layout.forward_row_strides_unless_dense(shape),
        );
        match self.technique {
            AttentionGemmTechnique::FlashMma => {
                forward_mma::prepare_forward_flash_mma_launch(device, &extents, layout, addresses)
            }
            AttentionGemmTechnique::FlashWgmma => {
                forward_wgmma::prepare_forward_wgmma_launch(device, &extents, layout, addresses)
            }
        }
    }
}

/// Attention backward, which computes the gradients of q, k and v, of one shape and one memory
/// layout on one device.
pub struct AttentionBackwardCall {
    device: Arc<Device>,
    shape: AttentionShape,
    layout: AttentionBackwardLayout,
    kernels: ChosenBackwardKernels,
}

/// Choice of the kernels of an attention backward for its technique.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChosenBackwardKernels {
    Mma(backward_mma::QueryStagesInSharedMemory),
    Wgmma(backward_wgmma::BackwardWorkDivision),
}

impl AttentionBackwardCall {
    /// Chooses the kernels of an attention backward for the technique, compiles them and loads
    /// them.
    pub fn compile_and_load_attention_backward(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &AttentionBackwardLayout,
        technique: AttentionGemmTechnique,
        order: QueryGradientSumOrder,
    ) -> Result<Self, BackendError> {
        layout.check_backward_shape_and_strides(shape)?;
        let extents = AttentionExtents::extents_of_attention_shape(
            shape,
            layout.backward_row_strides_unless_dense(shape),
        );
        let kernels = match technique {
            AttentionGemmTechnique::FlashMma => ChosenBackwardKernels::Mma(
                backward_mma::QueryStagesInSharedMemory::choose_query_stages_for_device(
                    device, &extents,
                )?,
            ),
            AttentionGemmTechnique::FlashWgmma => ChosenBackwardKernels::Wgmma(
                backward_wgmma::BackwardWorkDivision::fastest_work_division_on_device(
                    device, &extents, order,
                ),
            ),
        };
        Self::load_chosen_backward_kernels(device, shape, layout, kernels, order)
    }

    /// Compiles and loads an attention backward through wgmma with the given division of its work,
    /// for tests.
    #[cfg(test)]
    pub(super) fn compile_wgmma_backward_with_work_division(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &AttentionBackwardLayout,
        blocks: backward_wgmma::BackwardWorkDivision,
    ) -> Result<Self, BackendError> {
        Self::load_chosen_backward_kernels(
            device,
            shape,
            layout,
            ChosenBackwardKernels::Wgmma(blocks),
            QueryGradientSumOrder::AnyKeyBlockOrder,
        )
    }

    fn load_chosen_backward_kernels(
        device: &Arc<Device>,
        shape: &AttentionShape,
        layout: &AttentionBackwardLayout,
        kernels: ChosenBackwardKernels,
        order: QueryGradientSumOrder,
    ) -> Result<Self, BackendError> {
        let extents = AttentionExtents::extents_of_attention_shape(
            shape,
            layout.backward_row_strides_unless_dense(shape),
        );
        match kernels {
            ChosenBackwardKernels::Mma(stages) => {
                let AttentionShape { query_heads: heads, key_value_heads: key_heads, .. } = *shape;
                if heads != key_heads {
                    return Err(UnsupportedAttention::NoGradientsOfSharedKeyHeads {
                        heads,
                        key_heads,
                    }
                    .into());
                }
                if order == QueryGradientSumOrder::FixedKeyBlockOrder {
                    return Err(UnsupportedAttention::NoFixedGradientSumOrder.into());
                }
                backward_mma::load_mma_backward_kernels(device, &extents, stages)?;
            }
            ChosenBackwardKernels::Wgmma(blocks) => {
                backward_wgmma::load_wgmma_backward_kernels(device, &extents, blocks)?;
            }
        }
        Ok(Self { device: Arc::clone(device), shape: *shape, layout: *layout, kernels })
    }

    /// Bytes of scratch memory for an attention backward on any device: at least those of
    /// [`Self::backward_scratch_bytes`].
    pub fn max_backward_scratch_bytes(shape: &AttentionShape) -> AttentionScratchBytes {
        let extents = AttentionExtents::extents_of_attention_shape(shape, None);
        AttentionScratchBytes {
            uninitialised_scratch_bytes: backward_mma::backward_row_statistics_bytes(&extents)
                + backward_mma::dq_accumulator_scratch_bytes(&extents),
            zeroed_scratch_bytes: backward_wgmma::max_zeroed_scratch_bytes(&extents),
        }
    }

    /// Bytes of scratch memory that the launches of this attention backward need on its device.
    pub fn backward_scratch_bytes(&self) -> AttentionScratchBytes {
        let extents = AttentionExtents::extents_of_attention_shape(&self.shape, None);
        AttentionScratchBytes {
            uninitialised_scratch_bytes: backward_mma::backward_row_statistics_bytes(&extents)
                + backward_mma::dq_accumulator_scratch_bytes(&extents),
            zeroed_scratch_bytes: match self.kernels {
                ChosenBackwardKernels::Mma(_) => 0,
                ChosenBackwardKernels::Wgmma(blocks) => {
                    backward_wgmma::zeroed_scratch_bytes(&extents, blocks)
                }
            },
        }
    }

    /// Prepares the launches of the attention backward over the tensors at these device addresses,
    /// without enqueuing them.
    pub fn prepare_backward_launches_at_addresses(
        &self,
        addresses: &AttentionBackwardAddresses,
        scratch: &AttentionScratchAddresses,
    ) -> Result<AttentionLaunches, BackendError> {
        let Self { device, shape, layout, .. } = self;
        let AttentionBackwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            grad_out_address: grad_out,
            grad_q_address: grad_q,
            grad_k_address: grad_k,
            grad_v_address: grad_v,
            ..
        } = *addresses;
        check_addresses_for_16_byte_copies(&[
            ("q", q),
            ("k", k),
            ("v", v),
            ("out", out),
            ("grad_out", grad_out),
        ])?;
        check_addresses_for_16_byte_copies(&[
            ("grad_q", grad_q),
            ("grad_k", grad_k),
            ("grad_v", grad_v),
        ])?;
        check_addresses_for_16_byte_copies(&[
            ("scratch", scratch.uninitialised_scratch_address),
            ("zeroed scratch", scratch.zeroed_scratch_address),
        ])?;
        let extents = AttentionExtents::extents_of_attention_shape(
            shape,
            layout.backward_row_strides_unless_dense(shape),
        );
        let call = backward_mma::BackwardLaunchInputs {
            device,
            extents: &extents,
            layout,
            addresses,
            scratch,
        };
        match self.kernels {
            ChosenBackwardKernels::Mma(stages) => {
                backward_mma::prepare_mma_backward_launches(&call, stages)
            }
            ChosenBackwardKernels::Wgmma(blocks) => {
                backward_wgmma::prepare_wgmma_backward_launches(&call, blocks)
            }
        }
    }
}

#[cfg(test)]
mod tests;
