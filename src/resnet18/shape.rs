//! Sizes of a ResNet-18 problem, and the seeded inputs, declared work and host memory that follow
//! from them.

use std::path::PathBuf;

use half::bf16;

use super::network::{
    CLASSIFIER_CLASS_COUNT, COLOR_CHANNELS, ConvolutionLayer, ResNet18Layers, ResNetSizes,
    ResNetStem,
};
use super::weights_file;
use crate::st_bif::neuron::StBifNeuronParameters;
use kernelgate::workload::{AxisError, Dtype, FlopUnit, Point, Tensors, Work, random};

/// Exclusive upper limit of the number of images and of time steps: below this limit no count
/// overflows 64 bits.
const IMAGE_AND_STEP_COUNT_LIMIT: usize = 1 << 16;

/// Distribution from which weights and images are drawn, or the file of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightAndImageSource {
    /// Weights and images are normally distributed and rounded to the dtype.
    NormalSamples,
    /// Weights come from a safetensors file; images are normally distributed and rounded to the
    /// dtype.
    WeightsFile,
    /// Weights and images are normal samples rounded to multiples of powers of two, so coarse that
    /// every sum of the forward pass is exact in fp32. Dyadic weights and images are exact bf16
    /// values.
    DyadicSamples,
}

/// Parameters that inference and training problems share: a network, the number of images and of
/// time steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResNetParameters {
    pub sizes: ResNetSizes,
    /// Batch size: the number of images.
    pub batch_size: usize,
    /// Number of time steps.
    pub time_steps: usize,
    /// Quantisation level of the neurons' activations: 4, 8 or 16.
    pub quantisation_level: usize,
    /// Distribution or file from which weights and images come.
    pub weight_and_image_source: WeightAndImageSource,
    /// Dtype that represents weights and images exactly; GEMM operands must have at least its
    /// precision.
    pub dtype: Dtype,
}

impl ResNetParameters {
    pub(super) fn bind_resnet_axes(point: &Point) -> Result<Self, AxisError> {
        let stem = if point.word("stem")? == "cifar" {
            ResNetStem::CifarStem
        } else {
            ResNetStem::ImageNetStem
        };
        let (b, t, width) = (point.number("b")?, point.number("t")?, point.number("w")?);
        if b.max(t) > IMAGE_AND_STEP_COUNT_LIMIT {
            return Err(AxisError::InvalidCombinationOfValues(format!(
                "b={b}, t={t}: up to {IMAGE_AND_STEP_COUNT_LIMIT} each"
            )));
        }
        if !width.is_multiple_of(8) || width > 1024 {
            return Err(AxisError::InvalidCombinationOfValues(format!(
                "w={width}: multiples of 8 up to 1024"
            )));
        }
        let draw = match point.word("weights")? {
            "normal" => WeightAndImageSource::NormalSamples,
            "file" => WeightAndImageSource::WeightsFile,
            _ => WeightAndImageSource::DyadicSamples,
        };
        let dtype = Dtype::parse_dtype_name(point.word("dtype")?).expect("the axis lists dtypes");
        let sizes = ResNetSizes {
            stem,
            first_stage_channels: width,
            blocks_per_stage: 2,
            image_side_pixels: 32,
        };
        Ok(Self {
            sizes,
            batch_size: b,
            time_steps: t,
            quantisation_level: point.number("level")?,
            weight_and_image_source: draw,
            dtype,
        })
    }

    /// Number of frames: images times time steps.
    pub fn frames_over_all_time_steps(&self) -> usize {
        self.time_steps * self.batch_size
    }

    /// Number of time steps over which the image and the biases are spread: `level/2 - 1`. With
    /// fewer time steps than these, the network never sees the whole image, and only the time of
    /// such a case is meaningful, not its logits.
    pub fn time_steps_to_spread_image(&self) -> usize {
        self.quantisation_level / 2 - 1
    }

    /// Number of existing time steps in which the image and the biases are fed into neurons.
    pub fn time_steps_fed_with_image(&self) -> usize {
        self.time_steps_to_spread_image().min(self.time_steps)
    }

    /// Remark for reports on a case with so few time steps that the network never sees the whole
    /// image.
    pub(super) fn remark_on_unseen_image(&self) -> Option<String> {
        let (t, steps) = (self.time_steps, self.time_steps_to_spread_image());
        (t < steps).then(|| {
            format!(
                "t={t} is below the {steps} steps of the encoding: only its time means anything"
            )
        })
    }

    /// Parameters of all neurons: threshold `4/level`, so that activations end at 1, 1.5 and 1.75
    /// for the levels 4, 8 and 16; tracer from 0 to `level/2 - 1`.
    pub fn neuron_parameters(&self) -> StBifNeuronParameters {
        let threshold = 4.0 / self.quantisation_level as f64;
        let tracer_max = self.time_steps_to_spread_image() as i32;
        StBifNeuronParameters {
            firing_threshold: threshold,
            tracer_min: 0,
            tracer_max,
            prefire_fraction_of_threshold: 0.0,
        }
    }

