//! The ResNet-18 network on the CPU in f32, layer by layer over all frames, forward and backward.

use kernelgate_numerics::gemm::Accum;

use super::convolution::{
    add_convolution_input_gradient, convolution_weight_gradient_in_f32, convolve_frames_in_f32,
};
use super::pooling::{PooledSpikesOfImage, max_pool_spike_gradient, max_pool_spike_sums};
use crate::parallel;
use crate::resnet18::breakdown::nvtx_range_of_stage;
use crate::resnet18::definition::{ResNetParameters, SGD_LEARNING_RATE, SGD_MOMENTUM};
use crate::resnet18::network::{CLASSIFIER_CLASS_COUNT, ConvolutionLayer, ResNet18Layers};
use crate::st_bif::cpu;
use crate::st_bif::neuron::StBifNeuronParameters;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};
use kernelgate_cuda::observe::range::{NamedRangeGuard, run_within_named_range};

/// Number of elements that one parallel CPU task computes in elementwise operations.
const ELEMENTS_PER_ELEMENTWISE_TASK: usize = 1 << 14;

/// Values that the CPU forward pass saves for the backward pass: allocated once, overwritten by
/// every launch.
pub struct CpuResNetState {
    shape: ResNetParameters,
    network: ResNet18Layers,
    firing_threshold: f32,
    neuron: StBifNeuronParameters,
    /// Input currents of each layer of neurons, `[T, N]` for T time steps and N neurons over the
    /// batch.
    input_currents_by_layer: Vec<Tensor>,
    /// Spikes of each layer of neurons, `[T, N]` for T time steps and N neurons over the batch.
    pub spikes_by_layer: Vec<Vec<i8>>,
    pooled: Vec<PooledSpikesOfImage>,
    /// Spikes after the max pooling, `[T, B, map]`; empty for a network without pooling.
    pooled_spikes: Vec<i8>,
    features: Vec<f32>,
    parameter_gradient: Vec<f32>,
}

impl CpuResNetState {
    /// Allocates the saved values for the shape's numbers of images and time steps.
    pub fn allocate_for_network_shape(shape: &ResNetParameters) -> Self {
        let network = shape.sizes.build_resnet18_layers();
        let neurons = network.extents_of_neuron_layers();
        let currents = |len: usize| {
            Tensor::filled_with_zeros([shape.time_steps, shape.batch_size * len], Dtype::F32)
        };
        Self {
            shape: *shape,
            firing_threshold: shape.neuron_parameters().firing_threshold as f32,
            neuron: shape.neuron_parameters(),
            input_currents_by_layer: neurons
                .iter()
                .map(|map| currents(map.elements_per_frame()))
                .collect(),
            spikes_by_layer: neurons
                .iter()
                .map(|map| vec![0; shape.frames_over_all_time_steps() * map.elements_per_frame()])
                .collect(),
            pooled: Vec::new(),
            pooled_spikes: Vec::new(),
            features: vec![0.0; shape.batch_size * network.last_feature_map().channels],
            parameter_gradient: Vec::new(),
            network,
        }
    }

    /// Runs the forward pass on the CPU and writes the logits `[B, 10]` of the images.
    pub fn run_forward_pass(&mut self, inputs: &Tensors, logits: &mut [f32]) {
        let _pass = [
            NamedRangeGuard::open_named_range("Model_Forward_Pass"),
            NamedRangeGuard::open_named_range("Model_Compute_All_Layers"),
        ];
        let (images, parameters) =
            (inputs.f32_elements("images"), inputs.f32_elements("parameters"));
        run_within_named_range("Conv1_Block", || {
            self.compute_stem_currents_and_spikes(images, parameters)
        });
        if let Some(window) = &self.network.pool {
            self.pooled =
                max_pool_spike_sums(window, &self.spikes_by_layer[0], self.shape.time_steps);
            let size = window.output_extents.elements_per_frame();
            self.pooled_spikes.clear();
            for t in 0..self.shape.time_steps {
                for image in &self.pooled {
                    self.pooled_spikes.extend(&image.pooled_spikes[t * size..][..size]);
                }
            }
        }
        for (number, blocks) in self.block_indices_of_each_stage().into_iter().enumerate() {
            run_within_named_range(&nvtx_range_of_stage(number), || {
                blocks.for_each(|block| self.compute_spikes_of_block(block, parameters))
            });
        }
        run_within_named_range("Final_Layers", || {
            self.compute_classifier_logits(parameters, logits)
        });
    }

