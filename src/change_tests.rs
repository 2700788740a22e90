//! kernelgate's check after timing relies on the symmetries of the workloads, such as permuted
//! heads or negated gradients.

use kernelgate::workload::symmetry::check_symmetries_of_reference;
use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems};

use super::suites_of_all_families;

/// Small cases whose output rows are all in the reference, each with the number of symmetries that
/// kernelgate can check on it.
const SMALL_CASES_AND_THEIR_SYMMETRY_COUNTS: &[(&str, &str, usize)] = &[
    ("st_bif/forward", "n=1000 t=5 level=8 dtype=f32 spikes=int8", 1),
    ("st_bif/backward", "n=1000 t=5 level=8 dtype=f32", 2),
    ("st_bif/rate", "n=1000 t=5", 1),
    ("attention/forward", "s=33 d=64 mask=causal dtype=bf16 tokens=66", 1),
    ("attention/backward", "s=33 d=64 mask=full dtype=f32 tokens=66", 2),
    ("attention/scores", "b=2 h=3 s=20 d=64 dtype=f32", 1),
    ("attention/softmax", "b=2 h=3 s=20 dtype=f32", 1),
    ("attention/values", "b=2 h=3 s=20 d=64 dtype=f32", 2),
    ("resnet18/inference", "stem=imagenet w=8 b=3 t=4 level=8 weights=dyadic dtype=f32", 1),
];

#[test]
fn declared_symmetries_hold_for_the_reference_of_every_workload() {
    let suites = suites_of_all_families();
    for (name, axes, wanted) in SMALL_CASES_AND_THEIR_SYMMETRY_COUNTS {
        let suite = suites.iter().find(|suite| suite.workload_name() == *name).expect("a workload");
        let overrides: Vec<_> = axes.split(' ').map(|axis| axis.parse().unwrap()).collect();
        let points = suite
            .points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostCpuSizes,
                &overrides,
            )
            .unwrap();
        let bound = suite.problem_at_point(&points[0]).unwrap();
        let checked = check_symmetries_of_reference(bound.problem(), 3, 1e-12)
            .unwrap_or_else(|why| panic!("{name}: {why}"));
        assert_eq!(checked, *wanted, "{name}");
    }
}
