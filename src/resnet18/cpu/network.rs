//! The ResNet-18 network in f32, layer by layer over all frames, forward and backward.

use kernelgate_numerics::gemm::Accum;

use super::convolution::{add_input_gradient, convolution_weight_gradient, convolve_into};
use super::pooling::{PooledSpikes, pool_gradient, pool_spikes};
use crate::parallel;
use crate::resnet18::breakdown::stage_range_name;
use crate::resnet18::definition::{LEARNING_RATE, NetworkShape, SGD_MOMENTUM};
use crate::resnet18::network::{CLASS_COUNT, ConvolutionLayer, ResNet18};
use crate::st_bif::cpu;
use crate::st_bif::neuron::NeuronParameters;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};
use kernelgate_cuda::observe::range::{RangeGuard, within_range};

/// Number of elements that one task computes, if elements do not depend on each other.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// State that the forward pass saves for the backward pass: allocated once, overwritten by every
/// launch.
pub struct CpuNetwork {
    shape: NetworkShape,
    network: ResNet18,
    theta: f32,
    neuron: NeuronParameters,
    /// Currents of each layer of neurons, `[T, N]`.
    currents: Vec<Tensor>,
    /// Spikes of each layer of neurons, `[T, N]`.
    pub spikes: Vec<Vec<i8>>,
    pooled: Vec<PooledSpikes>,
    /// Spikes after the pooling layer, `[T, B, map]`; empty for a network without pooling.
    pooled_spikes: Vec<i8>,
    features: Vec<f32>,
    gradient: Vec<f32>,
}

impl CpuNetwork {
    /// Allocates the state for the shape's numbers of images and time steps.
    pub fn new(shape: &NetworkShape) -> Self {
        let network = shape.sizes.build_network();
        let neurons = network.neuron_layer_extents();
        let currents = |len: usize| Tensor::zeroed([shape.t, shape.b * len], Dtype::F32);
        Self {
            shape: *shape,
            theta: shape.neuron().threshold as f32,
            neuron: shape.neuron(),
            currents: neurons.iter().map(|map| currents(map.elements())).collect(),
            spikes: neurons
                .iter()
                .map(|map| vec![0; shape.frame_count() * map.elements()])
                .collect(),
            pooled: Vec::new(),
            pooled_spikes: Vec::new(),
            features: vec![0.0; shape.b * network.last_map().channels],
            gradient: Vec::new(),
            network,
        }
    }

    /// Computes the logits `[B, 10]` of the images.
    pub fn compute_logits(&mut self, inputs: &Tensors, logits: &mut [f32]) {
        let _pass =
            [RangeGuard::new("Model_Forward_Pass"), RangeGuard::new("Model_Compute_All_Layers")];
        let (images, parameters) = (inputs.f32("images"), inputs.f32("parameters"));
        within_range("Conv1_Block", || self.compute_stem(images, parameters));
        if let Some(window) = &self.network.pool {
            self.pooled = pool_spikes(window, &self.spikes[0], self.shape.t);
            let size = window.output.elements();
            self.pooled_spikes.clear();
            for t in 0..self.shape.t {
                for image in &self.pooled {
                    self.pooled_spikes.extend(&image.spikes[t * size..][..size]);
                }
            }
        }
        for (number, blocks) in self.block_numbers_by_stage().into_iter().enumerate() {
            within_range(&stage_range_name(number), || {
                blocks.for_each(|block| self.compute_residual_block(block, parameters))
            });
        }
        within_range("Final_Layers", || self.compute_classifier(parameters, logits));
    }

    /// Indices of the residual blocks in each stage.
    fn block_numbers_by_stage(&self) -> Vec<std::ops::Range<usize>> {
        let blocks = self.shape.sizes.blocks;
        (0..self.network.blocks.len()).step_by(blocks).map(|first| first..first + blocks).collect()
    }

    /// Computes the stem: its convolution once, and its currents in every fed time step.
    fn compute_stem(&mut self, images: &[f32], parameters: &[f32]) {
        let stem = &self.network.stem;
        let currents = f32_values_mut(&mut self.currents[0]);
        let (once, rest) = currents.split_at_mut(self.shape.b * stem.window.output.elements());
        convolve_into(stem, weight(stem, parameters), images, 1.0, Accum::Replace, once);
        let (channels, steps) = (stem.window.output.channels, self.shape.spread_steps() as f32);
        let bias = &parameters[stem.first_bias_element()..][..channels];
        parallel::for_each_chunk(once, stem.window.output.elements(), &|_, image| {
            for pixel in image.chunks_mut(channels) {
                // The currents are quotients of a sum, which are exact if the sum is a multiple of
                // the steps.
                pixel.iter_mut().zip(bias).for_each(|(x, b)| *x = (*x + b) / steps);
            }
        });
        for (t, step) in rest.chunks_mut(once.len()).enumerate() {
            if t + 1 < self.shape.fed_time_steps() {
                step.copy_from_slice(once)
            } else {
                step.fill(0.0)
            }
        }
        cpu::compute_spikes(self.neuron, &self.currents[0], &mut self.spikes[0]);
    }

