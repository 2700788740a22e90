//! Attention backward on sm_90a: the kernels of `kernels/attention/backward_flash_wgmma`, the
//! choice among their builds, and their launches.

use super::mma::{
    BackwardLaunchInputs, KEYS_PER_BACKWARD_BLOCK, QUERIES_PER_WIDE_BACKWARD_STEP,
    ROUND_DQ_SUMS_KERNEL, ROW_STATISTICS_AND_ZERO_DQ_KERNEL, queries_per_backward_mma_step,
};
use crate::attention::cuda::call::{AttentionLaunches, QueryGradientSumOrder};
use crate::attention::cuda::launch::{
    AttentionExtents, BYTES_OF_16_BIT_ELEMENT, attention_kernel_spec_with_build_per_shape,
    tma_boxes_of_key_or_value_tensor, tma_boxes_of_query_tensor,
};
use kernelgate::backend::BackendError;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{
    Device, KernelArgumentList, KernelSpec, LoadedKernelWithLaunch, RequiredArchitecture,
};

/// Kernels of `backward_flash_wgmma`; most builds are launched between the prepare and the finish
/// kernel of `backward_flash_mma`.
pub const BACKWARD_WGMMA_KERNELS: &[KernelSpec<AttentionExtents>] = &[
    BACKWARD_FLASH_WGMMA_KERNEL,
    SPLIT_HEAD_GROUP_BACKWARD_KERNEL,
    FIXED_DQ_ORDER_BACKWARD_KERNEL,
    WHOLE_HEADS_PER_BLOCK_BACKWARD_KERNEL,
    WIDE_STEP_BACKWARD_KERNEL,
    WIDE_STEP_SPLIT_HEAD_GROUP_KERNEL,
    WIDE_STEP_FIXED_DQ_ORDER_KERNEL,
    WIDE_STEP_ROW_STATISTICS_KERNEL,
    TRANSPOSE_AND_ROUND_DQ_KERNEL,
];

/// Threads of a block of `backward_flash_wgmma`: two compute warpgroups and one that copies tiles.
const THREADS_PER_BACKWARD_WGMMA_BLOCK: usize = 384;

/// Number of queries that a block of `backward_flash_wgmma` processes in one step of its loop,
/// except in WIDE builds.
const QUERIES_PER_BACKWARD_WGMMA_STEP: usize = 64;

/// Minimum sequence length at which the thread blocks of a head process equal query steps at about
/// the same time.
const MIN_QUERIES_OF_LONG_BACKWARD_HEAD: usize = 4096;

/// Number of keys of a compute warpgroup, and number of rows in a tensor-copy box of its dk and dv.
const KEYS_PER_BACKWARD_WARPGROUP: usize = KEYS_PER_BACKWARD_BLOCK / 2;

pub const BACKWARD_FLASH_WGMMA_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    constant_macros: |extents| {
        backward_wgmma_macros(extents, &["DETERMINISTIC", "GROUPED", "WHOLE", "WIDE"])
    },
    dynamic_shared_bytes: backward_wgmma_shared_bytes,
    required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
    ..attention_kernel_spec_with_build_per_shape(
        "attention/backward_flash_wgmma",
        "attention_backward_flash_wgmma",
        THREADS_PER_BACKWARD_WGMMA_BLOCK,
        |extents| {
            [
                backward_grid_without_shared_key_blocks(extents, extents.query_heads_per_key_head),
                1,
                1,
            ]
        },
    )
};

/// Build of `backward_flash_wgmma` in which a thread block handles only some of the query heads
/// that share its keys.
pub const SPLIT_HEAD_GROUP_BACKWARD_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| wgmma_backward_defines_with(extents, "GROUPED=1"),
    constant_macros: |extents| backward_wgmma_macros(extents, &["DETERMINISTIC", "WHOLE", "WIDE"]),
    // The grid is the largest possible one: each query head has its own thread blocks.
    blocks: |extents| [backward_grid_without_shared_key_blocks(extents, 1), 1, 1],
    ..BACKWARD_FLASH_WGMMA_KERNEL
};

/// Build of `backward_flash_wgmma` in which the key blocks add to dq in a fixed order.
const FIXED_DQ_ORDER_BACKWARD_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| wgmma_backward_defines_with(extents, "DETERMINISTIC=1"),
    constant_macros: |extents| backward_wgmma_macros(extents, &["GROUPED", "WHOLE", "WIDE"]),
    ..BACKWARD_FLASH_WGMMA_KERNEL
};

/// Build of `backward_flash_wgmma` in which a thread block computes whole heads, so that no finish
/// kernel rounds the sums of dq.
const WHOLE_HEADS_PER_BLOCK_BACKWARD_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| wgmma_backward_defines_with(extents, "WHOLE=1"),
    constant_macros: |extents| {
        let shared = [("SHARED_BYTES", whole_heads_backward_shared_bytes(extents))];
        replace_macro_values(
            backward_wgmma_macros(extents, &["DETERMINISTIC", "GROUPED", "WIDE"]),
            &shared,
        )
    },
    dynamic_shared_bytes: whole_heads_backward_shared_bytes,
    // The launcher replaces this grid by one thread block for each multiprocessor.
    blocks: |_| [1, 1, 1],
    ..BACKWARD_FLASH_WGMMA_KERNEL
};

