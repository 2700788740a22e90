use proptest::prelude::*;

use super::*;
use crate::denoise::model::{ExpertModel, PI05_MODEL, ReadTime, TINY_MODEL, TensorSpec};
use crate::denoise::plain::{PlainExpert, PlantedFault};
use crate::denoise::reference::*;
use crate::denoise::shape::MAX_TOKENS_AND_STEPS;
use kernelgate::verify::{OutputComparison, compare_outputs};
use kernelgate::workload::DefaultScale;
use kernelgate::workload::{Effort, TensorData};
use kernelgate_numerics::gemm::{product, view};

const PLANTED_FAULTS: [PlantedFault; 10] = [
    PlantedFault::NoSuffix,
    PlantedFault::Causal,
    PlantedFault::ShortPrefix,
    PlantedFault::QueryPosition,
    PlantedFault::ScaleWithoutOne,
    PlantedFault::NoGate,
    PlantedFault::WrongStyle,
    PlantedFault::Relu,
    PlantedFault::ScoreScale,
    PlantedFault::WrongTime,
];

fn tiny_shape(s: usize, p: usize, dtype: Dtype) -> ActionExpertShape {
    ActionExpertShape { model: TINY_MODEL, s, p, dtype, weights: WeightFormat::Same }
}

fn fp8_shape(model: ExpertModel, s: usize, p: usize) -> ActionExpertShape {
    ActionExpertShape { model, s, p, dtype: Dtype::Bf16, weights: WeightFormat::Fp8 }
}

fn int4_shape(model: ExpertModel, s: usize, p: usize) -> ActionExpertShape {
    ActionExpertShape { weights: WeightFormat::Int4, ..fp8_shape(model, s, p) }
}

fn first_values(mut expected: Vec<Expected>) -> Vec<f64> {
    let TensorData::F64(values) = expected.remove(0).values else { panic!("the reference is f64") };
    values
}

/// Distance of `actual` from a problem's reference, without a tolerance.
fn distance_from_reference(actual: Vec<f64>, expected: &[Expected]) -> OutputComparison {
    let outputs = Tensors::new().with(&expected[0].name, expected[0].shape.clone(), actual);
    compare_outputs(&outputs, expected, Tolerance { max_error: f64::MAX, relative_l2: f64::MAX })
        .unwrap()
}

fn action_values(inputs: &Tensors) -> Vec<f64> {
    inputs.tensor("x").to_f64(0, inputs.tensor("x").len())
}

fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-12
}

#[test]
fn cost_of_a_full_step_is_the_published_one() {
    let million = |count: u64| (count as f64 / 1e5).round() / 10.0;
    let giga = |count: u64| (count as f64 / 1e7).round() / 100.0;
    let shape = ActionExpertShape {
        model: PI05_MODEL,
        s: 50,
        p: 968,
        dtype: Dtype::Bf16,
        weights: WeightFormat::Same,
    };
    let specs = PI05_MODEL.input_tensors(50, 968, Dtype::Bf16);
    let elements = |named: &dyn Fn(&str) -> bool| -> u64 {
        specs
            .iter()
            .filter(|spec| named(spec.name))
            .map(|spec| spec.bytes() / spec.dtype.bytes() as u64)
            .sum()
    };
    let cache = |name: &str| name.ends_with("_cache");

    assert_eq!(million(PI05_MODEL.layer_weight_elements()), 311.4);
    assert_eq!(million(elements(&|name| name.contains("style"))), 116.5);
    assert_eq!(million(elements(&|name| name != "x" && !cache(name))), 430.1);
    assert_eq!(
        PI05_MODEL.style_weight_elements(),
        elements(&|name| name.contains("style") && !name.ends_with("_bias"))
    );
    assert_eq!(
        PI05_MODEL.time_weight_elements(),
        elements(&|name| name == "time_in" || name == "time_out")
    );

    assert_eq!(giga(shape.projection_flops()), 31.14);
    assert_eq!(giga(shape.attention_flops()), 7.51);
    assert_eq!(giga(shape.projection_flops() + shape.attention_flops()), 38.65);
    // Styles, time and actions are added to this number.
    assert_eq!(giga(DenoiseStep { expert: shape }.work().matmul_flops()), 38.89);

    assert_eq!(
        million(specs.iter().filter(|spec| cache(spec.name)).map(TensorSpec::bytes).sum()),
        17.8
    );
    let each_step: u64 =
        specs.iter().filter(|spec| spec.read == ReadTime::EachStep).map(TensorSpec::bytes).sum();
    assert_eq!(million(each_step), 640.7);
    // The figure would be 878 with biases in bf16; here they are f32, which is 0.2 MB more.
    assert_eq!(million(DenoiseStep { expert: shape }.work().total_bytes()), 878.3);
    let whole = DenoiseLoop { expert: shape, steps: 10 }.work();
    let once = DenoiseStep { expert: shape }.work().read_bytes - each_step - 4;
    assert_eq!(whole.read_bytes, 10 * each_step + once);
    assert_eq!(whole.matmul_flops(), 10 * DenoiseStep { expert: shape }.work().matmul_flops());
}

