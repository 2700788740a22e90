//! A training step, a kernel a layer: `fused`'s forward pass with its currents kept,
//! `kernels/resnet18/fused_backward.cu`, and what is done with all parameters at once, of
//! `kernels/resnet18/fused_step.cu`.

use std::sync::Arc;

use super::best;
use super::fused::{Forward, NULL, activations, currents_name, gradient_name, neuron_arguments};
use super::jobs::{Jobs, PACKETS};
use super::per_op::{SOURCES, STAGES, i32s, total};
use super::sequence::{Memory, Region, Sequence, SequenceWriter};
use super::tiles::{GROUP, Grid, SHARED_BYTES, THREADS, faster, tile_constants, tiled, wide};
use super::train::{CLASSIFIER, LOSS, contents};
use super::weights::{columns, live_columns, weight_name};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::{LEARNING_RATE, MOMENTUM, NetworkShape};
use crate::resnet18::network::{Block, CLASSES, Conv, Network};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Device, KernelSpec};

/// The kernels of the backward pass.
pub const KERNELS: &[KernelSpec<Grid>] = &[BLOCK, BLOCK_WIDE, STEM];
/// Those of all parameters, of so many blocks.
pub const STEP_KERNELS: &[KernelSpec<usize>] = &[PACK, WEIGHT_GRADIENTS, SGD];

const BLOCK: KernelSpec<Grid> = tiled(
    kernel_file(
        "resnet18/fused_backward",
        include_str!("../../../kernels/resnet18/fused_backward.cu"),
    ),
    "resnet18_fused_block_backward",
);
const BLOCK_WIDE: KernelSpec<Grid> = wide(BLOCK);
const STEM: KernelSpec<Grid> =
    KernelSpec { symbol: "resnet18_fused_stem_backward", shared_bytes: |_| 0, ..BLOCK };

const WEIGHT_GRADIENTS: KernelSpec<usize> = KernelSpec {
    constants: |_| [tile_constants(GROUP), vec![("PACKETS", PACKETS)]].concat(),
    shared_bytes: |_| SHARED_BYTES,
    variants: || vec![1],
    ..KernelSpec::new(
        kernel_file("resnet18/fused_step", include_str!("../../../kernels/resnet18/fused_step.cu")),
        "resnet18_fused_weight_gradients",
        GROUP,
        |blocks| [*blocks, 1, 1],
    )
};
const PACK: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_fused_pack", shared_bytes: |_| 0, ..WEIGHT_GRADIENTS };
const SGD: KernelSpec<usize> = KernelSpec { symbol: "resnet18_fused_sgd", ..PACK };

/// Everything but inputs and outputs.
fn all_regions(shape: &NetworkShape, network: &Network, together: bool) -> Vec<Region> {
    let bf16s = |name: String, count: usize| (name, count * Dtype::Bf16.bytes());
    let f32s = |name: &str, count: usize| (name.to_owned(), count * Dtype::F32.bytes());
    let mut all = match together {
        true => best::written(shape, network, true, true),
        false => activations(shape, network, true),
    };
    for conv in network.convolutions() {
        let filters = conv.window.output.channels;
        all.push(bf16s(weight_name(conv), filters * columns(network, conv)));
    }
    for (layer, map) in network.neurons().iter().enumerate() {
        let frames = if layer == 0 { shape.b } else { shape.frames() };
        all.push(bf16s(gradient_name(layer), frames * map.elements()));
    }
    let features = network.last().channels;
    let first = network.pool.as_ref().unwrap_or(&network.stem.window).output;
    all.extend([
        f32s("spikes_gradient", shape.frames() * first.elements()),
        f32s("logits_gradient", shape.b * CLASSES),
        f32s("features", shape.b * features),
        f32s("fc.weight_gradient", CLASSES * features),
        f32s("fc.bias_gradient", CLASSES),
    ]);
    all.extend(Jobs::parts(shape, network));
    if together {
        all.extend(best::tiles(network));
    }
    all
}

