//! Tests of the declared device memory and of refused denoising problems; they need no GPU. On a
//! GPU, tests compare every denoising rung with the fp64 reference, for the tiny model and for the
//! full width with two layers. Tests also require that fused denoising rungs give the same bits in
//! each launch, and that the memory they use matches their declared memory.

mod quantized;

use std::sync::Arc;

use super::*;
use crate::denoise::definition::{DenoiseParameters, LayerWeightFormat};
use crate::denoise::model::{ExpertDimensions, PI05_EXPERT_MODEL, TINY_TEST_MODEL};
use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
use crate::kernel_tests::assert_launches_match_kernel_parameters;
use kernelgate::backend::LaunchableProblem;
use kernelgate::backend::program::{
    KeepOrReleaseL2Lines, KernelLaunchStep, LaunchProgram, ProgramStep,
};
use kernelgate::verify::{ComparisonWithReference, launch_twice_and_compare_with_reference};
use kernelgate::workload::{Dtype, Problem, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::memory;

/// Test model with pi0.5's full width but two layers: it runs every kernel of the full model in a
/// fraction of the time.
const FULL_WIDTH_TWO_LAYER_MODEL: ExpertDimensions =
    ExpertDimensions { model_name: "shallow", layer_count: 2, ..PI05_EXPERT_MODEL };

fn bf16_expert_shape(model: ExpertDimensions, s: usize, p: usize) -> DenoiseParameters {
    DenoiseParameters {
        model,
        action_tokens: s,
        prefix_tokens: p,
        dtype: Dtype::Bf16,
        weights: LayerWeightFormat::SameDtypeAsActivations,
    }
}

fn bf16_denoise_loop(model: ExpertDimensions, s: usize, p: usize, steps: usize) -> DenoiseLoop {
    DenoiseLoop { expert: bf16_expert_shape(model, s, p), euler_steps: steps }
}

/// Copies a denoising loop problem with its layer weights in fp8.
fn loop_with_fp8_weights(problem: DenoiseLoop) -> DenoiseLoop {
    loop_with_weight_format(problem, LayerWeightFormat::Fp8)
}

/// Copies a denoising loop problem with its layer weights in int4.
fn loop_with_int4_weights(problem: DenoiseLoop) -> DenoiseLoop {
    loop_with_weight_format(problem, LayerWeightFormat::Int4)
}

fn loop_with_weight_format(problem: DenoiseLoop, weights: LayerWeightFormat) -> DenoiseLoop {
    DenoiseLoop { expert: DenoiseParameters { weights, ..problem.expert }, ..problem }
}

/// Selects the implementations that support a problem.
fn rows_that_support_problem<P>(
    rows: &'static [Implementation<P>],
    problem: &P,
) -> Vec<&'static Implementation<P>> {
    rows.iter().filter(|row| (row.supports)(problem).is_ok()).collect()
}

/// Verifies two consecutive launches of every row against the reference, because a launch must not
/// depend on the outputs of the previous one.
fn verify_two_launches_of_each_row<P: Problem>(
    rows: impl IntoIterator<Item = &'static Implementation<P>>,
    problem: &P,
    device: &Arc<Device>,
    name: &str,
) -> Vec<(&'static str, ComparisonWithReference)> {
    let inputs = problem.inputs(21);
    let expected = problem.reference(&inputs);
    let mut found = Vec::new();
    for row in rows {
        assert_eq!((row.supports)(problem), Ok(()), "{}", row.implementation_name);
        let Some(mut task) = prepare_row_or_skip_unsupported(row, problem, &inputs, device) else {
            continue;
        };
        for launch in 1..=2 {
            match launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance())
            {
                Ok(comparison) => found.push((row.implementation_name, comparison)),
                Err(error) => {
                    panic!("{} launch {launch}, {name}: {error}", row.implementation_name)
                }
            }
        }
    }
    found.iter().step_by(2).for_each(|(row, found)| {
        eprintln!(
            "{name} {row}: max {:.1e}, relative L2 {:.1e}",
            found.errors.max_error, found.errors.relative_l2
        );
    });
    found
}

