//! What attached rows compute: names, shapes and dtypes, and what outputs are compared with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::workload::{Dtype, Expected, Tensors, Tolerance, Work};

/// Errors that outputs may have whose definition declares no tolerance, at least.
const LEAST_TOLERANCE: f64 = 1e-5;
/// The same in unit roundoffs of the outputs' dtype.
const ROUNDOFFS: f64 = 4.0;

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
    /// theirs. That is one data set: without all inputs in the file, its outputs must be of those
    /// that the default seed draws, and whether the head lost accuracy stays inconclusive where
    /// their errors grew, because further seeds tell nothing.
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
    /// None where none was declared.
    tolerance: Option<Tolerance>,
    /// That of outputs which have their own.
    pub(super) tolerances: BTreeMap<&'static str, Tolerance>,
}

impl Default for Definition {
    fn default() -> Self {
        Self::new()
    }
}

impl Definition {
    /// Nothing yet; the tolerance is that of [`Self::tolerance`] where none is declared.
    pub fn new() -> Self {
        Self {
            inputs: Vec::new(),
            outputs: Vec::new(),
            reference: Reference::None,
            work: None,
            tolerance: None,
            tolerances: BTreeMap::new(),
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

    /// How far each output may be from the reference, or in `kernelgate compare` from the base's
    /// outputs where there is none: the largest difference relative to the largest value, and the
    /// L2 norm of all relative to theirs. Undeclared, both are the larger of 1e-5 and four unit
    /// roundoffs of the output's dtype: 1e-5 in f32 and f64, 2.0e-3 in f16, 1.6e-2 in bf16. That is
    /// two units in the last place, which another order of sums may cost; declare it where an
    /// output is of more precise dtype than what it is computed with. Bytes (i8, fp8) are compared
    /// exactly.
    pub fn tolerance(self, max_error: f64, relative_l2: f64) -> Self {
        Self { tolerance: Some(Tolerance { max_error, relative_l2 }), ..self }
    }

    /// The same of one output, whatever holds for the others. A name that no output has is an error
    /// of the case.
    pub fn tolerance_of(mut self, output: &'static str, max_error: f64, relative_l2: f64) -> Self {
        self.tolerances.insert(output, Tolerance { max_error, relative_l2 });
        self
    }

    /// What was declared of an output, or what holds where nothing was.
    pub(super) fn allowed(&self, output: &Declared) -> Tolerance {
        let roundoff = match output.dtype {
            // No tensor has fp8: its bytes are compared as integers.
            Dtype::Fp8 => 0.0,
            dtype => dtype.unit_roundoff(),
        };
        let error = (ROUNDOFFS * roundoff).max(LEAST_TOLERANCE);
        let undeclared = Tolerance { max_error: error, relative_l2: error };
        let own = self.tolerances.get(output.name).copied();
        own.or(self.tolerance).unwrap_or(undeclared)
    }

    /// Operations and fewest bytes of a launch; where this is not said, each input read once and
    /// each output written once.
    pub fn work(self, work: Work) -> Self {
        Self { work: Some(work), ..self }
    }
}
