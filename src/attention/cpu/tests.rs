//! Compares the attention of the CPU backend with the fp64 reference: shapes that are not multiples
//! of a tile, and inputs that overflow a softmax without maximum.

use std::sync::Arc;

use super::*;
use crate::attention::definition::AttentionParameters;
use kernelgate::suite::join_workload_with_implementations;
use kernelgate::verify::{
    ComparisonWithReference, OutputVerificationError, launch_twice_and_compare_with_reference,
};
use kernelgate::workload::SizeOfDefaultProblems;
use kernelgate::workload::{AxisValuesFromCommandLine, BenchEffort, Problem, Tolerance, Workload};

fn launch_cpu_row_twice_and_verify<P: Problem>(
    problem: &P,
    implementations: &[Implementation<P>],
    inputs: Tensors,
    tolerance: Tolerance,
) -> Result<ComparisonWithReference, OutputVerificationError> {
    let expected = problem.reference(&inputs);
    let PrepareFunction::Cpu(prepare) = implementations[0].prepare else { panic!("not a CPU row") };
    let mut task = prepare(problem, Arc::new(inputs));
    let comparison = launch_twice_and_compare_with_reference(&mut task, &expected, tolerance)?;
    assert_eq!(
        launch_twice_and_compare_with_reference(&mut task, &expected, tolerance)?,
        comparison,
        "a second launch differs"
    );
    assert_eq!(comparison.compared_elements, comparison.all_elements);
    Ok(comparison)
}

/// Attention problem in f32 with d = 64 from batch b, heads h and sequence length s.
fn f32_attention_problem([b, h, s]: [usize; 3], causal: bool) -> AttentionParameters {
    let dtype = Dtype::F32;
    AttentionParameters {
        batch_size: b,
        query_heads: h,
        key_value_heads: h,
        queries_per_head: s,
        keys_per_head: s,
        head_dim: 64,
        causal,
        dtype,
        adds_input_outliers: false,
    }
}

fn verify_cpu_forward_and_backward(
    attention: AttentionParameters,
    change: impl Fn(&mut Tensors),
    tolerance: Option<Tolerance>,
) {
    let (forward, backward) = (AttentionForward { attention }, AttentionBackward { attention });
    let mut inputs = backward.inputs(11);
    change(&mut inputs);
    for result in [
        launch_cpu_row_twice_and_verify(
            &forward,
            CPU_ATTENTION_FORWARD_ROWS,
            inputs.clone(),
            tolerance.unwrap_or(forward.tolerance()),
        ),
        launch_cpu_row_twice_and_verify(
            &backward,
            CPU_ATTENTION_BACKWARD_ROWS,
            inputs,
            tolerance.unwrap_or(backward.tolerance()),
        ),
    ] {
        assert!(result.is_ok(), "{attention:?}: {}", result.unwrap_err());
    }
}

#[test]
fn cpu_attention_agrees_with_the_reference_at_odd_shapes() {
    for s in [1, 7, 65, 129, 200, 300] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            verify_cpu_forward_and_backward(
                AttentionParameters { head_dim: d, ..f32_attention_problem([2, 3, s], causal) },
                |_| (),
                None,
            );
        }
    }
}

#[test]
fn cpu_forward_with_grouped_heads_or_unequal_key_counts_agrees_with_the_reference() {
    for (h_kv, s, keys) in [(1, 1, 129), (2, 63, 300), (3, 300, 301), (2, 257, 130)] {
        for causal in [false, true] {
            let attention = AttentionParameters {
                key_value_heads: h_kv,
                keys_per_head: keys,
                ..f32_attention_problem([2, 6, s], causal && keys > s)
            };
            let problem = AttentionForward { attention };
            let result = launch_cpu_row_twice_and_verify(
                &problem,
                CPU_ATTENTION_FORWARD_ROWS,
                problem.inputs(11),
                problem.tolerance(),
            );
            assert!(result.is_ok(), "{attention:?}: {}", result.unwrap_err());
        }
    }
}

#[test]
fn cpu_gradients_of_grouped_heads_agree_with_the_reference() {
    for (h_kv, s) in [(1, 1), (2, 129), (3, 300)] {
        for causal in [false, true] {
            verify_cpu_forward_and_backward(
                AttentionParameters {
                    key_value_heads: h_kv,
                    ..f32_attention_problem([2, 6, s], causal)
                },
                |_| (),
                None,
            );
        }
    }
}

