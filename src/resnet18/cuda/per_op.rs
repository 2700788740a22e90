//! A launch an operation, and for neurons and pooling a launch an operation and time step: gathered
//! operands, the library's GEMMs, the neurons of `st_bif/forward` one step at a time.

use std::sync::Arc;

use super::sequence::{Memory, Region, Sequence, SequenceWriter};
use super::weights::{bias_name, live_columns, packed, regions, stem_columns, weight_name};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{Block, CLASSES, Conv, Map, Network, Window};
use crate::st_bif::Neurons;
use crate::st_bif::cuda::{PER_STEP, parameters};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype, WORKSPACE_BYTES};
use kernelgate_cuda::{Argument, Device, KernelSpec};

/// Threads a block.
const THREADS: usize = 256;
/// Columns of a thread that gathers.
const PACKET: usize = 8;

/// Named ranges of the stages.
pub const STAGES: [&str; 4] =
    ["Layer1_ResBlocks", "Layer2_ResBlocks", "Layer3_ResBlocks", "Layer4_ResBlocks"];

/// The kernels: an element a thread, of so many elements.
pub const KERNELS: &[KernelSpec<usize>] =
    &[ENCODE, GATHER, GATHER_SPIKES, BIAS, ADD, ADD_SPIKES, POOL, CLASSIFY];

const ENCODE: KernelSpec<usize> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS)],
    variants: || vec![1],
    ..KernelSpec::new(
        kernel_file("resnet18/per_op", include_str!("../../../kernels/resnet18/per_op.cu")),
        "resnet18_per_op_encode",
        THREADS,
        |elements| [elements.div_ceil(THREADS), 1, 1],
    )
};
/// Also of `fused`, for the images.
pub const GATHER: KernelSpec<usize> = KernelSpec { symbol: "resnet18_per_op_gather", ..ENCODE };
const GATHER_SPIKES: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_gather_spikes", ..ENCODE };
const BIAS: KernelSpec<usize> = KernelSpec { symbol: "resnet18_per_op_bias", ..ENCODE };
const ADD: KernelSpec<usize> = KernelSpec { symbol: "resnet18_per_op_add", ..ENCODE };
const ADD_SPIKES: KernelSpec<usize> = KernelSpec { symbol: "resnet18_per_op_add_spikes", ..ENCODE };
const POOL: KernelSpec<usize> = KernelSpec { symbol: "resnet18_per_op_pool", ..ENCODE };
/// An image and class a block. Also of `fused`.
pub const CLASSIFY: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_classify", blocks: |blocks| [*blocks, 1, 1], ..ENCODE };

/// What a forward pass leaves for a backward one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// Nothing: one region of currents serves all layers.
    Nothing,
    /// The currents of every layer, and what the pooling read.
    Currents,
}

/// Region of the taps that the pooling read, a byte each.
pub const SOURCES: &str = "pooled_sources";

impl Saved {
    /// Region of a layer's currents, f32.
    pub fn currents(self, layer: usize) -> String {
        match self {
            Self::Nothing => "currents".to_owned(),
            Self::Currents => format!("currents{layer}"),
        }
    }
}

/// Everything but parameters, images and output.
pub fn scratch(shape: &NetworkShape, network: &Network, saved: Saved) -> Vec<Region> {
    let frames = shape.frames();
    let maps = network.neurons();
    let largest = maps.iter().map(|map| map.elements()).max().unwrap_or(0);
    let rows = |conv: &Conv| frames * conv.window.output.pixels();
    let hidden = network.convolutions().skip(1);
    let operand = hidden
        .map(|conv| rows(conv) * live_columns(conv))
        .chain([rows(&network.stem) * stem_columns(network)])
        .max()
        .unwrap_or(0);
    let mut scratch = vec![
        ("frames".to_owned(), frames * shape.sizes.image().elements() * Dtype::F32.bytes()),
        ("operand".to_owned(), operand * Dtype::Bf16.bytes()),
        ("shortcut".to_owned(), frames * largest * Dtype::F32.bytes()),
        ("membranes".to_owned(), shape.b * largest * Dtype::F32.bytes()),
        ("tracers".to_owned(), shape.b * largest * 4),
    ];
    scratch.extend(spikes(shape, network));
    match saved {
        Saved::Nothing => {
            scratch.push(("currents".to_owned(), frames * largest * Dtype::F32.bytes()));
        }
        Saved::Currents => {
            for (layer, map) in maps.iter().enumerate() {
                let bytes = frames * map.elements() * Dtype::F32.bytes();
                scratch.push((saved.currents(layer), bytes));
            }
            let sources = network.pool.map(|pool| frames * pool.output.elements());
            scratch.extend(sources.map(|bytes| (SOURCES.to_owned(), bytes)));
        }
    }
    if let Some(pool) = &network.pool {
        scratch.push(("pooled_before".to_owned(), shape.b * pool.output.elements() * 4));
    }
    scratch
}

