//! Compares the tolerances with the declared precision: a row that rounds its operands to the next
//! lower precision (tf32 or f16 for f32, bf16 for f16, fp8 for bf16) exceeds the tolerances.

use kernelgate::verify::precision::{
    next_lower_precision_bits, precision_error_limit, round_inputs,
};
use kernelgate::workload::{DefaultScale, Dtype, Effort};

use super::all_suites;

/// Small problems with floating-point outputs, of which every row is in the reference.
const SMALL_CASES: &[(&str, &str)] = &[
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
fn no_tolerance_accepts_a_computation_in_a_lower_precision() {
    let suites = all_suites();
    let mut checked = 0;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (name, axes) in SMALL_CASES {
            let suite = suites.iter().find(|suite| suite.name() == *name).expect("a workload");
            let axes = format!("{axes} dtype={}", dtype.name());
            let overrides: Vec<_> = axes.split(' ').map(|axis| axis.parse().unwrap()).collect();
            let Ok(points) = suite.points(Effort::Thorough, DefaultScale::Host, &overrides) else {
                eprintln!("{name}: no {}", dtype.name());
                continue;
            };
            let bound = suite.bind(&points[0]).unwrap();
            let problem = bound.problem();
            let inputs = problem.inputs(1);
            let bits = next_lower_precision_bits(dtype).unwrap();
            let of_rounded = problem.reference(&round_inputs(&inputs, bits));
            let limit =
                precision_error_limit(dtype, &problem.reference(&inputs), &of_rounded).unwrap();
            let limit = limit.relative_l2.into_values().fold(0.0, f64::max);
            let allowed = problem.tolerance().relative_l2;
            eprintln!("{name} {}: allowed {allowed:.1e}, limit {limit:.1e}", dtype.name());
            checked += 1;
            // The limit is a quarter of the error of the lower precision. Outputs of 16 bits are
            // rounded themselves, by a large part of the limit.
            let most = if dtype == Dtype::F32 { limit } else { 2.0 * limit };
            assert!(allowed < most, "{name} {}: {allowed:.1e} of {most:.1e}", dtype.name());
        }
    }
    assert_eq!(checked, 3 * SMALL_CASES.len() - 2, "denoise has no f16");
}