#[test]
fn cpu_attention_agrees_with_the_reference_on_outliers() {
    for causal in [false, true] {
        verify_cpu_forward_and_backward(
            AttentionParameters {
                adds_input_outliers: true,
                ..f32_attention_problem([1, 4, 333], causal)
            },
            |_| (),
            None,
        );
    }
}

#[test]
fn cpu_scores_beyond_the_range_of_exp_give_finite_correct_outputs() {
    // In this test scores are 1600 · N(0, 1), up to 1e4: f32 rounds them by up to 1e-3, the
    // expected relative error of their exponentials.
    let large = |inputs: &mut Tensors| {
        for name in ["q", "k"] {
            inputs.f32_mut(name).iter_mut().for_each(|x| *x *= 40.0);
        }
    };
    // In this overflow test nearly every query row attends to a single key. For the first query
    // rows under the causal mask, the gradients vanish up to rounding.
    for (causal, error) in [(false, 1e-2), (true, 1e-1)] {
        verify_cpu_forward_and_backward(
            f32_attention_problem([1, 4, 200], causal),
            large,
            Some(Tolerance { max_error: error, relative_l2: error }),
        );
    }
}

#[test]
fn cpu_row_maxima_that_grow_in_every_tile_give_correct_outputs() {
    // In this test all keys point in the direction of the queries, each longer than the previous
    // one: the worst case of a running maximum.
    let growing = |inputs: &mut Tensors| {
        inputs.f32_mut("q").fill(0.5);
        let rows = inputs.f32_mut("k").chunks_mut(64).enumerate();
        rows.for_each(|(row, k)| k.fill(0.02 * (row % 300) as f32));
    };
    for causal in [false, true] {
        verify_cpu_forward_and_backward(
            f32_attention_problem([1, 2, 300], causal),
            growing,
            Some(Tolerance { max_error: 2e-5, relative_l2: 2e-5 }),
        );
    }
}

#[test]
fn the_three_cpu_attention_steps_agree_with_the_reference() {
    fn verify_cpu_step_at_thorough_shapes<P: Problem>(
        workload: &Workload<P>,
        implementations: &[Implementation<P>],
    ) {
        for s in [1, 7, 65, 200] {
            let overrides: Vec<AxisValuesFromCommandLine> =
                ["b=2", "h=3", "dtype=f32"].iter().map(|item| item.parse().unwrap()).collect();
            let s = format!("s={s}").parse().unwrap();
            for point in workload
                .points_selected_by_effort(
                    BenchEffort::Thorough,
                    SizeOfDefaultProblems::HostCpuSizes,
                    &[overrides, vec![s]].concat(),
                )
                .unwrap()
            {
                let problem = (workload.bind)(&point).unwrap();
                let result = launch_cpu_row_twice_and_verify(
                    &problem,
                    implementations,
                    problem.inputs(13),
                    problem.tolerance(),
                );
                assert!(result.is_ok(), "{}/{point}: {}", workload.name, result.unwrap_err());
            }
        }
    }
    verify_cpu_step_at_thorough_shapes(&components::SCORES_STEP_WORKLOAD, CPU_SCORES_STEP_ROWS);
    verify_cpu_step_at_thorough_shapes(&components::SOFTMAX_STEP_WORKLOAD, CPU_SOFTMAX_STEP_ROWS);
    verify_cpu_step_at_thorough_shapes(&components::VALUES_STEP_WORKLOAD, CPU_VALUES_STEP_ROWS);
}

#[test]
fn cpu_attention_rows_decline_sixteen_bit_problems_with_a_reason() {
    let suite =
        join_workload_with_implementations(&crate::attention::FORWARD, CPU_ATTENTION_FORWARD_ROWS);
    let points = suite
        .points_selected_by_effort(
            BenchEffort::Default,
            SizeOfDefaultProblems::HostAndAcceleratorSizes,
            &["dtype=bf16".parse().unwrap()],
        )
        .unwrap();
    let bound = suite.problem_at_point(&points[0]).unwrap();
    assert_eq!(bound.check_implementation_supports_problem(0), Err("computes f32 only".to_owned()));
}
