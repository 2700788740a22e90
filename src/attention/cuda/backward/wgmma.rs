//! Attention backward on sm_90a: kernels and launcher of `kernels/attention/backward_flash_wgmma`.

use super::mma::{
    FLASH_MMA_FINISH, FLASH_MMA_PREPARE, KEYS_PER_BLOCK, PendingLaunches, QUERIES_OF_WIDE_STEP,
    queries_per_step,
};
use crate::attention::cuda::call::{BackwardAddresses, OrderedLaunches, QueryGradientSumOrder};
use crate::attention::cuda::launch::{
    ELEMENT_BYTES, Extents, attention_kernel, key_boxes, query_boxes,
};
use kernelgate::backend::BackendError;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{Arguments, Device, KernelSpec, LoadedKernel, RequiredArchitecture};

/// Kernels of `backward_flash_wgmma`; the launches before and after them are kernels of
/// `backward_flash_mma`.
pub const KERNELS: &[KernelSpec<Extents>] = &[
    FLASH_WGMMA,
    GROUPED_HEADS_KERNEL,
    FIXED_ORDER_KERNEL,
    WHOLE_HEADS_KERNEL,
    WIDE_STEPS_KERNEL,
    WIDE_GROUPED_HEADS_KERNEL,
    WIDE_FIXED_ORDER_KERNEL,
    WIDE_PREPARE_KERNEL,
    TRANSPOSE_KERNEL,
];

/// Threads of a block: two warpgroups that compute and one that copies.
const THREADS: usize = 384;

/// Number of queries in one step of `backward_flash_wgmma`.
const QUERIES_PER_STEP: usize = 64;

/// Positions of a head from which blocks keep in step.
const MIN_LONG_HEAD_QUERIES: usize = 4096;

/// Number of keys of a warpgroup, and of a tensor-copy box of its gradients.
const KEYS_PER_WARPGROUP: usize = KEYS_PER_BLOCK / 2;

pub const FLASH_WGMMA: KernelSpec<Extents> = KernelSpec {
    constants: |extents| kernel_macros(extents, &["DETERMINISTIC", "GROUPED", "WHOLE", "WIDE"]),
    shared_bytes,
    requires: RequiredArchitecture::Exactly("sm_90a"),
    ..attention_kernel(
        "attention/backward_flash_wgmma",
        "attention_backward_flash_wgmma",
        THREADS,
        |extents| [grid_blocks(extents, extents.share), 1, 1],
    )
};

/// Build of the kernel in which a block handles only some of the query heads that share keys.
pub const GROUPED_HEADS_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| defines_with(extents, "GROUPED=1"),
    constants: |extents| kernel_macros(extents, &["DETERMINISTIC", "WHOLE", "WIDE"]),
    // Largest possible grid: each query head has its own thread blocks.
    blocks: |extents| [grid_blocks(extents, 1), 1, 1],
    ..FLASH_WGMMA
};

/// Build of the kernel in which dq is summed in a fixed order.
const FIXED_ORDER_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| defines_with(extents, "DETERMINISTIC=1"),
    constants: |extents| kernel_macros(extents, &["GROUPED", "WHOLE", "WIDE"]),
    ..FLASH_WGMMA
};

/// Build of the kernel in which a block computes whole heads, so that no other kernel handles sums
/// of dq.
const WHOLE_HEADS_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| defines_with(extents, "WHOLE=1"),
    constants: |extents| {
        let shared = [("SHARED_BYTES", shared_bytes_of_two_stages(extents))];
        replace_macros(kernel_macros(extents, &["DETERMINISTIC", "GROUPED", "WIDE"]), &shared)
    },
    shared_bytes: shared_bytes_of_two_stages,
    // The launcher sets one thread block for each multiprocessor.
    blocks: |_| [1, 1, 1],
    ..FLASH_WGMMA
};

