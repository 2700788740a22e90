//! Computes FLOPs and bytes of PyTorch operators from the recorded shapes of their inputs, and of
//! GEMM kernels from the sizes in their names. The bytes are the least that device memory must
//! move: each input and each output once. Caches and fusion with other kernels are not considered.

use serde_json::Value;

use crate::analyze::work::device_peaks::MatrixPrecision;
use crate::model::gpu::DeclaredOperationsAndBytes;
use crate::model::host::RecordedOperatorInputs;
use crate::model::interned_names::InternedTraceNames;

/// Floating-point operations and least bytes of one call of a framework operator or of one kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperatorFlopsAndBytes {
    /// Floating-point operations of the operator's matrix products; 0 for operators that only move
    /// data.
    pub matrix_flops: f64,
    /// The fewest bytes that device memory must move for one call of the operator.
    pub least_bytes: f64,
    /// Precision of the factors that the operator multiplies; `None` if it multiplies nothing.
    pub precision: Option<MatrixPrecision>,
}

/// Shape and element type of a tensor that an operator takes as input.
#[derive(Debug, Clone, PartialEq)]
struct OperatorInputTensor {
    axis_extents: Vec<f64>,
    bytes_per_element: f64,
    precision: Option<MatrixPrecision>,
}

impl OperatorInputTensor {
    fn element_count(&self) -> f64 {
        self.axis_extents.iter().product()
    }

    fn bytes_of_tensor(&self) -> f64 {
        self.element_count() * self.bytes_per_element
    }

    /// Extent of the tensor's axis with this index, counted from the last axis.
    fn extent_of_axis_from_last(&self, index: usize) -> Option<f64> {
        let at = self.axis_extents.len().checked_sub(index + 1)?;
        self.axis_extents.get(at).copied()
    }
}

/// Inputs of one operator call as the trace records them: tensors and values.
struct ParsedOperatorInputs {
    /// Tensors of the operator call by argument; `None` for an argument that is not a tensor.
    tensors: Vec<Option<OperatorInputTensor>>,
    /// Text of each argument that is not a tensor, as the trace has it.
    non_tensor_argument_texts: Vec<String>,
}

impl ParsedOperatorInputs {
    fn parse_recorded_inputs(
        inputs: &RecordedOperatorInputs,
        names: &InternedTraceNames,
    ) -> Option<ParsedOperatorInputs> {
        let list = |text| match serde_json::from_str(names.text_of_name(text)) {
            Ok(Value::Array(list)) => list,
            _ => Vec::new(),
        };
        let (dims, types) = (list(inputs.dims_json), list(inputs.types_json));
        let tensor = |(index, dims): (usize, &Value)| {
            let axis = |axis: &Value| axis.as_f64().filter(|axis| *axis >= 0.0);
            let axes: Option<Vec<f64>> = dims.as_array()?.iter().map(axis).collect();
            let (size, precision) = bytes_and_precision_of_torch_type(types.get(index)?.as_str()?)?;
            Some(OperatorInputTensor { axis_extents: axes?, bytes_per_element: size, precision })
        };
        let text = |value: Value| match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        Some(Self {
            tensors: dims.iter().enumerate().map(tensor).collect(),
            non_tensor_argument_texts: list(inputs.values_json).into_iter().map(text).collect(),
        })
    }

    /// Returns the tensor of an argument, if the argument is a tensor with at least one axis.
    fn tensor_of_argument(&self, argument: usize) -> Option<&OperatorInputTensor> {
        self.tensors.get(argument)?.as_ref().filter(|tensor| !tensor.axis_extents.is_empty())
    }

    fn is_argument_true(&self, argument: usize) -> bool {
        self.non_tensor_argument_texts
            .get(argument)
            .is_some_and(|value| value == "True" || value == "true")
    }

    /// Parses the argument as `count` numbers, from a list such as `[1, 1]` or `(1, 1)`; a single
    /// number is repeated.
    fn numbers_of_argument(&self, argument: usize, count: usize) -> Option<Vec<f64>> {
        let text = self.non_tensor_argument_texts.get(argument)?;
        let digits = text.split(|c: char| !(c.is_ascii_digit() || c == '-'));
        let numbers: Vec<f64> = digits.filter_map(|number| number.parse().ok()).collect();
        match numbers.len() {
            1 => Some(vec![numbers[0]; count]),
            of if of == count => Some(numbers),
            _ => None,
        }
    }

