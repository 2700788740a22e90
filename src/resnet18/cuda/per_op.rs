//! A launch an operation, and for neurons and pooling a launch an operation and time step: gathered
//! operands, the library's GEMMs, the neurons of `st_bif/forward` one step at a time.

use super::weights::{bias_name, declare_packed, live_columns, stem_columns, weight_name};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{Block, CLASSES, Conv, Map, Network, Window};
use crate::st_bif::Neurons;
use crate::st_bif::cuda::{PER_STEP, parameters};
use kernelgate::backend::program::{
    Lane, MemoryUse, NULL, Operand, Pointer, Program, int, ints, long,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

/// Threads a block.
const THREADS: usize = 256;
/// Columns of a thread that gathers.
const PACKET: usize = 8;

/// Named ranges of the stages.
pub const STAGES: [&str; 4] =
    ["Layer1_ResBlocks", "Layer2_ResBlocks", "Layer3_ResBlocks", "Layer4_ResBlocks"];

/// Kernel rows; their parameter is the number of elements, one a thread.
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
/// `fused` has this kernel too, for the images.
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

/// Results of a forward pass that a backward pass reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// No results are kept: one region of currents serves all layers.
    Nothing,
    /// The currents of every layer, and the taps that the pooling read.
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

/// Declares everything but parameters, images and outputs.
pub fn scratch(program: &mut Program, shape: &NetworkShape, network: &Network, saved: Saved) {
    use MemoryUse::{Activations, Workspace};
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
    let images = frames * shape.sizes.image().elements();
    program.scratch("frames", Workspace, images * Dtype::F32.bytes());
    program.scratch("operand", Workspace, operand * Dtype::Bf16.bytes());
    program.scratch("shortcut", Workspace, frames * largest * Dtype::F32.bytes());
    program.scratch("membranes", Activations, shape.b * largest * Dtype::F32.bytes());
    program.scratch("tracers", Activations, shape.b * largest * 4);
    for (layer, map) in maps.iter().enumerate() {
        program.scratch(layer_name(layer), Activations, frames * map.elements());
    }
    if let Some(pool) = &network.pool {
        program.scratch("pooled", Activations, frames * pool.output.elements());
        program.scratch("pooled_before", Activations, shape.b * pool.output.elements() * 4);
    }
    match saved {
        Saved::Nothing => {
            program.scratch("currents", Activations, frames * largest * Dtype::F32.bytes());
        }
        Saved::Currents => {
            for (layer, map) in maps.iter().enumerate() {
                let bytes = frames * map.elements() * Dtype::F32.bytes();
                program.scratch(saved.currents(layer), Activations, bytes);
            }
            if let Some(pool) = &network.pool {
                program.scratch(SOURCES, Activations, frames * pool.output.elements());
            }
        }
    }
}

/// Region of a layer's spikes, a byte each.
pub fn layer_name(layer: usize) -> String {
    format!("spikes{layer}")
}

/// Region of the spikes that a block reads.
pub fn input_name(network: &Network, block: usize) -> String {
    if block == 0 && network.pool.is_some() { "pooled".to_owned() } else { layer_name(2 * block) }
}

/// Declares the images and the logits, which every forward pass has.
pub fn images_and_logits(program: &mut Program, shape: &NetworkShape) -> Pointer {
    let images = shape.b * shape.sizes.image().elements();
    program.input("images", MemoryUse::Inputs, images * Dtype::F32.bytes());
    program.output("logits", shape.logits(), Dtype::F32)
}

/// The launches of inference.
pub fn program(shape: &NetworkShape) -> Program {
    let network = shape.sizes.network();
    let mut program = Program::new();
    let logits = images_and_logits(&mut program, shape);
    declare_packed(&mut program, shape, &network);
    scratch(&mut program, shape, &network, Saved::Nothing);
    Forward { shape, network: &network, saved: Saved::Nothing }.whole(&mut program, logits);
    program
}

/// Writes the forward pass.
pub struct Forward<'a> {
    /// Sizes of the problem.
    pub shape: &'a NetworkShape,
    /// Layers of the network.
    pub network: &'a Network,
    /// Results that the backward pass reads.
    pub saved: Saved,
}

