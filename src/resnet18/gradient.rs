//! Gradient of the reference network in fp64: cross entropy, then backward through layers and time.

use super::convolution::{input_gradient, weight_gradient};
use super::network::{CLASS_COUNT, ConvolutionLayer, ConvolutionWindow};
use super::reference::{ForwardResults, NetworkReference, NeuronLayer, first_maxima};
use crate::parallel;
use crate::st_bif::neuron::{self, NeuronForwardTrace};
use kernelgate::workload::Tensors;
use kernelgate::workload::tensor::split_columns;

/// Number of neurons that one task simulates.
const NEURONS_PER_TASK: usize = 4096;

impl NetworkReference<'_> {
    /// Computes the loss of a forward pass and the gradient of every parameter.
    pub fn loss_and_gradient(&self, inputs: &Tensors, forward: &ForwardResults) -> (f64, Vec<f64>) {
        let labels = inputs.tensor("labels").to_f64(0, self.shape.b);
        let (loss, logits) = cross_entropy(&forward.logits, &labels);
        let mut gradient = vec![0.0; self.parameters.len()];
        let features = self.classifier_parameter_gradients(forward, &logits, &mut gradient);
        let mut spikes = self.last_spike_gradient(&features);
        for number in (0..self.network.blocks.len()).rev() {
            spikes = self.block_gradient(number, forward, &spikes, &mut gradient);
        }
        if let Some(pool) = &self.network.pool {
            spikes = self.pool_gradient(pool, &forward.layers[0].spikes, &spikes);
        }
        self.stem_gradients(
            inputs,
            &self.gradient_through_neurons(&forward.layers[0], &spikes),
            &mut gradient,
        );
        (loss, gradient)
    }

    /// Computes the gradients of the classifier's parameters; returns the gradient of the features,
    /// `[B, features]`.
    fn classifier_parameter_gradients(
        &self,
        forward: &ForwardResults,
        logits: &[f64],
        gradient: &mut [f64],
    ) -> Vec<f64> {
        let width = self.network.last_map().channels;
        let at = self.network.classifier;
        let weight = &self.parameters[at..][..CLASS_COUNT * width];
        let share = self.shape.fed_time_steps() as f64 / self.shape.spread_steps() as f64;
        let (to_weight, to_bias) = gradient[at..].split_at_mut(CLASS_COUNT * width);
        let mut to_features = vec![0.0; forward.features.len()];
        let images = forward.features.chunks(width).zip(to_features.chunks_mut(width));
        for ((features, to_features), logits) in images.zip(logits.chunks(CLASS_COUNT)) {
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

    /// Computes the gradient of the last neurons' spikes, which is the same in every time step and
    /// at every pixel.
    fn last_spike_gradient(&self, features: &[f64]) -> Vec<f64> {
        let map = self.network.last_map();
        let scale = self.shape.neuron().threshold / map.pixel_count() as f64;
        let of_image = |features: &[f64]| {
            let pixel: Vec<f64> = features.iter().map(|g| scale * g).collect();
            pixel.repeat(map.pixel_count())
        };
        let step: Vec<f64> = features.chunks(map.channels).flat_map(of_image).collect();
        step.repeat(self.shape.t)
    }

    /// Computes the gradient of a block's input spikes from the gradient of its output spikes.
    fn block_gradient(
        &self,
        number: usize,
        forward: &ForwardResults,
        spikes: &[f64],
        gradient: &mut [f64],
    ) -> Vec<f64> {
        let block = &self.network.blocks[number];
        let theta = self.shape.neuron().threshold;
        let (hidden, output) = (&forward.layers[2 * number + 1], &forward.layers[2 * number + 2]);
        let input = forward.spikes_read_by_block(number);

        let currents = self.gradient_through_neurons(output, spikes);
        self.convolution_parameter_gradients(&block.second, &hidden.spikes, &currents, gradient);
        let to_hidden = input_gradient(&block.second, self.weight(&block.second), &currents, theta);
        let inner = self.gradient_through_neurons(hidden, &to_hidden);
        self.convolution_parameter_gradients(&block.first, input, &inner, gradient);
        let mut to_input = input_gradient(&block.first, self.weight(&block.first), &inner, theta);
        match &block.shortcut {
            Some(conv) => {
                self.convolution_parameter_gradients(conv, input, &currents, gradient);
                let more = input_gradient(conv, self.weight(conv), &currents, theta);
                to_input.iter_mut().zip(more).for_each(|(to, x)| *to += x);
            }
            None => to_input.iter_mut().zip(&currents).for_each(|(to, x)| *to += theta * x),
        }
        to_input
    }

    /// Computes the gradient of neurons' input currents from the gradient of their spikes.
    fn gradient_through_neurons(&self, neurons: &NeuronLayer, spikes: &[f64]) -> Vec<f64> {
        let (t, n) = (self.shape.t, spikes.len() / self.shape.t);
        let parameters = self.shape.neuron();
        let mut currents = vec![0.0; spikes.len()];
        parallel::for_each_task(
            split_columns(&mut currents, n, NEURONS_PER_TASK),
            &|task, mut rows| {
                let mut trace = NeuronForwardTrace::default();
                let [mut x, mut gy, mut gx] = [(); 3].map(|()| vec![0.0; t]);
                for column in 0..rows[0].len() {
                    let at = task * NEURONS_PER_TASK + column;
                    x.iter_mut().enumerate().for_each(|(t, x)| *x = neurons.currents[t * n + at]);
                    gy.iter_mut().enumerate().for_each(|(t, g)| *g = spikes[t * n + at]);
                    neuron::run_neuron_into(&parameters, &x, &mut trace);
                    neuron::input_gradient_into(&parameters, &trace, &gy, 0.0, &mut gx);
                    rows.iter_mut().zip(&gx).for_each(|(row, &g)| row[column] = g);
                }
            },
        );
        currents
    }

    /// Computes the gradients of a convolution's weight and bias from the gradient of its output.
    fn convolution_parameter_gradients(
        &self,
        conv: &ConvolutionLayer,
        input: &[i8],
        output: &[f64],
        gradient: &mut [f64],
    ) {
        let theta = self.shape.neuron().threshold;
        let weight = weight_gradient(conv, input, output, theta);
        gradient[conv.weight..conv.first_bias_element()].copy_from_slice(&weight);
        self.bias_gradient(conv, output, gradient);
    }

    fn bias_gradient(&self, conv: &ConvolutionLayer, output: &[f64], gradient: &mut [f64]) {
        let channels = conv.window.output.channels;
        let fed = self.shape.fed_time_steps() * self.shape.b * conv.window.output.elements();
        let to = &mut gradient[conv.first_bias_element()..][..channels];
        for pixel in output[..fed].chunks(channels) {
            to.iter_mut().zip(pixel).for_each(|(to, g)| *to += g);
        }
        to.iter_mut().for_each(|to| *to /= self.shape.spread_steps() as f64);
    }

    /// Computes the gradients of the stem's parameters: its operand is the same image in every fed
    /// step.
    fn stem_gradients(&self, inputs: &Tensors, currents: &[f64], gradient: &mut [f64]) {
        let stem = &self.network.stem;
        let images = inputs.tensor("images");
        let images = images.to_f64(0, images.len());
        let mut sum = vec![0.0; currents.len() / self.shape.t];
        for step in currents.chunks(sum.len()).take(self.shape.fed_time_steps()) {
            sum.iter_mut().zip(step).for_each(|(sum, g)| *sum += g);
        }
        let weight = weight_gradient(stem, &images, &sum, 1.0 / self.shape.spread_steps() as f64);
        gradient[stem.weight..stem.first_bias_element()].copy_from_slice(&weight);
        self.bias_gradient(stem, currents, gradient);
    }

    /// Computes the gradient of the spikes before pooling. A spike counts in the sums of all later
    /// steps, so the gradient at the pooling in one time step, minus that in the next step, goes to
    /// the spikes of the step.
    fn pool_gradient(&self, pool: &ConvolutionWindow, spikes: &[i8], pooled: &[f64]) -> Vec<f64> {
        let (input, output) =
            (self.shape.b * pool.input.elements(), self.shape.b * pool.output.elements());
        let mut sums = vec![0i8; input];
        // Index of the input element that each output of each step reads.
        let mut sources = Vec::with_capacity(self.shape.t);
        for spikes in spikes.chunks(input) {
            sums.iter_mut().zip(spikes).for_each(|(sum, s)| *sum += s);
            sources.push(first_maxima(pool, &sums).collect::<Vec<_>>());
        }
        let mut gradient = vec![0.0; spikes.len()];
        let (mut after, mut next) = (vec![0.0; input], vec![0.0; output]);
        for t in (0..self.shape.t).rev() {
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

/// Computes the mean over images of `log Σ exp(logits) - logits[label]`, and the gradient of the
/// logits.
pub fn cross_entropy(logits: &[f64], labels: &[f64]) -> (f64, Vec<f64>) {
    let mut loss = 0.0;
    let mut gradient = Vec::with_capacity(logits.len());
    let share = 1.0 / labels.len() as f64;
    for (logits, &label) in logits.chunks(CLASS_COUNT).zip(labels) {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
        loss += share * (sum.ln() + largest - logits[label as usize]);
        gradient.extend(logits.iter().map(|x| share * (x - largest).exp() / sum));
        let first = gradient.len() - CLASS_COUNT;
        gradient[first + label as usize] -= share;
    }
    (loss, gradient)
}
