//! A workload with its implementations, without the Rust type of its problem, so that the harness
//! can handle all workloads alike.

use std::borrow::{Borrow, Cow};
use std::sync::Arc;

use crate::backend::{
    BackendError, BackendKind, BenchDevices, Implementation, LaunchableProblem, PrepareFunction,
};
use crate::workload::{
    Axis, AxisError, AxisValuesFromCommandLine, BenchEffort, Point, Problem,
    SelectionLinesByEffort, SizeOfDefaultProblems, Tensors, Workload, axis,
};
use kernelgate_cuda::driver::memory::persistence;

/// Problems that vary one axis at a time around a central problem, with a few implementations: a
/// part of the default selection on a GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProblemsAlongEachAxis {
    /// Lines of [`axis::points_of_selection_lines`].
    pub selection_lines: &'static [&'static str],
    /// Names of the implementations that compute the points of the scan by default: the best one,
    /// and one to compare it with.
    pub default_implementations: &'static [&'static str],
}

/// A workload together with all its implementations.
pub struct WorkloadSuite {
    facts: WorkloadNameAxesAndSelections,
    implementations: Vec<ImplementationNameAndBackend>,
    create_problem: Box<CreateProblemOfPoint>,
}

type CreateProblemOfPoint =
    dyn Fn(&Point) -> Result<Box<dyn ProblemWithImplementations>, AxisError> + Send + Sync;

/// Name, revision, axes and selected problems of a workload.
pub struct WorkloadNameAxesAndSelections {
    /// Name of the workload: `family/operation`.
    pub name: &'static str,
    /// Description for one line of `kernelgate list`.
    pub about: &'static str,
    /// Revision of the workload's definition; `None` if none is declared.
    pub workload_revision: Option<u32>,
    /// Axes along which the problems of the workload vary.
    pub axes: Cow<'static, [Axis]>,
    /// Selection lines of each effort, which describe points of the workload.
    pub selection_lines: SelectionLinesByEffort,
    /// Additional points that vary one axis at a time, which only a few implementations run by
    /// default.
    pub scan_along_axes: ProblemsAlongEachAxis,
}

/// Name, description and backend of an implementation, for lists of implementations.
#[derive(Debug, Clone, Copy)]
pub struct ImplementationNameAndBackend {
    /// Name of the implementation, which is a part of the case id.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Backend (CPU or CUDA) on which the implementation runs.
    pub backend: BackendKind,
}

/// One problem of a workload, together with the implementations that may compute it.
pub trait ProblemWithImplementations {
    /// The problem.
    fn problem(&self) -> &dyn Problem;
    /// Fails if the implementation number `index` cannot compute this problem.
    ///
    /// # Errors
    /// The error states the reason, as a fragment of a sentence.
    fn check_implementation_supports_problem(&self, index: usize) -> Result<(), String>;
    /// Returns the bytes of device memory that implementation number `index` declares; `None` on
    /// the host, and if it declares none.
    fn device_bytes_declared_by_implementation(&self, index: usize) -> Option<u64>;
    /// Prepares implementation number `index` for this problem on the target's devices: loads
    /// kernels and copies inputs.
    ///
    /// # Errors
    /// Fails if the device or a kernel fails, or memory is short.
    fn prepare_implementation(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &BenchDevices,
    ) -> Result<Box<dyn LaunchableProblem>, BackendError>;
}

/// Combines a workload with its implementations, which become the rows of the result table, in the
/// order of improvement.
pub fn join_workload_with_implementations<P: Problem>(
    workload: &'static Workload<P>,
    implementations: impl IntoIterator<Item = &'static Implementation<P>>,
) -> WorkloadSuite {
    join_implementations_with_axis_scan(workload, implementations, ProblemsAlongEachAxis::default())
}

/// Combines a workload with its implementations, and adds problems that vary one axis at a time.
pub fn join_implementations_with_axis_scan<P: Problem>(
    workload: &'static Workload<P>,
    implementations: impl IntoIterator<Item = &'static Implementation<P>>,
    scan: ProblemsAlongEachAxis,
) -> WorkloadSuite {
    let facts = WorkloadNameAxesAndSelections {
        name: workload.name,
        about: workload.about,
        workload_revision: Some(workload.revision),
        axes: Cow::Borrowed(workload.axes),
        selection_lines: workload.selection_lines_by_effort(),
        scan_along_axes: scan,
    };
    WorkloadSuite::new(facts, implementations.into_iter().collect(), workload.bind)
}