    fn bytes_of_all_tensors(&self) -> f64 {
        self.tensors.iter().flatten().map(OperatorInputTensor::bytes_of_tensor).sum()
    }
}

/// Returns bytes and matrix precision of an element type, by its name in PyTorch.
fn bytes_and_precision_of_torch_type(name: &str) -> Option<(f64, Option<MatrixPrecision>)> {
    let name = name.rsplit("::").next().unwrap_or(name);
    Some(match name {
        "double" => (8.0, Some(MatrixPrecision::Fp64)),
        "float" => (4.0, Some(MatrixPrecision::Fp32)),
        "BFloat16" | "Half" => (2.0, Some(MatrixPrecision::Fp16OrBf16)),
        "signed char" | "unsigned char" | "char" => (1.0, Some(MatrixPrecision::Int8)),
        "bool" => (1.0, None),
        "int" => (4.0, None),
        "long int" | "long" => (8.0, None),
        "short" => (2.0, None),
        name if name.starts_with("Float8") => (1.0, Some(MatrixPrecision::Fp8)),
        _ => return None,
    })
}

/// Returns FLOPs and least bytes of an operator call; `None` if no formula for the operator is
/// known or its shapes were not recorded.
pub fn work_of_operator_call(
    name: &str,
    inputs: &RecordedOperatorInputs,
    names: &InternedTraceNames,
) -> Option<OperatorFlopsAndBytes> {
    let function = name.strip_prefix("aten::").or_else(|| name.strip_prefix("_C::"))?;
    let inputs = ParsedOperatorInputs::parse_recorded_inputs(inputs, names)?;
    let work = match function {
        "mm" | "_int_mm" | "_scaled_mm" | "bmm" => work_of_matmul_operator(&inputs, 0),
        "addmm" | "addmm_" | "baddbmm" | "_addmm_activation" => work_of_matmul_operator(&inputs, 1),
        "matmul" => work_of_matmul_operator(&inputs, 0),
        "linear" => work_of_linear_operator(&inputs),
        "convolution" | "_convolution" | "convolution_overrideable" => {
            work_of_convolution(&inputs, 3, 4)
        }
        "cudnn_convolution" | "miopen_convolution" => work_of_convolution(&inputs, 3, 2),
        "conv2d" | "conv1d" | "conv3d" => work_of_convolution(&inputs, 3, 4),
        "convolution_backward" => work_of_convolution_backward(&inputs),
        "_scaled_dot_product_flash_attention" => {
            work_of_attention_forward(&inputs, QueryAxisOrder::HeadsBeforeTokens, 4)
        }
        "_scaled_dot_product_efficient_attention" | "_scaled_dot_product_cudnn_attention" => {
            work_of_attention_forward(&inputs, QueryAxisOrder::HeadsBeforeTokens, 6)
        }
        "_flash_attention_forward" => {
            work_of_attention_forward(&inputs, QueryAxisOrder::TokensBeforeHeads, 8)
        }
        "_scaled_dot_product_flash_attention_backward" => work_of_attention_backward(&inputs, 11),
        "_scaled_dot_product_efficient_attention_backward" => {
            work_of_attention_backward(&inputs, 11)
        }
        "_scaled_dot_product_cudnn_attention_backward" => work_of_attention_backward(&inputs, 14),
        _ => work_of_operator_that_moves_bytes(function, &inputs),
    };
    // Empty tensors and overflowing sizes give work that is NaN or infinite, which is dropped.
    work.filter(|work| (work.matrix_flops + work.least_bytes).is_finite())
}

/// Returns k, the number of products that each output of a matrix multiplication sums.
/// `aten::matmul` calls one of these operators, so it is not counted itself.
pub fn inner_size_of_matmul_operator(
    name: &str,
    inputs: &RecordedOperatorInputs,
    names: &InternedTraceNames,
) -> Option<f64> {
    let first = match name.strip_prefix("aten::")? {
        "mm" | "bmm" => 0,
        "addmm" | "baddbmm" => 1,
        _ => return None,
    };
    ParsedOperatorInputs::parse_recorded_inputs(inputs, names)?
        .tensor_of_argument(first)?
        .extent_of_axis_from_last(0)
}

