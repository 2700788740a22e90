//! A trial: one of the many short processes of a comparison. A trial verifies and times as a bench
//! process does, but measures no ceilings, prints no table and does not use Criterion's store. The
//! [`TrialRequest`] lists the work of a trial, and its run record lists its failures.
//!
//! The first process of an executable compares every case with the reference and records the bits
//! of its outputs. A later process of the same executable launches once on poisoned outputs. If the
//! digests are equal, the outputs are verified; if they differ, as with sums in no fixed order, the
//! process compares with the reference itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::harness::selection::cases::CaseSelectionResult;
use crate::harness::selection::filter::CaseFilter;
use crate::harness::settings::BenchSettings;
use crate::measure::delay::InjectedDelay;
use crate::record::{ProcessRun, TrialRequest, file, tensors};
use crate::workload::Tensors;

/// Outputs of one build as the reference of another, by case: folders.
#[derive(Debug, Clone, Default)]
pub struct BuildOutputs {
    /// Folder in which the outputs of this build are saved; `None` if they are not needed.
    pub keep: Option<PathBuf>,
    /// Folder that holds the base build's outputs.
    pub base: Option<PathBuf>,
    /// Whether verified outputs are saved too, because the other build cannot verify its own.
    pub keep_verified: bool,
}

impl BuildOutputs {
    fn outputs_file(folder: &Path, id: &str) -> PathBuf {
        folder.join(format!("{}.tensors", file::text_hash(id)))
    }

    /// Saves the outputs of a case if a comparison asks for them. If the outputs cannot be written,
    /// the other build's outputs stay unverified.
    pub fn save(&self, id: &str, outputs: &Tensors) {
        if let Some(folder) = &self.keep {
            let _ = std::fs::create_dir_all(folder)
                .and_then(|()| tensors::write(&Self::outputs_file(folder, id), outputs));
        }
    }

    /// Saves the verified outputs of a case, if the other build needs them.
    pub fn save_verified_outputs(&self, id: &str, outputs: &Tensors) {
        if self.keep_verified {
            self.save(id, outputs);
        }
    }

    /// Reads the base's outputs of a case.
    pub fn base_outputs(&self, id: &str) -> Option<Tensors> {
        tensors::read(&Self::outputs_file(self.base.as_deref()?, id))
    }
}

/// The case filter of a trial request; the filter of the flags if the request names no cases.
pub fn trial_case_filter(request: &TrialRequest, settings: &BenchSettings) -> CaseFilter {
    request.cases.clone().map_or_else(|| settings.filter.clone(), CaseFilter::OneOf)
}

/// Returns the injected delays of the selected cases, by case.
pub fn injected_delays(
    settings: &BenchSettings,
    selection: &CaseSelectionResult<'_>,
) -> BTreeMap<String, u64> {
    let ids = selection.groups.iter().flat_map(|group| &group.cases).map(|case| &case.id);
    ids.filter_map(|id| {
        Some((id.clone(), InjectedDelay::find_for_case(&settings.delays, id)?.delay_ns))
    })
    .collect()
}

/// Prints a warning that launches are delayed on purpose.
pub fn warn_of_injected_delays(run: &ProcessRun) {
    if !run.delays.is_empty() {
        eprintln!(
            "warning: launches are delayed on purpose (KERNELGATE_DELAY), nanoseconds: {}",
            run.delays_text()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_of_two_cases_are_stored_apart_whatever_their_ids() {
        let folder = tempfile::tempdir().unwrap();
        let keep = Some(folder.path().to_owned());
        let outputs = BuildOutputs { base: keep.clone(), keep, keep_verified: false };
        let long = "x/".repeat(499);
        let ids = ["a/b_c", "a_b/c", &long];
        let tensors = |value: usize| Tensors::new().with("y", [1], vec![value as f32]);
        for (index, id) in ids.iter().enumerate() {
            outputs.save(id, &tensors(index));
            outputs.save_verified_outputs(id, &tensors(9));
        }
        for (index, id) in ids.iter().enumerate() {
            assert_eq!(outputs.base_outputs(id), Some(tensors(index)), "{id}");
        }
    }
}
