//! Definition of a computation: problems with seeded inputs, an fp64 reference, declared work and a
//! tolerance.
//!
//! Workloads deliberately know no devices, no timing and no threads of an implementation. A
//! workload does not know how it is computed; its reference is the only definition of the correct
//! result.

use std::collections::BTreeMap;

pub mod axis;
pub mod breakdown;
pub mod symmetry;
pub mod work;

pub use kernelgate_numerics::{random, tensor};

pub use axis::{Axis, AxisError, AxisOverride, AxisValues, Point};
pub use breakdown::{Breakdown, BreakdownPart, SampleUnit};
pub use symmetry::Symmetry;
pub use tensor::{Dtype, Tensor, TensorData, Tensors};
pub use work::{FlopUnit, GpuLinkWork, Work};

/// A workload with its shape, dtype and parameters bound.
///
/// ```
/// use kernelgate::prelude::*;
///
/// /// `out = 2 x`.
/// struct Double { n: usize }
///
/// impl Problem for Double {
///     fn inputs(&self, seed: u64) -> Tensors {
///         Tensors::new().with("x", [self.n], random::normal_values(seed, "x", self.n))
///     }
///     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
///         let out: Vec<f64> = inputs.f32("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
///         vec![Expected::all("out", [self.n], out)]
///     }
///     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
///     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
///     fn host_bytes(&self) -> u64 { 16 * self.n as u64 }
/// }
/// ```
pub trait Problem: Send + Sync + 'static {
    /// Draws the inputs from a seed: equal seeds give equal bits on every machine.
    fn inputs(&self, seed: u64) -> Tensors;

    /// Computes the expected outputs in fp64, or some sampled rows of them.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected>;

    /// Checks whether the problem can be computed at all; an obstacle, such as a missing file, is
    /// an error of every case.
    ///
    /// # Errors
    /// The error states the reason, as a fragment of a sentence.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Source of the expected outputs of the problem: [`Self::reference`] by default.
    fn reference_from(&self) -> ReferenceSource {
        ReferenceSource::Definition
    }

    /// Returns whether the inputs or the reference are read from a file. The file may change
    /// between two runs, so neither inputs nor references are kept elsewhere. All seeds then have
    /// one data set: only the first seed has a reference and counts.
    fn reads_files(&self) -> bool {
        false
    }

    /// Changes of inputs whose effect on the outputs is known, the best first. After timing, the
    /// first symmetry that changes only inputs that every launch reads shows that the timed launch
    /// still computes its outputs from its inputs. Without a symmetry, inputs are drawn anew for
    /// the check after timing, and their reference is computed.
    fn symmetries(&self) -> Vec<Symmetry> {
        Vec::new()
    }

    /// Draws other values of the named inputs from a seed. A workload with many inputs may draw
    /// only the named ones instead of all of [`Self::inputs`].
    fn redraw(&self, names: &[&str], seed: u64) -> Tensors {
        self.inputs(seed).select_named(names)
    }

    /// Operations and fewest bytes of one execution.
    fn work(&self) -> Work;

    /// Number of GPUs that one execution is spread over. Cases that need more GPUs than the machine
    /// has are skipped.
    fn gpus(&self) -> usize {
        1
    }

    /// A fact that a reader of its times has to know, a sentence without its end; printed before
    /// its cases.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Returns the parts of the problem that `kernelgate profile` shows.
    fn breakdown(&self) -> Breakdown {
        Breakdown::default()
    }

    /// Returns the error that each output may have relative to the reference.
    fn tolerance(&self) -> Tolerance;

    /// Returns the tolerances of outputs that differ from [`Self::tolerance`], by output name.
    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        BTreeMap::new()
    }

    /// Precision in which implementations must compute, if the tolerance would accept a lower
    /// precision. Rows are then wrong if they deviate by more than a quarter of the error from
    /// rounding the inputs to the next lower precision (tf32 and f16 below f32, bf16 below f16, fp8
    /// below bf16). The precision check also computes the reference of rounded inputs, which needs
    /// as much memory again.
    fn precision(&self) -> Option<Dtype> {
        None
    }

    /// Host memory that inputs and reference need at their peak, in bytes; checked before anything
    /// is allocated. By default four times the bytes of a launch: inputs, outputs and fp64 of both.
    fn host_bytes(&self) -> u64 {
        self.work().total_bytes().saturating_mul(4)
    }
}

/// Source of the expected outputs of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReferenceSource {
    /// [`Problem::reference`].
    Definition,
    /// The expected outputs are those of another implementation for the same inputs. The
    /// implementation that serves as the reference is itself unverified.
    Row(&'static str),
    /// Outputs are not compared: every row is timed, and marked as unverified.
    Nothing,
}

impl ReferenceSource {
    /// Returns whether the outputs have no reference to be compared with.
    pub const fn is_without_reference(self) -> bool {
        matches!(self, Self::Nothing)
    }
}

/// The reference of one output, or of some of its rows: an output may have several, of disjoint
/// rows, each held to the magnitude of its own values.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// Name of the output.
    pub name: String,
    /// Shape of the whole output; its last extent is the length of a row.
    pub shape: Vec<usize>,
    /// Indices of the rows that `values` holds, ascending; `None` if it holds all rows.
    pub rows: Option<Vec<usize>>,
    /// Expected values, row after row: f64, or i8 if the comparison is exact.
    pub values: TensorData,
}

