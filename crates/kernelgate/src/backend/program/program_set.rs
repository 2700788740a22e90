//! A network over several GPUs: a program for each, replayed together.

use std::sync::Arc;

use kernelgate_cuda::driver::graph::ExecutableGraph;
use kernelgate_cuda::{BackendError, Devices};

use super::load::LoadedProgram;
use super::plan::Program;
use crate::backend::cuda::CudaTask;
use crate::workload::Tensors;

/// The program of one GPU, with the names that it gives the workload's inputs.
pub struct RankProgram {
    /// The launches.
    pub program: Program,
    /// Inputs of that GPU.
    pub inputs: Tensors,
}

/// Makes a case of the programs of all GPUs of a set, in their order. Each program is launched once
/// before `connect`, while GPUs do not wait for each other yet, and is captured as a graph after
/// `connect`. `name` gives the workload's name for a rank's input or output; an input of the same
/// name on several GPUs is one input.
///
/// # Errors
/// Fails with the first mistake of a program, if loading or a launch fails, or if a program updates
/// a state.
pub fn ranks_task(
    ranks: Vec<RankProgram>,
    devices: &Devices,
    name: fn(&str, usize) -> &'static str,
    connect: impl FnOnce() -> Result<(), BackendError>,
) -> Result<CudaTask, BackendError> {
    if ranks.len() != devices.device_count() {
        let (programs, gpus) = (ranks.len(), devices.device_count());
        return Err(BackendError::Launch(format!("{programs} programs for {gpus} GPUs")));
    }
    let uses = ranks.first().map(|rank| rank.program.bytes_by_memory_purpose()).unwrap_or_default();
    let (mut inputs, mut outputs, mut loaded) = (Vec::new(), Vec::new(), Vec::new());
    let mut ranks = ranks.into_iter();
    devices.for_each_device(|rank, device| {
        let Some(RankProgram { program, inputs: tensors }) = ranks.next() else { return Ok(()) };
        let mut program: LoadedProgram = program.load_program(device, &tensors)?;
        if program.updates_contents() {
            let why = "a program over several GPUs that updates a state";
            return Err(BackendError::Unsupported(why.to_owned()));
        }
        let (own_inputs, own_outputs) = program.take_tensors();
        inputs.extend(own_inputs.into_iter().map(|input| input.named_for_rank(name, rank)));
        outputs.extend(own_outputs.into_iter().map(|output| output.named_for_rank(name, rank)));
        program.enqueue_program()?;
        device.synchronize()?;
        loaded.push(program);
        Ok(())
    })?;
    connect()?;
    let mut graphs = Vec::with_capacity(loaded.len());
    devices.for_each_device(|rank, device| {
        let program: &LoadedProgram = &loaded[rank];
        let capture = || program.enqueue_program();
        graphs.push(ExecutableGraph::capture_clearing_first(
            device,
            program.range_cleared_first(),
            capture,
        )?);
        Ok(())
    })?;
    let set: Devices = Devices::clone(devices);
    let task = CudaTask::new(devices, inputs, outputs, move |_| {
        // The graphs launch the programs' kernels on the programs' memory, so the programs must
        // stay alive.
        let _alive: &[LoadedProgram] = &loaded;
        set.for_each_device(|rank, _: &Arc<_>| graphs[rank].launch())
    });
    Ok(task.with_memory_uses(uses))
}
