//! Attention forward on sm_90a: the kernel `kernels/attention/forward_flash_wgmma`, its launch, and
//! the implementation in fp8.

use std::sync::Arc;

use super::tile_lists::{
    COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK, QUERIES_PER_FORWARD_WARPGROUP, QueryTilingShape,
    tile_lists_as_kernel_table,
};
use crate::attention::cuda::call::{AttentionForwardAddresses, AttentionLaunches};
use crate::attention::cuda::launch::{
    AttentionExtents, BYTES_OF_16_BIT_ELEMENT, allocate_attention_output,
    allocate_uninitialised_scratch, attention_kernel_spec_with_build_per_shape,
    tma_boxes_of_key_or_value_tensor, tma_boxes_of_query_tensor, upload_named_inputs,
};
use crate::attention::cuda::layout::{
    AttentionForwardLayout, AttentionShape, AttentionTensorStrides,
};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::{CudaTask, DeviceInput};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{
    Device, DeviceBuffer, KernelArgument, KernelArgumentList, KernelSpec, RequiredArchitecture,
};

/// Kernels of `forward_flash_wgmma`, with the kernel that transposes the values for its fp8 build.
pub const FORWARD_WGMMA_KERNELS: &[KernelSpec<AttentionExtents>] =
    &[FORWARD_FLASH_WGMMA_KERNEL, FORWARD_FLASH_WGMMA_FP8_KERNEL, TRANSPOSE_FP8_VALUES_KERNEL];

/// Threads of a block of `forward_flash_wgmma`: three compute warpgroups and one that copies tiles.
const THREADS_PER_FORWARD_WGMMA_BLOCK: usize = 512;

/// Maximum number of 64-query parts of a short head; the number of keys of a short head has the
/// same limit.
const MAX_64_QUERY_PARTS_OF_SHORT_HEAD: usize = 4;
const MAX_KEYS_OF_SHORT_HEAD: usize =
    MAX_64_QUERY_PARTS_OF_SHORT_HEAD * QUERIES_PER_FORWARD_WARPGROUP;
/// Minimum number of query heads for which a query tile is a whole short head: two for each
/// multiprocessor of an H100 or H200.
const MIN_HEADS_FOR_WHOLE_HEAD_TILES: usize = 264;

/// Number of 64-query parts of a query tile. A short head is one tile: its keys are copied once for
/// up to four 64-query parts, and the compute warpgroups take the parts in rotation. In rotation,
/// compute warpgroups go on to parts of the next head, so none is idle if a head has fewer parts
/// than warpgroups.
const fn parts_of_64_queries_per_tile(extents: &AttentionExtents) -> usize {
    let parts = extents.queries_per_head.div_ceil(QUERIES_PER_FORWARD_WARPGROUP);
    let short = parts <= MAX_64_QUERY_PARTS_OF_SHORT_HEAD
        && extents.keys_per_head <= MAX_KEYS_OF_SHORT_HEAD;
    if short && extents.total_query_heads >= MIN_HEADS_FOR_WHOLE_HEAD_TILES {
        parts
    } else {
        COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK
    }
}

const fn query_tile_is_a_whole_short_head(extents: &AttentionExtents) -> bool {
    parts_of_64_queries_per_tile(extents) != COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK
}

/// Number of keys in a key block: as many as fit with a thread's scores and output into its 160
/// registers. A key block has 64 keys if a head has few keys, which would fill only a part of
/// larger blocks.
const fn keys_per_forward_wgmma_block(extents: &AttentionExtents) -> usize {
    if query_tile_is_a_whole_short_head(extents) {
        return 64;
    }
    let (few, usual) = match (extents.head_dim, extents.causal) {
        (64, false) => (0, 128),
        (64, true) => (512, 128),
        (_, false) => (512, 80),
        (_, true) => (1024, 80),
    };
    if extents.keys_per_head <= few { 64 } else { usual }
}

/// Numbers of pipeline stages in shared memory for query tiles, key blocks and value blocks.
#[derive(Debug, Clone, Copy)]
struct QueryKeyValueStageCounts {
    /// Stages of queries: each holds the rows of all compute warpgroups, or of one if the
    /// warpgroups take parts in rotation.
    query_stages: usize,
    key_stages: usize,
    value_stages: usize,
}

