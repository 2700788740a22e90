//! Weights in four bits: whole numbers from -7 to 7 with a scale for each 128 of k of a column.
//!
//! A scale has five significant bits and a number three, so that their product is a bf16 number:
//! implementations lose nothing by computing in bf16.

use half::bf16;

use super::model::TensorSpec;
use crate::parallel;
use kernelgate::workload::{Dtype, Tensor, TensorData};

/// Number of elements along k that share one scale. The last group of a column may have fewer than
/// 128 elements.
pub const SCALE_GROUP: usize = 128;
/// Largest number of the int4 format; the least one is its negative.
pub const MAX_INT4: i8 = 7;
/// The least and the largest scale, whose products with the numbers neither vanish nor overflow. An
/// element beyond seven times the largest scale saturates.
const SCALE_RANGE: [f32; 2] =
    [f32::from_bits((127 - 100) << 23), f32::from_bits((127 + 100) << 23)];

/// A matrix that is quantised to int4.
#[derive(Debug, Clone, PartialEq)]
pub struct Int4Matrix {
    /// Numbers in the order of the elements, `[layers][k][columns]`.
    pub codes: Vec<i8>,
    /// Scales of the groups, `[layers][ceil(k / 128)][columns]`: a seventh of the group's largest
    /// element, rounded to nearest.
    pub scales: Vec<bf16>,
}

/// Number of groups in a column of `depth` elements.
pub const fn groups_per_column(depth: usize) -> usize {
    depth.div_ceil(SCALE_GROUP)
}

/// Quantises a bf16 tensor `[layers, k, columns]` to int4; NaN becomes 0.
///
/// # Panics
/// Panics if the tensor has another dtype or number of axes.
pub fn quantize_to_int4(tensor: &Tensor) -> Int4Matrix {
    let (&[layers, rows, columns], TensorData::Bf16(values)) =
        (tensor.shape(), tensor.tensor_data())
    else {
        panic!("a stack of bf16 matrices is quantised")
    };
    let mut quantized = Int4Matrix {
        codes: vec![0; values.len()],
        scales: vec![bf16::ZERO; layers * groups_per_column(rows) * columns],
    };
    let matrices = quantized.codes.chunks_mut(rows * columns);
    let matrices =
        matrices.zip(quantized.scales.chunks_mut(groups_per_column(rows) * columns)).collect();
    parallel::for_each_task(matrices, &|layer, (codes, scales): (&mut [i8], &mut [bf16])| {
        let values =
            values[layer * rows * columns..][..rows * columns].chunks(SCALE_GROUP * columns);
        let groups = codes.chunks_mut(SCALE_GROUP * columns).zip(scales.chunks_mut(columns));
        for (values, (codes, scales)) in values.zip(groups) {
            quantize_group(values, codes, scales);
        }
    });
    quantized
}

/// Quantises one group of rows; `scales` gets one scale for each column.
fn quantize_group(values: &[bf16], codes: &mut [i8], scales: &mut [bf16]) {
    let columns = scales.len();
    let mut largest = vec![0f32; columns];
    for row in values.chunks(columns) {
        let wider = largest.iter_mut().zip(row);
        wider.for_each(|(largest, x)| *largest = largest.max(x.to_f32().abs()));
    }
    let pairs = largest.iter().zip(scales.iter_mut());
    pairs.for_each(|(&largest, scale)| *scale = scale_for_largest(largest));
    let inverses: Vec<f32> = scales.iter().map(|scale| scale.to_f32().recip()).collect();
    let bound = f32::from(MAX_INT4);
    for (row, codes) in values.chunks(columns).zip(codes.chunks_mut(columns)) {
        for ((x, inverse), code) in row.iter().zip(&inverses).zip(codes) {
            *code = (x.to_f32() * inverse).round_ties_even().clamp(-bound, bound) as i8;
        }
    }
}

/// Returns a seventh of `largest`, rounded to five significant bits.
fn scale_for_largest(largest: f32) -> bf16 {
    let [least, most] = SCALE_RANGE;
    let bits = (largest / f32::from(MAX_INT4)).clamp(least, most).to_bits();
    let dropped = f32::MANTISSA_DIGITS - 5;
    let odd = bits >> dropped & 1;
    let rounded = (bits + (1 << (dropped - 1)) - 1 + odd) >> dropped << dropped;
    bf16::from_f32(f32::from_bits(rounded))
}

/// Returns the dequantised weights, all of which are exact bf16 numbers.
pub fn dequantized_tensor(tensor: &Tensor) -> Tensor {
    let &[_, rows, columns] = tensor.shape() else { panic!("a stack of matrices is quantised") };
    let Int4Matrix { codes, scales } = quantize_to_int4(tensor);
    let mut values = vec![bf16::ZERO; codes.len()];
    parallel::for_each_chunk(&mut values, rows * columns, &|layer, values| {
        let codes = &codes[layer * rows * columns..];
        let scales = &scales[layer * groups_per_column(rows) * columns..];
        for (k, (row, codes)) in values.chunks_mut(columns).zip(codes.chunks(columns)).enumerate() {
            let scales = &scales[k / SCALE_GROUP * columns..][..columns];
            for ((x, &code), scale) in row.iter_mut().zip(codes).zip(scales) {
                *x = bf16::from_f32(f32::from(code) * scale.to_f32());
            }
        }
    });
    Tensor::new(tensor.shape(), TensorData::Bf16(values))
}

