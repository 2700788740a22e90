//! Weights in int4: integers from -7 to 7, with a scale for each 128 elements along k of a column.
//!
//! An int4 scale has five significant bits and an integer three, so their product is exactly a bf16
//! number, and implementations may compute in bf16 without loss.

use half::bf16;

use super::model::ExpertInputSpec;
use crate::parallel;
use kernelgate::workload::{Dtype, Tensor, TensorData};

/// Number of elements along k of a column that share one int4 scale. The last int4 scale group of a
/// column may have fewer than 128 elements.
pub const INT4_SCALE_GROUP_ELEMENTS: usize = 128;
/// Largest integer of the int4 weight format; the least is its negative.
pub const MAX_INT4_MAGNITUDE: i8 = 7;
/// The least and the largest int4 scale, whose products with the integers from -7 to 7 neither
/// vanish nor overflow. A weight beyond seven times the largest int4 scale saturates.
const INT4_SCALE_RANGE: [f32; 2] =
    [f32::from_bits((127 - 100) << 23), f32::from_bits((127 + 100) << 23)];

/// A stack of weight matrices that is quantised to int4.
#[derive(Debug, Clone, PartialEq)]
pub struct Int4MatrixStack {
    /// Quantised weights as integers from -7 to 7, one for each weight, `[layers][k][columns]`.
    pub int4_codes: Vec<i8>,
    /// Scale of each group of 128 weights, `[layers][ceil(k / 128)][columns]`: a seventh of the
    /// group's largest magnitude, rounded to five significant bits.
    pub group_scales: Vec<bf16>,
}

/// Number of int4 scale groups in a column of `depth` elements.
pub const fn int4_groups_per_column(depth: usize) -> usize {
    depth.div_ceil(INT4_SCALE_GROUP_ELEMENTS)
}

/// Quantises a bf16 tensor `[layers, k, columns]` to int4; NaN becomes 0.
///
/// # Panics
/// Panics if the tensor has another dtype or number of axes.
pub fn quantise_stack_to_int4(tensor: &Tensor) -> Int4MatrixStack {
    let (&[layers, rows, columns], TensorData::Bf16(values)) =
        (tensor.shape(), tensor.tensor_data())
    else {
        panic!("a stack of bf16 matrices is quantised")
    };
    let mut quantized = Int4MatrixStack {
        int4_codes: vec![0; values.len()],
        group_scales: vec![bf16::ZERO; layers * int4_groups_per_column(rows) * columns],
    };
    let matrices = quantized.int4_codes.chunks_mut(rows * columns);
    let matrices = matrices
        .zip(quantized.group_scales.chunks_mut(int4_groups_per_column(rows) * columns))
        .collect();
    parallel::run_tasks_in_parallel(
        matrices,
        &|layer, (codes, scales): (&mut [i8], &mut [bf16])| {
            let values = values[layer * rows * columns..][..rows * columns]
                .chunks(INT4_SCALE_GROUP_ELEMENTS * columns);
            let groups = codes
                .chunks_mut(INT4_SCALE_GROUP_ELEMENTS * columns)
                .zip(scales.chunks_mut(columns));
            for (values, (codes, scales)) in values.zip(groups) {
                quantise_rows_of_scale_group(values, codes, scales);
            }
        },
    );
    quantized
}

/// Quantises up to 128 rows of k to int4 and writes one scale for each column to `scales`.
fn quantise_rows_of_scale_group(values: &[bf16], codes: &mut [i8], scales: &mut [bf16]) {
    let columns = scales.len();
    let mut largest = vec![0f32; columns];
    for row in values.chunks(columns) {
        let wider = largest.iter_mut().zip(row);
        wider.for_each(|(largest, x)| *largest = largest.max(x.to_f32().abs()));
    }
    let pairs = largest.iter().zip(scales.iter_mut());
    pairs.for_each(|(&largest, scale)| *scale = int4_scale_for_largest_magnitude(largest));
    let inverses: Vec<f32> = scales.iter().map(|scale| scale.to_f32().recip()).collect();
    let bound = f32::from(MAX_INT4_MAGNITUDE);
    for (row, codes) in values.chunks(columns).zip(codes.chunks_mut(columns)) {
        for ((x, inverse), code) in row.iter().zip(&inverses).zip(codes) {
            *code = (x.to_f32() * inverse).round_ties_even().clamp(-bound, bound) as i8;
        }
    }
}

