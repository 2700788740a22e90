//! Checks Criterion's stored results before Criterion reads them, because Criterion panics on a
//! result that is missing or invalid.

use std::path::Path;

use serde_json::Value;

use crate::harness::error::HarnessError;
use crate::harness::selection::cases::CaseSelectionResult;
use crate::record::BaselineStore;
use kernelgate_cuda::regular_file;

/// Checks the stored results of that name, if one is given, for every selected case. `must` is the
/// file that every case must have.
///
/// # Errors
/// The error names the case whose result is missing, or the invalid file.
pub fn check_stored_baseline(
    store: &BaselineStore,
    selection: &CaseSelectionResult<'_>,
    name: Option<&str>,
    must: bool,
) -> Result<(), HarnessError> {
    let Some(name) = name else { return Ok(()) };
    let safe = |text: &str| text.replace('/', "_").chars().take(64).collect::<String>();
    for group in &selection.groups {
        for case in &group.cases {
            let folder = store
                .criterion
                .join(safe(&group.id()))
                .join(safe(&case.criterion_function_name()))
                .join(name);
            let samples = folder.join("sample.json");
            if !samples.is_file() {
                if !must {
                    continue;
                }
                let (name, case) = (name.to_owned(), case.id.clone());
                return Err(HarnessError::NoCriterionBaseline { name, case });
            }
            let broken_baseline = |path: &Path, problem: String| {
                let (name, case, path) = (name.to_owned(), case.id.clone(), path.to_owned());
                HarnessError::BrokenCriterionBaseline { name, case, path, problem }
            };
            check_criterion_samples(&samples)
                .map_err(|problem| broken_baseline(&samples, problem))?;
            let estimates = folder.join("estimates.json");
            check_criterion_estimates(&estimates)
                .map_err(|problem| broken_baseline(&estimates, problem))?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Value, String> {
    let text = regular_file::read_regular_file(path).map_err(|cause| cause.to_string())?;
    serde_json::from_slice(&text).map_err(|cause| cause.to_string())
}

/// Checks that there are as many iteration counts as times, two or more, all above 0.
fn check_criterion_samples(path: &Path) -> Result<(), String> {
    let value = read(path)?;
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

fn check_criterion_estimates(path: &Path) -> Result<(), String> {
    let value = read(path)?;
    let missing = ["mean", "median", "median_abs_dev", "std_dev"]
        .into_iter()
        .find(|name| value[*name]["point_estimate"].as_f64().is_none());
    missing.map_or(Ok(()), |name| Err(format!("no estimate `{name}`")))
}
