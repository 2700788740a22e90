//! Attention forward on sm_90a: kernel and launcher of `kernels/attention/forward_flash_wgmma`, and
//! its row in fp8.

use std::sync::Arc;

use super::tile_lists::{COMPUTE_WARPGROUPS, GROUP_ROWS, QueryTiling, tile_table};
use crate::attention::cuda::call::{ForwardAddresses, OrderedLaunches};
use crate::attention::cuda::launch::{
    ELEMENT_BYTES, Extents, allocate_output, allocate_scratch, attention_kernel, key_boxes,
    query_boxes, upload_inputs,
};
use crate::attention::cuda::layout::{AttentionShape, ForwardLayout, Strides};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::{CudaTask, Input};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{
    Arguments, Device, DeviceBuffer, KernelArgument, KernelSpec, RequiredArchitecture,
};

/// Kernels of `forward_flash_wgmma`, with those that its fp8 row needs.
pub const KERNELS: &[KernelSpec<Extents>] =
    &[FLASH_WGMMA_KERNEL, FLASH_WGMMA_FP8_KERNEL, TRANSPOSE_VALUES_KERNEL];

/// Threads of a block: three warpgroups that compute and one that copies.
const THREADS: usize = 512;

/// Maximum number of parts of a short head, which have 64 queries each; it also limits the number
/// of keys.
const MAX_PARTS_PER_SHORT_HEAD: usize = 4;
const MAX_KEYS_OF_SHORT_HEAD: usize = MAX_PARTS_PER_SHORT_HEAD * GROUP_ROWS;
/// Minimum number of heads for tiles of whole heads: two for each multiprocessor of an H100 or
/// H200.
const MIN_SHORT_HEADS: usize = 264;

/// Number of parts of a query tile, 64 queries each. A short head is one tile: its keys are copied
/// once for four parts, and warpgroups take its parts in rotation. No warpgroup is idle if there
/// are fewer parts than warpgroups.
const fn parts_per_tile(extents: &Extents) -> usize {
    let parts = extents.s.div_ceil(GROUP_ROWS);
    let short = parts <= MAX_PARTS_PER_SHORT_HEAD && extents.keys <= MAX_KEYS_OF_SHORT_HEAD;
    if short && extents.heads >= MIN_SHORT_HEADS { parts } else { COMPUTE_WARPGROUPS }
}

const fn takes_short_heads(extents: &Extents) -> bool {
    parts_per_tile(extents) != COMPUTE_WARPGROUPS
}

/// Number of keys in a key block: as many as fit with a thread's scores and output into its 160
/// registers. The number is 64 if there are few keys, which would fill larger blocks badly.
const fn keys_per_block(extents: &Extents) -> usize {
    if takes_short_heads(extents) {
        return 64;
    }
    let (few, usual) = match (extents.d, extents.causal) {
        (64, false) => (0, 128),
        (64, true) => (512, 128),
        (_, false) => (512, 80),
        (_, true) => (1024, 80),
    };
    if extents.keys <= few { 64 } else { usual }
}

/// Numbers of stages in shared memory for queries, keys and values.
#[derive(Debug, Clone, Copy)]
struct TileAndBlockStages {
    /// Stages of queries, each of all warpgroups or of one.
    queries: usize,
    keys: usize,
    values: usize,
}

/// Number of tile descriptions in shared memory if warpgroups take parts in rotation.
const SHORT_HEAD_STAGES: usize = 4;

const FP8_KERNEL_STAGES: TileAndBlockStages = TileAndBlockStages { queries: 2, keys: 4, values: 4 };

impl TileAndBlockStages {
    /// If warpgroups take parts in rotation, a fifth stage of queries and of keys lets the next
    /// head begin in time, if shared memory allows no more.
    const fn new(extents: &Extents) -> Self {
        match (extents.d, keys_per_block(extents), takes_short_heads(extents)) {
            (64, _, true) => Self { queries: 6, keys: 6, values: 6 },
            (_, _, true) => Self { queries: 5, keys: 5, values: 4 },
            (64, 64, _) => Self { queries: 2, keys: 6, values: 6 },
            (64, ..) | (_, 64, _) => Self { queries: 2, keys: 4, values: 4 },
            _ => Self { queries: 2, keys: 3, values: 3 },
        }
    }

