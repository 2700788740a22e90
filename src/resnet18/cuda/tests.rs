//! Tests of refused ResNet-18 problems and of declared device memory; they need no GPU. On a GPU,
//! tests compare every ResNet-18 rung with the fp64 reference, including the spikes of every layer,
//! and its used with its declared memory.

use super::per_op::name_of_layer_spikes_region;
use super::*;
use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
use crate::kernel_tests::assert_launches_match_kernel_parameters;
use crate::resnet18::WeightAndImageSource;
use crate::resnet18::network::{ResNetSizes, ResNetStem};
use crate::resnet18::reference::ResNetReference;
use half::bf16;
use kernelgate::backend::BackendError;
use kernelgate::backend::program::{LaunchProgram, ProgramLane, ProgramStep};
use kernelgate::verify::{launch_again_and_compare_bits, launch_twice_and_compare_with_reference};
use kernelgate::workload::Problem;
use kernelgate_cuda::driver::memory;
use kernelgate_cuda::testing::lock_two_gpus;

fn dyadic_bf16_network_shape(
    stem: ResNetStem,
    width: usize,
    b: usize,
    t: usize,
    level: usize,
) -> ResNetParameters {
    let sizes = ResNetSizes {
        stem,
        first_stage_channels: width,
        blocks_per_stage: 2,
        image_side_pixels: 32,
    };
    ResNetParameters {
        sizes,
        batch_size: b,
        time_steps: t,
        quantisation_level: level,
        weight_and_image_source: WeightAndImageSource::DyadicSamples,
        dtype: Dtype::Bf16,
    }
}

#[test]
fn resnet18_rows_decline_unsupported_problems_with_a_reason() {
    let whole = dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 64, 8, 8, 8);
    let supports =
        |row: usize, shape| (CUDA_INFERENCE_LADDER[row].supports)(&ResNetInference { shape });
    assert!((0..4).all(|row| supports(row, whole) == Ok(())));
    let only = Err("the imagenet stem and a width of 64 only".to_owned());
    assert_eq!(supports(3, dyadic_bf16_network_shape(ResNetStem::CifarStem, 64, 8, 8, 8)), only);
    assert_eq!(
        supports(3, dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 128, 8, 8, 8)),
        only
    );
    let f32 = ResNetParameters { dtype: Dtype::F32, ..whole };
    assert!((0..4).all(|row| supports(row, f32) == Err("computes bf16 only".to_owned())));
    let five = ResNetParameters { time_steps: 5, ..whole };
    assert_eq!(supports(0, five), Ok(()));
    assert_eq!(supports(2, five), Err("compiled for 4, 8 and 16 time steps".to_owned()));
    let narrow = dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 8, 8, 8, 8);
    assert_eq!(supports(2, narrow), Err("a width in multiples of 64".to_owned()));
    let normal = ResNetTrainingStep {
        shape: ResNetParameters {
            weight_and_image_source: WeightAndImageSource::NormalSamples,
            ..whole
        },
    };
    let refused = Err("gradients in bf16 are compared with dyadic weights only".to_owned());
    assert!(CUDA_TRAINING_STEP_LADDER.iter().all(|row| (row.supports)(&normal) == refused));
    let odd =
        ResNetTrainingStep { shape: ResNetParameters { batch_size: 3, time_steps: 5, ..whole } };
    let refused = Err("images times steps in multiples of 8".to_owned());
    assert!(CUDA_TRAINING_STEP_LADDER[..2].iter().all(|row| (row.supports)(&odd) == refused));
    let five = ResNetTrainingStep { shape: five };
    assert_eq!(
        (CUDA_TRAINING_STEP_LADDER[2].supports)(&five),
        Err("compiled for 4, 8 and 16 time steps".to_owned())
    );
}