/// Spikes of every layer, a byte each, and those behind the pooling.
pub fn spikes(shape: &NetworkShape, network: &Network) -> Vec<Region> {
    let layers = network.neurons().into_iter().enumerate();
    let mut regions: Vec<Region> =
        layers.map(|(layer, map)| (layer_name(layer), shape.frames() * map.elements())).collect();
    if let Some(pool) = &network.pool {
        regions.push(("pooled".to_owned(), shape.frames() * pool.output.elements()));
    }
    regions
}

/// Region of a layer's spikes.
pub fn layer_name(layer: usize) -> String {
    format!("spikes{layer}")
}

/// Region of the spikes that a block reads.
pub fn input_name(network: &Network, block: usize) -> String {
    if block == 0 && network.pool.is_some() { "pooled".to_owned() } else { layer_name(2 * block) }
}

/// Parameters, images, activations, the library's workspace and the output.
pub fn device_bytes(shape: &NetworkShape) -> u64 {
    let network = shape.sizes.network();
    total(shape, [regions(&network), scratch(shape, &network, Saved::Nothing)].concat())
}

/// Bytes of those regions, of images and output, and of the library's workspace.
pub fn total(shape: &NetworkShape, regions: Vec<Region>) -> u64 {
    let images = shape.b * shape.sizes.image().elements() * Dtype::F32.bytes();
    let logits = shape.b * CLASSES * Dtype::F32.bytes();
    let regions: usize = regions.iter().map(|(_, bytes)| bytes).sum();
    (regions + images + logits + WORKSPACE_BYTES) as u64
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
    let memory = Memory::new(device, scratch(shape, &network, Saved::Nothing), contents)?;
    let sequence = Sequence::new(device, memory)?;
    let mut writer = Writer { shape, network: &network, saved: Saved::Nothing, sequence };
    writer.whole(output.argument())?;
    Ok(writer.sequence)
}

/// Writes the forward pass.
pub struct Writer<'a> {
    /// Sizes of the problem.
    pub shape: &'a NetworkShape,
    /// Its layers.
    pub network: &'a Network,
    /// What is left for the backward pass.
    pub saved: Saved,
    /// What is written.
    pub sequence: Sequence,
}

impl SequenceWriter for Writer<'_> {
    fn sequence(&mut self) -> &mut Sequence {
        &mut self.sequence
    }
}

