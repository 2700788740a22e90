//! ResNet-18 rung with one launch for each operation; neurons and pooling take one launch for each
//! time step. GEMM operands are gathered by kernels, GEMMs are cuBLASLt's, and neurons use the
//! kernel of `st_bif/forward`, one time step a launch.

use super::kernel_weights::{
    declare_packed_parameter_regions, name_of_bias_per_step_region, name_of_weight_region,
    stem_operand_columns, weight_columns_that_read_pixels,
};
use crate::kernel_files::source_of_kernel_file;
use crate::resnet18::definition::ResNetParameters;
use crate::resnet18::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, FeatureMapExtents, ResNet18Layers, ResNetBlock,
    SlidingWindow,
};
use crate::st_bif::NeuronLayerParameters;
use crate::st_bif::cuda::{ONE_TIME_STEP_KERNEL, neuron_constant_arguments};
use kernelgate::backend::program::{
    LaunchArgument, LaunchProgram, MemoryPurpose, NULL, ProgramLane, RegionPointer, int_operand,
    int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmMatrixDtype, GemmSpec};

/// Number of threads in a block of the per-operation kernels.
const PER_OP_BLOCK_THREADS: usize = 256;
/// Number of operand columns that one thread of a gather kernel copies.
const COLUMNS_PER_GATHER_THREAD: usize = 8;

/// NVTX range names of the four ResNet stages.
pub const STAGE_NVTX_RANGES: [&str; 4] =
    ["Layer1_ResBlocks", "Layer2_ResBlocks", "Layer3_ResBlocks", "Layer4_ResBlocks"];

/// Kernels of the ResNet-18 inference rung `per_op`, besides the neurons' kernel and cuBLASLt's
/// GEMMs. The launch parameter of most per-operation kernels is the number of elements, with one
/// thread for each.
pub const PER_OP_INFERENCE_KERNELS: &[KernelSpec<usize>] = &[
    ENCODE_IMAGE_IN_TIME_STEP_KERNEL,
    GATHER_STEM_OPERAND_KERNEL,
    GATHER_SPIKE_OPERAND_KERNEL,
    SCALE_AND_ADD_BIAS_KERNEL,
    ADD_SHORTCUT_CURRENTS_KERNEL,
    ADD_RESIDUAL_SPIKES_KERNEL,
    MAX_POOL_TIME_STEP_KERNEL,
    CLASSIFY_TIME_STEP_KERNEL,
];

const ENCODE_IMAGE_IN_TIME_STEP_KERNEL: KernelSpec<usize> = KernelSpec {
    constant_macros: |_| vec![("THREADS", PER_OP_BLOCK_THREADS)],
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        source_of_kernel_file("resnet18/per_op"),
        "resnet18_per_op_encode",
        PER_OP_BLOCK_THREADS,
        |elements| [elements.div_ceil(PER_OP_BLOCK_THREADS), 1, 1],
    )
};
/// Kernel that gathers the stem's GEMM operand from images, which the rung `fused` launches too.
pub const GATHER_STEM_OPERAND_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_per_op_gather", ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL };
const GATHER_SPIKE_OPERAND_KERNEL: KernelSpec<usize> = KernelSpec {
    kernel_symbol: "resnet18_per_op_gather_spikes",
    ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL
};
const SCALE_AND_ADD_BIAS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_per_op_bias", ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL };
const ADD_SHORTCUT_CURRENTS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_per_op_add", ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL };
const ADD_RESIDUAL_SPIKES_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_per_op_add_spikes", ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL };
const MAX_POOL_TIME_STEP_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_per_op_pool", ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL };
/// Kernel of the classifier in one time step: each block computes the logit of one class of one
/// image.
pub const CLASSIFY_TIME_STEP_KERNEL: KernelSpec<usize> = KernelSpec {
    kernel_symbol: "resnet18_per_op_classify",
    blocks: |blocks| [*blocks, 1, 1],
    ..ENCODE_IMAGE_IN_TIME_STEP_KERNEL
};

/// Results of a forward pass that are stored for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredForwardResults {
    /// The forward pass stores nothing for a backward pass, so one memory region of currents serves
    /// all layers.
    NothingForBackward,
    /// The currents of every layer and the window position of each pooling maximum are stored for
    /// the backward pass.
    CurrentsAndPoolingPositions,
}

/// Name of the memory region with the window position of each max pooling's maximum, one byte each.
pub const POOLING_MAXIMUM_TAPS_REGION: &str = "pooled_sources";

