//! Attention forward on the GPU: rows, and kernels that only they launch.

pub mod decode;
pub mod mma;
mod tile_lists;
pub mod wgmma;

use std::sync::Arc;

use super::call::{AttentionTechnique, ForwardAddresses};
use super::components::{NAIVE_SCORES, NAIVE_SOFTMAX, NAIVE_VALUES};
use super::launch::{
    Extents, allocate_output, allocate_scratch, attention_kernel, qkv, upload_inputs,
};
use super::launches::ForwardCall;
use super::layout::{AttentionShape, ForwardLayout};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};
use mma::FLASH_MMA_KERNEL;
use wgmma::FLASH_WGMMA_KERNEL;

/// Kernels that are launched by the rows of this file only.
pub const KERNELS: &[KernelSpec<Extents>] =
    &[TILED_SCORES, TILED_SOFTMAX, TILED_VALUES, FLASH_KERNEL];

const THREADS: usize = 256;

/// Side of a square tile of `forward_tiled` and `forward_flash`.
const TILE_SIDE: usize = 64;

const TILED_SCORES: KernelSpec<Extents> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS), ("TILE", TILE_SIDE)],
    ..attention_kernel(
        "attention/forward_tiled",
        "attention_forward_tiled_scores",
        THREADS,
        |extents| [extents.s.div_ceil(TILE_SIDE), extents.s.div_ceil(TILE_SIDE), extents.heads],
    )
};
const TILED_SOFTMAX: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_forward_tiled_softmax",
    blocks: |extents| [extents.heads * extents.s, 1, 1],
    ..TILED_SCORES
};
const TILED_VALUES: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_forward_tiled_values",
    blocks: |extents| [extents.s.div_ceil(TILE_SIDE), extents.d / TILE_SIDE, extents.heads],
    ..TILED_SCORES
};

const FLASH_KERNEL: KernelSpec<Extents> = KernelSpec {
    constants: |extents| {
        vec![
            ("THREADS", THREADS),
            ("TILE", TILE_SIDE),
            ("SHARED_BYTES", flash_shared_bytes(extents)),
        ]
    },
    shared_bytes: flash_shared_bytes,
    ..attention_kernel("attention/forward_flash", "attention_forward_flash", THREADS, |extents| {
        [extents.s.div_ceil(TILE_SIDE) * extents.heads, 1, 1]
    })
};

/// Shared memory of `forward_flash`: tiles of q, of k or v, and of p, in fp32, with four padding
/// columns in each row.
fn flash_shared_bytes(extents: &Extents) -> usize {
    (2 * extents.d + TILE_SIDE) * (TILE_SIDE + 4) * 4
}

/// Forward ladder of our own kernels.
pub const FORWARD_LADDER: &[Implementation<AttentionForward>] = &[
    Implementation {
        name: "cuda/naive",
        about: "three launches, scores and probabilities in device memory, one thread an element: \
                the starting point",
        supports: |problem| {
            Extents::from(&problem.attention).supported_with_scores(&[
                NAIVE_SCORES,
                NAIVE_SOFTMAX,
                NAIVE_VALUES,
            ])
        },
        prepare: Prepare::CudaWithin {
            // Scores in fp32 and probabilities of 16 bits.
            device_bytes: |problem| {
                fused_device_bytes(problem)
                    + (4 + 2) * Extents::from(&problem.attention).query_key_pairs()
            },
            prepare: prepare_naive_forward,
        },
    },
    Implementation {
        name: "cuda/tiled",
        about: "the same three launches with tiles in shared memory and 4x4 results a thread",
        supports: |problem| {
            Extents::from(&problem.attention).supported_with_scores(&[
                TILED_SCORES,
                TILED_SOFTMAX,
                TILED_VALUES,
            ])
        },
        prepare: Prepare::CudaWithin {
            // Scores in fp32, which the probabilities overwrite.
            device_bytes: |problem| {
                fused_device_bytes(problem)
                    + 4 * Extents::from(&problem.attention).query_key_pairs()
            },
            prepare: prepare_tiled_forward,
        },
    },
    Implementation {
        name: "cuda/flash",
        about: "one launch, online softmax: scores never leave the chip; CUDA cores",
        supports: |problem| {
            Extents::from(&problem.attention).check_ungrouped_support(&[FLASH_KERNEL])
        },
        prepare: Prepare::CudaWithin {
            device_bytes: fused_device_bytes,
            prepare: prepare_flash_forward,
        },
    },
    Implementation {
        name: "cuda/flash_mma",
        about: "as flash, GEMMs on the tensor cores through mma.sync, asynchronous copies",
        supports: |problem| Extents::from(&problem.attention).check_support(&[FLASH_MMA_KERNEL]),
        prepare: Prepare::CudaWithin {
            device_bytes: fused_device_bytes,
            prepare: |problem, inputs, device| {
                dense_forward_task(AttentionTechnique::FlashMma, problem, inputs, device)
            },
        },
    },
];

