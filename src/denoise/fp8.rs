//! Weights in eight bits: codes of e4m3 (four bits of exponent, three of significand, no infinity)
//! with a power of two for each column, as microscaling formats have one for each block.
//!
//! A floating-point code gains nothing from a scale finer than a power of two. With such a scale
//! every dequantised weight is a bf16 number, so implementations lose nothing by computing in bf16.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::model::{ReadTime, TensorSpec};
use crate::e4m3::{MAX_E4M3, decode_e4m3, encode_e4m3};
use crate::parallel;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};

/// Range of the power-of-two exponents of weight columns. A bf16 factor can represent all of them,
/// and weights need fewer. Weights beyond the range of exponents saturate.
const COLUMN_EXPONENT_RANGE: std::ops::RangeInclusive<i32> = -100..=7;

/// Number of elements that one task converts to f32.
const ELEMENTS_PER_TASK: usize = 1 << 16;

/// A matrix that is quantised to fp8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp8Matrix {
    /// Codes in the order of the elements, `[layers][k][columns]`.
    pub codes: Vec<u8>,
    /// Exponent of each column, `[layers][columns]`. The column's codes are multiplied by two to
    /// this exponent, which is the least with which its largest element does not saturate.
    pub exponents: Vec<i8>,
}

/// Whether this input is quantised: the matrices that each step reads are.
pub fn is_quantized(spec: &TensorSpec) -> bool {
    spec.read == ReadTime::EachStep && spec.name.ends_with("_proj")
}

/// Quantises a bf16 tensor `[layers, k, columns]` to fp8.
///
/// # Panics
/// Panics if the tensor has another dtype or number of axes.
pub fn quantize_to_fp8(tensor: &Tensor) -> Fp8Matrix {
    let (&[layers, rows, columns], TensorData::Bf16(values)) =
        (tensor.shape(), tensor.tensor_data())
    else {
        panic!("a stack of bf16 matrices is quantised")
    };
    let mut quantized =
        Fp8Matrix { codes: vec![0; values.len()], exponents: vec![0; layers * columns] };
    let matrices = quantized.codes.chunks_mut(rows * columns);
    let matrices = matrices.zip(quantized.exponents.chunks_mut(columns)).collect();
    parallel::for_each_task(matrices, &|layer, (codes, exponents): (&mut [u8], &mut [i8])| {
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
                *exponent = exponent_without_saturation(largest);
                2f32.powi(-i32::from(*exponent))
            })
            .collect();
        for (row, codes) in values.chunks(columns).zip(codes.chunks_mut(columns)) {
            for ((x, inverse), code) in row.iter().zip(&inverses).zip(codes) {
                *code = encode_e4m3(x.to_f32() * inverse);
            }
        }
    });
    quantized
}

/// Returns the least exponent of two with which `largest` does not saturate.
fn exponent_without_saturation(largest: f32) -> i8 {
    let mut exponent = *COLUMN_EXPONENT_RANGE.start();
    while exponent < *COLUMN_EXPONENT_RANGE.end() && largest > MAX_E4M3 * 2f32.powi(exponent) {
        exponent += 1;
    }
    exponent as i8
}

