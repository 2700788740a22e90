//! Forward pass of the network in fp64: the reference against which every implementation is
//! verified.
//!
//! Frames of activations are time-major, `[T, B, side, side, channels]`. The currents and spikes of
//! every layer of neurons are stored, because the gradient needs them.

use super::convolution::convolve;
use super::network::{CLASS_COUNT, ConvolutionLayer, ConvolutionWindow, ResNet18};
use super::shape::NetworkShape;
use crate::parallel;
use crate::st_bif::neuron::{self, NeuronForwardTrace};
use kernelgate::workload::Tensors;
use kernelgate::workload::tensor::split_columns;

/// Number of neurons that one task simulates, which limits its scratch memory.
const NEURONS_PER_TASK: usize = 4096;

/// The reference network with its parameters.
pub struct NetworkReference<'a> {
    /// Sizes of the problem.
    pub shape: &'a NetworkShape,
    /// Layers of the network.
    pub network: ResNet18,
    /// All weights and biases.
    pub parameters: Vec<f64>,
}

/// Currents and spikes of a layer of neurons over all time steps.
pub struct NeuronLayer {
    /// Input currents, `[T, B, side, side, channels]`.
    pub currents: Vec<f64>,
    /// Spikes of the neurons, in the shape of the currents.
    pub spikes: Vec<i8>,
}

/// Results of a forward pass, layer by layer.
pub struct ForwardResults {
    /// Results of the stem's neurons, then of two layers for each block.
    pub layers: Vec<NeuronLayer>,
    /// Spikes after the max-pooling, if the network has it.
    pub pooled: Option<Vec<i8>>,
    /// Features `[B, features]`: the mean over pixels of the last neurons' values, summed over
    /// time.
    pub features: Vec<f64>,
    /// Logits of the images, `[B, 10]`.
    pub logits: Vec<f64>,
}

impl ForwardResults {
    /// The spikes that are the input of a residual block.
    pub fn spikes_read_by_block(&self, block: usize) -> &[i8] {
        match (&self.pooled, block) {
            (Some(pooled), 0) => pooled,
            _ => &self.layers[2 * block].spikes,
        }
    }
}

impl<'a> NetworkReference<'a> {
    /// Creates the reference with the parameters of the inputs.
    pub fn new(shape: &'a NetworkShape, inputs: &Tensors) -> Self {
        let network = shape.sizes.build_network();
        let parameters = inputs.tensor("parameters").to_f64(0, network.parameters);
        Self { shape, network, parameters }
    }

    /// Computes the logits of the images, and the results of all earlier layers.
    pub fn compute_forward_pass(&self, inputs: &Tensors) -> ForwardResults {
        let images = inputs.tensor("images");
        let images = images.to_f64(0, images.len());
        let stem = &self.network.stem;
        let spread = 1.0 / self.shape.spread_steps() as f64;
        let once = convolve(stem, self.weight(stem), &images, spread);
        let mut currents = vec![0.0; self.shape.frame_count() * stem.window.output.elements()];
        for t in 0..self.shape.fed_time_steps() {
            currents[t * once.len()..][..once.len()].copy_from_slice(&once);
        }
        self.add_bias(stem, &mut currents);

        let mut forward = ForwardResults {
            layers: vec![self.run_neurons(currents)],
            pooled: None,
            features: Vec::new(),
            logits: Vec::new(),
        };
        forward.pooled =
            self.network.pool.map(|pool| self.pool_spikes(&pool, &forward.layers[0].spikes));
        for number in 0..self.network.blocks.len() {
            self.run_block(number, &mut forward);
        }
        forward.features =
            self.averaged_features(&forward.layers[2 * self.network.blocks.len()].spikes);
        forward.logits = self.classify_features(&forward.features);
        forward
    }

    fn run_block(&self, number: usize, forward: &mut ForwardResults) {
        let block = &self.network.blocks[number];
        let theta = self.shape.neuron().threshold;
        let hidden = self
            .run_neurons(self.convolve_spikes(&block.first, forward.spikes_read_by_block(number)));
        let mut currents = self.convolve_spikes(&block.second, &hidden.spikes);
        let input = forward.spikes_read_by_block(number);
        match &block.shortcut {
            Some(conv) => {
                let shortcut = self.convolve_spikes(conv, input);
                currents.iter_mut().zip(shortcut).for_each(|(x, y)| *x += y);
            }
            None => currents.iter_mut().zip(input).for_each(|(x, &s)| *x += theta * f64::from(s)),
        }
        let output = self.run_neurons(currents);
        forward.layers.extend([hidden, output]);
    }

    /// Computes a convolution of the values of spikes, with its bias.
    fn convolve_spikes(&self, conv: &ConvolutionLayer, spikes: &[i8]) -> Vec<f64> {
        let theta = self.shape.neuron().threshold;
        let mut currents = convolve(conv, self.weight(conv), spikes, theta);
        self.add_bias(conv, &mut currents);
        currents
    }