#[test]
fn f32_and_long_captured_loops_are_refused_with_a_reason() {
    let expert =
        DenoiseParameters { dtype: Dtype::F32, ..bf16_expert_shape(TINY_TEST_MODEL, 7, 13) };
    for row in CUDA_DENOISE_STEP_LADDER {
        assert!(row.implementation_name.starts_with("cuda/") && !row.description.is_empty());
        assert_eq!(
            (row.supports)(&DenoiseStep { expert }),
            Err("computes bf16 only".to_owned()),
            "{}",
            row.implementation_name
        );
    }
    let long = bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 101);
    let reasons: Vec<_> =
        CUDA_DENOISE_LOOP_LADDER.iter().map(|row| (row.supports)(&long)).collect();
    assert_eq!(reasons[0], Ok(()));
    assert!(
        reasons[1..].iter().all(|reason| *reason == Err("captures up to 100 steps".to_owned()))
    );
    let other = DenoiseStep {
        expert: bf16_expert_shape(
            ExpertDimensions { feed_forward_width: 192, ..TINY_TEST_MODEL },
            7,
            13,
        ),
    };
    assert_eq!((CUDA_DENOISE_STEP_LADDER[0].supports)(&other), Ok(()));
    assert_eq!(
        (CUDA_DENOISE_STEP_LADDER[2].supports)(&other),
        Err("not compiled for this model".to_owned())
    );
    assert_eq!(
        (CUDA_DENOISE_STEP_LADDER[2].supports)(&DenoiseStep {
            expert: bf16_expert_shape(FULL_WIDTH_TWO_LAYER_MODEL, 7, 13)
        }),
        Ok(())
    );
    // The persistent kernel is compiled for the dimensions of pi0.5's expert only, with any number
    // of layers.
    assert_eq!(CUDA_DENOISE_STEP_LADDER[4].implementation_name, "cuda/persistent");
    let persistent = |model, s, p| {
        (CUDA_DENOISE_STEP_LADDER[4].supports)(&DenoiseStep {
            expert: bf16_expert_shape(model, s, p),
        })
    };
    assert_eq!(persistent(TINY_TEST_MODEL, 7, 13), Err("not compiled for this model".to_owned()));
    assert_eq!(
        persistent(FULL_WIDTH_TWO_LAYER_MODEL, 57, 13),
        Err("has room for 56 actions".to_owned())
    );
    assert_eq!(
        persistent(FULL_WIDTH_TWO_LAYER_MODEL, 50, 975),
        Err("has room for 1024 keys, prefix and actions together".to_owned())
    );
    assert_eq!(persistent(PI05_EXPERT_MODEL, 56, 968), Ok(()));
    assert_eq!(CUDA_DENOISE_LOOP_LADDER[4].implementation_name, "cuda/fused_overlap_l2");
    assert_eq!(
        (CUDA_DENOISE_LOOP_LADDER[4].supports)(&bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 1)),
        Err("one step reads keys and values once: nothing to keep".to_owned())
    );
    assert_eq!(
        (CUDA_DENOISE_LOOP_LADDER[4].supports)(&bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 2)),
        Ok(())
    );
}

