//! A workload with its implementations, with the problem's type erased: what the harness and the
//! command line walk over.

use std::sync::Arc;

use crate::backend::{BackendError, BackendKind, Executable, Implementation, Prepare, Target};
use crate::workload::{
    Axis, AxisError, Effort, Override, Point, Problem, Scale, Tensors, Workload, axis,
};
use kernelgate_cuda::driver::persistence;

/// Problems along one axis after another around a central one, for which a few rows are enough:
/// part of the default selection on an accelerator.
#[derive(Debug, Clone, Copy)]
pub struct AxisScan {
    /// Lines of [`axis::expand`].
    pub lines: &'static [&'static str],
    /// Implementations that compute them by default: the best, and one to compare it with.
    pub rows: &'static [&'static str],
}

/// A workload and its implementations.
pub trait Suite: Sync {
    /// `family/operation`.
    fn name(&self) -> &'static str;
    /// One line.
    fn about(&self) -> &'static str;
    /// Revision of the definition.
    fn revision(&self) -> u32;
    /// What can vary.
    fn axes(&self) -> &'static [Axis];
    /// Name, description and backend of each implementation, in ladder order.
    fn implementations(&self) -> Vec<ImplementationInfo>;
    /// The points that an effort selects.
    ///
    /// # Errors
    /// On an override that the axes do not allow.
    fn points(
        &self,
        effort: Effort,
        scale: Scale,
        overrides: &[Override],
    ) -> Result<Vec<Point>, AxisError>;
    /// The implementations that an effort selects for a point; `None`: all of them.
    fn scan_rows(&self, _effort: Effort, _point: &Point) -> Option<&'static [&'static str]> {
        None
    }
    /// The problem of a point.
    ///
    /// # Errors
    /// When the point's values do not go together.
    fn bind(&self, point: &Point) -> Result<Box<dyn BoundProblem + '_>, AxisError>;
}

/// What `list` shows of an implementation.
#[derive(Debug, Clone, Copy)]
pub struct ImplementationInfo {
    /// Name, part of the case id.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The backend it runs on.
    pub backend: BackendKind,
}

/// A problem and the implementations that may compute it.
pub trait BoundProblem {
    /// The problem.
    fn problem(&self) -> &dyn Problem;
    /// Whether implementation `index` computes this problem, or the reason why not.
    ///
    /// # Errors
    /// The reason, as a fragment.
    fn supports(&self, index: usize) -> Result<(), String>;
    /// Device memory that implementation `index` declares, bytes; `None` on the host and where
    /// nothing is declared.
    fn device_bytes(&self, index: usize) -> Option<u64>;
    /// Makes implementation `index` ready on the target, which is of the implementation's kind.
    ///
    /// # Errors
    /// When the device or a kernel fails, or memory is short.
    fn prepare(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &Target,
    ) -> Result<Box<dyn Executable>, BackendError>;
}

/// Joins a workload and its implementations, in ladder order.
pub fn suite<P: Problem>(
    workload: &'static Workload<P>,
    implementations: impl IntoIterator<Item = &'static Implementation<P>>,
) -> Box<dyn Suite> {
    suite_with_scan(workload, implementations, AxisScan { lines: &[], rows: &[] })
}

/// The same with a scan along axes.
pub fn suite_with_scan<P: Problem>(
    workload: &'static Workload<P>,
    implementations: impl IntoIterator<Item = &'static Implementation<P>>,
    scan: AxisScan,
) -> Box<dyn Suite> {
    Box::new(Typed { workload, implementations: implementations.into_iter().collect(), scan })
}

struct Typed<P: 'static> {
    workload: &'static Workload<P>,
    implementations: Vec<&'static Implementation<P>>,
    scan: AxisScan,
}

struct TypedBound<'a, P: 'static> {
    problem: P,
    implementations: &'a [&'static Implementation<P>],
}

impl<P: Problem> Suite for Typed<P> {
    fn name(&self) -> &'static str {
        self.workload.name
    }

    fn about(&self) -> &'static str {
        self.workload.about
    }

    fn revision(&self) -> u32 {
        self.workload.revision
    }

    fn axes(&self) -> &'static [Axis] {
        self.workload.axes
    }

    fn implementations(&self) -> Vec<ImplementationInfo> {
        self.implementations
            .iter()
            .map(|row| ImplementationInfo {
                name: row.name,
                about: row.about,
                backend: row.backend(),
            })
            .collect()
    }

    fn points(
        &self,
        effort: Effort,
        scale: Scale,
        overrides: &[Override],
    ) -> Result<Vec<Point>, AxisError> {
        let mut points = self.workload.points(effort, scale, overrides)?;
        if scale == Scale::Accelerator || effort == Effort::Thorough {
            let scanned = axis::expand(self.workload.axes, self.scan.lines, overrides)?;
            let new = scanned.into_iter().filter(|point| !points.contains(point));
            points.extend(new.collect::<Vec<_>>());
        }
        Ok(points)
    }

    fn scan_rows(&self, effort: Effort, point: &Point) -> Option<&'static [&'static str]> {
        if effort == Effort::Thorough || self.scan.lines.is_empty() {
            return None;
        }
        let among = |points: Result<Vec<Point>, _>| points.is_ok_and(|all| all.contains(point));
        let scanned = among(axis::expand(self.workload.axes, self.scan.lines, &[]));
        let whole = among(self.workload.points(effort, Scale::Accelerator, &[]));
        (scanned && !whole).then_some(self.scan.rows)
    }

    fn bind(&self, point: &Point) -> Result<Box<dyn BoundProblem + '_>, AxisError> {
        Ok(Box::new(TypedBound {
            problem: (self.workload.bind)(point)?,
            implementations: &self.implementations,
        }))
    }
}

impl<P: Problem> BoundProblem for TypedBound<'_, P> {
    fn problem(&self) -> &dyn Problem {
        &self.problem
    }

    fn supports(&self, index: usize) -> Result<(), String> {
        (self.implementations[index].supports)(&self.problem)
    }

    fn device_bytes(&self, index: usize) -> Option<u64> {
        self.implementations[index].device_bytes(&self.problem)
    }

    fn prepare(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &Target,
    ) -> Result<Box<dyn Executable>, BackendError> {
        let row = self.implementations[index];
        if let Target::Cuda(devices) = target {
            devices.iter().try_for_each(|device| persistence::restore(device))?;
        }
        match (&row.prepare, target) {
            (Prepare::Cpu(prepare), Target::Cpu) => Ok(Box::new(prepare(&self.problem, inputs))),
            (Prepare::Cpu(_), Target::Cuda(_)) | (_, Target::Cpu) => {
                Err(BackendError::Launch(format!("{} does not run on this backend", row.name)))
            }
            (_, Target::Cuda(devices)) => {
                Ok(Box::new(row.prepare_cuda(&self.problem, &inputs, devices.one())?))
            }
        }
    }
}
