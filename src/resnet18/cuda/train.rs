//! Training-step rung with one launch for each operation: weights rounded to bf16, the forward pass
//! of `per_op`, and neuron gradients by `st_bif/backward` kernels. In this rung, cuBLASLt GEMMs
//! compute the gradients of weights and inputs, and SGD updates one parameter tensor at a time.

use super::kernel_weights::{
    name_of_bias_per_step_region, name_of_weight_region, packed_weight_columns,
    regions_of_packed_parameters, stem_operand_columns, weight_columns_that_read_pixels,
};
use super::per_op::{
    POOLING_MAXIMUM_TAPS_REGION, PerOpForwardBuilder, STAGE_NVTX_RANGES, StoredForwardResults,
    add_gathering_of_stem_operand, convolution_window_arguments, declare_image_and_logit_regions,
    declare_per_op_scratch_regions, name_of_block_input_region, name_of_layer_spikes_region,
};
use crate::kernel_files::source_of_kernel_file;
use crate::resnet18::definition::{ResNetParameters, SGD_LEARNING_RATE, SGD_MOMENTUM};
use crate::resnet18::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, ResNet18Layers, ResNetBlock,
};
use crate::st_bif::NeuronLayerParameters;
use crate::st_bif::cuda::select_replay_kernel_and_arguments;
use kernelgate::backend::program::{
    LaunchArgument, LaunchProgram, MemoryPurpose, NULL, ProgramLane, RegionPointer, int_operand,
    int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmMatrixDtype, GemmSpec};

/// Number of threads in a block of the per-operation training kernels.
const TRAINING_BLOCK_THREADS: usize = 256;
/// Number of rows and of columns of a tile that the rounding kernel transposes.
const TRANSPOSED_TILE_SIDE: usize = 32;
/// Number of partial sums in which the rows of a bias gradient are added up.
const PARTIAL_SUMS_PER_BIAS_GRADIENT: usize = 64;

/// Kernels of the training-step rung with one launch for each operation, besides those of
/// inference. Unless stated otherwise, the launch parameter of these training kernels is the number
/// of elements, with one thread for each.
pub const PER_OP_TRAINING_KERNELS: &[KernelSpec<usize>] = &[
    ROUND_WEIGHT_TO_BF16_KERNEL,
    DIVIDE_BIAS_BY_STEPS_KERNEL,
    CROSS_ENTROPY_LOSS_KERNEL,
    MEAN_SPIKE_FEATURES_KERNEL,
    CLASSIFIER_GRADIENTS_KERNEL,
    LAST_SPIKE_GRADIENT_KERNEL,
    ROUND_AND_TRANSPOSE_GRADIENT_KERNEL,
    SUM_GRADIENT_ROWS_KERNEL,
    SCATTER_INPUT_GRADIENT_KERNEL,
    SCALE_GRADIENT_KERNEL,
    MAX_POOL_GRADIENT_KERNEL,
    SGD_UPDATE_KERNEL,
];

