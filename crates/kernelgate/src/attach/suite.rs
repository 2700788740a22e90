//! Turns a workload whose rows are closures into a suite of the harness.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::definition::{ProblemDefinition, TensorSpec};
use super::problem::{AttachedRow, AttachedRowKind, BoundDefinition};
use super::row::{self, At, RowLaunches};
use crate::backend::cuda::{CudaTask, Device, Input, Output};
use crate::backend::{BackendError, Implementation, Prepare};
use crate::suite::{ScanAlongAxes, Suite, WorkloadFacts};
use crate::workload::{Axis, AxisError, Point, SelectionLines, Tensors};

/// A workload whose rows are closures, over a raw stream or on the host.
///
/// ```no_run
/// use kernelgate::attach::*;
/// use kernelgate::harness::Harness;
///
/// fn main() -> std::process::ExitCode {
///     let copy = Attached::new("mine/copy", &["n=1048576"], |point| {
///         let n = point.number("n")?;
///         let inputs = vec![TensorSpec::new("x", [n], Dtype::F32)];
///         let outputs = vec![TensorSpec::new("y", [n], Dtype::F32)];
///         let work = ProblemDefinition::traffic_work(&inputs, &outputs);
///         let (reference, tolerance) = (OutputReference::None, Tolerances::by_dtype());
///         Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
///     });
///     let copy = copy.host_row("cpu", |inputs, outputs| {
///         outputs.f32_mut("y").copy_from_slice(inputs.f32("x"));
///     });
///     Harness::new("copy", [copy]).main()
/// }
/// ```
pub struct Attached {
    facts: WorkloadFacts,
    define: Box<DefineProblem>,
    rows: Vec<AttachedRow>,
}

type DefineProblem = dyn Fn(&Point) -> Result<ProblemDefinition, AxisError> + Send + Sync;

