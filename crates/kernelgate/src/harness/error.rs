//! The error with which a bench executable stops.

use std::path::PathBuf;

use crate::backend::BackendError;
use crate::harness::panic_guard::CaughtPanicMessage;
use crate::record::RecordFileError;
use crate::record::provenance::InvalidCommitVariable;
use crate::record::store::RecordLookupError;
use crate::workload::AxisError;
use kernelgate_cuda::driver::device::GpuUnusableError;

/// The error with which a bench executable stops.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// The value of a flag is outside its range.
    #[error("{flag} takes {accepted_values}")]
    FlagValueOutOfRange {
        /// The flag.
        flag: &'static str,
        /// Values that the flag accepts.
        accepted_values: &'static str,
    },
    /// A run with artificial delays must not save a baseline.
    #[error("--save-baseline takes no run with {flag}")]
    BaselineOfDelayedRun {
        /// The flag that adds the delays, with its environment variable.
        flag: &'static str,
    },
    /// The environment contains a request of the program `kernelgate`, but the process is not a
    /// bench run.
    #[error("KERNELGATE_REQUEST is for processes that `kernelgate` runs: unset it")]
    RequestOutsideBenchRun,
    /// Gnuplot was requested for charts, but it is not installed.
    #[error("--plotting-backend gnuplot: gnuplot is not installed")]
    GnuplotNotInstalled,
    /// The session name is not a plain file name.
    #[error("KERNELGATE_SESSION=`{session_name}` is no plain file name")]
    InvalidSessionName {
        /// The session name that caused the error.
        session_name: String,
    },
    /// An earlier invocation has used the same session name.
    #[error(
        "KERNELGATE_SESSION={session_name}: an earlier run of that name is in {}: choose another name, \
         or remove it", .earlier_record_path.display()
    )]
    SessionNameTaken {
        /// The session name that caused the error.
        session_name: String,
        /// Path of the record that the earlier invocation wrote.
        earlier_record_path: PathBuf,
    },
    /// The environment variable `KERNELGATE_COMMIT` is not a commit id.
    #[error(transparent)]
    Commit(#[from] InvalidCommitVariable),
    /// The filter is not a regular expression.
    #[error("filter `{case_filter}` is not a regular expression: {regex_fault}")]
    InvalidCaseFilter {
        /// The case filter that caused the error.
        case_filter: String,
        /// Fault of the value, as a fragment of a sentence.
        regex_fault: String,
    },
    /// The filter on the command line matches no case.
    #[error("no case matches `{}`; {}", shorten_for_message(.case_filter), suggestion_after_unmatched_filter(.similar_case_ids))]
    FilterMatchesNoCase {
        /// The case filter that caused the error.
        case_filter: String,
        /// Case ids that are similar to the filter.
        similar_case_ids: Vec<String>,
    },
    /// The command line sets an axis that no workload has.
    #[error("no workload has an axis `{unknown_axis}`; axes are {}", .known_axis_names.join(", "))]
    UnknownAxis {
        /// Name of the axis on the command line that no workload has.
        unknown_axis: String,
        /// Names of the axes of all workloads.
        known_axis_names: Vec<&'static str>,
    },
    /// The command line gives an axis a value that the axis does not accept.
    #[error(transparent)]
    Axis(#[from] AxisError),
    /// No case has the combination of axis values that the command line gives.
    #[error(
        "no case has the axes {} together; `kernelgate list` shows the axes of each workload",
        .axis_assignments.join(" ")
    )]
    NoCaseWithAxisValues {
        /// `axis=value,value` each.
        axis_assignments: Vec<String>,
    },
    /// The name of a bench, workload, axis or implementation contains characters that a case id
    /// must not contain.
    #[error("{named_thing} {name_fault}")]
    InvalidDeclaredName {
        /// The named thing: "the bench's name", "gemm/f32: the axis".
        named_thing: String,
        /// The invalid name, and why it is invalid.
        name_fault: String,
    },
    /// Two cases of the bench have the same id.
    #[error("two cases have the id {case_id}")]
    DuplicateCaseId {
        /// The id.
        case_id: String,
    },
    /// A workload declares impossible work, such as a number of operations that overflows.
    #[error("{problem_id}: declared work: {work_fault}")]
    ImpossibleDeclaredWork {
        /// Id of the problem.
        problem_id: String,
        /// Fault of the value, as a fragment of a sentence.
        work_fault: String,
    },
    /// A workload rejects axis values that its own default selection contains.
    #[error("{problem_id}: {rejection}")]
    DefaultAxisValuesRejected {
        /// Id of the problem.
        problem_id: String,
        /// The workload's reason.
        rejection: AxisError,
    },
    /// None of the cases that the user named can run on this machine.
    #[error("nothing of what was asked for can run here: {first_case_id}: {skip_reason}")]
    NoNamedCaseCanRun {
        /// Id of the first named case.
        first_case_id: String,
        /// Reason why the first named case is skipped.
        skip_reason: String,
    },
    /// No GPU of this machine is usable.
    #[error("no GPU to run on: {0}")]
    NoGpu(GpuUnusableError),
    /// Criterion's store has no baseline of this name for a case.
    #[error(
        "Criterion has no baseline `{baseline_name}` of {case_id}: save one with --save-baseline {baseline_name}, or \
         narrow the filter"
    )]
    MissingCriterionBaseline {
        /// Name of the baseline.
        baseline_name: String,
        /// The case.
        case_id: String,
    },
    /// A file of Criterion's baseline is invalid.
    #[error(
        "Criterion's baseline `{baseline_name}` of {case_id} is broken ({}: {file_fault}): remove it, or save it \
         again", .broken_file.display()
    )]
    BrokenCriterionBaseline {
        /// Name of the baseline.
        baseline_name: String,
        /// The case.
        case_id: String,
        /// Path of the file that caused the error.
        broken_file: PathBuf,
        /// Fault of the value, as a fragment of a sentence.
        file_fault: String,
    },
    /// The handler for Ctrl-C and termination signals cannot be installed.
    #[error("failed to watch for Ctrl-C: {0}")]
    InterruptHandlerNotInstalled(Box<dyn std::error::Error + Send + Sync>),
    /// The harness panicked.
    #[error("internal error, please report it: {0}")]
    Panic(CaughtPanicMessage),
    /// The GPU failed before the first case.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A record or baseline file could not be read or written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// The run was recorded, but could not be saved as the requested baseline.
    #[error(
        "{cause}: the run is kept, and `kernelgate baseline add {baseline_name} --session \
         {session_folder_name}` adds it"
    )]
    BaselineNotSaved {
        /// Why not.
        cause: Box<RecordFileError>,
        /// The baseline.
        baseline_name: String,
        /// Name of the session folder that contains the run's record.
        session_folder_name: String,
    },
    /// A baseline file is unusable, or a baseline name is invalid.
    #[error(transparent)]
    Store(#[from] RecordLookupError),
}

/// Maximum length of a filter that is compared with case ids and shown in messages; comparing costs
/// the product of both lengths.
pub const MAX_COMPARED_FILTER_CHARACTERS: usize = 200;

/// Shortens a text to 200 characters for an error message, and adds its length in bytes.
pub fn shorten_for_message(text: &str) -> String {
    match text.char_indices().nth(MAX_COMPARED_FILTER_CHARACTERS) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// Suggests similar case ids, or `--list`, after a filter that matches no case.
fn suggestion_after_unmatched_filter(suggestions: &[String]) -> String {
    match suggestions {
        [] => "`--list` shows the cases".to_owned(),
        close => format!("did you mean {}?", close.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_filter_is_cut_between_characters() {
        let (filter, suggestions) = ("é".repeat(1000), Vec::new());
        let message = HarnessError::FilterMatchesNoCase {
            case_filter: filter,
            similar_case_ids: suggestions,
        }
        .to_string();
        let cut = format!("`{}… (2000 bytes)`", "é".repeat(MAX_COMPARED_FILTER_CHARACTERS));
        assert_eq!(message, format!("no case matches {cut}; `--list` shows the cases"));
    }
}
