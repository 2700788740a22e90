//! A ResNet-18 training step with one kernel for each layer: the forward pass of `fused`, layer
//! gradients from `fused_backward.cu`, and parameter kernels from `fused_step.cu`.

use std::rc::Rc;

use super::best;
use super::fused::{
    FusedForwardBuilder, declare_activation_regions, declare_stem_operand_region,
    fused_activation_regions, name_of_currents_gradient_region, name_of_currents_region,
    threshold_and_tracer_max_arguments, weight_address_from_tap_zero,
};
use super::kernel_weights::{
    name_of_weight_region, packed_weight_columns, weight_columns_that_read_pixels,
};
use super::parameter_jobs::{
    GRADIENT_BUCKET_COUNT, GradientBucketLayout, PACKETS_PER_JOB_THREAD, ParameterJobLists,
    addresses_of_classifier_gradients, declare_gradient_part_regions,
};
use super::per_op::{POOLING_MAXIMUM_TAPS_REGION, STAGE_NVTX_RANGES};
use super::tiles::{
    SHARED_BYTES_PER_TILE_GROUP, THREADS_PER_TILE_GROUP, TWO_GROUP_BLOCK_THREADS,
    TileKernelParameters, chooses_four_groups_on_device, four_group_variant_of_kernel,
    tile_kernel_macros, two_group_tile_kernel,
};
use super::train::{CLASSIFIER_GRADIENTS_KERNEL, CROSS_ENTROPY_LOSS_KERNEL, TrainingStepTensors};
use crate::collective::InPlaceAllReduce;
use crate::kernel_files::source_of_kernel_file;
use crate::resnet18::definition::{ResNetParameters, SGD_LEARNING_RATE, SGD_MOMENTUM};
use crate::resnet18::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, ResNet18Layers, ResNetBlock, SlidingWindow,
};
use kernelgate::backend::program::{
    KernelLaunchStep, LaunchArgument, LaunchArgumentList, LaunchProgram, MemoryPurpose, NULL,
    ProgramLane, int_operand, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Kernels of the fused backward pass through layers.
pub const FUSED_BACKWARD_KERNELS: &[KernelSpec<TileKernelParameters>] =
    &[LAYER_BACKWARD_KERNEL, FOUR_GROUP_LAYER_BACKWARD_KERNEL, STEM_AND_POOLING_BACKWARD_KERNEL];
/// Kernels that process all parameters in one launch (pack, weight gradients, sums, SGD); the
/// launch parameter is the number of blocks.
pub const ALL_PARAMETER_KERNELS: &[KernelSpec<usize>] = &[
    PACK_ALL_PARAMETERS_KERNEL,
    ALL_WEIGHT_GRADIENTS_KERNEL,
    SUM_PARTIAL_GRADIENTS_KERNEL,
    SGD_ON_ALL_PARAMETERS_KERNEL,
];

const LAYER_BACKWARD_KERNEL: KernelSpec<TileKernelParameters> = two_group_tile_kernel(
    source_of_kernel_file("resnet18/fused_backward"),
    "resnet18_fused_block_backward",
);
const FOUR_GROUP_LAYER_BACKWARD_KERNEL: KernelSpec<TileKernelParameters> =
    four_group_variant_of_kernel(LAYER_BACKWARD_KERNEL);
const STEM_AND_POOLING_BACKWARD_KERNEL: KernelSpec<TileKernelParameters> = KernelSpec {
    kernel_symbol: "resnet18_fused_stem_backward",
    dynamic_shared_bytes: |_| 0,
    ..LAYER_BACKWARD_KERNEL
};

const ALL_WEIGHT_GRADIENTS_KERNEL: KernelSpec<usize> = KernelSpec {
    constant_macros: |_| {
        [tile_kernel_macros(THREADS_PER_TILE_GROUP), vec![("PACKETS", PACKETS_PER_JOB_THREAD)]]
            .concat()
    },
    dynamic_shared_bytes: |_| SHARED_BYTES_PER_TILE_GROUP,
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        source_of_kernel_file("resnet18/fused_step"),
        "resnet18_fused_weight_gradients",
        THREADS_PER_TILE_GROUP,
        |blocks| [*blocks, 1, 1],
    )
};
const PACK_ALL_PARAMETERS_KERNEL: KernelSpec<usize> = KernelSpec {
    kernel_symbol: "resnet18_fused_pack",
    dynamic_shared_bytes: |_| 0,
    ..ALL_WEIGHT_GRADIENTS_KERNEL
};
const SUM_PARTIAL_GRADIENTS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_fused_sum_parts", ..PACK_ALL_PARAMETERS_KERNEL };
const SGD_ON_ALL_PARAMETERS_KERNEL: KernelSpec<usize> =
    KernelSpec { kernel_symbol: "resnet18_fused_sgd", ..PACK_ALL_PARAMETERS_KERNEL };

