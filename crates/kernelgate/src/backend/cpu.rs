//! The host as a backend: a real one, verified like any other; it is not the reference.

use crate::workload::Tensors;

use super::{BackendError, Executable};

/// A computation on the host: its outputs and the closure that fills them.
pub struct CpuTask {
    outputs: Tensors,
    run: Box<dyn FnMut(&mut Tensors)>,
}

impl CpuTask {
    /// `run` overwrites every element of `outputs`, from inputs it holds, and returns when done.
    pub fn new(outputs: Tensors, run: impl FnMut(&mut Tensors) + 'static) -> Self {
        Self { outputs, run: Box::new(run) }
    }
}

impl Executable for CpuTask {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.outputs.iter_mut().for_each(|(_, tensor)| tensor.poison());
        Ok(())
    }

    fn launch(&mut self) -> Result<(), BackendError> {
        (self.run)(&mut self.outputs);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn outputs(&mut self) -> Result<&Tensors, BackendError> {
        Ok(&self.outputs)
    }
}

/// Threads that the CPU backend computes with: rayon's pool, `RAYON_NUM_THREADS` or every core.
pub fn threads() -> usize {
    rayon::current_num_threads()
}
