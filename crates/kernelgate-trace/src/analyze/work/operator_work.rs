//! FLOPs and bytes of operators by the shapes of their inputs, and of matrix products by the sizes
//! in their names. The bytes are the least that memory must move: each input and each output once.
//! This module ignores what caches and other kernels save or add.

use serde_json::Value;

use crate::analyze::work::device_peaks::MatrixPrecision;
use crate::model::gpu::DeclaredWorkCount;
use crate::model::host::OperatorInputs;
use crate::model::interned_names::TraceNames;

/// Floating-point operations and bytes of an operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperatorWork {
    /// Floating-point operations of the operator's matrix products; 0 of operators that only move.
    pub flops: f64,
    /// The fewest bytes that memory must move for the operator.
    pub bytes: f64,
    /// Precision in which the operator multiplies.
    pub precision: Option<MatrixPrecision>,
}

/// A tensor that an operator takes as input.
#[derive(Debug, Clone, PartialEq)]
struct OperatorTensor {
    axes: Vec<f64>,
    size: f64,
    precision: Option<MatrixPrecision>,
}

impl OperatorTensor {
    fn element_count(&self) -> f64 {
        self.axes.iter().product()
    }

    fn bytes(&self) -> f64 {
        self.element_count() * self.size
    }

    /// Size of a tensor's axis, counted from the last axis.
    fn axis_from_last(&self, index: usize) -> Option<f64> {
        let at = self.axes.len().checked_sub(index + 1)?;
        self.axes.get(at).copied()
    }
}

/// Recorded inputs of an operator: tensors and values.
struct RecordedInputs {
    /// Tensors by argument; `None` for an argument that is not a tensor.
    tensors: Vec<Option<OperatorTensor>>,
    /// Values of arguments that are not tensors, as written.
    values: Vec<String>,
}

impl RecordedInputs {
    fn parse(inputs: &OperatorInputs, names: &TraceNames) -> Option<RecordedInputs> {
        let list = |text| match serde_json::from_str(names.text(text)) {
            Ok(Value::Array(list)) => list,
            _ => Vec::new(),
        };
        let (dims, types) = (list(inputs.dims), list(inputs.types));
        let tensor = |(index, dims): (usize, &Value)| {
            let axis = |axis: &Value| axis.as_f64().filter(|axis| *axis >= 0.0);
            let axes: Option<Vec<f64>> = dims.as_array()?.iter().map(axis).collect();
            let (size, precision) = bytes_and_precision_of_type(types.get(index)?.as_str()?)?;
            Some(OperatorTensor { axes: axes?, size, precision })
        };
        let text = |value: Value| match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        Some(Self {
            tensors: dims.iter().enumerate().map(tensor).collect(),
            values: list(inputs.values).into_iter().map(text).collect(),
        })
    }

    /// The tensor of an argument, if it has axes.
    fn tensor(&self, argument: usize) -> Option<&OperatorTensor> {
        self.tensors.get(argument)?.as_ref().filter(|tensor| !tensor.axes.is_empty())
    }

    fn argument_is_true(&self, argument: usize) -> bool {
        self.values.get(argument).is_some_and(|value| value == "True" || value == "true")
    }

    /// Parses the numbers of a list such as `[1, 1]` or `(1, 1)`; a single number stands for all.
    fn numbers(&self, argument: usize, count: usize) -> Option<Vec<f64>> {
        let text = self.values.get(argument)?;
        let digits = text.split(|c: char| !(c.is_ascii_digit() || c == '-'));
        let numbers: Vec<f64> = digits.filter_map(|number| number.parse().ok()).collect();
        match numbers.len() {
            1 => Some(vec![numbers[0]; count]),
            of if of == count => Some(numbers),
            _ => None,
        }
    }

    fn bytes(&self) -> f64 {
        self.tensors.iter().flatten().map(OperatorTensor::bytes).sum()
    }
}

/// Bytes and precision of a value, by the name that PyTorch gives its type.
fn bytes_and_precision_of_type(name: &str) -> Option<(f64, Option<MatrixPrecision>)> {
    let name = name.rsplit("::").next().unwrap_or(name);
    Some(match name {
        "double" => (8.0, Some(MatrixPrecision::Fp64)),
        "float" => (4.0, Some(MatrixPrecision::Fp32)),
        "BFloat16" | "Half" => (2.0, Some(MatrixPrecision::Fp16)),
        "signed char" | "unsigned char" | "char" => (1.0, Some(MatrixPrecision::Int8)),
        "bool" => (1.0, None),
        "int" => (4.0, None),
        "long int" | "long" => (8.0, None),
        "short" => (2.0, None),
        name if name.starts_with("Float8") => (1.0, Some(MatrixPrecision::Fp8)),
        _ => return None,
    })
}