const ROUND_WEIGHT_TO_BF16_KERNEL: KernelSpec<usize> = KernelSpec {
    constant_macros: |_| vec![("THREADS", TRAINING_BLOCK_THREADS)],
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        source_of_kernel_file("resnet18/train"),
        "resnet18_train_pack",
        TRAINING_BLOCK_THREADS,
        |elements| [elements.div_ceil(TRAINING_BLOCK_THREADS), 1, 1],
    )
};
const DIVIDE_BIAS_BY_STEPS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_share", ..ROUND_WEIGHT_TO_BF16_KERNEL };
const MEAN_SPIKE_FEATURES_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_features", ..ROUND_WEIGHT_TO_BF16_KERNEL };
/// Kernel of the classifier's parameter gradients, which the fused training rung launches too.
pub const CLASSIFIER_GRADIENTS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_classifier", ..ROUND_WEIGHT_TO_BF16_KERNEL };
const LAST_SPIKE_GRADIENT_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_last", ..ROUND_WEIGHT_TO_BF16_KERNEL };
const SCATTER_INPUT_GRADIENT_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_scatter", ..ROUND_WEIGHT_TO_BF16_KERNEL };
const SCALE_GRADIENT_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_scale", ..ROUND_WEIGHT_TO_BF16_KERNEL };
const MAX_POOL_GRADIENT_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_pool", ..ROUND_WEIGHT_TO_BF16_KERNEL };
const SGD_UPDATE_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_sgd", ..ROUND_WEIGHT_TO_BF16_KERNEL };
/// Kernel of the cross-entropy loss and the logits' gradient, which the fused training rung
/// launches too; its launch parameter is the number of blocks.
pub const CROSS_ENTROPY_LOSS_KERNEL: KernelSpec<usize> = KernelSpec {
    kernel_symbol: "resnet18_train_loss",
    blocks: |blocks| [*blocks, 1, 1],
    ..ROUND_WEIGHT_TO_BF16_KERNEL
};
const ROUND_AND_TRANSPOSE_GRADIENT_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_round", ..CROSS_ENTROPY_LOSS_KERNEL };
const SUM_GRADIENT_ROWS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_train_sum_rows", ..CROSS_ENTROPY_LOSS_KERNEL };

/// Checks that cuBLASLt can compute the weight gradients: images times time steps must be a
/// multiple of 8, so that operand rows are multiples of 16 bytes.
pub fn check_frames_are_a_multiple_of_eight(shape: &ResNetParameters) -> Result<(), String> {
    if shape.frames_over_all_time_steps().is_multiple_of(8) {
        Ok(())
    } else {
        Err("images times steps in multiples of 8".to_owned())
    }
}

/// Device addresses of the inputs and outputs of a training step.
#[derive(Debug, Clone, Copy)]
pub struct TrainingStepTensors {
    /// Class of each image.
    pub labels: RegionPointer,
    /// Old parameters.
    pub old_parameters: RegionPointer,
    /// Old momentum.
    pub old_momentum: RegionPointer,
    pub logits: RegionPointer,
    /// Mean cross-entropy.
    pub mean_loss: RegionPointer,
    pub new_parameters: RegionPointer,
    pub new_momentum: RegionPointer,
}

impl TrainingStepTensors {
    /// Adds the regions of the inputs and outputs of a training step to the program; returns their
    /// addresses.
    pub fn declare_inputs_and_outputs(
        program: &mut LaunchProgram,
        shape: &ResNetParameters,
        network: &ResNet18Layers,
    ) -> Self {
        let logits = declare_image_and_logit_regions(program, shape);
        let (rows, bytes) = (
            shape.shape_of_parameter_tensor(network),
            network.padded_parameter_count * Dtype::F32.bytes_per_element(),
        );
        Self {
            labels: program.add_input("labels", MemoryPurpose::Inputs, shape.batch_size),
            old_parameters: program.add_input("parameters", MemoryPurpose::Weights, bytes),
            old_momentum: program.add_input("momentum", MemoryPurpose::Momentum, bytes),
            logits,
            mean_loss: program.add_output("loss", [1], Dtype::F32),
            new_parameters: program.add_output("new_parameters", rows, Dtype::F32),
            new_momentum: program.add_output("new_momentum", rows, Dtype::F32),
        }
    }
}