#[test]
fn the_declared_memory_of_denoising_rows_follows_from_the_shapes() {
    let declared = |row: &Implementation<DenoiseLoop>, problem: &DenoiseLoop| {
        row.declared_device_bytes(problem).unwrap()
    };
    let problem = bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 3);
    let inputs = problem.inputs(1).size_in_bytes() as u64;
    let fixed = 3 * 8 + 7 * 32 * 4;
    // Expected regions: three panels of the time embedding; styles of 2·2 + 1 norms; angles, h,
    // squares, q; panels of `attended` and `hidden`; suffix keys and values.
    let panel = 64 * 64 * 2;
    let fused = 3 * panel
        + 5 * 3 * 192 * 4
        + 7 * 16 * 4
        + 7 * 64 * 2
        + 7 * 4
        + 7 * 32 * 2
        + 3 * panel
        + 2 * 2 * 7 * 16 * 2;
    assert_eq!(declared(&CUDA_DENOISE_LOOP_LADDER[2], &problem), inputs + fixed + fused);
    assert_eq!(
        declared(&CUDA_DENOISE_LOOP_LADDER[3], &problem),
        declared(&CUDA_DENOISE_LOOP_LADDER[2], &problem)
    );
    assert_eq!(
        declared(&CUDA_DENOISE_LOOP_LADDER[4], &problem),
        declared(&CUDA_DENOISE_LOOP_LADDER[2], &problem)
    );
    assert_eq!(
        declared(&CUDA_DENOISE_LOOP_LADDER[1], &problem),
        declared(&CUDA_DENOISE_LOOP_LADDER[0], &problem) + 3 * (16 << 20)
    );
    // The attention GEMMs of the per-operation rung pad the 20 keys to 24.
    let scores = 7 * 2 * 24 * (4 + 2) + 2 * 24 * 16 * 2;
    let rows = 7
        * (32 * 2
            + 16 * 4
            + 64 * (2 + 4 + 2 + 4 + 2)
            + 2 * 32 * 2
            + 2 * 16 * 2
            + 2 * 128 * 2
            + 32 * 4);
    let per_op = 3 * 64 * 2 + 5 * 192 * 4 + rows + scores;
    assert_eq!(
        declared(&CUDA_DENOISE_LOOP_LADDER[0], &problem),
        inputs + fixed + per_op + (16 << 20)
    );
    // A packed unit of 8 columns by 64 rows of k has codes and 8 bf16 factors instead of 512 bf16
    // weights.
    let full = bf16_denoise_loop(PI05_EXPERT_MODEL, 50, 968, 10);
    assert_eq!(
        declared(&CUDA_DENOISE_LOOP_LADDER[5], &full)
            - declared(&CUDA_DENOISE_LOOP_LADDER[5], &loop_with_fp8_weights(full)),
        PI05_EXPERT_MODEL.projection_weights_of_all_layers() / 512 * (1024 - 528)
    );
    assert_eq!(
        declared(&CUDA_DENOISE_LOOP_LADDER[5], &full)
            - declared(&CUDA_DENOISE_LOOP_LADDER[5], &loop_with_int4_weights(full)),
        PI05_EXPERT_MODEL.projection_weights_of_all_layers() / 512 * (1024 - 272)
    );
    // Nearly all device memory of the full-size denoising loop is its 879 MB of weights and caches.
    for row in CUDA_DENOISE_LOOP_LADDER {
        let gigabytes = declared(row, &full) as f64 / 1e9;
        assert!((0.87..0.96).contains(&gigabytes), "{}: {gigabytes}", row.implementation_name);
    }
}

/// Programs of one run, in order: per operation, per operation with parallel GEMMs, fused, fused
/// with PDL and caches kept in L2, persistent.
fn one_program_of_each_rung(run: &DenoiseStepOrLoop) -> [LaunchProgram; 5] {
    [
        per_op::serial_per_op_program,
        per_op::per_op_program_with_parallel_gemms_and_pdl,
        fused::fused_program_without_pdl,
        fused::fused_program_with_pdl_and_kept_l2,
        persistent::persistent_program_with_pdl,
    ]
    .map(|write| write(run))
}

fn kernel_launches_in_program(program: &LaunchProgram) -> impl Iterator<Item = &KernelLaunchStep> {
    program.steps().iter().filter_map(|step| match step {
        ProgramStep::Launch(launch) => Some(launch),
        _ => None,
    })
}

#[test]
fn denoising_programs_are_valid_and_match_their_kernels_parameters() {
    for run in [
        DenoiseStepOrLoop::from(&DenoiseStep {
            expert: bf16_expert_shape(FULL_WIDTH_TWO_LAYER_MODEL, 50, 968),
        }),
        DenoiseStepOrLoop::from(&bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 3)),
        DenoiseStepOrLoop::from(&loop_with_fp8_weights(bf16_denoise_loop(
            TINY_TEST_MODEL,
            7,
            13,
            3,
        ))),
        DenoiseStepOrLoop::from(&loop_with_int4_weights(bf16_denoise_loop(
            TINY_TEST_MODEL,
            7,
            13,
            3,
        ))),
    ] {
        for program in one_program_of_each_rung(&run) {
            assert_eq!(program.check(), Ok(()));
            assert_launches_match_kernel_parameters(&program);
        }
    }
}

