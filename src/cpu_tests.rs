//! Helpers that tests of CPU implementations share.

use std::sync::Arc;

use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::verify::launch_twice_and_compare_with_reference;
use kernelgate::verify::precision::ErrorBoundsOfOutputs;
use kernelgate::workload::Problem;

/// Launches a CPU implementation on the problem's inputs and asserts that every output agrees with
/// the reference.
pub fn assert_cpu_row_agrees_with_reference<P: Problem>(row: &Implementation<P>, problem: &P) {
    let inputs = Arc::new(problem.inputs(3));
    let PrepareFunction::Cpu(prepare) = row.prepare else { panic!("a CPU row") };
    let expected = problem.reference(&inputs);
    let mut task = prepare(problem, inputs);
    let found = launch_twice_and_compare_with_reference(
        &mut task,
        &expected,
        ErrorBoundsOfOutputs::from_tolerances_of_problem(problem),
    )
    .unwrap();
    assert_eq!(found.compared_elements, found.all_elements);
}
