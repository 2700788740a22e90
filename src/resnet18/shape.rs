//! Sizes of a ResNet-18 problem, and the seeded inputs, declared work and host memory derived from
//! them.

use std::path::PathBuf;

use half::bf16;

use super::network::{
    CLASS_COUNT, COLOR_CHANNELS, ConvolutionLayer, NetworkSizes, NetworkStem, ResNet18,
};
use super::weights_file;
use crate::st_bif::neuron::NeuronParameters;
use kernelgate::workload::{AxisError, Dtype, FlopUnit, Point, Tensors, Work, random};

/// Exclusive limit of the numbers of images and time steps: below it no count overflows 64 bits.
const MAX_EXTENT: usize = 1 << 16;

/// Distribution from which weights and images are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrawDistribution {
    /// Normally distributed values, rounded to the dtype.
    Normal,
    /// Weights come from a safetensors file; images are normal, rounded to the dtype.
    File,
    /// Normal values, rounded to multiples of powers of two so coarse that every sum of the forward
    /// pass is exact in fp32, in any order. The dyadic weights and images are exact bf16 values.
    Dyadic,
}

/// Parameters that inference and training share: a network, images and time steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkShape {
    pub sizes: NetworkSizes,
    /// Batch size: the number of images.
    pub b: usize,
    /// Number of time steps.
    pub t: usize,
    /// Quantisation level of the neurons: 4, 8 or 16.
    pub level: usize,
    /// Distribution of weights and images.
    pub draw: DrawDistribution,
    /// Dtype that represents weights and images exactly, and that GEMM operands must have at least.
    pub dtype: Dtype,
}

impl NetworkShape {
    pub(super) fn bind(point: &Point) -> Result<Self, AxisError> {
        let stem =
            if point.word("stem")? == "cifar" { NetworkStem::Cifar } else { NetworkStem::ImageNet };
        let (b, t, width) = (point.number("b")?, point.number("t")?, point.number("w")?);
        if b.max(t) > MAX_EXTENT {
            return Err(AxisError::Combination(format!("b={b}, t={t}: up to {MAX_EXTENT} each")));
        }
        if !width.is_multiple_of(8) || width > 1024 {
            return Err(AxisError::Combination(format!("w={width}: multiples of 8 up to 1024")));
        }
        let draw = match point.word("weights")? {
            "normal" => DrawDistribution::Normal,
            "file" => DrawDistribution::File,
            _ => DrawDistribution::Dyadic,
        };
        let dtype = Dtype::parse(point.word("dtype")?).expect("the axis lists dtypes");
        let sizes = NetworkSizes { stem, width, blocks: 2, side: 32 };
        Ok(Self { sizes, b, t, level: point.number("level")?, draw, dtype })
    }

    /// Number of images in all time steps together.
    pub fn frame_count(&self) -> usize {
        self.t * self.b
    }

    /// Number of time steps over which image and biases are spread: `level/2 - 1`. With fewer time
    /// steps the network never sees the whole image, and only the time of such a case is
    /// meaningful.
    pub fn spread_steps(&self) -> usize {
        self.level / 2 - 1
    }

    /// Number of time steps in which image and biases are fed.
    pub fn fed_time_steps(&self) -> usize {
        self.spread_steps().min(self.t)
    }

    /// Remark on a case whose network never sees the whole image.
    pub(super) fn unseen_image_remark(&self) -> Option<String> {
        let (t, steps) = (self.t, self.spread_steps());
        (t < steps).then(|| {
            format!(
                "t={t} is below the {steps} steps of the encoding: only its time means anything"
            )
        })
    }

    /// Parameters of every neuron: a threshold of `4/level`, so that values end at 1, 1.5 and 1.75
    /// for the levels 4, 8 and 16; a tracer from 0 to `level/2 - 1`.
    pub fn neuron(&self) -> NeuronParameters {
        let threshold = 4.0 / self.level as f64;
        let tracer_max = self.spread_steps() as i32;
        NeuronParameters { threshold, tracer_min: 0, tracer_max, prefire: 0.0 }
    }

    /// Draws random images, labels and parameters from the seed.
    pub(super) fn inputs(&self, seed: u64) -> Tensors {
        let (side, b) = (self.sizes.side, self.b);
        let label = |x: f32| ((x.abs() * 1e3) as usize % CLASS_COUNT) as i8;
        let network = self.sizes.build_network();
        let parameters = self.draw_parameters(&network, seed);
        Tensors::new()
            .with("images", [b, side, side, COLOR_CHANNELS], self.drawn_images(seed))
            .with("labels", [b], random::map_normal_values(seed, "labels", b, label))
            .with("parameters", self.parameter_shape(&network), parameters)
    }

    /// Shape of all parameters together: rows of the width, so that each parameter but the last
    /// bias fills whole rows.
    pub fn parameter_shape(&self, network: &ResNet18) -> [usize; 2] {
        [network.parameters / self.sizes.width, self.sizes.width]
    }

    /// Draws images from N(0, 1). Dyadic images are rounded so that each step's share is a multiple
    /// of 1/64, and the sum of all steps has eight significant bits.
    fn drawn_images(&self, seed: u64) -> Vec<f32> {
        let (steps, len) = (self.spread_steps() as f32, self.b * self.sizes.image().elements());
        let most = (255.0 / steps).floor();
        random::map_normal_values(seed, "images", len, |x| match self.draw {
            DrawDistribution::Dyadic => {
                (x * 64.0 / steps).round().clamp(-most, most) * steps / 64.0
            }
            DrawDistribution::Normal | DrawDistribution::File => self.round(x),
        })
    }

    pub fn logits_shape(&self) -> [usize; 2] {
        [self.b, CLASS_COUNT]
    }