/// Work of an operator; `None` where its formula is not known or its shapes were not recorded.
pub fn work_of_operator(
    name: &str,
    inputs: &OperatorInputs,
    names: &TraceNames,
) -> Option<OperatorWork> {
    let function = name.strip_prefix("aten::").or_else(|| name.strip_prefix("_C::"))?;
    let inputs = RecordedInputs::parse(inputs, names)?;
    let work = match function {
        "mm" | "_int_mm" | "_scaled_mm" | "bmm" => matmul_work(&inputs, 0),
        "addmm" | "addmm_" | "baddbmm" | "_addmm_activation" => matmul_work(&inputs, 1),
        "matmul" => matmul_work(&inputs, 0),
        "linear" => linear_work(&inputs),
        "convolution" | "_convolution" | "convolution_overrideable" => {
            convolution_work(&inputs, 3, 4)
        }
        "cudnn_convolution" | "miopen_convolution" => convolution_work(&inputs, 3, 2),
        "conv2d" | "conv1d" | "conv3d" => convolution_work(&inputs, 3, 4),
        "convolution_backward" => convolution_backward_work(&inputs),
        "_scaled_dot_product_flash_attention" => {
            attention_work(&inputs, QueryLayout::HeadsFirst, 4)
        }
        "_scaled_dot_product_efficient_attention" | "_scaled_dot_product_cudnn_attention" => {
            attention_work(&inputs, QueryLayout::HeadsFirst, 6)
        }
        "_flash_attention_forward" => attention_work(&inputs, QueryLayout::HeadsLast, 8),
        "_scaled_dot_product_flash_attention_backward" => attention_backward_work(&inputs, 11),
        "_scaled_dot_product_efficient_attention_backward" => attention_backward_work(&inputs, 11),
        "_scaled_dot_product_cudnn_attention_backward" => attention_backward_work(&inputs, 14),
        _ => work_of_moving_bytes(function, &inputs),
    };
    // Empty tensors have no work, and neither have sizes beyond every number.
    work.filter(|work| (work.flops + work.bytes).is_finite())
}

/// Products that an output of a matrix product adds up. `aten::matmul` calls one of these
/// operators, which is counted instead.
pub fn matmul_inner_size(name: &str, inputs: &OperatorInputs, names: &TraceNames) -> Option<f64> {
    let first = match name.strip_prefix("aten::")? {
        "mm" | "bmm" => 0,
        "addmm" | "baddbmm" => 1,
        _ => return None,
    };
    RecordedInputs::parse(inputs, names)?.tensor(first)?.axis_from_last(0)
}

/// `[…, m, k]` times `[…, k, n]`, from an argument on.
fn matmul_work(inputs: &RecordedInputs, first: usize) -> Option<OperatorWork> {
    let (a, b) = (inputs.tensor(first)?, inputs.tensor(first + 1)?);
    let (k, n) = match b.axes.len() {
        1 => (b.axes[0], 1.0),
        _ => (b.axis_from_last(1)?, b.axis_from_last(0)?),
    };
    if a.axis_from_last(0)? != k {
        return None;
    }
    // Batches of the second factor count where the first has none.
    let rows = a.element_count() / k;
    let batches = b.element_count() / (k * n);
    let rows = if a.axes.len() < b.axes.len() { rows * batches } else { rows };
    let output = rows * n;
    Some(OperatorWork {
        flops: 2.0 * output * k,
        bytes: inputs.bytes() + output * a.size.max(2.0),
        precision: a.precision,
    })
}

/// Work of the product of `[…, k]` and the transpose of `[n, k]`.
fn linear_work(inputs: &RecordedInputs) -> Option<OperatorWork> {
    let (input, weight) = (inputs.tensor(0)?, inputs.tensor(1)?);
    let (n, k) = (weight.axis_from_last(1)?, weight.axis_from_last(0)?);
    if input.axis_from_last(0)? != k {
        return None;
    }
    let output = input.element_count() / k * n;
    Some(OperatorWork {
        flops: 2.0 * output * k,
        bytes: inputs.bytes() + output * input.size,
        precision: input.precision,
    })
}

