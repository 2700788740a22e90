//! Implements the harness's `Problem` trait for attached problem definitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::{bf16, f16};

use super::definition::{OutputReference, ProblemDefinition, TensorSpec};
use super::golden_tensors;
use crate::backend::BackendError;
use crate::backend::cpu::CpuTask;
use crate::backend::cuda::{CudaTask, Device};
use crate::workload::{
    AxisError, Dtype, Expected, Point, Problem, SourceOfExpectedOutputs, TensorData, Tensors,
    Tolerance, Work, random,
};

/// An attached implementation: a closure that computes on the host, or a closure that enqueues work
/// on a raw CUDA stream.
pub(super) struct AttachedRow {
    pub row_name: &'static str,
    /// Names of the tensors whose device addresses the closure receives.
    pub device_tensor_names: Vec<&'static str>,
    pub kind: HostOrStreamClosure,
}

pub(super) enum HostOrStreamClosure {
    Host(Arc<HostOutputClosure>),
    Stream(Box<PrepareStreamClosure>),
}

type HostOutputClosure = dyn Fn(&Tensors, &mut Tensors) + Send + Sync;
type PrepareStreamClosure = dyn Fn(&DefinitionAtPoint, &Tensors, &Arc<Device>) -> Result<CudaTask, BackendError>
    + Send
    + Sync;

/// An attached problem definition for one set of axis values, with the tensors of its golden file.
pub(super) struct DefinitionAtPoint {
    pub point: Point,
    pub rows: Arc<[AttachedRow]>,
    pub definition: ProblemDefinition,
    /// Inputs and expected outputs from the golden file; both empty if the problem has no golden
    /// file.
    golden_inputs_and_outputs: Result<(Tensors, Tensors), String>,
}

impl DefinitionAtPoint {
    pub fn from_definition_and_golden_file(
        point: Point,
        rows: Arc<[AttachedRow]>,
        definition: ProblemDefinition,
    ) -> Self {
        let golden = match &definition.reference {
            OutputReference::GoldenFile(path) => golden_tensors::read_golden_inputs_and_outputs(
                path,
                &definition.inputs,
                &definition.outputs,
            ),
            _ => Ok(Default::default()),
        };
        Self { point, rows, definition, golden_inputs_and_outputs: golden }
    }

    fn golden_inputs_and_outputs(&self) -> Option<&(Tensors, Tensors)> {
        self.golden_inputs_and_outputs.as_ref().ok()
    }

    /// Bytes of device memory for the problem's inputs and outputs.
    pub fn input_and_output_device_bytes(&self) -> u64 {
        let ProblemDefinition { inputs, outputs, .. } = &self.definition;
        inputs.iter().chain(outputs).map(TensorSpec::bytes).sum()
    }

    /// Checks that all attached rows take only tensors that the definition declares.
    ///
    /// # Errors
    /// The error names the unknown tensor and the declared tensors.
    pub fn check_tensor_names_of_rows(&self) -> Result<(), AxisError> {
        let ProblemDefinition { inputs, outputs, .. } = &self.definition;
        let names: Vec<_> = inputs.iter().chain(outputs).map(|tensor| tensor.name).collect();
        for AttachedRow { row_name: name, device_tensor_names: tensors, .. } in self.rows.iter() {
            if let Some(unknown) = tensors.iter().find(|tensor| !names.contains(tensor)) {
                return Err(AxisError::InvalidCombinationOfValues(format!(
                    "the row `{name}` takes a tensor `{unknown}`, the definition has `{}`",
                    names.join("`, `")
                )));
            }
        }
        Ok(())
    }

    /// Prepares an attached implementation that computes on the host.
    pub fn prepare_host_row(&self, row: &str, inputs: Arc<Tensors>) -> CpuTask {
        let add = |outputs: Tensors, spec: &TensorSpec| {
            outputs.with_output(spec.name, spec.shape.clone(), spec.dtype)
        };
        let outputs = self.definition.outputs.iter().fold(Tensors::new(), add);
        let HostOrStreamClosure::Host(run) = self.closure_of_row(row) else {
            unreachable!("`{row}` runs on a GPU")
        };
        let run = Arc::clone(run);
        CpuTask::new(inputs, outputs, move |inputs, outputs| run(inputs, outputs))
    }