    /// Index ranges of the residual blocks that belong to each stage.
    fn block_indices_of_each_stage(&self) -> Vec<std::ops::Range<usize>> {
        let blocks = self.shape.sizes.blocks_per_stage;
        (0..self.network.blocks.len()).step_by(blocks).map(|first| first..first + blocks).collect()
    }

    /// Computes the stem: its convolution once for each image, the same currents in every time step
    /// into which the image is fed, and the spikes.
    fn compute_stem_currents_and_spikes(&mut self, images: &[f32], parameters: &[f32]) {
        let stem = &self.network.stem;
        let currents = f32_tensor_values_mut(&mut self.input_currents_by_layer[0]);
        let (once, rest) = currents
            .split_at_mut(self.shape.batch_size * stem.window.output_extents.elements_per_frame());
        convolve_frames_in_f32(
            stem,
            weight_slice_of_convolution(stem, parameters),
            images,
            1.0,
            Accum::Replace,
            once,
        );
        let (channels, steps) =
            (stem.window.output_extents.channels, self.shape.time_steps_to_spread_image() as f32);
        let bias = &parameters[stem.index_of_first_bias()..][..channels];
        parallel::process_chunks_in_parallel(
            once,
            stem.window.output_extents.elements_per_frame(),
            &|_, image| {
                for pixel in image.chunks_mut(channels) {
                    // The stem's currents are the convolution's sum divided by the number of steps,
                    // which is exact if the sum is a multiple of that number.
                    pixel.iter_mut().zip(bias).for_each(|(x, b)| *x = (*x + b) / steps);
                }
            },
        );
        for (t, step) in rest.chunks_mut(once.len()).enumerate() {
            if t + 1 < self.shape.time_steps_fed_with_image() {
                step.copy_from_slice(once)
            } else {
                step.fill(0.0)
            }
        }
        cpu::compute_spikes_from_currents(
            self.neuron,
            &self.input_currents_by_layer[0],
            &mut self.spikes_by_layer[0],
        );
    }

    fn compute_spikes_of_block(&mut self, number: usize, parameters: &[f32]) {
        let block = &self.network.blocks[number];
        let (shape, theta) = (&self.shape, self.firing_threshold);
        let (first, second) = (2 * number + 1, 2 * number + 2);
        let input = input_spikes_of_block(number, &self.pooled_spikes, &self.spikes_by_layer);
        let convolve = |conv: &ConvolutionLayer, input: &[i8], accum, currents: &mut [f32]| {
            convolve_frames_in_f32(
                conv,
                weight_slice_of_convolution(conv, parameters),
                input,
                theta,
                accum,
                currents,
            );
            add_bias_share_to_fed_steps(shape, conv, parameters, currents);
        };
        let currents = f32_tensor_values_mut(&mut self.input_currents_by_layer[first]);
        convolve(&block.first, input, Accum::Replace, currents);
        cpu::compute_spikes_from_currents(
            self.neuron,
            &self.input_currents_by_layer[first],
            &mut self.spikes_by_layer[first],
        );

        let input = input_spikes_of_block(number, &self.pooled_spikes, &self.spikes_by_layer);
        let currents = f32_tensor_values_mut(&mut self.input_currents_by_layer[second]);
        convolve(&block.second, &self.spikes_by_layer[first], Accum::Replace, currents);
        match &block.shortcut {
            Some(conv) => convolve(conv, input, Accum::Add, currents),
            None => {
                parallel::process_chunks_in_parallel(
                    currents,
                    ELEMENTS_PER_ELEMENTWISE_TASK,
                    &|piece, currents| {
                        let pairs = currents
                            .iter_mut()
                            .zip(&input[piece * ELEMENTS_PER_ELEMENTWISE_TASK..]);
                        pairs.for_each(|(x, &s)| *x += theta * f32::from(s));
                    },
                );
            }
        }
        cpu::compute_spikes_from_currents(
            self.neuron,
            &self.input_currents_by_layer[second],
            &mut self.spikes_by_layer[second],
        );
    }