/// Steps of more queries, for long heads that share no keys.
pub const WIDE_STEPS_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| defines_with(extents, "WIDE=1"),
    variants: || in_wide_steps(FLASH_WGMMA.variants),
    constants: |extents| macros_of_wide_steps(extents, &["DETERMINISTIC", "GROUPED", "WHOLE"]),
    shared_bytes: shared_bytes_of_wide_steps,
    ..FLASH_WGMMA
};
const WIDE_GROUPED_HEADS_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| [defines_with(extents, "WIDE=1"), vec!["GROUPED=1".to_owned()]].concat(),
    constants: |extents| macros_of_wide_steps(extents, &["DETERMINISTIC", "WHOLE"]),
    blocks: GROUPED_HEADS_KERNEL.blocks,
    ..WIDE_STEPS_KERNEL
};
/// Build that adds in a fixed order, for full attention. With a causal mask, steps would not begin
/// at blocks of keys.
const WIDE_FIXED_ORDER_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| {
        [defines_with(extents, "WIDE=1"), vec!["DETERMINISTIC=1".to_owned()]].concat()
    },
    variants: || {
        (WIDE_STEPS_KERNEL.variants)().into_iter().filter(|extents| !extents.causal).collect()
    },
    constants: |extents| macros_of_wide_steps(extents, &["GROUPED", "WHOLE"]),
    ..WIDE_STEPS_KERNEL
};

fn macros_of_wide_steps(extents: &Extents, zeros: &[&'static str]) -> Vec<(&'static str, usize)> {
    let wide = [
        ("TILE_QUERIES", QUERIES_OF_WIDE_STEP),
        ("SHARED_BYTES", shared_bytes_of_wide_steps(extents)),
    ];
    replace_macros(kernel_macros(extents, zeros), &wide)
}

/// Build that stores row statistics in the order of wide steps.
const WIDE_PREPARE_KERNEL: KernelSpec<Extents> = KernelSpec {
    defines: |extents| {
        let queries = format!("PREPARED_QUERIES={QUERIES_OF_WIDE_STEP}");
        (FLASH_MMA_PREPARE.defines)(extents).into_iter().chain([queries]).collect()
    },
    variants: || in_wide_steps(FLASH_MMA_PREPARE.variants),
    requires: FLASH_WGMMA.requires,
    ..FLASH_MMA_PREPARE
};

/// Transposes and rounds the sums of dq of wide steps.
pub const TRANSPOSE_KERNEL: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_flash_wgmma_transpose",
    blocks: |extents| [extents.s.div_ceil(QUERIES_OF_WIDE_STEP) * extents.heads, 1, 1],
    shared_bytes: |_| 0,
    ..WIDE_STEPS_KERNEL
};

fn in_wide_steps(variants: fn() -> Vec<Extents>) -> Vec<Extents> {
    variants().into_iter().filter(computes_in_wide_steps).collect()
}

/// Returns whether there is a build with wide steps for these extents. Wide steps round gradients
/// of probabilities, which might overflow in f16.
fn computes_in_wide_steps(extents: &Extents) -> bool {
    extents.d == 128 && extents.dtype == Dtype::Bf16
}

/// Returns whether a head is at least as long as the shortest for which wide steps were measured to
/// be faster.
fn takes_wide_steps(extents: &Extents) -> bool {
    let shortest = if extents.causal || extents.share > 1 { 4096 } else { 2048 };
    computes_in_wide_steps(extents) && extents.s >= shortest
}

