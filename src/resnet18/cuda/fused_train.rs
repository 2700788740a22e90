//! A training step of ResNet-18 with one kernel for each layer: the forward pass of `fused` with
//! its currents stored, `kernels/resnet18/fused_backward.cu`, and the operations on all parameters
//! at once in `kernels/resnet18/fused_step.cu`.

use std::rc::Rc;

use super::best;
use super::fused::{
    FusedForward, activation_regions, currents_gradient_name, currents_region_name,
    declare_activations, declare_stem_operand, neuron_launch_arguments, weight_address,
};
use super::kernel_weights::{live_weight_columns, weight_columns, weight_region_name};
use super::parameter_jobs::{
    GRADIENT_BUCKETS, GradientBuckets, JobLists, PACKETS_PER_THREAD, classifier_gradient_pointers,
    declare_gradient_parts,
};
use super::per_op::{POOLED_TAPS, STAGE_RANGES};
use super::tiles::{
    SHARED_BYTES_PER_GROUP, THREADS, THREADS_PER_GROUP, TileGrid, four_group_build, tile_constants,
    tiled_kernel, wide_is_faster,
};
use super::train::{CLASSIFIER_KERNEL, LOSS_KERNEL, TrainingTensors};
use crate::collective::InPlaceSum;
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::{LEARNING_RATE, NetworkShape, SGD_MOMENTUM};
use crate::resnet18::network::{
    CLASS_COUNT, ConvolutionLayer, ConvolutionWindow, ResNet18, ResidualBlock,
};
use kernelgate::backend::program::{
    KernelLaunch, Lane, MemoryPurpose, NULL, Operand, Operands, Program, int, int_operands,
    long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// All kernels of the backward pass.
pub const KERNELS: &[KernelSpec<TileGrid>] =
    &[BLOCK_KERNEL, WIDE_BLOCK_KERNEL, STEM_BACKWARD_KERNEL];
/// Kernels over all parameters; their parameter is the number of blocks.
pub const STEP_KERNELS: &[KernelSpec<usize>] =
    &[PACK_KERNEL, WEIGHT_GRADIENTS, SUM_PARTS, SGD_KERNEL];

const BLOCK_KERNEL: KernelSpec<TileGrid> =
    tiled_kernel(kernel_file("resnet18/fused_backward"), "resnet18_fused_block_backward");
const WIDE_BLOCK_KERNEL: KernelSpec<TileGrid> = four_group_build(BLOCK_KERNEL);
const STEM_BACKWARD_KERNEL: KernelSpec<TileGrid> =
    KernelSpec { symbol: "resnet18_fused_stem_backward", shared_bytes: |_| 0, ..BLOCK_KERNEL };

const WEIGHT_GRADIENTS: KernelSpec<usize> = KernelSpec {
    constants: |_| {
        [tile_constants(THREADS_PER_GROUP), vec![("PACKETS", PACKETS_PER_THREAD)]].concat()
    },
    shared_bytes: |_| SHARED_BYTES_PER_GROUP,
    variants: || vec![1],
    ..KernelSpec::new(
        kernel_file("resnet18/fused_step"),
        "resnet18_fused_weight_gradients",
        THREADS_PER_GROUP,
        |blocks| [*blocks, 1, 1],
    )
};
const PACK_KERNEL: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_fused_pack", shared_bytes: |_| 0, ..WEIGHT_GRADIENTS };
const SUM_PARTS: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_fused_sum_parts", ..PACK_KERNEL };
const SGD_KERNEL: KernelSpec<usize> = KernelSpec { symbol: "resnet18_fused_sgd", ..PACK_KERNEL };

/// Exchange of gradient buckets between GPUs, concurrently with the backward pass.
struct BucketExchange {
    buckets: GradientBuckets,
    /// Lane in which the sums over GPUs run.
    lane: Lane,
    /// Lane in which the gradients of all buckets but the last are computed.
    early_gradients: Lane,
    /// The sum over GPUs for each bucket of gradients.
    sums: Vec<Rc<InPlaceSum>>,
    /// Fraction of all images that this GPU has.
    share: f32,
}

/// Sums over GPUs in a training step, one for each bucket of gradients.
pub fn gradient_sums_by_bucket(shape: &NetworkShape, gpus: usize) -> Vec<Rc<InPlaceSum>> {
    let buckets = GradientBuckets::new(&shape.sizes.build_network(), shape.sizes.blocks, gpus);
    buckets.bucket_bytes().iter().map(|bytes| InPlaceSum::new(gpus, *bytes)).collect()
}

/// Declares all regions except inputs, outputs and job lists.
fn declare_training_regions(
    program: &mut Program,
    shape: &NetworkShape,
    network: &ResNet18,
    merged: bool,
    buckets: Option<&GradientBuckets>,
) {
    use MemoryPurpose::{Activations, Gradients, Weights};
    declare_stem_operand(program, shape, network);
    let written = match merged {
        true => best::regions_written_forward(shape, network, true, true),
        false => activation_regions(shape, network, true),
    };
    declare_activations(program, written);
    for conv in network.block_convolutions() {
        let elements = conv.window.output.channels * weight_columns(network, conv);
        program.add_scratch(weight_region_name(conv), Weights, elements * Dtype::Bf16.bytes());
    }
    for (layer, map) in network.neuron_layer_extents().iter().enumerate() {
        let frames = if layer == 0 { shape.b } else { shape.frame_count() };
        let bytes = frames * map.elements() * Dtype::Bf16.bytes();
        program.add_scratch(currents_gradient_name(layer), Gradients, bytes);
    }
    let features = network.last_map().channels;
    let first = network.pool.as_ref().unwrap_or(&network.stem.window).output;
    let mut f32s = |name: &'static str, purpose: MemoryPurpose, count: usize| {
        program.add_scratch(name, purpose, count * Dtype::F32.bytes());
    };
    f32s("spikes_gradient", Gradients, shape.frame_count() * first.elements());
    f32s("logits_gradient", Gradients, shape.b * CLASS_COUNT);
    f32s("features", Activations, shape.b * features);
    match buckets {
        Some(buckets) => buckets.declare_bucket_regions(program),
        None => {
            f32s("fc.weight_gradient", Gradients, CLASS_COUNT * features);
            f32s("fc.bias_gradient", Gradients, CLASS_COUNT);
        }
    }
    declare_gradient_parts(program, shape, network, buckets);
    if merged {
        best::declare_weight_tiles(program, network);
    }
}

