//! The three steps of attention on the GPU, each as a row with inputs of its own, and the launchers
//! of their kernels.

use std::sync::Arc;

use super::cublaslt;
use super::launch::{Extents, attention_kernel, element_macro, upload_inputs};
use crate::attention::components::{ScoresProblem, SoftmaxProblem, ValuesProblem};
use kernelgate::backend::cuda::{self, CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::gemm::GEMM_WORKSPACE_BYTES;
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// Kernels that compute a single step of attention.
pub const KERNELS: &[KernelSpec<Extents>] =
    &[NAIVE_SCORES, NAIVE_SOFTMAX, NAIVE_VALUES, SOFTMAX_VECTORIZED];

const THREADS: usize = 256;

/// Side of the tile of scores that a block of `forward_naive` computes, with one thread for each
/// score.
const NAIVE_TILE_SIDE: usize = 16;

/// First of the three kernels of `forward_naive`: the scores.
pub const NAIVE_SCORES: KernelSpec<Extents> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS), ("TILE", NAIVE_TILE_SIDE)],
    ..attention_kernel(
        "attention/forward_naive",
        "attention_forward_naive_scores",
        THREADS,
        |extents| {
            [
                extents.s.div_ceil(NAIVE_TILE_SIDE),
                extents.s.div_ceil(NAIVE_TILE_SIDE),
                extents.heads,
            ]
        },
    )
};
pub const NAIVE_SOFTMAX: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_forward_naive_softmax",
    blocks: |extents| [extents.heads * extents.s, 1, 1],
    ..NAIVE_SCORES
};
pub const NAIVE_VALUES: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_forward_naive_values",
    blocks: |extents| [extents.s.div_ceil(THREADS / extents.d), extents.heads, 1],
    ..NAIVE_SCORES
};

/// Number of neighbouring keys that a lane loads at once: 16 bytes of scores.
const KEYS_PER_LOAD: usize = 4;

/// Maximum number of keys in a row, which a warp holds in registers: 32 scores a lane.
const MAX_SOFTMAX_KEYS: usize = 1024;

const SOFTMAX_VECTORIZED: KernelSpec<Extents> = KernelSpec {
    // The softmax kernel has no head dimension and no mask, so the element type is its only macro.
    defines: |extents| vec![element_macro(extents)],
    constants: |_| {
        vec![("THREADS", THREADS), ("PACKET", KEYS_PER_LOAD), ("MAX_KEYS", MAX_SOFTMAX_KEYS)]
    },
    variants: || {
        [Dtype::Bf16, Dtype::F16].map(|dtype| Extents::self_attention_extents(1, 4, dtype)).to_vec()
    },
    ..attention_kernel(
        "attention/softmax_vectorized",
        "attention_softmax_vectorized",
        THREADS,
        // Each warp computes one row.
        |extents| [(extents.heads * extents.s).div_ceil(THREADS / 32), 1, 1],
    )
};

/// GPU rows of the scores step, `q kᵀ`, alone.
pub const SCORES_ROWS: &[Implementation<ScoresProblem>] = &[
    Implementation {
        name: "cuda/naive",
        about: "the first launch of forward's cuda/naive",
        supports: |problem| Extents::from(&problem.shape).supported_with_scores(&[NAIVE_SCORES]),
        prepare: Prepare::CudaWithin {
            device_bytes: scores_device_bytes,
            prepare: prepare_scores_task,
        },
    },
    Implementation {
        name: "cuda/cublaslt",
        about: "one GEMM of a batch of heads, by the fastest algorithm that the library proposes",
        supports: |problem| cublaslt::check_cublaslt_support(&Extents::from(&problem.shape)),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| scores_device_bytes(problem) + GEMM_WORKSPACE_BYTES as u64,
            prepare: cublaslt::scores_gemm_task,
        },
    },
];

/// GPU rows of the softmax step alone.
pub const SOFTMAX: &[Implementation<SoftmaxProblem>] = &[
    Implementation {
        name: "cuda/naive",
        about: "the second launch of forward's cuda/naive: a block a row, three passes over it",
        supports: |problem| Extents::from(&problem.shape).supported_with_scores(&[NAIVE_SOFTMAX]),
        prepare: Prepare::CudaWithin {
            device_bytes: softmax_device_bytes,
            prepare: prepare_softmax_task,
        },
    },
    Implementation {
        name: "cuda/vectorized",
        about: "a warp a row, loaded once by 16-byte accesses and kept in registers",
        supports: |problem| {
            let extents = Extents::from(&problem.shape);
            extents.supported_with_scores(&[SOFTMAX_VECTORIZED])?;
            match extents.s {
                s if s > MAX_SOFTMAX_KEYS => {
                    Err(format!("holds rows of up to {MAX_SOFTMAX_KEYS} keys"))
                }
                s if s % KEYS_PER_LOAD != 0 => {
                    Err(format!("loads {KEYS_PER_LOAD} keys at once, which {s} is no multiple of"))
                }
                _ => Ok(()),
            }
        },
        prepare: Prepare::CudaWithin {
            device_bytes: softmax_device_bytes,
            prepare: prepare_softmax_vectorized,
        },
    },
];