#[test]
fn packed_denoising_weights_have_the_declared_size() {
    let plain = bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 50, 968, 2);
    for problem in [plain, loop_with_fp8_weights(plain), loop_with_int4_weights(plain)] {
        let inputs = problem.inputs(1);
        for row in rows_that_support_problem(CUDA_DENOISE_LOOP_LADDER, &problem) {
            let PrepareFunction::Program(write, _) = row.prepare else {
                panic!("{}", row.implementation_name)
            };
            let program = write(&problem);
            for (region, _) in program.names_and_bytes_of_regions() {
                let uploaded = program.initial_bytes_of_region(program.pointer_to(region), &inputs);
                assert!(uploaded.is_ok(), "{}: {}", row.implementation_name, uploaded.unwrap_err());
            }
        }
    }
}

#[test]
fn denoising_programs_have_the_expected_launches_and_nvtx_ranges() {
    let run = DenoiseStepOrLoop::from(&DenoiseLoop {
        expert: bf16_expert_shape(PI05_EXPERT_MODEL, 50, 968),
        euler_steps: 10,
    });
    let [per_op, concurrent, fused, _, persistent] = one_program_of_each_rung(&run);
    let commands = |program: &LaunchProgram| {
        program.steps().iter().filter(|step| step.enqueues_gpu_work()).count()
    };
    // Launches of a per-operation step: 5 for time, 3 for action input, angles, 18 layers of 21, 3
    // for the last norm, projection, Euler; plus one copy.
    assert_eq!(commands(&per_op), 10 * (5 + 3 + 1 + 18 * 21 + 3 + 1 + 1) + 1);
    assert_eq!(commands(&concurrent), commands(&per_op));
    // Launches of the fused program: time embedding, angles, two time layers, three styles and the
    // first residual; then five in each layer and one in each step.
    assert_eq!(commands(&fused), 8 + 10 * (18 * 5 + 1));
    // Launches of the persistent program: six for times, styles and the first residual, then all
    // shift terms at once, then the whole loop.
    assert_eq!(commands(&persistent), 6 + 1 + 1);
    let ranges: Vec<&str> = per_op
        .steps()
        .iter()
        .filter_map(|step| match step {
            ProgramStep::BeginNamedRange(name) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(ranges.len(), 1 + 10 * (1 + 3 + 18 * 11 + 2));
    assert!(ranges.contains(&"Step_9/Layer_17/KV_Concat"));
}

#[test]
fn only_programs_with_pdl_overlap_their_launches() {
    let run = DenoiseStepOrLoop::from(&bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 3));
    let overlap = one_program_of_each_rung(&run).map(|program| {
        let overlap = kernel_launches_in_program(&program)
            .filter(|launch| launch.is_programmatic_dependent_launch())
            .count();
        (overlap, kernel_launches_in_program(&program).count())
    });
    let all = |(overlap, launches): (usize, usize)| overlap == launches;
    assert_eq!(overlap.map(|(overlap, _)| overlap > 0), [false, true, false, true, true]);
    assert_eq!(overlap.map(all), [false, true, false, true, true]);
}

#[test]
fn attention_keeps_the_caches_in_l2_until_the_last_step() {
    let run = DenoiseStepOrLoop::from(&bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 3));
    let kept = fused::fused_program_with_pdl_and_kept_l2(&run);
    // The cache region of this test has the keys and values of two layers, with 20 rows of 16 bf16
    // columns each and no gaps.
    assert_eq!(kept.bytes_of_region("caches"), 2 * 2 * 2 * 20 * 16);
    let lines: Vec<_> = kernel_launches_in_program(&kept)
        .filter(|launch| launch.default_kernel().kernel_symbol == "denoise_fused_attention")
        .map(KernelLaunchStep::kept_or_released_l2_lines)
        .collect();
    let [keep, release] =
        [KeepOrReleaseL2Lines::MarkL2LinesPersisting, KeepOrReleaseL2Lines::MarkL2LinesNormal]
            .map(Some);
    assert_eq!(lines, [keep, keep, keep, keep, release, release]);
    let others = |program: &LaunchProgram| {
        kernel_launches_in_program(program)
            .filter(|it| it.kept_or_released_l2_lines().is_some())
            .count()
    };
    assert_eq!((others(&kept), others(&fused::fused_program_with_pdl(&run))), (lines.len(), 0));
}

