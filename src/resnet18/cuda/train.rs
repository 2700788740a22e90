//! Rung of a training step with one launch for each operation: weights rounded to bf16, the forward
//! pass of `per_op` with its currents stored, neurons backward by `st_bif/backward` with replay.
//! The library's GEMMs compute gradients of weights and inputs; SGD updates one parameter at a
//! time.

use super::kernel_weights::{
    bias_share_region_name, live_weight_columns, packed_regions, padded_stem_columns,
    weight_columns, weight_region_name,
};
use super::per_op::{
    POOLED_TAPS, PerOpForward, STAGE_RANGES, SavedForwardRegions, block_input_name,
    declare_images_and_logits, declare_scratch, gather_images, layer_spikes_name, window_arguments,
};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::{LEARNING_RATE, NetworkShape, SGD_MOMENTUM};
use crate::resnet18::network::{CLASS_COUNT, ConvolutionLayer, ResNet18, ResidualBlock};
use crate::st_bif::NeuronShape;
use crate::st_bif::cuda::replay_kernel;
use kernelgate::backend::program::{
    Lane, MemoryPurpose, NULL, Operand, Pointer, Program, int, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

/// Number of threads in a block.
const THREADS: usize = 256;
/// Number of rows and of columns of a tile of the transposition.
const TILE_SIDE: usize = 32;
/// Number of parts in which sums over rows are computed.
const ROW_SUM_PARTS: usize = 64;

/// Kernels of the training step. Unless stated otherwise, their parameter is the number of
/// elements, one for each thread.
pub const KERNELS: &[KernelSpec<usize>] = &[
    PACK_KERNEL,
    SHARE_KERNEL,
    LOSS_KERNEL,
    FEATURES_KERNEL,
    CLASSIFIER_KERNEL,
    LAST_LAYER_KERNEL,
    ROUND_KERNEL,
    SUM_ROWS_KERNEL,
    SCATTER_KERNEL,
    SCALE_KERNEL,
    POOL_KERNEL,
    SGD_KERNEL,
];

const PACK_KERNEL: KernelSpec<usize> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS)],
    variants: || vec![1],
    ..KernelSpec::new(kernel_file("resnet18/train"), "resnet18_train_pack", THREADS, |elements| {
        [elements.div_ceil(THREADS), 1, 1]
    })
};
const SHARE_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_share", ..PACK_KERNEL };
const FEATURES_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_features", ..PACK_KERNEL };
/// Kernel of the classifier's gradients, which the row `fused_train` launches too.
pub const CLASSIFIER_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_classifier", ..PACK_KERNEL };
const LAST_LAYER_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_last", ..PACK_KERNEL };
const SCATTER_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_scatter", ..PACK_KERNEL };
const SCALE_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_scale", ..PACK_KERNEL };
const POOL_KERNEL: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_pool", ..PACK_KERNEL };
const SGD_KERNEL: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_sgd", ..PACK_KERNEL };
/// Kernel of the loss, which `fused_train` launches too; its parameter is the number of blocks.
pub const LOSS_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_loss", blocks: |blocks| [*blocks, 1, 1], ..PACK_KERNEL };
const ROUND_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_round", ..LOSS_KERNEL };
const SUM_ROWS_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_sum_rows", ..LOSS_KERNEL };

/// Checks that the GEMMs of the gradients can be computed: their inner extent is the number of
/// frames, whose rows must be multiples of 16 bytes.
pub fn check_gradient_gemm_support(shape: &NetworkShape) -> Result<(), String> {
    if shape.frame_count().is_multiple_of(8) {
        Ok(())
    } else {
        Err("images times steps in multiples of 8".to_owned())
    }
}

/// Addresses of the inputs and outputs of a training step.
#[derive(Debug, Clone, Copy)]
pub struct TrainingTensors {
    /// Class of each image.
    pub labels: Pointer,
    /// Old parameters.
    pub parameters: Pointer,
    /// Old momentum.
    pub momentum: Pointer,
    pub logits: Pointer,
    /// Mean cross-entropy.
    pub loss: Pointer,
    pub new_parameters: Pointer,
    pub new_momentum: Pointer,
}

