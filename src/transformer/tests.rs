//! Tests of the reference against differences of the loss, of the loss curve of a training, and of
//! the error of rounding to bf16.

use half::bf16;

use super::gradients::expected_step;
use super::reference::LmReference;
use super::shape::{ArenaRows, LmShape, STATE_INPUTS, STATE_OUTPUTS, Weight};
use super::{FORWARD, ModelForward, TRAIN_STEP, TrainStep, check_tokens_and_targets};
use kernelgate::verify::precision::ErrorBounds;
use kernelgate::workload::{
    DefaultScale, Dtype, Effort, Expected, Problem, Tensor, TensorData, Tensors, symmetry,
};

const TINY: LmShape = LmShape {
    vocabulary: 21,
    d: 16,
    ff: 24,
    layers: 2,
    heads: 2,
    context: 7,
    batch: 2,
    dtype: Dtype::F32,
};

fn mean_training_loss(shape: &LmShape, inputs: &Tensors) -> f64 {
    let losses = LmReference::new(shape, inputs, |x| x).sequence_losses();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn transformer_reference_gradients_equal_differences_of_the_loss() {
    let inputs = TrainStep { shape: TINY }.inputs(2);
    let gradients = LmReference::new(&TINY, &inputs, |x| x).loss_gradients();
    assert_eq!(gradients.len(), TINY.arena_tensors().len());
    for gradient in gradients {
        let ArenaRows { weight, first, rows } = gradient.tensor;
        assert_eq!(gradient.rows.len(), rows, "{weight:?}");
        let largest = gradient.values.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        for element in [1, gradient.values.len() / 2, gradient.values.len() - 1] {
            let at = |step: f32| {
                let mut moved = inputs.clone();
                let value = &mut moved.f32_mut("parameters")[first * TINY.d + element];
                *value += step;
                (f64::from(*value), mean_training_loss(&TINY, &moved))
            };
            let ((low, below), (high, above)) = (at(-1e-2), at(1e-2));
            let difference = (above - below) / (high - low);
            let error = (difference - gradient.values[element]).abs();
            assert!(error < 1e-3 * largest, "{weight:?} {element}: {error:e} of {largest:e}");
        }
    }
}

/// Training state after an optimiser step, in f32.
fn next_state(shape: &LmShape, inputs: &Tensors, expected: &[Expected]) -> Tensors {
    let mut state = inputs.select_named(&["tokens", "targets"]);
    state = state.with("steps", [1], vec![inputs.f32("steps")[0] + 1.0]);
    for (name, next) in STATE_INPUTS.into_iter().zip(STATE_OUTPUTS) {
        let mut values = inputs.f32(name).to_vec();
        for one in expected.iter().filter(|one| one.name == next) {
            let TensorData::F64(rows) = &one.values else { panic!("fp64") };
            for (row, from) in one.rows.iter().flatten().zip(rows.chunks(shape.d)) {
                let to = &mut values[row * shape.d..][..shape.d];
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
            }
        }
        state = state.with(name, [shape.arena_rows(), shape.d], values);
    }
    state
}

/// State at the beginning of a training: no moments and no steps.
pub fn initial_state(shape: &LmShape, seed: u64) -> Tensors {
    let zeros = || vec![0.0f32; shape.parameter_count()];
    let extents = [shape.arena_rows(), shape.d];
    let moments = Tensors::new()
        .with("first_moments", extents, zeros())
        .with("second_moments", extents, zeros())
        .with("steps", [1], vec![0.0f32]);
    TrainStep { shape: *shape }.inputs(seed).replaced_by(&moments)
}

#[test]
fn the_first_adamw_step_moves_each_parameter_by_rate_and_decay() {
    let inputs = initial_state(&TINY, 3);
    let next = next_state(&TINY, &inputs, &expected_step(&TINY, &inputs, |x| x));
    let gradients = LmReference::new(&TINY, &inputs, |x| x).loss_gradients();
    let head = gradients.iter().find(|gradient| gradient.tensor.weight == Weight::Head).unwrap();
    let from = head.tensor.first * TINY.d;
    for (element, g) in head.values.iter().enumerate().filter(|(_, g)| g.abs() > 1e-5) {
        let before = f64::from(inputs.f32("parameters")[from + element]);
        let after = f64::from(next.f32("parameters")[from + element]);
        let moved = before - after - 1e-4 * before;
        assert!((moved - 1e-3 * g.signum()).abs() < 2e-6, "{element}: {moved}");
    }
}

/// Mean loss before each step of a training.
pub fn loss_before_each_step(shape: &LmShape, beginning: &Tensors, steps: usize) -> Vec<f64> {
    let mut state = beginning.clone();
    let mut losses = vec![];
    for _ in 0..steps {
        let expected = expected_step(shape, &state, |x| x);
        let TensorData::F64(loss) = &expected[0].values else { panic!("fp64") };
        losses.push(loss.iter().sum::<f64>() / loss.len() as f64);
        state = next_state(shape, &state, &expected);
    }
    assert_eq!(state.f32("steps"), [steps as f32]);
    losses
}

#[test]
fn training_the_reference_lowers_the_loss_of_its_text() {
    let losses = loss_before_each_step(&TINY, &initial_state(&TINY, 4), 8);
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
}

/// Maximum error and relative L2 error of one reference relative to another, for the worst output.
fn relative_errors(name: &str, found: &[Expected], exact: &[Expected]) -> [f64; 2] {
    let mut worst = [0.0f64; 2];
    for (found, exact) in found.iter().zip(exact).filter(|(found, _)| found.name == name) {
        let (TensorData::F64(found), TensorData::F64(exact)) = (&found.values, &exact.values)
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
fn rounding_to_bf16_stays_within_the_transformers_tolerance() {
    let shape = LmShape {
        vocabulary: 300,
        d: 64,
        ff: 128,
        layers: 3,
        heads: 2,
        context: 48,
        batch: 2,
        dtype: Dtype::Bf16,
    };
    let round = |x: f64| bf16::from_f64(x).to_f64();
    let step_problem = TrainStep { shape };
    let inputs = step_problem.inputs(1);
    let [exact, rounded] =
        [(|x| x) as fn(f64) -> f64, round].map(|round| expected_step(&shape, &inputs, round));
    let forward = ModelForward { shape };
    let forward_inputs = forward.inputs(1);
    let logits = [(|x| x) as fn(f64) -> f64, round].map(|round| {
        let reference = LmReference::new(&shape, &forward_inputs, round);
        let rows: Vec<usize> = (0..shape.token_count()).collect();
        let extents = [shape.token_count(), shape.padded_vocabulary()];
        vec![Expected::all("logits", extents, reference.logits_of_tokens(&rows))]
    });
    let bounds = [ErrorBounds::for_problem(&step_problem), ErrorBounds::for_problem(&forward)];
    let mut worst = vec![("logits", relative_errors("logits", &logits[1], &logits[0]), &bounds[1])];
    for name in STATE_OUTPUTS.into_iter().chain(["loss"]) {
        worst.push((name, relative_errors(name, &rounded, &exact), &bounds[0]));
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
fn outputs_of_a_sequence_do_not_depend_on_the_others() {
    assert_eq!(symmetry::check_symmetries(&ModelForward { shape: TINY }, 5, 1e-12), Ok(1));
}

/// The gradient of a batch is the mean of the gradients of its sequences.
#[test]
fn gradients_of_sequences_add_up_over_the_batch() {
    let inputs = TrainStep { shape: TINY }.inputs(6);
    let whole = LmReference::new(&TINY, &inputs, |x| x).loss_gradients();
    let one = LmShape { batch: 1, ..TINY };
    let halves = [0, 1].map(|sequence| {
        let text = ["tokens", "targets"].into_iter().fold(Tensors::new(), |text, name| {
            let tokens = &inputs.f32(name)[sequence * TINY.context..][..TINY.context];
            text.with(name, [1, TINY.context], tokens.to_vec())
        });
        LmReference::new(&one, &inputs.replaced_by(&text), |x| x).loss_gradients()
    });
    for (whole, (first, second)) in whole.iter().zip(halves[0].iter().zip(&halves[1])) {
        for (whole, (first, second)) in
            whole.values.iter().zip(first.values.iter().zip(&second.values))
        {
            assert!((whole - (first + second) / 2.0).abs() < 1e-14);
        }
    }
}

/// `bf16::from_f64` ignores the last three bits of an f32 and therefore treats this number as a
/// tie.
#[test]
fn a_weight_just_above_a_tie_is_rounded_up_to_bf16() {
    let shape = LmShape { dtype: Dtype::Bf16, ..TINY };
    let mut inputs = TrainStep { shape }.inputs(1);
    inputs.f32_mut("parameters")[0] = 1.0 + f32::powi(2.0, -8) + f32::EPSILON;
    let reference = LmReference::for_single_layers(&shape, &inputs, |x| x);
    assert_eq!(reference.rounded_weight(Weight::Embedding).values[0], 1.0 + f64::powi(2.0, -7));
}

#[test]
fn a_token_outside_of_the_vocabulary_is_named_in_the_error() {
    let mut text = TINY.draw_tokens_and_targets(1);
    assert_eq!(check_tokens_and_targets(&TINY, &text), Ok(()));
    text.insert("targets", Tensor::new([2, 7], TensorData::F32(vec![21.0; 14])));
    let message = "`targets` has 21 at 0, a vocabulary of 21 ends before";
    assert_eq!(check_tokens_and_targets(&TINY, &text), Err(message.to_owned()));
    for wrong in [-1.0, 0.5, f32::NAN] {
        text.f32_mut("tokens")[3] = wrong;
        assert!(check_tokens_and_targets(&TINY, &text).unwrap_err().starts_with("`tokens` has"));
    }
}

#[test]
fn an_empty_batch_is_refused() {
    let override_ = ["b=0".parse().unwrap()];
    let refused =
        FORWARD.points(Effort::Default, DefaultScale::Accelerator, &override_).unwrap_err();
    assert_eq!(refused.to_string(), "axis `b` takes a whole number from 1, not `0`");
}

#[test]
fn every_transformer_point_binds() {
    for point in FORWARD.points(Effort::Thorough, DefaultScale::Accelerator, &[]).unwrap() {
        assert!((FORWARD.bind)(&point).is_ok() && (TRAIN_STEP.bind)(&point).is_ok());
    }
}