/// Number of pipeline stages for tile descriptions in shared memory if compute warpgroups take
/// query parts in rotation.
const STAGES_OF_SHORT_HEAD_TILE_DESCRIPTIONS: usize = 4;

const FP8_KERNEL_STAGES: QueryKeyValueStageCounts =
    QueryKeyValueStageCounts { query_stages: 2, key_stages: 4, value_stages: 4 };

impl QueryKeyValueStageCounts {
    /// Chooses the stage counts; with d = 128 and warpgroups in rotation, a fifth stage of queries
    /// and keys lets the next head begin in time.
    const fn stages_that_fit_shared_memory(extents: &AttentionExtents) -> Self {
        match (
            extents.head_dim,
            keys_per_forward_wgmma_block(extents),
            query_tile_is_a_whole_short_head(extents),
        ) {
            (64, _, true) => Self { query_stages: 6, key_stages: 6, value_stages: 6 },
            (_, _, true) => Self { query_stages: 5, key_stages: 5, value_stages: 4 },
            (64, 64, _) => Self { query_stages: 2, key_stages: 6, value_stages: 6 },
            (64, ..) | (_, 64, _) => Self { query_stages: 2, key_stages: 4, value_stages: 4 },
            _ => Self { query_stages: 2, key_stages: 3, value_stages: 3 },
        }
    }

    /// Kernel macros for the numbers of pipeline stages in shared memory.
    fn kernel_macros_of_stages(self) -> [(&'static str, usize); 4] {
        [
            ("QUERY_STAGES", self.query_stages),
            ("KEY_STAGES", self.key_stages),
            ("VALUE_STAGES", self.value_stages),
            ("TILE_STAGES", STAGES_OF_SHORT_HEAD_TILE_DESCRIPTIONS),
        ]
    }

    /// Bytes of the full and empty barriers of all pipeline stages in shared memory.
    const fn bytes_of_stage_barriers(self) -> usize {
        16 * (self.query_stages + self.key_stages + self.value_stages)
    }
}

/// Kernel specification of the 16-bit build of the attention kernel `forward_flash_wgmma`.
pub const FORWARD_FLASH_WGMMA_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| {
        let keys = format!("TILE_KEYS={}", keys_per_forward_wgmma_block(extents));
        let parts = format!("PARTS={}", parts_of_64_queries_per_tile(extents));
        (FORWARD_WGMMA_KERNEL_WITHOUT_KEY_BLOCK.macro_definitions)(extents)
            .into_iter()
            .chain([keys, parts])
            .collect()
    },
    constant_macros: |extents| {
        let others = [
            ("THREADS", THREADS_PER_FORWARD_WGMMA_BLOCK),
            ("SHARED_BYTES", forward_wgmma_shared_bytes(extents)),
            ("FP8", 0),
        ];
        QueryKeyValueStageCounts::stages_that_fit_shared_memory(extents)
            .kernel_macros_of_stages()
            .into_iter()
            .chain(others)
            .collect()
    },
    dynamic_shared_bytes: forward_wgmma_shared_bytes,
    required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
    listed_build_parameters: forward_wgmma_build_extents,
    ..FORWARD_WGMMA_KERNEL_WITHOUT_KEY_BLOCK
};

const FORWARD_WGMMA_KERNEL_WITHOUT_KEY_BLOCK: KernelSpec<AttentionExtents> =
    attention_kernel_spec_with_build_per_shape(
        "attention/forward_flash_wgmma",
        "attention_forward_flash_wgmma",
        THREADS_PER_FORWARD_WGMMA_BLOCK,
        // The launcher replaces this placeholder grid of one block by one thread block for each
        // multiprocessor.
        |_| [1, 1, 1],
    );

