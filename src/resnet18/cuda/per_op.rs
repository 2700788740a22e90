//! Rung with one launch for each operation; neurons and pooling take one launch for each time step.
//! Operands are gathered, GEMMs are the library's, and neurons are those of `st_bif/forward`, one
//! step at a time.

use super::kernel_weights::{
    bias_share_region_name, declare_packed_parameters, live_weight_columns, padded_stem_columns,
    weight_region_name,
};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{
    CLASS_COUNT, ConvolutionLayer, ConvolutionWindow, FeatureMap, ResNet18, ResidualBlock,
};
use crate::st_bif::NeuronShape;
use crate::st_bif::cuda::{PER_STEP_KERNEL, arguments};
use kernelgate::backend::program::{
    Lane, MemoryPurpose, NULL, Operand, Pointer, Program, int, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

/// Number of threads in a block.
const THREADS: usize = 256;
/// Number of columns that a gathering thread handles.
const GATHERED_COLUMNS_PER_THREAD: usize = 8;

/// Names of the profiler ranges of the four stages.
pub const STAGE_RANGES: [&str; 4] =
    ["Layer1_ResBlocks", "Layer2_ResBlocks", "Layer3_ResBlocks", "Layer4_ResBlocks"];

/// Kernels of the rung `per_op`. The parameter of each kernel is the number of elements, one for
/// each thread.
pub const KERNELS: &[KernelSpec<usize>] = &[
    ENCODE_KERNEL,
    GATHER_KERNEL,
    GATHER_SPIKES_KERNEL,
    BIAS_KERNEL,
    ADD_KERNEL,
    ADD_SPIKES_KERNEL,
    POOL_KERNEL,
    CLASSIFY_KERNEL,
];

const ENCODE_KERNEL: KernelSpec<usize> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS)],
    variants: || vec![1],
    ..KernelSpec::new(
        kernel_file("resnet18/per_op"),
        "resnet18_per_op_encode",
        THREADS,
        |elements| [elements.div_ceil(THREADS), 1, 1],
    )
};
/// Kernel that gathers images, which `fused` launches too.
pub const GATHER_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_gather", ..ENCODE_KERNEL };
const GATHER_SPIKES_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_gather_spikes", ..ENCODE_KERNEL };
const BIAS_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_bias", ..ENCODE_KERNEL };
const ADD_KERNEL: KernelSpec<usize> = KernelSpec { symbol: "resnet18_per_op_add", ..ENCODE_KERNEL };
const ADD_SPIKES_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_add_spikes", ..ENCODE_KERNEL };
const POOL_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_per_op_pool", ..ENCODE_KERNEL };
/// Kernel of the classifier, which `fused` launches too: each block computes one class of one
/// image.
pub const CLASSIFY_KERNEL: KernelSpec<usize> = KernelSpec {
    symbol: "resnet18_per_op_classify",
    blocks: |blocks| [*blocks, 1, 1],
    ..ENCODE_KERNEL
};

/// Results of a forward pass that are stored for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SavedForwardRegions {
    /// No results are stored: one region of currents serves all layers.
    Nothing,
    /// The currents of every layer, and the taps of the pooling's maxima.
    Currents,
}

/// Name of the region of the taps of the pooling's maxima, one byte each.
pub const POOLED_TAPS: &str = "pooled_sources";

impl SavedForwardRegions {
    /// Name of the region of a layer's input currents, f32.
    pub fn currents_region_name(self, layer: usize) -> String {
        match self {
            Self::Nothing => "currents".to_owned(),
            Self::Currents => format!("currents{layer}"),
        }
    }
}