/// Data of the all-reduce of gradient buckets over the GPUs, which runs concurrently with the
/// backward pass.
struct GradientBucketAllReduce {
    buckets: GradientBucketLayout,
    /// Lane (parallel branch of the program) in which the all-reduces over GPUs run.
    all_reduce_lane: ProgramLane,
    /// Lane (parallel branch of the program) in which the weight gradients of all buckets but the
    /// last are computed.
    early_weight_gradient_lane: ProgramLane,
    /// The all-reduce over GPUs for each bucket of gradients.
    all_reduce_of_bucket: Vec<Rc<InPlaceAllReduce>>,
    /// Fraction of all images that one GPU processes, 1 / number of GPUs.
    image_fraction_per_gpu: f32,
}

/// Creates the all-reduces over GPUs of a training step, one for each bucket of gradients.
pub fn all_reduces_of_gradient_buckets(
    shape: &ResNetParameters,
    gpus: usize,
) -> Vec<Rc<InPlaceAllReduce>> {
    let buckets = GradientBucketLayout::divide_network_gradients_into_buckets(
        &shape.sizes.build_resnet18_layers(),
        shape.sizes.blocks_per_stage,
        gpus,
    );
    buckets
        .bytes_of_each_bucket()
        .iter()
        .map(|bytes| InPlaceAllReduce::f32_sum_over_gpus(gpus, *bytes))
        .collect()
}

/// Adds all memory regions of a fused training step except inputs, outputs and job lists.
fn declare_fused_training_regions(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    merged: bool,
    buckets: Option<&GradientBucketLayout>,
) {
    use MemoryPurpose::{Activations, Gradients, Weights};
    declare_stem_operand_region(program, shape, network);
    let written = match merged {
        true => best::activation_regions_of_best_rung(shape, network, true, true),
        false => fused_activation_regions(shape, network, true),
    };
    declare_activation_regions(program, written);
    for conv in network.all_convolutions() {
        let elements = conv.window.output_extents.channels * packed_weight_columns(network, conv);
        program.add_scratch(
            name_of_weight_region(conv),
            Weights,
            elements * Dtype::Bf16.bytes_per_element(),
        );
    }
    for (layer, map) in network.extents_of_neuron_layers().iter().enumerate() {
        let frames = if layer == 0 { shape.batch_size } else { shape.frames_over_all_time_steps() };
        let bytes = frames * map.elements_per_frame() * Dtype::Bf16.bytes_per_element();
        program.add_scratch(name_of_currents_gradient_region(layer), Gradients, bytes);
    }
    let features = network.last_feature_map().channels;
    let first = network.pool.as_ref().unwrap_or(&network.stem.window).output_extents;
    let mut f32s = |name: &'static str, purpose: MemoryPurpose, count: usize| {
        program.add_scratch(name, purpose, count * Dtype::F32.bytes_per_element());
    };
    f32s(
        "spikes_gradient",
        Gradients,
        shape.frames_over_all_time_steps() * first.elements_per_frame(),
    );
    f32s("logits_gradient", Gradients, shape.batch_size * CLASSIFIER_CLASS_COUNT);
    f32s("features", Activations, shape.batch_size * features);
    match buckets {
        Some(buckets) => buckets.declare_memory_regions_of_buckets(program),
        None => {
            f32s("fc.weight_gradient", Gradients, CLASSIFIER_CLASS_COUNT * features);
            f32s("fc.bias_gradient", Gradients, CLASSIFIER_CLASS_COUNT);
        }
    }
    declare_gradient_part_regions(program, shape, network, buckets);
    if merged {
        best::declare_tiled_weight_regions(program, network);
    }
}

/// Program of a training step whose forward pass has one launch for each layer.
pub fn fused_training_program(shape: &ResNetParameters) -> LaunchProgram {
    build_training_program(LaunchProgram::new(), shape, false, None)
}

/// Program of a training step whose forward pass computes all layers after the stem in one launch.
pub fn best_rung_training_program(shape: &ResNetParameters) -> LaunchProgram {
    build_training_program(LaunchProgram::new(), shape, true, None)
}