impl StoredForwardResults {
    /// Name of the memory region of a neuron layer's input currents in f32.
    pub fn name_of_layer_currents_region(self, layer: usize) -> String {
        match self {
            Self::NothingForBackward => "currents".to_owned(),
            Self::CurrentsAndPoolingPositions => format!("currents{layer}"),
        }
    }
}

/// Adds all memory regions of a per-operation forward pass except parameters, images and outputs.
pub fn declare_per_op_scratch_regions(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    saved: StoredForwardResults,
) {
    use MemoryPurpose::{Activations, Workspace};
    let frames = shape.frames_over_all_time_steps();
    let maps = network.extents_of_neuron_layers();
    let largest = maps.iter().map(|map| map.elements_per_frame()).max().unwrap_or(0);
    let rows = |conv: &ConvolutionLayer| frames * conv.window.output_extents.pixels_per_frame();
    let hidden = network.all_convolutions().skip(1);
    let operand = hidden
        .map(|conv| rows(conv) * weight_columns_that_read_pixels(conv))
        .chain([rows(&network.stem) * stem_operand_columns(network)])
        .max()
        .unwrap_or(0);
    let images = frames * shape.sizes.image_extents().elements_per_frame();
    program.add_scratch("frames", Workspace, images * Dtype::F32.bytes_per_element());
    program.add_scratch("operand", Workspace, operand * Dtype::Bf16.bytes_per_element());
    program.add_scratch("shortcut", Workspace, frames * largest * Dtype::F32.bytes_per_element());
    program.add_scratch(
        "membranes",
        Activations,
        shape.batch_size * largest * Dtype::F32.bytes_per_element(),
    );
    program.add_scratch("tracers", Activations, shape.batch_size * largest * 4);
    for (layer, map) in maps.iter().enumerate() {
        program.add_scratch(
            name_of_layer_spikes_region(layer),
            Activations,
            frames * map.elements_per_frame(),
        );
    }
    if let Some(pool) = &network.pool {
        program.add_scratch(
            "pooled",
            Activations,
            frames * pool.output_extents.elements_per_frame(),
        );
        program.add_scratch(
            "pooled_before",
            Activations,
            shape.batch_size * pool.output_extents.elements_per_frame() * 4,
        );
    }
    match saved {
        StoredForwardResults::NothingForBackward => {
            program.add_scratch(
                "currents",
                Activations,
                frames * largest * Dtype::F32.bytes_per_element(),
            );
        }
        StoredForwardResults::CurrentsAndPoolingPositions => {
            for (layer, map) in maps.iter().enumerate() {
                let bytes = frames * map.elements_per_frame() * Dtype::F32.bytes_per_element();
                program.add_scratch(saved.name_of_layer_currents_region(layer), Activations, bytes);
            }
            if let Some(pool) = &network.pool {
                program.add_scratch(
                    POOLING_MAXIMUM_TAPS_REGION,
                    Activations,
                    frames * pool.output_extents.elements_per_frame(),
                );
            }
        }
    }
}

/// Name of the memory region of a neuron layer's spikes.
pub fn name_of_layer_spikes_region(layer: usize) -> String {
    format!("spikes{layer}")
}

/// Name of the memory region of the spikes that a residual block reads.
pub fn name_of_block_input_region(network: &ResNet18Layers, block: usize) -> String {
    if block == 0 && network.pool.is_some() {
        "pooled".to_owned()
    } else {
        name_of_layer_spikes_region(2 * block)
    }
}

/// Adds the input region of the images and the output region of the logits to the program; returns
/// the address of the logits.
pub fn declare_image_and_logit_regions(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
) -> RegionPointer {
    let images = shape.batch_size * shape.sizes.image_extents().elements_per_frame();
    program.add_input("images", MemoryPurpose::Inputs, images * Dtype::F32.bytes_per_element());
    program.add_output("logits", shape.shape_of_logits(), Dtype::F32)
}

/// Program of ResNet-18 inference.
pub fn per_op_inference_program(shape: &ResNetParameters) -> LaunchProgram {
    let network = shape.sizes.build_resnet18_layers();
    let mut program = LaunchProgram::new();
    let logits = declare_image_and_logit_regions(&mut program, shape);
    declare_packed_parameter_regions(&mut program, shape, &network);
    declare_per_op_scratch_regions(
        &mut program,
        shape,
        &network,
        StoredForwardResults::NothingForBackward,
    );
    PerOpForwardBuilder {
        shape,
        network: &network,
        stored_results: StoredForwardResults::NothingForBackward,
    }
    .add_per_op_forward_pass(&mut program, logits);
    program
}