/// Adds all memory regions of a per-operation training step except inputs and outputs.
fn declare_per_op_training_regions(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
) {
    use MemoryPurpose::{Activations, Gradients, Weights, Workspace};
    let frames = shape.frames_over_all_time_steps();
    let maps = network.extents_of_neuron_layers();
    let largest = maps.iter().map(|map| map.elements_per_frame()).max().unwrap_or(0);
    let convs = network.all_convolutions().skip(1);
    let rows = convs
        .map(|c| {
            frames * c.window.output_extents.pixels_per_frame() * weight_columns_that_read_pixels(c)
        })
        .max();
    let weights = network
        .all_convolutions()
        .map(|conv| conv.window.output_extents.channels * packed_weight_columns(network, conv));
    let features = network.last_feature_map().channels;
    let weight_gradient = weights.max().unwrap_or(0).max(CLASSIFIER_CLASS_COUNT * features);
    for region in regions_of_packed_parameters(shape, network) {
        program.add_scratch(region.region_name, Weights, region.region_bytes);
    }
    declare_per_op_scratch_regions(
        program,
        shape,
        network,
        StoredForwardResults::CurrentsAndPoolingPositions,
    );
    let bf16s = frames * largest * Dtype::Bf16.bytes_per_element();
    program.add_scratch("rounded", Workspace, bf16s);
    program.add_scratch("transposed", Workspace, bf16s);
    for (name, purpose, count) in [
        ("spike_gradient", Gradients, frames * largest),
        ("other_spike_gradient", Gradients, frames * largest),
        ("current_gradient", Gradients, frames * largest),
        // One region of the gathered gradient serves all layers, because it is needed only until
        // the gradient is scattered.
        ("gathered_gradient", Workspace, rows.unwrap_or(0)),
        ("weight_gradient", Gradients, weight_gradient),
        ("bias_sums", Workspace, PARTIAL_SUMS_PER_BIAS_GRADIENT * features),
        ("bias_gradient", Gradients, features.max(CLASSIFIER_CLASS_COUNT)),
        ("logits_gradient", Gradients, shape.batch_size * CLASSIFIER_CLASS_COUNT),
        ("features", Activations, shape.batch_size * features),
    ] {
        program.add_scratch(name, purpose, count * Dtype::F32.bytes_per_element());
    }
}

pub fn per_op_training_step_program(shape: &ResNetParameters) -> LaunchProgram {
    let network = shape.sizes.build_resnet18_layers();
    let mut program = LaunchProgram::new();
    let tensors = TrainingStepTensors::declare_inputs_and_outputs(&mut program, shape, &network);
    declare_per_op_training_regions(&mut program, shape, &network);
    let forward = PerOpForwardBuilder {
        shape,
        network: &network,
        stored_results: StoredForwardResults::CurrentsAndPoolingPositions,
    };
    let theta = shape.neuron_parameters().firing_threshold as f32;
    PerOpTrainingStepBuilder { forward, firing_threshold: theta, tensors }
        .add_whole_per_op_training_step(&mut program);
    program
}

/// Adds the launches of a per-operation training step to a program.
struct PerOpTrainingStepBuilder<'a> {
    forward: PerOpForwardBuilder<'a>,
    firing_threshold: f32,
    tensors: TrainingStepTensors,
}