/// Program of one GPU of a data-parallel training step; its all-reduces of gradients run in a lane
/// of their own.
pub fn data_parallel_training_program_of_one_gpu(
    shape: &ResNetParameters,
    gpus: usize,
    sums: Vec<Rc<InPlaceAllReduce>>,
) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    let exchanged = GradientBucketAllReduce {
        buckets: GradientBucketLayout::divide_network_gradients_into_buckets(
            &shape.sizes.build_resnet18_layers(),
            shape.sizes.blocks_per_stage,
            gpus,
        ),
        all_reduce_lane: program.add_lane(),
        early_weight_gradient_lane: program.add_lane(),
        all_reduce_of_bucket: sums,
        image_fraction_per_gpu: 1.0 / gpus as f32,
    };
    build_training_program(program, shape, true, Some(exchanged))
}

fn build_training_program(
    mut program: LaunchProgram,
    shape: &ResNetParameters,
    merged: bool,
    exchanged: Option<GradientBucketAllReduce>,
) -> LaunchProgram {
    let network = shape.sizes.build_resnet18_layers();
    let tensors = TrainingStepTensors::declare_inputs_and_outputs(&mut program, shape, &network);
    let buckets = exchanged.as_ref().map(|all| &all.buckets);
    declare_fused_training_regions(&mut program, shape, &network, merged, buckets);
    let share = exchanged.as_ref().map_or(1.0, |all| all.image_fraction_per_gpu);
    let jobs =
        ParameterJobLists::create_jobs_for_training_step(shape, &network, &program, buckets, share);
    jobs.declare_job_list_regions(&mut program);
    if merged {
        best::declare_layer_table_and_exchange_buffers(&mut program, shape, &network, true);
    }
    let merged = merged.then_some(&best::BEST_RUNG_MERGED_LAYERS);
    let forward = FusedForwardBuilder {
        shape,
        network: &network,
        training: true,
        merged_layer_launches: merged,
    };
    FusedTrainingStepBuilder { forward, tensors, jobs, bucket_all_reduce: exchanged }
        .add_whole_training_step(&mut program);
    program
}

/// Adds the launches of a fused ResNet-18 training step to a program.
struct FusedTrainingStepBuilder<'a> {
    forward: FusedForwardBuilder<'a>,
    tensors: TrainingStepTensors,
    jobs: ParameterJobLists,
    bucket_all_reduce: Option<GradientBucketAllReduce>,
}