/// GPU rows of the values step, `p v`, alone.
pub const VALUES_ROWS: &[Implementation<ValuesProblem>] = &[
    Implementation {
        name: "cuda/naive",
        about: "the third launch of forward's cuda/naive",
        supports: |problem| Extents::from(&problem.shape).supported_with_scores(&[NAIVE_VALUES]),
        prepare: Prepare::CudaWithin {
            device_bytes: values_device_bytes,
            prepare: prepare_values_task,
        },
    },
    Implementation {
        name: "cuda/cublaslt",
        about: "one GEMM of a batch of heads, by the fastest algorithm that the library proposes",
        supports: |problem| cublaslt::check_cublaslt_support(&Extents::from(&problem.shape)),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| values_device_bytes(problem) + GEMM_WORKSPACE_BYTES as u64,
            prepare: cublaslt::values_gemm_task,
        },
    },
];

/// Device memory of the scores step: q, k and fp32 scores.
fn scores_device_bytes(problem: &ScoresProblem) -> u64 {
    let extents = Extents::from(&problem.shape);
    2 * extents.vector_bytes() + 4 * extents.query_key_pairs()
}

/// Device memory of the softmax step: fp32 scores and 16-bit probabilities.
fn softmax_device_bytes(problem: &SoftmaxProblem) -> u64 {
    (4 + 2) * Extents::from(&problem.shape).query_key_pairs()
}

/// Device memory of the values step: 16-bit probabilities, v and the output.
fn values_device_bytes(problem: &ValuesProblem) -> u64 {
    let extents = Extents::from(&problem.shape);
    2 * extents.query_key_pairs() + 2 * extents.vector_bytes()
}

fn prepare_scores_task(
    problem: &ScoresProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.shape);
    let kernel = NAIVE_SCORES.compile_and_load(device, &extents)?;
    let [q, k] = upload_inputs(device, inputs, ["q", "k"])?;
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("q", &q), ("k", &k)]),
        vec![Output::new(device, "scores", problem.shape.score_shape(), Dtype::F32)?],
        move |outputs| {
            let [q, k] = [&q, &k].map(KernelArgument::from);
            let arguments = [q, k, outputs[0].argument(), extents.sequence_length_argument()];
            within_range("scores", || kernel.launch_with(&arguments))
        },
    ))
}

fn prepare_softmax_task(
    problem: &SoftmaxProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let no_logsumexp = |_: &Extents| KernelArgument::Address(0);
    softmax_launch_task(problem, inputs, device, &NAIVE_SOFTMAX, no_logsumexp)
}

fn prepare_softmax_vectorized(
    problem: &SoftmaxProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let rows = |extents: &Extents| KernelArgument::I64(extents.query_rows() as i64);
    softmax_launch_task(problem, inputs, device, &SOFTMAX_VECTORIZED, rows)
}

/// Launches of a softmax kernel; the rows differ in its third argument.
fn softmax_launch_task(
    problem: &SoftmaxProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
    kernel: &KernelSpec<Extents>,
    third: fn(&Extents) -> KernelArgument,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.shape);
    let kernel = kernel.compile_and_load(device, &extents)?;
    let [scores] = upload_inputs(device, inputs, ["scores"])?;
    let probabilities =
        Output::new(device, "probabilities", problem.shape.score_shape(), problem.shape.dtype)?;
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("scores", &scores)]),
        vec![probabilities],
        move |outputs| {
            let arguments = [
                KernelArgument::from(&scores),
                outputs[0].argument(),
                third(&extents),
                extents.sequence_length_argument(),
            ];
            within_range("softmax", || kernel.launch_with(&arguments))
        },
    ))
}

fn prepare_values_task(
    problem: &ValuesProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.shape);
    let kernel = NAIVE_VALUES.compile_and_load(device, &extents)?;
    let [probabilities, v] = upload_inputs(device, inputs, ["probabilities", "v"])?;
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("probabilities", &probabilities), ("v", &v)]),
        vec![Output::new(device, "out", problem.shape.vector_shape(), problem.shape.dtype)?],
        move |outputs| {
            let [probabilities, v] = [&probabilities, &v].map(KernelArgument::from);
            let arguments =
                [probabilities, v, outputs[0].argument(), extents.sequence_length_argument()];
            within_range("values", || kernel.launch_with(&arguments))
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::components::ComponentShape;

    #[test]
    fn the_vectorised_softmax_is_used_for_whole_packets_and_rows_that_fit_a_warp() {
        let supported = |s| {
            (SOFTMAX[1].supports)(&SoftmaxProblem {
                shape: ComponentShape { b: 2, h: 3, s, d: 1, dtype: Dtype::F16 },
            })
        };
        assert_eq!([4, 200, 1024].map(supported), [Ok(()), Ok(()), Ok(())]);
        assert_eq!(
            supported(65),
            Err("loads 4 keys at once, which 65 is no multiple of".to_owned())
        );
        assert_eq!(supported(2048), Err("holds rows of up to 1024 keys".to_owned()));
        let extents = Extents::self_attention_extents(6, 201, Dtype::F16);
        assert_eq!((SOFTMAX_VECTORIZED.blocks)(&extents), [151, 1, 1]);
        assert_eq!(
            SOFTMAX_VECTORIZED.build_for_parameters(&extents).name(),
            "attention/softmax_vectorized DTYPE=F16"
        );
    }
}