/// Bytes of the numbers, two in each byte, and of the scales.
pub fn int4_tensor_bytes(spec: &TensorSpec) -> u64 {
    let [layers, rows, columns] = spec.shape[..] else {
        panic!("a stack of matrices is quantised")
    };
    let scales = layers * groups_per_column(rows) * columns * Dtype::Bf16.bytes();
    ((layers * rows * columns).div_ceil(2) + scales) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::fp8::is_quantized;
    use crate::denoise::model::{PI05_MODEL, TINY_MODEL};
    use kernelgate::workload::random;

    fn bf16_tensor(shape: [usize; 3], value: impl Fn(usize, usize, usize) -> f32) -> Tensor {
        let [layers, rows, columns] = shape;
        let all = (0..layers * rows * columns)
            .map(|i| bf16::from_f32(value(i / (rows * columns), i / columns % rows, i % columns)));
        Tensor::new(shape, TensorData::Bf16(all.collect()))
    }

    #[test]
    fn scales_have_five_significant_bits_and_products_are_exact() {
        for x in random::normal_values(3, "largest", 4000) {
            let largest = x.abs() * 2f32.powi((x.to_bits() % 60) as i32 - 30);
            let scale = scale_for_largest(largest).to_f32();
            assert_eq!(scale.to_bits() & ((1 << 19) - 1), 0, "{largest}");
            assert!((scale * 7.0 / largest - 1.0).abs() <= 1.0 / 32.0, "{largest} {scale}");
            for code in 1..=MAX_INT4 {
                let product = f32::from(code) * scale;
                assert_eq!(bf16::from_f32(product).to_f32(), product);
            }
        }
        assert_eq!(scale_for_largest(0.0).to_f32(), SCALE_RANGE[0]);
        assert_eq!(scale_for_largest(f32::MAX).to_f32(), SCALE_RANGE[1]);
        assert_eq!(scale_for_largest(7.0).to_f32(), 1.0);
    }

    #[test]
    fn elements_are_within_half_a_scale_and_a_group_has_its_own() {
        // The sizes are not multiples of a group or of a byte.
        let drawn = random::normal_values(7, "w", 2 * 301 * 5);
        let exact = bf16_tensor([2, 301, 5], |layer, k, column| {
            drawn[(layer * 301 + k) * 5 + column] * 10f32.powi((k / SCALE_GROUP) as i32)
        });
        let Int4Matrix { codes, scales } = quantize_to_int4(&exact);
        assert_eq!((codes.len(), scales.len()), (2 * 301 * 5, 2 * 3 * 5));
        assert!(codes.iter().all(|code| (-MAX_INT4..=MAX_INT4).contains(code)));
        let near = dequantized_tensor(&exact);
        let (x, y) = (exact.to_f64(0, codes.len()), near.to_f64(0, codes.len()));
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            let (layer, k, column) = (i / (301 * 5), i / 5 % 301, i % 5);
            let scale = scales[(layer * 3 + k / SCALE_GROUP) * 5 + column].to_f64();
            assert_eq!(f64::from(codes[i]) * scale, *y);
            // The largest element exceeds 7 scales by up to 7 / 32 of a scale.
            assert!((x - y).abs() <= 0.5 * scale, "{i}: {x} {y} {scale}");
        }
        for group in 0..3 {
            let used = (group * SCALE_GROUP..301.min((group + 1) * SCALE_GROUP))
                .any(|k| codes[k * 5 + 2].abs() == MAX_INT4);
            assert!(used, "the largest element of group {group} has the largest number");
        }
    }

    #[test]
    fn zeros_stay_and_what_is_representable_stays() {
        let zeros = bf16_tensor([1, 200, 3], |_, k, _| if k < SCALE_GROUP { 0.0 } else { 1.0 });
        let near = dequantized_tensor(&zeros);
        assert_eq!(near.to_f64(0, 200 * 3)[..SCALE_GROUP * 3], [0.0; SCALE_GROUP * 3]);
        assert!(near.to_f64(SCALE_GROUP * 3, 72 * 3).iter().all(|y| (y - 1.0).abs() < 1.0 / 32.0));
        let exact = bf16_tensor([1, 256, 2], |_, k, column| {
            ((k % 15) as f32 - 7.0) * 0.3125 * 2f32.powi(column as i32 - (k / SCALE_GROUP) as i32)
        });
        assert_eq!(dequantized_tensor(&exact), exact);
        let special = bf16_tensor([1, 3, 1], |_, k, _| [f32::NAN, 7.0, f32::MAX][k]);
        assert_eq!(quantize_to_int4(&special).codes[0], 0);
        assert!(dequantized_tensor(&special).to_f64(2, 1)[0].is_finite());
    }

    #[test]
    fn bytes_are_four_bits_and_an_eighth() {
        let specs = PI05_MODEL.input_tensors(50, 968, Dtype::Bf16);
        let sum: u64 = specs.iter().filter(|spec| is_quantized(spec)).map(int4_tensor_bytes).sum();
        assert_eq!(
            sum,
            PI05_MODEL.layer_weight_elements() / 2 + PI05_MODEL.layer_weight_elements() / 64
        );
        // The matrix has k = 64, so each column has one group.
        let specs = TINY_MODEL.input_tensors(7, 13, Dtype::Bf16);
        let gate = specs.iter().find(|spec| spec.name == "gate_proj").unwrap();
        assert_eq!(int4_tensor_bytes(gate), 2 * (64 * 128 / 2 + 128 * 2));
    }
}