/// Work of a convolution whose strides and paddings are the arguments with these numbers.
fn convolution_work(
    inputs: &RecordedInputs,
    stride: usize,
    padding: usize,
) -> Option<OperatorWork> {
    let (input, weight) = (inputs.tensor(0)?, inputs.tensor(1)?);
    let axes = weight.axes.len().checked_sub(2).filter(|axes| *axes > 0)?;
    if input.axes.len() != axes + 2 {
        return None;
    }
    let strides = inputs.numbers(stride, axes)?;
    let paddings = inputs.numbers(padding, axes)?;
    let dilations = inputs.numbers(stride.max(padding) + 1, axes)?;
    let mut output = input.axes[0] * weight.axes[0];
    for axis in 0..axes {
        let kernel = dilations[axis] * (weight.axes[axis + 2] - 1.0) + 1.0;
        let steps = (input.axes[axis + 2] + 2.0 * paddings[axis] - kernel) / strides[axis];
        output *= (steps.floor() + 1.0).max(0.0);
    }
    let per_output = weight.element_count() / weight.axes[0];
    Some(OperatorWork {
        flops: 2.0 * output * per_output,
        bytes: inputs.bytes() + output * input.size,
        precision: input.precision,
    })
}

/// Gradients of input and weight, each as many operations as the convolution.
fn convolution_backward_work(inputs: &RecordedInputs) -> Option<OperatorWork> {
    let (gradient, input, weight) = (inputs.tensor(0)?, inputs.tensor(1)?, inputs.tensor(2)?);
    let per_output = weight.element_count() / weight.axes[0];
    let mask = inputs.values.get(10).filter(|mask| mask.contains("True") || mask.contains("true"));
    let parts = mask.map_or(2, |mask| {
        mask.split(',').take(2).filter(|part| part.to_ascii_lowercase().contains("true")).count()
    });
    #[allow(clippy::cast_precision_loss)]
    let flops = 2.0 * gradient.element_count() * per_output * parts as f64;
    Some(OperatorWork {
        flops,
        bytes: inputs.bytes() + input.bytes() + weight.bytes(),
        precision: gradient.precision,
    })
}

/// The order of the axes of queries.
#[derive(Clone, Copy)]
enum QueryLayout {
    /// Batch, heads, tokens, values.
    HeadsFirst,
    /// Batch, tokens, heads, values.
    HeadsLast,
}

/// Work of two products, of queries with keys and of weights with values; half of it if later
/// tokens are masked.
fn attention_work(
    inputs: &RecordedInputs,
    layout: QueryLayout,
    causal: usize,
) -> Option<OperatorWork> {
    let [q, k, v] = [0, 1, 2].map(|argument| inputs.tensor(argument));
    let (q, k, v) = (q?, k?, v?);
    if q.axes.len() != 4 || k.axes.len() != 4 || v.axes.len() != 4 {
        return None;
    }
    let (heads, tokens) = match layout {
        QueryLayout::HeadsFirst => (1, 2),
        QueryLayout::HeadsLast => (2, 1),
    };
    let scores = q.axes[0] * q.axes[heads] * q.axes[tokens] * k.axes[tokens];
    let masked = if inputs.argument_is_true(causal) { 0.5 } else { 1.0 };
    Some(OperatorWork {
        flops: 2.0 * scores * (q.axes[3] + v.axes[3]) * masked,
        bytes: q.bytes()
            + k.bytes()
            + v.bytes()
            + q.element_count() / q.axes[3] * v.axes[3] * q.size,
        precision: q.precision,
    })
}

/// Five products in place of two: scores again, and gradients of queries, keys, values and scores.
fn attention_backward_work(inputs: &RecordedInputs, causal: usize) -> Option<OperatorWork> {
    let shifted = RecordedInputs { tensors: inputs.tensors.get(1..)?.to_vec(), values: Vec::new() };
    let forward = attention_work(&shifted, QueryLayout::HeadsFirst, usize::MAX)?;
    let masked = if inputs.argument_is_true(causal) { 0.5 } else { 1.0 };
    Some(OperatorWork {
        flops: 2.5 * forward.flops * masked,
        bytes: 2.0 * forward.bytes,
        ..forward
    })
}

/// Functions of each element, normalisation and softmax: they move their inputs and an output as
/// large as the largest.
const MEMORY_BOUND_OPERATORS: &[&str] = &[
    "add",
    "add_",
    "sub",
    "sub_",
    "mul",
    "mul_",
    "div",
    "div_",
    "neg",
    "exp",
    "sqrt",
    "rsqrt",
    "pow",
    "relu",
    "relu_",
    "gelu",
    "silu",
    "silu_",
    "sigmoid",
    "tanh",
    "clamp",
    "clamp_min",
    "where",
    "masked_fill",
    "masked_fill_",
    "native_dropout",
    "_softmax",
    "_log_softmax",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_to_copy",
    "clone",
    "contiguous",
    "threshold_backward",
    "gelu_backward",
    "silu_backward",
    "_softmax_backward_data",
];

