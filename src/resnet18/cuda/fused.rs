//! The forward pass of ResNet-18 with one kernel launch for each layer, by the kernels of
//! `kernels/resnet18/fused.cu`. In the rung `fused`, a cuBLASLt GEMM computes the stem's
//! convolution once for each image, and the classifier reads the spikes summed over time.

use super::kernel_weights::{
    declare_packed_parameter_regions, name_of_bias_per_step_region, name_of_weight_region,
    stem_operand_columns, weight_columns_that_read_pixels,
};
use super::per_op::{
    POOLING_MAXIMUM_TAPS_REGION, STAGE_NVTX_RANGES, StoredForwardResults,
    add_gathering_of_stem_operand, add_stem_gemm, declare_image_and_logit_regions,
    name_of_block_input_region, name_of_layer_spikes_region,
};
use super::tiles::{
    GEMM_TILE_SIDE, TWO_GROUP_BLOCK_THREADS, TileKernelParameters, chooses_four_groups_on_device,
    four_group_variant_of_kernel, two_group_tile_kernel,
};
use crate::kernel_files::source_of_kernel_file;
use crate::resnet18::definition::ResNetParameters;
use crate::resnet18::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, ResNet18Layers, ResNetBlock,
};
use kernelgate::backend::program::{
    LaunchArgument, LaunchProgram, MemoryPurpose, NULL, int_operand, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Kernels of the ResNet-18 inference rung `fused`.
pub const FUSED_FORWARD_KERNELS: &[KernelSpec<TileKernelParameters>] = &[
    CONVOLUTION_AND_NEURONS_KERNEL,
    FOUR_GROUP_CONVOLUTION_AND_NEURONS_KERNEL,
    STEM_NEURONS_WITHOUT_POOLING_KERNEL,
    MAX_POOL_SPIKES_KERNEL,
    FUSED_CLASSIFIER_KERNEL,
];

const CONVOLUTION_AND_NEURONS_KERNEL: KernelSpec<TileKernelParameters> =
    two_group_tile_kernel(source_of_kernel_file("resnet18/fused"), "resnet18_fused_block");
const FOUR_GROUP_CONVOLUTION_AND_NEURONS_KERNEL: KernelSpec<TileKernelParameters> =
    four_group_variant_of_kernel(CONVOLUTION_AND_NEURONS_KERNEL);
const STEM_NEURONS_WITHOUT_POOLING_KERNEL: KernelSpec<TileKernelParameters> = KernelSpec {
    kernel_symbol: "resnet18_fused_stem",
    dynamic_shared_bytes: |_| 0,
    ..CONVOLUTION_AND_NEURONS_KERNEL
};
const MAX_POOL_SPIKES_KERNEL: KernelSpec<TileKernelParameters> =
    KernelSpec { kernel_symbol: "resnet18_fused_pool", ..STEM_NEURONS_WITHOUT_POOLING_KERNEL };
const FUSED_CLASSIFIER_KERNEL: KernelSpec<TileKernelParameters> =
    KernelSpec { kernel_symbol: "resnet18_fused_tail", ..CONVOLUTION_AND_NEURONS_KERNEL };

/// Name and size in bytes of a memory region for activations.
pub type ActivationRegionNameAndBytes = (String, usize);

/// Memory regions that a forward pass with one launch for each layer writes; in training, also the
/// currents and pooling indices that only a backward pass reads.
pub fn fused_activation_regions(
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    training: bool,
) -> Vec<ActivationRegionNameAndBytes> {
    let maps = network.extents_of_neuron_layers();
    let bf16s = |name: String, count: usize| (name, count * Dtype::Bf16.bytes_per_element());
    let f32s = |name: String, count: usize| (name, count * Dtype::F32.bytes_per_element());
    let mut regions =
        vec![f32s(name_of_currents_region(0), shape.batch_size * maps[0].elements_per_frame())];
    for (layer, map) in maps.iter().enumerate() {
        let elements = shape.frames_over_all_time_steps() * map.elements_per_frame();
        regions.push(bf16s(name_of_layer_spikes_region(layer), elements));
        if training && layer > 0 {
            regions.push(f32s(name_of_currents_region(layer), elements));
        }
    }
    if let Some(pool) = &network.pool {
        let elements =
            shape.frames_over_all_time_steps() * pool.output_extents.elements_per_frame();
        regions.push(bf16s("pooled".to_owned(), elements));
        if training {
            regions.push((POOLING_MAXIMUM_TAPS_REGION.to_owned(), elements));
        }
    }
    regions
}

pub fn declare_activation_regions(
    program: &mut LaunchProgram,
    regions: Vec<ActivationRegionNameAndBytes>,
) {
    for (name, bytes) in regions {
        program.add_scratch(name, MemoryPurpose::Activations, bytes);
    }
}

/// Adds the memory region of the gathered operand of the stem's GEMM to the program.
pub fn declare_stem_operand_region(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
) {
    let rows = shape.batch_size * network.stem.window.output_extents.pixels_per_frame();
    let bytes = rows * stem_operand_columns(network) * Dtype::Bf16.bytes_per_element();
    program.add_scratch("operand", MemoryPurpose::Workspace, bytes);
}

/// Name of the memory region of a neuron layer's input currents. The memory region of the stem's
/// currents holds the convolution without bias, once for each image.
pub fn name_of_currents_region(layer: usize) -> String {
    StoredForwardResults::CurrentsAndPoolingPositions.name_of_layer_currents_region(layer)
}

/// Name of the memory region of the bf16 gradient of a layer's currents; the stem's gradient is
/// summed over the time steps.
pub fn name_of_currents_gradient_region(layer: usize) -> String {
    format!("gradient{layer}")
}

/// Program of ResNet-18 inference.
pub fn fused_inference_program(shape: &ResNetParameters) -> LaunchProgram {
    let network = shape.sizes.build_resnet18_layers();
    let mut program = LaunchProgram::new();
    let logits = declare_image_and_logit_regions(&mut program, shape);
    declare_packed_parameter_regions(&mut program, shape, &network);
    declare_stem_operand_region(&mut program, shape, &network);
    declare_activation_regions(&mut program, fused_activation_regions(shape, &network, false));
    let forward = FusedForwardBuilder {
        shape,
        network: &network,
        training: false,
        merged_layer_launches: None,
    };
    forward.add_fused_forward_pass(&mut program, logits.into());
    program
}

/// Functions of a rung that add one launch for several layers, in place of one launch for each
/// layer.
pub struct MergedLayerLaunches {
    /// Adds the launch of the stem's neurons with the max pooling; used in training.
    pub add_stem_launch: fn(&FusedForwardBuilder, &mut LaunchProgram),
    /// Adds one launch that computes all layers after the pooling. In inference the launch of all
    /// layers includes the stem; it also includes the classifier if the address of the logits is
    /// not null.
    pub add_launch_of_all_layers: fn(&FusedForwardBuilder, &mut LaunchProgram, LaunchArgument),
}

/// Adds the launches of a ResNet-18 forward pass with one launch for each layer to a program.
pub struct FusedForwardBuilder<'a> {
    /// Network and sizes of the ResNet-18 problem.
    pub shape: &'a ResNetParameters,
    /// Layers of the ResNet-18 network.
    pub network: &'a ResNet18Layers,
    /// Whether a backward pass follows, so that currents are stored and biases are read from the
    /// unpacked parameters.
    pub training: bool,
    /// Functions that add one launch for several layers, if the rung has such launches.
    pub merged_layer_launches: Option<&'static MergedLayerLaunches>,
}