/// Lists extents for every distinct build: few keys, many keys, and many short heads of one, two
/// and four 64-query parts.
fn forward_wgmma_build_extents() -> Vec<AttentionExtents> {
    let lengths_of = |build: AttentionExtents| {
        let short = [1, 2, MAX_64_QUERY_PARTS_OF_SHORT_HEAD]
            .map(|parts| (MIN_HEADS_FOR_WHOLE_HEAD_TILES, parts * QUERIES_PER_FORWARD_WARPGROUP));
        let all = [(1, 1), (1, 4096)].into_iter().chain(short);
        all.map(move |(heads, s)| AttentionExtents {
            total_query_heads: heads,
            queries_per_head: s,
            keys_per_head: s,
            ..build
        })
        .collect::<Vec<_>>()
    };
    let mut variants: Vec<_> = (FORWARD_WGMMA_KERNEL_WITHOUT_KEY_BLOCK.listed_build_parameters)()
        .into_iter()
        .flat_map(lengths_of)
        .collect();
    variants.dedup_by_key(|build| (FORWARD_FLASH_WGMMA_KERNEL.macro_definitions)(build));
    variants
}

/// Shared memory of `forward_flash_wgmma`: stages of queries, keys and values with their barriers;
/// for short heads also tile descriptions with barriers.
fn forward_wgmma_shared_bytes(extents: &AttentionExtents) -> usize {
    let stages = QueryKeyValueStageCounts::stages_that_fit_shared_memory(extents);
    let (parts_a_copy, tiles) = if query_tile_is_a_whole_short_head(extents) {
        (1, STAGES_OF_SHORT_HEAD_TILE_DESCRIPTIONS)
    } else {
        (COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK, 0)
    };
    let rows = stages.query_stages * parts_a_copy * QUERIES_PER_FORWARD_WARPGROUP
        + (stages.key_stages + stages.value_stages) * keys_per_forward_wgmma_block(extents);
    rows * extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize
        + stages.bytes_of_stage_barriers()
        + 32 * tiles
}

/// Number of keys in a key block of the fp8 build: a multiple of 32; with more keys the registers
/// would not suffice.
const FP8_KEYS_PER_BLOCK: usize = 96;

const FORWARD_FLASH_WGMMA_FP8_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: forward_wgmma_fp8_defines,
    constant_macros: |extents| {
        let others = [
            ("THREADS", THREADS_PER_FORWARD_WGMMA_BLOCK),
            ("TILE_KEYS", FP8_KEYS_PER_BLOCK),
            ("PARTS", COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK),
            ("SHARED_BYTES", forward_wgmma_fp8_shared_bytes(extents)),
        ];
        FP8_KERNEL_STAGES.kernel_macros_of_stages().into_iter().chain(others).collect()
    },
    dynamic_shared_bytes: forward_wgmma_fp8_shared_bytes,
    listed_build_parameters: || [false, true].map(fp8_build_extents).to_vec(),
    ..FORWARD_FLASH_WGMMA_KERNEL
};

const TRANSPOSE_FP8_VALUES_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    constant_macros: |_| {
        vec![("THREADS", THREADS_PER_VALUE_TRANSPOSE_BLOCK), ("TILE_KEYS", FP8_KEYS_PER_BLOCK)]
    },
    listed_build_parameters: || vec![fp8_build_extents(false)],
    ..attention_kernel_spec_with_build_per_shape(
        "attention/transpose_values",
        "attention_transpose_values",
        THREADS_PER_VALUE_TRANSPOSE_BLOCK,
        |extents| [extents.total_query_heads * key_count_padded_to_fp8_blocks(extents) / 32, 1, 1],
    )
};

/// Threads of a block that transposes the fp8 values of 32 keys; each thread moves sixteen bytes.
const THREADS_PER_VALUE_TRANSPOSE_BLOCK: usize = 32 * 128 / 16;

fn forward_wgmma_fp8_defines(extents: &AttentionExtents) -> Vec<String> {
    (FORWARD_WGMMA_KERNEL_WITHOUT_KEY_BLOCK.macro_definitions)(extents)
        .into_iter()
        .chain(["FP8=1".to_owned()])
        .collect()
}

fn fp8_build_extents(causal: bool) -> AttentionExtents {
    AttentionExtents {
        head_dim: 128,
        causal,
        ..AttentionExtents::single_sequence_self_attention(1, 1, Dtype::Fp8)
    }
}