#[test]
fn declared_bytes_are_those_of_the_tensors() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let step = DenoiseStep { expert: tiny_shape(7, 13, dtype) };
        let inputs = step.inputs(1);
        assert_eq!(step.work().read_bytes, inputs.bytes() as u64);
        assert!(step.host_bytes() > inputs.bytes() as u64);
        assert_eq!(inputs.tensor("q_proj").dtype(), dtype);
        assert!(
            ["x", "t", "style1_bias", "action_out_bias"]
                .iter()
                .all(|name| inputs.tensor(name).dtype() == Dtype::F32)
        );
    }
}

#[test]
fn fp8_reads_half_the_weights_and_computes_in_bf16() {
    let (bf16, fp8) = (
        ActionExpertShape {
            model: PI05_MODEL,
            s: 50,
            p: 968,
            dtype: Dtype::Bf16,
            weights: WeightFormat::Same,
        },
        fp8_shape(PI05_MODEL, 50, 968),
    );
    let [plain, quantized] = [bf16, fp8].map(|expert| DenoiseLoop { expert, steps: 10 }.work());
    assert_eq!(plain.flops, quantized.flops);
    // Each weight takes a byte, and each column one more: of q, k and v, out, gate and up, down.
    let exponents = 18 * (2560 + 1024 + 8192 + 1024);
    assert_eq!(
        plain.read_bytes - quantized.read_bytes,
        10 * (PI05_MODEL.layer_weight_elements() - exponents)
    );
    assert_eq!(plain.write_bytes, quantized.write_bytes);
    // Each weight takes half a byte, and each 128 weights a bf16.
    let int4 = DenoiseLoop { expert: int4_shape(PI05_MODEL, 50, 968), steps: 10 }.work();
    assert_eq!((&plain.flops, plain.write_bytes), (&int4.flops, int4.write_bytes));
    let weights = PI05_MODEL.layer_weight_elements();
    assert_eq!(plain.read_bytes - int4.read_bytes, 10 * (weights * 3 / 2 - weights / 64));
}

#[test]
fn the_loop_of_quantised_weights_is_that_of_the_dequantised_ones() {
    for expert in [fp8_shape(TINY_MODEL, 7, 13), int4_shape(TINY_MODEL, 7, 13)] {
        let problem = DenoiseLoop { expert, steps: 3 };
        let plain = DenoiseLoop { expert: tiny_shape(7, 13, Dtype::Bf16), steps: 3 };
        let inputs = problem.inputs(1);
        assert_eq!(inputs, plain.inputs(1));
        let quantized = problem.expert.dequantised_inputs(&inputs);
        assert!(quantized.tensor("down_proj") != inputs.tensor("down_proj"));
        assert_eq!(quantized.tensor("style1"), inputs.tensor("style1"));
        assert_eq!(problem.reference(&inputs), plain.reference(&quantized));
        assert_eq!(problem.tolerance(), plain.tolerance());
    }
}

/// Prints the error of quantising the full model; the test takes minutes.
#[test]
#[ignore = "prints figures of docs/results/denoise.md"]
fn prints_the_error_of_quantising_the_full_model() {
    let sizes = [(50, 968, 1), (10, 712, 10), (50, 968, 10)];
    for (s, p, steps) in sizes {
        let plain =
            ActionExpertShape { weights: WeightFormat::Same, ..int4_shape(PI05_MODEL, s, p) };
        let plain = DenoiseLoop { expert: plain, steps };
        let inputs = plain.inputs(1);
        let exact = plain.reference(&inputs);
        let quantised =
            DenoiseLoop { expert: int4_shape(PI05_MODEL, s, p), steps }.reference(&inputs);
        let (x, y) = (&first_values(quantised), &first_values(exact.clone()));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let cosine = dot(x, y) / (dot(x, x) * dot(y, y)).sqrt();
        eprintln!(
            "s={s} p={p} steps={steps} cosine {cosine:.5} {:?}",
            distance_from_reference(x.clone(), &exact)
        );
    }
}

