//! A training step, a launch an operation: weights rounded to bf16, the forward pass of `per_op`
//! with its currents kept, neurons backward by the replay of `st_bif/backward`, gradients of
//! weights and inputs by the library's GEMMs, SGD a parameter at a time.

use std::sync::Arc;

use super::per_op::{
    SOURCES, STAGES, Saved, Writer, gather_images, i32s, input_name, layer_name, scratch, total,
    window_arguments,
};
use super::sequence::{Memory, Region, Sequence, SequenceWriter};
use super::weights::{bias_name, columns, live_columns, regions, stem_columns, weight_name};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::{LEARNING_RATE, MOMENTUM, NetworkShape};
use crate::resnet18::network::{Block, CLASSES, Conv, Network};
use crate::st_bif::Neurons;
use crate::st_bif::cuda::replay_kernel;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};
use kernelgate_cuda::{Argument, Device, KernelSpec};

/// Threads a block.
const THREADS: usize = 256;
/// Rows and columns of a tile.
const TILE: usize = 32;
/// Parts that sums over rows are computed in.
const SPLITS: usize = 64;

/// The kernels: an element a thread, of so many elements, unless it says otherwise.
pub const KERNELS: &[KernelSpec<usize>] =
    &[PACK, SHARE, LOSS, FEATURES, CLASSIFIER, LAST, ROUND, SUM_ROWS, SCATTER, SCALE, POOL, SGD];

const PACK: KernelSpec<usize> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS)],
    variants: || vec![1],
    ..KernelSpec::new(
        kernel_file("resnet18/train", include_str!("../../../kernels/resnet18/train.cu")),
        "resnet18_train_pack",
        THREADS,
        |elements| [elements.div_ceil(THREADS), 1, 1],
    )
};
const SHARE: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_share", ..PACK };
const FEATURES: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_features", ..PACK };
/// Also of `fused_train`.
pub const CLASSIFIER: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_classifier", ..PACK };
const LAST: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_last", ..PACK };
const SCATTER: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_scatter", ..PACK };
const SCALE: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_scale", ..PACK };
const POOL: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_pool", ..PACK };
const SGD: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_sgd", ..PACK };
/// So many blocks. Also of `fused_train`.
pub const LOSS: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_train_loss", blocks: |blocks| [*blocks, 1, 1], ..PACK };
const ROUND: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_round", ..LOSS };
const SUM_ROWS: KernelSpec<usize> = KernelSpec { symbol: "resnet18_train_sum_rows", ..LOSS };

/// Whether the gradients' GEMMs can be computed: frames are their inner extent, in rows of whole 16
/// bytes.
///
/// # Errors
/// The reason.
pub fn supported(shape: &NetworkShape) -> Result<(), String> {
    if shape.frames().is_multiple_of(8) {
        Ok(())
    } else {
        Err("images times steps in multiples of 8".to_owned())
    }
}

/// Inputs, as they lie, and everything else but outputs.
fn all_regions(shape: &NetworkShape, network: &Network) -> Vec<Region> {
    let frames = shape.frames();
    let f32s = |name: &str, count: usize| (name.to_owned(), count * Dtype::F32.bytes());
    let maps = network.neurons();
    let largest = maps.iter().map(|map| map.elements()).max().unwrap_or(0);
    let convs = network.convolutions().skip(1);
    let rows = convs.map(|c| frames * c.window.output.pixels() * live_columns(c)).max();
    let weights =
        network.convolutions().map(|conv| conv.window.output.channels * columns(network, conv));
    let features = network.last().channels;
    let mut all = [regions(network), scratch(shape, network, Saved::Currents)].concat();
    all.extend([
        f32s("spike_gradient", frames * largest),
        f32s("other_spike_gradient", frames * largest),
        f32s("current_gradient", frames * largest),
        ("rounded".to_owned(), frames * largest * Dtype::Bf16.bytes()),
        ("transposed".to_owned(), frames * largest * Dtype::Bf16.bytes()),
        f32s("gathered_gradient", rows.unwrap_or(0)),
        f32s("weight_gradient", weights.max().unwrap_or(0).max(CLASSES * features)),
        f32s("bias_sums", SPLITS * features),
        f32s("bias_gradient", features.max(CLASSES)),
        f32s("logits_gradient", shape.b * CLASSES),
        f32s("features", shape.b * features),
    ]);
    all
}

/// Inputs, activations and gradients, the library's workspace and the outputs.
pub fn device_bytes(shape: &NetworkShape) -> u64 {
    let network = shape.sizes.network();
    let parameters = 4 * network.parameters * Dtype::F32.bytes();
    total(shape, all_regions(shape, &network)) + (parameters + shape.b) as u64
}