/// Build of `backward_flash_wgmma` with steps of 80 queries instead of 64, for long heads.
pub const WIDE_STEP_BACKWARD_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| wgmma_backward_defines_with(extents, "WIDE=1"),
    listed_build_parameters: || {
        variants_with_wide_step_build(BACKWARD_FLASH_WGMMA_KERNEL.listed_build_parameters)
    },
    constant_macros: |extents| {
        wide_step_backward_macros(extents, &["DETERMINISTIC", "GROUPED", "WHOLE"])
    },
    dynamic_shared_bytes: wide_step_backward_shared_bytes,
    ..BACKWARD_FLASH_WGMMA_KERNEL
};
const WIDE_STEP_SPLIT_HEAD_GROUP_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| {
        [wgmma_backward_defines_with(extents, "WIDE=1"), vec!["GROUPED=1".to_owned()]].concat()
    },
    constant_macros: |extents| wide_step_backward_macros(extents, &["DETERMINISTIC", "WHOLE"]),
    blocks: SPLIT_HEAD_GROUP_BACKWARD_KERNEL.blocks,
    ..WIDE_STEP_BACKWARD_KERNEL
};
/// Build of `backward_flash_wgmma` with steps of 80 queries that adds to dq in a fixed order, for
/// full attention only. With a causal mask, the steps of 80 queries would not begin where a key
/// block of 128 begins.
const WIDE_STEP_FIXED_DQ_ORDER_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| {
        [wgmma_backward_defines_with(extents, "WIDE=1"), vec!["DETERMINISTIC=1".to_owned()]]
            .concat()
    },
    listed_build_parameters: || {
        (WIDE_STEP_BACKWARD_KERNEL.listed_build_parameters)()
            .into_iter()
            .filter(|extents| !extents.causal)
            .collect()
    },
    constant_macros: |extents| wide_step_backward_macros(extents, &["GROUPED", "WHOLE"]),
    ..WIDE_STEP_BACKWARD_KERNEL
};

fn wide_step_backward_macros(
    extents: &AttentionExtents,
    zeros: &[&'static str],
) -> Vec<(&'static str, usize)> {
    let wide = [
        ("TILE_QUERIES", QUERIES_PER_WIDE_BACKWARD_STEP),
        ("SHARED_BYTES", wide_step_backward_shared_bytes(extents)),
    ];
    replace_macro_values(backward_wgmma_macros(extents, zeros), &wide)
}

/// Build of the prepare kernel that stores the row statistics in the order of steps of 80 queries.
const WIDE_STEP_ROW_STATISTICS_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| {
        let queries = format!("PREPARED_QUERIES={QUERIES_PER_WIDE_BACKWARD_STEP}");
        (ROW_STATISTICS_AND_ZERO_DQ_KERNEL.macro_definitions)(extents)
            .into_iter()
            .chain([queries])
            .collect()
    },
    listed_build_parameters: || {
        variants_with_wide_step_build(ROW_STATISTICS_AND_ZERO_DQ_KERNEL.listed_build_parameters)
    },
    required_architecture: BACKWARD_FLASH_WGMMA_KERNEL.required_architecture,
    ..ROW_STATISTICS_AND_ZERO_DQ_KERNEL
};

/// Kernel that transposes the dq sums of a WIDE build and rounds them to the gradient of the
/// queries.
pub const TRANSPOSE_AND_ROUND_DQ_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_backward_flash_wgmma_transpose",
    blocks: |extents| {
        [
            extents.queries_per_head.div_ceil(QUERIES_PER_WIDE_BACKWARD_STEP)
                * extents.total_query_heads,
            1,
            1,
        ]
    },
    dynamic_shared_bytes: |_| 0,
    ..WIDE_STEP_BACKWARD_KERNEL
};

fn variants_with_wide_step_build(variants: fn() -> Vec<AttentionExtents>) -> Vec<AttentionExtents> {
    variants().into_iter().filter(has_wide_step_backward_build).collect()
}

/// Returns whether `backward_flash_wgmma` has a build with steps of 80 queries for these extents.
/// Builds with steps of 80 queries round the gradients of the probabilities, which might overflow
/// in f16.
fn has_wide_step_backward_build(extents: &AttentionExtents) -> bool {
    extents.head_dim == 128 && extents.dtype == Dtype::Bf16
}

/// Returns whether a head is long enough that steps of 80 queries were measured to be faster than
/// steps of 64.
fn backward_steps_of_80_queries_are_faster(extents: &AttentionExtents) -> bool {
    let shortest = if extents.causal || extents.query_heads_per_key_head > 1 { 4096 } else { 2048 };
    has_wide_step_backward_build(extents) && extents.queries_per_head >= shortest
}

