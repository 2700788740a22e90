//! Turns a workload whose implementations are closures into a suite of the harness.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::definition::{ProblemDefinition, TensorSpec};
use super::problem::{AttachedRow, DefinitionAtPoint, HostOrStreamClosure};
use super::row::{self, RowContext, RowLaunchClosures};
use crate::backend::cuda::{CudaTask, Device, DeviceInput, DeviceOutput};
use crate::backend::{BackendError, Implementation, PrepareFunction};
use crate::suite::{ProblemsAlongEachAxis, WorkloadNameAxesAndSelections, WorkloadSuite};
use crate::workload::{Axis, AxisError, Point, SelectionLinesByEffort, Tensors};

/// A workload whose implementations are closures, which launch on a raw CUDA stream or compute on
/// the host.
///
/// ```no_run
/// use kernelgate::attach::*;
/// use kernelgate::harness::Harness;
///
/// fn main() -> std::process::ExitCode {
///     let copy = AttachedWorkload::new("mine/copy", &["n=1048576"], |point| {
///         let n = point.number("n")?;
///         let inputs = vec![TensorSpec::new("x", [n], Dtype::F32)];
///         let outputs = vec![TensorSpec::new("y", [n], Dtype::F32)];
///         let work = ProblemDefinition::traffic_work(&inputs, &outputs);
///         let (reference, tolerance) = (OutputReference::NoReference, Tolerances::by_dtype());
///         Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
///     });
///     let copy = copy.add_host_row("cpu", |inputs, outputs| {
///         outputs.f32_mut("y").copy_from_slice(inputs.f32_elements("x"));
///     });
///     Harness::new("copy", [copy]).main()
/// }
/// ```
pub struct AttachedWorkload {
    name_axes_and_selections: WorkloadNameAxesAndSelections,
    define_problem: Box<DefineProblemAtPoint>,
    rows: Vec<AttachedRow>,
}

type DefineProblemAtPoint = dyn Fn(&Point) -> Result<ProblemDefinition, AxisError> + Send + Sync;

