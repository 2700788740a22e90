//! Attention backward on sm_90a: row and launcher of `kernels/attention/backward_flash_wgmma`.

use std::sync::Arc;

use super::backward::{
    FLASH_MMA_FINISH, FLASH_MMA_PREPARE, KEYS, dq_sum_bytes, flash_mma_bytes, gradients,
    stats_bytes, step,
};
use super::launch::{ELEMENT_BYTES, Extents, boxes, kernel, key_boxes, scratch};
use super::saved::save;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Argument, Buffer, Device, KernelSpec, Parameters, Requires};

/// The kernels; those before and after it are `backward_flash_mma`'s.
pub const KERNELS: &[KernelSpec<Extents>] = &[FLASH_WGMMA, GROUPED, ROUND, FIXED_ORDER];

/// Two warpgroups that compute, one that copies.
const THREADS: usize = 384;

/// Queries of a step.
const QUERIES: usize = 64;

/// Keys of a warpgroup, and of a box of its gradients.
const GROUP_KEYS: usize = KEYS / 2;

const FLASH_WGMMA: KernelSpec<Extents> = KernelSpec {
    constants: |extents| constants(extents, &["DETERMINISTIC", "GROUPED"]),
    shared_bytes,
    requires: Requires::Exactly("sm_90a"),
    ..kernel(
        "attention/backward_flash_wgmma",
        include_str!("../../../kernels/attention/backward_flash_wgmma.cu"),
        "attention_backward_flash_wgmma",
        THREADS,
        |extents| [blocks(extents, extents.share), 1, 1],
    )
};

/// The same where a block has some of the heads that share keys.
const GROUPED: KernelSpec<Extents> = KernelSpec {
    defines: |extents| with(extents, "GROUPED=1"),
    constants: |extents| constants(extents, &["DETERMINISTIC"]),
    // At most: where each head of queries has blocks of its own.
    blocks: |extents| [blocks(extents, 1), 1, 1],
    ..FLASH_WGMMA
};

/// Rounds the gradients of keys and values where heads of queries add to sums of them.
const ROUND: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_flash_wgmma_round",
    blocks: |extents| [(2 * eights(extents)).div_ceil(THREADS), 1, 1],
    shared_bytes: |_| 0,
    ..GROUPED
};

/// The same where the sums of dq have an order.
const FIXED_ORDER: KernelSpec<Extents> = KernelSpec {
    defines: |extents| with(extents, "DETERMINISTIC=1"),
    constants: |extents| constants(extents, &["GROUPED"]),
    ..FLASH_WGMMA
};

fn with(extents: &Extents, define: &str) -> Vec<String> {
    (FLASH_WGMMA.defines)(extents).into_iter().chain([define.to_owned()]).collect()
}

const fn blocks(extents: &Extents, heads_a_block: usize) -> usize {
    extents.s.div_ceil(KEYS) * (extents.heads / heads_a_block)
}

/// Eight elements each of the keys.
const fn eights(extents: &Extents) -> usize {
    extents.key_heads() * extents.keys * extents.d / 8
}

/// fp32 sums of the gradients of keys, or of values.
const fn key_sum_bytes(extents: &Extents) -> u64 {
    4 * 8 * eights(extents) as u64
}