#[test]
fn every_denoising_rung_agrees_with_the_reference_on_the_tiny_model() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (s, p) in
        [(1, 1), (7, 13), (16, 100), (50, 968), (33, 1200), (64, 64), (65, 31), (130, 2100)]
    {
        let name = format!("tiny s={s} p={p}");
        verify_two_launches_of_each_row(
            &CUDA_DENOISE_STEP_LADDER[..4],
            &DenoiseStep { expert: bf16_expert_shape(TINY_TEST_MODEL, s, p) },
            &device,
            &name,
        );
    }
    for (s, p, steps) in [(7, 13, 1), (7, 13, 3), (50, 968, 10), (70, 20, 70)] {
        let rows =
            if steps > 1 { &CUDA_DENOISE_LOOP_LADDER[..5] } else { &CUDA_DENOISE_LOOP_LADDER[..4] };
        verify_two_launches_of_each_row(
            rows,
            &bf16_denoise_loop(TINY_TEST_MODEL, s, p, steps),
            &device,
            &format!("tiny s={s} p={p} steps={steps}"),
        );
    }
}

#[test]
fn every_denoising_rung_agrees_with_the_reference_at_full_width() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (s, p) in [(50, 968), (10, 712), (1, 1), (67, 1500)] {
        let problem = DenoiseStep { expert: bf16_expert_shape(FULL_WIDTH_TWO_LAYER_MODEL, s, p) };
        let rows = rows_that_support_problem(CUDA_DENOISE_STEP_LADDER, &problem);
        assert_eq!(rows.len(), if s <= 56 { 5 } else { 4 });
        verify_two_launches_of_each_row(rows, &problem, &device, &format!("shallow s={s} p={p}"));
    }
    verify_two_launches_of_each_row(
        CUDA_DENOISE_LOOP_LADDER,
        &bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 50, 968, 10),
        &device,
        "shallow s=50 p=968 steps=10",
    );
}

#[test]
fn the_persistent_kernel_agrees_with_the_reference_at_its_size_limits() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    // Test pairs of horizon and prefix: maximum rows and keys, 8 rows (one block) and 9 rows,
    // prefixes that end inside 16 keys or before the keys of some blocks.
    for (s, p) in
        [(56, 968), (8, 1016), (9, 1015), (1, 1023), (33, 500), (50, 974), (24, 3), (17, 111)]
    {
        verify_two_launches_of_each_row(
            &CUDA_DENOISE_STEP_LADDER[4..],
            &DenoiseStep { expert: bf16_expert_shape(FULL_WIDTH_TWO_LAYER_MODEL, s, p) },
            &device,
            &format!("shallow s={s} p={p}"),
        );
    }
    // Test pairs of layers and denoising steps: one layer, odd numbers of layers, and more steps
    // than a tile of the norm shift kernel has rows.
    for (depth, steps) in [(1, 1), (1, 2), (3, 5), (1, 37)] {
        let model = ExpertDimensions { layer_count: depth, ..FULL_WIDTH_TWO_LAYER_MODEL };
        verify_two_launches_of_each_row(
            &CUDA_DENOISE_LOOP_LADDER[5..],
            &bf16_denoise_loop(model, 50, 968, steps),
            &device,
            &format!("depth={depth} steps={steps}"),
        );
    }
    // In these test cases, some blocks of the persistent kernel have no rows and some clusters no
    // queries, in every denoising step.
    for (s, p, steps) in [(1, 1, 3), (9, 40, 2), (56, 968, 3)] {
        verify_two_launches_of_each_row(
            &CUDA_DENOISE_LOOP_LADDER[5..],
            &bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, s, p, steps),
            &device,
            &format!("shallow s={s} p={p} steps={steps}"),
        );
    }
}

