//! Sizes of the perceptron, and the inputs, work and tolerance that follow from them.

use crate::draw::draw_tensor_of_mapped_normals;
use kernelgate::workload::{AxisError, Dtype, Point, Tensors, Tolerance};

/// Sizes and dtype of the two-layer perceptron.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerceptronSizes {
    /// Number of rows of x (batch size).
    pub batch_rows: usize,
    /// Number of columns of x (input elements).
    pub input_elements: usize,
    /// Number of elements of the perceptron's hidden layer.
    pub hidden_elements: usize,
    /// Number of classes.
    pub classes: usize,
    /// Dtype of x and of both weight matrices.
    pub dtype: Dtype,
}

impl PerceptronSizes {
    /// Reads the perceptron's sizes and dtype from the axes of a point.
    pub fn bind_mlp_axes(point: &Point) -> Result<Self, AxisError> {
        let [b, i, h, c] = ["b", "i", "h", "c"].map(|name| point.number(name));
        let dtype = Dtype::parse_dtype_name(point.word("dtype")?).expect("the axis lists dtypes");
        let shape =
            Self { batch_rows: b?, input_elements: i?, hidden_elements: h?, classes: c?, dtype };
        let largest = i32::MAX as usize;
        let extents =
            [shape.batch_rows, shape.input_elements, shape.hidden_elements, shape.classes];
        let pairs =
            extents.map(|x| extents.map(|y| x.checked_mul(y).is_some_and(|n| n <= largest)));
        if pairs.as_flattened().contains(&false) {
            return Err(AxisError::InvalidCombinationOfValues(
                "a matrix has more than 2^31 elements".to_owned(),
            ));
        }
        Ok(shape)
    }

    /// Names of `x`, `w1` and `w2`, each with its number of rows and columns.
    pub const fn names_and_extents_of_operands(&self) -> [(&'static str, [usize; 2]); 3] {
        [
            ("x", [self.batch_rows, self.input_elements]),
            ("w1", [self.input_elements, self.hidden_elements]),
            ("w2", [self.hidden_elements, self.classes]),
        ]
    }

    /// Draws x from N(0, 1), and weights that keep the variance of the activations.
    pub fn draw_x_and_weights(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for (name, shape) in self.names_and_extents_of_operands() {
            let factor = if name == "x" { 1.0 } else { 1.0 / (shape[0] as f32).sqrt() };
            inputs.insert(
                name,
                draw_tensor_of_mapped_normals(seed, name, shape, self.dtype, |x| x * factor),
            );
        }
        inputs
    }

    /// FLOPs of the two GEMMs of the perceptron's forward pass.
    pub const fn flops_of_both_forward_gemms(&self) -> u64 {
        2 * (self.batch_rows * self.hidden_elements) as u64
            * (self.input_elements + self.classes) as u64
    }

    /// Size in bytes of the perceptron's input x and of both weight matrices.
    pub fn bytes_of_x_and_weights(&self) -> u64 {
        let elements = self
            .names_and_extents_of_operands()
            .map(|(_, [rows, columns])| (rows * columns) as u64);
        elements.iter().sum::<u64>() * self.dtype.bytes_per_element() as u64
    }

    /// The bf16 tolerance is about four times the rounding error of values stored between launches,
    /// computed in a test; the f32 tolerance is ten times the CPU error.
    pub fn mlp_tolerance(&self) -> Tolerance {
        match self.dtype {
            Dtype::Bf16 => Tolerance { max_error: 2e-2, relative_l2: 1.2e-2 },
            _ => Tolerance { max_error: 1e-5, relative_l2: 4e-6 },
        }
    }

    /// Bytes of host memory: the perceptron's inputs and the fp64 values of the reference.
    pub fn estimate_mlp_host_bytes(&self) -> u64 {
        let Self { batch_rows: b, input_elements: i, hidden_elements: h, classes: c, .. } = *self;
        self.bytes_of_x_and_weights()
            + 8 * (3 * b * i + 3 * i * h + 3 * h * c + 5 * b * h + 5 * b * c) as u64
    }
}