/// The expected errors of the full model, with 50 actions after a prefix of 968, are 2.8e-2 after
/// ten steps (cosine 0.9996) and 6.4e-2 after one.
#[test]
fn quantising_itself_moves_the_actions_by_a_percent() {
    for seed in 1..4 {
        let problem = DenoiseLoop { expert: fp8_shape(TINY_MODEL, 50, 100), steps: 10 };
        let plain = DenoiseLoop { expert: tiny_shape(50, 100, Dtype::Bf16), steps: 10 };
        let inputs = problem.inputs(seed);
        let moved = distance_from_reference(
            first_values(problem.reference(&inputs)),
            &plain.reference(&inputs),
        );
        assert!((1e-3..5e-2).contains(&moved.errors.relative_l2), "{moved:?}");
        let problem = DenoiseLoop { expert: int4_shape(TINY_MODEL, 50, 100), ..problem };
        let int4 = distance_from_reference(
            first_values(problem.reference(&inputs)),
            &plain.reference(&inputs),
        );
        assert!((moved.errors.relative_l2..2e-1).contains(&int4.errors.relative_l2), "{int4:?}");
    }
}

#[test]
fn every_tensor_is_in_the_table_of_the_module() {
    let table = include_str!("definition.rs");
    let inputs = DenoiseStep { expert: tiny_shape(1, 1, Dtype::F32) }.inputs(1);
    for (name, _) in inputs.iter() {
        assert!(
            table
                .lines()
                .any(|line| line.starts_with("//! |") && line.contains(&format!("`{name}`"))),
            "{name}"
        );
    }
}

#[test]
fn selections_bind_and_their_ids_are_short_and_unique() {
    fn case_ids<P: Problem>(workload: &Workload<P>, effort: Effort) -> Vec<String> {
        let points = workload.points(effort, DefaultScale::Accelerator, &[]).unwrap();
        points.iter().for_each(|point| drop((workload.bind)(point).unwrap()));
        points.iter().map(|point| format!("{}/{point}", workload.name)).collect()
    }
    assert_eq!(
        [case_ids(&STEP_WORKLOAD, Effort::Default), case_ids(&LOOP_WORKLOAD, Effort::Default)]
            .concat(),
        ["denoise/step/pi05_s50_p968_bf16", "denoise/loop/pi05_s50_p968_steps10_bf16"]
    );
    let all =
        [case_ids(&STEP_WORKLOAD, Effort::Thorough), case_ids(&LOOP_WORKLOAD, Effort::Thorough)]
            .concat();
    assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    assert!(all.iter().all(|id| id.len() <= 64), "{all:?}");
}

#[test]
fn a_layer_of_the_expert_is_its_model_with_a_depth_of_one() {
    let model_of = |model: &str| {
        let selection = format!("model={model}").parse().unwrap();
        let point = LOOP_WORKLOAD
            .points(Effort::Default, DefaultScale::Host, &[selection])
            .unwrap()
            .remove(0);
        (LOOP_WORKLOAD.bind)(&point).unwrap().expert.model
    };
    assert_eq!(
        model_of("pi05_layer"),
        ExpertModel { name: "pi05_layer", depth: 1, ..model_of("pi05") }
    );
}

#[test]
fn sizes_that_no_policy_has_are_refused() {
    let bind = |axis: &str, value: &str| {
        let selection = format!("{axis}={value}").parse().unwrap();
        let point = LOOP_WORKLOAD
            .points(Effort::Default, DefaultScale::Host, &[selection])
            .unwrap()
            .remove(0);
        (LOOP_WORKLOAD.bind)(&point).map(|problem| problem.host_bytes())
    };
    for axis in ["s", "p", "steps"] {
        assert!(
            matches!(bind(axis, "18446744073709551615"), Err(AxisError::Combination(_))),
            "{axis}"
        );
    }
    assert!(
        bind("s", "65536").is_ok() && bind("p", "65536").is_ok() && bind("steps", "1024").is_ok()
    );
    let largest = DenoiseLoop {
        expert: ActionExpertShape {
            model: PI05_MODEL,
            s: MAX_TOKENS_AND_STEPS,
            p: MAX_TOKENS_AND_STEPS,
            dtype: Dtype::F32,
            weights: WeightFormat::Same,
        },
        steps: MAX_LOOP_STEPS,
    };
    assert!(largest.work().matmul_flops() > 1 << 60 && largest.host_bytes() > 1 << 38);
}