fn work_of_moving_bytes(function: &str, inputs: &RecordedInputs) -> Option<OperatorWork> {
    let largest = inputs.tensors.iter().flatten().map(OperatorTensor::bytes).fold(0.0, f64::max);
    let bytes = match function {
        // The first argument of these operators is written but not read.
        "copy_" | "fill_" | "zero_" => inputs.bytes(),
        "sum" | "mean" | "max" | "min" | "amax" => inputs.bytes(),
        function if MEMORY_BOUND_OPERATORS.contains(&function) => inputs.bytes() + largest,
        _ => return None,
    };
    (bytes > 0.0).then_some(OperatorWork { flops: 0.0, bytes, precision: None })
}

/// The precision that a word names, and the bytes of a value.
fn precision_by_name(word: &str) -> Option<(MatrixPrecision, f64)> {
    match word {
        "fp64" | "f64" | "dgemm" => Some((MatrixPrecision::Fp64, 8.0)),
        "fp32" | "f32" | "sgemm" => Some((MatrixPrecision::Fp32, 4.0)),
        "tf32" => Some((MatrixPrecision::Tf32, 4.0)),
        "fp16" | "f16" | "bf16" | "half" | "hgemm" => Some((MatrixPrecision::Fp16, 2.0)),
        "fp8" | "e4m3" | "e5m2" => Some((MatrixPrecision::Fp8, 1.0)),
        "int8" | "i8" | "s8" => Some((MatrixPrecision::Int8, 1.0)),
        _ => None,
    }
}

/// The work that a recording declares: its matrix products, and the least bytes. The precision is
/// that of nearly all operations; `None` if the operations have several precisions.
pub fn work_of_declared_count(count: &DeclaredWorkCount) -> Option<OperatorWork> {
    /// Share of the multiplications in one precision from which the work counts as computed in it.
    const MIN_SHARE_FOR_ONE_PRECISION: f64 = 0.95;
    let products = || {
        let product = |(unit, flops): &(String, f64)| {
            Some((precision_by_name(unit.strip_prefix("matmul ")?)?.0, *flops))
        };
        count.flops.iter().filter_map(product)
    };
    let flops: f64 = products().map(|(_, flops)| flops).sum();
    let main = products().find(|(_, own)| *own >= MIN_SHARE_FOR_ONE_PRECISION * flops);
    let precision = main.filter(|_| flops > 0.0).map(|(precision, _)| precision);
    let work = OperatorWork { flops, bytes: count.bytes, precision };
    (flops + count.bytes > 0.0 && (flops + count.bytes).is_finite()).then_some(work)
}

