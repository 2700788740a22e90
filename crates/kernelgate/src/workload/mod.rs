//! Defines computations independent of any implementation: problems with inputs from a seed, an
//! fp64 reference, declared work and a tolerance.
//!
//! Code of a workload does not depend on devices, on timing, or on how implementations use threads.
//! A workload does not define how it is computed; only its reference defines the correct result.

use std::collections::BTreeMap;

pub mod axis;
pub mod breakdown;
pub mod symmetry;
pub mod work;

pub use kernelgate_numerics::{random, tensor};

pub use axis::{AcceptedAxisValues, Axis, AxisError, AxisValuesFromCommandLine, Point};
pub use breakdown::{ProblemPartForProfile, ProblemPartsForProfile, ThroughputItemUnit};
pub use symmetry::InputSymmetry;
pub use tensor::{Dtype, Tensor, TensorData, Tensors};
pub use work::{DeclaredGpuLinkWork, FlopUnit, Work};

/// A single problem of a workload: its shape, dtype and parameters are fixed.
///
/// ```
/// use kernelgate::prelude::*;
///
/// /// `out = 2 x`.
/// struct Double { n: usize }
///
/// impl Problem for Double {
///     fn inputs(&self, seed: u64) -> Tensors {
///         Tensors::new().with_tensor("x", [self.n], random::normal_values(seed, "x", self.n))
///     }
///     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
///         let out: Vec<f64> = inputs.f32_elements("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
///         vec![Expected::all("out", [self.n], out)]
///     }
///     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
///     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
///     fn host_memory_bytes(&self) -> u64 { 16 * self.n as u64 }
/// }
/// ```
pub trait Problem: Send + Sync + 'static {
    /// Generates the inputs from a seed; equal seeds give equal bits on every machine.
    fn inputs(&self, seed: u64) -> Tensors;

    /// Computes the expected outputs in fp64, of all rows or of some sampled rows.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected>;

    /// Fails if the problem cannot be computed, for example because a file is missing; every case
    /// of the problem then fails with this error.
    ///
    /// # Errors
    /// The error states the reason, as a fragment of a sentence.
    fn check_can_be_computed(&self) -> Result<(), String> {
        Ok(())
    }

    /// Returns where the expected outputs of the problem come from: by default from
    /// [`Self::reference`].
    fn source_of_expected_outputs(&self) -> SourceOfExpectedOutputs {
        SourceOfExpectedOutputs::ProblemReference
    }

    /// Returns whether the problem reads its inputs or its reference from a file. The file may
    /// change between two runs, so kernelgate then stores neither inputs nor references. All seeds
    /// then give equal data, so only the first seed is verified.
    fn reads_files(&self) -> bool {
        false
    }

    /// Returns changes of the inputs whose effect on the outputs is known; the preferred one is
    /// first. After timing, kernelgate applies the first symmetry that changes only inputs read by
    /// every launch, to verify that timed launches compute their outputs from their inputs. If the
    /// problem has no symmetry, kernelgate generates new inputs after timing and computes their
    /// reference.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        Vec::new()
    }

    /// Generates other values of the named inputs from a seed. A workload with many inputs may
    /// generate only the named ones; by default all of [`Self::inputs`] are generated.
    fn redraw_inputs(&self, names: &[&str], seed: u64) -> Tensors {
        self.inputs(seed).select_tensors_by_name(names)
    }

    /// Returns the operations, and the minimum of bytes, that one execution of the problem needs.
    fn work(&self) -> Work;

    /// Returns the number of GPUs over which one execution is distributed. Cases that need more
    /// GPUs than the machine has are skipped.
    fn gpus(&self) -> usize {
        1
    }

    /// A fact that readers of the problem's times need to know, printed before its cases; a
    /// sentence without its full stop.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Returns the named parts of the problem that `kernelgate profile` shows.
    fn breakdown(&self) -> ProblemPartsForProfile {
        ProblemPartsForProfile::default()
    }

    /// Returns the largest error that each output may have relative to the reference.
    fn tolerance(&self) -> Tolerance;

    /// Returns the tolerances of those outputs for which [`Self::tolerance`] does not hold, by
    /// output name.
    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        BTreeMap::new()
    }

    /// Returns the dtype in whose precision implementations must compute, if the tolerance alone
    /// would accept a lower precision. An implementation then fails if its error exceeds a quarter
    /// of the error from rounding the inputs to the next lower precision. The next lower precision
    /// is tf32 or f16 below f32, bf16 below f16, and fp8 (e4m3) below bf16. For this check the
    /// reference is also computed for rounded inputs, which needs the reference's memory once more.
    fn required_precision(&self) -> Option<Dtype> {
        None
    }

    /// Returns the peak of host memory that inputs and reference need, bytes; kernelgate checks it
    /// before anything is allocated. By default this peak is four times the declared bytes of a
    /// launch: inputs and outputs, and both in fp64.
    fn host_memory_bytes(&self) -> u64 {
        self.work().total_bytes().saturating_mul(4)
    }
}

