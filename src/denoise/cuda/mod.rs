//! The denoise expert on the GPU: from a launch an operation, through a few fused kernels a layer,
//! to one kernel for the loop.
//!
//! What each kernel does, its thread mapping and its bound are in its file under `kernels/denoise`.
//! A rung is a `LaunchSequence`, the list of its launches, made once while a case is prepared: what
//! is timed is walking that list, or replaying its capture. Weights are packed then too, where a
//! rung needs another layout than that of the inputs. Deliberately absent: f32.

mod buffers;
mod fused;
mod pack;
mod per_op;
mod persistent;
mod program;
mod row;
mod run;

use std::sync::Arc;

use program::LaunchSequence;
use run::ExpertRun;

use crate::denoise::definition::{DenoiseLoop, DenoiseStep};
use kernelgate::backend::cuda::{CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph::Graph;
use kernelgate_cuda::spec::{ListedKernel, list};

/// Every kernel of the family.
pub fn kernels() -> Vec<ListedKernel> {
    [list(per_op::KERNELS), list(fused::KERNELS), list(persistent::KERNELS)].concat()
}

/// Step ladder.
pub const STEP: &[Implementation<DenoiseStep>] = &ladder();

/// Loop ladder: besides the rows of a step, what only a loop can gain from.
///
/// `fused_overlap_l2` extends the fastest of those with several kernels a layer, so that what it
/// gains is gained by whoever would use it. Of 641 MB that a step reads, 18 are keys and values: at
/// memory bandwidth, keeping them saves 4 µs a step at most, and `fused_overlap` prefetches most of
/// them while the kernel before attention still runs.
pub const LOOP: &[Implementation<DenoiseLoop>] = &{
    let [per_op, graph, fused_graph, fused_overlap, persistent] = ladder();
    [per_op, graph, fused_graph, fused_overlap, KEEPING, persistent]
};

const KEEPING: Implementation<DenoiseLoop> = Implementation {
    name: "cuda/fused_overlap_l2",
    about: "fused_overlap, keys and values kept in L2 (persisting accesses) from the first step \
            to the last",
    supports: |problem| {
        let run = ExpertRun::from(problem).captured()?;
        run.supported_fused()?;
        if run.steps > 1 {
            Ok(())
        } else {
            Err("one step reads keys and values once: nothing to keep".to_owned())
        }
    },
    prepare: Prepare::CudaWithin {
        device_bytes: |problem| fused::device_bytes(&ExpertRun::from(problem)),
        prepare: |problem, inputs, device| {
            captured(&ExpertRun::from(problem), inputs, device, fused::keeping)
        },
    },
};

/// The rows, the same for both problem types.
const fn ladder<P>() -> [Implementation<P>; 5]
where
    ExpertRun: for<'a> From<&'a P>,
{
    [
        Implementation {
            name: "cuda/per_op",
            about: "a launch an operation from the host, GEMMs by cuBLASLt: bound by \
                    launches, as eager frameworks are",
            supports: |problem| ExpertRun::from(problem).supported_per_op(),
            prepare: Prepare::CudaWithin {
                device_bytes: |problem| per_op::device_bytes(&ExpertRun::from(problem), false),
                prepare: |problem, inputs, device| {
                    launched(&ExpertRun::from(problem), inputs, device, per_op::program)
                },
            },
        },
        Implementation {
            name: "cuda/graph",
            about: "per_op captured once and replayed: independent GEMMs on parallel branches, \
                    other kernels with programmatic dependent launch from sm_90 on",
            supports: |problem| {
                ExpertRun::from(problem).captured().and_then(|run| run.supported_per_op())
            },
            prepare: Prepare::CudaWithin {
                device_bytes: |problem| per_op::device_bytes(&ExpertRun::from(problem), true),
                prepare: |problem, inputs, device| {
                    captured(&ExpertRun::from(problem), inputs, device, per_op::concurrent)
                },
            },
        },
        Implementation {
            name: "cuda/fused_graph",
            about: "five kernels a layer: norms, rotation, activation and residuals inside skinny \
                    GEMMs, styles of all steps first",
            supports: |problem| {
                ExpertRun::from(problem).captured().and_then(|run| run.supported_fused())
            },
            prepare: Prepare::CudaWithin {
                device_bytes: |problem| fused::device_bytes(&ExpertRun::from(problem)),
                prepare: |problem, inputs, device| {
                    captured(&ExpertRun::from(problem), inputs, device, fused::program)
                },
            },
        },
        Implementation {
            name: "cuda/fused_overlap",
            about: "the kernels of fused_graph with programmatic dependent launch: each \
                    prefetches its weights while its predecessor runs",
            supports: |problem| {
                ExpertRun::from(problem).captured().and_then(|run| run.supported_fused())
            },
            prepare: Prepare::CudaWithin {
                device_bytes: |problem| fused::device_bytes(&ExpertRun::from(problem)),
                prepare: |problem, inputs, device| {
                    captured(&ExpertRun::from(problem), inputs, device, fused::programmatic)
                },
            },
        },
        Implementation {
            name: "cuda/persistent",
            about: "all steps in one persistent kernel: weights are prefetched throughout, \
                    activations cross five grid barriers a layer",
            supports: |problem| {
                ExpertRun::from(problem)
                    .captured()
                    .and_then(|run| run.supported().and_then(|()| persistent::supported(&run)))
            },
            prepare: Prepare::CudaWithin {
                device_bytes: |problem| persistent::device_bytes(&ExpertRun::from(problem)),
                prepare: |problem, inputs, device| {
                    captured(&ExpertRun::from(problem), inputs, device, persistent::program)
                },
            },
        },
    ]
}

/// Makes the list of launches for an output.
type Write =
    fn(&ExpertRun, &Tensors, &Arc<Device>, &Output) -> Result<LaunchSequence, BackendError>;

/// A task that launches one by one.
fn launched(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    write: Write,
) -> Result<CudaTask, BackendError> {
    let output = run.output(device)?;
    let program = write(run, inputs, device, &output)?;
    Ok(CudaTask::new(device, program.launch_inputs(), vec![output], move |_| program.enqueue()))
}

/// A task that replays a capture.
fn captured(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    write: Write,
) -> Result<CudaTask, BackendError> {
    let output = run.output(device)?;
    let program = write(run, inputs, device, &output)?;
    // One launch first: what it loads cannot be loaded during a capture.
    program.enqueue()?;
    device.synchronize()?;
    let graph = Graph::capture(device, || program.enqueue())?;
    Ok(CudaTask::new(device, program.launch_inputs(), vec![output], move |_| {
        // The graph's launches are the program's, on its memory.
        let _alive = &program;
        graph.launch()
    }))
}

#[cfg(test)]
mod tests;