/// Program of a training step whose forward pass has one launch for each layer.
pub fn training_program(shape: &NetworkShape) -> Program {
    write_training_program(Program::new(), shape, false, None)
}

/// Program of a training step whose forward pass computes all layers in one launch.
pub fn merged_launches(shape: &NetworkShape) -> Program {
    write_training_program(Program::new(), shape, true, None)
}

/// Program of a training step on one GPU; the sums of gradients over GPUs have their own lane.
pub fn launches_of_one_gpu(
    shape: &NetworkShape,
    gpus: usize,
    sums: Vec<Rc<InPlaceSum>>,
) -> Program {
    let mut program = Program::new();
    let exchanged = BucketExchange {
        buckets: GradientBuckets::new(&shape.sizes.build_network(), shape.sizes.blocks, gpus),
        lane: program.lane(),
        early_gradients: program.lane(),
        sums,
        share: 1.0 / gpus as f32,
    };
    write_training_program(program, shape, true, Some(exchanged))
}

fn write_training_program(
    mut program: Program,
    shape: &NetworkShape,
    merged: bool,
    exchanged: Option<BucketExchange>,
) -> Program {
    let network = shape.sizes.build_network();
    let tensors = TrainingTensors::declare_training_tensors(&mut program, shape, &network);
    let buckets = exchanged.as_ref().map(|all| &all.buckets);
    declare_training_regions(&mut program, shape, &network, merged, buckets);
    let share = exchanged.as_ref().map_or(1.0, |all| all.share);
    let jobs = JobLists::new(shape, &network, &program, buckets, share);
    jobs.declare_job_regions(&mut program);
    if merged {
        best::declare_layer_lists(&mut program, shape, &network, true);
    }
    let merged = merged.then_some(&best::MERGED_LAYERS);
    let forward = FusedForward { shape, network: &network, training: true, merged };
    FusedTrainStepWriter { forward, tensors, jobs, exchanged }.add_training_step(&mut program);
    program
}

/// Writes the launches of a training step.
struct FusedTrainStepWriter<'a> {
    forward: FusedForward<'a>,
    tensors: TrainingTensors,
    jobs: JobLists,
    exchanged: Option<BucketExchange>,
}