impl TrainingTensors {
    /// Declares the images and the tensors of a training step.
    pub fn declare_training_tensors(
        program: &mut Program,
        shape: &NetworkShape,
        network: &ResNet18,
    ) -> Self {
        let logits = declare_images_and_logits(program, shape);
        let (rows, bytes) =
            (shape.parameter_shape(network), network.parameters * Dtype::F32.bytes());
        Self {
            labels: program.add_input("labels", MemoryPurpose::Inputs, shape.b),
            parameters: program.add_input("parameters", MemoryPurpose::Weights, bytes),
            momentum: program.add_input("momentum", MemoryPurpose::Momentum, bytes),
            logits,
            loss: program.add_output("loss", [1], Dtype::F32),
            new_parameters: program.add_output("new_parameters", rows, Dtype::F32),
            new_momentum: program.add_output("new_momentum", rows, Dtype::F32),
        }
    }
}

/// Declares all regions of a training step except inputs and outputs.
fn declare_training_tensors(program: &mut Program, shape: &NetworkShape, network: &ResNet18) {
    use MemoryPurpose::{Activations, Gradients, Weights, Workspace};
    let frames = shape.frame_count();
    let maps = network.neuron_layer_extents();
    let largest = maps.iter().map(|map| map.elements()).max().unwrap_or(0);
    let convs = network.block_convolutions().skip(1);
    let rows = convs.map(|c| frames * c.window.output.pixel_count() * live_weight_columns(c)).max();
    let weights = network
        .block_convolutions()
        .map(|conv| conv.window.output.channels * weight_columns(network, conv));
    let features = network.last_map().channels;
    let weight_gradient = weights.max().unwrap_or(0).max(CLASS_COUNT * features);
    for region in packed_regions(shape, network) {
        program.add_scratch(region.name, Weights, region.bytes);
    }
    declare_scratch(program, shape, network, SavedForwardRegions::Currents);
    let bf16s = frames * largest * Dtype::Bf16.bytes();
    program.add_scratch("rounded", Workspace, bf16s);
    program.add_scratch("transposed", Workspace, bf16s);
    for (name, purpose, count) in [
        ("spike_gradient", Gradients, frames * largest),
        ("other_spike_gradient", Gradients, frames * largest),
        ("current_gradient", Gradients, frames * largest),
        // The gathered gradient is needed only during the GEMM of one layer.
        ("gathered_gradient", Workspace, rows.unwrap_or(0)),
        ("weight_gradient", Gradients, weight_gradient),
        ("bias_sums", Workspace, ROW_SUM_PARTS * features),
        ("bias_gradient", Gradients, features.max(CLASS_COUNT)),
        ("logits_gradient", Gradients, shape.b * CLASS_COUNT),
        ("features", Activations, shape.b * features),
    ] {
        program.add_scratch(name, purpose, count * Dtype::F32.bytes());
    }
}

pub fn train_step_program(shape: &NetworkShape) -> Program {
    let network = shape.sizes.build_network();
    let mut program = Program::new();
    let tensors = TrainingTensors::declare_training_tensors(&mut program, shape, &network);
    declare_training_tensors(&mut program, shape, &network);
    let forward = PerOpForward { shape, network: &network, saved: SavedForwardRegions::Currents };
    let theta = shape.neuron().threshold as f32;
    TrainStepWriter { forward, theta, tensors }.write_whole_step(&mut program);
    program
}

/// Writes the launches of a training step.
struct TrainStepWriter<'a> {
    forward: PerOpForward<'a>,
    theta: f32,
    tensors: TrainingTensors,
}

