//! Checks stored results in Criterion's store before Criterion reads them, because Criterion panics
//! on missing or invalid results.

use std::path::Path;

use serde_json::Value;

use crate::harness::error::HarnessError;
use crate::harness::selection::cases::SelectedAndSkippedCases;
use crate::record::RecordFoldersOfPackage;
use kernelgate_cuda::regular_file;

/// Checks for every selected case the stored Criterion results named `name`, if a name is given. If
/// `must` is true, a case without stored Criterion results of this name is an error.
///
/// # Errors
/// The error names the case without results, or the invalid file.
pub fn check_stored_criterion_baseline(
    store: &RecordFoldersOfPackage,
    selection: &SelectedAndSkippedCases<'_>,
    name: Option<&str>,
    must: bool,
) -> Result<(), HarnessError> {
    let Some(name) = name else { return Ok(()) };
    let safe = |text: &str| text.replace('/', "_").chars().take(64).collect::<String>();
    for group in &selection.problems_with_cases {
        for case in &group.cases {
            let folder = store
                .criterion_folder
                .join(safe(&group.workload_and_problem_id()))
                .join(safe(&case.criterion_function_name()))
                .join(name);
            let samples = folder.join("sample.json");
            if !samples.is_file() {
                if !must {
                    continue;
                }
                let (name, case) = (name.to_owned(), case.case_id.clone());
                return Err(HarnessError::MissingCriterionBaseline {
                    baseline_name: name,
                    case_id: case,
                });
            }
            let broken_baseline = |path: &Path, problem: String| {
                let (name, case, path) = (name.to_owned(), case.case_id.clone(), path.to_owned());
                HarnessError::BrokenCriterionBaseline {
                    baseline_name: name,
                    case_id: case,
                    broken_file: path,
                    file_fault: problem,
                }
            };
            check_criterion_sample_file(&samples)
                .map_err(|problem| broken_baseline(&samples, problem))?;
            let estimates = folder.join("estimates.json");
            check_criterion_estimate_file(&estimates)
                .map_err(|problem| broken_baseline(&estimates, problem))?;
        }
    }
    Ok(())
}

fn read_criterion_json(path: &Path) -> Result<Value, String> {
    let text =
        regular_file::read_file_unless_device_or_pipe(path).map_err(|cause| cause.to_string())?;
    serde_json::from_slice(&text).map_err(|cause| cause.to_string())
}

/// Checks that the file contains equally many iteration counts and times, at least two of each, all
/// above 0.
fn check_criterion_sample_file(path: &Path) -> Result<(), String> {
    let value = read_criterion_json(path)?;
    let list = |field: &str| -> Result<usize, String> {
        let values = value[field].as_array().ok_or_else(|| format!("no list `{field}`"))?;
        let all = values.iter().all(|value| value.as_f64().is_some_and(|value| value > 0.0));
        if all {
            Ok(values.len())
        } else {
            Err(format!("`{field}` holds what is no number above 0"))
        }
    };
    let (iterations, times) = (list("iters")?, list("times")?);
    if iterations != times || times < 2 {
        return Err(format!("{iterations} iteration counts and {times} times"));
    }
    match value["sampling_mode"].as_str() {
        Some("Linear" | "Flat") => Ok(()),
        _ => Err("`sampling_mode` is neither Linear nor Flat".to_owned()),
    }
}

fn check_criterion_estimate_file(path: &Path) -> Result<(), String> {
    let value = read_criterion_json(path)?;
    let missing = ["mean", "median", "median_abs_dev", "std_dev"]
        .into_iter()
        .find(|name| value[*name]["point_estimate"].as_f64().is_none());
    missing.map_or(Ok(()), |name| Err(format!("no estimate `{name}`")))
}