/// Work of the product `[…, m, k]` times `[…, k, n]`, whose factors are the argument `first` and
/// the next one.
fn work_of_matmul_operator(
    inputs: &ParsedOperatorInputs,
    first: usize,
) -> Option<OperatorFlopsAndBytes> {
    let (a, b) = (inputs.tensor_of_argument(first)?, inputs.tensor_of_argument(first + 1)?);
    let (k, n) = match b.axis_extents.len() {
        1 => (b.axis_extents[0], 1.0),
        _ => (b.extent_of_axis_from_last(1)?, b.extent_of_axis_from_last(0)?),
    };
    if a.extent_of_axis_from_last(0)? != k {
        return None;
    }
    // If only the second factor of the matrix product has batch axes, its batches multiply the
    // number of outputs.
    let rows = a.element_count() / k;
    let batches = b.element_count() / (k * n);
    let rows = if a.axis_extents.len() < b.axis_extents.len() { rows * batches } else { rows };
    let output = rows * n;
    Some(OperatorFlopsAndBytes {
        matrix_flops: 2.0 * output * k,
        least_bytes: inputs.bytes_of_all_tensors() + output * a.bytes_per_element.max(2.0),
        precision: a.precision,
    })
}

/// Work of the product of `[…, k]` and the transpose of `[n, k]`.
fn work_of_linear_operator(inputs: &ParsedOperatorInputs) -> Option<OperatorFlopsAndBytes> {
    let (input, weight) = (inputs.tensor_of_argument(0)?, inputs.tensor_of_argument(1)?);
    let (n, k) = (weight.extent_of_axis_from_last(1)?, weight.extent_of_axis_from_last(0)?);
    if input.extent_of_axis_from_last(0)? != k {
        return None;
    }
    let output = input.element_count() / k * n;
    Some(OperatorFlopsAndBytes {
        matrix_flops: 2.0 * output * k,
        least_bytes: inputs.bytes_of_all_tensors() + output * input.bytes_per_element,
        precision: input.precision,
    })
}

/// Work of a forward convolution; `stride` and `padding` are the positions of these arguments.
fn work_of_convolution(
    inputs: &ParsedOperatorInputs,
    stride: usize,
    padding: usize,
) -> Option<OperatorFlopsAndBytes> {
    let (input, weight) = (inputs.tensor_of_argument(0)?, inputs.tensor_of_argument(1)?);
    let axes = weight.axis_extents.len().checked_sub(2).filter(|axes| *axes > 0)?;
    if input.axis_extents.len() != axes + 2 {
        return None;
    }
    let strides = inputs.numbers_of_argument(stride, axes)?;
    let paddings = inputs.numbers_of_argument(padding, axes)?;
    let dilations = inputs.numbers_of_argument(stride.max(padding) + 1, axes)?;
    let mut output = input.axis_extents[0] * weight.axis_extents[0];
    for axis in 0..axes {
        let kernel = dilations[axis] * (weight.axis_extents[axis + 2] - 1.0) + 1.0;
        let steps = (input.axis_extents[axis + 2] + 2.0 * paddings[axis] - kernel) / strides[axis];
        output *= (steps.floor() + 1.0).max(0.0);
    }
    let per_output = weight.element_count() / weight.axis_extents[0];
    Some(OperatorFlopsAndBytes {
        matrix_flops: 2.0 * output * per_output,
        least_bytes: inputs.bytes_of_all_tensors() + output * input.bytes_per_element,
        precision: input.precision,
    })
}

/// Work of a convolution's backward pass: gradients of input and weight, each with as many
/// operations as the forward convolution.
fn work_of_convolution_backward(inputs: &ParsedOperatorInputs) -> Option<OperatorFlopsAndBytes> {
    let (gradient, input, weight) = (
        inputs.tensor_of_argument(0)?,
        inputs.tensor_of_argument(1)?,
        inputs.tensor_of_argument(2)?,
    );
    let per_output = weight.element_count() / weight.axis_extents[0];
    let mask = inputs
        .non_tensor_argument_texts
        .get(10)
        .filter(|mask| mask.contains("True") || mask.contains("true"));
    let parts = mask.map_or(2, |mask| {
        mask.split(',').take(2).filter(|part| part.to_ascii_lowercase().contains("true")).count()
    });
    #[allow(clippy::cast_precision_loss)]
    let flops = 2.0 * gradient.element_count() * per_output * parts as f64;
    Some(OperatorFlopsAndBytes {
        matrix_flops: flops,
        least_bytes: inputs.bytes_of_all_tensors()
            + input.bytes_of_tensor()
            + weight.bytes_of_tensor(),
        precision: gradient.precision,
    })
}