    fn compute_classifier_logits(&mut self, parameters: &[f32], logits: &mut [f32]) {
        let map = self.network.last_feature_map();
        let (width, b) = (map.channels, self.shape.batch_size);
        let mut sums = vec![0i32; b * width];
        let last = self.spikes_by_layer.last().expect("there are neurons");
        for (frame, spikes) in last.chunks(map.elements_per_frame()).enumerate() {
            let sums = &mut sums[frame % b * width..][..width];
            for pixel in spikes.chunks(width) {
                sums.iter_mut().zip(pixel).for_each(|(sum, &s)| *sum += i32::from(s));
            }
        }
        let scale = self.firing_threshold / map.pixels_per_frame() as f32;
        self.features.iter_mut().zip(&sums).for_each(|(f, &sum)| *f = scale * sum as f32);
        let (weight, bias) = parameters[self.network.first_classifier_weight_index..]
            .split_at(CLASSIFIER_CLASS_COUNT * width);
        let share = self.fraction_of_bias_fed();
        let images = self.features.chunks(width).zip(logits.chunks_mut(CLASSIFIER_CLASS_COUNT));
        for (features, logits) in images {
            for ((logit, row), b) in logits.iter_mut().zip(weight.chunks(width)).zip(bias) {
                *logit = row.iter().zip(features).map(|(w, f)| w * f).sum::<f32>() + share * b;
            }
        }
    }

    /// Fraction of a layer's bias that the existing time steps feed into the neurons; below 1 if
    /// there are fewer steps than the bias is spread over.
    fn fraction_of_bias_fed(&self) -> f32 {
        self.shape.time_steps_fed_with_image() as f32
            / self.shape.time_steps_to_spread_image() as f32
    }

    /// Runs one SGD training step on the CPU and writes logits, loss, new momentum and new
    /// parameters.
    pub fn run_sgd_training_step(&mut self, inputs: &Tensors, outputs: &mut Tensors) {
        self.run_forward_pass(inputs, outputs.f32_mut("logits"));
        let labels = inputs.tensor("labels").elements_to_f64(0, self.shape.batch_size);
        let (loss, logits) =
            cross_entropy_and_logit_gradient(outputs.f32_elements("logits"), &labels);
        outputs.f32_mut("loss")[0] = loss;
        self.parameter_gradient.resize(self.network.padded_parameter_count, 0.0);
        let mut gradient = std::mem::take(&mut self.parameter_gradient);
        run_within_named_range("Backward", || {
            self.compute_all_parameter_gradients(inputs, &logits, &mut gradient)
        });
        let _step = NamedRangeGuard::open_named_range("Optimizer");
        let old = inputs.f32_elements("momentum");
        parallel::process_chunks_in_parallel(
            outputs.f32_mut("new_momentum"),
            ELEMENTS_PER_ELEMENTWISE_TASK,
            &|piece, new| {
                let (old, g) = (
                    &old[piece * ELEMENTS_PER_ELEMENTWISE_TASK..],
                    &gradient[piece * ELEMENTS_PER_ELEMENTWISE_TASK..],
                );
                new.iter_mut()
                    .zip(old)
                    .zip(g)
                    .for_each(|((new, m), g)| *new = SGD_MOMENTUM * m + g);
            },
        );
        self.parameter_gradient = gradient;
        let mut new = outputs.take("new_parameters").expect("an output");
        let (old, momentum) =
            (inputs.f32_elements("parameters"), outputs.f32_elements("new_momentum"));
        parallel::process_chunks_in_parallel(
            f32_tensor_values_mut(&mut new),
            ELEMENTS_PER_ELEMENTWISE_TASK,
            &|piece, new| {
                let (old, m) = (
                    &old[piece * ELEMENTS_PER_ELEMENTWISE_TASK..],
                    &momentum[piece * ELEMENTS_PER_ELEMENTWISE_TASK..],
                );
                let pairs = new.iter_mut().zip(old).zip(m);
                pairs.for_each(|((new, p), m)| *new = p - SGD_LEARNING_RATE * m);
            },
        );
        outputs.insert("new_parameters", new);
    }