/// Adds the launches of a per-operation ResNet-18 forward pass to a program.
pub struct PerOpForwardBuilder<'a> {
    /// Network and sizes of the ResNet-18 problem.
    pub shape: &'a ResNetParameters,
    /// Layers of the ResNet-18 network.
    pub network: &'a ResNet18Layers,
    /// Results of the forward pass that are stored because the backward pass reads them.
    pub stored_results: StoredForwardResults,
}

impl PerOpForwardBuilder<'_> {
    /// Adds the launches of the whole forward pass, from images to logits, to the program.
    pub fn add_per_op_forward_pass(&self, program: &mut LaunchProgram, logits: RegionPointer) {
        program.add_steps_in_named_range("Main_Inference_Timing_Run", |program| {
            program.add_steps_in_named_range("Time_Encoding", |program| {
                self.add_image_encoding_launches(program)
            });
            program.add_steps_in_named_range("Input_Reshaping", |program| {
                self.add_stem_operand_gathering(program)
            });
            program.add_steps_in_named_range("Model_Forward_Pass", |program| {
                program.add_steps_in_named_range("Model_Compute_All_Layers", |program| {
                    self.add_launches_of_all_layers(program, logits)
                });
            });
        });
    }

    fn add_launches_of_all_layers(&self, program: &mut LaunchProgram, logits: RegionPointer) {
        program.add_steps_in_named_range("Conv1_Block", |program| {
            self.add_stem_gemm_bias_and_neurons(program)
        });
        let blocks = self.shape.sizes.blocks_per_stage;
        for (stage, name) in STAGE_NVTX_RANGES.into_iter().enumerate() {
            program.add_steps_in_named_range(name, |program| {
                let numbers = stage * blocks..(stage + 1) * blocks;
                numbers.for_each(|block| self.add_launches_of_residual_block(program, block));
            });
        }
        program.add_steps_in_named_range("Final_Layers", |program| {
            self.add_classifier_launches_of_all_steps(program, logits)
        });
    }

    /// Adds the launches that write the image into every time step into which it is fed, and zeros
    /// into the other steps. The sum of the convolution is divided by the number of time steps, not
    /// the image before the convolution, because bf16 cannot represent a third of a pixel exactly.
    fn add_image_encoding_launches(&self, program: &mut LaunchProgram) {
        let elements =
            self.shape.batch_size * self.shape.sizes.image_extents().elements_per_frame();
        for t in 0..self.shape.time_steps {
            let frame = program
                .pointer_to("frames")
                .offset_by(t * elements * Dtype::F32.bytes_per_element());
            let fed = usize::from(t < self.shape.time_steps_fed_with_image());
            program.add_launch(
                &ENCODE_IMAGE_IN_TIME_STEP_KERNEL,
                &elements,
                ("images", frame, long_operand(elements), int_operand(fed)),
            );
        }
    }

    /// Adds the launch that gathers the operand of the stem's GEMM from the encoded frames.
    fn add_stem_operand_gathering(&self, program: &mut LaunchProgram) {
        let (stem, frames) = (&self.network.stem, self.shape.frames_over_all_time_steps());
        add_gathering_of_stem_operand(
            program,
            stem,
            frames,
            stem_operand_columns(self.network),
            "frames",
        );
    }

    fn add_stem_gemm_bias_and_neurons(&self, program: &mut LaunchProgram) {
        let stem = &self.network.stem;
        let currents = self.stored_results.name_of_layer_currents_region(0);
        let columns = stem_operand_columns(self.network);
        add_stem_gemm(program, stem, self.shape.frames_over_all_time_steps(), columns, &currents);
        self.add_scaling_and_bias_launch(
            program,
            stem,
            &currents,
            [1.0, self.shape.time_steps_to_spread_image() as f32],
        );
        self.add_neuron_launches_of_all_steps(program, 0, self.network.pool.as_ref());
    }

    /// Adds the launch that gathers the GEMM operand of a convolution from spikes.
    pub fn add_spike_operand_gathering(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        input: &str,
    ) {
        let taps = conv.window.range_of_taps_that_read_pixels();
        let rows =
            self.shape.frames_over_all_time_steps() * conv.window.output_extents.pixels_per_frame();
        let packets = rows * weight_columns_that_read_pixels(conv) / COLUMNS_PER_GATHER_THREAD;
        let window = convolution_window_arguments(&conv.window);
        let taps = int_operands([taps.start, taps.len()]);
        let arguments = (input, "operand", long_operand(packets), window, taps);
        program.add_launch(&GATHER_SPIKE_OPERAND_KERNEL, &packets, arguments);
    }

    /// Adds the launches of a convolution of spikes with its bias, which writes currents to the
    /// region `to`.
    fn add_spike_convolution_and_bias(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        input: &str,
        to: &str,
    ) {
        let window = &conv.window;
        let rows =
            self.shape.frames_over_all_time_steps() * window.output_extents.pixels_per_frame();
        self.add_spike_operand_gathering(program, conv, input);
        let spec = convolution_gemm_spec(
            rows,
            window.output_extents.channels,
            weight_columns_that_read_pixels(conv),
        );
        let operands =
            ["operand", &name_of_weight_region(conv), to].map(|name| program.pointer_to(name));
        program.add_gemm(ProgramLane::MAIN_LANE, spec, operands);
        self.add_scaling_and_bias_launch(
            program,
            conv,
            to,
            [self.shape.neuron_parameters().firing_threshold as f32, 1.0],
        );
    }

    /// Adds the launch that multiplies currents by a factor, divides them by a divisor, and adds
    /// the bias in fed time steps.
    fn add_scaling_and_bias_launch(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        to: &str,
        [factor, divisor]: [f32; 2],
    ) {
        let size = self.shape.batch_size * conv.window.output_extents.elements_per_frame();
        let elements = self.shape.time_steps * size;
        let fed = self.shape.time_steps_fed_with_image() * size;
        let bias = name_of_bias_per_step_region(conv);
        let pointers = (to, &bias, long_operand(elements), long_operand(fed));
        let arguments =
            (pointers, int_operand(conv.window.output_extents.channels), factor, divisor);
        program.add_launch(&SCALE_AND_ADD_BIAS_KERNEL, &elements, arguments);
    }

    /// Adds the launches of a neuron layer, one for each time step; if the layer has max pooling, a
    /// pooling launch follows each of them.
    fn add_neuron_launches_of_all_steps(
        &self,
        program: &mut LaunchProgram,
        layer: usize,
        pool: Option<&SlidingWindow>,
    ) {
        let map: FeatureMapExtents = self.network.extents_of_neuron_layers()[layer];
        let n = self.shape.batch_size * map.elements_per_frame();
        let neurons = NeuronLayerParameters {
            neuron_count: n,
            time_steps: self.shape.time_steps,
            dtype: Dtype::F32,
            neuron_parameters: self.shape.neuron_parameters(),
        };
        let (currents, spikes) = (
            self.stored_results.name_of_layer_currents_region(layer),
            name_of_layer_spikes_region(layer),
        );
        for t in 0..self.shape.time_steps {
            let regions = (&currents, &spikes, "membranes", "tracers");
            let arguments = (
                regions,
                long_operand(n),
                long_operand(t),
                neuron_constant_arguments::<LaunchArgument>(&neurons),
            );
            program.add_launch(&ONE_TIME_STEP_KERNEL, &neurons, arguments);
            if let Some(pool) = pool {
                // The NVTX range of the pooling follows the range of the stem and is not nested in
                // it.
                program.end_innermost_range();
                program.add_steps_in_named_range("MaxPool", |program| {
                    self.add_pooling_launch_of_time_step(program, pool, t)
                });
                program.begin_named_range("Conv1_Block");
            }
        }
    }

    fn add_pooling_launch_of_time_step(
        &self,
        program: &mut LaunchProgram,
        pool: &SlidingWindow,
        t: usize,
    ) {
        let elements = self.shape.batch_size * pool.output_extents.elements_per_frame();
        let sources = match self.stored_results {
            StoredForwardResults::NothingForBackward => NULL,
            StoredForwardResults::CurrentsAndPoolingPositions => {
                program.pointer_to(POOLING_MAXIMUM_TAPS_REGION).offset_by(t * elements).into()
            }
        };
        let pooled = program.pointer_to("pooled").offset_by(t * elements);
        let sizes = int_operands([
            pool.input_extents.side_pixels,
            pool.input_extents.channels,
            pool.output_extents.side_pixels,
            t,
        ]);
        let pointers = ("tracers", "pooled_before", pooled, sources);
        program.add_launch(
            &MAX_POOL_TIME_STEP_KERNEL,
            &elements,
            (pointers, long_operand(elements), sizes),
        );
    }

    fn add_launches_of_residual_block(&self, program: &mut LaunchProgram, number: usize) {
        let ResNetBlock { first, second, shortcut } = &self.network.blocks[number];
        let input = name_of_block_input_region(self.network, number);
        let hidden = self.stored_results.name_of_layer_currents_region(2 * number + 1);
        let currents = self.stored_results.name_of_layer_currents_region(2 * number + 2);
        program.add_steps_in_named_range(&first.layer_name, |program| {
            self.add_spike_convolution_and_bias(program, first, &input, &hidden);
            self.add_neuron_launches_of_all_steps(program, 2 * number + 1, None);
        });
        program.add_steps_in_named_range(&second.layer_name, |program| {
            self.add_spike_convolution_and_bias(
                program,
                second,
                &name_of_layer_spikes_region(2 * number + 1),
                &currents,
            );
            let elements = self.shape.frames_over_all_time_steps()
                * second.window.output_extents.elements_per_frame();
            match shortcut {
                Some(conv) => {
                    self.add_spike_convolution_and_bias(program, conv, &input, "shortcut");
                    let arguments = (&currents, "shortcut", long_operand(elements));
                    program.add_launch(&ADD_SHORTCUT_CURRENTS_KERNEL, &elements, arguments);
                }
                None => {
                    let theta = self.shape.neuron_parameters().firing_threshold as f32;
                    let arguments = (&currents, &input, long_operand(elements), theta);
                    program.add_launch(&ADD_RESIDUAL_SPIKES_KERNEL, &elements, arguments);
                }
            }
            self.add_neuron_launches_of_all_steps(program, 2 * number + 2, None);
        });
    }

    /// Adds the classifier's launches, one for each time step; each adds its step's logits to the
    /// sum.
    fn add_classifier_launches_of_all_steps(
        &self,
        program: &mut LaunchProgram,
        logits: RegionPointer,
    ) {
        let (shape, map) = (self.shape, self.network.last_feature_map());
        let blocks = shape.batch_size * CLASSIFIER_CLASS_COUNT;
        let scale =
            (shape.neuron_parameters().firing_threshold / map.pixels_per_frame() as f64) as f32;
        let last = name_of_layer_spikes_region(2 * self.network.blocks.len());
        for t in 0..shape.time_steps {
            let spikes = program
                .pointer_to(&last)
                .offset_by(t * shape.batch_size * map.elements_per_frame());
            let pointers = (spikes, "fc.weight", "fc.bias", logits);
            let sizes = int_operands([
                shape.batch_size,
                CLASSIFIER_CLASS_COUNT,
                map.pixels_per_frame(),
                map.channels,
                1,
            ]);
            let fed = if t < shape.time_steps_fed_with_image() { 1.0f32 } else { 0.0 };
            let arguments = (pointers, sizes, scale, fed, int_operand(usize::from(t > 0)));
            program.add_launch(&CLASSIFY_TIME_STEP_KERNEL, &blocks, arguments);
        }
    }
}

