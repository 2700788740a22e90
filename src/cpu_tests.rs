//! Code that tests of CPU rows share.

use std::sync::Arc;

use kernelgate::backend::{Implementation, Prepare};
use kernelgate::verify::launch_and_verify;
use kernelgate::verify::precision::ErrorBounds;
use kernelgate::workload::Problem;

/// Checks every output of a CPU row against the reference.
pub fn check_row_against_reference<P: Problem>(row: &Implementation<P>, problem: &P) {
    let inputs = Arc::new(problem.inputs(3));
    let Prepare::Cpu(prepare) = row.prepare else { panic!("a CPU row") };
    let expected = problem.reference(&inputs);
    let mut task = prepare(problem, inputs);
    let found = launch_and_verify(&mut task, &expected, ErrorBounds::for_problem(problem)).unwrap();
    assert_eq!(found.checked, found.total);
}
