//! The forward pass of ResNet-18 in one launch: `kernels/resnet18/best.cu`. Training needs the
//! stem's results, so its stem uses the convolution of the row `fused`, and a separate launch for
//! the neurons with the pooling.

use super::fused::{
    ActivationRegion, FusedForward, MergedLayers, activation_regions, classifier_parameters,
    currents_region_name, declare_activations, neuron_launch_arguments,
};
use super::kernel_weights::{
    PackedRegion, bias_share_region_name, live_weight_columns, packed_regions,
    stem_weight_fragments, tiled_weight, tiled_weight_region_name, weight_columns,
    weight_region_name,
};
use super::per_op::{POOLED_TAPS, block_input_name, declare_images_and_logits, layer_spikes_name};
use super::tiles::{self, TileGrid};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{
    CLASS_COUNT, ConvolutionLayer, FeatureMap, NetworkStem, ResNet18, ResidualBlock,
};
use kernelgate::backend::program::{
    MemoryPurpose, NULL, Operand, Pointer, Program, TableWord, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Kernels of the rung `best`.
pub const KERNELS: &[KernelSpec<TileGrid>] = &[LAYERS_KERNEL, STEM_NEURONS_KERNEL];

/// Number of blocks in a group, which compute the same images.
const BLOCKS_PER_GROUP: usize = 8;
/// Maximum number of groups at a time, because all blocks have to be resident at once.
const MAX_IMAGE_GROUPS: usize = 16;
/// Number of rows for each pixel: all time steps of a group's images.
const ROWS_PER_PIXEL: usize = 16;
/// Number of layers after the pooling.
const LAYERS_AFTER_POOLING: usize = 16;
/// Number of channels of the first layer after the pooling.
const FIRST_LAYER_CHANNELS: usize = 64;
const THREADS: usize = 640;
/// Number of weight copies of 8 KiB that can be ahead of their use.
const WEIGHT_SLOTS: usize = 13;
const SHARED_BYTES: usize = 226_560;
const STEM_THREADS: usize = 128;
/// Bytes of the stem's filters as fragments: 64 filters of 7 rows of 8 pixels of 4 channels.
const FRAGMENT_BYTES: usize = FIRST_LAYER_CHANNELS * 7 * 8 * 4 * 2;

/// Launches of `best` that replace the launches of single layers.
pub const MERGED_LAYERS: MergedLayers =
    MergedLayers { stem: write_stem_launch, layers: launch_layers };

const LAYERS_KERNEL: KernelSpec<TileGrid> = KernelSpec {
    defines: |grid| vec![format!("STEPS={}", grid.steps)],
    constants: |_| {
        vec![
            ("THREADS", THREADS),
            ("RANKS", BLOCKS_PER_GROUP),
            ("LAYERS", LAYERS_AFTER_POOLING),
            ("SLOTS", WEIGHT_SLOTS),
            ("SHARED_BYTES", SHARED_BYTES),
            ("STEM_THREADS", STEM_THREADS),
        ]
    },
    shared_bytes: |_| SHARED_BYTES,
    co_resident: true,
    requires: RequiredArchitecture::Exactly("sm_90a"),
    variants: || [4, 8, 16].map(|steps| TileGrid { steps, blocks: [BLOCKS_PER_GROUP, 1] }).to_vec(),
    stages: TIMER_STAGES,
    ..KernelSpec::new(kernel_file("resnet18/best"), "resnet18_best_layers", THREADS, |grid| {
        [grid.blocks[0], 1, 1]
    })
};

const STEM_NEURONS_KERNEL: KernelSpec<TileGrid> = KernelSpec {
    symbol: "resnet18_best_stem",
    threads: STEM_THREADS,
    shared_bytes: |_| 0,
    co_resident: false,
    stages: &[],
    ..LAYERS_KERNEL
};

/// Names of the kernel's timer stages, in the order of their numbers in the kernel. The wait for
/// spikes of other blocks counts as time of the layer that waits.
const TIMER_STAGES: &[&str] = &[
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

/// Name of the region with the list of layers that the kernel reads.
const LAYER_LIST: &str = "best_layers";
/// Name of the region with the words that blocks send each other.
const EXCHANGE_WORDS: &str = "best_sent";
/// Name of the region with the number of rounds that each block has done.
const ROUND_COUNTERS: &str = "best_rounds";
/// Name of the region with the stem's filters as fragments, for inference.
const STEM_FRAGMENTS: &str = "best_stem.fragments";
/// Name of the region with the pooled spikes that blocks send each other.
const STEM_EXCHANGE_WORDS: &str = "best_stem_sent";

/// Checks that the kernel is compiled for a shape.
pub fn check_compiled(shape: &NetworkShape) -> Result<(), String> {
    tiles::check_compiled(shape)?;
    let sizes = shape.sizes;
    if sizes.stem != NetworkStem::ImageNet
        || sizes.width != FIRST_LAYER_CHANNELS
        || sizes.blocks != 2
    {
        return Err(format!("the imagenet stem and a width of {FIRST_LAYER_CHANNELS} only"));
    }
    Ok(())
}

/// Number of groups of blocks that compute images at the same time.
fn image_groups(shape: &NetworkShape) -> usize {
    (shape.b * shape.t).div_ceil(ROWS_PER_PIXEL).min(MAX_IMAGE_GROUPS)
}

/// Declares the regions of weights in tiles, which a training step packs: of all convolutions but
/// the stem's.
pub fn declare_weight_tiles(program: &mut Program, network: &ResNet18) {
    for conv in network.block_convolutions().skip(1) {
        let elements = conv.window.output.channels * weight_columns(network, conv);
        let bytes = elements * Dtype::Bf16.bytes();
        program.add_scratch(tiled_weight_region_name(conv), MemoryPurpose::Weights, bytes);
    }
}

/// Declares the lists and exchange buffers of the launch of all layers. The regions keep spikes and
/// currents of the layers for which the program declares regions.
pub fn declare_layer_lists(
    program: &mut Program,
    shape: &NetworkShape,
    network: &ResNet18,
    training: bool,
) {
    let outputs = layers_with_blocks(network).map(|(conv, _)| conv.window.output.elements());
    let sent = image_groups(shape) * outputs.sum::<usize>() * size_of::<u64>();
    let sent = zeroed_region(program, EXCHANGE_WORDS, sent);
    zeroed_region(
        program,
        ROUND_COUNTERS,
        image_groups(shape) * BLOCKS_PER_GROUP * size_of::<u32>(),
    );
    if let Some(pool) = network.pool.as_ref().filter(|_| !training) {
        let words = image_groups(shape) * pool.output.elements();
        zeroed_region(program, STEM_EXCHANGE_WORDS, words * size_of::<u64>());
    }
    let list = layer_list_words(program, shape, network, training, sent);
    program.add_table(LAYER_LIST, MemoryPurpose::Workspace, list);
}

fn zeroed_region(program: &mut Program, name: &'static str, bytes: usize) -> Pointer {
    program.add_packed(name, MemoryPurpose::Workspace, bytes, move |_| vec![0; bytes])
}

/// Writes the list of layers that the kernel reads: eight words for each layer.
fn layer_list_words(
    program: &Program,
    shape: &NetworkShape,
    network: &ResNet18,
    training: bool,
    mut sent: Pointer,
) -> Vec<TableWord> {
    const NULL_WORD: TableWord = TableWord::Value(0);
    let kept = |name: &str| program.find(name).map_or(NULL_WORD, TableWord::Pointer);
    let bias = |conv: &ConvolutionLayer| match training {
        true => program
            .at("parameters")
            .offset_by(conv.first_bias_element() * Dtype::F32.bytes())
            .into(),
        false => program.at(&bias_share_region_name(conv)).into(),
    };
    let mut list = Vec::new();
    for (number, (conv, block)) in layers_with_blocks(network).enumerate() {
        let second = number % 2 == 1;
        let shortcut = block.shortcut.as_ref().filter(|_| second);
        list.extend([
            weight_tile_pointer(program, conv),
            bias(conv),
            shortcut.map_or(NULL_WORD, |conv| weight_tile_pointer(program, conv)),
            shortcut.map_or(NULL_WORD, bias),
            kept(&layer_spikes_name(number + 1)),
            if training { kept(&currents_region_name(number + 1)) } else { NULL_WORD },
            TableWord::Value((live_weight_columns(conv) / FIRST_LAYER_CHANNELS) as i64),
            sent.into(),
        ]);
        sent =
            sent.offset_by(image_groups(shape) * conv.window.output.elements() * size_of::<u64>());
    }
    list
}

/// The layers' convolutions, each with its residual block.
fn layers_with_blocks(
    network: &ResNet18,
) -> impl Iterator<Item = (&ConvolutionLayer, &ResidualBlock)> {
    network.blocks.iter().flat_map(|block| [(&block.first, block), (&block.second, block)])
}

/// Pointer to the tiles of a weight from tap 0 on. Taps before the first live one are neither
/// stored nor read.
fn weight_tile_pointer(program: &Program, conv: &ConvolutionLayer) -> TableWord {
    const FILTERS_PER_TILE: usize = 32;
    let before = conv.window.taps_that_read_pixels().start * conv.window.input.channels;
    program
        .at(&tiled_weight_region_name(conv))
        .address_before(before * FILTERS_PER_TILE * Dtype::Bf16.bytes())
        .into()
}

/// Memory regions that a forward pass writes. The spikes of the stem stay on the chip, and the
/// spikes of later layers are stored only if a training step needs them. The currents of the stem
/// are written in training only.
pub fn regions_written_forward(
    shape: &NetworkShape,
    network: &ResNet18,
    training: bool,
    keep: bool,
) -> Vec<ActivationRegion> {
    let layers = 0..if keep { 1 } else { network.neuron_layer_extents().len() };
    let mut dropped: Vec<_> = layers.map(layer_spikes_name).collect();
    if !training {
        dropped.push(currents_region_name(0));
    }
    if !keep {
        dropped.push("pooled".to_owned());
    }
    let mut regions = activation_regions(shape, network, training);
    regions.retain(|(name, _)| !dropped.contains(name));
    regions
}

/// Program of ResNet-18 inference that stores no spikes of layers.
pub fn inference_program(shape: &NetworkShape) -> Program {
    inference_launches(shape, false)
}

/// Program of ResNet-18 inference; `keep` decides whether the spikes of all layers are stored.
pub fn inference_launches(shape: &NetworkShape, keep: bool) -> Program {
    let network = shape.sizes.build_network();
    let mut program = Program::new();
    let logits = declare_images_and_logits(&mut program, shape);
    declare_packed_parameters(&mut program, shape, &network);
    declare_activations(&mut program, regions_written_forward(shape, &network, false, keep));
    declare_layer_lists(&mut program, shape, &network, false);
    let forward =
        FusedForward { shape, network: &network, training: false, merged: Some(&MERGED_LAYERS) };
    forward.add_forward_pass(&mut program, logits.into());
    program
}

/// Declares parameters in the kernel's layouts: weights in tiles, those of the stem as fragments.
fn declare_packed_parameters(program: &mut Program, shape: &NetworkShape, network: &ResNet18) {
    for PackedRegion { name, bytes, part } in packed_regions(shape, network) {
        let conv = network.block_convolutions().find(|conv| weight_region_name(conv) == name);
        let Some(conv) = conv else {
            program.add_packed(name, MemoryPurpose::Weights, bytes, move |inputs| {
                part.packed_bytes(inputs)
            });
            continue;
        };
        let columns = weight_columns(network, conv);
        if conv.weight == network.stem.weight {
            program.add_packed(
                STEM_FRAGMENTS,
                MemoryPurpose::Weights,
                FRAGMENT_BYTES,
                move |inputs| stem_weight_fragments(&part.packed_bytes(inputs), columns),
            );
        } else {
            program.add_packed(
                tiled_weight_region_name(conv),
                MemoryPurpose::Weights,
                bytes,
                move |inputs| tiled_weight(&part.packed_bytes(inputs), columns),
            );
        }
    }
}

/// Writes the launch of the stem's neurons and the pooling.
fn write_stem_launch(forward: &FusedForward, program: &mut Program) {
    let (shape, network) = (forward.shape, forward.network);
    let Some(pool) = &network.pool else { return };
    let outputs = shape.b * pool.output.elements();
    let FeatureMap { side, channels } = pool.input;
    let arguments = (
        (&currents_region_name(0), forward.bias_address(program, &network.stem)),
        ("pooled", forward.training_region_or_null(program, POOLED_TAPS), long_operand(outputs)),
        int_operands([side, channels, pool.output.side, shape.fed_time_steps()]),
        shape.spread_steps() as f32,
        neuron_launch_arguments(shape),
    );
    let grid = TileGrid { steps: shape.t, blocks: [outputs.div_ceil(2 * STEM_THREADS), 1] };
    let launch = program.kernel_launch(&STEM_NEURONS_KERNEL, &grid, arguments);
    program.add(launch.programmatic());
}

/// Adds the launch that computes all layers to the program. With a null address of the logits the
/// launch ends before the classifier.
fn launch_layers(forward: &FusedForward, program: &mut Program, logits: Operand) {
    let (shape, network) = (forward.shape, forward.network);
    let map = network.last_map();
    debug_assert_eq!(layers_with_blocks(network).count(), LAYERS_AFTER_POOLING);
    let at = |name: &str| Operand::from(program.at(name));
    let stem = match forward.training {
        true => [NULL; 4],
        false => [
            at("images"),
            at(STEM_FRAGMENTS),
            forward.bias_address(program, &network.stem),
            at(STEM_EXCHANGE_WORDS),
        ],
    };
    let classifier = match forward.training {
        true => classifier_parameters(program, network),
        false => ["fc.weight", "fc.bias"].map(at),
    };
    let scale = (shape.neuron().threshold / map.pixel_count() as f64) as f32;
    let arguments = (
        (LAYER_LIST, stem, shape.spread_steps() as f32),
        program.find(&block_input_name(network, 0)).map_or(NULL, Operand::from),
        (classifier, logits, ROUND_COUNTERS),
        int_operands([shape.b, CLASS_COUNT, shape.fed_time_steps()]),
        if forward.training { shape.spread_steps() as f32 } else { 1.0 },
        neuron_launch_arguments(shape),
        (scale, shape.fed_time_steps() as f32),
    );
    let grid = TileGrid { steps: shape.t, blocks: [image_groups(shape) * BLOCKS_PER_GROUP, 1] };
    program.add_launch(&LAYERS_KERNEL, &grid, arguments);
}
