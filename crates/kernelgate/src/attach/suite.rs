//! Attached rows as a suite.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::definition::{Declared, Definition};
use super::problem::Bound;
use super::row::{self, At, Launches};
use crate::backend::cuda::{CudaTask, Device, Input, Output};
use crate::backend::{BackendError, BackendKind, Executable, Target};
use crate::suite::{BoundProblem, ImplementationInfo, Suite};
use crate::workload::{Axis, AxisError, Effort, Override, Point, Problem, Scale, Tensors, axis};
use kernelgate_cuda::driver::{memory, persistence};

/// A workload whose rows are closures over a raw stream.
pub struct Attached {
    name: &'static str,
    about: &'static str,
    axes: &'static [Axis],
    points: &'static [&'static str],
    define: Box<Define>,
    rows: Vec<Row>,
}

type Define = dyn Fn(&Point) -> Result<Definition, AxisError> + Send + Sync;
type Prepare = dyn Fn(&At<'_>) -> Result<Launches, BackendError> + Send + Sync;

struct Row {
    name: &'static str,
    prepare: Box<Prepare>,
}

impl Attached {
    /// A workload of that name (`family/operation`, the start of every id), at these points:
    /// `&["n=1024,4096 layout=row"]`. An axis whose values are all numbers takes any number,
    /// another one the words that are here.
    pub fn new(name: &'static str, points: &'static [&'static str]) -> Self {
        let axes = Box::leak(axes_of(points).into_boxed_slice());
        let define = Box::new(|_: &Point| Ok(Definition::new()));
        Self { name, about: "attached", axes, points, define, rows: Vec::new() }
    }

    /// One line for `kernelgate list`.
    pub fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    /// What a point computes.
    pub fn define(
        self,
        define: impl Fn(&Point) -> Result<Definition, AxisError> + Send + Sync + 'static,
    ) -> Self {
        Self { define: Box::new(define), ..self }
    }

    /// A row, `cuda/…`: `prepare` loads what it launches, once, and returns the closure that does.
    pub fn row(
        mut self,
        name: &'static str,
        prepare: impl Fn(&At<'_>) -> Result<Launches, BackendError> + Send + Sync + 'static,
    ) -> Self {
        self.rows.push(Row { name, prepare: Box::new(prepare) });
        self
    }

    /// For [`Harness::new`](crate::harness::Harness::new).
    pub fn suite(self) -> Box<dyn Suite> {
        Box::new(self)
    }
}

/// The axes that lines of [`axis::expand`] name, in their order.
fn axes_of(points: &'static [&'static str]) -> Vec<Axis> {
    let mut axes: Vec<(&'static str, Vec<&'static str>)> = Vec::new();
    for part in points.iter().flat_map(|line| line.split_whitespace()) {
        let (name, values) = part.split_once('=').unwrap_or((part, ""));
        let index = axes.iter().position(|(known, _)| *known == name).unwrap_or(axes.len());
        if index == axes.len() {
            axes.push((name, Vec::new()));
        }
        for value in
            values.split(',').filter(|value| !axes[index].1.contains(value)).collect::<Vec<_>>()
        {
            axes[index].1.push(value);
        }
    }
    let axis = |(name, values): (&'static str, Vec<&'static str>)| {
        if values.iter().all(|value| value.parse::<u64>().is_ok()) {
            return Axis::number(name, "");
        }
        Axis::one_of(name, Box::leak(values.into_boxed_slice()), "")
    };
    axes.into_iter().map(axis).collect()
}

impl Suite for Attached {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn revision(&self) -> u32 {
        1
    }

    fn axes(&self) -> &'static [Axis] {
        self.axes
    }

    fn implementations(&self) -> Vec<ImplementationInfo> {
        let info = |row: &Row| ImplementationInfo {
            name: row.name,
            about: "attached",
            backend: BackendKind::Cuda,
        };
        self.rows.iter().map(info).collect()
    }

    fn points(
        &self,
        _effort: Effort,
        _scale: Scale,
        overrides: &[Override],
    ) -> Result<Vec<Point>, AxisError> {
        axis::expand(self.axes, self.points, overrides)
    }

    fn bind(&self, point: &Point) -> Result<Box<dyn BoundProblem + '_>, AxisError> {
        let bound = Bound::new((self.define)(point)?);
        Ok(Box::new(AttachedProblem { bound, point: point.clone(), rows: &self.rows }))
    }
}

struct AttachedProblem<'a> {
    bound: Bound,
    point: Point,
    rows: &'a [Row],
}

impl AttachedProblem<'_> {
    fn task(
        &self,
        row: &Row,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<CudaTask, BackendError> {
        let Definition { outputs, .. } = &self.bound.definition;
        let mut buffers = BTreeMap::new();
        for Declared { name, .. } in &self.bound.definition.inputs {
            buffers.insert(*name, device.upload(inputs.tensor(name).as_bytes())?);
        }
        let allocate = |declared: &Declared| {
            let Declared { name, shape, dtype } = declared;
            Ok((*name, Output::new(device, name, shape.clone(), *dtype)?))
        };
        let outputs = outputs.iter().map(allocate).collect::<Result<Vec<_>, BackendError>>()?;
        let (point, inputs) = (&self.point, &buffers);
        let launches = (row.prepare)(&At { point, device, inputs, outputs: &outputs })?;
        let Launches { mut launch, reset, reads } = launches;
        let reads = reads.unwrap_or_else(|| buffers.keys().map(|&name| name.to_owned()).collect());
        let input = |name: &String| {
            let buffer = buffers.get(name.as_str()).ok_or_else(|| row::missing("input", name))?;
            Ok(Input::new(name, buffer))
        };
        let inputs = reads.iter().map(input).collect::<Result<Vec<_>, BackendError>>()?;
        let outputs = outputs.into_iter().map(|(_, output)| output).collect();
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
}

impl BoundProblem for AttachedProblem<'_> {
    fn problem(&self) -> &dyn Problem {
        &self.bound
    }

    fn supports(&self, _index: usize) -> Result<(), String> {
        Ok(())
    }

    fn device_bytes(&self, _index: usize) -> Option<u64> {
        Some(self.bound.device_bytes())
    }

    fn prepare(
        &self,
        index: usize,
        inputs: Arc<Tensors>,
        target: &Target,
    ) -> Result<Box<dyn Executable>, BackendError> {
        let row = &self.rows[index];
        let Target::Cuda(devices) = target else {
            return Err(BackendError::Launch(format!("{} does not run on this backend", row.name)));
        };
        devices.iter().try_for_each(|device| persistence::restore(device))?;
        let device = devices.one();
        memory::require(device, self.bound.device_bytes())?;
        Ok(Box::new(self.task(row, &inputs, device)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_those_of_the_points() {
        let lines = &["n=16,32 layout=row", "n=64 layout=column,row"];
        let attached = Attached::new("mine/axpy", lines);
        let names: Vec<&str> = attached.axes().iter().map(|axis| axis.name).collect();
        assert_eq!(names, ["n", "layout"]);
        let points = |overrides: &[Override]| {
            let points = attached.points(Effort::Default, Scale::Host, overrides)?;
            Ok::<_, AxisError>(points.iter().map(Point::to_string).collect::<Vec<_>>())
        };
        assert_eq!(points(&[]).unwrap(), ["n16_row", "n32_row", "n64_column", "n64_row"]);
        assert_eq!(points(&["n=7".parse().unwrap()]).unwrap(), ["n7_row", "n7_column"]);
        assert!(points(&["layout=tiled".parse().unwrap()]).is_err());
    }
}
