//! Attention forward through `mma.sync`: the kernel `kernels/attention/forward_flash_mma` and its
//! launch.

use crate::attention::cuda::call::{AttentionForwardAddresses, AttentionLaunches};
use crate::attention::cuda::launch::{
    AttentionExtents, BYTES_OF_16_BIT_ELEMENT, attention_defines_with_row_strides,
    attention_kernel_spec_with_build_per_shape, dense_and_one_strided_build_extents,
};
use crate::attention::cuda::layout::AttentionForwardLayout;
use kernelgate::backend::BackendError;
use kernelgate_cuda::{Device, KernelArgumentList, KernelSpec};

/// The kernel of `forward_flash_mma`, as an entry of the list of all kernels.
pub const FORWARD_MMA_KERNELS: &[KernelSpec<AttentionExtents>] = &[FORWARD_FLASH_MMA_KERNEL];

const THREADS_PER_FORWARD_MMA_BLOCK: usize = 128;
const QUERIES_PER_FORWARD_MMA_BLOCK: usize = 128;

/// Kernel of the forward `cuda/flash_mma`; it also runs before a timed backward on devices that do
/// not support the wgmma forward.
pub const FORWARD_FLASH_MMA_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| {
        attention_defines_with_row_strides(extents, |rows| {
            [("K_ROW", rows.k_row_stride_elements), ("V_ROW", rows.v_row_stride_elements)]
        })
    },
    listed_build_parameters: dense_and_one_strided_build_extents,
    constant_macros: |extents| {
        vec![
            ("THREADS", THREADS_PER_FORWARD_MMA_BLOCK),
            ("TILE_QUERIES", QUERIES_PER_FORWARD_MMA_BLOCK),
            ("SHARED_BYTES", forward_flash_mma_shared_bytes(extents)),
        ]
    },
    dynamic_shared_bytes: forward_flash_mma_shared_bytes,
    ..attention_kernel_spec_with_build_per_shape(
        "attention/forward_flash_mma",
        "attention_forward_flash_mma",
        THREADS_PER_FORWARD_MMA_BLOCK,
        |extents| {
            [
                extents.queries_per_head.div_ceil(QUERIES_PER_FORWARD_MMA_BLOCK)
                    * extents.total_query_heads,
                1,
                1,
            ]
        },
    )
};

/// Shared memory of `forward_flash_mma`: 128 queries, and two stages of 64 keys and 64 values.
fn forward_flash_mma_shared_bytes(extents: &AttentionExtents) -> usize {
    (QUERIES_PER_FORWARD_MMA_BLOCK + 2 * 2 * 64)
        * extents.head_dim
        * BYTES_OF_16_BIT_ELEMENT as usize
}

/// Loads [`FORWARD_FLASH_MMA_KERNEL`] and prepares its launch over the tensors at these device
/// addresses, without enqueuing it.
pub fn prepare_forward_flash_mma_launch(
    device: &Device,
    extents: &AttentionExtents,
    layout: &AttentionForwardLayout,
    addresses: &AttentionForwardAddresses,
) -> Result<AttentionLaunches, BackendError> {
    let loaded = FORWARD_FLASH_MMA_KERNEL.compile_and_load(device, extents)?;
    let launch = loaded.prepare_launch_with_blocks(
        device,
        None,
        forward_flash_mma_arguments(extents, layout, addresses),
    )?;
    Ok(AttentionLaunches::from_nvtx_ranges_and_launches([("forward", launch)]))
}

fn forward_flash_mma_arguments(
    extents: &AttentionExtents,
    layout: &AttentionForwardLayout,
    addresses: &AttentionForwardAddresses,
) -> KernelArgumentList {
    let AttentionForwardAddresses {
        q_address: q,
        k_address: k,
        v_address: v,
        out_address: out,
        lse_address: lse,
    } = *addresses;
    let tensors = [q, k, v, out, lse.unwrap_or(0)];
    let AttentionExtents {
        queries_per_head: s,
        keys_per_head: keys,
        total_query_heads: heads,
        query_heads_per_key_head: share,
        ..
    } = *extents;
    let numbers = [s, keys, heads, share, extents.key_heads_per_sequence()];
    let AttentionForwardLayout { q, k, v, out, lse } = layout;
    let with_tensors =
        tensors.into_iter().fold(KernelArgumentList::new(), KernelArgumentList::with_address);
    let with_numbers =
        numbers.into_iter().fold(with_tensors, |all, number| all.with_value(number as i32));
    [q, k, v, out, lse]
        .into_iter()
        .fold(with_numbers, |all, strides| all.with_value(strides.batch_head_row_stride_argument()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::layout::{AttentionShape, RowStridesOfQkvAndGradient};
    use crate::attention::cuda::tests::bf16_attention_without_grouped_heads;
    use crate::kernel_tests::parameters_in_kernel_source;
    use kernelgate::workload::Dtype;
    use kernelgate_cuda::KernelArgument;

    const SIX_HEADS_OF_200_QUERIES: AttentionExtents =
        AttentionExtents::single_sequence_self_attention(6, 200, Dtype::Bf16);

    #[test]
    fn forward_flash_mma_argument_sizes_equal_the_kernel_parameters() {
        let shape = AttentionShape::from(&bf16_attention_without_grouped_heads(2, 3, 77, 64, true));
        let addresses = AttentionForwardAddresses {
            q_address: 0,
            k_address: 0,
            v_address: 0,
            out_address: 0,
            lse_address: None,
        };
        let layout = AttentionForwardLayout::forward_layout_dense_bshd(&shape);
        let bytes = |parameter: &String| match parameter {
            _ if parameter.contains('*') => 8,
            _ if parameter.contains("Strides") => 24,
            _ => 4,
        };
        let parameters: Vec<usize> =
            parameters_in_kernel_source(&FORWARD_FLASH_MMA_KERNEL).iter().map(bytes).collect();
        let extents = AttentionExtents::extents_of_attention_shape(
            &shape,
            layout.forward_row_strides_unless_dense(&shape),
        );
        let given = forward_flash_mma_arguments(&extents, &layout, &addresses);
        assert_eq!(given.iter().map(KernelArgument::size_in_bytes).collect::<Vec<_>>(), parameters);
    }

    #[test]
    fn row_strides_are_part_of_a_forward_mma_build_name() {
        let rows = RowStridesOfQkvAndGradient {
            q_row_stride_elements: 384,
            k_row_stride_elements: 128,
            v_row_stride_elements: 256,
            grad_out_row_stride_elements: 64,
        };
        let name = FORWARD_FLASH_MMA_KERNEL
            .build_for_parameters(&AttentionExtents {
                row_strides: Some(rows),
                ..SIX_HEADS_OF_200_QUERIES
            })
            .kernel_build_name();
        assert!(name.ends_with(" STRIDED=1 K_ROW=128 V_ROW=256"), "{name}");
        assert!(
            !FORWARD_FLASH_MMA_KERNEL
                .build_for_parameters(&SIX_HEADS_OF_200_QUERIES)
                .kernel_build_name()
                .contains("ROW")
        );
    }
}