impl WorkloadSuite {
    /// Makes a suite whose problems the function `bind` creates from points of the workload's axes.
    pub fn new<P: Problem, R: Borrow<Implementation<P>> + Send + Sync + 'static>(
        facts: WorkloadNameAxesAndSelections,
        implementations: Vec<R>,
        bind: impl Fn(&Point) -> Result<P, AxisError> + Send + Sync + 'static,
    ) -> Self {
        let info = |row: &R| {
            let row: &Implementation<P> = row.borrow();
            ImplementationNameAndBackend {
                name: row.implementation_name,
                about: row.description,
                backend: row.backend_of_implementation(),
            }
        };
        let rows = implementations.iter().map(info).collect();
        let implementations: Arc<[R]> = implementations.into();
        let bind = move |point: &Point| {
            let (problem, rows) = (bind(point)?, Arc::clone(&implementations));
            Ok(Box::new(ProblemAndImplementations { problem, implementations: rows })
                as Box<dyn ProblemWithImplementations>)
        };
        Self { facts, implementations: rows, create_problem: Box::new(bind) }
    }

    /// Name of the workload: `family/operation`.
    pub const fn workload_name(&self) -> &'static str {
        self.facts.name
    }

    /// Description in one line.
    pub const fn workload_description(&self) -> &'static str {
        self.facts.about
    }

    /// Returns the revision of the workload's definition, or 1 if none is declared.
    pub fn workload_revision(&self) -> u32 {
        self.facts.workload_revision.unwrap_or(1)
    }

    /// Returns the revision of the workload's definition, or `None` if none is declared.
    pub const fn declared_workload_revision(&self) -> Option<u32> {
        self.facts.workload_revision
    }

    /// Returns the axes along which the workload's problems vary.
    pub fn axes_of_workload(&self) -> &[Axis] {
        &self.facts.axes
    }

    /// Returns the implementations of the workload, from the slowest rung of its ladder to the
    /// fastest.
    pub fn implementations_of_workload(&self) -> &[ImplementationNameAndBackend] {
        &self.implementations
    }

    /// Returns the points of the workload's axes that an effort selects, with the user's axis
    /// overrides applied.
    ///
    /// # Errors
    /// Fails if an override is not allowed by the axes.
    pub fn points_selected_by_effort(
        &self,
        effort: BenchEffort,
        scale: SizeOfDefaultProblems,
        overrides: &[AxisValuesFromCommandLine],
    ) -> Result<Vec<Point>, AxisError> {
        let WorkloadNameAxesAndSelections {
            axes,
            selection_lines: lines,
            scan_along_axes: scan,
            ..
        } = &self.facts;
        let mut points = axis::points_of_selection_lines(
            axes,
            &lines.selection_lines_of_effort(effort, scale),
            overrides,
        )?;
        if scale == SizeOfDefaultProblems::HostAndAcceleratorSizes
            || effort == BenchEffort::Thorough
        {
            let scanned = axis::points_of_selection_lines(axes, scan.selection_lines, overrides)?;
            let new = scanned.into_iter().filter(|point| !points.contains(point));
            points.extend(new.collect::<Vec<_>>());
        }
        Ok(points)
    }

    /// Returns the names of the implementations that an effort runs at a point; `None` if all of
    /// them run.
    pub fn implementations_run_at_scan_point(
        &self,
        effort: BenchEffort,
        point: &Point,
    ) -> Option<&'static [&'static str]> {
        let WorkloadNameAxesAndSelections {
            axes,
            selection_lines: lines,
            scan_along_axes: scan,
            ..
        } = &self.facts;
        if effort == BenchEffort::Thorough || scan.selection_lines.is_empty() {
            return None;
        }
        let among = |lines: &[&str]| {
            axis::points_of_selection_lines(axes, lines, &[])
                .is_ok_and(|points| points.contains(point))
        };
        let whole =
            lines.selection_lines_of_effort(effort, SizeOfDefaultProblems::HostAndAcceleratorSizes);
        (among(scan.selection_lines) && !among(&whole)).then_some(scan.default_implementations)
    }

    /// Creates the problem at a point of the workload's axes.
    ///
    /// # Errors
    /// Fails if the point's values do not go together.
    pub fn problem_at_point(
        &self,
        point: &Point,
    ) -> Result<Box<dyn ProblemWithImplementations>, AxisError> {
        (self.create_problem)(point)
    }
}

struct ProblemAndImplementations<P, R> {
    problem: P,
    implementations: Arc<[R]>,
}

impl<P: Problem, R: Borrow<Implementation<P>>> ProblemAndImplementations<P, R> {
    fn implementation_with_index(&self, index: usize) -> &Implementation<P> {
        self.implementations[index].borrow()
    }
}

impl<P: Problem, R: Borrow<Implementation<P>>> ProblemWithImplementations
    for ProblemAndImplementations<P, R>
{
    fn problem(&self) -> &dyn Problem {
        &self.problem
    }

    fn check_implementation_supports_problem(&self, index: usize) -> Result<(), String> {
        (self.implementation_with_index(index).supports)(&self.problem)
    }

    fn device_bytes_declared_by_implementation(&self, index: usize) -> Option<u64> {
        self.implementation_with_index(index).declared_device_bytes(&self.problem)
    }

    fn prepare_implementation(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &BenchDevices,
    ) -> Result<Box<dyn LaunchableProblem>, BackendError> {
        let row = self.implementation_with_index(index);
        if let BenchDevices::Cuda(devices) = target {
            devices.for_each_with_context_current(|_, device| {
                persistence::restore_l2_to_state_when_opened(device)
            })?;
        }
        match (&row.prepare, target) {
            (PrepareFunction::Cpu(prepare), BenchDevices::Cpu) => {
                Ok(Box::new(prepare(&self.problem, inputs)))
            }
            (PrepareFunction::CpuByRowName(prepare), BenchDevices::Cpu) => {
                Ok(Box::new(prepare(&self.problem, row.implementation_name, inputs)))
            }
            (_, BenchDevices::Cpu) => Err(BackendError::ComputationFailed(format!(
                "{} does not run on this backend",
                row.implementation_name
            ))),
            (_, BenchDevices::Cuda(devices)) => {
                let devices = devices.first_devices(self.problem.gpus());
                Ok(Box::new(row.prepare_on_gpus(&self.problem, &inputs, &devices)?))
            }
        }
    }
}
