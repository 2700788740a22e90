//! A trial: one of the many short processes of a comparison. It verifies and times as a bench
//! process does, but measures no ceilings, prints no table and leaves Criterion's store alone; what
//! it is to do stands in its [`TrialRequest`], where it went wrong in its run.
//!
//! Verified, then timed: the first process of an executable compares every case with the reference
//! and records the bits of its outputs. A later process of the same executable launches once on
//! poisoned outputs; where the bits are the same they are verified, and where they are not (sums in
//! no fixed order) it compares with the reference itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::harness::error::HarnessError;
use crate::harness::selection::cases::Selection;
use crate::harness::selection::filter::Filter;
use crate::harness::settings::args::Flags;
use crate::measure::delay::Delay;
use crate::record::run::VerificationRecord;
use crate::record::{ProcessRun, TrialRequest, TrialSampling, file, tensors};
use crate::workload::Tensors;

/// What a process that carries out a trial request knows besides its flags.
pub struct TrialState {
    /// How long to time.
    pub sampling: TrialSampling,
    /// The run that verified this executable.
    pub verified: Option<ProcessRun>,
    /// Folder of inputs drawn earlier.
    pub inputs: Option<PathBuf>,
    /// Outputs of builds that no reference verifies.
    pub outputs: BuildOutputs,
}

/// Outputs of one build as the reference of another, by case: folders.
#[derive(Debug, Clone, Default)]
pub struct BuildOutputs {
    /// Where this build's are left.
    pub keep: Option<PathBuf>,
    /// Where the base's are.
    pub base: Option<PathBuf>,
    /// Whether this build's outputs are left of verified cases too: for another build that cannot
    /// verify them.
    pub keep_verified: bool,
}

impl BuildOutputs {
    fn file(folder: &Path, id: &str) -> PathBuf {
        folder.join(format!("{}.tensors", file::text_hash(id)))
    }

    /// Leaves a case's outputs where they are wanted. Where they cannot be written, the other
    /// build's are unverified.
    pub fn leave(&self, id: &str, outputs: &Tensors) {
        if let Some(folder) = &self.keep {
            let _ = std::fs::create_dir_all(folder)
                .and_then(|()| tensors::write(&Self::file(folder, id), outputs));
        }
    }

    /// Leaves the outputs of a case that the reference verified, where the other build asks for it.
    pub fn leave_verified(&self, id: &str, outputs: &Tensors) {
        if self.keep_verified {
            self.leave(id, outputs);
        }
    }

    /// The base's outputs of a case.
    pub fn of_base(&self, id: &str) -> Option<Tensors> {
        tensors::read(&Self::file(self.base.as_deref()?, id))
    }
}

impl TrialState {
    /// Whether times count; else the process only verifies.
    pub fn measures(&self) -> bool {
        self.sampling != TrialSampling::VERIFICATION_PASS
    }

    /// What an earlier process found of a case, if it was compared with the reference there.
    pub fn known(&self, id: &str) -> Option<VerificationRecord> {
        let run = self.verified.as_ref()?;
        let found = &run.cases.get(id)?.verification;
        Some(VerificationRecord {
            by: Some(found.by.clone().unwrap_or_else(|| run.key())),
            ..found.clone()
        })
    }
}

/// The trial request in that file.
///
/// # Errors
/// When it is missing, broken, or of a newer protocol.
pub fn read_request(path: &Path) -> Result<TrialRequest, HarnessError> {
    Ok(file::read(path)?)
}

/// The filter of a trial request; the flags' where it names no cases.
///
/// # Errors
/// When the flags' filter is no regular expression.
pub fn filter(request: &TrialRequest, flags: &Flags) -> Result<Filter, HarnessError> {
    match request.cases.clone() {
        Some(cases) => Ok(Filter::OneOf(cases)),
        None => flags.filter(),
    }
}

/// The delays of the selected cases.
pub fn delays(flags: &Flags, selection: &Selection<'_>) -> BTreeMap<String, u64> {
    let ids = selection.groups.iter().flat_map(|group| &group.cases).map(|case| &case.id);
    ids.filter_map(|id| Some((id.clone(), Delay::of(&flags.delay, id)?.delay_ns))).collect()
}

/// Says that launches are delayed.
pub fn warn_of_delays(run: &ProcessRun) {
    if !run.delays.is_empty() {
        eprintln!(
            "warning: launches are delayed on purpose (KERNELGATE_DELAY), nanoseconds: {}",
            run.delays_text()
        );
    }
}
