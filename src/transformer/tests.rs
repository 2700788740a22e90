//! Tests of the language model's fp64 reference against finite differences of the loss, by the loss
//! curve of a training, and with emulated bf16 rounding.

use half::bf16;

use super::gradients::expected_training_step_outputs;
use super::reference::LanguageModelReference;
use super::shape::{
    ArenaRowsOfTensor, LanguageModelShape, ParameterTensor, TRAINING_STATE_INPUTS,
    TRAINING_STATE_OUTPUTS,
};
use super::{
    LM_FORWARD_WORKLOAD, LM_TRAINING_STEP_WORKLOAD, LanguageModelForward,
    LanguageModelTrainingStep, check_tokens_are_in_vocabulary,
};
use kernelgate::verify::precision::ErrorBoundsOfOutputs;
use kernelgate::workload::{
    BenchEffort, Dtype, Expected, Problem, SizeOfDefaultProblems, Tensor, TensorData, Tensors,
    symmetry,
};

const TINY_LANGUAGE_MODEL: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 21,
    model_width: 16,
    swiglu_hidden_width: 24,
    layers: 2,
    heads: 2,
    context_tokens: 7,
    batch: 2,
    dtype: Dtype::F32,
};

fn mean_loss_of_all_sequences(shape: &LanguageModelShape, inputs: &Tensors) -> f64 {
    let losses =
        LanguageModelReference::run_forward_pass(shape, inputs, |x| x).mean_losses_of_sequences();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn language_model_reference_gradients_equal_finite_differences() {
    let inputs = LanguageModelTrainingStep { shape: TINY_LANGUAGE_MODEL }.inputs(2);
    let gradients = LanguageModelReference::run_forward_pass(&TINY_LANGUAGE_MODEL, &inputs, |x| x)
        .mean_loss_gradients();
    assert_eq!(gradients.len(), TINY_LANGUAGE_MODEL.arena_rows_of_all_tensors().len());
    for gradient in gradients {
        let ArenaRowsOfTensor { weight, first_arena_row: first, arena_row_count: rows } =
            gradient.tensor;
        assert_eq!(gradient.sampled_row_indices.len(), rows, "{weight:?}");
        let largest =
            gradient.sampled_row_gradients.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        for element in
            [1, gradient.sampled_row_gradients.len() / 2, gradient.sampled_row_gradients.len() - 1]
        {
            let at = |step: f32| {
                let mut moved = inputs.clone();
                let value = &mut moved.f32_mut("parameters")
                    [first * TINY_LANGUAGE_MODEL.model_width + element];
                *value += step;
                (f64::from(*value), mean_loss_of_all_sequences(&TINY_LANGUAGE_MODEL, &moved))
            };
            let ((low, below), (high, above)) = (at(-1e-2), at(1e-2));
            let difference = (above - below) / (high - low);
            let error = (difference - gradient.sampled_row_gradients[element]).abs();
            assert!(error < 1e-3 * largest, "{weight:?} {element}: {error:e} of {largest:e}");
        }
    }
}

/// Converts the expected outputs of a training step to the f32 inputs of the next step.
fn inputs_of_next_training_step(
    shape: &LanguageModelShape,
    inputs: &Tensors,
    expected: &[Expected],
) -> Tensors {
    let mut state = inputs.select_tensors_by_name(&["tokens", "targets"]);
    state = state.with_tensor("steps", [1], vec![inputs.f32_elements("steps")[0] + 1.0]);
    for (name, next) in TRAINING_STATE_INPUTS.into_iter().zip(TRAINING_STATE_OUTPUTS) {
        let mut values = inputs.f32_elements(name).to_vec();
        for one in expected.iter().filter(|one| one.output_name == next) {
            let TensorData::F64(rows) = &one.expected_values else { panic!("fp64") };
            for (row, from) in one.row_indices.iter().flatten().zip(rows.chunks(shape.model_width))
            {
                let to = &mut values[row * shape.model_width..][..shape.model_width];
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
            }
        }
        state =
            state.with_tensor(name, [shape.rows_in_parameter_arena(), shape.model_width], values);
    }
    state
}

/// Draws the inputs of the first step of a training: moments of 0 and no steps done.
pub fn inputs_of_first_training_step(shape: &LanguageModelShape, seed: u64) -> Tensors {
    let zeros = || vec![0.0f32; shape.number_of_parameters()];
    let extents = [shape.rows_in_parameter_arena(), shape.model_width];
    let moments = Tensors::new()
        .with_tensor("first_moments", extents, zeros())
        .with_tensor("second_moments", extents, zeros())
        .with_tensor("steps", [1], vec![0.0f32]);
    LanguageModelTrainingStep { shape: *shape }.inputs(seed).with_tensors_replaced_by(&moments)
}

#[test]
fn the_first_adamw_step_moves_parameters_by_learning_rate_and_decay() {
    let inputs = inputs_of_first_training_step(&TINY_LANGUAGE_MODEL, 3);
    let next = inputs_of_next_training_step(
        &TINY_LANGUAGE_MODEL,
        &inputs,
        &expected_training_step_outputs(&TINY_LANGUAGE_MODEL, &inputs, |x| x),
    );
    let gradients = LanguageModelReference::run_forward_pass(&TINY_LANGUAGE_MODEL, &inputs, |x| x)
        .mean_loss_gradients();
    let head = gradients
        .iter()
        .find(|gradient| gradient.tensor.weight == ParameterTensor::LogitProjection)
        .unwrap();
    let from = head.tensor.first_arena_row * TINY_LANGUAGE_MODEL.model_width;
    for (element, g) in
        head.sampled_row_gradients.iter().enumerate().filter(|(_, g)| g.abs() > 1e-5)
    {
        let before = f64::from(inputs.f32_elements("parameters")[from + element]);
        let after = f64::from(next.f32_elements("parameters")[from + element]);
        let moved = before - after - 1e-4 * before;
        assert!((moved - 1e-3 * g.signum()).abs() < 2e-6, "{element}: {moved}");
    }
}

/// Trains the reference for some steps and returns the mean loss before each step.
pub fn mean_loss_before_each_training_step(
    shape: &LanguageModelShape,
    beginning: &Tensors,
    steps: usize,
) -> Vec<f64> {
    let mut state = beginning.clone();
    let mut losses = vec![];
    for _ in 0..steps {
        let expected = expected_training_step_outputs(shape, &state, |x| x);
        let TensorData::F64(loss) = &expected[0].expected_values else { panic!("fp64") };
        losses.push(loss.iter().sum::<f64>() / loss.len() as f64);
        state = inputs_of_next_training_step(shape, &state, &expected);
    }
    assert_eq!(state.f32_elements("steps"), [steps as f32]);
    losses
}

#[test]
fn training_the_reference_lowers_the_loss_on_its_own_tokens() {
    let losses = mean_loss_before_each_training_step(
        &TINY_LANGUAGE_MODEL,
        &inputs_of_first_training_step(&TINY_LANGUAGE_MODEL, 4),
        8,
    );
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
}

/// Maximum error and relative L2 error of one reference's named output relative to another's, for
/// the worst part.
fn errors_of_named_output(name: &str, found: &[Expected], exact: &[Expected]) -> [f64; 2] {
    let mut worst = [0.0f64; 2];
    for (found, exact) in found.iter().zip(exact).filter(|(found, _)| found.output_name == name) {
        let (TensorData::F64(found), TensorData::F64(exact)) =
            (&found.expected_values, &exact.expected_values)
        else {
            continue;
        };
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let largest = |values: &[f64]| values.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let apart: Vec<f64> = found.iter().zip(exact).map(|(x, y)| x - y).collect();
        worst[0] = worst[0].max(largest(&apart) / largest(exact));
        worst[1] = worst[1].max(norm(&apart) / norm(exact));
    }
    worst
}

#[test]
fn bf16_rounding_errors_stay_within_the_language_model_tolerance() {
    let shape = LanguageModelShape {
        vocabulary_size: 300,
        model_width: 64,
        swiglu_hidden_width: 128,
        layers: 3,
        heads: 2,
        context_tokens: 48,
        batch: 2,
        dtype: Dtype::Bf16,
    };
    let round = |x: f64| bf16::from_f64(x).to_f64();
    let step_problem = LanguageModelTrainingStep { shape };
    let inputs = step_problem.inputs(1);
    let [exact, rounded] = [(|x| x) as fn(f64) -> f64, round]
        .map(|round| expected_training_step_outputs(&shape, &inputs, round));
    let forward = LanguageModelForward { shape };
    let forward_inputs = forward.inputs(1);
    let logits = [(|x| x) as fn(f64) -> f64, round].map(|round| {
        let reference = LanguageModelReference::run_forward_pass(&shape, &forward_inputs, round);
        let rows: Vec<usize> = (0..shape.tokens_in_batch()).collect();
        let extents = [shape.tokens_in_batch(), shape.padded_logit_columns()];
        vec![Expected::all("logits", extents, reference.padded_logits_of_tokens(&rows))]
    });
    let bounds = [
        ErrorBoundsOfOutputs::from_tolerances_of_problem(&step_problem),
        ErrorBoundsOfOutputs::from_tolerances_of_problem(&forward),
    ];
    let mut worst =
        vec![("logits", errors_of_named_output("logits", &logits[1], &logits[0]), &bounds[1])];
    for name in TRAINING_STATE_OUTPUTS.into_iter().chain(["loss"]) {
        worst.push((name, errors_of_named_output(name, &rounded, &exact), &bounds[0]));
    }
    for (name, [max, l2], bounds) in worst {
        let allowed = bounds.tolerance_of_output(name);
        eprintln!(
            "{name}: {max:.1e} of {:.1e}, {l2:.1e} of {:.1e}",
            allowed.max_error, allowed.relative_l2
        );
        assert!(max < allowed.max_error / 2.0 && l2 < allowed.relative_l2 / 2.0, "{name}");
        assert!(max > allowed.max_error / 40.0 || l2 > allowed.relative_l2 / 40.0, "{name}");
    }
}

#[test]
fn rotating_the_sequences_of_a_batch_rotates_their_outputs() {
    assert_eq!(
        symmetry::check_symmetries_of_reference(
            &LanguageModelForward { shape: TINY_LANGUAGE_MODEL },
            5,
            1e-12
        ),
        Ok(1)
    );
}

/// The gradient of a batch is the mean of the gradients of its sequences.
#[test]
fn the_mean_gradient_of_single_sequences_is_the_batch_gradient() {
    let inputs = LanguageModelTrainingStep { shape: TINY_LANGUAGE_MODEL }.inputs(6);
    let whole = LanguageModelReference::run_forward_pass(&TINY_LANGUAGE_MODEL, &inputs, |x| x)
        .mean_loss_gradients();
    let one = LanguageModelShape { batch: 1, ..TINY_LANGUAGE_MODEL };
    let halves = [0, 1].map(|sequence| {
        let text = ["tokens", "targets"].into_iter().fold(Tensors::new(), |text, name| {
            let tokens = &inputs.f32_elements(name)
                [sequence * TINY_LANGUAGE_MODEL.context_tokens..]
                [..TINY_LANGUAGE_MODEL.context_tokens];
            text.with_tensor(name, [1, TINY_LANGUAGE_MODEL.context_tokens], tokens.to_vec())
        });
        LanguageModelReference::run_forward_pass(
            &one,
            &inputs.with_tensors_replaced_by(&text),
            |x| x,
        )
        .mean_loss_gradients()
    });
    for (whole, (first, second)) in whole.iter().zip(halves[0].iter().zip(&halves[1])) {
        for (whole, (first, second)) in whole
            .sampled_row_gradients
            .iter()
            .zip(first.sampled_row_gradients.iter().zip(&second.sampled_row_gradients))
        {
            assert!((whole - (first + second) / 2.0).abs() < 1e-14);
        }
    }
}

/// The function `bf16::from_f64` ignores the last three bits of an f32 mantissa, so it would treat
/// this number as a tie.
#[test]
fn a_weight_just_above_a_rounding_tie_is_rounded_up_to_bf16() {
    let shape = LanguageModelShape { dtype: Dtype::Bf16, ..TINY_LANGUAGE_MODEL };
    let mut inputs = LanguageModelTrainingStep { shape }.inputs(1);
    inputs.f32_mut("parameters")[0] = 1.0 + f32::powi(2.0, -8) + f32::EPSILON;
    let reference = LanguageModelReference::without_forward_pass(&shape, &inputs, |x| x);
    assert_eq!(
        reference.weight_as_network_uses_it(ParameterTensor::TokenEmbedding).values[0],
        1.0 + f64::powi(2.0, -7)
    );
}

#[test]
fn a_token_outside_the_vocabulary_is_named_in_the_error() {
    let mut text = TINY_LANGUAGE_MODEL.draw_tokens_and_targets(1);
    assert_eq!(check_tokens_are_in_vocabulary(&TINY_LANGUAGE_MODEL, &text), Ok(()));
    text.insert("targets", Tensor::new([2, 7], TensorData::F32(vec![21.0; 14])));
    let message = "`targets` has 21 at 0, a vocabulary of 21 ends before";
    assert_eq!(
        check_tokens_are_in_vocabulary(&TINY_LANGUAGE_MODEL, &text),
        Err(message.to_owned())
    );
    for wrong in [-1.0, 0.5, f32::NAN] {
        text.f32_mut("tokens")[3] = wrong;
        assert!(
            check_tokens_are_in_vocabulary(&TINY_LANGUAGE_MODEL, &text)
                .unwrap_err()
                .starts_with("`tokens` has")
        );
    }
}

#[test]
fn an_empty_batch_of_sequences_is_refused() {
    let override_ = ["b=0".parse().unwrap()];
    let refused = LM_FORWARD_WORKLOAD
        .points_selected_by_effort(
            BenchEffort::Default,
            SizeOfDefaultProblems::HostAndAcceleratorSizes,
            &override_,
        )
        .unwrap_err();
    assert_eq!(refused.to_string(), "axis `b` takes a whole number from 1, not `0`");
}

#[test]
fn every_listed_language_model_point_binds() {
    for point in LM_FORWARD_WORKLOAD
        .points_selected_by_effort(
            BenchEffort::Thorough,
            SizeOfDefaultProblems::HostAndAcceleratorSizes,
            &[],
        )
        .unwrap()
    {
        assert!(
            (LM_FORWARD_WORKLOAD.bind)(&point).is_ok()
                && (LM_TRAINING_STEP_WORKLOAD.bind)(&point).is_ok()
        );
    }
}