/// What a training step is given, by name.
pub fn contents(inputs: &Tensors) -> Vec<(String, Vec<u8>)> {
    ["images", "labels", "parameters", "momentum"]
        .map(|name| (name.to_owned(), inputs.tensor(name).as_bytes().to_vec()))
        .to_vec()
}

/// Writes the launches; `outputs` are logits, loss, new parameters and new momentum.
///
/// # Errors
/// When a kernel does not compile, the library declines, or device memory is short.
pub fn sequence(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    outputs: &[Output],
) -> Result<Sequence, BackendError> {
    let network = shape.sizes.network();
    let memory = Memory::new(device, all_regions(shape, &network), contents(inputs))?;
    let sequence = Sequence::new(device, memory)?;
    let forward = Writer { shape, network: &network, saved: Saved::Currents, sequence };
    let mut writer = TrainWriter { forward, theta: shape.neuron().threshold as f32, outputs };
    writer.whole()?;
    Ok(writer.forward.sequence)
}

struct TrainWriter<'a> {
    forward: Writer<'a>,
    theta: f32,
    outputs: &'a [Output],
}

impl SequenceWriter for TrainWriter<'_> {
    fn sequence(&mut self) -> &mut Sequence {
        &mut self.forward.sequence
    }
}

impl<'a> TrainWriter<'a> {
    fn network(&self) -> &'a Network {
        self.forward.network
    }

    fn at(&self, name: &str) -> Argument {
        self.forward.sequence.memory().at(name)
    }

    /// An element of an f32 region.
    fn element(&self, name: &str, index: usize) -> Argument {
        self.forward.sequence.memory().behind(name, index * Dtype::F32.bytes())
    }

    fn launch(
        &mut self,
        kernel: &KernelSpec<usize>,
        items: usize,
        arguments: &[&[Argument]],
    ) -> Result<(), BackendError> {
        self.forward.sequence.launch(kernel, &items, &arguments.concat())
    }

    fn gemm(&mut self, spec: GemmSpec, [x, w, y]: [&str; 3]) -> Result<(), BackendError> {
        let memory = self.forward.sequence.memory();
        let operands = [x, w, y].map(|name| memory.address(name));
        self.forward.sequence.gemm(spec, operands)
    }

    fn whole(&mut self) -> Result<(), BackendError> {
        self.ranged("Weight_Rounding", Self::pack)?;
        self.forward.whole(self.outputs[0].argument())?;
        self.ranged("Backward", Self::backward)
    }

    /// Inside the range of a convolution in that of its stage, beside those of what is done with its
    /// parameters.
    fn in_layer(
        &mut self,
        conv: &Conv,
        write: impl FnOnce(&mut Self) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let layer = |stage: &&&str| conv.name.starts_with(&stage.to_lowercase()[..6]);
        let stage = STAGES.iter().find(layer).expect("convolutions behind the stem have a stage");
        self.ranged(stage, |writer| writer.ranged(&conv.name, write))
    }

    fn backward(&mut self) -> Result<(), BackendError> {
        self.ranged("Final_Layers", Self::loss)?;
        (0..self.network().blocks.len()).try_rfold((), |(), number| self.block(number))?;
        self.stem()
    }

    /// What the forward pass reads of the parameters.
    fn pack(&mut self) -> Result<(), BackendError> {
        let network = self.network();
        let steps = self.forward.shape.steps() as f32;
        for conv in network.convolutions() {
            let columns = columns(network, conv);
            let first = conv.window.live_taps().start * conv.window.input.channels;
            let elements = conv.window.output.channels * columns;
            let pointers = [self.element("parameters", conv.weight), self.at(&weight_name(conv))];
            let count = [Argument::I64(elements as i64)];
            self.launch(
                &PACK,
                elements,
                &[&pointers, &count, &i32s(&[conv.depth(), first, columns])],
            )?;
            let divisor = if conv.weight == network.stem.weight { 1.0 } else { steps };
            let channels = conv.window.output.channels;
            self.share(conv.bias(), &bias_name(conv), channels, divisor)?;
        }
        let weights = CLASSES * network.last().channels;
        self.share(network.classifier, "fc.weight", weights, 1.0)?;
        self.share(network.classifier + weights, "fc.bias", CLASSES, steps)
    }

    fn share(
        &mut self,
        from: usize,
        to: &str,
        elements: usize,
        divisor: f32,
    ) -> Result<(), BackendError> {
        let pointers = [self.element("parameters", from), self.at(to)];
        let rest = [Argument::I64(elements as i64), Argument::F32(divisor)];
        self.launch(&SHARE, elements, &[&pointers, &rest])
    }

    /// The loss, the classifier's step, and the gradient of the last spikes.
    fn loss(&mut self) -> Result<(), BackendError> {
        let (shape, network) = (self.forward.shape, self.network());
        let map = network.last();
        let (b, channels, at) = (shape.b, map.channels, network.classifier);
        let gradient = self.at("logits_gradient");
        let logits = [self.outputs[0].argument(), self.at("labels"), self.outputs[1].argument()];
        self.launch(&LOSS, 1, &[&logits, &[gradient], &i32s(&[b, CLASSES])])?;

        let scale = self.theta / map.pixels() as f32;
        let elements = b * channels;
        let pointers = [
            self.at(&layer_name(2 * network.blocks.len())),
            self.at("features"),
            Argument::I64(elements as i64),
        ];
        let sizes = i32s(&[channels, map.pixels(), shape.t]);
        self.launch(&FEATURES, elements, &[&pointers, &sizes, &[Argument::F32(scale)]])?;

        let weights = CLASSES * channels;
        let pointers =
            [gradient, self.at("features"), self.at("weight_gradient"), self.at("bias_gradient")];
        let count = [Argument::I64(weights as i64)];
        self.launch(&CLASSIFIER, weights, &[&pointers, &count, &i32s(&[b, CLASSES, channels])])?;
        let share = shape.fed() as f32 / shape.steps() as f32;
        let behind = network.parameters - at - weights;
        self.sgd("weight_gradient", at, [1, weights, 0, weights], 1.0)?;
        self.sgd("bias_gradient", at + weights, [1, behind, 0, CLASSES], share)?;

        let elements = shape.frames() * map.elements();
        let pointers = [
            gradient,
            self.element("parameters", at),
            self.at("spike_gradient"),
            Argument::I64(elements as i64),
        ];
        let sizes = i32s(&[b, CLASSES, channels, map.pixels()]);
        self.launch(&LAST, elements, &[&pointers, &sizes, &[Argument::F32(scale)]])
    }

    /// From the gradient of a block's spikes to that of the spikes that it reads, both in
    /// `spike_gradient`.
    fn block(&mut self, number: usize) -> Result<(), BackendError> {
        let network = self.network();
        let block = &network.blocks[number];
        let input = input_name(network, number);
        let Block { first, second, .. } = block;
        self.in_layer(second, |writer| {
            writer.through(2 * number + 2, "spike_gradient")?;
            writer.round(second)
        })?;
        self.parameters_of(second, &layer_name(2 * number + 1))?;
        self.in_layer(second, |writer| {
            writer.input_gradient(second, "other_spike_gradient", false)
        })?;
        match &block.shortcut {
            Some(conv) => {
                self.parameters_of(conv, &input)?;
                self.in_layer(first, |writer| {
                    writer.input_gradient(conv, "spike_gradient", false)
                })?;
            }
            None => {
                let elements = self.forward.shape.frames() * block.second.window.output.elements();
                let pointers = [self.at("spike_gradient"), self.at("current_gradient")];
                let rest = [Argument::I64(elements as i64), Argument::F32(self.theta)];
                self.in_layer(first, |writer| {
                    writer.launch(&SCALE, elements, &[&pointers, &rest])
                })?;
            }
        }
        self.in_layer(first, |writer| {
            writer.through(2 * number + 1, "other_spike_gradient")?;
            writer.round(first)
        })?;
        self.parameters_of(first, &input)?;
        self.in_layer(first, |writer| writer.input_gradient(first, "spike_gradient", true))
    }

    /// The pooling's and the stem's.
    fn stem(&mut self) -> Result<(), BackendError> {
        let (shape, network) = (self.forward.shape, self.network());
        let stem = &network.stem;
        let mut from = "spike_gradient";
        self.forward.sequence.begin("Conv1_Block");
        if let Some(pool) = &network.pool {
            let elements = shape.b * pool.input.elements();
            let outputs = shape.b * pool.output.elements();
            let pointers = [self.at(from), self.at(SOURCES), self.at("other_spike_gradient")];
            let counts = [Argument::I64(elements as i64), Argument::I64(outputs as i64)];
            let sizes = i32s(&[pool.input.side, pool.input.channels, pool.output.side, shape.t]);
            self.launch(&POOL, elements, &[&pointers, &counts, &sizes])?;
            from = "other_spike_gradient";
        }
        self.through(0, from)?;
        self.round(stem)?;
        self.forward.sequence.end();
        self.ranged("Weight_Gradients", |writer| {
            let (columns, frames) = (stem_columns(network), shape.frames());
            gather_images(&mut writer.forward.sequence, stem, frames, columns, "frames")
        })?;
        self.weight_step(stem, 1.0 / shape.steps() as f32)
    }

    /// From the gradient of a layer's spikes to `current_gradient`.
    fn through(&mut self, layer: usize, spikes: &str) -> Result<(), BackendError> {
        let shape = self.forward.shape;
        let n = shape.b * self.network().neurons()[layer].elements();
        let neurons = Neurons { n, t: shape.t, dtype: Dtype::F32, parameters: shape.neuron() };
        let (kernel, last) = replay_kernel(&neurons);
        let currents = self.at(&Saved::Currents.currents(layer));
        let pointers =
            [currents, self.at(spikes), Argument::Address(0), self.at("current_gradient")];
        self.forward.sequence.launch(&kernel, &neurons, &[&pointers[..], &last].concat())
    }

    /// Rounds the gradient of a convolution's output, as it lies and transposed.
    fn round(&mut self, conv: &Conv) -> Result<(), BackendError> {
        let channels = conv.window.output.channels;
        let rows = self.forward.shape.frames() * conv.window.output.pixels();
        let blocks = rows.div_ceil(TILE) * channels.div_ceil(TILE);
        let pointers = [self.at("current_gradient"), self.at("rounded"), self.at("transposed")];
        let sizes = [Argument::I64(rows as i64), Argument::I32(channels as i32)];
        self.launch(&ROUND, blocks, &[&pointers, &sizes])
    }

    /// The step of a convolution of spikes, its output's gradient rounded.
    fn parameters_of(&mut self, conv: &Conv, input: &str) -> Result<(), BackendError> {
        self.ranged("Weight_Gradients", |writer| writer.forward.gather_spikes(conv, input))?;
        self.weight_step(conv, self.theta)
    }

    /// The step of a convolution whose operand is gathered: `factor` times it was convolved.
    fn weight_step(&mut self, conv: &Conv, factor: f32) -> Result<(), BackendError> {
        let (shape, network) = (self.forward.shape, self.network());
        let (filters, columns) = (conv.window.output.channels, columns(network, conv));
        let rows = shape.frames() * conv.window.output.pixels();
        self.ranged("Weight_Gradients", |writer| {
            let spec = GemmSpec::new(filters, columns, rows, MatrixDtype::Bf16, MatrixDtype::F32);
            writer.gemm(spec, ["transposed", "operand", "weight_gradient"])?;
            let tiles = filters.div_ceil(TILE);
            let fed = shape.fed() * shape.b * conv.window.output.pixels();
            for (from, to, rows, splits) in [
                ("current_gradient", "bias_sums", fed, SPLITS),
                ("bias_sums", "bias_gradient", SPLITS, 1),
            ] {
                let pointers = [writer.at(from), writer.at(to), Argument::I64(rows as i64)];
                let sizes = i32s(&[filters, splits]);
                writer.launch(&SUM_ROWS, tiles * splits, &[&pointers, &sizes])?;
            }
            Ok(())
        })?;
        let first = conv.window.live_taps().start * conv.window.input.channels;
        let share = 1.0 / shape.steps() as f32;
        self.ranged("Optimizer", |writer| {
            let sizes = [filters, conv.depth(), first, columns];
            writer.sgd("weight_gradient", conv.weight, sizes, factor)?;
            writer.sgd("bias_gradient", conv.bias(), [1, filters, 0, filters], share)
        })
    }

    /// The gradient of a convolution's input, in place of, or added to, what a region holds.
    fn input_gradient(&mut self, conv: &Conv, to: &str, add: bool) -> Result<(), BackendError> {
        let window = &conv.window;
        let (frames, columns) = (self.forward.shape.frames(), live_columns(conv));
        let (rows, depth) = (frames * window.output.pixels(), window.output.channels);
        let spec = GemmSpec::new(rows, columns, depth, MatrixDtype::Bf16, MatrixDtype::F32);
        self.gemm(spec, ["rounded", &weight_name(conv), "gathered_gradient"])?;
        let taps = window.live_taps();
        let elements = frames * window.input.elements();
        let pointers = [self.at("gathered_gradient"), self.at(to), Argument::I64(elements as i64)];
        let sizes = [window_arguments(window), i32s(&[taps.start, taps.len()])].concat();
        let last = [Argument::F32(self.theta), Argument::I32(i32::from(add))];
        self.launch(&SCATTER, elements, &[&pointers, &sizes, &last])
    }

    /// SGD of a parameter `[filters, depth]` of whose gradient so many columns are held, from one
    /// on.
    fn sgd(
        &mut self,
        gradient: &str,
        at: usize,
        [filters, depth, first, columns]: [usize; 4],
        factor: f32,
    ) -> Result<(), BackendError> {
        let elements = filters * depth;
        let bytes = (at * Dtype::F32.bytes()) as u64;
        let new =
            [2, 3].map(|output: usize| Argument::Address(self.outputs[output].address() + bytes));
        let old = [self.element("parameters", at), self.element("momentum", at), self.at(gradient)];
        let count = [Argument::I64(elements as i64)];
        let sizes = i32s(&[depth, first, columns, columns]);
        let factors = [factor, MOMENTUM, LEARNING_RATE].map(Argument::F32);
        self.launch(&SGD, elements, &[&old, &new, &count, &sizes, &factors])
    }
}