/// Returns the int4 scale of a group: a seventh of its largest magnitude `largest`, rounded to five
/// significant bits.
fn int4_scale_for_largest_magnitude(largest: f32) -> bf16 {
    let [least, most] = INT4_SCALE_RANGE;
    let bits = (largest / f32::from(MAX_INT4_MAGNITUDE)).clamp(least, most).to_bits();
    let dropped = f32::MANTISSA_DIGITS - 5;
    let odd = bits >> dropped & 1;
    let rounded = (bits + (1 << (dropped - 1)) - 1 + odd) >> dropped << dropped;
    bf16::from_f32(f32::from_bits(rounded))
}

/// Quantises a bf16 tensor to int4 and returns the dequantised weights, all of which are exact bf16
/// numbers.
pub fn round_tensor_through_int4(tensor: &Tensor) -> Tensor {
    let &[_, rows, columns] = tensor.shape() else { panic!("a stack of matrices is quantised") };
    let Int4MatrixStack { int4_codes: codes, group_scales: scales } =
        quantise_stack_to_int4(tensor);
    let mut values = vec![bf16::ZERO; codes.len()];
    parallel::process_chunks_in_parallel(&mut values, rows * columns, &|layer, values| {
        let codes = &codes[layer * rows * columns..];
        let scales = &scales[layer * int4_groups_per_column(rows) * columns..];
        for (k, (row, codes)) in values.chunks_mut(columns).zip(codes.chunks(columns)).enumerate() {
            let scales = &scales[k / INT4_SCALE_GROUP_ELEMENTS * columns..][..columns];
            for ((x, &code), scale) in row.iter_mut().zip(codes).zip(scales) {
                *x = bf16::from_f32(f32::from(code) * scale.to_f32());
            }
        }
    });
    Tensor::new(tensor.shape(), TensorData::Bf16(values))
}

