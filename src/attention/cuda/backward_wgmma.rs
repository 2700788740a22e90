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
use kernelgate_cuda::{Argument, Device, KernelSpec, Parameters, Requires};

/// The kernels; those before and after it are `backward_flash_mma`'s.
pub const KERNELS: &[KernelSpec<Extents>] = &[FLASH_WGMMA, FIXED_ORDER];

/// Two warpgroups that compute, one that copies.
const THREADS: usize = 384;

/// Queries of a step.
const QUERIES: usize = 64;

/// Keys of a warpgroup, and of a box of its gradients.
const GROUP_KEYS: usize = KEYS / 2;

const FLASH_WGMMA: KernelSpec<Extents> = KernelSpec {
    constants: |extents| constants(extents).into_iter().chain([("DETERMINISTIC", 0)]).collect(),
    shared_bytes,
    requires: Requires::Exactly("sm_90a"),
    ..kernel(
        "attention/backward_flash_wgmma",
        include_str!("../../../kernels/attention/backward_flash_wgmma.cu"),
        "attention_backward_flash_wgmma",
        THREADS,
        |extents| [extents.s.div_ceil(KEYS) * extents.key_heads(), 1, 1],
    )
};

/// The same where the sums of dq have an order.
const FIXED_ORDER: KernelSpec<Extents> = KernelSpec {
    defines: |extents| {
        let fixed = "DETERMINISTIC=1".to_owned();
        (FLASH_WGMMA.defines)(extents).into_iter().chain([fixed]).collect()
    },
    constants,
    ..FLASH_WGMMA
};

fn constants(extents: &Extents) -> Vec<(&'static str, usize)> {
    vec![
        ("THREADS", THREADS),
        ("TILE_QUERIES", step(extents)),
        ("TILE_KEYS", KEYS),
        ("SHARED_BYTES", shared_bytes(extents)),
    ]
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
            sm_90a only; the order of dq's sums is not fixed",
    supports: |problem| {
        Extents::from(&problem.attention).supported(&[
            FLASH_MMA_PREPARE,
            FLASH_WGMMA,
            FLASH_MMA_FINISH,
        ])
    },
    prepare: Prepare::CudaWithin {
        device_bytes: flash_mma_bytes,
        prepare: |problem, inputs, device| launched(&FLASH_WGMMA, problem, inputs, device),
    },
};

/// The same with the same bits in every launch.
pub const FIXED_ORDER_ROW: Implementation<AttentionBackward> = Implementation {
    name: "cuda/flash_wgmma_deterministic",
    about: "as flash_wgmma, the sums of dq in a fixed order: a block of keys waits for its turn",
    // The turns are a hundredth.
    prepare: Prepare::CudaWithin {
        device_bytes: flash_mma_bytes,
        prepare: |problem, inputs, device| launched(&FIXED_ORDER, problem, inputs, device),
    },
    ..ROW
};

fn launched(
    kernel: &KernelSpec<Extents>,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    // The one that may be declined first.
    let [main, first, last] =
        [kernel, &FLASH_MMA_PREPARE, &FLASH_MMA_FINISH].map(|row| row.load(device, &extents));
    let (main, first, last) = (main?, first?, last?);
    let saved = save(&extents, inputs, device)?;
    let (stats, dq_sum) =
        (scratch(device, stats_bytes(&extents))?, scratch(device, dq_sum_bytes(&extents))?);
    // A turn a step of queries; every launch leaves zeros.
    let turns = scratch(device, 4 * (extents.heads * extents.s.div_ceil(QUERIES)) as u64)?;
    turns.fill(0)?;
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
        .value(extents.s as i32)
        .value(extents.share as i32);
    let main = main.settled(device, None, parameters)?;
    Ok(CudaTask::new(device, saved.launch_inputs(), outputs, move |outputs| {
        // All of it: the launch has addresses only.
        let (saved, _turns) = (&saved, &turns);
        let [out, grad_out, lse] = [&saved.out, &saved.grad_out, &saved.lse].map(Argument::from);
        let [stats, dq_sum] = [&stats, &dq_sum].map(Argument::from);
        let (s, heads) = (extents.seqlen(), extents.batch_heads());
        first.launch(&[out, grad_out, lse, stats, dq_sum, s, heads])?;
        main.launch()?;
        last.launch(&[dq_sum, outputs[0].argument(), s, heads])
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
        assert_eq!(shared_bytes(&narrow), (64 + 32 + 1) * 1024 + 96);
        assert_eq!(shared_bytes(&wide), (128 + 32 + 1) * 1024 + 96);
    }
}
