//! Decoding, attention of few queries over many keys: the implementation `cuda/flash_decode` and
//! its launcher.

use std::sync::Arc;

use super::fused_forward_device_bytes;
use crate::attention::cuda::launch::{
    AttentionExtents, BYTES_OF_16_BIT_ELEMENT, allocate_attention_output,
    allocate_uninitialised_scratch, attention_kernel_spec_with_build_per_shape,
    element_type_define, name_q_k_v_inputs, upload_named_inputs,
};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, KernelArgumentList, KernelSpec};

/// The decode kernel `forward_flash_decode`, and a build of it for GPUs with less shared memory.
pub const DECODE_KERNELS: &[KernelSpec<AttentionExtents>] =
    &[FLASH_DECODE_KERNEL, LOW_SHARED_MEMORY_DECODE_KERNEL];

/// Maximum number of queries of a head that the decode kernel supports; for more queries, kernels
/// with tiles of many queries are faster.
const MAX_DECODE_QUERIES: usize = 64;

const WARPS_PER_DECODE_BLOCK: usize = 4;

/// Tile sizes of a thread block of the decode kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DecodeTileSizes {
    /// Number of query rows in the tile of a thread block.
    query_rows: usize,
    /// Number of keys that a warp processes in one step.
    keys_per_warp_step: usize,
    /// Number of key and value tiles that a warp keeps in shared memory at once.
    key_value_tiles_per_warp: usize,
}

/// Number of query rows that read the same keys: all queries of all query heads that share a key
/// head.
const fn query_rows_that_share_keys(extents: &AttentionExtents) -> usize {
    extents.query_heads_per_key_head * extents.queries_per_head
}

/// For up to 16 query rows that share keys, chooses tiles of eight rows; a second tile of the group
/// finds the keys in L2. For more than 16 query rows that share keys, chooses as large tiles as the
/// registers allow.
const fn decode_tile_sizes_for(extents: &AttentionExtents) -> DecodeTileSizes {
    let narrow = 128 / extents.head_dim;
    if query_rows_that_share_keys(extents) <= 16 {
        DecodeTileSizes {
            query_rows: 8,
            keys_per_warp_step: 32,
            key_value_tiles_per_warp: 3 * narrow,
        }
    } else {
        DecodeTileSizes {
            query_rows: 32,
            keys_per_warp_step: 16,
            key_value_tiles_per_warp: 4 * narrow,
        }
    }
}

const LOW_SHARED_MEMORY_DECODE_TILE: DecodeTileSizes =
    DecodeTileSizes { query_rows: 8, keys_per_warp_step: 16, key_value_tiles_per_warp: 2 };

impl DecodeTileSizes {
    /// Number of keys that a thread block of the decode kernel processes in one step.
    const fn decode_keys_per_block_step(&self) -> usize {
        WARPS_PER_DECODE_BLOCK * self.keys_per_warp_step
    }

    /// Shared memory of the decode kernel: for each warp its key and value tiles, and o, m and l of
    /// its rows, where o has four padding columns.
    const fn decode_shared_bytes(&self, extents: &AttentionExtents) -> usize {
        let stage =
            2 * self.keys_per_warp_step * extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize;
        WARPS_PER_DECODE_BLOCK
            * (self.key_value_tiles_per_warp * stage
                + self.query_rows * (extents.head_dim + 4 + 2) * 4)
    }

    /// Macros of the decode kernel that are determined by the build's name, which contains the
    /// number of rows.
    fn decode_kernel_macros(&self, extents: &AttentionExtents) -> Vec<(&'static str, usize)> {
        vec![
            ("THREADS", THREADS_PER_DECODE_BLOCK),
            ("STEP_KEYS", self.keys_per_warp_step),
            ("SHARED_BYTES", self.decode_shared_bytes(extents)),
            // For decoding, the mask is a kernel argument instead of a macro, because the mask
            // affects only the last keys.
            ("CAUSAL", 1),
        ]
    }

    fn defines_of_decode_build(&self, extents: &AttentionExtents) -> Vec<String> {
        let numbers = [
            ("HEAD_DIM", extents.head_dim),
            ("TILE_ROWS", self.query_rows),
            ("STAGES", self.key_value_tiles_per_warp),
        ];
        let numbers = numbers.map(|(name, value)| format!("{name}={value}"));
        [element_type_define(extents)].into_iter().chain(numbers).collect()
    }
}

const THREADS_PER_DECODE_BLOCK: usize = WARPS_PER_DECODE_BLOCK * 32;

