//! Builder of denoising programs: memory regions for inputs and denoising times, and launches of
//! kernels whose macros and grids depend on a model.

use super::row::DenoiseLaunchSizes;
use super::run::DenoiseStepOrLoop;
use kernelgate::backend::program::{
    KernelLaunchStep, LaunchArgument, LaunchArgumentList, LaunchProgram, MemoryPurpose,
    RegionPointer,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Name of the input that is uploaded again when a benchmark replaces the inputs: the noisy
/// actions. All inputs other than the noisy actions are read as they were when the program was
/// loaded, because some weights are packed then.
const NOISY_ACTIONS_INPUT: &str = "x";

/// Name and size in bytes of a region of device memory.
pub type RegionNameAndBytes = (&'static str, usize);

/// Builds the GPU program (launches and memory regions) of one denoising step or loop.
pub struct DenoiseProgramBuilder<'a> {
    pub run: &'a DenoiseStepOrLoop,
    pub program: LaunchProgram,
    /// Whether the builder adds all kernel launches with programmatic dependent launch (PDL).
    pub uses_programmatic_launch: bool,
}

impl<'a> DenoiseProgramBuilder<'a> {
    /// Creates a program with regions for the output, the denoising times and all inputs of the run
    /// except those named in `packed`.
    pub fn create_with_unpacked_inputs(run: &'a DenoiseStepOrLoop, packed: &[&str]) -> Self {
        let mut program = LaunchProgram::new();
        let shape = &run.shape;
        let specs =
            shape.model.input_tensor_specs(shape.action_tokens, shape.prefix_tokens, shape.dtype);
        for spec in specs.iter().filter(|spec| !packed.contains(&spec.input_name)) {
            let bytes = spec.unquantised_bytes() as usize;
            match spec.input_name {
                NOISY_ACTIONS_INPUT => {
                    program.add_input(NOISY_ACTIONS_INPUT, MemoryPurpose::Inputs, bytes)
                }
                name if name.ends_with("_cache") => {
                    program.add_input_fixed_at_loading(name, MemoryPurpose::Inputs, bytes)
                }
                name => program.add_input_fixed_at_loading(name, MemoryPurpose::Weights, bytes),
            };
        }
        let steps = run.denoising_steps;
        if run.is_whole_loop {
            program.add_packed_from_inputs(
                "times",
                MemoryPurpose::Inputs,
                steps * Dtype::F64.bytes_per_element(),
                move |_| bytemuck::cast_slice(&times_of_denoising_steps(steps)).to_vec(),
            );
        } else {
            program.add_input_fixed_at_loading(
                "t",
                MemoryPurpose::Inputs,
                Dtype::F32.bytes_per_element(),
            );
        }
        let (name, extents) = run.output_tensor_name_and_extents();
        program.add_output(name, extents, Dtype::F32);
        Self { run, program, uses_programmatic_launch: false }
    }

    /// Adds named scratch memory regions, all with the same purpose, to the program.
    pub fn add_scratch_regions(
        &mut self,
        purpose: MemoryPurpose,
        regions: impl IntoIterator<Item = RegionNameAndBytes>,
    ) {
        for (name, bytes) in regions {
            self.program.add_scratch(name, purpose, bytes);
        }
    }

    /// Returns the named memory region as a kernel operand.
    pub fn pointer_to(&self, name: &str) -> LaunchArgument {
        self.program.pointer_to(name).into()
    }

    /// Returns the region of the program's output (velocity or actions) as a kernel operand.
    pub fn output_operand(&self) -> LaunchArgument {
        self.pointer_to(self.run.output_tensor_name_and_extents().0)
    }

    /// Returns a pointer to one layer's part of a memory region that holds all layers.
    pub fn pointer_to_layer_part(&self, name: &str, layer: usize) -> RegionPointer {
        let layer_bytes = self.program.bytes_of_region(name) / self.run.shape.model.layer_count;
        self.program.pointer_to(name).offset_by(layer * layer_bytes)
    }

    /// Adds the launch of a kernel over `items` items of one layer to the program.
    pub fn add_single_layer_launch(
        &mut self,
        kernel: &KernelSpec<DenoiseLaunchSizes>,
        items: usize,
        arguments: impl LaunchArgumentList,
    ) {
        let launch = self.create_kernel_launch(kernel, [items, 1], arguments);
        self.program.add_prepared_launch(launch);
    }

    /// Creates the launch of a denoising kernel over `items` items of each of `layers` layers,
    /// without adding it to the program.
    pub fn create_kernel_launch(
        &self,
        kernel: &KernelSpec<DenoiseLaunchSizes>,
        [items, layers]: [usize; 2],
        arguments: impl LaunchArgumentList,
    ) -> KernelLaunchStep {
        let items = DenoiseLaunchSizes {
            model: self.run.shape.model,
            rows_or_elements: items,
            layers_per_launch: layers,
        };
        let launch = self.program.make_kernel_launch(kernel, &items, arguments);
        if self.uses_programmatic_launch {
            launch.with_programmatic_dependent_launch()
        } else {
            launch
        }
    }
}

/// Times of a denoising loop's steps: 1 first, then each lower by `1/steps`.
fn times_of_denoising_steps(steps: usize) -> Vec<f64> {
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
    fn denoising_times_begin_at_one_and_stop_before_zero() {
        let times = times_of_denoising_steps(10);
        assert_eq!((times.len(), times[0]), (10, 1.0));
        assert!((times[9] - 0.1).abs() < 1e-12);
    }
}
