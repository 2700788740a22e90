//! Readout of a spiking network: the mean spike of each neuron over all time steps (its firing
//! rate).
//!
//! The firing rate is rate coding: the readout of SpikeZIP-TF (arXiv 2406.03470) averages the
//! outputs of all time steps. Input spikes of the firing rate are bytes with the values -1, 0 and
//! 1, as the workload `st_bif/forward` writes them.
//!
//! The firing rate does not multiply by the threshold, which the next layer's weights include, and
//! reads no packed spikes.

use crate::parallel;
use kernelgate::workload::tensor::split_rows_into_column_blocks;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, InputSymmetry, Problem, Tensor, TensorData,
    Tensors, Tolerance, Work, Workload, random,
};

/// Workload of the firing rate: mean spike of each neuron over all time steps.
pub const FIRING_RATE_WORKLOAD: Workload<FiringRateProblem> = Workload {
    name: "st_bif/rate",
    about: "mean of ternary spikes over T steps: the readout of a spiking network",
    revision: 1,
    axes: &[Axis::number("n", "neurons, flat"), Axis::number("t", "time steps")],
    default_selection_lines: &["n=4194304 t=8"],
    accelerator_selection_lines: &["n=33554432 t=8"],
    thorough_selection_lines: &["n=524288,4194304 t=4,8,16,32"],
    bind: |point| {
        let (n, t) = (point.number("n")?, point.number("t")?);
        // Sums of up to 2^24 spikes are exact in fp32.
        if t > 1 << 24 {
            return Err(AxisError::InvalidCombinationOfValues(format!(
                "t={t}: up to {} time steps",
                1 << 24
            )));
        }
        let elements = n.checked_mul(t).filter(|&elements| elements < 1 << 60);
        elements.ok_or_else(|| {
            AxisError::InvalidCombinationOfValues(
                "more neuron-steps than a 64-bit index holds".to_owned(),
            )
        })?;
        Ok(FiringRateProblem { neuron_count: n, time_steps: t })
    },
};

/// Problem `st_bif/rate`: computes `rate [N]` in f32 from `spikes [T, N]` in {-1, 0, 1}.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FiringRateProblem {
    /// Neurons.
    pub neuron_count: usize,
    /// Number of time steps.
    pub time_steps: usize,
}

/// Number of neurons that one parallel CPU task of the firing rate's reference computes.
const NEURONS_PER_REFERENCE_TASK: usize = 1 << 16;

impl Problem for FiringRateProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        // Samples of N(0, 1) beyond ±1 become spikes: about 31 % of the neurons spike in a time
        // step, half of them +1 and half -1.
        let spike = |x: f32| i8::from(x >= 1.0) - i8::from(x <= -1.0);
        let spikes = random::map_standard_normal_values(
            seed,
            "spikes",
            self.time_steps * self.neuron_count,
            spike,
        );
        let mut inputs = Tensors::new();
        inputs.insert(
            "spikes",
            Tensor::new([self.time_steps, self.neuron_count], TensorData::I8(spikes)),
        );
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let spikes = inputs.tensor("spikes");
        let mut rate = vec![0.0; self.neuron_count];
        parallel::run_tasks_in_parallel(
            split_rows_into_column_blocks(&mut rate, self.neuron_count, NEURONS_PER_REFERENCE_TASK),
            &|task, mut rows| {
                let rate = &mut *rows[0];
                for step in 0..self.time_steps {
                    let row = spikes.elements_to_f64(
                        step * self.neuron_count + task * NEURONS_PER_REFERENCE_TASK,
                        rate.len(),
                    );
                    rate.iter_mut().zip(row).for_each(|(sum, spike)| *sum += spike);
                }
                rate.iter_mut().for_each(|sum| *sum /= self.time_steps as f64);
            },
        );
        vec![Expected::all("rate", [self.neuron_count], rate)]
    }

    /// The neurons are independent of each other, so permuting the neurons of the spikes permutes
    /// the rates.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: &[("spikes", 1)],
            outputs_with_axes: &[("rate", 0)],
        }]
    }

    fn work(&self) -> Work {
        let (n, elements) =
            (self.neuron_count as u64, (self.time_steps * self.neuron_count) as u64);
        // The declared work counts one addition for each spike and one division for each neuron.
        Work::bytes(elements, 4 * n).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            elements + n,
        )
    }

    fn tolerance(&self) -> Tolerance {
        // Sums of spikes are exact; 1/T and the product with 1/T round once each, by up to 2^-24 of
        // the value.
        Tolerance { max_error: 1.5e-7, relative_l2: 1.5e-7 }
    }

    fn host_memory_bytes(&self) -> u64 {
        // Host memory of the firing rate holds the spikes, the fp64 reference and the f32 output.
        (self.time_steps * self.neuron_count + (8 + 4) * self.neuron_count) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems};

    #[test]
    fn the_firing_rate_reference_is_the_mean_over_all_time_steps() {
        let spikes = TensorData::I8([[1, 0, -1], [1, 1, -1], [0, 1, -1], [1, -1, -1]].concat());
        let mut inputs = Tensors::new();
        inputs.insert("spikes", Tensor::new([4, 3], spikes));
        let expected = FiringRateProblem { neuron_count: 3, time_steps: 4 }.reference(&inputs);
        assert_eq!(expected, [Expected::all("rate", [3], vec![0.75, 0.25, -1.0])]);
    }

    #[test]
    fn firing_rate_inputs_are_minus_one_zero_or_one_with_balanced_signs() {
        let inputs = FiringRateProblem { neuron_count: 10_000, time_steps: 4 }.inputs(1);
        let TensorData::I8(spikes) = inputs.tensor("spikes").tensor_data() else { panic!("bytes") };
        let share = |wanted: i8| {
            spikes.iter().filter(|&&spike| spike == wanted).count() as f64 / spikes.len() as f64
        };
        assert!((share(1) - 0.1587).abs() < 0.01 && (share(-1) - 0.1587).abs() < 0.01);
        assert!((share(-1) + share(0) + share(1) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn firing_rate_points_bind_and_overflow_is_declined_with_a_reason() {
        for point in FIRING_RATE_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostAndAcceleratorSizes,
                &[],
            )
            .unwrap()
        {
            assert!((FIRING_RATE_WORKLOAD.bind)(&point).is_ok());
        }
        let work = FiringRateProblem { neuron_count: 10, time_steps: 8 }.work();
        assert_eq!(
            (work.min_read_bytes, work.min_write_bytes, work.flops[0].operations),
            (80, 40, 90)
        );
    }
}