/// Inputs, activations and gradients, the library's workspace and the outputs; forward with the
/// layers together, or one by one.
pub fn device_bytes(shape: &NetworkShape, together: bool) -> u64 {
    let network = shape.sizes.network();
    let mut lists = Jobs::new(shape, &network, |_| None).contents();
    if together {
        lists.extend(best::contents(shape, &network, true, |_| None));
    }
    let lists = lists.into_iter().map(|(name, bytes)| (name, bytes.len())).collect();
    let parameters = 4 * network.parameters * Dtype::F32.bytes();
    let regions = [all_regions(shape, &network, together), lists].concat();
    total(shape, regions) + (parameters + shape.b) as u64
}

/// Writes the launches, with the forward pass's layers one by one; `outputs` are logits, loss, new
/// parameters and new momentum.
///
/// # Errors
/// When a kernel does not compile, the library declines, or device memory is short.
pub fn sequence(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    outputs: &[Output],
) -> Result<Sequence, BackendError> {
    write(shape, inputs, device, outputs, false)
}

/// The same with those layers together.
///
/// # Errors
/// As there; when the device does not hold their blocks at once.
pub fn sequence_together(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    outputs: &[Output],
) -> Result<Sequence, BackendError> {
    write(shape, inputs, device, outputs, true)
}

fn write(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    outputs: &[Output],
    together: bool,
) -> Result<Sequence, BackendError> {
    let network = shape.sizes.network();
    let regions = all_regions(shape, &network, together);
    let mut memory = Memory::new(device, regions, contents(inputs))?;
    let jobs = Jobs::new(shape, &network, |name| memory.find(name));
    memory.upload(device, jobs.contents())?;
    if together {
        best::upload(shape, &network, true, device, &mut memory)?;
    }
    let sequence = Sequence::new(device, memory)?;
    let together = together.then_some(&best::TOGETHER);
    let forward = Forward { shape, network: &network, training: true, together, sequence };
    let mut writer = Writer { forward, outputs, jobs };
    writer.whole()?;
    Ok(writer.forward.sequence)
}

struct Writer<'a> {
    forward: Forward<'a>,
    outputs: &'a [Output],
    jobs: Jobs,
}

impl SequenceWriter for Writer<'_> {
    fn sequence(&mut self) -> &mut Sequence {
        &mut self.forward.sequence
    }
}