/// Bytes of a weight tensor in int4: two integers in each byte, and a bf16 scale for each group.
pub fn bytes_as_int4_with_scales(spec: &ExpertInputSpec) -> u64 {
    let [layers, rows, columns] = spec.shape[..] else {
        panic!("a stack of matrices is quantised")
    };
    let scales = layers * int4_groups_per_column(rows) * columns * Dtype::Bf16.bytes_per_element();
    ((layers * rows * columns).div_ceil(2) + scales) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::fp8::is_layer_projection_to_quantise;
    use crate::denoise::model::{PI05_EXPERT_MODEL, TINY_TEST_MODEL};
    use kernelgate::workload::random;

    fn bf16_tensor_from_indices(
        shape: [usize; 3],
        value: impl Fn(usize, usize, usize) -> f32,
    ) -> Tensor {
        let [layers, rows, columns] = shape;
        let all = (0..layers * rows * columns)
            .map(|i| bf16::from_f32(value(i / (rows * columns), i / columns % rows, i % columns)));
        Tensor::new(shape, TensorData::Bf16(all.collect()))
    }

    #[test]
    fn int4_scales_have_five_significant_bits_and_products_are_exact() {
        for x in random::normal_values(3, "largest", 4000) {
            let largest = x.abs() * 2f32.powi((x.to_bits() % 60) as i32 - 30);
            let scale = int4_scale_for_largest_magnitude(largest).to_f32();
            assert_eq!(scale.to_bits() & ((1 << 19) - 1), 0, "{largest}");
            assert!((scale * 7.0 / largest - 1.0).abs() <= 1.0 / 32.0, "{largest} {scale}");
            for code in 1..=MAX_INT4_MAGNITUDE {
                let product = f32::from(code) * scale;
                assert_eq!(bf16::from_f32(product).to_f32(), product);
            }
        }
        assert_eq!(int4_scale_for_largest_magnitude(0.0).to_f32(), INT4_SCALE_RANGE[0]);
        assert_eq!(int4_scale_for_largest_magnitude(f32::MAX).to_f32(), INT4_SCALE_RANGE[1]);
        assert_eq!(int4_scale_for_largest_magnitude(7.0).to_f32(), 1.0);
    }

    #[test]
    fn int4_errors_are_within_half_the_scale_of_each_group() {
        // The sizes of this test tensor are not multiples of a scale group or of a byte's two
        // integers.
        let drawn = random::normal_values(7, "w", 2 * 301 * 5);
        let exact = bf16_tensor_from_indices([2, 301, 5], |layer, k, column| {
            drawn[(layer * 301 + k) * 5 + column]
                * 10f32.powi((k / INT4_SCALE_GROUP_ELEMENTS) as i32)
        });
        let Int4MatrixStack { int4_codes: codes, group_scales: scales } =
            quantise_stack_to_int4(&exact);
        assert_eq!((codes.len(), scales.len()), (2 * 301 * 5, 2 * 3 * 5));
        assert!(codes.iter().all(|code| (-MAX_INT4_MAGNITUDE..=MAX_INT4_MAGNITUDE).contains(code)));
        let near = round_tensor_through_int4(&exact);
        let (x, y) = (exact.elements_to_f64(0, codes.len()), near.elements_to_f64(0, codes.len()));
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            let (layer, k, column) = (i / (301 * 5), i / 5 % 301, i % 5);
            let scale = scales[(layer * 3 + k / INT4_SCALE_GROUP_ELEMENTS) * 5 + column].to_f64();
            assert_eq!(f64::from(codes[i]) * scale, *y);
            // The largest weight of a group can exceed seven times the group's scale by up to 7 /
            // 32 of the scale, because the scale was rounded.
            assert!((x - y).abs() <= 0.5 * scale, "{i}: {x} {y} {scale}");
        }
        for group in 0..3 {
            let used = (group * INT4_SCALE_GROUP_ELEMENTS
                ..301.min((group + 1) * INT4_SCALE_GROUP_ELEMENTS))
                .any(|k| codes[k * 5 + 2].abs() == MAX_INT4_MAGNITUDE);
            assert!(used, "the largest element of group {group} has the largest number");
        }
    }

    #[test]
    fn zeros_and_representable_weights_stay_equal_in_int4() {
        let zeros = bf16_tensor_from_indices([1, 200, 3], |_, k, _| {
            if k < INT4_SCALE_GROUP_ELEMENTS { 0.0 } else { 1.0 }
        });
        let near = round_tensor_through_int4(&zeros);
        assert_eq!(
            near.elements_to_f64(0, 200 * 3)[..INT4_SCALE_GROUP_ELEMENTS * 3],
            [0.0; INT4_SCALE_GROUP_ELEMENTS * 3]
        );
        assert!(
            near.elements_to_f64(INT4_SCALE_GROUP_ELEMENTS * 3, 72 * 3)
                .iter()
                .all(|y| (y - 1.0).abs() < 1.0 / 32.0)
        );
        let exact = bf16_tensor_from_indices([1, 256, 2], |_, k, column| {
            ((k % 15) as f32 - 7.0)
                * 0.3125
                * 2f32.powi(column as i32 - (k / INT4_SCALE_GROUP_ELEMENTS) as i32)
        });
        assert_eq!(round_tensor_through_int4(&exact), exact);
        let special = bf16_tensor_from_indices([1, 3, 1], |_, k, _| [f32::NAN, 7.0, f32::MAX][k]);
        assert_eq!(quantise_stack_to_int4(&special).int4_codes[0], 0);
        assert!(round_tensor_through_int4(&special).elements_to_f64(2, 1)[0].is_finite());
    }

    #[test]
    fn int4_bytes_are_four_bits_and_an_eighth_for_each_weight() {
        let specs = PI05_EXPERT_MODEL.input_tensor_specs(50, 968, Dtype::Bf16);
        let sum: u64 = specs
            .iter()
            .filter(|spec| is_layer_projection_to_quantise(spec))
            .map(bytes_as_int4_with_scales)
            .sum();
        assert_eq!(
            sum,
            PI05_EXPERT_MODEL.projection_weights_of_all_layers() / 2
                + PI05_EXPERT_MODEL.projection_weights_of_all_layers() / 64
        );
        // The matrix of this test has k = 64, so each column has one scale group.
        let specs = TINY_TEST_MODEL.input_tensor_specs(7, 13, Dtype::Bf16);
        let gate = specs.iter().find(|spec| spec.input_name == "gate_proj").unwrap();
        assert_eq!(bytes_as_int4_with_scales(gate), 2 * (64 * 128 / 2 + 128 * 2));
    }
}
