//! Writer of the family's programs: inputs, times of a loop, stacked layers, and launches of
//! kernels whose builds and grids depend on a model.

use super::row::LaunchItems;
use super::run::ExpertRun;
use kernelgate::backend::program::{
    KernelLaunch, MemoryPurpose, Operand, Operands, Pointer, Program,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Name of the input that differs from one inference to the next. Launches read weights and caches
/// as they were when the program was loaded, some of them packed.
const NOISE_INPUT: &str = "x";

/// Name and size in bytes of a region of device memory.
pub type NamedRegion = (&'static str, usize);

/// Writes the program of a run.
pub struct ExpertWriter<'a> {
    pub run: &'a ExpertRun,
    pub program: Program,
    /// Whether kernels are launched with programmatic dependent launch (PDL).
    pub programmatic: bool,
}

impl<'a> ExpertWriter<'a> {
    /// Creates a program with the output, the times of a loop, and the run's inputs except those in
    /// `packed`.
    pub fn new(run: &'a ExpertRun, packed: &[&str]) -> Self {
        let mut program = Program::new();
        let shape = &run.shape;
        let specs = shape.model.input_tensors(shape.s, shape.p, shape.dtype);
        for spec in specs.iter().filter(|spec| !packed.contains(&spec.name)) {
            let bytes = spec.bytes() as usize;
            match spec.name {
                NOISE_INPUT => program.add_input(NOISE_INPUT, MemoryPurpose::Inputs, bytes),
                name if name.ends_with("_cache") => {
                    program.add_loaded_input(name, MemoryPurpose::Inputs, bytes)
                }
                name => program.add_loaded_input(name, MemoryPurpose::Weights, bytes),
            };
        }
        let steps = run.steps;
        if run.looped {
            program.add_packed(
                "times",
                MemoryPurpose::Inputs,
                steps * Dtype::F64.bytes(),
                move |_| bytemuck::cast_slice(&denoising_times(steps)).to_vec(),
            );
        } else {
            program.add_loaded_input("t", MemoryPurpose::Inputs, Dtype::F32.bytes());
        }
        let (name, extents) = run.output_name_and_extents();
        program.add_output(name, extents, Dtype::F32);
        Self { run, program, programmatic: false }
    }

    /// Declares regions of scratch memory.
    pub fn declare_scratch_regions(
        &mut self,
        purpose: MemoryPurpose,
        regions: impl IntoIterator<Item = NamedRegion>,
    ) {
        for (name, bytes) in regions {
            self.program.add_scratch(name, purpose, bytes);
        }
    }

    /// Returns a region as an operand of a launch.
    pub fn at(&self, name: &str) -> Operand {
        self.program.at(name).into()
    }

    /// Returns the output as an operand of a launch.
    pub fn velocity_output(&self) -> Operand {
        self.at(self.run.output_name_and_extents().0)
    }

    /// Returns the start of a layer's part of a stacked region.
    pub fn layer_pointer(&self, name: &str, layer: usize) -> Pointer {
        let layer_bytes = self.program.bytes(name) / self.run.shape.model.depth;
        self.program.at(name).offset_by(layer * layer_bytes)
    }

    /// Adds the launch of a kernel over `items` items.
    pub fn add_launch(
        &mut self,
        kernel: &KernelSpec<LaunchItems>,
        items: usize,
        arguments: impl Operands,
    ) {
        let launch = self.kernel_launch(kernel, [items, 1], arguments);
        self.program.add(launch);
    }

    /// Returns the launch of a kernel over this number of items and layers; the caller adds it to
    /// the program.
    pub fn kernel_launch(
        &self,
        kernel: &KernelSpec<LaunchItems>,
        [items, layers]: [usize; 2],
        arguments: impl Operands,
    ) -> KernelLaunch {
        let items = LaunchItems { model: self.run.shape.model, items, layers };
        let launch = self.program.kernel_launch(kernel, &items, arguments);
        if self.programmatic { launch.programmatic() } else { launch }
    }
}

/// Times of a loop: 1 first, then each lower by `1/steps`.
fn denoising_times(steps: usize) -> Vec<f64> {
    let dt = -1.0 / steps as f64;
    let mut t = 1.0;
    (0..steps)
        .map(|_| {
            let now = t;
            t += dt;
            now
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_begin_at_one_and_stop_before_zero() {
        let times = denoising_times(10);
        assert_eq!((times.len(), times[0]), (10, 1.0));
        assert!((times[9] - 0.1).abs() < 1e-12);
    }
}