/// Declares all regions except parameters, images and outputs.
pub fn declare_scratch(
    program: &mut Program,
    shape: &NetworkShape,
    network: &ResNet18,
    saved: SavedForwardRegions,
) {
    use MemoryPurpose::{Activations, Workspace};
    let frames = shape.frame_count();
    let maps = network.neuron_layer_extents();
    let largest = maps.iter().map(|map| map.elements()).max().unwrap_or(0);
    let rows = |conv: &ConvolutionLayer| frames * conv.window.output.pixel_count();
    let hidden = network.block_convolutions().skip(1);
    let operand = hidden
        .map(|conv| rows(conv) * live_weight_columns(conv))
        .chain([rows(&network.stem) * padded_stem_columns(network)])
        .max()
        .unwrap_or(0);
    let images = frames * shape.sizes.image().elements();
    program.add_scratch("frames", Workspace, images * Dtype::F32.bytes());
    program.add_scratch("operand", Workspace, operand * Dtype::Bf16.bytes());
    program.add_scratch("shortcut", Workspace, frames * largest * Dtype::F32.bytes());
    program.add_scratch("membranes", Activations, shape.b * largest * Dtype::F32.bytes());
    program.add_scratch("tracers", Activations, shape.b * largest * 4);
    for (layer, map) in maps.iter().enumerate() {
        program.add_scratch(layer_spikes_name(layer), Activations, frames * map.elements());
    }
    if let Some(pool) = &network.pool {
        program.add_scratch("pooled", Activations, frames * pool.output.elements());
        program.add_scratch("pooled_before", Activations, shape.b * pool.output.elements() * 4);
    }
    match saved {
        SavedForwardRegions::Nothing => {
            program.add_scratch("currents", Activations, frames * largest * Dtype::F32.bytes());
        }
        SavedForwardRegions::Currents => {
            for (layer, map) in maps.iter().enumerate() {
                let bytes = frames * map.elements() * Dtype::F32.bytes();
                program.add_scratch(saved.currents_region_name(layer), Activations, bytes);
            }
            if let Some(pool) = &network.pool {
                program.add_scratch(POOLED_TAPS, Activations, frames * pool.output.elements());
            }
        }
    }
}

/// Name of the region of a layer's spikes, one byte each.
pub fn layer_spikes_name(layer: usize) -> String {
    format!("spikes{layer}")
}

/// Name of the region of the spikes that a residual block reads.
pub fn block_input_name(network: &ResNet18, block: usize) -> String {
    if block == 0 && network.pool.is_some() {
        "pooled".to_owned()
    } else {
        layer_spikes_name(2 * block)
    }
}

/// Declares the images and the logits, which every forward pass has.
pub fn declare_images_and_logits(program: &mut Program, shape: &NetworkShape) -> Pointer {
    let images = shape.b * shape.sizes.image().elements();
    program.add_input("images", MemoryPurpose::Inputs, images * Dtype::F32.bytes());
    program.add_output("logits", shape.logits_shape(), Dtype::F32)
}

/// Program of ResNet-18 inference.
pub fn inference_program(shape: &NetworkShape) -> Program {
    let network = shape.sizes.build_network();
    let mut program = Program::new();
    let logits = declare_images_and_logits(&mut program, shape);
    declare_packed_parameters(&mut program, shape, &network);
    declare_scratch(&mut program, shape, &network, SavedForwardRegions::Nothing);
    PerOpForward { shape, network: &network, saved: SavedForwardRegions::Nothing }
        .add_forward_pass(&mut program, logits);
    program
}

/// Writes the launches of a forward pass.
pub struct PerOpForward<'a> {
    /// Sizes of the problem.
    pub shape: &'a NetworkShape,
    /// Layers of the network.
    pub network: &'a ResNet18,
    /// Results of the forward pass that the backward pass reads.
    pub saved: SavedForwardRegions,
}