fn replace_macros(
    mut constants: Vec<(&'static str, usize)>,
    others: &[(&'static str, usize)],
) -> Vec<(&'static str, usize)> {
    constants.retain(|(name, _)| others.iter().all(|(other, _)| other != name));
    constants.extend(others);
    constants
}

fn defines_with(extents: &Extents, define: &str) -> Vec<String> {
    (FLASH_WGMMA.defines)(extents).into_iter().chain([define.to_owned()]).collect()
}

const fn grid_blocks(extents: &Extents, heads_a_block: usize) -> usize {
    extents.s.div_ceil(KEYS_PER_BLOCK) * (extents.heads / heads_a_block)
}

/// Most key blocks of the last round that thread blocks share.
const MOST_SHARED: usize = 128;

/// Fewest steps that a thread block takes of a shared key block. With fewer, adding to the sums
/// costs more than idle multiprocessors.
const FEWEST_STEPS: usize = 16;

/// Key blocks at the end of the grid that several thread blocks share, so that the last round
/// leaves no multiprocessor idle: `halved` of two thread blocks each, then `others` of `parts`
/// each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastRound {
    pub halved: usize,
    pub others: usize,
    pub parts: usize,
}

impl LastRound {
    /// Every key block has one thread block.
    pub const UNSHARED: Self = Self { halved: 0, others: 0, parts: 1 };

    /// Returns the division of the last round that takes the least time. With a causal mask, the
    /// blocks of the last round are short.
    fn fastest_division(extents: &Extents, multiprocessors: usize) -> Self {
        let steps = extents.s.div_ceil(QUERIES_PER_STEP);
        let left = grid_blocks(extents, extents.share) % multiprocessors;
        let halved = if 2 * left > multiprocessors { multiprocessors / 2 } else { 0 };
        let others = left - halved;
        let parts = multiprocessors.checked_div(others).unwrap_or(1).min(steps / FEWEST_STEPS);
        let parts = parts.max(1);
        let halves = if halved > 0 { 0.5 } else { 0.0 };
        let time = halves + if others > 0 { 1.0 / parts as f64 } else { 0.0 };
        let long = !extents.causal && steps >= 2 * FEWEST_STEPS;
        if long && left <= MOST_SHARED && time < 0.9 {
            Self { halved, others, parts }
        } else {
            Self::UNSHARED
        }
    }

    const fn shared_blocks(&self) -> usize {
        self.halved + self.others
    }

    const fn added_thread_blocks(&self) -> usize {
        self.halved + self.others * (self.parts - 1)
    }
}

/// Bytes that must be zero before a launch: sums of dk and dv of shared key blocks, and counters.
/// The counters count turns, for each query step, or arrivals at the sums of each warpgroup.
fn zeroed_bytes(extents: &Extents, shared_blocks: usize) -> u64 {
    let turns = extents.heads * extents.s.div_ceil(QUERIES_PER_STEP);
    shared_sum_bytes(extents, shared_blocks) + 4 * turns.max(2 * shared_blocks) as u64
}

const fn shared_sum_bytes(extents: &Extents, shared_blocks: usize) -> u64 {
    (2 * 4 * shared_blocks * KEYS_PER_BLOCK * extents.d) as u64
}

/// At least [`bytes_to_zero`] of any device.
pub fn most_bytes_to_zero(extents: &Extents) -> u64 {
    let blocks = grid_blocks(extents, extents.share);
    let short = extents.s.div_ceil(QUERIES_PER_STEP) < 2 * FEWEST_STEPS;
    let shared = match extents.share {
        1 if extents.causal || short => 0,
        1 => blocks.min(MOST_SHARED),
        _ => blocks,
    };
    zeroed_bytes(extents, shared)
}

/// Number of query heads that a block handles, out of those that share its keys: the divisor that
/// takes the least time by a model of measured times.
///
/// Loading the keys and storing the gradients of a block takes the time of some steps, and of more
/// steps if gradients are added to sums in memory. Blocks of many heads work on different heads at
/// the same time and find less of them in L2; with a causal mask, blocks drift apart further.
/// Thread blocks of a single long head proceed in step.
fn heads_per_block(extents: &Extents, multiprocessors: usize) -> usize {
    let Extents { s, share, causal, .. } = *extents;
    if s >= MIN_LONG_HEAD_QUERIES {
        return 1;
    }
    let steps = s.div_ceil(QUERIES_PER_STEP);
    let cost = |heads: usize| {
        let (blocks, rows) = (grid_blocks(extents, heads), s.div_ceil(KEYS_PER_BLOCK));
        let of_block = if heads == share { 2 } else { 4 };
        let longest = (heads * steps + of_block) as f64;
        if causal {
            // Every key block starts at its own diagonal of the causal mask.
            let of_head: usize =
                (0..rows).map(|row| steps - row * KEYS_PER_BLOCK / QUERIES_PER_STEP).sum();
            let all = (extents.heads * of_head + blocks * of_block) as f64;
            longest.max(all / multiprocessors as f64) * (1.0 + 0.035 * heads as f64)
        } else {
            let apart = if heads == 1 { 1.0 } else { 1.06 };
            blocks.div_ceil(multiprocessors) as f64 * longest * apart
        }
    };
    let divisors = (1..=share).filter(|heads| share.is_multiple_of(*heads));
    divisors.min_by(|&a, &b| cost(a).total_cmp(&cost(b))).unwrap_or(share)
}

/// Macros of a build: all macros of the kernel, with those in `zeros` set to 0.
fn kernel_macros(extents: &Extents, zeros: &[&'static str]) -> Vec<(&'static str, usize)> {
    let numbers = [
        ("THREADS", THREADS),
        ("TILE_QUERIES", queries_per_step(extents)),
        ("TILE_KEYS", KEYS_PER_BLOCK),
        ("SHARED_BYTES", shared_bytes(extents)),
    ];
    numbers.into_iter().chain(zeros.iter().map(|name| (*name, 0))).collect()
}

/// Shared memory of the kernel: keys and values; two stages of queries, of output gradients, of
/// score gradients, and of two floats for each query; six pairs of barriers.
fn shared_bytes(extents: &Extents) -> usize {
    let row = extents.d * ELEMENT_BYTES as usize;
    let scores = KEYS_PER_BLOCK * QUERIES_PER_STEP * ELEMENT_BYTES as usize;
    (2 * KEYS_PER_BLOCK + 4 * QUERIES_PER_STEP) * row
        + 2 * (scores + 2 * 4 * QUERIES_PER_STEP)
        + 6 * 16
}

/// Returns the shared memory of a build with two stages of keys and values; otherwise like
/// [`shared_bytes`].
fn shared_bytes_of_two_stages(extents: &Extents) -> usize {
    shared_bytes(extents) + 2 * KEYS_PER_BLOCK * extents.d * ELEMENT_BYTES as usize + 16
}

/// Returns [`shared_bytes`] for a build with wide steps. In a wide step, gradients of the scores
/// have rows for 128 queries.
fn shared_bytes_of_wide_steps(extents: &Extents) -> usize {
    let (row, queries) = (extents.d * ELEMENT_BYTES as usize, QUERIES_OF_WIDE_STEP);
    let scores = KEYS_PER_BLOCK * 128 * ELEMENT_BYTES as usize;
    (2 * KEYS_PER_BLOCK + 4 * queries) * row + 2 * (scores + 2 * 4 * queries) + 6 * 16
}

/// Whether blocks compute whole heads: if sums of dq in L2 cost less than sums in memory, and all
/// multiprocessors have about the same number of heads. The number of steps of a head must be even,
/// so that both warpgroups have as many steps at each key block.
const fn takes_whole_heads(extents: &Extents, multiprocessors: usize) -> bool {
    let Extents { share, s, heads, causal, .. } = *extents;
    let steps_match = s <= KEYS_PER_BLOCK || s.div_ceil(QUERIES_PER_STEP).is_multiple_of(2);
    let few = s <= if causal { 512 } else { 256 };
    let rounds = heads.div_ceil(multiprocessors);
    let busy = heads >= multiprocessors && 10 * heads >= 9 * rounds * multiprocessors;
    share == 1 && few && steps_match && busy
}

/// Division of the backward's work among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardBlockWork {
    /// A block computes one key block, for `heads` of the query heads that read it. The sums of dq
    /// have a fixed order only if one thread block handles all query heads of a key head, also in
    /// the last round.
    OfKeys { heads: usize, order: QueryGradientSumOrder, wide: bool, last: LastRound },
    /// Each of `count` persistent thread blocks computes whole heads, so that dq is summed in a
    /// fixed order.
    OfHeads { count: u32 },
}

impl BackwardBlockWork {
    /// Returns the fastest division of the work on a device.
    pub fn fastest_kernels_of_device(
        device: &Device,
        extents: &Extents,
        order: QueryGradientSumOrder,
    ) -> Self {
        let multiprocessors = device.facts().multiprocessors;
        if takes_whole_heads(extents, multiprocessors as usize) {
            return Self::OfHeads { count: multiprocessors };
        }
        let heads = match order {
            QueryGradientSumOrder::Any => heads_per_block(extents, multiprocessors as usize),
            QueryGradientSumOrder::Fixed => extents.share,
        };
        let ordered = order == QueryGradientSumOrder::Fixed && extents.causal;
        let wide = takes_wide_steps(extents) && !ordered;
        let last = if heads == extents.share && order == QueryGradientSumOrder::Any {
            LastRound::fastest_division(extents, multiprocessors as usize)
        } else {
            LastRound::UNSHARED
        };
        Self::OfKeys { heads, order, wide, last }
    }

    /// Number of key blocks whose gradients several thread blocks sum in memory.
    const fn shared_key_blocks(&self, extents: &Extents) -> usize {
        match self {
            Self::OfKeys { heads, .. } if *heads < extents.share => {
                grid_blocks(extents, extents.share)
            }
            Self::OfKeys { last, .. } => last.shared_blocks(),
            Self::OfHeads { .. } => 0,
        }
    }

    const fn kernel(&self, extents: &Extents) -> &'static KernelSpec<Extents> {
        match self {
            Self::OfHeads { .. } => &WHOLE_HEADS_KERNEL,
            Self::OfKeys { heads, wide: false, .. } if *heads < extents.share => {
                &GROUPED_HEADS_KERNEL
            }
            Self::OfKeys { heads, wide: true, .. } if *heads < extents.share => {
                &WIDE_GROUPED_HEADS_KERNEL
            }
            Self::OfKeys { order, wide, .. } => match (order, wide) {
                (QueryGradientSumOrder::Any, false) => &FLASH_WGMMA,
                (QueryGradientSumOrder::Any, true) => &WIDE_STEPS_KERNEL,
                (QueryGradientSumOrder::Fixed, false) => &FIXED_ORDER_KERNEL,
                (QueryGradientSumOrder::Fixed, true) => &WIDE_FIXED_ORDER_KERNEL,
            },
        }
    }

    /// Number of blocks in the grid, and the numbers that a kernel reads: of query heads for each
    /// block, and the last round as the kernel's struct.
    const fn grid(&self, extents: &Extents) -> (u32, usize, [i32; 3]) {
        match *self {
            Self::OfKeys { heads, last, .. } => {
                let blocks = grid_blocks(extents, heads);
                let first = (blocks - last.shared_blocks()) as i32;
                let of_kernel = [first, last.halved as i32, last.parts as i32];
                ((blocks + last.added_thread_blocks()) as u32, heads, of_kernel)
            }
            Self::OfHeads { count } => (count, 1, [count as i32, 0, 1]),
        }
    }
}

/// Loaded kernels in the order of their launches. The finishing kernel is used only if several
/// blocks add to the same dq.
pub struct LoadedBackwardKernels {
    first: LoadedKernel,
    main: LoadedKernel,
    last: Option<LoadedKernel>,
}

/// Loads the kernels of a division of the work.
pub fn load_backward_kernels(
    device: &Device,
    extents: &Extents,
    blocks: BackwardBlockWork,
) -> Result<LoadedBackwardKernels, BackendError> {
    // The main kernel is loaded first, because the device may decline it.
    let main = blocks.kernel(extents).compile_and_load(device, extents)?;
    let (first, last) = match blocks {
        BackwardBlockWork::OfKeys { wide: false, .. } => {
            (FLASH_MMA_PREPARE, Some(FLASH_MMA_FINISH))
        }
        BackwardBlockWork::OfKeys { wide: true, .. } => {
            (WIDE_PREPARE_KERNEL, Some(TRANSPOSE_KERNEL))
        }
        BackwardBlockWork::OfHeads { .. } => (FLASH_MMA_PREPARE, None),
    };
    Ok(LoadedBackwardKernels {
        main,
        first: first.compile_and_load(device, extents)?,
        last: last.map(|last| last.compile_and_load(device, extents)).transpose()?,
    })
}

/// Bytes that must be zero before a launch, which leaves them zero.
pub fn bytes_to_zero(extents: &Extents, blocks: BackwardBlockWork) -> u64 {
    zeroed_bytes(extents, blocks.shared_key_blocks(extents))
}

/// Prepares the launches: two if blocks compute whole heads, three otherwise.
pub fn prepare_wgmma_backward_launches(
    call: &PendingLaunches<'_>,
    blocks: BackwardBlockWork,
) -> Result<OrderedLaunches, BackendError> {
    let PendingLaunches { device, extents, layout, addresses, scratch } = *call;
    let LoadedBackwardKernels { first, main, last } =
        load_backward_kernels(device, extents, blocks)?;
    let sums = scratch.zeroed;
    let counters = sums + shared_sum_bytes(extents, blocks.shared_key_blocks(extents));
    let BackwardAddresses { q, k, v, grad_out, grad_q, grad_k, grad_v, .. } = *addresses;
    let wide = matches!(blocks, BackwardBlockWork::OfKeys { wide: true, .. });
    let queries = if wide { QUERIES_OF_WIDE_STEP } else { QUERIES_PER_STEP };
    let of_step = |strides| query_boxes(extents, strides, queries);
    let of_keys = |strides, rows| key_boxes(extents, strides, rows);
    let (grid, heads, last_round) = blocks.grid(extents);
    let key_heads = extents.key_heads_a_batch();
    let numbers = [extents.s, key_heads, extents.share, heads, extents.key_heads()];
    let parameters = Arguments::new()
        .bytes(&of_step(&layout.forward.q).encode_map(q)?)
        .bytes(&of_keys(&layout.forward.k, KEYS_PER_BLOCK).encode_map(k)?)
        .bytes(&of_keys(&layout.forward.v, KEYS_PER_BLOCK).encode_map(v)?)
        .bytes(&of_step(&layout.grad_out).encode_map(grad_out)?)
        .bytes(&of_keys(&layout.grad_k, KEYS_PER_WARPGROUP).encode_map(grad_k)?)
        .bytes(&of_keys(&layout.grad_v, KEYS_PER_WARPGROUP).encode_map(grad_v)?)
        .bytes(&of_step(&layout.grad_q).encode_map(grad_q)?)
        .address(call.row_statistics_address())
        .address(call.dq_accumulator_address())
        .address(counters)
        .address(sums);
    let parameters = numbers.into_iter().fold(parameters, |all, number| all.value(number as i32));
    let parameters = parameters.value(last_round);
    let zeroed = last.as_ref().map(|_| call.dq_accumulator_address());
    let mut steps = vec![
        ("prepare", first.prepare_launch(device, None, call.arguments_of_prepare_kernel(zeroed))?),
        ("scores_dkv_dq", main.prepare_launch(device, Some(grid), parameters)?),
    ];
    if let Some(last) = last {
        let parameters = if wide {
            let heads = extents.query_heads_per_sequence();
            let sums = Arguments::new().address(call.dq_accumulator_address()).address(grad_q);
            sums.value(extents.s as i32).value(heads as i32).value(layout.grad_q.stride_words())
        } else {
            call.arguments_of_finish_kernel()
        };
        steps.push(("finish", last.prepare_launch(device, None, parameters)?));
    }
    Ok(OrderedLaunches::new(steps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::backward::dense_backward_task;
    use crate::attention::cuda::launches::BackwardCall;
    use crate::attention::cuda::layout::{AttentionShape, BackwardLayout, ForwardLayout};
    use crate::attention::cuda::tests::bf16_attention;
    use crate::attention::definition::Attention;
    use crate::attention::gradients::AttentionBackward;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::backend::Executable;
    use kernelgate::verify::launch_and_verify;
    use kernelgate::workload::{Dtype, Expected, Problem, Tensors};
    use std::sync::Arc;

    #[test]
    fn the_declared_shared_memory_equals_the_kernels_layout_and_fits_a_block() {
        let narrow = Extents::self_attention_extents(6, 200, Dtype::Bf16);
        let wide = Extents { d: 128, ..narrow };
        assert_eq!(shared_bytes(&narrow), (64 + 32 + 1) * 1024 + 96);
        assert_eq!(shared_bytes(&wide), (128 + 32 + 1) * 1024 + 96);
        assert_eq!(shared_bytes_of_two_stages(&wide), (192 + 32 + 1) * 1024 + 112);
        assert_eq!(shared_bytes_of_wide_steps(&wide), (144 + 64) * 1024 + 1280 + 96);
    }

    #[test]
    fn the_number_of_heads_a_block_is_the_one_measured_as_fastest() {
        // Measured choices: batch, query heads, sequence length, mask; then the fastest number of
        // heads for a block, and all within 4 % of it.
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
            let heads = Extents::self_attention_extents(b * h, s, Dtype::Bf16);
            let chosen = heads_per_block(&Extents { share, causal, d: 128, ..heads }, 132);
            assert!(good.contains(&chosen), "{b}, {h}, {s}, causal {causal}: {chosen}");
        }
        assert_eq!(heads_per_block(&Extents::self_attention_extents(3, 65, Dtype::Bf16), 132), 1);
    }

    #[test]
    fn last_rounds_with_few_blocks_are_divided_among_more() {
        let division = |heads, s, causal| {
            let extents = Extents::self_attention_extents(heads, s, Dtype::Bf16);
            let LastRound { halved, others, parts } =
                LastRound::fastest_division(&Extents { causal, d: 128, ..extents }, 132);
            (halved, others, parts)
        };
        // These shapes give 15 rounds and 68 blocks, and 31 rounds and four blocks.
        assert_eq!(division(16, 16_384, false), (66, 2, 16));
        assert_eq!(division(32, 16_384, false), (0, 4, 16));
        assert_eq!(division(64, 4096, false), (66, 2, 4));
        // These shapes give one round that is half full, and full rounds only.
        assert_eq!(division(4, 2048, false), (0, 64, 2));
        assert_eq!(division(33, 16_384, false), (0, 0, 1));
        for unshared in
            [division(16, 16_384, true), division(256, 512, false), division(1, 1, false)]
        {
            assert_eq!(unshared, (0, 0, 1));
        }
    }

    #[test]
    fn each_of_many_short_heads_is_computed_by_one_block() {
        let many = Extents::self_attention_extents(512, 128, Dtype::Bf16);
        for (causal, longest) in [(false, 256), (true, 512)] {
            let takes = |s| takes_whole_heads(&Extents { s, keys: s, causal, ..many }, 132);
            assert!([1, 64, 128, 193, 256, longest].into_iter().all(takes));
            assert!(![129, 192, longest + 1, longest + 128].into_iter().any(takes));
        }
        for (heads, takes) in [(131, false), (132, true), (133, false), (238, true)] {
            assert_eq!(takes_whole_heads(&Extents { heads, ..many }, 132), takes, "{heads}");
        }
        assert!(!takes_whole_heads(&Extents { share: 2, ..many }, 132));
    }

    /// A problem with its inputs and reference, for launches with any division of the work.
    struct BackwardCase<'a> {
        device: &'a Arc<Device>,
        problem: AttentionBackward,
        inputs: Tensors,
        expected: Vec<Expected>,
    }

    impl<'a> BackwardCase<'a> {
        fn with_seed(device: &'a Arc<Device>, attention: Attention, seed: u64) -> Self {
            let problem = AttentionBackward { attention };
            let inputs = problem.inputs(seed);
            let expected = problem.reference(&inputs);
            Self { device, problem, inputs, expected }
        }

        /// Returns the outputs of two launches, after checking that both agree with the reference.
        fn launch_twice(&self, blocks: BackwardBlockWork) -> [Tensors; 2] {
            let Self { device, problem, inputs, expected } = self;
            let shape = AttentionShape::from(&problem.attention);
            let layout =
                BackwardLayout::gradients_like_tensors(ForwardLayout::strides_of_bhsd(&shape));
            let backward =
                BackwardCall::flash_wgmma_with_blocks(device, &shape, &layout, blocks).unwrap();
            let mut task = dense_backward_task(&backward, problem, inputs, device).unwrap();
            [1, 2].map(|launch| {
                launch_and_verify(&mut task, expected, problem.tolerance()).unwrap_or_else(
                    |error| panic!("{:?}, {blocks:?}, launch {launch}: {error}", problem.attention),
                );
                task.outputs().unwrap().clone()
            })
        }
    }

    fn assert_same_bits([first, second]: &[Tensors; 2]) {
        for (name, tensor) in first.iter() {
            assert!(tensor.as_bytes() == second.tensor(name).as_bytes(), "{name}");
        }
    }

    #[test]
    fn whole_heads_a_block_agree_with_the_reference_and_repeat_their_bits() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.facts().arch != "sm_90a" {
            return;
        }
        for s in [1, 65, 128, 200, 256] {
            for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
                let case = BackwardCase::with_seed(&device, bf16_attention(2, 5, s, d, causal), 26);
                assert_same_bits(&case.launch_twice(BackwardBlockWork::OfHeads { count: 3 }));
            }
        }
    }

    #[test]
    fn wide_steps_agree_with_the_reference_at_odd_shapes() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.facts().arch != "sm_90a" {
            return;
        }
        // In this test, blocks of the long heads proceed in step.
        let short = [1, 79, 80, 81, 200, 333].map(|s| [(2, s, 4), (2, s, 2)]);
        let all = short.into_iter().flatten().chain([(1, 4097, 4), (1, 4100, 2)]);
        for (b, s, h_kv) in all {
            for (causal, outliers) in [(false, false), (true, false), (false, true), (true, true)] {
                let attention =
                    Attention { h_kv, outliers, ..bf16_attention(b, 4, s, 128, causal) };
                let case = BackwardCase::with_seed(&device, attention, 27);
                let share = 4 / h_kv;
                let wide = |heads, order| BackwardBlockWork::OfKeys {
                    heads,
                    order,
                    wide: true,
                    last: LastRound::UNSHARED,
                };
                case.launch_twice(wide(1, QueryGradientSumOrder::Any));
                if !causal {
                    let blocks = wide(share, QueryGradientSumOrder::Fixed);
                    assert_same_bits(&case.launch_twice(blocks));
                }
            }
        }
    }

    #[test]
    fn the_gradients_agree_with_the_reference_for_any_number_of_heads_a_block() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.facts().arch != "sm_90a" {
            return;
        }
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let attention = Attention { h_kv: 2, ..bf16_attention(2, 8, 333, d, causal) };
            let case = BackwardCase::with_seed(&device, attention, 25);
            for heads in [1, 2, 4] {
                case.launch_twice(BackwardBlockWork::OfKeys {
                    heads,
                    order: QueryGradientSumOrder::Any,
                    wide: false,
                    last: LastRound::UNSHARED,
                });
            }
        }
    }

    #[test]
    fn shared_key_blocks_of_the_last_round_agree_with_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if device.facts().arch != "sm_90a" {
            return;
        }
        // Four to twelve key blocks; parts of one step, of no step and of many.
        for (s, h_kv) in [(1, 4), (129, 4), (333, 4), (333, 2), (4100, 1)] {
            // Blocks of wide steps have one head.
            for (d, wide) in [(64, false), (128, false), (128, h_kv == 4)] {
                let attention = Attention { h_kv, ..bf16_attention(1, 4, s, d, false) };
                let case = BackwardCase::with_seed(&device, attention, 28);
                for (halved, others, parts) in [(4, 0, 1), (0, 3, 5), (2, 2, 3), (1, 1, 16)] {
                    case.launch_twice(BackwardBlockWork::OfKeys {
                        heads: 4 / h_kv,
                        order: QueryGradientSumOrder::Any,
                        wide,
                        last: LastRound { halved, others, parts },
                    });
                }
            }
        }
    }
}
