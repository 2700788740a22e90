//! The forward pass of ResNet-18 in one launch: `kernels/resnet18/best.cu`. Training needs the
//! stem's currents and spikes, so the training rung `best` uses the stem convolution of the rung
//! `fused` and a separate launch for neurons and pooling.

use super::fused::{
    ActivationRegionNameAndBytes, FusedForwardBuilder, MergedLayerLaunches,
    addresses_of_classifier_parameters, declare_activation_regions, fused_activation_regions,
    name_of_currents_region, threshold_and_tracer_max_arguments,
};
use super::kernel_weights::{
    PackedParameterRegion, arrange_stem_weight_as_mma_fragments, name_of_bias_per_step_region,
    name_of_tiled_weight_region, name_of_weight_region, packed_weight_columns,
    rearrange_weight_into_swizzled_tiles, regions_of_packed_parameters,
    weight_columns_that_read_pixels,
};
use super::per_op::{
    POOLING_MAXIMUM_TAPS_REGION, declare_image_and_logit_regions, name_of_block_input_region,
    name_of_layer_spikes_region,
};
use super::tiles::{self, TileKernelParameters};
use crate::kernel_files::source_of_kernel_file;
use crate::resnet18::definition::ResNetParameters;
use crate::resnet18::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, FeatureMapExtents, ResNet18Layers, ResNetBlock,
    ResNetStem,
};
use kernelgate::backend::program::{
    LaunchArgument, LaunchProgram, MemoryPurpose, NULL, RegionPointer, TableNumberOrAddress,
    int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Kernels of the ResNet-18 rung `best`.
pub const BEST_RUNG_KERNELS: &[KernelSpec<TileKernelParameters>] =
    &[ALL_LAYERS_KERNEL, STEM_NEURONS_AND_POOLING_KERNEL];

/// Number of thread blocks in a group; the blocks of a group compute the same images together.
const BLOCKS_PER_IMAGE_GROUP: usize = 8;
/// Maximum number of groups of blocks in the grid, because all blocks must be resident at the same
/// time.
const MAX_GROUPS_OF_BLOCKS: usize = 16;
/// Number of GEMM rows for each pixel: all time steps of the images of a group.
const GEMM_ROWS_PER_PIXEL: usize = 16;
/// Number of convolution layers after the pooling.
const LAYER_COUNT_AFTER_POOLING: usize = 16;
/// Number of channels of the stem and of the first stage.
const FIRST_STAGE_CHANNELS: usize = 64;
const ALL_LAYERS_BLOCK_THREADS: usize = 640;
/// Number of weight copies of 8 KiB to shared memory that may run ahead of their use.
const MAX_WEIGHT_COPIES_IN_FLIGHT: usize = 13;
const ALL_LAYERS_BLOCK_SHARED_BYTES: usize = 226_560;
const STEM_NEURON_BLOCK_THREADS: usize = 128;
/// Bytes of the stem's filters as tensor-core fragments: 64 filters of 7 rows of 8 pixels of 4
/// channels in bf16.
const STEM_FRAGMENT_BYTES: usize = FIRST_STAGE_CHANNELS * 7 * 8 * 4 * 2;

/// Functions of the rung `best` that add launches in place of the launches of single layers.
pub const BEST_RUNG_MERGED_LAYERS: MergedLayerLaunches = MergedLayerLaunches {
    add_stem_launch: add_stem_neurons_and_pooling_launch,
    add_launch_of_all_layers: add_all_layers_launch,
};

const ALL_LAYERS_KERNEL: KernelSpec<TileKernelParameters> = KernelSpec {
    macro_definitions: |grid| vec![format!("STEPS={}", grid.time_steps)],
    constant_macros: |_| {
        vec![
            ("THREADS", ALL_LAYERS_BLOCK_THREADS),
            ("RANKS", BLOCKS_PER_IMAGE_GROUP),
            ("LAYERS", LAYER_COUNT_AFTER_POOLING),
            ("SLOTS", MAX_WEIGHT_COPIES_IN_FLIGHT),
            ("SHARED_BYTES", ALL_LAYERS_BLOCK_SHARED_BYTES),
            ("STEM_THREADS", STEM_NEURON_BLOCK_THREADS),
        ]
    },
    dynamic_shared_bytes: |_| ALL_LAYERS_BLOCK_SHARED_BYTES,
    needs_cooperative_launch: true,
    required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
    listed_build_parameters: || {
        [4, 8, 16]
            .map(|steps| TileKernelParameters {
                time_steps: steps,
                blocks: [BLOCKS_PER_IMAGE_GROUP, 1],
            })
            .to_vec()
    },
    stage_names: ALL_LAYERS_TIMER_STAGES,
    ..KernelSpec::new(
        source_of_kernel_file("resnet18/best"),
        "resnet18_best_layers",
        ALL_LAYERS_BLOCK_THREADS,
        |grid| [grid.blocks[0], 1, 1],
    )
};

const STEM_NEURONS_AND_POOLING_KERNEL: KernelSpec<TileKernelParameters> = KernelSpec {
    kernel_symbol: "resnet18_best_stem",
    threads_per_block: STEM_NEURON_BLOCK_THREADS,
    dynamic_shared_bytes: |_| 0,
    needs_cooperative_launch: false,
    stage_names: &[],
    ..ALL_LAYERS_KERNEL
};

/// Names of the timer stages of the kernel that computes all layers, in the order of their numbers
/// in the kernel. The time in which a block waits for spikes of other blocks counts for the layer
/// that waits.
const ALL_LAYERS_TIMER_STAGES: &[&str] = &[
    "start",
    "stem: images",
    "stem: convolution",
    "stem: neurons, pooling, exchange",
    "layer 1",
    "layer 2",
    "layer 3",
    "layer 4",
    "layer 5",
    "layer 6",
    "layer 7",
    "layer 8",
    "layer 9",
    "layer 10",
    "layer 11",
    "layer 12",
    "layer 13",
    "layer 14",
    "layer 15",
    "layer 16",
    "classifier",
];

/// Name of the memory region with the table of layers that the all-layers kernel reads.
const LAYER_TABLE_REGION: &str = "best_layers";
/// Name of the memory region with the words of spikes that blocks of a group send each other.
const SPIKE_EXCHANGE_BETWEEN_BLOCKS: &str = "best_sent";
/// Name of the memory region with the number of rounds of images that each block has finished.
const ROUND_COUNTER_REGION: &str = "best_rounds";
/// Name of the memory region with the stem's filters as tensor-core fragments, which inference
/// reads.
const STEM_FRAGMENT_REGION: &str = "best_stem.fragments";
/// Name of the memory region with the pooled spikes of the stem that blocks of a group send each
/// other.
const POOLED_SPIKE_EXCHANGE_REGION: &str = "best_stem_sent";

/// Checks that the all-layers kernel is compiled for the network shape: ImageNet stem, width 64,
/// two blocks a stage.
pub fn check_all_layers_kernel_is_compiled(shape: &ResNetParameters) -> Result<(), String> {
    tiles::check_tile_kernels_are_compiled(shape)?;
    let sizes = shape.sizes;
    if sizes.stem != ResNetStem::ImageNetStem
        || sizes.first_stage_channels != FIRST_STAGE_CHANNELS
        || sizes.blocks_per_stage != 2
    {
        return Err(format!("the imagenet stem and a width of {FIRST_STAGE_CHANNELS} only"));
    }
    Ok(())
}

/// Number of groups of blocks in the grid; the groups compute different images at the same time.
fn block_group_count(shape: &ResNetParameters) -> usize {
    (shape.batch_size * shape.time_steps).div_ceil(GEMM_ROWS_PER_PIXEL).min(MAX_GROUPS_OF_BLOCKS)
}

/// Adds memory regions for the tiled weights of all convolutions but the stem's; a training step
/// packs its parameters into these regions.
pub fn declare_tiled_weight_regions(program: &mut LaunchProgram, network: &ResNet18Layers) {
    for conv in network.all_convolutions().skip(1) {
        let elements = conv.window.output_extents.channels * packed_weight_columns(network, conv);
        let bytes = elements * Dtype::Bf16.bytes_per_element();
        program.add_scratch(name_of_tiled_weight_region(conv), MemoryPurpose::Weights, bytes);
    }
}

/// Adds the layer table and the exchange buffers of the all-layers launch to the program. The layer
/// table points to the spike and current regions that the program has; for other layers, spikes and
/// currents are not stored.
pub fn declare_layer_table_and_exchange_buffers(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    training: bool,
) {
    let outputs = convolutions_with_their_blocks(network)
        .map(|(conv, _)| conv.window.output_extents.elements_per_frame());
    let sent = block_group_count(shape) * outputs.sum::<usize>() * size_of::<u64>();
    let sent = add_zeroed_region(program, SPIKE_EXCHANGE_BETWEEN_BLOCKS, sent);
    add_zeroed_region(
        program,
        ROUND_COUNTER_REGION,
        block_group_count(shape) * BLOCKS_PER_IMAGE_GROUP * size_of::<u32>(),
    );
    if let Some(pool) = network.pool.as_ref().filter(|_| !training) {
        let words = block_group_count(shape) * pool.output_extents.elements_per_frame();
        add_zeroed_region(program, POOLED_SPIKE_EXCHANGE_REGION, words * size_of::<u64>());
    }
    let list = words_of_layer_table(program, shape, network, training, sent);
    program.add_table_of_numbers_and_addresses(LAYER_TABLE_REGION, MemoryPurpose::Workspace, list);
}

fn add_zeroed_region(
    program: &mut LaunchProgram,
    name: &'static str,
    bytes: usize,
) -> RegionPointer {
    program.add_packed_from_inputs(name, MemoryPurpose::Workspace, bytes, move |_| vec![0; bytes])
}

/// Returns the words of the layer table that the kernel reads: eight words for each layer.
fn words_of_layer_table(
    program: &LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    training: bool,
    mut sent: RegionPointer,
) -> Vec<TableNumberOrAddress> {
    const NULL_TABLE_WORD: TableNumberOrAddress = TableNumberOrAddress::Number(0);
    let kept = |name: &str| {
        program.pointer_if_declared(name).map_or(NULL_TABLE_WORD, TableNumberOrAddress::Pointer)
    };
    let bias = |conv: &ConvolutionLayer| match training {
        true => program
            .pointer_to("parameters")
            .offset_by(conv.index_of_first_bias() * Dtype::F32.bytes_per_element())
            .into(),
        false => program.pointer_to(&name_of_bias_per_step_region(conv)).into(),
    };
    let mut list = Vec::new();
    for (number, (conv, block)) in convolutions_with_their_blocks(network).enumerate() {
        let second = number % 2 == 1;
        let shortcut = block.shortcut.as_ref().filter(|_| second);
        list.extend([
            pointer_to_weight_tiles_from_tap_zero(program, conv),
            bias(conv),
            shortcut.map_or(NULL_TABLE_WORD, |conv| {
                pointer_to_weight_tiles_from_tap_zero(program, conv)
            }),
            shortcut.map_or(NULL_TABLE_WORD, bias),
            kept(&name_of_layer_spikes_region(number + 1)),
            if training { kept(&name_of_currents_region(number + 1)) } else { NULL_TABLE_WORD },
            TableNumberOrAddress::Number(
                (weight_columns_that_read_pixels(conv) / FIRST_STAGE_CHANNELS) as i64,
            ),
            sent.into(),
        ]);
        sent = sent.offset_by(
            block_group_count(shape)
                * conv.window.output_extents.elements_per_frame()
                * size_of::<u64>(),
        );
    }
    list
}

/// Returns the convolutions of all layers after the pooling, each with its residual block.
fn convolutions_with_their_blocks(
    network: &ResNet18Layers,
) -> impl Iterator<Item = (&ConvolutionLayer, &ResNetBlock)> {
    network.blocks.iter().flat_map(|block| [(&block.first, block), (&block.second, block)])
}

/// Pointer to where the tiles of a convolution's weight would start with tap 0. Filter taps before
/// the first one that reads a pixel are neither stored nor read.
fn pointer_to_weight_tiles_from_tap_zero(
    program: &LaunchProgram,
    conv: &ConvolutionLayer,
) -> TableNumberOrAddress {
    const FILTERS_PER_TILE: usize = 32;
    let before =
        conv.window.range_of_taps_that_read_pixels().start * conv.window.input_extents.channels;
    program
        .pointer_to(&name_of_tiled_weight_region(conv))
        .moved_back_by(before * FILTERS_PER_TILE * Dtype::Bf16.bytes_per_element())
        .into()
}

/// Memory regions of activations that the forward pass of `best` writes. The stem's spikes stay on
/// the chip; the spikes of later layers are stored only if `keep` is set, as a training step needs.
/// The stem's currents are stored in training only.
pub fn activation_regions_of_best_rung(
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    training: bool,
    keep: bool,
) -> Vec<ActivationRegionNameAndBytes> {
    let layers = 0..if keep { 1 } else { network.extents_of_neuron_layers().len() };
    let mut dropped: Vec<_> = layers.map(name_of_layer_spikes_region).collect();
    if !training {
        dropped.push(name_of_currents_region(0));
    }
    if !keep {
        dropped.push("pooled".to_owned());
    }
    let mut regions = fused_activation_regions(shape, network, training);
    regions.retain(|(name, _)| !dropped.contains(name));
    regions
}

/// Inference program of the ResNet-18 rung `best`, which stores no spikes of layers in memory.
pub fn best_rung_inference_program(shape: &ResNetParameters) -> LaunchProgram {
    best_rung_inference_program_storing_spikes(shape, false)
}

/// Inference program of the ResNet-18 rung `best`; `stores_layer_spikes` decides whether the spikes
/// of all layers are stored.
pub fn best_rung_inference_program_storing_spikes(
    shape: &ResNetParameters,
    stores_layer_spikes: bool,
) -> LaunchProgram {
    let network = shape.sizes.build_resnet18_layers();
    let mut program = LaunchProgram::new();
    let logits = declare_image_and_logit_regions(&mut program, shape);
    declare_parameters_in_kernel_layouts(&mut program, shape, &network);
    declare_activation_regions(
        &mut program,
        activation_regions_of_best_rung(shape, &network, false, stores_layer_spikes),
    );
    declare_layer_table_and_exchange_buffers(&mut program, shape, &network, false);
    let forward = FusedForwardBuilder {
        shape,
        network: &network,
        training: false,
        merged_layer_launches: Some(&BEST_RUNG_MERGED_LAYERS),
    };
    forward.add_fused_forward_pass(&mut program, logits.into());
    program
}

/// Adds regions for parameters in the layouts that the all-layers kernel reads: weights in tiles,
/// the stem's as tensor-core fragments.
fn declare_parameters_in_kernel_layouts(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
) {
    for PackedParameterRegion { region_name: name, region_bytes: bytes, region_contents: part } in
        regions_of_packed_parameters(shape, network)
    {
        let conv = network.all_convolutions().find(|conv| name_of_weight_region(conv) == name);
        let Some(conv) = conv else {
            program.add_packed_from_inputs(name, MemoryPurpose::Weights, bytes, move |inputs| {
                part.pack_parameter_subset(inputs)
            });
            continue;
        };
        let columns = packed_weight_columns(network, conv);
        if conv.first_weight_index == network.stem.first_weight_index {
            program.add_packed_from_inputs(
                STEM_FRAGMENT_REGION,
                MemoryPurpose::Weights,
                STEM_FRAGMENT_BYTES,
                move |inputs| {
                    arrange_stem_weight_as_mma_fragments(
                        &part.pack_parameter_subset(inputs),
                        columns,
                    )
                },
            );
        } else {
            program.add_packed_from_inputs(
                name_of_tiled_weight_region(conv),
                MemoryPurpose::Weights,
                bytes,
                move |inputs| {
                    rearrange_weight_into_swizzled_tiles(
                        &part.pack_parameter_subset(inputs),
                        columns,
                    )
                },
            );
        }
    }
}

/// Adds the launch that computes the stem's neurons and the max pooling, for training.
fn add_stem_neurons_and_pooling_launch(forward: &FusedForwardBuilder, program: &mut LaunchProgram) {
    let (shape, network) = (forward.shape, forward.network);
    let Some(pool) = &network.pool else { return };
    let outputs = shape.batch_size * pool.output_extents.elements_per_frame();
    let FeatureMapExtents { side_pixels: side, channels } = pool.input_extents;
    let arguments = (
        (&name_of_currents_region(0), forward.address_of_convolution_bias(program, &network.stem)),
        (
            "pooled",
            forward.training_region_address_or_null(program, POOLING_MAXIMUM_TAPS_REGION),
            long_operand(outputs),
        ),
        int_operands([
            side,
            channels,
            pool.output_extents.side_pixels,
            shape.time_steps_fed_with_image(),
        ]),
        shape.time_steps_to_spread_image() as f32,
        threshold_and_tracer_max_arguments(shape),
    );
    let grid = TileKernelParameters {
        time_steps: shape.time_steps,
        blocks: [outputs.div_ceil(2 * STEM_NEURON_BLOCK_THREADS), 1],
    };
    let launch = program.make_kernel_launch(&STEM_NEURONS_AND_POOLING_KERNEL, &grid, arguments);
    program.add_prepared_launch(launch.with_programmatic_dependent_launch());
}

/// Adds the launch that computes all layers after the stem, and in inference also the stem. If the
/// address of the logits is null, the all-layers launch ends before the classifier.
fn add_all_layers_launch(
    forward: &FusedForwardBuilder,
    program: &mut LaunchProgram,
    logits: LaunchArgument,
) {
    let (shape, network) = (forward.shape, forward.network);
    let map = network.last_feature_map();
    debug_assert_eq!(convolutions_with_their_blocks(network).count(), LAYER_COUNT_AFTER_POOLING);
    let at = |name: &str| LaunchArgument::from(program.pointer_to(name));
    let stem = match forward.training {
        true => [NULL; 4],
        false => [
            at("images"),
            at(STEM_FRAGMENT_REGION),
            forward.address_of_convolution_bias(program, &network.stem),
            at(POOLED_SPIKE_EXCHANGE_REGION),
        ],
    };
    let classifier = match forward.training {
        true => addresses_of_classifier_parameters(program, network),
        false => ["fc.weight", "fc.bias"].map(at),
    };
    let scale = (shape.neuron_parameters().firing_threshold / map.pixels_per_frame() as f64) as f32;
    let arguments = (
        (LAYER_TABLE_REGION, stem, shape.time_steps_to_spread_image() as f32),
        program
            .pointer_if_declared(&name_of_block_input_region(network, 0))
            .map_or(NULL, LaunchArgument::from),
        (classifier, logits, ROUND_COUNTER_REGION),
        int_operands([shape.batch_size, CLASSIFIER_CLASS_COUNT, shape.time_steps_fed_with_image()]),
        if forward.training { shape.time_steps_to_spread_image() as f32 } else { 1.0 },
        threshold_and_tracer_max_arguments(shape),
        (scale, shape.time_steps_fed_with_image() as f32),
    );
    let grid = TileKernelParameters {
        time_steps: shape.time_steps,
        blocks: [block_group_count(shape) * BLOCKS_PER_IMAGE_GROUP, 1],
    };
    program.add_launch(&ALL_LAYERS_KERNEL, &grid, arguments);
}