    fn round(&self, x: f32) -> f32 {
        if self.dtype == Dtype::Bf16 { bf16::from_f32(x).to_f32() } else { x }
    }

    /// Draws weights with a standard deviation that keeps the neurons of all layers active, as
    /// training does, and negative biases against the growth of the residual sum.
    fn draw_parameters(&self, network: &ResNet18, seed: u64) -> Vec<f32> {
        if self.draw == DrawDistribution::File {
            // Errors of the file were reported before any tensor is drawn.
            let read = |path: PathBuf| weights_file::read_weights(&path, network);
            let parameters = weights_file::weights_file_path().and_then(read).unwrap_or_default();
            return parameters.into_iter().map(|value| self.round(value)).collect();
        }
        let mut parameters = vec![0.0; network.parameters];
        let mut draw =
            |name: String, first: usize, len: usize, value: &(dyn Fn(f32) -> f32 + Sync)| {
                parameters[first..first + len]
                    .copy_from_slice(&random::map_normal_values(seed, &name, len, value));
            };
        let steps = self.spread_steps() as f32;
        let bias = |x: f32| match self.draw {
            DrawDistribution::Dyadic => (x * 256.0 / steps).round() * steps / 256.0,
            DrawDistribution::Normal | DrawDistribution::File => x,
        };
        for conv in network.block_convolutions() {
            let deviation = weight_deviation(conv);
            let weight = |x: f32| self.scale_sample_to_weight(deviation, x);
            draw(format!("{}.weight", conv.name), conv.weight, conv.weight_elements(), &weight);
            let shift = if conv.name.ends_with("conv2") { -0.1 } else { 0.0 };
            draw(
                format!("{}.bias", conv.name),
                conv.first_bias_element(),
                conv.window.output.channels,
                &|x| bias(0.1 * x + shift),
            );
        }
        let features = network.last_map().channels;
        let deviation = 1.0 / (features as f32).sqrt();
        let weights = CLASS_COUNT * features;
        let weight = |x: f32| self.scale_sample_to_weight(deviation, x);
        draw("fc.weight".to_owned(), network.classifier, weights, &weight);
        draw("fc.bias".to_owned(), network.classifier + weights, CLASS_COUNT, &|x| bias(0.1 * x));
        parameters
    }

    /// Scales a sample to a weight. Dyadic weights have eight significant bits on a grid that
    /// covers four standard deviations.
    fn scale_sample_to_weight(&self, deviation: f32, x: f32) -> f32 {
        match self.draw {
            DrawDistribution::Dyadic => {
                let grid = (4.0 * deviation / 255.0).log2().ceil().exp2();
                (deviation * x / grid).round().clamp(-255.0, 255.0) * grid
            }
            DrawDistribution::Normal | DrawDistribution::File => self.round(deviation * x),
        }
    }

    /// Floating-point operations of the convolutions after the stem, in one pass over all frames,
    /// without operations on padding.
    pub(super) fn hidden_convolution_flops(&self, network: &ResNet18) -> u64 {
        let hidden: u64 =
            network.block_convolutions().skip(1).map(ConvolutionLayer::multiply_adds).sum();
        2 * self.frame_count() as u64 * hidden
    }

    /// Floating-point operations of the stem and the classifier. The operands of stem and
    /// classifier are the image and the sum over time, so their operations count once for each
    /// image.
    pub(super) fn stem_and_classifier_flops(&self, network: &ResNet18) -> u64 {
        let classifier = (CLASS_COUNT * network.last_map().channels) as u64;
        2 * self.b as u64 * (network.stem.multiply_adds() + classifier)
    }

    /// Number of neurons of all images, times the number of time steps.
    pub(super) fn neuron_time_steps(&self, network: &ResNet18) -> u64 {
        (self.frame_count() * network.neuron_count()) as u64
    }

    /// Work of a forward pass that reads parameters and images once.
    pub(super) fn forward_work(&self, network: &ResNet18) -> Work {
        let elements = network.parameters + self.b * self.sizes.image().elements();
        let neurons = self.neuron_time_steps(network);
        let logits = self.b * CLASS_COUNT * Dtype::F32.bytes();
        // Operations of a neuron step: v += x, θ·s, v -= θ·s, c += s, and the bias.
        Work::bytes((elements * self.dtype.bytes()) as u64, logits as u64)
            .with_flops(
                FlopUnit::Matmul,
                self.dtype,
                self.hidden_convolution_flops(network) + self.stem_and_classifier_flops(network),
            )
            .with_flops(FlopUnit::Vector, Dtype::F32, 5 * neurons)
    }

    /// Bytes of host memory of the problem: the inputs, the reference's currents (f64) and spikes
    /// of all layers, and a few frames of the largest layer.
    pub(super) fn host_bytes(&self, network: &ResNet18) -> u64 {
        let largest =
            network.neuron_layer_extents().iter().map(|map| map.elements()).max().unwrap_or(0);
        let frames = self.frame_count() as u64;
        let images = self.b as u64 * self.sizes.image().elements() as u64;
        12 * images
            + 9 * self.neuron_time_steps(network)
            + 4 * 8 * frames * largest as u64
            + 16 * network.parameters as u64
    }
}

/// Standard deviation of a convolution's weights, from the average number of inputs of an output
/// pixel. If all inputs are as large as the values of neurons, sums are about one, and about half
/// if the residual is added.
fn weight_deviation(conv: &ConvolutionLayer) -> f32 {
    let window = conv.window;
    let taps = window.pixel_tap_reads() as f32 / window.output.pixel_count() as f32;
    let inputs = (taps * window.input.channels as f32).sqrt();
    match conv.name.as_str() {
        "conv1" => 1.0 / inputs,
        name if name.ends_with("conv1") => 2.2 / inputs,
        _ => 1.3 / inputs,
    }
}
