//! Extents of the perceptron, with its inputs and its work.

use crate::draw::draw_tensor;
use kernelgate::workload::{AxisError, Dtype, Point, Tensors, Tolerance};

/// Extents and dtype of the perceptron.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpShape {
    /// Number of rows of x.
    pub b: usize,
    /// Number of columns of x.
    pub i: usize,
    /// Number of elements of the hidden layer (h).
    pub h: usize,
    /// Number of classes.
    pub c: usize,
    /// Dtype of x and of the weights.
    pub dtype: Dtype,
}

impl MlpShape {
    /// Reads the extents of the perceptron from a point of the axes.
    pub fn bind(point: &Point) -> Result<Self, AxisError> {
        let [b, i, h, c] = ["b", "i", "h", "c"].map(|name| point.number(name));
        let dtype = Dtype::parse(point.word("dtype")?).expect("the axis lists dtypes");
        let shape = Self { b: b?, i: i?, h: h?, c: c?, dtype };
        let largest = i32::MAX as usize;
        let extents = [shape.b, shape.i, shape.h, shape.c];
        let pairs =
            extents.map(|x| extents.map(|y| x.checked_mul(y).is_some_and(|n| n <= largest)));
        if pairs.as_flattened().contains(&false) {
            return Err(AxisError::Combination("a matrix has more than 2^31 elements".to_owned()));
        }
        Ok(shape)
    }

    /// Names of `x`, `w1` and `w2`, with their rows and columns.
    pub const fn named_operands(&self) -> [(&'static str, [usize; 2]); 3] {
        [("x", [self.b, self.i]), ("w1", [self.i, self.h]), ("w2", [self.h, self.c])]
    }

    /// Draws x from N(0, 1), and weights that keep the variance of a row.
    pub fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for (name, shape) in self.named_operands() {
            let factor = if name == "x" { 1.0 } else { 1.0 / (shape[0] as f32).sqrt() };
            inputs.insert(name, draw_tensor(seed, name, shape, self.dtype, |x| x * factor));
        }
        inputs
    }

    /// Floating-point operations of the two GEMMs.
    pub const fn gemm_flops(&self) -> u64 {
        2 * (self.b * self.h) as u64 * (self.i + self.c) as u64
    }

    /// Bytes of x and of both weights.
    pub fn operand_bytes(&self) -> u64 {
        let elements = self.named_operands().map(|(_, [rows, columns])| (rows * columns) as u64);
        elements.iter().sum::<u64>() * self.dtype.bytes() as u64
    }

    /// The tolerance is about four times the error of rounding the values that a row holds in bf16
    /// between two launches (a test computes these errors); in f32 it is about ten times the error
    /// of the CPU row.
    pub fn tolerance(&self) -> Tolerance {
        match self.dtype {
            Dtype::Bf16 => Tolerance { max_error: 2e-2, relative_l2: 1.2e-2 },
            _ => Tolerance { max_error: 1e-5, relative_l2: 4e-6 },
        }
    }

    /// Bytes of the inputs, and of the reference's values in fp64.
    pub fn host_bytes(&self) -> u64 {
        let Self { b, i, h, c, .. } = *self;
        self.operand_bytes()
            + 8 * (3 * b * i + 3 * i * h + 3 * h * c + 5 * b * h + 5 * b * c) as u64
    }
}
