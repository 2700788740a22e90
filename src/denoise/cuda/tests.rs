//! Tests of declared memory and of refused problems, which run on any machine. On a GPU every rung
//! is compared with the reference, for the small model and for the full width with few layers.
//! Rungs must also be repeatable, and their memory is compared with the declared memory.

mod quantized;

use std::sync::Arc;

use super::*;
use crate::denoise::definition::{ActionExpertShape, WeightFormat};
use crate::denoise::model::{ExpertModel, PI05_MODEL, TINY_MODEL};
use crate::gpu_tests::{lock_first_gpu, prepare_row};
use crate::kernel_tests::check_program_launches;
use kernelgate::backend::Executable;
use kernelgate::backend::program::{KeptL2Lines, KernelLaunch, Program, ProgramStep};
use kernelgate::verify::{OutputComparison, launch_and_verify};
use kernelgate::workload::{Dtype, Problem, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::memory;

/// Model that runs every kernel of the full model in a fraction of its time.
const SHALLOW_MODEL: ExpertModel = ExpertModel { name: "shallow", depth: 2, ..PI05_MODEL };

fn shape(model: ExpertModel, s: usize, p: usize) -> ActionExpertShape {
    ActionExpertShape { model, s, p, dtype: Dtype::Bf16, weights: WeightFormat::Same }
}

fn denoise_loop_of(model: ExpertModel, s: usize, p: usize, steps: usize) -> DenoiseLoop {
    DenoiseLoop { expert: shape(model, s, p), steps }
}

/// Sets the weights of a problem to fp8.
fn with_fp8_weights(problem: DenoiseLoop) -> DenoiseLoop {
    with_weights(problem, WeightFormat::Fp8)
}

/// Sets the weights of a problem to int4.
fn with_int4_weights(problem: DenoiseLoop) -> DenoiseLoop {
    with_weights(problem, WeightFormat::Int4)
}

fn with_weights(problem: DenoiseLoop, weights: WeightFormat) -> DenoiseLoop {
    DenoiseLoop { expert: ActionExpertShape { weights, ..problem.expert }, ..problem }
}

/// Rows that support a problem.
fn supporting_rows<P>(
    rows: &'static [Implementation<P>],
    problem: &P,
) -> Vec<&'static Implementation<P>> {
    rows.iter().filter(|row| (row.supports)(problem).is_ok()).collect()
}