/// Order of the axes of the query tensor of an attention operator.
#[derive(Clone, Copy)]
enum QueryAxisOrder {
    /// The axes are batch, heads, tokens and values.
    HeadsBeforeTokens,
    /// The axes are batch, tokens, heads and values.
    TokensBeforeHeads,
}

/// Work of attention: the product of queries and keys, and of softmax weights and values; half of
/// it if the argument `causal` is true.
fn work_of_attention_forward(
    inputs: &ParsedOperatorInputs,
    layout: QueryAxisOrder,
    causal: usize,
) -> Option<OperatorFlopsAndBytes> {
    let [q, k, v] = [0, 1, 2].map(|argument| inputs.tensor_of_argument(argument));
    let (q, k, v) = (q?, k?, v?);
    if q.axis_extents.len() != 4 || k.axis_extents.len() != 4 || v.axis_extents.len() != 4 {
        return None;
    }
    let (heads, tokens) = match layout {
        QueryAxisOrder::HeadsBeforeTokens => (1, 2),
        QueryAxisOrder::TokensBeforeHeads => (2, 1),
    };
    let scores =
        q.axis_extents[0] * q.axis_extents[heads] * q.axis_extents[tokens] * k.axis_extents[tokens];
    let masked = if inputs.is_argument_true(causal) { 0.5 } else { 1.0 };
    Some(OperatorFlopsAndBytes {
        matrix_flops: 2.0 * scores * (q.axis_extents[3] + v.axis_extents[3]) * masked,
        least_bytes: q.bytes_of_tensor()
            + k.bytes_of_tensor()
            + v.bytes_of_tensor()
            + q.element_count() / q.axis_extents[3] * v.axis_extents[3] * q.bytes_per_element,
        precision: q.precision,
    })
}

/// Work of attention's backward pass: five matrix products instead of the forward pass's two
/// (scores again, gradients of queries, keys, values and scores).
fn work_of_attention_backward(
    inputs: &ParsedOperatorInputs,
    causal: usize,
) -> Option<OperatorFlopsAndBytes> {
    let shifted = ParsedOperatorInputs {
        tensors: inputs.tensors.get(1..)?.to_vec(),
        non_tensor_argument_texts: Vec::new(),
    };
    let forward =
        work_of_attention_forward(&shifted, QueryAxisOrder::HeadsBeforeTokens, usize::MAX)?;
    let masked = if inputs.is_argument_true(causal) { 0.5 } else { 1.0 };
    Some(OperatorFlopsAndBytes {
        matrix_flops: 2.5 * forward.matrix_flops * masked,
        least_bytes: 2.0 * forward.least_bytes,
        ..forward
    })
}

