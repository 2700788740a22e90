//! Forward pass of ResNet-18 in fp64: the reference against which every implementation is verified.
//!
//! In the reference, frames of activations are time-major, `[T, B, side, side, channels]`. The
//! reference stores the currents and spikes of every neuron layer, because its gradient needs them.

use super::convolution::convolve_frames_in_f64;
use super::network::{CLASSIFIER_CLASS_COUNT, ConvolutionLayer, ResNet18Layers, SlidingWindow};
use super::shape::ResNetParameters;
use crate::parallel;
use crate::st_bif::neuron::{self, NeuronSimulation};
use kernelgate::workload::Tensors;
use kernelgate::workload::tensor::split_rows_into_column_blocks;

/// Number of neurons that one parallel CPU task of the reference simulates, which limits the task's
/// scratch memory.
const NEURONS_PER_SIMULATION_TASK: usize = 4096;

/// The fp64 reference of a ResNet-18 network with its parameters.
pub struct ResNetReference<'a> {
    /// Network and sizes of the ResNet-18 problem.
    pub shape: &'a ResNetParameters,
    /// Layers of the ResNet-18 network.
    pub network: ResNet18Layers,
    /// All weights and biases of the network in fp64.
    pub parameters: Vec<f64>,
}

/// Currents and spikes of one neuron layer over all time steps.
pub struct NeuronLayerResults {
    /// Input currents of the neurons, `[T, B, side, side, channels]`.
    pub input_currents: Vec<f64>,
    /// Spikes of the neurons, in the shape of the currents.
    pub spikes: Vec<i8>,
}

/// Results of the reference's forward pass, layer by layer.
pub struct ForwardPassResults {
    /// Results of the stem's neurons, then of two neuron layers for each residual block.
    pub layers: Vec<NeuronLayerResults>,
    /// Spikes after the max pooling, if the stem has pooling.
    pub pooled_spikes: Option<Vec<i8>>,
    /// Features `[B, features]`: mean over pixels of the last neuron layer's spikes times θ, summed
    /// over time.
    pub features: Vec<f64>,
    /// Logits of the images, `[B, 10]`.
    pub logits: Vec<f64>,
}

impl ForwardPassResults {
    /// Spikes that residual block number `block` reads: the pooled spikes for the first block of a
    /// network with pooling, otherwise the spikes of the preceding neuron layer.
    pub fn input_spikes_of_block(&self, block: usize) -> &[i8] {
        match (&self.pooled_spikes, block) {
            (Some(pooled), 0) => pooled,
            _ => &self.layers[2 * block].spikes,
        }
    }
}

impl<'a> ResNetReference<'a> {
    /// Creates the fp64 reference with the parameters of the inputs.
    pub fn with_parameters_of_inputs(shape: &'a ResNetParameters, inputs: &Tensors) -> Self {
        let network = shape.sizes.build_resnet18_layers();
        let parameters =
            inputs.tensor("parameters").elements_to_f64(0, network.padded_parameter_count);
        Self { shape, network, parameters }
    }

    /// Runs the reference's forward pass: computes the logits of the images and the results of all
    /// layers.
    pub fn run_reference_forward_pass(&self, inputs: &Tensors) -> ForwardPassResults {
        let images = inputs.tensor("images");
        let images = images.elements_to_f64(0, images.len());
        let stem = &self.network.stem;
        let spread = 1.0 / self.shape.time_steps_to_spread_image() as f64;
        let once = convolve_frames_in_f64(stem, self.weight_of_convolution(stem), &images, spread);
        let mut currents = vec![
            0.0;
            self.shape.frames_over_all_time_steps()
                * stem.window.output_extents.elements_per_frame()
        ];
        for t in 0..self.shape.time_steps_fed_with_image() {
            currents[t * once.len()..][..once.len()].copy_from_slice(&once);
        }
        self.add_bias_to_fed_steps(stem, &mut currents);

        let mut forward = ForwardPassResults {
            layers: vec![self.simulate_neuron_layer(currents)],
            pooled_spikes: None,
            features: Vec::new(),
            logits: Vec::new(),
        };
        forward.pooled_spikes = self
            .network
            .pool
            .map(|pool| self.max_pool_spikes_in_reference(&pool, &forward.layers[0].spikes));
        for number in 0..self.network.blocks.len() {
            self.append_results_of_block(number, &mut forward);
        }
        forward.features = self
            .mean_features_summed_over_time(&forward.layers[2 * self.network.blocks.len()].spikes);
        forward.logits = self.logits_from_features(&forward.features);
        forward
    }