    /// Kernel macros for the numbers of stages in shared memory.
    fn stage_macros(self) -> [(&'static str, usize); 4] {
        [
            ("QUERY_STAGES", self.queries),
            ("KEY_STAGES", self.keys),
            ("VALUE_STAGES", self.values),
            ("TILE_STAGES", SHORT_HEAD_STAGES),
        ]
    }

    /// Bytes of the pairs of barriers of all stages.
    const fn barrier_bytes(self) -> usize {
        16 * (self.queries + self.keys + self.values)
    }
}

/// Build of the kernel for 16-bit dtypes.
pub const FLASH_WGMMA_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| {
        let keys = format!("TILE_KEYS={}", keys_per_block(extents));
        let parts = format!("PARTS={}", parts_per_tile(extents));
        (ANY_KEYS_KERNEL.defines)(extents).into_iter().chain([keys, parts]).collect()
    },
    constants: |extents| {
        let others = [("THREADS", THREADS), ("SHARED_BYTES", shared_bytes(extents)), ("FP8", 0)];
        TileAndBlockStages::new(extents).stage_macros().into_iter().chain(others).collect()
    },
    shared_bytes,
    requires: RequiredArchitecture::Exactly("sm_90a"),
    variants: extents_of_builds,
    ..ANY_KEYS_KERNEL
};

const ANY_KEYS_KERNEL: KernelSpec<Extents> = attention_kernel(
    "attention/forward_flash_wgmma",
    "attention_forward_flash_wgmma",
    THREADS,
    // The launcher sets one block for each multiprocessor.
    |_| [1, 1, 1],
);

/// Extents of all builds: those of the other kernels with few keys, with many keys, and with many
/// heads of one, two and four parts, if these builds differ.
fn extents_of_builds() -> Vec<Extents> {
    let lengths_of = |build: Extents| {
        let short =
            [1, 2, MAX_PARTS_PER_SHORT_HEAD].map(|parts| (MIN_SHORT_HEADS, parts * GROUP_ROWS));
        let all = [(1, 1), (1, 4096)].into_iter().chain(short);
        all.map(move |(heads, s)| Extents { heads, s, keys: s, ..build }).collect::<Vec<_>>()
    };
    let mut variants: Vec<_> =
        (ANY_KEYS_KERNEL.variants)().into_iter().flat_map(lengths_of).collect();
    variants.dedup_by_key(|build| (FLASH_WGMMA_KERNEL.defines)(build));
    variants
}

/// Shared memory of the kernel: stages of queries, keys and values with their barriers; if
/// warpgroups take parts in rotation, also tile descriptions with their barriers.
fn shared_bytes(extents: &Extents) -> usize {
    let stages = TileAndBlockStages::new(extents);
    let (parts_a_copy, tiles) =
        if takes_short_heads(extents) { (1, SHORT_HEAD_STAGES) } else { (COMPUTE_WARPGROUPS, 0) };
    let rows = stages.queries * parts_a_copy * GROUP_ROWS
        + (stages.keys + stages.values) * keys_per_block(extents);
    rows * extents.d * ELEMENT_BYTES as usize + stages.barrier_bytes() + 32 * tiles
}

/// Number of keys in a key block in fp8: a multiple of 32; with more keys the registers would not
/// suffice.
const FP8_KEYS_PER_BLOCK: usize = 96;

const FLASH_WGMMA_FP8_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: fp8_defines,
    constants: |extents| {
        let others = [
            ("THREADS", THREADS),
            ("TILE_KEYS", FP8_KEYS_PER_BLOCK),
            ("PARTS", COMPUTE_WARPGROUPS),
            ("SHARED_BYTES", fp8_shared_bytes(extents)),
        ];
        FP8_KERNEL_STAGES.stage_macros().into_iter().chain(others).collect()
    },
    shared_bytes: fp8_shared_bytes,
    variants: || [false, true].map(fp8_extents).to_vec(),
    ..FLASH_WGMMA_KERNEL
};

const TRANSPOSE_VALUES_KERNEL: KernelSpec<Extents> = KernelSpec {
    constants: |_| vec![("THREADS", TRANSPOSE_THREADS), ("TILE_KEYS", FP8_KEYS_PER_BLOCK)],
    variants: || vec![fp8_extents(false)],
    ..attention_kernel(
        "attention/transpose_values",
        "attention_transpose_values",
        TRANSPOSE_THREADS,
        |extents| [extents.heads * padded_key_count(extents) / 32, 1, 1],
    )
};

/// Threads of a block of the transposition: each handles sixteen bytes of a column of 32 keys.
const TRANSPOSE_THREADS: usize = 32 * 128 / 16;

fn fp8_defines(extents: &Extents) -> Vec<String> {
    (ANY_KEYS_KERNEL.defines)(extents).into_iter().chain(["FP8=1".to_owned()]).collect()
}