fn replace_macro_values(
    mut constants: Vec<(&'static str, usize)>,
    others: &[(&'static str, usize)],
) -> Vec<(&'static str, usize)> {
    constants.retain(|(name, _)| others.iter().all(|(other, _)| other != name));
    constants.extend(others);
    constants
}

fn wgmma_backward_defines_with(extents: &AttentionExtents, define: &str) -> Vec<String> {
    (BACKWARD_FLASH_WGMMA_KERNEL.macro_definitions)(extents)
        .into_iter()
        .chain([define.to_owned()])
        .collect()
}

const fn backward_grid_without_shared_key_blocks(
    extents: &AttentionExtents,
    heads_a_block: usize,
) -> usize {
    extents.queries_per_head.div_ceil(KEYS_PER_BACKWARD_BLOCK)
        * (extents.total_query_heads / heads_a_block)
}

/// Maximum number of key blocks in the grid's last round that several thread blocks share.
const MAX_SHARED_KEY_BLOCKS: usize = 128;

/// Minimum number of query steps of each thread block that shares a key block with others. With
/// fewer query steps, adding dk and dv to sums in memory costs more than idle multiprocessors.
const MIN_STEPS_PER_SHARING_THREAD_BLOCK: usize = 16;

/// Key blocks at the end of the grid that several thread blocks share, so that the last round of
/// thread blocks leaves no multiprocessor idle: `halved_key_blocks` key blocks have two thread
/// blocks each, and the following `unhalved_key_blocks` have `thread_blocks_per_unhalved` each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastRoundDivision {
    pub halved_key_blocks: usize,
    pub unhalved_key_blocks: usize,
    pub thread_blocks_per_unhalved: usize,
}

impl LastRoundDivision {
    /// No key block is shared: each has one thread block.
    pub const NO_SHARED_KEY_BLOCKS: Self =
        Self { halved_key_blocks: 0, unhalved_key_blocks: 0, thread_blocks_per_unhalved: 1 };

    /// Returns the division of the grid's last round among thread blocks with the shortest
    /// estimated time. With a causal mask, the thread blocks of the last round are short, so none
    /// of their key blocks is shared.
    fn fastest_last_round_division(extents: &AttentionExtents, multiprocessors: usize) -> Self {
        let steps = extents.queries_per_head.div_ceil(QUERIES_PER_BACKWARD_WGMMA_STEP);
        let left =
            backward_grid_without_shared_key_blocks(extents, extents.query_heads_per_key_head)
                % multiprocessors;
        let halved = if 2 * left > multiprocessors { multiprocessors / 2 } else { 0 };
        let others = left - halved;
        let parts = multiprocessors
            .checked_div(others)
            .unwrap_or(1)
            .min(steps / MIN_STEPS_PER_SHARING_THREAD_BLOCK);
        let parts = parts.max(1);
        let halves = if halved > 0 { 0.5 } else { 0.0 };
        let time = halves + if others > 0 { 1.0 / parts as f64 } else { 0.0 };
        let long = !extents.causal && steps >= 2 * MIN_STEPS_PER_SHARING_THREAD_BLOCK;
        if long && left <= MAX_SHARED_KEY_BLOCKS && time < 0.9 {
            Self {
                halved_key_blocks: halved,
                unhalved_key_blocks: others,
                thread_blocks_per_unhalved: parts,
            }
        } else {
            Self::NO_SHARED_KEY_BLOCKS
        }
    }

    const fn key_blocks_shared_in_last_round(&self) -> usize {
        self.halved_key_blocks + self.unhalved_key_blocks
    }

    const fn thread_blocks_added_by_sharing(&self) -> usize {
        self.halved_key_blocks + self.unhalved_key_blocks * (self.thread_blocks_per_unhalved - 1)
    }
}

/// Bytes of scratch memory that must be zero before a launch: dk and dv sums of the shared key
/// blocks, and counters. A counter counts the turns of a query step or, for shared key blocks, the
/// thread blocks that added to a warpgroup's sums.
fn zeroed_bytes_for_shared_key_blocks(extents: &AttentionExtents, shared_blocks: usize) -> u64 {
    let turns = extents.total_query_heads
        * extents.queries_per_head.div_ceil(QUERIES_PER_BACKWARD_WGMMA_STEP);
    shared_dk_dv_sum_bytes(extents, shared_blocks) + 4 * turns.max(2 * shared_blocks) as u64
}

const fn shared_dk_dv_sum_bytes(extents: &AttentionExtents, shared_blocks: usize) -> u64 {
    (2 * 4 * shared_blocks * KEYS_PER_BACKWARD_BLOCK * extents.head_dim) as u64
}

/// Upper bound of [`zeroed_scratch_bytes`] on any device.
pub fn max_zeroed_scratch_bytes(extents: &AttentionExtents) -> u64 {
    let blocks = backward_grid_without_shared_key_blocks(extents, extents.query_heads_per_key_head);
    let short = extents.queries_per_head.div_ceil(QUERIES_PER_BACKWARD_WGMMA_STEP)
        < 2 * MIN_STEPS_PER_SHARING_THREAD_BLOCK;
    let shared = match extents.query_heads_per_key_head {
        1 if extents.causal || short => 0,
        1 => blocks.min(MAX_SHARED_KEY_BLOCKS),
        _ => blocks,
    };
    zeroed_bytes_for_shared_key_blocks(extents, shared)
}

/// Number of query heads that a thread block handles out of those that share its keys: the divisor
/// with the shortest time in a model of measurements.
///
/// In the model, loading keys and storing dk and dv cost as much as two query steps, or four if dk
/// and dv are added to sums in memory. Thread blocks of many heads work on different heads at the
/// same time, so L2 holds fewer of their tiles; with a causal mask, they drift apart further.
/// Thread blocks that handle a single long head process the same query steps at about the same
/// time.
fn fastest_query_heads_per_block(extents: &AttentionExtents, multiprocessors: usize) -> usize {
    let AttentionExtents { queries_per_head: s, query_heads_per_key_head: share, causal, .. } =
        *extents;
    if s >= MIN_QUERIES_OF_LONG_BACKWARD_HEAD {
        return 1;
    }
    let steps = s.div_ceil(QUERIES_PER_BACKWARD_WGMMA_STEP);
    let cost = |heads: usize| {
        let (blocks, rows) = (
            backward_grid_without_shared_key_blocks(extents, heads),
            s.div_ceil(KEYS_PER_BACKWARD_BLOCK),
        );
        let of_block = if heads == share { 2 } else { 4 };
        let longest = (heads * steps + of_block) as f64;
        if causal {
            // With a causal mask, the number of query steps of a key block decreases from the first
            // key block to the last.
            let of_head: usize = (0..rows)
                .map(|row| steps - row * KEYS_PER_BACKWARD_BLOCK / QUERIES_PER_BACKWARD_WGMMA_STEP)
                .sum();
            let all = (extents.total_query_heads * of_head + blocks * of_block) as f64;
            longest.max(all / multiprocessors as f64) * (1.0 + 0.035 * heads as f64)
        } else {
            let apart = if heads == 1 { 1.0 } else { 1.06 };
            blocks.div_ceil(multiprocessors) as f64 * longest * apart
        }
    };
    let divisors = (1..=share).filter(|heads| share.is_multiple_of(*heads));
    divisors.min_by(|&a, &b| cost(a).total_cmp(&cost(b))).unwrap_or(share)
}

/// Returns the macros of a build: sizes of the kernel, and value 0 for each macro named in `zeros`.
fn backward_wgmma_macros(
    extents: &AttentionExtents,
    zeros: &[&'static str],
) -> Vec<(&'static str, usize)> {
    let numbers = [
        ("THREADS", THREADS_PER_BACKWARD_WGMMA_BLOCK),
        ("TILE_QUERIES", queries_per_backward_mma_step(extents)),
        ("TILE_KEYS", KEYS_PER_BACKWARD_BLOCK),
        ("SHARED_BYTES", backward_wgmma_shared_bytes(extents)),
    ];
    numbers.into_iter().chain(zeros.iter().map(|name| (*name, 0))).collect()
}

/// Shared memory of `backward_flash_wgmma`: keys and values; two stages of queries, output
/// gradients, score gradients and two floats a query; six barrier pairs.
fn backward_wgmma_shared_bytes(extents: &AttentionExtents) -> usize {
    let row = extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize;
    let scores = KEYS_PER_BACKWARD_BLOCK
        * QUERIES_PER_BACKWARD_WGMMA_STEP
        * BYTES_OF_16_BIT_ELEMENT as usize;
    (2 * KEYS_PER_BACKWARD_BLOCK + 4 * QUERIES_PER_BACKWARD_WGMMA_STEP) * row
        + 2 * (scores + 2 * 4 * QUERIES_PER_BACKWARD_WGMMA_STEP)
        + 6 * 16
}

/// Shared memory of a WHOLE build: [`backward_wgmma_shared_bytes`] and a second stage of keys and
/// values.
fn whole_heads_backward_shared_bytes(extents: &AttentionExtents) -> usize {
    backward_wgmma_shared_bytes(extents)
        + 2 * KEYS_PER_BACKWARD_BLOCK * extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize
        + 16
}

/// Shared memory of a WIDE build, with steps of 80 queries instead of 64. In a WIDE build, the
/// shared tile of score gradients has rows for 128 queries, although a step has 80.
fn wide_step_backward_shared_bytes(extents: &AttentionExtents) -> usize {
    let (row, queries) =
        (extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize, QUERIES_PER_WIDE_BACKWARD_STEP);
    let scores = KEYS_PER_BACKWARD_BLOCK * 128 * BYTES_OF_16_BIT_ELEMENT as usize;
    (2 * KEYS_PER_BACKWARD_BLOCK + 4 * queries) * row + 2 * (scores + 2 * 4 * queries) + 6 * 16
}

/// Whether thread blocks should compute whole heads: heads are so short that their dq sums stay in
/// L2, and all multiprocessors get about equally many. The number of query steps of a head must be
/// even, so that both warpgroups add dq in equally many steps of each key block.
const fn whole_heads_per_block_are_faster(
    extents: &AttentionExtents,
    multiprocessors: usize,
) -> bool {
    let AttentionExtents {
        query_heads_per_key_head: share,
        queries_per_head: s,
        total_query_heads: heads,
        causal,
        ..
    } = *extents;
    let steps_match = s <= KEYS_PER_BACKWARD_BLOCK
        || s.div_ceil(QUERIES_PER_BACKWARD_WGMMA_STEP).is_multiple_of(2);
    let few = s <= if causal { 512 } else { 256 };
    let rounds = heads.div_ceil(multiprocessors);
    let busy = heads >= multiprocessors && 10 * heads >= 9 * rounds * multiprocessors;
    share == 1 && few && steps_match && busy
}

/// Division of the work of one attention backward among the thread blocks of
/// `backward_flash_wgmma`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardWorkDivision {
    /// A thread block computes one key block, for `heads` of the query heads that share these keys.
    /// The field `order` takes effect only if one thread block handles all query heads that share a
    /// key block, also in the last round. Steps of 80 queries (`wide`) in any order need `heads` 1.
    KeyBlockPerThreadBlock {
        heads: usize,
        order: QueryGradientSumOrder,
        steps_of_80_queries: bool,
        last_round: LastRoundDivision,
    },
    /// Each of `thread_blocks` persistent thread blocks computes whole heads, which fixes the order
    /// of the additions to dq.
    WholeHeadsPerThreadBlock { thread_blocks: u32 },
}

impl BackwardWorkDivision {
    /// Returns the division of the backward's work with the shortest estimated time on this device.
    pub fn fastest_work_division_on_device(
        device: &Device,
        extents: &AttentionExtents,
        order: QueryGradientSumOrder,
    ) -> Self {
        let multiprocessors = device.gpu_properties().multiprocessor_count;
        if whole_heads_per_block_are_faster(extents, multiprocessors as usize) {
            return Self::WholeHeadsPerThreadBlock { thread_blocks: multiprocessors };
        }
        let heads = match order {
            QueryGradientSumOrder::AnyKeyBlockOrder => {
                fastest_query_heads_per_block(extents, multiprocessors as usize)
            }
            QueryGradientSumOrder::FixedKeyBlockOrder => extents.query_heads_per_key_head,
        };
        let ordered = order == QueryGradientSumOrder::FixedKeyBlockOrder && extents.causal;
        let wide = backward_steps_of_80_queries_are_faster(extents) && !ordered;
        let last = if heads == extents.query_heads_per_key_head
            && order == QueryGradientSumOrder::AnyKeyBlockOrder
        {
            LastRoundDivision::fastest_last_round_division(extents, multiprocessors as usize)
        } else {
            LastRoundDivision::NO_SHARED_KEY_BLOCKS
        };
        Self::KeyBlockPerThreadBlock { heads, order, steps_of_80_queries: wide, last_round: last }
    }

    /// Number of key blocks whose dk and dv several thread blocks sum in device memory.
    const fn key_blocks_summed_in_memory(&self, extents: &AttentionExtents) -> usize {
        match self {
            Self::KeyBlockPerThreadBlock { heads, .. }
                if *heads < extents.query_heads_per_key_head =>
            {
                backward_grid_without_shared_key_blocks(extents, extents.query_heads_per_key_head)
            }
            Self::KeyBlockPerThreadBlock { last_round: last, .. } => {
                last.key_blocks_shared_in_last_round()
            }
            Self::WholeHeadsPerThreadBlock { .. } => 0,
        }
    }

    const fn gradient_kernel_for_division(
        &self,
        extents: &AttentionExtents,
    ) -> &'static KernelSpec<AttentionExtents> {
        match self {
            Self::WholeHeadsPerThreadBlock { .. } => &WHOLE_HEADS_PER_BLOCK_BACKWARD_KERNEL,
            Self::KeyBlockPerThreadBlock { heads, steps_of_80_queries: false, .. }
                if *heads < extents.query_heads_per_key_head =>
            {
                &SPLIT_HEAD_GROUP_BACKWARD_KERNEL
            }
            Self::KeyBlockPerThreadBlock { heads, steps_of_80_queries: true, .. }
                if *heads < extents.query_heads_per_key_head =>
            {
                &WIDE_STEP_SPLIT_HEAD_GROUP_KERNEL
            }
            Self::KeyBlockPerThreadBlock { order, steps_of_80_queries: wide, .. } => {
                match (order, wide) {
                    (QueryGradientSumOrder::AnyKeyBlockOrder, false) => {
                        &BACKWARD_FLASH_WGMMA_KERNEL
                    }
                    (QueryGradientSumOrder::AnyKeyBlockOrder, true) => &WIDE_STEP_BACKWARD_KERNEL,
                    (QueryGradientSumOrder::FixedKeyBlockOrder, false) => {
                        &FIXED_DQ_ORDER_BACKWARD_KERNEL
                    }
                    (QueryGradientSumOrder::FixedKeyBlockOrder, true) => {
                        &WIDE_STEP_FIXED_DQ_ORDER_KERNEL
                    }
                }
            }
        }
    }

    /// Returns the grid's number of thread blocks, the query heads of each, and the last round's
    /// division as the kernel's struct `LastRound`.
    const fn grid_blocks_heads_and_last_round(
        &self,
        extents: &AttentionExtents,
    ) -> (u32, usize, [i32; 3]) {
        match *self {
            Self::KeyBlockPerThreadBlock { heads, last_round: last, .. } => {
                let blocks = backward_grid_without_shared_key_blocks(extents, heads);
                let first = (blocks - last.key_blocks_shared_in_last_round()) as i32;
                let of_kernel =
                    [first, last.halved_key_blocks as i32, last.thread_blocks_per_unhalved as i32];
                ((blocks + last.thread_blocks_added_by_sharing()) as u32, heads, of_kernel)
            }
            Self::WholeHeadsPerThreadBlock { thread_blocks: count } => {
                (count, 1, [count as i32, 0, 1])
            }
        }
    }
}

/// Loaded kernels of one attention backward through wgmma, in the order of their launches. The
/// finishing kernel exists only if several thread blocks add to the same rows of dq.
pub struct LoadedWgmmaBackwardKernels {
    row_statistics_kernel: LoadedKernelWithLaunch,
    gradient_kernel: LoadedKernelWithLaunch,
    dq_rounding_kernel: Option<LoadedKernelWithLaunch>,
}

/// Compiles and loads the kernels that a division of the backward's work needs.
pub fn load_wgmma_backward_kernels(
    device: &Device,
    extents: &AttentionExtents,
    blocks: BackwardWorkDivision,
) -> Result<LoadedWgmmaBackwardKernels, BackendError> {
    // The gradient kernel is loaded first, because the device may decline it.
    let main = blocks.gradient_kernel_for_division(extents).compile_and_load(device, extents)?;
    let (first, last) = match blocks {
        BackwardWorkDivision::KeyBlockPerThreadBlock { steps_of_80_queries: false, .. } => {
            (ROW_STATISTICS_AND_ZERO_DQ_KERNEL, Some(ROUND_DQ_SUMS_KERNEL))
        }
        BackwardWorkDivision::KeyBlockPerThreadBlock { steps_of_80_queries: true, .. } => {
            (WIDE_STEP_ROW_STATISTICS_KERNEL, Some(TRANSPOSE_AND_ROUND_DQ_KERNEL))
        }
        BackwardWorkDivision::WholeHeadsPerThreadBlock { .. } => {
            (ROW_STATISTICS_AND_ZERO_DQ_KERNEL, None)
        }
    };
    Ok(LoadedWgmmaBackwardKernels {
        gradient_kernel: main,
        row_statistics_kernel: first.compile_and_load(device, extents)?,
        dq_rounding_kernel: last.map(|last| last.compile_and_load(device, extents)).transpose()?,
    })
}

/// Bytes of scratch memory that must be zero before the first launch; every launch leaves them zero
/// again.
pub fn zeroed_scratch_bytes(extents: &AttentionExtents, blocks: BackwardWorkDivision) -> u64 {
    zeroed_bytes_for_shared_key_blocks(extents, blocks.key_blocks_summed_in_memory(extents))
}

/// Prepares the launches of an attention backward through wgmma: two if thread blocks compute whole
/// heads, three otherwise.
pub fn prepare_wgmma_backward_launches(
    call: &BackwardLaunchInputs<'_>,
    blocks: BackwardWorkDivision,
) -> Result<AttentionLaunches, BackendError> {
    let BackwardLaunchInputs { device, extents, layout, addresses, scratch } = *call;
    let LoadedWgmmaBackwardKernels {
        row_statistics_kernel: first,
        gradient_kernel: main,
        dq_rounding_kernel: last,
    } = load_wgmma_backward_kernels(device, extents, blocks)?;
    let sums = scratch.zeroed_scratch_address;
    let counters =
        sums + shared_dk_dv_sum_bytes(extents, blocks.key_blocks_summed_in_memory(extents));
    let [q, k, v] = [addresses.q_address, addresses.k_address, addresses.v_address];
    let (grad_out, grad_q) = (addresses.grad_out_address, addresses.grad_q_address);
    let (grad_k, grad_v) = (addresses.grad_k_address, addresses.grad_v_address);
    let wide = matches!(
        blocks,
        BackwardWorkDivision::KeyBlockPerThreadBlock { steps_of_80_queries: true, .. }
    );
    let queries =
        if wide { QUERIES_PER_WIDE_BACKWARD_STEP } else { QUERIES_PER_BACKWARD_WGMMA_STEP };
    let of_step = |strides| tma_boxes_of_query_tensor(extents, strides, queries);
    let of_keys = |strides, rows| tma_boxes_of_key_or_value_tensor(extents, strides, rows);
    let (grid, heads, last_round) = blocks.grid_blocks_heads_and_last_round(extents);
    let key_heads = extents.key_heads_per_sequence();
    let numbers = [
        extents.queries_per_head,
        key_heads,
        extents.query_heads_per_key_head,
        heads,
        extents.key_heads_of_all_sequences(),
    ];
    let parameters = KernelArgumentList::new()
        .with_struct_bytes(&of_step(&layout.forward.q).encode_tensor_map_at(q)?)
        .with_struct_bytes(
            &of_keys(&layout.forward.k, KEYS_PER_BACKWARD_BLOCK).encode_tensor_map_at(k)?,
        )
        .with_struct_bytes(
            &of_keys(&layout.forward.v, KEYS_PER_BACKWARD_BLOCK).encode_tensor_map_at(v)?,
        )
        .with_struct_bytes(&of_step(&layout.grad_out).encode_tensor_map_at(grad_out)?)
        .with_struct_bytes(
            &of_keys(&layout.grad_k, KEYS_PER_BACKWARD_WARPGROUP).encode_tensor_map_at(grad_k)?,
        )
        .with_struct_bytes(
            &of_keys(&layout.grad_v, KEYS_PER_BACKWARD_WARPGROUP).encode_tensor_map_at(grad_v)?,
        )
        .with_struct_bytes(&of_step(&layout.grad_q).encode_tensor_map_at(grad_q)?)
        .with_address(call.row_statistics_address())
        .with_address(call.dq_accumulator_address())
        .with_address(counters)
        .with_address(sums);
    let parameters =
        numbers.into_iter().fold(parameters, |all, number| all.with_value(number as i32));
    let parameters = parameters.with_value(last_round);
    let zeroed = last.as_ref().map(|_| call.dq_accumulator_address());
    let mut steps = vec![
        (
            "prepare",
            first.prepare_launch_with_blocks(
                device,
                None,
                call.row_statistics_kernel_arguments(zeroed),
            )?,
        ),
        ("scores_dkv_dq", main.prepare_launch_with_blocks(device, Some(grid), parameters)?),
    ];
    if let Some(last) = last {
        let parameters = if wide {
            let heads = extents.query_heads_per_sequence();
            let sums = KernelArgumentList::new()
                .with_address(call.dq_accumulator_address())
                .with_address(grad_q);
            sums.with_value(extents.queries_per_head as i32)
                .with_value(heads as i32)
                .with_value(layout.grad_q.batch_head_row_stride_argument())
        } else {
            call.round_dq_kernel_arguments()
        };
        steps.push(("finish", last.prepare_launch_with_blocks(device, None, parameters)?));
    }
    Ok(AttentionLaunches::from_nvtx_ranges_and_launches(steps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::backward::prepare_backward_task_over_dense_tensors;
    use crate::attention::cuda::launches::AttentionBackwardCall;
    use crate::attention::cuda::layout::{
        AttentionBackwardLayout, AttentionForwardLayout, AttentionShape,
    };
    use crate::attention::cuda::tests::bf16_attention_without_grouped_heads;
    use crate::attention::definition::AttentionParameters;
    use crate::attention::gradients::AttentionBackward;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::backend::LaunchableProblem;
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::{Dtype, Expected, Problem, Tensors};
    use std::sync::Arc;

    #[test]
    fn backward_wgmma_shared_bytes_equal_the_kernel_layout() {
        let narrow = AttentionExtents::single_sequence_self_attention(6, 200, Dtype::Bf16);
        let wide = AttentionExtents { head_dim: 128, ..narrow };
        assert_eq!(backward_wgmma_shared_bytes(&narrow), (64 + 32 + 1) * 1024 + 96);
        assert_eq!(backward_wgmma_shared_bytes(&wide), (128 + 32 + 1) * 1024 + 96);
        assert_eq!(whole_heads_backward_shared_bytes(&wide), (192 + 32 + 1) * 1024 + 112);
        assert_eq!(wide_step_backward_shared_bytes(&wide), (144 + 64) * 1024 + 1280 + 96);
    }

    #[test]
    fn heads_per_backward_block_are_the_ones_measured_as_fastest() {
        // Each entry has batch, query heads, sequence length, mask, and the measured best numbers
        // of heads for a thread block: the fastest and all within 4 % of it.
        for (b, h, s, causal, good) in [
            (1, 64, 512, true, &[1][..]),
            (1, 64, 1024, true, &[2]),
            (1, 64, 1024, false, &[4, 2]),
            (1, 64, 2048, true, &[4, 2, 1]),
            (1, 64, 2048, false, &[8]),
            (1, 64, 4096, true, &[1, 2, 4]),
            (1, 64, 4096, false, &[1, 8]),
            (1, 64, 8192, true, &[1, 4]),
            (1, 64, 16_384, true, &[1]),
            (1, 64, 16_384, false, &[1]),
            (8, 32, 256, true, &[4]),
            (8, 32, 512, false, &[4]),
            (8, 32, 2048, true, &[4]),
            (8, 32, 2048, false, &[4]),
        ] {
            let share = h / 8;
            let heads = AttentionExtents::single_sequence_self_attention(b * h, s, Dtype::Bf16);
            let chosen = fastest_query_heads_per_block(
                &AttentionExtents {
                    query_heads_per_key_head: share,
                    causal,
                    head_dim: 128,
                    ..heads
                },
                132,
            );
            assert!(good.contains(&chosen), "{b}, {h}, {s}, causal {causal}: {chosen}");
        }
        assert_eq!(
            fastest_query_heads_per_block(
                &AttentionExtents::single_sequence_self_attention(3, 65, Dtype::Bf16),
                132
            ),
            1
        );
    }

    #[test]
    fn key_blocks_of_a_half_empty_last_round_are_shared_by_thread_blocks() {
        let division = |heads, s, causal| {
            let extents = AttentionExtents::single_sequence_self_attention(heads, s, Dtype::Bf16);
            let LastRoundDivision {
                halved_key_blocks: halved,
                unhalved_key_blocks: others,
                thread_blocks_per_unhalved: parts,
            } = LastRoundDivision::fastest_last_round_division(
                &AttentionExtents { causal, head_dim: 128, ..extents },
                132,
            );
            (halved, others, parts)
        };
        // On 132 multiprocessors these shapes give 15 full rounds and 68 thread blocks, or 31 full
        // rounds and four thread blocks.
        assert_eq!(division(16, 16_384, false), (66, 2, 16));
        assert_eq!(division(32, 16_384, false), (0, 4, 16));
        assert_eq!(division(64, 4096, false), (66, 2, 4));
        // On 132 multiprocessors these shapes give a single half-full round, or full rounds only.
        assert_eq!(division(4, 2048, false), (0, 64, 2));
        assert_eq!(division(33, 16_384, false), (0, 0, 1));
        for unshared in
            [division(16, 16_384, true), division(256, 512, false), division(1, 1, false)]
        {
            assert_eq!(unshared, (0, 0, 1));
        }
    }

    #[test]
    fn backward_of_many_short_heads_takes_one_block_for_a_whole_head() {
        let many = AttentionExtents::single_sequence_self_attention(512, 128, Dtype::Bf16);
        for (causal, longest) in [(false, 256), (true, 512)] {
            let takes = |s| {
                whole_heads_per_block_are_faster(
                    &AttentionExtents { queries_per_head: s, keys_per_head: s, causal, ..many },
                    132,
                )
            };
            assert!([1, 64, 128, 193, 256, longest].into_iter().all(takes));
            assert!(![129, 192, longest + 1, longest + 128].into_iter().any(takes));
        }
        for (heads, takes) in [(131, false), (132, true), (133, false), (238, true)] {
            assert_eq!(
                whole_heads_per_block_are_faster(
                    &AttentionExtents { total_query_heads: heads, ..many },
                    132
                ),
                takes,
                "{heads}"
            );
        }
        assert!(!whole_heads_per_block_are_faster(
            &AttentionExtents { query_heads_per_key_head: 2, ..many },
            132
        ));
    }

    /// An attention backward problem with its inputs and reference gradients, to be launched with
    /// any division of the work.
    struct BackwardTestCase<'a> {
        device: &'a Arc<Device>,
        problem: AttentionBackward,
        inputs: Tensors,
        expected: Vec<Expected>,
    }

    impl<'a> BackwardTestCase<'a> {
        fn backward_case_with_random_inputs(
            device: &'a Arc<Device>,
            attention: AttentionParameters,
            seed: u64,
        ) -> Self {
            let problem = AttentionBackward { attention };
            let inputs = problem.inputs(seed);
            let expected = problem.reference(&inputs);
            Self { device, problem, inputs, expected }
        }

        /// Launches the backward twice, checks both results against the reference and returns both.
        fn launch_twice_and_verify_gradients(&self, blocks: BackwardWorkDivision) -> [Tensors; 2] {
            let Self { device, problem, inputs, expected } = self;
            let shape = AttentionShape::from(&problem.attention);
            let layout = AttentionBackwardLayout::gradients_like_tensors(
                AttentionForwardLayout::forward_layout_dense_bhsd(&shape),
            );
            let backward = AttentionBackwardCall::compile_wgmma_backward_with_work_division(
                device, &shape, &layout, blocks,
            )
            .unwrap();
            let mut task =
                prepare_backward_task_over_dense_tensors(&backward, problem, inputs, device)
                    .unwrap();
            [1, 2].map(|launch| {
                launch_twice_and_compare_with_reference(&mut task, expected, problem.tolerance())
                    .unwrap_or_else(|error| {
                        panic!("{:?}, {blocks:?}, launch {launch}: {error}", problem.attention)
                    });
                task.outputs_on_host().unwrap().clone()
            })
        }
    }

    fn assert_gradients_are_bitwise_equal([first, second]: &[Tensors; 2]) {
        for (name, tensor) in first.iter() {
            assert!(tensor.as_bytes() == second.tensor(name).as_bytes(), "{name}");
        }
    }

    #[test]
    fn backward_blocks_of_whole_heads_agree_with_the_reference_bitwise_repeatably() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.gpu_properties().kernel_architecture != "sm_90a" {
            return;
        }
        for s in [1, 65, 128, 200, 256] {
            for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
                let case = BackwardTestCase::backward_case_with_random_inputs(
                    &device,
                    bf16_attention_without_grouped_heads(2, 5, s, d, causal),
                    26,
                );
                assert_gradients_are_bitwise_equal(&case.launch_twice_and_verify_gradients(
                    BackwardWorkDivision::WholeHeadsPerThreadBlock { thread_blocks: 3 },
                ));
            }
        }
    }

    #[test]
    fn backward_in_wide_steps_agrees_with_the_reference_at_odd_shapes() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.gpu_properties().kernel_architecture != "sm_90a" {
            return;
        }
        // In this test the heads of 4097 and 4100 queries are long enough that their thread blocks
        // start at the same query step.
        let short = [1, 79, 80, 81, 200, 333].map(|s| [(2, s, 4), (2, s, 2)]);
        let all = short.into_iter().flatten().chain([(1, 4097, 4), (1, 4100, 2)]);
        for (b, s, h_kv) in all {
            for (causal, outliers) in [(false, false), (true, false), (false, true), (true, true)] {
                let attention = AttentionParameters {
                    key_value_heads: h_kv,
                    adds_input_outliers: outliers,
                    ..bf16_attention_without_grouped_heads(b, 4, s, 128, causal)
                };
                let case =
                    BackwardTestCase::backward_case_with_random_inputs(&device, attention, 27);
                let share = 4 / h_kv;
                let wide = |heads, order| BackwardWorkDivision::KeyBlockPerThreadBlock {
                    heads,
                    order,
                    steps_of_80_queries: true,
                    last_round: LastRoundDivision::NO_SHARED_KEY_BLOCKS,
                };
                case.launch_twice_and_verify_gradients(wide(
                    1,
                    QueryGradientSumOrder::AnyKeyBlockOrder,
                ));
                if !causal {
                    let blocks = wide(share, QueryGradientSumOrder::FixedKeyBlockOrder);
                    assert_gradients_are_bitwise_equal(
                        &case.launch_twice_and_verify_gradients(blocks),
                    );
                }
            }
        }
    }

    #[test]
    fn gradients_agree_with_the_reference_for_one_to_four_heads_a_block() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.gpu_properties().kernel_architecture != "sm_90a" {
            return;
        }
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let attention = AttentionParameters {
                key_value_heads: 2,
                ..bf16_attention_without_grouped_heads(2, 8, 333, d, causal)
            };
            let case = BackwardTestCase::backward_case_with_random_inputs(&device, attention, 25);
            for heads in [1, 2, 4] {
                case.launch_twice_and_verify_gradients(
                    BackwardWorkDivision::KeyBlockPerThreadBlock {
                        heads,
                        order: QueryGradientSumOrder::AnyKeyBlockOrder,
                        steps_of_80_queries: false,
                        last_round: LastRoundDivision::NO_SHARED_KEY_BLOCKS,
                    },
                );
            }
        }
    }

    #[test]
    fn gradients_of_shared_last_round_key_blocks_agree_with_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.gpu_properties().kernel_architecture != "sm_90a" {
            return;
        }
        // The grids have 4 to 33 key blocks, so that a thread block gets one step, no step or many
        // steps of a shared key block.
        for (s, h_kv) in [(1, 4), (129, 4), (333, 4), (333, 2), (4100, 1)] {
            // A WIDE build is tested only where no query heads share keys.
            for (d, wide) in [(64, false), (128, false), (128, h_kv == 4)] {
                let attention = AttentionParameters {
                    key_value_heads: h_kv,
                    ..bf16_attention_without_grouped_heads(1, 4, s, d, false)
                };
                let case =
                    BackwardTestCase::backward_case_with_random_inputs(&device, attention, 28);
                for (halved, others, parts) in [(4, 0, 1), (0, 3, 5), (2, 2, 3), (1, 1, 16)] {
                    case.launch_twice_and_verify_gradients(
                        BackwardWorkDivision::KeyBlockPerThreadBlock {
                            heads: 4 / h_kv,
                            order: QueryGradientSumOrder::AnyKeyBlockOrder,
                            steps_of_80_queries: wide,
                            last_round: LastRoundDivision {
                                halved_key_blocks: halved,
                                unhalved_key_blocks: others,
                                thread_blocks_per_unhalved: parts,
                            },
                        },
                    );
                }
            }
        }
    }
}
