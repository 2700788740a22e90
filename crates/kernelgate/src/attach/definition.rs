//! Definition of a computation: tensors by name, shape and dtype, the reference, work and
//! tolerances.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::workload::{Dtype, Expected, Tensors, Tolerance, Work};

/// Smallest tolerance of an output whose definition declares none.
const MIN_DEFAULT_TOLERANCE: f64 = 1e-5;
/// Default tolerance in unit roundoffs of the output's dtype.
const DEFAULT_TOLERANCE_ROUNDOFFS: f64 = 4.0;

/// Declaration of a tensor without values: its name, shape and dtype.
///
/// Inputs are drawn from N(0, 1) by the seed; in i8, from -128 to 127 with a standard deviation of
/// 32; in fp8 (e4m3), of either sign and magnitudes from 2⁻³ to 2. An output in fp8 is refused when
/// a case is made ready: as i8 its bytes are compared exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    pub(super) name: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: Dtype,
}

impl TensorSpec {
    /// A row-major tensor with a name, a shape and a dtype.
    pub fn new(name: &'static str, shape: impl Into<Vec<usize>>, dtype: Dtype) -> Self {
        Self { name, shape: shape.into(), dtype }
    }

    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the elements of the tensor.
    pub fn bytes(&self) -> u64 {
        (self.len() * self.dtype.bytes()) as u64
    }
}

/// Source of the expected outputs of a workload.
#[derive(Clone)]
pub enum OutputReference {
    /// No expected outputs: implementations are timed and marked as unverified.
    None,
    /// Code, in fp64.
    Code(ReferenceFunction),
    /// Expected outputs from a safetensors file, by their names, and inputs if the file has them.
    /// The file holds inputs and outputs of one data set. If it lacks an input, its outputs must
    /// belong to the inputs that the default seed draws. If errors grew, a verdict on accuracy
    /// stays inconclusive, because further seeds add nothing.
    Golden(PathBuf),
    /// Expected outputs computed by another implementation, for the same inputs. The implementation
    /// that serves as the reference is unverified itself.
    Row(&'static str),
}

/// Computes the outputs.
type ReferenceFunction = Arc<dyn Fn(&Tensors) -> Vec<Expected> + Send + Sync>;

impl OutputReference {
    /// Code that computes the outputs in fp64.
    pub fn from_function(
        compute: impl Fn(&Tensors) -> Vec<Expected> + Send + Sync + 'static,
    ) -> OutputReference {
        Self::Code(Arc::new(compute))
    }
}

/// Maximum distance of outputs from the reference, or from the base's outputs in `kernelgate
/// compare` if there is no reference: the largest difference relative to the largest value, and the
/// L2 norm of all differences relative to that of all values. Integer and fp8 outputs are compared
/// exactly.
#[derive(Debug, Clone, Default)]
pub struct Tolerances {
    all: Option<Tolerance>,
    own: BTreeMap<&'static str, Tolerance>,
}

impl Tolerances {
    /// By default the maximum error and the relative L2 error are at most the larger of 1e-5 and
    /// four unit roundoffs of the output's dtype: 1e-5 in f32 and f64, 2.0e-3 in f16, 1.6e-2 in
    /// bf16. Four roundoffs are two units in the last place, the cost of another summation order.
    /// Declare a tolerance if an output has a more precise dtype than its computation.
    pub fn by_dtype() -> Tolerances {
        Self::default()
    }

    /// Sets the two tolerances of every output.
    pub const fn all(max_error: f64, relative_l2: f64) -> Tolerances {
        Self { all: Some(Tolerance { max_error, relative_l2 }), own: BTreeMap::new() }
    }

    /// Sets another error tolerance for one output.
    pub fn with(mut self, output: &'static str, max_error: f64, relative_l2: f64) -> Self {
        self.own.insert(output, Tolerance { max_error, relative_l2 });
        self
    }

    pub(super) fn outputs_with_own_tolerance(&self) -> impl Iterator<Item = &'static str> {
        self.own.keys().copied()
    }

    pub(super) fn tolerance_of_output(&self, output: &TensorSpec) -> Tolerance {
        let roundoff = match output.dtype {
            // No tensor has fp8: its bytes are compared as integers.
            Dtype::Fp8 => 0.0,
            dtype => dtype.unit_roundoff(),
        };
        let error = (DEFAULT_TOLERANCE_ROUNDOFFS * roundoff).max(MIN_DEFAULT_TOLERANCE);
        let by_dtype = Tolerance { max_error: error, relative_l2: error };
        self.own.get(output.name).copied().or(self.all).unwrap_or(by_dtype)
    }
}

/// Definition of one problem.
#[derive(Clone)]
pub struct ProblemDefinition {
    /// Tensors that rows read.
    pub inputs: Vec<TensorSpec>,
    /// Output tensors that every launch overwrites.
    pub outputs: Vec<TensorSpec>,
    /// Source of the expected outputs of the problem.
    pub reference: OutputReference,
    /// Operations and fewest bytes of a launch.
    pub work: Work,
    /// Tolerances of the comparison of outputs with the reference.
    pub tolerance: Tolerances,
}

impl ProblemDefinition {
    /// The work of reading each input once and writing each output once.
    pub fn traffic_work(inputs: &[TensorSpec], outputs: &[TensorSpec]) -> Work {
        let bytes = |all: &[TensorSpec]| all.iter().map(TensorSpec::bytes).sum();
        Work::bytes(bytes(inputs), bytes(outputs))
    }
}