/// Programs of all implementations that support a network shape, with the names of the
/// implementations.
fn named_programs_for_shape(shape: ResNetParameters) -> Vec<(&'static str, LaunchProgram)> {
    let (inference, training) = (ResNetInference { shape }, ResNetTrainingStep { shape });
    let mut all = Vec::new();
    for row in CUDA_INFERENCE_LADDER.iter().filter(|row| (row.supports)(&inference).is_ok()) {
        let PrepareFunction::Program(write, _) = row.prepare else {
            panic!("{}", row.implementation_name)
        };
        all.push((row.implementation_name, write(&inference)));
    }
    for row in CUDA_TRAINING_STEP_LADDER.iter().filter(|row| (row.supports)(&training).is_ok()) {
        let PrepareFunction::Program(write, _) = row.prepare else {
            panic!("{}", row.implementation_name)
        };
        all.push((row.implementation_name, write(&training)));
    }
    if check_training_step_support(&training, best::check_all_layers_kernel_is_compiled).is_ok() {
        let sums = fused_train::all_reduces_of_gradient_buckets(&shape, 2);
        all.push((
            "data_parallel",
            fused_train::data_parallel_training_program_of_one_gpu(&shape, 2, sums),
        ));
    }
    all
}

const STEMS_WIDTHS_BATCHES_STEPS_AND_LEVELS: [(ResNetStem, usize, usize, usize, usize); 5] = [
    (ResNetStem::ImageNetStem, 64, 8, 8, 8),
    (ResNetStem::ImageNetStem, 64, 35, 8, 8),
    (ResNetStem::CifarStem, 64, 2, 4, 4),
    (ResNetStem::CifarStem, 8, 3, 5, 8),
    (ResNetStem::ImageNetStem, 16, 8, 5, 8),
];

#[test]
fn resnet18_programs_are_valid_and_match_their_kernels_parameters() {
    for (stem, width, b, t, level) in STEMS_WIDTHS_BATCHES_STEPS_AND_LEVELS {
        for (name, program) in
            named_programs_for_shape(dyadic_bf16_network_shape(stem, width, b, t, level))
        {
            assert_eq!(program.check(), Ok(()), "{name}");
            assert_launches_match_kernel_parameters(&program);
        }
    }
}

#[test]
fn a_data_parallel_backward_pass_waits_only_for_the_last_bucket() {
    let shape = dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 64, 8, 8, 8);
    let sums = fused_train::all_reduces_of_gradient_buckets(&shape, 2);
    let program = fused_train::data_parallel_training_program_of_one_gpu(&shape, 2, sums);
    let launches = program.steps().iter().filter_map(|step| match step {
        ProgramStep::Launch(launch) => Some(launch),
        _ => None,
    });
    let in_main_lane: Vec<bool> = launches
        .filter(|launch| launch.default_kernel().kernel_symbol == "resnet18_fused_weight_gradients")
        .map(|launch| launch.lane_of_launch() == ProgramLane::MAIN_LANE)
        .collect();
    assert_eq!(in_main_lane, [false, false, true]);
}

#[test]
fn packed_resnet18_parameters_have_the_declared_size() {
    for (stem, width, b, t, level) in STEMS_WIDTHS_BATCHES_STEPS_AND_LEVELS {
        let shape = dyadic_bf16_network_shape(stem, width, b, t, level);
        let inputs = ResNetTrainingStep { shape }.inputs(1);
        for (name, program) in named_programs_for_shape(shape) {
            for (region, _) in program.names_and_bytes_of_regions() {
                let uploaded = program.initial_bytes_of_region(program.pointer_to(region), &inputs);
                assert!(uploaded.is_ok(), "{name}: {}", uploaded.unwrap_err());
            }
        }
    }
}

#[test]
fn resnet18_inference_in_one_launch_has_no_cublaslt_workspace() {
    let programs =
        named_programs_for_shape(dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 64, 32, 8, 8));
    let workspace = |row: usize| {
        let uses = programs[row].1.device_bytes_by_purpose_label();
        uses.iter().find(|(label, _)| *label == "workspace").unwrap().1
    };
    assert_eq!(programs[3].0, "cuda/best");
    assert!(workspace(2) > 16 << 20 && workspace(3) < 16 << 20);
}