impl AttachedWorkload {
    /// Creates a workload with a name (`family/operation`, the beginning of each case id) and
    /// default axis values: `&["n=1024,4096 layout=row"]`; `define` returns the problem definition
    /// for one set of axis values. An axis with only numbers as default values accepts any number;
    /// another axis accepts only the listed words.
    pub fn new(
        name: &'static str,
        points: &'static [&'static str],
        define: impl Fn(&Point) -> Result<ProblemDefinition, AxisError> + Send + Sync + 'static,
    ) -> Self {
        let facts = WorkloadNameAxesAndSelections {
            name,
            about: "attached",
            workload_revision: None,
            axes: Cow::Owned(Axis::axes_that_occur_in_lines(points)),
            selection_lines: SelectionLinesByEffort {
                default_selection_lines: points,
                ..SelectionLinesByEffort::default()
            },
            scan_along_axes: ProblemsAlongEachAxis::default(),
        };
        Self { name_axes_and_selections: facts, define_problem: Box::new(define), rows: Vec::new() }
    }

    /// Sets the one-line description that `kernelgate list` prints.
    pub fn about(mut self, about: &'static str) -> Self {
        self.name_axes_and_selections.about = about;
        self
    }

    /// Sets the revision of the definition: results of different revisions are not compared, and
    /// references stored on disk are kept per revision. Without a revision, stored references are
    /// discarded when the bench executable changes.
    pub fn revision(mut self, revision: u32) -> Self {
        self.name_axes_and_selections.workload_revision = Some(revision);
        self
    }

    /// A row, `cuda/…`: `prepare` loads the row's kernels once and returns the closure that
    /// launches the kernels. The closure `prepare` receives the device addresses of the named
    /// tensors, in the order of the names.
    pub fn add_stream_row<const N: usize>(
        mut self,
        name: &'static str,
        tensors: [&'static str; N],
        prepare: impl Fn(&RowContext<'_>, [u64; N]) -> Result<RowLaunchClosures, BackendError>
        + Send
        + Sync
        + 'static,
    ) -> AttachedWorkload {
        let prepare = move |bound: &DefinitionAtPoint, inputs: &Tensors, device: &Arc<Device>| {
            prepare_row_with_device_tensors(bound, inputs, device, tensors, &prepare)
        };
        let (tensors, kind) = (tensors.to_vec(), HostOrStreamClosure::Stream(Box::new(prepare)));
        self.rows.push(AttachedRow { row_name: name, device_tensor_names: tensors, kind });
        self
    }

    /// Adds an implementation that computes on the host, named `cpu` or `cpu/…`: the closure `run`
    /// overwrites every element of the outputs.
    pub fn add_host_row(
        mut self,
        name: &'static str,
        run: impl Fn(&Tensors, &mut Tensors) + Send + Sync + 'static,
    ) -> AttachedWorkload {
        self.rows.push(AttachedRow {
            row_name: name,
            device_tensor_names: Vec::new(),
            kind: HostOrStreamClosure::Host(Arc::new(run)),
        });
        self
    }
}

impl From<AttachedWorkload> for WorkloadSuite {
    fn from(attached: AttachedWorkload) -> Self {
        let AttachedWorkload { name_axes_and_selections: facts, define_problem: define, rows } =
            attached;
        let implementation = |row: &AttachedRow| Implementation {
            implementation_name: row.row_name,
            description: "attached",
            supports: |_: &DefinitionAtPoint| Ok(()),
            prepare: match row.kind {
                HostOrStreamClosure::Host(_) => {
                    PrepareFunction::CpuByRowName(DefinitionAtPoint::prepare_host_row)
                }
                HostOrStreamClosure::Stream(_) => PrepareFunction::CudaByRowName {
                    device_bytes: DefinitionAtPoint::input_and_output_device_bytes,
                    prepare: DefinitionAtPoint::prepare_stream_row,
                },
            },
        };
        let implementations: Vec<_> = rows.iter().map(implementation).collect();
        let rows: Arc<[AttachedRow]> = rows.into();
        Self::new(facts, implementations, move |point| {
            let bound = DefinitionAtPoint::from_definition_and_golden_file(
                point.clone(),
                Arc::clone(&rows),
                define(point)?,
            );
            bound.check_tensor_names_of_rows().map(|()| bound)
        })
    }
}

/// Copies the inputs to the device, allocates the outputs and prepares an attached row on them.
fn prepare_row_with_device_tensors<const N: usize>(
    bound: &DefinitionAtPoint,
    inputs: &Tensors,
    device: &Arc<Device>,
    tensors: [&str; N],
    prepare: impl Fn(&RowContext<'_>, [u64; N]) -> Result<RowLaunchClosures, BackendError>,
) -> Result<CudaTask, BackendError> {
    let mut buffers = BTreeMap::new();
    for TensorSpec { name, .. } in &bound.definition.inputs {
        buffers.insert(*name, device.upload(inputs.tensor(name).as_bytes())?);
    }
    let allocate =
        |spec: &TensorSpec| DeviceOutput::new(device, spec.name, &*spec.shape, spec.dtype);
    let specs = &bound.definition.outputs;
    let outputs = specs.iter().map(allocate).collect::<Result<Vec<_>, _>>()?;
    let mut addresses: BTreeMap<&str, u64> =
        buffers.iter().map(|(name, buffer)| (*name, buffer.device_address())).collect();
    addresses
        .extend(specs.iter().zip(&outputs).map(|(spec, output)| (spec.name, output.address())));
    let address = |name| addresses.get(name).copied().unwrap_or_default();
    let launches = prepare(&RowContext { point: &bound.point, device }, tensors.map(address))?;
    let RowLaunchClosures { mut launch, reset, inputs_read_by_launches: reads } = launches;
    let reads = reads.unwrap_or_else(|| buffers.keys().map(|&name| name.to_owned()).collect());
    let input = |name: &String| {
        let buffer = buffers
            .get(name.as_str())
            .ok_or_else(|| row::input_missing_in_definition_error(name))?;
        Ok(DeviceInput::new(name, buffer))
    };
    let inputs = reads.iter().map(input).collect::<Result<Vec<_>, BackendError>>()?;
    // Device memory of all inputs stays allocated as long as the launch closure, because launches
    // may contain the addresses.
    let launch = move |_: &[DeviceOutput]| {
        let _kept = &buffers;
        launch()
    };
    let task = CudaTask::new(device, inputs, outputs, launch).marked_as_attached_code();
    Ok(match reset {
        Some(reset) => task.with_reset(reset),
        None => task,
    })
}

#[cfg(test)]
mod tests {
    use super::super::definition::{OutputReference, Tolerances};
    use super::*;
    use crate::backend::BackendKind::Cpu;
    use crate::backend::BenchDevices;
    use crate::workload::{
        AxisValuesFromCommandLine, BenchEffort, Dtype, SizeOfDefaultProblems, Work,
    };

    fn test_suite_of_one_stream_row(
        points: &'static [&'static str],
        tensors: [&'static str; 2],
    ) -> WorkloadSuite {
        let define = |_: &Point| {
            Ok(ProblemDefinition {
                inputs: vec![TensorSpec::new("x", [4], Dtype::F32)],
                outputs: vec![TensorSpec::new("y", [4], Dtype::F32)],
                reference: OutputReference::NoReference,
                work: Work::default(),
                tolerance: Tolerances::by_dtype(),
            })
        };
        let prepare_row =
            |_: &RowContext<'_>, _| Ok(RowLaunchClosures::new(|| Ok::<_, String>(())));
        AttachedWorkload::new("mine/axpy", points, define)
            .add_stream_row("cuda/theirs", tensors, prepare_row)
            .into()
    }

    #[test]
    fn axes_come_from_the_default_points() {
        let suite = test_suite_of_one_stream_row(
            &["n=16,32 layout=row", "n=64 layout=column,row"],
            ["x", "y"],
        );
        let names: Vec<&str> = suite.axes_of_workload().iter().map(|axis| axis.axis_name).collect();
        assert_eq!(names, ["n", "layout"]);
        let points = |overrides: &[AxisValuesFromCommandLine]| {
            let points = suite.points_selected_by_effort(
                BenchEffort::Default,
                SizeOfDefaultProblems::HostCpuSizes,
                overrides,
            )?;
            Ok::<_, AxisError>(points.iter().map(Point::to_string).collect::<Vec<_>>())
        };
        assert_eq!(points(&[]).unwrap(), ["n16_row", "n32_row", "n64_column", "n64_row"]);
        assert_eq!(points(&["n=7".parse().unwrap()]).unwrap(), ["n7_row", "n7_column"]);
        assert!(points(&["layout=tiled".parse().unwrap()]).is_err());
    }

    #[test]
    fn a_host_row_computes_outputs_from_inputs() {
        let define = |_: &Point| {
            Ok(ProblemDefinition {
                inputs: vec![TensorSpec::new("x", [2], Dtype::F32)],
                outputs: vec![TensorSpec::new("y", [2], Dtype::F32)],
                reference: OutputReference::NoReference,
                work: Work::default(),
                tolerance: Tolerances::by_dtype(),
            })
        };
        let suite: WorkloadSuite = AttachedWorkload::new("mine/double", &["n=2"], define)
            .add_host_row("cpu", |inputs, outputs| {
                let pairs = outputs.f32_mut("y").iter_mut().zip(inputs.f32_elements("x"));
                pairs.for_each(|(y, x)| *y = 2.0 * x);
            })
            .into();
        let point = &suite
            .points_selected_by_effort(
                BenchEffort::Default,
                SizeOfDefaultProblems::HostCpuSizes,
                &[],
            )
            .unwrap()[0];
        let inputs = Arc::new(Tensors::new().with_tensor("x", [2], vec![1.0_f32, 2.5]));
        let bound = suite.problem_at_point(point).unwrap();
        let mut task = bound.prepare_implementation(0, inputs, &BenchDevices::Cpu).unwrap();
        task.launch_once().unwrap();
        assert_eq!(task.outputs_on_host().unwrap().f32_elements("y"), [2.0, 5.0]);
        assert_eq!(
            (
                suite.implementations_of_workload()[0].backend,
                bound.device_bytes_declared_by_implementation(0)
            ),
            (Cpu, None)
        );
    }

    #[test]
    fn a_row_with_an_undeclared_tensor_is_an_error_without_gpu() {
        let suite = test_suite_of_one_stream_row(&["n=16"], ["x", "z"]);
        let point = &suite
            .points_selected_by_effort(
                BenchEffort::Default,
                SizeOfDefaultProblems::HostCpuSizes,
                &[],
            )
            .unwrap()[0];
        let error = suite.problem_at_point(point).map(drop).unwrap_err().to_string();
        let message = "the row `cuda/theirs` takes a tensor `z`, the definition has `x`, `y`";
        assert_eq!(error, message);
    }
}
