//! Runs a network on several GPUs: one program per GPU, all replayed together as CUDA graphs.

use std::sync::Arc;

use kernelgate_cuda::driver::graph::ExecutableCudaGraph;
use kernelgate_cuda::{BackendError, Devices};

use super::load::LoadedProgram;
use super::plan::LaunchProgram;
use crate::backend::cuda::CudaTask;
use crate::workload::Tensors;

/// The program of one GPU, and the inputs of this GPU.
pub struct ProgramOfGpu {
    /// The launches.
    pub program: LaunchProgram,
    /// Inputs of the GPU on which the program runs.
    pub inputs: Tensors,
}

/// Makes one task from the programs of all GPUs of a set, in the order of the GPUs. Each program is
/// launched once before `connect`, when no GPU waits for another yet, and captured as a CUDA graph
/// after `connect`. The function `name` returns the problem's name for a GPU's input or output;
/// inputs with equal names on several GPUs are one input.
///
/// # Errors
/// Fails with the first mistake of a program, if loading or a launch fails, or if a program updates
/// a state.
pub fn task_from_program_per_gpu(
    ranks: Vec<ProgramOfGpu>,
    devices: &Devices,
    name: fn(&str, usize) -> &'static str,
    connect: impl FnOnce() -> Result<(), BackendError>,
) -> Result<CudaTask, BackendError> {
    if ranks.len() != devices.device_count() {
        let (programs, gpus) = (ranks.len(), devices.device_count());
        return Err(BackendError::ComputationFailed(format!(
            "{programs} programs for {gpus} GPUs"
        )));
    }
    let uses =
        ranks.first().map(|rank| rank.program.device_bytes_by_purpose_label()).unwrap_or_default();
    let (mut inputs, mut outputs, mut loaded) = (Vec::new(), Vec::new(), Vec::new());
    let mut ranks = ranks.into_iter();
    devices.for_each_with_context_current(|rank, device| {
        let Some(ProgramOfGpu { program, inputs: tensors }) = ranks.next() else { return Ok(()) };
        let mut program: LoadedProgram = program.load_on_device(device, &tensors)?;
        if program.launches_update_region_contents() {
            let why = "a program over several GPUs that updates a state";
            return Err(BackendError::Unsupported(why.to_owned()));
        }
        let (own_inputs, own_outputs) = program.take_inputs_and_outputs();
        inputs.extend(own_inputs.into_iter().map(|input| input.renamed_for_gpu_rank(name, rank)));
        outputs
            .extend(own_outputs.into_iter().map(|output| output.renamed_for_gpu_rank(name, rank)));
        program.enqueue_all_steps()?;
        device.synchronize()?;
        loaded.push(program);
        Ok(())
    })?;
    connect()?;
    let mut graphs = Vec::with_capacity(loaded.len());
    devices.for_each_with_context_current(|rank, device| {
        let program: &LoadedProgram = &loaded[rank];
        let capture = || program.enqueue_all_steps();
        graphs.push(ExecutableCudaGraph::capture_with_clears_moved_first(
            device,
            program.gemm_workspaces_cleared_by_graph(),
            capture,
        )?);
        Ok(())
    })?;
    let set: Devices = Devices::clone(devices);
    let task = CudaTask::new(devices, inputs, outputs, move |_| {
        // The graphs launch the programs' kernels on the programs' memory, so the closure keeps the
        // programs alive.
        let _alive: &[LoadedProgram] = &loaded;
        set.for_each_with_context_current(|rank, _: &Arc<_>| graphs[rank].launch_graph_on_stream())
    });
    Ok(task.with_device_memory_by_purpose(uses))
}
