//! Attention forward through `mma.sync`: kernel and launcher of
//! `kernels/attention/forward_flash_mma`.

use crate::attention::cuda::call::{ForwardAddresses, OrderedLaunches};
use crate::attention::cuda::launch::{
    ELEMENT_BYTES, Extents, attention_kernel, strided_defines, strided_variants,
};
use crate::attention::cuda::layout::ForwardLayout;
use kernelgate::backend::BackendError;
use kernelgate_cuda::{Arguments, Device, KernelSpec};

/// Kernel of `forward_flash_mma` in the list of all kernels.
pub const KERNELS: &[KernelSpec<Extents>] = &[FLASH_MMA_KERNEL];

const THREADS: usize = 128;
const QUERIES_PER_BLOCK: usize = 128;

/// Kernel of the forward row, which also runs before a backward if `forward::wgmma` does not
/// support the device.
pub const FLASH_MMA_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| strided_defines(extents, |rows| [("K_ROW", rows.k), ("V_ROW", rows.v)]),
    variants: strided_variants,
    constants: |extents| {
        vec![
            ("THREADS", THREADS),
            ("TILE_QUERIES", QUERIES_PER_BLOCK),
            ("SHARED_BYTES", shared_bytes(extents)),
        ]
    },
    shared_bytes,
    ..attention_kernel(
        "attention/forward_flash_mma",
        "attention_forward_flash_mma",
        THREADS,
        |extents| [extents.s.div_ceil(QUERIES_PER_BLOCK) * extents.heads, 1, 1],
    )
};

/// Shared memory of the kernel: the queries, and two stages of 64 keys and values.
fn shared_bytes(extents: &Extents) -> usize {
    (QUERIES_PER_BLOCK + 2 * 2 * 64) * extents.d * ELEMENT_BYTES as usize
}

/// Prepares the launch of [`FLASH_MMA_KERNEL`] over the tensors at these addresses.
pub fn prepare_flash_mma_launch(
    device: &Device,
    extents: &Extents,
    layout: &ForwardLayout,
    addresses: &ForwardAddresses,
) -> Result<OrderedLaunches, BackendError> {
    let loaded = FLASH_MMA_KERNEL.compile_and_load(device, extents)?;
    let launch =
        loaded.prepare_launch(device, None, kernel_arguments(extents, layout, addresses))?;
    Ok(OrderedLaunches::new([("forward", launch)]))
}

fn kernel_arguments(
    extents: &Extents,
    layout: &ForwardLayout,
    addresses: &ForwardAddresses,
) -> Arguments {
    let ForwardAddresses { q, k, v, out, lse } = *addresses;
    let tensors = [q, k, v, out, lse.unwrap_or(0)];
    let Extents { s, keys, heads, share, .. } = *extents;
    let numbers = [s, keys, heads, share, extents.key_heads_a_batch()];
    let ForwardLayout { q, k, v, out, lse } = layout;
    let with_tensors = tensors.into_iter().fold(Arguments::new(), Arguments::address);
    let with_numbers =
        numbers.into_iter().fold(with_tensors, |all, number| all.value(number as i32));
    [q, k, v, out, lse]
        .into_iter()
        .fold(with_numbers, |all, strides| all.value(strides.stride_words()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::layout::{AttentionShape, RowStrides};
    use crate::attention::cuda::tests::bf16_attention;
    use crate::kernel_tests::kernel_parameters;
    use kernelgate::workload::Dtype;
    use kernelgate_cuda::KernelArgument;

    const SMALL: Extents = Extents::self_attention_extents(6, 200, Dtype::Bf16);

    #[test]
    fn the_launch_arguments_equal_the_parameters_of_flash_mma() {
        let shape = AttentionShape::from(&bf16_attention(2, 3, 77, 64, true));
        let addresses = ForwardAddresses { q: 0, k: 0, v: 0, out: 0, lse: None };
        let layout = ForwardLayout::strides_of_bshd(&shape);
        let bytes = |parameter: &String| match parameter {
            _ if parameter.contains('*') => 8,
            _ if parameter.contains("Strides") => 24,
            _ => 4,
        };
        let parameters: Vec<usize> =
            kernel_parameters(&FLASH_MMA_KERNEL).iter().map(bytes).collect();
        let extents = Extents::new(&shape, layout.rows(&shape));
        let given = kernel_arguments(&extents, &layout, &addresses);
        assert_eq!(
            given.iter().map(KernelArgument::argument_bytes).collect::<Vec<_>>(),
            parameters
        );
    }

    #[test]
    fn row_strides_are_part_of_a_builds_name() {
        let rows = RowStrides { q: 384, k: 128, v: 256, grad_out: 64 };
        let name =
            FLASH_MMA_KERNEL.build_for_parameters(&Extents { rows: Some(rows), ..SMALL }).name();
        assert!(name.ends_with(" STRIDED=1 K_ROW=128 V_ROW=256"), "{name}");
        assert!(!FLASH_MMA_KERNEL.build_for_parameters(&SMALL).name().contains("ROW"));
    }
}