const FLASH_DECODE_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| decode_tile_sizes_for(extents).defines_of_decode_build(extents),
    constant_macros: |extents| decode_tile_sizes_for(extents).decode_kernel_macros(extents),
    dynamic_shared_bytes: |extents| decode_tile_sizes_for(extents).decode_shared_bytes(extents),
    listed_build_parameters: || decode_build_extents_for_query_counts(&[1, MAX_DECODE_QUERIES]),
    ..attention_kernel_spec_with_build_per_shape(
        "attention/forward_flash_decode",
        "attention_forward_flash_decode",
        THREADS_PER_DECODE_BLOCK,
        // The launcher replaces this placeholder grid of one block by about as many thread blocks
        // as the device runs at once.
        |_| [1, 1, 1],
    )
};

/// Build of the decode kernel for GPUs whose shared memory is too small for the default build.
const LOW_SHARED_MEMORY_DECODE_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| LOW_SHARED_MEMORY_DECODE_TILE.defines_of_decode_build(extents),
    constant_macros: |extents| LOW_SHARED_MEMORY_DECODE_TILE.decode_kernel_macros(extents),
    dynamic_shared_bytes: |extents| LOW_SHARED_MEMORY_DECODE_TILE.decode_shared_bytes(extents),
    listed_build_parameters: || decode_build_extents_for_query_counts(&[1]),
    ..FLASH_DECODE_KERNEL
};

fn decode_build_extents_for_query_counts(queries: &[usize]) -> Vec<AttentionExtents> {
    let mut variants = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for d in [64, 128] {
            let extents_of = |&s: &usize| AttentionExtents {
                head_dim: d,
                ..AttentionExtents::single_sequence_self_attention(1, s, dtype)
            };
            variants.extend(queries.iter().map(extents_of));
        }
    }
    variants
}

/// Number of thread blocks for decoding: `max_blocks`, or up to a sixteenth fewer if each thread
/// block then has whole units or an equal share of one unit. A sixteenth fewer thread blocks for
/// decoding still saturate the memory bandwidth, and none of these blocks has parts of two units of
/// work.
fn decode_block_count_with_even_shares(units: usize, max_blocks: usize) -> usize {
    let even = |blocks: &usize| units.is_multiple_of(*blocks) || blocks.is_multiple_of(units);
    (max_blocks - max_blocks / 16..=max_blocks).rev().find(even).unwrap_or(max_blocks)
}

/// Implementation of attention forward by the decode kernel, in the ladder of CUDA implementations.
pub const FLASH_DECODE_FORWARD_IMPLEMENTATION: Implementation<AttentionForward> = Implementation {
    implementation_name: "cuda/flash_decode",
    description: "few queries over many keys: heads that share keys read them once, blocks share a \
            head's keys",
    supports: |problem| {
        let extents = AttentionExtents::from(&problem.attention);
        extents.check_dtype_size_and_grid_support(&[FLASH_DECODE_KERNEL])?;
        if extents.queries_per_head <= MAX_DECODE_QUERIES {
            Ok(())
        } else {
            Err(format!("takes up to {MAX_DECODE_QUERIES} queries a head"))
        }
    },
    // The thread blocks' partial results take at most nine megabytes of device memory and are not
    // counted.
    prepare: PrepareFunction::CudaWithDeclaredMemory {
        device_bytes: fused_forward_device_bytes,
        prepare: prepare_decode_task_with_fitting_build,
    },
};

fn prepare_decode_task_with_fitting_build(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    let (arch, most) =
        (&device.gpu_properties().kernel_architecture, device.max_shared_bytes_per_block()?);
    if FLASH_DECODE_KERNEL.reason_gpu_cannot_run_kernel_for(&extents, arch, most).is_none() {
        prepare_decode_task_with_build(
            &FLASH_DECODE_KERNEL,
            decode_tile_sizes_for(&extents),
            problem,
            inputs,
            device,
        )
    } else {
        prepare_decode_task_with_build(
            &LOW_SHARED_MEMORY_DECODE_KERNEL,
            LOW_SHARED_MEMORY_DECODE_TILE,
            problem,
            inputs,
            device,
        )
    }
}