impl Forward<'_> {
    /// Images to logits.
    pub fn whole(&self, program: &mut Program, logits: Pointer) {
        program.in_range("Main_Inference_Timing_Run", |program| {
            program.in_range("Time_Encoding", |program| self.encode(program));
            program.in_range("Input_Reshaping", |program| self.gather(program));
            program.in_range("Model_Forward_Pass", |program| {
                program
                    .in_range("Model_Compute_All_Layers", |program| self.layers(program, logits));
            });
        });
    }

    fn layers(&self, program: &mut Program, logits: Pointer) {
        program.in_range("Conv1_Block", |program| self.stem(program));
        let blocks = self.shape.sizes.blocks;
        for (stage, name) in STAGES.into_iter().enumerate() {
            program.in_range(name, |program| {
                let numbers = stage * blocks..(stage + 1) * blocks;
                numbers.for_each(|block| self.block(program, block));
            });
        }
        program.in_range("Final_Layers", |program| self.classify(program, logits));
    }

    /// The image in every step that is fed, zeros in the others. It is divided by the steps behind
    /// the convolution: bf16 does not hold a third of it.
    fn encode(&self, program: &mut Program) {
        let elements = self.shape.b * self.shape.sizes.image().elements();
        for t in 0..self.shape.t {
            let frame = program.at("frames").plus(t * elements * Dtype::F32.bytes());
            let fed = usize::from(t < self.shape.fed());
            program.launch(&ENCODE, &elements, ("images", frame, long(elements), int(fed)));
        }
    }

    /// The stem's operand.
    fn gather(&self, program: &mut Program) {
        let (stem, frames) = (&self.network.stem, self.shape.frames());
        gather_images(program, stem, frames, stem_columns(self.network), "frames");
    }

    fn stem(&self, program: &mut Program) {
        let stem = &self.network.stem;
        let currents = self.saved.currents(0);
        let columns = stem_columns(self.network);
        stem_gemm(program, stem, self.shape.frames(), columns, &currents);
        self.bias(program, stem, &currents, [1.0, self.shape.steps() as f32]);
        self.neurons(program, 0, self.network.pool.as_ref());
    }

    /// The operand of a convolution of spikes.
    pub fn gather_spikes(&self, program: &mut Program, conv: &Conv, input: &str) {
        let taps = conv.window.live_taps();
        let rows = self.shape.frames() * conv.window.output.pixels();
        let packets = rows * live_columns(conv) / PACKET;
        let window = window_arguments(&conv.window);
        let taps = ints([taps.start, taps.len()]);
        let arguments = (input, "operand", long(packets), window, taps);
        program.launch(&GATHER_SPIKES, &packets, arguments);
    }

    /// A convolution of spikes into `to`, with its bias.
    fn convolve(&self, program: &mut Program, conv: &Conv, input: &str, to: &str) {
        let window = &conv.window;
        let rows = self.shape.frames() * window.output.pixels();
        self.gather_spikes(program, conv, input);
        let spec = convolution_gemm(rows, window.output.channels, live_columns(conv));
        let operands = ["operand", &weight_name(conv), to].map(|name| program.at(name));
        program.gemm(Lane::MAIN, spec, operands);
        self.bias(program, conv, to, [self.shape.neuron().threshold as f32, 1.0]);
    }

    /// Scales currents by a factor over a divisor and adds the bias.
    fn bias(&self, program: &mut Program, conv: &Conv, to: &str, [factor, divisor]: [f32; 2]) {
        let size = self.shape.b * conv.window.output.elements();
        let elements = self.shape.t * size;
        let fed = self.shape.fed() * size;
        let bias = bias_name(conv);
        let pointers = (to, &bias, long(elements), long(fed));
        let arguments = (pointers, int(conv.window.output.channels), factor, divisor);
        program.launch(&BIAS, &elements, arguments);
    }

    /// A layer of neurons, a launch a step; behind each one that of the pooling, if there is one.
    fn neurons(&self, program: &mut Program, layer: usize, pool: Option<&Window>) {
        let map: Map = self.network.neurons()[layer];
        let n = self.shape.b * map.elements();
        let neurons =
            Neurons { n, t: self.shape.t, dtype: Dtype::F32, parameters: self.shape.neuron() };
        let (currents, spikes) = (self.saved.currents(layer), layer_name(layer));
        for t in 0..self.shape.t {
            let regions = (&currents, &spikes, "membranes", "tracers");
            let arguments = (regions, long(n), long(t), parameters::<Operand>(&neurons));
            program.launch(&PER_STEP, &neurons, arguments);
            if let Some(pool) = pool {
                // The range of the pooling follows that of the stem and is not inside it.
                program.end();
                program.in_range("MaxPool", |program| self.pool(program, pool, t));
                program.begin("Conv1_Block");
            }
        }
    }

    fn pool(&self, program: &mut Program, pool: &Window, t: usize) {
        let elements = self.shape.b * pool.output.elements();
        let sources = match self.saved {
            Saved::Nothing => NULL,
            Saved::Currents => program.at(SOURCES).plus(t * elements).into(),
        };
        let pooled = program.at("pooled").plus(t * elements);
        let sizes = ints([pool.input.side, pool.input.channels, pool.output.side, t]);
        let pointers = ("tracers", "pooled_before", pooled, sources);
        program.launch(&POOL, &elements, (pointers, long(elements), sizes));
    }

    fn block(&self, program: &mut Program, number: usize) {
        let Block { first, second, shortcut } = &self.network.blocks[number];
        let input = input_name(self.network, number);
        let hidden = self.saved.currents(2 * number + 1);
        let currents = self.saved.currents(2 * number + 2);
        program.in_range(&first.name, |program| {
            self.convolve(program, first, &input, &hidden);
            self.neurons(program, 2 * number + 1, None);
        });
        program.in_range(&second.name, |program| {
            self.convolve(program, second, &layer_name(2 * number + 1), &currents);
            let elements = self.shape.frames() * second.window.output.elements();
            match shortcut {
                Some(conv) => {
                    self.convolve(program, conv, &input, "shortcut");
                    let arguments = (&currents, "shortcut", long(elements));
                    program.launch(&ADD, &elements, arguments);
                }
                None => {
                    let theta = self.shape.neuron().threshold as f32;
                    let arguments = (&currents, &input, long(elements), theta);
                    program.launch(&ADD_SPIKES, &elements, arguments);
                }
            }
            self.neurons(program, 2 * number + 2, None);
        });
    }

    /// Logits of each step, added up.
    fn classify(&self, program: &mut Program, logits: Pointer) {
        let (shape, map) = (self.shape, self.network.last());
        let blocks = shape.b * CLASSES;
        let scale = (shape.neuron().threshold / map.pixels() as f64) as f32;
        let last = layer_name(2 * self.network.blocks.len());
        for t in 0..shape.t {
            let spikes = program.at(&last).plus(t * shape.b * map.elements());
            let pointers = (spikes, "fc.weight", "fc.bias", logits);
            let sizes = ints([shape.b, CLASSES, map.pixels(), map.channels, 1]);
            let fed = if t < shape.fed() { 1.0f32 } else { 0.0 };
            let arguments = (pointers, sizes, scale, fed, int(usize::from(t > 0)));
            program.launch(&CLASSIFY, &blocks, arguments);
        }
    }
}

