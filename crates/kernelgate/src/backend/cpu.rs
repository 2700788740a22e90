//! The host as a backend: a real one, verified like any other; it is not the reference.

use std::sync::Arc;

use crate::workload::{Tensor, Tensors};

use super::executable::unknown_input_error;
use super::{BackendError, Executable};
use kernelgate_cuda::CaseFailure;

/// A computation on the host: its inputs and outputs, and the closure that fills these from those.
pub struct CpuTask {
    inputs: Arc<Tensors>,
    /// Names of the inputs that every launch reads; `None` means all.
    read: Option<&'static [&'static str]>,
    outputs: Tensors,
    run: HostRunFunction,
}

/// A host computation that overwrites the outputs from the inputs.
type HostRunFunction = Box<dyn FnMut(&Tensors, &mut Tensors)>;

impl CpuTask {
    /// `run` overwrites every element of the outputs from its inputs, and returns when done. The
    /// closure may put another tensor in an output's place if nothing else holds that tensor's
    /// memory: a view of an input, or of memory that the row keeps, is an error.
    pub fn new(
        inputs: Arc<Tensors>,
        outputs: Tensors,
        run: impl FnMut(&Tensors, &mut Tensors) + 'static,
    ) -> Self {
        Self { inputs, read: None, outputs, run: Box::new(run) }
    }

    /// Names the only inputs that launches read, because the row packed or quantised the others
    /// while it was prepared.
    pub fn reading(self, names: &'static [&'static str]) -> Self {
        Self { read: Some(names), ..self }
    }
}

impl Executable for CpuTask {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.outputs.iter_mut().for_each(|(_, tensor)| tensor.poison());
        Ok(())
    }

    fn launch(&mut self) -> Result<(), BackendError> {
        (self.run)(&self.inputs, &mut self.outputs);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn outputs(&mut self) -> Result<&Tensors, BackendError> {
        if let Some(name) = self.outputs.first_shared_tensor() {
            let view = "is a view of an input or of what the row keeps: nothing writes it";
            let why = CaseFailure::new("output_is_a_view", format!("output `{name}` {view}"));
            return Err(BackendError::NotTimed(why.with_name("output", name)));
        }
        Ok(&self.outputs)
    }

    fn launch_inputs(&self) -> Vec<&str> {
        let all = self.inputs.iter().map(|(name, _)| name);
        all.filter(|name| self.read.is_none_or(|read| read.contains(name))).collect()
    }

    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError> {
        if !self.launch_inputs().contains(&name) {
            return Err(unknown_input_error(name));
        }
        Arc::make_mut(&mut self.inputs).insert(name, values.clone());
        Ok(())
    }

    fn still_poisoned(&mut self) -> Result<Vec<bool>, BackendError> {
        Ok(Vec::new())
    }
}

/// Threads that the CPU backend computes with: rayon's pool, `RAYON_NUM_THREADS` or every core.
pub fn available_threads() -> usize {
    rayon::current_num_threads()
}
