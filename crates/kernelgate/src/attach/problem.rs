//! Adapts the definition of an attached problem to the harness's trait for problems.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::{bf16, f16};

use super::definition::{OutputReference, ProblemDefinition, TensorSpec};
use super::golden_tensors;
use crate::backend::BackendError;
use crate::backend::cpu::CpuTask;
use crate::backend::cuda::{CudaTask, Device};
use crate::workload::{
    AxisError, Dtype, Expected, Point, Problem, ReferenceSource, TensorData, Tensors, Tolerance,
    Work, random,
};

/// An attached row: a closure that computes on the host, or one that enqueues work on a raw stream.
pub(super) struct AttachedRow {
    pub name: &'static str,
    /// Names of the tensors that an attached row takes.
    pub tensors: Vec<&'static str>,
    pub kind: AttachedRowKind,
}

pub(super) enum AttachedRowKind {
    Host(Arc<HostRowFunction>),
    Stream(Box<PrepareAttachedRow>),
}

type HostRowFunction = dyn Fn(&Tensors, &mut Tensors) + Send + Sync;
type PrepareAttachedRow = dyn Fn(&BoundDefinition, &Tensors, &Arc<Device>) -> Result<CudaTask, BackendError>
    + Send
    + Sync;

/// A problem definition at one point of the axes, with the tensors of its golden file.
pub(super) struct BoundDefinition {
    pub point: Point,
    pub rows: Arc<[AttachedRow]>,
    pub definition: ProblemDefinition,
    /// Inputs and outputs of the golden file; empty if there is no golden file.
    golden: Result<(Tensors, Tensors), String>,
}

impl BoundDefinition {
    pub fn new(point: Point, rows: Arc<[AttachedRow]>, definition: ProblemDefinition) -> Self {
        let golden = match &definition.reference {
            OutputReference::Golden(path) => {
                golden_tensors::read_golden(path, &definition.inputs, &definition.outputs)
            }
            _ => Ok(Default::default()),
        };
        Self { point, rows, definition, golden }
    }

    fn golden_tensors(&self) -> Option<&(Tensors, Tensors)> {
        self.golden.as_ref().ok()
    }

    /// Device memory of a problem's inputs and outputs, bytes.
    pub fn device_bytes(&self) -> u64 {
        let ProblemDefinition { inputs, outputs, .. } = &self.definition;
        inputs.iter().chain(outputs).map(TensorSpec::bytes).sum()
    }

    /// Checks that rows name tensors of the definition.
    ///
    /// # Errors
    /// The error names the missing tensor, and the tensors that the file has.
    pub fn check_names(&self) -> Result<(), AxisError> {
        let ProblemDefinition { inputs, outputs, .. } = &self.definition;
        let names: Vec<_> = inputs.iter().chain(outputs).map(|tensor| tensor.name).collect();
        for AttachedRow { name, tensors, .. } in self.rows.iter() {
            if let Some(unknown) = tensors.iter().find(|tensor| !names.contains(tensor)) {
                return Err(AxisError::Combination(format!(
                    "the row `{name}` takes a tensor `{unknown}`, the definition has `{}`",
                    names.join("`, `")
                )));
            }
        }
        Ok(())
    }

    /// Prepares an implementation that runs on the host.
    pub fn host_task(&self, row: &str, inputs: Arc<Tensors>) -> CpuTask {
        let add = |outputs: Tensors, spec: &TensorSpec| {
            outputs.with_output(spec.name, spec.shape.clone(), spec.dtype)
        };
        let outputs = self.definition.outputs.iter().fold(Tensors::new(), add);
        let AttachedRowKind::Host(run) = self.row(row) else {
            unreachable!("`{row}` runs on a GPU")
        };
        let run = Arc::clone(run);
        CpuTask::new(inputs, outputs, move |inputs, outputs| run(inputs, outputs))
    }

    fn row(&self, name: &str) -> &AttachedRowKind {
        let row = self.rows.iter().find(|row| row.name == name);
        &row.expect("implementations are rows").kind
    }

