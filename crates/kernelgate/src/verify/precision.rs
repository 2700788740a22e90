//! Is a row as close to the reference as the precision that its workload declares? A row that
//! computes in a lower one may be within a tolerance that was set with care for rounding.
//!
//! The measure needs nothing but the reference: its inputs are rounded to the next lower precision,
//! and what that moves the outputs by is about what computing in that precision costs. A row whose
//! error is a good part of it does not compute in the declared precision.

use half::{bf16, f16};

use crate::workload::{Data, Dtype, Expected, Tensor, Tensors, Tolerance};

/// Part of what the next lower precision costs that a row may be off by. A row that rounds all its
/// operands to it is off by the whole, one that rounds one of two operands by 0.7 of it.
const SHARE: f64 = 0.25;

/// How close outputs must be to the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// The workload's tolerance.
    pub tolerance: Tolerance,
    /// What its declared precision asks for, where it declares one.
    pub precision: Option<PrecisionLimit>,
}

impl From<Tolerance> for Bounds {
    fn from(tolerance: Tolerance) -> Self {
        Self { tolerance, precision: None }
    }
}

impl Bounds {
    /// The largest errors that pass.
    pub fn allowed(&self) -> Tolerance {
        let Tolerance { max_error, relative_l2 } = self.tolerance;
        let limit = self.precision.map_or(f64::INFINITY, |precision| precision.relative_l2);
        Tolerance { max_error, relative_l2: relative_l2.min(limit) }
    }
}

/// The error from which on a row is taken to compute in a lower precision than the declared one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrecisionLimit {
    /// What is declared.
    pub declared: Dtype,
    /// ‖out - ref‖₂ / ‖ref‖₂ that is allowed.
    pub relative_l2: f64,
}

/// Significant bits of the most precise floating-point format below a dtype: f32 below f64, tf32
/// and f16 below f32, bf16 below f16, fp8 (e4m3) below bf16. None below that, and for
/// integers.
pub const fn lower_bits(dtype: Dtype) -> Option<u32> {
    match dtype {
        Dtype::F64 => Some(24),
        Dtype::F32 => Some(11),
        Dtype::F16 => Some(8),
        Dtype::Bf16 => Some(4),
        Dtype::Fp8 | Dtype::I8 => None,
    }
}

/// The inputs with every floating-point value rounded to so many significant bits, to nearest,
/// ties to even. Integers, and values that would overflow, stay.
pub fn rounded(inputs: &Tensors, bits: u32) -> Tensors {
    let mut all = Tensors::new();
    for (name, tensor) in inputs.iter() {
        let data = match tensor.data() {
            Data::F64(values) => Data::F64(each(values, |x| round(x, bits))),
            Data::F32(values) => Data::F32(each(values, |x| {
                let y = round(x.into(), bits) as f32;
                if y.is_finite() { y } else { x }
            })),
            Data::F16(values) => Data::F16(each(values, |x| {
                let y = f16::from_f64(round(x.to_f64(), bits));
                if y.is_finite() { y } else { x }
            })),
            Data::Bf16(values) => Data::Bf16(each(values, |x| {
                let y = bf16::from_f64(round(x.to_f64(), bits));
                if y.is_finite() { y } else { x }
            })),
            Data::I8(values) => Data::I8(values.clone()),
        };
        all.insert(name, Tensor::new(tensor.shape(), data));
    }
    all
}

fn each<T: Copy>(values: &[T], rounded: impl Fn(T) -> T) -> Vec<T> {
    values.iter().map(|&value| rounded(value)).collect()
}

/// To so many significant bits.
fn round(x: f64, bits: u32) -> f64 {
    // The fraction has 52 bits, one less than the significand.
    let dropped = 53 - bits;
    let (raw, half) = (x.to_bits(), 1u64 << (dropped - 1));
    let odd = (raw >> dropped) & 1;
    let y = f64::from_bits((raw + (half - 1) + odd) & !((1 << dropped) - 1));
    if x.is_finite() && y.is_finite() { y } else { x }
}

/// The limit of a declared precision, from the reference and that of [`rounded`] inputs: none where
/// rounding moves nothing, so that errors cannot tell precisions apart.
pub fn limit(
    declared: Dtype,
    expected: &[Expected],
    of_rounded: &[Expected],
) -> Option<PrecisionLimit> {
    let moved = expected.iter().zip(of_rounded).filter_map(|(one, moved)| {
        let (Data::F64(values), Data::F64(moved)) = (&one.values, &moved.values) else {
            return None;
        };
        let squared: f64 = values.iter().map(|x| x * x).sum();
        let off: f64 = values.iter().zip(moved).map(|(x, y)| (x - y) * (x - y)).sum();
        Some((off / squared).sqrt()).filter(|moved| moved.is_finite())
    });
    let relative_l2 = SHARE * moved.fold(0.0, f64::max);
    (relative_l2 > 0.0).then_some(PrecisionLimit { declared, relative_l2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_the_bits_of_a_format_is_that_format() {
        for i in 0..2000u32 {
            let x = f64::from(i).mul_add(0.037, -31.0).exp2() * if i % 2 == 0 { 1.0 } else { -1.0 };
            let x = f64::from(x as f32);
            assert_eq!(round(x, 24), f64::from(x as f32));
            assert_eq!(round(x, 8), bf16::from_f64(x).to_f64(), "{x}");
            if x.abs() > 1e-4 && x.abs() < 6e4 {
                assert_eq!(round(x, 11), f16::from_f64(x).to_f64(), "{x}");
            }
        }
        // A tie goes to the even neighbour, up and down.
        assert_eq!([round(1.0 + 0.0625, 4), round(1.0 + 3.0 * 0.0625, 4)], [1.0, 1.25]);
        assert_eq!([round(0.0, 4), round(-0.0, 4), round(f64::MAX, 4)], [0.0, -0.0, f64::MAX]);
    }

    #[test]
    fn what_is_exact_in_a_lower_precision_has_no_limit() {
        let expected = |x: f64| vec![Expected::all("y", [1, 2], vec![x, 2.0])];
        assert_eq!(limit(Dtype::F32, &expected(1.0), &expected(1.0)), None);
        let off = limit(Dtype::F32, &expected(1.0), &expected(1.1)).unwrap();
        assert!((off.relative_l2 / (0.25 * 0.1 / 5f64.sqrt()) - 1.0).abs() < 1e-9);
    }
}