impl FusedForwardBuilder<'_> {
    /// Address of a memory region that only a training step has; null in inference.
    pub fn training_region_address_or_null(
        &self,
        program: &LaunchProgram,
        name: &str,
    ) -> LaunchArgument {
        if self.training { program.pointer_to(name).into() } else { NULL }
    }

    /// Address of a convolution's bias: in the parameters in training, else in the packed region.
    /// Packed biases are divided by the number of time steps over which they are fed, except the
    /// stem's bias.
    pub fn address_of_convolution_bias(
        &self,
        program: &LaunchProgram,
        conv: &ConvolutionLayer,
    ) -> LaunchArgument {
        match self.training {
            true => address_of_training_parameter(program, conv.index_of_first_bias()),
            false => program.pointer_to(&name_of_bias_per_step_region(conv)).into(),
        }
    }

    /// Launch grid over the tiles of a feature map: 64 rows (time steps of images at a pixel) by 64
    /// channels each.
    pub fn grid_over_feature_map_tiles(
        &self,
        pixels: usize,
        channels: usize,
    ) -> TileKernelParameters {
        let groups = self.shape.batch_size.div_ceil(GEMM_TILE_SIDE / self.shape.time_steps);
        TileKernelParameters {
            time_steps: self.shape.time_steps,
            blocks: [pixels * groups, channels / GEMM_TILE_SIDE],
        }
    }

    /// Launch grid for a number of elements, with two elements for each thread.
    fn grid_with_two_elements_per_thread(&self, elements: usize) -> TileKernelParameters {
        TileKernelParameters {
            time_steps: self.shape.time_steps,
            blocks: [elements.div_ceil(2 * TWO_GROUP_BLOCK_THREADS), 1],
        }
    }

    /// Adds the launches of the whole forward pass, from images to logits, to the program.
    pub fn add_fused_forward_pass(&self, program: &mut LaunchProgram, logits: LaunchArgument) {
        let (network, images) = (self.network, self.shape.batch_size);
        let stem = self.training || self.merged_layer_launches.is_none();
        program.begin_named_range("Main_Inference_Timing_Run");
        program.add_steps_in_named_range("Input_Reshaping", |program| {
            if stem {
                let columns = stem_operand_columns(network);
                add_gathering_of_stem_operand(program, &network.stem, images, columns, "images");
            }
        });
        program.begin_named_range("Model_Forward_Pass");
        program.begin_named_range("Model_Compute_All_Layers");
        program.add_steps_in_named_range("Conv1_Block", |program| {
            if stem {
                self.add_stem_convolution_and_neurons(program);
            }
        });
        match self.merged_layer_launches {
            Some(merged) => {
                (merged.add_launch_of_all_layers)(
                    self,
                    program,
                    if self.training { NULL } else { logits },
                );
            }
            None => {
                self.add_max_pooling_launch(program);
                self.add_all_residual_blocks(program);
            }
        }
        program.add_steps_in_named_range("Final_Layers", |program| {
            if stem {
                self.add_classifier_launch(program, logits);
            }
        });
        (0..3).for_each(|_| program.end_innermost_range());
    }

    /// Adds the launches of all residual blocks to the program, one launch for each layer.
    fn add_all_residual_blocks(&self, program: &mut LaunchProgram) {
        for (stage, blocks) in
            self.network.blocks.chunks(self.shape.sizes.blocks_per_stage).enumerate()
        {
            program.add_steps_in_named_range(STAGE_NVTX_RANGES[stage], |program| {
                for (number, block) in blocks.iter().enumerate() {
                    self.add_both_layers_of_residual_block(
                        program,
                        stage * self.shape.sizes.blocks_per_stage + number,
                        block,
                    );
                }
            });
        }
    }

    fn add_stem_convolution_and_neurons(&self, program: &mut LaunchProgram) {
        let (shape, network) = (self.shape, self.network);
        let (conv, columns) = (&network.stem, stem_operand_columns(network));
        add_stem_gemm(program, conv, shape.batch_size, columns, &name_of_currents_region(0));
        if let Some(merged) = self.merged_layer_launches {
            return (merged.add_stem_launch)(self, program);
        }
        let map = conv.window.output_extents;
        let neurons = shape.batch_size * map.elements_per_frame();
        let (currents, spikes) = (name_of_currents_region(0), name_of_layer_spikes_region(0));
        let arguments = (
            (
                &currents,
                self.address_of_convolution_bias(program, conv),
                &spikes,
                long_operand(neurons),
            ),
            int_operands([map.channels, shape.time_steps_fed_with_image()]),
            shape.time_steps_to_spread_image() as f32,
            threshold_and_tracer_max_arguments(shape),
        );
        let launch = program.make_kernel_launch(
            &STEM_NEURONS_WITHOUT_POOLING_KERNEL,
            &self.grid_with_two_elements_per_thread(neurons),
            arguments,
        );
        program.add_prepared_launch(launch.with_programmatic_dependent_launch());
    }

    fn add_max_pooling_launch(&self, program: &mut LaunchProgram) {
        let Some(pool) = &self.network.pool else { return };
        let outputs = self.shape.batch_size * pool.output_extents.elements_per_frame();
        let inputs = self.shape.batch_size * pool.input_extents.elements_per_frame();
        let arguments = (
            (
                &name_of_layer_spikes_region(0),
                "pooled",
                self.training_region_address_or_null(program, POOLING_MAXIMUM_TAPS_REGION),
            ),
            (long_operand(outputs), long_operand(inputs)),
            int_operands([
                pool.input_extents.side_pixels,
                pool.input_extents.channels,
                pool.output_extents.side_pixels,
            ]),
        );
        let launch = program
            .make_kernel_launch(
                &MAX_POOL_SPIKES_KERNEL,
                &self.grid_with_two_elements_per_thread(outputs),
                arguments,
            )
            .with_programmatic_dependent_launch();
        program.add_steps_in_named_range("MaxPool", |program| program.add_prepared_launch(launch));
    }

    fn add_both_layers_of_residual_block(
        &self,
        program: &mut LaunchProgram,
        number: usize,
        block: &ResNetBlock,
    ) {
        let input = name_of_block_input_region(self.network, number);
        let (hidden, output) = (2 * number + 1, 2 * number + 2);
        self.add_convolution_and_neurons_launch(program, &block.first, &input, None, hidden);
        self.add_convolution_and_neurons_launch(
            program,
            &block.second,
            &name_of_layer_spikes_region(hidden),
            Some((block, &input)),
            output,
        );
    }

    /// Adds the launch of a convolution and the neurons that receive its output. For the second
    /// convolution of a block, the launch of `add_convolution_and_neurons_launch` also adds the
    /// residual, which is the block's `input` or its shortcut convolution.
    fn add_convolution_and_neurons_launch(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        from: &str,
        end: Option<(&ResNetBlock, &str)>,
        to: usize,
    ) {
        let (shape, window) = (self.shape, conv.window);
        let shortcut = end.and_then(|(block, input)| Some((block.shortcut.as_ref()?, input)));
        let (second, sizes) = match shortcut {
            Some((conv, input)) => {
                let ConvolutionLayer { window, .. } = conv;
                let sizes = [
                    window.input_extents.side_pixels,
                    window.input_extents.channels,
                    window.stride_pixels,
                ];
                (
                    [program.pointer_to(input).into(), weight_address_from_tap_zero(program, conv)],
                    sizes,
                )
            }
            None => ([NULL; 2], [0; 3]),
        };
        let identity = end.filter(|(block, _)| block.shortcut.is_none());
        let columns = weight_columns_that_read_pixels(conv);
        let input = [
            window.input_extents.side_pixels,
            window.input_extents.channels,
            window.window_side,
            window.stride_pixels,
        ];
        let output = [window.output_extents.side_pixels, window.output_extents.channels];
        let arguments = (
            (
                from,
                weight_address_from_tap_zero(program, conv),
                int_operand(columns),
                int_operands(input),
            ),
            (second, int_operands(sizes)),
            identity.map_or(NULL, |(_, input)| program.pointer_to(input).into()),
            self.address_of_convolution_bias(program, conv),
            shortcut.map_or(NULL, |(conv, _)| self.address_of_convolution_bias(program, conv)),
            (
                &name_of_layer_spikes_region(to),
                self.training_region_address_or_null(program, &name_of_currents_region(to)),
            ),
            (
                int_operand(shape.batch_size),
                int_operands(output),
                int_operand(shape.time_steps_fed_with_image()),
            ),
            if self.training { shape.time_steps_to_spread_image() as f32 } else { 1.0 },
            threshold_and_tracer_max_arguments(shape),
        );
        let grid = self.grid_over_feature_map_tiles(
            window.output_extents.pixels_per_frame(),
            window.output_extents.channels,
        );
        let launch = program
            .make_kernel_launch(&CONVOLUTION_AND_NEURONS_KERNEL, &grid, arguments)
            .with_alternative_kernel_on_devices(
                &FOUR_GROUP_CONVOLUTION_AND_NEURONS_KERNEL,
                &grid,
                chooses_four_groups_on_device(&FOUR_GROUP_CONVOLUTION_AND_NEURONS_KERNEL, grid),
            )
            .with_programmatic_dependent_launch();
        program.add_steps_in_named_range(&conv.layer_name, |program| {
            program.add_prepared_launch(launch)
        });
    }

    /// Adds the classifier launch to the program; in training the launch also computes the gradient
    /// of the last layer's currents.
    fn add_classifier_launch(&self, program: &mut LaunchProgram, logits: LaunchArgument) {
        let (shape, network) = (self.shape, self.network);
        let map = network.last_feature_map();
        let last = 2 * network.blocks.len();
        let (weight, bias, share) = if self.training {
            let share = shape.time_steps_fed_with_image() as f32
                / shape.time_steps_to_spread_image() as f32;
            let [weight, bias] = addresses_of_classifier_parameters(program, network);
            (weight, bias, share)
        } else {
            let [weight, bias] =
                ["fc.weight", "fc.bias"].map(|name| program.pointer_to(name).into());
            (weight, bias, shape.time_steps_fed_with_image() as f32)
        };
        let trained = |name: &str| self.training_region_address_or_null(program, name);
        let scale =
            (shape.neuron_parameters().firing_threshold / map.pixels_per_frame() as f64) as f32;
        let arguments = (
            (&name_of_layer_spikes_region(last), weight, bias, logits),
            [trained("labels"), trained("features")],
            [
                trained(&name_of_currents_region(last)),
                trained(&name_of_currents_gradient_region(last)),
            ],
            int_operands([
                shape.batch_size,
                CLASSIFIER_CLASS_COUNT,
                map.pixels_per_frame(),
                map.channels,
            ]),
            (scale, share),
            threshold_and_tracer_max_arguments(shape),
        );
        let grid =
            TileKernelParameters { time_steps: shape.time_steps, blocks: [shape.batch_size, 1] };
        let launch = program.make_kernel_launch(&FUSED_CLASSIFIER_KERNEL, &grid, arguments);
        program.add_prepared_launch(launch.with_programmatic_dependent_launch());
    }
}