/// Work of a matrix product whose name has its sizes, such as `gemm_m4096_n512_k1024_bf16`.
pub fn work_of_named_gemm(name: &str) -> Option<OperatorWork> {
    // Most kernel names contain no sizes, and this quick test detects these.
    let sized = |pair: &[u8]| pair[0].eq_ignore_ascii_case(&b'k') && pair[1].is_ascii_digit();
    if !name.as_bytes().windows(2).any(sized) {
        return None;
    }
    let words: Vec<String> =
        name.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase).collect();
    let size = |axis: char| {
        let after = |word: &String| word.strip_prefix(axis)?.parse::<f64>().ok();
        let found: Vec<f64> = words.iter().filter_map(after).collect();
        // Two sizes of one axis are of a tile and of the problem.
        (found.len() == 1).then(|| found[0])
    };
    let (m, n, k) = (size('m')?, size('n')?, size('k')?);
    let (precision, bytes) = words.iter().find_map(|word| precision_by_name(word)).unzip();
    let bytes = bytes.unwrap_or(0.0) * (m * k + k * n + m * n);
    Some(OperatorWork { flops: 2.0 * m * n * k, bytes, precision })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(name: &str, dims: &str, types: &str, values: &str) -> Option<OperatorWork> {
        let mut names = TraceNames::default();
        let [dims, types, values] = [dims, types, values].map(|text| names.intern_text(text));
        work_of_operator(name, &OperatorInputs { dims, types, values }, &names)
    }

    fn operator_flops(name: &str, dims: &str, values: &str) -> Option<f64> {
        let half = r#"["c10::Half", "c10::Half", "c10::Half", "c10::Half"]"#;
        work(name, dims, half, values).map(|work| work.flops)
    }

    #[test]
    fn a_matrix_product_counts_two_operations_per_multiplication() {
        assert_eq!(operator_flops("aten::mm", "[[4, 8], [8, 16]]", "[]"), Some(1024.0));
        assert_eq!(operator_flops("aten::addmm", "[[16], [4, 8], [8, 16]]", "[]"), Some(1024.0));
        assert_eq!(operator_flops("aten::bmm", "[[3, 4, 8], [3, 8, 16]]", "[]"), Some(3072.0));
        assert_eq!(
            operator_flops("aten::linear", "[[2, 4, 8], [16, 8], [16]]", "[]"),
            Some(2048.0)
        );
        assert_eq!(
            operator_flops("aten::mm", "[[4, 8], [9, 16]]", "[]"),
            None,
            "shapes that do not fit"
        );
        assert_eq!(
            operator_flops("aten::mm", "[[4, -8], [-8, 16]]", "[]"),
            None,
            "no axis is negative"
        );
        assert_eq!(operator_flops("aten::mm", "[[0, 0], [0, 0]]", "[]"), None);
        assert_eq!(operator_flops("aten::mm", "[]", "[]"), None);
        assert_eq!(operator_flops("my::mm", "[[4, 8], [8, 16]]", "[]"), None);
    }

    #[test]
    fn a_convolution_counts_operations_for_each_output() {
        let dims = "[[1, 3, 8, 8], [4, 3, 3, 3], []]";
        let values = r#"["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]"#;
        // 4 channels of 4 x 4, each of 3 x 3 x 3.
        assert_eq!(operator_flops("aten::convolution", dims, values), Some(2.0 * 64.0 * 27.0));
        assert_eq!(operator_flops("aten::convolution", dims, "[]"), None, "strides are not known");
        let dims = "[[1, 4, 4, 4], [1, 3, 8, 8], [4, 3, 3, 3]]";
        assert_eq!(
            operator_flops("aten::convolution_backward", dims, "[]"),
            Some(4.0 * 64.0 * 27.0)
        );
    }

    #[test]
    fn causal_attention_counts_half_the_operations() {
        let dims = "[[2, 3, 16, 8], [2, 3, 16, 8], [2, 3, 16, 8], [], []]";
        let name = "aten::_scaled_dot_product_flash_attention";
        let whole = 4.0 * 2.0 * 3.0 * 16.0 * 16.0 * 8.0;
        assert_eq!(operator_flops(name, dims, r#"["", "", "", "0.", "False"]"#), Some(whole));
        assert_eq!(operator_flops(name, dims, r#"["", "", "", "0.", "True"]"#), Some(whole / 2.0));
        let dims = "[[2, 3, 16, 8], [2, 3, 16, 8], [2, 3, 16, 8], [2, 3, 16, 8]]";
        let backward = "aten::_scaled_dot_product_flash_attention_backward";
        assert_eq!(operator_flops(backward, dims, "[]"), Some(2.5 * whole));
    }

    #[test]
    fn elementwise_operators_move_their_inputs_and_one_output() {
        let types = r#"["float", "float", "Scalar"]"#;
        let add = work("aten::add", "[[4, 8], [8], []]", types, "[]");
        assert_eq!(
            add,
            Some(OperatorWork { flops: 0.0, bytes: 4.0 * (32.0 + 8.0 + 32.0), precision: None })
        );
        let copy = work("aten::copy_", "[[4], [4], []]", r#"["c10::Half", "float", ""]"#, "[]");
        assert_eq!(copy.map(|work| work.bytes), Some(24.0));
        assert_eq!(work("aten::empty", "[[4]]", types, "[]"), None);
    }

    #[test]
    fn the_sizes_of_a_product_are_read_from_its_kernel_name() {
        let work = work_of_named_gemm("gemm_m4_n8_k16_bf16").expect("it has all sizes");
        assert_eq!((work.flops, work.precision), (1024.0, Some(MatrixPrecision::Fp16)));
        assert_eq!(work_of_named_gemm("gemm M=4,N=8,K=16").map(|work| work.flops), None);
        assert_eq!(work_of_named_gemm("gemm m4 n8"), None);
        assert_eq!(work_of_named_gemm("ampere_sgemm_128x64_tn"), None);
        assert_eq!(work_of_named_gemm("gemm_m4_n8_k16_m64"), None, "a tile has sizes too");
    }
}