    /// Prepares a row over a raw stream.
    ///
    /// # Errors
    /// Fails with the error of the row, or when device memory is short.
    pub fn prepare_row(
        &self,
        row: &str,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<CudaTask, BackendError> {
        let AttachedRowKind::Stream(prepare) = self.row(row) else {
            unreachable!("`{row}` runs on the host")
        };
        prepare(self, inputs, device)
    }
}

fn draw_declared_tensor(declared: &TensorSpec, seed: u64) -> TensorData {
    let (name, len) = (declared.name, declared.len());
    let spread = |x: f32| (32.0 * x).round().clamp(-128.0, 127.0) as i8;
    match declared.dtype {
        Dtype::F64 => TensorData::F64(random::map_normal_values(seed, name, len, f64::from)),
        Dtype::F32 => TensorData::F32(random::normal_values(seed, name, len)),
        Dtype::F16 => TensorData::F16(random::map_normal_values(seed, name, len, f16::from_f32)),
        Dtype::Bf16 => TensorData::Bf16(random::map_normal_values(seed, name, len, bf16::from_f32)),
        Dtype::Fp8 => {
            TensorData::I8(random::map_normal_values(seed, name, len, |x| e4m3_code(x) as i8))
        }
        Dtype::I8 => TensorData::I8(random::map_normal_values(seed, name, len, spread)),
    }
}

/// The e4m3 code for the bits of a number: its sign, and magnitudes from 2^-3 to 2^1 without a NaN.
const fn e4m3_code(x: f32) -> u8 {
    let bits = x.to_bits();
    (bits >> 31 << 7) as u8 | (0x20 + (bits >> 8 & 0x1f)) as u8
}

impl Problem for BoundDefinition {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for declared in &self.definition.inputs {
            let kept = self.golden_tensors().and_then(|(inputs, _)| inputs.get(declared.name));
            match kept {
                Some(tensor) => inputs.insert(declared.name, tensor.clone()),
                None => {
                    let drawn = draw_declared_tensor(declared, seed);
                    inputs = inputs.with(declared.name, declared.shape.clone(), drawn);
                }
            }
        }
        inputs
    }

    /// Golden outputs belong to the inputs of their file, so other inputs cannot be drawn.
    fn redraw(&self, names: &[&str], seed: u64) -> Tensors {
        match self.definition.reference {
            OutputReference::Golden(_) => Tensors::new(),
            _ => self.inputs(seed).select_named(names),
        }
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        match &self.definition.reference {
            OutputReference::Code(compute) => compute(inputs),
            OutputReference::Golden(_) => {
                self.golden_tensors().map_or(Vec::new(), |(_, outputs)| {
                    let each = outputs.iter().map(|(name, tensor)| {
                        let values = match tensor.tensor_data() {
                            TensorData::I8(values) => TensorData::I8(values.clone()),
                            _ => TensorData::F64(tensor.to_f64(0, tensor.len())),
                        };
                        Expected::all(name, tensor.shape().to_vec(), values)
                    });
                    each.collect()
                })
            }
            OutputReference::None | OutputReference::Row(_) => Vec::new(),
        }
    }

    fn check(&self) -> Result<(), String> {
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
        self.golden.as_ref().map(drop).map_err(Clone::clone)
    }

    fn reads_files(&self) -> bool {
        matches!(self.definition.reference, OutputReference::Golden(_))
    }

    fn reference_from(&self) -> ReferenceSource {
        match self.definition.reference {
            OutputReference::None => ReferenceSource::Nothing,
            OutputReference::Row(row) => ReferenceSource::Row(row),
            OutputReference::Code(_) | OutputReference::Golden(_) => ReferenceSource::Definition,
        }
    }

    fn work(&self) -> Work {
        self.definition.work.clone()
    }

    /// The widest tolerance of all outputs of a problem.
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

    /// Host memory for two copies of the inputs, for the outputs, and for both in fp64.
    fn host_bytes(&self) -> u64 {
        let ProblemDefinition { inputs, outputs, .. } = &self.definition;
        let elements: usize = inputs.iter().chain(outputs).map(TensorSpec::len).sum();
        2 * self.device_bytes() + 8 * elements as u64
    }
}

#[cfg(test)]
mod tests {
    use super::super::definition::Tolerances;
    use super::*;
    use crate::verify;
    use crate::workload::{Axis, axis};