#[test]
fn the_full_size_denoising_step_agrees_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    verify_two_launches_of_each_row(
        CUDA_DENOISE_STEP_LADDER,
        &DenoiseStep { expert: bf16_expert_shape(PI05_EXPERT_MODEL, 50, 968) },
        &device,
        "pi05 s=50 p=968",
    );
}

#[test]
fn a_gpu_denoising_loop_with_zero_velocity_returns_the_noise() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 10);
    let mut inputs = problem.inputs(1);
    inputs.tensor_mut("action_out").as_bytes_mut().fill(0);
    inputs.f32_mut("action_out_bias").fill(0.0);
    for row in rows_that_support_problem(CUDA_DENOISE_LOOP_LADDER, &problem) {
        let Some(mut task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device)
        else {
            continue;
        };
        task.launch_once().unwrap();
        assert_eq!(
            task.outputs_on_host().unwrap().f32_elements("actions"),
            inputs.f32_elements("x"),
            "{}",
            row.implementation_name
        );
    }
}

#[test]
fn fused_denoising_launches_give_equal_bits_each_time() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 50, 968, 10);
    let inputs = problem.inputs(23);
    let mut kinds = Vec::new();
    for row in CUDA_DENOISE_LOOP_LADDER {
        let Some(mut task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device)
        else {
            continue;
        };
        let mut launch = || {
            task.poison_outputs().unwrap();
            task.launch_once().unwrap();
            task.wait_for_launches().unwrap();
            task.outputs_on_host().unwrap().tensor("actions").as_bytes().to_vec()
        };
        let first = launch();
        let same = (0..8).all(|_| launch() == first);
        eprintln!("{}: the same bits each time: {same}", row.implementation_name);
        if row.implementation_name.starts_with("cuda/fused") {
            kinds.push(first);
        }
        assert!(
            same || ["cuda/per_op", "cuda/graph"].contains(&row.implementation_name),
            "{}",
            row.implementation_name
        );
    }
    // The fused rungs differ only in when their kernels start, so they must all give the same
    // output bits.
    assert!(kinds.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_thousand_launches_of_the_persistent_kernel_give_equal_bits() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let plain = bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 50, 968, 2);
    for problem in [plain, loop_with_fp8_weights(plain), loop_with_int4_weights(plain)] {
        let inputs = problem.inputs(25);
        let Some(mut task) = prepare_row_or_skip_unsupported(
            &CUDA_DENOISE_LOOP_LADDER[5],
            &problem,
            &inputs,
            &device,
        ) else {
            return;
        };
        let mut launch = || {
            task.poison_outputs().unwrap();
            task.launch_once().unwrap();
            task.wait_for_launches().unwrap();
            task.outputs_on_host().unwrap().tensor("actions").as_bytes().to_vec()
        };
        let first = launch();
        // A race between the blocks of the persistent kernel would appear only as a rare
        // difference, so the test launches a thousand times.
        for number in 1..1000 {
            assert_eq!(launch(), first, "{:?} launch {number}", problem.expert.weights);
        }
    }
}

#[test]
fn the_declared_memory_of_denoising_rows_matches_the_used_memory() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = bf16_denoise_loop(PI05_EXPERT_MODEL, 50, 968, 10);
    let inputs = problem.inputs(24);
    for row in CUDA_DENOISE_LOOP_LADDER {
        let free = || memory::free_and_total_after_launches(&device).unwrap().0 as f64;
        // The test prepares each row once before the measurement, so that loaded modules and the
        // memory pool's own overhead are not counted.
        if prepare_row_or_skip_unsupported(row, &problem, &inputs, &device).is_none() {
            continue;
        }
        let before = free();
        let task = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device);
        let used = before - free();
        drop(task);
        let declared = row.declared_device_bytes(&problem).unwrap() as f64;
        eprintln!(
            "{}: declared {:.1} MB, used {:.1} MB",
            row.implementation_name,
            declared / 1e6,
            used / 1e6
        );
        // The test allows 64 MB of deviation, because the CUDA driver allocates device memory in
        // pieces of 32 MiB.
        assert!(
            (used - declared).abs() <= 0.05 * declared + 64e6,
            "{}: declared {declared}, used {used}",
            row.implementation_name
        );
    }
}
