//! What attached rows compute: names, shapes and dtypes, and what outputs are compared with.

use std::path::PathBuf;
use std::sync::Arc;

use crate::workload::{Dtype, Expected, Tensors, Tolerance, Work};

/// A tensor by its name, shape and dtype.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Declared {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
}

impl Declared {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.bytes()
    }
}

/// What outputs are compared with.
#[derive(Clone, Default)]
pub enum Reference {
    /// Nothing: rows are timed and marked as unverified.
    #[default]
    None,
    /// Code, in fp64.
    Code(Code),
    /// Tensors of a safetensors file: outputs by their names, and where it has them, inputs by
    /// theirs.
    Golden(PathBuf),
    /// The outputs of that row, for the same inputs. The row itself is unverified.
    Row(&'static str),
}

/// Computes the outputs.
type Code = Arc<dyn Fn(&Tensors) -> Vec<Expected> + Send + Sync>;

/// Inputs, outputs and reference of one problem.
#[derive(Clone)]
pub struct Definition {
    pub(super) inputs: Vec<Declared>,
    pub(super) outputs: Vec<Declared>,
    pub(super) reference: Reference,
    pub(super) work: Option<Work>,
    pub(super) tolerance: Tolerance,
}

impl Default for Definition {
    fn default() -> Self {
        Self::new()
    }
}

impl Definition {
    /// Nothing yet; the tolerance is 1e-5 of the largest value and of the norm.
    pub fn new() -> Self {
        Self {
            inputs: Vec::new(),
            outputs: Vec::new(),
            reference: Reference::None,
            work: None,
            tolerance: Tolerance { max_error: 1e-5, relative_l2: 1e-5 },
        }
    }

    /// Adds an input, drawn from N(0, 1) by the seed; in i8, from -128 to 127 with a standard
    /// deviation of 32; in fp8 (e4m3), of either sign and magnitudes from 2⁻³ to 2.
    pub fn input(mut self, name: &'static str, shape: impl Into<Vec<usize>>, dtype: Dtype) -> Self {
        self.inputs.push(Declared { name, shape: shape.into(), dtype });
        self
    }

    /// Adds an output. One in fp8 is refused when a case is made ready: as i8 its bytes are compared
    /// exactly.
    pub fn output(
        mut self,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> Self {
        self.outputs.push(Declared { name, shape: shape.into(), dtype });
        self
    }

    /// Compares with what this computes in fp64.
    pub fn code(
        self,
        reference: impl Fn(&Tensors) -> Vec<Expected> + Send + Sync + 'static,
    ) -> Self {
        Self { reference: Reference::Code(Arc::new(reference)), ..self }
    }

    /// Compares with the tensors of a safetensors file.
    pub fn golden(self, file: impl Into<PathBuf>) -> Self {
        Self { reference: Reference::Golden(file.into()), ..self }
    }

    /// Compares with the outputs of another row.
    pub fn like_row(self, row: &'static str) -> Self {
        Self { reference: Reference::Row(row), ..self }
    }

    /// How far an output may be from the reference.
    pub fn tolerance(self, max_error: f64, relative_l2: f64) -> Self {
        Self { tolerance: Tolerance { max_error, relative_l2 }, ..self }
    }

    /// Operations and fewest bytes of a launch; where this is not said, each input read once and
    /// each output written once.
    pub fn work(self, work: Work) -> Self {
        Self { work: Some(work), ..self }
    }
}
