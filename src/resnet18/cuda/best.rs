//! The forward pass in one launch: `kernels/resnet18/best.cu`. In training, which keeps what the stem
//! computes, its convolution is that of `fused`, and its neurons with the pooling another launch.

use std::sync::Arc;

use super::fused::{Forward, NULL, Together, activations, currents_name, neuron_arguments};
use super::per_op::{SOURCES, i32s, input_name, layer_name, total};
use super::sequence::{Memory, Region, Sequence};
use super::tiles::{self, Grid};
use super::weights::{
    bias_name, columns, fragments, live_columns, packed, regions, tiled, tiles_name, weight_name,
};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{Block, CLASSES, Conv, Map, Network, Stem};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Device, KernelSpec, Requires};

/// The kernels.
pub const KERNELS: &[KernelSpec<Grid>] = &[LAYERS, STEM];

/// Blocks of a group, and most groups at a time: the blocks have to be resident at once.
const RANKS: usize = 8;
const MOST_GROUPS: usize = 16;
/// Rows of a pixel: all steps of a group's images.
const ROWS: usize = 16;
/// Layers behind the pooling.
const LAYER_COUNT: usize = 16;
/// Channels of the first of them.
const WIDTH: usize = 64;
const THREADS: usize = 640;
/// Copies of weights that are ahead of their use, of 8 KiB.
const SLOTS: usize = 13;
const SHARED_BYTES: usize = 226_560;
const STEM_THREADS: usize = 128;
/// Of the stem's filters: 64 of 7 rows of 8 pixels of 4 channels.
const FRAGMENT_BYTES: usize = WIDTH * 7 * 8 * 4 * 2;

/// The launches.
pub const TOGETHER: Together = Together { stem, layers };

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
    requires: Requires::Exactly("sm_90a"),
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