    fn append_results_of_block(&self, number: usize, forward: &mut ForwardPassResults) {
        let block = &self.network.blocks[number];
        let theta = self.shape.neuron_parameters().firing_threshold;
        let hidden = self.simulate_neuron_layer(
            self.convolve_spikes_and_add_bias(&block.first, forward.input_spikes_of_block(number)),
        );
        let mut currents = self.convolve_spikes_and_add_bias(&block.second, &hidden.spikes);
        let input = forward.input_spikes_of_block(number);
        match &block.shortcut {
            Some(conv) => {
                let shortcut = self.convolve_spikes_and_add_bias(conv, input);
                currents.iter_mut().zip(shortcut).for_each(|(x, y)| *x += y);
            }
            None => currents.iter_mut().zip(input).for_each(|(x, &s)| *x += theta * f64::from(s)),
        }
        let output = self.simulate_neuron_layer(currents);
        forward.layers.extend([hidden, output]);
    }

    /// Convolves the values θ·s of spikes s in fp64 and adds the bias in the time steps into which
    /// the bias is fed.
    fn convolve_spikes_and_add_bias(&self, conv: &ConvolutionLayer, spikes: &[i8]) -> Vec<f64> {
        let theta = self.shape.neuron_parameters().firing_threshold;
        let mut currents =
            convolve_frames_in_f64(conv, self.weight_of_convolution(conv), spikes, theta);
        self.add_bias_to_fed_steps(conv, &mut currents);
        currents
    }

    /// Adds a convolution's bias, divided by `steps`, to the currents of all fed time steps.
    fn add_bias_to_fed_steps(&self, conv: &ConvolutionLayer, currents: &mut [f64]) {
        let channels = conv.window.output_extents.channels;
        let bias = &self.parameters[conv.index_of_first_bias()..][..channels];
        let fed = self.shape.time_steps_fed_with_image()
            * self.shape.batch_size
            * conv.window.output_extents.elements_per_frame();
        for pixel in currents[..fed].chunks_mut(channels) {
            pixel
                .iter_mut()
                .zip(bias)
                .for_each(|(x, b)| *x += b / self.shape.time_steps_to_spread_image() as f64);
        }
    }

    /// Simulates a neuron layer over all time steps on its input currents.
    fn simulate_neuron_layer(&self, currents: Vec<f64>) -> NeuronLayerResults {
        let (t, n) = (self.shape.time_steps, currents.len() / self.shape.time_steps);
        let parameters = self.shape.neuron_parameters();
        let mut spikes = vec![0i8; currents.len()];
        parallel::run_tasks_in_parallel(
            split_rows_into_column_blocks(&mut spikes, n, NEURONS_PER_SIMULATION_TASK),
            &|task, mut rows| {
                let (mut series, mut trace) = (vec![0.0; t], NeuronSimulation::default());
                for column in 0..rows[0].len() {
                    let at = task * NEURONS_PER_SIMULATION_TASK + column;
                    series.iter_mut().enumerate().for_each(|(t, x)| *x = currents[t * n + at]);
                    neuron::simulate_neuron_into(&parameters, &series, &mut trace);
                    rows.iter_mut()
                        .zip(&trace.steps)
                        .for_each(|(row, step)| row[column] = step.spike);
                }
            },
        );
        NeuronLayerResults { input_currents: currents, spikes }
    }