#[test]
fn weight_tiles_have_swizzled_rows_of_sixty_four_columns() {
    // A weight tile has 32 filters by 64 columns; swizzling puts the second chunk of its second row
    // first.
    let rows: Vec<u8> = (0..64).flat_map(|row| [row; 256]).collect();
    let columns: Vec<u8> = (0..64).flat_map(|_| (0..=255).map(|byte| byte / 16)).collect();
    let at = |number: usize| {
        (
            kernel_weights::rearrange_weight_into_swizzled_tiles(&rows, 128)[number],
            kernel_weights::rearrange_weight_into_swizzled_tiles(&columns, 128)[number],
        )
    };
    assert_eq!([0, 128, 4096, 8192].map(at), [(0, 0), (1, 1), (0, 8), (32, 0)]);
    // A convolution over a frame of one pixel reads one filter tap of nine.
    let network = dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 8, 1, 4, 8)
        .sizes
        .build_resnet18_layers();
    let last = network.blocks.last().unwrap();
    assert_eq!(
        kernel_weights::weight_columns_that_read_pixels(&last.second),
        last.second.window.input_extents.channels
    );
}

/// The test cases have batches of odd size, both stems, and every number of time steps for which
/// the kernels are compiled.
#[test]
fn every_inference_rung_equals_the_reference_and_repeats_its_bits() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (stem, width, b, t, level) in [
        (ResNetStem::ImageNetStem, 64, 3, 8, 8),
        (ResNetStem::CifarStem, 64, 2, 4, 4),
        (ResNetStem::ImageNetStem, 64, 9, 16, 16),
        (ResNetStem::CifarStem, 8, 3, 5, 8),
        (ResNetStem::ImageNetStem, 64, 5, 4, 8),
        // A test case with more images than the rung `best` computes at the same time.
        (ResNetStem::ImageNetStem, 64, 35, 8, 8),
    ] {
        let problem =
            ResNetInference { shape: dyadic_bf16_network_shape(stem, width, b, t, level) };
        let inputs = problem.inputs(2);
        let expected = problem.reference(&inputs);
        for row in CUDA_INFERENCE_LADDER.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device)
            else {
                continue;
            };
            let case =
                format!("{} {stem:?} w={width} b={b} t={t} level={level}", row.implementation_name);
            launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance())
                .unwrap_or_else(|error| panic!("{case}: {error}"));
            assert!(launch_again_and_compare_bits(&mut task).unwrap(), "{case}");
        }
    }
}

#[test]
fn every_gpu_training_rung_agrees_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (stem, width, b, t, level) in [
        (ResNetStem::ImageNetStem, 16, 8, 5, 8),
        (ResNetStem::CifarStem, 16, 2, 4, 4),
        (ResNetStem::CifarStem, 64, 3, 4, 4),
        (ResNetStem::ImageNetStem, 64, 5, 16, 16),
        (ResNetStem::ImageNetStem, 64, 8, 8, 8),
        (ResNetStem::ImageNetStem, 64, 6, 4, 4),
    ] {
        let problem =
            ResNetTrainingStep { shape: dyadic_bf16_network_shape(stem, width, b, t, level) };
        let inputs = problem.inputs(2);
        let expected = problem.reference(&inputs);
        for row in CUDA_TRAINING_STEP_LADDER.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device)
            else {
                continue;
            };
            let case =
                format!("{} {stem:?} w={width} b={b} t={t} level={level}", row.implementation_name);
            let comparison =
                launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance())
                    .unwrap_or_else(|error| panic!("{case}: {error}"));
            eprintln!("{case}: {comparison:?}");
            assert!(launch_again_and_compare_bits(&mut task).unwrap(), "{case}");
        }
    }
}