/// Row of the ladder's last rung, for sm_90a.
pub const FLASH_WGMMA_ROW: Implementation<AttentionForward> = Implementation {
    name: "cuda/flash_wgmma",
    about: "as flash, GEMMs through wgmma, tiles by tensor copies of a warp of their own, blocks \
            that stay; sm_90a only",
    supports: |problem| Extents::from(&problem.attention).check_support(&[FLASH_WGMMA_KERNEL]),
    // The lists of tiles take a thousandth of the memory and are not counted.
    prepare: Prepare::CudaWithin {
        device_bytes: fused_device_bytes,
        prepare: |problem, inputs, device| {
            dense_forward_task(AttentionTechnique::FlashWgmma, problem, inputs, device)
        },
    },
};

const NULL_ADDRESS: KernelArgument = KernelArgument::Address(0);

/// Device memory of the fused kernels: inputs and output.
pub fn fused_device_bytes(problem: &AttentionForward) -> u64 {
    let extents = Extents::from(&problem.attention);
    2 * extents.vector_bytes() + 2 * extents.key_bytes()
}

fn prepare_naive_forward(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let [score, normalize, weigh] = [NAIVE_SCORES, NAIVE_SOFTMAX, NAIVE_VALUES]
        .map(|kernel| kernel.compile_and_load(device, &extents));
    let (score, normalize, weigh) = (score?, normalize?, weigh?);
    let [q, k, v] = upload_inputs(device, inputs, ["q", "k", "v"])?;
    let (scores, probabilities) = (
        allocate_scratch(device, 4 * extents.query_key_pairs())?,
        allocate_scratch(device, 2 * extents.query_key_pairs())?,
    );
    Ok(CudaTask::new(
        device,
        qkv([&q, &k, &v]),
        vec![allocate_output(device, "out", &problem.attention)?],
        move |outputs| {
            let (at, s) =
                (|buffer| KernelArgument::from(buffer), || extents.sequence_length_argument());
            within_range("scores", || score.launch_with(&[at(&q), at(&k), at(&scores), s()]))?;
            let rows = [at(&scores), at(&probabilities), NULL_ADDRESS, s()];
            within_range("softmax", || normalize.launch_with(&rows))?;
            let out = outputs[0].argument();
            within_range("values", || weigh.launch_with(&[at(&probabilities), at(&v), out, s()]))
        },
    ))
}

fn prepare_tiled_forward(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let [score, normalize, weigh] = [TILED_SCORES, TILED_SOFTMAX, TILED_VALUES]
        .map(|kernel| kernel.compile_and_load(device, &extents));
    let (score, normalize, weigh) = (score?, normalize?, weigh?);
    let [q, k, v] = upload_inputs(device, inputs, ["q", "k", "v"])?;
    let scores = allocate_scratch(device, 4 * extents.query_key_pairs())?;
    Ok(CudaTask::new(
        device,
        qkv([&q, &k, &v]),
        vec![allocate_output(device, "out", &problem.attention)?],
        move |outputs| {
            let (at, s) =
                (|buffer| KernelArgument::from(buffer), || extents.sequence_length_argument());
            within_range("scores", || score.launch_with(&[at(&q), at(&k), at(&scores), s()]))?;
            within_range("softmax", || normalize.launch_with(&[at(&scores), NULL_ADDRESS, s()]))?;
            let out = outputs[0].argument();
            within_range("values", || weigh.launch_with(&[at(&scores), at(&v), out, s()]))
        },
    ))
}