impl FusedTrainStepWriter<'_> {
    fn add_training_step(&self, program: &mut Program) {
        let TrainingTensors { logits, parameters, momentum, new_parameters, new_momentum, .. } =
            self.tensors;
        program.in_range("Weight_Rounding", |program| {
            let pack = self.job_list_launch(program, &PACK_KERNEL, "pack", ());
            program.add(pack.programmatic());
        });
        self.forward.add_forward_pass(program, logits.into());
        program.in_range("Backward", |program| self.add_backward_pass(program));
        program.in_range("Optimizer", |program| {
            let tensors = [parameters, momentum, new_parameters, new_momentum];
            let rest = (tensors, SGD_MOMENTUM, LEARNING_RATE);
            let update = self.job_list_launch(program, &SGD_KERNEL, "sgd0", rest);
            // The parameter update also waits for the sums over GPUs. The last sum runs
            // concurrently with the update of earlier parameters.
            if let Some(exchanged) = &self.exchanged {
                program.add(update);
                program.wait(Lane::MAIN_LANE, exchanged.lane);
                let last = self.job_list_launch(program, &SGD_KERNEL, "sgd1", rest);
                program.add(last);
            } else {
                program.add(update.programmatic());
            }
        });
    }

    /// The launch of a kernel that processes the jobs of a list for all parameters.
    fn job_list_launch(
        &self,
        program: &Program,
        kernel: &KernelSpec<usize>,
        list: &str,
        rest: impl Operands,
    ) -> KernelLaunch {
        let [jobs, owners] = JobLists::job_list_region_names(list);
        program.kernel_launch(kernel, &self.jobs.block_count(list), (&jobs, &owners, rest))
    }

    /// Adds the gradients of a bucket's weights, and their sum over GPUs, which runs concurrently
    /// with later launches. The backward pass waits for no gradients but those of the last bucket.
    fn weight_gradients_of_bucket(&self, program: &mut Program, bucket: usize) {
        let last = bucket + 1 == GRADIENT_BUCKETS;
        let early = self.exchanged.as_ref().filter(|_| !last).map(|all| all.early_gradients);
        let lane = early.unwrap_or(Lane::MAIN_LANE);
        if early.is_some() {
            program.wait(lane, Lane::MAIN_LANE);
        }
        program.in_range("Weight_Gradients", |program| {
            let list = format!("gradients{bucket}");
            let gradients =
                self.job_list_launch(program, &WEIGHT_GRADIENTS, &list, ()).in_lane(lane);
            program.add(if early.is_some() { gradients } else { gradients.programmatic() });
            let sums = format!("sums{bucket}");
            if self.jobs.block_count(&sums) > 0 {
                let sum = self.job_list_launch(program, &SUM_PARTS, &sums, ()).in_lane(lane);
                program.add(sum.programmatic());
            }
        });
        let Some(exchanged) = &self.exchanged else { return };
        if last {
            program.wait(Lane::MAIN_LANE, exchanged.lane);
        }
        program.wait(exchanged.lane, lane);
        let whole = program.at(&GradientBuckets::region_name(bucket));
        program.call(exchanged.lane, &[whole], exchanged.sums[bucket].enqueue_step_of_next_gpu());
    }

    fn add_backward_pass(&self, program: &mut Program) {
        program.in_range("Final_Layers", |program| self.add_classifier_gradients(program));
        let network = self.forward.network;
        let in_stage = self.forward.shape.sizes.blocks;
        let stages = network.blocks.chunks(in_stage).enumerate().rev();
        for (after, (stage, blocks)) in stages.enumerate() {
            program.in_range(STAGE_RANGES[stage], |program| {
                for (i, block) in blocks.iter().enumerate().rev() {
                    let number = stage * in_stage + i;
                    let (hidden, output) = (2 * number + 1, 2 * number + 2);
                    self.add_layer_gradient(program, &block.second, output, None, hidden);
                    let begin = Some((block, output));
                    self.add_layer_gradient(program, &block.first, hidden, begin, 2 * number);
                }
            });
            if self.exchanged.is_some() && after + 1 < GRADIENT_BUCKETS {
                self.weight_gradients_of_bucket(program, after);
            }
        }
        program.in_range("Conv1_Block", |program| self.add_stem_backward(program));
        self.weight_gradients_of_bucket(
            program,
            self.exchanged.as_ref().map_or(0, |_| GRADIENT_BUCKETS - 1),
        );
    }

    /// Adds the loss and the classifier's gradients to the program; the tail kernel computes the
    /// gradient of the last currents.
    fn add_classifier_gradients(&self, program: &mut Program) {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let (b, channels) = (shape.b, network.last_map().channels);
        let TrainingTensors { logits, labels, loss, .. } = self.tensors;
        let arguments = (logits, labels, loss, "logits_gradient", int_operands([b, CLASS_COUNT]));
        program.add_launch(&LOSS_KERNEL, &1, arguments);
        let weights = CLASS_COUNT * channels;
        let buckets = self.exchanged.as_ref().map(|all| &all.buckets);
        let [weight, bias] = classifier_gradient_pointers(network, program, buckets);
        let gradients = (weight, bias, long_operand(weights));
        let arguments =
            ("logits_gradient", "features", gradients, int_operands([b, CLASS_COUNT, channels]));
        program.add_launch(&CLASSIFIER_KERNEL, &weights, arguments);
    }

    /// Computes the gradient of the currents of the layer whose spikes a convolution read, from the
    /// gradient of the convolution's currents; at the beginning of a block it adds the input's
    /// gradient from the block's end, layer `.1`.
    fn add_layer_gradient(
        &self,
        program: &mut Program,
        conv: &ConvolutionLayer,
        from: usize,
        begin: Option<(&ResidualBlock, usize)>,
        to: usize,
    ) {
        let (shape, window) = (self.forward.shape, conv.window);
        let at = |name: &str| Operand::from(program.at(name));
        let outputs = |window: ConvolutionWindow| [window.output.side, window.output.channels];
        let end = begin.map(|(_, layer)| at(&currents_gradient_name(layer)));
        let shortcut = begin.and_then(|(block, _)| block.shortcut.as_ref());
        let (second, sizes, identity) = match (shortcut, end) {
            (Some(conv), Some(end)) => {
                let [side, channels] = outputs(conv.window);
                let sizes = [live_weight_columns(conv), side, channels, conv.window.stride];
                ([end, weight_address(program, conv)], sizes, NULL)
            }
            (_, end) => ([NULL; 2], [0; 4], end.unwrap_or(NULL)),
        };
        let written = match to {
            0 => [NULL, NULL, at("spikes_gradient")],
            to => [at(&currents_region_name(to)), at(&currents_gradient_name(to)), NULL],
        };
        let arguments = (
            (
                &currents_gradient_name(from),
                weight_address(program, conv),
                int(live_weight_columns(conv)),
            ),
            (int_operands(outputs(window)), int_operands([window.kernel, window.stride])),
            (second, int_operands(sizes), identity),
            written,
            int_operands([shape.b, window.input.side, window.input.channels]),
            neuron_launch_arguments(shape),
        );
        let grid = self.forward.tile_grid(window.input.pixel_count(), window.input.channels);
        let launch = program
            .kernel_launch(&BLOCK_KERNEL, &grid, arguments)
            .or(&WIDE_BLOCK_KERNEL, &grid, wide_is_faster(&WIDE_BLOCK_KERNEL, grid))
            .programmatic();
        program.in_range(&conv.name, |program| program.add(launch));
    }

    /// Adds the backward pass of the pooling and of the stem's neurons to the program.
    fn add_stem_backward(&self, program: &mut Program) {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let map = network.stem.window.output;
        let neurons = shape.b * map.elements();
        let (sources, pooled) = match &network.pool {
            Some(pool) => (program.at(POOLED_TAPS).into(), pool.output),
            None => (NULL, map),
        };
        let outputs = shape.b * pooled.elements();
        let arguments = (
            (&currents_region_name(0), self.forward.bias_address(program, &network.stem)),
            ("spikes_gradient", sources, &currents_gradient_name(0)),
            (long_operand(neurons), long_operand(outputs)),
            int_operands([map.side, map.channels, pooled.side, shape.fed_time_steps()]),
            shape.spread_steps() as f32,
            neuron_launch_arguments(shape),
        );
        let grid = TileGrid { steps: shape.t, blocks: [neurons.div_ceil(THREADS), 1] };
        let launch = program.kernel_launch(&STEM_BACKWARD_KERNEL, &grid, arguments);
        program.add(launch.programmatic());
    }
}