/// Returns the dequantised weights, all of which are exact bf16 numbers.
pub fn dequantized_tensor(tensor: &Tensor) -> Tensor {
    let &[_, rows, columns] = tensor.shape() else { panic!("a stack of matrices is quantised") };
    let Fp8Matrix { codes, exponents } = quantize_to_fp8(tensor);
    let mut values = vec![bf16::ZERO; codes.len()];
    let table: Vec<f32> = (0..=u8::MAX).map(decode_e4m3).collect();
    parallel::for_each_chunk(&mut values, rows * columns, &|layer, values| {
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

/// Bytes of the codes, with one byte for the exponent of each column.
pub fn fp8_tensor_bytes(spec: &TensorSpec) -> u64 {
    let [layers, _, columns] = spec.shape[..] else { panic!("a stack of matrices is quantised") };
    spec.bytes() / spec.dtype.bytes() as u64 + (layers * columns) as u64
}

/// Converts all inputs to f32 without rounding; bf16 and dequantised weights are exact in f32.
pub fn widen_to_f32(inputs: &Tensors) -> Tensors {
    let mut wide = inputs.clone();
    let narrow = |tensor: &Tensor| tensor.dtype() == Dtype::Bf16;
    for (name, tensor) in inputs.iter().filter(|(_, tensor)| narrow(tensor)) {
        let TensorData::Bf16(values) = tensor.tensor_data() else { continue };
        let mut wider = vec![0.0; values.len()];
        parallel::for_each_chunk(&mut wider, ELEMENTS_PER_TASK, &|piece, wider| {
            values[piece * ELEMENTS_PER_TASK..][..wider.len()].convert_to_f32_slice(wider);
        });
        wide.insert(name, Tensor::new(tensor.shape(), TensorData::F32(wider)));
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::model::{PI05_MODEL, TINY_MODEL};

    #[test]
    fn a_columns_largest_element_uses_the_upper_half_of_the_range() {
        for (largest, exponent) in [(448.0, 0), (449.0, 1), (224.1, 0), (224.0, -1), (1.0, -8)] {
            assert_eq!(exponent_without_saturation(largest), exponent, "{largest}");
        }
        assert_eq!(
            (exponent_without_saturation(0.0), exponent_without_saturation(3e38)),
            (-100, 7)
        );
    }

    #[test]
    fn dequantised_weights_are_near_and_stay_as_they_are() {
        let specs = TINY_MODEL.input_tensors(3, 5, Dtype::Bf16);
        let quantized: Vec<_> = specs.iter().filter(|spec| is_quantized(spec)).collect();
        let names: Vec<_> = quantized.iter().map(|spec| spec.name).collect();
        assert_eq!(
            names,
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        );
        for spec in quantized {
            let tensor = spec.draw_tensor(1);
            let near = dequantized_tensor(&tensor);
            assert_eq!(dequantized_tensor(&near), near, "{}", spec.name);
            let Fp8Matrix { exponents, .. } = quantize_to_fp8(&tensor);
            let (len, columns) = (tensor.len(), tensor.shape()[2]);
            let (exact, near) = (tensor.to_f64(0, len), near.to_f64(0, len));
            for (i, (x, y)) in exact.iter().zip(&near).enumerate() {
                let layer = i / (len / tensor.shape()[0]);
                let least = 2f64.powi(i32::from(exponents[layer * columns + i % columns]) - 10);
                assert!((x - y).abs() <= (x.abs() / 16.0).max(least), "{}: {x} {y}", spec.name);
            }
            assert!(exact != near);
        }
    }

    #[test]
    fn bytes_are_those_of_codes_and_exponents() {
        let specs = PI05_MODEL.input_tensors(50, 968, Dtype::Bf16);
        let sum: u64 = specs.iter().filter(|spec| is_quantized(spec)).map(fp8_tensor_bytes).sum();
        let columns = 18 * (2048 + 2 * 256 + 1024 + 2 * 4096 + 1024);
        assert_eq!(sum, PI05_MODEL.layer_weight_elements() + columns);
    }

    #[test]
    fn widened_inputs_have_the_same_values() {
        let mut inputs = Tensors::new();
        TINY_MODEL
            .input_tensors(3, 5, Dtype::Bf16)
            .iter()
            .for_each(|s| inputs.insert(s.name, s.draw_tensor(1)));
        let wide = widen_to_f32(&inputs);
        for (name, tensor) in inputs.iter() {
            let len = tensor.len();
            assert_eq!(wide.tensor(name).dtype(), Dtype::F32, "{name}");
            assert_eq!(wide.tensor(name).to_f64(0, len), tensor.to_f64(0, len), "{name}");
        }
    }
}