fn prepare_flash_forward(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let step = FLASH_KERNEL.compile_and_load(device, &extents)?;
    let [q, k, v] = upload_inputs(device, inputs, ["q", "k", "v"])?;
    Ok(CudaTask::new(
        device,
        qkv([&q, &k, &v]),
        vec![allocate_output(device, "out", &problem.attention)?],
        move |outputs| {
            let [q, k, v] = [&q, &k, &v].map(KernelArgument::from);
            let arguments =
                [q, k, v, outputs[0].argument(), NULL_ADDRESS, extents.sequence_length_argument()];
            within_range("forward", || step.launch_with(&arguments))
        },
    ))
}

/// Task that times one forward row over dense tensors, computed by `technique`.
pub fn dense_forward_task(
    technique: AttentionTechnique,
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let shape = AttentionShape::from(&problem.attention);
    let forward =
        ForwardCall::new(device, &shape, &ForwardLayout::strides_of_bhsd(&shape), technique)?;
    let [q, k, v] = upload_inputs(device, inputs, ["q", "k", "v"])?;
    let out = allocate_output(device, "out", &problem.attention)?;
    let launches = forward.prepare_launches(&ForwardAddresses {
        q: q.address(),
        k: k.address(),
        v: v.address(),
        out: out.address(),
        lse: None,
    })?;
    let inputs = qkv([&q, &k, &v]);
    let alive = [q, k, v];
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = &alive;
        launches.launch()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::Dtype;

    const SMALL: Extents =
        Extents { causal: true, ..Extents::self_attention_extents(6, 200, Dtype::Bf16) };

    #[test]
    fn the_grids_of_forward_kernels_cover_all_rows_and_tiles() {
        let wide = Extents { d: 128, ..SMALL };
        assert_eq!((NAIVE_SCORES.blocks)(&SMALL), [13, 13, 6]);
        assert_eq!((NAIVE_SOFTMAX.blocks)(&SMALL), [1200, 1, 1]);
        assert_eq!((NAIVE_VALUES.blocks)(&SMALL), [50, 6, 1]);
        assert_eq!((NAIVE_VALUES.blocks)(&wide), [100, 6, 1]);
        assert_eq!((TILED_VALUES.blocks)(&wide), [4, 2, 6]);
        assert_eq!((FLASH_KERNEL.blocks)(&SMALL), [24, 1, 1]);
        assert_eq!((FLASH_MMA_KERNEL.blocks)(&SMALL), [12, 1, 1]);
    }

    #[test]
    fn kernels_report_unsupported_shapes_with_a_reason() {
        assert_eq!(SMALL.check_support(&[FLASH_MMA_KERNEL]), Ok(()));
        let f32 = Extents { dtype: Dtype::F32, ..SMALL };
        assert_eq!(
            f32.check_support(&[FLASH_MMA_KERNEL]),
            Err("computes bf16 and f16 only".to_owned())
        );
        let many = Extents { heads: 70_000, ..SMALL };
        assert_eq!(many.check_support(&[FLASH_MMA_KERNEL]), Ok(()));
        assert_eq!(
            many.check_support(&[NAIVE_VALUES]),
            Err("needs more blocks than a grid holds".to_owned())
        );
        let long = Extents { d: 128, ..Extents::self_attention_extents(16, 16_384, Dtype::Bf16) };
        let reason = long.supported_with_scores(&[NAIVE_VALUES]).unwrap_err();
        assert_eq!(reason, "keeps 17.2 GB of scores in memory, 2.1 GB at most");
        assert_eq!(
            Extents::self_attention_extents(512, 1024, Dtype::Bf16)
                .supported_with_scores(&[FLASH_MMA_KERNEL]),
            Ok(())
        );
        let alike = Err("takes as many keys as queries, and as many heads of them".to_owned());
        for unlike in [Extents { share: 2, ..SMALL }, Extents { keys: 201, ..SMALL }] {
            assert_eq!(unlike.check_support(&[FLASH_MMA_KERNEL]), Ok(()));
            assert_eq!(unlike.check_ungrouped_support(&[FLASH_KERNEL]), alike);
        }
    }
}
