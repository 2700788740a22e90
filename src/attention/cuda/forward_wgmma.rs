//! Attention forward on sm_90a: row and launcher of `kernels/attention/forward_flash_wgmma`.

use std::sync::Arc;

use super::forward::flash_bytes;
use super::launch::{ELEMENT_BYTES, Extents, boxes, kernel, key_boxes, output, qkv, upload};
use super::tile_lists::{Tiling, table};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Device, KernelSpec, Parameters, Requires};

/// The kernel.
pub const KERNELS: &[KernelSpec<Extents>] = &[FLASH_WGMMA];

/// Three warpgroups that compute, one that copies.
const THREADS: usize = 512;

/// Queries of a warpgroup, and of a box of its copies.
const GROUP_ROWS: usize = 64;

/// Keys of a block: as many as leave a thread's scores and output in its 160 registers.
const fn block_keys(extents: &Extents) -> usize {
    if extents.d == 64 { 128 } else { 80 }
}

/// Blocks of keys and of values in shared memory.
const fn stages(extents: &Extents) -> usize {
    if extents.d == 64 { 4 } else { 3 }
}

const FLASH_WGMMA: KernelSpec<Extents> = KernelSpec {
    constants: |extents| {
        vec![
            ("THREADS", THREADS),
            ("TILE_KEYS", block_keys(extents)),
            ("STAGES", stages(extents)),
            ("SHARED_BYTES", shared_bytes(extents)),
        ]
    },
    shared_bytes,
    requires: Requires::Exactly("sm_90a"),
    ..kernel(
        "attention/forward_flash_wgmma",
        include_str!("../../../kernels/attention/forward_flash_wgmma.cu"),
        "attention_forward_flash_wgmma",
        THREADS,
        // A block a multiprocessor: the launcher knows how many.
        |_| [1, 1, 1],
    )
};

/// The queries of two tiles, the stages of keys and of values, and a pair of barriers for each.
fn shared_bytes(extents: &Extents) -> usize {
    let (row, stages) = (extents.d * ELEMENT_BYTES as usize, stages(extents));
    (2 * 3 * GROUP_ROWS + 2 * stages * block_keys(extents)) * row + 16 * (2 + 2 * stages)
}

/// Row of the forward ladder.
pub const ROW: Implementation<AttentionForward> = Implementation {
    name: "cuda/flash_wgmma",
    about: "as flash, GEMMs through wgmma, tiles by tensor copies of a warp of their own, blocks \
            that stay; sm_90a only",
    supports: |problem| Extents::from(&problem.attention).supported(&[FLASH_WGMMA]),
    // The lists of tiles are a thousandth.
    prepare: Prepare::CudaWithin { device_bytes: flash_bytes, prepare: flash_wgmma },
};

fn flash_wgmma(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let loaded = FLASH_WGMMA.load(device, &extents)?;
    let [q, k, v] = upload(device, inputs, ["q", "k", "v"])?;
    let out = output(device, "out", &problem.attention)?;
    let blocks = device.facts().multiprocessors;
    let tiling = Tiling {
        heads: extents.heads,
        share: extents.share,
        s: extents.s,
        keys: extents.keys,
        key_bytes: extents.d * ELEMENT_BYTES as usize,
        causal: extents.causal,
        block_keys: block_keys(&extents),
    };
    let tiles = device.upload(bytemuck::cast_slice(&table(&tiling.lists(blocks as usize))))?;
    let of_group = boxes(&extents, GROUP_ROWS);
    let of_block = key_boxes(&extents, block_keys(&extents));
    let parameters = Parameters::new()
        .bytes(&of_group.map(q.address())?)
        .bytes(&of_block.map(k.address())?)
        .bytes(&of_block.map(v.address())?)
        .bytes(&of_group.map(out.address())?)
        .address(0)
        .address(tiles.address())
        .value(extents.s as i32)
        .value(extents.keys as i32)
        .value(extents.share as i32);
    let launch = loaded.settled(device, Some(blocks), parameters)?;
    let inputs = qkv([&q, &k, &v]);
    let alive = [q, k, v, tiles];
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = &alive;
        launch.launch()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::Dtype;

    #[test]
    fn shared_memory_is_what_the_kernel_lays_out_and_fits_a_block() {
        let narrow = Extents::of_heads(6, 200, Dtype::Bf16);
        let wide = Extents { d: 128, ..narrow };
        assert_eq!(shared_bytes(&narrow), (384 + 8 * 128) * 128 + 160);
        assert_eq!(shared_bytes(&wide), (384 + 6 * 80) * 256 + 128);
        assert!(shared_bytes(&wide) <= 227 << 10);
    }

    #[test]
    fn other_architectures_are_declined_with_the_reason() {
        let extents = Extents::of_heads(6, 200, Dtype::F16);
        for arch in ["sm_80", "sm_90", "sm_100a", "sm_120a"] {
            let unmet = FLASH_WGMMA.unmet_by(&extents, arch, 227 << 10);
            assert_eq!(unmet.as_deref(), Some("needs sm_90a"), "{arch}");
        }
        assert_eq!(FLASH_WGMMA.unmet_by(&extents, "sm_90a", 227 << 10), None);
    }
}
