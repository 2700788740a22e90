//! The denoising expert on the GPU: from one launch for each operation, through a few fused kernels
//! in each layer, to one kernel for the whole loop.
//!
//! Each kernel's file under `kernels/denoise` explains its computation, thread mapping and bound. A
//! denoising rung is a `LaunchProgram`: a list of launches and memory regions that the host
//! enqueues one by one or captures once and replays as a CUDA graph. If a denoising rung needs a
//! different weight layout, its weights are packed on the host while a case is prepared, not in the
//! timed launches. The denoising rungs on the GPU support no f32 tensors, on purpose.

mod fused;
mod pack;
mod per_op;
mod persistent;
mod row;
mod run;
mod writer;

use run::DenoiseStepOrLoop;

use crate::denoise::definition::{DenoiseLoop, DenoiseStep};
use kernelgate::backend::program::ProgramLaunchMode;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};

/// Lists every CUDA kernel of the denoise family, for compile checks and kernel tables.
pub fn list_denoise_kernels() -> Vec<ListedKernelBuild> {
    [
        list_kernel_rows(per_op::PER_OP_DENOISE_KERNELS),
        list_kernel_rows(fused::FUSED_DENOISE_KERNELS),
        list_kernel_rows(persistent::PERSISTENT_DENOISE_KERNELS),
    ]
    .concat()
}

/// GPU implementations (rungs) of one denoising step.
pub const CUDA_DENOISE_STEP_LADDER: &[Implementation<DenoiseStep>] =
    &rungs_of_denoise_step_and_loop();

/// GPU implementations (rungs) of the denoising loop: those of a single step, and
/// `fused_overlap_l2`, from which only a loop can gain.
///
/// The rung `fused_overlap_l2` extends `fused_overlap`, the fastest rung with several kernels a
/// layer, so that its gain is relative to the best alternative. One denoising step of the default
/// model reads 641 MB, of which 18 MB are cached keys and values. At memory bandwidth, keeping keys
/// and values in L2 saves at most 4 µs a step; `fused_overlap` prefetches most of them while the
/// kernel before attention runs.
pub const CUDA_DENOISE_LOOP_LADDER: &[Implementation<DenoiseLoop>] = &{
    let [per_op, graph, fused_graph, fused_overlap, persistent] = rungs_of_denoise_step_and_loop();
    [per_op, graph, fused_graph, fused_overlap, FUSED_LOOP_ROW_WITH_KEPT_L2, persistent]
};

const FUSED_LOOP_ROW_WITH_KEPT_L2: Implementation<DenoiseLoop> = Implementation {
    implementation_name: "cuda/fused_overlap_l2",
    description: "fused_overlap, keys and values kept in L2 (persisting accesses) from the first step \
            to the last",
    supports: |problem| {
        let run = DenoiseStepOrLoop::from(problem).check_steps_fit_captured_graph()?;
        run.check_fused_kernels_support_run()?;
        if run.denoising_steps > 1 {
            Ok(())
        } else {
            Err("one step reads keys and values once: nothing to keep".to_owned())
        }
    },
    prepare: PrepareFunction::Program(
        |problem| fused::fused_program_with_pdl_and_kept_l2(&DenoiseStepOrLoop::from(problem)),
        ProgramLaunchMode::CapturedGraph,
    ),
};

/// GPU rungs that a denoising step and the denoising loop share, generic over the problem type.
const fn rungs_of_denoise_step_and_loop<P>() -> [Implementation<P>; 5]
where
    DenoiseStepOrLoop: for<'a> From<&'a P>,
{
    [
        Implementation {
            implementation_name: "cuda/per_op",
            description: "a launch an operation from the host, GEMMs by cuBLASLt: bound by \
                    launches, as eager frameworks are",
            supports: |problem| DenoiseStepOrLoop::from(problem).check_per_op_kernels_support_run(),
            prepare: PrepareFunction::Program(
                |problem| per_op::serial_per_op_program(&DenoiseStepOrLoop::from(problem)),
                ProgramLaunchMode::StepByStep,
            ),
        },
        Implementation {
            implementation_name: "cuda/graph",
            description: "per_op captured once and replayed: independent GEMMs on parallel branches, \
                    other kernels with programmatic dependent launch from sm_90 on",
            supports: |problem| {
                DenoiseStepOrLoop::from(problem)
                    .check_steps_fit_captured_graph()
                    .and_then(|run| run.check_per_op_kernels_support_run())
            },
            prepare: PrepareFunction::Program(
                |problem| {
                    per_op::per_op_program_with_parallel_gemms_and_pdl(&DenoiseStepOrLoop::from(
                        problem,
                    ))
                },
                ProgramLaunchMode::CapturedGraph,
            ),
        },
        Implementation {
            implementation_name: "cuda/fused_graph",
            description: "five kernels a layer: norms, rotation, activation and residuals inside skinny \
                    GEMMs, styles of all steps first",
            supports: |problem| {
                DenoiseStepOrLoop::from(problem)
                    .check_steps_fit_captured_graph()
                    .and_then(|run| run.check_fused_kernels_support_run())
            },
            prepare: PrepareFunction::Program(
                |problem| fused::fused_program_without_pdl(&DenoiseStepOrLoop::from(problem)),
                ProgramLaunchMode::CapturedGraph,
            ),
        },
        Implementation {
            implementation_name: "cuda/fused_overlap",
            description: "the kernels of fused_graph with programmatic dependent launch: each \
                    prefetches its weights while its predecessor runs",
            supports: |problem| {
                DenoiseStepOrLoop::from(problem)
                    .check_steps_fit_captured_graph()
                    .and_then(|run| run.check_fused_kernels_support_run())
            },
            prepare: PrepareFunction::Program(
                |problem| fused::fused_program_with_pdl(&DenoiseStepOrLoop::from(problem)),
                ProgramLaunchMode::CapturedGraph,
            ),
        },
        Implementation {
            implementation_name: "cuda/persistent",
            description: "all steps in one persistent kernel: weights are prefetched throughout, \
                    activations cross five grid barriers a layer",
            supports: |problem| {
                DenoiseStepOrLoop::from(problem).check_steps_fit_captured_graph().and_then(|run| {
                    run.check_dtype_is_bf16()
                        .and_then(|()| persistent::check_persistent_kernel_supports_run(&run))
                })
            },
            prepare: PrepareFunction::Program(
                |problem| {
                    persistent::persistent_program_with_pdl(&DenoiseStepOrLoop::from(problem))
                },
                ProgramLaunchMode::CapturedGraph,
            ),
        },
    ]
}

#[cfg(test)]
mod tests;
