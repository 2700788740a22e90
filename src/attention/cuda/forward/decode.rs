//! Decoding, attention of few queries over many keys: row and launcher of
//! `kernels/attention/forward_flash_decode`.

use std::sync::Arc;

use super::fused_device_bytes;
use crate::attention::cuda::launch::{
    ELEMENT_BYTES, Extents, allocate_output, allocate_scratch, attention_kernel, element_macro,
    qkv, upload_inputs,
};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Arguments, Device, KernelSpec};

/// The decode kernel, and a build of it for cards with less shared memory.
pub const KERNELS: &[KernelSpec<Extents>] = &[FLASH_DECODE_KERNEL, SMALL_DECODE_KERNEL];

/// Maximum number of queries of a head in decoding; for more queries, tiles of many queries are
/// faster.
const MAX_DECODE_QUERIES: usize = 64;

const DECODE_WARPS: usize = 4;

/// Tile sizes of a block of the decode kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DecodeTile {
    /// Number of query rows in the tile.
    rows: usize,
    /// Number of keys that a warp processes in one step.
    step_keys: usize,
    /// Number of steps of keys and values that a warp keeps in shared memory.
    stages: usize,
}

/// Number of query rows that read the same keys: the rows of all heads that share these keys.
const fn rows_with_shared_keys(extents: &Extents) -> usize {
    extents.share * extents.s
}

/// Chooses one or two tiles of eight rows for a group of heads; the second tile finds the keys in
/// L2. For more rows it chooses as large tiles as the registers allow.
const fn decode_tile(extents: &Extents) -> DecodeTile {
    let narrow = 128 / extents.d;
    if rows_with_shared_keys(extents) <= 16 {
        DecodeTile { rows: 8, step_keys: 32, stages: 3 * narrow }
    } else {
        DecodeTile { rows: 32, step_keys: 16, stages: 4 * narrow }
    }
}

const SMALL_DECODE_TILE: DecodeTile = DecodeTile { rows: 8, step_keys: 16, stages: 2 };

impl DecodeTile {
    /// Number of keys that a block processes in one step.
    const fn keys_per_step(&self) -> usize {
        DECODE_WARPS * self.step_keys
    }

    /// Shared memory of the decode kernel: for each warp the stages of its keys and values, and o,
    /// m and l of its rows, where o has four padding columns.
    const fn shared_bytes(&self, extents: &Extents) -> usize {
        let stage = 2 * self.step_keys * extents.d * ELEMENT_BYTES as usize;
        DECODE_WARPS * (self.stages * stage + self.rows * (extents.d + 4 + 2) * 4)
    }

    /// Macros that are determined by the build's name, which contains the number of rows.
    fn kernel_macros(&self, extents: &Extents) -> Vec<(&'static str, usize)> {
        vec![
            ("THREADS", THREADS),
            ("STEP_KEYS", self.step_keys),
            ("SHARED_BYTES", self.shared_bytes(extents)),
            // The mask is a kernel argument, because it affects only the last keys.
            ("CAUSAL", 1),
        ]
    }

    fn defines(&self, extents: &Extents) -> Vec<String> {
        let numbers = [("HEAD_DIM", extents.d), ("TILE_ROWS", self.rows), ("STAGES", self.stages)];
        let numbers = numbers.map(|(name, value)| format!("{name}={value}"));
        [element_macro(extents)].into_iter().chain(numbers).collect()
    }
}

const THREADS: usize = DECODE_WARPS * 32;

const FLASH_DECODE_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| decode_tile(extents).defines(extents),
    constants: |extents| decode_tile(extents).kernel_macros(extents),
    shared_bytes: |extents| decode_tile(extents).shared_bytes(extents),
    variants: || extents_of_builds(&[1, MAX_DECODE_QUERIES]),
    ..attention_kernel(
        "attention/forward_flash_decode",
        "attention_forward_flash_decode",
        THREADS,
        // The launcher sets as many blocks as the device holds at once.
        |_| [1, 1, 1],
    )
};

/// Build of the decode kernel for cards on which the default build does not fit.
const SMALL_DECODE_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| SMALL_DECODE_TILE.defines(extents),
    constants: |extents| SMALL_DECODE_TILE.kernel_macros(extents),
    shared_bytes: |extents| SMALL_DECODE_TILE.shared_bytes(extents),
    variants: || extents_of_builds(&[1]),
    ..FLASH_DECODE_KERNEL
};

fn extents_of_builds(queries: &[usize]) -> Vec<Extents> {
    let mut variants = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for d in [64, 128] {
            let extents_of =
                |&s: &usize| Extents { d, ..Extents::self_attention_extents(1, s, dtype) };
            variants.extend(queries.iter().map(extents_of));
        }
    }
    variants
}

/// Number of blocks: as many as can run at once, or up to a sixteenth fewer if each block then has
/// whole units or an equal share of one unit. The memory is equally busy, and no block shares two
/// units with other blocks.
fn block_count(units: usize, most: usize) -> usize {
    let even = |blocks: &usize| units.is_multiple_of(*blocks) || blocks.is_multiple_of(units);
    (most - most / 16..=most).rev().find(even).unwrap_or(most)
}