/// Source of the expected outputs of a problem: the definition, another implementation, or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceOfExpectedOutputs {
    /// [`Problem::reference`].
    ProblemReference,
    /// The expected outputs are those of another implementation of the workload for the same
    /// inputs. The implementation that serves as reference is itself not verified.
    OutputsOfImplementation(&'static str),
    /// Outputs are not compared with anything: every implementation is timed, and its times are
    /// marked as unverified.
    NotCompared,
}

impl SourceOfExpectedOutputs {
    /// Returns whether outputs are not compared, because the problem has no reference.
    pub const fn has_no_reference_to_compare(self) -> bool {
        matches!(self, Self::NotCompared)
    }
}

/// The expected values of one output, or of some of its rows; several for disjoint rows of one
/// output are possible, and errors are relative to each one's largest value.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// Name of the output.
    pub output_name: String,
    /// Shape of the whole output; the last extent is the length of a row.
    pub output_shape: Vec<usize>,
    /// Indices of the rows whose expected values `values` contains, ascending; `None` for all rows.
    pub row_indices: Option<Vec<usize>>,
    /// Expected values row by row: f64, or i8 if the output must be equal exactly.
    pub expected_values: TensorData,
}

impl Expected {
    /// Makes a reference with the expected values of all rows of an output.
    pub fn all(name: &str, shape: impl Into<Vec<usize>>, values: impl Into<TensorData>) -> Self {
        Self {
            output_name: name.to_owned(),
            output_shape: shape.into(),
            row_indices: None,
            expected_values: values.into(),
        }
    }

    /// Makes the expected values of some rows of an output, if computing all rows would be too
    /// expensive.
    pub fn sampled_rows(
        name: &str,
        shape: impl Into<Vec<usize>>,
        rows: Vec<usize>,
        values: impl Into<TensorData>,
    ) -> Expected {
        Self {
            output_name: name.to_owned(),
            output_shape: shape.into(),
            row_indices: Some(rows),
            expected_values: values.into(),
        }
    }

    /// Returns the number of elements in a row of the output.
    pub fn row_elements(&self) -> usize {
        self.output_shape.last().copied().unwrap_or(1)
    }
}

/// Largest errors that a floating-point output may have relative to its reference. Integer outputs
/// must equal the reference exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Largest allowed absolute error, |out - ref|, divided by the largest |ref|.
    pub max_error: f64,
    /// Largest allowed relative L2 error, ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
}

/// A workload is a family of computations (problems) with one mathematical definition, which differ
/// in sizes, dtypes or parameters.
///
/// ```
/// # use kernelgate::prelude::*;
/// # struct Double { n: usize }
/// # impl Problem for Double {
/// #     fn inputs(&self, seed: u64) -> Tensors {
/// #         Tensors::new().with_tensor("x", [self.n], random::normal_values(seed, "x", self.n))
/// #     }
/// #     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
/// #         let out: Vec<f64> = inputs.f32_elements("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
/// #         vec![Expected::all("out", [self.n], out)]
/// #     }
/// #     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
/// #     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
/// #     fn host_memory_bytes(&self) -> u64 { 16 * self.n as u64 }
/// # }
/// const DOUBLE: Workload<Double> = Workload {
///     name: "double",
///     about: "out = 2 x",
///     revision: 1,
///     axes: &[Axis::number("n", "elements")],
///     default_selection_lines: &["n=1048576"],
///     accelerator_selection_lines: &["n=67108864"],
///     thorough_selection_lines: &["n=1000,65536"],
///     bind: |point| Ok(Double { n: point.number("n")? }),
/// };
/// assert_eq!(DOUBLE.axes[0].axis_name, "n");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Workload<P> {
    /// Name of the workload, `family/operation`, such as `attention/forward`, with which every case
    /// id begins.
    pub name: &'static str,
    /// Description of the workload in one line of `kernelgate list`.
    pub about: &'static str,
    /// Number that its author increases whenever the mathematics, the inputs or the declared work
    /// change; results of two revisions are not compared. Reference outputs are stored by revision
    /// and inputs, so a changed reference takes effect only with a new revision.
    pub revision: u32,
    /// Axes of the workload.
    pub axes: &'static [Axis],
    /// The few problems that are timed by default, as selection lines for
    /// [`axis::points_of_selection_lines`].
    pub default_selection_lines: &'static [&'static str],
    /// Problems that are timed by default on an accelerator, whose speed and caches need larger
    /// problems; empty if the default problems suit it.
    pub accelerator_selection_lines: &'static [&'static str],
    /// Selection lines of the whole sweep of problems.
    pub thorough_selection_lines: &'static [&'static str],
    /// Function that creates the problem at a point, that is, for one combination of axis values.
    pub bind: fn(&Point) -> Result<P, AxisError>,
}