#[test]
fn time_embedding_by_hand() {
    // The periods of the time embedding are 0.004 and 4.
    let half = 0.5f64.sqrt();
    for (t, expected) in
        [(0.0, [0.0, 0.0, 1.0, 1.0]), (1.0, [0.0, 1.0, 1.0, 0.0]), (0.5, [0.0, half, 1.0, half])]
    {
        let embedding = time_embedding(t, 4);
        assert!(
            embedding.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-11),
            "{t}: {embedding:?}"
        );
    }
    // With width 1024 the first period is 0.004 and the last 4; each is 1000^(1/511) times the
    // previous one.
    let embedding = time_embedding(1e-3, 1024);
    assert!(is_close(embedding[0], 1.0) && is_close(embedding[512], 0.0));
    assert!(is_close(embedding[511], (0.0005 * std::f64::consts::PI).sin()));
    let ratio = embedding[510].asin() / embedding[511].asin();
    assert!((ratio - 1000f64.powf(1.0 / 511.0)).abs() < 1e-9, "{ratio}");
}

#[test]
fn activations_by_hand() {
    assert_eq!((gelu_tanh(0.0), silu(0.0)), (0.0, 0.0));
    assert!((gelu_tanh(1.0) - 0.841_191_990_608_306_6).abs() < 1e-12, "{}", gelu_tanh(1.0));
    assert!((silu(1.0) - 0.731_058_578_630_004_9).abs() < 1e-12);
    for x in [-30.0, -3.0, -0.5, 0.1, 2.0, 40.0] {
        assert!(
            is_close(gelu_tanh(x) - gelu_tanh(-x), x) && is_close(silu(x) - silu(-x), x),
            "{x}"
        );
    }
    let mut row = vec![3.0, 1.0, 3.0 - 2f64.ln()];
    scaled_softmax_in_place(&mut row, 1.0);
    assert!(
        is_close(row.iter().sum(), 1.0)
            && is_close(row[0], 2.0 * row[2])
            && is_close(row[0], row[1] * 2f64.exp())
    );
}

#[test]
fn ada_rms_by_hand() {
    let style = ReferenceStyleRows { scale: &[0.0, 1.0], shift: &[0.0, 5.0], gate: &[0.0, 0.0] };
    // The mean of 9 and 16, plus 1e-6, is 12.500001.
    let factor = 1.0 / 12.500001f64.sqrt();
    let y = ada_rms(&[3.0, 4.0, -3.0, 0.0], &style);
    assert!(is_close(y[0], 3.0 * factor) && is_close(y[1], 8.0 * factor + 5.0), "{y:?}");
    assert!(is_close(y[2], -3.0 / 4.500001f64.sqrt()) && is_close(y[3], 5.0), "{y:?}");
}

#[test]
fn rope_by_hand() {
    let mut x = [1.0, 0.0, 0.0, 2.0];
    apply_rope_to_rows(&mut x, 4, |_| 3);
    // The pairs (0, 2) and (1, 3) are rotated by 3 and 3/100.
    let expected = [3f64.cos(), -2.0 * 0.03f64.sin(), 3f64.sin(), 2.0 * 0.03f64.cos()];
    assert!(x.iter().zip(expected).all(|(&a, b)| is_close(a, b)), "{x:?}");
}