    fn compute_residual_block(&mut self, number: usize, parameters: &[f32]) {
        let block = &self.network.blocks[number];
        let (shape, theta) = (&self.shape, self.theta);
        let (first, second) = (2 * number + 1, 2 * number + 2);
        let input = block_input_spikes(number, &self.pooled_spikes, &self.spikes);
        let convolve = |conv: &ConvolutionLayer, input: &[i8], accum, currents: &mut [f32]| {
            convolve_into(conv, weight(conv, parameters), input, theta, accum, currents);
            add_bias(shape, conv, parameters, currents);
        };
        let currents = f32_values_mut(&mut self.currents[first]);
        convolve(&block.first, input, Accum::Replace, currents);
        cpu::compute_spikes(self.neuron, &self.currents[first], &mut self.spikes[first]);

        let input = block_input_spikes(number, &self.pooled_spikes, &self.spikes);
        let currents = f32_values_mut(&mut self.currents[second]);
        convolve(&block.second, &self.spikes[first], Accum::Replace, currents);
        match &block.shortcut {
            Some(conv) => convolve(conv, input, Accum::Add, currents),
            None => {
                parallel::for_each_chunk(currents, ELEMENTS_PER_TASK, &|piece, currents| {
                    let pairs = currents.iter_mut().zip(&input[piece * ELEMENTS_PER_TASK..]);
                    pairs.for_each(|(x, &s)| *x += theta * f32::from(s));
                });
            }
        }
        cpu::compute_spikes(self.neuron, &self.currents[second], &mut self.spikes[second]);
    }

    fn compute_classifier(&mut self, parameters: &[f32], logits: &mut [f32]) {
        let map = self.network.last_map();
        let (width, b) = (map.channels, self.shape.b);
        let mut sums = vec![0i32; b * width];
        let last = self.spikes.last().expect("there are neurons");
        for (frame, spikes) in last.chunks(map.elements()).enumerate() {
            let sums = &mut sums[frame % b * width..][..width];
            for pixel in spikes.chunks(width) {
                sums.iter_mut().zip(pixel).for_each(|(sum, &s)| *sum += i32::from(s));
            }
        }
        let scale = self.theta / map.pixel_count() as f32;
        self.features.iter_mut().zip(&sums).for_each(|(f, &sum)| *f = scale * sum as f32);
        let (weight, bias) = parameters[self.network.classifier..].split_at(CLASS_COUNT * width);
        let share = self.fed_bias_fraction();
        let images = self.features.chunks(width).zip(logits.chunks_mut(CLASS_COUNT));
        for (features, logits) in images {
            for ((logit, row), b) in logits.iter_mut().zip(weight.chunks(width)).zip(bias) {
                *logit = row.iter().zip(features).map(|(w, f)| w * f).sum::<f32>() + share * b;
            }
        }
    }

    /// Fraction of a bias that the existing time steps feed into the neurons.
    fn fed_bias_fraction(&self) -> f32 {
        self.shape.fed_time_steps() as f32 / self.shape.spread_steps() as f32
    }

    /// Runs one training step of SGD and writes all outputs.
    pub fn run_training_step(&mut self, inputs: &Tensors, outputs: &mut Tensors) {
        self.compute_logits(inputs, outputs.f32_mut("logits"));
        let labels = inputs.tensor("labels").to_f64(0, self.shape.b);
        let (loss, logits) = cross_entropy(outputs.f32("logits"), &labels);
        outputs.f32_mut("loss")[0] = loss;
        self.gradient.resize(self.network.parameters, 0.0);
        let mut gradient = std::mem::take(&mut self.gradient);
        within_range("Backward", || self.compute_gradients(inputs, &logits, &mut gradient));
        let _step = RangeGuard::new("Optimizer");
        let old = inputs.f32("momentum");
        parallel::for_each_chunk(
            outputs.f32_mut("new_momentum"),
            ELEMENTS_PER_TASK,
            &|piece, new| {
                let (old, g) =
                    (&old[piece * ELEMENTS_PER_TASK..], &gradient[piece * ELEMENTS_PER_TASK..]);
                new.iter_mut()
                    .zip(old)
                    .zip(g)
                    .for_each(|((new, m), g)| *new = SGD_MOMENTUM * m + g);
            },
        );
        self.gradient = gradient;
        let mut new = outputs.take("new_parameters").expect("an output");
        let (old, momentum) = (inputs.f32("parameters"), outputs.f32("new_momentum"));
        parallel::for_each_chunk(f32_values_mut(&mut new), ELEMENTS_PER_TASK, &|piece, new| {
            let (old, m) =
                (&old[piece * ELEMENTS_PER_TASK..], &momentum[piece * ELEMENTS_PER_TASK..]);
            let pairs = new.iter_mut().zip(old).zip(m);
            pairs.for_each(|((new, p), m)| *new = p - LEARNING_RATE * m);
        });
        outputs.insert("new_parameters", new);
    }