/// Elementwise, normalisation and softmax operators, which move their inputs and one output as
/// large as their largest input.
const MEMORY_BOUND_TORCH_OPERATORS: &[&str] = &[
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

fn work_of_operator_that_moves_bytes(
    function: &str,
    inputs: &ParsedOperatorInputs,
) -> Option<OperatorFlopsAndBytes> {
    let largest = inputs
        .tensors
        .iter()
        .flatten()
        .map(OperatorInputTensor::bytes_of_tensor)
        .fold(0.0, f64::max);
    let bytes = match function {
        // These operators write their first argument and do not read it, so the bytes of the
        // arguments are all bytes moved.
        "copy_" | "fill_" | "zero_" => inputs.bytes_of_all_tensors(),
        "sum" | "mean" | "max" | "min" | "amax" => inputs.bytes_of_all_tensors(),
        function if MEMORY_BOUND_TORCH_OPERATORS.contains(&function) => {
            inputs.bytes_of_all_tensors() + largest
        }
        _ => return None,
    };
    (bytes > 0.0).then_some(OperatorFlopsAndBytes {
        matrix_flops: 0.0,
        least_bytes: bytes,
        precision: None,
    })
}

/// Returns the matrix precision that a word of a kernel name means, and the bytes of an element.
fn precision_and_bytes_by_name_word(word: &str) -> Option<(MatrixPrecision, f64)> {
    match word {
        "fp64" | "f64" | "dgemm" => Some((MatrixPrecision::Fp64, 8.0)),
        "fp32" | "f32" | "sgemm" => Some((MatrixPrecision::Fp32, 4.0)),
        "tf32" => Some((MatrixPrecision::Tf32, 4.0)),
        "fp16" | "f16" | "bf16" | "half" | "hgemm" => Some((MatrixPrecision::Fp16OrBf16, 2.0)),
        "fp8" | "e4m3" | "e5m2" => Some((MatrixPrecision::Fp8, 1.0)),
        "int8" | "i8" | "s8" => Some((MatrixPrecision::Int8, 1.0)),
        _ => None,
    }
}

/// Returns the work that a recorded program declared, as FLOPs of its matrix products and least
/// bytes. The precision is that of at least 95 % of the declared FLOPs; `None` if there is no such
/// precision.
pub fn work_of_declared_operations(
    count: &DeclaredOperationsAndBytes,
) -> Option<OperatorFlopsAndBytes> {
    /// Smallest share of the declared FLOPs in one precision for which all of the work is taken to
    /// have this precision.
    const MIN_FLOPS_SHARE_OF_ONE_PRECISION: f64 = 0.95;
    let products = || {
        let product = |(unit, flops): &(String, f64)| {
            Some((precision_and_bytes_by_name_word(unit.strip_prefix("matmul ")?)?.0, *flops))
        };
        count.flops_by_unit_and_dtype.iter().filter_map(product)
    };
    let flops: f64 = products().map(|(_, flops)| flops).sum();
    let main = products().find(|(_, own)| *own >= MIN_FLOPS_SHARE_OF_ONE_PRECISION * flops);
    let precision = main.filter(|_| flops > 0.0).map(|(precision, _)| precision);
    let work = OperatorFlopsAndBytes {
        matrix_flops: flops,
        least_bytes: count.min_device_memory_bytes,
        precision,
    };
    (flops + count.min_device_memory_bytes > 0.0
        && (flops + count.min_device_memory_bytes).is_finite())
    .then_some(work)
}

/// Work of a GEMM kernel whose name contains its sizes, such as `gemm_m4096_n512_k1024_bf16`.
pub fn work_of_gemm_with_sizes_in_name(name: &str) -> Option<OperatorFlopsAndBytes> {
    // Most kernel names contain no `k` before a digit; this quick test skips them.
    let sized = |pair: &[u8]| pair[0].eq_ignore_ascii_case(&b'k') && pair[1].is_ascii_digit();
    if !name.as_bytes().windows(2).any(sized) {
        return None;
    }
    let words: Vec<String> =
        name.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase).collect();
    let size = |axis: char| {
        let after = |word: &String| word.strip_prefix(axis)?.parse::<f64>().ok();
        let found: Vec<f64> = words.iter().filter_map(after).collect();
        // If a name has two sizes of one axis, one is the tile's and one the problem's, so neither
        // is used.
        (found.len() == 1).then(|| found[0])
    };
    let (m, n, k) = (size('m')?, size('n')?, size('k')?);
    let (precision, bytes) =
        words.iter().find_map(|word| precision_and_bytes_by_name_word(word)).unzip();
    let bytes = bytes.unwrap_or(0.0) * (m * k + k * n + m * n);
    Some(OperatorFlopsAndBytes { matrix_flops: 2.0 * m * n * k, least_bytes: bytes, precision })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work_of_recorded_call(
        name: &str,
        dims: &str,
        types: &str,
        values: &str,
    ) -> Option<OperatorFlopsAndBytes> {
        let mut names = InternedTraceNames::default();
        let [dims, types, values] = [dims, types, values].map(|text| names.intern_text(text));
        work_of_operator_call(
            name,
            &RecordedOperatorInputs { dims_json: dims, types_json: types, values_json: values },
            &names,
        )
    }

    fn flops_of_recorded_f32_call(name: &str, dims: &str, values: &str) -> Option<f64> {
        let half = r#"["c10::Half", "c10::Half", "c10::Half", "c10::Half"]"#;
        work_of_recorded_call(name, dims, half, values).map(|work| work.matrix_flops)
    }

    #[test]
    fn a_matrix_product_counts_two_operations_per_multiplication() {
        assert_eq!(flops_of_recorded_f32_call("aten::mm", "[[4, 8], [8, 16]]", "[]"), Some(1024.0));
        assert_eq!(
            flops_of_recorded_f32_call("aten::addmm", "[[16], [4, 8], [8, 16]]", "[]"),
            Some(1024.0)
        );
        assert_eq!(
            flops_of_recorded_f32_call("aten::bmm", "[[3, 4, 8], [3, 8, 16]]", "[]"),
            Some(3072.0)
        );
        assert_eq!(
            flops_of_recorded_f32_call("aten::linear", "[[2, 4, 8], [16, 8], [16]]", "[]"),
            Some(2048.0)
        );
        assert_eq!(
            flops_of_recorded_f32_call("aten::mm", "[[4, 8], [9, 16]]", "[]"),
            None,
            "shapes that do not fit"
        );
        assert_eq!(
            flops_of_recorded_f32_call("aten::mm", "[[4, -8], [-8, 16]]", "[]"),
            None,
            "no axis is negative"
        );
        assert_eq!(flops_of_recorded_f32_call("aten::mm", "[[0, 0], [0, 0]]", "[]"), None);
        assert_eq!(flops_of_recorded_f32_call("aten::mm", "[]", "[]"), None);
        assert_eq!(flops_of_recorded_f32_call("my::mm", "[[4, 8], [8, 16]]", "[]"), None);
    }

    #[test]
    fn a_convolution_counts_operations_for_each_output() {
        let dims = "[[1, 3, 8, 8], [4, 3, 3, 3], []]";
        let values = r#"["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]"#;
        // The output has 4 channels of 4 x 4 values, each a sum of 3 x 3 x 3 products.
        assert_eq!(
            flops_of_recorded_f32_call("aten::convolution", dims, values),
            Some(2.0 * 64.0 * 27.0)
        );
        assert_eq!(
            flops_of_recorded_f32_call("aten::convolution", dims, "[]"),
            None,
            "strides are not known"
        );
        let dims = "[[1, 4, 4, 4], [1, 3, 8, 8], [4, 3, 3, 3]]";
        assert_eq!(
            flops_of_recorded_f32_call("aten::convolution_backward", dims, "[]"),
            Some(4.0 * 64.0 * 27.0)
        );
    }

    #[test]
    fn causal_attention_counts_half_the_operations() {
        let dims = "[[2, 3, 16, 8], [2, 3, 16, 8], [2, 3, 16, 8], [], []]";
        let name = "aten::_scaled_dot_product_flash_attention";
        let whole = 4.0 * 2.0 * 3.0 * 16.0 * 16.0 * 8.0;
        assert_eq!(
            flops_of_recorded_f32_call(name, dims, r#"["", "", "", "0.", "False"]"#),
            Some(whole)
        );
        assert_eq!(
            flops_of_recorded_f32_call(name, dims, r#"["", "", "", "0.", "True"]"#),
            Some(whole / 2.0)
        );
        let dims = "[[2, 3, 16, 8], [2, 3, 16, 8], [2, 3, 16, 8], [2, 3, 16, 8]]";
        let backward = "aten::_scaled_dot_product_flash_attention_backward";
        assert_eq!(flops_of_recorded_f32_call(backward, dims, "[]"), Some(2.5 * whole));
    }

    #[test]
    fn elementwise_operators_move_their_inputs_and_one_output() {
        let types = r#"["float", "float", "Scalar"]"#;
        let add = work_of_recorded_call("aten::add", "[[4, 8], [8], []]", types, "[]");
        assert_eq!(
            add,
            Some(OperatorFlopsAndBytes {
                matrix_flops: 0.0,
                least_bytes: 4.0 * (32.0 + 8.0 + 32.0),
                precision: None
            })
        );
        let copy = work_of_recorded_call(
            "aten::copy_",
            "[[4], [4], []]",
            r#"["c10::Half", "float", ""]"#,
            "[]",
        );
        assert_eq!(copy.map(|work| work.least_bytes), Some(24.0));
        assert_eq!(work_of_recorded_call("aten::empty", "[[4]]", types, "[]"), None);
    }

    #[test]
    fn the_sizes_of_a_gemm_are_read_from_its_kernel_name() {
        let work =
            work_of_gemm_with_sizes_in_name("gemm_m4_n8_k16_bf16").expect("it has all sizes");
        assert_eq!(
            (work.matrix_flops, work.precision),
            (1024.0, Some(MatrixPrecision::Fp16OrBf16))
        );
        assert_eq!(
            work_of_gemm_with_sizes_in_name("gemm M=4,N=8,K=16").map(|work| work.matrix_flops),
            None
        );
        assert_eq!(work_of_gemm_with_sizes_in_name("gemm m4 n8"), None);
        assert_eq!(work_of_gemm_with_sizes_in_name("ampere_sgemm_128x64_tn"), None);
        assert_eq!(
            work_of_gemm_with_sizes_in_name("gemm_m4_n8_k16_m64"),
            None,
            "a tile has sizes too"
        );
    }
}