/// Gathers the stem's operand: the values under its filters, for a number of frames of images.
pub fn gather_images(
    program: &mut Program,
    stem: &Conv,
    frames: usize,
    columns: usize,
    from: &str,
) {
    let packets = frames * stem.window.output.pixels() * columns / PACKET;
    let window = window_arguments(&stem.window);
    program.launch(&GATHER, &packets, (from, "operand", long(packets), window, int(columns)));
}

/// The stem's GEMM.
pub fn stem_gemm(program: &mut Program, stem: &Conv, frames: usize, depth: usize, to: &str) {
    let rows = frames * stem.window.output.pixels();
    let spec = convolution_gemm(rows, stem.window.output.channels, depth);
    let operands = ["operand", &weight_name(stem), to].map(|name| program.at(name));
    program.gemm(Lane::MAIN, spec, operands);
}

/// The GEMM of a convolution: a gathered operand by the weights `[filters, depth]`.
const fn convolution_gemm(rows: usize, filters: usize, depth: usize) -> GemmSpec {
    let plain = GemmSpec::new(rows, filters, depth, MatrixDtype::Bf16, MatrixDtype::F32);
    GemmSpec { b_transposed: true, ..plain }
}

/// Side, channels, side of the output, kernel, stride.
pub fn window_arguments(window: &Window) -> [Operand; 5] {
    let Window { input, output, kernel, stride } = *window;
    ints([input.side, input.channels, output.side, kernel, stride])
}
