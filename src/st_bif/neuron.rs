//! Equations of one ST-BIF neuron in fp64: the reference against which every implementation is
//! verified.

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StBifNeuronParameters {
    /// θ > 0.
    pub firing_threshold: f64,
    /// Tmin ≤ 0.
    pub tracer_min: i32,
    /// Tmax > 0.
    pub tracer_max: i32,
    /// Prefire p: a head start p·θ of the membrane, which is subtracted again over the first Tmax
    /// time steps; usually 0.
    pub prefire_fraction_of_threshold: f64,
}

/// Values of one ST-BIF neuron in one time step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NeuronTimeStep {
    /// Spike s that the neuron emits in the time step: -1, 0 or 1.
    pub spike: i8,
    /// Membrane H of the neuron after its input current and before its spike.
    pub membrane_before_spike: f64,
    /// Tracer c of the neuron before the time step.
    pub tracer_before_step: i32,
}

/// Results of one neuron's forward pass over all time steps: spikes, membranes and tracers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NeuronSimulation {
    /// Values of the neuron, one entry for each time step.
    pub steps: Vec<NeuronTimeStep>,
    /// Membrane v of the neuron after the last time step.
    pub final_membrane: f64,
    /// Tracer c of the neuron after the last time step.
    pub final_tracer: i32,
}

/// Simulates one ST-BIF neuron in fp64 on its input current `x[t]`, over all time steps.
///
/// The neuron's equations are `v += x; H = v; s = [v ≥ θ ∧ c < Tmax] - [v < 0 ∧ c > Tmin]; v -=
/// θ·s; c += s`, starting from `v = (0.5 + p)·θ`, `c = 0`.
pub fn simulate_neuron(parameters: &StBifNeuronParameters, x: &[f64]) -> NeuronSimulation {
    let mut trace = NeuronSimulation::default();
    simulate_neuron_into(parameters, x, &mut trace);
    trace
}

/// Like [`simulate_neuron`], but reuses the memory of an earlier simulation.
pub fn simulate_neuron_into(
    parameters: &StBifNeuronParameters,
    x: &[f64],
    trace: &mut NeuronSimulation,
) {
    let StBifNeuronParameters {
        firing_threshold: threshold,
        tracer_min,
        tracer_max,
        prefire_fraction_of_threshold: prefire,
    } = *parameters;
    let mut membrane = (0.5 + prefire) * threshold;
    let mut tracer = 0;
    trace.steps.clear();
    for (t, current) in x.iter().enumerate() {
        membrane += current;
        let spike = i8::from(membrane >= threshold && tracer < tracer_max)
            - i8::from(membrane < 0.0 && tracer > tracer_min);
        trace.steps.push(NeuronTimeStep {
            spike,
            membrane_before_spike: membrane,
            tracer_before_step: tracer,
        });
        membrane -= threshold * f64::from(spike);
        if (t as i64) < i64::from(tracer_max) {
            membrane -= prefire * threshold / f64::from(tracer_max);
        }
        tracer += i32::from(spike);
    }
    (trace.final_membrane, trace.final_tracer) = (membrane, tracer);
}

/// Gaussian surrogate gradient `g(z, w) = exp(-z² / (2·(0.405·w)²)) / w`.
pub fn gaussian_surrogate_gradient(z: f64, width: f64) -> f64 {
    let sigma = 0.405 * width;
    (-z * z / (2.0 * sigma * sigma)).exp() / width
}

/// Computes the gradient of one neuron's input current from `gy[t]`, the gradient of its spikes, in
/// reverse time.
///
/// The gradient's equations are `m = gy - θ·gV + gT; gx = m·a + gV; gT = m·b + gT; gV = gx`. The
/// coefficient `a` is the surrogate at the spike thresholds that the tracer allows, and `b` is the
/// surrogate at the tracer's bounds. The ST-BIF neuron's parameters receive no gradient.
pub fn gradient_of_input_current(
    parameters: &StBifNeuronParameters,
    trace: &NeuronSimulation,
    gy: &[f64],
    grad_membrane: f64,
) -> Vec<f64> {
    let mut gx = vec![0.0; gy.len()];
    write_gradient_of_input_current(parameters, trace, gy, grad_membrane, &mut gx);
    gx
}

