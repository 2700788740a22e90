//! A trial is one of the many short processes that a comparison of two builds runs. A trial
//! verifies and times like `cargo bench`, but it measures no ceilings, prints no table and does not
//! use Criterion's store. The [`TrialRequestToBench`] lists what the trial must do; the trial's run
//! record contains its failures.
//!
//! The first process of an executable compares every case with its reference and records the digest
//! of the outputs. A later process of the same executable launches once on poisoned outputs and
//! compares digests. Equal digests verify the outputs; if digests differ, as for sums in
//! nondeterministic order, the process compares with the reference itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::harness::selection::cases::SelectedAndSkippedCases;
use crate::harness::selection::filter::CaseIdFilter;
use crate::harness::settings::BenchSettings;
use crate::measure::delay::InjectedLaunchDelay;
use crate::record::{BenchProcessRun, TrialRequestToBench, file, tensors};
use crate::workload::Tensors;

/// Folders through which base and head exchange outputs by case, if no reference verifies them.
#[derive(Debug, Clone, Default)]
pub struct OutputsExchangedBetweenBuilds {
    /// Folder in which this build's outputs are saved; `None` if they are not needed.
    pub folder_to_save: Option<PathBuf>,
    /// Folder with the base's outputs.
    pub folder_of_base_outputs: Option<PathBuf>,
    /// Whether outputs are also saved if a reference verified them, because the other build cannot
    /// verify its own.
    pub saves_verified_outputs: bool,
}

impl OutputsExchangedBetweenBuilds {
    fn path_of_case_outputs(folder: &Path, id: &str) -> PathBuf {
        folder.join(format!("{}.tensors", file::text_hash_hex(id)))
    }

    /// Saves the outputs of a case, if the comparison needs them. If writing fails, the other
    /// build's outputs stay unverified.
    pub fn save_outputs_if_needed(&self, id: &str, outputs: &Tensors) {
        if let Some(folder) = &self.folder_to_save {
            let _ = std::fs::create_dir_all(folder).and_then(|()| {
                tensors::write_tensor_file_atomically(
                    &Self::path_of_case_outputs(folder, id),
                    outputs,
                )
            });
        }
    }

    /// Saves the outputs of a case that a reference verified, if the other build needs them.
    pub fn save_verified_outputs_if_needed(&self, id: &str, outputs: &Tensors) {
        if self.saves_verified_outputs {
            self.save_outputs_if_needed(id, outputs);
        }
    }

    /// Reads the base's outputs of a case; `None` if the base has no readable outputs of this case.
    pub fn read_base_outputs(&self, id: &str) -> Option<Tensors> {
        tensors::read_tensor_file(&Self::path_of_case_outputs(
            self.folder_of_base_outputs.as_deref()?,
            id,
        ))
    }
}

/// Selects the cases that the trial request names; if it names none, uses the filter of the command
/// line.
pub fn case_filter_of_trial_request(
    request: &TrialRequestToBench,
    settings: &BenchSettings,
) -> CaseIdFilter {
    request.case_ids_to_run.clone().map_or_else(|| settings.filter.clone(), CaseIdFilter::AnyOfIds)
}

/// Artificial delays in nanoseconds of the selected cases, by case id.
pub fn injected_delays_by_case(
    settings: &BenchSettings,
    selection: &SelectedAndSkippedCases<'_>,
) -> BTreeMap<String, u64> {
    let ids = selection
        .problems_with_cases
        .iter()
        .flat_map(|group| &group.cases)
        .map(|case| &case.case_id);
    ids.filter_map(|id| {
        Some((id.clone(), InjectedLaunchDelay::find_delay_for_case(&settings.delays, id)?.delay_ns))
    })
    .collect()
}

/// Prints a warning if launches have artificial delays.
pub fn print_warning_of_injected_delays(run: &BenchProcessRun) {
    if !run.injected_delays_ns.is_empty() {
        eprintln!(
            "warning: launches are delayed on purpose (KERNELGATE_DELAY), nanoseconds: {}",
            run.injected_delays_as_text()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_of_cases_with_similar_ids_are_stored_separately() {
        let folder = tempfile::tempdir().unwrap();
        let keep = Some(folder.path().to_owned());
        let outputs = OutputsExchangedBetweenBuilds {
            folder_of_base_outputs: keep.clone(),
            folder_to_save: keep,
            saves_verified_outputs: false,
        };
        let long = "x/".repeat(499);
        let ids = ["a/b_c", "a_b/c", &long];
        let tensors = |value: usize| Tensors::new().with_tensor("y", [1], vec![value as f32]);
        for (index, id) in ids.iter().enumerate() {
            outputs.save_outputs_if_needed(id, &tensors(index));
            outputs.save_verified_outputs_if_needed(id, &tensors(9));
        }
        for (index, id) in ids.iter().enumerate() {
            assert_eq!(outputs.read_base_outputs(id), Some(tensors(index)), "{id}");
        }
    }
}