/// What the kernel ends as stages, by their numbers there. What a layer waits for the others'
/// spikes counts to it.
const STAGES: &[&str] = &[
    "biases",
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

/// Whether the kernel is compiled for it.
///
/// # Errors
/// The reason.
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

/// Weights in tiles: of all convolutions but the stem's.
pub fn tiles(network: &Network) -> Vec<Region> {
    let bytes =
        |conv: &Conv| conv.window.output.channels * columns(network, conv) * Dtype::Bf16.bytes();
    network.convolutions().skip(1).map(|conv| (tiles_name(conv), bytes(conv))).collect()
}

/// What the launch needs besides weights and activations, as regions with their contents. Layers
/// whose spikes or currents have no address are not kept.
pub fn contents(
    shape: &NetworkShape,
    network: &Network,
    training: bool,
    address: impl Fn(&str) -> Option<u64>,
) -> Vec<(String, Vec<u8>)> {
    let at = |name: &str| address(name).unwrap_or(0) as i64;
    let bias = |conv: &Conv| match training {
        true => at("parameters") + (conv.bias() * Dtype::F32.bytes()) as i64,
        false => at(&bias_name(conv)),
    };
    let mut list = Vec::new();
    let mut sent = 0;
    for (number, (conv, block)) in layers_of(network).enumerate() {
        let second = number % 2 == 1;
        let shortcut = block.shortcut.as_ref().filter(|_| second);
        list.extend([
            weight(conv, at),
            bias(conv),
            shortcut.map_or(0, |conv| weight(conv, at)),
            shortcut.map_or(0, &bias),
            at(&layer_name(number + 1)),
            if training { at(&currents_name(number + 1)) } else { 0 },
            (live_columns(conv) / WIDTH) as i64,
            at(SENT) + sent as i64,
        ]);
        sent += groups(shape) * conv.window.output.elements() * size_of::<u64>();
    }
    let mut contents = vec![
        (LIST.to_owned(), bytemuck::cast_slice(&list).to_vec()),
        (SENT.to_owned(), vec![0; sent]),
        (ROUNDS.to_owned(), vec![0; groups(shape) * RANKS * size_of::<u32>()]),
    ];
    if let Some(pool) = network.pool.as_ref().filter(|_| !training) {
        let words = groups(shape) * pool.output.elements();
        contents.push((STEM_SENT.to_owned(), vec![0; words * size_of::<u64>()]));
    }
    contents
}

/// The layers' convolutions with the blocks that they are in.
fn layers_of(network: &Network) -> impl Iterator<Item = (&Conv, &Block)> {
    network.blocks.iter().flat_map(|block| [(&block.first, block), (&block.second, block)])
}

/// The tiles of a weight from tap 0 on, of which those before the first live one are not held.
fn weight(conv: &Conv, at: impl Fn(&str) -> i64) -> i64 {
    let before = conv.window.live_taps().start * conv.window.input.channels;
    let filters = 32;
    at(&tiles_name(conv)) - (before * filters * Dtype::Bf16.bytes()) as i64
}

/// Uploads [`contents`] for a memory that has the rest.
///
/// # Errors
/// When device memory is short.
pub fn upload(
    shape: &NetworkShape,
    network: &Network,
    training: bool,
    device: &Device,
    memory: &mut Memory,
) -> Result<(), BackendError> {
    // The list says where the words are, so they are first.
    let mut contents = contents(shape, network, training, |_| None);
    contents.remove(0);
    memory.upload(device, contents)?;
    let mut contents = self::contents(shape, network, training, |name| memory.find(name));
    contents.truncate(1);
    memory.upload(device, contents)
}

/// What a forward pass writes. The stem's spikes are not, those behind it only where they are kept,
/// as they are in training, and what its convolution reads and writes in training alone.
pub fn written(shape: &NetworkShape, network: &Network, training: bool, keep: bool) -> Vec<Region> {
    let layers = 0..if keep { 1 } else { network.neurons().len() };
    let mut dropped: Vec<_> = layers.map(layer_name).collect();
    if !training {
        dropped.extend(["operand".to_owned(), currents_name(0)]);
    }
    if !keep {
        dropped.push("pooled".to_owned());
    }
    let mut regions = activations(shape, network, training);
    regions.retain(|(name, _)| !dropped.contains(name));
    regions
}

/// Parameters, images, activations, the library's workspace and the output.
pub fn device_bytes(shape: &NetworkShape) -> u64 {
    let network = shape.sizes.network();
    let lists = contents(shape, &network, false, |_| None);
    let lists = lists.into_iter().map(|(name, bytes)| (name, bytes.len())).collect();
    let stem = weight_name(&network.stem);
    let held = regions(&network).into_iter().map(|(name, bytes)| match name == stem {
        true => (FRAGMENTS.to_owned(), FRAGMENT_BYTES),
        false => (name, bytes),
    });
    let written = written(shape, &network, false, false);
    total(shape, [held.collect(), written, lists].concat())
}

/// Writes the launches of inference, of which the spikes of all layers are kept or not.
///
/// # Errors
/// When a kernel does not compile, the library declines, device memory is short, or the device does
/// not hold all blocks at once.
pub fn sequence(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
    keep: bool,
) -> Result<Sequence, BackendError> {
    let network = shape.sizes.network();
    let mut contents = packed(shape, &network, inputs);
    for (number, conv) in network.convolutions().enumerate() {
        let name = weight_name(conv);
        let held = contents.iter_mut().find(|(known, _)| *known == name);
        let (known, bytes) = held.expect("every convolution's weight is packed");
        let columns = columns(&network, conv);
        (*known, *bytes) = match number {
            0 => (FRAGMENTS.to_owned(), fragments(bytes, columns)),
            _ => (tiles_name(conv), tiled(bytes, columns)),
        };
    }
    contents.push(("images".to_owned(), inputs.tensor("images").as_bytes().to_vec()));
    let mut memory = Memory::new(device, written(shape, &network, false, keep), contents)?;
    upload(shape, &network, false, device, &mut memory)?;
    let sequence = Sequence::new(device, memory)?;
    let mut writer =
        Forward { shape, network: &network, training: false, together: Some(&TOGETHER), sequence };
    writer.whole(output.argument())?;
    Ok(writer.sequence)
}

/// Writes the launch of the stem's neurons and the pooling.
///
/// # Errors
/// When it does not compile.
fn stem(forward: &mut Forward) -> Result<(), BackendError> {
    let (shape, network) = (forward.shape, forward.network);
    let Some(pool) = &network.pool else { return Ok(()) };
    let outputs = shape.b * pool.output.elements();
    let mut arguments = vec![forward.at(&currents_name(0)), forward.bias(&network.stem)];
    arguments.extend([forward.at("pooled"), forward.trained(SOURCES)]);
    arguments.push(Argument::I64(outputs as i64));
    let Map { side, channels } = pool.input;
    arguments.extend(i32s(&[side, channels, pool.output.side, shape.fed()]));
    arguments.push(Argument::F32(shape.steps() as f32));
    arguments.extend(neuron_arguments(shape));
    let grid = Grid { steps: shape.t, blocks: [outputs.div_ceil(2 * STEM_THREADS), 1] };
    forward.sequence.launch_early(&STEM, &grid, &arguments)
}

/// Writes the launch of the layers; `logits` may be null, where the classifier is another one's.
///
/// # Errors
/// When it does not compile, or the device does not hold its blocks at once.
fn layers(forward: &mut Forward, logits: Argument) -> Result<(), BackendError> {
    let (shape, network) = (forward.shape, forward.network);
    let map = network.last();
    debug_assert_eq!(layers_of(network).count(), LAYER_COUNT);
    let mut arguments = vec![forward.at(LIST)];
    arguments.extend(match forward.training {
        true => [NULL; 4],
        false => {
            let bias = forward.bias(&network.stem);
            [forward.at("images"), forward.at(FRAGMENTS), bias, forward.at(STEM_SENT)]
        }
    });
    arguments.push(Argument::F32(shape.steps() as f32));
    let pooled = forward.sequence.memory().find(&input_name(network, 0));
    arguments.push(pooled.map_or(NULL, Argument::Address));
    arguments.extend(match forward.training {
        true => {
            let bias = network.classifier + CLASSES * map.channels;
            [forward.parameter(network.classifier), forward.parameter(bias)]
        }
        false => [forward.at("fc.weight"), forward.at("fc.bias")],
    });
    arguments.extend([logits, forward.at(ROUNDS)]);
    arguments.extend(i32s(&[shape.b, CLASSES, shape.fed()]));
    arguments.push(Argument::F32(if forward.training { shape.steps() as f32 } else { 1.0 }));
    arguments.extend(neuron_arguments(shape));
    let scale = (shape.neuron().threshold / map.pixels() as f64) as f32;
    arguments.extend([Argument::F32(scale), Argument::F32(shape.fed() as f32)]);
    let grid = Grid { steps: shape.t, blocks: [groups(shape) * RANKS, 1] };
    forward.sequence.launch(&LAYERS, &grid, &arguments)
}