impl Writer<'_> {
    /// Images to logits.
    ///
    /// # Errors
    /// When a kernel does not compile, or the library declines.
    pub fn whole(&mut self, logits: Argument) -> Result<(), BackendError> {
        self.sequence.begin("Main_Inference_Timing_Run");
        self.ranged("Time_Encoding", Self::encode)?;
        self.ranged("Input_Reshaping", Self::gather)?;
        self.sequence.begin("Model_Forward_Pass");
        self.sequence.begin("Model_Compute_All_Layers");
        self.ranged("Conv1_Block", Self::stem)?;
        for (stage, name) in STAGES.into_iter().enumerate() {
            self.ranged(name, |writer| {
                let blocks = writer.shape.sizes.blocks;
                (stage * blocks..(stage + 1) * blocks).try_for_each(|block| writer.block(block))
            })?;
        }
        self.ranged("Final_Layers", |writer| writer.classify(logits))?;
        (0..3).for_each(|_| self.sequence.end());
        Ok(())
    }

    /// The image in every step that is fed, zeros in the others. It is divided by the steps behind
    /// the convolution: bf16 does not hold a third of it.
    fn encode(&mut self) -> Result<(), BackendError> {
        let elements = self.shape.b * self.shape.sizes.image().elements();
        for t in 0..self.shape.t {
            let memory = self.sequence.memory();
            let arguments = [
                memory.at("images"),
                memory.behind("frames", t * elements * Dtype::F32.bytes()),
                Argument::I64(elements as i64),
                Argument::I32(i32::from(t < self.shape.fed())),
            ];
            self.sequence.launch(&ENCODE, &elements, &arguments)?;
        }
        Ok(())
    }

    /// The stem's operand.
    fn gather(&mut self) -> Result<(), BackendError> {
        let (stem, frames) = (&self.network.stem, self.shape.frames());
        gather_images(&mut self.sequence, stem, frames, stem_columns(self.network), "frames")
    }

    fn stem(&mut self) -> Result<(), BackendError> {
        let stem = &self.network.stem;
        let currents = self.saved.currents(0);
        stem_gemm(
            &mut self.sequence,
            stem,
            self.shape.frames(),
            stem_columns(self.network),
            &currents,
        )?;
        self.bias(stem, &currents, 1.0, self.shape.steps() as f32)?;
        self.neurons(0, self.network.pool.as_ref())
    }

    /// The operand of a convolution of spikes.
    ///
    /// # Errors
    /// When the kernel does not compile.
    pub fn gather_spikes(&mut self, conv: &Conv, input: &str) -> Result<(), BackendError> {
        let taps = conv.window.live_taps();
        let rows = self.shape.frames() * conv.window.output.pixels();
        let packets = rows * live_columns(conv) / PACKET;
        let memory = self.sequence.memory();
        let mut arguments = vec![memory.at(input), memory.at("operand")];
        arguments.push(Argument::I64(packets as i64));
        arguments.extend(window_arguments(&conv.window));
        arguments.extend(i32s(&[taps.start, taps.len()]));
        self.sequence.launch(&GATHER_SPIKES, &packets, &arguments)
    }

    /// A convolution of spikes into `to`, with its bias.
    fn convolve(&mut self, conv: &Conv, input: &str, to: &str) -> Result<(), BackendError> {
        let window = &conv.window;
        let rows = self.shape.frames() * window.output.pixels();
        let columns = live_columns(conv);
        self.gather_spikes(conv, input)?;
        let memory = self.sequence.memory();
        let operand = memory.address("operand");
        let weight = memory.address(&weight_name(conv));
        let currents = memory.address(to);
        let filters = window.output.channels;
        let spec = GemmSpec {
            b_transposed: true,
            ..GemmSpec::new(rows, filters, columns, MatrixDtype::Bf16, MatrixDtype::F32)
        };
        self.sequence.gemm(spec, [operand, weight, currents])?;
        self.bias(conv, to, self.shape.neuron().threshold as f32, 1.0)
    }

    fn bias(
        &mut self,
        conv: &Conv,
        to: &str,
        factor: f32,
        divisor: f32,
    ) -> Result<(), BackendError> {
        let size = self.shape.b * conv.window.output.elements();
        let elements = self.shape.t * size;
        let memory = self.sequence.memory();
        let arguments = [
            memory.at(to),
            memory.at(&bias_name(conv)),
            Argument::I64(elements as i64),
            Argument::I64((self.shape.fed() * size) as i64),
            Argument::I32(conv.window.output.channels as i32),
            Argument::F32(factor),
            Argument::F32(divisor),
        ];
        self.sequence.launch(&BIAS, &elements, &arguments)
    }

    /// A layer of neurons, a launch a step; behind each one that of the pooling, if there is one.
    fn neurons(&mut self, layer: usize, pool: Option<&Window>) -> Result<(), BackendError> {
        let map: Map = self.network.neurons()[layer];
        let n = self.shape.b * map.elements();
        let neurons =
            Neurons { n, t: self.shape.t, dtype: Dtype::F32, parameters: self.shape.neuron() };
        for t in 0..self.shape.t {
            let memory = self.sequence.memory();
            let pointers = [
                memory.at(&self.saved.currents(layer)),
                memory.at(&layer_name(layer)),
                memory.at("membranes"),
                memory.at("tracers"),
            ];
            let sizes = [Argument::I64(n as i64), Argument::I64(t as i64)];
            let arguments = [&pointers[..], &sizes, &parameters(&neurons)].concat();
            self.sequence.launch(&PER_STEP, &neurons, &arguments)?;
            if let Some(pool) = pool {
                // Beside the range of the stem and not inside it.
                self.sequence.end();
                self.ranged("MaxPool", |writer| writer.pool(pool, t))?;
                self.sequence.begin("Conv1_Block");
            }
        }
        Ok(())
    }

    fn pool(&mut self, pool: &Window, t: usize) -> Result<(), BackendError> {
        let elements = self.shape.b * pool.output.elements();
        let memory = self.sequence.memory();
        let mut arguments = vec![
            memory.at("tracers"),
            memory.at("pooled_before"),
            memory.behind("pooled", t * elements),
            match self.saved {
                Saved::Nothing => Argument::Address(0),
                Saved::Currents => memory.behind(SOURCES, t * elements),
            },
        ];
        arguments.push(Argument::I64(elements as i64));
        arguments.extend(i32s(&[pool.input.side, pool.input.channels, pool.output.side, t]));
        self.sequence.launch(&POOL, &elements, &arguments)
    }

    fn block(&mut self, number: usize) -> Result<(), BackendError> {
        let network = self.network;
        let Block { first, second, shortcut } = &network.blocks[number];
        let input = input_name(network, number);
        let hidden = self.saved.currents(2 * number + 1);
        let currents = self.saved.currents(2 * number + 2);
        self.ranged(&first.name, |writer| {
            writer.convolve(first, &input, &hidden)?;
            writer.neurons(2 * number + 1, None)
        })?;
        self.sequence.begin(second.name.as_str());
        self.convolve(second, &layer_name(2 * number + 1), &currents)?;
        let elements = self.shape.frames() * second.window.output.elements();
        let count = Argument::I64(elements as i64);
        match shortcut {
            Some(conv) => {
                self.convolve(conv, &input, "shortcut")?;
                let memory = self.sequence.memory();
                let arguments = [memory.at(&currents), memory.at("shortcut"), count];
                self.sequence.launch(&ADD, &elements, &arguments)?;
            }
            None => {
                let memory = self.sequence.memory();
                let theta = Argument::F32(self.shape.neuron().threshold as f32);
                let arguments = [memory.at(&currents), memory.at(&input), count, theta];
                self.sequence.launch(&ADD_SPIKES, &elements, &arguments)?;
            }
        }
        self.neurons(2 * number + 2, None)?;
        self.sequence.end();
        Ok(())
    }

    /// Logits of each step, added up.
    fn classify(&mut self, logits: Argument) -> Result<(), BackendError> {
        for t in 0..self.shape.t {
            let fed = if t < self.shape.fed() { 1.0 } else { 0.0 };
            classify(&mut self.sequence, self.shape, self.network, logits, t..t + 1, fed)?;
        }
        Ok(())
    }
}

