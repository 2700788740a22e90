//! A workload with its implementations, with the problem's type erased: what the harness and the
//! command line walk over.

use std::sync::Arc;

use crate::backend::{BackendError, BackendKind, Executable, Implementation, Prepare, Target};
use crate::workload::{
    Axis, AxisError, Effort, Override, Point, Problem, Scale, Tensors, Workload,
};
use kernelgate_cuda::driver::{memory, persistence};

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
    Box::new(Typed { workload, implementations: implementations.into_iter().collect() })
}

struct Typed<P: 'static> {
    workload: &'static Workload<P>,
    implementations: Vec<&'static Implementation<P>>,
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
        self.workload.points(effort, scale, overrides)
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
        match self.implementations[index].prepare {
            Prepare::CudaWithin { device_bytes, .. } => Some(device_bytes(&self.problem)),
            Prepare::Cpu(_) | Prepare::Cuda(_) => None,
        }
    }

    fn prepare(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &Target,
    ) -> Result<Box<dyn Executable>, BackendError> {
        let row = self.implementations[index];
        if let Target::Cuda(device) = target {
            persistence::reset(device)?;
        }
        match (&row.prepare, target) {
            (Prepare::Cpu(prepare), Target::Cpu) => Ok(Box::new(prepare(&self.problem, inputs))),
            (Prepare::Cuda(prepare), Target::Cuda(device)) => {
                Ok(Box::new(prepare(&self.problem, &inputs, device)?))
            }
            (Prepare::CudaWithin { device_bytes, prepare }, Target::Cuda(device)) => {
                memory::require(device, device_bytes(&self.problem))?;
                Ok(Box::new(prepare(&self.problem, &inputs, device)?))
            }
            _ => Err(BackendError::Launch(format!("{} does not run on this backend", row.name))),
        }
    }
}
