//! The forward pass of ResNet-18 with one kernel for each layer: `kernels/resnet18/fused.cu`. The
//! stem's convolution is computed once for each image by the library's GEMM, and the classifier
//! reads the sum of spikes over time.

use super::kernel_weights::{
    bias_share_region_name, declare_packed_parameters, live_weight_columns, padded_stem_columns,
    weight_region_name,
};
use super::per_op::{
    POOLED_TAPS, STAGE_RANGES, SavedForwardRegions, block_input_name, declare_images_and_logits,
    gather_images, launch_stem_gemm, layer_spikes_name,
};
use super::tiles::{THREADS, TILE_SIDE, TileGrid, four_group_build, tiled_kernel, wide_is_faster};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{CLASS_COUNT, ConvolutionLayer, ResNet18, ResidualBlock};
use kernelgate::backend::program::{
    MemoryPurpose, NULL, Operand, Program, int, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Kernels of the rung `fused`.
pub const KERNELS: &[KernelSpec<TileGrid>] =
    &[LAYER_KERNEL, WIDE_LAYER_KERNEL, STEM_KERNEL, POOL_KERNEL, CLASSIFIER_TAIL];

const LAYER_KERNEL: KernelSpec<TileGrid> =
    tiled_kernel(kernel_file("resnet18/fused"), "resnet18_fused_block");
const WIDE_LAYER_KERNEL: KernelSpec<TileGrid> = four_group_build(LAYER_KERNEL);
const STEM_KERNEL: KernelSpec<TileGrid> =
    KernelSpec { symbol: "resnet18_fused_stem", shared_bytes: |_| 0, ..LAYER_KERNEL };
const POOL_KERNEL: KernelSpec<TileGrid> =
    KernelSpec { symbol: "resnet18_fused_pool", ..STEM_KERNEL };
const CLASSIFIER_TAIL: KernelSpec<TileGrid> =
    KernelSpec { symbol: "resnet18_fused_tail", ..LAYER_KERNEL };

/// Name and size in bytes of a region of activations.
pub type ActivationRegion = (String, usize);

/// Regions that a forward pass writes, and regions that only a backward pass needs.
pub fn activation_regions(
    shape: &NetworkShape,
    network: &ResNet18,
    training: bool,
) -> Vec<ActivationRegion> {
    let maps = network.neuron_layer_extents();
    let bf16s = |name: String, count: usize| (name, count * Dtype::Bf16.bytes());
    let f32s = |name: String, count: usize| (name, count * Dtype::F32.bytes());
    let mut regions = vec![f32s(currents_region_name(0), shape.b * maps[0].elements())];
    for (layer, map) in maps.iter().enumerate() {
        let elements = shape.frame_count() * map.elements();
        regions.push(bf16s(layer_spikes_name(layer), elements));
        if training && layer > 0 {
            regions.push(f32s(currents_region_name(layer), elements));
        }
    }
    if let Some(pool) = &network.pool {
        let elements = shape.frame_count() * pool.output.elements();
        regions.push(bf16s("pooled".to_owned(), elements));
        if training {
            regions.push((POOLED_TAPS.to_owned(), elements));
        }
    }
    regions
}

pub fn declare_activations(program: &mut Program, regions: Vec<ActivationRegion>) {
    for (name, bytes) in regions {
        program.add_scratch(name, MemoryPurpose::Activations, bytes);
    }
}

/// Declares the region of the operand of the stem's GEMM.
pub fn declare_stem_operand(program: &mut Program, shape: &NetworkShape, network: &ResNet18) {
    let rows = shape.b * network.stem.window.output.pixel_count();
    let bytes = rows * padded_stem_columns(network) * Dtype::Bf16.bytes();
    program.add_scratch("operand", MemoryPurpose::Workspace, bytes);
}

/// Name of the region of a layer's currents. For the stem the region holds the convolution without
/// bias, once for each image.
pub fn currents_region_name(layer: usize) -> String {
    SavedForwardRegions::Currents.currents_region_name(layer)
}

/// Name of the region of the gradient of a layer's currents, in bf16; the stem's gradient is summed
/// over the steps.
pub fn currents_gradient_name(layer: usize) -> String {
    format!("gradient{layer}")
}

/// Program of ResNet-18 inference.
pub fn inference_program(shape: &NetworkShape) -> Program {
    let network = shape.sizes.build_network();
    let mut program = Program::new();
    let logits = declare_images_and_logits(&mut program, shape);
    declare_packed_parameters(&mut program, shape, &network);
    declare_stem_operand(&mut program, shape, &network);
    declare_activations(&mut program, activation_regions(shape, &network, false));
    let forward = FusedForward { shape, network: &network, training: false, merged: None };
    forward.add_forward_pass(&mut program, logits.into());
    program
}

/// Launches that replace the launches of single layers.
pub struct MergedLayers {
    /// Launches the stem's neurons with the pooling, in training.
    pub stem: fn(&FusedForward, &mut Program),
    /// Adds a launch of all layers after the pooling. The launch includes the stem in inference,
    /// and the classifier if the address of the logits is not null.
    pub layers: fn(&FusedForward, &mut Program, Operand),
}

/// Writes the launches of a forward pass.
pub struct FusedForward<'a> {
    /// Sizes of the problem.
    pub shape: &'a NetworkShape,
    /// Layers of the network.
    pub network: &'a ResNet18,
    /// Whether a backward pass follows and biases are unpacked parameters.
    pub training: bool,
    /// Launches that compute several layers at once, if the row has them.
    pub merged: Option<&'static MergedLayers>,
}