proptest! {
    #[test]
    fn gemms_are_those_of_triple_loops(
        m in 1usize..20,
        k in 1usize..40,
        n in 1usize..150,
        seed: u64,
    ) {
        let draw =
            |name: &str, len| kernelgate::workload::random::map_normal_values(seed, name, len, f64::from);
        let (a, b) = (draw("a", m * k), draw("b", k * n));
        let c = product(view(&a, m, k), view(&b, k, n));
        // The stack has two matrices in column blocks; the second one is used.
        let stack = Tensors::new().with("w", [2, k, n], [draw("other", k * n), b.clone()].concat());
        let blocked = matmul(&stack, "w", 1, &a, m);
        for i in 0..m {
            for j in 0..n {
                let sum: f64 = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
                prop_assert!((c[i * n + j] - sum).abs() < 1e-12 * k as f64);
                prop_assert!((blocked[i * n + j] - sum).abs() < 1e-12 * k as f64);
            }
        }
    }

    #[test]
    fn rope_keeps_norms_and_sees_only_relative_positions(
        seed: u64,
        i in 0usize..1000,
        j in 0usize..1000,
        offset in 0usize..1000,
    ) {
        let draw = |name: &str| kernelgate::workload::random::map_normal_values(seed, name, 16, f64::from);
        let at = |x: &[f64], position| {
            let mut x = x.to_vec();
            apply_rope_to_rows(&mut x, 16, |_| position);
            x
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (q, k) = (draw("q"), draw("k"));
        let turned = at(&q, i);
        prop_assert!((dot(&turned, &turned) - dot(&q, &q)).abs() < 1e-9);
        prop_assert!(
            (dot(&turned, &at(&k, j)) - dot(&at(&q, i + offset), &at(&k, j + offset))).abs() < 1e-9
        );
        prop_assert_eq!(at(&q, 0), q);
    }
}

#[test]
fn the_reference_is_the_plain_implementation() {
    for (s, p, dtype) in [
        (1, 1, Dtype::F32),
        (7, 13, Dtype::F32),
        (7, 13, Dtype::Bf16),
        (50, 968, Dtype::F32),
        (1, 968, Dtype::Bf16),
        (3, 0, Dtype::F32),
    ] {
        let step = DenoiseStep { expert: tiny_shape(s, p, dtype) };
        let inputs = step.inputs(s as u64);
        let plain = PlainExpert::new(&step.expert, &inputs)
            .velocity(&action_values(&inputs), f64::from(SINGLE_STEP_TIME));
        let comparison = distance_from_reference(plain, &step.reference(&inputs));
        assert!(
            comparison.errors.relative_l2 < 1e-13 && comparison.errors.max_error < 1e-13,
            "s={s} p={p}: {comparison:?}"
        );
    }
}

#[test]
fn the_loop_is_the_plain_step_repeated() {
    let steps = 3;
    let problem = DenoiseLoop { expert: tiny_shape(7, 13, Dtype::F32), steps };
    let inputs = problem.inputs(1);
    let plain = PlainExpert::new(&problem.expert, &inputs);
    let mut x = action_values(&inputs);
    for t in [1.0, 2.0 / 3.0, 1.0 / 3.0] {
        let v = plain.velocity(&x, t);
        x.iter_mut().zip(v).for_each(|(x, v)| *x -= v / 3.0);
    }
    assert!(distance_from_reference(x, &problem.reference(&inputs)).errors.relative_l2 < 1e-13);
}

#[test]
fn tolerance_lets_no_fault_pass() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let step = DenoiseStep { expert: tiny_shape(50, 100, dtype) };
        let tolerance = step.tolerance();
        for seed in 1..4 {
            let inputs = step.inputs(seed);
            let expected = step.reference(&inputs);
            let mut plain = PlainExpert::new(&step.expert, &inputs);
            for fault in PLANTED_FAULTS {
                // One token of a hundred can weigh less than the rounding of bf16, so only the f32
                // problem must detect this fault.
                if fault == PlantedFault::ShortPrefix && dtype == Dtype::Bf16 {
                    continue;
                }
                plain.fault = fault;
                let wrong = distance_from_reference(
                    plain.velocity(&action_values(&inputs), f64::from(SINGLE_STEP_TIME)),
                    &expected,
                );
                let seen = wrong.errors.relative_l2 > tolerance.relative_l2;
                assert!(seen, "{} seed {seed} {fault:?}: {wrong:?}", dtype.name());
            }
        }
    }
}

#[test]
fn tolerance_lets_bf16_rounding_pass() {
    let steps = 10;
    for (s, p) in [(1, 1), (7, 13), (50, 100)] {
        let expert = tiny_shape(s, p, Dtype::Bf16);
        let (step, whole) = (DenoiseStep { expert }, DenoiseLoop { expert, steps });
        for seed in 1..4 {
            let inputs = step.inputs(seed);
            let mut plain = PlainExpert::new(&expert, &inputs);
            plain.rounded = true;
            let velocity = plain.velocity(&action_values(&inputs), f64::from(SINGLE_STEP_TIME));
            let times = denoising_times(steps);
            let moved = euler_steps(steps, action_values(&inputs), |x, step| {
                plain.velocity(x, times[step])
            });
            for (rounded, tolerance) in [
                (distance_from_reference(velocity, &step.reference(&inputs)), step.tolerance()),
                (distance_from_reference(moved, &whole.reference(&inputs)), whole.tolerance()),
            ] {
                let room = (tolerance.relative_l2 / rounded.errors.relative_l2)
                    .min(tolerance.max_error / rounded.errors.max_error);
                assert!(room > 1.5, "s={s} p={p} seed {seed}: {rounded:?}");
            }
        }
    }
}