impl<'a> PerOpTrainingStepBuilder<'a> {
    fn resnet18_of_forward_pass(&self) -> &'a ResNet18Layers {
        self.forward.network
    }

    fn add_whole_per_op_training_step(&self, program: &mut LaunchProgram) {
        program.add_steps_in_named_range("Weight_Rounding", |program| {
            self.add_weight_rounding_and_bias_division(program)
        });
        self.forward.add_per_op_forward_pass(program, self.tensors.logits);
        program
            .add_steps_in_named_range("Backward", |program| self.add_per_op_backward_pass(program));
    }

    fn add_per_op_backward_pass(&self, program: &mut LaunchProgram) {
        program.add_steps_in_named_range("Final_Layers", |program| {
            self.add_loss_and_classifier_update(program)
        });
        (0..self.resnet18_of_forward_pass().blocks.len())
            .rev()
            .for_each(|number| self.add_backward_pass_of_block(program, number));
        self.add_backward_pass_of_pooling_and_stem(program);
    }

    /// Adds the launches that round weights to bf16 and divide biases by the number of time steps,
    /// for the forward pass.
    fn add_weight_rounding_and_bias_division(&self, program: &mut LaunchProgram) {
        let network = self.resnet18_of_forward_pass();
        let steps = self.forward.shape.time_steps_to_spread_image() as f32;
        for conv in network.all_convolutions() {
            let columns = packed_weight_columns(network, conv);
            let first = conv.window.range_of_taps_that_read_pixels().start
                * conv.window.input_extents.channels;
            let elements = conv.window.output_extents.channels * columns;
            let from = self
                .tensors
                .old_parameters
                .offset_by(conv.first_weight_index * Dtype::F32.bytes_per_element());
            let sizes = int_operands([conv.elements_per_filter(), first, columns]);
            program.add_launch(
                &ROUND_WEIGHT_TO_BF16_KERNEL,
                &elements,
                (from, &name_of_weight_region(conv), long_operand(elements), sizes),
            );
            let divisor = if conv.first_weight_index == network.stem.first_weight_index {
                1.0
            } else {
                steps
            };
            let channels = conv.window.output_extents.channels;
            self.divide_parameters_by_steps(
                program,
                conv.index_of_first_bias(),
                &name_of_bias_per_step_region(conv),
                channels,
                divisor,
            );
        }
        let weights = CLASSIFIER_CLASS_COUNT * network.last_feature_map().channels;
        self.divide_parameters_by_steps(
            program,
            network.first_classifier_weight_index,
            "fc.weight",
            weights,
            1.0,
        );
        self.divide_parameters_by_steps(
            program,
            network.first_classifier_weight_index + weights,
            "fc.bias",
            CLASSIFIER_CLASS_COUNT,
            steps,
        );
    }

    fn divide_parameters_by_steps(
        &self,
        program: &mut LaunchProgram,
        from: usize,
        to: &str,
        elements: usize,
        divisor: f32,
    ) {
        let from = self.tensors.old_parameters.offset_by(from * Dtype::F32.bytes_per_element());
        program.add_launch(
            &DIVIDE_BIAS_BY_STEPS_KERNEL,
            &elements,
            (from, to, long_operand(elements), divisor),
        );
    }

    /// Adds the launches of the loss, the classifier's SGD update, and the gradient of the last
    /// layer's spikes.
    fn add_loss_and_classifier_update(&self, program: &mut LaunchProgram) {
        let (shape, network) = (self.forward.shape, self.resnet18_of_forward_pass());
        let map = network.last_feature_map();
        let (b, channels, at) =
            (shape.batch_size, map.channels, network.first_classifier_weight_index);
        let TrainingStepTensors {
            logits, labels, mean_loss: loss, old_parameters: parameters, ..
        } = self.tensors;
        let gradient = "logits_gradient";
        program.add_launch(
            &CROSS_ENTROPY_LOSS_KERNEL,
            &1,
            (logits, labels, loss, gradient, int_operands([b, CLASSIFIER_CLASS_COUNT])),
        );

        let scale = self.firing_threshold / map.pixels_per_frame() as f32;
        let elements = b * channels;
        let spikes = name_of_layer_spikes_region(2 * network.blocks.len());
        let sizes = int_operands([channels, map.pixels_per_frame(), shape.time_steps]);
        program.add_launch(
            &MEAN_SPIKE_FEATURES_KERNEL,
            &elements,
            (&spikes, "features", long_operand(elements), sizes, scale),
        );

        let weights = CLASSIFIER_CLASS_COUNT * channels;
        let gradients = ("weight_gradient", "bias_gradient", long_operand(weights));
        let arguments =
            (gradient, "features", gradients, int_operands([b, CLASSIFIER_CLASS_COUNT, channels]));
        program.add_launch(&CLASSIFIER_GRADIENTS_KERNEL, &weights, arguments);
        let share =
            shape.time_steps_fed_with_image() as f32 / shape.time_steps_to_spread_image() as f32;
        let behind = network.padded_parameter_count - at - weights;
        self.add_sgd_update_launch(program, "weight_gradient", at, [1, weights, 0, weights], 1.0);
        self.add_sgd_update_launch(
            program,
            "bias_gradient",
            at + weights,
            [1, behind, 0, CLASSIFIER_CLASS_COUNT],
            share,
        );

        let elements = shape.frames_over_all_time_steps() * map.elements_per_frame();
        let weight = parameters.offset_by(at * Dtype::F32.bytes_per_element());
        let sizes = int_operands([b, CLASSIFIER_CLASS_COUNT, channels, map.pixels_per_frame()]);
        let arguments = (gradient, weight, "spike_gradient", long_operand(elements), sizes, scale);
        program.add_launch(&LAST_SPIKE_GRADIENT_KERNEL, &elements, arguments);
    }

    /// Adds the launches that compute the gradient of a block's input spikes from the gradient of
    /// its output spikes; both gradients are in the region `spike_gradient`.
    fn add_backward_pass_of_block(&self, program: &mut LaunchProgram, number: usize) {
        let network = self.resnet18_of_forward_pass();
        let block = &network.blocks[number];
        let input = name_of_block_input_region(network, number);
        let ResNetBlock { first, second, .. } = block;
        in_nvtx_range_of_convolution(program, second, |program| {
            self.add_neuron_backward_launch(program, 2 * number + 2, "spike_gradient");
            self.add_gradient_rounding_and_transposition(program, second);
        });
        self.add_gathering_and_update_of_convolution(
            program,
            second,
            &name_of_layer_spikes_region(2 * number + 1),
        );
        in_nvtx_range_of_convolution(program, second, |program| {
            self.add_convolution_input_gradient_launches(
                program,
                second,
                "other_spike_gradient",
                false,
            );
        });
        match &block.shortcut {
            Some(conv) => {
                self.add_gathering_and_update_of_convolution(program, conv, &input);
                in_nvtx_range_of_convolution(program, first, |program| {
                    self.add_convolution_input_gradient_launches(
                        program,
                        conv,
                        "spike_gradient",
                        false,
                    );
                });
            }
            None => {
                let elements = self.forward.shape.frames_over_all_time_steps()
                    * second.window.output_extents.elements_per_frame();
                let arguments = (
                    "spike_gradient",
                    "current_gradient",
                    long_operand(elements),
                    self.firing_threshold,
                );
                in_nvtx_range_of_convolution(program, first, |program| {
                    program.add_launch(&SCALE_GRADIENT_KERNEL, &elements, arguments)
                });
            }
        }
        in_nvtx_range_of_convolution(program, first, |program| {
            self.add_neuron_backward_launch(program, 2 * number + 1, "other_spike_gradient");
            self.add_gradient_rounding_and_transposition(program, first);
        });
        self.add_gathering_and_update_of_convolution(program, first, &input);
        in_nvtx_range_of_convolution(program, first, |program| {
            self.add_convolution_input_gradient_launches(program, first, "spike_gradient", true);
        });
    }

    /// Adds the launches of the backward pass through the max pooling and the stem.
    fn add_backward_pass_of_pooling_and_stem(&self, program: &mut LaunchProgram) {
        let (shape, network) = (self.forward.shape, self.resnet18_of_forward_pass());
        let stem = &network.stem;
        program.add_steps_in_named_range("Conv1_Block", |program| {
            let mut from = "spike_gradient";
            if let Some(pool) = &network.pool {
                let elements = shape.batch_size * pool.input_extents.elements_per_frame();
                let outputs = shape.batch_size * pool.output_extents.elements_per_frame();
                let sizes = int_operands([
                    pool.input_extents.side_pixels,
                    pool.input_extents.channels,
                    pool.output_extents.side_pixels,
                    shape.time_steps,
                ]);
                let pointers = (from, POOLING_MAXIMUM_TAPS_REGION, "other_spike_gradient");
                let arguments = (pointers, long_operand(elements), long_operand(outputs), sizes);
                program.add_launch(&MAX_POOL_GRADIENT_KERNEL, &elements, arguments);
                from = "other_spike_gradient";
            }
            self.add_neuron_backward_launch(program, 0, from);
            self.add_gradient_rounding_and_transposition(program, stem);
        });
        program.add_steps_in_named_range("Weight_Gradients", |program| {
            let (columns, frames) =
                (stem_operand_columns(network), shape.frames_over_all_time_steps());
            add_gathering_of_stem_operand(program, stem, frames, columns, "frames");
        });
        self.add_gradients_and_update_of_convolution(
            program,
            stem,
            1.0 / shape.time_steps_to_spread_image() as f32,
        );
    }

    /// Adds the launch that computes the region `current_gradient` from the gradient of a neuron
    /// layer's spikes.
    fn add_neuron_backward_launch(
        &self,
        program: &mut LaunchProgram,
        layer: usize,
        spike_gradient_region: &str,
    ) {
        let shape = self.forward.shape;
        let n = shape.batch_size
            * self.resnet18_of_forward_pass().extents_of_neuron_layers()[layer]
                .elements_per_frame();
        let neurons = NeuronLayerParameters {
            neuron_count: n,
            time_steps: shape.time_steps,
            dtype: Dtype::F32,
            neuron_parameters: shape.neuron_parameters(),
        };
        let (kernel, last) = select_replay_kernel_and_arguments::<LaunchArgument>(&neurons);
        let currents =
            StoredForwardResults::CurrentsAndPoolingPositions.name_of_layer_currents_region(layer);
        let arguments = (&currents, spike_gradient_region, NULL, "current_gradient", last);
        program.add_launch(&kernel, &neurons, arguments);
    }

    /// Adds the launch that rounds the gradient of a convolution's output to bf16 and stores it
    /// both as it is and transposed.
    fn add_gradient_rounding_and_transposition(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
    ) {
        let channels = conv.window.output_extents.channels;
        let rows = self.forward.shape.frames_over_all_time_steps()
            * conv.window.output_extents.pixels_per_frame();
        let blocks = rows.div_ceil(TRANSPOSED_TILE_SIDE) * channels.div_ceil(TRANSPOSED_TILE_SIDE);
        let regions = ("current_gradient", "rounded", "transposed");
        program.add_launch(
            &ROUND_AND_TRANSPOSE_GRADIENT_KERNEL,
            &blocks,
            (regions, long_operand(rows), int_operand(channels)),
        );
    }

    /// Adds the launches that gather a convolution's spike operand, compute its weight and bias
    /// gradients, and update both by SGD.
    fn add_gathering_and_update_of_convolution(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        input: &str,
    ) {
        program.add_steps_in_named_range("Weight_Gradients", |program| {
            self.forward.add_spike_operand_gathering(program, conv, input);
        });
        self.add_gradients_and_update_of_convolution(program, conv, self.firing_threshold);
    }

    /// Adds the launches that compute a convolution's weight and bias gradients from its gathered
    /// operand and update both by SGD. The convolution's output was multiplied by `factor`, so its
    /// weight gradient is multiplied by `factor` too.
    fn add_gradients_and_update_of_convolution(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        factor: f32,
    ) {
        let (shape, network) = (self.forward.shape, self.resnet18_of_forward_pass());
        let (filters, columns) =
            (conv.window.output_extents.channels, packed_weight_columns(network, conv));
        let rows =
            shape.frames_over_all_time_steps() * conv.window.output_extents.pixels_per_frame();
        program.add_steps_in_named_range("Weight_Gradients", |program| {
            let spec =
                GemmSpec::new(filters, columns, rows, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32);
            add_gemm_of_named_regions(program, spec, ["transposed", "operand", "weight_gradient"]);
            let tiles = filters.div_ceil(TRANSPOSED_TILE_SIDE);
            let fed = shape.time_steps_fed_with_image()
                * shape.batch_size
                * conv.window.output_extents.pixels_per_frame();
            for (from, to, rows, splits) in [
                ("current_gradient", "bias_sums", fed, PARTIAL_SUMS_PER_BIAS_GRADIENT),
                ("bias_sums", "bias_gradient", PARTIAL_SUMS_PER_BIAS_GRADIENT, 1),
            ] {
                let arguments = (from, to, long_operand(rows), int_operands([filters, splits]));
                program.add_launch(&SUM_GRADIENT_ROWS_KERNEL, &(tiles * splits), arguments);
            }
        });
        let first =
            conv.window.range_of_taps_that_read_pixels().start * conv.window.input_extents.channels;
        let share = 1.0 / shape.time_steps_to_spread_image() as f32;
        program.add_steps_in_named_range("Optimizer", |program| {
            let sizes = [filters, conv.elements_per_filter(), first, columns];
            self.add_sgd_update_launch(
                program,
                "weight_gradient",
                conv.first_weight_index,
                sizes,
                factor,
            );
            self.add_sgd_update_launch(
                program,
                "bias_gradient",
                conv.index_of_first_bias(),
                [1, filters, 0, filters],
                share,
            );
        });
    }

    /// Adds the launches that compute the gradient of a convolution's input and write it to a
    /// region or add it to that region.
    fn add_convolution_input_gradient_launches(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        to: &str,
        add: bool,
    ) {
        let window = &conv.window;
        let (frames, columns) = (
            self.forward.shape.frames_over_all_time_steps(),
            weight_columns_that_read_pixels(conv),
        );
        let (rows, depth) =
            (frames * window.output_extents.pixels_per_frame(), window.output_extents.channels);
        let spec = GemmSpec::new(rows, columns, depth, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32);
        add_gemm_of_named_regions(
            program,
            spec,
            ["rounded", &name_of_weight_region(conv), "gathered_gradient"],
        );
        let taps = window.range_of_taps_that_read_pixels();
        let elements = frames * window.input_extents.elements_per_frame();
        let taps = int_operands([taps.start, taps.len()]);
        let window = convolution_window_arguments(window);
        let sums = (self.firing_threshold, int_operand(usize::from(add)));
        let arguments = ("gathered_gradient", to, long_operand(elements), window, taps, sums);
        program.add_launch(&SCATTER_INPUT_GRADIENT_KERNEL, &elements, arguments);
    }

    /// Adds the SGD launch of a parameter `[filters, depth]` whose gradient has only the columns of
    /// filter taps that read a pixel.
    fn add_sgd_update_launch(
        &self,
        program: &mut LaunchProgram,
        gradient: &str,
        at: usize,
        [filters, depth, first, columns]: [usize; 4],
        factor: f32,
    ) {
        let elements = filters * depth;
        let TrainingStepTensors {
            old_parameters: parameters,
            old_momentum: momentum,
            new_parameters,
            new_momentum,
            ..
        } = self.tensors;
        let [old, old_momentum, new, new_momentum] =
            [parameters, momentum, new_parameters, new_momentum]
                .map(|tensor| tensor.offset_by(at * Dtype::F32.bytes_per_element()));
        let tensors = (old, old_momentum, gradient, new, new_momentum);
        let sizes = int_operands([depth, first, columns, columns]);
        let factors = [factor, SGD_MOMENTUM, SGD_LEARNING_RATE];
        program.add_launch(
            &SGD_UPDATE_KERNEL,
            &elements,
            (tensors, long_operand(elements), sizes, factors),
        );
    }
}

/// Adds launches inside the NVTX range of a convolution, which is nested in the range of its stage.
/// The NVTX ranges of the convolution's parameter updates follow the convolution's range and are
/// not nested in it.
fn in_nvtx_range_of_convolution(
    program: &mut LaunchProgram,
    conv: &ConvolutionLayer,
    write: impl FnOnce(&mut LaunchProgram),
) {
    let layer = |stage: &&&str| conv.layer_name.starts_with(&stage.to_lowercase()[..6]);
    let stage =
        STAGE_NVTX_RANGES.iter().find(layer).expect("convolutions behind the stem have a stage");
    program.add_steps_in_named_range(*stage, |program| {
        program.add_steps_in_named_range(&conv.layer_name, write)
    });
}

fn add_gemm_of_named_regions(program: &mut LaunchProgram, spec: GemmSpec, names: [&str; 3]) {
    let operands = names.map(|name| program.pointer_to(name));
    program.add_gemm(ProgramLane::MAIN_LANE, spec, operands);
}