impl PerOpForward<'_> {
    /// Adds the whole forward pass, from images to logits, to the program.
    pub fn add_forward_pass(&self, program: &mut Program, logits: Pointer) {
        program.in_range("Main_Inference_Timing_Run", |program| {
            program.in_range("Time_Encoding", |program| self.encode_images(program));
            program.in_range("Input_Reshaping", |program| self.gather_stem_operand(program));
            program.in_range("Model_Forward_Pass", |program| {
                program.in_range("Model_Compute_All_Layers", |program| {
                    self.launch_all_layers(program, logits)
                });
            });
        });
    }

    fn launch_all_layers(&self, program: &mut Program, logits: Pointer) {
        program.in_range("Conv1_Block", |program| self.add_stem(program));
        let blocks = self.shape.sizes.blocks;
        for (stage, name) in STAGE_RANGES.into_iter().enumerate() {
            program.in_range(name, |program| {
                let numbers = stage * blocks..(stage + 1) * blocks;
                numbers.for_each(|block| self.add_residual_block(program, block));
            });
        }
        program.in_range("Final_Layers", |program| self.add_classifier(program, logits));
    }

    /// Adds the encoding to the program: the image in every time step that has an input, zeros in
    /// the other steps. The image is divided by the number of steps after the convolution, because
    /// bf16 cannot represent a third of it exactly.
    fn encode_images(&self, program: &mut Program) {
        let elements = self.shape.b * self.shape.sizes.image().elements();
        for t in 0..self.shape.t {
            let frame = program.at("frames").offset_by(t * elements * Dtype::F32.bytes());
            let fed = usize::from(t < self.shape.fed_time_steps());
            program.add_launch(
                &ENCODE_KERNEL,
                &elements,
                ("images", frame, long_operand(elements), int(fed)),
            );
        }
    }

    /// Gathers the operand of the stem's GEMM.
    fn gather_stem_operand(&self, program: &mut Program) {
        let (stem, frames) = (&self.network.stem, self.shape.frame_count());
        gather_images(program, stem, frames, padded_stem_columns(self.network), "frames");
    }

    fn add_stem(&self, program: &mut Program) {
        let stem = &self.network.stem;
        let currents = self.saved.currents_region_name(0);
        let columns = padded_stem_columns(self.network);
        launch_stem_gemm(program, stem, self.shape.frame_count(), columns, &currents);
        self.add_bias(program, stem, &currents, [1.0, self.shape.spread_steps() as f32]);
        self.add_neuron_layer(program, 0, self.network.pool.as_ref());
    }

    /// Gathers the GEMM operand of a convolution of spikes.
    pub fn gather_spikes(&self, program: &mut Program, conv: &ConvolutionLayer, input: &str) {
        let taps = conv.window.taps_that_read_pixels();
        let rows = self.shape.frame_count() * conv.window.output.pixel_count();
        let packets = rows * live_weight_columns(conv) / GATHERED_COLUMNS_PER_THREAD;
        let window = window_arguments(&conv.window);
        let taps = int_operands([taps.start, taps.len()]);
        let arguments = (input, "operand", long_operand(packets), window, taps);
        program.add_launch(&GATHER_SPIKES_KERNEL, &packets, arguments);
    }

    /// Adds a convolution of spikes with its bias, which writes to `to`.
    fn add_convolution(
        &self,
        program: &mut Program,
        conv: &ConvolutionLayer,
        input: &str,
        to: &str,
    ) {
        let window = &conv.window;
        let rows = self.shape.frame_count() * window.output.pixel_count();
        self.gather_spikes(program, conv, input);
        let spec = launch_convolution_gemm(rows, window.output.channels, live_weight_columns(conv));
        let operands = ["operand", &weight_region_name(conv), to].map(|name| program.at(name));
        program.gemm(Lane::MAIN_LANE, spec, operands);
        self.add_bias(program, conv, to, [self.shape.neuron().threshold as f32, 1.0]);
    }

    /// Scales currents by a factor over a divisor and adds the bias.
    fn add_bias(
        &self,
        program: &mut Program,
        conv: &ConvolutionLayer,
        to: &str,
        [factor, divisor]: [f32; 2],
    ) {
        let size = self.shape.b * conv.window.output.elements();
        let elements = self.shape.t * size;
        let fed = self.shape.fed_time_steps() * size;
        let bias = bias_share_region_name(conv);
        let pointers = (to, &bias, long_operand(elements), long_operand(fed));
        let arguments = (pointers, int(conv.window.output.channels), factor, divisor);
        program.add_launch(&BIAS_KERNEL, &elements, arguments);
    }

    /// Adds a layer of neurons to the program, with one launch for each time step; if the layer has
    /// pooling, each launch is followed by a pooling launch.
    fn add_neuron_layer(
        &self,
        program: &mut Program,
        layer: usize,
        pool: Option<&ConvolutionWindow>,
    ) {
        let map: FeatureMap = self.network.neuron_layer_extents()[layer];
        let n = self.shape.b * map.elements();
        let neurons =
            NeuronShape { n, t: self.shape.t, dtype: Dtype::F32, parameters: self.shape.neuron() };
        let (currents, spikes) = (self.saved.currents_region_name(layer), layer_spikes_name(layer));
        for t in 0..self.shape.t {
            let regions = (&currents, &spikes, "membranes", "tracers");
            let arguments =
                (regions, long_operand(n), long_operand(t), arguments::<Operand>(&neurons));
            program.add_launch(&PER_STEP_KERNEL, &neurons, arguments);
            if let Some(pool) = pool {
                // The named range of the pooling follows the range of the stem and is not nested in
                // it.
                program.end_range();
                program.in_range("MaxPool", |program| self.add_pooling(program, pool, t));
                program.begin_range("Conv1_Block");
            }
        }
    }

    fn add_pooling(&self, program: &mut Program, pool: &ConvolutionWindow, t: usize) {
        let elements = self.shape.b * pool.output.elements();
        let sources = match self.saved {
            SavedForwardRegions::Nothing => NULL,
            SavedForwardRegions::Currents => program.at(POOLED_TAPS).offset_by(t * elements).into(),
        };
        let pooled = program.at("pooled").offset_by(t * elements);
        let sizes = int_operands([pool.input.side, pool.input.channels, pool.output.side, t]);
        let pointers = ("tracers", "pooled_before", pooled, sources);
        program.add_launch(&POOL_KERNEL, &elements, (pointers, long_operand(elements), sizes));
    }

    fn add_residual_block(&self, program: &mut Program, number: usize) {
        let ResidualBlock { first, second, shortcut } = &self.network.blocks[number];
        let input = block_input_name(self.network, number);
        let hidden = self.saved.currents_region_name(2 * number + 1);
        let currents = self.saved.currents_region_name(2 * number + 2);
        program.in_range(&first.name, |program| {
            self.add_convolution(program, first, &input, &hidden);
            self.add_neuron_layer(program, 2 * number + 1, None);
        });
        program.in_range(&second.name, |program| {
            self.add_convolution(program, second, &layer_spikes_name(2 * number + 1), &currents);
            let elements = self.shape.frame_count() * second.window.output.elements();
            match shortcut {
                Some(conv) => {
                    self.add_convolution(program, conv, &input, "shortcut");
                    let arguments = (&currents, "shortcut", long_operand(elements));
                    program.add_launch(&ADD_KERNEL, &elements, arguments);
                }
                None => {
                    let theta = self.shape.neuron().threshold as f32;
                    let arguments = (&currents, &input, long_operand(elements), theta);
                    program.add_launch(&ADD_SPIKES_KERNEL, &elements, arguments);
                }
            }
            self.add_neuron_layer(program, 2 * number + 2, None);
        });
    }

    /// Adds the classifier to the program: logits of each time step, summed over time.
    fn add_classifier(&self, program: &mut Program, logits: Pointer) {
        let (shape, map) = (self.shape, self.network.last_map());
        let blocks = shape.b * CLASS_COUNT;
        let scale = (shape.neuron().threshold / map.pixel_count() as f64) as f32;
        let last = layer_spikes_name(2 * self.network.blocks.len());
        for t in 0..shape.t {
            let spikes = program.at(&last).offset_by(t * shape.b * map.elements());
            let pointers = (spikes, "fc.weight", "fc.bias", logits);
            let sizes = int_operands([shape.b, CLASS_COUNT, map.pixel_count(), map.channels, 1]);
            let fed = if t < shape.fed_time_steps() { 1.0f32 } else { 0.0 };
            let arguments = (pointers, sizes, scale, fed, int(usize::from(t > 0)));
            program.add_launch(&CLASSIFY_KERNEL, &blocks, arguments);
        }
    }
}