/// Of the heads of queries that read the same keys, those of one block: a divisor, with which the
/// steps take the least time by a model of what was measured (RESULTS.md, "Grouped heads").
///
/// A block pays for its keys and its gradients what some steps take, more of them where the
/// gradients are added to sums. Of more heads, blocks that run at the same time are at different
/// ones, and find less of them in L2; where causal they drift apart further.
fn heads_a_block(extents: &Extents, multiprocessors: usize) -> usize {
    let Extents { s, share, causal, .. } = *extents;
    let steps = s.div_ceil(QUERIES);
    let cost = |heads: usize| {
        let (blocks, rows) = (blocks(extents, heads), s.div_ceil(KEYS));
        let of_block = if heads == share { 2 } else { 4 };
        let longest = (heads * steps + of_block) as f64;
        if causal {
            // Every block of keys begins at its own diagonal.
            let of_head: usize = (0..rows).map(|row| steps - row * KEYS / QUERIES).sum();
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

/// Numbers of a build, and what it is not.
fn constants(extents: &Extents, zeros: &[&'static str]) -> Vec<(&'static str, usize)> {
    let numbers = [
        ("THREADS", THREADS),
        ("TILE_QUERIES", step(extents)),
        ("TILE_KEYS", KEYS),
        ("SHARED_BYTES", shared_bytes(extents)),
    ];
    numbers.into_iter().chain(zeros.iter().map(|name| (*name, 0))).collect()
}

/// Keys and values; two stages of queries and of gradients of the output, of gradients of the
/// scores, and of two floats a query; six pairs of barriers.
fn shared_bytes(extents: &Extents) -> usize {
    let row = extents.d * ELEMENT_BYTES as usize;
    let scores = KEYS * QUERIES * ELEMENT_BYTES as usize;
    (2 * KEYS + 4 * QUERIES) * row + 2 * (scores + 2 * 4 * QUERIES) + 6 * 16
}

/// Row of the backward ladder.
pub const ROW: Implementation<AttentionBackward> = Implementation {
    name: "cuda/flash_wgmma",
    about: "as flash_mma, GEMMs through wgmma, tiles by tensor copies of a warp of their own; \
            sm_90a only; the order of dq's sums is not fixed, nor of dk's and dv's over heads that \
            share keys",
    supports: |problem| {
        Extents::from(&problem.attention).supported(&[
            FLASH_MMA_PREPARE,
            FLASH_WGMMA,
            GROUPED,
            ROUND,
            FLASH_MMA_FINISH,
        ])
    },
    prepare: Prepare::CudaWithin {
        device_bytes: |problem| {
            let extents = Extents::from(&problem.attention);
            // Where not all heads of the same keys are a block's.
            let sums = if extents.share > 1 { 2 * key_sum_bytes(&extents) } else { 0 };
            flash_mma_bytes(problem) + sums
        },
        prepare: |problem, inputs, device| {
            let multiprocessors = device.facts().multiprocessors as usize;
            let extents = Extents::from(&problem.attention);
            let heads = heads_a_block(&extents, multiprocessors);
            launched(&FLASH_WGMMA, heads, problem, inputs, device)
        },
    },
};

/// The same with the same bits in every launch.
pub const FIXED_ORDER_ROW: Implementation<AttentionBackward> = Implementation {
    name: "cuda/flash_wgmma_deterministic",
    about: "as flash_wgmma, the sums of dq in a fixed order: a block of keys waits for its turn",
    // The turns are a hundredth.
    prepare: Prepare::CudaWithin {
        device_bytes: flash_mma_bytes,
        prepare: |problem, inputs, device| {
            launched(&FIXED_ORDER, problem.attention.share(), problem, inputs, device)
        },
    },
    ..ROW
};

/// `whole` where a block has all heads of queries that read the same keys, else [`GROUPED`], whose
/// blocks add to sums of them.
fn launched(
    whole: &KernelSpec<Extents>,
    heads_a_block: usize,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let grouped = heads_a_block < extents.share;
    let kernel = if grouped { &GROUPED } else { whole };
    // The one that may be declined first.
    let [main, first, last] =
        [kernel, &FLASH_MMA_PREPARE, &FLASH_MMA_FINISH].map(|row| row.load(device, &extents));
    let (main, first, last) = (main?, first?, last?);
    // Every launch leaves zeros.
    let sums = if grouped {
        let sum = || zeros(device, key_sum_bytes(&extents));
        Some((ROUND.load(device, &extents)?, sum()?, sum()?))
    } else {
        None
    };
    let [dk_sum, dv_sum] = sums.as_ref().map_or([0; 2], |(_, dk, dv)| [dk.address(), dv.address()]);
    let saved = save(&extents, inputs, device)?;
    let (stats, dq_sum) =
        (scratch(device, stats_bytes(&extents))?, scratch(device, dq_sum_bytes(&extents))?);
    // A turn a step of queries; every launch leaves zeros.
    let turns = zeros(device, 4 * (extents.heads * extents.s.div_ceil(QUERIES)) as u64)?;
    let outputs = gradients(device, &problem.attention)?;
    let [grad_k, grad_v] = [outputs[1].address(), outputs[2].address()];
    let of_step = boxes(&extents, QUERIES);
    let [of_keys, of_group] = [KEYS, GROUP_KEYS].map(|rows| key_boxes(&extents, rows));
    let parameters = Parameters::new()
        .bytes(&of_step.map(saved.q.address())?)
        .bytes(&of_keys.map(saved.k.address())?)
        .bytes(&of_keys.map(saved.v.address())?)
        .bytes(&of_step.map(saved.grad_out.address())?)
        .bytes(&of_group.map(grad_k)?)
        .bytes(&of_group.map(grad_v)?)
        .address(stats.address())
        .address(dq_sum.address())
        .address(turns.address())
        .address(dk_sum)
        .address(dv_sum)
        .value(extents.s as i32)
        .value(extents.share as i32)
        .value(heads_a_block as i32);
    let blocks = blocks(&extents, heads_a_block) as u32;
    let main = main.settled(device, Some(blocks), parameters)?;
    Ok(CudaTask::new(device, saved.launch_inputs(), outputs, move |outputs| {
        // All of it: the launch has addresses only.
        let (saved, _turns) = (&saved, &turns);
        let [out, grad_out, lse] = [&saved.out, &saved.grad_out, &saved.lse].map(Argument::from);
        let [stats, dq_sum] = [&stats, &dq_sum].map(Argument::from);
        let (s, heads) = (extents.seqlen(), extents.batch_heads());
        first.launch(&[out, grad_out, lse, stats, dq_sum, s, heads])?;
        main.launch()?;
        if let Some((round, dk, dv)) = &sums {
            let [grad_k, grad_v] = [1, 2].map(|index: usize| outputs[index].argument());
            let eights = Argument::I64(eights(&extents) as i64);
            round.launch(&[Argument::from(dk), Argument::from(dv), grad_k, grad_v, eights])?;
        }
        last.launch(&[dq_sum, outputs[0].argument(), s, heads])
    }))
}

fn zeros(device: &Arc<Device>, bytes: u64) -> Result<Buffer, BackendError> {
    let buffer = scratch(device, bytes)?;
    buffer.fill(0)?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::tests::bf16;
    use crate::attention::definition::Attention;
    use crate::gpu_tests::gpu;
    use kernelgate::verify::verify;
    use kernelgate::workload::{Dtype, Problem};

    #[test]
    fn shared_memory_is_what_the_kernel_lays_out_and_fits_a_block() {
        let narrow = Extents::of_heads(6, 200, Dtype::Bf16);
        let wide = Extents { d: 128, ..narrow };
        assert_eq!(shared_bytes(&narrow), (64 + 32 + 1) * 1024 + 96);
        assert_eq!(shared_bytes(&wide), (128 + 32 + 1) * 1024 + 96);
    }

    #[test]
    fn blocks_have_as_many_heads_as_were_fastest() {
        // What was measured: batch, heads of queries, sequence, mask; the fastest, and those within
        // 4 % of it.
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
            let heads = Extents::of_heads(b * h, s, Dtype::Bf16);
            let chosen = heads_a_block(&Extents { share, causal, d: 128, ..heads }, 132);
            assert!(good.contains(&chosen), "{b}, {h}, {s}, causal {causal}: {chosen}");
        }
        assert_eq!(heads_a_block(&Extents::of_heads(3, 65, Dtype::Bf16), 132), 1);
    }

    #[test]
    fn any_number_of_heads_a_block_agrees_with_the_reference() {
        let Some((device, _alone)) = gpu() else { return };
        if device.facts().arch != "sm_90a" {
            return;
        }
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let attention = Attention { h_kv: 2, ..bf16(2, 8, 333, d, causal) };
            let problem = AttentionBackward { attention };
            let inputs = problem.inputs(25);
            let expected = problem.reference(&inputs);
            for heads in [1, 2, 4] {
                let mut task = launched(&FLASH_WGMMA, heads, &problem, &inputs, &device).unwrap();
                for launch in 1..=2 {
                    let result = verify(&mut task, &expected, problem.tolerance());
                    let of = format!("{attention:?}, {heads} heads, launch {launch}");
                    assert!(result.is_ok(), "{of}: {}", result.unwrap_err());
                }
            }
        }
    }
}