impl Attached {
    /// Makes a workload with this name (`family/operation`, the start of every case id) and these
    /// points of its axes: `&["n=1024,4096 layout=row"]`; `define` returns the definition of a
    /// point. An axis whose values are all numbers accepts any number; another axis accepts only
    /// the listed words.
    pub fn new(
        name: &'static str,
        points: &'static [&'static str],
        define: impl Fn(&Point) -> Result<ProblemDefinition, AxisError> + Send + Sync + 'static,
    ) -> Self {
        let facts = WorkloadFacts {
            name,
            about: "attached",
            revision: None,
            axes: Cow::Owned(Axis::axes_in_lines(points)),
            lines: SelectionLines { default: points, ..SelectionLines::default() },
            scan: ScanAlongAxes::default(),
        };
        Self { facts, define: Box::new(define), rows: Vec::new() }
    }

    /// Sets the description that `kernelgate list` prints in one line.
    pub fn about(mut self, about: &'static str) -> Self {
        self.facts.about = about;
        self
    }

    /// Sets the revision of the workload's definition: results of two revisions are not comparable,
    /// and references on disk are stored under their revision. Without a revision, stored
    /// references are kept until the bench executable changes.
    pub fn revision(mut self, revision: u32) -> Self {
        self.facts.revision = Some(revision);
        self
    }

    /// A row, `cuda/…`: `prepare` loads the row's kernels once and returns the closure that
    /// launches them. The launch gets the addresses of the tensors that it takes, in their order.
    pub fn row<const N: usize>(
        mut self,
        name: &'static str,
        tensors: [&'static str; N],
        prepare: impl Fn(&At<'_>, [u64; N]) -> Result<RowLaunches, BackendError> + Send + Sync + 'static,
    ) -> Attached {
        let prepare = move |bound: &BoundDefinition, inputs: &Tensors, device: &Arc<Device>| {
            copying_task(bound, inputs, device, tensors, &prepare)
        };
        let (tensors, kind) = (tensors.to_vec(), AttachedRowKind::Stream(Box::new(prepare)));
        self.rows.push(AttachedRow { name, tensors, kind });
        self
    }

    /// Adds an implementation that runs on the host, named `cpu` or `cpu/…`: `run` overwrites every
    /// element of the outputs.
    pub fn host_row(
        mut self,
        name: &'static str,
        run: impl Fn(&Tensors, &mut Tensors) + Send + Sync + 'static,
    ) -> Attached {
        self.rows.push(AttachedRow {
            name,
            tensors: Vec::new(),
            kind: AttachedRowKind::Host(Arc::new(run)),
        });
        self
    }
}

impl From<Attached> for Suite {
    fn from(attached: Attached) -> Self {
        let Attached { facts, define, rows } = attached;
        let implementation = |row: &AttachedRow| Implementation {
            name: row.name,
            about: "attached",
            supports: |_: &BoundDefinition| Ok(()),
            prepare: match row.kind {
                AttachedRowKind::Host(_) => Prepare::CpuByName(BoundDefinition::host_task),
                AttachedRowKind::Stream(_) => Prepare::CudaByName {
                    device_bytes: BoundDefinition::device_bytes,
                    prepare: BoundDefinition::prepare_row,
                },
            },
        };
        let implementations: Vec<_> = rows.iter().map(implementation).collect();
        let rows: Arc<[AttachedRow]> = rows.into();
        Self::new(facts, implementations, move |point| {
            let bound = BoundDefinition::new(point.clone(), Arc::clone(&rows), define(point)?);
            bound.check_names().map(|()| bound)
        })
    }
}

/// Copies the inputs, allocates the outputs and prepares a row.
fn copying_task<const N: usize>(
    bound: &BoundDefinition,
    inputs: &Tensors,
    device: &Arc<Device>,
    tensors: [&str; N],
    prepare: impl Fn(&At<'_>, [u64; N]) -> Result<RowLaunches, BackendError>,
) -> Result<CudaTask, BackendError> {
    let mut buffers = BTreeMap::new();
    for TensorSpec { name, .. } in &bound.definition.inputs {
        buffers.insert(*name, device.upload(inputs.tensor(name).as_bytes())?);
    }
    let allocate = |spec: &TensorSpec| Output::new(device, spec.name, &*spec.shape, spec.dtype);
    let specs = &bound.definition.outputs;
    let outputs = specs.iter().map(allocate).collect::<Result<Vec<_>, _>>()?;
    let mut addresses: BTreeMap<&str, u64> =
        buffers.iter().map(|(name, buffer)| (*name, buffer.address())).collect();
    addresses
        .extend(specs.iter().zip(&outputs).map(|(spec, output)| (spec.name, output.address())));
    let address = |name| addresses.get(name).copied().unwrap_or_default();
    let launches = prepare(&At { point: &bound.point, device }, tensors.map(address))?;
    let RowLaunches { mut launch, reset, reads } = launches;
    let reads = reads.unwrap_or_else(|| buffers.keys().map(|&name| name.to_owned()).collect());
    let input = |name: &String| {
        let buffer = buffers.get(name.as_str()).ok_or_else(|| row::missing_input(name))?;
        Ok(Input::new(name, buffer))
    };
    let inputs = reads.iter().map(input).collect::<Result<Vec<_>, BackendError>>()?;
    // The memory of all inputs lives as long as the launches, which may have its addresses.
    let launch = move |_: &[Output]| {
        let _kept = &buffers;
        launch()
    };
    let task = CudaTask::new(device, inputs, outputs, launch).attached();
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
    use crate::backend::BenchTarget;
    use crate::workload::{AxisOverride, DefaultScale, Dtype, Effort, Work};

    fn copying_suite(points: &'static [&'static str], tensors: [&'static str; 2]) -> Suite {
        let define = |_: &Point| {
            Ok(ProblemDefinition {
                inputs: vec![TensorSpec::new("x", [4], Dtype::F32)],
                outputs: vec![TensorSpec::new("y", [4], Dtype::F32)],
                reference: OutputReference::None,
                work: Work::default(),
                tolerance: Tolerances::by_dtype(),
            })
        };
        let row = |_: &At<'_>, _| Ok(RowLaunches::new(|| Ok::<_, String>(())));
        Attached::new("mine/axpy", points, define).row("cuda/theirs", tensors, row).into()
    }

    #[test]
    fn axes_are_those_of_the_points() {
        let suite = copying_suite(&["n=16,32 layout=row", "n=64 layout=column,row"], ["x", "y"]);
        let names: Vec<&str> = suite.axes().iter().map(|axis| axis.name).collect();
        assert_eq!(names, ["n", "layout"]);
        let points = |overrides: &[AxisOverride]| {
            let points = suite.points(Effort::Default, DefaultScale::Host, overrides)?;
            Ok::<_, AxisError>(points.iter().map(Point::to_string).collect::<Vec<_>>())
        };
        assert_eq!(points(&[]).unwrap(), ["n16_row", "n32_row", "n64_column", "n64_row"]);
        assert_eq!(points(&["n=7".parse().unwrap()]).unwrap(), ["n7_row", "n7_column"]);
        assert!(points(&["layout=tiled".parse().unwrap()]).is_err());
    }

    #[test]
    fn a_row_on_the_host_computes_from_its_inputs() {
        let define = |_: &Point| {
            Ok(ProblemDefinition {
                inputs: vec![TensorSpec::new("x", [2], Dtype::F32)],
                outputs: vec![TensorSpec::new("y", [2], Dtype::F32)],
                reference: OutputReference::None,
                work: Work::default(),
                tolerance: Tolerances::by_dtype(),
            })
        };
        let suite: Suite = Attached::new("mine/double", &["n=2"], define)
            .host_row("cpu", |inputs, outputs| {
                let pairs = outputs.f32_mut("y").iter_mut().zip(inputs.f32("x"));
                pairs.for_each(|(y, x)| *y = 2.0 * x);
            })
            .into();
        let point = &suite.points(Effort::Default, DefaultScale::Host, &[]).unwrap()[0];
        let inputs = Arc::new(Tensors::new().with("x", [2], vec![1.0_f32, 2.5]));
        let bound = suite.bind(point).unwrap();
        let mut task = bound.prepare_implementation(0, inputs, &BenchTarget::Cpu).unwrap();
        task.launch().unwrap();
        assert_eq!(task.outputs().unwrap().f32("y"), [2.0, 5.0]);
        assert_eq!((suite.implementations()[0].backend, bound.device_bytes(0)), (Cpu, None));
    }

    #[test]
    fn an_unknown_tensor_is_an_error_without_a_gpu() {
        let suite = copying_suite(&["n=16"], ["x", "z"]);
        let point = &suite.points(Effort::Default, DefaultScale::Host, &[]).unwrap()[0];
        let error = suite.bind(point).map(drop).unwrap_err().to_string();
        let message = "the row `cuda/theirs` takes a tensor `z`, the definition has `x`, `y`";
        assert_eq!(error, message);
    }
}
