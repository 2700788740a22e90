//! A second implementation of the network, against which the reference and its gradient are tested:
//! scalar by scalar on a tape, time step by time step. The second implementation shares no
//! arithmetic with the reference and the rows.

use super::network::{CLASS_COUNT, ConvolutionLayer, FeatureMap};
use super::shape::NetworkShape;
use kernelgate::workload::Tensors;

/// Index of a scalar on the tape of automatic differentiation.
type TapeNode = usize;

/// Tape of automatic differentiation: scalars in the order of their computation, each with its
/// derivatives by the scalars from which it was computed.
#[derive(Default)]
struct DerivativeTape {
    values: Vec<f64>,
    derivatives: Vec<Vec<(TapeNode, f64)>>,
}

impl DerivativeTape {
    fn add_node(&mut self, value: f64, derivatives: Vec<(TapeNode, f64)>) -> TapeNode {
        self.values.push(value);
        self.derivatives.push(derivatives);
        self.values.len() - 1
    }

    fn add_leaf(&mut self, value: f64) -> TapeNode {
        self.add_node(value, Vec::new())
    }

    /// Appends `Σ factor·node` to the tape.
    fn append_sum(&mut self, terms: &[(TapeNode, f64)]) -> TapeNode {
        let value = terms.iter().map(|(node, factor)| factor * self.values[*node]).sum();
        self.add_node(value, terms.to_vec())
    }

    /// Appends `factor·Σ a·b` to the tape.
    fn append_dot_product(&mut self, pairs: &[(TapeNode, TapeNode)], factor: f64) -> TapeNode {
        let value: f64 = pairs.iter().map(|(a, b)| self.values[*a] * self.values[*b]).sum();
        let derivatives = pairs
            .iter()
            .flat_map(|&(a, b)| [(a, factor * self.values[b]), (b, factor * self.values[a])]);
        let derivatives = derivatives.collect();
        self.add_node(factor * value, derivatives)
    }

    /// Derivatives of a scalar by every earlier scalar on the tape.
    fn derivatives_of(&self, of: TapeNode) -> Vec<f64> {
        let mut gradient = vec![0.0; self.values.len()];
        gradient[of] = 1.0;
        for node in (0..=of).rev() {
            for &(from, derivative) in &self.derivatives[node] {
                gradient[from] += gradient[node] * derivative;
            }
        }
        gradient
    }
}

/// State of one neuron: its membrane and its tracer.
#[derive(Clone, Copy)]
struct NeuronMembraneAndTracer {
    v: TapeNode,
    c: TapeNode,
}

/// The network, computed on a tape of automatic differentiation.
pub struct TapeNetwork<'a> {
    shape: &'a NetworkShape,
    tape: DerivativeTape,
    parameters: Vec<TapeNode>,
    /// Sum of all spikes of each neuron, layer by layer, `[B, side, side, channels]`.
    pub tracers: Vec<Vec<f64>>,
    /// Logits of the images, `[B, 10]`.
    pub logits: Vec<f64>,
    /// Mean cross entropy of the logits.
    pub loss: f64,
    /// Gradient of each parameter.
    pub gradient: Vec<f64>,
}

impl<'a> TapeNetwork<'a> {
    /// Runs the network forward and backward on a tape.
    pub fn new(shape: &'a NetworkShape, inputs: &Tensors) -> Self {
        let mut tape = DerivativeTape::default();
        let mut leaves = |name: &str| -> Vec<TapeNode> {
            let tensor = inputs.tensor(name);
            tensor.to_f64(0, tensor.len()).into_iter().map(|x| tape.add_leaf(x)).collect()
        };
        let (images, parameters) = (leaves("images"), leaves("parameters"));
        let labels = inputs.tensor("labels").to_f64(0, shape.b);
        let mut plain = Self {
            shape,
            tape,
            parameters,
            tracers: vec![Vec::new(); shape.sizes.build_network().neuron_layer_extents().len()],
            logits: Vec::new(),
            loss: 0.0,
            gradient: Vec::new(),
        };
        let size = shape.sizes.image().elements();
        let mut losses = Vec::new();
        for (image, label) in images.chunks(size).zip(labels) {
            let logits = plain.image_logits(image);
            plain.logits.extend(logits.iter().map(|&node| plain.tape.values[node]));
            losses
                .push((plain.cross_entropy_on_tape(&logits, label as usize), 1.0 / shape.b as f64));
        }
        let loss = plain.tape.append_sum(&losses);
        plain.loss = plain.tape.values[loss];
        let gradient = plain.tape.derivatives_of(loss);
        plain.gradient = plain.parameters.iter().map(|&node| gradient[node]).collect();
        plain
    }

