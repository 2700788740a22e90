//! Input tensors that are drawn from a normal distribution.

use half::{bf16, f16};
use kernelgate::workload::{Dtype, Tensor, TensorData, random};

/// Draws a tensor of values `f(N(0, 1))` from the seed and the tensor's name, in bf16 or f16 if
/// `dtype` says so, else in f32.
pub fn draw_tensor_of_mapped_normals(
    seed: u64,
    name: &str,
    shape: impl Into<Vec<usize>>,
    dtype: Dtype,
    f: impl Fn(f32) -> f32 + Sync,
) -> Tensor {
    let shape = shape.into();
    let len = shape.iter().product();
    let data = match dtype {
        Dtype::F16 => TensorData::F16(random::map_standard_normal_values(seed, name, len, |x| {
            f16::from_f32(f(x))
        })),
        Dtype::Bf16 => TensorData::Bf16(random::map_standard_normal_values(seed, name, len, |x| {
            bf16::from_f32(f(x))
        })),
        _ => TensorData::F32(random::map_standard_normal_values(seed, name, len, f)),
    };
    Tensor::new(shape, data)
}
