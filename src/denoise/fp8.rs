//! Weights in fp8: e4m3 codes (four exponent bits, three of significand, no infinity) with a
//! power-of-two scale for each column of a matrix.
//!
//! A floating-point code gains no accuracy from a scale that is finer than a power of two. With a
//! power-of-two scale, every dequantised fp8 weight is exactly a bf16 number, so an implementation
//! may compute in bf16 without loss.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::model::{ExpertInputSpec, InputReadFrequency};
use crate::e4m3::{LARGEST_E4M3_VALUE, decode_e4m3_to_f32, encode_f32_as_e4m3};
use crate::parallel;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};

/// Range of the power-of-two exponents of fp8 weight columns. A bf16 factor can represent 2 to
/// every exponent of this range, and real weights need fewer exponents. Fp8 weights that need a
/// larger column exponent saturate.
const FP8_COLUMN_EXPONENT_RANGE: std::ops::RangeInclusive<i32> = -100..=7;

/// Number of elements that one parallel CPU task converts from bf16 to f32.
const ELEMENTS_PER_WIDENING_TASK: usize = 1 << 16;

/// A stack of weight matrices that is quantised to fp8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp8MatrixStack {
    /// E4m3 codes of the weights, `[layers][k][columns]`.
    pub e4m3_codes: Vec<u8>,
    /// Power-of-two exponent of each column, `[layers][columns]`. A column's codes are multiplied
    /// by two to its exponent, the least exponent with which the column's largest element does not
    /// saturate.
    pub column_exponents: Vec<i8>,
}

/// Whether a low-bit weight format quantises this input: only the seven projection matrices of the
/// layers, which each step reads.
pub fn is_layer_projection_to_quantise(spec: &ExpertInputSpec) -> bool {
    spec.read_frequency == InputReadFrequency::ReadInEachDenoisingStep
        && spec.input_name.ends_with("_proj")
}

/// Quantises a bf16 tensor `[layers, k, columns]` to fp8.
///
/// # Panics
/// Panics if the tensor has another dtype or number of axes.
pub fn quantise_stack_to_fp8(tensor: &Tensor) -> Fp8MatrixStack {
    let (&[layers, rows, columns], TensorData::Bf16(values)) =
        (tensor.shape(), tensor.tensor_data())
    else {
        panic!("a stack of bf16 matrices is quantised")
    };
    let mut quantized = Fp8MatrixStack {
        e4m3_codes: vec![0; values.len()],
        column_exponents: vec![0; layers * columns],
    };
    let matrices = quantized.e4m3_codes.chunks_mut(rows * columns);
    let matrices = matrices.zip(quantized.column_exponents.chunks_mut(columns)).collect();
    parallel::run_tasks_in_parallel(
        matrices,
        &|layer, (codes, exponents): (&mut [u8], &mut [i8])| {
            let values = &values[layer * rows * columns..][..rows * columns];
            let mut largest = vec![0f32; columns];
            for row in values.chunks(columns) {
                let wider = largest.iter_mut().zip(row);
                wider.for_each(|(largest, x)| *largest = largest.max(x.to_f32().abs()));
            }
            let inverses: Vec<f32> = largest
                .iter()
                .zip(exponents)
                .map(|(&largest, exponent)| {
                    *exponent = least_exponent_without_saturation(largest);
                    2f32.powi(-i32::from(*exponent))
                })
                .collect();
            for (row, codes) in values.chunks(columns).zip(codes.chunks_mut(columns)) {
                for ((x, inverse), code) in row.iter().zip(&inverses).zip(codes) {
                    *code = encode_f32_as_e4m3(x.to_f32() * inverse);
                }
            }
        },
    );
    quantized
}

/// Returns the least power-of-two exponent with which a column's largest magnitude `largest` does
/// not saturate in e4m3.
fn least_exponent_without_saturation(largest: f32) -> i8 {
    let mut exponent = *FP8_COLUMN_EXPONENT_RANGE.start();
    while exponent < *FP8_COLUMN_EXPONENT_RANGE.end()
        && largest > LARGEST_E4M3_VALUE * 2f32.powi(exponent)
    {
        exponent += 1;
    }
    exponent as i8
}

/// Quantises a bf16 tensor to fp8 and returns the dequantised weights, all of which are exact bf16
/// numbers.
pub fn round_tensor_through_fp8(tensor: &Tensor) -> Tensor {
    let &[_, rows, columns] = tensor.shape() else { panic!("a stack of matrices is quantised") };
    let Fp8MatrixStack { e4m3_codes: codes, column_exponents: exponents } =
        quantise_stack_to_fp8(tensor);
    let mut values = vec![bf16::ZERO; codes.len()];
    let table: Vec<f32> = (0..=u8::MAX).map(decode_e4m3_to_f32).collect();
    parallel::process_chunks_in_parallel(&mut values, rows * columns, &|layer, values| {
        let codes = &codes[layer * rows * columns..];
        let exponents = &exponents[layer * columns..][..columns];
        let factors: Vec<f32> = exponents.iter().map(|&n| 2f32.powi(n.into())).collect();
        for (row, codes) in values.chunks_mut(columns).zip(codes.chunks(columns)) {
            for ((x, &code), factor) in row.iter_mut().zip(codes).zip(&factors) {
                *x = bf16::from_f32(table[usize::from(code)] * factor);
            }
        }
    });
    Tensor::new(tensor.shape(), TensorData::Bf16(values))
}

