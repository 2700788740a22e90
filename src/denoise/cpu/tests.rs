use std::sync::Arc;

use super::element::{CpuStyle, ada_rms, apply_rope_to_head, softmax_unscaled};
use super::*;
use crate::denoise::model::{ExpertModel, TINY_MODEL};
use crate::denoise::reference;
use kernelgate::backend::Executable;
use kernelgate::verify::{OutputComparison, compare_outputs, launch_and_verify};
use kernelgate::workload::{Problem, Tolerance, random};

/// Model whose extents are not multiples of a vector or of a block of columns: several blocks, the
/// last one short.
const ODD_SIZED_MODEL: ExpertModel =
    ExpertModel { name: "odd", width: 234, depth: 2, mlp: 1001, heads: 3, head_dim: 10 };

fn shape(model: ExpertModel, s: usize, p: usize) -> ActionExpertShape {
    ActionExpertShape { model, s, p, dtype: Dtype::F32, weights: WeightFormat::Same }
}

fn cpu_task<P: Problem>(
    implementation: &Implementation<P>,
    problem: &P,
    inputs: &Arc<Tensors>,
) -> CpuTask {
    (implementation.supports)(problem).unwrap();
    let Prepare::Cpu(prepare) = implementation.prepare else { panic!("not a CPU row") };
    prepare(problem, inputs.clone())
}

fn check<P: Problem>(
    implementation: &Implementation<P>,
    problem: &P,
    inputs: Tensors,
) -> OutputComparison {
    let inputs = Arc::new(inputs);
    let expected = problem.reference(&inputs);
    launch_and_verify(
        &mut cpu_task(implementation, problem, &inputs),
        &expected,
        problem.tolerance(),
    )
    .unwrap()
}

#[test]
fn cpu_denoising_steps_agree_with_the_reference() {
    for (model, s, p) in [
        (TINY_MODEL, 1, 1),
        (TINY_MODEL, 7, 13),
        (TINY_MODEL, 50, 968),
        (TINY_MODEL, 1, 968),
        (TINY_MODEL, 50, 1),
        (TINY_MODEL, 3, 0),
        (ODD_SIZED_MODEL, 7, 13),
        (ODD_SIZED_MODEL, 33, 130),
    ] {
        let problem = DenoiseStep { expert: shape(model, s, p) };
        for t in [0.7f32, 1.0, 0.1] {
            let comparison = check(&STEP[0], &problem, problem.inputs(1).with("t", [1], vec![t]));
            assert!(
                comparison.errors.relative_l2 < 2e-6,
                "{} s={s} p={p} t={t}: {comparison:?}",
                model.name
            );
        }
    }
}

#[test]
fn cpu_denoising_loops_agree_with_the_reference() {
    for (model, s, p, steps) in [
        (TINY_MODEL, 1, 1, 1),
        (TINY_MODEL, 7, 13, 3),
        (TINY_MODEL, 50, 968, 10),
        (TINY_MODEL, 3, 0, 2),
        (ODD_SIZED_MODEL, 7, 13, 10),
    ] {
        let problem = DenoiseLoop { expert: shape(model, s, p), steps };
        let comparison = check(&LOOP[0], &problem, problem.inputs(1));
        assert!(
            comparison.errors.relative_l2 < 2e-6,
            "{} s={s} p={p} steps={steps}: {comparison:?}",
            model.name
        );
    }
}

#[test]
fn a_second_launch_gives_the_same_bits() {
    let problem = DenoiseLoop { expert: shape(TINY_MODEL, 7, 13), steps: 3 };
    let mut task = cpu_task(&LOOP[0], &problem, &Arc::new(problem.inputs(1)));
    let mut launch = || {
        task.poison_outputs().unwrap();
        task.launch().unwrap();
        task.outputs().unwrap().clone()
    };
    assert_eq!(launch(), launch());
}

#[test]
fn a_denoising_loop_without_velocity_returns_the_noise() {
    let problem = DenoiseLoop { expert: shape(TINY_MODEL, 7, 13), steps: 10 };
    let mut inputs = problem.inputs(1);
    inputs.f32_mut("action_out").fill(0.0);
    inputs.f32_mut("action_out_bias").fill(0.0);
    let noise = inputs.f32("x").to_vec();
    let mut task = cpu_task(&LOOP[0], &problem, &Arc::new(inputs));
    task.launch().unwrap();
    assert_eq!(task.outputs().unwrap().f32("actions"), noise);
}

