//! A workload with its implementations, without the type of its problem: the unit that the harness
//! and the command line go over.

use std::borrow::{Borrow, Cow};
use std::sync::Arc;

use crate::backend::{BackendError, BackendKind, BenchTarget, Executable, Implementation, Prepare};
use crate::workload::{
    Axis, AxisError, AxisOverride, DefaultScale, Effort, Point, Problem, SelectionLines, Tensors,
    Workload, axis,
};
use kernelgate_cuda::driver::memory::persistence;

/// Problems that vary one axis at a time around a central problem, with a few rows each: part of
/// the default selection on an accelerator.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScanAlongAxes {
    /// Lines of [`axis::expand_points`].
    pub lines: &'static [&'static str],
    /// Implementations that compute the points of the scan by default: the best one, and one to
    /// compare it with.
    pub rows: &'static [&'static str],
}

/// A suite: a workload with all its implementations.
pub struct Suite {
    facts: WorkloadFacts,
    rows: Vec<ImplementationInfo>,
    bind: Box<BindProblem>,
}

type BindProblem = dyn Fn(&Point) -> Result<Box<dyn BoundProblem>, AxisError> + Send + Sync;

/// Name, axes and selections of a workload.
pub struct WorkloadFacts {
    /// `family/operation`.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Revision of the definition, if one is declared.
    pub revision: Option<u32>,
    /// Axes along which the problems of the workload vary.
    pub axes: Cow<'static, [Axis]>,
    /// Points of each effort.
    pub lines: SelectionLines,
    /// Additional points of the axes, which only a few implementations run.
    pub scan: ScanAlongAxes,
}

/// An implementation in lists.
#[derive(Debug, Clone, Copy)]
pub struct ImplementationInfo {
    /// Name of the implementation, a part of the case id.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The backend on which the implementation runs.
    pub backend: BackendKind,
}

/// A problem of a workload with the implementations that may compute it.
pub trait BoundProblem {
    /// The problem.
    fn problem(&self) -> &dyn Problem;
    /// Checks whether the implementation number `index` computes this problem.
    ///
    /// # Errors
    /// The error states the reason, as a fragment of a sentence.
    fn supports(&self, index: usize) -> Result<(), String>;
    /// Device memory that implementation `index` declares, bytes; `None` on the host and if it
    /// declares none.
    fn device_bytes(&self, index: usize) -> Option<u64>;
    /// Makes implementation `index` ready on the target, which is of the implementation's kind.
    ///
    /// # Errors
    /// Fails if the device or a kernel fails, or memory is short.
    fn prepare_implementation(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &BenchTarget,
    ) -> Result<Box<dyn Executable>, BackendError>;
}

/// Joins a workload with its implementations, in the order of the ladder of improvements.
pub fn join_rows<P: Problem>(
    workload: &'static Workload<P>,
    implementations: impl IntoIterator<Item = &'static Implementation<P>>,
) -> Suite {
    suite_with_scan(workload, implementations, ScanAlongAxes::default())
}

/// Joins a workload and its implementations, and adds a scan along axes.
pub fn suite_with_scan<P: Problem>(
    workload: &'static Workload<P>,
    implementations: impl IntoIterator<Item = &'static Implementation<P>>,
    scan: ScanAlongAxes,
) -> Suite {
    let facts = WorkloadFacts {
        name: workload.name,
        about: workload.about,
        revision: Some(workload.revision),
        axes: Cow::Borrowed(workload.axes),
        lines: workload.lines(),
        scan,
    };
    Suite::new(facts, implementations.into_iter().collect(), workload.bind)
}

