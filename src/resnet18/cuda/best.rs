//! The forward pass in one launch: `kernels/resnet18/best.cu`. Training keeps the results of the
//! stem, so its convolution is that of `fused`, and its neurons with the pooling are another
//! launch.

use super::fused::{
    Activation, Forward, MergedLayers, activations, classifier_parameters, currents_name,
    declare_activations, neuron_arguments,
};
use super::per_op::{SOURCES, images_and_logits, input_name, layer_name};
use super::tiles::{self, Grid};
use super::weights::{
    PackedRegion, bias_name, columns, fragments, live_columns, regions, tiled, tiles_name,
    weight_name,
};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{Block, CLASSES, Conv, Map, Network, Stem};
use kernelgate::backend::program::{MemoryUse, NULL, Operand, Pointer, Program, Word, ints, long};
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// The kernels.
pub const KERNELS: &[KernelSpec<Grid>] = &[LAYERS, STEM];

/// Blocks of a group, and most groups at a time: the blocks have to be resident at once.
const RANKS: usize = 8;
const MOST_GROUPS: usize = 16;
/// Rows of a pixel: all steps of a group's images.
const ROWS: usize = 16;
/// Layers behind the pooling.
const LAYER_COUNT: usize = 16;
/// Channels of the first layer behind the pooling.
const WIDTH: usize = 64;
const THREADS: usize = 640;
/// Copies of weights that are ahead of their use, of 8 KiB.
const SLOTS: usize = 13;
const SHARED_BYTES: usize = 226_560;
const STEM_THREADS: usize = 128;
/// The stem's filters: 64 of 7 rows of 8 pixels of 4 channels.
const FRAGMENT_BYTES: usize = WIDTH * 7 * 8 * 4 * 2;

/// The launches.
pub const MERGED: MergedLayers = MergedLayers { stem, layers };

const LAYERS: KernelSpec<Grid> = KernelSpec {
    defines: |grid| vec![format!("STEPS={}", grid.steps)],
    constants: |_| {
        vec![
            ("THREADS", THREADS),
            ("RANKS", RANKS),
            ("LAYERS", LAYER_COUNT),
            ("SLOTS", SLOTS),
            ("SHARED_BYTES", SHARED_BYTES),
            ("STEM_THREADS", STEM_THREADS),
        ]
    },
    shared_bytes: |_| SHARED_BYTES,
    co_resident: true,
    requires: RequiredArchitecture::Exactly("sm_90a"),
    variants: || [4, 8, 16].map(|steps| Grid { steps, blocks: [RANKS, 1] }).to_vec(),
    stages: STAGES,
    ..KernelSpec::new(
        kernel_file("resnet18/best", include_str!("../../../kernels/resnet18/best.cu")),
        "resnet18_best_layers",
        THREADS,
        |grid| [grid.blocks[0], 1, 1],
    )
};

const STEM: KernelSpec<Grid> = KernelSpec {
    symbol: "resnet18_best_stem",
    threads: STEM_THREADS,
    shared_bytes: |_| 0,
    co_resident: false,
    stages: &[],
    ..LAYERS
};