#[test]
fn training_over_two_gpus_agrees_with_training_on_all_images() {
    let Some((devices, _alone)) = lock_two_gpus() else { return };
    for (b, t, level) in [(6, 4, 4), (16, 8, 8), (64, 8, 8)] {
        let whole = ResNetTrainingStep {
            shape: dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 64, b, t, level),
        };
        let problem = DataParallelTrainingStep { gpus: 2, step_on_one_gpu: whole };
        let inputs = problem.inputs(2);
        let expected = problem.reference(&inputs);
        let mut task = match CUDA_DATA_PARALLEL_ROWS[0].prepare_on_gpus(&problem, &inputs, &devices)
        {
            Err(BackendError::Unsupported(why)) => return eprintln!("skipped: {why}"),
            task => task.unwrap(),
        };
        for _ in 0..3 {
            let comparison =
                launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance())
                    .unwrap_or_else(|error| panic!("b={b}: {error}"));
            eprintln!("b={b} t={t} level={level}: {comparison:?}");
            assert!(launch_again_and_compare_bits(&mut task).unwrap(), "b={b}");
        }
    }
}

#[test]
fn gpu_spikes_of_every_layer_equal_those_of_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let shape = dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 64, 3, 8, 8);
    let problem = ResNetInference { shape };
    let inputs = problem.inputs(4);
    let expected = ResNetReference::with_parameters_of_inputs(&shape, &inputs)
        .run_reference_forward_pass(&inputs);
    let per_op: fn(&[u8]) -> Vec<i8> = |bytes| bytemuck::cast_slice(bytes).to_vec();
    let fused: fn(&[u8]) -> Vec<i8> =
        |bytes| bytemuck::cast_slice::<u8, bf16>(bytes).iter().map(|s| s.to_f32() as i8).collect();
    let rows = [
        (per_op::per_op_inference_program(&shape), 1, per_op),
        (fused::fused_inference_program(&shape), 2, fused),
        (best::best_rung_inference_program_storing_spikes(&shape, true), 2, fused),
    ];
    for (row, (program, bytes, read)) in rows.into_iter().enumerate() {
        // The ResNet-18 rung `best` does not store the spikes of the stem, only those of later
        // layers.
        let first = if row == 2 { 1 } else { 0 };
        let program = match program.load_on_device(&device, &inputs) {
            Err(BackendError::Unsupported(reason)) => {
                eprintln!("skipped: {reason}");
                continue;
            }
            program => program.unwrap(),
        };
        program.enqueue_all_steps().unwrap();
        device.synchronize().unwrap();
        for (number, layer) in expected.layers.iter().enumerate().skip(first) {
            let buffer = program.buffer_of_region(&name_of_layer_spikes_region(number)).unwrap();
            let mut spikes = vec![0u8; bytes * layer.spikes.len()];
            buffer.download_first_bytes(&mut spikes).unwrap();
            assert!(read(&spikes) == layer.spikes, "layer {number}");
        }
        if row > 0 {
            let pooled = expected.pooled_spikes.as_ref().unwrap();
            let mut spikes = vec![0u8; bytes * pooled.len()];
            program.buffer_of_region("pooled").unwrap().download_first_bytes(&mut spikes).unwrap();
            assert!(read(&spikes) == *pooled, "pooled");
        }
    }
}

#[test]
fn the_declared_memory_of_inference_rungs_matches_the_used_memory() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = ResNetInference {
        shape: dyadic_bf16_network_shape(ResNetStem::ImageNetStem, 64, 32, 8, 8),
    };
    let inputs = problem.inputs(1);
    let free = || memory::free_and_total_after_launches(&device).unwrap().0 as f64;
    for row in CUDA_INFERENCE_LADDER {
        // The test prepares each row once before the measurement, so that memory which stays loaded
        // after the first use is not counted.
        drop(prepare_row_or_skip_unsupported(row, &problem, &inputs, &device));
        let before = free();
        let Some(task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device) else {
            continue;
        };
        let used = before - free();
        drop(task);
        let declared = row.declared_device_bytes(&problem).unwrap() as f64;
        // The test allows 64 MB of deviation, because the CUDA driver allocates device memory in
        // pieces of 32 MiB.
        let apart = (used - declared).abs();
        assert!(
            apart <= 0.05 * declared + 64e6,
            "{}: declared {declared}, used {used}",
            row.implementation_name
        );
        eprintln!("{}: declared {declared}, used {used}", row.implementation_name);
    }
}