    fn compute_gradients(&self, inputs: &Tensors, logits: &[f32], gradient: &mut [f32]) {
        let parameters = inputs.f32("parameters");
        let mut spikes = within_range("Final_Layers", || {
            self.classifier_gradients(parameters, logits, gradient)
        });
        for (number, blocks) in self.block_numbers_by_stage().into_iter().enumerate().rev() {
            let _stage = RangeGuard::new(&stage_range_name(number));
            for block in blocks.rev() {
                spikes = self.block_gradient(block, parameters, spikes, gradient);
            }
        }
        let _stem = RangeGuard::new("Conv1_Block");
        if let Some(window) = &self.network.pool {
            let mut before = f32_zeros_like(&self.currents[0]);
            pool_gradient(window, &self.pooled, spikes.f32s(), f32_values_mut(&mut before));
            spikes = before;
        }
        let currents = self.backpropagate_neurons(0, &spikes);
        let stem = &self.network.stem;
        let size = self.shape.b * stem.window.output.elements();
        let mut sum = vec![0.0; size];
        for step in currents.f32s().chunks(size).take(self.shape.fed_time_steps()) {
            parallel::for_each_chunk(&mut sum, ELEMENTS_PER_TASK, &|piece, sum| {
                sum.iter_mut()
                    .zip(&step[piece * ELEMENTS_PER_TASK..])
                    .for_each(|(sum, g)| *sum += g);
            });
        }
        let spread = 1.0 / self.shape.spread_steps() as f32;
        let weight = &mut gradient[stem.weight..stem.first_bias_element()];
        convolution_weight_gradient(stem, inputs.f32("images"), &sum, spread, weight);
        self.bias_gradient(stem, &currents, gradient);
    }

    /// Computes the gradients of the classifier; returns the gradient of the last neurons' spikes.
    fn classifier_gradients(
        &self,
        parameters: &[f32],
        logits: &[f32],
        gradient: &mut [f32],
    ) -> Tensor {
        let map = self.network.last_map();
        let (width, at) = (map.channels, self.network.classifier);
        let weight = &parameters[at..][..CLASS_COUNT * width];
        let (to_weight, to_bias) = gradient[at..].split_at_mut(CLASS_COUNT * width);
        to_weight.fill(0.0);
        to_bias.fill(0.0);
        let scale = self.theta / map.pixel_count() as f32;
        let mut spikes = f32_zeros_like(self.currents.last().expect("there are neurons"));
        let steps = f32_values_mut(&mut spikes);
        let images = self.features.chunks(width).zip(logits.chunks(CLASS_COUNT));
        for (image, (features, logits)) in images.enumerate() {
            let mut to_features = vec![0.0; width];
            for (class, g) in logits.iter().enumerate() {
                let row = class * width..(class + 1) * width;
                to_bias[class] += self.fed_bias_fraction() * g;
                let to = to_weight[row.clone()].iter_mut().zip(features);
                to.for_each(|(to, f)| *to += g * f);
                let to = to_features.iter_mut().zip(&weight[row]);
                to.for_each(|(to, w)| *to += scale * g * w);
            }
            for t in 0..self.shape.t {
                let frame =
                    &mut steps[(t * self.shape.b + image) * map.elements()..][..map.elements()];
                frame.chunks_mut(width).for_each(|pixel| pixel.copy_from_slice(&to_features));
            }
        }
        spikes
    }

