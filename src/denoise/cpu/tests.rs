use std::sync::Arc;

use super::element::{
    AdaptiveNormStyleSlices, ada_rms_norm_of_row, apply_rope_to_head, exponentials_and_inverse_sum,
};
use super::*;
use crate::denoise::model::{ExpertDimensions, TINY_TEST_MODEL};
use crate::denoise::reference;
use kernelgate::backend::LaunchableProblem;
use kernelgate::verify::{
    ComparisonWithReference, compare_outputs_with_reference,
    launch_twice_and_compare_with_reference,
};
use kernelgate::workload::{Problem, Tolerance, random};

/// Test model whose sizes are not multiples of a vector or of a block of columns: matrices have
/// several column blocks, the last of them narrower.
const MODEL_WITH_ODD_SIZES: ExpertDimensions = ExpertDimensions {
    model_name: "odd",
    model_width: 234,
    layer_count: 2,
    feed_forward_width: 1001,
    query_heads: 3,
    head_dim: 10,
};

fn f32_expert_shape(model: ExpertDimensions, s: usize, p: usize) -> DenoiseParameters {
    DenoiseParameters {
        model,
        action_tokens: s,
        prefix_tokens: p,
        dtype: Dtype::F32,
        weights: LayerWeightFormat::SameDtypeAsActivations,
    }
}

fn prepare_cpu_task_of_row<P: Problem>(
    implementation: &Implementation<P>,
    problem: &P,
    inputs: &Arc<Tensors>,
) -> CpuTask {
    (implementation.supports)(problem).unwrap();
    let PrepareFunction::Cpu(prepare) = implementation.prepare else { panic!("not a CPU row") };
    prepare(problem, inputs.clone())
}

fn compare_cpu_row_with_reference<P: Problem>(
    implementation: &Implementation<P>,
    problem: &P,
    inputs: Tensors,
) -> ComparisonWithReference {
    let inputs = Arc::new(inputs);
    let expected = problem.reference(&inputs);
    launch_twice_and_compare_with_reference(
        &mut prepare_cpu_task_of_row(implementation, problem, &inputs),
        &expected,
        problem.tolerance(),
    )
    .unwrap()
}

#[test]
fn cpu_denoising_steps_agree_with_the_reference() {
    for (model, s, p) in [
        (TINY_TEST_MODEL, 1, 1),
        (TINY_TEST_MODEL, 7, 13),
        (TINY_TEST_MODEL, 50, 968),
        (TINY_TEST_MODEL, 1, 968),
        (TINY_TEST_MODEL, 50, 1),
        (TINY_TEST_MODEL, 3, 0),
        (MODEL_WITH_ODD_SIZES, 7, 13),
        (MODEL_WITH_ODD_SIZES, 33, 130),
    ] {
        let problem = DenoiseStep { expert: f32_expert_shape(model, s, p) };
        for t in [0.7f32, 1.0, 0.1] {
            let comparison = compare_cpu_row_with_reference(
                &CPU_DENOISE_STEP_ROWS[0],
                &problem,
                problem.inputs(1).with_tensor("t", [1], vec![t]),
            );
            assert!(
                comparison.errors.relative_l2 < 2e-6,
                "{} s={s} p={p} t={t}: {comparison:?}",
                model.model_name
            );
        }
    }
}

#[test]
fn cpu_denoising_loops_agree_with_the_reference() {
    for (model, s, p, steps) in [
        (TINY_TEST_MODEL, 1, 1, 1),
        (TINY_TEST_MODEL, 7, 13, 3),
        (TINY_TEST_MODEL, 50, 968, 10),
        (TINY_TEST_MODEL, 3, 0, 2),
        (MODEL_WITH_ODD_SIZES, 7, 13, 10),
    ] {
        let problem = DenoiseLoop { expert: f32_expert_shape(model, s, p), euler_steps: steps };
        let comparison =
            compare_cpu_row_with_reference(&CPU_DENOISE_LOOP_ROWS[0], &problem, problem.inputs(1));
        assert!(
            comparison.errors.relative_l2 < 2e-6,
            "{} s={s} p={p} steps={steps}: {comparison:?}",
            model.model_name
        );
    }
}

#[test]
fn a_second_cpu_denoising_launch_gives_the_same_bits() {
    let problem = DenoiseLoop { expert: f32_expert_shape(TINY_TEST_MODEL, 7, 13), euler_steps: 3 };
    let mut task =
        prepare_cpu_task_of_row(&CPU_DENOISE_LOOP_ROWS[0], &problem, &Arc::new(problem.inputs(1)));
    let mut launch = || {
        task.poison_outputs().unwrap();
        task.launch_once().unwrap();
        task.outputs_on_host().unwrap().clone()
    };
    assert_eq!(launch(), launch());
}

