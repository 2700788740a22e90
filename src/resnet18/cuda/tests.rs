//! Tests of refused problems and of declared memory, which run on any machine. On a GPU every rung
//! is compared with the reference, including the spikes of every layer, and its memory is compared
//! with the declared memory.

use super::per_op::layer_spikes_name;
use super::*;
use crate::gpu_tests::{lock_first_gpu, prepare_row};
use crate::kernel_tests::check_program_launches;
use crate::resnet18::DrawDistribution;
use crate::resnet18::network::{NetworkSizes, NetworkStem};
use crate::resnet18::reference::NetworkReference;
use half::bf16;
use kernelgate::backend::BackendError;
use kernelgate::backend::program::{Lane, Program, ProgramStep};
use kernelgate::verify::{launch_and_verify, repeats_bit_by_bit};
use kernelgate::workload::Problem;
use kernelgate_cuda::driver::memory;
use kernelgate_cuda::testing::two_gpus_for_test;

fn shape(stem: NetworkStem, width: usize, b: usize, t: usize, level: usize) -> NetworkShape {
    let sizes = NetworkSizes { stem, width, blocks: 2, side: 32 };
    NetworkShape { sizes, b, t, level, draw: DrawDistribution::Dyadic, dtype: Dtype::Bf16 }
}

#[test]
fn resnet18_rows_decline_unsupported_problems_with_a_reason() {
    let whole = shape(NetworkStem::ImageNet, 64, 8, 8, 8);
    let supports = |row: usize, shape| (INFERENCE[row].supports)(&Inference { shape });
    assert!((0..4).all(|row| supports(row, whole) == Ok(())));
    let only = Err("the imagenet stem and a width of 64 only".to_owned());
    assert_eq!(supports(3, shape(NetworkStem::Cifar, 64, 8, 8, 8)), only);
    assert_eq!(supports(3, shape(NetworkStem::ImageNet, 128, 8, 8, 8)), only);
    let f32 = NetworkShape { dtype: Dtype::F32, ..whole };
    assert!((0..4).all(|row| supports(row, f32) == Err("computes bf16 only".to_owned())));
    let five = NetworkShape { t: 5, ..whole };
    assert_eq!(supports(0, five), Ok(()));
    assert_eq!(supports(2, five), Err("compiled for 4, 8 and 16 time steps".to_owned()));
    let narrow = shape(NetworkStem::ImageNet, 8, 8, 8, 8);
    assert_eq!(supports(2, narrow), Err("a width in multiples of 64".to_owned()));
    let normal = TrainStep { shape: NetworkShape { draw: DrawDistribution::Normal, ..whole } };
    let refused = Err("gradients in bf16 are compared with dyadic weights only".to_owned());
    assert!(TRAIN_STEP.iter().all(|row| (row.supports)(&normal) == refused));
    let odd = TrainStep { shape: NetworkShape { b: 3, t: 5, ..whole } };
    let refused = Err("images times steps in multiples of 8".to_owned());
    assert!(TRAIN_STEP[..2].iter().all(|row| (row.supports)(&odd) == refused));
    let five = TrainStep { shape: five };
    assert_eq!(
        (TRAIN_STEP[2].supports)(&five),
        Err("compiled for 4, 8 and 16 time steps".to_owned())
    );
}

/// Programs of all rows that support a problem, with the names of the rows.
fn programs_by_row(shape: NetworkShape) -> Vec<(&'static str, Program)> {
    let (inference, training) = (Inference { shape }, TrainStep { shape });
    let mut all = Vec::new();
    for row in INFERENCE.iter().filter(|row| (row.supports)(&inference).is_ok()) {
        let Prepare::Program(write, _) = row.prepare else { panic!("{}", row.name) };
        all.push((row.name, write(&inference)));
    }
    for row in TRAIN_STEP.iter().filter(|row| (row.supports)(&training).is_ok()) {
        let Prepare::Program(write, _) = row.prepare else { panic!("{}", row.name) };
        all.push((row.name, write(&training)));
    }
    if prepare_train_step(&training, best::check_compiled).is_ok() {
        let sums = fused_train::gradient_sums_by_bucket(&shape, 2);
        all.push(("data_parallel", fused_train::launches_of_one_gpu(&shape, 2, sums)));
    }
    all
}

const TEST_SHAPES: [(NetworkStem, usize, usize, usize, usize); 5] = [
    (NetworkStem::ImageNet, 64, 8, 8, 8),
    (NetworkStem::ImageNet, 64, 35, 8, 8),
    (NetworkStem::Cifar, 64, 2, 4, 4),
    (NetworkStem::Cifar, 8, 3, 5, 8),
    (NetworkStem::ImageNet, 16, 8, 5, 8),
];