/// Stages of the kernel, by their numbers there. Waiting for spikes of other blocks counts to the
/// layer that waits.
const STAGES: &[&str] = &[
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

/// Regions of the list of layers, of the words that blocks send each other, and of the rounds that
/// each of them has done.
const LIST: &str = "best_layers";
const SENT: &str = "best_sent";
const ROUNDS: &str = "best_rounds";
/// Regions of inference: the stem's filters as fragments, and the pooled spikes that blocks send
/// each other.
const FRAGMENTS: &str = "best_stem.fragments";
const STEM_SENT: &str = "best_stem_sent";

/// Checks that the kernel is compiled for a shape.
pub fn supported(shape: &NetworkShape) -> Result<(), String> {
    tiles::supported(shape)?;
    let sizes = shape.sizes;
    if sizes.stem != Stem::ImageNet || sizes.width != WIDTH || sizes.blocks != 2 {
        return Err(format!("the imagenet stem and a width of {WIDTH} only"));
    }
    Ok(())
}

/// Groups that compute images at the same time.
fn groups(shape: &NetworkShape) -> usize {
    (shape.b * shape.t).div_ceil(ROWS).min(MOST_GROUPS)
}

/// Declares weights in tiles that a training step packs: of all convolutions but the stem's.
pub fn declare_tiles(program: &mut Program, network: &Network) {
    for conv in network.convolutions().skip(1) {
        let elements = conv.window.output.channels * columns(network, conv);
        let bytes = elements * Dtype::Bf16.bytes();
        program.scratch(tiles_name(conv), MemoryUse::Weights, bytes);
    }
}

/// Declares the lists and exchange buffers of the launch of all layers. It keeps spikes and
/// currents of the layers that have regions for them.
pub fn declare_lists(
    program: &mut Program,
    shape: &NetworkShape,
    network: &Network,
    training: bool,
) {
    let outputs = layers_of(network).map(|(conv, _)| conv.window.output.elements());
    let sent = groups(shape) * outputs.sum::<usize>() * size_of::<u64>();
    let sent = zeroed(program, SENT, sent);
    zeroed(program, ROUNDS, groups(shape) * RANKS * size_of::<u32>());
    if let Some(pool) = network.pool.as_ref().filter(|_| !training) {
        let words = groups(shape) * pool.output.elements();
        zeroed(program, STEM_SENT, words * size_of::<u64>());
    }
    let list = list(program, shape, network, training, sent);
    program.table(LIST, MemoryUse::Workspace, list);
}

fn zeroed(program: &mut Program, name: &'static str, bytes: usize) -> Pointer {
    program.packed(name, MemoryUse::Workspace, bytes, move |_| vec![0; bytes])
}

/// The list of layers: eight words each.
fn list(
    program: &Program,
    shape: &NetworkShape,
    network: &Network,
    training: bool,
    mut sent: Pointer,
) -> Vec<Word> {
    const NONE: Word = Word::Value(0);
    let kept = |name: &str| program.find(name).map_or(NONE, Word::Pointer);
    let bias = |conv: &Conv| match training {
        true => program.at("parameters").plus(conv.bias() * Dtype::F32.bytes()).into(),
        false => program.at(&bias_name(conv)).into(),
    };
    let mut list = Vec::new();
    for (number, (conv, block)) in layers_of(network).enumerate() {
        let second = number % 2 == 1;
        let shortcut = block.shortcut.as_ref().filter(|_| second);
        list.extend([
            weight(program, conv),
            bias(conv),
            shortcut.map_or(NONE, |conv| weight(program, conv)),
            shortcut.map_or(NONE, bias),
            kept(&layer_name(number + 1)),
            if training { kept(&currents_name(number + 1)) } else { NONE },
            Word::Value((live_columns(conv) / WIDTH) as i64),
            sent.into(),
        ]);
        sent = sent.plus(groups(shape) * conv.window.output.elements() * size_of::<u64>());
    }
    list
}

/// The layers' convolutions with the blocks that they are in.
fn layers_of(network: &Network) -> impl Iterator<Item = (&Conv, &Block)> {
    network.blocks.iter().flat_map(|block| [(&block.first, block), (&block.second, block)])
}

/// The tiles of a weight from tap 0 on. Taps before the first live one are neither held nor read.
fn weight(program: &Program, conv: &Conv) -> Word {
    const FILTERS: usize = 32;
    let before = conv.window.live_taps().start * conv.window.input.channels;
    program.at(&tiles_name(conv)).skipping(before * FILTERS * Dtype::Bf16.bytes()).into()
}

/// Regions that a forward pass writes: not the spikes of the stem, which stay on the chip, and
/// those of later layers only if they are kept, as in training. The currents of the stem are
/// written in training only.
pub fn written(
    shape: &NetworkShape,
    network: &Network,
    training: bool,
    keep: bool,
) -> Vec<Activation> {
    let layers = 0..if keep { 1 } else { network.neurons().len() };
    let mut dropped: Vec<_> = layers.map(layer_name).collect();
    if !training {
        dropped.push(currents_name(0));
    }
    if !keep {
        dropped.push("pooled".to_owned());
    }
    let mut regions = activations(shape, network, training);
    regions.retain(|(name, _)| !dropped.contains(name));
    regions
}

/// The launches of inference.
pub fn program(shape: &NetworkShape) -> Program {
    inference(shape, false)
}

/// The launches of inference; the spikes of all layers are kept or not.
pub fn inference(shape: &NetworkShape, keep: bool) -> Program {
    let network = shape.sizes.network();
    let mut program = Program::new();
    let logits = images_and_logits(&mut program, shape);
    declare_packed(&mut program, shape, &network);
    declare_activations(&mut program, written(shape, &network, false, keep));
    declare_lists(&mut program, shape, &network, false);
    let forward = Forward { shape, network: &network, training: false, merged: Some(&MERGED) };
    forward.whole(&mut program, logits.into());
    program
}

/// Declares parameters as the kernel reads them: weights in tiles, the stem's as fragments.
fn declare_packed(program: &mut Program, shape: &NetworkShape, network: &Network) {
    for PackedRegion { name, bytes, part } in regions(shape, network) {
        let conv = network.convolutions().find(|conv| weight_name(conv) == name);
        let Some(conv) = conv else {
            program.packed(name, MemoryUse::Weights, bytes, move |inputs| part.pack(inputs));
            continue;
        };
        let columns = columns(network, conv);
        if conv.weight == network.stem.weight {
            program.packed(FRAGMENTS, MemoryUse::Weights, FRAGMENT_BYTES, move |inputs| {
                fragments(&part.pack(inputs), columns)
            });
        } else {
            program.packed(tiles_name(conv), MemoryUse::Weights, bytes, move |inputs| {
                tiled(&part.pack(inputs), columns)
            });
        }
    }
}

/// Writes the launch of the stem's neurons and the pooling.
fn stem(forward: &Forward, program: &mut Program) {
    let (shape, network) = (forward.shape, forward.network);
    let Some(pool) = &network.pool else { return };
    let outputs = shape.b * pool.output.elements();
    let Map { side, channels } = pool.input;
    let arguments = (
        (&currents_name(0), forward.bias(program, &network.stem)),
        ("pooled", forward.trained(program, SOURCES), long(outputs)),
        ints([side, channels, pool.output.side, shape.fed()]),
        shape.steps() as f32,
        neuron_arguments(shape),
    );
    let grid = Grid { steps: shape.t, blocks: [outputs.div_ceil(2 * STEM_THREADS), 1] };
    let launch = program.kernel(&STEM, &grid, arguments);
    program.add(launch.programmatic());
}

/// Writes the launch of the layers. With a null address of the logits it ends before the
/// classifier.
fn layers(forward: &Forward, program: &mut Program, logits: Operand) {
    let (shape, network) = (forward.shape, forward.network);
    let map = network.last();
    debug_assert_eq!(layers_of(network).count(), LAYER_COUNT);
    let at = |name: &str| Operand::from(program.at(name));
    let stem = match forward.training {
        true => [NULL; 4],
        false => [at("images"), at(FRAGMENTS), forward.bias(program, &network.stem), at(STEM_SENT)],
    };
    let classifier = match forward.training {
        true => classifier_parameters(program, network),
        false => ["fc.weight", "fc.bias"].map(at),
    };
    let scale = (shape.neuron().threshold / map.pixels() as f64) as f32;
    let arguments = (
        (LIST, stem, shape.steps() as f32),
        program.find(&input_name(network, 0)).map_or(NULL, Operand::from),
        (classifier, logits, ROUNDS),
        ints([shape.b, CLASSES, shape.fed()]),
        if forward.training { shape.steps() as f32 } else { 1.0 },
        neuron_arguments(shape),
        (scale, shape.fed() as f32),
    );
    let grid = Grid { steps: shape.t, blocks: [groups(shape) * RANKS, 1] };
    program.launch(&LAYERS, &grid, arguments);
}