#[test]
fn a_nan_in_a_weight_reaches_the_output() {
    let problem = DenoiseStep { expert: shape(TINY_MODEL, 2, 3) };
    for name in ["k_cache", "gate_proj", "style1_bias", "time_in"] {
        let mut inputs = problem.inputs(1);
        inputs.f32_mut(name)[0] = f32::NAN;
        let mut task = cpu_task(&STEP[0], &problem, &Arc::new(inputs));
        task.launch().unwrap();
        assert!(task.outputs().unwrap().f32("velocity").iter().any(|x| x.is_nan()), "{name}");
    }
}

#[test]
fn fp8_loops_agree_with_quantised_weights_and_have_the_quantisation_error() {
    let bf16 = ActionExpertShape { dtype: Dtype::Bf16, ..shape(TINY_MODEL, 7, 13) };
    let expert = ActionExpertShape { weights: WeightFormat::Fp8, ..bf16 };
    let step = DenoiseStep { expert };
    assert!(check(&STEP[0], &step, step.inputs(1)).errors.relative_l2 < 2e-6);

    let problem = DenoiseLoop { expert, steps: 3 };
    let inputs = Arc::new(problem.inputs(1));
    let mut task = cpu_task(&LOOP[0], &problem, &inputs);
    let own =
        launch_and_verify(&mut task, &problem.reference(&inputs), problem.tolerance()).unwrap();
    assert!(own.errors.relative_l2 < 2e-6, "{own:?}");
    let unquantized = DenoiseLoop { expert: bf16, ..problem }.reference(&inputs);
    let wide = Tolerance { max_error: f64::MAX, relative_l2: f64::MAX };
    let lost =
        compare_outputs(task.outputs().unwrap(), &unquantized, wide).unwrap().errors.relative_l2;
    let simulated = problem.reference(&inputs).remove(0);
    let simulated = Tensors::new().with("actions", simulated.shape.clone(), simulated.values);
    let expected = compare_outputs(&simulated, &unquantized, wide).unwrap().errors.relative_l2;
    assert!(expected > 1e-3 && (lost / expected - 1.0).abs() < 1e-3, "{lost} {expected}");
}

#[test]
fn cpu_denoising_declines_bf16() {
    let expert = ActionExpertShape { dtype: Dtype::Bf16, ..shape(TINY_MODEL, 1, 1) };
    assert_eq!((STEP[0].supports)(&DenoiseStep { expert }), Err("computes f32 only".to_owned()));
    assert_eq!(
        (LOOP[0].supports)(&DenoiseLoop { expert, steps: 1 }),
        Err("computes f32 only".to_owned())
    );
}

#[test]
fn cpu_row_functions_agree_with_the_reference_at_any_length() {
    let near = |actual: &[f32], expected: &[f64]| {
        let error = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() / (1.0 + b.abs());
        assert!(
            actual.iter().zip(expected).map(error).fold(0.0, f64::max) < 2e-6,
            "{actual:?} {expected:?}"
        );
    };
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    for len in [2, 10, 64, 130, 1018] {
        let (x, row) =
            (random::normal_values(1, "x", len), random::normal_values(1, "style", 3 * len));
        let style = CpuStyle::from_row(&row);
        let mut y = vec![0.0; len];
        ada_rms(&mut y, &x, &style);
        let (scale, shift, gate) = (wide(style.scale), wide(style.shift), wide(style.gate));
        near(
            &y,
            &reference::ada_rms(
                &wide(&x),
                &reference::ReferenceStyleRows { scale: &scale, shift: &shift, gate: &gate },
            ),
        );

        let mut scores: Vec<f32> = x.iter().map(|x| 10.0 * x).collect();
        let mut expected = wide(&scores);
        let inverse_sum = softmax_unscaled(&mut scores);
        reference::scaled_softmax_in_place(&mut expected, 1.0);
        near(&scores.iter().map(|x| x * inverse_sum).collect::<Vec<_>>(), &expected);

        let angle = |i: usize| 3.0 / 1e4f64.powf(i as f64 / (len / 2) as f64);
        let [cos, sin] = [f64::cos, f64::sin]
            .map(|f| (0..len / 2).map(|i| f(angle(i)) as f32).collect::<Vec<_>>());
        let (mut turned, mut expected) = (x.clone(), wide(&x));
        apply_rope_to_head(&mut turned, &cos, &sin);
        reference::apply_rope_to_rows(&mut expected, len, |_| 3);
        near(&turned, &expected);
    }
}