/// Adds the launch that gathers the stem's GEMM operand: the pixels under the stem's filters, for a
/// number of frames.
pub fn add_gathering_of_stem_operand(
    program: &mut LaunchProgram,
    stem: &ConvolutionLayer,
    frames: usize,
    columns: usize,
    from: &str,
) {
    let packets = frames * stem.window.output_extents.pixels_per_frame() * columns
        / COLUMNS_PER_GATHER_THREAD;
    let window = convolution_window_arguments(&stem.window);
    program.add_launch(
        &GATHER_STEM_OPERAND_KERNEL,
        &packets,
        (from, "operand", long_operand(packets), window, int_operand(columns)),
    );
}

/// Adds the GEMM of the stem's convolution to the program.
pub fn add_stem_gemm(
    program: &mut LaunchProgram,
    stem: &ConvolutionLayer,
    frames: usize,
    depth: usize,
    to: &str,
) {
    let rows = frames * stem.window.output_extents.pixels_per_frame();
    let spec = convolution_gemm_spec(rows, stem.window.output_extents.channels, depth);
    let operands =
        ["operand", &name_of_weight_region(stem), to].map(|name| program.pointer_to(name));
    program.add_gemm(ProgramLane::MAIN_LANE, spec, operands);
}

/// Specification of a convolution's GEMM: a gathered operand `[rows, depth]` times the transposed
/// weights `[filters, depth]`.
const fn convolution_gemm_spec(rows: usize, filters: usize, depth: usize) -> GemmSpec {
    let plain = GemmSpec::new(rows, filters, depth, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32);
    GemmSpec { b_transposed: true, ..plain }
}

/// Kernel arguments that describe a convolution or pooling window: input side, channels, output
/// side, kernel size, stride.
pub fn convolution_window_arguments(window: &SlidingWindow) -> [LaunchArgument; 5] {
    let SlidingWindow {
        input_extents: input,
        output_extents: output,
        window_side: kernel,
        stride_pixels: stride,
    } = *window;
    int_operands([input.side_pixels, input.channels, output.side_pixels, kernel, stride])
}