/// Like [`gradient_of_input_current`], but writes into `gx`, which is as long as `gy`.
pub fn write_gradient_of_input_current(
    parameters: &StBifNeuronParameters,
    trace: &NeuronSimulation,
    gy: &[f64],
    grad_membrane: f64,
    gx: &mut [f64],
) {
    let StBifNeuronParameters { firing_threshold: threshold, tracer_min, tracer_max, .. } =
        *parameters;
    let (mut grad_v, mut grad_tracer) = (grad_membrane, 0.0);
    for (t, step) in trace.steps.iter().enumerate().rev() {
        let (h, c) = (step.membrane_before_spike, step.tracer_before_step);
        let mut a = 0.0;
        if c < tracer_max {
            a += gaussian_surrogate_gradient(h - threshold, threshold);
        }
        if c > tracer_min {
            a += gaussian_surrogate_gradient(-h, threshold);
        }
        let mut b = 0.0;
        if h >= threshold {
            b -= gaussian_surrogate_gradient(f64::from(tracer_max - c), 1.0);
        }
        if h < 0.0 {
            b -= gaussian_surrogate_gradient(f64::from(c - tracer_min), 1.0);
        }
        let m = gy[t] - threshold * grad_v + grad_tracer;
        gx[t] = m * a + grad_v;
        grad_tracer += m * b;
        grad_v = gx[t];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARAMETERS_OF_RECORDED_NEURON: StBifNeuronParameters = StBifNeuronParameters {
        firing_threshold: 0.5,
        tracer_min: 0,
        tracer_max: 3,
        prefire_fraction_of_threshold: 0.0,
    };
    const CURRENTS_OF_RECORDED_NEURON: [f64; 8] = [0.375, 0.375, 0.375, 0.0, -0.5, 0.0, 1.0, 0.0];

    #[test]
    fn the_simulated_neuron_equals_recorded_spikes_and_membranes() {
        let trace = simulate_neuron(&PARAMETERS_OF_RECORDED_NEURON, &CURRENTS_OF_RECORDED_NEURON);
        let spikes: Vec<i8> = trace.steps.iter().map(|step| step.spike).collect();
        let membranes: Vec<f64> =
            trace.steps.iter().map(|step| step.membrane_before_spike).collect();
        assert_eq!(spikes, [1, 1, 0, 0, -1, 0, 1, 1]);
        assert_eq!(membranes, [0.625, 0.5, 0.375, 0.375, -0.125, 0.375, 1.375, 0.875]);
        assert_eq!((trace.final_membrane, trace.final_tracer), (0.375, 3));
    }

    #[test]
    fn the_neurons_current_gradient_equals_recorded_values() {
        let trace = simulate_neuron(&PARAMETERS_OF_RECORDED_NEURON, &CURRENTS_OF_RECORDED_NEURON);
        let unused =
            [1.905115, 1.905115, 1.905115, 1.905104, 1.906784, 1.915235, 0.360356, 0.36022];
        let used = [1.952557, 1.952557, 1.952557, 1.952552, 1.953392, 1.957617, 1.180178, 1.18011];
        for (grad_membrane, golden) in [(0.0, unused), (1.0, used)] {
            for (gx, golden) in gradient_of_input_current(
                &PARAMETERS_OF_RECORDED_NEURON,
                &trace,
                &[1.0; 8],
                grad_membrane,
            )
            .iter()
            .zip(golden)
            {
                assert!((gx - golden).abs() < 1e-6, "{gx} is not {golden}");
            }
        }
    }

    prop_compose! {
        fn any_neuron_parameters()(
            threshold in 1u32..16,
            tracer_max in 1i32..8,
            tracer_min in -8i32..=0,
        ) -> StBifNeuronParameters {
            StBifNeuronParameters {
                firing_threshold: f64::from(threshold) / 8.0,
                tracer_min,
                tracer_max,
                prefire_fraction_of_threshold: 0.0,
            }
        }
    }

    prop_compose! {
        /// Test currents are multiples of 1/64, so that sums of currents stay exact.
        fn random_currents()(x in prop::collection::vec(-256i32..256, 1..40)) -> Vec<f64> {
            x.into_iter().map(|x| f64::from(x) / 64.0).collect()
        }
    }

    proptest! {
        #[test]
        fn membrane_change_equals_currents_minus_theta_times_spikes(parameters in any_neuron_parameters(), x in random_currents()) {
            let trace = simulate_neuron(&parameters, &x);
            let charge = x.iter().sum::<f64>() + 0.5 * parameters.firing_threshold;
            prop_assert_eq!(
                charge,
                parameters.firing_threshold * f64::from(trace.final_tracer) + trace.final_membrane
            );
        }

        #[test]
        fn prefire_is_repaid_after_tmax_time_steps(parameters in any_neuron_parameters(), x in random_currents()) {
            let parameters = StBifNeuronParameters { prefire_fraction_of_threshold: 0.25, ..parameters };
            let trace = simulate_neuron(&parameters, &x);
            let paid = (x.len() as f64).min(f64::from(parameters.tracer_max))
                / f64::from(parameters.tracer_max);
            let charge = x.iter().sum::<f64>() + parameters.firing_threshold * (0.5 + 0.25 * (1.0 - paid));
            let held = parameters.firing_threshold * f64::from(trace.final_tracer) + trace.final_membrane;
            prop_assert!((charge - held).abs() < 1e-9, "{} {}", charge, held);
        }

        #[test]
        fn the_tracer_equals_the_spike_sum_and_stays_within_its_bounds(
            parameters in any_neuron_parameters(),
            x in random_currents(),
        ) {
            let trace = simulate_neuron(&parameters, &x);
            let mut tracer = 0;
            for step in &trace.steps {
                prop_assert_eq!(step.tracer_before_step, tracer);
                tracer += i32::from(step.spike);
                prop_assert!((parameters.tracer_min..=parameters.tracer_max).contains(&tracer));
                prop_assert!((-1..=1).contains(&step.spike));
            }
            prop_assert_eq!(trace.final_tracer, tracer);
        }

        #[test]
        fn the_spike_sum_of_a_settled_neuron_is_its_quantised_input(parameters in any_neuron_parameters(), x in random_currents()) {
            let mut padded = x.clone();
            padded.resize(x.len() + 4000, 0.0);
            let quantised = (x.iter().sum::<f64>() / parameters.firing_threshold + 0.5).floor();
            let clipped =
                quantised.clamp(f64::from(parameters.tracer_min), f64::from(parameters.tracer_max));
            prop_assert_eq!(f64::from(simulate_neuron(&parameters, &padded).final_tracer), clipped);
        }

        #[test]
        fn the_current_gradient_is_linear_in_the_spike_gradient(
            parameters in any_neuron_parameters(),
            x in random_currents(),
            factor in -4.0f64..4.0,
        ) {
            let trace = simulate_neuron(&parameters, &x);
            let gy: Vec<f64> = x.iter().map(|x| x.sin()).collect();
            let scaled: Vec<f64> = gy.iter().map(|g| g * factor).collect();
            let (one, many) = (
                gradient_of_input_current(&parameters, &trace, &gy, 0.5),
                gradient_of_input_current(&parameters, &trace, &scaled, 0.5 * factor),
            );
            for (one, many) in one.iter().zip(many) {
                prop_assert!((one * factor - many).abs() <= 1e-9 * (1.0 + many.abs()));
            }
        }
    }
}