impl<'a> TrainStepWriter<'a> {
    fn network_of_forward(&self) -> &'a ResNet18 {
        self.forward.network
    }

    fn write_whole_step(&self, program: &mut Program) {
        program.in_range("Weight_Rounding", |program| self.add_parameter_packing(program));
        self.forward.add_forward_pass(program, self.tensors.logits);
        program.in_range("Backward", |program| self.add_backward_pass(program));
    }

    fn add_backward_pass(&self, program: &mut Program) {
        program.in_range("Final_Layers", |program| self.add_loss_and_classifier_step(program));
        (0..self.network_of_forward().blocks.len())
            .rev()
            .for_each(|number| self.add_block_backward(program, number));
        self.add_stem_backward(program);
    }

    /// Rounds and scales the parameters for the forward pass.
    fn add_parameter_packing(&self, program: &mut Program) {
        let network = self.network_of_forward();
        let steps = self.forward.shape.spread_steps() as f32;
        for conv in network.block_convolutions() {
            let columns = weight_columns(network, conv);
            let first = conv.window.taps_that_read_pixels().start * conv.window.input.channels;
            let elements = conv.window.output.channels * columns;
            let from = self.tensors.parameters.offset_by(conv.weight * Dtype::F32.bytes());
            let sizes = int_operands([conv.filter_elements(), first, columns]);
            program.add_launch(
                &PACK_KERNEL,
                &elements,
                (from, &weight_region_name(conv), long_operand(elements), sizes),
            );
            let divisor = if conv.weight == network.stem.weight { 1.0 } else { steps };
            let channels = conv.window.output.channels;
            self.divide_over_steps(
                program,
                conv.first_bias_element(),
                &bias_share_region_name(conv),
                channels,
                divisor,
            );
        }
        let weights = CLASS_COUNT * network.last_map().channels;
        self.divide_over_steps(program, network.classifier, "fc.weight", weights, 1.0);
        self.divide_over_steps(
            program,
            network.classifier + weights,
            "fc.bias",
            CLASS_COUNT,
            steps,
        );
    }

    fn divide_over_steps(
        &self,
        program: &mut Program,
        from: usize,
        to: &str,
        elements: usize,
        divisor: f32,
    ) {
        let from = self.tensors.parameters.offset_by(from * Dtype::F32.bytes());
        program.add_launch(&SHARE_KERNEL, &elements, (from, to, long_operand(elements), divisor));
    }

    /// Adds the loss, the classifier's step, and the gradient of the last spikes.
    fn add_loss_and_classifier_step(&self, program: &mut Program) {
        let (shape, network) = (self.forward.shape, self.network_of_forward());
        let map = network.last_map();
        let (b, channels, at) = (shape.b, map.channels, network.classifier);
        let TrainingTensors { logits, labels, loss, parameters, .. } = self.tensors;
        let gradient = "logits_gradient";
        program.add_launch(
            &LOSS_KERNEL,
            &1,
            (logits, labels, loss, gradient, int_operands([b, CLASS_COUNT])),
        );

        let scale = self.theta / map.pixel_count() as f32;
        let elements = b * channels;
        let spikes = layer_spikes_name(2 * network.blocks.len());
        let sizes = int_operands([channels, map.pixel_count(), shape.t]);
        program.add_launch(
            &FEATURES_KERNEL,
            &elements,
            (&spikes, "features", long_operand(elements), sizes, scale),
        );

        let weights = CLASS_COUNT * channels;
        let gradients = ("weight_gradient", "bias_gradient", long_operand(weights));
        let arguments = (gradient, "features", gradients, int_operands([b, CLASS_COUNT, channels]));
        program.add_launch(&CLASSIFIER_KERNEL, &weights, arguments);
        let share = shape.fed_time_steps() as f32 / shape.spread_steps() as f32;
        let behind = network.parameters - at - weights;
        self.add_sgd_update(program, "weight_gradient", at, [1, weights, 0, weights], 1.0);
        self.add_sgd_update(
            program,
            "bias_gradient",
            at + weights,
            [1, behind, 0, CLASS_COUNT],
            share,
        );

        let elements = shape.frame_count() * map.elements();
        let weight = parameters.offset_by(at * Dtype::F32.bytes());
        let sizes = int_operands([b, CLASS_COUNT, channels, map.pixel_count()]);
        let arguments = (gradient, weight, "spike_gradient", long_operand(elements), sizes, scale);
        program.add_launch(&LAST_LAYER_KERNEL, &elements, arguments);
    }

    /// Computes the gradient of a block's input spikes from the gradient of its output spikes; both
    /// are in the region `spike_gradient`.
    fn add_block_backward(&self, program: &mut Program, number: usize) {
        let network = self.network_of_forward();
        let block = &network.blocks[number];
        let input = block_input_name(network, number);
        let ResidualBlock { first, second, .. } = block;
        in_layer_range(program, second, |program| {
            self.add_neurons_backward(program, 2 * number + 2, "spike_gradient");
            self.round_and_transpose(program, second);
        });
        self.add_convolution_update(program, second, &layer_spikes_name(2 * number + 1));
        in_layer_range(program, second, |program| {
            self.convolution_input_gradient(program, second, "other_spike_gradient", false);
        });
        match &block.shortcut {
            Some(conv) => {
                self.add_convolution_update(program, conv, &input);
                in_layer_range(program, first, |program| {
                    self.convolution_input_gradient(program, conv, "spike_gradient", false);
                });
            }
            None => {
                let elements = self.forward.shape.frame_count() * second.window.output.elements();
                let arguments =
                    ("spike_gradient", "current_gradient", long_operand(elements), self.theta);
                in_layer_range(program, first, |program| {
                    program.add_launch(&SCALE_KERNEL, &elements, arguments)
                });
            }
        }
        in_layer_range(program, first, |program| {
            self.add_neurons_backward(program, 2 * number + 1, "other_spike_gradient");
            self.round_and_transpose(program, first);
        });
        self.add_convolution_update(program, first, &input);
        in_layer_range(program, first, |program| {
            self.convolution_input_gradient(program, first, "spike_gradient", true);
        });
    }

    /// Adds the backward pass of the pooling and of the stem to the program.
    fn add_stem_backward(&self, program: &mut Program) {
        let (shape, network) = (self.forward.shape, self.network_of_forward());
        let stem = &network.stem;
        program.in_range("Conv1_Block", |program| {
            let mut from = "spike_gradient";
            if let Some(pool) = &network.pool {
                let elements = shape.b * pool.input.elements();
                let outputs = shape.b * pool.output.elements();
                let sizes =
                    int_operands([pool.input.side, pool.input.channels, pool.output.side, shape.t]);
                let pointers = (from, POOLED_TAPS, "other_spike_gradient");
                let arguments = (pointers, long_operand(elements), long_operand(outputs), sizes);
                program.add_launch(&POOL_KERNEL, &elements, arguments);
                from = "other_spike_gradient";
            }
            self.add_neurons_backward(program, 0, from);
            self.round_and_transpose(program, stem);
        });
        program.in_range("Weight_Gradients", |program| {
            let (columns, frames) = (padded_stem_columns(network), shape.frame_count());
            gather_images(program, stem, frames, columns, "frames");
        });
        self.convolution_weight_step(program, stem, 1.0 / shape.spread_steps() as f32);
    }

    /// Computes `current_gradient` from the gradient of a layer's spikes.
    fn add_neurons_backward(&self, program: &mut Program, layer: usize, spikes: &str) {
        let shape = self.forward.shape;
        let n = shape.b * self.network_of_forward().neuron_layer_extents()[layer].elements();
        let neurons = NeuronShape { n, t: shape.t, dtype: Dtype::F32, parameters: shape.neuron() };
        let (kernel, last) = replay_kernel::<Operand>(&neurons);
        let currents = SavedForwardRegions::Currents.currents_region_name(layer);
        let arguments = (&currents, spikes, NULL, "current_gradient", last);
        program.add_launch(&kernel, &neurons, arguments);
    }

    /// Rounds the gradient of a convolution's output to bf16, both as it is and transposed.
    fn round_and_transpose(&self, program: &mut Program, conv: &ConvolutionLayer) {
        let channels = conv.window.output.channels;
        let rows = self.forward.shape.frame_count() * conv.window.output.pixel_count();
        let blocks = rows.div_ceil(TILE_SIDE) * channels.div_ceil(TILE_SIDE);
        let regions = ("current_gradient", "rounded", "transposed");
        program.add_launch(&ROUND_KERNEL, &blocks, (regions, long_operand(rows), int(channels)));
    }

    /// Adds the SGD step of a convolution of spikes, after rounding the gradient of its output.
    fn add_convolution_update(&self, program: &mut Program, conv: &ConvolutionLayer, input: &str) {
        program.in_range("Weight_Gradients", |program| {
            self.forward.gather_spikes(program, conv, input);
        });
        self.convolution_weight_step(program, conv, self.theta);
    }

    /// Adds the SGD step of a convolution whose operand is gathered. The convolution's output was
    /// multiplied by `factor`, so its gradient is too.
    fn convolution_weight_step(&self, program: &mut Program, conv: &ConvolutionLayer, factor: f32) {
        let (shape, network) = (self.forward.shape, self.network_of_forward());
        let (filters, columns) = (conv.window.output.channels, weight_columns(network, conv));
        let rows = shape.frame_count() * conv.window.output.pixel_count();
        program.in_range("Weight_Gradients", |program| {
            let spec = GemmSpec::new(filters, columns, rows, MatrixDtype::Bf16, MatrixDtype::F32);
            add_gemm_to_program(program, spec, ["transposed", "operand", "weight_gradient"]);
            let tiles = filters.div_ceil(TILE_SIDE);
            let fed = shape.fed_time_steps() * shape.b * conv.window.output.pixel_count();
            for (from, to, rows, splits) in [
                ("current_gradient", "bias_sums", fed, ROW_SUM_PARTS),
                ("bias_sums", "bias_gradient", ROW_SUM_PARTS, 1),
            ] {
                let arguments = (from, to, long_operand(rows), int_operands([filters, splits]));
                program.add_launch(&SUM_ROWS_KERNEL, &(tiles * splits), arguments);
            }
        });
        let first = conv.window.taps_that_read_pixels().start * conv.window.input.channels;
        let share = 1.0 / shape.spread_steps() as f32;
        program.in_range("Optimizer", |program| {
            let sizes = [filters, conv.filter_elements(), first, columns];
            self.add_sgd_update(program, "weight_gradient", conv.weight, sizes, factor);
            self.add_sgd_update(
                program,
                "bias_gradient",
                conv.first_bias_element(),
                [1, filters, 0, filters],
                share,
            );
        });
    }

    /// Adds the gradient of a convolution's input to the program; it replaces a region or is added
    /// to the region.
    fn convolution_input_gradient(
        &self,
        program: &mut Program,
        conv: &ConvolutionLayer,
        to: &str,
        add: bool,
    ) {
        let window = &conv.window;
        let (frames, columns) = (self.forward.shape.frame_count(), live_weight_columns(conv));
        let (rows, depth) = (frames * window.output.pixel_count(), window.output.channels);
        let spec = GemmSpec::new(rows, columns, depth, MatrixDtype::Bf16, MatrixDtype::F32);
        add_gemm_to_program(
            program,
            spec,
            ["rounded", &weight_region_name(conv), "gathered_gradient"],
        );
        let taps = window.taps_that_read_pixels();
        let elements = frames * window.input.elements();
        let taps = int_operands([taps.start, taps.len()]);
        let window = window_arguments(window);
        let sums = (self.theta, int(usize::from(add)));
        let arguments = ("gathered_gradient", to, long_operand(elements), window, taps, sums);
        program.add_launch(&SCATTER_KERNEL, &elements, arguments);
    }

    /// Adds the SGD update of a parameter `[filters, depth]` whose gradient has only a range of
    /// columns.
    fn add_sgd_update(
        &self,
        program: &mut Program,
        gradient: &str,
        at: usize,
        [filters, depth, first, columns]: [usize; 4],
        factor: f32,
    ) {
        let elements = filters * depth;
        let TrainingTensors { parameters, momentum, new_parameters, new_momentum, .. } =
            self.tensors;
        let [old, old_momentum, new, new_momentum] =
            [parameters, momentum, new_parameters, new_momentum]
                .map(|tensor| tensor.offset_by(at * Dtype::F32.bytes()));
        let tensors = (old, old_momentum, gradient, new, new_momentum);
        let sizes = int_operands([depth, first, columns, columns]);
        let factors = [factor, SGD_MOMENTUM, LEARNING_RATE];
        program.add_launch(
            &SGD_KERNEL,
            &elements,
            (tensors, long_operand(elements), sizes, factors),
        );
    }
}

/// Writes launches inside the named range of a convolution, which is inside the range of its stage.
/// The ranges of the convolution's parameters follow its range and are not nested in it.
fn in_layer_range(
    program: &mut Program,
    conv: &ConvolutionLayer,
    write: impl FnOnce(&mut Program),
) {
    let layer = |stage: &&&str| conv.name.starts_with(&stage.to_lowercase()[..6]);
    let stage = STAGE_RANGES.iter().find(layer).expect("convolutions behind the stem have a stage");
    program.in_range(*stage, |program| program.in_range(&conv.name, write));
}

fn add_gemm_to_program(program: &mut Program, spec: GemmSpec, names: [&str; 3]) {
    let operands = names.map(|name| program.at(name));
    program.gemm(Lane::MAIN_LANE, spec, operands);
}