/// The stem's operand: what its filters read of so many frames of images, each tap.
///
/// # Errors
/// When the kernel does not compile.
pub fn gather_images(
    sequence: &mut Sequence,
    stem: &Conv,
    frames: usize,
    columns: usize,
    from: &str,
) -> Result<(), BackendError> {
    let packets = frames * stem.window.output.pixels() * columns / PACKET;
    let memory = sequence.memory();
    let mut arguments = vec![memory.at(from), memory.at("operand"), Argument::I64(packets as i64)];
    arguments.extend(window_arguments(&stem.window));
    arguments.extend(i32s(&[columns]));
    sequence.launch(&GATHER, &packets, &arguments)
}

/// The stem's GEMM.
///
/// # Errors
/// When the library declines.
pub fn stem_gemm(
    sequence: &mut Sequence,
    stem: &Conv,
    frames: usize,
    columns: usize,
    to: &str,
) -> Result<(), BackendError> {
    let rows = frames * stem.window.output.pixels();
    let filters = stem.window.output.channels;
    let spec = GemmSpec {
        b_transposed: true,
        ..GemmSpec::new(rows, filters, columns, MatrixDtype::Bf16, MatrixDtype::F32)
    };
    let memory = sequence.memory();
    let operands =
        [memory.address("operand"), memory.address(&weight_name(stem)), memory.address(to)];
    sequence.gemm(spec, operands)
}

/// Logits of these steps, of which so many are fed; those from a later one than the first are
/// added.
///
/// # Errors
/// When the kernel does not compile.
pub fn classify(
    sequence: &mut Sequence,
    shape: &NetworkShape,
    network: &Network,
    logits: Argument,
    steps: std::ops::Range<usize>,
    fed: f32,
) -> Result<(), BackendError> {
    let map = network.last();
    let blocks = shape.b * CLASSES;
    let scale = (shape.neuron().threshold / map.pixels() as f64) as f32;
    let memory = sequence.memory();
    let last = layer_name(2 * network.blocks.len());
    let spikes = memory.behind(&last, steps.start * shape.b * map.elements());
    let mut arguments = vec![spikes, memory.at("fc.weight"), memory.at("fc.bias"), logits];
    arguments.extend(i32s(&[shape.b, CLASSES, map.pixels(), map.channels, steps.len()]));
    arguments.extend([Argument::F32(scale), Argument::F32(fed)]);
    arguments.extend(i32s(&[usize::from(steps.start > 0)]));
    sequence.launch(&CLASSIFY, &blocks, &arguments)
}

/// Side, channels, side of the output, kernel, stride.
pub fn window_arguments(window: &Window) -> Vec<Argument> {
    let Window { input, output, kernel, stride } = *window;
    i32s(&[input.side, input.channels, output.side, kernel, stride])
}

/// Sizes as `int`.
pub fn i32s(sizes: &[usize]) -> Vec<Argument> {
    sizes.iter().map(|&size| Argument::I32(size as i32)).collect()
}