/// Gathers the stem's operand: the values under its filters, for a number of frames of images.
pub fn gather_images(
    program: &mut Program,
    stem: &ConvolutionLayer,
    frames: usize,
    columns: usize,
    from: &str,
) {
    let packets = frames * stem.window.output.pixel_count() * columns / GATHERED_COLUMNS_PER_THREAD;
    let window = window_arguments(&stem.window);
    program.add_launch(
        &GATHER_KERNEL,
        &packets,
        (from, "operand", long_operand(packets), window, int(columns)),
    );
}

/// Adds the GEMM of the stem to the program.
pub fn launch_stem_gemm(
    program: &mut Program,
    stem: &ConvolutionLayer,
    frames: usize,
    depth: usize,
    to: &str,
) {
    let rows = frames * stem.window.output.pixel_count();
    let spec = launch_convolution_gemm(rows, stem.window.output.channels, depth);
    let operands = ["operand", &weight_region_name(stem), to].map(|name| program.at(name));
    program.gemm(Lane::MAIN_LANE, spec, operands);
}

/// GEMM of a convolution: a gathered operand times the weights `[filters, depth]`.
const fn launch_convolution_gemm(rows: usize, filters: usize, depth: usize) -> GemmSpec {
    let plain = GemmSpec::new(rows, filters, depth, MatrixDtype::Bf16, MatrixDtype::F32);
    GemmSpec { b_transposed: true, ..plain }
}

/// Kernel arguments of a window: side, channels, side of the output, kernel, stride.
pub fn window_arguments(window: &ConvolutionWindow) -> [Operand; 5] {
    let ConvolutionWindow { input, output, kernel, stride } = *window;
    int_operands([input.side, input.channels, output.side, kernel, stride])
}