    /// Draws images, labels and parameters from the seed.
    pub(super) fn draw_images_labels_and_parameters(&self, seed: u64) -> Tensors {
        let (side, b) = (self.sizes.image_side_pixels, self.batch_size);
        let label = |x: f32| ((x.abs() * 1e3) as usize % CLASSIFIER_CLASS_COUNT) as i8;
        let network = self.sizes.build_resnet18_layers();
        let parameters = self.draw_or_read_parameters(&network, seed);
        Tensors::new()
            .with_tensor("images", [b, side, side, COLOR_CHANNELS], self.draw_rounded_images(seed))
            .with_tensor(
                "labels",
                [b],
                random::map_standard_normal_values(seed, "labels", b, label),
            )
            .with_tensor("parameters", self.shape_of_parameter_tensor(&network), parameters)
    }

    /// Shape of the tensor of all parameters: rows of `width` elements, so that each parameter
    /// tensor but the last bias fills whole rows.
    pub fn shape_of_parameter_tensor(&self, network: &ResNet18Layers) -> [usize; 2] {
        [
            network.padded_parameter_count / self.sizes.first_stage_channels,
            self.sizes.first_stage_channels,
        ]
    }

    /// Draws images from N(0, 1) and rounds them to the dtype or to the dyadic grid. Dyadic images
    /// are rounded so that the share of one time step is a multiple of 1/64, and the sum of all
    /// steps has eight significant bits.
    fn draw_rounded_images(&self, seed: u64) -> Vec<f32> {
        let (steps, len) = (
            self.time_steps_to_spread_image() as f32,
            self.batch_size * self.sizes.image_extents().elements_per_frame(),
        );
        let most = (255.0 / steps).floor();
        random::map_standard_normal_values(seed, "images", len, |x| {
            match self.weight_and_image_source {
                WeightAndImageSource::DyadicSamples => {
                    (x * 64.0 / steps).round().clamp(-most, most) * steps / 64.0
                }
                WeightAndImageSource::NormalSamples | WeightAndImageSource::WeightsFile => {
                    self.round_to_problem_dtype(x)
                }
            }
        })
    }

    pub fn shape_of_logits(&self) -> [usize; 2] {
        [self.batch_size, CLASSIFIER_CLASS_COUNT]
    }

    fn round_to_problem_dtype(&self, x: f32) -> f32 {
        if self.dtype == Dtype::Bf16 { bf16::from_f32(x).to_f32() } else { x }
    }

    /// Draws weights whose standard deviation keeps the neurons of all layers active, and negative
    /// biases, which limit the growth of the residual sum.
    fn draw_or_read_parameters(&self, network: &ResNet18Layers, seed: u64) -> Vec<f32> {
        if self.weight_and_image_source == WeightAndImageSource::WeightsFile {
            // Errors of the weights file were reported before any tensor is drawn, so reading the
            // file cannot fail in this function.
            let read = |path: PathBuf| weights_file::read_and_reorder_weights(&path, network);
            let parameters =
                weights_file::weights_path_from_environment().and_then(read).unwrap_or_default();
            return parameters
                .into_iter()
                .map(|value| self.round_to_problem_dtype(value))
                .collect();
        }
        let mut parameters = vec![0.0; network.padded_parameter_count];
        let mut draw =
            |name: String, first: usize, len: usize, value: &(dyn Fn(f32) -> f32 + Sync)| {
                parameters[first..first + len]
                    .copy_from_slice(&random::map_standard_normal_values(seed, &name, len, value));
            };
        let steps = self.time_steps_to_spread_image() as f32;
        let bias = |x: f32| match self.weight_and_image_source {
            WeightAndImageSource::DyadicSamples => (x * 256.0 / steps).round() * steps / 256.0,
            WeightAndImageSource::NormalSamples | WeightAndImageSource::WeightsFile => x,
        };
        for conv in network.all_convolutions() {
            let deviation = standard_deviation_of_weights(conv);
            let weight = |x: f32| self.scale_and_round_sample_to_weight(deviation, x);
            draw(
                format!("{}.weight", conv.layer_name),
                conv.first_weight_index,
                conv.elements_of_weight(),
                &weight,
            );
            let shift = if conv.layer_name.ends_with("conv2") { -0.1 } else { 0.0 };
            draw(
                format!("{}.bias", conv.layer_name),
                conv.index_of_first_bias(),
                conv.window.output_extents.channels,
                &|x| bias(0.1 * x + shift),
            );
        }
        let features = network.last_feature_map().channels;
        let deviation = 1.0 / (features as f32).sqrt();
        let weights = CLASSIFIER_CLASS_COUNT * features;
        let weight = |x: f32| self.scale_and_round_sample_to_weight(deviation, x);
        draw("fc.weight".to_owned(), network.first_classifier_weight_index, weights, &weight);
        draw(
            "fc.bias".to_owned(),
            network.first_classifier_weight_index + weights,
            CLASSIFIER_CLASS_COUNT,
            &|x| bias(0.1 * x),
        );
        parameters
    }