impl Expected {
    /// Makes the expected values of a whole output.
    pub fn all(name: &str, shape: impl Into<Vec<usize>>, values: impl Into<TensorData>) -> Self {
        Self { name: name.to_owned(), shape: shape.into(), rows: None, values: values.into() }
    }

    /// Expected values of some rows of an output, if computing the whole output is too expensive.
    pub fn sampled_rows(
        name: &str,
        shape: impl Into<Vec<usize>>,
        rows: Vec<usize>,
        values: impl Into<TensorData>,
    ) -> Expected {
        Self { name: name.to_owned(), shape: shape.into(), rows: Some(rows), values: values.into() }
    }

    /// Elements in a row.
    pub fn row_elements(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// Largest error that an output may have relative to its reference. Integer outputs are compared
/// exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Largest allowed |out - ref| over the largest |ref|.
    pub max_error: f64,
    /// Largest allowed ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
}

/// A workload: a family of computations with one mathematical definition.
///
/// ```
/// # use kernelgate::prelude::*;
/// # struct Double { n: usize }
/// # impl Problem for Double {
/// #     fn inputs(&self, seed: u64) -> Tensors {
/// #         Tensors::new().with("x", [self.n], random::normal_values(seed, "x", self.n))
/// #     }
/// #     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
/// #         let out: Vec<f64> = inputs.f32("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
/// #         vec![Expected::all("out", [self.n], out)]
/// #     }
/// #     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
/// #     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
/// #     fn host_bytes(&self) -> u64 { 16 * self.n as u64 }
/// # }
/// const DOUBLE: Workload<Double> = Workload {
///     name: "double",
///     about: "out = 2 x",
///     revision: 1,
///     axes: &[Axis::number("n", "elements")],
///     default: &["n=1048576"],
///     accelerator: &["n=67108864"],
///     thorough: &["n=1000,65536"],
///     bind: |point| Ok(Double { n: point.number("n")? }),
/// };
/// assert_eq!(DOUBLE.axes[0].name, "n");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Workload<P> {
    /// Name of the workload, `family/operation`, for example `attention/forward`: the beginning of
    /// every case id.
    pub name: &'static str,
    /// Description of the workload in one line of `kernelgate list`.
    pub about: &'static str,
    /// Grows when the mathematics, the inputs or the declared work change: results of two
    /// revisions are not comparable. References are kept on disk by revision and inputs, so that a
    /// change of the reference without another revision has no effect.
    pub revision: u32,
    /// Axes of the workload.
    pub axes: &'static [Axis],
    /// The few problems that are timed by default: lines of [`axis::expand_points`].
    pub default: &'static [&'static str],
    /// Selection lines for a device a thousand times faster, whose memory and caches need larger
    /// problems; empty if the default problems suit it.
    pub accelerator: &'static [&'static str],
    /// The whole sweep.
    pub thorough: &'static [&'static str],
    /// Function that makes the problem at a point of the axes.
    pub bind: fn(&Point) -> Result<P, AxisError>,
}

/// How much to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Effort {
    /// Effort that runs the default problems and times them briefly.
    Quick,
    /// The default problems.
    #[default]
    Default,
    /// Effort that runs the whole sweep of problems and times them longer.
    Thorough,
}

/// Whether default problems are sized for a CPU or for an accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DefaultScale {
    /// Sizes for the cores of a host.
    #[default]
    Host,
    /// Sizes for an accelerator.
    Accelerator,
}

impl Effort {
    /// The name used on the command line and in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Default => "default",
            Self::Thorough => "thorough",
        }
    }
}

/// Selection lines of each effort, which [`axis::expand_points`] turns into points.
#[derive(Debug, Clone, Copy, Default)]
pub struct SelectionLines {
    /// Selection lines of the default effort.
    pub default: &'static [&'static str],
    /// Selection lines of the default effort on an accelerator; empty if the default problems suit
    /// it.
    pub accelerator: &'static [&'static str],
    /// Selection lines of the whole sweep.
    pub thorough: &'static [&'static str],
}

impl SelectionLines {
    /// Returns the selection lines that an effort uses.
    pub fn select(&self, effort: Effort, scale: DefaultScale) -> Vec<&'static str> {
        match (effort, scale) {
            (Effort::Quick | Effort::Default, DefaultScale::Accelerator)
                if !self.accelerator.is_empty() =>
            {
                self.accelerator.to_vec()
            }
            (Effort::Quick | Effort::Default, _) => self.default.to_vec(),
            // The default problems are part of the thorough sweep, so that a filter finds them at
            // any effort.
            (Effort::Thorough, _) => [self.default, self.accelerator, self.thorough].concat(),
        }
    }
}

impl<P> Workload<P> {
    /// Points of each effort.
    pub const fn lines(&self) -> SelectionLines {
        let Self { default, accelerator, thorough, .. } = *self;
        SelectionLines { default, accelerator, thorough }
    }

    /// The points that an effort selects, with the overrides applied.
    ///
    /// # Errors
    /// Fails if an override names no axis of the workload or a value that the axis does not accept.
    pub fn points(
        &self,
        effort: Effort,
        scale: DefaultScale,
        overrides: &[AxisOverride],
    ) -> Result<Vec<Point>, AxisError> {
        axis::expand_points(self.axes, &self.lines().select(effort, scale), overrides)
    }
}