impl Suite {
    /// Makes a suite for a workload whose problems `bind` creates from points of its axes.
    pub fn new<P: Problem, R: Borrow<Implementation<P>> + Send + Sync + 'static>(
        facts: WorkloadFacts,
        implementations: Vec<R>,
        bind: impl Fn(&Point) -> Result<P, AxisError> + Send + Sync + 'static,
    ) -> Self {
        let info = |row: &R| {
            let row: &Implementation<P> = row.borrow();
            ImplementationInfo { name: row.name, about: row.about, backend: row.backend() }
        };
        let rows = implementations.iter().map(info).collect();
        let implementations: Arc<[R]> = implementations.into();
        let bind = move |point: &Point| {
            let (problem, rows) = (bind(point)?, Arc::clone(&implementations));
            Ok(Box::new(BoundWorkload { problem, rows }) as Box<dyn BoundProblem>)
        };
        Self { facts, rows, bind: Box::new(bind) }
    }

    /// `family/operation`.
    pub const fn name(&self) -> &'static str {
        self.facts.name
    }

    /// One line.
    pub const fn about(&self) -> &'static str {
        self.facts.about
    }

    /// Returns the revision of the workload's definition; 1 if none is declared.
    pub fn revision(&self) -> u32 {
        self.facts.revision.unwrap_or(1)
    }

    /// Revision of the definition, if one is declared.
    pub const fn declared_revision(&self) -> Option<u32> {
        self.facts.revision
    }

    /// Returns the axes along which the workload's problems vary.
    pub fn axes(&self) -> &[Axis] {
        &self.facts.axes
    }

    /// Implementations, in ladder order.
    pub fn implementations(&self) -> &[ImplementationInfo] {
        &self.rows
    }

    /// The points that an effort selects.
    ///
    /// # Errors
    /// Fails if an override is not allowed by the axes.
    pub fn points(
        &self,
        effort: Effort,
        scale: DefaultScale,
        overrides: &[AxisOverride],
    ) -> Result<Vec<Point>, AxisError> {
        let WorkloadFacts { axes, lines, scan, .. } = &self.facts;
        let mut points = axis::expand_points(axes, &lines.select(effort, scale), overrides)?;
        if scale == DefaultScale::Accelerator || effort == Effort::Thorough {
            let scanned = axis::expand_points(axes, scan.lines, overrides)?;
            let new = scanned.into_iter().filter(|point| !points.contains(point));
            points.extend(new.collect::<Vec<_>>());
        }
        Ok(points)
    }

    /// Names of the implementations that an effort selects for a point; `None` selects all of them.
    pub fn scan_rows(&self, effort: Effort, point: &Point) -> Option<&'static [&'static str]> {
        let WorkloadFacts { axes, lines, scan, .. } = &self.facts;
        if effort == Effort::Thorough || scan.lines.is_empty() {
            return None;
        }
        let among = |lines: &[&str]| {
            axis::expand_points(axes, lines, &[]).is_ok_and(|points| points.contains(point))
        };
        let whole = lines.select(effort, DefaultScale::Accelerator);
        (among(scan.lines) && !among(&whole)).then_some(scan.rows)
    }

    /// Makes the problem of a point.
    ///
    /// # Errors
    /// Fails if the point's values do not go together.
    pub fn bind(&self, point: &Point) -> Result<Box<dyn BoundProblem>, AxisError> {
        (self.bind)(point)
    }
}

struct BoundWorkload<P, R> {
    problem: P,
    rows: Arc<[R]>,
}

impl<P: Problem, R: Borrow<Implementation<P>>> BoundWorkload<P, R> {
    fn row(&self, index: usize) -> &Implementation<P> {
        self.rows[index].borrow()
    }
}

impl<P: Problem, R: Borrow<Implementation<P>>> BoundProblem for BoundWorkload<P, R> {
    fn problem(&self) -> &dyn Problem {
        &self.problem
    }

    fn supports(&self, index: usize) -> Result<(), String> {
        (self.row(index).supports)(&self.problem)
    }

    fn device_bytes(&self, index: usize) -> Option<u64> {
        self.row(index).device_bytes(&self.problem)
    }

    fn prepare_implementation(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &BenchTarget,
    ) -> Result<Box<dyn Executable>, BackendError> {
        let row = self.row(index);
        if let BenchTarget::Cuda(devices) = target {
            devices.for_each_device(|_, device| persistence::restore_l2_state(device))?;
        }
        match (&row.prepare, target) {
            (Prepare::Cpu(prepare), BenchTarget::Cpu) => {
                Ok(Box::new(prepare(&self.problem, inputs)))
            }
            (Prepare::CpuByName(prepare), BenchTarget::Cpu) => {
                Ok(Box::new(prepare(&self.problem, row.name, inputs)))
            }
            (_, BenchTarget::Cpu) => {
                Err(BackendError::Launch(format!("{} does not run on this backend", row.name)))
            }
            (_, BenchTarget::Cuda(devices)) => {
                let devices = devices.first(self.problem.gpus());
                Ok(Box::new(row.prepare_on(&self.problem, &inputs, &devices)?))
            }
        }
    }
}