fn prepare_decode_task_with_build(
    kernel: &KernelSpec<AttentionExtents>,
    tile: DecodeTileSizes,
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    let loaded = kernel.compile_and_load(device, &extents)?;
    let [q, k, v] = upload_named_inputs(device, inputs, ["q", "k", "v"])?;
    let out = allocate_attention_output(device, "out", &problem.attention)?;
    let row_tiles = query_rows_that_share_keys(&extents).div_ceil(tile.query_rows);
    let units = extents.key_heads_of_all_sequences() * row_tiles;
    let tiles = units * extents.keys_per_head.div_ceil(tile.decode_keys_per_block_step());
    let blocks = decode_block_count_with_even_shares(
        units,
        tiles.min(device.gpu_properties().multiprocessor_count as usize),
    );
    // Each thread block stores at most two partial results: o, m and l of each query row of a tile.
    let sums = allocate_uninitialised_scratch(
        device,
        (2 * blocks * tile.query_rows * (extents.head_dim + 2) * 4) as u64,
    )?;
    let arrived = device.upload(&vec![0; 4 * units])?;
    let parameters = KernelArgumentList::new()
        .with_address(q.device_address())
        .with_address(k.device_address())
        .with_address(v.device_address())
        .with_address(out.address())
        .with_address(sums.device_address())
        .with_address(arrived.device_address())
        .with_value(units as i32)
        .with_value(row_tiles as i32)
        .with_value(extents.queries_per_head as i32)
        .with_value(extents.keys_per_head as i32)
        .with_value(extents.query_heads_per_key_head as i32)
        .with_value(i32::from(extents.causal));
    let launch = loaded.prepare_launch_with_blocks(device, Some(blocks as u32), parameters)?;
    let inputs = name_q_k_v_inputs([&q, &k, &v]);
    let alive = [q, k, v, sums, arrived];
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = &alive;
        run_within_named_range("forward", || launch.enqueue())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::tests::bf16_attention_without_grouped_heads;
    use crate::attention::definition::AttentionParameters;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::Problem;

    #[test]
    fn decode_shared_bytes_equal_the_kernel_layout() {
        let one = AttentionExtents {
            head_dim: 128,
            ..AttentionExtents::single_sequence_self_attention(8, 1, Dtype::Bf16)
        };
        let (narrow, many) = (
            AttentionExtents { head_dim: 64, ..one },
            AttentionExtents { queries_per_head: 64, ..one },
        );
        let bytes = |extents| (FLASH_DECODE_KERNEL.dynamic_shared_bytes)(extents);
        assert_eq!(bytes(&one), 4 * (3 * 16_384 + 8 * 134 * 4));
        assert_eq!(bytes(&narrow), 4 * (6 * 8192 + 8 * 70 * 4));
        assert_eq!(bytes(&many), 4 * (4 * 8192 + 32 * 134 * 4));
        assert!([&one, &narrow, &many].iter().all(|extents| bytes(extents) <= 227 << 10));
        assert!((LOW_SHARED_MEMORY_DECODE_KERNEL.dynamic_shared_bytes)(&one) <= 99 << 10);
    }

    #[test]
    fn decode_tile_rows_follow_the_queries_that_share_keys() {
        let one = AttentionExtents {
            query_heads_per_key_head: 8,
            ..AttentionExtents::single_sequence_self_attention(64, 1, Dtype::Bf16)
        };
        assert_eq!(
            (
                query_rows_that_share_keys(&one),
                decode_tile_sizes_for(&one).query_rows,
                one.key_heads_of_all_sequences()
            ),
            (8, 8, 8)
        );
        let more = AttentionExtents { queries_per_head: 5, ..one };
        assert_eq!(
            (query_rows_that_share_keys(&more), decode_tile_sizes_for(&more).query_rows),
            (40, 32)
        );
    }

    #[test]
    fn decode_blocks_get_whole_units_or_equal_shares_of_one_unit() {
        // With 132 multiprocessors, 128 thread blocks are chosen: two for each of 64 units, 16 for
        // each of 8 units, or one for two of 256 units.
        assert_eq!(
            [64, 8, 256].map(|units| decode_block_count_with_even_shares(units, 132)),
            [128; 3]
        );
        // In this test, no block count near 132 divides 75 units of work evenly; the other cases
        // have fewer key tiles than multiprocessors.
        assert_eq!(
            (
                decode_block_count_with_even_shares(75, 132),
                decode_block_count_with_even_shares(5, 5),
                decode_block_count_with_even_shares(3, 1)
            ),
            (132, 5, 1)
        );
    }

    #[test]
    fn the_low_shared_memory_decode_build_agrees_with_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        for (s, keys, d, causal) in [(1, 1000, 128, false), (9, 333, 64, true)] {
            let attention = AttentionParameters {
                key_value_heads: 2,
                keys_per_head: keys,
                ..bf16_attention_without_grouped_heads(2, 8, s, d, causal)
            };
            let problem = AttentionForward { attention };
            let inputs = problem.inputs(25);
            let mut task = prepare_decode_task_with_build(
                &LOW_SHARED_MEMORY_DECODE_KERNEL,
                LOW_SHARED_MEMORY_DECODE_TILE,
                &problem,
                &inputs,
                &device,
            )
            .unwrap();
            let result = launch_twice_and_compare_with_reference(
                &mut task,
                &problem.reference(&inputs),
                problem.tolerance(),
            );
            assert!(result.is_ok(), "{attention:?}: {}", result.unwrap_err());
        }
    }
}