    fn image_logits(&mut self, image: &[TapeNode]) -> Vec<TapeNode> {
        let network = self.shape.sizes.build_network();
        let theta = self.shape.neuron().threshold;
        let steps = self.shape.spread_steps() as f64;
        let maps = network.neuron_layer_extents();
        let mut states: Vec<Vec<NeuronMembraneAndTracer>> = Vec::new();
        for map in &maps {
            let state = |tape: &mut DerivativeTape| NeuronMembraneAndTracer {
                v: tape.add_leaf(0.5 * theta),
                c: tape.add_leaf(0.0),
            };
            states.push((0..map.elements()).map(|_| state(&mut self.tape)).collect());
        }
        let mut pooled: Option<Vec<TapeNode>> = None;
        let mut totals: Vec<Vec<(TapeNode, f64)>> = vec![Vec::new(); CLASS_COUNT];
        for t in 0..self.shape.t {
            let fed = (t as f64) < steps;
            let image = image.iter().map(|&x| (x, if fed { 1.0 / steps } else { 0.0 }));
            let image: Vec<TapeNode> = image.map(|term| self.tape.append_sum(&[term])).collect();
            let currents = self.convolve_on_tape(&network.stem, &image, 1.0, fed);
            let mut spikes = self.advance_neurons(&mut states[0], &currents);
            if let Some(pool) = &network.pool {
                let sums: Vec<TapeNode> = states[0].iter().map(|state| state.c).collect();
                let now = self.pool_first_maximum(pool.input, pool.output, &sums);
                let before = pooled.replace(now.clone());
                spikes = (0..now.len())
                    .map(|i| match &before {
                        Some(before) => self.tape.append_sum(&[(now[i], 1.0), (before[i], -1.0)]),
                        None => now[i],
                    })
                    .collect();
            }
            for (number, block) in network.blocks.iter().enumerate() {
                let currents = self.convolve_on_tape(&block.first, &spikes, theta, fed);
                let hidden = self.advance_neurons(&mut states[2 * number + 1], &currents);
                let branch = self.convolve_on_tape(&block.second, &hidden, theta, fed);
                let (shortcut, factor) = match &block.shortcut {
                    Some(conv) => (self.convolve_on_tape(conv, &spikes, theta, fed), 1.0),
                    None => (spikes, theta),
                };
                let sum = |(&x, &y): (&TapeNode, &TapeNode)| {
                    self.tape.append_sum(&[(x, 1.0), (y, factor)])
                };
                let currents: Vec<TapeNode> = branch.iter().zip(&shortcut).map(sum).collect();
                spikes = self.advance_neurons(&mut states[2 * number + 2], &currents);
            }
            let logits = self.add_classifier(&spikes, network.last_map(), network.classifier, fed);
            totals.iter_mut().zip(logits).for_each(|(total, node)| total.push((node, 1.0)));
        }
        for (tracers, states) in self.tracers.iter_mut().zip(&states) {
            tracers.extend(states.iter().map(|state| self.tape.values[state.c]));
        }
        totals.iter().map(|terms| self.tape.append_sum(terms)).collect()
    }