    /// Computes the gradient of a block's input spikes from the gradient of its output spikes.
    fn block_gradient(
        &self,
        number: usize,
        parameters: &[f32],
        spikes: Tensor,
        gradient: &mut [f32],
    ) -> Tensor {
        let block = &self.network.blocks[number];
        let theta = self.theta;
        let input = block_input_spikes(number, &self.pooled_spikes, &self.spikes);
        let currents = self.backpropagate_neurons(2 * number + 2, &spikes);
        let add_gradients =
            |conv: &ConvolutionLayer, input: &[i8], output: &Tensor, gradient: &mut [f32]| {
                let weight = &mut gradient[conv.weight..conv.first_bias_element()];
                convolution_weight_gradient(conv, input, output.f32s(), theta, weight);
                self.bias_gradient(conv, output, gradient);
            };
        add_gradients(&block.second, &self.spikes[2 * number + 1], &currents, gradient);
        let mut hidden = f32_zeros_like(&self.currents[2 * number + 1]);
        let second = weight(&block.second, parameters);
        add_input_gradient(
            &block.second,
            second,
            currents.f32s(),
            theta,
            f32_values_mut(&mut hidden),
        );
        let inner = self.backpropagate_neurons(2 * number + 1, &hidden);
        add_gradients(&block.first, input, &inner, gradient);

        let mut before = Tensor::zeroed([self.shape.t, input.len() / self.shape.t], Dtype::F32);
        let to = f32_values_mut(&mut before);
        match &block.shortcut {
            Some(conv) => {
                add_gradients(conv, input, &currents, gradient);
                add_input_gradient(conv, weight(conv, parameters), currents.f32s(), theta, to);
            }
            None => {
                let currents = currents.f32s();
                parallel::for_each_chunk(to, ELEMENTS_PER_TASK, &|piece, to| {
                    to.iter_mut()
                        .zip(&currents[piece * ELEMENTS_PER_TASK..])
                        .for_each(|(to, g)| *to = theta * g);
                });
            }
        }
        add_input_gradient(&block.first, weight(&block.first, parameters), inner.f32s(), theta, to);
        before
    }

    /// Computes the gradient of a layer's input currents from the gradient of its spikes.
    fn backpropagate_neurons(&self, layer: usize, spikes: &Tensor) -> Tensor {
        let mut currents = f32_zeros_like(&self.currents[layer]);
        cpu::current_gradient(
            self.neuron,
            &self.currents[layer],
            spikes,
            currents.tensor_data_mut(),
        );
        currents
    }

    fn bias_gradient(&self, conv: &ConvolutionLayer, output: &Tensor, gradient: &mut [f32]) {
        let channels = conv.window.output.channels;
        let fed = self.shape.fed_time_steps() * self.shape.b * conv.window.output.elements();
        let mut sums = vec![0f64; channels];
        for pixel in output.f32s()[..fed].chunks(channels) {
            sums.iter_mut().zip(pixel).for_each(|(sum, g)| *sum += f64::from(*g));
        }
        let to = &mut gradient[conv.first_bias_element()..][..channels];
        let steps = self.shape.spread_steps() as f64;
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = (sum / steps) as f32);
    }
}

/// The spikes that are the input of a residual block.
fn block_input_spikes<'a>(number: usize, pooled: &'a [i8], spikes: &'a [Vec<i8>]) -> &'a [i8] {
    if number == 0 && !pooled.is_empty() { pooled } else { &spikes[2 * number] }
}

fn weight<'a>(conv: &ConvolutionLayer, parameters: &'a [f32]) -> &'a [f32] {
    &parameters[conv.weight..conv.first_bias_element()]
}

fn add_bias(
    shape: &NetworkShape,
    conv: &ConvolutionLayer,
    parameters: &[f32],
    currents: &mut [f32],
) {
    let steps = shape.spread_steps() as f32;
    let bias: Vec<f32> = parameters[conv.first_bias_element()..][..conv.window.output.channels]
        .iter()
        .map(|b| b / steps)
        .collect();
    let fed = shape.fed_time_steps() * shape.b * conv.window.output.elements();
    parallel::for_each_chunk(&mut currents[..fed], conv.window.output.elements(), &|_, frame| {
        for pixel in frame.chunks_mut(bias.len()) {
            pixel.iter_mut().zip(&bias).for_each(|(x, b)| *x += b);
        }
    });
}

/// Computes the mean cross entropy and the gradient of the logits.
fn cross_entropy(logits: &[f32], labels: &[f64]) -> (f32, Vec<f32>) {
    let share = 1.0 / labels.len() as f64;
    let (mut loss, mut gradient) = (0.0, Vec::with_capacity(logits.len()));
    for (logits, &label) in logits.chunks(CLASS_COUNT).zip(labels) {
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

fn f32_zeros_like(like: &Tensor) -> Tensor {
    Tensor::zeroed(like.shape(), Dtype::F32)
}

fn f32_values_mut(tensor: &mut Tensor) -> &mut [f32] {
    let TensorData::F32(values) = tensor.tensor_data_mut() else { unreachable!("made as f32") };
    values
}

/// Reads a tensor of f32 as a slice; [`f32_values_mut`] is the counterpart that writes.
trait F32Reader {
    fn f32s(&self) -> &[f32];
}

impl F32Reader for Tensor {
    fn f32s(&self) -> &[f32] {
        let TensorData::F32(values) = self.tensor_data() else { unreachable!("made as f32") };
        values
    }
}