#[test]
fn a_denoising_loop_with_zero_velocity_returns_the_noise() {
    let problem = DenoiseLoop { expert: f32_expert_shape(TINY_TEST_MODEL, 7, 13), euler_steps: 10 };
    let mut inputs = problem.inputs(1);
    inputs.f32_mut("action_out").fill(0.0);
    inputs.f32_mut("action_out_bias").fill(0.0);
    let noise = inputs.f32_elements("x").to_vec();
    let mut task = prepare_cpu_task_of_row(&CPU_DENOISE_LOOP_ROWS[0], &problem, &Arc::new(inputs));
    task.launch_once().unwrap();
    assert_eq!(task.outputs_on_host().unwrap().f32_elements("actions"), noise);
}

#[test]
fn a_nan_in_a_denoising_weight_reaches_the_output() {
    let problem = DenoiseStep { expert: f32_expert_shape(TINY_TEST_MODEL, 2, 3) };
    for name in ["k_cache", "gate_proj", "style1_bias", "time_in"] {
        let mut inputs = problem.inputs(1);
        inputs.f32_mut(name)[0] = f32::NAN;
        let mut task =
            prepare_cpu_task_of_row(&CPU_DENOISE_STEP_ROWS[0], &problem, &Arc::new(inputs));
        task.launch_once().unwrap();
        assert!(
            task.outputs_on_host().unwrap().f32_elements("velocity").iter().any(|x| x.is_nan()),
            "{name}"
        );
    }
}

#[test]
fn fp8_loops_agree_with_quantised_weights_and_differ_from_bf16_weights() {
    let bf16 = DenoiseParameters { dtype: Dtype::Bf16, ..f32_expert_shape(TINY_TEST_MODEL, 7, 13) };
    let expert = DenoiseParameters { weights: LayerWeightFormat::Fp8, ..bf16 };
    let step = DenoiseStep { expert };
    assert!(
        compare_cpu_row_with_reference(&CPU_DENOISE_STEP_ROWS[0], &step, step.inputs(1))
            .errors
            .relative_l2
            < 2e-6
    );

    let problem = DenoiseLoop { expert, euler_steps: 3 };
    let inputs = Arc::new(problem.inputs(1));
    let mut task = prepare_cpu_task_of_row(&CPU_DENOISE_LOOP_ROWS[0], &problem, &inputs);
    let own = launch_twice_and_compare_with_reference(
        &mut task,
        &problem.reference(&inputs),
        problem.tolerance(),
    )
    .unwrap();
    assert!(own.errors.relative_l2 < 2e-6, "{own:?}");
    let unquantized = DenoiseLoop { expert: bf16, ..problem }.reference(&inputs);
    let wide = Tolerance { max_error: f64::MAX, relative_l2: f64::MAX };
    let lost = compare_outputs_with_reference(task.outputs_on_host().unwrap(), &unquantized, wide)
        .unwrap()
        .errors
        .relative_l2;
    let simulated = problem.reference(&inputs).remove(0);
    let simulated = Tensors::new().with_tensor(
        "actions",
        simulated.output_shape.clone(),
        simulated.expected_values,
    );
    let expected =
        compare_outputs_with_reference(&simulated, &unquantized, wide).unwrap().errors.relative_l2;
    assert!(expected > 1e-3 && (lost / expected - 1.0).abs() < 1e-3, "{lost} {expected}");
}

#[test]
fn cpu_denoising_declines_bf16() {
    let expert =
        DenoiseParameters { dtype: Dtype::Bf16, ..f32_expert_shape(TINY_TEST_MODEL, 1, 1) };
    assert_eq!(
        (CPU_DENOISE_STEP_ROWS[0].supports)(&DenoiseStep { expert }),
        Err("computes f32 only".to_owned())
    );
    assert_eq!(
        (CPU_DENOISE_LOOP_ROWS[0].supports)(&DenoiseLoop { expert, euler_steps: 1 }),
        Err("computes f32 only".to_owned())
    );
}

#[test]
fn cpu_row_operations_agree_with_the_reference_at_any_row_length() {
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
        let style = AdaptiveNormStyleSlices::split_style_row(&row);
        let mut y = vec![0.0; len];
        ada_rms_norm_of_row(&mut y, &x, &style);
        let (scale, shift, gate) =
            (wide(style.norm_scale), wide(style.norm_shift), wide(style.branch_gate));
        near(
            &y,
            &reference::ada_rms_norm_of_rows(
                &wide(&x),
                &reference::AdaptiveNormStyle {
                    norm_scale: &scale,
                    norm_shift: &shift,
                    branch_gate: &gate,
                },
            ),
        );

        let mut scores: Vec<f32> = x.iter().map(|x| 10.0 * x).collect();
        let mut expected = wide(&scores);
        let inverse_sum = exponentials_and_inverse_sum(&mut scores);
        reference::softmax_of_scaled_row_in_place(&mut expected, 1.0);
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
