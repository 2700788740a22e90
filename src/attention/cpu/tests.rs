//! Compares the CPU backend with the fp64 reference, for shapes that are not multiples of a tile
//! and for inputs that overflow a careless softmax.

use std::sync::Arc;

use super::*;
use crate::attention::definition::Attention;
use kernelgate::suite::join_rows;
use kernelgate::verify::{OutputComparison, VerifyError, launch_and_verify};
use kernelgate::workload::DefaultScale;
use kernelgate::workload::{AxisOverride, Effort, Problem, Tolerance, Workload};

fn check<P: Problem>(
    problem: &P,
    implementations: &[Implementation<P>],
    inputs: Tensors,
    tolerance: Tolerance,
) -> Result<OutputComparison, VerifyError> {
    let expected = problem.reference(&inputs);
    let Prepare::Cpu(prepare) = implementations[0].prepare else { panic!("not a CPU row") };
    let mut task = prepare(problem, Arc::new(inputs));
    let comparison = launch_and_verify(&mut task, &expected, tolerance)?;
    assert_eq!(
        launch_and_verify(&mut task, &expected, tolerance)?,
        comparison,
        "a second launch differs"
    );
    assert_eq!(comparison.checked, comparison.total);
    Ok(comparison)
}

/// Problem in f32 with d = 64 from the extents b, h and s.
fn f32_problem([b, h, s]: [usize; 3], causal: bool) -> Attention {
    let dtype = Dtype::F32;
    Attention { b, h, h_kv: h, s, keys: s, d: 64, causal, dtype, outliers: false }
}

fn check_both_directions(
    attention: Attention,
    change: impl Fn(&mut Tensors),
    tolerance: Option<Tolerance>,
) {
    let (forward, backward) = (AttentionForward { attention }, AttentionBackward { attention });
    let mut inputs = backward.inputs(11);
    change(&mut inputs);
    for result in [
        check(&forward, FORWARD, inputs.clone(), tolerance.unwrap_or(forward.tolerance())),
        check(&backward, BACKWARD, inputs, tolerance.unwrap_or(backward.tolerance())),
    ] {
        assert!(result.is_ok(), "{attention:?}: {}", result.unwrap_err());
    }
}

#[test]
fn cpu_attention_agrees_with_the_reference_at_odd_shapes() {
    for s in [1, 7, 65, 129, 200, 300] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            check_both_directions(Attention { d, ..f32_problem([2, 3, s], causal) }, |_| (), None);
        }
    }
}

#[test]
fn grouped_heads_and_more_or_fewer_keys_than_queries_agree_with_the_reference() {
    for (h_kv, s, keys) in [(1, 1, 129), (2, 63, 300), (3, 300, 301), (2, 257, 130)] {
        for causal in [false, true] {
            let attention = Attention { h_kv, keys, ..f32_problem([2, 6, s], causal && keys > s) };
            let problem = AttentionForward { attention };
            let result = check(&problem, FORWARD, problem.inputs(11), problem.tolerance());
            assert!(result.is_ok(), "{attention:?}: {}", result.unwrap_err());
        }
    }
}

#[test]
fn gradients_of_grouped_heads_agree_with_the_reference() {
    for (h_kv, s) in [(1, 1), (2, 129), (3, 300)] {
        for causal in [false, true] {
            check_both_directions(
                Attention { h_kv, ..f32_problem([2, 6, s], causal) },
                |_| (),
                None,
            );
        }
    }
}

#[test]
fn cpu_attention_agrees_with_the_reference_on_outliers() {
    for causal in [false, true] {
        check_both_directions(
            Attention { outliers: true, ..f32_problem([1, 4, 333], causal) },
            |_| (),
            None,
        );
    }
}

#[test]
fn scores_beyond_the_range_of_exp_give_finite_correct_outputs() {
    // Scores are 1600 · N(0, 1), up to 1e4: f32 rounds them by up to 1e-3, which is therefore the
    // expected error of their exponentials.
    let large = |inputs: &mut Tensors| {
        for name in ["q", "k"] {
            inputs.f32_mut(name).iter_mut().for_each(|x| *x *= 40.0);
        }
    };
    // In this test nearly every row attends to a single key. The gradients of the first rows under
    // the mask almost vanish, down to rounding.
    for (causal, error) in [(false, 1e-2), (true, 1e-1)] {
        check_both_directions(
            f32_problem([1, 4, 200], causal),
            large,
            Some(Tolerance { max_error: error, relative_l2: error }),
        );
    }
}

#[test]
fn a_row_maximum_that_grows_in_every_tile_gives_correct_outputs() {
    // All keys have the direction of the queries and each is longer than the previous one: the
    // worst case of a running maximum.
    let growing = |inputs: &mut Tensors| {
        inputs.f32_mut("q").fill(0.5);
        let rows = inputs.f32_mut("k").chunks_mut(64).enumerate();
        rows.for_each(|(row, k)| k.fill(0.02 * (row % 300) as f32));
    };
    for causal in [false, true] {
        check_both_directions(
            f32_problem([1, 2, 300], causal),
            growing,
            Some(Tolerance { max_error: 2e-5, relative_l2: 2e-5 }),
        );
    }
}

#[test]
fn the_three_separate_steps_agree_with_the_reference() {
    fn check_all_rows<P: Problem>(workload: &Workload<P>, implementations: &[Implementation<P>]) {
        for s in [1, 7, 65, 200] {
            let overrides: Vec<AxisOverride> =
                ["b=2", "h=3", "dtype=f32"].iter().map(|item| item.parse().unwrap()).collect();
            let s = format!("s={s}").parse().unwrap();
            for point in workload
                .points(Effort::Thorough, DefaultScale::Host, &[overrides, vec![s]].concat())
                .unwrap()
            {
                let problem = (workload.bind)(&point).unwrap();
                let result =
                    check(&problem, implementations, problem.inputs(13), problem.tolerance());
                assert!(result.is_ok(), "{}/{point}: {}", workload.name, result.unwrap_err());
            }
        }
    }
    check_all_rows(&components::SCORES, SCORES);
    check_all_rows(&components::SOFTMAX, SOFTMAX);
    check_all_rows(&components::VALUES, VALUES);
}

#[test]
fn sixteen_bit_problems_are_declined_by_cpu_rows_with_a_reason() {
    let suite = join_rows(&crate::attention::FORWARD, FORWARD);
    let points = suite
        .points(Effort::Default, DefaultScale::Accelerator, &["dtype=bf16".parse().unwrap()])
        .unwrap();
    let bound = suite.bind(&points[0]).unwrap();
    assert_eq!(bound.supports(0), Err("computes f32 only".to_owned()));
}