    /// Computes `factor·conv(input)`, with the bias in a fed time step.
    fn convolve_on_tape(
        &mut self,
        conv: &ConvolutionLayer,
        input: &[TapeNode],
        factor: f64,
        fed: bool,
    ) -> Vec<TapeNode> {
        let (from, to) = (conv.window.input, conv.window.output);
        let (k, stride) = (conv.window.kernel as isize, conv.window.stride as isize);
        let inside = |x: isize| (0..from.side as isize).contains(&x);
        let mut output = Vec::new();
        for row in 0..to.side as isize {
            for column in 0..to.side as isize {
                for filter in 0..to.channels {
                    let mut pairs = Vec::new();
                    for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
                        let (y, x) = (row * stride + i - k / 2, column * stride + j - k / 2);
                        if !inside(y) || !inside(x) {
                            continue;
                        }
                        for channel in 0..from.channels {
                            let tap = filter * (k * k) as usize + (i * k + j) as usize;
                            let pixel = y as usize * from.side + x as usize;
                            pairs.push((
                                self.parameters[conv.weight + tap * from.channels + channel],
                                input[pixel * from.channels + channel],
                            ));
                        }
                    }
                    let sum = self.tape.append_dot_product(&pairs, factor);
                    let share = if fed { 1.0 / self.shape.spread_steps() as f64 } else { 0.0 };
                    let bias = self.parameters[conv.first_bias_element() + filter];
                    output.push(self.tape.append_sum(&[(sum, 1.0), (bias, share)]));
                }
            }
        }
        output
    }

    /// Computes one time step of a layer: returns its spikes and updates the neurons' states.
    fn advance_neurons(
        &mut self,
        states: &mut [NeuronMembraneAndTracer],
        currents: &[TapeNode],
    ) -> Vec<TapeNode> {
        let parameters = self.shape.neuron();
        let (theta, top) = (parameters.threshold, f64::from(parameters.tracer_max));
        let bell = |z: f64, w: f64| (-z * z / (2.0 * (0.405 * w) * (0.405 * w))).exp() / w;
        let mut spikes = Vec::new();
        for (state, &x) in states.iter_mut().zip(currents) {
            let h = self.tape.append_sum(&[(state.v, 1.0), (x, 1.0)]);
            let (membrane, c) = (self.tape.values[h], self.tape.values[state.c]);
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
            let s = self.tape.add_node(spike, vec![(h, by_h), (state.c, by_c)]);
            state.v = self.tape.append_sum(&[(h, 1.0), (s, -theta)]);
            state.c = self.tape.append_sum(&[(state.c, 1.0), (s, 1.0)]);
            spikes.push(s);
        }
        spikes
    }

    /// Returns the first maximum of the 3×3 sums around every second pixel.
    fn pool_first_maximum(
        &mut self,
        from: FeatureMap,
        to: FeatureMap,
        sums: &[TapeNode],
    ) -> Vec<TapeNode> {
        let mut output = Vec::new();
        for pixel in 0..to.pixel_count() {
            let (row, column) = (pixel / to.side, pixel % to.side);
            for channel in 0..to.channels {
                let mut best: Option<TapeNode> = None;
                for y in (2 * row).saturating_sub(1)..(2 * row + 2).min(from.side) {
                    for x in (2 * column).saturating_sub(1)..(2 * column + 2).min(from.side) {
                        let node = sums[(y * from.side + x) * from.channels + channel];
                        let larger = |best| self.tape.values[node] > self.tape.values[best];
                        if best.is_none_or(larger) {
                            best = Some(node);
                        }
                    }
                }
                let best = best.expect("a window has a pixel");
                output.push(self.tape.append_sum(&[(best, 1.0)]));
            }
        }
        output
    }

    fn add_classifier(
        &mut self,
        spikes: &[TapeNode],
        map: FeatureMap,
        at: usize,
        fed: bool,
    ) -> Vec<TapeNode> {
        let scale = self.shape.neuron().threshold / map.pixel_count() as f64;
        let of_channel = |channel: usize| -> Vec<(TapeNode, f64)> {
            (0..map.pixel_count())
                .map(|pixel| (spikes[pixel * map.channels + channel], scale))
                .collect()
        };
        let features: Vec<TapeNode> =
            (0..map.channels).map(|channel| self.tape.append_sum(&of_channel(channel))).collect();
        let share = if fed { 1.0 / self.shape.spread_steps() as f64 } else { 0.0 };
        (0..CLASS_COUNT)
            .map(|class| {
                let row = &self.parameters[at + class * map.channels..][..map.channels];
                let pairs: Vec<_> = row.iter().copied().zip(features.iter().copied()).collect();
                let sum = self.tape.append_dot_product(&pairs, 1.0);
                let bias = self.parameters[at + CLASS_COUNT * map.channels + class];
                self.tape.append_sum(&[(sum, 1.0), (bias, share)])
            })
            .collect()
    }

    fn cross_entropy_on_tape(&mut self, logits: &[TapeNode], label: usize) -> TapeNode {
        let powers: Vec<f64> = logits.iter().map(|&node| self.tape.values[node].exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut derivatives: Vec<(TapeNode, f64)> =
            logits.iter().zip(&powers).map(|(&node, power)| (node, power / sum)).collect();
        derivatives.push((logits[label], -1.0));
        let loss = sum.ln() - self.tape.values[logits[label]];
        self.tape.add_node(loss, derivatives)
    }
}
