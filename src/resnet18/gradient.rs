//! Gradient of the ResNet-18 reference in fp64: cross entropy, then backward through layers and
//! time.

use super::convolution::{convolution_input_gradient_in_f64, convolution_weight_gradient_in_f64};
use super::network::{CLASSIFIER_CLASS_COUNT, ConvolutionLayer, SlidingWindow};
use super::reference::{
    ForwardPassResults, NeuronLayerResults, ResNetReference, indices_of_first_maxima,
};
use crate::parallel;
use crate::st_bif::neuron::{self, NeuronSimulation};
use kernelgate::workload::Tensors;
use kernelgate::workload::tensor::split_rows_into_column_blocks;

/// Number of neurons that one parallel CPU task of the reference simulates backward.
const NEURONS_PER_BACKWARD_TASK: usize = 4096;

impl ResNetReference<'_> {
    /// Computes the fp64 loss of a forward pass and the gradient of every parameter.
    pub fn loss_and_parameter_gradients(
        &self,
        inputs: &Tensors,
        forward: &ForwardPassResults,
    ) -> (f64, Vec<f64>) {
        let labels = inputs.tensor("labels").elements_to_f64(0, self.shape.batch_size);
        let (loss, logits) = mean_cross_entropy_and_logit_gradient(&forward.logits, &labels);
        let mut gradient = vec![0.0; self.parameters.len()];
        let features = self.backpropagate_through_classifier(forward, &logits, &mut gradient);
        let mut spikes = self.feature_gradient_to_spike_gradient(&features);
        for number in (0..self.network.blocks.len()).rev() {
            spikes = self.backpropagate_through_block(number, forward, &spikes, &mut gradient);
        }
        if let Some(pool) = &self.network.pool {
            spikes = self.gradient_before_max_pooling(pool, &forward.layers[0].spikes, &spikes);
        }
        self.weight_and_bias_gradients_of_stem(
            inputs,
            &self.spike_gradient_to_current_gradient(&forward.layers[0], &spikes),
            &mut gradient,
        );
        (loss, gradient)
    }

    /// Computes the gradients of the classifier's weight and bias; returns the gradient of the
    /// features, `[B, features]`.
    fn backpropagate_through_classifier(
        &self,
        forward: &ForwardPassResults,
        logits: &[f64],
        gradient: &mut [f64],
    ) -> Vec<f64> {
        let width = self.network.last_feature_map().channels;
        let at = self.network.first_classifier_weight_index;
        let weight = &self.parameters[at..][..CLASSIFIER_CLASS_COUNT * width];
        let share = self.shape.time_steps_fed_with_image() as f64
            / self.shape.time_steps_to_spread_image() as f64;
        let (to_weight, to_bias) = gradient[at..].split_at_mut(CLASSIFIER_CLASS_COUNT * width);
        let mut to_features = vec![0.0; forward.features.len()];
        let images = forward.features.chunks(width).zip(to_features.chunks_mut(width));
        for ((features, to_features), logits) in images.zip(logits.chunks(CLASSIFIER_CLASS_COUNT)) {
            for (class, g) in logits.iter().enumerate() {
                let row = class * width..(class + 1) * width;
                to_bias[class] += share * g;
                let weights = to_weight[row.clone()].iter_mut().zip(features);
                weights.for_each(|(to, f)| *to += g * f);
                let features = to_features.iter_mut().zip(&weight[row]);
                features.for_each(|(to, w)| *to += g * w);
            }
        }
        to_features
    }

    /// Computes the gradient of the last layer's spikes from that of the features; it is equal in
    /// every time step and at every pixel.
    fn feature_gradient_to_spike_gradient(&self, features: &[f64]) -> Vec<f64> {
        let map = self.network.last_feature_map();
        let scale = self.shape.neuron_parameters().firing_threshold / map.pixels_per_frame() as f64;
        let of_image = |features: &[f64]| {
            let pixel: Vec<f64> = features.iter().map(|g| scale * g).collect();
            pixel.repeat(map.pixels_per_frame())
        };
        let step: Vec<f64> = features.chunks(map.channels).flat_map(of_image).collect();
        step.repeat(self.shape.time_steps)
    }

    /// Computes a residual block's parameter gradients, and the gradient of its input spikes from
    /// that of its output spikes.
    fn backpropagate_through_block(
        &self,
        number: usize,
        forward: &ForwardPassResults,
        spikes: &[f64],
        gradient: &mut [f64],
    ) -> Vec<f64> {
        let block = &self.network.blocks[number];
        let theta = self.shape.neuron_parameters().firing_threshold;
        let (hidden, output) = (&forward.layers[2 * number + 1], &forward.layers[2 * number + 2]);
        let input = forward.input_spikes_of_block(number);

        let currents = self.spike_gradient_to_current_gradient(output, spikes);
        self.weight_and_bias_gradients_of_convolution(
            &block.second,
            &hidden.spikes,
            &currents,
            gradient,
        );
        let to_hidden = convolution_input_gradient_in_f64(
            &block.second,
            self.weight_of_convolution(&block.second),
            &currents,
            theta,
        );
        let inner = self.spike_gradient_to_current_gradient(hidden, &to_hidden);
        self.weight_and_bias_gradients_of_convolution(&block.first, input, &inner, gradient);
        let mut to_input = convolution_input_gradient_in_f64(
            &block.first,
            self.weight_of_convolution(&block.first),
            &inner,
            theta,
        );
        match &block.shortcut {
            Some(conv) => {
                self.weight_and_bias_gradients_of_convolution(conv, input, &currents, gradient);
                let more = convolution_input_gradient_in_f64(
                    conv,
                    self.weight_of_convolution(conv),
                    &currents,
                    theta,
                );
                to_input.iter_mut().zip(more).for_each(|(to, x)| *to += x);
            }
            None => to_input.iter_mut().zip(&currents).for_each(|(to, x)| *to += theta * x),
        }
        to_input
    }

    /// Computes the fp64 gradient of a neuron layer's input currents from the gradient of its
    /// spikes.
    fn spike_gradient_to_current_gradient(
        &self,
        neurons: &NeuronLayerResults,
        spikes: &[f64],
    ) -> Vec<f64> {
        let (t, n) = (self.shape.time_steps, spikes.len() / self.shape.time_steps);
        let parameters = self.shape.neuron_parameters();
        let mut currents = vec![0.0; spikes.len()];
        parallel::run_tasks_in_parallel(
            split_rows_into_column_blocks(&mut currents, n, NEURONS_PER_BACKWARD_TASK),
            &|task, mut rows| {
                let mut trace = NeuronSimulation::default();
                let [mut x, mut gy, mut gx] = [(); 3].map(|()| vec![0.0; t]);
                for column in 0..rows[0].len() {
                    let at = task * NEURONS_PER_BACKWARD_TASK + column;
                    x.iter_mut()
                        .enumerate()
                        .for_each(|(t, x)| *x = neurons.input_currents[t * n + at]);
                    gy.iter_mut().enumerate().for_each(|(t, g)| *g = spikes[t * n + at]);
                    neuron::simulate_neuron_into(&parameters, &x, &mut trace);
                    neuron::write_gradient_of_input_current(&parameters, &trace, &gy, 0.0, &mut gx);
                    rows.iter_mut().zip(&gx).for_each(|(row, &g)| row[column] = g);
                }
            },
        );
        currents
    }

    /// Computes the gradients of a convolution's weight and bias from the gradient of its output
    /// currents.
    fn weight_and_bias_gradients_of_convolution(
        &self,
        conv: &ConvolutionLayer,
        input: &[i8],
        output: &[f64],
        gradient: &mut [f64],
    ) {
        let theta = self.shape.neuron_parameters().firing_threshold;
        let weight = convolution_weight_gradient_in_f64(conv, input, output, theta);
        gradient[conv.first_weight_index..conv.index_of_first_bias()].copy_from_slice(&weight);
        self.write_bias_gradient_over_fed_steps(conv, output, gradient);
    }

    fn write_bias_gradient_over_fed_steps(
        &self,
        conv: &ConvolutionLayer,
        output: &[f64],
        gradient: &mut [f64],
    ) {
        let channels = conv.window.output_extents.channels;
        let fed = self.shape.time_steps_fed_with_image()
            * self.shape.batch_size
            * conv.window.output_extents.elements_per_frame();
        let to = &mut gradient[conv.index_of_first_bias()..][..channels];
        for pixel in output[..fed].chunks(channels) {
            to.iter_mut().zip(pixel).for_each(|(to, g)| *to += g);
        }
        to.iter_mut().for_each(|to| *to /= self.shape.time_steps_to_spread_image() as f64);
    }

    /// Computes the gradients of the stem's weight and bias; the stem's input is the same image in
    /// every fed time step.
    fn weight_and_bias_gradients_of_stem(
        &self,
        inputs: &Tensors,
        currents: &[f64],
        gradient: &mut [f64],
    ) {
        let stem = &self.network.stem;
        let images = inputs.tensor("images");
        let images = images.elements_to_f64(0, images.len());
        let mut sum = vec![0.0; currents.len() / self.shape.time_steps];
        for step in currents.chunks(sum.len()).take(self.shape.time_steps_fed_with_image()) {
            sum.iter_mut().zip(step).for_each(|(sum, g)| *sum += g);
        }
        let weight = convolution_weight_gradient_in_f64(
            stem,
            &images,
            &sum,
            1.0 / self.shape.time_steps_to_spread_image() as f64,
        );
        gradient[stem.first_weight_index..stem.index_of_first_bias()].copy_from_slice(&weight);
        self.write_bias_gradient_over_fed_steps(stem, currents, gradient);
    }

    /// Computes the gradient of the spikes before max pooling from the gradient of the pooled
    /// spikes. A spike counts in the spike sums of all later steps, so its gradient is the
    /// pooling's gradient of its own step minus that of the next step.
    fn gradient_before_max_pooling(
        &self,
        pool: &SlidingWindow,
        spikes: &[i8],
        pooled: &[f64],
    ) -> Vec<f64> {
        let (input, output) = (
            self.shape.batch_size * pool.input_extents.elements_per_frame(),
            self.shape.batch_size * pool.output_extents.elements_per_frame(),
        );
        let mut sums = vec![0i8; input];
        // Index of the input element with the maximum sum, for each pooled output in each time
        // step.
        let mut sources = Vec::with_capacity(self.shape.time_steps);
        for spikes in spikes.chunks(input) {
            sums.iter_mut().zip(spikes).for_each(|(sum, s)| *sum += s);
            sources.push(indices_of_first_maxima(pool, &sums).collect::<Vec<_>>());
        }
        let mut gradient = vec![0.0; spikes.len()];
        let (mut after, mut next) = (vec![0.0; input], vec![0.0; output]);
        for t in (0..self.shape.time_steps).rev() {
            let now = &pooled[t * output..][..output];
            for ((&at, now), next) in sources[t].iter().zip(now).zip(&next) {
                after[at] += now - next;
            }
            next = now.to_vec();
            gradient[t * input..][..input].copy_from_slice(&after);
        }
        gradient
    }
}

/// Computes the mean over images of `log Σ exp(logits) - logits[label]`, and its gradient with
/// respect to the logits.
pub fn mean_cross_entropy_and_logit_gradient(logits: &[f64], labels: &[f64]) -> (f64, Vec<f64>) {
    let mut loss = 0.0;
    let mut gradient = Vec::with_capacity(logits.len());
    let share = 1.0 / labels.len() as f64;
    for (logits, &label) in logits.chunks(CLASSIFIER_CLASS_COUNT).zip(labels) {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
        loss += share * (sum.ln() + largest - logits[label as usize]);
        gradient.extend(logits.iter().map(|x| share * (x - largest).exp() / sum));
        let first = gradient.len() - CLASSIFIER_CLASS_COUNT;
        gradient[first + label as usize] -= share;
    }
    (loss, gradient)
}
