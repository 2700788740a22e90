//! A second implementation of the network on an autodiff tape, scalar by scalar; tests compare the
//! reference and its gradient with it. The tape implementation shares no arithmetic code with the
//! reference and the benchmarked implementations.

use super::network::{CLASSIFIER_CLASS_COUNT, ConvolutionLayer, FeatureMapExtents};
use super::shape::ResNetParameters;
use kernelgate::workload::Tensors;

/// Index of a scalar on the tape of automatic differentiation.
type TapeScalarIndex = usize;

/// Tape of automatic differentiation: scalars in the order of their computation, each with its
/// derivatives with respect to the scalars that it was computed from.
#[derive(Default)]
struct AutodiffTape {
    scalar_values: Vec<f64>,
    derivatives: Vec<Vec<(TapeScalarIndex, f64)>>,
}

impl AutodiffTape {
    fn append_scalar_with_derivatives(
        &mut self,
        value: f64,
        derivatives: Vec<(TapeScalarIndex, f64)>,
    ) -> TapeScalarIndex {
        self.scalar_values.push(value);
        self.derivatives.push(derivatives);
        self.scalar_values.len() - 1
    }

    fn append_input_scalar(&mut self, value: f64) -> TapeScalarIndex {
        self.append_scalar_with_derivatives(value, Vec::new())
    }

    /// Appends the linear combination `Σ factor·node` to the autodiff tape.
    fn append_linear_combination(&mut self, terms: &[(TapeScalarIndex, f64)]) -> TapeScalarIndex {
        let value = terms.iter().map(|(node, factor)| factor * self.scalar_values[*node]).sum();
        self.append_scalar_with_derivatives(value, terms.to_vec())
    }

    /// Appends the scaled dot product `factor·Σ a·b` to the autodiff tape.
    fn append_scaled_dot_product(
        &mut self,
        pairs: &[(TapeScalarIndex, TapeScalarIndex)],
        factor: f64,
    ) -> TapeScalarIndex {
        let value: f64 =
            pairs.iter().map(|(a, b)| self.scalar_values[*a] * self.scalar_values[*b]).sum();
        let derivatives = pairs.iter().flat_map(|&(a, b)| {
            [(a, factor * self.scalar_values[b]), (b, factor * self.scalar_values[a])]
        });
        let derivatives = derivatives.collect();
        self.append_scalar_with_derivatives(factor * value, derivatives)
    }

    /// Derivatives of the scalar `of` with respect to every scalar on the autodiff tape.
    fn derivatives_by_all_scalars(&self, of: TapeScalarIndex) -> Vec<f64> {
        let mut gradient = vec![0.0; self.scalar_values.len()];
        gradient[of] = 1.0;
        for node in (0..=of).rev() {
            for &(from, derivative) in &self.derivatives[node] {
                gradient[from] += gradient[node] * derivative;
            }
        }
        gradient
    }
}

/// State of one ST-BIF neuron on the autodiff tape: its membrane and its tracer.
#[derive(Clone, Copy)]
struct TapeNeuronState {
    membrane: TapeScalarIndex,
    spike_sum: TapeScalarIndex,
}

/// The ResNet-18 network, computed forward and backward on an autodiff tape.
pub struct TapeResNet<'a> {
    shape: &'a ResNetParameters,
    tape: AutodiffTape,
    parameters: Vec<TapeScalarIndex>,
    /// Sum of each neuron's spikes over time, layer by layer, `[B, side, side, channels]`.
    pub spike_sums_by_layer: Vec<Vec<f64>>,
    /// Logits of the images, `[B, 10]`.
    pub logits: Vec<f64>,
    /// Mean cross entropy of the logits over the images.
    pub mean_loss: f64,
    /// Gradient of the mean loss with respect to each parameter.
    pub parameter_gradient: Vec<f64>,
}

