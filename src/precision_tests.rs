//! Tests that the tolerances reject an implementation that rounds its operands to the next lower
//! precision: tf32 or f16 for f32, bf16 for f16, fp8 for bf16.

use kernelgate::verify::precision::{
    precision_error_limits_from_rounded_inputs, round_inputs_to_significant_bits,
    significant_bits_of_next_lower_precision,
};
use kernelgate::workload::{BenchEffort, Dtype, SizeOfDefaultProblems};

use super::suites_of_all_families;

/// Small cases with floating-point outputs, whose output rows are all in the reference.
const SMALL_CASES_WITH_FLOAT_OUTPUTS: &[(&str, &str)] = &[
    ("st_bif/backward", "n=1000 t=5 level=8"),
    ("attention/forward", "s=200 d=64 mask=causal tokens=200"),
    ("attention/backward", "s=200 d=64 mask=causal tokens=200"),
    ("attention/scores", "b=2 h=3 s=20 d=64"),
    ("attention/softmax", "b=2 h=3 s=64"),
    ("attention/values", "b=2 h=3 s=64 d=64"),
    ("denoise/step", "model=tiny s=20 p=50"),
    ("denoise/loop", "model=tiny s=20 p=50 steps=2"),
];

#[test]
fn every_tolerance_rejects_operands_in_the_next_lower_precision() {
    let suites = suites_of_all_families();
    let mut checked = 0;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (name, axes) in SMALL_CASES_WITH_FLOAT_OUTPUTS {
            let suite =
                suites.iter().find(|suite| suite.workload_name() == *name).expect("a workload");
            let axes = format!("{axes} dtype={}", dtype.dtype_name());
            let overrides: Vec<_> = axes.split(' ').map(|axis| axis.parse().unwrap()).collect();
            let Ok(points) = suite.points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostCpuSizes,
                &overrides,
            ) else {
                eprintln!("{name}: no {}", dtype.dtype_name());
                continue;
            };
            let bound = suite.problem_at_point(&points[0]).unwrap();
            let problem = bound.problem();
            let inputs = problem.inputs(1);
            let bits = significant_bits_of_next_lower_precision(dtype).unwrap();
            let of_rounded = problem.reference(&round_inputs_to_significant_bits(&inputs, bits));
            let limit = precision_error_limits_from_rounded_inputs(
                dtype,
                &problem.reference(&inputs),
                &of_rounded,
            )
            .unwrap();
            let limit = limit.max_relative_l2_by_output.into_values().fold(0.0, f64::max);
            let allowed = problem.tolerance().relative_l2;
            eprintln!("{name} {}: allowed {allowed:.1e}, limit {limit:.1e}", dtype.dtype_name());
            checked += 1;
            // The test limits each tolerance to a quarter of the error that operands in the next
            // lower precision cause. For 16-bit dtypes the test doubles the limit on the tolerance,
            // because rounding the outputs themselves takes up a large part of it.
            let most = if dtype == Dtype::F32 { limit } else { 2.0 * limit };
            assert!(allowed < most, "{name} {}: {allowed:.1e} of {most:.1e}", dtype.dtype_name());
        }
    }
    assert_eq!(checked, 3 * SMALL_CASES_WITH_FLOAT_OUTPUTS.len() - 2, "denoise has no f16");
}