    fn compute_all_parameter_gradients(
        &self,
        inputs: &Tensors,
        logits: &[f32],
        gradient: &mut [f32],
    ) {
        let parameters = inputs.f32_elements("parameters");
        let mut spikes = run_within_named_range("Final_Layers", || {
            self.backpropagate_classifier(parameters, logits, gradient)
        });
        for (number, blocks) in self.block_indices_of_each_stage().into_iter().enumerate().rev() {
            let _stage = NamedRangeGuard::open_named_range(&nvtx_range_of_stage(number));
            for block in blocks.rev() {
                spikes = self.backpropagate_residual_block(block, parameters, spikes, gradient);
            }
        }
        let _stem = NamedRangeGuard::open_named_range("Conv1_Block");
        if let Some(window) = &self.network.pool {
            let mut before = zeroed_f32_tensor_like(&self.input_currents_by_layer[0]);
            max_pool_spike_gradient(
                window,
                &self.pooled,
                spikes.f32_slice(),
                f32_tensor_values_mut(&mut before),
            );
            spikes = before;
        }
        let currents = self.backpropagate_spikes_to_currents(0, &spikes);
        let stem = &self.network.stem;
        let size = self.shape.batch_size * stem.window.output_extents.elements_per_frame();
        let mut sum = vec![0.0; size];
        for step in currents.f32_slice().chunks(size).take(self.shape.time_steps_fed_with_image()) {
            parallel::process_chunks_in_parallel(
                &mut sum,
                ELEMENTS_PER_ELEMENTWISE_TASK,
                &|piece, sum| {
                    sum.iter_mut()
                        .zip(&step[piece * ELEMENTS_PER_ELEMENTWISE_TASK..])
                        .for_each(|(sum, g)| *sum += g);
                },
            );
        }
        let spread = 1.0 / self.shape.time_steps_to_spread_image() as f32;
        let weight = &mut gradient[stem.first_weight_index..stem.index_of_first_bias()];
        convolution_weight_gradient_in_f32(
            stem,
            inputs.f32_elements("images"),
            &sum,
            spread,
            weight,
        );
        self.write_convolution_bias_gradient(stem, &currents, gradient);
    }

    /// Computes the gradients of the classifier's parameters; returns the gradient of the last
    /// neuron layer's spikes.
    fn backpropagate_classifier(
        &self,
        parameters: &[f32],
        logits: &[f32],
        gradient: &mut [f32],
    ) -> Tensor {
        let map = self.network.last_feature_map();
        let (width, at) = (map.channels, self.network.first_classifier_weight_index);
        let weight = &parameters[at..][..CLASSIFIER_CLASS_COUNT * width];
        let (to_weight, to_bias) = gradient[at..].split_at_mut(CLASSIFIER_CLASS_COUNT * width);
        to_weight.fill(0.0);
        to_bias.fill(0.0);
        let scale = self.firing_threshold / map.pixels_per_frame() as f32;
        let mut spikes =
            zeroed_f32_tensor_like(self.input_currents_by_layer.last().expect("there are neurons"));
        let steps = f32_tensor_values_mut(&mut spikes);
        let images = self.features.chunks(width).zip(logits.chunks(CLASSIFIER_CLASS_COUNT));
        for (image, (features, logits)) in images.enumerate() {
            let mut to_features = vec![0.0; width];
            for (class, g) in logits.iter().enumerate() {
                let row = class * width..(class + 1) * width;
                to_bias[class] += self.fraction_of_bias_fed() * g;
                let to = to_weight[row.clone()].iter_mut().zip(features);
                to.for_each(|(to, f)| *to += g * f);
                let to = to_features.iter_mut().zip(&weight[row]);
                to.for_each(|(to, w)| *to += scale * g * w);
            }
            for t in 0..self.shape.time_steps {
                let frame = &mut steps
                    [(t * self.shape.batch_size + image) * map.elements_per_frame()..]
                    [..map.elements_per_frame()];
                frame.chunks_mut(width).for_each(|pixel| pixel.copy_from_slice(&to_features));
            }
        }
        spikes
    }