impl<'a> TapeResNet<'a> {
    /// Runs the network on the inputs, forward and backward, on an autodiff tape.
    pub fn run_on_inputs(shape: &'a ResNetParameters, inputs: &Tensors) -> Self {
        let mut tape = AutodiffTape::default();
        let mut leaves = |name: &str| -> Vec<TapeScalarIndex> {
            let tensor = inputs.tensor(name);
            tensor
                .elements_to_f64(0, tensor.len())
                .into_iter()
                .map(|x| tape.append_input_scalar(x))
                .collect()
        };
        let (images, parameters) = (leaves("images"), leaves("parameters"));
        let labels = inputs.tensor("labels").elements_to_f64(0, shape.batch_size);
        let mut plain = Self {
            shape,
            tape,
            parameters,
            spike_sums_by_layer: vec![
                Vec::new();
                shape
                    .sizes
                    .build_resnet18_layers()
                    .extents_of_neuron_layers()
                    .len()
            ],
            logits: Vec::new(),
            mean_loss: 0.0,
            parameter_gradient: Vec::new(),
        };
        let size = shape.sizes.image_extents().elements_per_frame();
        let mut losses = Vec::new();
        for (image, label) in images.chunks(size).zip(labels) {
            let logits = plain.logits_of_image(image);
            plain.logits.extend(logits.iter().map(|&node| plain.tape.scalar_values[node]));
            losses.push((
                plain.cross_entropy_of_image_on_tape(&logits, label as usize),
                1.0 / shape.batch_size as f64,
            ));
        }
        let loss = plain.tape.append_linear_combination(&losses);
        plain.mean_loss = plain.tape.scalar_values[loss];
        let gradient = plain.tape.derivatives_by_all_scalars(loss);
        plain.parameter_gradient = plain.parameters.iter().map(|&node| gradient[node]).collect();
        plain
    }

    fn logits_of_image(&mut self, image: &[TapeScalarIndex]) -> Vec<TapeScalarIndex> {
        let network = self.shape.sizes.build_resnet18_layers();
        let theta = self.shape.neuron_parameters().firing_threshold;
        let steps = self.shape.time_steps_to_spread_image() as f64;
        let maps = network.extents_of_neuron_layers();
        let mut states: Vec<Vec<TapeNeuronState>> = Vec::new();
        for map in &maps {
            let state = |tape: &mut AutodiffTape| TapeNeuronState {
                membrane: tape.append_input_scalar(0.5 * theta),
                spike_sum: tape.append_input_scalar(0.0),
            };
            states.push((0..map.elements_per_frame()).map(|_| state(&mut self.tape)).collect());
        }
        let mut pooled: Option<Vec<TapeScalarIndex>> = None;
        let mut totals: Vec<Vec<(TapeScalarIndex, f64)>> = vec![Vec::new(); CLASSIFIER_CLASS_COUNT];
        for t in 0..self.shape.time_steps {
            let fed = (t as f64) < steps;
            let image = image.iter().map(|&x| (x, if fed { 1.0 / steps } else { 0.0 }));
            let image: Vec<TapeScalarIndex> =
                image.map(|term| self.tape.append_linear_combination(&[term])).collect();
            let currents = self.convolve_frame_on_tape(&network.stem, &image, 1.0, fed);
            let mut spikes = self.advance_neurons_by_time_step(&mut states[0], &currents);
            if let Some(pool) = &network.pool {
                let sums: Vec<TapeScalarIndex> =
                    states[0].iter().map(|state| state.spike_sum).collect();
                let now = self.max_pool_on_tape(pool.input_extents, pool.output_extents, &sums);
                let before = pooled.replace(now.clone());
                spikes = (0..now.len())
                    .map(|i| match &before {
                        Some(before) => {
                            self.tape.append_linear_combination(&[(now[i], 1.0), (before[i], -1.0)])
                        }
                        None => now[i],
                    })
                    .collect();
            }
            for (number, block) in network.blocks.iter().enumerate() {
                let currents = self.convolve_frame_on_tape(&block.first, &spikes, theta, fed);
                let hidden =
                    self.advance_neurons_by_time_step(&mut states[2 * number + 1], &currents);
                let branch = self.convolve_frame_on_tape(&block.second, &hidden, theta, fed);
                let (shortcut, factor) = match &block.shortcut {
                    Some(conv) => (self.convolve_frame_on_tape(conv, &spikes, theta, fed), 1.0),
                    None => (spikes, theta),
                };
                let sum = |(&x, &y): (&TapeScalarIndex, &TapeScalarIndex)| {
                    self.tape.append_linear_combination(&[(x, 1.0), (y, factor)])
                };
                let currents: Vec<TapeScalarIndex> =
                    branch.iter().zip(&shortcut).map(sum).collect();
                spikes = self.advance_neurons_by_time_step(&mut states[2 * number + 2], &currents);
            }
            let logits = self.append_logits_of_time_step(
                &spikes,
                network.last_feature_map(),
                network.first_classifier_weight_index,
                fed,
            );
            totals.iter_mut().zip(logits).for_each(|(total, node)| total.push((node, 1.0)));
        }
        for (tracers, states) in self.spike_sums_by_layer.iter_mut().zip(&states) {
            tracers.extend(states.iter().map(|state| self.tape.scalar_values[state.spike_sum]));
        }
        totals.iter().map(|terms| self.tape.append_linear_combination(terms)).collect()
    }

