//! A kernel a layer: `kernels/resnet18/fused.cu`. The stem is computed once an image, by the
//! library's GEMM, and the classifier reads the sum over time.

use std::sync::Arc;

use super::per_op::{
    STAGES, classify, gather_images, i32s, input_name, layer_name, spikes, stem_gemm, total,
};
use super::sequence::{Memory, Region, Sequence};
use super::weights::{bias_name, live_columns, packed, regions, stem_columns, weight_name};
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{Block, Conv, Network};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Device, KernelSpec, Source};

/// What builds and grids depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Time steps: compiled for 4, 8 and 16.
    pub steps: usize,
    /// Filters of a block.
    pub columns: usize,
    /// The grid.
    pub blocks: [usize; 3],
}

/// Threads a block.
const THREADS: usize = 128;
/// Rows of a tile: all time steps of `ROWS/steps` images at one pixel.
const ROWS: usize = 64;
/// Channels of a step of the GEMM.
const DEPTH: usize = 64;
/// Blocks that fill a large GPU: with fewer of them tiles are narrower.
const ENOUGH_BLOCKS: usize = 128;

const HEADERS: &[(&str, &str)] = &[
    ("resnet18/spikes.cuh", include_str!("../../../kernels/resnet18/spikes.cuh")),
    ("st_bif/neuron.cuh", include_str!("../../../kernels/st_bif/neuron.cuh")),
];

/// The kernels.
pub const KERNELS: &[KernelSpec<Tile>] = &[BLOCK, STEM, POOL];

const BLOCK: KernelSpec<Tile> = KernelSpec {
    defines: |tile| vec![format!("STEPS={}", tile.steps), format!("COLUMNS={}", tile.columns)],
    constants: |_| vec![("ROWS", ROWS), ("DEPTH", DEPTH), ("THREADS", THREADS)],
    variants: || {
        let tile = |steps, columns| Tile { steps, columns, blocks: [1; 3] };
        [4, 8, 16]
            .into_iter()
            .flat_map(|steps| [32, 64].map(|columns| tile(steps, columns)))
            .collect()
    },
    ..KernelSpec::new(
        Source::new("resnet18/fused", include_str!("../../../kernels/resnet18/fused.cu"))
            .with_headers(HEADERS),
        "resnet18_fused_block",
        THREADS,
        |tile| tile.blocks,
    )
};
const STEM: KernelSpec<Tile> = KernelSpec { symbol: "resnet18_fused_stem", ..BLOCK };
const POOL: KernelSpec<Tile> = KernelSpec { symbol: "resnet18_fused_pool", ..BLOCK };

/// Whether the kernels are compiled for it.
///
/// # Errors
/// The reason.
pub fn supported(shape: &NetworkShape) -> Result<(), String> {
    if ![4, 8, 16].contains(&shape.t) {
        return Err("compiled for 4, 8 and 16 time steps".to_owned());
    }
    if !shape.sizes.width.is_multiple_of(DEPTH) {
        return Err(format!("a width in multiples of {DEPTH}"));
    }
    Ok(())
}

fn scratch(shape: &NetworkShape, network: &Network) -> Vec<Region> {
    let rows = shape.b * network.stem.window.output.pixels();
    let filters = network.stem.window.output.channels;
    let mut scratch = vec![
        ("operand".to_owned(), rows * stem_columns(network) * Dtype::Bf16.bytes()),
        ("currents".to_owned(), rows * filters * Dtype::F32.bytes()),
    ];
    scratch.extend(spikes(shape, network));
    scratch
}

/// Parameters, images, activations, the library's workspace and the output.
pub fn device_bytes(shape: &NetworkShape) -> u64 {
    let network = shape.sizes.network();
    total(shape, [regions(&network), scratch(shape, &network)].concat())
}