    /// Adds the bias divided by `steps` to the frames of all fed time steps.
    fn add_bias(&self, conv: &ConvolutionLayer, currents: &mut [f64]) {
        let channels = conv.window.output.channels;
        let bias = &self.parameters[conv.first_bias_element()..][..channels];
        let fed = self.shape.fed_time_steps() * self.shape.b * conv.window.output.elements();
        for pixel in currents[..fed].chunks_mut(channels) {
            pixel
                .iter_mut()
                .zip(bias)
                .for_each(|(x, b)| *x += b / self.shape.spread_steps() as f64);
        }
    }

    /// Simulates a layer of neurons on its input currents.
    fn run_neurons(&self, currents: Vec<f64>) -> NeuronLayer {
        let (t, n) = (self.shape.t, currents.len() / self.shape.t);
        let parameters = self.shape.neuron();
        let mut spikes = vec![0i8; currents.len()];
        parallel::for_each_task(
            split_columns(&mut spikes, n, NEURONS_PER_TASK),
            &|task, mut rows| {
                let (mut series, mut trace) = (vec![0.0; t], NeuronForwardTrace::default());
                for column in 0..rows[0].len() {
                    let at = task * NEURONS_PER_TASK + column;
                    series.iter_mut().enumerate().for_each(|(t, x)| *x = currents[t * n + at]);
                    neuron::run_neuron_into(&parameters, &series, &mut trace);
                    rows.iter_mut()
                        .zip(&trace.steps)
                        .for_each(|(row, step)| row[column] = step.spike);
                }
            },
        );
        NeuronLayer { currents, spikes }
    }

    /// Computes the spikes after max pooling: Computes the pooled spikes `pool(Σ_t s) -
    /// pool(Σ_{t-1} s)`.
    fn pool_spikes(&self, pool: &ConvolutionWindow, spikes: &[i8]) -> Vec<i8> {
        let (input, output) =
            (self.shape.b * pool.input.elements(), self.shape.b * pool.output.elements());
        let mut pooled = vec![0i8; self.shape.t * output];
        let mut sums = vec![0i8; input];
        let mut before = vec![0i8; output];
        for (spikes, pooled) in spikes.chunks(input).zip(pooled.chunks_mut(output)) {
            sums.iter_mut().zip(spikes).for_each(|(sum, s)| *sum += s);
            let largest: Vec<i8> = first_maxima(pool, &sums).map(|at| sums[at]).collect();
            for ((to, now), before) in pooled.iter_mut().zip(&largest).zip(&before) {
                *to = now - before;
            }
            before = largest;
        }
        pooled
    }

    fn averaged_features(&self, spikes: &[i8]) -> Vec<f64> {
        let (map, b) = (self.network.last_map(), self.shape.b);
        let scale = self.shape.neuron().threshold / map.pixel_count() as f64;
        let mut features = vec![0.0; b * map.channels];
        for frames in spikes.chunks(b * map.elements()) {
            for (frame, features) in
                frames.chunks(map.elements()).zip(features.chunks_mut(map.channels))
            {
                for pixel in frame.chunks(map.channels) {
                    features.iter_mut().zip(pixel).for_each(|(f, &s)| *f += scale * f64::from(s));
                }
            }
        }
        features
    }

    fn classify_features(&self, features: &[f64]) -> Vec<f64> {
        let width = self.network.last_map().channels;
        let (weight, bias) =
            self.parameters[self.network.classifier..].split_at(CLASS_COUNT * width);
        let share = self.shape.fed_time_steps() as f64 / self.shape.spread_steps() as f64;
        let of_image = |features: &[f64]| {
            let classes = weight.chunks(width).zip(bias).map(|(row, b)| {
                row.iter().zip(features).map(|(w, f)| w * f).sum::<f64>() + share * b
            });
            classes.collect::<Vec<_>>()
        };
        features.chunks(width).flat_map(of_image).collect()
    }

    /// Returns the weight of a convolution.
    pub fn weight(&self, conv: &ConvolutionLayer) -> &[f64] {
        &self.parameters[conv.weight..conv.first_bias_element()]
    }
}

/// For each output element of frames `[frames, side, side, channels]`, the input element that is
/// the first maximum of its window.
pub fn first_maxima<'a>(
    pool: &'a ConvolutionWindow,
    sums: &'a [i8],
) -> impl Iterator<Item = usize> + 'a {
    let channels = pool.input.channels;
    let frames =
        (0..sums.len() / pool.input.elements()).map(move |frame| frame * pool.input.elements());
    let pixels = frames
        .flat_map(move |frame| (0..pool.output.pixel_count()).map(move |pixel| (frame, pixel)));
    pixels.flat_map(move |(frame, pixel)| {
        let of_channel = move |channel: usize| {
            let sources =
                (0..pool.window_taps()).filter_map(move |tap| pool.source_pixel(pixel, tap));
            let elements = sources.map(move |at| frame + at * channels + channel);
            let first = |best: usize, at: usize| if sums[at] > sums[best] { at } else { best };
            elements.reduce(first).expect("a window reads its centre")
        };
        (0..channels).map(of_channel)
    })
}