fn fp8_extents(causal: bool) -> Extents {
    Extents { d: 128, causal, ..Extents::self_attention_extents(1, 1, Dtype::Fp8) }
}

/// Bytes of shared memory of the fp8 kernel: like [`shared_bytes`], but the place of the queries
/// must hold a 16-bit output.
fn fp8_shared_bytes(extents: &Extents) -> usize {
    let TileAndBlockStages { queries, keys, values } = FP8_KERNEL_STAGES;
    let queries = queries * COMPUTE_WARPGROUPS * GROUP_ROWS * extents.d * ELEMENT_BYTES as usize;
    let blocks = (keys + values) * FP8_KEYS_PER_BLOCK * extents.d;
    queries + blocks + FP8_KERNEL_STAGES.barrier_bytes()
}

/// Number of keys of a head, padded to whole key blocks.
const fn padded_key_count(extents: &Extents) -> usize {
    extents.s.div_ceil(FP8_KEYS_PER_BLOCK) * FP8_KEYS_PER_BLOCK
}

const fn transposed_value_bytes(extents: &Extents) -> u64 {
    (extents.heads * padded_key_count(extents) * extents.d) as u64
}

pub const FLASH_WGMMA_FP8_ROW: Implementation<AttentionForward> = Implementation {
    name: "cuda/flash_wgmma_fp8",
    about: "as flash_wgmma, operands of both GEMMs in e4m3, probabilities too; values are \
            transposed by a kernel of their own, in the time; sm_90a only",
    supports: |problem| {
        let extents = Extents::from(&problem.attention);
        match (extents.dtype, extents.d) {
            (Dtype::Fp8, 128) => {
                extents.fits_index_and_grid_limits(&[
                    FLASH_WGMMA_FP8_KERNEL,
                    TRANSPOSE_VALUES_KERNEL,
                ])?;
                extents.check_equal_rows_and_heads()
            }
            (Dtype::Fp8, _) => Err("computes d = 128 only".to_owned()),
            _ => Err("computes fp8 only".to_owned()),
        }
    },
    prepare: Prepare::CudaWithin {
        device_bytes: fp8_device_bytes,
        prepare: prepare_flash_wgmma_fp8,
    },
};

/// Device memory of the fp8 row: inputs, an output of 16 bits, and the transposed values; the
/// scales take a ten-thousandth and are not counted.
fn fp8_device_bytes(problem: &AttentionForward) -> u64 {
    let extents = Extents::from(&problem.attention);
    let elements = extents.query_rows() * extents.d as u64;
    (3 + ELEMENT_BYTES) * elements + transposed_value_bytes(&extents)
}

/// Makes one list of tiles for each multiprocessor.
fn upload_tile_lists(
    extents: &Extents,
    device: &Arc<Device>,
    key_bytes: usize,
    block_keys: usize,
) -> Result<DeviceBuffer, BackendError> {
    let Extents { heads, share, s, keys, causal, .. } = *extents;
    let tiling = QueryTiling { heads, share, s, keys, key_bytes, causal, block_keys };
    let lists = tiling.tile_lists(device.facts().multiprocessors as usize);
    device.upload(bytemuck::cast_slice(&tile_table(&lists, extents.query_heads_per_sequence())))
}

/// How a thread block gets the next tile to compute: from a list or from a shared counter.
#[derive(Debug, Clone, Copy)]
enum TileSchedule {
    /// Device address of the lists of tiles, one list for each thread block.
    Listed(u64),
    /// Address of the counter of taken heads, which is zero before and after each launch.
    Counted(u64),
}

/// Operands of the forward kernel.
struct ForwardOperands<'a> {
    /// Queries, keys, values and output, each as a tensor map or address, as the build expects it.
    tensors: [&'a [u8]; 4],
    /// Address of the rows' log-sum-exp, or zero to omit it.
    lse: u64,
    lse_strides: Strides,
    /// Addresses of the fp8 scales of queries, keys and values.
    scales: [u64; 3],
    /// How thread blocks find their tiles.
    tiles: TileSchedule,
}

impl ForwardOperands<'_> {
    fn kernel_arguments(&self, extents: &Extents) -> Arguments {
        let (list, counter) = match self.tiles {
            TileSchedule::Listed(list) => (list, 0),
            TileSchedule::Counted(counter) => (0, counter),
        };
        let with_tensors = self.tensors.into_iter().fold(Arguments::new(), Arguments::bytes);
        let with_addresses = with_tensors
            .address(self.lse)
            .value(self.lse_strides.stride_words())
            .value(self.scales)
            .address(list)
            .address(counter);
        let Extents { s, keys, share, heads, .. } = *extents;
        [s, keys, extents.query_heads_per_sequence(), share, heads]
            .into_iter()
            .fold(with_addresses, |all, number| all.value(number as i32))
    }
}