/// Writes the launches.
///
/// # Errors
/// When a kernel does not compile, the library declines, or device memory is short.
pub fn sequence(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<Sequence, BackendError> {
    let network = shape.sizes.network();
    let mut contents = packed(shape, &network, inputs);
    contents.push(("images".to_owned(), inputs.tensor("images").as_bytes().to_vec()));
    let memory = Memory::new(device, scratch(shape, &network), contents)?;
    let mut sequence = Sequence::new(device, memory)?;
    sequence.begin("Main_Inference_Timing_Run");
    sequence.begin("Model_Forward_Pass");
    sequence.begin("Model_Compute_All_Layers");
    sequence.begin("Conv1_Block");
    stem(&mut sequence, shape, &network)?;
    sequence.end();
    for (number, block) in network.blocks.iter().enumerate() {
        let in_stage = number % shape.sizes.blocks;
        if in_stage == 0 {
            sequence.begin(STAGES[number / shape.sizes.blocks]);
        }
        let hidden = layer_name(2 * number + 1);
        let input = input_name(&network, number);
        launch(&mut sequence, shape, &block.first, &input, None, &hidden)?;
        let end = Some((block, input.as_str()));
        launch(&mut sequence, shape, &block.second, &hidden, end, &layer_name(2 * number + 2))?;
        if in_stage + 1 == shape.sizes.blocks {
            sequence.end();
        }
    }
    sequence.begin("Final_Layers");
    let steps = 0..shape.t;
    classify(&mut sequence, shape, &network, output.argument(), steps, shape.fed() as f32)?;
    (0..4).for_each(|_| sequence.end());
    Ok(sequence)
}

fn stem(
    sequence: &mut Sequence,
    shape: &NetworkShape,
    network: &Network,
) -> Result<(), BackendError> {
    let conv = &network.stem;
    let columns = stem_columns(network);
    gather_images(sequence, conv, shape.b, columns, "images")?;
    stem_gemm(sequence, conv, shape.b, columns, "currents")?;
    let map = conv.window.output;
    let neurons = shape.b * map.elements();
    let tile = |elements: usize| Tile {
        steps: shape.t,
        columns: 64,
        blocks: [elements.div_ceil(THREADS), 1, 1],
    };
    let memory = sequence.memory();
    let mut arguments =
        vec![memory.at("currents"), memory.at(&bias_name(conv)), memory.at(&layer_name(0))];
    arguments.push(Argument::I64(neurons as i64));
    arguments.extend(i32s(&[map.channels, shape.fed()]));
    arguments.push(Argument::F32(shape.steps() as f32));
    arguments.extend(neuron_arguments(shape));
    sequence.launch_early(&STEM, &tile(neurons), &arguments)?;
    let Some(pool) = &network.pool else { return Ok(()) };
    let outputs = shape.b * pool.output.elements();
    let memory = sequence.memory();
    let mut arguments = vec![memory.at(&layer_name(0)), memory.at("pooled")];
    arguments.extend([Argument::I64(outputs as i64), Argument::I64(neurons as i64)]);
    arguments.extend(i32s(&[pool.input.side, pool.input.channels, pool.output.side]));
    sequence.begin("MaxPool");
    sequence.launch_early(&POOL, &tile(outputs), &arguments)?;
    sequence.end();
    Ok(())
}

/// θ and Tmax.
fn neuron_arguments(shape: &NetworkShape) -> [Argument; 2] {
    let neuron = shape.neuron();
    [Argument::F32(neuron.threshold as f32), Argument::I32(neuron.tracer_max)]
}

/// A convolution with its neurons; at the end of a block, which reads `input`, with the residual.
fn launch(
    sequence: &mut Sequence,
    shape: &NetworkShape,
    conv: &Conv,
    from: &str,
    end: Option<(&Block, &str)>,
    to: &str,
) -> Result<(), BackendError> {
    const NULL: Argument = Argument::Address(0);
    let window = conv.window;
    let memory = sequence.memory();
    let taps = window.live_taps();
    // The kernel counts from tap 0: of those before the first live one nothing is read.
    let before = (taps.start * window.input.channels * Dtype::Bf16.bytes()) as u64;
    let weight = Argument::Address(memory.address(&weight_name(conv)) - before);
    let mut arguments = vec![memory.at(from), weight];
    arguments.extend(i32s(&[
        live_columns(conv),
        window.input.side,
        window.input.channels,
        window.kernel,
        window.stride,
    ]));
    let shortcut = end.and_then(|(block, input)| Some((block.shortcut.as_ref()?, input)));
    match shortcut {
        Some((conv, input)) => {
            let Conv { window, .. } = conv;
            arguments.extend([memory.at(input), memory.at(&weight_name(conv))]);
            arguments.extend(i32s(&[window.input.side, window.input.channels, window.stride]));
        }
        None => {
            arguments.extend([NULL, NULL]);
            arguments.extend(i32s(&[0, 0, 0]));
        }
    }
    let identity = end.filter(|(block, _)| block.shortcut.is_none());
    arguments.push(identity.map_or(NULL, |(_, input)| memory.at(input)));
    arguments.push(memory.at(&bias_name(conv)));
    arguments.push(shortcut.map_or(NULL, |(conv, _)| memory.at(&bias_name(conv))));
    arguments.push(memory.at(to));
    arguments.extend(i32s(&[shape.b, window.output.side, window.output.channels, shape.fed()]));
    arguments.extend(neuron_arguments(shape));

    let pixels = window.output.pixels() * shape.b.div_ceil(ROWS / shape.t);
    let filters = window.output.channels;
    let columns = if pixels * filters / 64 < ENOUGH_BLOCKS { 32 } else { 64 };
    let tile = Tile { steps: shape.t, columns, blocks: [pixels, filters / columns, 1] };
    sequence.launch_early(&BLOCK, &tile, &arguments)
}