/// Bytes of a weight tensor in fp8: one byte for each code and one for the exponent of each column.
pub fn bytes_as_fp8_with_exponents(spec: &ExpertInputSpec) -> u64 {
    let [layers, _, columns] = spec.shape[..] else { panic!("a stack of matrices is quantised") };
    spec.unquantised_bytes() / spec.dtype.bytes_per_element() as u64 + (layers * columns) as u64
}

/// Converts all bf16 inputs to f32, which is exact; dequantised weights are bf16 numbers and stay
/// exact too.
pub fn convert_bf16_inputs_to_f32(inputs: &Tensors) -> Tensors {
    let mut wide = inputs.clone();
    let narrow = |tensor: &Tensor| tensor.dtype() == Dtype::Bf16;
    for (name, tensor) in inputs.iter().filter(|(_, tensor)| narrow(tensor)) {
        let TensorData::Bf16(values) = tensor.tensor_data() else { continue };
        let mut wider = vec![0.0; values.len()];
        parallel::process_chunks_in_parallel(
            &mut wider,
            ELEMENTS_PER_WIDENING_TASK,
            &|piece, wider| {
                values[piece * ELEMENTS_PER_WIDENING_TASK..][..wider.len()]
                    .convert_to_f32_slice(wider);
            },
        );
        wide.insert(name, Tensor::new(tensor.shape(), TensorData::F32(wider)));
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::model::{PI05_EXPERT_MODEL, TINY_TEST_MODEL};

    #[test]
    fn a_columns_largest_element_uses_the_upper_half_of_the_e4m3_range() {
        for (largest, exponent) in [(448.0, 0), (449.0, 1), (224.1, 0), (224.0, -1), (1.0, -8)] {
            assert_eq!(least_exponent_without_saturation(largest), exponent, "{largest}");
        }
        assert_eq!(
            (least_exponent_without_saturation(0.0), least_exponent_without_saturation(3e38)),
            (-100, 7)
        );
    }

    #[test]
    fn weights_rounded_to_fp8_are_near_and_rounding_again_keeps_them() {
        let specs = TINY_TEST_MODEL.input_tensor_specs(3, 5, Dtype::Bf16);
        let quantized: Vec<_> =
            specs.iter().filter(|spec| is_layer_projection_to_quantise(spec)).collect();
        let names: Vec<_> = quantized.iter().map(|spec| spec.input_name).collect();
        assert_eq!(
            names,
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        );
        for spec in quantized {
            let tensor = spec.draw_tensor_from_seed(1);
            let near = round_tensor_through_fp8(&tensor);
            assert_eq!(round_tensor_through_fp8(&near), near, "{}", spec.input_name);
            let Fp8MatrixStack { column_exponents: exponents, .. } = quantise_stack_to_fp8(&tensor);
            let (len, columns) = (tensor.len(), tensor.shape()[2]);
            let (exact, near) = (tensor.elements_to_f64(0, len), near.elements_to_f64(0, len));
            for (i, (x, y)) in exact.iter().zip(&near).enumerate() {
                let layer = i / (len / tensor.shape()[0]);
                let least = 2f64.powi(i32::from(exponents[layer * columns + i % columns]) - 10);
                assert!(
                    (x - y).abs() <= (x.abs() / 16.0).max(least),
                    "{}: {x} {y}",
                    spec.input_name
                );
            }
            assert!(exact != near);
        }
    }

    #[test]
    fn fp8_size_counts_codes_and_column_exponents() {
        let specs = PI05_EXPERT_MODEL.input_tensor_specs(50, 968, Dtype::Bf16);
        let sum: u64 = specs
            .iter()
            .filter(|spec| is_layer_projection_to_quantise(spec))
            .map(bytes_as_fp8_with_exponents)
            .sum();
        let columns = 18 * (2048 + 2 * 256 + 1024 + 2 * 4096 + 1024);
        assert_eq!(sum, PI05_EXPERT_MODEL.projection_weights_of_all_layers() + columns);
    }

    #[test]
    fn inputs_converted_to_f32_have_the_same_values() {
        let mut inputs = Tensors::new();
        TINY_TEST_MODEL
            .input_tensor_specs(3, 5, Dtype::Bf16)
            .iter()
            .for_each(|s| inputs.insert(s.input_name, s.draw_tensor_from_seed(1)));
        let wide = convert_bf16_inputs_to_f32(&inputs);
        for (name, tensor) in inputs.iter() {
            let len = tensor.len();
            assert_eq!(wide.tensor(name).dtype(), Dtype::F32, "{name}");
            assert_eq!(
                wide.tensor(name).elements_to_f64(0, len),
                tensor.elements_to_f64(0, len),
                "{name}"
            );
        }
    }
}