/// Row of the decode kernel in the forward ladder.
pub const FLASH_DECODE_ROW: Implementation<AttentionForward> = Implementation {
    name: "cuda/flash_decode",
    about: "few queries over many keys: heads that share keys read them once, blocks share a \
            head's keys",
    supports: |problem| {
        let extents = Extents::from(&problem.attention);
        extents.check_support(&[FLASH_DECODE_KERNEL])?;
        if extents.s <= MAX_DECODE_QUERIES {
            Ok(())
        } else {
            Err(format!("takes up to {MAX_DECODE_QUERIES} queries a head"))
        }
    },
    // Thread blocks exchange partial results of at most nine megabytes.
    prepare: Prepare::CudaWithin {
        device_bytes: fused_device_bytes,
        prepare: prepare_flash_decode,
    },
};

fn prepare_flash_decode(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let (arch, most) = (&device.facts().arch, device.shared_bytes_a_block()?);
    if FLASH_DECODE_KERNEL.unmet_requirement_for(&extents, arch, most).is_none() {
        decode_launcher(&FLASH_DECODE_KERNEL, decode_tile(&extents), problem, inputs, device)
    } else {
        decode_launcher(&SMALL_DECODE_KERNEL, SMALL_DECODE_TILE, problem, inputs, device)
    }
}

fn decode_launcher(
    kernel: &KernelSpec<Extents>,
    tile: DecodeTile,
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let loaded = kernel.compile_and_load(device, &extents)?;
    let [q, k, v] = upload_inputs(device, inputs, ["q", "k", "v"])?;
    let out = allocate_output(device, "out", &problem.attention)?;
    let row_tiles = rows_with_shared_keys(&extents).div_ceil(tile.rows);
    let units = extents.key_heads() * row_tiles;
    let tiles = units * extents.keys.div_ceil(tile.keys_per_step());
    let blocks = block_count(units, tiles.min(device.facts().multiprocessors as usize));
    // Each thread block has two partial results: o, m and l of each row.
    let sums = allocate_scratch(device, (2 * blocks * tile.rows * (extents.d + 2) * 4) as u64)?;
    let arrived = device.upload(&vec![0; 4 * units])?;
    let parameters = Arguments::new()
        .address(q.address())
        .address(k.address())
        .address(v.address())
        .address(out.address())
        .address(sums.address())
        .address(arrived.address())
        .value(units as i32)
        .value(row_tiles as i32)
        .value(extents.s as i32)
        .value(extents.keys as i32)
        .value(extents.share as i32)
        .value(i32::from(extents.causal));
    let launch = loaded.prepare_launch(device, Some(blocks as u32), parameters)?;
    let inputs = qkv([&q, &k, &v]);
    let alive = [q, k, v, sums, arrived];
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = &alive;
        within_range("forward", || launch.launch())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::tests::bf16_attention;
    use crate::attention::definition::Attention;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::verify::launch_and_verify;
    use kernelgate::workload::Problem;

    #[test]
    fn the_declared_shared_memory_of_decoding_equals_the_kernels_layout() {
        let one = Extents { d: 128, ..Extents::self_attention_extents(8, 1, Dtype::Bf16) };
        let (narrow, many) = (Extents { d: 64, ..one }, Extents { s: 64, ..one });
        let bytes = |extents| (FLASH_DECODE_KERNEL.shared_bytes)(extents);
        assert_eq!(bytes(&one), 4 * (3 * 16_384 + 8 * 134 * 4));
        assert_eq!(bytes(&narrow), 4 * (6 * 8192 + 8 * 70 * 4));
        assert_eq!(bytes(&many), 4 * (4 * 8192 + 32 * 134 * 4));
        assert!([&one, &narrow, &many].iter().all(|extents| bytes(extents) <= 227 << 10));
        assert!((SMALL_DECODE_KERNEL.shared_bytes)(&one) <= 99 << 10);
    }

    #[test]
    fn the_rows_of_a_decode_tile_are_the_queries_that_share_keys() {
        let one = Extents { share: 8, ..Extents::self_attention_extents(64, 1, Dtype::Bf16) };
        assert_eq!(
            (rows_with_shared_keys(&one), decode_tile(&one).rows, one.key_heads()),
            (8, 8, 8)
        );
        let more = Extents { s: 5, ..one };
        assert_eq!((rows_with_shared_keys(&more), decode_tile(&more).rows), (40, 32));
    }

    #[test]
    fn decode_blocks_get_whole_units_or_equal_shares_if_few_would_be_idle() {
        // With 132 multiprocessors: 64 units get two blocks each, 8 units sixteen, and 256 units
        // share blocks in pairs.
        assert_eq!([64, 8, 256].map(|units| block_count(units, 132)), [128; 3]);
        // In these cases no divisor is close enough to 132, or there are fewer key tiles than
        // multiprocessors.
        assert_eq!((block_count(75, 132), block_count(5, 5), block_count(3, 1)), (132, 5, 1));
    }

    #[test]
    fn the_decode_build_with_less_shared_memory_agrees_with_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        for (s, keys, d, causal) in [(1, 1000, 128, false), (9, 333, 64, true)] {
            let attention = Attention { h_kv: 2, keys, ..bf16_attention(2, 8, s, d, causal) };
            let problem = AttentionForward { attention };
            let inputs = problem.inputs(25);
            let mut task = decode_launcher(
                &SMALL_DECODE_KERNEL,
                SMALL_DECODE_TILE,
                &problem,
                &inputs,
                &device,
            )
            .unwrap();
            let result =
                launch_and_verify(&mut task, &problem.reference(&inputs), problem.tolerance());
            assert!(result.is_ok(), "{attention:?}: {}", result.unwrap_err());
        }
    }
}