/// How many problems the bench process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum BenchEffort {
    /// Quick effort: runs the default problems and times them briefly.
    Quick,
    /// Runs only the default problems.
    #[default]
    Default,
    /// Thorough effort: runs the whole sweep of problems and times them longer.
    Thorough,
}

/// Whether the default problems are sized for a host CPU or for an accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SizeOfDefaultProblems {
    /// Problem sizes for the cores of a host CPU.
    #[default]
    HostCpuSizes,
    /// Default problems also have sizes for an accelerator.
    HostAndAcceleratorSizes,
}

impl BenchEffort {
    /// Returns the name of the effort on the command line and in files.
    pub const fn effort_name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Default => "default",
            Self::Thorough => "thorough",
        }
    }
}

/// Selection lines of a workload for each effort, which [`axis::points_of_selection_lines`] turns
/// into points.
#[derive(Debug, Clone, Copy, Default)]
pub struct SelectionLinesByEffort {
    /// Selection lines of the default problems.
    pub default_selection_lines: &'static [&'static str],
    /// Selection lines of the default problems on an accelerator; empty if
    /// `default_selection_lines` suits an accelerator.
    pub accelerator_selection_lines: &'static [&'static str],
    /// Selection lines of the additional problems in the thorough sweep.
    pub thorough_selection_lines: &'static [&'static str],
}

impl SelectionLinesByEffort {
    /// Returns the selection lines that an effort uses, for problems of the given scale.
    pub fn selection_lines_of_effort(
        &self,
        effort: BenchEffort,
        scale: SizeOfDefaultProblems,
    ) -> Vec<&'static str> {
        match (effort, scale) {
            (
                BenchEffort::Quick | BenchEffort::Default,
                SizeOfDefaultProblems::HostAndAcceleratorSizes,
            ) if !self.accelerator_selection_lines.is_empty() => {
                self.accelerator_selection_lines.to_vec()
            }
            (BenchEffort::Quick | BenchEffort::Default, _) => self.default_selection_lines.to_vec(),
            // The thorough sweep includes the default problems, so that a filter for a default case
            // finds it at any effort.
            (BenchEffort::Thorough, _) => [
                self.default_selection_lines,
                self.accelerator_selection_lines,
                self.thorough_selection_lines,
            ]
            .concat(),
        }
    }
}

impl<P> Workload<P> {
    /// Returns the selection lines of each effort.
    pub const fn selection_lines_by_effort(&self) -> SelectionLinesByEffort {
        let Self {
            default_selection_lines,
            accelerator_selection_lines,
            thorough_selection_lines,
            ..
        } = *self;
        SelectionLinesByEffort {
            default_selection_lines,
            accelerator_selection_lines,
            thorough_selection_lines,
        }
    }

    /// Returns the points that an effort selects, with the user's axis overrides applied.
    ///
    /// # Errors
    /// Fails if an override names no axis of the workload or a value that the axis does not accept.
    pub fn points_selected_by_effort(
        &self,
        effort: BenchEffort,
        scale: SizeOfDefaultProblems,
        overrides: &[AxisValuesFromCommandLine],
    ) -> Result<Vec<Point>, AxisError> {
        axis::points_of_selection_lines(
            self.axes,
            &self.selection_lines_by_effort().selection_lines_of_effort(effort, scale),
            overrides,
        )
    }
}