/// Bytes of shared memory of the fp8 build: like [`forward_wgmma_shared_bytes`], but the place of
/// the queries must hold a 16-bit output.
fn forward_wgmma_fp8_shared_bytes(extents: &AttentionExtents) -> usize {
    let QueryKeyValueStageCounts { query_stages: queries, key_stages: keys, value_stages: values } =
        FP8_KERNEL_STAGES;
    let queries = queries
        * COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK
        * QUERIES_PER_FORWARD_WARPGROUP
        * extents.head_dim
        * BYTES_OF_16_BIT_ELEMENT as usize;
    let blocks = (keys + values) * FP8_KEYS_PER_BLOCK * extents.head_dim;
    queries + blocks + FP8_KERNEL_STAGES.bytes_of_stage_barriers()
}

/// Number of keys of a head in the fp8 build, padded to whole key blocks.
const fn key_count_padded_to_fp8_blocks(extents: &AttentionExtents) -> usize {
    extents.queries_per_head.div_ceil(FP8_KEYS_PER_BLOCK) * FP8_KEYS_PER_BLOCK
}

const fn transposed_fp8_value_bytes(extents: &AttentionExtents) -> u64 {
    (extents.total_query_heads * key_count_padded_to_fp8_blocks(extents) * extents.head_dim) as u64
}

pub const WGMMA_FP8_FORWARD_IMPLEMENTATION: Implementation<AttentionForward> = Implementation {
    implementation_name: "cuda/flash_wgmma_fp8",
    description: "as flash_wgmma, operands of both GEMMs in e4m3, probabilities too; values are \
            transposed by a kernel of their own, in the time; sm_90a only",
    supports: |problem| {
        let extents = AttentionExtents::from(&problem.attention);
        match (extents.dtype, extents.head_dim) {
            (Dtype::Fp8, 128) => {
                extents.check_index_and_grid_limits(&[
                    FORWARD_FLASH_WGMMA_FP8_KERNEL,
                    TRANSPOSE_FP8_VALUES_KERNEL,
                ])?;
                extents.check_equal_key_and_query_counts()
            }
            (Dtype::Fp8, _) => Err("computes d = 128 only".to_owned()),
            _ => Err("computes fp8 only".to_owned()),
        }
    },
    prepare: PrepareFunction::CudaWithDeclaredMemory {
        device_bytes: fp8_forward_device_bytes,
        prepare: prepare_wgmma_fp8_forward_task,
    },
};

/// Device memory of the fp8 implementation: inputs, 16-bit output and transposed values; the scales
/// take a ten-thousandth and are not counted.
fn fp8_forward_device_bytes(problem: &AttentionForward) -> u64 {
    let extents = AttentionExtents::from(&problem.attention);
    let elements = extents.queries_of_all_heads() * extents.head_dim as u64;
    (3 + BYTES_OF_16_BIT_ELEMENT) * elements + transposed_fp8_value_bytes(&extents)
}

/// Uploads the table of query tiles, one list for each multiprocessor's thread block.
fn upload_query_tile_table(
    extents: &AttentionExtents,
    device: &Arc<Device>,
    key_bytes: usize,
    block_keys: usize,
) -> Result<DeviceBuffer, BackendError> {
    let AttentionExtents {
        total_query_heads,
        query_heads_per_key_head,
        queries_per_head,
        keys_per_head,
        causal,
        ..
    } = *extents;
    let tiling = QueryTilingShape {
        total_query_heads,
        query_heads_per_key_head,
        queries_per_head,
        keys_per_head,
        bytes_per_key: key_bytes,
        causal,
        keys_per_block: block_keys,
    };
    let lists =
        tiling.assign_query_tiles_to_blocks(device.gpu_properties().multiprocessor_count as usize);
    device.upload(bytemuck::cast_slice(&tile_lists_as_kernel_table(
        &lists,
        extents.query_heads_per_sequence(),
    )))
}

/// How a thread block of `forward_flash_wgmma` finds its next query tile: in a list or from a
/// shared counter.
#[derive(Debug, Clone, Copy)]
enum QueryTileSource {
    /// Device address of the table of query tiles, one list for each thread block.
    TileListsAtAddress(u64),
    /// Device address of the counter of heads already taken, which is zero before and after each
    /// launch.
    HeadCounterAtAddress(u64),
}