    /// Computes a residual block's parameter gradients, and the gradient of its input spikes from
    /// the gradient of its output spikes.
    fn backpropagate_residual_block(
        &self,
        number: usize,
        parameters: &[f32],
        spikes: Tensor,
        gradient: &mut [f32],
    ) -> Tensor {
        let block = &self.network.blocks[number];
        let theta = self.firing_threshold;
        let input = input_spikes_of_block(number, &self.pooled_spikes, &self.spikes_by_layer);
        let currents = self.backpropagate_spikes_to_currents(2 * number + 2, &spikes);
        let add_gradients =
            |conv: &ConvolutionLayer, input: &[i8], output: &Tensor, gradient: &mut [f32]| {
                let weight = &mut gradient[conv.first_weight_index..conv.index_of_first_bias()];
                convolution_weight_gradient_in_f32(conv, input, output.f32_slice(), theta, weight);
                self.write_convolution_bias_gradient(conv, output, gradient);
            };
        add_gradients(&block.second, &self.spikes_by_layer[2 * number + 1], &currents, gradient);
        let mut hidden = zeroed_f32_tensor_like(&self.input_currents_by_layer[2 * number + 1]);
        let second = weight_slice_of_convolution(&block.second, parameters);
        add_convolution_input_gradient(
            &block.second,
            second,
            currents.f32_slice(),
            theta,
            f32_tensor_values_mut(&mut hidden),
        );
        let inner = self.backpropagate_spikes_to_currents(2 * number + 1, &hidden);
        add_gradients(&block.first, input, &inner, gradient);

        let mut before = Tensor::filled_with_zeros(
            [self.shape.time_steps, input.len() / self.shape.time_steps],
            Dtype::F32,
        );
        let to = f32_tensor_values_mut(&mut before);
        match &block.shortcut {
            Some(conv) => {
                add_gradients(conv, input, &currents, gradient);
                add_convolution_input_gradient(
                    conv,
                    weight_slice_of_convolution(conv, parameters),
                    currents.f32_slice(),
                    theta,
                    to,
                );
            }
            None => {
                let currents = currents.f32_slice();
                parallel::process_chunks_in_parallel(
                    to,
                    ELEMENTS_PER_ELEMENTWISE_TASK,
                    &|piece, to| {
                        to.iter_mut()
                            .zip(&currents[piece * ELEMENTS_PER_ELEMENTWISE_TASK..])
                            .for_each(|(to, g)| *to = theta * g);
                    },
                );
            }
        }
        add_convolution_input_gradient(
            &block.first,
            weight_slice_of_convolution(&block.first, parameters),
            inner.f32_slice(),
            theta,
            to,
        );
        before
    }

    /// Computes the gradient of a neuron layer's input currents from the gradient of its spikes.
    fn backpropagate_spikes_to_currents(&self, layer: usize, spikes: &Tensor) -> Tensor {
        let mut currents = zeroed_f32_tensor_like(&self.input_currents_by_layer[layer]);
        cpu::compute_current_gradient(
            self.neuron,
            &self.input_currents_by_layer[layer],
            spikes,
            currents.tensor_data_mut(),
        );
        currents
    }