#[test]
fn resnet18_programs_are_valid_and_match_the_parameters_of_their_kernels() {
    for (stem, width, b, t, level) in TEST_SHAPES {
        for (name, program) in programs_by_row(shape(stem, width, b, t, level)) {
            assert_eq!(program.check(), Ok(()), "{name}");
            check_program_launches(&program);
        }
    }
}

#[test]
fn the_backward_pass_over_gpus_waits_only_for_the_last_gradients() {
    let shape = shape(NetworkStem::ImageNet, 64, 8, 8, 8);
    let sums = fused_train::gradient_sums_by_bucket(&shape, 2);
    let program = fused_train::launches_of_one_gpu(&shape, 2, sums);
    let launches = program.steps().iter().filter_map(|step| match step {
        ProgramStep::Launch(launch) => Some(launch),
        _ => None,
    });
    let in_main_lane: Vec<bool> = launches
        .filter(|launch| launch.kernel().symbol == "resnet18_fused_weight_gradients")
        .map(|launch| launch.lane() == Lane::MAIN_LANE)
        .collect();
    assert_eq!(in_main_lane, [false, false, true]);
}

#[test]
fn packed_contents_have_the_declared_size() {
    for (stem, width, b, t, level) in TEST_SHAPES {
        let shape = shape(stem, width, b, t, level);
        let inputs = TrainStep { shape }.inputs(1);
        for (name, program) in programs_by_row(shape) {
            for (region, _) in program.regions() {
                let uploaded = program.uploaded_bytes(program.at(region), &inputs);
                assert!(uploaded.is_ok(), "{name}: {}", uploaded.unwrap_err());
            }
        }
    }
}

#[test]
fn inference_in_one_launch_needs_no_cublaslt() {
    let programs = programs_by_row(shape(NetworkStem::ImageNet, 64, 32, 8, 8));
    let workspace = |row: usize| {
        let uses = programs[row].1.bytes_by_memory_purpose();
        uses.iter().find(|(label, _)| *label == "workspace").unwrap().1
    };
    assert_eq!(programs[3].0, "cuda/best");
    assert!(workspace(2) > 16 << 20 && workspace(3) < 16 << 20);
}

#[test]
fn weight_tiles_have_swizzled_rows() {
    // A tile has 32 filters by 64 columns: its second row begins with its second chunk.
    let rows: Vec<u8> = (0..64).flat_map(|row| [row; 256]).collect();
    let columns: Vec<u8> = (0..64).flat_map(|_| (0..=255).map(|byte| byte / 16)).collect();
    let at = |number: usize| {
        (
            kernel_weights::tiled_weight(&rows, 128)[number],
            kernel_weights::tiled_weight(&columns, 128)[number],
        )
    };
    assert_eq!([0, 128, 4096, 8192].map(at), [(0, 0), (1, 1), (0, 8), (32, 0)]);
    // A frame of one pixel reads one tap of nine.
    let network = shape(NetworkStem::ImageNet, 8, 1, 4, 8).sizes.build_network();
    let last = network.blocks.last().unwrap();
    assert_eq!(
        kernel_weights::live_weight_columns(&last.second),
        last.second.window.input.channels
    );
}

/// Test problems: batches of odd size, both stems, and every number of time steps for which there
/// is a build.
#[test]
fn every_inference_rung_equals_the_reference_bit_by_bit() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (stem, width, b, t, level) in [
        (NetworkStem::ImageNet, 64, 3, 8, 8),
        (NetworkStem::Cifar, 64, 2, 4, 4),
        (NetworkStem::ImageNet, 64, 9, 16, 16),
        (NetworkStem::Cifar, 8, 3, 5, 8),
        (NetworkStem::ImageNet, 64, 5, 4, 8),
        // A test problem with more images than `best` computes at a time.
        (NetworkStem::ImageNet, 64, 35, 8, 8),
    ] {
        let problem = Inference { shape: shape(stem, width, b, t, level) };
        let inputs = problem.inputs(2);
        let expected = problem.reference(&inputs);
        for row in INFERENCE.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row(row, &problem, &inputs, &device) else { continue };
            let case = format!("{} {stem:?} w={width} b={b} t={t} level={level}", row.name);
            launch_and_verify(&mut task, &expected, problem.tolerance())
                .unwrap_or_else(|error| panic!("{case}: {error}"));
            assert!(repeats_bit_by_bit(&mut task).unwrap(), "{case}");
        }
    }
}