/// Address of the parameter element `index` in the parameter input of a training step.
pub fn address_of_training_parameter(program: &LaunchProgram, index: usize) -> LaunchArgument {
    program.pointer_to("parameters").offset_by(index * Dtype::F32.bytes_per_element()).into()
}

/// Addresses of the classifier's weight and bias in the parameter input of a training step.
pub fn addresses_of_classifier_parameters(
    program: &LaunchProgram,
    network: &ResNet18Layers,
) -> [LaunchArgument; 2] {
    let bias = network.first_classifier_weight_index
        + CLASSIFIER_CLASS_COUNT * network.last_feature_map().channels;
    [network.first_classifier_weight_index, bias]
        .map(|index| address_of_training_parameter(program, index))
}

/// Address at which a convolution's packed weight would start with filter tap 0. Filter taps before
/// the first one that reads a pixel are neither stored nor read.
pub fn weight_address_from_tap_zero(
    program: &LaunchProgram,
    conv: &ConvolutionLayer,
) -> LaunchArgument {
    let before =
        conv.window.range_of_taps_that_read_pixels().start * conv.window.input_extents.channels;
    program
        .pointer_to(&name_of_weight_region(conv))
        .moved_back_by(before * Dtype::Bf16.bytes_per_element())
        .into()
}

/// Kernel arguments of the ST-BIF neurons: the threshold θ and the tracer's maximum.
pub fn threshold_and_tracer_max_arguments(shape: &ResNetParameters) -> [LaunchArgument; 2] {
    let neuron = shape.neuron_parameters();
    [LaunchArgument::from(neuron.firing_threshold as f32), LaunchArgument::from(neuron.tracer_max)]
}