/// Tensors, addresses and scales that one launch of `forward_flash_wgmma` reads and writes.
struct ForwardWgmmaOperands<'a> {
    /// Queries, keys, values and output, each as a tensor map or address, as the build expects it.
    tensors: [&'a [u8]; 4],
    /// Device address of the rows' log-sum-exp, or zero if the kernel shall not store it.
    lse_address: u64,
    lse_strides: AttentionTensorStrides,
    /// Device addresses of the fp8 scales of queries, keys and values.
    scales: [u64; 3],
    /// How the thread blocks of a `forward_flash_wgmma` launch find their query tiles.
    tiles: QueryTileSource,
}

impl ForwardWgmmaOperands<'_> {
    fn forward_wgmma_kernel_arguments(&self, extents: &AttentionExtents) -> KernelArgumentList {
        let (list, counter) = match self.tiles {
            QueryTileSource::TileListsAtAddress(list) => (list, 0),
            QueryTileSource::HeadCounterAtAddress(counter) => (0, counter),
        };
        let with_tensors = self
            .tensors
            .into_iter()
            .fold(KernelArgumentList::new(), KernelArgumentList::with_struct_bytes);
        let with_addresses = with_tensors
            .with_address(self.lse_address)
            .with_value(self.lse_strides.batch_head_row_stride_argument())
            .with_value(self.scales)
            .with_address(list)
            .with_address(counter);
        let AttentionExtents {
            queries_per_head: s,
            keys_per_head: keys,
            query_heads_per_key_head: share,
            total_query_heads: heads,
            ..
        } = *extents;
        [s, keys, extents.query_heads_per_sequence(), share, heads]
            .into_iter()
            .fold(with_addresses, |all, number| all.with_value(number as i32))
    }
}

/// Loads [`FORWARD_FLASH_WGMMA_KERNEL`], uploads its tile lists or counter, and prepares its launch
/// over the tensors at these device addresses.
pub fn prepare_forward_wgmma_launch(
    device: &Arc<Device>,
    extents: &AttentionExtents,
    layout: &AttentionForwardLayout,
    addresses: &AttentionForwardAddresses,
) -> Result<AttentionLaunches, BackendError> {
    let loaded = FORWARD_FLASH_WGMMA_KERNEL.compile_and_load(device, extents)?;
    let key_bytes = extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize;
    let (table, tiles) = if query_tile_is_a_whole_short_head(extents) {
        let counter = device.upload(&0_u32.to_ne_bytes())?;
        let tiles = QueryTileSource::HeadCounterAtAddress(counter.device_address());
        (counter, tiles)
    } else {
        let lists = upload_query_tile_table(
            extents,
            device,
            key_bytes,
            keys_per_forward_wgmma_block(extents),
        )?;
        let tiles = QueryTileSource::TileListsAtAddress(lists.device_address());
        (lists, tiles)
    };
    let AttentionForwardAddresses {
        q_address: q,
        k_address: k,
        v_address: v,
        out_address: out,
        lse_address: lse,
    } = *addresses;
    let of_group =
        |strides| tma_boxes_of_query_tensor(extents, strides, QUERIES_PER_FORWARD_WARPGROUP);
    let of_block = |strides| {
        tma_boxes_of_key_or_value_tensor(extents, strides, keys_per_forward_wgmma_block(extents))
    };
    let tensors = [
        of_group(&layout.q).encode_tensor_map_at(q)?,
        of_block(&layout.k).encode_tensor_map_at(k)?,
        of_block(&layout.v).encode_tensor_map_at(v)?,
        of_group(&layout.out).encode_tensor_map_at(out)?,
    ];
    let operands = ForwardWgmmaOperands {
        tensors: tensors.each_ref().map(|map| &map[..]),
        lse_address: lse.unwrap_or(0),
        lse_strides: layout.lse,
        scales: [0; 3],
        tiles,
    };
    let blocks = device.gpu_properties().multiprocessor_count;
    let launch = loaded.prepare_launch_with_blocks(
        device,
        Some(blocks),
        operands.forward_wgmma_kernel_arguments(extents),
    )?;
    Ok(AttentionLaunches::from_nvtx_ranges_and_launches([("forward", launch)])
        .keeping_table_buffer_alive(table))
}