    fn write_convolution_bias_gradient(
        &self,
        conv: &ConvolutionLayer,
        output: &Tensor,
        gradient: &mut [f32],
    ) {
        let channels = conv.window.output_extents.channels;
        let fed = self.shape.time_steps_fed_with_image()
            * self.shape.batch_size
            * conv.window.output_extents.elements_per_frame();
        let mut sums = vec![0f64; channels];
        for pixel in output.f32_slice()[..fed].chunks(channels) {
            sums.iter_mut().zip(pixel).for_each(|(sum, g)| *sum += f64::from(*g));
        }
        let to = &mut gradient[conv.index_of_first_bias()..][..channels];
        let steps = self.shape.time_steps_to_spread_image() as f64;
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = (sum / steps) as f32);
    }
}

/// Returns the spikes that a residual block reads: those after the pooling, or those of the
/// previous block's last neurons.
fn input_spikes_of_block<'a>(number: usize, pooled: &'a [i8], spikes: &'a [Vec<i8>]) -> &'a [i8] {
    if number == 0 && !pooled.is_empty() { pooled } else { &spikes[2 * number] }
}

fn weight_slice_of_convolution<'a>(conv: &ConvolutionLayer, parameters: &'a [f32]) -> &'a [f32] {
    &parameters[conv.first_weight_index..conv.index_of_first_bias()]
}

fn add_bias_share_to_fed_steps(
    shape: &ResNetParameters,
    conv: &ConvolutionLayer,
    parameters: &[f32],
    currents: &mut [f32],
) {
    let steps = shape.time_steps_to_spread_image() as f32;
    let bias: Vec<f32> = parameters[conv.index_of_first_bias()..]
        [..conv.window.output_extents.channels]
        .iter()
        .map(|b| b / steps)
        .collect();
    let fed = shape.time_steps_fed_with_image()
        * shape.batch_size
        * conv.window.output_extents.elements_per_frame();
    parallel::process_chunks_in_parallel(
        &mut currents[..fed],
        conv.window.output_extents.elements_per_frame(),
        &|_, frame| {
            for pixel in frame.chunks_mut(bias.len()) {
                pixel.iter_mut().zip(&bias).for_each(|(x, b)| *x += b);
            }
        },
    );
}

/// Computes the mean cross entropy over the images, and its gradient with respect to the logits.
fn cross_entropy_and_logit_gradient(logits: &[f32], labels: &[f64]) -> (f32, Vec<f32>) {
    let share = 1.0 / labels.len() as f64;
    let (mut loss, mut gradient) = (0.0, Vec::with_capacity(logits.len()));
    for (logits, &label) in logits.chunks(CLASSIFIER_CLASS_COUNT).zip(labels) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = logits.iter().map(|x| f64::from(x - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        loss += share * (sum.ln() + f64::from(largest - logits[label as usize]));
        for (class, power) in powers.iter().enumerate() {
            let target = if class == label as usize { 1.0 } else { 0.0 };
            gradient.push((share * (power / sum - target)) as f32);
        }
    }
    (loss as f32, gradient)
}

fn zeroed_f32_tensor_like(like: &Tensor) -> Tensor {
    Tensor::filled_with_zeros(like.shape(), Dtype::F32)
}

fn f32_tensor_values_mut(tensor: &mut Tensor) -> &mut [f32] {
    let TensorData::F32(values) = tensor.tensor_data_mut() else { unreachable!("made as f32") };
    values
}

/// Extension of `Tensor`: reads an f32 tensor as a slice.
trait F32TensorValues {
    fn f32_slice(&self) -> &[f32];
}

impl F32TensorValues for Tensor {
    fn f32_slice(&self) -> &[f32] {
        let TensorData::F32(values) = self.tensor_data() else { unreachable!("made as f32") };
        values
    }
}