    /// Max-pools the spikes of all images: The pooled spikes of time step t are `pool(Σ_t s) -
    /// pool(Σ_{t-1} s)`, differences of pooled sums over time.
    fn max_pool_spikes_in_reference(&self, pool: &SlidingWindow, spikes: &[i8]) -> Vec<i8> {
        let (input, output) = (
            self.shape.batch_size * pool.input_extents.elements_per_frame(),
            self.shape.batch_size * pool.output_extents.elements_per_frame(),
        );
        let mut pooled = vec![0i8; self.shape.time_steps * output];
        let mut sums = vec![0i8; input];
        let mut before = vec![0i8; output];
        for (spikes, pooled) in spikes.chunks(input).zip(pooled.chunks_mut(output)) {
            sums.iter_mut().zip(spikes).for_each(|(sum, s)| *sum += s);
            let largest: Vec<i8> =
                indices_of_first_maxima(pool, &sums).map(|at| sums[at]).collect();
            for ((to, now), before) in pooled.iter_mut().zip(&largest).zip(&before) {
                *to = now - before;
            }
            before = largest;
        }
        pooled
    }

    fn mean_features_summed_over_time(&self, spikes: &[i8]) -> Vec<f64> {
        let (map, b) = (self.network.last_feature_map(), self.shape.batch_size);
        let scale = self.shape.neuron_parameters().firing_threshold / map.pixels_per_frame() as f64;
        let mut features = vec![0.0; b * map.channels];
        for frames in spikes.chunks(b * map.elements_per_frame()) {
            for (frame, features) in
                frames.chunks(map.elements_per_frame()).zip(features.chunks_mut(map.channels))
            {
                for pixel in frame.chunks(map.channels) {
                    features.iter_mut().zip(pixel).for_each(|(f, &s)| *f += scale * f64::from(s));
                }
            }
        }
        features
    }

    fn logits_from_features(&self, features: &[f64]) -> Vec<f64> {
        let width = self.network.last_feature_map().channels;
        let (weight, bias) = self.parameters[self.network.first_classifier_weight_index..]
            .split_at(CLASSIFIER_CLASS_COUNT * width);
        let share = self.shape.time_steps_fed_with_image() as f64
            / self.shape.time_steps_to_spread_image() as f64;
        let of_image = |features: &[f64]| {
            let classes = weight.chunks(width).zip(bias).map(|(row, b)| {
                row.iter().zip(features).map(|(w, f)| w * f).sum::<f64>() + share * b
            });
            classes.collect::<Vec<_>>()
        };
        features.chunks(width).flat_map(of_image).collect()
    }

    /// Returns the fp64 weight of a convolution.
    pub fn weight_of_convolution(&self, conv: &ConvolutionLayer) -> &[f64] {
        &self.parameters[conv.first_weight_index..conv.index_of_first_bias()]
    }
}

/// Index of the input element that is the first maximum of its window, for each output element of
/// frames `[frames, side, side, channels]`.
pub fn indices_of_first_maxima<'a>(
    pool: &'a SlidingWindow,
    sums: &'a [i8],
) -> impl Iterator<Item = usize> + 'a {
    let channels = pool.input_extents.channels;
    let frames = (0..sums.len() / pool.input_extents.elements_per_frame())
        .map(move |frame| frame * pool.input_extents.elements_per_frame());
    let pixels = frames.flat_map(move |frame| {
        (0..pool.output_extents.pixels_per_frame()).map(move |pixel| (frame, pixel))
    });
    pixels.flat_map(move |(frame, pixel)| {
        let of_channel = move |channel: usize| {
            let sources = (0..pool.tap_count())
                .filter_map(move |tap| pool.input_pixel_read_by_tap(pixel, tap));
            let elements = sources.map(move |at| frame + at * channels + channel);
            let first = |best: usize, at: usize| if sums[at] > sums[best] { at } else { best };
            elements.reduce(first).expect("a window reads its centre")
        };
        (0..channels).map(of_channel)
    })
}