fn prepare_wgmma_fp8_forward_task(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    const FP8_ATTENTION_INPUT_NAMES: [&str; 3] = ["q_e4m3", "k_e4m3", "v_e4m3"];
    const FP8_SCALE_INPUT_NAMES: [&str; 3] = ["q_scale", "k_scale", "v_scale"];
    let extents = AttentionExtents::from(&problem.attention);
    let main = FORWARD_FLASH_WGMMA_FP8_KERNEL.compile_and_load(device, &extents)?;
    let first = TRANSPOSE_FP8_VALUES_KERNEL
        .compile_and_load(device, &AttentionExtents { causal: false, ..extents })?;
    let [q, k, v] = upload_named_inputs(device, inputs, FP8_ATTENTION_INPUT_NAMES)?;
    let scales = upload_named_inputs(device, inputs, FP8_SCALE_INPUT_NAMES)?;
    let transposed = allocate_uninitialised_scratch(device, transposed_fp8_value_bytes(&extents))?;
    let out = allocate_attention_output(device, "out", &problem.attention)?;
    let tiles = upload_query_tile_table(&extents, device, extents.head_dim, FP8_KEYS_PER_BLOCK)?;
    let layout = AttentionForwardLayout::forward_layout_dense_bhsd(&AttentionShape::from(
        &problem.attention,
    ));
    let of_output = AttentionExtents { dtype: Dtype::Bf16, ..extents };
    let operands = ForwardWgmmaOperands {
        tensors: [
            &tma_boxes_of_query_tensor(&extents, &layout.q, QUERIES_PER_FORWARD_WARPGROUP)
                .encode_tensor_map_at(q.device_address())?,
            &tma_boxes_of_key_or_value_tensor(&extents, &layout.k, FP8_KEYS_PER_BLOCK)
                .encode_tensor_map_at(k.device_address())?,
            &transposed.device_address().to_ne_bytes(),
            &tma_boxes_of_query_tensor(&of_output, &layout.out, QUERIES_PER_FORWARD_WARPGROUP)
                .encode_tensor_map_at(out.address())?,
        ],
        lse_address: 0,
        lse_strides: layout.lse,
        scales: [&scales[0], &scales[1], &scales[2]].map(DeviceBuffer::device_address),
        tiles: QueryTileSource::TileListsAtAddress(tiles.device_address()),
    };
    let blocks = device.gpu_properties().multiprocessor_count;
    let main = main.prepare_launch_with_blocks(
        device,
        Some(blocks),
        operands.forward_wgmma_kernel_arguments(&extents),
    )?;
    let named = FP8_ATTENTION_INPUT_NAMES
        .into_iter()
        .chain(FP8_SCALE_INPUT_NAMES)
        .zip([&q, &k, &v].into_iter().chain(&scales));
    let inputs: Vec<_> = named.map(|(name, buffer)| DeviceInput::new(name, buffer)).collect();
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = (&q, &k, &scales, &tiles);
        let arguments = [
            KernelArgument::from(&v),
            KernelArgument::from(&transposed),
            extents.sequence_length_argument(),
        ];
        run_within_named_range("transpose", || first.launch_with(&arguments))?;
        run_within_named_range("forward", || main.enqueue())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_tests::parameters_in_kernel_source;

    #[test]
    fn forward_wgmma_shared_bytes_equal_the_kernel_layout() {
        let narrow = AttentionExtents::single_sequence_self_attention(6, 300, Dtype::Bf16);
        let wide = AttentionExtents { head_dim: 128, ..narrow };
        assert_eq!(forward_wgmma_shared_bytes(&narrow), (384 + 8 * 128) * 128 + 160);
        let [short, short_wide] = [narrow, wide].map(|build| AttentionExtents {
            total_query_heads: 264,
            queries_per_head: 200,
            keys_per_head: 200,
            ..build
        });
        assert_eq!(forward_wgmma_shared_bytes(&short), (6 + 12) * 64 * 128 + 16 * 18 + 128);
        assert_eq!(forward_wgmma_shared_bytes(&short_wide), (5 + 9) * 64 * 256 + 16 * 14 + 128);
        assert_eq!(forward_wgmma_shared_bytes(&wide), (384 + 8 * 64) * 256 + 160);
        let many = AttentionExtents { keys_per_head: 513, ..wide };
        assert_eq!(forward_wgmma_shared_bytes(&many), (384 + 6 * 80) * 256 + 128);
        for build in forward_wgmma_build_extents() {
            assert!(forward_wgmma_shared_bytes(&build) <= 227 << 10, "{build:?}");
        }
        assert_eq!(forward_wgmma_fp8_shared_bytes(&wide), 384 * 256 + 8 * 96 * 128 + 160);
    }

    #[test]
    fn all_keys_of_a_short_head_fit_into_forward_wgmma_shared_memory() {
        let wide = AttentionExtents {
            head_dim: 128,
            ..AttentionExtents::single_sequence_self_attention(
                MIN_HEADS_FOR_WHOLE_HEAD_TILES,
                256,
                Dtype::Bf16,
            )
        };
        assert_eq!(
            parts_of_64_queries_per_tile(&AttentionExtents {
                total_query_heads: MIN_HEADS_FOR_WHOLE_HEAD_TILES - 1,
                ..wide
            }),
            3
        );
        let parts_of =
            |s| parts_of_64_queries_per_tile(&AttentionExtents { queries_per_head: s, ..wide });
        assert_eq!([1, 64, 65, 128, 129].map(parts_of), [1, 1, 2, 2, 3]);
        assert_eq!([192, 193, 256, 257].map(parts_of), [3, 4, 4, 3]);
        assert_eq!(
            [1, 256, 257].map(|keys| parts_of_64_queries_per_tile(&AttentionExtents {
                keys_per_head: keys,
                ..wide
            })),
            [4, 4, 3]
        );
        for d in [64, 128] {
            let short = AttentionExtents { head_dim: d, ..wide };
            let QueryKeyValueStageCounts { key_stages: keys, value_stages: values, .. } =
                QueryKeyValueStageCounts::stages_that_fit_shared_memory(&short);
            assert!(
                keys.min(values) * keys_per_forward_wgmma_block(&short) >= MAX_KEYS_OF_SHORT_HEAD,
                "{d}"
            );
        }
    }

    #[test]
    fn forward_wgmma_argument_sizes_equal_the_kernel_parameters() {
        let bytes = |parameter: &str, fp8: bool| match parameter {
            _ if parameter.contains('*') => 8,
            _ if parameter.contains("Values") && fp8 => 8,
            _ if parameter.contains("TensorMap") || parameter.contains("Values") => 128,
            _ if parameter.contains("Scales") || parameter.contains("Strides") => 3 * 8,
            _ => 4,
        };
        let extents = AttentionExtents::single_sequence_self_attention(6, 200, Dtype::Bf16);
        for fp8 in [false, true] {
            let (map, address) = ([0; 128], [0; 8]);
            let values = if fp8 { &address[..] } else { &map };
            let operands = ForwardWgmmaOperands {
                tensors: [&map, &map, values, &map],
                lse_address: 0,
                lse_strides: AttentionTensorStrides::dense_bhsd_strides(6, 200, 1),
                scales: [0; 3],
                tiles: QueryTileSource::TileListsAtAddress(0),
            };
            let given = operands.forward_wgmma_kernel_arguments(&extents);
            let given: Vec<usize> = given.iter().map(KernelArgument::size_in_bytes).collect();
            let parameters: Vec<usize> = parameters_in_kernel_source(&FORWARD_FLASH_WGMMA_KERNEL)
                .iter()
                .map(|it| bytes(it, fp8))
                .collect();
            assert_eq!(given, parameters);
        }
    }

    #[test]
    fn the_wgmma_forward_declines_other_architectures_with_a_reason() {
        let extents = AttentionExtents::single_sequence_self_attention(6, 200, Dtype::F16);
        for arch in ["sm_80", "sm_90", "sm_100a", "sm_120a"] {
            let unmet = FORWARD_FLASH_WGMMA_KERNEL.reason_gpu_cannot_run_kernel_for(
                &extents,
                arch,
                227 << 10,
            );
            assert_eq!(unmet.as_deref(), Some("needs sm_90a"), "{arch}");
        }
        assert_eq!(
            FORWARD_FLASH_WGMMA_KERNEL.reason_gpu_cannot_run_kernel_for(
                &extents,
                "sm_90a",
                227 << 10
            ),
            None
        );
    }
}
