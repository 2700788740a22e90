//! The denoise expert on the GPU: from one launch for each operation, through a few fused kernels
//! in each layer, to one kernel for the whole loop.
//!
//! Each kernel's file under `kernels/denoise` explains its computation, thread mapping and bound. A
//! rung is a `Program`, its launches and their memory: a launch of the rung walks the program or
//! replays its captured graph. Weights are packed while a case is prepared, if a rung needs a
//! layout different from that of the inputs. The dtype f32 is excluded on purpose.

mod fused;
mod pack;
mod per_op;
mod persistent;
mod row;
mod run;
mod writer;

use run::ExpertRun;

use crate::denoise::definition::{DenoiseLoop, DenoiseStep};
use kernelgate::backend::program::Capture;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};

/// Every kernel of the denoise family.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list_kernel_rows(per_op::KERNELS),
        list_kernel_rows(fused::KERNELS),
        list_kernel_rows(persistent::KERNELS),
    ]
    .concat()
}

/// Ladder of one denoising step.
pub const STEP: &[Implementation<DenoiseStep>] = &implementation_ladder();

/// Ladder of the denoising loop: the rows of a step, and one from which only a loop can gain.
///
/// `fused_overlap_l2` extends the fastest rung with several kernels a layer, so that its gain is
/// relative to the best alternative. One denoising step reads 641 MB, of which 18 MB are keys and
/// values. At memory bandwidth, keeping them in L2 saves at most 4 µs a step, and `fused_overlap`
/// prefetches most of them while the kernel before attention still runs.
pub const LOOP: &[Implementation<DenoiseLoop>] = &{
    let [per_op, graph, fused_graph, fused_overlap, persistent] = implementation_ladder();
    [per_op, graph, fused_graph, fused_overlap, OVERLAP_L2_ROW, persistent]
};

const OVERLAP_L2_ROW: Implementation<DenoiseLoop> = Implementation {
    name: "cuda/fused_overlap_l2",
    about: "fused_overlap, keys and values kept in L2 (persisting accesses) from the first step \
            to the last",
    supports: |problem| {
        let run = ExpertRun::from(problem).captured_loop()?;
        run.check_fused_supported()?;
        if run.steps > 1 {
            Ok(())
        } else {
            Err("one step reads keys and values once: nothing to keep".to_owned())
        }
    },
    prepare: Prepare::Program(
        |problem| fused::launches_keeping_l2(&ExpertRun::from(problem)),
        Capture::Graph,
    ),
};

/// Rows of the ladder, which are the same for both problem types.
const fn implementation_ladder<P>() -> [Implementation<P>; 5]
where
    ExpertRun: for<'a> From<&'a P>,
{
    [
        Implementation {
            name: "cuda/per_op",
            about: "a launch an operation from the host, GEMMs by cuBLASLt: bound by \
                    launches, as eager frameworks are",
            supports: |problem| ExpertRun::from(problem).check_per_op_supported(),
            prepare: Prepare::Program(
                |problem| per_op::per_op_program(&ExpertRun::from(problem)),
                Capture::Stream,
            ),
        },
        Implementation {
            name: "cuda/graph",
            about: "per_op captured once and replayed: independent GEMMs on parallel branches, \
                    other kernels with programmatic dependent launch from sm_90 on",
            supports: |problem| {
                ExpertRun::from(problem)
                    .captured_loop()
                    .and_then(|run| run.check_per_op_supported())
            },
            prepare: Prepare::Program(
                |problem| per_op::concurrent_launches(&ExpertRun::from(problem)),
                Capture::Graph,
            ),
        },
        Implementation {
            name: "cuda/fused_graph",
            about: "five kernels a layer: norms, rotation, activation and residuals inside skinny \
                    GEMMs, styles of all steps first",
            supports: |problem| {
                ExpertRun::from(problem).captured_loop().and_then(|run| run.check_fused_supported())
            },
            prepare: Prepare::Program(
                |problem| fused::serial_launch_program(&ExpertRun::from(problem)),
                Capture::Graph,
            ),
        },
        Implementation {
            name: "cuda/fused_overlap",
            about: "the kernels of fused_graph with programmatic dependent launch: each \
                    prefetches its weights while its predecessor runs",
            supports: |problem| {
                ExpertRun::from(problem).captured_loop().and_then(|run| run.check_fused_supported())
            },
            prepare: Prepare::Program(
                |problem| fused::programmatic_launches(&ExpertRun::from(problem)),
                Capture::Graph,
            ),
        },
        Implementation {
            name: "cuda/persistent",
            about: "all steps in one persistent kernel: weights are prefetched throughout, \
                    activations cross five grid barriers a layer",
            supports: |problem| {
                ExpertRun::from(problem).captured_loop().and_then(|run| {
                    run.check_is_bf16().and_then(|()| persistent::check_model_and_space(&run))
                })
            },
            prepare: Prepare::Program(
                |problem| persistent::programmatic_launch_program(&ExpertRun::from(problem)),
                Capture::Graph,
            ),
        },
    ]
}

#[cfg(test)]
mod tests;