    fn bind_definition(
        outputs: &[Dtype],
        reference: OutputReference,
        tolerance: Tolerances,
    ) -> BoundDefinition {
        let names = ["y", "z"].into_iter().zip(outputs);
        let outputs = names.map(|(name, dtype)| TensorSpec::new(name, [4], *dtype)).collect();
        let inputs = vec![TensorSpec::new("x", [1 << 16], Dtype::Fp8)];
        let work = Work::default();
        let point = axis::expand_points(&[Axis::number("n", "")], &["n=1"], &[]).unwrap().remove(0);
        BoundDefinition::new(
            point,
            Arc::new([]),
            ProblemDefinition { inputs, outputs, reference, work, tolerance },
        )
    }

    fn bind_unverified(outputs: &[Dtype], tolerance: Tolerances) -> BoundDefinition {
        bind_definition(outputs, OutputReference::None, tolerance)
    }

    #[test]
    fn inputs_in_fp8_are_numbers_and_outputs_in_it_are_refused() {
        let fp8 = bind_unverified(&[], Tolerances::by_dtype());
        assert_eq!(fp8.check(), Ok(()));
        let codes: Vec<u8> = fp8.inputs(7).tensor("x").as_bytes().to_vec();
        assert!(codes.iter().all(|code| (0x20..0x40).contains(&(code & 0x7f))));
        let negative = codes.iter().filter(|&&code| code & 0x80 != 0).count();
        assert!((1 << 14..3 << 14).contains(&negative), "{negative} of {}", codes.len());
        let refused = bind_unverified(&[Dtype::Fp8], Tolerances::by_dtype()).check().unwrap_err();
        assert_eq!(
            refused,
            "output `y` is in fp8, which nothing here compares: declare it as i8, whose bytes are compared exactly, or a wider float that the row converts it to"
        );
    }

    #[test]
    fn golden_tensors_are_read_anew() {
        let reads_files = |reference| {
            let bound = bind_definition(&[Dtype::F32], reference, Tolerances::by_dtype());
            bound.reads_files()
        };
        assert!(reads_files(OutputReference::Golden("nowhere.safetensors".into())));
        for other in [
            OutputReference::from_function(|_| Vec::new()),
            OutputReference::None,
            OutputReference::Row("x"),
        ] {
            assert!(!reads_files(other));
        }
    }

    #[test]
    fn an_undeclared_tolerance_follows_from_the_dtype() {
        let allowed = |dtypes: &[Dtype], tolerance| {
            let Tolerance { max_error, relative_l2 } =
                bind_unverified(dtypes, tolerance).tolerance();
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
    fn each_output_has_its_own_tolerance() {
        let mixed = |tolerance| bind_unverified(&[Dtype::Bf16, Dtype::F32], tolerance);
        let each = |tolerance| {
            let all = mixed(tolerance).tolerances();
            ["y", "z"].map(|name| all[name].max_error)
        };
        let (by_dtype, all) = (Tolerances::by_dtype(), Tolerances::all(1e-3, 1e-3));
        assert_eq!(each(by_dtype.clone()), [4.0 * 0.5f64.powi(8), 1e-5]);
        assert_eq!(each(all.clone()), [1e-3; 2]);
        assert_eq!(each(by_dtype.clone().with("z", 2e-4, 1e-4)), [4.0 * 0.5f64.powi(8), 2e-4]);
        assert_eq!(each(all.with("z", 2e-4, 1e-4)), [1e-3, 2e-4]);
        let unknown = mixed(by_dtype.with("x", 1.0, 1.0)).check().unwrap_err();
        assert_eq!(unknown, "a tolerance of output `x`, which is not declared");
    }

    /// `kernelgate compare` tolerates one unit in the last place in a row without a reference.
    #[test]
    fn outputs_one_unit_in_the_last_place_apart_are_alike() {
        let ys = |bits: u16| {
            let y = vec![bf16::from_bits(bits), bf16::from_f32(0.5)];
            Tensors::new().with("y", [2], TensorData::Bf16(y))
        };
        // The number 1 and its neighbours are 2^-7 apart above 1, where units are widest.
        let base = verify::outputs_as_reference(&ys(0x3f80));
        let tolerance = bind_unverified(&[Dtype::Bf16], Tolerances::by_dtype()).tolerance();
        assert!(verify::compare_outputs(&ys(0x3f81), &base, tolerance).is_ok());
        assert!(verify::compare_outputs(&ys(0x3f84), &base, tolerance).is_err());
    }
}
