//! The firing rate on the CPU: blocks of neurons keep their sums in L1 while the inner loop runs
//! over time, so the spikes are read once.

use super::definition::FiringRateProblem;
use crate::parallel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, TensorData, Tensors};

/// Number of neurons of one parallel CPU task: their spike sums, two bytes each, stay in L1.
const NEURONS_PER_FIRING_RATE_TASK: usize = 4096;

/// Maximum number of time steps whose spikes have a sum that fits into a 16-bit integer.
const MAX_STEPS_SUMMED_IN_I16: usize = i16::MAX as usize;

pub const CPU_FIRING_RATE_ROWS: &[Implementation<FiringRateProblem>] = &[Implementation {
    implementation_name: "cpu",
    description: "16-bit sums of 4096 neurons in L1, one pass over the spikes",
    supports: |_| Ok(()),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let FiringRateProblem { neuron_count: n, time_steps: t } = *problem;
        let outputs = Tensors::new().with_output("rate", [n], Dtype::F32);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let TensorData::I8(spikes) = inputs.tensor("spikes").tensor_data() else {
                unreachable!("spikes are i8")
            };
            let scale = 1.0 / t as f32;
            parallel::process_chunks_in_parallel(
                outputs.f32_mut("rate"),
                NEURONS_PER_FIRING_RATE_TASK,
                &|task, rate| {
                    sum_spikes_of_neuron_block(
                        spikes,
                        n,
                        task * NEURONS_PER_FIRING_RATE_TASK,
                        rate,
                    );
                    rate.iter_mut().for_each(|sum| *sum *= scale);
                },
            );
        })
    }),
}];

/// Sums the spikes of a block of neurons, from neuron `first_neuron` on, over all time steps (rows
/// of `n` spikes).
fn sum_spikes_of_neuron_block(
    spikes: &[i8],
    neuron_count: usize,
    first_neuron: usize,
    sums: &mut [f32],
) {
    sums.fill(0.0);
    for steps in spikes.chunks(neuron_count * MAX_STEPS_SUMMED_IN_I16) {
        let mut partial = [0i16; NEURONS_PER_FIRING_RATE_TASK];
        for row in steps.chunks_exact(neuron_count) {
            let row = &row[first_neuron..first_neuron + sums.len()];
            partial.iter_mut().zip(row).for_each(|(sum, &spike)| *sum += i16::from(spike));
        }
        sums.iter_mut().zip(&partial).for_each(|(sum, &partial)| *sum += f32::from(partial));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use kernelgate::backend::LaunchableProblem;
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::Problem;

    #[test]
    fn the_cpu_firing_rate_agrees_with_the_reference_at_odd_sizes() {
        let PrepareFunction::Cpu(prepare) = CPU_FIRING_RATE_ROWS[0].prepare else {
            panic!("a CPU row")
        };
        for (n, t) in [(1, 1), (7, 3), (4095, 8), (4097, 5), (10_000, 16), (3, 40_000)] {
            let problem = FiringRateProblem { neuron_count: n, time_steps: t };
            let inputs = problem.inputs(11);
            let expected = problem.reference(&inputs);
            let mut task = prepare(&problem, Arc::new(inputs));
            task.poison_outputs().unwrap();
            launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance())
                .unwrap_or_else(|error| panic!("n={n} t={t}: {error}"));
        }
    }
}
