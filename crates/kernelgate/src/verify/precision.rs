//! Checks that an implementation's errors are as small as the workload's declared precision
//! demands. An implementation that computes in a lower precision may stay within a tolerance that
//! must allow for rounding.
//!
//! The limit is derived from the reference: rounding its inputs to the next lower precision changes
//! the outputs about as much as computing in that precision would. An implementation whose error
//! exceeds a quarter of that change computes in a lower precision than declared.

use std::collections::BTreeMap;

use half::{bf16, f16};

use crate::workload::{Dtype, Expected, Problem, Tensor, TensorData, Tensors, Tolerance};

/// Share of the error of the next lower precision that an implementation may have. An
/// implementation that rounds all its operands to the lower precision has about all of that error;
/// one that rounds one of two operands has 0.7 of it.
const MAX_SHARE_OF_LOWER_PRECISION_ERROR: f64 = 0.25;
/// Minimum number of values of an output for a precision limit; with fewer values the effect of
/// rounding may be almost zero by chance.
const MIN_VALUES_FOR_PRECISION_LIMIT: usize = 64;

/// Largest errors that the outputs of a problem may have relative to the reference.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorBoundsOfOutputs {
    /// The workload's tolerance.
    pub tolerance: Tolerance,
    /// Tolerances of those outputs that have their own, by output name.
    pub by_output: BTreeMap<String, Tolerance>,
    /// Error limits by the precision that the problem declares; `None` if it declares none.
    pub precision: Option<PrecisionErrorLimits>,
}

impl From<Tolerance> for ErrorBoundsOfOutputs {
    fn from(tolerance: Tolerance) -> Self {
        Self { tolerance, by_output: BTreeMap::new(), precision: None }
    }
}

impl From<&Self> for ErrorBoundsOfOutputs {
    fn from(bounds: &Self) -> Self {
        bounds.clone()
    }
}

impl ErrorBoundsOfOutputs {
    /// Returns the error bounds of a problem's outputs by its tolerances, without precision limits.
    pub fn from_tolerances_of_problem(problem: &dyn Problem) -> ErrorBoundsOfOutputs {
        Self { by_output: problem.tolerances(), ..problem.tolerance().into() }
    }

    /// Fails unless all tolerances are finite and not negative.
    ///
    /// # Errors
    /// The error names the invalid tolerance.
    pub fn check_tolerances_are_valid(&self) -> Result<(), String> {
        let named = self.by_output.iter().map(|(name, it)| (format!(" for output `{name}`"), it));
        for (of, tolerance) in named.chain([(String::new(), &self.tolerance)]) {
            let Tolerance { max_error, relative_l2 } = tolerance;
            if ![max_error, relative_l2].iter().all(|it| it.is_finite() && **it >= 0.0) {
                return Err(format!(
                    "its tolerance{of} is a maximum error of {max_error} and a relative L2 norm of \
                     {relative_l2}: both have to be numbers from 0"
                ));
            }
        }
        Ok(())
    }

    /// Fails if a tolerance is given for an output that the reference lacks.
    ///
    /// # Errors
    /// The error names the output that the reference lacks.
    pub fn check_outputs_with_tolerance_exist(&self, expected: &[Expected]) -> Result<(), String> {
        let has_output = |name: &&String| expected.iter().any(|one| one.output_name == **name);
        match self.by_output.keys().find(|name| !expected.is_empty() && !has_output(name)) {
            Some(name) => {
                Err(format!("a tolerance for output `{name}`, which the reference lacks"))
            }
            None => Ok(()),
        }
    }

    /// Returns the largest maximum error and relative L2 error that any output may have.
    pub fn largest_errors_allowed_for_any_output(&self) -> Tolerance {
        let limits =
            self.precision.iter().flat_map(|limit| limit.max_relative_l2_by_output.values());
        let limit = limits.copied().reduce(f64::max).unwrap_or(f64::INFINITY);
        let most = |largest: Tolerance, it: &Tolerance| Tolerance {
            max_error: largest.max_error.max(it.max_error),
            relative_l2: largest.relative_l2.max(it.relative_l2),
        };
        let Tolerance { max_error, relative_l2 } =
            self.by_output.values().fold(self.tolerance, most);
        Tolerance { max_error, relative_l2: relative_l2.min(limit) }
    }

