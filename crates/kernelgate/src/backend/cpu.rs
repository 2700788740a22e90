//! The host's CPU as a backend, whose implementations are verified like those of any other backend;
//! the reference is separate.

use std::sync::Arc;

use crate::workload::{Tensor, Tensors};

use super::executable::input_not_read_by_launches_error;
use super::{BackendError, LaunchableProblem};
use kernelgate_cuda::CaseFailureReason;

/// A computation on the host: inputs, outputs, and the closure that computes the outputs from the
/// inputs.
pub struct CpuTask {
    inputs: Arc<Tensors>,
    /// Names of the inputs that every launch reads; `None` means all inputs.
    inputs_read_by_launches: Option<&'static [&'static str]>,
    outputs: Tensors,
    compute_outputs: ComputeOutputsOnHost,
}

/// A closure that overwrites the outputs with values computed from the inputs.
type ComputeOutputsOnHost = Box<dyn FnMut(&Tensors, &mut Tensors)>;

impl CpuTask {
    /// The closure `run` overwrites every element of the outputs and returns when the computation
    /// is finished. The closure may replace an output tensor, but not by a view of an input or of
    /// memory that the row keeps: the harness reports such a view as an error.
    pub fn new(
        inputs: Arc<Tensors>,
        outputs: Tensors,
        run: impl FnMut(&Tensors, &mut Tensors) + 'static,
    ) -> Self {
        Self { inputs, inputs_read_by_launches: None, outputs, compute_outputs: Box::new(run) }
    }

    /// Declares that launches read only these inputs, because the row packed or quantised the other
    /// inputs during preparation.
    pub fn reading_only_inputs(self, names: &'static [&'static str]) -> Self {
        Self { inputs_read_by_launches: Some(names), ..self }
    }
}

impl LaunchableProblem for CpuTask {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.outputs.iter_mut().for_each(|(_, tensor)| tensor.overwrite_with_poison());
        Ok(())
    }

    fn launch_once(&mut self) -> Result<(), BackendError> {
        (self.compute_outputs)(&self.inputs, &mut self.outputs);
        Ok(())
    }

    fn wait_for_launches(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn outputs_on_host(&mut self) -> Result<&Tensors, BackendError> {
        if let Some(name) = self.outputs.first_tensor_with_shared_memory() {
            let view = "is a view of an input or of what the row keeps: nothing writes it";
            let why = CaseFailureReason::failure_with_kind_and_sentence(
                "output_is_a_view",
                format!("output `{name}` {view}"),
            );
            return Err(BackendError::NotTimed(why.with_name_fact("output", name)));
        }
        Ok(&self.outputs)
    }

    fn names_of_inputs_read_by_launches(&self) -> Vec<&str> {
        let all = self.inputs.iter().map(|(name, _)| name);
        all.filter(|name| self.inputs_read_by_launches.is_none_or(|read| read.contains(name)))
            .collect()
    }

    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError> {
        if !self.names_of_inputs_read_by_launches().contains(&name) {
            return Err(input_not_read_by_launches_error(name));
        }
        Arc::make_mut(&mut self.inputs).insert(name, values.clone());
        Ok(())
    }

    fn outputs_are_still_poisoned(&mut self) -> Result<Vec<bool>, BackendError> {
        Ok(Vec::new())
    }
}

/// Number of threads of the CPU backend: the size of rayon's pool, which is `RAYON_NUM_THREADS` or
/// the number of cores.
pub fn cpu_backend_thread_count() -> usize {
    rayon::current_num_threads()
}