    fn closure_of_row(&self, name: &str) -> &HostOrStreamClosure {
        let row = self.rows.iter().find(|row| row.row_name == name);
        &row.expect("implementations are rows").kind
    }

    /// Prepares an attached implementation that enqueues work on a raw CUDA stream.
    ///
    /// # Errors
    /// Fails with the error of the row, or if device memory is insufficient.
    pub fn prepare_stream_row(
        &self,
        row: &str,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<CudaTask, BackendError> {
        let HostOrStreamClosure::Stream(prepare) = self.closure_of_row(row) else {
            unreachable!("`{row}` runs on the host")
        };
        prepare(self, inputs, device)
    }
}

fn draw_values_of_declared_tensor(declared: &TensorSpec, seed: u64) -> TensorData {
    let (name, len) = (declared.name, declared.element_count());
    let spread = |x: f32| (32.0 * x).round().clamp(-128.0, 127.0) as i8;
    match declared.dtype {
        Dtype::F64 => {
            TensorData::F64(random::map_standard_normal_values(seed, name, len, f64::from))
        }
        Dtype::F32 => TensorData::F32(random::normal_values(seed, name, len)),
        Dtype::F16 => {
            TensorData::F16(random::map_standard_normal_values(seed, name, len, f16::from_f32))
        }
        Dtype::Bf16 => {
            TensorData::Bf16(random::map_standard_normal_values(seed, name, len, bf16::from_f32))
        }
        Dtype::Fp8 => TensorData::I8(random::map_standard_normal_values(seed, name, len, |x| {
            e4m3_code_from_random_bits(x) as i8
        })),
        Dtype::I8 => TensorData::I8(random::map_standard_normal_values(seed, name, len, spread)),
    }
}

/// Turns the bits of a random number into an e4m3 code with the number's sign and a magnitude from
/// 2^-3 to 2^1, never NaN.
const fn e4m3_code_from_random_bits(x: f32) -> u8 {
    let bits = x.to_bits();
    (bits >> 31 << 7) as u8 | (0x20 + (bits >> 8 & 0x1f)) as u8
}

impl Problem for DefinitionAtPoint {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for declared in &self.definition.inputs {
            let kept =
                self.golden_inputs_and_outputs().and_then(|(inputs, _)| inputs.get(declared.name));
            match kept {
                Some(tensor) => inputs.insert(declared.name, tensor.clone()),
                None => {
                    let drawn = draw_values_of_declared_tensor(declared, seed);
                    inputs = inputs.with_tensor(declared.name, declared.shape.clone(), drawn);
                }
            }
        }
        inputs
    }

    /// Golden outputs are valid only for the inputs of their file, so no other inputs can be drawn.
    fn redraw_inputs(&self, names: &[&str], seed: u64) -> Tensors {
        match self.definition.reference {
            OutputReference::GoldenFile(_) => Tensors::new(),
            _ => self.inputs(seed).select_tensors_by_name(names),
        }
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        match &self.definition.reference {
            OutputReference::Code(compute) => compute(inputs),
            OutputReference::GoldenFile(_) => {
                self.golden_inputs_and_outputs().map_or(Vec::new(), |(_, outputs)| {
                    let each = outputs.iter().map(|(name, tensor)| {
                        let values = match tensor.tensor_data() {
                            TensorData::I8(values) => TensorData::I8(values.clone()),
                            _ => TensorData::F64(tensor.elements_to_f64(0, tensor.len())),
                        };
                        Expected::all(name, tensor.shape().to_vec(), values)
                    });
                    each.collect()
                })
            }
            OutputReference::NoReference | OutputReference::OtherRow(_) => Vec::new(),
        }
    }