/// Verifies two launches of every row, because a launch must not depend on the outputs of the
/// previous one.
fn check<P: Problem>(
    rows: impl IntoIterator<Item = &'static Implementation<P>>,
    problem: &P,
    device: &Arc<Device>,
    name: &str,
) -> Vec<(&'static str, OutputComparison)> {
    let inputs = problem.inputs(21);
    let expected = problem.reference(&inputs);
    let mut found = Vec::new();
    for row in rows {
        assert_eq!((row.supports)(problem), Ok(()), "{}", row.name);
        let Some(mut task) = prepare_row(row, problem, &inputs, device) else { continue };
        for launch in 1..=2 {
            match launch_and_verify(&mut task, &expected, problem.tolerance()) {
                Ok(comparison) => found.push((row.name, comparison)),
                Err(error) => panic!("{} launch {launch}, {name}: {error}", row.name),
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
fn f32_and_long_captures_are_refused_with_a_reason() {
    let expert = ActionExpertShape { dtype: Dtype::F32, ..shape(TINY_MODEL, 7, 13) };
    for row in STEP {
        assert!(row.name.starts_with("cuda/") && !row.about.is_empty());
        assert_eq!(
            (row.supports)(&DenoiseStep { expert }),
            Err("computes bf16 only".to_owned()),
            "{}",
            row.name
        );
    }
    let long = denoise_loop_of(TINY_MODEL, 7, 13, 101);
    let reasons: Vec<_> = LOOP.iter().map(|row| (row.supports)(&long)).collect();
    assert_eq!(reasons[0], Ok(()));
    assert!(
        reasons[1..].iter().all(|reason| *reason == Err("captures up to 100 steps".to_owned()))
    );
    let other = DenoiseStep { expert: shape(ExpertModel { mlp: 192, ..TINY_MODEL }, 7, 13) };
    assert_eq!((STEP[0].supports)(&other), Ok(()));
    assert_eq!((STEP[2].supports)(&other), Err("not compiled for this model".to_owned()));
    assert_eq!((STEP[2].supports)(&DenoiseStep { expert: shape(SHALLOW_MODEL, 7, 13) }), Ok(()));
    // The persistent kernel has only one set of dimensions.
    assert_eq!(STEP[4].name, "cuda/persistent");
    let persistent = |model, s, p| (STEP[4].supports)(&DenoiseStep { expert: shape(model, s, p) });
    assert_eq!(persistent(TINY_MODEL, 7, 13), Err("not compiled for this model".to_owned()));
    assert_eq!(persistent(SHALLOW_MODEL, 57, 13), Err("has room for 56 actions".to_owned()));
    assert_eq!(
        persistent(SHALLOW_MODEL, 50, 975),
        Err("has room for 1024 keys, prefix and actions together".to_owned())
    );
    assert_eq!(persistent(PI05_MODEL, 56, 968), Ok(()));
    assert_eq!(LOOP[4].name, "cuda/fused_overlap_l2");
    assert_eq!(
        (LOOP[4].supports)(&denoise_loop_of(TINY_MODEL, 7, 13, 1)),
        Err("one step reads keys and values once: nothing to keep".to_owned())
    );
    assert_eq!((LOOP[4].supports)(&denoise_loop_of(TINY_MODEL, 7, 13, 2)), Ok(()));
}

#[test]
fn the_declared_denoise_memory_follows_from_the_shapes() {
    let declared = |row: &Implementation<DenoiseLoop>, problem: &DenoiseLoop| {
        row.device_bytes(problem).unwrap()
    };
    let problem = denoise_loop_of(TINY_MODEL, 7, 13, 3);
    let inputs = problem.inputs(1).bytes() as u64;
    let fixed = 3 * 8 + 7 * 32 * 4;
    // The regions are: three panels of the time; styles of 2·2 + 1 norms; angles, h, squares, q;
    // one panel of `attended` and two of `hidden`; keys and values of the suffix.
    let panel = 64 * 64 * 2;
    let fused = 3 * panel
        + 5 * 3 * 192 * 4
        + 7 * 16 * 4
        + 7 * 64 * 2
        + 7 * 4
        + 7 * 32 * 2
        + 3 * panel
        + 2 * 2 * 7 * 16 * 2;
    assert_eq!(declared(&LOOP[2], &problem), inputs + fixed + fused);
    assert_eq!(declared(&LOOP[3], &problem), declared(&LOOP[2], &problem));
    assert_eq!(declared(&LOOP[4], &problem), declared(&LOOP[2], &problem));
    assert_eq!(declared(&LOOP[1], &problem), declared(&LOOP[0], &problem) + 3 * (16 << 20));
    // The 20 tokens are padded to 24.
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
    assert_eq!(declared(&LOOP[0], &problem), inputs + fixed + per_op + (16 << 20));
    // A unit of 8 columns and 64 of k has codes and 8 bf16 factors in place of 512 bf16 weights.
    let full = denoise_loop_of(PI05_MODEL, 50, 968, 10);
    assert_eq!(
        declared(&LOOP[5], &full) - declared(&LOOP[5], &with_fp8_weights(full)),
        PI05_MODEL.layer_weight_elements() / 512 * (1024 - 528)
    );
    assert_eq!(
        declared(&LOOP[5], &full) - declared(&LOOP[5], &with_int4_weights(full)),
        PI05_MODEL.layer_weight_elements() / 512 * (1024 - 272)
    );
    // Nearly all memory of the full loop is its 879 MB of weights and caches.
    for row in LOOP {
        let gigabytes = declared(row, &full) as f64 / 1e9;
        assert!((0.87..0.96).contains(&gigabytes), "{}: {gigabytes}", row.name);
    }
}

/// Programs of a run: one launch for each operation, the same in lanes, fused, fused with caches
/// kept in L2, persistent.
fn programs_of_run(run: &ExpertRun) -> [Program; 5] {
    [
        per_op::per_op_program,
        per_op::concurrent_launches,
        fused::serial_launch_program,
        fused::launches_keeping_l2,
        persistent::programmatic_launch_program,
    ]
    .map(|write| write(run))
}

fn kernel_launches_of(program: &Program) -> impl Iterator<Item = &KernelLaunch> {
    program.steps().iter().filter_map(|step| match step {
        ProgramStep::Launch(launch) => Some(launch),
        _ => None,
    })
}

#[test]
fn denoise_programs_are_valid_and_match_the_parameters_of_their_kernels() {
    for run in [
        ExpertRun::from(&DenoiseStep { expert: shape(SHALLOW_MODEL, 50, 968) }),
        ExpertRun::from(&denoise_loop_of(TINY_MODEL, 7, 13, 3)),
        ExpertRun::from(&with_fp8_weights(denoise_loop_of(TINY_MODEL, 7, 13, 3))),
        ExpertRun::from(&with_int4_weights(denoise_loop_of(TINY_MODEL, 7, 13, 3))),
    ] {
        for program in programs_of_run(&run) {
            assert_eq!(program.check(), Ok(()));
            check_program_launches(&program);
        }
    }
}

#[test]
fn packed_denoise_weights_have_the_declared_size() {
    let plain = denoise_loop_of(SHALLOW_MODEL, 50, 968, 2);
    for problem in [plain, with_fp8_weights(plain), with_int4_weights(plain)] {
        let inputs = problem.inputs(1);
        for row in supporting_rows(LOOP, &problem) {
            let Prepare::Program(write, _) = row.prepare else { panic!("{}", row.name) };
            let program = write(&problem);
            for (region, _) in program.regions() {
                let uploaded = program.uploaded_bytes(program.at(region), &inputs);
                assert!(uploaded.is_ok(), "{}: {}", row.name, uploaded.unwrap_err());
            }
        }
    }
}

#[test]
fn programs_have_the_launches_and_ranges_of_the_model() {
    let run = ExpertRun::from(&DenoiseLoop { expert: shape(PI05_MODEL, 50, 968), steps: 10 });
    let [per_op, concurrent, fused, _, persistent] = programs_of_run(&run);
    let commands =
        |program: &Program| program.steps().iter().filter(|step| step.is_gpu_command()).count();
    // Launches of a step: 5 for the time, 3 for the actions' input, angles, 18 layers of 21, 3 for
    // the last norm, the projection and Euler; one copy.
    assert_eq!(commands(&per_op), 10 * (5 + 3 + 1 + 18 * 21 + 3 + 1 + 1) + 1);
    assert_eq!(commands(&concurrent), commands(&per_op));
    // Launches: embedding, angles, two layers of the time, three styles, begin; then five a layer
    // and one a step.
    assert_eq!(commands(&fused), 8 + 10 * (18 * 5 + 1));
    // The launches are all styles at once, all shifts at once, and the loop.
    assert_eq!(commands(&persistent), 6 + 1 + 1);
    let ranges: Vec<&str> = per_op
        .steps()
        .iter()
        .filter_map(|step| match step {
            ProgramStep::Begin(name) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(ranges.len(), 1 + 10 * (1 + 3 + 18 * 11 + 2));
    assert!(ranges.contains(&"Step_9/Layer_17/KV_Concat"));
}

#[test]
fn only_the_programs_that_say_so_overlap_their_launches() {
    let run = ExpertRun::from(&denoise_loop_of(TINY_MODEL, 7, 13, 3));
    let overlap = programs_of_run(&run).map(|program| {
        let overlap =
            kernel_launches_of(&program).filter(|launch| launch.is_programmatic_launch()).count();
        (overlap, kernel_launches_of(&program).count())
    });
    let all = |(overlap, launches): (usize, usize)| overlap == launches;
    assert_eq!(overlap.map(|(overlap, _)| overlap > 0), [false, true, false, true, true]);
    assert_eq!(overlap.map(all), [false, true, false, true, true]);
}

#[test]
fn attention_keeps_the_caches_until_the_last_step() {
    let run = ExpertRun::from(&denoise_loop_of(TINY_MODEL, 7, 13, 3));
    let kept = fused::launches_keeping_l2(&run);
    // The caches are keys and values of two layers, with 20 rows of 16 columns each and no gap.
    assert_eq!(kept.bytes("caches"), 2 * 2 * 2 * 20 * 16);
    let lines: Vec<_> = kernel_launches_of(&kept)
        .filter(|launch| launch.kernel().symbol == "denoise_fused_attention")
        .map(KernelLaunch::lines)
        .collect();
    let [keep, release] = [KeptL2Lines::Keep, KeptL2Lines::Release].map(Some);
    assert_eq!(lines, [keep, keep, keep, keep, release, release]);
    let others =
        |program: &Program| kernel_launches_of(program).filter(|it| it.lines().is_some()).count();
    assert_eq!((others(&kept), others(&fused::programmatic_launches(&run))), (lines.len(), 0));
}

#[test]
fn every_rung_agrees_with_the_reference_on_the_small_model() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (s, p) in
        [(1, 1), (7, 13), (16, 100), (50, 968), (33, 1200), (64, 64), (65, 31), (130, 2100)]
    {
        let name = format!("tiny s={s} p={p}");
        check(&STEP[..4], &DenoiseStep { expert: shape(TINY_MODEL, s, p) }, &device, &name);
    }
    for (s, p, steps) in [(7, 13, 1), (7, 13, 3), (50, 968, 10), (70, 20, 70)] {
        let rows = if steps > 1 { &LOOP[..5] } else { &LOOP[..4] };
        check(
            rows,
            &denoise_loop_of(TINY_MODEL, s, p, steps),
            &device,
            &format!("tiny s={s} p={p} steps={steps}"),
        );
    }
}

#[test]
fn every_rung_agrees_with_the_reference_at_the_full_width() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (s, p) in [(50, 968), (10, 712), (1, 1), (67, 1500)] {
        let problem = DenoiseStep { expert: shape(SHALLOW_MODEL, s, p) };
        let rows = supporting_rows(STEP, &problem);
        assert_eq!(rows.len(), if s <= 56 { 5 } else { 4 });
        check(rows, &problem, &device, &format!("shallow s={s} p={p}"));
    }
    check(
        LOOP,
        &denoise_loop_of(SHALLOW_MODEL, 50, 968, 10),
        &device,
        "shallow s=50 p=968 steps=10",
    );
}

#[test]
fn the_persistent_kernel_agrees_with_the_reference_to_its_bounds() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    // Horizons and prefixes: all rows and all keys; the rows of one block of eight and one more; a
    // prefix that ends within sixteen keys, or before all keys of some blocks.
    for (s, p) in
        [(56, 968), (8, 1016), (9, 1015), (1, 1023), (33, 500), (50, 974), (24, 3), (17, 111)]
    {
        check(
            &STEP[4..],
            &DenoiseStep { expert: shape(SHALLOW_MODEL, s, p) },
            &device,
            &format!("shallow s={s} p={p}"),
        );
    }
    // Numbers of layers: one, and odd ones; more steps than a tile of shifts has rows.
    for (depth, steps) in [(1, 1), (1, 2), (3, 5), (1, 37)] {
        let model = ExpertModel { depth, ..SHALLOW_MODEL };
        check(
            &LOOP[5..],
            &denoise_loop_of(model, 50, 968, steps),
            &device,
            &format!("depth={depth} steps={steps}"),
        );
    }
    // Some blocks have no rows and some clusters no queries, in every step.
    for (s, p, steps) in [(1, 1, 3), (9, 40, 2), (56, 968, 3)] {
        check(
            &LOOP[5..],
            &denoise_loop_of(SHALLOW_MODEL, s, p, steps),
            &device,
            &format!("shallow s={s} p={p} steps={steps}"),
        );
    }
}

#[test]
fn the_full_step_agrees_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    check(STEP, &DenoiseStep { expert: shape(PI05_MODEL, 50, 968) }, &device, "pi05 s=50 p=968");
}

#[test]
fn a_gpu_denoising_loop_without_velocity_returns_the_noise() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = denoise_loop_of(TINY_MODEL, 7, 13, 10);
    let mut inputs = problem.inputs(1);
    inputs.tensor_mut("action_out").as_bytes_mut().fill(0);
    inputs.f32_mut("action_out_bias").fill(0.0);
    for row in supporting_rows(LOOP, &problem) {
        let Some(mut task) = prepare_row(row, &problem, &inputs, &device) else { continue };
        task.launch().unwrap();
        assert_eq!(task.outputs().unwrap().f32("actions"), inputs.f32("x"), "{}", row.name);
    }
}

#[test]
fn fused_launches_repeat_bit_by_bit() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = denoise_loop_of(SHALLOW_MODEL, 50, 968, 10);
    let inputs = problem.inputs(23);
    let mut kinds = Vec::new();
    for row in LOOP {
        let Some(mut task) = prepare_row(row, &problem, &inputs, &device) else { continue };
        let mut launch = || {
            task.poison_outputs().unwrap();
            task.launch().unwrap();
            task.synchronize().unwrap();
            task.outputs().unwrap().tensor("actions").as_bytes().to_vec()
        };
        let first = launch();
        let same = (0..8).all(|_| launch() == first);
        eprintln!("{}: the same bits each time: {same}", row.name);
        if row.name.starts_with("cuda/fused") {
            kinds.push(first);
        }
        assert!(same || ["cuda/per_op", "cuda/graph"].contains(&row.name), "{}", row.name);
    }
    // Starting early changes when kernels run, never their results.
    assert!(kinds.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn the_persistent_kernel_repeats_bit_by_bit_a_thousand_times() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let plain = denoise_loop_of(SHALLOW_MODEL, 50, 968, 2);
    for problem in [plain, with_fp8_weights(plain), with_int4_weights(plain)] {
        let inputs = problem.inputs(25);
        let Some(mut task) = prepare_row(&LOOP[5], &problem, &inputs, &device) else { return };
        let mut launch = || {
            task.poison_outputs().unwrap();
            task.launch().unwrap();
            task.synchronize().unwrap();
            task.outputs().unwrap().tensor("actions").as_bytes().to_vec()
        };
        let first = launch();
        // A race in an exchange between blocks shows as a rare difference.
        for number in 1..1000 {
            assert_eq!(launch(), first, "{:?} launch {number}", problem.expert.weights);
        }
    }
}

#[test]
fn the_declared_denoise_memory_is_within_a_twentieth_of_the_used_memory() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = denoise_loop_of(PI05_MODEL, 50, 968, 10);
    let inputs = problem.inputs(24);
    for row in LOOP {
        let free = || memory::memory_after_launches(&device).unwrap().0 as f64;
        // The row is prepared once before the measurement, so that modules and the pool's own
        // overhead are not counted.
        if prepare_row(row, &problem, &inputs, &device).is_none() {
            continue;
        }
        let before = free();
        let task = prepare_row(row, &problem, &inputs, &device);
        let used = before - free();
        drop(task);
        let declared = row.device_bytes(&problem).unwrap() as f64;
        eprintln!("{}: declared {:.1} MB, used {:.1} MB", row.name, declared / 1e6, used / 1e6);
        // The driver allocates in pieces of 32 MiB.
        assert!(
            (used - declared).abs() <= 0.05 * declared + 64e6,
            "{}: declared {declared}, used {used}",
            row.name
        );
    }
}