    /// Returns the tolerance of one output: its own, or the common one.
    pub fn tolerance_of_output(&self, output: &str) -> Tolerance {
        self.by_output.get(output).copied().unwrap_or(self.tolerance)
    }

    /// Returns the declared precision, and the relative L2 error above which an output counts as
    /// computed in a lower precision; `None` if errors cannot distinguish the two.
    pub fn declared_precision_and_limit_of_output(&self, output: &str) -> Option<(Dtype, f64)> {
        let limit = self.precision.as_ref()?;
        Some((limit.declared, *limit.max_relative_l2_by_output.get(output)?))
    }
}

/// Error limits by output, above which an implementation counts as computing in a lower precision
/// than declared.
#[derive(Debug, Clone, PartialEq)]
pub struct PrecisionErrorLimits {
    /// Precision that the problem declares.
    pub declared: Dtype,
    /// Largest allowed relative L2 error, ‖out - ref‖₂ / ‖ref‖₂, by output name.
    pub max_relative_l2_by_output: BTreeMap<String, f64>,
}

/// The next lower format is f32 below f64, tf32 and f16 below f32, bf16 below f16, fp8 (e4m3) below
/// bf16. Returns the significant bits of the floating-point format with the next lower precision;
/// `None` for fp8, which has no lower format, and for integers.
pub const fn significant_bits_of_next_lower_precision(dtype: Dtype) -> Option<u32> {
    match dtype {
        Dtype::F64 => Some(24),
        Dtype::F32 => Some(11),
        Dtype::F16 => Some(8),
        Dtype::Bf16 => Some(4),
        Dtype::Fp8 | Dtype::I8 => None,
    }
}

/// Returns the inputs with every floating-point value rounded to `bits` significant bits, to
/// nearest, ties to even. Integers, and values that would overflow, stay unchanged.
pub fn round_inputs_to_significant_bits(inputs: &Tensors, bits: u32) -> Tensors {
    let mut all = Tensors::new();
    for (name, tensor) in inputs.iter() {
        let data = match tensor.tensor_data() {
            TensorData::F64(values) => {
                TensorData::F64(map_values(values, |x| round_to_significant_bits(x, bits)))
            }
            TensorData::F32(values) => TensorData::F32(map_values(values, |x| {
                let y = round_to_significant_bits(x.into(), bits) as f32;
                if y.is_finite() { y } else { x }
            })),
            TensorData::F16(values) => TensorData::F16(map_values(values, |x| {
                let y = f16::from_f64(round_to_significant_bits(x.to_f64(), bits));
                if y.is_finite() { y } else { x }
            })),
            TensorData::Bf16(values) => TensorData::Bf16(map_values(values, |x| {
                let y = bf16::from_f64(round_to_significant_bits(x.to_f64(), bits));
                if y.is_finite() { y } else { x }
            })),
            TensorData::I8(values) => TensorData::I8(values.clone()),
        };
        all.insert(name, Tensor::new(tensor.shape(), data));
    }
    all
}

fn map_values<T: Copy>(values: &[T], rounded: impl Fn(T) -> T) -> Vec<T> {
    values.iter().map(|&value| rounded(value)).collect()
}

/// Rounds a number to `bits` significant bits, to nearest, ties to even.
fn round_to_significant_bits(x: f64, bits: u32) -> f64 {
    // An f64 has 52 fraction bits, one less than its significant bits.
    let dropped = 53 - bits;
    let (raw, half) = (x.to_bits(), 1u64 << (dropped - 1));
    let odd = (raw >> dropped) & 1;
    let y = f64::from_bits((raw + (half - 1) + odd) & !((1 << dropped) - 1));
    if x.is_finite() && y.is_finite() { y } else { x }
}