    fn check_can_be_computed(&self) -> Result<(), String> {
        let fp8 = self.definition.outputs.iter().find(|output| output.dtype == Dtype::Fp8);
        if let Some(TensorSpec { name, .. }) = fp8 {
            return Err(format!(
                "output `{name}` is in fp8, which nothing here compares: declare it as i8, whose \
                 bytes are compared exactly, or a wider float that the row converts it to"
            ));
        }
        let is_output = |name: &&str| self.definition.outputs.iter().any(|it| it.name == *name);
        if let Some(name) =
            self.definition.tolerance.outputs_with_own_tolerance().find(|name| !is_output(name))
        {
            return Err(format!("a tolerance of output `{name}`, which is not declared"));
        }
        self.golden_inputs_and_outputs.as_ref().map(drop).map_err(Clone::clone)
    }

    fn reads_files(&self) -> bool {
        matches!(self.definition.reference, OutputReference::GoldenFile(_))
    }

    fn source_of_expected_outputs(&self) -> SourceOfExpectedOutputs {
        match self.definition.reference {
            OutputReference::NoReference => SourceOfExpectedOutputs::NotCompared,
            OutputReference::OtherRow(row) => SourceOfExpectedOutputs::OutputsOfImplementation(row),
            OutputReference::Code(_) | OutputReference::GoldenFile(_) => {
                SourceOfExpectedOutputs::ProblemReference
            }
        }
    }

    fn work(&self) -> Work {
        self.definition.work.clone()
    }

    /// The maximum of each tolerance over all outputs of the problem.
    fn tolerance(&self) -> Tolerance {
        let none = Tolerance { max_error: 0.0, relative_l2: 0.0 };
        self.tolerances().into_values().fold(none, |most, of| Tolerance {
            max_error: most.max_error.max(of.max_error),
            relative_l2: most.relative_l2.max(of.relative_l2),
        })
    }

    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        let outputs = self.definition.outputs.iter();
        outputs
            .map(|it| (it.name.to_owned(), self.definition.tolerance.tolerance_of_output(it)))
            .collect()
    }

    /// Bytes of host memory for two copies of the inputs and outputs, and for inputs and outputs in
    /// fp64.
    fn host_memory_bytes(&self) -> u64 {
        let ProblemDefinition { inputs, outputs, .. } = &self.definition;
        let elements: usize = inputs.iter().chain(outputs).map(TensorSpec::element_count).sum();
        2 * self.input_and_output_device_bytes() + 8 * elements as u64
    }
}

#[cfg(test)]
mod tests {
    use super::super::definition::Tolerances;
    use super::*;
    use crate::verify;
    use crate::workload::{Axis, axis};

    fn test_definition_with_reference(
        outputs: &[Dtype],
        reference: OutputReference,
        tolerance: Tolerances,
    ) -> DefinitionAtPoint {
        let names = ["y", "z"].into_iter().zip(outputs);
        let outputs = names.map(|(name, dtype)| TensorSpec::new(name, [4], *dtype)).collect();
        let inputs = vec![TensorSpec::new("x", [1 << 16], Dtype::Fp8)];
        let work = Work::default();
        let point = axis::points_of_selection_lines(&[Axis::number("n", "")], &["n=1"], &[])
            .unwrap()
            .remove(0);
        DefinitionAtPoint::from_definition_and_golden_file(
            point,
            Arc::new([]),
            ProblemDefinition { inputs, outputs, reference, work, tolerance },
        )
    }

    fn test_definition_without_reference(
        outputs: &[Dtype],
        tolerance: Tolerances,
    ) -> DefinitionAtPoint {
        test_definition_with_reference(outputs, OutputReference::NoReference, tolerance)
    }

    #[test]
    fn fp8_inputs_are_finite_and_fp8_outputs_are_refused() {
        let fp8 = test_definition_without_reference(&[], Tolerances::by_dtype());
        assert_eq!(fp8.check_can_be_computed(), Ok(()));
        let codes: Vec<u8> = fp8.inputs(7).tensor("x").as_bytes().to_vec();
        assert!(codes.iter().all(|code| (0x20..0x40).contains(&(code & 0x7f))));
        let negative = codes.iter().filter(|&&code| code & 0x80 != 0).count();
        assert!((1 << 14..3 << 14).contains(&negative), "{negative} of {}", codes.len());
        let refused = test_definition_without_reference(&[Dtype::Fp8], Tolerances::by_dtype())
            .check_can_be_computed()
            .unwrap_err();
        assert_eq!(
            refused,
            "output `y` is in fp8, which nothing here compares: declare it as i8, whose bytes are compared exactly, or a wider float that the row converts it to"
        );
    }