impl FusedForward<'_> {
    /// Address of a region that only a training step declares; otherwise null.
    pub fn training_region_or_null(&self, program: &Program, name: &str) -> Operand {
        if self.training { program.at(name).into() } else { NULL }
    }

    /// Address of a convolution's bias. The packed biases are divided by the number of time steps,
    /// except the stem's bias.
    pub fn bias_address(&self, program: &Program, conv: &ConvolutionLayer) -> Operand {
        match self.training {
            true => training_parameter(program, conv.first_bias_element()),
            false => program.at(&bias_share_region_name(conv)).into(),
        }
    }

    /// Launch grid over the tiles of a map.
    pub fn tile_grid(&self, pixels: usize, channels: usize) -> TileGrid {
        let groups = self.shape.b.div_ceil(TILE_SIDE / self.shape.t);
        TileGrid { steps: self.shape.t, blocks: [pixels * groups, channels / TILE_SIDE] }
    }

    /// Launch grid over this number of elements, two elements for each thread.
    fn grid_of_pairs(&self, elements: usize) -> TileGrid {
        TileGrid { steps: self.shape.t, blocks: [elements.div_ceil(2 * THREADS), 1] }
    }

    /// Adds the whole forward pass, from images to logits, to the program.
    pub fn add_forward_pass(&self, program: &mut Program, logits: Operand) {
        let (network, images) = (self.network, self.shape.b);
        let stem = self.training || self.merged.is_none();
        program.begin_range("Main_Inference_Timing_Run");
        program.in_range("Input_Reshaping", |program| {
            if stem {
                let columns = padded_stem_columns(network);
                gather_images(program, &network.stem, images, columns, "images");
            }
        });
        program.begin_range("Model_Forward_Pass");
        program.begin_range("Model_Compute_All_Layers");
        program.in_range("Conv1_Block", |program| {
            if stem {
                self.add_stem(program);
            }
        });
        match self.merged {
            Some(merged) => {
                (merged.layers)(self, program, if self.training { NULL } else { logits });
            }
            None => {
                self.add_pooling(program);
                self.stage_launches(program);
            }
        }
        program.in_range("Final_Layers", |program| {
            if stem {
                self.launch_classifier(program, logits);
            }
        });
        (0..3).for_each(|_| program.end_range());
    }

    /// Adds all residual blocks to the program, one launch for each layer.
    fn stage_launches(&self, program: &mut Program) {
        for (stage, blocks) in self.network.blocks.chunks(self.shape.sizes.blocks).enumerate() {
            program.in_range(STAGE_RANGES[stage], |program| {
                for (number, block) in blocks.iter().enumerate() {
                    self.add_residual_block(
                        program,
                        stage * self.shape.sizes.blocks + number,
                        block,
                    );
                }
            });
        }
    }

    fn add_stem(&self, program: &mut Program) {
        let (shape, network) = (self.shape, self.network);
        let (conv, columns) = (&network.stem, padded_stem_columns(network));
        launch_stem_gemm(program, conv, shape.b, columns, &currents_region_name(0));
        if let Some(merged) = self.merged {
            return (merged.stem)(self, program);
        }
        let map = conv.window.output;
        let neurons = shape.b * map.elements();
        let (currents, spikes) = (currents_region_name(0), layer_spikes_name(0));
        let arguments = (
            (&currents, self.bias_address(program, conv), &spikes, long_operand(neurons)),
            int_operands([map.channels, shape.fed_time_steps()]),
            shape.spread_steps() as f32,
            neuron_launch_arguments(shape),
        );
        let launch = program.kernel_launch(&STEM_KERNEL, &self.grid_of_pairs(neurons), arguments);
        program.add(launch.programmatic());
    }

    fn add_pooling(&self, program: &mut Program) {
        let Some(pool) = &self.network.pool else { return };
        let outputs = self.shape.b * pool.output.elements();
        let inputs = self.shape.b * pool.input.elements();
        let arguments = (
            (&layer_spikes_name(0), "pooled", self.training_region_or_null(program, POOLED_TAPS)),
            (long_operand(outputs), long_operand(inputs)),
            int_operands([pool.input.side, pool.input.channels, pool.output.side]),
        );
        let launch = program
            .kernel_launch(&POOL_KERNEL, &self.grid_of_pairs(outputs), arguments)
            .programmatic();
        program.in_range("MaxPool", |program| program.add(launch));
    }

    fn add_residual_block(&self, program: &mut Program, number: usize, block: &ResidualBlock) {
        let input = block_input_name(self.network, number);
        let (hidden, output) = (2 * number + 1, 2 * number + 2);
        self.add_convolution_and_neurons(program, &block.first, &input, None, hidden);
        self.add_convolution_and_neurons(
            program,
            &block.second,
            &layer_spikes_name(hidden),
            Some((block, &input)),
            output,
        );
    }

    /// Adds a convolution with its neurons to the program. At the end of a block, which reads
    /// `input`, the residual is added.
    fn add_convolution_and_neurons(
        &self,
        program: &mut Program,
        conv: &ConvolutionLayer,
        from: &str,
        end: Option<(&ResidualBlock, &str)>,
        to: usize,
    ) {
        let (shape, window) = (self.shape, conv.window);
        let shortcut = end.and_then(|(block, input)| Some((block.shortcut.as_ref()?, input)));
        let (second, sizes) = match shortcut {
            Some((conv, input)) => {
                let ConvolutionLayer { window, .. } = conv;
                let sizes = [window.input.side, window.input.channels, window.stride];
                ([program.at(input).into(), weight_address(program, conv)], sizes)
            }
            None => ([NULL; 2], [0; 3]),
        };
        let identity = end.filter(|(block, _)| block.shortcut.is_none());
        let columns = live_weight_columns(conv);
        let input = [window.input.side, window.input.channels, window.kernel, window.stride];
        let output = [window.output.side, window.output.channels];
        let arguments = (
            (from, weight_address(program, conv), int(columns), int_operands(input)),
            (second, int_operands(sizes)),
            identity.map_or(NULL, |(_, input)| program.at(input).into()),
            self.bias_address(program, conv),
            shortcut.map_or(NULL, |(conv, _)| self.bias_address(program, conv)),
            (
                &layer_spikes_name(to),
                self.training_region_or_null(program, &currents_region_name(to)),
            ),
            (int(shape.b), int_operands(output), int(shape.fed_time_steps())),
            if self.training { shape.spread_steps() as f32 } else { 1.0 },
            neuron_launch_arguments(shape),
        );
        let grid = self.tile_grid(window.output.pixel_count(), window.output.channels);
        let launch = program
            .kernel_launch(&LAYER_KERNEL, &grid, arguments)
            .or(&WIDE_LAYER_KERNEL, &grid, wide_is_faster(&WIDE_LAYER_KERNEL, grid))
            .programmatic();
        program.in_range(&conv.name, |program| program.add(launch));
    }

    /// Adds the classifier to the program; in training it also computes the gradient of the last
    /// currents.
    fn launch_classifier(&self, program: &mut Program, logits: Operand) {
        let (shape, network) = (self.shape, self.network);
        let map = network.last_map();
        let last = 2 * network.blocks.len();
        let (weight, bias, share) = if self.training {
            let share = shape.fed_time_steps() as f32 / shape.spread_steps() as f32;
            let [weight, bias] = classifier_parameters(program, network);
            (weight, bias, share)
        } else {
            let [weight, bias] = ["fc.weight", "fc.bias"].map(|name| program.at(name).into());
            (weight, bias, shape.fed_time_steps() as f32)
        };
        let trained = |name: &str| self.training_region_or_null(program, name);
        let scale = (shape.neuron().threshold / map.pixel_count() as f64) as f32;
        let arguments = (
            (&layer_spikes_name(last), weight, bias, logits),
            [trained("labels"), trained("features")],
            [trained(&currents_region_name(last)), trained(&currents_gradient_name(last))],
            int_operands([shape.b, CLASS_COUNT, map.pixel_count(), map.channels]),
            (scale, share),
            neuron_launch_arguments(shape),
        );
        let grid = TileGrid { steps: shape.t, blocks: [shape.b, 1] };
        let launch = program.kernel_launch(&CLASSIFIER_TAIL, &grid, arguments);
        program.add(launch.programmatic());
    }
}

/// Address of a parameter in a training step.
pub fn training_parameter(program: &Program, index: usize) -> Operand {
    program.at("parameters").offset_by(index * Dtype::F32.bytes()).into()
}

/// Addresses of the classifier's weight and bias in a training step.
pub fn classifier_parameters(program: &Program, network: &ResNet18) -> [Operand; 2] {
    let bias = network.classifier + CLASS_COUNT * network.last_map().channels;
    [network.classifier, bias].map(|index| training_parameter(program, index))
}

/// Address of a convolution's weight from tap 0 on. Taps before the first live one are neither
/// stored nor read.
pub fn weight_address(program: &Program, conv: &ConvolutionLayer) -> Operand {
    let before = conv.window.taps_that_read_pixels().start * conv.window.input.channels;
    program.at(&weight_region_name(conv)).address_before(before * Dtype::Bf16.bytes()).into()
}

/// Arguments of a kernel's neurons: θ and Tmax.
pub fn neuron_launch_arguments(shape: &NetworkShape) -> [Operand; 2] {
    let neuron = shape.neuron();
    [Operand::from(neuron.threshold as f32), Operand::from(neuron.tracer_max)]
}