impl Writer<'_> {
    fn at(&self, name: &str) -> Argument {
        self.forward.at(name)
    }

    fn whole(&mut self) -> Result<(), BackendError> {
        let [logits, _, parameters, momentum] =
            [0, 1, 2, 3].map(|i: usize| self.outputs[i].argument());
        self.ranged("Weight_Rounding", |writer| writer.all(&PACK, "pack", &[]))?;
        self.forward.whole(logits)?;
        self.ranged("Backward", Self::backward)?;
        self.ranged("Optimizer", |writer| {
            let before = [writer.at("parameters"), writer.at("momentum")];
            let factors = [MOMENTUM, LEARNING_RATE].map(Argument::F32);
            let rest = [&before[..], &[parameters, momentum], &factors].concat();
            writer.all(&SGD, "sgd", &rest)
        })
    }

    /// A kernel over all parameters, by its list.
    fn all(
        &mut self,
        kernel: &KernelSpec<usize>,
        list: &str,
        rest: &[Argument],
    ) -> Result<(), BackendError> {
        let [jobs, owners] = Jobs::regions(list).map(|name| self.at(&name));
        let arguments = [&[jobs, owners], rest].concat();
        self.forward.sequence.launch_early(kernel, &self.jobs.blocks(list), &arguments)
    }

    fn backward(&mut self) -> Result<(), BackendError> {
        self.ranged("Final_Layers", Self::classifier)?;
        let network = self.forward.network;
        let in_stage = self.forward.shape.sizes.blocks;
        for (stage, blocks) in network.blocks.chunks(in_stage).enumerate().rev() {
            self.ranged(STAGES[stage], |writer| {
                let numbered = blocks.iter().enumerate().rev();
                numbered.map(|(i, block)| (stage * in_stage + i, block)).try_for_each(
                    |(number, block)| {
                        let (hidden, output) = (2 * number + 1, 2 * number + 2);
                        writer.layer(&block.second, output, None, hidden)?;
                        writer.layer(&block.first, hidden, Some((block, output)), 2 * number)
                    },
                )
            })?;
        }
        self.ranged("Conv1_Block", Self::stem)?;
        self.ranged("Weight_Gradients", |writer| writer.all(&WEIGHT_GRADIENTS, "gradients", &[]))
    }

    /// The loss and the classifier's gradients; that of the last currents is the tail's.
    fn classifier(&mut self) -> Result<(), BackendError> {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let (b, channels) = (shape.b, network.last().channels);
        let gradient = self.at("logits_gradient");
        let mut arguments = vec![self.outputs[0].argument(), self.at("labels")];
        arguments.extend([self.outputs[1].argument(), gradient]);
        arguments.extend(i32s(&[b, CLASSES]));
        self.forward.sequence.launch(&LOSS, &1, &arguments)?;
        let weights = CLASSES * channels;
        let mut arguments = vec![gradient, self.at("features")];
        arguments.extend(["fc.weight_gradient", "fc.bias_gradient"].map(|name| self.at(name)));
        arguments.push(Argument::I64(weights as i64));
        arguments.extend(i32s(&[b, CLASSES, channels]));
        self.forward.sequence.launch(&CLASSIFIER, &weights, &arguments)
    }

    /// From the gradient of a convolution's currents to that of the currents of the layer whose
    /// spikes it read; at the beginning of a block with what its end, layer `.1`, gives the input.
    fn layer(
        &mut self,
        conv: &Conv,
        from: usize,
        begin: Option<(&Block, usize)>,
        to: usize,
    ) -> Result<(), BackendError> {
        let (shape, window) = (self.forward.shape, conv.window);
        let mut arguments = vec![self.at(&gradient_name(from)), self.forward.weight(conv)];
        arguments.extend(i32s(&[
            live_columns(conv),
            window.output.side,
            window.output.channels,
            window.kernel,
            window.stride,
        ]));
        let end = begin.map(|(_, layer)| self.at(&gradient_name(layer)));
        let shortcut = begin.and_then(|(block, _)| block.shortcut.as_ref());
        match (shortcut, end) {
            (Some(conv), Some(end)) => {
                let Conv { window, .. } = conv;
                arguments.extend([end, self.forward.weight(conv)]);
                arguments.extend(i32s(&[
                    live_columns(conv),
                    window.output.side,
                    window.output.channels,
                    window.stride,
                ]));
                arguments.push(NULL);
            }
            (_, end) => {
                arguments.extend([NULL, NULL]);
                arguments.extend(i32s(&[0, 0, 0, 0]));
                arguments.push(end.unwrap_or(NULL));
            }
        }
        if to == 0 {
            arguments.extend([NULL, NULL, self.at("spikes_gradient")]);
        } else {
            arguments.extend([self.at(&currents_name(to)), self.at(&gradient_name(to)), NULL]);
        }
        arguments.extend(i32s(&[shape.b, window.input.side, window.input.channels]));
        arguments.extend(neuron_arguments(shape));
        let grid = self.forward.tiles(window.input.pixels(), window.input.channels);
        self.ranged(&conv.name, |writer| {
            let sequence = &mut writer.forward.sequence;
            let kernel = faster(sequence.device(), &grid, [&BLOCK, &BLOCK_WIDE])?;
            sequence.launch_early(kernel, &grid, &arguments)
        })
    }

    /// The pooling's and the stem's neurons.
    fn stem(&mut self) -> Result<(), BackendError> {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let map = network.stem.window.output;
        let neurons = shape.b * map.elements();
        let (sources, pooled) = match &network.pool {
            Some(pool) => (self.at(SOURCES), pool.output),
            None => (NULL, map),
        };
        let mut arguments = vec![self.at(&currents_name(0)), self.forward.bias(&network.stem)];
        arguments.extend([self.at("spikes_gradient"), sources, self.at(&gradient_name(0))]);
        let counts = [neurons, shape.b * pooled.elements()];
        arguments.extend(counts.map(|count| Argument::I64(count as i64)));
        arguments.extend(i32s(&[map.side, map.channels, pooled.side, shape.fed()]));
        arguments.push(Argument::F32(shape.steps() as f32));
        arguments.extend(neuron_arguments(shape));
        let grid = Grid { steps: shape.t, blocks: [neurons.div_ceil(THREADS), 1] };
        self.forward.sequence.launch_early(&STEM, &grid, &arguments)
    }
}