#[test]
fn gpu_training_steps_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (stem, width, b, t, level) in [
        (NetworkStem::ImageNet, 16, 8, 5, 8),
        (NetworkStem::Cifar, 16, 2, 4, 4),
        (NetworkStem::Cifar, 64, 3, 4, 4),
        (NetworkStem::ImageNet, 64, 5, 16, 16),
        (NetworkStem::ImageNet, 64, 8, 8, 8),
        (NetworkStem::ImageNet, 64, 6, 4, 4),
    ] {
        let problem = TrainStep { shape: shape(stem, width, b, t, level) };
        let inputs = problem.inputs(2);
        let expected = problem.reference(&inputs);
        for row in TRAIN_STEP.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row(row, &problem, &inputs, &device) else { continue };
            let case = format!("{} {stem:?} w={width} b={b} t={t} level={level}", row.name);
            let comparison = launch_and_verify(&mut task, &expected, problem.tolerance())
                .unwrap_or_else(|error| panic!("{case}: {error}"));
            eprintln!("{case}: {comparison:?}");
            assert!(repeats_bit_by_bit(&mut task).unwrap(), "{case}");
        }
    }
}

#[test]
fn training_over_two_gpus_equals_training_on_all_images() {
    let Some((devices, _alone)) = two_gpus_for_test() else { return };
    for (b, t, level) in [(6, 4, 4), (16, 8, 8), (64, 8, 8)] {
        let whole = TrainStep { shape: shape(NetworkStem::ImageNet, 64, b, t, level) };
        let problem = DataParallel { gpus: 2, whole };
        let inputs = problem.inputs(2);
        let expected = problem.reference(&inputs);
        let mut task = match DATA_PARALLEL[0].prepare_on(&problem, &inputs, &devices) {
            Err(BackendError::Unsupported(why)) => return eprintln!("skipped: {why}"),
            task => task.unwrap(),
        };
        for _ in 0..3 {
            let comparison = launch_and_verify(&mut task, &expected, problem.tolerance())
                .unwrap_or_else(|error| panic!("b={b}: {error}"));
            eprintln!("b={b} t={t} level={level}: {comparison:?}");
            assert!(repeats_bit_by_bit(&mut task).unwrap(), "b={b}");
        }
    }
}

#[test]
fn spikes_of_every_layer_on_the_gpu_equal_those_of_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let shape = shape(NetworkStem::ImageNet, 64, 3, 8, 8);
    let problem = Inference { shape };
    let inputs = problem.inputs(4);
    let expected = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
    let per_op: fn(&[u8]) -> Vec<i8> = |bytes| bytemuck::cast_slice(bytes).to_vec();
    let fused: fn(&[u8]) -> Vec<i8> =
        |bytes| bytemuck::cast_slice::<u8, bf16>(bytes).iter().map(|s| s.to_f32() as i8).collect();
    let rows = [
        (per_op::inference_program(&shape), 1, per_op),
        (fused::inference_program(&shape), 2, fused),
        (best::inference_launches(&shape, true), 2, fused),
    ];
    for (row, (program, bytes, read)) in rows.into_iter().enumerate() {
        // The row `best` does not write the spikes of the stem, but the spikes of later layers.
        let first = if row == 2 { 1 } else { 0 };
        let program = match program.load_program(&device, &inputs) {
            Err(BackendError::Unsupported(reason)) => {
                eprintln!("skipped: {reason}");
                continue;
            }
            program => program.unwrap(),
        };
        program.enqueue_program().unwrap();
        device.synchronize().unwrap();
        for (number, layer) in expected.layers.iter().enumerate().skip(first) {
            let buffer = program.buffer_of_pointer(&layer_spikes_name(number)).unwrap();
            let mut spikes = vec![0u8; bytes * layer.spikes.len()];
            buffer.download(&mut spikes).unwrap();
            assert!(read(&spikes) == layer.spikes, "layer {number}");
        }
        if row > 0 {
            let pooled = expected.pooled.as_ref().unwrap();
            let mut spikes = vec![0u8; bytes * pooled.len()];
            program.buffer_of_pointer("pooled").unwrap().download(&mut spikes).unwrap();
            assert!(read(&spikes) == *pooled, "pooled");
        }
    }
}

#[test]
fn the_declared_device_memory_is_within_a_twentieth_of_the_used_memory() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = Inference { shape: shape(NetworkStem::ImageNet, 64, 32, 8, 8) };
    let inputs = problem.inputs(1);
    let free = || memory::memory_after_launches(&device).unwrap().0 as f64;
    for row in INFERENCE {
        // Memory that stays loaded after the first use is not counted.
        drop(prepare_row(row, &problem, &inputs, &device));
        let before = free();
        let Some(task) = prepare_row(row, &problem, &inputs, &device) else { continue };
        let used = before - free();
        drop(task);
        let declared = row.device_bytes(&problem).unwrap() as f64;
        // The driver allocates in pieces of 32 MiB.
        let apart = (used - declared).abs();
        assert!(apart <= 0.05 * declared + 64e6, "{}: declared {declared}, used {used}", row.name);
        eprintln!("{}: declared {declared}, used {used}", row.name);
    }
}