    #[test]
    fn only_a_golden_reference_reads_files() {
        let reads_files = |reference| {
            let bound =
                test_definition_with_reference(&[Dtype::F32], reference, Tolerances::by_dtype());
            bound.reads_files()
        };
        assert!(reads_files(OutputReference::GoldenFile("nowhere.safetensors".into())));
        for other in [
            OutputReference::from_function(|_| Vec::new()),
            OutputReference::NoReference,
            OutputReference::OtherRow("x"),
        ] {
            assert!(!reads_files(other));
        }
    }

    #[test]
    fn default_tolerance_depends_on_output_dtype() {
        let allowed = |dtypes: &[Dtype], tolerance| {
            let Tolerance { max_error, relative_l2 } =
                test_definition_without_reference(dtypes, tolerance).tolerance();
            (max_error, relative_l2)
        };
        for (dtypes, error) in [
            (&[Dtype::F64][..], 1e-5),
            (&[Dtype::F32], 1e-5),
            (&[Dtype::F16], 4.0 * 0.5f64.powi(11)),
            (&[Dtype::Bf16], 4.0 * 0.5f64.powi(8)),
            (&[Dtype::F32, Dtype::Bf16], 4.0 * 0.5f64.powi(8)),
            (&[Dtype::F32, Dtype::Fp8], 1e-5),
        ] {
            assert_eq!(allowed(dtypes, Tolerances::by_dtype()), (error, error), "{dtypes:?}");
        }
        assert_eq!(allowed(&[Dtype::Bf16], Tolerances::all(1e-3, 1e-4)), (1e-3, 1e-4));
    }

    #[test]
    fn outputs_can_have_different_tolerances() {
        let mixed =
            |tolerance| test_definition_without_reference(&[Dtype::Bf16, Dtype::F32], tolerance);
        let each = |tolerance| {
            let all = mixed(tolerance).tolerances();
            ["y", "z"].map(|name| all[name].max_error)
        };
        let (by_dtype, all) = (Tolerances::by_dtype(), Tolerances::all(1e-3, 1e-3));
        assert_eq!(each(by_dtype.clone()), [4.0 * 0.5f64.powi(8), 1e-5]);
        assert_eq!(each(all.clone()), [1e-3; 2]);
        assert_eq!(each(by_dtype.clone().with("z", 2e-4, 1e-4)), [4.0 * 0.5f64.powi(8), 2e-4]);
        assert_eq!(each(all.with("z", 2e-4, 1e-4)), [1e-3, 2e-4]);
        let unknown = mixed(by_dtype.with("x", 1.0, 1.0)).check_can_be_computed().unwrap_err();
        assert_eq!(unknown, "a tolerance of output `x`, which is not declared");
    }

    /// Without a reference, the default tolerance accepts bf16 outputs of base and head that differ
    /// by one unit in the last place.
    #[test]
    fn default_tolerance_accepts_one_bf16_ulp() {
        let ys = |bits: u16| {
            let y = vec![bf16::from_bits(bits), bf16::from_f32(0.5)];
            Tensors::new().with_tensor("y", [2], TensorData::Bf16(y))
        };
        // In bf16, 1 and the next larger number differ by 2^-7, the largest relative distance of
        // neighbours.
        let base = verify::reference_from_outputs(&ys(0x3f80));
        let tolerance =
            test_definition_without_reference(&[Dtype::Bf16], Tolerances::by_dtype()).tolerance();
        assert!(verify::compare_outputs_with_reference(&ys(0x3f81), &base, tolerance).is_ok());
        assert!(verify::compare_outputs_with_reference(&ys(0x3f84), &base, tolerance).is_err());
    }
}