    /// Computes a convolution `factor·conv(input)` on the tape, plus the bias if the time step is
    /// fed.
    fn convolve_frame_on_tape(
        &mut self,
        conv: &ConvolutionLayer,
        input: &[TapeScalarIndex],
        factor: f64,
        fed: bool,
    ) -> Vec<TapeScalarIndex> {
        let (from, to) = (conv.window.input_extents, conv.window.output_extents);
        let (k, stride) = (conv.window.window_side as isize, conv.window.stride_pixels as isize);
        let inside = |x: isize| (0..from.side_pixels as isize).contains(&x);
        let mut output = Vec::new();
        for row in 0..to.side_pixels as isize {
            for column in 0..to.side_pixels as isize {
                for filter in 0..to.channels {
                    let mut pairs = Vec::new();
                    for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
                        let (y, x) = (row * stride + i - k / 2, column * stride + j - k / 2);
                        if !inside(y) || !inside(x) {
                            continue;
                        }
                        for channel in 0..from.channels {
                            let tap = filter * (k * k) as usize + (i * k + j) as usize;
                            let pixel = y as usize * from.side_pixels + x as usize;
                            pairs.push((
                                self.parameters
                                    [conv.first_weight_index + tap * from.channels + channel],
                                input[pixel * from.channels + channel],
                            ));
                        }
                    }
                    let sum = self.tape.append_scaled_dot_product(&pairs, factor);
                    let share = if fed {
                        1.0 / self.shape.time_steps_to_spread_image() as f64
                    } else {
                        0.0
                    };
                    let bias = self.parameters[conv.index_of_first_bias() + filter];
                    output.push(self.tape.append_linear_combination(&[(sum, 1.0), (bias, share)]));
                }
            }
        }
        output
    }

    /// Computes one time step of a neuron layer on the tape: updates the neurons' states and
    /// returns their spikes.
    fn advance_neurons_by_time_step(
        &mut self,
        states: &mut [TapeNeuronState],
        currents: &[TapeScalarIndex],
    ) -> Vec<TapeScalarIndex> {
        let parameters = self.shape.neuron_parameters();
        let (theta, top) = (parameters.firing_threshold, f64::from(parameters.tracer_max));
        let bell = |z: f64, w: f64| (-z * z / (2.0 * (0.405 * w) * (0.405 * w))).exp() / w;
        let mut spikes = Vec::new();
        for (state, &x) in states.iter_mut().zip(currents) {
            let h = self.tape.append_linear_combination(&[(state.membrane, 1.0), (x, 1.0)]);
            let (membrane, c) =
                (self.tape.scalar_values[h], self.tape.scalar_values[state.spike_sum]);
            let (mut spike, mut by_h, mut by_c) = (0.0, 0.0, 0.0);
            if c < top {
                by_h += bell(membrane - theta, theta);
            }
            if c > 0.0 {
                by_h += bell(membrane, theta);
            }
            if membrane >= theta {
                by_c -= bell(top - c, 1.0);
                spike = if c < top { 1.0 } else { 0.0 };
            }
            if membrane < 0.0 {
                by_c -= bell(c, 1.0);
                spike = if c > 0.0 { -1.0 } else { 0.0 };
            }
            let s = self
                .tape
                .append_scalar_with_derivatives(spike, vec![(h, by_h), (state.spike_sum, by_c)]);
            state.membrane = self.tape.append_linear_combination(&[(h, 1.0), (s, -theta)]);
            state.spike_sum =
                self.tape.append_linear_combination(&[(state.spike_sum, 1.0), (s, 1.0)]);
            spikes.push(s);
        }
        spikes
    }

    /// Max-pools sums of spikes: returns the first maximum of the 3×3 window around every second
    /// pixel.
    fn max_pool_on_tape(
        &mut self,
        from: FeatureMapExtents,
        to: FeatureMapExtents,
        sums: &[TapeScalarIndex],
    ) -> Vec<TapeScalarIndex> {
        let mut output = Vec::new();
        for pixel in 0..to.pixels_per_frame() {
            let (row, column) = (pixel / to.side_pixels, pixel % to.side_pixels);
            for channel in 0..to.channels {
                let mut best: Option<TapeScalarIndex> = None;
                for y in (2 * row).saturating_sub(1)..(2 * row + 2).min(from.side_pixels) {
                    for x in (2 * column).saturating_sub(1)..(2 * column + 2).min(from.side_pixels)
                    {
                        let node = sums[(y * from.side_pixels + x) * from.channels + channel];
                        let larger =
                            |best| self.tape.scalar_values[node] > self.tape.scalar_values[best];
                        if best.is_none_or(larger) {
                            best = Some(node);
                        }
                    }
                }
                let best = best.expect("a window has a pixel");
                output.push(self.tape.append_linear_combination(&[(best, 1.0)]));
            }
        }
        output
    }

    fn append_logits_of_time_step(
        &mut self,
        spikes: &[TapeScalarIndex],
        map: FeatureMapExtents,
        at: usize,
        fed: bool,
    ) -> Vec<TapeScalarIndex> {
        let scale = self.shape.neuron_parameters().firing_threshold / map.pixels_per_frame() as f64;
        let of_channel = |channel: usize| -> Vec<(TapeScalarIndex, f64)> {
            (0..map.pixels_per_frame())
                .map(|pixel| (spikes[pixel * map.channels + channel], scale))
                .collect()
        };
        let features: Vec<TapeScalarIndex> = (0..map.channels)
            .map(|channel| self.tape.append_linear_combination(&of_channel(channel)))
            .collect();
        let share = if fed { 1.0 / self.shape.time_steps_to_spread_image() as f64 } else { 0.0 };
        (0..CLASSIFIER_CLASS_COUNT)
            .map(|class| {
                let row = &self.parameters[at + class * map.channels..][..map.channels];
                let pairs: Vec<_> = row.iter().copied().zip(features.iter().copied()).collect();
                let sum = self.tape.append_scaled_dot_product(&pairs, 1.0);
                let bias = self.parameters[at + CLASSIFIER_CLASS_COUNT * map.channels + class];
                self.tape.append_linear_combination(&[(sum, 1.0), (bias, share)])
            })
            .collect()
    }

    fn cross_entropy_of_image_on_tape(
        &mut self,
        logits: &[TapeScalarIndex],
        label: usize,
    ) -> TapeScalarIndex {
        let powers: Vec<f64> =
            logits.iter().map(|&node| self.tape.scalar_values[node].exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut derivatives: Vec<(TapeScalarIndex, f64)> =
            logits.iter().zip(&powers).map(|(&node, power)| (node, power / sum)).collect();
        derivatives.push((logits[label], -1.0));
        let loss = sum.ln() - self.tape.scalar_values[logits[label]];
        self.tape.append_scalar_with_derivatives(loss, derivatives)
    }
}