    /// Scales a sample of N(0, 1) to a weight of the given standard deviation and rounds it. Dyadic
    /// weights have eight significant bits on a grid that covers four standard deviations.
    fn scale_and_round_sample_to_weight(&self, deviation: f32, x: f32) -> f32 {
        match self.weight_and_image_source {
            WeightAndImageSource::DyadicSamples => {
                let grid = (4.0 * deviation / 255.0).log2().ceil().exp2();
                (deviation * x / grid).round().clamp(-255.0, 255.0) * grid
            }
            WeightAndImageSource::NormalSamples | WeightAndImageSource::WeightsFile => {
                self.round_to_problem_dtype(deviation * x)
            }
        }
    }

    /// FLOPs of all convolutions after the stem in one pass over all frames, without operations on
    /// padding.
    pub(super) fn flops_of_convolutions_after_stem(&self, network: &ResNet18Layers) -> u64 {
        let hidden: u64 =
            network.all_convolutions().skip(1).map(ConvolutionLayer::multiply_adds_per_frame).sum();
        2 * self.frames_over_all_time_steps() as u64 * hidden
    }

    /// FLOPs of the stem's convolution and of the classifier. The operations of stem and classifier
    /// count once for each image, because the stem reads the image and the classifier reads the sum
    /// over time.
    pub(super) fn flops_of_stem_and_classifier(&self, network: &ResNet18Layers) -> u64 {
        let classifier = (CLASSIFIER_CLASS_COUNT * network.last_feature_map().channels) as u64;
        2 * self.batch_size as u64 * (network.stem.multiply_adds_per_frame() + classifier)
    }

    /// Number of neuron updates: neurons of all images times time steps.
    pub(super) fn neuron_updates_over_all_steps(&self, network: &ResNet18Layers) -> u64 {
        (self.frames_over_all_time_steps() * network.neurons_per_image()) as u64
    }

    /// Work of a forward pass that reads all parameters and images once.
    pub(super) fn work_of_forward_pass(&self, network: &ResNet18Layers) -> Work {
        let elements = network.padded_parameter_count
            + self.batch_size * self.sizes.image_extents().elements_per_frame();
        let neurons = self.neuron_updates_over_all_steps(network);
        let logits = self.batch_size * CLASSIFIER_CLASS_COUNT * Dtype::F32.bytes_per_element();
        // The declared work counts five vector operations for each neuron and time step: v += x,
        // θ·s, v -= θ·s, c += s, and the bias.
        Work::bytes((elements * self.dtype.bytes_per_element()) as u64, logits as u64)
            .with_flops(
                FlopUnit::Matmul,
                self.dtype,
                self.flops_of_convolutions_after_stem(network)
                    + self.flops_of_stem_and_classifier(network),
            )
            .with_flops(FlopUnit::VectorArithmetic, Dtype::F32, 5 * neurons)
    }

    /// Bytes of host memory: the inputs, the reference's fp64 currents and spikes of all layers,
    /// and a few frames of the largest layer.
    pub(super) fn estimate_resnet_host_bytes(&self, network: &ResNet18Layers) -> u64 {
        let largest = network
            .extents_of_neuron_layers()
            .iter()
            .map(|map| map.elements_per_frame())
            .max()
            .unwrap_or(0);
        let frames = self.frames_over_all_time_steps() as u64;
        let images =
            self.batch_size as u64 * self.sizes.image_extents().elements_per_frame() as u64;
        12 * images
            + 9 * self.neuron_updates_over_all_steps(network)
            + 4 * 8 * frames * largest as u64
            + 16 * network.padded_parameter_count as u64
    }
}

/// Standard deviation of a convolution's drawn weights, from the average number of inputs that an
/// output pixel reads. With this deviation, and inputs as large as the neurons' values, the sums of
/// a convolution are about one, or about half if a residual is added.
fn standard_deviation_of_weights(conv: &ConvolutionLayer) -> f32 {
    let window = conv.window;
    let taps =
        window.pixel_reads_per_frame() as f32 / window.output_extents.pixels_per_frame() as f32;
    let inputs = (taps * window.input_extents.channels as f32).sqrt();
    match conv.layer_name.as_str() {
        "conv1" => 1.0 / inputs,
        name if name.ends_with("conv1") => 2.2 / inputs,
        _ => 1.3 / inputs,
    }
}
