//! Definition of an attached computation: tensors with name, shape and dtype, reference, work and
//! tolerances.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::workload::{Dtype, Expected, Tensors, Tolerance, Work};

/// Smallest default tolerance, for outputs without a declared tolerance.
const MIN_DEFAULT_OUTPUT_TOLERANCE: f64 = 1e-5;
/// Default tolerance of an output, in unit roundoffs of the output's dtype.
const DEFAULT_TOLERANCE_ROUNDOFFS: f64 = 4.0;

/// Declares name, shape and dtype of an input or output, without values.
///
/// Inputs are drawn from N(0, 1) with the seed; i8 values lie in -128..127 with standard deviation
/// 32; fp8 (e4m3) values have random sign and magnitudes from 2⁻³ to 2. An output in fp8 is
/// rejected before timing; declare it as i8, so that its bytes are compared exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    pub(super) name: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: Dtype,
}

impl TensorSpec {
    /// Declares a row-major tensor with name, shape and dtype.
    pub fn new(name: &'static str, shape: impl Into<Vec<usize>>, dtype: Dtype) -> Self {
        Self { name, shape: shape.into(), dtype }
    }

    pub(super) fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size of the tensor's elements in bytes.
    pub fn bytes(&self) -> u64 {
        (self.element_count() * self.dtype.bytes_per_element()) as u64
    }
}

/// Source of the expected outputs of a problem.
#[derive(Clone)]
pub enum OutputReference {
    /// The problem has no expected outputs: implementations are timed and marked as unverified.
    NoReference,
    /// Code, in fp64.
    Code(OutputReferenceFunction),
    /// A safetensors file contains expected outputs under the outputs' names, and may contain
    /// inputs. Inputs and outputs in the safetensors file belong to one data set. If the file lacks
    /// an input, the expected outputs must belong to the input values that the default seed draws.
    /// If the head's errors against golden tensors exceed the base's, `kernelgate compare` finds
    /// accuracy inconclusive, because other seeds cannot be tested.
    GoldenFile(PathBuf),
    /// Another implementation of the problem computes the expected outputs from the same inputs.
    /// The implementation that serves as the reference is itself unverified.
    OtherRow(&'static str),
}

/// Computes the outputs.
type OutputReferenceFunction = Arc<dyn Fn(&Tensors) -> Vec<Expected> + Send + Sync>;

impl OutputReference {
    /// Uses a function that computes the expected outputs on the host in fp64.
    pub fn from_function(
        compute: impl Fn(&Tensors) -> Vec<Expected> + Send + Sync + 'static,
    ) -> OutputReference {
        Self::Code(Arc::new(compute))
    }
}

/// Maximum allowed difference of an implementation's outputs from the reference, or from the base's
/// outputs in `kernelgate compare` if the problem has no reference. Integer and fp8 outputs are
/// compared exactly.
#[derive(Debug, Clone, Default)]
pub struct Tolerances {
    default_tolerance: Option<Tolerance>,
    tolerance_by_output: BTreeMap<&'static str, Tolerance>,
}

impl Tolerances {
    /// Default tolerance of each output, for maximum and relative L2 error: the larger of 1e-5 and
    /// four unit roundoffs of its dtype (2.0e-3 in f16, 1.6e-2 in bf16). Four unit roundoffs are
    /// two units in the last place, which allows another order of summation. Declare a tolerance
    /// for an output whose dtype is more precise than the dtype of its computation.
    pub fn by_dtype() -> Tolerances {
        Self::default()
    }

    /// Sets maximum error and relative L2 error that are allowed for every output without its own
    /// tolerance.
    pub const fn all(max_error: f64, relative_l2: f64) -> Tolerances {
        Self {
            default_tolerance: Some(Tolerance { max_error, relative_l2 }),
            tolerance_by_output: BTreeMap::new(),
        }
    }

    /// Sets maximum error and relative L2 error that are allowed for one output.
    pub fn with(mut self, output: &'static str, max_error: f64, relative_l2: f64) -> Self {
        self.tolerance_by_output.insert(output, Tolerance { max_error, relative_l2 });
        self
    }

    pub(super) fn outputs_with_own_tolerance(&self) -> impl Iterator<Item = &'static str> {
        self.tolerance_by_output.keys().copied()
    }

    pub(super) fn tolerance_of_output(&self, output: &TensorSpec) -> Tolerance {
        let roundoff = match output.dtype {
            // Outputs of dtype fp8 are rejected, and fp8 data is compared exactly as i8 bytes, so
            // no roundoff is needed.
            Dtype::Fp8 => 0.0,
            dtype => dtype.unit_roundoff(),
        };
        let error = (DEFAULT_TOLERANCE_ROUNDOFFS * roundoff).max(MIN_DEFAULT_OUTPUT_TOLERANCE);
        let by_dtype = Tolerance { max_error: error, relative_l2: error };
        self.tolerance_by_output
            .get(output.name)
            .copied()
            .or(self.default_tolerance)
            .unwrap_or(by_dtype)
    }
}

/// Definition of one attached problem: inputs, outputs, reference, work and tolerances.
#[derive(Clone)]
pub struct ProblemDefinition {
    /// Input tensors that every implementation reads.
    pub inputs: Vec<TensorSpec>,
    /// Output tensors, which every launch overwrites completely.
    pub outputs: Vec<TensorSpec>,
    /// Source of the expected outputs of the problem.
    pub reference: OutputReference,
    /// Arithmetic operations and minimum bytes of one launch.
    pub work: Work,
    /// Allowed differences of outputs from the reference.
    pub tolerance: Tolerances,
}

impl ProblemDefinition {
    /// Returns the work of a memory-bound operation that reads each input once and writes each
    /// output once, without arithmetic.
    pub fn traffic_work(inputs: &[TensorSpec], outputs: &[TensorSpec]) -> Work {
        let bytes = |all: &[TensorSpec]| all.iter().map(TensorSpec::bytes).sum();
        Work::bytes(bytes(inputs), bytes(outputs))
    }
}