/// Computes the error limits of a declared precision, from the references for the inputs and for
/// [`round_inputs_to_significant_bits`] inputs: `None` if rounding the inputs changes no output,
/// because errors then cannot distinguish precisions.
pub fn precision_error_limits_from_rounded_inputs(
    declared: Dtype,
    expected: &[Expected],
    of_rounded: &[Expected],
) -> Option<PrecisionErrorLimits> {
    let mut relative_l2: BTreeMap<String, f64> = BTreeMap::new();
    let (mut largest, mut few) = (0.0f64, Vec::new());
    for (one, moved) in expected.iter().zip(of_rounded) {
        let (TensorData::F64(values), TensorData::F64(moved)) =
            (&one.expected_values, &moved.expected_values)
        else {
            continue;
        };
        let squared: f64 = values.iter().map(|x| x * x).sum();
        let off: f64 = values.iter().zip(moved).map(|(x, y)| (x - y) * (x - y)).sum();
        let allowed = MAX_SHARE_OF_LOWER_PRECISION_ERROR * (off / squared).sqrt();
        if allowed.is_finite() && allowed > 0.0 {
            // Rounding the inputs may change some rows of an output more than others, so all
            // references of the output are combined.
            let worst = relative_l2.entry(one.output_name.clone()).or_default();
            *worst = worst.max(allowed);
            largest = largest.max(allowed);
            if values.len() < MIN_VALUES_FOR_PRECISION_LIMIT {
                few.push(&one.output_name);
            }
        }
    }
    for name in few {
        relative_l2.insert(name.clone(), largest);
    }
    (!relative_l2.is_empty())
        .then_some(PrecisionErrorLimits { declared, max_relative_l2_by_output: relative_l2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bits_of_a_format_equals_conversion_to_it() {
        for i in 0..2000u32 {
            let x = f64::from(i).mul_add(0.037, -31.0).exp2() * if i % 2 == 0 { 1.0 } else { -1.0 };
            let x = f64::from(x as f32);
            assert_eq!(round_to_significant_bits(x, 24), f64::from(x as f32));
            assert_eq!(round_to_significant_bits(x, 8), bf16::from_f64(x).to_f64(), "{x}");
            if x.abs() > 1e-4 && x.abs() < 6e4 {
                assert_eq!(round_to_significant_bits(x, 11), f16::from_f64(x).to_f64(), "{x}");
            }
        }
        // A tie goes to the even neighbour, whether that is above or below.
        assert_eq!(
            [
                round_to_significant_bits(1.0 + 0.0625, 4),
                round_to_significant_bits(1.0 + 3.0 * 0.0625, 4)
            ],
            [1.0, 1.25]
        );
        assert_eq!(
            [
                round_to_significant_bits(0.0, 4),
                round_to_significant_bits(-0.0, 4),
                round_to_significant_bits(f64::MAX, 4)
            ],
            [0.0, -0.0, f64::MAX]
        );
    }

    #[test]
    fn outputs_exact_in_a_lower_precision_get_no_limit() {
        let expected = |x: f64| vec![Expected::all("y", [1, 2], vec![x, 2.0])];
        assert_eq!(
            precision_error_limits_from_rounded_inputs(Dtype::F32, &expected(1.0), &expected(1.0)),
            None
        );
        let off =
            precision_error_limits_from_rounded_inputs(Dtype::F32, &expected(1.0), &expected(1.1))
                .unwrap();
        assert!(
            (off.max_relative_l2_by_output["y"] / (0.25 * 0.1 / 5f64.sqrt()) - 1.0).abs() < 1e-9
        );
    }

    #[test]
    fn each_output_gets_a_precision_limit_from_its_own_rounding() {
        let expected = |by: [f64; 3]| {
            let output_of = |name: &str, len: usize, by: f64| {
                Expected::all(name, [1, len], vec![1.0 + by; len])
            };
            vec![
                output_of("much", 64, by[0]),
                output_of("little", 64, by[1]),
                output_of("sum", 1, by[2]),
            ]
        };
        let moved = expected([0.4, 0.04, 1e-9]);
        let limit =
            precision_error_limits_from_rounded_inputs(Dtype::F32, &expected([0.0; 3]), &moved)
                .unwrap();
        let limits = ["much", "little", "sum"].map(|name| limit.max_relative_l2_by_output[name]);
        let expected = [0.1, 0.01, 0.1];
        assert!(limits.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9), "{limits:?}");
    }
}