#[test]
fn activations_stay_of_order_one() {
    for seed in 1..4 {
        let step = DenoiseStep { expert: tiny_shape(50, 100, Dtype::F32) };
        let velocity = first_values(step.reference(&step.inputs(seed)));
        let rms = (velocity.iter().map(|x| x * x).sum::<f64>() / velocity.len() as f64).sqrt();
        assert!((0.5..3.0).contains(&rms), "{rms}");
    }
}

#[test]
fn zero_gates_leave_the_residual_untouched() {
    let step = DenoiseStep { expert: tiny_shape(7, 13, Dtype::F32) };
    let mut inputs = step.inputs(1);
    let before = first_values(step.reference(&inputs));
    let width = TINY_MODEL.width;
    for name in ["style1", "style2", "style1_bias", "style2_bias"] {
        for row in inputs.f32_mut(name).chunks_mut(3 * width) {
            row[2 * width..].fill(0.0);
        }
    }
    let expected = first_values(step.reference(&inputs));
    assert_ne!(expected, before);
    for name in ["q_proj", "v_proj", "o_proj", "down_proj", "k_cache", "v_cache"] {
        inputs.f32_mut(name).iter_mut().for_each(|x| *x = 1.0 - *x);
    }
    assert_eq!(first_values(step.reference(&inputs)), expected);
}

#[test]
fn a_loop_without_velocity_returns_the_noise_and_with_a_constant_one_subtracts_it() {
    for steps in [1, 7, 10] {
        let problem = DenoiseLoop { expert: tiny_shape(7, 13, Dtype::F32), steps };
        let mut inputs = problem.inputs(1);
        inputs.f32_mut("action_out").fill(0.0);
        inputs.f32_mut("action_out_bias").fill(0.0);
        let noise = action_values(&inputs);
        assert_eq!(first_values(problem.reference(&inputs)), noise);
        inputs.f32_mut("action_out_bias").fill(0.25);
        let moved = first_values(problem.reference(&inputs));
        assert!(moved.iter().zip(&noise).all(|(moved, noise)| is_close(*moved, noise - 0.25)));
    }
}

#[test]
fn euler_takes_exactly_the_steps_at_the_times_from_one() {
    for steps in [1, 3, 10, 1000] {
        let mut seen = Vec::new();
        let x = euler_steps(steps, vec![2.0], |x, step| {
            seen.push(step);
            x.to_vec()
        });
        assert_eq!(seen, (0..steps).collect::<Vec<_>>());
        assert!(is_close(x[0], 2.0 * (1.0 - 1.0 / steps as f64).powi(steps as i32)));
        let times = denoising_times(steps);
        assert_eq!((times.len(), times[0]), (steps, 1.0));
        assert!(times.iter().enumerate().all(|(i, &t)| is_close(t, 1.0 - i as f64 / steps as f64)));
    }
}

#[test]
fn inputs_are_those_of_the_seed() {
    let problem = DenoiseLoop { expert: tiny_shape(7, 13, Dtype::Bf16), steps: 2 };
    assert_eq!(problem.inputs(1), problem.inputs(1));
    assert_ne!(problem.inputs(1), problem.inputs(2));
    // Problems that were drawn before must not affect these, although they share tensors.
    for (s, p, dtype) in [(7, 13, Dtype::Bf16), (9, 13, Dtype::Bf16), (9, 21, Dtype::F32)] {
        let shape = tiny_shape(s, p, dtype);
        let inputs = shape.inputs(1);
        for spec in shape.input_specs() {
            assert_eq!(
                *inputs.tensor(spec.name),
                spec.draw_tensor(1),
                "{} of {shape:?}",
                spec.name
            );
        }
        assert_eq!(inputs.iter().count(), shape.input_specs().len());
    }
    assert!(
        problem
            .inputs(1)
            .iter()
            .all(|(_, tensor)| tensor.to_f64(0, tensor.len()).iter().any(|&x| x != 0.0))
    );
}