/// Prepares the launch of [`FLASH_WGMMA_KERNEL`] over the tensors at these addresses.
pub fn prepare_flash_wgmma_launch(
    device: &Arc<Device>,
    extents: &Extents,
    layout: &ForwardLayout,
    addresses: &ForwardAddresses,
) -> Result<OrderedLaunches, BackendError> {
    let loaded = FLASH_WGMMA_KERNEL.compile_and_load(device, extents)?;
    let key_bytes = extents.d * ELEMENT_BYTES as usize;
    let (table, tiles) = if takes_short_heads(extents) {
        let counter = device.upload(&0_u32.to_ne_bytes())?;
        let tiles = TileSchedule::Counted(counter.address());
        (counter, tiles)
    } else {
        let lists = upload_tile_lists(extents, device, key_bytes, keys_per_block(extents))?;
        let tiles = TileSchedule::Listed(lists.address());
        (lists, tiles)
    };
    let ForwardAddresses { q, k, v, out, lse } = *addresses;
    let of_group = |strides| query_boxes(extents, strides, GROUP_ROWS);
    let of_block = |strides| key_boxes(extents, strides, keys_per_block(extents));
    let tensors = [
        of_group(&layout.q).encode_map(q)?,
        of_block(&layout.k).encode_map(k)?,
        of_block(&layout.v).encode_map(v)?,
        of_group(&layout.out).encode_map(out)?,
    ];
    let operands = ForwardOperands {
        tensors: tensors.each_ref().map(|map| &map[..]),
        lse: lse.unwrap_or(0),
        lse_strides: layout.lse,
        scales: [0; 3],
        tiles,
    };
    let blocks = device.facts().multiprocessors;
    let launch = loaded.prepare_launch(device, Some(blocks), operands.kernel_arguments(extents))?;
    Ok(OrderedLaunches::new([("forward", launch)]).with_table_buffer(table))
}

