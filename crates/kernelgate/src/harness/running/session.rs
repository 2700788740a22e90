//! The steps in which bench, test and trial processes differ while they run cases.

use super::case_error::CaseError;
use super::problem::{PreparedProblem, Verified};
use super::sampling::Sampler;
use crate::backend::Target;
use crate::harness::recording::recorder::Event;
use crate::harness::selection::cases::{Case, Group};
use crate::measure::limits::Limits;
use crate::record::FileError;
use kernelgate_cuda::driver::launch::used::UsedKernels;

/// A process that goes through cases: of `cargo bench`, of its `--test` and `--profile-time`, or a
/// trial of a comparison.
pub trait Session {
    /// Draws or reads the inputs of a problem, and computes its reference unless its cases do.
    ///
    /// # Errors
    /// The reason why the problem has no results.
    fn prepare(&self, group: &Group<'_>, target: &Target) -> Result<PreparedProblem, CaseError>;

    /// Prepares and verifies an implementation.
    ///
    /// # Errors
    /// When it cannot run here, or is wrong.
    fn verify(
        &self,
        ready: &mut PreparedProblem,
        group: &Group<'_>,
        case: &Case,
        target: &Target,
    ) -> Result<Verified, CaseError> {
        ready.verify_once(group, case, target)
    }

    /// Takes the samples of all cases.
    fn sampler(&self) -> Sampler<'_>;

    /// Records outcomes, if this session has a record.
    ///
    /// # Errors
    /// When the file cannot be written.
    fn record(&self, event: Event<'_>) -> Result<(), FileError>;

    /// Ceilings of this machine, if they were measured.
    fn limits(&self) -> Option<&Limits> {
        None
    }

    /// Reason why no further case begins, once the time is over.
    fn out_of_time(&self) -> Option<String> {
        None
    }

    /// Whether device memory and the host's part of a launch are measured. A process of a
    /// comparison that measures times skips them to stay short.
    fn measures_costs(&self) -> bool {
        true
    }

    /// Kernels of the implementation that was prepared last, by which builds are compared.
    fn kernels(&self, _ready: &PreparedProblem) -> UsedKernels {
        UsedKernels::new()
    }
}