impl FusedTrainingStepBuilder<'_> {
    fn add_whole_training_step(&self, program: &mut LaunchProgram) {
        let TrainingStepTensors {
            logits,
            old_parameters: parameters,
            old_momentum: momentum,
            new_parameters,
            new_momentum,
            ..
        } = self.tensors;
        program.add_steps_in_named_range("Weight_Rounding", |program| {
            let pack =
                self.create_job_list_launch(program, &PACK_ALL_PARAMETERS_KERNEL, "pack", ());
            program.add_prepared_launch(pack.with_programmatic_dependent_launch());
        });
        self.forward.add_fused_forward_pass(program, logits.into());
        program
            .add_steps_in_named_range("Backward", |program| self.add_fused_backward_pass(program));
        program.add_steps_in_named_range("Optimizer", |program| {
            let tensors = [parameters, momentum, new_parameters, new_momentum];
            let rest = (tensors, SGD_MOMENTUM, SGD_LEARNING_RATE);
            let update =
                self.create_job_list_launch(program, &SGD_ON_ALL_PARAMETERS_KERNEL, "sgd0", rest);
            // In data-parallel training, the SGD update waits for the all-reduce of each bucket
            // whose parameters it updates. The last all-reduce over GPUs runs concurrently with the
            // SGD update of the parameters of earlier buckets.
            if let Some(exchanged) = &self.bucket_all_reduce {
                program.add_prepared_launch(update);
                program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, exchanged.all_reduce_lane);
                let last = self.create_job_list_launch(
                    program,
                    &SGD_ON_ALL_PARAMETERS_KERNEL,
                    "sgd1",
                    rest,
                );
                program.add_prepared_launch(last);
            } else {
                program.add_prepared_launch(update.with_programmatic_dependent_launch());
            }
        });
    }

    /// Creates the launch of a kernel that processes all jobs of a named job list, such as one job
    /// for each parameter.
    fn create_job_list_launch(
        &self,
        program: &LaunchProgram,
        kernel: &KernelSpec<usize>,
        list: &str,
        rest: impl LaunchArgumentList,
    ) -> KernelLaunchStep {
        let [jobs, owners] = ParameterJobLists::names_of_job_list_regions(list);
        program.make_kernel_launch(
            kernel,
            &self.jobs.block_count_of_job_list(list),
            (&jobs, &owners, rest),
        )
    }

    /// Adds the launches for the weight gradients of one bucket and, in data-parallel training, for
    /// the bucket's all-reduce, which runs concurrently with later launches. The backward pass
    /// waits only for the weight gradients of the last bucket.
    fn add_weight_gradients_and_all_reduce_of_bucket(
        &self,
        program: &mut LaunchProgram,
        bucket: usize,
    ) {
        let last = bucket + 1 == GRADIENT_BUCKET_COUNT;
        let early = self
            .bucket_all_reduce
            .as_ref()
            .filter(|_| !last)
            .map(|all| all.early_weight_gradient_lane);
        let lane = early.unwrap_or(ProgramLane::MAIN_LANE);
        if early.is_some() {
            program.make_lane_wait_for_lane(lane, ProgramLane::MAIN_LANE);
        }
        program.add_steps_in_named_range("Weight_Gradients", |program| {
            let list = format!("gradients{bucket}");
            let gradients = self
                .create_job_list_launch(program, &ALL_WEIGHT_GRADIENTS_KERNEL, &list, ())
                .moved_to_lane(lane);
            program.add_prepared_launch(if early.is_some() {
                gradients
            } else {
                gradients.with_programmatic_dependent_launch()
            });
            let sums = format!("sums{bucket}");
            if self.jobs.block_count_of_job_list(&sums) > 0 {
                let sum = self
                    .create_job_list_launch(program, &SUM_PARTIAL_GRADIENTS_KERNEL, &sums, ())
                    .moved_to_lane(lane);
                program.add_prepared_launch(sum.with_programmatic_dependent_launch());
            }
        });
        let Some(exchanged) = &self.bucket_all_reduce else { return };
        if last {
            program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, exchanged.all_reduce_lane);
        }
        program.make_lane_wait_for_lane(exchanged.all_reduce_lane, lane);
        let whole = program.pointer_to(&GradientBucketLayout::name_of_bucket_region(bucket));
        program.add_launch_of_other_code(
            exchanged.all_reduce_lane,
            &[whole],
            exchanged.all_reduce_of_bucket[bucket].prepare_launch_on_next_rank(),
        );
    }

    fn add_fused_backward_pass(&self, program: &mut LaunchProgram) {
        program.add_steps_in_named_range("Final_Layers", |program| {
            self.add_loss_and_classifier_gradients(program)
        });
        let network = self.forward.network;
        let in_stage = self.forward.shape.sizes.blocks_per_stage;
        let stages = network.blocks.chunks(in_stage).enumerate().rev();
        for (after, (stage, blocks)) in stages.enumerate() {
            program.add_steps_in_named_range(STAGE_NVTX_RANGES[stage], |program| {
                for (i, block) in blocks.iter().enumerate().rev() {
                    let number = stage * in_stage + i;
                    let (hidden, output) = (2 * number + 1, 2 * number + 2);
                    self.add_layer_backward_launch(program, &block.second, output, None, hidden);
                    let begin = Some((block, output));
                    self.add_layer_backward_launch(
                        program,
                        &block.first,
                        hidden,
                        begin,
                        2 * number,
                    );
                }
            });
            if self.bucket_all_reduce.is_some() && after + 1 < GRADIENT_BUCKET_COUNT {
                self.add_weight_gradients_and_all_reduce_of_bucket(program, after);
            }
        }
        program.add_steps_in_named_range("Conv1_Block", |program| {
            self.add_stem_and_pooling_backward_launch(program)
        });
        self.add_weight_gradients_and_all_reduce_of_bucket(
            program,
            self.bucket_all_reduce.as_ref().map_or(0, |_| GRADIENT_BUCKET_COUNT - 1),
        );
    }

    /// Adds the launches of the loss and the classifier's parameter gradients; the classifier
    /// kernel of the forward pass has already computed the gradient of the last currents.
    fn add_loss_and_classifier_gradients(&self, program: &mut LaunchProgram) {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let (b, channels) = (shape.batch_size, network.last_feature_map().channels);
        let TrainingStepTensors { logits, labels, mean_loss: loss, .. } = self.tensors;
        let arguments =
            (logits, labels, loss, "logits_gradient", int_operands([b, CLASSIFIER_CLASS_COUNT]));
        program.add_launch(&CROSS_ENTROPY_LOSS_KERNEL, &1, arguments);
        let weights = CLASSIFIER_CLASS_COUNT * channels;
        let buckets = self.bucket_all_reduce.as_ref().map(|all| &all.buckets);
        let [weight, bias] = addresses_of_classifier_gradients(network, program, buckets);
        let gradients = (weight, bias, long_operand(weights));
        let arguments = (
            "logits_gradient",
            "features",
            gradients,
            int_operands([b, CLASSIFIER_CLASS_COUNT, channels]),
        );
        program.add_launch(&CLASSIFIER_GRADIENTS_KERNEL, &weights, arguments);
    }

    /// Adds the launch for the gradient of the input currents of layer `to`, whose spikes a
    /// convolution read; at a block's beginning, plus the residual's gradient from layer `begin.1`.
    fn add_layer_backward_launch(
        &self,
        program: &mut LaunchProgram,
        conv: &ConvolutionLayer,
        from: usize,
        begin: Option<(&ResNetBlock, usize)>,
        to: usize,
    ) {
        let (shape, window) = (self.forward.shape, conv.window);
        let at = |name: &str| LaunchArgument::from(program.pointer_to(name));
        let outputs = |window: SlidingWindow| {
            [window.output_extents.side_pixels, window.output_extents.channels]
        };
        let end = begin.map(|(_, layer)| at(&name_of_currents_gradient_region(layer)));
        let shortcut = begin.and_then(|(block, _)| block.shortcut.as_ref());
        let (second, sizes, identity) = match (shortcut, end) {
            (Some(conv), Some(end)) => {
                let [side, channels] = outputs(conv.window);
                let sizes = [
                    weight_columns_that_read_pixels(conv),
                    side,
                    channels,
                    conv.window.stride_pixels,
                ];
                ([end, weight_address_from_tap_zero(program, conv)], sizes, NULL)
            }
            (_, end) => ([NULL; 2], [0; 4], end.unwrap_or(NULL)),
        };
        let written = match to {
            0 => [NULL, NULL, at("spikes_gradient")],
            to => {
                [at(&name_of_currents_region(to)), at(&name_of_currents_gradient_region(to)), NULL]
            }
        };
        let arguments = (
            (
                &name_of_currents_gradient_region(from),
                weight_address_from_tap_zero(program, conv),
                int_operand(weight_columns_that_read_pixels(conv)),
            ),
            (
                int_operands(outputs(window)),
                int_operands([window.window_side, window.stride_pixels]),
            ),
            (second, int_operands(sizes), identity),
            written,
            int_operands([
                shape.batch_size,
                window.input_extents.side_pixels,
                window.input_extents.channels,
            ]),
            threshold_and_tracer_max_arguments(shape),
        );
        let grid = self.forward.grid_over_feature_map_tiles(
            window.input_extents.pixels_per_frame(),
            window.input_extents.channels,
        );
        let launch = program
            .make_kernel_launch(&LAYER_BACKWARD_KERNEL, &grid, arguments)
            .with_alternative_kernel_on_devices(
                &FOUR_GROUP_LAYER_BACKWARD_KERNEL,
                &grid,
                chooses_four_groups_on_device(&FOUR_GROUP_LAYER_BACKWARD_KERNEL, grid),
            )
            .with_programmatic_dependent_launch();
        program.add_steps_in_named_range(&conv.layer_name, |program| {
            program.add_prepared_launch(launch)
        });
    }

    /// Adds the launch of the backward pass through the max pooling and the stem's neurons.
    fn add_stem_and_pooling_backward_launch(&self, program: &mut LaunchProgram) {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let map = network.stem.window.output_extents;
        let neurons = shape.batch_size * map.elements_per_frame();
        let (sources, pooled) = match &network.pool {
            Some(pool) => {
                (program.pointer_to(POOLING_MAXIMUM_TAPS_REGION).into(), pool.output_extents)
            }
            None => (NULL, map),
        };
        let outputs = shape.batch_size * pooled.elements_per_frame();
        let arguments = (
            (
                &name_of_currents_region(0),
                self.forward.address_of_convolution_bias(program, &network.stem),
            ),
            ("spikes_gradient", sources, &name_of_currents_gradient_region(0)),
            (long_operand(neurons), long_operand(outputs)),
            int_operands([
                map.side_pixels,
                map.channels,
                pooled.side_pixels,
                shape.time_steps_fed_with_image(),
            ]),
            shape.time_steps_to_spread_image() as f32,
            threshold_and_tracer_max_arguments(shape),
        );
        let grid = TileKernelParameters {
            time_steps: shape.time_steps,
            blocks: [neurons.div_ceil(TWO_GROUP_BLOCK_THREADS), 1],
        };
        let launch =
            program.make_kernel_launch(&STEM_AND_POOLING_BACKWARD_KERNEL, &grid, arguments);
        program.add_prepared_launch(launch.with_programmatic_dependent_launch());
    }
}