fn prepare_flash_wgmma_fp8(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    const FP8_OPERANDS: [&str; 3] = ["q_e4m3", "k_e4m3", "v_e4m3"];
    const FP8_SCALE_INPUTS: [&str; 3] = ["q_scale", "k_scale", "v_scale"];
    let extents = Extents::from(&problem.attention);
    let main = FLASH_WGMMA_FP8_KERNEL.compile_and_load(device, &extents)?;
    let first =
        TRANSPOSE_VALUES_KERNEL.compile_and_load(device, &Extents { causal: false, ..extents })?;
    let [q, k, v] = upload_inputs(device, inputs, FP8_OPERANDS)?;
    let scales = upload_inputs(device, inputs, FP8_SCALE_INPUTS)?;
    let transposed = allocate_scratch(device, transposed_value_bytes(&extents))?;
    let out = allocate_output(device, "out", &problem.attention)?;
    let tiles = upload_tile_lists(&extents, device, extents.d, FP8_KEYS_PER_BLOCK)?;
    let layout = ForwardLayout::strides_of_bhsd(&AttentionShape::from(&problem.attention));
    let of_output = Extents { dtype: Dtype::Bf16, ..extents };
    let operands = ForwardOperands {
        tensors: [
            &query_boxes(&extents, &layout.q, GROUP_ROWS).encode_map(q.address())?,
            &key_boxes(&extents, &layout.k, FP8_KEYS_PER_BLOCK).encode_map(k.address())?,
            &transposed.address().to_ne_bytes(),
            &query_boxes(&of_output, &layout.out, GROUP_ROWS).encode_map(out.address())?,
        ],
        lse: 0,
        lse_strides: layout.lse,
        scales: [&scales[0], &scales[1], &scales[2]].map(DeviceBuffer::address),
        tiles: TileSchedule::Listed(tiles.address()),
    };
    let blocks = device.facts().multiprocessors;
    let main = main.prepare_launch(device, Some(blocks), operands.kernel_arguments(&extents))?;
    let named = FP8_OPERANDS
        .into_iter()
        .chain(FP8_SCALE_INPUTS)
        .zip([&q, &k, &v].into_iter().chain(&scales));
    let inputs: Vec<_> = named.map(|(name, buffer)| Input::new(name, buffer)).collect();
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = (&q, &k, &scales, &tiles);
        let arguments = [
            KernelArgument::from(&v),
            KernelArgument::from(&transposed),
            extents.sequence_length_argument(),
        ];
        within_range("transpose", || first.launch_with(&arguments))?;
        within_range("forward", || main.launch())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_tests::kernel_parameters;

    #[test]
    fn the_declared_shared_memory_of_the_forward_equals_the_kernels_layout() {
        let narrow = Extents::self_attention_extents(6, 300, Dtype::Bf16);
        let wide = Extents { d: 128, ..narrow };
        assert_eq!(shared_bytes(&narrow), (384 + 8 * 128) * 128 + 160);
        let [short, short_wide] =
            [narrow, wide].map(|build| Extents { heads: 264, s: 200, keys: 200, ..build });
        assert_eq!(shared_bytes(&short), (6 + 12) * 64 * 128 + 16 * 18 + 128);
        assert_eq!(shared_bytes(&short_wide), (5 + 9) * 64 * 256 + 16 * 14 + 128);
        assert_eq!(shared_bytes(&wide), (384 + 8 * 64) * 256 + 160);
        let many = Extents { keys: 513, ..wide };
        assert_eq!(shared_bytes(&many), (384 + 6 * 80) * 256 + 128);
        for build in extents_of_builds() {
            assert!(shared_bytes(&build) <= 227 << 10, "{build:?}");
        }
        assert_eq!(fp8_shared_bytes(&wide), 384 * 256 + 8 * 96 * 128 + 160);
    }

    #[test]
    fn all_keys_of_a_head_computed_in_turns_fit_into_shared_memory() {
        let wide = Extents {
            d: 128,
            ..Extents::self_attention_extents(MIN_SHORT_HEADS, 256, Dtype::Bf16)
        };
        assert_eq!(parts_per_tile(&Extents { heads: MIN_SHORT_HEADS - 1, ..wide }), 3);
        let parts_of = |s| parts_per_tile(&Extents { s, ..wide });
        assert_eq!([1, 64, 65, 128, 129].map(parts_of), [1, 1, 2, 2, 3]);
        assert_eq!([192, 193, 256, 257].map(parts_of), [3, 4, 4, 3]);
        assert_eq!([1, 256, 257].map(|keys| parts_per_tile(&Extents { keys, ..wide })), [4, 4, 3]);
        for d in [64, 128] {
            let short = Extents { d, ..wide };
            let TileAndBlockStages { keys, values, .. } = TileAndBlockStages::new(&short);
            assert!(keys.min(values) * keys_per_block(&short) >= MAX_KEYS_OF_SHORT_HEAD, "{d}");
        }
    }

    #[test]
    fn the_launch_arguments_equal_the_parameters_of_the_forward_kernel() {
        let bytes = |parameter: &str, fp8: bool| match parameter {
            _ if parameter.contains('*') => 8,
            _ if parameter.contains("Values") && fp8 => 8,
            _ if parameter.contains("TensorMap") || parameter.contains("Values") => 128,
            _ if parameter.contains("Scales") || parameter.contains("Strides") => 3 * 8,
            _ => 4,
        };
        let extents = Extents::self_attention_extents(6, 200, Dtype::Bf16);
        for fp8 in [false, true] {
            let (map, address) = ([0; 128], [0; 8]);
            let values = if fp8 { &address[..] } else { &map };
            let operands = ForwardOperands {
                tensors: [&map, &map, values, &map],
                lse: 0,
                lse_strides: Strides::dense_bhsd(6, 200, 1),
                scales: [0; 3],
                tiles: TileSchedule::Listed(0),
            };
            let given = operands.kernel_arguments(&extents);
            let given: Vec<usize> = given.iter().map(KernelArgument::argument_bytes).collect();
            let parameters: Vec<usize> =
                kernel_parameters(&FLASH_WGMMA_KERNEL).iter().map(|it| bytes(it, fp8)).collect();
            assert_eq!(given, parameters);
        }
    }

    #[test]
    fn architectures_without_wgmma_are_declined_with_a_reason() {
        let extents = Extents::self_attention_extents(6, 200, Dtype::F16);
        for arch in ["sm_80", "sm_90", "sm_100a", "sm_120a"] {
            let unmet = FLASH_WGMMA_KERNEL.unmet_requirement_for(&extents, arch, 227 << 10);
            assert_eq!(unmet.as_deref(), Some("needs sm_90a"), "{arch}");
        }
        assert_eq!(FLASH_WGMMA_KERNEL.unmet_requirement_for(&extents, "sm_90a", 227 << 10), None);
    }
}
